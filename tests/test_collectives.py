"""all_gather, reduce_scatter, all_reduce and barrier: any dtype, any share, call after call."""

import ctypes
import functools
import itertools
import logging
import math
import time
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
import triton
from execution import execution
from transports import (
    every_transport,
    every_transport_and_nodes,
    late,
    late_words,
    launches,
    over,
    poison_workspace,
    poisoned_memory,
    simulated_only,
)

import tkernels
from tkernels.comm import collectives, copies, interpreter
from tkernels.comm.collectives import split_rows
from tkernels.comm.device import TRANSPORTS, Net, operation, put, quiet
from tkernels.comm.errors import HeapExhaustedError, MismatchError
from tkernels.comm.workspace import LAMPORT_BYTES, PACKET_BLOCK, Workspace
from tkernels.testing.compare import assert_close_to, integers, normal, poison

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Rows of each rank, by number of ranks: even, uneven, one row in all, none on a rank, none at all.
SHARES = {
    2: [(3, 3), (4, 1), (0, 1), (5, 0), (0, 0)],
    3: [(4, 4, 4), (2, 0, 5)],
    4: [(2, 2, 2, 2), (17, 16, 17, 17), (0, 0, 1, 0)],
}
# Every way to travel; by default small parts are packets, and an all-reduce between two ranks is one shot.
CONFIGS = {
    "by size": collectives.DEFAULT,
    "packets": collectives.CollectiveConfig(1 << 30, 1 << 30, 1 << 30, packet_hop_bytes=1 << 30),
    "packets, two shots": collectives.CollectiveConfig(1 << 30, 1 << 30, 1 << 30, hop_bytes=-1, packet_hop_bytes=-1),
    "one shot": collectives.CollectiveConfig(0, 0, 0, hop_bytes=1 << 30),
    "two shots": collectives.CollectiveConfig(0, 0, 0, hop_bytes=-1),
    "copies": collectives.CollectiveConfig(0, 0, 0, copy_bytes=0),
}
PATIENCE_S = {"right": 0.2, "wrong": 300.0}  # how long a rank waits for a mistake, which comes in the wrong form
every_way = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
WIDTHS = [(7,), (), (2, 3), (0,), (16,)]  # what follows the rows; 16 elements of any dtype are whole 16-byte vectors


def gathered(make, ctx, rows, width, dtype, seed, **limits):
    """Every rank's shard, as all ranks know it."""
    return [make((count, *width), dtype, seed + rank, device=ctx.device, **limits) for rank, count in enumerate(rows)]


def test_split_rows_takes_numbers_of_rows_and_of_ranks():
    assert split_rows(torch.tensor(7), 3) == (3, 2, 2) and split_rows(0, 2) == (0, 0)
    for rows, size, error, said in (
        (-1, 2, ValueError, "num_rows=-1 must be at least 0"),
        (2.5, 2, TypeError, "num_rows=2.5 must be a whole number"),
        (4, 0, ValueError, "size=0 must be at least 1"),
        (4, 10**30, ValueError, "size=10* must be at most 1048576"),
        (4, None, TypeError, "size=None must be a whole number"),
    ):
        with pytest.raises(error, match=f"^split_rows: {said}"):
            split_rows(rows, size)


@pytest.mark.ranks(2, 3, 4)
@every_transport_and_nodes
@pytest.mark.parametrize("way", ["packets", "one shot", "copies"])
def test_all_gather_puts_all_rows_in_the_order_of_ranks(ctx, transport, way):
    ctx = over(ctx, transport)
    for seed, (rows, width) in enumerate(zip(SHARES[ctx.size], WIDTHS, strict=False)):
        shards = gathered(normal, ctx, rows, width, FLOATS[seed % 3], 10 * seed)
        got = collectives.all_gather(ctx, shards[ctx.rank], rows=rows, config=CONFIGS[way])
        ctx.check()
        assert torch.equal(got, torch.cat(shards)), (rows, width)


@pytest.mark.ranks(2)
@every_transport_and_nodes
def test_all_gather_moves_any_dtype_bit_for_bit(ctx, transport):
    ctx = over(ctx, transport)
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float64, torch.complex64]
    for dtype in [*dtypes, torch.float8_e4m3fn, torch.float8_e5m2]:
        for rows in ((48, 48), (5, 3)):  # whole 16-byte vectors, and not
            shards = [(torch.arange(count) % (3 + rank)).to(dtype).to(ctx.device) for rank, count in enumerate(rows)]
            got = tkernels.all_gather(shards[ctx.rank], rows=rows, ctx=ctx)
            assert got.dtype == dtype and got.view(torch.uint8).equal(torch.cat(shards).view(torch.uint8)), dtype
    # NaN payloads and negative zero are bits like others.
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800001], dtype=torch.int32, device=ctx.device)
    assert tkernels.all_gather(bits.view(torch.float32), ctx=ctx).view(torch.int32).equal(torch.cat([bits, bits]))
    with pytest.raises(TypeError, match="elements of up to 8 bytes, not torch.complex128"):
        tkernels.all_gather(torch.zeros(2, dtype=torch.complex128, device=ctx.device), ctx=ctx)


