"""Symmetric memory on a machine without a GPU: one anonymous memory file a rank, mapped by every rank of the group.

The files have no name (memfd_create), so two jobs never meet, and the kernel takes them back with the last process
that maps them, however it ends. Pages cost memory only once they are touched.
"""

import mmap
import os

import torch

from tkernels.comm.group import Group
from tkernels.comm.runtime import Segment


def open_segment(group: Group, num_bytes: int) -> Segment:
    """Collective. `num_bytes` of shared memory a rank, zero at first."""
    descriptor = os.memfd_create("tkernels", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
        # One mapping and one torch storage a segment: the interpreter keys storages by address, and a second storage
        # at the same address would be copied back onto the first after a launch, over what peers wrote meanwhile.
        owners = group.gather((os.getpid(), descriptor))
        parts = [_map(pid, fd, num_bytes) for pid, fd in owners]
        group.barrier()  # nobody closes a file that a peer has yet to open
    finally:
        os.close(descriptor)
    addresses = [part.data_ptr() for part in parts]
    segment = Segment(parts[group.rank], addresses, [0] * group.size, list(range(group.size)))
    segment.on_close = parts.clear  # the mappings live as long as this list or a tensor in them
    return segment


def _map(pid: int, descriptor: int, num_bytes: int) -> torch.Tensor:
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        with open(path, "r+b", buffering=0) as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    except OSError as error:
        raise RuntimeError(
            f"the simulated runtime could not map the memory of process {pid} ({error}); all ranks must run on one "
            f"machine, as one user, in one process namespace"
        ) from error
