"""The plain path: `matmul` and a collective, one after the other, or in turns.

Torch multiplies IEEE fp32 so much faster than our kernels that overlap in one kernel could not make up for it. As TF32
it might, but has not been timed between GPUs. Where much of fp32 travels, the copy engine sends, which takes one SM,
and `matmul` computes meanwhile (model.takes_turns): of a gather, this rank's own rows, and then those of its peers
where they have landed; of a reduction, the peers' rows, and while these partial sums travel, its own. Between 2 H200s
an all_gather_matmul of 16384x3584x8192 in tf32 takes 1362 us so instead of 2043, a matmul_reduce_scatter of
2048x8192x4096 280 instead of 331 (bench/LOG.md, 2026-11-29, with torch's products).
"""

from collections.abc import Callable

import torch

from tkernels.comm import collectives
from tkernels.comm.collectives import can_land, starts_of
from tkernels.comm.context import Context
from tkernels.comm.lanes import Lanes
from tkernels.comm.regions import Regions
from tkernels.gemm import Matmul, Scales, check_result, plan_finish
from tkernels.model import takes_turns

OWN_ROWS_BYTES = 16 << 20  # of partial sums
KEPT_BYTES = 16 << 20  # of what a call makes on the way, which the workspace keeps for later ones; more is given back
WAITING = 1  # SMs of the kernel that waits for copies, while products are made beside it


def plan_all_gather_matmul(ctx: Context, x, w, bias, out, gathered, call, scales=None):
    """Plan `call`, an all_gather_matmul, as all_gather, of FP8 with the scales, and `matmul`, for tensors like these.

    Returns a function of the same tensors: (y, the gathered x or None), and of FP8 its scales [M, 1] or None.
    """
    (rows, returned), (M, K) = (call.rows, call.return_gathered), (sum(call.rows), x.shape[1])
    if _takes_turns(ctx, call, x, K, landing_rows=M):
        return _plan_gather_in_turns(ctx, x, w, bias, out, gathered, call)
    intermediates = _intermediates(ctx, ((0,) if returned else (M, K), x.dtype), ((M,), torch.float32))
    whole, whole_scales = intermediates()
    into = whole if not returned else whole_scales.new_empty((M, K), dtype=x.dtype) if gathered is None else gathered
    gather = collectives.AllGather(rows, collectives.ALONE_PROGRAMS)
    product = Matmul(call.activation, call.out_dtype, None, call.precision)
    if scales is None:
        gather_rows, multiply = gather.prepare(ctx, x, into), product.prepare(into, w, bias, out)
    else:  # the collective takes FP8 as bytes
        own_scales, as_bytes = whole_scales.new_empty(rows[ctx.rank]), (x.view(torch.uint8), into.view(torch.uint8))
        gather_rows, gather_scales = ctx.workspace().settled(
            lambda: (gather.prepare(ctx, *as_bytes), gather.prepare(ctx, own_scales, whole_scales))
        )
        multiply = product.prepare(into, w, bias, out, Scales(whole_scales, scales.w))

    def run(x, w, bias, out, gathered, scales=None):
        into, whole_scales = intermediates()
        if returned:
            into = x.new_empty((M, K)) if gathered is None else gathered
        if scales is None:
            gather_rows(x, into)
            return multiply(into, w, bias, out), into if returned else None
        all_scales = scales.x.new_empty((M,)) if returned else whole_scales
        gather_rows(x.view(torch.uint8), into.view(torch.uint8))
        gather_scales(scales.by_row(x.shape[0]).x, all_scales)
        y = multiply(into, w, bias, out, Scales(all_scales, scales.w))
        return (y, into, all_scales.view(-1, 1)) if returned else (y, None, None)

    return run


