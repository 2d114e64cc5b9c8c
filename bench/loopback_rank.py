"""One side of bench.loopback: rank 0 of a group whose other ranks don't exist, with the tkernels of one checkout.

A process of its own, since two checkouts can't be imported into one. bench.loopback starts this file with a checkout at
the head of PYTHONPATH, so `tkernels` and `bench` are that checkout's, and this file is the same for both. It answers
requests, one JSON line each, from stdin.

What rank 0 finds is what it would find if its peers were done before it began: every peer's memory is its own, all that
peers send is in its inbox, and every signal of theirs is raised. What it sends lands in the parts of its own inbox that
it never reads.

This file depends on the following names of a checkout, from 73aa7fb on; where a later one has other names, add them:
`tkernels.init`, `finalize`; wherever they are, `Group`, `open_segment`, `Segment` and `compile_ahead`; the memory and
the words of a workspace, see NAMES; `bench.problem` and `bench.ways`.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

import tkernels
from bench import problem, ways

HEAP_BYTES = {"nvshmem": 2 << 30, "simulated": 64 << 20}
TIMEOUT_S = 5.0
RAISED = 1 << 60  # more than any epoch, also above the bits of a call's number
CYCLES_PER_US = 2000  # of the GPU, nearly
SLEEP_US = 500  # of the GPU before a call, while the host queues the call
# The GPU rests for so many times the duration of a call. Without a rest it reaches its limit of power in calls of 2 ms
# and more, and lowers its clock for a while: between two equal checkouts that gave ratios of 0.96 to 1.05 (H100).
RESTS = 2
MOST_TRIES = 6
FLUSH_BYTES = 256 << 20  # more than any L2
ROWS_AT_ONCE = 1024  # of a result that is checked
LIMIT = 0.02  # of the relative error against torch.mm: results and what peers send are rounded to bf16
NAMES = {
    "inbox": ("inbox",),
    "landing": ("landing", "single"),
    "ready": ("ready",),
    "landed": ("landed", "delivered"),
    "begun": ("begun", "entered"),
}
HOMES = {"compile_ahead": ("tkernels.tuner.compile", "bench.compile")}


def home_of(name: str):
    """The module of this checkout that has that name. Raises AttributeError if there is none."""
    for module in HOMES.get(name, ()):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    homes = [module for module in loaded() if name in vars(module)]
    if not homes:
        raise AttributeError(f"this checkout has no {name} where {Path(__file__).name} looks for it")
    return homes[0]


def loaded() -> list:
    return [module for path, module in sys.modules.items() if path.startswith(("tkernels.", "bench."))]


class Peerless:
    """Rank 0 of `size` ranks, and its context, in which one case is called."""

    latest = None  # the open one

    def __init__(self, size: int):
        group = home_of("Group").Group
        group.__init__, group.gather = functools.partialmethod(_join, size=size), _gather
        for module in loaded():
            if "open_segment" in vars(module):
                module.open_segment = _open_segment
        runtime = tkernels.RUNTIME
        transport = "simulated" if runtime == "simulated" else "peer"
        self.ctx = tkernels.init(heap_bytes=HEAP_BYTES[runtime], transport=transport, timeout_s=TIMEOUT_S)
        self.next_call = None  # what a `begun` word grows by, from one call to the next
        Peerless.latest = self

    def words(self, name: str) -> torch.Tensor | None:
        """A tensor of the workspace, or of what it holds, under one of its NAMES; None before it has any memory."""
        workspace = self.ctx.workspace()
        for holder in (workspace, *vars(workspace).values()):
            for known in NAMES[name]:
                if isinstance(found := getattr(holder, known, None), torch.Tensor):
                    return found
        return None

    def raise_signals(self):
        """Raise whatever the next call waits for. Peers have begun the same call, if that is known already."""
        for name in ("ready", "landed"):
            if (words := self.words(name)) is not None:
                words.fill_(RAISED)
        if (begun := self.words("begun")) is not None:
            begun[1:] = RAISED if self.next_call is None else begun[:1] + self.next_call

    def fill_inbox(self, dtype: torch.dtype, width: int, fill):
        """Fill what peers send: `fill` is called with matrices of `width` columns, the rows of both kinds of inbox."""
        for name in ("inbox", "landing"):
            memory = self.words(name)
            whole = memory.numel() // (width * dtype.itemsize) * width * dtype.itemsize
            fill(memory[:whole].view(dtype).view(-1, width))

    def close(self):
        Peerless.latest = None
        self.ctx.finalize()


def _join(group, process_group=None, size=1):
    group.process_group, group.rank, group.size, group.global_ranks = None, 0, size, list(range(size))


def _gather(group, value, call=None, limit_s=None):
    """A meeting: all others say the same. They were there first, so their signals follow at once."""
    if Peerless.latest is not None:
        Peerless.latest.raise_signals()
    return [value] * group.size


def _open_segment(group, num_bytes: int):
    on_gpu = tkernels.RUNTIME == "nvshmem"
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    bases = [memory.data_ptr()] * group.size
    segment = home_of("Segment").Segment(memory, bases, group.global_ranks)
    if on_gpu:  # at once, whoever still has a view of it
        segment.on_close = functools.partial(memory.untyped_storage().resize_, 0)
    return segment


class Opened:
    """A case that is ready to be measured: its operands, its configuration, and a context of its own."""

    def __init__(self, case: dict, config: dict):
        self.rank = Peerless(case["ranks"])
        ctx = self.rank.ctx
        self.problem = problem.Problem(ctx, _case_of(case), "normal")
        self.config, self.config_is_own = _config_of(ctx, case, config)
        self.rank.raise_signals()
        self.call()
        first = self.rank.words("begun")[0].item()
        self.rank.raise_signals()
        self.call()
        self.rank.next_call = self.rank.words("begun")[0].item() - first
        self.sleep_us = SLEEP_US
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if ctx.device.type == "cuda" else None

    def call(self) -> torch.Tensor:
        return self.problem.with_config(self.config)

    def check(self) -> str:
        """The result's bits, as a checksum. Raises ValueError if it isn't the product, or the sum, that it should be.

        All rows that peers send are equal, so it doesn't matter where in the inbox they lie.
        """
        case, x, w, own = self.problem.case, self.problem.x, self.problem.w, self.problem.rows[0]
        gathers, width = case.op == "all_gather_matmul", x.shape[1] if case.op == "all_gather_matmul" else w.shape[0]
        row = self._random(1, width, 1.0 if gathers else x.shape[1] ** 0.5)
        self.rank.fill_inbox(case.dtype, width, lambda rows: rows.copy_(row.expand_as(rows)))
        torch.use_deterministic_algorithms(True)  # torch fills new tensors with NaN
        self.rank.raise_signals()
        result = self.call()
        self.rank.ctx.check()
        torch.use_deterministic_algorithms(False)
        peers, received = len(self.problem.rows) - 1, (row @ w.t() if gathers else row).float()
        error = total = 0.0
        for first in range(0, result.shape[0], ROWS_AT_ONCE):
            got = result[first : first + ROWS_AT_ONCE].float()
            mine = min(max(own - first, 0), got.shape[0])
            want = received.expand_as(got).clone()
            product = (x[first : first + mine] @ w.t()).float()
            want[:mine] = product if gathers else product + peers * received
            error, total = error + (got - want).square().sum().item(), total + want.square().sum().item()
        if not (error / total) ** 0.5 <= LIMIT:  # so that NaN is wrong
            raise ValueError(f"the result is wrong: its relative error is {(error / total) ** 0.5:.1e}")
        return _checksum(result)

    def warm_up(self):
        """Rows as they come in practice: equal ones would take less power, and leave the chip a higher clock."""
        case, w = self.problem.case, self.problem.w
        gathers = case.op == "all_gather_matmul"
        width, scale = (case.K, 1.0) if gathers else (w.shape[0], self.problem.x.shape[1] ** 0.5)
        generator = torch.Generator(self.rank.ctx.device).manual_seed(7)
        self.rank.fill_inbox(case.dtype, width, lambda rows: rows.normal_(0, scale, generator=generator))
        self.sleep_us = max(SLEEP_US, RESTS * self.time(1)[0])

    def time(self, number: int) -> list[float]:
        """Microseconds of `number` calls, after one that is not counted. The GPU is idle afterwards."""
        took = [self._time_once() for _ in range(1 + number)][1:]
        self.rank.ctx.check()
        return took

    def _time_once(self) -> float:
        if self.flush is None:
            self.rank.raise_signals()
            began = time.perf_counter()
            self.call()
            return (time.perf_counter() - began) * 1e6
        for attempt in range(MOST_TRIES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()
            torch.cuda._sleep(int(self.sleep_us * 2**attempt * CYCLES_PER_US))
            self.rank.raise_signals()
            start.record()
            self.call()
            end.record()
            late = start.query()  # the GPU may have waited for the host in between
            end.synchronize()
            if not late:
                return round(start.elapsed_time(end) * 1e3, 2)
        raise TimeoutError(f"the host is slow: it has not queued a call within {self.sleep_us * 2**attempt:.0f} us")

    def _random(self, rows: int, columns: int, scale: float) -> torch.Tensor:
        device = self.rank.ctx.device
        generator = torch.Generator(device).manual_seed(5)
        return (torch.randn(rows, columns, generator=generator, device=device) * scale).to(self.problem.case.dtype)


def _case_of(case: dict):
    return problem.Case(case["op"], case["shape"], case["M"], case["N"], case["K"], torch.bfloat16)


def _ways_of(ctx, case: dict) -> dict:
    """The configurations of a case by way, of those ways that are possible here."""
    for name in [name for name, way in ways.WAYS[ctx.runtime].items() if way.transport == "nvshmem"]:
        del ways.WAYS[ctx.runtime][name]  # it has no loopback
    opened, _ = ways.open_ways(ctx, _case_of(case))
    configs = {name: way.config for name, way in opened.items() if way.way.path != "plain"}
    programs = next(config for config in configs.values() if config.num_comm)
    ordered = {"programs": programs, "landing": dataclasses.replace(programs, landing=True)}
    return ordered | {name: configs[name] for name in ("copy_engine", "interleaved") if name in configs}


def _config_of(ctx, case: dict, config: dict):
    """The configuration in this checkout's class. If that has other fields: its own for this way, and True."""
    default = problem.config_of(ctx, _case_of(case))
    try:
        return type(default)(**config | {"gemm": type(default.gemm)(**config["gemm"])}), False
    except TypeError:
        return _ways_of(ctx, case)[case["way"]], True


