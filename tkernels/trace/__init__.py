"""Traces: what every program of every rank did when, as the kernels themselves write it down, for Perfetto to show."""

from tkernels.trace.recorder import tracing
from tkernels.trace.timeline import Slice, Summary, Trace

__all__ = ["Slice", "Summary", "Trace", "tracing"]
