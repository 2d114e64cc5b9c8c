"""Tensor-parallel modules over the overlapped operators."""

if __name__ == "layers":  # imported from a checkout's root; see tkernels/_alias.py
    from tkernels._alias import alias

    alias("layers", "tkernels.layers")
else:
    from tkernels.layers.functions import (
        all_reduce_sequence_parallel_grads,
        column_parallel_linear,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
        scatter_to_tensor_model_parallel_region,
    )
    from tkernels.layers.linear import ColumnParallelLinear, RowParallelLinear
    from tkernels.layers.mlp import ParallelMLP
    from tkernels.layers.parallelize import parallelize
    from tkernels.layers.state_dict import gather_state_dict, load_full_state_dict, sharded_state_dict

    __all__ = [
        "ColumnParallelLinear",
        "ParallelMLP",
        "RowParallelLinear",
        "all_reduce_sequence_parallel_grads",
        "column_parallel_linear",
        "copy_to_tensor_model_parallel_region",
        "gather_from_sequence_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "gather_state_dict",
        "load_full_state_dict",
        "parallelize",
        "reduce_from_tensor_model_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "scatter_to_sequence_parallel_region",
        "scatter_to_tensor_model_parallel_region",
        "sharded_state_dict",
    ]
