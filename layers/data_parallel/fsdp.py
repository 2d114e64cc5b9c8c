"""FullyShard: every rank keeps 1/R of the parameters and gathers a unit's full ones only while the unit computes.

    model = FullyShard(model, units=(Block,), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())    # over this rank's shards
    loss(model(x), y).backward()                         # x, y: this rank's part of the batch
    optimizer.step()

The parameters of a unit are laid out one after the other in a flat parameter (one for each combination of dtype,
requires_grad and Megatron marks); a rank's shard is 1/R of it. Parameters of no unit, or of several, belong to the
root, which is gathered when forward begins and stays gathered until the end of backward.

    stream     compute                          comm
    forward    unit 0                           gather unit 1
               unit 1                           gather unit 2, into the memory of unit 0
    backward   unit 1, gradients into a bucket  gather unit 0
               unit 0                           reduce-scatter the gradients of unit 1

The order of the units is learned from the previous iteration (the first one prefetches nothing). Memory comes from two
pools (pools.py), one for parameters and one for gradients, each with a few copies of buffers that fit the largest unit;
the leases of the pools' slots order the streams. The shards have a lease too, and so have their gradients: a gather is
ordered after the optimizer's step, a reduction after whatever the optimizer did with the gradients of the previous
step.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import logging
import math
import numbers
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.utils._pytree import tree_map

import tkernels
from tkernels.comm import Context, LeaseError, MeshLike, MismatchError, as_context
from tkernels.comm.arguments import check_type
from tkernels.comm.capture import lasting
from tkernels.comm.collectives import SUMMED
from tkernels.comm.group import checksum, first_difference, listed
from tkernels.comm.regions import round_up
from tkernels.layers.data_parallel.norms import check_max_norm, check_norm, clip, counts, squared_norm
from tkernels.layers.data_parallel.pools import (
    Bucket,
    FixedPoolAllocator,
    FixedPoolPlan,
    MaxPoolAllocator,
    MaxPoolPlan,
    buckets_ahead,
)
from tkernels.layers.lease import Slot
from tkernels.layers.owners import own, owner_of

ALIGN = 16  # parameters and shards start at multiples of this many elements: 16 bytes or more
GRADIENT_COPIES = 2  # one is filled while the other is reduced, however many units are prefetched
POOLS = {"max": (MaxPoolPlan, MaxPoolAllocator), "fixed": (FixedPoolPlan, FixedPoolAllocator)}
KNOWN = (torch.Tensor, numbers.Number, str, bytes, type(None))  # leaves of outputs; any other type may hide tensors

_log = logging.getLogger("tkernels")


class FullyShard(nn.Module):
    """Shards a module's parameters over ranks. A call runs the module itself, and is collective.

    parameters() are this rank's flat shards. An elementwise optimizer gives the same result on them as on the full
    parameters. Their gradients are the mean over ranks. Between iterations the module's own parameters are empty;
    gather_state_dict() returns their values.

    All ranks must run the same units in the same order. Inside a unit, and outside all units, ranks may use different
    parameters: the gradient of a parameter that a rank didn't use counts as zero. The loss must be computed from the
    output of this module or of its units. requires_grad_(False) on a shard, or on this module, freezes it until undone.
    A rank's shards contribute only a part of the gradient norm, so clip with `clip_grad_norm_`. Checkpoint activations
    one unit at a time. Parameters with Megatron's mark sequence_parallel get separate shards, which carry the mark too,
    for `all_reduce_sequence_parallel_grads` over the tensor-parallel ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        units: type[nn.Module] | tuple[type[nn.Module], ...],
        *,
        mesh: MeshLike = None,
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
        mesh: the ranks, as in `tkernels.comm.as_context`; None: those of the current context.
        overlap: communicate on a separate stream. False uses one stream, and gives the same bits.
        grad_dtype: dtype in which gradients are sent and passes are added up; None: the parameter's dtype. Passes are
            never added up in less than the parameter's dtype. A shard's `.grad` has its own dtype, as torch's
            optimizers need: the sum of all passes so far, rounded once. A wider sum takes memory of its own, 1/R of it
            on each rank; in `no_sync`, in which gradients are whole, all of it.
        pool: "max" for units of any shapes, "fixed" to pool only the largest class of equal units.
        memory: of the pools, "torch" or "symmetric".
        copies: units whose parameters may be gathered at once. `copies - 1` units are prefetched: one by default.
        comm_stream: stream for communication, instead of a new one. Needs overlap.
        dev: module with the streams, instead of the device's (torch.cuda).

        Raises ValueError or TypeError for a module that can't be sharded, MismatchError if it differs between ranks; on
        every rank, whichever it concerns.
        Warns of a class of modules that holds most parameters and is no unit. Logs the pools' slots at INFO.
        """
        super().__init__()
        self.ctx = ctx = as_context(mesh, "FullyShard: mesh")
        with ctx.group.checking():
            check_type("FullyShard: module", module, nn.Module, "an nn.Module")
            if pool not in POOLS:
                raise ValueError(f"FullyShard: pool={pool!r} is unknown; use {' or '.join(POOLS)}")
            if comm_stream is not None and not overlap:
                raise ValueError(
                    "FullyShard: overlap=False communicates on the stream that computes, not on comm_stream; leave one "
                    "out"
                )
            self._keys = [
                key for key, value in module.state_dict(keep_vars=True).items() if isinstance(value, nn.Parameter)
            ]
            parts = _partition(module, units, ctx, grad_dtype)
            self._units = [_Unit(self, name, *own_parts) for name, own_parts in parts.items()]
            self._root = self._units.pop(0)
            self._flats = {flat.id: flat for unit in (self._root, *self._units) for flat in unit.flats}
            plan_of, allocator_of = POOLS[pool]

            def plan(buckets, copies):
                sizes = {unit.name: buckets(unit) for unit in self._units}
                return plan_of.build(sizes, others=buckets(self._root), copies=copies, pad_multiple=ALIGN * ctx.size)

            parameter_plan = plan(lambda unit: [Bucket(f.id, f.dtype, f.numel) for f in unit.flats], copies)
            gradient_plan = plan(
                lambda unit: [Bucket(f.id, f.grad_dtype, f.numel) for f in unit.trained], GRADIENT_COPIES
            )
        _check_equal(ctx, self._flats.values())

        self._dev = dev if dev is not None else torch.get_device_module(ctx.device)
        self.comm_stream = self._dev.Stream() if overlap and comm_stream is None else comm_stream
        # Backward reads parameters at the addresses that forward saved, so a move is an error. Nothing saves the
        # address of a gradient bucket, which is only filled and reduced, so there it is a warning.
        self.parameter_pool, self.gradient_pool = (
            allocator_of(each, memory, strict_assignments=strict, mesh=ctx, dev=dev)
            for each, strict in ((parameter_plan, "error"), (gradient_plan, "warn"))
        )

        if ctx.rank == 0:
            for what, each in ("parameters", self.parameter_pool), ("gradients", self.gradient_pool):
                _log.info("FullyShard: the pool of %s\n%s", what, each)

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
        self._weights = self._sums = None  # leases of these slots, during an iteration and during a backward
        self._callback = lambda: None  # weak reference to the callback that ends the running backward
        self._sync = True
        self._learned = {}  # whether gradients are enabled -> units in the order of their use
        self._uses, self._expected = [], None

    # Only the module inside is compiled. The public torch.compiler.disable would import the compiler, here and below.
    @torch._disable_dynamo(recursive=False)
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
        if gradients:
            self._watch_output(output)
        return output

    @torch._disable_dynamo
    def _watch_output(self, output):
        for tensor in _differentiable(_leaves(output)):
            tensor.register_hook(self._begin_backward)

    @contextlib.contextmanager
    def no_sync(self):
        """A context in which backward communicates no gradients: full ones accumulate until a backward outside of it.

        They do not accumulate in the gradients of the shards, which an optimizer sees. Only this module's `zero_grad`,
        or a backward that fails, discards them.
        """
        self._sync, before = False, self._sync
        try:
            yield
        finally:
            self._sync = before

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True):
        """Discard the gradients of all shards, and those that `no_sync` has accumulated."""
        super().zero_grad(set_to_none)
        self._forget_gradients()

    def _forget_gradients(self):
        """Discard gradients that have not reached the shards: those kept by `no_sync`, or left by a failed backward."""
        for unit in (self._root, *self._units):
            unit.begun = False
            for flat in unit.trained:
                for parameter in flat.parameters:
                    parameter.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, *, tensor_parallel: MeshLike = None) -> torch.Tensor:
        """Collective. Scale the gradients so that their 2-norm over all shards is at most max_norm, up to rounding.

        tensor_parallel: the ranks that layers are split over, if any, given as `mesh` is. The norm is then that of the
        whole model. Without it, such a model raises ValueError.

        Returns the norm before clipping, one fp32 element, the same on every rank. torch's own function would see only
        this rank's shards.
        """
        if tensor_parallel is not None:
            tensor_parallel = as_context(tensor_parallel, "FullyShard.clip_grad_norm_: tensor_parallel")
        check_max_norm("FullyShard.clip_grad_norm_", max_norm)
        check_norm("FullyShard.clip_grad_norm_", self.shards.values(), tensor_parallel)
        grads = {flat: grad for flat in self._flats.values() if (grad := flat.gradient()) is not None}
        counted = (grad for flat, grad in grads.items() if counts(flat.shard, tensor_parallel))
        total = squared_norm(counted, self.ctx.device)
        total = tkernels.all_reduce(total, ctx=self.ctx)
        if tensor_parallel is not None:
            total = tkernels.all_reduce(total, ctx=tensor_parallel)
        norm = total.sqrt().squeeze()
        clip(grads.values(), norm, max_norm)
        for flat in grads:
            flat.show()
        return norm

    def close(self):
        """Collective with memory="symmetric". Free the memory of both pools; may be repeated.

        The shards and `gather_state_dict` remain usable, but the module can't compute any more.
        """
        self._end()
        for pool in (self.parameter_pool, self.gradient_pool):
            pool.close()

    @property
    def slots(self) -> list[Slot]:
        """The slots to pass to `layers.captured`, together with `comm_stream`, to capture whole iterations.

        Run two iterations first: one to learn the order of the units, one to find every copy. Then set the gradients to
        None.
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
        """Load the state dict of an unsharded module; each rank takes its part. Not collective.

        Raises ValueError, before anything is changed, unless its keys and shapes are those of the module.
        """
        check_type("load_full_state_dict: full", full, Mapping, "a state dict")
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
        """Collective. A state dict for torch.distributed.checkpoint, with the keys of the unsharded module.

        A checkpoint of it loads on any number of ranks, and into the unsharded module. This rank's part of a parameter
        is returned as the pieces of a ShardedTensor. The pieces are views of the shard, so loading into them loads the
        model. Buffers are returned as they are.
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

    @torch._disable_dynamo
    def _begin(self):
        """Lease the shards, so that gathers are ordered behind the optimizer's step, and gather the root."""
        if self._weights is None:
            for flat in self._flats.values():
                flat.follow_shard()
            self._weights = self._weight_slot.acquire()
            with self._weights.write():
                pass  # the producer is whatever this stream has launched: the optimizer, a loaded checkpoint
            self._root.use()

    @torch._disable_dynamo
    def _begin_backward(self, _=None):
        if self._sums is not None and self._callback() is None:
            self._end()  # clean up after a backward that failed
        if self._sums is None:
            callback = functools.partial(self._end_backward)  # only autograd holds it, as long as this backward lasts
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            self._callback = weakref.ref(callback)
            self._begin()
            self._sums = self._sum_slot.acquire()
            with self._sums.write():
                pass  # behind whatever this stream has launched: the last step's reads, zero_grad
            for unit in (self._root, *self._units):
                unit.missing = {id(parameter) for flat in unit.trained for parameter in flat.parameters}

    @torch._disable_dynamo
    def _end_backward(self):
        """Reduce what is left (the root, units whose end nothing signaled), and order this stream behind the sums."""
        self._root.begun = True
        for unit in (self._root, *self._units):
            unit.reduce()
        self._end()

    @torch._disable_dynamo
    def _end(self):
        """Release everything, even after a failure. From here on, this stream may change shards and gradients."""
        for unit in (self._root, *self._units):
            unit.close()
        if self._sums is not None:
            # Nothing has called the callback: backward failed. It may be there even so, once backward() has raised: the
            # thread that ran backward drops it in its own time.
            if self._callback() is None or torch._C._current_graph_task_id() == -1:
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
            total, sums = tkernels.reduce_scatter(lease.tensor, ctx=self.ctx), flat.gradient()
            if sums is None:
                torch.mul(total, flat.scale_after, out=flat.sums)  # rounded once: it may not hold the unscaled sum
            else:
                sums.add_(total, alpha=flat.scale_after)
            flat.show()
        self.gradient_pool.release(flat.id)

    # Prefetching

    def _used(self, unit: "_Unit"):
        """Called before a unit computes: gather it, unless it is gathered already, and prefetch the units after it."""
        self._uses.append(unit)
        if self._expected is not None and self._expected[len(self._uses) - 1 :][:1] != [unit]:
            self._expected = None  # the order has changed: release what was prefetched for the old one
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
    """Parameters of one unit, laid out one after the other.

    All have the same dtype, requires_grad and Megatron marks (sequence_parallel, tensor_model_parallel). The shard
    carries the marks too.

    parameters, names, shapes, starts: one entry per parameter; a tied one has several names.
    numel: of all of them, each padded to a multiple of ALIGN, before the pool's padding.
    shard: this rank's 1/R. sums: its gradient, as passes are added up; the memory is kept between steps. shown: what
        the shard has as `.grad`: `sums`, or a copy of it in the shard's dtype. staged: indices of the parameters whose
        gradients are in the bucket.
    scale_before, scale_after: factors on a rank's gradients and on their sum. fp16 scales before the reduction, since
        it may hold the mean of the gradients but not their sum.
    """

    def __init__(self, id: str, members: list[tuple[nn.Parameter, list[str]]], grad_dtype, size: int):
        self.id = id
        self.parameters, self.names = [p for p, _ in members], [names for _, names in members]
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.dtype, self.trained = self.parameters[0].dtype, self.parameters[0].requires_grad
        self._wanted = self.trained  # requires_grad of the parameters, as last copied from the shard
        self.grad_dtype = grad_dtype or self.dtype
        self.sum_dtype = torch.promote_types(self.grad_dtype, self.dtype)
        scales = 1.0, 1 / size
        self.scale_after, self.scale_before = scales if self.grad_dtype == torch.float16 else reversed(scales)
        self.starts, self.numel = [], 0
        for parameter in self.parameters:
            self.starts.append(self.numel)
            self.numel = round_up(self.numel + parameter.numel(), ALIGN)
        self.staged: set[int] = set()
        self._views = {}

    def views(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat tensor, one per parameter and in its shape."""
        return [
            whole[start : start + shape.numel()].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]

    def pieces(self, rank: int) -> list[list[tuple[list[int], torch.Tensor]]]:
        """This rank's part of each parameter, as rectangles: (offsets in the parameter, view of the shard)."""
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
        """Keep this rank's part of the values as the shard, which is returned, and empty the parameters."""
        whole = torch.zeros(padded, dtype=self.dtype, device=ctx.device)
        for parameter, view in zip(self.parameters, self.views(whole), strict=True):
            view.copy_(parameter.detach())
        shard = whole.chunk(ctx.size)[ctx.rank].clone()
        self.shard = nn.Parameter(shard, requires_grad=self.trained)
        for mark in filter(None, _marks(self.parameters[0])):
            setattr(self.shard, mark, True)
        self._version = self.shard._version  # torch's count of writes to the shard, as last seen by follow_shard
        self.sums = self.shown = None
        if self.trained:
            self.sums = torch.zeros_like(shard, dtype=self.sum_dtype)
            self.shown = self.sums.to(self.dtype)
        self._empty = shard.new_empty(0)
        self.hide()
        return self.shard

    def follow_shard(self):
        """Copy requires_grad from the shard, which parameters() and optimizers show, to the parameters.

        Raises ValueError for a shard of parameters that were frozen when they were sharded, and where requires_grad of
        a parameter itself was changed.
        """
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
            # Lets torch refuse a backward through parameters that forward saved and that were written to since.
            torch.autograd.graph.increment_version(self.parameters)
            self._version = self.shard._version

    def gradient(self) -> torch.Tensor | None:
        """`sums`, brought up to date with what others have written to the shard's `.grad`; None if that is None."""
        grad = self.shard.grad
        if not self.trained or grad is None:
            return None
        if grad is not self.sums:
            # Told by the value: torch counts no writes of a graph's replay, nor those to `.data`.
            self.sums.copy_(torch.where(grad == self.sums.to(grad.dtype), self.sums, grad))
        return self.sums

    def show(self):
        """Make the shard's `.grad` the sums, in its own dtype."""
        if self.shown is not self.sums:
            self.shown.copy_(self.sums)
        self.shard.grad = self.shown

    def expose(self, whole: torch.Tensor):
        """Point the parameters at their views of the gathered tensor."""
        if whole.data_ptr() not in self._views:
            with lasting():
                self._views[whole.data_ptr()] = self.views(whole)
        for parameter, view in zip(self.parameters, self._views[whole.data_ptr()], strict=True):
            parameter.data = view

    def hide(self):
        """Empty the parameters, so that a read finds nothing rather than the values of another unit."""
        for parameter in self.parameters:
            parameter.data = self._empty

    def unstaged(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the bucket that hold no gradient: unused parameters, and the padding between and after all."""
        ends = [0] + [self.starts[i] + self.shapes[i].numel() for i in sorted(self.staged)]
        starts = [self.starts[i] for i in sorted(self.staged)] + [whole.numel()]
        return [whole[end:start] for end, start in zip(ends, starts, strict=True) if end < start]


class _Unit:
    """A module whose parameters are gathered while it computes.

    leases: by flat parameter, of those that are gathered. uses: how many forwards, backwards, and recomputations inside
    a backward, keep the unit gathered. missing: ids of parameters without a gradient yet in this backward. begun:
    whether a backward has reached this unit since the last reduction.

    When and whether its gradients are reduced must not depend on which gradients exist, since that may differ between
    ranks. The reduction comes where the last of the unit's calls ends in backward, which the gradients of its inputs
    signal. If no input requires a gradient, and in the root, it comes at the end of backward.
    """

    def __init__(self, owner: FullyShard, name: str, module: nn.Module, flats: list[_FlatParameter]):
        self.owner, self.name, self.module, self.flats = owner, name, module, flats
        self.leases, self.uses, self.missing, self.begun = {}, 0, set(), False
        self.calls = weakref.WeakSet()  # calls whose backward may still come; their autograd graph keeps them alive
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
            # Ahead of hooks that are registered already, which may read parameters.
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
            if self.owner._next(1) != [self]:  # kept if used next: the last unit of forward is the first of backward
                self._release()

    def close(self):
        """Release everything, whatever state the unit is in."""
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

    @torch._disable_dynamo
    def _refuse_outside(self, *_):
        if self.owner._weights is None:
            raise LeaseError(
                f"FullyShard: {type(self.module).__name__} was called outside of the FullyShard's forward and "
                f"backward, where it has no parameters; call the FullyShard, not the module inside"
            )

    @torch._disable_dynamo
    def _before_forward(self, module, args, kwargs):
        self._refuse_outside()
        recomputed = self.uses > 0  # by activation checkpointing, inside the unit's own backward
        self.use()
        if not torch.is_grad_enabled() or recomputed:
            self._forwards.append(None)
            return args, kwargs
        call = _Call(self)
        self._forwards.append(call)
        return call.watch_inputs(args, kwargs)

    @torch._disable_dynamo
    def _after_forward(self, module, args, output):
        if not self._forwards:  # this forward failed before it began
            return
        call = self._forwards.pop()
        if call is not None:
            call.watch_outputs(output)
        self.unuse()

    @torch._disable_dynamo
    @torch.no_grad()
    def _collect(self, flat: _FlatParameter, index: int, parameter: nn.Parameter):
        """Hook on a complete gradient: copy it into the bucket, on the stream that has just produced it."""
        self.owner._begin_backward()
        self.begun = True
        self.missing.discard(id(parameter))
        # A gradient that is reduced only at the end of backward stays in parameter.grad: other units use the bucket.
        if self.owner._sync and (self is self.owner._root or all(call.tells for call in self._open_calls)):
            self._stage(flat, index)
        elif parameter.grad is not None and parameter.grad.dtype != flat.sum_dtype:
            # From here on, autograd itself adds passes up in this dtype.
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = flat.sum_dtype
            parameter.grad = grad.to(flat.sum_dtype)
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
        """Reduce the gradients of the backwards that reached this unit, with zeros for parameters without one."""
        if not self.owner._sync or not self.begun:
            return
        self.begun = False
        for flat in self.trained:
            if not flat.shard.requires_grad:
                continue
            for index in range(len(flat.parameters)):  # gradients still in parameter.grad, deferred or from no_sync
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
    """One forward of a unit. Its backward begins with the gradient of an output and ends with those of its inputs.

    open: whether its backward is running. tells: whether the gradients of inputs will signal its end. If no input
    requires a gradient, or this backward doesn't reach the inputs, the call ends with the gradients of the unit's
    parameters, or with the whole backward.
    """

    def __init__(self, unit: _Unit):
        self.unit, self.open, self.tells = unit, False, False
        self._node = lambda: None  # weak reference to the inputs' node in autograd's graph, which holds this call
        self._ended = None  # id of the last backward in which this call ended
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
        """Whether the running backward will still signal the end of this call."""
        node = self._node()
        task = torch._C._current_graph_task_id()
        return node is not None and self._ended != task and torch._C._will_engine_execute_node(node)

    @torch._disable_dynamo
    def _begin(self, _):
        if self.open:  # opened by the gradient of another output
            return
        self.unit.owner._begin_backward()
        self.open, self.unit.begun, self.tells = True, True, self.to_come()
        self.unit._open_calls.append(self)
        self.unit.use()
        if _addresses(self.unit) != self._addresses:
            raise LeaseError(
                f"FullyShard: unit {self.unit.name} lies elsewhere now than in the forward whose backward this is"
            )

    @torch._disable_dynamo
    def end(self):
        if self.open:
            self.open, self._ended = False, torch._C._current_graph_task_id()
            self.unit._open_calls.remove(self)
            if self.tells and not any(call.to_come() for call in self.unit.calls):
                self.unit.reduce()
            self.unit.unuse()


class _Inputs(torch.autograd.Function):
    """The identity on a unit's inputs, whose backward runs last of all the unit's nodes.

    Autograd runs the nodes that are ready in the reverse order of forward, and this was the unit's first.
    """

    @staticmethod
    def forward(ctx, call: _Call, *tensors):
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tensors

    @staticmethod
    @once_differentiable  # double backward would find other parameters at the addresses of the first backward
    def backward(ctx, *gradients):
        ctx.call.end()
        return None, *gradients


def _addresses(unit: _Unit) -> list[int]:
    return [lease.tensor.data_ptr() for lease in unit.leases.values()]


def _map(function, values):
    """Rebuild nested containers and dataclasses with `function` applied to their leaves."""

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
    _map(leaves.append, values)
    return leaves


def _differentiable(leaves) -> list[torch.Tensor]:
    """The distinct tensors among the leaves that require a gradient."""
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return list(tensors.values())


def _partition(module, units, ctx, grad_dtype) -> dict[str, tuple[nn.Module, list[_FlatParameter]]]:
    """Name -> (module, its flat parameters): the root first, then the units."""
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
    owners = {}  # parameter -> the places where it occurs: (full name, unit)
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, FullyShard) or any(isinstance(value, nn.Parameter) for value in vars(part).values()):
            raise ValueError(f"FullyShard: {path or 'the module'} is sharded already; shard it once, from the outside")
        unit = next((name for name in names if f"{path}.".startswith(f"{name}.")), "")
        for attribute, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}".removeprefix(".")
            _check_parameter(name, parameter, ctx, grad_dtype)
            owners.setdefault(parameter, []).append((name, unit))
    _warn_of_a_forgotten_class(module, names, owners)
    groups = {name: {} for name in ("", *names)}
    for parameter, places in owners.items():
        homes = {unit for _, unit in places}
        home = homes.pop() if len(homes) == 1 else ""  # parameters that units share belong to the root
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


def _warn_of_a_forgotten_class(module: nn.Module, units: dict[str, nn.Module], owners):
    """Warns if modules of one class that could be units, but are none, hold more than half of the parameters.

    Of such modules inside one another, the outermost count whose class occurs more than once: a layer rather than the
    stack that it is part of. A parameter that occurs in several places belongs to the root in any case.
    """
    around = {name[:end] for name in units for end, letter in enumerate(name) if letter == "."}
    taken = {nn.ModuleList, nn.ModuleDict, nn.Sequential, *(type(module.get_submodule(path)) for path in ("", *around))}
    taken |= {type(part) for unit in units.values() for part in unit.modules()}
    free = {path: type(part) for path, part in module.named_modules() if type(part) not in taken}
    occurrences, held = collections.Counter(free.values()), collections.Counter()
    for parameter, places in owners.items():
        name = places[0][0]
        kinds = [free[name[:end]] for end, letter in enumerate(name) if letter == "." and name[:end] in free]
        if kinds and len(places) == 1:
            held[next((kind for kind in kinds if occurrences[kind] > 1), kinds[0])] += parameter.numel()
    total = sum(parameter.numel() for parameter in owners)
    for kind, numel in held.most_common(1):
        if 2 * numel > total:
            warnings.warn(
                f"FullyShard: modules of class {kind.__name__} hold {100 * numel // total} % of the parameters and are "
                f"no units, so every rank has all of that gathered for the whole iteration; add {kind.__name__} to "
                f"units=",
                stacklevel=4,
            )


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cover elements [start, stop) of a tensor, in memory order, by few rectangles: yields their offsets and sizes."""
    if not shape and start < stop:
        yield (), ()
        return
    row, rest = math.prod(shape[1:]), (0,) * len(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        count = (stop - start) // row
        if within or not count:  # a partial row, at either end
            end = min(stop, (index + 1) * row)
            for offsets, sizes in _rectangles(shape[1:], within, end - index * row):
                yield (index, *offsets), (1, *sizes)
        else:
            end = start + count * row
            yield (index, *rest), (count, *shape[1:])
        start = end


def _take_off(module: nn.Module, flats: Iterable[_FlatParameter]):
    """Turn the modules' parameters into plain attributes, so that parameters() shows only the shards."""
    for flat in flats:
        for parameter, names in zip(flat.parameters, flat.names, strict=True):
            for name in names:
                path, _, attribute = name.rpartition(".")
                part = module.get_submodule(path)
                if attribute in part._parameters:  # removed already where a module occurs twice
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
    """The parameter's Megatron marks, each at a fixed position, or "" there if it has not got the mark."""
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
    """Collective. Raises MismatchError, on every rank, unless all ranks' parameters have the same bits."""
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
