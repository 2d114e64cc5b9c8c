"""The operations as torch operators, with fake implementations and autograd.

Torch operators take plain values, so a context is passed by its name. Operators whose name ends in _out write to `out`
and have no gradient; no other operator writes to an argument. The other state that they change, the workspace, belongs
to the context, and no tensor that a caller holds aliases it. When the functions in `ops` call operators:
tkernels.dispatch.

Gradients. An entry that names an operation is computed by that operation, with its overlap if it has one:

    operation               dx                                  dw                          dbias
    matmul                  dy @ w                              dy.T @ x                    dy summed
    all_gather_matmul       matmul_reduce_scatter(dy, w.T)      dy.T @ all_gather(x)        dy summed
    all_gather_matmuls      the same of [dy ...], [w ...]       dy.T @ all_gather(x)        dy summed
    matmul_reduce_scatter   all_gather_matmul(dy, w.T)          all_gather(dy).T @ x        all_gather(dy) summed
    matmul_all_reduce       dy @ w                              dy.T @ x                    dy summed
    all_gather              reduce_scatter(dy)
    reduce_scatter          all_gather(dy)
    all_reduce              dy

all_gather_matmuls gathers and reduces once for several weights: dx is one matmul_reduce_scatter of all dy side by side
and all w on top of each other. The two copies take a tenth of that matmul's time, or less; the other way, to add up the
products and then send, gives up its overlap, and rounds each.

If both dx and dw of matmul_reduce_scatter are needed, one operator computes them, matmul_reduce_scatter_backward: its
second matmul reads the gathered dy in the workspace, where it arrived and which no result of an operator may alias. It
has no gradient; where dx and dw need one (double backward), they come from two operators.

Of FP8 operands, which come with x_scale and w_scale, operators have no gradient. Of a result in another dtype, dy is
rounded to the operands' first.

The result of an all-reduce is one replicated tensor, so its gradient is taken as equal on all ranks (Megatron's
"reduce from the tensor-parallel region"). Backward is collective where the table names a collective: all ranks must
need the same gradients.
"""

import types

import torch

from tkernels.all_gather_matmul import AllGatherMatmul, AllGatherMatmuls
from tkernels.comm import collectives
from tkernels.comm.arguments import check_out
from tkernels.comm.contexts import find_context
from tkernels.comm.errors import TkernelsError
from tkernels.configs import FP8, result_dtype
from tkernels.dispatch import (
    PLAIN,
    apply_transformed,
    check_local,
    define,
    register,
    transformed,
    wants_gradient,
    watched,
)
from tkernels.gemm import Scales, check_operands, may_stage, multiply, precision
from tkernels.leading import ROWS_FIRST
from tkernels.matmul_all_reduce import MatmulAllReduce
from tkernels.matmul_reduce_scatter import MatmulReduceScatter
from tkernels.quantize import Quantize, transpose_quantized
from tkernels.quantize import dequantize as _dequantize
from tkernels.quantize import quantize as _quantize
from tkernels.staging import with_unit_stride

ops = types.SimpleNamespace()  # the functions of the operators


def _matmul_backward(ctx, dy, name="matmul", replicas=None):
    """replicas: the name of the context whose ranks all have dy."""
    x, w = ctx.saved_tensors
    dy = _gradient(name, x, dy, ctx.options[0])
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dbias = dy.sum(0) if need_bias else None
    dy = dy if replicas is None else replicated(dy, replicas)
    dx, dw = _product(dy, w) if need_x else None, _product(dy.t(), x) if need_w else None
    return dx, dw, dbias, *_none_of(ctx)


def _matmul_impl(x, w, bias, x_scale, w_scale, activation, out_dtype=None, fast_accum=True):
    options = activation, out_dtype, None, precision(x.dtype, fast_accum)
    return multiply(options, (x, w, bias, None, *Scales.given(x_scale, w_scale)))


def _has_sizes_of_data(tensor: torch.Tensor | None) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # slow to import, and there in a trace

    return tensor is not None and has_free_unbacked_symbols(tensor)


