"""The device verbs: put and get, signals and waits for them, packets, counters, fences, peers' addresses.

Three transports stand behind one constexpr:

SIMULATED  Triton's interpreter; peers' memory is mapped into the process.
PEER       compiled; NVSHMEM's memory is reached by load and store through the addresses of nvshmem_ptr.
NVSHMEM    compiled; NVSHMEM's own device calls, which also reach other nodes.

All verbs are for whole programs: every thread of a program comes here together. `table` is the context's int64 table,
laid out as below; `rank` is always a rank within the group. Signals are int64 words that only grow, but for those that
count within one call, which are zero between calls.
"""

import zlib

import triton
import triton.language as tl

from tkernels.comm import runtime
from tkernels.comm.device_nvshmem import SIGNAL_ADD, SIGNAL_SET, getmem_block, putmem_block, putmem_signal_block
from tkernels.comm.device_nvshmem import fence as nvshmem_fence
from tkernels.comm.device_nvshmem import quiet as nvshmem_quiet
from tkernels.comm.device_simulated import delay, give_up, spin, spin_packets

SIMULATED = tl.constexpr(0)
PEER = tl.constexpr(1)
NVSHMEM = tl.constexpr(2)
TRANSPORTS = {"simulated": 0, "peer": 1, "nvshmem": 2}
INTERPRETED = tl.constexpr(runtime.RUNTIME == "simulated")

# The table: words 0 to 7 as named; then how far each rank's part of the heap is from this rank's, as mapped here, or 0
# if it is not; then the same of its NVSHMEM address, and its pe.
RANK = tl.constexpr(0)
SIZE = tl.constexpr(1)
TIMEOUT_NS = tl.constexpr(2)
FAULTS = tl.constexpr(3)  # address of this rank's fault words
HOST_FLAG = tl.constexpr(4)  # address of a word in host memory that says "look at the fault words"; 0 if none
CLOCK = tl.constexpr(5)  # address of a word that waits share to read one clock
TRACE_BUFFER = tl.constexpr(6)  # of a launch that is recorded: where its programs write (tkernels.comm.marks)
TRACE_CAPACITY = tl.constexpr(7)  # and how many marks each may make there
OFFSETS = tl.constexpr(8)

# The fault words of a rank: word 0 is the flag; then a record for each rank of the group, written by that rank.
FAULT_RECORD = tl.constexpr(8)
FAULT_FIELDS = ("written", "operation", "rank", "peer", "chunk", "expected", "seen")

POLLS_PER_OTHER = tl.constexpr(8)  # polls of a word between two of the one that may say the same
POLLS_PER_LOOK = tl.constexpr(256)  # polls between two looks at the clock and the fault flag; a poll takes about 1 us

SET = tl.constexpr(0)
ADD = tl.constexpr(1)

OTHER_NAN = tl.constexpr(0x7FFF7FFF)  # in fp32, and in fp16 and bf16 two of them

_operations = {}


def operation(name: str) -> tl.constexpr:
    """The number by which kernels name an operation in the records of expired waits: the same on every rank.

    Raises ValueError for a name whose number another one has.
    """
    number = zlib.crc32(name.encode()) >> 1  # an int32
    if _operations.setdefault(number, name) != name:
        raise ValueError(f"operation: {name!r} has the number of {_operations[number]!r}; choose another name")
    return tl.constexpr(number)


def operation_name(number: int) -> str:
    return _operations.get(number, f"operation {number}")


@triton.jit
def peer(pointer, rank, table, ALIGN: tl.constexpr = 1):
    """The pointer to the same object in `rank`'s part of the heap, for loads and stores.

    ALIGN: what the caller knows of the address, in bytes. Without 16, stores to a peer are element by element.
    """
    return tl.multiple_of((pointer.to(tl.int64) + tl.load(table + OFFSETS + rank)).to(pointer.dtype), ALIGN)


@triton.jit
def _symmetric_address(pointer, rank, table):
    return pointer.to(tl.int64) + tl.load(table + OFFSETS + tl.load(table + SIZE) + rank)


@triton.jit
def _pe(rank, table):
    return tl.load(table + OFFSETS + 2 * tl.load(table + SIZE) + rank).to(tl.int32)


