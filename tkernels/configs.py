"""Configurations of operations: their tiles, and how their data is sent. Which one a call gets: choice.py."""

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import NamedTuple

import torch

from tkernels.comm.mail import MAX_TILE_CHUNKS
from tkernels.comm.regions import round_up

OPERATIONS = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # of operands alone, with scales
ALIKE = (*DTYPES, FP8[0])  # that both operands may have
LAYOUTS = ("TN", "NN", "NT", "TT", "pointers")
MIN_CHUNK_ROWS = 16
COUNT = (1 << 31) - 1  # most that a kernel's argument counts; tiles end before, at Triton's 2**20 elements of a tensor
# Copies to each peer, in a reduction: a single copy could begin only after the last tile for that peer. Least size of
# each copy where a peer gets several.
COPIES, PIECE_BYTES = 2, 6 << 20
# Most elements that an interleaved program copies per step while it holds the accumulator of a tile: between two ranks,
# and among more, where larger steps spill (bench/LOG.md has the times of both, and of one copy and two, 2026-11-22).
INTERLEAVED_BLOCK = 16384, 8192


class Wire(NamedTuple):
    """How rows travel, on which all ranks of a call must agree: rows behind one signal, and whether they land."""

    chunk_rows: int
    landing: bool


def _whole(value, least: int, most: int = COUNT) -> bool:
    return isinstance(value, int) and least <= value <= most


def _power(value, least: int, most: int = COUNT) -> bool:
    return _whole(value, least, most) and not value & (value - 1)


# The check of each field, and its description in error messages. Fields that both classes have obey the same rule.
_ALLOWED = {
    name: (allowed, words)
    for names, words, allowed in [
        ("block_m block_n block_k", "a power of two from 16 to 1024", lambda value: _power(value, 16, 1024)),
        ("put_block", "a power of two from 16 to 2**20", lambda value: _power(value, 16, 1 << 20)),
        ("num_warps", "a power of two up to 32", lambda value: _power(value, 1, 32)),
        ("split", "1, 2 or 4", lambda value: _power(value, 1, 4)),
        ("use_tma interleaved landing", "True or False", lambda value: _whole(value, False, True)),
        ("group_m num_stages chunk_rows max_splits", f"a whole number from 1 to {COUNT}",
         lambda value: _whole(value, 1)),
        ("max_programs max_registers copy_rows", f"None, or a whole number from 1 to {COUNT}",
         lambda value: value is None or _whole(value, 1)),
        ("num_comm", f"a whole number from 0 to {COUNT}", lambda value: _whole(value, 0)),
        ("split_tiles", f"None, or a whole number from 0 to {COUNT}",
         lambda value: value is None or _whole(value, 0)),
        ("gemm", "a GemmConfig", lambda value: isinstance(value, GemmConfig)),
    ]
    for name in names.split()
}  # fmt: skip


def check_field(what: str, name: str, value):
    """Raise ValueError, beginning with `what`, for a value that a configuration's field of that name can't have."""
    allowed, words = _ALLOWED[name]
    if not allowed(value):
        raise ValueError(f"{what}: {name}={value!r} must be {words}")


def _check_fields(config):
    for name, value in vars(config).items():
        check_field(type(config).__name__, name, value)


