"""Compiles kernels ahead of their launch, several at a time: most of the compiler's work runs without Python's lock.

All ranks of a machine run the same kernels and share Triton's cache on disk, so each rank compiles a part of them and
then loads what the others have compiled.
"""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

from tkernels.comm.context import Context
from tkernels.timing import Call


def compile_ahead(
    ctx: Context, calls: dict[str, Call], done: Callable[[int], None], all_kernels: bool = False
) -> dict[str, str]:
    """Collective. Compile the kernel that each call launches first, without launching it. Returns failures by name.

    The calls are made one after the other, up to their launch, so they may be collective. done: called with the number
    of this rank's kernels compiled so far. all_kernels: calls go on after it, to compile all that they launch; their
    results are arbitrary, so nothing may depend on these, as where ranks wait for each other.
    """
    ctx.forget_calls()  # a prepared launch bypasses the compiler
    compiler, kernels, failures = _Compiler(), {}, {}
    with AsyncCompileMode(compiler, ignore_errors=True), _launches_compile(all_kernels) as launched:
        for name, call in calls.items():
            if all_kernels:
                ctx.forget_calls()  # what the call before has prepared never ran
            try:
                call()
            except _Compiling:
                pass
            except Exception as error:  # concerns this candidate only
                failures[name] = sentence(error)
            kernels[name] = launched.copy()
            launched.clear()
        with ThreadPoolExecutor(max((os.cpu_count() or 1) // ctx.size, 1)) as threads:
            mine = compiler.waiting[ctx.rank :: ctx.size]
            for number, _ in enumerate(threads.map(_Task.run, mine)):
                done(number + 1)
            ctx.group.gather(None)  # a barrier: behind it the kernels of all ranks are on disk
            list(threads.map(_Task.run, [task for task in compiler.waiting if task not in mine]))
        for name, kernel in ((name, kernel) for name, found in kernels.items() for kernel in found):
            try:
                kernel = kernel.result() if hasattr(kernel, "result") else kernel
                kernel._init_handles()  # fails if there is not enough shared memory
                if kernel.n_spills:
                    failures[name] = f"registers: the compiler spills {kernel.n_spills} of them"
            except Exception as error:
                failures[name] = sentence(error)
    ctx.forget_calls()
    return failures


class _Compiling(Exception):
    """Ends a call at the point where it would launch its kernel."""


class _Task:
    def __init__(self, compile: Callable):
        self.compile, self.future = compile, Future()

    def run(self):
        try:
            self.future.set_result(self.compile())
        except Exception as error:
            self.future.set_exception(error)


class _Compiler(Executor):
    """An executor that queues compilations; `compile_ahead` runs them."""

    def __init__(self):
        self.waiting: list[_Task] = []

    def submit(self, fn, /, *args, **kwargs) -> Future:
        self.waiting.append(_Task(fn))
        return self.waiting[-1].future


@contextlib.contextmanager
def _launches_compile(goes_on: bool):
    """In this block, launching a kernel compiles it, appends it to the yielded list and raises _Compiling.

    goes_on: it raises nothing, so a call compiles all its kernels.
    """
    run, launched = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **options):
        launched.append(run(self, *args, grid=grid, warmup=True, **options))
        if not goes_on:
            raise _Compiling

    JITFunction.run = compile_only
    try:
        yield launched
    finally:
        JITFunction.run = run


def sentence(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]
