"""Compile every GPU kernel for sm_90a, and some for other GPUs, on a machine that need not have one; facts as JSON.

    TKERNELS_RUNTIME=nvshmem python tests/compile_kernels.py facts.json [NAME_OF_A_CASE ...]

A script of its own, because the kernels must be decorated by the compiler and not by the interpreter. It calls the
library's own functions, on CPU tensors and on a context whose peers don't exist, and stops each launch after the
compilation: what is compiled is what would be launched, with the arguments specialised as the launcher does it.

The facts come from five places. Machine code: registers, spills, tensor-core instructions. PTX: its control flow, along
which barriers and fences must come in time. Triton's own representation: the order of the pipelined loop's branches.
The source, and the optimised LLVM module with its debug information: the chains of calls that end in an acquire or a
release, to be compared with each other.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import functools
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import tempfile
import traceback
import types
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import round_trips
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import tkernels
from tkernels import choice, fused, gemm, gpus, paths, tuned
from tkernels.choice import overlap_config
from tkernels.comm import channel, collectives, context, copies, device, runtime
from tkernels.comm.calls import local_calls
from tkernels.comm.device import PEER, Link, Net, arrived, completes, publish, put_signal, put_tile, tell, wait_signal
from tkernels.configs import FP8, result_dtype, with_room_for
from tkernels.gpus import GPU, GPUS, H200
from tkernels.partials import with_scaled_slices
from tkernels.quantize import next_factor, quantize_by, transpose_quantized
from tkernels.staging import Rows
from tkernels.trace import clocks
from tkernels.trace.recorder import DEFAULT_MARKS, ENDS, Recorder
from tkernels.variants import CHANGES

WORKERS = 2
OTHER_GPUS = GPUS["NVIDIA A100-SXM4-80GB"], GPUS["NVIDIA B200"]


@dataclass(frozen=True)
class Case:
    """One call of an operation. shape: M, N, K of the local product, or M and K of what a collective moves.

    rows: how M is split over `ranks`, where it is not evenly.
    """

    operation: str
    dtype: str = "bfloat16"
    label: str = ""
    shape: tuple[int, int, int] = (1024, 1024, 1024)
    ranks: int = 1
    transport: str = "peer"
    rows: tuple | None = None
    w_transposed: bool = False
    x_transposed: bool = False
    misaligned: bool = False  # the bases of x and w are not multiples of 16 bytes
    activation: str | None = None
    bias: bool = False
    tf32: bool = False
    traced: bool = False
    copied: bool = False  # the copy engine sends
    interleaved: bool = False  # all programs send, between the steps of their products
    landing: bool = False  # programs send where copies go
    parts: bool = False  # the last tiles are split along K
    put_block: int | None = None  # elements that a program copies at a step
    out: str | None = None  # the result's dtype, and that of partial sums on their way
    wire: str | None = None
    scales: str = "row"  # of FP8: one for each "row" of x and of w, or for each "tensor"
    precise: bool = False  # FP8's sums are promoted
    gpu: GPU = H200

    @property
    def name(self) -> str:
        parts = [self.operation, self.dtype, re.sub(r"\W+", "_", self.label).strip("_")]
        parts += [] if self.gpu.sm == 90 else [f"sm_{self.gpu.sm}"]
        return "-".join(filter(None, parts + ([str(self.ranks), self.transport] if self.ranks > 1 else [])))


SHAPES = {
    "large": (1024, 1024, 1024),
    "narrow": (1024, 128, 1024),
    "few_rows": (64, 1024, 1024),
    "unaligned": (1020, 1001, 1001),
}
FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
REDUCTIONS = FUSED[1:]
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
E4M3 = "float8_e4m3fn"
UNEVEN_ROWS = {2: (512, 511), 4: (256, 256, 256, 255), 8: (*[128] * 7, 127)}
COLLECTIVE_SHAPES = {  # in chunks, and as packets
    "aligned": (4096, 1, 1024),
    "unaligned": (4092, 1, 1001),
    "small": (16, 1, 1024),
    "small_unaligned": (12, 1, 1001),
}
WORDS = {  # of a product's label: what its case has by them
    **{label: {"shape": shape} for label, shape in SHAPES.items()},
    "unaligned_N": {"shape": (1024, 1001, 1024), "bias": True},
    "unaligned_K": {"shape": (1024, 1024, 1001), "bias": True},
    "staged": {"shape": SHAPES["unaligned"], "bias": True},
    **{name: {"activation": name, "bias": True} for name in ("relu", "gelu", "gelu_tanh", "silu")},
    "float32": {"out": "float32", "wire": "float32"},
    "float32_out": {"out": "float32"},
    "float32_wire": {"wire": "float32"},
    "fp8_wire": {"wire": E4M3},
    "puts": {"put_block": max(CHANGES["put_block"])},
    "row": {},
    "eights": {},
    "tensor": {"scales": "tensor"},
    **{flag: {flag: True} for flag in (
        "w_transposed", "x_transposed", "misaligned", "tf32", "traced", "copied", "interleaved", "landing", "parts",
        "precise",
    )},
}  # fmt: skip


def product(operation: str, dtype: str, label: str, ranks: int, **options) -> Case:
    """The case of a product that the words of its label describe: WORDS, and "uneven" parts of its rows."""
    found = re.findall("|".join(sorted(("uneven", *WORDS), key=len, reverse=True)), label)
    assert "_".join(found) == label, label
    said = {name: value for word in found for name, value in WORDS.get(word, {}).items()}
    if "uneven" in found:
        said |= {"shape": (1023, 1024, 1024), "rows": UNEVEN_ROWS[ranks]}
    if dtype == E4M3 and "unaligned" in found:  # K must be whole 16 bytes
        said["shape"] = (1020, 1001, 1008)
    return Case(operation, dtype, label, ranks=ranks, **said | options)


def products(operation: str, labels: str, dtypes: str = "bfloat16", ranks: tuple = (4,), **options) -> list[Case]:
    """One for each rank number, dtype and label, in words. `matmul` is on one rank alone."""
    ranks = (1,) if operation == "matmul" else ranks
    each = itertools.product(ranks, dtypes.split(), labels.split() or [""])
    return [product(operation, dtype, label, number, **options) for number, dtype, label in each]


def of_shapes(ending: str, shapes=SHAPES) -> str:
    """The labels of cases of all shapes, or of these."""
    return " ".join(shape + ending for shape in shapes)


def _cases() -> list[Case]:
    cases, both = [], "bfloat16 float32"
    for operation in ("matmul", *FUSED):
        cases += products(operation, of_shapes(""), both)
        cases += products(operation, "large unaligned", "float16")
        cases += products(operation, "relu gelu gelu_tanh silu")
        cases += products(operation, "gelu", "float32")
        cases += products(operation, "w_transposed", both)
        cases += products(operation, "misaligned unaligned_gelu unaligned_N unaligned_K")
        if operation != "all_gather_matmul":  # which makes its x contiguous
            cases += products(operation, "x_transposed")
        if operation != "matmul":
            cases += products(operation, "uneven", both)
            cases += products(operation, "uneven", ranks=(2, 8))
            cases += products(operation, "large", ranks=(8, 2))
            cases += products(operation, "large", "float32", ranks=(2,))
            cases += products(operation, "large", transport="nvshmem")
    for operation in ("matmul", *FUSED):
        cases += products(operation, of_shapes("_float32"))
        cases += products(operation, "float32", "float16", bias=True, activation="gelu_tanh")
    for operation in REDUCTIONS:
        cases += products(operation, of_shapes("_float32_wire") + " uneven_float32_wire float32_wire_relu")
        cases += products(operation, "float32_wire_gelu_tanh", "bfloat16 float16")
        finished = "_float32_wire_gelu_tanh"
        cases += products(operation, of_shapes(finished, ["narrow", "few_rows", "unaligned", "uneven"]))
        cases += products(operation, f"unaligned{finished}_traced unaligned{finished}_copied")
        cases += products(operation, "float32_out")
        cases += products(operation, "float32_wire", ranks=(2,))
        cases += products(operation, "float32_wire", transport="nvshmem")
    for operation in FUSED:
        cases += products(operation, "large_traced unaligned_traced", both)
        cases += products(operation, "large_traced", ranks=(2,))
        cases += products(operation, "large_traced", transport="nvshmem")
    for operation in FUSED:
        cases += products(operation, "large_copied", both)
        cases += products(operation, "unaligned_copied large_landing unaligned_landing large_puts large_landing_traced")
        cases += products(operation, "large_copied", transport="nvshmem")
        cases += products(operation, "staged", ranks=(2, 4))
        cases += products(operation, "uneven_copied uneven_landing uneven_traced")
    for operation, ranks in itertools.product(REDUCTIONS, ((2,), (4,))):  # which copy in other pieces
        cases += products(operation, of_shapes("_interleaved"), "bfloat16 float16 float32", ranks)
        cases += products(operation, "uneven_interleaved", both, ranks)
        cases += products(operation, "large_interleaved_landing large_interleaved_traced", ranks=ranks)
        cases += products(operation, "unaligned_interleaved_landing unaligned_interleaved_traced", ranks=ranks)
        cases += products(operation, "float32_interleaved float32_wire_interleaved", ranks=ranks)
        cases += products(operation, "float32_out_interleaved gelu_interleaved", ranks=ranks)
        cases += products(operation, "large_interleaved", ranks=ranks, transport="nvshmem")
    for operation in REDUCTIONS:
        cases += products(operation, "few_rows_interleaved few_rows_interleaved_landing", ranks=(8,))
        cases += products(operation, "few_rows_interleaved_traced", ranks=(8,))
    for operation in FUSED:
        cases += products(operation, of_shapes("_parts"), both)
        cases += products(operation, "relu_parts gelu_parts gelu_tanh_parts silu_parts w_transposed_gelu_parts")
        cases += products(operation, "uneven_parts uneven_parts_copied float32_parts")
        cases += products(operation, "large_parts_traced large_parts_copied large_parts_landing")
        cases += products(operation, "large_parts", transport="nvshmem")
        cases += products(operation, "large_parts", ranks=(2, 8))
    for operation in COLLECTIVES:
        for label in ("aligned", "small"):
            cases.append(Case(operation, label=f"{label}_traced", shape=COLLECTIVE_SHAPES[label], ranks=4, traced=True))
    cases += products("matmul", "tf32", "float32")
    cases.append(Case("matmul", label="one_column", shape=(1024, 1, 1024)))
    for operation in ("stage", "unstage"):
        for dtype, columns in itertools.product(("bfloat16", "float16"), (1001, 8190)):
            cases.append(Case(operation, dtype, str(columns), shape=(1024, 1, columns)))
        cases.append(Case(operation, label="transposed", shape=(1001, 1, 1024), x_transposed=True))
        cases.append(Case(operation, label="few_columns", shape=(1024, 1, 17)))
    for operation in COLLECTIVES:
        dtypes = ("bfloat16", "float16", "float32")
        for dtype in (*dtypes, "int8", "int64") if operation == "all_gather" else dtypes:
            for label, shape in COLLECTIVE_SHAPES.items():
                cases.append(Case(operation, dtype, label, shape, ranks=4))
            cases.append(Case(operation, dtype, "copied", COLLECTIVE_SHAPES["aligned"], ranks=4, copied=True))
        cases.append(Case(operation, label="unaligned_copied", shape=COLLECTIVE_SHAPES["unaligned"], ranks=4,
                          copied=True))  # fmt: skip
        cases.append(Case(operation, label="copied_traced", shape=COLLECTIVE_SHAPES["aligned"], ranks=4, copied=True,
                          traced=True))  # fmt: skip
        cases.append(Case(operation, label="copied", ranks=4, transport="nvshmem", copied=True))
        cases.append(Case(operation, label="aligned", ranks=2))
        cases.append(Case(operation, label="aligned", ranks=4, transport="nvshmem"))
        cases.append(Case(operation, label="small", shape=COLLECTIVE_SHAPES["small"], ranks=2))
        cases.append(Case(operation, label="small", shape=COLLECTIVE_SHAPES["small"], ranks=8))
    for label, traced, transport in (
        ("copied", False, "peer"), ("copied_traced", True, "peer"), ("copied", False, "nvshmem"),
    ):  # fmt: skip
        cases.append(Case("land", "float32", label, ranks=4, copied=True, traced=traced, transport=transport))
    for dtype in ("bfloat16", "float32"):
        cases.append(Case("all_reduce", dtype, "one_shot", (1024, 1, 4096), ranks=2))
        cases.append(Case("all_reduce", dtype, "two_shots", (64, 1, 4096), ranks=4))
        cases.append(Case("all_reduce", dtype, "two_shots", (64, 1, 1024), ranks=8))
    cases.append(Case("all_reduce", "bfloat16", "one_shot", (64, 1, 4096), ranks=4, transport="nvshmem"))
    for dtype, activation in (("bfloat16", "gelu"), ("float32", "silu")):
        cases.append(Case("finish", dtype, activation=activation, bias=True))
    for dtype, columns in itertools.product(("bfloat16", "float16", "float32"), (1000, 8192, 32768)):
        cases.append(Case("quantize", dtype, f"rows_{columns}", shape=(1024, 1, columns)))
    cases.append(Case("quantize", label="rows_e5m2", shape=(1024, 1, 32768), out="float8_e5m2", activation="silu"))
    cases.append(Case("quantize", label="rows_power_of_two", shape=(1024, 1, 8192)))
    for label, dtype in itertools.product(("largest", "parts"), ("bfloat16", "float32")):
        cases.append(Case("quantize", dtype, label, shape=(1024, 1, 16384)))
    for dtype, columns in itertools.product(("bfloat16", "float32"), (1001, 8192)):
        cases.append(Case("dequantize", dtype, str(columns), shape=(1024, 1, columns)))
    for columns in (1001, 8192):
        cases.append(Case("transpose", label=str(columns), shape=(1024, 1, columns)))
    for dtype in ("bfloat16", "float32"):
        cases.append(Case("collect", dtype))
        cases.append(Case("collect", dtype, "misaligned", misaligned=True))
    for ranks, transport in ((2, "peer"), (4, "peer"), (4, "nvshmem")):
        cases.append(Case("barrier", "", ranks=ranks, transport=transport))
        cases.append(Case("clocks", "", ranks=ranks, transport=transport))
    for transport in ("peer", "nvshmem"):
        cases.append(Case("channel", "", "wait", ranks=2, transport=transport))
        for end in ("send", "receive"):
            cases.append(Case("channel", "", end, ranks=2, transport=transport))
            cases.append(Case("channel", "", f"{end}_misaligned", ranks=2, transport=transport, misaligned=True))
    for transport in ("peer", "nvshmem"):
        cases.append(Case("round_trip", "", ranks=2, transport=transport))
    return [_in_large_tiles(case) for case in cases + _cases_of_other_gpus() + _fp8_cases() + _tf32_cases()]


def _in_large_tiles(case: Case) -> Case:
    """A local product has so many rows and columns that it takes large tiles; of fewer they are those of "narrow"."""
    M, N, K = case.shape
    if case.operation != "matmul" or M <= 128 or N <= 128:
        return case
    larger = {1024: 2048, 1020: 2044, 1001: 2025}
    return replace(case, shape=(larger[M], larger[N], K))


def _cases_of_other_gpus() -> list[Case]:
    cases = []
    for gpu in OTHER_GPUS:
        cases += products("matmul", "large", gpu=gpu)
        cases += products("matmul", "tf32", "float32", gpu=gpu)
        for operation in FUSED[:2]:
            cases += products(operation, "large narrow few_rows", gpu=gpu)
        # With gelu Triton 3.9 spills 39 times for sm_100a, at 255 registers.
        cases += products("matmul_all_reduce", "relu_copied", "float16", bias=False, gpu=gpu)
        if gpu.tensor_memory:
            cases += products("matmul_all_reduce", "interleaved", ranks=(2,), gpu=gpu)
        else:
            cases += products("matmul_reduce_scatter", "large_parts", gpu=gpu)
        for label in ("aligned", "small"):
            cases.append(Case("all_reduce", label=label, shape=COLLECTIVE_SHAPES[label], ranks=4, gpu=gpu))
    return cases


def _fp8_cases() -> list[Case]:
    cases = []
    for operation in FUSED:
        cases += products(operation, of_shapes("_row") + " large_tensor large_precise gelu_tanh large_float32", E4M3)
        cases += products(operation, "large_copied large_landing large_parts large_traced", E4M3)
        cases += products(operation, "uneven_copied uneven_landing", E4M3)
        cases += products(operation, "uneven", E4M3, ranks=(2, 8))
        cases += products(operation, "large", E4M3, transport="nvshmem")
        cases += products(operation, "large", E4M3)  # beside those with marks, and over NVSHMEM
        cases += products(operation, "", "float8_e5m2")
    # Between two ranks, where all-reduces are interleaved by rule, tiles end with 11 spills, which cost less than is
    # saved (bench/LOG.md): more than the gates let pass.
    for operation in REDUCTIONS:
        cases += products(operation, "large_interleaved", E4M3)
    for shape in SHAPES:
        cases += products("matmul", f"{shape}_row {shape}_tensor {shape}_precise {shape}_float32", E4M3)
    cases += products("matmul", "relu gelu gelu_tanh silu", E4M3)
    cases += products("matmul", "", "float8_e5m2")
    cases.append(Case("quantize", label="rows_gated", shape=(1024, 1, 16384), activation="gelu"))
    cases += products("matmul_reduce_scatter", "fp8_wire_copied")
    cases += products("matmul_all_reduce", "fp8_wire", E4M3)
    for operation in FUSED:  # rows of a multiple of 8 elements, not of 16, stored through pointers
        cases += products(operation, "uneven_eights", ranks=(2,), shape=(1023, 1000, 1024))
    for columns in (1001, 1024):
        cases.append(Case("straighten", label=str(columns), shape=(1001, 1, columns), x_transposed=True))
    cases += products("matmul", "unaligned_N_gelu unaligned_N_float32", f"bfloat16 {E4M3}")  # stored by elements
    for dtype in ("bfloat16", "float32"):
        cases.append(Case("quantize", dtype, "by_factor", shape=(1024, 1, 16384)))
    cases.append(Case("quantize", label="by_factor_gated", shape=(1024, 1, 16384), activation="gelu_tanh"))
    for length in (1024, 8192):
        cases.append(Case("next_factor", label=str(length), shape=(1, 1, length)))
    return cases


def _tf32_cases() -> list[Case]:
    # Beside these an all-gather's with a bias and odd rows spills 2 to 14 registers, a reduce-scatter's with gelu 2.
    cases = products("matmul", "tf32_gelu narrow_tf32 few_rows_tf32 unaligned_N_tf32 tf32_w_transposed", "float32")
    for operation in FUSED:
        cases += products(operation, of_shapes("_tf32", ("large", "narrow", "few_rows")) + " uneven_tf32", "float32")
        cases += products(operation, "large_tf32_copied large_tf32_landing large_tf32_traced", "float32")
        cases += products(operation, "large_tf32", "float32", ranks=(2, 8))
        cases += products(operation, "large_tf32", "float32", transport="nvshmem")
    cases += products("all_gather_matmul", "gelu_tf32", "float32")
    cases += products("matmul_all_reduce", "gelu_tf32", "float32")
    for operation in REDUCTIONS:
        cases += products(operation, "staged_tf32", "float32")
    return cases


CASES = {case.name: case for case in _cases()}


# What the gates must refuse: kernels that forget one thing, and configurations that don't fit.


@triton.jit
def release_without_barrier_kernel(x, word):
    at = tl.arange(0, 1024)
    tl.store(x + at, tl.load(x + at) + 1.0)
    tl.atomic_xchg(word, tl.full((), 1, tl.int64), sem="release", scope="sys")


@triton.jit
def relaxed_signal_without_fence_kernel(x, word):
    at = tl.arange(0, 1024)
    tl.store(x + at, tl.load(x + at) + 1.0)
    tl.debug_barrier()
    tl.atomic_xchg(word, tl.full((), 1, tl.int64), sem="relaxed", scope="sys")


@triton.jit
def tma_store_without_publish_kernel(source, target, word):
    target.store([0, 0], source.load([0, 0]))
    tl.debug_barrier()
    tl.atomic_xchg(word, tl.full((), 1, tl.int64), sem="release", scope="sys")


@triton.jit
def wait_unused_kernel(x, word):
    tl.atomic_add(word, tl.full((), 0, tl.int64), sem="acquire", scope="sys")  # deleted, for nobody asks what it read
    at = tl.arange(0, 1024)
    tl.store(x + at, tl.load(x + at) + 1.0)


@triton.jit
def tma_load_without_fence_kernel(source, x, word):
    seen = tl.full((), 0, tl.int64)
    while seen < 1:
        seen = tl.atomic_add(word, tl.full((), 0, tl.int64), sem="acquire", scope="sys")
    tl.store(x + tl.arange(0, 64), tl.sum(source.load([0, 0]), axis=0))


@triton.jit
def put_without_align_kernel(target, source, word, table, num_elements, L, ALIGN: tl.constexpr):
    put_signal(target, source, num_elements, word, 1, 1, Net(table, 0), L, 1024)


@triton.jit
def put_tile_without_align_kernel(target, source, stride, rows, columns, table, L, ALIGN: tl.constexpr):
    put_tile(target, source, stride, rows, columns, 1, Net(table, 0), L, (16, 64))


@triton.jit
def look_kernel(x, words, L, AGREED: tl.constexpr):
    at = words + tl.arange(0, 8)
    if AGREED:
        there = arrived(at, 1, L)
    else:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [at.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )
        tl.debug_barrier()  # each warp still goes by what it has seen itself
        there = tl.min(seen, 0) >= 1
    if not there:
        first = tl.full((), 0, tl.int64)
        while first < 1:
            first = tl.atomic_add(words, tl.full((), 0, tl.int64), sem="acquire", scope="sys")
    at = tl.arange(0, 1024)
    tl.store(x + at, tl.load(x + at) + 1.0)


@triton.jit
def signal_and_wait_kernel(x, y, words, table, own_step, steps, L, INTERLEAVED: tl.constexpr, NEEDED: tl.constexpr):
    net = Net(table, 0)
    unsent = tl.full((), 0, tl.int32)
    product = tl.zeros((32, 32), tl.float32)
    for step in range(steps):
        tile = x.load([step * 32, 0])
        product = tl.dot(tile, tile, product, input_precision="ieee")
        if step == own_step:
            publish(L)
            complete = completes(words, 1, L)
            if complete:
                tell(words + 1, 1, 0, net, L)
            unsent = -1 - complete.to(tl.int32) if NEEDED else tl.full((), -1, tl.int32)
        if step == steps - 1:
            if unsent < 0:
                wait_signal(words + 2, 1, 0, 0, net, L)
            y.store([0, 0], product)


LINK = Link(tl.constexpr(2), tl.constexpr(0), PEER)


def _vector():
    return torch.empty(1024)


def _words():
    return torch.empty(64, dtype=torch.int64)


def _descriptor():
    return TensorDescriptor(torch.empty(64, 64), [64, 64], [64, 1], [64, 64])


def _interleaved_branches(NEEDED):
    x, y = (TensorDescriptor(torch.empty(rows, 32), [rows, 32], [32, 1], [32, 32]) for rows in (1024, 32))
    signal_and_wait_kernel[(1,)](x, y, _words(), _words(), 3, 32, LINK, INTERLEAVED=True, NEEDED=NEEDED)


def _product(dtype, **config):
    x = torch.empty(1024, 1024, dtype=dtype)
    tkernels.matmul(x, x, config=gemm.GemmConfig(**config))


REFUSED = {
    "release_without_barrier": lambda: release_without_barrier_kernel[(1,)](_vector(), _words()),
    "relaxed_signal_without_fence": lambda: relaxed_signal_without_fence_kernel[(1,)](_vector(), _words()),
    "tma_store_without_publish": lambda: tma_store_without_publish_kernel[(1,)](_descriptor(), _descriptor(), _words()),
    "tma_load_without_fence": lambda: tma_load_without_fence_kernel[(1,)](_descriptor(), _vector(), _words()),
    "look_without_agreement": lambda: look_kernel[(1,)](_vector(), _words(), LINK, AGREED=False),
    "signal_behind_wait": lambda: _interleaved_branches(NEEDED=False),
    "wait_unused": lambda: wait_unused_kernel[(1,)](_vector(), _words()),
    "put_without_align": lambda: put_without_align_kernel[(1,)](
        _vector().bfloat16(), _vector().bfloat16(), _words(), _words(), 1024, LINK, ALIGN=16
    ),
    "put_tile_without_align": lambda: put_tile_without_align_kernel[(1,)](
        _vector().bfloat16(), _vector().bfloat16(), 64, 16, 64, _words(), LINK, ALIGN=16
    ),
    "spilling_config": lambda: _product(torch.float32, block_m=64, block_n=64, block_k=32, num_warps=4, split=1),
    "too_many_stages": lambda: _product(torch.bfloat16, num_stages=5),
}
# And what is right beside one of them.
ALLOWED = {
    "look_with_agreement": lambda: look_kernel[(1,)](_vector(), _words(), LINK, AGREED=True),
    "signal_before_wait": lambda: _interleaved_branches(NEEDED=True),
}


# What is run in a worker.


class NoRanks:
    """A group of ranks of which only this one exists: whatever it gathers, all others would have said the same."""

    closed = False

    def __init__(self, rank_and_size):
        self.process_group, (self.rank, self.size) = None, rank_and_size
        self.global_ranks = list(range(self.size))

    def gather(self, value, call=None, limit_s=None):
        return [value] * self.size

    def during(self, describe):
        return contextlib.nullcontext()

    def checking(self):
        return contextlib.nullcontext()

    def together(self, what, way_out):
        return self.checking()

    def described(self):
        pass

    def barrier(self, value=None, limit_s=None, call=None):
        return self.gather(value)

    def tell(self, *_):
        return []

    def close(self):
        self.closed = True


NO_CONTEXT = contextlib.nullcontext()

_compiled = []
_gpu = H200  # that the case in progress is compiled for


@functools.cache
def prepare():
    """Replace the GPU: the target is named, tensors live on the CPU, launches end after the compilation."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    # Triton asks for the target once a device, so there is a device for each.
    driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", _gpu.sm, 32),
            get_current_device=lambda: _gpu.sm,
            get_current_stream=lambda device: 0,
        )
    )
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        _compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    for name in ("nvshmem", "nvshmem.bindings", "nvshmem.bindings.nvshmem", "nvshmem.core", "cuda", "cuda.core"):
        sys.modules[name] = mock.MagicMock()  # nvshmem_runtime imports them; only its device_library is called

    from tkernels.comm import nvshmem_runtime

    nvshmem_runtime.check_versions = lambda host, device: None  # there is no host library

    def open_segment(group, num_bytes):
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        bases = [memory.data_ptr()] * group.size
        return runtime.Segment(memory, bases, group.global_ranks)

    copies.Copies.__call__ = lambda self, *tensors: self._launch(*tensors, self._gates[0])
    runtime.device = lambda: torch.device("cpu")
    runtime.open_segment = open_segment
    context.Group = NoRanks
    torch.cuda.current_device = lambda: 0
    runtime.default_programs = lambda: _gpu.sms
    runtime.capability = lambda: _gpu.capability
    gpus.gpu_name = tuned.gpu_name = lambda: _gpu.name


