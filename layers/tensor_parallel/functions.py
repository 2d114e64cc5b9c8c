"""The communication at the two ends of a tensor-parallel layer, each function with its exact backward.

    x_shard_m  [M/R, K]  this rank's rows (sequence parallel)     R ranks
    x_shard_k  [M, K/R]  this rank's features, all rows           other tensors are replicated: equal on all ranks
    w_shard_n  [N/R, K]  this rank's out-features

    function                                      forward             backward
    column_parallel_linear                        x @ w_shard_n.T     all_reduce(dy_shard_n @ w_shard_n), overlapped
    copy_to_tensor_model_parallel_region          x                   all_reduce(dy)
    reduce_from_tensor_model_parallel_region      all_reduce(x)       dy
    scatter_to_tensor_model_parallel_region       own features        all_gather of features
    gather_from_tensor_model_parallel_region      all_gather          own features
    scatter_to_sequence_parallel_region           own rows            all_gather of rows
    gather_from_sequence_parallel_region          all_gather          reduce_scatter, or own rows
    reduce_scatter_to_sequence_parallel_region    reduce_scatter      all_gather of rows

The names are Megatron's. Features are the last dimension, rows the first one. The gradient of a replicated tensor is
assumed to be equal on all ranks. Every function is collective, in forward, in backward or in both. In backward all
ranks must request the same gradients.

mesh: the R ranks, as in `tkernels.comm.as_context`; None: those of the current context.
"""

from collections.abc import Iterable

import torch

import tkernels
from tkernels.comm.arguments import check_dense, check_flags, check_tensors, check_type, whole
from tkernels.comm.collectives import check_rows
from tkernels.comm.context import Context, MeshLike, as_context
from tkernels.comm.contexts import find_context
from tkernels.dispatch import apply_transformed
from tkernels.gemm import check_operands
from tkernels.leading import Leading
from tkernels.torch_operators import replicated


def as_operands(device: str, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in autocast's dtype, as nn.Linear takes them, which changes none of this library's operators."""
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = [each if each is None else each.to(dtype) for each in tensors]
    return tuple(tensors)


def _extent(caller: str, x: torch.Tensor, dim: int) -> int:
    """The size of x along `dim`. Raises TypeError for what is no dense tensor, ValueError for a scalar."""
    check_dense(caller, x=x)
    if x.dim() == 0:
        raise ValueError(f"{caller}: splits or gathers a dimension, but x is a scalar, which has none")
    return x.shape[dim]


def _by_rank(caller: str, sizes) -> tuple[int, ...]:
    check_type(f"{caller}: sizes", sizes, Iterable, "a size for each rank")
    return tuple(whole(f"{caller}: a size", size) for size in sizes)


class _ColumnParallelLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w_shard_n, bias_shard_n, context):
        with torch.autocast(x.device.type, enabled=False):  # autocast changes none of this library's operators
            return torch.nn.functional.linear(x, w_shard_n, bias_shard_n)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w_shard_n, _, ctx.context = inputs
        ctx.save_for_backward(x, w_shard_n)

    @staticmethod
    def backward(ctx, dy_shard_n):
        x, w_shard_n = ctx.saved_tensors
        x = replicated(x, ctx.context)  # double backward: dw differs by rank, so the gradient it gives x is summed
        dy_shard_n = dy_shard_n.contiguous()
        dx = dw = dbias = None
        if ctx.needs_input_grad[0]:
            dx = tkernels.matmul_all_reduce(dy_shard_n, w_shard_n.t(), ctx=find_context(ctx.context))
        if ctx.needs_input_grad[1]:
            with torch.autocast(x.device.type, enabled=False):  # as forward, where backward runs under autocast too
                dw = dy_shard_n.t() @ x
        if ctx.needs_input_grad[2]:
            dbias = dy_shard_n.sum(0)
        return dx, dw, dbias, None


class _OfParts(torch.autograd.Function):
    """Scatter and gather are each other's backward, of any order, since whole tensors and gradients are replicated."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.sizes, ctx.dim, ctx.context = inputs


class _Scatter(_OfParts):
    @staticmethod
    def forward(x, sizes, dim, context):
        # A copy: the part outlives the whole tensor, and kernels and views need it contiguous.
        return x.split(sizes, dim)[find_context(context).rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, dy_part):
        return apply_transformed("gather", _Gather, dy_part, ctx.sizes, ctx.dim, ctx.context), None, None, None


class _Gather(_OfParts):
    @staticmethod
    def forward(x_part, sizes, dim, context):
        rows = x_part.movedim(dim, 0).contiguous()
        return tkernels.all_gather(rows, rows=sizes, ctx=find_context(context)).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx, dy):
        return apply_transformed("scatter", _Scatter, dy, ctx.sizes, ctx.dim, ctx.context), None, None, None


def column_parallel_linear(
    x: torch.Tensor,
    w_shard_n: torch.Tensor,
    bias_shard_n: torch.Tensor | None = None,
    *,
    mesh: MeshLike = None,
) -> torch.Tensor:
    """x [..., K], w_shard_n [N/R, K], bias_shard_n [N/R] -> y_shard_n [..., N/R]. Collective in backward.

    x is replicated, and so is its gradient: the sum over ranks is sent while dy_shard_n @ w_shard_n is computed. All
    operands and the result have one dtype: fp32, fp16 or bf16. Under autocast, cast operands first. Raises ValueError
    or TypeError otherwise.
    """
    name, ctx = "column_parallel_linear", as_context(mesh, "column_parallel_linear: mesh")
    if isinstance(x, torch.Tensor) and x.dim() != 2:
        lead = Leading.of(name, x)
        return lead.back(column_parallel_linear(lead.matrix(x), w_shard_n, bias_shard_n, mesh=ctx))
    check_operands(name, x, w_shard_n, bias_shard_n, None, ctx.device)
    return apply_transformed(name, _ColumnParallelLinear, x, w_shard_n, bias_shard_n, ctx.name)


