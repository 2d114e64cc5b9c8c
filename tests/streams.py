"""Simulated GPU streams: finds every race in one trace of queued kernels, whatever the timing would have been.

    sim = Simulator()
    with sim:                                  # torch ops on CPU tensors become kernels on sim.current_stream()
        comm = sim.Stream("comm")
        bucket = torch.ones(1024)
        with sim.stream(comm):
            total = bucket.sum()               # nothing orders comm behind the stream that filled the bucket
    sim.check()                                # raises Race: "'ones' on main writes ... 'sum' on comm reads ..."
    sim.run(starve=["main"])                   # executes; `total` now holds what the race makes of it

The simulator can be the `dev` of a lease: it has `current_stream()`, `stream(s)`, and streams with `record_event()` and
`wait_event(event)`. Streams are FIFO queues. Inside `with sim`, views and other metadata operations happen at once, and
every operation that touches values is queued. The host never sees a value before `run`, so `.item()` raises there;
`tolist()`, which can't be intercepted, reads stale memory. Backward and its hooks run on the stream that is current
where `backward()` is called; autograd's own rule, a node's backward on the stream of its forward, is not simulated.

A race is a pair of kernels that touch the same bytes, at least one of them writing, with no path of stream order,
events and signals from one to the other. Races are found from the queues alone, with vector clocks. `run` executes
adversarially: a starved stream moves only when no other can, so that a race also shows as a wrong value.

Memory behaves as in CUDA's caching allocator: a block belongs to the stream that was current when it was allocated,
and is handed out again on that stream as soon as the host drops its last reference, even if another stream still has
to read it. Fresh memory is NaN.

One simulator can hold several ranks: each has its own streams, and a `signal` models what one rank sends to another.
"""

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
import torch._meta_registrations  # shapes of the operators that C++ alone can't infer
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

PAGE_BYTES = 4096
GRANULE_BYTES = 512  # blocks are rounded up to it, as CUDA's allocator does


class Race(AssertionError):
    """Two kernels touch the same bytes, at least one of them writing, and nothing orders one before the other.

    first, second: the accesses, in the order in which they were launched.
    """

    def __init__(self, first: "Access", second: "Access", span: tuple[int, int]):
        self.first, self.second, self.bytes = first, second, span
        super().__init__(
            f"{first} and {second} bytes {span[0]}..{span[1]} of {first.memory}, and nothing orders "
            f"{second.stream.name} behind {first.stream.name} in between"
        )

    @property
    def kernels(self) -> tuple[str, str]:
        return self.first.kernel, self.second.kernel

    @property
    def streams(self) -> tuple[str, str]:
        return self.first.stream.name, self.second.stream.name

    @property
    def modes(self) -> str:
        """`rw` if the first reads and the second writes; also `wr` and `ww`."""
        return self.first.mode + self.second.mode


class Deadlock(RuntimeError):
    """Streams wait for values that no queued operation will set."""


class HostRead(RuntimeError):
    """The host asked for a value or a completion that it would have to block for on a GPU."""


