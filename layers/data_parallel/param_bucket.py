"""Buckets: contiguous gradients of parameters and, with shards, contiguous values; which stream uses them when.

The gradients of a bucket are a slot of the lifetime core (`tkernels.layers.lease`), with one tenancy after the other:

    tenancy               written by                                     read by
    as `.grad` says       the stream on which backward begins
    accumulated           the streams of hooks and of fused kernels
    reduced               the comm stream, in place                      the stream of backward's caller

The reduction is therefore ordered after every kernel that wrote a gradient, on whatever stream, and after nothing else.
With shards the values are a slot of their own:

    gathered              the comm stream, in place                      the streams of forward and backward
    updated               the stream of the optimizer, its shard
"""

import sys
import weakref

import torch
from torch import nn

from tkernels.comm.errors import LeaseError
from tkernels.comm.fence import current_stream
from tkernels.comm.regions import round_up
from tkernels.layers.data_parallel.layout import FlatLayout
from tkernels.layers.data_parallel.values import Buffer, Values
from tkernels.layers.data_parallel.wire import Wire
from tkernels.layers.grad_hooks import GradMark
from tkernels.layers.lease import Lease
from tkernels.layers.owners import leave_in_parts

# For the error of ranks that have stepped, and of those that have not.
NO_STEP = "shards without a step (torch.amp.GradScaler skips it on one rank alone; ShardedGradScaler does on all)"
ALIGN_BYTES = 128  # alignment of a parameter in its bucket: whole cache lines, and more than TMA requires


class Levels:
    """Sums gradients inside an instance and, if there are several, across them; gathers values inside one."""

    def __init__(self, whole: Wire, sharded: bool, instances: int, average: bool):
        self.whole = whole
        self.inside, self.across = whole.split(instances) if instances > 1 else (whole, None)
        self.sharded = sharded
        self.num_shards, self.shard = (self.inside.size, self.inside.rank) if sharded else (1, 0)
        self._factor = 1 / whole.size if average else 1
        # What a rank contributes of a sum over ranks, so that the next one counts it once: all that have it do so.
        self.share = (whole.size if average else 1) / (instances if sharded else whole.size)

    def reduce(self, grads: torch.Tensor):
        """Collective. The sum or mean over all ranks, in place; with shards, of this rank's part."""
        if not self.sharded:
            self.inside.all_reduce(grads, self._factor)
            return
        shard = self.inside.reduce_scatter(grads, factor=self._factor)
        if self.across is not None:
            self.across.all_reduce(shard)


