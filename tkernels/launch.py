"""Start ranks on this machine, one process each, and run a function on all of them.

    def add_up(ctx, x):
        x = x * (ctx.rank + 1)
        torch.distributed.all_reduce(x)
        return x

    if __name__ == "__main__":
        print(launch(add_up, 2, torch.ones(3))[0])  # tensor([3., 3., 3.])

The call returns the results or raises the first failure. The parent holds pipes to each rank: the kernel kills a rank
that loses its parent, a rank that hangs or fails is killed, and nothing is written to disk, so no process and no file
outlives the parent, however it ends. torch is imported late, so that `import tkernels.launch` costs nothing.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import inspect
import io
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.spawn
import multiprocessing.util  # noqa: F401  (registers its exit function first: exit functions run last in, first out)
import numbers
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Mapping

START_TIMEOUT_S = 300.0  # importing torch, joining the group, allocating the heap; many ranks may share few cores
CLOSE_TIMEOUT_S = 30.0  # freeing the heap and leaving the interpreter
GRACE_S = 0.5  # after the first failure that is reported: time for the one that caused it to be reported too
RANKS_OF_A_CORE = 4  # simulated ranks: with 8 a step of the demo takes 50 s on two cores, with 4 it takes 8 s
MOST_RANKS = 1024  # on one machine
STACK_SIGNAL = signal.SIGUSR1
RANK = "tkernels-rank-"  # how the names of ranks' processes begin
GUARD = 'ranks import the program, so what it does belongs under `if __name__ == "__main__":`'


class RankError(RuntimeError):
    """A rank failed. `__cause__` is the original exception if it could be pickled.

    rank: the rank that failed first.
    type_name: the class of its exception, "died" if its process ended, "TimeoutError" if it never finished.
    traceback_text: the traceback on that rank, from the called function on.
    """

    def __init__(self, rank: int, type_name: str, traceback_text: str, headline: str | None = None):
        self.rank, self.type_name, self.traceback_text = rank, type_name, traceback_text
        self.headline = headline or f"rank {rank}: {type_name}"
        super().__init__(rank, type_name, traceback_text, self.headline)  # the arguments, so that it pickles

    def __str__(self):
        return f"{self.headline}\n\n{self.traceback_text}".rstrip()


class RankTimeoutError(RankError):
    """Ranks did not finish in time: `rank` is the first of them, `traceback_text` has the stacks of every rank."""


def launch(fn, ranks: int, *args, timeout_s: float = 300.0, ctx_options: dict | None = None) -> list:
    """Run ``fn(ctx, *args)`` on `ranks` new processes and return the results, one a rank.

    fn is a module-level function, sent by its name; args and results must pickle. Tensors are sent by value, detached
    and on the CPU. Each process joins torch.distributed (gloo, and nccl on GPUs, where rank r uses GPU r) and makes a
    Context by ``tkernels.init(**ctx_options)``. With TKERNELS_SHARE_GPUS=1, which lets more ranks than GPUs share them,
    the only backend is gloo. A script that calls this must be a file and needs the usual
    ``if __name__ == "__main__":``, since the new processes import it.

    Raises RankError with the first failure of a rank, RankTimeoutError if a rank still runs fn after `timeout_s`
    seconds, or has not taken its arguments or sent its result by then. Before a process starts: TypeError or ValueError
    for arguments that make no sense, TypeError for an fn or args that don't pickle, ValueError for more ranks than GPUs
    on the nvshmem runtime. Warns if there are many more simulated ranks than cores.
    """
    with RankPool(ranks, ctx_options=ctx_options) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


def default_ranks() -> int:
    """The default number of ranks: one per GPU, at least 2 where GPUs are shared; 2 on the simulated runtime.

    Raises TkernelsError if the runtime can't be used.
    """
    import torch

    from tkernels.comm.errors import TkernelsError
    from tkernels.comm.runtime import RUNTIME, candidates, shares_gpus

    reason = candidates()[RUNTIME]
    if reason is not None:
        raise TkernelsError(f"the {RUNTIME} runtime was asked for, but {reason}; --runtime simulated needs no GPU")
    if RUNTIME == "simulated":
        return 2
    return max(torch.cuda.device_count(), 2 if shares_gpus() else 1)


class RankPool:
    """Ranks that stay alive between calls; the first call starts their processes.

    A failure may leave ranks out of step, so any failure kills the processes, and the next call starts new ones. So
    does a function that handles a failure of ctx and returns, or that closes ctx. One thread at a time may use a pool.
    """

    def __init__(self, ranks: int, *, ctx_options: dict | None = None):
        if not isinstance(ranks, numbers.Integral):
            raise TypeError(f"a pool needs a number of ranks, got {ranks!r}; launch(fn, ranks, *args)")
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"a pool needs at least 1 rank, and at most {MOST_RANKS}, got {ranks}")
        if not isinstance(ctx_options, Mapping | None):
            raise TypeError(f"ctx_options={ctx_options!r} must be a dictionary of init()'s options")
        self.ranks = int(ranks)
        self.ctx_options = dict(ctx_options or {})
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[multiprocessing.connection.Connection] = []  # commands out, results in
        self._stacks: list[multiprocessing.connection.Connection] = []  # what faulthandler writes on STACK_SIGNAL
        self._alive: list[multiprocessing.connection.Connection] = []  # never used; ranks are killed when they close
        self._store = None
        _pools.add(self)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty before the first call, after a failure and after close()."""
        return [process.pid for process in self._processes]

    def run(self, fn, *args, timeout_s: float = 300.0) -> list:
        """Run ``fn(ctx, *args)`` on every rank, as `launch` does; ctx is the same in every call until it has failed."""
        if not callable(fn):
            raise TypeError(f"ranks run a function, fn(ctx, *args), and fn={fn!r} is none")
        _check_timeout(timeout_s)
        _refuse_what_ranks_cannot_import(fn)
        name = getattr(fn, "__qualname__", repr(fn))
        hint = "Pass a function defined at the top of a module, and arguments that pickle."
        call = _pickled((fn, args), f"{name} and its arguments", hint)
        try:
            if not self._processes:
                self._start()
            self._send(call, timeout_s)
            results, spent = zip(*self._collect(timeout_s), strict=True)
        except BaseException:
            self.kill()
            raise
        if any(spent):
            self.kill()
        return list(results)

    def close(self) -> None:
        """Finalize the Context on all ranks and end the processes. Raises RankError when finalizing fails."""
        if not self._processes:
            return
        try:
            self._send(b"", CLOSE_TIMEOUT_S)
            self._collect(CLOSE_TIMEOUT_S)
            limit = time.monotonic() + CLOSE_TIMEOUT_S
            for process in self._processes:
                process.join(max(0.0, limit - time.monotonic()))
        finally:
            self.kill()

    def kill(self) -> None:
        """End the processes at once. The next run() starts new ones."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()
        for pipe in self._pipes + self._stacks + self._alive:
            pipe.close()
        self._pipes, self._stacks, self._alive, self._store = [], [], [], None

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc, tb):
        if exc_type is None:
            self.close()
        else:
            self.kill()

    def __del__(self):
        if getattr(self, "_processes", None):
            self.kill()

    def _start(self) -> None:
        from tkernels.comm.context import init
        from tkernels.comm.errors import TkernelsError
        from tkernels.comm.runtime import RUNTIME, most_ranks

        if multiprocessing.process.current_process().daemon:
            raise TkernelsError("this process is a daemon of multiprocessing, which lets it start no ranks")
        if unknown := [name for name in self.ctx_options if name not in inspect.signature(init).parameters]:
            raise TypeError(f"ctx_options: init() has no {', '.join(map(repr, unknown))}")
        options = _pickled(self.ctx_options, "ctx_options", "Pass options that pickle.")
        if self.ranks > most_ranks():
            raise ValueError(
                f"{self.ranks} ranks need {self.ranks} GPUs, one each, found {most_ranks()}; start fewer ranks, set "
                "TKERNELS_RUNTIME=simulated to run them on the CPU, or TKERNELS_SHARE_GPUS=1 to test on fewer GPUs"
            )
        cores = len(os.sched_getaffinity(0))
        if RUNTIME == "simulated" and self.ranks > RANKS_OF_A_CORE * cores:
            warnings.warn(
                f"{self.ranks} simulated ranks share {cores} core{'s' * (cores > 1)}, and each waits while another one "
                f"runs: an operation may take minutes; up to {RANKS_OF_A_CORE * cores} ranks are bearable here",
                stacklevel=3,
            )
        self._store, port = _serve_store()
        context, program = multiprocessing.get_context("spawn"), _leave_program_to_ranks()
        num_threads = max(1, cores // self.ranks)
        # Ctrl-C at a terminal also reaches the ranks, even before they can ignore it, so they start with SIGINT
        # blocked. The resource tracker unblocks SIGINT when it starts, so it is started before that.
        multiprocessing.resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _environment(OMP_NUM_THREADS=str(num_threads), TKERNELS_RUNTIME=RUNTIME):
                for rank in range(self.ranks):
                    pipe, rank_pipe = context.Pipe()
                    stacks, rank_stacks = context.Pipe(duplex=False)
                    rank_alive, alive = context.Pipe(duplex=False)
                    self._pipes.append(pipe)
                    self._stacks.append(stacks)
                    self._alive.append(alive)
                    place = rank, self.ranks, port, num_threads, options
                    ends = rank_pipe, rank_stacks, rank_alive
                    process = context.Process(target=_rank_main, args=(place, program, *ends), name=f"{RANK}{rank}")
                    process.start()
                    self._processes.append(process)
                    for end in ends:
                        end.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._collect(START_TIMEOUT_S, starting=True)

    def _send(self, message: bytes, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank, pipe in enumerate(self._pipes):
            try:
                _bound(pipe, deadline)
                pipe.send_bytes(message)
            except BlockingIOError:
                said = f"rank {rank} of {self.ranks} has not taken its arguments after {timeout_s:g} s"
                raise self._timeout(said, [rank]) from None
            except (BrokenPipeError, ConnectionResetError):  # from a dead rank, which _collect reports
                continue

    def _collect(self, timeout_s: float, starting: bool = False) -> list:
        """Return the result of every rank, or raise the first failure."""
        deadline = time.monotonic() + timeout_s
        replies: dict[int, tuple] = {}
        died: list[int] = []
        limit = deadline
        cut_off = False  # a rank has sent a part of its reply, and no more until the limit
        while not cut_off and len(replies) + len(died) < self.ranks and (left := limit - time.monotonic()) > 0:
            pending = {self._pipes[r]: r for r in range(self.ranks) if r not in replies and r not in died}
            ready = multiprocessing.connection.wait(list(pending), timeout=min(left, 1.0))
            for pipe in ready:
                try:
                    _bound(pipe, limit)
                    replies[pending[pipe]] = pickle.loads(pipe.recv_bytes())
                except BlockingIOError:
                    cut_off = True
                except (EOFError, OSError):  # OSError: in the middle of a reply
                    died.append(pending[pipe])
            # a child of a dead rank may hold the pipe open
            died += [r for p, r in pending.items() if p not in ready and self._processes[r].exitcode is not None]
            if limit == deadline and (died or any(kind == "failed" for kind, *_ in replies.values())):
                limit = min(deadline, time.monotonic() + GRACE_S)

        if died:  # checked before exceptions: those of other ranks follow from their lost connection
            raise self._death(died[0], starting)
        failures = {r: (at, payload) for r, (kind, at, payload) in replies.items() if kind == "failed"}
        if failures:
            rank = min(failures, key=lambda r: failures[r][0])
            type_name, headline, text, cause = failures[rank][1]
            headline = f"rank {rank} of {self.ranks}: {headline}"
            raise RankError(rank, type_name, text, headline) from _loads_or_none(cause)
        if len(replies) < self.ranks:
            running = [r for r in range(self.ranks) if r not in replies]
            names = ", ".join(map(str, running))
            said = f"rank{'s' * (len(running) > 1)} {names} of {self.ranks} still running after {timeout_s:g} s"
            if replies and not starting:
                finished = ", ".join(map(str, sorted(replies)))
                said += f", but not {finished}: all ranks must make the same collective calls"
            raise self._timeout(said, running)
        return [pickle.loads(replies[r][2]) for r in range(self.ranks)]

    def _death(self, rank: int, starting: bool) -> RankError:
        process = self._processes[rank]
        process.join(10.0)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name} before it had finished"
        elif starting:
            how = f"exited with code {code} before it had started; what it printed may say why"
        else:
            how = f"exited with code {code} before it had finished"
        return RankError(rank, "died", "", f"rank {rank} of {self.ranks} {how}")

    def _timeout(self, headline: str, running: list[int]) -> RankTimeoutError:
        for rank in range(self.ranks):
            os.kill(self._processes[rank].pid, STACK_SIGNAL)
        stacks = []
        for rank, pipe in enumerate(self._stacks):
            state = "still running" if rank in running else "had finished"
            stacks.append(f"rank {rank} ({state}):\n{_read_stacks(pipe.fileno())}")
        return RankTimeoutError(running[0], "TimeoutError", "\n".join(stacks), headline)


def _refuse_what_ranks_cannot_import(fn):
    """Check, before any process starts, that ranks can import fn.

    They import the program, if it is a file and no __main__.py. Raises TypeError if they can't, SystemExit in a process
    that is itself importing the program.
    """
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):  # the check of multiprocessing itself
        raise SystemExit(f"launch was called where a new process imports the program; {GUARD}")  # no traceback per rank
    program, name = multiprocessing.spawn.get_preparation_data("rank"), getattr(fn, "__qualname__", repr(fn))
    file, module = program.get("init_main_from_path"), program.get("init_main_from_name", "__main__")
    if file is not None and not os.path.exists(file):
        raise TypeError(f"{name} can't be sent to the ranks: they import the program, and {file} is no file")
    if file is None and module.endswith("__main__") and getattr(fn, "__module__", None) == "__main__":
        raise TypeError(f"{name} can't be sent to the ranks: they can't import the program; define it in a module")


def _check_timeout(timeout_s):
    if not isinstance(timeout_s, numbers.Real):
        raise TypeError(f"timeout_s={timeout_s!r} must be a number of seconds")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be positive")


def _pickled(value, what: str, hint: str) -> bytes:
    try:
        return dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"{what} cannot be sent to the ranks: {error}. {hint}") from error


def _bound(pipe, deadline: float):
    """Let reads and writes of this end, a socket, raise BlockingIOError when they have waited until the deadline."""
    seconds = min(max(deadline - time.monotonic(), 1e-3), 1e6)
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setblocking(True)  # whatever socket.setdefaulttimeout says
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


_prepare = multiprocessing.spawn.get_preparation_data


def _prepare_all_but_ranks(name: str) -> dict:
    data = _prepare(name)
    return {key: value for key, value in data.items() if not (name.startswith(RANK) and key.startswith("init_main"))}


def _leave_program_to_ranks() -> dict:
    """How a new process finds the program. From here on multiprocessing leaves its import to ranks themselves.

    They report what the import raises; multiprocessing would print it and end the process.
    """
    multiprocessing.spawn.get_preparation_data = _prepare_all_but_ranks
    return {key: value for key, value in _prepare("rank").items() if key.startswith("init_main")}


_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


def _forget_ranks():
    # A forked child has a copy of every pool, but the ranks belong to its parent.
    for pool in _pools:
        if pool._store is not None:  # leaked: closing it here, where its threads don't exist, can crash
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool._store))
        pool._processes, pool._pipes, pool._stacks, pool._alive, pool._store = [], [], [], [], None


os.register_at_fork(after_in_child=_forget_ranks)


@atexit.register
def _kill_pools():
    # Runs before multiprocessing's own exit function, which would wait for the ranks.
    for pool in list(_pools):
        pool.kill()


@contextlib.contextmanager
def _environment(**values: str):
    """Update os.environ with `values` for processes started in the block; torch and tkernels read them on import."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve_store():
    """Start a TCPStore in this process, reachable from this machine only, on a free port. Returns (store, port)."""
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _read_stacks(fd: int, first_s: float = 2.0, quiet_s: float = 0.3) -> str:
    """Read a rank's stacks. faulthandler writes no end mark: read until there is a stack and no more for `quiet_s`."""
    text, shown = b"", ""
    while multiprocessing.connection.wait([fd], timeout=quiet_s if shown.strip() else first_s):
        piece = os.read(fd, 1 << 16)
        if not piece:
            break
        text += piece
        shown = _without_own_frames(text.decode(errors="replace"))
    return shown if shown.strip() else "  (no answer: stopped, or still starting)\n"


