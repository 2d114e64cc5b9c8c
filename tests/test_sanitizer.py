"""torch's CUDA stream sanitizer: it sees our operators, since they are torch operators with exact mutation lists.

    pytest -m csan

It is a second opinion and no gate. It knows an access by its tensor's first address and forgets what is freed, so it
misses slices and memory that is given away early; the last tests here show this beside the simulator, which does not.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from streams import Simulator
from transports import gpu_only, starts_ranks

import tkernels
from tkernels.launch import RankPool
from tkernels.layers.lease import Lease, Slot

pytestmark = pytest.mark.csan
RANKS = 2

OPERATIONS = {
    "matmul": lambda ctx, x, w: tkernels.matmul(x, w),
    "all_gather_matmul": lambda ctx, x, w: tkernels.all_gather_matmul(x, w, ctx=ctx),
    "matmul_reduce_scatter": lambda ctx, x, w: tkernels.matmul_reduce_scatter(x, w, ctx=ctx),
    "matmul_all_reduce": lambda ctx, x, w: tkernels.matmul_all_reduce(x, w, ctx=ctx),
    "all_gather": lambda ctx, x, w: tkernels.all_gather(x, ctx=ctx),
    "reduce_scatter": lambda ctx, x, w: tkernels.reduce_scatter(x, ctx=ctx),
    "all_reduce": lambda ctx, x, w: tkernels.all_reduce(x, ctx=ctx),
    "all_gather, out=": lambda ctx, x, w: tkernels.all_gather(
        x, ctx=ctx, out=torch.empty(RANKS * len(x), x.shape[1], dtype=x.dtype, device=x.device)  # which reads nothing
    ),
    "reduce_scatter, out=": lambda ctx, x, w: tkernels.reduce_scatter(x, ctx=ctx, out=torch.empty_like(x[::RANKS])),
    "all_reduce, out=": lambda ctx, x, w: tkernels.all_reduce(x, ctx=ctx, out=torch.empty_like(x)),
}


@functools.cache
def side_stream():
    """One for all calls of this process: every stream has a workspace of its own."""
    return torch.cuda.Stream()


def reports(ctx, name, form) -> list[tuple[str, str]]:
    """Collective. An operation on a side stream, between a write of its operand and a read of its result on this one.

    Returns (the operator that went before, the operator that was caught) of each report on this rank.
    """
    from torch.cuda import _sanitizer  # from here on it watches this process

    operation, side = OPERATIONS[name], side_stream()
    x, w = (torch.ones(shape, dtype=torch.bfloat16, device=ctx.device) for shape in ((128, 64), (64, 64)))
    with torch.cuda.stream(side):
        operation(ctx, x, w)  # makes the stream's workspace and compiles
    torch.cuda.synchronize()
    ctx.group.barrier()
    found = []
    try:
        with _sanitizer.cuda_sanitizer.dispatch:
            lease = Lease(x)
            with lease.write():
                x.mul_(1)
            if form != "operand not ordered":
                with lease.read(side):
                    pass
            with torch.cuda.stream(side):
                y = operation(ctx, x, w)
                result = Lease(y)
                with result.write():
                    pass
            if form != "result not ordered":
                with result.read():
                    pass
            y.add_(1)
    except _sanitizer.CUDASanitizerErrors as errors:
        accesses = [(error.previous_access, error.current_access) for error in errors.errors]
        found = [(str(before.operator), str(now.operator)) for before, now in accesses]
    torch.cuda.synchronize()
    ctx.group.barrier()
    return found


@pytest.fixture(scope="module")
def pool():
    """Ranks of this module's own: a process that has loaded the sanitizer is watched until its end."""
    with RankPool(RANKS) as pool:
        yield pool


@gpu_only
@starts_ranks(RANKS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_on_a_side_stream_are_clean_with_leases(pool, name):
    assert pool.run(reports, name, "leases") == [[]] * RANKS


@gpu_only
@starts_ranks(RANKS)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("form", ["operand not ordered", "result not ordered"])
def test_an_order_that_is_left_out_is_reported(pool, name, form):
    for found in pool.run(reports, name, form):
        before, now = found[0]
        operator = f"tkernels::{name.partition(',')[0]}"
        assert operator in (now if form == "operand not ordered" else before), found


class Traced:
    """A device whose streams tell the sanitizer's own handler what is recorded, awaited and launched."""

    def __init__(self):
        sanitizer = pytest.importorskip("torch.cuda._sanitizer")
        self.handler, self.events = sanitizer.EventHandler(), itertools.count(1)
        self.main, self.side = TracedStream(self, 0), TracedStream(self, 1)

    def current_stream(self):
        return self.main


class TracedStream:
    def __init__(self, dev, number):
        self.dev, self.number = dev, number
        dev.handler._handle_stream_creation(number)

    def record_event(self):
        event = next(self.dev.events)
        self.dev.handler._handle_event_creation(event)
        self.dev.handler._handle_event_record(event, self.number)
        return event

    def wait_event(self, event):
        self.dev.handler._handle_event_wait(event, self.number)

    def launch(self, reads=(), writes=()) -> int:
        """A kernel; returns the number of reports."""
        names = {tensor.data_ptr(): ["argument"] for tensor in (*reads, *writes)}
        read, written = ({tensor.data_ptr() for tensor in tensors} for tensors in (reads, writes))
        return len(self.dev.handler._handle_kernel_launch(self.number, read, written, set(), "kernel", names))


@pytest.mark.parametrize("leased", [True, False])
def test_the_sanitizers_own_handler_agrees_with_a_lease(leased):
    dev, buffer, found = Traced(), torch.zeros(8), 0
    slot = Slot(buffer, dev=dev)
    for _ in range(3):
        lease = slot.acquire()
        with lease.write() if leased else contextlib.nullcontext():
            found += dev.main.launch(writes=[buffer])
        with lease.read(dev.side) if leased else contextlib.nullcontext():
            found += dev.side.launch(reads=[buffer])
        slot.release(lease)
    assert bool(found) != leased


def test_it_does_not_see_slices_at_an_offset_and_the_simulator_does():
    dev, bucket = Traced(), torch.zeros(8)
    assert dev.main.launch(writes=[bucket[4:]]) + dev.side.launch(reads=[bucket]) == 0
    sim = Simulator()
    with sim:
        bucket[4:].fill_(1)
        with sim.stream(sim.Stream("side")):
            bucket.sum()
    assert len(sim.races) == 1


def test_it_forgets_memory_that_is_freed_and_the_simulator_does_not():
    dev, output = Traced(), torch.zeros(8)
    dev.handler._handle_memory_allocation(output.data_ptr())
    assert dev.side.launch(reads=[output]) == 0
    dev.handler._handle_memory_deallocation(output.data_ptr())
    dev.handler._handle_memory_allocation(output.data_ptr())
    assert dev.main.launch(writes=[output]) == 0
    sim = Simulator()
    with sim:
        side, output = sim.Stream("side"), torch.zeros(8)
        side.wait_stream(sim.current_stream())
        with sim.stream(side):
            output.sum()
        del output
        torch.zeros(8)
    assert [race.modes for race in sim.races] == ["rw"]