@dataclass(frozen=True)
class GemmConfig:
    """How one GEMM is tiled.

    group_m: rows of tiles that are walked together, so that one pass over w serves them all from L2.
    split: column slices in which the epilogue stores a tile (Triton's EPILOGUE_SUBTILE), of which each takes shared
        memory, and registers where it is stored through pointers. 4 takes a block_n of 64 or more. Not split-K, which
        is OverlapConfig.max_splits.
    num_stages: of the load pipeline; a fused operation takes fewer where it splits tiles along K (model.stages_of).
    use_tma: load and store through TMA descriptors where the layout allows and the GPU has TMA; False: always through
        pointers. As TF32, what TMA loads is rounded to the nearest, as torch has it; of the rest bits are cut off.
    max_programs: limit for a local GEMM, which leaves SMs to kernels that run beside it.
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

    def __post_init__(self):
        _check_fields(self)
        if self.split == 4 and self.block_n < 64:
            raise ValueError(f"GemmConfig: split=4 takes a block_n of 64 or more, not {self.block_n}; pass split=2")


@dataclass(frozen=True)
class OverlapConfig:
    """How a fused operation is tiled and how its data is sent: by comm programs, the copy engine, or interleaved.

    gemm: the tiles.
    chunk_rows: rows behind one signal; a multiple or a divisor of gemm.block_m. The same on all ranks of a call.
    num_comm: comm programs, which send by SM stores while the others compute. 9 to 12 saturate what NVLink gives to
        stores, 320 GB/s of the copy engine's 385 on H200 (16 MB to each of 3 peers). 0 (and not interleaved): no
        program is dedicated to communication; the copy engine sends, which takes no SM. It reaches ranks whose memory
        is mapped here, like transport `peer`, and needs `landing`.
    interleaved: all programs of a reduction send. Each sends its own finished tile while it computes the next one, at
        a step along K that differs from program to program, so that they do not all use the link at once. The tiles
        are sent by stores to mapped memory; num_comm must be 0.
    landing: rows arrive in the landing, the single receive buffer that the copy engine writes into
        (tkernels.comm.mail); nothing is sent there before all ranks have entered the call. False: in one of two
        inboxes that alternate. The same on all ranks of a call; always True with the copy engine.
    copy_rows: rows of one copy of the copy engine, which is efficient with many. A multiple of chunk_rows, and a
        multiple or a divisor of gemm.block_m. None: chunk_rows.
    put_block: elements that a program copies per step, no more than INTERLEAVED_BLOCK if interleaved. 16384 beat 8192
        by 8 % on llama70b-qkv (4 H200s, bench/LOG.md).
    max_registers: limit of registers per thread. Without one ptxas may spill to make room for a second program on an
        SM: 36 spills at 128 registers for fp32 by pointers.
    max_programs: limit below the context's number of programs, which leaves SMs to kernels that run beside this one.
    split_tiles: how many of the last tiles are split along K into max_splits parts (split-K), one program per part, so
        that the last wave keeps more programs busy. The fp32 partial sums of each part but one are written and read
        once more, and added in a fixed order. None: a model of the launch's end decides (waves.plan_waves), with up
        to max_splits parts. Not where interleaved: adding the parts would take the registers that sending needs.
    max_splits: most parts of a tile; 1: no tile is split.
    """

    gemm: GemmConfig = field(default_factory=GemmConfig)
    chunk_rows: int = 128
    num_comm: int = 12
    _: KW_ONLY
    interleaved: bool = False
    landing: bool = False
    copy_rows: int | None = None
    put_block: int = 16384
    max_registers: int | None = None
    max_programs: int | None = None
    split_tiles: int | None = None
    max_splits: int = 4

    @property
    def wire(self) -> Wire:
        return Wire(self.chunk_rows, self.landing)

    def with_wire(self, wire: Wire) -> "OverlapConfig":
        """The same with this wire format, and copies of as many rows as before, in whole chunks."""
        assert wire.landing or not self.copied, "the copy engine writes into the landing alone"
        if self.wire == wire:
            return self
        config = replace(self, chunk_rows=wire.chunk_rows, landing=wire.landing, copy_rows=None)
        return _copying(config, self.sent_rows) if config.copied else config

    @property
    def sent_rows(self) -> int:
        """Rows that are sent at a time: those of a copy with the copy engine, else of a chunk."""
        return (self.copied and self.copy_rows) or self.chunk_rows

    @property
    def copied(self) -> bool:
        """Whether the copy engine sends."""
        return not (self.num_comm or self.interleaved)

    @property
    def tile_chunks(self) -> int:
        """Most chunks that the rows of a tile belong to."""
        return max(self.gemm.block_m // self.chunk_rows, 1)

    def copy_block(self, aligned: bool, ranks: int) -> int:
        """Elements that a program copies per step: put_block; fewer if interleaved or if rows are not 16-byte aligned.

        Interleaved, the accumulator of a tile stays in registers during the copy. Elements that are not copied in
        vectors of 16 bytes cost a register each.
        """
        block = min(self.put_block, INTERLEAVED_BLOCK[ranks > 2]) if self.interleaved else self.put_block
        return block if aligned else block // 8

    def __post_init__(self):
        _check_fields(self)
        if self.num_comm and self.interleaved:
            raise ValueError(f"with interleaved=True all programs send, so num_comm must be 0, and is {self.num_comm}")
        if self.split_tiles and self.interleaved:
            raise ValueError(f"with interleaved=True no tile is split, but split_tiles={self.split_tiles}")
        if self.copied:
            object.__setattr__(self, "landing", True)
        for name in ("chunk_rows", "copy_rows"):
            rows = getattr(self, name)
            if rows is not None and rows % self.gemm.block_m and self.gemm.block_m % rows:
                raise ValueError(
                    f"{name}={rows} must be a multiple or a divisor of block_m={self.gemm.block_m}, so that "
                    f"it holds whole tiles, or a tile whole numbers of it"
                )
        if self.copy_rows is not None and self.copy_rows % self.chunk_rows:
            raise ValueError(f"copy_rows={self.copy_rows} must be whole chunks, of chunk_rows={self.chunk_rows}")
        if self.tile_chunks > MAX_TILE_CHUNKS.value:
            raise ValueError(
                f"chunk_rows={self.chunk_rows} cuts a tile of block_m={self.gemm.block_m} into {self.tile_chunks} "
                f"chunks; there may be {MAX_TILE_CHUNKS.value}"
            )


def chunks_fit(chunk_rows: int, block_m: int) -> bool:
    """Whether a chunk holds whole tiles, or a tile whole chunks, at most MAX_TILE_CHUNKS of them."""
    return chunk_rows % block_m == 0 or (block_m % chunk_rows == 0 and block_m // chunk_rows <= MAX_TILE_CHUNKS.value)


def by_copy_engine(config: OverlapConfig, rows: int, row_bytes: int, copies: int = COPIES) -> OverlapConfig:
    """The same tiles and chunks, but the copy engine sends, in up to `copies` copies per peer of at least PIECE_BYTES.

    rows: the most rows that any rank sends to a peer. row_bytes: of each row.
    """
    pieces = min(max(rows * row_bytes // PIECE_BYTES, 1), copies)
    return _copying(config, -(-rows // pieces))


def _copying(config: OverlapConfig, rows: int) -> OverlapConfig:
    whole = math.lcm(config.gemm.block_m, config.chunk_rows)
    return replace(config, num_comm=0, interleaved=False, copy_rows=max(round_up(rows, whole), whole))


def with_room_for(
    config: OverlapConfig, stored: torch.dtype, dtype: torch.dtype, precision: str = "ieee"
) -> OverlapConfig:
    """Adapt a configuration, by rule or tuned for usual results of operands of `dtype`, to what takes more room.

    stored: the dtype of results. Beside the load pipeline of 128 x 256 tiles there is no shared memory for fp32 slices.
    Through pointers, 128 x 64 tiles spill 2 registers unless they are stored in slices.
    precision: as gemm.precision says it. Sums of FP8 that are promoted take a second accumulator (`for_precision`).
    """
    gemm = for_precision(config.gemm, precision)
    if stored.itemsize > result_dtype(dtype).itemsize:
        gemm = replace(gemm, block_n=min(gemm.block_n, 128), split=2)
    return config if gemm == config.gemm else replace(config, gemm=gemm)


def by_elements(gemm: GemmConfig, one_slice: bool = False) -> GemmConfig:
    """The tiles for a result whose rows TMA can't take: stored in two slices, they spill 22 to 91 registers.

    one_slice: instead of four, as local products of 16 bits without an activation, of which it spills none either: of
    K = 106 four take 1.3 times as long. With gelu one takes 1.1 times as long as four.
    """
    split = 1 if one_slice else 4 if gemm.block_n >= 64 else 2
    return replace(gemm, split=split) if gemm.use_tma else gemm


def for_precision(gemm: GemmConfig, precision: str) -> GemmConfig:
    """The tiles, or where sums are promoted narrower ones: two accumulators of 128 x 256 spill 50 to 130 registers."""
    return replace(gemm, block_n=min(gemm.block_n, 128)) if precision == "promoted" else gemm


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of results, and of partial sums that are sent, unless another is asked for."""
    return torch.bfloat16 if dtype in FP8 else dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
