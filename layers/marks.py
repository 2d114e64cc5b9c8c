"""What Megatron's optimizers and gradient clipping read on a parameter, and what the layers here write there.

And by which they refuse who takes ranks' parts for replicas.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tkernels.comm.context import constant_in_traces
from tkernels.comm.contexts import open_contexts

RANKS = "tkernels_ranks"  # on a part of a parameter: the name of the context whose ranks have the parts


def is_split(parameter) -> bool:
    """Whether each tensor-parallel rank has a different part: Megatron's mark, which the parallel layers set too."""
    return getattr(parameter, "tensor_model_parallel", False)


def num_parts(parameter) -> int | None:
    """How many ranks have a part of a split parameter; None where this is not known: Megatron has no such mark."""
    return getattr(parameter, "partition_size", None) if is_split(parameter) else None


def is_partial(parameter) -> bool:
    """Megatron's mark: a gradient of this rank's rows alone, which is yet to be summed over tensor-parallel ranks."""
    return bool(getattr(parameter, "sequence_parallel", False))


def is_copy(parameter) -> bool:
    """Megatron's mark: another pipeline stage has this parameter too, and counts its gradient in a norm over both."""
    return bool(getattr(parameter, "shared", False))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that an optimizer uses: main_grad if there is one, as on OverlappedDDP's parameters, else grad."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def check_replicas(what: str, parameter, ranks: list[int]):
    """Raises ValueError for a part of a parameter of which several of these global ranks have different ones.

    As far as that is known. what: the caller and the parameter, for the error.
    """
    name = getattr(parameter, RANKS, None) if is_split(parameter) else None
    parts = next((each.group.global_ranks for each in open_contexts() if each.name == name), [])
    if len({*parts}.intersection(ranks)) > 1:
        raise ValueError(
            f"{what} is split over ranks {parts}, and of each another part is trained, but here ranks {ranks} are "
            f"replicas of it; pass a mesh of the ranks that have equal parts"
        )


class _DDP(DistributedDataParallel):
    """Made for one object, whose attribute torch.compile guards: the class's own None is a constant to torch 2.11."""

    def __init__(self):
        nn.Module.__init__(self)


_ddp = _DDP()


@constant_in_traces
def _ranks_of_ddp() -> tuple[int, ...]:
    """The ranks of torch's DistributedDataParallel whose forward runs or is traced."""
    return tuple(dist.get_process_group_ranks(DistributedDataParallel._active_ddp_module.process_group))


class MarkedModule(nn.Module):
    """A module whose parameters carry Megatron's marks, which its optimizers and gradient clipping read.

    torch drops a parameter's attributes where it makes a new one of it: in copies, in to_empty, and where a state dict
    is loaded by assignment. This class sets the marks again.

    Torch's own wrappers don't know the marks, and take the ranks' parts for replicas. They are refused: fully_shard
    where it puts its DTensors here, DistributedDataParallel by `_refuse_ddp` in forward.
    """

    def _ranks_with_parts(self) -> list[int]:
        """The global ranks that have parts of this module's parameters; none if these are whole, or it is not known."""
        return []

    def _refuse_ddp(self):
        """Raises ValueError in the forward of torch's DistributedDataParallel over several ranks that have parts."""
        if _ddp._active_ddp_module is None:  # by which torch.compile tells traces apart
            return
        ranks = self._ranks_with_parts()
        if len({*ranks}.intersection(_ranks_of_ddp())) < 2:
            return
        if not torch.compiler.is_compiling():  # an error in a forward of composable.replicate leaves it active
            wrapped = {*map(id, _ddp._active_ddp_module._module_parameters)}
            if wrapped.isdisjoint(map(id, self.parameters())):
                return
        raise ValueError(
            f"{type(self).__name__}: the weight is split over ranks {ranks}, which torch's DistributedDataParallel "
            f"takes for replicas, and it has given all of them the same part; pass it process_group= of the ranks that "
            f"have equal parts, or use parallelize_module, whose DTensors it refuses"
        )

    def __setattr__(self, name, value):
        if isinstance(value, DTensor) and name in vars(self).get("_marks", ()):
            split = is_split(self._parameters.get(name))  # not what FSDP2 puts there once it has its own
            ranks = self._ranks_with_parts() if split else []
            others = value.device_mesh.mesh.flatten().tolist() if ranks else []
            if len({*ranks}.intersection(others)) > 1:
                raise ValueError(
                    f"{type(self).__name__}: {name} is split over ranks {ranks}, and its parts are taken for replicas "
                    f"by who puts a DTensor over ranks {others} in its place, such as torch's fully_shard; pass that a "
                    f"mesh of the ranks that have equal parts, or use parallelize_module, whose parts are DTensors"
                )
        super().__setattr__(name, value)

    def _mark(self, name: str, **marks):
        """Set attributes of a parameter, and of the parameters that later replace it."""
        vars(self).setdefault("_marks", {}).setdefault(name, {}).update(marks)
        vars(getattr(self, name)).update(marks)

    def _mark_part(self, name: str, dim: int | None, size: int, stride: int = 1, **marks):
        """Mark what is one of `size` ranks' parts of a parameter, split along `dim` in `stride` blocks; None: whole."""
        part = dict(
            tensor_model_parallel=dim is not None and size > 1, partition_dim=-1 if dim is None else dim,
            partition_stride=1 if dim is None else stride, partition_size=1 if dim is None else size,
        )  # fmt: skip
        self._mark(name, **part | marks)

    def _mark_again(self):
        for name, marks in vars(self).get("_marks", {}).items():
            if (parameter := getattr(self, name, None)) is not None:
                vars(parameter).update(marks | vars(parameter))  # attributes set since take precedence

    def _apply(self, function, recurse=True):
        super()._apply(function, recurse)
        self._mark_again()
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark_again()

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        self._mark_again()
