"""The options of cublasmp.Matmul: nvmath's names and cuBLASMp's numbers.

Unsupported values are refused when an option is set or when the problem is planned. No option is ignored; algo_type is
a hint, see MatmulAlgoType.
"""

import enum
import functools
from dataclasses import dataclass, field
from logging import Logger, LoggerAdapter
from typing import Literal

import numpy
import torch

from tkernels.comm.arguments import check_type
from tkernels.configs import DTYPES, FP8


class MatmulAlgoType(enum.IntEnum):
    """A hint for the overlap algorithm; `Matmul.outcome.algorithm` reports the one used.

    There is one overlap algorithm here, ATOMIC_P2P in cuBLASMp's terms: one kernel multiplies while its tiles are
    signalled from rank to rank. NO_OVERLAP is a collective before or after a local GEMM. DEFAULT selects NO_OVERLAP if
    there is too little communication to hide (tkernels.paths), unless sm_count_communication is set. All other hints
    become ATOMIC_P2P.
    """

    DEFAULT = 0
    SPLIT_P2P = 1
    SPLIT_MULTICAST = 2
    ATOMIC_P2P = 3
    ATOMIC_MULTICAST = 4
    NO_OVERLAP = 5
    FUSED = 6

    __hash__ = int.__hash__  # Enum's own is Python code, and every call of `matmul` hashes its options


class MatmulEpilog(enum.IntFlag):
    """The operation applied to alpha op(A) op(B) + beta C after the sum over ranks. ALLREDUCE may be or-ed with others.

    BIAS: adds a vector along the rows of D, before the activation.
    RELU, GELU: the activation; GELU is the tanh approximation, as in cuBLAS.
    _AUX: also returns the input of backward: `relu_aux`, one bit per element, set if it was positive, or `gelu_aux`,
        the values before GELU.
    DRELU, DGELU: multiply by the derivative, from the same aux.
    _BGRAD: also returns D summed over its columns.
    BGRADA, BGRADB: also return op(A) or op(B) summed over the contracted dimension.
    """

    DEFAULT = 0
    ALLREDUCE = 1
    RELU = 2
    BIAS = 4
    RELU_BIAS = 6
    GELU = 32
    GELU_BIAS = 36
    RELU_AUX = 130
    RELU_AUX_BIAS = 134
    DRELU = 136
    DRELU_BGRAD = 152
    GELU_AUX = 160
    GELU_AUX_BIAS = 164
    DGELU = 192
    DGELU_BGRAD = 208
    BGRADA = 256
    BGRADB = 512

    __hash__ = int.__hash__


EPILOGS = tuple(epilog for epilog in MatmulEpilog.__members__.values() if epilog != MatmulEpilog.ALLREDUCE)


class MatmulResultScheme(enum.IntEnum):
    """For bias gradients that need a sum over ranks: FULL sums them, PARTIAL (DEFAULT) returns this rank's part."""

    DEFAULT = 0
    PARTIAL = 1
    FULL = 2


class MatmulComputeType(enum.IntEnum):
    """Compute types, with cuBLAS's numbers. Sums are in fp32 here, so only the 32F types exist."""

    COMPUTE_32F = 68
    COMPUTE_32F_PEDANTIC = 69
    COMPUTE_32F_FAST_TF32 = 77


class CudaDataType(enum.IntEnum):
    """CUDA's numbers of the supported dtypes. Options accept torch's dtypes as well."""

    CUDA_R_32F = 0
    CUDA_R_16F = 2
    CUDA_R_16BF = 14
    CUDA_R_8F_E4M3 = 28
    CUDA_R_8F_E5M2 = 29


_TORCH = dict(zip(CudaDataType, (*DTYPES, *FP8), strict=True))


def _boolean(name: str, value) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(f"{name}={value!r} must be a boolean")
    return bool(value)


def _member(name: str, kind, value):
    """The member of an enum. Raises ValueError that names the option and the members."""
    if not isinstance(value, int) or value not in list(kind):
        names = ", ".join(f"{member.name.removeprefix('COMPUTE_')} ({member.value})" for member in kind)
        raise ValueError(f"{name}={value!r} must be one of {names}; {value!r} is not a valid {kind.__name__}")
    return kind(value)


