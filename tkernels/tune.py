"""Tunes: measures configurations of an operation on a shape, on all ranks, and remembers the best one.

Of the configurations that could win, those with the least predicted times (tkernels.model) are compared with the result
of the default and measured with it in one interleaved round; the best of them are measured again, more often. Every
time is that of the slowest rank. The winner counts only if it gains more than the noise, so the result is never slower
than the default. How rows travel is not tuned: it follows by rule, the same on all ranks (model.wire_of).
"""

import dataclasses
import datetime
import functools
import numbers
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.status import Status

from tkernels import configs, model, operators, tuned
from tkernels.choice import KEY, MULTIPLIED, bucket, problem_of, tuned_locally, tuned_of
from tkernels.comm import runtime
from tkernels.comm.arguments import check_torch_dtype, check_type, whole
from tkernels.comm.collectives import split_rows
from tkernels.comm.context import Context, as_context
from tkernels.comm.contexts import open_contexts
from tkernels.comm.errors import TkernelsError
from tkernels.comm.regions import round_up
from tkernels.configs import ALIKE, FP8, GemmConfig, OverlapConfig, name_of, result_dtype
from tkernels.gemm import Scales, fused_layout, layout_of, precision
from tkernels.gpus import stages_rows
from tkernels.library import multiply_scaled_into
from tkernels.paths import Choice, check_depth, explain, fused_sizes, local_sizes
from tkernels.quantize import quantize_reference
from tkernels.rounding import fp8_error, tolerance
from tkernels.staging import VECTOR_BYTES
from tkernels.timing import agree
from tkernels.timing import measure as measure_all
from tkernels.variants import check_grid, describe, product, variants

FIRST_ITERATIONS, LAST_ITERATIONS = 5, 15
OF_A_ROUND = 8  # candidates that are measured beside the default, between two looks at the clock
FINALISTS = 4
BUDGET_S = 30.0
WORTH = 0.99  # a candidate replaces the default only if it takes at most this fraction of the default's time


