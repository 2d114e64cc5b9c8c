"""A plan: one rank's execution of a problem's layout, ready to run on any operands of that problem.

The kernels compute y[n, m] = x[n, k] @ w[m, k].T, where x is op(B).T and w is op(A), both views. y is D.T: row-major y
and column-major D are the same memory.

If the kernel's own epilogue covers the request (alpha 1, beta 0, an epilog without AUX), it does everything.
Otherwise it returns the sum over ranks in fp32, and torch does the rest, rounding once at the end. A plan keeps no
launches: the core keeps them for each operation, by what its tensors are like.
"""

import contextlib
import dataclasses

import torch

from tkernels.all_gather_matmul import AllGatherMatmul
from tkernels.choice import overlap_config
from tkernels.comm import Context
from tkernels.comm.collectives import all_gather, all_reduce
from tkernels.comm.errors import TkernelsError
from tkernels.configs import FP8, with_room_for
from tkernels.gemm import Scales, fused_layout, multiply
from tkernels.layers.cublasmp import epilogs
from tkernels.layers.cublasmp.distributions import Intervals, Owned, length, local_shape
from tkernels.layers.cublasmp.options import MatmulAlgoType, MatmulEpilog, MatmulResultScheme
from tkernels.layers.cublasmp.problem import AUX, BGRAD, InconsistentError, Layout, MatrixLayout, Problem
from tkernels.matmul_all_reduce import MatmulAllReduce
from tkernels.matmul_reduce_scatter import MatmulReduceScatter
from tkernels.paths import choose_path

OPERATIONS = {"AG+GEMM": AllGatherMatmul, "GEMM+RS": MatmulReduceScatter, "GEMM+AR": MatmulAllReduce}  # by pattern


