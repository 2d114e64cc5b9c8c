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

# Not concurrent.futures.ProcessPoolExecutor: its semaphores have names in /dev/shm, its workers end with a traceback of
# their own if the program can't be imported, and it waits without end for a worker that was killed in mid-answer.

import contextlib
import faulthandler
import fcntl
import gc
import inspect
import io
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.spawn
import multiprocessing.util
import numbers
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

START_TIMEOUT_S = 300.0  # importing torch, joining the group, allocating the heap; many ranks may share few cores
CLOSE_TIMEOUT_S = 30.0  # freeing the heap and leaving the interpreter
STACKS_TIMEOUT_S = 5.0  # for ranks to write their stacks and end
GRACE_S = 0.5  # after the first failure that is reported: time for the one that caused it to be reported too
RANKS_OF_A_CORE = 4  # simulated ranks: with 8 a step of the demo takes 50 s on two cores, with 4 it takes 8 s
MOST_RANKS = 1024  # on one machine
STACK_SIGNAL = signal.SIGUSR1
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
    Context by ``tkernels.init(**ctx_options)``. More ranks than GPUs, which TKERNELS_SHARE_GPUS=1 allows, share them
    equally (3 ranks use one of two), and all of torch's collectives go through the host, by gloo. A script that calls
    this must be a file and needs the usual ``if __name__ == "__main__":``, since the new processes import it.

    Raises RankError with the first failure of a rank, RankTimeoutError if a rank still runs fn after `timeout_s`
    seconds, or has not taken its arguments or sent its result by then. Before a process starts: TypeError or ValueError
    for arguments that make no sense, TypeError for an fn or args that don't pickle, ValueError for more ranks than GPUs
    on the nvshmem runtime. Warns if there are many more simulated ranks than cores.
    """
    with RankPool(ranks, ctx_options=ctx_options) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


def nothing(ctx):
    """For a pool to run that is only to start its ranks."""


def gpus_of(ranks: int) -> int:
    """How many of this machine's GPUs that many ranks use: the most that get as many each, as NVSHMEM wants it."""
    import torch

    return max(gpus for gpus in range(1, torch.cuda.device_count() + 1) if ranks % gpus == 0)


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


