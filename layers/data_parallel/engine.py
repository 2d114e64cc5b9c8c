"""The engine under `fully_shard`: when a unit's parameters are gathered, its gradients reduced, its memory handed on.

A *unit* is what one call of fully_shard names: modules whose parameters are gathered together, while they compute.

                 gather               use                  (forward, backward, recomputation)
    SHARDED  ------------> GATHERED ------------> WHOLE    the module has the whole parameters
             <------------          <------------
                release              unuse

A *root* is the unit whose forward runs first, with all units inside it. Its engine knows the order of the units from
the last iteration, and gathers ahead:

    stream     compute                          comm
    forward    unit 0                           gather unit 1
               unit 1                           gather unit 2, into the memory of unit 0
    backward   unit 1                           gather unit 0
               pack the gradients of unit 1     reduce-scatter them
               unit 0

Units that are given back after forward share the slots of a pool (pools.py), whose addresses never change. Those that
contain units, the root above all, and those that are kept have memory of their own.

Who waits for whom is said by leases (lease.py): of a pool's slots, of the buffers of gradients, and of all shards and
their gradients: a gather comes after the optimizer's step, a reduction after what was done with the gradients before,
and what comes after backward after both.

A unit without modules is *resident* (resident.py): its parameters are a caller's, and whole for good. No call of a
module tells when its gradients are complete, so these units are reduced in their order, once all gradients are there of
a unit and of those before it, and at the end of backward.
"""

import collections
import contextlib
import copy
import dataclasses
import enum
import itertools
import logging
import numbers
import warnings
import weakref

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from tkernels.comm import LeaseError
from tkernels.comm.fence import current_stream
from tkernels.layers.data_parallel.backward import Backward, backward_id, backward_runs
from tkernels.layers.data_parallel.param_group import DataParallelRanks, Parameter, ParamGroup
from tkernels.layers.data_parallel.pools import Bucket, MaxPoolAllocator, MaxPoolPlan
from tkernels.layers.data_parallel.wire import stream_beside
from tkernels.layers.lease import Keepalive, Lease, Slot
from tkernels.layers.owners import owner_of, parameters_of

KNOWN = (torch.Tensor, numbers.Number, str, bytes, type(None))  # leaves of outputs; any other type may hide tensors

_log = logging.getLogger("tkernels")


