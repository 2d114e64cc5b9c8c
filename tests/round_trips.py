"""Round trips between two ranks by put, get, signals and stores: rank 0 sends, rank 1 replies, both check the data."""

import torch
import triton
import triton.language as tl

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

OP = operation("round_trip")

NUM_ELEMENTS = 1024
ROUNDS = 10  # on GPUs that ranks share, a turn lasts until the GPU switches to the other process, milliseconds

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


def verbs_of(transport: str) -> list[str]:
    """The verbs to try.

    Over NVSHMEM's device calls, `peer` need not give an address; where it does, the transport `peer` tries it.
    """
    return [verb for verb in VERBS if transport != "nvshmem" or verb != "store through peer"]


def round_trips(ctx: Context, verb: str) -> str | None:
    """Collective, on two ranks. Make some round trips by one verb. Returns what is wrong with the data, if anything."""
    data, inbox, ready = (ctx.empty(num, dtype=torch.int64) for num in (NUM_ELEMENTS, NUM_ELEMENTS, 1))
    numbers = torch.arange(NUM_ELEMENTS, device=ctx.device)
    data.copy_(numbers + 1 + ctx.rank * NUM_ELEMENTS)
    expected = numbers + 1 + (1 - ctx.rank) * NUM_ELEMENTS if VERBS[verb] > 1 else torch.zeros_like(numbers)
    inbox.zero_()
    ready.zero_()
    ctx.check()  # waits for the device: the peer may write from the barrier on
    ctx.group.barrier()
    ctx.launch(
        round_trip_kernel, 1, data=data, inbox=inbox, ready=ready, table=ctx.table, rank=ctx.rank, epoch=0,
        rounds=ROUNDS, num_elements=NUM_ELEMENTS, verb=VERBS[verb], L=ctx.link(OP), BLOCK=NUM_ELEMENTS,
    )  # fmt: skip
    ctx.check()
    wrong, signals = int((inbox != expected).sum()), ready.item()
    for tensor in (ready, inbox, data):
        ctx.free(tensor)
    if wrong or signals != ROUNDS:
        return f"{verb}: {signals} of {ROUNDS} signals, {wrong} of {NUM_ELEMENTS} numbers wrong"
    return None
