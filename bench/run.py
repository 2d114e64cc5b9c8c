"""Measures operations: python -m bench.run OP --shape NAME --ranks R, alone or under torchrun, from the root.

Exit code 0: everything was measured. 1: a result was wrong, a case failed, or the budget was used up; no number is
reported for these cases. 2: wrong arguments.
"""

import argparse
import collections
import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import tkernels
from bench.harness import compile_cases, run_case
from bench.problem import LAYOUTS, Case
from bench.provenance import provenance
from bench.records import FUSED, append, of_fp8
from bench.roofs import Roofs, measure_roofs
from tkernels import shapes
from tkernels.cli import file_to_write
from tkernels.configs import FP8
from tkernels.launch import RankError, RankPool
from tkernels.library import in_precision

WAIT_TIMEOUT_S = 60.0  # of a wait in a kernel; a peer may still be compiling
CASE_TIMEOUT_S = 600.0
WIDTH = 120
PRODUCTS = ("gemm", *FUSED)
ACCUMS = {"fast": True, "precise": False}  # fast_accum of FP8
DEFAULT_ACCUMS = {True: ("fast", "precise"), False: ("fast",)}  # of gemm, and of fused operations

EPILOG = """example:
  python -m bench.run all_gather_matmul --shape llama70b-qkv,gpt3-fc1 --ranks 4 --json bench/results/ag.jsonl
  python -m bench.run gemm --layout TN,NN,NT --ranks 1 --json bench/results/gemm.jsonl
  python -m bench.run gemm --dtype fp8 --ranks 1
  torchrun --nproc-per-node 4 -m bench.run all_gather_matmul,matmul_reduce_scatter --shape layers --budget 240
"""


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[Case]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run",
        description="Time tkernels' operations beside cuBLAS, NCCL and torch's fused operators.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    simulated = tkernels.RUNTIME == "simulated"
    parser.add_argument("op", metavar="OP", help=f"{', '.join(shapes.BY_OPERATION)} with commas between them, or all")
    parser.add_argument(
        "--shape",
        default="tiny" if simulated else "all",
        help="MxNxK over all ranks, or names, with commas between them; layers: whole sequences, small: few tokens, "
        "all: both (default; on the simulated runtime tiny)",
    )
    parser.add_argument("--layout", default="TN", help="of the GEMMs: TN (forward, default), NN and NT (backward)")
    parser.add_argument(
        "--ranks", type=int, default=world or (2 if simulated else torch.cuda.device_count()),
        help="one GPU each; default: all GPUs, torchrun's number of processes, or 2 on the simulated runtime",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", default="bf16", choices=shapes.WITH_TF32,
        help="fp8: products of e4m3 with a scale a row, to bf16; tf32: of fp32, where torch's switch allows TF32",
    )  # fmt: skip
    parser.add_argument(
        "--accum", metavar="HOW", help="of fp8: fast or precise (fast_accum=False), or fast,precise; default: both of "
        "gemm, fast of the fused operations",
    )  # fmt: skip
    parser.add_argument(
        "--transport", default="auto", choices=["auto", "peer", "nvshmem", "simulated"],
        help="how bytes reach peers: by loads and stores (peer) or by NVSHMEM's device calls (nvshmem); simulated: on "
        "the runtime of that name; default: auto, the first that reaches all ranks",
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, default=20, help="measurements of each candidate (default 20)")
    parser.add_argument("--budget", type=float, metavar="S", help="start no case after so many seconds")
    parser.add_argument(
        "--json", type=file_to_write, metavar="PATH", help="append one JSON line for each operation and shape"
    )
    args = parser.parse_args(argv)

    dtype = shapes.WITH_TF32[args.dtype]
    fp8, all_ops = dtype in FP8, list(shapes.BY_OPERATION)
    all_ops = [op for op in all_ops if op in PRODUCTS] if fp8 else all_ops
    ops = all_ops if args.op == "all" else args.op.split(",")
    for op in ops:
        if op not in shapes.BY_OPERATION:
            parser.error(f"{op!r} is no operation; there are {', '.join(shapes.BY_OPERATION)}, or all")
    layouts = args.layout.split(",")
    for layout in layouts:
        if layout not in LAYOUTS:
            parser.error(f"--layout {layout}: there are {', '.join(LAYOUTS)}")
    if args.accum is not None and not fp8:
        parser.error(f"--accum {args.accum} is of fp8, and --dtype is {args.dtype}")
    accums = None if args.accum is None else args.accum.split(",")
    if unknown := set(accums or ()) - set(ACCUMS):
        parser.error(f"--accum {min(unknown)}: there are {', '.join(ACCUMS)}")
    if args.budget is not None and not args.budget > 0:
        parser.error(f"--budget {args.budget:g}: give seconds")
    if args.iterations < 1:
        parser.error(f"--iterations {args.iterations}: measure at least once")
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks}: at least one rank is needed")
    if world is not None and args.ranks != world:
        parser.error(f"--ranks {args.ranks}, but torchrun started {world} processes; leave --ranks out")
    if not simulated and world is None and args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks} needs a GPU each, and there are {torch.cuda.device_count()}")
    if args.transport != "auto" and simulated != (args.transport == "simulated"):
        parser.error(f"--transport {args.transport} does not exist on the {tkernels.RUNTIME} runtime, which runs here")

    try:
        found = shapes.find(ops, args.shape.split(","))
        for sizes in (sizes for named in found.values() for sizes in named.values()):
            shapes.check_interpretable(*sizes)
    except ValueError as error:
        parser.error(f"--shape: {error}")
    cases = [
        Case(op, name, *shape, dtype, layout, accum)
        for op in ops
        for accum in ([ACCUMS[how] for how in accums or DEFAULT_ACCUMS[op == "gemm"]] if fp8 else [None])
        for name, shape in found[op].items()
        for layout in (layouts if op in PRODUCTS else ["TN"])
    ]
    for case in cases:
        if case.refusal(args.ranks):
            parser.error(case.refusal(args.ranks))
    return args, cases


