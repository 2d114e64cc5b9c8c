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
import triton.language as tl
from torch.distributed.device_mesh import DeviceMesh

from tkernels.comm import calls, capture, contexts, device, interpreter, runtime
from tkernels.comm.arguments import check_flags, check_type, switch, whole
from tkernels.comm.calls import Call, Shared, Turn
from tkernels.comm.copies import Copies, Send
from tkernels.comm.device import Link
from tkernels.comm.errors import Fault, HeapExhaustedError, MismatchError, TkernelsError, WaitTimeoutError
from tkernels.comm.group import Group, of_parent
from tkernels.comm.heap import SymmetricHeap
from tkernels.comm.launch import PreparedLaunch
from tkernels.comm.workspace import Workspace, Workspaces, most_lamport_bytes

DEFAULT_HEAP_BYTES = {"simulated": 256 << 20, "nvshmem": 2 << 30}
CAPTURE_BYTES = 256 << 20  # or an eighth of a heap: set aside for what calls first need in a CUDA graph's capture
AFRESH = "The context can't be used any more; finalize() it and init() a new one"
MEETS = Shared("a call that meets the other ranks", ()).number
OP_MEETS = device.operation("a meeting")
NAMES_LIMIT_S = 10.0  # once two ranks' calls have differed, for a rank to say which was its own
MAX_TIMEOUT_S = 1e9  # kernels count nanoseconds in 64 bits

_warned = False  # whether `init` has warned that GPUs are left out


def init(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    heap_bytes: int | None = None,
    transport: str = "auto",
    timeout_s: float = 60.0,
    num_programs: int | None = None,
    default: bool = True,
    compare_calls: bool | None = None,
) -> "Context":
    """Collective over `group`. Creates its ranks' symmetric memory and workspaces, as the new default context.

    group: any torch process group, or a mesh of one dimension; None is the default group, or this process alone without
        torch.distributed. On the nvshmem runtime all ranks of the default group must make the first init of a process,
        each for its own group.
    heap_bytes: the most symmetric memory per rank, for workspaces and `Context.empty`. Default: 256 MiB simulated,
        2 GiB on GPUs, or the pool's size if that is less. It is taken when it is needed; an eighth of it, at most 256
        MiB, is set aside at once, for calls that first need it while a CUDA graph is captured. On GPUs it comes out of
        a pool of TKERNELS_POOL_BYTES (8 GiB by default), which the first init of a process allocates and never frees,
        and which all contexts share.
    transport: "simulated", "peer", "nvshmem", or "auto" for the preferred one that reaches every rank.
    timeout_s: how long a wait for a peer's signal may take before every rank raises WaitTimeoutError. Time that a peer
        spends compiling its kernel counts.
    num_programs: programs of a persistent kernel. Default: the number of the GPU's SMs, or 4 simulated. With fewer, so
        that all contexts' operations fit on the GPU at once, they may run at the same time (see stream_order.py).
    default: False leaves an existing default context in place: for the ranks of one dimension, or a library's own.
    compare_calls: for debugging: ranks meet on the host in every call of an operation, unless it is captured. If their
        calls differ, or one is missing for timeout_s, they raise before anything is sent, with the lines of the
        program, and can go on. Without it, and in calls of the adapters to other libraries, kernels compare the calls
        (tkernels.comm.calls). None: whether the environment has TKERNELS_COMPARE_CALLS=1.

    Raises ValueError for a transport that can't be used here, MismatchError if the ranks' options differ. Warns once,
    on rank 0, if the simulated runtime was chosen automatically although there are GPUs.
    """
    global _warned
    if isinstance(group, DeviceMesh):
        group = _process_group(group, "init: group")
    ctx = Context(group, heap_bytes, transport, timeout_s, num_programs, default, compare_calls)
    if ctx.rank == 0 and not _warned and (reason := runtime.gpus_left_out()):
        _warned = True
        warnings.warn(
            f"init: kernels run in Triton's interpreter on the CPU, and the GPUs are left out: {reason}; "
            f"TKERNELS_RUNTIME=simulated asks for that",
            stacklevel=2,
        )
    return ctx