def run_case(name: str, describe=None) -> dict:
    """Compile one case and return what `describe` says of it, by default its facts; {"error": ...} or {"skip": ...}."""
    global _gpu
    case = CASES.get(name)
    _gpu = case.gpu if case else H200
    if case and case.transport == "nvshmem" and not _has_nvshmem():
        return {"skip": "nvidia-nvshmem-cu13 is not installed, whose device code this would link"}
    prepare()
    torch.backends.cuda.matmul.allow_tf32 = case is not None and case.tf32
    _compiled.clear()
    choice.tuned_locally.cache_clear()  # what was chosen and prepared for another GPU
    local_calls.clear()
    # Else of rows that TMA can't take, by pointers.
    staged = case is not None and case.label.startswith("staged")
    for module in (fused, gemm, choice, paths):
        module.stages_rows = lambda *_: staged
    try:
        _call(case) if case else (REFUSED | ALLOWED)[name]()
        (kernel,) = {each for each in _compiled if not staged or each.name != "copy_rows_kernel"}
        return (describe or facts_of)(kernel)
    except Exception:
        return {"error": traceback.format_exc()}


def _has_nvshmem() -> bool:
    try:
        return importlib.util.find_spec("nvidia.nvshmem") is not None
    except ModuleNotFoundError:  # no package named nvidia either
        return False


