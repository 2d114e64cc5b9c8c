"""Shows the demo's result: on the terminal, as a picture, and as JSON."""

import argparse
import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tkernels.cli import write_output
from tkernels.demo.records import Result, Setup, Step


class Report:
    """The terminal output: a progress bar where there is a terminal, a line for each step, then tables."""

    def __init__(self, num_steps: int, to_stderr: bool):
        self.console = Console(stderr=to_stderr, highlight=False)
        self.progress = Progress(
            TextColumn("  training"),
            BarColumn(40),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=num_steps)

    @contextlib.contextmanager
    def waiting(self, what: str):
        if self.console.is_terminal:
            with self.console.status(f"{what} ..."):
                yield
        else:
            self.console.print(f"{what} ...")
            yield

    def setup(self, setup: Setup):
        """Print the run's configuration, one fact a line."""
        how = "Triton's interpreter on the CPU" if setup.runtime == "simulated" else f"compiled for {setup.device}"
        self._print_facts(
            runtime=f"{setup.runtime}: {how}, transport {setup.transport}",
            ranks=f"{setup.ranks}, each with {setup.share}",
            model=f"{setup.layers} layers, {setup.features} features, {setup.dtype}; "
            f"{setup.parameters:,} parameters, {setup.parameters_of_rank:,} on a rank",
            text=f"{setup.text}, {setup.characters:,} characters, {setup.vocabulary} different",
            step=f"{setup.tokens} tokens: {setup.batch} sequences of {setup.sequence} characters; seed {setup.seed}",
        )

    def _print_facts(self, **facts: str):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="cyan", min_width=9)
        grid.add_column()
        for name, value in facts.items():
            grid.add_row(name, value)
        self.console.print()
        self.console.print(Padding.indent(grid, 2))
        self.console.print()

    @contextlib.contextmanager
    def training(self):
        names = f"{'step':>6}  {'sharded':>10}  {'unsharded':>10}  {'difference':>10}  {'allowed':>8}  {'seconds':>7}"
        self.console.print(Text(names, style="bold"))
        with self.progress:
            yield

    def step(self, step: Step):
        self.progress.advance(self.task)
        good = step.difference <= step.allowed
        line = Text(f"{step.step:>6}  {step.sharded:>10.6f}  {step.unsharded:>10.6f}  ")
        line.append(f"{step.difference:>10.1e}", style="green" if good else "bold red")
        line.append(f"  {step.allowed:>8.1e}  {step.seconds:>7.2f}")
        self.console.print(line)

    def result(self, result: Result):
        """Print the operations' measurements, and the verdict as the last line."""
        if result.operations:
            self.console.print()
            self.console.print(_operations(result))
        facts = {}
        if result.gradient:
            worst, allowed = result.gradient.error, result.gradient.allowed
            facts["gradients"] = f"of step 1 within {worst:.1e} of the unsharded model's (allowed {allowed:.1e})"
        if result.plot:
            facts["picture"] = result.plot
        self._print_facts(**facts, time=f"{result.seconds:.0f} s")
        if result.agree:
            first, last = result.steps[0].sharded, result.steps[-1].sharded
            verdict = (
                f"sharded and unsharded losses agree: {len(result.steps)} steps, {first:.2f} to {last:.2f}, "
                f"within {max(step.difference for step in result.steps):.1e}"
            )
        else:
            verdict = f"sharded and unsharded losses DISAGREE: {result.problem}"
        self.console.print(Text(verdict, style="bold green" if result.agree else "bold red"))

    def write_json(self, result: Result, where: str):
        write_output(json.dumps({"agree": result.agree, **asdict(result)}, indent=2) + "\n", where)


def _operations(result: Result) -> Padding:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("operation")
    for name in ("calls", "bytes sent", "seconds", "error", "allowed"):
        table.add_column(name, justify="right")
    for row in result.operations:
        measured = ("-", "-", "-")
        if row.error is not None:
            error = Text(f"{row.error:.1e}", style="green" if row.error <= row.allowed else "bold red")
            measured = f"{row.seconds:.2f}", error, f"{row.allowed:.1e}"
        table.add_row(row.operation, f"{row.calls}", _bytes(row.sent_bytes), *measured)
    return Padding.indent(table, 2)


def _bytes(number: int) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def check_picture(path: Path):
    """Raise argparse.ArgumentError unless the path ends with a format that `draw` can write."""
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        endings = ", ".join(f".{name}" for name in sorted(formats))
        raise argparse.ArgumentError(None, f"--plot {path}: a picture's name ends with one of {endings}")


def draw(result: Result, path: Path):
    """Draw the two loss curves and, below them, their difference, in the format of the path's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    setup, steps = result.setup, [step.step for step in result.steps]
    grey, red, blue = "#c3c8d0", "#c8364b", "#2d6cb5"
    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#555555",
        "axes.grid": True,
        "grid.color": "#eceef1",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    with pyplot.rc_context(style):
        figure, (above, below) = pyplot.subplots(
            2, 1, sharex=True, figsize=(8, 5.6), height_ratios=(5, 3), layout="constrained"
        )
        above.plot(steps, [step.unsharded for step in result.steps], color=grey, linewidth=7, label="unsharded")
        sharded = [step.sharded for step in result.steps]
        above.plot(steps, sharded, color=red, marker="o", markersize=3, linewidth=1.3, label="sharded")
        above.set_ylabel("loss (nats a character)")
        above.legend(loc="upper right")
        ranks = f"{setup.ranks} rank{'s' * (setup.ranks > 1)}"
        above.set_title(
            f"A transformer on {ranks} ({setup.parallel}), {setup.dtype}, {setup.runtime} runtime: "
            "sharded and unsharded losses",
            fontsize=11, loc="left", pad=12,
        )  # fmt: skip

        below.plot(steps, [step.allowed for step in result.steps], color=grey, linewidth=2, label="allowed")
        # A logarithmic axis cannot show a difference of 0; it is drawn at fp32's resolution.
        floor = [max(step.difference, step.unsharded * 2.0**-25) for step in result.steps]
        below.plot(steps, floor, color=blue, marker="o", markersize=3, linewidth=0.8, label="difference")
        below.set_yscale("log")
        below.set_ylabel("difference")
        below.set_xlabel("step")
        below.xaxis.get_major_locator().set_params(integer=True)
        below.legend(loc="center right", ncols=2)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
