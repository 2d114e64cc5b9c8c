"""Copies: a call's data is sent by the copy engine (DMA) beside its kernel, and takes no SM.

The kernel is the operation's own, with no program that sends. For every few chunks, a side stream holds three
operations: a wait until their rows are there, a copy to the peer, and a write of the number of chunks delivered so far
to a word of the peer. The peer's tiles poll that word beside the signals of puts. On the simulated runtime a host
thread does the same.

The addresses of a copy must be known when it is enqueued. But inboxes alternate by the epoch, and only the device knows
which one is next. So copies go to a third inbox, the *landing*, and wait behind a gate. In each kernel the last program
tells every peer that this rank has begun this call (`device.begin_call`), waits until all peers have begun it too, and
opens the gate (`begin_landing`). The same program does not end before the copies are done (`await_copies`). So later
work on the stream follows the copies, with no event between the two streams; an event would take the host as long as a
copy does.

Each rank chooses its sender independently. Its data has the same place and the same chunks in a peer's landing whether
the copy engine sends or programs do, and the peer polls for both. Programs that send to the landing also wait for all
peers first. Those that send the finished rows of an all-reduce need not: a finished tile has waited for the partial
sums of every peer in this call.

Why nothing lands on data that is still being read: the gate opens only once every peer has begun this call, and a peer
begins it after all earlier work on its stream has finished. Whatever lay in its landing was read by that work: by a
call, or by what followed the call on the stream. It makes no difference whether the earlier calls used the landing. The
argument also covers the first call, before which the landing was empty, and ranks without rows, which have a gate too.
The argument for two inboxes (tkernels.comm.workspace) still holds: every rank receives a signal from every other.

Why no old data is taken for new: a rank's count of delivered chunks is zero when it begins a call. A peer writes a
larger count after the data, on one stream. By the end of the call the rank has waited for all counts that peers write,
so its last program to finish may reset them to zero. Peers write the next counts behind the gate of the next call,
which waits for this rank. A count, unlike an epoch, is known on the host, so a captured graph can hold it. One word for
each chunk, as puts have, would keep the stream for 0.75 us each, or cost the host another driver call (bench/LOG.md).

Why copies pass the gate of their own call: the copies of a stream are in the order of its kernels. Before a kernel
opens the gate, the previous kernel has ended and the gate is closed again. Copies in a CUDA graph are not in that
order, as a replay may come before or after other calls, so they have a gate of their own.

Why it terminates: the side stream waits only for words of this rank, the gate and counters. The kernel raises them even
after one of its waits has timed out, and all of them before it waits for the copies. No other program is held up by the
one that opens the gate, since a launch begins only when all its programs are resident. The counters are reset once
the copies are done, and only then: a launch that a fault has ended leaves them to copies that still wait. Everything
that the side stream waits for was enqueued before it, on every rank. So streams that share a hardware queue, as all do
with CUDA_DEVICE_MAX_CONNECTIONS=1, can't block what it needs. The side stream has no kernels: they would need room
beside a kernel that takes all SMs, and would have to be loaded.
"""

import ctypes
import functools
import time
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tkernels.comm import interpreter
from tkernels.comm.device import CALL_BITS, arrived, begun_words, count, end_call, wait_begun, wait_signal
from tkernels.comm.driver import driver
from tkernels.comm.errors import TkernelsError
from tkernels.comm.marks import COLLECT, mark

WAIT_VALUE_64, WRITE_VALUE_64 = 4, 5  # CUstreamBatchMemOpType
OPERATION_WORDS = 6  # 8-byte words of a CUstreamBatchMemOpParams
LOOKS = tl.constexpr(64)  # polls of all peers' words together, before each is waited for separately


@triton.jit
def await_peers(epoch, net, L):
    """Wait until all peers have begun this call: then the earlier contents of their landings are no longer read."""
    words = begun_words(net) + (net.rank + 1 + tl.arange(0, triton.next_power_of_2(L.RANKS)) % (L.RANKS - 1)) % L.RANKS
    looks = 0
    here = arrived(words, epoch << CALL_BITS, L)
    while (looks < LOOKS) & (here == 0):
        here = arrived(words, epoch << CALL_BITS, L)
        looks += 1
    if not here:
        for step in range(1, L.RANKS):
            wait_begun(epoch, (net.rank + step) % L.RANKS, net, L)


@triton.jit
def begin_landing(pid, num_comm, mail, net, L):
    """Every program's second call: if rows go to the landing, senders wait until all peers have begun this call too.

    The gate opens only then. Without one, the `num_comm` comm programs wait here, and interleaved programs wait before
    the first tile that they send.
    """
    if mail.gate is not None:
        if pid == tl.num_programs(0) - 1:
            await_peers(mail.epoch, net, L)
            count(mail.gate, L, "sys")
    elif mail.delivered is not None:
        if pid < num_comm:
            await_peers(mail.epoch, net, L)


@triton.jit
def await_copies(pid, mail, net, L):
    """Keep a launch from ending before the copy engine has sent everything, or a wait has timed out."""
    if mail.copied is not None:
        if pid == tl.num_programs(0) - 1:
            mark(COLLECT, 0, net.rank, net, L)
            wait_signal(mail.copied, 1, net.rank, 0, net, L)


