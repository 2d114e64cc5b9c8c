"""What `tkernels explain` and tkernels.explain say: each way with its time or the reason why not, and what is taken."""

import json
from unittest import mock

import pytest
import torch

import tkernels
from tkernels import cli, paths
from tkernels.gpus import GPUS
from tkernels.model import FUSED


def explain(arguments, capsys, *more) -> tuple[str, list[dict]]:
    assert cli.main(["explain", *arguments.split(), *more, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    return " ".join(err.split()), [json.loads(line) for line in out.splitlines()]


@pytest.mark.quick
def test_the_command_says_what_is_taken_and_why_and_what_overlap_saves(capsys):
    said, (answer,) = explain("all_gather_matmul --shape llama70b-qkv --ranks 4", capsys)
    assert said.startswith("all_gather_matmul 8192x10240x8192 bf16, 4 x NVIDIA H200")
    assert "takes copy engine: 100663296 bytes into each rank, more than 12582912, travel while it multiplies" in said
    assert "overlap saves 398 of 883 us, 45%; it hides 88% of the transfer" in said
    assert said.endswith("the model's constants were measured on NVIDIA H200")
    taken, plain, *others = answer["ways"]
    assert (answer["path"], taken["way"], plain["way"]) == ("fused", "copy engine", "plain")
    assert taken["us"] == 485.2 < plain["us"] and taken["how"] == "tiles of 128x256x64, copies of 2048 rows"
    assert taken["us"] == pytest.approx(taken["launch_us"] + taken["gemm_us"] + taken["exposed_us"], abs=0.2)
    assert {other["way"]: other["refused"] for other in others} == {
        "interleaved": "only reductions are",
        "comm programs": "where rows land, copies are as fast, and take no SMs",
    }


@pytest.mark.quick
def test_the_command_says_where_nothing_is_overlapped_and_what_was_never_run(capsys):
    said, answers = explain("all --shape 64x8192x8192 --gpu b200 --dtype fp16", capsys)
    assert [answer["operation"] for answer in answers] == list(FUSED)
    assert all(answer["path"] == "plain" == answer["ways"][0]["way"] for answer in answers)
    assert said.count("nothing is overlapped; with path='fused' it would take") == 3
    assert "nothing has run on NVIDIA B200: kernels were compiled for it, and the constants are from data sh" in said


@pytest.mark.quick
def test_the_command_says_where_the_plain_path_would_be_faster(capsys):
    said, (answer,) = explain("all_gather_matmul --shape llama70b-gate-up --gpu a100-sxm4-80gb", capsys)
    us = {way["way"]: way.get("us") for way in answer["ways"]}
    assert answer["path"] == "fused" and answer["ways"][0]["us"] > us["plain"]
    assert "the plain path would take" in said and "us less; path='plain' asks for it" in said


@pytest.mark.quick
@pytest.mark.parametrize("gpu", GPUS)
def test_the_command_knows_every_gpu_with_a_row(capsys, gpu):
    _, answers = explain("all --shape 8192x8191x8192,4096x4096x4096 --ranks 8 --gpu", capsys, gpu)
    for answer in answers:
        assert answer["gpu"] == gpu and all(way["refused"] or 0 < way["us"] < 1e6 for way in answer["ways"])


@pytest.mark.quick
def test_the_command_says_who_multiplies_a_local_product(capsys):
    for arguments, path, why in [
        ("--shape 8192x8192x8192", "kernel", "takes kernel: 1421 us by our kernel, 1406 us by torch's matmul; within"),
        ("--shape 8192x4096x50257 --gpu h100", "staged", "TMA can't take rows that are no multiples of 16 bytes"),
        ("--shape 8192x8192x8192 --dtype tf32", "kernel", "by our kernel"),
        ("--shape 4096x4096x4096 --dtype tf32 --gpu a100-sxm4-80gb", "library", "; torch multiplies tf32 faster"),
    ]:
        said, (answer,) = explain(f"matmul {arguments}", capsys)
        assert (answer["path"], answer["ranks"]) == (path, 1) and why in said
        assert {way["way"]: way["how"] for way in answer["ways"]}["library"] == "torch's matmul"


@pytest.mark.quick
def test_the_command_says_that_fp32_is_plain(capsys):
    said, (answer,) = explain("all_gather_matmul --shape llama70b-qkv --dtype fp32", capsys)
    assert answer["path"] == "plain" and "takes plain: torch multiplies IEEE fp32 so much faster" in said
    assert answer["ways"][0]["how"] == "torch's matmul and a collective, in turns"
    assert "100% of the transfer is overlapped; with path='fused' it would take" in said
    for shape in ("1000x8192x8192", "35904x896x39424"):  # few rows, and too many for the heap
        said, _ = explain(f"all_gather_matmul --shape {shape} --dtype fp32", capsys)
        assert "one after the other" in said and "nothing is overlapped" in said and "while others travel" not in said


@pytest.mark.quick
def test_the_command_knows_fp8_and_refuses_what_has_none(capsys):
    times = {}
    for dtype in ("bf16", "fp8"):
        _, answers = explain(f"all --shape llama70b-qkv --ranks 2 --dtype {dtype}", capsys)
        times[dtype] = {answer["operation"]: answer["ways"][0] for answer in answers}
    for operation, taken in times["fp8"].items():
        assert taken["gemm_us"] < 0.6 * times["bf16"][operation]["gemm_us"] and "x128" in taken["how"]
    for arguments, words in (
        ("matmul --shape 8x8x24", "multiple of 16, but here it is 24"),
        ("matmul_all_reduce --shape 64x64x1000 --ranks 2", "multiple of 16, but here it is 500"),
        ("all --shape 8192x8192x8192 --gpu A6000", "NVIDIA RTX A6000 has no float8 arithmetic"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["explain", *arguments.split(), "--dtype", "fp8"])
        assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.ranks(2)
def test_explain_predicts_each_way_on_a_gpu_as_the_command_does(ctx, monkeypatch):
    choice = tkernels.explain("matmul_all_reduce", 8192, 8192, 8192, ctx=ctx)
    assert bool(choice.ways) == (tkernels.RUNTIME != "simulated")
    monkeypatch.setattr(paths.runtime, "RUNTIME", "nvshmem")
    with mock.patch("tkernels.choice.gpu_here", lambda: GPUS["NVIDIA H200"]):
        with mock.patch.object(ctx, "num_programs", 132), mock.patch.object(ctx.heap, "num_bytes", 2 << 30):
            choice = tkernels.explain("matmul_all_reduce", 8192, 8192, 8192, torch.bfloat16, ctx=ctx)
    names = [way.name for way in choice.ways]
    assert choice.path == "fused" and names == ["interleaved", "comm programs", "plain", "copy engine"]
    assert choice.ways[0].config.interleaved and 8e-4 < choice.ways[0].predicted.seconds < 9e-4
    assert choice.ways[-1].refused and str(choice).startswith("fused: 134217728 bytes into each rank")
