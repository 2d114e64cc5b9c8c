import collections
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
    "test_matmul_all_reduce",
    "test_matmul_reduce_scatter",
    "test_operators",
    "test_p2p",
    "test_parallelize",
    "test_pipeline",
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


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items):
    if tkernels.RUNTIME != "simulated":
        return
    cases = collections.defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("ranks")
        if item.path.stem not in SAMPLED or marker is None:
            continue
        ranks = item.callspec.params["_tkernels_ranks"]
        if item.originalname == EXACT and ranks in (min(marker.args), max(marker.args)):
            continue
        if ranks == min(marker.args):
            cases[item.function].append(item)
        else:
            item.add_marker("exhaustive")
    for table in cases.values():
        if len(table) > LONG_TABLE:
            for number, item in enumerate(table):
                if number % 4:
                    item.add_marker("exhaustive")
