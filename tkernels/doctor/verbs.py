"""Round trips between two ranks by put, get, signals and stores: rank 0 sends, rank 1 replies, both check the data.

The functions here run in the ranks' processes.
"""

import time
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import tkernels
from tkernels.comm.context import Context
from tkernels.comm.device import (
    ADD,
    NVSHMEM,
    Net,
    fence,
    get,
    operation,
    peer,
    put,
    put_signal,
    quiet,
    signal,
    wait_signal,
)
from tkernels.comm.runtime import shares_gpus

OP = operation("doctor")

NUM_ELEMENTS = 1024
# On GPUs that ranks share, a turn lasts until the GPU switches to the other process, milliseconds.
ROUNDS, FEW_ROUNDS = 1000, 10

# The verbs. A rank's turn ends the other rank's wait_signal. Only the first two move no data.
VERBS = {
    "signal (set)": 0,
    "signal (add)": 1,
    "put_signal": 2,
    "put, fence, signal": 3,
    "put, quiet, signal": 4,
    "get": 5,
    "store through peer": 6,
}


# fmt: off
# Not specialized, rank and verb included: over NVSHMEM, whose device code is linked in, a kernel compiles in 2.5 s, and
# six verbs on two ranks would be twelve kernels.
@triton.jit(do_not_specialize=["epoch", "rounds", "num_elements", "rank", "verb"])
def round_trip_kernel(
    data, inbox, ready,  # [NUM_ELEMENTS], [NUM_ELEMENTS], [1]; all in symmetric memory
    table, epoch, rounds, num_elements, rank, verb,
    L, BLOCK: tl.constexpr,
):
    """`rounds` round trips of one verb; signal values continue from `epoch`."""
    net = Net(table, rank)
    other = 1 - rank
    for i in range(rounds):
        turn = epoch + i + 1
        if rank == 1:
            wait_signal(ready, turn, other, 0, net, L)
        if verb == 1:
            signal(ready, 1, other, net, L, ADD)
        elif verb == 2:
            put_signal(inbox, data, num_elements, ready, turn, other, net, L, BLOCK)
        else:
            if verb == 3 or verb == 4:
                put(inbox, data, num_elements, other, net, L, BLOCK)
            if verb == 3:
                fence(L)
            if verb == 4:
                quiet(L)
            if verb == 5:
                get(inbox, data, num_elements, other, net, L, BLOCK)
            if L.TRANSPORT != NVSHMEM:
                if verb == 6:
                    at = tl.arange(0, BLOCK)
                    values = tl.load(data + at, mask=at < num_elements)
                    tl.store(peer(inbox, other, net) + at, values, mask=at < num_elements)
            signal(ready, turn, other, net, L)
        if rank == 0:
            wait_signal(ready, turn, other, 0, net, L)
# fmt: on

_contexts: dict[str, Context] = {}  # over the transports that are not the ranks' own; open until the ranks end


@dataclass(frozen=True)
class RoundTrip:
    """The result of one verb.

    num_bytes: sent each way.
    microseconds: of one round trip, on average; None if the verb failed.
    """

    verb: str
    transport: str
    num_bytes: int
    microseconds: float | None
    problem: str | None


def verbs_of(transport: str) -> list[str]:
    """The verbs to try.

    Over NVSHMEM's device calls, `peer` need not give an address; where it does, the transport `peer` tries it.
    """
    return [verb for verb in VERBS if transport != "nvshmem" or verb != "store through peer"]


def nothing(ctx: Context):
    """A call that only starts the ranks."""


def round_trip(ctx: Context, verb: str, transport: str) -> RoundTrip:
    """Collective, on two ranks. Time one verb and check the data."""
    ctx = _over(ctx, transport)
    data = ctx.empty(NUM_ELEMENTS, dtype=torch.int64)
    inbox = ctx.empty(NUM_ELEMENTS, dtype=torch.int64)
    ready = ctx.empty(1, dtype=torch.int64)
    numbers = torch.arange(NUM_ELEMENTS, device=ctx.device)
    data.copy_(numbers + 1 + ctx.rank * NUM_ELEMENTS)
    expected = numbers + 1 + (1 - ctx.rank) * NUM_ELEMENTS
    moves = VERBS[verb] > 1
    inbox.zero_()
    ready.zero_()
    ctx.check()  # waits for the device: the peer may write from the barrier on
    rounds, signals = FEW_ROUNDS if ctx.runtime == "simulated" or shares_gpus() else ROUNDS, 0
    for count in (1, rounds):  # the first launch compiles
        ctx.group.barrier()
        start = time.perf_counter()
        ctx.launch(
            round_trip_kernel, 1, data=data, inbox=inbox, ready=ready, table=ctx.table, rank=ctx.rank,
            epoch=signals, rounds=count, num_elements=NUM_ELEMENTS, verb=VERBS[verb], L=ctx.link(OP),
            BLOCK=NUM_ELEMENTS,
        )  # fmt: skip
        signals += count
        ctx.check()  # waits for the device
        seconds = time.perf_counter() - start
    problem = None
    if ready.item() != signals:
        problem = f"rank {ctx.rank} counts {ready.item()} signals, not {signals}"
    elif moves and not torch.equal(inbox, expected):
        wrong = int((inbox != expected).sum())
        problem = f"rank {ctx.rank}: {wrong} of {NUM_ELEMENTS} numbers came out wrong"
    problem = next(filter(None, ctx.group.gather(problem)), None)
    for tensor in (ready, inbox, data):
        ctx.free(tensor)
    num_bytes = data.nbytes if moves else 0
    return RoundTrip(verb, transport, num_bytes, seconds / rounds * 1e6, problem)


def _over(ctx: Context, transport: str) -> Context:
    """ctx, or a context over another transport, which stays open for the other verbs."""
    if transport == ctx.transport:
        return ctx
    if transport not in _contexts:
        options = dict(heap_bytes=64 << 20, timeout_s=ctx.timeout_s, default=False)
        _contexts[transport] = tkernels.init(transport=transport, **options)
    return _contexts[transport]
