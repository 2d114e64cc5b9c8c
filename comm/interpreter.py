"""Repairs Triton's interpreter into a faithful CPU device: exact types, concurrent programs, memory in place.

The stock interpreter differs from a GPU where this library needs it most: it multiplies the bit patterns of bf16
values, it runs the programs of a launch one after another (so a program can't wait for a later one), it may copy a
tensor's whole storage back onto itself after a launch (undoing concurrent writes of a peer), and it replaces every
exception by its own. `install()` repairs that, for triton 3.6 and later; importing this module changes nothing.

Weak memory is not simulated: x86 is strongly ordered, so a missing release, acquire or fence passes here.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import os
import random
import threading
import time
import types
from concurrent import futures

import numpy as np
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as stock
from triton.runtime.jit import JITFunction

# A GPU holds one to a few programs on each of its ~130 SMs; 64 threads show the same waits at an acceptable cost.
DEFAULT_RESIDENT = 64

# One in three program starts and `jitter()` calls sleeps, up to this long: it reorders neighbours and keeps tests
# quick.
JITTER_PROBABILITY = 1 / 3
JITTER_MAX_S = 5e-3

# How long an interrupted launch waits for its programs to end.
INTERRUPT_GRACE_S = 5.0


# Settings: how many programs are in flight, and the random delays


@dataclasses.dataclass(frozen=True)
class _Settings:
    resident: int = DEFAULT_RESIDENT
    jitter_seed: int | None = None
    rank: int = 0
    # Numbers the launches, so that each draws different delays and a second run of the same block repeats them.
    launches: itertools.count = dataclasses.field(default_factory=itertools.count, init=False)

    def __post_init__(self):
        if self.resident < 1:
            raise ValueError(f"resident={self.resident} (TKERNELS_RESIDENT): at least 1 program must be in flight")


_settings = _Settings()


def set_default(**settings) -> None:
    """Set how kernels run from now on, launched by any thread; settings that are not passed stay as they are.

    resident: how many programs of a launch run at once, started in order of program id, x fastest. 1 runs them one by
        one. `install` takes it from TKERNELS_RESIDENT.
    jitter_seed: seed of random delays at program starts and at `jitter()`, drawn from (seed, rank, number of the launch
        since then, program index), so that a second run gets the same delays. None: no delays. `install` takes it from
        TKERNELS_JITTER.
    rank: this process's rank in that draw.
    Raises ValueError for resident < 1.
    """
    global _settings
    _settings = dataclasses.replace(_settings, **settings)


def resident() -> int:
    """How many programs of one launch may be in flight at once; a program may only wait for one of these."""
    return _settings.resident


def integer_from_environment(name: str, default: int | None = None) -> int | None:
    """The environment's whole number of that name; `default` if it is unset or empty. Raises ValueError otherwise."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not an integer") from None


# Programs and launches


class LaunchAborted(BaseException):
    """Ends a program because another program of its launch failed. A BaseException, so that no kernel swallows it."""


class _Launch:
    """State shared by the programs of one launch."""

    def __init__(self, kernel: str, grid: tuple[int, int, int], settings: _Settings):
        self.kernel, self.grid, self.settings = kernel, grid, settings
        self.number = next(settings.launches)
        self.errors: list[BaseException] = []  # the first one ends the launch


class _Program:
    """The program that a thread is running."""

    def __init__(self, launch: _Launch, index: tuple[int, int, int]):
        self.launch, self.index = launch, index
        seed, rank = launch.settings.jitter_seed, launch.settings.rank
        self.delays = None if seed is None else random.Random(f"{seed}/{rank}/{launch.number}/{index}")


_thread = threading.local()


def _current() -> _Program | None:
    return getattr(_thread, "program", None)


def launch_number() -> int | None:
    """The number of the calling program's launch, of those of this process; None outside of kernels."""
    program = _current()
    return program and program.launch.number


def aborted() -> bool:
    """Whether another program of the calling program's launch has failed. Waits inside a kernel poll this."""
    program = _current()
    return program is not None and bool(program.launch.errors)


def raise_if_aborted():
    if aborted():
        raise LaunchAborted


