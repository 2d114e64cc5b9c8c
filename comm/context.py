"""Context: the symmetric memory and state that the ranks of one group share, from `init` to `finalize`."""

import contextlib
import functools
import numbers
import time
import warnings
import weakref

import numpy
import torch
import torch.distributed as dist

from tkernels.comm import capture, interpreter, runtime, stream_order
from tkernels.comm.arguments import check_type, switch
from tkernels.comm.calls import CALL_BITS, Call, Turn, difference
from tkernels.comm.device import (
    BEGUN,
    CLOCK,
    FAULT_FIELDS,
    FAULT_RECORD,
    FAULTS,
    HOST_FLAG,
    OFFSETS,
    OP_OVERLAP,
    OVERLAP,
    RANK,
    SIZE,
    TIMEOUT_NS,
    TRANSPORTS,
    operation_name,
    overlap_kernel,
)
from tkernels.comm.errors import Fault, MismatchError, OutOfStepError, TkernelsError, WaitTimeoutError
from tkernels.comm.group import Group
from tkernels.comm.heap import SymmetricHeap
from tkernels.comm.plans import Launch, describe, local_plans
from tkernels.comm.workspace import Workspace, most_lamport_bytes

DEFAULT_HEAP_BYTES = {"simulated": 256 << 20, "nvshmem": 2 << 30}
MAX_CONSTANTS = 1024
INIT, FINALIZE = "init()", "finalize() of "  # calls in which ranks may meet out of step
OPTION_TYPES = (
    ("transport", str, "a name"),
    ("timeout_s", numbers.Real, "a number"),
    ("num_programs", numbers.Integral, "an integer"),
    ("heap_bytes", numbers.Integral, "an integer"),
    ("compare_calls", numbers.Integral, "True or False"),  # 0 and 1 too
)
AFRESH = "The context can't be used any more; finalize() it and init() a new one"
NAMES_LIMIT_S = 10.0  # once two ranks' calls have differed, for a rank to say which was its own
MAX_TIMEOUT_S = 1e9  # kernels count nanoseconds in 64 bits

_contexts: dict[str, "Context"] = {}
_abandoned: list["Context"] = []
_warned = False  # whether `init` has warned that GPUs are left out
_number = 0  # of the latest context; higher than on any of its ranks before


def init(
    group: dist.ProcessGroup | None = None,
    *,
    heap_bytes: int | None = None,
    transport: str = "auto",
    timeout_s: float = 60.0,
    num_programs: int | None = None,
    default: bool = True,
    compare_calls: bool | None = None,
) -> "Context":
    """Collective over `group`. Creates its ranks' symmetric memory and workspaces, as the new default context.

    group: any torch process group; None is the default group, or this process alone without torch.distributed. On the
        nvshmem runtime all ranks of the default group must make the first init of a process, each for its own group.
    heap_bytes: symmetric memory per rank, for workspaces and `Context.empty`. Default: 256 MiB simulated, 2 GiB on
        GPUs. On GPUs it comes out of a pool of TKERNELS_POOL_BYTES (8 GiB by default), which the first init of a
        process allocates and never frees.
    transport: "simulated", "peer", "nvshmem", or "auto" for the preferred one that reaches every rank.
    timeout_s: how long a wait for a peer's signal may take before every rank raises WaitTimeoutError. Time that a peer
        spends compiling its kernel counts.
    num_programs: programs of a persistent kernel. Default: the number of the GPU's SMs, or 4 simulated. With fewer, so
        that all contexts' operations fit on the GPU at once, they may run at the same time (see stream_order.py).
    default: False leaves an existing default context in place: for a library's own context.
    compare_calls: for debugging: ranks meet on the host in every call of an operation, unless it is captured. If their
        calls differ, or one is missing for timeout_s, they raise before anything is sent, with the lines of the
        program, and can go on. Without it, and in calls of the adapters to other libraries, kernels compare the calls
        (tkernels.comm.calls). None: whether the environment has TKERNELS_COMPARE_CALLS=1.

    Raises ValueError for a transport that can't be used here, MismatchError if the ranks' options differ. Warns once,
    on rank 0, if the simulated runtime was chosen automatically although there are GPUs.
    """
    global _warned
    ctx = Context(group, heap_bytes, transport, timeout_s, num_programs, default, compare_calls)
    if ctx.rank == 0 and not _warned and (reason := runtime.gpus_left_out()):
        _warned = True
        warnings.warn(
            f"init: kernels run in Triton's interpreter on the CPU, and the GPUs are left out: {reason}; "
            f"TKERNELS_RUNTIME=simulated asks for that",
            stacklevel=2,
        )
    return ctx


