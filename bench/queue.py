"""Runs what waits for GPUs that are to be had for minutes: python -m bench.queue DIR --minutes 9, from the root.

Steps come in order of their use, each with the number of GPUs that it needs and the minutes that it may take. A step
begins if they are left, leaves its records in DIR/NAME.jsonl and its output in DIR/NAME.log, and is not run again into
the same folder once it has ended well, unless the code is another. So the same command, in the next minutes, goes on.

Exit code 0: nothing is left for this machine. 1: steps are left, or have failed. 2: wrong arguments.
"""

import argparse
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.provenance import source_digest

DONE = "done.txt"  # a line for each step that has ended well: its name and the digest of the code
FUSED = "all_gather_matmul,matmul_reduce_scatter,matmul_all_reduce"
GPU_TESTS = "-q -p no:cacheprovider --tb=short -m"


@dataclass(frozen=True)
class Step:
    """A command after `python -m`; {json} is the path of its records, {ranks} the number of GPUs here."""

    name: str
    command: str
    minutes: float
    least_gpus: int = 2


STEPS = (
    Step("quick", f"pytest {GPU_TESTS} quick", 3, 1),
    Step("layers", f"bench.run {FUSED} --shape layers --ranks {{ranks}} --json {{json}}", 5),
    Step("sharding", "bench.sharding --json {json}", 7),
    Step("training", "bench.training --json {json}", 3),
    Step("small", f"bench.run {FUSED} --shape small --ranks {{ranks}} --budget 400 --json {{json}}", 8),
    Step("collectives", "bench.run all_gather,reduce_scatter,all_reduce --ranks {ranks} --json {json}", 4),
    Step("fp8", f"bench.run {FUSED} --dtype fp8 --shape layers --ranks {{ranks}} --json {{json}}", 6),
    Step("tf32", f"bench.run {FUSED} --dtype tf32 --shape layers --ranks {{ranks}} --json {{json}}", 6),
    Step("sweep", "bench.sweep --seed 1 --problems 100 --ranks {ranks} --json {json}", 6),
    Step("gemm", "bench.run gemm --layout TN,NN,NT --ranks 1 --json {json}", 5, 1),
    Step("fp8-gemm", "bench.run gemm --dtype fp8 --ranks 1 --json {json}", 5, 1),
    Step("quantize", "bench.quantize --json {json}", 2, 1),
    Step("local-sweep", "bench.sweep --seed 1 --problems 300 --json {json}", 3, 1),
    Step("local-fp8-sweep", "bench.sweep --dtype fp8 --seed 1 --problems 200 --json {json}", 3, 1),
    Step("operations", f"pytest {GPU_TESTS} ranks tests/test_all_gather_matmul.py tests/test_matmul_reduce_scatter.py "
         "tests/test_collectives.py tests/test_fp8.py", 9),
    Step("graphs", f"pytest {GPU_TESTS} ranks tests/test_cuda_graph.py tests/test_copies.py tests/test_streams.py", 9),
    Step("data-parallel", f"pytest {GPU_TESTS} ranks tests/test_fully_shard.py tests/test_zero.py "
         "tests/test_ddp.py", 9),
    Step("tensor-parallel", f"pytest {GPU_TESTS} ranks tests/test_layers.py tests/test_parallelize.py "
         "tests/test_parallelize_module.py tests/test_float8.py tests/test_pipeline.py tests/test_p2p.py", 9),
    Step("apis", f"pytest {GPU_TESTS} ranks tests/test_userbuffers.py tests/test_userbuffers_gemm.py "
         "tests/test_userbuffers_layers.py tests/test_cublasmp.py", 9),
)  # fmt: skip


def left(steps: tuple[Step, ...], folder: Path, gpus: int) -> list[Step]:
    """The steps that this machine has GPUs for and that have not ended well with this code."""
    done = (folder / DONE).read_text().splitlines() if (folder / DONE).exists() else []
    return [step for step in steps if step.least_gpus <= gpus and f"{step.name} {source_digest()}" not in done]


def run(step: Step, folder: Path, gpus: int) -> bool:
    """Whether it has ended well within its minutes."""
    records = folder / f"{step.name}.jsonl"
    records.unlink(missing_ok=True)  # those of an attempt that failed
    command = step.command.format(json=records, ranks=gpus).split()
    with open(folder / f"{step.name}.log", "w") as log:
        try:
            process = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT)
            good = process.wait(60 * step.minutes) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # the ranks are ended with it
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            good = False
    if good:
        with open(folder / DONE, "a") as done:
            done.write(f"{step.name} {source_digest()}\n")
    return good


def main(argv: list[str] | None = None, steps: tuple[Step, ...] = STEPS) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.queue", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="where records, outputs and what is done are kept")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no step that may take longer (default: 9)")
    parser.add_argument(
        "--steps", metavar="NAMES", help=f"with commas between them: {', '.join(s.name for s in steps)}"
    )
    args = parser.parse_args(argv)
    names = [step.name for step in steps] if args.steps is None else args.steps.split(",")
    if unknown := set(names) - {step.name for step in steps}:
        parser.error(f"--steps {min(unknown)}: there are {', '.join(step.name for step in steps)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    gpus, end, failed = torch.cuda.device_count(), time.monotonic() + 60 * args.minutes, []
    steps = sorted((step for step in steps if step.name in names), key=lambda step: names.index(step.name))
    for step in left(tuple(steps), args.folder, gpus):
        if time.monotonic() + 60 * step.minutes > end + 1:
            continue
        began = time.monotonic()
        good = run(step, args.folder, gpus)
        print(f"{step.name:16} {'done' if good else 'FAILED'} {time.monotonic() - began:6.0f} s", flush=True)
        failed += [] if good else [step]
    waiting = [step.name for step in left(tuple(steps), args.folder, gpus) if step not in failed]
    if waiting:
        print(f"left: {', '.join(waiting)}")
    return 1 if waiting or failed else 0


if __name__ == "__main__":
    sys.exit(main())
