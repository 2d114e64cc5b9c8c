"""The modules that styles make: linears, embeddings and norms whose parameters are DTensors over one mesh.

They get local tensors or DTensors and give either, compute on local tensors, and are subclasses of what they were.
"""

import dataclasses
import functools
import zlib

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

import tkernels
from tkernels.comm import Context, MismatchError, find_context
from tkernels.comm.arguments import check_dense
from tkernels.dispatch import apply_transformed
from tkernels.layers.tensor_parallel.dtensors import as_dtensor, chunk_sizes, local
from tkernels.layers.tensor_parallel.float8 import MultipliesInFloat8, products
from tkernels.layers.tensor_parallel.functions import as_operands, gather_equal_parts
from tkernels.torch_operators import replicated


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a module's input comes and its output goes. context: the name of the context over the mesh's ranks."""

    mesh: DeviceMesh
    context: str
    input: Placement
    output: Placement
    use_local_output: bool
    transposed: bool  # whether a weight is [K, N], as that of transformers' Conv1D

    def __deepcopy__(self, memo):
        return self  # a copied module is on the same ranks

    def enter(self, x: torch.Tensor, wanted: Placement, accepts) -> tuple[torch.Tensor, Placement, tuple]:
        """An input's local tensor, its placement, and the global shape.

        It is redistributed to `wanted` unless `accepts(placement)`. A plain input has equal parts on all ranks.
        """
        if not isinstance(x, DTensor):
            placement = _positive(self.input, x.dim())
            if accepts(placement):
                shape = list(x.shape)
                if placement.is_shard():
                    shape[placement.dim] *= self.mesh.size()
                return x, placement, tuple(shape)
            if placement.is_shard():  # torch would take unequal parts for equal ones
                x, placement = gather_equal_parts(x, placement.dim, find_context(self.context)), Replicate()
                if accepts(placement):
                    return x, placement, tuple(x.shape)
            x = DTensor.from_local(x, self.mesh, (placement,), run_check=False)
        elif x.device_mesh != self.mesh:
            raise ValueError(
                f"the input is a DTensor on {x.device_mesh}, but the module's parameters are split over {self.mesh}; "
                f"redistribute it, or pass its to_local()"
            )
        placement = x.placements[0]
        if not accepts(placement):
            x, placement = x.redistribute(placements=(wanted,)), wanted
        return x.to_local(grad_placements=(placement,)), placement, tuple(x.shape)

    def leave(self, y: torch.Tensor, placement: Placement, shape) -> torch.Tensor:
        """This rank's part of an output of that global shape, in the layout and of the kind that are asked for."""
        output = _positive(self.output, y.dim())
        if self.use_local_output and output == placement:
            return y
        whole = as_dtensor(y, self.mesh, placement, shape)
        if output != placement:
            whole = whole.redistribute(placements=(output,))
        return whole.to_local() if self.use_local_output else whole


def _positive(placement: Placement, dims: int) -> Placement:
    return Shard(placement.dim % dims) if placement.is_shard() and placement.dim < 0 else placement


class ParallelModule(MultipliesInFloat8):
    """What the modules that a style has been given to have in common."""

    kind: str  # the first word of the class's name
    _layout: Layout

    def _check_input(self, x):
        check_dense(type(self).__name__, x=x)

    def _check_part(self, own: int, whole: int):
        """Raises ValueError where something has put another tensor in the place of this rank's part of a weight."""
        ctx = find_context(self._layout.context)
        if own != (expected := chunk_sizes(whole, ctx.size)[ctx.rank]):
            raise ValueError(
                f"{type(self).__name__}: its weight has {own} of {whole} rows, but rank {ctx.rank}'s part has "
                f"{expected}: a plain tensor has replaced the DTensor, as by load_state_dict(..., assign=True) with "
                f"whole tensors; load these by torch.distributed.checkpoint.state_dict.set_model_state_dict with "
                f"full_state_dict=True"
            )

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's weight [N, K] and bias of a linear layer, as autocast has nn.Linear take them."""
        weight, device = local(self.weight), find_context(self._layout.context).device.type
        weight = weight.t() if self._layout.transposed else weight
        if self._float8 is not None:  # it is quantized, whatever its dtype
            return weight, local(self.bias)
        return as_operands(device, weight, local(self.bias))


