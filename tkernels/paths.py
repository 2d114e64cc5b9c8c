"""Chooses the path of an operation: its fused kernel, or the plain path, a collective and torch.mm one after the other.

Overlap pays off once there is enough communication to hide. Below that size the transfer takes a few microseconds, a
fused kernel has fewer tiles than the GPU has SMs, and the plain path wins: cuBLAS splits K when there are few rows, and
the collective sends packets. Both paths compute the same (fp32 sums in rank order, then bias once, then the activation)
and have the same options and gradients. Only the rounding of intermediate partial sums may differ.

All ranks must take the same path, so the rule depends only on a value that they share: the bytes that are sent, not one
rank's number of features.
"""

import functools
import logging
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tkernels import model
from tkernels.choice import problem_of
from tkernels.comm import capture, collectives, runtime
from tkernels.comm.arguments import check_torch_dtype, check_type, whole
from tkernels.comm.context import Context, as_context
from tkernels.comm.launch import PreparedLaunch
from tkernels.comm.regions import ALIGNMENT, round_up
from tkernels.configs import OverlapConfig
from tkernels.gemm import ACTIVATIONS, Matrix, check_result, finish, layout_of, load_tile, store_tile
from tkernels.model import PLAIN_BYTES

PATHS = ("fused", "plain")

_log = logging.getLogger("tkernels")


@dataclass(frozen=True)
class Way:
    """A way to carry out a call.

    name: "plain", or who sends in the fused kernel. config: of the fused kernel.
    predicted: its time by the model (tkernels.model), or None with the reason why it is no candidate in `refused`.
    """

    name: str
    config: OverlapConfig | None = None
    predicted: model.Prediction | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Choice:
    """The path of an operation.

    path: "fused" or "plain".
    reason: the reason, as a phrase.
    ways: what the model predicts of each way on this GPU, the one that is taken first; empty on the simulated runtime
        and for one rank.
    """

    path: str
    reason: str
    ways: tuple[Way, ...] = ()

    def __str__(self):
        return f"{self.path}: {self.reason}"


def explain(
    operation: str, M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16, *, ctx: Context | None = None
) -> Choice:
    """The path that `operation` takes by default for the global GEMM [M, K] @ [K, N], and the reason. Not collective.

    operation: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce".
    Raises ValueError for another operation, ValueError or TypeError for what is no size or dtype, and TkernelsError
    without a context, since the choice depends on its number of ranks.
    """
    check_type("explain: operation", operation, str, "a name")
    check_torch_dtype("explain: dtype", dtype)
    M, N, K = whole("explain: M", M), whole("explain: N", N), whole("explain: K", K)
    if operation not in PLAIN_BYTES:
        raise ValueError(f"explain: operation={operation!r} has no paths; those of {', '.join(PLAIN_BYTES)} are known")
    ctx = as_context(ctx, "explain: ctx")
    width = K if operation == "all_gather_matmul" else N
    choice = _choose(operation, M, width, dtype.itemsize, ctx.size)
    if ctx.size == 1 or runtime.RUNTIME == "simulated":
        return choice
    local = local_sizes(operation, M, N, K, ctx.size)
    problem = problem_of(ctx, operation, *local, dtype, usual_layout(*local, dtype))
    return replace(choice, ways=ways_of(problem, choice.path))


