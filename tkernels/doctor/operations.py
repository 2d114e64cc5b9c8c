"""Runs every operation on small integers, whose sums are exact: the result must equal torch's bit for bit.

The functions here run in the ranks' processes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import tkernels
from tkernels.comm.context import Context

M, N, K = 70, 48, 36  # no multiples of a tile's sizes


@dataclass(frozen=True)
class Outcome:
    """milliseconds: of the second call; the first one compiles. None if it failed."""

    operation: str
    milliseconds: float | None
    problem: str | None


OPERATIONS = (
    "matmul",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "barrier",
)


def run_operation(ctx: Context, name: str) -> Outcome:
    """Collective. Call one operation twice; compare the second result with torch's, on every rank."""
    call, want = _case(ctx, name)
    for _ in range(2):
        ctx.group.barrier()
        start = time.perf_counter()
        got = call()
        ctx.check()  # waits for the device
        seconds = time.perf_counter() - start
    problem = None
    if want is not None and not torch.equal(got, want):
        problem = f"rank {ctx.rank}: {int((got != want).sum())} of {want.numel()} numbers are not torch's"
    problem = next(filter(None, ctx.group.gather(problem)), None)
    return Outcome(name, seconds * 1e3, problem)


def _case(ctx: Context, name: str) -> tuple[Callable[[], torch.Tensor | None], torch.Tensor | None]:
    """Returns (the call on this rank, torch's result). Every rank generates the operands of all ranks."""
    rank, size = ctx.rank, ctx.size
    rows = tkernels.split_rows(M, size)
    generator = torch.Generator().manual_seed(0)

    def integers(*sizes):
        return torch.randint(-4, 5, sizes, generator=generator).float().to(ctx.device)

    x, w, bias = [integers(M, K) for _ in range(size)], [integers(N, K) for _ in range(size)], integers(N)
    whole, own = x[0], x[0].split(rows)[rank]  # of one matrix that is split by rows
    total = sum(x)
    product = sum(part @ weight.t() for part, weight in zip(x, w, strict=True)) + bias
    options = dict(rows=rows, ctx=ctx)
    cases = {
        "matmul": (lambda: tkernels.matmul(x[rank], w[rank], bias), x[rank] @ w[rank].t() + bias),
        "all_gather_matmul": (
            lambda: tkernels.all_gather_matmul(own, w[rank], bias, **options),
            whole @ w[rank].t() + bias,
        ),
        "matmul_reduce_scatter": (
            lambda: tkernels.matmul_reduce_scatter(x[rank], w[rank], bias, **options),
            product.split(rows)[rank],
        ),
        "matmul_all_reduce": (lambda: tkernels.matmul_all_reduce(x[rank], w[rank], bias, ctx=ctx), product),
        "all_gather": (lambda: tkernels.all_gather(own, **options), whole),
        "reduce_scatter": (lambda: tkernels.reduce_scatter(x[rank], **options), total.split(rows)[rank]),
        "all_reduce": (lambda: tkernels.all_reduce(x[rank], ctx=ctx), total),
        "barrier": (lambda: tkernels.barrier(ctx=ctx), None),
    }
    return cases[name]
