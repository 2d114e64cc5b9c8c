"""Where the parameters of a group lie: in a rank's shard, in the gathered whole, and in a buffer of gradients.

A parameter [n, ...] is cut along its first dimension as `torch.chunk` cuts it, which is what DTensor's Shard(0) means:
each of R ranks has k = ceil(n / R) rows, the last ones fewer or none. In all three buffers a rank's part is padded to
k rows, at most one row more than needed, so that every rank sends equally much and torch's own operators pack.

    shard      [S]         a's k rows | b's k rows | c's k rows          of this rank
    whole      [R * S]     a's R * k rows | b's R * k rows | ...         a parameter is the first n rows of its part
    gradients  [R, S]      each rank's shard, one after the other        one reduce-scatter hands out the shards

Large gradients are reduced in pieces of the shards: [R, s] of the first s elements of each, then of the next.

Small parameters come first and are gathered together, then copied to their places; a large one is gathered straight
into its place in `whole`, without the copy, and without the memory for it.

Parameters that stay whole, and are nobody's DTensors, lie one after the other instead, in a FlatLayout.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from tkernels.comm.regions import round_up

ALIGN = 16  # elements: what starts at a multiple of it can be read 16 bytes at a time
DIRECT_NUMEL = 1 << 20  # elements from which a parameter is gathered by a collective of its own
# Of gradients that one collective reduces: a workspace must hold a little more than that, and each kernel waits until a
# product has left it SMs, as long as 1 ms (bench/LOG.md, 2026-11-27).
REDUCED_BYTES = 128 << 20


@dataclass(frozen=True)
class Part:
    """One parameter's place. start: in the shard, in elements; in `whole` it is R times as much. numel: of k rows."""

    shape: torch.Size
    start: int
    numel: int
    rows: tuple[int, ...]  # of each rank

    @property
    def row_shape(self) -> torch.Size:
        return self.shape[1:]


class Layout:
    """The layout of parameters of these shapes over `ranks` ranks; all have a dimension and elements.

    parts: in the order of the shapes. numel: S, of a shard. packed: elements at the start of the shard that are
    gathered together. direct: the parts that are gathered one by one. order: of the parts in memory, as indices.
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: int):
        self.ranks = ranks
        chunks = [-(-shape[0] // ranks) for shape in shapes]
        numels = [chunk * math.prod(shape[1:]) for chunk, shape in zip(chunks, shapes, strict=True)]
        direct = [ranks * numel >= DIRECT_NUMEL for numel in numels]
        # Odd sizes come after the others of their kind, which so are aligned.
        self.order = sorted(range(len(shapes)), key=lambda i: (direct[i], numels[i] % ALIGN != 0))
        parts, self.numel, self.packed = {}, 0, 0
        for i in self.order:
            rows = tuple(min(max(shapes[i][0] - rank * chunks[i], 0), chunks[i]) for rank in range(ranks))
            parts[i] = Part(shapes[i], self.numel, numels[i], rows)
            self.numel += numels[i]
            if not direct[i]:
                self.packed = self.numel
        self.parts = [parts[i] for i in range(len(shapes))]
        self.direct = [parts[i] for i in self.order if direct[i]]
        self._packed = [parts[i] for i in self.order if not direct[i]]

    def shards(self, flat: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Views of a shard [S]: this rank's rows of each parameter."""
        shapes = [(part.rows[rank], *part.row_shape) for part in self.parts]
        return [
            flat[part.start :][: math.prod(shape)].view(shape) for part, shape in zip(self.parts, shapes, strict=True)
        ]

    def wholes(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Views of a gathered buffer [R * S]: each parameter, all its rows."""
        return [whole[self.ranks * part.start :][: part.shape.numel()].view(part.shape) for part in self.parts]

    def landings(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Views of a gathered buffer that take what was gathered together: [R, numel] for each small parameter."""
        return [
            whole[self.ranks * part.start :][: self.ranks * part.numel].view(self.ranks, part.numel)
            for part in self._packed
        ]

    def pieces(self, dtype: torch.dtype) -> list[tuple[int, int]]:
        """Ranges of the shard that are reduced one after the other, of at most REDUCED_BYTES over all ranks."""
        step = max(REDUCED_BYTES // (self.ranks * dtype.itemsize) // ALIGN, 1) * ALIGN
        return [(start, min(start + step, self.numel)) for start in range(0, self.numel, step)]

    @property
    def packed_numels(self) -> list[int]:
        return [part.numel for part in self._packed]


def in_buckets(parameters: Iterable, kind: Callable, capacity: Callable, size: Callable) -> list[list[torch.Tensor]]:
    """Groups of parameters that are reduced together, in their order, and in that of each group's last parameter.

    All of a group are of one kind(parameter), and their size(parameter) add up to at most capacity(kind); a larger one
    is by itself.
    """
    filling, groups = {}, {}
    for parameter in parameters:
        its = kind(parameter)
        group, room = filling.get(its, ([], -1))
        if size(parameter) > room:
            group, room = [], capacity(its)
        group.append(parameter)
        filling[its] = group, room - size(parameter)
        groups.pop(id(group), None)
        groups[id(group)] = group
    return list(groups.values())


class FlatLayout:
    """Parameters in order, which begin at multiples of `align` elements, and `rows`: the elements of each rank's part.

    A rank's part begins anywhere, also inside of a parameter.
    """

    def __init__(self, parameters: list[torch.Tensor], rows: tuple[int, ...], align: int = ALIGN):
        self.parameters, self.rows, self.numel = parameters, rows, sum(rows)
        numels = (round_up(parameter.numel(), align) for parameter in parameters)
        *self.starts, self.end = itertools.accumulate(numels, initial=0)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in `flat` [n]."""
        return [
            flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(self.starts, self.parameters, strict=True)
        ]

    def part(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of `flat` [n]."""
        return flat[sum(self.rows[:rank]) :][: self.rows[rank]]

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """First and last element of a parameter that lie in a rank's part; equal if there are none."""
        start, begin = self.starts[index], sum(self.rows[:rank])
        numel = self.parameters[index].numel()
        first, last = (min(max(edge - start, 0), numel) for edge in (begin, begin + self.rows[rank]))
        return first, last
