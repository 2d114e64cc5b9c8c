"""torch's fused operators of symmetric memory by this library's kernels, for the process groups that are named.

torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter are what torch.compile puts into a
tensor-parallel model where torch._inductor.config._micro_pipeline_tp is set (asynchronous tensor parallelism, as in
torchtitan), and what programs such as vLLM call by name. Their signatures, shapes and strides stay what they are, and
so do torch's fake implementations, which compilers ask.
"""

import contextlib
import threading
import warnings

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as torch_symm_mem
from torch.distributed.device_mesh import DeviceMesh

import tkernels
from tkernels.comm import Context
from tkernels.comm.context import as_context
from tkernels.gemm import DTYPES
from tkernels.layers.doors import log_once

_contexts: dict[str, list[Context]] = {}  # by the name of a process group, the newest last
_library: torch.library.Library | None = None  # our kernels, while there are contexts
_lock = threading.Lock()


def install(*meshes: DeviceMesh | dist.ProcessGroup | Context | None) -> contextlib.ExitStack:
    """Collective over the ranks of each mesh. Calls of torch's operators on these process groups then run here.

    meshes: of one dimension, process groups or contexts; with none, the current context. Contexts are the newest open
        ones over those ranks, or are made now, so that a call needs no set-up. As torch's operators are called by the
        name of a process group, pass the mesh or group that the program uses.

    A call that these kernels don't have goes to torch's implementation, and the log names it once: the last dimension
    gathered or scattered, another dtype, another group, a length that doesn't divide by the ranks.
    torch.compile's pass takes the groups as enabled (`is_symm_mem_enabled_for_group`).

    Returns what undoes it, by `close()` or as a `with` block, in any order where several are open. Raises TypeError or
    ValueError for what names no ranks.
    """
    named = []
    for mesh in meshes or (None,):
        ctx = as_context(mesh)
        group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        group = group if isinstance(group, dist.ProcessGroup) else ctx.group.process_group
        if group is None:
            raise ValueError(f"install: {ctx} has no process group of torch.distributed, whose name calls would give")
        ctx.group.gather(None)
        named.append((group.group_name, ctx))
    undo = contextlib.ExitStack()
    for name, ctx in named:
        _add(name, ctx)
        undo.callback(_remove, name, ctx)
    return undo


def _add(name: str, ctx: Context):
    global _library
    with _lock:
        _contexts.setdefault(name, []).append(ctx)
        torch_symm_mem._group_name_to_store.setdefault(name, None)  # torch.compile's pass leaves out other groups
        if _library is None:
            _library = torch.library.Library("symm_mem", "IMPL")
            key = ctx.device.type.upper()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a kernel of torch's is overridden
                override = {"dispatch_key": key, "allow_override": True}  # torch 2.13's default, not 2.11's
                _library.impl("fused_all_gather_matmul", _fused_all_gather_matmul, **override)
                _library.impl("fused_matmul_reduce_scatter", _fused_matmul_reduce_scatter, **override)


def _remove(name: str, ctx: Context):
    global _library
    with _lock:
        _contexts[name].remove(ctx)
        if not _contexts[name]:
            del _contexts[name]
            if torch_symm_mem._group_name_to_store[name] is None:
                del torch_symm_mem._group_name_to_store[name]
        if not _contexts:
            _library._destroy()  # the kernels from before are called again
            _library = None


def _fused_all_gather_matmul(A, Bs, gather_dim, group_name, *, return_A=True):
    """torch's: A [..., K] gathered in `gather_dim`, and its product with each B [K, N]."""
    ctx = _context("fused_all_gather_matmul", group_name, A, Bs, gather_dim)
    if ctx is None:
        torchs = torch_symm_mem._fused_all_gather_matmul
        torchs = torchs if A.is_cuda else torch_symm_mem._fused_all_gather_matmul_fallback
        return torchs(A, Bs, gather_dim, group_name, return_A=return_A)
    with torch.no_grad():
        ws = [_weight(B) for B in Bs]
        ys = tkernels.all_gather_matmul(A, ws, None, None, return_A, gather_dim=gather_dim, ctx=ctx)
    return (ys[1], ys[0]) if return_A else (None, ys)


def _fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name):
    """torch's: this rank's part in `scatter_dim` of the sum or mean over ranks of A [..., K] @ B [K, N]."""
    ctx = _context("fused_matmul_reduce_scatter", group_name, A, [B], scatter_dim, reduce_op)
    if ctx is None:
        torchs = torch_symm_mem._fused_matmul_reduce_scatter
        torchs = torchs if A.is_cuda else torch_symm_mem._fused_matmul_reduce_scatter_fallback
        return torchs(A, B, reduce_op, scatter_dim, group_name)
    with torch.no_grad():
        y = tkernels.matmul_reduce_scatter(A, _weight(B), scatter_dim=scatter_dim, ctx=ctx)
        return y.div_(ctx.size) if reduce_op == "avg" else y


def _context(name: str, group: str, A, Bs, dim: int, reduce_op: str | None = None) -> Context | None:
    """The context of a call, or None if it stays torch's. All ranks decide alike: by what they have alike."""
    found = _contexts.get(group)
    ctx = found[-1] if found else None
    if ctx is None:
        reason = f"group {group!r} is not among the installed ones: {', '.join(_contexts) or 'none'}"
    elif not 0 <= dim < A.dim() - 1:
        reason = f"dimension {dim} of {A.dim()} is not one of those before the last"
    elif A.dtype not in DTYPES or any(B.dtype != A.dtype for B in Bs):
        dtypes = ", ".join(sorted({str(each.dtype) for each in (A, *Bs)}))
        reason = f"operands are {dtypes}, and not one of float32, float16 and bfloat16"
    elif not Bs or any(B.dim() != 2 or B.device != A.device for B in Bs) or A.device != ctx.device:
        reason = f"operands are not matrices on {ctx.device}"
    elif reduce_op not in (None, "sum", "avg"):
        reason = f"reduce_op={reduce_op!r} is neither sum nor avg"
    elif reduce_op and A.shape[dim] % ctx.size:
        reason = f"a length of {A.shape[dim]} doesn't divide by {ctx.size} ranks"
    else:
        return ctx
    log_once(f"symm_mem.{name} is torch's own in a call, as {reason}")
    return None


def _weight(B: torch.Tensor) -> torch.Tensor:
    """B [K, N] as operations take a weight [N, K]: a view, unless neither dimension is dense."""
    return (B if 1 in B.stride() or B.numel() == 0 else B.contiguous()).t()
