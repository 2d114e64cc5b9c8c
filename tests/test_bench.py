"""The bench: what it writes, what it refuses, and how it turns wrong arguments away."""

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tkernels import shapes


def load(checkout: Path, name: str):
    """A module of the bench, which is imported from the repository's root alone."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(f"bench.{name}")


def a_case(checkout: Path, op: str):
    return load(checkout, "problem").Case(op, "tiny", 64, 64, 64, torch.bfloat16)


def measured(ctx, checkout, op, **options) -> dict:
    harness, roofs = load(checkout, "harness"), load(checkout, "roofs")
    return harness.run_case(ctx, a_case(checkout, op), 2, roofs.Roofs(), **options)


FIELDS = {
    "op", "shape", "M", "N", "K", "ranks", "dtype", "runtime", "transport", "iterations", "warmups", "config",
    "flops", "hbm_bytes", "link_in_bytes", "link_out_bytes", "wire_us", "overlap_efficiency", "ours_flop_per_s",
    *(f"{name}_{what}us" for name in ("ours", "cublas", "nccl", "serial", "torch") for what in ("", "p10_", "p90_")),
    *(f"{name}_host_us" for name in ("ours", "cublas", "nccl", "serial", "torch", "operator")),
    *(f"speedup_over_{name}" for name in ("cublas", "nccl", "serial", "torch")),
    "peer_copy_bytes_per_s", "cublas_flop_per_s", "hbm_copy_bytes_per_s", "unavailable",
    "gpu", "num_gpus", "cpu", "python_version", "torch_version", "triton_version", "nccl_version", "nvshmem_version",
    "nvshmem4py_version", "commit", "dirty", "source_sha256", "date",
}  # fmt: skip


def test_the_command_prints_a_table_and_writes_a_line_with_all_fields(checkout, tmp_path):
    path = tmp_path / "results" / "out.jsonl"
    command = "-m bench.run all_gather_matmul --shape tiny --ranks 2 --iterations 2 --json".split()
    done = subprocess.run(
        [sys.executable, *command, str(path)], cwd=checkout, env={**os.environ, "TKERNELS_RUNTIME": "simulated"},
        capture_output=True, text=True, timeout=200,
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["gemm", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather", "all_reduce"])
def test_right_results_are_measured(ctx, checkout, op):
    line = measured(ctx, checkout, op)
    assert "refused" not in line, line
    assert line["ours_us"] > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_gather"])
def test_baselines_compute_what_we_compute(ctx, checkout, op):
    """Without torch's fused operators, which exist on GPUs only; gloo stands in for NCCL where there is none."""
    baselines, harness, problem = (load(checkout, name) for name in ("baselines", "harness", "problem"))
    here = problem.Problem(ctx, a_case(checkout, op), "normal")
    make = baselines._gathers if "gather" in op else baselines._reductions
    calls = make(here, ctx.group.process_group)
    results = {name: call() for name, call in calls.items() if name != "torch"}
    whole = {name: result for name, result in results.items() if result is not None}
    assert set(whole) == {"nccl"} if op == "all_gather" else "serial" in whole
    assert {name: harness.far(here, result) for name, result in whole.items()} == dict.fromkeys(whole)
    assert harness.far(here, next(iter(whole.values())) * 1.05).startswith("its result is wrong")


def off_by_one_rounding(problem, config):
    result = problem.ours(config)
    if problem.ctx.rank == 1:
        result[3, 5] = torch.nextafter(result[3, 5].float(), torch.tensor(9e9)).bfloat16() + 1
    return result


def not_a_number(problem, config):
    result = problem.ours(config)
    result[-1, -1] = torch.nan
    return result


def transposed(problem, config):
    return problem.ours(config).t()


def wrong_on_real_numbers(problem, config):
    result = problem.ours(config)
    return result if problem.values == "integers" else result + 1


class WrongOnceChecked:
    """Right in the two checks and wrong afterwards, as a race would be."""

    calls = 0

    def __call__(self, problem, config):
        self.calls += 1
        result = problem.ours(config)
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
    assert set(line) == {"op", "shape", "refused"}
    assert reason in line["refused"]


