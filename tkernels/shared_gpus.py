"""A backend of torch.distributed for ranks that share GPUs, which NCCL refuses: collectives of CUDA tensors over gloo.

It copies tensors to the host, and results back. Gloo alone takes CUDA tensors in some collectives and reads them as
host memory in others, which ends the process (torch 2.11, the gathers of DTensors).
"""

import torch
import torch.distributed as dist

BACKEND = "gloo_staged"
HOST = "cpu"  # the type of devices whose tensors gloo takes as they are
COLLECTIVES = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "all_gather_single",
    "all_gather_single_coalesced", "all_to_all_single", "reduce_scatter_single", "reduce_scatter_single_coalesced",
)  # fmt: skip
SENDS = "send", "recv", "recv_anysource"  # of which a program may begin several before it waits for one


class StagedGroup(dist.ProcessGroup):
    """A process group whose collectives are gloo's, of tensors on any device."""

    def __init__(self, asked, _):
        super().__init__(asked.group_rank, asked.group_size)
        gloo = dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, asked.timeout)
        self._on_host = dist.ProcessGroup(asked.store, asked.group_rank, asked.group_size)
        for group in (self, self._on_host):  # a group's name is that of its backends
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._set_group_name(asked.group_id)

    def barrier(self, opts=None):
        return self._on_host.barrier(opts or dist.BarrierOptions())

    def getBackendName(self):  # noqa: N802, torch's name
        return BACKEND


def _through_the_host(name: str):
    """The method of that name. A collective's is done when it returns: what C++ keeps can't be a Work of Python.

    The tensors that it writes come first, and may be parts of those that it reads, which therefore aren't copied back.
    """

    def collective(self, first, *others, **options):
        written, read = [], []
        arguments = _on_host(first, written), *_on_host(others, read)
        work = getattr(self._on_host, name)(*arguments, **options)
        if not written and not read:
            return work
        arrival = _Arrival(work, written if name != "send" else [])
        if name in SENDS:
            return arrival
        arrival.wait()
        return work

    return collective


def _on_host(value, copies: list):
    """The value with copies on the host of its tensors, each of which is added to `copies` behind the original."""
    if isinstance(value, (list, tuple)):
        return [_on_host(each, copies) for each in value]
    if not isinstance(value, torch.Tensor) or value.device.type == HOST:
        return value
    copies.append((value, value.to("cpu", copy=True)))
    return copies[-1][1]


for _name in filter(dist.ProcessGroup.__dict__.__contains__, COLLECTIVES + SENDS):  # torch 2.13 has some anew
    setattr(StagedGroup, _name, _through_the_host(_name))


class _Arrival(dist.Work):
    """What a collective has left on the host comes to its tensors, once it is waited for."""

    def __init__(self, work, copies):
        super().__init__()
        self._work, self._copies = work, copies

    def wait(self, *timeout):
        self._work.wait(*timeout)
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        self._copies = []
        return True

    def is_completed(self):
        return self._work.is_completed() and self.wait()


def register():
    """Make the backend known to torch.distributed, for tensors of GPUs and of the host."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, StagedGroup, extended_api=True, devices=["cpu", "cuda"])
