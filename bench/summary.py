"""Compares the measurements with their goals: python -m bench.summary [FILE ...], from the root.

Without FILE: all files in bench/results. Of several records of one case the latest counts; records of the simulated
runtime are ignored. Exit code 0: every goal is reached; 1: one is missed. Goals without measurements are shown, but do
not affect the exit code. 2: wrong arguments, or a file that cannot be read.
"""

import argparse
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bench.peers import over_cublas
from bench.problem import LAYOUTS
from bench.records import FUSED, PEERS, RESULTS, case_of, geometric_mean, ratio, read
from tkernels.shapes import LAYERS

GATHERS, SCATTERS = FUSED[:2]
ANY = 0  # any number of ranks
SENT_BY_PROGRAMS = ("peer", "nvshmem", "interleaved")
COLUMNS = {"goal": "left", "GPUs": "right", "of": "right", "at least": "right", "is": "right"}


@dataclass(frozen=True)
class Goal:
    """A goal: the minimum, or the geometric mean, of `value` over the selected records is at least `bound`.

    value: of a record, larger is better; None where the record has no such value.
    of: selects the records.
    fast_accum: of FP8; None: of all other dtypes.
    """

    name: str
    ranks: int
    bound: float
    value: Callable[[dict], float | None]
    of: Callable[[dict], bool]
    mean: bool = False
    fast_accum: bool | None = None

    def values(self, lines: list[dict]) -> dict[str, float]:
        about = (line for line in lines if self.ranks in (ANY, line["ranks"]) and self.of(line))
        about = (line for line in about if line["fast_accum"] is self.fast_accum)
        named = {f"{line['shape']} x{line['ranks']}": self.value(line) for line in about}
        return {name: value for name, value in named.items() if value is not None}


def efficiency(line: dict) -> float | None:
    return line["overlap_efficiency"]


def over_library(name: str) -> Callable[[dict], float | None]:
    return lambda line: ratio(over_cublas(line).get(name), ratio(line["ours_us"], line["cublas_us"]))


def over(name: str, what: str = "us") -> Callable[[dict], float | None]:
    return lambda line: ratio(line[f"{name}_{what}"], line[f"ours_{what}"])


def put_over_copy_engine(line: dict) -> float | None:
    ways = {name: way["us"] for name, way in line["ways"].items()}
    engine, puts = ways.get("copy_engine"), [us for name, us in ways.items() if name in SENT_BY_PROGRAMS]
    return ratio(engine, min(puts, default=None))


def fused(op: str | None = None, layers: bool = False) -> Callable[[dict], bool]:
    """Selects fused forward operations with at least 2048 tokens; layers: only shapes in the tables of whole layers."""
    return lambda line: (
        line["op"] in ((op,) if op else FUSED)
        and line["layout"] == "TN"
        and line["M"] >= 2048
        and (not layers or line["shape"] in LAYERS[line["op"]])
    )


def few_tokens(line: dict) -> bool:
    return line["op"] in FUSED and line["M"] < 2048


def training(line: dict) -> bool:
    return line["op"] == "training"


def gemm(layout: str) -> Callable[[dict], bool]:
    return lambda line: line["op"] == "gemm" and line["layout"] == layout


GOALS = [
    *(Goal(f"over {label}, from 2048 tokens", ANY, 1.0, over(name), fused()) for name, label in PEERS.items()),
    *(Goal(f"over {name}", ANY, 1.0, over_library(name), fused()) for name in ("cuBLASMp", "Userbuffers")),
    Goal("all-gather + GEMM, efficiency", 4, 0.95, efficiency, fused(GATHERS, layers=True), mean=True),
    Goal("all-gather + GEMM, efficiency", 2, 0.99, efficiency, fused(GATHERS, layers=True), mean=True),
    Goal("all-gather + GEMM, efficiency", ANY, 0.80, efficiency, fused(GATHERS, layers=True)),
    Goal("GEMM + reduce-scatter, efficiency", 4, 0.88, efficiency, fused(SCATTERS, layers=True), mean=True),
    Goal("GEMM + reduce-scatter, efficiency", 2, 0.93, efficiency, fused(SCATTERS, layers=True), mean=True),
    Goal("GEMM + reduce-scatter, efficiency", ANY, 0.70, efficiency, fused(SCATTERS, layers=True)),
    Goal("over NCCL + cuBLAS, fewer tokens", ANY, 1 / 1.05, over("serial"), few_tokens),
    Goal(
        "all-reduce of up to 2 MB over NCCL", ANY, 1.3, over("nccl"),
        lambda line: line["op"] == "all_reduce" and line["M"] * line["N"] <= 1 << 20,
    ),  # fmt: skip
    *(Goal(f"GEMM {layout} over cuBLAS", ANY, 1.0, over("cublas"), gemm(layout), mean=True) for layout in LAYOUTS),
    *(Goal(f"GEMM {layout} over cuBLAS", ANY, 0.95, over("cublas"), gemm(layout)) for layout in LAYOUTS),
    Goal("GEMM in FP8 over cuBLAS", ANY, 1.0, over("cublas"), gemm("TN"), True, True),
    Goal("GEMM in FP8 over cuBLAS", ANY, 0.95, over("cublas"), gemm("TN"), False, True),
    Goal("GEMM in precise FP8 over cuBLAS", ANY, 0.80, over("cublas"), gemm("TN"), True, False),
    *(
        Goal(f"in FP8 over {label}, from 2048 tokens", ANY, 1.0, over(name), fused(), False, True)
        for name, label in PEERS.items()
    ),
    Goal("host time, over NCCL + cuBLAS", ANY, 1.0, over("serial", "host_us"), lambda line: line["op"] in FUSED),
    Goal("training over NCCL + cuBLAS", 4, 1.1, over("serial"), training),
    Goal("training, memory of NCCL + cuBLAS over ours", 4, 1 / 1.1, over("serial", "peak_bytes"), training),
    Goal("device put over copy engine", ANY, 0.97, put_over_copy_engine, fused()),
]  # fmt: skip


def table(lines: list[dict]) -> tuple[Table, bool]:
    """The goals as a table, and whether every goal with measurements is reached."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, justify in COLUMNS.items():
        result.add_column(heading, justify=justify, no_wrap=True)
    result.add_column("missed by")
    reached = True
    for goal in GOALS:
        values = goal.values(lines)
        ranks, bound = str(goal.ranks or "any"), f"{'mean ' if goal.mean else ''}{goal.bound:.3f}"
        if not values:
            result.add_row(goal.name, ranks, "0", bound, "-", "")
            continue
        value = geometric_mean(values.values()) if goal.mean else min(values.values())
        below = sorted((value, name) for name, value in values.items() if value < goal.bound)
        missed = value < goal.bound
        reached = reached and not missed
        worst = ", ".join(f"{name} {value:.3f}" for value, name in below[:4]) + (" ..." if len(below) > 4 else "")
        style = "red" if missed else "green"
        result.add_row(goal.name, ranks, str(len(values)), bound, f"[{style}]{value:.3f}[/]", worst if missed else "")
    return result, reached


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.summary", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all of bench/results")
    args = parser.parse_args(argv)
    latest = {}
    for path in args.files or RESULTS.glob("*.jsonl"):
        try:
            lines = read(path)
        except OSError as error:
            parser.error(str(error))
        except ValueError as error:  # no JSON, or no text; the message lacks the path
            parser.error(f"{path}: {error}")
        for line in filter(operator.itemgetter("gpu"), lines):
            case = case_of(line)
            latest[case] = max(line, latest.get(case, line), key=lambda line: line["date"])
    result, reached = table(list(latest.values()))
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(result)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
