"""y[M, N/R] = activation(all_gather(x_shard_m)[M, K] @ w[N/R, K].T + bias[N/R]), overlapped.

M rows of all ranks.  K the dimension summed over.  N/R this rank's out-features.  R ranks.

Each rank runs one persistent kernel. Its comm programs put this rank's rows into every peer's inbox, chunk by chunk,
each followed by a signal, and then compute tiles like the others. Or the copy engine sends, many chunks at a time, and
all programs compute from the start. The tiles of this rank's own rows come first, read in place; then those of the
peers' rows, in the order in which they arrive. A tile waits for its chunks once, before its first step along K, and not
at all once everything has arrived. tkernels.overlap decides which program computes which tile, and which are split.

Of FP8 rows the scales travel beside them, one for each row, behind the same signals or counts. They lie behind all rows
in the inbox. A rank that has one scale for all of its rows sends it for each, so that ranks need not agree.

The inbox is one of two that alternate by the epoch's parity (tkernels.comm.workspace explains why two are enough), or
the landing, which the copy engine writes into (tkernels.comm.mail).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tkernels.comm.collectives import check_rows
from tkernels.comm.context import Context
from tkernels.comm.copies import Send
from tkernels.comm.device import NVSHMEM, Net, begin_call, copy, count, fence, operation, publish, put, wait_signal
from tkernels.comm.launch import PreparedLaunch
from tkernels.comm.mail import Mail, all_arrived, begin_mail, end_mail, parity, send_chunk, wait_chunks
from tkernels.comm.marks import COLLECT, COMPUTE, SEND, STORE, WAIT, mark
from tkernels.comm.workspace import Inbox
from tkernels.configs import OverlapConfig, result_dtype
from tkernels.fused import FusedCall
from tkernels.gemm import (
    Matrix,
    Operand,
    Scales,
    Tile,
    check_apart,
    check_dtype,
    check_operands,
    check_result,
    known_multiple,
    multiply,
    slices_of,
    tile_of,
)
from tkernels.gpus import gpu_here
from tkernels.leading import ROWS_FIRST
from tkernels.model import stages_of
from tkernels.overlap import (
    SPLIT_TILES,
    TILE_COUNTS,
    TILE_FIELDS,
    Place,
    Result,
    Sending,
    Work,
    are_even,
    finish_tile,
    num_chunks,
    programs_of,
    sums_of,
    take_tile,
    tile_schedule,
    walk,
    waves_of,
)
from tkernels.plain import plan_all_gather_matmul
from tkernels.staging import VECTOR_BYTES, Rows
from tkernels.waves import Waves, plan_waves

OP = operation("all_gather_matmul")

SCALES_BLOCK = tl.constexpr(256)  # scales that a program sends at a step
COLLECT_BYTES = 16 << 10  # of gathered rows that one program copies: 64 for each of 256 threads, all in flight


class Gathering(NamedTuple):
    """Where tiles are, and what becomes of them.

    x, gathered: this rank's rows, and the inbox, where those of peers arrive as `mail`, from parity_row on.
    schedule: `tiles_m` rows of `tiles_n` tiles.  first_row, rows: of this rank.  EVEN: `are_even`.
    """

    work: object
    x: object
    gathered: object
    mail: object
    schedule: object
    tiles_m: object
    tiles_n: object
    parity_row: object
    first_row: object
    rows: object
    chunks: object
    chunk_rows: object
    sent_rows: object
    result: object
    x_scale: object
    w_scale: object
    gathered_scales: object
    EVEN: object


class AtX(NamedTuple):
    """Where a tile is: overlap.At, but in which x its rows are, this rank's or the inbox, and their place in y."""

    column: object
    x: object
    out_row: object
    row: object
    valid: object


