"""A plan: one rank's execution of a problem's layout, ready to run on any operands of that problem.

The kernels compute y[n, m] = x[n, k] @ w[m, k].T, where x is op(B).T and w is op(A), both views. y is D.T: row-major y
and column-major D are the same memory.

If the kernel's own epilogue covers the request (alpha 1, beta 0, an epilog of `epilogs.FUSED`), a single launch does
everything; `prepare` sets it up once, for later calls to repeat. Otherwise the kernel returns the sum over ranks in
fp32, and torch does the rest, rounding once at the end.
"""

import dataclasses
import logging
import warnings

import torch

from tkernels.all_gather_matmul import AllGatherMatmul
from tkernels.choice import overlap_config
from tkernels.comm import Context
from tkernels.comm.calls import describe
from tkernels.comm.collectives import all_gather, all_reduce, reduce_scatter
from tkernels.configs import with_room_for
from tkernels.gemm import layout_of, multiply
from tkernels.layers.cublasmp import epilogs
from tkernels.layers.cublasmp.distributions import length, local_shape
from tkernels.layers.cublasmp.options import MatmulAlgoType, MatmulEpilog, MatmulResultScheme
from tkernels.layers.cublasmp.problem import BGRAD, Extents, Layout, MatrixLayout, Problem, resolve, survey
from tkernels.layers.cublasmp.redistribution import Redistribution, indices
from tkernels.matmul_all_reduce import MatmulAllReduce
from tkernels.matmul_reduce_scatter import MatmulReduceScatter
from tkernels.paths import choose_path

OPERATIONS = {
    "AG+GEMM": "all_gather_matmul",
    "GEMM+RS": "matmul_reduce_scatter",
    "GEMM+AR": "matmul_all_reduce",
}  # by pattern


def agree(ctx: Context, problem: Problem | Exception, scalars: tuple) -> Extents:
    """Collective. The extents of the ranks' problems. Raises the same error on every rank, see `survey`."""
    return survey(*_everyones(ctx, problem, scalars), ctx.num_programs)


def _everyones(ctx: Context, problem: Problem | Exception, scalars: tuple) -> tuple[list, list]:
    """Collective. By rank: the problems, and the scalars."""
    if isinstance(problem, Problem):  # a logger is local to this rank
        problem = problem._replace(options=dataclasses.replace(problem.options, logger=None))
    everyone, all_scalars = zip(*ctx.group.gather((problem, scalars)), strict=True)
    return list(everyone), list(all_scalars)


