"""One gradient norm over data- and tensor-parallel ranks: split parameters count on every rank, replicated ones once.

Without it the ranks of a tensor-parallel group would clip by different norms, and their replicated parameters would
diverge.
"""

import numbers
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

import tkernels
from tkernels.comm.arguments import check_dense
from tkernels.comm.context import Context, MeshLike, as_context
from tkernels.layers.owners import owner_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, *, mesh: MeshLike = None
) -> torch.Tensor:
    """Collective. torch.nn.utils.clip_grad_norm_ for a model with parallel layers: by the 2-norm of the whole model.

    mesh: the ranks that layers are split over, as in `tkernels.comm.as_context`; by default those of the current
        context. It does not span pipeline stages: each stage has its own norm, whose squares are yet to be summed.

    Call it once gradients are complete: after `all_reduce_sequence_parallel_grads`. OverlappedDDP's gradients are
    clipped in `main_grad` and `.grad`; with its shards, pass `owned_parameters()`: the norm is that of all shards.

    Returns the norm before clipping, one fp32 element, the same on every rank. Raises TypeError for what is no tensor,
    has a sparse gradient, or is no number. Raises ValueError for max_norm < 0, for parameters that this rank has a
    part of the gradients of (ZeroOptimizer clips by its `max_norm`), and if parameters of an OverlappedDDP are split,
    but mesh has data-parallel ranks of it. DTensors, as those of fully_shard, count with all their parts.
    """
    from tkernels.layers.data_parallel.ddp import (  # imported late: they import this module
        OverlappedDDP,
        changing_main_grads,
    )
    from tkernels.layers.data_parallel.zero import ZeroOptimizer

    ctx = as_context(mesh, "clip_grad_norm_: mesh")
    check_max_norm("clip_grad_norm_", max_norm)
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in parameters:
        check_dense("clip_grad_norm_", parameter=parameter)
        if (grad := gradient_of(parameter)) is not None:
            check_dense("clip_grad_norm_", gradient=grad)
    wrappers = list(filter(None, {owner_of(parameter, OverlappedDDP): None for parameter in parameters}))
    shards = {shard for wrapper in wrappers for shard in wrapper.shards}
    for parameter in parameters:
        for kind, way_out in (
            (ZeroOptimizer, "pass max_norm= and tensor_parallel= to it"),
            (OverlappedDDP, "pass its owned_parameters()"),
        ):
            owner = owner_of(parameter, kind)
            if owner is not None and getattr(owner, "sharded", True) and parameter not in shards:
                raise ValueError(
                    f"clip_grad_norm_: parameters belong to {kind.__name__}, and this rank has a part of their "
                    f"gradients alone; {way_out}"
                )
    for wrapper in wrappers:
        wrapper.check_tensor_parallel("clip_grad_norm_", ctx)
    with changing_main_grads(parameters):
        parameters = [parameter for parameter in parameters if gradient_of(parameter) is not None]
        whole = [parameter for parameter in parameters if parameter not in shards]
        norms = dict(zip(whole, norms_of(map(gradient_of, whole)), strict=True))
        total = sum_of_squares([norm for parameter, norm in norms.items() if counts(parameter, ctx)], ctx.device)
        for wrapper in wrappers:
            total += wrapper.squared_norm(shards.intersection(parameters), ctx)
        norm = tkernels.all_reduce(total, ctx=ctx).sqrt().squeeze()
        clip(map(gradient_of, parameters), norm, max_norm)
    return norm


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that an optimizer uses: main_grad if there is one, as on OverlappedDDP's parameters, else grad."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def squared_norm(grads: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The squared 2-norm of all gradients together, fp32 [1]; 0 if there are none."""
    return sum_of_squares(norms_of(grads), device)


def norms_of(grads: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each gradient, fp32. Collective over the ranks that hold the parts of a DTensor."""
    # In fp32 at least; fp64 and complex gradients have norms of more.
    dtypes = ((grad, torch.promote_types(grad.dtype, torch.float32)) for grad in grads)
    norms = [torch.linalg.vector_norm(grad, dtype=dtype).float() for grad, dtype in dtypes]
    return [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]


def sum_of_squares(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """fp32 [1]; 0 of none."""
    return torch.stack(norms).square().sum(0, keepdim=True) if norms else torch.zeros(1, device=device)


def clip(grads: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float):
    """Scale gradients whose norm is `norm` in place, to max_norm if that is less."""
    scale = clip_scale(norm, max_norm)
    for grad in grads:
        grad.mul_(scale)  # an fp32 scalar: fp16 may not hold it


def clip_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor for gradients of this norm, by torch's formula."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def check_max_norm(caller: str, max_norm: float):
    """Raises TypeError unless max_norm is a number or a tensor of one, ValueError for one that would turn gradients."""
    one = isinstance(max_norm, torch.Tensor) and max_norm.numel() == 1
    if not one and not isinstance(max_norm, numbers.Real):
        raise TypeError(f"{caller}: max_norm={max_norm!r} must be a number")
    if not one and not max_norm >= 0:  # that of a tensor would be read back to the host
        raise ValueError(f"{caller}: max_norm={max_norm} must not be negative or nan")


def is_split(parameter) -> bool:
    """Whether each tensor-parallel rank has a different part: Megatron's mark, which the parallel layers set too."""
    return getattr(parameter, "tensor_model_parallel", False)


def counts(parameter, tensor_parallel: Context | None) -> bool:
    """Whether this rank adds the parameter's gradient to the norm over the tensor-parallel ranks."""
    return tensor_parallel is None or tensor_parallel.rank == 0 or is_split(parameter)


def check_norm(caller: str, parameters, tensor_parallel: MeshLike):
    """Raises ValueError if parameters are split, but tensor_parallel, the ranks they are split over, is not given."""
    if tensor_parallel is None and any(map(is_split, parameters)):
        raise ValueError(
            f"{caller}: some parameters are split over tensor-parallel ranks (tensor_model_parallel), so that each of "
            f"these would have a norm of its own, and what they have in common would part; pass tensor_parallel=, "
            f"these ranks"
        )
