"""FullyShard: every rank keeps an R-th of each parameter, and has the whole only while it is computed with.

    model = FullyShard(model, units=(Block,), ctx=ctx)
    optimizer = torch.optim.AdamW(model.parameters())    # over this rank's shards
    loss(model(x), y).backward()                         # x, y: this rank's part of the batch
    optimizer.step()

The parameters of a unit lie one after the other in one flat parameter (one for each dtype, and one for those that are
not trained); a rank's shard is its R-th. What belongs to no unit, or to several, belongs to the root: it is gathered
when forward begins and stays until the end of backward.

    stream     compute                          comm
    forward    unit 0                           gather unit 1
               unit 1                           gather unit 2, into the memory of unit 0
    backward   unit 1, gradients into a bucket  gather unit 0
               unit 0                           reduce-scatter the gradients of unit 1

What follows what is learned from the iteration before (the first one gathers nothing ahead). Memory comes from two
pools (`tkernels.layers.pools`), of parameters and of gradients, each with a few copies of the largest unit; who waits
for whom is up to the leases of their slots. Shards and their gradients have a lease each, too: a gather comes after the
optimizer's step, a reduction after whatever the optimizer did with the gradients of the step before.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import numbers
import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.utils._pytree import tree_map

import tkernels
from tkernels.comm import Context, LeaseError, MismatchError, Slot, as_context
from tkernels.comm.capture import lasting
from tkernels.comm.collectives import SUMMED
from tkernels.comm.group import checksum, first_difference, listed
from tkernels.comm.regions import round_up
from tkernels.layers.norms import check_norm, clip, counts, squared_norm
from tkernels.layers.owners import own, owner_of
from tkernels.layers.pools import (
    Bucket,
    FixedPoolAllocator,
    FixedPoolPlan,
    MaxPoolAllocator,
    MaxPoolPlan,
    buckets_ahead,
)

ALIGN = 16  # elements that parameters and shards start at multiples of: 16 bytes or more
GRADIENT_COPIES = 2  # one is filled while the other travels; what is gathered ahead changes nothing about that
POOLS = {"max": (MaxPoolPlan, MaxPoolAllocator), "fixed": (FixedPoolPlan, FixedPoolAllocator)}
KNOWN = (torch.Tensor, numbers.Number, str, bytes, type(None))  # that outputs may consist of


class FullyShard(nn.Module):
    """A module whose parameters are sharded over the ranks of a context. Calls are the module's own, and collective.

    parameters() are this rank's shards, flat; any optimizer that works element by element gives the same result as on
    the whole parameters. Their gradients are the mean over ranks. Between iterations the module's own parameters are
    empty; gather_state_dict() has their values.

    All ranks must run the same units in the same order. Inside of a unit, and of what belongs to none, they may use
    different parameters: the gradient of what a rank didn't use counts as zero. The loss must be made from the output
    of this module or of its units. requires_grad_(False) on a shard, or on this module, freezes it until it is undone.
    A rank's shards have a part of the gradients' norm only, so clip by `clip_grad_norm_`. Activation checkpointing goes
    unit by unit. What has Megatron's mark sequence_parallel is in shards of its own, which have it too, for
    `all_reduce_sequence_parallel_grads` over the tensor-parallel ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        units: type[nn.Module] | tuple[type[nn.Module], ...],
        *,
        ctx: Context | None = None,
        overlap: bool = True,
        grad_dtype: torch.dtype | None = None,
        pool: str = "max",
        memory: str = "torch",
        copies: int = 2,
        comm_stream=None,
        dev=None,
    ):
        """Collective. Shard `module`, which must be the same on every rank; its parameters are emptied.

        units: classes of the modules that are gathered as a whole; none may lie inside another.
        overlap: communicate on a stream of its own, one unit ahead. False gives the same bits on one stream.
        grad_dtype: what gradients are reduced in; None is the parameter's dtype. Sums are taken in fp32.
        pool: "max" for units of any shapes, "fixed" to pool the largest class of equal ones only.
        memory: "torch" or "symmetric", of the pools. copies: units whose parameters are there at once; one less is
            gathered ahead.
        comm_stream, dev: instead of a new stream of the device's module.

        Raises ValueError or TypeError for a module that can't be sharded, MismatchError if it differs between ranks.
        """
        super().__init__()
        self.ctx = ctx = as_context(ctx)
        if pool not in POOLS:
            raise ValueError(f"FullyShard: pool={pool!r} is unknown; use {' or '.join(POOLS)}")
        self._keys = [
            key for key, value in module.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)
        ]
        self._units = [_Unit(self, name, *parts) for name, parts in _partition(module, units, ctx, grad_dtype).items()]
        self._root = self._units.pop(0)
        self._flats = {flat.id: flat for unit in (self._root, *self._units) for flat in unit.flats}
        _check_equal(ctx, self._flats.values())

        self._dev = dev if dev is not None else torch.get_device_module(ctx.device)
        self.comm_stream = comm_stream if comm_stream is not None or not overlap else self._dev.Stream()
        plan_of, allocator_of = POOLS[pool]

        def make(buckets, copies, strict):
            sizes = {unit.name: buckets(unit) for unit in self._units}
            plan = plan_of.build(sizes, others=buckets(self._root), copies=copies, pad_multiple=ALIGN * ctx.size)
            return allocator_of(plan, memory, strict_assignments=strict, ctx=ctx, dev=dev)

        # Backward reads parameters at the addresses that forward saved; gradients only ever travel.
        self.parameter_pool = make(lambda unit: [Bucket(f.id, f.dtype, f.numel) for f in unit.flats], copies, "error")
        self.gradient_pool = make(
            lambda unit: [Bucket(f.id, f.grad_dtype, f.numel) for f in unit.trained], GRADIENT_COPIES, "warn"
        )

        self.module = module
        self.shards = nn.ParameterDict()
        self.shards.register_load_state_dict_pre_hook(_refuse_assignment)
        self.register_load_state_dict_pre_hook(_refuse_unsharded)
        buckets = self.parameter_pool.plan.buckets
        _take_off(module, self._flats.values())
        for flat in self._flats.values():
            self.shards[flat.id.replace(".", "/")] = flat.shard_over(ctx, buckets[flat.id].numel)
        own(self.shards.values(), self)
        for unit in (self._root, *self._units):
            unit.watch()
        self._weight_slot = Slot(dev=self._dev, name="parameter shards")
        self._sum_slot = Slot(dev=self._dev, name="gradient shards")
        self._weights = self._sums = None  # their leases, while an iteration or a backward is under way
        self._callback = lambda: None  # a weak reference to what ends the backward that is under way
        self._sync = True
        self._learned = {}  # with and without gradients: units in the order of their use
        self._uses, self._expected = [], None
        if hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
            # What warm-up left of the autograd graph must not pull its stream into a capture.
            torch.autograd.graph.set_override_stale_capture_stream(True)

    def forward(self, *args, **kwargs):
        """Collective. The module's result for this rank's part of the batch."""
        self._end()
        gradients = torch.is_grad_enabled()
        self._expected = self._learned.get(gradients)
        self._uses = self._learned[gradients] = []
        self._begin()
        try:
            output = self.module(*args, **kwargs)
        finally:
            if not gradients:
                self._end()
        for tensor in _differentiable(_leaves(output)) if gradients else ():
            tensor.register_hook(self._begin_backward)
        return output

    @contextlib.contextmanager
    def no_sync(self):
        """A context in which backward communicates no gradients: whole ones add up until a backward outside of it.

        Not in the gradients of shards, which an optimizer sees: only this module's `zero_grad` forgets them, and a
        backward that fails.
        """
        self._sync, before = False, self._sync
        try:
            yield
        finally:
            self._sync = before

    def zero_grad(self, set_to_none: bool = True):
        """Forget the gradients of all shards, and those that `no_sync` has kept."""
        super().zero_grad(set_to_none)
        self._forget_gradients()

    def _forget_gradients(self):
        """Those that have not come to shards: what `no_sync` has kept, what a backward has left that failed."""
        for unit in (self._root, *self._units):
            unit.begun = False
            for flat in unit.trained:
                for parameter in flat.parameters:
                    parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, tensor_parallel: Context | None = None) -> torch.Tensor:
        """Collective. Scale the gradients so that their 2-norm, over all ranks' shards, is at most max_norm, rounded.

        tensor_parallel: the context of the ranks that layers are split over, if they are: the norm is of the whole
        model then. Without it ValueError is raised for such a model.

        Returns the norm that they had, fp32 of one element and the same on every rank. torch's own function would see
        this rank's shards alone.
        """
        check_norm("FullyShard.clip_grad_norm_", self.shards.values(), tensor_parallel)
        shards = [shard for shard in self.shards.values() if shard.grad is not None]
        total = squared_norm((shard.grad for shard in shards if counts(shard, tensor_parallel)), self.ctx.device)
        total = tkernels.all_reduce(total, ctx=self.ctx)
        if tensor_parallel is not None:
            total = tkernels.all_reduce(total, ctx=tensor_parallel)
        norm = total.sqrt().squeeze()
        clip((shard.grad for shard in shards), norm, max_norm)
        return norm

    def close(self):
        """Collective with memory="symmetric". Give back the memory of both pools; may be repeated.

        The shards stay, and so does `gather_state_dict`, but nothing can be computed any more.
        """
        self._end()
        for pool in (self.parameter_pool, self.gradient_pool):
            pool.close()

    @property
    def slots(self) -> list[Slot]:
        """What `comm.lease.captured` needs to know, beside `comm_stream`, to capture whole iterations.

        Run two iterations first: one to learn the order, one to find every copy; then set gradients to None.
        """
        return [*self.parameter_pool.slots, *self.gradient_pool.slots, self._weight_slot, self._sum_slot]

    def gather_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Collective. The state dict of the unsharded module, on the CPU; empty on other ranks with rank0_only."""
        wanted, full = not rank0_only or self.ctx.rank == 0, {}
        for flat in self._flats.values():
            whole = tkernels.all_gather(flat.shard.detach(), ctx=self.ctx)
            if wanted:
                for names, value in zip(flat.names, flat.views(whole), strict=True):
                    full |= dict.fromkeys(names, value.cpu().clone())
        if not wanted:
            return {}
        rest = self.module.state_dict().items()  # buffers, and extra state, which may be anything
        rest = {key: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value for key, value in rest}
        return {key: full[key] for key in self._keys} | rest

    @torch.no_grad()
    def load_full_state_dict(self, full: Mapping[str, torch.Tensor]):
        """Load the state dict of an unsharded module, of which each rank takes its part. Not collective.

        Raises ValueError, before anything is changed, unless it has the keys and shapes of the module.
        """
        self._end()
        buffers = self.module.state_dict()
        wanted = {key: _shape(value) for key, value in buffers.items()}
        for flat in self._flats.values():
            for names, shape in zip(flat.names, flat.shapes, strict=True):
                wanted |= dict.fromkeys(names, str(tuple(shape)))
        found = {key: _shape(value) for key, value in full.items()}
        wrong = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
        if wrong:
            entries = [f"{key} is {found.get(key, 'nothing')}, not {wanted.get(key, 'nothing')}" for key in wrong[:5]]
            raise ValueError(f"load_full_state_dict: {len(wrong)} entries don't fit the module: {'; '.join(entries)}")
        for flat in self._flats.values():
            whole = flat.shard.new_zeros(self.ctx.size * flat.shard.numel())
            for names, view in zip(flat.names, flat.views(whole), strict=True):
                view.copy_(full[names[0]])
            flat.shard.copy_(whole.chunk(self.ctx.size)[self.ctx.rank])
        self.module.load_state_dict({key: full[key] for key in buffers}, strict=False)

    @torch.no_grad()
    def sharded_state_dict(self) -> dict:
        """Collective. The state dict of the unsharded module for torch.distributed.checkpoint, by which it loads on any
        number of ranks, and into the unsharded module.

        What a rank has of a parameter comes as the pieces of a ShardedTensor, which are views of its shard, so what is
        loaded into them is in the model; buffers come as they are.
        """
        self._end()
        state = {}
        for flat in self._flats.values():
            for names, shape, pieces in zip(flat.names, flat.shapes, flat.pieces(self.ctx.rank), strict=True):
                if self.ctx.size == 1 or not shape.numel():  # one piece, or none
                    value = pieces[0][1] if pieces else flat.shard.new_empty(shape)
                else:
                    shards = [Shard.from_tensor_and_offsets(piece, at, dist.get_rank()) for at, piece in pieces]
                    value = init_from_local_shards(shards, shape, process_group=self.ctx.group.process_group)
                state |= dict.fromkeys(names, value)
        return {key: state[key] for key in self._keys} | self.module.state_dict()

    def _apply(self, function, recurse=True):
        raise TypeError("FullyShard: move or convert the module before it is sharded; its memory stays where it is now")

    # An iteration

    def _begin(self):
        """Open the shards for gathers, behind the optimizer's step, and gather the root."""
        if self._weights is None:
            for flat in self._flats.values():
                flat.follow_shard()
            self._weights = self._weight_slot.acquire()
            with self._weights.write():
                pass  # what has been launched on this stream: the optimizer, a loaded checkpoint
            self._root.use()

    def _begin_backward(self, _=None):
        if self._sums is not None and self._callback() is None:
            self._end()  # a backward that has failed
        if self._sums is None:
            callback = functools.partial(self._end_backward)  # autograd alone holds it, as long as this backward lasts
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._callback = weakref.ref(callback)
            self._begin()
            self._sums = self._sum_slot.acquire()
            with self._sums.write():
                pass  # what has been launched on this stream: the last step's reads, zero_grad
            for unit in (self._root, *self._units):
                unit.missing = {id(parameter) for flat in unit.trained for parameter in flat.parameters}

    def _end_backward(self):
        """Reduce what is left, the root and units whose end nothing has told, and hand the sums to this stream."""
        self._root.begun = True
        for unit in (self._root, *self._units):
            unit.reduce()
        self._end()

    def _end(self):
        """Give everything back, also what a failure has left; this stream may change shards and gradients then."""
        for unit in (self._root, *self._units):
            unit.close()
        if self._sums is not None:
            if self._callback() is None:  # autograd has let go of the backward before its end: it has failed
                self._forget_gradients()
            with self._sums.read():
                pass
            self._sum_slot.release(self._sums)
            self._sums = None
        if self._weights is not None:
            self._weight_slot.release(self._weights)
            self._weight_slot.join()
            self._weights = None

    # Communication

    def _on_comm(self):
        return self._dev.current_stream() if self.comm_stream is None else self.comm_stream

    @torch.no_grad()
    def _gather(self, flat: "_FlatParameter"):
        comm = self._on_comm()
        lease = self.parameter_pool.acquire(flat.id)
        with self._weights.read(comm), lease.write(comm), self._dev.stream(comm):
            tkernels.all_gather(flat.shard.detach(), out=lease.tensor, ctx=self.ctx)
        return lease

    @torch.no_grad()
    def _reduce(self, flat: "_FlatParameter"):
        comm = self._on_comm()
        lease = self.gradient_pool.acquire(flat.id)
        with lease.read(comm), self._sums.write(comm, ordered=True), self._dev.stream(comm):
            total, scale = tkernels.reduce_scatter(lease.tensor, ctx=self.ctx), flat.scale_after
            if flat.shard.grad is None:
                flat.shard.grad = flat.sums
                torch.mul(total, scale, out=flat.sums)  # rounded once, to what may not hold the sum itself
            else:
                flat.shard.grad.add_(total, alpha=scale)
        self.gradient_pool.release(flat.id)

    # What comes next

    def _used(self, unit: "_Unit"):
        """A unit is about to compute: gather it, unless it is, and what comes after it."""
        self._uses.append(unit)
        if self._expected is not None and self._expected[len(self._uses) - 1 :][:1] != [unit]:
            self._expected = None  # not the order of last time: what was gathered for it makes room
            for other in self._units:
                if other is not unit and not other.uses:
                    other._release()
        unit.gather()
        self._gather_ahead()

    def _next(self, count: int) -> list["_Unit"]:
        return [] if self._expected is None else self._expected[len(self._uses) :][:count]

    def _gather_ahead(self):
        if not self._uses:
            return
        plan = self.parameter_pool.plan
        following = [flat.id for unit in self._next(plan.copies) for flat in unit.flats]
        ahead = set(buckets_ahead(plan, [flat.id for flat in self._uses[-1].flats], following))
        for unit in self._next(plan.copies):
            ids = {flat.id for flat in unit.flats}
            if not unit.leases and (not ids <= ahead or not all(self.parameter_pool.idle(id) for id in ids)):
                return
            unit.gather()


