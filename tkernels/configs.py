"""How an operation is tiled and how its data travels: its configuration, and the one that a call without one gets.

That is the one tuned on this machine (`tkernels tune`), else one that comes with the package, else a default by rule.
Tuned ones hold for a bucket: sizes of a rank's product rounded up to powers of two, dtype, and layout. Looking one up
again costs a dictionary's access.

All ranks must tell alike which rows travel behind one signal, and where they land, or a rank would read rows that are
not there yet. They choose by the same records, those of rank 0 when the context was made, but not by the same sizes: N
of an all-gather and K of a reduction may differ where features divide unevenly, and so may layouts. So `chunk_rows` and
`landing` follow from what all ranks share: they are those of the largest product that was tuned for rows of the same
number and width, or the rule's. The rest of a configuration, who sends in it, is a rank's own affair.
"""

import functools
import math
import warnings
from dataclasses import KW_ONLY, dataclass, field, fields, replace

import torch
import triton.language as tl

from tkernels.comm import runtime, tuned
from tkernels.comm.context import Context, current_context
from tkernels.comm.errors import TkernelsError
from tkernels.comm.plans import local_plans
from tkernels.comm.regions import round_up

OPERATIONS = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("TN", "NN", "NT", "TT", "pointers")
KEY = ("operation", "M", "N", "K", "dtype", "layout")  # of a bucket, by name
MIN_CHUNK_ROWS = 16
SPARE = 1.3  # how much faster than the product the chunks are sent, if they can be
MAX_TILE_CHUNKS = tl.constexpr(8)  # whose signals a tile looks at in one go
CHUNK_BYTES = 1 << 20  # of one put: 128 KB lose a quarter of what a program sends (H200, 9 programs)
# One GPU to its peers by stores, H200 over NVLink: 3 programs reach 91 GB/s, 6 172, 9 250, 12 324, and more no more.
SEND_BYTES_PER_S, BYTES_PER_S_OF_A_PROGRAM = 320e9, 28e9
REDUCED_BYTES_PER_S_OF_A_PROGRAM = 24e9  # where it waits for tiles in between
# Between two ranks a gather needs fewer of them, and where shares are large it puts twice as much at a time. 2 H200s,
# time over cuBLAS's, by 12 programs / by 8, with what else changed meanwhile (up to 0.5 %): llama8b-qkv 1.14/1.07,
# 8b-gate-up 1.016/1.009, 70b-qkv 1.020/1.016, gate-up-4k 1.003/0.992, gpt3-fc1 1.017/1.005.
PAIR_SENDERS, PAIR_SHARE_BYTES = 8, 32 << 20
MULTIPROCESSORS, FLOPS_PER_S = 132, 800e12  # of a GPU, H200, bf16, but for the ends of tiles
MAX_CHOICES = 4096  # that are kept, of a context and of the local product

COPY_BYTES = 8 << 20  # a copy engine's operation has fixed costs of some microseconds, and is at its best from here on
COPY_BYTES_PER_S = 385e9  # by the copy engine, H200 over NVLink
COPIES = 2  # to a peer, of a reduction: with one its last tiles hold up all that it is sent
# Of one of several copies to a peer, at least. rs-e, 4 H200s: 844 us with two of 6 MB to a peer, 869 with one.
PIECE_BYTES = 6 << 20
# All-reduces between 2 H200s, us by programs / by copies: rows of 16 KB, shares of 64 MB 873/886, 2545/2602, of 32 MB
# 1297/1304, of 16 MB 285/248, 667/671, of 8 MB 191/153; rows of 8 KB 301/285, 379/369, 737/707. Among 4, whatever their
# rows, by copies: 778/768, 886/789, 1503/1377, of 8 KB 408/399, 523/504 (in another run llama70b-down was slower by
# them: bench/LOG.md).
REDUCED_ROW_BYTES, REDUCED_SHARE_BYTES = 16 << 10, 32 << 20
# A reduction whose product takes less than that many times the wire's time is sent by programs. Among 4 H200s, us by
# copies / by programs, and the ratio, reduce-scatters: llama8b-o 220/195, 0.7; rs-c 234/212, 1.0; llama70b-o 457/484,
# 1.3; rs-b 526/555, 1.6; llama8b-down 355/389, 2.3; all-reduces: llama8b-o 460/385, 0.3; rs-c 411/406, 0.5; llama70b-o
# 751/781, 0.7.
WIRE_BOUND = {"matmul_reduce_scatter": 1.1, "matmul_all_reduce": 0.4}
# How much faster than its product a reduce-scatter that is below that is sent, by how many programs at most: by 18, 24
# and 30 llama8b-o 199, 195, 201; by 18 and 22 rs-c 212, 226.
WIRE_SPARE, MOST_COMM = 1.1, 24
# All-reduces between two ranks are interleaved where their product takes at least that many times the wire's time. 2
# H200s, us by programs or copies, whatever is faster / interleaved, and the ratio: llama8b-o 293/319, 1.0; rs-c
# 373/360, 1.5; llama70b-o 884/863, of 1024 tokens 154/145, 2.0; rs-b 1069/1041, 2.5; llama8b-down 718/702, 3.4;
# llama70b-down-4k 1310/1303, 6.9; rs-e 1683/1666, 12. Reduce-scatters were better by copies: llama70b-o 749/763,
# llama8b-down 630/642.
INTERLEAVED_FROM = 1.25
# Elements copied at a step beside the sums of a tile, at most, between two ranks and among more, where more spill. With
# 16384 for 8192 two H200s take, all-reducing llama70b-o, 858 us for 869, rs-c 356 for 360, llama8b-down 700 for 704.
INTERLEAVED_BLOCK = 16384, 8192
LANDING_CHUNK_ROWS = 128  # at least; those of the largest tile by rule
MAX_LOOK = tl.constexpr(256)  # signals that a program looks at at once: one a thread


