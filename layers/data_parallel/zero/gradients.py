"""The path of gradients from backward to their owners: hooks and buckets.

Fills are reduced in one order on all ranks, given by the layout, whatever the order of the hooks and the streams that
they run on. A gradient that arrives early stays where autograd put it, and is copied later, on the stream that produced
it. A parameter that a rank did not use counts as zeros, so ranks may use different parameters.

Each backward is a *pass* over all fills. The pass ends automatically at the end of backward: a gradient that is still
missing then is taken from `parameter.grad` as it is, or counts as zeros. Passes accumulate in the owners' gradients.
Where backward leaves gradients in `parameter.grad`, the last pass runs when the owners' gradients are used. All ranks
must run the same passes. Whether that last one runs therefore depends on the settings, which are the same on all ranks,
and not on the gradients that a rank finds.
"""

import contextlib
import threading
import weakref
from dataclasses import dataclass, field

import torch

from tkernels.comm.errors import TkernelsError
from tkernels.layers.data_parallel.grad_bucket import GradBucket, Slice, check_gradient
from tkernels.layers.data_parallel.wire import Wire
from tkernels.layers.data_parallel.zero.layout import Shard
from tkernels.layers.lease import Lease, Slot


@dataclass(eq=False)
class _Arriving:
    """A fill in the current pass: the parameters that are missing, and the gradients that wait for the bucket.

    early: (slice, gradient, the stream on which it is ready).
    """

    shard: Shard
    bucket: "_Bucket"
    missing: dict[torch.Tensor, Slice] = field(default_factory=dict)
    early: list[tuple] = field(default_factory=list)


