"""What `pip install` puts on a machine: three packages under one name, and nothing beside them."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest


@pytest.fixture(scope="module")
def source(checkout, tmp_path_factory) -> Path:
    """A copy of the checkout, links kept: a build leaves files beside what it builds and picks up those of the last."""
    copy = tmp_path_factory.mktemp("source") / "tkernels"
    leave = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(checkout, copy, symlinks=True, ignore=leave)
    return copy


@pytest.fixture(scope="module", params=["checkout", "sdist"])
def wheel(request, source, tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built without a network from the checkout, and from a source archive of the checkout."""
    out = tmp_path_factory.mktemp("dist")
    what = ["--wheel"] if request.param == "checkout" else []  # without an option: an sdist, then a wheel from it
    command = [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def files(source: Path, pattern: str) -> set[str]:
    """The matching files below the three packages' folders, by the paths that they have once installed."""
    found = {file.relative_to(source).as_posix() for file in (source / "tkernels").rglob(pattern)}
    for name in ("comm", "layers"):
        found |= {f"tkernels/{file.relative_to(source).as_posix()}" for file in (source / name).rglob(pattern)}
    return found


def test_links_are_relative_and_lead_to_the_folders_at_the_top(checkout):
    for name in ("comm", "layers"):
        assert (checkout / "tkernels" / name).readlink() == Path("..", name)
        assert (checkout / "tkernels" / name).resolve() == checkout / name


def test_wheel_holds_every_module_once(wheel, source):
    expected = files(source, "*.py")
    assert {"tkernels/comm/__init__.py", "tkernels/layers/__init__.py"} <= expected
    assert sorted(name for name in wheel.namelist() if name.endswith(".py")) == sorted(expected)


def test_wheel_holds_nothing_else_at_top_level(wheel):
    top = {PurePosixPath(name).parts[0] for name in wheel.namelist()}
    (info,) = (name for name in top if name.endswith(".dist-info"))
    assert top - {info} == {"tkernels"}


def test_wheel_holds_the_data_files(wheel, source):
    held = {name for name in wheel.namelist() if not name.endswith(".py") and ".dist-info/" not in name}
    assert held == files(source, "*.jsonl")
    assert "tkernels/data/tuned.jsonl" in held


def test_wheel_offers_the_command_and_the_pytest_plugin(wheel):
    lines = metadata(wheel, "entry_points.txt").split("\n")
    assert lines[lines.index("[console_scripts]") + 1] == "tkernels = tkernels.cli:main"
    assert lines[lines.index("[pytest11]") + 1] == "tkernels = tkernels.testing.plugin"


def test_base_install_asks_for_no_package_of_cuda_and_for_none_that_draws(wheel):
    required = Parser().parsestr(metadata(wheel, "METADATA")).get_all("Requires-Dist")
    base = {line for line in required if "extra ==" not in line}
    assert {"torch<2.14,>=2.11", "triton>=3.6", "numpy>=1.26"} <= base
    assert not [line for line in base if line.startswith(("nv", "cu", "matplotlib"))]
