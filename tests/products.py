"""What tests of the fused operations share: the tilings that all must take, and the same by torch, in fp64."""

import torch

from tkernels.activations import activation_reference
from tkernels.configs import GemmConfig, OverlapConfig

TILINGS = {  # an all-gather takes those that are not interleaved
    "last tiles in parts": OverlapConfig(
        GemmConfig(16, 32, 16), chunk_rows=32, num_comm=1, put_block=256, split_tiles=3, max_splits=4
    ),
    "one chunk of two tiles": OverlapConfig(GemmConfig(16, 32, 16), chunk_rows=32, num_comm=1, put_block=256),
    "by pointers": OverlapConfig(GemmConfig(32, 32, 32, use_tma=False), chunk_rows=32, num_comm=2, put_block=512),
    "chunks of half a tile": OverlapConfig(GemmConfig(32, 32, 32), chunk_rows=16, num_comm=1, put_block=512),
    "stored in one piece": OverlapConfig(GemmConfig(32, 16, 32, split=1), chunk_rows=64, num_comm=3, put_block=512),
    "long groups": OverlapConfig(GemmConfig(16, 16, 16, group_m=8), chunk_rows=16, num_comm=1, put_block=128),
    "by copies": OverlapConfig(GemmConfig(16, 32, 16), chunk_rows=32, num_comm=0),
    "by copies of several chunks": OverlapConfig(GemmConfig(32, 32, 32), chunk_rows=16, num_comm=0, copy_rows=64),
    "interleaved": OverlapConfig(GemmConfig(16, 32, 16), chunk_rows=32, num_comm=0, interleaved=True),
    "interleaved into the landing": OverlapConfig(
        GemmConfig(32, 32, 32), chunk_rows=16, num_comm=0, interleaved=True, landing=True, put_block=128
    ),
    "interleaved, few programs": OverlapConfig(
        GemmConfig(16, 32, 16), chunk_rows=32, num_comm=0, interleaved=True, max_programs=2
    ),
    "by programs into the landing": OverlapConfig(GemmConfig(16, 32, 16), chunk_rows=32, num_comm=2, landing=True),
    "by copies, one a peer": OverlapConfig(GemmConfig(32, 32, 32), chunk_rows=1024, num_comm=0),
}


def matmul_reference(x, w, bias=None, activation=None) -> torch.Tensor:
    """`matmul` [M, N]."""
    return _finished(x.double() @ w.double().t(), bias, activation)


def _finished(total, bias, activation) -> torch.Tensor:
    return activation_reference(total if bias is None else total + bias.double(), activation)


def product_of_gathered(ctx, x_shard_m, w, bias=None, activation=None) -> torch.Tensor:
    """Collective. all_gather_matmul: every rank's rows gathered, then one matmul."""
    return matmul_reference(torch.cat(_of_all_ranks(ctx, x_shard_m)).to(w.device), w, bias, activation)


def sum_of_products(ctx, x_shard_k, w_shard_k, bias=None, activation=None) -> torch.Tensor:
    """Collective. matmul_all_reduce: the products of all ranks summed."""
    products = _of_all_ranks(ctx, matmul_reference(x_shard_k, w_shard_k))
    return _finished(sum(products).to(x_shard_k.device), bias, activation)


def own_rows_of_sum(ctx, rows, *operands) -> torch.Tensor:
    """Collective. matmul_reduce_scatter: this rank's rows of `sum_of_products`."""
    return sum_of_products(ctx, *operands).split(rows)[ctx.rank]


def _of_all_ranks(ctx, tensor) -> list[torch.Tensor]:
    found = [None] * ctx.size
    torch.distributed.all_gather_object(found, tensor.cpu(), group=ctx.group.process_group)
    return found
