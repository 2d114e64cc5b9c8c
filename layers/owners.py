"""Owners of parameters: the objects whose hooks a parameter has, or whose memory it uses.

A parameter may outlive its owners, and keeps none of them alive.
"""

import weakref

_OWNERS = "tkernels_owners"  # on a parameter: weak references, the newest last


class _References(list):
    """A list of weak references that is pickled as an empty one: owners don't go to a file or another process."""

    def __reduce__(self):
        return _References, ()


def weakly(method):
    """A bound method as a hook that doesn't keep its object alive: it does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments):
        if (method := reference()) is not None:
            method(*arguments)

    return call


def owner_of(parameter, kind: type | tuple[type, ...] = object):
    """The newest owner of a parameter that is of a `kind` and still alive, or None."""
    for reference in reversed(getattr(parameter, _OWNERS, ())):
        if (owner := reference()) is not None and isinstance(owner, kind):
            return owner
    return None


def attributes(parameter) -> dict:
    """The attributes set on a parameter, for one that replaces it: all except its owners."""
    return {name: value for name, value in vars(parameter).items() if name != _OWNERS}


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


def check_free(what: str, parameter, *successors: type):
    """Raises ValueError if a parameter has an owner, but for those of the kinds that a new one takes the place of.

    what: the caller and the parameter, for the error.
    """
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
