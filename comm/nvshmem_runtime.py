"""Symmetric memory on GPUs: NVSHMEM through nvshmem4py, one process per GPU.

NVSHMEM is initialised once per process, over the default process group's ranks, with a unique id sent through that
group; it stays up until the process ends. At that moment one pool is allocated from its symmetric heap, the same on
every rank. The heaps of all groups take their memory from the pool when they need it, without involving the ranks
outside of their group, each allocation at one offset on all ranks of the group (`SymmetricHeap`).
"""

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import nvshmem.bindings.nvshmem as bindings
import nvshmem.core as nvshmem
import torch
import triton
from cuda.core import Device

from tkernels.comm import capture, runtime
from tkernels.comm.allocator import Space
from tkernels.comm.errors import TkernelsError
from tkernels.comm.group import Group
from tkernels.comm.runtime import Segment

POOL_BYTES = runtime.pool_bytes()

_pool = None
_uninitialised = []  # loaded modules with NVSHMEM device state that is not initialised yet


class _Pool:
    """This process's part of NVSHMEM's memory, and the address at which each processing element's part is mapped."""

    def __init__(self):
        world = Group(None)
        self.gpu = torch.cuda.current_device()  # NVSHMEM binds to it for the life of the process
        handle = Device(self.gpu)
        handle.set_current()
        unique_id = nvshmem.get_unique_id(empty=world.rank != 0)
        gpu = str(torch.cuda.get_device_properties(self.gpu).uuid)
        unique_ids, sizes, gpus = zip(*world.gather((unique_id, POOL_BYTES, gpu)), strict=True)
        if len(set(sizes)) > 1:
            raise ValueError(
                f"init: TKERNELS_POOL_BYTES must be the same on all ranks; by rank it is {', '.join(map(str, sizes))}"
            )
        check_sharing(gpus)
        nvshmem.init(device=handle, uid=unique_ids[0], rank=world.rank, nranks=world.size, initializer_method="uid")
        self.world_size = world.size
        what = f"init: NVSHMEM could not allocate its pool of {POOL_BYTES} bytes"
        with world.together(what, "Start again with a smaller TKERNELS_POOL_BYTES"):
            self.memory = nvshmem.tensor((POOL_BYTES,), dtype=torch.uint8)
        self.peers = [self._mapped(pe, world) for pe in range(world.size)]
        self.space = Space(POOL_BYTES)
        triton.knobs.runtime.kernel_load_end_hook.add(_initialise_module)

    def _mapped(self, pe: int, world: Group) -> int:
        if pe == world.rank:
            return self.memory.data_ptr()
        return bindings.ptr(self.memory.data_ptr(), pe) or 0


def check_sharing(gpus: Sequence[str]):
    """Raise ValueError if ranks share GPUs unequally, which NVSHMEM would wait in for good; a GPU's name by rank."""
    if len(set(Counter(gpus).values())) > 1:
        indices = [list(dict.fromkeys(gpus)).index(gpu) for gpu in gpus]
        raise ValueError(
            f"init: NVSHMEM needs as many ranks on one GPU as on another; ranks 0 to {len(gpus) - 1} are on GPUs "
            f"{', '.join(map(str, indices))} (numbered as they come). Start a rank on each, or as many on each"
        )


def check_gpu(bound: int):
    """Raise ValueError in a thread on another GPU than `bound`, that of the process's symmetric memory."""
    if (current := torch.cuda.current_device()) != bound:
        raise ValueError(
            f"init: this thread is on GPU {current}, and the process's symmetric memory on GPU {bound}; call "
            f"torch.cuda.set_device({bound}) in the thread, as torch has new ones begin on GPU 0"
        )


def open_segment(group: Group, num_bytes: int) -> Segment:
    """Collective over the group; a process's first call is collective over the default process group (all ranks)."""
    global _pool
    if _pool is None:
        _pool = _Pool()
    pool = _pool
    with group.checking():
        check_gpu(pool.gpu)
    if group.global_ranks[-1] >= pool.world_size:
        raise TkernelsError(
            f"NVSHMEM was initialised with {pool.world_size} ranks and can't be initialised again in this process; "
            f"the group has global rank {group.global_ranks[-1]}"
        )
    ranks = group.global_ranks
    bases = [pool.peers[pe] for pe in ranks]
    return Segment(pool.memory, bases, ranks, space=pool.space, fresh=False)


