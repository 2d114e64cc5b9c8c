"""The communication in the three passes of one linear layer: y = x @ w.T, with the weight split over R ranks.

s tokens over all ranks, sequence parallel outside the layer: each rank has s/R of them.  K in-features, N out-features.

    column    w_shard_n [N/R, K]
      fprop     x [s/R, K]    all-gather of x inside the GEMM               y  [s, N/R]
      dgrad     dy [s, N/R]   bulk: a local GEMM computes the partial dx,
                              with the all-gather of x beside it
                              else: reduce-scatter of dx inside the GEMM,
                              with the all-gather of x (for wgrad) beside   dx [s/R, K]
      wgrad     dy.T @ x      bulk: a local GEMM, with the reduce-scatter
                              of the partial dx beside it
    row       w_shard_k [N, K/R]
      fprop     x [s, K/R]    reduce-scatter of y inside the GEMM           y  [s/R, N]
      dgrad     dy [s/R, N]   all-gather of dy inside the GEMM              dx [s, K/R]
      wgrad     dy.T @ x      a local GEMM with the dy that dgrad gathered;
                              no communication

Without sequence parallelism, a column layer sums dx over the ranks and a row layer sums y.

Those layers use it whose frameworks want a weight's gradient elsewhere than in `.grad`, added to `main_grad` or
computed after backward, or who overlap a collective with the GEMM beside it. Who moves the data is a communicator. It
has, all of two-dimensional tensors, with `rows` each rank's number of tokens:

    all_gather_matmul(x, w, bias, rows=, gathered=)   (y, x gathered or None); "borrowed": valid until the next call
    matmul_reduce_scatter(x, w, rows=)                this rank's rows of the sum over ranks
    matmul_all_reduce(x, w)                           the sum over ranks
    all_gather(x, rows), reduce_scatter(x, rows)      on their own

and if it may be the dgrad or wgrad of a column layer (as those of Userbuffers are):

    reduces_dgrad                                     whether dx is reduced inside its GEMM
    beside(collective, x, rows, out)                  a block whose GEMMs run beside one of its two collectives
    matmul_reduce_scatter(..., beside=True)           such a GEMM
    multiply(x, w, out_dtype)                         one that communicates nothing

In FP8 x, w and dy are Float8Tensors, with a scale for all that a rank has of each. FP8 is what is gathered, and sums
are of the dtype of x. The weight's gradient is a product in that dtype, of what has travelled as it was quantized.
"""

import contextlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

import tkernels
from tkernels.comm.contexts import find_context
from tkernels.layers.grad_hooks import grad_ready_hooks
from tkernels.layers.tensor_parallel.activations import activated_gradient
from tkernels.layers.tensor_parallel.float8 import Float8Tensor, operands, values
from tkernels.layers.tensor_parallel.functions import as_operands


