"""The doctor: what it finds here, that it tries everything, and that it says what is broken."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch
from transports import starts_ranks

from tkernels import cli, doctor
from tkernels.comm import runtime
from tkernels.doctor import inventory, operations, verbs


@starts_ranks(2)
def test_doctor_tries_every_verb_and_every_operation(tmp_path, capsys):
    assert cli.main(["doctor", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"] and found["problems"] == [] and found["skipped"] is None
    assert found["runtime"] == runtime.RUNTIME
    usable = [name for name, reason in found["transports"].items() if reason is None]
    assert found["transport"] == usable[0]
    trips = [f"round trips over {transport}" for transport in usable]
    assert list(found["seconds"]) == ["inventory", "ranks' start", *trips, "operations"]
    trips = [(trip["transport"], trip["verb"]) for trip in found["round_trips"]]
    assert trips == [(transport, verb) for transport in usable for verb in verbs.verbs_of(transport)]
    assert all(trip["microseconds"] > 0 and trip["problem"] is None for trip in found["round_trips"])
    assert [outcome["operation"] for outcome in found["operations"]] == list(operations.OPERATIONS)
    assert all(outcome["milliseconds"] > 0 and outcome["problem"] is None for outcome in found["operations"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[-1].endswith(f"{len(trips)} round trips and {len(found['operations'])} operations work")


def answer_wrongly(ctx, verb, transport):
    return verbs.RoundTrip(verb, transport, 8192, 1.0, "rank 1: 3 of 1024 numbers came out wrong")


def fail(ctx, name):
    raise RuntimeError(f"{name} is out of order")


@starts_ranks(2)
def test_doctor_names_what_is_broken_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verbs, "VERBS", {"get": 5})
    monkeypatch.setattr(operations, "OPERATIONS", ("all_reduce",))
    monkeypatch.setattr(verbs, "round_trip", answer_wrongly)
    monkeypatch.setattr(operations, "run_operation", fail)
    assert cli.main(["doctor", "--json", str(tmp_path / "found.json")]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["ok"]
    assert found["problems"][0] == f"get over {found['transport']}: rank 1: 3 of 1024 numbers came out wrong"
    assert found["problems"][-1].startswith("all_reduce: rank ")
    assert found["problems"][-1].endswith("RuntimeError: all_reduce is out of order")
    assert "broken: get over" in capsys.readouterr().out


@starts_ranks(2)
def test_doctor_says_once_that_ranks_do_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "TIMEOUT_S", -1.0)
    assert cli.main(["doctor", "--json", str(tmp_path / "found.json")]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    (problem,) = found["problems"]
    assert problem.startswith("the ranks don't start: rank ") and "timeout_s" in problem
    assert found["round_trips"] == found["operations"] == []


@pytest.mark.quick
def test_doctor_names_the_software_before_torch_is_imported(monkeypatch, capsys):
    class StillImporting(Exception):
        pass

    def import_torch(*software):
        raise StillImporting

    monkeypatch.setattr(inventory, "take", import_torch)
    with pytest.raises(StillImporting):
        doctor.run(doctor.Options())
    assert f"triton               {importlib.metadata.version('triton')}" in capsys.readouterr().out


@pytest.mark.ranks(2)
def test_a_round_trip_leaves_the_heap_as_it_was(ctx):
    before = ctx.empty(1).data_ptr()
    for verb in ("signal (add)", "get"):
        trip = verbs.round_trip(ctx, verb, ctx.transport)
        assert trip.problem is None
        assert trip.num_bytes == (8192 if verb == "get" else 0)
    after = ctx.empty(1)
    assert after.data_ptr() - before == 256


@pytest.mark.quick
def test_inventory_alone_runs_nothing(capsys):
    assert cli.main(["doctor", "--no-run", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["skipped"] == "--no-run"
    assert found["round_trips"] == found["operations"] == []
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
    kinds = inventory.link_kinds(TOPOLOGY)
    assert kinds == {(0, 1): "NV18", (1, 0): "NV18", (0, 2): "SYS", (2, 0): "SYS", (1, 2): "PHB", (2, 1): "PHB"}
    assert inventory.link_kinds("") == inventory.link_kinds("No devices were found\n") == {}
    described = {kind: inventory.Link((0, 1), True, kind).description for kind in ("NV18", "PHB")}
    assert described == {"NV18": "18 x NVLink", "PHB": "PCIe, through the CPU"}
    for kind in ("unknown", "N/A", "", "NV18+"):
        assert inventory.Link((0, 1), True, kind).description == "unknown link"


@pytest.mark.quick
def test_packages_have_the_version_of_the_one_of_their_names_that_is_installed():
    assert inventory._installed(("no-such-distribution", "nor-this")) == ("no-such-distribution", None)
    assert inventory._installed(("no-such-distribution", "pytest")) == ("pytest", pytest.__version__)
