"""The problem of a distributed matmul: its comparison between ranks, and the choice of collective and distributions.

Letters, as in cuBLASMp: D[m, n] = epilog(alpha op(A)[m, k] op(B)[k, n] + beta C[m, n]), on P ranks. A matrix is "split
m" if the ranks own consecutive slabs of that dimension in rank order, of any sizes.

    pattern     op(A)       op(B)       D               on the wire
    AG+GEMM     split m     split n     split m         op(B), gathered
    GEMM+RS     split k     split k     split n         partial sums, each to the rank that owns its columns
    GEMM+AR     split k     split k     on every rank   partial sums, then the finished sums
    local                                               nothing: one rank

Matrices with any other distribution are redistributed to or from the pattern that moves fewer matrices.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tkernels.comm.calls import differing
from tkernels.comm.collectives import split_rows
from tkernels.comm.errors import MismatchError
from tkernels.comm.regions import round_up
from tkernels.configs import DTYPES, FP8
from tkernels.layers.cublasmp.distributions import (
    Box,
    Distribution,
    Owned,
    covers_once,
    local_shape,
    slabs,
    split_of,
)
from tkernels.layers.cublasmp.options import (
    EPILOGS,
    MatmulComputeType,
    MatmulEpilog,
    MatmulOptions,
    MatmulPlanPreferences,
)

FP8_PAIRS = {(FP8[0], FP8[0]), FP8, FP8[::-1]}  # of dtypes of A and B
AUX, BGRAD = MatmulEpilog(128), MatmulEpilog(16)
D_RELU, D_GELU = MatmulEpilog(8), MatmulEpilog(64)  # the bits that only DRELU and DGELU, and their BGRADs, have


class Operand(NamedTuple):
    """The properties of a tensor that a plan depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Operand":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def transposed(self) -> "Operand":
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])


class Problem(NamedTuple):
    """Everything in one rank's call that a plan depends on, as it was passed: what plans are kept by.

    inputs: the epilog's inputs, by name.
    precision: of the GEMM, as tkernels.gemm.precision says it, with float32 as options.compute_type has it.
    scales: the names of the quantization scales.
    totals: the caller's key of the global sizes, which one rank's parts don't tell.

    Scalars are not part of it: one plan serves every alpha and beta.
    """

    a: Operand
    b: Operand
    c: Operand | None
    distributions: tuple[Distribution, Distribution, Distribution]
    transposes: tuple[bool, bool]
    epilog: MatmulEpilog
    inputs: tuple[tuple[str, Operand], ...]
    options: MatmulOptions
    preferences: MatmulPlanPreferences
    precision: str
    scales: tuple[str, ...]
    totals: object = None

    def tensors(self) -> dict[str, Operand]:
        """The operands and the epilog's inputs, by name."""
        operands = {name: each for name, each in zip("abc", self[:3], strict=True) if each is not None}
        return operands | dict(self.inputs)

    def by_columns(self) -> "Problem":
        """The same problem with all tensors read column by column: with order="C", their transposes are."""
        if self.options.order == "F":
            return self
        inputs = ((name, each if name == "bias" else each.transposed()) for name, each in self.inputs)
        return self._replace(
            a=self.a.transposed(),
            b=self.b.transposed(),
            c=self.c and self.c.transposed(),
            inputs=tuple(inputs),
        )

    def turned(self, pair: tuple) -> tuple:
        """What a matrix has by (row, column) as passed, read column by column; or the reverse."""
        return pair[::-1] if self.options.order == "C" else pair


class InconsistentError(MismatchError, ValueError):
    """The ranks' problems don't make one; a ValueError, as in nvmath."""


@dataclass
class MatrixLayout:
    """A rank's part of a matrix, as nvmath describes it; strides in elements."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    is_transpose: bool = False
    is_conjugate: bool = False


@dataclass
class MMTraits:
    """The traits of a matmul, under nvmath's names. M, N, K: over all ranks. d_layout: None before `plan`."""

    M: int
    N: int
    K: int
    a_layout: MatrixLayout
    b_layout: MatrixLayout
    c_layout: MatrixLayout | None
    d_layout: MatrixLayout | None = None