MAX_AGREED = 64  # pairs of alpha and beta that a plan remembers, for captures


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
    """The plan of one problem on one rank. Holds neither operands nor the context.

    problem: of this rank, as passed.
    outcome: the decisions, see Outcome.
    d_layout: of this rank's part of D.
    """

    def __init__(self, ctx: Context, problem: Problem, layout: Layout, scalars: tuple[float, float]):
        self.problem, self.layout, options = problem, layout, problem.options
        self._configs = {}  # by the sizes, dtypes and layout of a product
        self._agreed = [repr(scalars)]  # alpha and beta that ranks have compared, the last ones last
        self.pattern, self.transposes = layout.pattern, problem.transposes
        self.dtype, self.wire, self.rows = layout.result_dtype, layout.wire_dtype, layout.splits.get("n")
        self.fp8 = self.dtype in FP8
        self.flip = options.order == "C"
        self.inplace = problem.c is not None and options.inplace
        self.blocking = options.blocking is True and ctx.device.type == "cuda"
        self.epilog = problem.epilog & ~MatmulEpilog.ALLREDUCE
        self.has_gradient = bool(self.epilog & (BGRAD | MatmulEpilog.BGRADA | MatmulEpilog.BGRADB))

        overlaps = self.pattern != "local" and options.algo_type != MatmulAlgoType.NO_OVERLAP
        self.path = "fused" if overlaps else "plain"
        if overlaps and options.algo_type in (None, MatmulAlgoType.DEFAULT) and not options.sm_count_communication:
            width = layout.k if self.pattern == "AG+GEMM" else layout.m
            sent = layout.n, width, problem.a.dtype
            arriving = None if self.pattern == "AG+GEMM" else self.wire.itemsize
            if self.pattern == "GEMM+AR":
                arriving += torch.float32.itemsize  # the widest, as alpha and beta come later
            operation = OPERATIONS[self.pattern].operation
            self.path = choose_path(ctx, operation, *sent, None, None, problem.precision, arriving)
        algorithm = MatmulAlgoType.ATOMIC_P2P if self.path == "fused" else MatmulAlgoType.NO_OVERLAP
        sent = self.wire if self.pattern in ("GEMM+RS", "GEMM+AR") else None
        self.outcome = Outcome(self.pattern, algorithm, tuple(layout.wanted), sent)
        activations = {MatmulEpilog.RELU: "relu", MatmulEpilog.GELU: "gelu_tanh"}  # of a kernel's own epilogue
        self.activation = next((name for bit, name in activations.items() if bit in self.epilog), None)
        self.fusable = (
            AUX not in self.epilog
            and "d" not in layout.wanted
            and (MatmulEpilog.BIAS not in self.epilog or self.dtype == problem.a.dtype or problem.a.dtype in FP8)
        )

        rank, device, (trans_a, trans_b) = ctx.rank, ctx.device, self.transposes
        rows, columns = local_shape(layout.owned["d"][rank])
        strides = problem.by_columns().c.strides if self.inplace else (1, max(rows, 1))
        self.d_layout = MatrixLayout((rows, columns), strides)
        # From here on w, x and y stand for a, b and d.
        transposed = {"a": trans_a, "b": not trans_b, "d": True}
        shapes = {"a": (layout.m, layout.k), "b": (layout.n, layout.k), "d": (layout.n, layout.m)}
        owned, wanted = (
            {name: [part[::-1] for part in each] if transposed[name] else each for name, each in by_name.items()}
            for by_name in (layout.owned, layout.wanted)
        )
        self.moves = {}
        for name in wanted:  # operands move to the pattern's distribution, and the result from it
            source, target = (wanted, owned) if name == "d" else (owned, wanted)
            self.moves[name] = Redistribution(shapes[name], source[name], target[name][rank], device)
        self.sums = self._plan_sums(*(owned[name] for name in "abd"), ctx) if self.has_gradient else None

    def _plan_sums(self, w: list[Owned], x: list[Owned], y: list[Owned], ctx: Context):
        """(length, indices that this rank sums, indices to return) of a bias gradient, from what each rank owns.

        None if no sum over ranks is needed: this rank's own sum is complete, or the result scheme isn't FULL.
        """
        layout, kept = self.layout, [columns for _, columns in y]
        if BGRAD in self.epilog:
            extent, parts, complete = layout.m, kept, all(length(rows) == layout.n for rows, _ in y)
        elif MatmulEpilog.BGRADA in self.epilog:
            extent, parts = layout.m, [rows for rows, _ in w]
            complete = parts == kept and all(length(columns) == layout.k for _, columns in w)
        else:
            extent, parts, complete = layout.n, [rows for rows, _ in x], len(x) == 1
            kept = [((0, extent),)] * len(x)
        partial = self.problem.preferences.epilog.bias_result_scheme != MatmulResultScheme.FULL
        if complete or partial:
            return None
        return extent, *(_indices(owned[ctx.rank], ctx.device) for owned in (parts, kept))

    def run(self, ctx: Context, a, b, c, alpha: float, beta: float, inputs: dict, scales: dict):
        """Collective. D, or (D, {name: auxiliary output}), of operands, inputs and scales as passed by the user.

        Meets the other ranks if alpha or beta is not that of the last call; InconsistentError if they differ then.
        """
        if (scalars := repr((alpha, beta))) != self._agreed[-1] and (self.pattern != "local" or self.moves):
            self._agree(ctx, scalars)
        (trans_a, trans_b), flip = self.transposes, self.flip  # order="C" passes transposes
        x, w = b if trans_b != flip else b.t(), a.t() if trans_a != flip else a
        sum_of, moves = (x, w), self.moves
        w = moves["a"](ctx, w) if "a" in moves else w
        x = moves["b"](ctx, x) if "b" in moves else x
        inputs = {name: self._upright(name, value) for name, value in inputs.items()}
        factors = (Scales(scales["b"], scales["a"]),) if scales else ()
        if self.fusable and alpha == 1 and not beta:
            dtype = torch.float32 if self.fp8 else self.dtype
            y, aux = self._product(ctx, x, w, inputs.get("bias"), self.activation, dtype, *factors), {}
        else:
            y = self._product(ctx, x, w, None, None, torch.float32, *factors)
            if "d" in moves:
                y = moves["d"](ctx, y)
            y = y.mul_(alpha) if alpha else y.zero_()  # as in BLAS: with alpha 0, the operands' values don't matter
            if beta:
                y.add_(c if flip else c.t(), alpha=beta)
            y, aux = epilogs.apply(self.epilog, y, inputs, self.layout.aux_dtype)
        if self.has_gradient:
            aux[self.epilog.name.lower()] = self._gradient(ctx, y, *sum_of).to(self.layout.aux_dtype)
        if self.fp8:
            if self.problem.options.result_amax:
                aux["result_amax"] = y.abs().amax().view(1) if y.numel() else y.new_zeros(1)
            most = torch.finfo(self.dtype).max
            y = (y * scales["d"]).clamp_(-most, most)
        y = y.to(self.dtype)
        if not flip:
            y = y.t()
            aux = {name: value.t() if value.dim() == 2 else value for name, value in aux.items()}
        if self.inplace:
            y = c.copy_(y)
        if self.blocking:
            torch.cuda.current_stream().synchronize()
        return (y, aux) if aux else y

    def _agree(self, ctx: Context, scalars: str):
        """Collective. Compare another alpha or beta, of which the kernels know nothing; by its text, as nan != nan."""
        if ctx.capturing:
            if scalars not in self._agreed:
                raise TkernelsError(
                    f"cublasmp: a CUDA graph is being captured, and the ranks have not met yet to compare alpha and "
                    f"beta, {scalars}; make a call with them before the capture"
                )
            return
        with meeting(ctx, "cublasmp with another alpha or beta"):
            found = ctx.group.gather(scalars)
        if len(set(found)) > 1:
            raise InconsistentError(f"cublasmp: alpha and beta differ, by rank: {', '.join(found)}")
        self._agreed = [each for each in self._agreed[-MAX_AGREED:] if each != scalars] + [scalars]

    def _upright(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """An epilog's input: the bias as a vector, a matrix as [n, m]."""
        if name == "bias":
            return value if value.dim() == 1 else value.reshape(-1)
        return value if self.flip else value.t()

    def _product(self, ctx: Context, x, w, bias, activation, dtype, *scales: Scales) -> torch.Tensor:
        """The GEMM and its communication: y in `dtype`."""
        precision = self.problem.precision
        if self.pattern == "local":
            return multiply((activation, dtype, None, precision), (x, w, bias, None, *scales))
        options = activation, self.rows, dtype, self._config(ctx, x, w, dtype), self.path, precision
        kind = OPERATIONS[self.pattern]
        if kind is AllGatherMatmul:
            return ctx.call(kind(*options), x, w, bias, None, None, *scales)[0]
        return ctx.call(kind(*options, wire_dtype=self.wire), x, w, bias, None, *scales)

    def _config(self, ctx: Context, x, w, dtype):
        """None, the operation's own choice; or that with the number of comm programs that the options ask for."""
        num_comm = self.problem.options.sm_count_communication
        if num_comm is None:
            return None
        (N, K), operation = w.shape, OPERATIONS[self.pattern].operation
        precision = self.problem.precision
        layout = fused_layout(x, w, precision)
        if (key := (N, K, x.dtype, dtype, layout)) not in self._configs:
            config = overlap_config(ctx, operation, self.layout.n, N, K, x.dtype, layout, True, precision)
            stored = max(self.wire, dtype, key=lambda each: each.itemsize)
            config = with_room_for(config, stored, x.dtype, precision)
            self._configs[key] = dataclasses.replace(config, num_comm=num_comm)
        return self._configs[key]

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


@contextlib.contextmanager
def meeting(ctx: Context, call: str):
    """The block meets the other ranks, some of which may go on to a kernel by a plan; then they raise MismatchError."""
    with ctx.group.during(lambda: (call, {})), ctx.meeting():
        yield


class Redistribution:
    """Moves a matrix of `shape` from every rank's part (`source`, by rank) to this rank's new part (`target`).

    Every rank gathers the whole matrix and keeps its part. This is simple and works for any two distributions, but the
    whole matrix is temporarily in every rank's memory.
    """

    def __init__(self, shape: tuple[int, int], source: list[Owned], target: Owned, device: torch.device):
        self.shape, self.parts = shape, [local_shape(owned) for owned in source]
        self.sizes = tuple(rows * columns for rows, columns in self.parts)
        self.source = [_places(owned, device) for owned in source]
        self.target = _places(target, device)

    def __call__(self, ctx: Context, local: torch.Tensor) -> torch.Tensor:
        """Collective. This rank's new part of the matrix, contiguous."""
        gathered = all_gather(ctx, local.reshape(-1), rows=self.sizes)
        whole = gathered.new_empty(self.shape)
        for part, shape, places in zip(gathered.split(self.sizes), self.parts, self.source, strict=True):
            whole[places] = part.view(shape)
        return whole[self.target]


def _places(owned: Owned, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (_indices(intervals, device) for intervals in owned)
    return rows[:, None], columns


def _indices(intervals: Intervals, device: torch.device) -> torch.Tensor:
    """The indices that the intervals cover, in order."""
    return torch.cat([torch.arange(*each, device=device) for each in ((0, 0), *intervals)])