@pytest.mark.ranks(2, 3, 4)
@every_transport_and_nodes
@every_way
def test_sums_of_integers_are_exact_whoever_owns_the_rows(ctx, transport, config):
    ctx = over(ctx, transport)
    for seed, (rows, width) in enumerate(zip(SHARES[ctx.size], WIDTHS, strict=False)):
        shards = gathered(integers, ctx, (sum(rows),) * ctx.size, width, FLOATS[seed % 3], 10 * seed)
        want = sum(shard.double() for shard in shards).to(shards[0].dtype)
        got = collectives.reduce_scatter(ctx, shards[ctx.rank], rows=rows, config=config)
        assert torch.equal(got, want.split(rows)[ctx.rank]), (rows, width)
        got = collectives.all_reduce(ctx, shards[ctx.rank], config=config)
        ctx.check()
        assert torch.equal(got, want), (rows, width)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_random_values_are_rounded_once_and_the_same_on_every_rank_and_run(ctx, dtype):
    rows = split_rows(67, ctx.size)
    shards = gathered(normal, ctx, (67,) * ctx.size, (5,), dtype, 3)
    want = sum(shard.double() for shard in shards)
    mine, every_config = shards[ctx.rank], [*CONFIGS.values(), CONFIGS["by size"]]
    results = [collectives.all_reduce(ctx, mine, config=config) for config in every_config]
    parts = [collectives.reduce_scatter(ctx, mine, rows=rows, config=config) for config in every_config]
    # The second rounding, of the sum sent to others, changes nothing: terms are summed in fp32 and rounded once.
    assert_close_to(results[0], want, terms=ctx.size)
    assert_close_to(parts[0], want.split(rows)[ctx.rank], terms=ctx.size)
    assert all(torch.equal(result, results[0]) for result in results)
    assert all(torch.equal(part, parts[0]) for part in parts)
    assert torch.equal(parts[0], results[0].split(rows)[ctx.rank])
    everyone = ctx.group.gather(results[0].cpu())
    assert all(torch.equal(everyone[0], other) for other in everyone)


@pytest.mark.ranks(2, 3)
@every_transport_and_nodes
def test_sums_are_rounded_once_to_another_dtype_where_asked(ctx, transport):
    ctx = over(ctx, transport)
    # Not whole 16-byte vectors, and whole ones; several blocks of packets in a part.
    for num_elements in (70, 4096, 6 * PACKET_BLOCK):
        for dtype, out_dtype in [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)]:
            shards = gathered(integers, ctx, (num_elements,) * ctx.size, (), dtype, 5, low=-256, high=256)
            want = sum(shard.double() for shard in shards)
            rows = split_rows(num_elements, ctx.size)
            for name, config in CONFIGS.items():
                got = collectives.all_reduce(ctx, shards[ctx.rank], out_dtype=out_dtype, config=config)
                assert torch.equal(got, want.to(out_dtype)), (name, num_elements, dtype)
                got = collectives.reduce_scatter(ctx, shards[ctx.rank], rows, out_dtype=out_dtype, config=config)
                assert torch.equal(got, want.to(out_dtype).split(rows)[ctx.rank]), (name, num_elements, dtype)
    with pytest.raises(TypeError, match="out is torch.float16, but the result is torch.float32"):
        collectives.all_reduce(ctx, shards[0], out=shards[0].half(), out_dtype=torch.float32)


@pytest.mark.ranks(1, 2, 3)
@every_transport_and_nodes
def test_sums_are_multiplied_by_a_factor_before_they_are_rounded(ctx, transport):
    ctx = over(ctx, transport)
    for num_elements in (70, 4096, 6 * PACKET_BLOCK):
        large = torch.full((num_elements,), 40000.0, dtype=torch.float16, device=ctx.device)  # of which two overflow
        shards = gathered(normal, ctx, (num_elements,) * ctx.size, (), torch.float32, 7)
        want = functools.reduce(torch.add, shards) * torch.tensor(0.3, dtype=torch.float32)  # in the order of ranks
        rows = split_rows(num_elements, ctx.size)
        for name, config in CONFIGS.items():
            for of, expected, factor in [(large, large, 1 / ctx.size), (shards[ctx.rank], want, 0.3)]:
                got = collectives.all_reduce(ctx, of.clone(), config=config, factor=factor)
                assert torch.equal(got, expected), (name, num_elements, factor)
                got = collectives.reduce_scatter(ctx, of.clone(), rows, config=config, factor=factor)
                assert torch.equal(got, expected.split(rows)[ctx.rank]), (name, num_elements, factor)
    half = tkernels.all_reduce(shards[ctx.rank], out=large.bfloat16(), factor=0.3, ctx=ctx)  # of the dtype of out
    assert torch.equal(half, want.bfloat16())
    if ctx.size == 1:  # rounded once there, too: 7 * 0.3 is 2.1
        x, out = torch.tensor([7.0], dtype=torch.bfloat16, device=ctx.device), torch.zeros(1, device=ctx.device)
        assert collectives.all_reduce(ctx, x, out, out_dtype=torch.float32, factor=0.3).item() == pytest.approx(2.1)
        assert collectives.all_reduce(ctx, x, x, factor=0.3) is x and x.item() == torch.tensor(2.1).bfloat16().item()
        half, out = shards[0].bfloat16(), torch.empty_like(shards[0], dtype=torch.float16)
        assert torch.equal(collectives.all_reduce(ctx, half, out, out.dtype, factor=0.3), (half.float() * 0.3).half())


@pytest.mark.ranks(2)
def test_all_reduce_by_factors_that_differ_names_them(ctx):
    with pytest.raises(MismatchError, match="factor"):
        collectives.all_reduce(ctx, torch.ones(8, device=ctx.device), factor=1 / (1 + ctx.rank))
        ctx.check()


@pytest.mark.quick
@pytest.mark.ranks(2)
@every_transport_and_nodes
def test_parts_of_many_chunks_arrive_whole(ctx, transport):
    ctx = over(ctx, transport)
    chunk = collectives.MAX_CHUNK_BYTES // 4  # with more programs, chunks are smaller
    for rows in ((2 * chunk + 8, chunk - 4), (1, 2 * chunk + 1)):
        shards = gathered(integers, ctx, rows, (), torch.float32, 1)
        assert torch.equal(tkernels.all_gather(shards[ctx.rank], rows=rows, ctx=ctx), torch.cat(shards))
        wholes = gathered(integers, ctx, (sum(rows),) * 2, (), torch.float32, 1)
        got = tkernels.reduce_scatter(wholes[ctx.rank], rows=rows, ctx=ctx)
        assert torch.equal(got, sum(wholes).split(rows)[ctx.rank])
    for config in CONFIGS.values():
        assert torch.equal(collectives.all_reduce(ctx, wholes[ctx.rank], config=config), sum(wholes))