def builtin(fn):
    """Mark a plain Python function as callable from kernels, in branches that only the interpreter takes.

    Without the mark, Triton refuses a kernel that names the function, even where it is never called.
    """
    fn.__triton_builtin__ = True
    return fn


_pause = time.sleep


@builtin
def jitter() -> None:
    """If the launch has a jitter seed, sleep at random. Device code calls it where the order of events matters."""
    program = _current()
    if program is not None and program.delays is not None and program.delays.random() < JITTER_PROBABILITY:
        _pause(program.delays.random() * JITTER_MAX_S)


def _run_program(body, launch: _Launch, index: tuple[int, int, int]) -> None:
    _thread.program = _Program(launch, index)
    try:
        jitter()
        body()
    except LaunchAborted:
        raise
    except BaseException as error:
        error.add_note(f"in program {index} of {launch.kernel}, grid {launch.grid}")
        raise
    finally:
        _thread.program = None


@contextlib.contextmanager
def meanwhile(task):
    """Run `task()` on another thread while the block launches kernels; return once both have ended.

    The task counts as a program for `jitter` and `aborted`; for it, `aborted` is true once the block has raised.
    Re-raises the exception of `task`, unless the block itself has raised.
    """
    launch = _Launch("meanwhile", (1, 1, 1), _settings)
    ended = _workers.submit(_run_program, task, launch, (0, 0, 0))
    try:
        yield
    except BaseException as error:
        launch.errors.append(error)
        raise
    finally:
        _wait([ended])
    ended.result()


def _wait(tasks: list[futures.Future]):
    """Wait, waking up periodically: the OS may deliver a Ctrl-C to any thread, but Python handles it in this one."""
    while futures.wait(tasks, timeout=0.2).not_done:
        pass


def _start_workers():
    """Threads that outlive a launch, since starting one costs as much as a small program; as many as are busy."""
    global _workers
    _workers = futures.ThreadPoolExecutor(1 << 20, "tkernels-program")


_start_workers()


def _run_together(body, launch: _Launch, indices, num_threads: int) -> None:
    """Run the programs on `num_threads` threads, started in order; one program after the other on the caller's own.

    Raises the first exception of any, unchanged.
    """
    lock, started = threading.Lock(), []

    def run_programs():
        # A GPU does not warn about overflow. NumPy keeps this setting per thread.
        with np.errstate(all="ignore"):
            while not launch.errors:
                with lock:
                    index = next(indices, None)
                if index is None:
                    return
                try:
                    _run_program(body, launch, index)
                except BaseException as error:
                    launch.errors.append(error)

    try:
        if num_threads == 1:
            run_programs()
        while len(started) < num_threads > 1:
            started.append(_workers.submit(run_programs))
        _wait(started)
    except BaseException as interrupt:
        launch.errors.append(interrupt)
        futures.wait(started, INTERRUPT_GRACE_S)
        raise
    if launch.errors:
        raise launch.errors[0]


def _launch_kernel(executor, *args, **kwargs):
    """Implements `kernel[grid](*args, **kwargs)`: runs every program of the grid on the caller's own memory."""
    kernel = executor.fn.__name__
    # Launch options (num_warps, num_stages, extern_libs, ...) are passed like arguments and have no effect here.
    kwargs = {name: value for name, value in kwargs.items() if name in executor.arg_names}
    for hook in executor.pre_run_hooks:
        hook(*args, **kwargs)
    bound = inspect.signature(executor.fn).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = {
        name: _without_constexpr(value) if name in executor.constexprs else _device_value(value, name, kernel)
        for name, value in bound.arguments.items()
    }
    grid = executor.grid(bound.arguments) if callable(executor.grid) else executor.grid
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"{kernel}: a grid has 1 to 3 dimensions, not {len(grid)}: {grid}")
    grid = tuple(map(operator.index, grid)) + (1,) * (3 - len(grid))

    # x fastest, the order of a GPU's block scheduler
    indices = ((x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0]))
    body = functools.partial(executor.fn, **arguments)
    _run_together(body, _Launch(kernel, grid, _settings), indices, min(_settings.resident, math.prod(grid)))


