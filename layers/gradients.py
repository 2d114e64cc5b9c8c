"""What is done to a model's gradients between backward and the optimizer's step, whoever holds them."""

import numbers
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

import tkernels
from tkernels.comm.arguments import check_dense, check_flags, check_type
from tkernels.comm.collectives import SUMMED
from tkernels.comm.context import Context, MeshLike, as_context
from tkernels.layers.data_parallel.ddp import OverlappedDDP, changing_main_grads
from tkernels.layers.data_parallel.engine import Unit
from tkernels.layers.data_parallel.norms import (
    check_parts,
    check_stage,
    clip_scale,
    counts,
    in_common,
    norms_of,
    sum_of_squares,
)
from tkernels.layers.data_parallel.zero import ZeroOptimizer
from tkernels.layers.marks import gradient_of, is_partial, is_split
from tkernels.layers.owners import owner_of
from tkernels.layers.tensor_parallel.dtensors import num_ranks_of


@torch.no_grad()
def all_reduce_sequence_parallel_grads(module: torch.nn.Module, *, mesh: MeshLike = None):
    """Collective. Sum over ranks, in place, the gradients of the parameters that have `sequence_parallel = True`.

    Call it between backward and the optimizer's step. Such a parameter is replicated but used on this rank's rows only,
    so its gradient is a partial sum. Set the mark on the norms between sequence-parallel layers (Megatron's mark and
    meaning). There is one all-reduce per dtype.

    A parameter's gradient is its main_grad if it has one, as OverlappedDDP's have. A missing gradient counts as zero
    and receives the sum too, since another rank may have one. So a parameter that no rank has used gets a gradient of
    zero instead of None, and momentum and weight decay apply to it. Raises, before anything is changed, ValueError for
    a parameter of a ZeroOptimizer, which has taken its gradient and sums it itself, and TypeError for gradients that
    can't be summed.
    """
    caller, summed = "all_reduce_sequence_parallel_grads", []
    ctx = as_context(mesh, f"{caller}: mesh")
    check_type(f"{caller}: module", module, torch.nn.Module, "an nn.Module")
    for name, parameter in module.named_parameters():
        if not is_partial(parameter) or not parameter.requires_grad:
            continue
        if owner_of(parameter, ZeroOptimizer):
            raise ValueError(
                f"{caller}: {name} belongs to a ZeroOptimizer, which has taken its gradient "
                f"and sums it over its tensor_parallel= ranks itself; leave out this call"
            )
        grad = gradient_of(parameter)
        kind = parameter if grad is None else grad
        _check_place(caller, name, kind, ctx.device)
        if kind.layout is not torch.strided or kind.dtype not in SUMMED:
            raise TypeError(
                f"{caller}: sums dense gradients of float32, float16 and bfloat16, but that of {name} is {kind.dtype}, "
                f"{kind.layout}"
            )
        summed.append(parameter)
    grads = {}
    for parameter in summed:
        grad = gradient_of(parameter)
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter)
        local = grad.to_local() if isinstance(grad, DTensor) else grad  # of fully_shard: this rank's rows
        grads.setdefault(grad.dtype, []).append(local)
    with changing_main_grads(module.parameters()):
        for same_dtype in grads.values():
            total = tkernels.all_reduce(torch.cat([grad.reshape(-1) for grad in same_dtype]), ctx=ctx)
            for grad, part in zip(same_dtype, total.split([grad.numel() for grad in same_dtype]), strict=True):
                grad.copy_(part.view_as(grad))


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    mesh: MeshLike = None,
    pipeline: MeshLike = None,
) -> torch.Tensor:
    """Collective. torch.nn.utils.clip_grad_norm_ for a model with parallel layers: by the 2-norm of the whole model.

    Split parameters count on every rank, replicated ones once. torch's own would clip each rank's by another norm, and
    replicated parameters would part.

    norm_type: 2 alone. error_if_nonfinite: read the norm back to the host, and raise RuntimeError on every rank, with
        the gradients as they were, if it is not finite. foreach: accepted as in torch, without effect.
    mesh: the ranks that layers are split over, as in `tkernels.comm.as_context`; by default those of the current
        context, or no ranks if other stages of the pipeline are among them.
    pipeline: the ranks that have the stages of a pipeline, each of which passes its own parameters. What several stages
        have a copy of, as of a tied head, counts once if it is marked `shared = True` (Megatron's mark) on the others.

    Call it once gradients are complete: after `all_reduce_sequence_parallel_grads`. OverlappedDDP's gradients are
    clipped in `main_grad` and `.grad`; with its shards, pass `owned_parameters()`: the norm is that of all shards.

    Returns the norm before clipping, one fp32 element, the same on every rank. Raises TypeError for what is no tensor,
    has a sparse gradient, or is no number. Raises ValueError for max_norm < 0, for parameters that this rank has a part
    of the gradients of (ZeroOptimizer clips by its `max_norm`), if parameters of an OverlappedDDP are split, but mesh
    has data-parallel ranks of it, if mesh has fewer ranks than layers were split over, if it has other stages
    of the pipeline, and for DTensors that have lost the mark of split parameters, as torch's FSDP2 makes them.
    DTensors, as of fully_shard, count with all their parts.
    """
    ctx = as_context(mesh, "clip_grad_norm_: mesh")
    stages = None if pipeline is None else as_context(pipeline, "clip_grad_norm_: pipeline")
    device = ctx.device
    if stages is not None:
        if mesh is not None:
            check_stage("clip_grad_norm_", stages.group, "mesh", ctx.group, "the ranks that layers are split over")
        elif in_common(ctx.group, stages.group):  # other stages have other parameters, not copies or parts of these
            ctx = None
    _check_max_norm("clip_grad_norm_", max_norm)
    if not isinstance(norm_type, numbers.Real) or norm_type != 2:
        raise ValueError(f"clip_grad_norm_: norm_type={norm_type!r} is not supported; leave it out, for the 2-norm")
    check_flags("clip_grad_norm_", error_if_nonfinite=error_if_nonfinite)
    check_type("clip_grad_norm_: parameters", parameters, Iterable, "parameters, as a module's parameters() gives them")
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for parameter in parameters:
        check_dense("clip_grad_norm_", parameter=parameter)
        if (grad := gradient_of(parameter)) is not None:
            check_dense("clip_grad_norm_", gradient=grad)
            _check_place("clip_grad_norm_", f"the parameter of {tuple(parameter.shape)}", grad, device)
    wrappers = list(filter(None, {owner_of(parameter, OverlappedDDP): None for parameter in parameters}))
    shards = {shard for ddp in wrappers for shard in ddp.shards}
    for parameter in parameters:
        _check_mark(parameter, ctx)
        owner = owner_of(parameter, (ZeroOptimizer, OverlappedDDP))
        if owner is not None and getattr(owner, "sharded", True) and parameter not in shards:
            ours = isinstance(owner, ZeroOptimizer)
            raise ValueError(
                f"clip_grad_norm_: parameters belong to {type(owner).__name__}, and this rank has a part of their "
                f"gradients alone; pass {'max_norm= and tensor_parallel= to it' if ours else 'its owned_parameters()'}"
            )
    if ctx is not None:
        check_parts("clip_grad_norm_", parameters, ctx)
    for ddp in wrappers if ctx is not None else ():
        ddp.check_tensor_parallel("clip_grad_norm_", ctx)
    with changing_main_grads(parameters):
        parameters = [parameter for parameter in parameters if gradient_of(parameter) is not None]
        whole = [parameter for parameter in parameters if parameter not in shards]
        norms = dict(zip(whole, norms_of(map(gradient_of, whole)), strict=True))
        total = sum_of_squares([norm for parameter, norm in norms.items() if counts(parameter, ctx)], device)
        for ddp in wrappers:
            total += ddp.squared_norm(shards.intersection(parameters), ctx)
        for each in filter(None, (ctx, stages)):
            total = tkernels.all_reduce(total, ctx=each)
        norm = total.sqrt().squeeze()
        failed = error_if_nonfinite and not norm.isfinite()
        scale = clip_scale(norm, max_norm)
        for grad in map(gradient_of, () if failed else parameters):
            grad.mul_(scale)  # an fp32 scalar: fp16 may not hold it
    if failed:
        raise RuntimeError(f"clip_grad_norm_: the norm of all gradients is {norm.item()}; no gradient was changed")
    return norm