def finalize(ctx: "MeshLike" = None):
    """Collective. Free a context's memory; None is the default context. Raises what `Context.finalize` does.

    ctx: as in `as_context`, but none is made: ranks without an open context have nothing to free.
    """
    if isinstance(ctx, dist.ProcessGroup | DeviceMesh):
        ctx = contexts.shared_over(_process_group(ctx, "finalize: ctx"))
        if ctx is None:
            return
    as_context(ctx, "finalize: ctx").finalize()


def as_context(mesh: "MeshLike" = None, what: str = "mesh") -> "Context":
    """The context over the ranks that an argument names.

    mesh: a Context, which is returned as it is; None for the current one. A process group of torch, or a mesh of one
        dimension, gives the newest open context over its ranks, in their order. If there is none, one is made, which is
        collective and leaves the default context in place. It lasts as long as the process group, or until
        `finalize(mesh)`. To choose its options, call `init(mesh, ..., default=False)` first.
    what: the argument's name, for errors.

    Compiled code keeps the context that it was traced with. Threads may call it at the same time.

    Raises TypeError for anything else, ValueError for a mesh of more dimensions or in another order than its group's,
    or if this rank is not in it; what `init` raises, on every rank. A rank whose argument names no ranks can tell none:
    if it is wrong there alone, the others wait, log after a minute for whom, and end by torch.distributed's limit.
    """
    if mesh is None:
        return contexts.current_context()
    if isinstance(mesh, Context):
        return mesh
    group = _process_group(mesh, what)
    return contexts.find_context(_name_over(group.group_name)) if torch.compiler.is_compiling() else _shared(group)


def _shared(group: dist.ProcessGroup) -> "Context":
    return contexts.shared_over(group, make=lambda: init(group, default=False))


def constant_in_traces(function):
    """`torch.compiler.assume_constant_result`, without importing torch's compiler for it, which takes 1.4 s."""
    function._dynamo_marked_constant = True
    return function


@constant_in_traces
def _name_over(group_name: str) -> str:
    return _shared(dist.distributed_c10d._resolve_process_group(group_name)).name


def group_of(mesh: "MeshLike", what: str = "mesh") -> Group:
    """The ranks that an argument names, without a context; None: torch's default group. Raises what `as_context` does,
    and is not collective.
    """
    return mesh.group if isinstance(mesh, Context) else Group(None if mesh is None else _process_group(mesh, what))


def _process_group(mesh, what: str) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension, or the one that was given; raises what `as_context` does."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names, way_out = mesh.mesh_dim_names, "make it with mesh_dim_names=, and pass one of them"
            if names:
                way_out = f"pass one of them, as mesh[{names[-1]!r}], or all as one, mesh._flatten()"
            raise ValueError(f"{what}: the mesh has {mesh.ndim} dimensions, {names}; {way_out}")
        place = mesh.get_coordinate()
        if place is not None:
            group = mesh.get_group()
            if place[0] != group.rank():
                raise ValueError(
                    f"{what}: the mesh has the ranks {mesh.mesh.tolist()}, in another order than their process group, "
                    f"so parts would be exchanged; make the mesh of ranks in increasing order"
                )
            return group
    elif isinstance(mesh, dist.ProcessGroup):
        return mesh
    elif mesh is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"{what}: takes a Context, a ProcessGroup or a DeviceMesh of one dimension, not {type(mesh).__name__}"
        )
    raise ValueError(f"{what}: rank {dist.get_rank()} is not one of these ranks; call it on those alone")


