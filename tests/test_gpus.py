"""The GPUs: which there are kernels for, whose rules they follow, and rows for those on which nothing was measured."""

import pytest

import tkernels
from tkernels import gpus
from tkernels.comm import runtime
from tkernels.gpus import DATA_SHEETS, GPUS, H200, SIMULATED, gpu_here, row_of


@pytest.fixture
def on_gpu(monkeypatch):
    """Have this process see a GPU of that name and compute capability."""

    def see(name: str, capability: tuple[int, int]):
        monkeypatch.setattr(runtime, "RUNTIME", "nvshmem")
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)

    monkeypatch.delenv("TKERNELS_CAPABILITY", raising=False)
    return see


@pytest.mark.quick
def test_capability_is_the_gpus_or_an_older_one_that_is_asked_for(on_gpu, monkeypatch):
    on_gpu("NVIDIA H200", (9, 0))
    assert runtime.capability() == (9, 0) and runtime.has_tma() and gpu_here() is H200
    monkeypatch.setenv("TKERNELS_CAPABILITY", "8.0")
    assert runtime.capability() == (8, 0) and not runtime.has_tma()
    assert gpu_here() is GPUS["NVIDIA A100-SXM4-80GB"]
    for asked in ("7.5", "10.0", "80", "sm_80", "8"):
        monkeypatch.setenv("TKERNELS_CAPABILITY", asked)
        with pytest.raises(ValueError, match=f"TKERNELS_CAPABILITY='{asked}' must be .* from 8.0 to this GPU's, 9.0"):
            runtime.capability()
    monkeypatch.setattr(runtime, "RUNTIME", "simulated")
    with pytest.raises(ValueError, match="TKERNELS_CAPABILITY='8' must be .* from 8.0 to Hopper's, 9.0"):
        runtime.capability()


@pytest.mark.quick
def test_capability_refuses_a_gpu_older_than_ampere_by_name(on_gpu):
    on_gpu("Tesla V100-SXM2-32GB", (7, 0))
    with pytest.raises(tkernels.TkernelsError, match="Tesla V100-SXM2-32GB has compute capability 7.0, and there are"):
        runtime.capability()


@pytest.mark.ranks(2)
def test_init_refuses_on_every_rank_what_the_gpu_of_one_cant_run(ctx, monkeypatch):
    def too_old():
        raise tkernels.TkernelsError("Tesla V100 has compute capability 7.0")

    if ctx.rank == 1:
        monkeypatch.setattr(runtime, "capability", too_old)
    with pytest.raises(tkernels.TkernelsError, match="Tesla V100 has compute capability 7.0"):
        tkernels.init(default=False)
    monkeypatch.setattr(runtime, "capability", lambda: (8, ctx.rank))
    with pytest.raises(tkernels.MismatchError, match="the ranks' options differ, in capability"):
        tkernels.init(default=False)


@pytest.mark.quick
def test_gpu_here_is_the_row_of_the_name_or_of_the_newest_capability_that_is_no_newer(on_gpu):
    for name, capability, row in [
        ("NVIDIA B200", (10, 0), "NVIDIA B200"),
        ("NVIDIA H800", (9, 0), "NVIDIA H200"),
        ("NVIDIA A10", (8, 6), "NVIDIA RTX A6000"),
        ("Orin", (8, 7), "NVIDIA RTX A6000"),
        ("NVIDIA L4", (8, 9), "NVIDIA L40S"),
        ("Thor", (11, 0), "NVIDIA B300"),
        ("NVIDIA GB10", (12, 1), "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ]:
        on_gpu(name, capability)
        assert gpu_here() is GPUS[row]
        assert row_of(capability).capability <= capability


@pytest.mark.quick
def test_gpu_here_is_h200_where_there_is_none(monkeypatch):
    monkeypatch.setattr(gpus.runtime, "RUNTIME", "simulated")
    assert gpu_here() is SIMULATED
    monkeypatch.setattr(gpus.runtime, "RUNTIME", "nvshmem")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_here() is H200


@pytest.mark.quick
def test_gpus_without_measurements_have_h200s_rates_times_the_ratio_of_data_sheets():
    assert {gpu.name for gpu in GPUS.values() if gpu.known == "compiled"} == set(DATA_SHEETS)
    a100 = GPUS["NVIDIA A100-SXM4-80GB"]
    assert (a100.sm, a100.sms, a100.shared_bytes) == (80, 108, 166912)
    assert a100.flops[0] == pytest.approx(0.9 * 830e12 * 312 / 989)
    assert a100.library_flops[2] == pytest.approx(52e12 * 19.5 / 67)
    assert a100.memory == pytest.approx(4e12 * 2.0 / 4.8)
    assert a100.copy_engine == pytest.approx(385e9 * 300 / 450)
    assert GPUS["NVIDIA B200"].unaligned_flops[3] == pytest.approx(125e12 * 1100 / 494)