def _product_fake(name, M, x, w, bias, activation, out_dtype=None):
    # Operands of FP8 have no gradient, whose trace would fail in words of its own; sizes of data can't be compared.
    if x.dtype not in FP8 and not any(map(_has_sizes_of_data, (x, w, bias))):
        check_operands(name, x, w, bias, activation, x.device)
    return x.new_empty((M, w.shape[0]), dtype=out_dtype or result_dtype(x.dtype))


def _gathered_fake(M, x_shard_m, return_gathered):
    return x_shard_m.new_empty((M, x_shard_m.shape[1]) if return_gathered else (0,))


ops.matmul = define(
    "matmul(Tensor x, Tensor w, Tensor? bias, Tensor? x_scale, Tensor? w_scale, str? activation,"
    " ScalarType? out_dtype=None, bool fast_accum=True) -> Tensor",
    _matmul_impl,
    lambda x, w, bias, x_scale, w_scale, activation, out_dtype=None, *_: _product_fake(
        "matmul", x.shape[0], x, w, bias, activation, out_dtype
    ),
    _matmul_backward,
    saved=2,
)


def _none_of(ctx) -> list[None]:
    """The gradients of the scales and of the options."""
    return [None] * (2 + len(ctx.options))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b on this rank, of a gradient: by torch, or by `matmul` where TMA can't feed it to tensor cores as it lies.

    Autocast, where backward runs under it, rounds no operands, as it rounds none of any operator here.
    """
    if transformed() or not PLAIN.issuperset((type(a), type(b))) or not may_stage(a, b):
        if a.is_meta or not torch.is_autocast_enabled(a.device.type):
            return a @ b
        with torch.autocast(a.device.type, enabled=False):
            return a @ b
    return ops.matmul(a, b.t(), None, None, None, None)


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
        return ops.all_reduce(dx.contiguous(), ctx.context), None


def replicated(x: torch.Tensor, context: str) -> torch.Tensor:
    """Identity on x, equal on all ranks. Each rank uses it for its own result, so its gradient is summed over ranks."""
    return apply_transformed("replicated", _Replicated, x, context) if wants_gradient(x) else x


def _all_gather_matmul_direct(
    x_shard_m, w, bias, x_scale, w_scale, activation, return_gathered, rows, context, path=None, out_dtype=None,
    fast_accum=True, leading=ROWS_FIRST,
):  # fmt: skip
    options = activation, tuple(rows), out_dtype, None, path, precision(x_shard_m.dtype, fast_accum), return_gathered
    call, scales = AllGatherMatmul(*options, leading=tuple(leading)), Scales.given(x_scale, w_scale)
    y, gathered, *scales = find_context(context).call(call, x_shard_m, w, bias, None, None, *scales)
    return y, gathered, scales[0] if scales else None


def _all_gather_matmul_impl(x_shard_m, *arguments, **options):
    y, gathered, scales = _all_gather_matmul_direct(x_shard_m, *arguments, **options)
    # the schema returns Tensors, not None
    gathered = x_shard_m.new_empty(0) if gathered is None else gathered
    return y, gathered, x_shard_m.new_empty(0, dtype=torch.float32) if scales is None else scales


def _all_gather_matmul_fake(
    x_shard_m, w, bias, x_scale, w_scale, activation, return_gathered, rows, context, path=None, out_dtype=None, *_
):  # fmt: skip
    M = sum(rows)
    scales = (M, 1) if return_gathered and x_scale is not None else (0,)
    y = _product_fake("all_gather_matmul", M, x_shard_m, w, bias, activation, out_dtype)
    gathered = _gathered_fake(M, x_shard_m, return_gathered)
    return y, gathered, x_shard_m.new_empty(scales, dtype=torch.float32)


def _all_gather_matmul_setup(ctx, inputs, output):
    x_shard_m, w, _, _, _, *ctx.options = inputs
    _, return_gathered, *_ = ctx.options
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if return_gathered else x_shard_m, w)


def _all_gather_matmul_backward(ctx, dy, dgathered, _):
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    options = "all_gather_matmul", [True], *ctx.options[:5]
    dx, (dw,), (dbias,) = _gradients_of_gathered(ctx, options, need_x, [need_w], [need_bias], [dy], dgathered)
    return dx, dw, dbias, *_none_of(ctx)


def _gradients_of_gathered(ctx, options, need_x, need_ws, need_biases, dys, dgathered):
    """dx, and lists of dw and of dbias, of one gather and its products.

    options: the operator's name, whether each product has a bias, then its options up to path. need_biases: of those.
    """
    name, biased, activation, return_gathered, rows, context, path = options
    x, *ws = ctx.saved_tensors
    dys = [_gradient(name, x, dy, activation) for dy in dys]
    dys = [None if dy is None else with_unit_stride(dy) for dy in dys]  # once: two products read each
    dx, dws = None, [need and dy is not None for need, dy in zip(need_ws, dys, strict=True)]
    x = ops.all_gather(x, rows, context) if any(dws) and not return_gathered else x
    dws = [_product(dy.t(), x) if wanted else None for wanted, dy in zip(dws, dys, strict=True)]
    # Unless the graph is retained, free the gathered rows before dx takes memory.
    del x
    ctx.maybe_clear_saved_tensors()
    pairs = [(dy, w) for dy, w in zip(dys, ws, strict=True) if dy is not None]
    if need_x and pairs:
        dy, w = pairs[0]
        if len(pairs) > 1:
            dy, w = torch.cat([dy for dy, _ in pairs], 1), torch.cat([w for _, w in pairs])
        dx = ops.matmul_reduce_scatter(dy, w.t(), None, None, None, None, rows, context, path)
    if need_x and dgathered is not None and return_gathered:
        from_gathered = ops.reduce_scatter(dgathered.contiguous(), rows, context)
        dx = from_gathered if dx is None else dx + from_gathered
    with_bias = [dy for dy, each in zip(dys, biased, strict=True) if each]
    dbiases = [dy.sum(0) if need and dy is not None else None for need, dy in zip(need_biases, with_bias, strict=True)]
    return dx, dws, dbiases


ops.all_gather_matmul = define(
    "all_gather_matmul(Tensor x_shard_m, Tensor w, Tensor? bias, Tensor? x_scale, Tensor? w_scale, str? activation,"
    " bool return_gathered, SymInt[] rows, str context, str? path=None, ScalarType? out_dtype=None,"
    " bool fast_accum=True, SymInt[] leading=[0]) -> (Tensor, Tensor, Tensor)",
    _all_gather_matmul_impl,
    _all_gather_matmul_fake,
    _all_gather_matmul_backward,
    setup_context=_all_gather_matmul_setup,
    direct=_all_gather_matmul_direct,
)


def _all_gather_matmuls_direct(
    x_shard_m, ws, biases, biased, activation, return_gathered, rows, context, path, leading
):  # fmt: skip
    given = iter(biases)
    biases = [next(given) if each else None for each in biased]
    options = activation, tuple(rows), path, precision(x_shard_m.dtype), return_gathered, tuple(leading)
    return find_context(context).call(AllGatherMatmuls(len(ws), *options), x_shard_m, *ws, *biases)


def _all_gather_matmuls_impl(x_shard_m, *arguments, **options):
    ys, gathered = _all_gather_matmuls_direct(x_shard_m, *arguments, **options)
    return ys, x_shard_m.new_empty(0) if gathered is None else gathered


def _all_gather_matmuls_fake(x_shard_m, ws, biases, biased, activation, return_gathered, rows, *_):
    M, given = sum(rows), iter(biases)
    pairs = [(w, next(given) if each else None) for w, each in zip(ws, biased, strict=True)]
    ys = [_product_fake("all_gather_matmul", M, x_shard_m, w, bias, activation) for w, bias in pairs]
    return ys, _gathered_fake(M, x_shard_m, return_gathered)


def _all_gather_matmuls_setup(ctx, inputs, output):
    x_shard_m, ws, _, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if inputs[5] else x_shard_m, *ws)


def _all_gather_matmuls_backward(ctx, dys, dgathered):
    options = "all_gather_matmuls", *ctx.options[:6]
    return *_gradients_of_gathered(ctx, options, *ctx.needs_input_grad[:3], dys, dgathered), *[None] * len(ctx.options)


class _Several(torch.autograd.Function):
    """all_gather_matmuls where nothing observes it. torch's way with lists takes 200 us of the host, this 35."""

    @staticmethod
    def forward(options, x_shard_m, *tensors):
        number = len(options[0])
        ys, gathered = _all_gather_matmuls_direct(x_shard_m, tensors[:number], tensors[number:], *options)
        return *ys, gathered

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, x_shard_m, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[-1] if ctx.options[2] else x_shard_m, *tensors[: len(ctx.options[0])])

    @staticmethod
    def backward(ctx, *gradients):
        (*dys, dgathered), (_, need_x, *needs) = gradients, ctx.needs_input_grad
        options, needs = ("all_gather_matmuls", *ctx.options[:6]), (need_x, needs[: len(dys)], needs[len(dys) :])
        dx, dws, dbiases = _gradients_of_gathered(ctx, options, *needs, dys, dgathered)
        return None, dx, *dws, *dbiases


