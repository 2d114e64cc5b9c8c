"""Which bytes of a memory are taken: the bookkeeping alone."""


import threading


class Space:
    """Which ranges of `num_bytes` are taken, and by whom. Threads may share it."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self.free = merged([(0, num_bytes)])  # ranges (offset, size), by offset, never adjacent
        self._taken = {}  # offset -> (size, owner)
        self._lock = threading.Lock()

    def take(self, offset: int, size: int, owner: str | None = None) -> bool:
        """Take that range. False if it is not free."""
        with self._lock:
            inside = [each for each in self.free if each[0] <= offset and offset + size <= sum(each)]
            for start, free in inside[:1] if size else ():
                pieces = (start, offset - start), (offset + size, start + free - offset - size)
                self.free = merged([each for each in self.free if each[0] != start] + [*pieces])
                self._taken[offset] = size, owner
            return bool(inside)

    def give_back(self, offset: int):
        """Free the range that was taken at `offset`; KeyError for anything else."""
        with self._lock:
            size, _ = self._taken.pop(offset)
            self.free = merged([*self.free, (offset, size)])

    def held(self) -> dict[str | None, int]:
        """Bytes by owner."""
        held = {}
        for size, owner in list(self._taken.values()):
            held[owner] = held.get(owner, 0) + size
        return held


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few ranges as possible, by offset."""
    result = []
    for start, size in sorted(ranges):
        if result and sum(result[-1]) == start:
            result[-1] = result[-1][0], result[-1][1] + size
        elif size:
            result.append((start, size))
    return result


def common(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The bytes that are in ranges of both."""
    overlaps = ((max(a, b), min(a + size, b + length)) for a, size in one for b, length in other)
    return merged([(start, end - start) for start, end in overlaps if start < end])


def first_fit(ranges: list[tuple[int, int]], size: int) -> int | None:
    """The lowest offset of a range with so many bytes; None if none has."""
    return next((offset for offset, free in ranges if free >= size), None)
