"""Context: what the ranks of one group share. Made by `init`, given back by `finalize`."""

import functools
import numbers
import os
import time
import warnings

import numpy
import torch
import torch.distributed as dist

from tkernels.comm import capture, interpreter, runtime, tuned
from tkernels.comm.device import (
    CLOCK,
    FAULT_FIELDS,
    FAULT_RECORD,
    FAULTS,
    HOST_FLAG,
    OFFSETS,
    RANK,
    SIZE,
    TIMEOUT_NS,
    TRANSPORTS,
    operation_name,
)
from tkernels.comm.errors import Fault, MismatchError, OutOfStepError, TkernelsError, WaitTimeoutError
from tkernels.comm.group import Group
from tkernels.comm.heap import SymmetricHeap
from tkernels.comm.plans import Launch, describe, local_plans
from tkernels.comm.workspace import Workspace, most_lamport_bytes

DEFAULT_HEAP_BYTES = {"simulated": 256 << 20, "nvshmem": 2 << 30}
MAX_CONSTANTS = 1024
INIT, FINALIZE = "init()", "finalize() of "  # where ranks meet that may be out of step
MAX_TIMEOUT_S = 1e9  # kernels count nanoseconds in 64 bits

_contexts: dict[str, "Context"] = {}
_abandoned: list["Context"] = []
_warned = False  # that GPUs are left out
_number = 0  # of the latest context; no rank of a context had a higher one before


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
    """Collective over `group`. Symmetric memory and workspaces for its ranks; the result becomes the default context.

    group: any torch process group; None is the default group, or this process alone without torch.distributed. On the
        nvshmem runtime the first init of a process must be made by all ranks of the default group, each for its group.
    heap_bytes: symmetric memory a rank, for workspaces and `Context.empty`. Default: 256 MiB simulated, 2 GiB on GPUs,
        there out of a pool of TKERNELS_POOL_BYTES, 8 GiB, that the first init of a process takes for good.
    transport: "simulated", "peer", "nvshmem", or "auto" for the preferred one that reaches every rank.
    timeout_s: how long a wait for a peer's signal may take before every rank raises WaitTimeoutError. A peer that has a
        kernel to compile first is waited for meanwhile.
    num_programs: programs of a persistent kernel. Default: the GPU's multiprocessors, or 4 simulated.
    default: False leaves the default context what it is, if there is one: for a library's own context.
    compare_calls: for debugging, have ranks meet on the host in every call of an operation, unless it is captured, and
        raise where their calls or operands differ. Otherwise, and in calls of the adapters to other libraries, only
        where they meet anyway, as in a first call. None: whether the environment has TKERNELS_COMPARE_CALLS=1.

    Raises ValueError for a transport that can't be used here, MismatchError if the ranks' options differ. Warns once,
    on rank 0, where the simulated runtime was taken though there are GPUs, and nobody asked for it.
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
    """Collective. Give a context's memory back; None is the default context. Raises what `Context.finalize` does."""
    as_context(ctx).finalize()


def current_context() -> "Context":
    """The default context: the newest that is open and no `init(default=False)` made; if none is, the first of those.

    Raises TkernelsError if no context is open.
    """
    if not _contexts:
        raise TkernelsError("no context: call tkernels.init() on every rank first, or pass ctx=...")
    return next(reversed(_contexts.values()))


def as_context(ctx: "Context | None") -> "Context":
    """A context as functions take it: itself, or for None the current one. Raises TypeError for anything else."""
    if ctx is None:
        return current_context()
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx: takes a Context, as tkernels.init(group) makes one, not {type(ctx).__name__}")
    return ctx


def open_contexts(group: Group | None = None) -> list["Context"]:
    """Those that have not been finalized, the default one last: all, or those over the ranks of a group."""
    every = _contexts.values()
    return [each for each in every if group is None or each.group.global_ranks == group.global_ranks]


