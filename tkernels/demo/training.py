"""Trains the sharded model on the ranks and, on every rank, the unsharded one beside it.

`start`, `step` and `finish` run in a rank's process; the parent calls them one after the other. The state between calls
is the rank's `_Training`, in this module.

How far may the two losses differ? Both models compute the same numbers with two orders of addition. Let

    u    half an epsilon of the dtype: the error of one rounding; u32 that of fp32
    n    roundings on the longest path of a value, there and back: 2 * 10 a layer (`ROUNDINGS_PER_LAYER`)
    K    terms of the longest sum, 4d; sums are accumulated in fp32
    L    the loss, which also bounds the effect on it of a relative error of the logits
    M    tokens of a step

Rounding errors are independent, so they add up as a random walk. The result of a pass has the relative error

    e = u sqrt(n) + u32 sqrt(n K)

*Gradients.* In the first step both models have the same weights, bit for bit. Their gradients differ by two such
errors, and by two errors of the sum over tokens: for norms and embeddings torch's CPU kernels accumulate this sum in
the dtype itself, where the k-th of M additions errs by up to u sqrt(k) of a term's size, together u sqrt(M / 2) of the
sum's. So the norm of a gradient's difference, relative to the gradient's norm, may be

    2 (e + u sqrt(M / 2))

2e-5 in fp32, 0.14 in bf16. A gradient that lacks the share of one of two ranks is off by about 1.

*Losses.* A loss is a mean over M tokens, whose errors are independent: with the same weights two losses differ by up to
2 e L / sqrt(M), and by their own rounding to fp32. But each step leaves an error in the weights, which moves the later
losses by as much again, to first order. This holds for two reasons. The update is a smooth function of the gradient:
that is the purpose of Adam's large epsilon. With the usual one, an element whose gradient is mere noise moves by a full
learning rate, in a random direction. And a sum over many weights averages their errors as the mean over tokens does.
Letting the errors of all steps add up without cancelling, we allow

    L (2 e (t + 1) / sqrt(M) + 4 u32)    after t steps

In fp32 this is 5e-6 in the first step and 8e-5 in the 40th. Measured: up to a tenth of it in 400 steps of fp32, up to a
hundredth in 200 of bf16; with half of the gradient of one bias lost, whichever bias, 1.6 to 1500 times as much by the
third step in fp32.

*Ways to split.* The bounds hold for each of them, since they only change the order of additions:

    tp                 sums over K, and those over tokens, are sums of R partial sums
    pp                 sums over tokens are sums of P microbatches' sums, added up in the dtype
    ddp, zero, fsdp    they are sums of R ranks' sums, rounded to the dtype and added up in fp32

A sum of P partial sums has an error of u (sqrt(M / 2P) + sqrt(P / 2)) and two roundings more, which is less than that
of one sum, since P is small beside M. ZeRO and FSDP take the mean over ranks of R times as much: one more rounding
where R is no power of 2. The optimizer treats each element separately, so it may be split as well.
"""

import copy
import math
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from tkernels.comm.context import Context
from tkernels.demo.data import Text
from tkernels.demo.model import ModelConfig, Transformer
from tkernels.demo.recorder import Recorder, Tally
from tkernels.demo.records import Gradient, Operation, Setup, Step
from tkernels.shapes import DTYPES

SEQUENCE, BATCH, HEADS, LAYERS = 32, 8, 4, 2  # sizes that are split are rounded up to a multiple of R
LEARNING_RATE = 2e-2
ADAM_EPSILON = 1e-2
ADAM = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": ADAM_EPSILON}
FP16_LOSS_SCALE = 1024.0  # fp16's smallest normal number is 6e-5; many gradients are smaller
ROUNDINGS_PER_LAYER = 10  # norm, qkv, attention, proj, sum; norm, fc1, gelu, fc2, sum


def pass_error(config: ModelConfig, dtype: torch.dtype) -> float:
    """e of the module's docstring."""
    roundings = 2 * ROUNDINGS_PER_LAYER * config.layers
    u, u32 = torch.finfo(dtype).eps / 2, 2.0**-24
    return u * math.sqrt(roundings) + u32 * math.sqrt(roundings * 4 * config.features)


