"""Copies: the copy engine moves what a call sends, beside its kernel, and no multiprocessor does.

The kernel is the operation's own with no program that sends. On a side stream stand, for some chunks at a time: a wait
until their rows are there, a copy to the peer, and how many chunks the peer has now, written to one of its words, which
its tiles look at beside the signals of puts. On the simulated runtime a thread of the host does the same.

A copy's addresses must be known when it is enqueued, but of two inboxes that alternate by the epoch only the device
knows which one is next. So copies go to a third one, the *landing*, and begin behind a gate. The last program of each
kernel tells every peer that this rank has come to this call, waits until all of them have, and opens the gate
(`begin_landing`). And it ends no earlier than the copies (`await_copies`), so whatever the stream is given next is
behind them, with no event between the two streams: each would take the host as long as a copy does.

Who sends is a rank's own affair: what lands there, in which chunks, is the same whether its copy engine sends or its
programs do, which wait for all peers as well, and a peer looks for both. Those that send the finished rows of an
all-reduce need not: a tile of them has heard from every peer in this call.

Why nothing lands on what is still read: the gate opens once every peer has come to this call, on a stream where it has
finished all before it; whatever lay in its landing was read by that, by a call or by what the stream was given after
it. This holds whether they were calls of this way or not, for the first one, before which nothing was there, and for
ranks without rows, who have a gate as well.
Nor does this way disturb the argument for two inboxes (tkernels.comm.workspace): every rank hears from every other one.

Why no old data is read for new: a rank's count of landed chunks is zero when it comes to a call, and a peer writes a
larger one behind its data, on one stream. By the end of the call all counts that peers write have been waited for, so
the last program may set them to zero: the next ones come behind the gate of the next call, for which peers wait for
this rank. A count is no epoch, which only the device knows, so a captured graph may hold it. A word for each chunk, as
puts have, would keep the stream for 0.75 us each, or the host for another call of the driver (bench/LOG.md).

Why copies go through the gate of their own call: those of a stream come in the order of its kernels, each of which has
ended, the gate closed again, before the next one opens it. Copies that a CUDA graph holds are not in that order, for a
replay may come before calls or after them, and so they have a gate of their own.

Why it ends: the side stream waits for words of this rank alone, the gate and counters, which its kernel raises even
after a wait of its own has expired, and all of them before it waits for the copies. That the last program opens the
gate holds up no other: a launch begins only where all its programs have room. The counters are zero again once
the copies are done, and only then: a launch that a fault has ended leaves them to copies that still wait. And whatever
the side stream waits for was enqueued before it, on every rank: streams that share a queue of the hardware, as all do
with CUDA_DEVICE_MAX_CONNECTIONS=1, can't hold up what it needs. It has no kernels, which would need room beside one
that takes all multiprocessors, and to be loaded.
"""

import ctypes
import functools
import time
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tkernels.comm import interpreter
from tkernels.comm.device import arrived, count, end_epoch, tell_all, wait_signal
from tkernels.comm.driver import driver
from tkernels.comm.errors import TkernelsError
from tkernels.comm.lease import Crossing
from tkernels.comm.marks import COLLECT, mark

WAIT_VALUE_64, WRITE_VALUE_64 = 4, 5  # CUstreamBatchMemOpType
OPERATION_WORDS = 6  # of 8 bytes, of a CUstreamBatchMemOpParams
LOOKS = tl.constexpr(64)  # at the words of all peers at once, before they are waited for one after the other


@triton.jit
def await_peers(begun, epoch, table, rank, SIZE: tl.constexpr, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr):
    """Wait until all peers have come to this call, so that nobody reads any more what lay in their landings."""
    peers = (rank + 1 + tl.arange(0, triton.next_power_of_2(SIZE)) % (SIZE - 1)) % SIZE
    looks = 0
    here = arrived(begun + peers, epoch, TRANSPORT)
    while (looks < LOOKS) & (here == 0):
        here = arrived(begun + peers, epoch, TRANSPORT)
        looks += 1
    if not here:
        for step in range(1, SIZE):
            source = (rank + step) % SIZE
            wait_signal(begun + source, epoch, table, source, 0, OPERATION, TRANSPORT)


@triton.jit
def begin_landing(
    pid, num_comm, gate, begun, epoch, table, rank,
    SIZE: tl.constexpr, COPIES: tl.constexpr, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr,
):  # fmt: skip
    """Every program's first call where rows land. Copies, and programs that are set apart, are behind all peers then.

    Interleaved programs wait for them before the first tile that they send.
    """
    if COPIES:
        if pid == tl.num_programs(0) - 1:  # which has a tile less than others where turns aren't full
            tell_all(begun + rank, epoch, table, rank, SIZE, TRANSPORT)
            await_peers(begun, epoch, table, rank, SIZE, OPERATION, TRANSPORT)
            count(gate, TRANSPORT, "sys")
    else:
        if pid == 0:
            tell_all(begun + rank, epoch, table, rank, SIZE, TRANSPORT)
        if pid < num_comm:
            await_peers(begun, epoch, table, rank, SIZE, OPERATION, TRANSPORT)


@triton.jit
def await_copies(pid, copied, table, rank, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr, TRACE: tl.constexpr):
    """Before a launch ends where the copy engine sends: all has been sent then, or a wait has expired."""
    if pid == tl.num_programs(0) - 1:
        mark(COLLECT, 0, rank, table, TRANSPORT, TRACE)
        wait_signal(copied, 1, table, rank, 0, OPERATION, TRANSPORT)


