"""The device verbs: put and get, signals and waits for them, packets, counters, fences, peers' addresses.

A launch uses one of three transports, the constant TRANSPORT:

SIMULATED  Triton's interpreter; peers' memory is mapped into the process.
PEER       compiled; NVSHMEM's memory is accessed by loads and stores at the addresses that nvshmem_ptr returns.
NVSHMEM    NVSHMEM's own device calls, which also reach other nodes; in the interpreter those of simulated_network.py.

All verbs are program-wide: every thread of a program must call them together. Their arguments come in one order: what,
the value, who (a rank within the group), then `net` and `L` (see `Net` and `Link`). Signals are int64 words that only
grow; the exceptions are words that count within one call, which are zero between calls.

In the docstrings, "Orders" states which writes a program is guaranteed to see once it has observed a signal, a count or
a packet.
"""

import zlib
from typing import NamedTuple

import triton
import triton.language as tl

from tkernels.comm import calls, runtime
from tkernels.comm.arguments import check_type
from tkernels.comm.device_nvshmem import SIGNAL_ADD, SIGNAL_SET
from tkernels.comm.device_simulated import delay, give_up, spin, spin_packets
from tkernels.comm.simulated_network import refuse_unmapped

if runtime.RUNTIME == "simulated":
    from tkernels.comm.simulated_network import fence as nvshmem_fence
    from tkernels.comm.simulated_network import getmem_block, putmem_block, putmem_signal_block
    from tkernels.comm.simulated_network import quiet as nvshmem_quiet
else:
    from tkernels.comm.device_nvshmem import fence as nvshmem_fence
    from tkernels.comm.device_nvshmem import getmem_block, putmem_block, putmem_signal_block
    from tkernels.comm.device_nvshmem import quiet as nvshmem_quiet

SIMULATED = tl.constexpr(0)
PEER = tl.constexpr(1)
NVSHMEM = tl.constexpr(2)
TRANSPORTS = {"simulated": 0, "peer": 1, "nvshmem": 2}
INTERPRETED = tl.constexpr(runtime.RUNTIME == "simulated")

# The table: words as named below, then three arrays with a word for each rank of the group. The first holds the
# distance in bytes from this rank's part of the heap to that rank's, as mapped here, or 0 if it is not mapped. The
# second holds the distance to its NVSHMEM address, the third its PE.
RANK = tl.constexpr(0)
SIZE = tl.constexpr(1)
TIMEOUT_NS = tl.constexpr(2)
FAULTS = tl.constexpr(3)  # address of this rank's fault words
HOST_FLAG = tl.constexpr(4)  # address of a word in host memory, set to have the host read the fault words; 0 if none
CLOCK = tl.constexpr(5)  # address of a word, shared by all waits, through which they read one clock
TRACE_BUFFER = tl.constexpr(6)  # in a recorded launch: address of the buffer for marks (tkernels.comm.marks)
TRACE_CAPACITY = tl.constexpr(7)  # in a recorded launch: marks that each program has room for
BEGUN = tl.constexpr(8)  # in a workspace's table: address of its `begun` words; else 0
OFFSETS = tl.constexpr(10)

# The fault words of a rank, in units of FAULT_RECORD words. Word 0 of the first unit is the flag. Then comes one record
# for each rank of the group, written by that rank. Its last field is 0; or the calls of `rank` and `peer` if they
# differ (`differing_calls`); or OVERLAP if calls of two threads of `rank` overlapped; or FAILED if it goes no further;
# or FORM if `rank` expected a message of another form (`calls.form_of`) than the one that it has seen of `peer`.
FAULT_RECORD = tl.constexpr(8)
FAULT_FIELDS = ("written", "operation", "rank", "peer", "chunk", "expected", "seen", "calls")
OVERLAP = tl.constexpr(-1)
FORM = tl.constexpr(-2)
FAILED = tl.constexpr(-3)

CALL_BITS = tl.constexpr(calls.CALL_BITS)  # of a `begun` word, for the call's number; the high bits are the epoch
CALL_MASK = tl.constexpr((1 << calls.CALL_BITS) - 1)

POLLS_PER_OTHER = tl.constexpr(8)  # polls of the likely word between two polls of the alternative one
LOOKS = tl.constexpr(64)  # polls of all peers' `begun` words together, before each is waited for separately
POLLS_PER_LOOK = tl.constexpr(256)  # polls between two checks of the clock and the fault flag; a poll takes about 1 us

SET = tl.constexpr(0)
ADD = tl.constexpr(1)

