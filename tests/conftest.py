from pathlib import Path

import pytest

import tkernels

# Systems above the operations: through the interpreter their smallest number of ranks shows what more of them would,
# which all share two cores. The others run by `-m exhaustive`, and always on GPUs.
FEWEST_RANKS = {
    "test_channel",
    "test_cublasmp",
    "test_ddp",
    "test_demo",
    "test_fsdp",
    "test_grad_bucket",
    "test_p2p",
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
    for item in items:
        marker = item.get_closest_marker("ranks")
        if item.path.stem in FEWEST_RANKS and marker and item.callspec.params["_tkernels_ranks"] != min(marker.args):
            item.add_marker("exhaustive")