@dataclasses.dataclass
class Options:
    """What the root's call of fully_shard says about all units.

    prefetch: units that are gathered ahead. overlap: communicate on a stream of its own. reductions: buffers of
    gradients that may be on their way while the next one is filled.
    """

    prefetch: int = 1
    overlap: bool = True
    reductions: int = 0


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What is split over the ranks, and what that leaves to be done; Megatron-FSDP's zero_dp_strategy.

    shards: parameters are split, and optimizer states with them. stays: whole parameters stay gathered until the last
    backward of a step has reduced. waits: until then, whole gradients accumulate, and no other backward reduces.
    """

    shards: bool
    stays: bool
    waits: bool


STRATEGIES = {
    "parameters": Strategy(shards=True, stays=False, waits=False),
    "gradients": Strategy(shards=True, stays=True, waits=False),
    "optimizer": Strategy(shards=True, stays=True, waits=True),
    "replicate": Strategy(shards=False, stays=True, waits=True),
}


class State(enum.Enum):
    SHARDED = "sharded"
    GATHERED = "gathered"
    WHOLE = "whole"


class Engine:
    """Runs the units inside one root module, or resident units."""

    def __init__(self, root: "Unit", resident: dict["Unit", str] | None = None):
        """resident: with their names, in the order in which they are reduced; the root is one of them."""
        self.root, found = root, resident or {}
        for name, part in () if resident else root.modules[0].named_modules():
            if (unit := unit_of(part)) is not None and unit not in found:
                found[unit] = name
        self.units = list(found)
        for unit, name in found.items():
            if unit.engine is not None:  # that of a part of this model, which was run by itself
                unit.engine.end()
            inside = {unit_of(part) for each in unit.modules for part in each.modules()} - {unit, None}
            unit.engine, unit.name, unit.contains = self, name or "root", bool(inside)
        self.device = root.device
        self.dev = device_module(self.device)
        self.comm_stream = stream_beside(root.ranks.contexts[0], self.dev) if root.options.overlap else None
        self.pool: MaxPoolAllocator | None = None
        self._kinds, self.sharing = None, set()  # of groups, by dtype; the units that take turns in the pool
        self._weight_slot = Slot(dev=self.dev, name="sharded parameters")
        self._sum_slot = Slot(dev=self.dev, name="gradients of sharded parameters")
        self._weights = self._sums = None  # leases of these slots, during an iteration and during a backward
        self._sent = Keepalive()  # buffers of gradients that are being reduced
        self._summed = Keepalive()  # those that have become gradients: nothing waits for their memory
        self._sendings = collections.deque([0] * root.options.reductions, root.options.reductions)
        self._backward = Backward(self._end_backward)
        self._kept_graph = False  # whether a backward that reduced nothing has kept its graph, for another one
        self._forwards = 0  # forwards that are running, of any unit
        self._learned = {}  # whether gradients are enabled -> units in the order of their use
        self._uses, self._expected = [], None
        self.lingering: Unit | None = None  # of several modules, one of which has just ended
        # Writes to the shards until this iteration began; whether no forward has begun since; whether the last
        # backward of the step has reduced.
        self._version, self._fresh, self._reduced = 0, True, False
        self.is_last_backward = True
        if not root.resident:
            _engines.add(self)
            lost = set().union(*(unit.unfound for unit in found))
            if lost := lost.difference(*(module.parameters() for module in root.modules)):
                warnings.warn(
                    f"fully_shard: {len(lost)} of ignored_params, as one of {tuple(next(iter(lost)).shape)}, are not "
                    f"the model's, as those of another model, or from before something replaced them; pass those that "
                    f"it has, to the calls on all modules around them",
                    stacklevel=2,
                )
            for unit in found:
                unit.unfound = set()

    @property
    def slots(self) -> list[Slot]:
        """The slots to pass to `layers.captured`, together with `comm_stream`, to capture whole iterations."""
        return [*(self.pool.slots if self.pool else ()), self._weight_slot, self._sum_slot]

    # An iteration

    def enter(self, unit: "Unit"):
        """Called before each forward of a unit. The first one of a forward begins an iteration."""
        if self._forwards and unit is self.root and not backward_runs() and self._changed():
            self.end()  # a step since a forward that an interrupt has ended, of which no hook tells
        if self._forwards == 0 and not backward_runs():
            if unit is self.root:
                if not self._fresh or self._changed():
                    self.end()
                gradients = torch.is_grad_enabled()
                self._expected = self._learned.get(gradients)
                self._uses = self._learned[gradients] = []
            elif self._changed():
                self.end()
        self.begin()  # also inside of another's backward, as where a reentrant checkpoint holds the whole model
        self._fresh = False
        self._forwards += 1

    def leave(self, unit: "Unit"):
        """Called after each forward of a unit, also one that failed."""
        self._forwards -= 1
        outermost = self._forwards == 0  # unless an interrupt has ended one, of which no hook tells
        if (outermost or unit is self.root) and not backward_runs():
            self.put_away()
            if outermost and not torch.is_grad_enabled():
                self.end(evaluated=True)

    def put_away(self):
        """Give back what lingers, since another unit is used now, or nobody's forward runs."""
        unit, self.lingering = self.lingering, None
        if unit is not None:
            unit.put_away()

    def begin(self):
        """Lease the shards, so that gathers are ordered behind the optimizer's step."""
        if self._weights is not None:
            return
        moved = [group.settle(unit.collect) for unit in self.units for group in unit.groups]
        version = self._versions()
        if any(moved) or version != self._version:
            for unit in self.units:
                unit.release()
            # Lets torch refuse a backward through parameters that forward saved and that were written to since.
            wholes = (parameter.whole for unit in self.units for group in unit.groups for parameter in group.parameters)
            torch.autograd.graph.increment_version([whole for whole in wholes if not isinstance(whole, DTensor)])
        self._plan()
        self._version, self._fresh = version, True
        self._weights = self._weight_slot.acquire()
        with self._weights.write():
            pass  # the producer is whatever this stream has launched: the optimizer, a loaded checkpoint

    def _versions(self) -> int:
        """Torch's counts of writes to the sharded parameters, added up; they only grow."""
        units = (unit for unit in self.units if not unit.resident)
        shards = (p.sharded for unit in units for group in unit.groups for p in group.parameters)
        return sum(shard._version + shard._local_tensor._version for shard in shards)

    def _changed(self) -> bool:
        """Whether sharded parameters have been written since this iteration began."""
        return self._weights is not None and self._versions() != self._version

    def begin_backward(self, _=None):
        """Called before each backward of a unit, and of the root's outputs."""
        if self._backward.runs:
            return
        if self._backward.failed:
            if self.root.resident:  # what it has left would be added to
                raise LeaseError("a backward has failed before this one; call zero_grad() after a failure")
            self.end()
        if self._backward.begin():
            kept = self._kept_graph or torch._C._autograd._get_current_graph_task_keep_graph()
            self._kept_graph = kept and not self.root.reduces
            self.begin()
            self._begin_sums()

    def _begin_sums(self):
        self._sums = self._sum_slot.acquire()
        with self._sums.write():
            pass  # behind whatever this stream has launched: the last step's reads, zero_grad
        self._expect_gradients()

    def _expect_gradients(self):
        for unit in self.units:
            unit.missing = {parameter for group in unit.groups for parameter in group.trained}
            unit.begun = unit.begun or unit.resident

    @torch._disable_dynamo
    def begin_root_backward(self, _):
        if self.root.engine is not self:
            raise LeaseError(
                f"fully_shard: {self.root.name} ran by itself before the model that it is in, whose first forward has "
                f"moved its parameters, so that earlier forward has no backward any more; run the whole model once "
                f"before parts of it, or that backward before the model"
            )
        self.begin_backward()
        self.root.begun = True
        if self.root.uses == 0:
            self.root.use()

    @torch._disable_dynamo
    def _end_backward(self):
        """Reduce what is left (the root, units whose end nothing signaled), and order this stream behind the sums."""
        for unit in self.units:
            unit.reduce()
            unit.forwards = 0
        self.end()

    def reduce_accumulated(self):
        """Collective, outside of backward. Reduce what backwards of a pipeline that reduced nothing have left."""
        if self._backward.failed:
            self.end()
        kept, self._kept_graph = self._kept_graph, False
        if kept:
            self.forget_gradients()
            raise NotImplementedError(
                "fully_shard: this schedule of torch.distributed.pipelining takes the gradients of inputs and those of "
                "parameters in two backwards (zero bubble), of which the second finds no sharded parameters; take "
                "ScheduleGPipe, Schedule1F1B, ScheduleLoopedBFS or ScheduleInterleaved1F1B"
            )
        self.begin()
        self._begin_sums()
        self._end_backward()

    def reduce_in_turn(self):
        """Reduce the resident units whose gradients are there, up to the first one that still misses some."""
        for unit in self.units:
            if unit.missing:
                return
            unit.reduce()

    def reduce_again(self):
        """Reduce what is left, and begin anew: a gradient has come a second time, by a backward inside of backward."""
        for unit in self.units:
            unit.reduce()
        self._expect_gradients()

    @torch._disable_dynamo
    def end(self, evaluated: bool = False):
        """Give everything back, even after a failure. From here on, this stream may change shards and gradients.

        What stays gathered after a backward stays until the last one has reduced, for then a step follows.
        evaluated: a forward without gradients has ended, after which averages of the weights may be swapped for them
            through `.data`, whose writes torch doesn't count. What stays then is what reshard_after_forward=False says.
        """
        self._forwards = 0  # those that run, or an interrupt has ended, have lost what they had
        for unit in self.units:
            unit.close(stays=not self._reduced and (not evaluated or unit.reshard_after_forward is False))
        self._reduced = False
        if self._sums is not None:
            if self._backward.failed:
                self.forget_gradients()
            self._backward.forget()
            with self._sums.read():
                pass
            self._sum_slot.release(self._sums)
            self._sums = None
        self._sent.drain()
        self._summed.drain()
        if self._weights is not None:
            self._weight_slot.release(self._weights)
            self._weight_slot.join()
            self._weights = None

    def forget_gradients(self, units=None):
        """Discard gradients that have not been reduced: those that accumulate, or were left by a failed backward.

        units: whose; None: of all.
        """
        self._kept_graph = False
        for unit in self.units if units is None else units:
            unit.begun = unit.resident
            unit.owing.clear()
            for group in unit.groups:
                group.forget_gradients()

    def check_step(self, free: set):
        """Called before an optimizer's step. Raises ValueError if one of these parameters is this model's.

        free: the optimizer's that have no owner. One that is a DTensor over these ranks is that mesh's to reduce.
        """
        if self.root.engine is not self or self.root.ranks.mesh.size() == 1:
            return
        left = {module._parameters.get(attribute) for unit in self.units for module, attribute in unit.ignored}
        left |= {parameter.whole for unit in self.units for group in unit.groups for parameter in group.parameters}
        ranks = set(self.root.ranks.mesh.mesh.flatten().tolist())
        for name, each in (named for module in self.root.modules for named in module.named_parameters()):
            elsewhere = isinstance(each, DTensor) and ranks <= set(each.device_mesh.mesh.flatten().tolist())
            if each in free and each not in left and not elsewhere:
                raise ValueError(
                    f"fully_shard: an optimizer has {name}, which was added after the model was sharded, so that each "
                    f"rank would train it by its own gradient; add it before, or call fully_shard on the new module "
                    f"too, and make the optimizer afterwards"
                )

    # Memory

    def _plan(self):
        """Make the pool, or another one if other units are kept now."""
        sharing = {unit for unit in self.units if unit.shares_memory()}
        kinds = [[(group.gathered_dtype, group.in_place) for group in unit.groups] for unit in self.units]
        # Who shares may change between a forward and its backward, which needs the parameters where they were.
        if kinds == self._kinds and (sharing == self.sharing or any(c.to_end() for u in self.units for c in u.calls)):
            return

        def buckets(unit):
            return [Bucket(group.id, group.gathered_dtype, group.numel) for group in unit.groups if not group.in_place]

        for unit in self.units:
            for group in unit.groups:
                group.id = f"{unit.name}:{group.kind}"
        plan = MaxPoolPlan.build(
            {unit.name: buckets(unit) for unit in self.units if unit in sharing},
            others=[bucket for unit in self.units if unit not in sharing for bucket in buckets(unit)],
            copies=1 + self.root.options.prefetch,
        )
        for unit in self.units:
            unit.release()
        self.pool = None  # first, so that both are never there at once
        # Backward reads parameters at the addresses that forward saved, so a move is an error.
        self.pool = MaxPoolAllocator(plan, strict_assignments="error", device=self.device, dev=self.dev)
        self._kinds, self.sharing = kinds, sharing
        if all(ctx.rank == 0 for ctx in self.root.ranks.contexts):
            _log.info("the memory of gathered parameters\n%s", self.pool)

    # Communication

    def _on_comm(self):
        return current_stream(self.dev) if self.comm_stream is None else self.comm_stream

    @torch.no_grad()
    def gather(self, group: ParamGroup) -> Lease:
        if group.in_place:
            return Lease(group.flat, dev=self.dev, name=group.id)
        comm = self._on_comm()
        lease = self.pool.acquire(group.id)
        with self._weights.read(comm), lease.write(comm), self.dev.stream(comm):
            group.gather(lease.tensor)
        return lease

    def release(self, group: ParamGroup, lease: Lease):
        if self.pool.held(group.id):
            self.pool.release(group.id)
        else:
            lease.release()

    @torch.no_grad()
    def reduce(self, group: ParamGroup, parameters: list[Parameter]):
        """Reduce the gradients of some of a group's parameters, with zeros for those that have none."""
        current, comm = current_stream(self.dev), self._on_comm()
        self._reduced = self._reduced or self.is_last_backward
        layout, elsewhere = group.layout_of(parameters), []
        self._sent.drain(keep=sum(self._sendings))  # the oldest buffer's stream waits until it is free
        grads = [parameter.take_gradient() for parameter in parameters]
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None and parameter.producer not in (None, current):
                elsewhere.append(Lease(grad, dev=self.dev, home=parameter.producer))
        # On the stream that optimizers use sums on, and free them.
        buffer, sums = group.buffers(layout, None if elsewhere else grads)
        alone = sums is buffer  # nothing is split
        buffer, begun = Lease(buffer, dev=self.dev, name="gradients"), len(self._sent)
        with contextlib.ExitStack() as reading, buffer.write() as into:
            for lease in elsewhere:
                with lease.write(lease.home):
                    pass
                reading.enter_context(lease.read(current))
            group.pack(grads, layout, into)
        for lease in elsewhere:
            self._sent.defer(lease)
        held = Lease(sums, dev=self.dev, name="gradients of shards")  # if it is only added to others
        with buffer.read(comm), self._sums.write(comm, ordered=True), held.write(comm), self.dev.stream(comm):
            unrounded = group.reduce(buffer.tensor, sums, layout)
            kept = group.accumulate(parameters, layout, sums, unrounded)
        sent = self._summed if alone and kept else self._sent
        sent.defer(buffer)
        sent.defer(held)
        self._sendings.append(len(self._sent) - begun)

    # Gathering ahead

    def used(self, unit: "Unit"):
        """Called before a unit computes: gather it, unless it is gathered already, and the units after it."""
        self._uses.append(unit)
        if self._expected is not None and self._expected[len(self._uses) - 1 :][:1] != [unit]:
            self._expected = None  # the order has changed: release what was gathered ahead for the old one
            for other in self.units:
                if other is not unit and other.uses == 0 and other.reshards:
                    other.release()
        unit.gather()
        self._gather_ahead(unit)

    def next(self, count: int) -> list["Unit"]:
        return [] if self._expected is None else self._expected[len(self._uses) :][:count]

    def _gather_ahead(self, unit: "Unit"):
        told = unit.backward_prefetch if backward_runs() else unit.forward_prefetch
        for other in told or self.next(self.root.options.prefetch):
            if other.state is State.SHARDED:
                if not all(group.in_place or self.pool.idle(group.id) for group in other.groups):
                    return
                other.gather()


