"""The interpreter as a device: its numbers against fp64, its programs against each other, its memory against peers.

Cheapest first: casts, elementwise operations, reductions, dot, atomics; then arguments and descriptors; then what needs
more than one program, one thread or one process.
"""

import ctypes
import mmap
import operator
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import namedtuple

import pytest
import torch
import triton
import triton.language as tl
from execution import execution
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels.comm import interpreter, runtime
from tkernels.testing.compare import assert_close_to, normal

if runtime.RUNTIME != "simulated":
    pytest.skip("the nvshmem runtime does not interpret", allow_module_level=True)

interpreter.install()

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# largest difference from torch's result in fp64 for the same operation, in units in the last place of the result's type
ULPS = {torch.float32: 4, torch.float16: 1, torch.bfloat16: 1}


def ordered(t):
    """Floats as integers in the same order, neighbours one apart; -0 and 0 are both 0."""
    bits = t.contiguous().view(torch.int32 if t.dtype == torch.float32 else torch.int16).long()
    return torch.where(bits < 0, -(bits & (2**31 - 1 if t.dtype == torch.float32 else 2**15 - 1)), bits)


def assert_ulps(got, want, limit=None):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    distance = torch.where(want.isnan(), 0, (ordered(got) - ordered(want)).abs())
    limit = ULPS[want.dtype] if limit is None else limit
    worst = distance.argmax()
    assert distance.max() <= limit, f"{got.flatten()[worst]} is {distance.max()} ulp from {want.flatten()[worst]}"


# casts


@triton.jit
def cast_kernel(out, x, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty, fp_downcast_rounding=ROUNDING))


def cast(x, dtype, rounding=None):
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(1,)](out, x, rounding, x.numel())
    return out


def dense_fp32():
    """Around every bf16 value: on it, just above, below, on and above the tie, just below the next; and random bits."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    bits = ((torch.arange(65536) << 16)[:, None] + low).flatten()
    random = torch.randint(0, 2**32, (2 * 65536,), generator=torch.Generator().manual_seed(0))
    return torch.cat([bits, random]).to(torch.int32).view(torch.float32)


def around_fp16():
    """fp32 values in fp16's range, denormals and overflow among them: each value, each midpoint, a little off both."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    middles = (values + torch.nextafter(values.half(), torch.tensor(torch.inf, dtype=torch.float16)).float()) / 2
    return torch.cat([values, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])


def test_all_bf16_values_to_fp32():
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_ulps(cast(x, torch.float32), x.float(), 0)
    assert_ulps(cast(cast(x, torch.float32), torch.bfloat16), x, 0)


def test_fp32_to_bf16_rounds_to_nearest_even():
    x = dense_fp32()
    assert_ulps(cast(x, torch.bfloat16), x.bfloat16(), 0)


def test_fp32_to_fp16_rounds_to_nearest_even():
    for x in (around_fp16(), dense_fp32()):
        assert_ulps(cast(x, torch.float16), x.half(), 0)
        assert_ulps(cast(x, torch.float16, "rtne"), x.half(), 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_towards_zero(dtype):
    x = around_fp16() if dtype == torch.float16 else dense_fp32()
    got, nearest = cast(x, dtype, "rtz"), x.to(dtype)
    finite = x.isfinite()
    assert torch.equal(got.isnan(), x.isnan())
    assert (got.double().abs() <= x.double().abs())[finite].all()
    assert got[finite].isfinite().all()
    assert ((ordered(got) - ordered(nearest)).abs() <= 1)[finite].all()
    assert torch.equal(got[x.isinf()].float(), x[x.isinf()])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float64, torch.bool, torch.uint8])
def test_bf16_to_and_from_other_types(dtype):
    x = torch.arange(0, 64).bfloat16() / 4
    assert torch.equal(cast(x, dtype), x.to(dtype))
    y = torch.arange(0, 1 << 12).to(dtype)
    assert torch.equal(cast(y, torch.bfloat16), y.to(torch.bfloat16))


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8_rounds_to_nearest_even_and_saturates(dtype):
    values = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()]
    middles = (values[1:] + values[:-1]) / 2
    most = values.max().item()
    near = torch.cat([values, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])
    near = torch.cat([near, -near, near.new_zeros(1024 - 2 * near.numel())])
    for x in (near, dense_fp32()):
        got = cast(x, dtype)
        assert torch.equal(got.isnan(), x.isnan())
        want = x.clamp(-most, most).to(dtype)  # of infinity a GPU makes the largest number too
        assert torch.equal(got.view(torch.uint8)[~x.isnan()], want.view(torch.uint8)[~x.isnan()])


