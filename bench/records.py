"""Records, one JSON line a measurement, and the numbers that summaries, pictures and README derive from them."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
PEERS = {"serial": "NCCL + cuBLAS", "torch": "torch fused"}  # that a user would choose instead


def append(path: Path, line: dict) -> None:
    """Append one JSON line; creates the file if needed."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict]:
    """The records of one file, oldest first; if there are several of one case, the last one."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    cases = {}
    for line in lines:
        if "ours_us" in line:
            line = {"layout": "TN", "ways": {}, "fast_accum": None} | line
            cases[case_of(line)] = line
    return list(cases.values())


def case_of(line: dict) -> tuple:
    """What was measured."""
    return tuple(line[name] for name in ("op", "shape", "layout", "ranks", "dtype", "fast_accum"))


def of_fp8(line: dict) -> bool:
    return line["fast_accum"] is not None


def newest(folder: Path = RESULTS) -> Path:
    """The file with the latest day's records of fused operations on GPUs; of several, the one with the most ranks.

    Those of FP8 don't count. Raises FileNotFoundError if there is none.
    """
    dated = []
    for path in folder.glob("*.jsonl"):
        lines = [line for line in read(path) if line["gpu"] and line["op"] in FUSED and not of_fp8(line)]
        if lines:
            dated.append((max(line["date"][:10] for line in lines), lines[0]["ranks"], path))
    if not dated:
        raise FileNotFoundError(f"no file of {folder} has fused operations on GPUs; write one by bench.run --json")
    return max(dated)[-1]


def best_peer_us(line: dict) -> float | None:
    """The time of the fastest of PEERS."""
    return min((line[f"{name}_us"] for name in PEERS if line[f"{name}_us"] is not None), default=None)


def limit_us(line: dict) -> float | None:
    """max(cuBLAS, wire): the lower bound of any overlap of this GEMM with this transfer."""
    parts = line["cublas_us"], line["wire_us"]
    return None if None in parts else max(parts)


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def circumstances(lines: list[dict]) -> str:
    """The conditions of the measurements: machine, date, versions, and the way of timing."""
    line = lines[-1]
    versions = [("torch", "torch"), ("triton", "triton"), ("nccl", "NCCL"), ("nvshmem", "NVSHMEM")]
    known = [f"{name} {line[f'{key}_version']}" for key, name in versions if line[f"{key}_version"]]
    machine = f"{line['ranks']} x {line['gpu'] or 'simulated rank'}"
    least, most = (of(line["iterations"] for line in lines) for of in (min, max))
    how = f"slowest rank, median of {least}{' or more' if most > least else ''}, in turns, L2 flushed"
    return f"{machine}, {line['date'][:10]}, {line['dtype']}, {line['transport']}; {', '.join(known)}; {how}"
