"""Candidates of the tuner: the feasible configurations of a list, ordered by a performance model.

The model covers tiles and the wire, but not pipelines and caches: it predicts how many programs should send and how
well a shape fills whole waves. Therefore every tile shape is tried, each with the communication settings that the model
prefers for it, and differences that the model cannot predict are tried around the winner, one change at a time. Each
tile shape costs a compilation; most communication settings are launch arguments, so more of them can be tried.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, fields, replace

import torch

from tkernels.comm import runtime
from tkernels.comm.arguments import check_type
from tkernels.configs import (
    BYTES_PER_S_OF_A_PROGRAM,
    COPY_BYTES_PER_S,
    MAX_TILE_CHUNKS,
    SEND_BYTES_PER_S,
    GemmConfig,
    OverlapConfig,
    by_copy_engine,
    check_field,
    chunks_fit,
    default_config,
    default_overlap,
    travel_of,
)
from tkernels.overlap import MIN_SPLIT_STEPS, PART_S, stages_of

# Limits of one program on sm_90: bytes of shared memory, and registers a thread.
SHARED_BYTES = 232448
REGISTERS = 255
INTERLEAVED_BYTES_PER_S = 40e9  # of a program that sends a tile while it computes the next one (bench/LOG.md)
PUT_COST_BYTES = 43 << 10  # a put's fixed cost, in bytes that could be sent meanwhile: puts of 128 KB lose a quarter

GEMM_FIELDS = [each.name for each in fields(GemmConfig)]
OVERLAP_FIELDS = [each.name for each in fields(OverlapConfig) if each.name != "gemm"]

TILES = [
    {"block_m": m, "block_n": n, "block_k": k, "num_warps": warps, "num_stages": stages, "split": split}
    for m, n, k, warps, stages, split in [
        (128, 256, 64, 8, 3, 2),
        (256, 128, 64, 8, 3, 2),
        (128, 128, 64, 8, 4, 1),
        (128, 128, 64, 4, 4, 1),
        (128, 128, 128, 8, 3, 2),
        (64, 256, 64, 4, 4, 2),
        (128, 64, 64, 4, 4, 1),
        (64, 128, 64, 4, 4, 1),
        (64, 64, 128, 4, 4, 1),
    ]
]
SIMULATED_TILES = [{"block_m": size, "block_n": size, "block_k": size} for size in (32, 64)]
COMM_PROGRAMS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 18, 24)
CHUNK_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
STEPS = {
    "num_stages": (2, 3, 4, 5, 6),
    "group_m": (1, 2, 4, 8, 16),
    "split": (1, 2),
    "num_comm": COMM_PROGRAMS,
    "chunk_rows": CHUNK_ROWS,
    "split_tiles": (16, 32, 48, 64, 96),
    "max_splits": (1, 2, 4),
    "put_block": (4096, 8192, 16384, 32768),
}
NOT_INTERLEAVED = ("split_tiles", "max_splits", "put_block")  # fields without effect there, or slower
SURVEY = 28  # candidates measured first, at most
OF_A_TILE = 4  # of these, at most, for one tile shape; they share a kernel
OF_A_FIELD = 3  # other values of each field that are tried around the best one, at most
OF_A_TOLD_FIELD = 6  # the same for the fields of TOLD, which need no kernel of their own
COPIES = (1, 2, 4)  # per peer
TOLD = ("num_comm", "chunk_rows", "split_tiles", "max_splits")
SLOWER = 1.5  # candidates predicted to take more than this multiple of the best prediction are not tried


@dataclass(frozen=True)
class Room:
    """The constraints on a configuration: the local GEMM M x N x K, `ranks`, and the `programs` of a launch.

    travel: (chunk_rows, landing) to which a larger GEMM, whose rows are sent alike, already binds the ranks; None if
        they are free.
    mapped: the copy engine and stores reach all ranks.
    """

    operation: str
    M: int
    N: int
    K: int
    dtype: torch.dtype
    layout: str
    ranks: int
    programs: int
    travel: tuple[int, bool] | None = None
    mapped: bool = True

    @property
    def rows(self) -> int:
        """Rows that one rank sends, or owns."""
        return -(-self.M // self.ranks)

    @property
    def landing_rows(self) -> int:
        """Rows of a chunk in the landing buffer, by rule."""
        tma = self.layout != "pointers"
        return default_overlap(
            self.operation, self.M, self.N, self.K, self.dtype, self.ranks, self.programs, tma, landing=True
        ).chunk_rows

    @property
    def row_bytes(self) -> int:
        return (self.K if self.operation == "all_gather_matmul" else self.N) * self.dtype.itemsize


def flat(config: GemmConfig | OverlapConfig) -> dict:
    """All fields of a configuration, those of its GemmConfig included, by name."""
    own = {each.name: getattr(config, each.name) for each in fields(config) if each.name != "gemm"}
    return own if isinstance(config, GemmConfig) else {**flat(config.gemm), **own}


def changed(config: GemmConfig | OverlapConfig, change: dict) -> GemmConfig | OverlapConfig:
    """The configuration with other values of some fields. Raises ValueError for values that contradict each other."""
    if isinstance(config, GemmConfig):
        return replace(config, **change)
    own = {name: value for name, value in change.items() if name in OVERLAP_FIELDS}
    gemm = replace(config.gemm, **{name: value for name, value in change.items() if name not in own})
    if "num_comm" in own:  # 0 selects the copy engine, unless `change` sets interleaved
        own.setdefault("interleaved", False)
    if own.get("num_comm", config.num_comm) or own.get("interleaved", config.interleaved):
        own["copy_rows"] = None  # only the copy engine has it
    return replace(config, gemm=gemm, **own)


def describe(config: GemmConfig | OverlapConfig, default: GemmConfig | OverlapConfig) -> str:
    """How a configuration differs from the default one, in words."""
    before = flat(default)
    return ", ".join(f"{name}={value}" for name, value in flat(config).items() if before[name] != value) or "default"


def impossible(config: GemmConfig | OverlapConfig, room: Room) -> str | None:
    """Why a configuration cannot run, or cannot be better than a smaller one; None if it can."""
    gemm, itemsize = getattr(config, "gemm", config), room.dtype.itemsize
    known = default_config(room.M, room.N, room.dtype, room.layout != "pointers")
    tile = f"tiles of {gemm.block_m}x{gemm.block_n}x{gemm.block_k}"
    # Staging beside the pipeline: slices of the result and of a peer's partial sums; with split-K tiles also a quarter
    # of a slice of fp32 partial sums, to be written, and to be read.
    reduces = room.operation in ("matmul_reduce_scatter", "matmul_all_reduce")
    kernels = [(gemm.num_stages, itemsize * (2 if reduces else 1))]
    if room.operation != "matmul" and config.max_splits > 1:
        kernels.append((stages_of(gemm, config.max_splits), 2 * itemsize + 1 if reduces else itemsize + 2))
    for stages, staged in kernels:
        pipeline = stages * (gemm.block_m + gemm.block_n) * gemm.block_k * itemsize
        stored = gemm.block_m * gemm.block_n // gemm.split * staged
        if pipeline > SHARED_BYTES:
            return f"shared memory: {stages} stages of {tile} take {pipeline} of {SHARED_BYTES} bytes"
        if pipeline + stored > SHARED_BYTES:
            return (
                f"shared memory: {stages} stages of {tile} take {pipeline}, and beside them slices of results and sums "
                f"{stored}, of {SHARED_BYTES} bytes"
            )
    sums = gemm.block_m * gemm.block_n // (32 * gemm.num_warps)
    if sums > 3 * REGISTERS // 4:
        return f"registers: {gemm.num_warps} warps hold {sums} sums a thread, of {REGISTERS} registers"
    if (gemm.block_m, gemm.block_n, gemm.block_k) != (known.block_m, known.block_n, known.block_k):
        if room.layout == "pointers":
            return "alignment: without TMA descriptors, larger tiles spill registers"
        if room.dtype == torch.float32 and runtime.RUNTIME != "simulated":
            return "registers: fp32 without tensor cores spills with other tiles"
    for what, block, size in (("rows", gemm.block_m, room.M), ("columns", gemm.block_n, room.N)):
        if block >= 2 * size and block > 64:
            return f"size: {size} {what} would leave half of a tile of {block} empty"
    if isinstance(config, GemmConfig):
        return None
    if config.num_comm >= room.programs:
        return f"programs: there are {room.programs}, and one at least must multiply"
    if not chunks_fit(config.chunk_rows, known.block_m):
        return (
            f"ranks: chunk_rows must be a multiple of {known.block_m}, as tiles of other layouts may be, or 1/2 to "
            f"1/{MAX_TILE_CHUNKS.value} of it"
        )
    if room.travel not in (None, travel_of(config)):
        chunk_rows, landing = room.travel
        return f"ranks: a larger GEMM with the same rows is tuned for {chunk_rows=}, {landing=}"
    if config.interleaved and room.operation == "all_gather_matmul":
        return "operation: only reductions are interleaved"
    if (config.landing or config.interleaved) and not room.mapped:
        return "ranks: the copy engine and stores reach no other machine"
    if config.landing and config.chunk_rows != room.landing_rows:
        return f"ranks: chunks of what lands have {room.landing_rows} rows, however many are copied at a time"
    if config.chunk_rows > max(room.rows, OverlapConfig.chunk_rows) and room.travel is None:
        return f"ranks: a chunk of more than the {room.rows} rows of a rank is one of them all"
    return None


def predicted_us(config: GemmConfig | OverlapConfig, room: Room, gemm_us: float) -> float:
    """The model: programs claim tiles while a link transfers data. gemm_us: the local GEMM alone, measured.

    A tile takes its share of gemm_us, as if cuBLAS's waves were whole. The comm programs first send and then compute
    tiles; in a reduction they stay busy until the tiles that peers need are computed. What is sent last still has to be
    multiplied (gather) or added (reduction).
    """
    gemm = getattr(config, "gemm", config)
    tiles_n = -(-room.N // gemm.block_n)
    tile_us = gemm_us * room.programs * gemm.block_m * gemm.block_n / (room.M * room.N)
    if isinstance(config, GemmConfig):
        return -(-(-(-room.M // gemm.block_m) * tiles_n) // room.programs) * tile_us
    own, num_comm = -(-room.rows // gemm.block_m) * tiles_n, config.num_comm
    tiles = own * room.ranks
    gathers, reduces_all = room.operation == "all_gather_matmul", room.operation == "matmul_all_reduce"
    sent = room.rows * room.row_bytes * (room.ranks - 1)
    put = config.sent_rows * room.row_bytes
    rate = num_comm * BYTES_PER_S_OF_A_PROGRAM * put / (put + PUT_COST_BYTES)
    if config.interleaved:
        rate = room.programs * INTERLEAVED_BYTES_PER_S
        # Every tile that is sent delays the GEMM by the time that one program needs to send it.
        tile_us += sent * (1 + reduces_all) / (INTERLEAVED_BYTES_PER_S * tiles) * 1e6
    send_us = sent * (1 + reduces_all) / (min(rate, SEND_BYTES_PER_S) or COPY_BYTES_PER_S) * 1e6
    needed = 0 if gathers else tiles if reduces_all else tiles - own  # tiles to compute before the last one can be sent
    busy_us = max(send_us, needed * tile_us / (room.programs - num_comm))
    waves, splits = (tiles + num_comm * busy_us / tile_us) / room.programs, [1]
    most = 1 if config.interleaved else config.max_splits
    splits += range(2, min(most, room.K // (gemm.block_k * MIN_SPLIT_STEPS)) + 1)
    end_us = min(math.ceil(waves * n) / n * tile_us + PART_S * 1e6 * (n > 1) for n in splits)
    # Gather: the tiles of each peer's last transfer are still to be computed. Reduction: only one own tile remains.
    last = (room.ranks - 1) * -(-min(config.sent_rows, room.rows) // gemm.block_m) * tiles_n if gathers else 1
    return max(end_us, send_us + -(-last // room.programs) * tile_us)


def survey(bases: list[GemmConfig | OverlapConfig], room: Room, gemm_us: float) -> tuple[list, Counter]:
    """Returns (configurations to measure first, best prediction first; number of rejected ones by reason).

    Candidates are changes of `bases`. Of those with the same tile and number of comm programs, only the one with the
    best prediction is kept; among equal predictions, the one closest to its base.
    """
    tiles = [{}, *(SIMULATED_TILES if runtime.RUNTIME == "simulated" else TILES)]  # the base's own, then the list's
    found, refused, chosen = {}, Counter(), []
    for base in dict.fromkeys(bases):
        travels = [[{}]]
        if isinstance(base, OverlapConfig) and base.num_comm:
            numbers, rows = nearest(COMM_PROGRAMS, base.num_comm), nearest(CHUNK_ROWS, base.chunk_rows)
            travels = [[{"num_comm": number, "chunk_rows": each} for each in rows] for number in numbers]
        for number, alike in itertools.product(range(len(tiles)), travels):
            others = [_possible(base, {**tiles[number], **change}, room, refused) for change in alike]
            predictions = {other: predicted_us(other, room, gemm_us) for other in others if other is not None}
            if predictions:
                best = min(predictions, key=predictions.get)
                found.setdefault((base, number), {})[best] = predictions[best]
    least = min((us for of_tile in found.values() for us in of_tile.values()), default=0)
    for of_tile in found.values():
        best = sorted(of_tile, key=of_tile.get)[:OF_A_TILE]
        slow = [config for config in best if of_tile[config] > SLOWER * least]
        chosen += [(place, of_tile[config], config) for place, config in enumerate(best) if config not in slow]
        if slow:
            refused[f"model: more than {SLOWER} times the {least:.0f} us that are predicted for the best"] += len(slow)
    chosen = sorted(chosen, key=lambda each: each[:2])[:SURVEY]  # the best of each tile before any tile's second
    return list(dict.fromkeys(config for *_, config in sorted(chosen, key=lambda each: each[1]))), refused


def nearest(values, to: int) -> list[int]:
    """The values, sorted by their ratio to `to`, nearest first."""
    return sorted(values, key=lambda value: max(value / to, to / value))


def neighbours(config, room: Room, gemm_us: float) -> tuple[list, Counter]:
    """Returns (configurations one change away that the model prefers; number of rejected ones by reason).

    Switching to the copy engine together with its copy_rows is one change, and so is switching to interleaved.
    """
    chosen, refused, before = [], Counter(), flat(config)
    for name, values in STEPS.items():
        if before.get("interleaved") and name in NOT_INTERLEAVED:
            continue
        values = nearest(values, before.get(name) or values[0])
        changes = [{name: value} for value in values if name in before and before[name] != value]
        others = [_possible(config, change, room, refused) for change in changes]
        found = {other: predicted_us(other, room, gemm_us) for other in others if other is not None}
        chosen += sorted(found, key=found.get)[: OF_A_TOLD_FIELD if name in TOLD else OF_A_FIELD]
    if isinstance(config, OverlapConfig):
        landed = replace(config, chunk_rows=room.landing_rows, copy_rows=None)
        copied = [by_copy_engine(landed, room.rows, room.row_bytes, copies) for copies in COPIES]
        changes = [
            {"num_comm": 0, "interleaved": False, "chunk_rows": each.chunk_rows, "copy_rows": each.copy_rows}
            for each in dict.fromkeys(each for each in copied if each != config)
        ]
        changes += [{"num_comm": 0, "interleaved": True, "split_tiles": None}] if not config.interleaved else []
        others = [_possible(config, change, room, refused) for change in changes]
        chosen += [other for other in others if other is not None]
    return chosen, refused


def product(default, grid: dict[str, list], room: Room) -> tuple[list, Counter]:
    """Returns (the default with each combination of a grid's values; number of rejected ones by reason)."""
    refused, found = Counter(), []
    for values in itertools.product(*grid.values()):
        config = _possible(default, dict(zip(grid, values, strict=True)), room, refused)
        if config is not None and config not in found:
            found.append(config)
    return found, refused


def _possible(config, change: dict, room: Room, refused: Counter):
    """The changed configuration; None if it is rejected, which is counted in `refused` by its reason."""
    try:
        other = changed(config, change)
        reason = impossible(other, room)
    except ValueError as error:
        reason = f"fields: {error}"
    if reason is None:
        return other
    refused[reason] += 1
    return None


def check_grid(grid: dict[str, list], operation: str):
    """Raises ValueError for what is no field of the operation's configurations, and for values that it can't have.

    Raises TypeError for what is no dictionary of lists.
    """
    check_type("grid", grid, dict, "a dictionary of values by field")
    known = GEMM_FIELDS if operation == "matmul" else dict.fromkeys(OVERLAP_FIELDS + GEMM_FIELDS)
    for name, values in grid.items():
        if name not in known:
            raise ValueError(f"grid: {operation} has no field {name!r}; it has {', '.join(known)}")
        check_type(f"grid: {name}", values, list | tuple, "a list of values")
        for value in values:
            check_field("grid", name, value)


def parse_grid(words: list[str]) -> dict[str, list]:
    """["num_comm=6,12", "split=1"] -> {"num_comm": [6, 12], "split": [1]}. Raises ValueError for anything else."""
    grid = {}
    for word in words:
        name, _, values = word.partition("=")
        if name in grid:
            raise ValueError(f"{word}: there are values for {name} already; give all of them at once, as in {name}=1,2")
        try:
            grid[name] = [_value(value) for value in values.split(",")]
        except ValueError:
            raise ValueError(f"{word}: give whole numbers, as in {name}=1,2 (or true, false)") from None
    return grid


def _value(text: str) -> int | bool:
    return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else int(text)