class Unit:
    """Modules whose parameters are gathered together while one of them computes.

    modules: of one call of fully_shard; several are one unit; none: it is resident. ranks, options: as fully_shard was
    told.
    reshard_after_forward: None until the root is known, which alone keeps its parameters by default.
    sync: whether backward reduces. leases: by group, of what is gathered. uses: how many forwards, backwards, and
    recomputations inside a backward, keep the parameters whole. missing: parameters without a gradient yet in this
    backward. begun: whether a backward has reached this unit since the last reduction. owing: the parameters that were
    trained in such a backward.

    When and whether its gradients are reduced must not depend on which gradients exist, since that may differ between
    ranks. The reduction comes where the last of the unit's calls ends in backward, which the gradients of its inputs
    signal. If no input requires a gradient, and in the root, it comes at the end of backward.
    """

    face = "fully_shard"

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: list[ParamGroup],
        ranks: DataParallelRanks,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        strategy: Strategy,
        options: Options,
        device: torch.device,
    ):
        self.modules, self.groups, self.ranks, self.policy, self.options = modules, groups, ranks, policy, options
        self.reshard_after_forward, self.strategy, self.device = reshard_after_forward, strategy, device
        self.name, self.contains, self.engine = type(modules[0]).__name__ if modules else "resident", False, None
        self.sync, self.reshard_after_backward, self.kept = True, True, False
        self.ignored: list[tuple[nn.Module, str]] = []  # places of parameters that it leaves alone
        self.unfound: set[nn.Parameter] = set()  # what it was told to leave alone, but is not in it
        self.forward_prefetch, self.backward_prefetch, self.exposed = [], [], False
        self.leases, self.uses, self.missing, self.begun, self.owing = {}, 0, set(), False, set()
        self.calls = weakref.WeakSet()  # calls whose backward may still come; their autograd graph keeps them alive
        # Forwards that recorded a gradient since the last backward, and whether they were ever several: on all ranks.
        self.forwards, self.repeats = 0, False
        self._reading = contextlib.ExitStack()
        self._running, self._open_calls = [], []
        for module in modules:
            setattr(module, _UNIT, self)
            # Ahead of hooks that are registered already, which may read parameters.
            module.register_forward_pre_hook(self.before_forward, with_kwargs=True, prepend=True)
            module.register_forward_hook(self.after_forward, always_call=True)
            module.register_state_dict_pre_hook(self.end_iteration)
            module.register_load_state_dict_pre_hook(self.end_iteration)

    @property
    def resident(self) -> bool:
        """Whether its parameters are whole for good, and reduced in turn with those of others."""
        return not self.modules

    @property
    def state(self) -> State:
        if not self.leases:
            return State.SHARDED
        return State.WHOLE if self.exposed else State.GATHERED

    @property
    def is_root(self) -> bool:
        return self.engine is not None and self.engine.root is self

    @property
    def _keeps(self) -> tuple[bool, bool]:
        """Whether it is to keep its memory after forward, and after a backward."""
        forward = self.is_root or self.strategy.stays
        if self.reshard_after_forward is not None:
            forward = not self.reshard_after_forward
        return forward, self.strategy.stays or not self.reshard_after_backward

    @property
    def _has_own_memory(self) -> bool:
        return self.engine is None or self not in self.engine.sharing

    @property
    def reshards(self) -> bool:
        """Whether it gives its memory back after forward."""
        return not (self._keeps[0] and self._has_own_memory)

    @property
    def reduces(self) -> bool:
        """Whether the running backward reduces its gradients."""
        return self.sync and (self.engine.is_last_backward or not self.strategy.waits)

    @property
    def stays(self) -> bool:
        """Whether it keeps its memory after a backward."""
        return self._keeps[1] and self._has_own_memory

    def shares_memory(self) -> bool:
        """Whether it is to take turns with other units in the pool. What was kept once stays where it is."""
        self.kept = self.kept or any(self._keeps)
        return not self.contains and not self.kept

    def end_iteration(self, *_):
        """Give the module its DTensors, which whoever reads or changes its parameters from outside wants."""
        if self.engine is not None and not backward_runs():
            self.engine.end()

    # Parameters

    def settle(self):
        """Lay out the shards as soon as they are on a device."""
        for group in self.groups:
            if not any(parameter.sharded.is_meta for parameter in group.parameters):
                group.settle(self.collect)

    def unshard(self):
        """Gather without a forward; `expose` then gives the module the whole parameters."""
        if self.engine is None:
            Engine(self)
        self.engine.begin()
        self.gather()

    def reshard(self):
        if self.engine is not None:
            if self.uses:
                self.end_iteration()
            self.close(stays=False)

    def gather(self):
        for group in self.groups:
            if group in self.leases:
                continue
            try:
                self.leases[group] = self.engine.gather(group)
            except LeaseError as error:
                raise LeaseError(
                    f"fully_shard: unit {self.name} can't be gathered: {error}. If activations are checkpointed, let "
                    f"each checkpoint hold one unit alone; where several units are needed at once, pass a larger "
                    f"prefetch= with the root, or reshard_after_forward=False with some of them"
                ) from error

    def use(self):
        if self.uses == 0:
            if self.engine.lingering is not self:
                self.engine.put_away()
                if self.is_root:
                    self.gather()
                else:
                    self.engine.used(self)
            self.engine.lingering = None
            self._reading.close()  # of the last stream, if it lingered
            self.expose()
        self.uses += 1

    def unuse(self):
        self.uses -= 1
        if self.uses > 0:
            return
        if not (self.reshards or backward_runs() and not self.stays):
            self._reading.close()
            return
        self.engine.put_away()  # a unit inside of this one
        if len(self.modules) > 1:
            self.engine.lingering = self  # its next module comes next, as a rule; until then, others may read
        else:
            self.put_away()

    def put_away(self):
        self._reading.close()
        self.conceal()
        if self.engine.next(1) != [self]:  # kept if used next: the last one of forward is the first of backward
            self.release()

    def expose(self):
        """Give the modules the whole parameters, which this stream may read."""
        for lease in self.leases.values():
            self._reading.enter_context(lease.read())
        if self.leases and not self.exposed:
            for group, lease in self.leases.items():
                group.expose(lease.tensor)
            self.exposed = True

    def conceal(self):
        if self.exposed:
            for group in self.groups:
                group.conceal()
            self.exposed = False

    def release(self):
        for group, lease in self.leases.items():
            self.engine.release(group, lease)
        self.leases = {}

    def close(self, stays: bool):
        """Give everything back, whatever state the unit is in. stays: but for the memory of one that stays gathered."""
        self._reading.close()
        self.conceal()
        if self.engine is not None and self.engine.lingering is self:
            self.engine.lingering = None
        if not (stays and self.stays):
            self.release()
        self.uses, self.missing = 0, set()
        self._running.clear()
        for call in self._open_calls:
            call.open = False
        self._open_calls.clear()

    # Forward and backward of the modules

    @torch._disable_dynamo
    def before_forward(self, module, args, kwargs):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"fully_shard: {type(module).__name__} is called inside of a transform of torch.func, whose tensors "
                f"its hooks can't follow; take gradients by backward() or torch.autograd.grad"
            )
        if self.engine is None:
            Engine(self)
        self.engine.enter(self)
        recomputed = self.uses > 0 and backward_runs()  # by activation checkpointing, inside the unit's own backward
        try:
            self.use()
        except BaseException:
            self.engine.leave(self)
            raise
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), self.policy.param_dtype)
        if not torch.is_grad_enabled() or recomputed or self.is_root:
            self._running.append(None)
            return args, kwargs
        call = Call(self)
        self._running.append(call)
        return call.watch_inputs(args, kwargs)

    @torch._disable_dynamo
    def after_forward(self, module, args, output):
        if not self._running:  # this forward failed before it began
            return None
        call = self._running.pop()
        if call is not None:
            call.watch_outputs(output)
        elif self.is_root and torch.is_grad_enabled():
            self.watch(output, self.engine.begin_root_backward)
        try:
            for group in self.groups:
                group.check_unwritten(module)
        finally:
            if not self.is_root or self.reshards or backward_runs():
                self.unuse()
            self.engine.leave(self)
        if self.policy.output_dtype is not None:
            return _cast(output, self.policy.output_dtype)
        return None

    def collect(self, parameter: Parameter):
        """Called with each gradient that autograd has completed, on the stream that has produced it.

        By Parameter.watch, which keeps torch.compile out. Without a change of grad mode, which takes as long as the
        rest: what computes here says for itself that it records nothing.
        """
        self.engine.begin_backward()
        if self.resident and parameter not in self.missing:
            self.engine.reduce_again()
        self.begun = True
        self.missing.discard(parameter)
        parameter.producer = current_stream(self.engine.dev)
        if not self.reduces:
            parameter.widen_gradient()
        if not self.missing:
            for call in [call for call in self._open_calls if not call.tells]:
                call.end()
            if self.resident:
                self.engine.reduce_in_turn()

    def watch(self, output, begin, before=frozenset()):
        """Call `begin` before the backward of any of these outputs. before: nodes that have made inputs."""
        leaves = _leaves(output)
        tensors = _differentiable(leaves)
        unknown = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, KNOWN)]
        if unknown and not tensors:
            trained = any(group.trained for unit in self.engine.units for group in unit.groups)
            if before or trained or not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                raise TypeError(
                    f"fully_shard: unit {self.name} returns {unknown[0]}, in which no tensor is found that backward "
                    f"could begin with; return tensors, or containers or dataclasses of them"
                )
        for tensor in tensors:
            tensor.register_hook(begin)
            # Whoever changes a view in place takes its hooks out of the graph; what made the memory stays.
            if tensor._is_view() and (node := _node_of(tensor)) is not None and node not in before:
                node.register_prehook(begin)

    def has_hooks(self) -> bool:
        """Whether somebody's hooks wait for the mean gradients of parameters."""
        return any(each.sharded._post_accumulate_grad_hooks for group in self.groups for each in group.trained)

    def reduce(self, always: bool = False):
        """Reduce the gradients of the backwards that reached this unit, with zeros for parameters without one.

        always: even if backward reduces none.
        """
        if not self.begun:
            return
        for group in self.groups:
            self.owing.update(group.trained)  # also if they are frozen before it comes to a reduction
        if not (always or self.reduces):
            return
        owing, self.begun, self.owing = self.owing, False, set()
        for group in self.groups:
            if parameters := [parameter for parameter in group.parameters if parameter in owing]:
                self.engine.reduce(group, parameters)


