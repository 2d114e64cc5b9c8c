"""What the model knows of GPUs: one table, a row for each."""

from dataclasses import dataclass

import torch

from tkernels.comm import runtime
from tkernels.configs import FP8, GemmConfig

TILE_END_S = 3e-6  # a tile's time without its steps along K


@dataclass(frozen=True, eq=False)
class GPU:
    """The constants of a GPU: a row of `GPUS`. Rates are per second.

    known: "measured"; "runs": other constants are those of the GPU measured; "compiled": never run, from data sheets.
    flops, library_flops: of our GEMM and of torch's, apart from the ends of their tiles: in 16 bits; in fp32 as TF32
        and as IEEE; in FP8, and in FP8 with sums that are promoted. Without the last two: it has no FP8.
    pointer_flops: of our GEMM in 16 bits, where TMA can't take the operands.
    unaligned_flops: of torch's in 16 bits, where rows are multiples of 2, 4 and 8 bytes; and as TF32, of 4 or 8 bytes.
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
    flops: tuple[float, ...] = (830e12, 45e12, 7e12, 1500e12, 1040e12)
    library_flops: tuple[float, ...] = (830e12, 400e12, 52e12, 1500e12, 1350e12)
    pointer_flops: float = 47e12
    unaligned_flops: tuple[float, float, float, float] = (120e12, 270e12, 450e12, 125e12)
    memory: float = 4e12
    l2: float = 12e12
    copy_engine: float = 385e9
    stores: float = 320e9
    program: float = 28e9
    reducing_program: float = 24e9
    interleaved: float = 225e9
    collective: float = 235e9

    def rate(self, dtype: torch.dtype, precision: str = "ieee", tma: bool = True) -> float:
        """Our FLOP/s; precision: as gemm.precision says it; tma: its descriptors can take the operands.

        Raises TypeError for FP8 where there is none, like `library_rate`.
        """
        kind = self._kind(dtype, precision)
        return self.flops[kind] if tma or kind else self.pointer_flops

    def library_rate(self, dtype: torch.dtype, precision: str = "ieee", alignment: int = 16) -> float:
        """Torch's FLOP/s; alignment: bytes that the rows of all operands are multiples of."""
        kind = self._kind(dtype, precision)
        if alignment >= 16 or kind >= 2:
            return self.library_flops[kind]
        return self.unaligned_flops[3 if kind else alignment.bit_length() - 2]

    def _kind(self, dtype: torch.dtype, precision: str) -> int:
        """The place of a dtype's rate in `flops`."""
        if dtype in FP8:
            if len(self.flops) < 4:
                raise TypeError(f"{self.name} has no float8 arithmetic; use torch.bfloat16")
            return 4 if precision == "promoted" else 3
        return 0 if dtype != torch.float32 else 1 if precision == "tf32" else 2

    def seconds(self, multiplications: int, dtype: torch.dtype) -> float:
        """The time in which one SM multiplies and adds so often."""
        return 2 * multiplications * self.sms / self.rate(dtype)

    def tile_s(self, gemm: GemmConfig, K: int, dtype: torch.dtype) -> float:
        """The time that a program takes for a tile."""
        return self.tile_at(self.rate(dtype), gemm.block_m, gemm.block_n, K, dtype)

    def tile_at(
        self, flops: float, block_m: int, block_n: int, K: int, dtype: torch.dtype, sectors: bool = True
    ) -> float:  # fmt: skip
        """The same of any tile, where all SMs reach that many FLOP/s: small ones wait for their operands, out of L2.

        sectors: the operands' rows begin at sectors of the cache, of 32 bytes. Else what TMA reads of a row takes one
        more, and programs wait about twice as long.
        """
        operands_s = (block_m + block_n) * K * dtype.itemsize * self.sms / self.l2 * (1 if sectors else 2)
        return max(2 * block_m * block_n * K * self.sms / flops, operands_s) + TILE_END_S


H200 = GPU("NVIDIA H200")
SIMULATED = GPU("simulated", "interpreted")
GPUS = {
    gpu.name: gpu
    for gpu in (
        H200,
        GPU("NVIDIA H100 80GB HBM3", "runs", memory=2.8e12),
        GPU(
            "NVIDIA A100-SXM4-80GB", "compiled", 108, 166912, (250e12, 60e12, 7e12), (270e12, 130e12, 19e12),
            240e12, (100e12, 180e12, 240e12, 60e12), 1.6e12, 6e12, 250e9, 200e9, 18e9, 16e9, 160e9, 150e9,
        ),
        GPU(
            "NVIDIA B200", "compiled", 148, 232448, (1400e12, 60e12, 10e12, 2800e12, 2000e12),
            (1700e12, 850e12, 70e12, 3400e12, 3400e12), 60e12, (150e12, 350e12, 600e12, 200e12),
            6.4e12, 18e12, 770e9, 640e9, 56e9, 48e9, 500e9, 470e9,
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
