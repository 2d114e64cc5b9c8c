"""Assigns parts of the parameters to ranks: fills, and a rank's memory for its part of each.

A *fill* is the content of one gradient bucket: contiguous parameters, taken in the order in which backward reaches
them. Each rank owns a part of every fill: fp32 copies of those parameters (masters), their gradients and their
optimizer state. The parameters become views of one buffer per fill, at the same places, so that gathering the owners'
parts updates them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tkernels.comm import Context
from tkernels.comm.regions import round_up
from tkernels.layers.data_parallel.grad_bucket import Slice
from tkernels.layers.lease import Slot

ALIGNMENT = 16  # elements: slices and the owners' parts begin at multiples of 16 bytes in every dtype


@dataclass(frozen=True, eq=False)
class Fill:
    """Parameters that share a bucket. rows: the number of its `elements` that each rank owns, in rank order.

    large: one parameter of more than the bucket's capacity, whose gradient is reduced in its own storage.
    """

    slices: list[Slice]
    elements: int
    rows: tuple[int, ...]
    large: bool


def plan(parameters: Iterable[torch.Tensor], capacity: int, ranks: int, partition: str) -> list[Fill]:
    """Lay out `parameters`, in order, in fills of up to `capacity` elements, which is a multiple of ranks * ALIGNMENT.

    partition: "elements" cuts each fill into `ranks` equal parts. "parameters" gives each parameter to one owner: those
        of a fill are assigned from the largest down, each to the rank with the fewest elements so far. Slices begin at
        multiples of ALIGNMENT.
    """
    fills, loads, batch, room = [], [0] * ranks, [], capacity
    for parameter in parameters:
        if batch and padded(parameter) > room:
            fills.append(_lay_out(batch, capacity, loads, partition))
            batch, room = [], capacity
        batch.append(parameter)
        room -= padded(parameter)
    return [*fills, _lay_out(batch, capacity, loads, partition)] if batch else fills


def is_partial(parameter: torch.Tensor) -> bool:
    """Megatron's mark: a gradient of this rank's rows alone, which is yet to be summed over tensor-parallel ranks."""
    return bool(getattr(parameter, "sequence_parallel", False))


def padded(parameter: torch.Tensor) -> int:
    return round_up(parameter.numel(), ALIGNMENT)


def _lay_out(parameters: list[torch.Tensor], capacity: int, loads: list[int], partition: str) -> Fill:
    large = parameters[0].numel() > capacity
    if partition == "parameters":
        owned = [[] for _ in loads]
        for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
            owner = loads.index(min(loads))
            loads[owner] += parameter.numel()
            owned[owner].append(parameter)
        parameters = [parameter for theirs in owned for parameter in theirs]
        rows = [sum(map(torch.Tensor.numel if large else padded, theirs)) for theirs in owned]
    else:
        part = round_up(sum(map(padded, parameters)), len(loads) * ALIGNMENT) // len(loads)
        end = parameters[0].numel() if large else part * len(loads)
        rows = [max(0, min(part, end - rank * part)) for rank in range(len(loads))]
    slices, start = [], 0
    for parameter in parameters:
        slices.append(Slice(parameter, start))
        start += padded(parameter)
    return Fill(slices, sum(rows), tuple(rows), large)


@dataclass(frozen=True, eq=False)
class Piece:
    """This rank's part of a parameter: its elements `start` to `stop`.

    master, grad: in the parameter's shape if the piece is the whole parameter, 1-D otherwise.
    """

    parameter: torch.Tensor
    start: int
    stop: int
    master: nn.Parameter
    grad: torch.Tensor

    def cut(self, value):
        """A copy of this piece of a tensor in the parameter's shape; any other value is returned whole."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape != self.parameter.shape:
            return value.clone()
        return value.reshape(-1)[self.start : self.stop].view(self.master.shape).clone()


class Shard:
    """A fill's memory on one rank: `flat`, all of its parameters, and the masters and gradients of the rank's part.

    slot, lease: of `flat`; a new tenancy begins with each gather. Made on the current stream.
    partial: whether its parameters are `is_partial`; either all are or none.
    """

    def __init__(self, fill: Fill, ctx: Context, dev):
        dtype = fill.slices[0].parameter.dtype
        self.fill, self.ctx, self.partial = fill, ctx, is_partial(fill.slices[0].parameter)
        self.begin = sum(fill.rows[: ctx.rank])
        self.end = self.begin + fill.rows[ctx.rank]
        self.flat = torch.empty(fill.elements, dtype=dtype, device=ctx.device)
        self.slot = Slot(self.flat, dev=dev, name="parameters")
        self.lease = self.slot.acquire()
        with self.lease.write():
            self.flat.zero_()
            for slice in fill.slices:
                slice.of(self.flat).copy_(slice.parameter.detach())
                slice.parameter.data = slice.of(self.flat)
        kept = torch.promote_types(dtype, torch.float32)
        self.master, self.grad = torch.zeros(2, self.end - self.begin, dtype=kept, device=ctx.device)
        self.has_grad = False  # whether there is one since the last step
        self.pieces = [piece for slice in fill.slices if (piece := self._piece(slice)) is not None]

    def _piece(self, slice: Slice) -> Piece | None:
        first, last = max(slice.start, self.begin), min(slice.stop, self.end)
        if first >= last:
            return None
        shape = slice.parameter.shape if last - first == slice.parameter.numel() else (-1,)
        master, grad = (flat[first - self.begin : last - self.begin].view(shape) for flat in (self.master, self.grad))
        return Piece(slice.parameter, first - slice.start, last - slice.start, nn.Parameter(master), grad)

    @property
    def moved(self) -> list[torch.Tensor]:
        """The parameters that no longer lie at their place in `flat`."""
        begin, size = self.flat.data_ptr(), self.flat.element_size()
        return [s.parameter for s in self.fill.slices if s.parameter.data_ptr() != begin + s.start * size]

    @property
    def own(self) -> torch.Tensor:
        """This rank's part of the parameters."""
        return self.flat[self.begin : self.end]
