"""What layers without overlap send, by torch.distributed."""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from tkernels.comm.arguments import check_dense, check_flags, check_resolved
from tkernels.comm.collectives import split_rows
from tkernels.comm.context import group_of
from tkernels.comm.group import all_gather_single, reduce_scatter_single
from tkernels.configs import FP8
from tkernels.layers.tensor_parallel.float8 import Float8Tensor
from tkernels.layers.userbuffers.float8 import check_quantizer, float8_tensor


class Distributed:
    """Collectives over a process group, whose ranks all have the same number of rows."""

    def __init__(self, group):
        self._group = group

    def all_gather(self, x, rows=None):
        return gather_along_first_dim(x, self._group)[0]

    def reduce_scatter(self, x: torch.Tensor, rows=None) -> torch.Tensor:
        size = dist.get_world_size(self._group)
        if x.shape[0] % size:
            raise ValueError(
                f"{x.shape[0]} tokens don't divide by {size} ranks, which only layers with overlap allow; set their "
                f"ub_ options, or pad; split_rows({x.shape[0]}, {size}) is {split_rows(x.shape[0], size)}"
            )
        out = x.new_empty(x.shape[0] // size, *x.shape[1:])
        reduce_scatter_single(out, x.contiguous(), group=self._group)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._group)
        return x


class Gather(torch.autograd.Function):
    """All-gathers rows. Its backward is a reduce-scatter: the sum over ranks, of which each rank gets its own rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.moves = Distributed(group)
        return ctx.moves.all_gather(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return ctx.moves.reduce_scatter(dx.contiguous()), None


def gather_along_first_dim(inp: torch.Tensor, process_group, async_op: bool = False, quantizer=None):
    """All-gather by torch.distributed: (every rank's rows, None or the async work to wait for).

    All ranks must have the same number of rows. quantizer: what travels is FP8, and a Float8Tensor [M, K] returns, with
    a scale for each row. Raises ValueError for quantizers with more than one scale for a tensor.
    """
    check_flags("gather_along_first_dim", async_op=async_op)
    group = group_of(process_group, "gather_along_first_dim: process_group").process_group
    inp = float8_tensor("gather_along_first_dim: inp", inp)
    if quantizer is not None:
        check_quantizer("gather_along_first_dim: quantizer", quantizer)
        inp = inp if isinstance(inp, Float8Tensor) else float8_tensor("gather_along_first_dim", quantizer(inp))
    if isinstance(inp, Float8Tensor):
        inp, works = inp.flatten(0, -2), []

        def gather(part, out):
            part, out = (each.view(torch.uint8) if each.dtype in FP8 else each for each in (part, out))
            works.append(all_gather_single(out, part.contiguous(), group=group, async_op=async_op and not works))

        return inp.all_gather(gather, [inp.shape[0]] * dist.get_world_size(group)), works[0]
    if not isinstance(inp, torch.Tensor) or inp.dim() == 0:
        raise TypeError(f"gather_along_first_dim: inp={inp!r} must be a tensor with rows")
    check_dense("gather_along_first_dim", inp=inp)
    check_resolved("gather_along_first_dim", "inp", inp)
    if inp.dtype in FP8:  # which torch.distributed doesn't know
        out, work = gather_along_first_dim(inp.view(torch.uint8), process_group, async_op)
        return out.view(inp.dtype), work
    inp = inp.detach().contiguous()
    out = inp.new_empty(inp.shape[0] * dist.get_world_size(group), *inp.shape[1:])
    return out, all_gather_single(out, inp, group=group, async_op=async_op)