def _whole(value, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and least <= value <= most


def _power(value, least: int) -> bool:
    return _whole(value, least) and not value & (value - 1)


# What fields may be, and how errors say it. A field of both configurations is the same in both.
_ALLOWED = {
    name: (allowed, words)
    for names, words, allowed in [
        ("block_m block_n block_k put_block", "a power of two of at least 16", lambda value: _power(value, 16)),
        ("num_warps", "a power of two", lambda value: _power(value, 1)),
        ("split", "1 or 2", lambda value: _whole(value, 1, 2)),
        ("use_tma interleaved landing", "True or False", lambda value: _whole(value, False, True)),
        ("group_m num_stages chunk_rows max_splits", "a whole number of at least 1", lambda value: _whole(value, 1)),
        ("max_programs max_registers copy_rows", "None, or a whole number of at least 1",
         lambda value: value is None or _whole(value, 1)),
        ("num_comm", "a whole number of at least 0", lambda value: _whole(value, 0)),
        ("split_tiles", "None, or a whole number of at least 0", lambda value: value is None or _whole(value, 0)),
        ("gemm", "a GemmConfig", lambda value: isinstance(value, GemmConfig)),
    ]
    for name in names.split()
}  # fmt: skip


def _check_fields(config):
    for name, value in vars(config).items():
        allowed, words = _ALLOWED[name]
        if not allowed(value):
            raise ValueError(f"{type(config).__name__}: {name}={value!r} must be {words}")


@dataclass(frozen=True)
class GemmConfig:
    """How one GEMM is tiled.

    group_m: rows of tiles that are walked together, so that one pass over w serves them all from L2.
    split: column slices in which the epilogue stores a tile (Triton's EPILOGUE_SUBTILE); 2 halves the shared memory
        that it needs. What is split along K is OverlapConfig.max_splits.
    num_stages: of the pipeline of loads; a fused operation takes fewer where it splits tiles (overlap.stages_of).
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

    def __post_init__(self):
        _check_fields(self)


@dataclass(frozen=True)
class OverlapConfig:
    """How a fused operation is tiled and how its data travels.

    gemm: the tiles.
    chunk_rows: rows behind one signal; a multiple or a divisor of gemm.block_m. The same on all ranks of a call.
    num_comm: programs that send while the others multiply. 9 to 12 reach what NVLink gives to stores, 320 GB/s of the
        copy engine's 385 on H200 (16 MB to each of 3 peers). 0: no program is set apart; the copy engine sends, which
        takes no multiprocessor. It reaches ranks whose memory is mapped here, as `peer` does, and needs `landing`.
    interleaved: all programs of a reduction send instead, each a finished tile while it multiplies the next one, at a
        step of its own, so that not all ask for the link at once. By stores to mapped memory; num_comm is 0.
    landing: rows go to the one inbox that copies go to (tkernels.comm.copies), for which all ranks of a call have to
        come first; else to one of two that take turns. The same on all ranks of a call; True for the copy engine.
    copy_rows: of one copy of the copy engine, which wants many; a multiple of chunk_rows, and a multiple or a divisor
        of gemm.block_m; None: chunk_rows.
    put_block: elements that a program copies at a step, interleaved no more than INTERLEAVED_BLOCK; 16384 beat 8192 by
        8 % on llama70b-qkv (4 H200s, bench/LOG.md).
    max_registers: a limit of registers a thread. Without one ptxas may spill to make room for a second program on a
        multiprocessor: 36 spills at 128 registers for fp32 by pointers.
    max_programs: fewer than the context's leave multiprocessors to what runs beside the operation.
    split_tiles: the last tiles, computed in max_splits parts along K each (split-K), by as many programs, so that the
        last wave keeps more of them busy. Each part but one is written and read once more, in fp32, and added in a
        fixed order. None: by a model of the launch's end (overlap.plan_waves), in up to max_splits parts. Not where
        interleaved: what adds them would take the registers that sending needs.
    max_splits: 1 for none.
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
        """Rows that are sent at a time."""
        return (self.copied and self.copy_rows) or self.chunk_rows

    @property
    def copied(self) -> bool:
        """Whether the copy engine sends."""
        return not (self.num_comm or self.interleaved)

    @property
    def tile_chunks(self) -> int:
        """Chunks that a tile needs, at most."""
        return max(self.gemm.block_m // self.chunk_rows, 1)

    def copy_block(self, aligned: bool, ranks: int) -> int:
        """Fewer than put_block between two steps of a product, and of rows that are not of whole 16 bytes.

        Sums stay in registers meanwhile, and every element that is copied alone costs one.
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
                    f"{name}={rows} must be a multiple or a divisor of block_m={self.gemm.block_m}, so that what "
                    f"travels together holds whole tiles, or tiles whole chunks"
                )
        if self.copy_rows is not None and self.copy_rows % self.chunk_rows:
            raise ValueError(f"copy_rows={self.copy_rows} must be whole chunks, of chunk_rows={self.chunk_rows}")
        if self.tile_chunks > MAX_TILE_CHUNKS.value:
            raise ValueError(
                f"chunk_rows={self.chunk_rows} is {self.tile_chunks} chunks for a tile of block_m={self.gemm.block_m}; "
                f"there may be {MAX_TILE_CHUNKS.value}"
            )


def chunks_fit(chunk_rows: int, block_m: int) -> bool:
    """Whether chunks hold whole tiles, or tiles whole chunks, not too many."""
    return chunk_rows % block_m == 0 or (block_m % chunk_rows == 0 and block_m // chunk_rows <= MAX_TILE_CHUNKS.value)


def by_copy_engine(config: OverlapConfig, rows: int, row_bytes: int, copies: int = COPIES) -> OverlapConfig:
    """The same tiles and chunks, but the copy engine sends, in up to `copies` copies a peer, of at least PIECE_BYTES.

    rows: that the rank with the most sends to a peer. row_bytes: of each.
    """
    pieces = min(max(rows * row_bytes // PIECE_BYTES, 1), copies)
    return _copying(config, -(-rows // pieces))


def _copying(config: OverlapConfig, rows: int) -> OverlapConfig:
    whole = math.lcm(config.gemm.block_m, config.chunk_rows)
    return replace(config, num_comm=0, interleaved=False, copy_rows=max(round_up(rows, whole), whole))


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
        # IEEE fp32 has no tensor cores: with 4 warps 160 registers spill, with steps of 32 in fused operations 13.
        return GemmConfig(64, 64, 16, split=1)
    if not tma:
        # Element by element, each element of a tile costs registers: 128 x 256 spills 900 times, 128 x 128 x 32 150.
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
    """The configuration of a fused operation whose local GEMM is M x N x K, among `size` ranks; tma: as default_config.

    landing: None where the copy engine reaches all ranks, and `lands` may decide. What lands travels by it, if there is
    enough (2 H200s: up to 8 % faster, bench/LOG.md), unless a reduction's product is too short to hide the wire.
    interleaved: whether it may be chosen; not where memory isn't mapped, or programs are to be set apart.
    stores: whether programs send by them, not by NVSHMEM's calls, of which more are needed at a time.
    What all ranks must tell alike depends on nothing that could differ between them.
    """
    gemm, peers = default_config(M, N, dtype, tma), max(size - 1, 1)
    if runtime.RUNTIME == "simulated":
        num_comm = max(min(2, num_programs - 1), 1)
        return OverlapConfig(gemm, gemm.block_m, num_comm, landing=bool(landing), put_block=4096)
    gathers, reduces_all = operation == "all_gather_matmul", operation == "matmul_all_reduce"
    if gemm.block_n == 256 and not gathers:  # partial sums take a stage's shared memory
        gemm = replace(gemm, num_stages=3)
    if gathers and gemm.block_n == 256:
        # Rows of tiles that are walked together are best of one shard: the next one's may still be on their way.
        # gpt3-fc1, which has 4 rows a shard among 4 H200s: 1.04 of cuBLAS's time, in groups of 8 1.09.
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
    senders = sent / REDUCED_BYTES_PER_S_OF_A_PROGRAM / product_s  # that take as long as the product
    if not gathers:
        # Until there are tiles to send, a comm program does nothing.
        num_comm = min(max(math.ceil(SPARE * senders), 2), num_comm)
        # Rows of tiles that are walked together are done together: not all of the peers' at once.
        while gemm.group_m > 1 and 2 * gemm.group_m * gemm.block_m > M * peers // size:
            gemm = replace(gemm, group_m=gemm.group_m // 2)
    max_registers = 255 if dtype == torch.float32 else None
    num_comm = max(min(num_comm, num_programs - 1), 1)
    config, rows = OverlapConfig(gemm, chunk_rows, num_comm, max_registers=max_registers), -(-M // size)
    measured = reduces_all and size == 2 and tma and dtype != torch.float32  # where INTERLEAVED_FROM was
    if interleaved and measured and product_s >= INTERLEAVED_FROM * wire_s:
        config = replace(config, num_comm=0, interleaved=True)
    if not (lands(operation, rows, row_bytes, size) if landing is None else landing):
        return config
    # Whole tiles, for each chunk that a tile waits for costs it a look; but so few that one look sees them all.
    chunk_rows = LANDING_CHUNK_ROWS
    while -(-rows // chunk_rows) * peers > MAX_LOOK.value:
        chunk_rows *= 2
    config = replace(config, landing=True, chunk_rows=chunk_rows)
    if rows * row_bytes < COPY_BYTES or config.interleaved:
        return config
    # A copy waits for thousands of rows, programs for these few, and so the wire is busy from the start.
    num_comm = min(math.ceil(WIRE_SPARE * senders), MOST_COMM, num_programs // 4)
    hidden = gathers or dtype == torch.float32 or product_s >= WIRE_BOUND[operation] * wire_s
    if hidden or num_comm < 1:
        return by_copy_engine(config, rows, row_bytes, 1 if gathers else COPIES)
    if reduces_all:
        return config
    return replace(config, num_comm=num_comm, gemm=replace(gemm, group_m=min(gemm.group_m, 2)))


def lands(operation: str, rows: int, row_bytes: int, size: int) -> bool:
    """Whether shares of so many rows go by rule where the copy engine can put them: large ones.

    But of all-reduces between two ranks only those with rows of less than REDUCED_ROW_BYTES, or shares of less than
    REDUCED_SHARE_BYTES.
    """
    share = rows * row_bytes
    if operation == "matmul_all_reduce" and size == 2 and row_bytes >= REDUCED_ROW_BYTES:
        return COPY_BYTES <= share < REDUCED_SHARE_BYTES
    return share >= COPY_BYTES


def with_room_for(config: OverlapConfig, stored: torch.dtype, dtype: torch.dtype) -> OverlapConfig:
    """A configuration by rule, or tuned for results of the operands' dtype, for results that may be larger.

    Beside the pipeline of 128 x 256 there is no shared memory for slices of fp32; by pointers 2 registers of 128 x 64
    spill, unless it is stored in slices.
    """
    if stored.itemsize == dtype.itemsize:
        return config
    return replace(config, gemm=replace(config.gemm, block_n=min(config.gemm.block_n, 128), split=2))


def gemm_config(
    M: int, N: int, K: int, dtype: torch.dtype, layout: str, stored: torch.dtype | None = None
) -> GemmConfig:
    """What `matmul` uses for x [M, K] and w [N, K] without a configuration. layout: as gemm.layout_of names it.

    stored: the result's dtype, if it is another; larger elements take a stage's shared memory.
    """
    key = (gemm_config, M, N, K, dtype, layout, stored)
    return local_plans.find(key, lambda: _gemm_config(*key[1:]))  # where what follows from it is kept as well


def _gemm_config(M: int, N: int, K: int, dtype: torch.dtype, layout: str, stored: torch.dtype | None) -> GemmConfig:
    try:
        table = _table(current_context())
    except TkernelsError:  # there is none
        table = _table_without_context()
    found = table.configs.get(("matmul", *bucket(M, N, K), name_of(dtype), layout))
    config = found or default_config(M, N, dtype, layout != "pointers")
    larger = stored is not None and stored.itemsize > dtype.itemsize
    return replace(config, num_stages=min(config.num_stages, 3)) if larger else config


def overlap_config(
    ctx: Context, operation: str, M: int, N: int, K: int, dtype: torch.dtype, layout: str, sending: bool = False
) -> OverlapConfig:
    """What a fused operation uses without a configuration, where this rank multiplies x [M, K] by w [N, K].

    sending: what it uses where programs that are set apart send, into the two inboxes.
    """
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
    """Whether programs send by stores, not by NVSHMEM's calls, which a context may be asked for on one machine too."""
    return ctx.transport != "nvshmem"


def forget_choices(ctx: Context):
    """Choose anew from now on: the context's records have changed."""
    ctx.choices.clear()
    ctx.forget_plans()
    local_plans.clear()
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
    """The configuration by rule whose rows travel as those of a larger product do; None: as they do by rule.

    Chunks of what lands are always the rule's: copies take many at a time, and for programs they may not be large.
    """
    if not ctx.mapped and travel is not None and travel[1]:  # nobody else's copies reach everyone either
        travel = None
    landing = (None if ctx.mapped else False) if travel is None else travel[1]
    tma = layout != "pointers"
    reach = {"landing": landing, "interleaved": ctx.mapped, "stores": sends_by_stores(ctx)}
    config = default_overlap(operation, M, N, K, dtype, ctx.size, ctx.num_programs, tma, **reach)
    return config if travel is None or landing else travelling(config, *travel)


def travel_of(config: OverlapConfig) -> tuple[int, bool]:
    """(chunk_rows, landing): what all ranks must tell alike."""
    return config.chunk_rows, config.landing


def travelling(config: OverlapConfig, chunk_rows: int, landing: bool) -> OverlapConfig:
    """The configuration with that travel, and copies of as many rows as before, in whole chunks."""
    assert landing or not config.copied, "the copy engine can't put rows where they take turns"
    if travel_of(config) == (chunk_rows, landing):
        return config
    config, rows = replace(config, chunk_rows=chunk_rows, landing=landing, copy_rows=None), config.sent_rows
    return _copying(config, rows) if config.copied else config


def bound_travel(ctx: Context, key: tuple) -> tuple[int, bool] | None:
    """The travel that a bucket's calls are bound to by a larger product whose rows travel alike; None if by none."""
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
    """The part of (operation, M, N, K, dtype, layout) that is the same on all ranks, whatever they share unevenly."""
    operation, M, N, K, dtype, _ = key
    return operation, M, K if operation == "all_gather_matmul" else N, dtype


class _Table:
    """What records say, by bucket. configs: by (operation, M, N, K, dtype, layout); travels: by what ranks share.

    Records that this version can't read are ignored, with a warning.
    """

    def __init__(self, records: list[dict]):
        self.configs: dict[tuple, GemmConfig | OverlapConfig] = {}
        self.travels: dict[tuple, tuple[tuple[int, bool], tuple]] = {}  # with the key that each comes from
        for record in records:
            try:
                key, config = read_record(record)
            except ValueError as error:
                warnings.warn(f"tuned settings of {record['key']} are ignored: {error}", stacklevel=2)
                continue
            self.configs[key] = config
        for key, config in sorted(self.configs.items(), key=lambda item: item[0][1:4]):  # the largest come last
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
    """(bucket's key, configuration) of a record, whatever is in its file. Raises ValueError for what makes no sense."""
    operation, *sizes, dtype, layout = key = tuple(record["key"].get(name) for name in KEY)
    known = operation in OPERATIONS and dtype in map(name_of, DTYPES) and layout in LAYOUTS
    if not known or not all(_power(size, 1) for size in sizes):
        raise ValueError(f"there is no bucket {key}")
    if operation == "matmul":
        return key, _read(GemmConfig, record.get("config"))
    config = _read(OverlapConfig, record.get("config"))
    # A rank whose layout has another configuration still has to keep to these chunks.
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
