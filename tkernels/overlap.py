"""The schedule of the fused operations: which program computes which tile, and which rows are sent together, when.

The host makes the tables, as small integers that the kernels read: a table can be printed and tested.

Sending. The rows of a shard are sent in chunks, with one signal per chunk, in one of three ways:
- Comm programs send first, while the other programs of the launch ("compute programs") compute tiles. Once everything
  is sent they compute tiles too, except in an all-reduce, where they go on to send the finished rows.
- The copy engine sends many chunks at a time (tkernels.comm.copies); num_comm is 0.
- Interleaved: every program sends its own finished tiles; num_comm is 0.

Static and dynamic assignment. Tiles are dealt out (assigned statically) in waves. Tiles of a wave lie beside each other
and share their operands in L2, and the first loads of a tile overlap with the store of the previous one. How long comm
programs send can't be predicted to within a tile. Where there are any, the last waves are therefore not dealt out: a
program that is free claims the next tile by a ticket, off an atomic counter.

Split-K. Where the last wave would keep few programs busy, its tiles are split along K, so that all programs help (not
where interleaved).

Why no program waits forever: a tile waits only for lower-numbered parts of the same tile, or for data that peers send.
Sends wait only for lower-numbered tiles, which running programs have already taken. An interleaved program sends a tile
before it next waits for a peer's tiles. Data that the copy engine sends waits for the last program of each rank. That
program is running, like all others: a launch begins only where all its programs fit on the GPU at once.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tkernels.comm.context import Context
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.gemm import Matrix, Operand, finish, halves, load_tile, multiply_step, scaled, store_tile, up_to
from tkernels.partials import load_partials, store_partials
from tkernels.waves import MAX_SPLIT_TILES

# A row of tiles in a schedule: shard (its rank), first row in the shard, first row in the whole matrix, number of valid
# rows, chunk, and how many rows of tiles, this one included, are sent together.
TILE_FIELDS = tl.constexpr(6)

# The counters of a launch, zero between launches.
TILE_TICKETS = tl.constexpr(0)  # tiles and parts claimed so far, of those that are not dealt out
SEND_TICKETS = tl.constexpr(1)  # finished chunks of an all-reduce claimed for sending so far
SPLIT_TILES = tl.constexpr(2)  # from here on: finished parts of each tile that is split along K
# From here on: finished tiles among the rows that are sent together.
TILE_COUNTS = tl.constexpr(SPLIT_TILES.value + MAX_SPLIT_TILES.value)


def tile_schedule(rows: tuple[int, ...], order: list[int], config: OverlapConfig) -> list[int]:
    """The schedule: the rows of tiles, flattened, with TILE_FIELDS numbers each.

    The shards in `order` take turns, each with the rows that are sent together. A tile is listed under the first chunk
    of its rows; where chunks are smaller than the tile, it needs the following ones too.

    >>> from tkernels.configs import GemmConfig
    >>> config = OverlapConfig(GemmConfig(block_m=32), chunk_rows=64)
    >>> tile_schedule((64, 40), [1], config)
    [1, 0, 64, 32, 0, 2, 1, 32, 96, 8, 0, 2]
    """
    block, span = config.gemm.block_m, max(config.sent_rows, config.gemm.block_m)
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    schedule = []
    for first in range(0, max((rows[shard] for shard in order), default=0), span):
        for shard in order:
            together = range(first, min(first + span, rows[shard]), block)
            for row in together:
                valid = min(block, rows[shard] - row)
                schedule += [shard, row, starts[shard] + row, valid, row // config.chunk_rows, len(together)]
    return schedule


def are_even(rows: tuple[int, ...], config: OverlapConfig) -> bool:
    """Whether all shards have the same number of rows, a multiple of block_m."""
    return len(set(rows)) == 1 and rows[0] % config.gemm.block_m == 0


def num_chunks(rows: int, config: OverlapConfig) -> int:
    """Chunks of a shard; an empty shard has one too, so that its rank still signals."""
    return max(triton.cdiv(rows, config.chunk_rows), 1)


def programs_of(config: OverlapConfig, available: int, tiles: int) -> int:
    """Number of programs of a launch that computes `tiles` tiles: comm and compute programs, at most `available`.

    Raises ValueError if that leaves no compute program.
    """
    available = min(available, config.max_programs or available)
    if config.num_comm >= available:
        raise ValueError(
            f"num_comm={config.num_comm} leaves no program that computes, of num_programs={available}; pass "
            f"init(num_programs=...) of 2 or more, or another OverlapConfig(num_comm=...)"
        )
    return min(available, config.num_comm + tiles)


def check_mapped(operation: str, ctx: Context, config: OverlapConfig):
    """Raises ValueError on each rank whose configuration needs all ranks' memory mapped, if it isn't."""
    if (config.landing or config.interleaved) and not ctx.mapped:
        raise ValueError(
            f"{operation}: num_comm=0 (the copy engine), landing=True and interleaved=True need every rank's memory "
            f"mapped on every rank, which it is not between machines; pass a config with num_comm of 1 or more, "
            f"landing=False and interleaved=False"
        )


def sums_of(tiles: int, splits: int, gemm: GemmConfig, device: torch.device):
    """For the partial sums of split tiles: a kernel's argument, on the meta device, and a function that allocates them.

    fp32 [.., block_n], block_m rows for each part but the last; if there are none, the same tensor each time. A TMA box
    is a quarter of a slice of columns; where its rows are below TMA's minimum of 16 bytes, pointers are used.
    """
    shape, columns = (tiles * (splits - 1) * gemm.block_m, gemm.block_n), gemm.block_n // gemm.split // 4
    make = functools.partial(torch.empty, shape, dtype=torch.float32)
    tma = splits > 1 and gemm.use_tma and columns * 4 >= 16
    sums = Operand.of(make(device="meta"), gemm.block_m, columns, tma).argument
    nothing = None if shape[0] else make(device=device)
    return sums, lambda: make(device=device) if nothing is None else nothing


class Sending(NamedTuple):
    """The constants of how rows are sent, one argument of a fused kernel.

    INTERLEAVED: by every program, tile by tile.  GATHER: finished rows too, to all peers.
    BLOCK: elements that a program copies at a step, of chunks.  ROWS: rows that it copies at a step, of tiles.
    ALIGN: in bytes, of what is sent.
    """

    INTERLEAVED: object
    GATHER: object
    BLOCK: object
    ROWS: object
    ALIGN: object

    @classmethod
    def of(cls, config: OverlapConfig, block: int, align: int, gather: bool = False) -> "Sending":
        rows = min(max(block // config.gemm.block_n, 1), config.gemm.block_m)
        return cls(*map(tl.constexpr, (config.interleaved, gather, block, rows, align)))


class Part(NamedTuple):
    """One of the parts along K that a tile is computed in; most tiles have one.

    number, count: which it is, and how many there are.  first, last: its first step along K, and the end of its steps.
    """

    number: object
    count: object
    first: object
    last: object


class Result(NamedTuple):
    """What becomes of finished tiles. All but y and bias are a reduction's, and None in other operations.

    y, bias: a finished tile goes to the one, after the other has been added.
    outbox: partial sums of the peers' rows go there.  partials: where the peers' partial sums of own rows arrive.
    y_memory, outbox_memory, partials_memory: pointers to the three.
    """

    y: object
    bias: object
    outbox: object
    partials: object
    y_memory: object
    outbox_memory: object
    partials_memory: object


class Work(NamedTuple):
    """The products of a launch, and which of them this program computes.

    x, row_stride, column_stride: [M, K]. None: tiles differ in x, and their `at` has it.  w: [N, K].
    sums: where parts of tiles leave theirs.  counters: of the launch.  num_comm: programs that send first.
    item, items: of tiles and parts, this program's first, and the number.
    waves: how they are dealt out; to this program in the first `dealt`.
    """

    x: object
    row_stride: object
    column_stride: object
    w: object
    sums: object
    counters: object
    num_comm: object
    item: object
    items: object
    waves: object
    dealt: object


class At(NamedTuple):
    """Where a tile is. row, valid: its first row of x, and how many they are.  column: its first, of y, and row of w.

    tile_m: its row of tiles in the schedule.
    """

    column: object
    tile_m: object
    row: object
    valid: object


class Place(NamedTuple):
    """Where a finished tile goes.

    row, valid, column: its first row there, the number of its rows, its first column.
    own: whether its rows are this rank's own. Then the first rank's partial sums of them are at `partial_row` of
    `partials`, and each next rank's are `part_stride` rows on.
    scales, scale_row: gemm.Scales, and the place among those of x of its first row's.
    """

    row: object
    valid: object
    column: object
    own: object
    partial_row: object
    part_stride: object
    scales: object
    scale_row: object


# fmt: off
@triton.jit
def dealt_tile(wave, pid, num_comm, waves):
    """The tile that is dealt to program `pid` in `wave`.

    The first waves are of the compute programs alone, the later ones of all programs. So the first `num_comm` programs,
    the comm programs, must begin with wave `waves.head`.
    """
    workers = tl.num_programs(0) - num_comm
    index = wave * workers + pid - num_comm
    if wave >= waves.head:
        index = waves.head * workers + (wave - waves.head) * tl.num_programs(0) + pid
    return index


@triton.jit
def waves_of(pid, num_comm, waves):
    """The first wave in which program `pid` is dealt no tile: the last wave may have fewer tiles than programs."""
    return tl.where(dealt_tile(waves.dealt - 1, pid, num_comm, waves) < waves.whole, waves.dealt, waves.dealt - 1)


@triton.jit
def take_tile(wave, own_dealt, pid, num_comm, waves, counters):
    """A program's tile in `wave`: before `own_dealt` the one dealt to it, then the next one, claimed by a ticket."""
    index = dealt_tile(wave, pid, num_comm, waves)
    if wave >= own_dealt:
        workers = tl.num_programs(0) - num_comm
        dealt_tiles = tl.minimum(
            waves.head * workers + (waves.dealt - waves.head) * tl.num_programs(0), waves.whole
        )
        index = dealt_tiles + take(counters + TILE_TICKETS)
    return index


