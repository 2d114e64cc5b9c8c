"""Compares the fused kernels of two checkouts on one GPU, without a peer and without NVSHMEM.

    git worktree add ../before COMMIT
    python -m bench.loopback ../before . --json mine.jsonl

Each checkout has a process of its own, in which rank 0 of 2 or 4 ranks makes the calls. Its peers' memory is its own,
what they would send is there, and all their signals are raised beforehand (bench/loopback_rank.py). So a call does all
that a rank does, and waits for nobody; what it takes says how fast the kernel is, not how fast the link is. Transport
`nvshmem` has no loopback.

All ways to send to mapped memory are compared: comm programs that send to the two alternating inboxes, the same to the
landing, the copy engine (whose copies within one GPU may take SMs), and interleaved; with the configurations of the
first checkout, which both use. First each result is checked against torch's, and the results of both checkouts are
compared bit by bit. Then the two are measured in turns, in random order, the other one idle, with the L2 cache flushed
before each call. A call that the host has queued too late is repeated.

us: medians. ratio: the second checkout's time over the first's, median over the rounds. spread: half the distance
between the quartiles of the rounds' ratios. A case is slower if its ratio is above 1.01 by more than its spread.
Between two equal checkouts, six cases of 0.3 to 5 ms had ratios of 0.996 to 1.001, with spreads of 0.001 to 0.002. All
123 cases that are measured by default take 2 to 3 minutes, half of it to compile them on 16 cores (one H100).

Exit codes. 0: everything was measured, and nothing is slower. 1: a case is slower, or failed, or was not begun within
the budget. 2: wrong arguments. On the simulated runtime times are the interpreter's, and only the checks count.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from bench.records import FUSED, append
from tkernels import shapes
from tkernels.cli import file_to_write

WAYS = ("programs", "landing", "copy_engine", "interleaved")
FEW = {  # on 4 ranks, by default
    "all_gather_matmul": ["llama8b-qkv", "gpt3-fc1"],
    "matmul_reduce_scatter": ["llama8b-o", "rs-e"],
    "matmul_all_reduce": ["llama8b-o", "rs-e"],
}
SAMPLES = 2  # calls of a turn that count
LIMIT = 1.01  # a ratio that is not slower
WORST = 10
LINE = "{case:56} {before:>9} {after:>9} {ratio:>7} {spread:>7}  {note}"


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[dict]]:
    """The arguments, and the cases without their ways."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.loopback",
        description="Compare the fused kernels of two checkouts on one GPU, without a peer.",
    )
    parser.add_argument("before", metavar="BEFORE", type=Path, help="the folder of a checkout")
    parser.add_argument("after", metavar="AFTER", type=Path, help="the folder of another one, or of the same")
    parser.add_argument("--ops", default=",".join(FUSED), help="with commas between them; default: all three")
    parser.add_argument(
        "--shapes", help="MxNxK over all ranks, names or groups, as bench.run takes them; default: layers on 2 ranks, "
        "and a few of these on 4",
    )  # fmt: skip
    parser.add_argument("--ranks", help="numbers of ranks, with commas between them; default: 2, without --shapes 2,4")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: all of %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each checkout in each case (default 10)")
    parser.add_argument("--budget", type=float, metavar="S", help="start no case after so many seconds")
    parser.add_argument("--json", type=file_to_write, metavar="F", help="append one JSON line a case")
    args = parser.parse_args(argv)

    args.ops, args.ways = args.ops.split(","), args.ways.split(",")
    for name, given, known in (("ops", args.ops, FUSED), ("ways", args.ways, WAYS)):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"--{name}: {unknown[0]!r} is unknown; there are {', '.join(known)}")
    for checkout in (args.before, args.after):
        if not (checkout / "tkernels" / "__init__.py").is_file():
            parser.error(f"{checkout} is no checkout: it has no tkernels/__init__.py")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: measure at least once")
    ranks = args.ranks or ("2" if args.shapes else "2,4")
    if not all(each.isdecimal() and int(each) > 1 for each in ranks.split(",")):
        parser.error(f"--ranks {ranks}: give numbers of 2 or more")
    cases = []
    for size in map(int, ranks.split(",")):
        try:
            if args.shapes or size == 2:
                found = shapes.find(args.ops, (args.shapes or "layers").split(","))
            else:
                found = {op: shapes.select(op, FEW[op]) for op in args.ops}
        except ValueError as error:
            parser.error(f"--shapes: {error}")
        for op, named in found.items():
            for name, (M, N, K) in named.items():
                feature, number = ("N", N) if op == "all_gather_matmul" else ("K", K)
                if number % size:
                    parser.error(f"--shapes {name}: {feature}={number} doesn't divide by {size} ranks")
                cases.append({"op": op, "shape": name, "M": M, "N": N, "K": K, "ranks": size})
    return args, cases


class SideError(Exception):
    """A request failed on a side, or its process ended."""


