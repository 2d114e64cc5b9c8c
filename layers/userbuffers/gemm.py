"""general_gemm: one product, alone, with communication inside, or beside a collective."""

import math

import torch
from torch.nn import functional

from tkernels.comm.collectives import check_rows, split_rows
from tkernels.layers.userbuffers.communicators import CommOverlapCore, CommOverlapType, product


@torch.no_grad()
def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params=None,
    gelu: bool = False,
    gelu_in: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: CommOverlapCore | None = None,
    ub_type: CommOverlapType | None = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    *,
    rows: tuple[int, ...] | None = None,
):
    """(out, bias_grad, gelu_input, extra_output). Collective with `ub`.

    layout      the product, A weight-like and B activation-like
    TN          B @ A.T
    NN          B @ A
    NT          B.T @ A

    out = alpha * product + beta * out, plus bias, then gelu (by tanh). beta is 1 with accumulate and 0 without.

    grad: the call is of a backward pass. Then `gelu` multiplies the result by gelu's derivative at gelu_in, and `bias`
        is not added but asks for bias_grad: the sum over B's rows, or with gelu over the result's.
    gelu_in: filled with what gelu was applied to; it is returned as gelu_input.
    ub_type AG: B is this rank's rows, or the global tensor of fill_userbuffers_buffer_for_all_gather, which is then
        filled with all rows. extra_output is filled with them, too. bias_grad is of all rows.
    ub_type RS: the result is this rank's rows of the sum over ranks, and extra_output is filled with it, too. Bias,
        alpha, beta, and gelu apply once, to the sum.
    bulk_overlap: the product is on this rank alone, and beside it the collective runs on ub's buffer, as
        copy_into_buffer or get_buffer left it: AG fills the whole buffer, RS this rank's chunk. extra_output is filled
        with the result of the collective, too.
    rows: every rank's number of rows, where they are not equal (AG) or not split as by split_rows (RS).

    The returned out is the result in every case; it is `out` where that was given, and for RS without one it is in
    extra_output's memory. Bias is added inside the product. alpha, beta, and gelu are not: torch applies them to a
    result that has been rounded to out_dtype, in as many passes over it. use_split_accumulator is about fp8 and changes
    nothing. Raises ValueError or TypeError before anything is launched.
    """
    _check(out_dtype, layout, quantization_params, beta, accumulate, out)
    if gelu and grad and gelu_in is None:
        raise ValueError("general_gemm: gelu=True with grad=True needs gelu_in, what gelu was applied to in forward")
    if ub is not None or ub_type is not None or bulk_overlap or extra_output is not None:
        _check_overlap(ub, ub_type, bulk_overlap)
    if rows is not None and (ub is None or bulk_overlap):
        raise ValueError(
            f"general_gemm: rows={rows} is about what travels inside a product; beside one it is the buffer, and alone "
            f"nothing; leave rows out"
        )
    if layout == "TN":
        x, w = B, A
    else:
        x, w = (B if layout == "NN" else B.t()), A.t()
    plain = alpha == 1.0 and not accumulate and not gelu
    added = bias if not grad else None
    fused = added if plain else None
    dtype = out_dtype or (B.dtype if out is None else out.dtype)
    into = out if plain and out is not None and out.dtype == dtype else None  # the product is the result

    gathered = filled = None
    if ub is None:
        value = product(x, w, dtype, into)
    elif bulk_overlap:
        value = _bulk(ub, ub_type, x, w, dtype, into, extra_output)
    elif ub_type is CommOverlapType.AG:
        wanted = extra_output is not None or (grad and bias is not None)
        value, gathered = _all_gather(ub, x, w, fused, rows, dtype, into, extra_output, wanted)
    else:
        rows = check_rows("general_gemm", ub.context, rows or split_rows(x.shape[0], ub.size), total=x.shape[0])
        filled = None if extra_output is None else _shaped(extra_output, (rows[ub.rank], w.shape[0]))
        if plain and out is None and filled is not None and filled.dtype == dtype:
            into = filled  # one tensor is both
        value = ub.matmul_reduce_scatter(x, w, fused, rows=rows, out=into, out_dtype=dtype)
    if plain and added is not None and (ub is None or bulk_overlap):
        value = value.add_(added)

    if not plain:
        value = _epilogue(value, alpha, beta, accumulate, out, added)
    gelu_input = None
    if gelu and grad:
        value = torch.ops.aten.gelu_backward(value, gelu_in, approximate="tanh")
    elif gelu:
        gelu_input = value if gelu_in is None else gelu_in.copy_(value)
        value = functional.gelu(value, approximate="tanh")
    if out is not None and value is not out:
        value = out.copy_(value)
    if filled is not None and filled is not value:
        filled.copy_(value)
    bias_grad = None
    if grad and bias is not None:
        bias_grad = (value if gelu else B if gathered is None else gathered).sum(0)
    return value, bias_grad, gelu_input, extra_output


