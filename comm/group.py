"""Group: the ranks that work together, a torch process group or this process alone."""

import atexit
import collections
import contextlib
import datetime
import functools
import json
import logging
import os
import pickle
import reprlib
import sys
import time
import weakref
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist

from tkernels.comm.arguments import check_type
from tkernels.comm.calls import Turn, differences, differing, module_of, place
from tkernels.comm.errors import MismatchError, OutOfStepError, TkernelsError
from tkernels.comm.interpreter import integer_from_environment

# torch 2.13 renames them and warns of the old names.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

GROUPS = "a process group of torch.distributed, a DeviceMesh of one dimension, or None"  # what `init` takes
PATIENCE_S = 60.0  # until a rank that waits on the host logs which ranks are missing

_log = logging.getLogger("tkernels")
_meetings = collections.Counter()  # number of meetings so far, by `Group._key`
_turns = weakref.WeakKeyDictionary()  # by process group: its meetings must not overlap
_hosts = weakref.WeakKeyDictionary()  # by process group: gloo's of the same ranks, which meetings alone use
FRAME = 4096  # bytes of a meeting's first message, which is the only one if all ranks' values fit
_parents = weakref.WeakSet()  # process groups of the rank that this process was forked from
os.register_at_fork(after_in_child=lambda: _parents.update(dist.distributed_c10d._world.pg_map))


@functools.cache
def gloo_device():
    """Of all meetings, and of tests' groups, as each device has a thread that wakes a hundred times a second."""
    gloo, interface = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME")
    return gloo.create_device(interface=interface.split(",")[0]) if interface else gloo.create_default_device()


# Their threads would abort the exit.
atexit.register(gloo_device.cache_clear)
atexit.register(_hosts.clear)


class _Arrival(NamedTuple):
    """What ranks exchange in a meeting."""

    call: str
    line: str
    alike: dict
    value: object