class RanksThat:
    """Stands for the ranks: `measure_all` gets this answer for every case."""

    def __init__(self, answer):
        self.answer = answer

    def run(self, fn, *args, timeout_s):
        return [self.answer(*args) if fn.__name__ == "run_case" else self.roofs]


@pytest.mark.quick
@pytest.mark.parametrize("how", ["refused", "ranks failed"])
def test_a_refused_case_gives_no_number_and_exit_code_1(checkout, tmp_path, capsys, monkeypatch, how):
    run, roofs = load(checkout, "run"), load(checkout, "roofs")
    from tkernels.launch import RankError

    def answer(case, iterations, roofs):
        if how == "refused":
            return {"op": case.op, "shape": case.shape, "refused": "rank 1: 1 of 64 elements are off"}
        raise RankError(1, "died", "", "rank 1 of 2 exited with code 3")

    class Ranks(RanksThat):
        def __enter__(self):
            self.roofs = roofs.Roofs()
            return self

        def __exit__(self, *exception):
            pass

    monkeypatch.setattr(run, "open_ranks", lambda args: Ranks(answer))
    path = tmp_path / "out.jsonl"
    assert run.main(["gemm", "--shape", "tiny", "--ranks", "1", "--json", str(path)]) == 1
    assert not path.exists()
    out = capsys.readouterr().out
    assert "gemm tiny: no number is reported: rank 1" in out


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("matmul", "'matmul' is no operation"),
        ("gemm --shape nope", "--shape nope: gemm has 4096x7168x8192"),
        ("gemm --shape tiny --ranks 0", "at least one rank is needed"),
        ("gemm --shape tiny --iterations 0 --ranks 1", "measure at least once"),
        ("gemm --shape tiny --dtype int8", "invalid choice: 'int8'"),
        ("all_gather --shape tiny --sweep --ranks 1", "all_gather has no configuration to sweep"),
        ("gemm --shape tiny --ranks 1 --sweep num_comm=3", "gemm has only the fields block_m"),
        ("gemm --shape tiny --ranks 1 --sweep stages=3", "'stages' is no field of a configuration"),
        ("gemm --shape tiny --ranks 1 --sweep split=x", "give whole numbers, as in split=1,2"),
    ],
)
def test_wrong_arguments_get_a_sentence_and_exit_code_2(checkout, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as exit:
        load(checkout, "run").main(arguments.split())
    assert exit.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.quick
def test_large_shapes_and_uneven_shards_are_refused_before_any_rank_starts(checkout, capsys):
    from tkernels.comm import runtime

    if runtime.RUNTIME != "simulated":
        pytest.skip("about the simulated runtime")
    main = load(checkout, "run").main
    for arguments, sentence in {
        "gemm --shape all": "would take the interpreter hours",
        "all_gather --shape tiny --ranks 3": "M=64 doesn't divide by 3 ranks",
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


@pytest.mark.quick
def test_a_sweep_changes_one_field_at_a_time_or_takes_the_product(checkout):
    from tkernels.configs import GemmConfig, OverlapConfig

    sweep = load(checkout, "sweep")
    default = OverlapConfig(GemmConfig(), num_comm=12)
    steps = sweep.changes(default, {})
    assert steps[0] == {} and {"num_comm": 6} in steps and {"num_comm": 12} not in steps
    assert len(steps) == len({json.dumps(step) for step in steps})
    product = sweep.changes(default, sweep.parse_grid(["num_comm=6,12", "num_stages=3,4"]))
    assert product == [{}, {"num_comm": 6}, {"num_comm": 6, "num_stages": 4}, {"num_stages": 4}]
    config = sweep.changed(default, {"num_comm": 6, "num_stages": 4})
    assert config == OverlapConfig(GemmConfig(num_stages=4), num_comm=6)
    with pytest.raises(ValueError, match="multiple of block_m"):
        sweep.changed(default, {"block_m": 256})


@pytest.mark.quick
def test_shapes_by_name():
    assert list(shapes.select("gemm", ["tiny", "rs-a"])) == ["tiny"]
    assert list(shapes.select("all_gather", ["all"])) == list(shapes.COLUMN_PARALLEL)
    assert not set(shapes.TINY) & set(shapes.select("all_reduce", ["all"]))
    for table in shapes.BY_OPERATION.values():
        assert all(size % 8 == 0 for shape in table.values() for size in shape)