@triton.jit
def end_launch(
    state, epoch, counters, num_counters, copied, landed, SIZE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Last call of every program: as `end_epoch`, and what is zero between calls is so: None where nothing changed."""
    if end_epoch(state, epoch):
        if landed is not None:
            word = tl.arange(0, triton.next_power_of_2(2 * SIZE))
            tl.store(landed + word, tl.zeros(word.shape, tl.int64), mask=word < 2 * SIZE)
        if counters is not None:
            if COPIES:
                if tl.load(copied) == 0:
                    num_counters = 0
            for first in range(0, num_counters, 256):
                at = first + tl.arange(0, 256)
                tl.store(counters + at, tl.full((256,), 0, tl.int64), mask=at < num_counters)
        if COPIES:
            tl.store(copied, tl.full((), 0, tl.int64))


@dataclass(frozen=True)
class Send:
    """The way of some chunks to one peer. `first`, `to`, `num_bytes` in bytes; an empty chunk is but counted.

    source, first: the tensor of the call that it is read from, and its first byte there. to: its first byte in the
        landing of `target`.
    word, chunks: which of the words `landed` of `target`, and how many chunks it says then. Sends with the same word
        come in turn, and the peer waits for each.
    counter, tiles: the rows are there once this counter of the workspace has passed `tiles` (`count_up_to`); without
        tiles they were there before the call.
    """

    target: int
    source: int
    first: int
    to: int
    num_bytes: int
    word: int
    chunks: int
    counter: int = 0
    tiles: int = 0


class Copies:
    """What the calls of one kind send by copies: in this order, once the kernel has opened the gate."""

    def __init__(self, context, workspace, sends: list[Send]):
        self._context, self._workspace, self._on_gpu = context, workspace, context.device.type == "cuda"
        self._order = Crossing(torch.cuda) if self._on_gpu else None
        self._gates = workspace.gates  # which a graph goes on with when the workspace has others
        offset, bases = context.heap.offset, context.heap.segment.bases
        landing, landed, counters = offset(workspace.landing), offset(workspace.landed), workspace.counters.data_ptr()
        self._sends, words = [], [[]]  # words: what is waited for and set before each copy, and behind the last one
        for send in sends:
            if send.tiles:
                words[-1].append((WAIT_VALUE_64, counters + 8 * send.counter, send.tiles + 1))
            base = bases[send.target]
            words.append([(WRITE_VALUE_64, base + landed + 8 * send.word, send.chunks)])
            self._sends.append((send.source, send.first, base + landing + send.to, send.num_bytes))
        words[-1].append((WRITE_VALUE_64, workspace.copied.data_ptr(), 1))
        closed = [[(WAIT_VALUE_64, gate.data_ptr(), 1), (WRITE_VALUE_64, gate.data_ptr(), 0)] for gate in self._gates]
        self._begin = [_operations([*gate, *words[0]]) for gate in closed]
        self._behind = [_operations(each) for each in words[1:]]

    def beside(self, launch, *sources: torch.Tensor):
        """Collective. Launch the kernel, and the copies beside it.

        launch: takes the gate that the kernel is to open. sources: the tensors that chunks are read from, contiguous.
        """
        captured = self._context.capturing
        gate, begin = self._gates[captured], self._begin[captured]
        addresses = [tensor.data_ptr() for tensor in sources]
        if not self._on_gpu:
            with interpreter.beside(lambda: self._carry_out(host_on_words, host_copy, begin, addresses)):
                launch(gate)
            return
        here, side = self._workspace.streams()
        if captured:  # a graph holds what its events lead to, and no more
            self._order(here, side)
        launch(gate)  # before what waits for it: see above
        self._carry_out(*_of_stream(side.cuda_stream), begin, addresses)
        if captured:
            self._order(side, here)

    def _carry_out(self, on_words, copy, begin: ctypes.Array, addresses: list[int]):
        on_words(begin)
        for (source, first, goal, num_bytes), behind in zip(self._sends, self._behind, strict=True):
            if num_bytes:
                copy(goal, addresses[source] + first, num_bytes)
            on_words(behind)


def _operations(operations: list[tuple[int, int, int]]) -> ctypes.Array:
    """CUstreamBatchMemOpParams of 48 bytes each: what to do, word, value, flags (at least; behind a fence), padding."""
    fields = [field for operation in operations for field in (*operation, 0, 0, 0)]
    return (ctypes.c_uint64 * len(fields))(*fields)


@functools.cache
def _of_stream(stream: int):
    """(wait for local words or set them; copy bytes) in the order of a CUDA stream."""
    batch, memcpy = driver().cuStreamBatchMemOp_v2, driver().cuMemcpyAsync

    def on_words(operations: ctypes.Array):
        error = batch(stream, len(operations) // OPERATION_WORDS, operations, 0)
        if error:
            raise TkernelsError(f"the copy engine's stream refused to wait for words or set them: CUDA error {error}")

    def copy(goal: int, source: int, num_bytes: int):
        error = memcpy(goal, source, num_bytes, stream)
        if error:
            raise TkernelsError(f"the copy engine's stream refused a copy: CUDA error {error}")

    return on_words, copy


def host_on_words(operations: ctypes.Array):
    for at in range(0, len(operations), OPERATION_WORDS):
        what, word, value = operations[at : at + 3]
        cell = ctypes.c_int64.from_address(word)
        while what == WAIT_VALUE_64 and cell.value < value:
            interpreter.raise_if_aborted()
            time.sleep(1e-4)
        if what == WRITE_VALUE_64:
            cell.value = value


def host_copy(goal: int, source: int, num_bytes: int):
    interpreter.jitter()
    ctypes.memmove(goal, source, num_bytes)
