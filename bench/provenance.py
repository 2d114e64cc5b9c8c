"""The origin of a measurement: machine, versions, source, date."""

import datetime
import hashlib
import os
import platform
import subprocess
from pathlib import Path

import torch

from tkernels.comm.context import Context
from tkernels.comm.runtime import version_of

ROOT = Path(__file__).resolve().parent.parent


def provenance(ctx: Context) -> dict:
    """The fields that every record gets.

    Outside a git checkout the commit is that of TKERNELS_COMMIT, or None. source_sha256: hash of the files as they ran.
    """
    on_gpu = ctx.device.type == "cuda"
    commit = _git("rev-parse", "HEAD") or os.environ.get("TKERNELS_COMMIT")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "gpu": torch.cuda.get_device_name(ctx.device) if on_gpu else None,
        "num_gpus": torch.cuda.device_count() if on_gpu else 0,
        "cpu": platform.processor() or platform.machine(),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "triton_version": version_of("triton"),
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "nvshmem_version": version_of("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
        "nvshmem4py_version": version_of("nvshmem4py-cu13", "nvshmem4py-cu12"),
        "commit": commit,
        "dirty": bool(changes) if changes is not None else None,
        "source_sha256": source_digest(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def source_digest() -> str:
    """Of the library and the benches as they are on disk."""
    digest = hashlib.sha256()
    for folder in ("comm", "tkernels", "layers", "bench"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
