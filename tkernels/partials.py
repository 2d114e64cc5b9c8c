"""Partial sums as reductions send them: rows of N columns, in the operands' dtype or fp32, or in FP8 with scales.

A row in FP8 (e4m3) is 16 * (ceil(N / 16) + ceil(N / 512)) bytes: N elements, then, at the next multiple of 16 bytes, an
fp32 scale for each SCALED columns. So a chunk's scales lie in the chunk and behind its signal, whoever sends it, and
rows begin at multiples of 16 bytes for any N; slices of a tile past N have room for scales too. A tile's slice has
SCALED columns, and one program has it whole, so it finds the scales itself, and scales fp32 sums. Scales are powers of
two (quantize.scale_of): neither dividing by one nor multiplying rounds, and the bits of an element beyond 4 are all
that is lost. What isn't finite arrives as NaN.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from tkernels.configs import FP8, GemmConfig, OverlapConfig
from tkernels.gemm import load_tile, store_tile, up_to
from tkernels.quantize import divide, magnitude, scale_of

WIRE_FP8 = FP8[0]
SCALED = tl.constexpr(128)  # columns of a row that share a scale
MOST = tl.constexpr(torch.finfo(WIRE_FP8).max)


# fmt: off
@triton.jit
def row_elements(N, memory):
    """From a row in that memory, a pointer, to the next, in its elements."""
    if memory.dtype.element_ty.primitive_bitwidth == 8:
        elements = 16 * (tl.cdiv(N, 16) + tl.cdiv(N, 4 * SCALED))
    else:
        elements = N
    return elements


@triton.jit
def scales_of(memory, row, column, N, ROWS: tl.constexpr):
    """Pointers to the scales of the SCALED columns from `column` on, of ROWS rows from `row` on."""
    rows = tl.cast(row, tl.int64) + tl.arange(0, ROWS)
    words = memory.to(tl.pointer_type(tl.float32)) + tl.cdiv(N, 16) * 4 + column // SCALED
    return words + rows * (row_elements(N, memory) // 4)


@triton.jit
def store_partials(value, result, row, num_rows, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the first `num_rows` rows of a slice of scaled sums [ROWS, COLUMNS] to the outbox."""
    if result.outbox_memory.dtype.element_ty.primitive_bitwidth == 8:
        unit = scale_of(tl.max(magnitude(value), 1), MOST, True)
        scales = scales_of(result.outbox_memory, row, column, result.y.columns, ROWS)
        tl.store(scales, unit, mask=tl.arange(0, ROWS) < num_rows)
        value = divide(value, unit[:, None], result.outbox_memory.dtype.element_ty)
    store_tile(value, result.outbox, row, num_rows, column, ROWS, COLUMNS)


@triton.jit
def load_partials(result, row, num_rows, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A peer's partial sums, in fp32, from row `row` of the inbox on."""
    theirs = load_tile(up_to(result.partials, row + num_rows), row, column, ROWS, COLUMNS).to(tl.float32)
    if result.partials_memory.dtype.element_ty.primitive_bitwidth == 8:
        scales = scales_of(result.partials_memory, row, column, result.y.columns, ROWS)
        theirs *= tl.load(scales, mask=tl.arange(0, ROWS) < num_rows, other=0.0)[:, None]
    return theirs
# fmt: on


def elements_of(N: int, dtype: torch.dtype) -> int:
    """`row_elements`, on the host."""
    return 16 * (triton.cdiv(N, 16) + triton.cdiv(N, 4 * SCALED.value)) if dtype in FP8 else N


def with_scaled_slices(config: OverlapConfig, narrow: bool = False) -> OverlapConfig:
    """The same with tiles whose slices have SCALED columns, with 8 warps, as a slice of 64 rows spills with 4.

    narrow: only one slice, which takes fewer registers.
    """
    gemm, columns = config.gemm, SCALED.value
    if gemm.block_n >= 2 * columns and not narrow:
        gemm = replace(gemm, block_n=2 * columns, split=2)
    else:  # as many elements as there were, as far as possible
        rows = gemm.block_m if gemm.block_n >= columns else min(gemm.block_m, 64)
        gemm = replace(gemm, block_m=rows, block_n=columns, split=1, num_warps=max(gemm.num_warps, 8))
    return config if gemm == config.gemm else replace(config, gemm=gemm)


def check_scaled_slices(operation: str, config: OverlapConfig):
    """Raise ValueError for a configuration that can't send FP8."""
    gemm: GemmConfig = config.gemm
    if config.interleaved or gemm.block_n != SCALED.value * gemm.split:
        raise ValueError(
            f"{operation}: wire_dtype={WIRE_FP8} takes tiles in slices of {SCALED.value} columns, which share a scale, "
            f"sent in whole chunks; pass block_n={SCALED.value} with split=1 or block_n={2 * SCALED.value} with "
            f"split=2, and interleaved=False, not block_n={gemm.block_n}, split={gemm.split} and "
            f"interleaved={config.interleaved}"
        )
