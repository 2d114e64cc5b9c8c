"""matmul_all_reduce against the unsharded product: any shape, the same bits on every rank and on every run."""

import functools
import itertools

import pytest
import torch
from transports import (
    assert_stages,
    every_path,
    every_transport,
    every_transport_if_exhaustive,
    fewer,
    late,
    memory_that_kernels_get,
    over,
    poison_workspace,
)

import tkernels
from tkernels.activations import ACTIVATIONS
from tkernels.comm import interpreter
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.gemm import DTYPES
from tkernels.matmul_reduce_scatter import matmul_all_reduce_reference
from tkernels.testing.compare import assert_close_to, integers, normal

# (M, N, K on each rank)
SHAPES = {
    2: [(65, 40, 48), (1, 16, 32), (37, 33, 50), (14, 13, 31), (128, 8, 8), (1, 1, 1)],
    3: [(38, 20, 24), (2, 5, 40)],
    4: [(67, 33, 40), (3, 16, 32)],
}


def small(shape, dtype, seed, device):
    """Integers whose partial sums of up to 64 products are exact in bf16, as they travel."""
    return integers(shape, dtype, seed, low=-2, high=2, device=device)


def operands(ctx, make, M, N, K, dtype, seed, transposed=False):
    """This rank's x_shard_k and w_shard_k, different on every rank, and the bias that all share."""
    own = 100 * seed + 10 * ctx.rank
    x = make((M, K), dtype, own, device=ctx.device)
    w = make((K, N) if transposed else (N, K), dtype, own + 1, device=ctx.device)
    return x, w.t() if transposed else w, make(N, dtype, 100 * seed + 99, device=ctx.device)


def reference(ctx, x, w, bias=None, activation=None):
    return matmul_all_reduce_reference(ctx.group.process_group, x, w, bias, activation)


def same_everywhere(ctx, y):
    """Collective. Every rank has the same bits."""
    everyone = ctx.group.gather(y.cpu())
    return all(torch.equal(everyone[0], other) for other in everyone)


@pytest.mark.ranks(2, 3, 4)
@every_transport
@every_path
def test_integers_are_exact_in_any_shape_dtype_and_layout(ctx, transport, path):
    ctx = over(ctx, transport)
    for seed, (M, N, K) in enumerate(fewer(SHAPES[ctx.size], transport)):
        dtype, activation = DTYPES[seed % 3], (None, "relu")[seed % 2]
        x, w, bias = operands(ctx, small, M, N, K, dtype, seed, transposed=seed % 4 > 1)
        got = tkernels.matmul_all_reduce(x, w, bias, activation, ctx=ctx, path=path)
        ctx.check()
        assert torch.equal(got, reference(ctx, x, w, bias, activation).to(dtype)), (M, N, K)


@pytest.mark.ranks(2, 3)
@every_transport
def test_matmul_all_reduce_stages_rows_that_tma_can_not_take(ctx, transport):
    """Of x and w, and of the partial sums and y, which are computed with more columns; each alone and together."""
    ctx = over(ctx, transport)
    cases = [(40, 31, False, False), (33, 48, True, False), (13, 9, False, True), (1, 1, True, True)]
    for seed, (N, K, transposed, turned) in enumerate([*cases, (40, 144, False, True)]):
        M, dtype = 65, (torch.bfloat16, torch.float16)[seed % 2]
        x, w, bias = operands(ctx, small, M, N, K, dtype, seed, transposed)
        x = x.t().contiguous().t() if turned else x
        want = reference(ctx, x, w, bias, "relu").to(dtype)
        call = functools.partial(tkernels.matmul_all_reduce, x, w, bias, "relu", ctx=ctx, path="fused")
        copied = (K % 8 > 0 or turned) + (N % 8 > 0) + ((N if transposed else K) % 8 > 0)
        assert_stages(ctx, call, want, copied, turned and K > 1)  # of one column, rows are as good


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_transport_if_exhaustive
@every_path
def test_random_values_are_within_the_derived_limits_and_bias_is_added_once(ctx, transport, dtype, path):
    ctx = over(ctx, transport)
    for seed, activation in enumerate(ACTIVATIONS):
        M, N, K = 67, 33, 50
        x, w, bias = operands(ctx, normal, M, N, K, dtype, seed, transposed=seed % 2 == 1)
        got = tkernels.matmul_all_reduce(x, w, bias, activation, ctx=ctx, path=path)
        # Each peer's partial sum, and the result; a plain product is rounded even where it stays.
        limits = dict(terms=ctx.size * K + 1, roundings=ctx.size + (path == "plain"))
        assert_close_to(got, reference(ctx, x, w, bias, activation), **limits)
        assert same_everywhere(ctx, got)
        for wrong in (None, ctx.size * bias):
            with pytest.raises(AssertionError, match="elements are off"):
                assert_close_to(got, reference(ctx, x, w, wrong, activation), **limits)