_apply_several = super(torch.autograd.Function, _Several).apply  # see tkernels.dispatch


_all_gather_matmuls = register(
    "all_gather_matmuls(Tensor x_shard_m, Tensor[] ws, Tensor[] biases, bool[] biased, str? activation,"
    " bool return_gathered, SymInt[] rows, str context, str? path, SymInt[] leading) -> (Tensor[], Tensor)",
    _all_gather_matmuls_impl,
    _all_gather_matmuls_fake,
    _all_gather_matmuls_backward,
    _all_gather_matmuls_setup,
)


def all_gather_matmuls(x_shard_m, ws: list, biases: list, activation, return_gathered, rows, context, path, leading):
    """all_gather_matmul of several weights, each with a bias or None: a list of y, and x gathered if it is wanted."""
    tensors = x_shard_m, *ws, *biases
    if transformed():  # torch.func sees through none of torch's operators, but through our functions
        gathered = ops.all_gather(x_shard_m, rows, context)
        ys = [ops.matmul(gathered, w, bias, None, None, activation) for w, bias in zip(ws, biases, strict=True)]
        return ys, gathered
    given = [each for each in biases if each is not None]
    options = [each is not None for each in biases], activation, return_gathered, rows, context, path, leading
    if watched(tensors):
        named = {"x_shard_m": x_shard_m} | {f"w_shard_n[{at}]": w for at, w in enumerate(ws)}
        named |= {f"bias[{at}]": bias for at, bias in enumerate(biases) if bias is not None}
        check_local("all_gather_matmul", **named)
        return _all_gather_matmuls(x_shard_m, ws, given, *options)
    if wants_gradient(*tensors):
        *ys, gathered = _apply_several(options, x_shard_m, *ws, *given)
        return ys, gathered
    return _all_gather_matmuls_direct(x_shard_m, ws, given, *options)


