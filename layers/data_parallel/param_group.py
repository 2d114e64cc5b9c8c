"""A group of parameters that are gathered together and whose gradients are reduced together.

A parameter exists twice, and the module has one of the two at a time:

    sharded   nn.Parameter over a DTensor, Shard(0) over the data-parallel ranks: what optimizers and checkpoints see
    whole     nn.Parameter of the original shape in `param_dtype`: what computes, a view of the gathered buffer

A parameter that is a DTensor already, over tensor-parallel ranks, has a whole that is one too, and a sharded one over
both dimensions, placed as torch's FSDP2 places it: (_StridedShard(0), Shard(0)) where both split rows.

This module moves data on the current stream; who waits for whom is the engine's business.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import tkernels
from tkernels.comm import Context
from tkernels.comm.capture import lasting
from tkernels.comm.collectives import SUMMED
from tkernels.layers.data_parallel.layout import Layout
from tkernels.layers.owners import attributes, replace, untrained, weakly
from tkernels.layers.tensor_parallel.float8 import Float8
from tkernels.layers.tensor_parallel.replica_check import has_others_hooks

_GATHERED = (
    "what fully_shard has gathered for a forward, whose gradients and updates the model would not see; make the "
    "optimizer before the first forward, or after model.reset_iter_state()"
)


@dataclass(frozen=True)
class DataParallelRanks:
    """The ranks that a unit is trained on: those that hold parts of it, and those that hold the same part.

    mesh: of one dimension, or (replicas, shards). placements: one for each of its dimensions.
    shard: context of the ranks over which parameters are split; None: they are not. replica: context of those with the
    same part; None: there is one copy.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shard: Context | None = None
    replica: Context | None = None

    @property
    def parts(self) -> int:
        return 1 if self.shard is None else self.shard.size

    @property
    def part(self) -> int:
        return 0 if self.shard is None else self.shard.rank

    @property
    def size(self) -> int:
        return self.parts * (1 if self.replica is None else self.replica.size)

    @property
    def contexts(self) -> list[Context]:
        return [ctx for ctx in (self.shard, self.replica) if ctx is not None]

    @contextlib.contextmanager
    def checking(self):
        """Collective. What the block raises on one rank is raised on all of them."""
        with contextlib.ExitStack() as checks:
            for ctx in reversed(self.contexts):
                checks.enter_context(ctx.group.checking())
            yield

    def spec_of(self, parameter: torch.Tensor, beside: DeviceMesh | None = None) -> DTensorSpec:
        """Where the sharded parameter's parts lie.

        beside: the tensor-parallel mesh of other parameters. On that, a plain one is the same everywhere, and says so:
        norms and products of DTensors must be of one mesh.
        """
        if not isinstance(parameter, DTensor):
            meta = TensorMeta(parameter.shape, torch.empty(parameter.shape, device="meta").stride(), parameter.dtype)
            if beside is None:
                return DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
            tp = DTensorSpec(beside, (Replicate(),) * beside.ndim, tensor_meta=meta)
        else:
            tp = parameter._spec
        # DTensor reads placements from left to right. Rows are split over `tp` first, so the split over this mesh, to
        # the left of it, has to be told that it is the inner one.
        factor = tp.num_shards_map[0]
        placements = [
            _StridedShard(0, split_factor=factor) if isinstance(placement, Shard) and factor > 1 else placement
            for placement in self.placements
        ]
        return DTensorSpec(
            DeviceMesh._concatenate([self.mesh, tp.mesh]), (*placements, *tp.placements), tensor_meta=tp.tensor_meta
        )


