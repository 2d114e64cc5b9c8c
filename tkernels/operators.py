"""The operations as torch operators, with fake implementations and autograd, and the public functions that call them.

Torch operators take plain values, so a context is passed by its name. Operators whose name ends in _out write to `out`
and have no gradient; no other operator writes to an argument. The other state that they change, the workspace, belongs
to the context, and no tensor that a caller holds aliases it. When functions call operators: tkernels.dispatch.

Gradients. An entry that names an operation is computed by that operation, with its overlap if it has one:

    operation               dx                                  dw                          dbias
    matmul                  dy @ w                              dy.T @ x                    dy summed
    all_gather_matmul       matmul_reduce_scatter(dy, w.T)      dy.T @ all_gather(x)        dy summed
    matmul_reduce_scatter   all_gather_matmul(dy, w.T)          all_gather(dy).T @ x        all_gather(dy) summed
    matmul_all_reduce       dy @ w                              dy.T @ x                    dy summed
    all_gather              reduce_scatter(dy)
    reduce_scatter          all_gather(dy)
    all_reduce              dy

If both dx and dw of matmul_reduce_scatter are needed, one operator computes them, matmul_reduce_scatter_backward: its
second matmul reads the gathered dy in the workspace, where it arrived and which no result of an operator may alias. It
has no gradient; where dx and dw need one (double backward), they come from two operators.

The result of an all-reduce is one replicated tensor, so its gradient is taken as equal on all ranks (Megatron's
"reduce from the tensor-parallel region"). Backward is collective where the table names a collective: all ranks must
need the same gradients.
"""

import types

import torch

from tkernels.all_gather_matmul import AllGatherMatmul
from tkernels.comm import collectives
from tkernels.comm.arguments import check_out, check_tensors
from tkernels.comm.context import Context, as_context
from tkernels.comm.contexts import find_context
from tkernels.comm.errors import TkernelsError
from tkernels.configs import GemmConfig, OverlapConfig
from tkernels.dispatch import PLAIN, apply_transformed, define, wants_gradient
from tkernels.gemm import ACTIVATIONS, activation_reference, check_apart, precision
from tkernels.gemm import matmul as _matmul
from tkernels.matmul_all_reduce import MatmulAllReduce
from tkernels.matmul_reduce_scatter import MatmulReduceScatter

_ops = types.SimpleNamespace()  # the functions of the operators


def _matmul_backward(ctx, dy):
    _refuse_fused_activation("matmul", *ctx.options)
    x, w = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    return dy @ w if need_x else None, dy.t() @ x if need_w else None, dy.sum(0) if need_bias else None, None


_ops.matmul = define(
    "matmul(Tensor x, Tensor w, Tensor? bias, str? activation) -> Tensor",
    _matmul,
    lambda x, w, bias, activation: x.new_empty((x.shape[0], w.shape[0])),
    _matmul_backward,
    saved=2,
)


def _with_unit_stride(matrix: torch.Tensor) -> torch.Tensor:
    # Gradients may arrive expanded (from sum()) or sliced; the kernels need one unit stride.
    return matrix if 1 in matrix.stride() and 0 not in matrix.stride() else matrix.contiguous()


class _Replicated(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, context):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.context = inputs

    @staticmethod
    def backward(ctx, dx):
        return _ops.all_reduce(dx.contiguous(), ctx.context), None


def replicated(x: torch.Tensor, context: str) -> torch.Tensor:
    """Identity on x, equal on all ranks. Each rank uses it for its own result, so its gradient is summed over ranks."""
    return apply_transformed("replicated", _Replicated, x, context) if wants_gradient(x) else x


def _all_gather_matmul_direct(x_shard_m, w, bias, activation, return_gathered, rows, context, path=None):
    options = activation, tuple(rows), None, None, path, precision(x_shard_m.dtype), return_gathered
    return find_context(context).call(AllGatherMatmul(*options), x_shard_m, w, bias, None, None)


def _all_gather_matmul_impl(x_shard_m, *arguments, **options):
    y, gathered = _all_gather_matmul_direct(x_shard_m, *arguments, **options)
    return y, x_shard_m.new_empty(0) if gathered is None else gathered  # the schema returns Tensors, not None


