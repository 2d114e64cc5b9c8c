"""What the model knows of GPUs: one table, a row for each."""

from dataclasses import dataclass, replace

import torch

from tkernels.comm import runtime
from tkernels.configs import FP8, GemmConfig

TILE_END_S = 3e-6  # a tile's time without its steps along K


@dataclass(frozen=True, eq=False)
class GPU:
    """The constants of a GPU: a row of `GPUS`. Rates are per second.

    known: "measured"; "runs": other constants are those of the GPU measured; "compiled": never run, from data sheets.
    capability: the compute capability, whose rules its kernels follow.
    flops, library_flops: of our GEMM and of torch's, apart from the ends of their tiles: in 16 bits; in fp32 as TF32
        and as IEEE; in FP8, and in FP8 with sums that are promoted. Without the last two: it has no FP8.
    unfed_flops: of our GEMM in 16 bits and as TF32, where TMA doesn't feed tensor cores, as `feeds` has it.
    unaligned_flops: of torch's in 16 bits, where rows are multiples of 2, 4 and 8 bytes; and as TF32, of 4 or 8 bytes.
    turned_flops: of torch's as TF32, where K is contiguous in neither operand.
    memory, l2: bytes that a kernel reads and writes, and that its programs read.
    copy_engine, stores: bytes to all peers together.
    program, reducing_program: bytes that one comm program stores, in an all-gather, and where it waits for tiles.
    interleaved: bytes to all peers, where every program sends between its steps.
    collective: bytes of a collective alone; of an all-reduce, of each of its halves.
    """

    name: str
    known: str = "measured"
    capability: tuple[int, int] = runtime.HOPPER
    sms: int = 132
    shared_bytes: int = 227 << 10  # for one program
    flops: tuple[float, ...] = (830e12, 438e12, 7e12, 1500e12, 1040e12)
    library_flops: tuple[float, ...] = (830e12, 420e12, 52e12, 1500e12, 1350e12)
    unfed_flops: tuple[float, float] = (47e12, 45e12)
    unaligned_flops: tuple[float, float, float, float] = (120e12, 270e12, 450e12, 125e12)
    turned_flops: float = 265e12
    memory: float = 4e12
    l2: float = 12e12
    copy_engine: float = 385e9
    stores: float = 320e9
    program: float = 28e9
    reducing_program: float = 24e9
    interleaved: float = 225e9
    collective: float = 235e9

    @property
    def sm(self) -> int:
        """The compute capability as compilers write it: 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def tensor_memory(self) -> bool:
        """Whether the sums of a tile are kept beside the registers: data center Blackwell, sm_100 to sm_110."""
        return (10, 0) <= self.capability < (12, 0)

    @property
    def tiles_by_tma(self) -> bool:
        """Whether tiles by rule are loaded by TMA. Consumer Blackwell has it, but little memory (default_config)."""
        return self.capability >= runtime.HOPPER and self.shared_bytes >= 227 << 10

    def feeds(self, dtype: torch.dtype, precision: str, layout: str) -> bool:
        """Whether tensor cores multiply what TMA has loaded, at their full speed. layout: as gemm.layout_of names it.

        As TF32 they take tiles in which K is contiguous alone; others pass registers. IEEE fp32 has no tensor cores.
        """
        if dtype == torch.float32:
            return precision == "tf32" and layout == "TN" and self.tiles_by_tma
        return layout != "pointers"

    def rate(self, dtype: torch.dtype, precision: str = "ieee", layout: str = "TN") -> float:
        """Our FLOP/s; precision: as gemm.precision says it; layout: as gemm.layout_of names it.

        Raises TypeError for FP8 where there is none, like `library_rate`.
        """
        kind = self._kind(dtype, precision)
        return self.flops[kind] if kind >= 2 or self.feeds(dtype, precision, layout) else self.unfed_flops[kind]

    def library_rate(
        self, dtype: torch.dtype, precision: str = "ieee", alignment: int = 16, orientation: str = "TN"
    ) -> float:
        """Torch's FLOP/s; alignment: bytes that all operands' rows are multiples of; orientation: as Problem has it."""
        kind = self._kind(dtype, precision)
        if alignment >= 16 or kind >= 2:
            return self.turned_flops if kind == 1 and orientation == "NT" else self.library_flops[kind]
        return self.unaligned_flops[3 if kind else alignment.bit_length() - 2]

    def _kind(self, dtype: torch.dtype, precision: str) -> int:
        """The place of a dtype's rate in `flops`."""
        if dtype in FP8:
            if len(self.flops) < 4:
                raise TypeError(f"{self.name} has no float8 arithmetic; use torch.bfloat16")
            return 4 if precision == "promoted" else 3
        return 0 if dtype != torch.float32 else 1 if precision == "tf32" else 2

    def seconds(self, multiplications: int, dtype: torch.dtype, precision: str = "ieee") -> float:
        """The time in which one SM multiplies and adds so often."""
        return 2 * multiplications * self.sms / self.rate(dtype, precision)

    def tile_s(self, gemm: GemmConfig, K: int, dtype: torch.dtype, precision: str = "ieee") -> float:
        """The time that a program takes for a tile."""
        return self.tile_at(self.rate(dtype, precision), gemm.block_m, gemm.block_n, K, dtype)

    def tile_at(
        self, flops: float, block_m: int, block_n: int, K: int, dtype: torch.dtype, sectors: bool = True,
        end_s: float = TILE_END_S,
    ) -> float:  # fmt: skip
        """The same of any tile, where all SMs reach that many FLOP/s: small ones wait for their operands, out of L2.

        sectors: the operands' rows begin at sectors of the cache, of 32 bytes. Else what TMA reads of a row takes one
        more, and programs wait about twice as long.
        """
        operands_s = (block_m + block_n) * K * dtype.itemsize * self.sms / self.l2 * (1 if sectors else 2)
        return max(2 * block_m * block_n * K * self.sms / flops, operands_s) + end_s