@dataclass(eq=False)
class Parameter:
    """One parameter of a group.

    places: (module, attribute) of all its names. shape: of the whole, on this rank. float8: of the layer that
    multiplies by it, if it is gathered in FP8.
    producer: the stream that has written `whole.grad` last. unrounded: the gradient of the sharded one before it was
    rounded to that one's dtype, if `reduce_dtype` is wider; of the comm stream, which alone uses it.
    """

    name: str
    places: list[tuple[nn.Module, str]]
    sharded: nn.Parameter
    shape: torch.Size
    tensor_parallel: DTensorSpec | None
    group: "ParamGroup | None" = None
    whole: nn.Parameter | None = None
    producer: object = None
    unrounded: torch.Tensor | None = None
    float8: Float8 | None = None
    _marks: dict = field(default_factory=dict)
    _hooks: list = field(default_factory=list)  # on gradients of the whole: registered before, or by a ReplicaCheck

    @classmethod
    @torch.no_grad()
    def of(cls, name, places, parameter: nn.Parameter, ranks: DataParallelRanks, beside, device, float8) -> "Parameter":
        """Split a parameter; the module gets the sharded one. beside: see DataParallelRanks.spec_of."""
        spec, marks = ranks.spec_of(parameter, beside), attributes(parameter)
        tensor_parallel = parameter._spec if isinstance(parameter, DTensor) else None
        local = parameter._local_tensor if tensor_parallel is not None else parameter.detach()
        chunk = -(-local.shape[0] // ranks.parts)
        rows = local[min(ranks.part * chunk, len(local)) :][:chunk]
        target = device if rows.device.type != "meta" else rows.device
        part = torch.empty(rows.shape, dtype=rows.dtype, device=target).copy_(rows)
        sharded = nn.Parameter(DTensor(part, spec, requires_grad=False), requires_grad=parameter.requires_grad)
        replace(parameter, sharded, "fully_shard")
        hooks = list((parameter._backward_hooks or {}).values())
        made = cls(name, places, sharded, local.shape, tensor_parallel, float8=float8, _marks=marks, _hooks=hooks)
        made.register(sharded)
        return made

    def register(self, parameter: nn.Parameter):
        """Make it the module's."""
        for module, attribute in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = parameter
            else:  # it keeps references of its own, as nn.LSTM does
                setattr(module, attribute, parameter)

    def make_whole(self, dtype: torch.dtype, device: torch.device, hook):
        """The parameter that computes, still without memory; hook: as of `watch`."""
        if self.tensor_parallel is None:
            whole = torch.empty(0, dtype=dtype, device=device)
        else:
            spec = self.tensor_parallel
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(spec.shape, spec.stride, dtype))
            local = torch.empty(1, dtype=dtype, device=device).expand(self.shape)
            whole = DTensor(local, spec, requires_grad=False)
        self.whole = nn.Parameter(whole, requires_grad=dtype.is_floating_point)
        vars(self.whole).update(self._marks)
        untrained(self.whole, self.sharded, _GATHERED)
        if self.whole.requires_grad:  # as it is the first time; later as the sharded one says
            for each in self._hooks:
                self.whole.register_hook(each)
            self.watch(hook)

    def take_hooks(self):
        """Let hooks on the sharded parameter, to which autograd hands nothing, be called with the whole's gradient."""
        added = [hook for hook in self.sharded._backward_hooks.values() if hook not in self._hooks]
        self._hooks += added
        for each in added:
            self.whole.register_hook(each)

    def watch(self, hook: Callable):
        """Call hook(self), a bound method's, with each gradient that is complete. Returns the handle.

        Torch's collector doesn't see what these hooks hold, so this one keeps nothing alive.
        """
        hook, this = weakly(hook), weakref.ref(self)

        @torch._disable_dynamo
        def ready(whole):
            if whole.grad is not None:
                hook(this())

        return self.whole.register_post_accumulate_grad_hook(ready)

    @property
    def counter(self) -> torch.Tensor:
        """What has torch's count of writes to the whole parameter's memory, since it got it or from some number on."""
        return self.whole if self.tensor_parallel is None else self.whole._local_tensor

    def point(self, memory: torch.Tensor):
        """Make the whole parameter a view of this memory."""
        if self.tensor_parallel is None:
            self.whole.data = memory
        else:
            self.whole._local_tensor = memory

    @torch.no_grad()
    def widen_gradient(self):
        """Keep the whole gradient in `reduce_dtype`, in which autograd itself adds up what is yet to come."""
        grad, dtype = self.whole.grad, self.group.reduce_dtype
        if grad is not None and grad.dtype != dtype:
            self.whole.grad = None
            self.whole.grad_dtype = dtype
            self.whole.grad = grad.to(dtype)

    def take_gradient(self) -> torch.Tensor | None:
        """The whole gradient, on this rank's tensor-parallel part, which the parameter gives up; None if it has none.

        Collective over the tensor-parallel ranks if a style of torch's has left sums to be made.
        """
        grad, self.whole.grad = self.whole.grad, None
        if isinstance(grad, DTensor):
            if grad.placements != self.tensor_parallel.placements:
                grad = grad.redistribute(placements=self.tensor_parallel.placements)
            grad = grad.to_local()
        if grad is not None and grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {self.name} is sparse; ask its layer for a dense one")
        return grad


