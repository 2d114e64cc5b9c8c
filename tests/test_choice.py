"""Which configuration a call gets: the tuned one of its bucket, else the model's; and the same wire on every rank."""

import doctest
import itertools
import json
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch
from transports import forget_choices

from tkernels import choice
from tkernels.choice import bucket, gemm_config, overlap_config, problem_of, tuned_of
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.gpus import GPUS, H200, SIMULATED
from tkernels.model import Problem, choose, default_config, ways, wire_of
from tkernels.shapes import ROW_PARALLEL

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
TUNED = OverlapConfig(GemmConfig(64, 64, 64, group_m=4), chunk_rows=64, num_comm=1)  # chunks by rule


def record(config, operation=AG, M=256, N=64, K=128, dtype="bfloat16", layout="TN"):
    key = {"operation": operation, "M": M, "N": N, "K": K, "dtype": dtype, "layout": layout}
    return {"key": key, "config": asdict(config) if not isinstance(config, dict) else config}


class Stub:
    """Stands for a context."""

    def __init__(self, size=2, num_programs=4, mapped=True, transport="peer"):
        self.size, self.num_programs, self.mapped, self.rank = size, num_programs, mapped, 0
        self.transport, self.forgotten = transport if mapped else "nvshmem", 0

    def forget_calls(self):
        self.forgotten += 1


def context(*records, **fields):
    """A context to which these records are known."""
    ctx = Stub(**fields)
    with mock.patch.object(choice.tuned, "known", lambda *_, **__: list(records)):
        tuned_of(ctx)
    return ctx


def by_model(ctx, *call, sending=False):
    return choose(problem_of(ctx, *call, sending))


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """The rules of the simulated runtime, also where there are GPUs."""
    monkeypatch.setattr("tkernels.gpus.runtime.RUNTIME", "simulated")
    monkeypatch.setattr("tkernels.choice.gpu_here", lambda: SIMULATED)


@pytest.fixture
def on_gpus(monkeypatch, simulated):
    monkeypatch.setattr("tkernels.gpus.runtime.RUNTIME", "nvshmem")
    monkeypatch.setattr("tkernels.choice.gpu_here", lambda: H200)


def test_overlap_config_is_that_of_the_bucket():
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
        (AG, 256, 64, 128, BF16, "NN"),
    ],
    ids=str,
)
def test_overlap_config_of_other_calls_is_the_models(call):
    ctx = context(record(TUNED))
    assert overlap_config(ctx, *call) == by_model(ctx, *call) != TUNED


def test_overlap_config_of_the_last_record_of_a_bucket_counts():
    better = replace(TUNED, num_comm=3)
    assert overlap_config(context(record(TUNED), record(better)), AG, 256, 64, 128, BF16, "TN") == better


def test_overlap_config_ignores_what_needs_more_programs_than_there_are():
    for many in (replace(TUNED, num_comm=4), replace(TUNED, num_comm=3, max_programs=3)):
        ctx = context(record(many))
        assert overlap_config(ctx, AG, 256, 64, 128, BF16, "TN") == by_model(ctx, AG, 256, 64, 128, BF16, "TN")


def test_overlap_config_of_ranks_with_other_sizes_and_layouts_travels_alike(on_gpus):
    """Features that divide unevenly: a rank's N (or K) may fall into another bucket than its peer's."""
    entries = [  # a local size, its layout, what is tuned for it
        (64, "TN", OverlapConfig(GemmConfig(64, 64, 64), 64, 3)),
        (128, "NN", OverlapConfig(GemmConfig(128, 64, 64), 256, 3)),
        (512, "TN", OverlapConfig(GemmConfig(256, 64, 64), 512, 0)),
    ]
    for M in (250, 256 << 10):
        for operation in (AG, RS):
            records = [
                record(
                    config, operation, 1 << (M - 1).bit_length(), *sizes[:: 1 if operation == AG else -1], layout=layout
                )
                for local, layout, config in entries
                for sizes in [(local, 128)]
            ]
            ctx, wires_found = context(*records, num_programs=132), set()
            layouts = ("TN", "NN", "NT", "pointers")
            for local, layout in itertools.product((1, 60, 64, 65, 128, 200, 500, 513, 5000), layouts):
                N, K = (local, 128) if operation == AG else (128, local)
                call = operation, M, N, K, BF16, layout
                wires_found.add(overlap_config(ctx, *call).wire)
            assert wires_found == {wire_of(problem_of(ctx, *call))}


