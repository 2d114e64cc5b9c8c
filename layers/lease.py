"""Ordering of buffer accesses across streams: Lease, Slot, Keepalive, over the fences of tkernels.comm.fence.

All ordering between the streams of the layers goes through these classes.

- A *lease* is one tenancy of a buffer: streams write it (producers), then streams read it (consumers), then it ends.
- A *fence* is the set of completions to wait for, at most one per stream, since a stream's later work covers its
  earlier work.
- A *slot* is a long-lived buffer whose leases follow one another.
- A *keepalive* returns a one-off buffer to its allocator.

Two orderings matter, and both are easily missed: every reader comes after every producer of its tenancy, on whatever
stream, and every writer comes after all work of the previous tenancy. Both are waits on events, never on the tail of a
stream, so nothing waits for unrelated work. A stream never waits for itself, and the host never blocks, except on gloo
(see `WorkCompletion`).

    slot = Slot(torch.empty(n, device="cuda"))
    lease = slot.acquire()
    with lease.write():              # on the current stream, after the last tenancy
        lease.tensor.copy_(gradient)
    with lease.read(comm_stream):    # after every producer
        reduce(lease.tensor)
    slot.release(lease)              # issues no wait: the next tenant waits, if there is one

Streams are those of `dev`. It is torch.cuda; or torch.cpu, which has one stream with everything in order; or any other
object that has `current_stream()`, `stream(s)` and streams with `record_event()` and `wait_event(event)`.

Releases take effect on the host's timeline: they state that nothing more will be launched on the buffer, not that the
launched work has finished. A write or read block records one event; if all work is on one stream, nothing ever waits.
"""

import threading
from collections import deque

import torch

from tkernels.comm.arguments import check_type, whole
from tkernels.comm.errors import LeaseError
from tkernels.comm.fence import Completion, Fence, capturing, check_dev, check_stream, current_stream


class WorkCompletion:
    """Completion of a torch.distributed collective or transfer that was started with async_op.

    Make it right after the start. Waiting orders a CUDA stream after NCCL's own stream. Gloo has no streams, so waiting
    blocks the host there.
    """

    __slots__ = ("captured", "_work", "_dev")

    def __init__(self, work, dev):
        if work is not None and not (hasattr(work, "wait") or hasattr(work, "is_completed")):
            raise TypeError(f"WorkCompletion: work={work!r} must be what torch.distributed returns with async_op=True")
        self.captured, self._work, self._dev = capturing(dev), work, dev

    @property
    def key(self):
        return self

    def wait(self, stream):
        if self._work is None:
            return
        with self._dev.stream(stream):
            self._work.wait()
        if self._dev is torch.cpu:  # it is done, and a second wait for a send of gloo's would never end
            self._work = None

    def query(self) -> bool:
        return self._work is None or self._work.is_completed()


