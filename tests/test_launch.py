"""launch and RankPool: results and failures come back, and nothing stays behind."""

import contextlib
import importlib.metadata
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
import uuid
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transports import expire_after, starts_ranks

import tkernels
from tkernels import shared_gpus
from tkernels.comm import context as context_module
from tkernels.comm import runtime
from tkernels.launch import RankError, RankPool, RankTimeoutError, _call, _describe, _join, dumps, gpus_of, launch

pytestmark = starts_ranks(2)
launch_module = sys.modules["tkernels.launch"]  # whose name in the package is the function's


@pytest.fixture(scope="module")
def pool():
    """Two ranks; a test that makes them fail costs the next one a start."""
    with RankPool(2) as pool:
        yield pool


def who(ctx):
    return ctx.rank, ctx.size, os.getpid()


def sum_over_ranks(ctx, x, factor):
    x = x.to(ctx.device) * factor**ctx.rank
    dist.all_reduce(x)
    return x


def threads(ctx):
    return torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])


def raise_on_rank_1(ctx, error):
    if ctx.rank == 1:
        raise error
    dist.barrier()


def all_raise_rank_1_first(ctx, failed):
    error = NeedsTwoArguments(f"from rank {ctx.rank}", "and more")
    if ctx.rank == 1:
        error.failed = failed
    while ctx.rank == 0 and not failed.exists():
        time.sleep(0.01)
    raise error


def hang_on_rank_1(ctx):
    if ctx.rank == 1:
        inner = threading.Thread(target=sleep_in_a_thread)
        inner.start()
        inner.join()


def sleep_in_a_thread():
    time.sleep(600)


def die_on_rank_1(ctx):
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def return_a_lambda(ctx):
    return lambda: ctx.rank


def break_finalize(ctx):
    def finalize():
        raise RuntimeError("cannot finalize")

    ctx.finalize = finalize


class NeedsTwoArguments(Exception):
    """Pickles, but does not unpickle: __init__ gets one argument back."""

    failed = None  # a file to be made once the error is on its way, with the time at which it was raised

    def __init__(self, first, second):
        super().__init__(first)

    def __reduce__(self):
        if self.failed:
            self.failed.touch()
        return super().__reduce__()


def return_what_does_not_unpickle(ctx):
    return NeedsTwoArguments("first", ctx.rank)


class DoesNotPickle(Exception):
    def __reduce__(self):
        raise TypeError("never")