def finalize(ctx: "Context | None" = None):
    """Collective. Free a context's memory; None is the default context. Raises what `Context.finalize` does."""
    as_context(ctx).finalize()


def current_context() -> "Context":
    """The default context: the newest open one from `init(default=True)`, else the oldest from `init(default=False)`.

    Raises TkernelsError if no context is open.
    """
    if not _contexts:
        raise TkernelsError("no context: call tkernels.init() on every rank first, or pass ctx=...")
    return next(reversed(_contexts.values()))


def as_context(ctx: "Context | None") -> "Context":
    """Resolve a `ctx` argument: a Context is returned as is, None gives the current one. Raises TypeError otherwise."""
    if ctx is None:
        return current_context()
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx: takes a Context, as tkernels.init(group) makes one, not {type(ctx).__name__}")
    return ctx


def open_contexts(group: Group | None = None) -> list["Context"]:
    """The contexts that are neither finalized nor abandoned, the default one last.

    group: only those over the same ranks as this group; None for all.
    """
    every = _contexts.values()
    return [each for each in every if group is None or each.group.global_ranks == group.global_ranks]


def programs_at_once() -> int:
    """The most programs that may wait for peers at once: an operation of each context on each of its streams."""
    return sum(each.num_programs * len(each._workspaces) for each in open_contexts() if each.size > 1)


def find_context(name: str) -> "Context":
    """The open context of that name; torch operators carry names, since an operator's arguments are plain values."""
    if name not in _contexts:
        raise TkernelsError(
            f"context {name!r} is not open: it has been finalized, or left by an exception; open contexts: "
            f"{', '.join(_contexts) or 'none'}"
        )
    return _contexts[name]


