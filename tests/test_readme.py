"""README and the guides are true: their examples run, their links lead somewhere, the tree names every file."""

import collections
import contextlib
import importlib.util
import os
import pydoc
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transports import forget_choices

import tkernels
import tkernels.launch  # noqa: F401  (pytester drops modules that a run imports)
import tkernels.layers
from tkernels import cli
from tkernels.variants import variants

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FOLDERS = (
    "comm", "tkernels", "layers", "layers/tensor_parallel", "layers/data_parallel", "layers/pipeline",
    "layers/userbuffers", "layers/cublasmp", "layers/doors", "bench",
)  # fmt: skip
GUIDES = {f"{folder}/README.md": (ROOT / folder / "README.md").read_text() for folder in FOLDERS}
SHORTENED = {  # a line for the folder
    "tkernels/demo",
    "tkernels/testing",
    "tkernels/trace",
    "layers/userbuffers",
    "layers/cublasmp",
    "layers/doors",
    "layers/zero",
}


def blocks(language: str, *texts: str) -> list[str]:
    """The fenced blocks in that language, of README or of other texts."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", "\n".join(texts or [README]), re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def tree() -> set[str]:
    block = next(block for block in blocks("") if "runtime.py" in block)
    paths, folder = set(), ""
    for line in block.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
        paths.add(name.rstrip("/") if not line.startswith(" ") else folder + name.rstrip("/"))
    return paths


def sources() -> set[str]:
    found = set()
    for folder in ("comm", "tkernels", "layers", "bench"):
        found.add(folder)
        for path in (ROOT / folder).iterdir():
            name = path.relative_to(ROOT).as_posix()
            package = path.is_dir() and not path.is_symlink() and (path / "__init__.py").exists()
            if package or (path.suffix == ".py" and path.name != "__init__.py"):
                found.add(name)
    return found | {f"tests/{path.name}" for path in (ROOT / "tests").glob("*.py") if not path.match("test_*.py")}


def test_the_tree_names_every_source_file_and_no_other():
    named = {path for path in tree() if path.endswith(".py") or path in sources() | SHORTENED}
    assert named == sources()
    assert all((ROOT / path).exists() for path in tree() - {"bench/results"})


@pytest.mark.quick
@pytest.mark.parametrize("path", ["README.md", *GUIDES])
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(ROOT / path)):
        file, _, anchor = link.partition("#")
        target = (ROOT / path).parent / file if file else ROOT / path
        assert target.exists() and (not anchor or anchor in anchors(target)), link


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_readme_leads_to_every_guide():
    assert all(f"]({path})" in README for path in GUIDES)


def test_the_example_runs(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(blocks("python")[0])
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    errors = [float(error) for error in re.search(r"\[(.*)\]", done.stdout).group(1).split(",")]
    assert len(errors) == 2 and max(errors) < 1e-5


def test_the_example_is_fifteen_lines_of_code():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 15


EXAMPLES = {  # what stands in a function that is run on several ranks, by the first name that it imports
    re.search(r"from tkernels\.layers(?:\.\w+)? import (\w+)", block).group(1): block
    for block in blocks("python", *GUIDES.values())
    if re.search(r"^def \w+\(ctx\)", block, re.MULTILINE) and "from tkernels.layers" in block
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_on_several_ranks_run(ctx, name):
    names = {}
    exec(compile(EXAMPLES[name], f"guide, {name}", "exec"), names)
    function = names[re.search(r"^def (\w+)\(ctx\)", EXAMPLES[name], re.MULTILINE).group(1)]
    # The default context, as it would be in a program; slots of 32 MiB fit.
    with tkernels.init(ctx.group.process_group, heap_bytes=1 << 30) as own:
        function(own)
        own.check()


def test_every_system_has_an_example():
    systems = ["P2PCommunicator", "forward_backward_pipelining", "fully_shard", "ZeroOptimizer", "OverlappedDDP"]
    others = ["ColumnParallelLinear", "shim", "userbuffers", "Matmul", "fsdp2", "symm_mem"]
    assert set(EXAMPLES) == {"ColwiseParallel", "ParallelMLP", "parallelize", *systems, *others}


@pytest.mark.ranks(2)
def test_the_example_of_a_kernel_runs(ctx, tmp_path):
    (block,) = (block for block in blocks("python", GUIDES["comm/README.md"]) if "@triton.jit" in block)
    path = tmp_path / f"shift_{ctx.rank}.py"  # Triton reads a kernel's source from its file
    path.write_text(block)
    names = runpy.run_path(str(path))
    with tkernels.init(ctx.group.process_group, heap_bytes=1 << 20) as own:
        assert names["shift"](own) == [10.0 * (1 - ctx.rank) + i for i in range(5)]


MIGRATIONS = {  # (what the other has, the code that takes its place)
    name: re.findall(r"^\| (.*`.+`.*) \| `(.+)` \|$", section, re.MULTILINE)
    for name, section in re.findall(
        r"^## Coming from (torch|Megatron)\n(.*?)(?=^## )", GUIDES["layers/README.md"], re.M | re.S
    )
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MIGRATIONS)
def test_the_code_of_the_tables_of_migration_runs(ctx, name):
    class Block(nn.Sequential):
        def __init__(self):
            super().__init__(collections.OrderedDict(up=nn.Linear(8, 16), down=nn.Linear(16, 8)))

    mesh, made = init_device_mesh(ctx.device.type, (ctx.size,)), []
    x, weight = torch.ones(4, 8, device=ctx.device), torch.ones(6, 8, device=ctx.device)
    names = {name: getattr(tkernels.layers, name) for name in tkernels.layers.__all__}
    names |= dict(mesh=mesh, Block=Block, x=x, weight=weight, torch=torch, tkernels=tkernels)
    names |= dict(microbatches=[(x, torch.ones(4, 1, device=ctx.device))] * 2, loss=nn.functional.mse_loss)
    for _, code in MIGRATIONS[name]:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block()).to(ctx.device)
        parts = nn.Linear(8, 8, device=ctx.device), model, nn.Linear(8, 1, device=ctx.device)
        with tkernels.init(ctx.group.process_group, heap_bytes=1 << 30):  # as a program's own
            made.append(eval(code, names | dict(model=model, parts=parts)))
            if isinstance(made[-1], nn.Module):
                made[-1](x)


def test_tables_of_migration_name_what_there_is():
    """So far as it is installed."""
    assert [len(rows) for rows in MIGRATIONS.values()] == [10, 14]
    for left, _ in sum(MIGRATIONS.values(), []):
        for name in re.findall(r"`((?:torch|megatron)\.\S+)`", left):
            if importlib.util.find_spec(name.partition(".")[0]):
                assert pydoc.locate(name) is not None, name


def test_the_example_of_leases_runs():
    (block,) = (block for block in blocks("python", GUIDES["layers/README.md"]) if "Slot(" in block)
    exec(compile(block, "layers/README.md, leases", "exec"), {})


@pytest.mark.quick
def test_explain_prints_the_table_of_the_guide(capsys):
    guide = GUIDES["tkernels/README.md"]
    (command,) = (block for block in blocks("sh", guide) if "tkernels explain" in block)
    assert cli.main(command.split()[1:]) == 0
    printed = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    for row in re.findall(r"^\| (.+) \|$", guide.partition("| way |")[2].partition("\n\n")[0], re.MULTILINE)[1:]:
        assert [cell.strip() for cell in row.split("|") if cell.strip()] in printed, row


@pytest.mark.ranks(2)
def test_the_example_of_tuning_runs(ctx, tmp_path):
    (block,) = (block for block in blocks("python", GUIDES["tkernels/README.md"]) if "tkernels.tune(" in block)
    names, tune = {}, importlib.import_module("tkernels.tune")  # whose name in the package is the function's
    exec(compile(block, "tkernels/README.md, tuning", "exec"), names)
    few = lambda *problem: (variants(*problem)[0][:3], collections.Counter())  # noqa: E731
    with mock.patch.dict(os.environ, TKERNELS_CACHE=str(tmp_path)), mock.patch.object(tune, "variants", few):
        change, us, default_us, refused = names["find"](ctx)
    assert isinstance(change, str) and 0 < us <= default_us
    assert len((tmp_path / "tuned.jsonl").read_text().splitlines()) == 1
    forget_choices(ctx)


@pytest.mark.ranks(2)
def test_the_example_of_fp8_runs(ctx):
    (block,) = (block for block in blocks("python", GUIDES["tkernels/README.md"]) if "gathered, scales" in block)
    names = {}
    exec(compile(block, "tkernels/README.md, FP8", "exec"), names)
    y, again = names["multiply"](ctx)
    assert y.shape == (32 * ctx.size, 48)
    torch.testing.assert_close(y, again)


@pytest.mark.ranks(2)
def test_the_example_of_traces_runs(ctx, tmp_path):
    (block,) = (block for block in blocks("python", GUIDES["tkernels/README.md"]) if "tkernels.tracing(" in block)
    names = {}
    exec(compile(block, "tkernels/README.md, traces", "exec"), names)
    with tkernels.init(ctx.group.process_group, heap_bytes=256 << 20) as own, contextlib.chdir(tmp_path):
        assert 0 <= names["record"](own) <= 1
    assert (tmp_path / "trace.json").exists() or ctx.rank > 0


def test_the_example_of_a_test_passes(pytester):
    example = next(block for block in blocks("python") if "pytest.mark.ranks" in block)
    pytester.makepyfile("import pytest\nimport tkernels\nimport torch\n\n\n" + example)
    # Through the interpreter, the plugin's own tests have the other number of ranks.
    fewer = ["-k", "2-ranks"] if tkernels.RUNTIME == "simulated" else []
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", *fewer)
    result.assert_outcomes(passed=2 - bool(fewer), deselected=bool(fewer))


def test_the_table_of_variables_names_each_that_is_read():
    paths = [path for folder in ("comm", "tkernels", "layers") for path in (ROOT / folder).rglob("*.py")]
    read = set(re.findall(r'"(TKERNELS_[A-Z_]+)"', "".join(path.read_text() for path in paths)))
    assert read == set(re.findall(r"^\| `(TKERNELS_[A-Z_]+)=", README, re.MULTILINE))


@pytest.mark.quick
def test_the_commands_are_there():
    assert any("pip install -e . && tkernels demo" in block for block in blocks("sh"))
    assert any('pip install -e ".[test]" && pytest' in block for block in blocks("sh"))
