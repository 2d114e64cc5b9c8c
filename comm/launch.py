"""A prepared launch: everything about the launch of a kernel that calls of one kind share, computed once.

Of its kernel's fifty arguments a call changes a few addresses. So the first call goes through triton.jit, which
compiles, and later ones hand the addresses of their tensors to the launcher of the compiled kernel.
"""

import copy
import functools
import inspect
import itertools
import types

import torch
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels.comm import capture
from tkernels.comm.device_simulated import WaitExpired

MAX_ADDRESSES = 256  # for which a launch keeps encoded descriptors, per descriptor parameter
TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32


def rounded_to_tf32(descriptor: TensorDescriptor) -> TensorDescriptor:
    """The descriptor of a matrix of fp32, which TMA rounds to TF32 from now on, as cuBLAS has it do.

    Tensor cores cut off the bits that they don't read: products come out 7e-4 too small, and are 2.7 times as wrong.
    """
    descriptor.round_f32_to_tf32 = True
    return descriptor


class PreparedLaunch:
    """A kernel launch in which everything is fixed except the addresses of the tensors that `varying` names.

    kernel, num_programs: a triton.jit function, and its grid.
    arguments: in the order of the kernel's parameters; for varying parameters, examples.
    varying: the parameters that take the tensors of a call, in the order in which calls pass them.
    context: the context whose timed-out waits forbid a launch; None for kernels that never wait for a peer.
    options: constants by name, and the launch options of triton.jit (num_warps, ...).

    The first call goes through triton.jit, which compiles. Later ones go to the compiled kernel's launcher and change
    only the addresses: each call's tensors must match the first call's in everything that `describe` returns. No call's
    tensors are kept alive. On the simulated runtime, and while a launch is traced, every call goes through triton.jit.
    """

    shared = None  # what the ranks share of the call whose number is an argument; kept, so that an error can name it

    def __init__(self, kernel, num_programs: int, arguments=(), varying: tuple[str, ...] = (), context=None, **options):
        names = getattr(kernel, "arg_names", None)
        if names is None:
            raise TypeError(f"launch: kernel={kernel!r} must be a function under @triton.jit")
        self._kernel, self._num_programs, self._context = kernel, num_programs, context
        self._arguments = dict(zip(names, arguments, strict=False))
        self._arguments |= {name: options.pop(name) for name in names if name in options}
        _check_arguments(kernel, len(arguments), self._arguments)
        self._options = options
        self._varying = {name: _maker(self._arguments.pop(name)) for name in varying}
        self._compiled = self._launcher = None

    def __call__(self, *tensors: torch.Tensor):
        if self._context is not None:
            self._context.refuse_after_fault()
            if self._context.recorder is not None:
                self._by_jit(tensors)
                return
        if self._launcher is None and (self._compiled is None or not self._prepare(tensors)):
            self._compiled = self._by_jit(tensors)
            return
        arguments, misaligned = self._flat.copy(), 0
        for (at, mask, descriptors), tensor in zip(self._slots, tensors, strict=True):
            address = tensor.data_ptr()
            misaligned |= address & mask
            arguments[at] = address if descriptors is None else descriptors[address]
        if misaligned:
            self._by_jit(tensors)
            return
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave):
            self._launch(self._stream(), arguments)
            return
        compiled, grid, stream = self._compiled, (self._num_programs, 1, 1), self._stream()
        metadata = compiled.launch_metadata(grid, stream)
        self._launcher(*grid, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *arguments)

    def _by_jit(self, tensors):
        """Launch through triton.jit. Returns the compiled kernel, or None if it was interpreted."""
        varying = zip(self._varying.items(), tensors, strict=True)
        arguments = self._arguments | {name: make(tensor) for (name, make), tensor in varying}
        if self._context is not None and self._context.recorder is not None:
            arguments = self._context.recorder.record(self._kernel, self._num_programs, arguments)
        if "extern_libs" in self._options:
            from tkernels.comm.nvshmem_runtime import initialise_modules

            initialise_modules()
        try:
            with capture.permitted():  # to compile and to load
                _let_round(self._kernel, self._num_programs, arguments, self._options)
                return self._kernel[(self._num_programs,)](**arguments, **self._options)
        except WaitExpired:
            if self._context is not None:
                self._context.check()
            raise
        except BaseException as error:
            if self._context is not None and self._context.runtime == "simulated":
                self._context.interrupt(error)  # some of its programs may have finished
            raise

    def _prepare(self, tensors) -> bool:
        """Build the arguments as the launcher takes them: addresses, descriptors as their parts, None for constants.

        Returns False on a GPU without TMA, where Triton splits descriptors into other parts.
        """
        compiled, flat, signature, at = self._compiled, [], [], {}
        kinds = {name: kind for name, kind in compiled.src.signature.items() if not isinstance(kind, tuple)}
        descriptors = [kind for kind in kinds.values() if kind.startswith("tensordesc")]
        if len(descriptors) != len(compiled.metadata.tensordesc_meta or ()):
            return False
        layouts = iter(compiled.metadata.tensordesc_meta or ())
        example = dict(zip(self._varying, tensors, strict=True))
        divisible = {path[0] for path, found in compiled.src.attrs.items() if ["tt.divisibility", 16] in found}
        for number, (name, kind) in enumerate(compiled.src.signature.items()):
            if name not in kinds:  # a tuple of constants
                flat.append(_nothing(kind))
                signature.append(kind)
                continue
            at[name] = len(flat), 15 if number in divisible else 0, None
            value = self._arguments.get(name)
            if kind.startswith("tensordesc"):
                like = value or self._varying[name](example[name])
                descriptors = _Descriptors(like, next(layouts))
                at[name] = len(flat), 15, descriptors
                flat += [value and descriptors[value.base.data_ptr()], *like.shape, *like.strides]
                signature += ["nvTmaDesc", *["i32"] * len(like.shape), *["i64"] * len(like.shape)]
            else:
                flat.append(None if kind == "constexpr" else _address(value))
                signature.append(kind)
        self._flat, self._slots = flat, [at[name] for name in self._varying]
        self._stream = functools.partial(driver.active.get_current_stream, driver.active.get_current_device())
        # A launcher that takes the parts of descriptors. Triton's own would encode each descriptor again in each call.
        source = types.SimpleNamespace(fn=compiled.src.fn, constants={}, signature=dict(enumerate(signature)))
        launcher = driver.active.launcher_cls(source, compiled.metadata._replace(tensordesc_meta=None))
        self._launch = _short(launcher, compiled, self._num_programs)
        self._launcher = launcher  # last: from here on, other threads' calls use it
        return True


