"""all_gather_matmul against the unsharded product: any shape, dtype and layout, call after call."""

import contextlib
import functools
import importlib
import itertools
import math

import pytest
import torch
from execution import execution
from products import TILINGS
from products import product_of_gathered as reference
from transports import (
    every_path,
    every_transport_and_nodes,
    every_transport_if_exhaustive,
    fewer,
    late,
    launches,
    memory_that_kernels_get,
    over,
    poison_workspace,
    staged_rows,
    tf32,
)

import tkernels
from tkernels import choice, fused
from tkernels.activations import ACTIVATIONS
from tkernels.comm.collectives import split_rows
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.gemm import DTYPES
from tkernels.testing.compare import assert_close_to, integers, normal, poison

# (rows of each rank, N on each rank, K)
SHAPES = {
    2: [((33, 32), 40, 48), ((1, 0), 16, 32), ((0, 65), 33, 70), ((7, 7), 13, 31), ((64, 64), 8, 8), ((1, 1), 1, 1)],
    3: [((33, 0, 5), 20, 24), ((1, 1, 1), 5, 40)],
    4: [((17, 17, 17, 16), 33, 40), ((0, 0, 1, 0), 16, 32)],
}


def operands(ctx, make, rows, N, K, dtype, seed, transposed=False):
    """This rank's x_shard_m, w and bias, each different on every rank; transposed: w is the view of a [K, N] matrix."""
    seed = 100 * seed + 10 * ctx.rank
    x = make((rows[ctx.rank], K), dtype, seed, device=ctx.device)
    w = make((K, N) if transposed else (N, K), dtype, seed + 1, device=ctx.device)
    return x, w.t() if transposed else w, make(N, dtype, seed + 2, device=ctx.device)


@pytest.mark.ranks(2, 3, 4)
@every_transport_and_nodes
@every_path
def test_integers_are_exact_in_any_shape_dtype_and_layout(ctx, transport, path):
    ctx = over(ctx, transport)
    for seed, (rows, N, K) in enumerate(fewer(SHAPES[ctx.size], transport)):
        dtype, activation = DTYPES[seed % 3], (None, "relu")[seed % 2]
        x, w, bias = operands(ctx, integers, rows, N, K, dtype, seed, transposed=seed % 4 > 1)
        y, gathered = tkernels.all_gather_matmul(x, w, bias, activation, True, rows=rows, ctx=ctx, path=path)
        want = reference(ctx, x, w, bias, activation)
        assert torch.equal(y, want.to(dtype)), (rows, N, K)
        assert torch.equal(gathered, tkernels.all_gather(x, rows=rows, ctx=ctx)), (rows, N, K)


@pytest.mark.ranks(2, 3)
@every_transport_and_nodes
def test_all_gather_matmul_stages_rows_that_tma_can_not_take(ctx, transport):
    """Of x, which is sent in wider rows, of w and, among more than two, of y; the gathered x has its own rows."""
    ctx, last = over(ctx, transport), ctx.size - 1
    cases = [(40, 31, False), (33, 48, True), (13, 9, False), (1, 1, True), (24, 48, False)]
    for seed, (N, K, transposed) in enumerate(cases):
        rows, dtype = (*(33,) * last, 0), (torch.bfloat16, torch.float16)[seed % 2]
        x, w, bias = operands(ctx, integers, rows, N, K, dtype, seed, transposed)
        x = x.t().contiguous().t() if seed % 2 == 0 else x
        want, whole = reference(ctx, x, w, bias, "relu").to(dtype), tkernels.all_gather(x, rows=rows, ctx=ctx)
        call = functools.partial(tkernels.all_gather_matmul, x, w, rows=rows, ctx=ctx, path="fused")
        poison_workspace(ctx)
        with staged_rows(ctx), launches() as launched:
            out, into = want.new_full(want.shape, math.nan), whole.new_full(whole.shape, math.nan)
            into[sum(rows[: ctx.rank]) :][: len(x)] = x
            assert torch.equal(y := call(bias, "relu"), want) and y.is_contiguous(), (N, K)
            for return_gathered in (True, into):
                y, gathered = call(bias, "relu", return_gathered)
                assert torch.equal(y, want) and torch.equal(gathered, whole) and gathered.is_contiguous(), (N, K)
            assert gathered is into
            assert call(bias, "relu", out=out) is out and torch.equal(out, want)
        kernels = [name for name, *_ in launched]
        copied = (len(x) > 0 and (K % 8 > 0 or seed % 2 == 0)) + ((N if transposed else K) % 8 > 0)
        copied += N % 8 > 0 and ctx.size > 2
        assert kernels.count("copy_rows_kernel") == copied * kernels.count("all_gather_matmul_kernel"), (N, K)