def local_sizes(operation: str, M: int, N: int, K: int, ranks: int) -> tuple[int, int, int]:
    """M, N, K of the largest local GEMM where `ranks` ranks divide the global one."""
    return (M, -(-N // ranks), K) if operation == "all_gather_matmul" else (M, N, -(-K // ranks))


def usual_layout(M: int, N: int, K: int, dtype: torch.dtype) -> str:
    """The layout of contiguous x [M, K] and w [N, K]."""
    return layout_of(*(torch.empty(rows, K, dtype=dtype, device="meta") for rows in (M, N)))


def ways_of(problem: model.Problem, path: str) -> tuple[Way, ...]:
    """What the model says of each way to carry out a call: that of `path` first, then the fastest."""
    found = [Way("plain", predicted=model.predict_plain(problem))]
    for name, way in model.ways(problem).items():
        candidate = isinstance(way, OverlapConfig)
        found.append(Way(name, way, model.predict(problem, way)) if candidate else Way(name, refused=way))
    known = [way for way in found if way.predicted]
    known.sort(key=lambda way: ((way.name == "plain") != (path == "plain"), way.predicted.seconds))
    return (*known, *(way for way in found if way.refused))


def choose_path(
    ctx: Context, operation: str, M: int, width: int, dtype: torch.dtype, path: str | None, config: OverlapConfig | None
) -> str:
    """Return `path` if it is given, "fused" if a configuration is given, else the choice of `explain`.

    M, width: rows and columns of the matrix that is sent. Raises ValueError for an unknown path.
    """
    if path is not None:
        if path not in PATHS:
            raise ValueError(f"{operation}: path={path!r} is unknown; use {', '.join(PATHS)} or None")
        return path
    return "fused" if config is not None else _choose(operation, M, width, dtype.itemsize, ctx.size).path


@functools.lru_cache(maxsize=4096)
def _choose(operation: str, M: int, width: int, itemsize: int, size: int) -> Choice:
    choice = by_bytes(operation, M, width, itemsize, size)
    if size > 1 and runtime.RUNTIME == "simulated":
        choice = Choice("fused", "the simulated runtime is there to run the kernels; its wire costs nothing")
    _log.debug("%s, %d rows of %d elements of %d bytes, %d ranks: %s", operation, M, width, itemsize, size, choice)
    return choice


def by_bytes(operation: str, M: int, width: int, itemsize: int, size: int) -> Choice:
    """The path by rule, on a GPU."""
    if size == 1:
        return Choice("fused", "one rank multiplies alone")
    crossings = 2 if operation == "matmul_all_reduce" else 1
    senders, where = (1, "from each peer") if operation == "matmul_reduce_scatter" else (size - 1, "into each rank")
    num_bytes, limit = crossings * M * width * itemsize * senders // size, model.plain_limit(operation, size)
    if num_bytes <= limit:
        return Choice("plain", f"{num_bytes} bytes {where}, no more than {limit}, are too few to hide")
    return Choice("fused", f"{num_bytes} bytes {where}, more than {limit}, travel while it multiplies")


def plan_all_gather_matmul(ctx: Context, x, w, bias, out, gathered, activation, return_gathered, rows, out_dtype):
    """Plan all_gather_matmul as all_gather and torch.mm, for tensors like these. Operands have been checked.

    Returns a function (x, w, bias, out, gathered) -> (y, the gathered x or None).
    """
    (N, K), M = w.shape, sum(rows)
    y = check_result("all_gather_matmul", out, x, (M, N), out_dtype)
    separate = activation is not None or bias is not None and out_dtype != x.dtype
    capture.prepare_cublas()
    whole, product = _scratch(ctx, ((0,) if return_gathered else (M, K), x.dtype),
                              ((M, N) if separate else (0,), torch.float32))  # fmt: skip
    finish = _finish(product, bias, activation, y) if separate else None
    into = gathered if return_gathered else whole
    gather = collectives.AllGather(rows, collectives.ALONE_PROGRAMS).prepare(ctx, x, into)

    def run(x, w, bias, out, gathered):
        y = x.new_empty((M, N), dtype=out_dtype) if out is None else out
        rows_of_all = gather(x, gathered if return_gathered else whole)
        if separate:
            _multiply(rows_of_all, w, product)
            finish(bias, y)
        else:
            _multiply(rows_of_all, w, y, bias)
        return y, rows_of_all if return_gathered else None

    return run


def plan_matmul_reduce(ctx: Context, x, w, bias, out, activation, rows, out_dtype, wire_dtype, gather: bool):
    """Plan matmul_reduce_scatter, with `gather` matmul_all_reduce, as torch.mm and the collective.

    Returns a function (x, w, bias, out) -> y.
    """
    (M, _), N = x.shape, w.shape[0]
    name, shape = ("matmul_all_reduce", (M, N)) if gather else ("matmul_reduce_scatter", (rows[ctx.rank], N))
    y = check_result(name, out, x, shape, out_dtype)
    separate = bias is not None or activation is not None
    capture.prepare_cublas()
    partial, sums = _scratch(ctx, ((M, N), wire_dtype), (shape if separate else (0,), torch.float32))
    finish = _finish(sums, bias, activation, y) if separate else None

    into, dtype = (sums, torch.float32) if separate else (out, out_dtype)
    kind, rows = (collectives.AllReduce, None) if gather else (collectives.ReduceScatter, rows)
    reduce = kind(rows, collectives.ALONE_PROGRAMS, out_dtype=dtype).prepare(ctx, partial, into)

    def run(x, w, bias, out):
        _multiply(x, w, partial)
        if not separate:
            return reduce(partial, out)
        reduce(partial, sums)
        y = x.new_empty(shape, dtype=out_dtype) if out is None else out
        finish(bias, y)
        return y

    return run


def _scratch(ctx: Context, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """Workspace tensors of these shapes and dtypes for one call, so that a captured call allocates only its result."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in wanted]
    starts = [sum(round_up(size, ALIGNMENT) for size in sizes[:number]) for number in range(len(sizes) + 1)]
    memory = ctx.workspace().reserve(0, 0, starts[-1]).scratch
    return [
        memory[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, wanted, strict=False)
    ]


def _multiply(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None):
    """out = x @ w.T + bias, accumulated in fp32. A bias is allowed only if `out` has x's dtype."""
    if x.device.type == "cpu":  # where not all 16-bit matmuls accumulate in fp32
        with torch.autocast("cpu", enabled=False):
            product = x.float() @ w.float().t()
        out.copy_(product if bias is None else product + bias.float())
    elif out.dtype != x.dtype:
        torch.mm(x, w.t(), out_dtype=out.dtype, out=out)
    elif bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


@triton.jit(do_not_specialize=["M"])
def finish_kernel(
    total, bias, y, M, N,  # [M, N] fp32, [N], [M, N]
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """y = activation(total + bias)."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M
    column = tl.program_id(0) % tiles_n * BLOCK_N
    value = load_tile(Matrix(total, N, 1, M, N), row, column, BLOCK_M, BLOCK_N)
    value = finish(value, bias, column, N, BLOCK_N, HAS_BIAS, ACTIVATION)
    store_tile(value, Matrix(y, N, 1, M, N), row, M - row, column, BLOCK_M, BLOCK_N)


def _finish(total: torch.Tensor, bias: torch.Tensor | None, activation: str | None, y: torch.Tensor):
    """Plan y = activation(total + bias): returns a function of (bias, y), for tensors like these."""
    (M, N), block_m, block_n = total.shape, 4, 512
    if total.numel() == 0:
        return lambda bias, y: None
    launch = PreparedLaunch(
        finish_kernel, triton.cdiv(M, block_m) * triton.cdiv(N, block_n),
        varying=("bias", "y"), total=total, bias=total if bias is None else bias, y=y, M=M, N=N,
        BLOCK_M=block_m, BLOCK_N=block_n, HAS_BIAS=bias is not None, ACTIVATION=ACTIVATIONS[activation],
    )  # fmt: skip
    return lambda bias, y: launch(total if bias is None else bias.contiguous(), y)
