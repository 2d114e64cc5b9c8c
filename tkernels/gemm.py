"""y[M, N] = activation(x[M, K] @ w[N, K].T + bias[N]), accumulated in fp32: the main loop that all operations share.

M rows of x.  N rows of w (out-features).  K the dimension summed over.

A persistent kernel: program p computes the BLOCK_M x BLOCK_N tiles p, p + num_programs, and so on until none are left.
Operands are loaded through TMA descriptors where their layout allows and through pointers elsewhere, and so is the
result stored. In either operand, either dimension may be contiguous.

Operands of FP8 (e4m3, e5m2) come with fp32 scales: y = activation((x @ w.T) * x_scale * w_scale + bias). K must be
contiguous in both, in rows of whole 16 bytes: of transposed ones Triton loads one operand through registers, at half of
the speed or less.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels.activations import ACTIVATIONS, activate, activate_in_place, check_activation
from tkernels.choice import product_way
from tkernels.comm import capture, runtime
from tkernels.comm.arguments import check_dense, check_out, check_resolved, check_tensors, check_type
from tkernels.comm.calls import local_calls
from tkernels.comm.launch import PreparedLaunch, rounded_to_tf32
from tkernels.configs import DTYPES, FP8, GemmConfig, result_dtype
from tkernels.gpus import GPU, gpu_here, stages_rows
from tkernels.kept import keeps, staged_weight
from tkernels.library import adds_bias_to_fp32, multiply_into, multiply_scaled_into
from tkernels.model import STAGED, Problem
from tkernels.staging import SECTOR, VECTOR_BYTES, Rows, in_rows, with_unit_stride


class Matrix(NamedTuple):
    """A matrix as device functions take it. Kernels make it of their arguments, as `Operand.named` binds them.

    at: a pointer, or a TMA descriptor, which needs neither strides nor sizes.
    rows, columns: where its elements end.
    """

    at: object
    row_stride: object
    column_stride: object
    rows: object
    columns: object


class Scales(NamedTuple):
    """What dequantizes the product of FP8 operands, in fp32: tensors on the host, pointers in a kernel.

    x: of x, one number, or one for each of its rows.  w: of w, one, or one for each of its rows, the out-features.
    Kernels of other operands have None in place of both pointers.
    """

    x: object
    w: object

    @classmethod
    def given(cls, x_scale, w_scale) -> "tuple[Scales, ...]":
        """What a call has behind its other tensors: Scales, or nothing."""
        return () if x_scale is w_scale is None else (cls(x_scale, w_scale),)

    def contiguous(self) -> "Scales":
        return Scales(self.x.contiguous(), self.w.contiguous())

    def by_row(self, rows: int) -> "Scales":
        """The same, where x has one for each of its rows."""
        return Scales(self.x.reshape(-1).expand(rows).contiguous(), self.w.contiguous())


class Tile(NamedTuple):
    """The constants of a product, one argument of its kernel: how its tiles are loaded, multiplied and finished.

    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT: as in GemmConfig.
    OWN_GROUP_M: GROUP_M of a reduction's tiles of this rank's own rows.
    PARTS: some tiles are split along K.
    X_TRANSPOSED, W_TRANSPOSED: the descriptor is of the transposed matrix.
    X_SCALE_STRIDE, W_SCALE_STRIDE: from a row's scale to the next; 0: one for all rows.
    N_MULTIPLE: N is a multiple of it, as `known_multiple` has to be told; 1: nothing to tell.
    """

    BLOCK_M: object
    BLOCK_N: object
    BLOCK_K: object
    GROUP_M: object
    OWN_GROUP_M: object
    SPLIT: object
    PARTS: object
    X_TRANSPOSED: object
    W_TRANSPOSED: object
    HAS_BIAS: object
    ACTIVATION: object
    PRECISION: object
    X_SCALE_STRIDE: object
    W_SCALE_STRIDE: object
    N_MULTIPLE: object

    @classmethod
    def of(
        cls, gemm: GemmConfig, x: "Operand", w: "Operand", bias, activation: str | None, precision: str,
        parts: bool = False, own_group: int | None = None, scales: Scales | None = None, N: int = 0,
    ) -> "Tile":  # fmt: skip
        """Those of the product of x and w, with tiles as `gemm` says. N: if the kernel asks for `known_multiple`."""
        tiles = gemm.block_m, gemm.block_n, gemm.block_k, gemm.group_m, own_group or gemm.group_m, gemm.split
        finish = bias is not None, ACTIVATIONS[activation], precision
        strides = [int(scale.numel() > 1) for scale in scales or ()] or (0, 0)
        multiple = next((each for each in (8, 4) if N % 16 and N % each == 0), 1)
        return cls(*map(tl.constexpr, (*tiles, parts, x.transposed, w.transposed, *finish, *strides, multiple)))


# fmt: off
@triton.jit
def tile_of(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile number -> (tile_m, tile_n): the order walks GROUP_M rows of tiles at a time, column by column."""
    tiles_per_group = GROUP_M * tiles_n
    first_m = index // tiles_per_group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = index % tiles_per_group
    return first_m + within % rows, within // rows


