"""The model: which configurations it considers, why not others, what it predicts, and what a call gets by it.

All of an H200, whatever runs here, unless a test says otherwise.
"""

import itertools
import math
import statistics
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tkernels import model
from tkernels.comm.mail import MAX_LOOK
from tkernels.configs import FP8, GemmConfig, OverlapConfig
from tkernels.gpus import GPUS, H200, SIMULATED
from tkernels.model import (
    COPY_ENGINE,
    INTERLEAVED,
    PROGRAMS,
    Problem,
    candidates,
    choose,
    default_config,
    fastest,
    library_s,
    plain_limit,
    predict,
    predict_library,
    predict_plain,
    predict_staged,
    reject,
    takes_turns,
    ways,
    wire_of,
)
from tkernels.variants import changed

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
A100, H100, B200 = (GPUS[f"NVIDIA {name}"] for name in ("A100-SXM4-80GB", "H100 80GB HBM3", "B200"))
AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def who_sends(config):
    return INTERLEAVED if config.interleaved else COPY_ENGINE if config.copied else PROGRAMS


@pytest.mark.quick
def test_choose_lets_the_copy_engine_send_large_shares_where_it_reaches_all():
    for operation, M, N, K, ranks, mapped, sender in [
        (AG, 8192, 4096, 4096, 2, True, COPY_ENGINE),
        (AG, 8192, 4096, 16384, 2, True, COPY_ENGINE),
        (RS, 8192, 4096, 4096, 2, True, COPY_ENGINE),
        (RS, 8192, 16384, 4096, 2, True, COPY_ENGINE),
        (AR, 8192, 8192, 1024, 2, True, PROGRAMS),
        (AR, 4096, 8192, 1024, 2, True, PROGRAMS),
        (AR, 4095, 8192, 1024, 2, True, PROGRAMS),
        (AR, 4094, 8192, 1024, 2, True, COPY_ENGINE),
        (AR, 1024, 8192, 1024, 2, True, COPY_ENGINE),
        (AR, 1022, 8192, 1024, 2, True, PROGRAMS),
        (AR, 8192, 8192, 4096, 4, True, COPY_ENGINE),
        (AR, 8192, 4096, 4096, 4, True, COPY_ENGINE),
        (AG, 512, 4096, 4096, 2, True, PROGRAMS),
        (AG, 8192, 4096, 4096, 2, False, PROGRAMS),
    ]:
        problem = Problem(operation, M, N, K, ranks=ranks, mapped=mapped)
        config, case = choose(problem), (operation, M, N, K, ranks, mapped)
        assert (who_sends(config), config.landing) == (sender, sender == COPY_ENGINE), case
        sending = choose(replace(problem, sending=True))
        assert sending.num_comm > 0 and not sending.landing, case


@pytest.mark.quick
def test_choose_lets_all_programs_send_an_all_reduce_between_two_that_its_product_hides():
    for operation, M, N, K, ranks, dtype, layout, mapped, all_send in [
        (AR, 8192, 8192, 4096, 2, BF16, "TN", True, True),
        (AR, 8192, 4096, 4096, 2, FP16, "NN", True, True),
        (AR, 8192, 4096, 2048, 2, BF16, "TN", True, False),
        (AR, 8192, 4096, 4096, 2, BF16, "pointers", True, False),
        (AR, 8192, 4096, 4096, 2, FP32, "TN", True, False),
        (AR, 8192, 8192, 4096, 2, BF16, "TN", False, False),
        (AR, 8192, 8192, 4096, 4, BF16, "TN", True, False),
        (RS, 8192, 8192, 4096, 2, BF16, "TN", True, False),
    ]:
        problem = Problem(operation, M, N, K, dtype, layout, ranks, mapped=mapped)
        config = choose(problem)
        assert (who_sends(config) == INTERLEAVED) == all_send, problem
        assert choose(replace(problem, sending=True)).num_comm > 0, problem
        # Where rows land and in which chunks is the same for ranks whose products are too short.
        short = choose(replace(problem, K=64))
        assert short.wire == config.wire and not short.interleaved, problem


