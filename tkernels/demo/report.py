"""Shows the demo's result: on the terminal, and as a picture."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from rich.filesize import decimal
from rich.text import Text

from tkernels.cli import print_facts, print_table

NAMES = 9  # width of what is at the left of facts
INSTALL = 'pip install "tkernels[demo]" brings matplotlib'
HEADINGS = f"{'step':>6}  {'sharded':>10}  {'unsharded':>10}  {'difference':>10}  {'allowed':>8}  {'seconds':>7}"


def print_setup(console, setup: dict):
    """Print the run's configuration, one fact a line, and the headings of the steps."""
    simulated = setup["runtime"] == "simulated"
    how = "Triton's interpreter on the CPU" if simulated else f"compiled for {setup['device']}"
    facts = {
        "runtime": "{runtime}: {how}, transport {transport}",
        "ranks": "{ranks}, each with {share}",
        "model": "{layers} layers, {features} features, {dtype}; "
        "{parameters:,} parameters, {parameters_of_rank:,} on a rank",
        "text": "{text}, {characters:,} characters, {vocabulary} different",
        "step": "{tokens} tokens: {batch} sequences of {sequence} characters; seed {seed}",
    }
    print_facts(console, ((name, fact.format(how=how, **setup)) for name, fact in facts.items()), NAMES)
    console.print(f"\n{HEADINGS}", style="bold")


def print_step(console, step):
    line = Text(f"{step.step:>6}  {step.sharded:>10.6f}  {step.unsharded:>10.6f}  ")
    line.append(f"{step.difference:>10.1e}", style="green" if step.difference <= step.allowed else "bold red")
    line.append(f"  {step.allowed:>8.1e}  {step.seconds:>7.2f}")
    console.print(line)


def print_result(console, steps, gradient, operations, problem, plot, seconds, **_):
    """Print what was communicated, and the verdict as the last line."""
    if operations:
        numbers, rows = ("calls", "bytes sent", "seconds"), []
        for row in operations:
            took = "-" if row.seconds is None else f"{row.seconds:.2f}"
            rows.append((row.operation, f"{row.calls}", decimal(row.sent_bytes), took))
        print_table(console, ("operation", *numbers), rows, right=numbers)
    within = f"of step 1 within {gradient.error:.1e} of the unsharded model's (allowed {gradient.allowed:.1e})"
    picture = plot or (None if find_spec("matplotlib") else f"none, {INSTALL}")
    facts = {"gradients": within, "picture": picture, "time": f"{seconds:.0f} s"}
    print_facts(console, ((name, fact) for name, fact in facts.items() if fact), NAMES)
    verdict = f"sharded and unsharded losses DISAGREE: {problem}"
    if not problem:
        losses = f"{steps[0].sharded:.2f} to {steps[-1].sharded:.2f}"
        within = max(step.difference for step in steps)
        verdict = f"sharded and unsharded losses agree: {len(steps)} steps, {losses}, within {within:.1e}"
    console.print(f"\n{verdict}", style="bold red" if problem else "bold green")


def check_picture(path: Path):
    """Raise argparse.ArgumentError unless the path ends with a format that `draw` can write."""
    if not find_spec("matplotlib"):
        raise argparse.ArgumentError(None, f"--plot {path}: {INSTALL}, which draws pictures")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        endings = ", ".join(f".{name}" for name in sorted(formats))
        raise argparse.ArgumentError(None, f"--plot {path}: a picture's name ends with one of {endings}")


def draw(setup: dict, steps: list, path: Path):
    """Draw the two loss curves and, below them, their difference, in the format of the path's suffix."""
    from matplotlib.figure import Figure

    grey, red, blue = "#c3c8d0", "#c8364b", "#2d6cb5"
    numbers = [step.step for step in steps]
    # A logarithmic axis cannot show a difference of 0; it is drawn at fp32's resolution.
    difference = [max(step.difference, step.unsharded * 2.0**-25) for step in steps]
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 3))
    above.plot(numbers, [step.unsharded for step in steps], color=grey, linewidth=7, label="unsharded")
    above.plot(numbers, [step.sharded for step in steps], color=red, marker="o", markersize=3, label="sharded")
    below.plot(numbers, [step.allowed for step in steps], color=grey, linewidth=2, label="allowed")
    below.plot(numbers, difference, color=blue, marker="o", markersize=3, linewidth=0.8, label="difference")
    title = "A transformer, {parallel} of {ranks}, {dtype}, {runtime} runtime: sharded and unsharded losses"
    above.set_title(title.format_map(setup), fontsize=11, loc="left", pad=12)
    above.set_ylabel("loss (nats a character)")
    below.set(yscale="log", ylabel="difference", xlabel="step")
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes, place in (above, "upper right"), (below, "center right"):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eceef1")
        axes.set_axisbelow(True)
        axes.legend(loc=place, frameon=False, ncols=2 if axes is below else 1)
    figure.savefig(path, dpi=150)
