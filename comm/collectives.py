"""all_gather, reduce_scatter, all_reduce and barrier on the device verbs: rows of any width, split evenly or unevenly.

R is the number of ranks. A rank's part is its rows, as contiguous elements; parts lie one after the other in the whole.
Parts are sent in one of three ways, depending on their size (`CollectiveConfig`):

packets  Every 4 bytes of data carry their own arrival flag: one trip over the link. For small parts. In a gather, where
         data may be any bits, packets also carry their epoch, twice the bytes. In a sum, packets are never zero, and
         the memory that receives them is zero before.
chunks   Plain data, and one signal for each chunk behind a fence. The fence waits for the chunk's arrival, so this
         takes two trips.
copies   Plain data sent by the copy engine, many chunks at a time, if all ranks' memory is mapped
         (tkernels.comm.copies). Programs only sum, and copy landed data to its destination. For large parts.

A one-shot all-reduce is a reduce-scatter in which every part is the whole. A two-shot all-reduce is a reduce-scatter
and an all-gather in one launch, sent in any of these ways. Except for copies, program p of a rank exchanges data only
with programs p of its peers.

All three ways sum in fp32 in rank order, multiply the sum by a factor, such as 1/R for a mean, and round it once: the
result has the same bits on every run and on every rank.
"""

import itertools
import math
import operator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tkernels.comm.arguments import check_out, check_resolved, whole
from tkernels.comm.context import Context
from tkernels.comm.copies import Send
from tkernels.comm.device import (
    NVSHMEM,
    Net,
    begin_call,
    copy,
    count_up_to,
    end_call,
    end_epoch,
    fence,
    operation,
    put,
    put_packets,
    quiet,
    signal_all,
    wait_begun,
    wait_packets,
)
from tkernels.comm.mail import Mail, begin_mail, chunk_word, end_mail, parity, second_phase, wait_chunk
from tkernels.comm.marks import ADD, COPY, SEND, WAIT, end_marks, mark
from tkernels.comm.regions import round_up
from tkernels.comm.workspace import MIN_CHUNKS, PACKET_BLOCK, PACKET_BYTES, Inbox, inboxes_fit

OP_ALL_GATHER = operation("all_gather")
OP_REDUCE_SCATTER = operation("reduce_scatter")
OP_ALL_REDUCE = operation("all_reduce")
OP_BARRIER = operation("barrier")

