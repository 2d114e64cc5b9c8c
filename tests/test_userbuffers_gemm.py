"""general_gemm against products computed by hand: every overlap, call after call, and the one contract of them all."""

import contextlib
import gc
import os
import warnings
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from transports import gpu_only, host_work, late, launches, simulated_only, tf32, without_launches

import tkernels
from tkernels.all_gather_matmul import AllGatherMatmul
from tkernels.comm import TkernelsError, collectives, runtime
from tkernels.comm.collectives import all_gather, split_rows
from tkernels.comm.workspace import Workspace
from tkernels.configs import GemmConfig
from tkernels.layers import userbuffers as te
from tkernels.layers.userbuffers import communicators
from tkernels.layers.userbuffers.communicators import workspace_bytes
from tkernels.matmul_reduce_scatter import MatmulReduceScatter
from tkernels.testing.compare import assert_close_to, integers, normal, poison

AG, RS = te.CommOverlapType.AG, te.CommOverlapType.RS
CALLS = 50 if tkernels.RUNTIME == "nvshmem" else 6
S, H, F = 48, 32, 40  # tokens of all ranks; hidden; features of a rank


def small(shape, dtype, seed, ctx):
    """Integers so small that every partial sum is exact in bf16, wherever it is rounded."""
    return integers(shape, dtype, seed, low=-1, high=1, device=ctx.device)


def helper(ctx, heap_bytes=32 << 20):
    return te.CommOverlapHelper(ctx.group.process_group, heap_bytes=heap_bytes)


def make(ctx, which, dtype, shape=(S, H), cublasmp=False, **options):
    common = shape, dtype, helper(ctx), ctx.size
    return {
        "G1": lambda: te.CommOverlapP2P(*common, AG, use_cublasmp=cublasmp, **options),
        "G2": lambda: te.CommOverlapP2P(*common, AG, aggregate=True, use_cublasmp=cublasmp, **options),
        "G3": lambda: te.CommOverlapP2P(*common, RS, use_cublasmp=cublasmp, **options),
        "G4": lambda: te.CommOverlap(*common, cublasmp, RS, **options),
        "bulk": lambda: te.CommOverlap(*common, **options),
    }[which]()


def reference(x, w):
    """x @ w.T of fp32 values that are exact."""
    return x.float() @ w.float().t()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("cublasmp", [False, True], ids=["userbuffers", "cublasmp"])
