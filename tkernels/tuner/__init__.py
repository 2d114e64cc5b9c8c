"""The tuner: measures configurations of an operation on all ranks, agrees on the best one and stores it.

Candidates that cannot run are rejected with a reason, and so are candidates that cannot win according to a model of
waves and wire time. The others are compiled several at a time, checked against the result of the default configuration,
and measured in rounds (successive halving): the faster half of each round is measured again, with more iterations.
Single changes of the winner are then searched in the same way. Every time is that of the slowest rank. The default is
measured in every round, so the result is never slower than the default.
"""

import dataclasses
import datetime
import functools
import numbers
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch

from tkernels.comm import runtime, tuned
from tkernels.comm.arguments import check_torch_dtype, check_type, whole
from tkernels.comm.context import Context, as_context
from tkernels.comm.contexts import open_contexts
from tkernels.comm.errors import TkernelsError
from tkernels.configs import (
    KEY,
    GemmConfig,
    OverlapConfig,
    bound_travel,
    default_config,
    default_overlap,
    forget_choices,
    rule_bound,
    sends_by_stores,
    travel_of,
    travelling,
)
from tkernels.paths import Choice, explain
from tkernels.rounding import tolerance
from tkernels.timing import agree
from tkernels.timing import measure as measure_all
from tkernels.tuner.candidates import Room, check_grid, describe, neighbours, product, survey
from tkernels.tuner.compile import compile_ahead, sentence
from tkernels.tuner.problem import Operands, Problem
from tkernels.tuner.progress import Progress

FIRST_ITERATIONS, LAST_ITERATIONS = 3, 15
FINALISTS = 4
BUDGET_S = 30.0
WORTH = 0.99  # a candidate replaces the default only if it takes at most this fraction of the default's time
# A winner that sends its rows in another way than the rule (other chunk_rows or landing) binds all smaller GEMMs whose
# rows are sent alike. It must therefore take at most this fraction of the time of the best candidate that binds none.
# 2 H100s, reduce-scatters: comm programs had won llama8b-down by 2 %, which ruled out the copy engine for rs-c: its
# default by rule then took 341 us, and the best of the remaining candidates 313.
BINDING = 0.95


@dataclass(frozen=True)
class Measured:
    """One candidate's times in microseconds, of the slowest rank, in the longest round that it took part in."""

    config: GemmConfig | OverlapConfig
    change: str  # from the default, in words
    us: float
    p10_us: float
    p90_us: float
    iterations: int


@dataclass
class Outcome:
    """The result of a search.

    best, default: the chosen configuration, and the one by rule.
    measured: all measured candidates, the best first.
    refused: the number of candidates that were not measured, by reason.
    library_us: the local GEMM alone, by torch, on the slowest rank.
    seconds: duration of the search.
    finished: False if the budget ended it early.
    remembered: the file that stores the result.
    choice: the path that calls of this size take by default; the result applies to them only if it is fused. None for
        matmul.
    """

    problem: Problem
    best: Measured
    default: Measured
    measured: list[Measured]
    library_us: float
    refused: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    finished: bool = True
    remembered: str | None = None
    choice: Choice | None = None


def tune(
    operation: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    layout: str = "TN",
    ctx: Context | None = None,
    budget_s: float = BUDGET_S,
    grid: dict[str, list] | None = None,
    remember: bool = True,
    measure=measure_all,
) -> Outcome:
    """Collective. Find the fastest configuration of an operation on a shape; fused calls of its bucket then use it.

    operation: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce", on 2 ranks or more, or "matmul".
    M, N, K: over all ranks.
    layout: of w and x, in BLAS notation. TN: w as in nn.Linear. NN: w.t() of a [K, N] matrix. Where TMA cannot address
        matrices of these sizes, the result is stored for the layout "pointers", under which calls look it up.
    budget_s: seconds after which no new round begins, except the last one, among the finalists. Compilation does not
        count, since many shapes share their kernels.
    grid: values by field; all their combinations are tried instead of the tuner's own candidates.
    remember: store the result on disk for later processes ($TKERNELS_CACHE). False: keep it for this context only or,
        for matmul, which belongs to no context, for all open contexts.
    measure: as timing.measure.

    Raises ValueError or TypeError for arguments that cannot be tuned, the same on every rank; RuntimeError if even the
    default does not run.
    """
    ctx = as_context(ctx)
    M, N, K = whole("tune: M", M, 1), whole("tune: N", N, 1), whole("tune: K", K, 1)
    check_torch_dtype("tune: dtype", dtype)
    check_type("tune: budget_s", budget_s, numbers.Real, "a number of seconds")
    problem = Problem(operation, M, N, K, dtype, layout)
    problem.check(ctx.size)
    check_grid({} if grid is None else grid, operation)
    with torch.no_grad(), Progress(str(problem), shown=ctx.rank == 0) as progress:
        outcome = _Search(ctx, problem, budget_s, measure, progress).run(grid)
    if operation != "matmul":
        outcome.choice = explain(operation, M, N, K, dtype, ctx=ctx)
    record = _record(ctx, outcome)
    path = _remember(record) if remember and ctx.rank == 0 else None
    record, outcome.remembered = ctx.group.gather((record, path))[0]  # with the same date on all ranks
    # A local GEMM looks up the records of whichever context is the default when it is called: update all of them.
    for each in open_contexts() if operation == "matmul" else [ctx]:
        each.tuned = [known for known in each.tuned if known["key"] != record["key"]] + [record]
        forget_choices(each)
    return outcome


