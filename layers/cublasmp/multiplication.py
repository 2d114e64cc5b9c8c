"""Matmul and matmul: nvmath's stateful and functional APIs for multiplying distributed matrices.

Plans. A call is understood (`_understand`), which gives the problem and, of one rank, what is wrong with the call. The
ranks exchange these (`_everyones`) and raise one error, or each makes its `Plan`. A Matmul keeps its plan. `matmul`
keeps plans by context and problem, whose `totals` are alike on all ranks, so that all of them find one or none does.
"""

import contextlib
import dataclasses
import logging
import pickle
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tkernels.comm import Context, as_context
from tkernels.comm.arguments import check_flags, real
from tkernels.comm.errors import TkernelsError
from tkernels.configs import FP8
from tkernels.dispatch import refuse_transformed
from tkernels.gemm import precision
from tkernels.layers.cublasmp.distributions import Distribution
from tkernels.layers.cublasmp.operands import Home, bring, take_back
from tkernels.layers.cublasmp.options import (
    MatmulComputeType,
    MatmulEpilog,
    MatmulOptions,
    MatmulPlanPreferences,
    MatmulQuantizationScales,
    given,
    transposes,
)
from tkernels.layers.cublasmp.plan import Outcome, Plan, meeting
from tkernels.layers.cublasmp.problem import Operand, Problem, resolve, survey

MAX_PLANS = 256  # that `matmul` keeps per context; the oldest is evicted first

_plans: "weakref.WeakKeyDictionary[Context, dict[Problem, Plan]]" = weakref.WeakKeyDictionary()


class InvalidMatmulState(TkernelsError):
    """A Matmul was used before plan(), without operands, or after free()."""


class _Request(NamedTuple):
    """One rank's call, with operands and inputs as torch tensors where the context works."""

    home: Home
    operands: dict
    inputs: dict
    problem: Problem
    scalars: tuple[float, float]
    scales: dict[str, torch.Tensor]


def _understand(
    ctx, operands: dict, distributions, alpha, beta, qualifiers, scales, options, preferences, epilog, inputs, stream,
    home: Home | None = None, totals=None,
) -> _Request | Exception:  # fmt: skip
    """This rank's request, or what is wrong with it, to be raised where the ranks meet.

    home: where the operands came from, if they and the scales are torch tensors already.
    """
    try:
        _check_key(totals)
        inputs = _checked_inputs(inputs)
        refuse_transformed("cublasmp", *operands.values(), *inputs.values())
        held = {name: value for name, value in operands.items() if value is not None or name != "c"}
        with _on(ctx, stream):
            if home is None:
                home, held = bring(ctx, held)
                scales = _tensors(ctx, held["a"].dtype, scales, home)
            _, inputs = bring(ctx, inputs, home)
        operands = operands | held
        options, preferences = given(MatmulOptions, options), given(MatmulPlanPreferences, preferences)
        if operands["c"] is not None and beta is None:
            raise ValueError("with C, pass beta too")
        scalars = _scalar("alpha", alpha, 1.0), _scalar("beta", beta, 0.0)
        if operands["c"] is None and scalars[1]:
            raise ValueError(f"beta={beta}, but there is no C to scale")
        problem = _problem(
            *operands.values(), distributions, qualifiers, options, preferences, epilog, inputs, scales, totals
        )
        return _Request(home, operands, inputs, problem, scalars, scales)
    except Exception as error:
        # The ranks exchange it, and not every exception can be sent; its type says what a caller can do about it.
        kind = next((kind for kind in (ValueError, TypeError, RuntimeError) if isinstance(error, kind)), TypeError)
        return kind(str(error))


def _check_key(totals):
    try:
        if isinstance(totals, torch.Tensor):
            raise TypeError("tensors are compared element by element")
        hash(totals)
    except TypeError as error:
        raise TypeError(f"totals={totals!r}: plans are kept by it, as by a tuple (m, n, k), but: {error}") from None