def _call(case: Case):
    """Call the operation of a case as rank 1 of its ranks."""
    M, N, K = case.shape
    dtype = getattr(torch, case.dtype or "float32")

    def matrix(rows, columns, transposed=False):
        start = 1 if case.misaligned else 0
        memory = torch.empty(rows * columns + start, dtype=dtype)[start:]
        return memory.view(columns, rows).t() if transposed else memory.view(rows, columns)

    ranks = (1, case.ranks)
    with tkernels.init(ranks, heap_bytes=1 << 30, transport=case.transport) if case.ranks > 1 else NO_CONTEXT as ctx:
        if case.traced:
            ctx.recorder = Recorder(ctx, DEFAULT_MARKS)
        if case.operation == "barrier":
            ctx.barrier()
        elif case.operation == "finish":
            bias, y = torch.empty(N, dtype=dtype), matrix(M, N)
            total = torch.empty(M, N)
            gemm.plan_finish(total, bias, case.activation, y)(total, bias, y)
        elif case.operation in ("stage", "unstage", "straighten"):
            x = matrix(M, K, case.x_transposed)
            rows = Rows.of(x, turned=False if case.operation == "straighten" else None)
            copied = x, rows.empty("cpu")
            back = case.operation == "unstage"
            rows.plan_copy(x, back)(*copied[::-1] if back else copied)
        elif case.operation == "quantize":
            whole = case.label in ("largest", "parts")  # a whole tensor takes both kernels
            fp8 = getattr(torch, case.out or "float8_e4m3fn")
            options = {"power_of_two": "power" in case.label, "activation": case.activation}
            options["gate"] = matrix(M, K) if "gated" in case.label else None
            if "factor" in case.label:
                one = torch.empty(1)
                quantize_by(matrix(M, K), options["gate"], one, one.clone(), fp8, case.activation)
            else:
                tkernels.quantize(matrix(M, K), "tensor" if whole else "row", fp8, **options)
            if whole:
                _compiled[:] = [_compiled[case.label == "parts"]]
        elif case.operation == "next_factor":
            one, at = torch.empty(1), torch.empty(1, dtype=torch.int32)
            next_factor(one, one.clone(), torch.empty(K), at, torch.float8_e4m3fn)
        elif case.operation == "dequantize":
            tkernels.dequantize(matrix(M, K).to(torch.float8_e4m3fn), torch.empty(M, 1), dtype)
        elif case.operation == "transpose":
            transpose_quantized(matrix(M, K).to(torch.float8_e4m3fn), torch.empty(M, 1))
        elif case.operation == "collect":
            x, gathered, inbox, state = matrix(M // 4, K), matrix(M, K), matrix(2 * M, K), torch.empty(2).long()
            importlib.import_module("tkernels.all_gather_matmul")._collect(state, inbox, M, x, None, 0, M)(x, gathered)
        elif case.operation == "clocks":
            clocks.compare_clocks(ctx)
        elif case.operation == "round_trip":
            for verb in round_trips.verbs_of(case.transport):  # one kernel, or run_case finds several
                round_trips.round_trips(ctx, verb)
        elif case.operation == "channel":
            _call_channel(ctx, case)
        elif case.operation == "land":
            launch, _ = collectives.AllGather((M,) * case.ranks).prepare_landing(ctx, matrix(M, K))
            launch(matrix(M, K))
        elif case.operation in COLLECTIVES:
            config = replace(collectives.DEFAULT, copy_bytes=0 if case.copied else 1 << 40)
            getattr(collectives, case.operation)(ctx, matrix(M, K), config=config)
        else:
            rows = case.rows or (M // case.ranks,) * case.ranks
            x = matrix(rows[1] if case.operation == "all_gather_matmul" else M, K, case.x_transposed)
            operands = x, matrix(N, K, case.w_transposed), torch.empty(N, dtype=dtype) if case.bias else None
            options = {"out_dtype": case.out and getattr(torch, case.out)}
            if dtype in FP8:
                by_row, bias = case.scales == "row", torch.empty(N, dtype=torch.bfloat16) if case.bias else None
                operands = x, matrix(N, K).view(torch.float8_e4m3fn), bias
                scales = (torch.empty(each.shape[0] if by_row else 1) for each in operands[:2])
                options |= dict(zip(("x_scale", "w_scale"), scales, strict=True), fast_accum=not case.precise)
            if case.operation in REDUCTIONS:
                options["wire_dtype"] = case.wire and getattr(torch, case.wire)
            if case.operation in ("all_gather_matmul", "matmul_reduce_scatter"):
                options["rows"] = rows
            if case.operation == "matmul":
                y = torch.empty(M, N, dtype=options["out_dtype"] or result_dtype(dtype), device="meta")
                how = gemm.precision(dtype, not case.precise), case.activation, case.bias
                problem = gemm.problem_of_product(*operands[:2], y, *how)
                config, _ = choice.product_ways(problem)["kernel"]
                tkernels.matmul(*operands, case.activation, config=config, **options)
            else:
                if case.copied or case.interleaved or case.landing or case.parts or case.put_block:
                    usual, how = result_dtype(dtype), gemm.precision(dtype, not case.precise)
                    problem = case.operation, M, N, K, dtype, gemm.layout_of(*operands[:2])
                    config = overlap_config(ctx, *problem, precision=how)
                    stored = [given or usual for name, given in options.items() if name.endswith("dtype")]
                    config = with_room_for(config, max(stored, key=lambda each: each.itemsize), dtype, how)
                    config = with_scaled_slices(config) if options.get("wire_dtype") in FP8 else config
                    if case.copied:
                        config = replace(config, num_comm=0)
                    if case.interleaved:
                        config = replace(config, num_comm=0, interleaved=True, landing=False)
                    if case.landing:
                        config = replace(config, landing=True)
                    if case.parts:
                        config = replace(config, split_tiles=4, max_splits=2)
                    if case.put_block:
                        config = replace(config, put_block=case.put_block)
                    options["config"] = config
                getattr(tkernels, case.operation)(*operands, case.activation, path="fused", ctx=ctx, **options)


def _call_channel(ctx, case: Case):
    """One of the channel's kernels: its launchers wait, then move."""
    load = mock.patch.object(channel.Channel, "_load")
    # who is beside whom is asked of ranks that don't exist
    with load, mock.patch.object(channel, "_check_options", lambda ctx, *options: options):
        made = channel.Channel(ctx, 0, 0, slot_bytes=1 << 20)
        verb = case.label.partition("_")[0]
        if verb == "wait":
            return made.credit.wait(None)
        made.credit.wait = made.arrival.wait = lambda stream: None
        start = 1 if case.misaligned else 0
        getattr(made, verb)(torch.empty((1 << 20) + start, dtype=torch.uint8)[start:])


# Facts.


def facts_of(kernel) -> dict:
    """What the gates judge, of one compiled kernel."""
    ptx, metadata, function = kernel.asm["ptx"], kernel.metadata, kernel.src.fn
    given = constants_of(kernel)
    constants = given | {
        name: value for each in given.values() if isinstance(each, tuple) for name, value in each._asdict().items()
    }
    resources, sass = resources_of(kernel)
    threads = metadata.num_warps * 32
    counts, violations, stores = _walk_ptx(ptx)
    found = _synchronisation(kernel.asm["llir"])
    expected = [(kind, *chain) for kind, chain in call_sites(function, given)]
    missing, unexpected = _compare(found, expected)
    for kind, number in Counter(kind for kind, *_ in found).items():
        if counts[kind] < number:
            missing.append(f"{number - counts[kind]} {kind}s between LLVM and PTX")
    return {
        "kernel": function.__name__,
        "triton": triton.__version__,
        "constants": {name: value for name, value in constants.items() if isinstance(value, (int, str, bool))},
        "dtype": _operand_dtype(kernel.src.signature) if "PRECISION" in constants else "",
        "descriptors": [name for name, kind in kernel.src.signature.items() if str(kind).startswith("tensordesc")],
        "marks": not ENDS.isdisjoint(function.fn.__code__.co_names),
        "threads": threads,
        "num_stages": metadata.num_stages,
        "sm": _gpu.sm,
        "shared_bytes": _gpu.shared_bytes,
        **resources,
        "tensor_cores": len(re.findall(r"\b(?:[HQI]GMMA|UTC[HQI]MMA|[HQI]MMA)\b", sass)),
        "tma_loads": len(_TMA_LOAD.findall(ptx)),
        "tma_stores": len(_TMA_STORE.findall(ptx)),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "mbarrier_waits": ptx.count("mbarrier.try_wait"),
        "warp_specialized": "warp_specialize" in kernel.asm["ttgir"] or "setmaxnreg" in ptx,
        "parameters": re.search(r"\.entry \w+\((.*?)\)\n", ptx, re.DOTALL)[1].count(".param"),
        "clock_looks": len(re.findall(r"\batom\S*\.max\b", ptx)),
        "clock_reads": ptx.count("%globaltimer"),
        "multiprocessor_reads": ptx.count("%smid"),
        "external": re.findall(r"\.extern \.func[^;]*?(\w+)\s*[(\n;]", ptx),
        "sites": dict(Counter(kind for kind, *_ in expected)),
        "missing": missing,
        "unexpected": unexpected,
        "violations": sorted(violations),
        "copy_stores": stores,
        "loop": _signals_and_waits(kernel.asm["ttgir"]),
    }


def constants_of(kernel) -> dict:
    """The values of a compiled kernel's constants by the names of its arguments; a NamedTuple is one argument."""
    found, constants = kernel.src.constants, {}
    for number, (name, kind) in enumerate(kernel.src.signature.items()):
        if isinstance(kind, tuple):
            constants[name] = type(kind)(*(_value(found[number, at]) for at in range(len(kind))))
        elif (number,) in found:
            constants[name] = _value(found[number,])
    return constants


def resources_of(kernel) -> tuple[dict, str]:
    """(what a program of a compiled kernel takes of a multiprocessor, its machine code)."""
    usage, sass = _disassemble(kernel.asm["cubin"])
    registers, stack, local = (int(usage[name]) for name in ("REG", "STACK", "LOCAL"))
    spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))  # instructions that store or load one
    shared = kernel.metadata.shared
    return {"registers": registers, "stack": stack, "local": local, "spills": spills, "shared": shared}, sass


