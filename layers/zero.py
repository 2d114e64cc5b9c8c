"""ZeroOptimizer: any torch optimizer, with its state and the gradients sharded over data-parallel ranks (ZeRO 1 and 2).

R ranks. The parameters are laid out in *fills*, from the last parameter to the first, as backward comes to them. A fill
is what one bucket holds; each rank owns a part of it: fp32 copies of those parameters (masters), their gradients and
their optimizer state.

    backward   hooks copy gradients into a bucket; full ones are reduced to their owners on the comm stream
    step       owners scale and clip, the wrapped optimizer updates the masters, fills are gathered from their owners

Fills are reduced in one order on all ranks, that of the layout, whatever the order of the hooks and the streams that
they run on; a gradient that comes early waits where autograd put it, and is copied on the stream that it was made on.
What a rank did not use counts as zeros. So ranks may use different parameters.

A backward is a *pass* over all fills. It ends by itself, at the end of backward: what is missing then is taken as it is
in `parameter.grad`, or as zeros. Passes add up in the owners' gradients until `step`.
"""

import contextlib
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

import tkernels
from tkernels.comm import Context, MismatchError, TkernelsError, current_context
from tkernels.comm.lease import Lease, Slot
from tkernels.layers.grad_bucket import GradBucket, Slice

ALIGNMENT = 16  # elements: slices begin at multiples of 16 bytes in every dtype, and so do the owners' parts
FIRST_LOSS_SCALE, GROWTH_INTERVAL = 2.0**16, 2000  # of a dynamic loss scale; as torch.amp.GradScaler


@dataclass(eq=False)
class Fill:
    """Parameters that share a bucket, side by side. rows: how many of its `elements` each rank owns, in rank order."""

    slices: list[Slice]
    elements: int
    rows: tuple[int, ...]


def plan(parameters: Iterable[torch.Tensor], capacity: int, ranks: int, partition: str) -> list[Fill]:
    """Lay out `parameters`, in their order, in fills of up to `capacity` elements; a larger one gets its own.

    partition: "elements" cuts each fill into `ranks` equal parts; "parameters" gives each parameter to one owner, the
    largest of a fill first, each to whoever has least so far. Slices begin at multiples of ALIGNMENT.
    """
    fills, loads, batch, room = [], [0] * ranks, [], capacity

    def close():
        if batch:
            fills.append(_lay_out(batch, capacity, loads, partition))
            batch.clear()

    for parameter in parameters:
        if _padded(parameter) > room:
            close()
            room = capacity
        batch.append(parameter)
        room -= _padded(parameter)
    close()
    return fills


