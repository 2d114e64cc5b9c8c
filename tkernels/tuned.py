"""Tuning records on disk: what was measured to be best, found again where it was measured.

A record is a dictionary of plain values, a line of JSON. This module interprets where a record holds, not what it
contains:

    key       the problem; and where it holds: gpu, ranks, transport, and the versions of tkernels, torch and triton
    (others)  the result

A record replaces earlier ones with the same key. The user's are in one file, to which each is appended by a single
write, so that jobs may do so at the same time. Those of the package (data/tuned.jsonl) hold for any version of torch
and triton, where there are none from this machine.
"""

import errno
import json
import os
import warnings
from pathlib import Path

import torch
import triton

import tkernels
from tkernels.gpus import gpu_name

FORMAT = 1
SHIPPED = Path(__file__).parent / "data" / "tuned.jsonl"
# The same chip with other memory: shipped records of the second hold for the first unless it has its own.
LIKE = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}
LEVELS = 5  # a record, its configuration, the tiles of that, their values, and one to spare
LOCAL = "local"  # the transport of operations of one rank alone


def path() -> Path:
    """The file of the user's records: tuned.jsonl in $TKERNELS_CACHE, else in $XDG_CACHE_HOME or ~/.cache, tkernels.

    Raises OSError if none of them is set and this user has no home.
    """
    if own := os.environ.get("TKERNELS_CACHE"):
        return Path(own, "tuned.jsonl")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise OSError("there is no home to remember in: neither HOME nor XDG_CACHE_HOME nor TKERNELS_CACHE is set")
    return Path(cache, "tkernels", "tuned.jsonl")


def place(ranks: int, transport: str) -> dict:
    """The part of a key that says where a record holds: this GPU, the ranks and transport, these versions."""
    return {
        "gpu": gpu_name(),
        "ranks": ranks,
        "transport": transport,
        "tkernels": tkernels.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def save(record: dict) -> Path:
    """Add a record to the user's; it replaces an earlier one with the same key. Raises OSError if that fails."""
    line, file = json.dumps({"format": FORMAT, **record}) + "\n", path()
    file.parent.mkdir(parents=True, exist_ok=True)
    if _is_no_file(file):
        raise FileExistsError(errno.EEXIST, "it is no file", str(file))
    with open(file, "ab", buffering=0) as lines:
        lines.write(line.encode())
    return file


def _is_no_file(file: Path) -> bool:
    """Whether something else is there: to open a pipe would wait for its other end."""
    return file.exists() and not file.is_file()


def saved() -> tuple[list[dict], dict[str, str]]:
    """The user's records, and a dict of lines that hold none, or the unreadable file, with the reason."""
    records, damaged = {}, {}
    try:
        file = path()
        if _is_no_file(file):
            return [], {str(file): "it is no file"}
        lines = file.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return [], {}
    except OSError as error:
        # Without a file's name there is no home, so nothing can have been remembered.
        return [], {} if error.filename is None else {error.filename: error.strerror}
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = _parse(line)
            records[json.dumps(record["key"], sort_keys=True)] = record
        except ValueError as error:
            damaged[f"{file}:{number}"] = str(error)
    return list(records.values()), damaged


def shipped() -> list[dict]:
    """The records that come with the package."""
    return [_parse(line) for line in SHIPPED.read_text().splitlines()]


def _parse(text: str) -> dict:
    """The record in a line. Raises ValueError, with the reason, if there is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("key"), dict) or not _shallow(record, LEVELS):
        raise ValueError("it is JSON, but no record")
    if record.get("format") != FORMAT:
        raise ValueError(f"its format is {record.get('format')!r}, and this version reads {FORMAT}")
    if missing := {"operation", *place(1, LOCAL)} - set(record["key"]):
        raise ValueError(f"its key lacks {', '.join(sorted(missing))}")
    return record


def _shallow(value, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_shallow(each, levels - 1) for each in inner)


def known(ranks: int, transport: str, report: bool = True) -> list[dict]:
    """The records for `ranks` ranks over `transport` on this machine, or for one rank alone; the best ones last.

    Skips lines without a valid record, and warns about them unless another rank is to `report` them.
    """
    here, alone = place(ranks, transport), place(1, LOCAL)
    records, damaged = saved()
    for where, reason in damaged.items() if report else ():
        text = f"{where} is ignored: {reason}. Delete it; TKERNELS_CACHE names another folder"
        warnings.warn(printable(text), stacklevel=2)
    general = [{name: spot[name] for name in ("gpu", "ranks", "transport")} for spot in (here, alone)]
    alike = [spot | {"gpu": LIKE.get(spot["gpu"])} for spot in general]
    packaged = shipped()
    return [
        record
        for places, group in ((alike, packaged), (general, packaged), ([here, alone], records))
        for record in group
        if any(fields.items() <= record["key"].items() for fields in places)
    ]


def clear() -> int:
    """Delete the file of the user's records. Returns their number. Raises OSError for anything else in its place."""
    (records, damaged), file = saved(), path()
    if not records and (damaged or file.exists() and file.stat().st_size):
        found = next(iter(damaged.values()), "its only line has no end")
        raise OSError(f"{file} is not removed, since it holds no records: {found}; delete it yourself")
    file.unlink(missing_ok=True)
    return len(records)


def printable(text) -> str:
    """As text for a terminal: with escapes in place of the characters that would control it."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(text))
