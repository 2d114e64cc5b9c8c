"""Any number of leading dimensions: x [..., K] as the matrix [M, K] that operations take, and their results back.

Where rows are gathered or scattered, that dimension comes first in the matrix, as the ranks' rows lie one after the
other there. Results have the shapes and strides of torch's fused operators: a gathered one is a view that has the
dimension moved back to its place, a scattered one is contiguous.
"""

import math
from typing import NamedTuple

import torch

from tkernels.comm.arguments import LARGEST, check_dense, whole

ROWS_FIRST = (0,)  # the `order` of a matrix


class Leading(NamedTuple):
    """How x [..., K] is a matrix. sizes: of its leading dimensions, dimension `dim` first. name: of the operation."""

    name: str
    dim: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, name: str, x: torch.Tensor, option: str | None = None, dim: int = 0) -> "Leading":
        """option: names the dimension that is gathered or scattered.

        Raises TypeError if that is no whole number, ValueError if it isn't a leading dimension.
        """
        check_dense(name, x=x)
        dims, dim = x.dim(), whole(f"{name}: {option}", dim, -LARGEST)
        if dims == 0 or option and not (-dims <= dim < dims - 1 and dim != -1):
            names = f", and {option}={dim} one of its leading dimensions" if option else ""
            raise ValueError(f"{name}: x is {tuple(x.shape)}, but must be [..., K]{names}; the last one is multiplied")
        dim %= dims
        return cls(name, dim, tuple(x.movedim(dim, 0).shape[:-1]))

    @property
    def order(self) -> tuple[int, ...]:
        """What all ranks must have alike, or the order of a peer's rows would not be this rank's."""
        return self.dim, *self.sizes[1:]

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        """x as rows of K; a copy if they don't lie in memory in that order."""
        return x.movedim(self.dim, 0).reshape(math.prod(self.sizes), x.shape[-1])

    def scale(self, x_scale: torch.Tensor | None) -> torch.Tensor | None:
        """The scale of each row of x, [..., 1] or [...], as [M, 1]; what is one number, or none, as it is."""
        if not isinstance(x_scale, torch.Tensor) or x_scale.numel() == 1:
            return x_scale
        check_dense(self.name, x_scale=x_scale)
        one_a_row = x_scale.unsqueeze(-1) if x_scale.dim() == len(self.sizes) else x_scale
        if one_a_row.dim() != len(self.sizes) + 1 or one_a_row.movedim(self.dim, 0).shape != (*self.sizes, 1):
            raise ValueError(
                f"{self.name}: x_scale is {tuple(x_scale.shape)}, but must be one number, or one a row, with the "
                f"{len(self.sizes)} leading dimensions of x"
            )
        return self.matrix(one_a_row)

    def rows(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """The matrix's rows by rank, from the lengths of the first dimension."""
        return tuple(length * math.prod(self.sizes[1:]) for length in lengths)

    def memory(self, option: str, out: torch.Tensor | None) -> torch.Tensor | None:
        """The matrix that fills `out` [..., N]. Raises ValueError where its rows lie in another order."""
        if not isinstance(out, torch.Tensor):
            return out
        check_dense(self.name, **{option: out})
        moved = out.movedim(self.dim, 0) if self.dim < out.dim() else out
        if moved.dim() != len(self.sizes) + 1 or moved.shape[1:-1] != self.sizes[1:] or not moved.is_contiguous():
            first = f"; in memory dimension {self.dim} comes first" if self.dim else ""
            raise ValueError(
                f"{self.name}: {option} is {tuple(out.shape)} with strides {out.stride()}, but must be contiguous, "
                f"with the {len(self.sizes)} leading dimensions of x{first}"
            )
        return moved.view(math.prod(moved.shape[:-1]), moved.shape[-1])

    def back(self, y: torch.Tensor, length: int | None = None) -> torch.Tensor:
        """The matrix y as [..., N], a view. length: of its first dimension, None as in x."""
        sizes = self.sizes if length is None else (length, *self.sizes[1:])
        return y.view(*sizes, y.shape[-1]).movedim(0, self.dim)