def _without_own_frames(stacks: str) -> str:
    """faulthandler's text without this module's outermost frames."""
    threads = [thread.splitlines() for thread in stacks.strip().split("\n\n")]
    shown = ""
    for lines in threads:
        calls = [i for i, line in enumerate(lines) if f'"{__file__}"' in line and line.endswith(" in run")]
        shown += "\n".join(lines[: calls[0]] if calls else lines) + "\n"
    return shown


# Code that runs in a rank


def _rank_main(place, program, pipe, stacks, alive):
    faulthandler.register(STACK_SIGNAL, file=stacks.fileno(), all_threads=True)
    _die_with_parent(alive)

    ctx = None

    def join():
        nonlocal ctx
        try:
            _import_program(program)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        ctx = _join(*place)

    def run(call):
        return _call(ctx, *pickle.loads(call))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        _reply(pipe, join)
        while call := pipe.recv_bytes():
            _reply(pipe, run, call)
        _reply(pipe, _leave, ctx)
    from tkernels.comm.runtime import RUNTIME

    if RUNTIME == "simulated":
        # A normal exit occasionally aborts: gloo's thread releases a tensor while the interpreter shuts down. On the
        # nvshmem runtime the exit must be a normal one, because NVSHMEM cleans up in it.
        os._exit(0)


