"""The communication in the three passes of one linear layer: y = x @ w.T, with the weight split over P ranks.

S tokens over all ranks, sequence parallel outside the layer: each rank has S/P of them.  I in-features, O out-features.

    column    w [O/P, I]
      fprop     x [S/P, I]    all-gather of x inside the GEMM               y  [S, O/P]
      dgrad     dy [S, O/P]   bulk: a local GEMM computes the partial dx,
                              with the all-gather of x beside it
                              else: reduce-scatter of dx inside the GEMM,
                              with the all-gather of x (for wgrad) beside   dx [S/P, I]
      wgrad     dy.T @ x      bulk: a local GEMM, with the reduce-scatter
                              of the partial dx beside it
    row       w [O, I/P]
      fprop     x [S, I/P]    reduce-scatter of y inside the GEMM           y  [S/P, O]
      dgrad     dy [S/P, O]   all-gather of dy inside the GEMM              dx [S, I/P]
      wgrad     dy.T @ x      a local GEMM with the dy that dgrad gathered;
                              no communication

Where a pass has no communicator, the same data moves before or after the GEMM: by a collective of another communicator
of the layer, else by torch.distributed. Without sequence parallelism, a column layer sums dx over the ranks and a row
layer sums y.
"""

import contextlib
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tkernels.comm.collectives import split_rows
from tkernels.comm.group import all_gather_single, reduce_scatter_single
from tkernels.layers.data_parallel.grad_hooks import grad_ready_hooks
from tkernels.layers.userbuffers.communicators import CommOverlapCore, group_of, product
from tkernels.operators import matmul_all_reduce


@dataclass(frozen=True)
class WeightGradient:
    """Computes a weight's gradient, and where it goes.

    fuse: add it to weight.main_grad, in that tensor's dtype (with weight.overwrite_main_grad, overwrite it). Autograd
        receives None, or a placeholder if the weight has grad_added_to_main_grad.
    store: a list to which the computation is appended, for `backward_dw`. None: compute it in backward.
    """

    weight: torch.nn.Parameter
    fuse: bool = False
    store: list | None = None

    def __call__(self, dy: torch.Tensor, x: torch.Tensor, multiply=product) -> torch.Tensor | None:
        """dy.T @ x [O, I], or the value that autograd receives in its place."""
        if self.store is not None:
            if (hooks := grad_ready_hooks(self.weight)) is not None:
                hooks.defer(self.weight)
            self.store.append(partial(self._deferred, dy, x))
            return None
        return self._fused(dy, x, multiply) if self.fuse else multiply(dy.t(), x.t())

    def _fused(self, dy, x, multiply=product):
        weight = self.weight
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise ValueError(
                f"fuse_wgrad_accumulation=True adds to weight.main_grad, but the weight {tuple(weight.shape)} has none"
            )
        hooks = grad_ready_hooks(weight)
        with contextlib.nullcontext() if hooks is None else hooks.writing(weight):
            dw = multiply(dy.t(), x.t(), main_grad.dtype)
            if getattr(weight, "overwrite_main_grad", False):
                main_grad.copy_(dw)
            else:
                main_grad.add_(dw)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        # The framework's gradient hook runs only if there is a gradient. It reads the attribute, not the values.
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)

    def _deferred(self, dy, x):
        weight = self.weight
        if self.fuse or grad_ready_hooks(weight) is not None:
            self._fused(dy, x)
            return
        dw = product(dy.t(), x.t()).to(weight.dtype)
        weight.grad = dw if weight.grad is None else weight.grad.add_(dw)


class Local:
    """The flow on a single rank, without communication."""

    def forward(self, x, w, bias):
        return functional.linear(x, w, bias)

    def backward(self, dy, x, w, need_x, dw):
        return dy @ w if need_x else None, None if dw is None else dw(dy, x)


@dataclass(frozen=True)
class Column:
    """The flow of a column-parallel layer.

    rows: every rank's number of tokens.
    sequence_parallel: x and dx are split over the ranks by `rows`.
    fprop, dgrad, wgrad: the communicators of the passes, or None.
    """

    group: object
    rows: tuple[int, ...]
    sequence_parallel: bool
    fprop: CommOverlapCore | None = None
    dgrad: CommOverlapCore | None = None
    wgrad: CommOverlapCore | None = None

    def forward(self, x, w, bias):
        if self.fprop is not None:
            return self.fprop.all_gather_matmul(x, w, bias, rows=self.rows)[0]
        return functional.linear(self._gather(x), w, bias)

    def backward(self, dy, x, w, need_x, dw):
        if not self.sequence_parallel:
            dx = _all_reduce(dy @ w, self.group) if need_x else None
            return dx, None if dw is None else dw(dy, x)
        inside = self.dgrad if self.dgrad is not None and (self.dgrad.options.is_reduce_scatter or dw is None) else None
        gathered = dx = part = None
        if dw is not None and self.dgrad is not None and need_x:
            gathered = x.new_empty(sum(self.rows), x.shape[1])
            with self.dgrad.beside(self.dgrad.all_gather, x, self.rows, gathered):
                if inside is not None:
                    dx = inside.matmul_reduce_scatter(dy, w.t(), rows=self.rows, beside=True)
                else:
                    part = self.dgrad.multiply(dy, w.t())
        else:
            gathered = self._gather(x) if dw is not None else None
            if need_x and inside is not None:
                dx = inside.matmul_reduce_scatter(dy, w.t(), rows=self.rows)
            elif need_x:
                part = dy @ w
        if part is None or dw is None or self.wgrad is None:
            if part is not None:
                dx = self._reduce_scatter(part)
            return dx, None if dw is None else dw(dy, gathered)
        dx = torch.empty_like(x)
        with self.wgrad.beside(self.wgrad.reduce_scatter, part, self.rows, dx):
            return_dw = dw(dy, gathered, self.wgrad.multiply)
        return dx, return_dw

    def _communicator(self):
        return self.fprop or self.dgrad or self.wgrad

    def _gather(self, x):
        if not self.sequence_parallel:
            return x
        comm = self._communicator()
        return _gather(x, self.group) if comm is None else comm.all_gather(x, self.rows)

    def _reduce_scatter(self, dx):
        comm = self._communicator()
        return _reduce_scatter(dx, self.group) if comm is None else comm.reduce_scatter(dx, self.rows)


