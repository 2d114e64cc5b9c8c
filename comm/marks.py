"""Marks: timestamps that a program writes when it begins an activity, for traces of a launch.

A program does one thing at a time. A mark records the time at which it begins an activity, which ends the previous one.
Unless the constant TRACE of a launch is set, the compiled kernel contains none of this.

A recorded launch gets a table whose word TRACE_BUFFER is the address of an int64 buffer with a row for each program:
the number of marks it made, then TRACE_CAPACITY marks of (kind, first, second, time in ns). The last of these places is
reserved for END. Marks that found no place are counted too.
"""

import triton
import triton.language as tl

from tkernels.comm.device import INTERPRETED, TRACE_BUFFER, TRACE_CAPACITY, globaltimer
from tkernels.comm.device_simulated import clock_ns

# The activities, and what `first` and `second` mean for each.
KINDS = {
    "end": ("multiprocessor",),
    "compute": ("row", "column"),  # of an output tile's first element
    "store": ("row", "column"),  # includes adding the tile's other split-K parts, and the peers' partial sums
    "wait": ("chunk", "peer"),  # for a peer's chunk; here and below, this rank as the peer stands for all ranks
    "collect": ("chunk", "peer"),  # wait for own tiles of a chunk to send, split-K parts, or the copy engine
    "send": ("chunk", "peer"),
    "add": ("chunk", "peer"),  # summation in a collective
    "copy": ("chunk", "peer"),  # from the inbox to the output
}
END, COMPUTE, STORE, WAIT, COLLECT, SEND, ADD, COPY = map(tl.constexpr, range(len(KINDS)))
MARK = tl.constexpr(4)  # words of a mark


@triton.jit
def clock(L):
    """The time in ns, by a clock that all programs of a rank share; other ranks' clocks may be ahead or behind."""
    if INTERPRETED:
        now = tl.full((), clock_ns(), tl.int64)
    else:
        now = globaltimer()
    return now


@triton.jit
def mark(KIND: tl.constexpr, first, second, net, L):
    """Record that this program begins an activity of that kind.

    The number of marks made is kept in memory, not passed along as a value: that would make each iteration of a loop
    depend on the one before.
    """
    if L.TRACE:
        now = clock(L)
        capacity = tl.load(net.table + TRACE_CAPACITY).to(tl.int32)
        row = tl.load(net.table + TRACE_BUFFER).to(tl.pointer_type(tl.int64))
        row += tl.program_id(0).to(tl.int64) * (1 + capacity * MARK)
        made = tl.load(row)
        at = made
        room = capacity - 1
        if KIND == END:
            at = tl.minimum(made, room)
            room = capacity
        fits = at < room
        tl.store(row, made + 1)
        row += 1 + at * MARK
        tl.store(row, tl.full((), KIND, tl.int64), mask=fits)
        tl.store(row + 1, tl.cast(first, tl.int64), mask=fits)
        tl.store(row + 2, tl.cast(second, tl.int64), mask=fits)
        tl.store(row + 3, now, mask=fits)


@triton.jit
def end_marks(net, L):
    """The last mark of a program; its `first` is the SM that it ran on."""
    if L.TRACE:
        multiprocessor = tl.full((), 0, tl.int32)
        if not INTERPRETED:
            multiprocessor = tl.inline_asm_elementwise(
                "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
            )
        mark(END, multiprocessor, 0, net, L)
