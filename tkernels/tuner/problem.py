"""A tuning problem: one operation on one shape, its operands on this rank, and the call to be tuned."""

import functools
from dataclasses import dataclass

import torch

from tkernels.comm import tuned
from tkernels.comm.collectives import split_rows
from tkernels.comm.context import Context
from tkernels.configs import LAYOUTS, OPERATIONS, bucket, name_of
from tkernels.gemm import layout_of, matmul
from tkernels.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter


@dataclass(frozen=True)
class Problem:
    """operation: one of configs.OPERATIONS. M, N, K: over all ranks. layout: as gemm.layout_of names it."""

    operation: str
    M: int
    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "TN"

    def __str__(self):
        return f"{self.operation} {self.M}x{self.N}x{self.K} {name_of(self.dtype)} {self.layout}"

    def check(self, ranks: int):
        """Raises ValueError for a problem that cannot be tuned on that many ranks."""
        if self.operation not in OPERATIONS:
            raise ValueError(f"tune: there is no {self.operation!r}; there are {', '.join(OPERATIONS)}")
        if ranks == 1 and self.operation != "matmul":
            raise ValueError(
                f"tune: one rank multiplies alone, so {self.operation} is matmul there, with matmul's configuration; "
                f"tune matmul, or on 2 ranks or more"
            )
        if min(self.M, self.N, self.K) < 1:
            raise ValueError(f"tune: M={self.M}, N={self.N}, K={self.K} must be at least 1")
        if self.layout not in LAYOUTS or (self.operation == "all_gather_matmul" and self.layout in ("NT", "TT")):
            takes = LAYOUTS if self.operation != "all_gather_matmul" else ("TN", "NN", "pointers")
            raise ValueError(f"tune: {self.operation} has no layout {self.layout!r}; it takes {', '.join(takes)}")
        for name in {"all_gather_matmul": "N", "matmul": ""}.get(self.operation, "K"):
            if getattr(self, name) % ranks:
                raise ValueError(
                    f"tune: {name}={getattr(self, name)} doesn't divide by {ranks} ranks; tune the next larger one "
                    f"that does, it is in the same bucket or the next"
                )

    def local(self, ranks: int) -> tuple[int, int, int]:
        """M, N, K of one rank's local GEMM."""
        if self.operation == "matmul":
            return self.M, self.N, self.K
        if self.operation == "all_gather_matmul":
            return self.M, self.N // ranks, self.K
        return self.M, self.N, self.K // ranks

    def matrix(self, rows: int, columns: int, transposed: bool, make) -> torch.Tensor:
        """A matrix in the problem's memory layout. make: allocates a vector of that many elements."""
        offset = 1 if self.layout == "pointers" else 0  # a base address that is no multiple of 16 bytes
        memory = make(rows * columns + offset)[offset:]
        return memory.view(columns, rows).t() if transposed else memory.view(rows, columns)

    def operands(self, ranks: int, rank: int, make) -> tuple[torch.Tensor, torch.Tensor]:
        """x and w of that rank. make: as for `matrix`."""
        M, N, K = self.local(ranks)
        rows = split_rows(M, ranks)[rank] if self.operation == "all_gather_matmul" else M
        x = self.matrix(rows, K, self.layout[1] == "T", make)
        return x, self.matrix(N, K, self.layout[0] == "N", make)

    def layout_of_calls(self, ranks: int) -> str:
        """The layout under which calls look up a configuration: also "pointers" where TMA cannot be used."""
        return layout_of(*self.operands(ranks, 0, functools.partial(torch.empty, dtype=self.dtype, device="meta")))

    def key(self, ranks: int) -> tuple:
        """The key of the bucket that the result holds for, as in tkernels.configs."""
        return self.operation, *bucket(*self.local(ranks)), name_of(self.dtype), self.layout_of_calls(ranks)

    def place(self, ctx: Context) -> dict:
        """The part of a record's key that says where the result holds: GPU, ranks, transport and versions."""
        return tuned.place(1, tuned.LOCAL) if self.operation == "matmul" else tuned.place(ctx.size, ctx.transport)


class Operands:
    """Random operands of this rank: x, w, and `gathered`, the x of its local GEMM, for the comparison with cuBLAS."""

    def __init__(self, ctx: Context, problem: Problem, seed: int):
        self.ctx, self.problem = ctx, problem
        M, _, K = problem.local(ctx.size)
        self.rows = split_rows(M, ctx.size)
        generator = torch.Generator(ctx.device).manual_seed(seed * ctx.size + ctx.rank)
        make = functools.partial(torch.randn, generator=generator, device=ctx.device, dtype=problem.dtype)
        self.x, self.w = problem.operands(ctx.size, ctx.rank, make)
        self.gathered = self.x
        if problem.operation == "all_gather_matmul":
            self.gathered = problem.matrix(M, K, False, make)

    def run(self, config) -> torch.Tensor:
        """Collective, except for matmul. The result with `config`; None: the call chooses its configuration."""
        ctx, x, w = self.ctx, self.x, self.w
        if self.problem.operation == "matmul":
            return matmul(x, w, config=config)
        if self.problem.operation == "all_gather_matmul":
            return all_gather_matmul(x, w, rows=self.rows, config=config, path="fused", ctx=ctx)
        if self.problem.operation == "matmul_reduce_scatter":
            return matmul_reduce_scatter(x, w, rows=self.rows, config=config, path="fused", ctx=ctx)
        return matmul_all_reduce(x, w, config=config, path="fused", ctx=ctx)

    def library(self) -> torch.Tensor:
        """This rank's local GEMM alone, by torch (cuBLAS on GPUs)."""
        return torch.mm(self.gathered, self.w.t())
