"""Staging: copies of matrices whose rows TMA can't take, in rows that it can.

TMA reads and writes rows of whole 16 bytes. Read by pointers, a product is two to five times slower, as each element of
a tile costs registers, and cuBLAS loses as much. So an operand of other rows is copied into wider rows first, at the
speed of memory. A result of other rows is stored by pointers, which costs 3 to 7 %: by `matmul`, and by an all-gather
between two ranks. Other fused operations compute it in wider rows, and copy it to where it belongs. As TF32, operands
of which K is not contiguous are copied too, with K contiguous.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tkernels.comm.launch import PreparedLaunch
from tkernels.comm.regions import round_up

VECTOR_BYTES = 16  # of which rows are multiples that TMA takes
ROW_BYTES = 128  # of which rows are multiples: a box of TMA's then reads whole lines of the cache
SECTOR = 32  # bytes that the cache reads at least
ELEMENTS, MOST_COLUMNS = 8192, 2048  # of a program
TURNED_TILE = 64  # rows and columns of a program that turns them: lines of the cache on both sides


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def copy_rows_kernel(
    source, source_row_stride, source_column_stride, source_columns,  # may be read up to there
    target, target_stride, target_columns,  # and is written up to there
    rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Copy rows between different strides. Where either side is aligned, so is its number of columns, for vectors."""
    blocks = tl.cdiv(tl.maximum(source_columns, target_columns), COLUMNS)
    row = tl.cast(tl.program_id(0) // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    at = source + row * source_row_stride + tl.cast(column, tl.int64) * source_column_stride
    value = tl.load(at, mask=(row < rows) & (column < source_columns), other=0.0)
    tl.store(target + row * target_stride + column, value, mask=(row < rows) & (column < target_columns))
# fmt: on


def in_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The matrix, or its transpose if that is what lies in rows, and whether it is."""
    transposed = matrix.stride(0) == 1 and matrix.stride(1) != 1
    return matrix.t() if transposed else matrix, transposed


def with_unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a contiguous copy where no stride is 1, as in x[:, ::2], or one is 0, as where it is expanded."""
    if 1 in matrix.stride() and 0 not in matrix.stride():
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)  # contiguous() keeps a dimension of size 1 at any stride


@dataclass(frozen=True)
class Rows:
    """Wide rows for matrices like one: of its shape, `stride` elements apart.

    turned: they are transposed in memory, so its columns are what lies in rows.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    turned: bool
    stride: int

    @classmethod
    def of(cls, matrix: torch.Tensor, row_bytes: int = ROW_BYTES, turned: bool | None = None) -> "Rows":
        """Those of which each takes a multiple of row_bytes. turned: None, as the matrix, or whether they are to be."""
        turned, dtype = in_rows(matrix)[1] if turned is None else turned, matrix.dtype
        rows, columns = (matrix.t() if turned else matrix).shape
        return cls(rows, columns, dtype, turned, round_up(columns * dtype.itemsize, row_bytes) // dtype.itemsize)

    @property
    def bytes(self) -> int:
        return self.rows * self.stride * self.dtype.itemsize

    def empty(self, device) -> torch.Tensor:
        """A matrix of the shape, in wide rows."""
        rows = torch.empty((self.rows, self.stride), dtype=self.dtype, device=device)[:, : self.columns]
        return rows.t() if self.turned else rows

    def plan_copy(self, matrix: torch.Tensor, back: bool = False):
        """Plan the copy of matrices like this one into wide rows, zeros behind them; back: out of them.

        Returns a function of (source, target). Into them, a matrix may lie in any way: turned, or expanded.
        """
        row_stride, column_stride = (matrix.t() if self.turned else matrix).stride()
        sides = (row_stride, self.columns), (self.stride, self.stride)
        (source_stride, source_columns), (target_stride, target_columns) = sides[::-1] if back else sides
        across = self.columns > 1 and column_stride != 1
        columns = TURNED_TILE if across else min(triton.next_power_of_2(self.stride), MOST_COLUMNS)
        rows = TURNED_TILE if across else max(ELEMENTS // columns, 1)
        example = torch.empty(0, dtype=self.dtype, device="meta")
        return PreparedLaunch(
            copy_rows_kernel, triton.cdiv(self.rows, rows) * triton.cdiv(self.stride, columns),
            varying=("source", "target"), source=example, source_row_stride=source_stride,
            source_column_stride=column_stride if across else 1, source_columns=source_columns, target=example,
            target_stride=target_stride, target_columns=target_columns, rows=self.rows, ROWS=rows, COLUMNS=columns,
            num_warps=8,
        )  # fmt: skip
