"""Kernels compiled before anything is timed: several at once, each by one rank, for all through Triton's cache on disk.

On the GPU machines a kernel takes seconds to compile, and a run over all named shapes needs dozens.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from triton.runtime.jit import JITFunction

from bench.problem import Case, Problem
from bench.ways import open_ways
from tkernels.comm.context import Context


@contextlib.contextmanager
def launches_compile(rank: int, size: int):
    """Launches compile and run nothing. Of the different kernels every rank takes an equal share."""
    run, seen = JITFunction.run, {}

    def compile_only(kernel, *arguments, grid, warmup, **options):
        key = (kernel.__name__, *sorted((name, str(value)) for name, value in options.items()))
        if seen.setdefault(key, len(seen)) % size == rank:
            run(kernel, *arguments, grid=grid, warmup=True, **options)

    threads = max(1, len(os.sched_getaffinity(0)) // size)
    # ignore_errors: a configuration that can't be compiled fails where it is measured, with its case's name.
    with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run


def compile_cases(ctx: Context, cases: list[Case]) -> None:
    """Collective. Compile what the cases launch, in every way. Nothing to do on the simulated runtime."""
    if ctx.device.type != "cuda":
        return
    with torch.no_grad(), launches_compile(ctx.rank, ctx.size):
        for case in cases:
            problem = Problem(ctx, case, "zeros")
            problem.ours()
            for way in open_ways(problem)[0].values():
                way.call(problem)()
    torch.cuda.synchronize()
    ctx.group.barrier()