class Group:
    """Rank, size and host-side exchange of one torch process group (gloo, nccl or any other backend)."""

    closed = False
    _process_group = None  # a weak reference: torch owns it, and threads of a group that outlives it can abort the exit
    name = None  # of its context, the same on all ranks
    limit_s = None  # of a meeting in a call; None: that of torch.distributed
    _describe = None  # of the call in progress; see `during`
    _number = 0  # of the last meeting that had a limit

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        """`process_group=None` is the default group, or one rank when torch.distributed is not initialised."""
        if process_group is not None and process_group is not dist.GroupMember.NON_GROUP_MEMBER:
            check_type("init: group", process_group, dist.ProcessGroup, GROUPS)
        if not dist.is_initialized():
            if integer_from_environment("WORLD_SIZE", 1) > 1:
                raise ValueError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised; call "
                    f"torch.distributed.init_process_group() before init()"
                )
            self.process_group, self.rank, self.size, self.global_ranks = None, 0, 1, [0]
            return
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the group that was passed to init()")
        self.process_group = process_group if process_group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.process_group)
        self.size = dist.get_world_size(self.process_group)
        self.global_ranks = dist.get_process_group_ranks(self.process_group)
        self._turn = _turns.setdefault(self.process_group, Turn(_refuse))
        # Of this process group, in the store of all processes.
        self._key = f"tkernels/{self.process_group.group_name}/{','.join(map(str, self.global_ranks))}"

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's; None for one rank without torch.distributed, and once it has been destroyed."""
        return self._process_group and self._process_group()

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None):
        self._process_group = None if group is None else weakref.ref(group)

    @property
    def alive(self) -> bool:
        """Whether torch.distributed has not destroyed the process group, if there is one."""
        if self._process_group is None:
            return True
        return dist.is_initialized() and self.process_group in dist.distributed_c10d._world.pg_map

    def gather(self, value, call: str | None = None, limit_s: float | None = None) -> list:
        """Collective. Returns every rank's picklable `value`, in rank order.

        call: name of this rank's call; by default the operation of `during`, or the library's function that calls.
        limit_s: ranks that have not come by then are named in an OutOfStepError; None: `self.limit_s` in a call.

        Raises on every rank: OutOfStepError if the calls differ, MismatchError if fields differ that must be alike.
        Raises TkernelsError if a rank has gone, if another thread meets over the same process group, in a process that
        was forked from a rank, and once the group is closed. A waiting rank logs the missing ones after PATIENCE_S;
        without a limit, that of the wait is torch.distributed's.
        """
        if self.closed:
            raise TkernelsError("the context of this group has been finalized; init() a new one")
        if self.size == 1:
            return [value]
        self._refuse_forked()
        if not self.alive:
            raise TkernelsError(
                "torch.distributed has been shut down, or this process group, so the ranks can't meet any more; "
                "finalize() contexts before destroy_process_group()"
            )
        function, line = _caller()
        operation, alike = self.described() or (function, {})
        alike = {"context": self.name} | alike
        call = call or operation
        limit_s = self.limit_s if limit_s is None and self._describe else limit_s
        with self._turn:
            name_late = self._arrive(call, line, limit_s)
            try:
                ranks = self._exchange(_Arrival(call, line, alike, value), name_late)
            except RuntimeError as error:  # from the backend
                raise TkernelsError(
                    f"{call} ({line}): the ranks can't meet, perhaps as one has ended or was killed: {error}"
                ) from error
        calls, lines, alike, values = zip(*ranks, strict=True)
        if len(set(calls)) > 1:
            raise OutOfStepError(calls, lines, values)
        if found := differences(alike):
            raise MismatchError(f"{calls[0]}: the ranks' calls differ, in {found}; {_way_out(alike)}")
        return list(values)

    def _exchange(self, value, name_late) -> list:
        """Collective. Every rank's picklable value. name_late: called after PATIENCE_S.

        Not over the process group, whose next collective on the host may be of another thread, as in dcp.async_save,
        or of a rank that is not in this call.
        """
        sent = pickle.dumps(value)
        data = len(sent).to_bytes(8, "little") + sent
        frames = self._all_gather(data[:FRAME].ljust(FRAME, b"\0"), name_late)
        sizes = [8 + int.from_bytes(frame[:8], "little") for frame in frames]
        if (most := max(sizes)) > FRAME:
            rest = self._all_gather(data[FRAME:].ljust(most - FRAME, b"\0"), name_late)
            frames = [first + second for first, second in zip(frames, rest, strict=True)]
        return [pickle.loads(frame[8:size]) for frame, size in zip(frames, sizes, strict=True)]

    def _all_gather(self, data: bytes, name_late) -> list[bytes]:
        """Collective. As many bytes of each rank."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = torch.empty(self.size, len(data), dtype=torch.uint8, device="cpu")
        work = self._host(name_late).allgather([[*found]], [mine])
        try:
            work.wait(datetime.timedelta(seconds=PATIENCE_S))
        except RuntimeError:
            if not work.is_completed():
                name_late()
            work.wait()  # raises again if it has failed
        return [part.numpy().tobytes() for part in found]

    def _host(self, name_late) -> dist.ProcessGroup:
        """Collective. The process group of meetings, which torch does not count among those that it names by number."""
        group, store = self.process_group, _store()
        if group in _hosts or store is None:
            return _hosts.get(group, group)
        limit, number = group._get_backend(group._device_types[0]).options._timeout, _meetings[self._key]
        here = lambda: all(met >= number for met, *_ in self._last_calls(store))  # noqa: E731
        if not _until(here, limit.total_seconds(), name_late):
            raise RuntimeError(f"some have not come within {limit}")
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [gloo_device()], 1, limit
        store = dist.PrefixStore(f"{self._key}/{number}", store)
        _hosts[group] = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        return _hosts[group]

    def _arrive(self, call: str, line: str, limit_s: float | None):
        """Collective. Tell the others that this rank has come to a meeting. Returns what logs which are missing.

        With a limit, returns once all are here, and raises OutOfStepError if some are not within it.
        """
        store, meeting = _store(), None
        if limit_s is not None:
            self._number += 1
            meeting = f"tkernels/{self.name}/meeting {self._number}"
        number = _meetings[self._key] = _meetings[self._key] + 1
        name_late = functools.partial(self._name_late, store, number, f"{call} ({line})")
        name_late = functools.cache(name_late)  # which says it once
        if store is not None:
            with contextlib.suppress(RuntimeError):  # the process that serves it may have ended
                store.set(f"{self._key}/{self.rank}", json.dumps([number, meeting, call, line]))
            if meeting:
                self._await_all(store, meeting, limit_s, name_late)
        return name_late

    def _last_calls(self, store: dist.Store) -> list[tuple[int, str | None, str, str]]:
        """By rank: of the last meeting that it has come to, the number, the name, the call, the line of the program."""
        keys, none = [f"{self._key}/{rank}" for rank in range(self.size)], (0, None, "no call", "of these ranks")
        return [json.loads(store.get(key)) if store.check([key]) else none for key in keys]

    def awaits(self, rank: int, other: int) -> str | None:
        """The meeting in which a rank waits for another one, its call and line; None for none. Not collective."""
        with contextlib.suppress(RuntimeError):  # the process that serves the store may have ended
            last = self._last_calls(store) if (store := _store()) is not None and self.size > 1 else ()
            if last and last[rank][0] > last[other][0]:
                return "{} ({})".format(*last[rank][2:])

    def _await_all(self, store: dist.Store, meeting: str, limit_s: float, name_late):
        """Collective. Returns once all ranks are in this meeting; raises OutOfStepError if not all are in `limit_s`.

        All ranks do the same, the late ones too: whichever comes first, the last rank or the end of a limit, is final.
        """
        verdict = f"{meeting}/verdict"  # until which no rank goes on
        if all(name == meeting for _, name, *_ in self._last_calls(store)):
            store.compare_set(verdict, "", "all are here")
        elif not _until(lambda: store.check([verdict]), limit_s, name_late):
            late = f"no call for {limit_s:g} s"
            last = self._last_calls(store)
            where = [
                (call, line) if name == meeting else (late, f"last in {call} ({line})") for _, name, call, line in last
            ]
            store.compare_set(verdict, "", json.dumps(where))
        found = store.get(verdict).decode()
        if found != "all are here":
            calls, lines = zip(*json.loads(found), strict=True)
            raise OutOfStepError(calls, lines, (None,) * self.size)
        if self.rank == 0:  # all have been in the meeting before this one
            store.delete_key(f"tkernels/{self.name}/meeting {self._number - 1}/verdict")

    def _name_late(self, store: dist.Store | None, number: int, where: str):
        late = []
        with contextlib.suppress(RuntimeError):
            for rank, (met, _, call, line) in enumerate(self._last_calls(store) if store is not None else ()):
                if met < number:
                    late.append(f"rank {rank}, which was last in {call} ({line})")
        if late:
            among = "" if self.size == dist.get_world_size() else f" (of global ranks {self.global_ranks})"
            _log.warning(
                "%s: rank %d waits on the host, %g s so far, for %s%s; all ranks must make the same calls in the same "
                "order", where, self.rank, PATIENCE_S, ", and for ".join(late), among,
            )  # fmt: skip

    @contextlib.contextmanager
    def together(self, what: str, way_out: str):
        """Collective. If the block fails on any rank, every rank raises TkernelsError; it must not meet other ranks.

        what, way_out: for the error: what can't be done, and what helps.
        """
        with self.checking():
            try:
                yield
            except Exception as error:
                raise TkernelsError(f"{what}: {type(error).__name__}: {error}. {way_out}") from error

    @contextlib.contextmanager
    def checking(self, call: str | None = None, alike: dict | None = None):
        """Collective. If the block raises on any rank, every rank raises the first of the errors; it must not meet.

        For arguments, which may be wrong on one rank alone: the others would wait for it in their next meeting.
        call: as in `gather`, where a wrong argument leads elsewhere. alike: what the block fills with values by name,
        for which every rank raises MismatchError if ranks differ in them.
        """
        mine = None
        try:
            yield
        except Exception as error:
            mine = error
        kind = next((kind for kind in (TypeError, ValueError, MismatchError) if isinstance(mine, kind)), TkernelsError)
        errors, fields = zip(*self.gather((mine and (kind, str(mine)), alike), call), strict=True)
        if len(set(errors)) > 1:
            rank = next(rank for rank, error in enumerate(errors) if error)
            kind, text = errors[rank]
            raise kind(f"{text} (on rank {rank})") from mine
        if mine is not None:
            raise mine
        if alike and (found := differences(fields)):
            raise MismatchError(f"{call}: the ranks' calls differ, in {found}; {_way_out(fields)}")

    def check_alike(self, caller: str, what: str, mine: dict, way_out: str):
        """Collective. Raises MismatchError, the same on every rank, if values of `mine`, by name, differ over ranks.

        caller, what, way_out: for the error: who compares, what has these values, in the plural, and what helps.
        """
        first, *others = self.gather(mine)
        for rank, theirs in enumerate(others, 1):
            if found := differing([first, theirs]):
                name, *names = found
                names.insert(0, f"{name} ({' and '.join(map(reprlib.repr, found[name]))})")
                raise MismatchError(
                    f"{caller}: the {what} of rank 0 and rank {rank} differ in {listed(names)}; {way_out}"
                )

    def count_groups_alike(self):
        """Collective. Let all ranks be in as many process groups, by which torch names the next one of some of them.

        Otherwise its members wait for each other under different names, as after a group of a pipeline's ends alone.
        """
        counts = self.gather(len(dist.distributed_c10d._world.pg_names))
        for _ in range(max(counts) - counts[self.rank]):
            dist.new_group([self.global_ranks[self.rank]], use_local_synchronization=True)

    @contextlib.contextmanager
    def during(self, describe):
        """Meetings in the block belong to a call. `describe()`: its name, and fields that all ranks have alike."""
        before, self._describe = self._describe, describe
        try:
            yield
        finally:
            self._describe = before

    def described(self) -> tuple[str, dict] | None:
        """What `during` says of the call in progress."""
        return self._describe() if self._describe else None

    def tell(self, topic: str, text: str | None, ranks: tuple[int, ...], limit_s: float) -> list[str | None]:
        """Tell the other ranks a text; returns what each of `ranks` tells them on the same topic, None for nothing.

        Not a meeting: it waits until all of `ranks` have called it, but no longer than the limit.
        """
        self._refuse_forked()
        store = _store()
        if store is None:
            return [text if rank == self.rank else None for rank in ranks]
        told = dict.fromkeys(ranks)
        with contextlib.suppress(RuntimeError):  # the process that serves it may have ended
            store.set(f"{self._key}/{self.rank}/{topic}", text or "")
            for rank, key in ((rank, f"{self._key}/{rank}/{topic}") for rank in ranks):
                if _until(lambda key=key: store.check([key]), limit_s):
                    told[rank] = store.get(key).decode() or None
        return list(told.values())

    def barrier(self, value=None, limit_s: float | None = None, call: str | None = None) -> list:
        """Collective. `gather`, after the device's work so far: a host barrier."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self.gather(value, call, limit_s=limit_s)

    def close(self):
        self.closed = True

    def _refuse_forked(self):
        if self.process_group in _parents:
            raise TkernelsError(of_parent(self.name or "the process group"))