class Lease:
    """One tenancy of a buffer: filling, then sealed by the first read, then released.

    tensor: the buffer, as an alias of its storage, so that `.data = ...` on the caller's tensor does not free it. None
        if the lease is not given the buffer and only orders its users.
    home: the stream that the buffer's memory was allocated on.
    gate: fence of the previous tenancy, which must have completed before any write.
    filled, used: fences of this tenancy's producers and consumers.

    Producers of one tenancy are not ordered among themselves and must write disjoint bytes; `ordered=True` orders a
    write after the earlier ones, for accumulation. Threads may share a lease.
    """

    def __init__(self, tensor: torch.Tensor | None = None, *, dev=None, home=None, gate=None, name: str | None = None):
        self.name = name or "buffer"
        check_type(f"{self.name}: tensor", tensor, torch.Tensor | None, "a tensor")
        self.dev = dev = dev if dev is not None else _device_module(tensor, self.name)
        check_dev(self.name, dev)
        self.tensor = None if tensor is None else tensor.detach()
        self._num_bytes = None if tensor is None else tensor.untyped_storage().nbytes()
        self.home = current_stream(dev) if home is None else home
        check_stream(f"{self.name}: home", self.home)
        self.gate = Fence(dev) if gate is None else gate
        self.filled, self.used = Fence(dev), Fence(dev)
        self.state = "filling"
        self._writers = []  # streams that have waited for the gate
        self._writing = self._reading = 0
        self._passed = False  # whether a stream has waited for the gate, so that its end implies the gate
        self._lock = threading.RLock()

    def __repr__(self):
        return f"Lease({self.name}, {self.state})"

    @property
    def released(self) -> bool:
        return self.state == "released"

    def write(self, stream=None, *, ordered: bool = False) -> "_Block":
        """A context in which to launch work on `stream` that writes the buffer; None is the current stream.

        The stream's first write of this tenancy waits for the previous tenancy. Raises LeaseError once the tenancy has
        been read or released, and for an ordered write while another write is open, since the end of that one can't be
        waited for yet.
        """
        return _Block(self, Lease._begin_write, Lease._end_write, stream, ordered)

    def read(self, stream=None) -> "_Block":
        """A context in which to launch work on `stream` that reads the buffer; None is the current stream.

        The stream waits for every producer. Raises LeaseError while a write is open, or after the release.
        """
        return _Block(self, Lease._begin_read, Lease._end_read, stream)

    def written_by(self, completion: Completion):
        """Add a producer whose end `write` does not record. Start it inside `write`, which orders it after the gate."""
        with self._lock:
            self._require(self.state == "filling", "written")
            self.filled.add(completion)

    def read_by(self, completion: Completion):
        """Add a consumer whose end `read` does not record. Start it inside `read`, which orders it after producers."""
        with self._lock:
            self._require_readable()
            self.used.add(completion)
            self.state = "sealed"

    def release(self) -> Fence:
        """End the tenancy without issuing a wait. Returns the gate of the next one. May be repeated.

        Raises LeaseError while a block is open, or if the storage has been resized since it was leased.
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
            if not self._passed:
                gate.update(self.gate)  # no stream has waited for it here, so the next tenant has to
            gate.update(self.filled)
            gate.update(self.used)
            self.gate = gate
            return gate

    def _require(self, holds: bool, verb: str):
        if not holds:
            raise LeaseError(f"{self.name}: {verb} while {self.state}{_HINTS[verb, self.state]}")

    def _require_readable(self):
        self._require(self.state != "released", "read")
        if self._writing:
            raise LeaseError(f"{self.name}: read while a write block is open; leave it first")

    def _begin_write(self, stream, ordered):
        self._require(self.state == "filling", "written")
        if ordered and self._writing:
            raise LeaseError(f"{self.name}: an ordered write while another write block is open; leave it first")
        if stream not in self._writers:
            self.gate.wait(stream)
            self._writers.append(stream)
            self._passed = True
        if ordered:
            self.filled.wait(stream)
        self._writing += 1

    def _end_write(self, stream):
        self._writing -= 1
        self.filled.record(stream)

    def _begin_read(self, stream, ordered):
        self._require_readable()
        if self.filled:
            self.filled.wait(stream)
        else:
            self.gate.wait(stream)
            self._passed = True
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


def _device_module(tensor, name: str):
    if tensor is None:
        raise LeaseError(f"{name}: neither a tensor nor dev=; pass dev=torch.cuda, or whatever has the streams")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: the tensor is {tensor.layout}, without one storage to lease; lease its parts")
    return torch.get_device_module(tensor.device)


class _Block:
    """The context that `write` and `read` return; its exit records an event, right after the last launch."""

    __slots__ = ("_lease", "_begin", "_end", "_stream", "_ordered")

    def __init__(self, lease, begin, end, stream, ordered=False):
        self._lease, self._begin, self._end, self._stream, self._ordered = lease, begin, end, stream, ordered

    def __enter__(self):
        lease = self._lease
        if self._stream is None:
            self._stream = current_stream(lease.dev)
        else:
            check_stream(f"{lease.name}: stream", self._stream)
        with lease._lock:
            self._begin(lease, self._stream, self._ordered)
        return lease.tensor

    def __exit__(self, *exception):
        lease = self._lease
        with lease._lock:
            self._end(lease, self._stream)


class Slot:
    """A long-lived buffer that is leased repeatedly, to one tenant at a time. Threads may share it.

    tensor: the buffer, as an alias of its storage.
    """

    def __init__(self, tensor: torch.Tensor | None = None, *, dev=None, name: str | None = None):
        self.name = name or "slot"
        check_type(f"{self.name}: tensor", tensor, torch.Tensor | None, "a tensor")
        self.dev = dev if dev is not None else _device_module(tensor, self.name)
        check_dev(self.name, self.dev)
        self.tensor = None if tensor is None else tensor.detach()
        self.home = current_stream(self.dev)
        self.lease: Lease | None = None
        self._first_gate = Fence(self.dev)
        self._lock = threading.RLock()

    @property
    def gate(self) -> Fence:
        """The fence that the next tenant waits for, or the open lease's gate. A peer's credit may be added."""
        return self._first_gate if self.lease is None else self.lease.gate

    def acquire(self) -> Lease:
        """Begin the next tenancy. Raises LeaseError while the last one has not been released."""
        with self._lock:
            self._require_released("acquired")
            self.lease = Lease(self.tensor, dev=self.dev, home=self.home, gate=self.gate, name=self.name)
            return self.lease

    def release(self, lease: Lease):
        """End the slot's tenancy. Raises LeaseError for a lease that is not the current one."""
        check_type(f"{self.name}: lease", lease, Lease, "what acquire has returned")
        with self._lock:
            if lease is not self.lease:
                raise LeaseError(f"{self.name}: a stale lease was released; the slot has had another tenant since")
            lease.release()

    def join(self, stream=None):
        """Order `stream` (None: the current one) after all work of the last tenancy, and clear the gate."""
        stream = current_stream(self.dev) if stream is None else stream
        check_stream(f"{self.name}: stream", stream)
        with self._lock:
            self._require_released("joined")
            self.gate.wait(stream)
            self.gate.clear()

    def _require_released(self, verb: str):
        if self.lease is not None and not self.lease.released:
            raise LeaseError(f"{self.name}: {verb} while its last lease is {self.lease.state}; release it first")

    def forget(self):
        """Be as if it had never been used, after a capture that failed."""
        self.lease, self._first_gate = None, Fence(self.dev)


