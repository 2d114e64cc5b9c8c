"""Measures problems that nobody tuned for: python -m bench.sweep --seed S --problems N [--ranks R], from the root.

A problem is drawn at random: its sizes, log-uniform and multiples of 1, 2, 8 or 64; its dtype, fp32 with and without
TF32; the layouts of its operands; a bias or none, an activation or none. With --dtype fp8 all are of FP8 as torch takes
it: K contiguous, K and N of a rank multiples of 16, a scale a row. On one GPU `matmul` is measured beside torch's own
calls, on several a fused operation beside NCCL + cuBLAS and torch's fused operators. The same seed draws the same
problems anywhere. Results are checked first. With --shape the sizes are given, and each is also measured rounded up to
multiples of 8.

Printed are the geometric mean of the speed relative to the fastest other way, the share below 0.95, and the twenty
worst. Exit code 0: all were measured. 1: a result was wrong or the budget was used up. 2: wrong arguments.
"""

import argparse
import collections
import math
import random
import sys
import time
from dataclasses import dataclass, replace

import torch
from rich import box
from rich.table import Table

import tkernels
from bench.provenance import provenance
from bench.records import FUSED, geometric_mean
from bench.run import ACCUMS, CASE_TIMEOUT_S, Report, open_ranks, reported
from bench.sweep_rank import compile_problems, measure_problem
from tkernels import shapes
from tkernels.activations import ACTIVATIONS
from tkernels.cli import count, file_to_write
from tkernels.configs import result_dtype
from tkernels.gemm import precision
from tkernels.gpus import H200

LAYOUTS = ("TN", "NN", "NT", "TT")
MULTIPLES = (1, 2, 8, 64)
PRECISIONS = {"bf16": "ieee", "fp16": "ieee", "fp32": "ieee", "tf32": "tf32"}  # by the name of a dtype that is drawn
FP8_MULTIPLE = 16  # of K and N of each rank, for torch; our kernels take any N
MOST_BYTES, MOST_S = 8 << 30, 0.05  # of the operands and the result, and of cuBLAS on an H200; larger ones aren't taken
WORST, LOW = 20, 0.95
ENOUGH_S, MOST_ITERATIONS, LEAST_ITERATIONS = 0.06, 31, 5  # short ones are measured more often


@dataclass(frozen=True)
class Drawn:
    """A problem of a sweep. M, N, K: over all ranks. dtype: a name of PRECISIONS, or fp8.

    aligned: rounded up from these. fast_accum: of FP8, None of others.
    """

    operation: str
    M: int
    N: int
    K: int
    dtype: str = "bf16"
    layout: str = "TN"
    bias: bool = False
    activation: str | None = None
    number: int = 0
    aligned: bool = False
    fast_accum: bool | None = None

    op, torch_dtype = (
        property(lambda self: "sweep"),
        property(lambda self: shapes.WITH_FP8.get(self.dtype, torch.float32)),
    )

    @property
    def precision(self) -> str:
        return PRECISIONS.get(self.dtype) or precision(self.torch_dtype, self.fast_accum)

    @property
    def shape(self) -> str:
        return f"{self.M}x{self.N}x{self.K}"

    @property
    def bytes(self) -> int:
        operands, result = self.M * self.K + self.N * self.K, self.M * self.N
        return operands * self.torch_dtype.itemsize + result * result_dtype(self.torch_dtype).itemsize

    @property
    def library_s(self) -> float:
        """About what cuBLAS would take on one H200."""
        return 2 * self.M * self.N * self.K / H200.library_rate(self.torch_dtype, self.precision)

    @property
    def iterations(self) -> int:
        if tkernels.RUNTIME == "simulated":  # the interpreter's times say nothing
            return 1
        return min(max(int(ENOUGH_S / max(self.library_s, 1e-6)), LEAST_ITERATIONS), MOST_ITERATIONS)

    def __str__(self):
        ends = [
            self.dtype,
            *(["precise"] if self.fast_accum is False else []),
            self.layout,
            *(["bias"] if self.bias else []),
            *([self.activation] if self.activation else []),
        ]
        return f"{self.operation} {self.shape} {' '.join(ends)}"


