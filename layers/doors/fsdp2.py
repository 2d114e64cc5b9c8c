"""torch's FSDP2 over this library's collectives.

FSDP2 gathers the parameters and reduces the gradients of each group of parameters by two objects, an AllGather and a
ReduceScatter. `install` puts ours there. Streams, padding, casts and everything else stay FSDP2's.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import tkernels
from tkernels.comm.arguments import check_type
from tkernels.comm.collectives import SUMMED
from tkernels.comm.context import as_context
from tkernels.layers.data_parallel.wire import stream_beside
from tkernels.layers.doors import log_once
from tkernels.layers.lease import Lease

AVG, SUM, PREMUL_SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM, dist.ReduceOp.PREMUL_SUM


def install(model: nn.Module) -> contextlib.ExitStack:
    """Collective over the ranks of each group that shares shards. FSDP2 then gathers and reduces by this library.

    model: has been through `fully_shard`, itself or modules in it, over a mesh of any shape. torch keeps the all-reduce
        over the replicas of a mesh of two dimensions, and sums of other dtypes than float32, float16 and bfloat16,
        which the log names once.

    The contexts are the newest open ones over those ranks, or are made now. `tkernels.init(mesh.get_group(),
    default=False, ...)` before this call makes one with other options. Not for use between a forward and its backward.

    Returns what undoes it, by `close()` or as a `with` block. Raises, with nothing changed: TypeError or ValueError for
    a model that FSDP2 doesn't shard, ValueError for one on another device than the contexts', on every rank, and
    NotImplementedError for a torch whose FSDP2 can't be given other collectives.
    """
    check_type("install: model", model, nn.Module, "an nn.Module")
    groups = [each for module in model.modules() if isinstance(module, fsdp.FSDPModule) for each in _groups_of(module)]
    if not groups:
        raise ValueError(
            f"install: no module of this {type(model).__name__} is sharded over several ranks by FSDP2; call "
            f"torch.distributed.fsdp.fully_shard(module, mesh=...) first"
        )
    contexts = _Contexts()
    for group in groups:
        meshes = [each for each in (group.mesh_info, group.post_forward_mesh_info) if each]
        for ctx in [contexts[mesh.shard_process_group] for mesh in meshes]:
            with ctx.group.checking():
                if group.device.type != ctx.device.type:
                    raise ValueError(
                        f"install: the model is sharded on {group.device}, but operations run on {ctx.device}, by the "
                        f"{ctx.runtime} runtime; see TKERNELS_RUNTIME"
                    )
    undo = contextlib.ExitStack()
    for group in groups:
        before = group._all_gather_comm, group._reduce_scatter_comm
        if not isinstance(before[0], AllGather):
            undo.callback(_put, group, *before)
            _put(group, AllGather(contexts, before[0]), ReduceScatter(contexts, before[1]))
    return undo


def _groups_of(module: fsdp.FSDPModule) -> list:
    """The groups of parameters that the module gathers and reduces together, over several ranks."""
    try:
        state = module._get_fsdp_state()
        # torch 2.13 has a list; in older ones a module has one group or none.
        groups = getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])
        groups = [each for each in groups if getattr(each.mesh_info, "shard_mesh_size", 1) > 1]
        _ = [(each._all_gather_comm, each._reduce_scatter_comm, each.post_forward_mesh_info) for each in groups]
    except AttributeError as error:
        raise NotImplementedError(
            f"install: FSDP2 of torch {torch.__version__} takes no other collectives in the way of torch 2.11 to 2.13: "
            f"{error}"
        ) from error
    return groups


def _put(group, all_gather, reduce_scatter):
    # FSDPModule's own setters refuse a module of several groups, whose meshes may differ; ours serve any mesh.
    group._all_gather_comm, group._reduce_scatter_comm = all_gather, reduce_scatter


class _Contexts(dict):
    """The context over the ranks of each process group."""

    def __missing__(self, group: dist.ProcessGroup):
        self[group] = as_context(group)
        return self[group]


class _Comm:
    """An object of FSDP2's interface. before: the one whose place it takes, which has the calls that ours can't."""

    def __init__(self, contexts: _Contexts, before):
        self.contexts, self.before = contexts, before

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Comm):
    """Any dtype, bytes too, into which FSDP2 puts parameters of several dtypes."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        ctx = self.contexts[group]
        if not async_op:
            tkernels.all_gather(input_tensor, out=output_tensor, ctx=ctx)
            return None
        # FSDP2 asks on the stream that goes on to compute, and waits for what is returned.
        dev = torch.get_device_module(ctx.device)
        stream = stream_beside(ctx, dev)
        given, gathered = Lease(input_tensor, dev=dev), Lease(output_tensor, dev=dev)
        with given.write():
            pass  # the producer is whatever this stream has launched
        with given.read(stream), gathered.write(stream), dev.stream(stream):
            tkernels.all_gather(input_tensor, out=output_tensor, ctx=ctx)
        return _Gathered(gathered)


class _Gathered(dist.Work):
    def __init__(self, lease: Lease):
        super().__init__()
        self._lease = lease

    def wait(self, timeout=None) -> bool:
        with self._lease.read():
            return True


class ReduceScatter(_Comm):
    """SUM, AVG, and PREMUL_SUM: the sum, rounded, is multiplied."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        kind = getattr(op, "op", op)  # a ReduceOp, or one of its kinds
        if input_tensor.dtype not in SUMMED or kind not in (SUM, AVG, PREMUL_SUM):
            log_once(f"FSDP2: {kind} of {input_tensor.dtype} stays torch's; tkernels sums fp32, fp16 and bf16")
            return self.before(output_tensor, input_tensor, group, op, async_op)
        ctx = self.contexts[group]
        factor = 1 / ctx.size if kind == AVG else 1.0
        tkernels.reduce_scatter(input_tensor, out=output_tensor, factor=factor, ctx=ctx)
        if kind == PREMUL_SUM:
            output_tensor.mul_(op.__getstate__()[1])  # (kind, factor), which may change from step to step
        return None
