"""How the interpreter runs programs, for a block."""

import contextlib

from tkernels.comm import interpreter


@contextlib.contextmanager
def execution(**settings):
    """`interpreter.set_default`, for kernels launched in this block; afterwards settings are as they were before."""
    before = interpreter._settings
    interpreter.set_default(**settings)
    try:
        yield
    finally:
        interpreter._settings = before
