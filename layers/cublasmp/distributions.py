"""Distributions of a matrix over ranks: which rows and columns each rank owns.

    Slab.X, Slab.Y              consecutive rows, or columns; if they don't divide evenly, the first ranks have one more
    BlockNonCyclic(grid)        blocks of ceil(extent / processes) rows and columns, one for each process of a grid
    BlockCyclic(grid, sizes)    blocks of a given size, assigned round-robin (PBLAS)
    Box(lower, upper)           any rectangle; each rank passes its own

Names and arguments are those of nvmath.distributed.distribution. A rank owns the rows and the columns in two lists of
intervals. Its local matrix is the concatenation of these rows and columns, in order.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral

import numpy
import torch

from tkernels.comm.collectives import split_rows
from tkernels.comm.contexts import current_context, open_contexts

Intervals = tuple[tuple[int, int], ...]
Owned = tuple[Intervals, Intervals]


class GridLayout(enum.IntEnum):
    """The order in which ranks fill a grid."""

    COL_MAJOR = 0
    ROW_MAJOR = 1


@dataclass(frozen=True, kw_only=True)
class ProcessGrid:
    """A rectangle of ranks.

    shape: (rows, columns) of processes.
    layout: required if both are more than 1.
    process_array: the ranks, row by row, for any other order. Excludes layout; shape, if given, must agree.
    """

    shape: tuple[int, int] | None = None
    layout: GridLayout | None = None
    process_array: tuple[tuple[int, ...], ...] | None = None

    Layout = GridLayout

    def __post_init__(self):
        shape, layout, array = _pair(self.shape, 1), self.layout, self.process_array
        if array is not None:
            order = _matrix_of_ranks(array)
            if layout is not None or self.shape is not None and shape != order.shape:
                raise ValueError(
                    f"ProcessGrid: shape={self.shape}, layout={layout} beside a process_array of {order.shape}; leave "
                    f"them out"
                )
            shape, array = order.shape, tuple(map(tuple, order.tolist()))
        elif shape is None:
            raise ValueError(f"ProcessGrid: shape={self.shape} must be (rows, columns) of processes, each at least 1")
        elif layout is None and min(shape) > 1:
            raise ValueError(
                f"ProcessGrid: shape={shape} can be filled in two ways; pass layout=ProcessGrid.Layout.COL_MAJOR or "
                f"ROW_MAJOR"
            )
        elif layout is not None and (not isinstance(layout, int) or layout not in list(GridLayout)):
            raise ValueError(f"ProcessGrid: layout={layout!r} must be ProcessGrid.Layout.COL_MAJOR or ROW_MAJOR")
        else:
            layout = GridLayout.ROW_MAJOR if min(shape) == 1 else GridLayout(layout)
            order = numpy.arange(math.prod(shape)).reshape(shape, order="FC"[layout])
        # A frozen object's attributes can't be set otherwise.
        vars(self).update(shape=shape, layout=layout, process_array=array, _order=order.tolist())

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Row and column of a rank in the grid."""
        return next((row, ranks.index(rank)) for row, ranks in enumerate(self._order) if rank in ranks)


class Distribution:
    """Base class of all distributions."""

    def owned(self, shape: tuple[int, int], *, rank: int, size: int) -> Owned:
        """The rows and the columns of a matrix of `shape` that `rank` of `size` owns."""
        if not isinstance(size, Integral) or not isinstance(rank, Integral) or not 0 <= rank < size:
            raise ValueError(f"{self}: rank={rank} is none of size={size} ranks, which count from 0")
        return self._owned(_checked_shape(self, shape), rank, size)

    def shape(self, rank: int, global_shape: tuple[int, int], *, size: int | None = None) -> tuple[int, int]:
        """The shape of `rank`'s local matrix.

        size: the number of ranks, if the distribution doesn't determine it. Default: that of the current context.
        """
        return local_shape(self.owned(global_shape, rank=rank, size=self._size(size)))

    def global_shape(self, everyone: list["Distribution"], shapes: list[tuple[int, int]]) -> tuple[int, int]:
        """The shape of the whole matrix, from every rank's distribution and local shape."""
        raise NotImplementedError

    def check_size(self, size: int):
        """Raise ValueError unless the distribution fits `size` ranks."""

    def _size(self, size) -> int:
        if size is None and not open_contexts():
            raise ValueError(f"{self}: pass size=, the number of ranks, or call tkernels.init() before")
        return current_context().size if size is None else size