@functools.cache
def device_library() -> str:
    """Path of NVSHMEM's device bitcode, which the transport `nvshmem` links into kernels.

    Raises TkernelsError if there is none, if its version is not that of the host library, whose state it reads, or if
    this Triton can't read it.
    """
    spec = importlib.util.find_spec("nvidia.nvshmem")
    for folder in map(Path, spec.submodule_search_locations if spec else []):
        if path := bitcode_of(folder / "lib", runtime.capability()):
            check_versions(nvshmem.get_version().libnvshmem_version, version_of_headers(folder))
            return str(path)
    raise TkernelsError(
        "transport='nvshmem' needs the device bitcode of NVSHMEM, version 3.4 or newer, which was not found: install "
        f"nvidia-nvshmem-cu{runtime.cuda()} (transport='peer' does not need it)"
    )


def bitcode_of(folder: Path, capability: tuple[int, int]) -> Path | None:
    """The device bitcode for a GPU: of NVSHMEM 3.7 and newer, that of the newest architecture that is no newer.

    Up to 3.6 there is one file for all.
    """
    names = {path: re.fullmatch(r"libnvshmem_device(?:_sm_(\d+))?\.bc", path.name) for path in folder.glob("*.bc")}
    found = {int(name[1] or 0): path for path, name in names.items() if name}
    return found.get(max((sm for sm in found if sm <= 10 * capability[0] + capability[1]), default=None))


def version_of_headers(folder: Path) -> str:
    """The version of the device code in a folder of NVSHMEM."""
    text = (folder / "include" / "non_abi" / "nvshmem_version.h").read_text()
    return ".".join(re.search(rf"NVSHMEM_VENDOR_{part}_VERSION (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def check_versions(host: str, device: str):
    """Raise TkernelsError unless the host library and the device code are of one version, which Triton can read."""
    names = [f"nvidia-nvshmem-cu{cuda}" for cuda in (12, 13)]
    installed = {name: version for name in names if (version := runtime.version_of(name))}
    if len(installed) > 1:
        both = " and ".join(f"{name} {version}" for name, version in installed.items())
        raise TkernelsError(f"{both} are installed into one folder; uninstall both, then install one")
    if host != device:
        package, right = next(iter(installed.items()), ("the package", None))
        found = {"host library": host, "device bitcode": device}
        wrong = [name for name, version in found.items() if version != right]
        raise TkernelsError(
            f"NVSHMEM's host library is {host} and its device bitcode {device}, but they must be of one version; "
            f"{package} is {right or 'not installed'}, so what is wrong is the {' and the '.join(wrong)}. Is another "
            f"NVSHMEM in LD_LIBRARY_PATH or in conda?"
        )
    if runtime.numbers(device) >= [3, 8] and runtime.numbers(triton.__version__) < [3, 7]:
        raise TkernelsError(
            f"NVSHMEM {device}'s device bitcode is of a newer LLVM than that of triton {triton.__version__}, which "
            f"can't read it; install nvidia-nvshmem-cu{runtime.cuda()}<3.8, or a newer triton"
        )


def _initialise_module(module, function, name, metadata_group, hash):
    # Runs after every load of a compiled kernel, including loads from the disk cache. Only a module that holds
    # NVSHMEM's device state may be initialised: the call fails on any other.
    ptx = next((path for file, path in metadata_group.items() if file.endswith(".ptx")), None)
    if ptx is not None and "nvshmemi_device_state_d" in Path(ptx).read_text():
        _uninitialised.append(int(module.value if hasattr(module, "value") else module))
        initialise_modules()


def initialise_modules():
    """Initialise the modules loaded since the last call; for use before each launch of a kernel that calls NVSHMEM.

    Raises TkernelsError under a capture if there are any, since NVSHMEM's initialisation of a module would end the
    capture.
    """
    if _uninitialised and capture.underway():
        raise TkernelsError(
            "over the transport nvshmem, this call's kernel was not loaded before, and can't be while a CUDA graph is "
            "captured; make one like call before the capture"
        )
    while _uninitialised:
        bindings.cumodule_init(_uninitialised[-1])
        _uninitialised.pop()