def _all_gather_matmul_fake(x_shard_m, w, bias, activation, return_gathered, rows, context, path=None):
    M = sum(rows)
    gathered = x_shard_m.new_empty((M, x_shard_m.shape[1]) if return_gathered else (0,))
    return x_shard_m.new_empty((M, w.shape[0])), gathered


def _all_gather_matmul_setup(ctx, inputs, output):
    x_shard_m, w, _, *ctx.options = inputs
    return_gathered = inputs[4]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w, output[1] if return_gathered else x_shard_m)


def _all_gather_matmul_backward(ctx, dy, dgathered):
    activation, return_gathered, rows, context, path = ctx.options
    _refuse_fused_activation("all_gather_matmul", activation)
    w, x = ctx.saved_tensors
    dx = dw = dbias = None
    if dy is not None:
        dy = _with_unit_stride(dy)
        if ctx.needs_input_grad[1]:
            dw = dy.t() @ (x if return_gathered else _ops.all_gather(x, rows, context))
        # Unless the graph is retained, free the gathered rows before dx takes memory.
        del x
        ctx.maybe_clear_saved_tensors()
        if ctx.needs_input_grad[0]:
            dx = _ops.matmul_reduce_scatter(dy, w.t(), None, None, rows, context, path)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(0)
    if dgathered is not None and return_gathered and ctx.needs_input_grad[0]:
        from_gathered = _ops.reduce_scatter(dgathered.contiguous(), rows, context)
        dx = from_gathered if dx is None else dx + from_gathered
    return dx, dw, dbias, None, None, None, None, None


_ops.all_gather_matmul = define(
    "all_gather_matmul(Tensor x_shard_m, Tensor w, Tensor? bias, str? activation, bool return_gathered, SymInt[] rows,"
    " str context, str? path=None) -> (Tensor, Tensor)",
    _all_gather_matmul_impl,
    _all_gather_matmul_fake,
    _all_gather_matmul_backward,
    setup_context=_all_gather_matmul_setup,
    direct=_all_gather_matmul_direct,
)


def _matmul_reduce_scatter_impl(x_shard_k, w_shard_k, bias, activation, rows, context, path=None):
    options = activation, tuple(rows), None, None, path, precision(x_shard_k.dtype)
    return find_context(context).call(MatmulReduceScatter(*options), x_shard_k, w_shard_k, bias, None)


def _matmul_reduce_scatter_fake(x_shard_k, w_shard_k, bias, activation, rows, context, path=None):
    return x_shard_k.new_empty((rows[find_context(context).rank], w_shard_k.shape[0]))


def _matmul_reduce_scatter_backward(ctx, dy):
    activation, rows, context, path = ctx.options
    _refuse_fused_activation("matmul_reduce_scatter", activation)
    x, w = ctx.saved_tensors
    dy = dy.contiguous()
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dx = dw = dbias = None
    if need_x and need_w and not wants_gradient(dy, x, w):
        dx, dw, dbias = _ops.matmul_reduce_scatter_backward(dy, x, w, need_bias, rows, context, path)
        return dx, dw, dbias if need_bias else None, None, None, None, None
    if need_x:
        # The matmul for dx gathers dy; dw and dbias reuse the gathered rows.
        dx, gathered = _ops.all_gather_matmul(dy, w.t(), None, None, need_w or need_bias, rows, context, path)
    elif need_w or need_bias:
        gathered = _ops.all_gather(dy, rows, context)
    if need_w:
        dw = gathered.t() @ x
    if need_bias:
        dbias = gathered.sum(0)
    return dx, dw, dbias, None, None, None, None


_ops.matmul_reduce_scatter = define(
    "matmul_reduce_scatter(Tensor x_shard_k, Tensor w_shard_k, Tensor? bias, str? activation, SymInt[] rows,"
    " str context, str? path=None) -> Tensor",
    _matmul_reduce_scatter_impl,
    _matmul_reduce_scatter_fake,
    _matmul_reduce_scatter_backward,
    saved=2,
)


