"""The local product: layouts, dtypes and awkward shapes; exact on integers, within derived limits on random values."""

import math
import mmap
import operator

import pytest
import torch
import triton
import triton.language as tl
from products import matmul_reference
from transports import gpu_only, launches, reduced_precision, tf32

from tkernels import choice, gemm, matmul, staging
from tkernels.activations import ACTIVATIONS, activation_reference
from tkernels.comm import runtime
from tkernels.comm.calls import LocalCalls
from tkernels.configs import GemmConfig
from tkernels.gemm import DTYPES, Matrix, load_tile, precision, store_tile, tma_allowed
from tkernels.gpus import H200, SIMULATED
from tkernels.model import default_config
from tkernels.testing.compare import assert_close_to, integers, normal

DEVICE = runtime.device()
# Whether x and w are row-major (T: as nn.Linear has them, K contiguous) or transposed views (N).
LAYOUTS = {"TN": (False, False), "NN": (False, True), "NT": (True, True), "TT": (True, False)}
AWKWARD_SHAPES = [  # (M, N, K)
    (1, 16, 32),  # one row
    (1, 1, 1),
    (7, 13, 31),  # primes
    (64, 32, 8),  # K smaller than a block
    (65, 33, 129),  # one over a block each way
    (37, 96, 50),  # many blocks of columns, part of a block of rows
]


def chosen(monkeypatch, way):
    """Let `way`, a function of a model.Problem, say how a local product is carried out."""
    monkeypatch.setattr(gemm, "product_way", way)
    monkeypatch.setattr(gemm, "local_calls", LocalCalls())


def configured(problem, layout=None):
    sizes, precision = (problem.M, problem.N, problem.K), problem.precision
    return choice.gemm_config(*sizes, problem.dtype, layout or problem.layout, problem.stored, precision=precision)


@pytest.fixture(autouse=True)
def by_kernel(monkeypatch):
    """Our kernel multiplies, wherever torch would be faster."""
    chosen(monkeypatch, lambda problem: ("kernel", configured(problem)))


@pytest.fixture
def by_library(monkeypatch, by_kernel):
    chosen(monkeypatch, lambda problem: ("library", None))


@pytest.fixture
def staged(monkeypatch, by_kernel):
    """Operands that TMA can't take are staged; the copies have other values around them."""
    chosen(monkeypatch, lambda problem: ("staged", configured(problem, problem.orientation)))
    empty = staging.Rows.empty

    def poisoned(self, device):
        made = empty(self, device)
        if made.device.type != "meta":
            made._base.fill_(math.nan) if made._base is not None else made.fill_(math.nan)
        return made

    monkeypatch.setattr(staging.Rows, "empty", poisoned)


def operand(make, shape, dtype, seed, transposed, **options):
    """A matrix of that shape; transposed: a view whose first dimension is the contiguous one."""
    matrix = make(shape, dtype, seed, device=DEVICE, **options)
    return matrix.t().contiguous().t() if transposed else matrix


