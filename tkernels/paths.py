"""Chooses the path of an operation: its fused kernel, or the plain path, a collective and `matmul` (tkernels.plain).

With few rows there is little to hide, a fused kernel has fewer tiles than the GPU has SMs, and the plain path wins:
cuBLAS splits K then, and the collective sends packets. It wins at any size where torch multiplies so much faster than
our kernels that overlap could not make up for it, as in IEEE fp32; as TF32 it is taken too, as one kernel has not been
timed between GPUs. Both paths compute the same (fp32 sums in rank order, then bias once, then the activation). Only the
rounding of intermediate partial sums may differ, and where torch multiplies, that of sums before an activation.

All ranks must take the same path, so the rule depends only on what they share: the bytes that are sent, the dtype and
the GPU, not one rank's number of features. The way of a local product each rank chooses by itself.
"""

import functools
import logging
from dataclasses import dataclass, replace

import torch

from tkernels import model
from tkernels.choice import problem_of, product_way, product_ways
from tkernels.comm import runtime
from tkernels.comm.arguments import check_torch_dtype, check_type, whole
from tkernels.comm.context import Context, as_context
from tkernels.comm.regions import round_up
from tkernels.comm.workspace import inboxes_fit
from tkernels.configs import ALIKE, FP8, GemmConfig, OverlapConfig, name_of, result_dtype
from tkernels.gemm import fused_layout, precision, problem_of_product
from tkernels.gpus import GPU, H200, SIMULATED, gpu_here, stages_rows
from tkernels.model import PLAIN_BYTES, sent_dtype
from tkernels.staging import VECTOR_BYTES

PATHS = ("fused", "plain")
MULTIPLIED = dict(kernel="by our kernel", staged="with copies in wider rows", library="by torch's matmul")

_log = logging.getLogger("tkernels")


@dataclass(frozen=True)
class Way:
    """A way to carry out a call.

    name: "plain", or who sends in the fused kernel; of a local product, who multiplies. config: of our kernel.
    predicted: its time by the model (tkernels.model), or None with the reason why it is no candidate in `refused`.
    """

    name: str
    config: OverlapConfig | GemmConfig | None = None
    predicted: model.Prediction | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Choice:
    """The path of an operation.

    path: "fused" or "plain"; of a local product "kernel", "staged" or "library".
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

    operation: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce"; or "matmul", this rank's product of
        contiguous operands, whose path is "kernel", "staged" (of copies in wider rows) or "library" (torch's matmul).
    fp32 is multiplied as torch's switches say, FP8 with fast accumulation; a K that it can't have, and a GPU without it
    are refused. Raises ValueError for another operation, ValueError or TypeError for what is no size or dtype, and
    TkernelsError without a context, since the choice depends on its number of ranks.
    """
    check_type("explain: operation", operation, str, "a name")
    check_torch_dtype("explain: dtype", dtype)
    if dtype not in ALIKE:
        raise TypeError(f"explain: products are of {', '.join(map(str, ALIKE))}, but dtype={dtype}")
    M, N, K = whole("explain: M", M), whole("explain: N", N), whole("explain: K", K)
    if operation not in ("matmul", *PLAIN_BYTES):
        raise ValueError(
            f"explain: operation={operation!r} has no paths; those of matmul, {', '.join(PLAIN_BYTES)} are known"
        )
    if operation == "matmul":
        return explain_product(usual_product(M, N, K, dtype, precision(dtype)))
    ctx = as_context(ctx, "explain: ctx")
    width = K if operation == "all_gather_matmul" else N
    choice, _ = _choice(ctx, operation, M, width, dtype, precision(dtype))
    if ctx.size == 1 or runtime.RUNTIME == "simulated":
        return choice
    local = local_sizes(operation, M, N, K, ctx.size)
    how = precision(dtype)
    layout, sizes = usual_layout(*local, dtype, how), fused_sizes(operation, *local, dtype, how)
    problem = problem_of(ctx, operation, *sizes, dtype, layout, precision=how)
    return _with_ways(choice, replace(problem, heap_bytes=ctx.heap.num_bytes))


