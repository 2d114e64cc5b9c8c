"""Who has taken parameters over: whose hooks they have, or whose memory they are.

A parameter may outlive its owners, and keeps none of them alive.
"""

import weakref

_OWNERS = "tkernels_owners"  # on a parameter: weak references, the newest last


class _References(list):
    """Of which nothing is left in a file, or in another process."""

    def __reduce__(self):
        return _References, ()


def owner_of(parameter, kind: type = object):
    """The newest owner of a parameter that is a `kind`, or None."""
    for reference in reversed(getattr(parameter, _OWNERS, ())):
        if (owner := reference()) is not None and isinstance(owner, kind):
            return owner
    return None


def attributes(parameter) -> dict:
    """What programs have written on a parameter, for one that takes its place: all but who owns it."""
    return {name: value for name, value in vars(parameter).items() if name != _OWNERS}


def own(parameters, owner):
    """`owner` has taken these parameters over, beside what else has."""
    for parameter in parameters:
        others = [reference for reference in getattr(parameter, _OWNERS, ()) if reference() is not None]
        setattr(parameter, _OWNERS, _References([*others, weakref.ref(owner)]))


def disown(parameters, owner):
    """`owner` has given these parameters back, if it had them."""
    for parameter in parameters:
        kept = [reference for reference in getattr(parameter, _OWNERS, ()) if reference() is not owner]
        setattr(parameter, _OWNERS, _References(kept))


def remove_owners(parameters, kind: type):
    """Make room for a new owner: remove() each one that is a `kind`."""
    for owner in {owner_of(parameter, kind): None for parameter in parameters}:
        if owner is not None:
            owner.remove()
