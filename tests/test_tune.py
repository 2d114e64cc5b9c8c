"""The tuner: what it tries and refuses, that all ranks agree on one winner, and that calls then use it.

Times come from a function of the configuration, so the winner is known; that they are measured is test_bench's affair.
"""

import argparse
import functools
import importlib
import json
import os
import re
import sys
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from transports import forget_choices

import tkernels
from tkernels import cli, model, tune_command, tuned
from tkernels.choice import gemm_config, overlap_config, problem_of, tuned_of
from tkernels.comm import runtime
from tkernels.configs import GemmConfig, OverlapConfig, with_room_for
from tkernels.gemm import fused_layout, layout_of, precision
from tkernels.launch import RankError
from tkernels.model import default_config
from tkernels.timing import Timing
from tkernels.tune import Job, Operands
from tkernels.variants import MOST, SLOWER, changed, describe, flat, parse_grid, product, variants

tune = importlib.import_module("tkernels.tune")  # tkernels.tune is its function
AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
FP32, E4M3 = torch.float32, torch.float8_e4m3fn
SHAPE = (64, 64, 64)


def times(us):
    """A measure() whose times are `us(config's change in words, rank)`, and which runs every call once, in step."""

    def measure(ctx, calls, iterations):
        timings = {}
        for name, call in calls.items():
            call()
            value = 10.0 if name == "library" else us(name, ctx.rank)
            timings[name] = Timing(value, value, value, None)
        return timings, {}

    return measure


def best_with(wanted: str, name: str, rank: int) -> float:
    return 50.0 if wanted in name else 100.0


ONE_SENDS = functools.partial(best_with, "num_comm=1")


def search(ctx, tmp_path, operation=AG, us=ONE_SENDS, shape=SHAPE, **options):
    with mock.patch.dict(os.environ, TKERNELS_CACHE=str(tmp_path)):
        return tune.tune(operation, *shape, FP32, ctx=ctx, measure=times(us), **options)


def problem_of_calls(ctx, operation=AG, shape=SHAPE):
    return problem_of(ctx, operation, *Job(operation, *shape, FP32).local(ctx.size), FP32, "TN")


def chosen(ctx, operation, shape=SHAPE):
    M, N, K = Job(operation, *shape, FP32).local(ctx.size)
    return overlap_config(ctx, operation, M, N, K, FP32, "TN")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("operation", [AG, RS, AR])
def test_the_fastest_is_used_from_then_on_and_found_by_the_next_context(ctx, tmp_path, operation):
    grid = {"num_comm": [1, 2], "group_m": [1, 2, 4]}
    us = functools.partial(best_with, "group_m=4, num_comm=1")
    try:
        outcome = search(ctx, tmp_path, operation, us, grid=grid)
        assert outcome.best.us == 50.0 and outcome.default.us == 100.0 and len(outcome.measured) >= 6
        assert (outcome.best.config.num_comm, outcome.best.config.gemm.group_m) == (1, 4)
        assert chosen(ctx, operation) == outcome.best.config
        problem = Operands(ctx, Job(operation, *SHAPE, FP32), 3)
        torch.testing.assert_close(problem.run(None), problem.run(outcome.default.config))
        with mock.patch.dict(os.environ, TKERNELS_CACHE=str(tmp_path)):
            with tkernels.init(ctx.group.process_group, heap_bytes=16 << 20, default=False) as other:
                assert chosen(other, operation) == outcome.best.config
        with tkernels.init(ctx.group.process_group, heap_bytes=16 << 20, default=False) as other:
            assert chosen(other, operation) == outcome.default.config
    finally:
        forget_choices(ctx)


@pytest.mark.ranks(2)
def test_how_rows_travel_is_not_tuned(ctx, tmp_path):
    """Ranks must agree on it: the copy engine, whose rows land, is tried where they do by rule."""
    outcome = search(ctx, tmp_path, RS, functools.partial(best_with, "num_comm=0"), grid={"num_comm": [0, 1]})
    assert outcome.best.config.num_comm and any("ranks: by rule chunks have" in reason for reason in outcome.refused)
    for name in ("chunk_rows", "landing"):
        with pytest.raises(ValueError, match=f"grid: {name} is not tuned: it follows by rule, the same on all ranks"):
            tune.tune(RS, *SHAPE, ctx=ctx, measure=None, grid={name: [1]})
    forget_choices(ctx)


