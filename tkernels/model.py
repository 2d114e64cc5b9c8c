"""The model of time: what a call would take in each configuration on a GPU, and the choice of one for calls without.

    ways(problem)               the candidates: a configuration for each way of sending, or why there is none
    reject(problem, config)     why one can't run, or can't win; the tuner asks too
    predict(problem, config)    its time, in parts
    choose(problem)             the candidate with the least

Programs compute tiles in waves. What a rank sends leaves when its tiles are done, as fast as its sender is, and what
arrives last still has to be multiplied, or added. The model knows no caches and no clocks: predictions are off by 5 %
in the median of the recorded shapes, and what it chooses is 0.5 % slower than the fastest way that was recorded, as
were the choices of the measured thresholds that it replaced (python -m bench.model). The figures that its constants
come from, with machine and date, are in bench/LOG.md, 2026-11-24 and before.

All ranks must agree on the wire format, which rows are behind one signal and in which buffer they arrive, and on the
path, but N of an all-gather and K of a reduction may differ where features divide unevenly, and so may layouts. So
these two follow by rule from what all ranks share (`wire_of`, `plain_limit`). Each rank chooses the rest by itself.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tkernels import configs
from tkernels.comm.context import DEFAULT_HEAP_BYTES
from tkernels.comm.mail import MAX_LOOK
from tkernels.comm.runtime import HOPPER
from tkernels.comm.workspace import inboxes_fit
from tkernels.configs import FP8, GemmConfig, OverlapConfig, Wire, result_dtype
from tkernels.gpus import GPU, H200, SIMULATED, TILE_END_S, gpu_here, stages_rows
from tkernels.waves import end_of, plan_waves

GATHER, SCATTER, ALL_REDUCE = FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
FP32, FP16, BF16 = configs.DTYPES
COPY_ENGINE, INTERLEAVED, PROGRAMS = "copy engine", "interleaved", "comm programs"  # who sends
KERNEL, STAGED, LIBRARY = "kernel", "staged", "library"  # who multiplies for a local product


# Seconds, H200.
LAUNCH_S = 10e-6  # of a fused kernel, whatever its size
LIBRARY_S, COLLECTIVE_S = 7e-6, 6e-6  # of the plain path: torch's GEMM and the collective, whatever their sizes
PASS_S = 2e-6  # a launch between others, whatever its size
PASS_MEMORY = 0.75  # of memory's speed: torch's pass over a result for its activation
ACTIVATION_S = {None: 0.0, "relu": 0.3e-6, "silu": 2e-6, "gelu_tanh": 2.5e-6, "gelu": 3e-6}  # for a tile of 128 x 256
POINTERS_S, TF32_S = 1.2e-6, 2e-6  # for such a tile, where TMA can't store it; and of TF32, stored in fp32
SUM_S = 2.5e-6  # for a tile of this rank's rows: adding the partial sums of each peer
GATE_S = 16e-6  # until the ranks have met and the copy engine may begin
COPY_S, REDUCED_COPY_S = 7e-6, 9.5e-6  # a copy, whatever its size, and one that waits for tiles
ARRIVAL_S, LAST_CHUNK_S = 6e-6, 11e-6  # until the last rows of a copy, or of comm programs, have arrived and are seen
INTERLEAVED_S = 3e-6  # added to a tile while a finished one is sent

# Wire format. From a share of COPY_BYTES on the copy engine is efficient, as a copy has a fixed cost, so rows land.
# Between two ranks, rows of all-reduces of REDUCED_ROW_BYTES land only in shares of less than REDUCED_SHARE_BYTES.
COPY_BYTES = 8 << 20
REDUCED_ROW_BYTES, REDUCED_SHARE_BYTES = 16 << 10, 32 << 20
CHUNK_BYTES = 1 << 20  # of one put; with puts of 128 KB a program sends a quarter less (H200, 9 programs)
LANDING_CHUNK_ROWS = 128  # least rows of a chunk that lands: those of the largest tile by rule
# An all-gather between two ranks needs fewer comm programs, and sends twice as many bytes per put where shares are
# large.
SENDERS, PAIR_SENDERS, PAIR_SHARE_BYTES = 12, 8, 32 << 20
# How many times faster than the local GEMM a reduction's comm programs can send, if there are enough; and where rows
# land and only a GEMM shorter than the wire leaves the choice to them, with at most how many.
SPARE, LANDING_SPARE, LANDING_SENDERS = 1.3, 1.05, 24

# The path. An operation takes the plain path up to this many bytes, sent into a rank or, for a reduce-scatter, by one
# peer; between two ranks an all-reduce up to half as many, and of FP8 a gather, whose GEMM is twice as fast as well.
PLAIN_BYTES = {GATHER: 12 << 20, SCATTER: 6 << 20, ALL_REDUCE: 24 << 20}

# fp32 takes the plain path as well. There torch multiplies some rows while others travel (takes_turns), if each rank
# has TURN_ROWS: of fewer, two products cost more than overlap saves; of 300 of 600 rows, 2 % of the call.
TURN_ROWS = 512

REGISTERS = 255

# A local product is our kernel's if it takes at most WORTH of the library's time by the model, which is that precise,
# or of unaligned rows WORTH_STAGING, as the library's speed differs from size to size there; `fastest` has what
# SHORT_S, STAGED_S and SHORT_K are for. Where rows or columns are at most NARROW, or those of a tile 128, a program
# has too little in flight to read memory at more than NARROW_MEMORY of its speed.
WORTH, WORTH_STAGING, SHORT_S, STAGED_S, SHORT_K = 1.02, 0.9, 12e-6, 30e-6, 512
NARROW, NARROW_MEMORY = 112, 0.8


@dataclass(frozen=True)
class Problem:
    """What is to be computed, and where: x [M, K] times w [N, K], a rank's local GEMM, beside a transfer of its rows.

    operation: one of configs.OPERATIONS. dtype, layout: of x and w; layout as gemm.layout_of names it.
    ranks: of the group. programs: of a launch.
    mapped: copies and stores reach all ranks. stores: programs send by SM stores, not by NVSHMEM's calls.
    sending: comm programs must send, into the two alternating inboxes. whole_chunks: rows can't be sent interleaved.
    precision: how operands are multiplied, as gemm.precision says it.
    heap_bytes: of each rank's symmetric memory, for `predict_plain`.
    alignment: bytes that the rows of operands and result are multiples of, where TMA can't take them all.
    Of a local product alone:
    orientation, staged: the layout that the operands would have in rows that TMA can take, and the bytes of each that
        it can't feed to tensor cores, 0 of a weight whose copy is kept. sectors: the rows of the others begin at
        sectors of the cache, of 32 bytes.
    stored, stored_by_tma: the result's dtype; None: the usual one; and whether TMA can take its rows.
    activation, separate: its activation, and whether that or a bias takes the library another pass.
    library: whether the library takes such operands at all.
    """

    operation: str
    M: int
    N: int
    K: int
    dtype: torch.dtype = BF16
    layout: str = "TN"
    ranks: int = 1
    programs: int = 132
    gpu: GPU = H200
    mapped: bool = True
    stores: bool = True
    sending: bool = False
    whole_chunks: bool = False
    precision: str = "ieee"
    alignment: int = 2
    orientation: str = "TN"
    staged: tuple[int, ...] = ()
    sectors: bool = True
    stored: torch.dtype | None = None
    stored_by_tma: bool = True
    activation: str | None = None
    separate: bool = False
    library: bool = True
    heap_bytes: int = DEFAULT_HEAP_BYTES["nvshmem"]

    @property
    def gathers(self) -> bool:
        return self.operation == GATHER

    @property
    def peers(self) -> int:
        return self.ranks - 1

    @property
    def rows(self) -> int:
        """The most rows that a rank owns."""
        return -(-self.M // self.ranks)

    @property
    def row_bytes(self) -> int:
        return (self.K if self.gathers else self.N) * sent_dtype(self.operation, self.dtype).itemsize

    @property
    def tma(self) -> bool:
        return self.layout != "pointers"

    @property
    def staged_layout(self) -> str:
        return "TN" if self.precision == "tf32" else self.orientation

    @property
    def fed(self) -> bool:
        return self.gpu.feeds(self.dtype, self.precision, self.layout)

    @property
    def aligned(self) -> bool:
        """Whether TMA can take the operands and the result, so that torch multiplies at full speed."""
        return self.tma and self.stored_by_tma

    @property
    def stored_by_pair(self) -> bool:
        """Whether this is an all-gather between two ranks by SM stores, each of which reaches one peer alone."""
        return self.gathers and self.ranks == 2 and self.stores

    @property
    def crossings(self) -> int:
        return 2 if self.operation == ALL_REDUCE else 1

    @property
    def sent_bytes(self) -> int:
        """Bytes from a rank to all its peers; an all-reduce sends as many again, of the finished rows."""
        return self.rows * self.row_bytes * self.peers

    @property
    def least_s(self) -> float:
        """The time in which the operands and the result of the local GEMM pass through memory."""
        operands = (self.M + self.N) * self.K * self.dtype.itemsize
        return (operands + self.M * self.N * result_dtype(self.dtype).itemsize) / self.gpu.memory

    def tiles(self, gemm: GemmConfig) -> tuple[int, int]:
        """(tiles of one rank's rows, tiles of them all)."""
        own = -(-self.rows // gemm.block_m) * -(-self.N // gemm.block_n)
        return own, own * self.ranks


def sent_dtype(operation: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an operation sends its rows by default, where its operands are of `dtype`."""
    return dtype if operation == GATHER else result_dtype(dtype)


# Candidates


def default_config(
    M: int, N: int, dtype: torch.dtype, layout: str = "TN", gpu: GPU | None = None, alone: bool = False,
    precision: str = "ieee",
) -> GemmConfig:  # fmt: skip
    """The tiles by rule for a local GEMM of M x N. layout: as gemm.layout_of names it.

    alone: nothing is sent beside it, so all programs multiply. precision: as gemm.precision says it. None of these
    spills registers, but TF32's 2 to 14 in fused operations with an epilogue. block_m depends on nothing that could
    differ between ranks.
    """
    gpu = gpu or gpu_here()
    if gpu is SIMULATED:
        # The interpreter's cost is per operation, hardly per element: a GEMM of 256 x 128 x 64 takes a third of the
        # time with tiles of 64 x 64 x 64 than with 32 x 32 x 32. Small GEMMs, as in tests, still get several tiles.
        size = 32 if M <= 128 else 64
        return GemmConfig(size, size, size, group_m=2)
    if dtype != FP32 and not gpu.tiles_by_tma:
        # Ampere and Ada have no TMA. Consumer Blackwell has, but spills in each load through it, and little memory.
        size, warps = (64, 4) if M <= 64 else (128, 8)
        return GemmConfig(size, size, 64 // dtype.itemsize, 8, 1, warps, num_stages=4, use_tma=False)
    fed = gpu.feeds(dtype, precision, layout)
    if dtype == FP32 and not fed:
        # IEEE fp32 has no tensor cores. 4 warps would spill 160 registers; block_k = 32, in fused operations, 13.
        return GemmConfig(64, 64, 16, split=1)
    if not fed:
        # Through pointers, each element of a tile costs registers: 128 x 256 spills 900 times, 128 x 128 x 32 150.
        return GemmConfig(64 if M <= 64 else 128, 64, 32, split=1, num_warps=4 if M <= 64 else 8)
    block_k, tiles, tf32 = 128 // dtype.itemsize, -(-M // 128) * -(-N // 128), dtype == FP32
    # 1024x1024x8192 as TF32 takes 58 us; in steps of 32 numbers 89; in tiles of 128x128, too few for the SMs, 86.
    if M <= 64 or tf32 and alone and 2 * tiles <= gpu.sms:
        return GemmConfig(64, 128, 64 if tf32 else block_k, num_warps=4, num_stages=4)
    # Where there is a program for each tile of 128x128, half of the programs have none of 128x256: 1.4 times the time.
    if N <= 128 or alone and tiles <= gpu.sms:
        return GemmConfig(128, 128, block_k, num_warps=8, num_stages=5 if tf32 else 4)
    if tf32 and gpu.tensor_memory:  # whose sums pass shared memory whole
        return GemmConfig(128, 128, block_k, num_warps=8, num_stages=4)
    return GemmConfig(block_k=block_k, num_stages=4, split=4 if tf32 else 2)


def wire_of(problem: Problem) -> Wire:
    """The wire format by rule, which depends on nothing that could differ between ranks.

    In the landing, whole tiles a chunk, since a tile polls each chunk that it needs; and so few chunks that one poll
    covers all.
    """
    if problem.gpu is SIMULATED:
        return Wire(default_config(problem.M, problem.N, problem.dtype, gpu=SIMULATED).block_m, False)
    share, row_bytes = problem.rows * problem.row_bytes, problem.row_bytes
    landing = problem.mapped and not problem.sending and share >= COPY_BYTES
    if problem.operation == ALL_REDUCE and problem.ranks == 2 and row_bytes >= REDUCED_ROW_BYTES:
        landing = landing and share < REDUCED_SHARE_BYTES
    if landing:
        chunk_rows = LANDING_CHUNK_ROWS
        while -(-problem.rows // chunk_rows) * problem.peers > MAX_LOOK.value:
            chunk_rows *= 2
        return Wire(chunk_rows, True)
    chunk_rows = min(max(1 << (CHUNK_BYTES // row_bytes).bit_length() >> 1, configs.MIN_CHUNK_ROWS), 128)
    large = problem.stored_by_pair and problem.M * row_bytes >= 2 * PAIR_SHARE_BYTES
    return Wire(chunk_rows * 2 if large else chunk_rows, False)


def ways(problem: Problem) -> dict[str, OverlapConfig | str]:
    """The candidates of a fused call, one for each way of sending, or the reason why that way is none.

    Of equal predictions the first one counts.
    """
    wire, gemm, programs, gpu = wire_of(problem), _tiles(problem), problem.programs, problem.gpu
    alone = "of one program none is left that multiplies" if programs == 1 else None
    if gpu is SIMULATED:
        return {PROGRAMS: alone or OverlapConfig(gemm, wire.chunk_rows, min(2, programs - 1), put_block=4096)}
    # As many comm programs as saturate the link; in a reduction no more than sending needs, as one is idle until there
    # are tiles to send.
    product_s = gpu.seconds(problem.M * problem.N * problem.K, problem.dtype, problem.precision) / programs
    needed = problem.crossings * problem.sent_bytes / gpu.reducing_program / product_s
    num_comm = PAIR_SENDERS if problem.stored_by_pair else max(SENDERS // problem.peers, 1) * problem.peers
    if not problem.gathers:
        num_comm = min(max(math.ceil(SPARE * needed), 2), num_comm)
    config = OverlapConfig(
        gemm, wire.chunk_rows, max(min(num_comm, programs - 1), 1), landing=wire.landing,
        # Parts of TF32's tiles spill up to 22 registers, or have no shared memory.
        max_splits=1 if problem.dtype == FP32 and problem.fed else OverlapConfig.max_splits,
        # Else ptxas may spill to make room for a second program on an SM; it does not for Hopper in 16 bits.
        max_registers=None if problem.dtype != FP32 and gpu.capability == HOPPER else 255,
    )  # fmt: skip
    found = {COPY_ENGINE: _copied(problem, config), INTERLEAVED: _interleaved(problem, config, product_s)}
    found[PROGRAMS] = alone or config
    if wire.landing:
        few = min(math.ceil(LANDING_SPARE * needed), LANDING_SENDERS, programs // 4)
        if problem.gathers or few < 1:
            found[PROGRAMS] = "where rows land, copies are as fast, and take no SMs"
        elif problem.operation == SCATTER:
            gemm = replace(gemm, group_m=min(gemm.group_m, 2))
            found[PROGRAMS] = replace(config, num_comm=few, gemm=gemm)
    return found


def _copied(problem: Problem, config: OverlapConfig) -> OverlapConfig | str:
    if config.landing:
        return configs.by_copy_engine(config, problem.rows, problem.row_bytes, 1 if problem.gathers else configs.COPIES)
    if problem.sending or not problem.mapped:
        return "comm programs must send" if problem.sending else "it reaches no other machine"
    share = problem.rows * problem.row_bytes
    if share < COPY_BYTES:
        return f"a share of {share} bytes, less than {COPY_BYTES}, is no more than a copy's fixed cost"
    return f"between two ranks programs send shares from {REDUCED_SHARE_BYTES} bytes on in rows of {REDUCED_ROW_BYTES}"


def _interleaved(problem: Problem, config: OverlapConfig, product_s: float) -> OverlapConfig | str:
    wire_s = problem.crossings * problem.sent_bytes / problem.gpu.copy_engine
    if problem.gathers:
        return "only reductions are"
    if problem.whole_chunks:
        return "scales beside the rows are sent with whole chunks"
    if problem.sending or not problem.mapped:
        return "comm programs must send" if problem.sending else "stores reach no other machine"
    if problem.ranks > 2:
        return "among more than two ranks its steps spill registers"
    if not problem.tma or not config.gemm.use_tma or problem.dtype == FP32:
        return "not measured without TMA or in fp32"
    if problem.row_bytes % 16:  # of FP8, which is loaded by TMA all the same; copied by elements, 1250 registers spill
        return "rows that are no multiples of 16 bytes would be copied by elements"
    if product_s < wire_s:
        return f"tiles would wait for the link: the GEMM takes {1e6 * product_s:.0f} us, the wire {1e6 * wire_s:.0f}"
    return replace(config, num_comm=0, interleaved=True)


def candidates(problem: Problem) -> list[OverlapConfig]:
    """The configurations that a fused call may get by the model."""
    return [way for way in ways(problem).values() if isinstance(way, OverlapConfig)]


def _by_rule(problem: Problem) -> GemmConfig:
    how = problem.layout, problem.gpu, False, problem.precision
    return default_config(problem.M, problem.N, problem.dtype, *how)


def _tiles(problem: Problem) -> GemmConfig:
    """The tiles by rule of a fused operation, with groups that fit its shards."""
    gemm = _by_rule(problem)
    if problem.gpu is SIMULATED:
        return gemm
    if gemm.num_warps == 4 and (problem.gathers and problem.dtype in FP8 or problem.dtype == FP32):
        gemm = replace(gemm, num_warps=8)  # scales of rows that arrive spill 214 times, TF32 152 to 392
    if problem.gathers and problem.dtype == FP32 and gemm.block_n == 256:
        gemm = replace(gemm, num_stages=3, split=2)  # with gelu four stages and slices spill 24 times
    if problem.gathers and gemm.block_n == 256:
        # A group of rows of tiles should stay within one shard, since the rows of the next shard may not have arrived.
        # gpt3-fc1 on 4 H200s, 4 rows of tiles per shard: 1.04 of cuBLAS's time in groups of 4, 1.09 in groups of 8.
        shard_m = problem.M // (problem.ranks * gemm.block_m)
        return replace(gemm, group_m=16 if shard_m >= 16 else 4 if 4 <= shard_m < 8 else 8)
    if not problem.gathers:
        if gemm.block_n == 256:  # partial sums take the shared memory of a stage
            gemm = replace(gemm, num_stages=3)
        # The rows of tiles of a group finish together; the peers' rows must not all finish at once.
        while gemm.group_m > 1 and 2 * gemm.group_m * gemm.block_m > problem.M * problem.peers // problem.ranks:
            gemm = replace(gemm, group_m=gemm.group_m // 2)
    return gemm


def stages_of(gemm: GemmConfig, splits: int) -> int:
    """Pipeline stages: 128 x 256 tiles have no shared memory for both a fourth stage and the sums of parts."""
    return min(gemm.num_stages, 3) if splits > 1 and gemm.block_m * gemm.block_n >= 128 * 256 else gemm.num_stages


def reject(problem: Problem, config: GemmConfig | OverlapConfig) -> str | None:
    """Why a configuration can't run, or can't be better than a smaller one, in a line; None if it can."""
    gemm, itemsize, shared = getattr(config, "gemm", config), problem.dtype.itemsize, problem.gpu.shared_bytes
    known = _by_rule(problem)
    tile = f"tiles of {gemm.block_m}x{gemm.block_n}x{gemm.block_k}"
    reduces = problem.operation in (SCATTER, ALL_REDUCE)
    # Staging beside the pipeline: slices of the result and of a peer's partial sums; with split-K tiles also a quarter
    # of a slice of fp32 partial sums, to be written, and to be read.
    result = result_dtype(problem.dtype).itemsize
    kernels = [(gemm.num_stages, result * (2 if reduces else 1))]
    if not gemm.use_tma:
        kernels = [(gemm.num_stages + 1, 0)]  # what is staged takes the place of the pipeline, which has a stage more
    elif isinstance(config, OverlapConfig) and config.max_splits > 1 and not problem.gpu.tensor_memory:
        kernels.append((stages_of(gemm, config.max_splits), 2 * result + 1 if reduces else result + 2))
    for stages, staged in kernels:
        pipeline = stages * (gemm.block_m + gemm.block_n) * gemm.block_k * itemsize
        stored = gemm.block_m * gemm.block_n // gemm.split * staged
        if pipeline > shared:
            return f"shared memory: {stages} stages of {tile} take {pipeline} of {shared} bytes"
        if pipeline + stored > shared:
            return (
                f"shared memory: {stages} stages of {tile} take {pipeline}, and beside them slices of results and sums "
                f"{stored}, of {shared} bytes"
            )
    if problem.precision == "promoted" and gemm.block_n > 128:
        return "registers: calls take tiles of at most 128 columns where sums are promoted"
    sums = gemm.block_m * gemm.block_n // (32 * gemm.num_warps) * (2 if problem.precision == "promoted" else 1)
    if sums > 3 * REGISTERS // 4:
        return f"registers: {gemm.num_warps} warps hold {sums} sums a thread, of {REGISTERS} registers"
    if (gemm.block_m, gemm.block_n, gemm.block_k) != (known.block_m, known.block_n, known.block_k):
        if not problem.tma:
            return "alignment: without TMA descriptors, larger tiles spill registers"
        if problem.dtype == FP32 and not problem.fed and problem.gpu is not SIMULATED:
            return "registers: fp32 without tensor cores spills with other tiles"
    for what, block, size in (("rows", gemm.block_m, problem.M), ("columns", gemm.block_n, problem.N)):
        if block >= 2 * size and block > 64:
            return f"size: {size} {what} would leave half of a tile of {block} empty"
    if isinstance(config, GemmConfig):
        return None
    if config.num_comm >= min(problem.programs, config.max_programs or problem.programs):
        return f"programs: there are {problem.programs}, and one at least must multiply"
    if config.wire != (wire := wire_of(problem)):
        return f"ranks: by rule chunks have {wire.chunk_rows} rows, and land: {wire.landing}"
    if config.interleaved and not reduces:
        return "operation: only reductions are interleaved"
    if not gemm.use_tma and stages_rows(problem.dtype, problem.precision, problem.gpu):
        return "alignment: calls that choose for themselves read all rows by TMA, staged ones too"
    if (config.landing or config.interleaved) and not problem.mapped:
        return "ranks: the copy engine and stores reach no other machine"
    return None


# Times


class Prediction(NamedTuple):
    """A predicted time in seconds, with its parts: the launch, the local GEMM alone, and what overlap leaves exposed.

    wire: the transfer alone, most of which is hidden.
    """

    seconds: float
    launch: float
    gemm: float
    wire: float

    @property
    def exposed(self) -> float:
        return max(self.seconds - self.launch - self.gemm, 0.0)

    @property
    def hides(self) -> bool:
        """Whether some of the transfer is hidden: more than rounding."""
        return self.exposed < 0.999 * self.wire


def predict(problem: Problem, config: GemmConfig | OverlapConfig) -> Prediction:
    """The time of one call. Of a fused operation, with even shards, as its last tile or its last rows end it."""
    gemm = getattr(config, "gemm", config)
    rate = problem.gpu.rate(problem.dtype, problem.precision, problem.layout)
    tile_s = problem.gpu.tile_at(rate, gemm.block_m, gemm.block_n, problem.K, problem.dtype, problem.sectors)
    end_s = ACTIVATION_S[problem.activation] + (0 if problem.stored_by_tma else POINTERS_S)
    end_s += TF32_S if problem.dtype == FP32 and problem.fed else 0
    tile_s += end_s * gemm.block_m * gemm.block_n / (128 * 256)
    alone_s = max(-(-problem.tiles(gemm)[1] // problem.programs) * tile_s, problem.least_s)
    if isinstance(config, GemmConfig):
        if min(problem.M, problem.N) <= NARROW or gemm.block_n <= 128:
            alone_s = max(alone_s, problem.least_s / NARROW_MEMORY)
        return Prediction(LIBRARY_S + alone_s, LIBRARY_S, alone_s, 0.0)
    launch = _Launch(problem, config, tile_s)
    return Prediction(LAUNCH_S + launch.seconds(), LAUNCH_S, alone_s, problem.crossings * launch.wire_s)


class _Launch:
    """One launch of a fused kernel: its tiles, its waves, and how long sending its rows takes by itself (wire_s)."""

    def __init__(self, problem: Problem, config: OverlapConfig, tile_s: float):
        self.problem, self.config, self.tile_s = problem, config, tile_s
        self.own, self.tiles = problem.tiles(config.gemm)
        self.columns = -(-problem.N // config.gemm.block_n)
        num_comm = config.num_comm
        self.programs = min(problem.programs, config.max_programs or problem.programs, num_comm + self.tiles)
        self.workers, self.of_peers = self.programs - num_comm, self.tiles - self.own
        self.needed = 0 if problem.gathers else self.tiles if problem.crossings == 2 else self.of_peers
        splittable = self.tiles if problem.gathers else 0 if config.interleaved else self.own
        self.waves = plan_waves(
            problem.gpu, self.tiles, splittable, problem.K, self.programs, config, problem.sent_bytes, self.needed,
            problem.dtype, problem.precision,
        )  # fmt: skip
        self.sums_s = 0 if problem.gathers else SUM_S * problem.peers
        self.copies = -(-problem.rows // config.sent_rows) if config.copied else 0  # to each peer
        gpu, sent = problem.gpu, problem.sent_bytes
        if config.copied:
            copy_s = COPY_S if problem.gathers else REDUCED_COPY_S
            self.wire_s = sent / gpu.copy_engine + self.copies * problem.peers * copy_s
        elif config.interleaved:
            self.wire_s = sent / gpu.interleaved
        else:
            senders = min(num_comm, problem.peers * -(-problem.rows // config.sent_rows))  # a send is one program's
            self.wire_s = sent / min(senders * (gpu.program if problem.gathers else gpu.reducing_program), gpu.stores)

    def seconds(self) -> float:
        problem = self.problem
        if problem.gathers:
            return self._gather_s()
        seconds = self._interleaved_s() if self.config.interleaved else self._reduction_s()
        if problem.crossings == 2:  # the finished rows are copied out of the inbox
            seconds += problem.M * problem.row_bytes * problem.peers / problem.ranks / (problem.gpu.memory / 2)
        return seconds

    def _end(self, sending_s: float) -> float:
        """When the last tile ends, if the comm programs have sent everything after sending_s."""
        busy = min(max(sending_s / self.tile_s, self.needed / self.workers), self.tiles / self.workers)
        end = end_of(self.waves, self.tiles, self.tile_s, self.programs, self.config.num_comm, busy) * self.tile_s
        return max(end, self.problem.least_s) + self.own / self.programs * self.sums_s

    def _gather_s(self) -> float:
        """What arrives last, a copy or a chunk of each peer, is still to be multiplied."""
        if self.copies:
            return max(self._end(0), GATE_S + self.wire_s + -(-self.own // self.copies // self.programs) * self.tile_s)
        rows = min(self.config.chunk_rows, self.problem.rows)
        last = self.problem.peers * -(-rows // self.config.gemm.block_m) * self.columns
        return max(self._end(self.wire_s), self.wire_s + -(-last // self.programs) * self.tile_s)

    def _interleaved_s(self) -> float:
        """Waves of tiles that peers need, each sent during the next tile; then those of this rank's rows."""
        twice = self.problem.crossings == 2
        first = -(-self.of_peers // self.programs)
        rest = -(-self.tiles // self.programs) - first
        rest_s = rest * (self.tile_s + self.sums_s + (INTERLEAVED_S if twice else 0))
        first_s = max(first * (self.tile_s + INTERLEAVED_S), self.wire_s) + INTERLEAVED_S
        return first_s + max(rest_s, self.wire_s if twice else 0)

    def _reduction_s(self) -> float:
        """The peers' tiles are sent as they are done; then the own ones, which add what has arrived."""
        copies, tile_s = self.copies, self.tile_s
        together = max(self.own // copies, 1) if copies else self.config.gemm.group_m * self.columns
        known_s = ARRIVAL_S if copies else LAST_CHUNK_S
        arrived = self._sent_s(0, self.of_peers, together, 0.0, math.inf) + known_s
        # The own tiles of the rows that arrived last: all but the first wave of them are still to be computed.
        last = self.own // copies if copies else min(self.own, self.programs)
        end = max(self._end(arrived), arrived + (-(-last // self.programs) - 1) * tile_s + self.sums_s + TILE_END_S)
        if self.problem.crossings == 1:
            return end
        late = max(end - -(-self.tiles // self.workers) * tile_s, 0.0)
        return self._sent_s(self.of_peers, self.tiles, together, arrived - late, end - late) + late + known_s

    def _sent_s(self, first: int, last: int, together: int, begin: float, ends: float) -> float:
        """When the rows of tiles from `first` to `last` are sent, `together` of them at a time, as waves complete them.

        begin: when the sender is free. ends: when the last of these tiles ends.
        """
        now, done = begin, first
        for wave in range(first // self.workers + 1, -(-last // self.workers) + 1):
            complete = min(wave * self.workers, last)
            complete = last if complete == last else max(complete // together * together, done)
            if complete > done:
                now = max(now, min(wave * self.tile_s, ends)) + (complete - done) / (last - first) * self.wire_s
                done = complete
        return now


def predict_plain(problem: Problem) -> Prediction:
    """The time of the plain path: torch's GEMM and the collective, one after the other or in turns."""
    product_s, gpu, ranks = library_s(problem), problem.gpu, problem.ranks
    wire_s = problem.sent_bytes / gpu.collective
    launch_s = LIBRARY_S + (COLLECTIVE_S if ranks > 1 else 0)
    rows, width = (problem.rows,) * ranks, problem.K if problem.gathers else problem.N
    turns = takes_turns(problem.operation, rows, width, problem.dtype)
    landing_bytes = problem.rows * ranks * problem.row_bytes
    if turns and problem.mapped and inboxes_fit(problem.heap_bytes, landing_bytes, landing=True):
        first_s = problem.sent_bytes / gpu.copy_engine
        exposed_s, others_s = max(first_s - product_s / ranks, 0.0), (problem.crossings - 1) * wire_s
        launch_s += GATE_S
        return Prediction(launch_s + product_s + exposed_s + others_s, launch_s, product_s, first_s + others_s)
    wire_s *= problem.crossings
    return Prediction(launch_s + product_s + wire_s, launch_s, product_s, wire_s)


# The library's tiles: it has them in many sizes, and splits K. Those that no choice depends on are left out.
LIBRARY_TILES = tuple(
    (block_m, block_n)
    for block_m in (64, 128, 256)
    for block_n in (*range(32, 257, 32), 208)
    if block_m * block_n <= 128 * 256
)
LIBRARY_SPLITS = (1, 2, 4, 8)
# At what part of memory's speed it reads weights whose rows, or the result's, are multiples of so many bytes, where x
# has few rows: of 2 and 4 bytes 0.15 to 0.7, of 8 bytes 0.44 to 0.7. One row is a gemv, which is faster.
UNALIGNED_MEMORY = {2: 0.5, 4: 0.5, 8: 0.65}
SCALED_END_S = 1.5e-6  # of a tile of FP8, but for the last: it scales one while it multiplies the next, ours don't


def predict_library(problem: Problem) -> Prediction:
    """The time of a local product by torch's matmul, and of the pass over the result that applies an activation."""
    product_s = library_s(problem)
    if problem.separate:
        itemsize = (problem.stored or result_dtype(problem.dtype)).itemsize
        product_s += PASS_S + 2 * problem.M * problem.N * itemsize / (PASS_MEMORY * problem.gpu.memory)
    return Prediction(LIBRARY_S + product_s, LIBRARY_S, product_s, 0.0)


def predict_staged(problem: Problem, config: GemmConfig) -> Prediction:
    """The time of a local product by our kernel where the operands that TMA can't take are copied before it.

    Copies for torch's kernels don't pay: with them 34 random problems took 1.16 times as long in the geometric mean.
    """
    alone = predict(replace(problem, layout=problem.staged_layout), config)
    copies_s = len(problem.staged) * PASS_S + 2 * sum(problem.staged) / problem.gpu.memory
    return Prediction(alone.seconds + copies_s, alone.launch, alone.gemm + copies_s, 0.0)


def fastest(problem: Problem, predicted: dict[str, Prediction]) -> str:
    """The way that a local product takes, of those with predictions: our kernel if it is as fast as torch or faster.

    What the model knows too little of is torch's: what is short, but for an epilogue, which saves torch's second
    launch; and sums so short that storing the result decides.
    """
    if LIBRARY not in predicted:
        return min(predicted, key=lambda name: predicted[name].gemm)
    library = predicted[LIBRARY].gemm
    short = library <= SHORT_S
    worth = WORTH if problem.stored_by_tma else WORTH_STAGING
    deep = problem.K >= SHORT_K or not problem.stored_by_tma  # by elements, torch stores at half of our speed
    known = (problem.tma or short) if problem.separate else not short and problem.tma and deep
    most = {KERNEL: worth * library if known else 0.0, STAGED: WORTH_STAGING * library if library > STAGED_S else 0.0}
    ours = {name: predicted[name].gemm for name in most if name in predicted and predicted[name].gemm <= most[name]}
    return min(ours, key=ours.get, default=LIBRARY)


def library_s(problem: Problem) -> float:
    """The time of the local GEMM by torch's matmul, without its launch: that of the best of its tiles."""
    gpu, dtype, programs = problem.gpu, problem.dtype, problem.programs
    alignment = 16 if problem.aligned else problem.alignment
    rate = gpu.library_rate(dtype, problem.precision, alignment, problem.orientation)
    M, N = sorted((problem.M, problem.N))
    best, end_s = math.inf, SCALED_END_S if dtype in FP8 else TILE_END_S
    for (block_m, block_n), splits in itertools.product(LIBRARY_TILES, LIBRARY_SPLITS):
        for first, second in ((block_m, block_n), (block_n, block_m)):
            tiles = -(-M // first) * -(-N // second)
            if splits == 1 or tiles * splits <= programs:
                waves = -(-tiles * splits // programs)
                wave_s = gpu.tile_at(rate, first, second, -(-problem.K // splits), dtype, end_s=end_s)
                best = min(best, waves * wave_s + TILE_END_S - end_s)
    slow = dtype in (FP16, BF16) and not problem.aligned and 1 < problem.M <= NARROW
    return max(best, problem.least_s / (UNALIGNED_MEMORY.get(problem.alignment, 1.0) if slow else 1.0))


def plain_limit(operation: str, ranks: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """The bytes up to which an operation takes the plain path, as `counted_bytes` counts them."""
    halved = ranks == 2 if operation == ALL_REDUCE else operation == GATHER and dtype in FP8
    return PLAIN_BYTES[operation] // (2 if halved else 1)


def counted_bytes(operation: str, M: int, width: int, dtype: torch.dtype, ranks: int) -> int:
    """The bytes of M rows of `width` elements that arrive at a rank, of a reduce-scatter from each peer."""
    crossings, senders = (2 if operation == ALL_REDUCE else 1), (1 if operation == SCATTER else ranks - 1)
    return crossings * M * width * sent_dtype(operation, dtype).itemsize * senders // ranks


def takes_turns(operation: str, rows: Sequence[int], width: int, dtype: torch.dtype) -> bool:
    """Whether the plain path multiplies some rows while others travel: in fp32, of many bytes.

    rows: those of each rank. width: elements of a row that travels. All of it is the same on all ranks.
    """
    ranks = len(rows)
    if dtype != FP32 or ranks == 1 or min(rows) < TURN_ROWS:
        return False
    return counted_bytes(operation, sum(rows), width, dtype, ranks) > plain_limit(operation, ranks, dtype)


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem) -> OverlapConfig:
    """The configuration by the model: the candidate with the least predicted time.

    Raises ValueError if there is none.
    """
    found = candidates(problem)
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in ways(problem).items())
        raise ValueError(f"{problem.operation}: nothing can send beside a GEMM here: {reasons}; use path='plain'")
    return found[0] if len(found) == 1 else min(found, key=lambda config: predict(problem, config).seconds)
