"""FP8 in the Userbuffers API: bit for bit where sums are exact, else within TransformerEngine's limits."""

import contextlib
import functools
import itertools
import math
import warnings

import pytest
import torch
from tensor_parallel import fill, own_part, whole_state
from test_userbuffers import PRESETS
from transports import covered, launches

import tkernels
from tkernels.comm.device import operation_name
from tkernels.layers import userbuffers as te
from tkernels.layers.userbuffers import float8
from tkernels.layers.userbuffers.defaults import configure, without_effect
from tkernels.testing.compare import integers, normal, poison

AG, RS = te.CommOverlapType.AG, te.CommOverlapType.RS
NONE, FP8 = te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
S, B, H = 24, 2, 32  # sequence, batch, hidden
BULK = dict(ub_overlap_ag=True, ub_overlap_rs=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True)
DGRAD = dict(ub_overlap_ag=True, ub_overlap_rs=True, ub_overlap_rs_dgrad=True)
REDUCING = {"qkv_dgrad": {"method": "ring_exchange"}, "fc1_dgrad": {"method": "pipeline", "num_sm": 2}}
FLAGS = {"bulk": BULK, "reducing dgrad": DGRAD}
RECIPES = {"delayed": te.DelayedScaling(), "current": te.Float8CurrentScaling()}
SCALES = 0.5, 2.0  # of the ranks


def signs(shape, seed: int, scale: float, ctx, dtype=E4M3):
    """-1, 0 and 1, times a scale: sums are exact in bf16 wherever they are rounded."""
    value = integers(shape, torch.float32, seed, low=-1, high=1, device=ctx.device)
    return te.Float8Tensor(value.to(dtype), torch.tensor([scale], device=ctx.device))


def exact(matrix: te.Float8Tensor) -> torch.Tensor:
    return matrix.dequantize(torch.float32)


class DType:
    def __init__(self, name):
        self.name = name

    def __str__(self):
        return f"DType.{self.name}"


class Imported:
    """A tensor as TransformerEngine has it: bytes, one scale, and its own name of the dtype."""

    def __init__(self, tensor: te.Float8Tensor):
        self._data, self._scale_inv, self.dtype = tensor._data, tensor.scale, tensor.dtype
        self._fp8_dtype = DType("kFloat8E5M2" if tensor.data.dtype == E5M2 else "kFloat8E4M3")


def helper(ctx):
    return te.CommOverlapHelper(ctx.group.process_group, heap_bytes=16 << 20)


