"""The work of each operation on one GPU, from global sizes: FLOPs, bytes of memory traffic, bytes over the links.

M rows, N out-features and K, the dimension summed over, are totals of all ranks.  R = ranks.
`rows` lists every rank's row count where M is divided unevenly; `rank` is the rank whose work is computed.

Memory bytes are a lower bound. Each operand is read once and each result is written once. Data that arrives over the
link is written once, and read once if something is computed from it. Data that is computed to be sent is written once
and read once for all peers. Operands of FP8 have a scale a row, which is read and sent with it; their results are bf16.
"""

from dataclasses import dataclass

import torch

from tkernels.comm.collectives import split_rows
from tkernels.configs import FP8, result_dtype


@dataclass(frozen=True)
class Work:
    """The work of one GPU in one call."""

    flops: int
    hbm_bytes: int
    link_in_bytes: int = 0
    link_out_bytes: int = 0


def matmul(M: int, N: int, K: int, dtype: torch.dtype) -> Work:
    """y [M, N] = x [M, K] @ w [N, K].T, local."""
    return Work(2 * M * N * K, (M + N) * operand_row_bytes(K, dtype) + M * N * result_dtype(dtype).itemsize)


def all_gather_matmul(M: int, N: int, K: int, ranks: int, dtype: torch.dtype, rank: int = 0, rows=None) -> Work:
    """y [M, N/R] = all_gather(x_shard_m [M/R, K]) @ w [N/R, K].T. Raises ValueError where R does not divide N."""
    local = matmul(M, _share("N", N, ranks), K, dtype)
    own = _rows(M, ranks, rows)[rank]
    incoming = (M - own) * operand_row_bytes(K, dtype)
    outgoing = own * operand_row_bytes(K, dtype) * (ranks - 1)
    return Work(local.flops, local.hbm_bytes + incoming, incoming, outgoing)


def matmul_reduce_scatter(M: int, N: int, K: int, ranks: int, dtype: torch.dtype, rank: int = 0, rows=None) -> Work:
    """y_shard_m [M/R, N] = reduce_scatter(x [M, K/R] @ w [N, K/R].T). Raises ValueError where R does not divide K."""
    local = matmul(M, N, _share("K", K, ranks), dtype)
    own, dtype = _rows(M, ranks, rows)[rank], result_dtype(dtype)
    incoming = own * N * dtype.itemsize * (ranks - 1)
    outgoing = (M - own) * N * dtype.itemsize
    # The GEMM writes M rows in any case, as partial sums or as results; the partial sums are also read, to be sent.
    return Work(local.flops, local.hbm_bytes + outgoing + 2 * incoming, incoming, outgoing)


def matmul_all_reduce(M: int, N: int, K: int, ranks: int, dtype: torch.dtype, rank: int = 0, rows=None) -> Work:
    """y [M, N] = all_reduce(x [M, K/R] @ w [N, K/R].T), as a reduce-scatter and an all-gather of y's rows."""
    scattered = matmul_reduce_scatter(M, N, K, ranks, dtype, rank, rows)
    return _then_gather(scattered, M, N, ranks, result_dtype(dtype), rank, rows)


def all_gather(M: int, width: int, ranks: int, dtype: torch.dtype, rank: int = 0, rows=None) -> Work:
    """Every rank's rows: [M/R, width] -> [M, width]."""
    own = _rows(M, ranks, rows)[rank] * width * dtype.itemsize
    incoming = M * width * dtype.itemsize - own
    return Work(0, 2 * own + incoming, incoming, own * (ranks - 1))


def reduce_scatter(M: int, width: int, ranks: int, dtype: torch.dtype, rank: int = 0, rows=None) -> Work:
    """This rank's rows of the sum over ranks: [M, width] -> [M/R, width]."""
    own = _rows(M, ranks, rows)[rank] * width * dtype.itemsize
    whole = M * width * dtype.itemsize
    incoming = own * (ranks - 1)
    return Work(incoming // dtype.itemsize, whole + own + 2 * incoming, incoming, whole - own)


def all_reduce(M: int, width: int, ranks: int, dtype: torch.dtype, rank: int = 0, rows=None) -> Work:
    """The sum over ranks of [M, width], on every rank, as a reduce-scatter and an all-gather."""
    return _then_gather(reduce_scatter(M, width, ranks, dtype, rank, rows), M, width, ranks, dtype, rank, rows)


def _then_gather(scattered: Work, M, width, ranks, dtype, rank, rows) -> Work:
    own = _rows(M, ranks, rows)[rank] * width * dtype.itemsize
    incoming = M * width * dtype.itemsize - own
    outgoing = own * (ranks - 1)
    # The own rows are already in the result; they are read once more only if there is a peer to send them to.
    hbm_bytes = scattered.hbm_bytes + incoming + (own if ranks > 1 else 0)
    return Work(scattered.flops, hbm_bytes, scattered.link_in_bytes + incoming, scattered.link_out_bytes + outgoing)


def operand_row_bytes(K: int, dtype: torch.dtype) -> int:
    """Bytes of a row of x or of w, with its scale."""
    return K * dtype.itemsize + (torch.float32.itemsize if dtype in FP8 else 0)


def _rows(M: int, ranks: int, rows) -> tuple[int, ...]:
    rows = split_rows(M, ranks) if rows is None else tuple(rows)
    if len(rows) != ranks or sum(rows) != M or min(rows) < 0:
        raise ValueError(f"rows={rows} must name a count >= 0 for each of {ranks} ranks, {M} in all")
    return rows


def _share(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"{name}={size} doesn't divide by {ranks} ranks")
    return size // ranks
