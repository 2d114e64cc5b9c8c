"""y[M, N] = activation(x[M, K] @ w[N, K].T + bias[N]), accumulated in fp32: the main loop that all operations share.

M rows of x.  N rows of w (out-features).  K the dimension summed over.

A persistent kernel: program p computes the BLOCK_M x BLOCK_N tiles p, p + num_programs, and so on until none are left.
Operands are loaded through TMA descriptors where their layout allows and through pointers elsewhere. In either operand,
either dimension may be contiguous.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels.choice import product_way
from tkernels.comm import capture, runtime
from tkernels.comm.arguments import check_out, check_resolved, check_tensors
from tkernels.comm.calls import describe, local_calls
from tkernels.comm.launch import PreparedLaunch
from tkernels.configs import DTYPES, GemmConfig
from tkernels.gpus import GPU, gpu_here
from tkernels.library import activate_in_place, multiply_into
from tkernels.model import STAGED, Problem
from tkernels.staging import SECTOR, Rows

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


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


class Tile(NamedTuple):
    """The constants of a product, one argument of its kernel: how its tiles are loaded, multiplied and finished.

    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SPLIT: as in GemmConfig.
    OWN_GROUP_M: GROUP_M of a reduction's tiles of this rank's own rows.
    PARTS: some tiles are split along K.
    X_TRANSPOSED, W_TRANSPOSED: the descriptor is of the transposed matrix.
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

    @classmethod
    def of(
        cls, gemm: GemmConfig, x: "Operand", w: "Operand", bias, activation: str | None, precision: str,
        parts: bool = False, own_group: int | None = None,
    ) -> "Tile":  # fmt: skip
        """Those of the product of x and w, with tiles as `gemm` says."""
        tiles = gemm.block_m, gemm.block_n, gemm.block_k, gemm.group_m, own_group or gemm.group_m, gemm.split
        finish = bias is not None, ACTIVATIONS[activation], precision
        return cls(*map(tl.constexpr, (*tiles, parts, x.transposed, w.transposed, *finish)))


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
    return tl.dot(x_tile, w_tile.T, total, input_precision=T.PRECISION)


@triton.jit
def activate(value, ACTIVATION: tl.constexpr):
    """Apply an activation to an fp32 tile; ACTIVATION is a number of ACTIVATIONS."""
    if ACTIVATION == 1:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)  # by default NaN becomes 0, unlike torch
    elif ACTIVATION == 2:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == 3:
        # tanh(u) = 2 sigmoid(2u) - 1, u = sqrt(2 / pi) (value + 0.044715 value^3)
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    elif ACTIVATION == 4:
        value = value * tl.sigmoid(value)
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
    """Split a tile into SPLIT slices of columns, 1 or 2."""
    if SPLIT == 2:
        slices = halves(tile, ROWS, COLUMNS)
    else:
        slices = (tile,)
    return slices