class Context:
    """One group's symmetric heap, its signal workspaces, and the table that kernels address peers with.

    Attributes: group, rank, size, device, transport, timeout_s, num_programs, heap, name. For kernels: table, int64 on
        the device, an argument of the device verbs, and transport_id, the constant of the transport. reported: whether
        a failure has already been raised.
    """

    @capture.lasting()
    def __init__(self, group, heap_bytes, transport, timeout_s, num_programs, default=True, compare_calls=None):
        self.group = Group(group)
        self.rank, self.size = self.group.rank, self.group.size
        interpreter.set_rank(self.group.global_ranks[self.rank])  # random delays differ from rank to rank
        self.device = runtime.device()
        self.runtime = runtime.RUNTIME
        try:
            options = {
                "transport": transport,
                "timeout_s": timeout_s,
                "num_programs": _default(num_programs, runtime.default_programs()),
                "heap_bytes": _default(heap_bytes, DEFAULT_HEAP_BYTES[self.runtime]),
                "runtime": self.runtime,
                "compare_calls": switch("TKERNELS_COMPARE_CALLS") if compare_calls is None else compare_calls,
            }
            for name, kind, words in OPTION_TYPES:
                check_type(f"init: {name}", options[name], kind, words)
        except (TypeError, ValueError) as error:
            options = error  # for all ranks to raise
        asked, in_use = zip(*_meet(self.group, INIT, options), strict=True)
        self._check_options(asked)
        self._give_back_abandoned(set().union(*in_use))
        self.name = self.group.name = self._agree_on_name()
        self.timeout_s, self.num_programs = timeout_s, int(options["num_programs"])
        self._compares_calls = bool(options["compare_calls"])
        self.group.limit_s = timeout_s if self._compares_calls else None
        # Operations on a workspace take it; one rank alone has no order of calls to keep.
        self.turn = Turn(self._refuse_overlap) if self.size > 1 else contextlib.nullcontext()
        self._workspaces: dict[int, Workspace] = {}
        self._lender = self._borrower = None  # streams: the borrower was captured with the lender's workspace
        self._constants = {}
        self._calls = weakref.WeakValueDictionary()  # of prepared launches, by number
        self._mismatch = None  # the error's message, once two ranks' calls have differed
        self.recorder = None  # while a trace is made: allocates space for the marks of a launch's programs

        self.heap = SymmetricHeap(self.group, int(options["heap_bytes"]), runtime.open_segment)
        try:
            self._prepare(transport)
        except BaseException:
            self.heap.close()
            raise
        if default:
            _contexts[self.name] = self
        else:  # the last entry of this dictionary is the default, so this one goes first
            others = dict(_contexts)
            _contexts.clear()
            _contexts.update({self.name: self, **others})
        local_plans.clear()  # they depend on the default context's tuning records

    def _prepare(self, transport: str):
        """Collective. Set up everything that kernels need besides the heap."""
        self.lamport_bytes = most_lamport_bytes(self.heap.num_bytes)  # the most that a call receives as packets to sum
        reachable = self.group.gather(runtime.transports(self.heap.segment))
        usable = [name for name in reachable[0] if all(name in others for others in reachable)]
        self.transport = usable[0] if transport == "auto" else transport
        if self.transport not in usable:
            raise ValueError(
                f"init: transport={transport!r} can't reach every rank on the {self.runtime} runtime; "
                f"usable: {', '.join(usable)}"
            )
        self.transport_id = TRANSPORTS[self.transport]
        self.mapped = usable[0] != "nvshmem"  # whether every rank's memory is mapped in every rank's address space

        words = FAULT_RECORD.value * (1 + self.size)
        self._faults = self.heap.empty(words, dtype=torch.int64)
        with self.group.together("init: this context's own memory could not be made", "Is the device's memory full?"):
            self._allocate()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()

    def _allocate(self):
        """Memory of this rank alone, and what kernels read of it."""
        self._faults.zero_()
        self._clock = torch.zeros(1, dtype=torch.int64, device=self.device)
        pinned = self.device.type == "cuda"
        self._host_flag = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._side_stream = torch.cuda.Stream() if pinned else None
        # Readable without waiting for the device: whether a wait of this rank timed out.
        self._flag = (self._host_flag if pinned else self._faults).numpy()
        stream_of = torch._C._cuda_getCurrentRawStream if pinned else int
        self.current_stream = functools.partial(stream_of, self.device.index or 0)
        self.reported = False
        self._interruption = None  # why this rank is out of step: a kernel that ended early, calls that overlapped
        self.table = self.make_table()

    def _check_options(self, asked: tuple[dict | Exception, ...]):
        """Raise the same error on every rank for options that differ (listed by rank) or are invalid."""
        if wrong := [options for options in asked if isinstance(options, Exception)]:
            raise wrong[0]
        options = asked[0]
        differing = {name: [theirs[name] for theirs in asked] for name in options if len({o[name] for o in asked}) > 1}
        if differing:
            by_rank = "; ".join(f"{name} by rank: {', '.join(map(str, values))}" for name, values in differing.items())
            raise MismatchError(f"init: the ranks' options differ, in {by_rank}; all must pass the same")
        for name in ("timeout_s", "num_programs", "heap_bytes"):
            if not options[name] > 0:
                raise ValueError(f"init: {name}={options[name]} must be positive")
        if options["timeout_s"] > MAX_TIMEOUT_S:
            raise ValueError(f"init: timeout_s={options['timeout_s']} must be at most {MAX_TIMEOUT_S:g}, or 30 years")
        if options["transport"] not in ("auto", *TRANSPORTS):
            raise ValueError(f"init: transport={options['transport']!r} is unknown; use auto, {', '.join(TRANSPORTS)}")

    def _agree_on_name(self) -> str:
        """Collective. A unique name, the same on all ranks."""
        global _number
        _number = max(self.group.gather(_number)) + 1
        return f"context{_number}"

    def _give_back_abandoned(self, in_use: set[str]):
        """Free the contexts over this group that this rank has abandoned and that no rank may still use."""
        for each in [each for each in _abandoned if each.group.global_ranks == self.group.global_ranks]:
            if each.name not in in_use:
                _abandoned.remove(each)
                if each.closed:  # everything but its memory is freed already
                    each.heap.close()
                    continue
                try:
                    each._give_back()
                except TkernelsError as error:
                    warnings.warn(f"{each.name}, which was dropped without finalize(): {error}", stacklevel=4)

    def make_table(self, begun: torch.Tensor | None = None) -> torch.Tensor:
        """What kernels find peers, limits and fault records by. begun: of the workspace whose table it is."""
        segment = self.heap.segment
        head = [0] * OFFSETS.value
        head[RANK.value], head[SIZE.value] = self.rank, self.size
        head[TIMEOUT_NS.value] = int(self.timeout_s * 1e9)
        head[FAULTS.value] = self._faults.data_ptr()
        head[HOST_FLAG.value] = self._host_flag.data_ptr()
        head[CLOCK.value] = self._clock.data_ptr()
        head[BEGUN.value] = 0 if begun is None else begun.data_ptr()
        mine = segment.bases[self.rank]
        offsets = [base and base - mine for base in (*segment.bases, *segment.symmetric_bases)]
        words = [*head, *offsets, *segment.pes]
        with capture.beside(), capture.lasting():
            return torch.tensor(words, dtype=torch.int64, device="cpu").to(self.device)

    def __repr__(self):
        return f"Context({self.name}: rank {self.rank} of {self.size}, {self.runtime} runtime, {self.transport})"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or self.size == 1:
            self.finalize()
        else:  # other ranks may not have raised, and finalize() would wait for them
            self.abandon()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Collective. An uninitialised tensor in symmetric memory; allocated until `free`, even if it is dropped.

        See `SymmetricHeap.empty`.
        """
        return self.heap.empty(*shape, dtype=dtype)

    def free(self, tensor: torch.Tensor):
        """Free a tensor of `empty`; all ranks, in the same order."""
        self.heap.free(tensor)

    def workspace(self) -> Workspace:
        """The current stream's workspace, created at first use; all ranks must create them in the same order.

        A CUDA graph is usually captured on a separate stream. Under capture, a stream without a workspace borrows the
        workspace of the default stream, or the only one there is: that stream made the calls before, and will replay
        the graph. Another stream in the same capture gets its own workspace, since the two may run at the same time. So
        does the lender, which the capture may reach last.

        Orders the stream behind this process's latest operation on another one (tkernels.comm.stream_order).
        """
        stream = self.current_stream()
        workspace = self._workspace_of(stream)
        if stream != stream_order.latest and self.size > 1:
            stream_order.follow(stream, programs_at_once())
        return workspace

    def _workspace_of(self, stream: int) -> Workspace:
        if stream not in self._workspaces:
            if self._workspaces and self.capturing and self._lends(stream):
                return self._workspaces[self._lender]
            self._workspaces[stream] = Workspace(self)
        elif stream and stream == self._lender and self._lent():  # the default stream can't be captured
            self._workspaces[self._borrower] = self._workspaces[stream]
            self._workspaces[stream] = Workspace(self)
        return self._workspaces[stream]

    def _lent(self) -> bool:
        """Whether the capture that has reached the lender's stream uses the lender's workspace already."""
        return self._borrower not in self._workspaces and self.capturing and capture.taken(self._borrower)

    def _lends(self, borrower: int) -> bool:
        """Whether a captured stream without a workspace may borrow that of `_lender`, which is determined here."""
        if borrower == self._borrower and (self._lender == 0 or 0 not in self._workspaces):
            return not capture.taken(self._lender)
        lender = 0 if 0 in self._workspaces else next(iter(self._workspaces))
        another = borrower != self._borrower and capture.taken(self._borrower)
        if (lender and len(self._workspaces) > 1) or capture.taken(lender) or another:
            return False
        self._lender, self._borrower = lender, borrower
        return True

    def constant(self, key, make) -> torch.Tensor:
        """A small integer tensor on the device, made from `make()` once for each `key`: schedules and offsets.

        Beyond MAX_CONSTANTS the oldest is evicted, since row counts may never repeat; plans keep the constants that
        they use.
        """
        if key not in self._constants:
            if len(self._constants) >= MAX_CONSTANTS:
                del self._constants[next(iter(self._constants))]
            with capture.beside(), capture.lasting():
                self._constants[key] = torch.tensor(make(), dtype=torch.int64, device="cpu").to(self.device)
        return self._constants[key]

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self.device.type == "cuda" and capture.underway()

    def launch(self, kernel, num_programs: int, *arguments, **options):
        """Run a kernel of `num_programs` programs, all resident at once, so that they may wait for each other.

        Asynchronous on a GPU: raises WaitTimeoutError only for an earlier wait that is known to have timed out;
        simulated, also for a wait of this launch. `check` waits for the device and detects all of them. Raises
        ValueError, or CUDA's error for a cooperative launch, if the programs can't all be resident.
        """
        self.bind(kernel, num_programs, *arguments, **options)()

    def bind(self, kernel, num_programs: int, *arguments, varying: tuple[str, ...] = (), **options) -> Launch:
        """Prepare a launch to be repeated, with other tensors for the parameters that `varying` names; see `Launch`."""
        if self.transport == "nvshmem":
            from tkernels.comm.nvshmem_runtime import device_library

            options["extern_libs"] = {"libnvshmem_device": device_library()}
        if self.runtime == "nvshmem":
            # Programs wait for each other, so all must be resident at once: a cooperative launch fails otherwise.
            options["launch_cooperative_grid"] = True
        elif num_programs > interpreter.resident():
            raise ValueError(
                f"{num_programs} programs wait for each other, but the interpreter runs {interpreter.resident()} at "
                f"once; pass init(num_programs=...) of no more, or set TKERNELS_RESIDENT"
            )
        return Launch(kernel, num_programs, arguments, varying, self, **options)

    def bind_call(self, kernel, num_programs: int, *arguments, **options) -> Launch:
        """`bind`, for a kernel that compares calls: its argument `call` is the number of the call in progress."""
        call = Call.of(*(self.group.described() or (kernel.__name__, {})))
        launch = self.bind(kernel, num_programs, *arguments, call=call.number, **options)
        launch.call = self._calls.setdefault(call.number, call)
        return launch

    def plan(self, prepare, tensors: tuple[torch.Tensor | None, ...], *options):
        """The plan for this call on the current stream, made by `prepare(self, *tensors, *options)` unless cached.

        Calls share a plan if their options are equal and their tensors agree in everything that `describe` returns.
        """

        def make():
            with self._call(prepare, tensors, options):
                return prepare(self, *tensors, *options)

        plan = self.workspace().plan((prepare, *map(describe, tensors), *options), make)
        if self._compares_calls and not self.capturing:
            with self._call(prepare, tensors, options):
                self.group.gather(None)
        return plan

    def call(self, prepare, tensors: tuple[torch.Tensor | None, ...], *options):
        """One call of an operation: the result of its `plan` for these tensors.

        Raises TkernelsError if a call of another thread has begun and not returned. As other ranks may have made both
        calls, the context can't be used any more then, here or on any rank.
        """
        with self.turn:
            return self.plan(prepare, tensors, *options)(*tensors)

    def _refuse_overlap(self, comes: str, inside: str):
        self._interruption = (
            f"{comes}: {inside} has not returned. Calls of one context must not overlap, since each rank would order "
            f"them in its own way. Make them from one thread, or give each thread a context over a process group of "
            f"its own: init(torch.distributed.new_group(...))"
        )
        if not (self._flag[0] or self.capturing):
            # On a stream of its own, as the other call's kernel may wait for a peer; it ends its wait and the peers'.
            side = contextlib.nullcontext() if self._side_stream is None else torch.cuda.stream(self._side_stream)
            with side:
                # Not by `launch`, whose programs start together: this one need not fit beside the other's kernel.
                overlap_kernel[(1,)](self.table, self.rank, OPERATION=OP_OVERLAP, num_warps=1)
        self._flag[0], self.reported = 1, True
        self.check()

    def _call(self, prepare, tensors, options):
        return self.group.during(lambda: prepare.alike(self, *tensors, *options))

    def forget_plans(self, *which):
        """Discard cached plans, so that later calls follow a new choice of configurations.

        which: forget only plans for which this function is true.
        """
        for workspace in self._workspaces.values():
            workspace.forget_plans(*which)

    def refuse_after_fault(self):
        """Raise what `check` does if a failure of this rank is known. Costs next to nothing."""
        if self._flag[0]:
            if self.capturing:
                raise TkernelsError(
                    "a wait of this context expired before this CUDA graph's capture; call check() outside of it to "
                    "see who waited for whom, then finalize() the context"
                )
            self.check()

    @property
    def failed(self) -> bool:
        """Whether `check` would raise: for a failure of this rank or one that a peer reported, or once it is closed.

        On a GPU it reads a word of device memory on a separate stream, so it waits for no kernel.
        """
        if self._flag[0] or self.device.type == "cpu" or self.capturing:
            return bool(self._flag[0])
        with torch.cuda.stream(self._side_stream):
            return bool(self._faults[0].item())

    def check(self):
        """Raise WaitTimeoutError if a wait timed out on this rank or on a peer that reported it. Waits for the device.

        Raises MismatchError if two ranks' calls differed, and TkernelsError once the context is closed, or if a kernel
        of this rank was interrupted.
        """
        if self.closed:
            raise TkernelsError(f"{self.name} has been finalized; init() a new one")
        if self._interruption:
            raise TkernelsError(f"{self._interruption}. {AFRESH}")
        deadline = time.monotonic() + 5.0  # a flag is set shortly before its record is complete
        while True:
            words = self._faults.cpu().view(-1, FAULT_RECORD.value)
            if not words[0, 0]:
                return
            written = [record for record in words[1:].tolist() if record[0]]
            if written or time.monotonic() > deadline:
                break
        self._host_flag.fill_(1)  # later launches raise
        self.reported = True
        if not written:
            raise TkernelsError("a wait on a signal expired, but its record was lost; finalize() this context")
        fields = dict(zip(FAULT_FIELDS[1:], written[0][1:], strict=False))
        fields["operation"] = operation_name(fields["operation"])
        calls = fields.pop("calls")
        if calls == OVERLAP.value:
            raise TkernelsError(
                f"two threads of rank {fields['rank']} made calls of one context that overlapped, as the error there "
                f"says. {AFRESH}"
            )
        if calls:
            numbers = divmod(calls, 1 << CALL_BITS)
            raise MismatchError(self._name_calls(dict(zip((fields["rank"], fields["peer"]), numbers, strict=True))))
        ranks = self.group.global_ranks
        raise WaitTimeoutError(Fault(**fields), self.timeout_s, None if ranks == list(range(self.size)) else ranks)

    def _name_calls(self, numbers: dict[int, int]) -> str:
        """What the calls of two ranks differ in: {rank: number}. The ranks tell each other; not a meeting."""
        if self._mismatch is None:
            own = self._calls.get(numbers.get(self.rank))
            first, second = sorted(numbers)
            told = self.group.tell(f"{self.name}/call", own and own.to_json(), (first, second), NAMES_LIMIT_S)
            call, other = (text and Call.from_json(text) for text in told)
            self._mismatch = f"{difference(first, call, second, other)}. {AFRESH}"
        return self._mismatch

    def interrupt(self, error: BaseException):
        """Make later calls raise: `error` ended a kernel of this rank before its end."""
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._interruption = f"a kernel of {self.name} was interrupted by {cause}, so its epochs are out of step"
        self._flag[0], self.reported = 1, True

    def barrier(self):
        """Collective, on the current stream: later work starts after all ranks' earlier work on their streams."""
        from tkernels.comm.collectives import barrier

        barrier(self)

    def finalize(self):
        """Collective. Free the memory; the context and its tensors must not be used any more. May be repeated.

        After a failure that `check` raises it does not meet the other ranks, which may be gone or may still write here:
        the next `init` over the same ranks frees the memory. Raises such a failure, at the end, if it has not been
        raised yet; OutOfStepError if another rank makes another call and goes on to use the context.
        """
        if _contexts.pop(self.name, None) is None:
            return
        local_plans.clear()
        failed = self.failed
        if not failed:
            try:
                _meet(self.group, FINALIZE + self.name)
            except TkernelsError:  # out of step; torch.distributed shut down; another thread in a meeting
                _abandoned.append(self)
                raise
        self._give_back(keep_heap=failed)

    @property
    def closed(self) -> bool:
        """Whether it has been finalized, or was abandoned and then freed."""
        return self.group.closed

    def abandon(self):
        """Leave it to an `init` over the same group, which frees it once all ranks have abandoned it.

        Not collective: for use in garbage collection, which runs at another time on each rank, and under captures too.
        """
        if _contexts.pop(self.name, None) is not None:
            _abandoned.append(self)

    def give_back(self):
        """Free the memory without a meeting: for ranks that know that none of them uses the context any more."""
        if _contexts.pop(self.name, None) is not None:
            local_plans.clear()
            self._give_back()

    def _give_back(self, keep_heap: bool = False):
        reported, error = self.reported, None
        try:
            self.check()
        except TkernelsError as caught:
            error = caught
        self._workspaces.clear()
        self._constants.clear()
        self.turn = contextlib.nullcontext()  # it refers back here, and a cycle would hold the memory for a while
        self._flag = numpy.ones(1, dtype=numpy.int64)  # launches read it, and its memory is about to be freed
        if keep_heap:
            _abandoned.append(self)
        else:
            self.heap.close()
        self.group.close()
        if error is not None and not reported:
            raise error


def _meet(group: Group, call: str, value=None) -> list | None:
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


def _default(value, default):
    return default if value is None else value
