"""Which program computes which tile: the waves of a launch, chosen by a model of when its programs finish."""

import functools
import heapq
import itertools
import math
from typing import NamedTuple

import torch
import triton.language as tl

from tkernels.configs import OverlapConfig
from tkernels.gpus import GPU, TILE_END_S

DEALT_SHORT = 1  # full waves left to dynamic assignment, where there are comm programs
MIN_SPLIT_STEPS = 8  # least steps along K of a part
MAX_SPLIT_TILES = tl.constexpr(128)
PART_S = 5e-6  # added to TILE_END_S for a part of a tile, which writes its partial sums
ADD_S = 9e-6  # added for the last part, which reads them, per other part


class Waves(NamedTuple):
    """The assignment of tiles to programs, in numbers for `take_tile` (waves) and `part_of_tile` (split-K).

    head: first waves, of the compute programs alone; comm programs join afterwards.
    dealt: waves that are dealt out, the first `head` included; in the last of them, only whole tiles are.
    whole: tiles that are computed whole, the first ones.
    splits: parts of each later tile.
    """

    head: int
    dealt: int
    whole: int
    splits: int


def end_of(waves: Waves, tiles: int, tile_s: float, programs: int, num_comm: int, sending: float) -> float:
    """When a launch ends, in units of a tile's time. sending: when its comm programs have sent everything."""
    head, dealt_waves, whole, splits = waves
    workers = programs - num_comm
    places = head * workers + (dealt_waves - head) * programs
    dealt = min(places, whole)
    part = (1 - TILE_END_S / tile_s) / splits + (TILE_END_S + PART_S) / tile_s
    last_part = part + ADD_S * (splits - 1) / tile_s
    items = [1.0] * (whole - dealt) + ([part] * (splits - 1) + [last_part]) * (tiles - whole)
    free = [float(dealt_waves - (program < places - dealt)) for program in range(workers)]
    free += [sending + dealt_waves - head] * num_comm
    heapq.heapify(free)
    for item in items:
        heapq.heapreplace(free, free[0] + item)
    return max(free)


@functools.lru_cache(maxsize=1024)
def plan_waves(
    gpu: GPU, tiles: int, splittable: int, K: int, num_programs: int, config: OverlapConfig, sent_bytes: int,
    tiles_first: int = 0, dtype: torch.dtype = torch.bfloat16, precision: str = "ieee",
) -> Waves:  # fmt: skip
    """The waves of a launch on a GPU: those that end first, by the model.

    splittable: how many of the last tiles may be split.
    sent_bytes: bytes that the comm programs of this rank send.
    tiles_first: the comm programs finish no earlier than this many first tiles; if these are all tiles, they never join
        the compute programs.
    """
    gemm, num_comm, workers = config.gemm, config.num_comm, num_programs - config.num_comm
    most = min(splittable, MAX_SPLIT_TILES.value)
    tile_s = gpu.tile_s(gemm, K, dtype, precision)
    rate = num_comm * gpu.reducing_program if tiles_first else min(num_comm * gpu.program, gpu.stores)
    sending_s = sent_bytes / rate if rate else 0
    sending = min(max(sending_s / tile_s, tiles_first / workers), tiles / workers)

    def deal(last: int, splits: int, head: int = math.ceil(sending)) -> Waves:
        whole = tiles - last
        if not num_comm:
            return Waves(0, -(-whole // num_programs), whole, splits)
        head = min(head, max(whole // workers - DEALT_SHORT, 0))
        rest = max((whole - head * workers) // num_programs - DEALT_SHORT, 0)
        # A comm program must not be dealt a tile that a comm program waits for: it would start it too late, or never.
        rest = rest if head * workers >= tiles_first else 0
        return Waves(head, head + rest, whole, splits)

    def end(plan: Waves) -> float:
        """The later of two estimates of how long sending takes."""
        guesses = (0.9 * sending, 1.1 * sending) if num_comm else (0.0,)
        return max(end_of(plan, tiles, tile_s, num_programs, num_comm, guess) for guess in guesses)

    plans = [deal(0, 1)]
    if num_comm and not tiles_first:
        plans.insert(0, deal(0, 1, int(sending)))  # first: wins ties, to leave fewer tiles undealt
    if config.split_tiles is not None:
        last, splits = min(config.split_tiles, most), min(config.max_splits, -(-K // gemm.block_k))
        if last and splits > 1:  # every part has a step: one without would not count
            return deal(last, splits)
    elif not gpu.tensor_memory:  # from there parts pass shared memory whole: 278,576 bytes and 350 spills on sm_100a
        left = round(tiles + num_comm * sending) % num_programs
        lasts = {left + num_programs // 12, left + num_programs // 6, num_programs // 4, num_programs // 2}
        splits = range(2, min(config.max_splits, K // (gemm.block_k * MIN_SPLIT_STEPS)) + 1)
        choices = itertools.product((last for last in sorted(lasts) if 0 < last <= most), splits)
        plans += itertools.starmap(deal, choices)
    return min(plans, key=end) if len(plans) > 1 else plans[0]
