"""Products of FP8 operands: exact on small integers, within derived limits of fp64 on quantized values."""

from dataclasses import replace

import pytest
import torch
from transports import (
    Operators,
    every_path,
    into_landing,
    multiplied_by,
    poison_workspace,
    poisoned_memory,
    torch_scales_rows,
)

import tkernels
from tkernels import library
from tkernels.activations import ACTIVATIONS, activation_reference
from tkernels.choice import product_way
from tkernels.comm import runtime
from tkernels.configs import FP8, GemmConfig, OverlapConfig
from tkernels.model import Problem, candidates, choose, predict, reject, ways
from tkernels.partials import elements_of, with_scaled_slices
from tkernels.rounding import tolerance
from tkernels.testing.compare import assert_close_to, integers, normal

DEVICE = runtime.device()
E4M3, E5M2 = FP8
BF16 = torch.bfloat16
KINDS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
SHAPES = [(1, 16, 32), (1, 1, 16), (7, 13, 32), (65, 33, 144), (37, 96, 48)]


def powers(rows: int, seed: int, low: int = -3, high: int = 3) -> torch.Tensor:
    """Scales that are powers of two, one for each of `rows` rows; one for all: rows = 0."""
    return (2.0 ** integers(rows or (), torch.float32, seed, low, high)).to(DEVICE)