# A reducing barrier: whether the argument is other than 0 in every thread of the program.
_AGREE = "{ .reg .pred mine, all; setp.ne.s32 mine, $1, 0; bar.red.and.pred all, 0, mine; selp.s32 $0, 1, 0, all; "
AGREE = tl.constexpr(_AGREE + "}")
AGREE_BEFORE_TMA = tl.constexpr(_AGREE + "fence.proxy.async.global; }")

OTHER_NAN = tl.constexpr(0x7FFF7FFF)  # one NaN in fp32, two in fp16 or bf16


class Net(NamedTuple):
    """Where a program is. A kernel takes the two as arguments and makes this of them in its first line.

    table: the int64 table of a context, or of a workspace, laid out as above.  rank: this rank within the group.
    """

    table: object
    rank: object


class Link(NamedTuple):
    """The constants of a launch, one argument of its kernel (`Context.link`).

    RANKS: of the group.  OPERATION: see `operation`.  TRANSPORT: one of TRANSPORTS.  TRACE: make marks (comm/marks.py).
    TMA: kernels use it, so that its accesses must be ordered with others; see `runtime.has_tma`.
    LANDING: what arrives in an operation comes to the landing (comm/mail.py).  COPIED: this rank's copy engine sends.
    """

    RANKS: object
    OPERATION: object
    TRANSPORT: object
    TRACE: object = tl.constexpr(False)
    TMA: object = tl.constexpr(True)
    LANDING: object = tl.constexpr(False)
    COPIED: object = tl.constexpr(False)


_operations = {}


def operation(name: str) -> tl.constexpr:
    """The number that identifies an operation in fault records, derived from its name: the same on every rank.

    Raises ValueError if another name already has that number, TypeError for what is no name.
    """
    check_type("operation: name", name, str, "a name")
    number = zlib.crc32(name.encode()) >> 1  # an int32
    if _operations.setdefault(number, name) != name:
        raise ValueError(f"operation: {name!r} has the number of {_operations[number]!r}; choose another name")
    return tl.constexpr(number)


def operation_name(number: int) -> str:
    return _operations.get(number, f"operation {number}")


OP_FAILURE = operation("a failure of one rank")


@triton.jit
def peer(pointer, target, net, ALIGN: tl.constexpr = 1):
    """The pointer to the same object in the part of the heap of rank `target`, for loads and stores.

    ALIGN: alignment of the address in bytes, guaranteed by the caller. Below 16, stores to a peer are element by
    element.
    """
    if INTERPRETED:
        refuse_unmapped(net.table + OFFSETS, target, tl.load(net.table + RANK), tl.load(net.table + SIZE))
    return tl.multiple_of((pointer.to(tl.int64) + tl.load(net.table + OFFSETS + target)).to(pointer.dtype), ALIGN)


@triton.jit
def _symmetric_address(pointer, target, net):
    return pointer.to(tl.int64) + tl.load(net.table + OFFSETS + tl.load(net.table + SIZE) + target)


@triton.jit
def _pe(target, net):
    return tl.load(net.table + OFFSETS + 2 * tl.load(net.table + SIZE) + target).to(tl.int32)


