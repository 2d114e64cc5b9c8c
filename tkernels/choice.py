"""The configuration that a call without one gets: the tuned one of its bucket, else the model's choice.

A tuned configuration is one that `tkernels tune` found on this machine, or one that comes with the package. It holds
for a bucket: the sizes of a rank's local GEMM rounded up to powers of two, the dtype, and the layout. Products of fp32
as TF32 have buckets of their own, and so have those of FP8 without fast accumulation, which where these are empty take
the tiles of those with it, made narrower. It is sent in the wire format by rule (model.wire_of), so ranks need not
choose alike.
"""

import functools
import warnings
import weakref
from dataclasses import fields, replace

import torch
import torch.distributed as dist

from tkernels import configs, model, tuned
from tkernels.comm.context import Context
from tkernels.configs import GemmConfig, OverlapConfig, name_of
from tkernels.gpus import GPU, SIMULATED, gpu_here, stages_rows
from tkernels.model import Prediction, Problem

KEY = ("operation", "M", "N", "K", "dtype", "layout")  # of a bucket, by name

MULTIPLIED = {"ieee": "", "tf32": " tf32", "promoted": " precise"}  # behind a dtype's name in a key, by precision

Bucket = tuple  # (operation, M, N, K, dtype, layout)


class Tuned(dict):
    """The configurations of a context's records, by bucket."""

    def __init__(self, records: list[dict]):
        for record in records:
            self.remember(record)

    def remember(self, record: dict):
        """Let a record count from now on, instead of earlier ones of its bucket. One that can't be read is reported."""
        try:
            key, config = read_record(record)
        except ValueError as error:
            warnings.warn(f"tuned settings of {record['key']} are ignored: {error}", stacklevel=3)
        else:
            self[key] = config

    def found(self, *call) -> GemmConfig | OverlapConfig | None:
        """What was tuned for the bucket of a call, (operation, M, N, K, dtype, layout, precision); else None."""
        of_others = call[-1] == "promoted" and self.get(bucket(*call[:-1]))
        return self.get(bucket(*call)) or of_others or None


_tuned: weakref.WeakKeyDictionary[Context, Tuned] = weakref.WeakKeyDictionary()


def tuned_of(ctx: Context) -> Tuned:
    """What was tuned for a context's operations. Its first use reads the records that hold for it."""
    if ctx not in _tuned:
        _tuned[ctx] = Tuned(tuned.known(ctx.size, ctx.transport, report=ctx.rank == 0))
    return _tuned[ctx]


@functools.cache
def tuned_locally() -> Tuned:
    """What was tuned for products of one rank alone, whatever contexts there are."""
    return Tuned(tuned.known(1, tuned.LOCAL, report=not dist.is_initialized() or dist.get_rank() == 0))


def gemm_config(
    M: int, N: int, K: int, dtype: torch.dtype, layout: str, stored: torch.dtype | None = None, gpu: GPU | None = None,
    precision: str = "ieee",
) -> GemmConfig:  # fmt: skip
    """The configuration of `matmul`'s kernel for x [M, K] and w [N, K] by default. layout: as gemm.layout_of names it.

    stored: the dtype of the result, if it differs; larger elements take the shared memory of a stage. gpu: None: this
    process's. precision: as gemm.precision says it.
    """
    config = tuned_locally().found("matmul", M, N, K, dtype, layout, precision)
    config = config or model.default_config(M, N, dtype, layout, gpu, True, precision)
    config = configs.for_precision(config, precision)
    if stored is not None and stored.itemsize > configs.result_dtype(dtype).itemsize:
        config = replace(config, num_stages=min(config.num_stages, 3))
    return config


def product_ways(problem: Problem) -> dict[str, tuple[GemmConfig | None, Prediction]]:
    """The ways to carry out a local product: our kernel's configuration or None for torch, and the predicted time."""

    def config_of(layout: str) -> GemmConfig:
        sizes = problem.M, problem.N, problem.K
        config = gemm_config(*sizes, problem.dtype, layout, problem.stored, problem.gpu, problem.precision)
        fed = problem.gpu.feeds(problem.dtype, problem.precision, layout)
        if problem.stored_by_tma or problem.dtype == torch.float32 and not fed:
            return config
        usual = problem.dtype.itemsize == (problem.stored or problem.dtype).itemsize == 2
        return configs.by_elements(config, one_slice=usual and problem.activation is None)

    config = config_of(problem.layout)
    found = {model.KERNEL: (config, model.predict(problem, config))}
    of_tf32 = problem.precision == "tf32" and problem.gpu.tiles_by_tma
    if problem.staged and (problem.dtype.itemsize == 2 or of_tf32):
        config = config_of(problem.staged_layout)
        found[model.STAGED] = config, model.predict_staged(problem, config)
    if problem.library:
        found[model.LIBRARY] = None, model.predict_library(problem)
    return found