@pytest.mark.quick
def test_choose_lets_programs_send_what_a_short_product_cant_hide_and_ranks_need_not_do_alike():
    wires = set()
    for operation, ranks, K, by_programs in [
        (RS, 4, 1024, True),
        (RS, 4, 1025, True),
        (RS, 4, 1536, True),
        (RS, 4, 3584, False),
        (RS, 2, 2048, False),
        (AR, 4, 1024, True),
        (AR, 4, 3584, False),
    ]:
        problem = Problem(operation, 8192, 4096, K, ranks=ranks)
        for layout in ("TN", "NN"):
            config = choose(replace(problem, layout=layout))
            assert (config.num_comm > 0, config.landing) == (by_programs, True), problem
            wires.add((operation, ranks, *config.wire))
        for programs in (1, 16):  # which take so long to multiply that the wire is hidden
            few = choose(replace(problem, programs=programs))
            assert few.copied and few.landing, problem
        # Without tensor cores no product is short.
        assert choose(replace(problem, dtype=FP32)).copied, problem
    assert len(wires) == 3
    # No more than a quarter of the programs send, and one at least, or copies do.
    for programs, num_comm in ((44, 11), (132, 24)):
        sender = ways(Problem(RS, 8192, 4096, 512, ranks=8, programs=programs))[PROGRAMS]
        assert sender.num_comm == num_comm
    assert choose(Problem(RS, 8192, 4096, 32, ranks=8, programs=3)).copied


@pytest.mark.quick
def test_choose_knows_that_few_chunks_keep_few_programs_sending():
    """Three chunks of 128 wide rows, on two H100s in us: 308 by comm programs, 129 by the copy engine."""
    problem = Problem(RS, 704, 32000, 400, ranks=2, gpu=H100)
    assert choose(problem).copied
    programs = ways(problem)[PROGRAMS]
    assert programs.num_comm > 3 and 250e-6 < predict(problem, programs).seconds < 370e-6
    assert 105e-6 < predict(problem, choose(problem)).seconds < 155e-6


@pytest.mark.quick
def test_choose_takes_the_candidate_with_the_least_prediction_and_is_cheap():
    rng, took = torch.Generator().manual_seed(0), []
    for number in range(60):
        M, N, K = (2 ** int(torch.randint(6, 15, (), generator=rng)) for _ in range(3))
        problem = Problem((AG, RS, AR)[number % 3], M, N, K, ranks=(2, 4, 8)[number % 4 % 3])
        began = time.perf_counter()
        config = choose(problem)
        took.append(time.perf_counter() - began)
        times = {other: predict(problem, other).seconds for other in candidates(problem)}
        assert times[config] == min(times.values()), problem
        assert choose(replace(problem)) is config
    assert statistics.median(took) < 0.01


@pytest.mark.quick
def test_choose_on_the_simulated_runtime_has_two_programs_send_into_inboxes():
    for programs, num_comm in ((2, 1), (4, 2), (8, 2)):
        config = choose(Problem(RS, 8192, 8192, 64, ranks=4, programs=programs, gpu=SIMULATED))
        assert (config.num_comm, config.landing, config.gemm.block_m) == (num_comm, False, 64)


