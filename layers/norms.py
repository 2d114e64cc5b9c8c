"""One norm of gradients over data-parallel and tensor-parallel ranks: what is split counts everywhere, the rest once.

Without it the ranks of a tensor-parallel group would clip by different norms, and what they have in common would part.
"""

from collections.abc import Iterable

import torch

import tkernels
from tkernels.comm.context import Context, as_context
from tkernels.layers.owners import owner_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, *, ctx: Context | None = None
) -> torch.Tensor:
    """Collective. torch.nn.utils.clip_grad_norm_ of a model with parallel layers: by the 2-norm of the whole model.

    ctx: of the ranks that layers are split over; the current one by default. Stages of a pipeline have a norm each,
    whose squares are yet to be summed. Call it once gradients are complete: after
    `all_reduce_sequence_parallel_grads`, and with OverlappedDDP, whose `main_grad` is clipped, after finish_grad_sync.

    Returns the norm before, fp32 of one element and the same on every rank. Raises ValueError where a rank has a part
    of gradients alone, by data-parallel ranks: ZeroOptimizer clips by its `max_norm`, FullyShard by its own function.
    """
    from tkernels.layers.ddp import OverlappedDDP  # which, as the two others, may clip by what is here
    from tkernels.layers.fsdp import FullyShard
    from tkernels.layers.zero import ZeroOptimizer

    ctx = as_context(ctx)
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in parameters:
        for kind, way_out in (
            (ZeroOptimizer, "pass max_norm= and tensor_parallel= to it"),
            (FullyShard, "call its own clip_grad_norm_"),
            (OverlappedDDP, "pass use_distributed_optimizer=False to it"),
        ):
            owner = owner_of(parameter, kind)
            if owner is not None and getattr(owner, "sharded", True):
                raise ValueError(
                    f"clip_grad_norm_: parameters belong to {kind.__name__}, and this rank has a part of their "
                    f"gradients alone; {way_out}"
                )
    parameters = [parameter for parameter in parameters if gradient_of(parameter) is not None]
    total = squared_norm((gradient_of(parameter) for parameter in parameters if counts(parameter, ctx)), ctx.device)
    norm = tkernels.all_reduce(total, ctx=ctx).sqrt().squeeze()
    clip(map(gradient_of, parameters), norm, max_norm)
    return norm


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What an optimizer takes: main_grad where there is one, as OverlappedDDP's parameters have it, else grad."""
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def squared_norm(grads: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Of all gradients together, fp32 [1]; of none it is 0."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    return torch.stack(norms).square().sum(0, keepdim=True) if norms else torch.zeros(1, device=device)


def clip(grads: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float):
    """Scale the gradients, of this norm, to max_norm where that is less."""
    scale = clip_scale(norm, max_norm)
    for grad in grads:
        grad.mul_(scale)  # an fp32 scalar: fp16 may not hold it


def clip_scale(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of this norm are multiplied by, as torch has it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def is_split(parameter) -> bool:
    """Whether each tensor-parallel rank has a part of its own: Megatron's mark, which our layers set too."""
    return getattr(parameter, "tensor_model_parallel", False)


def counts(parameter, tensor_parallel: Context | None) -> bool:
    """Whether this rank adds the parameter's gradient to the norm over the tensor-parallel ranks."""
    return tensor_parallel is None or tensor_parallel.rank == 0 or is_split(parameter)


def check_norm(caller: str, parameters, tensor_parallel: Context | None):
    """Raises ValueError where parameters are split and nobody says over which ranks."""
    if tensor_parallel is None and any(map(is_split, parameters)):
        raise ValueError(
            f"{caller}: some parameters are split over tensor-parallel ranks (tensor_model_parallel), so that each of "
            f"these would have a norm of its own, and what they have in common would part; pass tensor_parallel=, "
            f"their context"
        )
