"""y[M, N] = activation(sum over ranks of (x_shard_k[M, K/R] @ w_shard_k[N, K/R].T) + bias), on every rank.

M rows.  N out-features.  K/R this rank's part of the reduction dimension.  R ranks.

Reduce-scatter and all-gather in one launch of the `matmul_reduce_scatter` kernel: each rank sums and finishes an even
share of the rows and sends it to all others, so every rank holds the same bits.
"""

from tkernels.comm.device import operation
from tkernels.matmul_reduce_scatter import MatmulReduceScatter

OP = operation("matmul_all_reduce")


class MatmulAllReduce(MatmulReduceScatter):
    """A call of `matmul_all_reduce`, of x_shard_k [M, K/R], w_shard_k [N, K/R], bias [N] and None. Returns y [M, N]."""

    __slots__ = ()

    operation, number, gather = "matmul_all_reduce", OP.value, True