def quantized(shape, seed: int, dtype=E4M3, by_row: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values in FP8, and their scale."""
    values = normal(shape, torch.float32, seed, device=DEVICE)
    most = values.abs().amax(1, keepdim=True) if by_row else values.abs().amax()
    scale = most / torch.finfo(dtype).max
    return (values / scale).to(dtype), scale


def truth(x, w, x_scale, w_scale, bias=None, activation=None) -> torch.Tensor:
    """In fp64, of the operands as they are quantized."""
    value = (x.double() * x_scale.double().reshape(-1, 1)) @ (w.double() * w_scale.double().reshape(-1, 1)).t()
    return activation_reference(value if bias is None else value + bias.double(), activation)


def assert_near(got, want, x, w, roundings: int):
    """Within the rounding of the result, and of sums in fp32, or on a GPU as its tensor cores add.

    They shift the products of an instruction to the exponent of the largest, and cut off what is more than 13 bits
    below its first. So each of K products and K / 32 sums is off by up to 2^-13 of the largest of them, evenly
    distributed and of either sign: within six standard deviations. x, w: dequantized.
    """
    terms = x.shape[1]
    if got.device.type == "cpu":
        return assert_close_to(got, want, terms=terms + 1, roundings=roundings)
    step = 2.0**-13 * torch.maximum(x.abs().amax() * w.abs().amax(), want.abs().amax())
    allowed = 6 * step * (terms * 33 / 32 / 12) ** 0.5 + roundings * torch.finfo(got.dtype).eps * want.abs()
    assert ((got.double() - want).abs() <= allowed).all(), ((got.double() - want).abs() / allowed).max()


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal to noise, in dB."""
    return float(10 * torch.log10(want.square().sum() / (got.double() - want).square().sum()))


@pytest.fixture(autouse=True)
def skip_where_there_is_none():
    if not runtime.has_fp8():
        pytest.skip("the GPU, or the one whose rules it follows, has no FP8")


@pytest.fixture(params=["kernel", "library"])
def way(request, monkeypatch):
    """Who multiplies, where both can."""
    multiplied_by(monkeypatch, request.param)
    return request.param


def one_or_rows(seed: int, M: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of x and of w: one for all or one a row, in each combination and in each of their shapes."""
    x_scale = powers(M, seed).view((M,) if seed % 8 > 3 else (M, 1)) if seed % 2 else powers(0, seed)
    w_scale = powers(N, seed + 1).view([(N,), (N, 1), (1, N)][seed % 3]) if seed // 2 % 2 else powers(0, seed + 1)
    return x_scale, w_scale.view(1) if w_scale.dim() == 0 and seed % 3 else w_scale


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_matmul_of_integers_is_exact_with_scales_that_are_powers_of_two(way, kinds):
    for seed, (M, N, K) in enumerate(SHAPES):
        x, w = integers((M, K), kinds[0], seed, -8, 8, DEVICE), integers((N, K), kinds[1], seed + 100, -4, 4, DEVICE)
        bias = integers(N, BF16, seed + 200, device=DEVICE)
        x_scale, w_scale = one_or_rows(seed, M, N)
        want = truth(x, w, x_scale, w_scale, bias)
        for out, fast in ((None, True), (torch.float32, False), (torch.float16, True)):
            scales = {"x_scale": x_scale, "w_scale": w_scale}
            got = tkernels.matmul(x, w, bias, **scales, out_dtype=out, fast_accum=fast)
            assert got.dtype == (out or BF16) and torch.equal(got, want.to(got.dtype)), (M, N, K, out)
    wrong = truth(x, w, x_scale, 2 * w_scale, bias)
    assert not torch.equal(got.double(), wrong)


@pytest.mark.parametrize("by_row", [True, False], ids=["rows", "tensor"])
def test_matmul_of_quantized_values_is_within_derived_limits(way, by_row):
    M, N, K = 40, 48, 272
    (x, x_scale), (w, w_scale) = quantized((M, K), 1, by_row=by_row), quantized((N, K), 2, by_row=by_row)
    for seed, activation in enumerate(ACTIVATIONS):
        bias = normal(N, BF16, seed, device=DEVICE)
        got = tkernels.matmul(x, w, bias, activation, x_scale=x_scale, w_scale=w_scale)
        want = truth(x, w, x_scale, w_scale, bias, activation)
        assert sqnr(got, want) > 50
        # Torch rounds once more, before an activation.
        assert_near(got, want, x.double() * x_scale, w.double() * w_scale, roundings=1 if way == "kernel" else 2)
    exact = tkernels.matmul(x, w, x_scale=x_scale, w_scale=w_scale, out_dtype=torch.float32, fast_accum=False)
    assert sqnr(exact, truth(x, w, x_scale, w_scale)) > (100 if DEVICE.type == "cpu" else 70)
    # And FP8 itself is as near as it can be.
    full = normal((M, K), torch.float32, 1, device=DEVICE).double() @ normal((N, K), torch.float64, 2, DEVICE).t()
    assert 25 < sqnr(exact, full) < 35


def test_matmul_scales_before_bias_and_activation_and_repeats_its_bits():
    x, w = integers((33, 32), E4M3, 1, -8, 8, DEVICE), integers((24, 32), E4M3, 2, -8, 8, DEVICE)
    x_scale, w_scale, bias = powers(33, 3), powers(24, 4), integers(24, torch.float32, 5, -64, 64, DEVICE)
    options = {"x_scale": x_scale, "w_scale": w_scale, "out_dtype": torch.float32}
    got = tkernels.matmul(x, w, bias, "relu", **options)
    assert torch.equal(got, truth(x, w, x_scale, w_scale, bias, "relu").float())
    assert torch.equal(got, tkernels.matmul(x, w, bias, "relu", **options))
    out = torch.full((33, 24), torch.nan, device=DEVICE)
    assert tkernels.matmul(x, w, bias, "relu", out=out, **options) is out and torch.equal(out, got)
    config = GemmConfig(32, 32, 32, split=1)
    assert torch.equal(tkernels.matmul(x, w, bias, "relu", config=config, **options), got)


def test_matmul_by_torch_adds_the_bias_itself_where_cublas_can_not(monkeypatch):
    """As to products that cuBLAS would split along a deep K: 64 x 64 x 39744 with a bias, on a GPU without help."""
    depth = 39744 if DEVICE.type == "cuda" else 144
    x, w = integers((64, depth), E4M3, 1, -8, 8, DEVICE), integers((64, depth), E4M3, 2, -8, 8, DEVICE)
    x_scale, w_scale, bias = powers(64, 3), powers(64, 4), integers(64, BF16, 5, -8, 8, DEVICE)
    calls, multiply = [], torch._scaled_mm

    def limited(*operands, bias=None, **options):
        calls.append(bias is not None)
        if bias is not None and DEVICE.type == "cpu":
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`")
        return multiply(*operands, bias=bias, **options)

    if not torch_scales_rows():
        pytest.skip("torch's CPU build stands in for cuBLAS")
    monkeypatch.setattr(torch, "_scaled_mm", limited)
    monkeypatch.setattr(library, "_on_host", lambda x: False)
    multiplied_by(monkeypatch, "library")
    for _ in range(2):
        got = tkernels.matmul(x, w, bias, "relu", x_scale=x_scale, w_scale=w_scale)
        total = truth(x, w, x_scale, w_scale)
        want = (total + bias.double()).relu()  # of a sum that has been rounded, and is rounded once more
        assert ((got.double() - want).abs() <= 2.0**-8 * (total.abs() + want)).all()
    assert calls == [True, False, False]  # it is tried once


def test_matmul_with_zero_scales_nan_and_sizes_of_zero(way):
    x, w = integers((16, 32), E4M3, 1, 1, 8, DEVICE), integers((16, 32), E4M3, 2, 1, 8, DEVICE)
    zero = torch.zeros(16, device=DEVICE)
    assert tkernels.matmul(x, w, x_scale=zero, w_scale=powers(16, 3)).eq(0).all()
    x[3, 5] = torch.nan
    assert x.isnan().sum() == 1
    got = tkernels.matmul(x, w, x_scale=powers(16, 3), w_scale=powers(0, 4))
    assert got[3].isnan().all() and got.isnan().sum() == 16
    got = tkernels.matmul(x[:2], w, x_scale=torch.tensor(torch.nan, device=DEVICE), w_scale=powers(0, 4))
    assert got.isnan().all()
    for M, N, K in ((0, 16, 16), (16, 0, 16), (3, 16, 0)):
        got = tkernels.matmul(x.new_zeros(M, K), x.new_zeros(N, K), x_scale=powers(M, 1), w_scale=powers(N, 2))
        assert got.shape == (M, N) and got.dtype == BF16 and got.eq(0).all()


@pytest.mark.parametrize("fast_accum", [True, False], ids=["fast", "precise"])
def test_matmul_of_a_deep_k_is_too_small_by_no_more_than_sums_lose(way, fast_accum):
    """Tensor cores cut what lies 13 bits below a sum's first off it, half a bit on average, after each 32 of K.

    That is up to 2^-14 of the sum, towards zero, in each of K / 32 sums; or in 4 where each 128 are added up in fp32.
    What they cut off products is of either sign: within six standard deviations.
    """
    M, N, K = 24, 40, 8192
    (x, x_scale), (w, w_scale) = quantized((M, K), 1), quantized((N, K), 2)
    scales = {"x_scale": x_scale, "w_scale": w_scale}
    got = tkernels.matmul(x, w, **scales, out_dtype=torch.float32, fast_accum=fast_accum)
    want = truth(x, w, x_scale, w_scale)
    bias = 1 - (got.double() * want).sum() / want.square().sum()
    cut = 2.0**-13 * want.abs().amax() * (K / 12) ** 0.5 if DEVICE.type == "cuda" else 2.0**-22 * want.abs().amax()
    chance = 6 * cut / want.square().sum().sqrt()
    assert -chance <= bias <= (K if fast_accum else 128) / 32 * 2.0**-14 + chance


def test_matmul_takes_leading_dimensions_with_a_scale_a_row():
    x, w = integers((2, 3, 5, 16), E4M3, 1, -8, 8, DEVICE), integers((24, 16), E4M3, 2, -8, 8, DEVICE)
    x_scale, w_scale = powers(30, 3).view(2, 3, 5), powers(24, 4)
    want = truth(x.view(30, 16), w, x_scale, w_scale).to(BF16).view(2, 3, 5, 24)
    for each in (x_scale, x_scale.unsqueeze(-1)):
        assert torch.equal(tkernels.matmul(x, w, x_scale=each, w_scale=w_scale), want)
    # A scale of a column of a larger tensor is read where it lies, or copied.
    both = torch.stack([powers(24, 4), powers(24, 5)], 1)
    assert torch.equal(tkernels.matmul(x, w, x_scale=x_scale, w_scale=both[:, 0]), want)
    with pytest.raises(ValueError, match=r"x_scale is \(2, 3\), but must be one number, or one a row"):
        tkernels.matmul(x, w, x_scale=x_scale[..., 0], w_scale=w_scale)


@pytest.mark.parametrize("by_row", [True, False], ids=["rows", "tensor"])
def test_matmul_takes_scales_at_any_address(way, by_row):
    """One of many scales that lie side by side, or rows of more: cuBLAS takes one at multiples of 16 bytes alone."""
    M, N, K = 24, 64, 160
    x, w = integers((M, K), E4M3, 1, -8, 8, DEVICE), integers((N, K), E4M3, 2, -8, 8, DEVICE)
    for offset in range(5):
        x_scale, w_scale = (powers(6 + rows, 3 + rows)[offset:] for rows in (M, N))
        x_scale, w_scale = (x_scale[:M], w_scale[:N]) if by_row else (x_scale[0], w_scale[0])
        got = tkernels.matmul(x, w, x_scale=x_scale, w_scale=w_scale)
        assert torch.equal(got, truth(x, w, x_scale, w_scale).to(BF16)), offset


def test_matmul_refuses_an_out_that_overlaps_a_scale():
    x, out = torch.zeros(32, 32, device=DEVICE).to(E4M3), torch.ones(32, 32, device=DEVICE)
    with pytest.raises(ValueError, match="matmul: out overlaps w_scale"):
        tkernels.matmul(x, x, x_scale=torch.ones(1, device=DEVICE), w_scale=out[0], out=out, out_dtype=torch.float32)


def test_matmul_reads_scales_on_the_device_alone():
    """A call like an earlier one looks at no value: it allocates its result, and launches."""
    x, w = integers((16, 32), E4M3, 1, -8, 8, DEVICE), integers((16, 32), E4M3, 2, -8, 8, DEVICE)
    x_scale, w_scale = powers(16, 3), powers(0, 4)
    config = GemmConfig(32, 32, 32)
    first = tkernels.matmul(x, w, config=config, x_scale=x_scale, w_scale=w_scale)
    with Operators() as operators:
        again = tkernels.matmul(x, w, config=config, x_scale=2 * x_scale, w_scale=w_scale)
    assert torch.equal(again, 2 * first)
    assert operators.names == ["mul", "new_empty"]


def test_matmul_is_an_operator_that_torch_compile_sees():
    x, w = integers((16, 32), E4M3, 1, -8, 8, DEVICE), integers((24, 32), E4M3, 2, -8, 8, DEVICE)
    bias, scales = integers(24, BF16, 3, device=DEVICE), (powers(16, 4), powers(24, 5))

    def product(x, w, x_scale, w_scale):
        return tkernels.matmul(x, w, bias, "relu", x_scale=x_scale, w_scale=w_scale) + 1

    eager = product(x, w, *scales)
    arguments = x, w, bias, *scales, "relu", torch.float32, True
    checks = "test_faketensor", "test_aot_dispatch_dynamic"  # the third compares values of FP8, which torch can't
    torch.library.opcheck(torch.ops.tkernels.matmul.default, arguments, test_utils=checks)
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w, *scales), eager)


def test_matmul_refuses_by_name_what_it_does_not_take():
    x, w = integers((16, 32), E4M3, 1, -8, 8, DEVICE), integers((16, 32), E4M3, 2, -8, 8, DEVICE)
    one = torch.ones(1, device=DEVICE)
    for operands, options, error, words in (
        ((x, w), {}, TypeError, "float8 operands come with x_scale and w_scale"),
        ((x, w), {"x_scale": one}, TypeError, "float8 operands come with x_scale and w_scale"),
        ((x, w), {"x_scale": one, "w_scale": 2.0}, TypeError, "w_scale=2.0 must be a tensor"),
        ((x.to(BF16), w.to(BF16)), {"x_scale": one, "w_scale": one}, TypeError, "are of float8 operands, but x is"),
        ((x, w.to(BF16)), {"x_scale": one, "w_scale": one}, TypeError, "x is .*e4m3fn and w is torch.bfloat16"),
        ((x.to(E5M2), w.to(E5M2)), {"x_scale": one, "w_scale": one}, TypeError, "both torch.float8_e5m2"),
        ((x[:, :24], w[:, :24]), {"x_scale": one, "w_scale": one}, ValueError, "x is .* pad K with zeros"),
        ((x, w.t().contiguous().t()), {"x_scale": one, "w_scale": one}, ValueError, r"w is .* pass w.contiguous\(\)"),
        ((x[:, 8:24], w[:, :16]), {"x_scale": one, "w_scale": one}, ValueError, r"pass x.contiguous\(\)"),
        ((x, w), {"x_scale": one.double(), "w_scale": one}, TypeError, "x_scale is torch.float64"),
        ((x, w), {"x_scale": one.expand(3), "w_scale": one}, ValueError, r"x_scale is \(3,\), but must be one"),
        ((x, w), {"x_scale": one, "w_scale": one.expand(16, 2)}, ValueError, r"w_scale is \(16, 2\)"),
        ((x, w), {"x_scale": one, "w_scale": one, "out_dtype": E4M3}, TypeError, "out_dtype=torch.float8_e4m3fn"),
        ((x, w), {"x_scale": one, "w_scale": one, "fast_accum": "no"}, TypeError, "fast_accum='no' must be True or"),
    ):
        with pytest.raises(error, match=words):
            tkernels.matmul(*operands, **options)
    with pytest.raises(ValueError, match="products of float8 operands have no gradient"):
        tkernels.matmul(x, w, x_scale=one, w_scale=one.clone().requires_grad_())


@pytest.mark.parametrize("changes, way, tiles", [
    ({}, "library", None),
    ({"M": 2048, "N": 12288, "K": 24576}, "kernel", (128, 256, 128)),
    ({"activation": "silu", "separate": True}, "kernel", (128, 256, 128)),
    ({"precision": "promoted"}, "library", None),
    ({"N": 8200, "library": False, "staged": ()}, "kernel", (128, 256, 128)),
    ({"N": 8200, "library": False, "staged": (), "precision": "promoted"}, "kernel", (128, 128, 128)),
    ({"N": 8191, "library": False, "stored_by_tma": False}, "kernel", (128, 256, 128)),
    ({"M": 4}, "library", None),
])  # fmt: skip
def test_product_way_of_fp8(changes, way, tiles):
    problem = Problem("matmul", **{"M": 8192, "N": 8192, "K": 8192, "dtype": E4M3, "stored": BF16} | changes)
    taken, config = product_way(problem)
    assert taken == way
    assert config is None if tiles is None else (config.block_m, config.block_n, config.block_k) == tiles


# Operations of several ranks.

UNEVEN = {2: [((33, 32), 40, 48), ((0, 65), 33, 64), ((1, 0), 16, 32), ((1, 1), 8, 16)], 3: [((33, 0, 5), 24, 32)]}


def sharded(ctx, rows, N, K, seed, by_row=True):
    """This rank's x_shard_m and w with their scales, and bias, different on every rank; and x and its scales whole."""
    own = slice(sum(rows[: ctx.rank]), sum(rows[: ctx.rank + 1]))
    x = integers((sum(rows), K), E4M3, seed, -8, 8, ctx.device)
    x_scale = powers(sum(rows), seed + 1, -2, 2).to(ctx.device)
    if not by_row:  # one a shard, which differs between them
        x_scale = torch.cat([x_scale.new_full((count,), 2.0 ** (rank - 1)) for rank, count in enumerate(rows)])
    w, w_scale = integers((N, K), E4M3, seed + 2 + ctx.rank, -8, 8, ctx.device), powers(N, seed + 5 + ctx.rank, -2, 2)
    bias = integers(N, BF16, seed + 10 + ctx.rank, device=ctx.device)
    own_scale = x_scale[own].view(-1, 1) if by_row else x_scale.new_full((), 2.0 ** (ctx.rank - 1))
    return x[own], own_scale, w, w_scale, bias, x, x_scale.view(-1, 1)


@pytest.mark.ranks(2, 3)
@every_path
def test_all_gather_matmul_carries_the_scales_of_each_row_or_shard(ctx, path):
    for seed, (rows, N, K) in enumerate(UNEVEN[ctx.size]):
        for by_row in (True, False):
            x_shard, own_scale, w, w_scale, bias, x, x_scale = sharded(ctx, rows, N, K, seed, by_row)
            poison_workspace(ctx)
            scales = {"x_scale": own_scale, "w_scale": w_scale}
            with poisoned_memory():
                y, gathered, gathered_scales = tkernels.all_gather_matmul(
                    x_shard, w, bias, "relu", True, **scales, rows=rows, path=path, ctx=ctx
                )
                plain = tkernels.all_gather_matmul(
                    x_shard, w, **scales, rows=rows, path=path, ctx=ctx, out_dtype=torch.float32, fast_accum=False
                )
            assert torch.equal(y, truth(x, w, x_scale, w_scale, bias, "relu").to(BF16)), (rows, by_row)
            assert torch.equal(plain, truth(x, w, x_scale, w_scale).float())
            assert torch.equal(gathered.float(), x.float()) and torch.equal(gathered_scales, x_scale)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_comm", [0, 1], ids=["copies", "landing"])
def test_all_gather_matmul_carries_scales_to_where_copies_go(ctx, num_comm):
    for seed, rows in enumerate([(70, 66), (0, 33), (1, 1)]):
        x_shard, own_scale, w, w_scale, bias, x, x_scale = sharded(ctx, rows, 40, 48, seed)
        poison_workspace(ctx)
        options = {"x_scale": own_scale, "w_scale": w_scale, "rows": rows, "return_gathered": "borrowed"}
        results = into_landing(num_comm, ctx, "all_gather_matmul", x_shard, w, bias, **options)
        y, gathered, gathered_scales = (each.clone() for each in results)
        assert torch.equal(y, truth(x, w, x_scale, w_scale, bias).to(BF16)), rows
        assert torch.equal(gathered.float(), x.float()) and torch.equal(gathered_scales, x_scale)


@pytest.mark.ranks(2, 3)
@every_path
@pytest.mark.parametrize("gather", [False, True], ids=["matmul_reduce_scatter", "matmul_all_reduce"])
def test_reductions_scale_each_part_of_k_before_they_send_it(ctx, path, gather):
    for seed, (rows, N, K) in enumerate(UNEVEN[ctx.size]):
        M, mine = sum(rows), 100 * (seed + 1) + 10 * ctx.rank
        x, w = integers((M, K), E4M3, mine, -8, 8, ctx.device), integers((N, K), E4M3, mine + 1, -8, 8, ctx.device)
        x_scale, w_scale = (each.to(ctx.device) for each in (powers(M, mine + 2, -2, 2), powers(N, mine + 3, -2, 2)))
        if seed % 2:
            x_scale, w_scale = x_scale.new_full((1,), 2.0**ctx.rank), w_scale.new_full((), 0.5)
        bias = integers(N, BF16, seed, device=ctx.device)
        want = sum(ctx.group.gather(truth(x, w, x_scale, w_scale).cpu())).to(ctx.device)
        want = (want + bias.double()).relu()
        poison_workspace(ctx)
        options = {"x_scale": x_scale, "w_scale": w_scale, "path": path, "ctx": ctx, "wire_dtype": torch.float32}
        if gather:
            y = tkernels.matmul_all_reduce(x, w, bias, "relu", **options)
        else:
            want = want.split(rows)[ctx.rank]
            y = tkernels.matmul_reduce_scatter(x, w, bias, "relu", rows=rows, **options)
        assert torch.equal(y, want.to(BF16)), (rows, N, K)


@pytest.mark.ranks(2)
def test_operators_are_seen_by_torch_compile_and_take_leading_dimensions(ctx):
    x, w = integers((3, 8, 32), E4M3, ctx.rank, -8, 8, ctx.device), integers((16, 32), E4M3, 7, -8, 8, ctx.device)
    x_scale, w_scale = powers(24, 8 + ctx.rank).view(3, 8, 1), powers(16, 9)

    def products(x, w, x_scale, w_scale):
        options = {"x_scale": x_scale, "w_scale": w_scale, "ctx": ctx}
        gathered = tkernels.all_gather_matmul(x, w, None, None, True, gather_dim=1, **options)
        scattered = tkernels.matmul_reduce_scatter(x, w, scatter_dim=1, out_dtype=torch.float32, **options)
        return *gathered, scattered, tkernels.matmul_all_reduce(x, w, activation="relu", **options)

    eager = products(x, w, x_scale, w_scale)
    assert [tuple(each.shape) for each in eager] == [(3, 16, 16), (3, 16, 32), (3, 16, 1), (3, 4, 16), (3, 8, 16)]
    parts = [torch.stack(ctx.group.gather(each.float().cpu()), 1).view(3, 16, -1).double() for each in (x, x_scale)]
    want = truth(parts[0].view(48, 32), w.cpu(), parts[1].view(48), w_scale.cpu()).view(3, 16, 16).to(ctx.device)
    assert torch.equal(eager[0], want.to(BF16)) and torch.equal(eager[1].double().cpu(), parts[0])
    summed = want[:, :8] + want[:, 8:]
    summed = summed.relu()
    assert sqnr(eager[3].relu(), summed[:, 4 * ctx.rank : 4 * ctx.rank + 4]) > 45 < sqnr(eager[4], summed)
    compiled = torch.compile(products, backend="aot_eager", fullgraph=True)(x, w, x_scale, w_scale)
    assert all(map(torch.equal, eager[:1] + eager[2:], compiled[:1] + compiled[2:]))
    assert torch.equal(eager[1].float(), compiled[1].float())


@pytest.mark.ranks(2)
def test_all_gather_matmul_whose_scales_need_a_workspace_that_its_rows_do_not(ctx):
    x, w = (integers((rows, 64), E4M3, 1, -8, 8, ctx.device) for rows in (8192, 16))
    scales = {"x_scale": powers(8192, 2 + ctx.rank).to(ctx.device), "w_scale": torch.ones(16, device=ctx.device)}
    with tkernels.init(heap_bytes=16 << 20, timeout_s=20) as small:  # which has no room for packets in advance
        gathered = tkernels.all_gather_matmul(x, w, None, None, True, path="plain", ctx=small, **scales)[1:]
        assert torch.equal(gathered[0].float(), torch.cat([x, x]).float())
        want = torch.cat([powers(8192, 2 + rank) for rank in range(2)])
        assert torch.equal(gathered[1].view(-1).cpu(), want.cpu())
        small.check()


@pytest.mark.ranks(2)
def test_operations_refuse_by_name_what_they_do_not_take(ctx):
    x, w = integers((16, 32), E4M3, 1, device=ctx.device), integers((16, 32), E4M3, 2, device=ctx.device)
    scales = {"x_scale": torch.ones(1, device=ctx.device), "w_scale": torch.ones(1, device=ctx.device), "ctx": ctx}
    with pytest.raises(TypeError, match="take one weight, not a list"):
        tkernels.all_gather_matmul(x, [w, w], **scales)
    with pytest.raises(TypeError, match="float8 operands come with x_scale and w_scale"):
        tkernels.matmul_all_reduce(x, w, ctx=ctx)
    with pytest.raises(TypeError, match="wire_dtype=torch.float16 must be torch.bfloat16 or float32"):
        tkernels.matmul_reduce_scatter(x, w, wire_dtype=torch.float16, **scales)
    for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        with pytest.raises(ValueError, match=f"{name}: products of float8 operands have no gradient"):
            getattr(tkernels, name)(x, w, torch.ones(16, device=ctx.device, requires_grad=True), **scales)


@pytest.mark.ranks(2)
@every_path
def test_operations_take_sizes_of_zero(ctx, path):
    def fp8(rows, K, seed):
        return integers((rows, K), E4M3, seed, -8, 8, ctx.device), powers(rows, seed + 1, -2, 2).to(ctx.device)

    for M, N, K in ((5, 0, 16), (5, 8 * ctx.rank, 16), (0, 8, 16), (5, 8, 0)):
        (x, x_scale), (w, w_scale) = fp8(M, K, 1), fp8(N, K, 2)
        bias = integers(N, BF16, 3, device=ctx.device)
        scales = {"x_scale": x_scale, "w_scale": w_scale, "path": path, "ctx": ctx}
        y, gathered, gathered_scales = tkernels.all_gather_matmul(x, w, bias, None, True, **scales)
        want = truth(x, w, x_scale, w_scale, bias).to(BF16)
        assert torch.equal(y, torch.cat([want, want])) and gathered.shape == (2 * M, K)
        if K:
            assert torch.equal(gathered_scales, x_scale.reshape(-1).expand(M).repeat(2).view(-1, 1))
    for M, N, K in ((4, 0, 16), (0, 8, 16), (4, 8, 0), (4, 8, 16 * ctx.rank)):
        (x, x_scale), (w, w_scale) = fp8(M, K, 4 + ctx.rank), fp8(N, K, 6 + ctx.rank)
        bias = integers(N, BF16, 8, device=ctx.device)
        want = sum(ctx.group.gather(truth(x, w, x_scale, w_scale).cpu())).to(ctx.device) + bias.double()
        scales = {"x_scale": x_scale, "w_scale": w_scale, "path": path, "ctx": ctx, "wire_dtype": torch.float32}
        assert torch.equal(tkernels.matmul_all_reduce(x, w, bias, **scales), want.to(BF16)), (M, N, K)
        got = tkernels.matmul_reduce_scatter(x, w, bias, **scales)
        assert torch.equal(got, want.to(BF16).chunk(2)[ctx.rank] if M else want.to(BF16)), (M, N, K)


FAULTS = [  # of rank 0: the operand, whether it has one scale for all, a scale of it, and an element
    ("x", False, 0.0, 1.0), ("w", True, 0.0, 1.0), ("x", True, torch.nan, 1.0), ("w", False, torch.nan, 1.0),
    ("x", False, 0.0, torch.nan), ("w", True, 1.0, torch.nan),
]  # fmt: skip


def faulty(ctx, M, N, K):
    """For each fault: its name, x [M, K], w [N, K] and their scales; they differ from rank to rank."""
    for seed, (operand, alone, scale, element) in enumerate(FAULTS):
        x, w = (integers((rows, K), E4M3, 2 * seed + ctx.rank, -8, 8, ctx.device) for rows in (M, N))
        x_scale, w_scale = (powers(rows, seed + 7 * ctx.rank, -2, 2).view(-1, 1) for rows in (M, N))
        if ctx.rank == 0:
            values, scales = (x, x_scale) if operand == "x" else (w, w_scale)
            values[2, 5], scales[slice(None) if alone else 2] = element, scale
        if alone:
            x_scale, w_scale = (x_scale[0], w_scale) if operand == "x" else (x_scale, w_scale[0])
        yield f"{operand} with scale {scale} and element {element}", x, w, x_scale, w_scale


def assert_same(got, want, about: str):
    """Bit for bit, with NaN in the same places."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{about}: {text}")


@pytest.mark.ranks(2)
@every_path
def test_all_gather_matmul_of_zero_scales_and_nan_is_as_in_fp64(ctx, path):
    """What is NaN on one rank stays in its own rows, or its own columns."""
    for about, x, w, x_scale, w_scale in faulty(ctx, 5, 24, 32):
        bias = integers(24, BF16, 1, device=ctx.device)
        scales = {"x_scale": x_scale, "w_scale": w_scale, "path": path, "ctx": ctx}
        y, gathered, gathered_scales = tkernels.all_gather_matmul(x, w, bias, None, True, **scales)
        parts = zip(*(ctx.group.gather(each.float().cpu()) for each in (x, x_scale.expand(5, 1))), strict=True)
        whole, whole_scales = (torch.cat(each).to(ctx.device) for each in zip(*parts, strict=True))
        assert_same(y, truth(whole, w, whole_scales, w_scale.expand(24, 1), bias).to(BF16), about)
        assert_same(gathered.float(), whole, about)
        assert_same(gathered_scales, whole_scales, about)
    ctx.check()


@pytest.mark.ranks(2)
@every_path
@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_reductions_of_zero_scales_and_nan_are_as_in_fp64(ctx, path, name):
    """A part of zeros leaves the other rank's; NaN reaches the sum of its row or its column alone."""
    for about, x, w, x_scale, w_scale in faulty(ctx, 6, 24, 32):
        bias = integers(24, BF16, 1, device=ctx.device)
        parts = ctx.group.gather(truth(x, w, x_scale.expand(6, 1), w_scale.expand(24, 1)).cpu())
        want = (sum(parts).to(ctx.device) + bias.double()).to(BF16)
        options = {"x_scale": x_scale, "w_scale": w_scale, "path": path, "ctx": ctx, "wire_dtype": torch.float32}
        y = getattr(tkernels, name)(x, w, bias, **options)
        assert_same(y, want.chunk(2)[ctx.rank] if name == "matmul_reduce_scatter" else want, about)
    ctx.check()


@pytest.mark.ranks(2)
@every_path
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_operations_give_results_in_float16(ctx, path, name):
    """Integers of 11 bits, which bf16 can't hold."""
    x = integers((6, 48), E4M3, 1 + ctx.rank, -8, 8, ctx.device)
    w, bias = (
        integers((24, 48), E4M3, 5 + ctx.rank, -8, 8, ctx.device),
        integers(24, torch.float16, 9, -4, 4, ctx.device),
    )
    one = torch.ones(1, device=ctx.device)
    options = {"x_scale": one, "w_scale": one, "out_dtype": torch.float16, "path": path, "ctx": ctx}
    if name == "all_gather_matmul":
        want = truth(torch.cat([each.to(ctx.device) for each in ctx.group.gather(x.float().cpu())]), w, one, one, bias)
    else:
        options["wire_dtype"] = torch.float32
        want = sum(ctx.group.gather(truth(x, w, one, one).cpu())).to(ctx.device) + bias.double()
        want = want.chunk(2)[ctx.rank] if name == "matmul_reduce_scatter" else want
    assert torch.equal(want.half().double(), want) and not torch.equal(want.to(BF16).double(), want)
    y = getattr(tkernels, name)(x, w, bias, **options)
    assert y.dtype == torch.float16 and torch.equal(y.double(), want)
    ctx.check()


ON_WIRE = {"wire_dtype": E4M3}
TILES = GemmConfig(32, 128, 32, group_m=2, split=1)
SENDERS = [  # by rule, by programs into the landing, by copies, and in tiles of two slices
    None,
    OverlapConfig(TILES, 32, 1, landing=True),
    OverlapConfig(TILES, 32, 0),
    OverlapConfig(GemmConfig(32, 256, 32, group_m=2, split=2), 16, 2),
]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_reductions_in_fp8_on_the_wire_are_exact_on_what_it_holds(ctx, name):
    """Partial sums are integers up to 16, of 4 bits, times powers of two."""
    scatters = name == "matmul_reduce_scatter"
    sizes = ((33, 31, 0), 130), ((1, 0, 9), 24), ((20, 5, 7), 257), ((40, 8, 1), 300)
    for (rows, N), config in zip(sizes, SENDERS, strict=True):
        rows, fp8 = rows[: ctx.size], N % 2
        x = integers((sum(rows), 16), BF16, 1 + ctx.rank, -1, 1, ctx.device)
        w, bias = integers((N, 16), BF16, 5 + ctx.rank, -1, 1, ctx.device), integers(N, BF16, 9, device=ctx.device)
        x_scale, w_scale = (powers(count, 11 + ctx.rank, -2, 2) for count in (sum(rows), N))
        options = {"x_scale": x_scale, "w_scale": w_scale} if fp8 else {}
        scales = options.values() if fp8 else (torch.ones(1, device=ctx.device),) * 2
        want = sum(ctx.group.gather(truth(x, w, *scales).cpu())).to(ctx.device) + bias
        x, w = (x.to(E4M3), w.to(E4M3)) if fp8 else (x, w)
        poison_workspace(ctx)
        options |= {"config": config, "out_dtype": torch.float32, "ctx": ctx, **({"rows": rows} if scatters else {})}
        with torch.no_grad(), poisoned_memory():
            y = getattr(tkernels, name)(x, w, bias, "relu", **ON_WIRE, **options)
        want = want.relu().float()
        assert torch.equal(y, want.split(rows)[ctx.rank] if scatters else want), (rows, N)
    ctx.check()


@pytest.mark.ranks(2)
def test_reductions_in_fp8_on_the_wire_err_by_what_peers_partial_sums_are_rounded_by(ctx):
    M, N, K = 24, 200, 48
    x, w = normal((M, K), BF16, 1 + ctx.rank, ctx.device), normal((N, K), BF16, 5 + ctx.rank, ctx.device)
    part = x.double() @ w.double().t()
    parts = [each.to(ctx.device) for each in ctx.group.gather(part.cpu())]
    half_steps = []
    for each in parts:
        most = torch.cat([block.abs().amax(1, keepdim=True).expand_as(block) for block in each.split(128, 1)], 1)
        half_steps.append(torch.maximum(each.abs() / 16, most * 2.0**-17))
    own, x = slice(12 * ctx.rank, 12 * ctx.rank + 12), x.requires_grad_()
    for wire in (ON_WIRE, {}):
        y = tkernels.matmul_reduce_scatter(x, w, out_dtype=torch.float32, ctx=ctx, **wire)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        allowed = half_steps[1 - ctx.rank][own] if wire else sum(parts)[own].abs() * 0
        atol, rtol = tolerance(torch.float32, 2 * K)
        error = (y.double() - sum(parts)[own]).abs()
        within = error <= allowed * (1 + 2.0**-20) + atol + rtol * y.double().abs()
        if wire:
            assert within.all() and (error > allowed / 2).any() and 28 < sqnr(y.detach(), sum(parts)[own]) < 40
            gradient = dx
        assert torch.equal(dx, gradient)
    y = tkernels.matmul_all_reduce(x.detach(), w, out_dtype=torch.float32, ctx=ctx, **ON_WIRE)
    assert all(torch.equal(y.cpu(), each) for each in ctx.group.gather(y.cpu()))
    allowed = torch.cat([half_steps[1][:12], half_steps[0][12:]])
    assert ((y.double() - sum(parts)).abs() <= allowed * (1 + 2.0**-20) + atol + rtol * y.double().abs()).all()
    ctx.check()


@pytest.mark.ranks(2)
def test_reductions_in_fp8_on_the_wire_keep_zeros_and_turn_what_is_not_finite_into_nan(ctx):
    x, w = torch.zeros(8, 16, dtype=BF16, device=ctx.device), torch.zeros(150, 16, dtype=BF16, device=ctx.device)
    x[::2, 0], w[:, 0] = 1, integers(150, BF16, 1, 1, 8, ctx.device)
    if ctx.rank == 0:
        w[140, 0], w[3, 0], x[6] = torch.inf, torch.nan, torch.nan
    clean = w.clone().nan_to_num_(0, 0)
    for rank, y in enumerate(ctx.group.gather(tkernels.matmul_reduce_scatter(x, w, ctx=ctx, **ON_WIRE).cpu())):
        clean_parts = ctx.group.gather(clean[:, 0].cpu().double())
        usual = torch.ones(150).index_fill(0, torch.tensor([3, 140]), 0).bool()
        assert not y[1::2][:, usual].any(), "rows of zeros"
        assert torch.equal(y[0, usual].double(), sum(clean_parts)[usual])
        assert y[0, 3].isnan() and (y[0, 140].isinf() if rank == 0 else y[0, 140].isnan())
        assert y[2].isnan().all() if rank == 1 else torch.equal(y[2, usual], y[0, usual])
    ctx.check()


@pytest.mark.ranks(2)
def test_reductions_in_fp8_on_the_wire_refuse_by_name(ctx, monkeypatch):
    x, config = torch.ones(4, 16, dtype=BF16, device=ctx.device), OverlapConfig(TILES, 32, 1)
    for name in ("matmul_reduce_scatter", "matmul_all_reduce"):
        for options, error, words in (
            ({"path": "plain"}, ValueError, "is sent by the fused kernel alone"),
            ({"path": "fast"}, ValueError, "path='fast' is unknown"),
            ({"wire_dtype": E5M2}, TypeError, "wire_dtype=torch.float8_e5m2: .* in torch.float8_e4m3fn alone"),
            ({"config": replace(config, gemm=replace(TILES, split=2))}, ValueError, "slices of 128 columns"),
            ({"config": replace(config, num_comm=0, interleaved=True)}, ValueError, "and interleaved=True"),
        ):
            with pytest.raises(error, match=f"{name}: .*{words}"):
                getattr(tkernels, name)(x, x, ctx=ctx, **(ON_WIRE | options))
        with pytest.raises(TypeError, match="is for bfloat16, float16 or float8 operands, but x is torch.float32"):
            getattr(tkernels, name)(x.float(), x.float(), ctx=ctx, **ON_WIRE)
    monkeypatch.setattr(runtime, "has_fp8", lambda: False)
    with pytest.raises(TypeError, match=f"wire_dtype={E4M3}: .* has no float8 arithmetic; leave it out"):
        tkernels.matmul_reduce_scatter(x[:2], x, ctx=ctx, **ON_WIRE)
    ctx.check()


def test_tiles_of_fp8_on_the_wire_have_slices_of_128_columns():
    for M, N, layout in ((8192, 8192, "TN"), (64, 8192, "TN"), (8192, 96, "TN"), (8192, 8191, "pointers")):
        for dtype in (BF16, E4M3):
            problem = Problem("matmul_reduce_scatter", M, N, 8192, dtype, layout, ranks=2)
            assert isinstance(ways(replace(problem, whole_chunks=True))["interleaved"], str)
            for config in candidates(problem):
                for narrow in (False, True):
                    gemm = with_scaled_slices(replace(config, interleaved=False), narrow).gemm
                    assert gemm.block_n == 128 * gemm.split and gemm.block_m <= config.gemm.block_m
    # 300 elements in 304 bytes, and three scales in 16
    assert [elements_of(300, dtype) for dtype in (BF16, E4M3)] == [300, 320]


def test_ways_of_fp8_are_those_of_half_the_bytes_or_of_bf16_partial_sums():
    place = {"M": 8192, "N": 8192, "K": 8192, "ranks": 2}
    for operation, share in (("all_gather_matmul", 0.5), ("matmul_reduce_scatter", 1), ("matmul_all_reduce", 1)):
        usual, fp8 = (Problem(operation, **place, dtype=dtype) for dtype in (BF16, E4M3))
        assert fp8.row_bytes == share * usual.row_bytes
        assert predict(fp8, choose(fp8)).seconds < predict(usual, choose(usual)).seconds
        assert isinstance(ways(fp8)["interleaved"], str) == (operation == "all_gather_matmul")
        for config in candidates(fp8):
            assert config.gemm.block_k == 128 and reject(fp8, config) is None
