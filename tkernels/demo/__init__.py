"""`tkernels demo`: trains a transformer on several ranks and shows that it learns the same as the unsharded one."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

from tkernels.comm.runtime import RUNTIME
from tkernels.demo import training
from tkernels.demo.parallel import KINDS
from tkernels.demo.records import Gradient, Operation, Result, Step
from tkernels.demo.report import Report, check_picture, draw
from tkernels.launch import RankPool, default_ranks


@dataclass(frozen=True)
class Options:
    """The command's arguments.

    parallel: how the training is split, one of tkernels.demo.parallel.
    ranks: None is 2, or on the nvshmem runtime all GPUs.
    json: where the result goes, "-" is stdout.
    plot: where the picture goes.
    """

    parallel: str = "tp"
    ranks: int | None = None
    steps: int = 40
    dtype: str = "fp32"
    seed: int = 0
    json: str | None = None
    plot: Path | None = None


def run(options: Options) -> int:
    """Train, compare, report. Returns the exit code: 0, or 1 if the sharded and the unsharded model disagree.

    Raises argparse.ArgumentError for a picture in a format that cannot be drawn.
    """
    if options.plot:
        check_picture(options.plot)
    began = time.perf_counter()
    report = Report(options.steps, to_stderr=options.json == "-")
    ranks = options.ranks or default_ranks()
    with RankPool(ranks) as pool:
        with report.waiting(f"starting {ranks} rank{'s' * (ranks > 1)} on the {RUNTIME} runtime"):
            result = Result(pool.run(training.start, options.dtype, options.seed, KINDS[options.parallel])[0])
        report.setup(result.setup)
        with report.training():
            for number in range(1, options.steps + 1):
                replies = pool.run(training.step, number == options.steps)
                step, gradient = replies[0]
                result.steps.append(step)
                report.step(step)
                result.problem = _parted(step, [other.sharded for other, _ in replies])
                if number == 1:
                    result.gradient = max((gradient for _, gradient in replies), key=_nan_last)
                    result.problem = result.problem or _wrong_gradient(result.gradient)
                if result.problem:
                    break
        if not result.problem:
            result.operations = pool.run(training.finish)[0]
            result.problem = _wrong_operation(result.operations)
    if options.plot:
        draw(result, options.plot)
        result.plot = str(options.plot)
    result.seconds = time.perf_counter() - began
    report.result(result)
    if options.json:
        report.write_json(result, options.json)
    return 0 if result.agree else 1


def _nan_last(gradient: Gradient) -> float:
    return math.inf if math.isnan(gradient.error) else gradient.error


def _parted(step: Step, losses: list[float]) -> str | None:
    if len({repr(loss) for loss in losses}) > 1:
        return f"step {step.step}: the ranks have different losses after an all-reduce: {losses}"
    if step.difference <= step.allowed:
        return None
    return (
        f"step {step.step}: the sharded model's loss is {step.sharded:.7f}, the unsharded one's {step.unsharded:.7f}: "
        f"they part by {step.difference:.1e}, and rounding explains {step.allowed:.1e}"
    )


def _wrong_gradient(gradient: Gradient) -> str | None:
    if gradient.error <= gradient.allowed:
        return None
    return (
        f"step 1: the gradient of {gradient.parameter} on rank {gradient.rank} differs from the unsharded model's by "
        f"{gradient.error:.1e} of its norm, and rounding explains {gradient.allowed:.1e}"
    )


def _wrong_operation(operations: list[Operation]) -> str | None:
    for operation in operations:
        if operation.error is not None and not operation.error <= operation.allowed:
            return (
                f"{operation.operation}: a result is off by {operation.error:.1e} of its terms, and rounding explains "
                f"{operation.allowed:.1e}"
            )
    return None