class Context:
    """One group's symmetric heap, its signal workspaces, and the table that kernels address peers with.

    Attributes: group, rank, size, device, transport, timeout_s, num_programs, heap, name. For kernels: table, int64 on
        the device, of which the device verbs read; and transport_id, the constant of the transport. reported: whether
        a failure has already been raised. shared: whether `as_context` finds it; False is for a library's own.
    """

    @capture.lasting()
    def __init__(self, group, heap_bytes, transport, timeout_s, num_programs, default=True, compare_calls=None):
        self.group = Group(group)
        self.rank, self.size = self.group.rank, self.group.size
        interpreter.set_default(rank=self.group.global_ranks[self.rank])  # random delays differ from rank to rank
        self.device = runtime.device()
        self.runtime = runtime.RUNTIME
        try:
            check_flags("init", default=default)
            options = _options(transport, timeout_s, num_programs, heap_bytes, compare_calls)
        except (TypeError, ValueError, TkernelsError) as error:
            options = error  # for all ranks to raise
        asked, in_use = zip(*contexts.meet(self.group, contexts.INIT, options), strict=True)
        if wrong := [each for each in asked if isinstance(each, Exception)]:
            raise wrong[0]
        if found := calls.differences(asked):
            raise MismatchError(f"init: the ranks' options differ, in {found}; all must pass the same")
        contexts.give_back_unused(self.group, set().union(*in_use))
        self.name = self.group.name = contexts.agree_on_name(self.group)
        self.timeout_s, self.num_programs = timeout_s, options["num_programs"]
        self._compares_calls = options["compare_calls"]
        self.group.limit_s = timeout_s if self._compares_calls else None
        self.shared = True
        # Operations on a workspace take it; one rank alone has no order of calls to keep.
        self.turn = Turn(self._refuse_overlap) if self.size > 1 else contextlib.nullcontext()
        self._workspaces = Workspaces()
        self._shared = weakref.WeakValueDictionary()  # of prepared calls, by number
        self._mismatch = None  # the error's message, once two ranks' calls have differed
        self.recorder = None  # while a trace is made: allocates space for the marks of a launch's programs

        self.heap = SymmetricHeap(self.group, options["heap_bytes"], runtime.open_segment)
        try:
            self._prepare(transport)
        except BaseException:
            self.heap.close()
            raise
        contexts.enter(self, default)

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
        self.transport_id = device.TRANSPORTS[self.transport]
        self.mapped = usable[0] != "nvshmem"  # whether every rank's memory is mapped in every rank's address space

        self.heap.reserve(min(self.heap.num_bytes // 8, CAPTURE_BYTES))
        words = device.FAULT_RECORD.value * (1 + self.size)
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
        self._interruption = None  # why it can't be used: a kernel that ended early, calls that overlapped, a fork
        self.table = self.make_table()

    def make_table(self, begun: torch.Tensor | None = None) -> torch.Tensor:
        """What kernels find peers, limits and fault records by. begun: of the workspace whose table it is."""
        segment = self.heap.segment
        head = [0] * device.OFFSETS.value
        head[device.RANK.value], head[device.SIZE.value] = self.rank, self.size
        head[device.TIMEOUT_NS.value] = int(self.timeout_s * 1e9)
        head[device.FAULTS.value] = self._faults.data_ptr()
        head[device.HOST_FLAG.value] = self._host_flag.data_ptr()
        head[device.CLOCK.value] = self._clock.data_ptr()
        head[device.BEGUN.value] = 0 if begun is None else begun.data_ptr()
        mine = segment.bases[self.rank]
        offsets = [base and base - mine for base in segment.bases]
        return self.on_device([*head, *offsets, *[0] * self.size, *segment.pes])  # NVSHMEM names peers' memory by ours

    def __repr__(self):
        return f"Context({self.name}: rank {self.rank} of {self.size}, {self.runtime} runtime, {self.transport})"

    def __copy__(self):
        return self  # what is copied is on the same ranks

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError(
            f"{self!r} can't be pickled: it is memory of this process and its peers. Leave it out of what is saved or "
            f"sent, and have the process that reads it make its own by init"
        )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if kind is None or self.size == 1:
            self.finalize()
        else:  # other ranks may not have raised, and finalize() would wait for them
            if not issubclass(kind, SystemExit) or error.code:  # else nothing has failed, and peers may be at work
                self.fail(f"{kind.__name__}: {error}")
            self.reported = True  # an error is on its way
            self.abandon()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Collective. `SymmetricHeap.empty`: memory that is allocated until `free`, even if the tensor is dropped."""
        return self.heap.empty(*shape, dtype=dtype)

    def free(self, tensor: torch.Tensor):
        """Free a tensor of `empty`; all ranks, in the same order."""
        self.heap.free(tensor)

    def workspace(self) -> Workspace:
        """The current stream's workspace. All ranks must create them in the same order."""
        return self._workspaces.current(self)

    def on_device(self, values: list[int]) -> torch.Tensor:
        """The numbers on the device, ready at once, also in a capture: schedules and offsets."""
        with capture.uncaptured(), capture.lasting():
            return torch.tensor(values, dtype=torch.int64, device="cpu").to(self.device)

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self.device.type == "cuda" and capture.underway()

    def link(self, operation: tl.constexpr | int) -> Link:
        """The constants of a launch of `operation` (`device.operation`): the argument L of its kernel."""
        operation = whole("link: operation", getattr(operation, "value", operation))
        constants = (self.size, operation, self.transport_id, False, runtime.has_tma())
        return Link(*map(tl.constexpr, constants))

    def launch(self, kernel, num_programs: int, *arguments, **options):
        """Run a kernel of `num_programs` programs, all resident at once, so that they may wait for each other.

        Asynchronous on a GPU: raises WaitTimeoutError only for an earlier wait that is known to have timed out;
        simulated, also for a wait of this launch. `check` waits for the device and detects all of them. Raises
        ValueError, or CUDA's error for a cooperative launch, if the programs can't all be resident.
        """
        self.bind(kernel, num_programs, *arguments, **options)()

    def bind(self, kernel, num_programs: int, *arguments, varying: tuple[str, ...] = (), **options) -> PreparedLaunch:
        """Prepare a launch to be repeated, with other tensors for the parameters that `varying` names."""
        num_programs = whole("launch: num_programs", num_programs, 1)
        if self.transport == self.runtime == "nvshmem":
            from tkernels.comm.nvshmem_runtime import device_library

            options["extern_libs"] = {"libnvshmem_device": device_library()}
        if self.runtime == "nvshmem":
            # Programs wait for each other, so all must be resident at once: a cooperative launch fails otherwise.
            options["launch_cooperative_grid"] = True
        self.check_resident(num_programs)
        return PreparedLaunch(kernel, num_programs, arguments, varying, self, **options)

    def check_resident(self, num_programs: int):
        """Raise ValueError for more programs than the interpreter runs at once. A GPU's driver refuses its own."""
        if self.runtime == "simulated" and num_programs > interpreter.resident():
            raise ValueError(
                f"{num_programs} programs wait for each other, but the interpreter runs {interpreter.resident()} at "
                f"once; pass init(num_programs=...) of no more, or set TKERNELS_RESIDENT"
            )

    def bind_call(
        self, kernel, num_programs: int, workspace: Workspace, operation: tl.constexpr | int, *,
        varying: tuple[str, ...] = (), landing: bool = False, copies: list[Send] | None = None, **arguments,
    ) -> PreparedLaunch | Copies:  # fmt: skip
        """`bind`, for the kernel of an operation, which compares calls.

        Its argument `call` is the number of the call in progress, L the constants of its launch. Those named as in
        `Workspace.words` come from there.
        landing: data arrives in the landing.  copies: what the copy engine sends, if it does.
        """
        workspace.reserve(num_counters=arguments.get("num_counters", 0))
        shared = Shared.of(*(self.group.described() or (kernel.__name__, {})))
        words = {name: value for name, value in workspace.words().items() if name in kernel.arg_names}
        copied = copies is not None
        link = self.link(operation)._replace(LANDING=tl.constexpr(landing), COPIED=tl.constexpr(copied))
        launch = self.bind(
            kernel, num_programs, varying=(*varying, "gate") if copied else varying, L=link, call=shared.number,
            **words | arguments,
        )  # fmt: skip
        launch.shared = self._shared.setdefault(shared.number, shared)
        return Copies(self, workspace, copies, launch, varying) if copied else launch

    def call(self, call: Call, *tensors: torch.Tensor | None):
        """Carry out a call on the current stream, as what has been prepared for calls of its kind.

        Raises TkernelsError if a call of another thread has begun and not returned. As other ranks may have made both
        calls, the context can't be used any more then, here or on any rank.
        """
        if calls.elsewhere(self.device):
            with torch.cuda.device(self.device):
                return self.call(call, *tensors)
        with self.turn:
            return self.prepared(call, tensors)(*tensors)

    def prepared(self, call: Call, tensors: tuple[torch.Tensor | None, ...]):
        """The function of tensors like these that carries out such calls on the current stream; see `Call.prepare`."""
        key = type(call), *call, *map(calls.describe, tensors)
        found = self._workspaces.current(self).prepared(key, self._prepare_call, call, tensors)
        if self._compares_calls and not self.capturing:
            with self._during(call, tensors):
                self.group.gather(None)
        return found

    def _prepare_call(self, call: Call, tensors):
        with self._during(call, tensors):
            return call.prepare(self, *tensors)

    def _during(self, call: Call, tensors):
        return self.group.during(lambda: (call.operation, call.shared(self, *tensors)))

    def _refuse_overlap(self, comes: str, inside: str):
        self._interruption = (
            f"{comes}: {inside} has not returned. Calls of one context must not overlap, since each rank would order "
            f"them in its own way. Make them from one thread, or give each thread a context over a process group of "
            f"its own: init(torch.distributed.new_group(...)). {AFRESH}"
        )
        self._end_waits(device.OVERLAP)
        self.check()

    def fail(self, cause: str):
        """End the waits of all ranks, as this one has failed: `check` and later calls raise TkernelsError.

        Not collective: for an error on one rank, which keeps it from what its peers wait for. The context can't be used
        any more. Does nothing if it can't be already. cause: for the error.
        """
        with contextlib.suppress(RuntimeError):  # of the device, which may be what has failed
            if not self.failed and self.size > 1:
                self._interruption = f"rank {self.rank} has failed: {cause}. {AFRESH}"
                self.group.tell(f"{self.name}/failure", self._interruption, (), 0)
                self._end_waits(device.FAILED)

    def _end_waits(self, what):
        if not (self._flag[0] or self.capturing):
            # On a stream of its own, as a kernel of this rank may wait for a peer; it ends its wait and the peers'.
            side = contextlib.nullcontext() if self._side_stream is None else torch.cuda.stream(self._side_stream)
            with side:
                # Not by `launch`, whose programs start together: this one need not fit beside the other kernel.
                device.failure_kernel[(1,)](
                    self.table, self.rank, self.link(device.OP_FAILURE), WHAT=what.value, num_warps=1
                )
        self._flag[0], self.reported = 1, True

    @contextlib.contextmanager
    def meeting(self, workspace: Workspace | None = None):
        """The block meets the other ranks before the call in progress, on the workspace or else the current stream's.

        So it may be where the workspace must grow. A rank that need not meet for its call would wait for this one's in
        a kernel, and the meeting for that rank. So they are told in an epoch of the workspace, and one that is in
        another call raises MismatchError.

        The block begins after the device's work so far, so ranks that meet in it have all told, and are done with the
        last call. Whoever tells waits for nobody: else the call in progress would write where a peer that is late still
        reads what the last one has sent. Two inboxes are enough for ranks that are one call apart, not two.
        """
        workspace = workspace or self._workspaces.current(self)
        if workspace.begun is None or self.capturing or self._compares_calls:  # ranks meet anyway, or can't
            yield
            return
        from tkernels.comm.collectives import announce_kernel

        # Nothing else holds it for peers that ask later.
        self._shared[MEETS] = self._meets = Shared.of(*(self.group.described() or ("a call", {})))
        self.group.tell(f"{self.name}/{MEETS}", self._meets.to_json(), (), 0)
        self.launch(
            announce_kernel, 1, workspace.state, workspace.table, self.rank, MEETS, self.link(OP_MEETS), num_warps=1
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        words = workspace.begun
        try:
            yield
        except HeapExhaustedError:  # on all ranks
            raise
        except TkernelsError as error:
            self.check()  # a peer that has found out may have gone
            if not calls.in_step(words.tolist(), self.rank):
                self.fail(f"{type(error).__name__}: {error}")  # the epochs of the workspace are out of step
            raise

    def forget_calls(self):
        """Discard what has been prepared, so that later calls follow a new choice of configurations.

        Also what this process has prepared for one rank alone, which belongs to no context.
        """
        calls.local_calls.clear()
        for workspace in self._workspaces.values():
            workspace.forget_calls()

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

        Raises MismatchError if two ranks' calls differed, and TkernelsError once the context is closed, if a rank has
        failed (`fail`), or if a kernel of this rank was interrupted.
        """
        if self.closed:
            raise TkernelsError(f"{self.name} has been finalized; init() a new one")
        if self._interruption:
            raise TkernelsError(self._interruption)
        deadline = time.monotonic() + 5.0  # a flag is set shortly before its record is complete
        while True:
            words = self._faults.cpu().view(-1, device.FAULT_RECORD.value)
            if not words[0, 0]:
                return
            written = [record for record in words[1:].tolist() if record[0]]
            if written or time.monotonic() > deadline:
                break
        self._host_flag.fill_(1)  # later launches raise
        self.reported = True
        if not written:
            raise TkernelsError("a wait on a signal expired, but its record was lost; finalize() this context")
        fields = dict(zip(device.FAULT_FIELDS[1:], written[0][1:], strict=False))
        fields["operation"] = device.operation_name(fields["operation"])
        told = fields.pop("calls")
        if told == device.OVERLAP.value:
            raise TkernelsError(
                f"two threads of rank {fields['rank']} made calls of one context that overlapped, as the error there "
                f"says. {AFRESH}"
            )
        if told == device.FAILED.value:
            rank = fields["rank"]
            (told,) = self.group.tell(f"{self.name}/failure", None, (rank,), NAMES_LIMIT_S)
            raise TkernelsError(told or f"rank {rank} has failed. {AFRESH}")
        if told == device.FORM.value:
            expected, seen = map(calls.form_name, (fields["expected"], fields["seen"]))
            raise MismatchError(
                f"{fields['operation']}: rank {fields['rank']} expects {expected}, and rank {fields['peer']} has sent "
                f"{seen} (messages go in parts of a slot); both must name the same size and dtype. {AFRESH}"
            )
        if told:
            numbers = divmod(told, 1 << calls.CALL_BITS)
            raise MismatchError(self._name_calls(dict(zip((fields["rank"], fields["peer"]), numbers, strict=True))))
        fault, ranks = Fault(**fields), self.group.global_ranks
        ranks = None if ranks == list(range(self.size)) else ranks
        raise WaitTimeoutError(fault, self.timeout_s, ranks, self.group.awaits(fault.peer, fault.rank))

    def _name_calls(self, numbers: dict[int, int]) -> str:
        """What the calls of two ranks differ in: {rank: number}. The ranks tell each other; not a meeting."""
        if self._mismatch is None:
            own = self._shared.get(numbers.get(self.rank))
            first, second = sorted(numbers)
            told = []
            for rank in (first, second):
                topic, text = f"{self.name}/{numbers[rank]}", own and rank == self.rank and own.to_json()
                told += self.group.tell(topic, text or None, (rank,), NAMES_LIMIT_S)
            call, other = (text and Shared.from_json(text) for text in told)
            self._mismatch = f"{calls.difference(first, call, second, other)}. {AFRESH}"
        return self._mismatch

    def interrupt(self, error: BaseException):
        """Make later calls raise: `error` ended a kernel of this rank before its end."""
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._interruption = (
            f"a kernel of {self.name} was interrupted by {cause}, so its epochs are out of step. {AFRESH}"
        )
        self._flag[0], self.reported = 1, True

    def leave_to_parent(self):
        """In a process that was forked from this rank: make calls raise, whose signals would be the parent's, too."""
        self._interruption = of_parent(self.name)
        self._flag, self.reported = numpy.ones(1, dtype=numpy.int64), True  # its own memory, as the old one is not

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
        if not contexts.leave(self):
            return
        failed = self.failed
        if not failed:
            try:
                contexts.meet(self.group, contexts.FINALIZE + self.name)
            except TkernelsError:  # out of step; torch.distributed shut down; another thread in a meeting
                contexts.abandon(self)
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
        if contexts.leave(self):
            contexts.abandon(self)

    def give_back(self):
        """Free the memory without a meeting: for ranks that know that none of them uses the context any more."""
        if contexts.leave(self):
            self._give_back()

    def _give_back(self, keep_heap: bool = False):
        reported, error = self.reported, None
        try:
            self.check()
        except TkernelsError as caught:
            error = caught
        self._workspaces.clear()
        self.turn = contextlib.nullcontext()  # it refers back here, and a cycle would hold the memory for a while
        self._flag = numpy.ones(1, dtype=numpy.int64)  # launches read it, and its memory is about to be freed
        if keep_heap:
            contexts.abandon(self)
        else:
            self.heap.close()
        self.group.close()
        if error is not None and not reported:
            raise error


def _options(transport, timeout_s, num_programs, heap_bytes, compare_calls) -> dict:
    """The options of `init` that all ranks must share, by name. Raises TypeError, ValueError or TkernelsError."""
    check_type("init: transport", transport, str, "a name")
    check_type("init: timeout_s", timeout_s, numbers.Real, "a number")
    if transport not in ("auto", *device.TRANSPORTS):
        raise ValueError(f"init: transport={transport!r} is unknown; use auto, {', '.join(device.TRANSPORTS)}")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"init: timeout_s={timeout_s} must be positive, and at most {MAX_TIMEOUT_S:g}, or 30 years")
    num_programs = runtime.default_programs() if num_programs is None else num_programs
    runtime.shares_gpus()  # raises for what is no switch, and the next for what is no size: without a GPU, too
    pool_bytes = runtime.pool_bytes()
    if heap_bytes is None:
        most = DEFAULT_HEAP_BYTES[runtime.RUNTIME]
        heap_bytes = most if runtime.RUNTIME == "simulated" else min(most, pool_bytes)
    compare_calls = switch("TKERNELS_COMPARE_CALLS") if compare_calls is None else compare_calls
    check_type("init: compare_calls", compare_calls, numbers.Integral, "True or False")  # 0 and 1 too
    return {
        "transport": transport,
        "timeout_s": timeout_s,
        "num_programs": whole("init: num_programs", num_programs, 1),
        "heap_bytes": whole("init: heap_bytes", heap_bytes, 1),
        "runtime": runtime.RUNTIME,
        "capability": runtime.capability(),
        "compare_calls": bool(compare_calls),
    }


MeshLike = Context | dist.ProcessGroup | DeviceMesh | None  # what says which ranks: `as_context` resolves it
