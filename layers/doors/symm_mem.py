"""torch's fused operators of symmetric memory by this library's kernels, for the process groups that are named.

torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, and in FP8 fused_all_gather_scaled_matmul
and fused_scaled_matmul_reduce_scatter, are what torch.compile puts into a tensor-parallel model where
torch._inductor.config._micro_pipeline_tp is set (asynchronous tensor parallelism, as in torchtitan), and what programs
such as vLLM call by name. Their signatures, shapes and strides stay what they are, and so do torch's fake
implementations, which compilers ask.
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
from tkernels.configs import DTYPES, FP8
from tkernels.layers.doors import log_once
from tkernels.leading import Leading

_contexts: dict[str, list[Context]] = {}  # by the name of a process group, the newest last
_library: torch.library.Library | None = None  # our kernels, while there are contexts
_lock = threading.Lock()


def install(*meshes: DeviceMesh | dist.ProcessGroup | Context | None) -> contextlib.ExitStack:
    """Collective over the ranks of each mesh. Calls of torch's operators on these process groups then run here.

    meshes: of one dimension, process groups or contexts; with none, the current context. Contexts are the newest open
        ones over those ranks, or are made now, so that a call needs no set-up. As torch's operators are called by the
        name of a process group, pass the mesh or group that the program uses.

    A call that these kernels don't have goes to torch's implementation, and the log names it once: the last dimension
    gathered or scattered, another dtype, another group, a length that doesn't divide by the ranks; of FP8 also a result
    in FP8 or with a scale, K that is no multiple of 16 or not contiguous in both operands, and the bias of a reduction,
    which torch adds on every rank before the sum.
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
                for name, implementation in _IMPLEMENTATIONS.items():
                    _library.impl(name, implementation, **override)


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
        return _torchs("fused_all_gather_matmul", A)(A, Bs, gather_dim, group_name, return_A=return_A)
    with torch.no_grad():
        ws = [B.t() for B in Bs]
        ys = tkernels.all_gather_matmul(A, ws, None, None, return_A, gather_dim=gather_dim, ctx=ctx)
    return (ys[1], ys[0]) if return_A else (None, ys)


def _fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name):
    """torch's: this rank's part in `scatter_dim` of the sum or mean over ranks of A [..., K] @ B [K, N]."""
    ctx = _context("fused_matmul_reduce_scatter", group_name, A, [B], scatter_dim, reduce_op)
    if ctx is None:
        return _torchs("fused_matmul_reduce_scatter", A)(A, B, reduce_op, scatter_dim, group_name)
    with torch.no_grad():
        y = tkernels.matmul_reduce_scatter(A, B.t(), scatter_dim=scatter_dim, ctx=ctx)
        return y.div_(ctx.size) if reduce_op == "avg" else y


def _fused_all_gather_scaled_matmul(
    A, Bs, A_scale, B_scales, gather_dim, group_name, biases, result_scales, out_dtypes, use_fast_accum
):
    """torch's: A [..., K] in FP8 gathered in `gather_dim`, and its product with each B [K, N], with scales and biases.

    A_scale: one number, the same on all ranks; or one a row, of this rank's rows or of all rows [..., 1].
    """
    name = "fused_all_gather_scaled_matmul"
    out_dtypes = torch_symm_mem._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    ctx = _context(name, group_name, A, Bs, gather_dim, scaled=_unscalable(A, Bs, result_scales, out_dtypes))
    if ctx is None:
        return _torchs(name, A)(
            A, Bs, A_scale, B_scales, gather_dim, group_name, biases, result_scales, out_dtypes, use_fast_accum
        )
    own, length = A.shape[:-1], A.shape[gather_dim]
    whole = (*own[:gather_dim], length * ctx.size, *own[gather_dim + 1 :])
    _check_scale(name, A_scale, own, whole)
    if A_scale.numel() != 1 and A_scale.shape[:-1] != own:
        A_scale = A_scale.narrow(gather_dim, ctx.rank * length, length)
    lead = Leading.of(name, A, "gather_dim", gather_dim)
    x, scale, rows = lead.matrix(A), lead.scale(A_scale), lead.rows((length,) * ctx.size)
    each = zip(Bs, B_scales, biases, out_dtypes, use_fast_accum, strict=True)
    ws = [(B.t(), bias, {"w_scale": b, "out_dtype": out, "fast_accum": fast}) for B, b, bias, out, fast in each]
    with torch.no_grad():
        (w, bias, options), *others = ws
        options |= {"return_gathered": True, "rows": rows, "ctx": ctx}
        y, gathered, scales = tkernels.all_gather_matmul(x, w, bias, x_scale=scale, **options)
        ys = [y] + [tkernels.matmul(gathered, w, bias, x_scale=scales, **options) for w, bias, options in others]
    return lead.back(gathered, length * ctx.size), [lead.back(y, length * ctx.size) for y in ys]


