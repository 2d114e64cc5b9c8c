"""Imports: one module object a file, light ones, and in one direction, layers -> tkernels -> comm."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def python(code: str, cwd: Path) -> str:
    """Run `code` in a new interpreter that sees `cwd` first, as one started there does; returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ALIASES = """
import sys
{imports}
for name in ("comm", "layers", "comm.errors"):
    assert sys.modules[name] is sys.modules["tkernels." + name], name
    assert sys.modules[name].__name__ == sys.modules[name].__spec__.name == "tkernels." + name, name
assert runtime is sys.modules["tkernels.comm.runtime"]
try:
    import comm.absent
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize("found", ["0.3.9", "0.4.0.dev1", "0.4.1", "0.10.2"])
def test_an_old_nvshmem4py_is_named_with_what_is_needed(monkeypatch, found):
    from tkernels.comm import runtime

    monkeypatch.setattr(runtime.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(runtime.importlib.metadata, "version", lambda name: found)
    reason = runtime.candidates()["nvshmem"]
    if found in ("0.4.1", "0.10.2"):
        assert reason is None
        return
    assert f"nvshmem4py {found} is installed, but 0.4.1 or newer is needed (pip install --upgrade" in reason
    monkeypatch.setattr(runtime, "RUNTIME", "nvshmem")
    with pytest.raises(RuntimeError, match=f"TKERNELS_RUNTIME=nvshmem was asked for, but nvshmem4py {found}"):
        runtime.open_segment(None, 1)


@pytest.mark.quick
@pytest.mark.parametrize("order", ["short name first", "long name first"])
def test_a_checkout_gives_the_same_modules_under_both_names(checkout, order):
    short = ["import comm", "import layers", "import comm.errors", "from comm import runtime"]
    long = ["import tkernels.comm", "import tkernels.layers", "import tkernels.comm.errors"]
    imports = short + long if order == "short name first" else long + short
    assert python(ALIASES.format(imports="\n".join(imports)), checkout) == "No module named 'comm.absent'"


def test_an_install_leaves_other_top_level_names_alone(checkout, tmp_path):
    """Another project's `comm` (Jupyter has one) stays what it was; ours is found in a checkout's root only."""
    if str(checkout) in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        pytest.skip("PYTHONPATH names the checkout, where these names are ours")
    (tmp_path / "comm.py").write_text("")
    lines = [
        "from importlib.util import find_spec",
        "import comm, tkernels.comm",
        "assert comm is not tkernels.comm",
        "print([find_spec(name) for name in ('comm', 'layers', 'tests', 'bench')])",
    ]
    found = python("\n".join(lines), tmp_path)
    assert str(tmp_path / "comm.py") in found
    assert str(checkout) not in found


def test_import_needs_neither_cuda_nor_nvshmem_and_loads_no_tool(tmp_path):
    """The finder stands for a machine without NVSHMEM; no device is visible."""
    lines = [
        "import os, sys",
        "os.environ['CUDA_VISIBLE_DEVICES'] = ''",
        "os.environ.pop('TKERNELS_RUNTIME', None)",
        "class Without:",
        "    def find_spec(self, name, path=None, target=None):",
        "        if name.split('.')[0] == 'nvshmem': raise ModuleNotFoundError(name, name=name)",
        "sys.meta_path.insert(0, Without())",
        "import tkernels, tkernels.comm, tkernels.layers",
        "print(sorted({'nvshmem', 'matplotlib', 'pytest', 'rich'} & set(sys.modules)))",
    ]
    assert python("\n".join(lines), tmp_path) == "[]"


# The rule of imports. It reads the sources, so it sees imports inside functions and holds for modules that cannot be
# imported here.

# The parts of tkernels that stand above the layers.
APPLICATIONS = (
    "__main__", "cli", "demo", "doctor", "examples", "explain_command", "testing", "trace.command", "tune",
    "tune_command",
)  # fmt: skip

# What stands below each folder of layers, beside the files that stand below all of them.
BELOW = {
    "tensor_parallel": (), "data_parallel": ("tensor_parallel",), "pipeline": (), "cublasmp": (),
    "userbuffers": ("tensor_parallel",), "doors": ("tensor_parallel", "data_parallel"),
}  # fmt: skip
BOTTOM = ("lease", "graphs", "owners", "marks", "grad_hooks")


def imported(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports; `from a import b` counts as a.b, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def broken(module: str, source: str) -> list[str]:
    """What `module` (dotted, within tkernels) imports against the rule."""

    def within(name: str, *packages: str) -> bool:
        return any(name == package or name.startswith(package + ".") for package in packages)

    def forbidden(name: str) -> bool:
        if within(name, "nvshmem"):
            return module not in ("tkernels.comm.nvshmem_runtime", "tkernels.comm.device_nvshmem")
        if name.startswith(".") or within(name, "comm", "layers"):
            return True  # modules are imported by their one absolute name
        if within(module, "tkernels.comm"):
            return within(name, "tkernels") and not within(name, "tkernels.comm", "tkernels._alias")
        if within(name, "tkernels.testing"):
            return not within(module, "tkernels.testing")  # the product needs nothing of tests
        above = [f"tkernels.{part}" for part in APPLICATIONS]
        if within(module, *above):
            return False
        if within(module, "tkernels.layers"):
            return within(name, *above) or upwards(name)
        return within(name, *above, "tkernels.layers")

    def upwards(name: str) -> bool:
        """Whether a module of layers imports one that stands above it, or beside it in another folder."""
        here, there = (each.removeprefix("tkernels.layers.").partition(".")[0] for each in (module, name))
        if here in BOTTOM:
            return within(name, "tkernels.layers") and there not in BOTTOM
        return here in BELOW and there in BELOW and there != here and there not in BELOW[here]

    return [name for name in imported(ast.parse(source)) if forbidden(name)]


def sources(checkout: Path) -> Iterator[tuple[str, str]]:
    for folder, package in (("tkernels", "tkernels"), ("comm", "tkernels.comm"), ("layers", "tkernels.layers")):
        for file in (checkout / folder).rglob("*.py"):
            below = file.relative_to(checkout / folder).with_suffix("").parts
            yield ".".join((package, *below)).removesuffix(".__init__"), file.read_text()


@pytest.mark.quick
def test_imports_go_from_layers_to_tkernels_to_comm(checkout):
    assert {module: names for module, text in sources(checkout) if (names := broken(module, text))} == {}


@pytest.mark.quick
@pytest.mark.parametrize(
    "module, line",
    [
        ("tkernels.comm.heap", "import tkernels.gemm"),
        ("tkernels.comm.heap", "from tkernels import gemm"),
        ("tkernels.comm.heap", "def f():\n    from tkernels.layers.tensor_parallel.linear import ColumnParallelLinear"),
        ("tkernels.comm", "import tkernels"),
        ("tkernels.gemm", "from tkernels.layers import linear"),
        ("tkernels", "from tkernels import layers"),
        ("tkernels.gemm", "from tkernels.testing import plugin"),
        ("tkernels.doctor", "from tkernels.testing.compare import normal"),
        ("tkernels.layers.tensor_parallel.linear", "import tkernels.cli"),
        ("tkernels.layers.tensor_parallel.functions", "from tkernels.layers.data_parallel.norms import counts"),
        ("tkernels.layers.cublasmp.plan", "from tkernels.layers import pipeline"),
        ("tkernels.layers.marks", "from tkernels.layers.tensor_parallel import linear"),
        ("tkernels.gemm", "from .tiles import offsets"),
        ("tkernels.gemm", "import comm.heap"),
        ("tkernels.comm.heap", "import nvshmem.core"),
        ("tkernels.doctor", "from nvshmem import core"),
    ],
)
def test_the_rule_sees_a_violation(module, line):
    assert broken(module, line)


@pytest.mark.quick
@pytest.mark.parametrize(
    "module, line",
    [
        ("tkernels.comm.nvshmem_runtime", "import nvshmem.core"),
        ("tkernels.comm.heap", "from tkernels.comm import regions"),
        ("tkernels.gemm", "from tkernels.comm.device import put"),
        ("tkernels.layers.tensor_parallel.linear", "import tkernels"),
        ("tkernels.layers.data_parallel.state_dict", "from tkernels.layers.tensor_parallel import linear"),
        ("tkernels.layers.gradients", "from tkernels.layers.data_parallel import ddp"),
        ("tkernels.demo", "from tkernels.layers import linear"),
    ],
)
def test_the_rule_lets_the_rest_through(module, line):
    assert not broken(module, line)


def test_names_of_other_projects_are_written_in_one_way(checkout):
    wrong = ("cuBlasMp", "CublasMp", "UserBuffers ", "Megatron-lm", "Transformer-Engine ")
    for folder in ("layers", "tkernels", "comm", "tests"):
        for file in (checkout / folder).rglob("*.py"):
            if file != Path(__file__).resolve():
                assert not [name for name in wrong if name in file.read_text()], file