def _die_with_parent(alive):
    """Have the kernel kill this process as soon as the parent's end of the pipe closes; also if it is stopped or in C.

    Not by prctl(PR_SET_PDEATHSIG), which counts the end of the thread that started this process as the parent's.
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if multiprocessing.connection.wait([alive], timeout=0):  # it closed before
        os._exit(1)


def _import_program(program: dict):
    """Import the program as multiprocessing does in a new process."""
    process = multiprocessing.process.current_process()
    process._inheriting = True  # as there: see _refuse_what_ranks_cannot_import
    try:
        if "init_main_from_name" in program:
            multiprocessing.spawn._fixup_main_from_name(program["init_main_from_name"])
        elif "init_main_from_path" in program:
            multiprocessing.spawn._fixup_main_from_path(program["init_main_from_path"])
    finally:
        del process._inheriting


def _reply(pipe, work, *args):
    try:
        reply = ("done", time.monotonic(), dumps(work(*args)))
    except BaseException as error:  # SystemExit and pytest outcomes too: the parent decides what they mean
        reply = ("failed", time.monotonic(), _describe(error))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):  # a daemon has none
            stream.flush()  # so that the output is there when the call returns
    pipe.send_bytes(pickle.dumps(reply))


def _join(rank, ranks, port, num_threads, options):
    import torch
    import torch.distributed as dist

    from tkernels.comm.context import init
    from tkernels.comm.runtime import RUNTIME, shares_gpus

    torch.set_num_threads(num_threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine; host names need not resolve
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if RUNTIME == "nvshmem":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = {"backend": "gloo"} if shares_gpus() else {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
        dist.init_process_group(store=store, rank=rank, world_size=ranks, **backend)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return init(**pickle.loads(options))


def _call(ctx, fn, args) -> tuple:
    """Run fn. Returns its result, and whether ctx can't serve another call. Raises a failure that fn has not seen.

    Failures are looked for in ctx and in the contexts that fn opened and left open; of those over one group, only in
    the newest, since after a failure ranks start again with `init`.
    """
    from tkernels.comm.contexts import open_contexts
    from tkernels.comm.errors import TkernelsError

    before = open_contexts()
    result = fn(ctx, *args)
    opened = [each for each in open_contexts() if each not in before]
    newest = {tuple(each.group.global_ranks): each for each in (ctx, *opened)}
    for in_use in newest.values():
        if in_use.closed or in_use.reported:
            continue
        try:
            in_use.check()  # a wait that timed out is a failure, although its kernel went on
        except TkernelsError as error:
            error.args = (f"the function returned, but its context had failed: {error}",)
            raise
    return result, ctx.failed or ctx not in open_contexts()


def _leave(ctx):
    import torch.distributed as dist

    ctx.finalize()
    if dist.is_initialized():
        dist.destroy_process_group()


def _describe(error: BaseException) -> tuple:
    """(class name, first line, traceback from the called function on, the pickled exception or None)."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_globals.get("__name__") in (__name__, "tkernels.testing.plugin"):
        tb = tb.tb_next
    text = "".join(traceback.format_exception(type(error), error, tb or error.__traceback__))
    headline = traceback.format_exception_only(type(error), error)[0].splitlines()[0]
    if isinstance(error, SyntaxError):  # where it is comes first there
        headline = f"{type(error).__name__}: {error}"
    try:
        cause = dumps(error)
    except Exception:  # an exception's own __reduce__ can raise anything; its text is sent in any case
        cause = None
    return type(error).__name__, headline, text, cause


# How values are sent


class _Pickler(pickle.Pickler):
    """Pickles tensors by value, and only their own elements: plain pickle would send the storage, maybe a heap."""

    def reducer_override(self, value):
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
            return NotImplemented
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, value.shape)


def _tensor(content, dtype, shape):
    import torch

    return torch.from_numpy(content).view(dtype).reshape(shape)


def dumps(value) -> bytes:
    """pickle.dumps, with tensors by value."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _loads_or_none(cause: bytes | None):
    try:
        return pickle.loads(cause) if cause is not None else None
    except Exception:  # an exception class may reject the arguments it was pickled with; its text was sent
        return None
