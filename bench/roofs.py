"""Measured peaks of this machine: a copy to a peer by the copy engine, a cuBLAS GEMM, a copy in GPU memory."""

from dataclasses import dataclass, field

import torch

from bench.baselines import enable_symmetric_memory
from bench.compile import sentence
from tkernels.comm.context import Context
from tkernels.configs import FP8, result_dtype
from tkernels.quantize import quantize_reference
from tkernels.timing import agree, measure

PEER_COPY_BYTES = 256 << 20
HBM_COPY_BYTES = 1 << 30
GEMM_SIZE = 8192


@dataclass(frozen=True)
class Roofs:
    """Rates per GPU, with all GPUs busy. None where something does not exist here; `missing` gives the reason.

    peer_copy_bytes_per_s: into each GPU, all of them at once, the better of push and pull.
    cublas_flop_per_s: of one GEMM with M = N = K = 8192; of FP8 with a scale a row and fast accumulation.
    hbm_copy_bytes_per_s: bytes read plus bytes written.
    """

    peer_copy_bytes_per_s: float | None = None
    cublas_flop_per_s: float | None = None
    hbm_copy_bytes_per_s: float | None = None
    missing: dict[str, str] = field(default_factory=dict)


def measure_roofs(ctx: Context, dtype: torch.dtype, iterations: int) -> Roofs:
    """Collective. Measure the three peaks, each on the slowest rank."""
    if ctx.device.type != "cuda":
        return Roofs(missing={"roofs": "the simulated runtime has no hardware to measure"})
    calls, missing, reason = {}, {}, None
    if ctx.size > 1:
        try:
            local, remote = _peer_buffers(ctx)
            calls |= {"push": lambda: remote.copy_(local), "pull": lambda: local.copy_(remote)}
        except Exception as error:  # torch's symmetric memory may be missing here; the wire's columns then stay empty
            reason = sentence(error)
        reason = agree(ctx, reason)
        if reason is not None:
            calls, missing = {}, {"wire": f"the peak of a copy to a peer was not measured ({reason})"}
    source = torch.zeros(HBM_COPY_BYTES, dtype=torch.uint8, device=ctx.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=ctx.device, dtype=result_dtype(dtype)) for _ in range(2))
    calls |= {"hbm": lambda: target.copy_(source), "cublas": lambda: torch.mm(a, b.t())}
    if dtype in FP8:
        (a, a_scale), (b, b_scale) = (quantize_reference(each, "row", dtype) for each in (a, b))
        scales, options = (a_scale, b_scale.t().contiguous()), {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        calls["cublas"] = lambda: torch._scaled_mm(a, b.t(), *scales, **options)
    timings, _ = measure(ctx, calls, iterations)
    per_s = {name: 1e6 / timing.us for name, timing in timings.items()}
    peer = max(per_s["push"], per_s["pull"]) * PEER_COPY_BYTES if "push" in per_s else None
    return Roofs(peer, per_s["cublas"] * 2 * GEMM_SIZE**3, per_s["hbm"] * 2 * HBM_COPY_BYTES, missing)


def _peer_buffers(ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's memory, and the next rank's, mapped here.

    From torch's symmetric memory, so that the measured peak does not depend on tkernels.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    group = ctx.group.process_group
    enable_symmetric_memory(group)
    memory = symmetric_memory.empty(PEER_COPY_BYTES, dtype=torch.uint8, device=ctx.device)
    handle = symmetric_memory.rendezvous(memory, group)
    return memory, handle.get_buffer((ctx.rank + 1) % ctx.size, (PEER_COPY_BYTES,), torch.uint8)
