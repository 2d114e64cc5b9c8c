"""Wire: in-place sums and gathers on the current stream, by this library's collectives or torch.distributed's."""

import functools
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tkernels
from tkernels.comm import collectives, runtime, stream_order
from tkernels.comm.arguments import check_type
from tkernels.comm.context import Context, MeshLike, as_context, group_of
from tkernels.comm.contexts import programs_at_once, shared_over
from tkernels.comm.group import Group, all_gather_single, reduce_scatter_single
from tkernels.layers.marks import check_replicas


def open_wire(caller: str, backend: "str | Wire", mesh: MeshLike = None) -> "Wire":
    """The Wire of a backend. If `backend` is a Wire, it is returned as it is.

    Any other is one of "tkernels", for ranks to meet that refuse it together, by `check_backend`.
    mesh: the ranks, as in `tkernels.comm.as_context`; for backend "torch" None is torch's default group, and no context
        is made.

    Raises ValueError or TypeError, with messages that begin with `caller`.
    """
    if isinstance(backend, Wire):
        return backend
    if isinstance(backend, str) and backend == "torch":
        return TorchWire(group_of(mesh, f"{caller}: mesh"))
    return TkernelsWire(as_context(mesh, f"{caller}: mesh"))


def check_backend(caller: str, backend):
    """Raises TypeError or ValueError for what `open_wire` doesn't know."""
    if not isinstance(backend, Wire):
        check_type(f"{caller}: backend", backend, str, "'tkernels' or 'torch'")
        if backend not in ("tkernels", "torch"):
            raise ValueError(f"{caller}: backend={backend!r} is unknown; use 'tkernels' or 'torch'")


def stream_beside(ctx: Context | None, dev):
    """The stream on which all models' gradients are summed and parameters gathered over these ranks; None: a new one.

    One, since a context keeps a workspace for each stream of its operations, and models come and go in a process. It
    comes first where products wait for SMs too, so that a kernel waits for one product, not for those behind it.
    """
    streams = {} if ctx is None else _streams.setdefault(ctx, {})
    if dev not in streams:
        streams[dev] = dev.Stream(priority=-1)
    return streams[dev]


_streams = weakref.WeakKeyDictionary()  # context -> module of streams -> stream


def mean(buffer: torch.Tensor, factor: float, sum_up: Callable, out: torch.Tensor | None = None) -> torch.Tensor:
    """Collective. What `sum_up` makes of `buffer`, times a factor, in `out` or in place. The buffer is used up.

    fp16 is multiplied before the sum, which it might not hold; other dtypes after it, once.
    """
    if before := buffer.dtype == torch.float16 and factor != 1:
        buffer.mul_(factor)
    total = sum_up(buffer)
    return collectives.times(total, 1.0 if before else factor, total if out is None else out)


