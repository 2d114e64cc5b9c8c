"""What was measured to be best, remembered on disk: a file a record, found again where it was measured.

A record is a dictionary of plain values. This module knows where it holds, and not what it says:

    key       what it is about; where it holds: gpu, ranks, transport, and the versions of tkernels, torch and triton
    (others)  what was found

Records of the same key replace each other; a file is replaced whole, so that jobs may write at the same time. Some
records come with the package (data/tuned.jsonl) and hold for any version of torch and triton; what was found on this
machine counts more. A context has rank 0's records on every rank, for what ranks choose must agree.
"""

import hashlib
import json
import os
import sys
import uuid
import warnings
from pathlib import Path

import torch
import triton

from tkernels.comm import runtime

FORMAT = 1
SHIPPED = Path(__file__).parent / "data" / "tuned.jsonl"
# The same chip with other memory: what was measured on the second holds for the first while nothing else is known.
LIKE = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}
LOCAL = "local"  # the transport of what one rank does alone


def folder() -> Path:
    """Where the user's records are: $TKERNELS_CACHE, else tkernels in $XDG_CACHE_HOME, else in ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TKERNELS_CACHE") or Path(cache, "tkernels"), "tuned")


def place(ranks: int, transport: str) -> dict:
    """The part of a key that says where: this GPU, that many ranks over that transport, these versions."""
    simulated = runtime.RUNTIME == "simulated"
    return {
        "gpu": "simulated" if simulated else torch.cuda.get_device_name(),
        "ranks": ranks,
        "transport": transport,
        "tkernels": sys.modules["tkernels"].__version__,  # not imported: this package knows nothing of that one
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def save(record: dict) -> Path:
    """Remember a record, in place of an earlier one of its key. Raises OSError where that can't be."""
    record = {"format": FORMAT, **record}
    text = json.dumps(record, indent=1)
    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / _file_name(record["key"])
    draft = folder() / f"{uuid.uuid4().hex}.draft"  # not of tempfile, whose files nobody else may read
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
    """The user's records, and the files that hold none, or the folder if it can't be read, with the reason."""
    records, damaged = [], {}
    try:
        paths = sorted(folder().glob("*.json"))
    except OSError as error:
        return [], {folder(): str(error)}
    for path in paths:
        try:
            records.append(_parse(path.read_text()))
        except FileNotFoundError:  # cleared meanwhile
            continue
        except (OSError, ValueError) as error:
            damaged[path] = str(error)
    return records, damaged


def shipped() -> list[dict]:
    """The records that come with the package."""
    return [_parse(line) for line in SHIPPED.read_text().splitlines()]


def _parse(text: str) -> dict:
    """The record in a file's text. Raises ValueError, saying what else it is."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("key"), dict):
        raise ValueError("it is JSON, but no record")
    if record.get("format") != FORMAT:
        raise ValueError(f"its format is {record.get('format')!r}, and this version reads {FORMAT}")
    missing = {"operation", *place(1, LOCAL)} - set(record["key"])
    if missing:
        raise ValueError(f"its key lacks {', '.join(sorted(missing))}")
    return record


def known(ranks: int, transport: str) -> list[dict]:
    """The records that hold for `ranks` ranks over `transport` on this machine, or for one alone; the best ones last.

    Warns of files that hold no record, and goes on without them.
    """
    here, alone = place(ranks, transport), place(1, LOCAL)
    records, damaged = saved()
    for path, reason in damaged.items():
        warnings.warn(
            f"{path} is ignored: {reason}. `tkernels tune --clear` removes what was remembered, and TKERNELS_CACHE "
            f"names another folder for it",
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
    return any(place.items() <= record["key"].items() for place in places)


def clear() -> int:
    """Forget all of the user's records, whatever they hold for. Returns how many files that were."""
    files = [path for pattern in ("*.json", "*.draft") for path in folder().glob(pattern)]
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