Split = tuple[str, tuple[int, ...]]  # a letter, and its extent on each rank


def infer(
    extents: dict[str, int], size: int, splits: dict[str, Split | None], all_reduce: bool
) -> tuple[str, dict[str, Split]]:
    """(pattern, the split that it requires of each matrix), with the fewest redistributions. A pure function.

    extents: of m, n and k.
    splits: of a, b and d as distributed; None for a distribution that is not a split.
    """
    if size == 1:
        return "local", {}

    def split(letter: str, *names: str) -> Split:
        found = (splits[name] for name in names if splits[name] and splits[name][0] == letter)
        return next(found, (letter, split_rows(extents[letter], size)))

    k = split("k", "a", "b")
    if all_reduce:
        return "GEMM+AR", {"a": k, "b": k}
    m = split("m", "d", "a")
    choices = {
        "AG+GEMM": {"a": m, "b": split("n", "b"), "d": m},
        "GEMM+RS": {"a": k, "b": k, "d": split("n", "d")},
    }
    pattern = min(choices, key=lambda name: len(redistributed(splits, choices[name])))
    return pattern, choices[pattern]


def redistributed(splits: dict[str, Split | None], wanted: dict[str, Split]) -> tuple[str, ...]:
    """The names of the matrices that are not split as `wanted`."""
    return tuple(name for name, split in wanted.items() if splits[name] != split)


@dataclass(frozen=True)
class Extents:
    """What the ranks' A and B make together, the same on every rank.

    problems: by rank, read column by column.
    shapes, owned: by name, "a" and "b", of a Layout "d" too: of the whole matrix as passed or returned, and each
        rank's rows and columns of it.
    """

    problems: list[Problem]
    m: int
    n: int
    k: int
    shapes: dict[str, tuple[int, int]]
    owned: dict[str, list[Owned]]
    result_dtype: torch.dtype
    aux_dtype: torch.dtype
    wire_dtype: torch.dtype

    def traits(self, rank: int) -> MMTraits:
        """The traits of a rank's problem, but for D's layout."""
        problem = self.problems[rank]
        layouts = [
            operand and MatrixLayout(operand.shape, operand.strides, transposed)
            for operand, transposed in zip(problem[:3], (*problem.transposes, False), strict=True)
        ]
        return MMTraits(self.m, self.n, self.k, *layouts)


@dataclass(frozen=True)
class Layout(Extents):
    """The resolved form of a problem, the same on every rank.

    splits: for each letter that the pattern splits, its extent on each rank.
    wanted: as `owned`, but as the pattern requires, of the matrices that are split in another way: these are
        redistributed.
    """

    pattern: str
    splits: dict[str, tuple[int, ...]]
    wanted: dict[str, list[Owned]]


def survey(everyone: list, num_programs: int) -> Extents:
    """The extents of the ranks' problems, all but D's. A function of its arguments, so all ranks return or raise alike.

    everyone: by rank, its Problem and (alpha, beta), or the exception that prevented these.

    Raises the first rank's exception, InconsistentError where ranks differ, and ValueError or TypeError for a problem
    that can't be computed.
    """
    for rank, found in enumerate(everyone):
        if isinstance(found, Exception):
            raise type(found)(f"rank {rank}: {found}")
    _compare(everyone)
    problems = [problem.by_columns() for problem, _ in everyone]
    first = problems[0]
    for name in ("a", "b") if first.c is None else ("a", "b", "c"):
        _check_matrix(name, [getattr(problem, name) for problem in problems], name == "c" and first.options.inplace)
    dtypes = first.a.dtype, first.b.dtype
    if dtypes[0] not in DTYPES or dtypes[1] != dtypes[0]:
        if not FP8_PAIRS.issuperset((dtypes,)):
            raise TypeError(
                f"A is {dtypes[0]} and B is {dtypes[1]}; both must be float32, float16 or bfloat16 alike, or "
                f"float8_e4m3fn, one of which may be float8_e5m2"
            )
        for rank, problem in enumerate(problems):
            _check_rows(rank, problem)
    stored = _check_options(first, num_programs)
    for distribution in first.distributions:
        distribution.check_size(len(problems))
    spread = {name: _spread(name, problems) for name in "ab"}
    shapes, owned = ({name: both[index] for name, both in spread.items()} for index in (0, 1))
    ops = zip(shapes.values(), first.transposes, strict=True)
    (m, k), (other_k, n) = (shape[::-1] if transposed else shape for shape, transposed in ops)
    if k != other_k:
        raise ValueError(
            f"op(A) is {(m, k)} and op(B) is {(other_k, n)}, over all ranks; k, the second and the first, must match"
        )
    if min(m, n, k) < 1:
        raise ValueError(f"m, n, k = {m}, {n}, {k} must each be at least 1")
    return Extents(problems, m, n, k, shapes, owned, *stored)


