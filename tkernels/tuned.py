"""Tuning records on disk: what was measured to be best, one file per record, found again where it was measured.

A record is a dictionary of plain values. This module interprets where a record holds, not what it contains:

    key       the problem; and where it holds: gpu, ranks, transport, and the versions of tkernels, torch and triton
    (others)  the result

A record replaces an earlier one with the same key; each file is replaced as a whole, so that jobs may write at the same
time. Some records ship with the package (data/tuned.jsonl) and hold for any version of torch and triton; records from
this machine take precedence.
"""

import hashlib
import json
import os
import re
import uuid
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
OUR_NAME = re.compile(r"\w+-[0-9a-f]{20}\.json|[0-9a-f]{32}\.draft")  # of a record, and of one that is being written
LEVELS = 5  # a record, its configuration, the tiles of that, their values, and one to spare
LOCAL = "local"  # the transport of operations of one rank alone


def folder() -> Path:
    """The folder of the user's records: $TKERNELS_CACHE, else tkernels in $XDG_CACHE_HOME, else in ~/.cache.

    Raises OSError if none of them is set and this user has no home.
    """
    if own := os.environ.get("TKERNELS_CACHE"):
        return Path(own, "tuned")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        raise OSError("there is no home to remember in: neither HOME nor XDG_CACHE_HOME nor TKERNELS_CACHE is set")
    return Path(cache, "tkernels", "tuned")


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
    """Write a record to disk, replacing an earlier one with the same key. Raises OSError if that fails."""
    record = {"format": FORMAT, **record}
    text = json.dumps(record, indent=1)
    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / _file_name(record["key"])
    draft = folder() / f"{uuid.uuid4().hex}.draft"  # not by tempfile, whose files other users can't read
    try:
        with open(draft, "x") as file:
            file.write(text + "\n")
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return path


def _file_name(key: dict) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{key['operation']}-{digest[:20]}.json"


def saved() -> tuple[list[dict], dict[Path, str]]:
    """The user's records, and a dict of files without a valid record, or the unreadable folder, with the reason."""
    records, damaged = [], {}
    try:
        place = folder()
    except OSError:  # then nothing can have been remembered
        return [], {}
    try:
        paths = sorted(place.glob("*.json"))
    except OSError as error:
        return [], {place: str(error)}
    for path in paths:
        try:
            records.append(_read(path))
        except FileNotFoundError:  # deleted meanwhile
            continue
        except (OSError, ValueError) as error:
            damaged[path] = str(error)
    return records, damaged


def _read(path: Path) -> dict:
    """The record in a file. Raises OSError or ValueError, with the reason, if there is none."""
    if path.exists() and not path.is_file():  # to open a pipe would wait for its writer
        raise ValueError("it is no file")
    return _parse(path.read_text())


def shipped() -> list[dict]:
    """The records that come with the package."""
    return [_parse(line) for line in SHIPPED.read_text().splitlines()]


def _parse(text: str) -> dict:
    """Parse a record from a file's text. Raises ValueError, with the reason, if it is not one."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error})") from None
    except RecursionError:
        raise ValueError("it is JSON, but no record: it is nested too deeply") from None
    if not isinstance(record, dict) or not isinstance(record.get("key"), dict) or not _shallow(record, LEVELS):
        raise ValueError("it is JSON, but no record")
    if record.get("format") != FORMAT:
        raise ValueError(f"its format is {record.get('format')!r}, and this version reads {FORMAT}")
    missing = {"operation", *place(1, LOCAL)} - set(record["key"])
    if missing:
        raise ValueError(f"its key lacks {', '.join(sorted(missing))}")
    return record


def _shallow(value, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_shallow(each, levels - 1) for each in inner)


def known(ranks: int, transport: str, report: bool = True) -> list[dict]:
    """The records for `ranks` ranks over `transport` on this machine, or for one rank alone; the best ones last.

    Skips files without a valid record, and warns about them unless another rank is to `report` them.
    """
    here, alone = place(ranks, transport), place(1, LOCAL)
    records, damaged = saved()
    for path, reason in damaged.items() if report else ():
        warnings.warn(
            f"{printable(path)} is ignored: {printable(reason)}. Delete it, or move it elsewhere; TKERNELS_CACHE names "
            f"another folder",
            stacklevel=2,
        )
    general = [{name: spot[name] for name in ("gpu", "ranks", "transport")} for spot in (here, alone)]
    alike = [spot | {"gpu": LIKE.get(spot["gpu"])} for spot in general]
    packaged = shipped()
    return [
        *(record for record in packaged if _holds(record, alike)),
        *(record for record in packaged if _holds(record, general)),
        *(record for record in records if _holds(record, [here, alone])),
    ]


def _holds(record: dict, places: list[dict]) -> bool:
    return any(fields.items() <= record["key"].items() for fields in places)


def clear() -> int:
    """Delete all of the user's records, wherever they hold, and what is left of them. Returns the number of files."""
    files = [path for path in folder().glob("*") if path.is_file() and _is_ours(path)]
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _is_ours(path: Path) -> bool:
    """Whether `save` named this file, or it holds a record under another name."""
    if OUR_NAME.fullmatch(path.name):
        return True
    try:
        return path.suffix == ".json" and bool(_read(path))
    except (OSError, ValueError):
        return False


def printable(text) -> str:
    """As text for a terminal: with escapes in place of the characters that would control it."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(text))