@triton.jit
def take(tickets):
    """Claim a ticket off an atomic counter: each number, from 0 on, goes to one program."""
    return tl.atomic_add(tickets, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def part_of_tile(index, waves, steps, PARTS: tl.constexpr):
    """Item `index` -> (tile, Part). Items are the `waves.whole` first tiles, then the parts of the others.

    steps: along K.
    PARTS: False where no tile is split. A kernel without parts takes 10 to 27 fewer registers (bf16, 128 x 256) and 32
    KB less shared memory, 17 KB less in reductions.
    """
    number = tl.full((), 0, tl.int32)
    count = tl.full((), 1, tl.int32)
    first = 0
    last = steps
    if PARTS:
        if index >= waves.whole:
            count = waves.splits
            number = (index - waves.whole) % waves.splits
            index = waves.whole + (index - waves.whole) // waves.splits
        first = steps * number // count
        last = steps * (number + 1) // count
    return index, Part(number, count, first, last)


@triton.jit
def walk(nowhere, state, env, net, L, T, S, BEGIN: tl.constexpr, BETWEEN: tl.constexpr, END: tl.constexpr):
    """Compute this program's part of `env.work`, tile by tile. Returns the state of the hooks at the end.

    nowhere: what BEGIN returns, of zeros.
    BEGIN(index, state, env, net, L, T) -> (at, state): where the tile is that begins, once its rows are there.
    BETWEEN(step, at, state, env, net, L, T, S) -> state: after a step along K; None: nothing.
    END(total, index, part, at, state, env, net, L, T, S) -> state: a tile, or a part of one, is to be stored.
    """
    work = env.work
    pid = tl.program_id(0)
    steps = tl.cdiv(work.w.columns, T.BLOCK_K)
    wave = tl.where(pid < work.num_comm, work.waves.head, 0)
    item = work.item
    while item < work.items:
        index, part = part_of_tile(item, work.waves, steps, T.PARTS)
        # All tiles dealt to a program run in one loop, so that a tile's first loads are in flight while the previous
        # tile is stored. Not with TRACE: the marks of two tiles would get mixed up.
        num_tiles = tl.maximum(work.dealt - wave, 1)
        if L.TRACE:
            num_tiles = 1
        step = part.first
        at = nowhere
        total = tl.zeros((T.BLOCK_M, T.BLOCK_N), tl.float32)
        for _ in range(num_tiles * (part.last - part.first)):
            if step == part.first:
                if wave < work.dealt:
                    index = dealt_tile(wave, pid, work.num_comm, work.waves)
                wave += 1
                at, state = BEGIN(index, state, env, net, L, T)
            x = at.x if work.x is None else work.x
            x = Matrix(x, work.row_stride, work.column_stride, at.row + at.valid, work.w.columns)
            # One main loop for all x: two would each take the shared memory of a pipeline.
            total = multiply_step(total, x, work.w, at.row, at.column, step, T)
            if BETWEEN is not None:
                state = BETWEEN(step, at, state, env, net, L, T, S)
            ends, next_total, step = end_of_tile(total, step + 1, part)
            if ends:
                state = END(total, index, part, at, state, env, net, L, T, S)
            total = next_total
        item = take_tile(wave, work.dealt, pid, work.num_comm, work.waves, work.counters)
    return state


@triton.jit
def end_of_tile(total, step, part):
    """After a step: (whether the tile ends with it, the accumulator and the step to go on with).

    Call it before the branch that finishes the tile: Triton moves the selection of the accumulator into that branch. It
    does not move a selection after the branch, and then each dot is waited for.
    """
    ends = step == part.last
    if ends:
        total = tl.zeros(total.shape, tl.float32)
        step = part.first
    return ends, total, step


@triton.jit
def finish_tile(slices, place, part, sums, sums_row, result, net, L, T):
    """Store a tile, in slices of its columns.

    Of a part, the sums, for the tile's last part; of a peer's rows, scaled, to the outbox; else, finished, to y.
    sums, sums_row: fp32 [.., BLOCK_N], where parts leave their sums; those of the tile's first part are at that row.
    """
    COLUMNS: tl.constexpr = T.BLOCK_N // T.SPLIT
    for number in tl.static_range(T.SPLIT):
        value = slices[number]
        column = place.column + number * COLUMNS
        if part.number < part.count - 1:
            store_part(value, sums, sums_row + part.number * T.BLOCK_M, number * COLUMNS, T.BLOCK_M, COLUMNS)
        elif result.outbox_memory is not None and not place.own:
            value = scale_slice(value, place, column, result, COLUMNS, T)
            store_partials(value, result, place.row, place.valid, column, T.BLOCK_M, COLUMNS)
        else:
            value = add_parts(value, sums, sums_row, number * COLUMNS, part.count, T.BLOCK_M, COLUMNS)
            value = scale_slice(value, place, column, result, COLUMNS, T)
            if result.outbox_memory is not None:
                for step in range(1, L.RANKS):
                    row = place.partial_row + (net.rank + step) % L.RANKS * place.part_stride
                    value += load_partials(result, row, place.valid, column, T.BLOCK_M, COLUMNS)
            value = finish(value, result.bias, column, result.y.columns, COLUMNS, T.HAS_BIAS, T.ACTIVATION)
            store_tile(value, result.y, place.row, place.valid, column, T.BLOCK_M, COLUMNS)


@triton.jit
def scale_slice(value, place, column, result, COLUMNS: tl.constexpr, T):
    """A slice of a tile, `scaled`."""
    return scaled(
        value, place.scales, place.scale_row, place.valid, column, result.y.columns, T.BLOCK_M, COLUMNS, T
    )


@triton.jit
def store_part(value, sums, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a slice of a part's partial sums for the tile's last part; in quarters, which take less shared memory."""
    QUARTER: tl.constexpr = COLUMNS // 4
    quarters = quarters_of(value, ROWS, COLUMNS)
    for number in tl.static_range(4):
        store_tile(quarters[number], sums, row, ROWS, column + number * QUARTER, ROWS, QUARTER)


@triton.jit
def add_parts(value, sums, row, column, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the partial sums of the tile's other parts to a slice, in order of parts; those of the first are at `row`."""
    QUARTER: tl.constexpr = COLUMNS // 4
    for part in range(parts - 1):
        part_row = row + part * ROWS
        theirs = up_to(sums, part_row + ROWS)
        quarters = ()
        for quarter in tl.static_range(4):
            quarters += (load_tile(theirs, part_row, column + quarter * QUARTER, ROWS, QUARTER),)
        left = join_halves(quarters[0], quarters[1], ROWS, COLUMNS // 2)
        right = join_halves(quarters[2], quarters[3], ROWS, COLUMNS // 2)
        value += join_halves(left, right, ROWS, COLUMNS)
    return value


@triton.jit
def quarters_of(value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    left, right = halves(value, ROWS, COLUMNS)
    first, second = halves(left, ROWS, COLUMNS // 2)
    third, fourth = halves(right, ROWS, COLUMNS // 2)
    return first, second, third, fourth


@triton.jit
def join_halves(left, right, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (ROWS, COLUMNS))
# fmt: on