def _signals_and_waits(ttgir: str) -> str:
    """What a main loop does in a step, in the order of its pipeline: "s" a relaxed signal, "d" a dot, "w" a wait.

    The pipeliner keeps the order of branches only where one needs what another gives.
    """
    lines = ttgir.splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines]
    dots = [
        n for n, line in enumerate(lines) if re.search(r"\b(?:tt\.dot|ttng\.(?:warp_group_dot|tc_gen5_mma)) ", line)
    ]
    loops = [[n for n in range(dot) if "scf.for" in lines[n] and indents[n] < indents[dot]] for dot in dots]
    if not any(loops):
        return ""
    dot, loop = next((dot, loop) for dot, loop in zip(dots, loops, strict=True) if loop)  # the first step may be peeled
    first = loop[-1]
    last = next(n for n in range(dot, len(lines)) if indents[n] <= indents[first] and lines[n].strip())
    dots = dict.fromkeys(("tt.dot ", "warp_group_dot ", "tc_gen5_mma "), "d")
    kinds = {"exch, relaxed, sys": "s", "add, acquire, sys": "w"} | dots
    return "".join(kind for line in lines[first:last] for text, kind in kinds.items() if text in line)


def _operand_dtype(signature: dict) -> str:
    """The dtype of x in a kernel's signature, a pointer or a descriptor: "*bf16", "tensordesc<bf16[128, 64],...>"."""
    return re.search(r"(?:bf|fp)\d+", str(signature.get("x", signature.get("inbox")))).group()