def _dtype(name: str, value) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype) and value in _TORCH.values():
        return value
    if not isinstance(value, int) or value not in _TORCH:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TORCH.values())
        raise ValueError(f"{name}={value!r} is not supported; use {names} of torch")
    return _TORCH[value]


@dataclass(frozen=True)
class MatmulOptions:
    """The options of a distributed matmul. Fields up to `blocking` are nvmath's.

    inplace: if C is passed, write the result to it and return it.
    compute_type: how fp32 operands are multiplied: 32F and 32F_PEDANTIC in IEEE fp32, 32F_FAST_TF32 in TF32, whatever
        torch's switch says. None: as that says. Other operands take 32F and 32F_PEDANTIC, which change nothing.
    scale_type: float32.
    result_type: the operands' dtype (default) or float32. Of fp8 operands any supported dtype; by default C's, without
        C that of A.
    algo_type: see MatmulAlgoType.
    sm_count_communication: the number of comm programs, which send while the others multiply.
    blocking: True: execute returns after the stream's work has finished.
    communication_type: dtype of the partial sums that GEMM+RS and GEMM+AR send: float32 (default), or the operands'
        dtype, of fp8 bfloat16, which halves the data sent at the cost of one more rounding of each rank's part.
    order: "F" takes matrices as cuBLASMp does: D = op(A) op(B). "C" takes each matrix as its transpose, that is, it
        reads the same memory row by row, as PyTorch does: D = op(B) op(A), with a bias along D's columns; distributions
        describe the matrices as passed. With order="C" and op(A) transposed, A is the weight of an nn.Linear and B its
        input.
    result_amax: of an fp8 result: also return the largest magnitude in this rank's part of D before it is scaled, as
        the auxiliary output "result_amax", float32 [1].
    block_scaling: isn't supported.
    fast_accum: of fp8 operands: sums stay in tensor cores, see tkernels.matmul. False, as in cuBLAS: they don't.
    """

    inplace: bool = True
    compute_type: int | None = None
    scale_type: int | None = None
    result_type: int | None = None
    algo_type: int | None = None
    result_amax: bool = False
    block_scaling: bool = False
    sm_count_communication: int | None = None
    logger: Logger | None = field(default=None, compare=False)
    blocking: Literal[True, "auto"] = "auto"
    communication_type: torch.dtype | int | None = None
    order: Literal["F", "C"] = "F"
    fast_accum: bool = False

    def __post_init__(self):
        mine = vars(self)  # a frozen object's attributes can't be set otherwise
        for name in ("inplace", "result_amax", "block_scaling", "fast_accum"):
            mine[name] = _boolean(f"MatmulOptions: {name}", mine[name])
        for name in ("scale_type", "result_type", "communication_type"):
            mine[name] = _dtype(f"MatmulOptions: {name}", mine[name])
        if self.scale_type not in (None, torch.float32):
            raise ValueError(f"MatmulOptions: scale_type={self.scale_type} must be float32, as alpha and beta are")
        for name, kind in (("compute_type", MatmulComputeType), ("algo_type", MatmulAlgoType)):
            if mine[name] is not None:
                mine[name] = _member(f"MatmulOptions: {name}", kind, mine[name])
        count = self.sm_count_communication
        if count is not None and not (type(count) is int and count > 0):
            raise ValueError(f"MatmulOptions: sm_count_communication={count!r} must be a positive integer")
        if count is not None and self.algo_type == MatmulAlgoType.NO_OVERLAP:
            raise ValueError(
                f"MatmulOptions: sm_count_communication={count} is of an overlap, but algo_type=NO_OVERLAP"
            )
        if self.block_scaling:
            raise ValueError(
                "MatmulOptions: block_scaling=True is for fp8 with scales of 32 elements each, or narrower; neither is "
                "supported; leave it out, for one scale of each matrix"
            )
        kinds = Logger, LoggerAdapter, type(None)
        check_type("MatmulOptions: logger", self.logger, kinds, "a logging.Logger or None")
        if not (self.blocking is True or isinstance(self.blocking, str) and self.blocking == "auto"):
            raise ValueError(f"MatmulOptions: blocking={self.blocking!r} must be True or 'auto'")
        if not isinstance(self.order, str) or self.order not in ("F", "C"):
            raise ValueError(f"MatmulOptions: order={self.order!r} must be 'F' or 'C'")


