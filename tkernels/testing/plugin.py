"""pytest plugin: a test marked ``@pytest.mark.ranks(2, 4)`` runs its body on 2 ranks, then on 4.

    @pytest.mark.ranks(2, 4)
    @pytest.mark.parametrize("rows", [1, 64])
    def test_all_gather_keeps_the_order_of_ranks(ctx, rows):
        mine = torch.full((rows, 8), float(ctx.rank), device=ctx.device)
        gathered = tkernels.all_gather(mine, ctx=ctx)
        assert gathered[:: rows, 0].tolist() == list(range(ctx.size))

`ctx` is the rank's Context. `-k 2-ranks` selects the runs on 2 ranks. Fixtures and setup_method run in pytest's
process; their values, and what they set on the test's instance, are sent to the body, so they must pickle; what they
set in os.environ is set in the body too, but what a library read of it on import stays. A body may skip or xfail, if it
does so on every rank. The ranks and their Context are kept between tests; a failure ends them, and the next test starts
new ones. On the nvshmem runtime a test that needs more GPUs than there are is skipped, unless TKERNELS_SHARE_GPUS=1
lets ranks share them. A marked test that can't run on ranks fails by name: an `async def`, a method of
unittest.TestCase, a mark without numbers.

The time limit of a test is that of its marker (``timeout_s=60``), else the ini option ``tkernels_timeout`` (120
seconds). A test that exceeds it fails and shows the stacks of every rank.

pytest loads this module wherever tkernels is installed, so it imports torch and the rest of tkernels only for tests
that are marked.
"""

import ast
import contextlib
import datetime
import functools
import gc
import importlib
import importlib.util
import inspect
import numbers
import operator
import os
import pickle
import sys
import unittest
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from unittest import mock

import pytest

# World sizes whose ranks are kept; the least recently used one is closed first. A start of 4 ranks takes 6 s on two
# cores; on GPUs each rank holds memory.
MAX_POOLS = {"simulated": 4, "nvshmem": 3}

_SIZE = "_tkernels_ranks"  # the parameter that is a test's world size
_POOLS = pytest.StashKey[dict]()
_CLOSE_ERRORS = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addini("tkernels_timeout", "seconds that the body of a test marked `ranks` may take", default="120")


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, timeout_s=None): run the test's body on that many ranks, once for each size; "
        "timeout_s overrides the ini option tkernels_timeout",
    )
    _default_timeout(config)
    config.stash[_POOLS] = {}
    config.stash[_CLOSE_ERRORS] = []


