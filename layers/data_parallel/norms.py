"""One gradient norm over the ranks of all parallel dimensions: what is split counts on every rank, replicas once."""

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from tkernels.comm.context import Context
from tkernels.comm.group import Group
from tkernels.layers.marks import is_copy, is_split, num_parts


def squared_norm(grads: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The squared 2-norm of all gradients together, fp32 [1]; 0 if there are none."""
    return sum_of_squares(norms_of(grads), device)


def norms_of(grads: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each gradient, fp32. Collective over the ranks that hold the parts of a DTensor."""
    grads, alike, norms = list(grads), {}, {}
    for index, grad in enumerate(grads):
        # In fp32 at least; fp64 and complex gradients have norms of more.
        dtype = torch.promote_types(grad.dtype, torch.float32)
        if type(grad) is torch.Tensor and grad.is_floating_point() and grad.numel():
            alike.setdefault((grad.dtype, grad.device, dtype), []).append(index)  # a few launches for all of them
            continue
        norm = torch.linalg.vector_norm(grad, dtype=dtype).float()
        norms[index] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    for (*_, dtype), indices in alike.items():
        found = torch._foreach_norm([grads[index] for index in indices], 2, dtype=dtype)
        norms |= zip(indices, (norm.float() for norm in found), strict=True)
    return [norms[index] for index in range(len(grads))]


def sum_of_squares(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """fp32 [1]; 0 of none."""
    return torch.stack(norms).square().sum(0, keepdim=True) if norms else torch.zeros(1, device=device)


def clip_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor for gradients of this norm, by torch's formula."""
    max_norm = max_norm if isinstance(max_norm, torch.Tensor) else float(max_norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def counts(parameter, tensor_parallel: Context | None) -> bool:
    """Whether this rank adds the parameter's gradient to the norm over the tensor-parallel ranks."""
    return not is_copy(parameter) and (tensor_parallel is None or tensor_parallel.rank == 0 or is_split(parameter))


def check_parts(caller: str, parameters, tensor_parallel: Context):
    """Raises ValueError for parameters that are known to be split over more ranks."""
    for parts in filter(None, map(num_parts, parameters)):
        if parts > tensor_parallel.size:
            raise ValueError(
                f"{caller}: some parameters are split over {parts} ranks (tensor_model_parallel), but mesh has "
                f"{tensor_parallel.size}; pass mesh=, the ranks that layers are split over"
            )


def in_common(group: Group, other: Group) -> list[int]:
    """The global ranks, beside this one, that are in both."""
    return sorted({*group.global_ranks} & {*other.global_ranks} - {group.global_ranks[group.rank]})


def check_stage(caller: str, pipeline: Group, name: str, group: Group, ranks: str):
    """Raises ValueError if other ranks of the pipeline, which have other parameters, are in `group`, too.

    name: of the argument that `group` is. ranks: which it is to name.
    """
    if common := in_common(group, pipeline):
        raise ValueError(
            f"{caller}: {name} has ranks {sorted(group.global_ranks)}, of which {common} have other stages of "
            f"pipeline= and so other parameters; pass {name}=, {ranks}"
        )
