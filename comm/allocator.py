"""First-fit allocation of byte ranges: the bookkeeping alone, no memory."""


class FirstFit:
    """Offsets into `num_bytes`, lowest first, with neighbours merged when they are given back."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)] if num_bytes else []  # (offset, size), by offset, never adjacent
        self._taken = {}  # offset -> size

    @property
    def largest(self) -> int:
        """Size of the largest free block."""
        return max((size for _, size in self._free), default=0)

    def find(self, size: int) -> int | None:
        """Where `take(size)` would allocate; None if nowhere."""
        return next((offset for offset, free in self._free if free >= size), None)

    def take(self, size: int) -> int | None:
        """Allocate: the offset, or None if no free block is large enough."""
        for place, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[place : place + 1] = [(offset + size, free - size)] if free > size else []
                self._taken[offset] = size
                return offset
        return None

    def give_back(self, offset: int):
        """Free what `take` returned as `offset`; KeyError for anything else."""
        blocks = sorted([*self._free, (offset, self._taken.pop(offset))])
        self._free = []
        for start, size in blocks:
            if self._free and sum(self._free[-1]) == start:
                self._free[-1] = (self._free[-1][0], self._free[-1][1] + size)
            else:
                self._free.append((start, size))