@dataclass(frozen=True)
class Slab(Distribution):
    """Consecutive rows (Slab.X, partition_dim=0) or columns (Slab.Y, 1), split as torch.tensor_split does."""

    partition_dim: int
    ndim: int | None = None

    def __post_init__(self):
        dim, ndim = self.partition_dim, self.ndim
        if type(dim) is not int or dim not in (0, 1) or not (ndim is None or type(ndim) is int and ndim == 2):
            raise ValueError(
                f"Slab(partition_dim={self.partition_dim}, ndim={self.ndim}): a matrix has dimensions 0 and 1"
            )
        vars(self).update(ndim=None)

    def __hash__(self):
        return self.partition_dim  # as cheap as possible: every call of `matmul` hashes three distributions

    def __repr__(self):
        return f"Slab.{'XY'[self.partition_dim]}"

    def _owned(self, shape, rank, size):
        return _slab(shape, self.partition_dim, split_rows(shape[self.partition_dim], size), rank)

    def global_shape(self, everyone, shapes):
        total, other = sum(shape[self.partition_dim] for shape in shapes), shapes[0][1 - self.partition_dim]
        return (other, total) if self.partition_dim else (total, other)


Slab.X, Slab.Y = Slab(0), Slab(1)


@dataclass(frozen=True)
class Box(Distribution):
    """This rank's rectangle: rows lower[0] to upper[0], columns lower[1] to upper[1], upper bounds excluded.

    Each rank passes its own. Together they must cover every element of the matrix once. A rank's box may be empty.
    `shape` is that of the rank that made the box; it raises ValueError for another one's, which a box doesn't know.
    """

    lower: tuple[int, int]
    upper: tuple[int, int]

    def __post_init__(self):
        lower, upper = _pair(self.lower, 0), _pair(self.upper, 0)
        if lower is None or upper is None or any(up < lo for lo, up in zip(lower, upper, strict=True)):
            raise ValueError(
                f"Box(lower={self.lower}, upper={self.upper}): takes two corners of a matrix, the lower one first"
            )
        vars(self).update(lower=lower, upper=upper)

    def _owned(self, shape, rank, size):
        rows, columns = (((lo, up),) if up > lo else () for lo, up in zip(self.lower, self.upper, strict=True))
        return rows, columns

    def shape(self, rank, global_shape=None, *, size=None):
        contexts = open_contexts()
        if contexts and rank not in [context.rank for context in contexts]:
            raise ValueError(f"{self}.shape(rank={rank}): this process is rank {current_context().rank}; pass its own")
        if global_shape is not None:
            extents = _checked_shape(self, global_shape)
            if any(upper > extent for upper, extent in zip(self.upper, extents, strict=True)):
                raise ValueError(f"{self} is not inside of a matrix of {extents}")
        return self._extents

    @property
    def _extents(self) -> tuple[int, int]:
        return self.upper[0] - self.lower[0], self.upper[1] - self.lower[1]

    def global_shape(self, everyone, shapes):
        filled = [box for box in everyone if 0 not in box._extents] or everyone
        return tuple(max(box.upper[dim] for box in filled) for dim in (0, 1))


@dataclass(frozen=True)
class BlockCyclic(Distribution):
    """Blocks of block_sizes (rows, columns), assigned round-robin to a grid's processes, from `first_process` on."""

    process_grid: ProcessGrid
    block_sizes: tuple[int, int]
    first_process: tuple[int, int] | None = None

    def __post_init__(self):
        sizes = _pair(self.block_sizes, 1)
        if sizes is None:
            raise ValueError(
                f"BlockCyclic: block_sizes={self.block_sizes} must be (rows, columns) of a block, each at least 1"
            )
        vars(self).update(block_sizes=sizes)
        self._set_first()

    def _set_first(self):
        name, grid = type(self).__name__, self.process_grid
        if not isinstance(grid, ProcessGrid):
            raise TypeError(f"{name}: process_grid is {type(grid).__name__} and must be a ProcessGrid")
        first = (0, 0) if self.first_process is None else _pair(self.first_process, 0)
        if first is None or any(at >= count for at, count in zip(first, grid.shape, strict=True)):
            raise ValueError(f"{name}: first_process={self.first_process} is no place in a grid of {grid.shape}")
        vars(self).update(first_process=first)

    def _blocks(self, shape) -> tuple[int, int]:
        return self.block_sizes

    def _owned(self, shape, rank, size):
        place = self.process_grid.coordinates(rank)
        rows, columns = (
            _dealt(shape[dim], self._blocks(shape)[dim], place[dim] - self.first_process[dim], count)
            for dim, count in enumerate(self.process_grid.shape)
        )
        return rows, columns

    def global_shape(self, everyone, shapes):
        places = [self.process_grid.coordinates(rank) for rank in range(len(shapes))]
        return tuple(
            sum(shape[dim] for shape, place in zip(shapes, places, strict=True) if place[1 - dim] == 0)
            for dim in (0, 1)
        )

    def check_size(self, size):
        if self.process_grid.size != size:
            raise ValueError(
                f"{type(self).__name__}: a grid of {self.process_grid.shape} has {self.process_grid.size} processes, "
                f"but there are {size} ranks"
            )

    def _size(self, size):
        return self.process_grid.size