def config(M, N, dtype, **changes):
    fields = dict(vars(default_config(M, N, dtype)))
    return GemmConfig(**fields | changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_multiply_exactly_in_any_shape(dtype, layout):
    for seed, (M, N, K) in enumerate(AWKWARD_SHAPES):
        x = operand(integers, (M, K), dtype, seed, LAYOUTS[layout][0])
        w = operand(integers, (N, K), dtype, seed + 100, LAYOUTS[layout][1])
        bias = integers(N, dtype, seed + 200, device=DEVICE)
        y = matmul(x, w, bias)
        assert y.is_contiguous()
        assert torch.equal(y, matmul_reference(x, w, bias).to(dtype)), (M, N, K)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_values_are_within_the_derived_limits(dtype):
    for seed, (M, N, K) in enumerate([(65, 33, 129), (7, 13, 31), (4, 8, 1000)]):
        x, w = normal((M, K), dtype, seed, device=DEVICE), normal((N, K), dtype, seed + 100, device=DEVICE)
        bias = normal(N, dtype, seed + 200, device=DEVICE)
        assert_close_to(matmul(x, w, bias), matmul_reference(x, w, bias), terms=K + 1)
        # The limits would show a lost term.
        lost = matmul_reference(x[:, 1:], w[:, 1:], bias)
        with pytest.raises(AssertionError, match="elements are off"):
            assert_close_to(matmul(x, w, bias), lost, terms=K + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_come_in_fp32_where_asked(dtype):
    x, w = (integers((48, 70), dtype, seed, -16, 16, DEVICE) for seed in (1, 2))
    want = matmul_reference(x, w)
    assert torch.equal(matmul(x, w, out_dtype=torch.float32), want.float())
    assert torch.equal(matmul(x, w), want.to(dtype))
    with pytest.raises(TypeError, match="out_dtype=torch.float64 must be .*, the operands' dtype(, or float32)?$"):
        matmul(x, w, out_dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_descriptors_and_pointers_and_both_ways_to_store_give_the_same_bits(layout):
    M, N, K = 50, 72, 48  # rows of whole 16 bytes in every layout but x's transposed one, M = 50
    x = operand(normal, (M, K), torch.bfloat16, 1, LAYOUTS[layout][0])
    w = operand(normal, (N, K), torch.bfloat16, 2, LAYOUTS[layout][1])
    bias = normal(N, torch.bfloat16, 3, device=DEVICE)
    results = [
        matmul(x, w, bias, "gelu", config=config(M, N, x.dtype, use_tma=use_tma, split=split, block_n=64))
        for use_tma in (True, False)
        for split in (1, 2, 4)
    ]
    assert_close_to(results[0], matmul_reference(x, w, bias, "gelu"), terms=K + 1)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_torchs(activation):
    x, w = normal((33, 24), torch.float32, 1, device=DEVICE), normal((40, 24), torch.float32, 2, device=DEVICE)
    bias = 3 * normal(40, torch.float32, 3, device=DEVICE)
    want = matmul_reference(x, w, bias, activation)
    assert_close_to(matmul(x, w, bias, activation), want, terms=24 + 9)  # the bias counts as its variance
    for other in set(ACTIVATIONS) - {activation}:
        wrong = matmul_reference(x, w, bias, other)
        assert (wrong - want).abs().max() > 1e-4, "the data would not tell the activations apart"
    # Everywhere to 5 roundings of fp32, of 6e-8 each; the tails too, where 1 + erf cancels.
    line = torch.linspace(-14, 14, 3001, device=DEVICE)[:, None]
    got = matmul(line, torch.ones(1, 1, device=DEVICE), None, activation)
    assert ((got - activation_reference(line.double(), activation)).abs() <= 3e-7 * line.abs()).all()
    # What isn't a number stays none, and infinity itself.
    odd = torch.tensor([[math.inf], [math.nan]], device=DEVICE)
    got = matmul(odd, torch.ones(1, 1, device=DEVICE), None, activation)
    assert got[0] == math.inf and got[1].isnan()
    # Far out, where exp overflows: no NaN.
    far = torch.tensor([[-1e4], [-90.0], [90.0], [1e4]], device=DEVICE)
    got = matmul(far, torch.ones(1, 1, device=DEVICE), None, activation)
    assert torch.allclose(got.double(), activation_reference(far.double(), activation), rtol=1e-6, atol=1e-30)


def test_bias_comes_before_the_activation_and_once():
    x, w = integers((9, 8), torch.float32, 1, device=DEVICE), integers((5, 8), torch.float32, 2, device=DEVICE)
    bias = torch.tensor([-40.0, -5.0, 1.0, 5.0, 40.0], device=DEVICE)
    product = matmul_reference(x, w).float()
    got = matmul(x, w, bias, "relu")
    assert torch.equal(got, (product + bias).relu())
    for wrong in (product.relu() + bias, (product + 2 * bias).relu(), product.relu()):
        assert (got - wrong).abs().max() > 1


def test_views_of_larger_tensors_are_multiplied_in_place_and_without_their_surroundings():
    poisoned = torch.full((80, 100), math.nan, device=DEVICE)
    for rows, columns in ((slice(3, 40), slice(5, 45)), (slice(0, 32), slice(64, 96)), (slice(7, 8), slice(1, 2))):
        view = poisoned[rows, columns]
        view.copy_(integers(view.shape, torch.float32, 1))
        w = integers((9, view.shape[1]), torch.float32, 2, device=DEVICE)
        assert torch.equal(matmul(view, w), matmul_reference(view, w).float())
        assert torch.equal(matmul(w, view), matmul_reference(w, view).float())
        view.fill_(math.nan)


def test_expanded_rows_and_columns_are_multiplied():
    row, w = integers((1, 16), torch.float32, 1, device=DEVICE), integers((5, 16), torch.float32, 2, device=DEVICE)
    x = row.expand(7, 16)
    assert x.stride() == (0, 1) and torch.equal(matmul(x, w), matmul_reference(x, w).float())
    column = integers((7, 1), torch.float32, 3, device=DEVICE)
    x = column.expand(7, 16)
    assert x.stride() == (1, 0) and torch.equal(matmul(x, w), matmul_reference(x, w).float())


def test_no_rows_give_no_rows():
    y = matmul(torch.zeros(0, 8, device=DEVICE), torch.zeros(5, 8, device=DEVICE))
    assert y.shape == (0, 5)


def test_matmul_of_nothing_is_the_bias_or_empty_as_in_torch():
    x, w, bias = X[:, :0], W[:, :0], integers(6, torch.float32, 3, device=DEVICE)
    out = torch.full((4, 6), torch.nan, device=DEVICE)
    assert torch.equal(matmul(x, w, bias, "relu", out=out), matmul_reference(x, w, bias, "relu").float())
    assert torch.equal(matmul(x, w), torch.zeros(4, 6, device=DEVICE))
    assert matmul(X, W[:0], bias[:0]).shape == (4, 0)


def test_two_runs_give_the_same_bits():
    x, w = normal((70, 300), torch.bfloat16, 1, device=DEVICE), normal((40, 300), torch.bfloat16, 2, device=DEVICE)
    assert torch.equal(matmul(x, w), matmul(x, w))


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_nan_stays_nan(activation):
    x, w = torch.ones(40, 20, device=DEVICE), torch.ones(24, 20, device=DEVICE)
    x[3, 5] = torch.nan
    y = matmul(x, w, activation=activation)
    assert y[3].isnan().all() and not y[4:].isnan().any() and not y[:3].isnan().any()


X, W = torch.zeros(4, 8, device=DEVICE), torch.zeros(6, 8, device=DEVICE)


@pytest.mark.parametrize(
    "operands, error, message",
    [
        ((X, W[0]), ValueError, r"matmul: w must be a matrix, but has shape \(8,\)"),
        ((X, W[None]), ValueError, r"matmul: w must be a matrix, but has shape \(1, 6, 8\)"),
        ((X, W.t()), ValueError, r"x is \(4, 8\) and w is \(8, 6\), but K, .* must match .*pass w.t\(\) for \[K, N\]"),
        ((X, W.half()), TypeError, "x is torch.float32 and w is torch.float16; both must be float32, float16"),
        ((X.double(), W.double()), TypeError, "x is torch.float64 and w is torch.float64; both must be"),
        ((X, W, X[0]), ValueError, r"bias is torch.float32 \(8,\) on .*, but must be torch.float32 \(6,\)"),
        ((X, W, W[:, 0].half()), ValueError, r"bias is torch.float16 \(6,\)"),
        ((X, W, None, "tanh"), ValueError, "activation='tanh' is unknown; use None, relu, gelu, gelu_tanh, silu"),
        ((X, torch._neg_view(W)), ValueError, "matmul: w is a negated .* view; pass w.resolve_neg"),
        ((X, W, torch._neg_view(W[:, 0].clone())), ValueError, "bias is a negated .* view; pass bias.resolve_neg"),
        ((X.to("meta"), W), ValueError, "x is on meta, but the operation runs on"),
    ],
)
def test_what_can_not_be_multiplied_is_refused_by_name(operands, error, message):
    with pytest.raises(error, match=message):
        matmul(*operands)


def test_matmul_under_autocast_says_that_it_casts_no_operands():
    with torch.autocast(X.device.type, torch.bfloat16):
        for operands in ((X, W.half()), (X, W, W[:, 0].half())):
            with pytest.raises((TypeError, ValueError), match="float16.*; torch's autocast, which is on, casts no"):
                matmul(*operands)
        assert matmul(X, W).dtype == X.dtype


@pytest.mark.parametrize("label, where", [("x", 1), ("w", 4), ("bias", 12)])
def test_an_out_that_overlaps_an_operand_is_refused(label, where):
    memory = torch.zeros(20, 4, device=DEVICE)
    operands = dict(x=memory[:4], w=memory[4:8], bias=memory[12])
    with pytest.raises(ValueError, match=f"matmul: out overlaps {label}, which begins -?[0-9]+ bytes after it"):
        matmul(**operands, out=memory[where : where + 4])
    assert matmul(**operands, out=memory[13:17]).shape == (4, 4)
    assert matmul(memory[:0], memory[4:8], out=memory[1:1]).shape == (0, 4)


def test_a_strided_bias_is_read_by_its_stride():
    x, w = integers((4, 8), torch.float32, 1, device=DEVICE), integers((6, 8), torch.float32, 2, device=DEVICE)
    bias = integers((6, 3), torch.float32, 3, device=DEVICE)[:, 1]
    assert torch.equal(matmul(x, w, bias), matmul_reference(x, w, bias).float())


def nearest_tf32(x):
    """x in fp64, rounded to the 10 bits of mantissa that TF32 has: to the nearest, ties to even."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32).double()


@gpu_only
@pytest.mark.parametrize("M, N, K", [(260, 520, 1000), (1100, 1300, 260), (4100, 5000, 132), (60, 300, 2048)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul_as_tf32_rounds_operands_to_the_nearest_in_the_first_call_and_later_ones(layout, M, N, K, monkeypatch):
    if not runtime.has_tma():
        pytest.skip("what TMA rounds")
    for limits in ((4095, 1), (1, 4095)):  # up to 12 bits, times one: sums are exact
        x = operand(integers, (M, K), torch.float32, 1, LAYOUTS[layout][0], low=-limits[0], high=limits[0])
        w = operand(integers, (N, K), torch.float32, 2, LAYOUTS[layout][1], low=-limits[1], high=limits[1])
        want = nearest_tf32(x) @ nearest_tf32(w).t()
        assert not torch.equal(want, x.double() @ w.double().t())
        for way in ("kernel", "staged"):
            chosen(monkeypatch, lambda problem: (way, configured(problem, way == "staged" and problem.staged_layout)))  # noqa: B023
            with tf32(True):
                for _ in range(2):
                    assert torch.equal(matmul(x, w).double(), want), (limits, way)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matmul_as_tf32_of_copies_with_k_contiguous_is_right_in_every_layout(layout, monkeypatch):
    chosen(monkeypatch, lambda problem: ("staged", configured(problem, problem.staged_layout)))
    for seed, (M, N, K) in enumerate([(65, 33, 129), (40, 36, 32), (7, 13, 31)]):
        x = operand(integers, (M, K), torch.float32, seed, LAYOUTS[layout][0])
        w = operand(integers, (N, K), torch.float32, seed + 9, LAYOUTS[layout][1])
        copied = K % 4 > 0 or layout[1] == "T", K % 4 > 0 or layout[0] == "N"
        for allowed in (True, False):
            with tf32(allowed), launches() as launched:
                assert torch.equal(matmul(x, w), matmul_reference(x, w).float())
            if allowed:
                assert [name for name, *_ in launched].count("copy_rows_kernel") == sum(copied)


def test_matmul_leaves_the_programs_that_kernels_beside_it_hold():
    x, w = (integers((300, 40), torch.float32, seed, device=DEVICE) for seed in (1, 2))
    available = runtime.default_programs()
    for spared, programs in ((0, available), (1, max(available - 1, 1)), (available + 1, 1)):
        call = gemm.Matmul(config=GemmConfig(32, 32, 32, split=1, num_warps=4), spared=spared)
        with launches() as launched:
            assert torch.equal(call.prepare(x, w, None, None)(x, w, None, None), matmul_reference(x, w).float())
        assert [number for _, number, _ in launched] == [min(programs, 100)]


# What torch multiplies


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul_by_the_library_computes_the_same(by_library, dtype, layout):
    for seed, (M, N, K) in enumerate([(65, 33, 129), (1, 8, 40), (0, 3, 4)]):
        x = operand(normal, (M, K), dtype, seed, LAYOUTS[layout][0])
        w = operand(normal, (N, K), dtype, seed + 100, LAYOUTS[layout][1])
        bias = normal((N, 2), dtype, seed + 200, device=DEVICE)[:, 1]
        for activation in ACTIVATIONS:
            for added in (bias, None):
                with launches() as launched:
                    y = matmul(x, w, added, activation)
                assert not launched, (M, N, K, activation)
                assert y.is_contiguous() and y.dtype == dtype
                # Torch applies an activation to rounded sums.
                roundings = 1 if activation is None else 2
                assert_close_to(y, matmul_reference(x, w, added, activation), K + 9, roundings)


@pytest.mark.parametrize("precision, M, N, K, adds", [
    ("ieee", 3, 342, 999, True), ("ieee", 3, 342, 1000, False), ("ieee", 3, 341, 1000, True),
    ("tf32", 3, 342, 1000, True), ("ieee", 6, 66 * 128, 1999, False), ("ieee", 6, 67 * 128, 1999, True),
    ("ieee", 6, 131 * 128, 2000, False), ("ieee", 6, 132 * 128, 2000, True), ("ieee", 5, 2001, 2000, True),
])  # fmt: skip
def test_matmul_by_the_library_adds_a_bias_to_few_sums_of_a_deep_k_in_fp32_by_itself(
    by_library, monkeypatch, precision, M, N, K, adds
):
    x, w, bias = (integers(shape, torch.float32, seed, device=DEVICE) for seed, shape in enumerate(((M, K), (N, K), N)))
    multiply, given = gemm.multiply_into, []
    monkeypatch.setattr(gemm, "multiply_into", lambda *them: given.append(them[3] is not None) or multiply(*them))
    y = gemm.multiply(("relu", None, None, precision), (x, w, bias, None))
    assert given == [adds] and torch.equal(y, (x @ w.t() + bias).relu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul_by_the_library_fills_out_and_gives_fp32_where_asked_and_ignores_autocast(by_library, dtype):
    x, w = (integers((48, 70), dtype, seed, -16, 16, DEVICE) for seed in (1, 2))
    bias, out = integers(48, dtype, 3, device=DEVICE), torch.full((48, 48), math.nan, device=DEVICE)
    want = matmul_reference(x, w, bias, "relu").float()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        for _ in range(2):  # prepared, and again
            assert matmul(x, w, bias, "relu", out=out, out_dtype=torch.float32) is out and torch.equal(out, want)
            assert torch.equal(matmul(x, w, bias, "relu", out_dtype=torch.float32), want)
            assert torch.equal(matmul(x, w, bias, out_dtype=torch.float32), matmul_reference(x, w, bias).float())


def test_matmul_is_what_the_choice_says_on_a_gpu_and_a_configuration_asks_for_the_kernel(monkeypatch):
    chosen(monkeypatch, choice.product_way)
    monkeypatch.setattr(gemm, "gpu_here", lambda: H200)
    monkeypatch.setattr(gemm.runtime, "default_programs", lambda: 132)
    x, w = normal((16, 48), torch.bfloat16, 1, device=DEVICE), normal((40, 48), torch.bfloat16, 2, device=DEVICE)
    tiles = config(16, 40, torch.bfloat16)
    for options, kernels in (({}, []), ({"config": tiles}, ["matmul_kernel"])):
        with launches() as launched:
            assert_close_to(matmul(x, w, **options), matmul_reference(x, w), terms=48)
        assert [name for name, *_ in launched] == kernels
    if runtime.RUNTIME == "simulated":
        monkeypatch.setattr(gemm, "gpu_here", lambda: SIMULATED)
        chosen(monkeypatch, choice.product_way)
        with launches() as launched:
            matmul(x, w)
        assert len(launched) == 1


# What is staged


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul_of_staged_operands_is_exact_and_its_result_is_contiguous(staged, dtype, layout):
    for seed, (M, N, K) in enumerate([*AWKWARD_SHAPES, (65, 40, 31), (40, 31, 64), (64, 129, 48), (3, 8, 2100)]):
        x = operand(integers, (M, K), dtype, seed, LAYOUTS[layout][0])
        w = operand(integers, (N, K), dtype, seed + 100, LAYOUTS[layout][1])
        bias = integers(N, dtype, seed + 200, device=DEVICE)
        with launches() as launched:
            y = matmul(x, w, bias, "relu")
        assert y.is_contiguous() and y.shape == (M, N)
        assert torch.equal(y, matmul_reference(x, w, bias, "relu").to(dtype)), (M, N, K)
        beyond = sum(not tma_allowed(staging.in_rows(matrix)[0]) for matrix in (x, w))
        if M * N * K:
            assert [name for name, *_ in launched].count("copy_rows_kernel") == beyond, (M, N, K)
        assert torch.equal(matmul(x, w, bias, "relu"), y)  # prepared


def test_matmul_of_staged_views_reads_and_writes_nothing_around_them(staged):
    memory = torch.full((60, 70), math.nan, dtype=torch.bfloat16, device=DEVICE)
    x, w = memory[1:34, 3:28], memory[34:60, 3:28].copy_(integers((26, 25), torch.bfloat16, 2, device=DEVICE))
    x.copy_(integers((33, 25), torch.bfloat16, 1, device=DEVICE))
    out = torch.full((35 * 26,), math.nan, dtype=torch.bfloat16, device=DEVICE)
    y = out[26:-26].view(33, 26)  # rows of 52 bytes
    assert matmul(x, w, out=y) is y and torch.equal(y, matmul_reference(x, w).bfloat16())
    assert out[:26].isnan().all() and out[-26:].isnan().all() and memory[0].isnan().all()
    # What is staged is what the operands hold in each call.
    w.add_(1)
    assert torch.equal(matmul(x, w, out=y), matmul_reference(x, w).bfloat16())
    expanded = x[:1].expand(9, 25)
    assert torch.equal(matmul(expanded, w), matmul_reference(expanded, w).bfloat16())


@pytest.mark.quick
def test_alignment_of_a_row_alone_is_what_torch_takes_it_for():
    x, w = torch.empty((24, 64), dtype=torch.float16), torch.empty((8, 24), dtype=torch.float16)
    assert gemm.alignment_of(x[:, :1].t(), w) == 16
    assert gemm.alignment_of(torch.empty((20, 1), dtype=torch.float16).t(), w) == 8
    assert gemm.alignment_of(torch.empty((20, 2), dtype=torch.float16).t(), w) == 4


@pytest.mark.parametrize("columns, stride", [(1, 64), (64, 64), (65, 128), (8191, 8192)])
def test_rows_have_a_stride_of_whole_lines(columns, stride):
    matrix = torch.empty(3, columns, dtype=torch.bfloat16)
    rows = staging.Rows.of(matrix)
    assert (rows.stride, rows.turned) == (stride, False) and rows.empty("cpu").shape == matrix.shape
    if columns > 1:
        turned = staging.Rows.of(matrix.t())
        assert (turned.stride, turned.turned) == (stride, True)
        assert turned.empty("cpu").stride() == (1, stride) and turned.empty("cpu").shape == (columns, 3)


# Beyond 2^31 elements


def sparse(num_elements, dtype):
    """A flat tensor of zeros, of which only the pages that are touched take memory (a GPU has enough for all)."""
    if DEVICE.type == "cuda":
        return torch.zeros(num_elements, dtype=dtype, device=DEVICE)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named in Python since 3.13
    pages = mmap.mmap(-1, num_elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | no_reserve)
    return torch.frombuffer(pages, dtype=dtype)


STRIDE = (1 << 30) + 64


@pytest.mark.parametrize("use_tma", [True, False])
def test_operands_reach_beyond_two_to_the_31_elements(use_tma):
    flat = sparse(2 * STRIDE + 64, torch.float16)
    matrix = flat.as_strided((3, 40), (STRIDE, 1))
    matrix.copy_(integers((3, 40), torch.float16, 1))
    other = integers((5, 40), torch.float16, 2, device=DEVICE)
    for x, w in ((matrix, other), (other, matrix)):
        y = matmul(x, w, config=config(*y_shape(x, w), x.dtype, use_tma=use_tma))
        assert torch.equal(y, matmul_reference(x, w).half())
    # Transposed: the stride of K is the large one.
    x = flat.as_strided((40, 3), (1, STRIDE))
    w = integers((5, 3), torch.float16, 3, device=DEVICE)
    for a, b in ((x, w), (w, x)):
        y = matmul(a, b, config=config(*y_shape(a, b), x.dtype, use_tma=use_tma))
        assert torch.equal(y, matmul_reference(a, b).half())


def y_shape(x, w):
    return x.shape[0], w.shape[0]


@triton.jit
def move_tile_kernel(
    source, out, stride, row, num_rows, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    tile = load_tile(Matrix(source, stride, 1, num_rows, N), row, 0, ROWS, COLUMNS)
    store_tile(tile.to(tl.float32), Matrix(out, stride, 1, num_rows, N), row, num_rows - row, 0, ROWS, COLUMNS)


def test_results_are_stored_beyond_two_to_the_31_elements():
    # Row 2^16 + 1 of a matrix of 2^15 columns, in which all other pages stay untouched.
    row, columns = (1 << 16) + 1, 1 << 15
    source, out = (sparse((row + 2) * columns, torch.float16).view(row + 2, columns) for _ in range(2))
    source[row:, :5] = integers((2, 5), torch.float16, 1, low=1)
    move_tile_kernel[(1,)](source, out, columns, row, row + 2, 5, ROWS=16, COLUMNS=16)
    assert torch.equal(out[row:, :5], source[row:, :5])
    assert out[row:, 5:64].eq(0).all() and out[:2, :64].eq(0).all()


@pytest.mark.parametrize(
    "switch, value, expected",
    [
        ("cuda.matmul.fp32_precision", "tf32", "tf32"),
        ("cuda.matmul.fp32_precision", "ieee", "ieee"),
        ("fp32_precision", "tf32", "tf32"),
        ("cuda.matmul.allow_tf32", True, "tf32"),
        ("cuda.matmul.allow_tf32", False, "ieee"),
    ],
)
def test_float32_is_multiplied_as_precisely_as_torch_is_told_by_any_of_its_switches(switch, value, expected):
    owner, _, name = switch.rpartition(".")
    general, own = torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "none"  # as a process begins
        setattr(operator.attrgetter(owner)(torch.backends) if owner else torch.backends, name, value)
        assert precision(torch.float32) == expected and precision(torch.bfloat16) == "ieee"
        x, w = (integers((16, 32), torch.float32, seed, device=DEVICE) for seed in (1, 2))
        assert matmul(x, w).equal(x @ w.t())  # integers as small as these are exact in both
    finally:
        torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = general, own


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_matmul_by_torch_sums_as_torchs_switches_say(by_library, dtype):
    """Few tiles and a deep K, which cuBLAS splits: with partial sums in 16 bits, and in fp32, bit for bit as torch."""
    x, w = (normal((rows, 30_000), dtype, seed=rows, device=DEVICE) for rows in (36, 70))
    for allowed in (True, False):
        with reduced_precision(allowed):
            y = matmul(x, w)
            if x.is_cuda:
                assert torch.equal(y, x @ w.t())
            else:  # where the switches say nothing
                assert_close_to(y, matmul_reference(x, w), terms=30_000)
