"""The memory plan: a table of named regions that defines a buffer's size, its views and their bounds."""

import math

import torch

ALIGNMENT = 256  # bytes; what cudaMalloc guarantees, and a multiple of every vector and TMA access


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Regions:
    """Named regions laid out one after the other in a flat byte buffer.

    >>> plan = Regions(ready=((4, 8), torch.int64), inbox=((1024,), torch.uint8))
    >>> plan.num_bytes, plan.offset("inbox")
    (1280, 256)
    """

    def __init__(self, **regions: tuple[tuple[int, ...], torch.dtype]):
        self._regions = {}
        self.num_bytes = 0
        for name, (shape, dtype) in regions.items():
            if any(size < 0 for size in shape):
                raise ValueError(f"region {name!r} has a negative size in {tuple(shape)}")
            num_bytes = math.prod(shape) * dtype.itemsize
            self._regions[name] = (self.num_bytes, num_bytes, tuple(shape), dtype)
            self.num_bytes = round_up(self.num_bytes + num_bytes, ALIGNMENT)

    def offset(self, name: str) -> int:
        """Byte offset of a region from the buffer's start."""
        return self._find(name)[0]

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The region of `buffer` (uint8, one-dimensional), in the region's shape and dtype; shares memory."""
        offset, num_bytes, shape, dtype = self._find(name)
        if buffer.dtype != torch.uint8 or buffer.dim() != 1:
            raise TypeError(f"a memory plan views a flat uint8 buffer, not {buffer.dtype} {tuple(buffer.shape)}")
        if offset + num_bytes > buffer.numel():
            raise ValueError(
                f"region {name!r} ends at byte {offset + num_bytes}, but the buffer has only {buffer.numel()} bytes; "
                f"the whole plan needs {self.num_bytes}"
            )
        return buffer[offset : offset + num_bytes].view(dtype).view(shape)

    def _find(self, name: str):
        if name not in self._regions:
            raise KeyError(f"no region {name!r} in this memory plan; it has {', '.join(self._regions)}")
        return self._regions[name]