def make_plan(ctx: Context, problem: Problem | Exception, scalars: tuple) -> "Plan":
    """Collective. This rank's plan for the ranks' problems. Raises the same error on every rank, see `resolve`."""
    everyone, all_scalars = _everyones(ctx, problem, scalars)
    layout = resolve(everyone, all_scalars, ctx.num_programs)
    plan = Plan(ctx, everyone[ctx.rank], layout)
    (problem.options.logger or logging.getLogger(__name__)).info("%s", plan.outcome)
    if layout.redistributed:
        warnings.warn(
            f"cublasmp: {', '.join(name.upper() for name in layout.redistributed)} of m, n, k = {layout.m}, "
            f"{layout.n}, {layout.k} are redistributed in every call, each through the whole matrix on every rank, for "
            f"{layout.pattern}; distribute them in slabs as that takes them to avoid it",
            stacklevel=4,
        )
    return plan


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The decisions of a plan.

    pattern: "AG+GEMM", "GEMM+RS", "GEMM+AR" or "local".
    algorithm: ATOMIC_P2P or NO_OVERLAP.
    redistributed: which of "a", "b", "d" are redistributed in every call.
    communication_type: the dtype of partial sums on the wire; None if none are sent.
    """

    pattern: str
    algorithm: MatmulAlgoType
    redistributed: tuple[str, ...]
    communication_type: torch.dtype | None


class Plan:
    """The plan of one problem on one rank; made by `make_plan`. Holds neither operands nor the context.

    outcome: the decisions, see Outcome.
    single: whether one kernel does everything if alpha is 1 and beta 0.
    d_layout: of this rank's part of D.
    """

    def __init__(self, ctx: Context, problem: Problem, layout: Layout):
        self.problem, self.layout = problem, layout
        self.pattern = layout.pattern
        self.overlap = layout.algorithm == MatmulAlgoType.ATOMIC_P2P
        self.num_comm, self.path = problem.options.sm_count_communication, "fused"
        if self.overlap and problem.options.algo_type in (None, MatmulAlgoType.DEFAULT) and self.num_comm is None:
            width = layout.k if self.pattern == "AG+GEMM" else layout.m
            sent = layout.n, width, problem.a.dtype
            self.path = choose_path(ctx, OPERATIONS[self.pattern], *sent, None, None, problem.precision)
        algorithm = layout.algorithm if self.path == "fused" else MatmulAlgoType.NO_OVERLAP
        self.dtype, self.wire = layout.result_dtype, layout.wire_dtype
        self.rows = layout.splits.get("n")
        self.inplace = problem.c is not None and problem.options.inplace
        self.flip = problem.options.order == "C"
        self.blocking = problem.options.blocking is True and ctx.device.type == "cuda"
        self.transposes = problem.transposes

        epilog = self.epilog = problem.epilog & ~MatmulEpilog.ALLREDUCE
        self.activation = epilogs.FUSED.get(epilog)
        finishes = self.pattern in ("local", "AG+GEMM") or self.overlap  # whether a kernel sees the whole sum
        self.fusable = (
            epilog in epilogs.FUSED
            and finishes
            and "d" not in layout.redistributed
            and (MatmulEpilog.BIAS not in epilog or self.dtype == problem.a.dtype)
        )
        self.has_gradient = bool(epilog & (BGRAD | MatmulEpilog.BGRADA | MatmulEpilog.BGRADB))
        self.single = self.fusable and not (layout.redistributed or self.has_gradient or self.inplace or self.blocking)
        partial_sums = self.pattern in ("GEMM+RS", "GEMM+AR")
        self.outcome = Outcome(self.pattern, algorithm, layout.redistributed, self.wire if partial_sums else None)

        rank, device = ctx.rank, ctx.device
        rows, columns = local_shape(layout.owned["d"][rank])
        strides = problem.c.strides if self.inplace else (1, max(rows, 1))
        self.d_layout = MatrixLayout((rows, columns), strides)
        shapes = {"a": (layout.m, layout.k), "b": (layout.k, layout.n), "d": (layout.m, layout.n)}
        self.moves = {}
        for name in layout.redistributed:
            shape = shapes[name][::-1] if name in "ab" and self.transposes["ab".index(name)] else shapes[name]
            owned, wanted = layout.owned[name], layout.wanted[name]
            if name == "d":
                # y is D transposed, and it moves from the pattern's distribution to the requested one.
                shape, owned, wanted = shape[::-1], _transposed(wanted), _transposed(owned)
            self.moves[name] = Redistribution(shape, owned, wanted[rank], device)
        self.sums = self._plan_sums(rank, device) if self.has_gradient else None

    def _plan_sums(self, rank: int, device: torch.device):
        """(length, indices that this rank sums, indices to return) of a bias gradient.

        None if no sum over ranks is needed: this rank's own sum is complete, or the result scheme isn't FULL.
        """
        layout, owned = self.layout, self.layout.owned
        a, b, d = (
            _transposed(owned[name]) if transposed else owned[name]
            for name, transposed in zip("abd", (*self.transposes, False), strict=True)
        )
        if BGRAD in self.epilog:
            extent, parts, summed, kept = layout.m, [o[0] for o in d], [o[1] for o in d], [o[0] for o in d]
            complete = all(length(columns) == layout.n for columns in summed)
        elif MatmulEpilog.BGRADA in self.epilog:
            extent, parts, summed, kept = layout.m, [o[0] for o in a], [o[1] for o in a], [o[0] for o in d]
            complete = parts == kept and all(length(columns) == layout.k for columns in summed)
        else:
            extent, parts = layout.n, [o[1] for o in b]
            kept = [((0, extent),)] * len(b)
            complete = len(b) == 1
        partial = self.problem.preferences.epilog.bias_result_scheme != MatmulResultScheme.FULL
        if complete or partial:
            return None
        return extent, indices(parts[rank], device), indices(kept[rank], device)

    def views(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x [n, k], w [m, k]): views of the operands as passed."""
        (trans_a, trans_b), flip = self.transposes, self.flip  # order="C" passes transposes
        return b if trans_b != flip else b.t(), a.t() if trans_a != flip else a

    def run(self, ctx: Context, x, w, c, alpha: float, beta: float, inputs: dict):
        """Collective. D, or (D, {name: auxiliary output}). x and w are from `views`, the rest as passed by the user."""
        if self.single and alpha == 1 and not beta:
            bias = bias_of(inputs)
            key = self, describe(x), describe(w), describe(bias)
            return ctx.workspace().prepared(key, lambda: self.prepare(ctx, x, w, bias))(x, w, bias)
        sum_of, moves = (x, w), self.moves
        if moves:
            x, w = self._moved(ctx, x, w)
        if self.fusable and alpha == 1 and not beta:
            bias = bias_of(inputs)
            y, aux = self._product(ctx, x, w, bias, self.activation, self.dtype)(x, w, bias), {}
        else:
            y = self._product(ctx, x, w, None, None, torch.float32)(x, w, None).float()
            if "d" in moves:
                y = moves["d"](ctx, y)
            y = y.mul_(alpha) if alpha else y.zero_()  # as in BLAS: with alpha 0, the operands' values don't matter
            if beta:
                y.add_(c if self.flip else c.t(), alpha=beta)
            y, aux = epilogs.apply(self.epilog, y, self._upright(inputs), self.dtype)
        if self.has_gradient:
            aux[self.epilog.name.lower()] = self._gradient(ctx, y, *sum_of).to(self.dtype)
        y = y.to(self.dtype)
        if not self.flip:
            y = y.t()
            aux = {name: value.t() if value.dim() == 2 else value for name, value in aux.items()}
        if self.inplace:
            y = c.copy_(y)
        if self.blocking:
            torch.cuda.current_stream().synchronize()
        return (y, aux) if aux else y

    def prepare(self, ctx: Context, x, w, bias):
        """Plan a `single` call for tensors like these: a function of them that returns D.

        Valid until the current stream's workspace forgets its plans.
        """
        product = self._product(ctx, x, w, bias, self.activation, self.dtype)
        return product if self.flip else lambda x, w, bias: product(x, w, bias).t()

    def _upright(self, inputs: dict) -> dict:
        """An epilog's inputs, with matrices as [n, m]."""
        if "bias" in inputs:
            return {"bias": bias_of(inputs)}
        return inputs if self.flip else {name: value.t() for name, value in inputs.items()}

    def _moved(self, ctx: Context, x, w):
        """x and w, redistributed where the layout requires it."""
        trans_a, trans_b = self.transposes
        if "a" in self.moves:
            w = self.moves["a"](ctx, w.t() if trans_a else w)
            w = w.t() if trans_a else w
        if "b" in self.moves:
            x = self.moves["b"](ctx, x if trans_b else x.t())
            x = x if trans_b else x.t()
        return x, w

    def _product(self, ctx: Context, x, w, bias, activation, dtype):
        """Plan the GEMM and its communication for tensors like these: a function of them.

        It returns y in `dtype`, or in the wire's dtype if an unfused collective summed it.
        """
        if self.pattern == "local":
            return lambda x, w, bias: self._multiply(x, w, bias, activation, dtype)
        gathers, sums_everywhere = self.pattern == "AG+GEMM", self.pattern == "GEMM+AR"
        if not self.overlap:
            if gathers:
                return lambda x, w, bias: self._multiply(all_gather(ctx, x, self.rows), w, bias, activation, dtype)
            if sums_everywhere:
                return lambda x, w, bias: all_reduce(ctx, self._multiply(x, w, None, None, self.wire))
            return lambda x, w, bias: reduce_scatter(ctx, self._multiply(x, w, None, None, self.wire), self.rows)
        config, products = self._config(ctx, x, w, dtype), self.problem.precision
        if gathers:
            call = AllGatherMatmul(activation, self.rows, dtype, config, self.path, products)
            run = ctx.prepared(call, (x, w, bias, None, None))
            return lambda x, w, bias: run(x, w, bias, None, None)[0]
        kind = MatmulAllReduce if sums_everywhere else MatmulReduceScatter
        call = kind(activation, self.rows, dtype, config, self.path, products, wire_dtype=self.wire)
        run = ctx.prepared(call, (x, w, bias, None))
        return lambda x, w, bias: run(x, w, bias, None)

    def _multiply(self, x, w, bias, activation, dtype) -> torch.Tensor:
        """This rank's GEMM alone, in the problem's precision."""
        return multiply((activation, dtype, None, self.problem.precision), (x, w, bias, None))

    def _config(self, ctx: Context, x, w, dtype):
        if self.num_comm is None:
            return None
        (N, K), operation = w.shape, OPERATIONS[self.pattern]
        config = overlap_config(ctx, operation, self.layout.n, N, K, x.dtype, layout_of(x, w), sending=True)
        stored = max(self.wire, dtype, key=lambda each: each.itemsize)
        return dataclasses.replace(with_room_for(config, stored, x.dtype), num_comm=self.num_comm)

    def _gradient(self, ctx: Context, y, x, w) -> torch.Tensor:
        """The bias gradient in fp32: y [n, m] summed over n, or an operand, as passed by the user, summed over k."""
        if BGRAD in self.epilog:
            value = y.sum(0)
        else:
            value = (w if MatmulEpilog.BGRADA in self.epilog else x).sum(1, dtype=torch.float32)
        if self.sums is None:
            return value
        extent, mine, kept = self.sums
        return all_reduce(ctx, value.new_zeros(extent).index_add_(0, mine, value))[kept]


def bias_of(inputs: dict) -> torch.Tensor | None:
    """The bias in an epilog's inputs, as a vector, or None."""
    bias = inputs.get("bias")
    return bias if bias is None or bias.dim() == 1 else bias.reshape(-1)


def _transposed(owned):
    return [(columns, rows) for rows, columns in owned]
