"""The contexts of this process: the open ones, the default among them, and how the ranks of one leave it.

A context is open from `init` on. `finalize` meets the other ranks and frees its memory. A rank that leaves it without
them, by an exception or in garbage collection, abandons it: the next `init` over the same ranks frees the memory, once
none of them uses it any more. A context whose process group torch.distributed has destroyed is abandoned, too. A
*shared* one is found by its ranks; the others belong to what opened them. torch operators carry a context's name,
since their arguments are plain values.
"""

import collections
import itertools
import os
import threading
import warnings
import weakref

import torch.distributed as dist

from tkernels.comm.errors import OutOfStepError, TkernelsError
from tkernels.comm.group import Group

INIT, FINALIZE = "init()", "finalize() of "  # calls in which ranks may meet out of step

_open = {}  # by name: others, then those of init(default=True); the last is the default one
_abandoned = []
_numbers, _opened = itertools.count(1), itertools.count()
_over = weakref.WeakKeyDictionary()  # process group -> the context that `shared_over` has found
_making = collections.defaultdict(threading.Lock)  # by global ranks


def current_context():
    """The default context: the newest open one from `init(default=True)`, else the oldest of the others.

    Raises TkernelsError if no context is open.
    """
    if _open:
        return next(reversed(_open.values()))
    raise TkernelsError("no context: call tkernels.init() on every rank first, or pass ctx=...")


def find_context(name: str):
    """The open context of that name. Raises TkernelsError if there is none."""
    if name in _open:
        return _open[name]
    raise TkernelsError(
        f"context {name!r} is not open: it has been finalized, or left by an exception; open contexts: "
        f"{', '.join(each.name for each in open_contexts()) or 'none'}"
    )


def open_contexts(group: Group | None = None) -> list:
    """The contexts that are neither finalized nor abandoned, the default one last.

    group: only those over the same ranks as this group; None for all.
    """
    return [each for each in _open.values() if group is None or each.group.global_ranks == group.global_ranks]


def shared_over(process_group: dist.ProcessGroup, make=None):
    """The newest shared open context over the ranks of a process group.

    make: makes one if there is none, and is collective. Without it, None is returned then.
    """
    if (found := _over.get(process_group)) is not None and found.group.alive:
        return found
    group = Group(process_group)
    with _making[tuple(group.global_ranks)]:  # not for other ranks: each rank may come to them in another order
        found = [each for each in open_contexts(group) if each.shared and each.group.alive]
        if not found and make is None:
            return None
        _over[process_group] = context = max(found, key=lambda each: each.opened) if found else make()
        return context


def programs_at_once() -> int:
    """The most programs that may wait for peers at once: an operation of each context on each of its streams."""
    return sum(each.num_programs * len(each._workspaces) for each in open_contexts() if each.size > 1)


def _leave_to_parent():
    for each in open_contexts():
        if each.size > 1:
            each.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def agree_on_name(group: Group) -> str:
    """Collective. A unique name for a context, the same on all ranks: its number on the first of them, and which."""
    number, first = group.gather(next(_numbers))[0], group.global_ranks[0]
    return f"context{number}" if first == 0 else f"context{number}.{first}"


def enter(context, default: bool):
    """Open a context. default: as the default one, else only if there is no other."""
    global _open
    context.opened = next(_opened)
    _open = _open | {context.name: context} if default else {context.name: context} | _open
    _over.clear()


def leave(context) -> bool:
    """Whether the context was open until now."""
    left = _open.pop(context.name, None)
    _over.clear()
    return left is not None


def is_abandoned(context) -> bool:
    """Whether no `init` has freed its memory since it was abandoned."""
    return context in _abandoned


def abandon(context):
    """Leave the memory of a context that is not open any more to an `init` over the same ranks."""
    _abandoned.append(context)


def let_go(context):
    """Collective. Let ranks return that wait in `finalize` of a context that this rank has left after a failure.

    For who meets next over other ranks. All that have left it so must call it, and none that waits.
    """
    if is_abandoned(context) and context.group.alive:
        meet(Group(context.group.process_group), INIT, once=True)


def give_back_unused(group: Group, in_use: set[str]):
    """Free the contexts that this rank has abandoned, if no rank may still use them.

    That is known of those over this group's ranks, by `in_use`, and of those whose process group is destroyed, unless
    they have failed: then a peer that is late may still write there.
    """
    for each in open_contexts():
        if not each.group.alive:
            each.abandon()
    for each in list(_abandoned):
        met = each.group.global_ranks == group.global_ranks
        if each.name not in in_use and (met or not each.group.alive and not each.failed):
            _abandoned.remove(each)
            if each.closed:  # everything but its memory is freed already
                each.heap.close()
                continue
            try:
                each._give_back()
            except TkernelsError as error:
                warnings.warn(f"{each.name}, which was dropped without finalize(): {error}", stacklevel=5)


def meet(group: Group, call: str, value=None, once: bool = False) -> list | None:
    """Collective, after the device's work so far. Every rank's value, and the names of contexts that it may still use.

    Returns None if this is a `finalize` of a context that the other ranks have already left, so it did not wait for
    them. once: also after others' `finalize`, of whose ranks it waits for no next call.

    A rank whose wait timed out, or that left by an exception, skips the meeting in `finalize`, where ranks without a
    failure wait for it. It meets them in its next call of `init` or `finalize` instead: their `finalize` then returns,
    and this rank waits for their next call. So it does if its `init` meets them in another call, which then raises.
    """
    while True:
        try:
            return group.barrier((value, [each.name for each in open_contexts(group) if each.group.alive]), call=call)
        except OutOfStepError as error:
            if all(each.startswith((INIT, FINALIZE)) for each in error.calls):
                met = [(each, names) for each, (_, names) in zip(error.calls, error.values, strict=True)]
                in_use = {FINALIZE + name for each, names in met for name in names if FINALIZE + name != each}
                leaving = {each for each in error.calls if each.startswith(FINALIZE)} - in_use
                if not leaving:
                    raise
                if once or call in leaving:
                    return None
            elif call != INIT or all(each.group.global_ranks != group.global_ranks for each in _abandoned):
                raise  # else the others' error: in a call of the context that this rank has left