class ParamBucket:
    """Parameters with contiguous gradients, which are reduced together.

    grads: [n], where n is a multiple of the number of shards; zero between the parameters. values: of the parameters,
    if they are sharded, or None. owned: the parameters, or the shard, that this rank's optimizer updates, each with its
    `main_grad`. given: what each of them gets as `.grad`: the memory of its `main_grad`, or a part of `cast`, a copy in
    the parameters' dtype.

    The `.grad` of a parameter in a shard is a GradMark's. Whoever drops or zeroes that, as the module's own zero_grad
    does, has dropped the gradient.
    """

    def __init__(self, name: str, parameters: list[nn.Parameter], grad_dtype, levels: Levels, comm_stream, dev):
        self.name, self.parameters, self.levels, self.comm_stream, self.dev = name, parameters, levels, comm_stream, dev
        first = parameters[0]
        self._kind = first.dtype, first.device
        grad_dtype = first.dtype if grad_dtype is None else grad_dtype
        align = ALIGN_BYTES // min(first.element_size(), grad_dtype.itemsize)
        numel = max(sum(round_up(parameter.numel(), align) for parameter in parameters), 1)
        rows = round_up(numel, align * levels.num_shards) // levels.num_shards
        self.layout = FlatLayout(parameters, (rows,) * levels.num_shards, align)

        self.grads = Buffer(self.layout.numel, first, grad_dtype, dev, f"gradients of {name}")
        self.zero()
        for parameter, view in zip(parameters, self.layout.views(self.grads.slot.tensor), strict=True):
            parameter.main_grad = view
        self._own = self.layout.part(self.grads.slot.tensor, levels.shard)  # in which sums over ranks are valid
        self.values, self.owned = None, parameters
        if levels.sharded:
            self.values = UpdatedValues(name, self.layout, levels.inside, comm_stream, dev)
            self.owned = [self.values.shard]
            self.values.shard.main_grad = self._own
        self.cast, self.given = None, {owned: owned.main_grad.view_as(owned.main_grad) for owned in self.owned}
        self._marks: dict[nn.Parameter, GradMark] = {}  # of parameters in a shard
        weakref.finalize(self, _take_off, self._marks).atexit = False
        self._seen = 0  # torch's write count of a shard's .grad, once it was delivered, or changed by us
        self._outside = False  # whether no_sync has left more outside of the shard
        self._taken = set()  # of `owned`, those whose `.grad` was taken off, which they get back though frozen since
        if grad_dtype != first.dtype:
            self.cast = self._own.to(first.dtype)
            views = (self.cast,) if levels.sharded else self.layout.views(self.cast)
            self.given = {owned: view.view_as(view) for owned, view in zip(self.owned, views, strict=True)}
        self._references = max(map(self._references_to, self.given))  # that nobody else holds

    def __repr__(self):
        return f"{self.name} ({len(self.parameters)} parameters, {self.grads.slot.tensor.numel()} elements)"

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter still has its dtype and device or, with shards, lies in the buffer that is gathered."""
        if self.values is None:
            return (parameter.dtype, parameter.device) == self._kind
        return self.values.holds(parameter)

    @property
    def lease(self) -> Lease:
        """The tenancy in which gradients accumulate."""
        if self.grads.lease.state == "sealed":
            self.grads.end()  # they have been read, and others come: deferred ones, in no_sync
        return self.grads.lease

    @property
    def delivered(self) -> bool:
        """Whether somebody may still use the gradients: they have not been set to None."""
        return any(owned.grad is not None for owned in self.owned)

    @property
    def dropped(self) -> list[nn.Parameter]:
        """Parameters in a shard whose own `.grad` somebody has dropped, zeroed or replaced."""
        marks = self._marks.items() if self.delivered else ()
        return [each for each, mark in marks if not mark.is_on(each)]

    @property
    def overridden(self) -> list[nn.Parameter]:
        """Those whose own `.grad` is another tensor or, of one element, which can be scaled, not zeroed."""
        return [
            each
            for each in self.dropped
            if each.grad is not None
            and (each.grad is not self._marks[each].nan or each.numel() == 1 and each.grad.isnan().item())
        ]

    @property
    def changed(self) -> bool:
        """Whether somebody else has written to a shard's gradient since it was delivered."""
        return self.values is not None and self.delivered and self.owned[0].grad._version != self._seen

    @property
    def must_be_shared(self) -> bool:
        """Whether `take_over` changes a sum over ranks that is to be added to."""
        return self.delivered and (self.values is not None or self.levels.share != 1.0)

    def drop(self):
        for parameter in (*self.parameters, *self.owned):
            parameter.grad = None
        self._outside = False

    def zero(self):
        with self.grads.changed() as grads:
            grads.zero_()

    @torch.no_grad()
    def prepare(self, taken=frozenset()) -> list[nn.Parameter]:
        """Let `main_grad` be what `.grad` says, which may have been dropped, changed or replaced. May be repeated.

        taken: parameters whose `main_grad`, if it is to be zero, may stay as it is. Returns those of which it does.
        """
        dropped = self.dropped
        if dropped and len(dropped) == len(self.parameters):
            for owned in self.owned:
                owned.grad, self._outside = None, False
        self._leave_kept()
        if not self.delivered:
            if self.values is not None:  # whoever changes a shard's `.grad` changes what is between parameters, too
                self.zero()
                return []
            if others := set(self.parameters).difference(taken):
                with self.grads.changed():
                    torch._foreach_zero_([each.main_grad for each in others])
            self.grads.end()
            return [each for each in self.parameters if each in taken]
        replaced = {owned: given for owned, given in self.given.items() if owned.grad is not given}
        if self._outside and (replaced or self.changed):
            raise LeaseError(
                f"the gradients of {self.name} that no_sync has accumulated are changed in this rank's shard, but lie "
                f"outside of it too; discard all by ddp.zero_grad(), and scale or clip after the backward that reduces"
            )
        if replaced or self.cast is not None:
            with self.grads.changed():
                for owned, given in replaced.items():
                    if owned.grad is None:
                        given.zero_()
                    else:
                        given.copy_(owned.grad)
                        owned.grad = given
                if self.cast is not None:  # told by the value: torch counts no writes of a graph's replay, or to .data
                    self._own.copy_(torch.where(self.cast == self._own.to(self.cast.dtype), self._own, self.cast))
        if dropped:
            with self.grads.changed():
                for parameter in dropped:
                    parameter.main_grad.zero_()
                    if parameter.grad is None or parameter.grad is self._marks[parameter].nan:
                        self._mark(parameter)
                self.follow()
        return []

    def _leave_kept(self):
        """Move a `.grad` that was dropped, and that somebody has kept, to memory of its own: this one is used again."""
        for owned in self.given:
            if owned.grad is not self.given[owned] and self._references_to(owned) > self._references:
                kept = self.given[owned]
                self.given[owned] = kept.view_as(kept)
                kept.data = kept.clone()

    def _references_to(self, owned: nn.Parameter) -> int:
        return sys.getrefcount(self.given[owned])

    @torch.no_grad()
    def take_over(self, reduced: bool):
        """Take `.grad` off, so that gradients are added to `main_grad` alone. reduced: it is a sum over ranks."""
        if self.values is not None:
            self.values.confirm()
        if reduced and self.must_be_shared:  # the next sum over ranks is to count it once
            with self.grads.changed() as grads:
                begin = self._own.storage_offset()
                grads[:begin].zero_()
                self._own.mul_(self.levels.share)
                grads[begin + self._own.numel() :].zero_()
        for parameter in self.parameters:
            mark = getattr(self._marks.get(parameter), "nan", None)
            if not any(parameter.grad is known for known in (None, mark, self.given.get(parameter))):
                with self.grads.changed():  # set by hand or, in a shard, before it was wrapped
                    parameter.main_grad.add_(parameter.grad)
        self._taken = {owned for owned in self.owned if owned.grad is not None}
        self.drop()

    def pieces(self) -> list[tuple[nn.Parameter, torch.Tensor, tuple[int, int]]]:
        """All parameters, each with the part of its gradient that this rank's shard has, and which elements that is."""
        pieces = [self.layout.piece(index, self.levels.shard) for index in range(len(self.parameters))]
        return [
            (parameter, parameter.main_grad.view(-1)[first:last], (first, last))
            for parameter, (first, last) in zip(self.parameters, pieces, strict=True)
        ]

    def reduce(self):
        """Collective. Sum the gradients on the comm stream, behind all work that accumulated them."""
        self.grads.end()
        with self.dev.stream(self.comm_stream), self.grads.lease.write(self.comm_stream) as grads:
            self.levels.reduce(grads)
            self.follow()
        if self.values is not None:
            self.values.updatable = True

    def follow(self):
        """Let a copy of the gradients in another dtype be what `main_grad` says, on the current stream."""
        if self.cast is not None:
            self.cast.copy_(self._own)
        self._look()

    def deliver(self, stream, reduced: bool):
        """Let `.grad` be the sum over ranks or, if it is not reduced, what this rank has accumulated."""
        if not reduced:
            if self.cast is not None:
                with self.dev.stream(stream), self.lease.write(stream, ordered=True):
                    self.follow()
            self.grads.read(stream)
        for owned, given in self.given.items():
            if owned.requires_grad or owned in self._taken:
                owned.grad = given
        for parameter in self.parameters if self.values is not None else ():
            self._mark(parameter)
        self._outside = not reduced and self.values is not None
        self._look()

    def _look(self):
        if self.values is not None and self.delivered:
            self._seen = self.owned[0].grad._version

    def _mark(self, parameter: nn.Parameter):
        self._marks[parameter] = GradMark.put_on(parameter, self._marks.get(parameter))

    def finish(self, stream):
        """Order `stream` behind the reduction and, with shards, behind all readers of the values that it may update."""
        self.grads.read(stream)
        if self.values is not None and self.values.updatable:
            self.values.begin_update(stream)


