"""Who uses a buffer when: Fence, Lease, Slot, Keepalive. All ordering between this library's streams goes through them.

A *lease* is one tenancy of a buffer: streams write it (producers), then streams read it (consumers), then it ends. A
*fence* is what must have happened, at most one completion a stream, since a stream's later work covers its earlier. A
*slot* is a long-lived buffer whose leases follow one another; a *keepalive* gives a one-off buffer back to its
allocator. Two orders matter, and both are easily lost: every reader comes after every producer of its tenancy, on
whatever stream, and every writer comes after everything of the tenancy before. Both are waits on events, never on the
tail of a stream, so that nothing waits for unrelated work; a stream never waits for itself, and the host never blocks.

    slot = Slot(torch.empty(n, device="cuda"))
    lease = slot.acquire()
    with lease.write():              # this stream, after the last tenancy
        lease.tensor.copy_(gradient)
    with lease.read(comm_stream):    # after every producer
        reduce(lease.tensor)
    slot.release(lease)              # issues no wait: the next tenant pays for it, if there is one

Streams are those of `dev`: torch.cuda, or torch.cpu, where there is one and everything is in order, or anything else
that has `current_stream()`, `stream(s)` and streams with `record_event()` and `wait_event(event)`.

Releases are host-time: they say that nothing more will be launched on the buffer, not that what was has finished.
"""

import contextlib
import threading
from collections import deque
from typing import Protocol

import torch

from tkernels.comm.errors import LeaseError


class Completion(Protocol):
    """Something that will have happened: an event of a stream, a c10d Work, a peer's signal at a generation.

    key: completions with the same key happen in the order in which they were made; the later one covers the earlier.
    captured: whether it was made in a CUDA graph's capture and means something there only; None is valid everywhere.
    """

    key: object
    captured: bool | None

    def wait(self, stream):
        """Order later work of `stream` behind it. Blocks neither the host nor any other stream."""

    def query(self) -> bool:
        """Whether it is known to have happened. False is always allowed."""


class EventCompletion:
    """What had been launched on a stream when this was made."""

    __slots__ = ("key", "captured", "_event")

    def __init__(self, stream, captured: bool | None = False, event=None):
        self.key, self.captured = stream, captured
        self._event = stream.record_event() if event is None else event

    def wait(self, stream):
        stream.wait_event(self._event)

    def query(self) -> bool:
        return self._event is None or self._event.query()  # torch.cpu records None: all is done


class WorkCompletion:
    """A collective or a transfer of torch.distributed that was started with async_op.

    Waiting orders a CUDA stream behind NCCL's own. Gloo knows no streams, and there it blocks the host.
    """

    captured = None

    def __init__(self, work, dev):
        self.key, self._work, self._dev = self, work, dev

    def wait(self, stream):
        with self._dev.stream(stream):
            self._work.wait()

    def query(self) -> bool:
        return self._work.is_completed()


class Fence:
    """A set of completions, at most one for each key."""

    __slots__ = ("_completions", "_dev")

    def __init__(self, dev):
        self._dev, self._completions = dev, {}

    def __len__(self):
        return len(self._completions)

    def record(self, stream):
        """Add what has been launched on `stream` so far."""
        self._completions[stream] = EventCompletion(stream, capturing(self._dev))

    def add(self, completion: Completion):
        self._completions[completion.key] = completion

    def update(self, other: "Fence"):
        self._completions.update(other._completions)

    def wait(self, stream):
        """Order later work of `stream` behind all of it. Raises LeaseError across the edge of a capture."""
        inside = None
        for key, completion in self._completions.items():
            if key == stream:  # by ==: torch makes a new wrapper at each current_stream()
                continue
            if completion.captured is not None:
                inside = capturing(self._dev) if inside is None else inside
                if inside != completion.captured:
                    raise LeaseError(_ACROSS[inside])
            completion.wait(stream)

    def query(self) -> bool:
        """Whether all of it is known to have happened; never under capture, where asking is not allowed."""
        return not self._completions or (
            not capturing(self._dev) and all(completion.query() for completion in self._completions.values())
        )

    def clear(self):
        self._completions = {}


_ACROSS = {
    True: "a buffer was last used outside the CUDA graph that is being captured, and a graph can't wait for that; "
    "capture inside `with comm.lease.captured(torch.cuda.graph(g), slots=[...])`, which orders it before",
    False: "a buffer was last used inside a CUDA graph's capture, and nothing outside can wait for that; capture "
    "inside `with comm.lease.captured(torch.cuda.graph(g), slots=[...])`, which leaves an event for what follows",
}