def _reduction(
    kind, x_shard_k, w_shard_k, bias, x_scale, w_scale, activation, rows, context, path=None, out_dtype=None,
    wire_dtype=None, fast_accum=True, leading=ROWS_FIRST,
):  # fmt: skip
    options = activation, rows, out_dtype, None, path, precision(x_shard_k.dtype, fast_accum)
    call, scales = kind(*options, wire_dtype=wire_dtype, leading=tuple(leading)), Scales.given(x_scale, w_scale)
    return find_context(context).call(call, x_shard_k, w_shard_k, bias, None, *scales)


def _matmul_reduce_scatter_backward(ctx, dy):
    activation, rows, context, path, *_ = ctx.options
    x, w = ctx.saved_tensors
    dy = _gradient("matmul_reduce_scatter", x, dy, activation).contiguous()
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dx = dw = dbias = None
    differentiable = wants_gradient(dy, x, w)
    if need_x and need_w and not differentiable:
        dx, dw, dbias = ops.matmul_reduce_scatter_backward(dy, x, w, need_bias, rows, context, path)
        return dx, dw, dbias if need_bias else None, *_none_of(ctx)
    if need_x:
        # The matmul for dx gathers dy; dw and dbias reuse the gathered rows.
        where = need_w or need_bias, rows, context, path
        dx, gathered, _ = ops.all_gather_matmul(dy, w.t(), None, None, None, None, *where)
    elif need_w or need_bias:
        gathered = ops.all_gather(dy, rows, context)
    if need_w:
        dw = _product(gathered.t(), x)
    if need_bias:
        # Equal on all ranks, as an all-reduce's result is, so its own gradient counts once.
        dbias = ops.all_reduce(dy.sum(0), context) if differentiable else gathered.sum(0)
    return dx, dw, dbias, *_none_of(ctx)