def _matmul_reduce_scatter_backward_impl(dy_shard_m, x_shard_k, w_shard_k, need_bias, rows, context, path=None):
    dx, gathered = _all_gather_matmul_direct(dy_shard_m, w_shard_k.t(), None, None, "borrowed", rows, context, path)
    dbias = gathered.sum(0) if need_bias else gathered.new_empty(0)
    return dx, gathered.t() @ x_shard_k, dbias


def _matmul_reduce_scatter_backward_fake(dy_shard_m, x_shard_k, w_shard_k, need_bias, rows, context, path=None):
    N, K = w_shard_k.shape
    shapes = (sum(rows), K), (N, K), (N if need_bias else 0,)
    return tuple(dy_shard_m.new_empty(shape) for shape in shapes)


_ops.matmul_reduce_scatter_backward = define(
    "matmul_reduce_scatter_backward(Tensor dy_shard_m, Tensor x_shard_k, Tensor w_shard_k, bool need_bias,"
    " SymInt[] rows, str context, str? path=None) -> (Tensor, Tensor, Tensor)",
    _matmul_reduce_scatter_backward_impl,
    _matmul_reduce_scatter_backward_fake,
)


def _matmul_all_reduce_impl(x_shard_k, w_shard_k, bias, activation, context, path=None):
    options = activation, None, None, None, path, precision(x_shard_k.dtype)
    return find_context(context).call(MatmulAllReduce(*options), x_shard_k, w_shard_k, bias, None)


def _matmul_all_reduce_fake(x_shard_k, w_shard_k, bias, activation, context, path=None):
    return x_shard_k.new_empty((x_shard_k.shape[0], w_shard_k.shape[0]))


def _matmul_all_reduce_backward(ctx, dy):
    activation, context, _ = ctx.options
    _refuse_fused_activation("matmul_all_reduce", activation)
    x, w = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dbias = dy.sum(0) if need_bias else None  # equal on all ranks, as dy is
    dy = replicated(dy, context)
    dx = dy @ w if need_x else None
    dw = dy.t() @ x if need_w else None
    return dx, dw, dbias, None, None, None


_ops.matmul_all_reduce = define(
    "matmul_all_reduce(Tensor x_shard_k, Tensor w_shard_k, Tensor? bias, str? activation, str context,"
    " str? path=None) -> Tensor",
    _matmul_all_reduce_impl,
    _matmul_all_reduce_fake,
    _matmul_all_reduce_backward,
    saved=2,
)


_ops.all_gather = define(
    "all_gather(Tensor x_shard_m, SymInt[] rows, str context) -> Tensor",
    lambda x, rows, context: collectives.all_gather(find_context(context), x, tuple(rows)),
    lambda x, rows, context: x.new_empty((sum(rows), *x.shape[1:])),
    lambda ctx, dy: (_ops.reduce_scatter(dy.contiguous(), *ctx.options), None, None),
)
_ops.reduce_scatter = define(
    "reduce_scatter(Tensor x, SymInt[] rows, str context) -> Tensor",
    lambda x, rows, context: collectives.reduce_scatter(find_context(context), x, tuple(rows)),
    lambda x, rows, context: x.new_empty((rows[find_context(context).rank], *x.shape[1:])),
    lambda ctx, dy: (_ops.all_gather(dy.contiguous(), *ctx.options), None, None),
)
_ops.all_reduce = define(
    "all_reduce(Tensor x, str context) -> Tensor",
    lambda x, context: collectives.all_reduce(find_context(context), x),
    lambda x, context: torch.empty_like(x, memory_format=torch.contiguous_format),
    lambda ctx, dy: (replicated(dy, *ctx.options), None),
)