@dataclass(frozen=True)
class Row:
    """The flow of a row-parallel layer.

    rows: every rank's number of tokens.
    fprop, dgrad: the communicators of the passes, or None.
    summed: without sequence_parallel, the context whose matmul_all_reduce computes y; None sums y by torch.distributed.
    """

    group: object
    rows: tuple[int, ...]
    sequence_parallel: bool
    fprop: CommOverlapCore | None = None
    dgrad: CommOverlapCore | None = None
    summed: object = None

    def forward(self, x, w, bias):
        if self.fprop is not None:
            return self.fprop.matmul_reduce_scatter(x, w, rows=self.rows)
        if self.sequence_parallel:
            return self._reduce_scatter(x @ w.t())
        return _all_reduce(x @ w.t(), self.group) if self.summed is None else matmul_all_reduce(x, w, ctx=self.summed)

    def backward(self, dy, x, w, need_x, dw):
        if not self.sequence_parallel:
            gathered = dy
        elif self.dgrad is not None and need_x:
            at_once = dw is not None and dw.store is None  # dw is computed at once, so rows may stay in the workspace
            wanted = "borrowed" if at_once else dw is not None
            dx, gathered = self.dgrad.all_gather_matmul(dy, w.t(), rows=self.rows, gathered=wanted)
            return dx, None if dw is None else dw(gathered, x)
        else:
            gathered = self._gather(dy)
        return gathered @ w if need_x else None, None if dw is None else dw(gathered, x)

    def _gather(self, dy):
        comm = self.fprop or self.dgrad
        return _gather(dy, self.group) if comm is None else comm.all_gather(dy, self.rows)

    def _reduce_scatter(self, y):
        return _reduce_scatter(y, self.group) if self.dgrad is None else self.dgrad.reduce_scatter(y, self.rows)


class Linear(torch.autograd.Function):
    """x @ weight.T + bias of two-dimensional tensors, by one of the dataflows above."""

    @staticmethod
    def forward(ctx, x, weight, bias, flow, wgrad: WeightGradient):
        ctx.save_for_backward(x, weight)
        ctx.flow, ctx.wgrad = flow, wgrad
        return flow.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        dx, dw = ctx.flow.backward(dy, x, weight, need_x, ctx.wgrad if need_w else None)
        return dx, dw, dy.sum(0) if need_bias else None, None, None


class Gather(torch.autograd.Function):
    """All-gathers rows. Its backward is a reduce-scatter: the sum over ranks, of which each rank gets its own rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return _reduce_scatter(dx.contiguous(), ctx.group), None


def gather_along_first_dim(inp: torch.Tensor, process_group, async_op: bool = False, quantizer=None):
    """All-gather by torch.distributed: (every rank's rows, None or the async work to wait for).

    All ranks must have the same number of rows. Raises ValueError for a quantizer, which is for fp8.
    """
    if quantizer is not None:
        raise ValueError("gather_along_first_dim: quantizer is for fp8, which is not supported; leave it out")
    group_of("gather_along_first_dim: process_group", dist.group.WORLD if process_group is None else process_group)
    if not isinstance(inp, torch.Tensor) or inp.dim() == 0:
        raise TypeError(f"gather_along_first_dim: inp={inp!r} must be a tensor with rows")
    out = inp.new_empty(inp.shape[0] * dist.get_world_size(process_group), *inp.shape[1:])
    return out, all_gather_single(out, inp.contiguous(), group=process_group, async_op=async_op)


def _gather(x, group):
    return gather_along_first_dim(x, group)[0]


def _reduce_scatter(x, group):
    size = dist.get_world_size(group)
    if x.shape[0] % size:
        raise ValueError(
            f"{x.shape[0]} tokens don't divide by {size} ranks, which only layers with overlap allow; set their ub_ "
            f"options, or pad; split_rows({x.shape[0]}, {size}) is {split_rows(x.shape[0], size)}"
        )
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


def _all_reduce(x, group):
    dist.all_reduce(x, group=group)
    return x
