"""The bench: what it writes, what it refuses, and how it turns wrong arguments away."""

import functools
import importlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from transports import TRANSPORTS, simulated_only, torch_scales_rows

from tkernels import shapes, timing
from tkernels.comm import runtime


def load(checkout: Path, name: str):
    """A module of the bench, which is imported from the repository's root alone."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(f"bench.{name}")


E4M3 = torch.float8_e4m3fn


def a_case(checkout: Path, op: str, M: int = 64, layout: str = "TN", fast_accum: bool | None = None):
    dtype = torch.bfloat16 if fast_accum is None else E4M3
    return load(checkout, "problem").Case(op, "tiny", M, 64, 64, dtype, layout, fast_accum)


def measured(ctx, checkout, op, M=64, layout="TN", fast_accum=None, **options) -> dict:
    harness, roofs = load(checkout, "harness"), load(checkout, "roofs")
    return harness.run_case(ctx, a_case(checkout, op, M, layout, fast_accum), 2, roofs.Roofs(), **options)


FIELDS = {
    "op", "shape", "layout", "M", "N", "K", "ranks", "dtype", "fast_accum", "runtime", "transport", "iterations",
    "warmups",
    "config", "ways", "path", "flops", "hbm_bytes", "link_in_bytes", "link_out_bytes", "wire_us",
    "overlap_efficiency", "ours_flop_per_s",
    *(f"{name}_{what}us" for name in ("ours", "cublas", "nccl", "serial", "torch") for what in ("", "p10_", "p90_")),
    *(f"{name}_host_us" for name in ("ours", "cublas", "nccl", "serial", "torch")),
    *(f"speedup_over_{name}" for name in ("cublas", "nccl", "serial", "torch")),
    "peer_copy_bytes_per_s", "cublas_flop_per_s", "hbm_copy_bytes_per_s", "unavailable",
    "gpu", "num_gpus", "cpu", "python_version", "torch_version", "triton_version", "nccl_version", "nvshmem_version",
    "nvshmem4py_version", "commit", "dirty", "source_sha256", "date",
}  # fmt: skip


@pytest.mark.ranks(2)
def test_candidates_are_measured_in_changing_orders_which_all_ranks_share(ctx):
    """How long one takes depends on what heated the chip just before."""
    ran, names = [], "abcd"
    timing.measure(ctx, {name: functools.partial(ran.append, name) for name in names}, 20)
    ran = ran[-20 * len(names) :]
    assert all(sorted(ran[at : at + 4]) == list(names) for at in range(0, len(ran), 4))
    assert set(itertools.permutations(names, 2)) <= set(itertools.pairwise(ran))
    assert all(theirs == ran for theirs in ctx.group.gather(ran))


class Alone:
    """A rank's context, as far as a measurement asks it; and its group."""

    device = torch.device("cpu")
    barrier = gather = staticmethod(lambda *value: list(value))
    group = property(lambda self: self)


@pytest.mark.quick
def test_nothing_that_was_measured_with_is_kept():
    """On a GPU that is a buffer larger than the L2 cache, beside the context."""
    ctx = Alone()
    assert timing.measure(ctx, {"nothing": int}, 1)[0]["nothing"].us >= 0
    kept = weakref.ref(ctx)
    del ctx
    assert kept() is None


