"""`tkernels demo`: trains a transformer on several ranks and shows that it learns the same as the unsharded one."""

import argparse
import math
import time
from pathlib import Path

from tkernels.cli import count, file_to_write

PARALLEL = ("tp", "pp", "fsdp", "zero", "ddp")  # the ways of tkernels.demo.parallel


def add_arguments(parser: argparse.ArgumentParser):
    parser.description = (
        "Train a small transformer on Python's own help texts, sharded over several ranks and unsharded beside it, and "
        "compare: the losses of each step, the first gradients, and a call of each operation. Exit code 1 if anything "
        "differs by more than rounding explains."
    )
    parser.epilog = "example: tkernels demo --parallel fsdp --ranks 4 --dtype bf16"
    parser.add_argument(
        "--parallel", choices=PARALLEL, default="tp",
        help="what ranks share: the layers (tp), the blocks of a pipeline (pp), or the sequences, with sharded "
        "parameters (fsdp), a sharded optimizer (zero) or whole models (ddp); default: tp",
    )  # fmt: skip
    parser.add_argument("--ranks", type=count, metavar="N", help="default: 2, or all GPUs on the nvshmem runtime")
    parser.add_argument("--steps", type=count, metavar="N", default=40, help="default: 40")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: fp32")
    parser.add_argument("--seed", type=_seed, metavar="N", default=0, help="of weights and batches; default: 0")
    parser.add_argument(
        "--plot", type=_picture, metavar="PATH", default="tkernels-demo.png",
        help="where the picture of the loss curves goes, in the format of its ending; default: tkernels-demo.png",
    )  # fmt: skip
    parser.add_argument("--no-plot", action="store_const", const=None, dest="plot", help="draw no picture")


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"takes a whole number from 0 to 2**63 - 1, not {text!r}")
    return int(text)


def _picture(text: str) -> Path:
    if text == "-":
        raise argparse.ArgumentTypeError("takes a path, not '-'; --no-plot draws no picture")
    return file_to_write(text)


def run(arguments: argparse.Namespace) -> int:
    """Train, compare, report. Returns the exit code: 0, or 1 if the sharded and the unsharded model disagree.

    Raises argparse.ArgumentError for a picture in a format that cannot be drawn.
    """
    from tkernels.comm.runtime import RUNTIME
    from tkernels.demo import training
    from tkernels.demo.parallel import KINDS
    from tkernels.demo.records import Result
    from tkernels.demo.report import Report, check_picture, draw
    from tkernels.launch import RankPool, default_ranks

    options = arguments
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


def _nan_last(gradient) -> float:
    return math.inf if math.isnan(gradient.error) else gradient.error


def _parted(step, losses: list[float]) -> str | None:
    if len({repr(loss) for loss in losses}) > 1:
        return f"step {step.step}: the ranks have different losses after an all-reduce: {losses}"
    if step.difference <= step.allowed:
        return None
    return (
        f"step {step.step}: the sharded model's loss is {step.sharded:.7f}, the unsharded one's {step.unsharded:.7f}: "
        f"they part by {step.difference:.1e}, and rounding explains {step.allowed:.1e}"
    )


def _wrong_gradient(gradient) -> str | None:
    if gradient.error <= gradient.allowed:
        return None
    return (
        f"step 1: the gradient of {gradient.parameter} on rank {gradient.rank} differs from the unsharded model's by "
        f"{gradient.error:.1e} of its norm, and rounding explains {gradient.allowed:.1e}"
    )


def _wrong_operation(operations: list) -> str | None:
    for operation in operations:
        if operation.error is not None and not operation.error <= operation.allowed:
            return (
                f"{operation.operation}: a result is off by {operation.error:.1e} of its terms, and rounding explains "
                f"{operation.allowed:.1e}"
            )
    return None