# fmt: off
@triton.jit
def row_of_tiles(
    tile_m, schedule, tiles_m, chunk_rows, sent_rows, rank,
    RANKS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A row of tiles of the schedule: shard, row in the shard and in the whole matrix, number of valid rows, chunk.

    EVEN: `are_even`. Then these are computed instead of loaded, since the first loads of a tile wait for them:
    llama8b-qkv takes 280 us instead of 282, llama8b-gate-up 1246 instead of 1248 (2 H200s; not measured on more).
    Reductions get no faster.
    """
    if EVEN:
        shard_tiles = tiles_m // RANKS
        own = tile_m < shard_tiles
        shard_tile = tile_m - shard_tiles
        step = 0
        if RANKS > 2:
            span = tl.maximum(sent_rows // BLOCK_M, 1)
            first = shard_tile // (span * (RANKS - 1)) * span
            within = shard_tile - first * (RANKS - 1)
            together = tl.minimum(shard_tiles - first, span)
            step = within // together
            shard_tile = first + within % together
        shard = tl.where(own, rank, (rank + RANKS - 1 - step) % RANKS)
        row = tl.where(own, tile_m, shard_tile) * BLOCK_M
        whole_row = shard * shard_tiles * BLOCK_M + row
        valid = tl.full((), BLOCK_M, tl.int32)
        chunk = row // chunk_rows
    else:
        tile = schedule + tile_m * TILE_FIELDS
        shard = tl.load(tile).to(tl.int32)
        row = tl.load(tile + 1).to(tl.int32)
        whole_row = tl.load(tile + 2).to(tl.int32)
        valid = tl.load(tile + 3).to(tl.int32)
        chunk = tl.load(tile + 4).to(tl.int32)
    return shard, row, whole_row, valid, chunk


@triton.jit
def begin_tile(index, complete, env, net, L, T):
    """Find a tile's rows, this rank's own or in the inbox, and wait for these. For `walk`."""
    tile_m, tile_n = tile_of(index, env.tiles_m, env.tiles_n, T.GROUP_M)
    source, row, out_row, valid, chunk = row_of_tiles(
        tile_m, env.schedule, env.tiles_m, env.chunk_rows, env.sent_rows, net.rank, L.RANKS, env.EVEN, T.BLOCK_M
    )
    column = tile_n * T.BLOCK_N
    x = env.x
    if source != net.rank:
        x = env.gathered
        row = env.parity_row + out_row
        if not complete:
            mark(WAIT, chunk, source, net, L)
            if not L.TRACE:  # a trace shows each tile's wait
                complete = all_arrived(env.mail, env.chunks, chunk, net, L)
            if not complete:
                wait_chunks(env.mail, source, chunk, tl.cdiv(valid, env.chunk_rows), net, L, 1)
    mark(COMPUTE, out_row, column, net, L)
    return AtX(column, x, out_row, row, valid), complete


@triton.jit
def end_tile(total, index, part, at, complete, env, net, L, T, S):
    """Store a tile, or a part of one. For `walk`."""
    work = env.work
    parts_done = work.counters + SPLIT_TILES + index - work.waves.whole
    sums_row = (index - work.waves.whole) * (part.count - 1) * T.BLOCK_M
    if T.PARTS:
        if (part.count > 1) & (part.number == part.count - 1):
            mark(COLLECT, 0, net.rank, net, L)
            wait_signal(parts_done, part.count - 1, net.rank, 0, net, L)
    mark(STORE, at.out_row, at.column, net, L)
    slices = slices_of(total, T.BLOCK_M, T.BLOCK_N, T.SPLIT)
    scales = Scales(env.x_scale, env.w_scale)
    if env.x_scale is not None:
        own_row = at.out_row - env.first_row
        their_scales = env.gathered_scales + tl.cast(env.parity_row, tl.int64) * work.w.columns // 4 + at.out_row
        if (own_row >= 0) & (own_row < env.rows):
            their_scales = env.x_scale + own_row
        scales = Scales(their_scales, env.w_scale)
    place = Place(at.out_row, at.valid, at.column, True, None, None, scales, 0)
    finish_tile(slices, place, part, work.sums, sums_row, env.result, net, L, T)
    if T.PARTS:
        if part.number < part.count - 1:
            publish(L)
            count(parts_done, L, "gpu")
    return complete


# Row counts and schedules may change from call to call, and ranks differ: do not compile a kernel for each value.
@triton.jit(do_not_specialize=[
    "parity_rows", "tiles_m", "head", "dealt", "whole", "splits", "num_counters", "max_chunks", "rank",
    "first_row", "rows", "num_comm", "chunks", "chunk_rows", "sent_rows", "call",
])
def all_gather_matmul_kernel(
    x, x_memory,  # [M/R, K]; its pointer, to contiguous rows
    gathered, inbox, parity_rows,  # [parity_rows + M, K]; its pointer
    w, w_row_stride, w_column_stride,  # [N/R, K]
    x_scale, w_scale, gathered_scales,  # Scales, [M/R] and [1] or [N/R]; [parity_rows * K / 4 + M]
    bias, y,  # [N/R]; [M, N/R]
    sums,  # [.., BLOCK_N], fp32: partial sums of the tiles that are split along K
    schedule, tiles_m,  # see tile_schedule
    head, dealt, whole, splits,  # Waves
    counters, num_counters, ready, max_chunks, state,  # of the workspace
    table, rank,  # Net
    gate, copied, delivered,  # of the workspace, for the copy engine
    first_row, rows, N, K,  # first_row, rows: of this rank
    num_comm, chunks, chunk_rows, sent_rows,
    call,  # see begin_call
    L, T, S, EVEN: tl.constexpr,  # EVEN: see `are_even`
):
    pid = tl.program_id(0)
    net = Net(table, rank)
    waves = Waves(head, dealt, whole, splits)
    epoch = begin_call(state, call, net, L)
    parity_row = parity(epoch).to(tl.int32) * parity_rows
    mail = Mail(inbox, ready, delivered, max_chunks, epoch)
    begin_mail(mail, gate, num_comm, net, L)
    if not L.COPIED:  # a compile-time branch; where the copy engine sends, num_comm is 0
        if pid < num_comm:
            for i in range(pid, chunks * (L.RANKS - 1), num_comm):
                chunk = i // (L.RANKS - 1)
                target = (rank + 1 + i % (L.RANKS - 1)) % L.RANKS
                row = tl.cast(chunk * chunk_rows, tl.int64)
                mark(SEND, chunk, target, net, L)
                if gathered_scales is not None:
                    num_rows = tl.maximum(tl.minimum(rows - row, chunk_rows), 0)
                    theirs = gathered_scales + tl.cast(parity_row, tl.int64) * K // 4 + first_row + row
                    put(theirs, x_scale + row, num_rows, target, net, L, SCALES_BLOCK, 4)
                    if L.TRANSPORT == NVSHMEM:
                        fence(L)
                send_chunk(
                    mail, inbox + (parity_row + first_row + row) * K, x_memory + row * K,
                    tl.maximum(tl.minimum(rows - row, chunk_rows), 0) * K, chunk, target, net, L, S,
                )

    N = known_multiple(N, T.N_MULTIPLE)
    tiles_n = tl.cdiv(N, T.BLOCK_N)
    own_dealt = dealt
    if L.COPIED:  # then all whole tiles are dealt out, and the last wave may not reach every program
        own_dealt = waves_of(pid, num_comm, waves)
    item = take_tile(tl.where(pid < num_comm, head, 0), own_dealt, pid, num_comm, waves, counters)
    w = Matrix(w, w_row_stride, w_column_stride, N, K)
    sums = Matrix(sums, T.BLOCK_N, 1, None, T.BLOCK_N)
    items = whole + (tiles_m * tiles_n - whole) * splits
    work = Work(None, K, 1, w, sums, counters, num_comm, item, items, waves, own_dealt)
    env = Gathering(
        work, x, gathered, mail, schedule, tiles_m, tiles_n, parity_row, first_row, rows, chunks, chunk_rows, sent_rows,
        Result(Matrix(y, N, 1, None, N), bias, None, None, None, None, None),
        x_scale, w_scale, gathered_scales, EVEN,
    )
    zero = tl.full((), 0, tl.int32)
    complete = tl.full((), False, tl.int1)  # whether all rows of the peers have been seen to arrive
    walk(AtX(zero, x, zero, zero, zero), complete, env, net, L, T, S, begin_tile, None, end_tile)
    end_mail(mail, state, copied, counters, num_counters, call, net, L)
# fmt: on


SCALES = "x_scale", "w_scale", "gathered_scales"  # arguments of the kernel


class AllGatherMatmul(FusedCall):
    """A call of x_shard_m [M/R, K], w [N/R, K], bias [N/R], y [M, N/R] and, to be filled, the gathered x [M, K].

    Each of the last three may be None. Returns y, and x gathered if `return_gathered` or if it is filled, else None.
    With Scales, as one more tensor, it also returns those of x gathered [M, 1], or None.
    """

    __slots__ = ()

    operation = "all_gather_matmul"

    def shared(self, ctx: Context, x, w, bias, out, gathered, scales=None) -> dict:
        travel = self.config and tuple(self.config.wire)
        same = {"dtype": x.dtype, "K": x.shape[1], "path": self.path, "chunk_rows and landing": travel}
        same |= {"staged, by use_tma or as TF32": self.stages_rows(x)} | self.shared_leading("gather_dim")
        return same | {"rows": tuple(map(int, self.rows or (x.shape[0],) * ctx.size))}

    def checked(self, ctx: Context, x, w, out, gathered, scales=None) -> "AllGatherMatmul":
        out_dtype = check_dtype(self.operation, "out_dtype", self.out_dtype, x.dtype)
        if self.return_gathered not in (False, True, "borrowed"):
            raise ValueError(
                f"{self.operation}: return_gathered={self.return_gathered!r}; use a bool, 'borrowed' or a tensor"
            )
        rows = check_rows(self.operation, ctx, self.rows, own=x.shape[0])
        if gathered is not None:
            check_result(f"{self.operation}: return_gathered", gathered, x, (sum(rows), x.shape[1]), x.dtype)
        return self._replace(rows=rows, out_dtype=out_dtype)

    def sent_shape(self, x, w) -> tuple[int, int]:
        return sum(self.rows), x.shape[1]

    def result_shape(self, ctx: Context, x, w) -> tuple[int, int]:
        return sum(self.rows), w.shape[0]

    def without_sending(self, ctx: Context, x, w, bias, out, gathered, scales=None):
        (M, K), N, out_dtype, return_gathered = self.sent_shape(x, w), w.shape[0], self.out_dtype, self.return_gathered
        if ctx.size == 1 or M == 0 or K == 0:

            def run_locally(x, w, bias, out, gathered, scales=None):
                if not K:  # nothing to gather, nor to scale
                    x, scales = x.new_empty((M, 0)), scales and Scales(scales.w.new_ones(1), scales.w)
                y = self.multiply(x, w, bias, out, scales)
                if return_gathered:
                    gathered = (x.new_empty((M, K)) if gathered is None else gathered).copy_(x)
                if scales is None:
                    return y, gathered
                return y, gathered, scales.by_row(M).x.clone().view(-1, 1) if return_gathered else None

            return run_locally
        if N == 0:  # the peers still need this rank's rows, so it multiplies by one row of zeros
            check_result(self.operation, out, x, (M, N), out_dtype)

            def others(w, gathered, scales=None):
                one = () if scales is None else (Scales(scales.x, scales.w.new_ones(1)),)
                return w.new_zeros((1, K)), None, None, gathered, *one

            run = self.prepare(ctx, x, *others(w, gathered, scales))

            def run_without_features(x, w, bias, out, *gathered):
                _, *gathered = run(x, *others(w, *gathered))
                return x.new_empty((M, N), dtype=out_dtype) if out is None else out, *gathered

            return run_without_features
        return None

    def plain(self, ctx: Context, x, w, bias, out, gathered, scales=None):
        return plan_all_gather_matmul(ctx, x, w, bias, out, gathered, self, scales)

    def as_sent(self, x):
        """x as it is sent: an example, and the function that makes it of tensors like this one.

        Its rows are contiguous and, staged, whole vectors: with zeros behind them, as what w has there is not zero.
        """
        wide, shape = Rows.of(x, VECTOR_BYTES, turned=False), x.shape
        sendable = x.is_contiguous() and wide.stride == shape[1] and x.data_ptr() % VECTOR_BYTES == 0
        if sendable or not self.stages_rows(x):
            # Flattened and back: contiguous() keeps a dimension of size 1 at any stride, but kernels assume rows of K.
            return x.contiguous().view(-1).view(shape), lambda x: x.contiguous()
        shape, copy = (shape[0], wide.stride), wide.plan_copy(x) if x.numel() else lambda source, target: None

        def widen(x):
            copy(x, sent := x.new_empty(shape))
            return sent

        return x.new_empty(shape), widen

    def fused(self, ctx: Context, x, w, bias, out, gathered, scales=None):
        depth = x.shape[1]
        x, as_sent = self.as_sent(x)
        config = self.configured(ctx, x, w, self.out_dtype)
        if config.interleaved:
            raise ValueError(
                f"{self.operation}: interleaved=True is for reductions, whose programs send the tiles that they have "
                f"finished; pass a config with interleaved=False, and num_comm of 1 or more, or 0 for the copy engine"
            )
        rows, out_dtype, activation, precision = self.rows, self.out_dtype, self.activation, self.precision
        gemm, M, N, K = config.gemm, sum(rows), self.columns or w.shape[0], x.shape[1]
        itemsize, row_bytes, first_row = x.element_size(), K * x.element_size(), sum(rows[: ctx.rank])
        tiles_m = sum(triton.cdiv(count, gemm.block_m) for count in rows)
        tiles = tiles_m * triton.cdiv(N, gemm.block_n)
        num_programs = programs_of(config, ctx.num_programs, tiles)
        chunks = max(num_chunks(count, config) for count in rows)
        sent = rows[ctx.rank] * row_bytes * (ctx.size - 1)
        # Any tile may be split if it is among the last ones. Tiles of own rows come first: their rows need not arrive.
        waves = plan_waves(gpu_here(), tiles, tiles, K, num_programs, config, sent, 0, x.dtype, precision)
        numbers = 0 if scales is None else M
        workspace, inbox, parity_rows, inbox_scales = Inbox.of(ctx, config.landing, chunks, M, K, x.dtype, numbers)
        y = check_result(self.operation, out, x, (M, N), out_dtype)

        # Every rank sends to the next rank first, so the previous rank's chunks arrive first.
        order = [(ctx.rank - step) % ctx.size for step in range(1, ctx.size)]
        schedule = ctx.on_device(tile_schedule(rows, [ctx.rank], config) + tile_schedule(rows, order, config))
        ragged = any(count % gemm.block_m for count in rows)
        x_operand = Operand.of(x, gemm.block_m, gemm.block_k, gemm.use_tma, precision)
        g_operand = Operand.of(inbox, gemm.block_m, gemm.block_k, x_operand.tma, precision)
        w_operand = Operand.of(w, gemm.block_n, gemm.block_k, gemm.use_tma, precision)
        y_operand = Operand.of(y, gemm.block_m, gemm.block_n // gemm.split, gemm.use_tma and not ragged and N > 1)
        sums, make_sums = sums_of(tiles - waves.whole, waves.splits, gemm, ctx.device)
        aligned = row_bytes % 16 == 0 and x.data_ptr() % 16 == 0
        # Elements of FP8 are sent as many bytes at a step as those of 16 bits.
        put_block = config.copy_block(aligned, ctx.size) * result_dtype(x.dtype).itemsize // itemsize
        tile = Tile.of(gemm, x_operand, w_operand, bias, activation, precision, waves.splits > 1, scales=scales, N=N)
        varying, scale_arguments = ("x", "x_memory", "w", "bias", "y", "sums"), dict.fromkeys(SCALES)
        if scales is not None:
            tile = tile._replace(X_SCALE_STRIDE=tl.constexpr(1))
            scale_arguments = dict(zip(SCALES, (*scales.by_row(rows[ctx.rank]), inbox_scales), strict=True))
            varying += SCALES[:2]
        copies = _sends(ctx, rows, row_bytes, chunks, config, scales is not None) if config.copied else None
        launch = ctx.bind_call(
            all_gather_matmul_kernel, num_programs, workspace, OP,
            x=x_operand.argument, x_memory=x,
            gathered=g_operand.argument, inbox=inbox, parity_rows=parity_rows,
            **w_operand.named("w"), **scale_arguments,
            bias=x if bias is None else bias, y=y_operand.argument,
            sums=sums,
            schedule=schedule, tiles_m=tiles_m, **waves._asdict(), num_counters=TILE_COUNTS.value,
            first_row=first_row, rows=rows[ctx.rank], N=N, K=K,
            num_comm=config.num_comm, chunks=chunks, chunk_rows=config.chunk_rows, sent_rows=config.sent_rows,
            EVEN=are_even(rows, config), T=tile,
            S=Sending.of(config, put_block, 16 if aligned else itemsize),
            num_warps=gemm.num_warps, num_stages=stages_of(gemm, waves.splits), maxnreg=config.max_registers,
            landing=config.landing, copies=copies, varying=varying,
        )  # fmt: skip
        borrowed = self.return_gathered == "borrowed" and config.landing  # of two inboxes only the device knows which
        collect = collect_scales = None
        if self.return_gathered and not borrowed:
            collect = _collect(workspace.state, inbox, parity_rows, x, gathered if K == depth else None, first_row, M)
            if scales is not None:
                own, parity = scales.by_row(rows[ctx.rank]).x.view(-1, 1), parity_rows * K // 4
                collect_scales = _collect(workspace.state, inbox_scales, parity, own, None, first_row, M)

        def run(x, w, bias, out, gathered, scales=None):
            if gathered is not None and x.data_ptr() != gathered.data_ptr() + first_row * depth * itemsize:
                check_apart("all_gather_matmul", gathered, "return_gathered", x_shard_m=x)
            x, asked = as_sent(x), gathered
            y = x.new_empty((M, N), dtype=out_dtype) if out is None else out
            scales = () if scales is None else scales.by_row(x.shape[0])
            launch(x, x, w, x if bias is None else bias.contiguous(), y, make_sums(), *scales)
            gathered_scales = None
            if borrowed:
                # No peer writes there before this rank has entered the next call.
                inbox[first_row : first_row + x.shape[0]].copy_(x.detach())
                gathered = inbox[:, :depth]
                if scales:
                    gathered_scales = inbox_scales[:M].view(-1, 1)
                    gathered_scales[first_row : first_row + x.shape[0], 0].copy_(scales.x)
            elif collect is not None:
                gathered = x.new_empty((M, K)) if asked is None or K > depth else asked
                collect(x, gathered)
                if K > depth:
                    gathered = (x.new_empty((M, depth)) if asked is None else asked).copy_(gathered[:, :depth])
                if scales:
                    gathered_scales = scales.x.new_empty((M, 1))
                    collect_scales(scales.x, gathered_scales)
            return (y, gathered, gathered_scales) if scales else (y, gathered)

        return run


class AllGatherMatmuls(NamedTuple):
    """A call of x_shard_m [M/R, K], then `number` weights [N/R, K], then as many biases [N/R] or None.

    Returns a list of y [M, N/R], and x gathered if `return_gathered`, else None. The first product overlaps the gather.
    The others read the gathered rows, by whichever multiplies faster on this rank alone: all SMs compute, and every row
    is there. A single launch of all columns would take a copy of the weights, and give columns of one matrix.
    """

    number: int
    activation: str | None = None
    rows: tuple[int, ...] | None = None
    path: str | None = None
    precision: str = "ieee"
    return_gathered: bool = False
    leading: tuple[int, ...] = ROWS_FIRST

    operation = "all_gather_matmul"

    def first(self) -> AllGatherMatmul:
        """The call of the first weight alone."""
        wanted = self.return_gathered or self.number > 1 and "borrowed"
        options = self.activation, self.rows, None, None, self.path, self.precision, wanted
        return AllGatherMatmul(*options, leading=self.leading)

    def shared(self, ctx: Context, x, *operands) -> dict:
        return self.first().shared(ctx, x, *operands[:1], None, None, None) | {"weights": self.number}

    def prepare(self, ctx: Context, x, *operands):
        """The function of tensors like these that carries out the call; see `comm.calls.Call`."""
        number, options = self.number, (self.activation, None, None, self.precision)
        for w, bias in zip(operands[:number], operands[number:], strict=True):
            check_operands(self.operation, x, w, bias, self.activation, ctx.device)
        first = self.first().prepare(ctx, x, operands[0], operands[number], None, None)

        def run(x, *operands):
            y, gathered = first(x, operands[0], operands[number], None, None)
            others = zip(operands[1:number], operands[number + 1 :], strict=True)
            ys = [y, *(multiply(options, (gathered, w, bias, None)) for w, bias in others)]
            return ys, gathered if self.return_gathered else None

        return run


def _sends(ctx: Context, rows, row_bytes: int, chunks: int, config: OverlapConfig, scaled: bool = False) -> list[Send]:
    """This rank's sends by the copy engine, in order of rows, each copy to all peers, the next rank first.

    scaled: the scales of all rows come with the first ones.
    The last copy raises a peer's count of delivered chunks to `chunks`. A rank without rows sends nothing: peers only
    wait until it has entered the call.
    """
    sends, own, first_row = [], rows[ctx.rank], sum(rows[: ctx.rank])
    for row in range(0, own, config.sent_rows):
        end = min(row + config.sent_rows, own)
        for step in range(1, ctx.size):
            target, to = (ctx.rank + step) % ctx.size, (first_row + row) * row_bytes
            if scaled and row == 0:
                sends.append(Send(target, "x_scale", 0, sum(rows) * row_bytes + 4 * first_row, 4 * own, ctx.rank, None))
            delivered = chunks if end == own else end // config.chunk_rows
            sends.append(Send(target, "x", row * row_bytes, to, (end - row) * row_bytes, ctx.rank, delivered))
    return sends


@triton.jit(do_not_specialize=["parity_stride", "own_start", "own_end", "total"])
def collect_kernel(
    x, gathered, inbox, parity_stride, state,  # [own part], [whole], [parity_stride + whole]
    own_start, own_end, total,  # elements of the whole
    BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK gathered elements out of the inbox of the last epoch, and this rank's own from x unless already there.

    The call after the next one overwrites that inbox. Only the device knows its parity.
    """
    VECTOR: tl.constexpr = ALIGN * 8 // x.dtype.element_ty.primitive_bitwidth
    # These are whole vectors, which the compiler can't infer from runtime arguments.
    own_start, own_end = own_start // VECTOR * VECTOR, own_end // VECTOR * VECTOR
    inbox += parity(tl.load(state)) * (parity_stride // VECTOR * VECTOR)
    own = gathered + own_start
    start = tl.cast(tl.program_id(0), tl.int64) * BLOCK
    end = tl.minimum(start + BLOCK, total)
    copy(gathered + start, inbox + start, tl.minimum(end, own_start) - start, BLOCK, ALIGN)
    if own.to(tl.int64) != x.to(tl.int64):
        first = tl.maximum(start - own_start, 0)
        copy(own + first, x + first, tl.minimum(end, own_end) - own_start - first, BLOCK, ALIGN)
    first = tl.maximum(start, own_end)
    copy(gathered + first, inbox + first, end - first, BLOCK, ALIGN)


def _collect(state, inbox, parity_rows: int, x, gathered, first_row: int, M: int) -> PreparedLaunch:
    """The launch (x, gathered) that copies the gathered rows of calls like this one. inbox: [parity_rows + M, K]."""
    K, itemsize = x.shape[1], x.element_size()
    aligned = K * itemsize % 16 == 0 and x.data_ptr() % 16 == 0 and (gathered is None or gathered.data_ptr() % 16 == 0)
    block = COLLECT_BYTES // itemsize // (1 if aligned else 8)
    gathered = check_result("all_gather_matmul: return_gathered", gathered, x, (M, K), x.dtype)
    return PreparedLaunch(
        collect_kernel, triton.cdiv(M * K, block),
        (x, gathered, inbox, parity_rows * K, state, first_row * K, (first_row + x.shape[0]) * K, M * K),
        ("x", "gathered"), BLOCK=block, ALIGN=16 if aligned else itemsize, num_warps=8,
    )  # fmt: skip