def test_overlap_config_sends_what_was_tuned_in_the_wire_format_by_rule(on_gpus):
    few = record(OverlapConfig(TUNED.gemm, 2048, num_comm=0), RS, M=8192, N=4096, K=4096)
    for size, K in ((2, 4096), (4, 3000)):
        ctx = context(few, size=size, num_programs=132)
        config = overlap_config(ctx, RS, 8192, 4096, K, BF16, "TN")
        assert (config.num_comm, config.copy_rows, config.wire) == (0, 2048, (128, True))
        # Comm programs send into inboxes where they must, and where memory isn't mapped.
        sending = overlap_config(ctx, RS, 8192, 4096, K, BF16, "TN", sending=True)
        assert sending == by_model(ctx, RS, 8192, 4096, K, BF16, "TN", sending=True) and not sending.landing
        apart = overlap_config(context(few, size=size, mapped=False), RS, 8192, 4096, K, BF16, "TN")
        assert apart.num_comm > 0 and not apart.landing
    # What is too small to land is not copied, whatever was tuned.
    small = record(OverlapConfig(TUNED.gemm, 256, num_comm=0), RS)
    config = overlap_config(context(small, num_programs=132), RS, 256, 64, 128, BF16, "TN")
    assert config.num_comm > 0 and not config.landing


def test_overlap_config_keeps_tuned_tiles_that_fit_the_chunks_by_rule():
    for block_m, kept in ((32, True), (64, True), (128, True), (16, True), (512, True), (1024, False)):
        own = OverlapConfig(GemmConfig(block_m, 64, 64), block_m, 3)
        ctx = context(record(own))
        config = overlap_config(ctx, AG, 256, 64, 128, BF16, "TN")
        assert config == (replace(own, chunk_rows=64) if kept else by_model(ctx, AG, 256, 64, 128, BF16, "TN")), block_m


def test_overlap_config_lets_all_programs_send_where_stores_reach_all():
    tuned = record(replace(TUNED, num_comm=0, interleaved=True), AR)
    for mapped in (True, False):
        config = overlap_config(context(tuned, mapped=mapped), AR, 256, 64, 128, BF16, "TN")
        assert (config.interleaved, config.landing, config.num_comm > 0) == (mapped, False, not mapped)
        assert not overlap_config(context(tuned, mapped=mapped), AR, 256, 64, 128, BF16, "TN", sending=True).interleaved


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
        (asdict(TUNED) | {"gemm": {"block_m": 2**30}, "chunk_rows": 2**30}, "block_m=1073741824 must be .* to 1024"),
        (asdict(TUNED) | {"gemm": {"group_m": 10**30}}, f"group_m=10* must be a whole number from 1 to {2**31 - 1}"),
        ({"num_comm": 3}, "None is no GemmConfig"),
        (asdict(TUNED) | {"gemm": []}, r"\[\] is no GemmConfig"),
        (None, "None is no OverlapConfig"),
    ],
)
def test_overlap_config_ignores_with_a_warning_settings_that_make_no_sense(config, reason):
    check_that_it_is_ignored(record(TUNED) | {"config": config}, reason)


def check_that_it_is_ignored(record, reason):
    with pytest.warns(UserWarning, match=f"are ignored: .*{reason}"):
        assert overlap_config(context(record), AG, 256, 64, 128, BF16, "TN") == by_model(
            Stub(), AG, 256, 64, 128, BF16, "TN"
        )


@pytest.mark.parametrize(
    "damage",
    [
        {"operation": ["matmul"]}, {"M": 255}, {"M": 256.0}, {"N": "64"}, {"K": None}, {"dtype": "bf16"},
        {"dtype": ["bfloat16"]}, {"layout": ["TN"]}, {"layout": "TNN"},
    ],
    ids=str,
)  # fmt: skip
def test_overlap_config_ignores_with_a_warning_keys_that_make_no_sense(damage):
    damaged = record(TUNED)
    damaged["key"] |= damage
    check_that_it_is_ignored(damaged, r"there is no bucket \(.*\)")


def test_read_record_reads_whatever_a_configuration_may_be():
    whole = OverlapConfig(
        GemmConfig(16, 32, 16, 1, 1, 1, 1, False, 1), 16, 0, landing=True, copy_rows=32, put_block=16,
        max_registers=1, max_programs=1, split_tiles=0, max_splits=1,
    )  # fmt: skip
    for config, operation in ((whole, AG), (whole.gemm, "matmul")):
        assert choice.read_record(json.loads(json.dumps(record(config, operation))))[1] == config


def test_gemm_config_has_buckets_too():
    tuned = GemmConfig(64, 32, 32, num_stages=2)
    ctx = context(record(tuned, "matmul"))
    with mock.patch.object(choice, "tuned_locally", lambda: tuned_of(ctx)):
        assert gemm_config(200, 60, 100, BF16, "TN") == tuned
        assert gemm_config(200, 60, 100, BF16, "TN", torch.float32) == tuned
        assert gemm_config(200, 60, 300, BF16, "TN") == default_config(200, 60, BF16)
        assert gemm_config(200, 60, 100, BF16, "NN") == default_config(200, 60, BF16)


