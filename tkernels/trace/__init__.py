"""Traces of what every program of every rank did and when, recorded by the kernels themselves, for Perfetto."""

from tkernels.trace.recorder import tracing
from tkernels.trace.timeline import Slice, Summary, Trace

__all__ = ["Slice", "Summary", "Trace", "tracing"]
