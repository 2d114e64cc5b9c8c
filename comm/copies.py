"""Copies: a call's data is sent by the copy engine (DMA) beside its kernel, and takes no SM.

The kernel is the operation's own, with no program that sends. For every few chunks, a side stream holds three
operations: a wait until their rows are there, a copy to the peer, and a write of the number of chunks delivered so far
to a word of the peer. The peer's tiles poll that word beside the signals of puts. On the simulated runtime a host
thread does the same.

Copies go to the landing, behind a gate that the kernel opens (tkernels.comm.mail).

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

from tkernels.comm import interpreter
from tkernels.comm.driver import driver
from tkernels.comm.errors import TkernelsError

WAIT_VALUE_64, WRITE_VALUE_64 = 4, 5  # CUstreamBatchMemOpType
OPERATION_WORDS = 6  # 8-byte words of a CUstreamBatchMemOpParams


@dataclass(frozen=True)
class Send:
    """One copy of some chunks to one peer. An empty chunk is counted, but nothing is copied.

    source, first: the kernel's argument that is read, and the first byte there.
    to, num_bytes: the first byte in the landing of `target`, and the size.
    word, chunks: which word of `target`'s `delivered` is written after the copy, and its new value: the chunks there
        then. Sends with the same word come in order, and the peer waits for each. None: it is part of the next send.
    counter, tiles: the rows are there once this counter of the workspace exceeds `tiles` (`count_up_to`). 0 tiles: no
        wait, as the rows were there before the call, or an earlier send of the list waits for them.
    """

    target: int
    source: str
    first: int
    to: int
    num_bytes: int
    word: int
    chunks: int | None
    counter: int = 0
    tiles: int = 0


class Copies:
    """A launch beside which the copy engine sends: these sends, in this order, once the kernel has opened the gate.

    launch: of a kernel whose arguments `varying`, contiguous where sends read them, come before the gate.
    """

    def __init__(self, context, workspace, sends: list[Send], launch, varying: tuple[str, ...]):
        self._context, self._workspace, self._on_gpu = context, workspace, context.device.type == "cuda"
        self._launch = launch
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
            self._sends.append((varying.index(send.source), send.first, base + landing + send.to, send.num_bytes))
        words[-1].append((WRITE_VALUE_64, workspace.copied.data_ptr(), 1))
        closed = [[(WAIT_VALUE_64, gate.data_ptr(), 1), (WRITE_VALUE_64, gate.data_ptr(), 0)] for gate in self._gates]
        self._begin = [_operations([*gate, *words[0]]) for gate in closed]
        self._behind = [_operations(each) for each in words[1:]]

    def __call__(self, *tensors: torch.Tensor):
        """Collective. Launch the kernel, and the copies beside it."""
        captured = self._context.capturing
        gate, begin = self._gates[captured], self._begin[captured]
        if not self._on_gpu:
            with interpreter.meanwhile(lambda: self._carry_out(host_on_words, host_copy, begin, tensors)):
                self._launch(*tensors, gate)
            return
        here, side = self._workspace.streams()
        if captured:  # a graph includes only the work that events connect to it
            side.wait_stream(here)
        self._launch(*tensors, gate)  # before the stream operations that wait for it, see the module's docstring
        self._carry_out(*_of_stream(side.cuda_stream), begin, tensors)
        if captured:
            here.wait_stream(side)

    def _carry_out(self, on_words, copy, begin: ctypes.Array, tensors):
        on_words(begin)
        for (source, first, goal, num_bytes), behind in zip(self._sends, self._behind, strict=True):
            if num_bytes:
                copy(goal, tensors[source].data_ptr() + first, num_bytes)
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