def product_way(problem: Problem) -> tuple[str, GemmConfig | None]:
    """The way that a local product takes, the fastest by the model, and our kernel's configuration or None for torch.

    On the simulated runtime, which is there to run the kernels, it is our kernel, on the operands where they lie.
    """
    ways = product_ways(problem)
    predicted = {name: prediction for name, (_, prediction) in ways.items()}
    way = model.KERNEL if problem.gpu is SIMULATED else model.fastest(problem, predicted)
    return way, ways[way][0]


def overlap_config(
    ctx: Context, operation: str, M: int, N: int, K: int, dtype: torch.dtype, layout: str, sending: bool = False,
    precision: str = "ieee", whole_chunks: bool = False,
) -> OverlapConfig:  # fmt: skip
    """The configuration that a fused operation uses by default, where the local GEMM is x [M, K] times w [N, K].

    sending: require comm programs that send into the two alternating inboxes. precision: as gemm.precision says it; of
    "promoted" the tiles are those of `with_room_for`. whole_chunks: rows are not sent tile by tile, interleaved.
    """
    call = operation, M, N, K, dtype, layout
    problem = problem_of(ctx, *call, sending, whole_chunks, precision)
    return _adapted(tuned_of(ctx).found(*call, precision), problem) or model.choose(problem)


def problem_of(
    ctx: Context, operation: str, M: int, N: int, K: int, dtype: torch.dtype, layout: str, sending: bool = False,
    whole_chunks: bool = False, precision: str = "ieee",
) -> Problem:  # fmt: skip
    """The problem of a call on a context. Of an empty share one row or column of zeros is computed."""
    return Problem(
        operation, max(M, 1), max(N, 1), max(K, 1), dtype, layout, ctx.size, ctx.num_programs, gpu_here(), ctx.mapped,
        ctx.transport != "nvshmem", sending, whole_chunks, precision,
    )  # fmt: skip


def _adapted(config: OverlapConfig | None, problem: Problem) -> OverlapConfig | None:
    """A tuned configuration in the wire format by rule; None where it can't be sent, or hasn't the programs."""
    if config is None:
        return None
    if stages_rows(problem.dtype, problem.precision, problem.gpu):  # rows that are staged are TMA's to read
        config = replace(config, gemm=replace(config.gemm, use_tma=True))
    wire, available = model.wire_of(problem), min(problem.programs, config.max_programs or problem.programs)
    tile_by_tile = config.interleaved and problem.mapped and not problem.whole_chunks
    sends = config.num_comm or not problem.sending and (wire.landing and not config.interleaved or tile_by_tile)
    if not sends or config.num_comm >= available or not configs.chunks_fit(wire.chunk_rows, config.gemm.block_m):
        return None
    return config.with_wire(wire)


def bucket(
    operation: str, M: int, N: int, K: int, dtype: torch.dtype, layout: str, precision: str = "ieee"
) -> Bucket:  # fmt: skip
    """The key of a problem's bucket: its sizes are rounded up to powers of two.

    >>> bucket("matmul", 1, 1536, 8192, torch.bfloat16, "TN")
    ('matmul', 1, 2048, 8192, 'bfloat16', 'TN')
    >>> bucket("matmul", 1, 1536, 8192, torch.float8_e4m3fn, "TN", "promoted")
    ('matmul', 1, 2048, 8192, 'float8_e4m3fn precise', 'TN')
    """
    sizes = (1 << (max(size, 1) - 1).bit_length() for size in (M, N, K))
    return operation, *sizes, name_of(dtype) + MULTIPLIED[precision], layout


def read_record(record: dict) -> tuple[Bucket, GemmConfig | OverlapConfig]:
    """(bucket's key, configuration) of a record with unchecked contents. Raises ValueError if they are invalid."""
    operation, *sizes, dtype, layout = key = tuple(record["key"].get(name) for name in KEY)
    dtypes = [*map(name_of, (*configs.DTYPES, *configs.FP8)), name_of(torch.float32) + MULTIPLIED["tf32"]]
    dtypes += [name_of(each) + MULTIPLIED["promoted"] for each in configs.FP8]
    known = operation in configs.OPERATIONS and dtype in dtypes and layout in configs.LAYOUTS
    whole = all(isinstance(size, int) and size > 0 and not size & (size - 1) for size in sizes)
    if not (known and whole):
        raise ValueError(f"there is no bucket {key}")
    return key, _read(GemmConfig if operation == "matmul" else OverlapConfig, record.get("config"))


def _read(kind: type, settings):
    if not isinstance(settings, dict):
        raise ValueError(f"{settings!r} is no {kind.__name__}")
    unknown = set(settings) - {each.name for each in fields(kind)}
    if unknown:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    if kind is OverlapConfig:
        settings = settings | {"gemm": _read(GemmConfig, settings.get("gemm"))}
    return kind(**settings)
