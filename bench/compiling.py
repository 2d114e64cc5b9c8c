"""Kernels compiled before anything is timed: several at once, each by one rank, for all through Triton's cache on disk.

On the GPU machines a kernel takes seconds to compile, and a run over all named shapes needs dozens.
"""

import contextlib
import os
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

from bench.problem import Case, Problem
from bench.ways import open_ways
from tkernels.comm.context import Context


def compile_cases(ctx: Context, cases: list[Case]) -> None:
    """Collective. Compile what the cases launch, in every way. Nothing to do on the simulated runtime."""
    if ctx.device.type != "cuda":
        return
    compiler = Compiler()
    # ignore_errors: these, too, come again.
    with torch.no_grad(), AsyncCompileMode(compiler, ignore_errors=True):
        with launches_compile():
            for case in cases:
                problem = Problem(ctx, case, "zeros")
                for call in (problem.ours, *(way.call(problem) for way in open_ways(problem)[0].values())):
                    with contextlib.suppress(Exception):  # it comes again where the call is measured
                        call()
        compiler.run(ctx.group, len(os.sched_getaffinity(0)))
    torch.cuda.synchronize()
    ctx.group.barrier()


@contextlib.contextmanager
def launches_compile():
    """In this block launches hand their kernels to the compiler, and run nothing."""
    run = JITFunction.run

    def compile_only(kernel, *arguments, grid, warmup, **options):
        run(kernel, *arguments, grid=grid, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


class Compiler(Executor):
    """Keeps the different kernels that it is given, until `run`."""

    def __init__(self):
        self.waiting: list[tuple[Future, object]] = []

    def submit(self, fn, /, *arguments, **options) -> Future:
        self.waiting.append((Future(), lambda: fn(*arguments, **options)))
        return self.waiting[-1][0]

    def run(self, group, threads: int) -> None:
        """Collective. Compile this rank's share; then load what the others have compiled."""
        with ThreadPoolExecutor(max(1, threads // group.size)) as executor:
            list(executor.map(_finish, self.waiting[group.rank :: group.size]))
            group.barrier()
            list(executor.map(_finish, self.waiting))


def _finish(waiting: tuple[Future, object]) -> None:
    future, compile = waiting
    if future.done():
        return
    try:
        future.set_result(compile())
    except Exception as error:  # belongs to the case that needs the kernel
        future.set_exception(error)