def resolve(everyone: list, num_programs: int) -> Layout:
    """The layout of the ranks' problems. Arguments and errors as those of `survey`, and errors of what concerns D."""
    found = survey(everyone, num_programs)
    m, n, k, size, first = found.m, found.n, found.k, len(everyone), found.problems[0]
    all_reduce = MatmulEpilog.ALLREDUCE in first.epilog
    shapes, owned = found.shapes | {"d": (m, n)}, dict(found.owned)
    if all_reduce:
        owned["d"] = [(((0, m),), ((0, n),))] * size
    else:
        distributions, shape = [problem.distributions[2] for problem in found.problems], first.turned((m, n))
        passed = [each.owned(shape, rank=rank, size=size) for rank, each in enumerate(distributions)]
        if isinstance(distributions[0], Box) and not covers_once(shape, passed):
            raise ValueError(f"D is {shape}, but its distributions by rank cover another matrix: {distributions}")
        owned["d"] = [first.turned(each) for each in passed]
    for rank, problem in enumerate(found.problems):
        _check_local(rank, problem, local_shape(owned["d"][rank]), found.result_dtype, found.aux_dtype)

    letters = {"a": "km" if first.transposes[0] else "mk", "b": "nk" if first.transposes[1] else "kn", "d": "mn"}
    splits = {name: split_of(shapes[name], owned[name]) for name in owned}
    splits = {name: split and (letters[name][split[0]], split[1]) for name, split in splits.items()}
    pattern, targets = infer({"m": m, "n": n, "k": k}, size, splits, all_reduce)
    wanted = {
        name: slabs(shapes[name], letters[name].index(targets[name][0]), targets[name][1])
        for name in redistributed(splits, targets)
    }
    if first.a.dtype in FP8 and not wanted.keys() <= {"d"}:
        raise ValueError(
            f"float8 operands have a scale on each rank and are not redistributed, but {pattern} takes "
            f"{' and '.join(sorted(targets.keys() - {'d'})).upper()} in slabs, and is the nearest to "
            f"{first.distributions}"
        )
    found = vars(found) | {"shapes": shapes, "owned": owned}
    return Layout(**found, pattern=pattern, splits=dict(targets.values()), wanted=wanted)


def _compare(everyone: list[tuple[Problem, tuple]]):
    """Raise InconsistentError where ranks differ in a property that must be the same on all of them."""
    boxes = [
        all(isinstance(each, Box) for each in by_rank)
        for by_rank in zip(*(problem.distributions for problem, _ in everyone), strict=True)
    ]
    shared = [
        {
            "operands": ("a", "b") if problem.c is None else ("a", "b", "c"),
            "dtypes": tuple(operand.dtype for operand in problem[:3] if operand),
            "distributions": tuple(
                "Box" if box else distribution for box, distribution in zip(boxes, problem.distributions, strict=True)
            ),
            "qualifiers": problem.transposes,
            "epilog": problem.epilog,
            "epilog_inputs": tuple((name, operand.dtype) for name, operand in problem.inputs),
            "options": problem.options,
            "preferences": problem.preferences,
            "quantization_scales": problem.scales,
            "totals": problem.totals,
            "options.compute_type or torch.backends.cuda.matmul.fp32_precision": problem.precision,
            "alpha": repr(alpha),  # as text, since nan != nan
            "beta": repr(beta),
        }
        for problem, (alpha, beta) in everyone
    ]
    for name, values in differing(shared).items():
        by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        what = "The distribution" if name == "distributions" else "The problem"
        raise InconsistentError(
            f"cublasmp: {name} differ between ranks, and must not: {by_rank}. {what} is inconsistent across processes"
        )


