"""`captured`: a CUDA graph of work on several streams, in order with what runs outside of it."""

import contextlib
import functools
import reprlib
import threading
import warnings
from collections.abc import Iterable

import torch

from tkernels.comm.arguments import check_type
from tkernels.comm.fence import EventCompletion

_lock, _captures, _before = threading.Lock(), 0, False  # captures inside `following`; torch's setting outside of them


@contextlib.contextmanager
def captured(graph, *, slots=(), streams=(), dev=torch.cuda):
    """Capture a CUDA graph that uses `slots` and side `streams`; `graph` is torch.cuda.graph(...), not yet entered.

    The slots of a `Channel` are among `slots` if the graph sends or receives.

        with captured(torch.cuda.graph(g), slots=[slot], streams=[comm]) as replay:
            step()
        replay()  # g.replay(), ordered with work launched on the slots outside the graph

    The side streams fork from the capture's stream and join it at the end; nodes that autograd kept from a warm-up on
    other streams follow it. Every replay records one external event, which stands for all work of the graph on the
    slots: the next user of a slot waits for it. `replay` in turn orders the current stream after the work launched on
    the slots and on the side streams before, and these streams after the graph; a bare g.replay() does neither. A
    capture that fails leaves the slots as if they had never been used.

    Raises LeaseError for a slot with an open lease, at the start or at the end of the capture.
    """
    if not hasattr(graph, "__enter__") or not hasattr(graph, "cuda_graph"):
        raise TypeError(f"captured: graph={graph!r} must be torch.cuda.graph(...), not yet entered")
    check_type("captured: slots", slots, Iterable, "a list of slots")
    check_type("captured: streams", streams, Iterable, "a list of streams")
    slots, streams = tuple(slots), tuple(streams)
    for slot in slots:
        if not hasattr(slot, "join") or not hasattr(slot, "gate"):  # a Slot, or an end of a Channel
            raise TypeError(f"captured: a slot={reprlib.repr(slot)} must be a Slot")
    for slot in slots:
        slot.join()
    replayed = dev.Event(external=True)
    done = EventCompletion(replayed, captured=None, event=replayed)

    def leave():
        for slot in slots:
            slot.gate.add(done)

    def replay():
        stream = dev.current_stream()
        for slot in slots:
            slot.join()
        for side in streams:  # a comm stream, and its workspace, are other models' too
            stream.wait_event(side.record_event())
        graph.cuda_graph.replay()
        leave()
        for side in streams:
            done.wait(side)

    try:
        with following(), graph:
            stream = dev.current_stream()
            fork = stream.record_event()
            for side in streams:
                side.wait_event(fork)
            yield replay
            for slot in slots:
                slot.join(stream)
            for side in streams:
                stream.wait_event(side.record_event())
            replayed.record(stream)
    except BaseException:
        for slot in slots:
            slot.forget()
        raise
    leave()


@contextlib.contextmanager
def following():
    """Around a capture: nodes of autograd that were made before it run on its stream, instead of breaking it.

    A parameter's AccumulateGrad node remembers the stream of its first use. If anything holds it longer, such as the
    loss of a warm-up step, a captured backward would pull that stream into the graph. torch's setting that prevents
    this is the whole process's: it is on as long as any capture is inside, and then what it was before.

    Warns, once, where an older torch lacks the setting.
    """
    global _captures, _before
    override = _stale_stream_override()
    if override is None:
        yield
        return
    with _lock:
        if not _captures:
            _before = torch._C._override_stale_capture_stream()
            override(True)
        _captures += 1
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if not _captures:
                override(_before)


@functools.cache
def _stale_stream_override():
    """torch's function, or None with a warning, which caching makes the only one."""
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if override is None:
        warnings.warn(
            f"torch {torch.__version__} has no set_override_stale_capture_stream: the capture of a backward fails if a "
            f"loss of the warm-up is still alive. Drop it (del loss) before the capture, or use a newer torch",
            stacklevel=6,
        )
    return override