@pytest.mark.parametrize("which", ["G1", "G2"])
def test_general_gemm_all_gather_inside_a_product(ctx, which, cublasmp):
    comm = make(ctx, which, torch.bfloat16, cublasmp=cublasmp)
    w = small((F, H), torch.bfloat16, 7 + ctx.rank, ctx)
    for call in range(CALLS):
        tokens = (S, S // 2)[call % 2]  # fewer than the buffer's, every other time
        every = [small((tokens // ctx.size, H), torch.bfloat16, 100 * call + r, ctx) for r in range(ctx.size)]
        mine, whole = every[ctx.rank], torch.cat(every)
        late(ctx, call % ctx.size, 0.02)
        gathered = poison(torch.empty_like(whole))
        B = mine
        if call % 3 == 1:
            B, local = te.fill_userbuffers_buffer_for_all_gather(comm, mine, None, ctx.group.process_group)
            assert local is mine and (B is mine) == cublasmp
        out = poison(w.new_empty(tokens, F)) if call % 3 == 2 else None
        y, *_, extra = te.general_gemm(w, B, ub=comm, ub_type=AG, out=out, extra_output=gathered)
        assert torch.equal(y.float(), reference(whole, w)) and torch.equal(gathered, whole), call
        assert extra is gathered and (out is None or y is out)
        if B is not mine:
            assert torch.equal(B, whole)  # the buffer keeps what was gathered


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("cublasmp", [False, True], ids=["userbuffers", "cublasmp"])
@pytest.mark.parametrize("which", ["G3", "G4"])
def test_general_gemm_reduce_scatter_inside_a_product(ctx, which, cublasmp):
    comm = make(ctx, which, torch.bfloat16, cublasmp=cublasmp)
    weights = [small((H, F), torch.bfloat16, 7 + rank, ctx) for rank in range(ctx.size)]
    for call in range(CALLS):
        tokens = (S, S // 2 + 1)[call % 2]  # odd: split as by split_rows
        every = [small((tokens, F), torch.bfloat16, 100 * call + rank, ctx) for rank in range(ctx.size)]
        late(ctx, call % ctx.size, 0.02)
        total = sum(reference(x, w) for x, w in zip(every, weights, strict=True))
        want = total.split(tkernels.split_rows(tokens, ctx.size))[ctx.rank]
        extra = poison(weights[0].new_empty(want.shape)) if call % 3 else None
        writes = extra is not None and extra._version
        y, *_, filled = te.general_gemm(weights[ctx.rank], every[ctx.rank], ub=comm, ub_type=RS, extra_output=extra)
        assert torch.equal(y.float(), want), call
        assert filled is extra and (extra is None or torch.equal(y, extra) and extra._version > writes)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("margin", [False, True], ids=["all programs", "margin"])
def test_general_gemm_collectives_beside_a_product(ctx, margin):
    """G5 and G6; on GPUs with CUDA_DEVICE_MAX_CONNECTIONS as it was when the ranks started."""
    comm = make(ctx, "bulk", torch.bfloat16, set_sm_margin=margin, num_comm_sm=2)
    for call in range(CALLS):
        tokens = (S, S // 2)[call % 2]
        x, w = small((33, F), torch.bfloat16, call, ctx), small((20, F), torch.bfloat16, 50 + ctx.rank, ctx)
        every = [small((tokens, H), torch.bfloat16, 100 * call + rank, ctx) for rank in range(ctx.size)]
        rows = tokens // ctx.size
        late(ctx, call % ctx.size, 0.02)
        mine = every[ctx.rank][:rows]
        comm.copy_into_buffer(mine, local_chunk=True)
        extra = poison(torch.empty_like(every[0]))
        y, *_ = te.general_gemm(w, x, ub=comm, ub_type=AG, bulk_overlap=True, extra_output=extra)
        whole = torch.cat([part[:rows] for part in every])
        assert torch.equal(y.float(), reference(x, w)), call
        assert torch.equal(comm.get_buffer(shape=whole.shape), whole) and torch.equal(extra, whole), call

        comm.get_buffer(shape=(tokens, H)).copy_(every[ctx.rank])
        y, *_ = te.general_gemm(w, x, ub=comm, ub_type=RS, bulk_overlap=True)
        want = sum(part.float() for part in every).split(rows)[ctx.rank]
        assert torch.equal(y.float(), reference(x, w)), call
        assert torch.equal(comm.get_buffer(True, (rows, H)).float(), want), call


@pytest.mark.ranks(2)
def test_general_gemm_rows_of_several_dimensions_stay_so(ctx):
    """[s, b, hidden], as the layers of a model pass it."""
    size, batch = ctx.size, 4
    gather, scatter = make(ctx, "G1", torch.bfloat16), make(ctx, "G3", torch.bfloat16)
    every = [small((S // size, H), torch.bfloat16, rank, ctx) for rank in range(size)]
    weights = [small((F, H), torch.bfloat16, 7 + rank, ctx) for rank in range(size)]
    w, whole = weights[ctx.rank], torch.cat(every)
    B, _ = te.fill_userbuffers_buffer_for_all_gather(gather, every[ctx.rank].view(-1, batch, H), None, None)
    extra = poison(whole.new_empty(S // batch, batch, H))
    y, *_ = te.general_gemm(w, B, ub=gather, ub_type=AG, extra_output=extra)
    assert y.shape == (S // batch, batch, F) and torch.equal(y.flatten(0, 1).float(), reference(whole, w))
    assert torch.equal(extra.flatten(0, 1), whole)

    back = [small((S, F), torch.bfloat16, 20 + rank, ctx) for rank in range(size)]
    y, *_ = te.general_gemm(w.t().contiguous(), back[ctx.rank].view(-1, batch, F), ub=scatter, ub_type=RS)
    want = sum(reference(x, v.t()) for x, v in zip(back, weights, strict=True)).chunk(size)[ctx.rank]
    assert y.shape == (S // batch // size, batch, H) and torch.equal(y.flatten(0, 1).float(), want)
    with pytest.raises(ValueError, match=r"go to the ranks as \(6, 6\), which are no multiples of 4"):
        te.general_gemm(w.t().contiguous(), back[0][:12].view(3, 4, F), ub=scatter, ub_type=RS)
    with pytest.raises(ValueError, match="general_gemm: .*ub"):
        te.general_gemm(w.t().contiguous(), back[0].view(-1, batch, F), ub_type=RS)

    x = whole.view(-1, batch, H)
    out, before = (poison(x.new_empty(S // batch, batch, F)) for _ in range(2))
    y, _, gelu_input, _ = te.general_gemm(w, x, out=out, gelu=True, gelu_in=before)
    assert y is out and gelu_input is before and torch.equal(before.flatten(0, 1).float(), reference(whole, w))
    assert torch.equal(y, torch.nn.functional.gelu(before, approximate="tanh"))
    dw, *_ = te.general_gemm(x, y, layout="NT", grad=True)
    assert dw.shape == (F, H) and torch.equal(dw, te.general_gemm(whole, y.flatten(0, 1), layout="NT")[0])


@pytest.mark.ranks(2)
def test_general_gemm_a_buffer_that_inference_asked_for_first_can_be_written_afterwards(ctx):
    comm = make(ctx, "G1", torch.bfloat16)
    mine = small((S // ctx.size, H), torch.bfloat16, 1, ctx)
    with torch.inference_mode():
        comm.copy_into_buffer(mine, local_chunk=True)
    comm.copy_into_buffer(mine + 1, local_chunk=True)
    assert torch.equal(comm.get_buffer(True, mine.shape), mine + 1)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_general_gemm_all_reduce_inside_a_product(ctx, dtype):
    """G15, through a row layer without sequence parallelism."""
    te.initialize_ub([64, 64], ctx.size, dtype=dtype)
    layer = te.Linear(
        64 * ctx.size, 48, tp_group=ctx.group.process_group, tp_size=ctx.size, parallel_mode="row",
        symmetric_ar_type="two_shot", params_dtype=dtype, device=ctx.device,
    )  # fmt: skip
    every = [(small((64, 64), dtype, r, ctx), small((48, 64), dtype, 50 + r, ctx)) for r in range(ctx.size)]
    with torch.no_grad():
        layer.weight.copy_(every[ctx.rank][1])
        layer.bias.fill_(3.0)
    y = layer(every[ctx.rank][0])
    assert torch.equal(y.float(), sum(reference(x, w) for x, w in every) + 3.0)
    te.destroy_ub()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_general_gemm_every_layout(ctx, dtype):
    """C1 to C9: all-gather of [m, n, k] 256 x 128 x 64 and reduce-scatter of 64 x 128 x 256, m the features."""
    gather = te.CommOverlapP2P([128, 64], dtype, helper(ctx), 2, AG)
    scatter = te.CommOverlapP2P([128, 64], dtype, helper(ctx), 2, RS)
    for seed, layout in enumerate(("TN", "NN", "NT")):
        weight = lambda rows, columns, seed: small((rows, columns), dtype, seed, ctx)  # noqa: E731
        every = [small((64, 64), dtype, 10 * seed + rank, ctx) for rank in range(2)]
        w = weight(128, 64, 5 + ctx.rank)
        A = w if layout == "TN" else w.t().contiguous()
        B = every[ctx.rank] if layout != "NT" else every[ctx.rank].t().contiguous()
        y, bias_grad, *_ = te.general_gemm(A, B, layout=layout, ub=gather, ub_type=AG, grad=True, bias=w[:, 0])
        assert torch.equal(y.float(), reference(torch.cat(every), w)), layout
        whole = torch.cat(every) if layout != "NT" else torch.cat(every).t()  # as B, of all ranks
        assert torch.equal(bias_grad.float(), whole.float().sum(0)), layout

        every = [(small((128, 128), dtype, 30 * seed + r, ctx), weight(64, 128, 70 + r)) for r in range(2)]
        x, w = every[ctx.rank]
        A, B = w if layout == "TN" else w.t().contiguous(), x if layout != "NT" else x.t().contiguous()
        y = te.general_gemm(A, B, layout=layout, ub=scatter, ub_type=RS)[0]
        total = sum(reference(x, w) for x, w in every)
        assert torch.equal(y.float(), total.chunk(2)[ctx.rank]), layout
        y = te.general_gemm(A, B, layout=layout)[0]
        assert torch.equal(y.float(), reference(x, w)), layout


# The contract


def operands(ctx, ub_type, seed):
    """This rank's A and B, everyone's product in fp64 and whose rows are ours, for 24 tokens and 16 features."""
    every = []
    for rank in range(ctx.size):
        x = normal((12, 20) if ub_type is AG else (24, 20), torch.float32, 10 * seed + rank, ctx.device)
        every.append((x, normal((16, 20), torch.float32, 500 + 10 * seed + rank, ctx.device)))
    x, w = every[ctx.rank]
    if ub_type is AG:
        return w, x, torch.cat([x.double() for x, _ in every]) @ w.double().t()
    if ub_type is RS:
        return w, x, sum(x.double() @ w.double().t() for x, w in every).chunk(ctx.size)[ctx.rank]
    return w, x, x.double() @ w.double().t()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["alone", "AG", "RS", "bulk"])
def test_general_gemm_bias_gelu_alpha_and_beta_apply_once_to_the_full_sum(ctx, kind):
    ub_type = {"AG": AG, "RS": RS}.get(kind)
    overlap = {}
    if kind == "bulk":
        overlap = dict(ub=te.CommOverlap([24, 20], torch.float32, helper(ctx), 2), ub_type=AG, bulk_overlap=True)
        overlap["ub"].get_buffer().zero_()
    elif ub_type is not None:
        overlap = dict(ub=te.CommOverlapP2P([24, 20], torch.float32, helper(ctx), 2, ub_type), ub_type=ub_type)
    A, B, product = operands(ctx, ub_type, 1)
    terms = 20 * (2 if ub_type is RS else 1) + 2
    judged = dict(terms=terms, roundings=3)
    bias = torch.full((16,), 1000.0, device=ctx.device)
    shape = product.shape

    y, bias_grad, gelu_input, extra = te.general_gemm(A, B, bias=bias, **overlap)
    assert_close_to(y - 1000.0, product, terms=terms, roundings=2, scale=300.0)
    assert bias_grad is gelu_input is extra is None
    with pytest.raises(AssertionError, match="elements are off"):  # a bias a rank
        assert_close_to(y - 2000.0, product, terms=terms, roundings=2, scale=300.0)

    small_bias = normal((16,), torch.float32, 3, ctx.device)
    kept = poison(A.new_empty(shape))
    y, _, gelu_input, _ = te.general_gemm(A, B, bias=small_bias, gelu=True, gelu_in=kept, **overlap)
    before = product + small_bias.double()
    assert gelu_input is kept
    assert_close_to(kept, before, **judged)
    assert_close_to(y, torch.nn.functional.gelu(before, approximate="tanh"), **judged)

    out = normal(shape, torch.float32, 4, ctx.device)
    want = 0.5 * product + 2.0 * out.double() + small_bias.double()
    y, *_ = te.general_gemm(A, B, alpha=0.5, beta=2.0, accumulate=True, out=out, bias=small_bias, **overlap)
    assert y is out
    assert_close_to(y, want, **judged)
    want = y.double() + product
    assert_close_to(te.general_gemm(A, B, accumulate=True, out=out, **overlap)[0], want, **judged)

    pre = normal(shape, torch.float32, 5, ctx.device)
    y, bias_grad, _, _ = te.general_gemm(A, B, grad=True, gelu=True, gelu_in=pre, bias=small_bias, **overlap)
    leaf = pre.double().requires_grad_()
    torch.nn.functional.gelu(leaf, approximate="tanh").backward(product)
    assert_close_to(y, leaf.grad, **judged)
    assert_close_to(bias_grad, leaf.grad.sum(0), terms=terms * 24)
    _, bias_grad, _, _ = te.general_gemm(A, B, grad=True, bias=small_bias, **overlap)
    rows = B if ub_type is not AG else torch.cat([part.to(B.device) for part in ctx.group.gather(B.cpu())])
    assert_close_to(bias_grad, rows.double().sum(0), terms=24)


@pytest.mark.ranks(2)
def test_general_gemm_fp32_results_of_bf16_operands_are_rounded_once(ctx):
    comm = te.CommOverlapP2P([24, 20], torch.bfloat16, helper(ctx), 2, AG)
    every = [normal((12, 20), torch.bfloat16, rank, ctx.device) for rank in range(2)]
    w = normal((16, 20), torch.bfloat16, 9, ctx.device)
    truth = torch.cat(every).double() @ w.double().t()
    y = te.general_gemm(w, every[ctx.rank], torch.float32, ub=comm, ub_type=AG)[0]
    assert y.dtype is torch.float32
    assert_close_to(y, truth, terms=20)
    x = torch.cat(every)
    main_grad = torch.zeros(16, 20, device=ctx.device)
    dy = normal((24, 16), torch.bfloat16, 4, ctx.device)
    te.general_gemm(x, dy, layout="NT", out=main_grad, accumulate=True, grad=True)
    te.general_gemm(x, dy, layout="NT", out=main_grad, accumulate=True, grad=True)
    assert_close_to(main_grad, 2 * dy.double().t() @ x.double(), terms=48, scale=2.0)


@pytest.mark.ranks(2)
def test_general_gemm_uneven_rows_are_named_by_the_caller(ctx):
    rows = (11, 6)
    comm = te.CommOverlapP2P([17, 20], torch.float32, helper(ctx), 2, AG)
    every = [small((count, 20), torch.float32, rank, ctx) for rank, count in enumerate(rows)]
    w = small((5, 20), torch.float32, 9 + ctx.rank, ctx)
    y = te.general_gemm(w, every[ctx.rank], ub=comm, ub_type=AG, rows=rows)[0]
    assert torch.equal(y, reference(torch.cat(every), w))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("options", [dict(num_splits=5), dict(num_splits=64), dict(num_comm_sm=1)], ids=str)
def test_general_gemm_splits_that_divide_nothing_lose_nothing(ctx, options):
    """An odd number of ranks, features that no split divides, more splits than rows."""
    comm = te.CommOverlap([64, 31], torch.float32, helper(ctx), 3, **options)
    every = [(small((64, 8), torch.float32, r, ctx), small((31, 8), torch.float32, 9 + r, ctx)) for r in range(3)]
    x, w = every[ctx.rank]
    want = sum(reference(x, w) for x, w in every).split(tkernels.split_rows(64, 3))[ctx.rank]
    assert torch.equal(te.general_gemm(w, x, ub=comm, ub_type=RS)[0], want)
    aggregate = te.CommOverlapP2P([63, 8], torch.float32, helper(ctx), 3, AG, aggregate=True, use_ce=False)
    mine = x[:21].contiguous()
    whole = torch.cat([x[:21] for x, _ in every])
    assert torch.equal(te.general_gemm(w, mine, ub=aggregate, ub_type=AG)[0], reference(whole, w))


@pytest.mark.ranks(2)
def test_general_gemm_options_reach_the_kernel(ctx):
    """num_sm, num_splits, aggregate, use_ce and set_sm_margin change what is launched, and no result (see above)."""
    one = torch.ones(1, device=ctx.device)

    def config(comm, tokens=512):
        operation = "all_gather_matmul" if comm.comm_type is AG else "matmul_reduce_scatter"
        return comm._config(operation, tokens, one.new_empty(tokens, 8), one.new_empty(16, 8), 8, "ieee", one.dtype)

    common = [512, 16], torch.float32, helper(ctx), 2
    base = config(te.CommOverlapP2P(*common, AG))
    assert config(te.CommOverlapP2P(*common, AG, aggregate=True)).chunk_rows == 2 * base.chunk_rows
    assert config(te.CommOverlapP2P(*common, AG, use_ce=False, num_comm_sm=1)).num_comm == 1
    for num_sm in (1, 2):
        assert config(te.CommOverlap(*common, num_comm_sm=num_sm)).num_comm == num_sm
    large = replace(base, chunk_rows=512, gemm=GemmConfig(block_m=128))
    with mock.patch.object(communicators, "overlap_config", lambda *_, **__: large):
        pieces = {splits: config(te.CommOverlap(*common, num_splits=splits)).chunk_rows for splits in (1, 2, 3, 4, 99)}
        assert pieces == {1: 256, 2: 128, 3: 64, 4: 64, 99: 16}  # of a rank's 256 rows, at most eight a tile
        assert config(te.CommOverlap([1536, 16], *common[1:], num_splits=2), 1536).chunk_rows == 256
    with mock.patch.object(runtime, "RUNTIME", "nvshmem"):  # whose rule it is
        with mock.patch.object(communicators.CommOverlapCore, "_reserve"):
            many = [te.CommOverlap([2048, 16], *common[1:], num_splits=splits) for splits in (1, 4, 16)]
            assert [config(comm, 2048).chunk_rows for comm in many] == [128, 128, 64]


@pytest.mark.ranks(2)
def test_general_gemm_takes_no_other_communicators_prepared_call(ctx):
    """Two communicators of one domain, whose calls are alike but for an option: what is launched follows the option."""
    shared, large = helper(ctx), GemmConfig(128, 64, 32)
    common = [512, 16], torch.float32, shared, 2
    x, w = torch.ones(512, 8, device=ctx.device), torch.ones(16, 8, device=ctx.device)
    chosen = communicators.overlap_config

    def in_large_pieces(*args, **options):
        return replace(chosen(*args, **options), chunk_rows=256, gemm=large)

    def launched(comm, ub_type):
        operand = x if ub_type is RS else torch.ones(256, 16, device=ctx.device)
        with launches() as found:
            te.general_gemm(w if ub_type is RS else w.t(), operand, ub=comm, ub_type=ub_type)
        return [(arguments["num_comm"], arguments["chunk_rows"]) for *_, arguments in found]

    with mock.patch.object(communicators, "overlap_config", in_large_pieces):
        pieces = [te.CommOverlap(*common, num_splits=splits, num_comm_sm=2) for splits in (2, 16)]
        programs = [te.CommOverlap(*common, num_comm_sm=number) for number in (1, 2)]
        copies = [te.CommOverlapP2P(*common, AG, use_ce=use_ce) for use_ce in (True, False)]
        for _ in range(2):
            assert [launched(comm, RS) for comm in pieces] == [[(2, 128)], [(2, 16)]]
            assert [launched(comm, RS)[0][0] for comm in programs] == [1, 2]
            by_rule, by_programs = (launched(comm, AG)[0][0] for comm in copies)
            assert by_programs == 1 and by_rule > 1


@pytest.mark.ranks(2)
def test_general_gemm_large_shares_of_a_ring_exchange_travel_by_the_copy_engine(ctx):
    """use_ce does what it says, of sizes where copies are faster, and their room is there from construction on."""
    tokens, hidden = 4096, 4096
    one = torch.ones(1, device=ctx.device)

    def config(comm, tokens):
        operation = "all_gather_matmul" if comm.comm_type is AG else "matmul_reduce_scatter"
        x, w = one.new_empty(tokens, hidden), one.new_empty(hidden, hidden)
        return comm._config(operation, tokens, x, w, hidden, "ieee", one.dtype)

    common = [tokens, hidden], torch.float32, helper(ctx), 2
    with mock.patch.object(runtime, "RUNTIME", "nvshmem"):  # whose rule it is
        with mock.patch.object(communicators.CommOverlapCore, "_reserve"):
            for kind in (AG, RS):
                assert config(te.CommOverlapP2P(*common, kind), tokens).num_comm == 0
                assert config(te.CommOverlapP2P(*common, kind), tokens // 8).num_comm > 0
                assert config(te.CommOverlapP2P(*common, kind, use_ce=False), tokens).num_comm == 1
            assert config(te.CommOverlap(*common), tokens).num_comm > 0
    assert workspace_bytes([tokens, hidden], torch.float32, 2)["landing_bytes"] >= tokens * hidden * 4
    assert workspace_bytes([tokens // 32, hidden], torch.float32, 2)["landing_bytes"] == 0


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("comm_type", [AG, RS], ids=["AG", "RS"])
def test_general_gemm_a_ring_exchange_by_copies_is_right(ctx, comm_type):
    """Twice, with other tokens in between; three ranks' rows don't divide."""
    comm = te.CommOverlapP2P([S + 1, H], torch.float32, helper(ctx), ctx.size, comm_type)
    chosen = communicators.overlap_config
    by_copies = lambda *args, **options: replace(chosen(*args, **options), num_comm=0)  # noqa: E731
    for call, tokens in enumerate((S + 1, 2 * ctx.size, S + 1)):
        rows = tkernels.split_rows(tokens, ctx.size)
        with mock.patch.object(communicators, "overlap_config", by_copies):
            if comm_type is AG:
                every = [small((rows[r], H), torch.float32, 10 * call + r, ctx) for r in range(ctx.size)]
                w = small((F, H), torch.float32, 70 + ctx.rank, ctx)
                y = te.general_gemm(w, every[ctx.rank], ub=comm, ub_type=AG, rows=rows)[0]
                want = torch.cat(every) @ w.t()
            else:
                xs = [small((tokens, F), torch.float32, 10 * call + r, ctx) for r in range(ctx.size)]
                ws = [small((H, F), torch.float32, 70 + r, ctx) for r in range(ctx.size)]
                y = te.general_gemm(ws[ctx.rank], xs[ctx.rank], ub=comm, ub_type=RS, rows=rows)[0]
                want = sum(x @ w.t() for x, w in zip(xs, ws, strict=True)).split(rows)[ctx.rank]
        assert torch.equal(y, want), (call, tokens)


@pytest.mark.ranks(2)
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["bulk", "ring exchange", "ring exchange by programs"])
def test_general_gemm_collectives_of_parts_that_copies_may_carry_find_their_room_on_either_stream(ctx, kind):
    shape = [8192, 1024]
    rows = split_rows(shape[0], 2)
    assert collectives.DEFAULT.copies(4 * rows[0] * shape[1], ctx)
    common = shape, torch.float32, helper(ctx, communicators.heap_bytes(shape, torch.float32, 2)), 2
    if kind == "bulk":
        comm = te.CommOverlap(*common)
    else:
        comm = te.CommOverlapP2P(*common, AG, use_ce=not kind.endswith("programs"))
    _, own, whole = comm.parts()
    own.copy_(integers(own.shape, torch.float32, ctx.rank, device=ctx.device))
    with mock.patch.object(Workspace, "_grow", side_effect=AssertionError("it was too small")):
        comm.all_gather(own, rows, whole)
        with comm.beside(comm.all_gather, own, rows, whole):
            pass
    want = torch.cat([integers(own.shape, torch.float32, rank, device=ctx.device) for rank in range(2)])
    assert torch.equal(whole, want)


@pytest.mark.ranks(2)
def test_general_gemm_room_is_made_at_construction_whatever_the_layout(ctx):
    comm = te.CommOverlapP2P([96, 40], torch.float32, helper(ctx), 2, RS)
    gather = te.CommOverlapP2P([96, 40], torch.float32, helper(ctx), 2, AG)
    for made in (comm, gather):
        workspace = made.context.workspace()
        room = lambda: [  # noqa: E731
            workspace.inbox_bytes, workspace.num_chunks, workspace.num_packets, workspace.num_lamport,  # noqa: B023
            workspace.scratch.numel(), workspace.counters.numel(), workspace.landing_bytes,  # noqa: B023
        ]  # fmt: skip
        before = room()
        x, w = torch.ones(96, 24, device=ctx.device), torch.ones(40, 24, device=ctx.device)
        if made is comm:
            te.general_gemm(w, x, ub=comm, ub_type=RS)
            te.general_gemm(w.t().contiguous(), x, layout="NN", ub=comm, ub_type=RS)
        else:
            te.general_gemm(w.t().contiguous(), torch.ones(48, 40, device=ctx.device), ub=gather, ub_type=AG)
        made.all_gather(torch.ones(48, 40, device=ctx.device), (48, 48))
        made.reduce_scatter(torch.ones(96, 40, device=ctx.device), (48, 48))
        assert room() == before


@pytest.mark.ranks(2)
def test_general_gemm_wrong_calls_are_refused_before_anything_is_launched(ctx):
    ring = te.CommOverlapP2P([8, 8], torch.float32, helper(ctx), 2, AG)
    collective = te.CommOverlap([8, 8], torch.float32, helper(ctx), 2)
    x, w = torch.ones(4, 8, device=ctx.device), torch.ones(8, 8, device=ctx.device)
    call = te.general_gemm
    refused = [
        (lambda: call(w, x, ub=ring), "ub_type=None must both be given"),
        (lambda: call(w, x, extra_output=x), "must both be given, or neither of them, nor bulk_overlap"),
        (lambda: call(w, x, ub=ring, ub_type=1), "ub_type=1 must be CommOverlapType.AG or CommOverlapType.RS"),
        (lambda: call(w, x, ub=ring, ub_type=RS), "type AG overlaps only that, inside a GEMM, not ub_type=RS"),
        (lambda: call(w, x, ub=ring, ub_type=AG, bulk_overlap=True), "make a CommOverlap for bulk overlap"),
        (lambda: call(w, x, ub=collective, ub_type=AG), "gathers beside a GEMM only; pass bulk_overlap=True"),
        (lambda: call(w, x, layout="TT"), "layout='TT' must be TN, NN or NT"),
        (lambda: call(w, x, quantization_params=object()), "quantization_params=object is not supported"),
        (lambda: call(w, x, beta=0.5), "beta=0.5 scales what is accumulated to"),
        (lambda: call(w, x, accumulate=True), "there is none; pass out="),
        (lambda: call(w, x, out=w.t()[:4]), "it must be contiguous"),
        (lambda: call(w, x, gelu=True, grad=True), "needs gelu_in"),
        (lambda: call(w, x, gelu_in=x), "gelu_in is given, but gelu=False"),
        (lambda: call(w, x, rows=(4, 4)), "concerns communication inside a GEMM"),
        (lambda: call(w, x, ub=collective, ub_type=AG, bulk_overlap=True, rows=(4, 4)), "leave rows out"),
        (lambda: call(w, x, ub=ring, ub_type=AG, extra_output=x), r"extra_output has shape \[4, 8\] .*\[8, 8\]"),
        (lambda: call(w, w, ub=collective, ub_type=RS, extra_output=w.clone()), r"what fills it, \[4, 8\]"),
        (lambda: call(w, x, ub=collective, ub_type=AG, bulk_overlap=True, extra_output=x.clone()),
         r"what fills it, \[8, 8\]"),
        (
            lambda: call(w, w, ub=ring, ub_type=AG),
            r"16 tokens of 8 in torch.float32 don't fit; initialize_ub\(\) takes",
        ),
        (lambda: call(w.half(), x.half(), ub=ring, ub_type=AG), "8 tokens of 8 in torch.float16 don't fit"),
        (lambda: call(w.long(), x.long(), ub=ring, ub_type=AG), "takes tensors of torch.float32, .* not torch.int64"),
    ]
    for wrong, message in refused:
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()
    assert call(w, x, ub=ring, ub_type=AG)[0].eq(8.0).all()
    wide = torch.ones(4, 16, device=ctx.device), torch.ones(8, 16, device=ctx.device)
    with pytest.raises(ValueError, match="8 tokens of 16 in torch.float32 don't fit"):  # as many rows as just before
        call(wide[1], wide[0], ub=ring, ub_type=AG)


def test_general_gemm_refuses_transforms_which_would_take_its_gradients_for_zeros():
    a, b = torch.ones(6, 16), torch.ones(4, 16)
    for transform in (torch.vmap, lambda f: torch.func.grad(lambda b: f(b).sum())):
        with pytest.raises(NotImplementedError, match="general_gemm computes no gradients, so torch.func"):
            transform(lambda b: te.general_gemm(a, b)[0])(torch.stack([b, b]) if transform is torch.vmap else b)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        te.general_gemm(a, B=torch.autograd.forward_ad.make_dual(b, b))


@pytest.mark.ranks(2)
def test_general_gemm_refuses_what_it_cannot_use(ctx):
    """Alone and with communication: wrong types and dtypes, before anything is launched; then a right call."""
    common = [8, 8], torch.float32, helper(ctx), 2
    gather, scatter = te.CommOverlapP2P(*common, AG), te.CommOverlap(*common)
    w, x = torch.ones(8, 8, device=ctx.device), torch.ones(4, 8, device=ctx.device)
    integers_ = torch.zeros(4, 8, dtype=torch.int64, device=ctx.device)
    calls = {"alone": dict(A=w, B=x), "AG": dict(A=w, B=x, ub=gather, ub_type=AG),
             "RS": dict(A=w, B=w, ub=scatter, ub_type=RS)}  # fmt: skip
    tensors = [
        dict([(name, value)])
        for name in ("A", "B", "out", "bias", "gelu_in", "extra_output")
        for value in (3, "x", [1.0], np.ones((4, 8)), w.to("meta"))
        if name != "gelu_in" or value is not None
    ]
    refused = [
        *tensors, dict(A=None), dict(B=None), dict(A=w.double()), dict(B=w[0]), dict(A=w.bfloat16()),
        dict(bias=w[0, :5]), dict(out=integers_), dict(alpha="x"), dict(alpha=None), dict(alpha=w), dict(beta=[1]),
        dict(rows=()), dict(rows=3), dict(ub=3), *(dict([(name, value)]) for name in ("gelu", "grad", "accumulate")
                                                   for value in ("x", [], 2)),
        dict(bulk_overlap="x"), dict(layout=[]),
    ]  # fmt: skip
    for call in calls.values():
        for wrong in refused:
            named = f"general_gemm|{next(iter(wrong))}"  # a kernel's own check has the kernel's name
            with without_launches(scatter.context), pytest.raises((TypeError, ValueError), match=named):
                te.general_gemm(**call | wrong)
    by_name = [
        *((dict([(name, w.to_sparse())]), f"{name} must be a strided tensor, not torch.sparse")
          for name in ("A", "B", "out", "bias", "gelu_in", "extra_output")),
        (dict(B=torch.nested.nested_tensor([*w], layout=torch.jagged)), "B must be one tensor, not a nested one"),
        *((dict(out_dtype=dtype), f"out_dtype={dtype} must be torch.float32")
          for dtype in (torch.uint8, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.bfloat16)),
        (dict(out=w.bfloat16()), "the dtype of out=torch.bfloat16 must be torch.float32"),
        (dict(out=w.to(torch.float8_e4m3fn), out_dtype=torch.float32), "out is torch.float8.* can't hold the result"),
        (dict(A=w[:, :7]), r"A is \[8, 7\] and B .*; with layout=TN 7 of A meet 8 of B, and these must match"),
        *((dict(bias=bias), rf"bias is {bias.dtype} \[.*\], but must be \[8\], as the result has so many features")
          for bias in (w[:, :1], w[:4, :2], w[:1], w[0].long(), w[0].to(torch.complex64), w[0, :5])),
        *((dict(gelu=True, grad=grad, gelu_in=before), "gelu_in has shape .*, but the result")
          for before in (w[0], w[:1], w[0, 0], w[:, :7]) for grad in (False, True)),
        (dict(gelu=True, gelu_in=integers_), "gelu_in is torch.int64, which can't hold the result"),
        (dict(gelu=True, gelu_in=w[:1].expand(8, 8)), "gelu_in, which is filled, has elements that share memory"),
        (dict(gelu=True, gelu_in=w), "gelu_in (has shape|overlaps A)"),
    ]  # fmt: skip
    for call in calls.values():
        for wrong, message in by_name:
            with without_launches(scatter.context), pytest.raises((TypeError, ValueError), match=message):
                te.general_gemm(**call | wrong)
    for name in ("AG", "RS"):
        for rows in ("ab", (None, 8)):
            with without_launches(scatter.context), pytest.raises(ValueError, match="must name whole numbers of rows"):
                te.general_gemm(**calls[name], rows=rows)
        for operand in ("A", "B", "extra_output"):
            with FakeTensorMode() as mode, without_launches(scatter.context):
                fake = mode.from_tensor(w)
                with pytest.raises(TypeError, match=f"{operand} is a FakeTensor, which .* is no memory for `ub`"):
                    te.general_gemm(**calls[name] | {operand: fake})
    with pytest.raises(TypeError, match="extra_output is torch.int64, which can't hold the result"):
        te.general_gemm(w, w, ub=scatter, ub_type=RS, extra_output=integers_)
    assert te.general_gemm(**calls["AG"])[0].eq(8.0).all() and te.general_gemm(**calls["RS"])[0].eq(16.0).all()


@pytest.mark.ranks(2)
def test_general_gemm_refuses_to_fill_what_it_reads(ctx):
    """Nothing has changed then. What this rank has may lie in extra_output already, where the gather puts it."""
    common = [8, 8], torch.float32, helper(ctx), 2
    gather, scatter, bulk = te.CommOverlapP2P(*common, AG), te.CommOverlapP2P(*common, RS), te.CommOverlap(*common)
    ag, rs, beside = ({"ub": ub, "ub_type": kind} for ub, kind in ((gather, AG), (scatter, RS), (bulk, AG)))
    w, memory = normal((8, 8), torch.float32, 1, ctx.device), normal((16, 8), torch.float32, 2, ctx.device)
    whole, half, own = memory[:8], memory[4:8], memory[4 * ctx.rank : 4 * ctx.rank + 4]
    new, row = torch.zeros(8, 8, device=ctx.device), memory[0]
    refused = [
        (dict(A=w, B=whole, out=whole), "out overlaps B"),
        (dict(A=whole, B=w, out=memory[4:12]), "out overlaps A, which begins -128 bytes after it"),
        (dict(A=w, B=w, bias=row, out=whole), "out overlaps bias"),
        (dict(A=w, B=w, out=whole, gelu=True, gelu_in=whole), "out overlaps gelu_in"),
        (dict(A=w, B=whole, gelu=True, gelu_in=whole), "gelu_in overlaps B"),
        (dict(A=w, B=half, out=whole, **ag), "out overlaps B"),
        (dict(A=w, B=w[:4], out=whole, extra_output=whole, **ag), "out overlaps extra_output"),
        (dict(A=whole, B=w[:4], extra_output=whole, **ag), "extra_output overlaps A"),
        (dict(A=w, B=w[:4], extra_output=whole, gelu=True, gelu_in=whole, **ag), "gelu_in overlaps extra_output"),
        (dict(A=w, B=memory[2:6], extra_output=whole, **ag), "return_gathered overlaps x_shard_m"),
        (dict(A=w, B=whole, out=half, **rs), "out overlaps B"),
        (dict(A=w, B=whole, extra_output=half, **rs), "extra_output overlaps B"),
        (dict(A=w, B=w, out=bulk.get_buffer(), bulk_overlap=True, **beside), "out overlaps the buffer of ub"),
        (dict(A=w[None], B=whole[None], out=whole[None]), "out overlaps B"),
    ]
    before = memory.clone()
    for wrong, message in refused:
        with without_launches(gather.context), pytest.raises(ValueError, match=message):
            te.general_gemm(**wrong)
        assert torch.equal(memory, before), message
    kept = own.clone()
    y, *_ = te.general_gemm(w, own, out=new, extra_output=whole, **ag)
    assert torch.equal(own, kept)
    assert_close_to(y, whole.double() @ w.double().t(), terms=8)
    te.general_gemm(w, whole[:4], out=memory[8:12], accumulate=True)  # beside B in one memory


def test_general_gemm_gives_the_dtype_that_was_asked_for_whatever_is_added():
    x, w = torch.ones(8, 16, device=runtime.device()), torch.ones(4, 16, device=runtime.device())
    bias, before = torch.ones(4, dtype=torch.float64, device=x.device), torch.ones(8, 4, device=x.device)
    y = te.general_gemm(w, x, torch.float32, alpha=2.0, bias=bias)[0]
    assert y.dtype is torch.float32 and y.eq(33).all()
    half = te.general_gemm(w.bfloat16(), x.bfloat16(), gelu=True, grad=True, gelu_in=before)[0]
    assert half.dtype is torch.bfloat16


def test_general_gemm_alone_can_be_traced_with_a_place_for_its_result():
    with FakeTensorMode():
        x, w, out = torch.ones(8, 16), torch.ones(4, 16), torch.empty(8, 4)
        assert te.general_gemm(w, x, out=out)[0] is out
    compiled = torch.compile(lambda *tensors: te.general_gemm(*tensors[:2], out=tensors[2])[0], backend="eager")
    assert compiled(torch.ones(4, 16), torch.ones(8, 16), torch.empty(8, 4)).eq(16).all()


@pytest.mark.ranks(2)
def test_general_gemm_has_no_bulk_overlap_with_cublasmp_semantics(ctx):
    common = [8, 8], torch.float32, helper(ctx), 2
    comm, ring = te.CommOverlap(*common, True, RS), te.CommOverlapP2P(*common, AG, use_cublasmp=True)
    w = torch.ones(8, 8, device=ctx.device)
    stream = torch.get_device_module(ctx.device).current_stream()
    userbuffers = te.CommOverlapP2P(*common, AG)
    bulk = lambda comm, kind: te.general_gemm(w, w, ub=comm, ub_type=kind, bulk_overlap=True)  # noqa: E731
    refused = [
        (lambda: bulk(comm, RS), "cublasmp semantics, which have no bulk overlap"),
        (lambda: bulk(comm, AG), "cublasmp semantics, which have no bulk overlap"),
        (lambda: bulk(ring, AG), "cublasmp semantics, which have no bulk overlap"),
        (lambda: te.bulk_overlap_ag_with_external_gemm(comm, stream, stream), "has cublasmp semantics; make a Comm"),
        (lambda: te.bulk_overlap_ag_with_external_gemm(ring, stream, stream), "has cublasmp semantics"),
        (lambda: te.bulk_overlap_ag_with_external_gemm(userbuffers, stream, stream), "overlaps inside a GEMM only"),
        (lambda: te.CommOverlap(*common, True, AG), "method='bulk' overlaps beside a GEMM, which cublasmp semantics"),
        (lambda: te.CommOverlap(*common, True, RS, method="bulk"), "method='bulk' overlaps beside a GEMM"),
    ]  # fmt: skip
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            wrong()
    assert te.general_gemm(w, w, ub=comm, ub_type=RS)[0].eq(16.0).all()  # what it has


@pytest.mark.ranks(2)
def test_fill_userbuffers_buffer_for_all_gather_looks_at_the_group(ctx):
    alone = [dist.new_group([rank]) for rank in range(2)][ctx.rank]
    for cublasmp in (False, True):
        comm = make(ctx, "G1", torch.float32, cublasmp=cublasmp)
        x = torch.ones(S // 2, H, device=ctx.device)
        with pytest.raises(
            ValueError, match=rf"process_group has the ranks \[{ctx.rank}\], but .* gathers from \[0, 1\]"
        ):
            te.fill_userbuffers_buffer_for_all_gather(comm, x, None, alone)
        for group in (None, ctx.group.process_group, dist.new_group([0, 1])):
            assert te.fill_userbuffers_buffer_for_all_gather(comm, x, None, group)[1] is x


@pytest.mark.ranks(2)
def test_comm_overlap_looks_at_each_of_its_arguments(ctx):
    """Wrong types are refused, whatever an option does; what changes nothing is told, once and by name."""
    shared = helper(ctx)
    common = [8, 8], torch.float32, shared, 2
    refused = [
        *(dict([(name, value)]) for name in ("num_splits", "num_comm_sm", "comm_cga_size", "num_max_streams")
          for value in (0, -1, 1.5, "x", None, True)),
        *(dict([(name, value)]) for name in ("set_sm_margin", "rs_overlap_first_gemm", "atomic_gemm")
          for value in (2, "x", None, [])),
        dict(comm_priority="high"), dict(gemm_priority=None), dict(method="smoke"), dict(method="ring_exchange"),
        dict(method="external"),  # of type AG only
    ]  # fmt: skip
    for wrong in refused:
        with pytest.raises((TypeError, ValueError), match=f"CommOverlap: .*{next(iter(wrong))}"):
            te.CommOverlap(*common, **wrong)
    for wrong in (dict(use_ce=2), dict(aggregate=None), dict(num_comm_sm=0), dict(num_max_streams="x")):
        with pytest.raises(TypeError, match=f"CommOverlapP2P: {next(iter(wrong))}: "):
            te.CommOverlapP2P(*common, AG, **wrong)
    for shape in (8, None, [8], [8, 2.5], [8, -1], ["8", 8]):
        with pytest.raises(ValueError, match="must be .tokens, hidden., two positive integers"):
            te.CommOverlap(shape, *common[1:])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        te.CommOverlap(*common, num_max_streams=1, comm_cga_size=1, num_comm_sm=2, num_splits=3)
        te.CommOverlapP2P(*common, AG, num_comm_sm=2, set_sm_margin=1)
        te.CommOverlapP2P(*common, AG, num_comm_sm=2, use_ce=0, aggregate=1)
    texts = [str(each.message) for each in told]
    assert texts == ([] if ctx.rank else [
        "CommOverlap: these options change nothing here: num_max_streams=1: a single kernel does all the work; "
        "comm_cga_size=1: the programs form no clusters",
        "CommOverlapP2P: these options change nothing here: set_sm_margin=True: a fused kernel always has dedicated "
        "comm programs; num_comm_sm=2: with use_ce the library chooses what carries the data",
    ])  # fmt: skip
    part = [dist.new_group([rank]) for rank in range(2)]
    with pytest.raises(ValueError, match=r"intra_node_group has the ranks \[0, 1\], but world_group only"):
        te.CommOverlapHelper(part[ctx.rank], ctx.group.process_group)


@pytest.mark.ranks(2)
def test_general_gemm_an_adapter_adds_no_copy_no_allocation_and_no_second_look(ctx):
    """general_gemm and the communicators against the plain operators, and a second call like the first."""
    te.initialize_ub([64, 32], 2, dtype=torch.float32)
    gather, scatter, bulk = (te.get_ub(name) for name in ("qkv_fprop", "proj_fprop", "qkv_dgrad"))
    context = gather.context
    make = lambda *shape: torch.ones(shape, device=ctx.device)  # noqa: E731
    x, w, bias, whole, y = make(32, 32), make(24, 32), make(24), make(64, 32), make(64, 24)
    h, v, out = make(64, 24), make(32, 24), make(32, 32)
    gathers = [AllGatherMatmul(None, (32, 32), path="fused", return_gathered=returned) for returned in (False, True)]
    scatters = MatmulReduceScatter(None, (32, 32), path="fused")

    def plain_gather(bias=None, out=None, gathered=None):
        return context.call(gathers[gathered is not None], x, w, bias, out, gathered)

    def plain_scatter(out=None):
        return context.call(scatters, h, v, None, out)

    ag, rs = dict(ub=gather, ub_type=AG), dict(ub=scatter, ub_type=RS)
    pairs = [
        (lambda: te.general_gemm(w, x, **ag), plain_gather),
        (lambda: te.general_gemm(w, x, **ag, bias=bias, out=y), lambda: plain_gather(bias=bias, out=y)),
        (lambda: te.general_gemm(w.t(), x, layout="NN", **ag), plain_gather),
        (lambda: te.general_gemm(w, x, **ag, extra_output=whole), lambda: plain_gather(gathered=whole)),
        (lambda: te.general_gemm(v, h, **rs), plain_scatter),
        (lambda: te.general_gemm(v, h, **rs, out=out), lambda: plain_scatter(out=out)),
        (lambda: te.general_gemm(v, h, **rs, extra_output=out), lambda: plain_scatter(out=out)),
    ]
    for index, (adapter, plain) in enumerate(pairs):
        assert host_work(context, adapter) == host_work(context, plain), index
    bulk.copy_into_buffer(x, local_chunk=True)
    beside = lambda: te.general_gemm(w, whole, ub=bulk, ub_type=AG, bulk_overlap=True, out=y)  # noqa: E731
    alone = lambda: (all_gather(context, x, (32, 32), whole), bulk.multiply(whole, w, None, y))  # noqa: E731
    assert host_work(context, beside) == host_work(context, alone)

    def looked(*_, **__):
        raise AssertionError("the configuration was made anew")

    original, communicators.overlap_config = communicators.overlap_config, looked
    try:
        with without_launches(context):
            for adapter, _ in pairs:
                adapter()
    finally:
        communicators.overlap_config = original
    te.destroy_ub()


@pytest.mark.ranks(2)
def test_general_gemm_sees_what_changes_between_calls(ctx):
    comm = te.CommOverlapP2P([S, H], torch.float32, helper(ctx), 2, AG)
    x, w = small((S // 2, H), torch.float32, ctx.rank, ctx), small((F, H), torch.float32, 7, ctx)
    whole = reference(torch.cat([small((S // 2, H), torch.float32, rank, ctx) for rank in range(2)]), w)
    call = dict(ub=comm, ub_type=AG)
    for alpha in (1.0, 2.0, 3.0):  # scalars are of a call
        assert torch.equal(te.general_gemm(w, x, alpha=alpha, **call)[0], alpha * whole)
    with mock.patch.object(communicators, "AllGatherMatmul", side_effect=AllGatherMatmul) as prepared:
        te.general_gemm(w, x, alpha=4.0, **call)
        assert not prepared.called
        with tf32(True):  # kernels follow torch's own switch
            te.general_gemm(w, x, **call)
        assert prepared.call_count == 1
    out = torch.zeros_like(whole)
    for beta in (2.0, 4.0):
        before = out.clone()
        te.general_gemm(w, x, out=out, accumulate=True, beta=beta, **call)
        assert torch.equal(out, beta * before + whole)
    w.requires_grad_()
    with torch.enable_grad():  # as a parameter in a plain forward pass: no gradient, and no error
        assert not te.general_gemm(w, x, **call)[0].requires_grad
        assert not te.general_gemm(w, x, **call, extra_output=torch.empty(S, H, device=ctx.device))[3].requires_grad
    for wrong, message in [
        (dict(ub_type=1), "ub_type=1 must be CommOverlapType.AG"),  # though 1 == AG
        (dict(beta=0.5), "scales what is accumulated to"),
        (dict(quantization_params=object()), "quantization_params=object is not supported"),
        (dict(bulk_overlap=True), "make a CommOverlap for bulk overlap"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            te.general_gemm(w, x, **call | wrong)
    # The same tensor, while it is the whole buffer and once that is used for fewer tokens.
    filled, _ = te.fill_userbuffers_buffer_for_all_gather(comm, x, None, ctx.group.process_group)
    for _ in range(2):
        assert torch.equal(te.general_gemm(w, filled, **call)[0], whole)
    comm.get_buffer(shape=(S // 2, H))
    with pytest.raises(ValueError, match=f"{2 * S} tokens of {H} .* don't fit"):
        te.general_gemm(w, filled, **call)
    comm._helper.close()
    with pytest.raises(TkernelsError, match="has been given back"):
        te.general_gemm(w, x, **call)


def test_general_gemm_a_result_is_written_where_it_fits_and_nowhere_else():
    device = runtime.device()
    x, w, buffer = torch.ones(8, 16, device=device), torch.ones(4, 16, device=device), torch.zeros(64, device=device)
    for shape in ((5, 4), (8, 3), (1, 4)):
        out = buffer[: shape[0] * shape[1]].view(shape)  # behind it lies what is another's
        for options in ({}, {"accumulate": True}, {"gelu": True}):
            with pytest.raises(ValueError, match="out has shape .*, but the result .8, 4."):
                te.general_gemm(w, x, out=out, **options)
    assert buffer.eq(0).all()
    out = torch.full((8, 4), torch.nan, device=device)
    te.general_gemm(w, x, out=out, accumulate=True, beta=0.0)
    assert out.eq(16).all()


@pytest.mark.ranks(2)
def test_general_gemm_prepared_calls_do_not_hold_the_communicator_or_its_buffer(ctx):
    keep = te.CommOverlapP2P([64, 32], torch.float32, (shared := helper(ctx)), 2, AG)
    comms = [keep, te.CommOverlap([64, 32], torch.float32, shared, 2)]
    x, w = torch.ones(32, 32, device=ctx.device), torch.ones(24, 32, device=ctx.device)
    for _ in range(2):
        te.general_gemm(w, x, ub=comms[0], ub_type=AG)
        te.general_gemm(w, comms[1].get_buffer(), ub=comms[1], ub_type=RS, bulk_overlap=True)
        te.general_gemm(x, comms[1].get_buffer(), ub=comms[1], ub_type=RS)
    held = [weakref.ref(comms[1]), weakref.ref(comms[1]._buffer)]
    del comms
    gc.collect()
    assert [reference() for reference in held] == [None, None]


@pytest.mark.ranks(2)
def test_general_gemm_a_first_call_needs_nothing_that_a_capture_forbids(ctx):
    """As if captured, no rank is met; what would need to is refused, and leaves no harm."""
    te.initialize_ub([64, 32], 2, dtype=torch.float32)
    gather, scatter, bulk = (te.get_ub(name) for name in ("qkv_fprop", "proj_fprop", "qkv_dgrad"))
    # On the simulated runtime, tiles of the second product are split along K, and their sums need room.
    x, w, v = (torch.ones(shape, device=ctx.device) for shape in ((32, 32), (1024, 32), (32, 1024)))
    with without_launches(gather.context, as_if_captured=True):
        h = te.general_gemm(w, x, ub=gather, ub_type=AG)[0]
        y = te.general_gemm(v, h, ub=scatter, ub_type=RS)[0]
        assert h.eq(32.0).all() and y.eq(2 * 1024 * 32.0).all() and y.shape == (32, 32)
        assert te.general_gemm(w, x[:9], ub=gather, ub_type=AG)[0].eq(32.0).all()
        with pytest.raises(TkernelsError, match="has no buffer yet; call get_buffer"):
            bulk.get_buffer()
        with pytest.raises(ValueError, match="initialize_ub.. takes the largest number of tokens"):
            te.general_gemm(w, torch.ones(33, 32, device=ctx.device), ub=gather, ub_type=AG)
    assert te.general_gemm(w, x[:9], ub=gather, ub_type=AG)[0].eq(32.0).all()
    te.destroy_ub()


@pytest.mark.ranks(2)
@simulated_only
def test_general_gemm_a_buffer_beyond_two_gigabytes_is_addressed_right(ctx):
    """4.3 GB of bf16, of which little is touched: of two calls one goes through memory beyond element 2**31."""
    shape, few = ((1 << 22) + 6, 1 << 9), 6
    room = te.CommOverlapHelper(ctx.group.process_group, heap_bytes=16 << 30)  # pages that nobody touches cost nothing
    gather = te.CommOverlapP2P(shape, torch.bfloat16, room, 2, AG)
    assert gather.context.workspace().inbox_bytes // 2 > 2**31
    hidden = shape[1]
    w = torch.zeros(8, hidden, dtype=torch.bfloat16)
    w[:, :: hidden // 4] = small((8, 4), torch.bfloat16, 5, ctx)  # so that sums are exact
    for call in range(4):
        every = [small((few, hidden), torch.bfloat16, 10 * call + rank, ctx) for rank in range(2)]
        y, *_, extra = te.general_gemm(w, every[ctx.rank], ub=gather, ub_type=AG, extra_output=torch.cat(every) * 0)
        assert torch.equal(y.float(), reference(torch.cat(every), w)) and torch.equal(extra, torch.cat(every)), call
    scatter = te.CommOverlap(shape, torch.bfloat16, room, 2)
    for call in range(2):
        every = [(small((2 * few, 8), torch.bfloat16, 20 * call + r, ctx), w.t() * (r + 1)) for r in range(2)]
        x, mine = every[ctx.rank]
        y = te.general_gemm(mine.contiguous(), x, ub=scatter, ub_type=RS)[0]
        assert torch.equal(y.float(), sum(reference(x, w) for x, w in every).chunk(2)[ctx.rank]), call
    whole = scatter.get_buffer()
    assert whole.numel() > 2**31
    mine = scatter.get_buffer(local_chunk=True)
    assert mine.data_ptr() - whole.data_ptr() == ctx.rank * mine.numel() * 2
    mine[-1].fill_(ctx.rank + 1.0)  # the last row lies beyond element 2**31 on rank 1
    assert whole[shape[0] // 2 * (ctx.rank + 1) - 1].eq(ctx.rank + 1.0).all()


@pytest.mark.ranks(2)
@gpu_only
def test_general_gemm_tensors_beyond_two_gigabytes_travel_whole(ctx):
    """Run with TKERNELS_POOL_BYTES of 32 GiB; 4.3 GB of bf16 are gathered, and reduced, inside a product."""
    if int(os.environ.get("TKERNELS_POOL_BYTES", 0)) < 32 << 30:
        pytest.skip("set TKERNELS_POOL_BYTES to 32 GiB or more")
    tokens, hidden = (1 << 17) + 74, 1 << 14
    room = te.CommOverlapHelper(ctx.group.process_group, heap_bytes=28 << 30)
    gather = te.CommOverlapP2P([tokens, hidden], torch.bfloat16, room, 2, AG)
    rows = (torch.arange(tokens, device=ctx.device) % 64).bfloat16()
    x = rows.chunk(2)[ctx.rank][:, None].expand(-1, hidden).contiguous()
    w = torch.zeros(256, hidden, dtype=torch.bfloat16, device=ctx.device)
    w[:, -1] = 2.0
    for call in range(3):
        gathered = poison(x.new_empty(tokens, hidden))
        y, *_ = te.general_gemm(w, x, ub=gather, ub_type=AG, extra_output=gathered)
        assert torch.equal(y, (2 * rows)[:, None].expand(-1, 256)), call
        assert torch.equal(gathered[:, 0], rows) and torch.equal(gathered[:, -1], rows), call
    del gathered, x
    scatter = te.CommOverlap([tokens, hidden], torch.bfloat16, room, 2)
    x, w = rows[:, None].expand(-1, 64).contiguous(), torch.zeros(hidden, 64, dtype=torch.bfloat16, device=ctx.device)
    w[:, ctx.rank] = 1.0
    want = (2 * rows).chunk(2)[ctx.rank]
    for call in range(3):
        y, *_ = te.general_gemm(w, x, ub=scatter, ub_type=RS)
        assert all(torch.equal(y[:, column], want) for column in (0, hidden // 2, -1)), call
    gather.context.check()


@pytest.mark.ranks(2)
def test_general_gemm_a_gather_beside_a_product_of_the_callers(ctx):
    comm = te.CommOverlap([16, 8], torch.float32, helper(ctx), 2, comm_type=AG, method="external", num_comm_sm=3)
    asked, all_gather = [], comm.all_gather
    comm.all_gather = lambda x, rows, out, programs: asked.append(programs) or all_gather(x, rows, out, programs)
    comm.copy_into_buffer(torch.full((8, 8), float(ctx.rank), device=ctx.device), local_chunk=True)
    dev = torch.get_device_module(ctx.device)
    send, receive = comm.get_communication_stream()
    current = dev.current_stream()
    te.bulk_overlap_ag_with_external_gemm(comm, current, receive)
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    assert comm.get_buffer()[::8, 0].tolist() == [0.0, 1.0] and asked == [3]


# On GPUs


@pytest.mark.ranks(2, 4)
@gpu_only
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_general_gemm_the_first_call_can_be_captured(ctx, mode):
    te.initialize_ub([1024, 512], ctx.size)
    gather, scatter, bulk = (te.get_ub(name) for name in ("qkv_fprop", "proj_fprop", "qkv_dgrad"))
    x = torch.zeros(1024 // ctx.size, 512, dtype=torch.bfloat16, device=ctx.device)
    w1, w2 = (small((512, 512), torch.bfloat16, seed + ctx.rank, ctx) for seed in (3, 30))
    bulk.get_buffer()
    dropped = te.CommOverlap([64, 32], torch.float32, helper(ctx), ctx.size)
    dropped.itself = dropped
    del dropped
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):  # refuses a branch that is not joined
        gc.collect()  # a collection may come at any time
        h = te.general_gemm(w1, x, ub=gather, ub_type=AG)[0]
        y = te.general_gemm(w2, h, ub=scatter, ub_type=RS)[0]
        bulk.copy_into_buffer(x, local_chunk=True)
        beside = te.general_gemm(w2, h, ub=bulk, ub_type=AG, bulk_overlap=True)[0]
    every = None
    for replay in range(50):
        every = [small((1024 // ctx.size, 512), torch.bfloat16, 10 * replay + r, ctx) for r in range(ctx.size)]
        x.copy_(every[ctx.rank])
        h.fill_(float("nan")), y.fill_(float("nan"))
        if ctx.rank == replay % ctx.size:
            torch.cuda._sleep(200_000)
        graph.replay()
        assert torch.equal(h.float(), reference(torch.cat(every), w1).bfloat16().float()), replay
        assert y.isfinite().all() and beside.isfinite().all(), replay
        assert torch.equal(bulk.get_buffer(), torch.cat(every)), replay
    gather.context.check()
    del graph
    te.destroy_ub()


@pytest.mark.ranks(2)
@gpu_only
def test_general_gemm_a_capture_that_needs_a_buffer_is_refused(ctx):
    comm = te.CommOverlap([64, 64], torch.float32, helper(ctx), 2)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(TkernelsError, match=r"call get_buffer\(\) once before the capture"), torch.cuda.graph(graph):
        comm.get_buffer()
    assert comm.get_buffer().shape == (64, 64)


@pytest.mark.ranks(2)
@gpu_only
def test_general_gemm_a_call_on_another_stream_straight_after_init(ctx):
    for round in range(5):
        te.initialize_ub([1024, 512], ctx.size)
        late(ctx, round % 2, 0.05)
        x = small((512, 512), torch.bfloat16, ctx.rank, ctx)
        w = torch.eye(512, dtype=torch.bfloat16, device=ctx.device)
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            y = te.general_gemm(w, x, ub=te.get_ub("qkv_fprop"), ub_type=AG)[0]
        side.synchronize()
        assert torch.equal(y, torch.cat([small((512, 512), torch.bfloat16, r, ctx) for r in range(2)]))
        te.destroy_ub()


@pytest.mark.ranks(2, 4)
@gpu_only
def test_general_gemm_two_kernels_that_wait_for_peers_find_room_in_either_order(ctx):
    """On every other rank the gather comes first, on the others the product with a reduce-scatter inside."""
    tokens, hidden = 4096, 1024
    comm = te.CommOverlapP2P([tokens, hidden], torch.bfloat16, helper(ctx, 256 << 20), ctx.size, RS)
    w = small((512, hidden), torch.bfloat16, 7, ctx)
    rows = tkernels.split_rows(tokens, ctx.size)
    for call in range(20):
        every = [small((tokens, 512), torch.bfloat16, 10 * call + rank, ctx) for rank in range(ctx.size)]
        mine = torch.full((rows[0], hidden), float(10 * call + ctx.rank), dtype=torch.bfloat16, device=ctx.device)
        gathered = poison(mine.new_empty(tokens, hidden))
        gather_first = (ctx.rank + call) % 2
        if not gather_first:
            with torch.cuda.stream(comm.stream):
                torch.cuda._sleep(2_000_000)
        with comm.beside(comm.all_gather, mine, rows, gathered):
            if gather_first:
                torch.cuda._sleep(2_000_000)
            y = comm.matmul_reduce_scatter(every[ctx.rank], w.t(), beside=True)
        want = sum(reference(x, w.t()) for x in every).split(rows)[ctx.rank]
        assert_close_to(y, want.double(), terms=512 * ctx.size, scale=64.0)
        assert gathered[:: rows[0], 0].tolist() == [float(10 * call + rank) for rank in range(ctx.size)]
    comm.context.check()


def recording(beside, done):
    """`beside`, with an event behind what its block has launched, before what joins the collective."""

    @contextlib.contextmanager
    def recorded(*args, **options):
        with beside(*args, **options) as value:
            yield value
            done.record()

    return recorded


@pytest.mark.ranks(2, 4)
@gpu_only
def test_general_gemm_bulk_overlap_overlaps_and_its_result_is_ordered(ctx):
    """The collective is held up by a late rank; the product beside it has finished long before it."""
    comm = te.CommOverlap([4096, 1024], torch.bfloat16, helper(ctx, 128 << 20), ctx.size, set_sm_margin=False)
    x, w = (small((256, 256), torch.bfloat16, seed, ctx) for seed in (1, 2))
    whole = comm.get_buffer()
    te.general_gemm(w, x, ub=comm, ub_type=AG, bulk_overlap=True)  # what compiles for seconds outlasts any late rank
    for call in range(10):
        mine = torch.full((4096 // ctx.size, 1024), float(call + ctx.rank), dtype=torch.bfloat16, device=ctx.device)
        comm.copy_into_buffer(mine, local_chunk=True)
        torch.cuda.synchronize()
        ctx.group.barrier()
        if ctx.rank == 1:
            torch.cuda._sleep(100_000_000)  # rank 1 comes late, so rank 0's collective waits
        done = torch.cuda.Event()
        with mock.patch.object(comm, "beside", recording(comm.beside, done)):
            te.general_gemm(w, x, ub=comm, ub_type=AG, bulk_overlap=True)
        after = torch.cuda.Event()
        after.record()
        done.synchronize()
        if ctx.rank == 0:
            assert not after.query()  # what follows is behind the collective, which still waits; the product is done
        assert whole[:: 4096 // ctx.size, 0].tolist() == [float(call + rank) for rank in range(ctx.size)]
