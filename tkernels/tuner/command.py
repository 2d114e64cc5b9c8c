"""`tkernels tune`: tunes shapes on ranks of this machine, and lists, exports or clears the stored results."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, fields

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tkernels
from tkernels import shapes
from tkernels.cli import write_output
from tkernels.comm import tuned
from tkernels.configs import OPERATIONS
from tkernels.launch import RankError, RankPool, default_ranks
from tkernels.tuner import BUDGET_S, Outcome, tune
from tkernels.tuner.candidates import check_grid, parse_grid
from tkernels.tuner.problem import Problem

BEST = 5
WIDTH = 120
SHAPE_TIMEOUT_S = 600.0  # on top of the budget, for compilation and the last round


@dataclass(frozen=True)
class Options:
    """The command's arguments.

    shape: names, groups and MxNxK, comma-separated.
    json, export: a path, or "-" for stdout.
    """

    operation: str | None = None
    shape: str | None = None
    ranks: int | None = None
    dtype: str = "bf16"
    layout: str = "TN"
    transport: str = "auto"
    budget: float = BUDGET_S
    grid: tuple[str, ...] = ()
    json: str | None = None
    list: bool = False
    export: str | None = None
    clear: bool = False


def run(options: Options) -> int:
    """Run the command. Returns 0, or 1 if a shape could not be tuned. Raises argparse.ArgumentError."""
    given = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    instead = [name for name in given if name in ("list", "export", "clear")]  # instead of tuning
    others = ["OP" if name == "operation" else f"--{name}" for name in given if name not in instead]
    if instead and others:
        raise argparse.ArgumentError(
            None,
            f"--{instead[0]} is about all that is remembered, and goes without {', '.join(others)}; --export PATH "
            f"writes it as JSON",
        )
    to_stderr = "-" in (options.json, options.export)
    console = Console(stderr=to_stderr, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if options.list:
        return _list(console)
    if options.export:
        return _export(console, options.export)
    if options.clear:
        console.print(tuned.printable(f"{tuned.clear()} files removed from {tuned.folder()}"), markup=False)
        return 0
    return _tune(console, options)


def problems_of(options: Options, ranks: int) -> list[Problem]:
    """The problems to tune: for each operation, the largest GEMM first, since its chunks bind the others.

    Raises ValueError for arguments that cannot be tuned.
    """
    if options.operation not in (None, "all", *OPERATIONS):
        raise ValueError(f"there is no operation {options.operation!r}; there are {', '.join(OPERATIONS)}, and all")
    asked = [options.operation]
    if options.operation in (None, "all"):
        asked = list(OPERATIONS) if ranks > 1 else ["matmul"]
    simulated = tkernels.RUNTIME == "simulated"
    names = (("tiny" if simulated else "layers") if options.shape is None else options.shape).split(",")
    dtype, problems = shapes.DTYPES[options.dtype], []
    for operation, found in shapes.find(asked, names).items():
        problems += [Problem(operation, *sizes, dtype, options.layout) for sizes in found.values()]
    for problem in problems:
        problem.check(ranks)
        if simulated and (refusal := shapes.interpreter_refusal((problem.M, problem.N, problem.K))):
            raise ValueError(refusal)
    return sorted(dict.fromkeys(problems), key=lambda problem: (problem.operation, *problem.key(ranks)[1:4]))[::-1]


def _tune(console: Console, options: Options) -> int:
    ranks = options.ranks or default_ranks()
    try:
        problems = problems_of(options, ranks)
        grid = _grid_of(options, problems)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    if ranks == 1 and options.operation in (None, "all"):
        console.print("one rank multiplies alone, whatever the operation: matmul is tuned, and the others are left out")
    outcomes, failed = [], 0
    with RankPool(ranks, ctx_options={"transport": options.transport}) as pool:
        _start(pool)
        for number, problem in enumerate(problems):
            try:
                outcome = pool.run(search, problem, options.budget, grid, timeout_s=SHAPE_TIMEOUT_S + options.budget)[0]
            except RankError as error:
                failed += 1
                console.print(f"{problem}: {error.headline}", style="red", markup=False)
                continue
            outcomes.append(outcome)
            console.print(f"[{number + 1}/{len(problems)}] {summary(outcome)}", markup=False)
            if len(problems) == 1 or grid:
                console.print(table_of(outcome))
                for line in refusals(outcome):
                    console.print(line, style="dim", markup=False)
    if tkernels.RUNTIME == "simulated":
        console.print("simulated runtime: times are the interpreter's")
    if options.json:
        write_output("".join(json.dumps(_plain(outcome)) + "\n" for outcome in outcomes), options.json)
    return 1 if failed else 0


def _grid_of(options: Options, problems: list[Problem]) -> dict:
    grid = parse_grid(list(options.grid))
    for problem in problems:
        check_grid(grid, problem.operation)
    return grid


def _start(pool: RankPool):
    """Start the ranks. Raises ValueError for options that `init` rejects, as it would for every shape."""
    try:
        pool.run(started)
    except RankError as error:
        if isinstance(error.__cause__, ValueError):
            raise ValueError(str(error.__cause__)) from error
        raise


def started(ctx):
    """Does nothing: running it starts the ranks."""


def search(ctx, problem: Problem, budget_s: float, grid: dict) -> Outcome:
    """Collective. Tune one shape."""
    names = ("operation", "M", "N", "K", "dtype")
    return tune(
        *(getattr(problem, name) for name in names), layout=problem.layout, ctx=ctx, budget_s=budget_s, grid=grid
    )


def summary(outcome: Outcome) -> str:
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


def table_of(outcome: Outcome) -> Table:
    """The best candidates of one search."""
    result = Table(title="best of those measured longest, us, slowest rank", title_justify="left", box=box.SIMPLE_HEAD)
    result.add_column("change from the default", overflow="fold")
    for heading in ("median", "p10-p90", "times", "/ library's GEMM"):
        result.add_column(heading, justify="right", no_wrap=True)
    for one in outcome.measured[:BEST]:
        spread = f"{one.p10_us:.1f}-{one.p90_us:.1f}"
        ratio = f"{one.us / outcome.library_us:.2f}" if outcome.library_us else "-"
        result.add_row(one.change, f"{one.us:.1f}", spread, str(one.iterations), ratio)
    return result


def refusals(outcome: Outcome) -> list[str]:
    """The reasons why candidates were not measured, the most frequent one first."""
    return [f"{count} not tried, {reason}" for reason, count in outcome.refused.most_common()]


def _plain(outcome: Outcome) -> dict:
    problem = asdict(outcome.problem) | {"dtype": str(outcome.problem.dtype).removeprefix("torch.")}
    return asdict(outcome) | {"problem": problem, "refused": dict(outcome.refused)}


def _list(console: Console) -> int:
    records, damaged = tuned.saved()
    title = Text(tuned.printable(f"remembered in {tuned.folder()}, and with the package"))
    result = Table(title=title, title_justify="left", box=box.SIMPLE)
    for heading in ("operation", "up to M x N x K of a rank", "where", "us", "default", "found"):
        result.add_column(heading, overflow="fold", justify="right" if heading in ("us", "default") else "left")
    for origin, group in (("with the package", tuned.shipped()), ("", records)):
        for record in group:
            key = record["key"]
            sizes = f"{key.get('M')}x{key.get('N')}x{key.get('K')} {key.get('dtype')} {key.get('layout')}"
            where = f"{key['ranks']} x {key['gpu']}, {key['transport']}"
            times = [record.get(name, "-") for name in ("us", "default_us")]
            times = [f"{each:.1f}" if isinstance(each, float) else each for each in times]
            versions = f"tkernels {key['tkernels']}, torch {key['torch']}, triton {key['triton']}"
            cells = key["operation"], sizes, where, *times, origin or f"{record.get('date')}, {versions}"
            result.add_row(*(Text(tuned.printable(each)) for each in cells))
    console.print(result)
    for path, reason in damaged.items():
        console.print(tuned.printable(f"{path} is ignored: {reason}"), style="yellow", markup=False)
    return 0


def _export(console: Console, target: str) -> int:
    """Write the stored records as JSON lines, the format of the records that come with the package."""
    records, damaged = tuned.saved()
    lines = "".join(json.dumps(record) + "\n" for record in sorted(records, key=lambda r: json.dumps(r["key"])))
    write_output(lines, target)
    console.print(f"{len(records)} records written; {len(damaged)} files that hold none left out", markup=False)
    return 0
