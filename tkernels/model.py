"""The model of time: what a call would take in each configuration on a GPU, and the choice of one for calls without.

    ways(problem)               the candidates: a configuration for each way of sending, or why there is none
    reject(problem, config)     why one can't run, or can't win; the tuner asks too
    predict(problem, config)    its time, in parts
    choose(problem)             the candidate with the least

Programs compute tiles in waves. What a rank sends leaves when its tiles are done, as fast as its sender is, and what
arrives last still has to be multiplied, or added. The model knows no caches and no clocks: it is within 7 % of nearly
all recorded times of fused calls, and of the candidates it takes the fastest recorded one, or one within 1 % of the
rule of measured thresholds that it replaced (python -m bench.model). The tables that its constants come from, with
machine and date, are in bench/LOG.md.

All ranks must agree on the wire format, which rows are behind one signal and in which buffer they arrive, and on the
path, but N of an all-gather and K of a reduction may differ where features divide unevenly, and so may layouts. So
these two follow by rule from what all ranks share (`wire_of`, `plain_limit`). Each rank chooses the rest by itself.
"""

import functools
import heapq
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton.language as tl

from tkernels.comm import runtime
from tkernels.configs import (
    COPIES,
    DTYPES,
    MAX_LOOK,
    MIN_CHUNK_ROWS,
    GemmConfig,
    OverlapConfig,
    Wire,
    by_copy_engine,
)

GATHER, SCATTER, ALL_REDUCE = FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
FP32, FP16, BF16 = DTYPES
COPY_ENGINE, INTERLEAVED, PROGRAMS = "copy engine", "interleaved", "comm programs"  # who sends


@dataclass(frozen=True, eq=False)
class GPU:
    """The constants of a GPU: a row of `GPUS`. Rates are per second.

    known: "measured"; "runs": other constants are those of the GPU measured; "compiled": never run, from data sheets.
    flops, library_flops: of our GEMM apart from the ends of its tiles, and of torch's, in 16 bits and in fp32.
    memory, l2: bytes that a kernel reads and writes, and that its programs read.
    copy_engine, stores: bytes to all peers together.
    program, reducing_program: bytes that one comm program stores, in an all-gather, and where it waits for tiles.
    interleaved: bytes to all peers, where every program sends between its steps.
    collective: bytes of a collective alone; of an all-reduce, of each of its halves.
    """

    name: str
    known: str = "measured"
    sms: int = 132
    shared_bytes: int = 232448  # for one program
    flops: tuple[float, float] = (830e12, 7e12)
    library_flops: tuple[float, float] = (780e12, 52e12)
    memory: float = 4e12
    l2: float = 12e12
    copy_engine: float = 385e9
    stores: float = 320e9
    program: float = 28e9
    reducing_program: float = 24e9
    interleaved: float = 225e9
    collective: float = 235e9

    def seconds(self, multiplications: int, dtype: torch.dtype) -> float:
        """The time in which one SM multiplies and adds so often."""
        return 2 * multiplications * self.sms / self.flops[dtype == FP32]

    def tile_s(self, gemm: GemmConfig, K: int, dtype: torch.dtype) -> float:
        """The time that a program takes for a tile: small ones wait for their operands, out of L2."""
        operands_s = (gemm.block_m + gemm.block_n) * K * dtype.itemsize * self.sms / self.l2
        return max(self.seconds(gemm.block_m * gemm.block_n * K, dtype), operands_s) + TILE_END_S


H200 = GPU("NVIDIA H200")
SIMULATED = GPU("simulated", "interpreted")
GPUS = {
    gpu.name: gpu
    for gpu in (
        H200,
        GPU("NVIDIA H100 80GB HBM3", "runs", memory=2.8e12),
        GPU(
            "NVIDIA A100-SXM4-80GB", "compiled", 108, 166912, (250e12, 7e12), (270e12, 19e12), 1.6e12, 6e12,
            250e9, 200e9, 18e9, 16e9, 160e9, 150e9,
        ),
        GPU(
            "NVIDIA B200", "compiled", 148, 232448, (1400e12, 10e12), (1700e12, 70e12), 6.4e12, 18e12,
            770e9, 640e9, 56e9, 48e9, 500e9, 470e9,
        ),
    )
}  # fmt: skip

KNOWN = {
    "measured": "the model's constants were measured on {gpu}",
    "runs": "the kernels have run on {gpu}, but the model's constants are those of NVIDIA H200, except its memory's",
    "compiled": "nothing has run on {gpu}: kernels were compiled for it, and the constants are from data sheets",
}