@dataclass(frozen=True)
class MatmulEpilogPreferences:
    """Preferences of an epilog.

    aux_type: the result's dtype, of an fp8 result C's or without C float16; or None for the same.
    aux_amax: for fp8, which auxiliary outputs never are.
    bias_result_scheme: for bias gradients; see MatmulResultScheme.
    """

    aux_type: int | None = None
    aux_amax: bool = False
    bias_result_scheme: MatmulResultScheme = MatmulResultScheme.FULL

    def __post_init__(self):
        scheme = _member("MatmulEpilogPreferences: bias_result_scheme", MatmulResultScheme, self.bias_result_scheme)
        aux_type = _dtype("MatmulEpilogPreferences: aux_type", self.aux_type)
        vars(self).update(aux_type=aux_type, bias_result_scheme=scheme)
        if _boolean("MatmulEpilogPreferences: aux_amax", self.aux_amax):
            raise ValueError("MatmulEpilogPreferences: aux_amax=True is for fp8 and narrower, which aux never is")


@dataclass(frozen=True)
class MatmulPlanPreferences:
    """epilog: MatmulEpilogPreferences, or a dict of its fields."""

    epilog: MatmulEpilogPreferences | None = None

    def __post_init__(self):
        vars(self).update(epilog=given(MatmulEpilogPreferences, self.epilog))


@dataclass(frozen=True)
class MatmulQuantizationScales:
    """Scales of fp8 matrices, each a number or a float32 tensor of one element: D = d epilog(alpha a A b B + beta C).

    a, b: may differ between ranks, whose parts they scale. d: of an fp8 result, which saturates. c: C is never fp8.
    """

    a: float | torch.Tensor | None = None
    b: float | torch.Tensor | None = None
    c: float | torch.Tensor | None = None
    d: float | torch.Tensor | None = None


matrix_qualifiers_dtype = numpy.dtype([("structure", object), ("is_transpose", "<i1"), ("is_conjugate", "<i1")])


def transposes(qualifiers) -> tuple[bool, bool]:
    """Whether A and B are transposed, from nvmath's array of three qualifiers, a string such as "TN", or None."""
    if qualifiers is None:
        return False, False
    if isinstance(qualifiers, str):
        if qualifiers not in ("NN", "NT", "TN", "TT"):
            raise ValueError(f"qualifiers={qualifiers!r} must be 'NN', 'NT', 'TN' or 'TT'")
        return qualifiers[0] == "T", qualifiers[1] == "T"
    if getattr(qualifiers, "dtype", None) != matrix_qualifiers_dtype or qualifiers.shape != (3,):
        raise ValueError(
            "qualifiers must be an array of three matrix_qualifiers_dtype, for A, B and C, or 'TN' and so on"
        )
    if any(qualifiers["structure"]):
        raise ValueError("qualifiers: structure must be None or 0; matrices of a structure are not supported")
    if qualifiers["is_conjugate"].any():
        raise ValueError("qualifiers: is_conjugate is for complex matrices, which are not supported")
    if qualifiers[2]["is_transpose"]:
        raise ValueError("qualifiers: C can't be transposed")
    return bool(qualifiers[0]["is_transpose"]), bool(qualifiers[1]["is_transpose"])


def given(cls, value):
    """An options object: `value` itself, or one made from a dict of fields, or for None from the defaults."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, (dict, type(None))):
        raise TypeError(f"{cls.__name__}: pass an object of it or a dict of its fields, not {value!r}")
    try:
        return _made(cls, **(value or {}))
    except TypeError:  # an unhashable value, or an unknown field
        if unknown := [name for name in value if name not in cls.__dataclass_fields__]:
            fields = ", ".join(cls.__dataclass_fields__)
            raise TypeError(f"{cls.__name__}: there is no field {unknown[0]!r}; there are {fields}") from None
        return cls(**value)


@functools.lru_cache(maxsize=64, typed=True)
def _made(cls, **fields):  # a call of `matmul` makes the same objects again and again, 20 us each
    return cls(**fields)