class _Rank(NamedTuple):
    """A rank's process, and the parent's ends of what they share."""

    process: subprocess.Popen
    pipe: Connection  # calls out, results in
    alive: Connection  # never used; the kernel kills the rank when it closes
    stacks: io.BufferedRandom  # a file in memory; what faulthandler writes on STACK_SIGNAL, before the process ends


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
        self._ranks: list[_Rank] = []
        self._joined = False
        weakref.finalize(self, _end, self._ranks)  # also when the interpreter ends
        _pools.add(self)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty before the first call, after a failure and after close()."""
        return [rank.process.pid for rank in self._ranks]

    def start(self) -> None:
        """Start the processes, which import torch meanwhile, and don't wait; the first call does what is left."""
        if self._ranks:
            return
        num_threads = max(1, len(os.sched_getaffinity(0)) // self.ranks)
        flags = subprocess._args_from_interpreter_flags()  # of this interpreter, as multiprocessing does
        _open_standard_files()
        # The listener is of the TCPStore that rank 0 serves.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank in range(self.ranks):
                (pipe, its_pipe), (its_alive, alive) = Pipe(), Pipe(False)
                stacks = open(os.memfd_create("stacks"), "r+b")
                with its_pipe, its_alive:
                    files = [end.fileno() for end in (its_pipe, its_alive, stacks)]
                    files += [listener.fileno()] * (rank == 0)
                    place = rank, self.ranks, listener.getsockname()[1], *files
                    path = [*map(str, sys.path)]
                    main = f"import sys; sys.path[:] = {path!r}; from tkernels.launch import _main; _main{place}"
                    process = subprocess.Popen(
                        [multiprocessing.spawn.get_executable(), *flags, "-c", main],
                        env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
                        stdin=subprocess.DEVNULL,
                        pass_fds=files,
                        process_group=0,  # Ctrl-C at a terminal reaches this process alone, which ends the ranks
                    )
                self._ranks.append(_Rank(process, pipe, alive, stacks))

    def run(self, fn, *args, timeout_s: float = 300.0) -> list:
        """Run ``fn(ctx, *args)`` on every rank, as `launch` does; ctx is the same in every call until it has failed."""
        if not callable(fn):
            raise TypeError(f"ranks run a function, fn(ctx, *args), and fn={fn!r} is none")
        if not isinstance(timeout_s, numbers.Real):
            raise TypeError(f"timeout_s={timeout_s!r} must be a number of seconds")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be positive")
        name = getattr(fn, "__qualname__", repr(fn))
        _refuse_what_ranks_cannot_import(fn, name)
        hint = "Pass a function defined at the top of a module, and arguments that pickle."
        call = _pickled((fn, args), f"{name} and its arguments", hint)
        try:
            if not self._joined:
                self._join()
            results, spent = zip(*self._ask(call, timeout_s), strict=True)
        except BaseException:
            self.kill()
            raise
        if any(spent):
            self.kill()
        return [self._unpickled(rank, result) for rank, result in enumerate(results)]

    def _unpickled(self, rank: int, result: bytes):
        try:
            return pickle.loads(result)
        except Exception as error:  # whatever its class raises
            what = f"{type(error).__name__}: {error}"
            headline = f"rank {rank} of {self.ranks}: the result pickles, but does not unpickle: {what}"
            raise RankError(rank, type(error).__name__, "", headline) from error

    def close(self) -> None:
        """Finalize the Context on all ranks and end the processes. Raises RankError when finalizing fails."""
        try:
            if self._joined:
                self._ask(b"", CLOSE_TIMEOUT_S)
                limit = time.monotonic() + CLOSE_TIMEOUT_S
                for rank in self._ranks:  # all have left; none ends before, since rank 0 serves the store
                    rank.pipe.close()
                for rank in self._ranks:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        rank.process.wait(max(0.0, limit - time.monotonic()))
        finally:
            self.kill()

    def kill(self) -> None:
        """End the processes at once. The next run() starts new ones."""
        self._joined = False
        _end(self._ranks)

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc, tb):
        if exc_type is None:
            self.close()
        else:
            self.kill()

    def _join(self) -> None:
        """Start the processes, unless they are, and have them make their contexts."""
        from tkernels.comm.context import init
        from tkernels.comm.runtime import RUNTIME, most_ranks

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
        self.start()
        program = multiprocessing.spawn.get_preparation_data("tkernels-rank")
        program["authkey"] = bytes(program["authkey"])  # its own class refuses to be pickled
        self._ask(pickle.dumps((program, RUNTIME, options)), START_TIMEOUT_S, starting=True)
        self._joined = True

    def _ask(self, message: bytes, timeout_s: float, starting: bool = False) -> list:
        """Send a message to every rank. Returns their answers, or raises the first failure."""
        deadline = time.monotonic() + timeout_s
        for number, rank in enumerate(self._ranks):
            try:
                _bound(rank.pipe, deadline)
                rank.pipe.send_bytes(message)
            except BlockingIOError:
                said = f"rank {number} of {self.ranks} has not taken its arguments after {timeout_s:g} s"
                raise self._timeout(said, [number]) from None
            except (BrokenPipeError, ConnectionResetError):  # from a dead rank, which is found below
                continue
        answers, died = self._collect(deadline)
        if died:  # checked before exceptions: those of other ranks follow from their lost connection
            raise self._death(died[0], starting)
        failed = {rank: at for rank, (at, _) in answers.items() if at is not None}
        if failed:
            rank = min(failed, key=failed.get)
            type_name, headline, text, cause = answers[rank][1]
            headline = f"rank {rank} of {self.ranks}: {headline}"
            raise RankError(rank, type_name, text, headline) from _loads_or_none(cause)
        if len(answers) < self.ranks:
            running = [rank for rank in range(self.ranks) if rank not in answers]
            names = ", ".join(map(str, running))
            said = f"rank{'s' * (len(running) > 1)} {names} of {self.ranks} still running after {timeout_s:g} s"
            if answers and not starting:
                finished = ", ".join(map(str, sorted(answers)))
                said += f", but not {finished}: all ranks must make the same collective calls"
            raise self._timeout(said, running)
        return [answers[rank][1] for rank in range(self.ranks)]

    def _collect(self, deadline: float) -> tuple[dict[int, tuple], list[int]]:
        """Wait for answers until the deadline, or until shortly after the first failure.

        Returns (what `_answer` sent, by rank; the ranks that died).
        """
        answers, died, limit = {}, [], deadline
        while len(answers) + len(died) < self.ranks and (left := limit - time.monotonic()) > 0:
            pending = {self._ranks[r].pipe: r for r in range(self.ranks) if r not in answers and r not in died}
            ready = multiprocessing.connection.wait(list(pending), timeout=min(left, 1.0))
            for pipe, rank in pending.items():
                try:
                    if pipe in ready:
                        _bound(pipe, limit)
                        answers[rank] = pickle.loads(pipe.recv_bytes())
                    elif self._ranks[rank].process.poll() is not None:  # a child of it may hold the pipe open
                        died.append(rank)
                except BlockingIOError:  # it has sent a part of its answer, and no more until the limit
                    return answers, died
                except (EOFError, OSError):  # OSError: in the middle of an answer
                    died.append(rank)
            if limit == deadline and (died or any(at is not None for at, _ in answers.values())):
                limit = min(deadline, time.monotonic() + GRACE_S)
        return answers, died

    def _death(self, rank: int, starting: bool) -> RankError:
        try:
            code = self._ranks[rank].process.wait(10.0)
        except subprocess.TimeoutExpired:
            code = None
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name} before it had finished"
        elif starting:
            how = f"exited with code {code} before it had started; what it printed may say why"
        else:
            how = f"exited with code {code} before it had finished"
        return RankError(rank, "died", "", f"rank {rank} of {self.ranks} {how}")

    def _timeout(self, headline: str, running: list[int]) -> RankTimeoutError:
        """The error, with the stacks of all ranks, which end."""
        for rank in self._ranks:
            rank.process.send_signal(STACK_SIGNAL)
        limit, text = time.monotonic() + STACKS_TIMEOUT_S, ""
        for number, rank in enumerate(self._ranks):
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, limit - time.monotonic()))
            state = "still running" if number in running else "had finished"
            rank.stacks.seek(0)
            stacks = rank.stacks.read().decode(errors="replace").strip()
            text += f"rank {number} ({state}):\n{stacks or '  (no answer: stopped, or still starting)'}\n"
        return RankTimeoutError(running[0], "TimeoutError", text, headline)