def draw(
    seed: int, number: int, ranks: int = 1, most: tuple[int, int] = (65536, 60000), fast_accum: bool | None = None
) -> tuple[list[Drawn], int]:
    """That many problems, and how many draws were too large to take. most: M, and N and K, of the largest.

    fast_accum: if not None, all are of FP8, of the sizes that the seed draws, rounded up to what torch takes.
    """
    rng, found, refused = random.Random(seed), [], 0
    while len(found) < number:
        multiple = rng.choice(MULTIPLES)
        M = _size(rng, 1, most[0], multiple)
        N, K = (_size(rng, 16, most[1], multiple) for _ in "NK")
        operation = "matmul" if ranks == 1 else rng.choice(FUSED)
        # x of an all-gather is sent by rows
        layout = rng.choice(LAYOUTS[:2] if operation == "all_gather_matmul" else LAYOUTS)
        dtype, bias = rng.choice(list(PRECISIONS)), rng.random() < 0.5
        activation = rng.choice([name for name in ACTIVATIONS if name]) if rng.random() < 0.5 else None
        if operation == "all_gather_matmul":
            N = -(-N // ranks) * ranks
        elif ranks > 1:
            K = -(-K // ranks) * ranks
        problem = Drawn(operation, M, N, K, dtype, layout, bias, activation, len(found))
        if fast_accum is not None:
            problem = in_fp8(problem, ranks, fast_accum)
        if problem.bytes > MOST_BYTES or problem.library_s > MOST_S:
            refused += 1
        else:
            found.append(problem)
    return found, refused


def in_fp8(problem: Drawn, ranks: int, fast_accum: bool) -> Drawn:
    """The problem in FP8, of sizes that torch takes."""
    N, K = (ranks, 1) if problem.operation == "all_gather_matmul" else (1, ranks)
    N, K = (-(-size // (FP8_MULTIPLE * by)) * FP8_MULTIPLE * by for size, by in ((problem.N, N), (problem.K, K)))
    return replace(problem, N=N, K=K, dtype="fp8", layout="TN", fast_accum=fast_accum)


def _size(rng: random.Random, least: int, most: int, multiple: int) -> int:
    """Log-uniform, rounded down to a multiple; smaller ones are left as they are."""
    size = round(math.exp(rng.uniform(math.log(least), math.log(most))))
    return size // multiple * multiple or size


def given(text: str, layouts: list[str], dtype: str, fast_accum: bool | None = None) -> list[Drawn]:
    """The problems of MxNxK, with commas between them, each also rounded up but in FP8, which takes none that is not.

    fast_accum: as for `draw`. Raises ValueError for other texts.
    """
    found = []
    for M, N, K in shapes.find(["matmul"], text.split(","))["matmul"].values():
        for layout in layouts:
            one = Drawn("matmul", M, N, K, dtype, layout, number=len(found))
            if fast_accum is not None:
                if N % FP8_MULTIPLE or K % FP8_MULTIPLE:
                    raise ValueError(f"{M}x{N}x{K}: torch multiplies float8 of N and K in multiples of {FP8_MULTIPLE}")
                found.append(replace(one, fast_accum=fast_accum))
                continue
            M8, N8, K8 = (-(-size // 8) * 8 for size in (M, N, K))
            found += [one, replace(one, M=M8, N=N8, K=K8, aligned=True)]
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, metavar="S", default=0, help="default: 0")
    parser.add_argument("--problems", type=count, metavar="N", default=300, help="default: 300")
    parser.add_argument("--ranks", type=count, metavar="R", default=1, help="one GPU each; default: 1")
    parser.add_argument("--shape", metavar="MxNxK", help="these products instead, with commas between them; on one GPU")
    parser.add_argument("--layout", default="TN", help="with --shape: TN (default), NN, NT, TT, with commas")
    parser.add_argument(
        "--dtype", choices=(*PRECISIONS, "fp8"), help="with --shape, default: bf16; fp8: of problems that are drawn too"
    )
    parser.add_argument("--accum", choices=ACCUMS, help="of fp8: fast or precise (fast_accum=False); default: fast")
    parser.add_argument("--budget", type=float, metavar="S", help="start no problem after so many seconds")
    parser.add_argument("--json", type=file_to_write, metavar="PATH", help="append one JSON line for each problem")
    args = parser.parse_args(argv)
    args.transport, simulated = "auto", tkernels.RUNTIME == "simulated"
    if args.budget is not None and not args.budget > 0:
        parser.error(f"--budget {args.budget:g}: give seconds")
    if not simulated and args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks} needs a GPU each, and there are {torch.cuda.device_count()}")
    if args.accum and args.dtype != "fp8":
        parser.error(f"--accum {args.accum} is of fp8, and --dtype is {args.dtype or 'bf16'}")
    fast_accum = ACCUMS[args.accum or "fast"] if args.dtype == "fp8" else None
    if args.shape is None:
        if args.dtype not in (None, "fp8"):
            parser.error(f"--dtype {args.dtype} is of problems that --shape gives; drawn are all, or those of fp8")
        most = (64, 64) if simulated else (65536, 60000)
        args.drawn, args.refused = draw(args.seed, args.problems, args.ranks, most, fast_accum)
        return args
    layouts = args.layout.split(",")
    if unknown := [layout for layout in layouts if layout not in LAYOUTS]:
        parser.error(f"--layout {unknown[0]}: there are {', '.join(LAYOUTS)}")
    if fast_accum is not None and layouts != ["TN"]:
        parser.error(f"--layout {args.layout}: float8 is multiplied in TN alone")
    if args.ranks > 1:
        parser.error("--shape is for one GPU; bench.run measures fused operations on shapes that are given")
    try:
        args.drawn, args.refused = given(args.shape, layouts, args.dtype or "bf16", fast_accum), 0
    except ValueError as error:
        parser.error(f"--shape: {error}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    report, lines, began = Report(args, args.drawn), [], time.monotonic()
    deadline = began + (args.budget or float("inf"))
    with report.progress, open_ranks(args) as ranks:
        origin = ranks.run(provenance, timeout_s=CASE_TIMEOUT_S)[0]
        report.begin("compiling")
        spilled = ranks.run(compile_problems, args.drawn, deadline - time.monotonic(), timeout_s=CASE_TIMEOUT_S)[0]
        report.console.print(f"{time.monotonic() - began:.0f} s until all was compiled", style="dim")
        for problem in args.drawn:
            if report.out_of_time(deadline):
                report.failed += 1
                left = len(args.drawn) - len(lines)
                report.console.print(f"the budget of {args.budget:g} s was used up before {left} problems", style="red")
                break
            report.begin(str(problem))
            with reported(report, problem):
                line = ranks.run(measure_problem, problem, timeout_s=CASE_TIMEOUT_S)[0]
                if "refused" in line:
                    report.failure(problem, f"{problem}: {line['refused']}")
                    continue
                lines.append(line | origin | {"seed": args.seed})
                report.write(lines[-1])
            report.progress.advance(report.task)
    for name, reason in spilled.items():
        report.console.print(f"{name}: {reason}", style="yellow", markup=False)
    if args.shape and lines:
        report.console.print(pairs(lines))
    elif lines:
        report.console.print(f"{args.refused} draws were too large, beyond {MOST_BYTES >> 30} GiB or {MOST_S:g} s")
        for text in summary(lines):
            report.console.print(text)
    report.console.print(f"{time.monotonic() - began:.1f} s in all", style="dim")
    return 1 if report.failed else 0


def speed(line: dict) -> float:
    """How many times as fast as the fastest other way ours is."""
    return min(us for us in line["others_us"].values() if us is not None) / line["ours_us"]


def summary(lines: list[dict]):
    """What a sweep comes to, as texts and tables."""
    groups = collections.defaultdict(list)
    for line in lines:
        for group in ("all", line["dtype"], line["path"], f"{line['alignment']}-byte rows", _rows(line["M"])):
            groups[group].append(speed(line))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("of", "problems", "geometric mean", f"below {LOW}", "below 0.90", "least"):
        table.add_column(heading, justify="left" if heading == "of" else "right")
    for name, values in groups.items():
        shares = (f"{sum(value < bound for value in values) / len(values):.1%}" for bound in (LOW, 0.9))
        table.add_row(name, str(len(values)), f"{geometric_mean(values):.3f}", *shares, f"{min(values):.2f}")
    yield table
    worst = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"the {WORST} worst", title_justify="left")
    for heading in ("problem", "path", "ours, us", "best other", "us", "speed"):
        worst.add_column(heading, justify="left" if heading in ("problem", "path", "best other") else "right")
    for line in sorted(lines, key=speed)[:WORST]:
        name, us = min(((us, name) for name, us in line["others_us"].items() if us is not None))[::-1]
        worst.add_row(line["problem"], line["path"], f"{line['ours_us']:.1f}", name, f"{us:.1f}", f"{speed(line):.2f}")
    yield worst


def _rows(M: int) -> str:
    return "up to 64 rows" if M <= 64 else "up to 1024 rows" if M <= 1024 else "more rows"


def pairs(lines: list[dict]) -> Table:
    """Given problems beside cuBLAS, and how their speed compares with that of the sizes rounded up."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ("problem", "path", "ours, us", "cuBLAS", "speed", "rounded up", "of its speed", "MB beside")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:2] else "right")
    rounded = {(line["number"], line["layout"]): line for line in lines if line["aligned"]}
    for line in lines:
        if line["aligned"]:
            continue
        up = rounded.get((line["number"], line["layout"]))
        done, known = line["M"] * line["N"] * line["K"], up and up["M"] * up["N"] * up["K"]
        beside = [f"{up['ours_us']:.0f}", f"{done / line['ours_us'] * up['ours_us'] / known:.2f}"] if up else ["-", "-"]
        table.add_row(
            line["problem"], line["path"], f"{line['ours_us']:.0f}", f"{min(line['others_us'].values()):.0f}",
            f"{speed(line):.2f}", *beside, f"{line['peak_bytes'] / 1e6:.0f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