class UpdatedValues(Values):
    """Values of which this rank's optimizer updates `shard` [n / ranks], a part of the buffer.

    Values are gathered after the step of an optimizer of torch's. Of other updates nothing is told, so what is known is
    kept apart. updatable: gradients are reduced, and values not gathered since. updating: the optimizer may be writing
    the shard. Even once values were gathered in forward it may still do so, until `confirm`.
    """

    shard = None  # while it is being made, which may fail

    def __init__(self, name: str, layout: FlatLayout, wire: Wire, comm_stream, dev):
        super().__init__(name, layout, wire, comm_stream, dev)
        self.shard = nn.Parameter(self.part)
        self.forget_update()

    def __del__(self):
        if self.shard is not None and not self.unwritten:
            why = (
                f"the parameters of {self.name} were updated by each rank for itself, and their OverlappedDDP was "
                f"dropped before they were gathered; call start_param_sync() or remove() of it on every rank after the "
                f"last step, or load a state dict"
            )
            leave_in_parts(self.layout.parameters, why)

    @property
    def unwritten(self) -> bool:
        """Whether torch has seen no write to the shard since the values were gathered."""
        return self._gathered == self.shard._version

    @property
    def awaits_gather(self) -> bool:
        """Whether the shard may have been updated, although torch has seen no write, and is to be gathered."""
        return self._expected or not self.unwritten

    @property
    def stale(self) -> bool:
        """Whether the shard may have been updated, and the values have not been gathered since."""
        return self.updating or not self.unwritten

    def expect_update(self):
        """Go on expecting an update although the values were gathered: the optimizer may not have run yet."""
        self._expected = True

    def confirm(self):
        """Expect no update any more, unless there was one: the next pass begins."""
        if not self.stale:
            self._expected = False

    def forget_update(self):
        self.updating = self.updatable = False
        self._updaters = []  # the streams of the optimizer
        self._expected = False  # whether the optimizer's turn has begun
        self._gathered = self.shard._version  # torch's write count of the shard when the values were gathered

    def begin_update(self, stream):
        """The optimizer's turn: `stream` may update the shard, behind all readers."""
        if not self.updating:
            self.buffer.end()
            self.updating = self._expected = True
        if stream not in self._updaters:
            with self.buffer.lease.write(stream):
                self._updaters.append(stream)

    def gather(self, stepped: bool = False):
        """Collective. Gather on the comm stream, behind the update on this stream and those of `begin_update`.

        stepped: an optimizer has, which torch need not have counted as a write.
        """
        where = None if stepped or not self.unwritten else NO_STEP
        self.begin_update(current_stream(self.dev))
        if where is None:
            self.outdate()
        for stream in self._updaters:
            with self.buffer.lease.write(stream):
                pass  # the optimizer's kernels have been launched: records them as writes
        self._gather(where=where)
        self.forget_update()

    def ready(self):
        if self.stale:
            raise LeaseError(
                f"the parameters of {self.name} have been updated by each rank for itself, and not been gathered; call "
                f"start_param_sync() on every rank, or the OverlappedDDP itself, before they are used"
            )
        super().ready()


def _take_off(marks: dict[nn.Parameter, GradMark]):
    """Parameters that outlive their bucket have no gradient."""
    for parameter, mark in marks.items():
        if parameter.grad is mark.nan:
            parameter.grad = None