def large(shape, dtype, seed, device):
    """Integers whose sums of up to 16384 products are exact in fp32, and mostly not in bf16 or fp16."""
    return integers(shape, dtype, seed, low=-32, high=32, device=device)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_transport_if_exhaustive
@every_path
def test_partial_sums_travel_and_results_come_in_fp32_where_asked(ctx, transport, dtype, path):
    ctx = over(ctx, transport)
    for N in (41, 40):
        x, w, bias = operands(ctx, large, 67, N, 40, dtype, N)
        want = reference(ctx, x, w, bias)
        for out in (dtype, torch.float32):
            for wire in (dtype, torch.float32):  # the finished sums share the inbox, at other widths
                poison_workspace(ctx)
                got = tkernels.matmul_all_reduce(x, w, bias, out_dtype=out, wire_dtype=wire, path=path, ctx=ctx)
                assert same_everywhere(ctx, got)
                assert torch.equal(got, want.to(out)) == (wire == torch.float32), (N, out, wire)
    with pytest.raises(TypeError, match="out_dtype=torch.float64 must be .*, the operands' dtype(, or float32)?$"):
        tkernels.matmul_all_reduce(x, w, out_dtype=torch.float64, path=path, ctx=ctx)


@pytest.mark.ranks(2, 4)
@every_transport
@every_path
def test_row_counts_change_from_call_to_call_among_other_operations(ctx, transport, path):
    ctx = over(ctx, transport)
    results = []
    for round, (M, N) in enumerate(zip([5, 67, 1, 130, 0, 40], itertools.cycle((24, 9)), strict=False)):
        late(ctx, round % ctx.size, 0.02)
        x, w, bias = operands(ctx, small, M, N, 20, torch.float32, round)
        y = tkernels.matmul_all_reduce(x, w, bias, ctx=ctx, path=path)
        gathered = tkernels.all_gather(w, ctx=ctx)
        scattered = tkernels.matmul_reduce_scatter(x, w, rows=(M,) + (0,) * (ctx.size - 1), ctx=ctx)
        if round % 3 == 1:
            poison_workspace(ctx)
        if round % 3 == 2:
            tkernels.barrier(ctx=ctx)
        results.append((x, w, bias, y, gathered, scattered))
    for x, w, bias, y, gathered, scattered in results:
        assert torch.equal(y, reference(ctx, x, w, bias).float()), x.shape
        assert torch.equal(scattered, reference(ctx, x, w).float()[: len(scattered)]), x.shape
        assert len(scattered) == (len(x) if ctx.rank == 0 else 0)
        assert torch.equal(gathered, torch.cat(ctx.group.gather(w.cpu())).to(ctx.device)), x.shape


@pytest.mark.ranks(2, 4)
@every_transport
@every_path
def test_the_bits_are_the_same_on_every_rank_and_run_whatever_the_delays(ctx, transport, path):
    ctx = over(ctx, transport)
    x, w, bias = operands(ctx, normal, 67, 40, 48, torch.bfloat16, 1)
    first = tkernels.matmul_all_reduce(x, w, bias, "silu", ctx=ctx, path=path)
    assert same_everywhere(ctx, first)
    for seed in range(2 if ctx.size == 4 else 4):
        poison_workspace(ctx)
        late(ctx, seed % ctx.size, 0.05)
        with interpreter.execution(jitter_seed=seed, rank=ctx.rank):
            assert torch.equal(tkernels.matmul_all_reduce(x, w, bias, "silu", ctx=ctx, path=path), first), seed