@pytest.mark.ranks(2, 3)
def test_all_gather_matmul_as_tf32_multiplies_w_with_k_contiguous(ctx):
    rows = (*(33,) * (ctx.size - 1), 0)
    for seed, (N, K, transposed) in enumerate([(40, 31, False), (33, 48, True), (16, 32, False), (36, 28, True)]):
        x, w, bias = operands(ctx, integers, rows, N, K, torch.float32, seed, transposed)
        want = reference(ctx, x, w, bias, "relu").float()
        for allowed in (True, False):  # fp32 as it is read where it lies
            with tf32(allowed), staged_rows(ctx), launches() as launched:
                y = tkernels.all_gather_matmul(x, w, bias, "relu", rows=rows, ctx=ctx, path="fused")
            assert torch.equal(y, want) and y.is_contiguous(), (N, K, allowed)
            copied = (len(x) > 0 and K % 4 > 0) + (transposed or K % 4 > 0) + (N % 4 > 0 and ctx.size > 2)
            names = [name for name, *_ in launched]
            assert names.count("copy_rows_kernel") == allowed * copied and "all_gather_matmul_kernel" in names


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transposed", [False, True])
def test_all_gather_matmul_copies_w_into_whole_sectors_for_many_rows_alone(ctx, monkeypatch, transposed):
    """Also where TMA could take its rows, of 80 bytes: between two sectors of 32."""
    rows = (33, 32)
    x, w, _ = operands(ctx, integers, rows, 40, 40, torch.bfloat16, 1, transposed)
    for sector_rows, copies in ((sum(rows), 1), (sum(rows) + 1, 0)):
        monkeypatch.setattr(fused, "SECTOR_ROWS", sector_rows)
        with staged_rows(ctx), launches() as launched:
            assert torch.equal(tkernels.all_gather_matmul(x, w, rows=rows, ctx=ctx), reference(ctx, x, w).bfloat16())
        assert [name for name, *_ in launched].count("copy_rows_kernel") == copies


@pytest.mark.ranks(2)
def test_all_gather_matmul_reads_staged_rows_by_tma_whatever_was_tuned(ctx, monkeypatch):
    """Pointers would read rows of w that it has not: what lies behind it is NaN."""
    rows, N, K = (33, 32), 16, 31
    x, w, _ = operands(ctx, integers, rows, N, K, torch.bfloat16, 1)
    beyond = torch.full((K + 1, N), math.nan, dtype=torch.bfloat16, device=ctx.device)
    w = beyond[:K].copy_(w.t()).t()
    tuned = OverlapConfig(GemmConfig(32, 32, 32, split=1, use_tma=False), chunk_rows=32, num_comm=1)
    monkeypatch.setattr(choice.Tuned, "found", lambda *_: tuned)
    with staged_rows(ctx), launches() as launched:
        y = tkernels.all_gather_matmul(x, w, rows=rows, ctx=ctx, path="fused")
    assert torch.equal(y, reference(ctx, x, w).bfloat16())
    assert "all_gather_matmul_kernel" in [name for name, *_ in launched]


