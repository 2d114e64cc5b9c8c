"""Lanes: the streams on which one call launches work that may run at one time, and their order.

    with lanes.open() as (here, beside, ahead):
        began = here.mark()
        with ahead.behind(began):
            transfer()
        with beside.behind(began):
            work()
        with here.behind(ahead.mark()):
            work_on_what_arrived()
"""

import contextlib

import torch


class Lane:
    """A stream of a call, or where there are none, nothing."""

    def __init__(self, stream):
        self._stream, self.used = stream, False

    def mark(self):
        """What is launched here so far: an event."""
        return self._stream and self._stream.record_event()

    @contextlib.contextmanager
    def behind(self, *marks):
        """A block whose work is launched here, behind what is marked."""
        if self._stream is None:
            yield
            return
        for mark in marks:
            self._stream.wait_event(mark)
        self.used = True
        with torch.cuda.stream(self._stream):
            yield


class Lanes:
    """Where a call launches its work.

    here: on the caller's stream.  beside: what may run at one time with that.  ahead: transfers, whose programs get SMs
    before those of other work that have not begun.
    """

    def __init__(self, context):
        self._workspace = context.workspace() if context.device.type == "cuda" else None

    @contextlib.contextmanager
    def open(self):
        """A block of such work, as three lanes. The caller's stream is behind all of it."""
        streams = None, None, None
        if self._workspace is not None:
            streams = torch.cuda.current_stream(), *self._workspace.lanes()
        here, *others = lanes = [Lane(stream) for stream in streams]
        try:
            yield lanes
        finally:
            with here.behind(*(lane.mark() for lane in others if lane.used)):
                pass