class _FlatParameter:
    """Parameters one after the other: those of a unit that have one dtype, are all trained or all not, and all or none
    of which have Megatron's marks sequence_parallel and tensor_model_parallel, which the shard has then as well.

    parameters, names, shapes, starts: one entry a parameter; a tied one has several names. numel: in all, not padded.
    shard: this rank's R-th. sums: its gradient, memory that is kept. staged: which gradients are in the bucket.
    scale_before, scale_after: a rank's gradients, and their sum; fp16 would not hold sums of what it holds the mean of.
    """

    def __init__(self, id: str, members: list[tuple[nn.Parameter, list[str]]], grad_dtype, size: int):
        self.id = id
        self.parameters, self.names = [p for p, _ in members], [names for _, names in members]
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.dtype, self.trained = self.parameters[0].dtype, self.parameters[0].requires_grad
        self._wanted = self.trained  # of the parameters, as the shard was last seen to be
        self.grad_dtype = grad_dtype or self.dtype
        scales = 1.0, 1 / size
        self.scale_after, self.scale_before = scales if self.grad_dtype == torch.float16 else reversed(scales)
        self.starts, self.numel = [], 0
        for parameter in self.parameters:
            self.starts.append(self.numel)
            self.numel = round_up(self.numel + parameter.numel(), ALIGN)
        self.staged: set[int] = set()
        self._views = {}

    def views(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in a flat tensor."""
        return [
            whole[start : start + shape.numel()].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]

    def pieces(self, rank: int) -> list[list[tuple[list[int], torch.Tensor]]]:
        """What this rank has of each parameter, as rectangles: offsets in the parameter, and views of the shard."""
        values, result = self.shard.detach(), []
        first = rank * values.numel()
        for start, shape in zip(self.starts, self.shapes, strict=True):
            stop = min(first + values.numel(), start + shape.numel())
            at, pieces = max(first, start), []
            for offsets, sizes in _rectangles(shape, at - start, stop - start):
                pieces.append((list(offsets), values[at - first :][: math.prod(sizes)].view(sizes)))
                at += math.prod(sizes)
            result.append(pieces)
        return result

    def shard_over(self, ctx: Context, padded: int) -> nn.Parameter:
        """Keep this rank's part of the values, and empty the parameters."""
        whole = torch.zeros(padded, dtype=self.dtype, device=ctx.device)
        for parameter, view in zip(self.parameters, self.views(whole), strict=True):
            view.copy_(parameter.detach())
        shard = whole.chunk(ctx.size)[ctx.rank].clone()
        self.shard = nn.Parameter(shard, requires_grad=self.trained)
        for mark in filter(None, _marks(self.parameters[0])):
            setattr(self.shard, mark, True)
        self._version = self.shard._version  # torch's count of writes, when the parameters were last exposed
        self.sums = torch.empty_like(shard) if self.trained else None
        self._empty = shard.new_empty(0)
        self.hide()
        return self.shard

    def follow_shard(self):
        """Whether the parameters want gradients is up to the shard, which is what parameters() and optimizers show."""
        wanted = self.shard.requires_grad
        if wanted and not self.trained:
            raise ValueError(
                f"FullyShard: {self.names[0][0]} is to be trained, but was frozen when the module was sharded; shard "
                f"it with requires_grad, and freeze it afterwards by requires_grad_(False) on its shard, {self.id!r}"
            )
        for parameter, names in zip(self.parameters, self.names, strict=True):
            if parameter.requires_grad != self._wanted:
                raise ValueError(
                    f"FullyShard: requires_grad of {names[0]} was changed, but what is sharded together is trained "
                    f"together; call requires_grad_ on the shard, {self.id!r}, or before the module is sharded"
                )
            parameter.requires_grad_(wanted)
        self._wanted = wanted
        if self.shard._version != self._version:
            # For torch, which refuses a backward of what forward has saved and was written to since.
            torch.autograd.graph.increment_version(self.parameters)
            self._version = self.shard._version

    def expose(self, whole: torch.Tensor):
        """Let the parameters be what has been gathered."""
        if whole.data_ptr() not in self._views:
            with lasting():
                self._views[whole.data_ptr()] = self.views(whole)
        for parameter, view in zip(self.parameters, self._views[whole.data_ptr()], strict=True):
            parameter.data = view

    def hide(self):
        """Whoever reads a parameter now finds nothing, and not the values of another unit."""
        for parameter in self.parameters:
            parameter.data = self._empty

    def unstaged(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Every part of the bucket that holds no gradient: of unused parameters, and between and after them."""
        ends = [0] + [self.starts[i] + self.shapes[i].numel() for i in sorted(self.staged)]
        starts = [self.starts[i] for i in sorted(self.staged)] + [whole.numel()]
        return [whole[end:start] for end, start in zip(ends, starts, strict=True) if end < start]


class _Unit:
    """A module whose parameters are gathered while it computes.

    leases: of what is gathered. uses: how many reasons there are to keep it: its forward, its backward, a recomputation
    inside of that. missing: parameters (ids) that this backward has given no gradient yet. begun: whether a backward
    came here since the last reduction.

    When its gradients are reduced, and whether, must not depend on which of them there are, for that may differ between
    ranks: that is where the last of its calls ends in backward, as its inputs' gradients tell. Where none of them
    wants one, and in the root, it is the end of backward.
    """

    def __init__(self, owner: FullyShard, name: str, module: nn.Module, flats: list[_FlatParameter]):
        self.owner, self.name, self.module, self.flats = owner, name, module, flats
        self.leases, self.uses, self.missing, self.begun = {}, 0, set(), False
        self.calls = weakref.WeakSet()  # whose backward may come, as long as their graph is there
        self._reading = contextlib.ExitStack()
        self._forwards, self._open_calls = [], []

    @property
    def trained(self) -> list[_FlatParameter]:
        return [flat for flat in self.flats if flat.trained]

    def watch(self):
        for flat in self.trained:
            for index, parameter in enumerate(flat.parameters):
                parameter.register_post_accumulate_grad_hook(functools.partial(self._collect, flat, index))
        if self is self.owner._root:
            self.module.register_forward_pre_hook(self._refuse_outside, prepend=True)
        else:
            # Before hooks that are there already: they may look at parameters.
            self.module.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
            self.module.register_forward_hook(self._after_forward, always_call=True)

    # Parameters

    def gather(self):
        for flat in self.flats:
            if flat in self.leases:
                continue
            try:
                self.leases[flat] = self.owner._gather(flat)
            except LeaseError as error:
                raise LeaseError(
                    f"FullyShard: unit {self.name or 'root'} can't be gathered: {error}. If activations are "
                    f"checkpointed, let each checkpoint hold one unit alone; where several forwards share a backward, "
                    f"pass copies=3"
                ) from error

    def use(self):
        if self.uses == 0:
            if self is self.owner._root:
                self.gather()
            else:
                self.owner._used(self)
            for flat, lease in self.leases.items():
                self._reading.enter_context(lease.read())
                flat.expose(lease.tensor)
        self.uses += 1

    def unuse(self):
        self.uses -= 1
        if self.uses == 0:
            self._conceal()
            if self.owner._next(1) != [self]:  # the last unit of forward is the first of backward
                self._release()

    def close(self):
        """Give everything back, whatever state it is in."""
        self._conceal()
        self._release()
        self.uses, self.missing = 0, set()
        self._forwards.clear()
        for call in self._open_calls:
            call.open = False
        self._open_calls.clear()
        for flat in self.trained:
            flat.staged.clear()
            if self.owner.gradient_pool.held(flat.id):
                self.owner.gradient_pool.release(flat.id)

    def _conceal(self):
        self._reading.close()
        if self.leases:
            for flat in self.flats:
                flat.hide()

    def _release(self):
        for flat in self.leases:
            self.owner.parameter_pool.release(flat.id)
        self.leases = {}

    # Forward and backward of the module

    def _refuse_outside(self, *_):
        if self.owner._weights is None:
            raise LeaseError(
                f"FullyShard: {type(self.module).__name__} was called outside of the FullyShard's forward and "
                f"backward, where it has no parameters; call the FullyShard, not the module inside"
            )

    def _before_forward(self, module, args, kwargs):
        self._refuse_outside()
        recomputed = self.uses > 0  # inside its own backward
        self.use()
        if not torch.is_grad_enabled() or recomputed:
            self._forwards.append(None)
            return args, kwargs
        call = _Call(self)
        self._forwards.append(call)
        return call.watch_inputs(args, kwargs)

    def _after_forward(self, module, args, output):
        if not self._forwards:  # it failed before it began
            return
        call = self._forwards.pop()
        if call is not None:
            call.watch_outputs(output)
        self.unuse()

    @torch.no_grad()
    def _collect(self, flat: _FlatParameter, index: int, parameter: nn.Parameter):
        """A gradient is complete: into the bucket with it, on the stream that has just made it."""
        self.owner._begin_backward()
        self.begun = True
        self.missing.discard(id(parameter))
        # What is reduced at the end of backward only waits in parameter.grad, and leaves the bucket to other units.
        if self.owner._sync and (self is self.owner._root or all(call.tells for call in self._open_calls)):
            self._stage(flat, index)
        if not self.missing:
            for call in [call for call in self._open_calls if not call.tells]:
                call.end()

    def _stage(self, flat: _FlatParameter, index: int):
        parameter = flat.parameters[index]
        if parameter.grad is None:
            return
        if parameter.grad.layout is not torch.strided:
            raise TypeError(f"FullyShard: the gradient of {flat.names[index][0]} is sparse; ask for a dense one")
        lease = self.owner.gradient_pool.acquire(flat.id)
        start = flat.starts[index]
        with lease.write():
            lease.tensor[start : start + parameter.grad.numel()].view(parameter.grad.shape).copy_(parameter.grad)
        parameter.grad = None
        flat.staged.add(index)

    @torch.no_grad()
    def reduce(self):
        """Reduce the gradients of backwards that came here, with zeros for what they gave none."""
        if not self.owner._sync or not self.begun:
            return
        self.begun = False
        for flat in self.trained:
            if not flat.shard.requires_grad:
                continue
            for index in range(len(flat.parameters)):  # those that waited, or that no_sync has left
                self._stage(flat, index)
            lease = self.owner.gradient_pool.acquire(flat.id)
            with lease.write():
                for part in flat.unstaged(lease.tensor):
                    part.zero_()
                if flat.scale_before != 1:
                    lease.tensor.mul_(flat.scale_before)
            flat.staged.clear()
            self.owner._reduce(flat)


class _Call:
    """One forward of a unit. Its backward begins with the gradient of an output, and ends with those of its inputs.

    open: whether its backward is under way. tells: whether gradients of inputs will tell its end. Where none wants one,
    or none depends on the inputs, it ends with the gradients of the unit's parameters, or with the whole backward.
    """

    def __init__(self, unit: _Unit):
        self.unit, self.open, self.tells = unit, False, False
        self._node = lambda: None  # of the inputs in autograd's graph, which holds this call
        self._ended = None  # the last backward in which it did
        self._addresses = _addresses(unit)
        unit.calls.add(self)

    def watch_inputs(self, args, kwargs):
        inputs = _differentiable(_leaves((args, kwargs)))
        if not inputs:
            return args, kwargs
        passed = dict(zip(map(id, inputs), _Inputs.apply(self, *inputs), strict=True))
        self._node = weakref.ref(next(iter(passed.values())).grad_fn)
        return _map(lambda leaf: passed.get(id(leaf), leaf), (args, kwargs))

    def watch_outputs(self, output):
        leaves = _leaves(output)
        tensors = _differentiable(leaves)
        unknown = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, KNOWN)]
        if unknown and not tensors:
            raise TypeError(
                f"FullyShard: unit {self.unit.name} returns {unknown[0]}, in which no tensor is found that backward "
                f"could begin with; return tensors, or containers or dataclasses of them"
            )
        for tensor in tensors:
            tensor.register_hook(self._begin)

    def to_come(self) -> bool:
        """Whether the backward that is under way will end it."""
        node = self._node()
        task = torch._C._current_graph_task_id()
        return node is not None and self._ended != task and torch._C._will_engine_execute_node(node)

    def _begin(self, _):
        if self.open:  # with the gradient of another output
            return
        self.unit.owner._begin_backward()
        self.open, self.unit.begun, self.tells = True, True, self.to_come()
        self.unit._open_calls.append(self)
        self.unit.use()
        if _addresses(self.unit) != self._addresses:
            raise LeaseError(
                f"FullyShard: unit {self.unit.name} lies elsewhere now than in the forward whose backward this is"
            )

    def end(self):
        if self.open:
            self.open, self._ended = False, torch._C._current_graph_task_id()
            self.unit._open_calls.remove(self)
            if self.tells and not any(call.to_come() for call in self.unit.calls):
                self.unit.reduce()
            self.unit.unuse()


class _Inputs(torch.autograd.Function):
    """The inputs of a unit, as they are. Their gradients come here last of all that backward computes in the unit:
    autograd runs what is ready in the reverse order of forward, and this was its first node."""

    @staticmethod
    def forward(ctx, call: _Call, *tensors):
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tensors

    @staticmethod
    @once_differentiable  # a second backward would find other parameters where those of the first one were
    def backward(ctx, *gradients):
        ctx.call.end()
        return None, *gradients


def _addresses(unit: _Unit) -> list[int]:
    return [lease.tensor.data_ptr() for lease in unit.leases.values()]


def _map(function, values):
    """The same containers and dataclasses, of what `function` makes of their leaves."""

    def of(leaf):
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return function(leaf)
        made = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(made, field.name, _map(function, getattr(leaf, field.name)))
        return made

    return tree_map(of, values)


def _leaves(values) -> list:
    """What containers and dataclasses hold."""
    leaves = []
    _map(leaves.append, values)
    return leaves


def _differentiable(leaves) -> list[torch.Tensor]:
    """The different tensors among them that want a gradient."""
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return list(tensors.values())


def _partition(module, units, ctx, grad_dtype) -> dict[str, tuple[nn.Module, list[_FlatParameter]]]:
    """The root and then the units, by name: the module, its flat parameters."""
    for unit in units if isinstance(units, tuple) else (units,):
        if not isinstance(unit, type):
            raise TypeError(
                f"FullyShard: units are classes of modules, as in units=(nn.Linear,), not instances of "
                f"{type(unit).__name__}"
            )
    names = {name: part for name, part in module.named_modules() if isinstance(part, units)}
    if not names:
        raise ValueError(f"FullyShard: no module is a unit: none is of the types {_class_names(units)}")
    if "" in names:
        raise ValueError("FullyShard: the module itself is of a unit's type; name the types of its parts")
    for name in names:
        inside = [other for other in names if other.startswith(f"{name}.")]
        if inside:
            raise ValueError(f"FullyShard: unit {inside[0]!r} lies inside unit {name!r}; name the types of one level")
    owners = {}  # parameter -> where it is: (module, attribute, full name, unit)
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, FullyShard) or any(isinstance(value, nn.Parameter) for value in vars(part).values()):
            raise ValueError(f"FullyShard: {path or 'the module'} is sharded already; shard it once, from the outside")
        unit = next((name for name in names if f"{path}.".startswith(f"{name}.")), "")
        for attribute, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}".removeprefix(".")
            _check_parameter(name, parameter, ctx, grad_dtype)
            owners.setdefault(parameter, []).append((name, unit))
    groups = {name: {} for name in ("", *names)}
    for parameter, places in owners.items():
        homes = {unit for _, unit in places}
        home = homes.pop() if len(homes) == 1 else ""  # what units share is the root's
        key = (parameter.dtype, parameter.requires_grad, _marks(parameter))
        groups[home].setdefault(key, []).append((parameter, [name for name, _ in places]))
    result, root = {}, "(root)" if "root" in names else "root"
    for name, by_kind in groups.items():
        flats = []
        for (dtype, trained, marks), members in by_kind.items():
            kind = "-".join((str(dtype).removeprefix("torch."), *filter(None, marks), *["frozen"] * (not trained)))
            flats.append(_FlatParameter(f"{name or root}:{kind}", members, grad_dtype, ctx.size))
        result[name] = names.get(name, module), flats
    return result


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements start to stop of a tensor, in the order of memory, as few rectangles: their offsets and sizes."""
    if not shape and start < stop:
        yield (), ()
        return
    row, rest = math.prod(shape[1:]), (0,) * len(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        count = (stop - start) // row
        if within or not count:  # the part of a row, at either end
            end = min(stop, (index + 1) * row)
            for offsets, sizes in _rectangles(shape[1:], within, end - index * row):
                yield (index, *offsets), (1, *sizes)
        else:
            end = start + count * row
            yield (index, *rest), (count, *shape[1:])
        start = end


def _take_off(module: nn.Module, flats: Iterable[_FlatParameter]):
    """Leave the parameters to modules as plain attributes, so that parameters() shows the shards alone."""
    for flat in flats:
        for parameter, names in zip(flat.parameters, flat.names, strict=True):
            for name in names:
                path, _, attribute = name.rpartition(".")
                part = module.get_submodule(path)
                if attribute in part._parameters:  # of a module that is there twice it is gone already
                    del part._parameters[attribute]
                    object.__setattr__(part, attribute, parameter)


def _refuse_assignment(shards, state, prefix, metadata, *_):
    if metadata.get("assign_to_params_buffers"):
        raise ValueError("FullyShard: load_state_dict(assign=True) would leave the sharded module with its old values")


def _refuse_unsharded(sharded, state, prefix, *_):
    found = next((prefix + key for key in sharded._keys if prefix + key in state), None)
    if found is not None:
        raise ValueError(
            f"FullyShard: load_state_dict takes this rank's shards, as state_dict gives them, but {found} is of the "
            f"unsharded module; call load_full_state_dict on every rank"
        )


def _marks(parameter: nn.Parameter) -> tuple[str, str]:
    """Those of Megatron's marks that it has, each in its place or ""."""
    marks = "sequence_parallel", "tensor_model_parallel"
    return tuple(mark if getattr(parameter, mark, False) else "" for mark in marks)


def _check_parameter(name: str, parameter: nn.Parameter, ctx: Context, grad_dtype: torch.dtype | None):
    if parameter.device != ctx.device:
        raise ValueError(f"FullyShard: {name} is on {parameter.device}; move the module to {ctx.device} first")
    if (owner := owner_of(parameter)) is not None:
        raise ValueError(
            f"FullyShard: {name} belongs to {type(owner).__name__}, whose hooks would take its gradients first; call "
            f"remove() of that before the module is sharded, and train the shards with an optimizer of torch"
        )
    if parameter.requires_grad and (grad_dtype or parameter.dtype) not in SUMMED:
        raise TypeError(
            f"FullyShard: {name}: gradients are summed in float32, float16 or bfloat16, not "
            f"{grad_dtype or parameter.dtype}; pass one as grad_dtype"
        )


def _check_equal(ctx: Context, flats: Iterable[_FlatParameter]):
    """Collective. Raises MismatchError, on every rank, unless all hold the same bits."""
    digests = {}
    for flat in flats:
        for names, parameter in zip(flat.names, flat.parameters, strict=True):
            digests[names[0]] = checksum(parameter)
    if difference := first_difference(ctx.group.gather(digests)):
        rank, names = difference
        raise MismatchError(
            f"FullyShard: the modules of rank 0 and rank {rank} differ in {listed(names)}; make them from one seed, or "
            f"load one state dict"
        )


def _class_names(units) -> str:
    return ", ".join(kind.__name__ for kind in (units if isinstance(units, tuple) else (units,)))


def _shape(value) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "extra state"