def _check_arguments(kernel, positional: int, given: dict):
    """Raises TypeError for more arguments than the kernel has, and for fewer. given: by name.

    Not for what is around a kernel, as triton.heuristics and triton.autotune are, which supplies some itself.
    """
    if not inspect.isfunction(kernel.fn):
        return
    if positional > len(kernel.arg_names):
        raise TypeError(f"launch: {kernel.__name__} takes {len(kernel.arg_names)} arguments, got {positional}")
    if missing := [name for name in kernel.arg_names if name not in given and name not in _defaults(kernel.fn)]:
        raise TypeError(f"launch: {kernel.__name__} was not given {', '.join(missing)}")


@functools.cache
def _defaults(function) -> frozenset[str]:
    parameters = inspect.signature(function).parameters.items()
    return frozenset(name for name, each in parameters if each.default is not each.empty)


def _short(launcher, compiled, num_programs: int):
    """A faster launcher, without hooks or scratch memory: a function of stream and arguments.

    Triton's launcher checks for both in each call and takes twice as long. Kernels that need scratch memory still use
    it.
    """
    grid, launch = (num_programs, 1, 1), launcher.launch
    function, metadata, hooks = compiled.function, compiled.packed_metadata, (None, None, None)
    if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return lambda stream, arguments: launcher(*grid, stream, function, metadata, *hooks, *arguments)
    scratch, options = (None, None), (launcher.launch_cooperative_grid, launcher.launch_pdl)
    if hasattr(launcher, "kernel_signature"):  # since Triton 3.7
        options = *options, metadata, *hooks, *scratch, launcher.arg_annotations, launcher.kernel_signature
        return lambda stream, arguments: launch(*grid, stream, function, *options, arguments)
    options = *options, *scratch, metadata, *hooks
    return lambda stream, arguments: launch(*grid, stream, function, *options, *arguments)


def _rounds(argument) -> bool:
    return getattr(argument, "round_f32_to_tf32", False)


def _let_round(kernel, num_programs: int, arguments: dict, options: dict):
    """Have Triton 3.6 round as `rounded_to_tf32` says, of which it knows nothing.

    It encodes descriptors by what the compiled kernel says of their elements.
    """
    if "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__ or not any(map(_rounds, arguments.values())):
        return
    compiled = kernel.warmup(**arguments, grid=(num_programs,), **options)
    if compiled is None:  # it is interpreted
        return
    described = [name for name, kind in compiled.src.signature.items() if str(kind).startswith("tensordesc")]
    for name, layout in zip(described, compiled.metadata.tensordesc_meta or (), strict=True):
        if _rounds(arguments[name]):
            layout["elem_type"] = TFLOAT32


def _maker(example):
    """Return a function that makes an argument like `example` from a tensor: a view as its dtype, or a descriptor."""
    if isinstance(example, TensorDescriptor):
        of = {name: getattr(example, name) for name in ("shape", "strides", "block_shape")}
        make = functools.partial(TensorDescriptor, **of)
        return (lambda tensor: rounded_to_tf32(make(tensor))) if _rounds(example) else make
    dtype = example.dtype
    return lambda tensor: tensor if tensor.dtype == dtype else tensor.detach().view(dtype)


def _address(value):
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _nothing(kind):
    """What the launcher is given for a constant, or a tuple of them: as Triton's, so that both are compiled once."""
    return tuple(map(_nothing, kind)) if isinstance(kind, tuple) else None


class _Descriptors(dict):
    """The encoded TMA descriptors of one parameter by tensor address, each made at first use."""

    def __init__(self, like: TensorDescriptor, layout):
        self._like, self._layout = copy.copy(like), layout
        self._like.base = None  # keeps no call's tensor alive

    def __missing__(self, address: int):
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) >= MAX_ADDRESSES:
            self.clear()
        # Triton reads only the address of the base, and a new TensorDescriptor would repeat checks made for the plan.
        like = copy.copy(self._like)
        like.base = types.SimpleNamespace(data_ptr=lambda: address)
        # Triton 3.6 takes two arguments, 3.9 a third one that it does not use.
        unused = itertools.repeat(None, make_tensordesc_arg.__code__.co_argcount - 2)
        descriptor = self[address] = make_tensordesc_arg(like, self._layout, *unused)[0]
        return descriptor