def plan_matmul_reduce(ctx: Context, x, w, bias, out, call, scales=None):
    """Plan `call`, matmul_reduce_scatter or matmul_all_reduce, as `matmul` and the collective, for tensors like these.

    What comes after a sum is done in fp32, which is twice the bytes of 16 bits on an all-reduce's way back, and to all
    rows on every rank. From OWN_ROWS_BYTES on each does it to its own, between a reduce-scatter and an all-gather.

    Returns a function (x, w, bias, out) -> y, or of FP8 (x, w, bias, out, scales) -> y.
    """
    (M, _), N, out_dtype = x.shape, w.shape[0], call.out_dtype
    if _takes_turns(ctx, call, x, N, landing_rows=ctx.size * max(call.rows)):
        return _plan_reduction_in_turns(ctx, x, w, bias, out, call)
    shape = call.result_shape(ctx, x, w)
    y = check_result(call.operation, out, x, shape, out_dtype)
    separate = bias is not None or call.activation is not None
    alone, total = collectives.ALONE_PROGRAMS, ((M, N), call.wire_dtype)
    multiply = Matmul(None, call.wire_dtype, None, call.precision)
    if separate and call.gather and M * N * call.wire_dtype.itemsize >= OWN_ROWS_BYTES:
        own_shape = call.rows[ctx.rank], N
        intermediates = _intermediates(ctx, total, (own_shape, torch.float32), (own_shape, out_dtype))
        partial, sums, own = intermediates()
        scatter = collectives.ReduceScatter(call.rows, alone, out_dtype=torch.float32)
        gather = collectives.AllGather(call.rows, alone)
        reduce, gather = ctx.workspace().settled(
            lambda: (scatter.prepare(ctx, partial, sums), gather.prepare(ctx, own, out))
        )
        finish, multiply = plan_finish(sums, bias, call.activation, own), multiply.prepare(x, w, None, partial, scales)

        def run_in_parts(x, w, bias, out, scales=None):
            partial, sums, own = intermediates()
            multiply(x, w, None, partial, scales)
            reduce(partial, sums)
            finish(sums, bias, own)
            return gather(own, out)

        return run_in_parts

    intermediates = _intermediates(ctx, total, (shape if separate else (0,), torch.float32))
    partial, sums = intermediates()
    finish = plan_finish(sums, bias, call.activation, y) if separate else None
    into, dtype = (sums, torch.float32) if separate else (out, out_dtype)
    kind, rows = (collectives.AllReduce, None) if call.gather else (collectives.ReduceScatter, call.rows)
    reduce = kind(rows, alone, out_dtype=dtype).prepare(ctx, partial, into)
    multiply = multiply.prepare(x, w, None, partial, scales)

    def run(x, w, bias, out, scales=None):
        partial, sums = intermediates()
        multiply(x, w, None, partial, scales)
        if not separate:
            return reduce(partial, out)
        reduce(partial, sums)
        y = x.new_empty(shape, dtype=out_dtype) if out is None else out
        finish(sums, bias, y)
        return y

    return run


def _takes_turns(ctx: Context, call, x, width: int, landing_rows: int) -> bool:
    """Whether products and transfers take turns. The same on all ranks.

    width: columns of what is sent. landing_rows: as many as there must be room for where they land.
    """
    rule = takes_turns(call.operation, call.rows, width, x.dtype)
    return rule and can_land(ctx, landing_rows * width * x.element_size())


def _around(own: slice, M: int) -> list[slice]:
    """The peers' rows."""
    return [part for part in (slice(0, own.start), slice(own.stop, M)) if part.start < part.stop]


