"""Triton kernels that overlap tensor-parallel communication with matrix multiplication."""

from tkernels.comm import (
    RUNTIME,
    Context,
    HeapExhaustedError,
    MismatchError,
    TkernelsError,
    WaitTimeoutError,
    current_context,
    finalize,
    init,
)
from tkernels.comm.collectives import split_rows
from tkernels.gemm import matmul
from tkernels.launch import launch
from tkernels.operators import (
    all_gather,
    all_gather_matmul,
    all_reduce,
    barrier,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
)

__version__ = "0.1.0"
__all__ = [
    "RUNTIME",
    "Context",
    "HeapExhaustedError",
    "MismatchError",
    "TkernelsError",
    "WaitTimeoutError",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "barrier",
    "current_context",
    "finalize",
    "init",
    "launch",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "split_rows",
]