def allowed_gradient(config: ModelConfig, dtype: torch.dtype) -> float:
    """How far a gradient of the first step may be off, relative to its norm."""
    return 2 * (pass_error(config, dtype) + torch.finfo(dtype).eps / 2 * math.sqrt(config.tokens / 2))


def allowed_loss(config: ModelConfig, dtype: torch.dtype, loss: float, steps: int) -> float:
    """How far the two losses may differ after `steps` steps."""
    return loss * (2 * pass_error(config, dtype) * (steps + 1) / math.sqrt(config.tokens) + 4 * 2.0**-24)


def first_gradient(state: dict) -> torch.Tensor:
    """The gradient that Adam got for a parameter in the first step, from its state after that step."""
    return state["exp_avg"] / (1 - ADAM["betas"][0])


class Optimizer:
    """Adam on fp32 copies of the parameters, which get the updated values rounded to their dtype."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], loss_scale: float):
        self.parameters, self.loss_scale = dict(parameters), loss_scale
        self.masters = {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}
        self.adam = torch.optim.AdamW(self.masters.values(), **ADAM)

    @property
    def num_parameters(self) -> int:
        return sum(master.numel() for master in self.masters.values())

    @torch.no_grad()
    def step(self):
        for name, parameter in self.parameters.items():
            self.masters[name].grad = parameter.grad.float() / self.loss_scale
            parameter.grad = None
        self.adam.step()
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])

    def gradients(self) -> dict[str, torch.Tensor]:
        """The unscaled gradients of the first step; valid only right after it."""
        return {name: first_gradient(self.adam.state[master]) for name, master in self.masters.items()}


def loss_part(model: nn.Module, config: ModelConfig, tokens, targets, first_position: int = 0) -> torch.Tensor:
    """The contribution of these tokens [s', b'], which begin at `first_position`, to a batch's mean loss."""
    positions = torch.arange(first_position, first_position + len(tokens), device=tokens.device)
    logits = model(tokens, positions).float().flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / config.tokens


