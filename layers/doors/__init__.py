"""How other people's programs reach this library: each module puts its kernels behind a seam that torch already has."""

import functools
import logging


@functools.cache
def log_once(text: str):
    """Log at WARNING what has not been logged before: a slower path, and why it is taken."""
    logging.getLogger("tkernels").warning(text)