def _default_timeout(config) -> float:
    """The ini option in seconds; raises UsageError for what is no time."""
    text = config.getini("tkernels_timeout")
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise pytest.UsageError(f"tkernels_timeout = {text}: the ini option is a positive number of seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and _mistake(marker) is None:
        metafunc.fixturenames.append(_SIZE)
        metafunc.parametrize(_SIZE, marker.args, ids=[f"{size}-ranks" for size in marker.args])


@pytest.fixture
def ctx(request):
    """The rank's Context, in the body of a test marked `ranks`."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail("ctx is the Context of a rank: mark the test with @pytest.mark.ranks(...)", pytrace=False)
    return _ContextOfTheRank()


class _ContextOfTheRank:
    """Placeholder for ctx in pytest's own process, where there is no rank."""

    def __getattr__(self, name):
        raise AttributeError(f"ctx.{name}: ctx exists on the ranks only, in the body of the test and not in a fixture")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    marker = item.get_closest_marker("ranks")
    if marker is None or not isinstance(item, pytest.Function):
        return
    if (reason := _mistake(marker) or _unfit(item)) is not None:
        pytest.fail(reason, pytrace=False)
    from tkernels.comm.runtime import most_ranks

    needed, found = item.callspec.params[_SIZE], most_ranks()
    if found < needed:
        pytest.skip(f"needs {needed} GPUs, found {found}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    from tkernels.launch import RankError

    timeout_s = marker.kwargs.get("timeout_s")
    timeout_s = _default_timeout(pyfuncitem.config) if timeout_s is None else timeout_s
    taken = inspect.signature(pyfuncitem.function).parameters
    given = {name: value for name, value in pyfuncitem.funcargs.items() if name in taken}
    values = _pickled("the value of fixture", given)
    state = _pickled("the attribute", vars(pyfuncitem.instance) if pyfuncitem.cls else {})
    pool, environment = _pool(pyfuncitem)
    owner = pyfuncitem.cls.__qualname__ if pyfuncitem.cls else ""
    module = pyfuncitem.module.__name__, pyfuncitem.module.__file__
    body = owner, pyfuncitem.originalname, values, state
    try:
        ends = pool.run(_run_body, sys.path, module, body, environment, timeout_s=timeout_s)
    except RankError as error:
        marks = pyfuncitem.iter_markers("xfail")
        if isinstance(error.__cause__, tuple(mark.kwargs["raises"] for mark in marks if mark.kwargs.get("raises"))):
            raise error.__cause__ from None
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    if any(ends):
        rank, (kind, reason) = next((rank, end) for rank, end in enumerate(ends) if end)
        others = [rank for rank, end in enumerate(ends) if not end or end[0] != kind]
        if not others:
            {"skip": pytest.skip, "xfail": pytest.xfail}[kind](reason)
        words = {"skip": "skipped", "xfail": "failed as expected"}[kind]
        failure = f"rank {rank} {words} ({reason}), but ranks {others} did not; {kind} on every rank or on none"
        pytest.fail(failure, pytrace=False)
    return True


def pytest_sessionfinish(session):
    pools = session.config.stash[_POOLS]
    while pools:
        _close_oldest(session.config)
    errors = session.config.stash[_CLOSE_ERRORS]
    if errors and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if hasattr(session.config, "workeroutput"):  # this is a worker of pytest-xdist: the process that reports is another
        session.config.workeroutput[_SIZE] = errors


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    node.config.stash[_CLOSE_ERRORS] += getattr(node, "workeroutput", {}).get(_SIZE, [])


def pytest_terminal_summary(terminalreporter, config):
    for error in config.stash[_CLOSE_ERRORS]:
        terminalreporter.section("ranks failed to finalize after their tests", red=True)
        terminalreporter.write_line(error)


def _mistake(marker) -> str | None:
    """What is wrong with a marker's arguments; such a test fails by itself, and the others of its module run."""
    sizes, unknown, timeout_s = marker.args, set(marker.kwargs) - {"timeout_s"}, marker.kwargs.get("timeout_s")
    timed = timeout_s is None or isinstance(timeout_s, numbers.Real) and timeout_s > 0
    if sizes and timed and not unknown and all(type(size) is int and size >= 1 for size in sizes):
        return None
    options = [repr(size) for size in sizes] + [f"{name}={value!r}" for name, value in marker.kwargs.items()]
    return (
        f"@pytest.mark.ranks({', '.join(options)}): give one or more numbers of ranks, and timeout_s=seconds "
        "if need be, as in @pytest.mark.ranks(2, 4, timeout_s=60)"
    )


def _unfit(item) -> str | None:
    """Why a test's body can't run on ranks."""
    if item.cls is not None and issubclass(item.cls, unittest.TestCase):
        return (
            f"{item.cls.__name__}.{item.name}: @pytest.mark.ranks has no effect in a unittest.TestCase, whose methods "
            "run in one process; make it a function, or a method of a plain class"
        )
    return None


def _pool(item):
    """(the ranks of a test, what has changed in this process's environment since they started, None if deleted)."""
    from tkernels.comm.runtime import RUNTIME
    from tkernels.launch import RankPool

    pools, ranks = item.config.stash[_POOLS], item.callspec.params[_SIZE]
    pool, inherited = pools.pop(ranks, (None, {}))
    if pool is None:
        pool = RankPool(ranks)
        while len(pools) >= MAX_POOLS[RUNTIME]:
            _close_oldest(item.config)
    now = dict(os.environ)
    if not pool.pids:  # they start in this test
        inherited = now
    pools[ranks] = pool, inherited  # the most recently used one last
    return pool, {name: now.get(name) for name in inherited | now if now.get(name) != inherited.get(name)}


def _close_oldest(config):
    from tkernels.launch import RankError

    pools = config.stash[_POOLS]
    try:
        pool, _ = pools.pop(next(iter(pools)))
        pool.close()
    except RankError as error:  # not attributable to one test: reported at the end of the session
        config.stash[_CLOSE_ERRORS].append(str(error))


def _pickled(what: str, named: dict) -> dict[str, bytes | None]:
    """Values, each pickled separately; None stands for ctx."""
    from tkernels.launch import dumps

    found = {}
    for name, value in named.items():
        if isinstance(value, pytest.MonkeyPatch):
            value = pytest.MonkeyPatch()  # what fixtures have patched by it is not the body's to undo
        try:
            found[name] = None if isinstance(value, _ContextOfTheRank) else dumps(value)
        except Exception as error:  # a value's own __reduce__ can raise anything
            raise pytest.fail.Exception(
                f"{what} {name!r} ({type(value).__name__}) cannot be sent to the ranks: {error}. Fixtures run in "
                "pytest's process; make this value in the body of the test, or let the fixture return one that "
                "pickles.",
                pytrace=False,
            ) from None
    return found


# Code that runs in a rank


def _run_body(ctx, import_path, module, body, environment) -> tuple[str, str] | None:
    """Run a test's body. Returns ("skip" or "xfail", the reason) if it ended so.

    body: the qualified name of its class, or "", that of the function, its arguments, and its instance's attributes.
    environment: what it finds changed in os.environ; None for what is not there.
    """
    sys.path[:] = import_path
    _share_gloos_thread()
    place, (owner, function, *given) = _load(*module), body
    values, state = ({name: ctx if value is None else pickle.loads(value) for name, value in g.items()} for g in given)
    if owner:
        place = operator.attrgetter(owner)(place)()
        vars(place).update(state)
    body = getattr(place, function)
    with mock.patch.dict(os.environ):  # back to what it was, whatever the body does
        for variable, value in environment.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        try:
            made = body(**values)
            if isinstance(made, (Coroutine, AsyncIterator)):  # also behind a decorator that is none
                with contextlib.suppress(AttributeError):
                    made.close()  # else Python warns of it
                raise TypeError(
                    f"{function} is `async def`, which ranks don't run: make it a `def` that calls asyncio.run(...)"
                )
        except pytest.skip.Exception as skipped:
            return "skip", skipped.msg or "skipped"
        except pytest.xfail.Exception as failed:
            return "xfail", failed.msg or "as expected"
        finally:  # pytest undoes a MonkeyPatch only in its own process, and the changes were made in this one
            for value in values.values():
                if isinstance(value, pytest.MonkeyPatch):
                    value.undo()
    return None


@functools.cache
def _share_gloos_thread():
    """Let this rank's process groups of gloo share a device from now on.

    Each one's has a thread that wakes up 100 times a second, and torch keeps the groups that bodies make: those of a
    long suite took about half of its time.
    """
    from torch.distributed import ProcessGroupGloo as Gloo
    from torch.distributed.distributed_c10d import default_pg_timeout

    from tkernels.comm.group import gloo_device

    make = Gloo.__init__

    def init(self, store, rank, size, timeout=default_pg_timeout):
        options = timeout  # or options, as the group of meetings passes them
        if isinstance(timeout, datetime.timedelta):
            options = Gloo._Options()
            options._devices, options._threads, options._timeout = [gloo_device()], 2, timeout
        make(self, store, rank, size, options)

    Gloo.__init__ = init


def _load(name: str, path: str):
    """Load module `name` from file `path`: a test module need not be importable, and two may share a name.

    Its asserts are pytest's rewritten ones, so that one that fails on a rank shows its values.
    """
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == path:
        return module
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
    code = _rewritten(Path(path))
    sys.modules[name] = module
    gc.disable()  # imports take a fifth less time: what they make stays
    try:
        exec(code, vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        gc.enable()
    return module


def _rewritten(path: Path):
    """A test module's code. pytest's process has rewritten it too, and mostly left the result on disk."""
    source = path.read_bytes()
    try:  # none of these is public; without them asserts work, but show less
        from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, get_cache_dir, rewrite_asserts

        found = _read_pyc(path, get_cache_dir(path) / (path.stem + PYC_TAIL), trace=lambda _: None)
    except (ImportError, TypeError):
        return compile(source, path, "exec", dont_inherit=True)
    if found is None:
        tree = ast.parse(source, str(path))
        rewrite_asserts(tree, source, str(path))
        found = compile(tree, str(path), "exec", dont_inherit=True)
    return found
