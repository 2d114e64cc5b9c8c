"""The configurations that a sweep tries around the default one."""

import dataclasses
import itertools

from tkernels.gemm import GemmConfig
from tkernels.overlap import OverlapConfig

GEMM_FIELDS = [field.name for field in dataclasses.fields(GemmConfig)]
OVERLAP_FIELDS = [field.name for field in dataclasses.fields(OverlapConfig) if field.name != "gemm"]

# Without a grid, one of these at a time replaces what the default has.
GEMM_STEPS = [
    *({"num_stages": stages} for stages in (2, 3, 4)),
    *({"group_m": group} for group in (1, 4, 8, 16)),
    *({"split": split} for split in (1, 2)),
    {"block_m": 128, "block_n": 256, "num_stages": 3, "split": 2, "num_warps": 8},
    {"block_m": 256, "block_n": 128, "num_stages": 3, "split": 2, "num_warps": 8},
    {"block_m": 128, "block_n": 128, "num_stages": 4, "split": 1, "num_warps": 4},
    {"block_m": 128, "block_n": 128, "num_stages": 4, "split": 1, "num_warps": 8},
]
OVERLAP_STEPS = [
    *({"num_comm": programs} for programs in (3, 4, 6, 8, 9, 12, 16, 18, 24)),
    *({"chunk_rows": rows} for rows in (128, 256, 512, 1024, 2048)),
    *({"put_block": elements} for elements in (4096, 8192, 16384)),
    *GEMM_STEPS,
]


def parse_grid(words: list[str]) -> dict[str, list]:
    """["num_comm=6,12", "split=1"] -> {"num_comm": [6, 12], "split": [1]}. Raises ValueError for anything else."""
    grid = {}
    for word in words:
        name, _, values = word.partition("=")
        if name not in GEMM_FIELDS + OVERLAP_FIELDS:
            known = ", ".join(OVERLAP_FIELDS + GEMM_FIELDS)
            raise ValueError(f"--sweep {word}: {name!r} is no field of a configuration; there are {known}")
        try:
            grid[name] = [_value(value) for value in values.split(",")]
        except ValueError:
            raise ValueError(f"--sweep {word}: give whole numbers, as in {name}=1,2 (or true, false)") from None
    return grid


def _value(text: str) -> int | bool:
    return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else int(text)


def changes(config: GemmConfig | OverlapConfig, grid: dict[str, list]) -> list[dict]:
    """What to replace in `config`, one dict a candidate: the grid's product, or one step at a time without a grid.

    The first candidate changes nothing.
    """
    if grid:
        combinations = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    else:
        combinations = iter(OVERLAP_STEPS if isinstance(config, OverlapConfig) else GEMM_STEPS)
    current = {**dataclasses.asdict(config), **dataclasses.asdict(getattr(config, "gemm", config))}
    found = [{}]
    for combination in combinations:
        change = {name: value for name, value in combination.items() if current.get(name) != value}
        if change not in found:
            found.append(change)
    return found


def changed(config: GemmConfig | OverlapConfig, change: dict) -> GemmConfig | OverlapConfig:
    """The configuration with the change; ValueError where the change makes none or names a field it does not have."""
    if isinstance(config, GemmConfig):
        return dataclasses.replace(config, **change)
    gemm = dataclasses.replace(config.gemm, **{name: value for name, value in change.items() if name in GEMM_FIELDS})
    own = {name: value for name, value in change.items() if name in OVERLAP_FIELDS}
    return dataclasses.replace(config, gemm=gemm, **own)