def copy_to_tensor_model_parallel_region(x: torch.Tensor, *, mesh: MeshLike = None) -> torch.Tensor:
    """x unchanged; its gradient is the sum over ranks. Any shape of at least one dimension. Collective in backward.

    For a replicated tensor that each rank uses on its own features or rows, a norm's weight for example.
    """
    check_tensors("copy_to_tensor_model_parallel_region", x=x)
    return replicated(x, as_context(mesh, "copy_to_tensor_model_parallel_region: mesh").name)


def reduce_from_tensor_model_parallel_region(x: torch.Tensor, *, mesh: MeshLike = None) -> torch.Tensor:
    """Collective. The sum of x over ranks; the gradient passes through unchanged."""
    return tkernels.all_reduce(x, ctx=as_context(mesh, "reduce_from_tensor_model_parallel_region: mesh"))


def scatter_to_tensor_model_parallel_region(
    x: torch.Tensor, *, sizes: tuple[int, ...] | None = None, mesh: MeshLike = None
) -> torch.Tensor:
    """This rank's features: x [..., K] -> x_shard_k [..., K/R]. Collective in backward. sizes: features by rank."""
    caller = "scatter_to_tensor_model_parallel_region"
    ctx = as_context(mesh, f"{caller}: mesh")
    features = _extent(caller, x, -1)
    sizes = None if sizes is None else _by_rank(caller, sizes)
    if sizes is None and features % ctx.size or sizes is not None and (len(sizes), sum(sizes)) != (ctx.size, features):
        raise ValueError(
            f"{caller}: {features} features can't be split over {ctx.size} ranks as "
            f"sizes={sizes}; pass a size for each rank, for example split_rows({features}, {ctx.size})"
        )
    sizes = (features // ctx.size,) * ctx.size if sizes is None else sizes
    return apply_transformed("scatter", _Scatter, x, sizes, -1, ctx.name)


def gather_from_tensor_model_parallel_region(
    x_shard_k: torch.Tensor, *, sizes: tuple[int, ...] | None = None, mesh: MeshLike = None
) -> torch.Tensor:
    """Collective. Every rank's features: x_shard_k [..., K/R] -> x [..., K]. sizes: features by rank, None: equal."""
    caller = "gather_from_tensor_model_parallel_region"
    ctx = as_context(mesh, f"{caller}: mesh")
    features = _extent(caller, x_shard_k, -1)
    sizes = (features,) * ctx.size if sizes is None else _by_rank(caller, sizes)
    return apply_transformed("gather", _Gather, x_shard_k, sizes, -1, ctx.name)


def gather_equal_parts(x_part: torch.Tensor, dim: int, ctx: Context) -> torch.Tensor:
    """Collective. Every rank's part along `dim`; backward takes this rank's. Unequal ones are a MismatchError."""
    return apply_transformed("gather", _Gather, x_part, (x_part.shape[dim],) * ctx.size, dim, ctx.name)


def scatter_to_sequence_parallel_region(
    x: torch.Tensor, *, rows: tuple[int, ...] | None = None, mesh: MeshLike = None
) -> torch.Tensor:
    """This rank's rows: x [M, ...] -> x_shard_m [M/R, ...]. Collective in backward. rows: row counts by rank."""
    caller = "scatter_to_sequence_parallel_region"
    ctx = as_context(mesh, f"{caller}: mesh")
    rows = check_rows(caller, ctx, rows, total=_extent(caller, x, 0))
    return apply_transformed("scatter", _Scatter, x, rows, 0, ctx.name)


def gather_from_sequence_parallel_region(
    x_shard_m: torch.Tensor,
    *,
    tensor_parallel_output_grad: bool = True,
    rows: tuple[int, ...] | None = None,
    mesh: MeshLike = None,
) -> torch.Tensor:
    """Collective. Every rank's rows: x_shard_m [M/R, ...] -> x [M, ...]. rows: row counts by rank, None: equal.

    tensor_parallel_output_grad: True if each rank continues with its own features: gradients are then partial, and
        backward sums them. False if all ranks compute the same: backward then takes this rank's rows. The name is
        Megatron's.
    """
    caller = "gather_from_sequence_parallel_region"
    ctx = as_context(mesh, f"{caller}: mesh")
    check_flags(caller, tensor_parallel_output_grad=tensor_parallel_output_grad)
    if tensor_parallel_output_grad:
        return tkernels.all_gather(x_shard_m, rows=rows, ctx=ctx)
    rows = check_rows(caller, ctx, rows, own=_extent(caller, x_shard_m, 0))
    return apply_transformed("gather", _Gather, x_shard_m, rows, 0, ctx.name)


def reduce_scatter_to_sequence_parallel_region(
    x: torch.Tensor, *, rows: tuple[int, ...] | None = None, mesh: MeshLike = None
) -> torch.Tensor:
    """Collective. This rank's rows of the sum over ranks: x [M, ...] -> x_shard_m [M/R, ...]."""
    ctx = as_context(mesh, "reduce_scatter_to_sequence_parallel_region: mesh")
    return tkernels.reduce_scatter(x, rows=rows, ctx=ctx)