def product(x, w, out_dtype=None, out: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T on this rank, rounded once to out_dtype: x's dtype or float32. out: receives the result.

    By torch.mm, or of Float8Tensors by tkernels.matmul.
    """
    if isinstance(x, Float8Tensor):
        x, w, options = operands(x, w)
        return tkernels.matmul(x, w, out=out, **options | ({} if out_dtype is None else {"out_dtype": out_dtype}))
    if out_dtype in (None, x.dtype):
        return torch.mm(x, w.t(), out=out)
    if x.device.type == "cuda":
        return torch.mm(x, w.t(), out_dtype=out_dtype, out=out)
    return torch.mm(x.to(out_dtype), w.t().to(out_dtype), out=out)


def with_bias(x, w, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T + bias on this rank, in x's dtype."""
    x, w, options = operands(x, w)
    return tkernels.matmul(x, w, bias, **options) if options else functional.linear(x, w, bias)


class Unfused:
    """A communicator whose collectives come before or after their GEMMs.

    moves: what runs them: all_gather(x, rows), reduce_scatter(x, rows), all_reduce(x).
    """

    def __init__(self, moves):
        self.all_gather, self.reduce_scatter = moves.all_gather, moves.reduce_scatter
        self._moves = moves

    def all_gather_matmul(self, x, w, bias=None, *, rows, gathered=False):
        whole = self.all_gather(x, rows)
        return with_bias(whole, w, bias), whole

    def matmul_reduce_scatter(self, x, w, *, rows):
        return self.reduce_scatter(with_bias(x, w), rows)

    def matmul_all_reduce(self, x, w):
        return self._moves.all_reduce(with_bias(x, w))


class Fused:
    """A communicator by this library's operations, over the context of that name."""

    def __init__(self, context: str):
        self._context = context

    def all_gather_matmul(self, x, w, bias=None, *, rows, gathered=False):
        y = tkernels.all_gather_matmul(x, w, bias, return_gathered=gathered, rows=rows, ctx=self._ctx)
        return y if gathered else (y, None)

    def matmul_reduce_scatter(self, x, w, *, rows):
        return tkernels.matmul_reduce_scatter(x, w, rows=rows, ctx=self._ctx)

    def matmul_all_reduce(self, x, w):
        x, w, options = operands(x, w)
        return tkernels.matmul_all_reduce(x, w, **options, ctx=self._ctx)

    def all_gather(self, x, rows):
        return tkernels.all_gather(x, rows=rows, ctx=self._ctx)

    def reduce_scatter(self, x, rows):
        return tkernels.reduce_scatter(x, rows=rows, ctx=self._ctx)

    @property
    def _ctx(self):
        return find_context(self._context)


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
        """dy.T @ x [N, K], or the value that autograd receives in its place."""
        if self.store is not None:
            if (hooks := grad_ready_hooks(self.weight)) is not None:
                hooks.defer(self.weight)
            self.store.append(partial(self._deferred, dy, x))
            return None
        return self._fused(dy, x, multiply) if self.fuse else multiply(values(dy).t(), values(x).t())

    def _fused(self, dy, x, multiply=product):
        weight = self.weight
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise ValueError(
                f"fuse_wgrad_accumulation (Megatron: gradient_accumulation_fusion) adds to weight.main_grad, but the "
                f"weight {tuple(weight.shape)} has none"
            )
        hooks = grad_ready_hooks(weight)
        with contextlib.nullcontext() if hooks is None else hooks.writing(weight):
            dw = multiply(values(dy).t(), values(x).t(), main_grad.dtype)
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
            placeholder = self._fused(dy, x)
            if weight.grad is None:  # which Megatron's DDP wants to find when backward_dw calls its hook
                weight.grad = placeholder
            return
        dw = product(values(dy).t(), values(x).t()).to(weight.dtype)
        weight.grad = dw if weight.grad is None else weight.grad.add_(dw)


class DeferringModule(nn.Module):
    """A module whose weight gradients may be left to `backward_dw`: where `wgrad_store` is a list, not None."""

    wgrad_store = None

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are deferred to backward_dw."""
        return self.wgrad_store is not None

    def backward_dw(self):
        """Compute the weight gradients that backward deferred, in backward's order, on the current stream."""
        if self.wgrad_store is None:
            return
        deferred, self.wgrad_store[:] = list(self.wgrad_store), []
        with torch.no_grad():
            for compute in deferred:
                compute()
        for hook in vars(self).get("_wgrad_hooks", ()):
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook):
        """Call `hook()` at the end of each backward_dw.

        For Megatron's DDP: autograd's hooks run too early for weights with the attribute skip_backward_post_hook.
        """
        vars(self).setdefault("_wgrad_hooks", []).append(hook)


class Local:
    """The flow on a single rank, without communication."""

    def forward(self, x, w, bias):
        return with_bias(x, w, bias), x

    def backward(self, dy, x, wt, need_x, dw):
        return with_bias(dy, wt) if need_x else None, None if dw is None else dw(dy, x)


@dataclass(frozen=True)
class Column:
    """The flow of a column-parallel layer.

    sequence_parallel: x and dx are split over the ranks by `rows`, every rank's number of tokens; None: equal parts.
    fprop, dgrad, wgrad: the communicators of the passes. None: `other` moves the same data.
    keep: save the gathered x for the weight's gradient, instead of gathering it again.
    """

    sequence_parallel: bool
    rows: tuple[int, ...] | None
    other: object
    fprop: object = None
    dgrad: object = None
    wgrad: object = None
    keep: bool = False

    def forward(self, x, w, bias):
        if not self.sequence_parallel:
            return with_bias(x, w, bias), x
        fprop = self.fprop or self.other
        y, gathered = fprop.all_gather_matmul(x, w, bias, rows=self.rows, gathered=self.keep)
        return y, gathered if self.keep else x

    def backward(self, dy, x, wt, need_x, dw):
        other, rows, part = self.other, self.rows, None
        if not self.sequence_parallel:
            return other.matmul_all_reduce(dy, wt) if need_x else None, dw and dw(dy, x)
        if dw is None:
            return (self.dgrad or other).matmul_reduce_scatter(dy, wt, rows=rows) if need_x else None, None
        if self.dgrad is None or not need_x:
            gathered = x if self.keep else other.all_gather(x, rows)
            if not need_x or self.wgrad is None:
                return other.matmul_reduce_scatter(dy, wt, rows=rows) if need_x else None, dw(dy, gathered)
            part = with_bias(dy, wt)
        else:
            gathered = x.new_empty(sum(rows), x.shape[1])
            with self.dgrad.beside(self.dgrad.all_gather, x, rows, gathered):
                if self.dgrad.reduces_dgrad:
                    dx = self.dgrad.matmul_reduce_scatter(dy, wt, rows=rows, beside=True)
                else:
                    part = self.dgrad.multiply(dy, wt)
            if part is None or self.wgrad is None:
                return dx if part is None else other.reduce_scatter(part, rows), dw(dy, gathered)
        dx = part.new_empty(x.shape)
        with self.wgrad.beside(self.wgrad.reduce_scatter, part, rows, dx):
            return dx, dw(dy, gathered, self.wgrad.multiply)


