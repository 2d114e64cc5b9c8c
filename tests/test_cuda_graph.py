"""Operations and training steps inside a CUDA graph: each replay is one of its own, late ranks or not.

What can't be captured is refused by name.
"""

import contextlib
import functools
import itertools
import random
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transports import by_copies, every_path, every_transport, gpu_only, interleaved, over

import tkernels
from tkernels.comm import MismatchError, TkernelsError, collectives, runtime
from tkernels.demo.model import ModelConfig, Transformer, shard
from tkernels.layers.gradients import all_reduce_sequence_parallel_grads
from tkernels.testing.compare import integers

pytestmark = gpu_only
M, N, K = 96, 64, 64
REPLAYS = 200
TRAINING_REPLAYS, CYCLE = 10_000, 20


def operands(ctx, seed, rows=M, dtype=torch.bfloat16):
    """All ranks' x [rows/R, K], x [rows, K] and w [N, K], the same lists on every rank; every sum is exact in bf16."""
    make = lambda shape, seed: integers(shape, dtype, seed, -1, 1)  # noqa: E731
    shards = [make((rows // ctx.size, K), seed + rank) for rank in range(ctx.size)]
    whole = [make((rows, K), seed + 100 + rank) for rank in range(ctx.size)]
    weights = [make((N, K), 7 + rank) for rank in range(ctx.size)]
    return shards, whole, weights


def results_by_hand(ctx, shards, whole, weights):
    gathered = torch.cat(shards)
    total = sum(x.float() @ w.float().t() for x, w in zip(whole, weights, strict=True))
    mine = gathered.float() @ weights[ctx.rank].float().t()
    return mine, total.chunk(ctx.size)[ctx.rank], total, gathered


def step(ctx, path, shard, whole, w):
    if path in ("copies", "interleaved"):
        reduce = by_copies if path == "copies" else interleaved
        return (
            by_copies(ctx, "all_gather_matmul", shard, w),
            reduce(ctx, "matmul_reduce_scatter", whole, w),
            reduce(ctx, "matmul_all_reduce", whole, w),
            collectives.all_gather(ctx, shard, config=collectives.CollectiveConfig(0, 0, 0, copy_bytes=0)),
        )
    return (
        tkernels.all_gather_matmul(shard, w, ctx=ctx, path=path),
        tkernels.matmul_reduce_scatter(whole, w, ctx=ctx, path=path),
        tkernels.matmul_all_reduce(whole, w, ctx=ctx, path=path),
        tkernels.all_gather(shard, ctx=ctx),
    )


@pytest.mark.ranks(2, 4)
@every_transport
@pytest.mark.parametrize("path", ["fused", "plain", "copies", "interleaved"])
def test_every_replay_is_a_call_of_its_own(ctx, transport, path):
    ctx = over(ctx, transport)
    shards, whole, weights = operands(ctx, 0)
    mine = [parts[ctx.rank].to(ctx.device) for parts in (shards, whole, weights)]
    step(ctx, path, *mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(ctx, path, *mine)
    for replay in range(REPLAYS):
        shards, whole, _ = operands(ctx, replay)
        mine[0].copy_(shards[ctx.rank])
        mine[1].copy_(whole[ctx.rank])
        if ctx.rank == replay % ctx.size:
            torch.cuda._sleep(200_000)  # about 0.1 ms: another rank is late each time
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        calls = [results]
        if replay % 3 == 0:
            calls.append(step(ctx, path, *mine))  # eager calls between replays take their turn in the same epochs
        if replay < 5 or replay % 50 == 0:
            expected = results_by_hand(ctx, shards, whole, weights)
            for result, right in zip(itertools.chain(*calls), expected * len(calls), strict=True):
                assert torch.equal(result.cpu().float(), right.float()), f"replay {replay}"
    ctx.check()
    torch.cuda.synchronize()
    ctx.group.barrier()


def scaled_step(ctx, path, shard, whole, w, w_scale):
    """The fused operations in FP8, of operands in bf16 that are quantized here."""
    results = []
    for name, x in (("all_gather_matmul", shard), ("matmul_reduce_scatter", whole), ("matmul_all_reduce", whole)):
        q, x_scale = tkernels.quantize(x, "row", power_of_two=True)
        if path == "copies":
            call = functools.partial(by_copies, ctx, name)
        else:
            call = functools.partial(getattr(tkernels, name), ctx=ctx, path=path)
        results.append(call(q, w, x_scale=x_scale, w_scale=w_scale))
    return results


def scaled_operands(ctx, seed, rows=M):
    """As `operands`, but rows differ by powers of two, which are other ones for each seed."""
    shards, whole, weights = operands(ctx, seed, rows)
    unit = (2.0 ** ((torch.arange(rows) + seed) % 5)).to(torch.bfloat16)[:, None]
    shards = [shard * part for shard, part in zip(shards, unit.chunk(ctx.size), strict=True)]
    return shards, [x * unit for x in whole], weights


@pytest.mark.ranks(2, 4)
@every_transport
@pytest.mark.parametrize("path", ["fused", "plain", "copies"])
def test_every_replay_in_fp8_quantizes_its_own_rows_and_sends_their_scales(ctx, transport, path):
    if not runtime.has_fp8():
        pytest.skip("the GPU has no FP8")
    ctx = over(ctx, transport)
    shards, whole, weights = scaled_operands(ctx, 0)
    shard, full, w = (parts[ctx.rank].to(ctx.device) for parts in (shards, whole, weights))
    scaled_w = tkernels.quantize(w, "row", power_of_two=True)
    scaled_step(ctx, path, shard, full, *scaled_w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = scaled_step(ctx, path, shard, full, *scaled_w)
    for replay in range(REPLAYS):
        shards, whole, _ = scaled_operands(ctx, replay)
        shard.copy_(shards[ctx.rank])
        full.copy_(whole[ctx.rank])
        if ctx.rank == replay % ctx.size:
            torch.cuda._sleep(200_000)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        calls = [results]
        if replay % 3 == 0:
            calls.append(scaled_step(ctx, path, shard, full, *scaled_w))
        if replay < 5 or replay % 50 == 0:
            expected = results_by_hand(ctx, shards, whole, weights)[:3]
            for result, right in zip(itertools.chain(*calls), expected * len(calls), strict=True):
                assert torch.equal(result.cpu().float(), right.float()), f"replay {replay}"
    ctx.check()
    torch.cuda.synchronize()
    ctx.group.barrier()


@pytest.mark.ranks(2)
def test_over_nvshmem_a_kernel_that_is_not_loaded_is_refused_under_a_capture(ctx):
    over_nvshmem, rows = over(ctx, "nvshmem"), 3 * M + 8 * ctx.size
    shards, _, weights = operands(ctx, 0, rows)
    x, w = shards[ctx.rank].to(ctx.device), weights[ctx.rank].to(ctx.device)
    call = functools.partial(tkernels.all_gather_matmul, x, w, activation="silu", ctx=over_nvshmem, path="fused")
    with pytest.raises(TkernelsError, match="over the transport nvshmem.*before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    want = call().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, want)
    expected = F.silu(torch.cat(shards).double() @ weights[ctx.rank].double().t())
    assert (y.cpu().double() - expected).abs().max() <= expected.abs().max() * 2**-8
    torch.cuda.synchronize()
    ctx.group.barrier()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("path", ["fused", "plain", "copies"])
@pytest.mark.parametrize("mode, dtype", [("global", torch.float16), ("thread_local", torch.float32)], ids=str)
def test_the_very_first_calls_of_a_context_are_captured_each_larger_than_the_one_before(ctx, path, mode, dtype):
    """In dtypes of their own, for which no test before has had the kernels compiled and loaded."""
    with tkernels.init(ctx.group.process_group, transport="peer") as own:
        cases = []
        for rows in (M + 40 * ctx.size, 4 * M + 40 * ctx.size):
            shards, whole, weights = operands(own, rows, rows, dtype)
            cases.append((rows, [parts[own.rank].to(own.device) for parts in (shards, whole, weights)]))
        graph, results = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, capture_error_mode=mode):
            for _, mine in cases:
                results.append(step(own, path, *mine))
        for replay in range(20):
            for (rows, mine), result in zip(cases, results, strict=True):
                shards, whole, weights = operands(own, 1000 * replay + rows, rows, dtype)
                mine[0].copy_(shards[own.rank])
                mine[1].copy_(whole[own.rank])
                for tensor in result:
                    tensor.fill_(float("nan"))
            if own.rank == replay % own.size:
                torch.cuda._sleep(200_000)
            graph.replay()
            for (rows, _), result in zip(cases, results, strict=True):
                shards, whole, weights = operands(own, 1000 * replay + rows, rows, dtype)
                for tensor, right in zip(result, results_by_hand(own, shards, whole, weights), strict=True):
                    assert torch.equal(tensor.cpu().float(), right.float()), (rows, replay)
            for (_, mine), result in zip(cases, results, strict=True):  # eager calls between replays
                for tensor, right in zip(step(own, path, *mine), result, strict=True):
                    assert torch.equal(tensor, right), replay
        own.check()
        torch.cuda.synchronize()
        own.group.barrier()
        del graph


@pytest.mark.ranks(2, 4)
def test_two_branches_of_one_first_capture_have_a_workspace_each(ctx):
    with tkernels.init(ctx.group.process_group, heap_bytes=64 << 20) as own:
        side = torch.cuda.Stream()
        mine = [torch.zeros(4096, device=ctx.device) for _ in range(2)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            first = tkernels.all_gather(mine[0], ctx=own)
            with torch.cuda.stream(side):
                second = tkernels.all_gather(mine[1], ctx=own)
            torch.cuda.current_stream().wait_stream(side)
        assert len(own._workspaces) == 2
        for replay in range(50):
            for number, tensor in enumerate(mine):
                tensor.fill_(float(100 * replay + 10 * number + ctx.rank))
            if ctx.rank == replay % ctx.size:
                torch.cuda._sleep(200_000)
            graph.replay()
            for number, gathered in enumerate((first, second)):
                want = [100.0 * replay + 10 * number + rank for rank in range(ctx.size)]
                assert gathered.view(ctx.size, -1).eq(torch.tensor(want, device=ctx.device).view(-1, 1)).all(), replay
        own.check()
        torch.cuda.synchronize()
        own.group.barrier()
        del graph


@pytest.mark.ranks(2)
@every_path
def test_a_capture_that_would_need_memory_is_refused_and_leaves_the_context_usable(ctx, path):
    x = torch.ones(M, K, dtype=torch.bfloat16, device=ctx.device)
    w = torch.ones(N, K, dtype=torch.bfloat16, device=ctx.device)
    larger = torch.ones(1 << 15, K, dtype=torch.bfloat16, device=ctx.device)
    with tkernels.init(ctx.group.process_group, heap_bytes=64 << 20) as own:
        tkernels.all_gather_matmul(x, w, ctx=own, path=path)
        own.free(own.empty(50 << 20, dtype=torch.uint8))  # a capture takes only what was never used
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(TkernelsError, match="before the capture"), torch.cuda.graph(graph):
            tkernels.all_gather_matmul(larger, w, ctx=own, path=path)
        for operand in (x, larger):
            y = tkernels.all_gather_matmul(operand, w, ctx=own, path=path)
            assert torch.equal(y, torch.full_like(y, K))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("path", ["fused", "plain", "copies"])
def test_graphs_replay_right_after_calls_that_need_more_memory_than_they_have(ctx, path):
    graphs = []
    with tkernels.init(ctx.group.process_group, heap_bytes=64 << 20) as own:
        for rows in (M, 16 * M, 64 * M):
            shards, whole, weights = operands(own, rows, rows)
            mine = [parts[own.rank].to(own.device) for parts in (shards, whole, weights)]
            step(own, path, *mine)  # outgrows what the graphs before were captured with
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = step(own, path, *mine)
            graphs.append((rows, mine, graph, results))
            for replay, (rows, mine, graph, results) in itertools.product(range(5), graphs):
                shards, whole, _ = operands(own, 1000 * replay + rows, rows)
                mine[0].copy_(shards[own.rank])
                mine[1].copy_(whole[own.rank])
                if own.rank == replay % own.size:
                    torch.cuda._sleep(200_000)
                for result in results:
                    result.fill_(float("nan"))
                graph.replay()
                expected = results_by_hand(own, shards, whole, weights)
                for result, right in zip(results, expected, strict=True):
                    assert torch.equal(result.cpu().float(), right.float()), (rows, replay)
        torch.cuda.synchronize()
        del graph, graphs


class Training:
    """The demo's model, split over ranks, and a step of it on the tokens and targets that stand in its buffers."""

    def __init__(self, ctx):
        torch.manual_seed(0)
        self.ctx, self.config = ctx, ModelConfig(vocabulary=64, sequence=32, batch=2, heads=4, layers=1)
        self.model = shard(Transformer(self.config).to(ctx.device, torch.bfloat16), ctx)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        own = self.config.sequence // ctx.size
        self.positions = torch.arange(ctx.rank * own, (ctx.rank + 1) * own, device=ctx.device)
        batches = torch.randint(64, (CYCLE, 2, self.config.sequence, self.config.batch))
        self.batches = batches[:, :, ctx.rank * own : (ctx.rank + 1) * own].contiguous().to(ctx.device)
        self.batch = self.batches[0].clone()
        self.first = [parameter.detach().clone() for parameter in self.model.parameters()]

    def start(self):
        """Back to the first parameters."""
        with torch.no_grad():
            for parameter, first in zip(self.model.parameters(), self.first, strict=True):
                parameter.copy_(first)

    def step(self):
        """Collective. The loss [1] of all ranks' tokens, before the update."""
        self.optimizer.zero_grad(set_to_none=True)
        with sdpa_kernel(SDPBackend.MATH):  # whose backward adds in one order; the fused ones' use atomics
            logits = self.model(self.batch[0], self.positions).float()
        loss = F.cross_entropy(logits.flatten(0, 1), self.batch[1].flatten(), reduction="sum") / self.config.tokens
        loss.backward()
        all_reduce_sequence_parallel_grads(self.model, mesh=self.ctx)
        self.optimizer.step()
        return tkernels.all_reduce(loss.detach().view(1), ctx=self.ctx)

    def cycle(self, step):
        """Collective. The losses of CYCLE steps from the first parameters on, and the parameters after them."""
        self.start()
        losses = []
        for batch in self.batches:
            self.batch.copy_(batch)
            losses.append(step().clone())
        return torch.cat(losses), [parameter.detach().clone() for parameter in self.model.parameters()]


def differing(got, want):
    """Elements of (losses, parameters) that are not the same, as a tensor: nobody waits for it."""
    pairs = zip((got[0], *got[1]), (want[0], *want[1]), strict=True)
    return sum((one != other).sum() for one, other in pairs)


@pytest.mark.ranks(2, 4)
@every_transport
@every_path
def test_10000_replays_of_a_training_step_with_a_late_rank_stay_bitwise_right(ctx, transport, path):
    with contextlib.ExitStack() as stack:
        for name in ("all_gather_matmul", "matmul_reduce_scatter"):  # which the layers call
            operation = functools.partial(getattr(tkernels, name), path=path)
            stack.enter_context(mock.patch.object(tkernels, name, operation))
        replay_training(over(ctx, transport))


def use_cublas(ctx):
    """torch can't make its handles under a capture, of this thread and of that of backward passes."""
    x = torch.ones(16, 16, device=ctx.device, requires_grad=True)
    (x @ x).sum().backward()


def replay_training(ctx):
    training = Training(ctx)
    use_cublas(ctx)
    if ctx.transport == "nvshmem":  # whose kernels a capture can't load
        training.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the very first step
        loss = training.step()
    want = training.cycle(training.step)
    assert not differing(training.cycle(training.step), want)  # the step itself is the same bits on every run
    draws = random.Random(ctx.size)

    def replay():
        late, how_long = draws.randrange(2 * ctx.size), draws.random()  # in half of the steps nobody is
        if late == ctx.rank:
            torch.cuda._sleep(int(400_000 * how_long))  # up to about 0.2 ms
        loss.fill_(float("nan"))
        graph.replay()
        return loss

    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for _ in range(TRAINING_REPLAYS // CYCLE):
        wrong += differing(training.cycle(replay), want)
    assert wrong.item() == 0
    ctx.check()
    ctx.group.barrier()


@pytest.mark.ranks(2)
def test_all_reduce_replayed_on_one_rank_against_another_call_is_named_on_every_rank(ctx):
    with tkernels.init(ctx.group.process_group, heap_bytes=64 << 20) as context:
        x = torch.ones(64, device=ctx.device)
        tkernels.all_reduce(x, ctx=context)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = tkernels.all_reduce(x, ctx=context)
        for _ in range(3):
            graph.replay()
        context.check()
        assert total.tolist() == [2.0] * 64
        with pytest.raises(MismatchError, match=r"in shape: \(64,\) on rank 0, \(48,\) on rank 1"):
            graph.replay() if ctx.rank == 0 else tkernels.all_reduce(x[:48], ctx=context)
            context.check()