class Keepalive:
    """Holds storage until its home stream is ordered after every use, then returns it to its allocator.

    The caching allocator reuses a freed block at once on the stream that allocated it: dropping the last reference any
    earlier gives away memory that another stream still reads.
    """

    def __init__(self):
        self._deferred = deque()
        self._lock = threading.RLock()

    def __len__(self):
        return len(self._deferred)

    @property
    def storages(self) -> list[int]:
        """The addresses of torch's storages that are held, one for each lease; see `num_holders`."""
        return [held.untyped_storage()._cdata for _, _, held in self._deferred if held is not None]

    def defer(self, lease: Lease):
        """End `lease` but hold its storage. Issues no wait.

        Raises LeaseError for a lease that was already released, since it no longer holds its storage.
        """
        check_type("Keepalive.defer: lease", lease, Lease, "a Lease")
        with lease._lock:
            if lease.released:
                raise LeaseError(f"{lease.name}: deferred after its release, which gave its storage up; defer instead")
            held = lease.tensor
            gate = lease.release()
        with self._lock:
            self._deferred.append((gate, lease.home, held))

    def drain(self, keep: int = 0):
        """Let go of all but the newest `keep`, each after its home stream has been made to wait for every use."""
        whole("Keepalive.drain: keep", keep)
        with self._lock:
            while len(self._deferred) > keep:
                gate, home, _ = self._deferred[0]
                gate.wait(home)  # it may raise under capture; the storage then stays held
                self._deferred.popleft()

    def collect(self):
        """Let go of the oldest ones whose uses have already finished, without any wait."""
        with self._lock:
            while self._deferred and self._deferred[0][0].query():
                self._deferred.popleft()


def num_holders(storage: int) -> int:
    """How many tensors hold the storage at this address (`UntypedStorage._cdata`)."""
    return torch._C._storage_Use_Count(storage) - _PYTHONS_OWN


# Asking for the address makes a Python object, which may hold the storage too: torch's versions differ.
_alone = torch.empty(1)
_PYTHONS_OWN = torch._C._storage_Use_Count(_alone.untyped_storage()._cdata) - 1