@dataclass(frozen=True)
class Row:
    """The flow of a row-parallel layer. Its fields are Column's; wgrad needs no communicator."""

    sequence_parallel: bool
    rows: tuple[int, ...] | None
    other: object
    fprop: object = None
    dgrad: object = None

    def forward(self, x, w, bias):
        if not self.sequence_parallel:
            return self.other.matmul_all_reduce(x, w), x
        return (self.fprop or self.other).matmul_reduce_scatter(x, w, rows=self.rows), x

    def backward(self, dy, x, wt, need_x, dw):
        gathered, dx = dy, None
        if self.sequence_parallel and need_x:
            at_once = dw is not None and dw.store is None  # dw is computed at once, so rows may stay in the workspace
            wanted = "borrowed" if at_once else dw is not None
            comm = self.dgrad or self.other
            dx, gathered = comm.all_gather_matmul(dy, wt, rows=self.rows, gathered=wanted)
        elif self.sequence_parallel and dw is not None:
            gathered = self.other.all_gather(dy, self.rows)
        elif need_x:
            dx = with_bias(dy, wt)
        return dx, None if dw is None else dw(gathered, x)


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias of two-dimensional tensors, by one of the dataflows above."""

    @staticmethod
    def forward(ctx, x, weight, bias, flow, wgrad: WeightGradient, float8, activation):
        w, ctx.dtype, before = weight, x.dtype, x if activation else None
        if float8 is not None:
            x, w = float8.input(x, activation), float8.weight(weight)
        y, x = flow.forward(x, w, bias)
        ctx.save_for_backward(weight, before, *((x.data, x.scale) if float8 else (x,)))
        ctx.flow, ctx.wgrad, ctx.float8, ctx.activation = flow, wgrad, float8, activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (weight, before, *x), float8 = ctx.saved_tensors, ctx.float8
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        own = dy = dy.contiguous()
        if float8 is None:
            (x,), wt = x, weight.t()
        else:
            x = Float8Tensor(*x, ctx.dtype)
            dy, wt = float8.gradient(dy), float8.weight(weight, transposed=True) if need_x else None
        dx, dw = ctx.flow.backward(dy, x, wt, need_x, ctx.wgrad if need_w else None)
        dw = dw if float8 is None or dw is None else dw.to(weight.dtype)
        dx = dx if before is None or dx is None else activated_gradient(dx, before, ctx.activation)
        return dx, dw, own.sum(0) if need_bias else None, None, None, None, None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, flow, wgrad: WeightGradient, float8=None,
    activation: str | None = None,
):  # fmt: skip
    """x [tokens, ..., K] -> [tokens, ..., N] by a flow, in autocast's dtype if autocast is on. Collective as the flow.

    bias: added by a column layer. A row layer's is the caller's to add, after the sum over ranks.
    float8: quantizes operands to Float8Tensors: input(x, activation), weight(w, transposed=), gradient(dy). Then the
        weight is quantized from what it is, whatever its dtype.
    activation: of x, before its product, which is one of float8; K are the features that it gives.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "this layer computes a weight's gradient where its options say, which torch.func (grad, vmap and others) "
            "can't follow; use backward, or ColumnParallelLinear and RowParallelLinear of tkernels.layers, which it can"
        )
    if float8 is None:
        x, weight, bias = as_operands(x.device.type, x, weight, bias)
        if x.dtype != weight.dtype:
            raise TypeError(
                f"the input is {x.dtype}, but the weight {weight.dtype}; convert one of them, or use torch.autocast"
            )
    else:
        x, bias = as_operands(x.device.type, x, bias)
    inner = x.shape[1:-1]
    y = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, flow, wgrad, float8, activation)
    return y.view(y.shape[0] // inner.numel(), *inner, y.shape[1])
