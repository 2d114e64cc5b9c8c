"""The training of the sharded model on the ranks and, beside it on every rank, of the unsharded one.

`start`, `step` and `finish` run in a rank's process, called by the parent one after the other. What lives from one
call to the next is the rank's `_Training`, in this module.

How far may the two losses part? Both models compute the same numbers in two orders of addition. Let

    u    half an epsilon of the dtype: the error of one rounding; u32 that of fp32
    n    roundings on the longest path of a value, there and back: 2 * 10 a layer (`ROUNDINGS_PER_LAYER`)
    K    terms of the longest sum, 4d; sums are accumulated in fp32
    L    the loss, which also bounds what a relative error of the logits does to it
    M    tokens of a step

Roundings are independent, so that their errors add up as a random walk. What a pass computes has the relative error

    e = u sqrt(n) + u32 sqrt(n K)

*Gradients.* In the first step both models have the same weights to the bit, and their gradients differ by two such
errors, and by two of the sum over tokens: for norms and embeddings torch's CPU kernels take it in the dtype itself,
where the k-th of M additions errs by up to u sqrt(k) of a term's size, together u sqrt(M / 2) of the sum's. So the norm
of a gradient's difference, relative to the gradient's norm, may be

    2 (e + u sqrt(M / 2))

2e-5 in fp32, 0.14 in bf16. A gradient that lacks the share of one of two ranks is off by about 1.

*Losses.* A loss is a mean over M tokens, whose errors are independent: with the same weights two losses differ by up to
2 e L / sqrt(M), and by their own rounding to fp32. But each step leaves an error in the weights, which moves the later
losses by as much again, to first order: the update is a smooth function of the gradient (that is what Adam's large
epsilon is for; with the usual one, an element whose gradient is mere noise moves by a full learning rate, in a random
direction), and a sum over many weights averages their errors as the mean over tokens does. Letting the errors of all
steps add up without cancelling, we allow

    L (2 e (t + 1) / sqrt(M) + 4 u32)    after t steps

In fp32 this is 5e-6 in the first step and 8e-5 in the 40th. Measured: up to a tenth of it in 400 steps of fp32, up to
a hundredth in 200 of bf16; with half of the gradient of one bias lost, whichever bias, 1.6 to 1500 times as much by
the third step in fp32.
"""

import copy
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

import tkernels
from tkernels.comm.context import Context
from tkernels.demo.data import Text
from tkernels.demo.model import ModelConfig, Transformer
from tkernels.demo.recorder import Recorder
from tkernels.demo.records import Gradient, Operation, Setup, Step
from tkernels.layers import ColumnParallelLinear, RowParallelLinear, all_reduce_sequence_parallel_grads

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEQUENCE, BATCH, HEADS = 32, 8, 4  # sequence and heads are rounded up to multiples of the ranks
LEARNING_RATE = 2e-2
ADAM_EPSILON = 1e-2
FP16_LOSS_SCALE = 1024.0  # fp16's smallest normal number is 6e-5; many gradients are smaller
ROUNDINGS_PER_LAYER = 10  # norm, qkv, attention, proj, sum; norm, fc1, gelu, fc2, sum


def pass_error(config: ModelConfig, dtype: torch.dtype) -> float:
    """e, as derived above."""
    roundings = 2 * ROUNDINGS_PER_LAYER * config.layers
    u, u32 = torch.finfo(dtype).eps / 2, 2.0**-24
    return u * math.sqrt(roundings) + u32 * math.sqrt(roundings * 4 * config.features)


def allowed_gradient(config: ModelConfig, dtype: torch.dtype) -> float:
    """How far a gradient of the first step may be off, relative to its norm."""
    return 2 * (pass_error(config, dtype) + torch.finfo(dtype).eps / 2 * math.sqrt(config.tokens / 2))


def allowed_loss(config: ModelConfig, dtype: torch.dtype, loss: float, steps: int) -> float:
    """How far the two losses may part after `steps` steps."""
    return loss * (2 * pass_error(config, dtype) * (steps + 1) / math.sqrt(config.tokens) + 4 * 2.0**-24)


class _Optimizer:
    """Adam on fp32 copies of the parameters, which get the updated values rounded to their dtype."""

    def __init__(self, model: nn.Module, loss_scale: float):
        self.parameters, self.loss_scale = list(model.parameters()), loss_scale
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, LEARNING_RATE, betas=(0.9, 0.95), eps=ADAM_EPSILON)

    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.float() / self.loss_scale
            parameter.grad = None
        self.adam.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


