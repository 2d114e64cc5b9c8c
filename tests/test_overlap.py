"""Schedules: every row is computed once, behind the right chunk, and every tile falls to one program."""

import doctest
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from transports import simulated_only

import tkernels
from tkernels import overlap
from tkernels.all_gather_matmul import row_of_tiles
from tkernels.comm import interpreter, mail, runtime
from tkernels.comm.device import SIMULATED, Link, Net
from tkernels.comm.mail import MAX_LOOK, Mail, wait_chunks, words_of_peers
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.matmul_reduce_scatter import SEND_FIELDS, send_schedule
from tkernels.model import Problem, choose
from tkernels.overlap import (
    TILE_FIELDS,
    are_even,
    num_chunks,
    part_of_tile,
    programs_of,
    take_tile,
    tile_schedule,
    waves_of,
)
from tkernels.waves import Waves

SPLITS = [(64, 64), (67, 0), (0, 0, 5), (1, 100, 33, 64), (17, 16, 16, 16), (0, 0, 0, 1)]
CONFIGS = [
    OverlapConfig(GemmConfig(block_m=block_m), chunk_rows=chunk_rows)
    for block_m, chunk_rows in [(32, 32), (16, 48), (64, 128), (32, 8)]
]


def in_fields(schedule, fields):
    return [tuple(schedule[at : at + fields]) for at in range(0, len(schedule), fields)]


@pytest.mark.quick
@pytest.mark.parametrize("rows", SPLITS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.gemm.block_m}of{config.chunk_rows}")
def test_every_row_is_in_one_tile_and_a_chunk_holds_whole_tiles_or_a_tile_whole_chunks(rows, config):
    order = list(reversed(range(len(rows))))
    tiles = in_fields(tile_schedule(rows, order, config), TILE_FIELDS.value)
    covered = sorted((shard, row + i, whole + i) for shard, row, whole, valid, *_ in tiles for i in range(valid))
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    assert covered == [(shard, row, starts[shard] + row) for shard in range(len(rows)) for row in range(rows[shard])]
    for shard, row, _, valid, chunk, _ in tiles:
        assert 1 <= valid <= config.gemm.block_m and row % config.gemm.block_m == 0
        first, size = chunk * config.chunk_rows, max(config.chunk_rows, config.gemm.block_m)
        assert first <= row and row + valid <= first + size and chunk < num_chunks(rows[shard], config)
        assert row == first or config.chunk_rows > config.gemm.block_m


