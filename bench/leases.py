"""Measures the host time of leases: python -m bench.leases [--ranks R] [--json PATH], from the root.

A lease is acquired, written, read and released. On one stream it issues no wait. On two streams it issues two waits per
tenancy: the reader's, and that of the next writer. "By hand" measures the same two event records and two waits without
a lease. The share is that of a training step of the demo's model under OverlappedDDP: leases per step x the cost of one
lease on two streams / the time of the step. For another model, pass --step-ms and --leases.
"""

import argparse
import contextlib
import statistics
import sys
import time

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import tkernels
from bench.provenance import provenance
from bench.records import append
from tkernels.cli import file_to_write
from tkernels.demo.model import ModelConfig, Transformer
from tkernels.launch import RankError, RankPool
from tkernels.layers.data_parallel.ddp import OverlappedDDP
from tkernels.layers.lease import Lease, Slot

REPEATS, CALLS = 30, 200
WARMUPS, STEPS = 3, 10
BUCKETS = 8
TIMEOUT_S = 600.0
MODELS = {
    "simulated": ModelConfig(vocabulary=96, sequence=16, batch=2, heads=2),
    "nvshmem": ModelConfig(vocabulary=32768, sequence=1024, batch=4, heads=16, head_features=64, layers=8),
}


def leased(slot: Slot, writer, reader):
    lease = slot.acquire()
    with lease.write(writer):
        pass
    with lease.read(reader):
        pass
    slot.release(lease)


def by_hand(slot: Slot, writer, reader):
    reader.wait_event(writer.record_event())
    writer.wait_event(reader.record_event())


def costs(ctx) -> dict:
    """Median host time of one call in us. The cases take turns; the device is idle when a turn begins."""
    dev = torch.get_device_module(ctx.device)
    main, other = dev.current_stream(), dev.Stream()
    cases = {
        "one_stream_us": (leased, main, main),
        "two_streams_us": (leased, main, other),
        "by_hand_us": (by_hand, main, other),
    }
    slots = {name: Slot(torch.empty(1024, device=ctx.device)) for name in cases}
    times = {name: [] for name in cases}
    for _ in range(REPEATS):
        for name, (call, writer, reader) in cases.items():
            dev.synchronize()
            began = time.perf_counter()
            for _ in range(CALLS):
                call(slots[name], writer, reader)
            times[name].append((time.perf_counter() - began) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


@contextlib.contextmanager
def leases_counted():
    """A list that gets an entry for each lease created in the block."""
    made, init = [], Lease.__init__

    def counting(self, *arguments, **options):
        made.append(None)
        init(self, *arguments, **options)

    Lease.__init__ = counting
    try:
        yield made
    finally:
        Lease.__init__ = init


def training_step(ctx) -> dict:
    """Collective. Leases of a training step, and its milliseconds on the slowest rank."""
    torch.manual_seed(0)
    config = MODELS[ctx.runtime]
    model = Transformer(config).to(ctx.device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    ddp = OverlappedDDP(model, mesh=ctx, bucket_size=-(-num_parameters // BUCKETS))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    tokens = torch.randint(config.vocabulary, (config.sequence, config.batch), device=ctx.device)
    positions = torch.arange(config.sequence, device=ctx.device)
    dev, times = torch.get_device_module(ctx.device), []
    for _ in range(WARMUPS + STEPS):
        dev.synchronize()
        ctx.group.barrier()
        with leases_counted() as made:
            began = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(ddp(tokens, positions).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            dev.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
    slowest = max(ctx.group.gather(statistics.median(times[WARMUPS:])))
    return {"leases": len(made), "step_ms": slowest, "parameters": num_parameters, "model": str(config)}


def measure(ctx, step: dict | None) -> dict:
    """Collective. Returns the record. step: leases and time of another model's step; None: measure the demo's model."""
    line = {"bench": "leases", "ranks": ctx.size, "runtime": ctx.runtime, "repeats": REPEATS, "calls": CALLS}
    line |= costs(ctx) | (step or training_step(ctx))
    line["share"] = line["leases"] * line["two_streams_us"] / 1e3 / line["step_ms"]
    return line | provenance(ctx)


def table(line: dict) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"host time of the lifetime core, {line['gpu'] or line['cpu']}")
    table.add_column("", justify="left")
    table.add_column("", justify="right")
    table.add_row("a lease on one stream, no waits", f"{line['one_stream_us']:.1f} us")
    table.add_row("a lease on two streams, two waits", f"{line['two_streams_us']:.1f} us")
    table.add_row("the same records and waits by hand", f"{line['by_hand_us']:.1f} us")
    table.add_row("leases a training step", str(line["leases"]))
    table.add_row("training step", f"{line['step_ms']:.2f} ms")
    table.add_row("share of the step", f"{line['share']:.3%}")
    return table


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.leases", description=__doc__.splitlines()[0])
    simulated = tkernels.RUNTIME == "simulated"
    parser.add_argument("--ranks", type=int, default=2 if simulated else torch.cuda.device_count())
    parser.add_argument("--step-ms", type=float, help="time of a step of another model; needs --leases")
    parser.add_argument("--leases", type=int, help="leases of a step of another model; needs --step-ms")
    parser.add_argument(
        "--json", type=file_to_write, metavar="PATH", help="append one JSON line, e.g. bench/results/DATE.jsonl"
    )
    args = parser.parse_args(argv)
    if args.ranks < 1 or (not simulated and args.ranks > torch.cuda.device_count()):
        parser.error(f"--ranks {args.ranks}: there are {torch.cuda.device_count()} GPUs; at least one rank is needed")
    if (args.step_ms is None) != (args.leases is None):
        parser.error("--step-ms and --leases go together")
    if args.step_ms is not None and not (args.step_ms > 0 and args.leases >= 0):
        parser.error(f"--step-ms {args.step_ms} --leases {args.leases}: a step takes time, and counts are not negative")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    step = None if args.step_ms is None else {"leases": args.leases, "step_ms": args.step_ms}
    console = Console()
    try:
        with RankPool(args.ranks) as pool:
            line = pool.run(measure, step, timeout_s=TIMEOUT_S)[0]
    except RankError as error:
        console.print(f"the ranks failed: {error}", style="red", markup=False)
        return 1
    console.print(table(line))
    if args.json is not None:
        append(args.json, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
