"""Staging: copies of matrices whose rows TMA can't take, in rows that it can.

TMA reads and writes rows of whole 16 bytes. By pointers a product is two to five times slower, as each element of a
tile costs registers, and cuBLAS loses as much. So an operand of other rows is copied into wider rows first, and a
result is computed in such rows and copied to where it belongs; both copies run at the speed of memory.
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


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def copy_rows_kernel(
    source, source_stride, source_columns,  # may be read up to there
    target, target_stride, target_columns,  # and is written up to there
    rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Copy rows between different strides. Where either side is aligned, so is its number of columns, for vectors."""
    blocks = tl.cdiv(tl.maximum(source_columns, target_columns), COLUMNS)
    row = tl.cast(tl.program_id(0) // blocks, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    value = tl.load(source + row * source_stride + column, mask=(row < rows) & (column < source_columns), other=0.0)
    tl.store(target + row * target_stride + column, value, mask=(row < rows) & (column < target_columns))
# fmt: on


@dataclass(frozen=True)
class Rows:
    """Wide rows for matrices like one: of its shape and orientation, `stride` elements apart.

    turned: the matrix is transposed in memory, so its columns are what lies in rows.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    turned: bool
    stride: int

    @classmethod
    def of(cls, matrix: torch.Tensor, row_bytes: int = ROW_BYTES) -> "Rows":
        """Those of which each takes a multiple of row_bytes."""
        turned, dtype = matrix.stride(0) == 1 and matrix.stride(1) != 1, matrix.dtype
        rows, columns = (matrix.t() if turned else matrix).shape
        return cls(rows, columns, dtype, turned, round_up(columns * dtype.itemsize, row_bytes) // dtype.itemsize)

    def empty(self, device) -> torch.Tensor:
        """A matrix of the shape, in wide rows."""
        rows = torch.empty((self.rows, self.stride), dtype=self.dtype, device=device)[:, : self.columns]
        return rows.t() if self.turned else rows

    def plan_copy(self, matrix: torch.Tensor, back: bool = False):
        """Plan the copy of matrices like this one into wide rows, zeros behind them; back: out of them.

        Returns a function of (source, target).
        """
        stride = matrix.stride(1 if self.turned else 0)
        sides = (stride, self.columns), (self.stride, self.stride)
        (source_stride, source_columns), (target_stride, target_columns) = sides[::-1] if back else sides
        columns = min(triton.next_power_of_2(self.stride), MOST_COLUMNS)
        rows = max(ELEMENTS // columns, 1)
        example = torch.empty(0, dtype=self.dtype, device="meta")
        return PreparedLaunch(
            copy_rows_kernel, triton.cdiv(self.rows, rows) * triton.cdiv(self.stride, columns),
            varying=("source", "target"), source=example, target=example, source_stride=source_stride,
            source_columns=source_columns, target_stride=target_stride, target_columns=target_columns, rows=self.rows,
            ROWS=rows, COLUMNS=columns, num_warps=8,
        )  # fmt: skip
