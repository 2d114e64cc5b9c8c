"""A network between simulated nodes: NVSHMEM's device calls, as the interpreter carries them out.

TKERNELS_NODES=0,0,1,1 names the node of each global rank. Loads and stores reach the ranks of one node alone, and a
group that spans several has the transport `nvshmem`. Its calls promise here what NVSHMEM promises and no more:

- A put returns once its source may be reused. It arrives later, before or after any other put, even of an earlier
  kernel. A program's fence orders its later puts to a rank after its earlier ones, and after those of earlier kernels.
- A put's signal arrives after its own data, and says nothing of other puts.
- Only `quiet` waits for arrival, and only for that of its own program's puts; the end of a kernel does not.
"""

import ctypes
import os
import random
import re
import threading
import time
from dataclasses import dataclass, field

import numpy
from triton._C.libtriton import interpreter as native

from tkernels.comm import interpreter
from tkernels.comm.device_simulated import as_int
from tkernels.comm.errors import TkernelsError

LATE_S = 1e-3  # most that a put is late, beside those before it


def nodes_of(ranks: list[int]) -> list[int]:
    """The node of each of these global ranks. Raises ValueError for a variable that does not name them all."""
    asked = os.environ.get("TKERNELS_NODES")
    if not asked:
        return [0] * len(ranks)
    nodes = asked.split(",")
    if not all(re.fullmatch(r"\d+", node) for node in nodes) or max(ranks) >= len(nodes):
        raise ValueError(
            f"TKERNELS_NODES={asked!r} must be a number for each rank, with commas, as 0,0,1,1; there are ranks up to "
            f"{max(ranks)}"
        )
    return [int(nodes[rank]) for rank in ranks]


@dataclass(eq=False)
class _Put:
    """A message on its way. program: who made it, as (launch, thread). signal: (address, value, operation).

    after: what must arrive before.
    """

    program: tuple[int | None, int]
    pe: int
    address: int
    data: bytes
    signal: tuple[int, int, object] | None
    after: list["_Put"]


@dataclass
class _Network:
    """What this process has sent and not yet delivered, and where each rank's memory is mapped here."""

    segments: dict[int, tuple[int, list[int]]] = field(default_factory=dict)  # own address -> (bytes, all addresses)
    underway: list[_Put] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    fenced: dict[int, list[_Put]] = field(default_factory=dict)  # what was underway at a thread's last fence
    chance: random.Random = field(default_factory=lambda: random.Random(os.getpid()))
    thread: threading.Thread | None = None

    def address(self, symmetric: int, pe: int) -> int:
        """Where a symmetric address of this process lies in the memory of a rank."""
        for start, (num_bytes, addresses) in self.segments.items():
            if start <= symmetric < start + num_bytes:
                return addresses[pe] + symmetric - start
        raise TkernelsError(f"{symmetric:#x} is no symmetric address")

    def send(self, put: _Put):
        with self.changed:
            self.underway.append(put)
            if self.thread is None:
                self.thread = threading.Thread(target=self._deliver, daemon=True)
                self.thread.start()
            self.changed.notify_all()

    def wait_until(self, arrived):
        with self.changed:
            while not arrived():
                self.changed.wait()

    def _deliver(self):
        while True:
            self.wait_until(lambda: self.underway)
            time.sleep(self.chance.random() * LATE_S)
            with self.changed:
                ready = [put for put in self.underway if not any(each in self.underway for each in put.after)]
                put = self.chance.choice(ready)
            ctypes.memmove(put.address, put.data, len(put.data))
            if put.signal:
                _update(*put.signal)
            with self.changed:
                self.underway.remove(put)
                put.after = []  # or each would keep those before it
                self.changed.notify_all()


def _update(address: int, value: int, operation):
    arguments = numpy.array([address], numpy.uint64), numpy.array([value], numpy.int64), numpy.array([True])
    native.atomic_rmw(operation, *arguments, native.MEM_SEMANTIC.RELEASE)


_network = _Network()
_OPERATIONS = {9: native.RMW_OP.XCHG, 10: native.RMW_OP.ADD}  # NVSHMEM's numbers, as in device_nvshmem.py


def connect(start: int, num_bytes: int, addresses: list[int]):
    """Symmetric memory begins at `start` here, and is mapped at these addresses, by rank."""
    _network.segments[start] = num_bytes, addresses


def disconnect(start: int):
    """Wait until all has arrived, before the memory is unmapped."""
    _network.wait_until(lambda: not _network.underway)
    _network.segments.pop(start, None)


@interpreter.builtin
def putmem_signal_block(dst, src, num_bytes, signal, value, operation, pe):
    pe = as_int(pe)
    told = None
    if signal is not None:
        told = _network.address(as_int(signal), pe), as_int(value), _OPERATIONS[as_int(operation)]
    data = ctypes.string_at(as_int(src), as_int(num_bytes))
    after = [put for put in _network.fenced.get(threading.get_ident(), ()) if put.pe == pe]
    _network.send(_Put(_program(), pe, _network.address(as_int(dst), pe), data, told, after))


@interpreter.builtin
def putmem_block(dst, src, num_bytes, pe):
    putmem_signal_block(dst, src, num_bytes, None, 0, 0, pe)


@interpreter.builtin
def getmem_block(dst, src, num_bytes, pe):
    ctypes.memmove(as_int(dst), _network.address(as_int(src), as_int(pe)), as_int(num_bytes))


@interpreter.builtin
def fence():
    launch, thread = program = _program()
    with _network.changed:
        earlier = [put for put in _network.underway if put.program == program or put.program[0] != launch]
    _network.fenced[thread] = earlier


@interpreter.builtin
def quiet():
    program = _program()
    _network.wait_until(lambda: not any(put.program == program for put in _network.underway))


def _program() -> tuple[int | None, int]:
    return interpreter.launch_number(), threading.get_ident()


@interpreter.builtin
def refuse_unmapped(offsets, target, rank, size):
    """Raise TkernelsError if rank `target` has no memory for this process, whose rank is `rank`.

    It is none of the `size` ranks, or on another node, and its offset 0. Without nodes, an offset of 0 is that of a
    loopback, whose peers are the rank itself.
    """
    target, rank, size = as_int(target), as_int(rank), as_int(size)
    if not 0 <= target < size:
        raise TkernelsError(f"a kernel of rank {rank} names rank {target}, but there are {size}, from 0 on")
    offset = ctypes.c_int64.from_address(as_int(offsets) + 8 * target).value
    if _network.segments and target != rank and not offset:
        raise TkernelsError(f"rank {rank} can't load or store in the memory of rank {target}, on another node")
