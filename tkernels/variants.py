"""Variants of a configuration: what the tuner measures, and the grids that a user names instead."""

import itertools
from collections import Counter
from dataclasses import fields, replace

from tkernels import model
from tkernels.comm.arguments import check_type
from tkernels.configs import GemmConfig, OverlapConfig, Wire, by_copy_engine, check_field
from tkernels.gpus import SIMULATED

MOST = 24  # variants that are measured, unless a grid names them
OF_A_WAY = 2  # of these, at most, for one tile shape and way of sending: they share kernels
SLOWER = 1.5  # variants predicted to take more than this multiple of the best prediction are not measured
GEMM_FIELDS = [each.name for each in fields(GemmConfig)]
OVERLAP_FIELDS = [each.name for each in fields(OverlapConfig) if each.name not in ("gemm", *Wire._fields)]
TILES = [
    dict(zip(("block_m", "block_n", "block_k", "num_warps", "num_stages", "split"), values, strict=True))
    for values in [
        (128, 256, 64, 8, 3, 2), (256, 128, 64, 8, 3, 2), (128, 128, 64, 8, 4, 1), (128, 128, 64, 4, 4, 1),
        (128, 128, 128, 8, 3, 2), (64, 256, 64, 4, 4, 2), (128, 64, 64, 4, 4, 1), (64, 128, 64, 4, 4, 1),
        (64, 64, 128, 4, 4, 1),
    ]
]  # fmt: skip
FP8_TILES = [tile | {"block_k": 2 * tile["block_k"]} for tile in TILES]  # of as many bytes
FP32_TILES = [tile | {"block_k": tile["block_k"] // 2, "split": 4} for tile in TILES]  # also of stored ones
SIMULATED_TILES = [{"block_m": size, "block_n": size, "block_k": size} for size in (32, 64)]
SENDERS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 18, 24)  # comm programs
COPIES = (1, 2, 4)  # to each peer
CHANGES = {  # of the default, one at a time: what no model predicts
    "num_stages": (2, 3, 4, 5),
    "group_m": (1, 2, 4, 8, 16),
    "split": (1, 2, 4),
    "put_block": (8192, 16384, 32768),
    "max_splits": (1, 2, 4),
}


def variants(default: GemmConfig | OverlapConfig, problem: model.Problem) -> tuple[list, Counter]:
    """Returns (variants of the default worth measuring, best prediction first; number of rejected ones by reason).

    The default's tiles with the best of each way of sending; other tiles, each with the ways that the model prefers for
    them; and single changes of the default.
    """
    refused, found = Counter(), {}  # prediction, and how soon to take it, by configuration
    by_size = {1: FP8_TILES, 2: TILES, 4: FP32_TILES}
    tiles = SIMULATED_TILES if problem.gpu is SIMULATED else by_size[problem.dtype.itemsize]
    for number, tile in enumerate([{}, *tiles]):
        place = itertools.count(1)
        for ways in _ways(default, problem):
            others = [_possible(default, tile | way, problem, refused) for way in ways]
            predicted = {other: model.predict(problem, other).seconds for other in others if other is not None}
            for other in sorted(predicted, key=predicted.get)[:OF_A_WAY]:
                found.setdefault(other, (next(place) if number else 0, predicted[other]))
    least = min((seconds for _, seconds in found.values()), default=0)
    slow = [config for config, (_, seconds) in found.items() if seconds > SLOWER * least]
    if slow:
        reason = f"model: more than {SLOWER} times the {1e6 * least:.0f} us that are predicted for the best"
        refused[reason] += len(slow)
    before = flat(default)
    changes = [{name: value} for name, values in CHANGES.items() for value in values]
    changes = [change for change in changes if all(before.get(name, value) != value for name, value in change.items())]
    single = [_possible(default, change, problem, refused) for change in changes]
    single = [other for other in single if other is not None and other not in found]
    room = max(MOST - len(single), MOST // 2)
    kept = [config for config in sorted(found, key=found.get) if config not in slow][:room]
    kept.sort(key=lambda config: found[config][1])
    return [*kept, *single][:MOST], refused


def _ways(default: GemmConfig | OverlapConfig, problem: model.Problem) -> list[list[dict]]:
    """Ways of sending, as changes of the default: by the copy engine, by comm programs, interleaved."""
    if isinstance(default, GemmConfig):
        return [[{}]]
    ways = [[{"num_comm": number} for number in SENDERS]]
    if default.landing:
        copied = [by_copy_engine(default, problem.rows, problem.row_bytes, copies) for copies in COPIES]
        rows = dict.fromkeys(each.copy_rows for each in copied)
        ways.insert(0, [{"num_comm": 0, "copy_rows": each} for each in rows])
    if problem.operation in model.FUSED[1:] and problem.mapped:
        ways.append([{"num_comm": 0, "interleaved": True, "split_tiles": None}])
    return ways


def flat(config: GemmConfig | OverlapConfig) -> dict:
    """All fields of a configuration, those of its GemmConfig included, by name."""
    own = {each.name: getattr(config, each.name) for each in fields(config) if each.name != "gemm"}
    return own if isinstance(config, GemmConfig) else {**flat(config.gemm), **own}


def changed(config: GemmConfig | OverlapConfig, change: dict) -> GemmConfig | OverlapConfig:
    """The configuration with other values of some fields. Raises ValueError for values that contradict each other."""
    if isinstance(config, GemmConfig):
        return replace(config, **change)
    own = {name: value for name, value in change.items() if hasattr(config, name)}
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


def _possible(config, change: dict, problem: model.Problem, refused: Counter):
    """The changed configuration; None if it is rejected, which is counted in `refused` by its reason."""
    try:
        other = changed(config, change)
        reason = model.reject(problem, other)
    except ValueError as error:
        reason = f"fields: {error}"
    if reason is None:
        return other
    refused[reason] += 1
    return None


def product(default, grid: dict[str, list], problem: model.Problem) -> tuple[list, Counter]:
    """Returns (the default with each combination of a grid's values; number of rejected ones by reason)."""
    refused = Counter()
    changes = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    found = [_possible(default, change, problem, refused) for change in changes]
    return list(dict.fromkeys(config for config in found if config is not None)), refused


def check_grid(grid: dict[str, list], operation: str):
    """Raises ValueError for what is no field of the operation's configurations, and for values that it can't have.

    Raises TypeError for what is no dictionary of lists.
    """
    check_type("grid", grid, dict, "a dictionary of values by field")
    known = GEMM_FIELDS if operation == "matmul" else dict.fromkeys(OVERLAP_FIELDS + GEMM_FIELDS)
    for name, values in grid.items():
        if name in Wire._fields:
            raise ValueError(f"grid: {name} is not tuned: it follows by rule, the same on all ranks")
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