CONFIGS = {
    "last tiles in parts": OverlapConfig(
        GemmConfig(16, 32, 16), chunk_rows=32, num_comm=1, put_block=256, split_tiles=3, max_splits=4
    ),
    "one chunk of two tiles": OverlapConfig(GemmConfig(16, 32, 16), chunk_rows=32, num_comm=1, put_block=256),
    "by pointers": OverlapConfig(GemmConfig(32, 32, 32, use_tma=False), chunk_rows=32, num_comm=2, put_block=512),
    "chunks of half a tile": OverlapConfig(GemmConfig(32, 32, 32), chunk_rows=16, num_comm=1, put_block=512),
    "long groups": OverlapConfig(GemmConfig(16, 16, 16, group_m=8, split=1), chunk_rows=16, num_comm=1, put_block=128),
    "by copies, one a peer": OverlapConfig(GemmConfig(32, 32, 32), chunk_rows=1024, num_comm=0),
    "by copies": OverlapConfig(GemmConfig(16, 32, 16), chunk_rows=32, num_comm=0),
    "by copies of several chunks": OverlapConfig(GemmConfig(32, 32, 32), chunk_rows=16, num_comm=0, copy_rows=64),
    "interleaved": OverlapConfig(GemmConfig(16, 32, 16), chunk_rows=32, num_comm=0, interleaved=True),
    "interleaved into the landing": OverlapConfig(
        GemmConfig(32, 32, 32), chunk_rows=16, num_comm=0, interleaved=True, landing=True, put_block=128
    ),
    "interleaved, few programs": OverlapConfig(
        GemmConfig(16, 32, 16), chunk_rows=32, num_comm=0, interleaved=True, max_programs=2
    ),
    "by programs into the landing": OverlapConfig(GemmConfig(16, 32, 16), chunk_rows=32, num_comm=2, landing=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_tiling_and_number_of_programs_gives_the_same(ctx, config):
    for num_programs in (config.num_comm + 1, config.num_comm + 3):
        context = over(ctx, ctx.transport, num_programs=num_programs)
        for M in (64, 45):
            x, w, bias = operands(ctx, small, M, 72, 40, torch.float16, num_programs)
            got = tkernels.matmul_all_reduce(x, w, bias, config=config, ctx=context)
            assert torch.equal(got, reference(ctx, x, w, bias).half())


@pytest.mark.quick
@pytest.mark.ranks(2)
@every_transport
def test_operands_are_read_where_they_are(ctx, transport):
    ctx = over(ctx, transport)
    x, w, bias = operands(ctx, small, 32, 24, 16, torch.float16, 1)
    symmetric = ctx.empty(32, 16, dtype=torch.float16)
    symmetric.copy_(x)
    with memory_that_kernels_get() as addresses:
        got = tkernels.matmul_all_reduce(symmetric, w, bias, ctx=ctx, path="fused")
    assert torch.equal(got, reference(ctx, x, w, bias).half())
    assert {symmetric.data_ptr(), w.data_ptr(), bias.data_ptr()} <= addresses
    ctx.barrier()
    ctx.free(symmetric)


@pytest.mark.ranks(2)
def test_wrong_operands_are_refused_before_the_first_signal(ctx):
    x, w, bias = operands(ctx, small, 9, 6, 16, torch.float32, 1)
    call = tkernels.matmul_all_reduce
    refused = [
        (lambda: call(x, w.t(), ctx=ctx), r"matmul_all_reduce: x is \(9, 16\) and w is \(16, 6\), but K"),
        (lambda: call(x, w, x[0], ctx=ctx), r"bias is torch.float32 \(16,\) on .*, but must be torch.float32 \(6,\)"),
        (lambda: call(x, w, bias, "sigmoid", ctx=ctx), "activation='sigmoid' is unknown"),
    ]
    for wrong, message in refused:
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()
    assert torch.equal(call(x, w, bias, ctx=ctx), reference(ctx, x, w, bias).float())
    ctx.check()
