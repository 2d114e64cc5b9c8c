"""Redistributes a matrix from one distribution to another.

Every rank gathers the whole matrix and keeps its part. This is simple and works for any two distributions, but the
whole matrix is temporarily in every rank's memory. Operands distributed as a pattern takes them need no redistribution.
"""

import torch

from tkernels.comm import Context
from tkernels.comm.collectives import all_gather
from tkernels.layers.cublasmp.distributions import Intervals, Owned, local_shape


def indices(intervals: Intervals, device: torch.device) -> torch.Tensor:
    """The indices that the intervals cover, in order."""
    ranges = [torch.arange(start, stop, device=device) for start, stop in intervals]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)


class Redistribution:
    """Moves a matrix of `shape` from every rank's part (`source`, by rank) to this rank's new part (`target`)."""

    def __init__(self, shape: tuple[int, int], source: list[Owned], target: Owned, device: torch.device):
        self.shape = shape
        self.parts = [local_shape(owned) for owned in source]
        self.sizes = tuple(rows * columns for rows, columns in self.parts)
        self.source = [self._places(owned, device) for owned in source]
        self.target = self._places(target, device)

    @staticmethod
    def _places(owned: Owned, device) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = (indices(intervals, device) for intervals in owned)
        return rows[:, None], columns

    def __call__(self, ctx: Context, local: torch.Tensor) -> torch.Tensor:
        """Collective. This rank's new part of the matrix, contiguous."""
        gathered = all_gather(ctx, local.reshape(-1), rows=self.sizes)
        whole = gathered.new_empty(self.shape)
        for part, shape, places in zip(gathered.split(self.sizes), self.parts, self.source, strict=True):
            whole[places] = part.view(shape)
        return whole[self.target]