def _all_gather(ub, x, w, bias, rows, dtype, out, extra_output, wanted: bool):
    whole = ub.holds(x)  # the global tensor: this rank's part is in its place, and the others come to theirs
    if whole:
        rows = check_rows("general_gemm", ub.context, rows or split_rows(x.shape[0], ub.size), total=x.shape[0])
    else:
        rows = rows or (x.shape[0],) * ub.size
    filled = None if extra_output is None else _shaped(extra_output, (sum(rows), x.shape[1]))
    target = x if whole else wanted if filled is None else filled
    mine = x.split(rows)[ub.rank] if whole else x
    value, gathered = ub.all_gather_matmul(mine, w, bias, rows=rows, gathered=target, out=out, out_dtype=dtype)
    if filled is not None and filled is not gathered:
        filled.copy_(gathered)
    return value, gathered


def _bulk(ub, ub_type, x, w, dtype, out, extra_output):
    total, width = ub._active
    rows = split_rows(total, ub.size)
    own, whole = ub.get_buffer(True, (rows[ub.rank], width)), ub.get_buffer(False, (total, width))
    if ub_type is CommOverlapType.AG:
        call, result = (ub.all_gather, own, rows, whole), whole
    else:
        call, result = (ub.reduce_scatter, whole, rows, own), own
    filled = None if extra_output is None else _shaped(extra_output, result.shape)
    with ub.beside(*call):
        value = ub.multiply(x, w, dtype, out)
    if filled is not None:
        filled.copy_(result)
    return value


def _shaped(extra_output: torch.Tensor, shape) -> torch.Tensor:
    if extra_output.numel() != math.prod(shape) or not extra_output.is_contiguous():
        raise ValueError(
            f"general_gemm: extra_output has shape {list(extra_output.shape)} and strides {extra_output.stride()}; it "
            f"must be contiguous and have as many elements as what fills it, {list(shape)}"
        )
    return extra_output.view(shape)


def _epilogue(value, alpha, beta, accumulate, out, bias):
    if alpha != 1.0:
        value = value * alpha
    if accumulate:
        value = torch.add(value, out, alpha=1.0 if beta is None else beta)
    return value if bias is None else value + bias


def _check(out_dtype, layout, quantization_params, beta, accumulate, out):
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(
            f"general_gemm: out_dtype is a {type(out_dtype).__name__} and must be a torch.dtype; older releases had a "
            f"workspace in the third position, which there is none of: leave it out"
        )
    if quantization_params is not None:
        raise ValueError("general_gemm: quantization_params quantizes the result, but there is no fp8; pass None")
    if layout not in ("TN", "NN", "NT"):
        raise ValueError(f"general_gemm: layout={layout!r} must be TN, NN or NT")
    if accumulate and out is None:
        raise ValueError("general_gemm: accumulate=True adds to `out`, but there is none; pass out=")
    if not accumulate and beta not in (None, 0.0):
        raise ValueError(f"general_gemm: beta={beta} scales what is accumulated to; pass accumulate=True as well")
    if out is not None and not out.is_contiguous():
        raise ValueError(f"general_gemm: out has strides {out.stride()}; it must be contiguous")


def _check_overlap(ub, ub_type, bulk):
    if ub is None or ub_type is None:
        raise ValueError(
            f"general_gemm: ub={ub} and ub_type={ub_type} must both be given, or neither of them, nor bulk_overlap and "
            f"extra_output"
        )
    if not isinstance(ub_type, CommOverlapType):
        raise TypeError(f"general_gemm: ub_type={ub_type!r} must be CommOverlapType.AG or CommOverlapType.RS")
    if ub.is_p2p_overlap() and (bulk or ub.comm_type != ub_type):
        raise ValueError(
            f"general_gemm: a CommOverlapP2P of type {ub.comm_type.name} overlaps only that, inside a product, not "
            f"ub_type={ub_type.name} with bulk_overlap={bulk}; make a CommOverlap for bulk overlap"
        )
    if not ub.is_p2p_overlap() and not bulk and ub_type is CommOverlapType.AG:
        raise ValueError(
            "general_gemm: a CommOverlap gathers beside a product only; pass bulk_overlap=True, or make a "
            "CommOverlapP2P of type AG"
        )
