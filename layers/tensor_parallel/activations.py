"""What an MLP applies between its two layers, and its gradient: one of `matmul`'s activations, or a gated one.

A gated one is an activation of gate, times up, which lie side by side [..., 2 F]: "swiglu" is silu(gate) * up.
"""

import torch

from tkernels.activations import ACTIVATIONS, activation_reference

GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}  # the activation of the gate
KNOWN = (*filter(None, ACTIVATIONS), *GATES)

_aten = torch.ops.aten


def parts_of(x: torch.Tensor, activation: str | None) -> tuple[torch.Tensor, torch.Tensor | None, str | None]:
    """(what is multiplied by a gate or activated, the gate or None, the activation of matmul's or None)."""
    if activation not in GATES:
        return x, None, activation
    gate, up = x.chunk(2, -1)
    return up, gate, GATES[activation]


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """[..., F] -> [..., F], or of a gated activation [..., 2 F] -> [..., F]; differentiable."""
    x, gate, activation = parts_of(x, activation)
    return activation_reference(x, activation) if gate is None else activation_reference(gate, activation) * x


def activated_gradient(dy: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    """The gradient of `activated` at x, the same bits as autograd's."""
    x, gate, activation = parts_of(x, activation)
    if gate is None:
        return _gradient(dy, x, activation)
    return torch.cat((_gradient(dy * x, gate, activation), dy * activation_reference(gate, activation)), -1)


def _gradient(dy: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "relu":
        return _aten.threshold_backward(dy, x, 0)
    if activation == "silu":
        return _aten.silu_backward(dy, x)
    return _aten.gelu_backward(dy, x, approximate="tanh" if activation == "gelu_tanh" else "none")