def _problem(a, b, c, distributions, qualifiers, options, preferences, epilog, inputs, scales, totals) -> Problem:
    distributions = tuple(distributions) if isinstance(distributions, Iterable) else (distributions,)
    if len(distributions) != 3:
        raise ValueError(f"distributions are of A, B and D (which C shares): three, not {len(distributions)}")
    for name, distribution in zip("ABD", distributions, strict=True):
        if not isinstance(distribution, Distribution):
            raise TypeError(f"the distribution of {name} is {distribution!r}; pass Slab.X, BlockCyclic or another")
    if isinstance(epilog, bool) or not isinstance(epilog, (int, type(None))):
        raise TypeError(f"epilog={epilog!r} is no MatmulEpilog; pass MatmulEpilog.BIAS or another")
    for name, operand in (("A", a), ("B", b)):
        if operand.dtype in FP8 and operand.numel() and operand.data_ptr() % 16:
            raise ValueError(f"{name} is float8 and must begin at a multiple of 16 bytes; pass {name}.clone()")
    how = precision(a.dtype, options.fast_accum)
    if a.dtype == torch.float32 and options.compute_type is not None:
        how = "tf32" if options.compute_type == MatmulComputeType.COMPUTE_32F_FAST_TF32 else "ieee"
    return Problem(
        Operand.of(a),
        Operand.of(b),
        None if c is None else Operand.of(c),
        distributions,
        transposes(qualifiers),
        MatmulEpilog(epilog or 0),
        tuple((name, Operand.of(inputs[name])) for name in sorted(inputs)),
        options,
        preferences,
        how,
        tuple(sorted(scales)),
        totals,
    )


def _everyones(ctx: Context, request: _Request | Exception) -> list:
    """Collective. By rank: its problem and scalars, or what is wrong with its call."""
    if isinstance(request, Exception):
        return ctx.group.gather(request)
    options = dataclasses.replace(request.problem.options, logger=None)  # it is local to this rank
    totals = request.problem.totals
    try:
        pickle.dumps(totals)
    except Exception:  # not every key can be sent
        totals = repr(totals)
    return ctx.group.gather((request.problem._replace(options=options, totals=totals), request.scalars))


def _plan(ctx: Context, request: _Request | Exception, stream) -> Plan:
    """Collective. The plan of the ranks' problems. Raises the same error on every rank, and warns of slow ones."""
    layout = resolve(_everyones(ctx, request), ctx.num_programs)
    if layout.wanted:
        warnings.warn(
            f"cublasmp: {', '.join(layout.wanted).upper()} of m, n, k = {layout.m}, "
            f"{layout.n}, {layout.k} are redistributed in every call, each through the whole matrix on every rank, for "
            f"{layout.pattern}; distribute them in slabs as that takes them to avoid it",
            stacklevel=3,
        )
    with _on(ctx, stream):
        plan = Plan(ctx, request.problem, layout, request.scalars)
    (request.problem.options.logger or logging.getLogger(__name__)).info("%s", plan.outcome)
    return plan


def _checked_inputs(inputs) -> dict:
    """An epilog's inputs as a dict. Raises TypeError for anything but a dict or None."""
    if not isinstance(inputs, (Mapping, type(None))):
        raise TypeError(f"epilog_inputs is {type(inputs).__name__} and must be a dict, such as {{'bias': bias}}")
    return dict(inputs or {})


def _tensors(ctx: Context, dtype: torch.dtype, scales, home: Home) -> dict[str, torch.Tensor]:
    """The scales that were given as tensors, by matrix. Raises ValueError or TypeError for what is none.

    dtype: of A.
    """
    if dtype not in FP8:
        if scales is not None:
            raise ValueError(f"quantization_scales are for fp8 operands, but A is {dtype}; leave them out")
        return {}
    found = {}
    for name, scale in vars(given(MatmulQuantizationScales, scales)).items():
        what = f"quantization_scales: {name}"
        if isinstance(scale, (int, float)):
            scale = torch.full((1,), real(what, scale), dtype=torch.float32, device=ctx.device)
        elif scale is not None:
            scale = bring(ctx, {what: scale}, home)[1][what]
            if scale.dtype != torch.float32 or scale.shape not in ((), (1,)):
                raise ValueError(
                    f"{what} is {scale.dtype} {tuple(scale.shape)}, but must be a number, or float32 of shape () or "
                    f"(1,); scales of blocks are not supported"
                )
        if scale is not None:
            found[name] = scale
    return found


def _scalar(name: str, value, default: float) -> float:
    return default if value is None else real(name, value)


def _without_gradients(request: _Request | Exception) -> _Request | Exception:
    """The request, or what is wrong with one whose operands want gradients."""
    if isinstance(request, Exception):
        return request
    return _no_gradients(*request.operands.values(), *request.inputs.values()) or request


