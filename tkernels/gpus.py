"""What the model knows of GPUs: one table, a row for each."""

from dataclasses import dataclass

import torch

from tkernels.comm import runtime
from tkernels.configs import GemmConfig

TILE_END_S = 3e-6  # a tile's time without its steps along K


@dataclass(frozen=True, eq=False)
class GPU:
    """The constants of a GPU: a row of `GPUS`. Rates are per second.

    known: "measured"; "runs": other constants are those of the GPU measured; "compiled": never run, from data sheets.
    flops, library_flops: of our GEMM apart from the ends of its tiles, and of torch's, in 16 bits and in fp32.
    memory, l2: bytes that a kernel reads and writes, and that its programs read.
    copy_engine, stores: bytes to all peers together.
    program, reducing_program: bytes that one comm program stores, in an all-gather, and where it waits for tiles.
    interleaved: bytes to all peers, where every program sends between its steps.
    collective: bytes of a collective alone; of an all-reduce, of each of its halves.
    """

    name: str
    known: str = "measured"
    sms: int = 132
    shared_bytes: int = 232448  # for one program
    flops: tuple[float, float] = (830e12, 7e12)
    library_flops: tuple[float, float] = (780e12, 52e12)
    memory: float = 4e12
    l2: float = 12e12
    copy_engine: float = 385e9
    stores: float = 320e9
    program: float = 28e9
    reducing_program: float = 24e9
    interleaved: float = 225e9
    collective: float = 235e9

    def seconds(self, multiplications: int, dtype: torch.dtype) -> float:
        """The time in which one SM multiplies and adds so often."""
        return 2 * multiplications * self.sms / self.flops[dtype == torch.float32]

    def tile_s(self, gemm: GemmConfig, K: int, dtype: torch.dtype) -> float:
        """The time that a program takes for a tile: small ones wait for their operands, out of L2."""
        operands_s = (gemm.block_m + gemm.block_n) * K * dtype.itemsize * self.sms / self.l2
        return max(self.seconds(gemm.block_m * gemm.block_n * K, dtype), operands_s) + TILE_END_S


H200 = GPU("NVIDIA H200")
SIMULATED = GPU("simulated", "interpreted")
GPUS = {
    gpu.name: gpu
    for gpu in (
        H200,
        GPU("NVIDIA H100 80GB HBM3", "runs", memory=2.8e12),
        GPU(
            "NVIDIA A100-SXM4-80GB", "compiled", 108, 166912, (250e12, 7e12), (270e12, 19e12), 1.6e12, 6e12,
            250e9, 200e9, 18e9, 16e9, 160e9, 150e9,
        ),
        GPU(
            "NVIDIA B200", "compiled", 148, 232448, (1400e12, 10e12), (1700e12, 70e12), 6.4e12, 18e12,
            770e9, 640e9, 56e9, 48e9, 500e9, 470e9,
        ),
    )
}  # fmt: skip

KNOWN = {
    "measured": "the model's constants were measured on {gpu}",
    "runs": "the kernels have run on {gpu}, but the model's constants are those of NVIDIA H200, except its memory's",
    "compiled": "nothing has run on {gpu}: kernels were compiled for it, and the constants are from data sheets",
}


def gpu_name() -> str:
    """The name of this process's GPU; where there is none, that of H200."""
    if runtime.RUNTIME == "simulated":
        return SIMULATED.name
    return torch.cuda.get_device_name() if torch.cuda.is_available() else H200.name


def gpu_here() -> GPU:
    """The row of this process's GPU; where it has none, that of H200."""
    name = gpu_name()
    return SIMULATED if name == SIMULATED.name else GPUS.get(name, H200)
