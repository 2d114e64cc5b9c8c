"""Chooses one of the two runtimes, when this module is first imported, before any kernel is decorated.

`simulated`: Triton's interpreter, CPU tensors, one process per rank, a shared-memory segment each.
`nvshmem`: compiled kernels, CUDA tensors, one process per GPU, NVSHMEM's symmetric memory.

TKERNELS_RUNTIME=auto|simulated|nvshmem overrides the choice; `auto` takes nvshmem if torch sees a GPU and nvshmem4py is
installed (0.4.1 or newer), and the simulated runtime otherwise. With TKERNELS_SHARE_GPUS=1 several ranks may share a
GPU: the driver time-slices the processes, so a waiting rank makes room for the one that it waits for. On one H200
NVSHMEM always started 2 ranks, but not always 3.
"""

import importlib.metadata
import importlib.util
import math
import os
import re
from dataclasses import dataclass, field

import torch

from tkernels.comm import interpreter
from tkernels.comm.allocator import Space
from tkernels.comm.arguments import switch, whole
from tkernels.comm.errors import TkernelsError
from tkernels.comm.group import Group

NVSHMEM4PY = "0.4.1"  # the oldest version that works
# Compute capabilities: the oldest for which there are kernels, the first with FP8, the first with TMA.
AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)


@dataclass
class Segment:
    """Symmetric memory of one group, as this process sees it.

    local: this rank's part, uint8.
    bases: address of each rank's part as mapped here; 0 if loads and stores don't reach it (another node).
    pes: each rank's NVSHMEM processing element.
    space: which bytes of the local part are taken; by default it is this segment's alone.
    fresh: whether the local part was all zero at first.
    """

    local: torch.Tensor
    bases: list[int]
    pes: list[int]
    on_close: object = field(default=lambda: None, repr=False)
    space: Space = None
    fresh: bool = True

    def __post_init__(self):
        self.space = self.space or Space(self.local.nbytes)

    def close(self):
        self.on_close()
        self.local = None


def candidates() -> dict[str, str | None]:
    """Each runtime, with the reason why it can't be used here, or None if it can."""
    reason = None
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    elif importlib.util.find_spec("nvshmem") is None:
        reason = f"nvshmem4py is not installed (pip install nvshmem4py-cu{cuda()})"
    elif (found := version_of(f"nvshmem4py-cu{cuda()}")) and numbers(found) < numbers(NVSHMEM4PY):
        reason = (
            f"nvshmem4py {found} is installed, but {NVSHMEM4PY} or newer is needed "
            f"(pip install --upgrade nvshmem4py-cu{cuda()})"
        )
    elif found is None and (other := version_of(f"nvshmem4py-cu{25 - cuda()}")):
        reason = (
            f"nvshmem4py-cu{25 - cuda()} {other} is installed, but torch is built for CUDA {torch.version.cuda} "
            f"(pip install nvshmem4py-cu{cuda()})"
        )
    return {"nvshmem": reason, "simulated": None}


def version_of(*distributions: str) -> str | None:
    """The version of the first of `distributions` that is installed, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cuda() -> int:
    """The major version of CUDA that torch is built for, 12 or 13; 13 without CUDA."""
    return 12 if (torch.version.cuda or "").startswith("12.") else 13


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _choose(asked: str) -> str:
    if asked not in ("auto", "simulated", "nvshmem"):
        raise ValueError(f"TKERNELS_RUNTIME={asked!r} is not a runtime; use auto, simulated or nvshmem")
    if asked == "auto":
        return "nvshmem" if candidates()["nvshmem"] is None else "simulated"
    return asked


ASKED = os.environ.get("TKERNELS_RUNTIME") or "auto"
RUNTIME = _choose(ASKED)
if RUNTIME == "simulated":
    interpreter.install()


def device() -> torch.device:
    """Where this runtime's tensors live."""
    return torch.device("cpu") if RUNTIME == "simulated" else torch.device("cuda", torch.cuda.current_device())


def shares_gpus() -> bool:
    """Whether a machine may run more ranks than it has GPUs."""
    return switch("TKERNELS_SHARE_GPUS")


def pool_bytes() -> int:
    """The GPU memory that the first `init` of a process takes. Raises ValueError for a variable that is no size."""
    return whole("TKERNELS_POOL_BYTES", interpreter.integer_from_environment("TKERNELS_POOL_BYTES", 8 << 30), 1)


def most_ranks() -> float:
    """The most ranks that may run on this machine: one per GPU; no limit if simulated, or if GPUs are shared."""
    return math.inf if shares_gpus() or RUNTIME == "simulated" else torch.cuda.device_count()


def gpus_left_out() -> str | None:
    """Why `auto` took the simulated runtime though torch sees a GPU; None if it did not."""
    if RUNTIME == "simulated" and ASKED == "auto" and torch.cuda.is_available():
        return candidates()["nvshmem"]
    return None


def capability() -> tuple[int, int]:
    """The compute capability by whose rules kernels are compiled and chosen: the GPU's; Hopper's where there is none.

    TKERNELS_CAPABILITY=8.0 asks for the rules of an older one, to test them on a newer GPU.

    Raises TkernelsError for a GPU older than Ampere, ValueError for a variable that names none from there to this one.
    """
    here, whose = HOPPER, "Hopper's"
    if RUNTIME == "nvshmem" and torch.cuda.is_available():
        here, whose = torch.cuda.get_device_capability(), "this GPU's"
    if here < AMPERE:
        raise TkernelsError(
            f"{torch.cuda.get_device_name()} has compute capability {_dotted(here)}, and there are kernels for "
            f"{_dotted(AMPERE)} (Ampere) and newer; TKERNELS_RUNTIME=simulated runs them on the CPU"
        )
    asked = os.environ.get("TKERNELS_CAPABILITY") or _dotted(here)
    found = tuple(map(int, asked.split("."))) if re.fullmatch(r"\d+\.\d", asked) else ()
    if not AMPERE <= found <= here:
        raise ValueError(
            f"TKERNELS_CAPABILITY={asked!r} must be a compute capability from {_dotted(AMPERE)} to {whose}, "
            f"{_dotted(here)}"
        )
    return found


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def has_tma() -> bool:
    """Whether kernels load and store through TMA descriptors, where layouts allow it."""
    return capability() >= HOPPER


def has_fp8() -> bool:
    """Whether kernels multiply FP8, as the interpreter does."""
    return capability() >= ADA


def default_programs() -> int:
    """Default number of programs of a persistent kernel: the GPU's SMs, or 4 simulated."""
    if RUNTIME == "simulated":
        return 4
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def transports(segment: Segment) -> list[str]:
    """The transports that reach every rank of a segment, the preferred one first."""
    if RUNTIME == "simulated":
        return ["simulated"] if all(segment.bases) else ["nvshmem"]
    return ["peer", "nvshmem"] if all(segment.bases) else ["nvshmem"]


def open_segment(group: Group, num_bytes: int) -> Segment:
    """Collective. Symmetric memory for a group, of at least so many bytes, which others may share; see `Segment`."""
    if RUNTIME == "simulated":
        from tkernels.comm import simulated_runtime as chosen
    else:
        reason = candidates()["nvshmem"]
        if reason is not None:
            raise TkernelsError(f"TKERNELS_RUNTIME=nvshmem was asked for, but {reason}")
        from tkernels.comm import nvshmem_runtime as chosen
    return chosen.open_segment(group, num_bytes)
