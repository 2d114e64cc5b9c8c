"""Which configuration a call gets: the tuned one of its bucket, else the rule; and the same chunks on every rank."""

import doctest
import itertools
import json
import math
import re
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tkernels import configs
from tkernels.comm import TkernelsError
from tkernels.comm.calls import local_calls
from tkernels.configs import (
    COUNT,
    GemmConfig,
    OverlapConfig,
    bound_travel,
    by_copy_engine,
    default_config,
    default_overlap,
    forget_choices,
    gemm_config,
    overlap_config,
    travel_of,
)

BF16 = torch.bfloat16
AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
TUNED = OverlapConfig(GemmConfig(64, 64, 64, group_m=4), chunk_rows=128, num_comm=1)


def record(config, operation=AG, M=256, N=64, K=128, dtype="bfloat16", layout="TN"):
    key = {"operation": operation, "M": M, "N": N, "K": K, "dtype": dtype, "layout": layout}
    return {"key": key, "config": asdict(config) if not isinstance(config, dict) else config}


def context(*records, size=2, num_programs=4, mapped=True, transport="peer"):
    reach = {"mapped": mapped, "transport": transport if mapped else "nvshmem"}
    return SimpleNamespace(tuned=list(records), choices={}, size=size, num_programs=num_programs, **reach)


def rule(operation, M, N, K, dtype=BF16, layout="TN"):
    return default_overlap(operation, M, N, K, dtype, 2, 4, layout != "pointers")


def test_a_call_gets_the_configuration_of_its_bucket():
    ctx = context(record(TUNED))
    for M, N, K in [(256, 64, 128), (129, 33, 65), (200, 40, 100)]:
        assert overlap_config(ctx, AG, M, N, K, BF16, "TN") == TUNED


@pytest.mark.parametrize(
    "call",
    [
        (AG, 257, 64, 128, BF16, "TN"),
        (AG, 128, 64, 128, BF16, "TN"),
        (AG, 256, 64, 129, BF16, "TN"),
        (RS, 256, 64, 128, BF16, "TN"),
        (AG, 256, 64, 128, torch.float16, "TN"),
    ],
    ids=str,
)
def test_other_calls_get_the_rule(call):
    assert overlap_config(context(record(TUNED)), *call) == rule(*call)


@pytest.mark.parametrize("rows, row_bytes, copy_rows", [
    (2048, 16384, 1024),  # 32 MB to a peer in 2 copies
    (2048, 8192, 1024),
    (1024, 8192, 1024),
    (512, 24576, 256),  # 12 MB in 2
    (8192, 16384, 4096),  # never more than 2
    (100, 64, 256),
    (0, 64, 256),
])  # fmt: skip
def test_the_copy_engine_gets_few_large_copies_of_whole_chunks_whatever_the_tiles(rows, row_bytes, copy_rows):
    for block_m in (64, 128, 256):
        config = by_copy_engine(OverlapConfig(GemmConfig(block_m=block_m), chunk_rows=256), rows, row_bytes)
        assert (config.num_comm, config.landing, config.chunk_rows, config.gemm.block_m) == (0, True, 256, block_m)
        assert config.sent_rows == config.copy_rows == copy_rows


