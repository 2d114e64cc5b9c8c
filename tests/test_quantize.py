"""quantize: bit for bit a plain expression of torch, and that against fp64; what isn't finite, zeros, any shape."""

import importlib
import logging
import math

import pytest
import torch
from torch.library import opcheck
from transports import launches

import tkernels
import tkernels.operators
from tkernels.activations import ACTIVATIONS, activation_reference
from tkernels.comm import runtime
from tkernels.comm.calls import LocalCalls
from tkernels.comm.regions import round_up
from tkernels.configs import DTYPES, FP8
from tkernels.quantize import (
    LEAST,
    next_factor,
    quantize_by,
    quantize_by_reference,
    quantize_reference,
    transpose_quantized,
    transpose_reference,
)
from tkernels.testing.compare import normal, poison

module = importlib.import_module("tkernels.quantize")
DEVICE = runtime.device()
SHAPES = [(1, 16), (5, 100), (19, 48), (2, 3, 31), (7,), (3, 1), (2, 700)]
HALF_ULP = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
HALF_OF_SMALLEST = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}


@pytest.fixture(params=["rows", "reads", "parts"])
def kernels(request, monkeypatch):
    """Programs hold rows, read one twice, or take parts of one, whatever its length. -> those of scale="row"."""
    monkeypatch.setattr(module, "local_calls", LocalCalls())
    monkeypatch.setattr(module, "ELEMENTS", 256)  # so that small shapes take several programs
    monkeypatch.setattr(module, "HELD", 512)
    if request.param == "rows":
        return ["quantize_rows_kernel"]
    monkeypatch.setattr(module, "SHORT_ROW", 0)
    if request.param == "reads":
        return ["quantize_row_kernel"]
    monkeypatch.setattr(module, "LONGEST_READ", 0)
    monkeypatch.setattr(module, "LONGEST_ROW", 0)
    return ["largest_kernel", "quantize_parts_kernel"]


def spread(shape, dtype, seed=1):
    """Values over many powers of two, of other sizes in each row."""
    x = normal(shape, torch.float32, seed) * torch.exp2(normal((*shape[:-1], 1), torch.float32, seed + 1) * 4)
    return x.to(dtype).to(DEVICE)


def same_bits(got, want) -> bool:
    """All but the bits of NaN, of which formats have several."""
    (q, scale), (want_q, want_scale) = got, want
    assert (q.dtype, scale.dtype, q.shape, scale.shape) == (
        want_q.dtype, torch.float32, want_q.shape, want_scale.shape
    )  # fmt: skip
    assert q.is_contiguous() and scale.is_contiguous() and torch.equal(q.isnan(), want_q.isnan())
    bits, want_bits = (each.view(torch.uint8).masked_fill(each.isnan(), 0) for each in (q, want_q))
    return torch.equal(bits, want_bits) and torch.equal(scale, want_scale)