def test_the_command_prints_a_table_and_writes_a_line_with_all_fields(checkout, tmp_path):
    path = tmp_path / "out.jsonl"
    command = "-m bench.run all_gather_matmul --shape tiny --ranks 2 --iterations 2 --json".split()
    done = subprocess.run(
        [sys.executable, *command, str(path)], cwd=checkout, env={**os.environ, "TKERNELS_RUNTIME": "simulated"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "simulated runtime: times are the interpreter's" in done.stdout
    (line,) = map(json.loads, path.read_text().splitlines())
    assert set(line) == FIELDS
    assert (line["op"], line["shape"], line["ranks"], line["dtype"]) == ("all_gather_matmul", "tiny", 2, "bfloat16")
    assert 0 < line["ours_p10_us"] <= line["ours_us"] <= line["ours_p90_us"]
    assert line["link_in_bytes"] == 32 * 64 * 2
    assert line["config"]["num_comm"] >= 1
    assert {line[f"{name}_us"] for name in ("cublas", "nccl", "serial", "torch", "wire")} == {None}


def test_the_command_measures_fp32_as_tf32_and_leaves_torchs_switch_as_it_was(checkout, tmp_path):
    path, switch = tmp_path / "out.jsonl", torch.backends.cuda.matmul
    before = switch.fp32_precision, dict(os.environ)
    asked = f"gemm --shape 32x32x32 --ranks 1 --dtype tf32 --iterations 1 --json {path}"
    assert load(checkout, "run").main(asked.split()) == 0
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["dtype"] == "tf32" and (switch.fp32_precision, dict(os.environ)) == before
    records = load(checkout, "model")
    problem = records.problem_of(line | {"gpu": "NVIDIA H200"})
    assert (problem.dtype, problem.precision) == (torch.float32, "tf32")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["gemm", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather", "all_reduce"])
def test_right_results_are_measured(ctx, checkout, op):
    line = measured(ctx, checkout, op)
    assert "refused" not in line, line
    assert line["ours_us"] > 0
    fused = op in ("matmul_reduce_scatter", "matmul_all_reduce")
    assert list(line["ways"]) == ([*TRANSPORTS, "interleaved", "copy_engine", "plain"] if fused else [])
    assert all(way["us"] > 0 and way["repeatable"] for way in line["ways"].values())
    assert [way["sms"] is None for way in line["ways"].values()] == [name == "plain" for name in line["ways"]]
    assert line["path"] in (("fused", "plain") if fused else ("kernel",) if op == "gemm" else (None,))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "reduce_scatter"])
def test_a_single_row_is_measured_though_no_rank_number_divides_it(ctx, checkout, op):
    line = measured(ctx, checkout, op, M=1)
    assert "refused" not in line, line


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_layouts_of_the_backward_are_measured(ctx, checkout, layout):
    problem = load(checkout, "problem").Problem(ctx, a_case(checkout, "gemm", layout=layout), "normal")
    assert (problem.x.stride(), problem.w.stride()) == ((1, 64) if layout == "NT" else (64, 1), (1, 64))
    for op in ("gemm", "matmul_reduce_scatter"):
        assert "refused" not in measured(ctx, checkout, op, layout=layout)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["gemm", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_products_of_fp8_are_measured_with_a_scale_a_row(ctx, checkout, op):
    if not runtime.has_fp8():
        pytest.skip("the GPU has no FP8")
    for fast_accum in (True, False):
        line = measured(ctx, checkout, op, M=33, fast_accum=fast_accum)
        assert "refused" not in line, line
        assert (line["dtype"], line["fast_accum"]) == ("float8_e4m3fn", fast_accum)
        # Bytes of the rows that arrive at most, and of the scale of each.
        assert line["link_in_bytes"] == {"gemm": 0, "all_gather_matmul": 17 * 68}.get(op, line["link_in_bytes"])
        assert "plain" in line["ways"] or op == "gemm"

    def scaled_twice(problem):
        return problem.ours() * (1 + (problem.values == "normal"))

    def of_other_scales(problem):
        scale, problem.x_scale = problem.x_scale, problem.x_scale.flip(0)
        result, problem.x_scale = problem.ours(), scale
        return result

    for wrong, values in ((scaled_twice, "normal"), (of_other_scales, "integers")):
        reason = measured(ctx, checkout, op, M=33, fast_accum=True, ours=wrong)["refused"]
        assert f"elements are off on {values} operands" in reason


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fp8", [None, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("M", [64, 1])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather"])
def test_baselines_compute_what_we_compute(ctx, checkout, op, M, fp8):
    """Without torch's fused operators, which exist on GPUs only; gloo stands in for NCCL where there is none."""
    if fp8 and (op == "all_gather" or not torch_scales_rows()):
        pytest.skip("FP8 is measured in products, where there is any")
    baselines, harness, problem = (load(checkout, name) for name in ("baselines", "harness", "problem"))
    here = problem.Problem(ctx, a_case(checkout, op, M, fast_accum=fp8), "normal")
    make = baselines._gathers if "gather" in op else baselines._reductions
    calls = make(here, ctx.group.process_group)
    results = {name: call() for name, call in calls.items() if name != "torch"}
    whole = {name: result for name, result in results.items() if result is not None}
    assert set(whole) == {"nccl"} if op == "all_gather" else "serial" in whole
    assert {name: harness.far(here, result) for name, result in whole.items()} == dict.fromkeys(whole)
    if here.truth()[0].shape[0]:
        assert harness.far(here, next(iter(whole.values())) * 1.05).startswith("its result is wrong")


@pytest.mark.ranks(2)
@simulated_only
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_torchs_scaled_operators_take_the_arguments_of_the_baselines(ctx, checkout, op):
    """By the door to them: what torch itself has without a GPU gathers no FP8."""
    if not torch_scales_rows():
        pytest.skip("the products of the baselines are torch's")
    from torch.distributed.device_mesh import init_device_mesh

    from tkernels.layers.doors import symm_mem

    baselines, harness, problem = (load(checkout, name) for name in ("baselines", "harness", "problem"))
    here = problem.Problem(ctx, a_case(checkout, op, fast_accum=True), "normal")
    calls = (baselines._gathers if "gather" in op else baselines._reductions)(here, ctx.group.process_group)
    with symm_mem.install(init_device_mesh(ctx.device.type, (ctx.size,), mesh_dim_names=("tp",))):
        assert harness.far(here, calls["torch"]()) is None


@pytest.mark.ranks(2)
def test_a_way_that_is_wrong_is_refused_and_one_that_is_missing_is_named(ctx, checkout):
    ways, problem = load(checkout, "ways"), load(checkout, "problem")
    transport = TRANSPORTS[0]
    before = dict(ways.WAYS[ctx.runtime])
    right = problem.Problem.with_config
    try:
        ways.WAYS[ctx.runtime]["other"] = ways.Way(transport, {"num_comm": 1}, repeatable=False)
        ways.WAYS[ctx.runtime]["future"] = ways.Way(transport, {"by_courier": True})
        line = measured(ctx, checkout, "all_gather_matmul")
        assert line["ways"]["other"]["sms"] == 1 and not line["ways"]["other"]["repeatable"]
        assert line["ways"]["copy_engine"]["sms"] == 0 and line["ways"]["copy_engine"]["us"] > 0
        assert "by_courier" in line["unavailable"]["future"] and "future" not in line["ways"]
        problem.Problem.with_config = lambda self, config, ctx: right(self, config, ctx) + (config.num_comm == 1)
        line = measured(ctx, checkout, "all_gather_matmul")
        assert "other gives another result than ours" in line["refused"]
        ways.WAYS[ctx.runtime]["other"] = ways.Way(transport, {"num_comm": 10_000})
        line = measured(ctx, checkout, "all_gather_matmul")
        assert "num_comm=10000 leaves no program that computes" in line["unavailable"]["other"]
        assert list(line["ways"]) == [*TRANSPORTS, "copy_engine", "plain"]  # only reductions are interleaved
    finally:
        problem.Problem.with_config = right
        ways.WAYS[ctx.runtime] = before