def find_context(name: str) -> "Context":
    """The context of that name; torch operators carry names, since an operator's arguments are plain values."""
    if name not in _contexts:
        raise TkernelsError(
            f"context {name!r} is not open: it has been finalized, or left by an exception; open contexts: "
            f"{', '.join(_contexts) or 'none'}"
        )
    return _contexts[name]


class Context:
    """One group's symmetric heap, its signal workspaces, and the table that kernels address peers with.

    Attributes: group, rank, size, device, transport, timeout_s, num_programs, heap, name. For kernels: table, int64 on
    the device, which verbs take, and transport_id, the constant of the transport. reported: whether `check` has raised
    what failed.
    """

    @capture.lasting()
    def __init__(self, group, heap_bytes, transport, timeout_s, num_programs, default=True, compare_calls=None):
        self.group = Group(group)
        self.rank, self.size = self.group.rank, self.group.size
        interpreter.set_rank(self.group.global_ranks[self.rank])  # random delays differ from rank to rank
        self.device = runtime.device()
        self.runtime = runtime.RUNTIME
        options = {
            "transport": transport,
            "timeout_s": timeout_s,
            "num_programs": _default(num_programs, runtime.default_programs()),
            "heap_bytes": _default(heap_bytes, DEFAULT_HEAP_BYTES[self.runtime]),
            "runtime": self.runtime,
            "compare_calls": bool(_default(compare_calls, os.environ.get("TKERNELS_COMPARE_CALLS") == "1")),
        }
        asked, in_use = zip(*_meet(self.group, INIT, options), strict=True)
        self._check_options(asked)
        self._give_back_abandoned(set().union(*in_use))
        self.name = self._agree_on_name()
        self.timeout_s, self.num_programs = timeout_s, int(options["num_programs"])
        self._compares_calls = options["compare_calls"]
        self._workspaces: dict[int, Workspace] = {}
        self._lender = self._borrower = None  # streams: the borrower has been captured with the lender's workspace
        self._constants = {}
        self.recorder = None  # while a trace is made: what gives launches room for their programs' marks

        self.heap = SymmetricHeap(self.group, int(options["heap_bytes"]), runtime.open_segment)
        try:
            self._prepare(transport)
        except BaseException:
            self.heap.close()
            raise
        if default:
            _contexts[self.name] = self
        else:  # the newest in the order of this dictionary is the default
            others = dict(_contexts)
            _contexts.clear()
            _contexts.update({self.name: self, **others})
        local_plans.clear()  # which follow the default context's records

    def _prepare(self, transport: str):
        """Collective. All that kernels need besides the heap."""
        self.lamport_bytes = most_lamport_bytes(self.heap.num_bytes)  # that a call may receive as packets to be summed
        reachable = self.group.gather(runtime.transports(self.heap.segment))
        usable = [name for name in reachable[0] if all(name in others for others in reachable)]
        self.transport = usable[0] if transport == "auto" else transport
        if self.transport not in usable:
            raise ValueError(
                f"init: transport={transport!r} can't reach every rank on the {self.runtime} runtime; "
                f"usable: {', '.join(usable)}"
            )
        self.transport_id = TRANSPORTS[self.transport]
        self.mapped = usable[0] != "nvshmem"  # every rank's memory, in every rank's addresses
        # Rank 0's: files may change between the reads of two ranks, and what ranks choose by them must agree.
        self.tuned = self.group.gather(tuned.known(self.size, self.transport) if self.rank == 0 else [])[0]
        self.choices = {}  # of layers above, by problem; they follow from the records

        words = FAULT_RECORD.value * (1 + self.size)
        self._faults = self.heap.empty(words, dtype=torch.int64)
        self._faults.zero_()
        self._clock = torch.zeros(1, dtype=torch.int64, device=self.device)
        pinned = self.device.type == "cuda"
        self._host_flag = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._side_stream = torch.cuda.Stream() if pinned else None
        # What can be known without the device: that a wait of this rank gave up.
        self._flag = (self._host_flag if pinned else self._faults).numpy()
        stream_of = torch._C._cuda_getCurrentRawStream if pinned else int
        self.current_stream = functools.partial(stream_of, self.device.index or 0)
        self.reported = False
        self._interruption = None  # what a kernel of this rank was left by
        self.table = self._make_table()
        self.group.barrier()

    def _check_options(self, asked: tuple[dict, ...]):
        """The same error on every rank, for options that differ, those by rank, or that make no sense."""
        options = asked[0]
        differing = {name: [theirs[name] for theirs in asked] for name in options if len({o[name] for o in asked}) > 1}
        if differing:
            by_rank = "; ".join(f"{name} by rank: {', '.join(map(str, values))}" for name, values in differing.items())
            raise MismatchError(f"init: the ranks' options differ, in {by_rank}; all must pass the same")
        for name in ("timeout_s", "num_programs", "heap_bytes"):
            kind, what = (numbers.Real, "a number") if name == "timeout_s" else (numbers.Integral, "an integer")
            if not isinstance(options[name], kind):
                raise TypeError(f"init: {name}={options[name]!r} must be {what}")
            if not options[name] > 0:
                raise ValueError(f"init: {name}={options[name]} must be positive")
        if options["timeout_s"] > MAX_TIMEOUT_S:
            raise ValueError(f"init: timeout_s={options['timeout_s']} must be at most {MAX_TIMEOUT_S:g}, or 30 years")
        if options["transport"] not in ("auto", *TRANSPORTS):
            raise ValueError(f"init: transport={options['transport']!r} is unknown; use auto, {', '.join(TRANSPORTS)}")

    def _agree_on_name(self) -> str:
        """Collective. A name of its own, the same on all ranks."""
        global _number
        _number = max(self.group.gather(_number)) + 1
        return f"context{_number}"

    def _give_back_abandoned(self, in_use: set[str]):
        """Give back the contexts over this group that this rank has abandoned, and that no rank may still use."""
        for each in [each for each in _abandoned if each.group.global_ranks == self.group.global_ranks]:
            if each.name not in in_use:
                _abandoned.remove(each)
                if each.closed:  # all but its memory
                    each.heap.close()
                    continue
                try:
                    each._give_back()
                except WaitTimeoutError as error:
                    warnings.warn(f"{each.name}, which was dropped without finalize(): {error}", stacklevel=4)

    def _make_table(self) -> torch.Tensor:
        segment = self.heap.segment
        head = [0] * OFFSETS.value
        head[RANK.value], head[SIZE.value] = self.rank, self.size
        head[TIMEOUT_NS.value] = int(self.timeout_s * 1e9)
        head[FAULTS.value] = self._faults.data_ptr()
        head[HOST_FLAG.value] = self._host_flag.data_ptr()
        head[CLOCK.value] = self._clock.data_ptr()
        mine = segment.bases[self.rank]
        offsets = [base and base - mine for base in (*segment.bases, *segment.symmetric_bases)]
        words = [*head, *offsets, *segment.pes]
        return torch.tensor(words, dtype=torch.int64, device=self.device)

    def __repr__(self):
        return f"Context({self.name}: rank {self.rank} of {self.size}, {self.runtime} runtime, {self.transport})"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or self.size == 1:
            self.finalize()
        else:  # which others may know nothing of: they would be waited for
            self.abandon()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Collective. A tensor in symmetric memory, uninitialised, until `free`, also where it is dropped.

        See `SymmetricHeap.empty`.
        """
        return self.heap.empty(*shape, dtype=dtype)

    def free(self, tensor: torch.Tensor):
        """Give back a tensor of `empty`; all ranks, in the same order."""
        self.heap.free(tensor)

    def workspace(self) -> Workspace:
        """The current stream's workspace; made at its first use, which all ranks must come to in the same order.

        While a CUDA graph is captured, usually on a stream of its own, a stream without a workspace borrows that of the
        default stream, or the only one there is: of the stream that made the calls before, and will replay the graph.
        Another stream that is captured with it gets one of its own, for the two may run at the same time. So does the
        lender, which the capture may reach last.
        """
        stream = self.current_stream()
        if stream not in self._workspaces:
            if self._workspaces and self.capturing and self._lends(stream):
                return self._workspaces[self._lender]
            self._workspaces[stream] = Workspace(self)
        elif stream and stream == self._lender and self._lent():  # the default stream can't be captured
            self._workspaces[self._borrower] = self._workspaces[stream]
            self._workspaces[stream] = Workspace(self)
        return self._workspaces[stream]

    def _lent(self) -> bool:
        """Whether the lender's workspace is in use by the capture that has come to the lender."""
        return self._borrower not in self._workspaces and self.capturing and capture.taken(self._borrower)

    def _lends(self, borrower: int) -> bool:
        """Whether a captured stream without a workspace may have that of `_lender`, who is found here."""
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

        The oldest of MAX_CONSTANTS go first, for row counts that never repeat; plans hold those that they use.
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
        """Run a kernel of `num_programs` programs, which are resident at once: they may wait for each other.

        Asynchronous on a GPU: raises WaitTimeoutError for an earlier wait that is known to have expired, simulated for
        one of its own as well; `check` waits, and tells of all. Raises ValueError, or what CUDA says of a cooperative
        launch, for more programs than there is room for.
        """
        self.bind(kernel, num_programs, *arguments, **options)()

    def bind(self, kernel, num_programs: int, *arguments, varying: tuple[str, ...] = (), **options) -> Launch:
        """A launch that can be repeated, with other tensors for the parameters that `varying` names; see `Launch`."""
        if self.transport == "nvshmem":
            from tkernels.comm.nvshmem_runtime import device_library

            options["extern_libs"] = {"libnvshmem_device": device_library()}
        if self.runtime == "nvshmem":
            # Programs wait for each other, so all must be resident at once: a cooperative launch refuses otherwise.
            options["launch_cooperative_grid"] = True
        elif num_programs > interpreter.resident():
            raise ValueError(
                f"{num_programs} programs wait for each other, but the interpreter runs {interpreter.resident()} at "
                f"once; pass init(num_programs=...) of no more, or set TKERNELS_RESIDENT"
            )
        return Launch(kernel, num_programs, arguments, varying, self, **options)

    def plan(self, prepare, tensors: tuple[torch.Tensor | None, ...], *options):
        """What `prepare(self, *tensors, *options)` has returned for a call like this one on the current stream.

        Alike are calls with equal options whose tensors agree in all that `describe` tells of them.
        """

        def make():
            with self._call(prepare, tensors, options):
                return prepare(self, *tensors, *options)

        plan = self.workspace().plan((prepare, *map(describe, tensors), *options), make)
        if self._compares_calls and not self.capturing:
            with self._call(prepare, tensors, options):
                self.group.gather(None)
        return plan

    def _call(self, prepare, tensors, options):
        return self.group.during(lambda: prepare.alike(*tensors, *options))

    def forget_plans(self, *which):
        """Work out anew what calls have in common: for those that follow another choice of configurations.

        which: forget only plans for which this function is true.
        """
        for workspace in self._workspaces.values():
            workspace.forget_plans(*which)

    def refuse_after_fault(self):
        """Raise WaitTimeoutError if a wait of this rank is known to have expired. Costs next to nothing."""
        if self._flag[0]:
            if self.capturing:
                raise TkernelsError(
                    "a wait of this context expired before this CUDA graph's capture; call check() outside of it to "
                    "see who waited for whom, then finalize() the context"
                )
            self.check()

    @property
    def failed(self) -> bool:
        """True once a wait of this rank, or of a peer that told us, has expired, or it is closed; `check()` says which.

        On a GPU it reads a word of device memory on a stream of its own, so it waits for no kernel.
        """
        if self._flag[0] or self.device.type == "cpu" or self.capturing:
            return bool(self._flag[0])
        with torch.cuda.stream(self._side_stream):
            return bool(self._faults[0].item())

    def check(self):
        """Raise WaitTimeoutError if a wait expired on this rank, or on a peer that told us. Waits for the device.

        Raises TkernelsError once the context is closed.
        """
        if self.closed:
            raise TkernelsError(f"{self.name} has been finalized; init() a new one")
        if self._interruption:
            raise TkernelsError(
                f"a kernel of {self.name} was interrupted by {self._interruption}, so its epochs are out of step; "
                f"finalize() it and init() a new one"
            )
        deadline = time.monotonic() + 5.0  # a flag is raised a moment before its record is complete
        while True:
            words = self._faults.cpu().view(-1, FAULT_RECORD.value)
            if not words[0, 0]:
                return
            written = [record for record in words[1:].tolist() if record[0]]
            if written or time.monotonic() > deadline:
                break
        self._host_flag.fill_(1)  # later launches refuse
        self.reported = True
        if not written:
            raise TkernelsError("a wait on a signal expired, but its record was lost; finalize() this context")
        fields = dict(zip(FAULT_FIELDS[1:], written[0][1:], strict=False))
        fields["operation"] = operation_name(fields["operation"])
        ranks = self.group.global_ranks
        raise WaitTimeoutError(Fault(**fields), self.timeout_s, None if ranks == list(range(self.size)) else ranks)

    def interrupt(self, error: BaseException):
        """Have later calls refused: a kernel of this rank was left by that exception before its end."""
        self._interruption = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._flag[0], self.reported = 1, True

    def barrier(self):
        """Collective, on the current stream: later work starts after all ranks' earlier work on their streams."""
        from tkernels.comm.collectives import barrier

        barrier(self)

    def finalize(self):
        """Collective. Give the memory back; the context and its tensors must not be used any more. May be repeated.

        After an expired wait it does not meet the other ranks, which may be gone, or may still write here: the memory
        is given back by the next `init` over the same ranks. Raises WaitTimeoutError for an expired wait that nothing
        has reported yet, at the end; OutOfStepError where another rank makes another call, and goes on to use the
        context.
        """
        if _contexts.pop(self.name, None) is None:
            return
        local_plans.clear()
        failed = self.failed
        if not failed:
            try:
                _meet(self.group, FINALIZE + self.name)
            except OutOfStepError:
                _abandoned.append(self)
                raise
        self._give_back(keep_heap=failed)

    @property
    def closed(self) -> bool:
        """Whether it has been finalized, or given back after it was abandoned."""
        return self.group.closed

    def abandon(self):
        """Have it given back where its ranks meet next: in an `init` over the same group, once all have abandoned it.

        Not collective: for garbage collections, which come at another time on each rank, and under captures too.
        """
        if _contexts.pop(self.name, None) is not None:
            _abandoned.append(self)

    def _give_back(self, keep_heap: bool = False):
        reported, error = self.reported, None
        try:
            self.check()
        except TkernelsError as caught:
            error = caught
        self._workspaces.clear()
        self._constants.clear()
        self._flag = numpy.ones(1, dtype=numpy.int64)  # launches look at it, and would find memory that is gone
        if keep_heap:
            _abandoned.append(self)
        else:
            self.heap.close()
        self.group.close()
        if error is not None and not reported:
            raise error


def _meet(group: Group, call: str, value=None) -> list | None:
    """Collective, after the device's work so far. Every rank's value, with the names of contexts that it may still use.

    None if this rank has waited for nobody.

    A rank whose wait has expired, or that left by an exception, doesn't come to `finalize`, where others who know of no
    failure wait for it. It meets them in its next call of this kind: they leave, and it waits for theirs.
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
