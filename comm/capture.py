"""Keeps a first call's one-time setup correct under a CUDA graph's capture and in inference mode.

A capture records everything launched on its stream into the graph, so each replay would repeat it: zeroing an epoch,
copying a schedule. By default it also forbids its thread any call that might wait for the device, such as loading a
kernel. So kernels are compiled and loaded with the thread's capture mode relaxed, and memory is prepared on a stream
that is not captured, which is then synchronised.
"""

import contextlib
import ctypes

import torch

from tkernels.comm.driver import driver
from tkernels.comm.errors import TkernelsError

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def underway() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def taken(stream: int) -> bool:
    """Whether that CUDA stream is being captured into a CUDA graph."""
    if not torch.cuda.is_initialized():
        return False
    status = ctypes.c_int()
    # The legacy stream can't be captured, and querying it during a capture is an error.
    return driver().cuStreamIsCapturing(stream, ctypes.byref(status)) == 0 and status.value != 0


@contextlib.contextmanager
def permitted():
    """In the block, this thread may make calls that a capture forbids, except on the captured stream."""
    if not underway():
        yield
        return
    mode = ctypes.c_int(RELAXED)
    _exchange(mode)
    try:
        yield
    finally:
        _exchange(mode)


@contextlib.contextmanager
def uncaptured():
    """Under a capture, run the block's work on a stream that is not captured, and wait for it at the end."""
    if not underway():
        yield
        return
    with permitted():
        stream = torch.cuda.Stream()
        while taken(stream.cuda_stream):  # torch cycles through a small pool of streams
            stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()


@contextlib.contextmanager
def lasting():
    """Leave torch.inference_mode() in the block, so that tensors made there are usable outside of it.

    For tensors that outlive a call. Outside of inference mode, torch neither writes to a tensor that was made in it nor
    saves it for backward.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def prepare_cublas():
    """Under a capture, create this thread's cuBLAS handle, which torch's first matmul can't create there."""
    if underway():
        with permitted():
            torch.cuda.current_blas_handle()


def _exchange(mode: ctypes.c_int):
    """Swap the thread's capture mode and `mode`."""
    error = driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if error:
        raise TkernelsError(f"the mode of stream captures can't be changed: CUDA error {error}")
