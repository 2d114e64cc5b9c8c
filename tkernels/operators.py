"""The operations as torch operators, with fake implementations and autograd, and the public functions that call them.

Torch operators take plain values, so a context is passed by its name. Operators whose name ends in _out write to `out`
and have no gradient; no other operator writes to an argument. The other state that they change, the workspace, belongs
to the context, and no tensor that a caller holds aliases it.

The functions call the operators through the dispatcher if something can observe them: a trace, a torch_function or
torch_dispatch mode, a functorch transform, a profiler, a subclass of Tensor. Otherwise they call the implementation
directly, because the dispatcher takes longer to reach it than a prepared launch takes.

torch.func differentiates the functions and maps them with vmap, which runs an operation once for each element of the
batch, all ranks in the same order. They have no forward mode (jvp, jacfwd, forward_ad). The torch operators themselves
are for torch.compile: torch.func doesn't see through what torch.library registers.

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
from torch.autograd import forward_ad

from tkernels.all_gather_matmul import all_gather_matmul as _all_gather_matmul
from tkernels.comm import collectives
from tkernels.comm.arguments import check_tensors
from tkernels.comm.context import Context, as_context, find_context
from tkernels.comm.errors import TkernelsError
from tkernels.comm.plans import check_out
from tkernels.gemm import ACTIVATIONS, activation_reference
from tkernels.gemm import matmul as _matmul
from tkernels.matmul_all_reduce import matmul_all_reduce as _matmul_all_reduce
from tkernels.matmul_reduce_scatter import matmul_reduce_scatter as _matmul_reduce_scatter

_library = torch.library.Library("tkernels", "DEF")
_ops = types.SimpleNamespace()  # a function for each operator, see _define


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def _define(schema: str, implementation, fake, setup_context=None, backward=None, direct=None):
    """Register an operator, and define the function of its name in `_ops`.

    schema: the operator's tensors are its first positional arguments.
    direct: what the function calls if nothing can observe the operator. None: the implementation.
    """
    name = schema.split("(")[0]
    direct = direct or implementation
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tkernels::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"tkernels::{name}", backward, setup_context=setup_context, lib=_library)
    registered = getattr(torch.ops.tkernels, name).default
    operands = [a for a in registered._schema.arguments if "Tensor" in str(a.type) and not a.kwarg_only]
    num_tensors, labels = len(operands), [a.name for a in operands]
    optional = [a.name for a in operands if "Optional" in str(a.type)]

    def check(tensors):
        given = zip(labels, tensors, strict=True)
        check_tensors(name, **{label: each for label, each in given if each is not None or label not in optional})

    class Differentiable(torch.autograd.Function):
        forward = staticmethod(direct)

        @staticmethod
        def jvp(ctx, *_):
            raise NotImplementedError(
                f"tkernels.{name} has no forward mode of automatic differentiation (jvp, jacfwd, forward_ad); use "
                f"backward, torch.func.grad, vjp or jacrev"
            )

    class Transformed(Differentiable):
        forward = staticmethod(registered)

        @staticmethod
        def vmap(info, in_dims, *arguments):
            if info.batch_size == 0:
                raise ValueError(f"{name}: vmap over an empty batch; every call of a batch is one of the operation")
            results = []
            for index in range(info.batch_size):
                element = [
                    each if dim is None else each.select(dim, index).contiguous()
                    for each, dim in zip(arguments[:num_tensors], in_dims, strict=False)
                ]
                results.append(call(*element, *arguments[num_tensors:]))
            if isinstance(results[0], torch.Tensor):
                return torch.stack(results), 0
            outputs = [None if each[0] is None else torch.stack(each) for each in zip(*results, strict=True)]
            return tuple(outputs), tuple(None if each is None else 0 for each in outputs)

    Differentiable.setup_context, Differentiable.backward = staticmethod(setup_context), staticmethod(backward)
    # The apply below Function.apply, which first looks for functorch transforms: `_watched` has ruled them out.
    apply = super(torch.autograd.Function, Differentiable).apply

    def call(*arguments, **out):
        tensors = arguments[:num_tensors]
        if tensors[0] is None or _watched(tensors):
            check(tensors)
            if backward is not None and _transformed():
                return apply_transformed(name, Transformed, *arguments)
            return registered(*arguments, **out)
        if _wants_gradient(*tensors):
            return apply(*arguments)
        return direct(*arguments, **out)

    setattr(_ops, name, call)


def _watched(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether something can observe an operator: a trace, a mode, a transform, a profiler, a subclass of Tensor."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or _transformed()
        or torch.autograd._profiler_enabled()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is to see the operation itself."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def apply_transformed(name: str, function: type[torch.autograd.Function], *arguments):
    """function.apply, where a transform of torch.func may be active. Raises NotImplementedError where it is compiled.

    Under torch.func, torch.compile takes the derivative of a Function's forward in place of its backward (2.13).
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{name}: torch.compile doesn't see through torch.func here; compile the function, and apply "
            f"torch.func.grad or vmap to what isn't compiled"
        )
    return torch.compiler.disable(function.apply)(*arguments)