@triton.jit
def known_multiple(number, MULTIPLE: tl.constexpr):
    """The number, a multiple of MULTIPLE, which the compiler then knows. Of an argument it finds out that of 16 alone.

    Where it knows of none, it stores rows of so many elements one element at a time.
    """
    if MULTIPLE > 1:
        number = number // MULTIPLE * MULTIPLE
    return number


@triton.jit
def up_to(matrix, rows):
    """The matrix without its rows from `rows` on."""
    return Matrix(matrix.at, matrix.row_stride, matrix.column_stride, rows, matrix.columns)


@triton.jit
def load_tile(matrix, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """The [ROWS, COLUMNS] tile at (row, column); zeros outside. TRANSPOSED: the descriptor is of [columns, rows]."""
    if matrix.at.dtype.is_ptr():
        # int64: row * stride exceeds 2**31 in tensors of more than 2**31 elements
        rows = tl.cast(row, tl.int64) + tl.arange(0, ROWS)[:, None]
        columns = tl.cast(column, tl.int64) + tl.arange(0, COLUMNS)[None, :]
        tile = tl.load(
            matrix.at + rows * matrix.row_stride + columns * matrix.column_stride,
            mask=(rows < matrix.rows) & (columns < matrix.columns), other=0.0,
        )
    elif TRANSPOSED:
        tile = matrix.at.load([column, row]).T
    else:
        tile = matrix.at.load([row, column])
    return tile


@triton.jit
def multiply_step(total, x, w, row, column, step, T):
    """Add one step along K to an fp32 tile of x @ w.T: the rows of x from `row` on, those of w from `column` on."""
    k = step * T.BLOCK_K
    x_tile = load_tile(x, row, k, T.BLOCK_M, T.BLOCK_K, T.X_TRANSPOSED)
    w_tile = load_tile(w, column, k, T.BLOCK_N, T.BLOCK_K, T.W_TRANSPOSED)
    if T.PRECISION == "promoted":
        # Tensor cores sum FP8 with 13 bits of mantissa. Triton adds what they have summed over that many K in fp32.
        PROMOTED: tl.constexpr = min(T.BLOCK_K, 128)
        total = tl.dot(x_tile, w_tile.T, total, max_num_imprecise_acc=PROMOTED)
    else:
        total = tl.dot(x_tile, w_tile.T, total, input_precision=T.PRECISION)
    return total


@triton.jit
def scaled(value, scales, row, num_rows, column, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, T):
    """Dequantize the first `num_rows` rows of an fp32 tile at (row, column); of other operands' tiles, nothing."""
    if scales.x is not None:
        rows = tl.arange(0, ROWS)
        at = scales.x + (row + rows) * T.X_SCALE_STRIDE
        value *= tl.load(at, mask=rows < num_rows, other=0.0)[:, None]
        columns = column + tl.arange(0, COLUMNS)
        value *= tl.load(scales.w + columns * T.W_SCALE_STRIDE, mask=columns < N, other=0.0)[None, :]
    return value


@triton.jit
def finish(value, bias, column, N, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Add the bias to an fp32 tile whose first column is `column`, then apply the activation."""
    if HAS_BIAS:
        columns = column + tl.arange(0, COLUMNS)
        value += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    return activate(value, ACTIVATION)


@triton.jit
def store_tile(value, matrix, row, num_rows, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the first `num_rows` rows of an fp32 tile at (row, column); by TMA, all rows in bounds."""
    if matrix.at.dtype.is_ptr():
        rows = tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        at = (tl.cast(row, tl.int64) + rows)[:, None] * matrix.row_stride + columns[None, :]
        mask = (rows < num_rows)[:, None] & (columns < matrix.columns)[None, :]
        tl.store(matrix.at + at, value.to(matrix.at.dtype.element_ty), mask=mask)
    else:
        matrix.at.store([row, column], value.to(matrix.at.dtype))


@triton.jit
def halves(value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split a tile into the left and the right half of its columns."""
    return tl.split(tl.permute(tl.reshape(value, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def slices_of(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr):
    """Split a tile into SPLIT slices of columns, 1, 2 or 4."""
    if SPLIT == 4:
        left, right = halves(tile, ROWS, COLUMNS)
        first, second = halves(left, ROWS, COLUMNS // 2)
        third, fourth = halves(right, ROWS, COLUMNS // 2)
        slices = (first, second, third, fourth)
    elif SPLIT == 2:
        slices = halves(tile, ROWS, COLUMNS)
    else:
        slices = (tile,)
    return slices


@triton.jit(do_not_specialize=["M"])  # row counts may change from call to call, without recompiling
def matmul_kernel(
    x, x_row_stride, x_column_stride,  # [M, K]
    w, w_row_stride, w_column_stride,  # [N, K]
    bias,  # [N]
    x_scale, w_scale,  # Scales
    y, y_row_stride,  # [M, N]
    M, N, K,
    T,
):
    x = Matrix(x, x_row_stride, x_column_stride, M, K)
    w = Matrix(w, w_row_stride, w_column_stride, N, K)
    y = Matrix(y, y_row_stride, 1, M, N)
    tiles_m = tl.cdiv(M, T.BLOCK_M)
    tiles_n = tl.cdiv(N, T.BLOCK_N)
    # flatten: the first loads of a tile overlap with the store of the previous tile (bench/LOG.md).
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_of(index, tiles_m, tiles_n, T.GROUP_M)
        row = tile_m * T.BLOCK_M
        column = tile_n * T.BLOCK_N
        total = tl.zeros((T.BLOCK_M, T.BLOCK_N), tl.float32)
        for step in range(tl.cdiv(K, T.BLOCK_K)):
            total = multiply_step(total, x, w, row, column, step, T)
        COLUMNS: tl.constexpr = T.BLOCK_N // T.SPLIT
        slices = slices_of(total, T.BLOCK_M, T.BLOCK_N, T.SPLIT)
        for number in tl.static_range(T.SPLIT):
            first = column + number * COLUMNS
            scales = Scales(x_scale, w_scale)
            value = scaled(slices[number], scales, row, M - row, first, N, T.BLOCK_M, COLUMNS, T)
            value = finish(value, bias, first, N, COLUMNS, T.HAS_BIAS, T.ACTIVATION)
            store_tile(value, y, row, M - row, first, T.BLOCK_M, COLUMNS)


@triton.jit(do_not_specialize=["M"])
def finish_kernel(
    total, bias, y, M, N,  # [M, N] fp32, [N], [M, N]
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):
    """y = activation(total + bias)."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M
    column = tl.program_id(0) % tiles_n * BLOCK_N
    value = load_tile(Matrix(total, N, 1, M, N), row, column, BLOCK_M, BLOCK_N)
    value = finish(value, bias, column, N, BLOCK_N, HAS_BIAS, ACTIVATION)
    store_tile(value, Matrix(y, N, 1, M, N), row, M - row, column, BLOCK_M, BLOCK_N)
# fmt: on


@dataclass(frozen=True)
class Operand:
    """A matrix for a kernel: pointer or TMA descriptor (`tma` is True for the latter), and the strides."""

    argument: object
    row_stride: int
    column_stride: int
    tma: bool
    transposed: bool

    @classmethod
    def of(
        cls, matrix: torch.Tensor, block_rows: int, block_columns: int, use_tma: bool = True, precision: str = "ieee"
    ) -> "Operand":
        """Describe a matrix: by a TMA descriptor if it has a unit stride and 16-byte aligned rows and base address.

        On a GPU without TMA Triton would rewrite descriptors to pointers, whose loads it does not pipeline.
        precision: of what is multiplied, as the function of this name says it.
        """
        row_stride, column_stride = matrix.stride()
        plain, transposed = in_rows(matrix)
        if use_tma and runtime.has_tma() and tma_allowed(plain):
            block = [block_columns, block_rows] if transposed else [block_rows, block_columns]
            descriptor = TensorDescriptor(plain, list(plain.shape), list(plain.stride()), block)
            if precision == "tf32":
                descriptor = rounded_to_tf32(descriptor)
            return cls(descriptor, row_stride, column_stride, True, transposed)
        return cls(matrix, row_stride, column_stride, False, False)

    def named(self, name: str) -> dict:
        """The arguments of a kernel that takes the matrix by that name."""
        strides = {f"{name}_row_stride": self.row_stride, f"{name}_column_stride": self.column_stride}
        return {name: self.argument, **strides}


def tma_allowed(matrix: torch.Tensor) -> bool:
    """Whether TMA can describe the matrix: inner stride 1, base address and rows multiples of 16 bytes, not empty."""
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) * matrix.element_size() % 16 == 0
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.data_ptr() % 16 == 0
        and matrix.numel() > 0
    )


def tma_feeds(matrix: torch.Tensor, precision: str) -> bool:
    """Whether tensor cores can take from memory, through TMA, what is multiplied in a precision, see GPU.feeds."""
    plain, turned = in_rows(matrix)
    return tma_allowed(plain) and turned_for(precision) in (None, turned)


def turned_for(precision: str) -> bool | None:
    """How operands lie that tensor cores can take, as `Rows.of` says it: as TF32, with K contiguous."""
    return False if precision == "tf32" else None


def staging(matrix: torch.Tensor, turned: bool | None = None, row_bytes: int = VECTOR_BYTES, kept: bool = False):
    """What TMA can take in place of matrices like this one: an example, and the function that makes it of one.

    That is a copy in wider rows, or the matrix itself. turned: as of `Rows.of`. row_bytes: of which rows are multiples.
    kept: the copies of weights may be, see `keep_staged`.
    """
    plain, lies_turned = in_rows(matrix)
    fits = plain.stride(0) * plain.element_size() % row_bytes == 0
    if fits and tma_allowed(plain) and turned in (None, lies_turned):
        return matrix, lambda matrix: matrix
    wide = Rows.of(matrix, turned=turned)
    copy = wide.plan_copy(matrix)

    def stage(matrix):
        copy(matrix, staged := wide.empty(matrix.device))
        return staged

    return wide.empty("meta"), functools.partial(staged_weight, stage=stage, turned=turned) if kept else stage


def layout_of(x: torch.Tensor, w: torch.Tensor) -> str:
    """The memory layout of x [M, K] and w [N, K] in BLAS terms, w first: "TN" where K is contiguous in both.

    w is N where its dimension N is contiguous, and x is T where M is. "pointers" if TMA can't describe both operands.
    """
    return orientation_of(x, w) if all(tma_allowed(in_rows(matrix)[0]) for matrix in (x, w)) else "pointers"


def orientation_of(x: torch.Tensor, w: torch.Tensor) -> str:
    """The same, whether TMA can describe them or not."""
    return ("N" if in_rows(w)[1] else "T") + ("T" if in_rows(x)[1] else "N")


def fused_layout(x: torch.Tensor, w: torch.Tensor, precision: str = "ieee", gpu: GPU | None = None) -> str:
    """The layout of a fused operation's operands as they are multiplied, staged or not.

    Also "pointers" where TMA can't store rows of the result, but of FP8, whose tiles are stored as they can be.
    """
    if stages_rows(x.dtype, precision, gpu):
        return "TN" if precision == "tf32" else orientation_of(x, w)
    stores = x.dtype in FP8 or w.shape[0] * w.element_size() % 16 == 0
    return layout_of(x, w) if stores else "pointers"


def alignment_of(*matrices: torch.Tensor) -> int:
    """The bytes, up to 16, that the rows and the addresses of all these matrices are multiples of.

    A row alone, which any stride describes, torch takes for a contiguous matrix.
    """
    offsets = 16
    for matrix in matrices:
        rows, _ = in_rows(matrix)
        stride = rows.stride(0) if len(rows) > 1 else rows.shape[1]
        offsets |= stride * matrix.element_size() | matrix.data_ptr()
    return offsets & -offsets


def may_stage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether TMA can't feed a @ b to tensor cores as it lies, on a GPU: then torch may be the slower one."""
    how = precision(a.dtype)
    multiplied = a.dtype.itemsize == 2 or how == "tf32" and gpu_here().tiles_by_tma
    if runtime.RUNTIME == "simulated" or not multiplied or 0 in (a.numel(), b.numel()):
        return False
    return b.shape[1] * b.element_size() % 16 > 0 or not all(tma_feeds(matrix, how) for matrix in (a, b.t()))


def problem_of_product(
    x, w, y, precision: str, activation: str | None = None, bias: bool = False, gpu: GPU | None = None,
    programs: int | None = None, kept: bool = False,
) -> Problem:  # fmt: skip
    """The local product of x [M, K] and w [N, K] into y [M, N]. gpu, programs: of a launch; None: this process's.

    kept: as Matmul has it.
    """
    layout, orientation = layout_of(x, w), orientation_of(x, w)
    beyond = [matrix for matrix in (x, w) if not tma_feeds(matrix, precision)]
    rows = [in_rows(matrix)[0] for matrix in (x, w) if not any(matrix is other for other in beyond)]
    return Problem(
        "matmul", *y.shape, x.shape[1], x.dtype, layout, precision=precision,
        alignment=alignment_of(x, w, y), orientation=orientation, stored=y.dtype, activation=activation,
        separate=activation is not None or bias and y.dtype != result_dtype(x.dtype), library=library_takes(x, w, y),
        staged=tuple(0 if kept and matrix is w else matrix.numel() * matrix.element_size() for matrix in beyond),
        sectors=all(matrix.stride(0) * matrix.element_size() % SECTOR == 0 for matrix in rows),
        stored_by_tma=tma_allowed(y),
        programs=programs or runtime.default_programs(), gpu=gpu or gpu_here(),
    )  # fmt: skip


def library_takes(x, w, y) -> bool:
    """Whether torch multiplies such operands: of FP8 with any scales to bf16, and in rows of whole 16 elements."""
    return x.dtype not in FP8 or w.dtype == FP8[0] and y.dtype == torch.bfloat16 and y.shape[1] % 16 == 0


def precision(dtype: torch.dtype, fast_accum: bool = True) -> str:
    """How operands are multiplied and summed: fp32 as "ieee", or as "tf32" where torch's switches allow it.

    FP8 without fast_accum: "promoted", the sums of each 128 of K are added in fp32. All else is "ieee".
    """
    if not isinstance(fast_accum, int) or fast_accum not in (0, 1):
        raise TypeError(f"fast_accum={fast_accum!r} must be True or False")
    if dtype in FP8:
        return "ieee" if fast_accum else "promoted"
    # allow_tf32, the older name, mirrors this switch, but raises where any switch was set by its newer name.
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def check_operands(
    name: str, x: torch.Tensor, w: torch.Tensor, bias, activation, device: torch.device, scales: Scales | None = None
):
    """Check the operands of a matmul before anything is launched. Raises ValueError or TypeError."""
    check_tensors(name, x=x, w=w, **({} if bias is None else {"bias": bias}))
    for label, matrix in (("x", x), ("w", w)):
        if matrix.dim() != 2:
            raise ValueError(f"{name}: {label} must be a matrix, but has shape {tuple(matrix.shape)}")
        check_resolved(name, label, matrix)
        if matrix.device != device:
            raise ValueError(f"{name}: {label} is on {matrix.device}, but the operation runs on {device}")
    fp8 = x.dtype in FP8 and w.dtype in FP8
    if not fp8 and (x.dtype not in DTYPES or w.dtype != x.dtype):
        raise TypeError(
            f"{name}: x is {x.dtype} and w is {w.dtype}; both must be float32, float16 or bfloat16 alike, or float8"
            f"{_beside_autocast(device)}"
        )
    if x.shape[1] != w.shape[1]:
        raise ValueError(
            f"{name}: x is {tuple(x.shape)} and w is {tuple(w.shape)}, but K, the second dimension, must match "
            f"(w as nn.Linear has it; pass w.t() for [K, N])"
        )
    if fp8 or scales is not None:
        check_scaled(name, x, w, scales, device)
    right = bias is None or (bias.dtype in DTYPES if fp8 else bias.dtype == x.dtype)
    if bias is not None and (bias.shape != w.shape[:1] or not right or bias.device != device):
        raise ValueError(
            f"{name}: bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}, but must be "
            f"{'torch.bfloat16, float16 or float32' if fp8 else x.dtype} ({w.shape[0]},) on {device}"
            f"{'' if right else _beside_autocast(device)}"
        )
    if bias is not None:
        check_resolved(name, "bias", bias)
    check_activation(name, activation)


def _beside_autocast(device: torch.device) -> str:
    """For errors about dtypes."""
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return "; torch's autocast, which is on, casts no operands of this operation: cast them first" if on else ""


def check_scaled(name: str, x: torch.Tensor, w: torch.Tensor, scales: Scales | None, device: torch.device):
    """Check operands of FP8, and scales. Raises ValueError or TypeError."""
    if x.dtype not in FP8:
        raise TypeError(f"{name}: x_scale and w_scale are of float8 operands, but x is {x.dtype}; leave them out")
    if x.dtype == w.dtype == torch.float8_e5m2:
        raise TypeError(f"{name}: x and w are both torch.float8_e5m2; torch multiplies that by e4m3 only, one of each")
    if not runtime.has_fp8():
        raise TypeError(
            f"{name}: {gpu_here().name} has no float8 arithmetic; pass x.to(torch.bfloat16) * x_scale, and w likewise"
        )
    if scales is None or scales.x is None or scales.w is None:
        raise TypeError(
            f"{name}: float8 operands come with x_scale and w_scale, fp32, for (x @ w.T) * x_scale * w_scale; pass "
            f"torch.ones(1) where there is nothing to scale"
        )
    for label, matrix in (("x", x), ("w", w)):
        if matrix.numel() and (matrix.shape[1] % 16 or not tma_allowed(matrix)):
            way = "pad K with zeros, in both" if matrix.shape[1] % 16 else f"pass {label}.contiguous()"
            raise ValueError(
                f"{name}: {label} is {tuple(matrix.shape)} of float8 with strides {matrix.stride()}, at byte "
                f"{matrix.data_ptr() % 16} of 16, but tensor cores take K contiguous, in rows of multiples of 16 "
                f"elements that begin at multiples of 16 bytes; {way}"
            )
    for label, scale, rows, shapes in (
        ("x_scale", scales.x, x.shape[0], ((x.shape[0],), (x.shape[0], 1))),
        ("w_scale", scales.w, w.shape[0], ((w.shape[0],), (w.shape[0], 1), (1, w.shape[0]))),
    ):
        if scale.dtype != torch.float32 or scale.device != device:
            raise TypeError(f"{name}: {label} is {scale.dtype} on {scale.device}, but must be float32 on {device}")
        if scale.numel() != 1 and tuple(scale.shape) not in shapes:
            raise ValueError(
                f"{name}: {label} is {tuple(scale.shape)}, but must be one number, or one a row: ({rows},) or "
                f"{shapes[-1]}"
            )
        check_resolved(name, label, scale)


def check_dtype(
    name: str, option: str, dtype: torch.dtype | None, operands: torch.dtype, fp8=(torch.bfloat16, torch.float16)
) -> torch.dtype:
    """The dtype that an option selects; None selects the usual one. Raises TypeError for one that kernels can't store.

    operands: their dtype. fp8: what may be stored of FP8 operands, beside float32.
    """
    default = result_dtype(operands)
    if dtype is None:
        return default
    allowed = fp8 if operands in FP8 else (default,)
    if dtype not in (*allowed, torch.float32):
        which = " or ".join(map(str, allowed)) if operands in FP8 else f"{default}, the operands' dtype"
        other = "" if torch.float32 in allowed else f"{'' if operands in FP8 else ','} or float32"
        raise TypeError(f"{name}: {option}={dtype} must be {which}{other}")
    return dtype


def check_result(name: str, out: torch.Tensor | None, x: torch.Tensor, shape, dtype: torch.dtype) -> torch.Tensor:
    """`out` if it can hold the result; if it is None, a meta tensor that stands for a new one.

    Raises ValueError or TypeError.
    """
    if out is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    check_out(name, out, shape, dtype, x.device)
    return out


def check_apart(name: str, out: torch.Tensor | None, what: str = "out", **operands: torch.Tensor | None):
    """Raises ValueError if `out` shares memory with an operand, which is still read while tiles are written."""
    if out is None or out.is_meta:  # a meta tensor has no address, and is rejected later for its device
        return
    check_dense(name, **{what: out}, **{label: each for label, each in operands.items() if each is not None})
    memory = out.untyped_storage().data_ptr()
    for label, operand in operands.items():
        if operand is None or operand.untyped_storage().data_ptr() != memory or operand.numel() == 0:
            continue
        (begin, end), (first, last) = _extent(out), _extent(operand)
        if first < end and begin < last:
            raise ValueError(
                f"{name}: {what} overlaps {label}, which begins {first - begin} bytes after it; pass a tensor that "
                f"shares no memory with the operands"
            )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the byte past the last."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + (span * tensor.element_size() if tensor.numel() else 0)


def prepare_strided(prepare, x: torch.Tensor, w: torch.Tensor, *others):
    """prepare(x, w, *others), of copies, made in each call, where x or w has no unit stride. See `comm.calls.Call`."""
    if x is None or w is None:
        return prepare(x, w, *others)  # and refused there
    like = with_unit_stride(x), with_unit_stride(w)
    run = prepare(*like, *others)
    if like[0] is x and like[1] is w:
        return run
    return lambda x, w, *others: run(with_unit_stride(x), with_unit_stride(w), *others)


def multiply(options: tuple, tensors: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    """The call Matmul(*options) of x, w, bias, out and, of FP8, Scales, which is prepared if none like it has been.

    options: up to precision.
    """
    if keeps(tensors[1], turned_for(options[-1])):
        options = *options, True
    return local_calls.call((Matmul, *options), lambda *like: Matmul(*options).prepare(*like), *tensors)


class Matmul(NamedTuple):
    """A call of `matmul`, of x, w, bias and out, of which the last two may be None; and Scales. It needs no context.

    precision: how operands are multiplied, as the function of this name says it.
    kept: a staged copy of w costs nothing, as `keep_staged` keeps it.
    spared: SMs that kernels beside it hold, as those that wait for copies do: a program would wait for each to end.
    """

    operation = "matmul"

    activation: str | None = None
    out_dtype: torch.dtype | None = None
    config: GemmConfig | None = None
    precision: str = "ieee"
    kept: bool = False
    spared: int = 0

    @property
    def programs(self) -> int:
        return max(runtime.default_programs() - self.spared, 1)

    def prepare(self, *tensors):
        """The function of tensors like these that carries out the call; see `comm.calls.Call`."""
        return prepare_strided(self.prepare_product, *tensors)

    def prepare_product(self, x, w, bias, out, scales: Scales | None = None):
        """`prepare`, of operands with a unit stride."""
        check_operands("matmul", x, w, bias, self.activation, runtime.device(), scales)
        (M, K), N = x.shape, w.shape[0]
        out_dtype = check_dtype("matmul", "out_dtype", self.out_dtype, x.dtype)
        y = check_result("matmul", out, x, (M, N), out_dtype)
        if M == 0 or N == 0:
            return lambda x, w, bias, out, scales=None: x.new_empty((M, N), dtype=out_dtype) if out is None else out
        if K == 0:  # a sum of nothing
            run = self.prepare(zeros_along_k(x), zeros_along_k(w), bias, out, scales)
            return lambda x, w, *others: run(zeros_along_k(x), zeros_along_k(w), *others)
        if self.config is not None:
            check_type("matmul: config", self.config, GemmConfig, "a GemmConfig or None")
            return self.by_kernel(x, w, bias, y, self.config, scales)
        finish = self.activation, bias is not None
        problem = problem_of_product(x, w, y, self.precision, *finish, programs=self.programs, kept=self.kept)
        way, config = product_way(problem)
        if way == STAGED:
            return self.staged(x, w, bias, y, config, scales)
        return self.by_library(x, y) if config is None else self.by_kernel(x, w, bias, y, config, scales)

    def by_kernel(self, x, w, bias, y, config: GemmConfig, scales: Scales | None):
        """The function whose product our kernel computes, of the operands where they lie."""
        (M, K), N, dtype = x.shape, w.shape[0], y.dtype
        x_operand = Operand.of(x, config.block_m, config.block_k, config.use_tma, self.precision)
        w_operand = Operand.of(w, config.block_n, config.block_k, config.use_tma, self.precision)
        y_operand = Operand.of(y, config.block_m, config.block_n // config.split, config.use_tma and y.stride(1) == 1)
        tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
        programs = min(tiles, self.programs, config.max_programs or tiles)
        x_scale, w_scale = scales or (None, None)
        launch = PreparedLaunch(
            matmul_kernel, programs, varying=("x", "w", "bias", "y") + (("x_scale", "w_scale") if scales else ()),
            **x_operand.named("x"), **w_operand.named("w"), bias=x if bias is None else bias,
            x_scale=x_scale, w_scale=w_scale, y=y_operand.argument, y_row_stride=y.stride(0), M=M, N=N, K=K,
            T=Tile.of(config, x_operand, w_operand, bias, self.activation, self.precision, scales=scales),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

        def run(x, w, bias, out, scales=None):
            y = x.new_empty((M, N), dtype=dtype) if out is None else out
            launch(x, w, x if bias is None else bias.contiguous(), y, *(scales.contiguous() if scales else ()))
            return y

        return run

    def staged(self, x, w, bias, y, config: GemmConfig, scales: Scales | None):
        """The same of copies of those operands that TMA can't feed to tensor cores as they lie.

        The copies are made in each call, also by the replays of a CUDA graph, and take memory until it ends, but for
        those of weights that `keep_staged` keeps.
        """
        turned = turned_for(self.precision)
        (x_like, stage_x), (w_like, stage_w) = staging(x, turned), staging(w, turned, kept=True)
        multiply = self.by_kernel(x_like, w_like, bias, y, config, scales)
        return lambda x, w, *others: multiply(stage_x(x), stage_w(w), *others)

    def by_library(self, x, y):
        """The function that has torch multiply, add the bias, and then apply the activation to the rounded sums."""
        capture.prepare_cublas()
        (M, N), dtype, precision, activation = y.shape, y.dtype, self.precision, self.activation
        adds_bias = x.dtype != torch.float32 or adds_bias_to_fp32(M, N, x.shape[1], precision)  # while it multiplies

        def run(x, w, bias, out, scales=None):
            nonlocal adds_bias
            y = x.new_empty((M, N), dtype=dtype) if out is None else out
            with_bias = adds_bias and bias is not None and (bias if scales else x).dtype == dtype
            added = bias.contiguous() if with_bias else None
            if scales is None:
                multiply_into(y, x, w, added, precision)
            else:
                adds_bias &= multiply_scaled_into(y, x, w, added, scales, precision)
                with_bias &= adds_bias
            if bias is not None and not with_bias:
                y.add_(bias)
            return activate_in_place(y, activation)

        return run


def plan_finish(total: torch.Tensor, bias: torch.Tensor | None, activation: str | None, y: torch.Tensor):
    """Plan y = activation(total + bias), where `total` is fp32: a function of (total, bias, y), for tensors like these.

    y may be `total`.
    """
    (M, N), block_m, block_n = total.shape, 4, 512
    if total.numel() == 0:
        return lambda total, bias, y: None
    launch = PreparedLaunch(
        finish_kernel, triton.cdiv(M, block_m) * triton.cdiv(N, block_n),
        varying=("total", "bias", "y"), total=total, bias=total if bias is None else bias, y=y, M=M, N=N,
        BLOCK_M=block_m, BLOCK_N=block_n, HAS_BIAS=bias is not None, ACTIVATION=ACTIVATIONS[activation],
    )  # fmt: skip
    return lambda total, bias, y: launch(total, total if bias is None else bias.contiguous(), y)


def zeros_along_k(matrix: torch.Tensor) -> torch.Tensor:
    """Zeros in place of an operand without columns: kernels store a tile after its last step along K."""
    return matrix.new_zeros((matrix.shape[0], 16))