def _fused_scaled_matmul_reduce_scatter(
    A, B, A_scale, B_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape, group_name, output_shape,
    bias=None, result_scale=None, out_dtype=None, use_fast_accum=False,
):  # fmt: skip
    """torch's: this rank's part of the sum or mean over ranks of A [..., K] @ B [K, N] in FP8, with this rank's scales.

    orig_scatter_dim: of the product as `output_shape` has it.
    """
    name = "fused_scaled_matmul_reduce_scatter"
    leading = A.shape[:-1] if output_shape is None else output_shape[:-1]
    whole = A.reshape(*leading, A.shape[-1])
    beyond = _unscalable(A, [B], [result_scale], [out_dtype])
    if bias is not None and not beyond:
        beyond = "torch's adds a bias on every rank before the sum"
    if A_scale.shape[:-1] == A.shape[:-1] and A_scale.shape[-1] != 1 and not beyond:
        beyond = f"A_scale {list(A_scale.shape)} has several numbers a row"
    ctx = _context(name, group_name, whole, [B], orig_scatter_dim, reduce_op, beyond)
    if ctx is None:
        return _torchs(name, A)(
            A, B, A_scale, B_scale, reduce_op, orig_scatter_dim, scatter_dim_after_maybe_reshape, group_name,
            output_shape, bias, result_scale, out_dtype, use_fast_accum,
        )  # fmt: skip
    _check_scale(name, A_scale, A.shape[:-1])
    A_scale = A_scale if A_scale.numel() == 1 else A_scale.reshape(*leading, 1)
    wire = torch.float32 if out_dtype == torch.float32 else None  # torch sends partial sums in the dtype of the result
    with torch.no_grad():
        y = tkernels.matmul_reduce_scatter(
            whole, B.t(), x_scale=A_scale, w_scale=B_scale, scatter_dim=orig_scatter_dim, out_dtype=out_dtype,
            wire_dtype=wire, fast_accum=use_fast_accum, ctx=ctx,
        )  # fmt: skip
        return y.div_(ctx.size) if reduce_op == "avg" else y


_IMPLEMENTATIONS = {
    "fused_all_gather_matmul": _fused_all_gather_matmul,
    "fused_matmul_reduce_scatter": _fused_matmul_reduce_scatter,
    "fused_all_gather_scaled_matmul": _fused_all_gather_scaled_matmul,
    "fused_scaled_matmul_reduce_scatter": _fused_scaled_matmul_reduce_scatter,
}


def _torchs(name: str, A):
    """torch's own implementation."""
    return getattr(torch_symm_mem, f"_{name}" if A.is_cuda else f"_{name}_fallback")


def _check_scale(name: str, scale, *leading):
    """Raises ValueError, as torch does, on every rank, unless it is one number, or one a row of such leading sizes."""
    shapes = [(*sizes, 1) for sizes in leading]
    if scale.numel() != 1 and tuple(scale.shape) not in shapes:
        raise ValueError(
            f"{name}: A_scale is {tuple(scale.shape)}, but must be one number, or one a row: "
            f"{' or '.join(map(str, shapes))}"
        )


def _unscalable(A, Bs, result_scales, out_dtypes) -> str:
    """Why a product of FP8 is not one of ours, or an empty text."""
    operands = [(A.dtype, B.dtype) for B in Bs]
    e5m2 = torch.float8_e5m2
    if any(each not in FP8 for pair in operands for each in pair) or (e5m2, e5m2) in operands:
        dtypes = ", ".join(sorted({str(each) for pair in operands for each in pair}))
        return f"operands are {dtypes}, and not float8_e4m3fn, or one of each product float8_e5m2"
    if any(scale is not None for scale in result_scales) or any(dtype not in DTYPES for dtype in out_dtypes):
        return f"results are {', '.join(map(str, out_dtypes))}, or scaled, and not float32, float16 or bfloat16"
    if A.shape[-1] % 16 or A.stride(-1) != 1 or any(B.stride(0) != 1 for B in Bs):
        return f"K={A.shape[-1]} is no multiple of 16, or not contiguous in A and B.t()"
    return ""


def _context(
    name: str, group: str, A, Bs, dim: int, reduce_op: str | None = None, scaled: str | None = None
) -> Context | None:
    """The context of a call, or None if it stays torch's. All ranks decide alike: by what they have alike.

    scaled: of FP8, why the product is not one of ours; an empty text if it is.
    """
    found = _contexts.get(group)
    ctx = found[-1] if found else None
    if ctx is None:
        reason = f"group {group!r} is not among the installed ones: {', '.join(_contexts) or 'none'}"
    elif not 0 <= dim < A.dim() - 1:
        reason = f"dimension {dim} of {A.dim()} is not one of those before the last"
    elif scaled:
        reason = scaled
    elif scaled is None and (A.dtype not in DTYPES or any(B.dtype != A.dtype for B in Bs)):
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