class ThisRank:
    """The interface of RankPool in a process that torchrun started, which is itself one of the ranks."""

    def __init__(self, ctx_options: dict):
        if tkernels.RUNTIME == "nvshmem":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
            torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
        self.ctx = tkernels.init(**ctx_options)

    def run(self, fn, *args, timeout_s: float) -> list:
        return [fn(self.ctx, *args)]

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc, tb):
        if exc_type is None:  # else the ranks are out of step, and torchrun ends the others
            self.ctx.finalize()
            dist.destroy_process_group()


def open_ranks(args) -> RankPool | ThisRank:
    options = {"transport": args.transport, "timeout_s": WAIT_TIMEOUT_S}
    return ThisRank(options) if "RANK" in os.environ else RankPool(args.ranks, ctx_options=options)


@contextlib.contextmanager
def switched(tf32: bool):
    """As TF32, torch's switch allows it in the block: here, and in the ranks that are started, by their environment."""
    name = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    before = os.environ.get(name)
    with in_precision("tf32") if tf32 else contextlib.nullcontext():
        if tf32:
            os.environ[name] = "1"
        try:
            yield
        finally:
            if before is not None:
                os.environ[name] = before
            elif tf32:
                del os.environ[name]


class Report:
    """Terminal and file output, by the first rank or by the process that started the ranks."""

    def __init__(self, args, cases: list[Case]):
        self.leads = int(os.environ.get("RANK", "0")) == 0
        width = WIDTH if not sys.stdout.isatty() else min(WIDTH, Console().width)
        self.console = Console(width=width, quiet=not self.leads, highlight=False)
        self.progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=Console(stderr=True, quiet=not self.leads, highlight=False, soft_wrap=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )  # fmt: skip
        self.num_cases, self.num_done = len(cases), 0
        self.task = self.progress.add_task("starting the ranks", total=len(cases))
        self.json = args.json if self.leads else None
        self.failed = 0

    def begin(self, text: str):
        self.progress.update(self.task, description=text)

    def end(self, text: str):
        """Finish a case and print its line at once, so that an interrupted run has shown its results so far."""
        self.num_done += 1
        self.progress.console.print(f"[{self.num_done}/{self.num_cases}] {text}", markup=False)
        self.progress.advance(self.task)

    def write(self, line: dict):
        if self.json is not None:
            append(self.json, line)

    def out_of_time(self, deadline: float) -> bool:
        """Whether the deadline has passed, as seen by the first of torchrun's ranks."""
        late = [time.monotonic() > deadline]
        if dist.is_initialized():  # under torchrun every rank runs this, and all must agree
            dist.broadcast_object_list(late)
        return late[0]

    def failure(self, case: Case, reason: str):
        self.failed += 1
        self.console.print(f"{case_name(case)}: no number is reported: {reason}", style="red", markup=False)


def main(argv: list[str] | None = None) -> int:
    args, cases = parse(argv)
    report = Report(args, cases)
    began = time.monotonic()
    try:
        with report.progress, switched(args.dtype == "tf32"), open_ranks(args) as ranks:
            origin = ranks.run(provenance, timeout_s=CASE_TIMEOUT_S)[0]
            measure_all(ranks, args, cases, origin, report)
    except RankError as error:
        report.console.print(f"the ranks failed outside of any case: {error}", style="red", markup=False)
        return 1
    report.console.print(f"{time.monotonic() - began:.1f} s in all", style="dim")
    return 1 if report.failed else 0


