"""y = x @ weight.T + bias with the weight split over R ranks: by out-features (column), or by in-features (row).

    ColumnParallelLinear   weight_shard_n [N/R, K], bias_shard_n [N/R]    K in-features, N out-features
        x [..., K] -> y_shard_n [..., N/R]               sequence parallel: x_shard_m [s/R, ..., K] -> [s, ..., N/R]
    RowParallelLinear      weight_shard_k [N, K/R], bias [N]
        x_shard_k [..., K/R] -> y [..., N]               sequence parallel: [s, ..., K/R] -> y_shard_m [s/R, ..., N]

"Column" is Megatron's term: a column of the transposed weight. A column layer followed by a row layer needs no other
communication between them. Options have Megatron's names and meanings.

Initial weights: every rank draws the full weight and bias as nn.Linear does, from torch's default generator, and keeps
its slice. So with the same seed a layer has the weights of nn.Linear on any number of ranks, and leaves the generator
in the same state. If the generators or options of ranks differ, MismatchError is raised. A layer made on the meta
device draws its weights in reset_parameters.
"""

import contextlib
import itertools
from collections.abc import Callable

import torch
from torch import nn

import tkernels
from tkernels.comm import Context, MeshLike, MismatchError, as_context, find_context
from tkernels.comm.arguments import check_dense, check_flags, check_torch_dtype, check_type, whole
from tkernels.comm.group import checksum
from tkernels.layers.marks import RANKS, MarkedModule
from tkernels.layers.owners import attributes, check_initialized
from tkernels.layers.tensor_parallel.activations import GATES, KNOWN
from tkernels.layers.tensor_parallel.float8 import (
    Float8,
    MultipliesInFloat8,
    Recipe,
    check_features,
    products,
    recipe_in,
    recipe_of,
    unwrapped,
)
from tkernels.layers.tensor_parallel.functions import (
    as_operands,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from tkernels.layers.tensor_parallel.replica_check import has_others_hooks

LINEARS = {"FalconLinear"}  # subclasses in other libraries whose own forward computes what nn.Linear's does
# Kinds of a module's hooks.
HOOKS = (
    "forward", "forward_pre", "backward", "backward_pre", "state_dict", "state_dict_pre", "load_state_dict_pre",
    "load_state_dict_post",
)  # fmt: skip


def checking(ctx: Context, device, call: str | None = None, alike: dict | None = None):
    """A block whose error on one rank all ranks raise. On the meta device, where modules are made alone, no meeting.

    call, alike: as in `Group.checking`.
    """
    return contextlib.nullcontext() if str(device) == "meta" else ctx.group.checking(call, alike)


def check_place(kind: str, device, dtype):
    """Raise TypeError or ValueError for what is no device or dtype of parameters here."""
    if dtype is not None:
        check_torch_dtype(f"{kind}: dtype", dtype)
        if not dtype.is_floating_point:
            raise TypeError(f"{kind}: dtype={dtype} has no gradient; parameters are of a floating-point dtype")
    try:
        torch.empty(0, device=device, dtype=dtype)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{kind}: device={device!r} is none that parameters can be on: {error}") from None


def computes_as_linear(linear: nn.Linear) -> bool:
    kind = type(linear)
    return kind.forward is nn.Linear.forward or kind.__name__ in LINEARS or recipe_in(linear) is not None


def check_replaceable(what: str, linear: nn.Linear):
    """Raises ValueError for what is lost where a layer takes an nn.Linear's place. what: the caller and the linear."""
    kind = type(linear)
    for name, parameter in linear.named_parameters():
        check_initialized(f"{what}'s {name}", parameter)
    if nn.utils.parametrize.is_parametrized(linear):
        raise ValueError(f"{what} is parametrized, which the new layer would lose; remove_parametrizations() before")
    if not computes_as_linear(linear):
        raise ValueError(f"{what} is a {kind.__qualname__} with a forward of its own, which the new layer would lose")
    if "forward" in vars(linear):
        raise ValueError(
            f"{what} has a forward of its own, set on the module as accelerate's hooks do it, which the new layer "
            f"would lose; take it off, or set it afterwards"
        )
    hooks = [each for each in HOOKS if getattr(linear, f"_{each}_hooks")]
    if any(has_others_hooks(each) or each._post_accumulate_grad_hooks for each in linear.parameters()):
        hooks.append("parameters'")
    if hooks:
        raise ValueError(
            f"{what} has {' and '.join(hooks)} hooks, which the new layer would lose; register them afterwards"
        )


class ParallelLinear(MultipliesInFloat8, MarkedModule):
    """Base class of both layers: their parameters, how these are split, and what inputs they take."""

    partition_dim: int  # dimension of the weight that is split
    _partitioned: dict[str, int]  # what `partitioned` returns
    _flags: tuple[str, ...]  # options that are True or False

    def _build(self, in_features, out_features, bias, dtype, device, mesh, init_method):
        ctx = as_context(mesh, f"{type(self).__name__}: mesh")
        # The context's name, which operators take: modules are copied and pickled, contexts are not.
        self.context_name, self._ranks, self._rank = ctx.name, ctx.group.global_ranks, ctx.rank
        device = ctx.device if device is None else device
        with checking(ctx, device):
            flags = {"bias": bias} | {name: getattr(self, name) for name in self._flags}
            check_flags(type(self).__name__, **flags)
            self._check_options(ctx.size, in_features, out_features, dtype, device, init_method)
        self._init_method = init_method
        self._take(self._draw(bias, device, dtype))

    def _check_options(self, ranks: int, in_features, out_features, dtype, device, init_method):
        """Set what is split. Raises ValueError or TypeError for what a rank was given."""
        kind = type(self).__name__
        self.in_features = in_features = whole(f"{kind}: in_features", in_features)
        self.out_features = out_features = whole(f"{kind}: out_features", out_features)
        self.partition_stride = stride = whole(f"{kind}: partition_stride", self.partition_stride, 1)
        if init_method is not None:
            check_type(f"{kind}: init_method", init_method, Callable, "a function of the weight")
        check_place(kind, device, dtype)
        what, features = (("out-features", out_features), ("in-features", in_features))[self.partition_dim]
        if features % stride or features // stride < ranks:
            blocks = f" in {stride} equal blocks" if stride > 1 else ""
            raise ValueError(
                f"{kind}({in_features}, {out_features}): {features} {what} can't be split{blocks} over "
                f"{ranks} ranks with at least one for each; use fewer ranks or nn.Linear"
            )
        self.feature_sizes = tuple(stride * size for size in tkernels.split_rows(features // stride, ranks))
        if self.float8 is not None:
            self._float8 = Float8(recipe_of(kind, self.float8))
            split, whole_features = ("out_features", "in_features")[:: -1 if self.partition_dim else 1]
            sizes = {"in_features": in_features, "out_features": out_features}
            for size in self.feature_sizes:
                check_features(kind, **{split: size, whole_features: sizes[whole_features]})

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, mesh: MeshLike = None, **options):
        """The layer that holds this rank's slice of an nn.Linear's parameters, on the same device. Not collective.

        options: those of the class, except features, bias, device, dtype and init_method, which the nn.Linear decides.

        Attributes that were set on its parameters are copied to the new ones. Raises ValueError for what would be lost:
        hooks, parametrizations, a forward of a subclass.
        """
        check_type(f"{cls.__name__}.from_linear: linear", linear, nn.Linear, "an nn.Linear")
        check_replaceable(f"{cls.__name__}.from_linear: the linear", linear)
        has_bias = linear.bias is not None
        options = {"float8": recipe_in(linear)} | options
        layer = cls(linear.in_features, linear.out_features, has_bias, device="meta", mesh=mesh, **options)
        layer._take(linear)
        return layer.train(linear.training)

    def reset_parameters(self):
        """Collective. Draw the initial weights, as construction does.

        For a layer made on the meta device, call it directly or after to_empty. Parameters that are still on the meta
        device move to the context's device.
        """
        if self.weight.is_meta:
            self.to_empty(device=self.ctx.device)
        full = self._draw(self.bias is not None, self.weight.device, self.weight.dtype)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self._part(full, name))

    def _draw(self, bias: bool, device, dtype) -> nn.Linear:
        """The full layer with its initial weights. Collective, unless the device is meta."""
        full = nn.Linear(self.in_features, self.out_features, bias, device=device, dtype=dtype)
        if not full.weight.is_meta:
            self._check_agreement(self.ctx, full)
        if self._init_method is not None:
            kind, alike = type(self).__name__, {}
            with checking(self.ctx, full.weight.device, f"{kind}: init_method", alike), torch.no_grad():
                self._init_method(full.weight)
                if bias:
                    full.bias.zero_()
                if not full.weight.is_meta:
                    wide = torch.promote_types(full.weight.dtype, torch.float32)
                    alike["the weight's norm"] = str(torch.linalg.vector_norm(full.weight, dtype=wide).item())
        return full

    def _part(self, full: nn.Linear, name: str) -> torch.Tensor:
        """This rank's part of a parameter of `full`."""
        value, dim = unwrapped(getattr(full, name)).detach(), self.partitioned().get(name)
        return value if dim is None else self.shard(value, dim)

    def _take(self, full: nn.Linear):
        """Make this layer's parameters: this rank's part of those of `full`."""
        for name in ("weight", "bias"):
            value = getattr(full, name)
            if value is None:
                self.register_parameter(name, None)
                continue
            dim = self.partitioned().get(name)
            part = self._part(full, name).clone(memory_format=torch.contiguous_format)
            setattr(self, name, nn.Parameter(part, value.requires_grad))
            self._mark(name, **attributes(value))
            self._mark_part(name, dim, len(self.feature_sizes), self.partition_stride, **{RANKS: self.context_name})

    def _check_agreement(self, ctx: Context, full: nn.Linear):
        """Collective. Raises MismatchError unless all ranks make the same layer from the same random numbers."""
        device, kind = full.weight.device, f"{type(self).__name__}({self.in_features}, {self.out_features})"
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        options = ("in_features", "out_features", "partition_stride", *self._options, *self._flags)
        asked = {name: getattr(self, name) for name in options}
        asked |= {"bias": full.bias is not None, "dtype": full.weight.dtype}
        ctx.group.check_alike(type(self).__name__, "layers", asked, "all must make the same layer")
        way_out = "slices are of one weight: call torch.manual_seed with one seed on all ranks before making the model"
        ctx.group.check_alike(kind, "random generators", {"state": checksum(state)}, way_out)

    @property
    def ctx(self) -> Context:
        """The context of construction. Raises MismatchError if its name belongs to another one, in another process."""
        ctx = find_context(self.context_name)
        if ctx.rank != self._rank or ctx.group.global_ranks != self._ranks:
            raise MismatchError(
                f"{type(self).__name__}: it is the part of rank {self._rank} of the global ranks {self._ranks}, but "
                f"{self.context_name} is here that of rank {ctx.rank} of {ctx.group.global_ranks}; a module that is "
                f"pickled whole belongs to its ranks: save and load a state dict"
            )
        return ctx

    def _ranks_with_parts(self) -> list[int]:
        return self._ranks

    def partitioned(self) -> dict[str, int]:
        """Name of a parameter that is split over ranks -> the dimension that is split."""
        return dict(self._partitioned)

    def shard(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a full parameter or gradient."""
        sizes = [size // self.partition_stride for size in self.feature_sizes]
        blocks = full.tensor_split(self.partition_stride, dim)
        return torch.cat([block.split(sizes, dim)[self.ctx.rank] for block in blocks], dim)

    def join(self, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
        """The inverse of `shard`: every rank's part -> the full tensor."""
        blocks = zip(*(shard.tensor_split(self.partition_stride, dim) for shard in shards), strict=True)
        return torch.cat([part for block in blocks for part in block], dim)

    def _operands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The input, the weight, and the bias to add, in autocast's dtype if autocast is on."""
        bias = None if self.return_bias else self.bias
        device = self.ctx.device.type  # an operand elsewhere, as on meta, is refused by the operation
        if self._float8 is not None:  # which quantizes the weight, whatever its dtype
            return *as_operands(device, x), self.weight, bias
        return as_operands(device, x, self.weight, bias)

    def _product(self, kind: str, x: torch.Tensor, rows=None, **options) -> torch.Tensor:
        x, weight, bias = self._operands(x)
        return products(kind, x, [weight], [weight], [bias], self.ctx, self._float8, rows=rows, **options)[0]

    def _check_input(self, x: torch.Tensor, features: int, rows, hint: str = ""):
        name = type(self).__name__
        check_dense(name, x=x)
        self._refuse_ddp()
        if "weight" not in self._parameters and not torch.compiler.is_compiling():
            self._refuse_norms()
        found = x.shape[-1] if x.dim() else "missing"
        if found != features:
            raise ValueError(f"{name}: the input's last dimension is {found}, but must be {features}{hint}")
        if self.sequence_parallel and x.dim() < 2:
            raise ValueError(f"{name}: sequence_parallel splits the first of at least two dimensions, but x has one")
        if rows is not None and not self.sequence_parallel:
            raise ValueError(f"{name}: rows={rows} splits a sequence, but this layer has sequence_parallel=False")

    def _refuse_norms(self):
        """Raises ValueError for a weight that is made by what needs the whole matrix, and not this rank's part."""
        lists = [self.parametrizations.weight] if nn.utils.parametrize.is_parametrized(self, "weight") else []
        by = [*itertools.chain(*lists), *self._forward_pre_hooks.values()]
        for each in by:
            kind = type(each).__name__.strip("_")
            split = kind == "WeightNorm" and getattr(each, "dim", None) == self.partition_dim  # each is of one rank
            if kind in ("SpectralNorm", "Orthogonal", "WeightNorm") and not split:
                raise ValueError(
                    f"{type(self).__name__}: the weight is this rank's part, and {kind} takes it for the whole matrix; "
                    f"use an nn.Linear here"
                )
        for parameter in itertools.chain(*(each.parameters(recurse=False) for each in lists)):
            vars(parameter).update(self._marks["weight"] | vars(parameter))

    def extra_repr(self) -> str:
        shown = [name for name in self._options if name != "float8" or self.float8 is not None]
        options = ", ".join(f"{name}={getattr(self, name)}" for name in shown)
        ranks = len(self.feature_sizes)
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {options}, ranks={ranks}"


class ColumnParallelLinear(ParallelLinear):
    """nn.Linear with the out-features split over ranks. Collective: construction, forward, backward.

    in_features, out_features: of the full layer; if out-features don't divide evenly, the first ranks have one more
        (of each block, see partition_stride).
    sequence_parallel: the input is this rank's part of the first dimension, [s/R, ..., K], and is gathered during the
        GEMM; backward reduce-scatters. False: the input is replicated, [..., K].
    gather_output: every rank returns all out-features, [..., N].
    return_bias: forward returns (y, bias) and doesn't add the bias, for a fused kernel that does (Megatron's
        skip_bias_add). With gather_output the bias returned is still this rank's part, as in Megatron.
    keep_gathered: with sequence_parallel, keep the gathered input [s, ..., K] for the weight's gradient. False gathers
        it again in backward, which holds R times less memory (as Megatron does).
    float8: for products of FP8, as in ColwiseParallel. What is kept of the gathered input then is FP8;
        "rowwise_with_gw_hp" keeps nothing and gathers again.
    partition_stride: the weight consists of this many blocks, stacked along the out-features and each split over ranks:
        2 for the fused gate and up-projection of a gated MLP. This rank's parts of the blocks are stacked too.
    device: by default the context's. init_method: called on the full weight, which all ranks must get alike; the bias
        is then zero. None: as nn.Linear.

    Parameters: weight [N/R, K], bias [N/R], each with tensor_model_parallel, partition_dim, partition_stride.
    """

    partition_dim = 0
    _partitioned = {"weight": 0, "bias": 0}
    _options = ("sequence_parallel", "gather_output", "float8")
    _flags = ("sequence_parallel", "gather_output", "return_bias", "keep_gathered")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        return_bias: bool = False,
        keep_gathered: bool = True,
        partition_stride: int = 1,
        float8: str | Recipe | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        mesh: MeshLike = None,
        init_method=None,
    ):
        super().__init__()
        self.sequence_parallel, self.gather_output = sequence_parallel, gather_output
        self.return_bias, self.keep_gathered, self.partition_stride = return_bias, keep_gathered, partition_stride
        self.float8 = float8
        self._build(in_features, out_features, bias, dtype, device, mesh, init_method)

    def _check_options(self, *arguments):
        super()._check_options(*arguments)
        if self.gather_output and self.partition_stride > 1:
            raise ValueError(
                "ColumnParallelLinear: gather_output=True takes partition_stride=1, the parts of one block"
            )

    def forward(self, x: torch.Tensor, *, rows: tuple[int, ...] | None = None):
        """Collective. x [..., K], or x_shard_m [s/R, ..., K] -> y_shard_n [..., N/R] (or [..., N] with gather_output).

        rows: with sequence_parallel, every rank's length of the first dimension, if they differ.
        """
        ctx = self.ctx
        self._check_input(x, self.in_features, rows)
        keep = self.keep_gathered and torch.is_grad_enabled() and self.weight.requires_grad
        y = self._product("gather" if self.sequence_parallel else "copy", x, rows, keep=keep)
        if self.gather_output:
            y = gather_from_tensor_model_parallel_region(y, sizes=self.feature_sizes, mesh=ctx)
        return (y, self.bias) if self.return_bias else y


class RowParallelLinear(ParallelLinear):
    """nn.Linear with the in-features split over ranks; local GEMMs are summed. Collective like the column layer.

    in_features, out_features: of the full layer; if in-features don't divide evenly, the first ranks have one more.
    sequence_parallel: each rank gets its part of the first dimension of the sum, [s/R, ..., N], sent during the GEMM.
        False: every rank gets all of it, [..., N].
    input_is_parallel: the input is this rank's features, as a column layer returns them. False: it is replicated and
        split here; not with sequence_parallel.
    return_bias: forward returns (y, bias) and doesn't add the bias, for a fused kernel that does.
    float8, device, init_method: as in ColumnParallelLinear.

    Parameters: weight [N, K/R] with tensor_model_parallel, partition_dim, partition_stride; bias [N], replicated. The
    bias's mark `sequence_parallel` means, as in Megatron, that its gradient comes from this rank's rows only and must
    still be summed over ranks. It is True only if both return_bias and sequence_parallel are: where the layer adds the
    bias, the gradient is the full sum on every rank. `all_reduce_sequence_parallel_grads` sums marked gradients.
    """

    partition_dim = 1
    _partitioned = {"weight": 1}
    partition_stride = 1
    _options = ("sequence_parallel", "input_is_parallel", "float8")
    _flags = ("sequence_parallel", "input_is_parallel", "return_bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        return_bias: bool = False,
        float8: str | Recipe | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        mesh: MeshLike = None,
        init_method=None,
    ):
        super().__init__()
        self.sequence_parallel, self.input_is_parallel = sequence_parallel, input_is_parallel
        self.return_bias, self.float8 = return_bias, float8
        self._build(in_features, out_features, bias, dtype, device, mesh, init_method)

    def _check_options(self, *arguments):
        super()._check_options(*arguments)
        if self.sequence_parallel and not self.input_is_parallel:
            raise ValueError(
                "RowParallelLinear: sequence_parallel=True takes input_is_parallel=True, since the input is split by "
                "features already"
            )

    def _take(self, full: nn.Linear):
        super()._take(full)
        if self.bias is not None:
            self._mark("bias", sequence_parallel=self.sequence_parallel and self.return_bias)

    @property
    def quantizes_activations(self) -> bool:
        """Whether forward takes `activation`, as FP8 with scales of rows does, of an input that is split already."""
        return self._float8 is not None and self._float8.recipe.scale == "row" and self.input_is_parallel

    def forward(self, x: torch.Tensor, *, rows: tuple[int, ...] | None = None, activation: str | None = None):
        """Collective. x_shard_k [..., K/R] (or x [..., K]) -> y [..., N], or y_shard_m [s/R, ..., N].

        rows: with sequence_parallel, every rank's length of the first dimension, if it doesn't divide evenly.
        activation: of x, as ParallelMLP has them, a gated one of x [..., 2 K/R]; where `quantizes_activations`.
        """
        ctx = self.ctx
        if activation is not None and not (self.quantizes_activations and activation in KNOWN):
            raise ValueError(
                f"RowParallelLinear: activation={activation!r} must be {' or '.join(map(repr, KNOWN))}, in a layer "
                f'with float8="rowwise" and input_is_parallel=True; apply it before'
            )
        if self.input_is_parallel:
            own = self.feature_sizes[ctx.rank] * (2 if activation in GATES else 1)
            self._check_input(x, own, rows, hint=f", rank {ctx.rank}'s part of {self.in_features} in-features")
        else:
            self._check_input(x, self.in_features, rows)
            x = scatter_to_tensor_model_parallel_region(x, sizes=self.feature_sizes, mesh=ctx)
        y = self._product("scatter" if self.sequence_parallel else "reduce", x, rows, activation=activation)
        return (y, self.bias) if self.return_bias else y