def _disassemble(cubin: bytes) -> tuple[dict, str]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tools / command[0], *command[1:], file.name], capture_output=True, text=True, check=True)
            for command in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    return dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout)), sass.stdout


_SEMANTICS = re.compile(r"\b(?:ld|st|atom|red)\.[\w.]*\b(acquire|release|acq_rel)\b")
_PUT_SIGNAL = re.compile(r"\bcall\S*\s.*(?:put_signal|putmem_signal)")
_TMA_LOAD = re.compile(r"\bcp\.async\.bulk\.tensor\S*\.shared::\w+\.global")
_TMA_STORE = re.compile(r"\bcp\.async\.bulk\.tensor\S*\.global\.shared")
_STORE = re.compile(r"\bst\.global\.([\w.]+)")
_BARRIER = re.compile(r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|red)\b")
_AGREEMENT = re.compile(r"\bbar(?:rier)?(?:\.cta)?\.red\b")
_FENCE = re.compile(r"\bfence\.acq_rel\.sys")
_RELAXED_SIGNAL = re.compile(r"\batom\.(?=\S*relaxed)(?=\S*sys)\S*exch")
_BRANCH = re.compile(r"(@\S+\s+)?bra\S*\s+(\$L\w+)")


def _synchronisation(llir: str) -> list[tuple]:
    """The acquires and releases of an LLVM module: (kind, (file, line), ...), innermost call first."""
    metadata = dict(re.findall(r"^(!\d+) = (.*)$", llir, re.MULTILINE))

    def field(node, name):
        match = re.search(rf"\b{name}: (?:(!?\d+)|\"([^\"]*)\")", metadata[node])
        return match and (match[1] or match[2])

    def chain(location):
        while location:
            file = field(field(field(location, "scope"), "file"), "filename")
            yield Path(file).name, int(field(location, "line"))
            location = field(location, "inlinedAt")

    calls = re.findall(r"^(.*\bcall\b.*), !dbg (!\d+)", llir, re.MULTILINE)
    return [(kind, *chain(location)) for call, location in calls if (kind := _kind(call))]


