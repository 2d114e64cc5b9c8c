"""What a call is, as far as all ranks must agree: its description, and the number that travels in its place.

In every call on a workspace each rank tells its peers the epoch and the number of the call that it has begun
(`device.begin_call`), and compares the numbers that it is told with its own (`device.end_call`). Equal calls have equal
numbers on all ranks, with nothing agreed on beforehand. A number means nothing to a reader, so once two of them differ,
the two ranks exchange the descriptions on the host.

Threads. Each rank would order the calls of two threads in its own way, and one thread's call on a rank would meet the
other's on a peer. So where calls overlap, the second is refused (`Turn`). Threads that take turns are welcome: as
autograd's, which run backward while the thread that called it waits.
"""

import functools
import json
import sys
import threading
import zlib
from dataclasses import dataclass

# 20 bits: of a million pairs of calls that differ, one has equal numbers. They share a word with the epoch, whose 43
# bits last for a year of calls that take 5 us each.
CALL_BITS = 20


@dataclass(frozen=True)
class Call:
    """An operation, and the values that all ranks must pass alike, by name, as text."""

    operation: str
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, operation: str, fields: dict) -> "Call":
        return cls(operation, tuple((name, str(value)) for name, value in fields.items()))

    @functools.cached_property
    def number(self) -> int:
        """CALL_BITS bits, not all zero, which is what memory holds before the first call."""
        return zlib.crc32(repr((self.operation, self.fields)).encode()) % ((1 << CALL_BITS) - 1) + 1

    def to_json(self) -> str:
        return json.dumps([self.operation, self.fields])

    @classmethod
    def from_json(cls, text: str) -> "Call":
        operation, fields = json.loads(text)
        return cls(operation, tuple(map(tuple, fields)))

    def __str__(self):
        return f"{self.operation}({', '.join(f'{name}={value}' for name, value in self.fields)})"


def difference(first: int, call: Call | None, second: int, other: Call | None) -> str:
    """For errors: what two ranks' calls differ in. None: a call that its rank has not named."""
    if call is None or other is None or call.operation != other.operation:
        by_rank = (f"rank {rank} is in {each or 'another call'}" for rank, each in ((first, call), (second, other)))
        return f"the ranks are out of step: {'; '.join(by_rank)}; all must make the same calls in the same order"
    theirs = dict(other.fields)
    found = "; ".join(
        f"{name}: {value} on rank {first}, {theirs.get(name)} on rank {second}"
        for name, value in call.fields
        if value != theirs.get(name)
    )
    return f"{call.operation}: the ranks' calls differ, in {found}; all must pass the same"


class Turn:
    """For `with`: lets one thread in at a time, any number of times, and calls `refuse` for others that come meanwhile.

    refuse: a function that raises; takes two texts, which thread comes and which is inside, and where they are.
    """

    def __init__(self, refuse):
        self._refuse, self._lock, self._inside = refuse, threading.RLock(), None

    def __enter__(self):  # 0.4 us, with __exit__
        if not self._lock.acquire(blocking=False):
            frame = sys._current_frames().get(self._inside)
            self._refuse(_whereabouts(threading.get_ident(), sys._getframe(1)), _whereabouts(self._inside, frame))
        self._inside = threading.get_ident()

    def __exit__(self, *_):
        self._lock.release()


def _whereabouts(thread: int, frame) -> str:
    name = next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))
    while frame is not None and not module_of(frame).startswith("tkernels."):  # what the library itself calls
        frame = frame.f_back
    function, line = place(frame) if frame is not None else ("a call", "which has ended")
    return f"thread {name!r} in {function} ({line})"


def place(frame) -> tuple[str, str]:
    """The library's function that the program called, and the line of the program, on the stack of this frame."""
    function = "a call of the program's own"
    while frame.f_back is not None and module_of(frame).split(".")[0] in ("tkernels", "torch", "triton", "contextlib"):
        if module_of(frame).startswith("tkernels."):
            function = frame.f_code.co_name
        frame = frame.f_back
    return function, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def module_of(frame) -> str:
    return frame.f_globals.get("__name__", "")
