"""Trains the sharded model on the ranks and, on every rank, the unsharded one beside it.

`start`, `step`, `worst_gradient` and `operations` run in a rank's process, where `_here` holds the models in between;
the parent calls one after the other.

How far may the two differ? They add the same numbers in two orders. Rounding errors add up as a random walk, to

    e = u sqrt(n) + u32 sqrt(n K)             of the result of a pass
    2 (e + u sqrt(M / 2))                     of the norm of a gradient of the first step
    L (2 e (t + 1) / sqrt(M) + 4 u32)         of a loss, after t steps

    u    half an epsilon of the dtype: the error of one rounding; u32 that of fp32, in which sums are accumulated
    n    roundings on the longest path of a value, there and back: 2 * 10 a layer (`ROUNDINGS_PER_LAYER`)
    K    terms of the longest sum, 4d
    M    tokens of a step, over which torch's CPU kernels sum gradients of norms and embeddings in the dtype itself
    L    the loss, which also bounds the effect on it of a relative error of the logits

The weights of the first step are the same bit for bit. Each step leaves an error in them, which moves the later losses
by as much again, to first order (the update is a smooth function of the gradient, thanks to Adam's large epsilon), and
the bound lets these add up without cancelling. A gradient may be off by 2e-5 in fp32 and 0.14 in bf16; one that lacks
the share of one of two ranks is by 1. Of losses fp32's bound is 5e-6 in the first step and 8e-5 in the 40th. Measured:
up to a tenth of it in 400 steps of fp32, up to a hundredth in 200 of bf16; with half of the gradient of one bias lost,
whichever bias, 1.6 to 1500 times as much by the third step in fp32.

In FP8 the sharded model's linear layers quantize their operands as well, beside a model in bf16 (u is that of bf16).
These errors are independent from step to step, since weights and activations move by more than their last bits, and add

    f = v sqrt(q)                             of a gradient's norm
    L f sqrt(t + 1) / sqrt(M)                 of a loss

    q    quantizations on the longest path there and back: 2 operands of each product, 2 * 2 * 4 a layer
    v    the deviation of what one adds, evenly distributed: half an epsilon of e4m3 / sqrt(3)

which with bf16's share is 0.34 of a gradient's norm, and of losses 0.07 in the first step and 0.5 in the 30th.
Measured: 0.07 of a gradient's norm, and in 30 steps up to 0.006 of what is allowed of a loss.
"""

import copy
import math
import time
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from tkernels.comm.context import Context
from tkernels.comm.regions import round_up
from tkernels.configs import FP8, result_dtype
from tkernels.demo.data import Text
from tkernels.demo.model import ModelConfig, Transformer
from tkernels.demo.operations import Operation
from tkernels.layers.tensor_parallel.dtensors import local
from tkernels.shapes import WITH_FP8

SIZES = {"sequence": 32, "batch": 8, "heads": 4, "layers": 2}  # those that ranks divide are rounded up to multiples
ADAM = {"lr": 2e-2, "betas": (0.9, 0.95), "eps": 1e-2}
LOSS_SCALE = 1024.0  # fp16's smallest normal number is 6e-5; many gradients are smaller. Other dtypes lose nothing
ROUNDINGS_PER_LAYER = 10  # norm, qkv, attention, proj, sum; norm, fc1, gelu, fc2, sum
FLOAT8 = "rowwise"  # the recipe of layers in FP8
QUANTIZATIONS_PER_LAYER = 2 * 4  # of both operands of qkv, proj, fc1, fc2


def pass_error(config: ModelConfig, dtype: torch.dtype) -> float:
    """e of the module's docstring."""
    roundings = 2 * ROUNDINGS_PER_LAYER * config.layers
    u, u32 = torch.finfo(result_dtype(dtype)).eps / 2, 2.0**-24
    return u * math.sqrt(roundings) + u32 * math.sqrt(roundings * 4 * config.features)


def quantization_error(config: ModelConfig, dtype: torch.dtype) -> float:
    """f of the module's docstring, 0 for other dtypes than FP8."""
    if dtype not in FP8:
        return 0.0
    return torch.finfo(dtype).eps / 2 / math.sqrt(3) * math.sqrt(2 * QUANTIZATIONS_PER_LAYER * config.layers)


def allowed_gradient(config: ModelConfig, dtype: torch.dtype) -> float:
    """How far a gradient of the first step may be off, relative to its norm."""
    u = torch.finfo(result_dtype(dtype)).eps / 2
    rounded = 2 * (pass_error(config, dtype) + u * math.sqrt(config.tokens / 2))
    return rounded + quantization_error(config, dtype)


def allowed_loss(config: ModelConfig, dtype: torch.dtype, loss: float, steps: int) -> float:
    """How far the two losses may differ after `steps` steps."""
    walk = 2 * pass_error(config, dtype) * (steps + 1) + quantization_error(config, dtype) * math.sqrt(steps + 1)
    return loss * (walk / math.sqrt(config.tokens) + 4 * 2.0**-24)


