"""Detects when the gradients of a bucket are complete: by hooks on parameters, and by reports from fused kernels.

A gradient is *produced* where the kernel that adds it to `param.main_grad` is launched. Usually that is the hook of
this module, on the stream that autograd runs it on: the stream of the parameter's AccumulateGrad node. That is the
stream of the forward as long as nothing holds the node. Nothing here does, so every forward makes a new one. A fused or
deferred kernel is launched elsewhere: before the hook, after it, or without one. It reports the gradient itself:
`with hooks.writing(param, stream)` around the launch, or `hooks.produced(param, stream)` after it. For such a gradient
the time at which the hook fires carries no information. A layer that only sets `param.grad_added_to_main_grad` is
assumed to have launched its kernel on the hook's stream.

What hooks are given they hold, by bucket, until there are HELD_BYTES of one stream or the bucket is complete, and add
it by one kernel on that stream: a kernel and an event for each takes the host longer than a small layer's backward.

How often a gradient is produced depends on the graph: a layer that is used in two checkpoints produces it twice. So the
first pass only counts. In later passes a bucket is complete once each of its parameters has reached its count, which is
at least one: a layer that the first pass skipped may be used later. Counts never decrease, so that a layer that is
skipped occasionally keeps its count; in a pass without it, the bucket waits for `flush`.

A pass usually ends with its backward. A layer whose kernel comes later says so during backward: `hooks.defer(param)`.

A pass may begin with `main_grad` as the last one left it, where only hooks have ever brought a parameter's gradients
(`hooks.taken`): the first one is copied there, as torch's DDP does. To zero it before, and add, is two passes over
memory more.
"""

import contextlib
import math
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tkernels.comm.arguments import check_tensors, check_type
from tkernels.comm.errors import LeaseError
from tkernels.comm.fence import EventCompletion, capturing, current_stream
from tkernels.layers.lease import num_holders
from tkernels.layers.owners import disown, own, owner_of, remove_owners, weakly

HELD_BYTES = 4 << 20  # of gradients of a bucket that wait to be added to its buffer together
_ADDED = "grad_added_to_main_grad"  # on a parameter: True once a fused kernel has been launched; Megatron's name


class GradMark(NamedTuple):
    """What `.grad` of a parameter is whose gradient is elsewhere: a NaN in its shape, without memory.

    Whoever reads it finds NaN, and whoever would scale it, as torch's clip_grad_norm_ does, RuntimeError. writes:
    torch's count of them when it was made.
    """

    nan: torch.Tensor
    writes: int

    @classmethod
    def put_on(cls, param, before: "GradMark | None") -> "GradMark":
        """Let `.grad` be the mark that was made for this parameter before, unless that was written to, or another."""
        if before is None or before.nan._version != before.writes:
            nan = torch.full((), math.nan, dtype=param.dtype, device=param.device).expand(param.shape)
            before = cls(nan, nan._version)
        param.grad = before.nan
        return before

    def is_on(self, param) -> bool:
        """Whether nobody has dropped, replaced or zeroed it."""
        return param.grad is self.nan and self.nan._version == self.writes


def grad_ready_hooks(param) -> "GradReadyHooks | None":
    """The hooks of a parameter, or None: where a layer with a fused or deferred kernel reports its gradients."""
    return owner_of(param, GradReadyHooks)


def called_last(param, handle, before: Callable | None = None) -> tuple:
    """The handles that keep a hook, of register_post_accumulate_grad_hook, behind those that are registered after it.

    Others' hooks are to see the gradient before it is taken, as under torch's DDP. before: called with the parameter
    ahead of them all, and of autograd's sum.
    """
    this, number = weakref.ref(param), handle.id

    @torch._disable_dynamo
    def move(_):
        param = this()
        hooks = param._post_accumulate_grad_hooks
        if number in hooks and next(reversed(hooks)) != number:
            hooks[number] = hooks.pop(number)
        if before is not None:
            before(param)

    return handle, param.register_hook(move)


class _Gradient:
    """What is known of the gradient of a parameter.

    expected: how often it was produced in a pass that has ended, at most. by_kernel: whether a kernel has ever reported
    it. deferred: how many are to come after backward. And of this pass:
    count: how often it was produced. blank: whether `main_grad` is anything, and counts as zero. written: whether it
    has been added to, or is about to be. announced: whether a kernel has reported it, and no hook has fired since.
    """

    __slots__ = "param", "bucket", "name", "expected", "by_kernel", "deferred", "count", "blank", "written", "announced"

    def __init__(self, param, bucket, name):
        self.param, self.bucket, self.name = param, bucket, name
        self.expected, self.by_kernel, self.deferred = 0, False, 0

    def begin_pass(self):
        self.count, self.blank, self.written, self.announced = 0, False, False, False
        if getattr(self.param, _ADDED, False):  # set by a deferred kernel, and no hook has fired since
            setattr(self.param, _ADDED, False)

    @property
    def complete(self) -> int:
        """How often it is to be produced: also where there was none so far, for it may have one in this pass."""
        return max(1, self.expected)