class Side:
    """The process of one checkout."""

    def __init__(self, checkout: Path):
        runtime = "nvshmem" if torch.cuda.is_available() else "simulated"
        path = os.pathsep.join([str(checkout.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.checkout = checkout
        # -P: the folder of the file, this checkout's bench, is not searched for modules.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve().with_name("loopback_rank.py"))],
            env={"TKERNELS_RUNTIME": runtime, **os.environ, "PYTHONPATH": path}, cwd=checkout,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, request: str, **arguments):
        self.begin(request, **arguments)
        return self.answer()

    def begin(self, request: str, **arguments):
        with contextlib.suppress(BrokenPipeError):  # `answer` says so
            print(json.dumps([request, arguments]), file=self.process.stdin, flush=True)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SideError(f"{self.checkout}: its process has ended, with exit code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.checkout}: {answer['error']}")
        return answer["value"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def both(sides: dict[str, Side], request: str, **arguments) -> dict:
    """The answers of both sides, which work at the same time. Raises SideError once both have answered."""
    answers, errors = {}, []
    for side in sides.values():
        side.begin(request, **arguments)
    for name, side in sides.items():
        try:
            answers[name] = side.answer()
        except SideError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers


def main(argv: list[str] | None = None) -> int:
    args, cases = parse(argv)
    began = time.monotonic()
    with Side(args.before) as before, Side(args.after) as after:
        sides = {"before": before, "after": after}
        origin = [side.ask("hello", checkout=str(side.checkout)) for side in sides.values()][0]
        print(f"{origin['gpu'] or 'simulated'}, torch {origin['torch_version']}, triton {origin['triton_version']}")
        asked = []
        for case, configs in zip(cases, before.ask("configs", cases=cases), strict=True):
            asked += [(case | {"way": way}, config) for way, config in configs.items() if way in args.ways]
        both(sides, "compile", cases=asked)
        print(f"{len(asked)} cases, compiled after {time.monotonic() - began:.0f} s")
        print(LINE.format(case="case", before="before us", after="after us", ratio="ratio", spread="spread", note=""))
        lines, failed = [], 0
        for case, config in asked:
            try:
                if args.budget is not None and time.monotonic() - began > args.budget:
                    raise SideError(f"the budget of {args.budget:g} s was used up before it")
                line = measure(sides, case, config, args.rounds)
            except SideError as error:
                failed += 1
                print(f"{name_of(case)}: {error}", flush=True)
                continue
            lines.append(line | origin)
            print(row(lines[-1]), flush=True)
            if args.json:
                append(args.json, lines[-1] | {"config": config})
    slow = summarize(lines)
    print(f"{failed} failed; {time.monotonic() - began:.0f} s in all")
    return 1 if failed or slow else 0


def measure(sides: dict[str, Side], case: dict, config: dict, rounds: int) -> dict:
    """The record of a case. Raises SideError if a result is wrong, or a side fails."""
    try:
        opened = both(sides, "open", case=case, config=config)
        order, turns = random.Random(0), {name: [] for name in sides}
        for _ in range(rounds):
            for name in order.sample(list(sides), len(sides)):
                turns[name].append(sides[name].ask("time", number=SAMPLES))
    finally:
        with contextlib.suppress(SideError):  # after a failure that is raised already
            both(sides, "close")
    line = case | compare(turns["before"], turns["after"])
    return line | {
        "same_bits": opened["before"]["checksum"] == opened["after"]["checksum"],
        "same_config": not opened["after"]["config_is_own"],
    }


def compare(before: list[list[float]], after: list[list[float]]) -> dict:
    """Medians in us, the ratio and its spread; from each side's times, a list for each round."""
    rounds = [statistics.median(second) / statistics.median(first) for first, second in zip(before, after, strict=True)]
    low, high = np.percentile(rounds, [25, 75])
    return {
        "before_us": round(statistics.median(sum(before, [])), 2),
        "after_us": round(statistics.median(sum(after, [])), 2),
        "ratio": round(statistics.median(rounds), 4),
        "spread": round(float(high - low) / 2, 4),
        "before_turns_us": before,
        "after_turns_us": after,
    }


def is_slower(line: dict) -> bool:
    return line["gpu"] is not None and line["ratio"] - line["spread"] > LIMIT


def name_of(case: dict) -> str:
    return f"{case['op']} {case['ranks']} {case['shape']} {case['way']}"


def row(line: dict) -> str:
    notes = ["slower"] * is_slower(line) + ["other bits"] * (not line["same_bits"])
    notes += ["its own configuration"] * (not line["same_config"])
    return LINE.format(
        case=name_of(line), before=f"{line['before_us']:.1f}", after=f"{line['after_us']:.1f}",
        ratio=f"{line['ratio']:.3f}", spread=f"{line['spread']:.3f}", note=", ".join(notes),
    ).rstrip()  # fmt: skip


def summarize(lines: list[dict]) -> int:
    """Print what all cases say together, and the worst. Returns how many are slower."""
    if not lines:
        return 0
    ratios, spreads = [line["ratio"] for line in lines], [line["spread"] for line in lines]
    slow = sum(map(is_slower, lines))
    p10, p90 = np.percentile(ratios, [10, 90])
    print(
        f"{len(lines)} cases: geometric mean {statistics.geometric_mean(ratios):.4f}, 10th to 90th percentile "
        f"{p10:.3f} to {p90:.3f}; median spread {statistics.median(spreads):.3f}; {slow} slower; "
        f"the same bits in {sum(line['same_bits'] for line in lines)}"
    )
    print(f"the worst {min(WORST, len(lines))}:")
    for line in sorted(lines, key=lambda line: -line["ratio"])[:WORST]:
        print(row(line))
    return slow


if __name__ == "__main__":
    sys.exit(main())