class Wire:
    """In-place collectives of the ranks of `group` on tensors x [n]. With one rank they do nothing.

    rows: number of elements of x in each rank's part, in rank order; None: n/R.
    """

    def __init__(self, group: Group):
        self.group, self.rank, self.size = group, group.rank, group.size
        self.ctx = None

    def check(self, what: str, parameter: torch.Tensor, dtype: torch.dtype):
        """Raises TypeError or ValueError unless the parameter's gradient can be summed, in this dtype, where it is.

        what: the caller and the parameter, for the error.
        """
        if isinstance(parameter, DTensor):
            raise TypeError(f"{what} is a DTensor, whose parts it can't tell; use fully_shard for these")
        check_replicas(what, parameter, self.group.global_ranks)
        if parameter.is_meta:
            raise ValueError(f"{what} is on meta, without values; move the model before, by to_empty() and its init")
        if not (parameter.is_floating_point() and dtype.is_floating_point):
            raise TypeError(f"{what}: takes floating-point parameters and sums, not {parameter.dtype} and {dtype}")

    def part(self, x: torch.Tensor, rows: tuple[int, ...] | None = None) -> torch.Tensor:
        """This rank's part of x, a view."""
        rows = [x.numel() // self.size] * self.size if rows is None else rows
        return x.narrow(0, sum(rows[: self.rank]), rows[self.rank])

    def all_reduce(self, x: torch.Tensor, factor: float = 1.0):
        """Collective. Replace x by its sum over ranks, times a factor."""
        raise NotImplementedError

    def reduce_scatter(
        self,
        x: torch.Tensor,
        rows: tuple[int, ...] | None = None,
        factor: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Collective. This rank's part of the sum over ranks, times a factor, in `out` or in its place in x.

        The rest of x is undefined then.
        """
        raise NotImplementedError

    def all_gather(self, x: torch.Tensor, rows: tuple[int, ...] | None = None, where: str | None = None):
        """Collective. Send this rank's part of x to all ranks, and fill the other parts with theirs.

        where: a name for errors. Over this library's collectives, ranks with different ones are told of it.
        """
        raise NotImplementedError

    def split(self, instances: int) -> tuple["Wire", "Wire"]:
        """Collective. Two wires: over this rank's instance of R/instances neighbouring ranks, and over the ranks at the
        same position in all instances.

        Whoever asks has the same process groups and contexts, which last as long as torch's default group.
        """
        inside, across = map(self._over, _split(self.group, instances))
        return inside, across

    def _over(self, process_group: dist.ProcessGroup) -> "Wire":
        raise NotImplementedError


class TkernelsWire(Wire):
    """This library's collectives, in a context's symmetric memory."""

    def __init__(self, ctx: Context):
        super().__init__(ctx.group)
        self.ctx = ctx

    def check(self, what, parameter, dtype):
        super().check(what, parameter, dtype)
        if parameter.device != self.ctx.device:
            raise ValueError(f"{what} is on {parameter.device}, and the ranks sum on {self.ctx.device}; move the model")
        if dtype not in collectives.SUMMED:
            raise TypeError(
                f"{what}: backend='tkernels' sums float32, float16 and bfloat16, not {dtype}; sum in another dtype, or "
                f"use backend='torch'"
            )

    def all_reduce(self, x, factor=1.0):
        if self.size == 1:
            collectives.times(x, factor, x)
        else:
            tkernels.all_reduce(x, out=x, factor=factor, ctx=self.ctx)

    def reduce_scatter(self, x, rows=None, factor=1.0, out=None):
        if self.size == 1:
            return collectives.times(x, factor, x if out is None else out)
        own = self.part(x, rows) if out is None or out.dtype not in collectives.SUMMED else out
        tkernels.reduce_scatter(x, rows=rows, out=own, factor=factor, ctx=self.ctx)
        return own if out is None or out is own else out.copy_(own)

    def all_gather(self, x, rows=None, where=None):
        if self.size > 1 and where is None:
            tkernels.all_gather(self.part(x, rows), rows=rows, out=x, ctx=self.ctx)
        elif self.size > 1:
            collectives.all_gather(self.ctx, self.part(x, rows), rows, out=x, where=where)

    def _over(self, process_group):
        options = {name: getattr(self.ctx, name) for name in ("transport", "timeout_s", "num_programs")}
        make = functools.partial(tkernels.init, process_group, default=False, **options)
        return TkernelsWire(shared_over(process_group, make))


class TorchWire(Wire):
    """torch.distributed's collectives. Those on parts require equal ones, so unequal parts are sent one by one."""

    def all_reduce(self, x, factor=1.0):
        mean(x, factor, self._all_reduce)

    def _all_reduce(self, x):
        if self.size > 1:
            _follow(x)
            dist.all_reduce(x, group=self.group.process_group)
        return x

    def reduce_scatter(self, x, rows=None, factor=1.0, out=None):
        return mean(x, factor, functools.partial(self._reduce_scatter, rows=rows), out)

    def _reduce_scatter(self, x, rows):
        own = self.part(x, rows)
        if self.size > 1:
            _follow(x)
            if rows is None or len(set(rows)) == 1:
                reduce_scatter_single(own, x, group=self.group.process_group)
            else:
                self._for_each_part(dist.reduce, x, rows)
        return own

    def all_gather(self, x, rows=None, where=None):
        if self.size > 1:
            _follow(x)
            if rows is None or len(set(rows)) == 1:
                all_gather_single(x, self.part(x, rows), group=self.group.process_group)
            else:
                self._for_each_part(dist.broadcast, x, rows)

    def _for_each_part(self, collective, x, rows):
        for owner, part in zip(self.group.global_ranks, x.split(rows), strict=True):
            if part.numel():
                collective(part, owner, group=self.group.process_group)

    def _over(self, process_group):
        return TorchWire(Group(process_group))


def _follow(x: torch.Tensor):
    """Order NCCL's kernel and our operations, of which each could hold the SMs that another one needs on a peer."""
    if x.is_cuda and runtime.RUNTIME == "nvshmem":
        stream_order.follow(torch.cuda.current_stream(x.device).cuda_stream, programs_at_once() + 1)


def _split(group: Group, instances: int) -> list[dist.ProcessGroup]:
    ranks, size = sorted(group.global_ranks), group.size // instances
    place = ranks.index(group.global_ranks[group.rank])
    inside, across = ranks[place // size * size :][:size], ranks[place % size :: size]
    made = []
    for members in (inside, across):
        group.count_groups_alike()
        made.append(_process_group(dist.group.WORLD, tuple(members)))
    return made


@functools.cache
def _process_group(world: dist.ProcessGroup, members: tuple[int, ...]) -> dist.ProcessGroup:
    """Collective over `members`. Their process group, cached, since torch can't make such a group twice.

    Other processes need not take part, except where NCCL has a device bound to it: there it splits the default group's
    communicator, so all processes have to make a group at that time. A group of all has a number for its name; that of
    another one depends on how many groups a process has (`Group.count_groups_alike`).
    """
    return dist.new_group(list(members), use_local_synchronization=len(members) < world.size())
