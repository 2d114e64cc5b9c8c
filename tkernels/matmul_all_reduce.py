"""y[M, N] = activation(sum over ranks of (x_shard_k[M, K/R] @ w_shard_k[N, K/R].T) + bias), on every rank.

M rows.  N out-features.  K/R this rank's part of the reduction dimension.  R ranks.

Reduce-scatter and all-gather in one launch of the `matmul_reduce_scatter` kernel: each rank sums and finishes an even
share of the rows and sends it to all others, so every rank holds the same bits.
"""

import torch

from tkernels.comm.context import Context
from tkernels.comm.device import operation
from tkernels.configs import OverlapConfig
from tkernels.gemm import precision
from tkernels.matmul_reduce_scatter import plan, sum_reference

OP = operation("matmul_all_reduce")


def matmul_all_reduce(
    ctx: Context,
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    config: OverlapConfig | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Collective. x_shard_k [M, K/R], w_shard_k [N, K/R], bias [N] -> y [M, N], the same bits on every rank.

    Bias is added once, after the sum over ranks, and the activation after it. K/R may differ by rank and be 0.

    out_dtype, wire_dtype, config, path: as for matmul_reduce_scatter; finished rows are sent in out_dtype.
    Raises ValueError or TypeError before the first signal.
    """
    tensors = x_shard_k, w_shard_k, bias, None
    options = OP.value, activation, None, out_dtype, wire_dtype, config, path, True, precision(x_shard_k.dtype)
    return ctx.call(plan, tensors, *options)


def matmul_all_reduce_reference(group, x_shard_k, w_shard_k, bias=None, activation=None) -> torch.Tensor:
    """The same with torch.distributed, in fp64."""
    return sum_reference(group, x_shard_k, w_shard_k, bias, activation)
