"""torch's tensor-parallel styles, whose linears overlap their communication with their matrix multiplication.

    style             parameters                          forward
    ColwiseParallel   weight Shard(0), bias Shard(0)      all_gather_matmul, or column_parallel_linear
    RowwiseParallel   weight Shard(1), bias Replicate     matmul_reduce_scatter, or matmul_all_reduce
      nn.Embedding    weight Shard(0), by vocabulary      this rank's rows, then reduce_scatter or all_reduce
    SequenceParallel  Replicate                           the module's own, on this rank's part of the sequence
    Experts           Shard(0)                            this rank's experts, then all_reduce
    ForHeads          those of heads Shard(0)             the module's own, with its heads' part of them

They are torch's classes with torch's arguments and defaults, so that torch's own parallelize_module takes them too, and
a plan may mix them with torch's. Parameters become DTensors in torch.chunk's sizes; their gradients are whole: Shard
and Replicate, never Partial. What a style has no operation of ours for, as ColwiseParallel of an nn.Embedding, is
torch's.

A module keeps its identity, name and hooks: its class becomes a subclass, as fully_shard makes one.
"""

import contextlib
import copy
import functools
import logging

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, style

from tkernels.comm import as_context
from tkernels.comm.arguments import check_dense, check_type
from tkernels.layers.owners import check_free, replace
from tkernels.layers.tensor_parallel.dtensors import chunk_sizes, is_part
from tkernels.layers.tensor_parallel.float8 import (
    Float8,
    Recipe,
    check_features,
    recipe_in,
    recipe_of,
    unwrapped,
)
from tkernels.layers.tensor_parallel.functions import gather_equal_parts
from tkernels.layers.tensor_parallel.heads import source_of
from tkernels.layers.tensor_parallel.linear import computes_as_linear
from tkernels.layers.tensor_parallel.modules import (
    ColwiseLinear,
    DealtExperts,
    Layout,
    RowwiseEmbedding,
    RowwiseLinear,
    SequenceModule,
    subclass,
)
from tkernels.layers.tensor_parallel.replica_check import has_others_hooks
from tkernels.layers.tensor_parallel.replicas import LocalParameters, SummedOutput

_log = logging.getLogger("tkernels")


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, a linear layer whose weight is [K, N]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and computes_as_linear(module) or _is_conv1d(module)