@pytest.mark.ranks(2)
def test_all_gather_matmul_of_staged_rows_has_gradients_and_takes_several_weights(ctx):
    rows, N, K = (33, 32), 13, 31
    x, w, _ = operands(ctx, integers, rows, N, K, torch.bfloat16, 1)
    other = integers((9, K), torch.bfloat16, 5, device=ctx.device)
    want = [reference(ctx, x, each).bfloat16() for each in (w, other)]
    grads, copies = [], []
    for staging in (contextlib.nullcontext(), staged_rows(ctx)):
        x, w, other = (each.detach().requires_grad_() for each in (x, w, other))
        with staging, launches() as launched:
            ys, gathered = tkernels.all_gather_matmul(
                x, [w, other], return_gathered=True, rows=rows, ctx=ctx, path="fused"
            )
            sum(y.sum() for y in ys).backward()
        assert all(torch.equal(*each) for each in zip(ys, want, strict=True))
        assert torch.equal(gathered, tkernels.all_gather(x.detach(), rows=rows, ctx=ctx))
        grads.append([each.grad for each in (x, w, other)])
        copies.append([name for name, *_ in launched].count("copy_rows_kernel"))
    assert all(torch.equal(*each) for each in zip(*grads, strict=True))
    assert copies[1] >= 4 and (copies[0] == 0 or ctx.device.type == "cuda")  # x and w, dy and w, at least


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_transport_if_exhaustive
@every_path
def test_random_values_are_within_the_derived_limits_and_bias_is_added_once(ctx, transport, dtype, path):
    ctx = over(ctx, transport)
    for seed, activation in enumerate(ACTIVATIONS):
        rows, N, K = (40, 27), 33, 70
        x, w, bias = operands(ctx, normal, rows, N, K, dtype, seed, transposed=seed % 2 == 1)
        got = tkernels.all_gather_matmul(x, w, bias, activation, rows=rows, ctx=ctx, path=path)
        # The plain path's product may be torch's, which rounds before an activation.
        limits = dict(terms=K + 1, roundings=1 + (path == "plain" and activation is not None))
        assert_close_to(got, reference(ctx, x, w, bias, activation), **limits)
        for wrong in (None, 2 * bias):
            with pytest.raises(AssertionError, match="elements are off"):
                assert_close_to(got, reference(ctx, x, w, wrong, activation), **limits)


@pytest.mark.ranks(2)
@every_transport_if_exhaustive
@every_path
def test_results_come_in_fp32_where_asked(ctx, transport, path):
    ctx = over(ctx, transport)
    rows, N, K = (40, 27), 33, 70
    x, w, bias = operands(ctx, functools.partial(integers, low=-16, high=16), rows, N, K, torch.bfloat16, 1)
    want = reference(ctx, x, w, bias)
    for out in (torch.bfloat16, torch.float32):
        got = tkernels.all_gather_matmul(x, w, bias, rows=rows, out_dtype=out, path=path, ctx=ctx)
        assert torch.equal(got, want.to(out))
    assert not torch.equal(want.bfloat16().double(), want)
    with pytest.raises(
        TypeError, match="out_dtype=torch.float16 must be torch.bfloat16, the operands' dtype, or float"
    ):
        tkernels.all_gather_matmul(x, w, rows=rows, out_dtype=torch.float16, path=path, ctx=ctx)


@pytest.mark.ranks(2, 4)
@every_transport_and_nodes
@every_path
def test_row_counts_change_from_call_to_call_among_other_operations(ctx, transport, path):
    ctx = over(ctx, transport)
    totals = [5, 67, 1, 130, 40, 0, 67]
    results = []
    for round, (M, K) in enumerate(zip(totals, itertools.cycle((24, 9)), strict=False)):
        rows = split_rows(M, ctx.size)
        late(ctx, round % ctx.size, 0.02)
        x, w, bias = operands(ctx, integers, rows, 20, K, torch.float32, round)
        y, gathered = tkernels.all_gather_matmul(x, w, bias, return_gathered=True, rows=rows, ctx=ctx, path=path)
        total = tkernels.all_reduce(w, ctx=ctx)
        again = tkernels.all_gather_matmul(x + 1, w, rows=rows, ctx=ctx, path=path)
        if round % 3 == 1:
            poison_workspace(ctx)
        if round % 3 == 2:
            tkernels.barrier(ctx=ctx)
        results.append((x, w, bias, y, gathered, total, again, rows))
    # Compared last: a result that shared memory with an inbox would have been overwritten by now.
    for x, w, bias, y, gathered, total, again, rows in results:
        assert torch.equal(y, reference(ctx, x, w, bias).float()), rows
        assert torch.equal(again, reference(ctx, x + 1, w).float()), rows
        assert torch.equal(gathered, torch.cat(ctx.group.gather(x.cpu())).to(ctx.device)), rows
        assert torch.equal(total, sum(ctx.group.gather(w.cpu())).to(ctx.device)), rows


@pytest.mark.ranks(2, 4)
@every_path
def test_delays_and_poison_change_no_bit(ctx, path):
    rows = split_rows(67, ctx.size)
    x, w, bias = operands(ctx, normal, rows, 40, 48, torch.bfloat16, 1)
    first = tkernels.all_gather_matmul(x, w, bias, "silu", rows=rows, ctx=ctx, path=path)
    for seed in range(2 if ctx.size == 4 else 4):
        poison_workspace(ctx)
        late(ctx, seed % ctx.size, 0.05)
        with execution(jitter_seed=seed, rank=ctx.rank):
            again = tkernels.all_gather_matmul(x, w, bias, "silu", rows=rows, ctx=ctx, path=path)
        assert torch.equal(again, first), seed


