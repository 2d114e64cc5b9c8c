"""What the fused operations share: which program computes which tile, which rows travel together, and when.

All of it is decided on the host, as small integer tables that the kernels read: a table can be printed and tested.

A shard's rows travel in chunks, one signal a chunk. Some programs of a launch send first ("comm programs") while the
others multiply; once they have nothing left to send, they multiply too. With num_comm=0 no program sends, and the copy
engine does (tkernels.comm.copies).
"""

import triton
import triton.language as tl

from tkernels.configs import OverlapConfig

# A tile row of a schedule: whose shard, first row in the shard, first row in the whole, rows that count, chunk.
TILE_FIELDS = tl.constexpr(5)


def tile_schedule(rows: tuple[int, ...], order: list[int], config: OverlapConfig) -> list[int]:
    """The rows of tiles, flattened TILE_FIELDS a tile: of the shards in `order`, taking a chunk from each in turn.

    >>> from tkernels.configs import GemmConfig
    >>> config = OverlapConfig(GemmConfig(block_m=32), chunk_rows=64)
    >>> tile_schedule((64, 40), [1], config)
    [1, 0, 64, 32, 0, 1, 32, 96, 8, 0]
    """
    block, chunk_rows = config.gemm.block_m, config.chunk_rows
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    schedule = []
    for first in range(0, max((rows[shard] for shard in order), default=0), chunk_rows):
        for shard in order:
            for row in range(first, min(first + chunk_rows, rows[shard]), block):
                valid = min(block, rows[shard] - row)
                schedule += [shard, row, starts[shard] + row, valid, first // chunk_rows]
    return schedule


def num_chunks(rows: int, config: OverlapConfig) -> int:
    """Chunks of a shard; an empty one still has one, so that its rank is heard from."""
    return max(triton.cdiv(rows, config.chunk_rows), 1)


def programs_of(config: OverlapConfig, available: int, tiles: int) -> int:
    """Programs of a launch that computes `tiles` tiles, of `available` ones; some send, if any, and some multiply.

    Raises ValueError if there are too few for both.
    """
    available = min(available, config.max_programs or available)
    if not 0 <= config.num_comm < available:
        raise ValueError(
            f"of num_programs={available} programs, num_comm={config.num_comm} would send: at least one must not; pass "
            f"init(num_programs=...) of 2 or more, or another OverlapConfig(num_comm=...)"
        )
    return min(available, config.num_comm + tiles)


@triton.jit
def turn_tile(turn, pid, NUM_COMM: tl.constexpr, head_turns):
    """The tile that program `pid` computes at its turn: in the first `head_turns` the comm programs sit out."""
    workers = tl.num_programs(0) - NUM_COMM
    head = turn * workers + pid - NUM_COMM
    tail = head_turns * workers + (turn - head_turns) * tl.num_programs(0) + pid
    return tl.where(turn < head_turns, head, tail)


@triton.jit
def first_turn(pid, NUM_COMM: tl.constexpr, head_turns):
    """The first turn at which a program computes a tile."""
    return tl.where(pid < NUM_COMM, head_turns, 0)
