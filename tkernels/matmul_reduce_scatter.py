"""y[M/R, N] = activation(sum over ranks of (x_shard_k[M, K/R] @ w_shard_k[N, K/R].T) + bias): send while multiplying.

M rows.  N out-features.  K/R this rank's part of the dimension summed over.  R ranks; each owns a part of the rows.

One persistent launch a rank. Tiles of the peers' rows come first and are stored to a local outbox; once all tiles of a
chunk are there, a comm program pushes the chunk into its owner's inbox, a signal behind it. Tiles of the own rows come
last: their epilogue adds the peers' partial sums from the inbox, in a fixed order of ranks, then bias and activation.
Partial sums travel in the operands' dtype, or in fp32 if asked to, and are added in fp32; the result is the same bits
on every run.

The same kernel, with GATHER, is `matmul_all_reduce`: the comm programs also send the finished chunks of the own rows to
every peer, and all programs copy what arrives to the output.
"""

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from tkernels.comm.collectives import check_rows, receive_parts, split_rows
from tkernels.comm.context import Context
from tkernels.comm.copies import Copies, Send, admit_copies, check_mapped
from tkernels.comm.device import (
    begin_epoch,
    count,
    end_epoch,
    operation,
    operation_name,
    publish,
    put_signal,
    wait_signal,
)
from tkernels.comm.marks import ADD, COLLECT, COMPUTE, SEND, STORE, WAIT, end_marks, mark, no_marks
from tkernels.configs import OverlapConfig, overlap_config
from tkernels.gemm import (
    ACTIVATIONS,
    Operand,
    activation_reference,
    check_dtype,
    check_operands,
    check_result,
    finish,
    halves,
    layout_of,
    load_tile,
    matmul,
    multiply,
    precision,
    store_tile,
    tile_of,
    triton_dtype,
)
from tkernels.overlap import (
    TILE_FIELDS,
    first_turn,
    num_chunks,
    programs_of,
    tile_schedule,
    turn_tile,
)
from tkernels.paths import choose_path, plan_matmul_reduce

OP = operation("matmul_reduce_scatter")

PART_ROWS = 128  # a part of an inbox begins at a multiple, whatever the tiles: those of ranks may differ


# fmt: off
@triton.jit
def add_partials(
    total, partials, partial_row, part_stride, row, valid, column, N, chunk,
    ready, max_chunks, epoch, table, rank, marks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, TMA: tl.constexpr,
    OPERATION: tl.constexpr, TRANSPORT: tl.constexpr, TRACE: tl.constexpr,
):
    """Add the peers' partial sums of one tile, waiting for each peer's chunk; partials: [R, part_stride, N].

    Returns the sum and the marks.
    """
    for step in range(1, SIZE):
        source = (rank + step) % SIZE
        marks = mark(marks, WAIT, chunk, source, table, TRANSPORT, TRACE)
        wait_signal(ready + source * max_chunks + chunk, epoch, table, source, chunk, OPERATION, TRANSPORT)
        marks = mark(marks, ADD, chunk, source, table, TRANSPORT, TRACE)
        at = partial_row + source * part_stride + row
        total += load_tile(partials, N, 1, at, column, at + valid, N, ROWS, COLUMNS, TMA, False).to(tl.float32)
    return total, marks