GATHERING = {name: config for name, config in TILINGS.items() if not config.interleaved}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("config", GATHERING.values(), ids=GATHERING)
def test_every_tiling_and_number_of_programs_gives_the_same(ctx, config):
    for num_programs in (config.num_comm + 1, config.num_comm + 4):
        context = over(ctx, ctx.transport, num_programs=num_programs)
        for rows in ((64, 64), (33, 50)):
            x, w, bias = operands(ctx, integers, rows, 48, 40, torch.float16, num_programs)
            got, gathered = tkernels.all_gather_matmul(x, w, bias, None, True, rows=rows, config=config, ctx=context)
            assert torch.equal(got, reference(ctx, x, w, bias).half()), (num_programs, rows)
            assert torch.equal(gathered, torch.cat(ctx.group.gather(x.cpu())).to(ctx.device))


@pytest.mark.quick
@pytest.mark.ranks(2)
@every_transport_and_nodes
def test_operands_are_read_where_they_are(ctx, transport):
    ctx = over(ctx, transport)
    x, w, bias = operands(ctx, integers, (32, 32), 24, 16, torch.float16, 1)
    want = reference(ctx, x, w, bias).half()
    symmetric = ctx.empty(32, 16, dtype=torch.float16)
    symmetric.copy_(x)
    for mine in (symmetric, x):
        with memory_that_kernels_get() as addresses:
            assert torch.equal(tkernels.all_gather_matmul(mine, w, bias, ctx=ctx, path="fused"), want)
        assert {mine.data_ptr(), w.data_ptr(), bias.data_ptr()} <= addresses
    ctx.barrier()
    ctx.free(symmetric)
    # Rows that are not contiguous are copied, for they travel as they lie.
    strided = torch.zeros(16, 32, dtype=torch.float16, device=ctx.device).copy_(x.t()).t()
    assert strided.stride() == (1, 32)
    assert torch.equal(tkernels.all_gather_matmul(strided, w, bias, ctx=ctx, path="fused"), want)


@pytest.mark.ranks(2)
def test_the_gathered_rows_are_the_callers_own(ctx):
    x, w, _ = operands(ctx, integers, (9, 9), 8, 16, torch.float32, 1)
    for return_gathered in (True, False):
        result = tkernels.all_gather_matmul(x, w, return_gathered=return_gathered, ctx=ctx)
        assert isinstance(result, tuple) == return_gathered
    gathered = tkernels.all_gather_matmul(x, w, return_gathered=True, ctx=ctx)[1]
    want = gathered.clone()
    poison(x)
    for _ in range(3):
        tkernels.all_gather_matmul(x, w, ctx=ctx)
    poison_workspace(ctx)
    assert torch.equal(gathered, want)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [256, 33])
def test_gathered_rows_are_copied_from_the_last_epochs_inbox_and_the_own_from_where_they_are(dtype, K):
    """In blocks that hold rows of the peers before, the own, and those of the peers behind."""
    device = torch.device("cuda", torch.cuda.current_device()) if tkernels.RUNTIME == "nvshmem" else "cpu"
    collect = importlib.import_module("tkernels.all_gather_matmul")._collect
    M = 90
    inbox = integers((2 * M + 3, K), dtype, 1, device=device)
    for epoch, (first, last) in enumerate([(0, 90), (0, 0), (90, 90), (7, 9), (31, 80), (0, 40), (60, 90)], 5):
        state = torch.tensor([epoch, 0], device=device)
        x = integers((last - first, K), dtype, epoch, device=device)
        want = inbox[epoch % 2 * (M + 3) :][:M].clone()
        want[first:last] = x
        launch = collect(state, inbox, M + 3, x, None, first, M)
        whole = torch.full_like(want, float("nan"))
        launch(x, whole)
        assert torch.equal(whole, want), (first, last)
        in_place = torch.full_like(want, float("nan"))
        in_place[first:last] = x
        launch(in_place[first:last], in_place)
        assert torch.equal(in_place, want), (first, last)


