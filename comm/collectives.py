"""all_gather, reduce_scatter, all_reduce and barrier on the device verbs: rows of any width, shared unevenly or evenly.

Letters: R ranks. A rank's part is its rows, as contiguous elements; parts lie one after the other in the whole.
Parts travel in chunks, one signal a chunk. Sums are taken in fp32 in rank order: the same bits on every run, and on
every rank.
"""

import math

import torch
import triton
import triton.language as tl

from tkernels.comm.context import Context
from tkernels.comm.device import begin_epoch, copy, end_epoch, operation, put_signal, signal, wait_signal

OP_ALL_GATHER = operation("all_gather")
OP_REDUCE_SCATTER = operation("reduce_scatter")
OP_ALL_REDUCE = operation("all_reduce")
OP_BARRIER = operation("barrier")

BLOCK = 8192  # elements a program copies at a step; 8 warps saturate NVLink with 12 programs at this size
CHUNK_BYTES = 256 << 10
MAX_PROGRAMS = 32
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def split_rows(num_rows: int, size: int) -> tuple[int, ...]:
    """The even split of rows over ranks: the first `num_rows % size` ranks have one more (as torch.tensor_split)."""
    return tuple(num_rows // size + (rank < num_rows % size) for rank in range(size))


def check_rows(name: str, ctx: Context, rows, own: int | None = None, total: int | None = None) -> tuple[int, ...]:
    """The rows of every rank: as given, else equal to `own` on every rank, else the even split of `total`.

    Raises ValueError, from values that all ranks share, or from this rank's own row count.
    """
    if rows is None:
        if own is None and total % ctx.size:
            raise ValueError(
                f"{name}: M={total} rows don't divide by {ctx.size} ranks; pass rows=split_rows({total}, {ctx.size}) "
                f"or another split"
            )
        return (own,) * ctx.size if own is not None else split_rows(total, ctx.size)
    rows = tuple(rows)
    if len(rows) != ctx.size or min(rows) < 0:
        raise ValueError(f"{name}: rows={rows} must name a count >= 0 for each of {ctx.size} ranks")
    if own is not None and own != rows[ctx.rank]:
        raise ValueError(f"{name}: rank {ctx.rank} has {own} rows, but rows={rows} gives it {rows[ctx.rank]}")
    if total is not None and total != sum(rows):
        raise ValueError(f"{name}: there are M={total} rows, but rows={rows} sums to {sum(rows)}")
    return rows


# fmt: off
@triton.jit
def chunk_count(part, chunk):
    """Chunks of a part; an empty part still has one, so that its rank is heard from."""
    return tl.cast(tl.maximum(tl.cdiv(part, chunk), 1), tl.int32)


@triton.jit
def part_of(starts, rank, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """First element and number of elements of a rank's part; both are multiples of ALIGN bytes."""
    VECTOR: tl.constexpr = max(ALIGN * 8 // DTYPE.primitive_bitwidth, 1)
    start = tl.multiple_of(tl.load(starts + rank), VECTOR)
    return start, tl.multiple_of(tl.load(starts + rank + 1) - start, VECTOR)


@triton.jit
def receive_parts(
    out, inbox, ready, starts, max_chunks, epoch, table, chunk, rank,
    SIZE: tl.constexpr, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):
    """Wait for every peer's part and copy it from the inbox to `out`; the programs share the chunks."""
    for step in range(1, SIZE):
        source = (rank + SIZE - step) % SIZE
        start, part = part_of(starts, source, out.dtype.element_ty, ALIGN)
        for index in range(tl.program_id(0), chunk_count(part, chunk), tl.num_programs(0)):
            wait_signal(ready + source * max_chunks + index, epoch, table, source, index, OPERATION, TRANSPORT)
            first = tl.cast(index, tl.int64) * chunk
            copy(out + start + first, inbox + start + first, tl.minimum(part - first, chunk), BLOCK, ALIGN)


@triton.jit(do_not_specialize=["rank"])  # all ranks share one compiled kernel
def all_gather_kernel(
    x, out,  # [own part], [whole]
    inbox, inbox_stride, ready, max_chunks, state, table, rank,
    starts,  # [R + 1] first element of each part
    chunk,  # elements
    SIZE: tl.constexpr, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):
    epoch = begin_epoch(state)
    inbox += epoch % 2 * inbox_stride
    start, part = part_of(starts, rank, x.dtype.element_ty, ALIGN)
    chunks = chunk_count(part, chunk)
    for i in range(tl.program_id(0), chunks * (SIZE - 1), tl.num_programs(0)):
        index = i // (SIZE - 1)
        target = (rank + 1 + i % (SIZE - 1)) % SIZE
        first = tl.cast(index, tl.int64) * chunk
        put_signal(
            inbox + start + first, x + first, tl.minimum(part - first, chunk),
            ready + rank * max_chunks + index, epoch, target, table, TRANSPORT, BLOCK, ALIGN,
        )
    for index in range(tl.program_id(0), chunks, tl.num_programs(0)):
        first = tl.cast(index, tl.int64) * chunk
        copy(out + start + first, x + first, tl.minimum(part - first, chunk), BLOCK, ALIGN)
    receive_parts(
        out, inbox, ready, starts, max_chunks, epoch, table, chunk, rank, SIZE, OPERATION, TRANSPORT, BLOCK, ALIGN
    )
    end_epoch(state, epoch)


@triton.jit(do_not_specialize=["rank"])
def reduce_kernel(
    x, out,  # [whole]; [own part], or [whole] with GATHER
    inbox, inbox_stride, part_stride, ready, max_chunks, state, table, rank,
    starts,  # [R + 1] first element of each part
    chunk,  # elements
    SIZE: tl.constexpr, GATHER: tl.constexpr,
    OPERATION: tl.constexpr, TRANSPORT: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):
    """Send each rank its part of x, sum what arrives; with GATHER, send the sum of the own part to everyone."""
    part_stride = tl.cast(part_stride, tl.int64)  # times R it may pass 2**31
    epoch = begin_epoch(state)
    inbox += epoch % 2 * inbox_stride
    pid = tl.program_id(0)
    for step in range(1, SIZE):
        target = (rank + step) % SIZE
        start, part = part_of(starts, target, x.dtype.element_ty, ALIGN)
        for index in range(pid, chunk_count(part, chunk), tl.num_programs(0)):
            first = tl.cast(index, tl.int64) * chunk
            put_signal(
                inbox + rank * part_stride + first, x + start + first, tl.minimum(part - first, chunk),
                ready + rank * max_chunks + index, epoch, target, table, TRANSPORT, BLOCK, ALIGN,
            )

    start, part = part_of(starts, rank, x.dtype.element_ty, ALIGN)
    own = out + start if GATHER else out
    gathered = inbox + SIZE * part_stride
    gathered_ready = ready + SIZE * max_chunks
    for index in range(pid, chunk_count(part, chunk), tl.num_programs(0)):
        for source in range(SIZE):
            if source != rank:
                wait_signal(ready + source * max_chunks + index, epoch, table, source, index, OPERATION, TRANSPORT)
        first = tl.cast(index, tl.int64) * chunk
        last = tl.minimum(part, first + chunk)
        for offset in range(first, last, BLOCK):
            at = tl.cast(offset, tl.int64) + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for source in range(SIZE):
                if source == rank:
                    total += tl.load(x + start + at, mask=at < last, other=0.0).to(tl.float32)
                else:
                    total += tl.load(inbox + source * part_stride + at, mask=at < last, other=0.0).to(tl.float32)
            tl.store(own + at, total.to(out.dtype.element_ty), mask=at < last)
        if GATHER:
            tl.debug_barrier()  # the chunk was stored by all threads, and other threads copy it
            for step in range(1, SIZE):
                put_signal(
                    gathered + start + first, own + first, last - first,
                    gathered_ready + rank * max_chunks + index, epoch, (rank + step) % SIZE, table,
                    TRANSPORT, BLOCK, ALIGN,
                )
    if GATHER:
        receive_parts(
            out, gathered, gathered_ready, starts, max_chunks, epoch, table, chunk,
            rank, SIZE, OPERATION, TRANSPORT, BLOCK, ALIGN,
        )
    end_epoch(state, epoch)


@triton.jit(do_not_specialize=["rank"])
def barrier_kernel(
    ready, max_chunks, state, table, rank,
    SIZE: tl.constexpr, OPERATION: tl.constexpr, TRANSPORT: tl.constexpr,
):
    epoch = begin_epoch(state)
    for step in range(1, SIZE):
        signal(ready + rank * max_chunks, epoch, (rank + step) % SIZE, table, TRANSPORT)
    for step in range(1, SIZE):
        source = (rank + step) % SIZE
        wait_signal(ready + source * max_chunks, epoch, table, source, 0, OPERATION, TRANSPORT)
    end_epoch(state, epoch)
# fmt: on


def all_gather(
    ctx: Context,
    x_shard_m: torch.Tensor,
    rows=None,
    out: torch.Tensor | None = None,
    max_programs: int = MAX_PROGRAMS,
) -> torch.Tensor:
    """Collective. Every rank's rows: x_shard_m [M/R, ...] -> [M, ...], any dtype of 1, 2, 4 or 8 bytes.

    rows: row counts by rank, where they differ. Raises ValueError if they don't fit, TypeError for a wider dtype.
    max_programs: fewer leave multiprocessors to what runs beside it.
    out: contiguous, filled and returned. x_shard_m may be this rank's rows of it: what is written there is what is.
    """
    _check_tensor("all_gather", ctx, x_shard_m)
    if x_shard_m.element_size() not in _BITS:
        raise TypeError(f"all_gather: moves elements of up to 8 bytes, not {x_shard_m.dtype}; pass a view of it")
    rows = check_rows("all_gather", ctx, rows, own=x_shard_m.shape[0])
    width = math.prod(x_shard_m.shape[1:])
    out = _output("all_gather", x_shard_m, (sum(rows), *x_shard_m.shape[1:]), out, sum(rows[: ctx.rank]) * width)
    if ctx.size == 1:
        return out.copy_(x_shard_m)
    # As integers: what moves is bits, and a bool's width in Triton is not that of its byte.
    bits = _BITS[x_shard_m.element_size()]
    plan = _Plan(
        ctx,
        [count * width for count in rows],
        x_shard_m.detach().contiguous().view(bits),
        out.detach().view(bits),
        max_programs,
    )
    workspace = plan.reserve(plan.total)
    ctx.launch(
        all_gather_kernel, plan.num_programs, plan.x, plan.out,
        workspace.inbox.view(plan.x.dtype), workspace.inbox_bytes // plan.itemsize, workspace.ready,
        workspace.num_chunks, workspace.state, ctx.table, ctx.rank, plan.starts, plan.chunk,
        SIZE=ctx.size, OPERATION=OP_ALL_GATHER, **plan.options,
    )  # fmt: skip
    return out


def reduce_scatter(
    ctx: Context, x: torch.Tensor, rows=None, out: torch.Tensor | None = None, max_programs: int = MAX_PROGRAMS
) -> torch.Tensor:
    """Collective. The sum over ranks of x [M, ...], of which each rank gets its rows [M/R, ...]; fp32, fp16, bf16.

    rows: row counts by rank, where M doesn't divide. Summed in fp32 in rank order, rounded once.
    out: contiguous, filled and returned. It may be this rank's rows of x, which nobody else is sent: each element is
    read and written by one program.
    """
    _check_tensor("reduce_scatter", ctx, x, floating=True)
    rows = check_rows("reduce_scatter", ctx, rows, total=x.shape[0])
    width = math.prod(x.shape[1:])
    out = _output("reduce_scatter", x, (rows[ctx.rank], *x.shape[1:]), out, -sum(rows[: ctx.rank]) * width)
    if ctx.size == 1:
        return out.copy_(x)
    _reduce(ctx, x, out, [count * width for count in rows], gather=False, max_programs=max_programs)
    return out


def all_reduce(ctx: Context, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Collective. The sum over ranks of x, in a new tensor; fp32, fp16, bf16. The same bits on every rank.

    out: contiguous, filled and returned. It may be x: the sums of a chunk come back from its owner only after the owner
    has received every rank's chunk, ours included, so what they overwrite has been sent; a rank's own part is sent to
    nobody, and each of its elements is read and written by one program.
    """
    _check_tensor("all_reduce", ctx, x, floating=True)
    out = _output("all_reduce", x, tuple(x.shape), out)
    if ctx.size == 1:
        return out.copy_(x)
    # Parts of whole 16-byte vectors, the last one shorter.
    vector = 16 // x.element_size()
    vectors = split_rows(-(-x.numel() // vector), ctx.size)
    starts = [min(sum(vectors[:rank]) * vector, x.numel()) for rank in range(ctx.size + 1)]
    _reduce(ctx, x, out, [last - first for first, last in zip(starts, starts[1:], strict=False)], gather=True)
    return out


def barrier(ctx: Context):
    """Collective, on the current stream: returns at once; later work on the stream starts after all ranks came here."""
    if ctx.size > 1:
        workspace = ctx.workspace().reserve(0, 1)
        ctx.launch(
            barrier_kernel, 1, workspace.ready, workspace.num_chunks, workspace.state, ctx.table, ctx.rank,
            SIZE=ctx.size, OPERATION=OP_BARRIER, TRANSPORT=ctx.transport_id, num_warps=1,
        )  # fmt: skip


def _reduce(
    ctx: Context, x: torch.Tensor, out: torch.Tensor, parts: list[int], gather: bool, max_programs: int = MAX_PROGRAMS
):
    plan = _Plan(ctx, parts, x, out, max_programs)
    part_stride = -(-max(parts) // BLOCK) * BLOCK
    workspace = plan.reserve(ctx.size * part_stride + (plan.total if gather else 0))
    ctx.launch(
        reduce_kernel, plan.num_programs, plan.x, out,
        workspace.inbox.view(x.dtype), workspace.inbox_bytes // plan.itemsize, part_stride, workspace.ready,
        workspace.num_chunks, workspace.state, ctx.table, ctx.rank, plan.starts, plan.chunk,
        SIZE=ctx.size, GATHER=gather,
        OPERATION=OP_ALL_REDUCE if gather else OP_REDUCE_SCATTER, **plan.options,
    )  # fmt: skip


class _Plan:
    """How one call's parts are cut into chunks and shared among programs."""

    def __init__(self, ctx: Context, parts: list[int], x: torch.Tensor, out: torch.Tensor, max_programs: int):
        self.ctx, self.x, self.out, self.itemsize = ctx, x.contiguous(), out, x.element_size()
        starts = [sum(parts[:rank]) for rank in range(ctx.size + 1)]
        self.total = starts[-1]
        self.starts = ctx.constant(("starts", *starts), lambda: starts)
        self.chunk = max(BLOCK, CHUNK_BYTES // self.itemsize)
        self.max_chunks = max(-(-part // self.chunk) for part in parts) or 1
        self.num_programs = min(ctx.num_programs, max_programs, self.max_chunks * (ctx.size - 1))
        aligned = all(start * self.itemsize % 16 == 0 for start in starts)
        aligned = aligned and self.x.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
        self.options = dict(
            TRANSPORT=ctx.transport_id,
            # 8-byte elements take twice the registers; element by element, each has an address and a mask as well.
            BLOCK=BLOCK // max(self.itemsize // 4, 1) // (1 if aligned else 4),
            ALIGN=16 if aligned else self.itemsize,
            num_warps=8,
            # Without a limit ptxas spills rather than cross one at which more programs share a multiprocessor.
            maxnreg=128,
        )

    def reserve(self, inbox_elements: int):
        return self.ctx.workspace().reserve(inbox_elements * self.itemsize, self.max_chunks)


def _check_tensor(name: str, ctx: Context, x: torch.Tensor, floating: bool = False):
    if x.device != ctx.device:
        raise ValueError(f"{name}: the tensor is on {x.device}, but this context works on {ctx.device}")
    if x.dim() == 0:
        raise ValueError(f"{name}: takes a tensor of at least one dimension, not a scalar")
    if floating and x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{name}: sums float32, float16 and bfloat16, not {x.dtype}")


def check_out(name: str, out: torch.Tensor, shape: tuple[int, ...], x: torch.Tensor):
    """Raises ValueError unless `out` is a contiguous tensor of that shape, and of x's dtype and device."""
    if (tuple(out.shape), out.dtype, out.device) != (shape, x.dtype, x.device):
        raise ValueError(
            f"{name}: out is {tuple(out.shape)}, {out.dtype}, on {out.device}; the result is {shape}, {x.dtype}, on "
            f"{x.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"{name}: out has strides {out.stride()}; pass a contiguous tensor")


def _output(name: str, x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None, place: int = 0):
    """A new contiguous tensor of x's dtype, or the caller's `out` if it fits.

    place: elements from out's start to x's at which they may share memory.
    """
    if out is None:
        return x.new_empty(shape)
    check_out(name, out, shape, x)
    size = x.element_size()
    apart = x.data_ptr() - out.data_ptr()
    overlap = x.numel() and out.numel() and -x.numel() * size < apart < out.numel() * size
    if overlap and x.is_contiguous() and apart != place * size:  # a strided x is copied before anything is written
        raise ValueError(
            f"{name}: out begins {-apart} bytes after x and overlaps it; in place it begins {-place * size} bytes "
            f"after, otherwise they share no memory"
        )
    return out
