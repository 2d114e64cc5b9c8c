"""What the fused operations share: which program computes which tile, which rows travel together, and when.

The tables are made on the host, as small integers that the kernels read: a table can be printed and tested.

A shard's rows travel in chunks, one signal a chunk. Some programs of a launch send first ("comm programs") while the
others multiply; once all is sent they multiply too, but for those of an all-reduce, which go on with the sums. With
num_comm=0 the copy engine sends, many chunks at a time (tkernels.comm.copies), or, interleaved, every program sends its
own tiles.

Tiles are dealt out in waves, so that those that are computed at one time lie beside each other and share their operands
in L2, and a tile's first loads go on while the one before is stored. How long programs send can't be foretold to the
tile, so where some do, the last waves are not dealt out: whoever is free takes the next tile. Where the last wave would
keep few programs busy, its tiles are split along K, so that all of them help (not where interleaved).

Nobody waits for ever: a tile waits for what programs of smaller numbers do, or for what peers send, and these wait for
tiles of smaller numbers alone, which running programs have taken. An interleaved program sends a tile before it next
waits for a peer's tiles. What lands by copies waits for the last program of each rank, which runs as all do: a launch
begins only where there is room for all of them at once.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tkernels.comm.context import Context
from tkernels.comm.device import arrived, wait_chunk
from tkernels.configs import (
    BYTES_PER_S_OF_A_PROGRAM,
    FLOPS_PER_S,
    MAX_LOOK,
    MAX_TILE_CHUNKS,
    REDUCED_BYTES_PER_S_OF_A_PROGRAM,
    SEND_BYTES_PER_S,
    GemmConfig,
    OverlapConfig,
)
from tkernels.gemm import Operand, halves, load_tile, store_tile

# A row of tiles: whose shard, first row in the shard, first row in the whole, rows that count, chunk, and how many rows
# of tiles are sent together with this one.
TILE_FIELDS = tl.constexpr(6)

# A launch's counters, zero between launches.
TILE_TICKETS = tl.constexpr(0)  # tiles that were taken, of those that are not dealt out
SEND_TICKETS = tl.constexpr(1)  # finished chunks that were taken to be sent, of an all-reduce
SPLIT_TILES = tl.constexpr(2)  # from here on: parts that are done, of each tile that is split along K
MAX_SPLIT_TILES = tl.constexpr(128)
# From here on: tiles that are done, of what is sent at a time.
TILE_COUNTS = tl.constexpr(SPLIT_TILES.value + MAX_SPLIT_TILES.value)

DEALT_SHORT = 1  # last waves that are not dealt out
PART_S = 5e-6  # more than that for a part of a tile, whose sums are written
ADD_S = 9e-6  # and for the last part, which reads them, for each other one
TILE_END_S = 3e-6  # a tile's time without its steps along K
MIN_SPLIT_STEPS = 8  # steps along K of a part, at least


def tile_schedule(rows: tuple[int, ...], order: list[int], config: OverlapConfig) -> list[int]:
    """The rows of tiles, flattened TILE_FIELDS a tile: of the shards in `order`, by turns what is sent together.

    A tile belongs to the first chunk of its rows, and needs the others too where chunks are smaller than it.

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
    """Whether all shards have equally many rows, which are whole tiles."""
    return len(set(rows)) == 1 and rows[0] % config.gemm.block_m == 0


def num_chunks(rows: int, config: OverlapConfig) -> int:
    """Chunks of a shard; an empty one still has one, so that its rank is heard from."""
    return max(triton.cdiv(rows, config.chunk_rows), 1)


def programs_of(config: OverlapConfig, available: int, tiles: int) -> int:
    """Programs of a launch that computes `tiles` tiles, of `available` ones; some send, if any, and some multiply.

    Raises ValueError if there are too few for both.
    """
    available = min(available, config.max_programs or available)
    if config.num_comm >= available:
        raise ValueError(
            f"of num_programs={available} programs, num_comm={config.num_comm} would send: at least one must not; pass "
            f"init(num_programs=...) of 2 or more, or another OverlapConfig(num_comm=...)"
        )
    return min(available, config.num_comm + tiles)