@pytest.mark.ranks(2)
def test_a_call_that_was_made_before_is_made_with_the_new_configuration_too(ctx, tmp_path):
    operands = Operands(ctx, Job(AG, *SHAPE, FP32), 3)
    module = sys.modules["tkernels.all_gather_matmul"]
    try:
        operands.run(None)
        outcome = search(ctx, tmp_path, grid={"num_comm": [1]})
        assert outcome.best != outcome.default
        with mock.patch.object(module, "programs_of", wraps=module.programs_of) as programs_of:
            operands.run(None)
        assert programs_of.call_args.args[0] == outcome.best.config
    finally:
        forget_choices(ctx)


@pytest.mark.ranks(2)
def test_the_local_product_is_tuned_alike_for_whatever_context_is_the_default_one(ctx, tmp_path):
    us = functools.partial(best_with, "group_m=4")
    try:
        with tkernels.init(ctx.group.process_group, heap_bytes=16 << 20, default=False) as other:
            outcome = search(other, tmp_path, "matmul", us, grid={"group_m": [1, 4]}, remember=False)
            assert tkernels.current_context() is not other
            assert gemm_config(*SHAPE, FP32, "TN") == outcome.best.config
            assert outcome.best.config == replace(default_config(64, 64, FP32), group_m=4)
    finally:
        forget_choices(ctx)


@pytest.mark.ranks(1)
def test_local_products_go_by_the_records_that_their_process_has_read(ctx, tmp_path):
    us = functools.partial(best_with, "group_m=4")
    best = search(ctx, tmp_path, "matmul", us, grid={"group_m": [1, 4]}).best.config
    assert gemm_config(*SHAPE, FP32, "TN") == best  # whatever context it was tuned in
    forget_choices(ctx)
    default = gemm_config(*SHAPE, FP32, "TN")
    try:
        with mock.patch.dict(os.environ, TKERNELS_CACHE=str(tmp_path)):
            assert gemm_config(*SHAPE, FP32, "TN") == default != best
            forget_choices(ctx)
            assert gemm_config(*SHAPE, FP32, "TN") == best
    finally:
        forget_choices(ctx)


def rank_dependent(name: str, rank: int) -> float:
    """Each rank would choose another one."""
    return 50.0 if f"group_m={(1, 4)[rank]}" in name else 100.0


@pytest.mark.ranks(2)
def test_ranks_whose_clocks_disagree_agree_on_one_winner(ctx, tmp_path):
    try:
        outcome = search(ctx, tmp_path, us=rank_dependent, grid={"group_m": [1, 4]})
        assert len(set(ctx.group.gather(outcome.best.config))) == 1
        assert len(set(ctx.group.gather(chosen(ctx, AG)))) == 1
        assert len(set(ctx.group.gather(str(tuned_of(ctx))))) == 1
    finally:
        forget_choices(ctx)


@pytest.mark.ranks(2)
def test_ranks_with_different_files_need_not_choose_alike(ctx, tmp_path):
    """But their rows travel alike, so the results are right."""
    try:
        for rank in range(2):
            us = functools.partial(best_with, f"group_m={(1, 4)[rank]}, num_comm=1" if rank else "group_m=1")
            search(ctx, tmp_path / str(rank), us=us, grid={"group_m": [1, 4], "num_comm": [1, 2]})
        with mock.patch.dict(os.environ, TKERNELS_CACHE=str(tmp_path / str(ctx.rank))):
            with tkernels.init(ctx.group.process_group, heap_bytes=16 << 20, default=False) as other:
                assert chosen(other, AG).gemm.group_m == (1, 4)[ctx.rank]
                assert len(set(ctx.group.gather(chosen(other, AG).wire))) == 1
                operands = Operands(other, Job(AG, *SHAPE, FP32), 3)
                torch.testing.assert_close(operands.run(None), operands.run(model.choose(problem_of_calls(other))))
    finally:
        forget_choices(ctx)


