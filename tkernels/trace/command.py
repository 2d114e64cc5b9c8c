"""`tkernels trace`: records an operation on ranks of this machine, writes the trace, and summarizes it."""

import argparse
import dataclasses
import functools
import json
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import tkernels
from tkernels import operators, shapes
from tkernels.choice import overlap_config
from tkernels.cli import write_output
from tkernels.comm import collectives
from tkernels.comm.context import Context
from tkernels.gemm import layout_of
from tkernels.launch import default_ranks, launch
from tkernels.timing import Stopwatch
from tkernels.trace.recorder import tracing
from tkernels.trace.timeline import SHARES, Summary

WARMUPS = 3
PAUSE_US = 2000.0  # for the host to queue a recorded call
TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Options:
    """The command's arguments.

    shape: a name, or MxNxK.
    ranks: None is all GPUs, or 2.
    json: "-" is stdout.
    """

    operation: str
    shape: str
    ranks: int | None = None
    dtype: str = "bf16"
    calls: int = 3
    out: Path = Path("tkernels-trace.json")
    json: str | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """The command's result.

    sizes: M, N, K over all ranks.
    summary: of the last call.
    us, traced_us: time of a call without and with tracing, slowest rank, median of the calls.
    """

    operation: str
    shape: str
    sizes: tuple[int, int, int]
    dtype: str
    runtime: str
    transport: str
    device: str
    us: float
    traced_us: float
    clock_error_us: float
    tick_ns: int
    lost: int
    summary: Summary
    out: str


def run(options: Options) -> int:
    """Record, write, report. Returns 0. Raises argparse.ArgumentError for what cannot be recorded."""
    ranks = options.ranks or default_ranks()
    try:
        sizes = shapes.find([options.operation], [options.shape], groups=False)[options.operation][options.shape]
        _check(options, sizes, ranks)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    result = launch(record, ranks, options, sizes, timeout_s=TIMEOUT_S)[0]
    _report(result, Console(stderr=options.json == "-", highlight=False))
    if options.json:
        write_output(json.dumps(dataclasses.asdict(result), indent=1) + "\n", options.json)
    return 0


def _check(options: Options, sizes: shapes.Shape, ranks: int):
    M, N, K = sizes
    if ranks < 2:
        raise ValueError(f"{ranks} rank has nobody to talk to, and nothing to record; pass --ranks of at least 2")
    if tkernels.RUNTIME == "simulated" and (refusal := shapes.interpreter_refusal(sizes)):
        raise ValueError(refusal)
    shared = {"M": M} if "all_reduce" not in options.operation else {}
    shared |= {"N": N} if options.operation == "all_gather_matmul" else {}
    shared |= {"K": K} if options.operation in ("matmul_reduce_scatter", "matmul_all_reduce") else {}
    odd = [f"{name}={size}" for name, size in shared.items() if size % ranks]
    if odd:
        raise ValueError(f"{options.operation} {options.shape}: {', '.join(odd)} doesn't divide by {ranks} ranks")


def record(ctx: Context, options: Options, sizes: shapes.Shape) -> Result:
    """Collective. Call the operation under `tracing`; rank 0 writes the trace."""
    operands = _operands(ctx, options.operation, sizes, shapes.DTYPES[options.dtype])
    if "matmul" in options.operation:
        operation = functools.partial(getattr(operators, options.operation), ctx=ctx)
        x, w = operands
        choose = functools.partial(
            overlap_config, ctx, options.operation, sizes[0], *w.shape, x.dtype, layout_of(x, w)
        )
        config = choose()
        if config.copied:  # the copy engine leaves no marks; BY_PROGRAMS below avoids it too
            config = choose(sending=True)
    else:
        operation = functools.partial(getattr(collectives, options.operation), ctx)
        config = collectives.BY_PROGRAMS
    operation = functools.partial(operation, config=config)

    watch = Stopwatch(ctx)

    def calls(number: int) -> float:
        us = [watch.time(lambda: operation(*operands), PAUSE_US)[0] for _ in range(number)]
        return statistics.median(map(max, zip(*ctx.group.gather(us), strict=True)))

    with tracing(ctx):  # compiles the traced kernels
        calls(WARMUPS)
    calls(WARMUPS)
    us = calls(options.calls)
    with tracing(ctx) as trace:
        traced_us = calls(options.calls)
    if ctx.rank == 0:
        trace.save(options.out)
    return Result(
        options.operation, options.shape, sizes, options.dtype, ctx.runtime, ctx.transport,
        torch.cuda.get_device_name() if ctx.device.type == "cuda" else "Triton's interpreter on the CPU",
        us, traced_us, trace.clock_error_us, trace.tick_ns, trace.lost, trace.summary(), str(options.out),
    )  # fmt: skip


def _operands(ctx: Context, operation: str, sizes: shapes.Shape, dtype: torch.dtype) -> list[torch.Tensor]:
    (M, N, K), size = sizes, ctx.size
    made = {
        "all_gather_matmul": [(M // size, K), (N // size, K)],
        "matmul_reduce_scatter": [(M, K // size), (N, K // size)],
        "matmul_all_reduce": [(M, K // size), (N, K // size)],
        "all_gather": [(M // size, K)],
        "reduce_scatter": [(M, N)],
        "all_reduce": [(M, N)],
    }[operation]
    return [torch.randn(shape, device=ctx.device).to(dtype) for shape in made]


def _report(result: Result, console: Console):
    summary = result.summary
    M, N, K = result.sizes
    kinds = [kind for kind in SHARES if any(kind in shares for shares in summary.shares.values())]
    table = Table("programs", *kinds, title="their time in the last call, all ranks", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for role, shares in summary.shares.items():
        cells = [f"{100 * shares[kind]:.1f} %" if kind in shares else "" for kind in kinds]
        table.add_row(f"{summary.programs[role]} {role}", *cells)

    def say(text: str):
        console.print(text, markup=False, soft_wrap=True)

    say(
        f"{result.operation} {result.shape} (M {M}, N {N}, K {K}, {result.dtype}) on {summary.ranks} ranks, "
        f"{result.device}, transport {result.transport}"
    )
    say(f"{_time(result.traced_us)} a call, {_time(result.us)} without tracing")
    console.print(table)
    if "compute" in summary.shares:
        say(f"data moves for {_time(summary.moving_us)}, {100 * summary.hidden:.0f} % of it while programs compute")
    step = _time(result.tick_ns / 1e3)
    say(f"the ranks' clocks are aligned to {_time(result.clock_error_us)}; the smallest step seen of one is {step}")
    if result.lost:
        say(f"{result.lost} marks found no room and are missing")
    say(f"{result.out}: open it in https://ui.perfetto.dev or chrome://tracing")


def _time(us: float) -> str:
    return f"{us / 1e3:.1f} ms" if us >= 1e4 else f"{us:.1f} us" if us >= 10 else f"{us:.3g} us"