@dataclass(frozen=True)
class BlockNonCyclic(BlockCyclic):
    """One block for each process of a grid, of ceil(extent / processes) rows and columns; the last ones are shorter."""

    block_sizes: None = field(default=None, init=False)
    first_process: tuple[int, int] | None = field(default=None, kw_only=True)

    __post_init__ = BlockCyclic._set_first

    def _blocks(self, shape):
        return tuple(max(-(-extent // count), 1) for extent, count in zip(shape, self.process_grid.shape, strict=True))


def _pair(value, least: int) -> tuple[int, int] | None:
    """Two integers of at least `least` as a tuple; None for anything else."""
    values = tuple(value) if isinstance(value, Iterable) and not isinstance(value, torch.Tensor) else ()
    fits = len(values) == 2 and all(isinstance(each, Integral) and each >= least for each in values)
    return (int(values[0]), int(values[1])) if fits else None


def _matrix_of_ranks(array) -> numpy.ndarray:
    """Raises ValueError unless it has each rank once."""
    readable = isinstance(array, torch.Tensor) and array.dtype == torch.int64 and not array.is_meta
    try:
        ranks = numpy.array(array.tolist() if readable else None if isinstance(array, torch.Tensor) else array)
    except ValueError:  # rows of several lengths
        ranks = numpy.array(None)
    if ranks.ndim != 2 or ranks.dtype.kind not in "iu" or sorted(ranks.flat) != list(range(ranks.size)):
        raise ValueError(f"ProcessGrid: process_array={array} must be a matrix of each rank once")
    return ranks


def _checked_shape(distribution: Distribution, shape) -> tuple[int, int]:
    """The shape of a matrix as a tuple. Raises ValueError for anything else."""
    extents = _pair(shape, 0)
    if extents is None:
        raise ValueError(f"{distribution}: the shape of a matrix is two numbers of rows and columns, not {shape!r}")
    return extents


def _dealt(extent: int, block: int, place: int, count: int) -> Intervals:
    """The blocks of `extent` owned by the process `place` positions after the first one; adjacent blocks are merged."""
    intervals = []
    for start in range(place % count * block, extent, block * count):
        stop = min(start + block, extent)
        if intervals and intervals[-1][1] == start:
            start = intervals.pop()[0]
        intervals.append((start, stop))
    return tuple(intervals)


def _slab(shape, dim: int, sizes: tuple[int, ...], rank: int) -> Owned:
    start = sum(sizes[:rank])
    mine = ((start, start + sizes[rank]),) if sizes[rank] else ()
    other = ((0, shape[1 - dim]),) if shape[1 - dim] else ()
    return (other, mine) if dim else (mine, other)


def slabs(shape: tuple[int, int], dim: int, sizes: tuple[int, ...]) -> list[Owned]:
    """Every rank's rows and columns if each rank owns the next `sizes[rank]` rows (dim 0) or columns (dim 1)."""
    return [_slab(shape, dim, sizes, rank) for rank in range(len(sizes))]


def split_of(shape: tuple[int, int], owned: list[Owned]) -> tuple[int, tuple[int, ...]] | None:
    """(dimension, its size on each rank) if the ranks own consecutive slabs of it in rank order, else None."""
    for dim in (0, 1):
        sizes = tuple(length(rank[dim]) for rank in owned)
        pairs = zip(owned, slabs(shape, dim, sizes), strict=True)
        if sum(sizes) == shape[dim] and all(mine == want or not length(want[dim]) for mine, want in pairs):
            return dim, sizes
    return None


def length(intervals: Intervals) -> int:
    return sum(stop - start for start, stop in intervals)


def local_shape(owned: Owned) -> tuple[int, int]:
    """Shape of the local matrix of a rank that owns these rows and columns."""
    return length(owned[0]), length(owned[1])


def covers_once(shape: tuple[int, int], owned: list[Owned]) -> bool:
    """Whether every element of a matrix has exactly one owner."""
    seen = [(row, column) for rows, columns in owned for row in rows for column in columns]
    area = sum((row[1] - row[0]) * (column[1] - column[0]) for row, column in seen)
    apart = all(
        not (_meet(row, other_row) and _meet(column, other_column))
        for index, (row, column) in enumerate(seen)
        for other_row, other_column in seen[:index]
    )
    return area == math.prod(shape) and apart


def _meet(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return first[0] < second[1] and second[0] < first[1]
