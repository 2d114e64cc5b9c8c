"""`tkernels demo`: trains a transformer on several ranks and shows that it learns the same as the unsharded one."""

import argparse
import time
from importlib.util import find_spec

from tkernels.cli import console_of, count, file_to_write, write_json

PARALLEL = ("tp", "pp", "fsdp", "zero", "ddp")  # the ways of tkernels.demo.parallel


def add_arguments(parser: argparse.ArgumentParser):
    parser.description = (
        "Train a small transformer on Python's own help texts, sharded over several ranks and unsharded beside it, and "
        "compare the losses of each step and the first gradients. Exit code 1 if anything differs by more than "
        "rounding explains."
    )
    parser.epilog = "example: tkernels demo --parallel fsdp --ranks 4 --dtype bf16"
    parser.add_argument(
        "--parallel", choices=PARALLEL, default="tp",
        help="what ranks share: the layers (tp), the blocks of a pipeline (pp), or the sequences, with sharded "
        "parameters (fsdp), a sharded optimizer (zero) or whole models (ddp); default: tp",
    )  # fmt: skip
    parser.add_argument("--ranks", type=count, metavar="N", help="default: 2, or all GPUs on the nvshmem runtime")
    parser.add_argument("--steps", type=count, metavar="N", default=40, help="default: 40")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16", "fp8"), default="fp32",
        help="fp8: the split layers multiply FP8, beside an unsharded model in bf16; with --parallel tp; default: fp32",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of weights and batches; default: 0")
    parser.add_argument(
        "--plot", type=file_to_write, metavar="PATH", default="tkernels-demo.png" if find_spec("matplotlib") else None,
        help="where the picture of the loss curves goes, in the format of its ending; default: tkernels-demo.png, or "
        "none without matplotlib",
    )  # fmt: skip
    parser.add_argument("--no-plot", action="store_const", const=None, dest="plot", help="draw no picture")


def run(arguments: argparse.Namespace) -> int:
    """Train, compare, report. Returns the exit code: 0, or 1 if the sharded and the unsharded model disagree.

    Raises argparse.ArgumentError for a picture that cannot be drawn, and for FP8 where no layer is split.
    """
    from rich.progress import Progress

    from tkernels.comm.runtime import RUNTIME
    from tkernels.demo import training
    from tkernels.demo.parallel import KINDS
    from tkernels.demo.report import check_picture, draw, print_result, print_setup, print_step
    from tkernels.launch import RankPool, default_ranks

    if arguments.dtype == "fp8" and arguments.parallel != "tp":
        raise argparse.ArgumentError(
            None, f"--dtype fp8 is of layers that are split, which --parallel {arguments.parallel} has none of; use tp"
        )
    if arguments.plot:
        check_picture(arguments.plot)
    began = time.perf_counter()
    console = console_of(arguments.json)
    ranks = arguments.ranks or default_ranks()
    steps, gradient, operations, problem = [], None, [], None
    with RankPool(ranks) as pool:
        console.print(f"starting {ranks} rank{'s' * (ranks > 1)} on the {RUNTIME} runtime ...")
        setup = pool.run(training.start, arguments.dtype, arguments.seed, KINDS[arguments.parallel])[0]
        print_setup(console, setup)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            for _ in progress.track(range(arguments.steps), description="training"):
                replies = pool.run(training.step)
                steps.append(replies[0])
                print_step(console, steps[-1])
                problem = _parted(steps[-1], [step.sharded for step in replies])
                if len(steps) == 1:
                    gradient = max(pool.run(training.worst_gradient), key=lambda gradient: gradient.error)
                    problem = problem or _wrong(gradient)
                if problem:
                    break
        if not problem:
            operations = pool.run(training.operations)[0]
    if arguments.plot:
        draw(setup, steps, arguments.plot)
    result = {
        "agree": not problem,
        "setup": setup,
        "steps": steps,
        "gradient": gradient,
        "operations": operations,
        "problem": problem,
        "plot": arguments.plot and str(arguments.plot),
        "seconds": time.perf_counter() - began,
    }
    print_result(console, **result)
    write_json(result, arguments.json)
    return 1 if problem else 0


def _parted(step, losses: list[float]) -> str | None:
    if len({repr(loss) for loss in losses}) > 1:  # as text, since a NaN differs from itself
        return f"step {step.step}: the ranks have different losses after an all-reduce: {losses}"
    if step.difference <= step.allowed:
        return None
    return (
        f"step {step.step}: the sharded model's loss is {step.sharded:.7f}, the unsharded one's {step.unsharded:.7f}: "
        f"they part by {step.difference:.1e}, and rounding explains {step.allowed:.1e}"
    )


def _wrong(gradient) -> str | None:
    if gradient.error <= gradient.allowed:
        return None
    return (
        f"step 1: the gradient of {gradient.parameter} on rank {gradient.rank} differs from the unsharded model's by "
        f"{gradient.error:.1e} of its norm, and rounding explains {gradient.allowed:.1e}"
    )