def explain_on(
    gpu: GPU, ranks: int, operation: str, M: int, N: int, K: int, dtype: torch.dtype, precision: str = "ieee"
) -> Choice:
    """The same on `ranks` GPUs of that row, none of which need be here, with what each way would take, and heaps of the
    default size.

    Raises ValueError for a K that FP8 can't have.
    """
    if operation == "matmul":
        return explain_product(usual_product(M, N, K, dtype, precision, gpu=gpu, programs=gpu.sms))
    local = local_sizes(operation, M, N, K, ranks)
    layout, sizes = usual_layout(*local, dtype, precision, gpu), fused_sizes(operation, *local, dtype, precision, gpu)
    problem = model.Problem(operation, *sizes, dtype, layout, ranks, gpu.sms, gpu, precision=precision)
    choice = by_rule(operation, M, K if operation == model.GATHER else N, dtype, ranks, precision, gpu)
    return _with_ways(choice, problem)


def _with_ways(choice: Choice, problem: model.Problem) -> Choice:
    ways, reason = ways_of(problem, choice.path), choice.reason
    if choice.path == "plain" and ways[0].predicted.hides:
        reason += "; some rows are multiplied while others travel"
    return replace(choice, reason=reason, ways=ways)


def explain_product(problem: model.Problem) -> Choice:
    """Who multiplies for a local product, our kernel or torch, and the reason."""
    if problem.gpu is SIMULATED:
        return Choice(model.KERNEL, "the simulated runtime is there to run the kernels")
    taken, _ = product_way(problem)
    ways = [Way(name, *found) for name, found in product_ways(problem).items()]
    ways.sort(key=lambda way: (way.name != taken, way.predicted.seconds))
    times = ", ".join(f"{1e6 * way.predicted.seconds:.0f} us {MULTIPLIED[way.name]}" for way in ways)
    if taken == model.LIBRARY and problem.dtype == torch.float32:
        times += f"; torch multiplies {'fp32' if problem.precision == 'ieee' else problem.precision} faster"
    elif taken == model.LIBRARY and problem.aligned:
        times += "; torch has tiles that suit these sizes better"
    elif not problem.aligned:
        times += "; TMA can't take rows that are no multiples of 16 bytes"
    elif taken == model.KERNEL and min(ways, key=lambda way: way.predicted.seconds).name != taken:
        times += f"; within {model.WORTH - 1:.0%} the model can't tell which is faster, and our kernel is taken"
    return Choice(taken, times, tuple(ways))


def usual_product(M: int, N: int, K: int, dtype: torch.dtype, precision: str, **place) -> model.Problem:
    """The problem of a local product of contiguous operands. place: where, as problem_of_product has it.

    Raises ValueError for a K that FP8 can't have.
    """
    M, N, K = (max(size, 1) for size in (M, N, K))
    check_depth(K, dtype)
    x, w = (torch.empty(rows, K, dtype=dtype, device="meta") for rows in (M, N))
    return problem_of_product(x, w, torch.empty(M, N, dtype=result_dtype(dtype), device="meta"), precision, **place)


def check_depth(K: int, dtype: torch.dtype, caller: str = "explain"):
    """Raises ValueError for a K, of one rank, that FP8 can't have."""
    if dtype in FP8 and K % 16:
        raise ValueError(f"{caller}: float8 takes a K, of each rank, that is a multiple of 16, but here it is {K}")