def test_gemm_config_of_tf32_has_buckets_of_its_own():
    tuned, ieee = (GemmConfig(64, 32, 32, num_stages=stages) for stages in (2, 3))
    assert bucket("matmul", 1, 2, 3, torch.float32, "TN", "tf32")[4] == "float32 tf32"
    of_tf32, of_ieee = record(tuned, "matmul", dtype="float32 tf32"), record(ieee, "matmul", dtype="float32")
    both = of_tf32, of_ieee
    for records, found in ((both[:1], (tuned, None)), (both[1:], (None, ieee)), (both, (tuned, ieee))):
        with mock.patch.object(choice, "tuned_locally", lambda records=records: tuned_of(context(*records))):
            for precision, config in zip(("tf32", "ieee"), found, strict=True):
                by_rule = default_config(200, 60, torch.float32, precision=precision, alone=True)
                assert gemm_config(200, 60, 100, torch.float32, "TN", precision=precision) == (config or by_rule)


def test_product_way_is_the_kernels_where_it_wins_and_on_the_simulated_runtime():
    with mock.patch.object(choice, "tuned_locally", lambda: tuned_of(context())):
        for M, dtype, layout, way in [
            (8192, BF16, "TN", "kernel"),
            (1, BF16, "TN", "library"),
            (1, BF16, "pointers", "library"),
            (8192, BF16, "pointers", "staged"),
            (8192, torch.float32, "TN", "library"),
            (8192, torch.float32, "pointers", "library"),
        ]:
            staged = (2 * 8192 * M, 2 * 8192 * 8192) if layout == "pointers" else ()
            problem = Problem("matmul", M, 8192, 8192, dtype, layout, gpu=H200, staged=staged)
            tiles = None if way == "library" else default_config(M, 8192, dtype, gpu=H200)
            assert choice.product_way(problem) == (way, tiles)
            simulated = replace(problem, gpu=SIMULATED)
            assert choice.product_way(simulated) == ("kernel", default_config(M, 8192, dtype, gpu=SIMULATED))


def test_product_ways_store_what_tma_cant_take_in_slices_for_which_there_are_registers_and_shared_memory():
    with mock.patch.object(choice, "tuned_locally", lambda: tuned_of(context())):
        for changes, split in [
            ({}, 1), ({"activation": "gelu"}, 4), ({"stored": BF16}, 1), ({"stored": torch.float32}, 4),
            ({"dtype": E4M3}, 4), ({"dtype": E4M3, "stored": torch.float32}, 4), ({"dtype": torch.float32}, 1),
            ({"stored_by_tma": True}, 2), ({"stored_by_tma": True, "activation": "gelu"}, 2),
        ]:  # fmt: skip
            problem = Problem("matmul", 8192, 8191, 8192, **{"gpu": H200, "stored_by_tma": False} | changes)
            assert choice.product_ways(problem)["kernel"][0].split == split, changes


def test_gemm_config_of_wider_results_has_a_stage_less():
    four = context(record(GemmConfig(num_stages=4), "matmul"))
    with mock.patch.object(choice, "tuned_locally", lambda: tuned_of(four)):
        stages = [gemm_config(200, 60, 100, BF16, "TN", stored).num_stages for stored in (None, BF16, torch.float32)]
    assert stages == [4, 4, 3]


def test_gemm_config_and_overlap_config_read_records_again_once_choices_are_forgotten(monkeypatch):
    ctx, saved = Stub(), []
    monkeypatch.setattr(choice.tuned, "known", lambda *_, **__: list(saved))
    product, fused = (BF16, "TN"), (ctx, AG, 256, 64, 128, BF16, "TN")
    try:
        forget_choices(ctx)
        by_rule, fused_by_rule = gemm_config(200, 60, 100, *product), overlap_config(*fused)
        saved += [record(asdict(TUNED.gemm), "matmul"), record(TUNED)]
        assert gemm_config(200, 60, 100, *product) == gemm_config(200, 60, 101, *product) == by_rule != TUNED.gemm
        assert overlap_config(*fused) == fused_by_rule != TUNED
        forget_choices(ctx)
        assert (gemm_config(200, 60, 100, *product), overlap_config(*fused)) == (TUNED.gemm, TUNED)
        assert ctx.forgotten == 2
    finally:
        monkeypatch.undo()
        forget_choices(ctx)


def test_bucket_has_a_right_example():
    assert doctest.testmod(choice) == (0, 2)


def test_choose_interleaves_all_reduces_of_fp8_between_two_ranks_where_the_model_has_them_faster():
    """As recorded on 2 H100s (bench/LOG.md); of reduce-scatters, and of products that the wire outlasts, other ways."""
    for shape, interleaved in (("llama70b-down-4k", True), ("rs-b", True), ("rs-c", False)):
        M, N, K = ROW_PARALLEL[shape]
        problem = Problem(
            "matmul_all_reduce", M, N, K // 2, torch.float8_e4m3fn, ranks=2, gpu=GPUS["NVIDIA H100 80GB HBM3"]
        )
        assert choose(problem).interleaved == interleaved, shape
        assert not choose(replace(problem, operation="matmul_reduce_scatter")).interleaved
        assert not choose(replace(problem, ranks=4)).interleaved
        assert "multiples of 16 bytes" in ways(replace(problem, N=N - 1))["interleaved"]