@dataclass(eq=False, frozen=True)
class Access:
    """One kernel's access to one tensor: mode "r" or "w"; runs are [start, end) addresses, ascending."""

    kernel: str
    index: int
    stream: "SimulatedStream"
    mode: str
    runs: tuple[tuple[int, int], ...]
    base: int
    memory: str

    def __str__(self):
        return f"{self.kernel!r} on {self.stream.name} {'writes' if self.mode == 'w' else 'reads'}"

    def pages(self) -> range:
        """The pages under which it is filed, so that it is compared only with accesses to the same pages."""
        return range(self.runs[0][0] // PAGE_BYTES, (self.runs[-1][1] - 1) // PAGE_BYTES + 1)

    def overlap(self, other: "Access") -> tuple[int, int] | None:
        """The first range of bytes that both touch, relative to the start of the memory; None if there is none."""
        if self.runs[0][0] >= other.runs[-1][1] or other.runs[0][0] >= self.runs[-1][1]:
            return None
        mine, theirs = iter(self.runs), iter(other.runs)
        a, b = next(mine), next(theirs)
        while a and b:
            if max(a[0], b[0]) < min(a[1], b[1]):
                return max(a[0], b[0]) - self.base, min(a[1], b[1]) - self.base
            if a[1] <= b[1]:
                a = next(mine, None)
            else:
                b = next(theirs, None)
        return None


@dataclass(eq=False)
class Signal:
    """A number that only grows: one stream sets it, others wait until it is large enough. Events are built on it."""

    sim: "Simulator"
    name: str
    value: int = 0  # as of the operations that `run` has executed
    _reached: list = field(default_factory=list)  # (value, vector clock) of each set that the check has processed

    def set(self, value: int, stream: "SimulatedStream | None" = None):
        """Set it once everything queued on `stream` before has run."""
        (stream or self.sim.current_stream())._enqueue(_Post(self, value))

    def wait(self, value: int, stream: "SimulatedStream | None" = None):
        """Make later work of `stream` wait until it is `value` or more."""
        self.sim.waits += 1
        (stream or self.sim.current_stream())._enqueue(_Await(self, value))

    def at(self, value: int) -> "_Reached":
        """The completion "it is `value` or more", for a fence or a lease."""
        return _Reached(self, value)


@dataclass(frozen=True)
class _Reached:
    signal: Signal
    value: int
    captured = None

    @property
    def key(self):
        return self.signal

    def wait(self, stream):
        self.signal.wait(self.value, stream)

    def query(self) -> bool:
        return self.signal.value >= self.value


class SimulatedEvent:
    """A position in a stream's queue. An event that was never recorded counts as completed."""

    def __init__(self, sim: "Simulator"):
        self._sim, self._signal = sim, None

    def record(self, stream: "SimulatedStream | None" = None):
        stream = stream or self._sim.current_stream()
        self._sim.records += 1
        self._signal = Signal(self._sim, f"an event of {stream.name}")
        self._signal.set(1, stream)

    def wait(self, stream: "SimulatedStream | None" = None):
        (stream or self._sim.current_stream()).wait_event(self)

    def query(self) -> bool:
        return self._signal is None or self._signal.value == 1

    def synchronize(self):
        raise HostRead("the host would block on an event; order a stream behind it with wait_event instead")


class SimulatedStream:
    """A queue of kernels that run in order."""

    def __init__(self, sim: "Simulator", name: str):
        self.sim, self.name = sim, name
        self.pending, self.unchecked = deque(), deque()
        self.clock = {}  # stream -> index of its last kernel that is ordered before this stream's next one

    def __repr__(self):
        return f"Stream({self.name})"

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = SimulatedEvent(self.sim) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: SimulatedEvent):
        if event._signal is not None:
            event._signal.wait(1, self)

    def wait_stream(self, other: "SimulatedStream"):
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return not self.pending

    def synchronize(self):
        raise HostRead(f"the host would block on {self.name}; order a stream behind it with wait_event instead")

    def _enqueue(self, op):
        with self.sim._lock:
            self.pending.append(op)
            self.unchecked.append(op)


@dataclass(eq=False)
class _Kernel:
    name: str
    function: object
    index: int
    accesses: list[Access]

    def checkable(self):
        return True

    def check(self, stream):
        stream.clock[stream] = self.index
        sim, found = stream.sim, {}
        for access in self.accesses:
            for other in itertools.chain.from_iterable(sim._accesses[page] for page in access.pages()):
                if (
                    other.stream is not stream
                    and "w" in (access.mode, other.mode)
                    and other.index > stream.clock.get(other.stream, 0)
                    and other.index not in found
                    and (span := access.overlap(other))
                ):
                    found[other.index] = Race(*sorted((other, access), key=lambda a: a.index), span)
        sim._races.extend(found.values())
        for access in self.accesses:
            for page in access.pages():
                sim._accesses[page].append(access)

    runnable = checkable

    def run(self, stream):
        if self.function is not None:
            self.function()
        stream.sim.log.append(self.name)


@dataclass(eq=False)
class _Post:
    signal: Signal
    value: int

    def checkable(self):
        return True

    def check(self, stream):
        self.signal._reached.append((self.value, dict(stream.clock)))

    runnable = checkable

    def run(self, stream):
        self.signal.value = max(self.signal.value, self.value)


