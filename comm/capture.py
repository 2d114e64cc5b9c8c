"""What a first call has to do for later ones, where the mode that it comes in would spoil it.

While a CUDA graph is captured, it is what the capture must not hold: done beside it, at once.

A capture takes what is launched on its stream for the graph, where each replay would do it again: the zeros of an
epoch, a schedule's copy. And by default it forbids its thread whatever might wait for the device, such as loading a
kernel. So kernels are compiled and loaded with the thread's capture mode relaxed, and memory is prepared on a stream
that no capture has taken, and waited for. In inference mode it is done outside of that.
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
    # The legacy stream can't be captured, and asking for it beside a capture is an error.
    return driver().cuStreamIsCapturing(stream, ctypes.byref(status)) == 0 and status.value != 0


@contextlib.contextmanager
def permitted():
    """In the block, this thread may do what a capture forbids, though not to the stream that is captured."""
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
def beside():
    """Under a capture, the block's work goes to a stream that is not captured, and is done when the block ends."""
    if not underway():
        yield
        return
    with permitted():
        stream = torch.cuda.Stream()
        while taken(stream.cuda_stream):  # torch hands out few streams, in turns
            stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()


@contextlib.contextmanager
def lasting():
    """Around what makes tensors that outlive a call: under torch.inference_mode() too, they are of use outside of it.

    Outside, torch neither writes to a tensor that was made within nor saves it for backward.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def prepare_cublas():
    """Make cuBLAS's handle of this thread, which torch's first product can't do under a capture."""
    if underway():
        with permitted():
            torch.cuda.current_blas_handle()


def _exchange(mode: ctypes.c_int):
    """Swap the thread's mode and `mode`."""
    error = driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if error:
        raise TkernelsError(f"the mode of stream captures can't be changed: CUDA error {error}")