def test_tiles_take_a_chunk_of_each_shard_in_turn():
    config = OverlapConfig(GemmConfig(block_m=16), chunk_rows=32)
    tiles = in_fields(tile_schedule((100, 40, 64), [1, 2], config), TILE_FIELDS.value)
    assert [(shard, chunk) for shard, _, _, _, chunk, _ in tiles] == [
        (1, 0), (1, 0), (2, 0), (2, 0), (1, 1), (2, 1), (2, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("rows", SPLITS, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.gemm.block_m}of{config.chunk_rows}")
def test_every_row_of_a_peer_is_sent_once_and_every_peer_hears_at_least_once(rows, config):
    for rank in range(len(rows)):
        peers = [(rank + step) % len(rows) for step in range(1, len(rows))]
        sends = in_fields(send_schedule(rows, peers, config), SEND_FIELDS.value)
        # As the kernel has it: the rows after the own ones, then those before.
        M, own_end = sum(rows), sum(rows[: rank + 1])
        starts = {peer: (sum(rows[:peer]) - own_end) % M for peer in peers if rows[peer]}
        sent = sorted(row + i for _, _, row, count, _, _ in sends for i in range(count))
        assert sent == list(range(M - rows[rank]))
        for peer in peers:
            chunks = [send[1] for send in sends if send[0] == peer]
            assert chunks == list(range(num_chunks(rows[peer], config)))
        tiles = in_fields(tile_schedule(rows, peers, config), TILE_FIELDS.value)
        for target, chunk, row, count, counted, tiles_m in sends:
            assert not count or row == starts[target] + chunk * config.chunk_rows
            counting = [tile for tile in tiles if (tile[0], tile[4]) == (target, counted)]
            assert len(counting) == tiles_m and {of_chunk for *_, of_chunk in counting} <= {tiles_m}
            needed = set(range(row, row + count))
            assert needed <= {(whole - own_end) % M + i for _, _, whole, valid, *_ in counting for i in range(valid)}


@triton.jit(do_not_specialize=["tiles_m", "chunk_rows", "sent_rows", "rank"])  # as in the operation
def rows_kernel(
    found, schedule, tiles_m, chunk_rows, sent_rows, rank,
    RANKS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    tile_m = tl.program_id(0)
    row = row_of_tiles(tile_m, schedule, tiles_m, chunk_rows, sent_rows, rank, RANKS, EVEN, BLOCK_M)
    for field in tl.static_range(FIELDS):
        tl.store(found + tile_m * FIELDS + field, row[field])


def test_where_shards_are_even_a_gather_works_out_its_schedule():
    copied = replace(CONFIGS[0], num_comm=0, copy_rows=128)
    for size, tiles, config in [*itertools.product((2, 3, 4), (1, 4, 5), CONFIGS), (2, 6, copied), (3, 6, copied)]:
        rows = (tiles * config.gemm.block_m,) * size
        assert are_even(rows, config) and not are_even((*rows[1:], rows[0] - 1), config)
        assert not are_even((rows[0] - 1,) * size, config)
        for rank in range(size):
            # The own rows first, then those of the previous rank, which sends to this one first.
            order = [(rank + size - step) % size for step in range(1, size)]
            schedule = tile_schedule(rows, [rank], config) + tile_schedule(rows, order, config)
            schedule = torch.tensor(schedule, device=runtime.device())
            want = schedule.view(-1, TILE_FIELDS.value)[:, :5].contiguous()
            for even in (True, False):
                found = torch.full_like(want, -1)
                rows_kernel[(size * tiles,)](
                    found, schedule, size * tiles, config.chunk_rows, config.sent_rows, rank,
                    RANKS=size, EVEN=even, BLOCK_M=config.gemm.block_m, FIELDS=5,
                )  # fmt: skip
                assert found.equal(want), (size, tiles, config, rank, even)


@triton.jit(do_not_specialize=["num_comm", "head", "dealt", "whole"])  # as in the operations
def waves_kernel(visits, owners, waves, counters, tiles, num_comm, head, dealt, whole):
    pid = tl.program_id(0)
    wave = tl.where(pid < num_comm, head, 0)
    plan = Waves(head, dealt, whole, 1)
    own_dealt = waves_of(pid, num_comm, plan)
    index = take_tile(wave, own_dealt, pid, num_comm, plan, counters)
    while index < tiles:
        tl.atomic_add(visits + index, 1)
        tl.store(owners + index, pid)
        tl.store(waves + index, tl.where(wave < own_dealt, wave, -1))
        wave += 1
        index = take_tile(wave, own_dealt, pid, num_comm, plan, counters)


def take_waves(programs, num_comm, head, dealt, whole, tiles):
    """Of each tile: how often it was taken, by whom, and at which wave if it was dealt out."""
    visits, owners, waves = (torch.full((tiles,), n, dtype=torch.int32, device=runtime.device()) for n in (0, -1, -1))
    counters = torch.zeros(1, dtype=torch.int64, device=runtime.device())
    waves_kernel[(programs,)](visits, owners, waves, counters, tiles, num_comm, head, dealt, whole)
    return visits, owners, waves


def test_every_tile_falls_to_one_program_and_those_of_the_head_to_no_sender():
    for programs, num_comm, head, rest in itertools.product((2, 5), (0, 1, 2), (0, 1, 3), (0, 2)):
        if num_comm >= programs:
            continue
        dealt = head + rest
        for tiles in (dealt * programs + 1, dealt * programs + 20):
            visits, owners, _ = take_waves(programs, num_comm, head, dealt, tiles, tiles)
            assert visits.eq(1).all(), (programs, num_comm, head, dealt, tiles)
            assert owners[: head * (programs - num_comm)].ge(num_comm).all()


def test_a_last_turn_that_is_not_full_is_dealt_out_too_and_parts_are_not():
    for programs, whole, parts in itertools.product((1, 4, 5), (1, 4, 5, 9, 20), (0, 1, 7)):
        visits, owners, waves = take_waves(programs, 0, 0, -(-whole // programs), whole, whole + parts)
        assert visits.eq(1).all(), (programs, whole, parts)
        assert owners[:whole].tolist() == [tile % programs for tile in range(whole)]
        assert waves.tolist() == [*(tile // programs for tile in range(whole)), *[-1] * parts]


def link(ranks: int, copied: bool = False) -> Link:
    return Link(tl.constexpr(ranks), tl.constexpr(0), SIMULATED, COPIED=tl.constexpr(copied))


@triton.jit
def words_kernel(out, max_chunks, chunks, first, rank, L, LOOK: tl.constexpr):
    tl.store(out + tl.arange(0, LOOK), words_of_peers(max_chunks, chunks, first, Net(out, rank), L))


def test_one_look_is_at_every_chunk_of_every_peer_and_at_nothing_else():
    look = MAX_LOOK.value
    for size, chunks in ((2, 1), (2, 5), (2, look), (3, 7), (4, 32), (8, 3)):
        for rank, first, max_chunks in itertools.product((0, size - 1), (0, chunks - 1), (chunks, chunks + 3)):
            words = torch.full((look,), -1, dtype=torch.int32, device=runtime.device())
            words_kernel[(1,)](words, max_chunks, chunks, first, rank, link(size), look)
            peers = [peer for peer in range(size) if peer != rank]
            assert set(words.tolist()) == {peer * max_chunks + chunk for peer in peers for chunk in range(chunks)}


@triton.jit
def waits_kernel(ready, landed, table, L, SOURCES: tl.constexpr):
    arriving = Mail(None, ready, landed, 6, 5)
    wait_chunks(arriving, 2, 1, 3, Net(table, 0), L, SOURCES)


@simulated_only
def test_a_tile_of_several_chunks_waits_for_all_of_them_unless_one_look_has_seen_all():
    """Three chunks from 1 on, of ranks 2 and 3 or of 2, 3 and 0; one look at all of them, one of which is missing."""
    waits = []

    @interpreter.builtin
    def look(words, value, L):
        return (tl.load(words) >= value).handle.data.all()

    @interpreter.builtin
    def wait(arriving, source, chunk, *arguments):
        waits.append((int(source), int(chunk)))

    table = torch.zeros(1, dtype=torch.int64)
    with mock.patch.object(mail, "arrived", look), mock.patch.object(mail, "wait_chunk", wait):
        for sources, copies in itertools.product((2, 3), (False, True)):
            peers = [2, 3, 0][:sources]
            every = list(itertools.product(peers, range(1, 4)))
            for missing in [None, *every]:
                ready, landed = torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
                for peer, chunk in every:
                    ready[peer, chunk] = 5
                    landed[peer] = 4
                if missing:
                    ready[missing] = 4
                    landed[missing[0]] = missing[1]
                waits_kernel[(1,)](ready, landed, table, link(4, copies), sources)
                assert waits == (every if missing else []), (sources, copies, missing)
                waits.clear()


@simulated_only
@pytest.mark.ranks(2)
def test_an_operation_waits_for_every_chunk_that_its_tiles_reach_into(ctx):
    waits, wait_chunk, config = set(), mail.wait_chunk, replace(CONFIGS[3], num_comm=1)

    @interpreter.builtin
    def wait(arriving, source, chunk, *arguments):
        waits.add((int(source), int(chunk)))
        wait_chunk(arriving, source, chunk, *arguments)

    x = torch.ones(100, 16)
    with mock.patch.object(mail, "wait_chunk", wait):
        for call, rows in ((tkernels.all_gather_matmul, 50), (tkernels.matmul_reduce_scatter, 100)):
            call(x[:rows], x[:8], config=config, ctx=ctx)
            assert waits == {(1 - ctx.rank, chunk) for chunk in range(7)}, call
            waits.clear()


@triton.jit
def parts_kernel(out, whole, splits, steps, PARTS: tl.constexpr):
    item = tl.program_id(0)
    index, part = part_of_tile(item, Waves(0, 0, whole, splits), steps, PARTS)
    tl.store(out + item * 5, index)
    tl.store(out + item * 5 + 1, part.number)
    tl.store(out + item * 5 + 2, part.count)
    tl.store(out + item * 5 + 3, part.first)
    tl.store(out + item * 5 + 4, part.last)


def test_parts_of_a_tile_have_all_its_steps_in_turn_and_the_last_one_comes_last():
    whole, tiles = 3, 5
    for splits, K in itertools.product((1, 2, 3, 4), (1, 64, 100, 1000)):
        items = whole + (tiles - whole) * splits
        out = torch.zeros(items, 5, dtype=torch.int32, device=runtime.device())
        parts_kernel[(items,)](out, whole, splits, -(-K // 32), PARTS=splits > 1)
        found = out.tolist()
        for tile in range(tiles):
            parts = [part for part in found if part[0] == tile]
            assert [part[1:3] for part in parts] == [[n, len(parts)] for n in range(1 if tile < whole else splits)]
            steps = [step for *_, first, last in parts for step in range(first, last)]
            assert steps == list(range(-(-K // 32)))


def test_a_launch_has_programs_that_send_and_programs_that_multiply():
    config = OverlapConfig(num_comm=12)
    assert programs_of(config, 132, 1000) == 132
    assert programs_of(config, 132, 5) == 17
    assert programs_of(replace(config, max_programs=100), 132, 1000) == 100
    assert programs_of(replace(config, num_comm=0), 132, 5) == 5  # the copy engine sends
    for num_comm, available in ((12, 12), (12, 4)):
        told = f"num_comm={num_comm} leaves no program that computes, of num_programs={available};"
        with pytest.raises(ValueError, match=told):
            programs_of(OverlapConfig(num_comm=num_comm), available, 1000)
    for size in (2, 3, 4, 8):
        assert programs_of(choose(Problem("matmul_all_reduce", 64, 64, 64, ranks=size, programs=2)), 2, 9) == 2


def test_chunks_hold_whole_tiles_or_tiles_whole_chunks():
    with pytest.raises(ValueError, match="chunk_rows=100 must be a multiple or a divisor of block_m=64"):
        OverlapConfig(GemmConfig(block_m=64), chunk_rows=100)
    with pytest.raises(ValueError, match="chunk_rows=4 cuts a tile of block_m=64 into 16 chunks; there may be 8"):
        OverlapConfig(GemmConfig(block_m=64), chunk_rows=4)


def test_an_empty_shard_still_has_a_chunk():
    config = OverlapConfig(GemmConfig(block_m=32), chunk_rows=64)
    assert [num_chunks(rows, config) for rows in (0, 1, 64, 65)] == [1, 1, 1, 2]


def test_the_example_in_the_docstring_holds():
    assert doctest.testmod(overlap) == (0, 3)