class _Bucket:
    """A bucket, and the fills that use it in turn."""

    def __init__(self, shards: list[Shard], capacity: int, wire: Wire, reduction: str, deliver, **options):
        self.fills, self.turn = [_Arriving(shard, self) for shard in shards], 0
        self.wire, self.reduction = wire, reduction
        self.grads = GradBucket(
            capacity,
            ranks=wire.size,
            average=False,  # the owners average, in fp32
            reduce=lambda flat: self.reduce(flat, self.open.shard.fill.rows),
            deliver=lambda reduced, slices: deliver(self.open.shard, reduced),
            **options,
        )

    @property
    def open(self) -> _Arriving | None:
        """The fill that the bucket accepts; None after the last one of a pass."""
        return self.fills[self.turn] if self.turn < len(self.fills) else None

    def reduce(self, flat: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
        """Collective. The sum over ranks of this rank's part of `flat` [elements], which is overwritten.

        For fp16 it is the mean, because the sum may overflow where the mean does not.
        """
        if flat.dtype == torch.float16:
            flat.mul_(1 / self.wire.size)
        if self.reduction == "reduce_scatter":
            return self.wire.reduce_scatter(flat, rows)
        self.wire.all_reduce(flat)
        return self.wire.part(flat, rows)


class OwnerGradients:
    """Adds the sum over ranks of each backward's gradients to `shard.grad`, and clears `parameter.grad`.

    comm_stream: where gradients are reduced. reduction: "reduce_scatter", or "all_reduce", of which owners keep a part.
    used: the parameters that have had a gradient on this rank since `discard`.
    enabled: whether backward runs passes; otherwise it leaves `parameter.grad` alone, for a later pass to take.
    """

    def __init__(self, comm_stream, dev, reduction: str):
        self.comm_stream, self.dev, self.reduction = comm_stream, dev, reduction
        self.used: set[torch.Tensor] = set()
        self.enabled = True
        self._buckets: list[_Bucket] = []
        self._order: list[_Arriving] = []
        self._fill_of: dict[torch.Tensor, _Arriving] = {}
        self._turn, self._in_pass = 0, False
        self._due = True  # whether the use of the owners' gradients needs a pass: none yet, or `left_alone` since
        self._slot = Slot(dev=dev, name="the owners' gradients")
        self._lease: Lease | None = None
        self._lock = threading.RLock()

    def add_bucket(self, shards: list[Shard], capacity: int, dtype: torch.dtype, wire: Wire):
        """Collective. Add a bucket of `capacity` elements for `shards`, which were made on the current stream."""
        device = shards[0].flat.device
        bucket = _Bucket(
            shards,
            capacity,
            wire,
            self.reduction,
            self._deliver,
            dtype=dtype,
            comm_stream=self.comm_stream,
            device=device,
            dev=self.dev,
        )
        self._buckets.append(bucket)
        lease = self._slot.acquire()
        with lease.write():
            pass  # orders later additions to the shards after the work that made them
        self._slot.release(lease)
        with self.dev.stream(self.comm_stream):
            for shard in shards:  # grow workspaces here, not in backward: growth is a barrier and stalls the device
                bucket.reduce(torch.zeros(shard.fill.elements, dtype=dtype, device=device), shard.fill.rows)

    def start(self, names: dict[torch.Tensor, str]) -> list:
        """Register the hooks, once all buckets have been added. Returns the handles.

        names: of the parameters, in the model's order.

        The hooks live as long as their parameters. They don't keep this object alive, and do nothing without it.
        """
        self._names = names
        index = {parameter: i for i, parameter in enumerate(names)}
        # One order for all buckets: the order in which backward completes their fills.
        self._order = sorted(
            (fill for bucket in self._buckets for fill in bucket.fills),
            key=lambda fill: -min(index[slice.parameter] for slice in fill.shard.fill.slices),
        )
        self._fill_of = {slice.parameter: fill for fill in self._order for slice in fill.shard.fill.slices}
        this = weakref.ref(self)

        @torch._disable_dynamo
        def ready(parameter):
            if (owner := this()) is not None:
                owner._ready(parameter)

        return [parameter.register_post_accumulate_grad_hook(ready) for parameter in names]

    @property
    def shards(self) -> list[Shard]:
        """All shards, in the order in which they are reduced."""
        return [fill.shard for fill in self._order]

    def _ready(self, parameter: torch.Tensor):
        """The hook: autograd has accumulated parameter.grad, which is ready on the current stream."""
        if not self.enabled or parameter.grad is None:
            return
        if parameter not in self._fill_of:  # an empty parameter
            parameter.grad = None
            return
        check_gradient("ZeroOptimizer", parameter, parameter.grad)  # while the gradient can still be discarded
        with self._lock:
            if self._in_pass and parameter not in self._fill_of[parameter].missing:
                self.end_pass()  # a second backward inside the first one
            if not self._in_pass:
                self._begin_pass()
                torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)
            self._take(parameter)

    def _begin_pass(self):
        self._turn, self._in_pass = 0, True
        for bucket in self._buckets:
            bucket.turn = 0
        for fill in self._order:
            fill.missing = {slice.parameter: slice for slice in fill.shard.fill.slices}

    @torch.no_grad()
    def end_pass(self):
        """Collective. Reduce what is left of the current pass, if there is one."""
        with self._lock:
            if self._in_pass:
                for parameter in [parameter for fill in self._order for parameter in fill.missing]:
                    self._take(parameter)

    def _take(self, parameter: torch.Tensor):
        """Take parameter.grad, which is ready on the current stream, and reduce the fills that are complete."""
        fill = self._fill_of[parameter]
        grad, parameter.grad = parameter.grad, None
        if grad is not None:
            self.used.add(parameter)
        fill.early.append((fill.missing.pop(parameter), grad, self.dev.current_stream()))
        self._copy(fill)
        while self._turn < len(self._order) and not self._order[self._turn].missing:
            fill = self._order[self._turn]
            self._copy(fill)
            fill.bucket.grads.flush(fill.shard.fill.elements)
            self._turn += 1
            fill.bucket.turn += 1
            if fill.bucket.open is not None:
                self._copy(fill.bucket.open)
        if self._turn == len(self._order):
            self._in_pass = self._due = False

    def _copy(self, fill: _Arriving):
        """Copy the gradients of a fill that have arrived, if the bucket is open for it.

        The copy of a large gradient also reduces it, so it waits until its fill is the next to be reduced.
        """
        if fill is fill.bucket.open and (not fill.shard.fill.large or fill is self._order[self._turn]):
            early, fill.early = fill.early, []
            for slice, grad, stream in early:
                with self.dev.stream(stream):
                    fill.bucket.grads.add(slice.parameter, grad, at=slice.start)

    def _deliver(self, shard: Shard, reduced: torch.Tensor):
        """On the comm stream: add a reduced fill to the owner's gradients."""
        if self._lease is None:
            self._lease = self._slot.acquire()
        with self._lease.write():
            if not shard.has_grad:
                shard.grad.zero_()
                shard.has_grad = True
            shard.grad.add_(reduced, alpha=shard.ctx.size if reduced.dtype == torch.float16 else 1)

    @contextlib.contextmanager
    def left_alone(self):
        """A context in which backward runs no passes. All ranks must enter it."""
        before, self.enabled, self._due = self.enabled, False, True
        try:
            yield
        finally:
            self.enabled = before

    @contextlib.contextmanager
    def collected(self):
        """Collective. A context in which the current stream uses `shard.grad`, after all passes.

        The gradients are discarded at its end. A rank whose backward reached no parameter runs a pass of zeros here,
        since the other ranks have run one. Raises TkernelsError for a gradient that no pass takes.
        """
        self.end_pass()
        if self._due:
            self._begin_pass()
            self.end_pass()
        late = next((parameter for parameter in self._fill_of if parameter.grad is not None), None)
        if late is not None:
            raise TkernelsError(
                f"ZeroOptimizer: {self._names[late]} has a gradient that came after backward, when the others had been "
                f"reduced; set it before backward, which adds to it, or run backward inside of no_sync() (stage=1), "
                f"which leaves all gradients to step()"
            )
        for bucket in self._buckets:
            bucket.grads.finish()
        try:
            with self._lease.read():
                yield
        finally:
            self.discard()

    def discard(self):
        """Collective if a pass is open. Discard the gradients so far, including those in `parameter.grad`."""
        with self._lock:
            for parameter in self._fill_of:
                parameter.grad = None
            self.end_pass()
            for fill in self._order:
                fill.shard.has_grad = False
            if self._lease is not None:
                self._slot.release(self._lease)
            self._lease = None
            self.used.clear()
            self._due = True