_ops.all_gather_out = define(
    "all_gather_out(Tensor x, SymInt[] rows, str context, *, Tensor(a!) out) -> ()",
    lambda x, rows, context, *, out: _discard(collectives.all_gather(find_context(context), x, tuple(rows), out)),
    lambda x, rows, context, *, out: check_out("all_gather", out, (sum(rows), *x.shape[1:]), x.dtype, x.device),
)
_ops.reduce_scatter_out = define(
    "reduce_scatter_out(Tensor x, SymInt[] rows, str context, *, Tensor(a!) out) -> ()",
    lambda x, rows, context, *, out: _discard(collectives.reduce_scatter(find_context(context), x, tuple(rows), out)),
    lambda x, rows, context, *, out: check_out(
        "reduce_scatter", out, (rows[find_context(context).rank], *x.shape[1:]), x.dtype, x.device
    ),
)
_ops.all_reduce_out = define(
    "all_reduce_out(Tensor x, str context, *, Tensor(a!) out) -> ()",
    lambda x, context, *, out: _discard(collectives.all_reduce(find_context(context), x, out)),
    lambda x, context, *, out: check_out("all_reduce", out, tuple(x.shape), x.dtype, x.device),
)


def _discard(_: torch.Tensor):
    """Return None instead of `out`: an operator's result must not alias its argument."""


def _into(name: str, out: torch.Tensor, x: torch.Tensor, *arguments) -> torch.Tensor:
    if not PLAIN.issuperset((type(x), type(out))):
        check_tensors(name, x=x, out=out)
    if wants_gradient(x, out):
        raise ValueError(f"{name}: out= has no gradient; leave it out, or call under torch.no_grad()")
    getattr(_ops, f"{name}_out")(x, *arguments, out=out)
    return out


def _refuse_fused_activation(name: str, activation: str | None):
    # The public functions apply the activation outside the operator when a gradient is needed.
    if activation is not None:
        raise TkernelsError(
            f"torch.ops.tkernels.{name} has no gradient through a fused activation ({activation!r}); call "
            f"tkernels.{name}, which keeps what backward needs"
        )


def _split_activation(activation: str | None, *operands: torch.Tensor | None) -> tuple[str | None, str | None]:
    """(fused, separate): the activation is fused unless backward will need its input."""
    if activation is None:
        return None, None
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; use {', '.join(map(str, ACTIVATIONS))}")
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]  # the operator refuses what is none
    return (None, activation) if wants_gradient(*tensors) else (activation, None)


def _check_options(name: str, operands: dict, out: torch.Tensor | None, gathered: torch.Tensor | None = None):
    """Check a call with options that torch's operators have no words for, and that therefore has no gradient.

    operands: by name. out, gathered: the tensors that it writes to.
    """
    optional = {"bias": operands["bias"], "out": out, "return_gathered": gathered}
    given = {label: each for label, each in optional.items() if each is not None}
    check_tensors(name, **{label: each for label, each in operands.items() if label != "bias"}, **given)
    if wants_gradient(*operands.values(), out, gathered):
        raise ValueError(
            f"{name}: out=, out_dtype=, wire_dtype=, config=, and return_gathered= of a tensor or 'borrowed' have no "
            f"gradient; leave them out, or call under torch.no_grad()"
        )
    check_apart(name, out, **operands)


def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """activation(x @ w.T + bias) on this rank alone, not collective: x [M, K], w [N, K], bias [N] -> [M, N].

    fp32, fp16, bf16; accumulated in fp32. w may be the view `w.t()` of a [K, N] matrix. activation: as in
    all_gather_matmul; out and out_dtype too. config: the tiles of our kernel. None: whichever is faster by the model
    multiplies, our kernel or torch; `tkernels.explain("matmul", M, N, K)` says which. Raises ValueError or TypeError.
    """
    if out is not None or out_dtype is not None or config is not None:
        _check_options("matmul", {"x": x, "w": w, "bias": bias}, out)
        return _matmul(x, w, bias, activation, out=out, out_dtype=out_dtype, config=config)
    fused, separate = _split_activation(activation, x, w, bias)
    return activation_reference(_ops.matmul(x, w, bias, fused), separate)


def _num_rows(name: str, x: torch.Tensor) -> int:
    if not isinstance(x, torch.Tensor):
        check_tensors(name, x=x)
    if x.dim() == 0:
        raise ValueError(f"{name}: takes rows, but the tensor is a scalar")
    return x.shape[0]


