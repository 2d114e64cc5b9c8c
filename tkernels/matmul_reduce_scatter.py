"""y[M/R, N] = activation(sum over ranks of (x_shard_k[M, K/R] @ w_shard_k[N, K/R].T) + bias), overlapped.

M rows.  N out-features.  K/R this rank's part of the reduction dimension.  R ranks; each owns a part of the rows.

Each rank runs one persistent kernel. It computes the tiles of the peers' rows first and stores them to an outbox, local
memory that a call holds until it returns. Once all tiles of a chunk are stored, a comm program puts the chunk into its
owner's inbox, followed by a signal; or the copy engine sends several chunks at a time. With `interleaved` no program
waits for a whole chunk: each sends its own finished tile while it computes the next one, and the program that sends a
chunk's last tile signals. Tiles of this rank's own rows come last: their epilogue adds the peers' partial sums from the
inbox, in a fixed order of ranks, then bias and activation.
Partial sums are sent in the operands' dtype (bf16 of FP8), or on request in fp32 or, rounded, in FP8 with scales beside
them (tkernels.partials), and are added in fp32. Those of FP8 operands are scaled before, as scales are of this rank's
part of K. The result has the same bits on every run.

With GATHER, the same kernel is `matmul_all_reduce`. It also sends the finished chunks of this rank's rows to every
peer: by the copy engine; or by the comm programs, joined by every program that has no tile left; or, interleaved, tile
by tile. All programs copy arriving rows to the output.
"""

import itertools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tkernels.comm import runtime
from tkernels.comm.collectives import PART_FIELDS, check_rows, part_table, receive_parts, split_rows
from tkernels.comm.context import Context
from tkernels.comm.copies import Send
from tkernels.comm.device import (
    Net,
    await_peers,
    begin_call,
    completes,
    count,
    count_up_to,
    meet,
    operation,
    publish,
    put_tile,
    signal,
    signal_all,
    tell,
    wait_signal,
)
from tkernels.comm.mail import (
    Mail,
    all_arrived,
    begin_mail,
    chunk_word,
    end_mail,
    parity,
    phase_words,
    second_phase,
    send_chunk,
    wait_chunk,
    wait_chunks,
)
from tkernels.comm.marks import COLLECT, COMPUTE, SEND, STORE, WAIT, mark
from tkernels.comm.workspace import Inbox
from tkernels.configs import FP8, OverlapConfig, result_dtype
from tkernels.fused import FusedCall
from tkernels.gemm import (
    Matrix,
    Operand,
    Scales,
    Tile,
    check_dtype,
    check_result,
    known_multiple,
    slices_of,
    staging,
    tile_of,
    turned_for,
    zeros_along_k,
)
from tkernels.gpus import gpu_here
from tkernels.model import stages_of
from tkernels.overlap import (
    SEND_TICKETS,
    SPLIT_TILES,
    TILE_COUNTS,
    TILE_FIELDS,
    At,
    Place,
    Result,
    Sending,
    Work,
    finish_tile,
    num_chunks,
    programs_of,
    sums_of,
    take,
    take_tile,
    tile_schedule,
    walk,
    waves_of,
)
from tkernels.partials import WIRE_FP8, elements_of, row_elements
from tkernels.plain import plan_matmul_reduce
from tkernels.staging import in_rows
from tkernels.waves import Waves, plan_waves

OP = operation("matmul_reduce_scatter")

# Fields of a send: target rank; its number among the sends to that target; first row in the outbox; rows; the number of
# the send whose counter its tiles increment; rows of tiles that must be counted there.
SEND_FIELDS = tl.constexpr(6)
SPAN_ROWS = 8  # finished rows that a program copies from its inbox at a time
PART_ROWS = 128  # each rank's part of an inbox starts at a multiple of this, not of block_m, which ranks may differ in


class Tiles(NamedTuple):
    """The tiles of a launch: `rows` rows of `columns` tiles, as the schedule lists them; the first are the peers'.

    counts: finished tiles, [ranks, max_chunks].
    """

    schedule: object
    rows: object
    peer_rows: object
    columns: object
    counts: object


class Rows(NamedTuple):
    """Which of the M rows a rank owns, those before own_end, and how all of them lie in an inbox.

    parity_row: where this call's inbox begins.  part_stride, chunk_rows: rows of a rank's part there, and of a chunk.
    """

    M: object
    own_end: object
    parity_row: object
    part_stride: object
    chunk_rows: object


