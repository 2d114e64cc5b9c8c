"""Operands of torch, numpy and cupy, as torch tensors where a context computes; results return the way they came.

    operands                        computed on                     results
    torch, on the context's device  themselves                      torch, on that device
    torch on the CPU, numpy         the simulated runtime: the same memory; a GPU: a copy, as with nvmath
                                                                    torch on the CPU, numpy
    cupy                            the same memory, by DLPack on the current stream
                                                                    cupy

cupy is imported only by whoever passes its arrays.
"""

import warnings
from typing import NamedTuple

import numpy
import torch

from tkernels.comm import Context
from tkernels.comm.arguments import check_dense, check_resolved


class Home(NamedTuple):
    """Where operands come from. package: "torch", "numpy" or "cupy"."""

    package: str
    device: torch.device

    @classmethod
    def of(cls, name: str, operand) -> "Home":
        """Raises TypeError for what is no operand."""
        if isinstance(operand, torch.Tensor):
            return cls("torch", operand.device)
        if isinstance(operand, numpy.ndarray):
            return cls("numpy", torch.device("cpu"))
        kind = type(operand)
        if kind.__module__.partition(".")[0] == "cupy" and kind.__name__ == "ndarray":
            kind, number = operand.__dlpack_device__()
            return cls("cupy", torch.device("cpu") if kind == 1 else torch.device("cuda", number))
        raise TypeError(f"{name} is {kind.__name__}; operands are torch tensors, or numpy or cupy arrays")

    def __str__(self):
        return f"{self.package} on {self.device}"


def bring(ctx: Context, operands: dict, home: Home | None = None) -> tuple[Home | None, dict[str, torch.Tensor]]:
    """(where the operands come from, the operands as torch tensors on the context's device), by name.

    operands: "a", "b", "c" and the epilog's inputs. Without any, `home` is returned.
    home: where they must come from; None: from anywhere, all from one place. Raises ValueError or TypeError otherwise.
    """
    for name, operand in operands.items():
        name = _label(name)
        found = Home.of(name, operand)
        if home is not None and found != home:
            raise TypeError(f"{name} is of {found}, but others are of {home}; all must be of one package and device")
        home = found
        if home.package == "torch":
            check_dense("cublasmp", **{name: operand})
            check_resolved("cublasmp", name, operand)
    if home is None or home == ("torch", ctx.device):
        return home, operands
    if home.device not in (ctx.device, torch.device("cpu")):
        raise ValueError(f"{_label(name)} is on {home.device}, but this context works on {ctx.device}")
    return home, {name: tensor_of(_label(name), operand).to(ctx.device) for name, operand in operands.items()}


def _label(name: str) -> str:
    return name.upper() if name in ("a", "b", "c") else name


def tensor_of(name: str, operand) -> torch.Tensor:
    """A torch tensor of the operand's memory. Raises TypeError or ValueError for memory that torch can't describe."""
    if isinstance(operand, torch.Tensor):
        return operand
    if not isinstance(operand, numpy.ndarray):
        return torch.from_dlpack(operand)
    if not operand.flags.writeable and name == "C":
        raise ValueError("C is a read-only array; pass a copy that can be written to")
    try:
        if operand.flags.writeable:
            return torch.from_numpy(operand)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*not writable")  # which torch can't mark; operands are only read
            return torch.from_numpy(operand)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}, a numpy array of {operand.dtype} with strides {operand.strides}: {error}") from None


def take_back(home: Home, result, into=None):
    """The result of a call, D or (D, {name: auxiliary output}), as its operands came.

    into: the caller's C, if D is written to it: it is returned, and filled if D lies elsewhere.
    """
    if isinstance(result, tuple):
        d, aux = result
        return take_back(home, d, into), {name: take_back(home, value) for name, value in aux.items()}
    if into is not None:
        mine = tensor_of("C", into)
        if mine.data_ptr() != result.data_ptr():
            mine.copy_(result)
        return into
    if home.package == "torch":
        return result.to(home.device)
    if home.package == "numpy":
        return result.cpu().numpy()
    import cupy

    return cupy.from_dlpack(result)
