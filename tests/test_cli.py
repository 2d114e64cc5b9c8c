"""The command line: help, wrong arguments, errors and Ctrl-C. What the commands do: test_demo.py, test_doctor.py."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tkernels import __version__, cli, demo
from tkernels.demo import report
from tkernels.launch import RankError

COMMAND = [sys.executable, "-m", "tkernels.cli"]


@pytest.mark.quick
@pytest.mark.parametrize("command", [(), ("demo",), ("doctor",), ("tune",), ("explain",), ("trace",)], ids=" ".join)
def test_help_ends_with_an_example_that_parses(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    (example,) = re.findall(r"^example: tkernels (.*)$", capsys.readouterr().out, re.MULTILINE)
    cli._parser().parse_args(example.split())


def test_commands_need_no_output_and_say_so_where_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)  # as a daemon's
    monkeypatch.setenv("TKERNELS_CACHE", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", "--export", "-"])
    assert ended.value.code == 2
    assert cli.main(["tune", "--list"]) == 0


EXPLAIN = "explain matmul --shape 8x8x8 --json"


@pytest.mark.parametrize("arguments", ["--help", f"{EXPLAIN} -"])
def test_the_command_whose_reader_has_gone_ends_quietly_with_1(arguments):
    source, sink = os.pipe()
    os.close(source)
    with os.fdopen(sink, "w") as closed:
        done = subprocess.run(
            [*COMMAND, *arguments.split()], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=600,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert done.returncode == 1
    assert not re.search("Traceback|Exception|Errno", done.stderr), done.stderr


@pytest.mark.parametrize("target, said", [("-", "stdout"), ("/dev/full", "'/dev/full'")])
def test_the_command_on_a_full_disk_says_so_in_a_sentence(target, said):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *EXPLAIN.split(), target], stdout=full if target == "-" else subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, timeout=600, env=os.environ | {"PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"tkernels: can't write to {said}: No space left on device")
    assert not re.search("Traceback|Exception", done.stderr), done.stderr


@pytest.mark.quick
def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tkernels {__version__}\n"


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, said",
    [
        ("", "command"),
        ("train", "invalid choice: 'train'"),
        ("demo --ranks 0", "--ranks: takes a whole number of at least 1, not '0'"),
        ("demo --ranks two", "--ranks: takes a whole number of at least 1, not 'two'"),
        ("demo --steps -3", "--steps"),
        ("demo --seed 1.5", "--seed"),
        ("demo --dtype fp64", "invalid choice: 'fp64'"),
        ("demo --dtype fp8 --parallel zero", "--dtype fp8 is of layers that are split, which --parallel zero has none"),
        ("demo --parallel sp", "invalid choice: 'sp'"),
        ("demo --runtime cuda", "invalid choice: 'cuda'"),
        ("demo --plot /no/such/folder/losses.png", "there is no folder /no/such/folder"),
        ("demo --plot -", "--plot: takes a path, not '-'"),
        ("demo --plot losses.foo", "--plot losses.foo: a picture's name ends with one of "),
        ("demo --plot losses", "--plot losses: a picture's name ends with one of "),
        ("demo --json /", "it is a folder"),
        ("doctor --json /no/such/folder/found.json", "there is no folder"),
        ("trace matmul --shape tiny", "invalid choice: 'matmul'"),
        ("trace all_gather", "required: --shape"),
        ("trace all_gather --shape tiny --out -", "takes a path, not '-'"),
        ("doctor --ranks 2", "unrecognized arguments: --ranks 2"),
        ("doctor foo", "unrecognized arguments: foo"),
        ("explain all_gather_matmul", "required: --shape"),
        ("explain gemm --shape 8x8x8", "there is no operation 'gemm'; there are all_gather_matmul, "),
        ("explain matmul --shape 8x8x99999999999999999999", "8x8x99999999999999999999: M, N and K must be at most 1"),
        ("explain matmul --shape 8x8x8 --ranks 4", "matmul is on one rank alone: give the sizes that a rank"),
        ("explain all --shape 8x8x8 --ranks 100000000", "--ranks 100000000: takes at most 1024 ranks"),
        ("explain all --shape 8x8x8 --ranks 1", "one rank multiplies alone: there is nothing to overlap"),
        ("explain all --shape 8x8x8 --gpu nvidia", "--gpu nvidia: name one of NVIDIA H200, NVIDIA H100 80GB HBM3"),
        ("explain all --shape 8x8x8 --gpu 3090", "--gpu 3090: name one of NVIDIA H200, "),
        ("explain all_gather_matmul --shape rs-a", "for all_gather_matmul: give MxNxK, or one of llama8b-qkv, "),
        ("explain all --shape 8x8x8 --gpu A100", "name one of NVIDIA A100-SXM4-80GB, NVIDIA A100-SXM4-40GB; tkernels"),
        ("tune --budget soon", "--budget: takes a number of seconds above 0, not 'soon'"),
        ("tune --layout row", "invalid choice: 'row'"),
        ("tune --list --clear", "not allowed with argument --list"),
        (
            "tune --list --json -",
            "--list is about all that is remembered, and goes without --json; --export PATH writes it as JSON",
        ),
        (
            "tune nosuch --shape 8x8x8 --ranks 1 --dtype fp32 --clear",
            "--clear is about all that is remembered, and goes without OP, --shape, --ranks, --dtype",
        ),
        ("tune --export - --layout NN --budget 3 --grid split=1", "goes without --layout, --budget, --grid"),
    ],
)
def test_a_wrong_argument_gets_one_sentence_and_exit_code_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    command = arguments.partition(" ")[0] if " " in arguments else ""
    assert err.count("\n") == 1 and err.endswith(f"; {f'tkernels {command}'.strip()} --help shows what it takes\n")


def test_demo_without_matplotlib_draws_no_picture_and_refuses_one_that_is_asked_for(monkeypatch, capsys):
    missing = lambda name: None  # noqa: E731
    monkeypatch.setattr(demo, "find_spec", missing)
    monkeypatch.setattr(report, "find_spec", missing)
    assert cli._parser().parse_args(["demo"]).plot is None
    with pytest.raises(SystemExit):
        cli.main(["demo", "--plot", "losses.png"])
    assert 'pip install "tkernels[demo]" brings matplotlib' in capsys.readouterr().err


def fail(options):
    raise RankError(1, "ValueError", "Traceback of the rank\n  ...", "rank 1 of 2: ValueError: M=5 rows don't divide")


@pytest.mark.quick
def test_the_demo_gets_its_arguments(monkeypatch):
    got = []
    monkeypatch.setattr("tkernels.demo.run", lambda options: got.append(options) or 0)
    assert cli.main("demo --parallel zero --ranks 3 --steps 5 --dtype bf16 --seed 7 --no-plot --json -".split()) == 0
    names = ("parallel", "ranks", "steps", "dtype", "seed", "json", "plot")
    assert [getattr(got[0], name) for name in names] == ["zero", 3, 5, "bf16", 7, "-", None]
    cli.main(["demo"])
    assert (got[1].parallel, got[1].ranks, got[1].plot) == ("tp", None, Path("tkernels-demo.png"))


def interrupt(options):
    raise KeyboardInterrupt


@pytest.mark.quick
def test_an_error_is_a_sentence_unless_the_traceback_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("tkernels.demo.run", fail)
    assert cli.main(["demo"]) == 1
    said = "tkernels: rank 1 of 2: ValueError: M=5 rows don't divide (--traceback shows where)\n"
    assert capsys.readouterr() == ("", said)
    assert cli.main(["demo", "--traceback"]) == 1
    assert "Traceback of the rank" in capsys.readouterr().err


@pytest.mark.quick
def test_an_interrupt_is_quiet(monkeypatch, capsys):
    monkeypatch.setattr("tkernels.demo.run", interrupt)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments, code", [("--version", 0), ("tune --budget soon", 2)])
def test_the_package_run_as_a_module_is_the_command(checkout, arguments, code):
    command = [sys.executable, "-m", "tkernels", *arguments.split()]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=600)
    assert done.returncode == code
    said = done.stderr if code else done.stdout
    assert said.startswith("tkernels tune: argument --budget: takes" if code else f"tkernels {__version__}\n")


NO_RUNTIME = ({"TKERNELS_RUNTIME": "cuda"}, "tkernels: TKERNELS_RUNTIME='cuda' is not a runtime")
NO_GPU = (
    {"TKERNELS_RUNTIME": "nvshmem", "CUDA_VISIBLE_DEVICES": ""},
    "tkernels: the nvshmem runtime was asked for, but torch sees no CUDA device",
)


@pytest.mark.parametrize(
    "command, environment, said",
    [
        ("demo", *NO_RUNTIME),
        ("tune", *NO_GPU),
        pytest.param("trace all_gather --shape tiny", *NO_RUNTIME, marks=pytest.mark.exhaustive),
    ],
    ids=["demo", "tune", "trace"],
)
def test_a_runtime_that_cannot_be_used_is_named_with_the_reason(command, environment, said):
    command = [*COMMAND, *command.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_help_and_wrong_arguments_come_at_once_without_torch():
    code = (
        "import sys\nfrom tkernels import cli\ntry:\n    cli.main(['demo', '--ranks', '0'])\n"
        "except SystemExit:\n    print([name for name in ('torch', 'triton', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n", done.stderr
    assert "takes a whole number of at least 1" in done.stderr


def test_ctrl_c_ends_quietly_with_130_and_leaves_no_process(tmp_path):
    options = "demo --runtime simulated --parallel ddp --steps 100000 --no-plot".split()
    process = subprocess.Popen(
        [*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        cwd=tmp_path, env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        for line in process.stdout:
            if line.split()[:1] == ["1"]:  # the first step
                break
        ranks = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err == ""
    assert len(ranks) >= 2
    deadline = time.monotonic() + 300
    while any(running(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in ranks if running(pid)] == []
    assert list(tmp_path.iterdir()) == []


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and waits for whoever reaps orphans
