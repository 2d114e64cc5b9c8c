"""One operation on one shape: its configuration, its operands on every rank, our call, and the reference.

Operands are generated from seeds, so that every rank can generate those of all ranks and the reference needs no
communication. This requires GPUs of one kind within a group: a GPU's random numbers depend on its size.
"""

import functools
from dataclasses import dataclass

import torch

import tkernels
from bench import work
from tkernels import model
from tkernels.choice import overlap_config, product_way
from tkernels.comm.context import Context
from tkernels.configs import FP8, GemmConfig, OverlapConfig, result_dtype, with_room_for
from tkernels.gemm import precision, problem_of_product
from tkernels.gpus import stages_rows
from tkernels.quantize import quantize_reference
from tkernels.rounding import fp8_error, tolerance

LAYOUTS = ("TN", "NN", "NT")
TERMS_OF_AN_INTEGER_ROW = 64
TF32_ULP = 2.0**-11  # of an operand, rounded to the nearest
TF32_RTOL = 2 * TF32_ULP  # of few terms a large result may be one product, which errs as both of its operands do


@dataclass(frozen=True)
class Case:
    """A case to measure: M, N, K over all ranks.

    layout: of the operands of the local GEMM, in BLAS notation. TN: x and w as in nn.Linear's forward. NN: w is the
    transpose of a [K, N] matrix, as for the gradient of the input. NT: x is a transpose as well, of a [K, M] matrix, as
    for the gradient of the weight.
    fast_accum: of operands of FP8, which have a scale a row; None for others.
    """

    op: str
    shape: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    layout: str = "TN"
    fast_accum: bool | None = None

    def refusal(self, ranks: int) -> str | None:
        """Why the case cannot be measured on that many ranks: they must divide the features, but not the rows.

        FP8 has products alone, of operands with K contiguous, whose part on a rank is a multiple of 16.
        """
        shared = {"N": self.N} if self.op == "all_gather_matmul" else {}
        shared |= {"K": self.K} if self.op in ("matmul_reduce_scatter", "matmul_all_reduce") else {}
        odd = [f"{name}={size}" for name, size in shared.items() if size % ranks]
        if odd:
            return f"{self.op} {self.shape}: {', '.join(odd)} doesn't divide by {ranks} ranks"
        if self.dtype not in FP8:
            return None
        if self.layout != "TN" or "matmul" not in self.op and self.op != "gemm":
            return f"{self.op} {self.shape} {self.layout}: float8 is measured in products, with K contiguous (TN)"
        odd = self.local_K(ranks) % 16
        return f"{self.op} {self.shape}: float8 takes a K, of each rank, that is a multiple of 16" if odd else None

    def local_K(self, ranks: int) -> int:
        """K of a rank's product."""
        return self.K // ranks if self.op in ("matmul_reduce_scatter", "matmul_all_reduce") else self.K

    @property
    def result_dtype(self) -> torch.dtype:
        return result_dtype(self.dtype)

    def rows(self, ranks: int) -> tuple[int, ...]:
        """Every rank's rows: full shards, then the remainder, then none, so that padding goes to the very end."""
        share = -(-self.M // ranks)
        return tuple(max(0, min(share, self.M - rank * share)) for rank in range(ranks))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that is sent between ranks: of x where rows are gathered, of partial sums elsewhere."""
        if self.op in ("all_gather", "all_gather_matmul"):
            return work.operand_row_bytes(self.K, self.dtype)
        return self.N * self.result_dtype.itemsize

    def work(self, ranks: int, rank: int = 0) -> work.Work:
        """The work of one GPU in one call."""
        if self.op == "gemm":
            return work.matmul(self.M, self.N, self.K, self.dtype)
        function, rows = getattr(work, self.op), self.rows(ranks)
        if "matmul" in self.op:
            return function(self.M, self.N, self.K, ranks, self.dtype, rank, rows)
        return function(self.M, self.K if self.op == "all_gather" else self.N, ranks, self.dtype, rank, rows)


def config_of(ctx: Context, case: Case, sending: bool = False) -> GemmConfig | OverlapConfig | None:
    """The configuration that a call without one uses; None for operations that have none, and where torch multiplies.

    sending: as in overlap_config.
    """
    if case.op == "gemm":
        return product_way(product_of(case))[1]
    if "matmul" not in case.op:
        return None
    gathers = case.op == "all_gather_matmul"
    N, K = (case.N // ctx.size, case.K) if gathers else (case.N, case.K // ctx.size)
    how = precision(case.dtype, case.fast_accum is not False)
    layout = "TN" if how == "tf32" and stages_rows(case.dtype, how) else case.layout
    config = overlap_config(ctx, case.op, case.M, N, K, case.dtype, layout, sending, how)
    return with_room_for(config, case.result_dtype, case.dtype, how)


def product_of(case: Case) -> model.Problem:
    """The local product of a case, with operands as Problem makes them."""
    made = functools.partial(torch.empty, dtype=case.dtype, device="meta")
    x = made(case.K, case.M).t() if case.layout == "NT" else made(case.M, case.K)
    w = made(case.N, case.K) if case.layout == "TN" else made(case.K, case.N).t()
    y = torch.empty(case.M, case.N, dtype=case.result_dtype, device="meta")
    return problem_of_product(x, w, y, precision(case.dtype, case.fast_accum is not False))


def path_of(ctx: Context, case: Case) -> str | None:
    """The path that our call takes, as tkernels.explain names it; None for operations that have no paths."""
    if case.op == "gemm":
        return product_way(product_of(case))[0]
    if "matmul" not in case.op:
        return None
    return tkernels.explain(case.op, case.M, case.N, case.K, case.dtype, ctx=ctx).path


TORCH_ROUNDINGS = 33  # where torch has cuBLAS round partial sums to 16 bits


class Problem:
    """The operands of a case on this rank.

    values: "normal" (mean 0, variance 1) to time and to test rounding; "integers" for exact equality: an x whose rows
        have at most 64 elements of +-1, and w of -2 to 2, so that a rank's partial sum is at most 128, exact in bf16;
        "zeros" to compile.
    x, x_scale, w, w_scale: of FP8 each row has a scale, [M, 1] and [N, 1], a power of two for "integers". Of other
        dtypes the scales are None.
    """

    def __init__(self, ctx: Context, case: Case, values: str):
        self.ctx, self.case, self.values = ctx, case, values
        self.rows = case.rows(ctx.size)
        (self.x, self.x_scale), (self.w, self.w_scale) = self.x_of(ctx.rank), self.w_of(ctx.rank)

    def x_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A rank's x and its scales: [M, K] for gemm, [M/R, K] to gather, [M, K/R] for a GEMM to be reduced, and [M, N]
        to reduce.
        """
        case, size = self.case, self.ctx.size
        shape = {
            "gemm": (case.M, case.K),
            "all_gather_matmul": (self.rows[rank], case.K),
            "all_gather": (self.rows[rank], case.K),
            "matmul_reduce_scatter": (case.M, case.K // size),
            "matmul_all_reduce": (case.M, case.K // size),
            "reduce_scatter": (case.M, case.N),
            "all_reduce": (case.M, case.N),
        }[case.op]
        return self._make(shape, 2 * rank, True, case.layout == "NT")

    def w_of(self, rank: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A rank's w, [N/R, K], [N, K/R] or [N, K], and its scales; None for the plain collectives."""
        case, size = self.case, self.ctx.size
        if case.op == "gemm":
            shape = (case.N, case.K)
        elif case.op == "all_gather_matmul":
            shape = (case.N // size, case.K)
        elif "matmul" in case.op:
            shape = (case.N, case.K // size)
        else:
            return None, None
        return self._make(shape, 2 * rank + 1, False, case.layout != "TN")

    def _make(self, shape, seed: int, sparse: bool, transposed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.case.dtype in FP8:
            return self._scaled(shape, seed, sparse)
        matrix = self._values(shape, seed, sparse, self.case.dtype)
        return matrix.t().contiguous().t() if transposed else matrix, None

    def _scaled(self, shape, seed: int, sparse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """By torch's own operators, which launch nothing that compiling ahead would take for ours."""
        if self.values != "integers":
            return quantize_reference(self._values(shape, seed, sparse, torch.float32), "row", self.case.dtype)
        generator = torch.Generator(self.ctx.device).manual_seed(seed)
        scale = torch.randint(-2, 3, (shape[0], 1), generator=generator, device=self.ctx.device).float().exp2()
        return self._values(shape, seed, sparse, torch.bfloat16).to(self.case.dtype), scale

    def _values(self, shape, seed: int, sparse: bool, dtype: torch.dtype) -> torch.Tensor:
        device = self.ctx.device
        if self.values == "zeros":
            return torch.zeros(shape, device=device, dtype=dtype)
        generator = torch.Generator(device).manual_seed(seed)
        if self.values == "normal":
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)
        if not sparse:
            return torch.randint(-2, 3, shape, generator=generator, device=device).to(dtype)
        rows, columns = shape
        at = (rows, min(columns, TERMS_OF_AN_INTEGER_ROW))
        places = torch.randint(0, columns, at, generator=generator, device=device)
        # One sign per column: where a row draws a column twice, it is undefined which of the two values stays.
        signs = (torch.randint(0, 2, (columns,), generator=generator, device=device) * 2 - 1).to(dtype)
        return torch.zeros(shape, device=device, dtype=dtype).scatter_(1, places, signs[places])

    @functools.cached_property
    def gathered(self) -> torch.Tensor:
        """The x of all ranks, concatenated by rows: the result of a gather."""
        return torch.cat([as_bytes(self.x_of(rank)[0]) for rank in range(self.ctx.size)]).view(self.case.dtype)

    @functools.cached_property
    def gathered_scale(self) -> torch.Tensor | None:
        """The scales of its rows."""
        scales = [self.x_of(rank)[1] for rank in range(self.ctx.size)]
        return None if scales[0] is None else torch.cat(scales)

    @property
    def scaling(self) -> dict:
        """The options of a call that are about FP8."""
        if self.case.dtype not in FP8:
            return {}
        return {"x_scale": self.x_scale, "w_scale": self.w_scale, "fast_accum": self.case.fast_accum}

    def ours(self, path: str | None = None) -> torch.Tensor:
        """Collective. Our result, through the public operator, as users call it. path: the path to request."""
        operands = (self.x,) if self.w is None else (self.x, self.w)
        if self.case.op == "gemm":
            return tkernels.matmul(*operands, **self.scaling)
        options = {} if "all_reduce" in self.case.op or len(set(self.rows)) == 1 else {"rows": self.rows}
        options |= self.scaling | ({} if path is None else {"path": path})
        return getattr(tkernels, self.case.op)(*operands, **options, ctx=self.ctx)

    def with_config(self, config, ctx: Context | None = None) -> torch.Tensor:
        """Collective. Our kernel's result with `config`, over another context of the same ranks if one is given."""
        op, x, w, options = self.case.op, self.x, self.w, self.scaling | {"config": config}
        if op == "gemm":
            return tkernels.matmul(x, w, **options)
        options |= {"ctx": ctx or self.ctx} | ({} if op == "matmul_all_reduce" else {"rows": self.rows})
        return getattr(tkernels, op)(x, w, **options)

    def truth(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(X, W), of FP8 dequantized: this rank's exact result is X @ W.T, or X alone if W is None, in fp64."""
        op, ranks = self.case.op, range(self.ctx.size)
        scattered = op in ("matmul_reduce_scatter", "reduce_scatter")
        first = sum(self.rows[: self.ctx.rank])
        own = slice(first, first + self.rows[self.ctx.rank]) if scattered else slice(None)
        if op == "gemm":
            return dequantized(self.x, self.x_scale), dequantized(self.w, self.w_scale)
        if op in ("all_gather_matmul", "all_gather"):
            w = None if self.w is None else dequantized(self.w, self.w_scale)
            return dequantized(self.gathered, self.gathered_scale), w
        if self.w is None:
            return sum(self.x_of(rank)[0][own].double() for rank in ranks), None
        x = torch.cat([dequantized(*self.x_of(rank))[own] for rank in ranks], dim=1)
        return x, torch.cat([dequantized(*self.w_of(rank)) for rank in ranks], dim=1)

    def allowed(self) -> tuple[float, float]:
        """(atol, rtol) of our result against the reference; (0, 0): equal to it, rounded once to the dtype."""
        case, size = self.case, self.ctx.size
        if self.values == "integers" or case.op == "all_gather":
            return 0.0, 0.0
        if self.w is None:
            return tolerance(case.dtype, size)
        # The partial sums of all ranks but one are rounded to be sent.
        roundings = 1 if case.op in ("gemm", "all_gather_matmul") else size
        if case.op == "gemm" and case.dtype.itemsize == 2 and path_of(self.ctx, case) == model.LIBRARY:
            roundings = TORCH_ROUNDINGS
        atol, rtol = tolerance(case.result_dtype, case.K, roundings)
        if precision(case.dtype) == "tf32":
            atol, rtol = atol + tf32_error(case.K), rtol + TF32_RTOL
        if case.dtype in FP8:
            atol += fp8_error(case.local_K(size), case.fast_accum) * (case.K / case.local_K(size)) ** 0.5
        return atol, rtol


def tf32_error(terms: int) -> float:
    """atol beyond `tolerance`'s, of a sum of so many products of operands of unit variance that are rounded to TF32."""
    return 6 * TF32_ULP * terms**0.5


def dequantized(matrix: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What a matrix of FP8 stands for, in fp32, exact if the scales are powers of two; any other as it is."""
    return matrix if scale is None else matrix.float() * scale


def as_bytes(matrix: torch.Tensor) -> torch.Tensor:
    """The memory of a matrix of FP8, for what torch does with bytes alone; any other as it is."""
    return matrix.view(torch.uint8) if matrix.dtype in FP8 else matrix