H200 = GPU("NVIDIA H200")
SIMULATED = GPU("simulated", "interpreted")
H200_SHEET = (989, 494, 67, 1979), 4.8, 450  # as the columns of DATA_SHEETS

# What NVIDIA's data sheets and architecture whitepapers say, by name: compute capability; SMs; KiB of shared memory for
# a program (CUDA C++ Programming Guide, compute capabilities); dense TFLOP/s in 16 bits with fp32 sums, as TF32, of
# IEEE fp32, and in FP8; TB/s of memory; GB/s to peers in one direction, by NVLink or else by PCIe.
DATA_SHEETS = {
    "NVIDIA H100 PCIe": ((9, 0), 114, 227, (756, 378, 51, 1513), 2.0, 300),
    "NVIDIA H100 NVL": ((9, 0), 132, 227, (835, 417, 60, 1671), 3.9, 300),
    "NVIDIA H20": ((9, 0), 78, 227, (148, 74, 44, 296), 4.0, 450),
    "NVIDIA GH200 480GB": ((9, 0), 132, 227, (990, 494, 67, 1979), 4.0, 450),
    "NVIDIA A100-SXM4-80GB": ((8, 0), 108, 163, (312, 156, 19.5), 2.0, 300),
    "NVIDIA A100-SXM4-40GB": ((8, 0), 108, 163, (312, 156, 19.5), 1.6, 300),
    "NVIDIA RTX A6000": ((8, 6), 84, 99, (155, 77, 38.7), 0.77, 56),
    "NVIDIA L40S": ((8, 9), 142, 99, (362, 183, 91.6, 733), 0.86, 32),
    "NVIDIA GeForce RTX 4090": ((8, 9), 128, 99, (165, 83, 82.6, 330), 1.0, 32),
    "NVIDIA B200": ((10, 0), 148, 227, (2250, 1100, 75, 4500), 7.7, 900),
    "NVIDIA GB200": ((10, 0), 148, 227, (2500, 1250, 80, 5000), 8.0, 900),
    "NVIDIA B300": ((10, 3), 160, 227, (2250, 1125, 75, 4500), 8.0, 900),
    "NVIDIA GB300": ((10, 3), 160, 227, (2500, 1250, 80, 5000), 8.0, 900),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ((12, 0), 188, 99, (500, 250, 120, 1000), 1.6, 64),
    "NVIDIA GeForce RTX 5090": ((12, 0), 170, 99, (209, 105, 105, 419), 1.8, 64),
}