def of_parent(what: str) -> str:
    """For errors in a process that was forked from a rank."""
    return (
        f"{what} belongs to the rank that this process was forked from, which shares its memory, connections and "
        f"signals; make the call there"
    )


def _way_out(ranks: list[dict]) -> str:
    way_out, rows = "all must pass the same", [each.get("rows") for each in ranks]
    if any(each != rows[0] for each in rows) and all(len(set(each)) == 1 for each in rows):
        if all(each.get("M") == ranks[0].get("M") for each in ranks):
            counts = tuple(each[0] for each in rows)  # each rank assumes its own number for all
            way_out += f", or, where they have different numbers of rows, rows={counts}"
    return way_out


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of the tensor's bits in order: for ranks that compare tensors that should be equal."""
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(bits.cpu().numpy().data)


def listed(names: list[str]) -> str:
    """For errors: the first 5 names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _store() -> dist.Store | None:
    """The store that all processes of torch.distributed share; None if a backend needs none."""
    with contextlib.suppress(AttributeError, ValueError):
        return dist.distributed_c10d._get_default_store()


def _until(condition, limit_s: float, name_late=None) -> bool:
    """Whether the condition comes true within the limit. A store's own wait would keep other threads out of it.

    name_late: called after PATIENCE_S.
    """
    began, pause = time.monotonic(), 2e-4
    while not condition():
        waited = time.monotonic() - began
        if waited > limit_s:
            return False
        if name_late is not None and waited > PATIENCE_S:
            name_late()
            name_late = None
        time.sleep(pause)
        pause = min(2 * pause, 1e-2)
    return True


def _caller() -> tuple[str, str]:
    """The library's function that uses a group, and the line of the program that called the library."""
    frame, function = sys._getframe(2), "a call of the program's own"
    while module_of(frame) in (__name__, "contextlib"):
        frame = frame.f_back
    if module_of(frame).startswith("tkernels."):
        function = f"{module_of(frame)}.{frame.f_code.co_name}"
    return function, place(frame)[1]


def _refuse(comes: str, inside: str):
    raise TkernelsError(
        f"{comes}: {inside} is meeting the other ranks over the same process group, which carries one meeting at a "
        f"time. Make such calls from one thread, or give each thread's context a process group of its own: "
        f"init(torch.distributed.new_group(...))"
    )