def off_by_one_rounding(problem):
    result = problem.ours()
    if problem.ctx.rank == 1:
        result[3, 5] = torch.nextafter(result[3, 5].float(), torch.tensor(9e9, device=result.device)).bfloat16() + 1
    return result


def not_a_number(problem):
    result = problem.ours()
    result[-1, -1] = torch.nan
    return result


def transposed(problem):
    return problem.ours().t()


def wrong_on_real_numbers(problem):
    result = problem.ours()
    return result if problem.values == "integers" else result + 1


class WrongOnceChecked:
    """Right in the two checks and wrong afterwards, as a race would be."""

    calls = 0

    def __call__(self, problem):
        self.calls += 1
        result = problem.ours()
        return result if self.calls <= 2 else result + 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "ours, reason",
    [
        (off_by_one_rounding, "rank 1: 1 of 2048 elements are off on integers operands; at (3, 5) got"),
        (not_a_number, "elements are off on integers operands; at (31, 63) got nan"),
        (transposed, "not torch.bfloat16 (32, 64)"),
        (wrong_on_real_numbers, "elements are off on normal operands"),
        (WrongOnceChecked(), "the result of a timed call differs from that of the checked call"),
    ],
    ids=["one element on one rank", "nan", "shape", "real numbers only", "after the check"],
)
def test_a_wrong_result_is_refused(ctx, checkout, ours, reason):
    line = measured(ctx, checkout, "matmul_reduce_scatter", ours=ours)
    assert set(line) == {"op", "shape", "layout", "refused"}
    assert reason in line["refused"]


class RanksThat:
    """Stands for the ranks: `measure_all` gets this answer for every case."""

    def __init__(self, answer, roofs):
        self.answer, self.roofs = answer, roofs

    def run(self, fn, *args, timeout_s):
        return [self.answer(*args) if fn.__name__ == "run_case" else self.roofs]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.mark.quick
