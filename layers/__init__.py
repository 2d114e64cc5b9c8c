"""Modules, optimizers and schedules for overlapped training: tensor, pipeline, data parallel and fully sharded."""

if __name__ == "layers":  # imported from a checkout's root; see tkernels/_alias.py
    from tkernels._alias import alias

    alias("layers", "tkernels.layers")
else:
    from tkernels.comm.fence import EventCompletion, Fence
    from tkernels.layers.data_parallel.ddp import OverlappedDDP
    from tkernels.layers.data_parallel.fsdp import FullyShard
    from tkernels.layers.data_parallel.fully_shard import fully_shard, register_fsdp_forward_method
    from tkernels.layers.data_parallel.grad_bucket import GradBucket
    from tkernels.layers.data_parallel.pools import (
        Bucket,
        FixedPoolAllocator,
        FixedPoolPlan,
        MaxPoolAllocator,
        MaxPoolPlan,
    )
    from tkernels.layers.data_parallel.state_dict import gather_state_dict, load_full_state_dict, sharded_state_dict
    from tkernels.layers.data_parallel.values import ensure_params_ready
    from tkernels.layers.data_parallel.zero import ZeroOptimizer
    from tkernels.layers.grad_hooks import GradReadyHooks, grad_ready_hooks
    from tkernels.layers.gradients import all_reduce_sequence_parallel_grads, clip_grad_norm_
    from tkernels.layers.graphs import captured
    from tkernels.layers.lease import Keepalive, Lease, Slot, WorkCompletion
    from tkernels.layers.pipeline.communicator import P2PCommunicator, P2PHandle
    from tkernels.layers.pipeline.memory import custom_backward, deallocate_output_tensor
    from tkernels.layers.pipeline.run import forward_backward_pipelining, split_into_stages
    from tkernels.layers.tensor_parallel.functions import (
        column_parallel_linear,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
        scatter_to_tensor_model_parallel_region,
    )
    from tkernels.layers.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
    from tkernels.layers.tensor_parallel.mlp import ParallelMLP
    from tkernels.layers.tensor_parallel.parallelize import parallelize
    from tkernels.layers.tensor_parallel.plan import parallelize_module
    from tkernels.layers.tensor_parallel.siblings import ColwiseParallelGroup
    from tkernels.layers.tensor_parallel.styles import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        Replicated,
        ReplicatedForHeads,
        RowwiseParallel,
        SequenceParallel,
    )

    __all__ = [
        "Bucket",
        "ColwiseParallel",
        "ColwiseParallelGroup",
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
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "Replicated",
        "ReplicatedForHeads",
        "RowParallelLinear",
        "RowwiseParallel",
        "SequenceParallel",
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
        "fully_shard",
        "gather_from_sequence_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "gather_state_dict",
        "grad_ready_hooks",
        "load_full_state_dict",
        "parallelize",
        "parallelize_module",
        "reduce_from_tensor_model_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "register_fsdp_forward_method",
        "scatter_to_sequence_parallel_region",
        "scatter_to_tensor_model_parallel_region",
        "sharded_state_dict",
        "split_into_stages",
    ]
