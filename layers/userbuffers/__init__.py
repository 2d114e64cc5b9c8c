"""TransformerEngine's Userbuffers API on this library's kernels: the same names, arguments and argument order.

    from tkernels.layers import userbuffers as te

    te.initialize_ub([tokens, hidden], tp_size)
    layer = te.LayerNormLinear(
        hidden, 3 * hidden, sequence_parallel=True, tp_group=group, tp_size=tp_size, parallel_mode="column",
        ub_overlap_ag=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True, ub_name="qkv",
    )

`defaults` documents the configurations and their defaults, `tensor_parallel.dataflow` which data each pass
communicates, and `shim` the module path that Megatron calls.
"""

from tkernels.layers.tensor_parallel.float8 import Float8Tensor
from tkernels.layers.userbuffers.communicators import (
    CommOverlap,
    CommOverlapAlgo,
    CommOverlapCore,
    CommOverlapHelper,
    CommOverlapP2P,
    CommOverlapType,
    bulk_overlap_ag_with_external_gemm,
    device_supports_multicast,
    fill_userbuffers_buffer_for_all_gather,
    get_stream_priority_range,
    nvte_built_with_cublasmp,
    ubuf_built_with_mpi,
)
from tkernels.layers.userbuffers.defaults import OverlapOptions, UserBufferQuantizationMode, default_config
from tkernels.layers.userbuffers.distributed import gather_along_first_dim
from tkernels.layers.userbuffers.float8 import (
    DelayedScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Format,
    autocast,
    fp8_autocast,
)
from tkernels.layers.userbuffers.gemm import general_gemm
from tkernels.layers.userbuffers.linear import LayerNormLinear, Linear
from tkernels.layers.userbuffers.mlp import LayerNormMLP
from tkernels.layers.userbuffers.modules import DotProductAttention, LayerNorm, RMSNorm
from tkernels.layers.userbuffers.registry import (
    destroy_ub,
    get_ub,
    get_ub_is_fp8,
    initialize_ub,
    is_ub_initialized,
    load_ub_cfgs,
    using_cublasmp_backend,
)
from tkernels.layers.userbuffers.transformer import MultiheadAttention, TransformerLayer

__all__ = [
    "CommOverlap",
    "CommOverlapAlgo",
    "CommOverlapCore",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "CommOverlapType",
    "DelayedScaling",
    "DotProductAttention",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Format",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "OverlapOptions",
    "RMSNorm",
    "TransformerLayer",
    "UserBufferQuantizationMode",
    "autocast",
    "bulk_overlap_ag_with_external_gemm",
    "default_config",
    "destroy_ub",
    "device_supports_multicast",
    "fill_userbuffers_buffer_for_all_gather",
    "fp8_autocast",
    "gather_along_first_dim",
    "general_gemm",
    "get_stream_priority_range",
    "get_ub",
    "get_ub_is_fp8",
    "initialize_ub",
    "is_ub_initialized",
    "load_ub_cfgs",
    "nvte_built_with_cublasmp",
    "ubuf_built_with_mpi",
    "using_cublasmp_backend",
]
