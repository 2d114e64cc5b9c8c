"""Owners of parameters: the objects whose hooks a parameter has, or whose memory it uses.

A parameter may outlive its owners, and keeps none of them alive. One in whose place another is trained says so, for
optimizers that have it still.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tkernels.comm.errors import LeaseError
from tkernels.layers.marks import RANKS, check_replicas, is_split

_OWNERS = "tkernels_owners"  # on a parameter: weak references, the newest last
_INSTEAD = "tkernels_instead"  # on a parameter in whose place another is trained: an _Instead
_IN_PARTS = "tkernels_in_parts"  # on one of whose values each rank has its part alone: why, and torch's write count
NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon")  # optimizers that look at whole parameters, or at all of them


class _References(list):
    """A list of weak references that is pickled as an empty one: owners don't go to a file or another process."""

    def __reduce__(self):
        return _References, ()


class _Instead(NamedTuple):
    """Why no optimizer trains a parameter, and the id of the one in its place, which is nothing to another process."""

    why: str
    trained: int

    def __reduce__(self):
        return _References, ()


def weakly(method):
    """A bound method as a hook that doesn't keep its object alive: it does nothing once that is gone."""
    this, function = weakref.ref(method.__self__), method.__func__

    def call(*arguments):
        if (owner := this()) is not None:
            function(owner, *arguments)

    return call


def owner_of(parameter, kind: type | tuple[type, ...] = object):
    """The newest owner of a parameter that is of a `kind` and still alive, or None."""
    for reference in reversed(getattr(parameter, _OWNERS, ())):
        if (owner := reference()) is not None and isinstance(owner, kind):
            return owner
    return None


def attributes(parameter) -> dict:
    """The attributes set on a parameter, for one that replaces it: all except what is of this module."""
    return {name: value for name, value in vars(parameter).items() if name not in (_OWNERS, _INSTEAD, _IN_PARTS)}


def replace(parameter, successor, by: str):
    """Let `successor` have what was set on a parameter, in whose place `by` puts it."""
    vars(successor).update(attributes(parameter))
    why = f"no model's any more, as {by} has put others in their place; make the optimizer afterwards"
    untrained(parameter, successor, why)


def untrained(parameter, trained, why: str):
    """Let no optimizer step with `parameter` unless it has `trained` too. why: what the one is, and the way out."""
    setattr(parameter, _INSTEAD, _Instead(why, id(trained)))


def parameters_of(optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def not_elementwise(optimizer_class: Callable) -> str | None:
    """The name of a known class of optimizers that pieces of parameters are not enough for, if it is one."""
    kind = getattr(optimizer_class, "func", optimizer_class)  # of functools.partial
    return next((base.__name__ for base in getattr(kind, "__mro__", ()) if base.__name__ in NOT_ELEMENTWISE), None)


def check_elementwise(caller: str, optimizer_class: Callable, parameters):
    """Raises ValueError for an optimizer that would take this rank's plain parts of parameters for whole ones.

    That of torch and transformers: another, or a subclass, may know of parts.
    """
    optimizer_class = getattr(optimizer_class, "func", optimizer_class)
    kind, package = (getattr(optimizer_class, name, "") for name in ("__name__", "__module__"))
    known = kind in NOT_ELEMENTWISE and package.partition(".")[0] in ("torch", "transformers")
    if known and any(is_split(each) and hasattr(each, RANKS) for each in parameters):
        raise ValueError(
            f"{caller}: {kind} looks at whole parameters, but of some (tensor_model_parallel) each rank has a part, so "
            f"that ranks would step in other ways; split the model by parallelize_module, whose DTensors are whole to "
            f"torch's optimizers, or take an elementwise one"
        )


@register_optimizer_step_pre_hook
def _check_step(optimizer, *_):
    """Raises ValueError for an optimizer that would train what no model has, or parts as wholes.

    The first has parameters that others stand for, and none of those. (One with both is of a model of which a part was
    taken that shared a parameter with the rest, where it stays.)
    """
    if torch.compiler.is_compiling():
        return
    parameters = parameters_of(optimizer)
    stale = [instead for parameter in parameters if (instead := getattr(parameter, _INSTEAD, None))]
    if stale and not {instead.trained for instead in stale} & {*map(id, parameters)}:
        raise ValueError(
            f"{type(optimizer).__name__}.step: {len(stale)} of its {len(parameters)} parameters are {stale[0].why}"
        )
    check_elementwise(f"{type(optimizer).__name__}.step", type(optimizer), parameters)
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":  # torch's, whose import is slow
        ranks = dist.get_process_group_ranks(optimizer.process_group)
        for number, parameter in enumerate(parameters):
            if is_split(parameter):
                what = f"ZeroRedundancyOptimizer.step: parameter {number}, of shape {tuple(parameter.shape)},"
                check_replicas(what, parameter, ranks)


def leave_in_parts(parameters, why: str):
    """Let whoever would use the values of these parameters raise, until others are written over them."""
    for parameter in parameters:
        setattr(parameter, _IN_PARTS, (why, parameter._version))


def check_whole(parameter):
    """Raises LeaseError for a parameter that `leave_in_parts` has marked."""
    why, version = getattr(parameter, _IN_PARTS, (None, None))
    if why is not None and parameter._version == version:
        raise LeaseError(why)


def own(parameters, owner):
    """Record `owner` as the newest owner of these parameters, beside those they have."""
    for parameter in parameters:
        others = [reference for reference in getattr(parameter, _OWNERS, ()) if reference() is not None]
        setattr(parameter, _OWNERS, _References([*others, weakref.ref(owner)]))


def disown(parameters, owner):
    """Remove `owner` from the owners of these parameters, if it is among them."""
    for parameter in parameters:
        kept = [reference for reference in getattr(parameter, _OWNERS, ()) if reference() is not owner]
        setattr(parameter, _OWNERS, _References(kept))


def check_initialized(what: str, parameter):
    """Raises ValueError for a lazy module's parameter, which has no shape yet. what: as of `check_free`."""
    if is_lazy(parameter):
        raise ValueError(f"{what} is not initialized, as a lazy module's; run the model once before, on its inputs")


def check_free(what: str, parameter, *successors: type):
    """Raises ValueError if a parameter has an owner, but for those of the kinds that a new one takes the place of.

    Or if it has no shape yet; and LeaseError if its last one left it in parts. what: the caller and the parameter, for
    the error.
    """
    check_initialized(what, parameter)
    check_whole(parameter)
    for reference in reversed(getattr(parameter, _OWNERS, ())):
        if (owner := reference()) is not None and not isinstance(owner, successors):
            raise ValueError(
                f"{what} belongs to {getattr(owner, 'face', type(owner).__name__)}, which takes its gradients, and "
                f"would see no other parameter in its place; leave it to that, do this before, or call remove() of that"
            )


def remove_owners(parameters, kind: type):
    """Make room for a new owner: call remove() on the newest owner of each parameter that is a `kind`."""
    for owner in {owner_of(parameter, kind): None for parameter in parameters}:
        if owner is not None:
            owner.remove()