@dataclass(slots=True)
class _Held:
    """Gradients of a bucket that autograd has produced on a stream, to be added to its buffer there."""

    stream: object
    gradients: list[tuple[_Gradient, torch.Tensor]] = field(default_factory=list)
    num_bytes: int = 0


class GradReadyHooks:
    """Adds each gradient to `param.main_grad`, and reports each bucket once per pass, when it is complete.

    params: parameters, each with `main_grad`, a view of its bucket. A parameter belongs to the newest hooks made for
        it.
    on_ready: called as `on_ready(bucket)`, inside the hook that completes the bucket, `writing`, `produced` or `flush`.
        Buckets are reported in the order in which they first appear in `buckets`, whatever the order of the hooks.
        Ranks whose graphs differ therefore still start their collectives in the same order.
    buckets: the bucket of each parameter: any object whose `lease` is the tenancy that gradients are written to.
    names: of the parameters, for messages.
    passes: what begins and ends passes by itself; kept no longer than others do. None: the caller does, by `reset` and
        `flush`. `passes.enter_backward(param)` is called before autograd accumulates a gradient,
        `passes.begin(written)` before one is taken (written: after its kernel was launched), and
        `passes.end_deferred()` after the last one that was deferred.

    counting: False for a pass whose gradients are accumulated, but not reported.
    """

    def __init__(self, params, on_ready, *, buckets, names=None, passes=None):
        self._params, self._on_ready, buckets = list(params), on_ready, list(buckets)
        names = None if names is None else list(names)
        check_type("GradReadyHooks: on_ready", on_ready, Callable, "a function of a bucket")
        for what, values in {"buckets": buckets, "names": names}.items():
            if values is not None and len(values) != len(self._params):
                raise ValueError(
                    f"GradReadyHooks: {len(values)} {what} for {len(self._params)} parameters; pass one each"
                )
        for index, param in enumerate(self._params):
            check_tensors("GradReadyHooks", **{f"params[{index}]": param})
            if not isinstance(getattr(param, "main_grad", None), torch.Tensor):
                raise ValueError(
                    f"GradReadyHooks: params[{index}] has no main_grad; set it, in the shape of the parameter, before"
                )
        self._passes = (lambda: None) if passes is None else weakref.ref(passes)
        names = names or [f"parameter {index}" for index in range(len(self._params))]
        gradients = map(_Gradient, self._params, buckets, names)
        self._gradients = {gradient.param: gradient for gradient in gradients}
        self._of = {}  # by bucket
        for gradient in self._gradients.values():
            self._of.setdefault(gradient.bucket, []).append(gradient)
        self._learned = False  # whether a pass has ended, by which one knows what to expect
        self._warned = False
        self._lock = threading.RLock()
        self.counting = True
        self.reset()
        remove_owners(self._params, GradReadyHooks)
        own(self._params, self)
        take = torch._disable_dynamo(weakly(self._take))
        enter = None if passes is None else weakly(passes.enter_backward)
        self._handles = [
            handle
            for param in self._params
            for handle in called_last(param, param.register_post_accumulate_grad_hook(take), enter)
        ]
        weakref.finalize(self, _take_off, self._handles).atexit = False  # whoever comes next finds none of them

    def remove(self):
        """Take the hooks off the parameters. May be repeated."""
        _take_off(self._handles)
        disown(self._params, self)

    @property
    def expected(self) -> dict[str, int] | None:
        """How often each gradient is produced in a pass, by name; None until the first pass has ended."""
        return {each.name: each.expected for each in self._gradients.values()} if self._learned else None

    @property
    def taken(self) -> set:
        """The parameters whose gradients hooks alone have brought, in the passes that have ended."""
        return {each.param for each in self._gradients.values() if each.expected and not each.by_kernel}

    @contextlib.contextmanager
    def writing(self, param, stream=None):
        """A context in which kernels that add to `param.main_grad` are launched on `stream` (None: the current one).

        The stream is ordered after the bucket's previous tenancy and after earlier gradients of the same parameter.
        """
        gradient = self._begin_report(param, written=False)
        self._place(gradient.bucket)
        lease, again = self._lease(gradient)
        if gradient.blank:
            self._zero(gradient, lease, stream)
        with lease.write(stream, ordered=again):
            yield param.main_grad
        self._count(gradient, by_hook=False)
        self._arrived(gradient)

    def produced(self, param, stream=None):
        """Report that a kernel that adds to `param.main_grad` was launched on `stream` (None: the current one).

        Call it where the kernel is launched: it covers all work launched on the stream so far. The caller must have
        ordered the stream behind the bucket's previous tenancy; `writing` does so itself.
        """
        gradient = self._begin_report(param, written=True)
        if gradient.blank:
            raise LeaseError(
                f"{gradient.name}: a kernel has added to its main_grad, which earlier passes had filled by hooks "
                f"alone, so that it began with the last gradient; launch the kernel inside of "
                f"grad_ready_hooks(param).writing(param), or begin the pass by the wrapper's zero_grad()"
            )
        lease, again = self._lease(gradient)
        stream = current_stream(lease.dev) if stream is None else stream
        lease.written_by(EventCompletion(stream, capturing(lease.dev)))
        if again:
            self._place(gradient.bucket, again)  # what is held of this parameter comes behind the kernel
        self._count(gradient, by_hook=False)
        self._arrived(gradient)

    def defer(self, param):
        """Announce, during backward, a gradient that `writing` or `produced` will report after it: the pass waits."""
        self._begin_report(param, written=False).deferred += 1

    @property
    def waiting(self) -> bool:
        """Whether a gradient that was deferred has yet to come."""
        return any(gradient.deferred for gradient in self._gradients.values())

    def forget_deferred(self):
        """Wait for no gradient that was deferred."""
        for gradient in self._gradients.values():
            gradient.deferred = 0

    @property
    def stale_mark(self) -> str | None:
        """The name of a parameter that is marked as added to, although nobody has reported it. None: there is none."""
        marked = (each for each in self._gradients.values() if getattr(each.param, _ADDED, False))
        return next((each.name for each in marked if not each.announced), None)

    def flush(self):
        """End the pass: report the remaining buckets, and learn from this pass how many gradients to expect."""
        with self._lock:
            while self._unreported:
                self._report()
            self._over = True
            self._learn()

    def reset(self, blank=()):
        """Begin a pass. The counts of an abandoned pass are discarded.

        blank: parameters, of `taken`, whose `main_grad` is anything, and counts as zero.
        """
        with self._lock:
            for gradient in self._gradients.values():
                gradient.begin_pass()
            for param in blank:
                self._gradients[param].blank = True
            self._unreported, self._over = list(self._of), False
            self._held = {}  # by bucket
            self._incomplete = {bucket: len(gradients) for bucket, gradients in self._of.items()}

    def zero_blank(self, stream=None):
        """Zero on `stream` (None: the current one) what has had no gradient in this pass, and was not zero before."""
        self.place_held()
        for bucket in self._of:
            self._zero_all(bucket, stream)

    def relearn(self):
        """Forget the counts: the next pass counts again, and reports nothing before `flush`."""
        self._learned = False
        for gradient in self._gradients.values():
            gradient.expected = 0

    def _take(self, param):
        """The hook. `param.grad` holds autograd's gradient for this parameter, if there is one."""
        grad, param.grad = param.grad, None
        gradient = self._gradients[param]
        if torch.is_grad_enabled():
            raise LeaseError(
                f"{gradient.name}: backward(create_graph=True) makes gradients with a graph of their own, which "
                f"sums over ranks would lose; use torch.autograd.grad for derivatives of gradients"
            )
        marked, announced = getattr(param, _ADDED, False), gradient.announced
        self._begin(written=marked and not announced)
        gradient.announced = False
        if marked:
            setattr(param, _ADDED, False)  # and the gradient is a placeholder
            if not announced:  # its kernel is assumed to be on the current stream
                self.produced(param)
                gradient.announced = False
        elif grad is not None:
            self._hold(gradient, grad)
            self._count(gradient, by_hook=True)

    def _hold(self, gradient: _Gradient, grad: torch.Tensor):
        """Add a gradient of the current stream to its bucket: with others of this stream, if its memory is its own.

        Else somebody may write there, as a function that returns one buffer in each backward.
        """
        bucket = gradient.bucket
        with self._lock:
            lease, again = self._lease(gradient)
            stream, held = current_stream(lease.dev), self._held.get(bucket)
            if held is None or again or held.stream != stream:
                self._place(bucket)
                with lease.write(stream):
                    pass  # what kernels add on this stream, and report afterwards, comes behind the last tenancy
                held = self._held[bucket] = _Held(stream)
            held.gradients.append((gradient, grad))
            held.num_bytes += grad.nbytes if _has_own_memory(grad) else HELD_BYTES
            if again or held.num_bytes >= HELD_BYTES or self._passes() is None:
                self._place(bucket, again)

    def place_held(self):
        """Add what is held."""
        for bucket in list(self._held):
            self._place(bucket)

    def _place(self, bucket, again: bool = False):
        """Add what is held of a bucket to its buffer. again: behind all that was added before."""
        with self._lock:
            if (held := self._held.pop(bucket, None)) is None:
                return
            lease, copied, added = bucket.lease, ([], []), ([], [])
            with lease.dev.stream(held.stream), lease.write(held.stream, ordered=again):
                for gradient, grad in held.gradients:
                    main_grad, blank = gradient.param.main_grad, gradient.blank
                    if blank and grad.layout is not torch.strided:
                        main_grad.zero_()
                        blank = False
                    gradient.blank = False
                    for tensors, each in zip(copied if blank else added, (main_grad, grad), strict=True):
                        tensors.append(each)
                if copied[0]:
                    torch._foreach_copy_(*copied)
                if added[0]:
                    torch._foreach_add_(*added)

    def _report(self):
        bucket = self._unreported[0]
        self._place(bucket)
        self._unreported.pop(0)
        self._zero_all(bucket)
        self._on_ready(bucket)

    def _zero_all(self, bucket, stream=None):
        for gradient in self._of[bucket]:
            if gradient.blank:
                self._zero(gradient, bucket.lease, stream)

    def _zero(self, gradient: _Gradient, lease, stream=None):
        gradient.blank = False
        with lease.dev.stream(current_stream(lease.dev) if stream is None else stream), lease.write(stream):
            gradient.param.main_grad.zero_()

    def _arrived(self, gradient: _Gradient):
        if gradient.deferred:
            gradient.deferred -= 1
            if not self.waiting and (passes := self._passes()) is not None:
                passes.end_deferred()

    def _begin(self, written):
        if (passes := self._passes()) is not None:
            passes.begin(written)

    def _begin_report(self, param, written) -> _Gradient:
        if not isinstance(param, torch.Tensor) or param not in self._gradients:
            raise ValueError(
                "GradReadyHooks: a gradient was reported for what is none of its parameters; ask "
                "grad_ready_hooks(param) for the hooks of a parameter"
            )
        self._begin(written)
        self._gradients[param].by_kernel = True
        return self._gradients[param]

    def _lease(self, gradient: _Gradient):
        """Called where a gradient is written: its bucket's lease, and whether the pass has had one of the parameter."""
        if gradient.bucket in self._unreported:
            lease, again = gradient.bucket.lease, gradient.written
            gradient.written = True
            return lease, again
        if self._over:
            raise LeaseError(
                f"{gradient.name}: a gradient was produced after the end of the pass, when its bucket had been handed "
                f"on; a layer whose kernel comes after backward announces it there, by "
                f"grad_ready_hooks(param).defer(param)"
            )
        raise LeaseError(
            f"{gradient.name}: a gradient was produced after its bucket had been handed on; {gradient.expected} were "
            f"expected, as in earlier passes. Accumulate inside of no_sync(), all backwards but the last; after one "
            f"that has failed begin by the wrapper's zero_grad(); call relearn() before a pass whose graph is new, or "
            f"don't overlap if it often is"
        )

    def _count(self, gradient: _Gradient, by_hook):
        with self._lock:
            if not by_hook:
                gradient.announced = True
            if not self.counting:
                return
            gradient.count += 1
            if not self._learned:
                return
            if gradient.count == gradient.complete:
                self._incomplete[gradient.bucket] -= 1
            while self._unreported and not self._incomplete[self._unreported[0]]:
                self._report()

    def _learn(self):
        gradients = self._gradients.values()
        if not any(gradient.count for gradient in gradients):
            return
        missing = [gradient.name for gradient in gradients if self._learned and gradient.count < gradient.complete]
        if missing and not self._warned:
            self._warned = True
            warnings.warn(
                f"{missing[0]} and {len(missing) - 1} more had no gradient in this pass, or fewer than in earlier "
                f"ones: their buckets, and those behind them, waited for the end of the pass. Freeze a parameter that "
                f"never has one, before it is wrapped; if there are fewer for good, call relearn()",
                stacklevel=3,
            )
        self._learned = True
        for gradient in gradients:
            gradient.expected = max(gradient.count, gradient.expected)


def _has_own_memory(grad: torch.Tensor) -> bool:
    return grad.layout is torch.strided and num_holders(grad.untyped_storage()._cdata) == 1


def _take_off(handles: list):
    while handles:
        handles.pop().remove()
