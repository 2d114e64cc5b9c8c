"""Measures the offsets between the ranks' clocks, since each GPU counts its own nanoseconds.

Every two ranks exchange signals and record when each was sent and when it was seen. A signal that rank p sends at time
s of its clock and rank r sees at time a of its own took a - s, minus the lead of r's clock over p's. No signal arrives
before it is sent, so the fastest signals of the two directions bound the lead from both sides, and the estimate is the
middle of the bounds.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from tkernels.comm.context import Context
from tkernels.comm.device import Net, operation, signal, wait_signal
from tkernels.comm.marks import clock

OP = operation("comparison of clocks")
ROUNDS = {"simulated": 8, "nvshmem": 64}  # of which the fastest counts


# fmt: off
@triton.jit
def clocks_kernel(
    words, times,  # [R] in symmetric memory, zero before; [ROUNDS, R - 1, 2]
    table, rank,
    L, ROUNDS: tl.constexpr,
):
    """In each round, signal every peer and wait for a signal of every peer; record (sent, seen) by distance."""
    net = Net(table, rank)
    for turn in range(ROUNDS):
        for step in range(1, L.RANKS):
            target = (rank + step) % L.RANKS
            source = (rank + L.RANKS - step) % L.RANKS
            noted = times + (turn * (L.RANKS - 1) + step - 1) * 2
            tl.store(noted, clock(L))
            signal(words + rank, turn + 1, target, net, L)
            wait_signal(words + source, turn + 1, source, turn, net, L)
            tl.store(noted + 1, clock(L))
# fmt: on


@dataclass(frozen=True)
class Comparison:
    """The lead of each rank's clock over rank 0's, in ns, at `time`, in ns on each rank's own clock.

    error_ns: the largest distance between an estimate and its bounds.
    """

    time: np.ndarray  # [R]
    lead: np.ndarray  # [R]
    error_ns: float


def compare_clocks(ctx: Context) -> Comparison:
    """Collective. Measure the offsets between the ranks' clocks. Waits for the device."""
    if ctx.size == 1:
        return Comparison(np.zeros(1), np.zeros(1), 0.0)
    words = ctx.empty(ctx.size, dtype=torch.int64)
    words.zero_()
    rounds = ROUNDS[ctx.runtime]
    times = torch.zeros(rounds, ctx.size - 1, 2, dtype=torch.int64, device=ctx.device)
    ctx.group.barrier()  # no rank signals before all words are zero
    ctx.launch(
        clocks_kernel, 1, words=words, times=times, table=ctx.table, rank=ctx.rank, L=ctx.link(OP), ROUNDS=rounds,
        num_warps=1,
    )  # fmt: skip
    ctx.check()
    noted = np.stack(ctx.group.gather(times.cpu().numpy()))
    ctx.free(words)
    return leads(noted)


def leads(noted: np.ndarray) -> Comparison:
    """The comparison, from the recorded times: [R, rounds, R - 1, 2] of (sent to rank + step, seen from rank - step).

    >>> leads(np.array([[[[0, 107]]], [[[100, 105]]]]))
    Comparison(time=array([  0, 100]), lead=array([ 0., 49.]), error_ns=56.0)
    """
    size = len(noted)
    quickest = np.zeros((size, size))  # [from, to]: a signal's transfer time, plus the receiver's lead over the sender
    for source in range(size):
        for step in range(1, size):
            target = (source + step) % size
            quickest[source, target] = (noted[target, :, step - 1, 1] - noted[source, :, step - 1, 0]).min()
    lead = (quickest[0] - quickest[:, 0]) / 2
    return Comparison(noted[:, 0, 0, 0], lead, float((quickest[0] + quickest[:, 0]).max() / 2))
