"""cuBLASMp's distributed matmul with nvmath's Python API: D = epilog(alpha op(A) op(B) + beta C) over ranks.

    from tkernels.layers.cublasmp import Matmul, MatmulEpilog, MatmulOptions, Slab, matmul

This package replaces nvmath.distributed.linalg.advanced and nvmath.distributed.distribution. tkernels.init(group)
replaces nvmath.distributed.initialize; its context is the default of every call.
"""

from tkernels.layers.cublasmp.distributions import (
    BlockCyclic,
    BlockNonCyclic,
    Box,
    Distribution,
    ProcessGrid,
    Slab,
)
from tkernels.layers.cublasmp.multiplication import InvalidMatmulState, Matmul, matmul
from tkernels.layers.cublasmp.options import (
    CudaDataType,
    MatmulAlgoType,
    MatmulComputeType,
    MatmulEpilog,
    MatmulEpilogPreferences,
    MatmulOptions,
    MatmulPlanPreferences,
    MatmulQuantizationScales,
    MatmulResultScheme,
    matrix_qualifiers_dtype,
)
from tkernels.layers.cublasmp.plan import Outcome
from tkernels.layers.cublasmp.problem import InconsistentError, MatrixLayout, MMTraits

__all__ = [
    "BlockCyclic",
    "BlockNonCyclic",
    "Box",
    "CudaDataType",
    "Distribution",
    "InconsistentError",
    "InvalidMatmulState",
    "MMTraits",
    "Matmul",
    "MatmulAlgoType",
    "MatmulComputeType",
    "MatmulEpilog",
    "MatmulEpilogPreferences",
    "MatmulOptions",
    "MatmulPlanPreferences",
    "MatmulQuantizationScales",
    "MatmulResultScheme",
    "MatrixLayout",
    "Outcome",
    "ProcessGrid",
    "Slab",
    "matmul",
    "matrix_qualifiers_dtype",
]
