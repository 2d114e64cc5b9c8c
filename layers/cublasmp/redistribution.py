"""A matrix from one distribution to another.

Every rank gathers the whole and keeps its part: simple, and right for any two distributions, at the cost of the whole
matrix in every rank's memory for a moment. Patterns that overlap need none of this.
"""

import torch

from tkernels.comm import Context
from tkernels.comm.collectives import all_gather
from tkernels.layers.cublasmp.distributions import Intervals, Owned, local_shape


def indices(intervals: Intervals, device: torch.device) -> torch.Tensor:
    """The numbers in the intervals, in order."""
    ranges = [torch.arange(start, stop, device=device) for start, stop in intervals]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)


class Redistribution:
    """From what each rank has (`source`, by rank) to what this one wants (`target`) of a matrix of `shape`."""

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
        """Collective. This rank's part of the matrix, contiguous."""
        gathered = all_gather(ctx, local.reshape(-1), rows=self.sizes)
        whole = gathered.new_empty(self.shape)
        for part, shape, places in zip(gathered.split(self.sizes), self.parts, self.source, strict=True):
            whole[places] = part.view(shape)
        return whole[self.target]
