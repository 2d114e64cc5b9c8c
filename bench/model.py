"""Compares the model with the records: python -m bench.model [FILE ...], from the root. Needs no GPU.

For each record of a fused operation: the way that a call takes by default, its time by the model and as recorded, and
the fastest of the recorded ways. Then, over all of them, how much slower the model's choices are than the fastest ways,
and how far its predictions are from the records. A choice whose time is not recorded is shown, but not judged.
Without FILE: all files in bench/results.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bench.records import FUSED, RESULTS, geometric_mean, read
from tkernels import model, shapes
from tkernels.configs import OverlapConfig
from tkernels.gpus import GPUS
from tkernels.paths import by_rule, local_sizes

WAYS = {"copy_engine": model.COPY_ENGINE, "interleaved": model.INTERLEAVED, "peer": model.PROGRAMS}


@dataclass(frozen=True)
class Judged:
    """A recorded shape: the way taken by default, its predicted and its recorded time, and the fastest recorded way."""

    line: dict
    way: str
    predicted_us: float
    us: float | None
    fastest: str
    fastest_us: float


def problem_of(line: dict) -> model.Problem:
    """The problem that was recorded. Raises KeyError for a GPU without a row."""
    sizes = local_sizes(line["op"], line["M"], line["N"], line["K"], line["ranks"])
    dtype, gpu = shapes.WITH_TF32.get(line["dtype"]) or getattr(torch, line["dtype"]), GPUS[line["gpu"]]
    how = "tf32" if line["dtype"] == "tf32" else "ieee"
    return model.Problem(line["op"], *sizes, dtype, line["layout"], line["ranks"], gpu.sms, gpu, precision=how)


def recorded_us(line: dict, name: str, config: OverlapConfig | None) -> float | None:
    """The recorded time of a way of sending, in that configuration; None where there is none."""
    if config is not None and config.num_comm and config.landing:  # only calls' own choices send so
        own = line["config"] or {}
        return line["ours_us"] if own.get("landing") and own.get("num_comm") else None
    names = {"plain": "plain"} | {ours: theirs for theirs, ours in WAYS.items()}
    return line["ways"].get(names[name], {}).get("us")


def judge(line: dict) -> Judged:
    problem = problem_of(line)
    width = problem.K if problem.gathers else problem.N
    path = by_rule(line["op"], line["M"], width, problem.dtype, line["ranks"], problem.precision, problem.gpu).path
    name, config, predicted = "plain", None, model.predict_plain(problem)
    if path == "fused":
        config = model.choose(problem)
        name = next(name for name, way in model.ways(problem).items() if way == config)
        predicted = model.predict(problem, config)
    others = {way: line["ways"][way]["us"] for way in ("plain", *WAYS) if way in line["ways"]}
    others["ours"] = line["ours_us"]
    fastest = min(others, key=others.get)
    us = recorded_us(line, name, config)
    return Judged(line, name, 1e6 * predicted.seconds, us, fastest, others[fastest])


def fused_records(files) -> list[dict]:
    lines = [line for path in sorted(files) for line in read(path)]
    return [line for line in lines if line["op"] in FUSED and line["gpu"] in GPUS and line["ways"]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all of bench/results")
    args = parser.parse_args(argv)
    judged = [judge(line) for line in fused_records(args.files or RESULTS.glob("*.jsonl"))]
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("operation, shape", "ranks", "takes", "predicted", "recorded", "fastest way", "recorded", "ratio"):
        table.add_column(
            heading, justify="left" if heading in ("operation, shape", "takes", "fastest way") else "right"
        )
    for one in judged:
        us, ratio = ("-", "-") if one.us is None else (f"{one.us:.0f}", f"{one.us / one.fastest_us:.3f}")
        shape = f"{one.line['op']} {one.line['shape']}", str(one.line["ranks"])
        table.add_row(*shape, one.way, f"{one.predicted_us:.0f}", us, one.fastest, f"{one.fastest_us:.0f}", ratio)
    console.print(table)
    known = [one for one in judged if one.us is not None]
    if not known:
        console.print("no record can be judged")
        return 0
    ratios = [one.us / one.fastest_us for one in known]
    errors = [abs(one.predicted_us / one.us - 1) for one in known]
    console.print(
        f"{len(known)} of {len(judged)} judged: what is taken is {geometric_mean(ratios):.4f} times as slow as the "
        f"fastest recorded way in the geometric mean, {max(ratios):.3f} at most; predictions are off by "
        f"{statistics.median(errors):.1%} in the median, and by up to 10 % in {sum(e <= 0.1 for e in errors)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