# Of torch's speed in 16 bits, what others measured of Triton's GEMMs (Triton's issues 6523, 6217), by major capability.
TRITONS_SHARE = {8: 0.9, 9: 1.0, 10: 0.85, 12: 0.9}


def by_data_sheet(name: str) -> GPU:
    """The row of a GPU that nothing was measured on: the rates of H200, times the ratio of what data sheets say.

    L2's by the number of SMs, each of which reads as many bytes a clock.
    """
    capability, sms, shared_kib, flops, memory, link = DATA_SHEETS[name]
    (half, tf32, fp32, *fp8), memory, link = (
        [theirs / ours for theirs, ours in zip(flops, H200_SHEET[0], strict=False)],
        memory / H200_SHEET[1],
        link / H200_SHEET[2],
    )
    fp8, share = fp8 * 2, TRITONS_SHARE[capability[0]]  # with sums that are promoted too
    ratios = {
        "flops": (half * share, tf32 * share, fp32, *(ratio * share for ratio in fp8)),
        "library_flops": (half, tf32, fp32, *fp8),
        "unaligned_flops": (half, half, half, tf32),
        "unfed_flops": (half, tf32),
    }
    scaled = {
        field: tuple(ours * ratio for ours, ratio in zip(getattr(H200, field), each, strict=False))
        for field, each in ratios.items()
    }
    links = ("copy_engine", "stores", "program", "reducing_program", "interleaved", "collective")
    ratios = {"turned_flops": tf32, "memory": memory, "l2": sms / H200.sms} | dict.fromkeys(links, link)
    scaled |= {field: getattr(H200, field) * ratio for field, ratio in ratios.items()}
    return GPU(name, "compiled", capability, sms, shared_kib << 10, **scaled)


GPUS = {gpu.name: gpu for gpu in (H200, replace(H200, name="NVIDIA H100 80GB HBM3", known="runs", memory=2.8e12))}
GPUS |= {name: by_data_sheet(name) for name in DATA_SHEETS}


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
    """The row of this process's GPU; where it has none, or the rules are another capability's, `row_of` that."""
    name = gpu_name()
    if name == SIMULATED.name:
        return SIMULATED
    capability = runtime.capability()
    gpu = GPUS.get(name)
    return gpu if gpu and gpu.capability == capability else row_of(capability)


def known_of(name: str, capability: tuple[int, int]) -> str:
    """What is known of a GPU, in a sentence, beginning with "measured", "runs" or "compiled, never run".

    Of one without a row: of its generation, whose kernels run at most.
    """
    words = {"measured": "measured", "runs": "runs", "compiled": "compiled, never run"}
    if name in GPUS:
        return f"{words[GPUS[name].known]}: {KNOWN[GPUS[name].known].format(gpu=name)}"
    row = row_of(capability)
    return f"compiled, never run: the model has no row for {name}, and takes that of {row.name}"


def row_of(capability: tuple[int, int]) -> GPU:
    """The first row of the newest capability that is no newer than this one."""
    return max((gpu for gpu in GPUS.values() if gpu.capability <= capability), key=lambda gpu: gpu.capability)


def stages_rows(dtype: torch.dtype, precision: str = "ieee", gpu: GPU | None = None) -> bool:
    """Whether fused operations take operands of any rows into rows that TMA can take: in 16 bits and as TF32.

    Only where tiles by rule are loaded by TMA; the interpreter takes rows as they lie. gpu: None: this process's. It
    depends on nothing that ranks could differ in.
    """
    gpu = gpu or gpu_here()
    return gpu is not SIMULATED and gpu.tiles_by_tma and (dtype.itemsize == 2 or precision == "tf32")