class Style(ParallelStyle):
    """What our styles have in common: what they take, refuse, and make of a module."""

    kinds = nn.Linear, nn.Embedding  # of modules that it can be given to
    nested = False  # whether these may have modules with parameters in them
    float8: Recipe | None = None  # a linear multiplies in FP8
    context = None  # the name of the one that the plan was given for; None: that over the mesh

    def placement(self, module: nn.Module, name: str) -> Placement:
        """Of a parameter of the module that this style is given to."""
        raise NotImplementedError

    def takes(self, module: nn.Module) -> bool:
        """Whether the module computes with this library's operations; torch's style is applied to others."""
        return is_linear(module)

    def check(self, path: str, module: nn.Module, ranks: int):
        """Raises ValueError or TypeError, naming `path`, for a module that the style can't be given to."""
        what = f"{type(self).__name__}: {path!r}" if path else type(self).__name__
        if isinstance(getattr(module, "_layout", None), Layout):
            raise ValueError(f"{what} has a parallel style already; give it one")
        if not isinstance(module, self.kinds) and not _is_conv1d(module):
            kinds = " or ".join(f"nn.{kind.__name__}" for kind in self.kinds)
            raise TypeError(f"{what} is a {type(module).__module__}.{type(module).__name__}, and no {kinds}")
        for option in ("input_layouts", "output_layouts"):
            for layout in getattr(self, option, ()):
                check_type(f"{what}: {option}", layout, Placement, "a Placement, as Replicate() and Shard(0) are")
        if self.kinds == Style.kinds and "weight" not in module._parameters:
            names = " and ".join(name for name, _ in module.named_parameters())
            raise TypeError(
                f"{what}: its weight is computed from {names}, as by weight_norm and spectral_norm, which no rank can "
                f"of its part alone; take that off, or leave the module out of the plan"
            )
        if self.kinds == Style.kinds and module.weight.dtype == torch.float64:
            raise TypeError(
                f"{what} is in torch.float64, and tkernels multiplies float32, bfloat16 and float16; convert the model "
                f"or use torch's own styles"
            )
        if self.kinds == Style.kinds and "forward" in vars(module):
            raise TypeError(
                f"{what} has a forward of its own, set on the module as accelerate's hooks do it, which knows no "
                f"parts; take it off, or set it afterwards"
            )
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            raise TypeError(
                f"{what} belongs to an nn.MultiheadAttention, which reads its weight instead of calling it; write the "
                f"attention with an nn.Linear"
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None and self.kinds == Style.kinds:
            raise ValueError(
                f"{what}: max_norm={module.max_norm} scales the weight's rows in forward, which no rank could of its "
                f"part alone; leave the embedding whole, or make it without max_norm"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{what}: its gradients are sparse, which those of DTensors can't be; make the embedding without "
                f"sparse=True"
            )
        for name, parameter in module.named_parameters(recurse=not self.nested):
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"{what}: {name} is a DTensor already, {parameter.placements} on {parameter.device_mesh}; "
                    f"parallelize a module before fully_shard and other systems take it"
                )
            check_free(f"{what}: {name}", parameter)
            if has_others_hooks(parameter) or parameter._post_accumulate_grad_hooks:
                raise ValueError(
                    f"{what}: {name} has hooks, which the DTensor in its place would lose; register them afterwards"
                )
            if "." in name:
                raise TypeError(f"{what} is a {type(module).__name__} with parameters of modules in it, as {name}")
            placement = self.placement(module, name)
            if placement.is_shard() and 0 in (sizes := chunk_sizes(parameter.shape[placement.dim], ranks)):
                raise ValueError(
                    f"{what}: {name} of {tuple(parameter.shape)} has {parameter.shape[placement.dim]} along dimension "
                    f"{placement.dim}, which {ranks} ranks get as {', '.join(map(str, sizes))}; use fewer ranks, or "
                    f"leave the module out of the plan"
                )
        if self.float8 is not None and not is_linear(module):
            raise TypeError(f"{what} is a {type(module).__name__}, but float8 is for linear layers; leave it out")
        if (recipe := self.recipe(module)) is not None:
            if recipe.gathers_weights and _is_conv1d(module):
                raise ValueError(
                    f"{what} is a {type(module).__name__}, whose weight lies transposed and can't be gathered in FP8 "
                    f"(gathers_weights); take a recipe without it"
                )
            sizes = list(module.weight.shape)
            split = self.placement(module, "weight").dim
            kinds = ("in_features", "out_features") if _is_conv1d(module) else ("out_features", "in_features")
            for part in chunk_sizes(sizes[split], ranks):
                sizes[split] = part
                check_features(what, **dict(zip(kinds, sizes, strict=True)))

    def convert(self, module: nn.Module, mesh: DeviceMesh, base: type, input: Placement, output: Placement):
        """Collective. Make DTensors of the parameters, and give the module the class and layout to use them."""
        self.check("", module, mesh.size())
        context, transposed = self.context_over(mesh), _is_conv1d(module)
        self.distribute(module, mesh)
        if transposed:
            module.out_features = module.nf
        recipe = self.recipe(module)
        module.__class__ = subclass(type(module), base)
        module._float8 = recipe and Float8(recipe)
        module._layout = Layout(mesh, context, input, output, self.use_local_output, transposed)
        return module

    def context_over(self, mesh: DeviceMesh) -> str:
        return self.context or as_context(mesh).name

    def recipe(self, module: nn.Module) -> Recipe | None:
        """How the module is to multiply in FP8: as the style says, else as torchao's Float8Linear does."""
        return self.float8 or recipe_in(module)

    def distribute(self, module: nn.Module, mesh: DeviceMesh):
        """Collective. Make DTensors of a module's own parameters."""
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                placements = [self.placement(module, name)]
                value = unwrapped(parameter).detach()
                value = distribute_tensor(value, mesh, placements, src_data_rank=self.src_data_rank)
                module.register_parameter(name, nn.Parameter(value, parameter.requires_grad))
                replace(parameter, module._parameters[name], "parallelize")

    def by_torch(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """torch's style, without overlap."""
        self.check("", module, mesh.size())
        if isinstance(module, nn.Linear):
            _warn_slow(type(self).__name__, type(module).__name__)
        before = dict(module.named_parameters(remove_duplicate=False))
        module = super()._apply(module, mesh)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter is not before[name]:
                replace(before[name], parameter, "parallelize")
        return module


@functools.cache
def _warn_slow(style: str, kind: str):
    _log.warning(
        "%s: %s has a forward of its own, so torch runs it on DTensors, without this library's overlap", style, kind
    )


class LinearStyle(Style):
    """A style of linear layers, with torch's arguments, and with float8."""

    def __init__(self, *, float8: str | Recipe | None = None, **layouts):
        super().__init__(**layouts)
        self.float8 = recipe_of(type(self).__name__, float8)

    def __repr__(self) -> str:
        return f"{super().__repr__()}{f', float8={self.float8}' if self.float8 else ''}"

    def in_float8(self, recipe: Recipe | None) -> "LinearStyle":
        """The style with that recipe."""
        style = copy.copy(self)
        style.float8 = recipe
        return style


class ColwiseParallel(LinearStyle, style.ColwiseParallel):
    """torch's ColwiseParallel, with torch's arguments: an nn.Linear whose out-features are split over ranks.

    input_layouts=Shard(d), this rank's part of a sequence along dimension d of [..., K] (any but the last): it is
    gathered during the matrix multiplication, and backward reduce-scatters. Replicate(), the default: [..., K] whole.
    The output is this rank's features [..., N/R]; other output_layouts come from torch's redistribution.

    A plain input that is split has equally many positions on all ranks; a DTensor has torch.chunk's.

    float8: "rowwise", "rowwise_with_gw_hp", "tensorwise", "tensorwise_with_gw_fp8" or "tensorwise_with_fp8_gather", for
        products of FP8, as torchao's Float8Linear has them (which needs no float8 here): those of the output and of the
        input's gradient, with "gw_fp8" of the weight's. With "fp8_gather", fully_shard gathers the weight in FP8.
        Features must be multiples of 16 on every rank. None: in the input's dtype.
    """

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(1 if isinstance(module, nn.Embedding) or _is_conv1d(module) and name == "weight" else 0)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not self.takes(module):
            return self.by_torch(module, device_mesh)
        return self.convert(module, device_mesh, ColwiseLinear, self.input_layouts[0], self.output_layouts[0])


class RowwiseParallel(LinearStyle, style.RowwiseParallel):
    """torch's RowwiseParallel, with torch's arguments: an nn.Linear whose in-features are split over ranks.

    The input is this rank's features [..., K/R]. output_layouts=Replicate(), the default: every rank gets the sum,
    [..., N], sent during the matrix multiplication; Shard(d): its part along dimension d (any but the last).

    Or an nn.Embedding, split by its vocabulary: the input is the tokens [...], by default whole on every rank
    (input_layouts=Replicate()), the output [..., K] as that of a linear.

    float8: as in ColwiseParallel.
    """

    def placement(self, module: nn.Module, name: str) -> Placement:
        if isinstance(module, nn.Embedding):
            return Shard(0)
        if name == "weight":
            return Shard(0 if _is_conv1d(module) else 1)
        return Replicate()

    def takes(self, module: nn.Module) -> bool:
        plain = type(module).forward is nn.Embedding.forward
        return is_linear(module) or plain and not (module.max_norm or module.sparse or module.scale_grad_by_freq)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not self.takes(module):
            return self.by_torch(module, device_mesh)
        embedding = isinstance(module, nn.Embedding)
        base = RowwiseEmbedding if embedding else RowwiseLinear
        input = Replicate() if embedding and self.input_layouts[0] == Shard(-1) else self.input_layouts[0]
        return self.convert(module, device_mesh, base, input, self.output_layouts[0])


class ForHeads(Style):
    """An attention that reads parameters with a part for each head, as sinks: each rank has those of its heads.

    names: of these, split along their first dimension. The module's other own parameters are the same on all ranks.
    """

    kinds, nested = (nn.Module,), True

    def __init__(self, names: list[str]):
        super().__init__()
        self.names = tuple(names)

    def __repr__(self) -> str:
        return f"ForHeads{self.names}"

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(0) if name in self.names else Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check("", module, device_mesh.size())
        self.distribute(module, device_mesh)
        LocalParameters(module, self.context_over(device_mesh), sum_gradients=False)
        return module


class Experts(Style):
    """The experts of a mixture, as transformers has them: parameters [experts, ...], dealt to the ranks.

    Each rank gets whole experts, in torch.chunk's numbers, where transformers' "moe_tp_experts" splits each of them.
    The results are the same, and so is a rank's memory; its work depends on what tokens choose.
    """

    kinds = (nn.Module,)
    use_local_output = True

    def __repr__(self) -> str:
        return "Experts()"

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(0)

    def check(self, path: str, module: nn.Module, ranks: int):
        super().check(path, module, ranks)
        kind, sizes, code = type(module), {parameter.shape[:1] for parameter in module.parameters()}, ""
        with contextlib.suppress(OSError, TypeError):
            code = source_of(kind)
        told = hasattr(module, "_is_expert_parallel") or not hasattr(kind.forward, "__wrapped__")
        passes = "== self.num_experts" in code and "self.num_experts + 1" in code  # of that number there is none
        if sizes != {(getattr(module, "num_experts", None),)} or not (told and passes):
            raise TypeError(
                f"Experts: {path!r} is a {kind.__module__}.{kind.__name__}, whose code isn't known to pass over the "
                f"experts of other ranks; take it out of the plan, and it stays whole"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        sizes = chunk_sizes(module.num_experts, device_mesh.size())
        self.convert(module, device_mesh, DealtExperts, Replicate(), Replicate())
        module._sizes, module.num_experts = sizes, sizes[device_mesh.get_local_rank()]
        module._is_expert_parallel = True  # transformers' word, for its implementations other than "eager"
        LocalParameters(module, self.context_over(device_mesh), sum_gradients=False)
        return module


class PrepareModuleInput(style.PrepareModuleInput):
    """torch's, but that plain parts are gathered by this library: torch takes unequal ones for equal.

    A MismatchError, on every rank, names their sizes.
    """

    def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
        input = _gathered(input, mesh, input_layout, desired_layout)
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)


class PrepareModuleOutput(style.PrepareModuleOutput):
    """torch's, with outputs as PrepareModuleInput's inputs."""

    def _prepare_out_fn(self, outputs, device_mesh):
        layouts = self.output_layouts, self.desired_output_layouts
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(outputs) == len(self.output_layouts):
            outputs = tuple(_gathered(each, device_mesh, *of) for each, *of in zip(outputs, *layouts, strict=True))
        return super()._prepare_out_fn(outputs, device_mesh)


class PrepareModuleInputOutput(style.PrepareModuleInputOutput):
    """torch's, made of the two above."""

    def __init__(self, **layouts):
        super().__init__(**layouts)
        self.prepare_module_input.__class__ = PrepareModuleInput
        self.prepare_module_output.__class__ = PrepareModuleOutput


def _gathered(x, mesh: DeviceMesh, layout: Placement | None, wanted: Placement | None):
    """Collective. x, or where that is a plain part, to be laid out otherwise, the whole in a DTensor."""
    if isinstance(x, DTensor) or not isinstance(layout, Shard) or wanted in (None, layout):
        return x
    check_dense("parallelize", x=x)
    whole = gather_equal_parts(x, layout.dim, as_context(mesh))
    return DTensor.from_local(whole, mesh, (Replicate(),), run_check=False)


class Replicated(Style):
    """A module whose parameters are the same on all ranks: DTensors outside, plain tensors in the module's forward.

    And in that of the module around it, which may read them. With them every parameter of a model is a DTensor, as
    torch's clipping and foreach optimizers want it. Modules inside of it get the style too, unless they have another.
    Those that don't call what reads their parameters, as nn.MultiheadAttention, stay as they are, or are refused where
    gradients are to be summed.

    sum_gradients: sum the gradients over ranks in backward, where each rank uses the module for its own features, heads
        or rows alone: the norms of queries and keys, between a column and a row layer.
    """

    kinds, nested = (nn.Module,), True

    def __init__(self, *, sum_gradients: bool = False):
        super().__init__()
        self.sum_gradients = sum_gradients

    def __repr__(self) -> str:
        return f"Replicated(sum_gradients={self.sum_gradients})"

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Replicate()

    def check(self, path: str, module: nn.Module, ranks: int):
        for inner, each in {"": module, **dict(self.owners(module))}.items():
            where = f"{path}.{inner}".strip(".")
            if reads_its_parameters(each):
                super().check(where, each, ranks)
            elif each is module or self.sum_gradients:
                raise TypeError(
                    f"Replicated: {where!r} is a {type(each).__name__}, whose parameters other modules read; give the "
                    f"style to the module that reads them"
                )

    @staticmethod
    def owners(module: nn.Module):
        """The modules in a module, itself too, that have parameters of their own, none split yet: (path, module)."""
        for path, each in module.named_modules():
            own = [parameter for parameter in each._parameters.values() if parameter is not None]
            if own and not any(isinstance(parameter, DTensor) or is_part(parameter) for parameter in own):
                yield path, each

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check("", module, device_mesh.size())
        for each in [each for _, each in self.owners(module) if reads_its_parameters(each)]:
            self.apply_to_own(each, device_mesh)
        return module

    def apply_to_own(self, module: nn.Module, device_mesh: DeviceMesh):
        """To the parameters that are the module's own, none of those inside."""
        self.distribute(module, device_mesh)
        LocalParameters(module, self.context_over(device_mesh), self.sum_gradients)


class ReplicatedForHeads(ParallelStyle):
    """Of a module that stays whole, while each rank's own heads read its output: keys and values of all heads.

    The output's gradient is summed over ranks in backward, so that those of the parameters and of the input are whole.

    features: only the last ones of the output go to heads, as the rotary keys of transformers' "mla_kv_a_proj", whose
        other features go on to a column layer. None: all.
    """

    context = None  # as Style's

    def __init__(self, features: int | None = None):
        self.features = features

    def __repr__(self) -> str:
        return f"ReplicatedForHeads({self.features})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        SummedOutput(module, self.context or as_context(device_mesh).name, self.features)
        return module


def reads_its_parameters(module: nn.Module) -> bool:
    multihead = nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear
    return type(module).forward is not nn.Module.forward and not isinstance(module, multihead)


class SequenceParallel(Style, style.SequenceParallel):
    """torch's SequenceParallel, with torch's arguments: a norm on this rank's part of the sequence.

    The gradients of its parameters are summed over ranks in backward (torch leaves them Partial). A module without
    parameters, as nn.Dropout, is torch's: DTensor draws its masks.
    """

    kinds = (nn.Module,)

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Replicate()

    def takes(self, module: nn.Module) -> bool:
        return any(parameter is not None for parameter in module._parameters.values())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not self.takes(module):
            return self.by_torch(module, device_mesh)
        (sequence,) = self.sequence_sharding
        self.convert(module, device_mesh, SequenceModule, sequence, sequence)
        LocalParameters(module, self.context_over(device_mesh), sum_gradients=True)
        return module