@pytest.mark.ranks(2, 3, 4)
@every_transport
def test_copies_of_several_pieces_arrive_whole_in_place_and_in_other_dtypes(ctx, transport):
    ctx = over(ctx, transport)
    config, chunk = CONFIGS["copies"], collectives.MIN_CHUNK_BYTES // 4
    rows = [(9 * chunk + 8, 3 * chunk - 4, 0, 1)[: ctx.size], (2 * chunk,) * ctx.size]
    with (
        mock.patch.object(collectives, "COPY_COST_BYTES", 1024),
        mock.patch.object(collectives, "MAX_CHUNK_BYTES", 4096),
    ):
        for seed, counts in enumerate(rows):
            late(ctx, seed % ctx.size, 0.02)
            shards = gathered(integers, ctx, counts, (), torch.float32, seed)
            wholes = gathered(integers, ctx, (sum(counts),) * ctx.size, (), torch.bfloat16, 10 + seed)
            total = sum(whole.float() for whole in wholes)
            start, stop = sum(counts[: ctx.rank]), sum(counts[: ctx.rank + 1])
            poison_workspace(ctx)
            with launches() as launched:
                got = collectives.all_gather(ctx, shards[ctx.rank], counts, config=config)
                assert torch.equal(got, torch.cat(shards))
                for dtype in (torch.bfloat16, torch.float32):
                    got = collectives.reduce_scatter(ctx, wholes[ctx.rank], counts, out_dtype=dtype, config=config)
                    assert torch.equal(got, total.to(dtype)[start:stop])
                    got = collectives.all_reduce(ctx, wholes[ctx.rank], out_dtype=dtype, config=config)
                    assert torch.equal(got, total.to(dtype))
                mine = wholes[ctx.rank].clone()
                collectives.all_reduce(ctx, mine, out=mine, config=config)
                assert torch.equal(mine, total.bfloat16())
            assert [arguments["COPIED"] for *_, arguments in launched] == 6 * [True]
    ctx.check()
    ctx.group.barrier()
    assert not ctx.workspace().delivered.any() and not ctx.workspace().counters.any()