def _check_matrix(name: str, by_rank: list[Operand], written: bool = False):
    for rank, operand in enumerate(by_rank):
        if len(operand.shape) != 2:
            raise ValueError(f"rank {rank}: {name.upper()} must be a matrix, but has shape {operand.shape}")
        if 1 not in operand.strides and 0 not in operand.shape:
            raise ValueError(
                f"rank {rank}: {name.upper()} has strides {operand.strides}, neither of which is 1; pass a contiguous "
                f"matrix or the transpose of one"
            )
        reach = 0  # of the dimensions before: the last of the elements that they make
        for stride, extent in sorted(zip(operand.strides, operand.shape, strict=True)) if written else ():
            if extent > 1 and stride <= reach and 0 not in operand.shape:
                raise ValueError(
                    f"rank {rank}: {name.upper()} is {operand.shape} with strides {operand.strides}, so that elements "
                    f"share memory, and the result can't be written to it; pass {name.upper()}.contiguous(), or "
                    f"options={{'inplace': False}}"
                )
            reach += stride * (extent - 1)


def _check_rows(rank: int, problem: Problem):
    """Raise ValueError unless the rows of FP8 operands are as tensor cores take them."""
    for name, operand, dim in (("A", problem.a, 1 - problem.transposes[0]), ("B", problem.b, problem.transposes[1])):
        whole = operand.strides[dim] == 1 and not (operand.shape[dim] % 16 or operand.strides[1 - dim] % 16)
        if 0 not in operand.shape and not whole:
            raise ValueError(
                f"rank {rank}: {name} is {operand.shape} of float8 with strides {operand.strides}, but its dimension "
                f"{dim}, k, must be contiguous, in multiples of 16 elements, as in column-major (k, m) and (k, n) with "
                f"qualifiers TN"
            )