@dataclass(eq=False)
class _Await:
    signal: Signal
    value: int

    def checkable(self):
        return any(value >= self.value for value, _ in self.signal._reached)

    def check(self, stream):
        clock = next(clock for value, clock in self.signal._reached if value >= self.value)
        for other, index in clock.items():
            stream.clock[other] = max(stream.clock.get(other, 0), index)

    def runnable(self):
        return self.signal.value >= self.value

    def run(self, stream):
        pass

    def __str__(self):
        return f"{self.signal.name} to be {self.value} (it is {self.signal.value})"


@dataclass(eq=False)
class _Block:
    """Memory that the simulator never frees, so that an address always identifies one block."""

    memory: torch.Tensor
    name: str
    home: SimulatedStream


class Simulator(TorchDispatchMode):
    """Simulated streams of one or several devices; see the module's docstring.

    waits, records: the waits and event records issued so far.
    log: the names of kernels, in the order in which they ran.
    """

    def __init__(self):
        super().__init__()
        self.waits = self.records = 0
        self.log: list[str] = []
        self._streams: dict[str, SimulatedStream] = {}
        self._blocks: dict[int, _Block] = {}
        self._free = defaultdict(list)  # (home, bytes) -> blocks; the last one freed is reused first
        self._outside = {}  # storages of tensors made outside: kept alive, so that their addresses are not reused
        self._accesses: dict[int, list[Access]] = defaultdict(list)  # by page, since the last run
        self._races: list[Race] = []
        self._indices = itertools.count(1)
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._default = self.Stream("main")

    # Streams, as in torch.cuda

    def Stream(self, name: str | None = None, **_) -> SimulatedStream:
        """A new stream. Options of torch.cuda.Stream, such as its device and priority, change nothing here."""
        if name is None:
            names = map("stream{}".format, itertools.count(len(self._streams)))
            name = next(name for name in names if name not in self._streams)
        if name in self._streams:
            raise ValueError(f"there is a stream {name!r} already; names tell streams apart")
        self._streams[name] = SimulatedStream(self, name)
        return self._streams[name]

    def Event(self, **_) -> SimulatedEvent:
        return SimulatedEvent(self)

    def signal(self, name: str = "a signal") -> Signal:
        return Signal(self, name)

    def default_stream(self) -> SimulatedStream:
        return self._default

    def current_stream(self) -> SimulatedStream:
        return getattr(self._thread, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream | None):
        before = self.current_stream()
        self._thread.stream = stream or before
        try:
            yield
        finally:
            self._thread.stream = before

    def is_current_stream_capturing(self) -> bool:
        return False

    def synchronize(self):
        raise HostRead("the host would block on the device; leave `with sim` and call sim.run()")

    # Kernels

    @contextlib.contextmanager
    def label(self, name: str):
        """Name the kernels launched inside, in the log and in races, instead of using their operators' names."""
        before = getattr(self._thread, "label", None)
        self._thread.label = name
        try:
            yield
        finally:
            self._thread.label = before

    def launch(self, name: str, function=None, *, reads=(), writes=(), stream: SimulatedStream | None = None):
        """Queue a kernel that is not a torch operation: a collective, a put.

        `run` calls `function(*reads, *writes)` with aliases of the tensors, so that it need not hold the tensors
        themselves, which would keep their memory from being reused. None: does nothing.
        """
        stream, index = stream or self.current_stream(), next(self._indices)
        with _disable_current_modes(), torch.inference_mode(False):
            aliases = [self._alias(tensor) for tensor in (*reads, *writes)]
        accesses = [self._access(name, index, stream, "r", tensor) for tensor in reads]
        accesses += [self._access(name, index, stream, "w", tensor) for tensor in writes]
        call = None if function is None else lambda: function(*aliases)
        stream._enqueue(_Kernel(name, call, index, [access for access in accesses if access is not None]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with local tensors
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        if device.type == "meta":
            return func(*args, **kwargs)
        if func.namespace == "c10d" or device.type != "cpu":
            raise RuntimeError(f"{func} on {device}: queue it with sim.launch(name, function, reads=..., writes=...)")
        with self:  # in inference mode, composite operators arrive undecomposed
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        if torch.Tag.data_dependent_output in func.tags:
            raise HostRead(_HOST_READ.format(func))
        returns = func._schema.returns
        values = any(isinstance(r.type.getElementType() if _is_list(r) else r.type, torch.TensorType) for r in returns)
        written = [argument for argument in func._schema.arguments if _is_write(argument)]
        if (returns and not values) or (not written and (func in _VIEWS or any(r.alias_info for r in returns))):
            return func(*args, **kwargs)
        return self._queue(func, args, kwargs, tensors)

    def _queue(self, func, args, kwargs, tensors):
        outputs = self._outputs(func, args, kwargs)
        name = getattr(self._thread, "label", None) or func._schema.name.partition("::")[2]
        results, writes, fresh = [], [], []
        by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        owner = {}
        for argument in func._schema.arguments:
            if _is_write(argument) and by_name.get(argument.name) is not None:
                writes += tree_leaves(by_name[argument.name])
                owner |= dict.fromkeys(argument.alias_info.before_set, by_name[argument.name])
        for result, output in zip(func._schema.returns, outputs, strict=True):
            if result.alias_info is not None:
                results.append(next(owner[a] for a in result.alias_info.before_set))
            else:
                results.append(tree_map(lambda t: self._allocate(t) if isinstance(t, torch.Tensor) else t, output))
                fresh += [leaf for leaf in tree_leaves(results[-1]) if isinstance(leaf, torch.Tensor)]
        reads = [tensor for tensor in tensors if not any(tensor is other for other in writes)]

        if func._schema.name in _ALLOCATIONS:
            if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
                self.launch(name, _poison, writes=fresh)
        else:
            with torch.inference_mode(False):
                alias_args, alias_kwargs = tree_map(
                    lambda t: self._alias(t) if isinstance(t, torch.Tensor) else t, (args, kwargs)
                )
            num_given = len(reads) + len(writes)

            def compute(*aliases):  # holds no tensor of the caller: its memory may be reused before this runs
                values = func(*alias_args, **alias_kwargs)
                values = values if len(func._schema.returns) > 1 else (values,)
                computed = [v for r, v in zip(func._schema.returns, values, strict=False) if r.alias_info is None]
                computed = [leaf for leaf in tree_leaves(computed) if isinstance(leaf, torch.Tensor)]
                for alias, value in zip(aliases[num_given:], computed, strict=True):
                    alias.copy_(value)

            self.launch(name, compute, reads=reads, writes=[*writes, *fresh])
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _outputs(self, func, args, kwargs) -> tuple:
        """The outputs of `func`, as meta tensors. Raises what the call would raise."""

        def meta(value):
            if isinstance(value, torch.Tensor):
                return _meta(value)
            return None if isinstance(value, torch.Generator) else value

        has_device = any(argument.name == "device" for argument in func._schema.arguments)
        args, kwargs = tree_map(meta, (args, kwargs))
        if has_device:
            kwargs |= {"device": "meta"}
        kwargs.pop("pin_memory", None)
        try:
            outputs = func(*args, **kwargs)
        except NotImplementedError as error:
            if torch.Tag.dynamic_output_shape in func.tags:
                raise HostRead(_HOST_READ.format(func)) from error
            if any(result.alias_info is None for result in func._schema.returns):
                raise
            return (None,) * len(func._schema.returns)  # fused optimizers: they return only tensors they were given
        return () if not func._schema.returns else outputs if len(func._schema.returns) > 1 else (outputs,)

    # Memory

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        num_bytes = like.untyped_storage().nbytes()
        result = torch.empty(0, dtype=like.dtype)
        if num_bytes == 0:
            return result.new_empty(like.shape)
        home, size = self.current_stream(), -(-num_bytes // GRANULE_BYTES) * GRANULE_BYTES
        with self._lock:
            free = self._free[home, size]
            if free:
                block = free.pop()
            else:
                memory = torch.full((size,), 0xFF, dtype=torch.uint8)
                block = _Block(memory, f"block {len(self._blocks)}", home)
                self._blocks[memory.data_ptr()] = block
        # Only the storage holds a reference to this array, so it dies when the storage does.
        array = (ctypes.c_char * num_bytes).from_address(block.memory.data_ptr())
        weakref.finalize(array, free.append, block).atexit = False
        storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        return result.set_(storage, like.storage_offset(), like.shape, like.stride())

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same bytes that does not keep the storage of a block alive."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage.data_ptr())
        if block is not None:
            storage = block.memory.untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _access(self, kernel, index, stream, mode, tensor) -> Access | None:
        if tensor.numel() == 0:
            return None
        base = tensor.untyped_storage().data_ptr()
        if base in self._blocks:
            memory = self._blocks[base].name
        else:
            self._outside.setdefault(base, tensor.untyped_storage())
            memory = "a tensor made outside"
        return Access(kernel, index, stream, mode, _runs(tensor), base, memory)

    # Results

    @property
    def races(self) -> list[Race]:
        """Every pair of kernels that race, in the order in which they were found."""
        while (stream := self._next("unchecked", "checkable", ())) is not None:
            stream.unchecked.popleft().check(stream)
        return list(self._races)

    def check(self):
        """Raise the first race, if there is one. Raises Deadlock if a stream waits for a value that is never set."""
        races = self.races
        if races:
            raise races[0] if len(races) == 1 else _with_count(races)
        self._require_empty("unchecked")

    def run(self, starve=()):
        """Execute everything; a stream that `starve` names moves only when no other can. Raises Deadlock.

        It also acts as a device synchronization: work launched later is ordered after all of it.
        """
        self.races  # noqa: B018  # found before the record of accesses is cleared
        starve = {getattr(stream, "name", stream) for stream in starve}
        unknown = starve - set(self._streams)
        if unknown:
            raise ValueError(f"starve={sorted(unknown)}: no such streams; there are {', '.join(self._streams)}")
        with _disable_current_modes(), torch.no_grad():
            while (stream := self._next("pending", "runnable", starve)) is not None:
                stream.pending.popleft().run(stream)
        self._require_empty("pending")
        self._accesses.clear()

    def _next(self, side: str, ready: str, starve) -> SimulatedStream | None:
        queued = ((stream, getattr(stream, side)) for stream in list(self._streams.values()))
        movable = [stream for stream, queue in queued if queue and getattr(queue[0], ready)()]
        return min(movable, key=lambda stream: stream.name in starve, default=None)

    def _require_empty(self, side: str):
        heads = [f"{s.name} waits for {getattr(s, side)[0]}" for s in self._streams.values() if getattr(s, side)]
        if heads:
            raise Deadlock("no stream can move: " + "; ".join(heads))


def subsets(names) -> list[tuple]:
    """All subsets of streams to starve, the empty one and the full one included."""
    names = list(names)
    return [chosen for count in range(len(names) + 1) for chosen in itertools.combinations(names, count)]


_HOST_READ = "{} tells the host something of a value, which does not exist yet: leave `with sim` and run first"
_VIEWS = {torch.ops.aten._unsafe_view.default, torch.ops.aten.lift_fresh.default}
_ALLOCATIONS = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}


def _is_write(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_list(argument) -> bool:
    return isinstance(argument.type, torch.ListType)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _poison(*tensors):
    for tensor in tensors:
        tensor.untyped_storage().fill_(0xFF)


def _runs(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The [start, end) addresses that a tensor touches, ascending; one run if it is dense."""
    starts, run = [tensor.data_ptr()], tensor.element_size()
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.element_size()
        if size == 1 or stride == 0:
            continue
        if step == run and len(starts) == 1:
            run *= size
        else:
            starts = [start + i * step for start in starts for i in range(size)]
    return tuple((start, start + run) for start in sorted(starts))


def _with_count(races: list[Race]) -> Race:
    race = Race(races[0].first, races[0].second, races[0].bytes)
    race.args = (f"{races[0]} ({len(races)} races in all)",)
    return race