class Parallel:
    """A way to split the training over ranks, and a rank's part of it; the ways are in tkernels.demo.parallel.

    Collective, as are step, gradients and close. model: has the initial weights, and is split in place.

    name: as --parallel takes it.
    share: a rank's part, in words.
    num_parameters: the number of parameters that the rank holds between two steps.
    """

    name: str
    share: str
    optimizer: Optimizer

    def __init__(self, model: Transformer, config: ModelConfig, ctx: Context, loss_scale: float):
        self.model, self.config, self.ctx, self.loss_scale = model, config, ctx, loss_scale

    @staticmethod
    def sizes(ranks: int) -> dict[str, int]:
        """The sizes of ModelConfig that must change to be divisible by the ranks."""
        return {}

    @property
    def num_parameters(self) -> int:
        return self.optimizer.num_parameters

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train on a batch, which every rank has in full. Returns its loss [1], the same on every rank."""
        raise NotImplementedError

    def gradients(self) -> dict[str, torch.Tensor]:
        """After the first step: the gradients that the optimizer got for this rank's parameters, by name."""
        return self.optimizer.gradients()

    def parts(self, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The expected result of `gradients`, from the gradients of the unsharded model."""
        return whole

    def messages(self) -> dict[str, Tally]:
        """This rank's sends that bypass tkernels' operators."""
        return {}

    def close(self):
        """Free memory after the training."""


class _Training:
    """The two models of one rank."""

    def __init__(self, ctx: Context, dtype: torch.dtype, seed: int, kind: type[Parallel]):
        self.ctx, self.dtype, self.steps = ctx, dtype, 0
        self.text = Text.of_python_help()
        sizes = {"sequence": SEQUENCE, "batch": BATCH, "heads": HEADS, "layers": LAYERS} | kind.sizes(ctx.size)
        self.config = ModelConfig(vocabulary=len(self.text.vocabulary), **sizes)
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.unsharded = Transformer(self.config).to(ctx.device, dtype)
        self.loss_scale = FP16_LOSS_SCALE if dtype == torch.float16 else 1.0
        self.sharded = kind(copy.deepcopy(self.unsharded), self.config, ctx, self.loss_scale)
        self.optimizer = Optimizer(self.unsharded.named_parameters(), self.loss_scale)
        self.recorder = Recorder(ctx)

    def step(self) -> tuple[Step, Gradient | None]:
        """Collective. One step of both models on the same batch; with the worst gradient if it is the first."""
        tokens, targets = self.text.batch(self.config.sequence, self.config.batch, self.generator)
        tokens, targets = tokens.to(self.ctx.device), targets.to(self.ctx.device)
        began = time.perf_counter()
        with self.recorder:
            sharded = self.sharded.step(tokens, targets).item()
        seconds = time.perf_counter() - began
        unsharded = self._unsharded_step(tokens, targets)
        gradient = self._worst_gradient() if self.steps == 0 else None
        self.ctx.check()
        allowed = allowed_loss(self.config, self.dtype, unsharded, self.steps)
        self.steps += 1
        return Step(self.steps, sharded, unsharded, abs(sharded - unsharded), allowed, seconds), gradient

    def _unsharded_step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_part(self.unsharded, self.config, tokens, targets)
        (loss * self.loss_scale).backward()
        self.optimizer.step()
        return loss.item()

    def _worst_gradient(self) -> Gradient:
        """This rank's gradient with the largest error against the same part of the unsharded model's."""
        errors, wanted = {}, self.sharded.parts(self.optimizer.gradients())
        for name, gradient in self.sharded.gradients().items():
            got, want = gradient.cpu().double(), wanted[name].cpu().double()
            # A shard may begin or end among elements without a gradient.
            error = ((got - want).norm() / want.norm().clamp_min(torch.finfo(torch.float32).tiny)).item()
            errors[name] = math.inf if math.isnan(error) else error
        worst = max(errors, key=errors.get)
        return Gradient(self.ctx.rank, worst, errors[worst], allowed_gradient(self.config, self.dtype))

    def operations(self) -> list[Operation]:
        """Collective. The cost of the operations on this rank, and the check of one call of each."""
        tallies, checks = self.recorder.tallies(), self.recorder.check()
        operations = [
            Operation(name, tally.calls, tally.sent_bytes, tally.seconds, *checks[name])
            for name, tally in sorted(tallies.items())
        ]
        messages = self.sharded.messages().items()
        return operations + [Operation(name, tally.calls, tally.sent_bytes) for name, tally in messages]


_training: _Training | None = None


def start(ctx: Context, dtype: str, seed: int, kind: type[Parallel]) -> Setup:
    """Collective. Make both models; `kind` splits one of them."""
    global _training
    _training = _Training(ctx, DTYPES[dtype], seed, kind)
    config = _training.config
    return Setup(
        runtime=ctx.runtime,
        transport=ctx.transport,
        device=torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "CPU",
        parallel=kind.name,
        ranks=ctx.size,
        share=_training.sharded.share,
        dtype=dtype,
        seed=seed,
        text=_training.text.title,
        characters=len(_training.text.characters),
        vocabulary=config.vocabulary,
        layers=config.layers,
        features=config.features,
        heads=config.heads,
        sequence=config.sequence,
        batch=config.batch,
        tokens=config.tokens,
        parameters=sum(parameter.numel() for parameter in _training.unsharded.parameters()),
        parameters_of_rank=_training.sharded.num_parameters,
    )


def step(ctx: Context, last: bool) -> tuple[Step, Gradient | None]:
    """Collective. Train both models on the next batch; in the `last` step one call of each operation is kept."""
    _training.recorder.keep = last
    return _training.step()


def finish(ctx: Context) -> list[Operation]:
    """Collective. Check the calls that were kept, and end the training."""
    operations = _training.operations()
    _training.sharded.close()
    return operations