def _plan_gather_in_turns(ctx: Context, x, w, bias, out, gathered, call):
    (M, K), shape, returned = (sum(call.rows), x.shape[1]), call.result_shape(ctx, x, w), call.return_gathered
    check_result(call.operation, out, x, shape, x.dtype)
    first = starts_of(call.rows)[ctx.rank]
    own, x = slice(first, first + x.shape[0]), x.contiguous()
    check_apart = collectives.plan_check_out("all_gather", x, gathered, (M, K), x.dtype, first * K)
    y = x.new_empty(shape) if out is None else out
    gather, landed = collectives.AllGather(call.rows).prepare_landing(ctx, x)
    product = Matmul(call.activation, None, None, call.precision, spared=WAITING)
    multiply_own = product.prepare(x, w, bias, y[own])
    others = [(part, product.prepare(landed[part], w, bias, y[part])) for part in _around(own, M)]
    lanes = Lanes(ctx)

    def run(x, w, bias, out, gathered):
        x, y, into = x.contiguous(), x.new_empty(shape) if out is None else out, None
        if gathered is not None:
            check_apart(x, gathered)
        if returned:
            into = x.new_empty((M, K)) if gathered is None else gathered
        with lanes.open() as (here, beside, ahead):
            began = here.mark()
            with ahead.behind(began):
                gather(x)
                arrived = ahead.mark()
                for part, _ in others if returned else ():
                    into[part].copy_(landed[part])
            with beside.behind(began):
                multiply_own(x, w, bias, y[own])
                if returned:
                    into[own].copy_(x)
            with here.behind(arrived):
                for part, multiply in others:
                    multiply(landed[part], w, bias, y[part])
        return y, into

    return run


def _plan_reduction_in_turns(ctx: Context, x, w, bias, out, call):
    """The sums are made in the result, in fp32 and in rank order, as the collective's."""
    (M, _), N, shape, rank = x.shape, w.shape[0], call.result_shape(ctx, x, w), ctx.rank
    check_result(call.operation, out, x, shape, x.dtype)
    first = starts_of(call.rows)[rank]
    own = slice(first, first + call.rows[rank])
    mine = own if call.gather else slice(0, call.rows[rank])  # of the result
    y = x.new_empty(shape) if out is None else out
    intermediates = _intermediates(ctx, ((M, N), torch.float32))
    (partial,) = intermediates()
    scattering = collectives.ReduceScatter(call.rows)
    # Where the partial sums land there is room for the sums as well.
    gathering = collectives.AllGather(call.rows, collectives.ALONE_PROGRAMS, collectives.BY_COPIES)
    (scatter, landed), gather = ctx.workspace().settled(
        lambda: (
            scattering.prepare_landing(ctx, partial), gathering.prepare(ctx, y[mine], y) if call.gather else None
        )
    )  # fmt: skip
    product = Matmul(None, None, None, call.precision, spared=WAITING)
    multiply_own = product.prepare(x[own], w, None, partial[own])
    others = [(part, product.prepare(x[part], w, None, partial[part])) for part in _around(own, M)]
    finishes = bias is not None or call.activation is not None
    finish = plan_finish(y[mine], bias, call.activation, y[mine]) if finishes else None
    lanes = Lanes(ctx)

    def run(x, w, bias, out):
        (partial,), y = intermediates(), x.new_empty(shape) if out is None else out
        with lanes.open() as (here, beside, ahead):
            began = here.mark()
            for part, multiply in others:
                multiply(x[part], w, None, partial[part])
            with ahead.behind(here.mark()):
                scatter(partial)
            with beside.behind(began):
                multiply_own(x[own], w, None, partial[own])
        total, parts = y[mine], [*landed[:rank], partial[own], *landed[rank + 1 :]]
        torch.add(*parts[:2], out=total)
        for part in parts[2:]:
            total.add_(part)
        if finish is not None:
            finish(total, bias, total)
        return y if gather is None else gather(total, y)

    return run


def _intermediates(ctx: Context, *wanted: tuple[tuple[int, ...], torch.dtype]) -> Callable[[], list[torch.Tensor]]:
    """What returns a call's tensors of these shapes and dtypes: of the workspace, or new ones where they are large.

    To allocate one takes the host some us of the 70 that a small call takes (bench/LOG.md, 2026-12-01).
    """
    plan = Regions(**{str(number): each for number, each in enumerate(wanted)})
    if plan.num_bytes > KEPT_BYTES:
        return lambda: [torch.empty(shape, dtype=dtype, device=ctx.device) for shape, dtype in wanted]
    memory = ctx.workspace().reserve(scratch_bytes=plan.num_bytes).scratch
    kept = [plan.view(memory, str(number)) for number in range(len(wanted))]
    return lambda: kept
