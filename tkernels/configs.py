"""Configurations of operations (their tiles, and how their data is sent), and the choice of one for calls without any.

A call without a configuration gets the one that was tuned on this machine (`tkernels tune`), else one that comes with
the package, else a default computed by rule. A tuned configuration holds for a bucket: the sizes of a rank's local GEMM
rounded up to powers of two, the dtype, and the layout. A repeated lookup costs one dictionary access.

All ranks must agree on which rows are behind one signal and in which buffer they arrive, or a rank would read rows that
are not there yet. Ranks choose from the same records, those of rank 0 when the context was made, but not by the same
sizes: N of an all-gather and K of a reduction may differ where features divide unevenly, and so may layouts. Therefore
`chunk_rows` and `landing` depend only on values that all ranks share: they are those of the largest GEMM that was tuned
for the same number and width of rows, or the rule's. Each rank chooses the rest of its configuration by itself,
including whether comm programs, the copy engine or all programs send.
"""

import functools
import math
import warnings
from dataclasses import KW_ONLY, dataclass, field, fields, replace

import torch
import triton.language as tl

from tkernels.comm import runtime, tuned
from tkernels.comm.calls import local_calls
from tkernels.comm.context import Context
from tkernels.comm.contexts import current_context
from tkernels.comm.errors import TkernelsError
from tkernels.comm.regions import round_up

OPERATIONS = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("TN", "NN", "NT", "TT", "pointers")
KEY = ("operation", "M", "N", "K", "dtype", "layout")  # of a bucket, by name
MIN_CHUNK_ROWS = 16
COUNT = (1 << 31) - 1  # most that a kernel's argument counts; tiles end before, at Triton's 2**20 elements of a tensor
SPARE = 1.3  # how many times faster than the local GEMM a reduction's comm programs can send, if there are enough
MAX_TILE_CHUNKS = tl.constexpr(8)  # most chunks of a tile, whose signals it checks in one poll
CHUNK_BYTES = 1 << 20  # of one put; with puts of 128 KB a program sends a quarter less (H200, 9 programs)
# From one GPU to its peers by SM stores, H200 over NVLink: 91 GB/s with 3 programs, 172 with 6, 250 with 9, 324 with
# 12, and no more with more programs.
SEND_BYTES_PER_S, BYTES_PER_S_OF_A_PROGRAM = 320e9, 28e9
REDUCED_BYTES_PER_S_OF_A_PROGRAM = 24e9  # of a reduction, where it waits for tiles in between
# An all-gather between two ranks needs fewer comm programs, and sends twice as many bytes per put where shares are
# large. 2 H200s, time relative to cuBLAS's with 12 / 8 comm programs (other changes between the two runs account for up
# to 0.5 %): llama8b-qkv 1.14/1.07, 8b-gate-up 1.016/1.009, 70b-qkv 1.020/1.016, gate-up-4k 1.003/0.992,
# gpt3-fc1 1.017/1.005.
PAIR_SENDERS, PAIR_SHARE_BYTES = 8, 32 << 20
MULTIPROCESSORS, FLOPS_PER_S = 132, 800e12  # of one H200: SMs, and bf16 FLOP/s apart from the ends of tiles
MAX_CHOICES = 4096  # configurations that a context keeps

