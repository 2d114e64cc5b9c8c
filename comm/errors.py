"""The errors that symmetric memory and its verbs raise, each with the fields that it reports."""

import copyreg
from dataclasses import dataclass


class TkernelsError(RuntimeError):
    """Base class of this library's run-time errors; wrong arguments raise ValueError or TypeError.

    `launch` raises a RankError for failures of its ranks.
    """

    def __reduce__(self):  # by the message and the fields: classes take other arguments than `args`, the message
        return copyreg.__newobj__, (type(self), *self.args), vars(self)


class MismatchError(TkernelsError):
    """Ranks of one group asked for different things in one collective call. Every rank raises the same message.

    If it was found in a kernel, the context can't be used any more.
    """


class OutOfStepError(MismatchError):
    """Ranks of one group met in different calls. Every rank raises the same message.

    calls, lines, values: by rank, the call, the line of the program, and the value passed to the meeting.
    """

    def __init__(self, calls: tuple[str, ...], lines: tuple[str, ...], values: tuple):
        self.calls, self.lines, self.values = calls, lines, values
        by_rank = "; ".join(
            f"rank {rank} is in {call} ({line})" for rank, (call, line) in enumerate(zip(calls, lines, strict=True))
        )
        super().__init__(f"the ranks are out of step: {by_rank}; all must make the same calls in the same order")


class LeaseError(TkernelsError):
    """A buffer was used against the rules of its lease: out of turn, after its release, across a capture's edge."""


class HeapExhaustedError(TkernelsError):
    """A symmetric allocation does not fit. Fields in bytes: `asked`, `free` (largest block), `total` (of this heap).

    held: the sizes of this heap's tensors, workspaces included, the largest first.
    holders: who holds the memory that all heaps share, if it is that which does not suffice; else empty.
    """

    def __init__(self, asked: int, free: int, total: int, held: tuple[int, ...] = (), holders: str = ""):
        self.asked, self.free, self.total, self.held, self.holders = asked, free, total, held, holders
        sizes = ", ".join(map(str, held[:8])) + (", ..." if held[8:] else "")
        way = "free tensors that are no longer needed or pass a larger heap_bytes to init()"
        super().__init__(
            f"symmetric heap exhausted: asked for {asked} bytes, the largest free block has {free} of {total} bytes; "
            + (
                f"{holders}; set TKERNELS_POOL_BYTES to a larger value, or finalize() contexts"
                if holders
                else f"its tensors and workspaces have {sizes or 'no'} bytes; {way}"
            )
        )


@dataclass(frozen=True)
class Fault:
    """Record of a wait that timed out: rank `rank`, in `operation`, waited for `peer`'s signal of `chunk`.

    Ranks are those of the context's group.
    """

    operation: str
    rank: int
    peer: int
    chunk: int
    expected: int
    seen: int


class WaitTimeoutError(TkernelsError):
    """A wait on a signal timed out, on this rank or on a peer of its group; `fault` records which wait.

    The context can't be used any more, since its epochs are out of step; `finalize()` it and `init()` a new one.
    """

    def __init__(
        self, fault: Fault, timeout_s: float, global_ranks: list[int] | None = None, meets: str | None = None
    ):
        """global_ranks: the global ranks of the group's ranks, if they differ. meets: the call in which the peer waits
        on the host for the rank to come.
        """
        self.fault, self.timeout_s, self.global_ranks = fault, timeout_s, global_ranks
        among = f" (ranks are those of a group, whose global ranks are {global_ranks})" if global_ranks else ""
        if fault.peer == fault.rank:
            waited, whose = 2 * timeout_s, "its own programs or copies"  # see device.wait_signal
            reason = "A copy has failed, or another wait of this launch has expired; is a longer limit needed?"
            way_out = "init(timeout_s=...)"
        else:
            waited, whose = timeout_s, f"the signal of rank {fault.peer}"
            reason = (
                f"Rank {fault.peer} died, is slower than the limit, or did not make this call; all ranks must make the "
                f"same calls in the same order"
            )
            way_out = "TKERNELS_COMPARE_CALLS=1 names those that differ; a longer limit: init(timeout_s=...)"
            if meets is not None:
                reason = f"Rank {fault.peer} waits for it on the host, in {meets}"
                way_out = "all ranks must make the same calls in the same order"
        super().__init__(
            f"{fault.operation}: rank {fault.rank} waited {waited:g} s for {whose}, chunk {fault.chunk}: expected "
            f"{fault.expected}, seen {fault.seen}. {reason} ({way_out}){among}"
        )

    def __getattr__(self, name):
        # The fault's fields are also the error's: `error.peer` reads better than `error.fault.peer`.
        if name in Fault.__dataclass_fields__ and "fault" in self.__dict__:
            return getattr(self.fault, name)
        raise AttributeError(name)
