"""Runs one case on all ranks: checks our result, times it beside the baselines, and returns a record.

If our result is wrong, the case is refused and no time is reported. A baseline that is missing or wrong is left out,
with the reason.
"""

import dataclasses
import random
import statistics
import time

import torch

from bench.baselines import NAMES, baselines, enable_symmetric_memory
from bench.compile import compile_ahead, sentence
from bench.problem import Case, Problem, config_of, path_of
from bench.roofs import Roofs
from bench.ways import Opened, open_ways
from tkernels.comm.context import Context
from tkernels.gemm import precision
from tkernels.timing import WARMUPS, Call, Timing, agree, measure

ROWS_AT_ONCE = 1024  # of a result, compared in fp64
HOST_ROUNDS, HOST_CALLS = 15, 5
BASELINE_ERROR = 0.02  # relative to the result's norm; bf16 partial sums of 8 ranks stay below


def wrong(problem: Problem, result: torch.Tensor) -> str | None:
    """What is wrong with our result on this rank, or None."""
    x, w = problem.truth()
    shape, dtype = (x.shape[0], x.shape[1] if w is None else w.shape[0]), problem.case.result_dtype
    if tuple(result.shape) != shape or result.dtype != dtype:
        return f"the result is {result.dtype} {tuple(result.shape)}, not {dtype} {shape}"
    atol, rtol = problem.allowed()
    w = w.double() if w is not None else None
    off, example = 0, None
    for first in range(0, shape[0], ROWS_AT_ONCE):
        want = x[first : first + ROWS_AT_ONCE].double()
        want = want @ w.t() if w is not None else want
        got = result[first : first + ROWS_AT_ONCE]
        if (atol, rtol) == (0.0, 0.0):
            want = want.to(got.dtype).double()
        error = (got.double() - want).abs()
        bad = ~(error <= atol + rtol * want.abs())  # so that NaN is bad
        off += int(bad.sum())
        if example is None and bad.any():
            row, column = (int(at) for at in bad.nonzero()[0])
            example = f"at ({first + row}, {column}) got {float(got[row, column]):g}, want {float(want[row, column]):g}"
    return f"{off} of {result.numel()} elements are off on {problem.values} operands; {example}" if off else None


def far(problem: Problem, result: torch.Tensor) -> str | None:
    """Why a baseline's result is far from the reference on this rank, or None. Baselines may round in their own way."""
    x, w = problem.truth()
    rows = slice(0, min(x.shape[0], ROWS_AT_ONCE))
    if x.shape[0] == 0:
        return None
    want = x[rows].double() if w is None else x[rows].double() @ w.double().t()
    error, allowed = ((result[rows].double() - want).norm() / want.norm()).item(), BASELINE_ERROR
    if problem.case.fast_accum:  # tensor cores lose up to 2**-14 of a sum with each 32 products
        allowed += problem.case.local_K(problem.ctx.size) / 32 * 2.0**-14
    return None if error <= allowed else f"its result is wrong: relative error {error:.1e}"


def usable_baselines(ctx: Context, problem: Problem) -> tuple[dict[str, Call], dict[str, str]]:
    """Collective. The baselines that run here and give the right result, and why the others do not."""
    calls, unavailable = {}, {}
    candidates = baselines(problem)
    for name, call in candidates.items():
        reason = None
        try:
            if name == "torch":
                enable_symmetric_memory(ctx.group.process_group)
            result = call()
            torch.cuda.synchronize()
            reason = far(problem, result) if result is not None else None
        except Exception as error:  # a baseline may lack anything here; it is reported as missing, with the reason
            reason = sentence(error)
        reason = agree(ctx, reason)
        if reason is None:
            calls[name] = call
        else:
            unavailable[name] = reason
    return calls, unavailable


def compile_cases(ctx: Context, cases: list[Case]) -> None:
    """Collective. Compile the kernels that the cases launch, in every way, each on one rank.

    Errors are ignored here, since they recur when the case runs. Does nothing on the simulated runtime.
    """
    if ctx.device.type != "cuda":
        return
    calls = {}
    for case in cases:
        calls[case] = lambda case=case: Problem(ctx, case, "zeros").ours()
        for name, way in open_ways(ctx, case)[0].items():
            calls[case, name] = lambda case=case, way=way: way.call(Problem(ctx, case, "zeros"))()
    with torch.no_grad():
        compile_ahead(ctx, calls, done=lambda number: None)


def run_case(ctx: Context, case: Case, iterations: int, roofs: Roofs, ours=Problem.ours) -> dict:
    """Collective. Measure one case. Returns the record, or {"op", "shape", "refused"} if a result of ours is wrong.

    ours: called with a Problem, returns the result that is checked and timed.
    """
    with torch.no_grad():
        try:
            ways, unavailable = _check(ctx, Problem(ctx, case, "integers"), ours)
            problem = Problem(ctx, case, "normal")
            checked = _right(ctx, problem, ours)
            others, missing = usable_baselines(ctx, problem)
            calls = {"ours": lambda: ours(problem), **others}
            timings, last = measure(ctx, calls | {name: way.call(problem) for name, way in ways.items()}, iterations)
            timings |= with_host_times(ctx, timings, calls)
            ctx.check()
            _refuse(
                ctx,
                torch.equal(last["ours"], checked),
                "the result of a timed call differs from that of the checked call",
            )
        except WrongResult as error:
            return {"op": case.op, "shape": case.shape, "layout": case.layout, "refused": str(error)}
    config = config_of(ctx, case)
    return record(ctx, case, timings, roofs) | {
        "ways": {name: _times(timings[name]) | way.described() for name, way in ways.items()},
        "path": path_of(ctx, case),
        "config": dataclasses.asdict(config) if config is not None else None,
        "unavailable": {**roofs.missing, **missing, **unavailable},
        "iterations": iterations,
        "warmups": WARMUPS[ctx.device.type],
    }


