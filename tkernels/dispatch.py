"""How a function of this package is a torch operator as well, at no cost in calls that nothing observes.

A prepared call takes 3 to 8 us of the host. torch's dispatcher takes 4 us to reach an operator, 12 if it has a gradient
and needs one (torch 2.13). So functions call operators through it only if something can observe them: a trace, a
torch_function or torch_dispatch mode, a functorch transform, a profiler, a subclass of Tensor. To find out takes 0.5 us
and functions of torch that have no public name (`watched`). Otherwise they call the implementation directly, and where
a gradient is needed under an autograd.Function; what its `apply` calls takes 2 us, and `apply` itself 12.

torch.func differentiates the functions and maps them with vmap, which runs an operation once for each element of the
batch, all ranks in the same order. They have no forward mode (jvp, jacfwd, forward_ad). The torch operators themselves
are for torch.compile: torch.func doesn't see through what torch.library registers.
"""

import torch
from torch.autograd import forward_ad

from tkernels.comm.arguments import check_dense

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})

UNTRACED = "barrier, and products with out=, config=, or return_gathered= of a tensor or 'borrowed', don't trace"
TRACING = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE  # modes: nothing is computed

NO_FORWARD_MODE = (
    "tkernels.{} has no forward mode of automatic differentiation (jvp, jacfwd, forward_ad); use backward, "
    "torch.func.grad, vjp or jacrev"
)

_library = torch.library.Library("tkernels", "DEF")


def register(schema: str, implementation, fake, backward=None, setup_context=None):
    """Register a torch operator, and return it."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tkernels::{name}", fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"tkernels::{name}", backward, setup_context=setup_context, lib=_library)
    registered = getattr(torch.ops.tkernels, name).default
    if registered._schema.is_mutable:

        def count(keys, *arguments, out):
            count_writes(out)
            return registered.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments, out=out)

        _library.impl(name, count, "ADInplaceOrView", with_keyset=True)
    return registered


def count_writes(*tensors: torch.Tensor | None):
    """Have torch count the writes to the tensors, so that it refuses a backward that has saved what they held before.

    Torch's own functions count theirs; a kernel's, torch doesn't see.
    """
    torch.autograd.graph.increment_version([each for each in tensors if each is not None])


def define(schema: str, implementation, fake, backward=None, *, saved: int = 0, setup_context=None, direct=None):
    """Register an operator. Returns the function that calls it, or what it stands for if nothing can observe that.

    schema: the operator's tensors are its first positional arguments.
    setup_context: of the autograd.Function. None: it saves the first `saved` tensors for `backward`, and has all
        arguments that are no tensors in `options`.
    direct: what the function calls if nothing can observe the operator. None: the implementation.
    """
    name = schema.split("(")[0]
    direct = direct or implementation

    def save(ctx, inputs, output):
        ctx.options = inputs[num_tensors:]
        ctx.save_for_backward(*inputs[:saved])

    setup_context = setup_context or save
    registered = register(schema, implementation, fake, backward, setup_context)
    operands = [a for a in registered._schema.arguments if "Tensor" in str(a.type) and not a.kwarg_only]
    num_tensors, labels = len(operands), [a.name for a in operands]
    optional = [a.name for a in operands if "Optional" in str(a.type)]

    def check(tensors, out):
        given = zip(labels, tensors, strict=True)
        given = {label: each for label, each in given if each is not None or label not in optional} | out
        check_local(name.removesuffix("_out"), **given)

    class Differentiable(torch.autograd.Function):
        forward = staticmethod(direct)

        @staticmethod
        def jvp(ctx, *_):
            raise NotImplementedError(NO_FORWARD_MODE.format(name))

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
    # The apply below Function.apply, which first looks for functorch transforms: `watched` has ruled them out.
    apply = super(torch.autograd.Function, Differentiable).apply

    def call(*arguments, **out):
        tensors = arguments[:num_tensors]
        if tensors[0] is None or watched((*tensors, *out.values()) if out else tensors):
            check(tensors, out)
            check_not_recorded(name)
            if out and transformed():
                check_memory(name.removesuffix("_out"), *tensors, *out.values())
            if backward is not None and transformed():
                return apply_transformed(name, Transformed, *arguments)
            check_without_tangents(name, *tensors, *out.values())
            return registered(*arguments, **out)
        try:
            if wants_gradient(*tensors):
                return apply(*arguments)
            result = direct(*arguments, **out)
        except TypeError:  # of an operand, perhaps, which is named here
            check(tensors, out)
            raise
        if out:
            count_writes(*out.values())
        return result

    return call


def watched(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether something can observe an operator: a trace, a mode, a transform, a profiler, a subclass of Tensor."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or transformed()
        or torch.autograd._profiler_enabled()
        or not PLAIN.issuperset(map(type, tensors))
    )


def transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is to see the operation itself."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transformed(name: str, *values):
    """Raises NotImplementedError for tensors that a transform follows, where a call that has no gradients ends it."""
    if not transformed():
        return
    for each in values:
        followed = isinstance(each, torch.Tensor) and (
            torch._C._functorch.is_functorch_wrapped_tensor(each) or forward_ad.unpack_dual(each).tangent is not None
        )
        if followed:
            raise NotImplementedError(
                f"{name} computes no gradients, so torch.func and forward-mode differentiation can't follow it; use "
                f"tkernels.matmul and its kin, of which torch.func.grad, vjp, jacrev and vmap see all"
            )


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


def check_not_recorded(name: str):
    """Raises NotImplementedError under torch.jit.trace, whose sizes are tensors."""
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(f"tkernels.{name}: torch.jit.trace doesn't record it; use torch.export or compile")


def check_without_tangents(name: str, *tensors: torch.Tensor | None):
    """Raises NotImplementedError for tensors that forward-mode differentiation has given tangents."""
    if forward_ad._current_level >= 0:
        given = (each for each in tensors if each is not None)
        if any(forward_ad.unpack_dual(each).tangent is not None for each in given):
            raise NotImplementedError(NO_FORWARD_MODE.format(name))


def untraced(name: str, function, tensors=(), outs: tuple[torch.Tensor | None, ...] = ()):
    """function(), also in compiled code, whose graph breaks here: a trace can't look into what no operator stands for.

    With fullgraph=True torch.compile refuses it, with this reason, and so do other traces: RuntimeError.
    tensors: all that it takes; TypeError for those that have no memory of their own. outs: those of them that it fills.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=UNTRACED)
        return torch.compiler.disable(_run)(name, function, tensors, outs)
    return _run(name, function, tensors, outs)


