"""What benches of training steps have in common: several ways to one result, each with its time and its peak memory."""

import argparse
import sys
from collections.abc import Callable

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import tkernels
from bench.records import append
from tkernels.cli import file_to_write
from tkernels.launch import RankError, RankPool

TIMEOUT_S = 600.0


def parser_of(module: str, description: str, *, iterations: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ranks = 2 if tkernels.RUNTIME == "simulated" else torch.cuda.device_count()
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--iterations", type=int, default=iterations, help="steps of each way")
    parser.add_argument("--json", type=file_to_write, metavar="PATH", help="append one JSON line for each comparison")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace):
    """Ends the program if a number makes no sense."""
    if args.ranks < 1 or (tkernels.RUNTIME == "nvshmem" and args.ranks > torch.cuda.device_count()):
        parser.error(f"--ranks {args.ranks}: there are {torch.cuda.device_count()} GPUs; at least one rank is needed")
    if args.iterations < 1:
        parser.error(f"--iterations {args.iterations}: measure at least once")


def table(title: str, lines: list[dict], labels: Callable[[dict], dict[str, str]]) -> Table:
    """labels: of a record, the ways in it and what they are called. One of them is "ours"."""
    machine = f"{lines[0]['ranks']} x {lines[0]['gpu']}" if lines[0]["gpu"] else f"{lines[0]['ranks']} ranks, simulated"
    result = Table(title=f"{title}, {machine}, us, median", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    result.add_column("", no_wrap=True)
    for heading in ("step", "p10-p90", "/ours", "host", "peak MiB", "/ours"):
        result.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        for way, label in labels(line).items():
            host, peak = line[f"{way}_host_us"], line[f"{way}_peak_bytes"]
            result.add_row(
                f"{line['shape']}, {label}",
                f"{line[f'{way}_us']:.0f}",
                f"{line[f'{way}_p10_us']:.0f}-{line[f'{way}_p90_us']:.0f}",
                f"{line[f'{way}_us'] / line['ours_us']:.3f}",
                "-" if host is None else f"{host:.0f}",
                "-" if peak is None else f"{peak / 2**20:.0f}",
                "-" if peak is None else f"{peak / line['ours_peak_bytes']:.3f}",
            )
    return result


def run(args: argparse.Namespace, comparisons: dict[str, tuple], draw: Callable[[list[dict]], Table]) -> int:
    """Run function(ctx, *arguments) on all ranks for each name, append its record, print all, and return the exit code.

    Each on ranks of its own, as contexts keep a workspace for each stream that models have used. A comparison that is
    refused, or whose rank failed, has no record; the others go on.
    """
    console, lines = Console(width=None if sys.stdout.isatty() else 120, highlight=False), []
    # For units of 218 M parameters, of which three are gathered at a time, beside those on their way.
    options = {"heap_bytes": 6 << 30} if tkernels.RUNTIME == "nvshmem" else {}
    for name, (function, *arguments) in comparisons.items():
        try:
            with RankPool(args.ranks, ctx_options=options) as pool:
                line = pool.run(function, *arguments, timeout_s=TIMEOUT_S)[0]
        except RankError as error:
            line = {"refused": str(error)}
        if "refused" in line:
            console.print(f"{name}: no number is reported: {line['refused']}", style="red", markup=False)
            continue
        lines.append(line)
        if args.json is not None:
            append(args.json, line)
    if lines:
        console.print(draw(lines))
    return 0 if len(lines) == len(comparisons) else 1