def assert_dead(pids):
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_launch_returns_what_each_rank_returned_in_order_of_ranks(monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # which may have no such children
    monkeypatch.setattr(sys, "path", [*sys.path, Path("elsewhere")])  # which Python passes over
    results = launch(who, 2)
    assert [(rank, size) for rank, size, _ in results] == [(0, 2), (1, 2)]
    pids = [pid for _, _, pid in results]
    assert len({os.getpid(), *pids}) == 3
    assert_dead(pids)


def test_a_pool_keeps_its_processes_and_passes_arguments(pool):
    pids = [pid for _, _, pid in pool.run(who)]
    for factor in (2, 3):
        results = pool.run(sum_over_ranks, torch.arange(4.0), factor)
        for result in results:
            assert torch.equal(result, torch.arange(4.0) * (1 + factor))
    assert pids == pool.pids


def test_ranks_share_the_cores(pool):
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert pool.run(threads) == [(share, share)] * 2
    assert os.environ.get("OMP_NUM_THREADS") != str(share) or share == 1


def place(ctx):
    return multiprocessing.current_process().name, sys.argv, sys.path, os.getcwd()


def test_ranks_have_names_and_find_themselves_where_the_program_is(pool):
    here = sys.argv, sys.path, os.getcwd()
    assert pool.run(place) == [("tkernels-rank-0", *here), ("tkernels-rank-1", *here)]


def test_a_fork_leaves_the_ranks_to_its_parent(pool):
    ranks = [pid for *_, pid in pool.run(who)]
    child, left = os.fork(), -1
    if child == 0:
        try:
            pool.close()
            pool.kill()
            left = len(pool.pids)
        finally:
            os._exit(left)
    assert os.waitpid(child, 0) == (child, 0)
    assert [pid for *_, pid in pool.run(who)] == ranks


def test_what_does_not_pickle_is_refused_before_it_is_sent(pool):
    pids = pool.pids
    with pytest.raises(TypeError, match=r"<lambda>.*cannot be sent.*top of a module"):
        pool.run(lambda ctx: 0)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for wrong in (torch.ones(1, device="meta"), deep):
        with pytest.raises(TypeError, match="cannot be sent to the ranks"):
            pool.run(print, wrong)
    assert pool.pids == pids, "no rank has seen the call, so all are in step"


@pytest.mark.parametrize(
    "file, said",
    [("/no/such/<stdin>", "they import the program, and /no/such/<stdin> is no file"), (None, "define it in a module")],
    ids=["read from stdin", "typed in"],
)
def test_a_function_of_a_program_that_is_no_file_is_refused_before_a_process_starts(monkeypatch, file, said):
    program = types.ModuleType("__main__")
    program.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", program)
    with pytest.raises(TypeError, match=f"^who can't be sent to the ranks: .*{said}"):
        launch(types.FunctionType(who.__code__, vars(program)), 2)


PROGRAM = """
import importlib, os, sys
from tkernels.launch import RankError, launch

def work(ctx):
    pass

if __name__ != "__main__":
    if os.environ["CASE"] == "guard":
        launch(work, 1)
    importlib.import_module(os.environ["CASE"])

if __name__ == "__main__":
    for os.environ["CASE"] in ("damaged", "nowhere", "guard"):
        try:
            launch(work, 1, timeout_s=150)
        except RankError as error:
            print(error.headline, "from", type(error.__cause__).__name__)
"""


def test_launch_shows_what_a_rank_raised_while_it_imported_the_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "damaged.py").write_text("1 +")
    root = str(Path(__file__).parent.parent)
    ran = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    damaged, nowhere, guard = (line.removeprefix("rank 0 of 1: ") for line in ran.stdout.splitlines())
    assert damaged == "SyntaxError: invalid syntax (damaged.py, line 1) from SyntaxError"
    assert nowhere == "ModuleNotFoundError: No module named 'nowhere' from ModuleNotFoundError"
    assert guard.startswith("SystemExit: launch was called where a new process imports the program; ranks import the")
    assert 'belongs under `if __name__ == "__main__":`' in guard and ran.stderr == ""


COLLECTOR = """
import gc, os
from tkernels.launch import launch

def collects(ctx):
    return gc.isenabled()

def choose():
    if os.environ["CASE"] == "without":
        gc.disable()

if __name__ == "__main__":
    for os.environ["CASE"] in ("with", "without"):
        choose()
        print(*launch(collects, 1), gc.isenabled())
else:
    choose()
"""


def test_launch_leaves_the_collector_as_the_program_has_it(tmp_path):
    (tmp_path / "program.py").write_text(COLLECTOR)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "program.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert ran.stdout == "True True\nFalse False\n", ran.stderr


STANDARD_FILES = """
import os
from pathlib import Path
from tkernels.launch import launch

def standard_files(ctx):
    return [os.path.realpath(f"/proc/self/fd/{file}") for file in range(3)]

if __name__ == "__main__":
    try:
        said = launch(standard_files, 1, timeout_s=150)
    except Exception as error:
        said = error
    Path("said").write_text(str(said))
"""


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_launch_in_a_process_whose_standard_files_are_closed_gives_ranks_null(tmp_path, closed):
    (tmp_path / "program.py").write_text(STANDARD_FILES)
    root = str(Path(__file__).parent.parent)
    command = f"exec {sys.executable} program.py >/dev/null 2>&1 {closed}"
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, timeout=600)
    assert (tmp_path / "said").read_text() == str([["/dev/null"] * 3])