@pytest.mark.parametrize("other", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_all_fp8_values_to_and_from_other_floats(dtype, other):
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    wide = cast(x, other)
    assert torch.equal(wide.nan_to_num(3.3), x.to(other).nan_to_num(3.3)) and torch.equal(wide.isnan(), x.isnan())
    back, finite = cast(wide, dtype), wide.isfinite()
    assert torch.equal(back.view(torch.uint8)[finite], x.view(torch.uint8)[finite])


@triton.jit
def constants_kernel(out, x, scale):
    i = tl.arange(0, 8)
    tl.store(out + i, tl.full((8,), 0.1, out.dtype.element_ty))
    tl.store(out + 8 + i, tl.zeros((8,), out.dtype.element_ty) + 3.3)
    tl.store(out + 16 + i, tl.load(x + i) * 1.7)
    tl.store(out + 24 + i, tl.load(x + i) * scale)
    tl.store(out + 32 + i, tl.where(i < 4, tl.load(x + i), float("-inf")))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_constants(dtype):
    x = torch.randn(8, generator=torch.Generator().manual_seed(6)).to(dtype)
    out = torch.empty(40, dtype=dtype)
    constants_kernel[(1,)](out, x, 0.3)
    where = torch.where(torch.arange(8) < 4, x, -torch.inf)
    rows = [torch.full_like(x, 0.1), torch.full_like(x, 3.3), x.double() * 1.7, x.double() * 0.3, where]
    assert_ulps(out, torch.cat([row.to(dtype) for row in rows]), 1)


# elementwise


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def sub(x, y):
    return x - y


@triton.jit
def mul(x, y):
    return x * y


@triton.jit
def div(x, y):
    return x / y


@triton.jit
def rem(x, y):
    return x % y


@triton.jit
def maximum(x, y):
    return tl.maximum(x, y)


@triton.jit
def minimum(x, y):
    return tl.minimum(x, y)


@triton.jit
def fma(x, y):
    return tl.fma(x, y, y)


@triton.jit
def clamp(x, y):
    return tl.clamp(x, -tl.abs(y), tl.abs(y))


@triton.jit
def select(x, y):
    return tl.where(x < y, x, y * 2)


@triton.jit
def augmented(x, y):
    x += y
    x *= y
    return x


# fmt: off
@triton.jit
def lt(x, y): return x < y
@triton.jit
def le(x, y): return x <= y
@triton.jit
def gt(x, y): return x > y
@triton.jit
def ge(x, y): return x >= y
@triton.jit
def eq(x, y): return x == y
@triton.jit
def ne(x, y): return x != y
# fmt: on


@triton.jit
def binary_kernel(out, x, y, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, OP(tl.load(x + i), tl.load(y + i)).to(out.dtype.element_ty))


def operands(dtype, n=4096):
    g = torch.Generator().manual_seed(1)
    x, y = ((torch.randn(n, generator=g) * 10).to(dtype) for _ in range(2))
    y[y == 0] = 1
    y[::7] = x[::7]  # comparisons meet equality
    y[y == 0] = 1
    return x, y


BINARY = {
    add: torch.add, sub: torch.sub, mul: torch.mul, div: torch.div, rem: torch.fmod,
    maximum: torch.maximum, minimum: torch.minimum,
    clamp: lambda x, y: torch.clamp(x, -y.abs(), y.abs()),
    select: lambda x, y: torch.where(x < y, x, y * 2),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [*BINARY, augmented], ids=lambda op: op.__name__)
def test_arithmetic(op, dtype):
    x, y = operands(dtype)
    out = torch.empty_like(x)
    binary_kernel[(1,)](out, x, y, op, x.numel())
    if op is augmented:  # rounds in between
        want = (x.double() + y.double()).to(dtype).double() * y.double()
    else:
        want = BINARY[op](x.double(), y.double())
    assert_ulps(out, want.to(dtype))


def test_fma_of_bf16():
    """In other dtypes it is stock's, which rounds twice on triton 3.6."""
    x, y = operands(torch.bfloat16)
    out = torch.empty_like(x)
    binary_kernel[(1,)](out, x, y, fma, x.numel())
    assert_ulps(out, (x.double() * y.double() + y.double()).bfloat16())


@pytest.mark.parametrize("out_dtype", [torch.bool, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_comparisons(dtype, out_dtype):
    """A comparison's result is a truth value, also when it is cast: stock calls it a bf16."""
    x, y = operands(dtype)
    x[5], y[9] = torch.nan, torch.nan
    for op in (lt, le, gt, ge, eq, ne):
        out = torch.empty(x.shape, dtype=out_dtype)
        binary_kernel[(1,)](out, x, y, op, x.numel())
        assert torch.equal(out, getattr(operator, op.__name__)(x, y).to(out_dtype)), op.__name__


@triton.jit
def unary_kernel(out, x, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, OP(tl.load(x + i)))


# fmt: off
@triton.jit
def absolute(x): return tl.abs(x)
@triton.jit
def negative(x): return -x
@triton.jit
def exp(x): return tl.exp(x.to(tl.float32))
@triton.jit
def exp2(x): return tl.exp2(x.to(tl.float32))
@triton.jit
def log(x): return tl.log(tl.abs(x).to(tl.float32))
@triton.jit
def log2(x): return tl.log2(tl.abs(x.to(tl.float32)))
@triton.jit
def sqrt(x): return tl.sqrt(tl.abs(x).to(tl.float32))
@triton.jit
def rsqrt(x): return tl.rsqrt(tl.abs(x).to(tl.float32))
@triton.jit
def sin(x): return tl.sin(x.to(tl.float32))
@triton.jit
def cos(x): return tl.cos(x.to(tl.float32))
@triton.jit
def erf(x): return tl.erf(x.to(tl.float32))
@triton.jit
def floor(x): return tl.floor(x.to(tl.float32))
@triton.jit
def ceil(x): return tl.ceil(x.to(tl.float32))
@triton.jit
def sigmoid(x): return tl.sigmoid(x.to(tl.float32))
# fmt: on

UNARY = {
    absolute: torch.abs, negative: torch.neg, exp: torch.exp, exp2: torch.exp2, log: lambda x: x.abs().log(),
    log2: lambda x: x.abs().log2(), sqrt: lambda x: x.abs().sqrt(), rsqrt: lambda x: x.abs().rsqrt(), sin: torch.sin,
    cos: torch.cos, erf: torch.erf, floor: torch.floor, ceil: torch.ceil, sigmoid: torch.sigmoid,
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.__name__)
def test_unary(op, dtype):
    x, _ = operands(dtype)
    out = torch.empty_like(x)
    unary_kernel[(1,)](out, x, op, x.numel())
    assert_ulps(out, UNARY[op](x.double()).to(dtype))


@triton.jit
def offsets_kernel(out, row, stride):
    tl.store(out, row * stride)


def test_overflow_of_an_int32_offset_is_an_error():
    """On a GPU it wraps in silence and the program reads somewhere else."""
    out = torch.zeros(1, dtype=torch.int64)
    offsets_kernel[(1,)](out, 2**15, 2**15)
    assert out == 2**30
    with pytest.raises(OverflowError, match="mul gives 2147483648, which int32 can't hold"):
        offsets_kernel[(1,)](out, 2**16, 2**15)
    offsets_kernel[(1,)](out, 2**40, 2**15)
    assert out == 2**55


@triton.jit
def several_offsets_kernel(out, first, stride):
    at = tl.arange(0, 4)
    tl.store(out + at, (first + at) * stride)


@pytest.mark.parametrize("first, found", [(2**15 - 3, 2**31), (-(2**15) - 1, -(2**31) - 2**16)])
def test_overflow_of_one_offset_of_several_is_an_error(first, found):
    out = torch.zeros(4, dtype=torch.int64)
    several_offsets_kernel[(1,)](out, first, 2**15)
    assert out.tolist() == [(first + at) * 2**15 for at in range(4)]
    with pytest.raises(OverflowError, match=f"mul gives {found}, which int32 can't hold"):
        several_offsets_kernel[(1,)](out, first, 2**16)


@triton.jit
def beside_kernel(out, x, CONSTANT: tl.constexpr):
    sum = tl.load(x) + CONSTANT
    tl.store(out, sum)
    tl.store(out + 1, sum.dtype.primitive_bitwidth)
    tl.store(out + 2, sum.dtype.is_int_unsigned())
    difference = CONSTANT - tl.load(x)
    tl.store(out + 3, difference)
    tl.store(out + 4, difference.dtype.primitive_bitwidth)


@pytest.mark.parametrize(
    "dtype, constant, bits",
    [(torch.int8, 100, 8), (torch.uint8, 200, 8), (torch.int32, -5, 32), (torch.int64, 2**40, 64), (torch.bool, 7, 32)],
    ids=str,
)
def test_a_constant_takes_the_type_of_the_integers_beside_it(dtype, constant, bits):
    x, out = torch.ones(1, dtype=dtype), torch.zeros(5, dtype=torch.int64)
    beside_kernel[(1,)](out, x, constant)
    assert out.tolist() == [constant + 1, bits, dtype == torch.uint8, constant - 1, bits]


@pytest.mark.parametrize("dtype, constant", [(torch.int8, 128), (torch.uint8, -1), (torch.int32, 2**31)], ids=str)
def test_a_constant_that_the_integers_beside_it_cannot_be_is_refused(dtype, constant):
    with pytest.raises(ValueError, match="out of range|negative scalar"):
        beside_kernel[(1,)](torch.zeros(5, dtype=torch.int64), torch.ones(1, dtype=dtype), constant)


# reductions


@triton.jit
def larger(x, y):
    return tl.where(x > y, x, y)


@triton.jit
def reduce_kernel(out, x, KIND: tl.constexpr, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if KIND == "sum":
        r = tl.sum(v, axis=AXIS)
    elif KIND == "max":
        r = tl.max(v, axis=AXIS)
    elif KIND == "min":
        r = v.min(axis=AXIS)
    elif KIND == "argmax":
        r = tl.argmax(v, axis=AXIS)
    elif KIND == "argmin":
        r = tl.argmin(v, axis=AXIS)
    else:
        r = tl.reduce(v, AXIS, larger)
    if AXIS is None:
        tl.store(out, r)
    else:
        tl.store(out + tl.arange(0, N if AXIS == 0 else M), r)


REDUCTIONS = [(kind, axis) for kind in ("sum", "max", "min", "larger") for axis in (None, 0, 1)]
REDUCTIONS += [(kind, axis) for kind in ("argmax", "argmin") for axis in (0, 1)]  # these need an axis


@pytest.mark.parametrize("kind, axis", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions(dtype, kind, axis):
    M, N = (4, 8) if kind == "larger" else (32, 64)
    x = torch.randn(M, N, generator=torch.Generator().manual_seed(2)).add(0.5).to(dtype)
    torch_kind = {"max": "amax", "min": "amin", "larger": "amax"}.get(kind, kind)
    want = getattr(torch, torch_kind)(x.double(), dim=(0, 1) if axis is None else axis)
    want = want if kind.startswith("arg") else want.to(dtype)
    out = torch.empty_like(want)
    reduce_kernel[(1,)](out, x, kind, axis, M, N)
    if kind.startswith("arg"):
        assert torch.equal(out, want)
    else:
        assert_ulps(out, want, {torch.float32: 64}.get(dtype) if kind == "sum" else 0)


@triton.jit
def scan_kernel(out, x, REVERSE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.associative_scan(tl.load(x + i), 0, add, reverse=REVERSE))
    tl.store(out + N + i, tl.cumsum(tl.load(x + i), 0, reverse=REVERSE))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_scans(dtype, reverse):
    x = torch.rand(64, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = torch.empty(2, 64, dtype=dtype)
    scan_kernel[(1,)](out, x, reverse, 64)
    want = x.double().flip(0).cumsum(0).flip(0) if reverse else x.double().cumsum(0)
    assert_ulps(out, want.to(dtype).expand(2, 64), {torch.float32: 16}.get(dtype))


# dot


@triton.jit
def dot_kernel(out, a, b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, k_end):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    acc = tl.zeros((M, N), tl.float32)
    for k in range(0, k_end, BLOCK_K):
        i = k + tl.arange(0, BLOCK_K)
        acc = tl.dot(tl.load(a + m * K + i[None, :]), tl.load(b + n * K + i[:, None]), acc)
    tl.store(out + m * N + n, acc.to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8], ids=str)
def test_dot(dtype):
    M, N, K = 64, 32, 128
    g = torch.Generator().manual_seed(4)
    a, b = torch.randn(M, K, generator=g).to(dtype), torch.randn(N, K, generator=g).to(dtype)
    exact = a.double() @ b.double().T
    out32, out = torch.empty(M, N), torch.empty(M, N, dtype=dtype)
    dot_kernel[(1,)](out32, a, b, M, N, K, 32, K, num_warps=8, num_stages=3)
    dot_kernel[(1,)](out, a, b, M, N, K, 32, K)
    assert (out32 - exact).abs().max() < 1e-5 * exact.abs().max()
    if dtype in FP8:
        assert torch.equal(out.view(torch.uint8), out32.to(dtype).view(torch.uint8))
    elif dtype != torch.float32:
        assert_ulps(out, out32.to(dtype), 0)


@triton.jit
def dot_fp16_kernel(out, a, b, K: tl.constexpr):
    i, k = tl.arange(0, 16), tl.arange(0, K)
    x, y = tl.load(a + i[:, None] * K + k[None, :]), tl.load(b + k[:, None] * 16 + i[None, :])
    tl.store(out + i[:, None] * 16 + i[None, :], tl.dot(x, y, out_dtype=tl.float16).T)


def test_dot_to_fp16_accumulates_in_fp32():
    a, b = normal((16, 256), torch.float16, 1), normal((256, 16), torch.float16, 2)
    out = torch.empty(16, 16, dtype=torch.float16)
    dot_fp16_kernel[(1,)](out, a, b, 256)
    assert_close_to(out.T, a.double() @ b.double(), terms=256)


# atomics


@triton.jit
def atomic_add_kernel(out, before, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    old = tl.atomic_add(out + i // 2, tl.load(x + i), mask=i < n)
    tl.store(before + tl.program_id(0) * BLOCK + i, old, mask=i < n)
    tl.atomic_add(out + BLOCK // 2, tl.load(x + 1), sem="release", scope="sys")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64], ids=str)
def test_atomic_add(dtype):
    """Small integers, exact in every type: two elements an address, 8 programs at once, a mask, and a scalar."""
    programs, block, n = 8, 32, 28
    x = (torch.arange(block) % 4).to(dtype)
    out, before = torch.zeros(block // 2 + 1, dtype=dtype), torch.zeros(programs, block, dtype=dtype)
    atomic_add_kernel[(programs,)](out, before, x, n, block)
    want = torch.zeros(block // 2 + 1)
    want[: n // 2] = x[:n].reshape(-1, 2).float().sum(1) * programs
    want[-1] = x[1] * programs
    assert torch.equal(out.float(), want)
    # Each word's old values are all different where every addend moves it: none was added to twice.
    assert before[:, 2].unique().numel() == programs


@triton.jit
def atomic_max_kernel(out, x):
    tl.atomic_max(out, tl.load(x + tl.program_id(0)))
    tl.atomic_min(out + 1, tl.load(x + tl.program_id(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_atomic_max_and_min(dtype):
    x = (torch.randn(16, generator=torch.Generator().manual_seed(5)) * 100).to(dtype)
    out = torch.zeros(2, dtype=dtype)
    atomic_max_kernel[(16,)](out, x)
    assert torch.equal(out, torch.stack([x.max(), x.min()]))


def test_atomic_add_of_bf16_is_refused():
    x = torch.ones(8).bfloat16()
    with pytest.raises(ValueError, match="Unsupported data type"):
        atomic_add_kernel[(1,)](x.clone(), torch.zeros_like(x), x, 8, 8)


def test_atomic_max_of_bf16_is_refused_as_by_the_compiler():
    with pytest.raises(ValueError, match="does not support bf16"):
        atomic_max_kernel[(16,)](torch.zeros(2).bfloat16(), torch.ones(16).bfloat16())


# arguments


@triton.jit
def arguments_kernel(out, pair, flag, small, large, half, OP: tl.constexpr, optional=None, N: tl.constexpr = 4):
    for i in tl.static_range(N):
        tl.store(out + i, OP(pair[0], pair[1][0]) + i)
    if flag:
        tl.store(out + N, small)
    tl.store(out + N + 1, large // 2)
    tl.store(out + N + 2, (half.to(tl.float32) * 2).to(tl.int64))
    for i in tl.range(0, 1, num_stages=3):
        if optional is None:
            tl.store(out + N + 3 + i, tl.cdiv(small, 2))


Pair = namedtuple("Pair", ["left", "right"])


def test_arguments():
    """Integers of every width, a bool, a float, tuples in tuples, a function, None, defaults, and options to ignore."""
    for pair in [(10, (5,)), Pair(10, (5,))]:
        out = torch.zeros(8, dtype=torch.int64)
        options = dict(num_warps=4, num_stages=2, extern_libs={"x": "y"}, launch_cooperative_grid=True)
        arguments_kernel[(1,)](out, pair, True, 7, 2**40, 0.5, add, **options)
        assert out.tolist() == [15, 16, 17, 18, 7, 2**39, 1, 4]
    arguments_kernel[lambda meta: (meta["small"] - 7,)](out, pair, True, 7, 2**40, 0.5, add)  # no program
    with pytest.raises(TypeError, match="large"):
        arguments_kernel[(1,)](out, pair, True, 7)
    with pytest.raises(ValueError, match=r"out is on meta.*cpu"):
        arguments_kernel[(1,)](out.to("meta"), pair, True, 7, 2**40, 0.5, add)


def test_grid_of_no_programs_writes_nothing():
    out = torch.zeros(4)
    for grid in [(0,), (4, 0), (2, 3, 0)]:
        constants_kernel[grid](out, out, 1.0)
    assert not out.any()


@triton.jit
def program_ids_kernel(out):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    here = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.atomic_add(out + here, 1 + here)


@pytest.mark.parametrize("resident", [1, 3, 64])
def test_every_program_runs_once(resident):
    out = torch.zeros(24, dtype=torch.int32)
    with execution(resident=resident):
        program_ids_kernel[(4, 3, 2)](out)
    assert out.tolist() == list(range(1, 25))


# tensor descriptors


@triton.jit
def copy_by_descriptor_kernel(src, dst, row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    column = tl.program_id(0) * BLOCK_N
    dst.store([row, column], src.load([row, column]))


@triton.jit
def copy_by_device_descriptor_kernel(src, dst, row, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    source = tl.make_tensor_descriptor(src, shape=[M, N], strides=[N, 1], block_shape=[BLOCK_M, BLOCK_N])
    target = tl.make_tensor_descriptor(dst, shape=[M, N], strides=[N, 1], block_shape=[BLOCK_M, BLOCK_N])
    copy_by_descriptor_kernel(source, target, row, BLOCK_M, BLOCK_N)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("where", ["host", "device"])
def test_descriptors_clip_stores(where, dtype):
    x = torch.randn(13, 24).to(dtype)
    buffer = torch.full((17, 24), 7).to(dtype)
    out, block = buffer[:13], [8, 16]
    if where == "host":
        args = [TensorDescriptor.from_tensor(x, block), TensorDescriptor.from_tensor(out, block), 8]
    else:
        args = [x, out, 8, 13, 24]
    kernel = copy_by_descriptor_kernel if where == "host" else copy_by_device_descriptor_kernel
    kernel[(2,)](*args, *block)
    assert torch.equal(out[8:], x[8:])
    assert (out[:8] == 7).all() and (buffer[13:] == 7).all()


@triton.jit
def load_by_descriptor_kernel(src, out, row, column, M: tl.constexpr, N: tl.constexpr):
    tile = src.load([row, column])
    tl.store(out + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], tile)


@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_descriptors_pad_loads(dtype, padding):
    x, out = torch.randn(13, 24).to(dtype), torch.empty(8, 16, dtype=dtype)
    descriptor = TensorDescriptor.from_tensor(x, [8, 16], padding=padding)
    outside = torch.full((8, 16), torch.nan if padding == "nan" else 0.0, dtype=dtype)
    for row, column in ((8, 16), (-3, -8)):
        load_by_descriptor_kernel[(1,)](descriptor, out, row, column, 8, 16)
        want = outside.clone()
        want[max(-row, 0) : 13 - row, max(-column, 0) : 24 - column] = x[
            max(row, 0) : row + 8, max(column, 0) : column + 16
        ]
        assert_ulps(out, want, 0)


# memory


@interpreter.builtin
def meet(barrier):
    """Wait on the host's barrier twice: what the host does in between happens during the launch."""
    BARRIERS[int(barrier)].wait(300)
    BARRIERS[int(barrier)].wait(300)
    return 0


BARRIERS = [threading.Barrier(2)]


@triton.jit
def write_and_meet_kernel(a, b, other, barrier):
    tl.store(a, 1)
    meet(barrier)
    tl.store(b, tl.load(other))


def test_a_peers_write_during_a_launch_survives(monkeypatch):
    """Two views of one mapped segment and an unrelated tensor as arguments; a second mapping is the peer."""

    def refuse(*_):
        raise AssertionError("the launch copies a storage, and undoes what a peer writes meanwhile")

    monkeypatch.setattr(torch.UntypedStorage, "copy_", refuse)
    fd = os.memfd_create("segment")
    os.ftruncate(fd, 4096)
    mine, peers = mmap.mmap(fd, 4096), mmap.mmap(fd, 4096)
    os.close(fd)
    segment = torch.frombuffer(mine, dtype=torch.int32)
    # A second storage at the same address is what makes the stock interpreter copy the segment onto itself.
    twin = torch.frombuffer(mine, dtype=torch.int32)

    def peer():
        BARRIERS[0].wait(300)
        assert segment[10] == 1  # in place: visible before the launch ends
        peers[400:404] = (99).to_bytes(4, "little")
        BARRIERS[0].wait(300)

    thread = threading.Thread(target=peer)
    thread.start()
    write_and_meet_kernel[(1,)](segment[10:20], twin[20:30], torch.tensor([5], dtype=torch.int32), 0)
    thread.join()
    assert (segment[10], segment[20], segment[100]) == (1, 5, 99)


@triton.jit
def address_kernel(table, out):
    tl.store(tl.load(table + 1).to(tl.pointer_type(tl.bfloat16)), 1.5)
    tl.store(out, tl.load(tl.load(table).to(tl.pointer_type(tl.float32))))


def test_pointers_from_a_table():
    x, y, out = torch.tensor([2.5]), torch.zeros(1).bfloat16(), torch.zeros(1)
    address_kernel[(1,)](torch.tensor([x.data_ptr(), y.data_ptr()]), out)
    assert y == 1.5 and out == 2.5


# programs that wait for each other


class Expired(RuntimeError):
    pass


@interpreter.builtin
def wait_for(address, value, timeout_ms):
    word = ctypes.c_int32.from_address(int(address))
    deadline = time.monotonic() + int(timeout_ms) / 1e3
    while word.value < int(value):
        if interpreter.aborted() or time.monotonic() > deadline:
            raise Expired(f"have {word.value}, want {int(value)}")
        time.sleep(1e-4)
    return 0


@triton.jit
def late_producer_kernel(flag, out, timeout_ms):
    """The first programs wait for what the last one does."""
    pid = tl.program_id(0)
    if pid == tl.num_programs(0) - 1:
        tl.store(out, 42)
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    else:
        wait_for(flag, 1, timeout_ms)
        tl.store(out + pid + 1, tl.load(out))


@triton.jit
def polling_kernel(flag, out):
    """The same, by an atomic loop as compiled code has it."""
    pid = tl.program_id(0)
    if pid == tl.num_programs(0) - 1:
        tl.store(out, 42)
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
            pass
        tl.store(out + pid + 1, tl.load(out))


def test_a_program_may_wait_for_a_later_resident_one():
    for kernel, limit in ((late_producer_kernel, (300_000,)), (polling_kernel, ())):
        flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
        with execution(resident=16):
            kernel[(16,)](flag, out, *limit)
        assert (out == 42).all()


@pytest.mark.parametrize("resident", [1, 15])
def test_a_program_that_waits_for_one_not_resident_expires(resident):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    with execution(resident=resident), pytest.raises(Expired, match="have 0, want 1") as caught:
        late_producer_kernel[(16,)](flag, out, 100)
    assert "of late_producer_kernel, grid (16, 1, 1)" in caught.value.__notes__[0]


@triton.jit
def failing_kernel(flag, FAIL: tl.constexpr):
    if tl.program_id(0) == 5:
        FAIL(flag)
    else:
        while tl.atomic_add(flag, 0) < 1:
            pass


def run_failing(fail_by):
    with execution(resident=8):
        failing_kernel[(8,)](torch.zeros(1, dtype=torch.int32), fail_by)


class OutOfReach(LookupError):
    pass


@interpreter.builtin
def raise_out_of_reach(flag):
    raise OutOfReach("peer 3")


@triton.jit
def call_raise_out_of_reach(flag):
    raise_out_of_reach(flag)


@pytest.mark.parametrize("fail_by", [raise_out_of_reach, call_raise_out_of_reach])
def test_an_error_keeps_its_type_and_ends_the_other_programs(fail_by):
    """They would poll for ever."""
    with pytest.raises(OutOfReach, match="peer 3") as caught:
        run_failing(fail_by)
    assert caught.value.__notes__ == ["in program (5, 0, 0) of failing_kernel, grid (8, 1, 1)"]
    assert not interpreter.aborted()


def test_a_single_programs_error_keeps_its_type():
    with pytest.raises(OutOfReach, match="peer 3") as caught:
        unary_kernel[(1,)](torch.zeros(4), torch.zeros(4), call_raise_out_of_reach, 4)
    assert caught.value.__notes__ == ["in program (0, 0, 0) of unary_kernel, grid (1, 1, 1)"]


@interpreter.builtin
def press_ctrl_c(flag):
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_launch():
    with pytest.raises(KeyboardInterrupt):
        run_failing(press_ctrl_c)


def test_threads_may_launch_at_once():
    """Each launch has its own grid, and an error in one doesn't end another."""
    outs, errors = [torch.zeros(24 * n, dtype=torch.int32) for n in range(1, 5)], []

    def launch(n):
        program_ids_kernel[(4 * n, 3, 2)](outs[n - 1])

    def launch_failing():
        try:
            run_failing(raise_out_of_reach)
        except OutOfReach as error:
            errors.append(error)

    threads = [threading.Thread(target=launch, args=(n,)) for n in range(1, 5)]
    threads += [threading.Thread(target=launch_failing)]
    with execution(resident=3):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(out.tolist() == list(range(1, 1 + out.numel())) for out in outs)
    assert len(errors) == 1


@triton.jit
def jittery_kernel(out):
    interpreter_jitter()
    tl.store(out + tl.program_id(0), 1)
    interpreter_jitter()


interpreter_jitter = interpreter.jitter


def delays_of(monkeypatch, **settings):
    """The delays of each program of a launch, for two launches."""
    launches = []
    with monkeypatch.context() as patch, execution(**settings):
        for _ in range(2):
            delays = []
            patch.setattr(interpreter, "_pause", lambda s, to=delays: to.append((interpreter._current().index, s)))
            jittery_kernel[(12,)](torch.zeros(12))
            launches.append(sorted(delays, key=lambda delay: delay[0]))
    return launches


def test_jitter_repeats_by_seed_and_differs_by_rank_and_launch(monkeypatch):
    first, second = delays_of(monkeypatch, jitter_seed=7, rank=0)
    assert first and second and first != second
    assert [first, second] == delays_of(monkeypatch, jitter_seed=7, rank=0)
    assert [first, second] == delays_of(monkeypatch, jitter_seed=7, rank=0, resident=1)
    assert first != delays_of(monkeypatch, jitter_seed=7, rank=1)[0]
    assert first != delays_of(monkeypatch, jitter_seed=8, rank=0)[0]
    assert delays_of(monkeypatch, jitter_seed=None) == [[], []]


def test_settings():
    usual = interpreter.resident()
    with execution(resident=3):
        with execution(jitter_seed=1):
            assert interpreter.resident() == 3
    assert interpreter.resident() == usual
    with pytest.raises(ValueError, match=r"resident=0 \(TKERNELS_RESIDENT\): at least 1 program must be in flight"):
        interpreter.set_default(resident=0)


# cost and installation


@triton.jit
def identity(x):
    return x


@triton.jit
def nested_kernel(out, n, OP: tl.constexpr):
    x = 0
    for _ in range(n):
        x = OP(x)
    tl.store(out, x)


def test_nested_calls_are_cheap():
    """For each call of a @jit function stock makes 1700, to patch the language anew; this makes a few."""
    out, calls = torch.ones(1, dtype=torch.int32), []
    nested_kernel[(1,)](out, 1, identity)
    for n in (1, 1001):
        counted = 0

        def count(frame, event, argument):
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        threading.setprofile(count)
        try:
            nested_kernel[(1,)](out, n, identity)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        calls.append(counted)
    assert 0 < calls[1] - calls[0] < 1000 * 30
    assert out == 0


def test_install_in_a_fresh_process(tmp_path):
    """Triton imported first, so that its own functions are compiled ones; importing the module changes nothing."""
    script = """
        import importlib.util, os, sys
        import torch, triton, triton.language as tl
        from triton.runtime.jit import JITFunction

        language = [tl.load, tl.range, tl.tensor.sum, tl.core.reduce]
        spec = importlib.util.spec_from_file_location("interpreter", sys.argv[1])
        interpreter = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(interpreter)

        @triton.jit
        def double(x):
            return x * 2

        assert isinstance(double, JITFunction)
        assert language == [tl.load, tl.range, tl.tensor.sum, tl.core.reduce]
        interpreter.install()
        interpreter.install()
        assert interpreter.resident() == 5
        assert triton.knobs.runtime.interpret and "TRITON_INTERPRET" not in os.environ

        @triton.jit
        def kernel(out):
            tl.store(out + tl.program_id(0), double(tl.zeros((2, 4), tl.int32) + 1).sum(1).max(0))

        out = torch.zeros(4, dtype=torch.int32)
        kernel[(4,)](out)
        assert out.tolist() == [8] * 4
        pid = os.fork()
        if not pid:  # the child has none of its parent's threads
            out.zero_()
            kernel[(4,)](out)
            os._exit(0 if out.tolist() == [8] * 4 else 1)
        assert os.waitpid(pid, 0)[1] == 0
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TKERNELS_JITTER")}
    env["TKERNELS_RESIDENT"] = "5"
    subprocess.run([sys.executable, tmp_path / "script.py", interpreter.__file__], env=env, check=True, timeout=600)


def test_a_kernel_sees_only_its_own_imports():
    """Stock copies its own globals into a kernel's module, and a forgotten import shows on the GPU only."""
    nested_kernel[(1,)](torch.zeros(1, dtype=torch.int32), 1, identity)
    assert not {"InterpreterBuilder", "GridExecutor", "dataclass"} & globals().keys()


# alignment


@triton.jit
def astray_kernel(out, x, mask, STORE: tl.constexpr):
    i = tl.arange(0, 4)
    if STORE:
        tl.store(out + i, 1.0, mask=i < mask)
    else:
        tl.store(x + i, tl.load(out + i, mask=i < mask, other=0.0))


@pytest.mark.parametrize("store", [False, True])
def test_an_element_across_a_multiple_of_its_size_is_refused_as_on_a_gpu(store):
    x = torch.zeros(4)
    pointer = triton.reinterpret(torch.zeros(32, dtype=torch.uint8)[2:], tl.float32)  # torch's memory is aligned
    with pytest.raises(ValueError, match="misaligned address: elements of 4 bytes, 2 past a multiple of that"):
        astray_kernel[(1,)](pointer, x, 1, STORE=store)
    astray_kernel[(1,)](pointer, x, 0, STORE=store)  # what is masked out is not accessed