def _no_gradients(*tensors) -> ValueError | None:
    """What is wrong with a call whose operands want gradients."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return ValueError(
            "cublasmp computes no gradients, and an operand wants one: call under torch.no_grad(), detach it, or use "
            "tkernels.all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce, which have backward"
        )


def _on(ctx: Context, stream):
    """A context in which work is launched on `stream`: torch's or cupy's, a handle, or None for the current stream.

    Raises ValueError for any stream where there are none, TypeError for anything else.
    """
    if stream is None:
        return contextlib.nullcontext()
    if ctx.device.type != "cuda":
        raise ValueError(f"stream={stream!r}, but on the {ctx.runtime} runtime there are no streams; leave it out")
    if not isinstance(stream, torch.cuda.Stream):
        handle = getattr(stream, "ptr", stream)  # cupy's streams have it
        if type(handle) is not int:
            raise TypeError(f"stream={stream!r} must be a stream of torch or cupy, or the handle of one, an integer")
        stream = torch.cuda.ExternalStream(handle)
    return torch.cuda.stream(stream)


class Matmul:
    """D = epilog(alpha op(A) op(B) + beta C) of matrices that are distributed over the ranks of a context.

    a, b, c: this rank's parts, matrices of torch, numpy or cupy with one unit stride; results are of the same package,
        on the same device. a and b are both fp32, fp16 or bf16, or fp8: e4m3, one of them e5m2; c has the result's
        dtype and distribution. Values may change between calls where the memory is used in place
        (tkernels.layers.cublasmp.operands); see also `reset_operands`.
    distributions: of A, B and D (and C). With the epilog ALLREDUCE every rank gets all of D, and the third has no
        effect.
    qualifiers: nvmath's array, which can transpose A and B, or a string such as "TN".
    quantization_scales: of fp8, MatmulQuantizationScales, or a dict of its fields: a and b, and d of an fp8 result.
    options: MatmulOptions, or a dict of its fields.
    mesh: a mesh of one dimension, a process group or a Context; default, the current context.

        with Matmul(a, b, distributions=[Slab.Y, Slab.Y, Slab.X], qualifiers="TN") as mm:
            mm.plan(epilog=MatmulEpilog.BIAS, epilog_inputs={"bias": bias})
            d = mm.execute()

    Construction is collective. It compares the ranks' problems, but for epilogs, and raises the same error on each:
    InconsistentError, a ValueError, where they differ, ValueError or TypeError for a problem that can't be computed,
    whichever rank found it. Gradients are not supported.

    mm_traits: M, N and K over all ranks, and this rank's layouts of A, B, C and, after `plan`, D; see MMTraits.
    """

    def __init__(
        self,
        a,
        b,
        /,
        c=None,
        *,
        distributions,
        alpha=None,
        beta=None,
        qualifiers=None,
        quantization_scales=None,
        options=None,
        stream=None,
        mesh: DeviceMesh | dist.ProcessGroup | Context | None = None,
    ):
        self.ctx = as_context(mesh)
        self._asked = distributions, qualifiers, options
        self._stream, self._own_c = stream, c
        request = _understand(
            self.ctx, {"a": a, "b": b, "c": c}, distributions, alpha, beta, qualifiers, quantization_scales, options,
            None, None, None, stream,
        )  # fmt: skip
        self.mm_traits = survey(_everyones(self.ctx, request), self.ctx.num_programs).traits(self.ctx.rank)
        self._home, self._operands, self._inputs, self._scales = request.home, request.operands, {}, request.scales
        self._alpha, self._beta = request.scalars
        self._plan, self._valid, self._released = None, True, False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.free()

    def plan(self, *, preferences=None, epilog=None, epilog_inputs=None, stream=None):
        """Collective. Check the problem on all ranks and decide how to compute it; `outcome` reports the decision.

        preferences: MatmulPlanPreferences, or a dict of its fields.
        epilog: a MatmulEpilog.
        epilog_inputs: "bias" (as long as this rank's rows of D), "relu_aux" or "gelu_aux".

        Multiplies once and discards the result, so that kernels are compiled and memory is allocated before the first
        `execute`, which a CUDA graph may capture.

        Raises the same error on every rank: MismatchError where their problems differ, ValueError or TypeError for a
        problem that can't be computed, whichever rank found it.
        """
        self._check(operands=True)
        (distributions, qualifiers, options), stream = self._asked, self._stream if stream is None else stream
        with self.ctx.turn:
            request = _understand(
                self.ctx, self._operands, distributions, self._alpha, self._beta, qualifiers, self._scales, options,
                preferences, epilog, epilog_inputs, stream, self._home,
            )  # fmt: skip
            self._plan, self._inputs = _plan(self.ctx, _without_gradients(request), stream), request.inputs
            with _on(self.ctx, stream), torch.no_grad():
                self.mm_traits.d_layout = self._plan.d_layout
                a, b, c = self._operands.values()
                c = c if c is None else c.clone()
                self._plan.run(self.ctx, a, b, c, *request.scalars, self._inputs, self._scales)
        return self

    @property
    def outcome(self) -> Outcome:
        """The decisions of `plan`: pattern, algorithm, redistributed operands, communication type. After `plan`."""
        self._check(planned=True)
        return self._plan.outcome

    def execute(self, *, release_workspace: bool = False, stream=None):
        """Collective. This rank's part of D, or (D, {name: auxiliary output}) if the epilog has any.

        Launched on `stream` or else the current one, on which the operands must be ready. With order="F", D is
        Fortran-ordered. After `reset_operands` with another alpha or beta, the ranks meet on the host to compare them.
        """
        self._check(planned=True, operands=True)
        check_flags("execute", release_workspace=release_workspace)
        if release_workspace:
            raise ValueError(
                "execute: release_workspace=True, but the workspace is the context's, for all that it does; "
                "finalize() gives it back"
            )
        operands = self._operands.values()
        if error := _no_gradients(*operands, *self._inputs.values()):
            raise error
        with self.ctx.turn, _on(self.ctx, self._stream if stream is None else stream):
            result = self._plan.run(self.ctx, *operands, self._alpha, self._beta, self._inputs, self._scales)
            return take_back(self._home, result, self._own_c if self._plan.inplace else None)

    def reset_operands(
        self,
        *,
        a=None,
        b=None,
        c=None,
        alpha=None,
        beta=None,
        quantization_scales=None,
        epilog_inputs=None,
        stream=None,
    ):
        """Use other operands, scalars or epilog inputs from now on; None keeps the current one. Not collective.

        stream: on which operands are copied to a GPU, if they are not there; otherwise it has no effect.

        After `release_operands`, all operands and epilog inputs must be passed. Raises ValueError for a tensor whose
        shape, strides or dtype differ from those planned, TypeError for one of another package or device.
        """
        if all(value is None for value in (a, b, c, alpha, beta, quantization_scales, epilog_inputs)):
            raise ValueError("reset_operands: pass at least one operand, scalar or input of the epilog")
        self._reset(a, b, c, alpha, beta, quantization_scales, epilog_inputs, stream, checked=True)

    def reset_operands_unchecked(
        self,
        *,
        a=None,
        b=None,
        c=None,
        alpha=None,
        beta=None,
        quantization_scales=None,
        epilog_inputs=None,
        stream=None,
    ):
        """As `reset_operands`, without checks: the caller guarantees that the tensors match those planned."""
        self._reset(a, b, c, alpha, beta, quantization_scales, epilog_inputs, stream, checked=False)

    def _reset(self, a, b, c, alpha, beta, scales, inputs, stream, checked: bool):
        """Use these operands, scalars and inputs. checked: whether they must be as planned; otherwise they are."""
        self._check(planned=True)
        problem = self._plan.problem
        planned = problem.tensors() if checked else {}
        new = {name: value for name, value in zip("abc", (a, b, c), strict=True) if value is not None}
        new |= _checked_inputs(inputs)
        if checked:
            for name in new.keys() - planned.keys():
                raise ValueError(f"reset_operands: the problem has no {name}")
            if self._released and new.keys() != planned.keys():
                operands, inputs = ([name for name in planned if (name in "abc") == own] for own in (True, False))
                raise ValueError(
                    f"reset_operands: after release_operands() pass {', '.join(operands)} and epilog_inputs {inputs}, "
                    f"all of them"
                )
            if self._released and problem.scales and scales is None:
                raise ValueError("reset_operands: after release_operands() pass quantization_scales too")
            if beta is not None and "c" not in planned:
                raise ValueError(f"reset_operands: beta={beta}, but the problem has no C to scale")
        alpha, beta = _scalar("alpha", alpha, self._alpha), _scalar("beta", beta, self._beta)
        with _on(self.ctx, self._stream if stream is None else stream):
            if scales is not None:
                scales = self._scales | _tensors(self.ctx, problem.a.dtype, scales, self._home)
                if tuple(sorted(scales)) != problem.scales:
                    raise ValueError(
                        f"reset_operands: quantization_scales would be of {sorted(scales)}, but the problem has "
                        f"{problem.scales}"
                    )
            _, tensors = bring(self.ctx, new, self._home)
        for name, value in tensors.items() if planned else ():
            if (found := Operand.of(value)) != planned[name]:
                raise ValueError(f"reset_operands: {name} is {found}, but was planned as {planned[name]}; plan again")
        self._alpha, self._beta, self._own_c = alpha, beta, new.get("c", self._own_c)
        self._scales = self._scales if scales is None else scales
        for name, value in tensors.items():
            (self._operands if name in self._operands else self._inputs)[name] = value
        self._released = self._operands["a"] is None or self._operands["b"] is None

    def release_operands(self):
        """Drop the operands and the epilog's inputs; the plan stays. Raises InvalidMatmulState before `plan`."""
        self._check(planned=True)
        self._operands, self._own_c = dict.fromkeys("abc"), None
        self._inputs, self._scales, self._released = {}, {}, True

    def free(self):
        """Drop everything. May be repeated. Memory is freed once its last use on the stream has finished."""
        self._valid, self._plan = False, None
        self._operands, self._inputs, self._scales, self._own_c = dict.fromkeys("abc"), {}, {}, None

    def _check(self, planned: bool = False, operands: bool = False):
        if not self._valid:
            raise InvalidMatmulState("this Matmul has been freed; make a new one")
        if planned and self._plan is None:
            raise InvalidMatmulState("call plan() first, on all ranks")
        if operands and self._released:
            raise InvalidMatmulState("the operands have been released; call reset_operands() first")


def matmul(
    a,
    b,
    /,
    c=None,
    *,
    distributions,
    alpha=None,
    beta=None,
    epilog=None,
    epilog_inputs=None,
    qualifiers=None,
    quantization_scales=None,
    options=None,
    preferences=None,
    stream=None,
    mesh: DeviceMesh | dist.ProcessGroup | Context | None = None,
    totals=None,
):
    """Collective. D = epilog(alpha op(A) op(B) + beta C): Matmul's plan and execute in one call, with their arguments.

    totals: the global sizes (m, n, k), or any key that distinguishes them, the same on all ranks. The plan is then kept
        for later calls that differ only in values and scalars, and these need no communication on the host, unless
        alpha or beta is not what it was before, which the ranks then compare. None: every call plans, unless the
        context has one rank, because a rank can't infer the global sizes from its own parts: the first of two ranks has
        as many columns of 5 as of 6.
    """
    ctx = as_context(mesh)
    with ctx.turn:
        request = _understand(
            ctx, {"a": a, "b": b, "c": c}, distributions, alpha, beta, qualifiers, quantization_scales, options,
            preferences, epilog, epilog_inputs, stream, totals=totals,
        )  # fmt: skip
        plans, key, plan = _plans.setdefault(ctx, {}), None, None
        if isinstance(request, _Request) and (totals is not None or ctx.size == 1):
            key = request.problem
            plan = plans.get(key)
        request = _without_gradients(request)
        if plan is not None and isinstance(request, Exception):
            raise request
        if plan is None and ctx.capturing:
            raise TkernelsError(
                "cublasmp.matmul: a CUDA graph is being captured, and this problem has not been planned yet, which "
                "takes communication; make one like call before the capture, both with totals=(m, n, k), or use "
                "Matmul and plan() before it"
            )
        if plan is None:
            with contextlib.ExitStack() as stack:
                if plans and totals is not None:  # others may have one, and go on to its kernel on the call's stream
                    stack.enter_context(_on(ctx, stream if isinstance(request, _Request) else None))
                    stack.enter_context(meeting(ctx, "cublasmp.matmul without a plan"))
                plan = _plan(ctx, request, stream)
        if key is not None and key not in plans:
            if len(plans) >= MAX_PLANS:
                del plans[next(iter(plans))]
            plans[key] = plan
        with _on(ctx, stream):
            result = plan.run(ctx, *request.operands.values(), *request.scalars, request.inputs, request.scales)
            return take_back(request.home, result, c if plan.inplace else None)
