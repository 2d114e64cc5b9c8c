"""bench.sweep: what it draws, that it measures right results and refuses wrong ones, and what it makes of records."""

import importlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from transports import torch_scales_rows


def load(checkout, name: str):
    """A module of the bench, which is imported from the repository's root alone."""
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(f"bench.{name}")


@pytest.mark.quick
def test_draw_gives_the_same_problems_of_every_kind_for_a_seed(checkout):
    sweep = load(checkout, "sweep")
    found, refused = sweep.draw(5, 300)
    assert (found, refused) == sweep.draw(5, 300) and found != sweep.draw(6, 300)[0] and 0 < refused < 100
    for name, values in [("dtype", sweep.PRECISIONS), ("layout", sweep.LAYOUTS), ("bias", (True, False))]:
        counts = [sum(getattr(problem, name) == value for problem in found) for value in values]
        assert sum(counts) == 300 and min(counts) > 200 / len(values), name
    assert {problem.activation for problem in found} == {None, "relu", "gelu", "gelu_tanh", "silu"}
    for name, least, most in (("M", 1, 65536), ("N", 16, 60000), ("K", 16, 60000)):
        sizes = [getattr(problem, name) for problem in found]
        assert least <= min(sizes) < 2 * max(least, 8) and most / 4 < max(sizes) <= most
        # Log-uniform: about as many below the bounds' geometric mean as above; more, as large ones are refused.
        assert 130 < sum(size < math.sqrt(least * most) for size in sizes) < 220, name
        for multiple, share in ((1, 1), (2, 0.8), (8, 0.5), (64, 0.2)):
            assert 0.6 * share < sum(size % multiple == 0 for size in sizes) / 300 <= 1, (name, multiple)
    assert max(problem.bytes for problem in found) <= sweep.MOST_BYTES
    for problem in sweep.draw(1, 100, 4)[0]:
        assert (problem.N if problem.operation == "all_gather_matmul" else problem.K) % 4 == 0
        assert problem.operation != "all_gather_matmul" or problem.layout in ("TN", "NN")


@pytest.mark.quick
def test_draw_of_fp8_has_the_sizes_of_the_seed_as_torch_takes_them(checkout):
    sweep = load(checkout, "sweep")
    usual, fp8 = sweep.draw(1, 20, 4)[0], sweep.draw(1, 20, 4, fast_accum=False)[0]
    assert [problem.M for problem in fp8][:5] == [problem.M for problem in usual][:5]
    for problem in fp8:
        N, K = (4, 1) if problem.operation == "all_gather_matmul" else (1, 4)
        assert problem.N % (16 * N) == problem.K % (16 * K) == 0 and problem.layout == "TN"
        assert (problem.torch_dtype, problem.precision) == (torch.float8_e4m3fn, "promoted")
        assert str(problem).split()[2:5] == ["fp8", "precise", "TN"]
    wanted = sweep.Drawn("matmul", 8, 32, 48, "fp8", "TN", fast_accum=True)
    assert sweep.given("8x32x48", ["TN"], "fp8", True) == [wanted]
    with pytest.raises(ValueError, match="8x24x48: torch multiplies float8 of N and K in multiples of 16"):
        sweep.given("8x24x48", ["TN"], "fp8", True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_measures_what_it_draws_and_writes_records(checkout, tmp_path, ranks):
    path, number = tmp_path / "out.jsonl", 4 // ranks
    command = f"-m bench.sweep --seed 3 --problems {number} --ranks {ranks} --json {path}".split()
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env={**os.environ, "TKERNELS_RUNTIME": "simulated"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "geometric mean" in done.stdout and "the 20 worst" in done.stdout
    lines = list(map(json.loads, path.read_text().splitlines()))
    drawn = load(checkout, "sweep").draw(3, number, ranks, (64, 64))[0]
    assert [line["problem"] for line in lines] == list(map(str, drawn))
    for line in lines:
        assert line["ours_us"] > 0 and min(line["others_us"].values()) > 0
        assert (line["op"], line["seed"], line["ranks"]) == ("sweep", 3, ranks)
        assert line["path"] == ("kernel" if ranks == 1 else "fused")


@pytest.mark.exhaustive  # the commands alone take 20 s
def test_the_command_measures_given_sizes_rounded_up_as_well_and_stops_at_its_budget(checkout):
    def run(arguments):
        return subprocess.run(
            [sys.executable, "-m", "bench.sweep", *arguments.split()], cwd=checkout, capture_output=True, text=True,
            env={**os.environ, "TKERNELS_RUNTIME": "simulated"}, timeout=600,
        )  # fmt: skip

    done = run("--shape 5x17x31 --layout TN,NT --dtype tf32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "matmul 5x17x31 tf32 TN" in done.stdout and "matmul 5x17x31 tf32 NT" in done.stdout
    done = run("--problems 3 --budget 0.001")
    assert done.returncode == 1 and "budget of 0.001 s was used up before 3 problems" in done.stdout
    for wrong, said in (
        ("--layout XX --shape 1x2x3", "--layout XX: there are TN, NN, NT, TT"),
        ("--shape 1x2", "there is no shape '1x2'"),
        ("--shape 1x2x3 --ranks 2", "--shape is for one GPU"),
        ("--budget 0", "--budget 0: give seconds"),
    ):
        done = run(wrong)
        assert done.returncode == 2 and said in done.stderr


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fast_accum", [None, True, False], ids=["bf16", "fp8", "fp8-precise"])
@pytest.mark.parametrize("operation", ["matmul", "all_gather_matmul", "matmul_reduce_scatter"])
def test_a_wrong_result_is_refused(ctx, checkout, operation, fast_accum, monkeypatch):
    sweep, rank = load(checkout, "sweep"), load(checkout, "sweep_rank")
    problem = sweep.Drawn(operation, 33, 18, 16, "bf16", "NN", True, "silu")
    if fast_accum is not None:
        if not torch_scales_rows():
            pytest.skip("results are compared with torch's")
        problem = sweep.in_fp8(problem, ctx.size, fast_accum)
    assert "refused" not in rank.measure_problem(ctx, problem)
    kind = rank.Product if operation == "matmul" else rank.Fused
    ours = kind.ours
    for spoil in (lambda y: y[-1, 3:4].fill_(math.nan), lambda y: y[0].mul_(1.2), lambda y: y[:, -1].zero_()):

        def wrong(self, spoil=spoil):
            spoil(y := ours(self))
            return y

        monkeypatch.setattr(kind, "ours", wrong)
        assert "elements are off" in rank.measure_problem(ctx, problem)["refused"]


@pytest.mark.quick
def test_the_summary_counts_what_is_slower_than_the_fastest_other_way(checkout):
    sweep = load(checkout, "sweep")
    line = {"dtype": "bf16", "path": "kernel", "alignment": 16, "M": 1, "problem": "p", "others_us": {"a": 8, "b": 4}}
    lines = [line | {"ours_us": us} for us in (2, 4, 4.3, 8)]
    assert [sweep.speed(line) for line in lines] == [2, 1, pytest.approx(4 / 4.3), 0.5]
    groups, worst = sweep.summary(lines)
    assert next(groups.columns[0].cells) == "all" and next(groups.columns[3].cells) == "50.0%"
    assert next(worst.columns[5].cells) == "0.50" and next(worst.columns[3].cells) == "b"
    assert list(worst.columns[5].cells) == ["0.50", "0.93", "1.00", "2.00"]