@pytest.mark.parametrize(
    "arguments, options, error, said",
    [
        ((None, 2), {}, TypeError, "ranks run a function, fn.ctx, .args., and fn=None is none"),
        ((who, 10**30), {}, ValueError, "at least 1 rank, and at most 1024, got 10*"),
        ((who, 2), {"timeout_s": "5"}, TypeError, "timeout_s='5' must be a number of seconds"),
        ((who, 2), {"timeout_s": float("nan")}, ValueError, "timeout_s=nan must be positive"),
        ((who, 2), {"ctx_options": ["heap_bytes"]}, TypeError, "ctx_options=.* must be a dictionary of init"),
        ((who, 2), {"ctx_options": {"heap": 1}}, TypeError, "ctx_options: init.. has no 'heap'"),
        ((who, 2), {"ctx_options": {"transport": lambda: 1}}, TypeError, "ctx_options cannot be sent to the ranks"),
    ],
)
def test_launch_refuses_what_makes_no_sense_before_a_process_starts(monkeypatch, arguments, options, error, said):
    monkeypatch.setattr(RankPool, "start", lambda pool: 1 // 0)
    with pytest.raises(error, match=said):
        launch(*arguments, **options)


def pool_of_one_pipe(monkeypatch):
    """A pool of a rank that is no process, and the rank's end of its pipe."""
    pool, (pipe, rank_pipe) = RankPool(1), multiprocessing.Pipe()
    process = types.SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(pool, "_ranks", [types.SimpleNamespace(process=process, pipe=pipe)])
    monkeypatch.setattr(pool, "_timeout", lambda said, running: RankTimeoutError(running[0], "TimeoutError", "", said))
    return pool, rank_pipe


def test_launch_bounds_what_goes_through_the_pipes(monkeypatch):
    """A rank that takes nothing of its arguments, and one that sends half of its result, as if they were stopped."""
    pool, rank_pipe = pool_of_one_pipe(monkeypatch)
    with pytest.raises(RankTimeoutError, match="^rank 0 of 1 has not taken its arguments after 0.2 s"):
        pool._ask(bytes(1 << 24), 0.2)
    pool, rank_pipe = pool_of_one_pipe(monkeypatch)
    os.write(rank_pipe.fileno(), (1000).to_bytes(4, "big") + b"half")
    with pytest.raises(RankTimeoutError, match="^rank 0 of 1 still running after 0.2 s"):
        pool._ask(b"", 0.2)
    os.write(rank_pipe.fileno(), (1000).to_bytes(4, "big") + b"half")
    rank_pipe.close()
    monkeypatch.setattr(pool, "_death", lambda rank, starting: RankError(rank, "died", ""))
    with pytest.raises(RankError, match="^rank 0: died"):
        pool._ask(b"", 60)


def test_a_pool_that_is_started_and_never_called_ends():
    with RankPool(2) as pool:
        pool.start()
        pids = pool.pids
        assert len(pids) == 2
    assert_dead(pids)


def start_manager(ctx):
    start_manager.kept = multiprocessing.get_context("spawn").Manager()
    return start_manager.kept._process.pid


def has_ended(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()  # nobody may wait for it any more
    except FileNotFoundError:
        return True


def assert_ends(pid: int):
    limit = time.monotonic() + 300
    while not has_ended(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    assert has_ended(pid)


def test_a_pool_that_is_closed_ends_what_its_ranks_have_started():
    with RankPool(1) as pool:
        (pid,) = pool.run(start_manager)
        assert not has_ended(pid)
    assert_ends(pid)


def test_launch_ends_ranks_that_are_stopped_and_what_they_have_started(monkeypatch):
    monkeypatch.setattr(launch_module, "STACKS_TIMEOUT_S", 0.2)
    with RankPool(1) as pool:
        (pid,) = pool.run(start_manager)
        os.kill(pool.pids[0], signal.SIGSTOP)
        with pytest.raises(RankTimeoutError, match=r"(?s)not taken its arguments after 0.5 s.*no answer: stop"):
            pool.run(sum_over_ranks, torch.ones(1 << 24), 1, timeout_s=0.5)
        assert pool.pids == []
    assert_ends(pid)


def without_output(ctx):
    sys.stdout.close()
    sys.stderr = None
    return ctx.rank


def test_launch_needs_no_output(pool):
    assert pool.run(without_output) == [0, 1]


def with_output_for_nobody(ctx):
    reading, writing = os.pipe()
    os.close(reading)
    sys.stdout = os.fdopen(writing, "w")
    print("hello")  # into a buffer
    return ctx.rank


def test_launch_raises_what_is_wrong_with_output_that_could_not_be_written():
    """Ranks ended, for a reason that nobody was told, "before they had finished"."""
    with RankPool(1) as pool:
        with pytest.raises(RankError, match="^rank 0 of 1: BrokenPipeError"):
            pool.run(with_output_for_nobody)
        assert pool.pids == []


def test_the_failure_of_one_rank_ends_the_call_for_all_and_the_pool_starts_anew(pool):
    pool.run(who)
    pids = pool.pids
    begin = time.monotonic()
    with pytest.raises(RankError) as failure:
        pool.run(raise_on_rank_1, KeyError("lost"), timeout_s=600)  # rank 0 waits in a barrier for ever
    assert time.monotonic() - begin < 600, "the limit of the call"
    error = failure.value
    assert (error.rank, error.type_name) == (1, "KeyError")
    assert str(error).startswith("rank 1 of 2: KeyError: 'lost'\n")
    assert "in raise_on_rank_1" in error.traceback_text and "/launch.py" not in error.traceback_text
    assert isinstance(error.__cause__, KeyError) and error.__cause__.args == ("lost",)
    assert_dead(pids)
    pool.start()  # which the next call would do, too
    again = pool.pids
    assert len({*pids, *again}) == 4
    pool.start()
    assert [pid for *_, pid in pool.run(who)] == again


def test_of_several_failures_the_first_in_time_is_raised(pool, tmp_path):
    with pytest.raises(RankError, match="rank 1 of 2: .*NeedsTwoArguments: from rank 1") as failure:
        pool.run(all_raise_rank_1_first, tmp_path / "failed")
    assert failure.value.type_name == "NeedsTwoArguments"
    assert failure.value.__cause__ is None, "it does not unpickle, and must not hide the failure for that"


def test_an_exception_that_does_not_pickle_travels_as_text():
    type_name, headline, text, pickled = _describe(DoesNotPickle("kept as text"))
    assert (type_name, pickled) == ("DoesNotPickle", None)
    assert headline.endswith("DoesNotPickle: kept as text") and headline in text


def test_a_result_that_does_not_pickle_is_the_failure_of_its_rank(pool):
    with pytest.raises(RankError, match="^rank 0 of 2: the result pickles, but does not unpickle: TypeError: .*second"):
        pool.run(return_what_does_not_unpickle)
    said = r"^rank \d of 2: TypeError: the result, of type \w+, can't be sent to the caller: .*return_a_lambda"
    with pytest.raises(RankError, match=said):
        pool.run(return_a_lambda)


def test_a_dead_rank_is_named_although_the_others_fail_as_well(pool):
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL") as failure:
        pool.run(die_on_rank_1)
    assert (failure.value.rank, failure.value.type_name) == (1, "died")


def test_a_hung_rank_is_killed_at_its_limit_and_all_stacks_are_shown(pool):
    pool.run(who)
    pids = pool.pids
    with pytest.raises(RankTimeoutError) as failure:
        pool.run(hang_on_rank_1, timeout_s=5)  # rank 0 has ended by then, and rank 1 begun to sleep
    text = str(failure.value)
    assert text.startswith("rank 1 of 2 still running after 5 s, but not 0: all ranks must make the same")
    finished, hung = text.split("rank 1 (still running):")
    assert "rank 0 (had finished):" in finished and "in recv_bytes" in finished
    assert "in sleep_in_a_thread" in hung and "in hang_on_rank_1" in hung, "all threads"
    assert_dead(pids)


def stop_on_rank_1(ctx):
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_is_killed_at_its_limit_and_the_others_show_their_stacks(pool, monkeypatch):
    monkeypatch.setattr(launch_module, "STACKS_TIMEOUT_S", 1.0)
    pool.run(who)
    with pytest.raises(RankTimeoutError) as failure:
        pool.run(stop_on_rank_1, timeout_s=2)
    finished, stopped = str(failure.value).split("rank 1 (still running):")
    assert "in recv_bytes" in finished and "(no answer: stopped, or still starting)" in stopped


def test_ranks_that_cannot_start_say_why():
    with pytest.raises(RankError, match="rank [01] of 2: ValueError: .*transport='pigeon'"):
        launch(who, 2, ctx_options={"transport": "pigeon"})


def test_a_failure_to_finalize_is_raised_by_close():
    pool = RankPool(1)
    pool.run(break_finalize)
    pids = pool.pids
    with pytest.raises(RankError, match="rank 0 of 1: RuntimeError: cannot finalize"):
        pool.close()
    assert_dead(pids)


def wait_too_long(context, begin_anew):
    """Only rank 0 is told: the other one makes no call."""
    context.barrier()
    expire_after(context, 2.0)
    dist.barrier()
    if context.rank == 0:
        with pytest.raises(tkernels.WaitTimeoutError):
            context.barrier()
            context.check()
    while not context.failed:
        time.sleep(0.02)
    if begin_anew:
        tkernels.init(heap_bytes=4 << 20)
    return "done"


@pytest.mark.ranks(2)
def test_a_failure_counts_unless_the_function_was_told_or_began_anew(ctx):
    assert _call(ctx, who, ()) == (who(ctx), False)
    for begin_anew in (False, True):
        with tkernels.init(heap_bytes=4 << 20) as context:
            if ctx.rank == 0 or begin_anew:
                assert _call(context, wait_too_long, (begin_anew,)) == ("done", True)
            else:
                told = "^the function returned, but its context had failed: barrier: rank 0 waited 2 s"
                with pytest.raises(tkernels.WaitTimeoutError, match=told):
                    _call(context, wait_too_long, (begin_anew,))
            if begin_anew:
                tkernels.finalize()
                with contextlib.suppress(tkernels.WaitTimeoutError):
                    context.finalize()  # which tells rank 1


@pytest.mark.ranks(3)
def test_a_failure_of_a_context_over_fewer_ranks_counts(ctx):
    pair, opened = dist.new_group([0, 1]), []

    def fail(context):
        for _ in range(2):  # of several over the same ranks the newest, whichever is the default one
            opened.insert(0, tkernels.init(pair, heap_bytes=4 << 20, default=False))
        opened[0].barrier()
        expire_after(opened[0], 1.0)
        if context.rank == 0:
            with pytest.raises(tkernels.WaitTimeoutError):
                opened[0].barrier()
                opened[0].check()
        while not opened[0].failed:
            time.sleep(0.02)

    if ctx.rank == 0:
        assert _call(ctx, fail, ()) == (None, False)
    if ctx.rank == 1:
        with pytest.raises(tkernels.WaitTimeoutError, match="its context had failed: barrier: rank 0 waited 1 s"):
            _call(ctx, fail, ())
    for own in opened:
        with contextlib.suppress(tkernels.WaitTimeoutError):
            own.finalize()


def test_launch_joins_ranks_on_gpus_and_opens_their_context_with_its_options(monkeypatch):
    joined, opened, devices = [], [], []
    monkeypatch.setattr(runtime, "RUNTIME", "nvshmem")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: joined.append(options))
    monkeypatch.setattr(context_module, "init", lambda **options: opened.append(options))
    for ranks, backend in ((3, shared_gpus.BACKEND), (2, "cpu:gloo,cuda:nccl")):
        _join(1, ranks, 0, None, {"heap_bytes": 1 << 20})
        assert (joined[-1]["backend"], joined[-1]["rank"], joined[-1]["world_size"]) == (backend, 1, ranks)
        assert opened.pop() == {"heap_bytes": 1 << 20}
    assert [device.index for device in devices] == [0, 1]  # three ranks would share two GPUs unequally
    assert [gpus_of(ranks) for ranks in (1, 2, 3, 4, 5)] == [1, 2, 1, 2, 1]


@pytest.mark.ranks(2)
def test_launch_of_ranks_that_share_gpus_has_torchs_collectives_through_the_host(ctx, monkeypatch):
    """Of tensors on any device: where there are no GPUs, of the host's, taken for those of another."""
    if dist.group.WORLD.bound_device_id is not None:
        pytest.skip("ranks that have GPUs of their own have NCCL, and torch 2.11 wants its like in each new group")
    monkeypatch.setattr(shared_gpus, "HOST", "elsewhere")
    copied, on_host = [], shared_gpus._on_host
    monkeypatch.setattr(shared_gpus, "_on_host", lambda value, copies: copied.append(value) or on_host(value, copies))
    shared_gpus.register()
    group = dist.new_group([0, 1], backend=shared_gpus.BACKEND)

    def staged(collective, *arguments):
        copied.clear()
        work = collective(*arguments, group=group)
        assert copied, f"{collective.__name__} has not gone through the host"
        return work

    x = torch.arange(4.0, device=ctx.device) + ctx.rank
    total, halves, both = x.clone(), x[:2].clone(), [torch.empty_like(x) for _ in range(2)]
    staged(dist.all_reduce, total)
    staged(dist.reduce_scatter_tensor, halves, x)
    staged(dist.all_gather, both, x)
    assert total.tolist() == [1, 3, 5, 7] and halves.tolist() == total.tolist()[2 * ctx.rank :][:2]
    assert [each.tolist() for each in both] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    in_place = x.clone()
    own = in_place[2 * ctx.rank :][:2]
    staged(dist.reduce_scatter_tensor, own, in_place)
    assert own.tolist() == halves.tolist()
    staged(dist.all_gather_into_tensor, in_place, own)
    assert in_place.tolist() == total.tolist()
    staged(dist.all_to_all_single, both[0], x)
    assert both[0].tolist() == ([0, 1, 1, 2], [2, 3, 3, 4])[ctx.rank]
    staged(dist.broadcast, x, 1)
    assert x.tolist() == [1, 2, 3, 4]
    if ctx.rank == 0:
        staged(dist.send, total, 1)
    else:
        waits = staged(dist.irecv, x, 0)
        waits.wait()
        assert x.tolist() == total.tolist()
    mesh = DeviceMesh.from_group(group, ctx.device.type)
    whole = torch.arange(10.0, device=ctx.device).view(5, 2)
    assert torch.equal(distribute_tensor(whole, mesh, [Shard(0)]).full_tensor(), whole)
    model = fully_shard(torch.nn.Linear(3, 5, device=ctx.device), mesh=mesh)
    model(torch.ones(2, 3, device=ctx.device) * (1 + ctx.rank)).sum().backward()
    assert model.weight.grad.full_tensor().eq(3).all()
    wrapped = DistributedDataParallel(torch.nn.Linear(3, 5, device=ctx.device), process_group=group)
    wrapped(torch.ones(2, 3, device=ctx.device) * (1 + ctx.rank)).sum().backward()
    assert wrapped.module.weight.grad.eq(3).all()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("spent", [False, True])
def test_ranks_whose_context_has_failed_serve_no_other_call(monkeypatch, spent):
    pool, killed = RankPool(2), []
    monkeypatch.setattr(pool, "_join", lambda: None)
    answers = [(pickle.dumps("first"), False), (pickle.dumps("second"), spent)]
    monkeypatch.setattr(pool, "_ask", lambda call, timeout_s: answers)
    monkeypatch.setattr(pool, "kill", lambda: killed.append(pool))
    assert pool.run(who) == ["first", "second"]
    assert killed == [pool] * spent


def test_numbers_of_ranks_that_cannot_be_are_refused_and_those_that_cannot_be_borne_warned_of(monkeypatch):
    with pytest.raises(TypeError, match="a number of ranks, got '2'"):
        launch(who, "2")
    with pytest.raises(ValueError, match="at least 1 rank"):
        launch(who, 0)
    many = 4 * len(os.sched_getaffinity(0))
    monkeypatch.setattr(runtime, "RUNTIME", "simulated")
    monkeypatch.setattr(RankPool, "start", lambda pool: 1 // 0)
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match=f"^{many + 1} simulated ranks share "):
        launch(who, many + 1)
    with pytest.raises(ZeroDivisionError), warnings.catch_warnings(action="error"):
        launch(who, many)
    monkeypatch.setattr(runtime, "RUNTIME", "nvshmem")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("TKERNELS_SHARE_GPUS", raising=False)
    with pytest.raises(ValueError, match="3 ranks need 3 GPUs, one each, found 2; .*TKERNELS_RUNTIME=simulated"):
        launch(who, 3)
    monkeypatch.setenv("TKERNELS_SHARE_GPUS", "1")
    with pytest.raises(ZeroDivisionError):
        launch(who, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)], ids=str)
