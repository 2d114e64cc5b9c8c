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
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.gemm import precision, problem_of_product
from tkernels.rounding import tolerance

LAYOUTS = ("TN", "NN", "NT")
TERMS_OF_AN_INTEGER_ROW = 64


@dataclass(frozen=True)
class Case:
    """A case to measure: M, N, K over all ranks.

    layout: of the operands of the local GEMM, in BLAS notation. TN: x and w as in nn.Linear's forward. NN: w is the
    transpose of a [K, N] matrix, as for the gradient of the input. NT: x is a transpose as well, of a [K, M] matrix, as
    for the gradient of the weight.
    """

    op: str
    shape: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    layout: str = "TN"

    def refusal(self, ranks: int) -> str | None:
        """Why the case cannot be measured on that many ranks: they must divide the features, but not the rows."""
        shared = {"N": self.N} if self.op == "all_gather_matmul" else {}
        shared |= {"K": self.K} if self.op in ("matmul_reduce_scatter", "matmul_all_reduce") else {}
        odd = [f"{name}={size}" for name, size in shared.items() if size % ranks]
        return f"{self.op} {self.shape}: {', '.join(odd)} doesn't divide by {ranks} ranks" if odd else None

    def rows(self, ranks: int) -> tuple[int, ...]:
        """Every rank's rows: full shards, then the remainder, then none, so that padding goes to the very end."""
        share = -(-self.M // ranks)
        return tuple(max(0, min(share, self.M - rank * share)) for rank in range(ranks))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that is sent between ranks: of x where rows are gathered, of partial sums elsewhere."""
        return (self.K if self.op in ("all_gather", "all_gather_matmul") else self.N) * self.dtype.itemsize

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
    return overlap_config(ctx, case.op, case.M, N, K, case.dtype, case.layout, sending)


def product_of(case: Case) -> model.Problem:
    """The local product of a case, with operands as Problem makes them."""
    made = functools.partial(torch.empty, dtype=case.dtype, device="meta")
    x = made(case.K, case.M).t() if case.layout == "NT" else made(case.M, case.K)
    w = made(case.N, case.K) if case.layout == "TN" else made(case.K, case.N).t()
    return problem_of_product(x, w, made(case.M, case.N), precision(case.dtype))


def path_of(ctx: Context, case: Case) -> str | None:
    """The path that our call takes, as tkernels.explain names it; None for operations that have no paths."""
    if case.op == "gemm":
        return product_way(product_of(case))[0]
    if "matmul" not in case.op:
        return None
    return tkernels.explain(case.op, case.M, case.N, case.K, case.dtype, ctx=ctx).path


class Problem:
    """The operands of a case on this rank.

    values: "normal" (mean 0, variance 1) to time and to test rounding; "integers" for exact equality: an x whose rows
        have at most 64 elements of +-1, and w of -2 to 2, so that a rank's partial sum is at most 128, exact in bf16;
        "zeros" to compile.
    """

    def __init__(self, ctx: Context, case: Case, values: str):
        self.ctx, self.case, self.values = ctx, case, values
        self.rows = case.rows(ctx.size)
        self.x, self.w = self.x_of(ctx.rank), self.w_of(ctx.rank)

    def x_of(self, rank: int) -> torch.Tensor:
        """A rank's x: [M, K] for gemm, [M/R, K] to gather, [M, K/R] for a GEMM to be reduced, [M, N] to reduce."""
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

    def w_of(self, rank: int) -> torch.Tensor | None:
        """A rank's w, [N/R, K], [N, K/R] or [N, K]; None for the plain collectives."""
        case, size = self.case, self.ctx.size
        if case.op == "gemm":
            shape = (case.N, case.K)
        elif case.op == "all_gather_matmul":
            shape = (case.N // size, case.K)
        elif "matmul" in case.op:
            shape = (case.N, case.K // size)
        else:
            return None
        return self._make(shape, 2 * rank + 1, False, case.layout != "TN")

    def _make(self, shape, seed: int, sparse: bool, transposed: bool) -> torch.Tensor:
        matrix = self._values(shape, seed, sparse)
        return matrix.t().contiguous().t() if transposed else matrix

    def _values(self, shape, seed: int, sparse: bool) -> torch.Tensor:
        device, dtype = self.ctx.device, self.case.dtype
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
        return torch.cat([self.x_of(rank) for rank in range(self.ctx.size)])

    def ours(self, path: str | None = None) -> torch.Tensor:
        """Collective. Our result, through the public operator, as users call it. path: the path to request."""
        operands = (self.x,) if self.w is None else (self.x, self.w)
        if self.case.op == "gemm":
            return tkernels.matmul(*operands)
        options = {} if "all_reduce" in self.case.op or len(set(self.rows)) == 1 else {"rows": self.rows}
        options |= {} if path is None else {"path": path}
        return getattr(tkernels, self.case.op)(*operands, **options, ctx=self.ctx)

    def with_config(self, config, ctx: Context | None = None) -> torch.Tensor:
        """Collective. Our kernel's result with `config`, over another context of the same ranks if one is given."""
        op, ctx, x, w, rows = self.case.op, ctx or self.ctx, self.x, self.w, self.rows
        if op == "gemm":
            return tkernels.matmul(x, w, config=config)
        if op == "all_gather_matmul":
            return tkernels.all_gather_matmul(x, w, rows=rows, config=config, ctx=ctx)
        if op == "matmul_reduce_scatter":
            return tkernels.matmul_reduce_scatter(x, w, rows=rows, config=config, ctx=ctx)
        return tkernels.matmul_all_reduce(x, w, config=config, ctx=ctx)

    def truth(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(X, W): this rank's exact result is X @ W.T, or X alone if W is None, in fp64."""
        op, ranks = self.case.op, range(self.ctx.size)
        scattered = op in ("matmul_reduce_scatter", "reduce_scatter")
        first = sum(self.rows[: self.ctx.rank])
        own = slice(first, first + self.rows[self.ctx.rank]) if scattered else slice(None)
        if op == "gemm":
            return self.x, self.w
        if op in ("all_gather_matmul", "all_gather"):
            return self.gathered, self.w
        if self.w is None:
            return sum(self.x_of(rank)[own].double() for rank in ranks), None
        x = torch.cat([self.x_of(rank)[own] for rank in ranks], dim=1)
        return x, torch.cat([self.w_of(rank) for rank in ranks], dim=1)

    def allowed(self) -> tuple[float, float]:
        """(atol, rtol) of our result against the reference; (0, 0): equal to it, rounded once to the dtype."""
        case, size = self.case, self.ctx.size
        if self.values == "integers" or case.op == "all_gather":
            return 0.0, 0.0
        if case.op in ("gemm", "all_gather_matmul"):
            return tolerance(case.dtype, case.K)
        if "matmul" in case.op:  # the partial sums of all ranks but one are rounded to be sent
            return tolerance(case.dtype, case.K, roundings=size)
        return tolerance(case.dtype, size)