class ColwiseLinear(ParallelModule):
    """What ColwiseParallel makes of a linear layer. Collective: forward and backward."""

    kind = "Colwise"
    _siblings = None  # the layers that share the communication of its input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input(x)
        y = self._product(x) if self._siblings is None else self._siblings.product(self, x)
        return self._layout.leave(y, Shard(y.dim() - 1), (*y.shape[:-1], self.out_features))

    def _enter(self, x: torch.Tensor) -> tuple[torch.Tensor, Placement, tuple]:
        """As Layout.enter: a replicated input, or one split along a leading dimension."""
        last = x.dim() - 1
        x, placement, shape = self._layout.enter(
            x, Replicate(), lambda given: given.is_replicate() or given.is_shard() and given.dim != last
        )
        return *as_operands(x.device.type, x), placement, shape

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = super()._parts()
        self._check_part(len(weight), self.out_features)
        return weight, bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's out-features, of all positions."""
        return products_of([self], *self._enter(x))[0]


def products_of(linears: list[ColwiseLinear], x: torch.Tensor, placement: Placement, shape) -> list[torch.Tensor]:
    """Collective. The products of an input that all of them get, replicated or split along a leading dimension."""
    ctx, kind, dim, rows = find_context(linears[0]._layout.context), "copy", 0, None
    if placement.is_shard():
        kind, dim, rows = "gather", placement.dim, chunk_sizes(shape[placement.dim], ctx.size)
    weights, biases = map(list, zip(*(linear._parts() for linear in linears), strict=True))
    keep = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    parameters = [linear.weight for linear in linears]
    return products(kind, x, parameters, weights, biases, ctx, linears[0]._float8, dim, rows, keep)


class RowwiseLinear(ParallelModule):
    """What RowwiseParallel makes of a linear layer. Collective: forward and backward."""

    kind = "Rowwise"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input(x)
        layout, last = self._layout, x.dim() - 1
        ctx = find_context(layout.context)
        x, _, _ = layout.enter(x, Shard(last), lambda given: given == Shard(last))
        (x,), (weight, bias) = as_operands(ctx.device.type, x), self._parts()
        shape = (*x.shape[:-1], self.out_features)
        output = _positive(layout.output, x.dim())
        if output.is_shard() and output.dim != last:
            kind, dim, rows = "scatter", output.dim, chunk_sizes(x.shape[output.dim], ctx.size)
        else:
            output, kind, dim, rows = Replicate(), "reduce", 0, None
        (y,) = products(kind, x, [self.weight], [weight], [bias], ctx, self._float8, dim, rows)
        return layout.leave(y, output, shape)