def _remember(record: dict) -> str | None:
    try:
        return str(tuned.save(record))
    except OSError as error:
        text = f"tune: the result can't be remembered ({error}); set TKERNELS_CACHE to a folder that can be written"
        warnings.warn(text, stacklevel=3)
        return None


def _record(ctx: Context, outcome: Outcome) -> dict:
    problem = outcome.problem
    return {
        "key": dict(zip(KEY, problem.key(ctx.size), strict=True)) | problem.place(ctx),
        "config": dataclasses.asdict(outcome.best.config),
        "measured": {"M": problem.M, "N": problem.N, "K": problem.K},
        "us": outcome.best.us,
        "default_us": outcome.default.us,
        "library_us": outcome.library_us,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class _Search:
    """One search on this rank; all ranks run the same search in lockstep."""

    def __init__(self, ctx: Context, problem: Problem, budget_s: float, measure, progress: Progress):
        self.ctx, self.problem, self.measure, self.progress = ctx, problem, measure, progress
        self.began = time.monotonic()
        self.deadline = self.began + budget_s
        M, N, K = problem.local(ctx.size)
        layout = problem.layout_of_calls(ctx.size)
        tma = layout != "pointers"
        self.bases = []  # configurations, besides the default, that candidates are derived from
        if problem.operation == "matmul":
            self.default = default_config(M, N, problem.dtype, tma)
            programs, bound = runtime.default_programs(), None
        else:
            programs, bound = ctx.num_programs, bound_travel(ctx, problem.key(ctx.size))
            self.default = rule_bound(ctx, problem.operation, M, N, K, problem.dtype, layout, bound)
            bound = bound and travel_of(self.default)
            sizes = M, N, K, problem.dtype, ctx.size, programs
            sending = default_overlap(problem.operation, *sizes, tma, stores=sends_by_stores(ctx))
            # Also try comm programs: into the inbox of the default and, unless bound, into the two alternating ones.
            self.bases += [travelling(sending, *travel_of(self.default)), *([] if bound else [sending])]
        self.room = Room(problem.operation, M, N, K, problem.dtype, layout, ctx.size, programs, bound, ctx.mapped)
        self.operands = [Operands(ctx, problem, seed) for seed in (0, 1)]
        self.measured: dict[object, Measured] = {}
        self.refused = Counter()
        self.library_us = 0.0

    def run(self, grid: dict[str, list] | None) -> Outcome:
        reason = self._prepare([self.default]).get(self.default)
        if reason is not None:
            raise TkernelsError(f"tune: {self.problem}: the default configuration failed: {reason}")
        self._round([self.default], FIRST_ITERATIONS)
        if grid:
            tried = self._halve(*product(self.default, grid, self.room), self.default)
        else:
            found, refused = survey([self.default, *self.bases], self.room, self.library_us)
            tried = self._halve(found, refused, self.default)
            tried = self._halve(*neighbours(tried[0], self.room, self.library_us), *tried)
        finalists, finished = tried[:FINALISTS], self._in_time()
        if all(self._binds(config) for config in finalists):
            finalists.append(self._best_free(self.measured))
        # Regardless of the budget: the fastest of many candidates that were measured three times is the luckiest one.
        self._round(finalists, LAST_ITERATIONS)
        best, default = min(finalists, key=self._us), self.measured[self.default]
        free = self._best_free(finalists)
        if self._us(best) > BINDING * self._us(free):
            best = free
        if self._us(best) > WORTH * default.us:
            best = self.default
        measured = sorted(self.measured.values(), key=lambda one: (-one.iterations, one.us))
        measured.remove(self.measured[best])
        return Outcome(
            self.problem, self.measured[best], default, [self.measured[best], *measured], self.library_us,
            self.refused, time.monotonic() - self.began, finished,
        )  # fmt: skip

    def _binds(self, config) -> bool:
        """Whether this configuration would make smaller GEMMs send their rows in another way than the rule's."""
        return isinstance(config, OverlapConfig) and travel_of(config) != travel_of(self.default)

    def _best_free(self, configs):
        """The fastest of the configurations that bind no smaller GEMM."""
        return min((config for config in configs if not self._binds(config)), key=self._us)

    def _agreed(self, value):
        """Rank 0's value. Clocks differ between ranks, and a search hangs if its ranks take different branches."""
        return self.ctx.group.gather(value)[0]

    def _us(self, config) -> float:
        return self.measured[config].us

    def _in_time(self) -> bool:
        return self._agreed(time.monotonic() < self.deadline)

    def _halve(self, candidates: list, refused: Counter, *known) -> list:
        """Measure candidates and `known`, dropping the slower half each round. Returns the rest, best first."""
        self.refused += refused
        candidates = [config for config in candidates if config not in self.measured]
        if not self._in_time():
            return self._out_of_time([*known, *candidates])
        for config, reason in self._prepare(candidates).items():
            self.refused[reason] += 1
            candidates.remove(config)
        alive, iterations = list(dict.fromkeys([*known, *candidates])), FIRST_ITERATIONS
        while self._in_time():
            self._round(alive, iterations)
            alive.sort(key=self._us)
            if len(alive) <= FINALISTS:
                return alive
            alive, iterations = alive[: max((len(alive) + 1) // 2, FINALISTS)], iterations + 2
        return self._out_of_time(alive)

    def _out_of_time(self, alive: list) -> list:
        known = [config for config in alive if config in self.measured]
        self.refused += Counter({"budget: the time was over before they were measured": len(alive) - len(known)})
        return sorted(known, key=self._us)

    def _prepare(self, configs: list) -> dict:
        """Compile and try configurations. Returns the unusable ones, each with its reason; the same on all ranks."""
        failures, waiting = {}, list(configs)
        if runtime.RUNTIME != "simulated":  # the interpreter compiles nothing
            began = time.monotonic()
            names, calls = self._calls(configs)
            self.progress.begin("compiling", len(calls))
            own = compile_ahead(self.ctx, calls, self.progress.done)
            self.deadline += time.monotonic() - began
            for reasons in self.ctx.group.gather(own):
                failures |= {names[name]: reason for name, reason in reasons.items()}
            waiting = [config for config in configs if config not in failures]
        self.progress.begin("comparing results", len(waiting))
        for number, config in enumerate(waiting):
            reason = self._try(config)
            if reason is not None:
                failures[config] = reason
            self.progress.done(number + 1)
        return failures

    def _try(self, config) -> str | None:
        """Why a configuration is unusable, or None if its results match the default's.

        Each pair of calls uses other operands than the pair before, so that stale data shows.
        """
        reason = None
        try:
            for which in (0, 1):
                # Twice, since two inboxes alternate: a row that is read too early comes from the call before the last.
                results = [self.operands[which].run(config) for _ in range(2)]
                reason = reason or self._compare(which, results, keep=config == self.default)
            self.ctx.check()
        except Exception as error:
            if self.ctx.failed:
                raise  # the ranks are out of step: this context is unusable
            reason = sentence(error)
        reason = agree(self.ctx, reason)
        return reason and reason.split(": ", 1)[1]

    def _compare(self, which: int, results: list[torch.Tensor], keep: bool) -> str | None:
        if keep:
            self.operands[which].expected = results[-1]
        expected = self.operands[which].expected
        atol, rtol = tolerance(expected.dtype, self.problem.K, roundings=self.ctx.size + 1)
        right = all(torch.allclose(result, expected, atol=2 * atol, rtol=2 * rtol) for result in results)
        return None if right else "result: it is not the default's"

    def _calls(self, configs) -> tuple[dict, dict]:
        """(configurations by name, their calls by name)."""
        names = {describe(config, self.default): config for config in configs}
        return names, {name: functools.partial(self.operands[0].run, config) for name, config in names.items()}

    def _round(self, configs: list, iterations: int):
        """Measure configurations alongside the default."""
        self.progress.begin(f"measuring {len(configs)}, {iterations} times", 0)
        names, calls = self._calls(dict.fromkeys([self.default, *configs]))
        timings, _ = self.measure(self.ctx, {"library": self.operands[0].library, **calls}, iterations)
        timings = self._agreed(timings)
        self.ctx.check()
        self.library_us = timings["library"].us
        for name, config in names.items():
            one = timings[name]
            self.measured[config] = Measured(config, name, one.us, one.p10_us, one.p90_us, iterations)
