"""What each rank of bench.sweep does: make a problem's operands, check our call, and time it beside those of others."""

import dataclasses
import time

import torch

import tkernels
from bench.baselines import gathering, multiplication
from bench.compile import compile_ahead
from bench.harness import usable_baselines, wrong
from bench.problem import TF32_RTOL, TORCH_ROUNDINGS, Case, Problem, as_bytes, dequantized, tf32_error
from tkernels.activations import activation_reference
from tkernels.choice import product_way
from tkernels.comm.context import Context
from tkernels.configs import FP8, result_dtype
from tkernels.gemm import alignment_of, problem_of_product
from tkernels.library import in_precision
from tkernels.model import LIBRARY
from tkernels.paths import choose_path
from tkernels.quantize import quantize_reference
from tkernels.rounding import fp8_error, tolerance
from tkernels.timing import agree, measure

CHECKED = 1024  # rows and columns that are compared with fp64
ROWS_AT_ONCE = 4096  # of a result, compared with torch's


class Product:
    """A local product's operands on this GPU. problem: bench.sweep.Drawn; empty: of any contents, for the compiler."""

    def __init__(self, ctx: Context, problem, empty: bool = False):
        self.problem, self.device, dtype = problem, ctx.device, result_dtype(problem.torch_dtype)
        self.case = case_of(problem, problem.layout)
        generator = torch.Generator(ctx.device).manual_seed(problem.number)

        def matrix(rows, columns, turned):
            shape = (columns, rows) if turned else (rows, columns)
            made = torch.empty(shape, dtype=dtype, device=ctx.device)
            made = made if empty else made.normal_(generator=generator)
            return made.t() if turned else made

        M, N, K = problem.M, problem.N, problem.K
        self.x, self.w = matrix(M, K, problem.layout[1] == "T"), matrix(N, K, problem.layout[0] == "N")
        self.bias = matrix(1, N, False)[0] if problem.bias else None
        self.x_scale = self.w_scale = None
        if problem.torch_dtype in FP8:
            (self.x, self.x_scale), (self.w, self.w_scale) = (
                quantize_reference(each, "row", problem.torch_dtype) for each in (self.x, self.w)
            )

    def ours(self) -> torch.Tensor:
        scaling = {}
        if self.x_scale is not None:
            scaling = {"x_scale": self.x_scale, "w_scale": self.w_scale, "fast_accum": self.problem.fast_accum}
        return tkernels.matmul(self.x, self.w, self.bias, self.problem.activation, **scaling)

    def others(self) -> dict:
        multiply = multiplication(self)

        def torchs():
            return activation_reference(multiply(self.x, self.x_scale, self.bias), self.problem.activation)

        return {"cuBLAS": torchs}

    def path(self) -> str:
        each = self.problem
        y = torch.empty((each.M, each.N), dtype=self.case.result_dtype, device="meta")
        problem = problem_of_product(self.x, self.w, y, each.precision, each.activation, each.bias)
        return product_way(problem)[0]

    def wrong(self, y: torch.Tensor) -> str | None:
        """What is wrong with a result: samples against fp64, all of it against torch's."""
        problem = self.problem
        if tuple(y.shape) != (problem.M, problem.N) or y.dtype != self.case.result_dtype or not y.is_contiguous():
            return f"the result is {y.dtype} {tuple(y.shape)} with strides {y.stride()}"
        rows, columns = (_sample(size, self.device) for size in y.shape)
        x, w = ((self.x, self.x_scale), (self.w, self.w_scale))
        want = part_of(x, rows).double() @ part_of(w, columns).double().t()
        want = activation_reference(
            want if self.bias is None else want + self.bias[columns].double(), problem.activation
        )
        roundings = 1
        if self.path() == LIBRARY:  # it rounds before an activation too, and before a bias that cuBLAS can't add
            roundings += bool(problem.activation) + (problem.bias and problem.torch_dtype in FP8)
            if problem.torch_dtype.itemsize == 2:
                roundings = TORCH_ROUNDINGS
        atol, rtol = allowed(problem, roundings)
        if text := _off(y[rows][:, columns], want, atol, rtol, "the exact product"):
            return text
        theirs, (atol, rtol) = self.others()["cuBLAS"](), allowed(problem, TORCH_ROUNDINGS)
        for first in range(0, problem.M, ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            if text := _off(y[some], theirs[some].float(), 2 * atol, 4 * rtol, "torch's result"):
                return text
        return None


class Fused:
    """A fused operation's operands on this rank, and the calls; the interface of Product."""

    def __init__(self, ctx: Context, problem, empty: bool = False):
        self.ctx, self.problem, device = ctx, problem, ctx.device
        self.gathers = problem.operation == "all_gather_matmul"
        layout = {"TT": "NT"}.get(problem.layout, problem.layout)  # a transposed x comes with a transposed w there
        self.case = case_of(problem, layout)
        self.plain = _Plain(ctx, self.case, "zeros" if empty else "normal")
        self.plain.problem, self.plain.path = problem, self.path
        columns = problem.N // ctx.size if self.gathers else problem.N
        seed = ctx.rank if self.gathers else 0  # of a reduction, all ranks have the same bias
        generator = torch.Generator(device).manual_seed(seed)
        bias = torch.randn(columns, generator=generator, device=device, dtype=self.case.result_dtype)
        self.bias = bias if problem.bias else None

    def call(self, bias, activation, path=None) -> torch.Tensor:
        options = {} if "all_reduce" in self.problem.operation else {"rows": self.plain.rows}
        operation, options = getattr(tkernels, self.problem.operation), options | self.plain.scaling
        return operation(self.plain.x, self.plain.w, bias, activation, path=path, ctx=self.ctx, **options)

    def ours(self) -> torch.Tensor:
        return self.call(self.bias, self.problem.activation)

    def others(self) -> dict:
        """The calls of others, with the epilogue. On the simulated runtime, which has none, our plain path."""
        if self.ctx.device.type != "cuda":
            return {"plain": lambda: self.call(self.bias, self.problem.activation, "plain")}
        usable, _ = usable_baselines(self.ctx, self.plain)
        calls = {}
        for name in ("serial", "torch"):
            if name in usable:
                calls[name] = lambda call=usable[name]: self.finished(call())
        if self.gathers:  # cuBLAS adds the bias
            gather, multiply = gathering(self.plain, self.ctx.group.process_group), multiplication(self.plain)

            def serial():
                y = multiply(*gather(), self.bias)[: self.problem.M]
                return activation_reference(y, self.problem.activation)

            calls["serial"] = serial
        return calls

    def finished(self, y: torch.Tensor) -> torch.Tensor:
        return activation_reference(y if self.bias is None else y + self.bias, self.problem.activation)

    def path(self) -> str:
        each = self.problem
        sent = each.M, each.K if self.gathers else each.N, each.torch_dtype
        return choose_path(self.ctx, each.operation, *sent, None, None, each.precision)

    def wrong(self, y: torch.Tensor) -> str | None:
        """What is wrong: the product against fp64, the epilogue against torch's of that product."""
        product = self.call(None, None)
        if text := wrong(self.plain, product):
            return text
        atol, rtol = allowed(self.problem, self.ctx.size + 1)
        return _off(y, self.finished(product.float()), 2 * atol, 4 * rtol, "torch's epilogue of the product")


class _Plain(Problem):
    def allowed(self) -> tuple[float, float]:
        # Of a billion elements some have a partial sum six deviations out, whose rounding errs by up to half an ulp of
        # that: three times the variance that `tolerance` counts.
        roundings = 1 if self.case.op == "all_gather_matmul" else 1 + 3 * (self.ctx.size - 1)
        if self.path() == "plain" and self.problem.torch_dtype.itemsize == 2:
            roundings += TORCH_ROUNDINGS - 1
        return allowed(self.problem, roundings)


def allowed(problem, roundings: int) -> tuple[float, float]:
    """(atol, rtol) of a result of operands of unit variance; in TF32 those of each product count."""
    atol, rtol = tolerance(result_dtype(problem.torch_dtype), problem.K + 1, roundings)
    if problem.torch_dtype in FP8:
        atol += fp8_error(problem.K, problem.fast_accum)
    if problem.precision == "tf32":
        atol, rtol = atol + tf32_error(problem.K), rtol + TF32_RTOL
    return atol, rtol


def case_of(problem, layout: str) -> Case:
    """The case of bench.run that the problem is without its epilogue. layout: of those that bench.run knows."""
    op = "gemm" if problem.operation == "matmul" else problem.operation
    sizes = problem.M, problem.N, problem.K
    return Case(op, problem.shape, *sizes, problem.torch_dtype, layout, problem.fast_accum)


def part_of(operand: tuple[torch.Tensor, torch.Tensor | None], rows: torch.Tensor) -> torch.Tensor:
    """Some rows of an operand and its scales, dequantized."""
    return dequantized(*(each if each is None else as_bytes(each)[rows].view(each.dtype) for each in operand))


def as_fp32(problem) -> str:
    """How fp32 is multiplied beside the problem."""
    return "tf32" if problem.dtype == "tf32" else "ieee"


def _sample(size: int, device) -> torch.Tensor:
    """Which of so many rows or columns are compared: the first, the last, and some between them."""
    if size <= CHECKED:
        return torch.arange(size, device=device)
    ends, part = torch.arange(CHECKED // 4, device=device), CHECKED // 4
    between = torch.randint(part, size - part, (CHECKED - 2 * part,), device=device)
    return torch.cat([ends, between, size - 1 - ends])


def _off(got: torch.Tensor, want: torch.Tensor, atol: float, rtol: float, what: str) -> str | None:
    bad = ~((got.to(want.dtype) - want).abs() <= atol + rtol * want.abs())  # so that NaN is bad
    if not bad.any():
        return None
    row, column = (int(at) for at in bad.nonzero()[0])
    values = f"got {float(got[row, column]):g}, want {float(want[row, column]):g}"
    return f"{int(bad.sum())} of {got.numel()} elements are off {what}, first ({row}, {column}): {values}"


def opened(ctx: Context, problem, empty: bool = False) -> Product | Fused:
    return (Product if problem.operation == "matmul" else Fused)(ctx, problem, empty)


def compile_problems(ctx: Context, problems: list, budget_s: float) -> dict[str, str]:
    """Collective. Compile what the problems launch, several kernels at a time. Returns what failed, by problem.

    Does nothing on the simulated runtime.
    """
    if ctx.device.type != "cuda":
        return {}
    deadline = time.monotonic() + budget_s

    def call(problem):
        if agree(ctx, "late" if time.monotonic() > deadline else None) is None:
            with in_precision(as_fp32(problem)):
                opened(ctx, problem, empty=True).ours()

    with torch.no_grad():
        calls = {str(problem): lambda problem=problem: call(problem) for problem in problems}
        return compile_ahead(ctx, calls, done=lambda number: None, all_kernels=ctx.size == 1)


def measure_problem(ctx: Context, problem) -> dict:
    """Collective. The record of a problem, or {"refused": why}."""
    with torch.no_grad(), in_precision(as_fp32(problem)):
        one = opened(ctx, problem)
        y = one.ours()
        ctx.check()
        if reason := agree(ctx, one.wrong(y)):
            return {"refused": reason}
        del y
        peak = _peak_bytes(ctx, one)
        if not (others := one.others()):
            return {"refused": "no other way runs here"}
        timings, last = measure(ctx, {"ours": one.ours, **others}, problem.iterations)
        reason = one.wrong(last["ours"]) if isinstance(one, Product) and problem.number % 8 == 0 else None
        ctx.check()
    if reason := agree(ctx, reason):
        return {"refused": f"a timed call: {reason}"}
    operands = (one.x, one.w) if isinstance(one, Product) else (one.plain.x, one.plain.w)
    return {
        **dataclasses.asdict(problem), "op": "sweep", "shape": problem.shape, "problem": str(problem),
        "ranks": ctx.size, "transport": ctx.transport, "path": one.path(), "alignment": alignment_of(*operands),
        "iterations": problem.iterations, "ours_us": timings["ours"].us, "ours_p90_us": timings["ours"].p90_us,
        "others_us": {name: timings[name].us for name in others}, "peak_bytes": peak,
    }  # fmt: skip


def _peak_bytes(ctx: Context, one) -> int:
    """The most memory that our call takes beside its operands and its result."""
    if ctx.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = one.ours()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - y.untyped_storage().nbytes()
