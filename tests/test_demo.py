"""The demo: what it reports when all is well, and that it notices what is not."""

import dataclasses
import json
import math

import pytest
import torch

from tkernels import cli
from tkernels.comm import runtime
from tkernels.demo import records, training
from tkernels.demo.data import Text
from tkernels.demo.model import ModelConfig, shard

if runtime.RUNTIME == "nvshmem" and torch.cuda.device_count() < 2:
    pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}", allow_module_level=True)

CONFIG = ModelConfig(vocabulary=79, sequence=32, batch=8, heads=4)


def test_demo_trains_both_models_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--ranks", "2", "--steps", "3", "--json", "result.json", "--plot", "losses.png"]) == 0

    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == {"agree", *(field.name for field in dataclasses.fields(records.Result))}
    assert result["agree"] and result["problem"] is None
    assert result["setup"]["ranks"] == 2 and result["setup"]["dtype"] == "fp32"
    losses = [step["sharded"] for step in result["steps"]]
    assert losses[0] == pytest.approx(math.log(result["setup"]["vocabulary"]), abs=0.1)
    assert losses[2] < losses[0] - 0.5
    assert all(step["difference"] <= step["allowed"] < 1e-4 for step in result["steps"])
    assert 0 < result["gradient"]["error"] <= result["gradient"]["allowed"]

    operations = {operation["operation"]: operation for operation in result["operations"]}
    # 3 steps of 2 layers: two of each kind of linear layer, each with its forward and its backward.
    calls = {"all_gather_matmul": 24, "matmul_reduce_scatter": 24, "all_reduce": 6}
    assert {name: operation["calls"] for name, operation in operations.items()} == calls
    # half of 256 rows, 64 features of 4 bytes: what a rank gathers from the other, and what it sends to be summed
    assert operations["all_gather_matmul"]["sent_bytes"] == 24 * 128 * 64 * 4
    assert operations["matmul_reduce_scatter"]["sent_bytes"] == 24 * 128 * 64 * 4
    assert all(0 < operation["seconds"] < result["seconds"] for operation in operations.values())
    assert all(operation["error"] <= operation["allowed"] < 1e-5 for operation in operations.values())

    picture = (tmp_path / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[-1].startswith("sharded and unsharded losses agree: 3 steps")


def lose_a_row(model, ctx):
    """One of 256 tokens gets nothing from the first MLP."""

    def hook(mlp, x, y):
        lost = torch.zeros_like(y[..., :1])
        lost[-1, -1] = 1
        return y * (1 - lost)

    model = shard(model, ctx)
    if ctx.rank == 1:
        model.blocks[0].mlp.register_forward_hook(hook)
    return model


def lose_part_of_a_bias_gradient(model, ctx):
    model = shard(model, ctx)
    if ctx.rank == 1:
        model.blocks[1].mlp.fc1.bias.register_hook(torch.zeros_like)
    return model


def forget_the_mark_of_a_norm(model, ctx):
    model = shard(model, ctx)
    model.norm.bias.sequence_parallel = False
    return model


def lose_part_of_a_bias_gradient_later(model, ctx):
    """In the first step, in which gradients are compared, all is well."""
    model, calls = shard(model, ctx), []

    def hook(gradient):
        calls.append(gradient)
        return torch.zeros_like(gradient) if ctx.rank == 1 and len(calls) > 1 else gradient

    model.blocks[1].mlp.fc1.bias.register_hook(hook)
    return model


def test_demo_fails_with_exit_code_1_when_the_losses_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tkernels.demo.shard", lose_part_of_a_bias_gradient_later)
    path = tmp_path / "result.json"
    assert cli.main(["demo", "--ranks", "2", "--steps", "5", "--no-plot", "--json", str(path)]) == 1
    result = json.loads(path.read_text())
    last = result["steps"][-1]
    assert not result["agree"]
    assert last["step"] == 3  # the second step's gradients move the third step's loss
    assert last["difference"] > last["allowed"]
    assert result["problem"].startswith("step 3: the sharded model's loss is ")
    assert f"they part by {last['difference']:.1e}" in result["problem"]
    assert "DISAGREE: step 3" in capsys.readouterr().out


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "planted, parameter",
    [(lose_part_of_a_bias_gradient, "blocks.1.mlp.fc1.bias"), (forget_the_mark_of_a_norm, "norm.bias")],
)
def test_a_wrong_gradient_shows_in_the_first_step(ctx, planted, parameter):
    training.start(ctx, "fp32", 0, planted)
    step, gradient = training.step(ctx, False)
    assert step.difference <= step.allowed
    if planted is forget_the_mark_of_a_norm or ctx.rank == 1:
        assert gradient.parameter == parameter
        assert gradient.error > 0.3
        assert gradient.allowed < 1e-4
    else:
        assert gradient.error <= gradient.allowed


@pytest.mark.ranks(2)
def test_a_lost_row_shows_in_the_first_loss(ctx):
    training.start(ctx, "fp32", 0, lose_a_row)
    step, _ = training.step(ctx, False)
    assert step.difference > step.allowed


@pytest.mark.quick
@pytest.mark.parametrize("dtype, first, last", [("fp32", 1e-5, 2e-4), ("fp16", 2e-3, 0.1), ("bf16", 2e-2, 0.6)])
def test_what_is_allowed_grows_with_the_steps_and_stays_small(dtype, first, last):
    allowed = [training.allowed_loss(CONFIG, training.DTYPES[dtype], 4.4, steps) for steps in (0, 39)]
    assert 0 < allowed[0] < first < allowed[1] < last
    # A gradient without one of 8 ranks' share is off by about 8**-0.5 of its norm.
    assert training.allowed_gradient(CONFIG, training.DTYPES[dtype]) < 8**-0.5


@pytest.mark.quick
def test_text_is_prose_and_batches_are_its_windows():
    text = Text.of_python_help()
    assert len(text.characters) > 100_000
    assert 50 < len(text.vocabulary) < 110
    tokens, targets = text.batch(32, 8, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (32, 8)
    assert torch.equal(tokens[1:], targets[:-1])
    whole = "".join(text.vocabulary[number] for number in text.characters)
    assert "".join(text.vocabulary[number] for number in tokens[:, 3]) in whole