def local_sizes(operation: str, M: int, N: int, K: int, ranks: int) -> tuple[int, int, int]:
    """M, N, K of the largest local GEMM where `ranks` ranks divide the global one."""
    return (M, -(-N // ranks), K) if operation == "all_gather_matmul" else (M, N, -(-K // ranks))


def fused_sizes(
    operation: str, M: int, N: int, K: int, dtype: torch.dtype, precision: str = "ieee", gpu: GPU | None = None
) -> tuple[int, int, int]:
    """The sizes of a local GEMM as a fused operation computes it, in rows of whole 16 bytes where it stages them."""
    if not stages_rows(dtype, precision, gpu):
        return M, N, K
    vector = VECTOR_BYTES // dtype.itemsize
    return M, round_up(N, vector), round_up(K, vector) if operation == "all_gather_matmul" else K


def usual_layout(
    M: int, N: int, K: int, dtype: torch.dtype, precision: str = "ieee", gpu: GPU | None = None
) -> str:  # fmt: skip
    """The layout of contiguous x [M, K] and w [N, K] in a fused operation; gpu: as for `stages_rows`.

    Raises ValueError for a K that FP8 can't have.
    """
    check_depth(K, dtype)
    return fused_layout(*(torch.empty(rows, K, dtype=dtype, device="meta") for rows in (M, N)), precision, gpu)


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
    ctx: Context, operation: str, M: int, width: int, dtype: torch.dtype, path: str | None,
    config: OverlapConfig | None, precision: str = "ieee", arriving: int | None = None,
) -> str:  # fmt: skip
    """Return `path` if it is given, "fused" if a configuration is given, else the path by rule.

    M, width: rows and columns of the matrix that is sent. precision: of fp32, as gemm.precision says it. arriving: the
    bytes in which an element of it arrives, both times in an all-reduce; None: what they are by default.
    Raises ValueError for an unknown path.
    """
    if path is not None:
        if path not in PATHS:
            raise ValueError(f"{operation}: path={path!r} is unknown; use {', '.join(PATHS)} or None")
        return path
    if config is not None:
        return "fused"
    choice, fits = _choice(ctx, operation, M, width, dtype, precision, arriving)
    if not fits:
        _warn_of_heap(operation, ctx.heap.num_bytes)
    _log.debug("%s, %d rows of %d elements of %s, %d ranks: %s", operation, M, width, name_of(dtype), ctx.size, choice)
    return choice.path


def _choice(
    ctx: Context, operation: str, M: int, width: int, dtype: torch.dtype, precision: str, arriving: int | None = None
) -> tuple[Choice, bool]:  # fmt: skip
    """The choice, and whether the heap has room for inboxes; the other arguments are those of `choose_path`."""
    if ctx.size > 1 and ctx.num_programs == 1:
        return Choice("plain", "num_programs=1 leaves no program that multiplies while another one sends"), True
    crossings = 2 if operation == "matmul_all_reduce" else 1
    arrives = M * width * (arriving or crossings * sent_dtype(operation, dtype).itemsize)
    if ctx.size > 1 and not inboxes_fit(ctx.heap.num_bytes, arrives, landing=False):
        problem = model.Problem(operation, M, width, width, dtype, ranks=ctx.size, gpu=gpu_here(), mapped=ctx.mapped)
        if not (model.wire_of(problem).landing and inboxes_fit(ctx.heap.num_bytes, arrives, landing=True)):
            held = f"a heap of {ctx.heap.num_bytes}; pass init(heap_bytes=...)"
            return Choice("plain", f"{arrives} bytes of symmetric memory are too many for {held}"), False
    if ctx.size > 1 and runtime.RUNTIME == "simulated":
        return Choice("fused", "the simulated runtime is there to run the kernels; its wire costs nothing"), True
    return by_rule(operation, M, width, dtype, ctx.size, precision, gpu_here()), True


@functools.cache
def _warn_of_heap(operation: str, heap_bytes: int):
    """Once, whatever the sizes, since nothing is overlapped."""
    _log.warning(
        "%s takes the plain path for sizes that are too large for a heap of %d bytes; pass init(heap_bytes=...)",
        operation, heap_bytes,
    )  # fmt: skip


def by_rule(
    operation: str, M: int, width: int, dtype: torch.dtype, size: int, precision: str = "ieee", gpu: GPU = H200
) -> Choice:
    """The path by rule, on a GPU. The arguments are all that the ranks of a call share."""
    if size == 1:
        return Choice("fused", "one rank multiplies alone")
    row_bytes = width * sent_dtype(operation, dtype).itemsize
    where = "from each peer" if operation == model.SCATTER else "into each rank"
    num_bytes = model.counted_bytes(operation, M, width, dtype, size)
    limit = model.plain_limit(operation, size, dtype)
    if num_bytes <= limit:
        return Choice("plain", f"{num_bytes} bytes {where}, no more than {limit}, are too few to hide")
    if dtype == torch.float32:
        why = "torch multiplies IEEE fp32 so much faster that overlap could not make up for it"
        if precision != "ieee":
            why = f"as {precision} one kernel that overlaps has not been timed between GPUs; path='fused' asks for it"
        return Choice("plain", why)
    staged = stages_rows(dtype, precision, gpu)
    if row_bytes % VECTOR_BYTES and not staged and dtype not in FP8:
        return Choice("plain", f"rows of {row_bytes} bytes, no multiple of 16, are slow in our kernels on {gpu.name}")
    wider = ""
    if row_bytes % VECTOR_BYTES and staged:
        wider = f", in rows of {round_up(row_bytes, VECTOR_BYTES)} instead of {row_bytes} bytes"
    return Choice("fused", f"{num_bytes} bytes {where}, more than {limit}, travel while it multiplies{wider}")
