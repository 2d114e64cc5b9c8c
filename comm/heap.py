"""SymmetricHeap: memory with the same layout on every rank of a group, so that a rank can address a peer's copy.

A heap takes what it needs when it needs it, up to its limit, from the space of its segment. On GPUs that is the pool
that all contexts of a process share, of which each rank may have other parts in use. So every allocation, a collective
in any case, goes to the lowest offset that is free on all ranks of the group.
"""

import functools
import math

import torch

from tkernels.comm import capture
from tkernels.comm.allocator import common, first_fit
from tkernels.comm.arguments import check_torch_dtype, check_type, switch, whole
from tkernels.comm.errors import HeapExhaustedError, MismatchError
from tkernels.comm.group import Group, listed
from tkernels.comm.regions import ALIGNMENT, round_up


class SymmetricHeap:
    """Allocates symmetric memory for one group, at the same offset of the segment on every rank.

    All ranks allocate and free in the same order: each allocation compares what they ask for and what they hold.
    """

    def __init__(self, group: Group, num_bytes: int, open_segment):
        """Collective. `open_segment(group, num_bytes)` is the runtime's; see `runtime.Segment`.

        num_bytes: the most that it takes, the same on all ranks.
        """
        self.group = group
        self.num_bytes = round_up(num_bytes, ALIGNMENT)
        self.segment = open_segment(group, self.num_bytes)
        self._held, self._freed = {}, {}  # offset -> size; the latter goes back to the space at the next allocation
        self._reserve = 0, 0  # (offset, size), held too

    @property
    def held_bytes(self) -> int:
        """Of the tensors that this rank has allocated, and of what is set aside for captures."""
        return sum(self._held.values())

    @property
    def reserved_bytes(self) -> int:
        """What is set aside for captures, until other allocations find no room."""
        return self._reserve[1]

    @capture.lasting()
    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Collective. An uninitialised contiguous tensor at the same offset on every rank, 256-byte aligned.

        Raises on every rank MismatchError if shape or dtype give different sizes, HeapExhaustedError if it does
        not fit, ValueError for a negative size, TypeError for one that is no whole number and for what is no dtype.
        With TKERNELS_POISON=1 the memory is filled with NaN (all bits set).
        """
        with self.group.checking():
            poisoned = switch("TKERNELS_POISON")
            check_torch_dtype("symmetric allocation: dtype", dtype)
            extents = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
            shape = tuple(whole("symmetric allocation: size", extent) for extent in extents)
            num_bytes = math.prod(shape) * dtype.itemsize
        offset = self.allocate(num_bytes)
        memory = self.segment.local[offset : offset + num_bytes]
        if poisoned:
            memory.fill_(0xFF)
        return memory.view(dtype).view(shape)

    def reserve(self, num_bytes: int):
        """Collective, before `empty`. Set zeroed memory aside for `untouched`; `empty` takes the rest of it at last."""
        self._reserve = self.allocate(num_bytes), round_up(num_bytes, ALIGNMENT)
        if not self.segment.fresh:
            self.segment.local[self._reserve[0] :][:num_bytes].zero_()

    def untouched(self, num_bytes: int) -> torch.Tensor | None:
        """Allocate bytes that have been zero on every rank since `reserve`; None if too few are left.

        For a CUDA graph's capture, where ranks can't meet: all must ask for the same sizes, in the same order.
        """
        (offset, left), size = self._reserve, round_up(num_bytes, ALIGNMENT)
        if size > left:
            return None
        self._give_up_reserve()
        self._reserve = offset + size, left - size
        for start, piece in ((offset, size), self._reserve):
            self._held[start] = piece
            self.segment.space.take(start, piece, self.group.name)
        return self.segment.local[offset : offset + num_bytes]

    def free(self, tensor: torch.Tensor):
        """Free a tensor of `empty`; all ranks, in the same order. Raises ValueError for any other tensor.

        Does nothing once the heap is closed.
        """
        check_type("free: tensor", tensor, torch.Tensor, "a tensor that empty() returned")
        if tensor.numel() == 0 or self.segment.local is None:
            return
        offset = self.offset(tensor)
        if self._held.get(offset) != round_up(tensor.nbytes, ALIGNMENT):
            raise ValueError("free() takes a tensor as empty() returned it; this one is no allocation of this heap")
        self._freed[offset] = self._held.pop(offset)  # other heaps get it only once all ranks have come so far

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the segment's start to the tensor's first element; None if the tensor lies elsewhere."""
        local = self.segment.local
        distance = tensor.data_ptr() - local.data_ptr()
        return distance if 0 <= distance < local.nbytes and tensor.device == local.device else None

    def close(self):
        """Return the memory to the runtime. Tensors of this heap must not be used any more."""
        for offset in (*self._held, *self._freed):
            self.segment.space.give_back(offset)
        self._held, self._freed, self._reserve = {}, {}, (0, 0)
        self.segment.close()

    def allocate(self, num_bytes: int) -> int:
        """Collective. The offset of so many bytes, which are now held."""
        space = self.segment.space
        while self._freed:
            space.give_back(self._freed.popitem()[0])
        asked, held, free = zip(*self.group.gather((num_bytes, self._held, space.free)), strict=True)
        if len(set(asked)) > 1:
            raise MismatchError(
                f"symmetric allocation differs between ranks, in bytes: {_by_rank(asked)}; all ranks must allocate the "
                f"same sizes in the same order"
            )
        if any(theirs != held[0] for theirs in held):
            raise MismatchError(
                f"symmetric allocation: the ranks hold tensors at different offsets: "
                f"{_by_rank(listed(list(map(str, theirs))) or 'none' for theirs in held)}; all must free the same "
                f"tensors in the same order"
            )
        if num_bytes == 0:
            return 0  # has no address, and nothing to give back
        size, ranges = round_up(num_bytes, ALIGNMENT), functools.reduce(common, free)
        fits = size + self.held_bytes <= self.num_bytes
        offset = first_fit(ranges, size) if fits else None
        if offset is None and self._reserve[1]:
            self._give_up_reserve()
            return self.allocate(num_bytes)
        if offset is None:
            self._refuse(num_bytes, ranges, fits)
        mine = space.take(offset, size, self.group.name)
        if all(self.group.gather(mine)):
            self._held[offset] = size
            return offset
        if mine:  # elsewhere another thread came first, for another heap
            space.give_back(offset)
        return self.allocate(num_bytes)

    def _give_up_reserve(self):
        offset, size = self._reserve
        self._reserve = 0, 0
        if size:
            del self._held[offset]
            self.segment.space.give_back(offset)

    def _refuse(self, num_bytes: int, ranges: list[tuple[int, int]], fits: bool):
        """Collective. Raise what is in the way: the limit, or what other heaps hold of the ranks' spaces."""
        left, space = self.num_bytes - sum(self._held.values()), self.segment.space
        largest, held = max((size for _, size in ranges), default=0), self.group.gather(space.held())
        holders = ""
        if fits and space.num_bytes != self.num_bytes:  # a pool, of which heaps take what they need
            rank = max(range(len(held)), key=lambda rank: sum(held[rank].values()))
            holders = f"of the {space.num_bytes} bytes on rank {rank}, " + ", ".join(
                f"{name or 'a heap'} holds {size}" for name, size in held[rank].items()
            )
        own = tuple(sorted(self._held.values(), reverse=True))
        raise HeapExhaustedError(num_bytes, min(largest, left), self.num_bytes, own, holders)


def _by_rank(values) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