def _checksum(result: torch.Tensor) -> str:
    rows, columns = result.shape
    weights = [torch.arange(size, device=result.device) * 0x9E3779B97F4A7C1 + 1 for size in (rows, columns)]
    total = 0
    for first in range(0, rows, ROWS_AT_ONCE):
        bits = result[first : first + ROWS_AT_ONCE].contiguous().view(torch.int16).long()
        total += ((bits * weights[1]).sum(1) * weights[0][first : first + ROWS_AT_ONCE]).sum().item()
    return f"{total % (1 << 64):016x}"


class Side:
    """What bench.loopback asks for, a method each."""

    opened = None

    def hello(self, checkout: str) -> dict:
        """What runs here. Raises ImportError if that is not the checkout's tkernels."""
        found = Path(tkernels.__file__).resolve()
        if not found.is_relative_to(Path(checkout).resolve()):
            raise ImportError(f"tkernels comes from {found}, not from {checkout}")
        triton = importlib.import_module("triton").__version__
        gpu = torch.cuda.get_device_name() if tkernels.RUNTIME == "nvshmem" else None
        return {"gpu": gpu, "torch_version": torch.__version__, "triton_version": triton}

    def configs(self, cases: list[dict]) -> list[dict]:
        """The configuration of every way of each case, as a dict."""
        return [self._configs(case) for case in cases]

    def compile(self, cases: list[tuple[dict, dict]]):
        """Compile what the cases launch, several kernels at a time. Failures recur when a case is opened."""
        if tkernels.RUNTIME == "simulated":
            return
        compile_ahead = home_of("compile_ahead").compile_ahead
        for size in {case["ranks"] for case, _ in cases}:
            here = [each for each in cases if each[0]["ranks"] == size]
            rank = Peerless(size)
            calls = {number: functools.partial(_call_on_zeros, rank.ctx, *each) for number, each in enumerate(here)}
            with torch.no_grad():
                compile_ahead(rank.ctx, calls, done=lambda number: None)
            self.close()

    def open(self, case: dict, config: dict) -> dict:
        """Make a case ready. Returns its result's checksum, and whether its configuration is this checkout's own."""
        self.close()
        self.opened = Opened(case, config)
        checksum = self.opened.check()
        self.opened.warm_up()
        return {"checksum": checksum, "config_is_own": self.opened.config_is_own}

    def time(self, number: int) -> list[float]:
        return self.opened.time(number)

    def close(self):
        self.opened = None
        if Peerless.latest is not None:
            Peerless.latest.close()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _configs(self, case: dict) -> dict:
        configs = _ways_of(Peerless(case["ranks"]).ctx, case)
        self.close()
        return {name: dataclasses.asdict(config) for name, config in configs.items()}


def _call_on_zeros(ctx, case: dict, config: dict):
    problem.Problem(ctx, _case_of(case), "zeros").with_config(_config_of(ctx, case, config)[0])


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between
    side = Side()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            with torch.no_grad():
                answer = {"value": getattr(side, name)(**arguments)}
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip().splitlines()
            answer = {"error": f"{type(error).__name__}: {text[0] if text else ''}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