def _run(name, function, tensors, outs):
    check_not_recorded(name)
    modes = torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, TRACING))
    if modes or torch.compiler.is_compiling():
        raise RuntimeError(f"tkernels.{name}: {UNTRACED}; leave these out of what torch.export or make_fx traces")
    check_memory(name, *tensors)
    check_without_tangents(name, *tensors)
    result = function()
    count_writes(*outs)
    return result


def check_local(name: str, **tensors: torch.Tensor):
    """Raises TypeError for DTensors, for which the operators have no rules, and what `check_dense` does."""
    check_dense(name, **tensors)
    for label, each in tensors.items():
        if type(each).__name__ == "DTensor" and not torch.compiler.is_compiling():  # whose module takes long to import
            raise TypeError(f"{name}: {label} is a DTensor; pass a plain tensor, as its to_local() gives")


def check_memory(name: str, *tensors: torch.Tensor | None):
    """Raises TypeError for tensors that have no memory of their own."""
    for each in tensors:
        if not has_memory(each):
            raise TypeError(
                f"tkernels.{name}: a {type(each).__name__} that stands for other tensors is no memory for a kernel; "
                f"pass those, as its to_local() may give, or leave out out=, config= and return_gathered="
            )


def has_memory(tensor: torch.Tensor | None) -> bool:
    """Whether it is None or has memory of its own: that of a DTensor, and of others with a dispatch of their own, isn't
    its elements, and what torch.func has wrapped has none.
    """
    if torch._C._are_functorch_transforms_active() and tensor is not None:
        return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    own = type(tensor) in PLAIN or type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return own or tensor.is_nested  # which the operation refuses


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    if torch.is_grad_enabled():
        if torch._C._are_functorch_transforms_active():
            return True  # a tensor that vmap has wrapped doesn't tell
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def under_no_grad(instead: str) -> str:
    """For errors: how a call can be made that has no gradient. instead: what helps as well, but not in torch.func."""
    if torch._C._are_functorch_transforms_active():
        return "call under torch.no_grad(), as within torch.func no tensor tells whether it needs one"
    return f"{instead}, or call under torch.no_grad()"