def sums_early(ctx, form):
    """An all-reduce whose rank 0 adds its last chunk late; in the wrong form its sums are sent before."""
    config, wait_chunk, waited = CONFIGS["copies"], collectives.wait_chunk, []
    wholes = gathered(integers, ctx, (8 * collectives.MIN_CHUNK_BYTES // 4,) * 2, (), torch.float32, 3)
    count_up_to, done = collectives.count_up_to, ctx.empty(1, dtype=torch.int64)
    done.zero_()
    poison_workspace(ctx)
    theirs = ctypes.c_int64.from_address(ctx.heap.segment.bases[1 - ctx.rank] + ctx.heap.offset(done))

    @interpreter.builtin
    def wait_late(mail, source, chunk, *arguments):
        limit = time.monotonic() + PATIENCE_S[form]
        if ctx.rank == 0 and isinstance(chunk, int) and chunk == 3:  # the part's last one, of which sums are taken
            waited.append(chunk)
            while not done.item() and time.monotonic() < limit:
                time.sleep(1e-3)
        wait_chunk(mail, source, chunk, *arguments)

    @interpreter.builtin
    def count_for_all(counter, number, *arguments):
        ctypes.c_int64.from_address(int(counter.handle.data.item())).value += 100

    with (
        mock.patch.object(collectives, "MAX_CHUNK_BYTES", collectives.MIN_CHUNK_BYTES),
        mock.patch.object(collectives, "wait_chunk", wait_late),
        mock.patch.object(collectives, "count_up_to", count_for_all if form == "wrong" else count_up_to),
        poisoned_memory(),
    ):
        got = collectives.all_reduce(ctx, wholes[ctx.rank], config=config)
    theirs.value = 1
    assert waited == ([3] if ctx.rank == 0 else [])
    return torch.equal(got, sum(wholes))


@simulated_only
@pytest.mark.ranks(2)
def test_sums_that_are_copied_before_all_are_there_are_caught(ctx):
    for form in ("right", "wrong"):
        with tkernels.init(heap_bytes=8 << 20) as context:
            right = sums_early(context, form)
            assert all(ctx.group.gather(right)) == (form == "right")


def test_the_way_to_travel_is_chosen_by_size_and_ranks():
    def way(num_bytes, size, transport="peer"):
        config, ctx = (
            collectives.DEFAULT,
            SimpleNamespace(size=size, transport_id=TRANSPORTS[transport], lamport_bytes=LAMPORT_BYTES),
        )
        one_shot = config.one_shot(num_bytes, ctx)
        part, trips = (num_bytes, 1) if one_shot else (num_bytes // size, 2)
        return one_shot, config.sums_packets(part, ctx, trips), config.sums_packets(part, ctx, scatters=True)

    for mapped in (True, False):
        by_copies = functools.partial(collectives.DEFAULT.copies, ctx=SimpleNamespace(mapped=mapped))
        assert (by_copies(16 << 20), by_copies((16 << 20) - 1)) == (mapped, False)
    assert way(64 << 10, 2) == way(256 << 10, 4) == way(64 << 10, 8) == (True, True, True)
    assert way(1 << 20, 2) == way(2 << 20, 2) == (True, True, False)
    assert way(64 << 10, 4, "nvshmem") == way(512 << 10, 4, "nvshmem") == (True, False, False)
    assert way(4 << 20, 2) == way(1 << 30, 2) == (True, False, False)
    assert way(512 << 10, 4) == way(1 << 20, 4) == (False, True, True)
    assert way(2 << 20, 4) == way(2 << 20, 8) == (False, True, False)
    assert way(4 << 20, 4) == way(1 << 20, 4, "nvshmem") == (False, False, False)


def test_no_all_reduce_needs_more_packets_than_there_is_room_for():
    """What comes back wider than it was sent takes more of them."""
    asked = []
    workspace = SimpleNamespace(num_chunks=64)
    workspace.reserve = lambda *_, num_lamport=0, **__: asked.append(num_lamport) or workspace
    for name in ("lamport", "inbox", "ready", "state", "counters", "gates", "copied", "delivered", "table"):
        setattr(workspace, name, torch.empty(1))
    workspace.num_lamport = workspace.inbox_bytes = 0
    workspace.settled = lambda prepare: prepare()
    for size, dtypes in itertools.product((2, 3, 4, 8), ((torch.bfloat16,) * 2, (torch.bfloat16, torch.float32))):
        ctx = SimpleNamespace(
            size=size, rank=0, device=torch.device("meta"), transport_id=TRANSPORTS["peer"], num_programs=132,
            lamport_bytes=LAMPORT_BYTES, on_device=lambda _: None, workspace=lambda: workspace,
            bind_call=lambda *_, **__: None, link=lambda operation: None,
            heap=SimpleNamespace(num_bytes=2 << 30), mapped=True,
        )  # fmt: skip
        asked.clear()
        for kilobytes in range(16, 4 << 10, 16):
            x = torch.empty(kilobytes << 9, dtype=dtypes[0], device="meta")
            collectives.AllReduce(None, 64, out_dtype=dtypes[1]).prepare(ctx, x, None)
        assert 0 < 4 * max(asked) <= LAMPORT_BYTES, (size, dtypes)
        if size % 2 == 0 and dtypes[0] == dtypes[1]:
            assert 4 * max(asked) == LAMPORT_BYTES  # and no more room than is needed


@pytest.mark.ranks(2)
def test_strided_and_symmetric_operands_are_taken_and_results_share_no_memory(ctx):
    base = integers((6, 10), torch.float32, ctx.rank, device=ctx.device)
    everyone = [integers((6, 10), torch.float32, rank, device=ctx.device) for rank in range(2)]
    for view in (lambda t: t.t(), lambda t: t[1:5, 3:], lambda t: t[::2], lambda t: t[0].expand(4, 10)):
        mine, all_views = view(base), [view(t) for t in everyone]
        assert torch.equal(tkernels.all_gather(mine, ctx=ctx), torch.cat(all_views))
        assert torch.equal(tkernels.all_reduce(mine, ctx=ctx), sum(all_views))
        rows = split_rows(len(mine), 2)
        assert torch.equal(tkernels.reduce_scatter(mine, rows=rows, ctx=ctx), sum(all_views).split(rows)[ctx.rank])
    symmetric = ctx.empty(6, 10)
    symmetric.copy_(base)
    total = tkernels.all_reduce(symmetric, ctx=ctx)
    ctx.barrier()
    poison(symmetric)
    assert torch.equal(total, sum(everyone))
    ctx.free(symmetric)


@pytest.mark.ranks(2, 4)
@every_transport_and_nodes
def test_many_calls_of_changing_size_and_kind_on_one_context_never_mix(ctx, transport):
    ctx = over(ctx, transport)
    sizes = [(3, 5), (40, 9), (1, 1), (64, 64), (2, 7), (90, 70), (5, 3)]
    for round, (size, dtype) in enumerate(zip(sizes, itertools.cycle(FLOATS), strict=False)):
        late(ctx, round % ctx.size, 0.02)
        shards = gathered(integers, ctx, (size[0],) * ctx.size, size[1:], dtype, 10 * round)
        mine, total = shards[ctx.rank], sum(shard.double() for shard in shards).to(dtype)
        rows = split_rows(size[0], ctx.size)
        # No look at a result before the last call: a late read of an inbox would find the next call's data.
        results = [
            tkernels.all_gather(mine, ctx=ctx),
            tkernels.all_reduce(mine, ctx=ctx),
            tkernels.reduce_scatter(mine, rows=rows, ctx=ctx),
            tkernels.all_gather(mine + 1, ctx=ctx),
        ]
        tkernels.barrier(ctx=ctx)
        want = [torch.cat(shards), total, total.split(rows)[ctx.rank], torch.cat(shards) + 1]
        for got, wanted in zip(results, want, strict=True):
            assert torch.equal(got, wanted), (round, size)
        if round % 3 == 0:
            poison_workspace(ctx)
    ctx.check()


@pytest.mark.ranks(2)
@every_way
def test_random_delays_change_no_result(ctx, config):
    seed = list(CONFIGS.values()).index(config)
    with execution(jitter_seed=seed, rank=ctx.rank):
        for round in range(3):
            wholes = gathered(integers, ctx, (30, 30), (3,), torch.float32, 10 * round)
            poison_workspace(ctx)
            assert torch.equal(collectives.all_reduce(ctx, wholes[ctx.rank], config=config), sum(wholes))
            assert torch.equal(collectives.all_gather(ctx, wholes[ctx.rank], config=config), torch.cat(wholes))


@pytest.mark.ranks(2, 4)
@every_transport_and_nodes
@every_way
def test_results_go_into_the_callers_memory_and_may_be_in_place(ctx, transport, config):
    ctx = over(ctx, transport)
    all_gather, reduce_scatter, all_reduce = (
        functools.partial(getattr(collectives, name), ctx, config=config)
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    )
    chunk = collectives.MIN_CHUNK_BYTES if ctx.runtime == "simulated" else collectives.MAX_CHUNK_BYTES
    large = chunk // 4 + 5  # two chunks, shared among programs
    shares = [((1, 0, 3, 2)[: ctx.size], (7,)), ((large,) * ctx.size, ()), ((8,) * ctx.size, (4,))]
    for seed, (rows, width) in enumerate(shares):
        for round in range(2):
            late(ctx, round % ctx.size, 0.02)
            start, stop = sum(rows[: ctx.rank]), sum(rows[: ctx.rank + 1])
            shards = gathered(integers, ctx, rows, width, torch.float32, 10 * seed + round)
            wholes = gathered(integers, ctx, (sum(rows),) * ctx.size, width, torch.float32, 50 + 10 * seed + round)
            total, out = sum(wholes), poison(torch.empty_like(wholes[0]))
            assert all_gather(shards[ctx.rank], rows=rows, out=out) is out
            assert torch.equal(out, torch.cat(shards))
            poison(out)[start:stop] = shards[ctx.rank]
            all_gather(out[start:stop], rows=rows, out=out)
            assert torch.equal(out, torch.cat(shards))

            out = poison(torch.empty_like(total[start:stop]))
            assert reduce_scatter(wholes[ctx.rank], rows=rows, out=out) is out
            assert torch.equal(out, total[start:stop])
            mine = wholes[ctx.rank].clone()
            reduce_scatter(mine, rows=rows, out=mine[start:stop])
            assert torch.equal(mine[start:stop], total[start:stop])

            out = poison(torch.empty_like(total))
            assert all_reduce(wholes[ctx.rank], out=out) is out
            assert torch.equal(out, total)
            mine = wholes[ctx.rank].clone()
            all_reduce(mine, out=mine)
            assert torch.equal(mine, total)
    ctx.check()


@pytest.mark.ranks(2)
def test_an_out_that_does_not_fit_is_refused_before_the_first_signal(ctx):
    x = torch.zeros(4, 3, device=ctx.device)
    memory, halves = torch.zeros(40, device=ctx.device), x.view(torch.bfloat16).view(-1)[:12].view(4, 3)
    refused = [
        (lambda: tkernels.all_gather(x, out=torch.zeros_like(x), ctx=ctx), r"out is \(4, 3\) .* must be \(8, 3\)"),
        (lambda: tkernels.reduce_scatter(x, out=x[:2].double(), ctx=ctx), "is torch.float64, but the .* torch.float32"),
        (lambda: tkernels.all_reduce(x, out=torch.zeros(3, 4, device=ctx.device).t(), ctx=ctx), "strides .1, 4. "),
        (lambda: tkernels.all_reduce(x, out=x.to("meta"), ctx=ctx), "on meta, but must be"),
        (lambda: tkernels.all_reduce(x, out=torch._neg_view(x.clone()), ctx=ctx), "out is a negated or conjugated"),
        (lambda: tkernels.all_reduce(memory[:12], out=memory[4:16], ctx=ctx), "begins 16 bytes after x and overlaps"),
        (lambda: tkernels.all_gather(memory[2:6], out=memory[:8], ctx=ctx), "begins -8 bytes after x and overlaps"),
        (lambda: tkernels.all_reduce(x.clone().requires_grad_(), out=x, ctx=ctx), "out= has no gradient; leave it out"),
        (lambda: tkernels.all_reduce(x, out=x.clone().requires_grad_(), ctx=ctx), "out= has no gradient; leave it out"),
        (lambda: collectives.all_reduce(ctx, halves, x, torch.float32), "out begins 0 bytes after x .*; they share no"),
    ]  # fmt: skip
    for call, message in refused:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    with torch.no_grad():
        tkernels.all_reduce(x.clone().requires_grad_(), out=x, ctx=ctx)
    # A strided operand is copied first: it may lie anywhere.
    square = integers((6, 6), torch.float32, 1, device=ctx.device)
    want = 2 * square.t()
    assert torch.equal(tkernels.all_reduce(square.t(), out=square, ctx=ctx), want)
    tkernels.barrier(ctx=ctx)
    ctx.check()


@triton.jit
def tell_kernel(cell, value, table, rank, L):
    for target in range(L.RANKS):
        put(cell, value, 1, target, Net(table, rank), L, 1)
    quiet(L)


@pytest.mark.ranks(4)
@every_transport_and_nodes
def test_no_rank_passes_a_barrier_before_the_last_one_comes(ctx, transport):
    ctx = over(ctx, transport)
    cell = ctx.empty(1)
    for round in range(4):
        poison(cell)
        last, value = round % ctx.size, torch.full((1,), float(round), device=ctx.device)
        late(ctx, last, 0.05)
        if ctx.rank == last:
            ctx.launch(tell_kernel, 1, cell, value, ctx.table, ctx.rank, L=ctx.link(operation("tell")))
        tkernels.barrier(ctx=ctx)
        assert cell.item() == round
        ctx.group.barrier()
    ctx.free(cell)


@pytest.mark.ranks(2)
def test_wrong_arguments_are_refused_before_the_first_signal(ctx):
    x = torch.zeros(5, 3, device=ctx.device)
    refused = [
        (lambda: tkernels.reduce_scatter(x, ctx=ctx), r"M=5 rows don't divide by 2 ranks; .*split_rows\(5, 2\)"),
        (lambda: tkernels.reduce_scatter(x, rows=(3, 3), ctx=ctx), r"M=5 rows, but rows=\(3, 3\) sums to 6"),
        (lambda: tkernels.reduce_scatter(x, rows=(5,), ctx=ctx), r"rows=\(5,\) must name a count >= 0 for each"),
        (lambda: tkernels.reduce_scatter(x, rows=(6, -1), ctx=ctx), r"rows=\(6, -1\) must name a count >= 0"),
        (lambda: tkernels.all_gather(x, rows=(4, 4), ctx=ctx), r"rank . has 5 rows, but rows=\(4, 4\) gives it 4"),
        (lambda: tkernels.all_gather(x, rows=(5, 5.0), ctx=ctx), r"rows=\(5, 5.0\) must name whole numbers of rows"),
        (lambda: tkernels.all_reduce(x.long(), ctx=ctx), "sums float32, float16 and bfloat16, but x is torch.int64"),
        (lambda: tkernels.reduce_scatter(x.sum(), ctx=ctx), "takes rows, but the tensor is a scalar"),
        (lambda: collectives.all_reduce(ctx, x, out_dtype=torch.int32), "but out_dtype is torch.int32"),
        (lambda: collectives.reduce_scatter(ctx, x[:4], max_programs=0), "max_programs=0 must be positive"),
        (lambda: collectives.all_reduce(ctx, x.to("meta")), "is on meta, but this context works on"),
    ]
    for call, message in refused:
        with pytest.raises((ValueError, TypeError), match=message):
            call()
    tkernels.barrier(ctx=ctx)
    ctx.check()


@pytest.mark.ranks(2, 3)
def test_scalars_are_summed(ctx):
    loss = torch.full((), ctx.rank + 1.0, device=ctx.device, requires_grad=True)
    total = tkernels.all_reduce(loss, ctx=ctx)
    total.backward()
    assert total.shape == () and total.item() == ctx.size * (ctx.size + 1) / 2 and loss.grad.item() == 1
    assert tkernels.all_reduce(loss.detach(), out=(out := loss.detach().clone()), ctx=ctx) is out and out == total


@pytest.mark.ranks(2)
def test_rows_may_be_integers_of_numpy_and_torch(ctx):
    with tkernels.init(ctx.group.process_group, heap_bytes=numpy.int64(8 << 20)) as context:
        x = torch.full((300, 16), float(ctx.rank), device=ctx.device)
        for rows in (numpy.array([300, 300]), torch.tensor([300, 300]), (300, 300)):
            assert tkernels.all_gather(x, rows=rows, ctx=context)[::300, 0].tolist() == [0, 1]
            y = tkernels.all_gather_matmul(x, x[:8], rows=rows, ctx=context)
            assert y[::300, 0].tolist() == [0, 16 * ctx.rank]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late_rank", [0, 1])
def test_sums_in_place_of_every_size_wait_for_copies_of_what_they_overwrite(ctx, late_rank):
    """Around the sizes from which on parts, and what comes whole in one shot, go by copies."""
    config, copy = collectives.CollectiveConfig(0, 0, 0, copy_bytes=1 << 16), copies.host_copy

    def late_copy(*arguments):
        time.sleep(0.05 * (ctx.rank == late_rank))
        copy(*arguments)

    with mock.patch.object(copies, "host_copy", late_copy):
        for num_bytes in (1 << 15, (1 << 16) - 16, 1 << 16, 3 << 15, (1 << 17) - 16, 1 << 17, 3 << 16):
            x = [integers(num_bytes // 4, torch.float32, rank, device=ctx.device) for rank in range(2)]
            mine = x[ctx.rank].clone()
            assert collectives.all_reduce(ctx, mine, mine, config=config).equal(x[0] + x[1]), num_bytes


@pytest.mark.ranks(2)
def test_all_reduce_of_more_than_the_heap_holds_at_once_is_made_in_pieces(ctx):
    tables, bind = [], collectives.AllReduce.bind_piece

    def watched(call, context, *of):
        launch = bind(call, context, *of)
        tables.append(context.workspace().table.data_ptr())
        return launch

    with tkernels.init(heap_bytes=4 * (most := 1 << 20)) as fresh:  # 16 pieces by programs, 8 by copies
        for dtype, out_dtype in ((torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None)):
            x = integers((3, most // 4 + 13), dtype, seed=ctx.rank, low=-2, high=3, device=ctx.device)
            want = sum(integers(x.shape, dtype, seed=rank, low=-2, high=3, device=ctx.device) for rank in range(2))
            got = collectives.all_reduce(fresh, x, out_dtype=out_dtype)
            assert got.dtype == (out_dtype or dtype) and torch.equal(got, want.to(got.dtype))
            turned = collectives.all_reduce(fresh, x.t())
            assert torch.equal(turned, want.t()) and turned.is_contiguous()
            config = collectives.CollectiveConfig(copy_bytes=100 << 10, lamport_bytes=0, hop_bytes=0)
            with mock.patch.object(collectives.AllReduce, "bind_piece", watched):
                got = collectives.all_reduce(fresh, x, config=config)
            assert torch.equal(got, want)
            assert tables[-2:] == [fresh.workspace().table.data_ptr()] * 2
            assert torch.equal(collectives.all_reduce(fresh, x, out=x), want)
        # Set aside for captures, landing for two copied pieces' sizes, inboxes for five by programs, packets and words.
        assert fresh.heap.held_bytes < (1 / 8 + 2 / 8 + 5 / 16 + 1 / 32) * fresh.heap.num_bytes


@pytest.mark.ranks(2)
def test_all_reduce_is_made_in_pieces_of_which_the_last_goes_as_those_before(ctx):
    """By copies a piece takes twice its size, by programs five times: a heap can't hold inboxes for both."""
    config = collectives.CollectiveConfig(copy_bytes=512 << 10)  # of a heap as many times smaller as it is by default
    warned = mock.patch.object(logging.getLogger("tkernels"), "warning")
    with tkernels.init(heap_bytes=8 << 20) as fresh, warned as warning:
        held = fresh.empty(2 << 20, dtype=torch.uint8)
        for num_bytes in ((2 << 20) - 1024, (2 << 20) - 64, 2 << 20, (2 << 20) + 4, 3 << 20):
            shape = (num_bytes // 4,)
            x = [integers(shape, torch.float32, rank, low=-2, high=3, device=ctx.device) for rank in range(2)]
            assert collectives.all_reduce(fresh, x[ctx.rank], config=config).equal(x[0] + x[1])
        warning.assert_not_called()
        fresh.free(held)
        x = [torch.full((1 << 17,), float(rank + 1), device=ctx.device) for rank in range(2)]
        with mock.patch.object(Workspace, "_grow", autospec=True, side_effect=Workspace._grow) as grow:
            for _ in range(4):
                for numel in (1 << 17, (1 << 17) - 64):  # by copies, by programs
                    assert collectives.all_reduce(fresh, x[ctx.rank][:numel], config=config).eq(3).all()
        assert grow.call_count < 4
        fresh.check()


@pytest.mark.ranks(2, 3)
def test_all_reduce_of_a_large_number_of_elements_that_fill_no_vector_sums_the_last_ones_apart(ctx):
    sums = mock.patch.object(collectives, "_Parts", wraps=collectives._Parts)
    for dtype, numel in ((torch.float32, 9001), (torch.bfloat16, 20_007)):
        x = [integers((numel,), dtype, seed=rank, low=-2, high=3, device=ctx.device) for rank in range(ctx.size)]
        with mock.patch.object(collectives, "MOST_UNALIGNED_BYTES", 32_000), sums as parts:
            out = collectives.all_reduce(ctx, x[ctx.rank], config=collectives.CollectiveConfig(lamport_bytes=0))
            assert torch.equal(out, sum(x))
        moved = [sum(call.args[1]) // (ctx.size if call.kwargs.get("whole") else 1) for call in parts.call_args_list]
        assert moved[-2:] == [numel // 8 * 8, numel % 8]


@pytest.mark.ranks(2)
def test_calls_whose_inboxes_no_heap_holds_together_take_turns_and_say_so(ctx):
    by_programs, by_copies = (collectives.CollectiveConfig(0, 0, 0, copy_bytes=bytes) for bytes in (1 << 62, 1 << 10))
    warned = mock.patch.object(logging.getLogger("tkernels"), "warning")
    with tkernels.init(heap_bytes=4 << 20) as fresh, warned as warning:
        x = integers((300 << 10,), torch.float32, ctx.rank, low=-2, high=3, device=ctx.device)
        theirs = [integers(x.shape, torch.float32, rank, low=-2, high=3, device=ctx.device) for rank in range(2)]
        want = sum(theirs)[ctx.rank * (150 << 10) :][: 150 << 10]
        assert collectives.reduce_scatter(fresh, x, config=by_copies).equal(want)  # 1.2 MB of landing
        warning.assert_not_called()
        for config in (by_programs, by_copies, by_programs, by_copies):  # and 3 MB of inboxes
            assert collectives.reduce_scatter(fresh, x, config=config).equal(want)
        assert "can't hold the inboxes of all calls at once" in warning.call_args.args[0] and warning.call_count == 1
        held = fresh.empty(1 << 18)
        with pytest.raises(HeapExhaustedError):
            collectives.reduce_scatter(fresh, x, config=by_programs)
        assert collectives.reduce_scatter(fresh, x, config=by_copies).equal(want)
        fresh.free(held)
        workspace, grown = fresh.workspace(), ({"landing_bytes": size} for size in (5 << 18, 6 << 18, 5 << 18, 6 << 18))
        first, second = workspace.settled(lambda: [workspace.reserve(**next(grown)).table for _ in range(2)])
        assert first is second is workspace.table and next(grown, None) is None  # prepared twice, as the second grew it
        rooms = {"landing_bytes": 2 << 20}, {"inbox_bytes": 1 << 20}
        with pytest.raises(HeapExhaustedError, match="symmetric heap exhausted: asked for .* of 4194304 bytes"):
            workspace.settled(lambda: [workspace.reserve(**room) for room in rooms])
        assert collectives.reduce_scatter(fresh, x, config=by_copies).equal(want)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("copied", [False, True])
def test_all_gather_and_reduce_scatter_of_more_than_the_heap_are_made_in_pieces(ctx, copied):
    config = collectives.CollectiveConfig(copy_bytes=64 << 10 if copied else 1 << 62)
    few = split_rows(29_001, ctx.size)
    with tkernels.init(heap_bytes=1 << 20) as fresh:
        for dtype, rows in ((torch.float32, few), (torch.bfloat16, (1, *(0,) * (ctx.size - 2), 57_003))):
            shape = sum(rows), 7
            parts = [integers(shape, dtype, rank, low=-2, high=3, device=ctx.device) for rank in range(ctx.size)]
            whole = parts[0]
            own = whole.split(rows)[ctx.rank].clone()
            assert collectives.all_gather(fresh, own, rows, config=config).equal(whole)
            out = torch.zeros_like(whole)
            mine = out.split(rows)[ctx.rank].copy_(own)
            assert collectives.all_gather(fresh, mine, rows, out=out, config=config).equal(whole)

            x, total = parts[ctx.rank], sum(parts).split(rows)[ctx.rank]
            got = collectives.reduce_scatter(fresh, x, rows, out_dtype=torch.float32, config=config)
            assert got.dtype == torch.float32 and torch.equal(got, total.float())
            mine = x.split(rows)[ctx.rank]
            collectives.reduce_scatter(fresh, x, rows, out=mine, config=config)
            assert torch.equal(mine, total)
        fresh.check()


@pytest.mark.ranks(2)
def test_sizes_that_grow_one_by_one_rarely_outgrow_the_workspace_and_take_all_that_there_is(ctx):
    with tkernels.init(heap_bytes=(8 << 20) * 8 // 7 + 4096) as fresh:  # an eighth is kept for captures
        workspace, grown = fresh.workspace(), []
        with mock.patch.object(Workspace, "_grow", autospec=True, side_effect=Workspace._grow) as grow:
            for kibibytes in range(1, 400):
                workspace.reserve(inbox_bytes=kibibytes << 10, num_chunks=kibibytes, scratch_bytes=kibibytes << 10)
                grown.append(workspace.scratch.data_ptr())
            assert grow.call_count < 30 and len(set(grown)) < 30
            assert workspace.inbox_bytes <= (400 << 10) + (8 << 20) // 32
        needed, exact = 3_150_000, 0
        with pytest.raises(HeapExhaustedError):
            while True:
                workspace.reserve(inbox_bytes=needed, num_chunks=1)
                exact += needed <= workspace.inbox_bytes < needed + 256
                needed = workspace.inbox_bytes + 8192
        assert exact  # at last, where the heap has no room ahead
        check = tkernels.all_gather(torch.full((5,), float(ctx.rank), device=ctx.device), ctx=fresh)
        assert check.tolist() == [0.0] * 5 + [1.0] * 5


@pytest.mark.ranks(2)
def test_a_workspace_grows_into_zeros_and_nobody_signals_before_every_rank_has_them(ctx):
    words = ("ready", "delivered", "begun", "packets", "lamport")
    with tkernels.init(heap_bytes=8 << 20) as fresh:
        for inbox_bytes in (1 << 10, 1 << 20):
            with_ones = fresh.empty(2 << 20, dtype=torch.int8)
            with_ones.fill_(1)
            fresh.free(with_ones)
            workspace = fresh.workspace().reserve(inbox_bytes=inbox_bytes, num_chunks=1)
            assert not any(getattr(workspace, name).any() for name in words)
            ctx.group.barrier()  # nobody calls before all have looked
            assert tkernels.all_gather(torch.ones(1, device=ctx.device), ctx=fresh).tolist() == [1.0] * 2
    with tkernels.init(heap_bytes=8 << 20) as fresh, late_words(ctx.rank):
        assert tkernels.all_gather(torch.ones(1, device=ctx.device), ctx=fresh).tolist() == [1.0] * 2
        fresh.check()


@pytest.mark.ranks(2)
def test_changing_sizes_reuse_one_workspace_and_small_ones_never_grow_it(ctx):
    tkernels.all_gather(torch.zeros(3000, device=ctx.device), ctx=ctx)
    before = ctx.workspace().inbox.data_ptr(), ctx.workspace().inbox_bytes
    for size in (1, 2000, 17):
        tkernels.all_gather(torch.zeros(size, device=ctx.device), ctx=ctx)
    assert (ctx.workspace().inbox.data_ptr(), ctx.workspace().inbox_bytes) == before


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "way, heap_bytes",
    [
        pytest.param("by size", 1 << 30, marks=pytest.mark.exhaustive),
        pytest.param("chunks", 1 << 30, marks=pytest.mark.exhaustive),
        ("by size", 128 << 20),
    ],
)
def test_after_a_large_call_no_smaller_one_needs_a_larger_workspace(ctx, way, heap_bytes):
    """What a CUDA graph needs, whose capture can't make room."""
    config = collectives.DEFAULT if way == "by size" else collectives.CollectiveConfig(0, 0, 0)
    with tkernels.init(heap_bytes=heap_bytes) as fresh:
        # Too large for packets, also between two ranks.
        collectives.all_reduce(fresh, torch.zeros(1 << 21, dtype=torch.bfloat16, device=ctx.device), config=config)
        before = fresh.workspace().inbox.data_ptr(), fresh.workspace().inbox_bytes
        for num_bytes in (1, 100 << 10, 256 << 10, 512 << 10, 1 << 20, 3 << 19):
            rows = split_rows(num_bytes // 2, ctx.size)
            x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=ctx.device)
            collectives.all_gather(fresh, x[: rows[ctx.rank]], rows=rows, config=config)
            for out_dtype in (None, torch.float32) if way == "by size" else (None,):
                collectives.all_reduce(fresh, x, out_dtype=out_dtype, config=config)
        assert (fresh.workspace().inbox.data_ptr(), fresh.workspace().inbox_bytes) == before


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_any_numbers_are_the_same_bits_as_packets_and_in_chunks(ctx, dtype):
    """Zeros of both signs, infinities, every NaN that packets might not tell from what was there before."""
    kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    lowest, highest = torch.iinfo(kind).min, torch.iinfo(kind).max
    patterns = torch.tensor([0, -1, 1, lowest, lowest + 1, highest, -2], dtype=kind)
    special = torch.cat([patterns.view(dtype), torch.tensor([math.inf, -math.inf, 1, -1, math.nan], dtype=dtype)])
    alike = special[:2].repeat_interleave(70)
    every = [torch.cat([special.roll(rank), special, alike]) for rank in range(ctx.size)]
    x = every[ctx.rank].to(ctx.device)
    want = functools.reduce(torch.add, [each.float() for each in every], torch.zeros(())).to(dtype)
    for config in CONFIGS.values():
        got = collectives.all_reduce(ctx, x, config=config).cpu()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.view(kind)[~got.isnan()], want.view(kind)[~want.isnan()])


@pytest.mark.ranks(2, 4)
@every_transport_and_nodes
def test_packets_of_calls_of_all_sizes_and_kinds_leave_nothing_behind(ctx, transport):
    """A call sets to zero what the one before has left, however much that was, and whatever came in between."""
    ctx, made = over(ctx, transport), []
    for seed, num_rows in enumerate((40, 3000, 1, 900, 3000, 2, 2, 5000, 1, 1)):
        wholes = gathered(integers, ctx, (num_rows,) * ctx.size, (8,), torch.bfloat16, 10 * seed)
        rows, x = split_rows(num_rows, ctx.size), wholes[ctx.rank]
        if seed % 3 == 1:
            tkernels.all_gather(x[: rows[ctx.rank]], rows=rows, ctx=ctx)
        for config in (collectives.DEFAULT, CONFIGS["packets, two shots"]):
            made.append((collectives.all_reduce(ctx, x, config=config), sum(wholes)))
        made.append((collectives.reduce_scatter(ctx, x, rows=rows), sum(wholes).split(rows)[ctx.rank]))
    for got, want in made:
        assert torch.equal(got, want)
    ctx.check()


def test_split_rows_is_the_split_of_tensor_split():
    for num_rows, size in itertools.product((0, 1, 7, 8, 2047), (1, 2, 3, 4, 8)):
        want = tuple(len(part) for part in torch.zeros(num_rows).tensor_split(size))
        assert split_rows(num_rows, size) == want and math.fsum(want) == num_rows
