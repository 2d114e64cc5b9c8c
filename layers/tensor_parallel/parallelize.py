"""Replaces nn.Linear modules of an existing model by parallel layers that keep their weights."""

import fnmatch
import inspect
from collections.abc import Mapping

import torch
from torch import nn

from tkernels.comm import Context, MeshLike, MismatchError, as_context
from tkernels.comm.arguments import check_type
from tkernels.comm.group import checksum, first_difference, listed
from tkernels.layers.data_parallel.norms import is_split
from tkernels.layers.owners import owner_of
from tkernels.layers.tensor_parallel.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from tkernels.layers.tensor_parallel.replicas import (
    GRAD_ALLREDUCE,
    ReplicaCheck,
    ReplicatedParameters,
    has_others_hooks,
)

STYLES = {"column": ColumnParallelLinear, "row": RowParallelLinear, GRAD_ALLREDUCE: None}
# Arguments that are no options of a plan: the nn.Linear or parallelize() sets them, or they concern initialization.
_NOT_OPTIONS = {"in_features", "out_features", "bias", "dtype", "device", "mesh", "init_method"}


def parallelize(model: nn.Module, plan: Mapping[str, str | Mapping], mesh: MeshLike = None) -> nn.Module:
    """Collective. Replace modules of `model` in place, and return it. Each rank keeps its slices of the weights.

        parallelize(model, {"*.mlp.up": "column", "*.mlp.down": "row"}, device_mesh["tp"])
        parallelize(model, {"*.qkv": {"style": "column", "sequence_parallel": True}}, device_mesh["tp"])

    plan: patterns of module names (fnmatch; * also matches dots) to "column" or "row", or to a dict of "style" and
        options of ColumnParallelLinear or RowParallelLinear. "replicated_with_grad_allreduce" is for modules between a
        column and a row layer that are the same on all ranks, but used for each rank's own features or heads, as the
        norms of queries and keys: the gradients of their parameters are summed over ranks in backward.
    mesh: the ranks, as in `tkernels.comm.as_context`: a mesh of one dimension, a process group or a Context; None:
        those of the current context.

    The gradients of the parameters that stay whole are compared over ranks at the end of the first backward, whoever
    takes them. Where they differ by more than rounding, MismatchError names the parameter and the style that it lacks.

    All ranks must hold the same model. Create the optimizer afterwards, since the parameters are new ones. Attention
    that reshapes a column layer's output into heads must take the number of heads from the tensor, since each rank has
    only its part.

    Raises ValueError or TypeError, before anything is changed: for a pattern that matches nothing; for "column" or
    "row" where it matches anything that is not exactly an nn.Linear; for a module that two patterns match; for an
    unknown style or option; for an nn.Linear that has hooks, on itself or its parameters, or whose parameters are tied
    to others or belong to an optimizer or wrapper of this library. Raises MismatchError if the parameters or plans
    differ between ranks.
    """
    check_type("parallelize: model", model, nn.Module, "an nn.Module")
    check_type("parallelize: plan", plan, Mapping, "a dict of patterns of module names to styles")
    ctx = as_context(mesh, "parallelize: mesh")
    asked = _match(model, plan)
    styles = dict(asked)
    summed = _take_summed(model, styles)
    for name in styles:
        _check_swappable(model, name)
    _check_equal(model, asked, ctx)
    layers = {}
    for name, (style, options) in styles.items():
        try:
            layers[name] = STYLES[style].from_linear(model.get_submodule(name), mesh=ctx, **options)
        except (ValueError, TypeError) as error:
            raise type(error)(f"parallelize: {name!r}: {error}") from error
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    for module in summed.values():
        ReplicatedParameters(module, ctx.name, sum_gradients=True)
    ReplicaCheck.attach(model, ctx.name)
    return model


def _match(model: nn.Module, plan) -> dict[str, tuple[str, dict]]:
    """Module name -> (style, options), by the plan. Raises ValueError or TypeError if it doesn't fit the model."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    matched, styles = {}, {}
    for pattern, value in plan.items():
        options = {"style": value} if isinstance(value, str) else dict(value)
        style = options.pop("style", None)
        if style not in STYLES:
            raise ValueError(f"parallelize: the style of {pattern!r} is {style!r}; use {' or '.join(STYLES)}")
        known = set(inspect.signature(STYLES[style]).parameters) - _NOT_OPTIONS if STYLES[style] else set()
        if unknown := sorted(set(options) - known):
            raise ValueError(
                f"parallelize: {pattern!r}: a {style} layer has no options {unknown}; it has {sorted(known) or 'none'}"
            )
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise ValueError(
                f"parallelize: {pattern!r} matches no module; the modules are {', '.join(names) or 'none'}"
            )
        for name in hits:
            if name in matched:
                raise ValueError(f"parallelize: {name!r} is matched by both {matched[name]!r} and {pattern!r}")
            matched[name], styles[name] = pattern, (style, options)
            kind = type(model.get_submodule(name))
            if STYLES[style] and kind is not nn.Linear:
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
            if ReplicatedParameters.of(module):
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
    others = [other for other in tied if other.rpartition(".")[0] != name]
    if others:
        raise ValueError(
            f"parallelize: {name!r} shares its parameters with {', '.join(others)}, which would keep the full ones; "
            f"untie them, or leave {name!r} out of the plan"
        )
    for parameter in linear.parameters():
        if (owner := owner_of(parameter)) is not None:
            raise ValueError(
                f"parallelize: the parameters of {name!r} belong to {type(owner).__name__}, which would not see the "
                f"new ones; parallelize the model first, or remove() that before"
            )
    kinds = (
        "forward", "forward_pre", "backward", "backward_pre", "state_dict", "state_dict_pre", "load_state_dict_pre",
        "load_state_dict_post",
    )  # fmt: skip
    hooks = [kind for kind in kinds if getattr(linear, f"_{kind}_hooks")]
    if any(has_others_hooks(p) or p._post_accumulate_grad_hooks for p in linear.parameters()):
        hooks.append("parameters'")
    if hooks:
        raise ValueError(
            f"parallelize: {name!r} has {' and '.join(hooks)} hooks, which the new layer would lose; register them "
            f"after parallelize"
        )


def _check_equal(model: nn.Module, styles: dict[str, tuple[str, dict]], ctx: Context):
    """Collective. Raises MismatchError unless all ranks hold the same bits, so that slices are of one model, and are to
    split them in the same way.
    """
    digests = {name: _digest(parameter) for name, parameter in model.named_parameters() if not is_split(parameter)}
    everyone = ctx.group.gather((digests, {name: repr(style) for name, style in styles.items()}))
    if difference := first_difference([styles for _, styles in everyone]):
        rank, names = difference
        raise MismatchError(
            f"parallelize: the plans of rank 0 and rank {rank} differ in the style or options of {listed(names)}; pass "
            f"one plan on every rank"
        )
    if difference := first_difference([digests for digests, _ in everyone]):
        rank, names = difference
        raise MismatchError(
            f"parallelize: the models of rank 0 and rank {rank} differ in {listed(names)}; make them from the same "
            f"seed or load the same state dict first"
        )


def _digest(parameter: torch.Tensor):
    if parameter.is_meta:
        return tuple(parameter.shape), parameter.dtype
    return tuple(parameter.shape), parameter.dtype, checksum(parameter)