def _kind(instruction: str) -> str | None:
    found = _SEMANTICS.search(instruction)
    return found[1] if found else "release" if _PUT_SIGNAL.search(instruction) else None


def _walk_ptx(ptx: str) -> tuple[Counter, set, dict]:
    """(numbers of acquires and releases, violations of order, widths of the stores of `copy`) of a kernel's PTX.

    The order is checked along every path of the control flow; a state is the set of what is still owed on some path
    that leads there. An acquire of one thread, under a predicate, reaches the others through shared memory, behind a
    barrier. Of one that every thread makes for itself each warp may get another answer: before a branch all must agree.
    """
    body = ptx[ptx.index(".entry") :]
    body = body[: body.index("$L__func_end")]
    blocks, current, place = {"": []}, "", None
    for line in body.splitlines():
        if label := re.match(r"(\$L\w+):", line):
            blocks[current].append((place, f"bra {label[1]}"))
            current = label[1]
            blocks[current] = []
        elif location := re.match(r"\s*\.loc\b.*?// ([\w.]+\.py):(\d+)", line):
            place = location[1], int(location[2])
        elif line.strip() and not line.strip().startswith(("//", ".")):
            blocks[current].append((place, line.strip()))

    violations = set()
    states, queue = {label: None for label in blocks}, [("", frozenset())]
    while queue:
        label, state = queue.pop()
        if states[label] is not None and state <= states[label]:
            continue
        state = states[label] = state | (states[label] or frozenset())
        for place, instruction in blocks[label]:
            where = "{}:{}".format(*place) if place else "an unknown line"
            if branch := _BRANCH.match(instruction):
                if branch[1] and state & {"unbarred acquire", "unagreed acquire"}:
                    violations.add(f"no agreement of all threads between an acquire and the branch at {where}")
                queue.append((branch[2], state))
                if not branch[1]:
                    break
            elif instruction.startswith(("ret", "trap", "exit")):
                break
            kind = _kind(instruction)
            if kind in ("release", "acq_rel") and "unbarred store" in state:
                violations.add(f"no barrier between a store and the release at {where}")
            if _FENCE.search(instruction) and "unbarred store" in state:
                violations.add(f"no barrier between a store and the fence at {where}")
            if _RELAXED_SIGNAL.search(instruction) and "unfenced store" in state:
                violations.add(f"no fence between a store and the relaxed signal at {where}")
            # The record of an expired wait tells of nothing that TMA stored.
            if kind == "release" and "unpublished store" in state and _function_at(place) != "_record_fault":
                violations.add(f"no completion of a TMA store before the release at {where}")
            reads = re.search(r"\bld\.global|\bcp\.async\.c[ag]", instruction) and kind != "acquire"
            tma_load = _TMA_LOAD.search(instruction)
            if (reads or tma_load) and "unbarred acquire" in state:
                violations.add(f"no barrier between an acquire and the load at {where}")
            if tma_load and "unfenced acquire" in state:
                violations.add(f"no proxy fence between an acquire and the TMA load at {where}")

            if _BARRIER.search(instruction):
                state -= {"unbarred store", "unbarred acquire"}
            if _AGREEMENT.search(instruction):
                state -= {"unagreed acquire"}
            if "cp.async.bulk.wait_group" in instruction and ".read" not in instruction:
                state -= {"unpublished store"}
            if "fence.proxy.async.global" in instruction:
                state -= {"unfenced acquire"}
            if _FENCE.search(instruction):
                state -= {"unfenced store"}
            if _TMA_STORE.search(instruction):
                state |= {"unpublished store"}
            if kind in ("acquire", "acq_rel"):
                state |= {"unbarred acquire", "unfenced acquire"}
                if not instruction.startswith("@"):
                    state |= {"unagreed acquire"}
            if _STORE.search(instruction):
                state |= {"unbarred store", "unfenced store"}
    instructions = [pair for block in blocks.values() for pair in block]
    counts = Counter(kind for _, instruction in instructions if (kind := _kind(instruction)))
    stores = [(place, store[1]) for place, instruction in instructions if (store := _STORE.search(instruction))]
    return counts, violations, Counter(width for place, width in stores if _function_at(place) in ("copy", "put_tile"))


