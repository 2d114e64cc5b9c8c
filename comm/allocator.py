"""First-fit allocation of byte ranges: the bookkeeping alone, no memory."""


class FirstFit:
    """Allocates ranges of `num_bytes`, lowest offset first; neighbours are merged when they are freed."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)] if num_bytes else []  # (offset, size), by offset, never adjacent
        self._taken = {}  # offset -> size
        self._top = 0  # nothing above has ever been taken

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
                return self._cut(place, offset, size)
        return None

    def take_new(self, size: int) -> int | None:
        """As `take`, but only from space that was never allocated before."""
        return self._cut(-1, self._top, size) if self._top + size <= self.num_bytes else None

    def _cut(self, place: int, offset: int, size: int) -> int:
        start, free = self._free.pop(place)
        pieces = (start, offset - start), (offset + size, start + free - offset - size)
        self._free = sorted([*self._free, *(piece for piece in pieces if piece[1])])
        self._taken[offset] = size
        self._top = max(self._top, offset + size)
        return offset

    def size_at(self, offset: int) -> int | None:
        """Size of the block that `take` returned as `offset`; None for anything else."""
        return self._taken.get(offset)

    def give_back(self, offset: int):
        """Free the block that `take` returned as `offset`; KeyError for anything else."""
        blocks = sorted([*self._free, (offset, self._taken.pop(offset))])
        self._free = []
        for start, size in blocks:
            if self._free and sum(self._free[-1]) == start:
                self._free[-1] = (self._free[-1][0], self._free[-1][1] + size)
            else:
                self._free.append((start, size))
