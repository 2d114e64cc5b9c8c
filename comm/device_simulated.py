"""The parts of the simulated transport that are plain Python: waits, delays and the clock.

Kernels call these functions in the interpreter; compiled code never reaches them.
"""

import ctypes
import time

import numpy

from tkernels.comm import interpreter
from tkernels.comm.calls import CALL_BITS
from tkernels.comm.errors import TkernelsError

RECORD_LIMIT_S = 5.0  # for the fault record of an expired wait to be written


class WaitExpired(TkernelsError):
    """Ends an interpreted launch after an expired wait; the context turns it into a WaitTimeoutError."""


def as_int(value) -> int:
    """A scalar of the interpreter, or a plain number."""
    data = value.handle.data if hasattr(value, "handle") else value
    return int(data.item()) if hasattr(data, "item") else int(getattr(data, "value", data))


@interpreter.builtin
def spin(signal, epoch, timeout_ns, fault_flag, begun, rank, source, other=None, value=None):
    """Return 1 once the word at `signal` is at least `epoch`, or the word at `other`, if given, is at least `value`.

    Returns 0 once the time limit has passed, a fault is flagged, or `rank` and `source` are in different calls of one
    epoch, as their words at `begun` tell, if it is not 0.
    """
    words = [(signal, epoch)] if other is None else [(signal, epoch), (other, value)]
    words = [(ctypes.c_int64.from_address(as_int(word)), as_int(wanted)) for word, wanted in words]
    arrived = lambda: any(word.value >= wanted for word, wanted in words)  # noqa: E731
    return _poll(arrived, timeout_ns, fault_flag, begun, rank, source)


@interpreter.builtin
def spin_packets(packets, num_packets, epoch, timeout_ns, fault_flag, begun, rank, source):
    """As `spin`, once all packets are here: 64-bit ones with the epoch in the upper half, 32-bit ones other than 0."""
    num_words = as_int(num_packets) * packets.dtype.element_ty.primitive_bitwidth // 32
    words = numpy.ctypeslib.as_array((ctypes.c_uint32 * num_words).from_address(as_int(packets)))
    if num_words == as_int(num_packets):
        return _poll(words.all, timeout_ns, fault_flag, begun, rank, source)
    wanted = as_int(epoch) & 0xFFFFFFFF
    return _poll(lambda: (words[1::2] == wanted).all(), timeout_ns, fault_flag, begun, rank, source)


def _poll(arrived, timeout_ns, fault_flag, begun, rank, source):
    """Return 1 once `arrived()` is true, and the calls do not differ; 0 in the cases of `spin`, or if aborted.

    The thread sleeps between polls. Ranks outnumber cores, so a spinning rank would delay the one it waits for.
    """
    flag = ctypes.c_int64.from_address(as_int(fault_flag))
    begun = as_int(begun)
    words = [ctypes.c_int64.from_address(begun + 8 * as_int(each)) for each in (rank, source)] if begun else []
    limit = time.monotonic_ns() + as_int(timeout_ns)
    interpreter.jitter()
    pause = 20e-6
    while not arrived():
        if flag.value or interpreter.aborted() or time.monotonic_ns() > limit or _differ(words):
            return 0
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return int(not _differ(words))


def _differ(begun: list) -> bool:
    """Whether two ranks' words of `begun` are of one epoch but of different calls."""
    found = {word.value for word in begun}
    return len(found) == 2 and len({word >> CALL_BITS for word in found}) == 1


@interpreter.builtin
def give_up(faults, size, words):
    """End this launch after an expired wait, once a fault record of it is complete.

    The records of `size` ranks, `words` words each, follow the flag at `faults`. Another program of this launch may be
    writing one now, and ending the launch at once would interrupt it.
    """
    first, record_bytes = as_int(faults), 8 * as_int(words)
    records = [ctypes.c_int64.from_address(first + record_bytes * (1 + rank)) for rank in range(as_int(size))]
    limit = time.monotonic() + RECORD_LIMIT_S
    while not any(record.value for record in records) and not interpreter.aborted() and time.monotonic() < limit:
        time.sleep(1e-4)
    raise WaitExpired("a wait on a signal expired")


@interpreter.builtin
def clock_ns() -> int:
    """The time in ns, by one clock for all processes of the machine."""
    return time.monotonic_ns()


@interpreter.builtin
def delay():
    """A random pause if the interpreter has a jitter seed; otherwise nothing."""
    interpreter.jitter()