def _compare(events: list, expected: list) -> tuple[list[str], list[str]]:
    """Call sites of the source that were not compiled, and compiled instructions that no call site accounts for."""

    def covers(site, event):
        if len(site) != len(event) or site[0] != event[0]:
            return False
        places = zip(site[1:], event[1:], strict=True)
        return all(file == seen and first <= line <= last for (file, first, last), (seen, line) in places)

    def text(site):
        return f"{site[0]} at " + " < ".join(f"{place[0]}:{place[1]}" for place in site[1:])

    missing = [text(site) for site in expected if not any(covers(site, event) for event in events)]
    unexpected = {text(event) for event in events if not any(covers(site, event) for site in expected)}
    return missing, sorted(unexpected)


@functools.cache
def _functions(file: str) -> dict[str, ast.FunctionDef]:
    """The functions of a file of the library, or of this one, by name."""
    folders = [Path(module.__file__).parent for module in (tkernels, device, clocks)] + [Path(__file__).parent]
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    statements = ast.parse(path.read_text()).body if path else []
    return {node.name: node for node in statements if isinstance(node, ast.FunctionDef)}


def _function_at(place: tuple[str, int] | None) -> str | None:
    file, line = place or ("", 0)
    return next((name for name, node in _functions(file).items() if node.lineno <= line <= node.end_lineno), None)