def test_large_shares_travel_by_the_copy_engine_where_it_reaches_all(monkeypatch):
    monkeypatch.setattr("tkernels.configs.runtime.RUNTIME", "nvshmem")
    for operation, M, N, K, size, mapped, copied in [
        (AG, 8192, 4096, 4096, 2, True, True),
        (AG, 8192, 4096, 16384, 2, True, True),
        (RS, 8192, 4096, 4096, 2, True, True),
        (RS, 8192, 16384, 4096, 2, True, True),
        (AR, 8192, 8192, 1024, 2, True, False),
        (AR, 4096, 8192, 1024, 2, True, False),
        (AR, 4095, 8192, 1024, 2, True, False),
        (AR, 4094, 8192, 1024, 2, True, True),
        (AR, 1024, 8192, 1024, 2, True, True),
        (AR, 1022, 8192, 1024, 2, True, False),
        (AR, 8192, 8192, 4096, 4, True, True),
        (AR, 8192, 4096, 4096, 4, True, True),
        (AG, 512, 4096, 4096, 2, True, False),
        (AG, 8192, 4096, 4096, 2, False, False),
    ]:
        ctx = context(size=size, num_programs=132, mapped=mapped)
        config = overlap_config(ctx, operation, M, N, K, BF16, "TN")
        assert (config.num_comm == 0, config.landing) == (copied, copied), (operation, M, N, K, size, mapped)
        assert config.copied == copied and not config.interleaved
        sending = overlap_config(ctx, operation, M, N, K, BF16, "TN", sending=True)
        assert sending.num_comm > 0 and not sending.landing
    # A larger product whose rows take turns binds all calls whose rows travel alike; of one whose rows land, and which
    # is copied in large chunks, other calls have where, but not the chunks.
    for num_comm, chunk_rows, travel in ((4, 64, (64, False)), (0, 2048, (128, True))):
        larger = record(replace(TUNED, num_comm=num_comm, chunk_rows=chunk_rows), M=8192, N=8192, K=4096)
        ctx = context(larger, num_programs=132)
        config = overlap_config(ctx, AG, 8192, 4096, 4096, BF16, "TN")
        assert (config.num_comm == 0, travel_of(config)) == (num_comm == 0, travel)
        assert config.num_comm or config.copy_rows == 4096
        own = overlap_config(ctx, AG, 8192, 8192, 4096, BF16, "TN")
        assert (own.num_comm, travel_of(own)) == (num_comm, travel)
        assert own.num_comm or own.copy_rows == 2048
    few = record(OverlapConfig(TUNED.gemm, 2048, num_comm=0), RS, M=8192, N=4096, K=4096)
    config = overlap_config(context(few, size=4, num_programs=132), RS, 8192, 4096, 1024, BF16, "TN")
    assert config.num_comm > 12 and travel_of(config) == (128, True)


def test_all_programs_send_an_all_reduce_between_two_that_its_product_hides(monkeypatch):
    monkeypatch.setattr("tkernels.configs.runtime.RUNTIME", "nvshmem")
    for operation, M, N, K, size, dtype, layout, mapped, all_send in [
        (AR, 8192, 8192, 4096, 2, BF16, "TN", True, True),
        (AR, 8192, 4096, 4096, 2, torch.float16, "NN", True, True),
        (AR, 8192, 4096, 2048, 2, BF16, "TN", True, False),
        (AR, 8192, 4096, 4096, 2, BF16, "pointers", True, False),
        (AR, 8192, 4096, 4096, 2, torch.float32, "TN", True, False),
        (AR, 8192, 8192, 4096, 2, BF16, "TN", False, False),
        (AR, 8192, 8192, 4096, 4, BF16, "TN", True, False),
        (RS, 8192, 8192, 4096, 2, BF16, "TN", True, False),
    ]:
        case = (operation, M, N, K, size, dtype, layout, mapped)
        ctx = context(size=size, num_programs=132, mapped=mapped)
        config = overlap_config(ctx, operation, M, N, K, dtype, layout)
        assert (config.interleaved, config.num_comm == 0 and not config.copied) == (all_send, all_send), case
        sending = overlap_config(ctx, operation, M, N, K, dtype, layout, sending=True)
        assert sending.num_comm > 0 and not sending.landing and not sending.interleaved, case
        # Where rows land and in which chunks is the same for ranks whose products are too short.
        short = overlap_config(ctx, operation, M, N, 64, dtype, layout)
        assert travel_of(short) == travel_of(config) and not short.interleaved, case


def test_chunks_are_those_of_a_larger_product_whoever_sends(monkeypatch):
    monkeypatch.setattr("tkernels.configs.runtime.RUNTIME", "nvshmem")
    larger = record(replace(TUNED, chunk_rows=256, num_comm=4), AR, 8192, 8192, 8192)
    ctx = context(larger, num_programs=132)
    for K, layout, sending in itertools.product((4096, 1024, 64), ("TN", "pointers"), (False, True)):
        config = overlap_config(ctx, AR, 8192, 8192, K, BF16, layout, sending=sending)
        assert travel_of(config) == (256, False), (K, layout, sending)
        assert config.interleaved == (K == 4096 and layout == "TN" and not sending)


