"""Triton kernels that overlap tensor-parallel communication with matrix multiplication."""

from tkernels.comm import Context, TkernelsError, WaitTimeoutError, current_context, finalize, init
from tkernels.gemm import matmul

__all__ = ["Context", "TkernelsError", "WaitTimeoutError", "current_context", "finalize", "init", "matmul"]
