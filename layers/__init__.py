"""Modules, optimizers and schedules for overlapped training: tensor, pipeline, data parallel and fully sharded."""

if __name__ == "layers":  # imported from a checkout's root; see tkernels/_alias.py
    from tkernels._alias import alias

    alias("layers", "tkernels.layers")
else:
    from tkernels.comm.fence import EventCompletion, Fence
    from tkernels.layers.ddp import OverlappedDDP, ensure_params_ready
    from tkernels.layers.fsdp import FullyShard
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
    from tkernels.layers.grad_bucket import GradBucket
    from tkernels.layers.grad_hooks import GradReadyHooks, grad_ready_hooks
    from tkernels.layers.graphs import captured
    from tkernels.layers.lease import Keepalive, Lease, Slot, WorkCompletion
    from tkernels.layers.linear import ColumnParallelLinear, RowParallelLinear
    from tkernels.layers.mlp import ParallelMLP
    from tkernels.layers.norms import clip_grad_norm_
    from tkernels.layers.p2p import P2PCommunicator, P2PHandle, custom_backward, deallocate_output_tensor
    from tkernels.layers.parallelize import parallelize
    from tkernels.layers.pipeline import forward_backward_pipelining, split_into_stages
    from tkernels.layers.pools import Bucket, FixedPoolAllocator, FixedPoolPlan, MaxPoolAllocator, MaxPoolPlan
    from tkernels.layers.state_dict import gather_state_dict, load_full_state_dict, sharded_state_dict
    from tkernels.layers.zero import ZeroOptimizer

    __all__ = [
        "Bucket",
        "ColumnParallelLinear",
        "EventCompletion",
        "Fence",
        "FixedPoolAllocator",
        "FixedPoolPlan",
        "FullyShard",
        "GradBucket",
        "GradReadyHooks",
        "Keepalive",
        "Lease",
        "MaxPoolAllocator",
        "MaxPoolPlan",
        "OverlappedDDP",
        "P2PCommunicator",
        "P2PHandle",
        "ParallelMLP",
        "RowParallelLinear",
        "Slot",
        "WorkCompletion",
        "ZeroOptimizer",
        "all_reduce_sequence_parallel_grads",
        "captured",
        "clip_grad_norm_",
        "column_parallel_linear",
        "copy_to_tensor_model_parallel_region",
        "custom_backward",
        "deallocate_output_tensor",
        "ensure_params_ready",
        "forward_backward_pipelining",
        "gather_from_sequence_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "gather_state_dict",
        "grad_ready_hooks",
        "load_full_state_dict",
        "parallelize",
        "reduce_from_tensor_model_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "scatter_to_sequence_parallel_region",
        "scatter_to_tensor_model_parallel_region",
        "sharded_state_dict",
        "split_into_stages",
    ]