def _without_constexpr(value):
    return value.value if isinstance(value, tl.constexpr) else value


def _device_value(value, name: str, kernel: str):
    """Convert a host argument to what the kernel receives. A tensor becomes its own address: nothing is copied."""
    if isinstance(value, tl.constexpr):  # in a tuple
        return value.value
    if isinstance(value, bool):
        return _scalar(value, np.bool_, tl.int1)
    if isinstance(value, int):
        # the types that the compiler gives to integer arguments
        for dtype, triton_type in ((np.int32, tl.int32), (np.int64, tl.int64), (np.uint64, tl.uint64)):
            if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                return _scalar(value, dtype, triton_type)
        raise ValueError(f"{kernel}: {name}={value} does not fit in 64 bits")
    if isinstance(value, float):
        return _scalar(value, np.float32, tl.float32)
    if isinstance(value, tuple):
        items = [_device_value(item, f"{name}[{i}]", kernel) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    tensor = value.base if isinstance(value, stock.TensorDescriptor) else value
    if hasattr(tensor, "data_ptr") and tensor.device.type != "cpu":
        raise ValueError(f"{kernel}: {name} is on {tensor.device}, the interpreter takes CPU tensors; use {name}.cpu()")
    return stock._implicit_cvt(value)


def _scalar(value, dtype, triton_type):
    return tl.core.tensor(stock.TensorHandle(np.array([value], dtype=dtype), triton_type), triton_type)


# bf16, which the interpreter keeps as uint16 bit patterns: widen to fp32, compute, round once


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of bf16 -> float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bit patterns of bf16, to nearest, ties to even; NaN stays NaN and overflow is infinity."""
    # Not by torch, which releases the GIL: where programs share a core, a product in bf16 would take 9 % longer.
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(np.shape(values))
    # Round to nearest even: add just under half an ulp, plus the lowest kept bit. The carry runs on into the exponent,
    # up to infinity.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # A NaN with its payload in the low half would round to infinity or carry into the sign: keep the upper half and set
    # the quiet bit.
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


# FP8, which the interpreter keeps as uint8 bit patterns. Stock carries no rounded mantissa into the exponent: 127 as
# e4m3 becomes 64.

FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


@functools.cache
def _fp8_values(dtype) -> np.ndarray:
    """What the 256 bit patterns stand for, as float32."""
    return torch.from_numpy(np.arange(256, dtype=np.uint8)).view(FP8[dtype]).float().numpy()


def fp8_to_fp32(bits: np.ndarray, dtype) -> np.ndarray:
    """uint8 bit patterns of e4m3 or e5m2 -> float32, exactly."""
    return _fp8_values(dtype)[bits]


def fp32_to_fp8(values: np.ndarray, dtype) -> np.ndarray:
    """float32 -> uint8 bit patterns of e4m3 or e5m2, to nearest, ties to even.

    What is beyond the largest finite value, infinity too, becomes that value, as on a GPU. NaN stays NaN.
    """
    most = torch.finfo(FP8[dtype]).max
    copy = torch.from_numpy(np.array(values, order="C"))  # as torch warns of arrays that are only to be read
    return copy.clamp_(-most, most).to(FP8[dtype]).view(torch.uint8).numpy()


def _is_bf16(handle) -> bool:
    return isinstance(handle, stock.TensorHandle) and handle.dtype.scalar.name == "bf16"


def _widened(handle):
    if _is_bf16(handle):
        return stock.TensorHandle(bf16_to_fp32(handle.data), tl.float32)
    if isinstance(handle, stock.TensorHandle) and handle.dtype.scalar in FP8:
        return stock.TensorHandle(fp8_to_fp32(handle.data, handle.dtype.scalar), tl.float32)
    return handle


def _narrowed(handle):
    if handle.data.dtype == np.bool_:  # a comparison
        return handle
    return stock.TensorHandle(fp32_to_bf16(handle.data), tl.bfloat16)


def _in_fp32(operation, *operands):
    """Apply a builder operation to these operands, in fp32 if any of them is bf16."""
    if not any(map(_is_bf16, operands)):
        return operation(*operands)
    return _narrowed(operation(*map(_widened, operands)))


class Builder(stock.InterpreterBuilder):
    """The interpreter's operation builder, with the operations replaced that are wrong or incomplete."""

    # Each thread runs a different program, so the single builder can't store the program index.
    grid_idx = property(lambda self: _current().index)
    grid_dim = property(lambda self: _current().launch.grid)

    def get_bf16(self, value):
        return stock.TensorHandle(fp32_to_bf16(np.array([value], dtype=np.float32)), tl.bfloat16)

    # arithmetic

    def binary_op(self, lhs, rhs, op):
        compute = super().binary_op
        of_bf16 = "bf16" in (lhs.dtype.scalar.name, rhs.dtype.scalar.name)
        result = _in_fp32(compute, lhs, rhs, op) if of_bf16 else compute(lhs, rhs, op)
        if result.data.dtype.kind == "b":
            # Stock labels a comparison's result with its operands' type, so a later cast would misread it.
            return stock.TensorHandle(result.data, tl.int1)
        return result

    def unary_op(self, arg, op):
        return _in_fp32(super().unary_op, arg, op)

    def create_clampf(self, arg, lo, hi, propagate_nans):
        return _in_fp32(super().create_clampf, arg, lo, hi, propagate_nans)

    def create_fma(self, x, y, z):
        return _in_fp32(super().create_fma, x, y, z)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if any(not x.dtype.is_floating() or x.dtype.is_fp8() and x.dtype.scalar not in FP8 for x in (a, b)):
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        # In fp32 at least, as tensor cores do. NumPy's matmul is fast only if both operands have the result's type.
        accumulator = np.promote_types(d.data.dtype, np.float32)
        product = np.matmul(*(_widened(x).data.astype(accumulator, copy=False) for x in (a, b)))
        return stock.TensorHandle((product + d.data).astype(d.data.dtype, copy=False), d.dtype.scalar)

    # casts

    def cast_impl(self, src, dst_type):
        if dst_type.scalar == tl.bfloat16:
            if _is_bf16(src):
                return src
            return _narrowed(stock.TensorHandle(_widened(src).data.astype(np.float32), tl.float32))
        return super().cast_impl(_widened(src), dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if src.dtype.scalar in FP8:
            return self.cast_impl(src, dst_type)
        if dst_type.scalar in FP8 and rounding_mode == ir.ROUNDING_MODE.RTNE:
            values = self.cast_impl(src, tl.float32).data
            return stock.TensorHandle(fp32_to_fp8(values, dst_type.scalar), dst_type.scalar)
        if src.dtype.primitive_bitwidth == 8 or dst_type.scalar.primitive_bitwidth == 8:
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        nearest = self.cast_impl(src, dst_type)
        if rounding_mode != ir.ROUNDING_MODE.RTZ:
            return nearest
        exact, rounded = (np.abs(self.cast_impl(x, tl.float64).data) for x in (src, nearest))
        # If rounding went away from zero, subtracting 1 from the bits gives the next float towards zero.
        bits = nearest.data.view(f"u{nearest.data.itemsize}") - (rounded > exact)
        return stock.TensorHandle(bits.astype(f"u{nearest.data.itemsize}").view(nearest.data.dtype), nearest.dtype)

    # memory: every access of a program whose launch has failed raises, so that a loop polling a word ends too

    def create_masked_load(self, ptrs, mask, *args, **kwargs):
        raise_if_aborted()
        _require_aligned(ptrs, mask)
        return super().create_masked_load(ptrs, mask, *args, **kwargs)

    def create_masked_store(self, ptrs, value, mask, *args, **kwargs):
        raise_if_aborted()
        _require_aligned(ptrs, mask)
        return super().create_masked_store(ptrs, value, mask, *args, **kwargs)

    def create_atomic_cas(self, *args, **kwargs):
        _yield_to_other_programs()
        return super().create_atomic_cas(*args, **kwargs)

    def create_atomic_rmw(self, *args, **kwargs):
        _yield_to_other_programs()
        return super().create_atomic_rmw(*args, **kwargs)

    # tensor descriptors

    def create_descriptor_load(self, desc, indices, *cache):
        loaded = super().create_descriptor_load(desc, indices, *cache)
        if desc.padding == ir.PADDING_OPTION.PAD_NAN and _is_bf16(loaded):  # stock casts NaN to an integer
            loaded.data[~_pointers_of_descriptor(desc, indices)[1].data] = 0x7FC0
        return loaded


# The integer types, each with its least and its greatest value.
_RANGES = {
    name: (dtype.get_int_min_value(), dtype.get_int_max_value())
    for name in (*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES)
    for dtype in [tl.dtype(name)]
}


class Semantic(stock.TritonSemantic):
    """The semantics of `tl` operators, with shorter ways for what kernels mostly compute: addresses and counts."""

    _EXACT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}

    def binary_op_type_checking_impl(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        """Operands of one type are not converted, and a constant takes the type of the integers beside it."""
        lhs, rhs = self._beside(lhs, rhs), self._beside(rhs, lhs)
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            left, right = lhs.dtype.name, rhs.dtype.name
            if left == right and (left in _RANGES or not (div_or_mod or lhs.dtype.is_ptr())):
                return self.broadcast_impl_value(lhs, rhs)
            if allow_lhs_ptr and right in _RANGES and lhs.dtype.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)
        return super().binary_op_type_checking_impl(
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    def broadcast_impl_value(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else super().broadcast_impl_value(lhs, rhs)

    def _beside(self, value, other):
        """An operand; if it is an int beside integers that can hold it, or beside pointers, a tensor."""
        if type(value) is not int or not isinstance(other, tl.tensor) or other.dtype.is_bool():
            return value
        dtype = "int32" if other.dtype.is_ptr() else other.dtype.name
        lowest, highest = _RANGES.get(dtype, (0, -1))
        return self._constant(value, dtype) if lowest <= value <= highest else value

    @functools.lru_cache(4096)  # noqa: B019  (there is one of these)
    def _constant(self, value: int, dtype: str):
        return self.scalar_constant(value, tl.dtype(dtype))

    def binary_op_sanitize_overflow_impl(self, lhs, rhs, binary_op):
        """Check integer arithmetic for overflow, in numpy.

        The stock check takes five operations and more than a third of a kernel's time. Here the bounds of the operands
        mostly tell that no element can overflow.
        """
        dtype = lhs.type.scalar
        if dtype.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        exact = self._EXACT[binary_op.__name__]
        lowest, highest = _RANGES[dtype.name]
        lhs, rhs = lhs.handle.data, rhs.handle.data
        others = _bounds(rhs)
        extremes = [exact(x, y) for x in _bounds(lhs) for y in others]
        if lowest <= min(extremes) and max(extremes) <= highest:
            return
        results = exact(lhs.astype(np.int64), rhs.astype(np.int64))
        for found in (results.min(), results.max()):
            if not lowest <= found <= highest:
                name = binary_op.__name__
                raise OverflowError(f"{name} gives {found}, which {dtype} can't hold; cast to int64 before")

    @functools.cache  # noqa: B019  (there is one builder, and one of these)
    def computation_type_impl(self, *types):
        return super().computation_type_impl(*types)


def _bounds(values: np.ndarray) -> tuple[int, ...]:
    return (values.item(),) if values.size == 1 else (int(values.min()), int(values.max()))


# Most of a kernel's time goes into the types and shapes of its tensors: stock makes them anew for each tensor, and
# compares some five for each operation.


def _equal_dtypes(dtype, other) -> bool:
    if type(other) is not tl.dtype:
        other = _without_constexpr(other)
    return isinstance(other, tl.dtype) and dtype.name == other.name


_BARE = {tl.tensor, tl.dtype, int, bool, float, str, types.NoneType}
_unwrap_in_sequences = tl.core._unwrap_if_constexpr


def _unwrap_if_constexpr(value):
    return value if type(value) in _BARE else _unwrap_in_sequences(value)


_init_stock_block_type = tl.block_type.__init__


@functools.cache
def _block_type_of_int32(shape: tuple[int, ...]) -> dict:
    """Its attributes, and what tensors of that shape share."""
    made = object.__new__(tl.block_type)
    _init_stock_block_type(made, tl.int32, list(shape))
    return vars(made) | {"of_tensors": _shape_and_size(shape)}


@functools.cache
def _name_of_block_type(shape: tuple[int, ...], element_ty: str) -> str:
    return f"<{_block_type_of_int32(shape)['shape']}, {element_ty}>"


def _init_block_type(block_type, element_ty, shape):
    shape = tuple(map(_without_constexpr, shape))
    name = _name_of_block_type(shape, element_ty.name)
    vars(block_type).update(_block_type_of_int32(shape), element_ty=element_ty, name=name)


@functools.cache
def _shape_and_size(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _init_tensor(tensor, handle, type):
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    shared = getattr(type, "of_tensors", None) or _shape_and_size(tuple(type.shape) if type.is_block() else ())
    tensor.shape, tensor.numel = shared


_SIZES = {name: max(8, tl.dtype(name).primitive_bitwidth) // 8 for name in (*_RANGES, *tl.dtype.FP_TYPES)}
_check_any_handle = stock.TensorHandle.__post_init__


def _check_handle(handle):
    if handle.data.itemsize > _SIZES.get(handle.dtype.name, 0):
        _check_any_handle(handle)


def _pointers_of_descriptor(descriptor, offsets):
    """Pointers and mask of a descriptor's block; stock computes all that belongs to one dimension for each element."""
    size = descriptor.base.dtype.element_ty.primitive_bitwidth // 8
    assert (offsets[-1].data * size) % 16 == 0, "block offset start must be 16-byte aligned"
    pointers, mask = descriptor.base.data.reshape(()), np.True_
    for offset, length, stride, block in zip(
        offsets, descriptor.shape, descriptor.strides, descriptor.block_shape, strict=True
    ):
        at = offset.data + np.arange(block)
        pointers = pointers[..., None] + (size * at * stride.data).astype(np.uint64)
        mask = mask[..., None] & (0 <= at) & (at < length.data)
    return stock.TensorHandle(pointers, descriptor.base.dtype.scalar), stock.TensorHandle(mask, tl.int1)


def _require_aligned(ptrs, mask):
    """Raise ValueError for an element that is not aligned to its own size: a GPU faults on it, a CPU would read it."""
    size = ptrs.get_element_ty().primitive_bitwidth // 8
    if size > 1:
        astray = ptrs.data & np.asarray(size - 1, ptrs.data.dtype)
        if astray.any() and (astray.astype(np.bool_) & mask.data).any():
            raise ValueError(f"misaligned address: elements of {size} bytes, {astray.max()} past a multiple of that")


def _yield_to_other_programs():
    """Release the GIL: programs spin on atomics, and a spinning one would keep the GIL from the one it waits for."""
    raise_if_aborted()
    time.sleep(0)


def _reduce_or_scan(op, inputs):
    """Implements tl.reduce and tl.associative_scan: 16-bit floats are computed in fp32 and rounded once at the end."""
    if not isinstance(inputs, tuple):
        return _reduce_or_scan(op, (inputs,))[0]
    op.check_tensor(inputs)
    cast = stock.interpreter_semantic.cast
    short = [x.dtype in (tl.float16, tl.bfloat16) for x in inputs]
    outputs = op.apply_impl(tuple(cast(x, tl.float32) if s else x for x, s in zip(inputs, short, strict=True)))
    outputs = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    return tuple(cast(y, x.dtype) if s else y for x, y, s in zip(inputs, outputs, short, strict=True))


# Installation


_numpy_type_of_scalar = functools.cache(stock._get_np_dtype)  # stock rebuilds its table of types in each call


def _numpy_type(dtype):
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _numpy_type_of_scalar(scalar)


def _call_device_function(function, *args, **kwargs):
    """Call a @triton.jit function from a kernel. Stock patches all of `tl` in each call, and hides exceptions."""
    return function.rewrite()(*args, **kwargs)


@functools.cache
def _interpreted(fn):
    return stock.InterpretedFunction(fn)


def _call_compiled_function(function, *args, **kwargs):
    """Call a function decorated before `install`, such as Triton's own tl.sum and tl.cdiv, from a kernel."""
    if _current() is None:
        raise RuntimeError(f"{function.__name__} is a @triton.jit function; only kernels can call it")
    return _interpreted(function.fn)(*args, **kwargs)


def _method(function: JITFunction):
    return lambda self, *args, **kwargs: _interpreted(function.fn)(self, *args, **kwargs)


def _compile_rewritten(rewriter, tree):
    """Compile a function's rewritten source in the globals of its own module.

    Stock copies all of its own globals there too, so a kernel that lacks an import would run here and fail on the GPU.
    """
    module = rewriter.fn.__globals__
    for name in ("interpreter_semantic", "_InterpreterComparison"):  # the names that rewritten source uses
        if hasattr(stock, name):
            module.setdefault(name, getattr(stock, name))
    namespace = dict(rewriter.kwargs)
    exec(compile(tree, rewriter.filename, "exec"), module, namespace)
    return namespace[rewriter.fn.__name__]


_rewriting = threading.RLock()


def _rewrite(function):
    if function.fn not in function.rewritten_fn:
        with _rewriting:
            if function.fn not in function.rewritten_fn:
                function.rewritten_fn[function.fn] = function.rewriter.rewrite_ast()
    return function.rewritten_fn[function.fn]


def _patch_function(of, name: str, function, *_):
    """Replace a function of `tl` by one that is called without `_semantic`."""
    implementation = getattr(function, "__wrapped__", function)  # beneath a check that `_semantic` is passed

    def interpreted(*args, **kwargs):
        kwargs["_semantic"] = stock.interpreter_semantic
        return implementation(*args, **kwargs)

    setattr(of, name, interpreted)


def _patch_language():
    """Replace every function of `tl` by its interpreted version, permanently.

    Stock does so for the duration of a launch, which costs time in each launch and call and is a race between launches.
    """
    stock._patch_attr = _patch_function
    stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    stock._patch_lang = lambda fn: stock._LangPatchScope()
    # NumPy 2.4 refuses int() of a one-element array; triton 3.6 relies on it.
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    for name, member in list(vars(tl.core.tensor).items()):
        if isinstance(member, JITFunction):
            setattr(tl.core.tensor, name, _method(member))


@functools.cache
def install() -> None:
    """Switch this process to the interpreter: @triton.jit functions decorated from now on run on CPU tensors, repaired.

    May be called again, to no effect. Kernels decorated earlier can't be launched, but interpreted ones may call them.
    Reads TKERNELS_RESIDENT and TKERNELS_JITTER; raises ValueError if they aren't integers.
    """
    set_default(
        resident=integer_from_environment("TKERNELS_RESIDENT", DEFAULT_RESIDENT),
        jitter_seed=integer_from_environment("TKERNELS_JITTER"),
    )
    os.register_at_fork(after_in_child=_start_workers)
    _interpret_from_now_on()
    stock.interpreter_builder.__class__ = stock.InterpreterBuilder = Builder
    stock.interpreter_semantic.__class__ = stock.TritonSemantic = Semantic
    stock.TensorHandle.__post_init__ = _check_handle
    stock._get_np_dtype = _numpy_type
    stock.ReduceScanOpInterface.apply = _reduce_or_scan
    stock.TensorDescHandle.materialize_pointers = _pointers_of_descriptor
    tl.core._unwrap_if_constexpr = _unwrap_if_constexpr
    tl.dtype.__eq__ = _equal_dtypes
    tl.block_type.__init__ = _init_block_type
    tl.core.tensor.__init__ = _init_tensor
    stock.GridExecutor.__call__ = _launch_kernel
    stock.InterpretedFunction.__call__ = _call_device_function
    stock.InterpretedFunction.rewrite = _rewrite
    stock.FunctionRewriter._compile_and_exec = _compile_rewritten
    JITFunction.__call__ = _call_compiled_function
    _patch_language()


def _interpret_from_now_on():
    """Set Triton's own switch without exporting it to the environment: a child process may want to compile."""
    propagate, triton.knobs.propagate_env = triton.knobs.propagate_env, False
    try:
        triton.knobs.runtime.interpret = True
    finally:
        triton.knobs.propagate_env = propagate