# Row counts may change from call to call, and ranks differ: no new kernel for each.
@triton.jit(do_not_specialize=[
    "parity_rows", "part_stride", "tiles_m", "peer_tiles_m", "head_turns", "num_sends", "max_chunks", "rank",
    "chunk_rows",
])
def matmul_reduce_kernel(
    x, x_stride_m, x_stride_k,  # [M, K/R]
    w, w_stride_n, w_stride_k,  # [N, K/R]
    bias, y, y_memory,  # [N]; [M/R, N], or [M, N] with GATHER, and the same as a pointer
    outbox, outbox_memory,  # [M, N], and as a pointer
    partials, inbox, parity_rows, part_stride,  # [parity_rows + R * part_stride (and room for y), N], and as a pointer
    schedule, tiles_m, peer_tiles_m, head_turns,  # the first peer_tiles_m rows of tiles are the peers'
    sends, num_sends,  # [num_sends, 4]: target, chunk, first row in the whole, rows
    parts, starts,  # [R + 1], [R + 1]: first row and first element of each part
    counters, ready, max_chunks, state, table, rank, gate, begun,
    N, K, chunk_rows,
    SIZE: tl.constexpr, NUM_COMM: tl.constexpr, COPIES: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    X_TMA: tl.constexpr, X_TRANSPOSED: tl.constexpr, W_TMA: tl.constexpr, W_TRANSPOSED: tl.constexpr,
    Y_TMA: tl.constexpr, O_TMA: tl.constexpr, P_TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, WIRE: tl.constexpr, PRECISION: tl.constexpr,
    OPERATION: tl.constexpr, TRANSPORT: tl.constexpr, PUT_BLOCK: tl.constexpr, ALIGN: tl.constexpr,
    TRACE: tl.constexpr = False,
):
    marks = no_marks()
    pid = tl.program_id(0)
    epoch = begin_epoch(state)
    parity_row = (epoch % 2).to(tl.int32) * parity_rows
    tiles_n = tl.cdiv(N, BLOCK_N)
    first = tl.load(parts + rank)  # the own rows in the whole
    own = tl.load(parts + rank + 1) - first
    own_chunks = tl.maximum(tl.cdiv(own, chunk_rows), 1)

    if COPIES:
        if pid == 0:
            admit_copies(gate, begun, epoch, table, rank, SIZE, OPERATION, TRANSPORT)
    elif pid < NUM_COMM:
        for i in range(pid, num_sends, NUM_COMM):
            send = sends + i * 4
            target = tl.load(send).to(tl.int32)
            chunk = tl.load(send + 1).to(tl.int32)
            row = tl.load(send + 2)
            rows = tl.load(send + 3)
            counter = counters + target * max_chunks + chunk
            marks = mark(marks, COLLECT, chunk, target, table, TRANSPORT, TRACE)
            wait_signal(counter, tl.cdiv(rows, BLOCK_M) * tiles_n, table, rank, chunk, OPERATION, TRANSPORT)
            tl.debug_barrier()
            tl.store(counter, tl.full((), 0, tl.int64))
            at = tl.cast(parity_row + rank * part_stride + chunk * chunk_rows, tl.int64)
            marks = mark(marks, SEND, chunk, target, table, TRANSPORT, TRACE)
            put_signal(
                inbox + at * N, outbox_memory + row * N, rows * N,
                ready + rank * max_chunks + chunk, epoch, target, table, TRANSPORT, PUT_BLOCK, ALIGN,
            )

    turn = first_turn(pid, NUM_COMM, head_turns)
    index = turn_tile(turn, pid, NUM_COMM, head_turns)
    while index < tiles_m * tiles_n:
        # No group of tiles holds both: an own tile waits for the peers, and a program that came to it before all its
        # tiles of the peers' rows could keep them waiting for ever, as theirs could it.
        if index < peer_tiles_m * tiles_n:
            tile_m, tile_n = tile_of(index, peer_tiles_m, tiles_n, GROUP_M)
        else:
            tile_m, tile_n = tile_of(index - peer_tiles_m * tiles_n, tiles_m - peer_tiles_m, tiles_n, GROUP_M)
            tile_m += peer_tiles_m
        tile = schedule + tile_m * TILE_FIELDS
        owner = tl.load(tile).to(tl.int32)
        row = tl.load(tile + 1).to(tl.int32)
        x_row = tl.load(tile + 2).to(tl.int32)
        valid = tl.load(tile + 3).to(tl.int32)
        chunk = tl.load(tile + 4).to(tl.int32)
        column = tile_n * BLOCK_N
        marks = mark(marks, COMPUTE, x_row, column, table, TRANSPORT, TRACE)
        total = multiply(
            x, x_stride_m, x_stride_k, x_row, x_row + valid, w, w_stride_n, w_stride_k, column, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, X_TMA, X_TRANSPOSED, W_TMA, W_TRANSPOSED, PRECISION,
        )
        if owner == rank:
            out_row = row
            if GATHER:
                out_row = x_row
            if SPLIT == 2:
                HALF: tl.constexpr = BLOCK_N // 2
                left, right = halves(total, BLOCK_M, BLOCK_N)
                left, marks = add_partials(
                    left, partials, parity_row, part_stride, row, valid, column, N, chunk,
                    ready, max_chunks, epoch, table, rank, marks,
                    BLOCK_M, HALF, SIZE, P_TMA, OPERATION, TRANSPORT, TRACE,
                )
                marks = mark(marks, STORE, x_row, column, table, TRANSPORT, TRACE)
                left = finish(left, bias, column, N, HALF, HAS_BIAS, ACTIVATION)
                store_tile(left, y, N, out_row, valid, column, N, BLOCK_M, HALF, Y_TMA, DTYPE)
                right, marks = add_partials(
                    right, partials, parity_row, part_stride, row, valid, column + HALF, N, chunk,
                    ready, max_chunks, epoch, table, rank, marks,
                    BLOCK_M, HALF, SIZE, P_TMA, OPERATION, TRANSPORT, TRACE,
                )
                marks = mark(marks, STORE, x_row, column + HALF, table, TRANSPORT, TRACE)
                right = finish(right, bias, column + HALF, N, HALF, HAS_BIAS, ACTIVATION)
                store_tile(right, y, N, out_row, valid, column + HALF, N, BLOCK_M, HALF, Y_TMA, DTYPE)
            else:
                total, marks = add_partials(
                    total, partials, parity_row, part_stride, row, valid, column, N, chunk,
                    ready, max_chunks, epoch, table, rank, marks,
                    BLOCK_M, BLOCK_N, SIZE, P_TMA, OPERATION, TRANSPORT, TRACE,
                )
                marks = mark(marks, STORE, x_row, column, table, TRANSPORT, TRACE)
                total = finish(total, bias, column, N, BLOCK_N, HAS_BIAS, ACTIVATION)
                store_tile(total, y, N, out_row, valid, column, N, BLOCK_M, BLOCK_N, Y_TMA, DTYPE)
        else:
            marks = mark(marks, STORE, x_row, column, table, TRANSPORT, TRACE)
            if SPLIT == 2:
                HALF: tl.constexpr = BLOCK_N // 2
                left, right = halves(total, BLOCK_M, BLOCK_N)
                store_tile(left, outbox, N, x_row, valid, column, N, BLOCK_M, HALF, O_TMA, WIRE)
                store_tile(right, outbox, N, x_row, valid, column + HALF, N, BLOCK_M, HALF, O_TMA, WIRE)
            else:
                store_tile(total, outbox, N, x_row, valid, column, N, BLOCK_M, BLOCK_N, O_TMA, WIRE)
        if GATHER or owner != rank:
            publish(TRANSPORT)
            count(counters + owner * max_chunks + chunk, TRANSPORT, "sys" if COPIES else "gpu")
        turn += 1
        index = turn_tile(turn, pid, NUM_COMM, head_turns)

    if pid == 0:  # a rank without rows of its own still hears from every peer
        for step in range(1, SIZE):
            source = (rank + step) % SIZE
            marks = mark(marks, WAIT, 0, source, table, TRANSPORT, TRACE)
            wait_signal(ready + source * max_chunks, epoch, table, source, 0, OPERATION, TRANSPORT)

    if GATHER:
        gathered = (inbox + tl.cast(parity_row + SIZE * part_stride, tl.int64) * N).to(y_memory.dtype)
        gathered_ready = ready + SIZE * max_chunks
        if COPIES:
            pass  # the copy engine sends them
        elif pid < NUM_COMM:
            for chunk in range(pid, own_chunks, NUM_COMM):
                row = tl.cast(chunk * chunk_rows, tl.int64)
                rows = tl.maximum(tl.minimum(own - row, chunk_rows), 0)
                counter = counters + rank * max_chunks + chunk
                marks = mark(marks, COLLECT, chunk, rank, table, TRANSPORT, TRACE)
                wait_signal(counter, tl.cdiv(rows, BLOCK_M) * tiles_n, table, rank, chunk, OPERATION, TRANSPORT)
                tl.debug_barrier()
                tl.store(counter, tl.full((), 0, tl.int64))
                for step in range(1, SIZE):
                    marks = mark(marks, SEND, chunk, (rank + step) % SIZE, table, TRANSPORT, TRACE)
                    put_signal(
                        gathered + (first + row) * N, y_memory + (first + row) * N, rows * N,
                        gathered_ready + rank * max_chunks + chunk, epoch, (rank + step) % SIZE, table,
                        TRANSPORT, PUT_BLOCK, ALIGN,
                    )
        marks = receive_parts(
            y_memory, gathered, gathered_ready, starts, max_chunks, epoch, table, tl.cast(chunk_rows, tl.int64) * N,
            rank, marks, SIZE, OPERATION, TRANSPORT, PUT_BLOCK, ALIGN, TRACE,
        )
    end_marks(marks, table, TRANSPORT, TRACE)
    end_epoch(state, epoch)
