"""Sums to owners, and what they own back to everyone: by our collectives or by torch.distributed's."""

import torch
import torch.distributed as dist

import tkernels
from tkernels.comm import Context

# torch 2.13's names, and those that it deprecates
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Wire:
    """Collectives on the current stream, in place where they can be. rows: elements that each rank owns, in rank order.

    reduction: "reduce_scatter", or "all_reduce", of which an owner keeps its part. backend: "tkernels" or "torch".
    """

    def __init__(self, ctx: Context, backend: str, reduction: str):
        self.ctx, self.group = ctx, ctx.group.process_group
        self.ours, self.scatter = backend == "tkernels", reduction == "reduce_scatter"

    def reduce(self, flat: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
        """Collective. The sum over ranks of this rank's part of `flat` [elements], which may be overwritten."""
        parts = flat.split(rows)
        own = parts[self.ctx.rank]
        if self.ctx.size == 1:
            return own
        if not self.scatter:
            self.all_reduce(flat)
        elif self.ours:
            tkernels.reduce_scatter(flat, rows=rows, out=own, ctx=self.ctx)
        elif len(set(rows)) == 1:
            own = torch.empty_like(own)
            _reduce_scatter_single(own, flat, group=self.group)
        else:
            for owner, part in zip(self.ctx.group.global_ranks, parts, strict=True):
                if part.numel():
                    dist.reduce(part, owner, group=self.group)
        return own

    def gather(self, flat: torch.Tensor, rows: tuple[int, ...]):
        """Collective. Every rank's part of `flat` [elements] to all ranks, in place."""
        if self.ctx.size == 1:
            return
        parts = flat.split(rows)
        if self.ours:
            tkernels.all_gather(parts[self.ctx.rank], rows=rows, out=flat, ctx=self.ctx)
        elif len(set(rows)) == 1:
            _all_gather_single(flat, parts[self.ctx.rank], group=self.group)
        else:
            for owner, part in zip(self.ctx.group.global_ranks, parts, strict=True):
                if part.numel():
                    dist.broadcast(part, owner, group=self.group)

    def all_reduce(self, values: torch.Tensor):
        """Collective. The sum over ranks of `values`, in place."""
        if self.ctx.size == 1:
            return
        if self.ours:
            tkernels.all_reduce(values, out=values, ctx=self.ctx)
        else:
            dist.all_reduce(values, group=self.group)
