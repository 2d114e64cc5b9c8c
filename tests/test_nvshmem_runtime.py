"""Which of NVSHMEM's files the transport links, of which version, and for which CUDA; on a machine without any."""

import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

import tkernels
from tkernels.comm import runtime, simulated_runtime
from tkernels.comm.errors import TkernelsError

FOREIGN = ("nvshmem", "nvshmem.bindings", "nvshmem.bindings.nvshmem", "nvshmem.core", "cuda", "cuda.core")
# Of the packages for CUDA 13, version by version.
FILES = {
    "3.4.5": ["libnvshmem_device.bc"],
    "3.7.2": [f"libnvshmem_device_sm_{sm}.bc" for sm in (75, 80, 89, 90)],
    "3.8.0": [f"libnvshmem_device_sm_{sm}.bc" for sm in (75, 80, 89, 90, 100)],
}


@pytest.fixture
def nvshmem_runtime(monkeypatch):
    """The module, imported with stand-ins for packages that may not be here."""
    for name in FOREIGN:
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    name = "tkernels.comm.nvshmem_runtime"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(tkernels.comm, "nvshmem_runtime", None, raising=False)
    return importlib.import_module(name)


@pytest.mark.quick
def test_bitcode_of_is_one_file_or_that_of_the_newest_architecture_that_is_no_newer(nvshmem_runtime, tmp_path):
    for version, files in FILES.items():
        folder = tmp_path / version
        folder.mkdir()
        for name in (*files, "libnvshmem_host.so.3", "libnvshmem_device.a"):
            (folder / name).touch()
        for capability, sm in (((8, 0), 80), ((8, 6), 80), ((8, 9), 89), ((9, 0), 90), ((10, 3), 100), ((12, 0), 100)):
            sm = min(sm, 90) if version == "3.7.2" else sm
            want = files[0] if version == "3.4.5" else f"libnvshmem_device_sm_{sm}.bc"
            assert nvshmem_runtime.bitcode_of(folder, capability).name == want
    assert nvshmem_runtime.bitcode_of(tmp_path, (9, 0)) is None
    header = tmp_path / "include" / "non_abi" / "nvshmem_version.h"
    header.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH", "PACKAGE"), (3, 7, 2, 0), strict=True)
    header.write_text("".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in parts))
    assert nvshmem_runtime.version_of_headers(tmp_path) == "3.7.2"


@pytest.mark.quick
@pytest.mark.parametrize("host, device, packages, triton, said", [
    ("3.4.5", "3.4.5", {13: "3.4.5"}, "3.6.0", None),
    ("3.8.0", "3.8.0", {12: "3.8.0"}, "3.9.0", None),
    ("3.3.9", "3.4.5", {13: "3.4.5"}, "3.6.0", "cu13 is 3.4.5, so what is wrong is the host library. Is"),
    ("3.7.2", "3.6.5", {12: "3.7.2"}, "3.6.0", "cu12 is 3.7.2, so what is wrong is the device bitcode"),
    ("3.7.2", "3.6.5", {}, "3.6.0", "is not installed, so what is wrong is the host library and the device bitcode"),
    ("3.4.5", "3.4.5", {12: "3.7.2", 13: "3.4.5"}, "3.6.0", "cu12 3.7.2 and nvidia-nvshmem-cu13 3.4.5 are installed"),
    ("3.8.0", "3.8.0", {13: "3.8.0"}, "3.6.0", "newer LLVM than that of triton 3.6.0"),
])  # fmt: skip
def test_check_versions_says_which_is_wrong(nvshmem_runtime, monkeypatch, host, device, packages, triton, said):
    monkeypatch.setattr(runtime, "version_of", lambda name: packages.get(int(name[-2:])))
    monkeypatch.setattr(nvshmem_runtime, "triton", SimpleNamespace(__version__=triton))
    if said is None:
        return nvshmem_runtime.check_versions(host, device)
    with pytest.raises(TkernelsError, match=said):
        nvshmem_runtime.check_versions(host, device)


@pytest.mark.quick
def test_check_gpu_tells_a_thread_that_is_on_another_one(nvshmem_runtime, monkeypatch):
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    nvshmem_runtime.check_gpu(1)
    with pytest.raises(ValueError, match=r"this thread is on GPU 1, .* on GPU 3; call torch.cuda.set_device\(3\)"):
        nvshmem_runtime.check_gpu(3)


@pytest.mark.quick
def test_candidates_name_the_nvshmem4py_of_torchs_cuda(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    for version, cuda in (("12.8", 12), ("13.0", 13), (None, 13)):
        monkeypatch.setattr("torch.version.cuda", version)
        assert f"pip install nvshmem4py-cu{cuda})" in runtime.candidates()["nvshmem"]
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(runtime, "version_of", {"nvshmem4py-cu13": "0.4.1"}.get)
    assert "nvshmem4py-cu13 0.4.1 is installed, but torch is built for CUDA 12.8" in runtime.candidates()["nvshmem"]


@pytest.mark.ranks(2)
def test_init_refuses_ranks_of_other_machines_whatever_their_host_names(ctx, monkeypatch):
    if ctx.runtime != "simulated":
        pytest.skip("on GPUs NVSHMEM says whose memory is mapped")
    monkeypatch.setattr(simulated_runtime, "_place", lambda: (f"boot {ctx.rank}", 1))
    with pytest.raises(TkernelsError, match="rank 0 and ranks 1 are on other machines, or in containers"):
        tkernels.init(default=False)


@pytest.mark.quick
def test_check_sharing_takes_as_many_ranks_on_each_gpu(nvshmem_runtime):
    for gpus in ("abcd", "aaa", "abab", "aabb"):
        nvshmem_runtime.check_sharing(gpus)
    with pytest.raises(ValueError, match="ranks 0 to 2 are on GPUs 0, 1, 0 .* as many on each"):
        nvshmem_runtime.check_sharing("aba")
