"""Operations inside a CUDA graph: each replay is a call of its own, and what can't be captured is refused by name."""

import pytest
import torch
from transports import every_transport, gpu_only, over

import tkernels
from tkernels.comm import TkernelsError
from tkernels.testing.compare import integers

pytestmark = gpu_only
M, N, K = 96, 64, 64
REPLAYS = 200


def operands(ctx, seed):
    """All ranks' x [M/R, K], x [M, K] and w [N, K], the same lists on every rank; every sum is exact in bf16."""
    make = lambda shape, seed: integers(shape, torch.bfloat16, seed, -1, 1)  # noqa: E731
    shards = [make((M // ctx.size, K), seed + rank) for rank in range(ctx.size)]
    whole = [make((M, K), seed + 100 + rank) for rank in range(ctx.size)]
    weights = [make((N, K), 7 + rank) for rank in range(ctx.size)]
    return shards, whole, weights


def results_by_hand(ctx, shards, whole, weights):
    gathered = torch.cat(shards)
    total = sum(x.float() @ w.float().t() for x, w in zip(whole, weights, strict=True))
    mine = gathered.float() @ weights[ctx.rank].float().t()
    return mine, total.chunk(ctx.size)[ctx.rank], total, gathered


def step(ctx, shard, whole, w):
    return (
        tkernels.all_gather_matmul(shard, w, ctx=ctx),
        tkernels.matmul_reduce_scatter(whole, w, ctx=ctx),
        tkernels.matmul_all_reduce(whole, w, ctx=ctx),
        tkernels.all_gather(shard, ctx=ctx),
    )


@pytest.mark.ranks(2, 4)
@every_transport
def test_every_replay_is_a_call_of_its_own(ctx, transport):
    ctx = over(ctx, transport)
    shards, whole, weights = operands(ctx, 0)
    mine = [parts[ctx.rank].to(ctx.device) for parts in (shards, whole, weights)]
    step(ctx, *mine)  # makes room and compiles; a capture can do neither
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(ctx, *mine)
    for replay in range(REPLAYS):
        shards, whole, _ = operands(ctx, replay)
        mine[0].copy_(shards[ctx.rank])
        mine[1].copy_(whole[ctx.rank])
        if ctx.rank == replay % ctx.size:
            torch.cuda._sleep(200_000)  # about 0.1 ms: another rank is late each time
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        if replay % 3 == 0:
            step(ctx, *mine)  # eager calls between replays take their turn in the same epochs
        if replay < 5 or replay % 50 == 0:
            expected = results_by_hand(ctx, shards, whole, weights)
            for result, right in zip(results, expected, strict=True):
                assert torch.equal(result.cpu().float(), right.float()), f"replay {replay}"
    ctx.check()
    torch.cuda.synchronize()
    ctx.group.barrier()


@pytest.mark.ranks(2)
def test_a_capture_that_would_need_memory_is_refused_and_leaves_the_context_usable(ctx):
    x = torch.ones(M, K, dtype=torch.bfloat16, device=ctx.device)
    w = torch.ones(N, K, dtype=torch.bfloat16, device=ctx.device)
    tkernels.all_gather_matmul(x, w, ctx=ctx)
    larger = torch.ones(1 << 15, K, dtype=torch.bfloat16, device=ctx.device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(TkernelsError, match="before the capture"), torch.cuda.graph(graph):
        tkernels.all_gather_matmul(larger, w, ctx=ctx)
    y = tkernels.all_gather_matmul(x, w, ctx=ctx)
    assert torch.equal(y, torch.full_like(y, K))
