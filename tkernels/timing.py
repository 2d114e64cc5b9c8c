"""Times calls on all ranks at once.

One measurement on a GPU: the L2 cache is flushed, the ranks synchronize, the stream sleeps while the host queues the
rest, a barrier on the stream starts all ranks at the same moment, and events enclose the call. So the time includes
neither the host's launch time nor the skew between ranks. Every iteration measures all candidates, since the chip's
clock drifts, and each time in another order, since the clock depends on the kernel that ran just before. The time of an
iteration is that of its slowest rank.

On the simulated runtime a measurement is the host's wall time, the interpreter's, which does not predict a GPU's.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tkernels.comm.context import Context

WARMUPS = {"cuda": 5, "cpu": 1}
FLUSH_BYTES = 256 << 20  # more than any L2
PAUSE_US = 300.0  # for the host to queue the barrier and the events
CYCLES = 2_000_000  # of the clock, whose time is measured

Call = Callable[[], torch.Tensor | None]


@dataclass(frozen=True)
class Timing:
    """Median, 10th and 90th percentile over the iterations, where the slowest rank counts in each.

    host_us: host time of a call; None on the simulated runtime, where the other fields are host times.
    """

    us: float
    p10_us: float
    p90_us: float
    host_us: float | None


class Stopwatch:
    """Times single calls on this rank; all ranks must use their stopwatches at the same time."""

    def __init__(self, ctx: Context):
        self.ctx = ctx
        self.on_gpu = ctx.device.type == "cuda"
        if self.on_gpu:
            self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=ctx.device)
            torch.cuda._sleep(CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(CYCLES)
            end.record()
            end.synchronize()
            self.cycles_per_us = CYCLES / (start.elapsed_time(end) * 1e3)

    def time(self, call: Call, pause_us: float = PAUSE_US) -> tuple[float, float, torch.Tensor | None]:
        """Collective. (us on the device, us on the host, the call's result)."""
        if not self.on_gpu:
            self.ctx.group.barrier()
            began = time.perf_counter()
            result = call()
            took = (time.perf_counter() - began) * 1e6
            return took, took, result
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        self.ctx.group.barrier()
        torch.cuda._sleep(int(pause_us * self.cycles_per_us))
        self.ctx.barrier()
        start.record()
        began = time.perf_counter()
        result = call()
        host = (time.perf_counter() - began) * 1e6
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3, host, result


def measure(ctx: Context, calls: dict[str, Call], iterations: int) -> tuple[dict[str, Timing], dict]:
    """Collective. The timings of all calls, taken in turns, and {"ours": the last result of the call of that name}."""
    watch, names = Stopwatch(ctx), list(calls)
    pauses = {}
    for name in names:
        hosts = [watch.time(calls[name])[1] for _ in range(WARMUPS[ctx.device.type])]
        pauses[name] = PAUSE_US + 2 * statistics.median(hosts)
    samples = {name: ([], []) for name in names}
    results = {}
    order = random.Random(0)  # the same on all ranks
    for _ in range(iterations):
        for name in order.sample(names, len(names)):
            us, host_us, result = watch.time(calls[name], pauses[name])
            samples[name][0].append(us)
            samples[name][1].append(host_us)
            if name == "ours":
                results[name] = result
    everyones = ctx.group.gather(samples)
    timings = {}
    for name in names:
        slowest = np.max([theirs[name][0] for theirs in everyones], axis=0)
        p10, median, p90 = np.percentile(slowest, [10, 50, 90])
        host = np.max(np.median([theirs[name][1] for theirs in everyones], axis=1)) if watch.on_gpu else None
        timings[name] = Timing(*(None if us is None else round(float(us), 3) for us in (median, p10, p90, host)))
    return timings, results


def agree(ctx: Context, reason: str | None) -> str | None:
    """Collective. The reason of the lowest rank that has one, preceded by the rank; None if no rank has one."""
    reasons = ctx.group.gather(reason)
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), None)
