"""CUDA's driver API, for calls that torch lacks: copies between peers, stream memory operations, capture modes.

Through cuda.bindings each call takes 2.5 us of host time (H200, bench/LOG.md).
"""

import ctypes
import functools


@functools.cache
def driver() -> ctypes.CDLL:
    library, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64
    library.cuStreamBatchMemOp_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    library.cuMemcpyAsync.argtypes = [number, number, ctypes.c_size_t, ctypes.c_void_p]
    library.cuStreamIsCapturing.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    library.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    return library