_REDUCTION = (
    "(Tensor x_shard_k, Tensor w_shard_k, Tensor? bias, Tensor? x_scale, Tensor? w_scale, str? activation,"
    "{rows} str context, str? path=None, ScalarType? out_dtype=None, ScalarType? wire_dtype=None,"
    " bool fast_accum=True, SymInt[] leading=[0]) -> Tensor"
)
ops.matmul_reduce_scatter = define(
    "matmul_reduce_scatter" + _REDUCTION.format(rows=" SymInt[] rows,"),
    lambda x, w, bias, x_scale, w_scale, activation, rows, *options: _reduction(
        MatmulReduceScatter, x, w, bias, x_scale, w_scale, activation, tuple(rows), *options
    ),
    lambda x, w, bias, x_scale, w_scale, activation, rows, context, path=None, out_dtype=None, *_: _product_fake(
        "matmul_reduce_scatter", rows[find_context(context).rank], x, w, bias, activation, out_dtype
    ),
    _matmul_reduce_scatter_backward,
    saved=2,
)


def _matmul_reduce_scatter_backward_impl(dy_shard_m, x_shard_k, w_shard_k, need_bias, rows, context, path=None):
    w, where = w_shard_k.t(), ("borrowed", rows, context, path)
    dx, gathered, _ = _all_gather_matmul_direct(dy_shard_m, w, None, None, None, None, *where)
    dbias = gathered.sum(0) if need_bias else gathered.new_empty(0)
    return dx, _product(gathered.t(), x_shard_k), dbias


def _matmul_reduce_scatter_backward_fake(dy_shard_m, x_shard_k, w_shard_k, need_bias, rows, context, path=None):
    N, K = w_shard_k.shape
    shapes = (sum(rows), K), (N, K), (N if need_bias else 0,)
    return tuple(dy_shard_m.new_empty(shape) for shape in shapes)


ops.matmul_reduce_scatter_backward = define(
    "matmul_reduce_scatter_backward(Tensor dy_shard_m, Tensor x_shard_k, Tensor w_shard_k, bool need_bias,"
    " SymInt[] rows, str context, str? path=None) -> (Tensor, Tensor, Tensor)",
    _matmul_reduce_scatter_backward_impl,
    _matmul_reduce_scatter_backward_fake,
)


ops.matmul_all_reduce = define(
    "matmul_all_reduce" + _REDUCTION.format(rows=""),
    lambda x, w, bias, x_scale, w_scale, activation, *options: _reduction(
        MatmulAllReduce, x, w, bias, x_scale, w_scale, activation, None, *options
    ),
    lambda x, w, bias, x_scale, w_scale, activation, context, path=None, out_dtype=None, *_: _product_fake(
        "matmul_all_reduce", x.shape[0], x, w, bias, activation, out_dtype
    ),
    lambda ctx, dy: _matmul_backward(ctx, dy, "matmul_all_reduce", replicas=ctx.options[1]),
    saved=2,
)


