"""Schedules: every row is computed once, behind the right chunk, and every tile falls to one program."""

import doctest
import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tkernels import overlap
from tkernels.comm import runtime
from tkernels.configs import GemmConfig, OverlapConfig, default_overlap
from tkernels.matmul_reduce_scatter import send_schedule
from tkernels.overlap import (
    TILE_FIELDS,
    first_turn,
    num_chunks,
    programs_of,
    tile_schedule,
    turn_tile,
)

SPLITS = [(64, 64), (67, 0), (0, 0, 5), (1, 100, 33, 64), (17, 16, 16, 16), (0, 0, 0, 1)]
CONFIGS = [
    OverlapConfig(GemmConfig(block_m=block_m), chunk_rows=chunk_rows)
    for block_m, chunk_rows in [(32, 32), (16, 48), (64, 128)]
]


def in_fields(schedule, fields):
    return [tuple(schedule[at : at + fields]) for at in range(0, len(schedule), fields)]


@pytest.mark.quick
@pytest.mark.parametrize("rows", SPLITS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.gemm.block_m}of{config.chunk_rows}")
def test_every_row_is_in_one_tile_and_its_tile_in_one_chunk(rows, config):
    order = list(reversed(range(len(rows))))
    tiles = in_fields(tile_schedule(rows, order, config), TILE_FIELDS.value)
    covered = sorted((shard, row + i, whole + i) for shard, row, whole, valid, _ in tiles for i in range(valid))
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    assert covered == [(shard, row, starts[shard] + row) for shard in range(len(rows)) for row in range(rows[shard])]
    for shard, row, _, valid, chunk in tiles:
        assert 1 <= valid <= config.gemm.block_m and row % config.gemm.block_m == 0
        first = chunk * config.chunk_rows
        assert first <= row and row + valid <= first + config.chunk_rows and chunk < num_chunks(rows[shard], config)


def test_tiles_take_a_chunk_of_each_shard_in_turn():
    config = OverlapConfig(GemmConfig(block_m=16), chunk_rows=32)
    tiles = in_fields(tile_schedule((100, 40, 64), [1, 2], config), TILE_FIELDS.value)
    assert [(shard, chunk) for shard, _, _, _, chunk in tiles] == [
        (1, 0), (1, 0), (2, 0), (2, 0), (1, 1), (2, 1), (2, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("rows", SPLITS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.gemm.block_m}of{config.chunk_rows}")
def test_every_row_of_a_peer_is_sent_once_and_every_peer_hears_at_least_once(rows, config):
    for rank in range(len(rows)):
        peers = [peer for peer in range(len(rows)) if peer != rank]
        sends = in_fields(send_schedule(rows, peers, config), 4)
        starts = [sum(rows[:peer]) for peer in range(len(rows))]
        sent = sorted(row + i for _, _, row, count in sends for i in range(count))
        assert sent == [starts[peer] + row for peer in peers for row in range(rows[peer])]
        for peer in peers:
            chunks = [chunk for target, chunk, _, _ in sends if target == peer]
            assert chunks == list(range(num_chunks(rows[peer], config)))
        for target, chunk, row, _ in sends:
            assert row == starts[target] + chunk * config.chunk_rows


@triton.jit
def turns_kernel(visits, owners, tiles, head_turns, NUM_COMM: tl.constexpr):
    pid = tl.program_id(0)
    turn = first_turn(pid, NUM_COMM, head_turns)
    index = turn_tile(turn, pid, NUM_COMM, head_turns)
    while index < tiles:
        tl.atomic_add(visits + index, 1)
        tl.store(owners + index, pid)
        turn += 1
        index = turn_tile(turn, pid, NUM_COMM, head_turns)


def test_every_tile_falls_to_one_program_and_those_of_the_head_to_no_sender():
    device = runtime.device()
    for programs, num_comm, head_turns in itertools.product((2, 5), (1, 2), (0, 1, 3)):
        if num_comm >= programs:
            continue
        for tiles in (1, 7, 20):
            visits = torch.zeros(tiles, dtype=torch.int32, device=device)
            owners = torch.full((tiles,), -1, dtype=torch.int32, device=device)
            turns_kernel[(programs,)](visits, owners, tiles, head_turns, NUM_COMM=num_comm)
            assert visits.eq(1).all(), (programs, num_comm, head_turns, tiles)
            assert owners[: head_turns * (programs - num_comm)].ge(num_comm).all()


def test_a_launch_has_programs_that_send_and_programs_that_multiply():
    config = OverlapConfig(num_comm=12)
    assert programs_of(config, 132, 1000) == 132
    assert programs_of(config, 132, 5) == 17
    assert programs_of(replace(config, max_programs=100), 132, 1000) == 100
    assert programs_of(replace(config, num_comm=0), 132, 5) == 5  # the copy engine sends
    for num_comm, available in ((12, 12), (12, 4), (-1, 4)):
        with pytest.raises(ValueError, match=rf"of num_programs={available} programs, num_comm={num_comm} would send"):
            programs_of(OverlapConfig(num_comm=num_comm), available, 1000)
    for size in (2, 3, 4, 8):
        assert programs_of(default_overlap(64, 64, torch.bfloat16, size, 2), 2, 9) == 2


def test_a_chunk_must_hold_whole_tiles():
    with pytest.raises(ValueError, match="chunk_rows=100 must be a multiple of block_m=64"):
        OverlapConfig(GemmConfig(block_m=64), chunk_rows=100)


def test_an_empty_shard_still_has_a_chunk():
    config = OverlapConfig(GemmConfig(block_m=32), chunk_rows=64)
    assert [num_chunks(rows, config) for rows in (0, 1, 64, 65)] == [1, 1, 1, 2]


def test_the_example_in_the_docstring_holds():
    assert doctest.testmod(overlap) == (0, 3)
