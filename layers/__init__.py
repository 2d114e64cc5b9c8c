"""Tensor-parallel modules over the overlapped operators."""

if __name__ == "layers":  # imported from a checkout's root; see tkernels/_alias.py
    from tkernels._alias import alias

    alias("layers", "tkernels.layers")