class ParamGroup:
    """Parameters of one unit that have one dtype, and their layout.

    flat: this rank's part of all of them [S], of which the sharded parameters' local tensors are views; None until the
    parameters are on a device. dtype, param_dtype, reduce_dtype: of the shard, of what is gathered and computes, and of
    what is reduced. divisor: of the sum of gradients, a number; None: the number of data-parallel ranks.
    """

    def __init__(self, kind: str, parameters: list[Parameter], ranks: DataParallelRanks, policy: MixedPrecisionPolicy):
        self.kind, self.parameters, self.ranks, self.policy = kind, parameters, ranks, policy
        self.layout = Layout([parameter.shape for parameter in parameters], ranks.parts)
        self.flat: torch.Tensor | None = None
        self.divisor: float | None = None
        self.id = kind
        self._shards: list[torch.Tensor] = []
        self._counters: list[tuple[str, torch.Tensor]] = []  # of writes to the whole parameters
        self._writes: list[int] = []  # what they said when the module got these
        self._hidden: dict[int, int] = {}  # by a counter of writes, what it says while `conceal` has it say so
        self._views, self._layouts = {}, {}
        for parameter in parameters:
            parameter.group = self

    @property
    def numel(self) -> int:
        """Of the gathered buffer."""
        return self.ranks.parts * self.layout.numel

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].sharded._local_tensor.dtype

    @property
    def param_dtype(self) -> torch.dtype:
        return param_dtype_of(self.dtype, self.policy)

    @property
    def gathered_dtype(self) -> torch.dtype:
        return self.param_dtype

    @property
    def in_place(self) -> bool:
        """Whether the whole parameters are the sharded ones' memory: nothing is split, and nothing converted."""
        return self.ranks.shard is None and self.param_dtype == self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.policy.reduce_dtype or self.param_dtype

    @property
    def adds_up_wider(self) -> bool:
        """Whether gradients are added up over backwards in `reduce_dtype`, beside those that optimizers see."""
        return torch.promote_types(self.dtype, self.reduce_dtype) == self.reduce_dtype != self.dtype

    @property
    def trained(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.sharded.requires_grad]

    @lasting()
    @torch.no_grad()
    def settle(self, hook) -> bool:
        """Lay the shards out in one buffer, unless they are: they are new, or were moved, converted or assigned.

        Returns whether it did. Raises ValueError for parameters on the meta device, for those that have become
        something else, and for hooks that would never be called.
        """
        found = [module._parameters.get(attribute) for module, attribute in (p.places[0] for p in self.parameters)]
        for parameter, now in zip(self.parameters, found, strict=True):
            if now is not None and now._backward_hooks and has_others_hooks(now):
                raise ValueError(
                    f"fully_shard: {parameter.name} has a hook of register_hook, but as a sharded parameter it gets no "
                    f"gradient by autograd; register it before fully_shard, for this rank's gradient, or use "
                    f"register_post_accumulate_grad_hook, for the mean over ranks"
                )
        if self._shards and all(
            now is parameter.sharded and now._local_tensor is shard
            for now, parameter, shard in zip(found, self.parameters, self._shards, strict=True)
        ):
            return False
        for parameter, now in zip(self.parameters, found, strict=True):
            self._check_settled(parameter, now, found[0])
        locals_ = [now._local_tensor for now in found]
        self.flat = torch.zeros(self.layout.numel, dtype=locals_[0].dtype, device=locals_[0].device)
        # Views of one storage can't be saved by DCP's async_save; through dlpack each has a storage of its own.
        self._shards = [torch.from_dlpack(view) for view in self.layout.shards(self.flat, self.ranks.part)]
        for parameter, now, shard in zip(self.parameters, found, self._shards, strict=True):
            shard.copy_(now._local_tensor)
            now._local_tensor = shard
            if now is not parameter.sharded:
                parameter.sharded = now
                parameter.register(now)
            whole = parameter.whole
            if whole is None or (whole.dtype, whole.device) != (self.param_dtype, shard.device):
                parameter.make_whole(self.param_dtype, shard.device, hook)
        self._views.clear()
        self._hidden.clear()
        self._counters, self._writes = [], []
        return True

    def _check_settled(self, parameter: Parameter, now, first):
        """Raises ValueError unless `now`, which the module has in place of the sharded parameter, can be gathered."""
        was = parameter.sharded
        if not isinstance(now, DTensor) or (now.shape, now.placements) != (was.shape, was.placements):
            raise ValueError(
                f"fully_shard: {parameter.name} was a DTensor of {tuple(was.shape)}, {was.placements}, and is "
                f"{type(now).__name__} now; copy values into it, or change the module before it is sharded"
            )
        if now.requires_grad and not isinstance(now, torch.nn.Parameter):
            raise ValueError(
                f"fully_shard: {parameter.name} is no parameter now but a tensor, as torch.func.functional_call passes "
                f"it, which gradients would not reach; call it under torch.no_grad(), or copy values into parameters"
            )
        local = now._local_tensor
        if local.device.type == "meta":
            raise ValueError(
                f"fully_shard: {parameter.name} is on the meta device; call to_empty(device=...) on the model, and "
                f"initialize or load it, before the first forward"
            )
        if local.dtype != first._local_tensor.dtype:
            raise ValueError(
                f"fully_shard: {parameter.name} is {local.dtype} now, while {self.parameters[0].name}, which it is "
                f"gathered with, is {first._local_tensor.dtype}; convert the whole module, or before it is sharded"
            )

    def gather(self, whole: torch.Tensor):
        """Collective. Fill the gathered buffer [R * S]."""
        flat, layout, ctx = self.flat, self.layout, self.ranks.shard
        if ctx is None:
            whole.copy_(flat)
            return
        send = self.sent(whole)
        if layout.packed:
            staging = tkernels.all_gather(send[: layout.packed], ctx=ctx).view(ctx.size, layout.packed)
            torch.split_with_sizes_copy(staging, layout.packed_numels, dim=1, out=layout.landings(whole))
        for part in layout.direct:
            landing = whole[ctx.size * part.start :][: ctx.size * part.numel]
            tkernels.all_gather(send[part.start :][: part.numel], out=landing, ctx=ctx)

    def sent(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank contributes to the gathered buffer [S]."""
        return self.flat.to(whole.dtype)

    def wholes(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """What the whole parameters are, in this gathered buffer.

        torch.compile can't take a DTensor whose local tensor is a view that starts within a storage. Through dlpack
        each has a storage of its own, and a count of writes of its own: gathers are none of autograd's.
        """
        return [torch.from_dlpack(view) for view in self.layout.wholes(whole)]

    def expose(self, whole: torch.Tensor):
        """Give the module the whole parameters, in this gathered buffer."""
        views = self._views.get(whole.data_ptr())
        if views is None:
            with lasting():
                views = self._views[whole.data_ptr()] = self.wholes(whole)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.whole.requires_grad_(parameter.sharded.requires_grad)
            parameter.point(view)
            parameter.register(parameter.whole)
            if parameter.sharded._backward_hooks and parameter.whole.requires_grad:
                parameter.take_hooks()
        counters = [parameter.counter for parameter in self.parameters]
        hidden = [counter for counter in counters if self._hidden.pop(id(counter), None) == counter._version]
        torch._C._autograd._unsafe_set_version_counter(hidden, [counter._version - 1 for counter in hidden])
        # Writes to a DTensor count there alone.
        dtensors = [(each.name, each.whole) for each in self.parameters if each.tensor_parallel is not None]
        self._counters = [*zip((each.name for each in self.parameters), counters, strict=True), *dtensors]
        self._writes = [counter._version for _, counter in self._counters]

    def check_unwritten(self, module: nn.Module):
        """Raises TypeError if a forward has written to a whole parameter."""
        now = [counter._version for _, counter in self._counters]
        if now == self._writes:
            return
        places = zip(self._counters, now, self._writes, strict=True)
        name = next(name for (name, _), writes, before in places if writes != before)
        raise TypeError(
            f"fully_shard: the forward of {type(module).__name__} has written to {name}, as an embedding with "
            f"max_norm= does; nothing brings that to other ranks, or to the sharded parameter; write between steps, to "
            f"the sharded parameter"
        )

    def conceal(self):
        """Give the module the sharded parameters. A whole one that somebody has kept is empty, not another unit's.

        And what autograd has saved of it counts as written to until `expose`, so that torch refuses a backward through
        it that no output of the unit has begun, as of a loss that a module keeps.
        """
        counters = [parameter.counter for parameter in self.parameters]
        torch.autograd.graph.increment_version(counters)
        self._hidden.update({id(counter): counter._version for counter in counters})
        for parameter in self.parameters:
            parameter.register(parameter.sharded)
            parameter.point(self.flat[:0])

    def layout_of(self, parameters: list[Parameter]) -> Layout:
        """The layout of the gradients of some of the parameters."""
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            self._layouts[key] = Layout([parameter.shape for parameter in parameters], self.ranks.parts)
        return self._layouts[key]

    def buffers(self, layout: Layout, grads=None) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for whole gradients [R * S], and for this rank's part of their mean [S]; the same if that is all.

        grads: what the first could be made of, if it is of this stream.
        """
        empty = functools.partial(torch.empty, device=self.flat.device)
        whole = empty(layout.ranks * layout.numel, dtype=self.reduce_dtype)
        if self.ranks.shard is None and self.reduce_dtype == self.dtype:
            return whole, whole
        return whole, empty(layout.numel, dtype=self.dtype)

    def pack(self, grads: list[torch.Tensor | None], layout: Layout, buffer: torch.Tensor):
        """Copy whole gradients into a buffer [R * S], piece by piece and by rank; one that is None counts as zero."""
        dtypes = {grad.dtype for grad in grads if grad is not None} or {self.param_dtype}
        dtype = dtypes.pop() if len(dtypes) == 1 else buffer.dtype
        grads = [
            torch.zeros(part.shape, dtype=dtype, device=buffer.device) if grad is None else grad.to(dtype)
            for grad, part in zip(grads, layout.parts, strict=True)
        ]
        pieces, ranks = layout.pieces(buffer.dtype), layout.ranks
        if len(pieces) == 1:
            torch._chunk_cat([grads[i] for i in layout.order], 0, ranks, out=buffer.view(ranks, -1))
            return
        for grad, part in zip(grads, layout.parts, strict=True):
            rows, missing = grad.reshape(-1), ranks * part.numel - grad.numel()
            rows = (nn.functional.pad(rows, (0, missing)) if missing else rows).view(ranks, part.numel)
            for start, stop in pieces:
                first, last = max(start, part.start), min(stop, part.start + part.numel)
                if first < last:
                    into = buffer[ranks * start : ranks * stop].view(ranks, -1)[:, first - start : last - start]
                    into.copy_(rows[:, first - part.start : last - part.start])

    def forget_gradients(self):
        """Discard whole gradients."""
        for parameter in self.parameters:
            if parameter.whole is not None:
                parameter.whole.grad = None

    def reduce(self, buffer: torch.Tensor, sums: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        """Collective. The mean over ranks of what `pack` has made, in `sums` [S]; `buffer` is used up.

        Returns it as it was before it was rounded, if that is what gradients are added up in.
        """
        mean = torch.empty_like(sums, dtype=buffer.dtype) if self.adds_up_wider else sums
        for start, stop in layout.pieces(buffer.dtype):
            self._reduce_piece(buffer[layout.ranks * start : layout.ranks * stop], mean[start:stop])
        if self.divisor is not None:  # by itself: each other factor would be another prepared call
            mean.mul_(self.ranks.size / self.divisor)
        if not self.adds_up_wider:
            return None
        sums.copy_(mean)
        return mean

    def _reduce_piece(self, piece: torch.Tensor, out: torch.Tensor):
        shard, replica, factor = self.ranks.shard, self.ranks.replica, 1 / self.ranks.size
        if shard is not None:
            rounds = replica is None and out.dtype in SUMMED
            part = out if rounds or out.dtype == piece.dtype else torch.empty_like(out, dtype=piece.dtype)
            tkernels.reduce_scatter(piece, out=part, factor=factor, ctx=shard)
            piece, factor = part, 1.0  # the factor at first, since fp16 might not hold the sum
        if replica is not None:
            total = out if out.itemsize <= piece.itemsize else piece  # no wider than what is summed, to send no more
            tkernels.all_reduce(piece, out=total, factor=factor, ctx=replica)
            piece = total
        if piece is not out:
            out.copy_(piece)

    def accumulate(self, parameters: list[Parameter], layout: Layout, sums: torch.Tensor, unrounded=None) -> bool:
        """Make these the gradients of the sharded parameters, or add them to those that there are.

        unrounded: what `reduce` has returned. Hooks of register_post_accumulate_grad_hook are called then: in them an
        optimizer may step, on this stream.
        Returns whether `sums` are gradients from here on: nobody's hook has dropped them.
        """
        views, made = layout.shards(sums, self.ranks.part), []
        exact = [None] * len(parameters) if unrounded is None else layout.shards(unrounded, self.ranks.part)
        for parameter, view, unrounded in zip(parameters, views, exact, strict=True):
            sharded = parameter.sharded
            if sharded.grad is None:
                sharded.grad = DTensor(view, sharded._spec, requires_grad=False)
                made.append((sharded, sharded.grad))
            elif unrounded is None:
                sharded.grad._local_tensor.add_(view)
            else:
                grad = sharded.grad._local_tensor
                before = grad if parameter.unrounded is None else parameter.unrounded
                # What somebody has changed since counts as it is. Told by the value, since torch counts no writes of a
                # graph's replay.
                grad.copy_(unrounded.add_(torch.where(before.to(grad.dtype) == grad, before, grad)))
            parameter.unrounded = unrounded
            for hook in list((sharded._post_accumulate_grad_hooks or {}).values()):
                hook(sharded)
        return any(sharded.grad is grad for sharded, grad in made)


def param_dtype_of(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype that a parameter of `dtype` computes in."""
    return policy.param_dtype or dtype if dtype.is_floating_point else dtype
