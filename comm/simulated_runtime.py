"""Symmetric memory on a machine without a GPU: one anonymous memory file per rank, mapped by all ranks of the group.

The files have no name (memfd_create), so two jobs can't collide, and the operating system frees them with the last
process that maps them, however it ends. Pages use memory only once they are touched.
"""

import mmap
import os

import torch

from tkernels.comm.errors import TkernelsError
from tkernels.comm.group import Group
from tkernels.comm.runtime import Segment


def open_segment(group: Group, num_bytes: int) -> Segment:
    """Collective. Create `num_bytes` of shared memory per rank, initially zero."""
    descriptor = os.memfd_create("tkernels", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        # One mapping and one torch storage per segment: the stock interpreter keys storages by address, and would copy
        # a second storage at the same address back onto the first after a launch, over what peers wrote meanwhile.
        parts, failure = [], None
        try:
            for pid, fd in group.gather((os.getpid(), descriptor)):
                parts.append(_map(pid, fd, num_bytes))
        except OSError as error:
            failure = f"{num_bytes} bytes of process {pid}, on rank {group.rank}: {error}"
        failures = [each for each in group.gather(failure) if each]  # so no file closes before peers open it
    finally:
        os.close(descriptor)
    if failures:
        raise TkernelsError(
            f"the simulated runtime could not map {failures[0]}. If there is not so much memory, pass a smaller "
            f"heap_bytes to init(); all ranks must run on one machine, as one user, in one process namespace"
        )
    addresses = [part.data_ptr() for part in parts]
    segment = Segment(parts[group.rank], addresses, [0] * group.size, list(range(group.size)))
    segment.on_close = parts.clear  # the mappings live as long as this list or a tensor in it
    return segment


def _map(pid: int, descriptor: int, num_bytes: int) -> torch.Tensor:
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b", buffering=0) as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
