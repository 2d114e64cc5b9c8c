"""Traces of what every program of every rank did and when, recorded by the kernels themselves, for Perfetto.

`tracing` is in recorder.py; the `Trace` that it returns, with its `Slice`s and `Summary`, in timeline.py.
"""
