"""q = x / scale in FP8, where scale makes the largest element the largest number of the format: x is about q * scale.

    scale = largest(|x|) / 448 for e4m3, / 57344 for e5m2, in fp32: one a row, or one for all
    q     = x * (1 / scale), rounded to nearest even

Where an activation comes before, alone or as the gate of a product, x is what they give, and no memory holds that.
A program takes a row. It holds a short one, and one with an activation; others it reads twice, the second time from
the L2 cache, for programs that hold much are few, and wait together. Rows that the cache has no room for take two
kernels: maxima of parts of a row, then their maximum and the cast. A whole tensor is one row. Bits are the same on
every run, and the same as those of `quantize_reference`.
"""

import functools
import logging
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tkernels.activations import ACTIVATIONS, activate, activation_reference, check_activation
from tkernels.comm import runtime
from tkernels.comm.arguments import check_resolved
from tkernels.comm.calls import local_calls
from tkernels.comm.launch import PreparedLaunch
from tkernels.comm.regions import round_up
from tkernels.configs import DTYPES, FP8

SCALES = ("row", "tensor")
LONGEST_ROW = 32768  # that a program holds: 32 elements of each of 1024 threads, without spills
SHORT_ROW = 1023  # that a program holds, where it could read it twice
HELD = 2048  # elements that a program holds at least, of several rows where they are short
LONGEST_READ = 1 << 17  # bytes of a row that a program reads twice: those of all SMs fit in the L2 cache
ELEMENTS = 8192  # that a program of parts loads at once, with 8 warps
MOST_PARTS = 1024  # of a row
# Least scale, the smallest normal number of fp32: its inverse is finite, so a row of zeros gives zeros.
LEAST = tl.constexpr(2.0**-126)
INFINITY = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)

_log = logging.getLogger("tkernels")


# fmt: off
@triton.jit
def magnitude(x):
    """|x| in fp32, 0 for what isn't finite."""
    value = tl.abs(x.to(tl.float32))
    return tl.where(value < INFINITY, value, 0.0)