@pytest.mark.quick
def test_wire_of_a_landing_is_chunks_whose_signals_one_look_sees():
    for ranks, M in itertools.product((2, 3, 4, 8), (8192, 43523, 65536, 1 << 20)):
        problem = Problem(RS, M, 8192, 8192, ranks=ranks)
        chunk_rows, landing = wire_of(problem)
        assert landing and choose(problem).copied
        rows, peers, most = math.ceil(M / ranks), ranks - 1, MAX_LOOK.value
        assert math.ceil(rows / chunk_rows) * peers <= most
        assert chunk_rows == 128 or math.ceil(rows / (chunk_rows // 2)) * peers > most


@pytest.mark.quick
def test_wire_of_a_gather_between_two_has_larger_puts_and_fewer_programs_where_they_store():
    for ranks, M, stores, want in [
        (2, 8192, True, (8, 256)),
        (2, 4096, True, (8, 128)),
        (2, 8192, False, (12, 128)),
        (4, 16384, True, (12, 128)),
    ]:
        for mapped in (True, False) if not stores else (True,):  # NVSHMEM's calls on one machine too
            problem = Problem(AG, M, 3072, 4096, ranks=ranks, mapped=mapped, stores=stores, sending=True)
            config = choose(problem)
            assert (config.num_comm, config.chunk_rows) == want and wire_of(problem) == (want[1], False)
            assert choose(replace(problem, M=512, sending=False)).num_comm == want[0]


@pytest.mark.quick
def test_wire_of_depends_on_nothing_that_may_differ_between_ranks():
    for operation, M, ranks in itertools.product((AG, RS, AR), (64, 1000, 8192, 1 << 17), (2, 4, 8)):
        found = set()
        for local, layout, gpu in itertools.product((1, 64, 5000, 60000), ("TN", "NN", "pointers"), GPUS.values()):
            N, K = (local, 4096) if operation == AG else (4096, local)
            problem = Problem(operation, M, N, K, BF16, layout, ranks, gpu=gpu)
            found.add(wire_of(problem))
            assert {config.wire for config in candidates(problem)} == {wire_of(problem)}
        assert len(found) == 1, (operation, M, ranks)


@pytest.mark.quick
@pytest.mark.parametrize("problem, sender, reason", [
    (Problem(AG, 512, 4096, 4096, ranks=2), COPY_ENGINE, "a share of 2097152 bytes, less than 8388608, is no more"),
    (Problem(AG, 8192, 4096, 4096, ranks=2, mapped=False), COPY_ENGINE, "it reaches no other machine"),
    (Problem(AR, 8192, 8192, 4096, ranks=2), COPY_ENGINE, "between two ranks programs send shares from 33554432 bytes"),
    (Problem(AG, 8192, 4096, 4096, ranks=2), PROGRAMS, "where rows land, copies are as fast, and take no SMs"),
    (Problem(AG, 8192, 4096, 4096, ranks=2), INTERLEAVED, "only reductions are"),
    (Problem(AR, 8192, 8192, 4096, ranks=4), INTERLEAVED, "among more than two ranks its steps spill registers"),
    (Problem(AR, 8192, 8192, 4096, FP32, ranks=2), INTERLEAVED, "not measured without TMA or in fp32"),
    (Problem(AR, 8192, 8192, 512, ranks=2), INTERLEAVED, "tiles would wait for the link: the GEMM takes 83 us"),
])  # fmt: skip
def test_ways_that_are_no_candidates_have_a_reason(problem, sender, reason):
    assert ways(problem)[sender].startswith(reason)


PROBLEM = Problem(AG, 8192, 14336, 8192, ranks=4)
DEFAULT = OverlapConfig(GemmConfig(group_m=16, num_stages=4), num_comm=12, landing=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    "change, other, reason",
    [
        ({"num_stages": 5}, PROBLEM, "shared memory: 5 stages of tiles of 128x256x64 take 245760 of 232448 bytes"),
        (
            {"num_stages": 4, "split": 1},
            replace(PROBLEM, operation="matmul"),
            "shared memory: 4 stages of tiles of 128x256x64 take 196608, and beside them slices of results and sums "
            "65536, of 232448 bytes",
        ),
        (
            {"split": 1, "num_stages": 3},
            PROBLEM,
            "shared memory: 3 stages of tiles of 128x256x64 take 147456, and beside them slices of results and sums "
            "131072, of 232448 bytes",
        ),
        ({}, replace(PROBLEM, gpu=A100), "shared memory: 4 stages of tiles of 128x256x64 take 196608 of 166912"),
        ({"num_warps": 4}, PROBLEM, "registers: 4 warps hold 256 sums a thread"),
        ({"num_comm": 132}, PROBLEM, "programs: there are 132, and one at least must multiply"),
        ({"chunk_rows": 256}, PROBLEM, "ranks: by rule chunks have 128 rows, and land: True"),
        ({"landing": False}, PROBLEM, "ranks: by rule chunks have 128 rows, and land: True"),
        ({"num_comm": 0, "interleaved": True}, PROBLEM, "operation: only reductions are interleaved"),
        (
            {"num_comm": 0, "interleaved": True, "num_stages": 3, "landing": False, "chunk_rows": 32},
            replace(PROBLEM, operation=AR, mapped=False),
            "ranks: the copy engine and stores reach no other machine",
        ),
        ({"use_tma": False, "num_stages": 3}, PROBLEM, "alignment: calls that choose for themselves read all"),
        ({"block_k": 32}, replace(PROBLEM, layout="pointers"), "alignment: without TMA descriptors"),
        ({"block_k": 16}, replace(PROBLEM, dtype=FP32), "registers: fp32 without tensor cores"),
        ({"block_n": 128}, replace(PROBLEM, N=64), "size: 64 columns would leave half of a tile of 128 empty"),
        ({"block_m": 128}, replace(PROBLEM, M=16), "size: 16 rows would leave half of a tile of 128"),
    ],
)
def test_reject_says_why(change, other, reason):
    assert reject(PROBLEM, DEFAULT) is None
    assert reject(other, changed(DEFAULT, change)).startswith(reason)


@pytest.mark.quick
def test_reject_lets_every_candidate_through_but_where_rows_are_few():
    for operation, M, N, K, ranks, dtype, layout, gpu in itertools.product(
        (AG, RS, AR), (128, 1000, 8192), (128, 4096), (64, 8192), (2, 4, 8), (BF16, FP32), ("TN", "pointers"),
        GPUS.values(),
    ):  # fmt: skip
        problem = Problem(operation, M, N, K, dtype, layout, ranks, gpu=gpu)
        assert not [reason for config in candidates(problem) if (reason := reject(problem, config))], problem


@pytest.mark.quick
def test_predict_weighs_the_wire_against_the_tiles():
    """Much to send beside little to multiply wants many programs that send; the other way round, few."""

    def preferred(K, operation=RS):
        problem = Problem(operation, 8192, 4096, K, ranks=4, mapped=False)
        config = candidates(problem)[0]
        return min((2, 4, 6, 9, 12, 18, 24), key=lambda n: predict(problem, replace(config, num_comm=n)).seconds)

    assert preferred(512) >= 12 and preferred(16384) <= 4
    for operation in (AG, RS, AR):
        problem = Problem(operation, 8192, 8192, 8192, ranks=4)
        for config in candidates(problem):
            found = predict(problem, config)
            assert found.seconds > max(found.gemm, found.wire / (2 if operation == AR else 1)) > 0
            assert found.seconds == pytest.approx(found.launch + found.gemm + found.exposed) or found.exposed == 0
            longer = replace(problem, N=16384) if operation == AG else replace(problem, K=16384)
            assert predict(longer, config).seconds > found.seconds
    slow = replace(candidates(Problem(AG, 8192, 1280, 8192, ranks=4, sending=True))[0], num_comm=2)
    wire = 8192 / 4 * 8192 * 2 * 3 / 56e9  # 100 MB through two programs
    assert predict(Problem(AG, 8192, 1280, 8192, ranks=4, sending=True), slow).seconds > wire


@pytest.mark.quick
def test_predict_of_a_local_product_counts_waves_and_bytes():
    problem = Problem("matmul", 8192, 8192, 8192)
    whole, more = (predict(replace(problem, M=tiles * 128, N=256), GemmConfig()).gemm for tiles in (132, 133))
    assert more == pytest.approx(2 * whole)
    few = predict(replace(problem, M=1), GemmConfig(64))
    assert few.gemm >= 8192 * 8192 * 2 / H200.memory


@pytest.mark.quick
def test_predict_plain_is_the_sum_of_its_parts():
    for operation in (AG, RS, AR):
        problem = Problem(operation, 8192, 8192, 8192, ranks=4)
        found = predict_plain(problem)
        assert found.seconds == pytest.approx(found.launch + found.gemm + found.wire)
        assert found.wire == pytest.approx((2 if operation == AR else 1) * 8192 * 8192 * 2 * 3 / 4 / H200.collective)


@pytest.mark.quick
def test_predict_plain_in_turns_hides_what_is_sent_while_own_rows_are_multiplied():
    for operation in (AG, RS, AR):
        problem = Problem(operation, 8192, 8192, 8192, FP32, "pointers", ranks=2, alignment=16)
        found, crossing = predict_plain(problem), 8192 * 8192 * 4 / 2
        sent = crossing / H200.copy_engine, (operation == AR) * crossing / H200.collective
        assert found.wire == pytest.approx(sum(sent))
        assert sent[0] < found.gemm / 2 and found.exposed == pytest.approx(sent[1], abs=1e-9)
        few = predict_plain(replace(problem, **{"K" if operation != AG else "N": 64}))
        assert few.exposed == pytest.approx(sum(sent) - few.gemm / 2)
        apart = predict_plain(replace(problem, mapped=False))
        assert apart.exposed == pytest.approx((1 + (operation == AR)) * crossing / H200.collective)


@pytest.mark.quick
def test_takes_turns_in_fp32_where_every_rank_has_many_rows_of_many_bytes():
    for operation in (AG, RS, AR):
        assert takes_turns(operation, (4096, 512), 8192, FP32)
        assert not takes_turns(operation, (4096, 511), 8192, FP32)
        assert not takes_turns(operation, (512, 512), 1024, FP32)
        assert not takes_turns(operation, (4096, 4096), 8192, BF16)
        assert not takes_turns(operation, (8192,), 8192, FP32)


def way_of(problem):
    """Who multiplies for a local product."""

    def tiles(layout):
        how = layout, problem.gpu, True, problem.precision
        return default_config(problem.M, problem.N, problem.dtype, *how)

    found = {"library": predict_library(problem), "kernel": predict(problem, tiles(problem.layout))}
    if problem.staged:
        found["staged"] = predict_staged(problem, tiles(problem.staged_layout))
    return fastest(problem, found)


@pytest.mark.quick
@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
def test_fastest_is_the_kernel_where_it_was_measured_to_be_and_else_the_library(gpu):
    for M, N, K, way in [
        (8192, 12800, 5120, "kernel"), (8192, 5120, 6400, "kernel"), (4096, 7168, 2048, "kernel"),
        (65536, 1024, 1024, "kernel"), (8192, 8192, 48, "library"), (2048, 12288, 24576, "kernel"),
        (512, 8192, 8192, "kernel"), (128, 28672, 8192, "kernel"), (1, 8192, 8192, "library"),
        (1, 28672, 8192, "library"), (32, 8192, 28672, "library"), (100, 8192, 8192, "library"),
        (200, 28672, 8192, "library"), (256, 8192, 8192, "library"), (512, 28672, 8192, "library"),
        (500, 500, 500, "library"), (48832, 80, 4608, "library"),
    ]:  # fmt: skip
        assert way_of(Problem("matmul", M, N, K, gpu=gpu)) == way, (M, N, K)
    for M, N, K in ((4096, 4096, 4096), (8192, 1536, 4096), (1000, 1000, 1000), (1, 8192, 8192)):
        for precision, layout in (("ieee", "TN"), ("ieee", "pointers"), ("tf32", "NN"), ("tf32", "pointers")):
            assert way_of(Problem("matmul", M, N, K, FP32, layout, precision=precision, gpu=gpu)) == "library"


@pytest.mark.quick
@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
def test_fastest_as_tf32_is_the_kernel_where_k_is_contiguous_and_else_what_is_worth_copies(gpu):
    for M, N, K, layout, alignment, way in [  # H200, us: torch, and our kernel, after the copies
        (8192, 8192, 8192, "TN", 16, "kernel"),  # 2694 and 2663
        (16384, 3584, 8192, "TN", 16, "kernel"),  # 2469 and 2374
        (65536, 512, 512, "TN", 16, "library"),  # 115 and 123: little to multiply for what is stored
        (128, 128, 8192, "TN", 16, "library"),  # 13 and 47
        (8192, 8192, 8192, "NT", 16, "staged"),  # 4097, and 2663 after 270 of copies
        (8192, 8192, 8192, "NN", 16, "library"),  # 2606, and 2663 after 135
        (4096, 1001, 2048, "TN", 4, "kernel"),  # 144 and 51: only the result's rows are odd
        (4001, 5003, 3001, "pointers", 4, "staged"),
        (40, 5003, 3001, "pointers", 4, "library"),
    ]:
        beyond = {"TN": (), "NN": (N,), "NT": (M, N), "pointers": (M, N)}[layout]
        problem = Problem(
            "matmul", M, N, K, FP32, layout, precision="tf32", alignment=alignment, gpu=gpu, stored_by_tma=N % 4 == 0,
            orientation="TN" if layout == "pointers" else layout, staged=tuple(4 * rows * K for rows in beyond),
        )  # fmt: skip
        assert way_of(problem) == way, (M, N, K, layout)


@pytest.mark.quick
@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
def test_fastest_stages_rows_that_tma_cant_take_where_the_product_is_worth_the_copies(gpu):
    for M, N, K, alignment, staged, gain in [  # gain: over the library, by the model
        (8192, 4096, 50257, 2, (8192 * 50257, 4096 * 50257), 2.5),
        (2047, 8192, 8191, 2, (2047 * 8191, 8192 * 8191), 2.5),
        (4001, 5003, 3001, 2, (4001 * 3001, 5003 * 3001), 1.3),
        (8190, 8190, 8190, 4, (8190 * 8190,) * 2, 2),
        (16, 8192, 8191, 2, (16 * 8191, 8192 * 8191), None),
        (16, 8192, 8191, 2, (16 * 8191, 0), 1.2),  # a copy that is kept: 118 and 64
        (8192, 64, 8191, 2, (8192 * 8191, 64 * 8191), None),
        (500, 501, 503, 2, (500 * 503, 501 * 503), None),
    ]:
        problem = Problem(
            "matmul",
            M,
            N,
            K,
            layout="pointers",
            alignment=alignment,
            gpu=gpu,
            staged=tuple(2 * size for size in staged),
            stored_by_tma=N % 8 == 0,
        )
        assert way_of(problem) == ("staged" if gain else "library"), (M, N, K)
        if gain:
            config = default_config(M, N, BF16, "TN", gpu)
            assert predict_library(problem).gemm > gain * predict_staged(problem, config).gemm, (M, N, K)


@pytest.mark.quick
@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
def test_fastest_is_the_kernel_where_rows_of_the_result_alone_are_unaligned(gpu):
    for M, N, K, alignment, gain in [  # gain: over the library, by the model. Of one H200, us, library and kernel:
        (8192, 50257, 4096, 2, 5),  # 31500 and 4436
        (2048, 50257, 384, 2, 3),  # 900 and 174: the library stores by elements too, more slowly
        (4096, 30522, 768, 4, 2),  # 968 and 404
        (16, 50257, 4096, 2, 1.4),  # few tokens into a language model's head: 482 and 126
        (16, 50257, 768, 2, 1.4),  # 106 and 35
        (64, 32001, 4096, 2, 1.4),  # 295 and 83
        (512, 1001, 2048, 2, 1.2),  # 37 and 18
        (64, 1001, 2048, 2, None),  # 15.8 and 14.8
        (1, 50257, 4096, 2, None),  # 144 and 136
        (26368, 50, 53760, 4, None),  # 1006 and, with a copy of the result, 1100
    ]:
        problem = Problem("matmul", M, N, K, alignment=alignment, gpu=gpu, stored_by_tma=False)
        assert way_of(problem) == ("kernel" if gain else "library"), (M, N, K)
        if gain:
            config = default_config(M, N, BF16, "TN", gpu, alone=True)
            assert predict_library(problem).gemm > gain * predict(problem, config).gemm, (M, N, K)


@pytest.mark.quick
def test_fastest_is_the_kernel_sooner_with_an_epilogue_that_the_library_takes_a_pass_for():
    # Another wave than the library needs: 3 % of the time without an activation, less than a pass over y takes.
    problem = Problem("matmul", 3072, 2560, 8192)
    assert way_of(problem) == "library" and way_of(replace(problem, activation="relu", separate=True)) == "kernel"
    plain = predict_library(problem).gemm
    for stored, itemsize in ((None, 2), (BF16, 2), (FP32, 4)):
        passed = predict_library(replace(problem, separate=True, stored=stored)).gemm
        assert passed - plain == pytest.approx(2e-6 + 2 * itemsize * 3072 * 2560 / (0.75 * H200.memory))
    # Those of a sweep on an H100: what our kernel took beside torch's two launches.
    for M, N, K, layout, activation, way in [
        (25920, 16704, 4416, "TN", "relu", "kernel"),
        (7808, 1408, 1344, "TT", "gelu_tanh", "kernel"),
        (1536, 10432, 320, "TN", "relu", "kernel"),
        (8, 8528, 48, "NN", "relu", "kernel"),
        (42896, 24, 32, "NN", "gelu", "library"),
        (88, 320, 208, "TT", "gelu_tanh", "library"),
        (23024, 32, 11088, "NN", "relu", "library"),
        (64, 49472, 53, "pointers", "gelu", "library"),
        (1, 192, 50, "pointers", "relu", "kernel"),
        (11264, 17152, 192, "NT", None, "library"),
    ]:
        problem = Problem(
            "matmul", M, N, K, layout=layout, activation=activation, separate=activation is not None, gpu=H100
        )
        assert way_of(problem) == way, (M, N, K)


@pytest.mark.quick
def test_fastest_is_the_library_where_rows_take_a_sector_more_than_they_must():
    for M, N, K, gpu in ((44424, 8392, 48248, H100), (8192, 4096, 50264, H100)):  # 0.37 and 0.54 of cuBLAS's speed
        assert way_of(Problem("matmul", M, N, K, sectors=False, gpu=gpu)) == "library"
        assert way_of(Problem("matmul", M, N, K, gpu=gpu)) == "kernel"


@pytest.mark.quick
def test_library_s_is_within_a_tenth_of_what_was_measured():
    for M, N, K, us in [  # H200, bf16
        (8192, 4096, 1024, 114), (8192, 4096, 4096, 352), (8192, 1536, 4096, 148), (4096, 8192, 14336, 1181),
        (8192, 8192, 2048, 365), (2048, 12288, 12288, 760),
    ]:  # fmt: skip
        assert library_s(Problem("matmul", M, N, K)) == pytest.approx(us * 1e-6, rel=0.1)
    for alignment, us in ((4, 4100), (2, 9160)):  # of 8190, and of 8191, by the rate of other odd sizes
        problem = Problem("matmul", 8190, 8190, 8190, layout="pointers", alignment=alignment)
        assert library_s(problem) == pytest.approx(us * 1e-6, rel=0.1)


@pytest.mark.quick
def test_ways_have_room_in_shared_memory_for_parts_of_tiles_and_beside_them():
    kinds = (BF16, "ieee"), (FP32, "tf32")
    for operation, (dtype, precision), ranks in itertools.product((AG, RS, AR), kinds, (2, 4)):
        for gpu, M, N, K in itertools.product((H200, B200), (64, 8192), (128, 8192), (4096, 28672)):
            problem = Problem(operation, M, N, K, dtype, ranks=ranks, precision=precision, gpu=gpu)
            for way in candidates(problem):
                reason = reject(problem, way)
                assert not reason or reason.startswith(("size", "programs")), (problem, way, reason)


@pytest.mark.quick
def test_plain_limit_of_an_all_reduce_is_lower_between_two():
    assert [plain_limit(AR, ranks) for ranks in (2, 4)] == [12 << 20, 24 << 20]
    assert [plain_limit(AG, ranks) for ranks in (2, 4)] == [12 << 20] * 2


def test_plain_limit_of_a_gather_is_lower_in_fp8():
    by_dtype = [[plain_limit(operation, 2, dtype) for dtype in (BF16, *FP8)] for operation in (AG, RS)]
    assert by_dtype == [[12 << 20, 6 << 20, 6 << 20], [6 << 20] * 3]


@pytest.mark.quick
def test_default_config_fits_every_gpu_in_shared_memory():
    kinds = (BF16, "ieee"), (FP16, "ieee"), (FP32, "ieee"), (FP32, "tf32")
    for gpu, (dtype, precision), layout, M, N in itertools.product(
        GPUS.values(), kinds, ("TN", "NN", "pointers"), (1, 1024, 1400, 8192), (8, 1024, 1400, 8192)
    ):
        problem = Problem("matmul", M, N, 4096, dtype, layout, gpu=gpu, precision=precision)
        for alone in (True, False):
            config = default_config(M, N, dtype, layout, gpu, alone, precision)
            with mock.patch.object(model, "_by_rule", lambda problem, config=config: config):
                reason = reject(problem, config)
            assert reason is None or reason.startswith("size: 8 columns"), (gpu, problem, reason)
