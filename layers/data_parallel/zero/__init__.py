"""ZeroOptimizer: any torch optimizer, with its state and the gradients sharded over data-parallel ranks."""

from tkernels.layers.data_parallel.zero.optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