@triton.jit
def end_launch(state, call, counters, num_counters, mail, net, L):
    """Every program's last call: `end_call`; the last program to arrive zeroes what must be zero between calls.

    counters: None if this launch left them unchanged.
    """
    if end_call(state, mail.epoch, call, net, L):
        if mail.delivered is not None:
            word = tl.arange(0, triton.next_power_of_2(2 * L.RANKS))
            tl.store(mail.delivered + word, tl.zeros(word.shape, tl.int64), mask=word < 2 * L.RANKS)
        if counters is not None:
            if mail.copied is not None:
                if tl.load(mail.copied) == 0:
                    num_counters = 0
            for first in range(0, num_counters, 256):
                at = first + tl.arange(0, 256)
                tl.store(counters + at, tl.full((256,), 0, tl.int64), mask=at < num_counters)
        if mail.copied is not None:
            tl.store(mail.copied, tl.full((), 0, tl.int64))


@dataclass(frozen=True)
class Send:
    """One copy of some chunks to one peer. An empty chunk is counted, but nothing is copied.

    source, first: the number of the call's tensor that is read, and the first byte there.
    to, num_bytes: the first byte in the landing of `target`, and the size.
    word, chunks: which word of `target`'s `delivered` is written after the copy, and its new value: the chunks there
        then. Sends with the same word come in order, and the peer waits for each. None: it is part of the next send.
    counter, tiles: the rows are there once this counter of the workspace exceeds `tiles` (`count_up_to`). 0 tiles: no
        wait, as the rows were there before the call, or an earlier send of the list waits for them.
    """

    target: int
    source: int
    first: int
    to: int
    num_bytes: int
    word: int
    chunks: int | None
    counter: int = 0
    tiles: int = 0


class Copies:
    """The sends by the copy engine of all calls of one kind: in this order, once the kernel has opened the gate."""

    def __init__(self, context, workspace, sends: list[Send]):
        self._context, self._workspace, self._on_gpu = context, workspace, context.device.type == "cuda"
        self._gates = workspace.gates  # a graph keeps using these after the workspace has replaced its own
        offset, bases = context.heap.offset, context.heap.segment.bases
        landing, delivered = offset(workspace.landing), offset(workspace.delivered)
        counters = workspace.counters.data_ptr()
        self._sends, words = [], [[]]  # words: waits and writes before each copy, and after the last one
        for send in sends:
            if send.tiles:
                words[-1].append((WAIT_VALUE_64, counters + 8 * send.counter, send.tiles + 1))
            base = bases[send.target]
            write = WRITE_VALUE_64, base + delivered + 8 * send.word, send.chunks
            words.append([] if send.chunks is None else [write])
            self._sends.append((send.source, send.first, base + landing + send.to, send.num_bytes))
        words[-1].append((WRITE_VALUE_64, workspace.copied.data_ptr(), 1))
        closed = [[(WAIT_VALUE_64, gate.data_ptr(), 1), (WRITE_VALUE_64, gate.data_ptr(), 0)] for gate in self._gates]
        self._begin = [_operations([*gate, *words[0]]) for gate in closed]
        self._behind = [_operations(each) for each in words[1:]]

    def beside(self, launch, *sources: torch.Tensor):
        """Collective. Launch the kernel, and the copies beside it.

        launch: launches the kernel; its argument is the gate that the kernel opens. sources: the contiguous tensors
            that chunks are read from.
        """
        captured = self._context.capturing
        gate, begin = self._gates[captured], self._begin[captured]
        addresses = [tensor.data_ptr() for tensor in sources]
        if not self._on_gpu:
            with interpreter.meanwhile(lambda: self._carry_out(host_on_words, host_copy, begin, addresses)):
                launch(gate)
            return
        here, side = self._workspace.streams()
        if captured:  # a graph includes only the work that events connect to it
            side.wait_stream(here)
        launch(gate)  # before the stream operations that wait for it, see the module's docstring
        self._carry_out(*_of_stream(side.cuda_stream), begin, addresses)
        if captured:
            here.wait_stream(side)

    def _carry_out(self, on_words, copy, begin: ctypes.Array, addresses: list[int]):
        on_words(begin)
        for (source, first, goal, num_bytes), behind in zip(self._sends, self._behind, strict=True):
            if num_bytes:
                copy(goal, addresses[source] + first, num_bytes)
            if behind:
                on_words(behind)


def _operations(operations: list[tuple[int, int, int]]) -> ctypes.Array:
    """CUstreamBatchMemOpParams of 48 bytes each: operation, word, value, flags, padding.

    Flags are 0: a wait is for at least the value, a write comes after a fence.
    """
    fields = [field for operation in operations for field in (*operation, 0, 0, 0)]
    return (ctypes.c_uint64 * len(fields))(*fields)


@functools.cache
def _of_stream(stream: int):
    """Two functions that enqueue work on a CUDA stream: waits for and writes of words, and a copy of bytes."""
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