class Optimizer:
    """Adam on fp32 copies of a model's parameters, which get the updated values rounded to their dtype.

    masters: the copies by the parameters' names; they keep the gradients of the last step, without LOSS_SCALE.
    """

    def __init__(self, model: nn.Module):
        self.parameters = dict(model.named_parameters())
        self.masters = {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}
        self.adam = torch.optim.AdamW(self.masters.values(), **ADAM)

    @torch.no_grad()
    def step(self):
        for name, parameter in self.parameters.items():
            self.masters[name].grad = parameter.grad.float() / LOSS_SCALE
            parameter.grad = None
        self.adam.step()
        self.write(self.masters)

    @torch.no_grad()
    def write(self, values: dict[str, torch.Tensor]):
        """Give the parameters these values."""
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


def loss_part(model: nn.Module, config: ModelConfig, tokens, targets, first_position: int = 0) -> torch.Tensor:
    """The contribution of these tokens [s', b'], which begin at `first_position`, to a batch's mean loss."""
    positions = torch.arange(first_position, first_position + len(tokens), device=tokens.device)
    logits = model(tokens, positions).float().flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum") / config.tokens


@dataclass(frozen=True)
class Step:
    """The losses of one step, and how far they may differ. seconds: of the sharded model's step, of one rank."""

    step: int
    sharded: float
    unsharded: float
    difference: float
    allowed: float
    seconds: float


@dataclass(frozen=True)
class Gradient:
    """The worst gradient of the first step that a rank has; its error against the unsharded model's, by its norm."""

    rank: int
    parameter: str
    error: float
    allowed: float


_here = SimpleNamespace()


def start(ctx: Context, dtype: str, seed: int, kind: type) -> dict:
    """Collective. Make both models. Returns what they are, by name.

    kind: the way in which one of them is split, a class of tkernels.demo.parallel.
    """
    _here.dtype, _here.text, _here.steps = WITH_FP8[dtype], Text.of_python_help(), 0
    sizes = {name: round_up(size, ctx.size if name in kind.divided else 1) for name, size in SIZES.items()}
    _here.config = config = ModelConfig(vocabulary=len(_here.text.vocabulary), **sizes)
    _here.generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    _here.unsharded = Transformer(config).to(ctx.device, result_dtype(_here.dtype))
    _here.sharded = kind(copy.deepcopy(_here.unsharded), config, ctx, FLOAT8 if _here.dtype in FP8 else None)
    _here.optimizer = Optimizer(_here.unsharded)
    return {
        "runtime": ctx.runtime,
        "transport": ctx.transport,
        "device": torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "CPU",
        "parallel": kind.name,
        "ranks": ctx.size,
        "share": _here.sharded.share,  # of a rank, in words
        "dtype": dtype,
        "seed": seed,
        "text": _here.text.title,
        "characters": len(_here.text.characters),
        **asdict(config),
        "features": config.features,
        "tokens": config.tokens,  # of a step
        "parameters": sum(parameter.numel() for parameter in _here.unsharded.parameters()),
        "parameters_of_rank": sum(local(parameter).numel() for parameter in _here.sharded.model.parameters()),
    }


def step(ctx: Context) -> Step:
    """Collective. One step of both models on the same batch."""
    tokens, targets = _here.text.batch(_here.config.sequence, _here.config.batch, _here.generator)
    tokens, targets = tokens.to(ctx.device), targets.to(ctx.device)
    began = time.perf_counter()
    with _here.sharded.counter:
        sharded = _here.sharded.step(tokens, targets).item()
    seconds = time.perf_counter() - began
    loss = loss_part(_here.unsharded, _here.config, tokens, targets)
    (loss * LOSS_SCALE).backward()
    _here.optimizer.step()
    ctx.check()
    unsharded = loss.item()
    allowed = allowed_loss(_here.config, _here.dtype, unsharded, _here.steps)
    _here.steps += 1
    return Step(_here.steps, sharded, unsharded, abs(sharded - unsharded), allowed, seconds)


def worst_gradient(ctx: Context) -> Gradient:
    """Collective. After the first step: the gradient with the largest error against the unsharded model's."""
    errors = {}
    for name, gradient in _here.sharded.gradients().items():
        got, want = gradient.cpu().double(), _here.optimizer.masters[name].grad.cpu().double()
        error = ((got - want).norm() / want.norm()).item()
        errors[name] = math.inf if math.isnan(error) else error
    worst = max(errors, key=errors.get)
    return Gradient(ctx.rank, worst, errors[worst], allowed_gradient(_here.config, _here.dtype))


def operations(ctx: Context) -> list[Operation]:
    """What this rank has called and sent so far."""
    return _here.sharded.counter.operations()