ops.quantize = define(
    "quantize(Tensor x, Tensor? gate, str scale, ScalarType dtype, bool power_of_two, str? activation=None)"
    " -> (Tensor, Tensor)",
    _quantize,
    lambda x, gate, *options: Quantize(*options).results(x),
)
ops.dequantize = define(
    "dequantize(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",
    _dequantize,
    lambda q, scale, dtype: q.new_empty(q.shape, dtype=dtype),
)
ops.transpose_quantized = define(
    "transpose_quantized(Tensor q, Tensor scale) -> (Tensor, Tensor)",
    transpose_quantized,
    lambda q, scale: (q.new_empty((q.shape[1], (q.shape[0] + 15) // 16 * 16)), scale.new_empty(())),
)


ops.all_gather = define(
    "all_gather(Tensor x_shard_m, SymInt[] rows, str context) -> Tensor",
    lambda x, rows, context: collectives.all_gather(find_context(context), x, tuple(rows)),
    lambda x, rows, context: x.new_empty((sum(rows), *x.shape[1:])),
    lambda ctx, dy: (ops.reduce_scatter(dy.contiguous(), *ctx.options), None, None),
)
ops.reduce_scatter = define(
    "reduce_scatter(Tensor x, SymInt[] rows, str context, float factor=1.0) -> Tensor",
    lambda x, rows, context, factor=1.0: collectives.reduce_scatter(
        find_context(context), x, tuple(rows), factor=factor
    ),
    lambda x, rows, context, factor=1.0: x.new_empty((rows[find_context(context).rank], *x.shape[1:])),
    lambda ctx, dy: (
        ops.all_gather(_times(dy, *ctx.options[2:]).contiguous(), *ctx.options[:2]),
        *(None for _ in ctx.options),
    ),
)
ops.all_reduce = define(
    "all_reduce(Tensor x, str context, float factor=1.0) -> Tensor",
    lambda x, context, factor=1.0: collectives.all_reduce(find_context(context), x, factor=factor),
    lambda x, context, factor=1.0: torch.empty_like(x, memory_format=torch.contiguous_format),
    lambda ctx, dy: (replicated(_times(dy, *ctx.options[1:]), ctx.options[0]), *(None for _ in ctx.options)),
)


ops.all_gather_out = define(
    "all_gather_out(Tensor x, SymInt[] rows, str context, *, Tensor(a!) out) -> ()",
    lambda x, rows, context, *, out: _discard(collectives.all_gather(find_context(context), x, tuple(rows), out)),
    lambda x, rows, context, *, out: check_out("all_gather", out, (sum(rows), *x.shape[1:]), x.dtype, x.device),
)
ops.reduce_scatter_out = define(
    "reduce_scatter_out(Tensor x, SymInt[] rows, str context, float factor=1.0, *, Tensor(a!) out) -> ()",
    lambda x, rows, context, factor=1.0, *, out: _discard(
        collectives.reduce_scatter(
            find_context(context), x, tuple(rows), out, out_dtype=_sum_dtype(x, out), factor=factor
        )
    ),
    lambda x, rows, context, factor=1.0, *, out: check_out(
        "reduce_scatter", out, (rows[find_context(context).rank], *x.shape[1:]), _sum_dtype(x, out), x.device
    ),
)
ops.all_reduce_out = define(
    "all_reduce_out(Tensor x, str context, float factor=1.0, *, Tensor(a!) out) -> ()",
    lambda x, context, factor=1.0, *, out: _discard(
        collectives.all_reduce(find_context(context), x, out, _sum_dtype(x, out), factor=factor)
    ),
    lambda x, context, factor=1.0, *, out: check_out("all_reduce", out, tuple(x.shape), _sum_dtype(x, out), x.device),
)


def _times(dy: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return dy if factor == 1 else dy * factor


def _sum_dtype(x: torch.Tensor, out: torch.Tensor) -> torch.dtype:
    """That of `out`, if sums may be of it; else of x, and the error says so."""
    return out.dtype if out.dtype in collectives.SUMMED else x.dtype


def _discard(_: torch.Tensor):
    """Return None instead of `out`: an operator's result must not alias its argument."""


def _gradient(name: str, x: torch.Tensor, dy: torch.Tensor | None, activation: str | None) -> torch.Tensor | None:
    """dy in the operands' dtype, in which backward multiplies. Raises for what the public functions don't pass on."""
    if activation is not None:
        raise TkernelsError(
            f"torch.ops.tkernels.{name} has no gradient through a fused activation ({activation!r}); call "
            f"tkernels.{name}, which keeps what backward needs"
        )
    if x.dtype in FP8:
        raise TkernelsError(f"torch.ops.tkernels.{name} of float8 operands has no gradient; call under torch.no_grad()")
    return dy if dy is None else dy.to(x.dtype)
