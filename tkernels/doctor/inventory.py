"""An inventory of this machine, taken without importing tkernels.comm, so that it works on broken installations."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# The possible names of each package, the one to install first.
PACKAGES = (
    ("torch",), ("triton",), ("numpy",), ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
)  # fmt: skip
LINK_KINDS = {
    "NV": "NVLink",
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, through several host bridges",
    "SYS": "through the link between CPUs",
}  # nvidia-smi's abbreviations; NV18 is 18 NVLinks


@dataclass(frozen=True)
class GPU:
    index: int
    name: str
    memory_gib: float
    multiprocessors: int
    architecture: str  # sm_90, for example


@dataclass(frozen=True)
class Link:
    """The link between two GPUs.

    peer_access: loads and stores work in both directions.
    kind: nvidia-smi's abbreviation, or "unknown".
    """

    gpus: tuple[int, int]
    peer_access: bool
    kind: str

    @property
    def description(self) -> str:
        letters = self.kind.rstrip("0123456789")
        number, known = self.kind.removeprefix(letters), LINK_KINDS.get(letters, "unknown link")
        return f"{number} x {known}" if number else known


@dataclass(frozen=True)
class Software:
    """What is installed; to find it nothing is imported."""

    python: str
    system: str
    cores: int
    packages: dict[str, str | None]  # version, None if not installed
    nvshmem_library: str | None  # path of the host library
    nvshmem_bitcode: str | None  # path of the device functions, which the transport nvshmem links into kernels


@dataclass(frozen=True)
class Inventory(Software):
    cuda: str  # torch's CUDA version, or why it sees no GPU
    gpus: tuple[GPU, ...]
    links: tuple[Link, ...]
    problem: str | None  # why torch or triton cannot be imported


def find_software() -> Software:
    """What is installed, at once: to import torch takes seconds."""
    return Software(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        packages=dict(map(_installed, PACKAGES)),
        nvshmem_library=_nvshmem_file("libnvshmem_host.so*"),
        nvshmem_bitcode=_nvshmem_file("libnvshmem_device.bc"),
    )


def take(software: Software) -> Inventory:
    """Take the inventory of the rest: of the GPUs, as torch sees them."""
    cuda, gpus, links, problem = "torch can't be imported", (), (), None
    try:
        import torch
        import triton  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: one of torch's libraries doesn't load
        problem = f"{type(error).__name__}: {error}"
    else:
        cuda, gpus, links = _gpus(torch)
    return Inventory(**vars(software), cuda=cuda, gpus=gpus, links=links, problem=problem)


def _installed(names: tuple[str, ...]) -> tuple[str, str | None]:
    """The first of these names that is installed, and its version; if none is, the first name and None."""
    for name in names:  # like comm.runtime.version_of, which must not be imported here
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return names[0], None


def _nvshmem_file(pattern: str) -> str | None:
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # there is no package nvidia
        return None
    folders = spec.submodule_search_locations if spec else []
    return next((str(path) for folder in folders for path in sorted(Path(folder, "lib").glob(pattern))), None)


def _gpus(torch) -> tuple[str, tuple[GPU, ...], tuple[Link, ...]]:
    if torch.version.cuda is None:
        return "this torch is built without CUDA", (), ()
    if not torch.cuda.is_available():
        return f"torch is built for CUDA {torch.version.cuda}, but sees no GPU or no driver", (), ()
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    gpus = tuple(
        GPU(index, p.name, p.total_memory / 2**30, p.multi_processor_count, f"sm_{p.major}{p.minor}")
        for index, p in enumerate(properties)
    )
    # nvidia-smi numbers all GPUs of the machine, so its table applies only where torch sees them all.
    all_seen = "CUDA_VISIBLE_DEVICES" not in os.environ
    kinds = link_kinds(_nvidia_smi_topology()) if count > 1 and all_seen else {}
    reach = torch.cuda.can_device_access_peer
    links = tuple(
        Link((a, b), reach(a, b) and reach(b, a), kinds.get((a, b), "unknown"))
        for a in range(count)
        for b in range(a + 1, count)
    )
    return f"CUDA {torch.version.cuda}", gpus, links


def _nvidia_smi_topology() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def link_kinds(topology: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> kind of link, from what `nvidia-smi topo -m` prints; empty where it can't be read.

    >>> link_kinds("\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV18\\t0-47\\nGPU1\\tNV18\\t X \\t0-47\\n")
    {(0, 1): 'NV18', (1, 0): 'NV18'}
    """
    plain = re.sub(r"\x1b\[\d*m", "", topology)
    lines = [[cell.strip() for cell in line.split("\t")] for line in plain.splitlines()]
    header = next((line for line in lines if "GPU0" in line[1:]), [])
    columns = {place: cell for place, cell in enumerate(header) if re.fullmatch(r"GPU\d+", cell)}
    kinds = {}
    for line in lines:
        if line[0] in columns.values():
            for place, column in columns.items():
                if column != line[0] and place < len(line):
                    kinds[int(line[0][3:]), int(column[3:])] = line[place]
    return kinds