_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


def _open_standard_files():
    """Make null of the files 0 to 2 that are closed: ranks inherit these, so nothing that is opened may be one."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)


def _end(ranks: list[_Rank]):
    for rank in ranks:
        if rank.process.poll() is None:  # so that its number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)  # it, and what its program has started
    while ranks:
        process, *ends = ranks.pop()
        process.wait()
        for end in ends:
            end.close()


def _forget_ranks():
    # A forked child has a copy of every pool, but the ranks belong to its parent.
    for pool in _pools:
        pool._joined = False
        pool._ranks.clear()


os.register_at_fork(after_in_child=_forget_ranks)


def _refuse_what_ranks_cannot_import(fn, name: str):
    """Check, before any process starts, that ranks can import fn.

    They import the program, if it is a file and no __main__.py. Raises TypeError if they can't, SystemExit in a process
    that is itself importing the program.
    """
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):  # the check of multiprocessing itself
        raise SystemExit(f"launch was called where a new process imports the program; {GUARD}")  # no traceback per rank
    program = multiprocessing.spawn.get_preparation_data("rank")
    file, module = program.get("init_main_from_path"), program.get("init_main_from_name", "__main__")
    if file is not None and not os.path.exists(file):
        raise TypeError(f"{name} can't be sent to the ranks: they import the program, and {file} is no file")
    if file is None and module.endswith("__main__") and getattr(fn, "__module__", None) == "__main__":
        raise TypeError(f"{name} can't be sent to the ranks: they can't import the program; define it in a module")


def _pickled(value, what: str, hint: str) -> bytes:
    try:
        return dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RecursionError) as error:
        raise TypeError(f"{what} cannot be sent to the ranks: {error}. {hint}") from error


def _bound(pipe: Connection, deadline: float):
    """Let reads and writes of this end, a socket, raise BlockingIOError when they have waited until the deadline."""
    seconds = min(max(deadline - time.monotonic(), 1e-3), 1e6)
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setblocking(True)  # whatever socket.setdefaulttimeout says
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


# Code that runs in a rank


def _main(rank: int, ranks: int, port: int, pipe: int, alive: int, stacks: int, listener: int | None = None):
    """A rank's process: answers messages until the parent closes the pipe. The last four are files."""
    _die_with_parent(alive)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=True)  # then the process ends
    pipe, ctx = Connection(pipe), None
    gc.disable()  # imports take a fifth less time: what they make stays
    with contextlib.suppress(Exception):  # raised again when the rank joins
        import torch  # noqa: F401  (takes seconds, while the parent makes ready)

    def join(message):
        nonlocal ctx
        program, os.environ["TKERNELS_RUNTIME"], options = pickle.loads(message)
        gc.enable()  # before the program, which may say otherwise
        _import_program(program | {"name": f"{program['name']}-{rank}"})
        ctx = _join(rank, ranks, port, listener, pickle.loads(options))
        gc.freeze()  # the collector need not walk over it again

    def run(call):
        result, spent = _call(ctx, *pickle.loads(call))
        try:
            return dumps(result), spent
        except Exception as error:  # whatever a __reduce__ raises
            raise TypeError(
                f"the result, of type {type(result).__qualname__}, can't be sent to the caller: {error}; return what "
                f"pickles, as tensors, numbers and text do"
            ) from error

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        _answer(pipe, join, pipe.recv_bytes())
        while call := pipe.recv_bytes():
            _answer(pipe, run, call)
        _answer(pipe, _leave, ctx)
        pipe.recv_bytes()  # nothing comes, and the parent closes the pipe when all ranks have left
    from tkernels.comm.runtime import RUNTIME

    if RUNTIME == "simulated":
        multiprocessing.util._exit_function()  # the end of managers and daemons, as in processes of multiprocessing
        # A normal exit occasionally aborts: gloo's thread releases a tensor while the interpreter shuts down. On the
        # nvshmem runtime the exit must be a normal one, because NVSHMEM cleans up in it.
        os._exit(0)


