"""Symmetric memory on a machine without a GPU: one anonymous memory file per rank, mapped by all ranks of the group.

The files have no name (memfd_create), so two jobs can't collide, and the operating system frees them with the last
process that maps them, however it ends. Pages use memory only once they are touched.
"""

import contextlib
import mmap
import os

import torch

from tkernels.comm.errors import TkernelsError
from tkernels.comm.group import Group
from tkernels.comm.runtime import Segment
from tkernels.comm.simulated_network import connect, disconnect, nodes_of


def open_segment(group: Group, num_bytes: int) -> Segment:
    """Collective. Create `num_bytes` of shared memory per rank, initially zero."""
    what = f"init: the simulated runtime could not map {num_bytes} bytes"
    way_out = (
        "If there is not so much memory, pass a smaller heap_bytes to init(); all ranks must run on one machine, as "
        "one user, in one process namespace"
    )
    parts = []
    with contextlib.ExitStack() as files:
        with group.together(what, way_out):
            descriptor = os.memfd_create("tkernels", os.MFD_CLOEXEC)
            files.callback(os.close, descriptor)
            os.ftruncate(descriptor, num_bytes)
        places = group.gather(_place())
        if strangers := [rank for rank, place in enumerate(places) if place != places[0]]:
            raise TkernelsError(
                f"{what}: rank 0 and ranks {', '.join(map(str, strangers))} are on other machines, or in containers of "
                f"one that don't see each other's processes, whatever their host names are. {way_out}"
            )
        shared = group.gather((os.getpid(), descriptor))
        # One mapping and one torch storage per segment: the stock interpreter keys storages by address, and would copy
        # a second storage at the same address back onto the first after a launch, over what peers wrote meanwhile.
        with group.together(what, way_out):  # its end is also when all peers have opened the file, which then closes
            parts += [_map(pid, fd, num_bytes) for pid, fd in shared]
    addresses = [part.data_ptr() for part in parts]
    with group.checking():
        nodes = nodes_of(group.global_ranks)
    own = addresses[group.rank]
    bases = [base if node == nodes[group.rank] else 0 for base, node in zip(addresses, nodes, strict=True)]
    connect(own, num_bytes, addresses)

    def close():  # the mappings live as long as this list or a tensor in it
        disconnect(own)
        parts.clear()

    return Segment(parts[group.rank], bases, list(range(group.size)), on_close=close)


def _place() -> tuple[str, int]:
    """The start of the machine that this process runs on, and its process namespace; equal for ranks that share both.

    Host names may be equal in containers on different machines, and process ids too.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.stat("/proc/self/ns/pid").st_ino


def _map(pid: int, descriptor: int, num_bytes: int) -> torch.Tensor:
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b", buffering=0) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
