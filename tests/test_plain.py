"""The plain path in turns: torch multiplies some rows while others travel."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from products import own_rows_of_sum, product_of_gathered, sum_of_products
from transports import gpu_only

import tkernels
from tkernels import model, plain
from tkernels.comm.lanes import Lane, Lanes
from tkernels.testing.compare import integers

UNEVEN = {2: (9, 4), 4: (5, 2, 8, 3)}
FINISHES = ((None, None), ("bias", None), (None, "relu"), ("bias", "relu"))


@contextlib.contextmanager
def in_turns(ctx, plans=1):
    """In the block calls of any size take turns; so many of them are planned there."""
    lanes = mock.Mock(wraps=Lanes)
    with (
        mock.patch.object(model, "PLAIN_BYTES", dict.fromkeys(model.FUSED, 0)),
        mock.patch.object(model, "TURN_ROWS", 2),
        mock.patch.object(plain, "Lanes", lanes),
    ):
        ctx.forget_calls()
        yield
        ctx.forget_calls()
    assert lanes.call_count == plans


def operands(ctx, rows, N, K, turned=False):
    """x and w of this rank, and the bias of all, of small integers. turned: the columns of x are contiguous."""
    x, w = (integers((size, K), torch.float32, 10 * ctx.rank + size, device=ctx.device) for size in (rows, N))
    if turned:
        x = x.t().contiguous().t()
    return x, w, integers((N,), torch.float32, 5, device=ctx.device)


@pytest.mark.ranks(2, 4)
def test_all_gather_matmul_in_turns_is_exact(ctx):
    for rows, (with_bias, activation) in itertools.product(((6,) * ctx.size, UNEVEN[ctx.size]), FINISHES):
        x, w, bias = operands(ctx, rows[ctx.rank], 7 + ctx.rank, 19, turned=activation is None)
        bias = bias if with_bias else None
        want, gathered = product_of_gathered(ctx, x, w, bias, activation), torch.cat(ctx.group.gather(x.cpu()))
        options = dict(bias=bias, activation=activation, rows=rows, path="plain", ctx=ctx)
        with in_turns(ctx, plans=3):
            assert torch.equal(tkernels.all_gather_matmul(x, w, **options).double(), want)
            y, whole = tkernels.all_gather_matmul(x, w, return_gathered=True, **options)
            assert torch.equal(y.double(), want) and torch.equal(whole.cpu(), gathered)
            out, into = torch.full_like(y, torch.nan), torch.full_like(whole, torch.nan)
            own = into.split(rows)[ctx.rank].copy_(x)
            for _ in range(2):
                tkernels.all_gather_matmul(own, w, out=out, return_gathered=into, **options)
                assert torch.equal(out.double(), want) and torch.equal(into.cpu(), gathered)


@pytest.mark.ranks(2, 4)
def test_matmul_reduce_scatter_in_turns_is_exact(ctx):
    for rows, (with_bias, activation) in itertools.product(((6,) * ctx.size, UNEVEN[ctx.size]), FINISHES):
        x, w, bias = operands(ctx, sum(rows), 11, 5 + ctx.rank, turned=activation is None)
        bias = bias if with_bias else None
        want = own_rows_of_sum(ctx, rows, x, w, bias, activation)
        options = dict(bias=bias, activation=activation, rows=rows, path="plain", ctx=ctx)
        with in_turns(ctx, plans=2):
            y = tkernels.matmul_reduce_scatter(x, w, **options)
            assert torch.equal(y.double(), want), (rows, with_bias, activation)
            out = torch.full_like(y, torch.nan)
            for _ in range(2):
                assert tkernels.matmul_reduce_scatter(x, w, out=out, **options) is out
                assert torch.equal(out.double(), want)


@pytest.mark.ranks(2, 4)
def test_matmul_all_reduce_in_turns_is_exact(ctx):
    for M, (with_bias, activation) in itertools.product((6 * ctx.size, 4 * ctx.size + 1), FINISHES):
        x, w, bias = operands(ctx, M, 11, 5 + ctx.rank)
        bias = bias if with_bias else None
        want = sum_of_products(ctx, x, w, bias, activation)
        with in_turns(ctx):
            for _ in range(2):
                y = tkernels.matmul_all_reduce(x, w, bias, activation, path="plain", ctx=ctx)
                assert torch.equal(y.double(), want), (M, with_bias, activation)


def sleep():
    torch.cuda._sleep(100_000_000)  # 50 ms
    return True


def with_late_products():
    """Those of the side stream are."""
    prepare, here = plain.Matmul.prepare, torch.cuda.current_stream()

    def prepare_late(self, *tensors):
        run = prepare(self, *tensors)
        return lambda *tensors: (torch.cuda.current_stream() == here or sleep()) and run(*tensors)

    return mock.patch.object(plain.Matmul, "prepare", prepare_late)


@contextlib.contextmanager
def behind_nothing(lane, *marks):
    with torch.cuda.stream(lane._stream):
        yield


@pytest.mark.ranks(2)
def test_all_gather_matmul_in_turns_refuses_rows_that_lie_elsewhere_in_what_is_gathered(ctx):
    x, w, _ = operands(ctx, 6, 7, 19)
    gathered = torch.empty(24, 19, device=ctx.device)
    x = gathered[9:15].copy_(x)
    with in_turns(ctx), pytest.raises(ValueError, match="in place it begins"):
        tkernels.all_gather_matmul(x, w, return_gathered=gathered[:12], path="plain", ctx=ctx)


@pytest.mark.ranks(2)
def test_matmul_all_reduce_in_turns_takes_no_more_of_the_heap_than_the_partial_sums_do(ctx):
    """Nor would the inboxes that all-gathers of its size have by default."""
    x, w, _ = operands(ctx, 1024, 1024, 8)
    want = sum_of_products(ctx, x, w)
    with tkernels.init(heap_bytes=14 << 20) as small, in_turns(small):
        assert torch.equal(tkernels.matmul_all_reduce(x, w, path="plain", ctx=small).double(), want)


@gpu_only
@pytest.mark.ranks(2)
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("late", ["products", "operands"])
def test_all_gather_matmul_and_matmul_reduce_scatter_in_turns_wait_for_what_is_late(ctx, late, waits):
    """Without the waits the results are wrong."""
    rows, N, K = (64,) * ctx.size, 128, 256
    for operation in (tkernels.all_gather_matmul, tkernels.matmul_reduce_scatter):
        gathers = operation is tkernels.all_gather_matmul
        x, w, _ = operands(ctx, rows[ctx.rank] if gathers else sum(rows), N, K)
        want = product_of_gathered(ctx, x, w) if gathers else own_rows_of_sum(ctx, rows, x, w)
        with in_turns(ctx), contextlib.ExitStack() as patches:
            if late == "products":
                patches.enter_context(with_late_products())
            held, out = torch.zeros_like(x), torch.empty_like(want, dtype=torch.float32)
            operation(held, w, out=out, path="plain", ctx=ctx)  # compiled
            torch.cuda.synchronize()
            if not waits:
                patches.enter_context(mock.patch.object(Lane, "behind", behind_nothing))
            out.fill_(torch.nan)
            if late == "operands":
                sleep()
            held.copy_(x)
            got = operation(held, w, out=out, path="plain", ctx=ctx).clone()
            torch.cuda.synchronize()
            ctx.check()
        assert torch.equal(got.double(), want) == waits, operation


@gpu_only
@pytest.mark.ranks(2)
def test_all_gather_matmul_and_reductions_in_turns_may_be_captured(ctx):
    rows, N, K = (64,) * ctx.size, 128, 256
    for operation in (tkernels.all_gather_matmul, tkernels.matmul_reduce_scatter, tkernels.matmul_all_reduce):
        gathers = operation is tkernels.all_gather_matmul
        x, w, bias = operands(ctx, rows[ctx.rank] if gathers else sum(rows), N, K)
        with in_turns(ctx, plans=2):
            operation(x, w, bias, "relu", path="plain", ctx=ctx)  # compiled
            graph, held = torch.cuda.CUDAGraph(), x.clone()
            ctx.forget_calls()
            with torch.cuda.graph(graph):
                y = operation(held, w, bias, "relu", path="plain", ctx=ctx)
            for factor in (1, 2, 3):
                held.copy_(x * factor)
                eager = operation(held, w, bias, "relu", path="plain", ctx=ctx)
                graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(y, eager), (operation, factor)
            ctx.check()
