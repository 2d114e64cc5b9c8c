"""How an operation is tiled and how its data travels: its configuration, and the one that a call without one gets."""

import functools
from dataclasses import dataclass, field

import torch

from tkernels.comm import runtime


@dataclass(frozen=True)
class GemmConfig:
    """How one GEMM is tiled.

    group_m: rows of tiles that are walked together, so that one pass over w serves them all from L2.
    split: column slices in which a tile is stored; 2 halves the shared memory that the epilogue needs.
    use_tma: descriptors where the layout allows; False loads and stores by pointers always.
    max_programs: of a local product; fewer leave multiprocessors to what runs beside it.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    split: int = 2
    num_warps: int = 8
    num_stages: int = 3
    use_tma: bool = True
    max_programs: int | None = None


@dataclass(frozen=True)
class OverlapConfig:
    """How a fused operation is tiled and how its data travels.

    gemm: the tiles.
    chunk_rows: rows behind one signal; a multiple of gemm.block_m.
    num_comm: programs that send while the others multiply. 9 to 12 reach what NVLink gives to stores, 320 GB/s of the
        copy engine's 385 on H200 (16 MB to each of 3 peers).
    put_block: elements that a program copies at a step; 16384 beat 8192 by 8 % on llama70b-qkv (4 H200s, bench/LOG.md).
    max_registers: a limit of registers a thread. Without one ptxas may spill to make room for a second program on a
        multiprocessor: 36 spills at 128 registers for fp32 by pointers.
    max_programs: fewer than the context's leave multiprocessors to what runs beside the operation.
    """

    gemm: GemmConfig = field(default_factory=GemmConfig)
    chunk_rows: int = 128
    num_comm: int = 12
    put_block: int = 16384
    max_registers: int | None = None
    max_programs: int | None = None

    def copy_block(self, aligned: bool) -> int:
        """put_block where rows are of whole 16 bytes; else fewer, for every element then costs registers."""
        return self.put_block if aligned else self.put_block // 8

    def __post_init__(self):
        if self.chunk_rows % self.gemm.block_m:
            raise ValueError(
                f"chunk_rows={self.chunk_rows} must be a multiple of block_m={self.gemm.block_m}, so that a tile "
                f"waits for one chunk"
            )


def default_config(M: int, N: int, dtype: torch.dtype, tma: bool = True) -> GemmConfig:
    """The tiles for a local GEMM of M x N. tma: everything has a layout that descriptors can describe.

    None of these spills registers. The row count of a tile depends on nothing that could differ between ranks.
    """
    if runtime.RUNTIME == "simulated":
        # The interpreter's cost is per operation, hardly per element: 64 x 64 x 64 takes a third of the time of
        # 32 x 32 x 32 on 256 x 128 x 64. Small products, as in tests, still get several tiles.
        size = 32 if M <= 128 else 64
        return GemmConfig(size, size, size, group_m=2)
    if dtype == torch.float32:
        # IEEE fp32 has no tensor cores: 190 registers with 8 warps; with 4 warps 255 and 160 spills.
        return GemmConfig(64, 64, 32 if tma else 16, split=1)
    if not tma:
        # Element by element, each element of a tile costs registers: 128 x 256 spills 900 times, 128 x 128 x 32 150.
        return GemmConfig(64 if M <= 64 else 128, 64, 32, split=1, num_warps=4 if M <= 64 else 8)
    if M <= 64:
        return GemmConfig(64, 128, 64, num_warps=4, num_stages=4)
    if N <= 128:
        return GemmConfig(128, 128, 64, num_warps=8, num_stages=4)
    return GemmConfig()


def default_overlap(
    M: int, N: int, dtype: torch.dtype, size: int, num_programs: int, tma: bool = True
) -> OverlapConfig:
    """The configuration of a fused operation whose local GEMM is M x N, among `size` ranks; tma: as default_config."""
    gemm = default_config(M, N, dtype, tma)
    if runtime.RUNTIME == "simulated":
        return OverlapConfig(gemm, chunk_rows=gemm.block_m, num_comm=min(2, num_programs - 1), put_block=4096)
    peers = max(size - 1, 1)
    num_comm = min(max(12 // peers, 1) * peers, num_programs - 1)
    max_registers = 255 if dtype == torch.float32 else None
    return OverlapConfig(gemm, max(128, gemm.block_m), num_comm, max_registers=max_registers)


@functools.lru_cache(maxsize=4096)
def gemm_config(M: int, N: int, K: int, dtype: torch.dtype, layout: str) -> GemmConfig:
    """What `matmul` uses for x [M, K] and w [N, K] without a configuration. layout: as gemm.layout_of names it."""
    return default_config(M, N, dtype, layout != "pointers")


def overlap_config(ctx, operation: str, M: int, N: int, K: int, dtype: torch.dtype, layout: str) -> OverlapConfig:
    """What a fused operation uses without a configuration, where a rank multiplies x [M, K] by w [N, K]."""
    key = (operation, M, N, K, dtype, layout)
    config = ctx.configs.get(key)
    if config is None:
        config = default_overlap(M, N, dtype, ctx.size, ctx.num_programs, layout != "pointers")
        ctx.configs[key] = config
    return config
