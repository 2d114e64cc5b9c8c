"""The baselines, on the same operands as ours: cuBLAS, NCCL, NCCL then cuBLAS, and torch's fused operators.

A baseline's call returns the operation's result, or None if it does only a part of the operation.
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.problem import Problem
from tkernels.comm.group import all_gather_single, reduce_scatter_single

NAMES = {
    "cublas": "torch.mm of this rank's GEMM, operands gathered",
    "nccl": "the NCCL collective alone",
    "serial": "NCCL, then cuBLAS (or cuBLAS, then NCCL)",
    "torch": "torch.ops.symm_mem.fused_*",
}


def baselines(problem: Problem) -> dict[str, Callable[[], torch.Tensor | None]]:
    """The calls that apply to the operation, by the names of NAMES; none without a GPU."""
    ctx, op, x, w = problem.ctx, problem.case.op, problem.x, problem.w
    if ctx.device.type != "cuda":
        return {}
    if op == "gemm":
        return {"cublas": lambda: torch.mm(x, w.t())}
    if ctx.size == 1:
        return {"cublas": part(lambda: torch.mm(x, w.t()))} if w is not None else {}
    group = ctx.group.process_group
    if op in ("all_gather_matmul", "all_gather"):
        return _gathers(problem, group)
    return _reductions(problem, group)


def _gathers(problem: Problem, group):
    x, w, M = padded(problem), problem.w, problem.case.M
    full = problem.gathered
    out = x.new_empty((x.shape[0] * problem.ctx.size, x.shape[1]))

    def gather():
        all_gather_single(out, x, group=group)
        return out

    def fused():
        gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, group.group_name, return_A=False)
        return products[0][:M]

    if w is None:
        return {"nccl": lambda: gather()[:M]}
    return {
        "cublas": lambda: torch.mm(full, w.t()),
        "nccl": part(gather),
        "serial": lambda: torch.mm(gather(), w.t())[:M],
        "torch": fused,
    }


def _reductions(problem: Problem, group):
    case, x, w = problem.case, padded(problem), problem.w
    scatters = case.op in ("matmul_reduce_scatter", "reduce_scatter")
    y = x if w is None else torch.mm(x, w.t())
    out = y.new_empty((y.shape[0] // problem.ctx.size, case.N)) if scatters else None
    own = problem.rows[problem.ctx.rank]
    in_place = None if scatters else torch.zeros_like(y)  # NCCL sums in place; zeros stay zeros over many calls

    def scatter(y):
        reduce_scatter_single(out, y, group=group)
        return out[:own]

    def reduce(y):
        dist.all_reduce(y, group=group)
        return y

    def collective():
        return scatter(y) if scatters else reduce(in_place)

    if w is None:
        return {"nccl": collective if scatters else part(collective)}
    calls = {
        "cublas": part(lambda: torch.mm(problem.x, w.t())),
        "nccl": part(collective),
        "serial": lambda: (scatter if scatters else reduce)(torch.mm(x, w.t())),
    }

    def fused():
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, group.group_name)[:own]

    return calls | ({"torch": fused} if scatters else {})


def padded(problem: Problem) -> torch.Tensor:
    """x, with rows of zeros appended where the ranks' row counts differ: these calls take only equal shares."""
    op, share, ranks = problem.case.op, problem.rows[0], problem.ctx.size
    if "all_reduce" in op:
        return problem.x
    num_rows = share * ranks if "reduce_scatter" in op else share
    missing = num_rows - problem.x.shape[0]
    return torch.nn.functional.pad(problem.x, (0, 0, 0, missing)) if missing else problem.x


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