@pytest.mark.ranks(2)
def test_without_a_gain_the_default_stays(ctx, tmp_path):
    try:
        outcome = search(
            ctx, tmp_path, us=lambda name, rank: 99.5 if "group_m=4" in name else 100.0, grid={"group_m": [4]}
        )
        assert outcome.best == outcome.default and outcome.best.change == "default"
    finally:
        forget_choices(ctx)


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_without_a_grid_tiles_are_surveyed_and_single_changes_tried(ctx, tmp_path):
    try:
        outcome = search(ctx, tmp_path, us=functools.partial(best_with, "put_block=8192"), budget_s=600)
        assert outcome.finished and outcome.best.config.put_block == 8192
        assert any(re.search(r"num_comm=\d", one.change) for one in outcome.measured)
        assert outcome.refused and all(re.match(r"[a-z ]+: ", reason) for reason in outcome.refused)
    finally:
        forget_choices(ctx)


@pytest.mark.ranks(2)
def test_the_budget_ends_a_search_early_with_what_was_found(ctx, tmp_path):
    grid = {"group_m": [*range(1, 12)]}  # a round of 8, and 3 that are left

    def us(name, rank):
        time.sleep(0.1)  # a round takes longer than the budget
        return best_with("group_m=2", name, rank)

    try:
        outcome = search(ctx, tmp_path, us=us, grid=grid, budget_s=0.1)
        assert not outcome.finished and outcome.best.config.gemm.group_m == 2
        assert outcome.refused["budget: the time was over before they were measured"] == 3
    finally:
        forget_choices(ctx)


def check_that_its_results_are_refused(ctx, tmp_path, wrong):
    """`wrong`, in place of Operands.run, spoils the results of group_m 4, which seems to be the fastest."""
    try:
        with mock.patch.object(Operands, "run", wrong):
            outcome = search(ctx, tmp_path, us=functools.partial(best_with, "group_m"), grid={"group_m": [1, 4]})
        assert outcome.best.config.gemm.group_m == 1
        assert outcome.refused["result: it is not the default's"] == 1
    finally:
        forget_choices(ctx)


@pytest.mark.ranks(2)
def test_a_candidate_that_computes_something_else_on_one_rank_is_refused(ctx, tmp_path):
    run = Operands.run

    def wrong(self, config):
        result = run(self, config)
        return result + (self.ctx.rank == 1 and config.gemm.group_m == 4)

    check_that_its_results_are_refused(ctx, tmp_path, wrong)


@pytest.mark.ranks(2)
def test_a_candidate_that_reads_what_an_earlier_call_left_is_refused(ctx, tmp_path):
    """Inboxes take turns, so a kernel that doesn't wait finds the rows of the call before the last."""
    run, past = Operands.run, []

    def stale(self, config):
        past.append(run(self, config))
        return past[-3] if config.gemm.group_m == 4 else past[-1]

    check_that_its_results_are_refused(ctx, tmp_path, stale)


@pytest.mark.ranks(2)
def test_a_result_that_cant_be_remembered_is_used_all_the_same(ctx, tmp_path):
    file = tmp_path / f"file{ctx.rank}"
    file.write_text("no folder")
    try:
        outcome = None
        if ctx.rank == 0:
            with pytest.warns(UserWarning, match="can't be remembered .*set TKERNELS_CACHE"):
                outcome = search(ctx, file, grid={"num_comm": [1]})
        else:
            outcome = search(ctx, file, grid={"num_comm": [1]})
        assert outcome.remembered is None and chosen(ctx, AG).num_comm == 1
    finally:
        forget_choices(ctx)