@pytest.mark.ranks(2)
def test_wrong_operands_are_refused_before_the_first_signal(ctx):
    x, w, bias = operands(ctx, integers, (8, 8), 6, 16, torch.float32, 1)
    call = tkernels.all_gather_matmul
    all_send = OverlapConfig(GemmConfig(32, 32, 32), num_comm=ctx.num_programs)
    between_steps = OverlapConfig(GemmConfig(32, 32, 32), num_comm=0, interleaved=True)
    refused = [
        (lambda: call(x, w.t(), ctx=ctx), r"all_gather_matmul: x is \(8, 16\) and w is \(16, 6\), but K"),
        (lambda: call(x, w.half(), ctx=ctx), "x is torch.float32 and w is torch.float16"),
        (lambda: call(x, w, x[0], ctx=ctx), r"bias is torch.float32 \(16,\) on .*, but must be torch.float32 \(6,\)"),
        (lambda: call(x, w, bias, "sigmoid", ctx=ctx), "activation='sigmoid' is unknown"),
        (lambda: call(x, w, rows=(9, 7), ctx=ctx), r"rank . has 8 rows, but rows=\(9, 7\) gives it"),
        (lambda: call(x, w, rows=(8, 8, 8), ctx=ctx), "must name a count >= 0 for each of 2 ranks"),
        (lambda: call(x, w, config=all_send, ctx=ctx), r"num_comm=\d+ leaves no program that computes"),
        (lambda: call(x, w, config=between_steps, ctx=ctx), "interleaved=True is for reductions, .* num_comm of 1 or"),
    ]
    for wrong, message in refused:
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()
    assert torch.equal(call(x, w, bias, ctx=ctx), reference(ctx, x, w, bias).float())
    ctx.check()


@pytest.mark.ranks(2)
def test_one_row_of_a_wider_buffer_is_read_as_a_row(ctx):
    """contiguous() leaves the stride of a single row as it is, which a descriptor would believe."""
    x = integers((1, 8), torch.float32, ctx.rank, device=ctx.device)[:, :5]
    w = integers((16, 5), torch.float32, 7, device=ctx.device)
    y = tkernels.all_gather_matmul(x, w, ctx=ctx)
    assert torch.equal(y.double(), reference(ctx, x, w))


@pytest.mark.ranks(2)
@every_transport_and_nodes
@every_path
def test_results_go_where_the_caller_wants_them(ctx, transport, path):
    ctx = over(ctx, transport)
    rows, N, K = (33, 20), 24, 16
    x, w, bias = operands(ctx, integers, rows, N, K, torch.float32, 5)
    call = functools.partial(tkernels.all_gather_matmul, rows=rows, path=path, ctx=ctx)
    want = call(x, w, bias)
    out, gathered = x.new_full((53, N), float("nan")), x.new_full((53, K), float("nan"))
    own = gathered.split(rows)[ctx.rank]
    own.copy_(x)
    y, whole = call(own, w, bias, return_gathered=gathered, out=out)
    assert y is out and whole is gathered and torch.equal(out, want)
    assert torch.equal(gathered.cpu(), torch.cat(ctx.group.gather(x.cpu())))
    for wrong in (dict(out=out[:52]), dict(out=out.half()), dict(return_gathered=gathered.t())):
        with pytest.raises((ValueError, TypeError), match="out is"):
            call(x, w, bias, **wrong)
    with pytest.raises(ValueError, match="return_gathered='borowed'; use a bool, 'borrowed' or a tensor"):
        call(x, w, bias, return_gathered="borowed")
    memory = torch.zeros(80, N, device=ctx.device)
    own = gathered[(1, 32)[ctx.rank] :][: rows[ctx.rank]]  # a row off
    overlapping = [
        ((x, memory[50:74, :K], bias), dict(out=memory[:53]), "out overlaps w"),
        ((own, w, bias), dict(return_gathered=gathered), "overlap"),
    ]
    for tensors, options, message in overlapping:
        with pytest.raises(ValueError, match=message):
            call(*tensors, **options)


@pytest.mark.ranks(2)
@every_path
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_strided_bias_is_read_by_its_stride(ctx, path, activation):
    x, w, bias = (integers(shape, torch.float32, ctx.rank, device=ctx.device) for shape in ((8, 16), (6, 16), (12,)))
    want = tkernels.all_gather_matmul(x, w, bias[::2].contiguous(), activation, ctx=ctx)
    assert torch.equal(tkernels.all_gather_matmul(x, w, bias[::2], activation, ctx=ctx, path=path), want)