def test_tensors_travel_by_value(dtype, shape):
    x = torch.randint(0, 2, shape).to(dtype)
    y = pickle.loads(dumps({"x": [x]}))["x"][0]
    assert y.dtype == dtype and y.shape == x.shape and torch.equal(x, y)
    y.zero_()  # writable, and not x


def test_a_view_travels_without_the_rest_of_its_storage():
    storage = torch.zeros(1 << 20)
    assert len(dumps(storage.view(1024, 1024)[:, 7])) < 5000
    weight = torch.ones(3, 2, requires_grad=True)
    assert torch.equal(pickle.loads(dumps((weight * 2).t())), torch.full((2, 3), 2.0))


SCRIPT = """
import ctypes, os, signal, sys, time, torch
from tkernels.launch import RankError, RankPool, launch

def work(ctx, x):
    buffer = ctx.empty(1000)
    sys.stdout.write(f"hello from {ctx.rank}\\n")
    with open("/proc/self/maps") as maps:
        return x + ctx.rank, [line for line in maps if "/dev/shm" in line]

def fail(ctx):
    raise ValueError("as asked")

def run_on(ctx):
    buffer = ctx.empty(1000)
    pids = ctx.group.gather(os.getpid())
    if sys.argv[1] == "stopped" and ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    while sys.argv[1] == "stopped" and ctx.rank == 1 and ") T " not in open(f"/proc/{pids[0]}/stat").read():
        pass
    if ctx.rank == 1:
        print("running", flush=True)
    ctypes.PyDLL(None).sleep(600)  # in C, with Python's lock held

if __name__ == "__main__":
    case = sys.argv[1]
    if case == "ends":
        try:
            RankPool(1).run(fail)
        except RankError as error:
            print(error)
        pool = RankPool(2)
        results = pool.run(work, torch.ones(1 << 18))
        assert [maps for _, maps in results] == [[], []]
        print("running", flush=True)  # and ends, with the pool open
    elif case == "starting":
        pool = RankPool(2)
        print("running", flush=True)
        pool.run(run_on)
    else:
        launch(run_on, 2)
"""