def check_mapped(operation: str, ctx: Context, config: OverlapConfig):
    """Raises ValueError on every rank whose configuration needs what reaches no other machine."""
    if (config.landing or config.interleaved) and not ctx.mapped:
        raise ValueError(
            f"{operation}: copies (num_comm=0), landing=True and interleaved=True need all ranks' memory mapped into "
            f"each other's addresses, and that of other machines is not; pass a config with num_comm of 1 or more, "
            f"landing=False and interleaved=False"
        )


class Waves(NamedTuple):
    """Who computes which tile: `take_tile` deals out, by waves, and `part_of_tile` splits.

    head: waves of those that only multiply.  dealt: waves up to which tiles are dealt out, comm programs included; of
        the last one, only whole tiles.  whole: tiles that are computed whole.  splits: parts of each later one.
    """

    head: int
    dealt: int
    whole: int
    splits: int


@functools.lru_cache(maxsize=1024)
def plan_waves(
    tiles: int, splittable: int, K: int, num_programs: int, config: OverlapConfig, sent_bytes: int, tiles_first: int = 0
) -> Waves:
    """The waves of a launch, by a model of when its programs are done.

    splittable: how many of the last tiles may be split.  sent_bytes: by this rank's comm programs, which end no earlier
    than the first `tiles_first` tiles, and never join the others if these are all.
    """
    gemm, workers = config.gemm, num_programs - config.num_comm
    most = min(splittable, MAX_SPLIT_TILES.value)
    tile_s = 2 * gemm.block_m * gemm.block_n * K * num_programs / FLOPS_PER_S + TILE_END_S
    rate = min(config.num_comm * BYTES_PER_S_OF_A_PROGRAM, SEND_BYTES_PER_S)
    if tiles_first:
        rate = config.num_comm * REDUCED_BYTES_PER_S_OF_A_PROGRAM
    sending_s = sent_bytes / rate if rate else 0
    sending = min(max(sending_s / tile_s, tiles_first / workers), tiles / workers)

    def deal(last: int, splits: int, head: int = math.ceil(sending)) -> Waves:
        whole = tiles - last
        if not config.num_comm:
            return Waves(0, triton.cdiv(whole, num_programs), whole, splits)
        head = min(head, max(whole // workers - DEALT_SHORT, 0))
        rest = max((whole - head * workers) // num_programs - DEALT_SHORT, 0)
        # A comm program must not be dealt a tile that one of them waits for: it would come to it too late, or never.
        rest = rest if head * workers >= tiles_first else 0
        return Waves(head, head + rest, whole, splits)

    def end(plan: Waves) -> float:
        """In the time of a tile; the later one of two, for how long the comm programs send is a guess."""
        waves_dealt = plan.head * workers + (plan.dealt - plan.head) * num_programs
        dealt = min(waves_dealt, plan.whole)
        part = (1 - TILE_END_S / tile_s) / plan.splits + (TILE_END_S + PART_S) / tile_s
        last_part = part + ADD_S * (plan.splits - 1) / tile_s
        items = [1.0] * (plan.whole - dealt) + ([part] * (plan.splits - 1) + [last_part]) * (tiles - plan.whole)
        ends = []
        for guess in (0.9 * sending, 1.1 * sending):
            free = [float(plan.dealt - (program < waves_dealt - dealt)) for program in range(workers)]
            free += [guess + plan.dealt - plan.head] * config.num_comm
            heapq.heapify(free)
            for item in items:
                heapq.heapreplace(free, free[0] + item)
            ends.append(max(free))
        return max(ends)

    plans = [deal(0, 1)]
    if config.num_comm and not tiles_first:
        plans.insert(0, deal(0, 1, int(sending)))  # of equals better than more tiles that aren't dealt out
    if config.split_tiles is not None:
        last, splits = min(config.split_tiles, most), min(config.max_splits, triton.cdiv(K, gemm.block_k))
        if last and splits > 1:  # a part without steps would say nothing
            return deal(last, splits)
    else:
        left = round(tiles + config.num_comm * sending) % num_programs
        lasts = {left + num_programs // 12, left + num_programs // 6, num_programs // 4, num_programs // 2}
        splits = range(2, min(config.max_splits, K // (gemm.block_k * MIN_SPLIT_STEPS)) + 1)
        choices = itertools.product((last for last in sorted(lasts) if 0 < last <= most), splits)
        plans += itertools.starmap(deal, choices)
    return min(plans, key=end) if len(plans) > 1 else plans[0]


def stages_of(gemm: GemmConfig, splits: int) -> int:
    """The pipeline's stages: with tiles of 128 x 256 there is no shared memory for a fourth one and sums of parts."""
    return min(gemm.num_stages, 3) if splits > 1 and gemm.block_m * gemm.block_n >= 128 * 256 else gemm.num_stages


def sums_of(tiles: int, splits: int, gemm: GemmConfig) -> Operand:
    """An example, without memory, of the sums of tiles that are split: fp32 [.., block_n], block_m rows a part.

    A box is a quarter of a slice, and of no fewer than the 16 bytes a row that TMA asks for.
    """
    shape = tiles * (splits - 1) * gemm.block_m, gemm.block_n
    sums = torch.empty(shape, dtype=torch.float32, device="meta")
    columns = gemm.block_n // gemm.split // 4
    return Operand.of(sums, gemm.block_m, columns, splits > 1 and gemm.use_tma and columns * 4 >= 16)


def sums_maker(sums: Operand, device: torch.device) -> Callable[[], torch.Tensor]:
    """What gives each call the memory that `sums` is an example of; without any, the same tensor each time."""
    make = functools.partial(torch.empty, sums.argument.shape, dtype=torch.float32, device=device)
    if sums.argument.shape[0]:
        return make
    nothing = make()
    return lambda: nothing


# fmt: off
@triton.jit
def dealt_tile(wave, pid, num_comm, head):
    """The tile that is dealt to program `pid` for its wave, which for the first `num_comm` programs begins with `head`.

    In waves of all programs, in the first `head` waves of the others.
    """
    workers = tl.num_programs(0) - num_comm
    index = wave * workers + pid - num_comm
    if wave >= head:
        index = head * workers + (wave - head) * tl.num_programs(0) + pid
    return index


@triton.jit
def waves_of(pid, num_comm, head, dealt, whole):
    """Up to which wave tiles are dealt to program `pid`: the last wave may be one of fewer tiles than programs."""
    return tl.where(dealt_tile(dealt - 1, pid, num_comm, head) < whole, dealt, dealt - 1)


@triton.jit
def take_tile(wave, own_dealt, pid, num_comm, head, dealt, whole, counters):
    """A program's tile for its wave: the one that is dealt to it, from wave `own_dealt` on the next undealt one."""
    index = dealt_tile(wave, pid, num_comm, head)
    if wave >= own_dealt:
        workers = tl.num_programs(0) - num_comm
        dealt_tiles = tl.minimum(head * workers + (dealt - head) * tl.num_programs(0), whole)
        index = dealt_tiles + take(counters + TILE_TICKETS)
    return index


@triton.jit
def take(tickets):
    """How many were taken before: each number goes to one program."""
    return tl.atomic_add(tickets, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu").to(tl.int32)


@triton.jit
def part_of_tile(index, whole, splits, K, PARTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The tile of a number, which of its parts that is, how many it has, and the part's steps along K.

    PARTS: False where no tile is split. A kernel without parts takes 10 to 27 registers less (bf16, 128 x 256), and of
    shared memory 32 KB less, in reductions 17.
    """
    part = tl.full((), 0, tl.int32)
    parts = tl.full((), 1, tl.int32)
    steps = tl.cdiv(K, BLOCK_K)
    first = 0
    last = steps
    if PARTS:
        if index >= whole:
            parts = splits
            part = (index - whole) % splits
            index = whole + (index - whole) // splits
        first = steps * part // parts
        last = steps * (part + 1) // parts
    return index, part, parts, first, last


@triton.jit
def end_of_tile(total, step, first_step, last_step):
    """After a step: whether the tile ends with it, and the sums and the step to go on with.

    Decide it before the branch that finishes the tile: Triton moves the choice of sums into that branch, but not one
    that comes after it, and each dot would be waited for.
    """
    ends = step == last_step
    if ends:
        total = tl.zeros(total.shape, tl.float32)
        step = first_step
    return ends, total, step


@triton.jit
def store_part(
    value, sums, row, column,  # pointer or descriptor of [.., BLOCK_N], fp32
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Put a slice of a part's sums where the tile's last part finds it; by quarters, which take less shared memory."""
    QUARTER: tl.constexpr = COLUMNS // 4
    quarters = quarters_of(value, ROWS, COLUMNS)
    for at in tl.static_range(4):
        store_tile(
            quarters[at], sums, BLOCK_N, row, ROWS, column + at * QUARTER, BLOCK_N, ROWS, QUARTER, TMA, tl.float32
        )


@triton.jit
def add_parts(
    value, sums, row, column, parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The slice with those of the tile's other parts added, in their order; the first one's sums are at `row`."""
    QUARTER: tl.constexpr = COLUMNS // 4
    for part in range(parts - 1):
        at = row + part * ROWS
        quarters = ()
        for quarter in tl.static_range(4):
            start = column + quarter * QUARTER
            quarters += (load_tile(sums, BLOCK_N, 1, at, start, at + ROWS, BLOCK_N, ROWS, QUARTER, TMA, False),)
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


@triton.jit
def wait_chunks(
    ready, landed, max_chunks, source, chunk, count, epoch, table,
    SOURCES: tl.constexpr, SIZE: tl.constexpr, COPIES: tl.constexpr, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr,
):  # fmt: skip
    """Wait for `count` (at most MAX_TILE_CHUNKS) chunks from `chunk` on, of each of SOURCES ranks from `source` on.

    ready, landed, COPIES: as `wait_chunk`; ranks mostly send in the same way.
    """
    way = tl.arange(0, triton.next_power_of_2(SOURCES * MAX_TILE_CHUNKS))
    whose = (source + way % SOURCES) % SIZE
    if COPIES:
        here = arrived(landed + whose, chunk + count, TRANSPORT)
    else:
        words = whose * max_chunks + chunk + tl.minimum(way // SOURCES, count - 1)
        here = arrived(ready + words, epoch, TRANSPORT)
    if not here:
        for step in range(SOURCES):
            peer = (source + step) % SIZE
            for at in range(chunk, chunk + count):
                wait_chunk(ready, landed, max_chunks, peer, at, epoch, table, COPIES, OPERATION, TRANSPORT)


@triton.jit
def words_of_peers(max_chunks, chunks, first, rank, SIZE: tl.constexpr):
    """Which signal words are those of all peers' chunks, at most MAX_LOOK, beginning with chunk `first`."""
    way = (first + tl.arange(0, MAX_LOOK)) % (chunks * (SIZE - 1))
    return (rank + 1 + way // chunks) % SIZE * max_chunks + way % chunks


@triton.jit
def all_arrived(
    ready, landed, max_chunks, chunks, first, rank, epoch,
    SIZE: tl.constexpr, COPIES: tl.constexpr, TRANSPORT: tl.constexpr,
):  # fmt: skip
    """One look at whether `chunks` chunks of each peer are here, so that no tile need wait any more. May say no.

    first: a chunk to begin with. What changes from tile to tile is not kept in registers in between.
    """
    there = tl.full((), False, tl.int1)
    if COPIES:
        peers = (rank + 1 + tl.arange(0, triton.next_power_of_2(SIZE)) % (SIZE - 1)) % SIZE
        there = arrived(landed + peers, chunks, TRANSPORT)
    elif chunks * (SIZE - 1) <= MAX_LOOK:
        there = arrived(ready + words_of_peers(max_chunks, chunks, first, rank, SIZE), epoch, TRANSPORT)
    return there
# fmt: on