@pytest.mark.quick
@pytest.mark.parametrize(
    "job, said",
    [
        (Job("matmul_gather", 8, 8, 8), "there is no 'matmul_gather'; there are matmul, all_gather_matmul"),
        (Job(AG, 64, 65, 64), "N=65 doesn't divide by 2 ranks"),
        (Job(RS, 64, 65, 63), "K=63 doesn't divide by 2 ranks"),
        (Job(AG, 64, 64, 64, layout="NT"), "all_gather_matmul has no layout 'NT'; it takes TN, NN, pointers"),
        (Job(RS, 64, 64, 64, E4M3, "NN"), "matmul_reduce_scatter of float8_e4m3fn has no layout 'NN'; it takes TN"),
        (Job(RS, 64, 64, 48, E4M3), "float8 takes a K, of each rank, that is a multiple of 16, but here it is 24"),
    ],
)
def test_what_cant_be_tuned_is_refused_in_a_sentence(job, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        job.check(2)


@pytest.mark.quick
def test_on_one_rank_the_product_alone_is_tuned():
    for operation in ("all", None):
        asked = argparse.Namespace(operation=operation, shape="tiny", dtype="bf16", accum=None, layout="TN")
        assert {job.operation for job in tune_command.jobs_of(asked, 1)} == {"matmul"}
        assert {job.operation for job in tune_command.jobs_of(asked, 2)} == {"matmul", AG, RS, AR}


def in_fp8(ctx, operation: str, fast_accum: bool):
    """The configuration that calls of SHAPE get, as they look it up."""
    sizes = Job(operation, *SHAPE, E4M3).local(ctx.size)
    how = precision(E4M3, fast_accum)
    if operation == "matmul":
        return gemm_config(*sizes, E4M3, "TN", precision=how)
    return with_room_for(overlap_config(ctx, operation, *sizes, E4M3, "TN", False, how), torch.bfloat16, E4M3, how)


@pytest.mark.ranks(2)
def test_what_is_tuned_of_fp8_holds_for_fp8_alone_and_precise_sums_have_results_of_their_own(ctx, tmp_path):
    if not runtime.has_fp8():
        pytest.skip("the GPU has no FP8")
    for operation, field in (("matmul", "group_m"), (AG, "num_comm"), (RS, "num_comm")):
        try:
            others = chosen_by_name(ctx, operation)
            with mock.patch.dict(os.environ, TKERNELS_CACHE=str(tmp_path)):
                for fast_accum, value in ((True, 1), (False, 3)):
                    measure = times(functools.partial(best_with, f"{field}={value}"))
                    options = {"ctx": ctx, "measure": measure, "grid": {field: [value]}, "fast_accum": fast_accum}
                    outcome = tune.tune(operation, *SHAPE, E4M3, **options)
                    assert flat(outcome.best.config)[field] == value and outcome.remembered
                    # Until there are precise ones, those of fast sums count for both.
                    found = [flat(in_fp8(ctx, operation, fast))[field] for fast in (True, False)]
                    assert found == [1, value]
                    assert chosen_by_name(ctx, operation) == others
                saved, damaged = tuned.saved()
            assert not damaged
            names = [record["key"]["dtype"] for record in saved if record["key"]["operation"] == operation]
            assert names == ["float8_e4m3fn", "float8_e4m3fn precise"]
        finally:
            forget_choices(ctx)


def chosen_by_name(ctx, operation: str):
    """What calls in bf16 and in fp32 get."""
    sizes = Job(operation, *SHAPE).local(ctx.size)
    dtypes = torch.bfloat16, FP32
    if operation == "matmul":
        return [gemm_config(*sizes, dtype, "TN") for dtype in dtypes]
    return [overlap_config(ctx, operation, *sizes, dtype, "TN") for dtype in dtypes]


@pytest.mark.ranks(2)
def test_a_grid_of_what_is_no_field_is_refused_before_anything_is_measured(ctx):
    for operation, field in (("matmul", "num_comm"), (AG, "bogus")):
        with pytest.raises(ValueError, match=f"grid: {operation} has no field '{field}'; it has .*block_m"):
            tune.tune(operation, *SHAPE, ctx=ctx, measure=None, grid={field: [1]})


@pytest.mark.ranks(2)
def test_tune_refuses_what_is_no_size_dtype_budget_or_grid(ctx):
    for wrong, error, said in (
        ({"M": 2.5}, TypeError, "tune: M=2.5 must be a whole number"),
        ({"K": 0}, ValueError, "tune: K=0 must be at least 1"),
        ({"dtype": "bf16"}, TypeError, "tune: dtype='bf16' must be a torch.dtype"),
        ({"dtype": torch.int8}, TypeError, "tune: products are of torch.float32, .*e4m3fn, but dtype=torch.int8"),
        ({"dtype": torch.float8_e5m2}, TypeError, "tune: products are of .*e4m3fn, but dtype=torch.float8_e5m2"),
        ({"dtype": torch.float64}, TypeError, "tune: products are of torch.float32, .*, but dtype=torch.float64"),
        ({"budget_s": None}, TypeError, "tune: budget_s=None must be a number of seconds"),
        ({"budget_s": -1}, ValueError, "tune: budget_s=-1 must be at least 0"),
        ({"budget_s": float("nan")}, ValueError, "tune: budget_s=nan must be at least 0"),
        ({"grid": [1]}, TypeError, r"grid=\[1\] must be a dictionary"),
        ({"grid": {"block_m": 64}}, TypeError, "grid: block_m=64 must be a list of values"),
        ({"grid": {"block_m": [64, 17]}}, ValueError, "grid: block_m=17 must be a power of two from 16 to 1024"),
    ):
        with pytest.raises(error, match=f"^{said}"):
            tune.tune(**({"operation": AG, "M": 64, "N": 64, "K": 64, "ctx": ctx, "measure": None} | wrong))


@pytest.mark.ranks(2)
def test_the_outcome_says_where_calls_take_the_plain_path_whatever_is_tuned(ctx, tmp_path):
    try:
        outcome = search(ctx, tmp_path, grid={"num_comm": [1]})
        assert outcome.choice == tkernels.explain(AG, *SHAPE, FP32, ctx=ctx)
        for path in ("fused", "plain"):
            outcome.choice = tkernels.paths.Choice(path, "8 bytes are too few to hide")
            said = "; used with path='fused' alone, for calls of this size are plain: 8 bytes are too few to hide"
            assert tune_command.summary(outcome).endswith(said) == (path == "plain")
    finally:
        forget_choices(ctx)


@pytest.mark.ranks(2)
def test_operands_lie_in_memory_as_their_layout_says_and_the_result_is_for_calls_with_such_operands(ctx, monkeypatch):
    monkeypatch.setattr("tkernels.gemm.stages_rows", lambda *_: False)  # for whose calls no rows are "pointers"
    for layout in ("TN", "NN", "NT", "TT", "pointers"):
        problem = Job(RS, 64, 32, 64, torch.bfloat16, layout)
        operands = Operands(ctx, problem, 0)
        assert layout_of(operands.x, operands.w) == layout == problem.key(2)[-1]
    for operation, M, N, K, layout in [  # TMA can't take these
        (RS, 64, 33, 64, "TN"), (AR, 64, 32, 66, "NN"), (AG, 64, 66, 64, "TN"), (RS, 63, 32, 64, "TT"),
        ("matmul", 64, 32, 63, "TN"), (AG, 1, 64, 63, "NN"),
    ]:  # fmt: skip
        problem = Job(operation, M, N, K, torch.bfloat16, layout)
        operands = Operands(ctx, problem, 0)
        assert fused_layout(operands.x, operands.w) == "pointers" == problem.key(2)[-1], problem
    assert Job("matmul", 64, 33, 64, torch.bfloat16, "TN").key(2)[-1] == "TN"  # whose result it stores by elements


@pytest.mark.ranks(2)
def test_what_tma_cant_take_is_tuned_for_the_calls_that_go_by_pointers(ctx, tmp_path):
    try:
        outcome = search(ctx, tmp_path, shape=(64, 68, 64), grid={"num_comm": [1]})
        assert outcome.best.config.num_comm == 1
        assert overlap_config(ctx, AG, 64, 34, 64, FP32, "pointers") == outcome.best.config
    finally:
        forget_choices(ctx)


# Candidates: of an H200, whatever runs here.

BF16 = torch.bfloat16
PROBLEM = model.Problem(AG, 8192, 14336, 8192, BF16, ranks=4)


@pytest.mark.quick
@pytest.mark.parametrize("operation", ["matmul", AG, RS, AR])
@pytest.mark.parametrize("M", [8192, 2048, 256])
def test_variants_are_the_possible_ones_with_the_least_predictions(operation, M):
    problem = replace(PROBLEM, operation=operation, M=M)
    default = default_config(M, problem.N, BF16) if operation == "matmul" else model.choose(problem)
    found, refused = variants(default, problem)
    assert 8 <= len(found) <= MOST and len(set(found)) == len(found)
    assert all(model.reject(problem, config) is None for config in found)
    tiles = {(gemm.block_m, gemm.block_n) for gemm in (getattr(config, "gemm", config) for config in found)}
    assert len(tiles) >= 3 and (128, 256) in tiles
    least = min(model.predict(problem, config).seconds for config in found)
    single = [config for config in found if sum(b != flat(default)[a] for a, b in flat(config).items()) == 1]
    others = [config for config in found if config not in single]
    assert all(model.predict(problem, config).seconds <= SLOWER * least for config in others) and single
    assert all(re.match(r"[a-z ]+: ", reason) for reason in refused)
    if operation != "matmul":
        assert {config.wire for config in found} == {model.wire_of(problem)}
        assert len({config.num_comm for config in found}) >= 2


@pytest.mark.quick
@pytest.mark.parametrize("operation", ["matmul", AG, RS, AR])
def test_variants_of_tf32_are_of_as_many_bytes_a_tile_and_ieees_of_one_size(operation):
    for how in ("tf32", "ieee"):
        problem = replace(PROBLEM, operation=operation, dtype=FP32, precision=how)
        by_rule = default_config(problem.M, problem.N, FP32, gpu=problem.gpu, precision=how)
        found, _ = variants(by_rule if operation == "matmul" else model.choose(problem), problem)
        tiles = {(gemm.block_m, gemm.block_n, gemm.block_k) for gemm in (getattr(each, "gemm", each) for each in found)}
        assert tiles == {(64, 64, 16)} if how == "ieee" else len(tiles) >= 3 and (128, 256, 32) in tiles, found
        assert all(model.reject(problem, config) is None for config in found)


@pytest.mark.quick
def test_a_grid_is_the_product_of_its_values():
    default = OverlapConfig(GemmConfig(), num_comm=12, landing=True)
    grid = parse_grid(["num_comm=6,12", "num_stages=2,3"])
    found, refused = product(default, grid, PROBLEM)
    assert [describe(config, default) for config in found] == [
        "num_stages=2, num_comm=6", "num_comm=6", "num_stages=2", "default",
    ]  # fmt: skip
    assert not refused
    assert changed(default, {"max_programs": 100}).gemm.max_programs is None
    with pytest.raises(ValueError, match="split=x: give whole numbers, as in split=1,2"):
        parse_grid(["split=x"])


# The command.


def command(arguments: str, capsys) -> str:
    assert cli.main(["tune", *arguments.split()]) == 0
    return capsys.readouterr().out


def test_the_command_tunes_lists_exports_and_clears(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TKERNELS_CACHE", str(tmp_path / "cache"))
    lines = tmp_path / "outcome.jsonl"
    asked = f"all --shape 32x32x32 --ranks 1 --dtype fp32 --grid group_m=1,2 --json {lines}"
    said = command(asked, capsys)
    assert said.startswith("one rank multiplies alone, whatever the operation: matmul is tuned, and the others are")
    assert "[1/1] matmul 32x32x32 float32 TN: " in said and "path='fused'" not in said
    (outcome,) = map(json.loads, lines.read_text().splitlines())
    assert outcome["problem"]["M"] == 32 and len(outcome["measured"]) >= 2

    assert "32x32x32 float32 TN" in " ".join(command("--list", capsys).split())
    (exported,) = map(json.loads, command("--export -", capsys).splitlines())
    assert exported["key"]["operation"] == "matmul" and exported["key"]["gpu"] == tuned.place(1, "local")["gpu"]
    with open(tuned.path(), "a") as records:
        records.write("{\n")
    assert "tuned.jsonl:2 is ignored" in "".join(command("--list", capsys).split("\n"))
    assert command("--clear", capsys).startswith("1 records removed")
    assert command("--export -", capsys) == ""
    said = command("matmul --shape 32x32x32 --ranks 1 --dtype tf32 --grid group_m=1,2", capsys)
    assert "[1/1] matmul 32x32x32 float32 tf32 TN: " in said and precision(FP32) == "ieee"
    (exported,) = map(json.loads, command("--export -", capsys).splitlines())
    assert exported["key"]["dtype"] == "float32 tf32"
    command("--clear", capsys)
    tuned.path().write_text("mine")
    assert cli.main(["tune", "--clear"]) == 1 and tuned.path().read_text() == "mine"
    assert "is not removed, since it holds no records" in " ".join(capsys.readouterr().out.split())


def test_tune_list_shows_the_oddest_records_and_no_escape_sequence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TKERNELS_CACHE", str(tmp_path / "[/blue]\x1b[31m"))
    odd = {"operation": ["matmul"]}, {"operation": "\x1b[2Jred[/blue]"}, {"ranks": {}, "gpu": 5, "K": "\ud800"}
    for number, key in enumerate(odd):
        record = {"key": tuned.place(1, "local") | {"operation": "matmul"} | key}
        record |= ({"us": "fast", "default_us": 10**400}, {"us": None, "date": []}, {"us": float("nan")})[number]
        tuned.save(record)
    with open(tuned.path(), "a") as records:
        records.write("\x1b[2J\n")
    said = command("--list", capsys)
    assert "\x1b" not in said and "fast" in said and "['matmul']" in said and "{} x 5" in said
    assert r"\x1b[2Jred[/blue]" in "".join(said.split())
    assert len(command("--export -", capsys).splitlines()) == 3
    assert command("--clear", capsys).startswith("3 records removed") and "\x1b" not in command("--clear", capsys)


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, said",
    [
        ("gemms", "there is no operation 'gemms'; there are matmul"),
        ("all_gather_matmul --shape huge --ranks 2", "there is no shape 'huge' for all_gather_matmul: give MxNxK"),
        ("all_gather_matmul --shape tiny,rs-a --ranks 2", "there is no shape 'rs-a' for all_gather_matmul"),
        ("matmul --shape small --ranks 1", "there is no shape 'small' for matmul: give MxNxK, or one of tiny, "),
        ("--shape huge --ranks 2", "there is no shape 'huge' for matmul or all_gather_matmul or"),
        ("matmul --shape 64x0x64 --ranks 1", "64x0x64: M, N and K must be at least 1"),
        ("all_gather_matmul --shape 64x65x64 --ranks 2", "N=65 doesn't divide by 2 ranks"),
        ("all_gather_matmul --shape tiny --ranks 1", "one rank multiplies alone, so all_gather_matmul is matmul there"),
        ("matmul --shape 64x64x64 --ranks 1 --grid num_comm=1", "matmul has no field 'num_comm'; it has block_m, "),
        ("--shape 64x64x64 --ranks 2 --grid speed=1", "has no field 'speed'; it has "),
        ("matmul --shape 64x64x64 --ranks 1 --grid block_m=17", "block_m=17 must be a power of two from 16 to 1024"),
        ("matmul --ranks 1 --grid block_m=64 block_m=32", "there are values for block_m already; give all"),
        ("matmul --ranks 1 --shape=", "there is no shape '' for matmul"),
    ],
)
def test_the_command_refuses_in_a_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", *arguments.split()])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_what_no_shape_can_be_tuned_with_is_said_once(capsys):
    transport = "peer" if runtime.RUNTIME == "simulated" else "simulated"
    assert cli.main(f"tune matmul --shape 32x32x32,16x16x16 --ranks 1 --transport {transport}".split()) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"tkernels: init: transport='{transport}' can't reach every rank")


class RanksThatFail:
    """Stand for the ranks, and keep what they were given time for."""

    asked = []

    def __init__(self, ranks, ctx_options):
        pass

    def run(self, fn, *args, timeout_s=None):
        if fn is tune_command.search:
            self.asked.append((args[1], timeout_s))
            raise RankError(0, "died", "")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.mark.quick
def test_ranks_have_time_for_the_budget_and_for_what_it_doesnt_count(monkeypatch):
    monkeypatch.setattr(importlib.import_module("tkernels.launch"), "RankPool", RanksThatFail)
    assert cli.main("tune matmul --shape 32x32x32 --ranks 1 --budget 900".split()) == 1
    assert RanksThatFail.asked == [(900.0, 900.0 + tune_command.SHAPE_TIMEOUT_S)]


@pytest.mark.quick
def test_named_shapes_are_tuned_the_largest_product_first():
    asked = argparse.Namespace(operation=AG, shape="tiny,tiny-wide,64x128x64", dtype="bf16", accum=None, layout="TN")
    sizes = [(job.M, job.N, job.K) for job in tune_command.jobs_of(asked, 2)]
    assert sizes == [(128, 96, 160), (64, 128, 64), (64, 64, 64)]


def test_tune_refuses_sizes_in_float8_that_torch_beside_it_does_not_take():
    with pytest.raises(ValueError, match="float8 takes an N, of each rank, .* but here it is 24"):
        Job(AG, 64, 48, 32, torch.float8_e4m3fn).check(2)
    Job(AG, 64, 64, 32, torch.float8_e4m3fn).check(2)
