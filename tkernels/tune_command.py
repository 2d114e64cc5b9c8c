"""`tkernels tune`: tunes shapes on ranks of this machine, and lists, exports or clears the stored results."""

import argparse
import contextlib
import json
from dataclasses import asdict

import tkernels
from tkernels.cli import console_of, count, output, print_table, write_json

BEST = 5
WIDTH = 120
SHAPE_TIMEOUT_S = 600.0  # on top of the budget, for compilation and the last round


def add_arguments(parser: argparse.ArgumentParser):
    parser.description = (
        "Measure configurations of an operation on shapes of yours, on ranks of this machine; the best one is "
        "remembered for calls of that size on such a machine. Exit code 1 if a shape could not be tuned."
    )
    parser.epilog = "example: tkernels tune all_gather_matmul --shape 8192x10240x8192"
    parser.add_argument(
        "operation", nargs="?", metavar="OP",
        help="all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, matmul, or all; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--shape", metavar="MxNxK",
        help="sizes over all ranks, or names of tkernels.shapes, with commas; those of an operation are listed for a "
        "wrong one; default: layers (simulated: tiny)",
    )  # fmt: skip
    parser.add_argument("--ranks", type=count, metavar="N", help="default: all GPUs, or 2 on the simulated runtime")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32", "tf32", "fp8"), default="bf16",
        help="tf32: fp32 where torch's switches allow TF32; fp8: e4m3 with a scale a row; default: bf16",
    )  # fmt: skip
    parser.add_argument(
        "--accum", choices=("fast", "precise"), help="of fp8: precise: with fast_accum=False; default: fast"
    )
    parser.add_argument(
        "--layout", choices=("TN", "NN", "NT", "TT", "pointers"), default="TN",
        help="of w and x in memory, as BLAS names it; TN: K contiguous in both; NN: w.t() of a [K, N]; pointers: as "
        "TN, at addresses that TMA can't take, which are no multiples of 16 bytes; what is tuned of sizes that it "
        "can't take is for pointers, whatever is asked; default: TN",
    )  # fmt: skip
    parser.add_argument(
        "--transport", choices=("auto", "peer", "nvshmem", "simulated"), default="auto",
        help="how bytes reach peers: by loads and stores (peer) or by NVSHMEM's device calls (nvshmem); simulated: on "
        "the runtime of that name; default: auto, the first that reaches all ranks",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=_seconds, metavar="S", default=30.0,
        help="seconds for a shape, compilations not counted; default: 30",
    )  # fmt: skip
    parser.add_argument("--grid", nargs="+", default=[], metavar="FIELD=A,B", help="try these values, and no others")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show what is remembered, and tune nothing")
    instead.add_argument("--export", type=output, metavar="PATH", help="write it as JSON lines; - is stdout")
    instead.add_argument("--clear", action="store_true", help="forget it")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 if a shape could not be tuned. Raises argparse.ArgumentError."""
    from tkernels import tuned

    instead = next((name for name in ("list", "export", "clear") if getattr(arguments, name)), None)
    if instead:  # of tuning
        tuning = ("operation", "shape", "ranks", "dtype", "accum", "layout", "transport", "budget", "grid", "json")
        given = [name for name in tuning if getattr(arguments, name) != arguments.parser.get_default(name)]
        if given:
            others = ["OP" if name == "operation" else f"--{name}" for name in given]
            raise argparse.ArgumentError(
                None,
                f"--{instead} is about all that is remembered, and goes without {', '.join(others)}; --export PATH "
                f"writes it as JSON",
            )
    console = console_of(arguments.json, arguments.export, width=WIDTH)
    if arguments.list:
        return _list(console)
    if arguments.export:
        return _export(console, arguments.export)
    if arguments.clear:
        try:
            said, code = f"{tuned.clear()} records removed: {tuned.path()}", 0
        except OSError as error:
            said, code = f"tkernels tune --clear: {error}", 1
        console.print(tuned.printable(said))
        return code
    with _switched(arguments.dtype == "tf32"):
        return _tune(console, arguments)


def _switched(tf32: bool):
    """As TF32, what is tuned is multiplied as torch's switch says, on all ranks."""
    from tkernels.library import in_precision

    return in_precision("tf32") if tf32 else contextlib.nullcontext()


def _tune(console, arguments: argparse.Namespace) -> int:
    from tkernels.launch import RankError, RankPool, default_ranks, nothing
    from tkernels.variants import check_grid, parse_grid

    ranks = arguments.ranks or default_ranks()
    try:
        jobs = jobs_of(arguments, ranks)
        grid = parse_grid(arguments.grid)
        for job in jobs:
            check_grid(grid, job.operation)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    if ranks == 1 and arguments.operation in (None, "all"):
        console.print("one rank multiplies alone, whatever the operation: matmul is tuned, and the others are left out")
    outcomes = []
    with RankPool(ranks, ctx_options={"transport": arguments.transport}) as pool:
        try:
            pool.run(nothing)
        except RankError as error:  # for options that init rejects, as it would for every shape
            raise ValueError(str(error.__cause__)) if isinstance(error.__cause__, ValueError) else error from error
        for number, job in enumerate(jobs, 1):
            timeout_s = SHAPE_TIMEOUT_S + arguments.budget
            try:
                how = arguments.budget, grid, arguments.dtype == "tf32"
                outcome = pool.run(search, job, *how, timeout_s=timeout_s)[0]
            except RankError as error:
                console.print(f"{job}: {error.headline}", style="red")
                continue
            outcomes.append(outcome)
            console.print(f"[{number}/{len(jobs)}] {summary(outcome)}")
            if len(jobs) == 1 or grid:
                print_best(console, outcome)
                for reason, times in outcome.refused.most_common():
                    console.print(f"{times} not tried, {reason}", style="dim")
    if tkernels.RUNTIME == "simulated":
        console.print("simulated runtime: times are the interpreter's")
    write_json([_plain(outcome) for outcome in outcomes], arguments.json)
    return 1 if len(outcomes) < len(jobs) else 0