COPY_BYTES = 8 << 20  # from this size on the copy engine is efficient: a copy has a fixed cost of a few microseconds
COPY_BYTES_PER_S = 385e9  # of the copy engine, H200 over NVLink
COPIES = 2  # to each peer, in a reduction: a single copy could begin only after the last tile for that peer
# Least size of each copy where a peer gets several. rs-e on 4 H200s: 844 us with two copies of 6 MB to each peer, 869
# with one.
PIECE_BYTES = 6 << 20
# Between two ranks, all-reduces use the landing, and so the copy engine, only with smaller rows or shares than these
# (`lands`). 2 H200s, us with comm programs / with the copy engine, one pair per shape. Rows of 16 KB: shares of 64 MB
# 873/886 and 2545/2602, of 32 MB 1297/1304, of 16 MB 285/248 and 667/671, of 8 MB 191/153. Rows of 8 KB: 301/285,
# 379/369, 737/707. Among 4 H200s the copy engine sends whatever the size of rows: 778/768, 886/789, 1503/1377; with
# rows of 8 KB 408/399, 523/504 (in another run llama70b-down was slower with it: bench/LOG.md).
REDUCED_ROW_BYTES, REDUCED_SHARE_BYTES = 16 << 10, 32 << 20
# Comm programs send a reduction whose local GEMM takes less than this many times the wire time. 4 H200s, us with the
# copy engine / with comm programs, then the ratio of GEMM time to wire time. Reduce-scatters: llama8b-o 220/195, 0.7;
# rs-c 234/212, 1.0; llama70b-o 457/484, 1.3; rs-b 526/555, 1.6; llama8b-down 355/389, 2.3. All-reduces: llama8b-o
# 460/385, 0.3; rs-c 411/406, 0.5; llama70b-o 751/781, 0.7.
WIRE_BOUND = {"matmul_reduce_scatter": 1.1, "matmul_all_reduce": 0.4}
# For reduce-scatters below WIRE_BOUND: how many times faster than the local GEMM the comm programs can send, and how
# many there are at most. us with 18, 24 and 30 comm programs: llama8b-o 199, 195, 201; with 18 and 22: rs-c 212, 226.
WIRE_SPARE, MOST_COMM = 1.1, 24
# All-reduces between two ranks are interleaved where their local GEMM takes at least this many times the wire time. 2
# H200s, us with comm programs or the copy engine, whichever is faster / interleaved, then the ratio of GEMM time to
# wire time: llama8b-o 293/319, 1.0; rs-c 373/360, 1.5; llama70b-o 884/863, and 154/145 with 1024 tokens, 2.0; rs-b
# 1069/1041, 2.5; llama8b-down 718/702, 3.4; llama70b-down-4k 1310/1303, 6.9; rs-e 1683/1666, 12. Reduce-scatters were
# faster with the copy engine, us with it / interleaved: llama70b-o 749/763, llama8b-down 630/642.
INTERLEAVED_FROM = 1.25
# Most elements that an interleaved program copies per step while it holds the accumulator of a tile: between two ranks,
# and among more, where larger steps spill. All-reduces on 2 H200s with 16384 instead of 8192: llama70b-o 858 us instead
# of 869, rs-c 356 instead of 360, llama8b-down 700 instead of 704.
INTERLEAVED_BLOCK = 16384, 8192
LANDING_CHUNK_ROWS = 128  # least rows of a chunk in the landing: those of the largest tile by rule
MAX_LOOK = tl.constexpr(256)  # signals that a program polls at once, one per thread


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
        ("split", "1 or 2", lambda value: _whole(value, 1, 2)),
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
    split: column slices in which the epilogue stores a tile (Triton's EPILOGUE_SUBTILE); 2 halves the shared memory
        that it needs. Not split-K, which is OverlapConfig.max_splits.
    num_stages: of the load pipeline; a fused operation takes fewer where it splits tiles along K (overlap.stages_of).
    use_tma: load and store through TMA descriptors where the layout allows; False: always through pointers.
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
        (tkernels.comm.copies); nothing is sent there before all ranks have entered the call. False: in one of two
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
        once more, and added in a fixed order. None: a model of the launch's end decides (overlap.plan_waves), with up
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


def default_config(M: int, N: int, dtype: torch.dtype, tma: bool = True) -> GemmConfig:
    """The tiles by rule for a local GEMM of M x N. tma: all operands have layouts that TMA can describe.

    None of these spills registers. block_m depends on nothing that could differ between ranks.
    """
    if runtime.RUNTIME == "simulated":
        # The interpreter's cost is per operation, hardly per element: a GEMM of 256 x 128 x 64 takes a third of the
        # time with tiles of 64 x 64 x 64 than with 32 x 32 x 32. Small GEMMs, as in tests, still get several tiles.
        size = 32 if M <= 128 else 64
        return GemmConfig(size, size, size, group_m=2)
    if dtype == torch.float32:
        # IEEE fp32 has no tensor cores. 4 warps would spill 160 registers; block_k = 32, in fused operations, 13.
        return GemmConfig(64, 64, 16, split=1)
    if not tma:
        # Through pointers, each element of a tile costs registers: 128 x 256 spills 900 times, 128 x 128 x 32 150.
        return GemmConfig(64 if M <= 64 else 128, 64, 32, split=1, num_warps=4 if M <= 64 else 8)
    if M <= 64:
        return GemmConfig(64, 128, 64, num_warps=4, num_stages=4)
    if N <= 128:
        return GemmConfig(128, 128, 64, num_warps=8, num_stages=4)
    return GemmConfig(num_stages=4)


def default_overlap(
    operation: str,
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    size: int,
    num_programs: int,
    tma: bool = True,
    landing: bool | None = False,
    interleaved: bool = False,
    stores: bool = True,
) -> OverlapConfig:
    """The configuration by rule of a fused operation whose local GEMM is M x N x K, among `size` ranks.

    tma: as in default_config.
    landing: None: `lands` decides; only where the copy engine reaches all ranks. The copy engine sends to the landing
        if there are enough bytes (2 H200s: up to 8 % faster, bench/LOG.md), unless the local GEMM of a reduction is too
        short to hide the wire time.
    interleaved: whether the rule may choose it; not where memory isn't mapped, or comm programs are required.
    stores: whether programs send by SM stores; False: by NVSHMEM's calls, of which more are needed at a time.

    chunk_rows and landing depend on nothing that could differ between ranks.
    """
    gemm, peers = default_config(M, N, dtype, tma), max(size - 1, 1)
    if runtime.RUNTIME == "simulated":
        num_comm = max(min(2, num_programs - 1), 1)
        return OverlapConfig(gemm, gemm.block_m, num_comm, landing=bool(landing), put_block=4096)
    gathers, reduces_all = operation == "all_gather_matmul", operation == "matmul_all_reduce"
    if gemm.block_n == 256 and not gathers:  # partial sums take the shared memory of a stage
        gemm = replace(gemm, num_stages=3)
    if gathers and gemm.block_n == 256:
        # A group of rows of tiles should stay within one shard, since the rows of the next shard may not have arrived.
        # gpt3-fc1 on 4 H200s, 4 rows of tiles per shard: 1.04 of cuBLAS's time in groups of 4, 1.09 in groups of 8.
        shard_m = M // (size * gemm.block_m)
        group_m = 16 if shard_m >= 16 else 4 if 4 <= shard_m < 8 else 8
        gemm = replace(gemm, group_m=group_m)
    row_bytes = (K if gathers else N) * dtype.itemsize
    chunk_rows = min(max(1 << (CHUNK_BYTES // row_bytes).bit_length() >> 1, MIN_CHUNK_ROWS), 128)
    num_comm, product_s = max(12 // peers, 1) * peers, 2 * M * N * K / FLOPS_PER_S * MULTIPROCESSORS / num_programs
    if gathers and size == 2 and stores:
        num_comm, chunk_rows = PAIR_SENDERS, chunk_rows * (2 if M * row_bytes >= 2 * PAIR_SHARE_BYTES else 1)
    sent = M * row_bytes * peers / size * (2 if reduces_all else 1)
    wire_s = sent / COPY_BYTES_PER_S
    senders = sent / REDUCED_BYTES_PER_S_OF_A_PROGRAM / product_s  # comm programs that take as long as the GEMM
    if not gathers:
        # No more comm programs than sending needs: one is idle until there are tiles to send.
        num_comm = min(max(math.ceil(SPARE * senders), 2), num_comm)
        # The rows of tiles of a group finish together; the peers' rows must not all finish at once.
        while gemm.group_m > 1 and 2 * gemm.group_m * gemm.block_m > M * peers // size:
            gemm = replace(gemm, group_m=gemm.group_m // 2)
    max_registers = 255 if dtype == torch.float32 else None
    num_comm = max(min(num_comm, num_programs - 1), 1)
    config, rows = OverlapConfig(gemm, chunk_rows, num_comm, max_registers=max_registers), -(-M // size)
    measured = reduces_all and size == 2 and tma and dtype != torch.float32  # the case of INTERLEAVED_FROM
    if interleaved and measured and product_s >= INTERLEAVED_FROM * wire_s:
        config = replace(config, num_comm=0, interleaved=True)
    if not (lands(operation, rows, row_bytes, size) if landing is None else landing):
        return config
    # Whole tiles per chunk, since a tile polls each chunk that it needs; and so few chunks that one poll covers all.
    chunk_rows = LANDING_CHUNK_ROWS
    while -(-rows // chunk_rows) * peers > MAX_LOOK.value:
        chunk_rows *= 2
    config = replace(config, landing=True, chunk_rows=chunk_rows)
    if rows * row_bytes < COPY_BYTES or config.interleaved:
        return config
    # A copy waits for thousands of rows, a comm program only for a chunk, which keeps the wire busy from the start.
    num_comm = min(math.ceil(WIRE_SPARE * senders), MOST_COMM, num_programs // 4)
    hidden = gathers or dtype == torch.float32 or product_s >= WIRE_BOUND[operation] * wire_s
    if hidden or num_comm < 1:
        return by_copy_engine(config, rows, row_bytes, 1 if gathers else COPIES)
    if reduces_all:
        return config
    return replace(config, num_comm=num_comm, gemm=replace(gemm, group_m=min(gemm.group_m, 2)))


def lands(operation: str, rows: int, row_bytes: int, size: int) -> bool:
    """Whether by rule shares of `rows` rows go to the landing, where the copy engine can write: from COPY_BYTES on.

    All-reduces between two ranks use it only with rows of less than REDUCED_ROW_BYTES, or shares of less than
    REDUCED_SHARE_BYTES.
    """
    share = rows * row_bytes
    if operation == "matmul_all_reduce" and size == 2 and row_bytes >= REDUCED_ROW_BYTES:
        return COPY_BYTES <= share < REDUCED_SHARE_BYTES
    return share >= COPY_BYTES


def with_room_for(config: OverlapConfig, stored: torch.dtype, dtype: torch.dtype) -> OverlapConfig:
    """Adapt a configuration, by rule or tuned for results of the operands' dtype, to results of a wider dtype `stored`.

    Beside the load pipeline of 128 x 256 tiles there is no shared memory for fp32 slices. Through pointers, 128 x 64
    tiles spill 2 registers unless they are stored in slices.
    """
    if stored.itemsize == dtype.itemsize:
        return config
    return replace(config, gemm=replace(config.gemm, block_n=min(config.gemm.block_n, 128), split=2))


def gemm_config(
    M: int, N: int, K: int, dtype: torch.dtype, layout: str, stored: torch.dtype | None = None
) -> GemmConfig:
    """The configuration that `matmul` uses for x [M, K] and w [N, K] by default. layout: as gemm.layout_of names it.

    stored: the dtype of the result, if it differs; larger elements take the shared memory of a stage.
    """
    key = (gemm_config, M, N, K, dtype, layout, stored)
    return local_calls.find(key, lambda: _gemm_config(*key[1:]))  # beside the plans that are made from it


def _gemm_config(M: int, N: int, K: int, dtype: torch.dtype, layout: str, stored: torch.dtype | None) -> GemmConfig:
    try:
        table = _table(current_context())
    except TkernelsError:  # there is no context
        table = _table_without_context()
    found = table.configs.get(("matmul", *bucket(M, N, K), name_of(dtype), layout))
    config = found or default_config(M, N, dtype, layout != "pointers")
    larger = stored is not None and stored.itemsize > dtype.itemsize
    return replace(config, num_stages=min(config.num_stages, 3)) if larger else config


def overlap_config(
    ctx: Context, operation: str, M: int, N: int, K: int, dtype: torch.dtype, layout: str, sending: bool = False
) -> OverlapConfig:
    """The configuration that a fused operation uses by default, where the local GEMM is x [M, K] times w [N, K].

    sending: require comm programs that send into the two alternating inboxes.
    """
    M, N, K = max(M, 1), max(N, 1), max(K, 1)  # an empty share is computed as one row or column of zeros
    key = (operation, M, N, K, dtype, layout, sending)
    config = ctx.choices.get(key)
    if config is None:
        if len(ctx.choices) >= MAX_CHOICES:
            ctx.choices.clear()
        config = _choose(ctx, *key[:-1])
        if sending and (config.landing or not config.num_comm):
            tma, by_stores = layout != "pointers", sends_by_stores(ctx)
            rule = default_overlap(operation, M, N, K, dtype, ctx.size, ctx.num_programs, tma, stores=by_stores)
            config = rule if config.landing else travelling(rule, *travel_of(config))
        ctx.choices[key] = config
    return config


def sends_by_stores(ctx: Context) -> bool:
    """Whether programs send by SM stores, not by NVSHMEM's calls, which a context can also use within one machine."""
    return ctx.transport != "nvshmem"


def forget_choices(ctx: Context):
    """Drop all cached choices and the plans made from them, since the context's records have changed."""
    ctx.choices.clear()
    ctx.forget_calls()
    local_calls.clear()
    _table_without_context.cache_clear()


def _choose(ctx: Context, operation: str, M: int, N: int, K: int, dtype: torch.dtype, layout: str) -> OverlapConfig:
    table = _table(ctx)
    key = (operation, *bucket(M, N, K), name_of(dtype), layout)
    by_rule = rule_bound(ctx, operation, M, N, K, dtype, layout, table.travels.get(shared(key), (None, None))[0])
    config = table.configs.get(key, by_rule)
    fits = config.num_comm < min(ctx.num_programs, config.max_programs or ctx.num_programs)
    can_travel = config.num_comm or by_rule.landing or config.interleaved and ctx.mapped
    if not fits or not can_travel or not chunks_fit(by_rule.chunk_rows, config.gemm.block_m):
        return by_rule
    return travelling(config, *travel_of(by_rule))


def rule_bound(
    ctx: Context, operation: str, M: int, N: int, K: int, dtype: torch.dtype, layout: str,
    travel: tuple[int, bool] | None,
) -> OverlapConfig:  # fmt: skip
    """The configuration by rule, with the (chunk_rows, landing) of a larger GEMM in `travel`; None: the rule's own.

    In the landing, chunks are always the rule's: a copy takes many at a time, and comm programs must have small ones.
    """
    if not ctx.mapped and travel is not None and travel[1]:  # no other rank's copies reach all ranks either
        travel = None
    landing = (None if ctx.mapped else False) if travel is None else travel[1]
    tma = layout != "pointers"
    reach = {"landing": landing, "interleaved": ctx.mapped, "stores": sends_by_stores(ctx)}
    config = default_overlap(operation, M, N, K, dtype, ctx.size, ctx.num_programs, tma, **reach)
    return config if travel is None or landing else travelling(config, *travel)


def travel_of(config: OverlapConfig) -> tuple[int, bool]:
    """(chunk_rows, landing): the settings on which all ranks must agree."""
    return config.chunk_rows, config.landing


def travelling(config: OverlapConfig, chunk_rows: int, landing: bool) -> OverlapConfig:
    """The configuration with these chunk_rows and landing, and copies of as many rows as before, in whole chunks."""
    assert landing or not config.copied, "the copy engine writes into the landing alone"
    if travel_of(config) == (chunk_rows, landing):
        return config
    config, rows = replace(config, chunk_rows=chunk_rows, landing=landing, copy_rows=None), config.sent_rows
    return _copying(config, rows) if config.copied else config


def bound_travel(ctx: Context, key: tuple) -> tuple[int, bool] | None:
    """The (chunk_rows, landing) that a larger GEMM with the same rows (`shared`) imposes on a bucket, or None."""
    travel, source = _table(ctx).travels.get(shared(key), (None, key))
    return travel if source[1:4] > key[1:4] else None


def bucket(*sizes: int) -> tuple[int, ...]:
    """Sizes rounded up to powers of two.

    >>> bucket(1, 1536, 8192)
    (1, 2048, 8192)
    """
    return tuple(1 << (size - 1).bit_length() for size in sizes)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shared(key: tuple) -> tuple:
    """The part of (operation, M, N, K, dtype, layout) that is equal on all ranks even if features divide unevenly."""
    operation, M, N, K, dtype, _ = key
    return operation, M, K if operation == "all_gather_matmul" else N, dtype


class _Table:
    """The contents of records. configs: by bucket (operation, M, N, K, dtype, layout). travels: by its `shared` part.

    Records that this version can't read are ignored, with a warning.
    """

    def __init__(self, records: list[dict]):
        self.configs: dict[tuple, GemmConfig | OverlapConfig] = {}
        self.travels: dict[tuple, tuple[tuple[int, bool], tuple]] = {}  # and each one's source
        for record in records:
            try:
                key, config = read_record(record)
            except ValueError as error:
                warnings.warn(f"tuned settings of {record['key']} are ignored: {error}", stacklevel=2)
                continue
            self.configs[key] = config
        for key, config in sorted(self.configs.items(), key=lambda item: item[0][1:4]):  # the largest last: it wins
            if isinstance(config, OverlapConfig):
                self.travels[shared(key)] = travel_of(config), key


def _table(ctx: Context) -> _Table:
    if None not in ctx.choices:
        ctx.choices[None] = _Table(ctx.tuned)
    return ctx.choices[None]


@functools.cache
def _table_without_context() -> _Table:
    return _Table(tuned.known(1, tuned.LOCAL))


def read_record(record: dict) -> tuple[tuple, GemmConfig | OverlapConfig]:
    """(bucket's key, configuration) of a record with unchecked contents. Raises ValueError if they are invalid."""
    operation, *sizes, dtype, layout = key = tuple(record["key"].get(name) for name in KEY)
    known = operation in OPERATIONS and dtype in map(name_of, DTYPES) and layout in LAYOUTS
    if not known or not all(_power(size, 1) for size in sizes):
        raise ValueError(f"there is no bucket {key}")
    if operation == "matmul":
        return key, _read(GemmConfig, record.get("config"))
    config = _read(OverlapConfig, record.get("config"))
    # A rank whose layout has another configuration must still use these chunks, so they must fit the tiles by rule.
    block_m = default_config(sizes[0], sizes[1], getattr(torch, dtype)).block_m
    if not chunks_fit(config.chunk_rows, block_m):
        raise ValueError(
            f"chunk_rows={config.chunk_rows} is no multiple of {block_m}, the tiles' rows by rule, nor 1/2 to "
            f"1/{MAX_TILE_CHUNKS.value} of it"
        )
    return key, config


def _read(kind: type, settings):
    if not isinstance(settings, dict):
        raise ValueError(f"{settings!r} is no {kind.__name__}")
    unknown = set(settings) - {each.name for each in fields(kind)}
    if unknown:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    if kind is OverlapConfig:
        settings = settings | {"gemm": _read(GemmConfig, settings.get("gemm"))}
    return kind(**settings)