class _Training:
    """The two models of one rank."""

    def __init__(self, ctx: Context, dtype: torch.dtype, seed: int, shard):
        self.ctx, self.dtype, self.steps = ctx, dtype, 0
        self.text = Text.of_python_help()
        self.config = ModelConfig(
            vocabulary=len(self.text.vocabulary),
            sequence=math.ceil(SEQUENCE / ctx.size) * ctx.size,
            batch=BATCH,
            heads=math.ceil(HEADS / ctx.size) * ctx.size,
        )
        own = self.config.sequence // ctx.size
        self.own_positions = slice(ctx.rank * own, (ctx.rank + 1) * own)
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.unsharded = Transformer(self.config).to(ctx.device, dtype)
        self.sharded = shard(copy.deepcopy(self.unsharded), ctx)
        self.loss_scale = FP16_LOSS_SCALE if dtype == torch.float16 else 1.0
        self.optimizers = [_Optimizer(model, self.loss_scale) for model in (self.sharded, self.unsharded)]
        self.recorder = Recorder(ctx)

    def step(self) -> tuple[Step, Gradient | None]:
        """Collective. One step of both models on the same batch; with the worst gradient if it is the first."""
        tokens, targets = self.text.batch(self.config.sequence, self.config.batch, self.generator)
        tokens, targets = tokens.to(self.ctx.device), targets.to(self.ctx.device)
        began = time.perf_counter()
        with self.recorder:
            sharded = self._forward_and_backward(self.sharded, tokens, targets, self.own_positions)
            all_reduce_sequence_parallel_grads(self.sharded, ctx=self.ctx)
            sharded = tkernels.all_reduce(sharded[None], ctx=self.ctx).item()
        seconds = time.perf_counter() - began
        unsharded = self._forward_and_backward(self.unsharded, tokens, targets, slice(None)).item()
        gradient = self._worst_gradient() if self.steps == 0 else None
        for optimizer in self.optimizers:
            optimizer.step()
        self.ctx.check()
        allowed = allowed_loss(self.config, self.dtype, unsharded, self.steps)
        self.steps += 1
        return Step(self.steps, sharded, unsharded, abs(sharded - unsharded), allowed, seconds), gradient

    def _forward_and_backward(self, model: Transformer, tokens, targets, positions: slice) -> torch.Tensor:
        """The part of the loss that these positions give; the gradients stay with the parameters."""
        numbers = torch.arange(self.config.sequence, device=tokens.device)[positions]
        logits = model(tokens[positions], numbers).float().flatten(0, 1)
        loss = F.cross_entropy(logits, targets[positions].flatten(), reduction="sum") / self.config.tokens
        (loss * self.loss_scale).backward()
        return loss.detach()

    def _worst_gradient(self) -> Gradient:
        """This rank's gradient that is furthest from its slice of the unsharded model's."""
        errors = {}
        for path, module in self.sharded.named_modules():
            parallel = isinstance(module, ColumnParallelLinear | RowParallelLinear)
            for name, parameter in module.named_parameters(recurse=False):
                want = getattr(self.unsharded.get_submodule(path), name).grad.double()
                if parallel and name in module.partitioned():
                    want = module.shard(want, module.partitioned()[name])
                error = ((parameter.grad.double() - want).norm() / want.norm()).item()
                errors[f"{path}.{name}"] = math.inf if math.isnan(error) else error
        worst = max(errors, key=errors.get)
        return Gradient(self.ctx.rank, worst, errors[worst], allowed_gradient(self.config, self.dtype))

    def operations(self) -> list[Operation]:
        """Collective. What the operations have cost this rank, and one call of each against a reference."""
        tallies, checks = self.recorder.tallies(), self.recorder.check()
        return [
            Operation(name, tally.calls, tally.sent_bytes, tally.seconds, *checks[name])
            for name, tally in sorted(tallies.items())
        ]


_training: _Training | None = None


def start(ctx: Context, dtype: str, seed: int, shard) -> Setup:
    """Collective. Make both models; `shard(model, ctx)` splits one, as `tkernels.demo.model.shard` does."""
    global _training
    _training = _Training(ctx, DTYPES[dtype], seed, shard)
    config = _training.config
    return Setup(
        runtime=ctx.runtime,
        transport=ctx.transport,
        device=torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "CPU",
        ranks=ctx.size,
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
        parameters_of_rank=sum(parameter.numel() for parameter in _training.sharded.parameters()),
    )


def step(ctx: Context, last: bool) -> tuple[Step, Gradient | None]:
    """Collective. Train both models on the next batch; in the `last` step one call of each operation is kept."""
    _training.recorder.keep = last
    return _training.step()


def finish(ctx: Context) -> list[Operation]:
    """Collective. Check the calls that were kept."""
    return _training.operations()