def search(ctx, job, budget_s: float, grid: dict, tf32: bool):
    """Collective. Tune one shape."""
    from tkernels.tune import tune

    with _switched(tf32):
        return tune(**vars(job), ctx=ctx, budget_s=budget_s, grid=grid)


def jobs_of(arguments: argparse.Namespace, ranks: int) -> list:
    """The jobs, the largest GEMM first. Raises ValueError for arguments that cannot be tuned."""
    from tkernels import shapes
    from tkernels.configs import OPERATIONS
    from tkernels.tune import Job

    if arguments.operation not in (None, "all", *OPERATIONS):
        raise ValueError(f"there is no operation {arguments.operation!r}; there are {', '.join(OPERATIONS)}, and all")
    asked = [arguments.operation]
    if arguments.operation in (None, "all"):
        asked = list(OPERATIONS) if ranks > 1 else ["matmul"]
    simulated = tkernels.RUNTIME == "simulated"
    names = (("tiny" if simulated else "layers") if arguments.shape is None else arguments.shape).split(",")
    if arguments.accum and arguments.dtype != "fp8":
        raise ValueError(f"--accum {arguments.accum} is of fp8, and --dtype is {arguments.dtype}")
    how = shapes.WITH_TF32[arguments.dtype], arguments.layout, arguments.accum != "precise"
    found = shapes.find(asked, names)
    jobs = [Job(operation, *sizes, *how) for operation, named in found.items() for sizes in named.values()]
    for job in jobs:
        job.check(ranks)
        shapes.check_interpretable(job.M, job.N, job.K)
    return sorted(dict.fromkeys(jobs), key=lambda job: (job.operation, *job.key(ranks)[1:4]))[::-1]


def summary(outcome) -> str:
    """One line with the result of a search."""
    best, default = outcome.best, outcome.default
    text = f"{outcome.problem}: {best.us:.1f} us ({best.change})"
    if best != default:
        text += f", {default.us / best.us:.2f}x the default's {default.us:.1f}"
    text += f"; {len(outcome.measured)} measured in {outcome.seconds:.1f} s"
    text += "" if outcome.finished else ", cut short by the budget"
    if outcome.choice and outcome.choice.path == "plain":
        text += f"; used with path='fused' alone, for calls of this size are {outcome.choice}"
    return text


def print_best(console, outcome):
    """The best candidates of one search."""
    rows = []
    for one in outcome.measured[:BEST]:
        spread = f"{one.p10_us:.1f}-{one.p90_us:.1f}"
        ratio = f"{one.us / outcome.library_us:.2f}" if outcome.library_us else "-"
        rows.append((one.change, f"{one.us:.1f}", spread, str(one.iterations), ratio))
    numbers = ("median", "p10-p90", "times", "/ library's GEMM")
    title = "best of those measured longest, us, slowest rank"
    print_table(console, ("change from the default", *numbers), rows, title, right=numbers)


def _plain(outcome) -> dict:
    problem = asdict(outcome.problem) | {"dtype": str(outcome.problem.dtype).removeprefix("torch.")}
    return asdict(outcome) | {"problem": problem, "refused": dict(outcome.refused)}


def _list(console) -> int:
    from tkernels import tuned

    (records, damaged), rows = tuned.saved(), []
    for origin, group in (("with the package", tuned.shipped()), ("", records)):
        for record in group:
            key = record["key"]
            sizes = f"{key.get('M')}x{key.get('N')}x{key.get('K')} {key.get('dtype')} {key.get('layout')}"
            where = f"{key['ranks']} x {key['gpu']}, {key['transport']}"
            times = [record.get(name, "-") for name in ("us", "default_us")]
            times = [f"{each:.1f}" if isinstance(each, float) else each for each in times]
            versions = f"tkernels {key['tkernels']}, torch {key['torch']}, triton {key['triton']}"
            cells = key["operation"], sizes, where, *times, origin or f"{record.get('date')}, {versions}"
            rows.append([tuned.printable(each) for each in cells])
    headings = ("operation", "up to M x N x K of a rank", "where", "us", "default", "found")
    title = tuned.printable(f"remembered in {tuned.path()}, and with the package")
    print_table(console, headings, rows, title, right=("us", "default"))
    for place, reason in damaged.items():
        console.print(tuned.printable(f"{place} is ignored: {reason}"), style="yellow")
    return 0


def _export(console, target: str) -> int:
    """Write the stored records as JSON lines, the format of the records that come with the package."""
    from tkernels import tuned

    records, damaged = tuned.saved()
    write_json(sorted(records, key=lambda record: json.dumps(record["key"])), target)
    console.print(f"{len(records)} records written; {len(damaged)} lines that hold none left out")
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, not {text!r}")
    return seconds