class Call:
    """One forward of a unit. Its backward begins with the gradient of an output and ends with those of its inputs.

    open: whether its backward is running. tells: whether the gradients of inputs will signal its end. If no input
    requires a gradient, or this backward doesn't reach the inputs, the call ends with the gradients of the unit's
    parameters, with the beginning of one that was over before it in forward, or with the whole backward.
    """

    _turns = itertools.count()

    def __init__(self, unit: Unit):
        self.unit, self.open, self.tells = unit, False, False
        self._node = lambda: None  # weak reference to the inputs' node in autograd's graph, which holds this call
        self._ended = None  # id of the last backward in which this call ended
        self._before = set()  # nodes of autograd's graph that made the inputs
        self._addresses = _addresses(unit)
        self._first, self._last = next(self._turns), None  # when its forward began and ended, among all calls
        unit.calls.add(self)
        unit.forwards += 1
        unit.repeats = unit.repeats or unit.forwards > 1

    def watch_inputs(self, args, kwargs):
        inputs = _differentiable(_leaves((args, kwargs)))
        if not inputs:
            return args, kwargs
        self._before = {_node_of(tensor) for tensor in inputs}
        passed = dict(zip(map(id, inputs), _Inputs.apply(self, *inputs), strict=True))
        self._node = weakref.ref(next(iter(passed.values())).grad_fn)
        return _map(lambda leaf: passed.get(id(leaf), leaf), (args, kwargs))

    def watch_outputs(self, output):
        self._last = next(self._turns)
        self.unit.watch(output, self._begin, self._before)

    def to_end(self) -> bool:
        """Whether no backward has ended this call yet. (Where none is to come, autograd's graph and this call go.)"""
        return self._ended is None

    def to_come(self) -> bool:
        """Whether the running backward will still signal the end of this call."""
        node = self._node()
        return node is not None and self._ended != backward_id() and torch._C._will_engine_execute_node(node)

    @torch._disable_dynamo
    def _begin(self, _):
        if self.open or self._ended == backward_id():  # opened by the gradient of another output
            return
        unit = self.unit
        unit.engine.begin_backward()
        # Autograd runs nodes in the reverse order of forward: those of all calls after this one have run.
        for other in [call for each in unit.engine.units for call in each._open_calls]:
            if not other.tells and other._first > self._last:
                other.end()
        self.open, unit.begun, self.tells = True, True, self.to_come()
        unit._open_calls.append(self)
        unit.use()
        if _addresses(unit) != self._addresses:
            raise LeaseError(
                f"fully_shard: unit {unit.name} lies elsewhere now than in the forward whose backward this is"
            )

    @torch._disable_dynamo
    def end(self):
        if self.open:
            self.open, self._ended = False, backward_id()
            self.unit._open_calls.remove(self)
            # Hooks may change what another call has yet to read, in this backward or in the graph's next one.
            if self.tells and not any(call.to_come() for call in self.unit.calls):
                if not (self.unit.repeats and self.unit.has_hooks()):
                    self.unit.reduce()
            self.unit.unuse()