class WrongResult(Exception):
    """One of our results is wrong; every rank raises it with the same reason."""


def _refuse(ctx: Context, right: bool, reason: str):
    reason = agree(ctx, None if right else reason)
    if reason is not None:
        raise WrongResult(reason)


def _right(ctx: Context, problem: Problem, ours) -> torch.Tensor:
    """Collective. Our result, after its check."""
    result = ours(problem)
    ctx.check()
    reason = wrong(problem, result)
    _refuse(ctx, reason is None, reason)
    return result


def _check(ctx: Context, problem: Problem, ours) -> tuple[dict[str, Opened], dict[str, str]]:
    """Collective. Check our result and that of every way, on integers; the ways, and why others are unavailable."""
    result = _right(ctx, problem, ours)
    ways, unavailable = open_ways(ctx, problem.case)
    for name, way in list(ways.items()):
        got = reason = None
        try:
            got = way.call(problem)()
            way.ctx.check()
        except Exception as error:  # a way may be impossible on this shape; it is reported as missing, with the reason
            if way.ctx.failed:
                raise  # the ranks are out of step; new ones must be started
            reason = sentence(error)
        reason = agree(ctx, reason)
        if reason is not None:
            unavailable[name] = reason
            del ways[name]
        else:
            _refuse(ctx, torch.equal(got, result), f"{name} gives another result than ours on integers operands")
    return ways, unavailable


def with_host_times(ctx: Context, timings: dict[str, Timing], calls: dict[str, Call]) -> dict[str, Timing]:
    """Collective. The calls' timings, with host_us replaced by the host time of calls that are queued in a row.

    Median, slowest rank; None on the simulated runtime. A single call after a barrier, as `measure` times it, finds the
    host's caches cold, and so does the first call after those of another candidate. Therefore the order changes each
    round.
    """
    if ctx.device.type != "cuda":
        return {name: dataclasses.replace(timings[name], host_us=None) for name in calls}
    samples, order = {name: [] for name in calls}, random.Random(0)  # the same on all ranks
    for _ in range(HOST_ROUNDS):
        for name in order.sample(list(calls), len(calls)):
            for _ in range(HOST_CALLS):
                began = time.perf_counter()
                calls[name]()
                samples[name].append((time.perf_counter() - began) * 1e6)
            torch.cuda.synchronize()
    everyones = ctx.group.gather({name: statistics.median(values) for name, values in samples.items()})
    slowest = {name: max(theirs[name] for theirs in everyones) for name in calls}
    return {name: dataclasses.replace(timings[name], host_us=round(slowest[name], 3)) for name in calls}


def _times(timing: Timing) -> dict:
    return {"us": timing.us, "p10_us": timing.p10_us, "p90_us": timing.p90_us}


def record(ctx: Context, case: Case, timings: dict[str, Timing], roofs: Roofs) -> dict:
    """The columns of one case's record, except those of its ways; None where a value is not available."""
    works = [case.work(ctx.size, rank) for rank in range(ctx.size)]
    work = max(works, key=lambda work: work.link_in_bytes)  # the rank that receives most
    wire_us = None
    if roofs.peer_copy_bytes_per_s is not None:
        wire_us = work.link_in_bytes / roofs.peer_copy_bytes_per_s * 1e6
    columns = {
        "op": case.op,
        "shape": case.shape,
        "layout": case.layout,
        "M": case.M,
        "N": case.N,
        "K": case.K,
        "ranks": ctx.size,
        "dtype": "tf32" if precision(case.dtype) == "tf32" else str(case.dtype).removeprefix("torch."),
        "fast_accum": case.fast_accum,
        "runtime": ctx.runtime,
        "transport": ctx.transport,
        "flops": work.flops,
        "hbm_bytes": work.hbm_bytes,
        "link_in_bytes": work.link_in_bytes,
        "link_out_bytes": work.link_out_bytes,
        "wire_us": wire_us,
    }
    for name in ("ours", *NAMES):
        timing = timings.get(name, Timing(None, None, None, None))
        columns |= {f"{name}_{key}": value for key, value in dataclasses.asdict(timing).items()}
    ours = timings["ours"].us
    for name in NAMES:
        columns[f"speedup_over_{name}"] = timings[name].us / ours if name in timings else None
    needed = [timings["cublas"].us if "cublas" in timings else None] if "matmul" in case.op or case.op == "gemm" else []
    needed += [wire_us] if ctx.size > 1 and case.op != "gemm" else []
    known = bool(needed) and None not in needed
    columns["overlap_efficiency"] = max(needed) / ours if known else None
    columns["ours_flop_per_s"] = work.flops / ours * 1e6
    return columns
