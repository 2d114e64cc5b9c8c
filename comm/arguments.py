"""Checks of what callers pass and of what the environment holds: a slip is named in a sentence, wherever it is made."""

import math
import operator
import os
import reprlib
from collections.abc import Iterable

import torch

LARGEST = (1 << 63) - 1  # size that torch can count
LARGEST_FP32 = 3.4028235e38
_SWITCHES = {"": False, "0": False, "false": False, "no": False, "off": False} | {
    "1": True, "true": True, "yes": True, "on": True,
}  # fmt: skip


def whole(what: str, value, least: int = 0, most: int = LARGEST) -> int:
    """`value` as an int, also if it is one of numpy's or torch's integers; a SymInt stays one.

    what: its name, for errors. Raises TypeError for anything else, ValueError for a number outside of least .. most.
    """
    if isinstance(value, torch.SymInt):
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}={reprlib.repr(value)} must be a whole number") from None
    if not least <= number <= most:
        limit = f"at least {least}" if number < least else f"at most {most}"
        raise ValueError(f"{what}={reprlib.repr(number)} must be {limit}")
    return number


def real(what: str, value) -> float:
    """`value` as a float, also if it is one number of numpy's or torch's.

    what: its name, for errors. Raises TypeError for anything else, ValueError for a finite one that fp32 can't hold.
    """
    try:
        number = None if isinstance(value, (str, bytes, bytearray)) else float(value)  # which float() would read
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: tensors of several elements
        number = None
    if number is None:
        raise TypeError(f"{what}={reprlib.repr(value)} is no real number")
    if math.isfinite(number) and abs(number) > LARGEST_FP32:
        raise ValueError(f"{what}={number} is more than fp32 can hold")
    return number


def check_type(what: str, value, kind: type | tuple[type, ...], words: str):
    """Raise TypeError unless `value` is of `kind`, which `words` describe."""
    if not isinstance(value, kind):
        raise TypeError(f"{what}={reprlib.repr(value)} must be {words}")


def several(what: str, value, words: str) -> list:
    """The elements of an iterable, which `words` describe. Raises TypeError for anything else, also for a tensor."""
    if isinstance(value, torch.Tensor) or not isinstance(value, Iterable):
        raise TypeError(f"{what}={reprlib.repr(value)} must be {words}")
    return [*value]


def check_torch_dtype(what: str, value):
    """Raise TypeError unless `value` is a torch.dtype."""
    check_type(what, value, torch.dtype, "a torch.dtype")


def check_flags(caller: str, **flags):
    """Raise TypeError unless the values are True or False: any word is true, "False" too."""
    for name, value in flags.items():
        check_type(f"{caller}: {name}", value, bool, "True or False")


def check_streams(caller: str, dev, device: torch.device | None, **streams):
    """Raise TypeError for what has no streams, for torch's module of another device, and for no stream of `dev`.

    streams: by name; None stands for a default.
    """
    name, wanted = getattr(dev, "__name__", reprlib.repr(dev)), f"torch.{device.type}" if device else "torch.cuda"
    has_them = all(callable(getattr(dev, each, None)) for each in ("Stream", "current_stream", "stream"))
    if not has_them or device and name in ("torch.cpu", "torch.cuda") and name != wanted:
        raise TypeError(f"{caller}: dev={name} must be {wanted}, or another that has its streams; leave it out")
    for name, stream in streams.items():
        if stream is not None:
            kind = type(dev.current_stream())
            check_type(f"{caller}: {name}", stream, kind, f"a {kind.__name__}, or None for the default")


def check_tensors(operation: str, **operands):
    """Raise TypeError for operands, by name, that are no tensors and don't stand for one in a trace."""
    for name, value in operands.items():
        if not isinstance(value, torch.Tensor) and not hasattr(value, "__torch_function__"):
            raise TypeError(f"{operation}: {name}={reprlib.repr(value)} must be a tensor")


def check_dense(operation: str, **operands):
    """Raise TypeError for operands, by name, that are no tensors or are sparse or nested ones."""
    check_tensors(operation, **operands)
    if torch.compiler.is_compiling():
        return  # dynamo can't read a layout in a backward
    for name, value in operands.items():
        if getattr(value, "is_nested", False):
            raise TypeError(f"{operation}: {name} must be one tensor, not a nested one; pass each of its parts")
        if getattr(value, "layout", torch.strided) is not torch.strided:
            raise TypeError(f"{operation}: {name} must be a strided tensor, not {value.layout}; pass a .to_dense() one")


def check_resolved(name: str, label: str, tensor: torch.Tensor):
    """Raise ValueError for a tensor that torch negates or conjugates lazily: kernels read the memory as it is."""
    if torch.compiler.is_compiling():
        return  # a traced tensor can't be queried; the compiled call checks
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{name}: {label} is a negated or conjugated view; pass {label}.resolve_neg().resolve_conj()")


def check_out(name: str, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
    """Raise ValueError or TypeError unless `out` has that shape and dtype, is contiguous and is on `device`."""
    if out.dtype != dtype:
        raise TypeError(f"{name}: out is {out.dtype}, but the result is {dtype}")
    if tuple(out.shape) != tuple(shape) or not out.is_contiguous() or out.device != device:
        raise ValueError(
            f"{name}: out is {tuple(out.shape)} with strides {out.stride()} on {out.device}, but must be "
            f"{tuple(shape)}, contiguous, on {device}"
        )
    check_resolved(name, "out", out)


def switch(name: str) -> bool:
    """Whether the environment switches `name` on: by 1, true, yes or on. Unset or empty, and 0, false, no or off: not.

    Raises ValueError for anything else.
    """
    text = os.environ.get(name, "")
    if text.lower() not in _SWITCHES:
        raise ValueError(f"{name}={text!r} is neither on (1, true, yes, on) nor off (0, false, no, off, or empty)")
    return _SWITCHES[text.lower()]
