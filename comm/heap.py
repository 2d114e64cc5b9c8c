"""SymmetricHeap: memory with the same layout on every rank of a group, so that a rank can address a peer's copy."""

import math

import torch

from tkernels.comm import capture
from tkernels.comm.allocator import FirstFit
from tkernels.comm.arguments import check_torch_dtype, check_type, switch, whole
from tkernels.comm.errors import HeapExhaustedError, MismatchError
from tkernels.comm.group import Group
from tkernels.comm.regions import ALIGNMENT, round_up


class SymmetricHeap:
    """A first-fit allocator over one segment of symmetric memory.

    The heap belongs to one group. All ranks allocate and free in the same order, so an object has the same offset on
    every rank; each allocation compares offset and size on all ranks before it returns.
    """

    def __init__(self, group: Group, num_bytes: int, open_segment):
        """Collective. `open_segment(group, num_bytes)` is the runtime's; see `runtime.Segment`."""
        asked = group.gather(num_bytes)
        if len(set(asked)) > 1:
            raise MismatchError(f"SymmetricHeap: ranks asked for different heap_bytes: {_by_rank(asked)}")
        self.group = group
        self.num_bytes = round_up(num_bytes, ALIGNMENT)
        self.segment = open_segment(group, self.num_bytes)
        self._blocks = FirstFit(self.num_bytes)

    @capture.lasting()
    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Collective. An uninitialised contiguous tensor at the same offset on every rank, 256-byte aligned.

        Raises MismatchError on every rank if shape or dtype give different sizes, HeapExhaustedError if it does
        not fit, ValueError for a negative size, TypeError for one that is no whole number and for what is no dtype.
        With TKERNELS_POISON=1 the memory is filled with NaN (all bits set).
        """
        wrong = None
        try:
            poisoned = switch("TKERNELS_POISON")
            check_torch_dtype("symmetric allocation: dtype", dtype)
            extents = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
            shape = tuple(whole("symmetric allocation: size", extent) for extent in extents)
            num_bytes = math.prod(shape) * dtype.itemsize
            size = round_up(num_bytes, ALIGNMENT)
            offset = self._blocks.find(size)
            told = num_bytes, offset
        except (TypeError, ValueError) as error:
            wrong, told = error, f"{type(error).__name__}, {error}"
        asked = self.group.gather(told)
        if len(set(asked)) > 1:
            raise MismatchError(
                f"symmetric allocation differs between ranks, in (bytes, offset): {_by_rank(asked)}; all ranks must "
                f"allocate the same sizes in the same order"
            )
        if wrong is not None:
            raise wrong
        if num_bytes == 0:
            return self.segment.local[:0].view(dtype).view(shape)  # has no address, and nothing to give back
        if offset is None:
            raise HeapExhaustedError(num_bytes, self._blocks.largest, self.num_bytes)
        self._blocks.take(size)
        memory = self.segment.local[offset : offset + num_bytes]
        if poisoned:
            memory.fill_(0xFF)
        return memory.view(dtype).view(shape)

    def untouched(self, num_bytes: int) -> torch.Tensor | None:
        """Allocate bytes that were never allocated before, so they are zero on every rank; None if too few are left.

        For a CUDA graph's capture, where ranks can't meet: all must ask for the same sizes, in the same order.
        """
        offset = self._blocks.take_new(round_up(num_bytes, ALIGNMENT))
        return None if offset is None else self.segment.local[offset : offset + num_bytes]

    def free(self, tensor: torch.Tensor):
        """Free a tensor of `empty`; all ranks, in the same order. Raises ValueError for any other tensor.

        Does nothing once the heap is closed.
        """
        check_type("free: tensor", tensor, torch.Tensor, "a tensor that empty() returned")
        if tensor.numel() == 0 or self.segment.local is None:
            return
        offset = self.offset(tensor)
        if self._blocks.size_at(offset) != round_up(tensor.nbytes, ALIGNMENT):
            raise ValueError("free() takes a tensor as empty() returned it; this one is no allocation of this heap")
        self._blocks.give_back(offset)

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Bytes from the heap's start to the tensor's first element; None if the tensor lies elsewhere."""
        distance = tensor.data_ptr() - self.segment.local.data_ptr()
        return distance if 0 <= distance < self.num_bytes and tensor.device == self.segment.local.device else None

    def close(self):
        """Return the segment to the runtime. Tensors of this heap must not be used any more."""
        self.segment.close()
        self._blocks = FirstFit(0)


def _by_rank(values) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
