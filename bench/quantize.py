"""Times `quantize` beside a copy and torch's operations: python -m bench.quantize [--json PATH], from the root.

On one GPU. Of activations in bf16 as models have them, and of sizes that nobody chose: a scale a row, one for all,
silu(gate) * up with a scale a row, and a factor of delayed scaling. The share is that of the copy's bandwidth, in bytes
that must move: an element is read once (twice for one scale of all, as no program sees all elements) and written in one
byte.

Exit code 0: all was measured. 1: a result differs from `quantize_reference`, or the rank failed. 2: wrong arguments.
"""

import argparse
import statistics
import sys

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import tkernels
from bench.provenance import provenance
from bench.records import append
from tkernels.cli import file_to_write
from tkernels.launch import RankError, RankPool
from tkernels.quantize import quantize_by, quantize_by_reference, quantize_reference
from tkernels.timing import measure

SHAPES = (
    (8192, 4096), (8192, 8192), (16384, 8192), (4096, 14336), (8192, 28672), (2048, 53248), (32768, 2048),
    (12345, 5120), (7777, 3001),
)  # fmt: skip
TINY = ((64, 128),)
READS = {"row": 1, "tensor": 2, "silu, row": 2, "delayed": 1}  # of elements, for each that is written
ITERATIONS = 20


def cases(rows: int, columns: int, device) -> dict:
    """By name: ours, and the same by torch's operations."""
    x, gate = (torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in range(2))
    given = torch.full((1,), 100.0, device=device), torch.zeros(1, device=device), torch.float8_e4m3fn
    return {
        "row": (lambda: tkernels.quantize(x, "row"), lambda: quantize_reference(x, "row")),
        "tensor": (lambda: tkernels.quantize(x, "tensor"), lambda: quantize_reference(x, "tensor")),
        "silu, row": (
            lambda: tkernels.quantize(x, "row", activation="silu", gate=gate),
            lambda: quantize_reference(F.silu(gate) * x, "row"),
        ),
        "delayed": (lambda: quantize_by(x, None, *given), lambda: quantize_by_reference(x, *given)),
    }


def run(ctx, shape: tuple[int, int]) -> list[dict]:
    """Collective. The records of one shape. Raises ArithmeticError for a wrong result."""
    torch.manual_seed(0)
    given = cases(*shape, ctx.device)
    source = torch.randn(shape, device=ctx.device).bfloat16()
    goal, num_elements, calls = torch.empty_like(source), source.numel(), {}
    for name, (ours, torchs) in given.items():
        for got, want in zip(ours(), torchs(), strict=True):
            if not torch.equal(got.float(), want.float()):
                raise ArithmeticError(f"quantize ({name}) of {shape} differs from its reference")
        calls |= {name: lambda ours=ours: ours()[0], f"{name}, torch": lambda torchs=torchs: torchs()[0]}
    timings, _ = measure(ctx, calls | {"copy": lambda: goal.copy_(source)}, ITERATIONS)
    copied = 4 * num_elements / timings["copy"].us  # bytes a us
    return [
        {"bench": "quantize", "case": name, "rows": shape[0], "columns": shape[1], "dtype": "bfloat16"}
        | {"us": timings[name].us, "p10_us": timings[name].p10_us, "p90_us": timings[name].p90_us}
        | {"torch_us": timings[f"{name}, torch"].us, "copy_us": timings["copy"].us}
        | {"share": (2 * READS[name] + 1) * num_elements / timings[name].us / copied}
        | provenance(ctx)
        for name in given
    ]


def table(lines: list[dict]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"quantize, {lines[0]['gpu'] or lines[0]['cpu']}")
    for name in ("shape", "scale", "us", "torch's operations", "copy of x", "share of its bandwidth"):
        table.add_column(name, justify="left" if name in ("shape", "scale") else "right")
    for line in lines:
        times = [f"{line[name]:.1f}" for name in ("us", "torch_us", "copy_us")]
        table.add_row(f"{line['rows']}x{line['columns']}", line["case"], *times, f"{line['share']:.2f}")
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quantize", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=file_to_write, metavar="PATH", help="append JSON lines")
    args, console, lines = parser.parse_args(argv), Console(), []
    try:
        with RankPool(1) as pool:
            for shape in TINY if tkernels.RUNTIME == "simulated" else SHAPES:
                lines += pool.run(run, shape, timeout_s=120.0)[0]
    except RankError as error:
        console.print(f"the rank failed: {error}", style="red", markup=False)
        return 1
    console.print(table(lines))
    shares = [line["share"] for line in lines]
    console.print(f"geometric mean of the shares {statistics.geometric_mean(shares):.2f}, least {min(shares):.2f}")
    for line in lines if args.json is not None else ():
        append(args.json, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
