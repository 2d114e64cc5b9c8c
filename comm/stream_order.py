"""The order of operations on several streams: on a GPU they run one after the other, as the host calls them.

An operation may take all SMs, and holds them until its peers have sent. Two of them on two streams, such as a
tensor-parallel GEMM and the sum of gradients beside it, could wait for each other: each holds the SMs of one rank, and
needs those of the other. So where the stream changes from one operation to the next, the later one waits for the stream
of the earlier one. NCCL orders its communicators in the same way with NCCL_LAUNCH_ORDER_IMPLICIT.

Why no rank waits forever: ranks that share groups call their operations in one order. Of the unfinished operations one
is then the first on all of its ranks, and finds all their SMs free.

What it costs: one event where the stream changes. Where contexts leave each other room, nothing is ordered, and threads
whose order differs between ranks need such contexts, and streams, of their own.

What is not ordered: the replays of a CUDA graph, the messages of channels, kernels that a program launches itself, and
torch.distributed's collectives, except those that this library calls.
"""

import functools
import threading

import torch

from tkernels.comm import capture, runtime

latest: int | None = None  # the stream of the latest operation
_crowded = False  # whether that one needed all others to wait
_lock = threading.Lock()  # threads share the two


def follow(stream: int, needed: int):
    """Order the CUDA stream behind the latest operation, if that was on another one.

    needed: programs of all operations that may run at the same time. If there are as many SMs, as there were for the
        latest operation, nothing is ordered.
    """
    global latest, _crowded
    with _lock:
        crowded = needed > runtime.default_programs()
        before, latest, together, _crowded = latest, stream, crowded or _crowded, crowded
        if before in (None, stream) or not together:
            return
        if capture.taken(before) == capture.taken(stream):  # a capture can't wait for work outside, nor the reverse
            _stream(stream).wait_stream(_stream(before))


@functools.cache
def _stream(handle: int) -> torch.cuda.Stream:
    device = runtime.device()  # torch takes a handle of 0 for none given, and would make a new stream
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)
