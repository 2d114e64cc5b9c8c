"""Activations of products: on the device, in torch, and in place after torch's products."""

import functools

import torch
import triton
import triton.language as tl

from tkernels.comm.device import INTERPRETED

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


def check_activation(caller: str, activation: str | None):
    """Raise ValueError unless it is one of ACTIVATIONS."""
    if not isinstance(activation, str | None) or activation not in ACTIVATIONS:
        known = ", ".join(map(str, ACTIVATIONS))
        raise ValueError(f"{caller}: activation={activation!r} is unknown; use {known}")


# fmt: off
@triton.jit
def _exp2(x):  # its argument is log2(e) = 1.4426950408889634 times that of exp
    """2**x in fp32, off by up to 2 units in the last place; what is less than 2**-126 is 0.

    tl.exp2 takes three more instructions an element for those numbers. Code that runs once a tile, all of it in a line,
    costs the time to fetch it besides: of 10,584 instructions a short product of FP8 took 35 us more than without an
    activation, of 6,424 it takes 3 (H200, bench/LOG.md).
    """
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x):
    """1 / x in fp32 of x >= 1, off by 1 unit in the last place; 0 for x beyond 2**126. A division takes four more."""
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def activate(value, ACTIVATION: tl.constexpr):
    """Apply an activation to an fp32 tile; ACTIVATION is a number of ACTIVATIONS."""
    if ACTIVATION == 1:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)  # by default NaN becomes 0, unlike torch
    elif ACTIVATION == 2:
        # Phi(-|value|) = exp(-value^2 / 2) t P(t), P fitted to err by 1e-8 at most, a sixth of a rounding in fp32.
        t = _reciprocal(1.0 + 0.28 * tl.abs(value))
        tail = 0.11652085 + t * (0.06749627 + t * (0.26891138 + t * (-0.23699501 + t * (0.38987497 - 0.10580848 * t))))
        tail *= t * _exp2(-0.7213475204444817 * value * value)
        # Multiplied before the choice: value times what is chosen of tail and 1 - tail spills 37 registers in an
        # all-gather's tiles of 128x256. The largest number, as infinity times 0 is NaN.
        tail *= tl.minimum(value, 3.4e38)
        value = tl.where(value < 0.0, tail, value - tail)
    elif ACTIVATION == 3:
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) value (1 + 0.044715 value^2)
        value *= _reciprocal(1.0 + _exp2(-2.302208198144325 * value * (1.0 + 0.044715 * value * value)))
    elif ACTIVATION == 4:
        value *= _reciprocal(1.0 + _exp2(-1.4426950408889634 * value))
    return value
# fmt: on


def activation_reference(value: torch.Tensor, activation: str | None) -> torch.Tensor:
    """The activation of `activate` in torch, differentiable."""
    if activation is None:
        return value
    functional = torch.nn.functional
    return {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
    }[activation](value)


def activate_in_place(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Apply an activation to y, and return it."""
    if activation == "relu":
        y.relu_()
    elif activation == "silu":
        torch.nn.functional.silu(y, inplace=True)
    elif activation is not None:
        torch.ops.aten.gelu_(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y