@pytest.mark.parametrize("how", ["refused", "ranks failed", "no time left"])
def test_a_case_without_a_number_is_named_and_gives_exit_code_1(checkout, tmp_path, capsys, monkeypatch, how):
    run, roofs = load(checkout, "run"), load(checkout, "roofs")
    from tkernels.launch import RankError

    def answer(case, iterations, roofs):
        if how == "refused":
            return {"op": case.op, "shape": case.shape, "refused": "rank 1: 1 of 64 elements are off"}
        raise RankError(1, "died", "", "rank 1 of 2 exited with code 3")

    monkeypatch.setattr(run, "open_ranks", lambda args: RanksThat(answer, roofs.Roofs()))
    path = tmp_path / "out.jsonl"
    budget = ["--budget", "1e-9"] if how == "no time left" else []
    assert run.main(["gemm", "--shape", "tiny", "--ranks", "1", "--json", str(path), *budget]) == 1
    assert not path.exists()
    reason = "the budget of 1e-09 s was used up before it" if budget else "rank 1"
    assert f"gemm tiny: no number is reported: {reason}" in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("matmul", "'matmul' is no operation"),
        ("gemm --shape nope", "--shape: there is no shape 'nope' for gemm: give MxNxK, or one of"),
        ("gemm --shape tiny --ranks 0", "at least one rank is needed"),
        ("gemm --shape tiny --iterations 0 --ranks 1", "measure at least once"),
        ("gemm --shape tiny --dtype int8", "invalid choice: 'int8'"),
        ("gemm,matmul --shape tiny", "'matmul' is no operation"),
        ("gemm --shape tiny --ranks 1 --layout TT", "--layout TT: there are TN, NN, NT"),
        ("gemm --shape tiny --ranks 1 --budget 0", "--budget 0: give seconds"),
        ("gemm --shape tiny --ranks 1 --accum fast", "--accum fast is of fp8, and --dtype is bf16"),
        ("gemm --shape tiny --ranks 1 --dtype fp8 --accum slow", "--accum slow: there are fast, precise"),
        ("gemm --shape tiny --ranks 1 --dtype fp8 --layout NN", "tiny NN: float8 is measured in products, with K"),
        ("all_gather --shape tiny --ranks 1 --dtype fp8", "all_gather tiny TN: float8 is measured in products"),
        ("gemm --shape 64x64x24 --ranks 1 --dtype fp8", "float8 takes a K, of each rank, that is a multiple of 16"),
        ("gemm --shape small --ranks 1", "--shape: there is no shape 'small' for gemm"),
        ("gemm --shape 64x0x64", "--shape: 64x0x64: M, N and K must be at least 1"),
    ],
)
def test_wrong_arguments_get_a_sentence_and_exit_code_2(checkout, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as exit:
        load(checkout, "run").main(arguments.split())
    assert exit.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.quick
@pytest.mark.parametrize("arguments", ["run gemm", "training", "sharding", "leases", "quantize"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(checkout, capsys, arguments):
    name, *arguments = arguments.split()
    with pytest.raises(SystemExit) as exit:
        load(checkout, name).main([*arguments, "--json", "/no/such/folder/out.jsonl"])
    assert exit.value.code == 2
    assert "can't write to '/no/such/folder/out.jsonl': there is no folder" in capsys.readouterr().err


@simulated_only
def test_quantize_is_measured_beside_a_copy_and_a_wrong_result_is_not(checkout, tmp_path, capsys, monkeypatch):
    bench, records, path = load(checkout, "quantize"), load(checkout, "records"), tmp_path / "quantize.jsonl"
    assert bench.main(["--json", str(path)]) == 0 and "geometric mean of the shares" in capsys.readouterr().out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["case"] for line in lines] == list(bench.READS) and records.read(path) == []
    for line in lines:
        moved = (2 * bench.READS[line["case"]] + 1) / line["us"]
        assert line["share"] == pytest.approx(moved / (4 / line["copy_us"])) and line["torch_us"] > 0
    wrong = {"row": (lambda: [torch.ones(2)], lambda: [torch.zeros(2)])}
    monkeypatch.setattr(bench, "cases", lambda *_: wrong)
    with pytest.raises(ArithmeticError, match="differs from its reference"):
        bench.run(mock.Mock(device="cpu"), (2, 2))


@pytest.mark.quick
def test_shapes_are_given_as_names_or_as_sizes(checkout):
    _, cases = load(checkout, "run").parse("gemm,all_reduce --shape 64x32x96,tiny --ranks 1 --layout TN,NN".split())
    sizes = [(case.shape, case.M, case.N, case.K, case.layout) for case in cases if case.op == "gemm"]
    assert sizes[:2] == [("64x32x96", 64, 32, 96, "TN"), ("64x32x96", 64, 32, 96, "NN")]
    assert [case.shape for case in cases if case.op == "all_reduce"] == ["64x32x96", "tiny"]


@pytest.mark.quick
def test_fp8_is_measured_fast_and_precise_as_a_product_and_fast_in_fused_operations(checkout):
    parse = load(checkout, "run").parse
    _, cases = parse("all --shape tiny --ranks 1 --dtype fp8".split())
    kinds = [(case.op, case.fast_accum) for case in cases]
    fused = [(op, True) for op in load(checkout, "records").FUSED]
    assert kinds == [("gemm", True), ("gemm", False), *fused] and {case.dtype for case in cases} == {E4M3}
    _, cases = parse("all_gather_matmul --shape tiny --ranks 1 --dtype fp8 --accum precise".split())
    assert [case.fast_accum for case in cases] == [False]


@pytest.mark.quick
def test_large_shapes_and_uneven_shards_are_refused_before_any_rank_starts(checkout, capsys):
    if runtime.RUNTIME != "simulated":
        pytest.skip("about the simulated runtime")
    main = load(checkout, "run").main
    for arguments, sentence in {
        "gemm --shape all": "would take the interpreter hours",
        "all_gather_matmul --shape tiny --ranks 3": "N=64 doesn't divide by 3 ranks",
        "gemm --shape tiny --transport peer": "--transport peer does not exist on the simulated runtime",
    }.items():
        with pytest.raises(SystemExit) as exit:
            main(arguments.split())
        assert exit.value.code == 2
        assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.quick
def test_torchrun_and_ranks_must_agree(checkout, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit):
        load(checkout, "run").main(["gemm", "--shape", "tiny", "--ranks", "2"])
    assert "torchrun started 4 processes" in capsys.readouterr().err


@pytest.mark.quick
def test_the_widest_table_fits_120_columns(checkout):
    from rich.console import Console

    run = load(checkout, "run")
    line = dict.fromkeys(FIELDS, 21703.0) | {
        "op": "matmul_reduce_scatter", "shape": "llama70b-gate-up-4k", "gpu": "NVIDIA H200", "ranks": 8,
        "dtype": "bfloat16", "transport": "nvshmem", "iterations": 20,
        **{f"speedup_over_{name}": 10.25 for name in ("cublas", "nccl", "serial", "torch")}, "overlap_efficiency": 0.98,
    }  # fmt: skip
    out = io.StringIO()
    Console(width=run.WIDTH, file=out).print(run.table("matmul_reduce_scatter", [line]))
    assert "…" not in out.getvalue()
    assert "llama70b-gate-up-4k" in out.getvalue() and "21703-21703" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 120


def loopback(checkout: Path, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bench.loopback", *map(str, arguments)], cwd=checkout,
        env={**os.environ, "TKERNELS_RUNTIME": "simulated"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_loopback_compares_a_checkout_with_itself_in_every_way(checkout, tmp_path, ranks):
    path = tmp_path / "out.jsonl"
    done = loopback(checkout, ".", ".", "--shapes", "tiny", "--ranks", ranks, "--rounds", 1, "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ways = load(checkout, "loopback").WAYS
    assert [(line["op"], line["way"]) for line in lines] == [
        (op, way)
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
        for way in (ways[:-1] if op == "all_gather_matmul" else ways)
    ]
    assert all(line["same_bits"] and line["same_config"] and line["before_us"] > 0 for line in lines)


def test_loopback_does_not_measure_a_checkout_with_a_wrong_result(checkout, tmp_path):
    names = {"comm", "layers", "tkernels", "bench"}
    omitted = {each.name for each in checkout.iterdir()} - names | {"results", "__pycache__"}
    shutil.copytree(checkout, tmp_path / "other", symlinks=True, ignore=lambda _, found: omitted & set(found))
    with (tmp_path / "other" / "bench" / "problem.py").open("a") as file:
        file.write("\nright = Problem.with_config\n")
        file.write("Problem.with_config = lambda self, *given: right(self, *given) + 100\n")
    options = "--ops matmul_reduce_scatter --ways programs --shapes tiny --rounds 1".split()
    done = loopback(checkout, ".", tmp_path / "other", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{tmp_path / 'other'}: ValueError: the result is wrong: its relative error is" in done.stdout
    assert "1 failed" in done.stdout


@pytest.mark.quick
def test_loopback_calls_a_checkout_slower_only_beyond_the_spread(checkout, capsys):
    module = load(checkout, "loopback")
    case = {"op": "matmul_reduce_scatter", "ranks": 2, "shape": "rs-a", "way": "landing", "gpu": "NVIDIA H200"}
    case |= {"same_bits": True, "same_config": True}

    def line(*rounds, **others):
        return case | module.compare([[100.0, 100.0]] * len(rounds), [[each] for each in rounds]) | others

    steady, noisy = line(103.0, 103.0, 103.0), line(90.0, 103.0, 120.0)
    level = line(101.0, 101.0, 101.0, way="programs")
    assert (steady["before_us"], steady["after_us"], steady["ratio"], steady["spread"]) == (100.0, 103.0, 1.03, 0.0)
    assert (noisy["ratio"], noisy["spread"]) == (1.03, 0.075)
    assert [module.is_slower(each) for each in (steady, noisy, level)] == [True, False, False]
    assert not module.is_slower(steady | {"gpu": None})
    assert module.summarize([level, steady]) == 1
    first, title, *worst = capsys.readouterr().out.splitlines()
    assert first.startswith("2 cases: geometric mean 1.0200") and "1 slower" in first
    assert [each.split()[:4] for each in worst] == [
        ["matmul_reduce_scatter", "2", "rs-a", way] for way in ("landing", "programs")
    ]
    assert worst[0].endswith("slower") and max(map(len, worst)) <= 120


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (". /no/such/folder", "/no/such/folder is no checkout: it has no tkernels/__init__.py"),
        (". . --ops gemm", "--ops: 'gemm' is unknown; there are all_gather_matmul"),
        (". . --ways plain", "--ways: 'plain' is unknown; there are programs"),
        (". . --shapes nope", "--shapes: there is no shape 'nope'"),
        (". . --shapes tiny --ranks 1", "--ranks 1: give numbers of 2 or more"),
        (". . --shapes 64x64x65 --ops matmul_all_reduce", "K=65 doesn't divide by 2 ranks"),
        (". . --rounds 0", "--rounds 0: measure at least once"),
    ],
)
def test_loopback_refuses_wrong_arguments_with_a_sentence_and_exit_code_2(
    checkout, capsys, monkeypatch, arguments, sentence
):
    monkeypatch.chdir(checkout)
    with pytest.raises(SystemExit) as exit:
        load(checkout, "loopback").main(arguments.split())
    assert exit.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.quick
def test_loopback_takes_all_layers_on_2_ranks_and_a_few_on_4(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    module = load(checkout, "loopback")
    _, cases = module.parse([".", "."])
    on = {ranks: [(case["op"], case["shape"]) for case in cases if case["ranks"] == ranks] for ranks in (2, 4)}
    assert on[2] == [(op, shape) for op in module.FUSED for shape in shapes.LAYERS[op]]
    assert on[4] == [(op, shape) for op in module.FUSED for shape in module.FEW[op]]


@pytest.mark.quick
def test_shapes_by_name():
    assert list(shapes.select("gemm", ["tiny", "rs-a"])) == ["tiny"]
    assert list(shapes.select("all_gather", ["all"])) == list(shapes.COLUMN_PARALLEL)
    assert list(shapes.select("matmul_all_reduce", ["layers"])) == list(shapes.ROW_PARALLEL)
    assert shapes.select("matmul_all_reduce", ["small"])["llama70b-o-m16"] == (16, 8192, 8192)
    assert shapes.select("gemm", ["all"])["8192x14336x8192"] == (8192, 14336, 8192)
    assert not set(shapes.TINY) & set(shapes.select("all_reduce", ["all"]))
    for table in shapes.LAYERS.values():
        assert all(size % 8 == 0 for shape in table.values() for size in shape)


@pytest.mark.quick
def test_an_unknown_shape_is_told_the_names_of_its_operation_that_the_runtime_takes(monkeypatch):
    monkeypatch.setattr(runtime, "RUNTIME", "nvshmem")
    with pytest.raises(ValueError) as refused:
        shapes.find(["all_gather_matmul"], ["tiny", "rs-a"])
    assert str(refused.value) == (
        "there is no shape 'rs-a' for all_gather_matmul: give MxNxK, or one of "
        + ", ".join([*shapes.BY_OPERATION["all_gather_matmul"], *shapes.TINY])
        + ", or a group: all, layers, small"
    )
    with pytest.raises(ValueError, match="'huge' for matmul or matmul_all_reduce: .* or one of tiny, .*, small; one"):
        shapes.find(["matmul", "matmul_all_reduce"], ["huge"])
    with pytest.raises(ValueError, match="one of tiny, .*a group: all, layers$"):
        shapes.find(["matmul"], ["small"])
    with pytest.raises(ValueError, match="tiny-m1$"):
        shapes.find(["all_reduce"], ["layers"], groups=False)
    found = shapes.find(["matmul", "matmul_all_reduce"], ["small"])
    assert found == {"matmul": {}, "matmul_all_reduce": shapes.SMALL["matmul_all_reduce"]}
    monkeypatch.setattr(runtime, "RUNTIME", "simulated")
    with pytest.raises(ValueError, match="MxNxK, or one of tiny, tiny-wide, tiny-m1; the simulated runtime takes what"):
        shapes.find(["all_gather_matmul"], ["rs-a"])


def a_line(op="all_gather_matmul", shape="llama8b-qkv", M=8192, ours_us=100.0, date="2030-01-02T03:04:05", **others):
    times = {"cublas": 90.0, "nccl": 60.0, "serial": 150.0, "torch": 110.0, "wire": 45.0, "ours": ours_us}
    line = dict.fromkeys(FIELDS) | {f"{name}_us": us for name, us in times.items()}
    line |= {"op": op, "shape": shape, "layout": "TN", "M": M, "N": 4096, "K": 4096, "ranks": 4, "dtype": "bfloat16"}
    line |= {"gpu": "NVIDIA H200", "torch_version": "2.11.0", "triton_version": "3.6.0", "nccl_version": "2.28.9"}
    line |= {"transport": "peer", "iterations": 20, "date": date, "overlap_efficiency": 90 / ours_us, "ways": {}}
    return line | {"ours_host_us": 50.0, "serial_host_us": 60.0} | others


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.quick
def test_of_records_of_one_case_the_last_counts_and_the_newest_file_is_the_latest_days(checkout, tmp_path):
    records = load(checkout, "records")
    older = write(tmp_path / "b.jsonl", a_line(date="2030-01-01T23:00:00"), a_line(ours_us=80.0))
    assert [line["ours_us"] for line in records.read(older)] == [80.0]
    write(tmp_path / "c.jsonl", a_line(ranks=2), {"bench": "leases"})
    write(tmp_path / "z.jsonl", a_line(op="gemm", date="2031-01-01T00:00:00"))
    fp8 = [a_line(date="2031-01-01T00:00:00", fast_accum=fast) for fast in (True, False)]
    assert records.read(write(tmp_path / "y.jsonl", *fp8)) == fp8
    assert records.newest(tmp_path) == older  # of the same day the one with more ranks
    with pytest.raises(FileNotFoundError, match="bench.run --json"):
        records.newest(tmp_path / "nothing")


@pytest.mark.quick
def test_pictures_show_every_peer_and_say_what_they_show(checkout, tmp_path):
    plot = load(checkout, "plot")
    lines = [a_line(op, shape) for op in plot.FUSED for shape in ("llama8b-o", "rs-b")]
    figure = plot.time_figure(lines)
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        label for label, _, _ in (plot.SERIES | plot.OTHER_RUNS).values()
    }
    assert [axes.get_title() for axes in figure.axes] == list(plot.TITLES.values())
    paths = plot.draw(plot.fused(write(tmp_path / "x4.jsonl", *lines)), tmp_path / "x4")
    assert [path.name for path in paths] == ["x4-time.png", "x4-efficiency.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert "4 x NVIDIA H200, 2030-01-02" in plot.circumstances(lines)
    with pytest.raises(ValueError, match="has no records of all_gather_matmul"):
        plot.fused(write(tmp_path / "none.jsonl", a_line(op="gemm")))


@pytest.mark.quick
def test_readme_has_the_table_of_the_newest_results_as_the_tool_writes_it(checkout):
    plot, records = load(checkout, "plot"), load(checkout, "records")
    readme, block = (checkout / "README.md").read_text(), plot.readme_block(records.newest())
    assert block in readme, "run python -m bench.plot --readme"
    assert plot.with_block(readme.replace(block, plot.BEGIN + plot.END), block) == readme
    for picture in re.findall(r"!\[\w+\]\((.*)\)", block):
        assert (checkout / picture).stat().st_size < 300_000
    with pytest.raises(ValueError, match="README.md needs the lines"):
        plot.with_block("# no place for it", block)


@pytest.mark.quick
def test_a_summary_names_what_misses_its_goal(checkout, tmp_path, capsys):
    summary = load(checkout, "summary")
    good = write(tmp_path / "good.jsonl", a_line(ours_us=91.0), a_line(shape="llama70b-qkv-m16", M=16, ours_us=150.0))
    assert summary.main([str(good)]) == 0
    simulated = write(tmp_path / "simulated.jsonl", a_line(shape="gpt3-fc1", ours_us=9e9, gpu=None))
    assert summary.main([str(good), str(simulated)]) == 0
    with pytest.raises(SystemExit):
        summary.main(["--help"])
    assert "Exit code 0: every goal is reached; 1: one is missed" in " ".join(capsys.readouterr().out.split())
    bad = write(tmp_path / "bad.jsonl", a_line(ours_us=120.0, date="2030-01-03T00:00:00"), a_line(shape="gpt3-fc1"))
    assert summary.main([str(good), str(bad)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "over torch fused, from 2048 tokens any 2 1.000 0.917 llama8b-qkv x4 0.917" in out
    # FP8 has goals of its own: as fast as torch's with fast_accum, and without.
    for fast_accum, ours_us in ((True, 89.0), (False, 112.0)):
        of_fp8 = {"op": "gemm", "dtype": "float8_e4m3fn", "fast_accum": fast_accum}
        good = write(tmp_path / "good.jsonl", a_line(ours_us=91.0), a_line(ours_us=ours_us, **of_fp8))
        assert summary.main([str(good)]) == 0
        slow = write(tmp_path / "slow.jsonl", a_line(ours_us=120.0, date="2030-01-03T00:00:00", **of_fp8))
        assert summary.main([str(good), str(slow)]) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert f"GEMM in {'' if fast_accum else 'precise '}FP8 over cuBLAS any 1 mean" in said


@pytest.mark.quick
@pytest.mark.parametrize(
    "content, said",
    [(None, "No such file or directory: '{path}'"), (b"{\n", "error: {path}: Expecting"), (b"\xff", "error: {path}: ")],
    ids=["missing", "no JSON", "no text"],
)
def test_a_summary_of_a_file_that_cannot_be_read_is_a_wrong_argument(checkout, tmp_path, capsys, content, said):
    path = tmp_path / "records.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        load(checkout, "summary").main([str(path)])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and said.format(path=path) in err.splitlines()[-1]


@pytest.mark.ranks(2)
def test_sharding_is_measured_beside_torchs_and_a_wrong_loss_is_refused(ctx, checkout):
    sharding = load(checkout, "sharding")
    line = sharding.measure_kind(ctx, "parameters", sharding.MODELS["deep"], 1)
    assert line["op"] == "sharding" and line["speedup_over_torch"] == line["torch_us"] / line["ours_us"]
    assert "refused" not in sharding.measure_kind(ctx, "float8", sharding.MODELS["deep"], 1)
    ours = sharding.SYSTEMS["parameters"]["ours"]

    def one_weight_is_off(ctx, model, together):
        model[0].down.weight.data.mul_(3)
        return ours(ctx, model, together)

    sharding.SYSTEMS["parameters"]["ours"] = one_weight_is_off
    assert "losses differ" in sharding.measure_kind(ctx, "parameters", sharding.MODELS["deep"], 1)["refused"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_training_is_measured_beside_a_baseline_and_a_wrong_gradient_is_refused(ctx, checkout, name):
    training = load(checkout, "training")
    pair = training.PAIRS["simulated"][name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # torch's of names that it has changed
        line = training.measure_pair(ctx, name, pair, 32, 2)
    assert line["op"] == "training" and line["speedup_over_serial"] == line["serial_us"] / line["ours_us"]

    right = training.Steps.outcome

    def one_row_is_lost(self, series):
        results = right(self, series)
        if series == "ours" and self.ctx.rank == 1:
            results[2][3] = 0
        return results

    training.Steps.outcome = one_row_is_lost
    try:
        refused = training.measure_pair(ctx, name, pair, 32, 2)["refused"]
    finally:
        training.Steps.outcome = right
    theirs = "NCCL + cuBLAS" if ctx.runtime == "nvshmem" else "gloo + torch.mm"
    assert refused == f"rank 1: 1 of {pair.inner // 2} rows of dw1 differ from {theirs}'s, the first is 3"


@pytest.mark.exhaustive
def test_the_training_bench_prints_a_table_and_writes_lines_that_a_summary_reads(checkout, tmp_path):
    path = tmp_path / "training.jsonl"
    command = "-m bench.training --ranks 1 --iterations 1 --json".split()
    done = subprocess.run(
        [sys.executable, *command, str(path)], cwd=checkout,
        env={**os.environ, "TKERNELS_RUNTIME": "simulated"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "llama70b-attention, gloo beside torch.mm" in done.stdout
    lines = load(checkout, "records").read(path)
    assert [line["shape"] for line in lines] == ["llama70b-mlp", "llama70b-attention"]
    (goal,) = (goal for goal in load(checkout, "summary").GOALS if goal.name == "training over NCCL + cuBLAS")
    assert len(goal.values([line | {"ranks": 4} for line in lines])) == 2


# Compiling ahead: with a compiler of our own here, with Triton's in test_compile.


class Compiled:
    def __init__(self, spills=0, error=None):
        self.n_spills, self.error = spills, error

    def _init_handles(self):
        if self.error:
            raise self.error


class Kernel:
    launched = []

    def run(self, *args, grid, warmup, **options):
        if not warmup:
            self.launched.append(args)
        (outcome,) = args
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def __getitem__(self, grid):
        return lambda *args, **options: self.run(*args, grid=grid, warmup=False, **options)


@pytest.mark.ranks(2)
def test_compile_ahead_launches_nothing_and_says_what_cant_be_used(ctx, checkout):
    compile_ahead = load(checkout, "compile").compile_ahead
    outcomes = {
        "fine": Compiled(),
        "spills": Compiled(spills=36),
        "too large": Compiled(error=RuntimeError("out of resource: shared memory")),
        "refused": ValueError("num_warps must be\na power of two"),
    }
    calls = {name: functools.partial(Kernel()[(1,)], outcome) for name, outcome in outcomes.items()}
    with mock.patch("bench.compile.JITFunction", Kernel):
        failures = compile_ahead(ctx, calls, lambda number: None)
    assert Kernel.launched == []
    assert failures == {
        "spills": "registers: the compiler spills 36 of them",
        "too large": "RuntimeError: out of resource: shared memory",
        "refused": "ValueError: num_warps must be",
    }
    calls["fine"]()
    assert len(Kernel.launched) == 1  # launches are launches again


# The model against the records.

# The ways that the rule of measured thresholds took, which the model replaced, where it did not take the copy engine.
RULE = {
    "interleaved": [("matmul_all_reduce", 2, None)],  # all shapes but one
    "copy_engine": [("matmul_all_reduce", 2, "llama8b-o")],
    "ours": [("matmul_reduce_scatter", 4, "llama8b-o"), ("matmul_reduce_scatter", 4, "rs-c"),
             ("matmul_all_reduce", 4, "llama8b-o")],
}  # fmt: skip


def way_by_rule(line) -> str:
    for way in ("copy_engine", "ours", "interleaved"):
        for shape in (line["shape"], None):
            if (line["op"], line["ranks"], shape) in RULE[way]:
                return way
    return "copy_engine"


@pytest.mark.quick
def test_queue_goes_on_where_it_stopped_and_tries_again_what_has_failed(checkout, tmp_path, capsys):
    queue = load(checkout, "queue")
    steps = (
        queue.Step("good", "platform", 1, 0),
        queue.Step("bad", "no_such_module {json}", 1, 0),
        queue.Step("endless", "http.server 0", 0.01, 0),
        queue.Step("long", "platform", 60, 0),
        queue.Step("wide", "platform", 1, torch.cuda.device_count() + 1),
    )
    (tmp_path / "bad.jsonl").write_text("of an attempt before\n")
    assert queue.main([str(tmp_path)], steps) == 1
    said = capsys.readouterr().out.split()
    assert said[:2] == ["good", "done"] and said[4:6] == ["bad", "FAILED"] and said[8:10] == ["endless", "FAILED"]
    assert said[12:] == ["left:", "long"]
    assert "no_such_module" in (tmp_path / "bad.log").read_text() and not (tmp_path / "bad.jsonl").exists()
    assert [step.name for step in queue.left(steps, tmp_path, 0)] == ["bad", "endless", "long"]
    assert queue.main([str(tmp_path), "--steps", "long,good", "--minutes", "60"], steps) == 0
    assert capsys.readouterr().out.split()[:2] == ["long", "done"]
    with mock.patch.object(queue, "source_digest", lambda: "of other code"):
        assert len(queue.left(steps, tmp_path, 0)) == 4
    with pytest.raises(SystemExit, match="2"):
        queue.main([str(tmp_path), "--steps", "god"], steps)
    assert "--steps god: there are good, bad" in capsys.readouterr().err


@pytest.mark.quick
def test_queue_names_modules_options_and_tests_that_exist(checkout):
    for step in load(checkout, "queue").STEPS:
        module, *arguments = step.command.split()
        assert all((checkout / each).is_file() for each in arguments if each.startswith("tests/"))
        if module != "pytest":
            files = checkout / f"{module.replace('.', '/')}.py", checkout / "bench/steps.py"
            source = "".join(file.read_text() for file in files)
            assert all(f'"{each}"' in source for each in arguments if each.startswith("--")), step


@pytest.mark.quick
def test_judge_finds_the_models_choices_no_slower_than_those_of_the_rule_that_it_replaced(checkout):
    model, records = load(checkout, "model"), load(checkout, "records")
    lines = model.fused_records(records.RESULTS.glob("*.jsonl"))
    lines = [line for line in lines if not records.of_fp8(line)]  # the rule knew none
    judged = [model.judge(line) for line in lines]
    assert len(judged) >= 120 and all(one.us is not None for one in judged)
    ratios = []
    for one in judged:
        if one.way == "plain":  # by the same rule as before
            assert one.line["M"] <= 1024
            continue
        way = way_by_rule(one.line)
        before = one.line["ours_us"] if way == "ours" else one.line["ways"][way]["us"]
        ratios.append(one.us / before)
        assert ratios[-1] <= 1.01, one
        assert abs(one.predicted_us / one.us - 1) < 0.2, one
    assert len(ratios) >= 70 and records.geometric_mean(ratios) <= 1
    fastest = [one.us / one.fastest_us for one in judged]
    assert records.geometric_mean(fastest) < 1.006


@pytest.mark.quick
def test_model_prints_what_is_taken_and_judges_records(checkout, capsys, tmp_path):
    model, records = load(checkout, "model"), load(checkout, "records")
    assert model.main([str(next(records.RESULTS.glob("*x4.jsonl")))]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "27 of 27 judged: what is taken is 1.0" in said and "matmul_reduce_scatter rs-c 4 comm programs" in said
    (tmp_path / "empty.jsonl").write_text("")
    assert model.main([str(tmp_path / "empty.jsonl")]) == 0
    assert "no record can be judged" in capsys.readouterr().out
