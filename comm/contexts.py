"""The contexts of this process: the open ones, the default among them, and how the ranks of one leave it.

A context is open from `init` on. `finalize` meets the other ranks and frees its memory. A rank that leaves it without
them, by an exception or in garbage collection, abandons it: the next `init` over the same ranks frees the memory, once
none of them uses it any more. torch operators carry a context's name, since their arguments are plain values.
"""

import warnings

import torch

from tkernels.comm.errors import OutOfStepError, TkernelsError
from tkernels.comm.group import Group

INIT, FINALIZE = "init()", "finalize() of "  # calls in which ranks may meet out of step

_open = {}  # by name; the default one last
_abandoned = []
_number = 0  # of the latest context; higher than on any of its ranks before


def current_context():
    """The default context: the newest open one from `init(default=True)`, else the oldest from `init(default=False)`.

    Raises TkernelsError if no context is open.
    """
    if not _open:
        raise TkernelsError("no context: call tkernels.init() on every rank first, or pass ctx=...")
    return next(reversed(_open.values()))


def find_context(name: str):
    """The open context of that name. Raises TkernelsError if there is none."""
    if name not in _open:
        raise TkernelsError(
            f"context {name!r} is not open: it has been finalized, or left by an exception; open contexts: "
            f"{', '.join(_open) or 'none'}"
        )
    return _open[name]


def open_contexts(group: Group | None = None) -> list:
    """The contexts that are neither finalized nor abandoned, the default one last.

    group: only those over the same ranks as this group; None for all.
    """
    return [each for each in _open.values() if group is None or each.group.global_ranks == group.global_ranks]


def programs_at_once() -> int:
    """The most programs that may wait for peers at once: an operation of each context on each of its streams."""
    return sum(each.num_programs * len(each._workspaces) for each in open_contexts() if each.size > 1)


def agree_on_name(group: Group) -> str:
    """Collective. A unique name for a context, the same on all ranks."""
    global _number
    _number = max(group.gather(_number)) + 1
    return f"context{_number}"


def enter(context, default: bool):
    """Open a context. default: as the default one, else only if there is no other."""
    if default:
        _open[context.name] = context
    else:
        others = dict(_open)
        _open.clear()
        _open.update({context.name: context, **others})


def leave(context) -> bool:
    """Whether the context was open until now."""
    return _open.pop(context.name, None) is not None


def abandon(context):
    """Leave the memory of a context that is not open any more to an `init` over the same ranks."""
    _abandoned.append(context)


def give_back_abandoned(group: Group, in_use: set[str]):
    """Free the contexts over this group that this rank has abandoned, but for those that a rank may still use."""
    for each in [each for each in _abandoned if each.group.global_ranks == group.global_ranks]:
        if each.name not in in_use:
            _abandoned.remove(each)
            if each.closed:  # everything but its memory is freed already
                each.heap.close()
                continue
            try:
                each._give_back()
            except TkernelsError as error:
                warnings.warn(f"{each.name}, which was dropped without finalize(): {error}", stacklevel=5)


def meet(group: Group, call: str, value=None) -> list | None:
    """Collective, after the device's work so far. Every rank's value, and the names of contexts that it may still use.

    Returns None if this is a `finalize` of a context that the other ranks have already left, so it did not wait for
    them.

    A rank whose wait timed out, or that left by an exception, skips the meeting in `finalize`, where ranks without a
    failure wait for it. It meets them in its next call of `init` or `finalize` instead: their `finalize` then returns,
    and this rank waits for their next call.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    while True:
        try:
            return group.gather((value, [each.name for each in open_contexts(group)]), call)
        except OutOfStepError as error:
            if not all(each.startswith((INIT, FINALIZE)) for each in error.calls):
                raise
            met = list(zip(error.calls, (names for _, names in error.values), strict=True))
            leaving = {
                each
                for each in error.calls
                if each.startswith(FINALIZE)
                and not any(each.removeprefix(FINALIZE) in names for other, names in met if other != each)
            }
            if not leaving:
                raise
            if call in leaving:
                return None