def _check_mark(parameter: torch.Tensor, ctx: Context | None):
    """Raises ValueError for a DTensor of which nobody knows whether the ranks of `ctx` have parts or copies of it.

    And, where these are no ranks, for a parameter that is split.
    """
    if ctx is None:
        if is_split(parameter):
            raise ValueError(
                "clip_grad_norm_: some parameters are split over tensor-parallel ranks (tensor_model_parallel), but "
                "the current context has stages of pipeline=; pass mesh=, the ranks that layers are split over"
            )
        return
    if not isinstance(parameter, DTensor) or hasattr(parameter, "tensor_model_parallel") or owner_of(parameter, Unit):
        return
    if num_ranks_of(parameter, ctx) < min(ctx.size, 2):
        raise ValueError(
            f"clip_grad_norm_: the parameter of {tuple(parameter.shape)} is a DTensor over data-parallel ranks alone, "
            f"and the marks that parallel layers set are not on it, as torch's FSDP2 drops them; use "
            f"tkernels.layers.fully_shard, which keeps them, or set tensor_model_parallel on all parameters again: "
            f"True if the ranks of mesh= have different parts, False if they have copies"
        )


def _check_place(caller: str, name: str, grad, device: torch.device):
    """Raise TypeError or ValueError for a gradient that isn't a tensor where the ranks exchange them."""
    check_type(f"{caller}: the gradient of {name}", grad, torch.Tensor, "a tensor")
    if grad.device != device:
        raise ValueError(
            f"{caller}: the gradient of {name} is on {grad.device}, but the ranks sum on {device}; move the model there"
        )


def _check_max_norm(caller: str, max_norm: float):
    """Raises TypeError unless max_norm is a number or a tensor of one, ValueError for one that would turn gradients."""
    one = isinstance(max_norm, torch.Tensor) and max_norm.numel() == 1 and not max_norm.is_complex()
    if not one and not isinstance(max_norm, numbers.Real):
        raise TypeError(f"{caller}: max_norm={max_norm!r} must be a number")
    if not one and not max_norm >= 0:  # that of a tensor would be read back to the host
        raise ValueError(f"{caller}: max_norm={max_norm} must not be negative or nan")