# fmt: on


def matmul_reduce_scatter(
    ctx: Context,
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    rows: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    config: OverlapConfig | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Collective. x_shard_k [M, K/R], w_shard_k [N, K/R], bias [N] -> y_shard_m [M/R, N].

    Bias is added once, after the sum over ranks, and the activation after it. `rows` names how many rows each rank
    owns, where M doesn't divide. out_dtype: of y, wire_dtype: of the partial sums that travel; each is the operands'
    or float32. out: a tensor for y. path: see tkernels.paths; the same on all ranks. Raises ValueError or TypeError
    before the first signal.
    """
    rows = None if rows is None else tuple(rows)
    tensors = x_shard_k, w_shard_k, bias, out
    options = OP.value, activation, rows, out_dtype, wire_dtype, config, path, False, precision(x_shard_k.dtype)
    return ctx.plan(plan, tensors, *options)(*tensors)


def plan(
    ctx: Context, x, w, bias, out,
    op: int, activation, rows, out_dtype, wire_dtype, config, path, gather, precision,
):  # fmt: skip
    """What to do with the tensors of a reduce-scatter like this one, or with `gather` of an all-reduce."""
    name = operation_name(op)
    check_operands(name, x, w, bias, activation, ctx.device)
    (M, K), N = x.shape, w.shape[0]
    rows = split_rows(M, ctx.size) if gather else check_rows(name, ctx, rows, total=M)
    out_dtype = check_dtype(name, "out_dtype", out_dtype, x.dtype)
    wire_dtype = check_dtype(name, "wire_dtype", wire_dtype, x.dtype)
    if ctx.size == 1 or M == 0:
        local = config.gemm if config else None
        return lambda x, w, bias, out: matmul(x, w, bias, activation, out=out, out_dtype=out_dtype, config=local)
    if choose_path(ctx, name, M, N, x.dtype, path, config) == "plain":
        return plan_matmul_reduce(ctx, x, w, bias, out, activation, rows, out_dtype, wire_dtype, gather)
    first_rows = [sum(rows[:rank]) for rank in range(ctx.size + 1)]
    # A tile of a part would begin in the midst of 16 bytes, where no descriptor can.
    straighten = x.stride(0) == 1 != x.stride(1) and any(row * x.element_size() % 16 for row in first_rows)
    x = x.contiguous() if straighten else x
    itemsize = wire_dtype.itemsize
    if config is None:
        config = overlap_config(ctx, name, M, N, K, x.dtype, layout_of(x, w))
        if itemsize > x.element_size() and activation not in (None, "relu") and config.gemm.block_n == 256:
            # Partial sums of fp32 beside an activation's own values: a tile of 128 x 256 spills up to 6 registers.
            config = replace(config, gemm=replace(config.gemm, block_n=128))
    gemm = config.gemm
    tiles_m, tiles_n = sum(triton.cdiv(count, gemm.block_m) for count in rows), triton.cdiv(N, gemm.block_n)
    num_programs = programs_of(config, ctx.num_programs, tiles_m * tiles_n)
    part_stride = triton.cdiv(max(rows), PART_ROWS) * PART_ROWS
    inbox_rows = ctx.size * part_stride
    if gather:  # the finished rows of y, in its own dtype
        inbox_rows += triton.cdiv(M * out_dtype.itemsize, itemsize)
    chunks = max(num_chunks(part, config) for part in rows)
    workspace = ctx.workspace()
    # The counters are indexed with the workspace's own num_chunks, which may be larger than this call's.
    if config.num_comm:
        workspace.reserve(max(inbox_rows, 4) * N * itemsize, chunks)
    else:
        check_mapped(name, ctx)
        workspace.reserve(0, chunks, landing_bytes=inbox_rows * N * itemsize)
    workspace.reserve(0, 0, M * N * itemsize, ctx.size * workspace.num_chunks)
    memory, parity_rows = workspace.landing, 0
    if config.num_comm:
        memory, parity_rows = workspace.inbox, triton.cdiv(workspace.inbox_bytes, N * itemsize)
        parity_rows += parity_rows % 2  # finished rows may be fp32, and two rows of 16-bit elements are whole words
    inbox = memory[: (parity_rows + inbox_rows) * N * itemsize].view(wire_dtype).view(-1, N)
    outbox = workspace.outbox[: M * N * itemsize].view(wire_dtype).view(M, N)
    y = check_result(name, out, x, (M if gather else rows[ctx.rank], N), out_dtype)

    key = ("matmul_reduce", rows, config)
    peers = [(ctx.rank + step) % ctx.size for step in range(1, ctx.size)]
    schedule = ctx.constant(
        (*key, "schedule"), lambda: tile_schedule(rows, peers, config) + tile_schedule(rows, [ctx.rank], config)
    )
    sends = ctx.constant((*key, "sends"), lambda: send_schedule(rows, peers, config))
    parts = ctx.constant(("starts", *first_rows), lambda: first_rows)
    starts = ctx.constant(("starts", *(N * row for row in first_rows)), lambda: [N * row for row in first_rows])

    peer_tiles_m = sum(triton.cdiv(rows[peer], gemm.block_m) for peer in peers)
    # Comm programs wait for the peers' tiles, so these must all fall to the other programs.
    head_turns = triton.cdiv(peer_tiles_m * tiles_n, num_programs - config.num_comm)
    ragged = any(part % gemm.block_m for part in rows)
    x_operand = Operand.of(x, gemm.block_m, gemm.block_k, gemm.use_tma)
    w_operand = Operand.of(w, gemm.block_n, gemm.block_k, gemm.use_tma)
    travels = (itemsize, out_dtype.itemsize) if gather else (itemsize,)
    aligned = N * min(travels) % 16 == 0
    box = gemm.block_m, gemm.block_n // gemm.split
    store_tma = gemm.use_tma and not ragged and N > 1
    y_operand = Operand.of(y, *box, store_tma)
    o_operand = Operand.of(outbox, *box, store_tma)
    p_operand = Operand.of(inbox, *box, gemm.use_tma and N > 1)
    launch = ctx.bind(
        matmul_reduce_kernel, num_programs,
        x_operand.argument, x_operand.row_stride, x_operand.column_stride,
        w_operand.argument, w_operand.row_stride, w_operand.column_stride,
        x if bias is None else bias, y_operand.argument, y,
        o_operand.argument, outbox,
        p_operand.argument, inbox, parity_rows, part_stride,
        schedule, tiles_m, peer_tiles_m, head_turns,
        sends, sends.numel() // 4, parts, starts,
        workspace.counters, workspace.ready, workspace.num_chunks, workspace.state, ctx.table, ctx.rank,
        workspace.gate, workspace.begun,
        N, K, config.chunk_rows,
        SIZE=ctx.size, NUM_COMM=config.num_comm, COPIES=config.num_comm == 0, GATHER=gather,
        BLOCK_M=gemm.block_m, BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k, GROUP_M=gemm.group_m, SPLIT=gemm.split,
        X_TMA=x_operand.tma, X_TRANSPOSED=x_operand.transposed, W_TMA=w_operand.tma,
        W_TRANSPOSED=w_operand.transposed, Y_TMA=y_operand.tma, O_TMA=o_operand.tma, P_TMA=p_operand.tma,
        HAS_BIAS=bias is not None, ACTIVATION=ACTIVATIONS[activation],
        DTYPE=triton_dtype(out_dtype), WIRE=triton_dtype(wire_dtype), PRECISION=precision,
        OPERATION=op, TRANSPORT=ctx.transport_id,
        # As many bytes a step, thus registers, as of the operands' dtype.
        PUT_BLOCK=config.copy_block(aligned) * x.element_size() // max(x.element_size(), *travels),
        ALIGN=16 if aligned else min(travels),
        num_warps=gemm.num_warps, num_stages=gemm.num_stages, maxnreg=config.max_registers,
        varying=("x", "w", "bias", "y", "y_memory"),
    )  # fmt: skip
    shape = tuple(y.shape)
    if not config.num_comm:
        finished_bytes = N * out_dtype.itemsize if gather else 0
        sends = _copied(
            ctx, rows, peers, config, tiles_n, N * itemsize, part_stride, finished_bytes, workspace.num_chunks
        )
        copies = Copies(ctx, workspace, sends)

    def run(x, w, bias, out):
        x = x.contiguous() if straighten else x
        y = x.new_empty(shape, dtype=out_dtype) if out is None else out
        tensors = x, w, x if bias is None else bias.contiguous(), y, y
        if config.num_comm:
            launch(*tensors)
        else:
            copies.beside(functools.partial(launch, *tensors), outbox, y)
        return y

    return run


def send_schedule(rows: tuple[int, ...], peers: list[int], config: OverlapConfig) -> list[int]:
    """The chunks to send, in the order in which `tile_schedule` fills them: (target, chunk, first row, rows) each.

    A peer without rows still gets one empty chunk, which carries the signal that this rank has come so far.
    """
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    schedule = []
    for chunk in range(max(num_chunks(rows[peer], config) for peer in peers)):
        for peer in peers:
            if chunk < num_chunks(rows[peer], config):
                first = chunk * config.chunk_rows
                schedule += [peer, chunk, starts[peer] + first, min(config.chunk_rows, rows[peer] - first)]
    return schedule


def _copied(
    ctx: Context, rows, peers, config: OverlapConfig, tiles_n: int,
    partial_bytes: int, part_stride: int, finished_bytes: int, max_chunks: int,
) -> list[Send]:  # fmt: skip
    """What the copy engine sends: the outbox's chunks, then those of y where finished rows travel.

    partial_bytes, finished_bytes: of a row that travels; 0 if none does.
    """
    block_m, chunk_rows, sends = config.gemm.block_m, config.chunk_rows, []
    schedule = send_schedule(rows, peers, config)
    for at in range(0, len(schedule), 4):
        target, chunk, row, count = schedule[at : at + 4]
        to = (ctx.rank * part_stride + chunk * chunk_rows) * partial_bytes
        word, counter = ctx.rank * max_chunks + chunk, target * max_chunks + chunk
        tiles = triton.cdiv(count, block_m) * tiles_n
        sends.append(Send(target, 0, row * partial_bytes, to, count * partial_bytes, word, counter, tiles))
    own, first_row = rows[ctx.rank], sum(rows[: ctx.rank])
    for chunk in range(num_chunks(own, config) if finished_bytes else 0):
        row = chunk * chunk_rows
        count = min(chunk_rows, own - row)
        first = (first_row + row) * finished_bytes
        to = ctx.size * part_stride * partial_bytes + first
        word, counter = (ctx.size + ctx.rank) * max_chunks + chunk, ctx.rank * max_chunks + chunk
        for step, target in enumerate(peers):
            tiles = 0 if step else triton.cdiv(count, block_m) * tiles_n  # waited for once
            sends.append(Send(target, 1, first, to, count * finished_bytes, word, counter, tiles))
    return sends


def matmul_reduce_scatter_reference(group, x_shard_k, w_shard_k, bias=None, activation=None, rows=None) -> torch.Tensor:
    """The same with torch.distributed, in fp64: products of all ranks summed, then this rank's rows."""
    products = [None] * group.size()
    torch.distributed.all_gather_object(products, (x_shard_k.double() @ w_shard_k.double().t()).cpu(), group=group)
    value = sum(products).to(x_shard_k.device)
    if bias is not None:
        value = value + bias.double()
    value = activation_reference(value, activation)
    return value.split(rows or [value.shape[0] // group.size()] * group.size())[group.rank()]
