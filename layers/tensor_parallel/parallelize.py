"""parallelize: an existing model, split by the words of transformers' plans or of Megatron's layers."""

import fnmatch
import inspect
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from tkernels.comm import Context, MeshLike, as_context
from tkernels.comm.arguments import check_type, whole
from tkernels.comm.group import checksum, listed
from tkernels.layers.marks import is_split
from tkernels.layers.owners import check_free
from tkernels.layers.tensor_parallel.float8 import Recipe, recipe_in, recipe_of
from tkernels.layers.tensor_parallel.heads import check_heads, text_config
from tkernels.layers.tensor_parallel.linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    check_replaceable,
)
from tkernels.layers.tensor_parallel.plan import Given, apply, call_layers
from tkernels.layers.tensor_parallel.replica_check import ReplicaCheck
from tkernels.layers.tensor_parallel.replicas import FOR_HEADS, GRAD_ALLREDUCE, LocalParameters, SummedOutput
from tkernels.layers.tensor_parallel.siblings import Share
from tkernels.layers.tensor_parallel.styles import (
    ColwiseParallel,
    Experts,
    ForHeads,
    LinearStyle,
    Replicated,
    ReplicatedForHeads,
    RowwiseParallel,
    SequenceParallel,
    is_linear,
    reads_its_parameters,
)

WORDS = {  # transformers' names of styles
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel(use_local_output=True),
    "replicate": Replicated(),
    "moe_tp_experts": Experts(),
    GRAD_ALLREDUCE: Replicated(sum_gradients=True),
    FOR_HEADS: ReplicatedForHeads(),
}
LATENT_KEYS, LOCAL = "mla_kv_a_proj", "local_params"
# Megatron's
STYLES = {"column": ColumnParallelLinear, "row": RowParallelLinear, GRAD_ALLREDUCE: None, FOR_HEADS: None}
# Arguments that are no options of a plan: the nn.Linear or parallelize() sets them, or they concern initialization.
_NOT_OPTIONS = {"in_features", "out_features", "bias", "dtype", "device", "mesh", "init_method"}