@triton.jit
def meet():
    """No thread of this program goes on before all have come here. Triton pipelines no loop with a tl.debug_barrier."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _fence_system():
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def copy(dst, src, num_elements, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1, AHEAD: tl.constexpr = False):
    """Copy contiguous elements with this program's threads, BLOCK at a time. Orders nothing.

    ALIGN: bytes that both addresses and the size are multiples of. Without 16, copies are element by element.
    AHEAD: load each block before the last one is stored, in twice the registers. Programs that send beside a product
    are 1 to 3 % faster so, those of collectives 1 to 2 % slower (2 H200s, bench/LOG.md).
    """
    dst = tl.multiple_of(dst, ALIGN)
    src = tl.multiple_of(src, ALIGN)
    VECTOR: tl.constexpr = ALIGN * 8 // dst.dtype.element_ty.primitive_bitwidth
    if VECTOR > 1:
        num_elements = num_elements // VECTOR * VECTOR  # so that the compiler knows that no vector is masked in part
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
def put(dst, src, num_elements, rank, table, TRANSPORT: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Copy `num_elements` of local `src` to `dst` in `rank`'s memory.

    Orders: nothing by itself; `fence` orders it before later signals to the same rank, `quiet` completes it. What other
    threads of this program have written to `src` must lie behind a tl.debug_barrier(), here and in `put_signal`.
    Reuse: `src` may be overwritten after `quiet()`.
    """
    if TRANSPORT == NVSHMEM:
        num_bytes = tl.cast(num_elements, tl.int64) * (dst.dtype.element_ty.primitive_bitwidth // 8)
        putmem_block(_symmetric_address(dst, rank, table), src.to(tl.int64), num_bytes, _pe(rank, table))
    else:
        copy(peer(dst, rank, table, ALIGN), src, num_elements, BLOCK, ALIGN)


@triton.jit
def get(dst, src, num_elements, rank, table, TRANSPORT: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1):
    """Copy `num_elements` of `src` in `rank`'s memory to local `dst`. Blocking: `dst` holds the data on return, for all
    threads of this program behind a tl.debug_barrier().

    Orders: nothing on the remote side; the caller must have waited for a signal that says `src` is written.
    """
    if TRANSPORT == NVSHMEM:
        num_bytes = tl.cast(num_elements, tl.int64) * (src.dtype.element_ty.primitive_bitwidth // 8)
        getmem_block(dst.to(tl.int64), _symmetric_address(src, rank, table), num_bytes, _pe(rank, table))
        tl.debug_barrier()
    else:
        copy(dst, peer(src, rank, table, ALIGN), num_elements, BLOCK, ALIGN)


@triton.jit
def put_signal(
    dst, src, num_elements, signal_word, value, rank, table,
    TRANSPORT: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr = 1,
):  # fmt: skip
    """`put`, then set `signal_word` on `rank` to `value`.

    Orders: a peer that sees `value` in `signal_word` also sees all of `dst`. By stores (not over nvshmem, where `fence`
    does that) it also sees everything that this program wrote to that rank or to its own memory before.
    Does not order: puts of other programs, or anything on a third rank.
    """
    if TRANSPORT == NVSHMEM:
        num_bytes = tl.cast(num_elements, tl.int64) * (dst.dtype.element_ty.primitive_bitwidth // 8)
        tl.debug_barrier()  # src may have been written by other threads of this program
        putmem_signal_block(
            _symmetric_address(dst, rank, table), src.to(tl.int64), num_bytes,
            _symmetric_address(signal_word, rank, table), value, SIGNAL_SET, _pe(rank, table),
        )  # fmt: skip
    else:
        if TRANSPORT == SIMULATED:
            delay()
        copy(peer(dst, rank, table, ALIGN), src, num_elements, BLOCK, ALIGN, True)
        signal(signal_word, value, rank, table, TRANSPORT)


@triton.jit
def put_tile(
    dst, src, stride, rows, columns, rank, table,
    TRANSPORT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr = 1,
):  # fmt: skip
    """Copy the first `columns` elements, COLUMNS at most, of `rows` rows, `stride` elements apart here and there.

    By stores, ROWS rows at a time; all ranks' memory is mapped here. ALIGN: of both pointers and of the row, in bytes.
    Orders: as `put`; no barrier, so a loop around it is still pipelined.
    """
    if TRANSPORT == SIMULATED:
        delay()
    dst = peer(dst, rank, table, ALIGN)
    src = tl.multiple_of(src, ALIGN)
    VECTOR: tl.constexpr = ALIGN * 8 // dst.dtype.element_ty.primitive_bitwidth
    if VECTOR > 1:  # see copy
        stride = stride // VECTOR * VECTOR
        columns = columns // VECTOR * VECTOR
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        at = row.to(tl.int64) * stride + column
        here = (row < rows) & (column < columns)
        tl.store(dst + at, tl.load(src + at, mask=here), mask=here)


@triton.jit
def signal(signal_word, value, rank, table, TRANSPORT: tl.constexpr, OPERATOR: tl.constexpr = SET):
    """Set `signal_word` on `rank` to `value` (SET), or add `value` to it (ADD).

    Orders: a peer that sees the new value also sees what this program put there or wrote to its own memory before.
    """
    value = tl.cast(value, tl.int64)
    # Triton 3.6 issues a release by one thread with no barrier before it: other threads' stores could follow it.
    tl.debug_barrier()
    if TRANSPORT == NVSHMEM:
        # The form for one thread would be called by every thread of the program and add many times.
        nvshmem_fence()
        address = _symmetric_address(signal_word, rank, table)
        NVSHMEM_OPERATOR: tl.constexpr = SIGNAL_SET if OPERATOR == SET else SIGNAL_ADD
        putmem_signal_block(address, address, 0, address, value, NVSHMEM_OPERATOR, _pe(rank, table))
    else:
        if TRANSPORT == SIMULATED:
            delay()
        word = peer(signal_word, rank, table)
        if OPERATOR == SET:
            tl.atomic_xchg(word, value, sem="release", scope="sys")
        else:
            tl.atomic_add(word, value, sem="release", scope="sys")


@triton.jit
def signal_all(signal_word, value, table, rank, SIZE: tl.constexpr, TRANSPORT: tl.constexpr):
    """`signal` to every peer of this `rank` behind one fence, which waits for the data's arrival once, not R - 1 times.

    Orders: as `signal`, for each peer.
    """
    if TRANSPORT == SIMULATED:
        for step in range(1, SIZE):
            signal(signal_word, value, (rank + step) % SIZE, table, TRANSPORT)
    else:
        value = tl.cast(value, tl.int64)
        fence(TRANSPORT)
        for step in range(1, SIZE):
            target = (rank + step) % SIZE
            if TRANSPORT == NVSHMEM:
                address = _symmetric_address(signal_word, target, table)
                putmem_signal_block(address, address, 0, address, value, SIGNAL_SET, _pe(target, table))
            else:
                tell(signal_word, value, target, table, TRANSPORT)


@triton.jit
def tell(signal_word, value, rank, table, TRANSPORT: tl.constexpr):
    """Set `signal_word` to `value` on `rank`, whose memory is mapped here.

    Orders: nothing itself; behind a fence, or a count that `completes`, as `signal`.
    """
    if TRANSPORT == SIMULATED:
        delay()
    tl.atomic_xchg(peer(signal_word, rank, table), tl.cast(value, tl.int64), sem="relaxed", scope="sys")


@triton.jit
def tell_all(signal_word, value, table, rank, SIZE: tl.constexpr, TRANSPORT: tl.constexpr):
    """Set `signal_word` to `value` on every peer of this `rank` by stores at once; all ranks' memory is mapped here.

    Orders: nothing but what launches before this one have done, all of which a peer that sees `value` is behind.
    """
    if TRANSPORT == SIMULATED:
        signal_all(signal_word, value, table, rank, SIZE, TRANSPORT)
    else:
        peers = tl.arange(0, triton.next_power_of_2(SIZE))
        # Write-through: see put_packets.
        tl.store(
            peer(signal_word, peers, table), tl.cast(value, tl.int64),
            mask=(peers < SIZE) & (peers != rank), cache_modifier=".wt",
        )  # fmt: skip


@triton.jit
def put_packets(packets, words, epoch, rank, table, TRANSPORT: tl.constexpr):
    """Store a block of int32 `words` at `packets` in `rank`'s memory, so that each of them says that it has arrived.

    What arrives says so itself: no fence and no signal, whose round trips cost more than small data.
    At int64 packets, each word and its epoch are one of 8 bytes, which takes twice the bytes. Memory for them holds
    nothing else, and begins with zeros: any other 32 bits might look like an epoch. Of the epoch there are 32 bits, so
    that only a word which nobody replaced in 2**32 calls could pass for a new one.
    At int32 packets, a word is there once it is not zero, as in Lamport's queue: their memory has been set to zero
    since the words before, and what is stored is the complement. All ones, the one word that this can't say, are a NaN
    or two in any dtype, and become others. So it is for numbers, not for any bits.
    Orders: nothing; a packet that is here has its word, and says nothing of other memory.
    TRANSPORT: not NVSHMEM, whose network may deliver 8 bytes in parts.
    """
    if TRANSPORT == SIMULATED:
        delay()
    at = tl.arange(0, words.shape[0])
    if packets.dtype.element_ty == tl.int64:
        stored = (words.to(tl.int64) & 0xFFFFFFFF) | (tl.cast(epoch, tl.int64) << 32)
    else:
        stored = ~tl.where(words == -1, OTHER_NAN, words)
    # Write-through: it compiles to a strong store, which no cache holds back.
    tl.store(peer(packets, rank, table, 16) + at, stored, cache_modifier=".wt")


@triton.jit
def wait_packets(
    packets, stride, epoch, table, chunk,
    SIZE: tl.constexpr, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait for BLOCK packets, of `epoch` if they carry one, from each rank, `stride` apart; their int32 words by rank.

    Ends: as `wait_signal`.
    """
    limit = tl.load(table + TIMEOUT_NS)
    if TRANSPORT == SIMULATED:
        for source in range(SIZE):
            theirs = packets + source * stride
            if spin_packets(theirs, BLOCK, epoch, limit, tl.load(table + FAULTS)) == 0:
                _record_fault(table, source, chunk, epoch, epoch - 1, OPERATION)
                give_up(tl.load(table + FAULTS), SIZE, FAULT_RECORD)
        arrived = _load_packets(packets, stride, SIZE, BLOCK)
    else:
        arrived = _load_packets(packets, stride, SIZE, BLOCK)
        first_late = _first_late(arrived, epoch, SIZE)
        polls = tl.full((), 0, tl.int64)  # 2^31 of them take 36 minutes
        start = tl.full((), 0, tl.int64)
        while first_late < SIZE:
            arrived = _load_packets(packets, stride, SIZE, BLOCK)
            first_late = _first_late(arrived, epoch, SIZE)
            polls += 1
            if polls % POLLS_PER_LOOK == 0:
                lost, start = _look(table, polls, start, limit)
                if (first_late < SIZE) & lost:
                    _record_fault(table, first_late, chunk, epoch, epoch - 1, OPERATION)
                    first_late = SIZE
    words = ()
    for source in tl.static_range(SIZE):
        if packets.dtype.element_ty == tl.int64:
            words = words + (arrived[source].to(tl.int32),)
        else:
            words = words + (~arrived[source],)
    return words


@triton.jit
def _load_packets(packets, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    loaded = ()
    for source in tl.static_range(SIZE):
        theirs = tl.multiple_of(packets + source * stride, 16)
        loaded = loaded + (tl.load(theirs + tl.arange(0, BLOCK), volatile=True),)
    return loaded


@triton.jit
def _first_late(arrived, epoch, SIZE: tl.constexpr):
    """The first rank of which a packet has not come; SIZE if all have. The same for all threads."""
    late = tl.full(arrived[0].shape, SIZE, tl.int32)
    for source in tl.static_range(SIZE):
        if arrived[source].dtype == tl.int64:
            here = (arrived[source] >> 32).to(tl.int32) == tl.cast(epoch, tl.int32)
        else:
            here = arrived[source] != 0
        late = tl.minimum(late, tl.where(here, SIZE, source))
    return tl.min(late)


@triton.jit
def count(counter, TRANSPORT: tl.constexpr, SCOPE: tl.constexpr):
    """Add one to a counter in this rank's own memory, for another program of this rank that waits on it.

    SCOPE: "gpu", or "sys" for a stream that waits on it, to copy by an engine that is no part of the multiprocessors.
    Orders: whoever sees the new count also sees what this program wrote before.
    """
    meet()
    if TRANSPORT == SIMULATED:
        delay()
    tl.atomic_add(counter, tl.full((), 1, tl.int64), sem="release", scope=SCOPE)


@triton.jit
def count_up_to(counter, number, TRANSPORT: tl.constexpr):
    """Add one to a counter, and one more once it comes to `number`, for a stream that waits until it has passed that.

    Orders: as `count`, of "sys", for all programs that have counted.
    """
    if completes(counter, number, TRANSPORT):
        tl.atomic_add(counter, tl.full((), 1, tl.int64), sem="release", scope="sys")


@triton.jit
def completes(counter, number, TRANSPORT: tl.constexpr):
    """Add one to a counter in this rank's own memory. Returns whether it is `number` now: to one program alone.

    Orders: what all who have counted wrote before, to any rank, before what that one tells a peer or a stream. It has
    seen the others' counts. A fence of the whole system takes 5 us beside what comes over NVLink (4 H200s,
    bench/LOG.md), and only that one has it.
    """
    meet()
    if TRANSPORT == SIMULATED:
        delay()
    complete = tl.atomic_add(counter, tl.full((), 1, tl.int64), sem="release", scope="gpu") == number - 1
    if complete:
        if TRANSPORT != SIMULATED:  # so that what it has seen of the others, by their counts, comes before what it says
            _fence_system()
    return complete


@triton.jit
def wait_chunk(
    ready, landed, max_chunks, source, chunk, epoch, table,
    COPIES: tl.constexpr, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr,
):  # fmt: skip
    """Wait for a chunk of `source`, as `wait_signal`: for its signal, or until copies have brought more than `chunk`.

    ready: signals [ranks, max_chunks].  landed [ranks]: how many chunks of each rank copies have brought; None: none
    do.  COPIES: what is more likely.
    """
    word = ready + source * max_chunks + chunk
    if landed is None:
        wait_signal(word, epoch, table, source, chunk, OPERATION, TRANSPORT)
    elif COPIES:
        wait_signal(landed + source, chunk + 1, table, source, chunk, OPERATION, TRANSPORT, word, epoch)
    else:
        wait_signal(word, epoch, table, source, chunk, OPERATION, TRANSPORT, landed + source, chunk + 1)


@triton.jit
def wait_signal(
    signal_word, epoch, table, source, chunk, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr, other=None, value=None
):  # fmt: skip
    """Wait until the local `signal_word` is at least `epoch`; `source` and `chunk` say whose signal it is.

    other: a word that may say the same by being at least `value`, which is less likely and looked at less often.

    Orders: what the signalling program ordered before its signal is visible to this program afterwards, to loads and to
    TMA loads.
    Ends: after the context's limit, or once any rank of the group has flagged a fault, the wait gives up. It leaves a
    record with every rank that can be reached, and the host raises WaitTimeoutError; what the kernel computes from
    here on is void. A counter of this rank itself is waited for twice as long: behind it, another program waits for a
    peer, and that wait must be the one to expire, since it names the peer.
    """
    epoch = tl.cast(epoch, tl.int64)
    limit = tl.load(table + TIMEOUT_NS)
    limit = tl.where(tl.load(table + RANK) == source, 2 * limit, limit)
    if TRANSPORT == SIMULATED:
        if spin(signal_word, epoch, limit, tl.load(table + FAULTS), other, value) == 0:
            seen = tl.atomic_add(signal_word, tl.full((), 0, tl.int64), sem="acquire", scope="sys")
            _record_fault(table, source, chunk, epoch, seen, OPERATION)
            give_up(tl.load(table + FAULTS), tl.load(table + SIZE), FAULT_RECORD)
    else:
        seen = epoch - 1
        polls = tl.full((), 0, tl.int64)  # 2^31 of them take 36 minutes
        start = tl.full((), 0, tl.int64)
        while seen < epoch:
            # An acquire load by one thread, broadcast to the others: adding 0 is how Triton spells it.
            seen = tl.atomic_add(signal_word, tl.full((), 0, tl.int64), sem="acquire", scope="sys")
            polls += 1
            if other is not None:
                if (seen < epoch) & (polls % POLLS_PER_OTHER == 0):
                    if tl.atomic_add(other, tl.full((), 0, tl.int64), sem="acquire", scope="sys") >= value:
                        seen = epoch
            if polls % POLLS_PER_LOOK == 0:
                lost, start = _look(table, polls, start, limit)
                if (seen < epoch) & lost:
                    _record_fault(table, source, chunk, epoch, seen, OPERATION)
                    seen = epoch
        # Data that arrived by a peer's stores may be read through the async proxy (TMA) next.
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _look(table, polls, start, limit):
    """A wait's look at the clock and at the fault flag: (whether to give up, when the second look was).

    Every thread must come to the same verdict, or some would leave the loop and its barrier alone. So the clock is read
    through an atomic of one thread: it returns the latest time of the look before.
    """
    clock = tl.load(table + CLOCK).to(tl.pointer_type(tl.int64))
    now = tl.atomic_max(clock, globaltimer(), sem="relaxed", scope="gpu")
    flag = tl.load(table + FAULTS).to(tl.pointer_type(tl.int64))
    flagged = tl.atomic_add(flag, tl.full((), 0, tl.int64), sem="relaxed", scope="sys")
    if polls == 2 * POLLS_PER_LOOK:
        start = now
    expired = (polls > 2 * POLLS_PER_LOOK) & (now - start > limit)
    return expired | (flagged != 0), start


@triton.jit
def globaltimer():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _record_fault(table, source, chunk, epoch, seen, OPERATION: tl.constexpr):
    flag = tl.load(table + FAULTS).to(tl.pointer_type(tl.int64))
    host_flag = tl.load(table + HOST_FLAG)
    if host_flag != 0:
        tl.store(host_flag.to(tl.pointer_type(tl.int64)), tl.full((), 1, tl.int64))
    first = tl.atomic_cas(flag, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), sem="relaxed", scope="sys")
    if first == 0:
        rank = tl.load(table + RANK)
        size = tl.load(table + SIZE).to(tl.int32)
        for step in range(size):
            other = (rank + 1 + step) % size  # this rank last: its own record says that the others have theirs
            # A rank out of reach of stores finds out by its own limit.
            if (other == rank) | (tl.load(table + OFFSETS + other) != 0):
                theirs = peer(flag, other, table)
                record = theirs + FAULT_RECORD * (1 + rank)
                tl.store(record + 1, tl.full((), OPERATION, tl.int64))
                tl.store(record + 2, tl.cast(rank, tl.int64))
                tl.store(record + 3, tl.cast(source, tl.int64))
                tl.store(record + 4, tl.cast(chunk, tl.int64))
                tl.store(record + 5, tl.cast(epoch, tl.int64))
                tl.store(record + 6, tl.cast(seen, tl.int64))
                meet()
                tl.atomic_xchg(record, tl.full((), 1, tl.int64), sem="release", scope="sys")
                tl.atomic_xchg(theirs, tl.full((), 1, tl.int64), sem="release", scope="sys")


@triton.jit
def fence(TRANSPORT: tl.constexpr):
    """Order this program's puts before its later signals and puts to the same rank. Completes nothing."""
    tl.debug_barrier()
    if TRANSPORT == NVSHMEM:
        nvshmem_fence()
    elif TRANSPORT == PEER:
        _fence_system()


@triton.jit
def quiet(TRANSPORT: tl.constexpr):
    """Return once this program's puts are complete: visible to their rank, and their sources free for reuse."""
    tl.debug_barrier()
    if TRANSPORT == NVSHMEM:
        nvshmem_quiet()
        tl.debug_barrier()
    elif TRANSPORT == PEER:
        tl.inline_asm_elementwise("fence.sc.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


@triton.jit
def arrived(words, value, TRANSPORT: tl.constexpr):
    """One look at a block of local words [W], all at once: whether each is at least `value`. May always say no.

    Orders: if so, as `wait_signal` on each of them.
    """
    if TRANSPORT == SIMULATED:
        there = tl.full((), False, tl.int1)
    else:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [words.to(tl.int64)],
            dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
        # Each warp has looked for itself, and one may have seen what another missed: all must come to one answer. The
        # barrier that agrees on it also gives what each thread has acquired to all, and the fence to TMA loads.
        there = tl.inline_asm_elementwise(
            "{ .reg .pred mine, all; setp.ne.s32 mine, $1, 0; bar.red.and.pred all, 0, mine; selp.s32 $0, 1, 0, all; "
            "fence.proxy.async.global; }",
            "=r,r", [tl.min((seen >= value).to(tl.int32), 0)], dtype=tl.int32, is_pure=False, pack=1,
        ) != 0  # fmt: skip
    return there


@triton.jit
def publish(TRANSPORT: tl.constexpr):
    """Complete this program's TMA stores, so that a later signal or count covers them.

    Triton itself waits only until the shared memory may be reused (cp.async.bulk.wait_group.read), not for visibility.
    """
    if TRANSPORT != SIMULATED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def begin_epoch(state):
    """The epoch of this launch. `state` is a workspace's, in local memory: [epoch, finished programs, ...]."""
    return tl.load(state) + 1


@triton.jit
def end_epoch(state, epoch):
    """Last call of every program: the last one to come here advances the epoch for the next launch.

    The epoch lives in device memory and not in the host's arguments, so a captured graph replays with fresh epochs.
    Returns whether this program was the last one: all others have nothing left to do then.
    """
    tl.debug_barrier()
    finished = tl.atomic_add(state + 1, tl.full((), 1, tl.int64), sem="acq_rel", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.store(state + 1, tl.full((), 0, tl.int64))
        tl.store(state, epoch)
    return finished == tl.num_programs(0) - 1