def _check_options(problem: Problem, num_programs: int) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of the result, of auxiliary values, and of partial sums on the wire. Raises ValueError."""
    options, dtype, epilog, c = problem.options, problem.a.dtype, problem.epilog, problem.c
    fp8 = dtype in FP8
    if int(epilog) & ~1 not in EPILOGS:  # an int: a flag's complement would drop the bits that have no name
        raise ValueError(f"epilog={epilog!r} is no MatmulEpilog; ALLREDUCE alone may be or-ed with another one")
    needed = {"bias": MatmulEpilog.BIAS, "relu_aux": D_RELU, "gelu_aux": D_GELU}
    needed = {name for name, bit in needed.items() if bit in epilog}
    if needed != {name for name, _ in problem.inputs}:
        raise ValueError(
            f"the epilog {epilog!r} takes epilog_inputs {sorted(needed)}, not {[name for name, _ in problem.inputs]}"
        )
    result_dtype = options.result_type or (c.dtype if fp8 and c else dtype)
    if result_dtype not in ((*DTYPES, *FP8) if fp8 else (dtype, torch.float32)):
        raise ValueError(f"result_type={result_dtype} must be {dtype}, the operands' dtype, or float32")
    wire_dtype, narrow = options.communication_type or torch.float32, torch.bfloat16 if fp8 else dtype
    if wire_dtype not in (narrow, torch.float32) or wire_dtype.itemsize < result_dtype.itemsize:
        raise ValueError(
            f"communication_type={wire_dtype} must be float32 or {narrow}, for operands of {dtype}, and no narrower "
            f"than the result's, {result_dtype}"
        )
    if fp8 and epilog & (MatmulEpilog.BGRADA | MatmulEpilog.BGRADB):
        raise ValueError(f"epilog={epilog!r} sums an operand, but {dtype} is multiplied only; leave it out")
    if (needed := ("a", "b", "d") if result_dtype in FP8 else ("a", "b")) != problem.scales and fp8:
        raise ValueError(
            f"float8 operands with a result of {result_dtype} take quantization_scales of {needed}, not "
            f"{problem.scales}"
        )
    if options.fast_accum and not fp8:
        raise ValueError(f"fast_accum=True is for float8 operands, not {dtype}")
    if options.result_amax and result_dtype not in FP8:
        raise ValueError(f"result_amax=True is for fp8 and narrower results, not {result_dtype}")
    aux_dtype = result_dtype if result_dtype not in FP8 else c.dtype if c and c.dtype in DTYPES else torch.float16
    aux = problem.preferences.epilog.aux_type
    if aux not in (None, aux_dtype):
        raise ValueError(f"aux_type={aux} must be the result's dtype, {aux_dtype}")
    if options.compute_type == MatmulComputeType.COMPUTE_32F_FAST_TF32 and dtype != torch.float32:
        raise ValueError(f"compute_type={options.compute_type.name} is for float32 operands, not {dtype}")
    count = options.sm_count_communication
    if count is not None and count >= num_programs:
        raise ValueError(
            f"sm_count_communication={count}, but there are {num_programs} programs, of which at least one must not "
            f"send; pass at most {num_programs - 1}, or init(num_programs=...)"
        )
    return result_dtype, aux_dtype, wire_dtype


def relu_aux_shape(m: int, n: int) -> tuple[int, int]:
    """Shape of a packed ReLU mask of an m x n matrix: 8 bits per byte along each column, padded to 16 bytes."""
    return round_up(-(-m // 8), 16), n


def gelu_aux_shape(m: int, n: int) -> tuple[int, int]:
    """Shape of the GELU inputs of an m x n matrix: each column is padded to a multiple of 8 values."""
    return round_up(m, 8), n


def _spread(name: str, problems: list[Problem]) -> tuple[tuple[int, int], list[Owned]]:
    """The shape of the whole matrix, and each rank's part of it. Raises ValueError if a rank's shape doesn't fit."""
    by_rank = [problem.distributions["ab".index(name)] for problem in problems]
    turned = problems[0].turned
    shapes = [turned(getattr(problem, name).shape) for problem in problems]
    shape = by_rank[0].global_shape(by_rank, shapes)
    owned = [distribution.owned(shape, rank=rank, size=len(shapes)) for rank, distribution in enumerate(by_rank)]
    for rank, (mine, found) in enumerate(zip(owned, shapes, strict=True)):
        if local_shape(mine) != found:
            raise InconsistentError(
                f"rank {rank}: {name.upper()} is {found}, but {by_rank[rank]} of {shape}, what all ranks have "
                f"together, gives it {local_shape(mine)}; shapes by rank: {', '.join(map(str, shapes))}. The problem "
                f"size is inconsistent across processes"
            )
    if isinstance(by_rank[0], Box) and not covers_once(shape, owned):
        raise ValueError(f"the boxes of {name.upper()} must cover it once, all {shape} of it: {by_rank}")
    return turned(shape), [turned(each) for each in owned]


def _check_local(rank: int, problem: Problem, d: tuple[int, int], result_dtype: torch.dtype, aux_dtype: torch.dtype):
    """Raise ValueError unless C and the epilog's inputs fit the rank's part of D."""
    c = problem.c
    if c is not None and (c.shape != d or c.dtype != aux_dtype or problem.options.inplace and c.dtype != result_dtype):
        raise ValueError(f"rank {rank}: C is {c.dtype} {c.shape}, but this rank's part of D is {result_dtype} {d}")
    wanted = {
        "bias": ((d[0],), aux_dtype),
        "relu_aux": (relu_aux_shape(*d), torch.uint8),
        "gelu_aux": (gelu_aux_shape(*d), aux_dtype),
    }
    for name, operand in problem.inputs:
        shape = operand.shape[:1] if name == "bias" and operand.shape[1:] == (1,) else operand.shape
        free = name == "bias" and problem.a.dtype in FP8 and operand.dtype in DTYPES
        if shape != wanted[name][0] or operand.dtype != wanted[name][1] and not free:
            raise ValueError(
                f"rank {rank}: {name} is {operand.dtype} {operand.shape}, but for its part of D, {d}, it must be "
                f"{wanted[name][1]} {wanted[name][0]}"
            )