def parallelize(
    model: nn.Module,
    plan: str | Mapping[str, str | ParallelStyle | Mapping] = "auto",
    mesh: MeshLike = None,
    *,
    float8: str | Recipe | None = None,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Collective. Split the modules of `model` that a plan names over ranks, in place, and return it.

        parallelize(model, "auto", mesh["tp"])  # a model of transformers, by its own tp_plan
        parallelize(model, {"*.[qkv]_proj": "colwise", "*.o_proj": "rowwise"}, mesh["tp"])
        parallelize(model, {"*.up": "column", "*.down": {"style": "row", "sequence_parallel": True}}, ctx)

    plan: patterns of module names (fnmatch; * also matches dots) to styles, in one of two vocabularies.
        torch's and transformers': styles, as of parallelize_module, or their names: "colwise", "rowwise", ... (WORDS).
        Every parameter becomes a DTensor, that of a module in no pattern a replicated one. Layers of PEFT's LoRA and
        transformers' Conv1D are split as the linears that they are. "auto" is model.tp_plan.
        Megatron's: "column", "row", or a dict of "style" and options of ColumnParallelLinear or RowParallelLinear. An
        nn.Linear becomes one of these, with plain parameters that carry Megatron's marks; the others stay as they are.
        "replicated_with_grad_allreduce" is in both: for modules between a column and a row layer that are the same on
        all ranks, but used for each rank's own features or heads, as the norms of queries and keys: the gradients of
        their parameters are summed over ranks in backward. So is "replicated_for_heads": for a layer that stays whole
        while each rank's own heads read its output, as keys and values of one head: its output's gradient is summed.
    mesh: of one dimension; a process group or a Context stands for one. It and the plan may change places, as in
        parallelize_module. None: the current context.
    float8: a recipe, as of ColwiseParallel, for all linear layers that the plan gives a style by its name, except the
        model's output embedding (get_output_embeddings) and those whose options name their own. Without it, linears
        that torchao has made to Float8Linear have theirs.
    src_data_rank: as in parallelize_module. In Megatron's vocabulary all ranks must hold the same weights.

    The gradients of the parameters that stay whole are compared over ranks at the end of the first backward, whoever
    takes them. Where they differ by more than rounding, MismatchError names the parameter and the style that it lacks.

    Create the optimizer afterwards, since the parameters are new ones. Attention that reshapes a column layer's output
    into heads must take the number of heads from the tensor, since each rank has only its part; that of transformers
    does.

    Raises ValueError or TypeError, before anything is changed: for an empty plan, or a pattern that matches nothing, or
    with "auto" where none matches anything, as those of a model in a wrapper; for a module that its style can't be
    given to; for a module that two patterns match; for an unknown style or option; for a module whose parameters have
    hooks, belong to an optimizer or wrapper of this library, or are tied to others of which the plan would split one;
    for stacked projections, and for heads that don't divide by the ranks (those of model.config). Raises MismatchError
    if the parameters or plans differ between ranks.
    """
    if isinstance(plan, DeviceMesh | dist.ProcessGroup | Context):  # torch's order
        plan, mesh = mesh, plan
    if isinstance(plan, Mapping) and all(_is_megatrons(each) for each in plan.values()):
        return _swap_linears(model, plan, mesh, float8, src_data_rank)
    return apply(model, mesh, lambda: _styles(model, plan, float8), src_data_rank, replicate_rest=True)


def _is_megatrons(style) -> bool:
    return isinstance(style, Mapping | None) or isinstance(style, str) and style in STYLES


def _auto(model: nn.Module) -> dict[str, str]:
    check_type("parallelize: model", model, nn.Module, "an nn.Module")
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise ValueError(
            f"parallelize: {type(model).__name__} has no tp_plan, which 'auto' reads; pass a plan, for example "
            f"{{'*.up': 'colwise', '*.down': 'rowwise'}}"
        )
    return plan


def _styles(model: nn.Module, plan: str | Mapping, float8) -> list[Given]:
    """What a plan of torch's or transformers' styles gives. Raises ValueError or TypeError if it doesn't fit."""
    optional = isinstance(plan, str) and plan == "auto"
    plan = _auto(model) if optional else plan
    _check_plan(model, plan)
    recipe = recipe_of("parallelize", float8)
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    given, matched, head = [], {}, getattr(model, "get_output_embeddings", lambda: None)()
    quantized = {word: each.in_float8(recipe) for word, each in WORDS.items() if isinstance(each, LinearStyle)}
    unknown = {}
    for pattern, word in plan.items():
        hits = fnmatch.filter(modules, pattern)
        if not hits and optional:  # of modules or single parameters that this model need not have
            continue
        _check_hits(pattern, hits, modules, matched)
        each = WORDS.get(word) if isinstance(word, str) else word
        if isinstance(word, str) and word == LATENT_KEYS:
            each = _latent_keys(model, pattern)
        if isinstance(word, str) and word == LOCAL:
            own = {name: modules[name] for name in hits if [*modules[name].parameters(recurse=False)]}
            given += [(name, module, _for_heads(name, module, plan)) for name, module in own.items()]
            continue
        if not isinstance(each, ParallelStyle):
            unknown[pattern] = word
            continue
        for name in dict.fromkeys(hits):
            module = modules[name]
            if optional and isinstance(each, Replicated) and next(module.parameters(), None) is None:
                continue  # a norm without a scale, as Gemma3n's of values
            in_float8 = (
                recipe and isinstance(word, str) and word in quantized and is_linear(module) and module is not head
            )
            given.append((name, module, quantized[word] if in_float8 else each))
    if unknown:
        found = ", ".join(f"{word!r} (of {pattern!r})" for pattern, word in unknown.items())
        raise ValueError(
            f"parallelize: this library has no style {found}; it has {', '.join((*WORDS, LATENT_KEYS, LOCAL))}, or in "
            f"Megatron's vocabulary, for all of a plan, {' and '.join(STYLES)}. Experts can stay whole, but no "
            f"attention whose projections are split: take {listed(list(unknown))} out of the plan"
            f"{', by `del model.tp_plan[...]`' if optional else ''}"
        )
    if not given:
        raise ValueError(
            f"parallelize: nothing would be split: no pattern of {type(model).__name__}.tp_plan, as "
            f"{next(iter(plan))!r}, matches a module, as {next(iter(modules), None)!r}; pass the model that a wrapper "
            f"wraps, as get_base_model() of PEFT's names it, and compile it afterwards"
        )
    unique = {}
    for name, module, each in given:  # a module that occurs twice
        unique.setdefault(id(module), (name, module, each))
    given = list(unique.values())
    return given + _siblings(model, given)


def _for_heads(path: str, module: nn.Module, plan: Mapping) -> ForHeads:
    """The style of an attention whose own parameters a plan names, too, as transformers' plans do."""
    words = {
        name: word
        for name in module._parameters
        for pattern, word in plan.items()
        if fnmatch.fnmatchcase(f"{path}.{name}", pattern)
    }
    if not words or set(words.values()) != {"colwise"}:
        raise ValueError(
            f"parallelize: {LOCAL!r} of {path!r} is for a module with parameters that the plan names by 'colwise', "
            f"which each rank gets its heads' part of; it gives {words or 'none of them a word'}"
        )
    return ForHeads(list(words))


def _latent_keys(model: nn.Module, pattern: str) -> ReplicatedForHeads:
    features = getattr(text_config(model), "qk_rope_head_dim", None)
    if not isinstance(features, int):
        raise ValueError(
            f"parallelize: {LATENT_KEYS!r} of {pattern!r} is for queries and keys of which model.config has "
            f"qk_rope_head_dim, the number of rotary features; it has none"
        )
    return ReplicatedForHeads(features)


def _siblings(model: nn.Module, given: list[Given]) -> list[Given]:
    """Linears of one module, style and number of in-features share what they do for an input that they all get.

    Only where it is replicated, so that linears which get different ones lose nothing.
    """
    groups = {}
    for name, module, each in given:
        if isinstance(each, ColwiseParallel) and each.input_layouts[0].is_replicate() and each.takes(module):
            groups.setdefault((name.rpartition(".")[0], id(each), module.weight.shape[-1]), []).append(module)
    parents = {path: model.get_submodule(path) for path, *_ in groups}
    return [
        (path, parents[path], Share(linears))
        for (path, *_), linears in groups.items()
        if len(linears) > 1 and reads_its_parameters(parents[path])
    ]


def _check_plan(model: nn.Module, plan):
    check_type("parallelize: model", model, nn.Module, "an nn.Module")
    check_type("parallelize: plan", plan, Mapping, "'auto', or a dict of patterns of module names to styles")
    if not plan:
        raise ValueError("parallelize: the plan is empty, so nothing would be split; pass patterns of module names")
    for pattern in plan:
        check_type("parallelize: a pattern of the plan", pattern, str, "a name of a module, perhaps with * in it")


def _check_hits(pattern: str, hits: list[str], modules, matched: dict[str, str]):
    if not hits:
        raise ValueError(f"parallelize: {pattern!r} matches no module; the modules are {', '.join(modules) or 'none'}")
    for name in hits:
        if name in matched:
            raise ValueError(f"parallelize: {name!r} is matched by both {matched[name]!r} and {pattern!r}")
        matched[name] = pattern


def _swap_linears(model: nn.Module, plan: Mapping[str, str | Mapping], mesh, float8, src_data_rank) -> nn.Module:
    """Collective. parallelize in Megatron's vocabulary."""
    ctx = as_context(mesh, "parallelize: mesh")
    with ctx.group.checking("parallelize"):  # as for the other vocabulary, which one rank's wrong plan may look like
        if src_data_rank is not None:
            whole("parallelize: src_data_rank", src_data_rank, most=ctx.size - 1)
        asked = _match(model, plan, float8)
        styles = dict(asked)
        for_heads = [name for name, (style, _) in styles.items() if style == FOR_HEADS]
        styles = {name: given for name, given in styles.items() if name not in for_heads}
        summed = _take_summed(model, styles)
        for name in styles:
            _check_swappable(model, name)
        columns = [(name, options) for name, (style, options) in styles.items() if style == "column"]
        strided = frozenset(name for name, options in columns if options.get("partition_stride", 1) != 1)
        check_heads(model, [name for name, options in columns if not options.get("gather_output")], ctx.size, strided)
    _check_equal(model, asked, ctx)
    layers = {}
    for name, (style, options) in styles.items():
        try:
            layers[name] = STYLES[style].from_linear(model.get_submodule(name), mesh=ctx, **options)
        except (ValueError, TypeError) as error:
            raise type(error)(f"parallelize: {name!r}: {error}") from error
    places = {}  # of each module, which may have several
    for path, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(path)
    for name, layer in layers.items():
        for path in places[model.get_submodule(name)]:
            model.set_submodule(path, layer)
    call_layers(model)
    for module in summed.values():
        LocalParameters(module, ctx.name, sum_gradients=True)
    for name in for_heads:
        SummedOutput(model.get_submodule(name), ctx.name, features=None)
    ReplicaCheck.attach(model, ctx.name)
    return model


def _match(model: nn.Module, plan, float8) -> dict[str, tuple[str, dict]]:
    """Module name -> (style, options), by the plan. Raises ValueError or TypeError if it doesn't fit the model."""
    _check_plan(model, plan)
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    matched, styles, first = {}, {}, {}
    for pattern, value in plan.items():
        options = dict(value) if isinstance(value, Mapping) else {"style": value}
        style = options.pop("style", None)
        if not isinstance(style, str) or style not in STYLES:
            raise ValueError(f"parallelize: the style of {pattern!r} is {style!r}; use {' or '.join(STYLES)}")
        known = set(inspect.signature(STYLES[style]).parameters) - _NOT_OPTIONS if STYLES[style] else set()
        if unknown := sorted(set(options) - known):
            raise ValueError(
                f"parallelize: {pattern!r}: a {style} layer has no options {unknown}; it has {sorted(known) or 'none'}"
            )
        if float8 is not None and STYLES[style]:
            options = {"float8": float8} | options
        hits = fnmatch.filter(names, pattern)
        _check_hits(pattern, hits, names, matched)
        for name in hits:
            linear = model.get_submodule(name)
            if (before := first.setdefault(linear, name)) != name:  # of a module that occurs twice
                if styles[before] != (style, options):
                    raise ValueError(f"parallelize: {before!r} and {name!r} are one module; give both the same style")
                continue
            styles[name] = style, options
            kind = type(linear)
            if STYLES[style] and kind is not nn.Linear and recipe_in(linear) is None:
                raise TypeError(
                    f"parallelize: {pattern!r} matches {name!r}, which is a {kind.__module__}.{kind.__qualname__}, not "
                    f"exactly an nn.Linear"
                )
    return styles


def _take_summed(model: nn.Module, styles: dict[str, tuple[str, dict]]) -> dict[str, nn.Module]:
    """Path -> module with parameters whose gradients are summed; takes their names out of `styles`.

    They are in the modules that have this style, or below, and not in a layer that splits its parameters.
    """
    chosen = [name for name, (style, _) in styles.items() if style == GRAD_ALLREDUCE]
    for name in chosen:
        del styles[name]
    split = {id(model.get_submodule(name)) for name in styles}
    found = {}
    for name in chosen:
        members = {
            path: module
            for path, module in model.get_submodule(name).named_modules(prefix=name)
            if id(module) not in split and not isinstance(module, ParallelLinear) and module._parameters
        }
        if not members:
            raise ValueError(f"parallelize: {name!r} has no parameters whose gradients could be summed")
        for path, module in members.items():
            if LocalParameters.of(module):
                raise ValueError(f"parallelize: {path!r} has the style {GRAD_ALLREDUCE!r} already, by an earlier call")
            if type(module).forward is nn.Module.forward:
                raise TypeError(
                    f"parallelize: {path!r} is a {type(module).__name__}, without a forward in which the gradients of "
                    f"its parameters could be summed; give {GRAD_ALLREDUCE!r} to the module that reads them"
                )
        found |= {path: module for path, module in members.items() if module not in found.values()}
    return found


def _check_swappable(model: nn.Module, name: str):
    linear = model.get_submodule(name)
    own = {id(parameter) for parameter in linear.parameters()}
    tied = [other for other, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in own]
    others = [other for other in tied if model.get_submodule(other.rpartition(".")[0]) is not linear]
    if others:
        raise ValueError(
            f"parallelize: {name!r} shares its parameters with {', '.join(others)}, which would keep the full ones; "
            f"untie them, or leave {name!r} out of the plan"
        )
    for each, parameter in linear.named_parameters():
        check_free(f"parallelize: {name}.{each}", parameter)
    check_replaceable(f"parallelize: {name!r}", linear)


def _check_equal(model: nn.Module, styles: dict[str, tuple[str, dict]], ctx: Context):
    """Collective. Raises MismatchError unless all ranks hold the same bits, so that slices are of one model, and are to
    split them in the same way.
    """
    digests = {name: _digest(parameter) for name, parameter in model.named_parameters() if not is_split(parameter)}
    plan = {name: repr(style) for name, style in styles.items()}
    ctx.group.check_alike("parallelize", "plans", plan, "pass one plan on every rank")
    way_out = "make them from the same seed or load the same state dict first"
    ctx.group.check_alike("parallelize", "models", digests, way_out)


def _digest(parameter: torch.Tensor):
    if parameter.is_meta:
        return tuple(parameter.shape), parameter.dtype
    return tuple(parameter.shape), parameter.dtype, checksum(parameter)
