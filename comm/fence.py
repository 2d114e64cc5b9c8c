"""Fence: the completions of launched work, of any streams, that later work has to wait for.

Streams are those of `dev`. It is torch.cuda; or torch.cpu, which has one stream with everything in order; or any other
object that has `current_stream()`, `stream(s)` and streams with `record_event()` and `wait_event(event)`.
"""

from typing import Protocol

import torch

from tkernels.comm.errors import LeaseError


class Completion(Protocol):
    """Work that can be waited for: an event of a stream, a c10d Work, a peer's signal at a generation.

    key: completions with the same key happen in the order in which they were made; the later one covers the earlier.
    captured: whether it was made during a CUDA graph's capture. True is valid only inside of a capture, False only
        outside, None everywhere.
    """

    key: object
    captured: bool | None

    def wait(self, stream):
        """Order later work of `stream` after it. Blocks neither the host nor any other stream."""

    def query(self) -> bool:
        """Whether it is known to have happened. False is always a valid answer."""


class EventCompletion:
    """Completion of everything launched on a stream before this was made."""

    __slots__ = ("key", "captured", "_event")

    def __init__(self, stream, captured: bool | None = False, event=None):
        if event is None:
            check_stream("EventCompletion: stream", stream)
        self.key, self.captured = stream, captured
        self._event = stream.record_event() if event is None else event

    def wait(self, stream):
        stream.wait_event(self._event)

    def query(self) -> bool:
        return self._event is None or self._event.query()  # torch.cpu records None: its work is done


class Fence:
    """A set of completions, at most one for each key."""

    __slots__ = ("_completions", "_dev")

    def __init__(self, dev):
        self._dev, self._completions = dev, {}

    def __len__(self):
        return len(self._completions)

    def record(self, stream):
        """Add the completion of everything launched on `stream` so far."""
        self._completions[stream] = EventCompletion(stream, capturing(self._dev))

    def add(self, completion: Completion):
        if not hasattr(completion, "key"):
            raise TypeError(
                f"a fence takes completions, not {type(completion).__name__}; make an EventCompletion of a stream, or "
                f"a WorkCompletion of torch.distributed's work"
            )
        self._completions[completion.key] = completion

    def update(self, other: "Fence"):
        self._completions.update(other._completions)

    def wait(self, stream):
        """Order later work of `stream` after all completions. Raises LeaseError across the edge of a capture."""
        inside = None
        for key, completion in self._completions.items():
            if completion.captured is not None:  # the stream's own, too: a graph may be replayed on another stream
                inside = capturing(self._dev) if inside is None else inside
                if inside != completion.captured:
                    raise LeaseError(_ACROSS[inside])
            if key != stream:  # by value: torch makes a new wrapper in each current_stream()
                completion.wait(stream)

    def query(self) -> bool:
        """Whether all completions are known to have happened.

        Under capture, where querying is not allowed, only an empty fence returns True.
        """
        return not self._completions or (
            not capturing(self._dev) and all(completion.query() for completion in self._completions.values())
        )

    def clear(self):
        self._completions = {}


_ACROSS = {
    True: "a buffer was last used outside the CUDA graph that is being captured, and a graph can't wait for that; "
    "capture inside `with captured(torch.cuda.graph(g), slots=[...])`, which orders it before",
    False: "a buffer was last used inside a CUDA graph's capture, and nothing outside can wait for that; capture "
    "inside `with captured(torch.cuda.graph(g), slots=[...])`, which leaves an event for what follows",
}


_streams = {}  # torch.cuda's, by device and address


def current_stream(dev):
    """The current stream of `dev`, sooner than torch.cuda finds out of which device, and makes an object of it."""
    if dev is not torch.cuda:
        return dev.current_stream()
    device = torch.cuda.current_device()
    key = device, torch._C._cuda_getCurrentRawStream(device)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(device)
    return _streams[key]


def capturing(dev) -> bool:
    """Whether the current stream of `dev` is being captured into a CUDA graph."""
    return dev is not torch.cpu and getattr(dev, "is_current_stream_capturing", bool)()


def check_stream(what: str, stream):
    """Raise TypeError for what is no stream."""
    if not hasattr(stream, "record_event"):
        raise TypeError(f"{what}={stream!r} must be a stream")


def check_dev(what: str, dev):
    """Raise TypeError for a module, or another object, that has no streams."""
    if not hasattr(dev, "current_stream"):
        raise TypeError(f"{what}: dev={dev!r} has no streams; pass torch.cuda or torch.cpu, or leave it out")