@dataclass(frozen=True)
class Job:
    """What to tune.

    operation: one of configs.OPERATIONS. M, N, K: over all ranks. layout: as gemm.layout_of names it.
    fast_accum: of FP8, as in tkernels.matmul.
    """

    operation: str
    M: int
    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "TN"
    fast_accum: bool = True

    def __str__(self):
        dtype = name_of(self.dtype) + MULTIPLIED[self.precision]
        return f"{self.operation} {self.M}x{self.N}x{self.K} {dtype} {self.layout}"

    @property
    def precision(self) -> str:
        return precision(self.dtype, self.fast_accum)

    def check(self, ranks: int):
        """Raises ValueError or TypeError for a job that cannot be tuned on that many ranks."""
        if self.operation not in configs.OPERATIONS:
            raise ValueError(f"tune: there is no {self.operation!r}; there are {', '.join(configs.OPERATIONS)}")
        if self.dtype not in ALIKE:
            raise TypeError(f"tune: products are of {', '.join(map(str, ALIKE))}, but dtype={self.dtype}")
        if ranks == 1 and self.operation != "matmul":
            raise ValueError(
                f"tune: one rank multiplies alone, so {self.operation} is matmul there, with matmul's configuration; "
                f"tune matmul, or on 2 ranks or more"
            )
        takes = configs.LAYOUTS if self.operation != "all_gather_matmul" else ("TN", "NN", "pointers")
        takes = ("TN",) if self.dtype in FP8 else takes
        if self.layout not in takes:
            of = f" of {name_of(self.dtype)}" if self.dtype in FP8 else ""
            raise ValueError(f"tune: {self.operation}{of} has no layout {self.layout!r}; it takes {', '.join(takes)}")
        copied = self.precision == "tf32" and stages_rows(self.dtype, self.precision)
        if self.operation == "matmul" and copied and self.layout != "TN":
            raise ValueError(
                f"tune: as TF32 matmul multiplies operands of layout {self.layout!r} as copies with K contiguous, in "
                f"the tiles of 'TN'; tune that"
            )
        for name in {"all_gather_matmul": "N", "matmul": ""}.get(self.operation, "K"):
            if getattr(self, name) % ranks:
                raise ValueError(
                    f"tune: {name}={getattr(self, name)} doesn't divide by {ranks} ranks; tune the next larger one "
                    f"that does, it is in the same bucket or the next"
                )
        _, N, K = self.local(ranks)
        check_depth(K, self.dtype, "tune")
        if self.dtype in FP8 and N % 16:  # beside torch's product, which takes no other
            raise ValueError(f"tune: float8 takes an N, of each rank, that is a multiple of 16, but here it is {N}")

    def local(self, ranks: int) -> tuple[int, int, int]:
        """M, N, K of one rank's local GEMM. Of matmul, N is a whole number of 16 bytes: others take the same tiles."""
        if self.operation == "matmul":
            return self.M, round_up(self.N, VECTOR_BYTES // self.dtype.itemsize), self.K
        return local_sizes(self.operation, self.M, self.N, self.K, ranks)

    def operands(self, ranks: int, rank: int, make) -> tuple[torch.Tensor, torch.Tensor]:
        """x and w of that rank. make: allocates a vector of that many elements."""
        M, N, K = self.local(ranks)
        rows = split_rows(M, ranks)[rank] if self.operation == "all_gather_matmul" else M
        return self.matrix(rows, K, self.layout[1] == "T", make), self.matrix(N, K, self.layout[0] == "N", make)

    def matrix(self, rows: int, columns: int, transposed: bool, make) -> torch.Tensor:
        """A matrix in the job's memory layout. make: as for `operands`."""
        offset = 1 if self.layout == "pointers" else 0  # a base address that is no multiple of 16 bytes
        memory = make(rows * columns + offset)[offset:]
        return memory.view(columns, rows).t() if transposed else memory.view(rows, columns)

    def layout_of_calls(self, ranks: int) -> str:
        """The layout under which calls look up a configuration: also "pointers" where TMA cannot be used."""
        operands = self.operands(ranks, 0, functools.partial(torch.empty, dtype=self.dtype, device="meta"))
        return layout_of(*operands) if self.operation == "matmul" else fused_layout(*operands, self.precision)

    def key(self, ranks: int) -> tuple:
        """The bucket that the result holds for."""
        return bucket(self.operation, *self.local(ranks), self.dtype, self.layout_of_calls(ranks), self.precision)


class Operands:
    """Random operands of this rank: x, w, and `gathered`, the x of its local GEMM, for the comparison with cuBLAS.

    Of FP8 each row has a scale: scales, those of x and w, and gathered_scale.
    """

    def __init__(self, ctx: Context, job: Job, seed: int):
        self.ctx, self.job = ctx, job
        M, _, K = job.local(ctx.size)
        self.rows = split_rows(M, ctx.size)
        generator = torch.Generator(ctx.device).manual_seed(seed * ctx.size + ctx.rank)
        dtype = result_dtype(job.dtype)
        make = functools.partial(torch.randn, generator=generator, device=ctx.device, dtype=dtype)
        self.x, self.w = job.operands(ctx.size, ctx.rank, make)
        self.gathered = job.matrix(M, K, False, make) if job.operation == "all_gather_matmul" else self.x
        self.scales = self.gathered_scales = None
        if job.dtype in FP8:
            (self.x, x), (self.w, w), (self.gathered, gathered) = (
                quantize_reference(each, "row", job.dtype) for each in (self.x, self.w, self.gathered)
            )
            self.scales, self.gathered_scales = Scales(x, w), Scales(gathered, w)

    def run(self, config) -> torch.Tensor:
        """Collective, except for matmul. The result with `config`; None: the call chooses its configuration."""
        options = {} if self.job.operation == "matmul" else {"path": "fused", "ctx": self.ctx}
        if self.job.operation in ("all_gather_matmul", "matmul_reduce_scatter"):
            options["rows"] = self.rows
        if self.scales:
            options |= {"x_scale": self.scales.x, "w_scale": self.scales.w, "fast_accum": self.job.fast_accum}
        return getattr(operators, self.job.operation)(self.x, self.w, config=config, **options)

    def library(self) -> torch.Tensor:
        """This rank's local GEMM alone, by torch (cuBLAS on GPUs)."""
        if self.scales is None:
            return torch.mm(self.gathered, self.w.t())
        y = self.scales.x.new_empty((len(self.gathered), len(self.w)), dtype=result_dtype(self.job.dtype))
        multiply_scaled_into(y, self.gathered, self.w, None, self.gathered_scales, self.job.precision)
        return y


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

    best, default: the chosen configuration, and the model's.
    measured: all measured candidates, the best first.
    refused: the number of candidates that were not measured, by reason.
    library_us: the local GEMM alone, by torch, on the slowest rank.
    seconds: duration of the search.
    finished: False if the budget ended it early.
    remembered: the file that stores the result.
    choice: the path that calls of this size take by default; the result applies to them only if it is fused. None for
        matmul.
    """

    problem: Job
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
    fast_accum: bool = True,
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
        matrices of these sizes, the result is stored for the layout "pointers", under which calls look it up; N of
        matmul is rounded up to whole 16 bytes, as calls of others take the same tiles.
    fast_accum: of FP8, whose operands have a scale a row, as in `tkernels.matmul`. False has results of its own.
    budget_s: seconds after which no new round begins, except the last one, among the finalists. First calls do not
        count, which compile: many shapes share their kernels.
    grid: values by field; all their combinations are tried instead of the tuner's own candidates.
    remember: store the result on disk for later processes ($TKERNELS_CACHE). False: keep it for this context only or,
        for matmul, which belongs to no context, for this process.
    measure: as timing.measure.

    Raises ValueError or TypeError for arguments that cannot be tuned, the same on every rank; RuntimeError if even the
    default does not run.
    """
    ctx = as_context(ctx, "tune: ctx")
    M, N, K = whole("tune: M", M, 1), whole("tune: N", N, 1), whole("tune: K", K, 1)
    check_torch_dtype("tune: dtype", dtype)
    check_type("tune: budget_s", budget_s, numbers.Real, "a number of seconds")
    if not budget_s >= 0:
        raise ValueError(f"tune: budget_s={budget_s} must be at least 0")
    job = Job(operation, M, N, K, dtype, layout, fast_accum)
    job.check(ctx.size)
    check_grid({} if grid is None else grid, operation)
    console = Console(stderr=True, quiet=ctx.rank > 0)  # a line with the search's stage, if it is a terminal
    with torch.no_grad(), Status(f"{job} ...", console=console) as status:
        outcome = _Search(ctx, job, budget_s, measure, status).run(grid)
    if operation != "matmul":
        outcome.choice = explain(operation, M, N, K, dtype, ctx=ctx)
    place = tuned.place(1, tuned.LOCAL) if operation == "matmul" else tuned.place(ctx.size, ctx.transport)
    record = {
        "key": dict(zip(KEY, job.key(ctx.size), strict=True)) | place,
        "config": dataclasses.asdict(outcome.best.config),
        "measured": {"M": M, "N": N, "K": K},
        "us": outcome.best.us,
        "default_us": outcome.default.us,
        "library_us": outcome.library_us,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    path = _remember(record) if remember and ctx.rank == 0 else None
    record, outcome.remembered = ctx.group.gather((record, path))[0]  # with the same date on all ranks
    (tuned_locally() if operation == "matmul" else tuned_of(ctx)).remember(record)
    for each in open_contexts():
        each.forget_calls()
    return outcome


def _remember(record: dict) -> str | None:
    try:
        return str(tuned.save(record))
    except OSError as error:
        text = f"tune: the result can't be remembered ({error}); set TKERNELS_CACHE to a folder that can be written"
        warnings.warn(text, stacklevel=3)
        return None


class _Search:
    """One search on this rank; all ranks run the same search in lockstep."""

    def __init__(self, ctx: Context, job: Job, budget_s: float, measure, status: Status):
        self.ctx, self.job, self.measure, self.status = ctx, job, measure, status
        self.began, self.budget_s = time.monotonic(), budget_s
        sizes = job.local(ctx.size)
        sizes = sizes if job.operation == "matmul" else fused_sizes(job.operation, *sizes, job.dtype, job.precision)
        layout, how = job.layout_of_calls(ctx.size), job.precision
        self.problem = problem_of(ctx, job.operation, *sizes, job.dtype, layout, precision=how)
        self.operands = [Operands(ctx, job, seed) for seed in (0, 1)]
        self.measured: dict[object, Measured] = {}
        self.library_us = 0.0
        if job.operation == "matmul":
            self.problem = replace(self.problem, ranks=1, programs=runtime.default_programs())
            M, N, _ = job.local(ctx.size)
            self.default = configs.for_precision(model.default_config(M, N, job.dtype, layout, None, True, how), how)
        else:
            by_rule = model.choose(self.problem)
            self.default = configs.with_room_for(by_rule, result_dtype(job.dtype), job.dtype, how)

    def run(self, grid: dict[str, list] | None) -> Outcome:
        if (reason := self._try(self.default)) is not None:
            raise TkernelsError(f"tune: {self.job}: the default configuration failed: {reason}")
        found, refused = product(self.default, grid, self.problem) if grid else variants(self.default, self.problem)
        usable = []
        for number, config in enumerate(found, 1):  # these calls compile, which the budget excludes
            self.status.update(f"{self.job}: comparing results, {number} of {len(found)}")
            if config == self.default or (reason := self._try(config)) is None:
                usable.append(config)
            else:
                refused[reason] += 1
        deadline = time.monotonic() + self.budget_s
        while usable and self._agreed(time.monotonic() < deadline):
            self._round(usable[:OF_A_ROUND], FIRST_ITERATIONS)
            usable = usable[OF_A_ROUND:]
        left = len(set(usable) - {self.default})
        if left:
            refused["budget: the time was over before they were measured"] += left
        # Regardless of the budget: the fastest of many candidates that were measured a few times is the luckiest one.
        finalists = sorted(self.measured, key=self._us)[:FINALISTS]
        self._round(finalists, LAST_ITERATIONS)
        default = self.measured[self.default]
        best = min([*finalists, self.default], key=self._us)
        best = best if self._us(best) <= WORTH * default.us else self.default
        measured = sorted(self.measured.values(), key=lambda one: (-one.iterations, one.us))
        measured.remove(self.measured[best])
        return Outcome(
            self.job, self.measured[best], default, [self.measured[best], *measured], self.library_us, refused,
            time.monotonic() - self.began, not left,
        )  # fmt: skip

    def _agreed(self, value):
        """Rank 0's value. Clocks differ between ranks, and a search hangs if its ranks take different branches."""
        return self.ctx.group.gather(value)[0]

    def _us(self, config) -> float:
        return self.measured[config].us

    def _try(self, config) -> str | None:
        """Collective. Why a configuration is unusable, or None if its results match the default's.

        Each pair of calls uses other operands than the pair before, so that stale data shows.
        """
        reason = None
        try:
            for operands in self.operands:
                # Twice, since two inboxes alternate: a row that is read too early comes from the call before the last.
                results = [operands.run(config) for _ in range(2)]
                if config == self.default:
                    operands.expected = results[-1]
                reason = reason or self._differs(operands.expected, results)
            self.ctx.check()
        except Exception as error:
            if self.ctx.failed:
                raise  # the ranks are out of step: this context is unusable
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]
        reason = agree(self.ctx, reason)
        return reason and reason.split(": ", 1)[1]

    def _differs(self, expected: torch.Tensor, results: list[torch.Tensor]) -> str | None:
        job = self.job
        atol, rtol = tolerance(expected.dtype, job.K, roundings=self.ctx.size + 1)
        if job.dtype in FP8:
            atol += fp8_error(job.K, job.fast_accum)
        right = all(torch.allclose(result, expected, atol=2 * atol, rtol=2 * rtol) for result in results)
        return None if right else "result: it is not the default's"

    def _round(self, configs: list, iterations: int):
        """Measure configurations alongside the default."""
        configs = list(dict.fromkeys([self.default, *configs]))
        self.status.update(f"{self.job}: measuring {len(configs)}, {iterations} times")
        names = {describe(config, self.default): config for config in configs}
        calls = {name: functools.partial(self.operands[0].run, config) for name, config in names.items()}
        timings, _ = self.measure(self.ctx, {"library": self.operands[0].library, **calls}, iterations)
        timings = self._agreed(timings)
        self.ctx.check()
        self.library_us = timings["library"].us
        for name, config in names.items():
            one = timings[name]
            self.measured[config] = Measured(config, name, one.us, one.p10_us, one.p90_us, iterations)