def measure_all(ranks, args, cases: list[Case], origin: dict, report: Report):
    deadline = time.monotonic() + args.budget if args.budget is not None else float("inf")
    report.begin("compiling")
    ranks.run(compile_cases, cases, timeout_s=CASE_TIMEOUT_S)
    report.begin("measuring the machine")
    roofs = ranks.run(measure_roofs, shapes.WITH_TF32[args.dtype], args.iterations, timeout_s=CASE_TIMEOUT_S)[0]
    peaks = {name: value for name, value in vars(roofs).items() if name != "missing"}
    records = collections.defaultdict(list)
    for case in cases:
        text = case_name(case)
        if report.out_of_time(deadline):
            report.failure(case, f"the budget of {args.budget:g} s was used up before it")
            continue
        report.begin(text)
        with reported(report, case):
            line = ranks.run(run_case, case, args.iterations, roofs, timeout_s=CASE_TIMEOUT_S)[0]
            if "refused" in line:
                report.failure(case, line["refused"])
            else:
                line |= {**peaks, **origin}
                records[case.op, case.fast_accum].append(line)
                report.write(line)
                times = {name: line[f"{name}_us"] for name in ("ours", "cublas", "serial", "torch")}
                text += ": " + ", ".join(f"{name} {_us(us)}" for name, us in times.items() if us is not None) + " us"
        report.end(text)
    for (op, _), lines in records.items():
        report.console.print(table(op, lines))
        if any(line["ways"] for line in lines):
            report.console.print(ways_table(op, lines))
    report.console.print(notes([line for lines in records.values() for line in lines], roofs), markup=False)


def case_name(case: Case) -> str:
    named = [case.op, case.shape, *([case.layout] if case.layout != "TN" else [])]
    return " ".join(named + [how for how, fast in ACCUMS.items() if case.fast_accum is fast])


@contextlib.contextmanager
def reported(report: Report, case: Case):
    """Report a case whose ranks fail; the next one gets new ranks. Under torchrun ranks cannot be replaced."""
    try:
        yield
    except RankError as error:
        report.failure(case, str(error))


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(op: str, lines: list[dict]) -> Table:
    """The records of one operation; times in us."""
    first = lines[0]
    machine = f"{first['ranks']} x {first['gpu']}" if first["gpu"] else f"{first['ranks']} ranks, simulated"
    dtype = first["dtype"] + (f" with fast_accum={first['fast_accum']}" if of_fp8(first) else "")
    result = Table(
        title=f"{op}, {machine}, {dtype}, {first['transport']}, us, median of {first['iterations']}",
        title_justify="left", pad_edge=False, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    result.add_column("shape", no_wrap=True)
    layouts = len({line["layout"] for line in lines}) > 1
    headings = ["ours", "p10-p90", "host", "cuBLAS", "wire", "NCCL", "serial", "torch"]
    for heading in [*headings, "/cuBLAS", "/serial", "/torch", "eff"]:
        result.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        spread = f"{_us(line['ours_p10_us'])}-{_us(line['ours_p90_us'])}"
        times = [_us(line[f"{name}_us"]) for name in ("cublas", "wire", "nccl", "serial", "torch")]
        ratios = [_ratio(line[f"speedup_over_{name}"]) for name in ("cublas", "serial", "torch")]
        name = f"{line['shape']} {line['layout']}" if layouts else line["shape"]
        result.add_row(
            name, _us(line["ours_us"]), spread, _us(line["ours_host_us"]), *times, *ratios,
            _ratio(line["overlap_efficiency"]),
        )  # fmt: skip
    return result


def ways_table(op: str, lines: list[dict]) -> Table:
    """The ways to move bytes: us, the SMs dedicated to sending, and the host time of a call."""
    names = list(dict.fromkeys(name for line in lines for name in line["ways"]))
    result = Table(
        title=f"{op}: ways to move bytes, us (SMs dedicated to sending), and time on the host",
        title_justify="left", pad_edge=False, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    result.add_column("shape", no_wrap=True)
    unordered = {name for line in lines for name, way in line["ways"].items() if not way["repeatable"]}
    headings = [f"{name} (other bits each run)" if name in unordered else name for name in names]
    for heading in ["ours", "path", *headings, "host: ours", "NCCL + cuBLAS", "torch"]:
        result.add_column(heading, justify="right")
    for line in lines:
        ways = [line["ways"].get(name) for name in names]
        cells = ["-" if way is None else _us(way["us"]) + (f" ({way['sms']})" if way["sms"] else "") for way in ways]
        hosts = [_us(line[f"{name}_host_us"]) for name in ("ours", "serial", "torch")]
        result.add_row(line["shape"], _us(line["ours_us"]), line["path"], *cells, *hosts)
    return result


def notes(lines: list[dict], roofs: Roofs) -> str:
    """The legend of the tables, the measured peaks, and why columns are empty."""
    texts = []
    if lines and lines[0]["runtime"] == "simulated":
        texts.append("simulated runtime: times are the interpreter's")
    elif lines:
        peer = f"{roofs.peer_copy_bytes_per_s / 1e9:.0f} GB/s" if roofs.peer_copy_bytes_per_s else "-"
        texts += [
            "/x: time of x divided by ours. eff: max(cuBLAS, wire) / ours. wire: bytes in / peak of a copy to a peer. "
            "host: how long a call keeps the host.",
            f"peaks in this run: copy to a peer {peer}, cuBLAS {roofs.cublas_flop_per_s / 1e12:.0f} TFLOP/s, copy in "
            f"GPU memory {roofs.hbm_copy_bytes_per_s / 1e12:.2f} TB/s",
        ]
        missing = {(name, reason) for line in lines for name, reason in line["unavailable"].items()}
        texts += [f"- in {name}: {reason}" for name, reason in sorted(missing)]
    return "\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