def _padded(parameter: torch.Tensor) -> int:
    return -(-parameter.numel() // ALIGNMENT) * ALIGNMENT


def _lay_out(parameters: list[torch.Tensor], capacity: int, loads: list[int], partition: str) -> Fill:
    ranks = len(loads)
    alone = parameters[0].numel() > capacity  # reduced in the gradient's own storage, which has no padding
    if partition == "parameters":
        owned = [[] for _ in loads]
        for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
            owner = loads.index(min(loads))
            loads[owner] += parameter.numel()
            owned[owner].append(parameter)
        parameters = [parameter for theirs in owned for parameter in theirs]
        rows = [sum(p.numel() if alone else _padded(p) for p in theirs) for theirs in owned]
    else:
        total = sum(map(_padded, parameters))
        part = -(-total // (ranks * ALIGNMENT)) * ALIGNMENT
        end = parameters[0].numel() if alone else part * ranks
        rows = [max(0, min(part, end - rank * part)) for rank in range(ranks)]
    slices, start = [], 0
    for parameter in parameters:
        slices.append(Slice(parameter, start))
        start += _padded(parameter)
    return Fill(slices, sum(rows), tuple(rows))


@dataclass(eq=False)
class _Piece:
    """What this rank owns of one parameter: its elements `start` to `stop`."""

    parameter: torch.Tensor
    start: int
    stop: int
    master: nn.Parameter
    grad: torch.Tensor


class _Shard:
    """A fill's memory on this rank: all of its parameters, and the own part's masters and gradients."""

    def __init__(self, fill: Fill, partition: "_Partition", dev):
        ctx, parameter = partition.ctx, fill.slices[0].parameter
        self.fill, self.partition = fill, partition
        self.large = fill.slices[0].parameter.numel() > partition.bucket.capacity
        self.begin = sum(fill.rows[: ctx.rank])
        self.end = self.begin + fill.rows[ctx.rank]
        self.slot = Slot(
            torch.empty(fill.elements, dtype=parameter.dtype, device=ctx.device), dev=dev, name="parameters"
        )
        self.flat = self.slot.tensor
        self.lease = self.slot.acquire()
        self.awaited = []  # streams that come after the gather
        kept = torch.promote_types(parameter.dtype, torch.float32)
        self.master, self.grad = torch.zeros(2, self.end - self.begin, dtype=kept, device=ctx.device)
        self.has_grad = False
        with self.lease.write():
            self.flat.zero_()
            for slice in fill.slices:
                slice.of(self.flat).copy_(slice.parameter.detach())
                slice.parameter.data = slice.of(self.flat)
        self.pieces = [piece for slice in fill.slices if (piece := self._piece(slice)) is not None]
        self.restart()

    def _piece(self, slice: Slice) -> _Piece | None:
        first, last = max(slice.start, self.begin), min(slice.stop, self.end)
        if first >= last:
            return None
        here = (first - self.begin, last - self.begin)
        shape = slice.parameter.shape if last - first == slice.parameter.numel() else (-1,)
        master, grad = (flat[here[0] : here[1]].view(shape) for flat in (self.master, self.grad))
        return _Piece(slice.parameter, first - slice.start, last - slice.start, nn.Parameter(master), grad)

    @property
    def own(self) -> torch.Tensor:
        """The own part of the parameters."""
        return self.flat[self.begin : self.end]

    def restart(self):
        """Begin a pass."""
        self.missing = {slice.parameter: slice for slice in self.fill.slices}
        self.early = []  # (slice, gradient, the stream that it is ready on)


@dataclass(eq=False)
class _Partition:
    """The fills of one dtype that one group of ranks shares, and the bucket that they take turns in."""

    ctx: Context
    wire: "_Wire"
    bucket: GradBucket
    shards: list[_Shard] = field(default_factory=list)
    turn: int = 0

    @property
    def open(self) -> _Shard | None:
        """The shard whose gradients the bucket takes now."""
        return self.shards[self.turn] if self.turn < len(self.shards) else None


class _Wire:
    """Sums to owners and gathers from them, in place and on the current stream, by our collectives or torch's."""

    def __init__(self, ctx: Context, backend: str, reduction: str):
        self.ctx, self.group, self.ours = ctx, ctx.group.process_group, backend == "tkernels"
        self.scatter = reduction == "reduce_scatter"

    def reduce(self, flat: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
        """Collective. The sum over ranks of this rank's part of `flat`, which is overwritten."""
        own = flat.split(rows)[self.ctx.rank]
        if self.ctx.size == 1:
            return own
        if not self.scatter:
            self.all_reduce(flat)
        elif self.ours:
            tkernels.reduce_scatter(flat, rows=rows, out=own, ctx=self.ctx)
        elif len(set(rows)) == 1:
            own = torch.empty_like(own)
            _reduce_scatter_single(own, flat, group=self.group)
        else:
            for owner, part in zip(self.ctx.group.global_ranks, flat.split(rows), strict=True):
                if part.numel():
                    dist.reduce(part, owner, group=self.group)
        return own

    def gather(self, flat: torch.Tensor, rows: tuple[int, ...]):
        """Collective. Every rank's part of `flat` to all ranks."""
        parts = flat.split(rows)
        if self.ctx.size == 1:
            return
        if self.ours:
            tkernels.all_gather(parts[self.ctx.rank], rows=rows, out=flat, ctx=self.ctx)
        elif len(set(rows)) == 1:
            _all_gather_single(flat, parts[self.ctx.rank], group=self.group)
        else:
            for owner, part in zip(self.ctx.group.global_ranks, parts, strict=True):
                if part.numel():
                    dist.broadcast(part, owner, group=self.group)

    def all_reduce(self, values: torch.Tensor):
        """Collective. The sum over ranks of `values`, in place; the same bits on every rank."""
        if self.ctx.size == 1:
            return
        if self.ours:
            tkernels.all_reduce(values, out=values, ctx=self.ctx)
        else:
            dist.all_reduce(values, group=self.group)


# torch 2.13's names, and those that it deprecates
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ZeroOptimizer:
    """`optimizer_class` over the parameters that this rank owns; gradients and parameters travel by themselves.

        optimizer = ZeroOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, max_norm=1.0)
        for batch in batches:                    # each rank has its own
            loss_of(model(batch)).backward()     # the mean over ranks is what is minimised
            optimizer.step()

    params: parameters, or param groups as torch optimizers take them, the same on every rank; rank 0's values are kept.
        They become contiguous views of common buffers. A group with "ctx" is shared by the ranks of that context only,
        as experts are; gradients are divided by the size of the optimizer's `ctx` all the same.
    optimizer_class, **options: the wrapped optimizer. It sees fp32 masters, in 1-D pieces unless
        partition="parameters". Schedulers take `.optimizer`.
    stage: 2 reduces every backward at once, and no rank keeps full gradients. 1 has `no_sync`, which does keep them.
    bucket_bytes: what one reduction takes. A larger parameter is reduced by itself, where its gradient lies.
    overlap_comm: reduce and gather on a stream beside the current one. The numbers are the same to the bit.
    overlap_gather: a module. Parameters are gathered while its forward runs: a submodule waits, on its own stream, for
        those that are registered on itself. Whoever else reads parameters calls `ensure_params_ready` first.
    reduction: "reduce_scatter", or "all_reduce", of which each rank uses its part.
    backend: "tkernels", or "torch" for torch.distributed on the context's process group.
    partition: "elements" cuts every fill evenly, for optimizers that treat elements alike; "parameters" keeps each
        whole at one owner, for those that look at a whole one (Muon, Adafactor), with uneven parts.
    reduce_dtype: what gradients are summed in; None: the parameter's dtype. Owners add up fp32.
    max_norm: clip the global gradient norm, that of the average over ranks, to it.
    loss_scale: a factor that `scale(loss)` applies and `step` takes away; "dynamic" adapts it. A step whose gradients
        are not finite on some rank is skipped by all. None: neither, and `step` reads nothing back to the host unless
        this rank has left a parameter unused.
    dev: whose streams are meant; torch's module of the device by default.

    Collective, as `step` and backward are. `step` comes after forward and backward on its stream, as usual; it ends the
    accumulation, so zero_grad is needed only to give gradients up. After it: `grad_norm`, a tensor, the norm before
    clipping, and `skipped`. A parameter that no rank has used is left alone, as without sharding. Checkpoints with
    use_reentrant=True are right, but each ends a pass; prefer use_reentrant=False.

    Raises ValueError or TypeError for what can't be sharded, MismatchError if the ranks' parameters or options differ.
    """

    def __init__(
        self,
        params,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        ctx: Context | None = None,
        stage: int = 2,
        bucket_bytes: int = 64 << 20,
        overlap_comm: bool = True,
        overlap_gather: nn.Module | None = None,
        reduction: str = "reduce_scatter",
        backend: str = "tkernels",
        partition: str = "elements",
        reduce_dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        loss_scale: float | str | None = None,
        dev=None,
        **options,
    ):
        self.ctx = ctx or current_context()
        self.stage, self.max_norm, self.overlap_comm = stage, max_norm, overlap_comm
        self._dynamic = loss_scale == "dynamic"
        self.loss_scale = FIRST_LOSS_SCALE if self._dynamic else loss_scale
        self._steps_at_scale = 0
        groups, contexts = _param_groups(params, self.ctx)
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self._index = {parameter: index for index, parameter in enumerate(self._parameters)}
        layout = {
            "stage": stage, "bucket_bytes": bucket_bytes, "overlap_comm": overlap_comm, "reduction": reduction,
            "backend": backend, "partition": partition, "reduce_dtype": reduce_dtype, "max_norm": max_norm,
            "loss_scale": loss_scale, "overlap_gather": overlap_gather is not None,
            "parameters": [(tuple(p.shape), p.dtype) for p in self._parameters],
        }  # fmt: skip
        _check_equal(self.ctx, layout)
        _check_options(layout, optimizer_class)
        _check_parameters(self._parameters, contexts, backend, reduce_dtype)

        self.dev = dev if dev is not None else torch.get_device_module(self.ctx.device)
        here = self.dev.current_stream()
        self.comm_stream = self.dev.Stream() if overlap_comm else here
        self._lock = threading.RLock()
        self._grads = Slot(dev=self.dev, name="the owners' gradients")
        made = self._grads.acquire()
        with made.write():
            self._build(contexts, bucket_bytes, reduction, backend, partition, reduce_dtype)
        self._grads.release(made)
        self._layout = {
            "ranks": self.ctx.size, "partition": partition, "bucket_bytes": bucket_bytes,
            "parameters": layout["parameters"],
        }  # fmt: skip
        self._pieces = [piece for shard in self._shards for piece in shard.pieces]
        pieces_of = {parameter: [] for parameter in self._parameters}
        for piece in self._pieces:
            pieces_of[piece.parameter].append(piece)
        owned = [[piece for parameter in group["params"] for piece in pieces_of[parameter]] for group in groups]
        self._owned = [piece for theirs in owned for piece in theirs]  # in the order of the optimizer's state dict
        self._group_sizes = [len(group["params"]) for group in groups]
        masters = [group | {"params": [p.master for p in theirs]} for group, theirs in zip(groups, owned, strict=True)]
        self.optimizer = optimizer_class(masters, **options)

        self._grads_lease: Lease | None = None
        self._all_used = torch.ones(len(self._parameters), device=self.ctx.device)
        self._used = set()
        self._turn = self._passes = 0
        self._pass_open, self._sync = False, True
        self.grad_norm, self.skipped = None, False
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._ready) for parameter in self._parameters]
        self._overlap_gather = overlap_gather is not None
        if self._overlap_gather:
            self._wait_in_forward(overlap_gather)

    def __repr__(self):
        sizes = f"{len(self._parameters)} parameters in {len(self._shards)} fills"
        return f"ZeroOptimizer({type(self.optimizer).__name__}, stage {self.stage}, rank {self.ctx.rank}, {sizes})"

    @property
    def param_groups(self) -> list[dict]:
        """Those of the wrapped optimizer: change learning rates there. Their params are this rank's masters."""
        return self.optimizer.param_groups

    # Layout

    def _build(self, contexts, bucket_bytes, reduction, backend, partition, reduce_dtype):
        kinds = {}
        for parameter in reversed(self._parameters):
            if parameter.numel():
                ctx = contexts[parameter]
                kinds.setdefault((ctx.name, parameter.dtype), (ctx, []))[1].append(parameter)
        self._partitions, self._wires = [], {}
        for (_, dtype), (ctx, parameters) in kinds.items():
            wire = self._wires.setdefault(ctx, _Wire(ctx, backend, reduction))
            sums = reduce_dtype or dtype
            unit = ctx.size * ALIGNMENT
            capacity = -(-bucket_bytes // (sums.itemsize * unit)) * unit
            fills = plan(parameters, capacity, ctx.size, partition)
            self._partitions.append(self._partition(ctx, wire, fills, capacity, sums))
        # One order for all buckets: that in which backward completes them.
        self._shards = [shard for partition in self._partitions for shard in partition.shards]
        self._shards.sort(key=lambda shard: -min(self._index[slice.parameter] for slice in shard.fill.slices))
        self._shard_of = {slice.parameter: shard for shard in self._shards for slice in shard.fill.slices}
        self._wires.setdefault(self.ctx, _Wire(self.ctx, backend, reduction))
        for shard in self._shards:
            self._gather(shard, (shard.fill.elements, *(0 for _ in shard.fill.rows[1:])))  # what rank 0 has
            self._await(shard)
            shard.master.copy_(shard.own)

    def _partition(self, ctx, wire, fills, capacity, dtype) -> _Partition:
        partition = _Partition(ctx, wire, None)
        partition.bucket = GradBucket(
            capacity,
            dtype,
            ranks=ctx.size,
            average=False,  # the owners do it, in fp32
            reduce=lambda flat: wire.reduce(flat, partition.open.fill.rows),
            deliver=lambda reduced, slices: self._deliver(partition.open, reduced),
            comm_stream=self.comm_stream,
            device=ctx.device,
            dev=self.dev,
        )
        partition.shards = [_Shard(fill, partition, self.dev) for fill in fills]
        # Workspaces grow here, and not in a backward: that is a barrier, and stops the device.
        with self.dev.stream(self.comm_stream):
            for fill in fills:
                wire.reduce(torch.zeros(fill.elements, dtype=dtype, device=ctx.device), fill.rows)
        return partition

    # Gradients

    def _ready(self, parameter: torch.Tensor):
        """The hook: autograd has accumulated parameter.grad on the current stream."""
        if not self._sync or parameter.grad is None or parameter.numel() == 0:
            return
        with self._lock:
            if self._pass_open and parameter not in self._shard_of[parameter].missing:
                self._end_pass()  # a second backward inside the first one
            if not self._pass_open:
                self._begin_pass()
                torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
            self._put(parameter)

    def _begin_pass(self):
        self._turn, self._pass_open = 0, True
        for shard in self._shards:
            shard.restart()
            shard.partition.turn = 0

    def _end_pass(self):
        with self._lock:
            if self._pass_open:
                for shard in self._shards:
                    for parameter in list(shard.missing):
                        self._put(parameter)

    def _put(self, parameter: torch.Tensor):
        """Take parameter.grad, which is ready on the current stream, and reduce the fills that are complete."""
        shard = self._shard_of[parameter]
        grad, parameter.grad = parameter.grad, None
        if grad is not None:
            self._used.add(parameter)
        shard.early.append((shard.missing.pop(parameter), grad, self.dev.current_stream()))
        self._fill_bucket(shard)
        while self._turn < len(self._shards) and not self._shards[self._turn].missing:
            shard = self._shards[self._turn]
            self._fill_bucket(shard)
            shard.partition.bucket.flush(shard.fill.elements)
            shard.partition.turn += 1
            self._turn += 1
            if shard.partition.open is not None:
                self._fill_bucket(shard.partition.open)
        if self._turn == len(self._shards):
            self._pass_open = False
            self._passes += 1

    def _fill_bucket(self, shard: _Shard):
        """Copy what has come of a fill, if the bucket is its own now. A large gradient is reduced when it is added."""
        if shard is not shard.partition.open or (shard.large and shard is not self._shards[self._turn]):
            return
        early, shard.early = shard.early, []
        for slice, grad, stream in early:
            with self.dev.stream(stream):
                shard.partition.bucket.add(slice.parameter, grad, at=slice.start)

    def _deliver(self, shard: _Shard, reduced: torch.Tensor):
        """On the comm stream: add a reduced fill to the owner's gradients."""
        if self._grads_lease is None:
            self._grads_lease = self._grads.acquire()
        with self._grads_lease.write():
            if not shard.has_grad:
                shard.grad.zero_()
                shard.has_grad = True
            shard.grad.add_(reduced)

    @contextlib.contextmanager
    def no_sync(self):
        """Backward inside only accumulates `parameter.grad`, in full on every rank; the next one outside reduces it.

        Raises TkernelsError for stage 2, which keeps no full gradients.
        """
        if self.stage == 2:
            raise TkernelsError(
                "no_sync: stage 2 reduces each backward to the owners' shards, and adds it up there by itself; use "
                "stage=1 to keep full gradients"
            )
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def zero_grad(self, set_to_none: bool = True):
        """Give up the gradients since the last step. Parameters' `.grad` become None in any case."""
        with self._lock:
            self._end_pass()
            for parameter in self._parameters:
                parameter.grad = None
            if self._grads_lease is not None:
                self._grads.release(self._grads_lease)
            self._grads_lease = None
            for shard in self._shards:
                shard.has_grad = False
            for piece in self._pieces:
                piece.master.grad = None
            self._used.clear()
            self._passes = 0

    # Step

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on: times `loss_scale`, if there is one."""
        return loss if self.loss_scale is None else loss * self.loss_scale

    @torch.no_grad()
    def step(self, closure=None):
        """Collective. Update the parameters by the average of the gradients since the last step.

        closure: called first, with gradients enabled; its value is returned, as torch optimizers do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._end_pass()
        if self._passes == 0:  # no backward came to a parameter here; the other ranks may have had one
            self._begin_pass()
            self._end_pass()
        for partition in self._partitions:
            partition.bucket.finish()
        if self._grads_lease is not None:
            with self._grads_lease.read():
                used = self._scale_gradients()
                if not self.skipped:
                    for piece in self._pieces:
                        piece.master.grad = piece.grad if piece.parameter in used else None
                    self.optimizer.step()
        if not self.skipped:
            self._publish()
        self.zero_grad()
        return loss

    def _scale_gradients(self) -> set:
        """Average, unscale and clip. Returns the parameters that some rank has used; sets grad_norm and skipped."""
        local = torch.nn.utils.get_total_norm([piece.grad for piece in self._pieces])
        square = local.to(self.ctx.device, torch.float32).square().reshape(1)
        used, missing = self._used, len(self._used) < len(self._parameters)
        flags = self._all_used
        if missing:
            flags = torch.tensor([float(parameter in used) for parameter in self._parameters]).to(self.ctx.device)
        total = torch.cat([square, flags])
        self._wires[self.ctx].all_reduce(total)
        if missing:
            used = {p for p, flag in zip(self._parameters, total[1:].tolist(), strict=True) if flag > 0}
        inverse = 1 / (self.ctx.size * (self.loss_scale or 1.0))
        self.grad_norm = total[0].sqrt() * inverse
        self.skipped = False
        if self.loss_scale is not None:
            self.skipped = not math.isfinite(self.grad_norm.item())
            self._adapt_loss_scale()
        if not self.skipped:
            factor = inverse
            if self.max_norm is not None:
                factor = (self.max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0) * inverse
            for shard in self._shards:
                shard.grad.mul_(factor)
        return used

    def _adapt_loss_scale(self):
        if not self._dynamic:
            return
        self._steps_at_scale = 0 if self.skipped else self._steps_at_scale + 1
        if self.skipped:
            self.loss_scale /= 2
        elif self._steps_at_scale == GROWTH_INTERVAL:
            self.loss_scale, self._steps_at_scale = self.loss_scale * 2, 0

    # Parameters

    def _publish(self):
        """Give every rank the owners' masters, first those that forward needs first."""
        for shard in reversed(self._shards):
            with shard.lease.read():
                pass  # all that was launched on this stream before may have read the parameters
            shard.slot.release(shard.lease)
            shard.lease, shard.awaited = shard.slot.acquire(), []
            with shard.lease.write():
                shard.own.copy_(shard.master)
            self._gather(shard, shard.fill.rows)
        if not self._overlap_gather:
            self.ensure_params_ready()

    def _gather(self, shard: _Shard, rows: tuple[int, ...]):
        with self.dev.stream(self.comm_stream), shard.lease.write(ordered=True):
            shard.partition.wire.gather(shard.flat, rows)

    def _await(self, shard: _Shard):
        stream = self.dev.current_stream()
        if stream not in shard.awaited:
            shard.lease.filled.wait(stream)
            shard.awaited.append(stream)

    def ensure_params_ready(self):
        """Order the current stream after the gathers of the last step; for readers that overlap_gather doesn't see."""
        for shard in self._shards:
            self._await(shard)

    def _wait_in_forward(self, root: nn.Module):
        def wait_for(shards):
            @torch.compiler.disable
            def wait(module, inputs):
                for shard in shards:
                    self._await(shard)

            return wait

        for module in root.modules():
            own = (self._shard_of.get(parameter) for parameter in module.parameters(recurse=False))
            if shards := list(dict.fromkeys(shard for shard in own if shard is not None)):
                self._hooks.append(module.register_forward_pre_hook(wait_for(shards)))

    @torch.no_grad()
    def refresh_masters(self):
        """Take the parameters' values over into the masters, after they were changed elsewhere, alike on all ranks."""
        self.ensure_params_ready()
        for shard in self._shards:
            shard.master.copy_(shard.own)

    def remove(self):
        """Take the hooks off the parameters and modules; the optimizer can't be used any more."""
        for hook in self._hooks:
            hook.remove()

    # State

    def state_dict(self) -> dict:
        """This rank's part: for the same ranks and layout. `full_state_dict` is for any."""
        return {
            "layout": self._layout | {"rank": self.ctx.rank},
            "optimizer": self.optimizer.state_dict(),
            "masters": [shard.master.clone() for shard in self._shards],
            "loss_scale": (self.loss_scale, self._steps_at_scale),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict):
        """Collective. Take over what `state_dict` gave. Raises ValueError for another layout or rank."""
        expected = self._layout | {"rank": self.ctx.rank}
        if "layout" not in state:
            raise ValueError("load_state_dict: this is no sharded state; a full one goes to load_full_state_dict")
        if differ := [name for name in expected if state["layout"].get(name) != expected[name]]:
            raise ValueError(
                f"load_state_dict: saved with another {', '.join(differ)}; save with full_state_dict, which any number "
                f"of ranks and any layout can load"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for shard, master in zip(self._shards, state["masters"], strict=True):
            shard.master.copy_(master)
        self.loss_scale, self._steps_at_scale = state["loss_scale"]
        self._publish()

    def full_state_dict(self) -> dict:
        """Collective. The state that the unsharded optimizer would have, on the CPU of every rank.

        optimizer_class(params).load_state_dict takes it, and so does load_full_state_dict on any number of ranks.
        "masters" holds the fp32 parameters.
        """
        state = self.optimizer.state_dict()
        full, masters = {}, {}
        for ctx in self._wires:
            mine = [
                (self._index[piece.parameter], piece.start, _to_cpu(piece.master.detach()), {
                    name: _to_cpu(value) for name, value in state["state"].get(position, {}).items()
                })
                for position, piece in enumerate(self._owned)
                if self._shard_of[piece.parameter].partition.ctx is ctx
            ]  # fmt: skip
            for index, start, master, values in (piece for theirs in ctx.group.gather(mine) for piece in theirs):
                shape = self._parameters[index].shape
                _place(masters, index, shape, start, master.numel(), master)
                for name, value in values.items():
                    _place(full.setdefault(index, {}), name, shape, start, master.numel(), value)
        positions, groups = iter(range(len(self._parameters))), []
        for group, size in zip(state["param_groups"], self._group_sizes, strict=True):
            groups.append(group | {"params": [next(positions) for _ in range(size)]})
        return {"state": full, "param_groups": groups, "masters": masters, "loss_scale": self.loss_scale}

    @torch.no_grad()
    def load_full_state_dict(self, state: dict):
        """Collective. Take over a full state, of `full_state_dict` or of the unsharded optimizer.

        Without "masters" the parameters' present values are kept.
        """
        own = self.optimizer.state_dict()
        own["state"] = {
            position: {name: _cut(value, piece) for name, value in state["state"][self._index[piece.parameter]].items()}
            for position, piece in enumerate(self._owned)
            if self._index[piece.parameter] in state["state"]
        }
        own["param_groups"] = [
            theirs | {"params": mine["params"]}
            for theirs, mine in zip(state["param_groups"], own["param_groups"], strict=True)
        ]
        self.optimizer.load_state_dict(own)
        if "masters" in state:
            for piece in self._pieces:
                piece.master.copy_(_cut(state["masters"][self._index[piece.parameter]], piece))
            self._publish()
        else:
            self.refresh_masters()
        if state.get("loss_scale") is not None and self._dynamic:
            self.loss_scale = state["loss_scale"]


def _param_groups(params, ctx: Context) -> tuple[list[dict], dict]:
    """Groups with lists of the parameters that want gradients, and the context of each parameter."""
    groups, contexts = list(params), {}
    if not groups:
        raise ValueError("ZeroOptimizer: there are no parameters")
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    result = []
    for group in groups:
        theirs = group["params"]
        theirs = [theirs] if isinstance(theirs, torch.Tensor) else list(theirs)
        wanted = [parameter for parameter in theirs if parameter.requires_grad]
        for parameter in wanted:
            if parameter in contexts:
                raise ValueError("ZeroOptimizer: a parameter occurs twice")
            contexts[parameter] = group.get("ctx", ctx)
        result.append({name: value for name, value in group.items() if name != "ctx"} | {"params": wanted})
    if not contexts:
        raise ValueError("ZeroOptimizer: no parameter requires a gradient")
    return result, contexts


def _check_equal(ctx: Context, layout: dict):
    asked = ctx.group.gather(layout)
    if differ := [name for name in layout if any(other[name] != asked[0][name] for other in asked)]:
        raise MismatchError(f"ZeroOptimizer: the ranks differ in {', '.join(differ)}; all must pass the same")


def _check_options(layout: dict, optimizer_class):
    for name, values in {
        "stage": (1, 2),
        "reduction": ("reduce_scatter", "all_reduce"),
        "backend": ("tkernels", "torch"),
        "partition": ("elements", "parameters"),
    }.items():
        if layout[name] not in values:
            raise ValueError(f"ZeroOptimizer: {name}={layout[name]!r} is unknown; use {' or '.join(map(repr, values))}")
    for name in ("bucket_bytes", "max_norm", "loss_scale"):
        value = layout[name]
        if value is not None and value != "dynamic" and not value > 0:
            raise ValueError(f"ZeroOptimizer: {name}={value} must be positive")
    if layout["overlap_gather"] and not layout["overlap_comm"]:
        raise ValueError("ZeroOptimizer: overlap_gather needs overlap_comm=True: without it there is no other stream")
    name = optimizer_class.__name__
    if name == "LBFGS":
        raise ValueError("ZeroOptimizer: LBFGS takes products over all parameters, which no rank has")
    if layout["partition"] == "elements" and name in ("Adafactor", "Muon"):
        raise ValueError(f"ZeroOptimizer: {name} looks at whole parameters; pass partition='parameters'")


def _check_parameters(parameters, contexts, backend: str, reduce_dtype):
    for parameter in parameters:
        ctx = contexts[parameter]
        if parameter.device != ctx.device:
            raise ValueError(f"ZeroOptimizer: a parameter is on {parameter.device}, its context on {ctx.device}")
        dtype = reduce_dtype or parameter.dtype
        if not (dtype.is_floating_point and parameter.is_floating_point()):
            raise TypeError(f"ZeroOptimizer: takes floating-point parameters, not {parameter.dtype}")
        if backend == "tkernels" and dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"ZeroOptimizer: backend='tkernels' sums float32, float16 and bfloat16, not {dtype}; use "
                f"backend='torch', or another reduce_dtype"
            )


def _to_cpu(value):
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _place(values: dict, name, shape: torch.Size, start: int, numel: int, value):
    """Put a piece's value at its place in values[name], made in the parameter's shape; what is no piece stays."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() != numel:
        values[name] = value
        return
    if name not in values:
        values[name] = torch.zeros(shape, dtype=value.dtype)
    values[name].view(-1)[start : start + numel] = value.reshape(-1)


def _cut(value, piece: _Piece):
    """The piece of a parameter-shaped value; what has another shape stays as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != piece.parameter.shape:
        return value
    return value.reshape(-1)[piece.start : piece.stop].view(piece.master.shape)
