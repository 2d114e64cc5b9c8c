"""The baselines, on the same operands as ours: cuBLAS, NCCL, NCCL then cuBLAS, and torch's fused operators.

Operands of FP8 are multiplied by torch._scaled_mm with their scales and our fast_accum. NCCL gathers their bytes, and
with them, in one launch, the scales; torch's fused operators are the scaled ones.

A baseline's call returns the operation's result, or None if it does only a part of the operation.
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench.problem import Problem, as_bytes
from tkernels.comm.group import all_gather_single, reduce_scatter_single

NAMES = {
    "cublas": "torch.mm of this rank's GEMM, operands gathered; of FP8 torch._scaled_mm",
    "nccl": "the NCCL collective alone",
    "serial": "NCCL, then cuBLAS (or cuBLAS, then NCCL)",
    "torch": "torch.ops.symm_mem.fused_*",
}


def baselines(problem: Problem) -> dict[str, Callable[[], torch.Tensor | None]]:
    """The calls that apply to the operation, by the names of NAMES; none without a GPU."""
    ctx, op = problem.ctx, problem.case.op
    if ctx.device.type != "cuda":
        return {}
    multiply = multiplication(problem)
    if op == "gemm":
        return {"cublas": lambda: multiply(problem.x, problem.x_scale)}
    if ctx.size == 1:
        return {"cublas": part(lambda: multiply(problem.x, problem.x_scale))} if problem.w is not None else {}
    group = ctx.group.process_group
    if op in ("all_gather_matmul", "all_gather"):
        return _gathers(problem, group)
    return _reductions(problem, group)


def multiplication(problem: Problem) -> Callable:
    """Torch's product of this problem's w: of any x, its scales or None, a bias if there is one, and into `out`."""
    w, fast_accum, dtype = problem.w, problem.case.fast_accum, problem.case.result_dtype
    if problem.w_scale is None:
        return lambda x, scale=None, bias=None, out=None: (
            torch.mm(x, w.t(), out=out) if bias is None else torch.addmm(bias, x, w.t(), out=out)
        )
    w_scale, adds_bias = problem.w_scale.t().contiguous(), True  # [1, N]; cuBLAS, which can't to some products

    def multiply(x, scale, bias=None, out=None):
        nonlocal adds_bias
        if bias is not None and adds_bias:
            try:
                return scaled(x, scale, bias, out)
            except RuntimeError as error:
                if "CUBLAS_STATUS_NOT_SUPPORTED" not in str(error):
                    raise
                adds_bias = False
        y = scaled(x, scale, None, out)
        return y if bias is None else y + bias

    def scaled(x, scale, bias, out):
        return torch._scaled_mm(x, w.t(), scale, w_scale, bias, out_dtype=dtype, use_fast_accum=fast_accum, out=out)

    return multiply


def gathering(problem: Problem, group) -> Callable[[], tuple]:
    """NCCL's all-gather of x, padded: x of all ranks, and of FP8 its scales, in one launch, else None."""
    (x, scale), size = padded(problem), problem.ctx.size
    out = x.new_empty((x.shape[0] * size, x.shape[1]))
    if scale is None:

        def gather():
            all_gather_single(out, x, group=group)
            return out, None

        return gather
    scales = scale.new_empty((scale.shape[0] * size, 1))
    pairs = [(each.view(torch.uint8), own.view(torch.uint8)) for each, own in ((out, x), (scales, scale))]

    def gather_scaled():
        with dist._coalescing_manager(group):
            for each, own in pairs:
                all_gather_single(each, own, group=group)
        return out, scales

    return gather_scaled


def _gathers(problem: Problem, group):
    case, w = problem.case, problem.w
    (x, scale), M = padded(problem), case.M
    full, full_scale, gather = problem.gathered, problem.gathered_scale, gathering(problem, group)
    if w is None:
        return {"nccl": lambda: gather()[0][:M]}
    multiply = multiplication(problem)
    w_scale = None if scale is None else problem.w_scale.t().contiguous()

    def fused():
        if scale is None:
            operator, options = torch.ops.symm_mem.fused_all_gather_matmul, {"return_A": False}
            return operator(x, [w.t()], 0, group.group_name, **options)[1][0][:M]
        operator = torch.ops.symm_mem.fused_all_gather_scaled_matmul
        options = [None], [None], [case.result_dtype], [case.fast_accum]
        return operator(x, [w.t()], scale, [w_scale], 0, group.group_name, *options)[1][0][:M]

    return {
        "cublas": lambda: multiply(full, full_scale),
        "nccl": part(gather),
        "serial": lambda: multiply(*gather())[:M],
        "torch": fused,
    }


def _reductions(problem: Problem, group):
    case, (x, scale), w = problem.case, padded(problem), problem.w
    scatters = case.op in ("matmul_reduce_scatter", "reduce_scatter")
    multiply = None if w is None else multiplication(problem)
    y = x if w is None else x.new_zeros((x.shape[0], case.N), dtype=case.result_dtype)
    out = y.new_empty((y.shape[0] // problem.ctx.size, case.N)) if scatters else None
    own = problem.rows[problem.ctx.rank]
    in_place = None if scatters else torch.zeros_like(y)  # NCCL sums in place; zeros stay zeros over many calls

    def scatter(y):
        reduce_scatter_single(out, y, group=group)
        return out[:own]

    def reduce(y):
        dist.all_reduce(y, group=group)
        return y

    def product():
        """Into the first rows of what is sent, so that x need not be padded, nor copied into other strides."""
        multiply(problem.x, problem.x_scale, out=y[: problem.x.shape[0]])
        return y

    def collective():
        return scatter(y) if scatters else reduce(in_place)

    if w is None:
        return {"nccl": collective if scatters else part(collective)}
    calls = {
        "cublas": part(lambda: multiply(problem.x, problem.x_scale)),
        "nccl": part(collective),
        "serial": lambda: (scatter if scatters else reduce)(product()),
    }
    w_scale = None if scale is None else problem.w_scale.t().contiguous()

    def fused():
        if scale is None:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, group.group_name)[:own]
        operator, shape = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter, [x.shape[0], case.N]
        options = None, None, case.result_dtype, case.fast_accum
        return operator(x, w.t(), scale, w_scale, "sum", 0, 0, group.group_name, shape, *options)[:own]

    return calls | ({"torch": fused} if scatters else {})


def padded(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and its scales, with rows of zeros where the ranks' row counts differ: these calls take only equal shares."""
    op, share, ranks = problem.case.op, problem.rows[0], problem.ctx.size
    x, scale = problem.x, problem.x_scale
    if "all_reduce" in op:
        return x, scale
    num_rows = share * ranks if "reduce_scatter" in op else share
    if missing := num_rows - x.shape[0]:
        x = F.pad(as_bytes(x), (0, 0, 0, missing)).view(x.dtype)
        scale = None if scale is None else F.pad(scale, (0, 0, 0, missing), value=1.0)
    return x, scale


def part(call: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """The call without its result: it does only a part of the operation."""

    def run():
        call()

    return run


def enable_symmetric_memory(group) -> None:
    """Collective. Enable torch's symmetric memory for a group, once: torch's fused operators need it."""
    import torch.distributed._symmetric_memory as symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # recent versions enable it by themselves
        symmetric_memory.enable_symm_mem_for_group(group.group_name)