def capturing(dev) -> bool:
    """Whether the current stream of `dev` is being captured into a CUDA graph."""
    ask = getattr(dev, "is_current_stream_capturing", None)
    return ask is not None and ask()


class Lease:
    """One tenancy of a buffer: filling, then sealed by the first read, then released.

    tensor: the buffer, as an alias of its storage, so that `.data = ...` on the caller's tensor does not free it. None
        for a buffer that only its users know.
    home: the stream that the buffer's memory was allocated on.
    gate: what must have happened before anyone writes: the tenancy before.
    filled, used: the producers and the consumers of this tenancy.

    Producers of one tenancy are not ordered among themselves and must write disjoint bytes; `ordered=True` puts one
    behind those before it, for accumulation. Threads may share a lease.
    """

    def __init__(self, tensor: torch.Tensor | None = None, *, dev=None, home=None, gate=None, name: str | None = None):
        self.tensor = None if tensor is None else tensor.detach()
        self._num_bytes = None if tensor is None else tensor.untyped_storage().nbytes()
        self.dev = dev if dev is not None else torch.get_device_module(tensor.device)
        self.home = self.dev.current_stream() if home is None else home
        self.gate = Fence(self.dev) if gate is None else gate
        self.filled, self.used = Fence(self.dev), Fence(self.dev)
        self.name = name or "buffer"
        self.state = "filling"
        self._admitted, self._writing, self._reading = [], 0, 0
        self._lock = threading.RLock()

    def __repr__(self):
        return f"Lease({self.name}, {self.state})"

    @property
    def released(self) -> bool:
        return self.state == "released"

    def write(self, stream=None, *, ordered: bool = False) -> "_Block":
        """A context in which work that writes the buffer is launched on `stream`; None is the current stream.

        The stream's first write of this tenancy waits for the tenancy before. Raises LeaseError once it was read.
        """
        return _Block(self, "_begin_write", "_end_write", stream, ordered)

    def read(self, stream=None) -> "_Block":
        """A context in which work that reads the buffer is launched on `stream`; None is the current stream.

        The stream waits for every producer. Raises LeaseError while a write is open, or after the release.
        """
        return _Block(self, "_begin_read", "_end_read", stream)

    def written_by(self, completion: Completion):
        """A producer whose end is not on a stream of ours. Start it inside `write`, which orders it after the gate."""
        with self._lock:
            self._require(self.state == "filling", "written")
            self.filled.add(completion)

    def read_by(self, completion: Completion):
        """A consumer whose end is not on a stream of ours. Start it inside `read`, which orders it after producers."""
        with self._lock:
            self._require(self.state != "released", "read")
            self.used.add(completion)
            self.state = "sealed"

    def release(self) -> Fence:
        """End the tenancy, which issues no wait. Returns the gate of the next one. May be repeated.

        Raises LeaseError while a block is open, or if the storage has been resized meanwhile.
        """
        with self._lock:
            if self.released:
                return self.gate
            if self._writing or self._reading:
                raise LeaseError(f"{self.name}: released inside an open {'write' if self._writing else 'read'} block")
            if self.tensor is not None and self.tensor.untyped_storage().nbytes() != self._num_bytes:
                raise LeaseError(
                    f"{self.name}: its storage had {self._num_bytes} bytes when it was leased and has "
                    f"{self.tensor.untyped_storage().nbytes()} now; leased storage must not be resized"
                )
            self.state = "released"
            self.tensor = None
            gate = Fence(self.dev)
            if not (self.filled or self.used):
                gate.update(self.gate)  # nobody came: what the next tenant must wait for is what we had to
            gate.update(self.filled)
            gate.update(self.used)
            self.gate = gate
            return gate

    def _require(self, holds: bool, verb: str):
        if not holds:
            raise LeaseError(f"{self.name}: {verb} while {self.state}" + _HINTS.get((verb, self.state), ""))

    def _begin_write(self, stream, ordered):
        self._require(self.state == "filling", "written")
        if stream not in self._admitted:
            self.gate.wait(stream)
            self._admitted.append(stream)
        if ordered:
            self.filled.wait(stream)
        self._writing += 1

    def _end_write(self, stream):
        self._writing -= 1
        self.filled.record(stream)

    def _begin_read(self, stream, ordered):
        self._require(self.state != "released", "read")
        if self._writing:
            raise LeaseError(f"{self.name}: read while a write block is open; leave it first")
        (self.filled or self.gate).wait(stream)
        self.state = "sealed"
        self._reading += 1

    def _end_read(self, stream):
        self._reading -= 1
        self.used.record(stream)


