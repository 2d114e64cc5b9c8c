import atexit
import collections
import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest

import tkernels

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and their children, ignore it

# What somebody has tuned on this machine, or another run of the tests, is none of the tests' business. The ranks'
# processes inherit it.
_cache = tempfile.TemporaryDirectory(prefix="tkernels-tests-")
os.environ["TKERNELS_CACHE"] = _cache.name

# What is there when all tests are collected stays: without the garbage collector it takes half the time until then, and
# a collection that a test or pytest itself asks for need not walk over it.
gc.disable()
atexit.register(gc.unfreeze)  # or nanobind takes the rest for leaks

# Without GPUs, of which a rank wants one for itself, the whole suite runs in as many processes as there are cores. More
# than these would want much memory: each keeps ranks of its own.
MOST_PROCESSES = 4

# Through the interpreter, where all ranks share two cores, a plain run of these takes the smallest number of ranks, and
# of a long table of cases on ranks one in four; `-m exhaustive` takes the rest, a GPU run all. Whether results are
# exact is asked of the smallest number of ranks and the largest.
LONG_TABLE = 4
EXACT = "test_integers_are_exact_in_any_shape_dtype_and_layout"
SAMPLED = {
    "test_all_gather_matmul",
    "test_calls",
    "test_channel",
    "test_collectives",
    "test_context",
    "test_copies",
    "test_cublasmp",
    "test_ddp",
    "test_demo",
    "test_device",
    "test_float8",
    "test_grad_bucket",
    "test_layers",
    "test_matmul_reduce_scatter",
    "test_operators",
    "test_p2p",
    "test_parallelize",
    "test_pipeline",
    "test_pipeline_composed",
    "test_several_weights",
    "test_trace",
    "test_userbuffers",
    "test_userbuffers_gemm",
    "test_userbuffers_layers",
    "test_zero",
}


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout that these tests belong to."""
    return Path(__file__).resolve().parent.parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at its options
def pytest_cmdline_main(config):
    option = config.option
    # Each process collects all tests and starts its own ranks, which takes longer than some of the tests do.
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not option.keyword
    whole = whole and option.markexpr in config.getini("addopts")
    watched = option.usepdb or option.trace or option.capture == "no"
    decided = getattr(option, "numprocesses", 0) is not None or "PYTEST_XDIST_WORKER" in os.environ
    if whole and tkernels.RUNTIME == "simulated" and not watched and not decided:
        processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
        option.numprocesses, option.dist = processes if processes > 1 else 0, "worksteal"
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # after the collection; called in pytest-xdist's first process, too, which has none
def pytest_runtestloop():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items):
    if tkernels.RUNTIME != "simulated":
        return
    cases = collections.defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("ranks")
        if item.path.stem not in SAMPLED or marker is None or item.get_closest_marker("exhaustive"):
            continue
        ranks = item.callspec.params["_tkernels_ranks"]
        if item.originalname == EXACT and ranks in (min(marker.args), max(marker.args)):
            continue
        if ranks == min(marker.args):
            cases[item.function, item.callspec.params.get("reduction")].append(item)  # a table of each operation
        else:
            item.add_marker("exhaustive")
    for table in cases.values():
        if len(table) > LONG_TABLE:
            for number, item in enumerate(table):
                if number % 4:
                    item.add_marker("exhaustive")