# Seconds, H200.
LAUNCH_S = 10e-6  # of a fused kernel, whatever its size
LIBRARY_S, COLLECTIVE_S = 7e-6, 6e-6  # of the plain path: torch's GEMM and the collective, whatever their sizes
TILE_END_S = 3e-6  # a tile's time without its steps along K
PART_S = 5e-6  # added to TILE_END_S for a part of a tile, which writes its partial sums
ADD_S = 9e-6  # added for the last part, which reads them, per other part
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
# peer; between two ranks an all-reduce up to half as many.
PLAIN_BYTES = {GATHER: 12 << 20, SCATTER: 6 << 20, ALL_REDUCE: 24 << 20}

DEALT_SHORT = 1  # full waves left to dynamic assignment, where there are comm programs
MIN_SPLIT_STEPS = 8  # least steps along K of a part
MAX_SPLIT_TILES = tl.constexpr(128)
REGISTERS = 255


def gpu_here() -> GPU:
    """The row of this machine's GPU; for one without a row, that of H200."""
    if runtime.RUNTIME == "simulated":
        return SIMULATED
    return GPUS.get(torch.cuda.get_device_properties(torch.cuda.current_device()).name, H200)


@dataclass(frozen=True)
class Problem:
    """What is to be computed, and where: x [M, K] times w [N, K], a rank's local GEMM, beside a transfer of its rows.

    operation: one of configs.OPERATIONS. dtype, layout: of x and w; layout as gemm.layout_of names it.
    ranks: of the group. programs: of a launch.
    mapped: copies and stores reach all ranks. stores: programs send by SM stores, not by NVSHMEM's calls.
    sending: comm programs must send, into the two alternating inboxes.
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
        return (self.K if self.gathers else self.N) * self.dtype.itemsize

    @property
    def tma(self) -> bool:
        return self.layout != "pointers"

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

    def tiles(self, gemm: GemmConfig) -> tuple[int, int]:
        """(tiles of one rank's rows, tiles of them all)."""
        own = -(-self.rows // gemm.block_m) * -(-self.N // gemm.block_n)
        return own, own * self.ranks


# Candidates


def default_config(M: int, N: int, dtype: torch.dtype, tma: bool = True, gpu: GPU | None = None) -> GemmConfig:
    """The tiles by rule for a local GEMM of M x N. tma: all operands have layouts that TMA can describe.

    None of these spills registers. block_m depends on nothing that could differ between ranks.
    """
    if (gpu or gpu_here()) is SIMULATED:
        # The interpreter's cost is per operation, hardly per element: a GEMM of 256 x 128 x 64 takes a third of the
        # time with tiles of 64 x 64 x 64 than with 32 x 32 x 32. Small GEMMs, as in tests, still get several tiles.
        size = 32 if M <= 128 else 64
        return GemmConfig(size, size, size, group_m=2)
    if (gpu or gpu_here()).shared_bytes < H200.shared_bytes:
        # Below sm_90 Triton rewrites descriptors to pointers, whose loads it does not pipeline.
        size = 64 if dtype == FP32 or M <= 64 else 128
        return GemmConfig(size, size, 16 if dtype == FP32 else 32, split=1, num_stages=4, use_tma=False)
    if dtype == FP32:
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
    chunk_rows = min(max(1 << (CHUNK_BYTES // row_bytes).bit_length() >> 1, MIN_CHUNK_ROWS), 128)
    large = problem.stored_by_pair and problem.M * row_bytes >= 2 * PAIR_SHARE_BYTES
    return Wire(chunk_rows * 2 if large else chunk_rows, False)


def ways(problem: Problem) -> dict[str, OverlapConfig | str]:
    """The candidates of a fused call, one for each way of sending, or the reason why that way is none.

    Of equal predictions the first one counts.
    """
    wire, gemm, programs, gpu = wire_of(problem), _tiles(problem), problem.programs, problem.gpu
    if gpu is SIMULATED:
        return {PROGRAMS: OverlapConfig(gemm, wire.chunk_rows, max(min(2, programs - 1), 1), put_block=4096)}
    # As many comm programs as saturate the link; in a reduction no more than sending needs, as one is idle until there
    # are tiles to send.
    product_s = gpu.seconds(problem.M * problem.N * problem.K, problem.dtype) / programs
    needed = problem.crossings * problem.sent_bytes / gpu.reducing_program / product_s
    num_comm = PAIR_SENDERS if problem.stored_by_pair else max(SENDERS // problem.peers, 1) * problem.peers
    if not problem.gathers:
        num_comm = min(max(math.ceil(SPARE * needed), 2), num_comm)
    config = OverlapConfig(
        gemm, wire.chunk_rows, max(min(num_comm, programs - 1), 1), landing=wire.landing,
        max_registers=255 if problem.dtype == FP32 else None,
    )  # fmt: skip
    found = {COPY_ENGINE: _copied(problem, config), INTERLEAVED: _interleaved(problem, config, product_s)}
    found[PROGRAMS] = config
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
        return by_copy_engine(config, problem.rows, problem.row_bytes, 1 if problem.gathers else COPIES)
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
    if problem.sending or not problem.mapped:
        return "comm programs must send" if problem.sending else "stores reach no other machine"
    if problem.ranks > 2:
        return "among more than two ranks its steps spill registers"
    if not problem.tma or problem.dtype == FP32:
        return "not measured without TMA or in fp32"
    if product_s < wire_s:
        return f"tiles would wait for the link: the GEMM takes {1e6 * product_s:.0f} us, the wire {1e6 * wire_s:.0f}"
    return replace(config, num_comm=0, interleaved=True)


def candidates(problem: Problem) -> list[OverlapConfig]:
    """The configurations that a fused call may get by the model."""
    return [way for way in ways(problem).values() if isinstance(way, OverlapConfig)]


def _tiles(problem: Problem) -> GemmConfig:
    """The tiles by rule of a fused operation, with groups that fit its shards."""
    gemm = default_config(problem.M, problem.N, problem.dtype, problem.tma, problem.gpu)
    if problem.gpu is SIMULATED:
        return gemm
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
    known = default_config(problem.M, problem.N, problem.dtype, problem.tma, problem.gpu)
    tile = f"tiles of {gemm.block_m}x{gemm.block_n}x{gemm.block_k}"
    reduces = problem.operation in (SCATTER, ALL_REDUCE)
    # Staging beside the pipeline: slices of the result and of a peer's partial sums; with split-K tiles also a quarter
    # of a slice of fp32 partial sums, to be written, and to be read.
    kernels = [(gemm.num_stages, itemsize * (2 if reduces else 1))]
    if isinstance(config, OverlapConfig) and config.max_splits > 1:
        kernels.append((stages_of(gemm, config.max_splits), 2 * itemsize + 1 if reduces else itemsize + 2))
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
    sums = gemm.block_m * gemm.block_n // (32 * gemm.num_warps)
    if sums > 3 * REGISTERS // 4:
        return f"registers: {gemm.num_warps} warps hold {sums} sums a thread, of {REGISTERS} registers"
    if (gemm.block_m, gemm.block_n, gemm.block_k) != (known.block_m, known.block_n, known.block_k):
        if not problem.tma:
            return "alignment: without TMA descriptors, larger tiles spill registers"
        if problem.dtype == FP32 and problem.gpu is not SIMULATED:
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
    if (config.landing or config.interleaved) and not problem.mapped:
        return "ranks: the copy engine and stores reach no other machine"
    return None


# Times


class Waves(NamedTuple):
    """The assignment of tiles to programs, in numbers for `take_tile` (waves) and `part_of_tile` (split-K).

    head: first waves, of the compute programs alone; comm programs join afterwards.
    dealt: waves that are dealt out, the first `head` included; in the last of them, only whole tiles are.
    whole: tiles that are computed whole, the first ones.
    splits: parts of each later tile.
    """

    head: int
    dealt: int
    whole: int
    splits: int

    def end(self, tiles: int, tile_s: float, programs: int, num_comm: int, sending: float) -> float:
        """When the launch ends, in units of a tile's time. sending: when its comm programs have sent everything."""
        workers = programs - num_comm
        places = self.head * workers + (self.dealt - self.head) * programs
        dealt = min(places, self.whole)
        part = (1 - TILE_END_S / tile_s) / self.splits + (TILE_END_S + PART_S) / tile_s
        last_part = part + ADD_S * (self.splits - 1) / tile_s
        items = [1.0] * (self.whole - dealt) + ([part] * (self.splits - 1) + [last_part]) * (tiles - self.whole)
        free = [float(self.dealt - (program < places - dealt)) for program in range(workers)]
        free += [sending + self.dealt - self.head] * num_comm
        heapq.heapify(free)
        for item in items:
            heapq.heapreplace(free, free[0] + item)
        return max(free)


def plan_waves(
    tiles: int, splittable: int, K: int, num_programs: int, config: OverlapConfig, sent_bytes: int,
    tiles_first: int = 0, dtype: torch.dtype = BF16,
) -> Waves:  # fmt: skip
    """The waves of a launch on this machine's GPU: those that end first, by the model.

    splittable: how many of the last tiles may be split.
    sent_bytes: bytes that the comm programs of this rank send.
    tiles_first: the comm programs finish no earlier than this many first tiles; if these are all tiles, they never join
        the compute programs.
    """
    return _plan_waves(tiles, splittable, K, num_programs, config, sent_bytes, tiles_first, dtype, gpu_here())


@functools.lru_cache(maxsize=1024)
def _plan_waves(
    tiles: int, splittable: int, K: int, num_programs: int, config: OverlapConfig, sent_bytes: int, tiles_first: int,
    dtype: torch.dtype, gpu: GPU,
) -> Waves:  # fmt: skip
    gemm, num_comm, workers = config.gemm, config.num_comm, num_programs - config.num_comm
    most = min(splittable, MAX_SPLIT_TILES.value)
    tile_s = gpu.tile_s(gemm, K, dtype)
    rate = num_comm * gpu.reducing_program if tiles_first else min(num_comm * gpu.program, gpu.stores)
    sending_s = sent_bytes / rate if rate else 0
    sending = min(max(sending_s / tile_s, tiles_first / workers), tiles / workers)

    def deal(last: int, splits: int, head: int = math.ceil(sending)) -> Waves:
        whole = tiles - last
        if not num_comm:
            return Waves(0, -(-whole // num_programs), whole, splits)
        head = min(head, max(whole // workers - DEALT_SHORT, 0))
        rest = max((whole - head * workers) // num_programs - DEALT_SHORT, 0)
        # A comm program must not be dealt a tile that a comm program waits for: it would start it too late, or never.
        rest = rest if head * workers >= tiles_first else 0
        return Waves(head, head + rest, whole, splits)

    def end(plan: Waves) -> float:
        """The later of two estimates of how long sending takes."""
        guesses = (0.9 * sending, 1.1 * sending) if num_comm else (0.0,)
        return max(plan.end(tiles, tile_s, num_programs, num_comm, guess) for guess in guesses)

    plans = [deal(0, 1)]
    if num_comm and not tiles_first:
        plans.insert(0, deal(0, 1, int(sending)))  # first: wins ties, to leave fewer tiles undealt
    if config.split_tiles is not None:
        last, splits = min(config.split_tiles, most), min(config.max_splits, -(-K // gemm.block_k))
        if last and splits > 1:  # every part has a step: one without would not count
            return deal(last, splits)
    else:
        left = round(tiles + num_comm * sending) % num_programs
        lasts = {left + num_programs // 12, left + num_programs // 6, num_programs // 4, num_programs // 2}
        splits = range(2, min(config.max_splits, K // (gemm.block_k * MIN_SPLIT_STEPS)) + 1)
        choices = itertools.product((last for last in sorted(lasts) if 0 < last <= most), splits)
        plans += itertools.starmap(deal, choices)
    return min(plans, key=end) if len(plans) > 1 else plans[0]


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


def predict(problem: Problem, config: GemmConfig | OverlapConfig) -> Prediction:
    """The time of one call. Of a fused operation, with even shards, as its last byte or its last tile ends it."""
    gpu, gemm, K = problem.gpu, getattr(config, "gemm", config), problem.K
    own, tiles = problem.tiles(gemm)
    tile_s = gpu.tile_s(gemm, K, problem.dtype)
    least = (problem.M * K + problem.N * K + problem.M * problem.N) * problem.dtype.itemsize / gpu.memory
    alone_s = max(-(-tiles // problem.programs) * tile_s, least)
    if isinstance(config, GemmConfig):
        return Prediction(LIBRARY_S + alone_s, LIBRARY_S, alone_s, 0.0)

    num_comm, sent = config.num_comm, problem.sent_bytes
    programs = min(problem.programs, config.max_programs or problem.programs, num_comm + tiles)
    workers, peers_tiles = programs - num_comm, own * problem.peers
    needed = 0 if problem.gathers else tiles if problem.crossings == 2 else peers_tiles
    splittable = tiles if problem.gathers else 0 if config.interleaved else own
    plan = _plan_waves(tiles, splittable, K, programs, config, sent, needed, problem.dtype, gpu)
    sums_s = 0 if problem.gathers else SUM_S * problem.peers
    copy_s = COPY_S if problem.gathers else REDUCED_COPY_S
    copies = -(-problem.rows // config.sent_rows) if config.copied else 0  # to each peer
    if config.copied:
        wire_s = sent / gpu.copy_engine + copies * problem.peers * copy_s
    elif config.interleaved:
        wire_s = sent / gpu.interleaved
    else:
        one = gpu.program if problem.gathers else gpu.reducing_program
        wire_s = sent / min(num_comm * one, gpu.stores)

    def end(sending_s: float) -> float:
        """When the last tile ends, if the comm programs have then sent everything."""
        busy = min(max(sending_s / tile_s, needed / workers), tiles / workers)
        return max(plan.end(tiles, tile_s, programs, num_comm, busy) * tile_s, least) + own / programs * sums_s

    def sent_behind(first: int, last: int, together: int, begin: float, ends: float, wire_s: float) -> float:
        """When the rows of tiles from `first` to `last` are sent, `together` of them at a time, as waves complete them.

        begin: when the sender is free. ends: when the last of these tiles ends. wire_s: sending all of them.
        """
        now, done = begin, first
        for wave in range(first // workers + 1, -(-last // workers) + 1):
            complete = min(wave * workers, last)
            complete = last if complete == last else max(complete // together * together, done)
            if complete > done:
                now = max(now, min(wave * tile_s, ends)) + (complete - done) / (last - first) * wire_s
                done = complete
        return now

    if config.interleaved:
        waves = -(-tiles // programs)
        first = -(-peers_tiles // programs)  # waves of tiles that peers need
        rest_s = (waves - first) * (tile_s + sums_s + (INTERLEAVED_S if problem.crossings == 2 else 0))
        seconds = max(first * (tile_s + INTERLEAVED_S), wire_s) + INTERLEAVED_S
        seconds += max(rest_s, wire_s if problem.crossings == 2 else 0)
    elif problem.gathers and config.copied:
        seconds = max(end(0), GATE_S + wire_s + -(-own // copies // programs) * tile_s)
    elif problem.gathers:
        last = problem.peers * -(-min(config.chunk_rows, problem.rows) // gemm.block_m) * -(-problem.N // gemm.block_n)
        seconds = max(end(wire_s), wire_s + -(-last // programs) * tile_s)
    else:
        together = max(own // copies, 1) if copies else gemm.group_m * -(-problem.N // gemm.block_n)
        arrived = sent_behind(0, peers_tiles, together, 0.0, math.inf, wire_s)
        arrived += ARRIVAL_S if copies else LAST_CHUNK_S
        # The own tiles of the rows that arrived last: all but the first wave of them are still to be computed.
        last = own // copies if copies else min(own, programs)
        seconds = max(end(arrived), arrived + (-(-last // programs) - 1) * tile_s + sums_s + TILE_END_S)
        if problem.crossings == 2:
            late = max(seconds - -(-tiles // workers) * tile_s, 0.0)
            seconds = sent_behind(peers_tiles, tiles, together, arrived - late, seconds - late, wire_s) + late
            seconds += ARRIVAL_S if copies else LAST_CHUNK_S
    if problem.crossings == 2:  # the finished rows are copied out of the inbox
        seconds += problem.M * problem.row_bytes * problem.peers / problem.ranks / (gpu.memory / 2)
    return Prediction(LAUNCH_S + seconds, LAUNCH_S, alone_s, problem.crossings * wire_s)


def predict_plain(problem: Problem) -> Prediction:
    """The time of the plain path: torch's GEMM and the collective, one after the other."""
    flops = problem.gpu.library_flops[problem.dtype == FP32] * problem.programs / problem.gpu.sms
    product_s = 2 * problem.M * problem.N * problem.K / flops
    least = (problem.M * problem.K + problem.N * (problem.K + problem.M)) * problem.dtype.itemsize / problem.gpu.memory
    wire_s = problem.crossings * problem.sent_bytes / problem.gpu.collective
    launch_s = LIBRARY_S + (COLLECTIVE_S if problem.ranks > 1 else 0)
    return Prediction(launch_s + max(product_s, least) + wire_s, launch_s, max(product_s, least), wire_s)


def plain_limit(operation: str, ranks: int) -> int:
    """The bytes up to which an operation takes the plain path, as PLAIN_BYTES counts them."""
    return PLAIN_BYTES[operation] // (2 if operation == ALL_REDUCE and ranks == 2 else 1)


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem) -> OverlapConfig:
    """The configuration by the model: the candidate with the least predicted time."""
    found = candidates(problem)
    return found[0] if len(found) == 1 else min(found, key=lambda config: predict(problem, config).seconds)