def _die_with_parent(alive: int):
    """Have the kernel kill this process as soon as the parent's end of the pipe closes; also if it is stopped or in C.

    Not by prctl(PR_SET_PDEATHSIG), which counts the end of the thread that started this process as the parent's.
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if multiprocessing.connection.wait([alive], timeout=0):  # it closed before
        os._exit(1)


def _import_program(program: dict):
    """Import the program as multiprocessing does in a new process, where an error would end it with a traceback."""
    process = multiprocessing.process.current_process()
    process._inheriting = True  # as there: see _refuse_what_ranks_cannot_import
    try:
        multiprocessing.spawn.prepare(program)
    finally:
        del process._inheriting


def _answer(pipe: Connection, work, *args):
    """Send (None, the result of the work), or (when it failed, how), a description."""
    try:
        answer = None, work(*args)
        _flush()
    except BaseException as error:  # SystemExit and pytest outcomes too: the parent decides what they mean
        answer = time.monotonic(), _describe(error)
        with contextlib.suppress(Exception):
            _flush()
    pipe.send_bytes(pickle.dumps(answer))


def _flush():
    """So that the output is there when the call returns. Raises what the streams do, as for a pipe without a reader."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):  # a daemon has none
            stream.flush()


def _join(rank: int, ranks: int, port: int, listener: int | None, options: dict):
    import torch
    import torch.distributed as dist

    from tkernels import shared_gpus
    from tkernels.comm.context import init
    from tkernels.comm.runtime import RUNTIME

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # whatever MKL_NUM_THREADS or the program says
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine; host names need not resolve
    serve = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener}
    store = dist.TCPStore("127.0.0.1", port, **(serve if rank == 0 else {"is_master": False}))
    if RUNTIME == "nvshmem":
        device = torch.device("cuda", rank % gpus_of(ranks))
        torch.cuda.set_device(device)
        if ranks > torch.cuda.device_count():
            shared_gpus.register()
            backend = {"backend": shared_gpus.BACKEND}
        else:
            backend = {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
        dist.init_process_group(store=store, rank=rank, world_size=ranks, **backend)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    return init(**options)


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
    newest = {tuple(each.group.global_ranks): each for each in (ctx, *sorted(opened, key=lambda each: each.opened))}
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
        if torch is None or type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        return value.detach().cpu().clone(memory_format=torch.contiguous_format).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


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
