"""Marks: when a program began what, written by the program itself, for traces of a launch.

A program is at any time doing one thing. A mark notes the time at which it begins the next one, which ends the one
before. Without TRACE, a compile-time constant, none of this is in the compiled kernel.

A launch that is recorded gets a table whose word TRACE_BUFFER is the address of an int64 buffer, a row a program: the
number of its marks, then TRACE_CAPACITY marks of (kind, first, second, time in ns). The last of them is kept for END.
"""

import triton
import triton.language as tl

from tkernels.comm.device import SIMULATED, TRACE_BUFFER, TRACE_CAPACITY, globaltimer
from tkernels.comm.device_simulated import clock_ns

# What a program may be doing, and what `first` and `second` then are.
KINDS = {
    "end": ("multiprocessor",),
    "compute": ("row", "column"),  # the first ones of an output tile
    "store": ("row", "column"),  # and the addition of its other parts' sums, and of the peers'
    "wait": ("chunk", "peer"),  # for a peer's chunk; this rank as the peer, here and below: everyone's
    "collect": ("chunk", "peer"),  # wait for this rank's own tiles of a chunk that goes to a peer, or a tile's parts
    "send": ("chunk", "peer"),
    "add": ("chunk", "peer"),  # a collective's sums
    "copy": ("chunk", "peer"),  # from the inbox to the output
}
END, COMPUTE, STORE, WAIT, COLLECT, SEND, ADD, COPY = map(tl.constexpr, range(len(KINDS)))
MARK = tl.constexpr(4)  # words


@triton.jit
def clock(TRANSPORT: tl.constexpr):
    """Nanoseconds of a clock that all programs of a rank share; other ranks' may be ahead or behind."""
    if TRANSPORT == SIMULATED:
        now = tl.full((), clock_ns(), tl.int64)
    else:
        now = globaltimer()
    return now


@triton.jit
def mark(KIND: tl.constexpr, first, second, table, TRANSPORT: tl.constexpr, TRACE: tl.constexpr):
    """This program begins something of that kind.

    How many marks it has made is kept in memory, not handed on: a loop's iterations then don't wait for each other.
    """
    if TRACE:
        now = clock(TRANSPORT)
        capacity = tl.load(table + TRACE_CAPACITY).to(tl.int32)
        row = tl.load(table + TRACE_BUFFER).to(tl.pointer_type(tl.int64))
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
def end_marks(table, TRANSPORT: tl.constexpr, TRACE: tl.constexpr):
    """The last mark of a program."""
    if TRACE:
        multiprocessor = tl.full((), 0, tl.int32)
        if TRANSPORT != SIMULATED:
            multiprocessor = tl.inline_asm_elementwise(
                "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
            )
        mark(END, multiprocessor, 0, table, TRANSPORT, TRACE)