@triton.jit
def scale_of(largest, MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of values up to `largest`, in a format whose largest number is MOST."""
    scale = tl.maximum(tl.div_rn(largest, MOST), LEAST)
    if POWER_OF_TWO:  # rounded up, in the bits: a mantissa that isn't 0 carries into the exponent
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def divide(x, scale, DTYPE: tl.constexpr):
    """x / scale in FP8; NaN for what isn't finite."""
    x = x.to(tl.float32)
    inverse = tl.div_rn(1.0, scale)
    return tl.where(tl.abs(x) < INFINITY, x * inverse, float("nan")).to(DTYPE)


class Source(NamedTuple):
    """What is quantized: rows of x, or activation(x), or activation(gate) * x. Pointers, and elements between rows."""

    x: object
    x_stride: object
    gate: object
    gate_stride: object


@triton.jit
def load(source, row, column, inside, ACTIVATION: tl.constexpr):
    """Elements of a source; 0 outside, and inside=None loads all. Each step is rounded as in x."""
    other: tl.constexpr = None if inside is None else 0.0
    value = tl.load(source.x + row * source.x_stride + column, mask=inside, other=other)
    if source.gate is not None:
        factor = tl.load(source.gate + row * source.gate_stride + column, mask=inside, other=other)
        factor = activate(factor.to(tl.float32), ACTIVATION).to(factor.dtype).to(tl.float32)
        value = (factor * value.to(tl.float32)).to(value.dtype)
    elif ACTIVATION != 0:
        value = activate(value.to(tl.float32), ACTIVATION).to(value.dtype)
    return value


@triton.jit
def largest_of(source, row, start, end, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """The largest magnitude between two columns of a row.

    Whole blocks have no mask: one that may end anywhere would let each thread load only one element at once.
    """
    found = tl.zeros((BLOCK,), tl.float32)
    whole = start + (end - start) // BLOCK * BLOCK
    for first in range(start, whole, BLOCK):
        values = load(source, row, first + tl.arange(0, BLOCK), None, ACTIVATION)
        found = tl.maximum(found, magnitude(values))
    if whole < end:
        column = whole + tl.arange(0, BLOCK)
        found = tl.maximum(found, magnitude(load(source, row, column, column < end, ACTIVATION)))
    return tl.max(found, 0)


@triton.jit
def cast(source, row, start, end, unit, q, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Write what lies between two columns of a row, divided by its scale. q: where the row begins."""
    whole = start + (end - start) // BLOCK * BLOCK
    for first in range(start, whole, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = load(source, row, column, None, ACTIVATION)
        tl.store(q + column, divide(values, unit, q.dtype.element_ty))
    if whole < end:
        column = whole + tl.arange(0, BLOCK)
        values = load(source, row, column, column < end, ACTIVATION)
        tl.store(q + column, divide(values, unit, q.dtype.element_ty), mask=column < end)


@triton.jit
def saturate(x, factor, MOST: tl.constexpr, DTYPE: tl.constexpr):
    """x * factor in FP8, whose largest number MOST stands for what is larger; NaN stays NaN."""
    return tl.clamp(x.to(tl.float32) * factor, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def quantize_rows_kernel(
    x, x_stride, gate, gate_stride, q, scale, rows, columns,  # [rows, columns], twice or None, [rows, columns], [rows]
    MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Each program quantizes ROWS whole rows, which it holds."""
    row = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    values = load(Source(x, x_stride, gate, gate_stride), row, column, inside, ACTIVATION)
    unit = scale_of(tl.max(magnitude(values), 1, keep_dims=True), MOST, POWER_OF_TWO)
    tl.store(scale + row, unit, mask=row < rows)
    tl.store(q + row * columns + column, divide(values, unit, q.dtype.element_ty), mask=inside)


@triton.jit
def quantize_row_kernel(
    x, x_stride, gate, gate_stride, q, scale, columns,  # as above
    MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):
    """Each program quantizes a row, which it reads twice."""
    row = tl.cast(tl.program_id(0), tl.int64)
    source = Source(x, x_stride, gate, gate_stride)
    unit = scale_of(largest_of(source, row, 0, columns, BLOCK, ACTIVATION), MOST, POWER_OF_TWO)
    tl.store(scale + row, unit)
    cast(source, row, 0, columns, unit, q + row * columns, BLOCK, ACTIVATION)


@triton.jit
def largest_kernel(
    x, x_stride, gate, gate_stride, largest, columns, parts, part,  # as above; [rows, parts]; columns of a part
    ONE_ROW: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):
    """The largest magnitude of each part of each row. ONE_ROW: then its parts are aligned, whatever its length."""
    row = 0 if ONE_ROW else tl.cast(tl.program_id(0) // parts, tl.int64)
    start = tl.cast(tl.program_id(0) % parts, tl.int64) * part
    end = tl.minimum(start + part, columns)
    found = largest_of(Source(x, x_stride, gate, gate_stride), row, start, end, BLOCK, ACTIVATION)
    tl.store(largest + tl.program_id(0), found)


@triton.jit
def quantize_parts_kernel(
    x, x_stride, gate, gate_stride, largest, q, scale, columns, parts, part,  # as above; [rows, columns], [rows]
    MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr, PARTS: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Each program quantizes a part of a row, by the largest magnitude of all its parts. PARTS: room for them."""
    row = 0 if ONE_ROW else tl.cast(tl.program_id(0) // parts, tl.int64)
    start = tl.cast(tl.program_id(0) % parts, tl.int64) * part
    end = tl.minimum(start + part, columns)
    each = tl.arange(0, PARTS)
    found = tl.max(tl.load(largest + row * parts + each, mask=each < parts, other=0.0), 0)
    unit = scale_of(found, MOST, POWER_OF_TWO)
    if start == 0:
        tl.store(scale + row, unit)
    cast(Source(x, x_stride, gate, gate_stride), row, start, end, unit, q + row * columns, BLOCK, ACTIVATION)


@triton.jit
def quantize_by_kernel(
    x, x_stride, gate, gate_stride, factor, largest, q, scale, columns, parts, part,  # as above; one, or None
    MOST: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):
    """Each program multiplies a part of a row by the factor, and raises `largest` to the largest magnitude in it."""
    row = 0 if ONE_ROW else tl.cast(tl.program_id(0) // parts, tl.int64)
    start = tl.cast(tl.program_id(0) % parts, tl.int64) * part
    end = tl.minimum(start + part, columns)
    source, by, q = Source(x, x_stride, gate, gate_stride), tl.load(factor), q + row * columns
    found = tl.zeros((BLOCK,), tl.float32)
    whole = start + (end - start) // BLOCK * BLOCK
    for first in range(start, whole, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = load(source, row, column, None, ACTIVATION)
        found = tl.maximum(found, magnitude(values))
        tl.store(q + column, saturate(values, by, MOST, q.dtype.element_ty))
    if whole < end:
        column = whole + tl.arange(0, BLOCK)
        values = load(source, row, column, column < end, ACTIVATION)
        found = tl.maximum(found, magnitude(values))
        tl.store(q + column, saturate(values, by, MOST, q.dtype.element_ty), mask=column < end)
    if largest is not None:
        tl.atomic_max(largest, tl.max(found, 0), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(scale, tl.div_rn(1.0, by))


@triton.jit
def next_factor_kernel(
    factor, largest, history, at, length,  # one, one, [length], one
    MOST: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
):
    """`largest` takes the oldest's place in a history, and becomes 0; the factor makes the largest there SHARE * MOST.

    A history without any magnitude leaves the factor as it is.
    """
    place, newest = tl.load(at), tl.load(largest)
    found = newest
    for first in range(0, length, BLOCK):
        each = first + tl.arange(0, BLOCK)
        others = tl.load(history + each, mask=(each < length) & (each != place), other=0.0)
        found = tl.maximum(found, tl.max(others, 0))
    tl.debug_barrier()  # all warps have read what one of them writes now
    tl.store(history + place, newest)
    tl.store(largest, 0.0)
    tl.store(at, (place + 1) % length)
    if found > 0.0:
        tl.store(factor, tl.minimum(tl.div_rn(MOST, found) * SHARE, LARGEST))


@triton.jit
def dequantize_kernel(
    q, scale, scale_stride, x, columns,  # [rows, columns], [rows] or with a stride of 0 one for all, [rows, columns]
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(columns, BLOCK)
    row = tl.cast(tl.program_id(0) // blocks, tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(q + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    value *= tl.load(scale + row * scale_stride)
    tl.store(x + row * columns + column, value.to(x.dtype.element_ty), mask=column < columns)


@triton.jit
def some_scale(largest):
    """The largest of some scales as a divisor of them: 1 where all are 0, which stand for zeros and stay so."""
    return tl.where(largest == 0, 1.0, largest)


@triton.jit(do_not_specialize=["rows"])
def transpose_kernel(
    q, scale, scale_stride, largest, t, rows, columns, padded,  # [rows, columns], as above, one, [columns, padded]
    BLOCK: tl.constexpr,
):
    """Each program transposes a tile, in the scale `largest`; zeros from `rows` on."""
    tiles = tl.cdiv(columns, BLOCK)
    row = tl.cast(tl.program_id(0) // tiles, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.cast(tl.program_id(0) % tiles, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    at = row[:, None] * columns + column[None, :]
    value = tl.load(q + at, mask=inside[:, None] & (column < columns)[None, :], other=0.0).to(tl.float32)
    unit = tl.load(scale + row * scale_stride, mask=inside, other=0.0)
    value = (value * tl.div_rn(unit, some_scale(tl.load(largest)))[:, None]).to(t.dtype.element_ty)
    at = column[:, None] * padded + row[None, :]
    tl.store(t + at, tl.trans(value), mask=(column < columns)[:, None] & (row < padded)[None, :])
# fmt: on


def quantize(
    x: torch.Tensor, gate: torch.Tensor | None, scale: str, dtype: torch.dtype, power_of_two: bool,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `tkernels.quantize`."""
    options = scale, dtype, power_of_two, activation
    return local_calls.call((Quantize, *options), Quantize(*options).prepare, x, gate)


class Quantize(NamedTuple):
    """A call of `quantize`, of x and gate, which may be None."""

    operation = "quantize"

    scale: str
    dtype: torch.dtype
    power_of_two: bool
    activation: str | None = None

    def prepare(self, x: torch.Tensor, gate: torch.Tensor | None, *given: torch.Tensor | None):
        """The function of tensors like these that carries out the call. given: quantize_by's factor and `largest`."""
        self.check(x, gate)
        if x.numel() == 0:
            return self.by_torch
        if not _takes_fp8(x.device):
            _say_slow(str(x.device))
            return self.by_torch
        in_one = not given or all(each is None or each.is_contiguous() for each in (x, gate))
        columns = x.numel() if self.scale == "tensor" and in_one else x.shape[-1]
        plan = self.by_factor if given else self.plan(x, gate, columns)
        rows = (each if each is None else in_rows_of(each, columns) for each in (x, gate))
        run = plan(*rows, self.results(x)[0], *given)

        def call(x, gate, *given):
            q, scale = self.results(x)
            rows = (in_rows_of(each, columns) for each in (x, gate) if each is not None)
            run(*rows, *(each for each in given if each is not None), q, scale)
            return q, scale

        return call

    def by_torch(self, x: torch.Tensor, gate: torch.Tensor | None, *given: torch.Tensor | None):
        first = activation_reference(x if gate is None else gate, self.activation)
        values = first if gate is None else first * x
        if given:
            return quantize_by_reference(values, *given, self.dtype)
        return quantize_reference(values, self.scale, self.dtype, self.power_of_two)

    def check(self, x: torch.Tensor, gate: torch.Tensor | None):
        device = runtime.device()
        if x.device != device:
            raise ValueError(f"quantize: x is on {x.device}, but the operation runs on {device}")
        if x.dim() == 0:
            raise ValueError("quantize: takes x [..., K], but x is a scalar")
        if x.dtype not in DTYPES:
            raise TypeError(f"quantize: x is {x.dtype}, but must be float32, float16 or bfloat16")
        if self.dtype not in FP8:
            raise TypeError(f"quantize: dtype={self.dtype} must be {' or '.join(map(str, FP8))}")
        if self.scale not in SCALES:
            raise ValueError(f"quantize: scale={self.scale!r} must be {' or '.join(map(repr, SCALES))}")
        if not isinstance(self.power_of_two, int) or self.power_of_two not in (0, 1):
            raise TypeError(f"quantize: power_of_two={self.power_of_two!r} must be True or False")
        check_activation("quantize", self.activation)
        check_resolved("quantize", "x", x)
        if gate is None:
            return
        if (gate.shape, gate.dtype, gate.device) != (x.shape, x.dtype, x.device):
            raise ValueError(
                f"quantize: gate is {gate.dtype} {tuple(gate.shape)} on {gate.device}, but must be like x, {x.dtype} "
                f"{tuple(x.shape)} on {x.device}"
            )
        check_resolved("quantize", "gate", gate)

    def results(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and scale, without values."""
        shape = (*x.shape[:-1], 1) if self.scale == "row" else ()
        return x.new_empty(x.shape, dtype=self.dtype), x.new_empty(shape, dtype=torch.float32)

    def plan(self, x: torch.Tensor, gate: torch.Tensor | None, columns: int):
        """Which of the launches below takes rows of so many columns. None computes an activation twice where it can."""
        if self.activation is None and SHORT_ROW < columns <= LONGEST_READ // x.itemsize:
            return self.by_reads
        return self.by_row if columns <= (LONGEST_ROW if gate is None else LONGEST_ROW // 2) else self.by_part

    def by_row(self, x: torch.Tensor, gate: torch.Tensor | None, q: torch.Tensor):
        """The launch for tensors like these [rows, columns], of rows that a program holds, 16 or 32 elements a thread.

        A function of x, gate if there is one, q and scale.
        """
        rows, wide = len(x), triton.next_power_of_2(x.shape[1])
        together = max(HELD // wide, 1)
        blocks = {"rows": rows, "ROWS": together, "COLUMNS": wide, "num_warps": min(max(wide, HELD) // 512, 32)}
        return self.launch(quantize_rows_kernel, triton.cdiv(rows, together), x, gate, q=q, **blocks)

    def by_reads(self, x: torch.Tensor, gate: torch.Tensor | None, q: torch.Tensor):
        """The same for rows that a program reads twice, by blocks of at most 4/7 of a row, 16 elements a thread."""
        rows, columns = x.shape
        most = 8192 if columns * x.itemsize <= LONGEST_READ // 2 else 16384  # so that fewer rows are in the cache
        block = max(min(triton.next_power_of_2(columns * 4 // 7 + 1) // 2, most), 1)
        return self.launch(quantize_row_kernel, rows, x, gate, q=q, BLOCK=block, num_warps=max(block // 512, 1))

    def by_part(self, x: torch.Tensor, gate: torch.Tensor | None, q: torch.Tensor):
        """The same for long rows, of which several programs take a part each."""
        divided = self.divided(*x.shape)
        programs, wide = len(x) * divided["parts"], triton.next_power_of_2(divided["parts"])
        find = self.launch(largest_kernel, programs, x, gate, **divided)
        cast = self.launch(quantize_parts_kernel, programs, x, gate, q=q, PARTS=wide, **divided)

        def run(*loaded_q_scale):
            *loaded, q, scale = loaded_q_scale
            largest = q.new_empty(programs, dtype=torch.float32)
            find(*loaded, largest)
            cast(*loaded, largest, q, scale)

        return run

    def by_factor(self, x: torch.Tensor, gate: torch.Tensor | None, q: torch.Tensor, factor, largest):
        """The same in one launch, by a factor that is given: of this too and, if there is one, of `largest`."""
        given, divided = {"factor": factor, "largest": largest}, self.divided(*x.shape)
        return self.launch(quantize_by_kernel, len(x) * divided["parts"], x, gate, q=q, **given, **divided)

    def divided(self, rows: int, columns: int) -> dict:
        """How rows are divided into parts, a program's each, for kernels of parts."""
        programs = 8 * runtime.default_programs()  # 2048 threads of each SM
        parts = min(max(programs // rows, 1), MOST_PARTS, triton.cdiv(columns, ELEMENTS))
        part = round_up(triton.cdiv(columns, parts), ELEMENTS)
        parts = triton.cdiv(columns, part)
        return {"parts": parts, "part": part, "ONE_ROW": rows == 1, "BLOCK": ELEMENTS, "num_warps": 8}

    def launch(self, kernel, programs: int, x: torch.Tensor, gate: torch.Tensor | None, **arguments) -> PreparedLaunch:
        """Of a kernel that loads x and gate; those of the arguments below that it has are added."""
        like = torch.empty(0, dtype=torch.float32, device="meta")
        arguments |= {"x": x, "x_stride": x.stride(0), "gate": gate}
        arguments["gate_stride"] = 0 if gate is None else gate.stride(0)
        others = {"largest": like, "scale": like, "columns": x.shape[1]}
        others |= {"ACTIVATION": ACTIVATIONS[self.activation], "POWER_OF_TWO": self.power_of_two}
        others |= {"MOST": torch.finfo(self.dtype).max}
        arguments = {name: value for name, value in others.items() if name in kernel.arg_names} | arguments
        names = "x", "gate", "factor", "largest", "q", "scale"
        varying = tuple(name for name in names if arguments.get(name) is not None)
        return PreparedLaunch(kernel, programs, varying=varying, **arguments)


def quantize_by(
    x: torch.Tensor, gate: torch.Tensor | None, factor: torch.Tensor, largest: torch.Tensor | None, dtype: torch.dtype,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(x * factor in FP8, 1 / factor []) in one pass, for a factor [1] in fp32 that was chosen before.

    What is larger than the format's largest number becomes that, infinity too; NaN stays NaN. largest: fp32, one
    element, is raised to the largest finite magnitude. gate, activation: as of `quantize`.
    """
    call = Quantize("tensor", dtype, False, activation)
    return local_calls.call((Quantize, *call), call.prepare, x, gate, factor, largest)


def next_factor(
    factor: torch.Tensor, largest: torch.Tensor, history: torch.Tensor, at: torch.Tensor, dtype: torch.dtype,
    margin: int = 0,
):  # fmt: skip
    """Delayed scaling, on the device, after a `quantize_by` with a `factor` and `largest`, which is 0 again.

    history [length], fp32: the largest magnitudes of as many calls, of which the one `at` (int32, one element) is the
    oldest. The factor makes the largest of all the format's largest number, over 2**margin; without any it stays.
    """
    key = next_factor, dtype, margin
    local_calls.call(key, lambda *like: _plan_next_factor(*like, dtype, margin), factor, largest, history, at)


def _plan_next_factor(factor, largest, history, at, dtype: torch.dtype, margin: int):
    length = history.numel()
    block = min(triton.next_power_of_2(length), ELEMENTS)
    return PreparedLaunch(
        next_factor_kernel, 1, varying=("factor", "largest", "history", "at"), factor=factor, largest=largest,
        history=history, at=at, length=length, MOST=torch.finfo(dtype).max, SHARE=2.0**-margin, BLOCK=block,
        num_warps=max(block // 1024, 1),
    )  # fmt: skip


def dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `tkernels.dequantize`."""
    return local_calls.call((dequantize, dtype), lambda q, scale: _plan_dequantize(q, scale, dtype), q, scale)


def _plan_dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
    device, shape = runtime.device(), q.shape
    if q.dtype not in FP8 or scale.dtype != torch.float32 or dtype not in DTYPES:
        raise TypeError(
            f"dequantize: q is {q.dtype}, scale {scale.dtype} and dtype {dtype}, but they must be "
            f"{' or '.join(map(str, FP8))}, torch.float32, and float32, float16 or bfloat16"
        )
    if q.dim() == 0 or scale.numel() != 1 and scale.shape != (*shape[:-1], 1):
        raise ValueError(
            f"dequantize: scale is {tuple(scale.shape)}, but must be one number, or one for each row of q "
            f"{tuple(shape)}, that is {(*shape[:-1], 1)}"
        )
    if q.device != device or scale.device != device:
        raise ValueError(f"dequantize: q is on {q.device}, scale on {scale.device}, but the operation on {device}")
    if q.numel() == 0 or not _takes_fp8(device):
        return lambda q, scale: (q.float() * scale).to(dtype)
    columns = shape[-1] if scale.numel() > 1 else q.numel()
    block = min(triton.next_power_of_2(columns), ELEMENTS // 2)
    launch = PreparedLaunch(
        dequantize_kernel, q.numel() // columns * triton.cdiv(columns, block), varying=("q", "scale", "x"),
        q=q, scale=scale, scale_stride=int(scale.numel() > 1), x=torch.empty(0, dtype=dtype, device="meta"),
        columns=columns, BLOCK=block, num_warps=8,
    )  # fmt: skip

    def call(q, scale):
        x = torch.empty(shape, dtype=dtype, device=device)
        launch(q.contiguous(), scale.contiguous(), x)
        return x

    return call


def transpose_quantized(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of q [M, K] in FP8 with a scale, or with one a row: the transpose [K, M], and the largest of the scales for all.

    Its rows are padded with zeros to whole 16 bytes, as products take them. Elements are the same where scales are;
    the others are rounded again, or not where they are normal numbers and the scales powers of two. What a scale of 0
    stands for is zeros.
    """
    return local_calls.call((transpose_quantized,), _plan_transpose, q, scale)


def _plan_transpose(q: torch.Tensor, scale: torch.Tensor):
    if q.dim() != 2 or q.dtype not in FP8 or scale.dtype != torch.float32 or scale.numel() not in (1, q.shape[0]):
        raise ValueError(
            f"transpose_quantized: takes a matrix of float8 and float32 scales, one or one a row, not {q.dtype} "
            f"{tuple(q.shape)} and {scale.dtype} {tuple(scale.shape)}"
        )
    (rows, columns), padded, block = q.shape, round_up(q.shape[0], 16), 64
    if q.numel() == 0 or not _takes_fp8(q.device):
        return transpose_reference
    launch = PreparedLaunch(
        transpose_kernel, triton.cdiv(padded, block) * triton.cdiv(columns, block),
        varying=("q", "scale", "largest", "t"), q=q, scale=scale, scale_stride=int(scale.numel() > 1), largest=scale,
        t=q, rows=rows, columns=columns, padded=padded, BLOCK=block, num_warps=4,
    )  # fmt: skip

    def call(q, scale):
        t, largest = q.new_empty((columns, padded)), scale.amax()
        launch(q.contiguous(), scale.contiguous(), largest, t)
        return t, largest

    return call


def transpose_reference(q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`transpose_quantized` in torch: the same bits."""
    rows, columns = q.shape
    t, largest = q.new_zeros((columns, round_up(rows, 16))), scale.amax() if scale.numel() else scale.new_ones(())
    t[:, :rows] = (q.float() * (scale.reshape(-1, 1) / torch.where(largest == 0, 1, largest))).t().to(q.dtype)
    return t, largest


def in_rows_of(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x as rows of so many columns that lie next to each other: a view, else a copy."""
    rows = x.reshape(-1, columns)
    return rows if columns == 1 or rows.stride(1) == 1 else rows.contiguous()


def quantize_reference(
    x: torch.Tensor, scale: str, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` in torch: the same bits."""
    x = x.float()
    finite = x.isfinite()
    magnitude = torch.where(finite, x.abs(), 0)
    if x.numel() == 0:  # nothing is scaled as zeros are
        largest = x.new_zeros((*x.shape[:-1], 1) if scale == "row" else ())
    else:
        largest = magnitude.amax(-1, keepdim=True) if scale == "row" else magnitude.amax()
    unit = scale_reference(largest, dtype, power_of_two)
    return torch.where(finite, x * (1 / unit), torch.nan).to(dtype), unit


def quantize_by_reference(
    x: torch.Tensor, factor: torch.Tensor, largest: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_by` in torch: the same bits."""
    x, most = x.float(), torch.finfo(dtype).max
    if largest is not None and x.numel():
        largest.copy_(torch.maximum(largest, torch.where(x.isfinite(), x.abs(), 0).amax()))
    return (x * factor).clamp_(-most, most).to(dtype).contiguous(), factor.reciprocal().view(())


def scale_reference(largest: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    """The scale of values up to `largest`, fp32, in that format."""
    # By a tensor: a division by a number is, on a GPU, a product with its rounded inverse.
    unit = (largest / torch.full_like(largest, torch.finfo(dtype).max)).clamp_min(LEAST.value)
    if not power_of_two:
        return unit
    mantissa, exponent = torch.frexp(unit)  # 0.5 <= mantissa < 1
    return torch.ldexp(torch.ones_like(unit), exponent - (mantissa == 0.5).int())


def _takes_fp8(device: torch.device) -> bool:
    """Whether Triton casts to FP8 there."""
    return device.type != "cuda" or runtime.has_fp8()


@functools.cache
def _say_slow(device: str):
    _log.warning("quantize: %s has no FP8, so torch quantizes, in several passes over memory", device)