def decibels(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    return 10 * math.log10(want.square().sum() / (got - want).square().sum().clamp_min(1e-300))


def assert_within_transformer_engines_limits(got: torch.Tensor, want: torch.Tensor, what: str):
    """At the element of the largest error: 0.125 relative or 0.0625 absolute. What isn't a number is refused."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    error = (got - want).abs().nan_to_num(nan=math.inf)
    at = error.argmax()
    worst, size = error.flatten()[at], want.flatten()[at].abs()
    assert worst <= 0.125 * size or worst <= 0.0625, f"{what}: {worst} of {size}"


@pytest.mark.ranks(2)
def test_general_gemm_gathers_float8_with_a_scale_of_each_rank(ctx):
    """By every method, in every layout, with fewer and uneven rows: exact, call after call."""
    common = [2 * S, H], torch.uint8, helper(ctx), 2
    ring, pairs = te.CommOverlapP2P(*common, AG), te.CommOverlapP2P(*common, AG, aggregate=True, use_ce=False)
    w = signs((40, H), 9 + ctx.rank, 4.0, ctx, (E4M3, E5M2)[ctx.rank])
    for call, (comm, rows) in enumerate(itertools.product((ring, pairs), ((S, S), (8, 8), (7, 12)))):
        assert comm.is_fp8_ubuf()
        every = [signs((rows[rank], H), 10 * call + rank, SCALES[rank], ctx) for rank in range(2)]
        x, whole = every[ctx.rank], torch.cat([exact(each) for each in every])
        want = whole @ exact(w).t()
        extra = poison(torch.empty(sum(rows), H, dtype=torch.uint8, device=ctx.device))
        bias = integers(40, torch.bfloat16, call, device=ctx.device)
        options = dict(ub=comm, ub_type=AG, rows=rows)
        y, *_ = te.general_gemm(w, x, extra_output=extra, bias=bias, **options)
        assert y.dtype == torch.bfloat16 and torch.equal(y.float(), want + bias.float()), (call, rows)
        assert torch.equal(extra, torch.cat([each._data for each in every]))
        _, bias_grad, *_ = te.general_gemm(w, x, torch.float32, grad=True, bias=bias, **options)
        assert torch.equal(bias_grad.float(), whole.sum(0))
        if rows[0] == rows[1]:
            out = poison(torch.empty(sum(rows), 40, device=ctx.device))
            assert te.general_gemm(Imported(w), Imported(x), out=out, ub=comm, ub_type=AG)[0] is out
            assert torch.equal(out, want)
            filled, local = te.fill_userbuffers_buffer_for_all_gather(comm, Imported(x), None, None)
            assert torch.equal(local.data.float(), x.data.float())
            y, *_ = te.general_gemm(w, filled, ub=comm, ub_type=AG, use_split_accumulator=True)
            assert torch.equal(y.float(), want) and torch.equal(exact(filled), whole)
            mine = te.Float8Tensor(filled.data, x.scale)  # the whole buffer, with the one scale of this rank's part
            y, *_ = te.general_gemm(w, mine, ub=comm, ub_type=AG)
            assert torch.equal(y.float(), want) and x.scale.shape == (1,) and x.scale == SCALES[ctx.rank]
            transposed = te.Float8Tensor(w.data.t().contiguous(), w.scale)
            assert torch.equal(te.general_gemm(transposed, x, layout="NN", ub=comm, ub_type=AG)[0].float(), want)
    ctx.check()


@pytest.mark.ranks(2)
def test_general_gemm_reduces_products_of_float8(ctx):
    """A rank's scales come before the sum, and bias once after it; beside a product, bytes are gathered."""
    ranks = range(2)
    weights = [signs((H, 48), 5 + rank, (1.0, 0.5)[rank], ctx) for rank in ranks]
    shared = helper(ctx)
    for seed, (kind, dtype) in enumerate(itertools.product(("ring", "pipeline"), (torch.bfloat16, torch.float32))):
        common = [2 * S, H], dtype, shared, 2
        comm = te.CommOverlapP2P(*common, RS) if kind == "ring" else te.CommOverlap(*common)
        for tokens in (2 * S, 13):
            every = [signs((tokens, 48), 50 * seed + rank, SCALES[rank], ctx, E5M2) for rank in ranks]
            total = sum(exact(x) @ exact(w).t() for x, w in zip(every, weights, strict=True))
            want = total.split(tkernels.split_rows(tokens, 2))[ctx.rank]
            bias = integers(H, torch.float32, seed, device=ctx.device)
            options = dict(ub=comm, ub_type=RS, bias=bias)
            y, *_ = te.general_gemm(weights[ctx.rank], every[ctx.rank], **options)
            assert y.dtype == torch.bfloat16 and torch.equal(y.float(), want + bias), (kind, dtype, tokens)
            extra = poison(torch.empty(want.shape, device=ctx.device))
            y, *_ = te.general_gemm(weights[ctx.rank], every[ctx.rank], torch.float32, extra_output=extra, **options)
            assert torch.equal(y, want + bias) and torch.equal(extra, y)
    for margin in (False, True):
        beside = te.CommOverlap([2 * S, H], torch.uint8, shared, 2, comm_type=AG, num_comm_sm=2, set_sm_margin=margin)
        every = [signs((S, H), 70 + rank, 1.0, ctx) for rank in ranks]
        beside.copy_into_buffer(every[ctx.rank]._data, local_chunk=True)
        x = signs((33, 48), 80, 0.5, ctx)
        y, *_ = te.general_gemm(weights[ctx.rank], x, ub=beside, ub_type=AG, bulk_overlap=True)
        assert torch.equal(y.float(), exact(x) @ exact(weights[ctx.rank]).t())
        assert torch.equal(beside.get_buffer(), torch.cat([each._data for each in every]))
    whole, work = te.gather_along_first_dim(every[ctx.rank], ctx.group.process_group)
    assert work is None and torch.equal(exact(whole), torch.cat([exact(each) for each in every]))
    ctx.check()


def test_general_gemm_of_float8_is_close_to_the_product_of_dequantized_operands():
    """50 dB with split accumulators, of 55 that bf16 has; fast, tensor cores lose up to 2**-14 in each 32 of K."""
    device, K = tkernels.comm.runtime.device(), 512
    quantizer = te.Float8CurrentScalingQuantizer(E4M3)
    A, B = (quantizer(normal((rows, K), torch.bfloat16, rows, device)) for rows in (40, 24))
    truth = B.dequantize(torch.float32).double() @ A.dequantize(torch.float32).double().t()
    assert decibels(te.general_gemm(A, B, use_split_accumulator=True)[0], truth) > 50
    error = (te.general_gemm(A, B)[0].double() - truth).norm() / truth.norm()
    assert error <= K / 32 * 2**-14 + 10 ** (-50 / 20)
    for layout in ("NN", "NT"):
        a, b = (each if layout == "NN" and each is B else te.Float8Tensor(each.data.t().contiguous(), each.scale)
                for each in (A, B))  # fmt: skip
        assert decibels(te.general_gemm(a, b, layout=layout, use_split_accumulator=True)[0], truth) > 50
    scale, amax = torch.tensor([2.0], device=device), torch.zeros(3, device=device)
    result, *_ = te.general_gemm(A, B, quantization_params=te.Float8Quantizer(scale, amax, DType("kFloat8E5M2")))
    assert isinstance(result, te.Float8Tensor) and result._fp8_dtype == E5M2 and result._scale_inv.item() == 0.5
    assert decibels(result.dequantize(), truth) > 18 and amax.tolist()[1:] == [0.0, 0.0]
    assert amax[0] == te.general_gemm(A, B)[0].abs().max()
    row = te.Float8Tensor(*tkernels.quantize(normal((24, K), torch.bfloat16, 5, device), "row"))
    truth = row.dequantize(torch.float32).double() @ A.dequantize(torch.float32).double().t()
    assert decibels(te.general_gemm(A, row, use_split_accumulator=True)[0], truth) > 50


@pytest.mark.ranks(2)
def test_general_gemm_of_float8_is_within_transformer_engines_limits(ctx):
    """Split overlaps: beside a gather and the local product, or local products in bf16 whose sum is of that dtype.

    Values are of size one, and sums of some more, so that what is wrong is beyond both limits.
    """
    quantizer, shared = te.Float8CurrentScalingQuantizer(E4M3), helper(ctx)
    x, w = (quantizer(normal((rows, 128), torch.bfloat16, rows + ctx.rank, ctx.device)) for rows in (S, 40))
    for aggregate in (False, True):
        comm = te.CommOverlapP2P([2 * S, 128], torch.uint8, shared, 2, AG, aggregate=aggregate)
        whole, _ = te.gather_along_first_dim(x, ctx.group.process_group)
        got, want = te.general_gemm(w, x, ub=comm, ub_type=AG)[0], te.general_gemm(w, whole)[0]
        assert_within_transformer_engines_limits(got, want, f"all-gather, aggregate={aggregate}")
    sums = sum(each.to(ctx.device) for each in ctx.group.gather(te.general_gemm(w, x)[0].cpu()))
    for p2p in (False, True):
        common = [2 * S, 40], torch.bfloat16, shared, 2
        comm = te.CommOverlapP2P(*common, RS) if p2p else te.CommOverlap(*common)
        got = te.general_gemm(w, x, ub=comm, ub_type=RS)[0]
        assert_within_transformer_engines_limits(got, sums.chunk(2)[ctx.rank], f"reduce-scatter, p2p={p2p}")
    ctx.check()


def test_quantizers_saturate_and_keep_what_is_no_number():
    x = torch.tensor([[1.0, -3.0, 1e6, 0.0, math.nan, -math.inf]], device=tkernels.comm.runtime.device())
    amax = torch.zeros(1, device=x.device)
    got = te.Float8Quantizer(torch.tensor([2.0], device=x.device), amax, E4M3)(x)
    assert got.data.float().tolist()[0][:4] == [2.0, -6.0, 448.0, 0.0] and got.data.float()[0, 5] == -448
    assert got.data.float()[0, 4].isnan() and got.dtype == torch.float32
    with pytest.raises(TypeError, match="fp8_dtype=torch.int8 must be torch.float8_e4m3fn or torch.float8_e5m2"):
        te.Float8CurrentScalingQuantizer(torch.int8)


def test_quantizers_refuse_by_name_what_they_cannot_use():
    one = torch.ones(1)
    refused = [
        (lambda: te.Float8Quantizer(None, None, E4M3), "Float8Quantizer: scale=None must be a tensor"),
        (lambda: te.Float8Quantizer(one, [1.0], E4M3), r"Float8Quantizer: amax=\[1.0\] must be a tensor"),
        (lambda: te.Float8Quantizer(torch.ones(2), one, E4M3), r"scale is torch.float32 \[2\] .* scale of one element"),
        (lambda: te.Float8Quantizer(one, one[:0], E4M3), r"amax torch.float32 \[0\], but both .* of one or more"),
        (lambda: te.Float8Quantizer(one.double(), one, E4M3), "scale is torch.float64 .*, but both must be float32"),
        *((lambda amax=amax: te.Float8Quantizer(one, amax, E4M3), "amax is written to, but wants a gradient or")
          for amax in (one.clone().requires_grad_(), one.expand(3))),
        (lambda: te.Float8Quantizer(one, one.to("meta"), E4M3)(one), "scale on cpu and amax on meta, but all must be"),
        *((lambda make=make, wrong=wrong: make()(wrong), message)
          for make in (lambda: te.Float8Quantizer(one, one, E4M3), lambda: te.Float8CurrentScalingQuantizer(E4M3))
          for wrong, message in (([1.0], r"tensor=\[1.0\] must be a tensor"), (one.long(), "tensor is torch.int64"),
                                 (one.to(E4M3), "tensor is torch.float8_e4m3fn, but"),
                                 (one.double(), "tensor is torch.float64, but"), (one[0], "tensor is a scalar, but"),
                                 (one.to_sparse(), "tensor must be a strided tensor"))),
    ]  # fmt: skip
    for wrong, message in refused:
        with pytest.raises((ValueError, TypeError), match=message):
            wrong()


@pytest.mark.ranks(2)
def test_quantizers_share_the_scale_of_their_group_if_asked(ctx):
    quantizer = te.Float8CurrentScalingQuantizer(
        E4M3, with_amax_reduction=True, amax_reduction_group=ctx.group.process_group, force_pow_2_scales=True
    )
    got = quantizer(torch.tensor([[448.0 * (1 + 3 * ctx.rank), 8.0]], device=ctx.device))
    assert got.scale.item() == 4.0 and got.data.float().tolist() == [[112.0 * (1 + 3 * ctx.rank), 2.0]]


class MXFP8Quantizer:
    def __call__(self, tensor):
        raise AssertionError("is never called")


class MXFP8Tensor:
    _rowwise_data = _rowwise_scale_inv = None


@pytest.mark.ranks(2)
def test_general_gemm_refuses_by_name_what_is_no_float8_with_one_scale(ctx):
    shared = helper(ctx)
    gather = te.CommOverlapP2P([16, 32], torch.uint8, shared, 2, AG)
    plain = te.CommOverlapP2P([16, 32], torch.bfloat16, shared, 2, AG)
    scatter = te.CommOverlap([16, 32], torch.bfloat16, shared, 2)
    x, w, wide = (signs((8, 32), seed, 1.0, ctx) for seed in (1, 2, 3))
    of_rows = te.Float8Tensor(w.data, torch.ones(8, 1, device=ctx.device))
    call, dense = te.general_gemm, exact(x).bfloat16()
    fill_buffer = te.fill_userbuffers_buffer_for_all_gather
    empty = Imported(x)
    empty._data = None
    refused = [
        (lambda: call(MXFP8Tensor(), x), "A, a MXFP8Tensor, is not supported: these kernels have scales of whole"),
        (lambda: call(w, empty), "B is a Imported without rowwise data; quantize with rowwise=True"),
        (lambda: call(dense, x), "and be of one dtype, or both Float8Tensors"),
        (lambda: call(w.data, x.data), "and be of one dtype, or both Float8Tensors"),
        (lambda: call(of_rows, x, layout="NN"), "with a scale for each row has none for each column"),
        (lambda: call(te.Float8Tensor(w.data, w.scale.double()), x), "must be float32"),
        (lambda: call(w, x, quantization_params=MXFP8Quantizer()), "quantization_params=MXFP8Quantizer is not supp"),
        (lambda: call(w, wide, quantization_params=te.Float8CurrentScalingQuantizer(E4M3), ub=scatter, ub_type=RS),
         "quantizes sums that can't travel in FP8; pass None"),
        (lambda: call(w, x, ub=plain, ub_type=AG), r"in torch.float8_e4m3fn don't fit; .* and quantization_modes of"),
        (lambda: call(dense, dense, ub=gather, ub_type=AG), "in torch.bfloat16 don't fit; .* and dtype=torch.bfloat16"),
        (lambda: fill_buffer(gather, dense, None, None), "the tensor is torch.bfloat16, but .* is FP8; pass a quant"),
        (lambda: fill_buffer(plain, x, None, None), "the tensor is FP8, but .* is not; use a communicator of FP8"),
        (lambda: fill_buffer(gather, dense, MXFP8Quantizer(), None), "quantizer=MXFP8Quantizer is not supported"),
        (lambda: te.gather_along_first_dim(dense, ctx.group.process_group, quantizer=MXFP8Quantizer()), "MXFP8Quant"),
        (lambda: te.CommOverlap([8, 8], torch.uint8, shared, 2), "must be torch.float32, .*; only what is gathered"),
        (lambda: te.CommOverlapP2P([8, 8], torch.int8, shared, 2, AG), "or torch.uint8 for FP8"),
    ]  # fmt: skip
    with launches() as launched:
        for wrong, message in refused:
            with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
                wrong()
    assert not launched
    assert torch.equal(
        call(w, x, ub=gather, ub_type=AG)[0].float()[:8], call(w, signs((8, 32), 1, 1.0, ctx))[0].float()
    )


# initialize_ub


@pytest.mark.ranks(2)
def test_initialize_ub_makes_communicators_for_each_quantization_mode(ctx):
    cfgs = [{"qkv_fprop": {"fp8_buf": False}, "fc1_dgrad": {"method": "ring_exchange"}}, None]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        te.initialize_ub([16, 32], 2, quantization_modes=[FP8, NONE], ub_cfgs=cfgs)
    told = [str(each.message) for each in told if "change nothing here" in str(each.message)]
    assert len(told) == (ctx.rank == 0) and all(
        "qkv_fprop.fp8_buf=False: the quantization mode" in text for text in told
    )
    for name, options in te.default_config(2).items():
        assert te.get_ub(name).dtype == torch.bfloat16 and not te.get_ub_is_fp8(name)
        if name != "fc1_wgrad":
            gathers = not options.is_reduce_scatter and name != "fc1_dgrad"
            assert te.get_ub(name, use_fp8=True).dtype == (torch.uint8 if gathers else torch.bfloat16), name
            assert te.get_ub_is_fp8(name, True) == gathers
    with pytest.raises(KeyError, match="fc1_wgrad is not registered in FP8. Registered: fc1_dgrad"):
        te.get_ub("fc1_wgrad", True)
    te.destroy_ub()
    with pytest.warns(DeprecationWarning, match="use_fp8 is deprecated; pass quantization_modes"):
        te.initialize_ub([16, 32], 2, True)
    assert te.get_ub_is_fp8("qkv_fprop", True)
    with pytest.raises(KeyError, match="pass initialize_ub quantization_modes with UserBufferQuantizationMode.NONE"):
        te.get_ub("qkv_fprop")
    te.destroy_ub()


@pytest.mark.ranks(2)
def test_initialize_ub_refuses_sums_that_would_travel_in_float8_beside_a_gemm(ctx):
    """On every rank, also where one alone asks for it; without FP8, presets that have it load, and are told of it."""
    cfg = {"qkv_wgrad": {"fp8_buf": (True,)}}
    for mine in (cfg, cfg if ctx.rank else None):
        with pytest.raises(
            ValueError, match=r"ub_cfgs\['qkv_wgrad'\]: fp8_buf=True would send sums in FP8 beside a GEMM"
        ):
            te.initialize_ub([16, 32], 2, quantization_modes=[NONE, FP8], ub_cfgs=mine)
        assert not te.is_ub_initialized()
    pipeline = {"proj_fprop": {"method": "pipeline", "fp8_buf": True}}
    assert without_effect(pipeline, configure(pipeline, 2, fp8=True), 2, fp8=True) == []
    (told,) = without_effect(pipeline, configure(pipeline, 2), 2)
    assert told.startswith("proj_fprop.fp8_buf=True: the quantization mode")


@pytest.mark.ranks(2)
def test_initialize_ub_lets_sums_of_float8_travel_in_float8_if_asked(ctx):
    """In that mode alone; exact where e4m3 holds the partial sums, up to 16 here, and noisy where it does not."""
    cfg = {"proj_fprop": {"fp8_buf": 1}, "fc2_fprop": {"method": "ring_exchange", "fp8_buf": (True,)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options without effect
        te.initialize_ub([2 * S, 160], 2, quantization_modes=[FP8, NONE], ub_cfgs=cfg)
    for name, dtype in itertools.product(cfg, (torch.bfloat16, torch.float32)):
        comm, others = te.get_ub(name, use_fp8=True), te.get_ub(name)
        assert comm.dtype == torch.bfloat16 and not te.get_ub_is_fp8(name, True)
        for tokens in (2 * S, 13):
            every = [signs((tokens, 16), tokens + rank, SCALES[rank], ctx, E5M2) for rank in range(2)]
            weights = [signs((150, 16), 5 + rank, (1.0, 0.5)[rank], ctx) for rank in range(2)]
            want = sum(exact(x) @ exact(w).t() for x, w in zip(every, weights, strict=True))
            bias = integers(150, torch.float32, 1, device=ctx.device)
            options = dict(ub=comm, ub_type=RS, bias=bias)
            y, *_ = te.general_gemm(weights[ctx.rank], every[ctx.rank], dtype, **options)
            want = want.split(tkernels.split_rows(tokens, 2))[ctx.rank] + bias
            assert y.dtype == dtype and torch.equal(y.float(), want), (name, dtype, tokens)
        x, w = (te.Float8CurrentScalingQuantizer(E4M3)(normal((rows, 64), dtype, rows + ctx.rank, ctx.device))
                for rows in (2 * S, 150))  # fmt: skip
        narrow, wide = (te.general_gemm(w, x, torch.float32, ub=each, ub_type=RS)[0] for each in (comm, others))
        assert 28 < decibels(narrow, wide) < 40
    te.destroy_ub()
    ctx.check()


# Layers


class MXFP8BlockScaling:
    pass


def test_fp8_autocast_refuses_by_name_and_leaves_what_was():
    refused = [
        (
            dict(fp8_recipe=MXFP8BlockScaling()),
            "fp8_recipe=MXFP8BlockScaling is not supported: .*no block scaling; pass",
        ),
        (dict(fp8_recipe=te.DelayedScaling(fp8_dpa=True)), r"DelayedScaling\(fp8_dpa=True\) is not supported"),
        *((dict(fp8_recipe=te.DelayedScaling(override_linear_precision=wrong)), "override_linear_precision=.* flags")
          for wrong in (None, True, 3)),
        (dict(fp8_recipe=te.DelayedScaling(amax_compute_algo=max)), "amax_compute_algo=<built-in function max>"),
        (dict(fp8_recipe=te.Float8CurrentScaling(fp8_format=te.Format.E5M2)), "fp8_format=E5M2, which backward"),
        (dict(calibrating=True), "calibrating=True is not supported"),
        *((dict(enabled=wrong), "fp8_autocast: enabled: .* must be a boolean") for wrong in ("x", [], torch.ones(2))),
        *((dict(fp8_recipe=te.DelayedScaling(margin=wrong)), f"fp8_autocast: margin={wrong!r} must be")
          for wrong in ("x", 10**6, 1.5, None)),
        *((dict(fp8_recipe=te.DelayedScaling(amax_history_len=wrong)), f"fp8_autocast: amax_history_len={wrong!r} must")
          for wrong in (0, -1, 2.5, "x")),
        *((dict(fp8_recipe=recipe(fp8_format=wrong)), rf"{recipe.__name__}\(fp8_format={wrong!r}, which is no Format\)")
          for recipe in (te.DelayedScaling, te.Float8CurrentScaling) for wrong in ("E4M3", None)),
        (dict(fp8_recipe=te.Float8CurrentScaling(use_power_2_scales="no")), "use_power_2_scales: 'no' must be a bool"),
    ]  # fmt: skip
    for options, message in refused:
        with pytest.raises((ValueError, TypeError), match=message), te.fp8_autocast(**options):
            raise AssertionError("is never entered")
    layer = te.Linear(24, 32, device="cpu", params_dtype=torch.bfloat16)
    x = torch.ones(2, 24, dtype=torch.bfloat16)
    with te.fp8_autocast(), te.autocast(enabled=False):
        assert layer(x).shape == (2, 32)
    with (
        te.fp8_autocast(),
        pytest.raises(ValueError, match="float8 takes features in multiples of 16 .* 24 in-features"),
    ):
        layer(x)
    assert layer(x).shape == (2, 32)


@contextlib.contextmanager
def initialized(ctx, flags, cfg=None):
    """Collective. Userbuffers in FP8 for S * B tokens, with cfg or else what the flags need, in a block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options without effect
        cfg = REDUCING if cfg is None and "ub_overlap_rs_dgrad" in flags else cfg
        te.initialize_ub([S * B, 4 * H], ctx.size, quantization_modes=[FP8], ub_cfgs=cfg)
    try:
        yield
    finally:
        te.destroy_ub()


def parallel(ctx, **options):
    return dict(
        sequence_parallel=True, tp_group=ctx.group.process_group, tp_size=ctx.size, params_dtype=torch.bfloat16,
        device=ctx.device, **options,
    )  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flags", [BULK, DGRAD, {}], ids=["bulk", "reducing dgrad", "no overlap"])
def test_linear_in_float8_is_exact_where_sums_are(ctx, flags):
    """Scales are powers of two, other ones on each rank. What travels is told from what it stands for by none."""
    values = lambda shape, seed: integers(shape, torch.bfloat16, seed, low=-1, high=1)  # noqa: E731
    recipe = te.Float8CurrentScaling(use_power_2_scales=True)
    with initialized(ctx, flags):
        for (mode, name), calls in itertools.product((("column", "qkv"), ("row", "proj")), (2,)):
            sizes = (H, 96) if mode == "column" else (96, H)
            layer = te.Linear(*sizes, parallel_mode=mode, ub_name=name, **parallel(ctx), **flags)
            dim = 0 if mode == "column" else 1
            w, bias = values(sizes[::-1], 1), values(sizes[1:], 2)
            with torch.no_grad():
                layer.weight.copy_(w.chunk(2, dim)[ctx.rank])
                layer.bias.copy_(bias.chunk(2)[ctx.rank] if mode == "column" else bias)
            of_x, of_y = (0, 1) if mode == "column" else (1, 0)
            for call in range(calls):
                x, dy = values((S * B, sizes[0]), 10 + call), values((S * B, sizes[1]), 20 + call)
                x.chunk(2, of_x)[1].mul_(2), dy.chunk(2, of_y)[1].mul_(2)
                mine = x.chunk(2, of_x)[ctx.rank].contiguous().to(ctx.device).requires_grad_()
                layer.zero_grad()
                with te.fp8_autocast(fp8_recipe=recipe):
                    y = layer(mine)
                y.backward(dy.chunk(2, of_y)[ctx.rank].contiguous().to(ctx.device))
                found = {
                    "y": (y, x.float() @ w.float().t() + bias.float(), of_y),
                    "dx": (mine.grad, dy.float() @ w.float(), of_x),
                    "dw": (layer.weight.grad, dy.float().t() @ x.float(), dim),
                }
                for what, (got, want, along) in found.items():
                    want = want.chunk(2, along)[ctx.rank]
                    assert got.dtype == torch.bfloat16 and torch.equal(got.cpu(), want.bfloat16()), (mode, call, what)
    ctx.check()


@pytest.mark.ranks(2)
def test_linear_in_float8_refuses_another_dtype_than_the_communicators(ctx):
    """In forward, before anything is launched. What is only gathered is of bytes, whatever the dtype."""
    with initialized(ctx, BULK):
        sizes = {"qkv": (H, 96, "column", "ub_bulk_wgrad"), "proj": (96, H, "row", "ub_overlap_rs")}
        for name, (inner, outer, mode, flag) in sizes.items():
            layer = te.Linear(inner, outer, parallel_mode=mode, ub_name=name, **parallel(ctx), **BULK).float()
            x = torch.ones(S // 2 if mode == "column" else S, B, layer.weight.shape[1], device=ctx.device)
            match = f"Linear: {flag}.* reduces results of torch.float32, but initialize_ub.* took dtype=torch.bfloat16"
            with te.fp8_autocast(), launches() as launched, pytest.raises(ValueError, match=match):
                layer(x)
            assert not launched
            with te.fp8_autocast(), torch.autocast(ctx.device.type, torch.bfloat16):
                assert layer(x).dtype == torch.bfloat16
    ctx.check()


@pytest.mark.ranks(2)
@covered("flags, recipe", FLAGS, RECIPES, together=1)  # the pairs: in the other layers, below
def test_layer_norm_mlp_in_float8_is_within_transformer_engines_limits(ctx, flags, recipe):
    """Beside the layer without overlap and the recomputed one, and in decibels beside the whole layer in fp64."""
    make = functools.partial(te.LayerNormMLP, H, 2 * H, set_parallel_mode=True)
    with initialized(ctx, flags):
        layer, plain, again = (
            make(**parallel(ctx), **options) for options in (flags, {}, flags | {"checkpoint": True})
        )
        fill(layer, 3, ctx.rank)
        whole = make(params_dtype=torch.float64, device="cpu")
        for other in (plain, again):
            other.load_state_dict(layer.state_dict())
        whole.load_state_dict(whole_state(ctx, layer))
        for seed in range(2):
            x, dy = (normal((S, B, H), torch.bfloat16, 10 * seed + each) for each in range(2))
            leaf = x.double().requires_grad_()
            truth = whole(leaf)
            whole.zero_grad()
            truth.backward(dy.double())
            results = []
            for each in (layer, plain, again):
                mine = x.chunk(2)[ctx.rank].to(ctx.device).requires_grad_()
                each.zero_grad()
                with te.fp8_autocast(fp8_recipe=recipe):
                    y = each(mine)
                y.backward(dy.chunk(2)[ctx.rank].to(ctx.device))
                grads = {name: p.grad for name, p in each.named_parameters() if "weight" in name and "norm" not in name}
                results.append({"y": y, "dx": mine.grad} | grads)
            wanted = {"y": truth.chunk(2)[ctx.rank], "dx": leaf.grad.chunk(2)[ctx.rank]}
            whole_grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
            parameters = dict(layer.named_parameters())
            wanted |= {name: own_part(ctx, parameters[name], whole_grads[name]) for name in grads}
            for name, got in results[0].items():
                for other in results[1:] if isinstance(recipe, te.Float8CurrentScaling) else results[1:2]:
                    assert_within_transformer_engines_limits(got, other[name], f"{name}, call {seed}")
                least = 22 if name == "y" else 17  # torchao's 25 and 17 of one product, of two half the 25
                assert least < decibels(got, wanted[name]) < 40, (name, seed)  # so something has been quantized
    ctx.check()


def results_of(ctx, layer, x, dy, recipe) -> dict[str, torch.Tensor]:
    """Collective. The output of a layer, the input's gradient, and those of all parameters but of norms."""
    mine = x.to(ctx.device, copy=True).requires_grad_()
    layer.zero_grad()
    with te.fp8_autocast(fp8_recipe=recipe):
        y = layer(mine)
    y.backward(dy.to(ctx.device))
    grads = {name: p.grad for name, p in layer.named_parameters() if "layer_norm" not in name}
    return {"y": y, "dx": mine.grad} | grads


def assert_as_without_overlap(ctx, make, recipe, flags, cfg=None, gain=1.0):
    """Collective. Two calls of a layer beside those of the same layer without overlap, by TransformerEngine's limits.

    make: a layer of flags. A layer that is column or row parallel has 96 features beside H. gain: about that of a
        product, and its square the size of the gradient.
    """
    pairs = []
    with initialized(ctx, flags, cfg):
        layer, plain = (make(**parallel(ctx), **options) for options in (flags, {}))
        fill(layer, 3, ctx.rank)
        with torch.no_grad():
            for weight in (each for each in layer.parameters() if each.dim() == 2):
                weight.mul_(gain)
        plain.load_state_dict(layer.state_dict())
        mode, split, whole = getattr(layer, "parallel_mode", None), (S // 2, B, H), (S, B, 96 // 2)
        for seed in range(2):
            x = normal(whole if mode == "row" else split, torch.bfloat16, 10 * seed + ctx.rank)
            dy = gain**2 * normal(whole if mode == "column" else split, torch.bfloat16, 10 * seed + 5 + ctx.rank)
            with launches() as launched:
                got = results_of(ctx, layer, x, dy, recipe)
            assert any("L" in args for *_, args in launched)
            wanted = results_of(ctx, plain, x, dy, recipe)
            pairs += [(f"{name}, call {seed}", got[name].clone(), want.clone()) for name, want in wanted.items()]
    for what, got, want in pairs:
        assert_within_transformer_engines_limits(got, want, what)
    ctx.check()


LAYERS = {  # TransformerEngine's cases, but LayerNormMLP's, which has a test of its own
    "Linear row": functools.partial(te.Linear, 96, H, parallel_mode="row"),
    "Linear column": functools.partial(te.Linear, H, 96, parallel_mode="column"),
    "LayerNormLinear column": functools.partial(te.LayerNormLinear, H, 96, parallel_mode="column"),
    "MultiheadAttention": functools.partial(
        te.MultiheadAttention, H, 2, attention_dropout=0.0, input_layernorm=True, set_parallel_mode=True,
        fuse_qkv_params=True,
    ),
    "TransformerLayer": functools.partial(
        te.TransformerLayer, H, 2 * H, 2, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True,
        fuse_qkv_params=True,
    ),
}  # fmt: skip
UB_NAMES = {"Linear row": "proj", "Linear column": "qkv", "LayerNormLinear column": "qkv"}


@pytest.mark.ranks(2)
@covered("kind, flags, recipe", list(LAYERS), FLAGS, RECIPES)
def test_layers_in_float8_are_within_transformer_engines_limits(ctx, kind, flags, recipe):
    def make(**options):
        overlaps = "ub_overlap_ag" in options
        more = {"ub_name": UB_NAMES[kind]} if overlaps and kind in UB_NAMES else {}
        more |= {"ub_tp_comm_overlap": overlaps} if kind == "TransformerLayer" else {}
        return LAYERS[kind](**more, **options)

    # A last bit in bf16 may change what FP8 makes of an element by an eighth, of a gradient by a quarter: in four
    # products of gain 1 that adds up beyond the limits.
    assert_as_without_overlap(ctx, make, recipe, flags, gain=0.25 if kind == "TransformerLayer" else 1.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name, flags", [("h100 8192 tp4 fp8", BULK), ("h100 8192 tp4 lora", DGRAD)])
def test_layer_norm_mlp_in_float8_by_a_published_preset_is_within_transformer_engines_limits(ctx, name, flags):
    """Presets whose partial sums travel in FP8: of the output, or of the input's gradient."""
    make = functools.partial(te.LayerNormMLP, H, 2 * H, set_parallel_mode=True)
    assert any(configure(PRESETS[name], 2, fp8=True)[each].fp8_buf for each in ("fc2_fprop", "fc1_dgrad"))
    assert_as_without_overlap(ctx, make, te.Float8CurrentScaling(), flags, PRESETS[name])


@pytest.mark.ranks(2)
def test_linear_in_float8_moves_bytes_and_scales_by_what_came_before(ctx):
    """What a layer launches in FP8; delayed scales are of the last calls, and a weight's copy is made once."""
    with initialized(ctx, BULK):
        layer = te.Linear(H, 96, parallel_mode="column", ub_name="fc1", **parallel(ctx), **BULK)
        x = normal((S // 2, B, H), torch.bfloat16, ctx.rank, device=ctx.device).requires_grad_()
        recipe = te.DelayedScaling(amax_history_len=2, margin=1)
        for factor in (1.0, 4.0, 2.0):
            with te.fp8_autocast(fp8_recipe=recipe), launches() as forward:
                y = layer(x * factor)
            with launches() as backward:
                y.sum().backward()
        ring = [args for _, _, args in forward if "L" in args]
        assert [operation_name(args["L"].OPERATION.value) for args in ring] == ["all_gather_matmul"]
        names = [operation_name(args["L"].OPERATION.value) for _, _, args in backward if "L" in args]
        assert names == [
            "all_gather",
            "all_gather",
            "reduce_scatter",
        ]  # bytes and scales beside dgrad, sums beside wgrad
        (scaling,) = layer._float8.values()
        largest = x.detach().abs().max().float()
        history = scaling.histories["input"]
        assert torch.equal(history.amax, torch.stack([2 * largest, 4 * largest]))
        assert torch.equal(history.factor, torch.full((1,), 448.0, device=ctx.device) / (4 * largest) / 2)
        assert scaling.scaling.recipe.gradient == E5M2 and not scaling.scaling.recipe.fast_accum_backward
        assert scaling.scaling.recipe.fast_accum
        with pytest.raises(
            KeyError, match="pass initialize_ub quantization_modes with UserBufferQuantizationMode.NONE"
        ):
            layer(x)
    ctx.check()


def test_linear_in_float8_keeps_histories_and_forgets_copies_of_weights():
    """Beside another recipe and inference mode; and of a parameter put in another's place, at its address."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = te.Linear(32, 32, bias=False, params_dtype=torch.float32, device=device)
    x = 2000 * normal((32, 16), torch.float32, 1).to(device).t()  # the first call's scale of 1 lets this saturate
    delayed, current = te.DelayedScaling(), te.Float8CurrentScaling()
    with torch.inference_mode(), te.fp8_autocast(fp8_recipe=delayed):
        layer(x)
    for recipe in (delayed, current, delayed):
        with te.fp8_autocast(fp8_recipe=recipe):
            y = layer(x)
        assert decibels(y, x.double() @ layer.weight.double().t()) > 22, recipe
    layer.weight.data.neg_()  # counted nowhere
    layer.weight = torch.nn.Parameter(layer.weight.data)
    with te.fp8_autocast(fp8_recipe=delayed):
        assert torch.equal(layer(x), -y)


def test_linear_in_float8_makes_its_histories_outside_of_a_capture(monkeypatch):
    """Where a replay would make them anew: by a stand-in of the capture, as a CPU has none."""
    entered, made = [], []

    @contextlib.contextmanager
    def uncaptured():
        entered.append(True)
        yield
        entered.pop()

    def of(length, device, make=float8.History.of):
        made.append(bool(entered))
        return make(length, device)

    monkeypatch.setattr(float8.capture, "uncaptured", uncaptured)
    monkeypatch.setattr(float8.History, "of", of)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = te.Linear(32, 32, params_dtype=torch.float32, device=device)
    for _ in range(2):
        with te.fp8_autocast():
            layer(torch.ones(16, 32, device=device, requires_grad=True)).sum().backward()
    assert made == [True, True]  # of the input and of the gradient


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_linear_in_float8_may_be_captured_at_its_first_call():
    """Replays go on with the histories that a call outside of the graph sees."""
    layer = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x, recipe = torch.ones(16, 32, dtype=torch.bfloat16, device="cuda"), te.DelayedScaling(amax_history_len=4)
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=te.Float8CurrentScaling()):
        layer(x)  # kernels compile here, and cuBLAS is initialized
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), te.fp8_autocast(fp8_recipe=recipe), torch.cuda.graph(graph):
        y = layer(x)
    for value in (4, 2, 1):
        x.fill_(value)
        graph.replay()
    history = next(each.histories["input"] for each in layer._float8.values() if each.histories)
    assert history.amax.tolist() == [4.0, 2.0, 1.0, 0.0] and history.factor.item() == 448 / 4
    assert decibels(y, x.double() @ layer.weight.double().t()) > 22


def test_layer_norm_mlp_is_recomputed_as_it_was_computed_whatever_block_backward_runs_in():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, found = normal((16, 32), torch.float32, 1).to(device), []
    for inside in (False, True):
        layer = te.LayerNormMLP(32, 32, params_dtype=torch.float32, device=device, checkpoint=True)
        with torch.no_grad():
            for seed, parameter in enumerate(layer.parameters()):
                parameter.copy_(normal(parameter.shape, torch.float32, seed))
        mine = x.clone().requires_grad_()
        y = layer(mine)
        with te.fp8_autocast() if inside else contextlib.nullcontext():
            y.sum().backward()
        found.append(mine.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("activation", ["relu", "reglu", "gelu", "silu", "geglu", "swiglu", "qgeglu"])
def test_layer_norm_mlp_with_delayed_scaling_quantizes_its_activation_in_one_kernel(monkeypatch, activation):
    """The same as activating before, but for fp32's last bits that "relu" doesn't round."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"activation": activation, "params_dtype": torch.bfloat16, "device": device}
    layers, results = [te.LayerNormMLP(32, 48, **options) for _ in range(2)], []
    layers[1].load_state_dict(layers[0].state_dict())
    x, dy = (normal((16, 2, 32), torch.bfloat16, seed).to(device) for seed in (1, 2))
    for layer in layers:
        found = []
        for _ in range(2):  # the second by the first one's scales
            at = x.clone().requires_grad_()
            with te.fp8_autocast(), launches() as launched:
                y = layer(at)
            y.backward(dy)
            found += [y.detach(), at.grad]
        found += [parameter.grad for parameter in layer.parameters()]
        results.append((found, [args["ACTIVATION"] for name, _, args in launched if name == "quantize_by_kernel"]))
        monkeypatch.setattr(float8, "quantizes_activations", lambda: False)
    (one, fused), (other, apart) = results
    assert len(fused) == len(apart) == 2 and any(fused) == (activation != "qgeglu") and not any(apart)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs) if activation in ("relu", "reglu") else decibels(mine, theirs) > 30
