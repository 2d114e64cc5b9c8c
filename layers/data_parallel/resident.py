"""The engine under `ZeroOptimizer`: parameters stay whole, what updates them is split over the ranks.

    backward   buckets of gradients are reduced in one order on all ranks, each rank's part to its masters
    step       the caller updates the masters; parameters are gathered, those that forward needs first before the others

No forward asks for the parameters: `publish` gathers them, and whoever reads them waits: values.py.
"""

import contextlib

import torch
from torch import nn

from tkernels.comm import LeaseError
from tkernels.layers.data_parallel.engine import STRATEGIES, Engine, Options, Unit
from tkernels.layers.data_parallel.flat_group import FlatGroup
from tkernels.layers.data_parallel.param_group import DataParallelRanks
from tkernels.layers.data_parallel.values import Values, refuse_assignment, wait_in_modules
from tkernels.layers.owners import disown


class ResidentEngine(Engine):
    """Runs buckets of parameters, each of which is a unit, reduced in this order.

    piece_of: by parameter. removed: whether it has let go of the parameters.
    """

    def __init__(self, buckets: list[FlatGroup], *, overlap: bool):
        """Collective. Move the parameters to where they stay, with rank 0's values, and take their gradients."""
        units = [
            Unit((), [bucket], DataParallelRanks(None, (), bucket.ctx), None, None, STRATEGIES["gradients"],
                 Options(0, overlap, reductions=1), bucket.ctx.device)
            for bucket in buckets
        ]  # fmt: skip
        super().__init__(units[0], {unit: f"bucket {number}" for number, unit in enumerate(units)})
        self.buckets, self.removed = buckets, False
        self.piece_of = {piece.whole: piece for bucket in buckets for piece in bucket.parameters}
        watched = zip(units, buckets, strict=True)
        self._watches = [hook for unit, bucket in watched for hook in bucket.watch(unit.collect)]
        self._waits = []  # hooks of modules
        for unit, bucket in zip(units, buckets, strict=True):
            # One after the other, since each gives up as much memory as it takes.
            bucket.values = Values(unit.name, bucket.layout, bucket.wire, self.comm_stream, self.dev)
            bucket.values.replace(rows=(bucket.numel, *(0 for _ in bucket.layout.rows[1:])))
        self.copy_masters()

    def _plan(self):
        """Every bucket has memory of its own, for good."""

    def remove(self):
        """Let go of the parameters; this stream may use them. May be repeated."""
        self.ready()
        self.unhook()
        for hook in self._waits:
            hook.remove()
        for bucket in self.buckets:
            disown(bucket.layout.parameters, bucket.values)
        self.removed = True

    def unhook(self):
        """Take no gradient any more. Modules still wait for what is being gathered."""
        for hook in self._watches:
            hook.remove()
        for piece in self.piece_of.values():
            if piece.marked and not piece.late:
                piece.forget_gradient()

    def check(self):
        """Raises LeaseError once the parameters are another's, or elsewhere."""
        if self.removed:
            raise LeaseError(
                "ZeroOptimizer: it was removed from its parameters, perhaps for a newer one, and takes their gradients "
                "no longer; use that, or make another one"
            )
        for unit in self.units:
            unit.settle()

    # Values

    def copy_masters(self):
        """Copy this rank's parts of the parameters to their masters."""
        self.end()
        self.ready()
        for bucket in self.buckets:
            bucket.flat.copy_(bucket.values.part)
        self._count_writes()

    def publish(self):
        """Collective. Gather the parameters from their masters, which have changed."""
        self.end()
        self.begin()
        with self._weights.read(self._on_comm()):
            for bucket in reversed(self.buckets):  # forward begins with the last one
                bucket.values.replace(bucket.flat)
        self._count_writes()

    def _count_writes(self):
        self._versions_seen = {parameter: parameter._version for parameter in self.piece_of}

    def ready(self):
        """Order this stream after all gathers."""
        for bucket in self.buckets:
            bucket.values.ready()

    def wait_in_modules(self, root: nn.Module):
        """Let each module inside `root` wait for its own parameters."""
        self._waits += refuse_assignment(root) + wait_in_modules(root, self.piece_of)

    @property
    def written(self) -> bool:
        """Whether torch has counted writes to the parameters since they were gathered."""
        return any(parameter._version != version for parameter, version in self._versions_seen.items())

    def changed(self) -> list[str]:
        """Names of parameters that are not what was gathered."""
        self.ready()
        names = []
        for parameter, piece in self.piece_of.items():
            now, kept = piece.cut(parameter.detach()), piece.sharded.to(parameter.dtype)
            if not torch.where(now.isnan(), kept.isnan(), now == kept).all():
                names.append(piece.name)
        if not names:
            self._count_writes()
        return names

    # Gradients

    @contextlib.contextmanager
    def step(self):
        """Collective. A context in which this stream uses the sums of gradients, and changes the masters.

        Reduces units that no backward has reduced since the last step, even if backward is told to reduce none. At the
        end all gradients are forgotten. Before, raises LeaseError for gradients that nothing would reduce, for dropped
        ones that already were, and for what a backward that failed has left.
        """
        if self._sums is not None:
            raise LeaseError("ZeroOptimizer: a backward has failed before this step; call zero_grad() after a failure")
        for unit in self.units:
            late = [piece for piece in unit.groups[0].parameters if piece.late]
            if late and not unit.begun:
                raise LeaseError(
                    f"ZeroOptimizer: {late[0].name} has a gradient that came after backward, when the others had been "
                    f"reduced, as torch's DistributedDataParallel sets it, which is to be left out; set one by hand "
                    f"before backward, which adds to it, or run backward inside of no_sync() (stage=1), which leaves "
                    f"all gradients to step()"
                )
            for piece in unit.groups[0].parameters:
                if not piece.late:
                    piece.check_mark()
        self.end()
        owing = [unit for unit in self.units if unit.begun]
        self._begin_sums()
        for unit in owing:
            unit.reduce(always=True)
        try:
            with self._sums.read():
                yield
        finally:
            self.end()
            self.forget_gradients()

    @contextlib.contextmanager
    def no_sync(self):
        """A context in which backward reduces nothing: gradients accumulate. All ranks must enter it."""
        before = [unit.sync for unit in self.units]
        for unit in self.units:
            unit.sync, unit.begun = False, True
        try:
            yield
        finally:
            for unit, sync in zip(self.units, before, strict=True):
                unit.sync = sync

    def discard_gradients(self):
        """Forget all gradients. Collective if a backward has failed on the way: other ranks have reduced all units."""
        for bucket, unit in zip(self.buckets, self.units, strict=True) if self._sums is not None else ():
            bucket.forget_gradients()
            unit.reduce()
        self.end()
        self.forget_gradients()
