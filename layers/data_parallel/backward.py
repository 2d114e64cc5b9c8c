"""Backward: when a backward begins, when it has ended, and whether it has failed."""

import functools
import weakref

import torch

from tkernels.layers.owners import weakly


def backward_runs() -> bool:
    """Whether the caller is a hook inside of a backward."""
    return backward_id() != -1


def backward_id() -> int:
    """Autograd's number of the running backward; -1 if none runs."""
    return torch._C._current_graph_task_id()


class Backward:
    """The backward that somebody takes part in: whoever comes first in it begins it, and autograd ends it.

    end: a method, whose object is kept weakly. Called at the end of a backward, on the thread and the stream of its
    caller, unless it has failed. begun: whether one has begun that has not ended; it may have failed.
    """

    def __init__(self, end):
        self._end, self.begun, self._id = weakly(end), False, -1
        self._callback = lambda: None  # weak reference to what ends the backward, which only autograd holds

    @property
    def runs(self) -> bool:
        """Whether the caller is inside of it, and not of one inside of it."""
        return self.begun and self._id == backward_id()

    @property
    def failed(self) -> bool:
        """Whether it has begun, and will not end.

        Autograd has then dropped the callback; or will, once backward() has raised: the thread that ran it does so in
        its own time.
        """
        return self.begun and (self._callback() is None or not backward_runs())

    def begin(self) -> bool:
        """Called inside of a backward: arrange for its end. Whether that had yet to be done."""
        if self.begun and not self.failed:
            return False
        callback = functools.partial(self._ended)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
        self._callback, self.begun, self._id = weakref.ref(callback), True, backward_id()
        return True

    def forget(self):
        """Take no part in what has begun."""
        self.begun = False

    def _ended(self):
        self.begun = False
        self._end()