_HINTS = {
    ("written", "sealed"): "; a tenancy is written, then read: acquire a new lease to write again",
    ("written", "released"): "; acquire a new lease",
    ("read", "released"): "; the buffer may have its next tenant already: read before the release",
}


class _Block:
    """The time in which work of one kind is launched; the event is recorded at its end, right after the last launch."""

    __slots__ = ("_lease", "_begin", "_end", "_stream", "_ordered")

    def __init__(self, lease, begin, end, stream, ordered=False):
        self._lease, self._begin, self._end, self._stream, self._ordered = lease, begin, end, stream, ordered

    def __enter__(self):
        lease = self._lease
        if self._stream is None:
            self._stream = lease.dev.current_stream()
        with lease._lock:
            getattr(lease, self._begin)(self._stream, self._ordered)
        return lease.tensor

    def __exit__(self, *exception):
        with self._lease._lock:
            getattr(self._lease, self._end)(self._stream)


class Slot:
    """A long-lived buffer that is leased again and again, to one tenant at a time."""

    def __init__(self, tensor: torch.Tensor | None = None, *, dev=None, home=None, name: str | None = None):
        self.tensor, self.name = tensor, name or "slot"
        self.dev = dev if dev is not None else torch.get_device_module(tensor.device)
        self.home = self.dev.current_stream() if home is None else home
        self.lease: Lease | None = None
        self._first_gate = Fence(self.dev)

    @property
    def gate(self) -> Fence:
        """What the next tenant waits for; with an open lease, what that one had to. A peer's credit may be added."""
        return self._first_gate if self.lease is None else self.lease.gate

    def acquire(self) -> Lease:
        """The next tenancy. Raises LeaseError while the last one has not been released."""
        if self.lease is not None and not self.lease.released:
            raise LeaseError(f"{self.name}: acquired while its last lease is {self.lease.state}; release it first")
        self.lease = Lease(self.tensor, dev=self.dev, home=self.home, gate=self.gate, name=self.name)
        return self.lease

    def release(self, lease: Lease):
        """End the slot's tenancy. Raises LeaseError for a lease that is not the current one."""
        if lease is not self.lease:
            raise LeaseError(f"{self.name}: a stale lease was released; the slot has had another tenant since")
        lease.release()

    def join(self, stream=None):
        """Order `stream` (None: the current one) behind everything of the last tenancy, and forget it."""
        if self.lease is not None and not self.lease.released:
            raise LeaseError(f"{self.name}: joined while its lease is {self.lease.state}; release it first")
        self.gate.wait(self.dev.current_stream() if stream is None else stream)
        self.gate.clear()


class Keepalive:
    """Storage that goes back to its allocator once its home stream is ordered behind every use.

    The caching allocator reuses a block on the stream that allocated it, at once: whoever drops the last reference
    earlier gives memory away that another stream still reads.
    """

    def __init__(self):
        self._deferred = deque()

    def __len__(self):
        return len(self._deferred)

    def defer(self, lease: Lease, drop=None):
        """End `lease` and hold its storage; `drop()` is called when it is let go. Issues no wait."""
        held = lease.tensor
        self._deferred.append((lease.release(), lease.home, held, drop))

    def drain(self, keep: int = 0):
        """Let go of all but the newest `keep`, each after a wait of its home stream."""
        while len(self._deferred) > keep:
            self._let_go()

    def collect(self):
        """Let go of the oldest ones that have finished already, which needs no wait."""
        while self._deferred and self._deferred[0][0].query():
            self._let_go(finished=True)

    def _let_go(self, finished: bool = False):
        gate, home, _, drop = self._deferred.popleft()
        if not finished:
            gate.wait(home)
        if drop is not None:
            drop()


@contextlib.contextmanager
def captured(graph, *, slots=(), streams=(), dev=torch.cuda):
    """Capture a CUDA graph that uses `slots` on side `streams`: `graph` is torch.cuda.graph(...), not yet entered.

    What was launched on the slots before is put ahead of the current stream, which therefore has to be the one that
    replays the graph, or to be waited for by it. Inside, the side streams fork from the capture and join it at the end.
    Afterwards one external event, recorded by every replay, stands for all that the graph does with the slots.
    """
    for slot in slots:
        slot.join()
    with graph:
        stream = dev.current_stream()
        for side in streams:
            side.wait_event(stream.record_event())
        yield
        for slot in slots:
            slot.join(stream)
        for side in streams:
            stream.wait_event(side.record_event())
        replayed = dev.Event(external=True)
        replayed.record(stream)
    for slot in slots:
        slot.gate.add(EventCompletion(replayed, captured=None, event=replayed))