class _Inputs(torch.autograd.Function):
    """The identity on a unit's inputs, whose backward runs last of all the unit's nodes.

    Autograd runs the nodes that are ready in the reverse order of forward, and this was the unit's first.
    """

    @staticmethod
    def forward(ctx, call: Call, *tensors):
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tensors

    @staticmethod
    @once_differentiable  # double backward would find other parameters at the addresses of the first backward
    def backward(ctx, *gradients):
        ctx.call.end()
        return None, *gradients


_engines = weakref.WeakSet()  # all in whose models an optimizer may have parameters


@register_optimizer_step_pre_hook
@torch._disable_dynamo
def _before_step(optimizer, *_):
    if engines := list(_engines):  # 0.24 ms for 1000 parameters, which have owners
        free = {each for each in parameters_of(optimizer) if each.requires_grad and owner_of(each) is None}
        for engine in engines if free else ():
            engine.check_step(free)


_UNIT = "_tkernels_unit"  # on a module


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that fully_shard has made of a module."""
    return vars(module).get(_UNIT)


def device_module(device: torch.device):
    """The module with the streams of a device; tests put a simulator here."""
    return torch.get_device_module(device)


def _addresses(unit: Unit) -> list[int]:
    return [lease.tensor.data_ptr() for lease in unit.leases.values()]


def _node_of(tensor: torch.Tensor):
    """The node of autograd's graph that made this tensor's memory."""
    return (tensor._base if tensor._is_view() else tensor).grad_fn


def _cast(values, dtype: torch.dtype):
    return _map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, values
    )


def _map(function, values):
    """Rebuild nested containers and dataclasses with `function` applied to their leaves."""
    kind = type(values)
    if kind is torch.Tensor or values is None:  # 20 times as fast as tree_map, and most of what modules pass
        return function(values)
    if kind in (tuple, list):
        return kind([_map(function, value) for value in values])
    if kind is dict:
        return {key: _map(function, value) for key, value in values.items()}

    def of(leaf):
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return function(leaf)
        made = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(made, field.name, _map(function, getattr(leaf, field.name)))
        return made

    return tree_map(of, values)


def _leaves(values) -> list:
    """The leaves of nested containers and dataclasses."""
    leaves = []

    def note(leaf):
        leaves.append(leaf)
        return leaf  # containers that look at what is in them, as nn.utils.rnn.PackedSequence, are made again

    _map(note, values)
    return leaves


def _differentiable(leaves) -> list[torch.Tensor]:
    """The distinct tensors among the leaves that require a gradient."""
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return list(tensors.values())