@triton.jit(do_not_specialize=["M"])  # row counts may change from call to call, without recompiling
def matmul_kernel(
    x, x_row_stride, x_column_stride,  # [M, K]
    w, w_row_stride, w_column_stride,  # [N, K]
    bias,  # [N]
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
            value = finish(slices[number], bias, first, N, COLUMNS, T.HAS_BIAS, T.ACTIVATION)
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
    def of(cls, matrix: torch.Tensor, block_rows: int, block_columns: int, use_tma: bool = True) -> "Operand":
        """Describe a matrix: by a TMA descriptor if it has a unit stride and 16-byte aligned rows and base address."""
        row_stride, column_stride = matrix.stride()
        plain, transposed = in_rows(matrix)
        if use_tma and tma_allowed(plain):
            block = [block_columns, block_rows] if transposed else [block_rows, block_columns]
            descriptor = TensorDescriptor(plain, list(plain.shape), list(plain.stride()), block)
            return cls(descriptor, row_stride, column_stride, True, transposed)
        return cls(matrix, row_stride, column_stride, False, False)

    def named(self, name: str) -> dict:
        """The arguments of a kernel that takes the matrix by that name."""
        strides = {f"{name}_row_stride": self.row_stride, f"{name}_column_stride": self.column_stride}
        return {name: self.argument, **strides}


def in_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The matrix, or its transpose if that is what lies in rows, and whether it is."""
    transposed = matrix.stride(0) == 1 and matrix.stride(1) != 1
    return matrix.t() if transposed else matrix, transposed


def tma_allowed(matrix: torch.Tensor) -> bool:
    """Whether TMA can describe the matrix: inner stride 1, base address and rows multiples of 16 bytes, not empty."""
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) * matrix.element_size() % 16 == 0
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.data_ptr() % 16 == 0
        and matrix.numel() > 0
    )


def layout_of(x: torch.Tensor, w: torch.Tensor) -> str:
    """The memory layout of x [M, K] and w [N, K] in BLAS terms, w first: "TN" where K is contiguous in both.

    w is N where its dimension N is contiguous, and x is T where M is. "pointers" if TMA can't describe both operands
    and a result with contiguous rows of N elements.
    """
    takes = w.shape[0] * w.element_size() % 16 == 0 and all(tma_allowed(in_rows(matrix)[0]) for matrix in (x, w))
    return orientation_of(x, w) if takes else "pointers"


def orientation_of(x: torch.Tensor, w: torch.Tensor) -> str:
    """The same, whether TMA can describe them or not."""
    return ("N" if in_rows(w)[1] else "T") + ("T" if in_rows(x)[1] else "N")


def alignment_of(*matrices: torch.Tensor) -> int:
    """The bytes, up to 16, that the rows and the addresses of all these matrices are multiples of."""
    offsets = 16
    for matrix in matrices:
        offsets |= in_rows(matrix)[0].stride(0) * matrix.element_size() | matrix.data_ptr()
    return offsets & -offsets


def may_stage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a @ b is one that `matmul` might stage: of 16-bit rows that TMA can't take, on a GPU."""
    if runtime.RUNTIME == "simulated" or a.dtype.itemsize != 2 or a.numel() == 0 or b.numel() == 0:
        return False
    return b.shape[1] % 8 > 0 or not all(tma_allowed(in_rows(matrix)[0]) for matrix in (a, b))


def problem_of_product(
    x, w, y, precision: str, activation: str | None = None, bias: bool = False, gpu: GPU | None = None,
    programs: int | None = None,
) -> Problem:  # fmt: skip
    """The local product of x [M, K] and w [N, K] into y [M, N]. gpu, programs: of a launch; None: this process's."""
    beyond = [matrix for matrix in (x, w, y) if not tma_allowed(in_rows(matrix)[0])]
    rows = [in_rows(matrix)[0] for matrix in (x, w) if not any(matrix is other for other in beyond)]
    return Problem(
        "matmul", *y.shape, x.shape[1], x.dtype, "pointers" if beyond else orientation_of(x, w), precision=precision,
        alignment=alignment_of(x, w, y), orientation=orientation_of(x, w), stored=y.dtype, activation=activation,
        separate=activation is not None or bias and y.dtype != x.dtype,
        staged=tuple(matrix.numel() * matrix.element_size() for matrix in beyond),
        sectors=all(matrix.stride(0) * matrix.element_size() % SECTOR == 0 for matrix in rows),
        programs=programs or runtime.default_programs(), gpu=gpu or gpu_here(),
    )  # fmt: skip


def precision(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: in IEEE fp32, or in TF32 where torch's switches allow it for torch.matmul."""
    # allow_tf32, the older name, mirrors this switch, but raises where any switch was set by its newer name.
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def check_operands(name: str, x: torch.Tensor, w: torch.Tensor, bias, activation, device: torch.device):
    """Check the operands of a matmul before anything is launched. Raises ValueError or TypeError."""
    check_tensors(name, x=x, w=w, **({} if bias is None else {"bias": bias}))
    for label, matrix in (("x", x), ("w", w)):
        if matrix.dim() != 2:
            raise ValueError(f"{name}: {label} must be a matrix, but has shape {tuple(matrix.shape)}")
        if 1 not in matrix.stride() and matrix.numel() > 0:
            raise ValueError(
                f"{name}: {label} has strides {matrix.stride()}, neither of which is 1; pass {label}.contiguous()"
            )
        check_resolved(name, label, matrix)
        if matrix.device != device:
            raise ValueError(f"{name}: {label} is on {matrix.device}, but the operation runs on {device}")
    if x.dtype not in DTYPES or w.dtype != x.dtype:
        raise TypeError(f"{name}: x is {x.dtype} and w is {w.dtype}; both must be float32, float16 or bfloat16 alike")
    if x.shape[1] != w.shape[1]:
        raise ValueError(
            f"{name}: x is {tuple(x.shape)} and w is {tuple(w.shape)}, but K, the second dimension, must match "
            f"(w as nn.Linear has it; pass w.t() for [K, N])"
        )
    if bias is not None and (bias.shape != w.shape[:1] or bias.dtype != x.dtype or bias.device != device):
        raise ValueError(
            f"{name}: bias is {bias.dtype} {tuple(bias.shape)} on {bias.device}, but must be {x.dtype} "
            f"({w.shape[0]},) on {device}"
        )
    if bias is not None:
        check_resolved(name, "bias", bias)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation={activation!r} is unknown; use {', '.join(map(str, ACTIVATIONS))}")


def check_dtype(name: str, option: str, dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """The dtype that an option selects; None selects `default`. Raises TypeError for one that kernels can't store."""
    if dtype is None:
        return default
    if dtype not in (default, torch.float32):
        raise TypeError(f"{name}: {option}={dtype} must be {default}, the operands' dtype, or float32")
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


def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """x [M, K], w [N, K], bias [N] -> activation(x @ w.T + bias) [M, N], in x's dtype (fp32, fp16, bf16) or out_dtype.

    Local, not collective. Either matrix may be transposed in memory: for a [K, N] weight, pass its `.t()`. Sizes may be
    0, as in torch.

    out: a contiguous tensor that shares no memory with the operands; it is filled and returned.
    config: the tiles of our kernel; None: whichever is faster by the model multiplies, our kernel or torch.
    """
    if out is not None:
        check_apart("matmul", out, x=x, w=w, bias=bias)
    return multiply((activation, out_dtype, config, precision(x.dtype)), (x, w, bias, out))


def multiply(options: tuple, tensors: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    """The call Matmul(*options) of these tensors, which is made only if no call like it has been prepared."""
    key = Matmul, *options, *map(describe, tensors)
    return local_calls.find(key, lambda: Matmul(*options).prepare(*tensors))(*tensors)


class Matmul(NamedTuple):
    """A call of `matmul`, of x, w, bias and out, of which the last two may be None. It needs no context.

    precision: how fp32 operands are multiplied, as the function of this name says it.
    """

    activation: str | None = None
    out_dtype: torch.dtype | None = None
    config: GemmConfig | None = None
    precision: str = "ieee"

    def prepare(self, x, w, bias, out):
        """The function of tensors like these that carries out the call; see `comm.calls.Call`."""
        check_operands("matmul", x, w, bias, self.activation, runtime.device())
        (M, K), N = x.shape, w.shape[0]
        out_dtype = check_dtype("matmul", "out_dtype", self.out_dtype, x.dtype)
        y = check_result("matmul", out, x, (M, N), out_dtype)
        if M == 0 or N == 0:
            return lambda x, w, bias, out: x.new_empty((M, N), dtype=out_dtype) if out is None else out
        if K == 0:  # a sum of nothing
            run = self.prepare(zeros_along_k(x), zeros_along_k(w), bias, out)
            return lambda x, w, bias, out: run(zeros_along_k(x), zeros_along_k(w), bias, out)
        if self.config is not None:
            return self.by_kernel(x, w, bias, y, self.config)
        way, config = product_way(problem_of_product(x, w, y, self.precision, self.activation, bias is not None))
        if way == STAGED:
            return self.staged(x, w, bias, y, config)
        return self.by_library(y) if config is None else self.by_kernel(x, w, bias, y, config)

    def by_kernel(self, x, w, bias, y, config: GemmConfig):
        """The function whose product our kernel computes, of the operands where they lie."""
        (M, K), N, dtype = x.shape, w.shape[0], y.dtype
        x_operand = Operand.of(x, config.block_m, config.block_k, config.use_tma)
        w_operand = Operand.of(w, config.block_n, config.block_k, config.use_tma)
        y_operand = Operand.of(y, config.block_m, config.block_n // config.split, config.use_tma and y.stride(1) == 1)
        tiles = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
        programs = min(tiles, runtime.default_programs(), config.max_programs or tiles)
        launch = PreparedLaunch(
            matmul_kernel, programs, varying=("x", "w", "bias", "y"),
            **x_operand.named("x"), **w_operand.named("w"), bias=x if bias is None else bias,
            y=y_operand.argument, y_row_stride=y.stride(0), M=M, N=N, K=K,
            T=Tile.of(config, x_operand, w_operand, bias, self.activation, self.precision),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

        def run(x, w, bias, out):
            y = x.new_empty((M, N), dtype=dtype) if out is None else out
            launch(x, w, x if bias is None else bias.contiguous(), y)
            return y

        return run

    def staged(self, x, w, bias, y, config: GemmConfig):
        """The same of copies of those operands, and into a copy of the result, whose rows TMA can't take.

        The copies are made in each call, also by the replays of a CUDA graph, and take memory until it ends.
        """
        wide = [None if tma_allowed(in_rows(matrix)[0]) else Rows.of(matrix) for matrix in (x, w, y)]
        copies = [
            rows and rows.plan_copy(matrix, back=matrix is y) for rows, matrix in zip(wide, (x, w, y), strict=True)
        ]
        examples = (rows.empty("meta") if rows else matrix for rows, matrix in zip(wide, (x, w, y), strict=True))
        x_like, w_like, y_like = examples
        multiply = self.by_kernel(x_like, w_like, bias, y_like, config)
        (M, N), dtype, (wide_x, wide_w, wide_y), (stage_x, stage_w, unstage) = y.shape, y.dtype, wide, copies

        def run(x, w, bias, out):
            if stage_x:
                stage_x(x, at := wide_x.empty(x.device))
                x = at
            if stage_w:
                stage_w(w, at := wide_w.empty(w.device))
                w = at
            y = x.new_empty((M, N), dtype=dtype) if out is None else out
            if unstage is None:
                return multiply(x, w, bias, y)
            unstage(multiply(x, w, bias, wide_y.empty(x.device)), y)
            return y

        return run

    def by_library(self, y):
        """The function that has torch multiply, add the bias, and then apply the activation to the rounded sums."""
        capture.prepare_cublas()
        (M, N), dtype, precision, activation = y.shape, y.dtype, self.precision, self.activation

        def run(x, w, bias, out):
            y = x.new_empty((M, N), dtype=dtype) if out is None else out
            with_bias = bias is not None and x.dtype == dtype
            multiply_into(y, x, w, bias.contiguous() if with_bias else None, precision)
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
    """One column of zeros in place of an operand without columns: kernels store a tile after its last step along K."""
    return matrix.new_zeros((matrix.shape[0], 1))


def activation_reference(value: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The activation of `activate` in torch, differentiable."""
    if activation is None:
        return value
    functional = torch.nn.functional
    return {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
    }[activation](value)


def matmul_reference(x, w, bias=None, activation=None) -> torch.Tensor:
    """`matmul` in torch, in fp64 [M, N]: the ground truth of tests and benchmarks."""
    value = x.double() @ w.double().t()
    if bias is not None:
        value = value + bias.double()
    return activation_reference(value, activation)
