"""Symmetric memory between the ranks of a group, and the verbs that move data through it."""

if __name__ == "comm":  # imported from a checkout's root; see tkernels/_alias.py
    from tkernels._alias import alias

    alias("comm", "tkernels.comm")