def _wants_gradient(*tensors: torch.Tensor | None) -> bool:
    if torch.is_grad_enabled():
        if torch._C._are_functorch_transforms_active():
            return True  # a tensor that vmap has wrapped doesn't tell
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _matmul_setup(ctx, inputs, output):
    x, w, _, ctx.activation = inputs
    ctx.save_for_backward(x, w)


def _matmul_backward(ctx, dy):
    _refuse_fused_activation("matmul", ctx.activation)
    x, w = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    return dy @ w if need_x else None, dy.t() @ x if need_w else None, dy.sum(0) if need_bias else None, None


_define(
    "matmul(Tensor x, Tensor w, Tensor? bias, str? activation) -> Tensor",
    _matmul,
    lambda x, w, bias, activation: x.new_empty((x.shape[0], w.shape[0])),
    _matmul_setup,
    _matmul_backward,
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
    return apply_transformed("replicated", _Replicated, x, context) if _wants_gradient(x) else x


def _all_gather_matmul_direct(x_shard_m, w, bias, activation, return_gathered, rows, context, path=None):
    return _all_gather_matmul(
        find_context(context), x_shard_m, w, bias, activation, return_gathered, rows=tuple(rows), path=path
    )


def _all_gather_matmul_impl(x_shard_m, *arguments, **options):
    y, gathered = _all_gather_matmul_direct(x_shard_m, *arguments, **options)
    return y, x_shard_m.new_empty(0) if gathered is None else gathered  # the schema returns Tensors, not None


def _all_gather_matmul_fake(x_shard_m, w, bias, activation, return_gathered, rows, context, path=None):
    M = sum(rows)
    gathered = x_shard_m.new_empty((M, x_shard_m.shape[1]) if return_gathered else (0,))
    return x_shard_m.new_empty((M, w.shape[0])), gathered


def _all_gather_matmul_setup(ctx, inputs, output):
    x_shard_m, w, _, activation, return_gathered, rows, context, ctx.path = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(w, output[1] if return_gathered else x_shard_m)
    ctx.activation, ctx.return_gathered, ctx.rows, ctx.context = activation, return_gathered, rows, context


def _all_gather_matmul_backward(ctx, dy, dgathered):
    _refuse_fused_activation("all_gather_matmul", ctx.activation)
    w, x = ctx.saved_tensors
    dx = dw = dbias = None
    if dy is not None:
        dy = _with_unit_stride(dy)
        if ctx.needs_input_grad[1]:
            dw = dy.t() @ (x if ctx.return_gathered else _ops.all_gather(x, ctx.rows, ctx.context))
        # Unless the graph is retained, free the gathered rows before dx takes memory.
        del x
        ctx.maybe_clear_saved_tensors()
        if ctx.needs_input_grad[0]:
            dx = _ops.matmul_reduce_scatter(dy, w.t(), None, None, ctx.rows, ctx.context, ctx.path)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(0)
    if dgathered is not None and ctx.return_gathered and ctx.needs_input_grad[0]:
        from_gathered = _ops.reduce_scatter(dgathered.contiguous(), ctx.rows, ctx.context)
        dx = from_gathered if dx is None else dx + from_gathered
    return dx, dw, dbias, None, None, None, None, None


_define(
    "all_gather_matmul(Tensor x_shard_m, Tensor w, Tensor? bias, str? activation, bool return_gathered, SymInt[] rows,"
    " str context, str? path=None) -> (Tensor, Tensor)",
    _all_gather_matmul_impl,
    _all_gather_matmul_fake,
    _all_gather_matmul_setup,
    _all_gather_matmul_backward,
    _all_gather_matmul_direct,
)


def _matmul_reduce_scatter_impl(x_shard_k, w_shard_k, bias, activation, rows, context, path=None):
    return _matmul_reduce_scatter(
        find_context(context), x_shard_k, w_shard_k, bias, activation, rows=tuple(rows), path=path
    )


def _matmul_reduce_scatter_fake(x_shard_k, w_shard_k, bias, activation, rows, context, path=None):
    return x_shard_k.new_empty((rows[find_context(context).rank], w_shard_k.shape[0]))


def _matmul_reduce_scatter_setup(ctx, inputs, output):
    x_shard_k, w_shard_k, _, ctx.activation, ctx.rows, ctx.context, ctx.path = inputs
    ctx.save_for_backward(x_shard_k, w_shard_k)


def _matmul_reduce_scatter_backward(ctx, dy):
    _refuse_fused_activation("matmul_reduce_scatter", ctx.activation)
    x, w = ctx.saved_tensors
    dy = dy.contiguous()
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dx = dw = dbias = None
    if need_x and need_w and not _wants_gradient(dy, x, w):
        dx, dw, dbias = _ops.matmul_reduce_scatter_backward(dy, x, w, need_bias, ctx.rows, ctx.context, ctx.path)
        return dx, dw, dbias if need_bias else None, None, None, None, None
    if need_x:
        # The matmul for dx gathers dy; dw and dbias reuse the gathered rows.
        dx, gathered = _ops.all_gather_matmul(
            dy, w.t(), None, None, need_w or need_bias, ctx.rows, ctx.context, ctx.path
        )
    elif need_w or need_bias:
        gathered = _ops.all_gather(dy, ctx.rows, ctx.context)
    if need_w:
        dw = gathered.t() @ x
    if need_bias:
        dbias = gathered.sum(0)
    return dx, dw, dbias, None, None, None, None


_define(
    "matmul_reduce_scatter(Tensor x_shard_k, Tensor w_shard_k, Tensor? bias, str? activation, SymInt[] rows,"
    " str context, str? path=None) -> Tensor",
    _matmul_reduce_scatter_impl,
    _matmul_reduce_scatter_fake,
    _matmul_reduce_scatter_setup,
    _matmul_reduce_scatter_backward,
)


def _matmul_reduce_scatter_backward_impl(dy_shard_m, x_shard_k, w_shard_k, need_bias, rows, context, path=None):
    dx, gathered = _all_gather_matmul(
        find_context(context), dy_shard_m, w_shard_k.t(), return_gathered="borrowed", rows=tuple(rows), path=path
    )
    dbias = gathered.sum(0) if need_bias else gathered.new_empty(0)
    return dx, gathered.t() @ x_shard_k, dbias


def _matmul_reduce_scatter_backward_fake(dy_shard_m, x_shard_k, w_shard_k, need_bias, rows, context, path=None):
    N, K = w_shard_k.shape
    shapes = (sum(rows), K), (N, K), (N if need_bias else 0,)
    return tuple(dy_shard_m.new_empty(shape) for shape in shapes)


_define(
    "matmul_reduce_scatter_backward(Tensor dy_shard_m, Tensor x_shard_k, Tensor w_shard_k, bool need_bias,"
    " SymInt[] rows, str context, str? path=None) -> (Tensor, Tensor, Tensor)",
    _matmul_reduce_scatter_backward_impl,
    _matmul_reduce_scatter_backward_fake,
)


def _matmul_all_reduce_impl(x_shard_k, w_shard_k, bias, activation, context, path=None):
    return _matmul_all_reduce(
        find_context(context), x_shard_k, w_shard_k, bias, activation, path=path
    )


def _matmul_all_reduce_fake(x_shard_k, w_shard_k, bias, activation, context, path=None):
    return x_shard_k.new_empty((x_shard_k.shape[0], w_shard_k.shape[0]))


def _matmul_all_reduce_setup(ctx, inputs, output):
    x_shard_k, w_shard_k, _, ctx.activation, ctx.context, _ = inputs
    ctx.save_for_backward(x_shard_k, w_shard_k)


def _matmul_all_reduce_backward(ctx, dy):
    _refuse_fused_activation("matmul_all_reduce", ctx.activation)
    x, w = ctx.saved_tensors
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    dbias = dy.sum(0) if need_bias else None  # equal on all ranks, as dy is
    dy = replicated(dy, ctx.context)
    dx = dy @ w if need_x else None
    dw = dy.t() @ x if need_w else None
    return dx, dw, dbias, None, None, None


_define(
    "matmul_all_reduce(Tensor x_shard_k, Tensor w_shard_k, Tensor? bias, str? activation, str context,"
    " str? path=None) -> Tensor",
    _matmul_all_reduce_impl,
    _matmul_all_reduce_fake,
    _matmul_all_reduce_setup,
    _matmul_all_reduce_backward,
)


def _save_rows(ctx, inputs, output):
    _, ctx.rows, ctx.context = inputs


def _save_context(ctx, inputs, output):
    _, ctx.context = inputs


_define(
    "all_gather(Tensor x_shard_m, SymInt[] rows, str context) -> Tensor",
    lambda x, rows, context: collectives.all_gather(find_context(context), x, tuple(rows)),
    lambda x, rows, context: x.new_empty((sum(rows), *x.shape[1:])),
    _save_rows,
    lambda ctx, dy: (_ops.reduce_scatter(dy.contiguous(), ctx.rows, ctx.context), None, None),
)
_define(
    "reduce_scatter(Tensor x, SymInt[] rows, str context) -> Tensor",
    lambda x, rows, context: collectives.reduce_scatter(find_context(context), x, tuple(rows)),
    lambda x, rows, context: x.new_empty((rows[find_context(context).rank], *x.shape[1:])),
    _save_rows,
    lambda ctx, dy: (_ops.all_gather(dy.contiguous(), ctx.rows, ctx.context), None, None),
)
_define(
    "all_reduce(Tensor x, str context) -> Tensor",
    lambda x, context: collectives.all_reduce(find_context(context), x),
    lambda x, context: torch.empty_like(x, memory_format=torch.contiguous_format),
    _save_context,
    lambda ctx, dy: (replicated(dy, ctx.context), None),
)


_define(
    "all_gather_out(Tensor x, SymInt[] rows, str context, *, Tensor(a!) out) -> ()",
    lambda x, rows, context, *, out: _discard(collectives.all_gather(find_context(context), x, tuple(rows), out)),
    lambda x, rows, context, *, out: check_out("all_gather", out, (sum(rows), *x.shape[1:]), x.dtype, x.device),
)
_define(
    "reduce_scatter_out(Tensor x, SymInt[] rows, str context, *, Tensor(a!) out) -> ()",
    lambda x, rows, context, *, out: _discard(collectives.reduce_scatter(find_context(context), x, tuple(rows), out)),
    lambda x, rows, context, *, out: check_out(
        "reduce_scatter", out, (rows[find_context(context).rank], *x.shape[1:]), x.dtype, x.device
    ),
)
_define(
    "all_reduce_out(Tensor x, str context, *, Tensor(a!) out) -> ()",
    lambda x, context, *, out: _discard(collectives.all_reduce(find_context(context), x, out)),
    lambda x, context, *, out: check_out("all_reduce", out, tuple(x.shape), x.dtype, x.device),
)


def _discard(_: torch.Tensor):
    """Return None instead of `out`: an operator's result must not alias its argument."""


def _into(name: str, out: torch.Tensor, x: torch.Tensor, *arguments) -> torch.Tensor:
    if not _PLAIN.issuperset((type(x), type(out))):
        check_tensors(name, x=x, out=out)
    if _wants_gradient(x, out):
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
    return (None, activation) if _wants_gradient(*tensors) else (activation, None)


def matmul(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """activation(x @ w.T + bias) on this rank alone, not collective: x [M, K], w [N, K], bias [N] -> [M, N].

    fp32, fp16, bf16; accumulated in fp32. w may be the view `w.t()` of a [K, N] matrix. activation: as in
    all_gather_matmul. Raises ValueError or TypeError.
    """
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
    return_gathered: bool = False,
    *,
    rows: tuple[int, ...] | None = None,
    ctx: Context | None = None,
    path: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Collective. y_shard_n = activation(all_gather(x_shard_m) @ w_shard_n.T + bias).

    x_shard_m [M/R, K], w_shard_n [N/R, K], bias [N/R] -> y_shard_n [M, N/R].

    return_gathered: also return x gathered [M, K]; backward then uses it instead of gathering again.
    rows: every rank's row count where they differ, for example split_rows(M, R). None: all have as many as this rank.
    activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu"; fused unless a gradient is needed.
    path: "fused", or "plain" for a collective and torch.mm one after the other, which is faster for few rows. None:
        the choice of `tkernels.explain`. All ranks must pass the same; backward takes the same path.
    fp32, fp16, bf16; accumulated in fp32. w_shard_n may be the view `w.t()` of a [K, N/R] matrix.
    Raises ValueError or TypeError before the first signal, HeapExhaustedError if the context's heap has no room for a
    larger call, WaitTimeoutError if a peer did not answer in time.
    """
    ctx = as_context(ctx)
    rows = collectives.check_rows("all_gather_matmul", ctx, rows, own=_num_rows("all_gather_matmul", x_shard_m))
    fused, separate = _split_activation(activation, x_shard_m, w_shard_n, bias)
    y, gathered = _ops.all_gather_matmul(x_shard_m, w_shard_n, bias, fused, return_gathered, rows, ctx.name, path)
    y = activation_reference(y, separate)
    return (y, gathered) if return_gathered else y


def matmul_reduce_scatter(
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    rows: tuple[int, ...] | None = None,
    ctx: Context | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Collective. This rank's rows of activation(sum over ranks of x_shard_k @ w_shard_k.T + bias).

    x_shard_k [M, K/R], w_shard_k [N, K/R], bias [N] -> y_shard_m [M/R, N]. Bias is added once, after the sum.
    rows: every rank's row count; needed where M does not divide by R.
    activation, path, dtypes, views of w_shard_k, exceptions: as all_gather_matmul.
    """
    ctx = as_context(ctx)
    total = _num_rows("matmul_reduce_scatter", x_shard_k)
    rows = collectives.check_rows("matmul_reduce_scatter", ctx, rows, total=total)
    fused, separate = _split_activation(activation, x_shard_k, w_shard_k, bias)
    y = _ops.matmul_reduce_scatter(x_shard_k, w_shard_k, bias, fused, rows, ctx.name, path)
    return activation_reference(y, separate)


def matmul_all_reduce(
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    ctx: Context | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Collective. activation(sum over ranks of x_shard_k @ w_shard_k.T + bias), the same bits on every rank.

    x_shard_k [M, K/R], w_shard_k [N, K/R], bias [N] -> y [M, N].
    activation, path, dtypes, views of w_shard_k, exceptions: as all_gather_matmul.
    """
    ctx = as_context(ctx)
    fused, separate = _split_activation(activation, x_shard_k, w_shard_k, bias)
    y = _ops.matmul_all_reduce(x_shard_k, w_shard_k, bias, fused, ctx.name, path)
    return activation_reference(y, separate)


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
    ctx = as_context(ctx)
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
    ctx = as_context(ctx)
    rows = collectives.check_rows("reduce_scatter", ctx, rows, total=_num_rows("reduce_scatter", x))
    if out is not None:
        return _into("reduce_scatter", out, x, rows, ctx.name)
    return _ops.reduce_scatter(x, rows, ctx.name)


def all_reduce(x: torch.Tensor, *, out: torch.Tensor | None = None, ctx: Context | None = None) -> torch.Tensor:
    """Collective. The sum over ranks, in a new tensor of x's shape; fp32, fp16, bf16. The same bits on every rank.

    out: a contiguous tensor like x to fill and return, without a gradient. It may be x.
    Exceptions: as in all_gather_matmul.
    """
    ctx = as_context(ctx)
    if out is not None:
        return _into("all_reduce", out, x, ctx.name)
    return _ops.all_reduce(x, ctx.name)


def barrier(*, ctx: Context | None = None):
    """Collective. On the current stream, later work starts only after all ranks have reached the barrier.

    Raises WaitTimeoutError if a rank did not reach it in time.
    """
    as_context(ctx).barrier()
