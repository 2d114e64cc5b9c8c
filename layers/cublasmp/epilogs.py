"""Epilogs in torch, in fp32, on the sum over ranks: those that the kernels' own epilogue doesn't support.

Matrices here are transposed, as in the kernels: D and the auxiliary matrices are [n, m], and a column of cuBLASMp's D
is a row. The bias and the bits of a ReLU mask therefore run along the last dimension.
"""

import torch
from torch.nn import functional

from tkernels.layers.cublasmp.options import MatmulEpilog
from tkernels.layers.cublasmp.problem import AUX, D_GELU, D_RELU, gelu_aux_shape, relu_aux_shape


def apply(epilog: MatmulEpilog, value: torch.Tensor, inputs: dict, dtype: torch.dtype) -> tuple[torch.Tensor, dict]:
    """Apply the epilog: (the result [n, m], {name: auxiliary output}).

    value: float32 [n, m], alpha op(A) op(B) + beta C; may be overwritten.
    inputs: the epilog's inputs, matrices transposed.
    dtype: of the values in gelu_aux.
    """
    aux = {}
    if MatmulEpilog.BIAS in epilog:
        value += inputs["bias"]
    if D_RELU in epilog:
        value *= unpack_bits(inputs["relu_aux"], value.shape[1])
    elif D_GELU in epilog:
        before = inputs["gelu_aux"][:, : value.shape[1]].float()
        value = torch.ops.aten.gelu_backward(value, before, approximate="tanh")
    elif MatmulEpilog.RELU in epilog:
        if AUX in epilog:
            aux["relu_aux"] = pack_bits(value > 0)
        value = value.relu_()
    elif MatmulEpilog.GELU in epilog:
        if AUX in epilog:
            padded = gelu_aux_shape(*value.t().shape)[0] - value.shape[1]
            aux["gelu_aux"] = functional.pad(value.to(dtype), (0, padded))
        value = functional.gelu(value, approximate="tanh")
    return value, aux


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """mask [n, m] -> uint8 [n, bytes]: element i of a row is bit i % 8 of byte i // 8, lowest bit first."""
    n, m = mask.shape
    num_bytes = relu_aux_shape(m, n)[0]
    bits = functional.pad(mask.to(torch.uint8), (0, 8 * num_bytes - m)).view(n, num_bytes, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(2, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, m: int) -> torch.Tensor:
    """The inverse of pack_bits: uint8 [n, bytes] -> bool [n, m]."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return bits.flatten(1)[:, :m].bool()