class Reducing(NamedTuple):
    """Where tiles are, and what becomes of them.  mail: the peers' partial sums.

    own_first, own_chunks: of this rank's rows.  sent_rows: rows sent at a time.
    send_step: the step along K in which this program sends the tile before, where interleaved.
    """

    work: object
    tiles: object
    rows: object
    mail: object
    result: object
    scales: object
    own_first: object
    own_chunks: object
    sent_rows: object
    send_step: object


class Progress(NamedTuple):
    """What a program knows from tile to tile.

    complete: whether all of the peers' partial sums have been seen to arrive.  pending: a finished tile, sent in step
    `send_step` of the next one; negative: none.  peers_entered: whether all peers have been seen to reach this call.
    """

    complete: object
    pending: object
    peers_entered: object


# fmt: off
@triton.jit
def finished_rows(mail, rows, result, L):
    """The mail of an all-reduce's finished rows, in y's dtype; they arrive after the partial sums in the inbox."""
    first = tl.cast(rows.parity_row + L.RANKS * rows.part_stride, tl.int64) * result.partials.row_stride
    return second_phase(mail, (mail.memory + first).to(result.y_memory.dtype), L)


@triton.jit
def peers_tile_first(index, tiles, T):
    """`tile_of`, with the tiles of the peers' rows before those of this rank's own rows.

    No group of tiles mixes the two. An own tile waits for the peers: if programs could reach one before they have
    finished all their tiles of the peers' rows, two ranks could wait for each other forever.
    """
    peer_tiles = tiles.peer_rows * tiles.columns
    if index < peer_tiles:
        tile_m, tile_n = tile_of(index, tiles.peer_rows, tiles.columns, T.GROUP_M)
    else:
        tile_m, tile_n = tile_of(index - peer_tiles, tiles.rows - tiles.peer_rows, tiles.columns, T.OWN_GROUP_M)
        tile_m += tiles.peer_rows
    return tile_m, tile_n


