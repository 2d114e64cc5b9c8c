"""The demo: what it reports when all is well, and that it notices what is not."""

import itertools
import json
import math
from unittest import mock

import pytest
import torch
from transports import starts_ranks

from tkernels import cli, demo
from tkernels.comm import MismatchError, runtime
from tkernels.demo import training
from tkernels.demo.data import Text
from tkernels.demo.model import ModelConfig
from tkernels.demo.parallel import KINDS, TensorParallel
from tkernels.shapes import WITH_FP8

pytestmark = starts_ranks(2)

CONFIG = ModelConfig(vocabulary=79, sequence=32, batch=8, heads=4)


def test_demo_trains_both_models_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--ranks", "2", "--steps", "3", "--json", "result.json", "--plot", "losses.png"]) == 0

    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result) == ["agree", "setup", "steps", "gradient", "operations", "problem", "plot", "seconds"]
    assert result["agree"] and result["problem"] is None
    assert result["setup"]["ranks"] == 2 and result["setup"]["dtype"] == "fp32"
    losses = [step["sharded"] for step in result["steps"]]
    assert losses[0] == pytest.approx(math.log(result["setup"]["vocabulary"]), abs=0.1)
    assert losses[2] < losses[0] - 0.5
    assert all(step["difference"] <= step["allowed"] < 1e-4 for step in result["steps"])
    assert 0 < result["gradient"]["error"] <= result["gradient"]["allowed"]

    operations = {operation["operation"]: operation for operation in result["operations"]}
    # 3 steps of 2 layers: two of each kind of linear layer, each with its forward and its backward.
    calls = {"all_gather_matmul": 12, "matmul_reduce_scatter": 24, "matmul_reduce_scatter_backward": 12}
    calls["all_reduce"] = 6
    assert {name: operation["calls"] for name, operation in operations.items()} == calls
    # half of 256 rows, 64 features of 4 bytes: what a rank gathers from the other, and what it sends to be summed
    for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_reduce_scatter_backward"):
        assert operations[name]["sent_bytes"] == calls[name] * 128 * 64 * 4, name
    assert all(0 < operation["seconds"] < result["seconds"] for operation in operations.values())

    picture = (tmp_path / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[-1].startswith("sharded and unsharded losses agree: 3 steps")


class LosesARow(TensorParallel):
    """One of 256 tokens gets nothing from the first MLP."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.ctx.rank == 1:
            self.model.blocks[0].mlp.register_forward_hook(self.hook)

    @staticmethod
    def hook(mlp, x, y):
        lost = torch.zeros_like(y[..., :1])
        lost[-1, -1] = 1
        return y * (1 - lost)


class LosesPartOfABiasGradient(TensorParallel):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        if self.ctx.rank == 1:
            self.model.blocks[1].mlp.fc1.bias.register_hook(torch.zeros_like)


class ForgetsTheMarkOfANorm(TensorParallel):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model.norm.bias.sequence_parallel = False


class LosesPartOfABiasGradientLater(TensorParallel):
    """In the first step, in which gradients are compared, all is well."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = []
        self.model.blocks[1].mlp.fc1.bias.register_hook(self.hook)

    def hook(self, gradient):
        self.calls.append(gradient)
        return torch.zeros_like(gradient) if self.ctx.rank == 1 and len(self.calls) > 1 else gradient


@pytest.mark.exhaustive
def test_demo_fails_with_exit_code_1_when_the_losses_part(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(KINDS, "tp", LosesPartOfABiasGradientLater)
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
def test_a_wrong_gradient_shows_in_the_first_step(ctx):
    training.start(ctx, "fp32", 0, LosesPartOfABiasGradient)
    step = training.step(ctx)
    assert step.difference <= step.allowed
    gradient = training.worst_gradient(ctx)
    assert gradient.parameter == "blocks.1.mlp.fc1.bias"
    assert gradient.error > 0.3
    assert gradient.allowed < 1e-4


@pytest.mark.ranks(2)
def test_a_forgotten_mark_is_told_by_the_first_backward(ctx):
    training.start(ctx, "fp32", 0, ForgetsTheMarkOfANorm)
    with pytest.raises(MismatchError, match="the gradients of norm.bias differ between ranks"):
        training.step(ctx)


@pytest.mark.ranks(2)
def test_a_lost_row_shows_in_the_first_loss(ctx):
    training.start(ctx, "fp32", 0, LosesARow)
    step = training.step(ctx)
    assert step.difference > step.allowed


@pytest.mark.ranks(2)
def test_layers_in_fp8_train_beside_a_model_in_bf16(ctx):
    if not runtime.has_fp8():
        pytest.skip("the GPU has no FP8")
    setup = training.start(ctx, "fp8", 0, TensorParallel)
    assert (setup["dtype"], setup["parameters"]) == ("fp8", PARAMETERS)
    first, gradient = training.step(ctx), training.worst_gradient(ctx)
    master = training._here.sharded.optimizer.masters["blocks.1.mlp.fc1.bias"]
    with mock.patch.object(master, "grad", master.grad * (ctx.rank == 0)):
        wrong = training.worst_gradient(ctx)
    assert wrong.parameter == "blocks.1.mlp.fc1.bias" and wrong.error > wrong.allowed
    last = training.step(ctx)
    assert all(0 < step.difference <= step.allowed < 0.1 for step in (first, last))
    assert last.sharded < first.sharded - 0.2
    assert 2**-6 < gradient.error <= gradient.allowed  # more than bf16 rounds

    operations = {operation.operation: operation for operation in training.operations(ctx)}
    # 2 steps of 8 linear layers: of each x, dy and both layouts of w, and what has travelled back to bf16.
    calls = {"quantize": 64, "dequantize": 16, "all_gather_matmul": 16, "matmul_reduce_scatter": 16}
    assert {name: operations[name].calls for name in calls} == calls
    # half of 256 rows: gathered of 64 features and a scale, sent to be summed in bf16
    assert operations["all_gather_matmul"].sent_bytes == 16 * 128 * (64 + 4)
    assert operations["matmul_reduce_scatter"].sent_bytes == 16 * 128 * 64 * 2


# Other ways to split

PARAMETERS = 112_256
HALF = PARAMETERS // 2
SHARES = {  # of each of 2 ranks: in words; its parameters; in 2 steps the calls and the bytes that it sends
    "pp": ("1 of 2 blocks; 4 microbatches a step", None, {"send": (8, 8 * 32 * 2 * 64 * 4), "all_reduce": (2, 8)}),
    "fsdp": (
        "4 of 8 sequences and 1 of 2 parts of each parameter",
        None,
        # The first step doesn't know yet that backward begins with the last unit of forward. A row of the head, and an
        # element of its bias, have no counterpart on the other rank.
        {"all_gather": (5 + 4, None), "reduce_scatter": (2 * 3, 2 * (HALF + 64) * 4), "all_reduce": (2, 8)},
    ),
    "zero": (
        "4 of 8 sequences and 1 of 2 parts of the optimizer",
        PARAMETERS,
        {"all_gather": (10, 2 * HALF * 4), "reduce_scatter": (10, 2 * HALF * 4), "all_reduce": (4, None)},
    ),
    "ddp": ("4 of 8 sequences and the whole model", PARAMETERS, {"all_reduce": (2 * (5 + 1), 2 * PARAMETERS * 4 + 8)}),
}


@pytest.mark.quick
def test_the_command_line_knows_all_ways():
    assert demo.PARALLEL == tuple(KINDS)
    assert {"tp", *SHARES} == set(KINDS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SHARES)
def test_another_way_to_split_trains_to_the_same_losses(ctx, kind):
    words, parameters, calls = SHARES[kind]
    setup = training.start(ctx, "fp32", 0, KINDS[kind])
    assert (setup["parallel"], setup["share"], setup["parameters"]) == (kind, words, PARAMETERS)
    assert setup["parameters_of_rank"] == parameters or parameters is None
    assert parameters is not None or sum(ctx.group.gather(setup["parameters_of_rank"])) == PARAMETERS
    first, gradient, last = training.step(ctx), training.worst_gradient(ctx), training.step(ctx)
    assert all(step.difference <= step.allowed < 1e-4 for step in (first, last))
    assert last.sharded < first.sharded - 0.2
    assert 0 < gradient.error <= gradient.allowed < 1e-4
    assert len(set(ctx.group.gather(last.sharded))) == 1

    operations = {operation.operation: operation for operation in training.operations(ctx)}
    if kind == "pp":
        operations["send"] = operations.pop("send_backward" if ctx.rank else "send_forward")
        assert operations["send"].seconds is None
    assert {name: operation.calls for name, operation in operations.items()} == {
        name: number for name, (number, _) in calls.items()
    }
    for name, operation in operations.items():
        # A lone element is summed by rank 0, which sends the sum; the other sends its term.
        assert calls[name][1] in (operation.sent_bytes, None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind, dtype", [("pp", "fp16"), ("zero", "fp16"), ("fsdp", "bf16"), ("ddp", "bf16")])
def test_another_way_to_split_takes_other_dtypes(ctx, kind, dtype):
    training.start(ctx, dtype, 0, KINDS[kind])
    step, gradient = training.step(ctx), training.worst_gradient(ctx)
    assert step.difference <= step.allowed
    assert 0 < gradient.error <= gradient.allowed


def losing(kind):
    """`kind`, but rank 1's first share of a gradient, which is a part of a sum, is lost."""

    class Losing(kind):
        def __init__(self, model, config, ctx, *options):
            calls = itertools.count()
            if ctx.rank == 1:
                bias = model.blocks[1].mlp.fc1.bias
                bias.register_hook(lambda gradient: gradient if next(calls) else torch.zeros_like(gradient))
            super().__init__(model, config, ctx, *options)

    return Losing


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SHARES)
def test_a_lost_share_of_a_gradient_shows_in_the_first_step(ctx, kind):
    training.start(ctx, "fp32", 0, losing(KINDS[kind]))
    step = training.step(ctx)
    assert step.difference <= step.allowed
    worst = max(ctx.group.gather(training.worst_gradient(ctx)), key=lambda gradient: gradient.error)
    assert worst.parameter == "blocks.1.mlp.fc1.bias"
    assert worst.error > 0.2  # a quarter of the batch in the pipeline, half of it in the others
    training.step(ctx)
    step = training.step(ctx)
    assert step.difference > step.allowed


@pytest.mark.exhaustive
def test_messages_of_a_pipeline_are_counted_and_not_timed(tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = ["demo", "--parallel", "pp", "--ranks", "2", "--steps", "1", "--no-plot", "--json", str(path)]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 80
    assert any(line.split()[:6] == ["ranks", "2,", "each", "with", "1", "of"] for line in out)
    assert ["send_forward", "4", "65.5", "kB", "-"] in [line.split() for line in out]
    assert json.loads(path.read_text())["operations"][-1]["seconds"] is None


@pytest.mark.quick
@pytest.mark.parametrize(
    "dtype, first, last", [("fp32", 1e-5, 2e-4), ("fp16", 2e-3, 0.1), ("bf16", 2e-2, 0.6), ("fp8", 8e-2, 0.9)]
)
def test_what_is_allowed_grows_with_the_steps_and_stays_small(dtype, first, last):
    allowed = [training.allowed_loss(CONFIG, WITH_FP8[dtype], 4.4, steps) for steps in (0, 39)]
    assert 0 < allowed[0] < first < allowed[1] < last
    # A gradient without one of 8 ranks' share is off by about 8**-0.5 of its norm.
    assert training.allowed_gradient(CONFIG, WITH_FP8[dtype]) < 8**-0.5


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
