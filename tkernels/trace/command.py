"""`tkernels trace`: records an operation on ranks of this machine, writes the trace, and summarizes it."""

import argparse
import functools
import statistics
from pathlib import Path

from tkernels.cli import console_of, count, file_to_write, print_table, write_json

OPERANDS = {  # of a rank, by operation; sizes in lower case are divided by the ranks
    "all_gather_matmul": ("mK", "nK"),
    "matmul_reduce_scatter": ("Mk", "Nk"),
    "matmul_all_reduce": ("Mk", "Nk"),
    "all_gather": ("mK",),
    "reduce_scatter": ("MN",),
    "all_reduce": ("MN",),
}
WARMUPS = 3
PAUSE_US = 2000.0  # for the host to queue a recorded call


def add_arguments(parser: argparse.ArgumentParser):
    parser.description = (
        "Record when each program of an operation's kernel waits, computes and sends, on every rank; write it as a "
        "trace for https://ui.perfetto.dev and chrome://tracing, and print what the time went to."
    )
    parser.epilog = "example: tkernels trace all_gather_matmul --shape tiny --ranks 2"
    parser.add_argument("operation", choices=OPERANDS, metavar="OP", help=", ".join(OPERANDS))
    parser.add_argument(
        "--shape", required=True, metavar="NAME",
        help="MxNxK over all ranks, or a name of tkernels.shapes, which are listed for a wrong one; on the simulated "
        "runtime: tiny, tiny-wide, tiny-m1, or as small",
    )  # fmt: skip
    parser.add_argument("--ranks", type=count, metavar="N", help="default: all GPUs, or 2 on the simulated runtime")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="default: bf16")
    parser.add_argument("--calls", type=count, metavar="N", default=3, help="how many to record; default: 3")
    parser.add_argument(
        "--out", type=file_to_write, metavar="PATH", default="tkernels-trace.json",
        help="where the trace goes, packed if it ends with .gz; default: tkernels-trace.json",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Record, write, report. Returns 0. Raises argparse.ArgumentError for what cannot be recorded."""
    from tkernels import shapes
    from tkernels.launch import default_ranks, launch

    operation, shape, ranks = arguments.operation, arguments.shape, arguments.ranks or default_ranks()
    try:
        sizes = shapes.find([operation], [shape], groups=False)[operation][shape]
        _check(operation, shape, sizes, ranks)
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    measured = launch(record, ranks, operation, sizes, arguments.dtype, arguments.calls, arguments.out)
    result = {"operation": operation, "shape": shape, "sizes": sizes, "dtype": arguments.dtype} | measured[0]
    _report(result, console_of(arguments.json))
    write_json(result, arguments.json)
    return 0


def _check(operation: str, shape: str, sizes: tuple[int, int, int], ranks: int):
    from tkernels import shapes

    if ranks < 2:
        raise ValueError(f"{ranks} rank has nobody to talk to, and nothing to record; pass --ranks of at least 2")
    shapes.check_interpretable(*sizes)
    divided = "".join(OPERANDS[operation]) + ("m" if "scatter" in operation else "")  # the result's M
    named = zip("MNK", sizes, strict=True)
    odd = [f"{name}={size}" for name, size in named if name.lower() in divided and size % ranks]
    if odd:
        raise ValueError(f"{operation} {shape}: {', '.join(odd)} doesn't divide by {ranks} ranks")


def record(ctx, operation: str, sizes: tuple[int, int, int], dtype: str, calls: int, out: Path) -> dict:
    """Collective. Call the operation under `tracing`; rank 0 writes the trace. Returns what the command reports.

    us, traced_us: time of a call without and with tracing, slowest rank, median of the calls.
    summary: of the last call.
    """
    import torch

    from tkernels import operators
    from tkernels.choice import overlap_config
    from tkernels.comm import collectives
    from tkernels.gemm import fused_layout, precision
    from tkernels.shapes import DTYPES
    from tkernels.timing import Stopwatch
    from tkernels.trace.recorder import tracing

    named = dict(zip("MNKmnk", (*sizes, *(size // ctx.size for size in sizes)), strict=True))
    shapes = [[named[name] for name in operand] for operand in OPERANDS[operation]]
    operands = [torch.randn(shape, device=ctx.device).to(DTYPES[dtype]) for shape in shapes]
    if "matmul" in operation:
        function = functools.partial(getattr(operators, operation), ctx=ctx)
        x, w = operands
        how = precision(x.dtype)
        problem = operation, sizes[0], *w.shape, x.dtype, fused_layout(x, w, how)
        choose = functools.partial(overlap_config, ctx, *problem, precision=how)
        config = choose()
        if config.copied:  # the copy engine leaves no marks; BY_PROGRAMS below avoids it too
            config = choose(sending=True)
    else:
        function, config = functools.partial(getattr(collectives, operation), ctx), collectives.BY_PROGRAMS
    call = functools.partial(function, *operands, config=config)
    watch = Stopwatch(ctx)

    def us_of(number: int) -> float:
        us = [watch.time(call, PAUSE_US)[0] for _ in range(number)]
        return statistics.median(map(max, zip(*ctx.group.gather(us), strict=True)))

    with tracing(ctx):  # compiles the traced kernels
        us_of(WARMUPS)
    us_of(WARMUPS)
    us = us_of(calls)
    with tracing(ctx) as trace:
        traced_us = us_of(calls)
    if ctx.rank == 0:
        trace.save(out)
    on_gpu = ctx.device.type == "cuda"
    return {
        "runtime": ctx.runtime,
        "transport": ctx.transport,
        "device": torch.cuda.get_device_name() if on_gpu else "Triton's interpreter on the CPU",
        "us": us,
        "traced_us": traced_us,
        "clock_error_us": trace.clock_error_us,
        "tick_ns": trace.tick_ns,
        "lost": trace.lost,
        "summary": trace.summary(),
        "out": str(out),
    }


def _report(result: dict, console):
    from tkernels.trace.timeline import SHARES

    summary, (M, N, K) = result["summary"], result["sizes"]
    kinds = [kind for kind in SHARES if any(kind in shares for shares in summary.shares.values())]
    rows = []
    for role, shares in summary.shares.items():
        cells = [f"{100 * shares[kind]:.1f} %" if kind in shares else "" for kind in kinds]
        rows.append((f"{summary.programs[role]} {role}", *cells))

    say = functools.partial(console.print, soft_wrap=True)
    say(
        f"{result['operation']} {result['shape']} (M {M}, N {N}, K {K}, {result['dtype']}) on {summary.ranks} ranks, "
        f"{result['device']}, transport {result['transport']}"
    )
    say(f"{_time(result['traced_us'])} a call, {_time(result['us'])} without tracing")
    print_table(console, ("programs", *kinds), rows, "their time in the last call, all ranks", right=kinds)
    if "compute" in summary.shares:
        say(f"data moves for {_time(summary.moving_us)}, {100 * summary.hidden:.0f} % of it while programs compute")
    step, error = _time(result["tick_ns"] / 1e3), _time(result["clock_error_us"])
    say(f"the ranks' clocks are aligned to {error}; the smallest step seen of one is {step}")
    if result["lost"]:
        say(f"{result['lost']} marks found no room and are missing")
    say(f"{result['out']}: open it in https://ui.perfetto.dev or chrome://tracing")


def _time(us: float) -> str:
    return f"{us / 1e3:.1f} ms" if us >= 1e4 else f"{us:.1f} us" if us >= 10 else f"{us:.3g} us"