class RowwiseEmbedding(ParallelModule):
    """What RowwiseParallel makes of an nn.Embedding: split by the vocabulary. Collective: forward and backward.

    (torch's own gives a weight of Shard(0) a gradient of Replicate: the whole vocabulary's, on every rank.)

    The first forward that isn't traced or captured compares the tokens. Ranks with other ones would each look up what
    they have, and all go on with the same sums, of nobody's batch; no gradient would differ later.
    """

    kind = "Rowwise"
    _compared = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self._check_input(tokens)
        layout = self._layout
        ctx = find_context(layout.context)
        tokens, _, _ = layout.enter(tokens, Replicate(), Placement.is_replicate)
        self._compare(tokens, ctx)
        weight, sizes = local(self.weight), chunk_sizes(self.num_embeddings, ctx.size)
        start, own = sum(sizes[: ctx.rank]), sizes[ctx.rank]
        self._check_part(len(weight), self.num_embeddings)
        padding = None if self.padding_idx is None else self.padding_idx - start
        # A token outside of the vocabulary is in nobody's part, so the lookup refuses it, on every rank.
        absent = (0 <= tokens) & (tokens < start) | (start + own <= tokens) & (tokens < self.num_embeddings)
        mine = (tokens - start).masked_fill(absent, 0)
        y = functional.embedding(mine, weight, padding if padding is not None and 0 <= padding < own else None)
        y = y.masked_fill(absent.unsqueeze(-1), 0)
        output = _positive(layout.output, y.dim())
        if output.is_shard() and output.dim != y.dim() - 1:
            parts = chunk_sizes(y.shape[output.dim], ctx.size)
            part = tkernels.reduce_scatter(y.movedim(output.dim, 0).contiguous(), rows=parts, ctx=ctx)
            return layout.leave(part.movedim(0, output.dim), output, y.shape)
        return layout.leave(tkernels.all_reduce(y, ctx=ctx), Replicate(), y.shape)

    def _compare(self, tokens: torch.Tensor, ctx: Context):
        """Collective, once. Raises MismatchError, on every rank, where ranks have other tokens."""
        if torch.compiler.is_compiling() or self._compared or type(tokens) is not torch.Tensor or tokens.is_meta:
            return
        if torch._C._are_functorch_transforms_active() or ctx.capturing:
            return
        given = ctx.group.gather((tuple(tokens.shape), zlib.crc32(tokens.long().cpu().numpy().tobytes())))
        if len(set(given)) > 1:
            shapes = ", ".join(f"rank {rank} {list(shape)}" for rank, (shape, _) in enumerate(given))
            raise MismatchError(
                f"{type(self).__name__}: ranks that share a model look up other tokens ({shapes}); give the ranks of "
                f"one tensor-parallel group the same batch, by a sampler that counts data-parallel ranks alone"
            )
        self._compared = True


class SequenceModule(ParallelModule):
    """What SequenceParallel makes of a module that has parameters: its own forward, on local tensors."""

    kind = "Sequence"

    def forward(self, x: torch.Tensor, *arguments, **options) -> torch.Tensor:
        self._check_input(x)
        wanted = self._layout.input
        x, placement, shape = self._layout.enter(x, wanted, lambda given: given == _positive(wanted, len(x.shape)))
        return self._layout.leave(super().forward(x, *arguments, **options), placement, shape)


class DealtExperts(ParallelModule):
    """What Experts makes of a mixture's experts: each rank has some of them, whole. Collective: forward and backward.

    All ranks have the same tokens, each adds up what its own experts give, and the sums are added up over ranks.
    """

    kind = "Dealt"

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        self._check_input(hidden_states)
        for parameter in self._parameters.values():
            self._check_part(len(parameter), sum(self._sizes))
        context = self._layout.context
        mine, own = top_k_index - sum(self._sizes[: find_context(context).rank]), self.num_experts
        elsewhere = (mine < 0) | (mine >= own)
        x, weights = replicated(hidden_states, context), replicated(top_k_weights, context)
        # An expert of that number, in transformers' code, is none.
        y = super().forward(x, mine.masked_fill(elsewhere, own), weights.masked_fill(elsewhere, 0))
        if torch.is_grad_enabled() and not y.requires_grad:  # none was chosen: gradients are zeros, as those of others
            y = y + sum(each.flatten()[:0].sum() for each in self._parameters.values())
        return apply_transformed("experts", _Summed, context, y, x, weights)


class _Summed(torch.autograd.Function):
    """The sum of y over ranks. Backward goes on to x and weights, whose own is collective.

    Also where y isn't made of them, as on a rank none of whose experts was chosen. x is saved for that rank: where a
    checkpoint is recomputed for the sake of the first saved tensor, collectives too, all ranks do so here.
    """

    @staticmethod
    def forward(context, y, x, weights):
        return tkernels.all_reduce(y, ctx=find_context(context))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, dy):
        _ = ctx.saved_tensors
        return None, dy, None, None


@functools.cache
def subclass(kind: type, base: type[ParallelModule]) -> type:
    return type(base.kind + kind.__name__, (base, kind), {"__module__": base.__module__})