def test_tuned_programs_that_all_send_do_so_where_stores_reach_all():
    tuned = record(replace(TUNED, num_comm=0, interleaved=True), AR)
    for mapped in (True, False):
        config = overlap_config(context(tuned, mapped=mapped), AR, 256, 64, 128, BF16, "TN")
        assert (config.interleaved, config.landing, config.num_comm > 0) == (mapped, False, not mapped)
        assert not overlap_config(context(tuned, mapped=mapped), AR, 256, 64, 128, BF16, "TN", sending=True).interleaved


def test_one_look_sees_the_signals_of_all_that_lands(monkeypatch):
    monkeypatch.setattr("tkernels.configs.runtime.RUNTIME", "nvshmem")
    for size, M in itertools.product((2, 3, 4, 8), (8192, 43523, 65536, 1 << 20)):
        config = default_overlap(RS, M, 8192, 8192, BF16, size, 132, landing=None)
        assert config.landing and config.num_comm == 0
        rows, peers, most = math.ceil(M / size), size - 1, configs.MAX_LOOK.value
        assert math.ceil(rows / config.chunk_rows) * peers <= most
        assert config.chunk_rows == 128 or math.ceil(rows / (config.chunk_rows // 2)) * peers > most


def test_between_two_ranks_a_gather_needs_fewer_programs_and_larger_puts_where_they_store(monkeypatch):
    monkeypatch.setattr("tkernels.configs.runtime.RUNTIME", "nvshmem")
    for size, M, transport, want in [
        (2, 8192, "peer", (8, 256)),
        (2, 4096, "peer", (8, 128)),
        (2, 8192, "nvshmem", (12, 128)),
        (4, 16384, "peer", (12, 128)),
    ]:
        rule = default_overlap(AG, M, 3072, 4096, BF16, size, 132, stores=transport == "peer")
        assert (rule.num_comm, rule.chunk_rows) == want
        for mapped in (True, False) if transport == "nvshmem" else (True,):  # NVSHMEM's calls on one machine too
            ctx = context(size=size, num_programs=132, mapped=mapped, transport=transport)
            config = overlap_config(ctx, AG, M, 3072, 4096, BF16, "TN", sending=True)
            assert (config.num_comm, config.chunk_rows) == want
            assert overlap_config(ctx, AG, 512, 3072, 4096, BF16, "TN").num_comm == want[0]


def test_programs_send_what_a_short_product_cant_hide_and_ranks_need_not_do_alike(monkeypatch):
    monkeypatch.setattr("tkernels.configs.runtime.RUNTIME", "nvshmem")
    travels = set()
    for operation, size, K, by_programs in [
        (RS, 4, 1024, True),
        (RS, 4, 1025, True),
        (RS, 4, 1536, True),
        (RS, 4, 3584, False),
        (RS, 2, 2048, False),
        (AR, 4, 1024, True),
        (AR, 4, 1536, False),
    ]:
        ctx = context(size=size, num_programs=132)
        for layout in ("TN", "NN"):
            config = overlap_config(ctx, operation, 8192, 4096, K, BF16, layout)
            assert (config.num_comm > 0, config.landing) == (by_programs, True), (operation, size, K)
            sending = overlap_config(ctx, operation, 8192, 4096, K, BF16, layout, sending=True)
            assert sending.num_comm > 0 and not sending.landing
            travels.add((operation, size, *travel_of(config)))
        for programs in (1, 16):  # which take so long to multiply that the wire is hidden
            few = default_overlap(operation, 8192, 4096, K, BF16, size, programs, landing=None)
            assert few.num_comm == 0 and few.landing
        # Without tensor cores no product is short.
        assert overlap_config(ctx, operation, 8192, 4096, K, torch.float32, "TN").num_comm == 0
    assert len(travels) == 3
    # No more than a quarter of the programs send, and one at least, or copies do.
    for programs, num_comm in ((44, 11), (132, 24)):
        assert default_overlap(RS, 8192, 4096, 512, BF16, 8, programs, landing=None).num_comm == num_comm
    assert default_overlap(RS, 8192, 4096, 32, BF16, 8, 3, landing=None).num_comm == 0


def test_the_last_record_of_a_bucket_counts():
    better = OverlapConfig(TUNED.gemm, chunk_rows=128, num_comm=3)
    assert overlap_config(context(record(TUNED), record(better)), AG, 256, 64, 128, BF16, "TN") == better


def test_the_second_call_costs_a_look_into_a_dictionary():
    ctx = context(record(TUNED))
    first = overlap_config(ctx, AG, 256, 64, 128, BF16, "TN")
    with mock.patch.object(configs, "_choose", side_effect=AssertionError("chosen again")):
        assert overlap_config(ctx, AG, 256, 64, 128, BF16, "TN") is first


def test_choices_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(configs, "MAX_CHOICES", 10)
    ctx = context(record(TUNED))
    for M in range(1, 100):
        overlap_config(ctx, AG, M, 64, 128, BF16, "TN")
        assert len(ctx.choices) <= 11
    assert overlap_config(ctx, AG, 256, 64, 128, BF16, "TN") == TUNED


def test_programs_that_are_not_there_cant_send():
    many = OverlapConfig(TUNED.gemm, chunk_rows=128, num_comm=4)
    got = overlap_config(context(record(many)), AG, 256, 64, 128, BF16, "TN")
    assert got.num_comm < 4 and got.chunk_rows == 128


def test_ranks_with_other_sizes_and_layouts_agree_on_the_chunks():
    """Features that divide unevenly: a rank's N (or K) may fall into another bucket than its peer's."""
    entries = {
        (AG, 64, 128, "TN"): (64, 64),
        (AG, 128, 128, "NN"): (128, 128),
        (AG, 512, 128, "TN"): (256, 256),
        (RS, 128, 64, "TN"): (64, 64),
        (RS, 128, 256, "NT"): (128, 512),
    }
    records = [
        record(OverlapConfig(GemmConfig(block, 64, 64), rows, 1), operation, 256, N, K, layout=layout)
        for (operation, N, K, layout), (block, rows) in entries.items()
    ]
    alone = {one["config"]["chunk_rows"] for one in records}
    for operation, chunk_rows in ((AG, 256), (RS, 512)):
        ctx, chunks = context(*records), set()
        for local, layout in itertools.product(
            (1, 60, 64, 65, 128, 200, 500, 513, 5000), ("TN", "NN", "NT", "pointers")
        ):
            N, K = (local, 128) if operation == AG else (128, local)
            config = overlap_config(ctx, operation, 250, N, K, BF16, layout)
            chunks.add(config.chunk_rows)
        assert chunks == {chunk_rows}  # that of the largest product
    assert len(alone) > 2  # what the records of their buckets say by themselves


def test_chunks_smaller_than_a_tile_bind_other_tiles_too():
    """The tuned tiles of a smaller product stay, if they hold whole chunks, or chunks hold them; else the rule's."""
    large = record(OverlapConfig(GemmConfig(128, 64, 64), 32, 1), N=128)
    for block_m, kept in ((32, True), (64, True), (256, True), (16, True), (512, False)):
        own = OverlapConfig(GemmConfig(block_m, 64, 64), block_m, 3)
        config = overlap_config(context(record(own), large), AG, 256, 64, 128, BF16, "TN")
        by_rule = replace(rule(AG, 256, 64, 128), chunk_rows=32)
        assert config == (replace(own, chunk_rows=32) if kept else by_rule), block_m


def test_what_ranks_send_lands_in_one_place_where_their_buckets_differ():
    copied = record(OverlapConfig(TUNED.gemm, chunk_rows=256, num_comm=0), N=128)
    stored = record(TUNED, N=64)
    for N in (1, 64, 128, 500):
        for layout in ("TN", "NN"):
            config = overlap_config(context(stored, copied), AG, 256, N, 128, BF16, layout)
            assert travel_of(config) == (64, True), (N, layout)
            if (N, layout) in ((64, "TN"), (128, "TN")):  # who sends is the rank's own affair
                assert config.num_comm == (TUNED.num_comm if N == 64 else 0)
            larger = record(TUNED, N=256)
            config = overlap_config(context(stored, copied, larger), AG, 256, N, 128, BF16, layout)
            assert config.num_comm > 0 and travel_of(config) == (128, False), (N, layout)
            # Between machines nothing is copied, whatever was tuned within one.
            apart = overlap_config(context(stored, copied, mapped=False), AG, 256, N, 128, BF16, layout)
            assert apart.num_comm > 0 and not apart.landing
    assert overlap_config(context(stored, copied), RS, 256, 64, 128, BF16, "TN") == rule(RS, 256, 64, 128)


def test_a_smaller_product_is_bound_to_the_chunks_of_a_larger_one():
    ctx = context(record(TUNED, N=128))
    assert bound_travel(ctx, (AG, 256, 64, 128, "bfloat16", "TN")) == (128, False)
    assert bound_travel(ctx, (AG, 256, 128, 128, "bfloat16", "TN")) is None
    assert bound_travel(ctx, (AG, 256, 256, 128, "bfloat16", "TN")) is None
    assert bound_travel(ctx, (AG, 512, 64, 128, "bfloat16", "TN")) is None


@pytest.mark.parametrize(
    "config, reason",
    [
        (asdict(TUNED) | {"speed": 3}, "OverlapConfig has no speed"),
        (asdict(TUNED) | {"gemm": {"block_q": 3}}, "GemmConfig has no block_q"),
        (asdict(TUNED) | {"num_comm": "12"}, "OverlapConfig: num_comm='12' must be a whole number from 0 to "),
        (asdict(TUNED) | {"interleaved": True}, "all programs send, so num_comm must be 0, and is 1"),
        (asdict(TUNED) | {"interleaved": True, "num_comm": 0, "split_tiles": 3}, "no tile is split, but split_tiles=3"),
        (asdict(TUNED) | {"gemm": {"block_m": 96}, "chunk_rows": 96}, "GemmConfig: block_m=96 must be a power of two"),
        (asdict(TUNED) | {"chunk_rows": 100}, "chunk_rows=100 must be a multiple or a divisor of block_m=64"),
        (asdict(TUNED) | {"chunk_rows": 4}, "chunk_rows=4 cuts a tile of block_m=64 into 16 chunks; there may be 8"),
        # Of 64 or 128 rows, which another rank's tiles may have by rule.
        (asdict(TUNED) | {"gemm": {"block_m": 16}, "chunk_rows": 4}, r"chunk_rows=4 is no multiple of \d+"),
        (asdict(TUNED) | {"gemm": {"block_m": 16}, "chunk_rows": 48}, r"chunk_rows=48 is no multiple of \d+"),
        (asdict(TUNED) | {"gemm": {"block_m": 2**30}, "chunk_rows": 2**30}, "block_m=1073741824 must be .* to 1024"),
        (asdict(TUNED) | {"gemm": {"group_m": 10**30}}, f"group_m=10* must be a whole number from 1 to {2**31 - 1}"),
        ({"num_comm": 3}, "None is no GemmConfig"),
        (asdict(TUNED) | {"gemm": []}, r"\[\] is no GemmConfig"),
        (None, "None is no OverlapConfig"),
    ],
)
def test_settings_that_make_no_sense_are_ignored_with_a_warning(config, reason):
    check_that_it_is_ignored(record(TUNED) | {"config": config}, reason)


def check_that_it_is_ignored(record, reason):
    with pytest.warns(UserWarning, match=f"are ignored: .*{reason}"):
        assert overlap_config(context(record), AG, 256, 64, 128, BF16, "TN") == rule(AG, 256, 64, 128)


@pytest.mark.parametrize(
    "damage",
    [
        {"operation": ["matmul"]}, {"M": 255}, {"M": 256.0}, {"N": "64"}, {"K": None}, {"dtype": "bf16"},
        {"dtype": ["bfloat16"]}, {"layout": ["TN"]}, {"layout": "TNN"},
    ],
    ids=str,
)  # fmt: skip
def test_keys_that_make_no_sense_are_ignored_with_a_warning(damage):
    damaged = record(TUNED)
    damaged["key"] |= damage
    check_that_it_is_ignored(damaged, r"there is no bucket \(.*\)")


def test_whatever_a_configuration_may_be_can_be_remembered():
    whole = OverlapConfig(
        GemmConfig(16, 32, 16, 1, 1, 1, 1, False, 1), 16, 0, landing=True, copy_rows=32, put_block=16,
        max_registers=1, max_programs=1, split_tiles=0, max_splits=1,
    )  # fmt: skip
    for config, operation in ((whole, AG), (whole.gemm, "matmul")):
        assert configs.read_record(json.loads(json.dumps(record(config, operation))))[1] == config


@pytest.mark.parametrize(
    "kind, field, value, allowed",
    [
        (GemmConfig, "block_m", 2**30, "a power of two from 16 to 1024"),
        (GemmConfig, "block_k", 48, "a power of two from 16 to 1024"),
        (GemmConfig, "group_m", 0, f"a whole number from 1 to {COUNT}"),
        (GemmConfig, "split", 4, "1 or 2"),
        (GemmConfig, "num_warps", 6, "a power of two up to 32"),
        (GemmConfig, "num_stages", 2.0, f"a whole number from 1 to {COUNT}"),
        (GemmConfig, "use_tma", None, "True or False"),
        (GemmConfig, "max_programs", 0, f"None, or a whole number from 1 to {COUNT}"),
        (OverlapConfig, "gemm", {}, "a GemmConfig"),
        (OverlapConfig, "chunk_rows", 10**30, f"a whole number from 1 to {COUNT}"),
        (OverlapConfig, "num_comm", -1, f"a whole number from 0 to {COUNT}"),
        (OverlapConfig, "put_block", 100, "a power of two from 16 to 2**20"),
        (OverlapConfig, "copy_rows", 0, f"None, or a whole number from 1 to {COUNT}"),
        (OverlapConfig, "split_tiles", -1, f"None, or a whole number from 0 to {COUNT}"),
        (OverlapConfig, "max_splits", 0, f"a whole number from 1 to {COUNT}"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused(kind, field, value, allowed):
    said = f"{kind.__name__}: {field}={value!r} must be {allowed}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        kind(**{field: value})


def test_the_local_product_has_buckets_too():
    tuned = GemmConfig(64, 32, 32, num_stages=2)
    ctx = context(record(tuned, "matmul"))
    local_calls.clear()
    try:
        with mock.patch.object(configs, "current_context", lambda: ctx):
            assert gemm_config(200, 60, 100, BF16, "TN") == tuned
            assert gemm_config(200, 60, 300, BF16, "TN") == default_config(200, 60, BF16)
            assert gemm_config(200, 60, 100, BF16, "NN") == default_config(200, 60, BF16)
    finally:
        local_calls.clear()


def test_records_are_looked_up_once_until_choices_are_forgotten(monkeypatch):
    ctx, saved, forgotten = context(), [], []
    ctx.forget_calls = lambda: forgotten.append(ctx)
    monkeypatch.setattr(configs.tuned, "known", lambda *_: list(saved))
    product, fused = (BF16, "TN"), (ctx, AG, 256, 64, 128, BF16, "TN")
    try:
        with mock.patch.object(configs, "_table", side_effect=TkernelsError("no context")):
            forget_choices(ctx)
            by_rule = gemm_config(200, 60, 100, *product)
            saved.append(record(asdict(TUNED.gemm), "matmul"))
            assert gemm_config(200, 60, 100, *product) == gemm_config(200, 60, 101, *product) == by_rule != TUNED.gemm
            local_calls.find(("a key",), lambda: "a plan")
            forget_choices(ctx)
            assert gemm_config(200, 60, 100, *product) == TUNED.gemm
        assert local_calls.find(("a key",), lambda: "another plan") == "another plan"
        assert forgotten == [ctx] * 2
        by_rule = overlap_config(*fused)
        ctx.tuned.append(record(TUNED))
        assert overlap_config(*fused) == by_rule != TUNED
        forget_choices(ctx)
        assert overlap_config(*fused) == TUNED
    finally:
        monkeypatch.undo()
        forget_choices(ctx)


def test_the_examples_in_docstrings_hold():
    assert doctest.testmod(configs) == (0, 1)
