"""Waves: as many tiles as can be foreseen are dealt out, and the last ones are split where that ends earlier."""

import functools
import itertools
from dataclasses import replace

from tkernels import waves
from tkernels.configs import OverlapConfig
from tkernels.gpus import gpu_here
from tkernels.waves import DEALT_SHORT

plan_waves = functools.partial(waves.plan_waves, gpu_here())


def test_plan_waves_fills_the_last_turn_with_parts_where_that_ends_earlier():
    config, wave = OverlapConfig(num_comm=12), 132
    tiles = 10 * wave + 20
    for K in (16384, 28672, 57344):
        plan = plan_waves(tiles, tiles, K, wave, config, 0)
        assert plan.splits > 1 and 20 <= tiles - plan.whole <= 66, K  # 20 tiles would take as long as a whole wave
        assert plan_waves(tiles, tiles, K, wave, replace(config, max_splits=1), 0)[2:] == (tiles, 1)
    assert plan_waves(tiles, tiles, 256, wave, config, 0)[2:] == (tiles, 1)  # parts would cost more
    assert plan_waves(tiles, 5, 8192, wave, config, 0).whole >= tiles - 5
    asked = replace(config, split_tiles=7, max_splits=3)
    assert plan_waves(100, 50, 256, wave, asked, 0)[2:] == (93, 3)
    assert plan_waves(100, 5, 256, wave, asked, 0)[2:] == (95, 3)
    assert plan_waves(100, 50, 128, wave, asked, 0)[2:] == (93, 2)  # each part has a step
    assert plan_waves(100, 50, 64, wave, asked, 0)[2:] == (100, 1)


def test_plan_waves_deals_out_turns_as_long_as_there_are_surely_tiles_for_all_and_to_the_end_where_none_sends():
    for tiles, num_programs, num_comm, sent, first in itertools.product(
        (1, 40, 500, 3000), (4, 132), (0, 1, 3), (0, 1 << 20, 1 << 30), (0, 0.5, 1)
    ):
        plan = plan_waves(
            tiles, tiles, 4096, num_programs, OverlapConfig(num_comm=num_comm), sent, round(first * tiles)
        )
        dealt = plan.head * (num_programs - num_comm) + (plan.dealt - plan.head) * num_programs
        assert 0 <= plan.head <= plan.dealt and plan.whole <= tiles
        if num_comm:
            assert dealt <= plan.whole
            # No comm program is dealt one of the first tiles, which it, or another one, may wait for.
            assert plan.dealt == plan.head or plan.head * (num_programs - num_comm) >= round(first * tiles)
        else:
            assert plan.head == 0 and plan.dealt == -(-plan.whole // num_programs)
    config, tiles = OverlapConfig(num_comm=12), 3000
    assert plan_waves(tiles, 0, 4096, 132, config, 0).head == 0
    # Eight programs need 3.2 waves for 32 MB: they are dealt whole waves after the third one, for which they are late.
    for split_tiles in (None, 0):
        eight = OverlapConfig(chunk_rows=256, num_comm=8, split_tiles=split_tiles)
        assert plan_waves(768, 768, 4096, 132, eight, 32 << 20) == (3, 5, 768, 1)
    assert plan_waves(tiles, 0, 4096, 132, config, 1 << 30).head > 10  # the comm programs come late
    never = plan_waves(tiles, 0, 4096, 132, config, 0, tiles)
    assert never.head == never.dealt == tiles // 120 - DEALT_SHORT
