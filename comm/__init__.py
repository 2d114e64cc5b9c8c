"""Symmetric memory between the ranks of a group, and the verbs that move data through it."""

if __name__ == "comm":  # imported from a checkout's root; see tkernels/_alias.py
    from tkernels._alias import alias

    alias("comm", "tkernels.comm")
else:
    from tkernels.comm.channel import Channel
    from tkernels.comm.context import Context, MeshLike, as_context, finalize, init
    from tkernels.comm.contexts import current_context, find_context
    from tkernels.comm.errors import (
        Fault,
        HeapExhaustedError,
        LeaseError,
        MismatchError,
        OutOfStepError,
        TkernelsError,
        WaitTimeoutError,
    )
    from tkernels.comm.heap import SymmetricHeap
    from tkernels.comm.regions import Regions
    from tkernels.comm.runtime import RUNTIME

    __all__ = [
        "Channel",
        "Context",
        "MeshLike",
        "Fault",
        "HeapExhaustedError",
        "LeaseError",
        "MismatchError",
        "OutOfStepError",
        "RUNTIME",
        "Regions",
        "SymmetricHeap",
        "TkernelsError",
        "WaitTimeoutError",
        "as_context",
        "current_context",
        "finalize",
        "find_context",
        "init",
    ]