BLOCK = 8192  # 2-byte elements that a program copies at a step; 12 programs of 8 warps then saturate NVLink
MAX_CHUNK_BYTES = 256 << 10  # the most data behind one signal
MIN_CHUNK_BYTES = 4 << 10
MAX_PROGRAMS = MIN_CHUNKS // 4
ALONE_PROGRAMS = MIN_CHUNKS  # if nothing runs beside the collective
MAX_BLOCK_BYTES = 2 * 4 * PACKET_BLOCK  # data of a block of packets, whose sums may have elements twice as large
# Each copy has a fixed cost, a time in which programs move this many landed bytes to their destination. After the last
# copy, its bytes are moved with no copy left to overlap. So a part of n * COPY_COST_BYTES is sent in sqrt(n) copies.
COPY_COST_BYTES = 4 << 20
MOST_UNALIGNED_BYTES = 16 << 20  # larger all-reduces are one of whole vectors, and one of the elements behind them
LAMPORT_CALLS, LAMPORT_WORDS = tl.constexpr(2), tl.constexpr(3)  # indices into a workspace's state
MOST_RANKS = 1 << 20
PART_FIELDS = tl.constexpr(3)  # of a part: its first element in the whole, its elements, the first where parts arrive
SUMMED = (torch.float32, torch.float16, torch.bfloat16)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class CollectiveConfig:
    """Sizes that decide how a collective's data is sent. All ranks must use the same configuration.

    packet_bytes: an all-gather sends a part of at most this size as packets, which save a fence's round trip and take
        twice the bytes. The nvshmem transport has no packets.
    lamport_bytes, scatter_bytes: an all-reduce sends packets if a rank receives at most lamport_bytes from all ranks,
        over both trips if there are two. A reduce-scatter must meet both limits. lamport_bytes None: the room that the
        context reserves from its first call on, so that a capture after large calls needs no more. Reduce-scatters
        have a quarter of the programs of an all-reduce, so packets pay for fewer bytes.
    hop_bytes, packet_hop_bytes: an all-reduce takes one shot if that sends at most this many bytes more than two shots,
        in chunks or as packets. Two shots in chunks need another fence, signal and wait: 3 to 4 us between 2 H200s, 8
        among 4. As packets they need only another trip, and are never slower than one shot in chunks (4 H200s).
    copy_bytes: parts of at least this size are sent by the copy engine, if all ranks' memory is mapped. All-reduces
        sent that way take two shots.

    The times that these limits come from, on H200s, are in bench/LOG.md, 2026-11-22 and 23.
    """

    packet_bytes: int = PACKET_BYTES
    lamport_bytes: int | None = None
    scatter_bytes: int = 1 << 20
    hop_bytes: int = 1 << 20
    packet_hop_bytes: int = 384 << 10
    copy_bytes: int = 16 << 20

    def __repr__(self):  # in errors that name a call: short
        changed = (each for each in fields(self) if getattr(self, each.name) != each.default)
        return f"CollectiveConfig({', '.join(f'{each.name}={getattr(self, each.name)}' for each in changed)})"

    def copies(self, part_bytes: int, ctx: Context) -> bool:
        """Whether the copy engine sends the parts of a call whose largest is `part_bytes`. The same on all ranks."""
        return part_bytes >= self.copy_bytes and ctx.mapped

    def gathers_packets(self, part_bytes: int, ctx: Context) -> bool:
        """Whether parts of that size are gathered as packets. The same on all ranks."""
        return ctx.transport_id != NVSHMEM.value and part_bytes <= self.packet_bytes

    def sums_packets(self, part_bytes: int, ctx: Context, trips: int = 1, scatters: bool = False) -> bool:
        """Whether parts of that size are summed as packets. The same on all ranks.

        trips: 2 for a two-shot all-reduce. scatters: True for a reduce-scatter, False for an all-reduce.
        """
        received = ctx.size * trips * round_up(part_bytes, MAX_BLOCK_BYTES)
        most = ctx.lamport_bytes if self.lamport_bytes is None else self.lamport_bytes
        most = min(most, self.scatter_bytes) if scatters else most
        return ctx.transport_id != NVSHMEM.value and received <= most

    def one_shot(self, num_bytes: int, ctx: Context, result_bytes: int = 0) -> bool:
        """Whether an all-reduce of that size takes one shot; between two ranks it always does.

        result_bytes: the size of its result, which may be in a wider dtype and is what the second trip sends.
        """
        size = ctx.size
        two_trips = size > 2 and self.sums_packets(-(-max(num_bytes, result_bytes) // size), ctx, 2)
        if two_trips and not self.sums_packets(num_bytes, ctx):
            return False
        return num_bytes * (size - 1) * (size - 2) <= (self.packet_hop_bytes if two_trips else self.hop_bytes) * size

    def most_in_one_shot(self, size: int) -> int:
        """The bytes of the largest all-reduce among `size` ranks, 3 or more, that takes one shot."""
        return max(self.hop_bytes * size // ((size - 1) * (size - 2)), 0)


DEFAULT = CollectiveConfig()
BY_PROGRAMS, BY_COPIES = CollectiveConfig(copy_bytes=1 << 62), CollectiveConfig(copy_bytes=0)


def split_rows(num_rows: int, size: int) -> tuple[int, ...]:
    """The even split of rows over ranks: the first `num_rows % size` ranks have one more (as torch.tensor_split).

    Raises TypeError or ValueError for what is no number of rows or of ranks.
    """
    num_rows, size = whole("split_rows: num_rows", num_rows), whole("split_rows: size", size, 1, MOST_RANKS)
    return tuple(num_rows // size + (rank < num_rows % size) for rank in range(size))


def check_rows(name: str, ctx: Context, rows, own: int | None = None, total: int | None = None) -> tuple[int, ...]:
    """The rows of every rank: as given, else equal to `own` on every rank, else the even split of `total`.

    Raises ValueError if the values that all ranks share are invalid, or this rank's own row count doesn't match them.
    """
    if rows is None:
        if own is None and total % ctx.size:
            raise ValueError(
                f"{name}: M={total} rows don't divide by {ctx.size} ranks; pass rows=split_rows({total}, {ctx.size}) "
                f"or another split"
            )
        return (total // ctx.size if own is None else own,) * ctx.size
    try:  # numpy's and torch's integers become ints, so that they don't spread; a SymInt stays one
        rows = tuple(count if isinstance(count, int | torch.SymInt) else operator.index(count) for count in rows)
    except TypeError as error:
        raise ValueError(f"{name}: rows={rows!r} must name whole numbers of rows; {error}") from error
    if len(rows) != ctx.size or min(rows) < 0:
        raise ValueError(f"{name}: rows={rows} must name a count >= 0 for each of {ctx.size} ranks")
    if own is not None and own != rows[ctx.rank]:
        raise ValueError(f"{name}: rank {ctx.rank} has {own} rows, but rows={rows} gives it {rows[ctx.rank]}")
    if total is not None and total != sum(rows):
        raise ValueError(f"{name}: there are M={total} rows, but rows={rows} sums to {sum(rows)}")
    return rows


def starts_of(parts: list[int]) -> list[int]:
    """The first element of each part, where they lie one after the other."""
    return [0, *itertools.accumulate(parts)][:-1]


def part_table(parts: list[int], starts: list[int] | None = None) -> list[int]:
    """PART_FIELDS numbers for each part of so many elements. starts: in the whole; None: one after the other."""
    places = starts_of(parts)
    table = zip(places if starts is None else starts, parts, places, strict=True)
    return [number for row in table for number in row]


class Packets(NamedTuple):
    """A block of packets of each rank: that of the first, how many from one to the next, and the epoch they carry."""

    first: object
    stride: object
    epoch: object


# fmt: off
@triton.jit
def chunk_count(part, chunk):
    """Chunks of a part; an empty part still has one, so that its rank sends a signal."""
    return tl.cast(tl.maximum(tl.cdiv(part, chunk), 1), tl.int32)


@triton.jit
def part_of(parts, rank, DTYPE: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr = False):
    """First element and number of elements of a rank's part, both multiples of ALIGN bytes.

    PACKED: where it arrives, since an inbox has only what is moved of parts at a time; else in the whole.
    """
    VECTOR: tl.constexpr = max(ALIGN * 8 // DTYPE.primitive_bitwidth, 1)
    part = parts + rank * PART_FIELDS
    start = tl.multiple_of(tl.load(part + 2 if PACKED else part), VECTOR)
    return start, tl.multiple_of(tl.load(part + 1), VECTOR)


@triton.jit
def send_to_all(mail, dst, src, size, chunk, net, L, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Put a chunk of this rank to `dst` in the memory of every peer, then signal it."""
    for step in range(1, L.RANKS):
        target = (net.rank + step) % L.RANKS
        mark(SEND, chunk, target, net, L)
        put(dst, src, size, target, net, L, BLOCK, ALIGN)
    signal_all(chunk_word(mail, net.rank, chunk), mail.epoch, net, L)


@triton.jit
def receive_parts(
    out, mail, parts, chunk, span, net, L, BLOCK: tl.constexpr, ALIGN: tl.constexpr, PACKED: tl.constexpr = False,
):
    """Wait for every peer's part and copy it from the inbox to `out`, span by span, divided among the programs.

    span: elements; a divisor of `chunk`, since a span waits for one chunk.
    PACKED: as in `part_of`; False takes fewer registers, where all of the whole is moved at once.
    """
    for step in range(1, L.RANKS):
        source = (net.rank + L.RANKS - step) % L.RANKS
        start, part = part_of(parts, source, out.dtype.element_ty, ALIGN)
        place, _ = part_of(parts, source, out.dtype.element_ty, ALIGN, PACKED)
        for index in range(tl.program_id(0), chunk_count(part, span), tl.num_programs(0)):
            first = tl.cast(index, tl.int64) * span
            number = tl.cast(first // chunk, tl.int32)
            mark(WAIT, number, source, net, L)
            wait_chunk(mail, source, number, net, L)
            mark(COPY, number, source, net, L)
            copy(out + start + first, mail.memory + place + first, tl.minimum(part - first, span), BLOCK, ALIGN)


@triton.jit(do_not_specialize=["rank", "max_chunks", "call"])
def all_gather_kernel(
    x, out,  # [own part], [whole]
    inbox, inbox_stride, ready, max_chunks, state, table, rank, gate, copied, delivered,
    parts,  # [R, PART_FIELDS]
    chunk, call,  # elements; see begin_call
    L, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):
    pid = tl.program_id(0)
    net = Net(table, rank)
    epoch = begin_call(state, call, net, L)
    mail = Mail(inbox + parity(epoch) * inbox_stride, ready, delivered, max_chunks, epoch)
    start, part = part_of(parts, rank, x.dtype.element_ty, ALIGN)
    place, _ = part_of(parts, rank, x.dtype.element_ty, ALIGN, PACKED=True)
    chunks = chunk_count(part, chunk)
    begin_mail(mail, gate, 0, net, L)
    if not L.COPIED:
        for index in range(pid, chunks, tl.num_programs(0)):
            first = tl.cast(index, tl.int64) * chunk
            size = tl.minimum(part - first, chunk)
            send_to_all(mail, mail.memory + place + first, x + first, size, index, net, L, BLOCK, ALIGN)
    for index in range(pid, chunks, tl.num_programs(0)):
        first = tl.cast(index, tl.int64) * chunk
        mark(COPY, index, rank, net, L)
        copy(out + start + first, x + first, tl.minimum(part - first, chunk), BLOCK, ALIGN)
    receive_parts(out, mail, parts, chunk, chunk, net, L, BLOCK, ALIGN, PACKED=True)
    end_mail(mail, state, copied, None, 0, call, net, L)


@triton.jit(do_not_specialize=["rank", "max_chunks", "call"])
def land_kernel(
    x, inbox, ready, max_chunks, state, table, rank, gate, copied, delivered,
    call,  # see begin_call
    L,
):
    """Wait until the copy engines have brought every peer's part, one chunk each; the parts stay where they land."""
    net = Net(table, rank)
    epoch = begin_call(state, call, net, L)
    mail = Mail(inbox, ready, delivered, max_chunks, epoch)
    begin_mail(mail, gate, 0, net, L)
    for step in range(1, L.RANKS):
        wait_chunk(mail, (rank + L.RANKS - step) % L.RANKS, 0, net, L)
    end_mail(mail, state, copied, None, 0, call, net, L)


@triton.jit(do_not_specialize=["rank", "num_chunks", "max_chunks", "num_counters", "span_chunks", "call"])
def reduce_kernel(
    x, out,  # [whole]; [own part], or [whole] with GATHER or WHOLE
    inbox, inbox_stride, part_stride, counters, num_counters, ready, max_chunks, state, table, rank,
    gate, copied, delivered,
    parts,  # [R, PART_FIELDS]; with WHOLE, the first is every part
    chunk, num_chunks, span_chunks,  # elements of a chunk; chunks of the largest part; chunks of a copy
    call, factor,  # see begin_call; of the sums
    L, GATHER: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):
    """Send each rank its part of x and sum what arrives; with GATHER, send the sum of the own part to every peer."""
    OWN_PARTS: tl.constexpr = 0 if WHOLE else 1
    part_stride = tl.cast(part_stride, tl.int64)  # times R it may exceed 2**31
    net = Net(table, rank)
    epoch = begin_call(state, call, net, L)
    mail = Mail(inbox + parity(epoch) * inbox_stride, ready, delivered, max_chunks, epoch)
    begin_mail(mail, gate, 0, net, L)
    pid = tl.program_id(0)
    if not L.COPIED:
        for index in range(pid, num_chunks, tl.num_programs(0)):
            first = tl.cast(index, tl.int64) * chunk
            for step in range(1, L.RANKS):
                target = (rank + step) % L.RANKS
                start, part = part_of(parts, target * OWN_PARTS, x.dtype.element_ty, ALIGN)
                mark(SEND, index, target, net, L)
                put(
                    mail.memory + rank * part_stride + first, x + start + first,
                    tl.maximum(tl.minimum(part - first, chunk), 0), target, net, L, BLOCK, ALIGN,
                )
            signal_all(chunk_word(mail, rank, index), epoch, net, L)

    start, part = part_of(parts, rank * OWN_PARTS, x.dtype.element_ty, ALIGN)
    own = out + start if GATHER else out
    sums = second_phase(mail, (mail.memory + L.RANKS * part_stride).to(out.dtype), L)
    chunks = chunk_count(part, chunk)
    for index in range(pid, chunks, tl.num_programs(0)):
        for source in range(L.RANKS):
            if source != rank:
                mark(WAIT, index, source, net, L)
                wait_chunk(mail, source, index, net, L)
        mark(ADD, index, rank, net, L)
        first = tl.cast(index, tl.int64) * chunk
        last = tl.minimum(part, first + chunk)
        for offset in range(first, last, BLOCK):
            at = tl.cast(offset, tl.int64) + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for each in tl.static_range(L.RANKS):  # unrolled, so that all loads are on their way at once
                theirs = tl.where(each == rank, x + start, mail.memory + each * part_stride)
                total += tl.load(theirs + at, mask=at < last, other=0.0).to(tl.float32)
            tl.store(own + at, (total * factor).to(out.dtype.element_ty), mask=at < last)
        if GATHER:
            if L.COPIED:
                span = index // span_chunks
                count_up_to(counters + span, tl.minimum(chunks - span * span_chunks, span_chunks), L)
            else:
                tl.debug_barrier()  # threads copy what other threads of the program have stored
                send_to_all(sums, sums.memory + start + first, own + first, last - first, index, net, L, BLOCK, ALIGN)
    if GATHER:
        receive_parts(out, sums, parts, chunk, chunk, net, L, BLOCK, ALIGN)
    end_mail(mail, state, copied, counters, num_counters, call, net, L)


@triton.jit
def pack(values, WORDS: tl.constexpr):
    """A block of 2-byte or 4-byte elements as WORDS int32 words."""
    if values.dtype.primitive_bitwidth == 16:
        low, high = tl.split(tl.reshape(values.to(tl.int16, bitcast=True), (WORDS, 2)))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        return values.to(tl.int32, bitcast=True)


@triton.jit
def unpack(words, DTYPE: tl.constexpr, WORDS: tl.constexpr):
    """The inverse of `pack`: the elements of a block of words."""
    if DTYPE.primitive_bitwidth == 16:
        pairs = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
        return tl.reshape(pairs, (2 * WORDS,)).to(DTYPE, bitcast=True)
    else:
        return words.to(DTYPE, bitcast=True)


@triton.jit
def store_parts(
    packets, out, parts, at, index, net, L, WORDS: tl.constexpr, ALIGN: tl.constexpr,
):
    """Wait for a block of every rank's part and store each at its place in `out`."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    mark(WAIT, index, net.rank, net, L)
    arrived = wait_packets(packets.first, packets.stride, packets.epoch, index, net, L, WORDS)
    mark(COPY, index, net.rank, net, L)
    for source in tl.static_range(L.RANKS):
        start, part = part_of(parts, source, DTYPE, ALIGN)
        tl.store(out + start + at, unpack(arrived[source], DTYPE, WORDS), mask=at < part)


@triton.jit
def sum_of_packets(
    packets, index, net, L, DTYPE: tl.constexpr, WORDS: tl.constexpr,
):
    """Wait for a block from every rank; returns their sum in fp32."""
    mark(WAIT, index, net.rank, net, L)
    arrived = wait_packets(packets.first, packets.stride, packets.epoch, index, net, L, WORDS)
    mark(ADD, index, net.rank, net, L)
    total = tl.zeros((WORDS * 32 // DTYPE.primitive_bitwidth,), tl.float32)
    for source in tl.static_range(L.RANKS):
        total += unpack(arrived[source], DTYPE, WORDS).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rank", "max_part", "call"])
def packets_kernel(
    x, out,  # all_gather: [own part], [whole]; reduce_scatter: [whole], [own part]; WHOLE, GATHER: [whole], [whole]
    packets, inbox_stride, source_stride, state, table, rank,  # two inboxes of `packets`, three of `lamport`
    parts,  # [R, PART_FIELDS]; with WHOLE, the first is every part
    max_part, call, factor,  # elements of the largest part; see begin_call; of the sums
    L, REDUCE: tl.constexpr, WHOLE: tl.constexpr, GATHER: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr,
):
    """Send packets to every rank, this one included; sum those of all ranks (REDUCE), or concatenate them.

    GATHER: every rank sums its own part, then sends the sums to every rank.
    Every rank sends as many blocks as the largest part has, so every rank receives from every other.
    A program sends all its blocks of the first trip before it waits for any. In the second trip it sends the sums of
    each block when they are done, and waits after the last.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    OUT: tl.constexpr = out.dtype.element_ty
    BLOCK: tl.constexpr = WORDS * 32 // DTYPE.primitive_bitwidth
    OUT_WORDS: tl.constexpr = BLOCK * OUT.primitive_bitwidth // 32
    OWN_PARTS: tl.constexpr = 0 if WHOLE else 1
    SAME: tl.constexpr = WHOLE or not REDUCE  # every rank is sent the same data
    net = Net(table, rank)
    epoch = begin_call(state, call, net, L)
    inboxes, turn = packets, epoch
    if REDUCE:
        turn = tl.load(state + LAMPORT_CALLS)
        packets += turn % 3 * inbox_stride
    else:
        packets += parity(turn) * inbox_stride
    own_start, own = part_of(parts, rank * OWN_PARTS, DTYPE, ALIGN)
    blocks = tl.cdiv(max_part, BLOCK)
    for index in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = index * BLOCK + tl.arange(0, BLOCK)
        inbox = packets + rank * source_stride + index * WORDS
        if SAME:
            words = pack(tl.load(x + at, mask=at < own, other=0), WORDS)
        for step in range(L.RANKS):
            target = (rank + 1 + step) % L.RANKS
            mark(SEND, index, target, net, L)
            if SAME:
                sent = words
            else:
                start, part = part_of(parts, target, DTYPE, ALIGN)
                sent = pack(tl.load(x + start + at, mask=at < part, other=0), WORDS)
            put_packets(inbox, sent, epoch, target, net, L)
    if REDUCE:
        # Zero the third that the previous call used: peers write there again in the next call but one.
        left = inboxes + (turn + 2) % 3 * inbox_stride
        used = tl.load(state + LAMPORT_WORDS).to(tl.int32)
        for first in range(tl.program_id(0) * WORDS, used, tl.num_programs(0) * WORDS):
            words_at = first + tl.arange(0, WORDS)
            tl.store(left + words_at, tl.zeros((WORDS,), tl.int32), mask=words_at < used)
    gathered, gathered_stride = packets + L.RANKS * source_stride, blocks * OUT_WORDS
    for index in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = index * BLOCK + tl.arange(0, BLOCK)
        arriving = Packets(packets + index * WORDS, source_stride, epoch)
        if REDUCE:
            total = (sum_of_packets(arriving, index, net, L, DTYPE, WORDS) * factor).to(OUT)
            if GATHER:
                words = pack(total, OUT_WORDS)
                for step in range(L.RANKS):
                    target = (rank + 1 + step) % L.RANKS
                    mark(SEND, index, target, net, L)
                    mine = gathered + rank * gathered_stride + index * OUT_WORDS
                    put_packets(mine, words, epoch, target, net, L)
            else:
                tl.store(out + at, total, mask=at < own)
        else:
            store_parts(arriving, out, parts, at, index, net, L, WORDS, ALIGN)
    if GATHER:
        for index in range(tl.program_id(0), blocks, tl.num_programs(0)):
            arriving = Packets(gathered + index * OUT_WORDS, gathered_stride, epoch)
            at = index * BLOCK + tl.arange(0, BLOCK)
            store_parts(arriving, out, parts, at, index, net, L, OUT_WORDS, ALIGN)
    end_marks(net, L)
    last = end_call(state, epoch, call, net, L)
    if REDUCE:
        if last:
            tl.store(state + LAMPORT_CALLS, turn + 1)
            tl.store(state + LAMPORT_WORDS, L.RANKS * (source_stride + (gathered_stride if GATHER else 0)))


@triton.jit(do_not_specialize=["rank", "call"])
def barrier_kernel(state, table, rank, call, L):
    fence(L)
    net = Net(table, rank)
    epoch = begin_call(state, call, net, L)
    for step in range(1, L.RANKS):
        wait_begun(epoch, (rank + step) % L.RANKS, net, L)
    end_call(state, epoch, call, net, L)


@triton.jit(do_not_specialize=["rank", "call"])
def announce_kernel(state, table, rank, call, L):
    """Tell every peer which call this rank has begun, and end it without a wait for theirs."""
    epoch = begin_call(state, call, Net(table, rank), L)
    quiet(L)  # no peer waits for it, and the memory that it goes to may be another's before long
    end_epoch(state, epoch)
# fmt: on


class CollectiveCall(NamedTuple):
    """A call of a collective, of x and out, which may be None. Operations can prepare it as a part of their own calls.

    A class has its name as `operation`, `shared`, and
    result: of x: every rank's rows, the result's shape and dtype, and the row of `out` at which x may begin, if x is in
        place. Raises ValueError or TypeError for what the collective does not take.
    bind: the launch, a function of x and the result.
    """

    rows: tuple[int, ...] | None = None  # row counts by rank, if they differ
    max_programs: int = MAX_PROGRAMS  # the same on all ranks; fewer leave SMs to other work that runs beside it
    config: CollectiveConfig = DEFAULT
    out_dtype: torch.dtype | None = None  # of a sum, which is rounded to it once; None: that of x
    where: str | None = None  # of a gather: a name for errors, the same on all ranks
    factor: float = 1.0  # of a sum, by which it is multiplied in fp32, before it is rounded

    def prepare(self, ctx: Context, x: torch.Tensor, out):
        """The function of tensors like these that carries out the call; see `comm.calls.Call`."""
        if x.device != ctx.device:
            raise ValueError(f"{self.operation}: the tensor is on {x.device}, but this context works on {ctx.device}")
        check_resolved(self.operation, "x", x)
        if self.max_programs < 1:
            raise ValueError(f"{self.operation}: max_programs={self.max_programs} must be positive")
        rows, shape, dtype, first_row = self.result(ctx, x)
        check = plan_check_out(self.operation, x, out, shape, dtype, first_row * math.prod(x.shape[1:]))
        alone = ctx.size == 1
        launch = (lambda x, out: times(x, self.factor, out)) if alone else self.bind(ctx, x, out, rows, dtype)

        def run(x, out):
            if check is None:
                out = x.new_empty(shape, dtype=dtype)
            else:
                check(x, out)
            launch(x.contiguous(), out)
            return out

        return run

    def bind_rows(self, ctx: Context, x: torch.Tensor, out, rows, dtypes, bind, cut):
        """The launch that moves all of every rank's rows or, where the heap has no room for that, a piece at a time.

        bind(parts, config): the launch of a piece, which takes what cut(x, out, piece) returns; the piece is a slice of
        this rank's elements. dtypes: as of `_Parts`.
        """
        parts, itemsize = [count * math.prod(x.shape[1:]) for count in rows], x.element_size()
        step, config = max(*parts, 1), self.config
        if not inboxes_fit(ctx.heap.num_bytes, ctx.size * step * itemsize, config.copies(step * itemsize, ctx)):
            step, config = self.step(ctx, step, itemsize, itemsize)
        pieces = [slice(first, first + step) for first in range(0, max(*parts, 1), step)]

        def bind_piece(piece):
            sizes = [min(max(part - piece.start, 0), step) for part in parts]
            starts = [start + piece.start for start in starts_of(parts)]
            return bind(_Parts(ctx, sizes, x, out, dtypes, self.max_programs, starts, factor=self.factor), config)

        if len(pieces) == 1:
            return bind_piece(pieces[0])
        launches = ctx.workspace().settled(lambda: [*map(bind_piece, pieces)])

        def launch(x, out):
            for piece, launch in zip(pieces, launches, strict=True):
                launch(*cut(x, out, piece))

        return launch

    def step(self, ctx: Context, part: int, itemsize: int, widest: int) -> tuple[int, CollectiveConfig]:
        """Elements of a part of so many that are moved at a time, and how: the last ones as those before.

        Over all ranks they take an 8th of the heap, or, by programs, a 16th, since the inboxes of an all-reduce take 2
        or 5 times that. widest: bytes of an element there.
        """

        def of(share: int) -> int:
            return min(max(part, 1), max(ctx.heap.num_bytes // (share * ctx.size * widest) // 16, 1) * 16)

        copied = self.config.copies(of(8) * itemsize, ctx)
        return of(8 if copied else 16), replace(self.config, copy_bytes=0 if copied else BY_PROGRAMS.copy_bytes)

    def shared_sum(self, x: torch.Tensor) -> dict:
        same = {"dtype": x.dtype, "shape": tuple(x.shape), "out_dtype": self.out_dtype or x.dtype}
        same |= {"factor": self.factor} if self.factor != 1 else {}
        return same | {"max_programs": self.max_programs, "config": self.config}

    def sum_dtype(self, x: torch.Tensor) -> torch.dtype:
        """The result's dtype. Raises TypeError for dtypes that can't be summed."""
        for what, dtype in (("x is", x.dtype), ("out_dtype is", self.out_dtype or x.dtype)):
            if dtype not in SUMMED:
                raise TypeError(f"{self.operation}: sums float32, float16 and bfloat16, but {what} {dtype}")
        return self.out_dtype or x.dtype

    def check_rows_of(self, x: torch.Tensor):
        if x.dim() == 0:
            raise ValueError(f"{self.operation}: takes rows, but the tensor is a scalar")


def all_gather(
    ctx: Context,
    x_shard_m: torch.Tensor,
    rows=None,
    out: torch.Tensor | None = None,
    max_programs: int = MAX_PROGRAMS,
    config: CollectiveConfig = DEFAULT,
    where: str | None = None,
) -> torch.Tensor:
    """Collective. Gathers every rank's rows: x_shard_m [M/R, ...] -> [M, ...], any dtype of 1, 2, 4 or 8 bytes.

    out: contiguous, filled and returned. x_shard_m may be this rank's rows of it (in place). The other options are
    those of `CollectiveCall`. What three quarters of the context's heap can't receive is gathered in pieces of an
    8th or a 16th of it. Raises ValueError for rows that don't fit, TypeError for a wider dtype.
    """
    call = AllGather(None if rows is None else tuple(rows), max_programs, config, where=where)
    return ctx.call(call, x_shard_m, out)


class AllGather(CollectiveCall):
    """A call of `all_gather`."""

    __slots__ = ()

    operation = "all_gather"

    def shared(self, ctx: Context, x, out) -> dict:
        same = {"dtype": x.dtype, "shape of a row": tuple(x.shape[1:])}
        same |= {"max_programs": self.max_programs, "config": self.config}
        same |= {"where": self.where} if self.where else {}
        return same | {"rows": tuple(map(int, self.rows or tuple(x.shape[:1]) * ctx.size))}

    def result(self, ctx: Context, x: torch.Tensor):
        self.check_rows_of(x)
        if x.element_size() not in _BITS:
            raise TypeError(f"all_gather: moves elements of up to 8 bytes, not {x.dtype}; pass a view of it")
        rows = check_rows("all_gather", ctx, self.rows, own=x.shape[0])
        return rows, (sum(rows), *x.shape[1:]), x.dtype, sum(rows[: ctx.rank])

    def bind(self, ctx: Context, x: torch.Tensor, out, rows, dtype):
        # As integers: the kernels only move bits, and a bool in Triton is not as wide as the byte in memory.
        dtypes = (_BITS[x.element_size()],) * 2
        return self.bind_rows(
            ctx, x, out, rows, dtypes, _Parts.gather, cut=lambda x, out, piece: (x.view(-1)[piece], out)
        )

    def prepare_landing(self, ctx: Context, x: torch.Tensor):
        """Plan the gather of a contiguous matrix by `plan_landing`; the memory is [M, K], this rank's own left out."""
        row_bytes, first = x.shape[1] * x.element_size(), sum(self.rows[: ctx.rank])
        sends = [(0, first * row_bytes, x.shape[0] * row_bytes)] * ctx.size
        return plan_landing(ctx, OP_ALL_GATHER, x, sends, sum(self.rows))


def reduce_scatter(
    ctx: Context,
    x: torch.Tensor,
    rows=None,
    out: torch.Tensor | None = None,
    max_programs: int = MAX_PROGRAMS,
    out_dtype: torch.dtype | None = None,
    config: CollectiveConfig = DEFAULT,
    factor: float = 1.0,
) -> torch.Tensor:
    """Collective. Sums x [M, ...] over ranks, in fp32 in rank order, and returns this rank's rows [M/R, ...].

    x: fp32, fp16, bf16. out: contiguous, filled and returned. It may be this rank's rows of x, which are sent to no
    peer: each element is read and written by one program. What three quarters of the context's heap can't receive is
    summed in pieces of an 8th or a 16th of it. The other options are those of `CollectiveCall`.
    """
    rows = None if rows is None else tuple(rows)
    return ctx.call(ReduceScatter(rows, max_programs, config, out_dtype, factor=factor), x, out)


class ReduceScatter(CollectiveCall):
    """A call of `reduce_scatter`."""

    __slots__ = ()

    operation = "reduce_scatter"

    def shared(self, ctx: Context, x, out) -> dict:
        return self.shared_sum(x) | {"rows": tuple(map(int, self.rows or split_rows(x.shape[0], ctx.size)))}

    def result(self, ctx: Context, x: torch.Tensor):
        self.check_rows_of(x)
        dtype = self.sum_dtype(x)
        rows = check_rows("reduce_scatter", ctx, self.rows, total=x.shape[0])
        return rows, (rows[ctx.rank], *x.shape[1:]), dtype, -sum(rows[: ctx.rank])

    def bind(self, ctx: Context, x: torch.Tensor, out, rows, dtype):
        reduce = lambda parts, config: parts.reduce(OP_REDUCE_SCATTER, config)  # noqa: E731
        return self.bind_rows(
            ctx, x, out, rows, (x.dtype, dtype), reduce, cut=lambda x, out, piece: (x, out.view(-1)[piece])
        )

    def prepare_landing(self, ctx: Context, x: torch.Tensor):
        """Plan the sends of a contiguous matrix by `plan_landing`; the memory is [R, M/R, N], a part of each peer."""
        row_bytes = x.shape[1] * x.element_size()
        sends = [
            (first * row_bytes, ctx.rank * rows * row_bytes, rows * row_bytes)
            for first, rows in zip(starts_of(self.rows), self.rows, strict=True)
        ]
        launch, landed = plan_landing(ctx, OP_REDUCE_SCATTER, x, sends, ctx.size * max(self.rows))
        own = self.rows[ctx.rank]
        return launch, landed[: ctx.size * own].view(ctx.size, own, x.shape[1])


def can_land(ctx: Context, num_bytes: int) -> bool:
    """Whether copy engines can bring so many bytes into every rank's memory at a time. The same on all ranks."""
    return ctx.mapped and inboxes_fit(ctx.heap.num_bytes, num_bytes, landing=True)


def plan_landing(ctx: Context, operation, x: torch.Tensor, sends: list[tuple[int, int, int]], rows: int):
    """Plan an exchange by the copy engine that leaves what it brings where it lands, and all but one SM to other work.

    The function may be called on another stream of the workspace (`Workspace.lanes`).

    x: a contiguous matrix. sends: for each rank, where in x its bytes begin, where they go, and how many there are.
    rows: as wide as those of x, that there must be room for: see `can_land`.
    Returns the function of such x, and the memory [rows, ...]. What lands stays there until the workspace's next call.
    """
    inbox = Inbox.of(ctx, True, 1, rows, x.shape[1], x.dtype)
    peers = [(ctx.rank + step) % ctx.size for step in range(1, ctx.size)]
    launch = ctx.bind_call(
        land_kernel, 1, inbox.workspace, operation, x=x, inbox=inbox.matrix, landing=True,
        copies=[Send(peer, "x", *sends[peer], ctx.rank, 1) for peer in peers], varying=("x",), num_warps=1,
    )  # fmt: skip
    return launch, inbox.matrix


def all_reduce(
    ctx: Context,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: CollectiveConfig = DEFAULT,
    max_programs: int = ALONE_PROGRAMS,
    factor: float = 1.0,
) -> torch.Tensor:
    """Collective. Sums x over ranks, in fp32 in rank order; fp32, fp16, bf16. The same bits on every rank.

    out: contiguous, filled and returned. It may be x. In one shot, one program sends each element, then sums it, and no
    peer reads x. In two shots, a chunk's or block's owner returns its sums only after it has received that chunk from
    every rank, this one included, so the elements that they overwrite have been sent. Each element of a rank's own part
    is read and written by one program. More than an 8th or a 16th of the context's heap is made in pieces, and from
    MOST_UNALIGNED_BYTES on the elements behind the last whole vector of 16 bytes are one piece.
    The other options are those of `CollectiveCall`.
    """
    return ctx.call(AllReduce(None, max_programs, config, out_dtype, factor=factor), x, out)


class AllReduce(CollectiveCall):
    """A call of `all_reduce`. rows: None."""

    __slots__ = ()

    operation = "all_reduce"

    def shared(self, ctx: Context, x, out) -> dict:
        return self.shared_sum(x)

    def result(self, ctx: Context, x: torch.Tensor):
        return None, tuple(x.shape), self.sum_dtype(x), 0

    def bind(self, ctx: Context, x: torch.Tensor, out, rows, dtype):
        # Parts and pieces consist of whole 16-byte vectors, except that the end may be shorter.
        numel, itemsize, widest = x.numel(), x.element_size(), max(x.element_size(), dtype.itemsize)
        vector = 16 // min(itemsize, dtype.itemsize)
        step, config = self.step(ctx, round_up(-(-numel // ctx.size), vector), itemsize, widest)
        filled = numel // vector * vector if numel * itemsize >= MOST_UNALIGNED_BYTES else 0
        edges = sorted({*range(0, numel, step * ctx.size), filled, numel})
        sizes = [last - first for first, last in itertools.pairwise(edges)] or [0]
        ways = {size: self.config if size < vector else config for size in sizes}
        if len(sizes) == 1:
            return self.bind_piece(ctx, numel, ways[numel], x, out, dtype)
        launches = ctx.workspace().settled(
            lambda: {size: self.bind_piece(ctx, size, way, x, out, dtype) for size, way in ways.items()}
        )

        def launch(x, out):
            for source, target in zip(x.view(-1).split(sizes), out.view(-1).split(sizes), strict=True):
                launches[len(source)](source, target)

        return launch

    def bind_piece(self, ctx: Context, numel: int, config: CollectiveConfig, x: torch.Tensor, out, dtype):
        """The launch for so many elements of tensors that lie as x and out do."""
        vector = 16 // min(x.dtype.itemsize, dtype.itemsize)
        vectors = split_rows(-(-numel // vector), ctx.size)
        copied = config.copies(vectors[0] * vector * x.element_size(), ctx)
        # MAX_PROGRAMS of them keep up with the copies; more would take SMs from what runs beside.
        of = x, out, (x.dtype, dtype), min(self.max_programs, MAX_PROGRAMS) if copied else self.max_programs
        if not copied and config.one_shot(numel * x.element_size(), ctx, numel * dtype.itemsize):
            return _Parts(ctx, [numel] * ctx.size, *of, whole=True, factor=self.factor).reduce(OP_ALL_REDUCE, config)
        edges = [min(count * vector, numel) for count in itertools.accumulate(vectors, initial=0)]
        parts = [last - first for first, last in itertools.pairwise(edges)]
        return _Parts(ctx, parts, *of, factor=self.factor).reduce(OP_ALL_REDUCE, config, gather=True)


def barrier(ctx: Context, where: str | None = None):
    """Collective, on the current stream. Returns at once; later work on it starts after all ranks reach the barrier.

    where: a name for errors, the same on all ranks. A rank that makes another call instead is told.
    """
    if ctx.size > 1:
        ctx.call(Barrier(where))


def announce(ctx: Context, where: str):
    """Collective, on the current stream. Tells a rank that makes another call on it than `where`, and waits for none.

    A `barrier` on another stream must follow. (Only one call of a process can wait on its device at a time.)
    """
    if ctx.size > 1:
        ctx.call(Barrier(where, waits=False))


class Barrier(NamedTuple):
    """A call of `barrier` or `announce`."""

    where: str | None = None
    waits: bool = True

    operation = "barrier"

    def shared(self, ctx: Context) -> dict:
        return {"where": self.where} if self.where else {}

    def prepare(self, ctx: Context):
        return _bind_meeting(ctx, barrier_kernel if self.waits else announce_kernel)


def bind_empty(ctx: Context):
    """The launch, a function of any tensors, of a call that has no element to send.

    A barrier, as another rank's call may have some, such as that of rows=None and a rank without rows: it is told.
    """
    meet = _bind_meeting(ctx, barrier_kernel)
    return lambda *_: meet()


def _bind_meeting(ctx: Context, kernel):
    return ctx.bind_call(kernel, 1, ctx.workspace().reserve(num_chunks=1), OP_BARRIER, num_warps=1)


class _Parts:
    """Divides a call's parts into chunks or packets and among programs, and makes the launches that move them.

    A launch is a function of x and out.
    parts: elements of each rank's part. dtypes: the dtypes that x and out are moved as. out: None for a new tensor.
    starts: as in `part_table`. whole: every part is the whole of x; then `parts` has the same size for each rank.
    factor: of sums.
    """

    def __init__(
        self, ctx: Context, parts: list[int], x, out, dtypes, max_programs: int, starts: list[int] | None = None,
        whole: bool = False, factor: float = 1.0,
    ):  # fmt: skip
        self.ctx, self.parts, self.whole, self.factor = ctx, parts, whole, factor
        self.x, self.out = (torch.empty(0, dtype=dtype, device="meta") for dtype in dtypes)
        self.itemsize, out_itemsize = (dtype.itemsize for dtype in dtypes)
        self.starts = starts_of(parts) if starts is None else starts
        self.total, self.max_part = parts[0] if whole else sum(parts), max(parts)
        table = part_table(parts[:1] if whole else parts, self.starts[:1] if whole else self.starts)
        self.table = ctx.on_device(table)
        self.num_programs = min(ctx.num_programs, max_programs)
        # One chunk for each program where the limits allow, so that chunks don't wait for each other's fence; multiples
        # of MIN_CHUNK_BYTES, thus whole 16-byte vectors.
        chunk = max(min(-(-self.max_part // self.num_programs) * self.itemsize, MAX_CHUNK_BYTES), MIN_CHUNK_BYTES)
        self.chunk = -(-chunk // MIN_CHUNK_BYTES) * MIN_CHUNK_BYTES // self.itemsize
        self.num_chunks = -(-self.max_part // self.chunk) or 1
        spans = max(round(math.sqrt(self.max_part * self.itemsize / COPY_COST_BYTES)), 1)
        self.span_chunks = -(-self.num_chunks // spans)
        aligned = all(number * size % 16 == 0 for number in table for size in (self.itemsize, out_itemsize))
        # New tensors are aligned: a new result, and the copy of an x that is not contiguous.
        aligned = aligned and (x.data_ptr() % 16 == 0 or not x.is_contiguous())
        aligned = aligned and (out is None or out.data_ptr() % 16 == 0)
        self.options = dict(
            # Wider elements, fewer of them: a step takes no more bytes, thus registers. Without alignment each element
            # also needs an address and a mask, so twice the threads take a step of half as many.
            BLOCK=BLOCK // max(self.itemsize // 2, out_itemsize // 2, 1) // (1 if aligned else 2),
            ALIGN=16 if aligned else min(self.itemsize, out_itemsize),
            num_warps=8 if aligned else 16,
            # Without a limit, ptxas spills registers to stay below a count at which more programs share an SM.
            maxnreg=128,
        )

    def gather(self, config: CollectiveConfig):
        """The launch that sends this rank's part to every peer and collects all parts."""
        ctx = self.ctx
        # Packets are words of 4 bytes, packed from elements of 2 or 4 bytes.
        if 1 < self.itemsize < 8 and config.gathers_packets(self.max_part * self.itemsize, ctx):
            return self.packets(OP_ALL_GATHER, reduce=False)
        copied = config.copies(self.max_part * self.itemsize, ctx)
        inbox, copies = Inbox.of(ctx, copied, self.num_chunks, self.total, 1, self.x.dtype), None
        options = self.options
        if copied:
            # Programs only copy: a larger step keeps twice the bytes on their way.
            options = options | {"BLOCK": 2 * options["BLOCK"]}
            own, first = self.parts[ctx.rank], sum(self.parts[: ctx.rank])
            copies = [
                Send((ctx.rank + step) % ctx.size, "x", start * self.itemsize, (first + start) * self.itemsize,
                     size * self.itemsize, ctx.rank, chunks)
                for step in range(1, ctx.size) for start, size, chunks in self.spans(own)
            ]  # fmt: skip
        return ctx.bind_call(
            all_gather_kernel, min(self.num_programs, self.num_chunks), inbox.workspace, OP_ALL_GATHER,
            x=self.x, out=self.out, inbox=inbox.matrix, inbox_stride=inbox.stride, parts=self.table,
            chunk=self.chunk, landing=copied, copies=copies, varying=("x", "out"), **options,
        )  # fmt: skip

    def reduce(self, operation, config: CollectiveConfig, gather: bool = False):
        """The launch that sums each part over all ranks for its owner, and with `gather` sends the sums to all."""
        ctx = self.ctx
        # The sums of the second trip may be in a wider dtype.
        itemsize = max(self.itemsize, self.out.element_size()) if gather else self.itemsize
        scatters = not (gather or self.whole)
        if config.sums_packets(self.max_part * itemsize, ctx, 2 if gather else 1, scatters):
            return self.packets(operation, reduce=True, gather=gather)
        part_stride = -(-self.max_part // BLOCK) * BLOCK
        gathered = self.total * self.out.element_size() // self.itemsize + 1 if gather else 0
        needed = ctx.size * part_stride + gathered
        # No copies in one shot: x may be the result too, and programs overwrite it with sums once the peers' data is
        # here. A program has sent its own data before that, but can't tell whether the copy engine has.
        copied = not self.whole and config.copies(self.max_part * self.itemsize, ctx)
        least = 0
        if gather and ctx.size > 2:  # a smaller call that takes one shot must not need a larger inbox
            least = ctx.size * (config.most_in_one_shot(ctx.size) // self.itemsize + BLOCK)
        num_counters = len(list(self.spans(self.max_part))) if copied and gather else 0
        inbox = Inbox.of(ctx, copied, self.num_chunks, needed, 1, self.x.dtype, least=least * self.itemsize)
        return ctx.bind_call(
            reduce_kernel, min(self.num_programs, self.num_chunks), inbox.workspace, operation, x=self.x, out=self.out,
            inbox=inbox.matrix, inbox_stride=inbox.stride, part_stride=part_stride, num_counters=num_counters,
            parts=self.table, chunk=self.chunk, num_chunks=self.num_chunks, span_chunks=self.span_chunks,
            GATHER=gather, WHOLE=self.whole, landing=copied,
            copies=self.reduced_sends(part_stride, gather) if copied else None, varying=("x", "out"),
            factor=self.factor, **self.options,
        )  # fmt: skip

    def spans(self, part: int):
        """The copies that a part is sent in: (first element, elements, chunks of the part delivered by then)."""
        chunks = -(-part // self.chunk) or 1
        for first in range(0, chunks, self.span_chunks):
            last = min(first + self.span_chunks, chunks)
            yield first * self.chunk, min(last * self.chunk, part) - first * self.chunk, last

    def reduced_sends(self, part_stride: int, gather: bool) -> list[Send]:
        """The sends of an all-reduce or reduce-scatter: the peers' parts of x, then with `gather` the own sums.

        The parts are sent a span of each peer's in turn, since a sum needs the spans of all ranks.
        """
        rank, size, itemsize, sends = self.ctx.rank, self.ctx.size, self.itemsize, []
        peers = [(rank + step) % size for step in range(1, size)]
        spans = {peer: list(self.spans(self.parts[peer])) for peer in peers}
        for number in range(max(map(len, spans.values()))):
            for peer in peers:
                for first, count, chunks in spans[peer][number : number + 1]:
                    source, to = self.starts[peer] + first, rank * part_stride + first
                    sends.append(Send(peer, "x", source * itemsize, to * itemsize, count * itemsize, rank, chunks))
        start, itemsize = self.starts[rank], self.out.element_size()
        for number, (first, count, chunks) in enumerate(self.spans(self.parts[rank]) if gather else ()):
            at = (start + first) * itemsize
            to, summed = size * part_stride * self.itemsize + at, chunks - number * self.span_chunks
            for peer in peers:
                waited = summed if peer == peers[0] else 0
                sends.append(Send(peer, "out", at, to, count * itemsize, size + rank, chunks, number, waited))
        return sends

    def packets(self, operation, reduce: bool, gather: bool = False):
        """The launch of `reduce`, or of `gather` without `reduce`, by packets."""
        ctx, block = self.ctx, PACKET_BLOCK * 4 // self.itemsize
        blocks = -(-self.max_part // block)
        if blocks == 0:
            return bind_empty(ctx)
        words = PACKET_BLOCK + (block * self.out.element_size() // 4 if gather else 0)  # of a block, in all trips
        name = "lamport" if reduce else "packets"
        workspace = ctx.workspace().reserve(**{f"num_{name}": ctx.size * blocks * words})
        return ctx.bind_call(
            packets_kernel, min(self.num_programs, blocks), workspace, operation, x=self.x, out=self.out,
            packets=getattr(workspace, name), inbox_stride=getattr(workspace, f"num_{name}"),
            source_stride=blocks * PACKET_BLOCK, parts=self.table, max_part=self.max_part, factor=self.factor,
            REDUCE=reduce, WHOLE=self.whole, GATHER=gather,
            WORDS=PACKET_BLOCK, ALIGN=self.options["ALIGN"], num_warps=PACKET_BLOCK // 128,
            maxnreg=self.options["maxnreg"], varying=("x", "out"),
        )  # fmt: skip


def times(x: torch.Tensor, factor: float, out: torch.Tensor) -> torch.Tensor:
    """x times factor, rounded once, in `out`, which may be x."""
    wider = torch.promote_types(x.dtype, out.dtype)
    if wider != out.dtype:
        return torch.mul(x.to(wider), factor, out=out)  # of fp16 and bf16, fp32
    if x is not out:
        out.copy_(x)
    return out if factor == 1 else out.mul_(factor)


def plan_check_out(name: str, x: torch.Tensor, out: torch.Tensor | None, shape: tuple[int, ...], dtype, place: int = 0):
    """Check the caller's `out`. Returns a function that checks where x and out are, or None if there is no `out`.

    place: the one distance, in elements from out's start to x's, at which the two may share memory.
    """
    if out is None:
        return None
    check_out(name, out, shape, dtype, x.device)
    x_bytes, out_bytes = x.nbytes, out.nbytes
    copied = not x.is_contiguous()  # a contiguous copy of x is made before anything is written
    place = place * x.element_size() if dtype == x.dtype else None

    def check(x, out):
        apart = x.data_ptr() - out.data_ptr()
        overlap = x_bytes and out_bytes and -x_bytes < apart < out_bytes
        if overlap and not copied and apart != place:
            where = "" if place is None else f"in place it begins {-place} bytes after, otherwise "
            raise ValueError(f"{name}: out begins {-apart} bytes after x and overlaps it; {where}they share no memory")

    return check