def all_gather_matmul(
    x_shard_m: torch.Tensor,
    w_shard_n: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    return_gathered: bool | str | torch.Tensor = False,
    *,
    rows: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: OverlapConfig | None = None,
    path: str | None = None,
    ctx: Context | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Collective. y_shard_n = activation(all_gather(x_shard_m) @ w_shard_n.T + bias).

    x_shard_m [M/R, K], w_shard_n [N/R, K], bias [N/R] -> y_shard_n [M, N/R]. x_shard_m is read in place; a copy is made
    only if its rows are not contiguous. N/R may differ from rank to rank and be 0.

    return_gathered: also return x gathered [M, K]; backward then uses it instead of gathering again. A tensor [M, K]
        receives it; x_shard_m may be this rank's rows of that tensor. "borrowed": it may be left in the workspace,
        which the next call on this stream overwrites.
    rows: every rank's row count where they differ, for example split_rows(M, R). None: all have as many as this rank.
    activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu"; fused unless a gradient is needed.
    out: a contiguous tensor that shares no memory with the operands, to fill and return.
    out_dtype: of y, the operands' dtype or float32.
    config: the tiles and the way of sending, see OverlapConfig. None: the tuned one, else the model's choice.
    path: "fused", or "plain" for a collective and torch.mm one after the other, which is faster for few rows and in
        fp32. None: the choice of `tkernels.explain`. All ranks must pass the same; backward takes the same path.
    fp32, fp16, bf16; accumulated in fp32. w_shard_n may be the view `w.t()` of a [K, N/R] matrix. A call with out,
    out_dtype, config, or a return_gathered that is no bool has no gradient.
    Raises ValueError or TypeError before the first signal, HeapExhaustedError if the context's heap has no room for a
    larger call, WaitTimeoutError if a peer did not answer in time.
    """
    ctx = as_context(ctx, "all_gather_matmul: ctx")
    rows = collectives.check_rows("all_gather_matmul", ctx, rows, own=_num_rows("all_gather_matmul", x_shard_m))
    if out is None and out_dtype is None and config is None and not isinstance(return_gathered, (str, torch.Tensor)):
        fused, separate = _split_activation(activation, x_shard_m, w_shard_n, bias)
        y, gathered = _ops.all_gather_matmul(x_shard_m, w_shard_n, bias, fused, return_gathered, rows, ctx.name, path)
        y = activation_reference(y, separate)
        return (y, gathered) if return_gathered else y
    into = return_gathered if isinstance(return_gathered, torch.Tensor) else None
    operands = {"x_shard_m": x_shard_m, "w_shard_n": w_shard_n, "bias": bias}
    _check_options("all_gather_matmul", operands, out, into)
    check_apart("all_gather_matmul", out, return_gathered=into)
    check_apart("all_gather_matmul", into, "return_gathered", w_shard_n=w_shard_n, bias=bias)
    wanted = into is not None or return_gathered
    call = AllGatherMatmul(activation, rows, out_dtype, config, path, precision(x_shard_m.dtype), wanted)
    y, gathered = ctx.call(call, *operands.values(), out, into)
    return (y, gathered) if wanted else y


def matmul_reduce_scatter(
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    rows: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    config: OverlapConfig | None = None,
    path: str | None = None,
    ctx: Context | None = None,
) -> torch.Tensor:
    """Collective. This rank's rows of activation(sum over ranks of x_shard_k @ w_shard_k.T + bias).

    x_shard_k [M, K/R], w_shard_k [N, K/R], bias [N] -> y_shard_m [M/R, N]. Bias is added once, after the sum. K/R may
    differ from rank to rank and be 0.

    rows: every rank's row count; needed where M does not divide by R.
    wire_dtype: of the partial sums that are sent, the operands' dtype or float32. A call with it has no gradient.
    activation, out, out_dtype, config, path, dtypes, views of w_shard_k, exceptions: as all_gather_matmul.
    """
    ctx = as_context(ctx, "matmul_reduce_scatter: ctx")
    total = _num_rows("matmul_reduce_scatter", x_shard_k)
    rows = collectives.check_rows("matmul_reduce_scatter", ctx, rows, total=total)
    if out is None and out_dtype is None and wire_dtype is None and config is None:
        fused, separate = _split_activation(activation, x_shard_k, w_shard_k, bias)
        y = _ops.matmul_reduce_scatter(x_shard_k, w_shard_k, bias, fused, rows, ctx.name, path)
        return activation_reference(y, separate)
    operands = {"x_shard_k": x_shard_k, "w_shard_k": w_shard_k, "bias": bias}
    _check_options("matmul_reduce_scatter", operands, out)
    options = activation, rows, out_dtype, config, path, precision(x_shard_k.dtype)
    call = MatmulReduceScatter(*options, wire_dtype=wire_dtype)
    return ctx.call(call, x_shard_k, w_shard_k, bias, out)


def matmul_all_reduce(
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    config: OverlapConfig | None = None,
    path: str | None = None,
    ctx: Context | None = None,
) -> torch.Tensor:
    """Collective. activation(sum over ranks of x_shard_k @ w_shard_k.T + bias), the same bits on every rank.

    x_shard_k [M, K/R], w_shard_k [N, K/R], bias [N] -> y [M, N]. Finished rows are sent in out_dtype.
    All options and exceptions: as matmul_reduce_scatter.
    """
    ctx = as_context(ctx, "matmul_all_reduce: ctx")
    if out_dtype is None and wire_dtype is None and config is None:
        fused, separate = _split_activation(activation, x_shard_k, w_shard_k, bias)
        y = _ops.matmul_all_reduce(x_shard_k, w_shard_k, bias, fused, ctx.name, path)
        return activation_reference(y, separate)
    _check_options("matmul_all_reduce", {"x_shard_k": x_shard_k, "w_shard_k": w_shard_k, "bias": bias}, None)
    options = activation, None, out_dtype, config, path, precision(x_shard_k.dtype)
    call = MatmulAllReduce(*options, wire_dtype=wire_dtype)
    return ctx.call(call, x_shard_k, w_shard_k, bias, None)


def all_gather(
    x_shard_m: torch.Tensor,
    *,
    rows: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
    ctx: Context | None = None,
) -> torch.Tensor:
    """Collective. Every rank's rows: x_shard_m [M/R, ...] -> [M, ...]; any dtype of up to 8 bytes.

    rows, exceptions: as in all_gather_matmul.
    out: a contiguous [M, ...] to fill and return, without a gradient. x_shard_m may be this rank's rows of it.
    """
    ctx = as_context(ctx, "all_gather: ctx")
    rows = collectives.check_rows("all_gather", ctx, rows, own=_num_rows("all_gather", x_shard_m))
    if out is not None:
        return _into("all_gather", out, x_shard_m, rows, ctx.name)
    return _ops.all_gather(x_shard_m, rows, ctx.name)


def reduce_scatter(
    x: torch.Tensor,
    *,
    rows: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
    ctx: Context | None = None,
) -> torch.Tensor:
    """Collective. This rank's rows of the sum over ranks: x [M, ...] -> [M/R, ...]; fp32, fp16, bf16.

    rows: every rank's row count; needed where M does not divide by R. Exceptions: as in all_gather_matmul.
    out: a contiguous [M/R, ...] to fill and return, without a gradient. It may be this rank's rows of x.
    """
    ctx = as_context(ctx, "reduce_scatter: ctx")
    rows = collectives.check_rows("reduce_scatter", ctx, rows, total=_num_rows("reduce_scatter", x))
    if out is not None:
        return _into("reduce_scatter", out, x, rows, ctx.name)
    return _ops.reduce_scatter(x, rows, ctx.name)


def all_reduce(x: torch.Tensor, *, out: torch.Tensor | None = None, ctx: Context | None = None) -> torch.Tensor:
    """Collective. The sum over ranks, in a new tensor of x's shape; fp32, fp16, bf16. The same bits on every rank.

    out: a contiguous tensor like x to fill and return, without a gradient. It may be x.
    Exceptions: as in all_gather_matmul.
    """
    ctx = as_context(ctx, "all_reduce: ctx")
    if out is not None:
        return _into("all_reduce", out, x, ctx.name)
    return _ops.all_reduce(x, ctx.name)


def barrier(*, ctx: Context | None = None):
    """Collective. On the current stream, later work starts only after all ranks have reached the barrier.

    Raises WaitTimeoutError if a rank did not reach it in time.
    """
    as_context(ctx, "barrier: ctx").barrier()