@triton.jit
def meet():
    """A barrier of this program's threads that can be used in a pipelined loop.

    Triton does not pipeline a loop that contains a tl.debug_barrier.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _fence_system():
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def copy(dst, src, num_elements, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1, AHEAD: tl.constexpr = False):
    """Copy contiguous elements with this program's threads, BLOCK at a time. Orders: nothing.

    ALIGN: both addresses and the size are multiples of this many bytes. Below 16, the copy is element by element.
    AHEAD: load each block before the previous one is stored, with twice the registers. This makes programs that send
    beside a GEMM 1 to 3 % faster, and those of collectives 1 to 2 % slower (2 H200s, bench/LOG.md).
    """
    dst = tl.multiple_of(dst, ALIGN)
    src = tl.multiple_of(src, ALIGN)
    VECTOR: tl.constexpr = ALIGN * 8 // dst.dtype.element_ty.primitive_bitwidth
    if VECTOR > 1:
        num_elements = num_elements // VECTOR * VECTOR  # tells the compiler that no vector is partly masked
    lane = tl.arange(0, BLOCK)
    if AHEAD:
        block = tl.load(src + lane, mask=lane < num_elements)
    for start in range(0, num_elements, BLOCK):
        at = tl.cast(start, tl.int64) + lane
        if AHEAD:
            following = tl.load(src + at + BLOCK, mask=at + BLOCK < num_elements)
            tl.store(dst + at, block, mask=at < num_elements)
            block = following
        else:
            tl.store(dst + at, tl.load(src + at, mask=at < num_elements), mask=at < num_elements)


@triton.jit
def put(dst, src, num_elements, target, net, L, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Copy `num_elements` of local `src` to `dst` in the memory of rank `target`.

    Orders: nothing by itself. `fence` orders the put before later signals to the same rank; `quiet` completes it.
    Requires: if other threads of this program wrote `src`, a tl.debug_barrier() between those writes and this call. The
    same holds for `put_signal`.
    Reuse: `src` may be overwritten after `quiet()`.
    """
    if L.TRANSPORT == NVSHMEM:
        num_bytes = tl.cast(num_elements, tl.int64) * (dst.dtype.element_ty.primitive_bitwidth // 8)
        putmem_block(_symmetric_address(dst, target, net), src.to(tl.int64), num_bytes, _pe(target, net))
    else:
        copy(peer(dst, target, net, ALIGN), src, num_elements, BLOCK, ALIGN)


@triton.jit
def get(dst, src, num_elements, source, net, L, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Copy `num_elements` of `src` in the memory of rank `source` to local `dst`.

    Blocking: `dst` holds the data on return; the other threads of this program see it after a tl.debug_barrier().
    Orders: nothing on the remote side. The caller must first have waited for a signal that covers the writes to `src`.
    """
    if L.TRANSPORT == NVSHMEM:
        num_bytes = tl.cast(num_elements, tl.int64) * (src.dtype.element_ty.primitive_bitwidth // 8)
        getmem_block(dst.to(tl.int64), _symmetric_address(src, source, net), num_bytes, _pe(source, net))
        tl.debug_barrier()
    else:
        copy(dst, peer(src, source, net, ALIGN), num_elements, BLOCK, ALIGN)


@triton.jit
def put_signal(
    dst, src, num_elements, signal_word, value, target, net, L, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1
):  # fmt: skip
    """`put`, then set `signal_word` on rank `target` to `value`.

    Orders: a peer that sees `value` in `signal_word` also sees all of `dst`. On the transports that use stores
    (SIMULATED, PEER) it also sees everything that this program wrote before, to that rank or to its own memory. Over
    NVSHMEM that takes a `fence` before this call.
    Does not order: puts of other programs, or anything on a third rank.
    """
    if L.TRANSPORT == NVSHMEM:
        num_bytes = tl.cast(num_elements, tl.int64) * (dst.dtype.element_ty.primitive_bitwidth // 8)
        tl.debug_barrier()  # other threads of this program may have written src
        putmem_signal_block(
            _symmetric_address(dst, target, net), src.to(tl.int64), num_bytes,
            _symmetric_address(signal_word, target, net), value, SIGNAL_SET, _pe(target, net),
        )  # fmt: skip
    else:
        if L.TRANSPORT == SIMULATED:
            delay()
        copy(peer(dst, target, net, ALIGN), src, num_elements, BLOCK, ALIGN, True)
        signal(signal_word, value, target, net, L)


@triton.jit
def put_tile(
    dst, src, stride, rows, columns, target, net, L, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1
):  # fmt: skip
    """Copy `rows` rows of `columns` elements to `dst` in the memory of rank `target`, by stores.

    stride: elements from row to row, in `src` and in `dst`. BLOCK: rows to copy at a time, and the most that `columns`
    may be. ALIGN: alignment in bytes of both pointers, the stride and `columns`.
    Requires: all ranks' memory is mapped here.
    Orders: as `put`. Contains no barrier, so Triton can still pipeline a loop around it.
    """
    if L.TRANSPORT == SIMULATED:
        delay()
    dst = peer(dst, target, net, ALIGN)
    src = tl.multiple_of(src, ALIGN)
    VECTOR: tl.constexpr = ALIGN * 8 // dst.dtype.element_ty.primitive_bitwidth
    if VECTOR > 1:  # see copy
        stride = stride // VECTOR * VECTOR
        columns = columns // VECTOR * VECTOR
    column = tl.arange(0, BLOCK[1])[None, :]
    for first in range(0, rows, BLOCK[0]):
        row = first + tl.arange(0, BLOCK[0])[:, None]
        at = row.to(tl.int64) * stride + column
        here = (row < rows) & (column < columns)
        tl.store(dst + at, tl.load(src + at, mask=here), mask=here)


@triton.jit
def signal(signal_word, value, target, net, L, OPERATOR: tl.constexpr = SET):
    """Set `signal_word` on rank `target` to `value` (SET), or add `value` to it (ADD).

    Orders: a peer that sees the new value also sees everything that this program put to `target`, or wrote to its own
    memory, before.
    """
    value = tl.cast(value, tl.int64)
    # Triton 3.6 issues the release from one thread, with no barrier before it: without this one, stores of the other
    # threads could be performed after it.
    tl.debug_barrier()
    if L.TRANSPORT == NVSHMEM:
        # Every thread of the program would execute the single-thread form, and ADD would apply many times. So this is
        # the block form of put-with-signal, with zero bytes of data.
        nvshmem_fence()
        address = _symmetric_address(signal_word, target, net)
        NVSHMEM_OPERATOR: tl.constexpr = SIGNAL_SET if OPERATOR == SET else SIGNAL_ADD
        putmem_signal_block(address, address, 0, address, value, NVSHMEM_OPERATOR, _pe(target, net))
    else:
        if L.TRANSPORT == SIMULATED:
            delay()
        word = peer(signal_word, target, net)
        if OPERATOR == SET:
            tl.atomic_xchg(word, value, sem="release", scope="sys")
        else:
            tl.atomic_add(word, value, sem="release", scope="sys")


@triton.jit
def signal_all(signal_word, value, net, L):
    """`signal` to every peer of this rank, behind a single fence.

    The fence waits for the arrival of this program's data. It does so once here, and R - 1 times in separate signals.
    Orders: as `signal`, for each peer.
    """
    if L.TRANSPORT == SIMULATED:
        for step in range(1, L.RANKS):
            signal(signal_word, value, (net.rank + step) % L.RANKS, net, L)
    else:
        value = tl.cast(value, tl.int64)
        fence(L)
        for step in range(1, L.RANKS):
            target = (net.rank + step) % L.RANKS
            if L.TRANSPORT == NVSHMEM:
                address = _symmetric_address(signal_word, target, net)
                putmem_signal_block(address, address, 0, address, value, SIGNAL_SET, _pe(target, net))
            else:
                tell(signal_word, value, target, net, L)


@triton.jit
def tell(signal_word, value, target, net, L):
    """Set `signal_word` on rank `target` to `value` by a relaxed atomic. Requires: its memory is mapped here.

    Orders: nothing by itself. After a `fence`, or after `completes` has returned true, as `signal`.
    """
    if L.TRANSPORT == SIMULATED:
        delay()
    tl.atomic_xchg(peer(signal_word, target, net), tl.cast(value, tl.int64), sem="relaxed", scope="sys")


@triton.jit
def tell_all(signal_word, value, net, L):
    """Set `signal_word` to `value` on every peer of this rank, by stores issued together if they reach all peers.

    Orders: nothing that this launch does. A peer that sees `value` sees everything that earlier launches did.
    """
    if L.TRANSPORT != PEER:
        signal_all(signal_word, value, net, L)
    else:
        peers = tl.arange(0, triton.next_power_of_2(L.RANKS))
        # Write-through: see put_packets.
        tl.store(
            peer(signal_word, peers, net), tl.cast(value, tl.int64),
            mask=(peers < L.RANKS) & (peers != net.rank), cache_modifier=".wt",
        )  # fmt: skip


@triton.jit
def put_packets(packets, words, epoch, target, net, L):
    """Store a block of int32 `words` at `packets` in the memory of rank `target`, each word with its own arrival flag.

    A packet carries its flag in the same store as its data, as in NCCL's LL protocol. It needs no fence and no signal,
    whose round trips cost more than small data. The element type of `packets` selects the format:

    int64: the word in the low half, the low 32 bits of the epoch in the high half; twice the bytes. A packet has
        arrived once its high half is the epoch. Memory for these packets starts as zeros and holds nothing else, since
        other data might look like an epoch. Only a packet that was not replaced for 2**32 calls could pass for new.
    int32: the complement of the word, as in Lamport's queue. A packet has arrived once it is not zero. The memory must
        have been zeroed since the previous packets. A word of all ones would be stored as zero; it is one or two NaNs
        in any dtype and is replaced by OTHER_NAN. So this format is for numbers, not for arbitrary bits.

    Orders: nothing. A packet that has arrived guarantees its own word, and nothing about other memory.
    Not over NVSHMEM, whose network may deliver 8 bytes in parts.
    """
    if L.TRANSPORT == SIMULATED:
        delay()
    at = tl.arange(0, words.shape[0])
    if packets.dtype.element_ty == tl.int64:
        stored = (words.to(tl.int64) & 0xFFFFFFFF) | (tl.cast(epoch, tl.int64) << 32)
    else:
        stored = ~tl.where(words == -1, OTHER_NAN, words)
    # Write-through compiles to a strong store, which no cache holds back.
    tl.store(peer(packets, target, net, 16) + at, stored, cache_modifier=".wt")


@triton.jit
def wait_packets(packets, stride, epoch, chunk, net, L, BLOCK: tl.constexpr):
    """Wait for BLOCK packets from each rank. Returns their int32 words, a tuple of one block for each rank.

    stride: packets from one rank's block to the next. epoch: the one to wait for, if packets carry one (int64). chunk:
    for the fault record.
    Ends: as `wait_signal`.
    """
    limit = tl.load(net.table + TIMEOUT_NS)
    if L.TRANSPORT == SIMULATED:
        faults, begun, rank = tl.load(net.table + FAULTS), tl.load(net.table + BEGUN), tl.load(net.table + RANK)
        for source in range(L.RANKS):
            theirs = packets + source * stride
            if spin_packets(theirs, BLOCK, epoch, limit, faults, begun, rank, source) == 0:
                _record_fault(source, chunk, epoch, epoch - 1, differing_calls(source, net), net, L)
                give_up(tl.load(net.table + FAULTS), L.RANKS, FAULT_RECORD)
        arrived = _load_packets(packets, stride, L.RANKS, BLOCK)
    else:
        arrived = _load_packets(packets, stride, L.RANKS, BLOCK)
        first_late = _first_late(arrived, epoch, L.RANKS)
        polls = tl.full((), 0, tl.int64)  # 2^31 of them take 36 minutes
        start = tl.full((), 0, tl.int64)
        while first_late < L.RANKS:
            arrived = _load_packets(packets, stride, L.RANKS, BLOCK)
            first_late = _first_late(arrived, epoch, L.RANKS)
            polls += 1
            if polls % POLLS_PER_LOOK == 0:
                lost, start = _look(tl.minimum(first_late, L.RANKS - 1), polls, start, limit, net)
                if (first_late < L.RANKS) & lost:
                    _record_fault(first_late, chunk, epoch, epoch - 1, differing_calls(first_late, net), net, L)
                    first_late = L.RANKS
    words = ()
    for source in tl.static_range(L.RANKS):
        if packets.dtype.element_ty == tl.int64:
            words = words + (arrived[source].to(tl.int32),)
        else:
            words = words + (~arrived[source],)
    return words


@triton.jit
def _load_packets(packets, stride, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    loaded = ()
    for source in tl.static_range(RANKS):
        theirs = tl.multiple_of(packets + source * stride, 16)
        loaded = loaded + (tl.load(theirs + tl.arange(0, BLOCK), volatile=True),)
    return loaded


@triton.jit
def _first_late(arrived, epoch, RANKS: tl.constexpr):
    """The first rank with a packet that has not arrived; RANKS if all have. The same for all threads."""
    late = tl.full(arrived[0].shape, RANKS, tl.int32)
    for source in tl.static_range(RANKS):
        if arrived[source].dtype == tl.int64:
            here = (arrived[source] >> 32).to(tl.int32) == tl.cast(epoch, tl.int32)
        else:
            here = arrived[source] != 0
        late = tl.minimum(late, tl.where(here, RANKS, source))
    return tl.min(late)


@triton.jit
def count(counter, L, SCOPE: tl.constexpr):
    """Add one to a counter in this rank's own memory, on which another program of this rank waits.

    SCOPE: "gpu", or "sys" if a stream waits on the counter in order to copy by the copy engine, outside the SMs.
    Orders: a program or stream that sees the new count also sees everything that this program wrote before.
    """
    meet()
    if L.TRANSPORT == SIMULATED:
        delay()
    tl.atomic_add(counter, tl.full((), 1, tl.int64), sem="release", scope=SCOPE)


@triton.jit
def count_up_to(counter, number, L):
    """Add one to a counter, and one more once it reaches `number`, for a stream that waits until it exceeds `number`.

    Orders: as `count` with SCOPE "sys", for all programs that have counted.
    """
    if completes(counter, number, L):
        tl.atomic_add(counter, tl.full((), 1, tl.int64), sem="release", scope="sys")


@triton.jit
def completes(counter, number, L):
    """Add one to a counter in this rank's own memory. Returns true to the one program that brings it to `number`.

    Orders: everything that all counting programs wrote before they counted, to any rank, before whatever that one
    program signals afterwards to a peer or a stream. Its atomic has observed the other programs' GPU-scope releases, so
    its system-scope fence covers their writes too. Such a fence takes 5 us while data comes in over NVLink (4 H200s,
    bench/LOG.md), and only that one program executes it.
    """
    meet()
    if INTERPRETED:
        delay()
    complete = tl.atomic_add(counter, tl.full((), 1, tl.int64), sem="release", scope="gpu") == number - 1
    if complete:
        if not INTERPRETED:  # the writes observed through the others' counts come before what it signals next
            _fence_system()
    return complete


@triton.jit
def wait_signal(signal_word, epoch, source, chunk, net, L, other=None, value=None, SHIFT: tl.constexpr = 0):
    """Wait until the local `signal_word` is at least `epoch`.

    source, chunk: the rank that signals, and which of its chunks; for the fault record, and source for the time limit.
    other: an alternative word, polled less often. The wait also ends once it is at least `value`.
    SHIFT: low bits of the word that are no part of its epoch.

    Orders: everything that the signalling program ordered before its signal is visible to this program afterwards, to
    ordinary loads and to TMA loads.
    Ends: the wait gives up after the context's time limit, once any rank of the group has flagged a fault, or, with a
    workspace's table, once `source` is seen to be in another call. It writes a fault record to every rank it can reach,
    and the host raises WaitTimeoutError or MismatchError. Whatever the kernel computes from there on is void. The limit
    is doubled if `source` is this rank itself (a counter): the program behind that counter may be waiting for a peer,
    and that wait must time out first, since its record names the peer.
    """
    epoch = tl.cast(epoch, tl.int64)
    limit = tl.load(net.table + TIMEOUT_NS)
    rank = tl.load(net.table + RANK)
    limit = tl.where(rank == source, 2 * limit, limit)
    if INTERPRETED:
        faults, begun = tl.load(net.table + FAULTS), tl.load(net.table + BEGUN)
        if spin(signal_word, epoch << SHIFT, limit, faults, begun, rank, source, other, value) == 0:
            seen = tl.atomic_add(signal_word, tl.full((), 0, tl.int64), sem="acquire", scope="sys") >> SHIFT
            _record_fault(source, chunk, epoch, seen, differing_calls(source, net), net, L)
            give_up(tl.load(net.table + FAULTS), tl.load(net.table + SIZE), FAULT_RECORD)
    else:
        seen = epoch - 1
        polls = tl.full((), 0, tl.int64)  # 2^31 of them take 36 minutes
        start = tl.full((), 0, tl.int64)
        while seen < epoch:
            # In Triton, adding 0 is how one thread does an acquire load and broadcasts the value to the others.
            seen = tl.atomic_add(signal_word, tl.full((), 0, tl.int64), sem="acquire", scope="sys") >> SHIFT
            polls += 1
            if other is not None:
                if (seen < epoch) & (polls % POLLS_PER_OTHER == 0):
                    if tl.atomic_add(other, tl.full((), 0, tl.int64), sem="acquire", scope="sys") >= value:
                        seen = epoch
            if polls % POLLS_PER_LOOK == 0:
                lost, start = _look(source, polls, start, limit, net)
                if (seen < epoch) & lost:
                    _record_fault(source, chunk, epoch, seen, differing_calls(source, net), net, L)
                    seen = epoch
        if L.TMA:
            # The data came by a peer's stores, and the next read of it may go through the async proxy.
            tl.inline_asm_elementwise(
                "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def _look(source, polls, start, limit, net):
    """A wait's check of the clock, the fault flag and source's call: (whether to give up, the second check's time).

    All threads must reach the same verdict, or some would leave the loop, and its barrier, without the others. So one
    thread reads the clock through an atomic maximum. It returns the latest time that an earlier check stored, which may
    be old at a wait's first check; the limit counts from the second.
    """
    clock = tl.load(net.table + CLOCK).to(tl.pointer_type(tl.int64))
    now = tl.atomic_max(clock, globaltimer(), sem="relaxed", scope="gpu")
    flag = tl.load(net.table + FAULTS).to(tl.pointer_type(tl.int64))
    flagged = tl.atomic_add(flag, tl.full((), 0, tl.int64), sem="relaxed", scope="sys")
    if polls == 2 * POLLS_PER_LOOK:
        start = now
    expired = (polls > 2 * POLLS_PER_LOOK) & (now - start > limit)
    return expired | (flagged != 0) | (differing_calls(source, net) != 0), start


@triton.jit
def differing_calls(source, net):
    """0, unless this rank and `source` are in the same epoch of a workspace but in different calls; then, both calls.

    Their numbers are put together as in fault records. The same for all threads.
    """
    differing = tl.full((), 0, tl.int64)
    if tl.load(net.table + BEGUN) != 0:  # 0 in a context's table
        begun, zero = begun_words(net), tl.full((), 0, tl.int64)
        here = tl.atomic_add(begun + tl.load(net.table + RANK), zero, sem="relaxed", scope="sys")
        there = tl.atomic_add(begun + source, zero, sem="relaxed", scope="sys")
        if (here >> CALL_BITS == there >> CALL_BITS) & (here != there):
            differing = (here & CALL_MASK) << CALL_BITS | (there & CALL_MASK)
    return differing


@triton.jit
def globaltimer():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _record_fault(source, chunk, epoch, seen, differing, net, L):
    """Write a fault record, and flag it, to every rank that can be reached; nothing if one is flagged here already."""
    flag = tl.load(net.table + FAULTS).to(tl.pointer_type(tl.int64))
    host_flag = tl.load(net.table + HOST_FLAG)
    if host_flag != 0:
        tl.store(host_flag.to(tl.pointer_type(tl.int64)), tl.full((), 1, tl.int64))
    first = tl.atomic_cas(flag, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), sem="relaxed", scope="sys")
    if first == 0:
        rank = tl.load(net.table + RANK)
        size = tl.load(net.table + SIZE).to(tl.int32)
        for step in range(size):
            other = (rank + 1 + step) % size  # this rank last: its own record implies that the others have theirs
            # A rank that stores can't reach finds out by its own time limit.
            if (other == rank) | (tl.load(net.table + OFFSETS + other) != 0):
                theirs = peer(flag, other, net)
                record = theirs + FAULT_RECORD * (1 + rank)
                tl.store(record + 1, tl.full((), L.OPERATION, tl.int64))
                tl.store(record + 2, tl.cast(rank, tl.int64))
                tl.store(record + 3, tl.cast(source, tl.int64))
                tl.store(record + 4, tl.cast(chunk, tl.int64))
                tl.store(record + 5, tl.cast(epoch, tl.int64))
                tl.store(record + 6, tl.cast(seen, tl.int64))
                tl.store(record + 7, tl.cast(differing, tl.int64))
                meet()
                tl.atomic_xchg(record, tl.full((), 1, tl.int64), sem="release", scope="sys")
                tl.atomic_xchg(theirs, tl.full((), 1, tl.int64), sem="release", scope="sys")


@triton.jit
def check_form(form, seen, source, chunk, net, L):
    """Flag a fault if the message of rank `source` is of another form than expected; the host raises MismatchError."""
    if seen != form:
        _record_fault(source, chunk, form, seen, FORM, net, L)
        if INTERPRETED:
            give_up(tl.load(net.table + FAULTS), tl.load(net.table + SIZE), FAULT_RECORD)


@triton.jit
def fence(L):
    """Order this program's puts before its later signals and puts to the same rank. Does not complete the puts."""
    tl.debug_barrier()
    if L.TRANSPORT == NVSHMEM:
        nvshmem_fence()
    elif L.TRANSPORT == PEER:
        _fence_system()


@triton.jit
def quiet(L):
    """Return once this program's puts are complete: visible on their target rank, and their sources free for reuse."""
    tl.debug_barrier()
    if L.TRANSPORT == NVSHMEM:
        nvshmem_quiet()
        tl.debug_barrier()
    elif L.TRANSPORT == PEER:
        tl.inline_asm_elementwise("fence.sc.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


@triton.jit
def arrived(words, value, L):
    """One check of a block of local words [W]: whether every one is at least `value`. False negatives are allowed.

    In the interpreter the result is always False.
    Orders: if True, as `wait_signal` on each of the words.
    """
    if INTERPRETED:
        there = tl.full((), False, tl.int1)
    else:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [words.to(tl.int64)],
            dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
        # Each warp has loaded the words itself, and one may have seen a value that another missed, but all must return
        # the same answer. The reducing barrier makes them agree, and passes what each thread has acquired on to all
        # threads. The proxy fence extends that to TMA loads.
        agree: tl.constexpr = AGREE_BEFORE_TMA if L.TMA else AGREE
        there = tl.inline_asm_elementwise(
            agree, "=r,r", [tl.min((seen >= value).to(tl.int32), 0)], dtype=tl.int32, is_pure=False, pack=1,
        ) != 0  # fmt: skip
    return there


@triton.jit
def publish(L):
    """Complete this program's TMA stores, so that a later signal or count covers them.

    Triton itself waits only until their shared memory may be reused (cp.async.bulk.wait_group.read), not until the
    stores are visible.
    """
    if not INTERPRETED and L.TMA:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _all_threads(condition):
    """Whether every thread of this program has found the condition, a scalar, true. The same for all of them."""
    return tl.inline_asm_elementwise(
        AGREE, "=r,r", [condition.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    ) != 0  # fmt: skip


@triton.jit
def begin_epoch(state):
    """The epoch of this launch. `state`: a workspace's, in local memory: [last epoch, finished programs, ...]."""
    return tl.load(state) + 1


@triton.jit
def end_epoch(state, epoch):
    """Every program's last call. The last program to arrive advances the epoch for the next launch.

    The epoch lives in device memory, not in the launch's arguments, so every replay of a captured graph has a new one.
    Returns whether this program was the last to arrive; by then all others have finished their work, but for what
    `end_call` does after it.
    """
    tl.debug_barrier()
    finished = tl.atomic_add(state + 1, tl.full((), 1, tl.int64), sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.store(state + 1, tl.full((), 0, tl.int64))
        tl.store(state, epoch)
    return finished == tl.num_programs(0) - 1


@triton.jit
def begin_call(state, call, net, L):
    """Every program's first call in an operation on a workspace, in place of `begin_epoch`. Returns the epoch.

    The last program tells every peer that this rank has begun this epoch, and which call it makes in it.
    call: its number. net: with the table of the workspace.
    Orders: a peer that sees it sees everything that earlier launches did.
    """
    epoch = begin_epoch(state)
    if L.TRANSPORT == NVSHMEM:
        nvshmem_fence()  # its network may deliver what earlier launches put after what this one does
    pid = tl.program_id(0)
    if pid == tl.num_programs(0) - 1:  # it has the least to do if work is dealt out unevenly
        begun = begun_words(net)
        word = (epoch << CALL_BITS) | call
        tl.store(begun + net.rank, word)
        tell_all(begun + net.rank, word, net, L)
    return epoch


@triton.jit
def begun_words(net):
    """A workspace's words, one for each rank, that tell which call it has begun last."""
    return tl.load(net.table + BEGUN).to(tl.pointer_type(tl.int64))


@triton.jit
def end_call(state, epoch, call, net, L):
    """Every program's last call in an operation on a workspace: `end_epoch`, after a comparison of all ranks' calls.

    The last program waits until every peer has begun this call. A peer in another one is a fault. A peer may be one
    call further already. Then that peer ended this call while this rank was in it, so it has seen this rank's number:
    of two ranks whose calls differ, at least one finds out.
    """
    compares = tl.program_id(0) == tl.num_programs(0) - 1
    same = tl.full((), False, tl.int1)
    if not INTERPRETED:
        # The words came ahead of the data. They are loaded before the atomic of end_epoch and looked at after it, so
        # that one latency hides the other.
        peers = peers_of(net, L)
        seen = tl.load(begun_words(net) + peers, mask=(peers < L.RANKS) & compares, other=0, volatile=True)
    last = end_epoch(state, epoch)
    if compares:
        if not INTERPRETED:
            same = _all_threads(tl.min((seen == (epoch << CALL_BITS | call)).to(tl.int32), 0))
        if not same:
            for step in range(1, L.RANKS):
                source = (net.rank + step) % L.RANKS
                wait_begun(epoch, source, net, L)
                if not INTERPRETED:  # where every wait compares the calls at its end
                    differing = differing_calls(source, net)
                    if differing != 0:
                        _record_fault(source, 0, epoch, epoch, differing, net, L)
    return last


@triton.jit
def peers_of(net, L):
    """A block of this rank's peers, the next rank first; some come again, to fill a power of two."""
    return (net.rank + 1 + tl.arange(0, triton.next_power_of_2(L.RANKS)) % (L.RANKS - 1)) % L.RANKS


@triton.jit
def wait_begun(epoch, source, net, L):
    """Wait until `source` has begun the call of this epoch. Orders, ends: as `wait_signal`."""
    wait_signal(begun_words(net) + source, epoch, source, 0, net, L, None, None, CALL_BITS)


@triton.jit
def await_peers(epoch, net, L):
    """Wait until all peers have begun this call: then the earlier contents of their landings are no longer read."""
    words = begun_words(net) + peers_of(net, L)
    looks = 0
    here = arrived(words, epoch << CALL_BITS, L)
    while (looks < LOOKS) & (here == 0):
        here = arrived(words, epoch << CALL_BITS, L)
        looks += 1
    if not here:
        for step in range(1, L.RANKS):
            wait_begun(epoch, (net.rank + step) % L.RANKS, net, L)


@triton.jit(do_not_specialize=["rank"])
def failure_kernel(table, rank, L, WHAT: tl.constexpr):
    """Record for all ranks what has happened on this one: OVERLAP or FAILED."""
    _record_fault(rank, 0, 0, 0, WHAT, Net(table, rank), L)