def _value(value):
    return value.value if isinstance(value, tl.constexpr) else value


def call_sites(function, constants: dict, chain=()):
    """(kind, chain) of each acquire, release and acq_rel that a kernel's source can reach with these constants.

    A chain is (file, first line, last line) of each call, innermost first. A branch whose condition the constants
    decide is taken as decided; both sides of any other one count. What only a launch knows is not None.
    """
    file = Path(function.fn.__code__.co_filename).name
    names = _Names(function, constants)

    def noun(node):
        """What is known of the fields of a NamedTuple that is made here; None if none is."""
        kind = isinstance(node, ast.Call) and function.__globals__.get(getattr(node.func, "id", None))
        if isinstance(kind, type) and issubclass(kind, tuple):
            given = zip(kind._fields, node.args, strict=True)
            return types.SimpleNamespace(**{name: value for name, each in given for value in known(each)})

    def evaluate(node):
        if (made := noun(node)) is not None:
            return made
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            same = (known(node.left) or [...])[0] is evaluate(node.comparators[0])
            return same == isinstance(node.ops[0], ast.Is)
        if isinstance(node, ast.BoolOp):  # one value may decide, whatever the others are
            deciding = isinstance(node.op, ast.Or)
            if any(bool(value) == deciding for each in node.values for value in known(each)):
                return deciding
        builtins = {"__builtins__": {"max": max, "min": min, "len": len}}
        return eval(compile(ast.Expression(node), file, "eval"), builtins, names)

    def known(node):
        try:
            return [evaluate(node)]
        except (NameError, AttributeError, TypeError, RuntimeError, ValueError):  # the last two: a device function's
            return []

    def visit(node):
        if isinstance(node, ast.If):
            yield from visit(node.test)
            taken = [bool(value) for value in known(node.test)] or [True, False]
            for statement in (node.body if True in taken else []) + (node.orelse if False in taken else []):
                yield from visit(statement)
            return
        if isinstance(node, ast.Assign):
            made = noun(node.value)
            if isinstance(node.value, ast.Attribute):  # a noun within another one
                made = next((each for each in known(node.value) if isinstance(each, types.SimpleNamespace)), None)
            if made is not None or (isinstance(node.value, ast.Constant | ast.IfExp) and known(node.value) == [None]):
                names.constants |= {target.id: made for target in node.targets}
        if isinstance(node, ast.AnnAssign):
            for value in known(node.value):
                names.constants[node.target.id] = value
        for child in ast.iter_child_nodes(node):
            yield from visit(child)
        if isinstance(node, ast.Call):
            yield from called(node, ((file, node.lineno, node.end_lineno), *chain))

    def called(node, chain):
        if isinstance(node.func, ast.Attribute):
            for keyword in node.keywords:
                if keyword.arg == "sem" and evaluate(keyword.value) != "relaxed":
                    yield evaluate(keyword.value), chain
            if node.func.attr == "inline_asm_elementwise" and (kind := _kind(evaluate(node.args[0]))):
                yield kind, chain
        elif isinstance(node.func, ast.Name):
            target = names.constants.get(node.func.id) or function.__globals__.get(node.func.id)  # the former: a hook
            if node.func.id == "putmem_signal_block":
                yield "release", chain
            elif isinstance(target, triton.runtime.jit.JITFunction):
                given = dict(zip(target.arg_names, node.args, strict=False)) | {k.arg: k.value for k in node.keywords}
                bound = {p.name: _value(p.default) for p in target.params if p.has_default and p.name not in given}
                bound |= {name: value for name, argument in given.items() for value in known(argument)}
                yield from call_sites(target, bound, chain)

    for statement in _functions(file)[function.__name__].body:
        yield from visit(statement)


class _Names(dict):
    """What a name of a kernel's body stands for, where that is known at compile time; NameError where it is not."""

    def __init__(self, function, constants):
        self.function, self.constants = function, dict(constants)

    def __missing__(self, name):
        if name in self.constants:
            return self.constants[name]
        if name in self.function.fn.__code__.co_varnames:
            raise NameError(name)
        return _value(self.function.__globals__[name])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("only", nargs="*", help="the names of the cases to compile; default: all")
    options = parser.parse_args()
    if runtime.RUNTIME != "nvshmem":
        parser.error("set TKERNELS_RUNTIME=nvshmem, so that kernels are compiled and not interpreted")
    names = [name for name in (*CASES, *REFUSED, *ALLOWED) if not options.only or name in options.only]
    names.sort(key=lambda name: "nvshmem" not in name)  # the slow ones first, so that no worker ends alone with one
    with concurrent.futures.ProcessPoolExecutor(WORKERS) as pool:
        facts = dict(zip(names, pool.map(run_case, names), strict=True))
    options.output.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