TEST_FILE = """
import os, time, pytest

@pytest.mark.ranks(1)
def test_that_leaves_a_pool_idle(ctx):
    pass

@pytest.mark.ranks(2)
def test_that_runs_on(ctx):
    if ctx.rank == 0:
        os.write(2, b"running\\n")
    time.sleep(600)
"""


def processes_with(token: str) -> dict[Path, str]:
    """Command lines of the processes whose environment has `token`."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if token.encode() in (process / "environ").read_bytes():
                found[process] = (process / "cmdline").read_text().replace("\0", " ")
    return found


def shared_files_of(token: str) -> list[str]:
    """What those processes have opened or mapped in /dev/shm that has a name, by which it could stay behind."""
    found = []
    for process in processes_with(token):
        with contextlib.suppress(OSError):
            found += [line for line in (process / "maps").read_text().splitlines() if "/dev/shm/" in line]
            found += [os.readlink(file) for file in (process / "fd").iterdir()]
    return [name for name in found if "/dev/shm/" in name and not name.endswith(" (deleted)")]


def interrupted(parent: subprocess.Popen, again_s: float = 60.0) -> str:
    """What a process writes that ends by Ctrl-C, which comes to its whole group, as a terminal's does.

    It is pressed again if that has changed nothing, as it must where Python has lost it, and says so: in a finalizer,
    or in a callback of a weak reference, it only writes of an exception.
    """
    for times in range(1, 11):
        os.killpg(parent.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            output = parent.communicate(timeout=again_s)[0]
            assert output.count("Exception ignored") == times - 1, f"Ctrl-C was pressed {times} times:\n{output}"
            return output
    raise AssertionError(f"the process has not ended {10 * again_s:g} s after Ctrl-C")


@pytest.mark.parametrize(
    "case, end",
    [
        ("ends", None),
        ("starting", signal.SIGINT),
        ("stopped", signal.SIGKILL),
        ("pytest", signal.SIGINT),
    ],
    ids=["returns", "ctrl-c-while-starting", "killed-with-ranks-that-cannot-answer", "ctrl-c-in-pytest"],
)
def test_no_process_and_no_file_is_left_behind(tmp_path, case, end):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "test_it.py").write_text(TEST_FILE)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    token = uuid.uuid4().hex
    root = str(Path(__file__).parent.parent)
    environment = os.environ | {"TMPDIR": str(temporary), "TKERNELS_TEST_TOKEN": token, "PYTHONPATH": root}
    command = ["script.py", case]
    if case == "pytest":
        installed = importlib.metadata.entry_points(group="pytest11", name="tkernels")
        plugin = [] if installed else ["-p", "tkernels.testing.plugin"]
        command = ["-m", "pytest", "-s", "-p", "no:cacheprovider", *plugin, "test_it.py"]
    parent = subprocess.Popen(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = ""
        while "running\n" not in output:
            line = parent.stdout.readline()
            assert line, f"ended early:\n{output}"
            output += line
        shared = shared_files_of(token)
        if case == "starting":
            time.sleep(0.5)  # well into the start of the ranks' interpreters
        if end == signal.SIGINT:
            output += interrupted(parent)
        else:
            if end is not None:
                parent.send_signal(end)
            output += parent.communicate(timeout=600)[0]
        limit = time.monotonic() + 300
        while (alive := processes_with(token)) and time.monotonic() < limit:
            time.sleep(0.05)
    finally:
        if processes_with(token):
            os.killpg(parent.pid, signal.SIGKILL)
    assert alive == {}
    if end is None:
        assert parent.returncode == 0, output
        assert "hello from 0" in output and "hello from 1" in output and "as asked" in output
    if end == signal.SIGINT:
        lost = output.count("Exception ignored")
        assert output.count("Traceback") - lost <= 1, f"ranks should end silently:\n{output}"
        assert "KeyboardInterrupt" in output
    assert list(temporary.iterdir()) == [] and shared == []