@triton.jit
def send_tile(index, peers_entered, tiles, rows, result, mail, net, L, T, S):
    """Send a tile that this program has stored: partial sums to the row's owner, a finished tile to all peers.

    peers_entered: whether this program has already seen that all peers have reached this call. The program that sends a
    chunk's last tile signals the chunk, or all chunks that the tile spans. Returns whether this program did.
    """
    if L.LANDING:
        if not peers_entered:
            mark(WAIT, 0, net.rank, net, L)
            await_peers(mail.epoch, net, L)
    N = result.y.columns
    tile_m, tile_n = peers_tile_first(index, tiles, T)
    tile = tiles.schedule + tile_m * TILE_FIELDS
    column = tile_n * T.BLOCK_N
    owner = tl.load(tile).to(tl.int32)
    row = tl.load(tile + 1)
    out_row = tl.load(tile + 2)
    valid = tl.load(tile + 3).to(tl.int32)
    chunk = tl.load(tile + 4).to(tl.int32)
    together = tl.load(tile + 5) * tiles.columns
    # Partial sums and results may differ in dtype: copy words of the narrower one.
    WIRE_BITS: tl.constexpr = result.outbox_memory.dtype.element_ty.primitive_bitwidth
    STORED_BITS: tl.constexpr = result.y_memory.dtype.element_ty.primitive_bitwidth if S.GATHER else WIRE_BITS
    BITS: tl.constexpr = min(WIRE_BITS, STORED_BITS)
    word = tl.pointer_type(tl.int16 if BITS == 16 else tl.int32)
    scale = WIRE_BITS // BITS
    src = (result.outbox_memory + (out_row - rows.own_end + rows.M) % rows.M * N + column).to(word)
    dst = (mail.memory + (rows.parity_row + net.rank * rows.part_stride + row) * N + column).to(word)
    words = chunk_word(mail, net.rank, chunk)
    first = 0
    targets = 1
    if S.GATHER:
        if owner == net.rank:
            scale = STORED_BITS // BITS
            src = (result.y_memory + out_row * N + column).to(word)
            dst = (finished_rows(mail, rows, result, L).memory + out_row * N + column).to(word)
            words += phase_words(mail, L)
            first = 1
            targets = L.RANKS - 1
    publish(L)
    meet()  # each thread reads elements that other threads have stored
    for step in range(first, first + targets):
        target = (owner + step) % L.RANKS
        mark(SEND, chunk, target, net, L)
        put_tile(
            dst, src, N * scale, valid, tl.minimum(N - column, T.BLOCK_N) * scale, target, net, L,
            (S.ROWS, T.BLOCK_N * max(WIRE_BITS, STORED_BITS) // BITS), S.ALIGN,
        )
    complete = completes(tiles.counts + owner * mail.max_chunks + chunk, together, L)
    if complete:
        for step in range(first, first + targets):
            for number in range(tl.cdiv(valid, rows.chunk_rows)):
                tell(words + number, mail.epoch, (owner + step) % L.RANKS, net, L)
    return complete


@triton.jit
def begin_tile(index, progress, env, net, L, T):
    """Find a tile's rows of x. For `walk`."""
    tile_m, tile_n = peers_tile_first(index, env.tiles, T)
    tile = env.tiles.schedule + tile_m * TILE_FIELDS
    row = tl.load(tile + 2).to(tl.int32)
    valid = tl.load(tile + 3).to(tl.int32)
    column = tile_n * T.BLOCK_N
    mark(COMPUTE, row, column, net, L)
    return At(column, tile_m, row, valid), progress


@triton.jit
def send_pending(step, at, progress, env, net, L, T, S):
    """Send the tile before this one, in the step where this program does. For `walk`."""
    pending = progress.pending
    peers_entered = progress.peers_entered
    if S.INTERLEAVED:
        if (step == env.send_step) & (pending >= 0):
            signalled = send_tile(pending, peers_entered, env.tiles, env.rows, env.result, env.mail, net, L, T, S)
            peers_entered = tl.full((), True, tl.int1)
            # Negative, but not a constant: the compiler would select a constant outside of this branch, and the wait in
            # `end_tile` would no longer depend on the branch.
            pending = -1 - signalled.to(tl.int32)
            mark(COMPUTE, at.row, at.column, net, L)
    return Progress(progress.complete, pending, peers_entered)


@triton.jit
def end_tile(total, index, part, at, progress, env, net, L, T, S):
    """Store a tile, or a part of one: of own rows once the peers' partial sums are there, of others for sending.

    For `walk`.
    """
    work = env.work
    complete = progress.complete
    pending = progress.pending
    row = at.row - env.own_first
    own = (row >= 0) & (at.row < env.rows.own_end)
    chunk = row // env.rows.chunk_rows  # of an own tile
    parts_done = work.counters + SPLIT_TILES + index - work.waves.whole
    sums_row = (index - work.waves.whole) * (part.count - 1) * T.BLOCK_M
    if part.number == part.count - 1:
        if T.PARTS:
            if part.count > 1:
                mark(COLLECT, chunk, net.rank, net, L)
                wait_signal(parts_done, part.number, net.rank, chunk, net, L)
        # `pending` is always negative here. It is tested because Triton's pipeliner keeps two branches in order only
        # if the second uses a value of the first. Otherwise programs would wait for each other's tiles before they send
        # their own.
        if own & (not complete) & (pending < 0):
            mark(WAIT, chunk, net.rank, net, L)
            if not L.TRACE:  # a trace shows each tile's wait
                complete = all_arrived(env.mail, env.own_chunks, chunk, net, L)
            if not complete:
                wait_chunks(
                    env.mail, net.rank + 1, chunk, tl.cdiv(at.valid, env.rows.chunk_rows), net, L, L.RANKS - 1
                )
    mark(STORE, at.row, at.column, net, L)
    out_row = row
    if S.GATHER:
        out_row = at.row
    if not own:  # the outbox holds the rows after this rank's own, then those before
        out_row = (at.row - env.rows.own_end + env.rows.M) % env.rows.M
    slices = slices_of(total, T.BLOCK_M, T.BLOCK_N, T.SPLIT)
    place = Place(
        out_row, at.valid, at.column, own, env.rows.parity_row + row, env.rows.part_stride, env.scales, at.row
    )
    finish_tile(slices, place, part, work.sums, sums_row, env.result, net, L, T)
    if S.GATHER or not own or part.number < part.count - 1:
        if S.INTERLEAVED:  # then no tile is split
            pending = index
        else:
            publish(L)
            if T.PARTS and part.number < part.count - 1:
                count(parts_done, L, "gpu")
            else:
                tile = env.tiles.schedule + at.tile_m * TILE_FIELDS
                together = tl.load(tile + 1) // env.sent_rows
                done = env.tiles.counts + tl.load(tile) * env.mail.max_chunks + together
                if L.COPIED:
                    count_up_to(done, tl.load(tile + 5) * env.tiles.columns, L)
                else:
                    count(done, L, "gpu")
    return Progress(complete, pending, progress.peers_entered)


# Row counts and schedules may change from call to call, and ranks differ: do not compile a kernel for each value.
@triton.jit(do_not_specialize=[
    "parity_rows", "part_stride", "tiles_m", "peer_tiles_m", "head", "dealt", "whole", "splits",
    "num_sends", "num_counters", "max_chunks", "rank", "M", "own_first", "own_end", "num_comm", "own_chunks",
    "chunk_rows", "sent_rows", "span_rows", "call",
])
def matmul_reduce_kernel(
    x, x_row_stride, x_column_stride,  # [M, K/R]
    w, w_row_stride, w_column_stride,  # [N, K/R]
    x_scale, w_scale,  # Scales
    bias, y, y_memory,  # [N]; [M/R, N], or [M, N] with GATHER; its pointer
    outbox, outbox_memory,  # [M - own rows, N], the peers' rows only, row_elements apart; its pointer
    partials, inbox, parity_rows, part_stride,  # [parity_rows + R * part_stride (+ room for y), N], as far; its pointer
    sums,  # [.., BLOCK_N], fp32: partial sums of the tiles that are split along K
    schedule, tiles_m, peer_tiles_m,  # the first peer_tiles_m rows of tiles are the peers'
    head, dealt, whole, splits,  # Waves
    sends, num_sends,  # [num_sends, SEND_FIELDS]
    parts,  # [R, PART_FIELDS]: of elements of y
    counters, num_counters, ready, max_chunks, state,  # of the workspace
    table, rank,  # Net
    gate, copied, delivered,  # of the workspace, for the copy engine
    M, N, K, own_first, own_end,  # this rank's rows are own_first .. own_end of the M rows
    num_comm, own_chunks, chunk_rows,  # own_chunks: chunks of this rank's rows
    sent_rows, span_rows,  # rows sent at a time; see receive_parts
    call,  # see begin_call
    L, T, S,
):
    pid = tl.program_id(0)
    net = Net(table, rank)
    waves = Waves(head, dealt, whole, splits)
    epoch = begin_call(state, call, net, L)
    parity_row = parity(epoch).to(tl.int32) * parity_rows
    N = known_multiple(N, T.N_MULTIPLE)
    tiles_n = tl.cdiv(N, T.BLOCK_N)
    tiles = Tiles(schedule, tiles_m, peer_tiles_m, tiles_n, counters + TILE_COUNTS)
    rows = Rows(M, own_end, parity_row, part_stride, chunk_rows)
    w = Matrix(w, w_row_stride, w_column_stride, N, K)
    sums = Matrix(sums, T.BLOCK_N, 1, None, T.BLOCK_N)
    sent = row_elements(N, inbox)
    y, outbox = Matrix(y, N, 1, None, N), Matrix(outbox, sent, 1, None, N)
    partials = Matrix(partials, sent, 1, None, N)
    result = Result(y, bias, outbox, partials, y_memory, outbox_memory, inbox)
    mail = Mail(inbox, ready, delivered, max_chunks, epoch)
    begin_mail(mail, gate, num_comm, net, L)

    if S.INTERLEAVED:
        if pid == 0:  # signal empty transfers too: to peers without rows, and to all if this rank has none to gather
            for step in range(1, L.RANKS):
                target = (rank + step) % L.RANKS
                if tl.load(parts + target * PART_FIELDS + 1) == 0:
                    signal(chunk_word(mail, rank, 0), epoch, target, net, L)
            if S.GATHER and own_first == own_end:
                signal_all(chunk_word(mail, L.RANKS + rank, 0), epoch, net, L)
    elif not L.COPIED:  # a compile-time branch; where the copy engine sends, num_comm is 0
        if pid < num_comm:
            for i in range(pid, num_sends, num_comm):
                send = sends + i * SEND_FIELDS
                target = tl.load(send).to(tl.int32)
                chunk = tl.load(send + 1).to(tl.int32)
                row = tl.load(send + 2)
                num_rows = tl.load(send + 3)
                counter = tiles.counts + target * max_chunks + tl.load(send + 4)
                mark(COLLECT, chunk, target, net, L)
                wait_signal(counter, tl.load(send + 5) * tiles_n, rank, chunk, net, L)
                inbox_row = tl.cast(parity_row + rank * part_stride + chunk * chunk_rows, tl.int64)
                mark(SEND, chunk, target, net, L)
                send_chunk(
                    mail, inbox + inbox_row * sent, outbox_memory + row * sent, num_rows * sent, chunk, target,
                    net, L, S,
                )

    own_dealt = dealt
    if L.COPIED or S.INTERLEAVED:  # then no whole tile is claimed; the last wave may not reach every program
        own_dealt = waves_of(pid, num_comm, waves)
    items = whole + (tiles_m * tiles_n - whole) * splits
    item = items
    if not S.GATHER or pid >= num_comm:  # comm programs of an all-reduce compute no tile, but send finished chunks next
        item = take_tile(tl.where(pid < num_comm, head, 0), own_dealt, pid, num_comm, waves, counters)
    work = Work(x, x_row_stride, x_column_stride, w, sums, counters, num_comm, item, items, waves, own_dealt)
    # Sends are staggered, so that programs don't send all at once.
    send_step = pid * tl.cdiv(K, T.BLOCK_K) // tl.num_programs(0)
    scales = Scales(x_scale, w_scale)
    env = Reducing(work, tiles, rows, mail, result, scales, own_first, own_chunks, sent_rows, send_step)
    zero = tl.full((), 0, tl.int32)
    unseen = tl.full((), False, tl.int1)
    progress = Progress(unseen, tl.full((), -1, tl.int32), unseen)
    progress = walk(At(zero, zero, zero, zero), progress, env, net, L, T, S, begin_tile, send_pending, end_tile)
    if S.INTERLEAVED:
        if progress.pending >= 0:
            send_tile(progress.pending, progress.peers_entered, tiles, rows, result, mail, net, L, T, S)

    if pid == 0:  # even on a rank without rows of its own: its peers' counts of copies must not come after this call
        for step in range(1, L.RANKS):
            source = (rank + step) % L.RANKS
            mark(WAIT, 0, source, net, L)
            wait_chunk(mail, source, 0, net, L)

    if S.GATHER:
        finished = finished_rows(mail, rows, result, L)
        own = own_end - own_first
        own_sends = own_chunks * (L.RANKS - 1)
        if not (L.COPIED or S.INTERLEAVED):
            i = take(counters + SEND_TICKETS)
            while i < own_sends:
                chunk = i // (L.RANKS - 1)
                target = (rank + 1 + i % (L.RANKS - 1)) % L.RANKS
                row = tl.cast(chunk * chunk_rows, tl.int64)
                # A tile that spans several chunks is counted for the first of them.
                counted = chunk - chunk % tl.maximum(T.BLOCK_M // chunk_rows, 1)
                counted_rows = tl.maximum(tl.minimum(own - counted * chunk_rows, tl.maximum(chunk_rows, T.BLOCK_M)), 0)
                mark(COLLECT, chunk, rank, net, L)
                wait_signal(
                    tiles.counts + rank * max_chunks + counted, tl.cdiv(counted_rows, T.BLOCK_M) * tiles_n,
                    rank, chunk, net, L,
                )
                mark(SEND, chunk, target, net, L)
                send_chunk(
                    finished, finished.memory + (own_first + row) * N, y_memory + (own_first + row) * N,
                    tl.maximum(tl.minimum(own - row, chunk_rows), 0) * N, chunk, target, net, L, S,
                )
                i = take(counters + SEND_TICKETS)
        receive_parts(
            y_memory, finished, parts, tl.cast(chunk_rows, tl.int64) * N, tl.cast(span_rows, tl.int64) * N,
            net, L, S.BLOCK, S.ALIGN,
        )
    end_mail(mail, state, copied, counters, num_counters, call, net, L)
# fmt: on


class MatmulReduceScatter(FusedCall):
    """A call of x_shard_k [M, K/R], w_shard_k [N, K/R], bias [N] and y [M/R, N]; each of the last two may be None.

    Operands of FP8 come with Scales, of this rank's part of K.
    """

    __slots__ = ()

    operation, number, gather = "matmul_reduce_scatter", OP.value, False  # gather: finished rows go to all ranks

    def shared(self, ctx: Context, x, w, bias, out, scales=None) -> dict:
        usual = result_dtype(x.dtype)  # of FP8, a rank's operands may be of either kind
        same = {"dtype": usual if scales is None else "float8", "M": x.shape[0], "N": w.shape[0]}
        same |= {"bias": bias is not None, "activation": self.activation, "out_dtype": self.out_dtype or usual}
        same |= {"wire_dtype": self.wire_dtype or usual, "path": self.path}
        same |= {"chunk_rows and landing": self.config and tuple(self.config.wire)}
        same |= {"staged, by use_tma or as TF32": self.stages_rows(x)} | self.shared_leading("scatter_dim")
        return same | {"rows": tuple(map(int, self.rows or split_rows(x.shape[0], ctx.size)))}

    def checked(self, ctx: Context, x, w, out, scales=None) -> "MatmulReduceScatter":
        name, M = self.operation, x.shape[0]
        rows = split_rows(M, ctx.size) if self.gather else check_rows(name, ctx, self.rows, total=M)
        out_dtype = check_dtype(name, "out_dtype", self.out_dtype, x.dtype)
        if self.wire_dtype in FP8:
            return self._replace(rows=rows, out_dtype=out_dtype, path=self.path_in_fp8(x.dtype))
        wire_dtype = check_dtype(name, "wire_dtype", self.wire_dtype, x.dtype, fp8=(torch.bfloat16,))
        return self._replace(rows=rows, out_dtype=out_dtype, wire_dtype=wire_dtype)

    def path_in_fp8(self, operands: torch.dtype) -> str:
        """The path of partial sums that are sent in FP8. Raises TypeError or ValueError where they can't be."""
        asked = f"{self.operation}: wire_dtype={self.wire_dtype}"
        if self.wire_dtype != WIRE_FP8:
            raise TypeError(f"{asked}: of float8, partial sums are sent in {WIRE_FP8} alone")
        if operands == torch.float32:
            raise TypeError(f"{asked} is for bfloat16, float16 or float8 operands, but x is {operands}; leave it out")
        if not runtime.has_fp8():
            raise TypeError(f"{asked}: {gpu_here().name} has no float8 arithmetic; leave it out")
        if self.path == "plain":
            raise ValueError(f'{asked} is sent by the fused kernel alone; pass path="fused" or None')
        return self.path or "fused"

    def sent_shape(self, x, w) -> tuple[int, int]:
        return x.shape[0], w.shape[0]

    def arriving(self) -> int:
        return self.wire_dtype.itemsize + (self.out_dtype.itemsize if self.gather else 0)

    def result_shape(self, ctx: Context, x, w) -> tuple[int, int]:
        return x.shape[0] if self.gather else self.rows[ctx.rank], w.shape[0]

    def without_sending(self, ctx: Context, x, w, bias, out, scales=None):
        (M, N), out_dtype = self.sent_shape(x, w), self.out_dtype
        if ctx.size == 1 or M == 0:
            return self.multiply
        if N == 0:
            shape = self.result_shape(ctx, x, w)
            check_result(self.operation, out, x, shape, out_dtype)
            return lambda x, w, bias, out, *_: x.new_empty(shape, dtype=out_dtype) if out is None else out
        if x.shape[1] == 0:  # an empty part of K: this rank's partial sums are zeros
            others = () if scales is None else (scales,)
            run = self.prepare(ctx, zeros_along_k(x), zeros_along_k(w), bias, out, *others)
            return lambda x, w, *others: run(zeros_along_k(x), zeros_along_k(w), *others)
        return None

    def plain(self, ctx: Context, x, w, bias, out, scales=None):
        return plan_matmul_reduce(ctx, x, w, bias, out, self, scales)

    def fused(self, ctx: Context, x, w, bias, out, scales=None):
        rows, gather, out_dtype, wire_dtype = self.rows, self.gather, self.out_dtype, self.wire_dtype
        activation, precision = self.activation, self.precision
        (M, K), N, itemsize = x.shape, self.columns or w.shape[0], wire_dtype.itemsize
        first_rows = [sum(rows[:rank]) for rank in range(ctx.size + 1)]
        outbox_shape, shape = (M - rows[ctx.rank], elements_of(N, wire_dtype)), (M if gather else rows[ctx.rank], N)
        y = check_result(self.operation, out, x, shape, out_dtype)
        # In a transposed x, tiles of some part would start off a 16-byte boundary, where TMA reads nothing: a kernel
        # whose box begins there ends with an illegal instruction.
        straight = in_rows(x)[1] and any(row * x.element_size() % 16 for row in first_rows)
        staged = straight or self.stages_rows(x)
        x, stage = staging(x, False if straight else turned_for(precision)) if staged else (x, None)
        config = self.configured(ctx, x, w, max(wire_dtype, out_dtype, key=lambda each: each.itemsize))
        gemm = config.gemm
        peers = [(ctx.rank + step) % ctx.size for step in range(1, ctx.size)]
        peer_tiles_m = sum(triton.cdiv(rows[peer], gemm.block_m) for peer in peers)
        own_tiles_m, tiles_n = triton.cdiv(rows[ctx.rank], gemm.block_m), triton.cdiv(N, gemm.block_n)
        tiles_m = peer_tiles_m + own_tiles_m
        tiles = tiles_m * tiles_n
        num_programs = programs_of(config, ctx.num_programs, tiles)
        columns = outbox_shape[1]  # elements of a row as it is sent
        row_bytes, y_bytes = columns * itemsize, N * out_dtype.itemsize
        sent = (M - rows[ctx.rank]) * row_bytes
        busy = tiles if gather else peer_tiles_m * tiles_n  # comm programs are busy at least until these are computed
        # Split-K would take registers that sending during the matmul needs.
        splittable = 0 if config.interleaved else own_tiles_m * tiles_n
        waves = plan_waves(gpu_here(), tiles, splittable, K, num_programs, config, sent, busy, x.dtype, precision)
        part_stride = triton.cdiv(max(rows), PART_ROWS) * PART_ROWS
        inbox_rows = ctx.size * part_stride
        if gather:  # the finished rows of y, in its own dtype
            inbox_rows += triton.cdiv(M * y_bytes, row_bytes)
        chunks = max(num_chunks(part, config) for part in rows)
        workspace, inbox, parity_rows, _ = Inbox.of(ctx, config.landing, chunks, inbox_rows, columns, wire_dtype)
        # The counters are indexed with the workspace's num_chunks, which may be larger than this call's.
        num_counters = TILE_COUNTS.value + ctx.size * workspace.num_chunks
        outbox = check_result(self.operation, None, x, outbox_shape, wire_dtype)

        schedule = ctx.on_device(tile_schedule(rows, peers, config) + tile_schedule(rows, [ctx.rank], config))
        sends = ctx.on_device(send_schedule(rows, peers, config))
        parts = ctx.on_device(part_table([N * part for part in rows]))

        ragged = any(part % gemm.block_m for part in rows)
        x_operand = Operand.of(x, gemm.block_m, gemm.block_k, gemm.use_tma, precision)
        w_operand = Operand.of(w, gemm.block_n, gemm.block_k, gemm.use_tma, precision)
        travels = (itemsize, out_dtype.itemsize) if gather else (itemsize,)
        aligned = row_bytes % 16 == 0 and (not gather or y_bytes % 16 == 0)
        box = gemm.block_m, gemm.block_n // gemm.split
        store_tma = gemm.use_tma and not ragged and N > 1
        y_operand = Operand.of(y, *box, store_tma)
        o_operand = Operand.of(outbox[:, :N], *box, store_tma)
        sums, make_sums = sums_of(tiles - waves.whole, waves.splits, gemm, ctx.device)
        p_operand = Operand.of(inbox[:, :N], *box, gemm.use_tma and N > 1)
        # Wider elements take no more bytes a step, and so no more registers, than elements of the usual dtype.
        usual, (x_scale, w_scale) = result_dtype(x.dtype).itemsize, scales or (None, None)
        put_block = config.copy_block(aligned, ctx.size) * usual // max(travels)
        tile = Tile.of(
            gemm, x_operand, w_operand, bias, activation, precision, waves.splits > 1, own_group(config), scales, N
        )
        varying = "x", "w", "bias", "y", "y_memory", "outbox", "outbox_memory", "sums"
        copies = None
        if config.copied:
            sizes = tiles_n, row_bytes, part_stride, y_bytes if gather else 0, workspace.num_chunks
            copies = _copied(ctx, rows, peers, config, *sizes)
        launch = ctx.bind_call(
            matmul_reduce_kernel, num_programs, workspace, self.number,
            **x_operand.named("x"), **w_operand.named("w"), x_scale=x_scale, w_scale=w_scale,
            bias=x if bias is None else bias, y=y_operand.argument, y_memory=y,
            outbox=o_operand.argument, outbox_memory=outbox,
            partials=p_operand.argument, inbox=inbox, parity_rows=parity_rows, part_stride=part_stride,
            sums=sums,
            schedule=schedule, tiles_m=tiles_m, peer_tiles_m=peer_tiles_m, **waves._asdict(),
            sends=sends, num_sends=sends.numel() // SEND_FIELDS.value, parts=parts, num_counters=num_counters,
            M=M, N=N, K=K, own_first=first_rows[ctx.rank], own_end=first_rows[ctx.rank + 1],
            num_comm=config.num_comm, own_chunks=num_chunks(rows[ctx.rank], config), chunk_rows=config.chunk_rows,
            sent_rows=config.sent_rows, span_rows=math.gcd(config.chunk_rows, SPAN_ROWS),
            T=tile,
            S=Sending.of(config, put_block, 16 if aligned else min(travels), gather),
            num_warps=gemm.num_warps, num_stages=stages_of(gemm, waves.splits), maxnreg=config.max_registers,
            landing=config.landing, copies=copies,
            varying=varying + (("x_scale", "w_scale") if scales else ()),
        )  # fmt: skip

        def run(x, w, bias, out, scales=None):
            x = stage(x) if stage else x
            y = x.new_empty(shape, dtype=out_dtype) if out is None else out
            outbox = x.new_empty(outbox_shape, dtype=wire_dtype)  # reused in stream order, after all that reads it
            tensors = x, w, x if bias is None else bias.contiguous(), y, y, outbox, outbox, make_sums()
            tensors += scales.contiguous() if scales else ()
            launch(*tensors)
            return y

        return run


def own_group(config: OverlapConfig) -> int:
    """group_m of the own tiles: no more rows than one copy sends, since the next copy's partial sums arrive later."""
    gemm = config.gemm
    return max(min(gemm.group_m, config.sent_rows // gemm.block_m), 1) if config.copied else gemm.group_m


def send_schedule(rows: tuple[int, ...], peers: list[int], config: OverlapConfig) -> list[int]:
    """The list of sends, in the order in which `tile_schedule` completes them, flattened, SEND_FIELDS a send.

    peers: the next rank first, since the outbox begins with its rows. A peer without rows still gets one empty send,
    whose signal reports that this rank has come this far.
    """
    starts = dict(zip(peers, itertools.accumulate((rows[peer] for peer in peers), initial=0), strict=False))
    block, sent = config.gemm.block_m, config.sent_rows
    sends = {peer: max(triton.cdiv(rows[peer], sent), 1) for peer in peers}
    step, schedule = max(block // sent, 1), []
    for counted in range(0, max(sends.values()), step):
        for peer in peers:
            tiles_m = triton.cdiv(min(max(sent, block), rows[peer] - counted * sent), block)
            for number in range(counted, min(counted + step, sends[peer])):
                first = number * sent
                size = min(sent, rows[peer] - first)
                schedule += [peer, number, starts[peer] + first, size, counted, tiles_m]
    return schedule


def _copied(
    ctx: Context, rows, peers, config: OverlapConfig, tiles_n: int,
    partial_bytes: int, part_stride: int, finished_bytes: int, max_chunks: int,
) -> list[Send]:  # fmt: skip
    """The sends of the copy engine: the rows of the outbox, then, for an all-reduce, the finished rows of y.

    partial_bytes, finished_bytes: bytes of a row of partial sums and of a finished row; 0 if none is sent.
    """
    block_m, sent, sends = config.gemm.block_m, config.sent_rows, []
    schedule = send_schedule(rows, peers, config)
    for at in range(0, len(schedule), SEND_FIELDS.value):
        target, number, row, count, counted, tiles_m = schedule[at : at + SEND_FIELDS.value]
        to = (ctx.rank * part_stride + number * sent) * partial_bytes
        counter = TILE_COUNTS.value + target * max_chunks + counted
        tiles = tiles_m * tiles_n if number == counted else 0  # each counter is waited for once
        first, num_bytes = row * partial_bytes, count * partial_bytes
        chunks = num_chunks(number * sent + count, config)
        sends.append(Send(target, "outbox", first, to, num_bytes, ctx.rank, chunks, counter, tiles))
    own, first_row = rows[ctx.rank], sum(rows[: ctx.rank])
    for row in range(0, max(own, 1) if finished_bytes else 0, sent):
        count = min(sent, own - row)
        first = (first_row + row) * finished_bytes
        to = ctx.size * part_stride * partial_bytes + first
        counter = TILE_COUNTS.value + ctx.rank * max_chunks + row // sent
        tiles_m = triton.cdiv(min(max(sent, block_m), own - row), block_m)
        num_bytes, chunks = count * finished_bytes, num_chunks(row + count, config)
        for step, target in enumerate(peers):
            tiles = 0 if step or row % block_m else tiles_m * tiles_n
            sends.append(Send(target, "y", first, to, num_bytes, ctx.size + ctx.rank, chunks, counter, tiles))
    return sends