@pytest.mark.quick
@pytest.mark.parametrize("scale", ["row", "tensor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_gives_the_bits_of_a_plain_expression(kernels, dtype, scale):
    for shape in SHAPES:
        x = spread(shape, dtype)
        for fp8 in FP8:
            for power_of_two in (False, True):
                with launches() as launched:
                    got = tkernels.quantize(x, scale, fp8, power_of_two=power_of_two)
                assert scale == "tensor" or [name for name, *_ in launched] == kernels
                assert same_bits(got, quantize_reference(x, scale, fp8, power_of_two)), (shape, fp8, power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_quantize_is_within_half_a_step_of_fp64(fp8, power_of_two):
    x = spread((70, 200), torch.float32)
    for scale, largest in (("row", x.abs().amax(1, keepdim=True)), ("tensor", x.abs().amax())):
        q, unit = tkernels.quantize(x, scale, fp8, power_of_two=power_of_two)
        error = (q.double() * unit.double() - x.double()).abs()
        allowed = torch.maximum(x.double().abs() * HALF_ULP[fp8], unit.double() * HALF_OF_SMALLEST[fp8])
        assert (error <= allowed * (1 + 1e-6)).all()
        assert (error > allowed / 2).any()  # so the limit is no wider than it must be
        exact = largest.double() / torch.finfo(fp8).max
        if power_of_two:
            exact = torch.exp2(exact.log2().ceil())
            assert torch.equal(unit.double(), exact)
        assert ((unit.double() - exact).abs() <= exact * 2**-24).all()


def test_quantize_keeps_a_product_25_db_above_its_noise():
    x, w = normal((64, 512), torch.bfloat16, 1, DEVICE), normal((48, 512), torch.bfloat16, 2, DEVICE)
    want = x.double() @ w.double().t()
    for scale in ("row", "tensor"):
        (a, a_scale), (b, b_scale) = tkernels.quantize(x, scale), tkernels.quantize(w, scale)
        got = (a.double() @ b.double().t()) * a_scale.double() * b_scale.double().t()
        assert 10 * torch.log10(want.square().sum() / (got - want).square().sum()) > 25


@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_quantize_gives_nan_for_what_is_not_finite_and_scales_by_the_rest(kernels, scale):
    x = spread((6, 40), torch.float32)
    odd = x.clone()
    odd[0, 3], odd[2, 39], odd[4, 0] = math.nan, math.inf, -math.inf
    odd[5] = math.nan
    rest = x.masked_fill(~odd.isfinite(), 0)
    for fp8 in FP8:
        (q, unit), (want, want_unit) = tkernels.quantize(odd, scale, fp8), tkernels.quantize(rest, scale, fp8)
        assert torch.equal(q.isnan(), ~odd.isfinite()) and torch.equal(unit, want_unit)
        assert torch.equal(q.float()[odd.isfinite()], want.float()[odd.isfinite()])
        assert same_bits((q, unit), quantize_reference(odd, scale, fp8))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_quantize_keeps_zeros_and_extremes(kernels, scale, power_of_two):
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    for values in ([0.0, -0.0], [largest, -1.0], [smallest, -smallest], [1e-38, 3e-39], [448.0, 449.0], [2.0**-126, 0]):
        x = torch.tensor([values * 8], device=DEVICE)
        for fp8 in FP8:
            q, unit = tkernels.quantize(x, scale, fp8, power_of_two=power_of_two)
            assert same_bits((q, unit), quantize_reference(x, scale, fp8, power_of_two))
            assert q.float().isfinite().all() and unit.isfinite().all() and (unit >= LEAST.value).all(), values
            assert torch.equal(q.float().signbit(), x.signbit()), values
    mixed = torch.stack([torch.zeros(16), torch.full((16,), 3.0)]).to(DEVICE)
    q, unit = tkernels.quantize(mixed, "row")
    q = q.float()
    assert not q[0].any() and unit[0] == LEAST.value and torch.equal(q[1], torch.full_like(mixed[1], 448.0))


@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_quantize_reads_views_and_nothing_around_them(kernels, scale):
    memory = poison(torch.empty(40, 100, device=DEVICE))
    inside = memory[3:20, 4:68].copy_(spread((17, 64), torch.float32))
    whole = spread((17, 64), torch.float32)
    views = inside, whole.t(), whole[:, ::2], whole[::3], whole[:1].expand(5, 64), whole.view(17, 8, 8).movedim(0, 1)
    for x in views:
        assert same_bits(tkernels.quantize(x, scale), quantize_reference(x, scale)), (x.shape, x.stride())
    assert memory[2].isnan().all() and memory[3:20, 68:].isnan().all()


@pytest.mark.parametrize("fp8", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_gives_the_bits_of_a_plain_expression(dtype, fp8):
    for shape in (*SHAPES, (0, 4), (3, 0), (2, 5000)):
        for scale in ("row", "tensor"):
            q, unit = tkernels.quantize(spread(shape, torch.float32), scale, fp8)
            x = tkernels.dequantize(q, unit, dtype)
            assert x.dtype == dtype and torch.equal(x, (q.float() * unit).to(dtype)), (shape, scale)
    q, unit = tkernels.quantize(spread((6, 40), torch.float32), power_of_two=True)
    assert torch.equal(tkernels.dequantize(q, unit).double(), q.double() * unit.double())
    assert torch.equal(tkernels.dequantize(q.t().contiguous().t(), unit), tkernels.dequantize(q, unit))
    q.view(torch.uint8)[0, 0] = 0x7F  # NaN in both
    assert tkernels.dequantize(q, unit)[0, 0].isnan()


@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_quantize_of_an_activation_or_a_gated_product_is_that_of_what_they_give(kernels, scale):
    """The same bits where each step is one rounding: with "relu", and of a product; of rows of a wider matrix too."""
    for shape in SHAPES:
        for dtype in DTYPES:
            both = spread((*shape[:-1], 2 * shape[-1]), dtype)
            gate, x = both.chunk(2, -1)
            for activation, gates in (("relu", None), ("relu", gate), (None, gate)):
                with launches() as launched:
                    got = tkernels.quantize(x, scale, activation=activation, gate=gates)
                held = activation and kernels == ["quantize_row_kernel"]  # which computes no activation twice
                expected = ["quantize_rows_kernel"] if held else kernels
                assert scale == "tensor" or [name for name, *_ in launched] == expected
                first = activation_reference(x if gates is None else gates, activation)
                assert same_bits(got, quantize_reference(first if gates is None else first * x, scale))
    odd = torch.tensor([[math.nan, math.inf, -math.inf, 2.0], [0.0, -0.0, -1.0, 3.0]], device=DEVICE)
    ones = torch.ones_like(odd)
    for activation in ACTIVATIONS:  # of what isn't finite they may give 0, as torch's do
        q = tkernels.quantize(ones, scale, activation=activation, gate=odd)[0]
        assert torch.equal(q.isnan(), ~activation_reference(odd, activation).isfinite())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_quantize_of_an_activation_is_within_half_a_step_of_fp64(activation):
    """And what the activation and the product round by: half a step of the dtype each, 8 of fp32 before."""
    eps = torch.finfo(torch.float32).eps
    for dtype in DTYPES:
        gate, x = normal((2, 40, 200), dtype, 1, DEVICE) * 3
        for gates in (None, gate):
            first = activation_reference((x if gates is None else gates).double(), activation)
            want = first if gates is None else first * x.double()
            q, unit = tkernels.quantize(x, activation=activation, gate=gates)
            error = (q.double() * unit.double() - want).abs()
            allowed = torch.maximum(want.abs() * 2.0**-4, unit.double() * 2.0**-10)
            rounded = want.abs() * torch.finfo(dtype).eps * (1.01 + 1.01 * (gates is not None)) / 2
            # An activation's own terms, up to |its input|, cancel below 0.
            terms = 8 * eps * ((x if gates is None else gates * x).double().abs() + want.abs())
            tiny = torch.finfo(dtype).tiny * (1 if gates is None else 1 + x.double().abs())
            assert (error <= (allowed + rounded + terms + tiny) * 1.1).all()
            assert (error > allowed / 2).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_by_gives_the_bits_of_a_plain_expression_and_the_largest_magnitude(monkeypatch, dtype):
    """Of what is smaller and larger than the format's numbers; of rows of a wider matrix, and of what they give."""
    monkeypatch.setattr(module, "local_calls", LocalCalls())
    monkeypatch.setattr(module, "ELEMENTS", 256)
    for shape in (*SHAPES, (3, 0)):
        both = spread((*shape[:-1], 2 * shape[-1]), dtype)
        gate, x = both.chunk(2, -1)
        for fp8, number in zip(FP8 * 2, (0.3, 2.0, 1e4, 1e-6), strict=True):
            factor = torch.tensor([number], device=DEVICE)
            for part, gates, activation in ((x, None, None), (x.contiguous(), None, "relu"), (x, gate, "relu")):
                largest, want_largest = torch.tensor([[0.5], [0.5]], device=DEVICE)
                got = quantize_by(part, gates, factor, largest, fp8, activation)
                first = activation_reference(part if gates is None else gates, activation)
                values = first if gates is None else first * part
                assert same_bits(got, quantize_by_reference(values, factor, want_largest, fp8)), (shape, number)
                assert torch.equal(largest, want_largest) and torch.equal(got[1], 1 / factor[0])
                assert same_bits(quantize_by(part, gates, factor, None, fp8, activation), got)
    odd = torch.tensor([[math.nan, math.inf, -math.inf, -3.0, 0.0, 1e30, 0.25]], device=DEVICE)
    largest = torch.zeros(1, device=DEVICE)
    q, scale = quantize_by(odd, None, torch.tensor([4.0], device=DEVICE), largest, torch.float8_e4m3fn)
    assert q.float()[0, 0].isnan() and q.float()[0, 1:].tolist() == [448.0, -448.0, -12.0, 0.0, 448.0, 1.0]
    assert torch.equal(largest, odd[0, 5:6]) and scale.item() == 0.25


@pytest.mark.parametrize("length", [1, 3, 300])
def test_next_factor_follows_the_largest_of_as_many_calls_as_the_history_is_long(monkeypatch, length):
    monkeypatch.setattr(module, "local_calls", LocalCalls())
    monkeypatch.setattr(module, "ELEMENTS", 128)
    found = [0.0, 3.0, 1e-42, 500.0, 1.0, 2.0, 1e30, *(float(1 + each % 7) for each in range(length)), 0.0, 0.0]
    for margin in (-2, 0, 1):
        factor, largest, history = (torch.full((size,), 0.0, device=DEVICE) for size in (1, 1, length))
        at, expected = torch.zeros(1, dtype=torch.int32, device=DEVICE), 7.0
        factor.fill_(expected)
        for count, value in enumerate(found, 1):
            largest.fill_(value)
            next_factor(factor, largest, history, at, torch.float8_e4m3fn, margin)
            most = max(found[max(count - length, 0) : count])
            if most:
                wanted = torch.tensor([448.0]) / torch.tensor([most]) * 2.0**-margin
                expected = wanted.clamp_max(torch.finfo(torch.float32).max).item()
            assert factor.item() == expected and largest.item() == 0 and at.item() == count % length
            assert sorted(history[: min(count, length)].tolist()) == sorted(
                torch.tensor(found[max(count - length, 0) : count]).tolist()
            )


def test_dequantize_refuses_by_name():
    q, unit = tkernels.quantize(torch.ones(3, 4, device=DEVICE))
    with pytest.raises(TypeError, match="dequantize: q is torch.float32"):
        tkernels.dequantize(q.float(), unit)
    with pytest.raises(TypeError, match="scale torch.float64"):
        tkernels.dequantize(q, unit.double())
    with pytest.raises(ValueError, match=r"scale is \(3,\), but must be one number, or .* that is \(3, 1\)"):
        tkernels.dequantize(q, unit[:, 0])
    with pytest.raises(ValueError, match="has no gradient"):
        tkernels.dequantize(q, unit.requires_grad_())


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_transpose_quantized_gives_the_elements_in_one_scale(fp8):
    for shape in ((1, 16), (33, 65), (64, 128), (130, 7), (0, 16), (16, 0)):
        x = spread(shape, torch.float32)
        for scale in ("row", "tensor"):
            q, unit = tkernels.quantize(x, scale, fp8)
            t, largest = transpose_quantized(q, unit)
            assert same_bits((t, largest), transpose_reference(q, unit)), (shape, scale)
            assert t.shape == (shape[1], round_up(shape[0], 16)) and t[:, shape[0] :].float().eq(0).all()
            if scale == "tensor":
                assert torch.equal(t[:, : shape[0]].float(), q.float().t()) and torch.equal(largest, unit)
    q, unit = tkernels.quantize(normal((48, 40), torch.float32, 1, DEVICE), "row", fp8, power_of_two=True)
    t, largest = transpose_quantized(q, unit)
    want = (q.double() * unit.double()).t()
    small = want.abs() < torch.finfo(fp8).tiny * largest.double()
    assert torch.equal((t.double() * largest.double())[~small], want[~small]) and len(unit.unique()) > 1


def test_transpose_quantized_makes_zeros_of_what_has_scale_zero():
    q = tkernels.quantize(spread((20, 24), torch.float32))[0]
    unit = torch.tensor([2.0, 0.0], device=DEVICE).repeat(10).view(-1, 1)
    for scale, kept in ((unit * 0, 0), (unit[1], 0), (unit, 1)):
        t, largest = transpose_quantized(q, scale)
        assert same_bits((t, largest), transpose_reference(q, scale)) and torch.equal(largest, scale.amax())
        assert not t[:, 1::2].float().any() and torch.equal(t[:, :20:2].float(), kept * q[::2].float().t())


def test_quantize_takes_empty_tensors():
    for shape in ((0, 16), (3, 0), (0,), (2, 0, 5)):
        x = torch.empty(shape, device=DEVICE)
        q, unit = tkernels.quantize(x)
        assert q.shape == shape and unit.shape == (*shape[:-1], 1) and (unit == LEAST.value).all()
        q, unit = tkernels.quantize(x, "tensor")
        assert q.shape == shape and unit.shape == () and unit == LEAST.value


@pytest.mark.parametrize("x, options, error, message", [
    ([1.0], {}, TypeError, r"quantize: x=\[1.0\] must be a tensor"),
    (torch.ones(()), {}, ValueError, r"takes x \[..., K\], but x is a scalar"),
    (torch.ones(2, 4).double(), {}, TypeError, "x is torch.float64, but must be float32, float16 or bfloat16"),
    (torch.ones(2, 4).to(torch.float8_e4m3fn), {}, TypeError, "x is torch.float8_e4m3fn, but must be"),
    (torch.ones(2, 4), {"dtype": torch.int8}, TypeError, "dtype=torch.int8 must be torch.float8_e4m3fn or"),
    (torch.ones(2, 4), {"scale": "block"}, ValueError, "scale='block' must be 'row' or 'tensor'"),
    (torch._neg_view(torch.ones(2, 4, device=DEVICE)), {}, ValueError, "x is a negated or conjugated view"),
    (torch.ones(2, 4, device="meta"), {}, ValueError, "x is on meta, but the operation runs on"),
    (torch.ones(2, 4).requires_grad_(), {}, ValueError, r"has no gradient; pass x.detach\(\)"),
    (torch.ones(2, 4), {"gate": torch.ones(2, 4, device=DEVICE).requires_grad_()}, ValueError, "has no gradient"),
    (torch.ones(2, 4), {"activation": "swish"}, ValueError, "activation='swish' is unknown; use None, relu, gelu"),
    (torch.ones(2, 4), {"gate": torch.ones(2, 5, device=DEVICE)}, ValueError, r"gate is torch.float32 \(2, 5\) on"),
    (torch.ones(2, 4), {"gate": torch.ones(2, 4, device=DEVICE).half()}, ValueError, "must be like x, torch.float32"),
    (torch.ones(2, 4), {"gate": 2.0}, TypeError, "quantize: gate=2.0 must be a tensor"),
    (torch.ones(2, 4), {"power_of_two": 2}, TypeError, "quantize: power_of_two=2 must be True or False"),
])  # fmt: skip
def test_quantize_refuses_by_name(x, options, error, message):
    with pytest.raises(error, match=message):
        tkernels.quantize(x if not isinstance(x, torch.Tensor) or x.is_meta or x.is_neg() else x.to(DEVICE), **options)


def test_quantize_under_no_grad_takes_what_wants_a_gradient():
    x = torch.ones(2, 4, device=DEVICE, requires_grad=True)
    with torch.no_grad():
        q, unit = tkernels.quantize(x)
    assert not q.requires_grad and not unit.requires_grad


def test_quantize_dequantize_and_products_of_fp8_within_vmap_ask_for_no_grad_which_helps():
    x, w = (normal((3, 4, 16), torch.float32, seed, device=DEVICE) for seed in (1, 2))
    (q, unit), (w, w_unit) = tkernels.quantize(x), tkernels.quantize(w[0])

    def product(q, unit):
        return tkernels.matmul(q, w, x_scale=unit, w_scale=w_unit)

    calls = (tkernels.quantize, (x,)), (tkernels.dequantize, (q, unit)), (product, (q, unit))
    for function, operands in calls:
        with pytest.raises(ValueError, match=r"no gradient; call under torch.no_grad\(\), as within torch.func no"):
            torch.vmap(function)(*operands)
        with torch.no_grad():
            mapped, whole = torch.vmap(function)(*operands), function(*operands)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(mapped, whole, strict=True)), function


def test_quantize_by_torch_where_a_gpu_has_no_fp8_is_the_same_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(module, "local_calls", LocalCalls())
    monkeypatch.setattr(module, "_takes_fp8", lambda device: False)
    module._say_slow.cache_clear()
    x = spread((5, 40), torch.bfloat16)
    with caplog.at_level(logging.WARNING, "tkernels"), launches() as launched:
        got = tkernels.quantize(x)
        tkernels.quantize(x[:3], "tensor")
    assert not launched and "has no FP8, so torch quantizes" in caplog.text and len(caplog.records) == 1
    monkeypatch.undo()
    assert same_bits(got, tkernels.quantize(x))


def test_quantize_passes_opcheck():
    x = spread((5, 48), torch.bfloat16)
    for options in ((None, "row", torch.float8_e4m3fn, False), (x * 2, "tensor", torch.float8_e5m2, True, "silu")):
        opcheck(torch.ops.tkernels.quantize.default, (x, *options))
    fake = "test_faketensor", "test_aot_dispatch_dynamic"  # the others compare FP8, which torch can't
    opcheck(torch.ops.tkernels.dequantize.default, (*tkernels.quantize(x), torch.bfloat16), test_utils=fake)


def test_transpose_quantized_refuses_scales_that_are_not_one_or_one_a_row():
    q = spread((16, 16), torch.float32).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    for matrix, scale in ((q, torch.ones(5, 1)), (q[0], one), (q, one.half()), (q.float(), one)):
        with pytest.raises(ValueError, match="transpose_quantized: takes a matrix of float8 and float32 scales"):
            transpose_quantized(matrix, scale.to(q.device))
