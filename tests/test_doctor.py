"""The doctor: what it finds here, that it tries everything, and that it says what is broken."""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from transports import starts_ranks

import tkernels
from tkernels import cli, doctor
from tkernels.comm import runtime
from tkernels.launch import RankPool


@starts_ranks(2)
def test_doctor_tries_every_transport_and_every_operation(tmp_path, capsys):
    assert cli.main(["doctor", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"] and found["problems"] == [] and found["skipped"] is None
    assert found["runtime"] == runtime.RUNTIME
    usable = [name for name, reason in found["transports"].items() if reason is None]
    assert found["transport"] == usable[0]
    chosen, *others = usable
    parts = [f"operations over {transport}" for transport in usable]
    assert list(found["seconds"]) == ["inventory", "ranks' start", *parts]
    tried = [(outcome["transport"], outcome["operation"]) for outcome in found["operations"]]
    assert tried[:8] == [(chosen, name) for name in doctor.OPERATIONS]
    assert tried[8:] == [(other, doctor.ANOTHER) for other in others]
    assert all(outcome["milliseconds"] > 0 and outcome["problem"] is None for outcome in found["operations"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[-1].endswith(f"{len(tried)} operations work")


def fail_or_answer_wrongly(ctx, name, transport):
    if name == "all_reduce":
        raise RuntimeError(f"{name} is out of order")
    if name == "barrier":
        return doctor.Outcome(name, transport, 1.0, "rank 1: 3 of 1024 numbers are not torch's")
    return doctor.Outcome(name, transport, 1.0, None)


@starts_ranks(2)
def test_doctor_names_what_is_broken_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "RANKS", 1)
    monkeypatch.setattr(doctor, "OPERATIONS", ("all_reduce", "barrier", "matmul"))
    monkeypatch.setattr(doctor, "try_operation", fail_or_answer_wrongly)
    assert cli.main(["doctor", "--json", str(tmp_path / "found.json")]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["ok"]
    failed, wrong = found["problems"][:2]
    assert failed.startswith(f"all_reduce over {found['transport']}: rank ")
    assert failed.endswith("RuntimeError: all_reduce is out of order")
    assert wrong == f"barrier over {found['transport']}: rank 1: 3 of 1024 numbers are not torch's"
    assert [outcome["problem"] is None for outcome in found["operations"][:3]] == [False, False, True]
    assert "broken: barrier over" in capsys.readouterr().out


@pytest.mark.ranks(2)
def test_doctor_counts_what_is_not_torchs(ctx, monkeypatch):
    all_gather = tkernels.all_gather
    monkeypatch.setattr(tkernels, "all_gather", lambda x, **options: all_gather(x + (x > 3), **options))
    outcome = doctor.try_operation(ctx, "all_gather", ctx.transport)
    assert re.fullmatch("rank 0: [1-9][0-9]+ of 2520 numbers are not torch's", outcome.problem)


@starts_ranks(2)
def test_doctor_says_once_that_ranks_do_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "RANKS", 1)
    monkeypatch.setattr(doctor, "TIMEOUT_S", -1.0)
    assert cli.main(["doctor", "--json", str(tmp_path / "found.json")]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    (problem,) = found["problems"]
    assert problem.startswith("the ranks don't start: rank ") and "timeout_s" in problem
    assert found["operations"] == []


@pytest.mark.quick
def test_doctor_names_the_software_and_starts_ranks_before_torch_is_imported(monkeypatch, capsys):
    class StillImporting(Exception):
        pass

    def import_torch(found):
        assert started
        raise StillImporting

    started = []
    monkeypatch.setattr(RankPool, "start", lambda pool: started.append(pool))
    monkeypatch.setattr(doctor, "find_gpus", import_torch)
    with pytest.raises(StillImporting):
        doctor.run(argparse.Namespace(no_run=False, json=None))
    assert f"triton               {importlib.metadata.version('triton')}" in capsys.readouterr().out


@pytest.mark.quick
def test_inventory_alone_runs_nothing(capsys):
    assert cli.main(["doctor", "--no-run", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["skipped"] == "--no-run"
    assert found["operations"] == []
    version = found["inventory"]["packages"]["torch"]
    assert version and torch.__version__.startswith(version)  # a build may add "+cu130" to its package's version
    assert len(found["inventory"]["gpus"]) == torch.cuda.device_count()
    assert f"{runtime.RUNTIME} runtime" in err


def test_a_runtime_without_a_gpu_is_broken():
    command = [sys.executable, "-m", "tkernels.cli", "doctor", "--runtime", "nvshmem"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 1
    assert "broken: the nvshmem runtime was asked for, but torch sees no CUDA device" in done.stdout
    assert done.stderr == ""


def test_a_torch_that_cannot_be_imported_is_broken(checkout, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: cannot open')")
    command = [sys.executable, "-m", "tkernels.cli", "doctor"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, checkout)))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 1
    assert "GPUs                 none: torch can't be imported" in done.stdout
    assert "broken: OSError: libtorch.so: cannot open" in done.stdout
    assert done.stderr == ""


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\n"
    "\n"
    "Legend:\n\n  X    = Self\n"
)


@pytest.mark.quick
def test_links_are_read_from_nvidia_smi():
    kinds = doctor.link_kinds(TOPOLOGY)
    assert kinds == {(0, 1): "NV18", (1, 0): "NV18", (0, 2): "SYS", (2, 0): "SYS", (1, 2): "PHB", (2, 1): "PHB"}
    assert doctor.link_kinds("") == doctor.link_kinds("No devices were found\n") == {}
    described = {kind: doctor.Link((0, 1), True, kind).description for kind in ("NV18", "PHB")}
    assert described == {"NV18": "18 x NVLink", "PHB": "PCIe, through the CPU"}
    for kind in ("unknown", "N/A", "", "NV18+"):
        assert doctor.Link((0, 1), True, kind).description == "unknown link"


@pytest.mark.quick
def test_packages_have_the_version_of_the_one_of_their_names_that_is_installed():
    assert doctor._installed(("no-such-distribution", "nor-this")) == ("no-such-distribution", None)
    assert doctor._installed(("no-such-distribution", "pytest")) == ("pytest", pytest.__version__)


@pytest.mark.quick
def test_doctor_says_of_each_gpu_whether_it_was_measured_ran_or_was_only_compiled(monkeypatch):
    names = {"NVIDIA H200": "sm_90", "NVIDIA H100 80GB HBM3": "sm_90", "NVIDIA A100-SXM4-80GB": "sm_80"}
    names |= {"NVIDIA H800": "sm_90", "Tesla V100": "sm_70"}
    found = doctor.Diagnosis({"links": [], "nvshmem_bitcode": None})
    found.inventory["gpus"] = [doctor.GPU(0, name, 80, 100, sm) for name, sm in names.items()]
    monkeypatch.setattr(runtime, "RUNTIME", "nvshmem")
    monkeypatch.setattr(runtime, "candidates", lambda: {"nvshmem": None, "simulated": None})
    doctor._choose(found)
    said = [text.partition(":")[0] for text in found.known.values()]
    assert said == ["measured", "runs", "compiled, never run", "compiled, never run", "too old"]
    assert found.known["NVIDIA H800"].endswith("no row for NVIDIA H800, and takes that of NVIDIA H200")
    assert found.problems == ["Tesla V100, sm_70, is too old: there are kernels for sm_80 and newer"]
