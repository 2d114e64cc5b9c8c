"""Operations on different streams of a process run in the order of their calls, unless they fit side by side."""

import pytest
import torch
from transports import expire_after, gpu_only

import tkernels
from tkernels.comm import WaitTimeoutError, capture, runtime, stream_order
from tkernels.comm.contexts import programs_at_once

MAIN, SIDE, CAPTURED, CAPTURED_TOO = 0, 11, 22, 33


@pytest.fixture
def crossings(monkeypatch):
    """What is ordered, as (stream, later stream), on a GPU of eight SMs without a GPU."""
    made = []

    class Stream:
        def __init__(self, handle):
            self.handle = handle

        def wait_stream(self, other):
            made.append((other.handle, self.handle))

    monkeypatch.setattr(stream_order, "latest", None)
    monkeypatch.setattr(stream_order, "_crowded", False)
    monkeypatch.setattr(stream_order, "_stream", Stream)
    monkeypatch.setattr(capture, "taken", {CAPTURED, CAPTURED_TOO}.__contains__)
    monkeypatch.setattr(runtime, "default_programs", lambda: 8)
    return made


@pytest.mark.quick
def test_follow_orders_a_stream_behind_the_operation_before(crossings):
    for stream in (MAIN, MAIN, SIDE, SIDE, MAIN):
        stream_order.follow(stream, needed=9)
    assert crossings == [(MAIN, SIDE), (SIDE, MAIN)]


def test_follow_orders_nothing_where_all_operations_fit_on_the_gpu(crossings):
    stream_order.follow(MAIN, needed=8)
    stream_order.follow(SIDE, needed=8)
    assert crossings == []
    stream_order.follow(MAIN, needed=9)  # a collective of somebody else's
    stream_order.follow(SIDE, needed=8)
    stream_order.follow(MAIN, needed=8)
    assert crossings == [(SIDE, MAIN), (MAIN, SIDE)]


def test_follow_orders_within_a_capture_but_never_across_its_edge(crossings):
    for stream in (MAIN, CAPTURED, CAPTURED_TOO, SIDE):
        stream_order.follow(stream, needed=9)
    assert crossings == [(CAPTURED, CAPTURED_TOO)]


@pytest.mark.ranks(2)
def test_init_operations_of_two_contexts_follow_each_other(ctx, monkeypatch):
    taken, x = [], torch.ones(4, device=ctx.device)
    tkernels.all_reduce(x, ctx=ctx)
    others = programs_at_once()
    with tkernels.init(ctx.group.process_group, heap_bytes=32 << 20, num_programs=3, default=False) as other:
        monkeypatch.setattr(stream_order, "follow", lambda stream, needed: taken.append(needed))
        for context in (other, ctx):
            monkeypatch.setattr(stream_order, "latest", None)
            tkernels.all_reduce(x, ctx=context)
    assert taken[-1] == others + 3, "those of every context that has been used, on each of its streams"


def in_order(monkeypatch):
    pass


def as_they_come(monkeypatch):
    monkeypatch.setattr(stream_order, "follow", lambda stream, needed: None)


@gpu_only
@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", [in_order, as_they_come])
def test_init_two_contexts_on_two_streams_never_wait_for_each_other(ctx, monkeypatch, form):
    """On each rank in turn, the operation that is called first is the later one to be ready. Each takes all SMs."""
    form(monkeypatch)
    group, main, side = ctx.group.process_group, torch.cuda.current_stream(), torch.cuda.Stream()
    x, w = (torch.ones(size, 64, device=ctx.device, dtype=torch.bfloat16) for size in (4096, 8192))
    late = torch.empty(1 << 28, device=ctx.device)  # 1 GiB: a fill takes most of a millisecond

    def operation(context):
        return tkernels.matmul_reduce_scatter(x, w, ctx=context, path="fused")

    options = dict(heap_bytes=256 << 20, default=False)
    first, second = (tkernels.init(group, **options) for _ in range(2))
    for context, stream in ((first, main), (second, side)):  # compiles, and makes the workspaces
        with torch.cuda.stream(stream):
            operation(context)
    torch.cuda.synchronize()
    if form is as_they_come:
        expire_after(first, 5.0), expire_after(second, 5.0)
        ctx.group.barrier()
    try:
        for step in range(10):
            ctx.barrier()
            torch.cuda.synchronize()
            if step % 2 == ctx.rank:
                for _ in range(50):
                    late.fill_(step)
            ours = operation(first)
            with torch.cuda.stream(side):
                theirs = operation(second)
            torch.cuda.synchronize()
            for context in (first, second):
                context.check()
            assert ours.eq(128).all() and theirs.eq(128).all()
    except WaitTimeoutError:
        assert form is as_they_come
        first.abandon(), second.abandon()
    else:
        assert form is in_order
        first.finalize(), second.finalize()
