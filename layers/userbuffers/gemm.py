"""general_gemm: one GEMM, alone, with communication inside, or beside a collective."""

import functools
import math
from dataclasses import replace

import torch
from torch.nn import functional

from tkernels.comm.arguments import check_dense, check_type, real
from tkernels.comm.collectives import check_rows, split_rows
from tkernels.configs import FP8
from tkernels.dispatch import PLAIN, count_writes, has_memory, refuse_transformed
from tkernels.gemm import check_apart, check_dtype
from tkernels.layers.tensor_parallel.dataflow import product
from tkernels.layers.tensor_parallel.float8 import Float8Tensor, memory, values
from tkernels.layers.userbuffers.communicators import CommOverlapCore, CommOverlapType, check_communicator
from tkernels.layers.userbuffers.defaults import boolean
from tkernels.layers.userbuffers.float8 import check_quantizer, float8_tensor

OPERANDS = {  # by layout: (x, w) of x @ w.T
    "TN": lambda A, B: (B, A),
    "NN": lambda A, B: (B, A.t()),
    "NT": lambda A, B: (B.t(), A.t()),
}


def _without_grad(function):
    """`function` under torch.no_grad(), which costs as much as a launch, only in calls with gradients enabled."""

    @functools.wraps(function)
    def call(*arguments, **options):
        refuse_transformed(function.__name__, *arguments, *options.values())
        if not torch.is_grad_enabled():
            return function(*arguments, **options)
        with torch.no_grad():
            return function(*arguments, **options)

    return call


@_without_grad
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

    layout      the GEMM, with A weight-like and B activation-like
    TN          B @ A.T
    NN          B @ A
    NT          B.T @ A

    out = alpha * GEMM + beta * out, plus bias, then gelu (tanh approximation). With accumulate, beta is 1 by default;
    without, it is 0.

    grad: the call belongs to a backward pass. `gelu` then multiplies the result by gelu's derivative at gelu_in. `bias`
        isn't added but requests bias_grad: the sum over B's rows, or with gelu over the result's rows.
    gelu_in: without grad, filled with the input of gelu and returned as gelu_input.
    ub_type AG: B holds this rank's rows, or is the global tensor of fill_userbuffers_buffer_for_all_gather, which is
        then filled with all rows. extra_output is filled with them, too. bias_grad covers all rows.
    ub_type RS: the result is this rank's rows of the sum over ranks, and extra_output is filled with it, too. Bias,
        alpha, beta, and gelu apply once, to the sum.
    bulk_overlap: the GEMM is local, and beside it the collective runs on ub's buffer, in the shape that
        copy_into_buffer or get_buffer last used: AG fills the whole buffer, RS this rank's chunk. extra_output is
        filled with the result of the collective, too. Refused with cublasmp semantics, which have no bulk overlap.
    rows: every rank's number of rows, if they aren't equal (AG) or not split as by split_rows (RS).

    The returned out is the result in every case: `out` if that was given, else for RS possibly in extra_output's
    memory. A kernel that communicates adds bias inside, unless alpha, accumulate or gelu apply too. In all other cases
    torch applies bias, alpha, beta, and gelu to a result already rounded to out_dtype, each in its own pass.

    FP8: A and B are both Float8Tensors, or TransformerEngine's, with K in multiples of 16. The result is of out_dtype,
    else of B's nominal dtype. Tensor cores take K contiguous, so layouts other than TN copy what they transpose, which
    must have one scale.
    use_split_accumulator: sums of FP8 are added in fp32 each 128 of K. False: they stay in tensor cores.
    quantization_params: a quantizer of the result, which is returned as a Float8Tensor. Refused with `out`, and with
        RS, whose partial sums don't travel in FP8.
    ub_type AG: ub must be one of FP8. Ranks' scales may differ. extra_output is of torch.uint8 or FP8: the bytes of all
        rows, which one scale belongs to only if the ranks' are equal; a Float8Tensor's scales are filled as well.

    Matrices may have more dimensions, all but the last of which count as rows; the result then has B's leading
    dimensions, unless the layout is NT. What is filled shares no memory with the other tensors, except that B may be
    this rank's rows of extra_output. Raises ValueError or TypeError before anything is launched.
    """
    A, B = float8_tensor("general_gemm: A", A), float8_tensor("general_gemm: B", B)
    if isinstance(B, Float8Tensor):
        fast_accum = not boolean("general_gemm: use_split_accumulator", use_split_accumulator)
        B = B if B.fast_accum == fast_accum else replace(B, fast_accum=fast_accum)
    _check(A, B, out, bias, gelu_in, extra_output, out_dtype, gelu, accumulate, layout, grad, bulk_overlap, ub)
    alpha, beta = real("general_gemm: alpha", alpha), None if beta is None else real("general_gemm: beta", beta)
    if A.dim() > 2 or B.dim() > 2:
        inner = () if layout == "NT" else B.shape[1:-1]
        if ub is not None and ub_type is CommOverlapType.RS and inner and not bulk_overlap:
            total = B.shape[:-1].numel()
            if rows is not None:
                rows = check_rows("general_gemm", ub.context, rows, total=total)
            counts = split_rows(total, ub.size) if rows is None else rows
            if any(count % inner.numel() for count in counts):
                raise ValueError(
                    f"general_gemm: the rows of B {tuple(B.shape)} go to the ranks as {tuple(counts)}, which are no "
                    f"multiples of {inner.numel()}, so the result would not have B's dimensions; pass B as a matrix"
                )
        tensors = {"out": out, "gelu_in": gelu_in, "extra_output": extra_output}
        into, before, extra = (_matrix(name, tensor) for name, tensor in tensors.items())
        value, bias_grad, gelu_input, _ = general_gemm(
            A.flatten(0, -2), B.flatten(0, -2), out_dtype, quantization_params, gelu, before, alpha, beta, accumulate,
            layout, into, bias, use_split_accumulator, grad, ub, ub_type, extra, bulk_overlap, rows=rows,
        )  # fmt: skip
        if gelu_input is not None:
            gelu_input = gelu_input.view(-1, *inner, gelu_input.shape[-1]) if gelu_in is None else gelu_in
        if isinstance(value, Float8Tensor):
            value = value.rows_of(value.data.view(-1, *inner, value.shape[-1]))
        else:
            value = value.view(-1, *inner, value.shape[-1]) if out is None else out
        return value, bias_grad, gelu_input, extra_output
    if quantization_params is not None:
        check_quantizer("general_gemm: quantization_params", quantization_params)
        if out is not None or (ub_type is CommOverlapType.RS and not bulk_overlap):
            what = "a result that `out` can't hold" if out is not None else "sums that can't travel in FP8"
            raise ValueError(
                f"general_gemm: quantization_params quantizes {what}; pass None, and quantize the returned tensor"
            )
    if not accumulate and beta not in (None, 0.0):
        raise ValueError(f"general_gemm: beta={beta} scales what is accumulated to; pass accumulate=True as well")
    if gelu_in is not None and not gelu:
        raise ValueError("general_gemm: gelu_in is given, but gelu=False applies none; pass gelu=True, or leave it out")
    if gelu and grad and gelu_in is None:
        raise ValueError("general_gemm: gelu=True with grad=True needs gelu_in, what gelu was applied to in forward")
    if ub is not None or ub_type is not None or bulk_overlap or extra_output is not None:
        _check_overlap(ub, ub_type, bulk_overlap)
    communicates = ub is not None and not bulk_overlap  # inside the GEMM
    if rows is not None and not communicates:
        raise ValueError(
            f"general_gemm: rows={rows} concerns communication inside a GEMM, and there is none here; leave rows out"
        )
    x, w = OPERANDS[layout](A, B)
    if x.shape[1] != w.shape[1]:
        raise ValueError(
            f"general_gemm: A is {list(A.shape)} and B {list(B.shape)}; with layout={layout} {w.shape[1]} of A meet "
            f"{x.shape[1]} of B, and these must match"
        )
    dtype = out_dtype or (B.dtype if out is None else out.dtype)
    if dtype not in (x.dtype, torch.float32):
        check_dtype("general_gemm", "the dtype of out" if out_dtype is None else "out_dtype", dtype, memory(x).dtype)
    if communicates and rows is not None:
        whole = ub_type is CommOverlapType.RS or ub.holds(memory(x))
        rows = check_rows("general_gemm", ub.context, rows, **{"total" if whole else "own": x.shape[0]})
    plain = alpha == 1.0 and not accumulate and not gelu
    added, asked = bias is not None and not grad, bias is not None and grad
    if added and (bias.shape != w.shape[:1] or not _holds_values(bias)):
        raise ValueError(
            f"general_gemm: bias is {bias.dtype} {list(bias.shape)}, but must be [{w.shape[0]}], as the result has so "
            f"many features, of float32, float16 or bfloat16"
        )
    if out is not None or gelu_in is not None or extra_output is not None:
        shape = _num_rows(ub, x, ub_type, rows) if communicates else x.shape[0], w.shape[0]
        _check_shape("out", out, shape)  # torch would resize it, and overwrite what lies behind it
        _check_shape("gelu_in", gelu_in, shape)
        _check_apart(memory(A), memory(B), bias, out, extra_output, None if grad else gelu_in, communicates and ub_type)
    fused = bias if plain and added and communicates else None
    into = out if plain and out is not None and out.dtype == dtype else None  # the GEMM writes its result to it
    gathered, filled = B, None  # B on all ranks; what is yet to be filled with the final result
    if ub is None:
        value = product(x, w, dtype, into)
    elif bulk_overlap:
        value = _bulk(ub, x, w, into, extra_output, ub_type, dtype)
    elif ub_type is CommOverlapType.AG:
        value, gathered = _gather(ub, x, w, fused, into, extra_output, rows, dtype, asked)
        if asked and layout == "NT":
            gathered = values(gathered).t()  # columns of B
    else:
        value, filled = _scatter(ub, x, w, fused, into, extra_output, rows, dtype, plain and out is None)
    if alpha != 1.0:
        value = value * alpha
    if accumulate and beta != 0:  # as in BLAS: with beta 0, `out` isn't read
        value = torch.add(value, out, alpha=1.0 if beta is None else beta)
    if added and fused is None:
        value = value.add_(bias)
    gelu_input = None
    if gelu and grad:
        value = torch.ops.aten.gelu_backward(value, gelu_in, approximate="tanh").to(dtype)
    elif gelu:
        gelu_input = value if gelu_in is None else gelu_in.copy_(value)
        value = functional.gelu(value, approximate="tanh")
    if out is not None and value is not out:
        value = out.copy_(value)
    if filled is not None and filled is not value:
        filled.copy_(value)
    count_writes(out, extra_output)
    bias_grad = values(value if gelu else gathered).sum(0) if asked else None
    return value if quantization_params is None else quantization_params(value), bias_grad, gelu_input, extra_output


def _gather(ub, x, w, bias, out, extra_output, rows, dtype, wanted: bool):
    """The GEMM that gathers, and the gathered rows: at least if they are wanted, or extra_output is to hold them."""
    mine, target, total = x, None, _num_rows(ub, x, CommOverlapType.AG, rows)
    if ub.holds(memory(x)):  # the global tensor: this rank's part is in place, and the gather fills in the others
        rows = split_rows(total, ub.size) if rows is None else rows
        if isinstance(x, Float8Tensor) and x.scale.numel() == 1:  # those of ranks may differ
            x = replace(x, scale=x.scale.reshape(1, 1).expand(x.shape[0], 1).contiguous())
        mine, target = x.split(rows)[ub.rank], x
    filled = None if extra_output is None else _shaped(extra_output, (total, x.shape[1]))
    if filled is not None and isinstance(x, Float8Tensor):  # the caller has no place for scales
        filled = replace(x.new_empty(total, 0), data=_bytes(filled).view(x.data.dtype))
    target = filled if target is None else target
    value, gathered = ub.all_gather_matmul(
        mine, w, bias, rows=rows, gathered=wanted if target is None else target, out=out, out_dtype=dtype
    )
    if filled is not None and filled is not gathered:
        memory(filled).copy_(memory(gathered))
    return value, gathered


def _scatter(ub, x, w, bias, out, extra_output, rows, dtype, free: bool):
    """The GEMM that reduces and scatters, and extra_output in its shape. free: extra_output may be the result's."""
    filled = None
    if extra_output is not None:
        if not _holds_values(extra_output):
            raise TypeError(
                f"general_gemm: extra_output is {extra_output.dtype}, which can't hold the result; pass floats"
            )
        filled = _shaped(extra_output, (_num_rows(ub, x, CommOverlapType.RS, rows), w.shape[0]))
        out = filled if free and filled.dtype == dtype else out
    return ub.matmul_reduce_scatter(x, w, bias, rows=rows, out=out, out_dtype=dtype), filled


def _bulk(ub, x, w, out, extra_output, ub_type, dtype):
    """The local GEMM, with a collective on ub's buffer beside it, whose result goes to extra_output as well."""
    rows, own, whole = ub.parts()
    check_apart("general_gemm", out, **{"the buffer of ub": whole})
    collective, source, result = (ub.all_gather, own, whole)
    if ub_type is CommOverlapType.RS:
        collective, source, result = (ub.reduce_scatter, whole, own)
    extra = None if extra_output is None else _shaped(extra_output, result.shape)
    extra = _bytes(extra) if ub.is_fp8_ubuf() and extra is not None else extra
    with ub.beside(collective, source, rows, result):
        value = ub.multiply(x, w, dtype, out)
    if extra is not None:
        extra.copy_(result)
    return value


def _shaped(extra_output: torch.Tensor, shape) -> torch.Tensor:
    if extra_output.shape == shape and extra_output.is_contiguous():
        return extra_output
    if extra_output.numel() != math.prod(shape) or not extra_output.is_contiguous():
        raise ValueError(
            f"general_gemm: extra_output has shape {list(extra_output.shape)} and strides {extra_output.stride()}; it "
            f"must be contiguous and have as many elements as what fills it, {list(shape)}"
        )
    return extra_output.view(shape)


def _bytes(extra_output: torch.Tensor) -> torch.Tensor:
    if extra_output.element_size() != 1:
        raise TypeError(
            f"general_gemm: extra_output is {extra_output.dtype}, but what fills it is FP8; pass one of torch.uint8"
        )
    return extra_output.view(torch.uint8)


def _num_rows(ub, x, ub_type, rows) -> int:
    """The rows of the result of a product of x with communication inside."""
    if ub_type is CommOverlapType.RS:
        return (split_rows(x.shape[0], ub.size) if rows is None else rows)[ub.rank]
    if ub.holds(memory(x)):
        return x.shape[0]
    return x.shape[0] * ub.size if rows is None else sum(rows)


def _matrix(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same memory with all dimensions but the last as rows. Raises ValueError where they don't lie like rows."""
    try:
        return None if tensor is None else tensor.view(-1, tensor.shape[-1])
    except (IndexError, RuntimeError):
        raise ValueError(
            f"general_gemm: {name} has shape {list(tensor.shape)} and strides {tensor.stride()}; it must be [..., "
            f"features], and contiguous"
        ) from None


def _holds_values(tensor: torch.Tensor) -> bool:
    """Whether it is of floats; those of FP8 would need a scale."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _check_shape(name: str, tensor: torch.Tensor | None, shape):
    if tensor is not None and tensor.shape != shape:
        raise ValueError(
            f"general_gemm: {name} has shape {list(tensor.shape)}, but the result {list(shape)}; pass one of that shape"
        )


def _check_apart(A, B, bias, out, extra_output, filled, inside):
    """Raise ValueError if what is filled shares memory with what is read, or also filled.

    filled: gelu_in, if it is. inside: the collective inside of the product, if there is one.
    """
    tensors = A, B, bias, out, extra_output, filled
    if torch.compiler.is_compiling() or not PLAIN.issuperset(map(type, tensors)):
        return  # what is traced has no addresses
    places = [each.untyped_storage().data_ptr() for each in tensors if each is not None]
    if len(set(places)) == len(places):
        return
    check_apart("general_gemm", out, A=A, B=B, bias=bias, extra_output=extra_output, gelu_in=filled)
    check_apart("general_gemm", filled, "gelu_in", A=A, B=B, bias=bias, extra_output=extra_output)
    within = inside is CommOverlapType.AG  # whose kernel looks whether B is this rank's rows of extra_output
    check_apart("general_gemm", extra_output, "extra_output", A=A, B=None if within else B, bias=bias)


def _check(A, B, out, bias, gelu_in, extra_output, out_dtype, gelu, accumulate, layout, grad, bulk_overlap, ub):
    for name, tensor in (
        ("B", B), ("A", A), ("out", out), ("bias", bias), ("gelu_in", gelu_in), ("extra_output", extra_output),
    ):  # fmt: skip
        if tensor is None and name not in "AB":
            continue
        held = memory(tensor) if name in "AB" else tensor
        if not isinstance(held, torch.Tensor) or held.layout is not torch.strided or held.is_nested:
            check_dense("general_gemm", **{name: held})
        if tensor.device != B.device:
            raise ValueError(f"general_gemm: {name} is on {tensor.device}, but B on {B.device}")
        if ub is not None and type(held) not in PLAIN and not has_memory(held):
            raise TypeError(
                f"general_gemm: {name} is a {type(held).__name__}, which stands for other tensors and is no memory for "
                f"`ub`; pass a plain tensor"
            )
        if name in ("out", "gelu_in") and not _holds_values(held):
            raise TypeError(f"general_gemm: {name} is {held.dtype}, which can't hold the result; pass one of floats")
    quantized = isinstance(B, Float8Tensor)
    alike = quantized == isinstance(A, Float8Tensor) and (quantized or A.dtype == B.dtype and A.dtype not in FP8)
    if A.dim() < 2 or B.dim() < 2 or not alike:
        raise ValueError(
            f"general_gemm: A is {A.data.dtype} {list(A.shape)} and B {B.data.dtype} {list(B.shape)}; they must be "
            f"matrices, or have more dimensions, and be of one dtype, or both Float8Tensors"
        )
    if ub is not None:
        check_communicator("general_gemm: ub", ub)
    flags = {"gelu": gelu, "accumulate": accumulate, "grad": grad, "bulk_overlap": bulk_overlap}
    for name, value in flags.items():
        if value is not False and value is not True and value is not None:
            boolean(f"general_gemm: {name}", value)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(
            f"general_gemm: out_dtype is a {type(out_dtype).__name__} and must be a torch.dtype; older releases had a "
            f"workspace in the third position, which there is none of: leave it out"
        )
    if not isinstance(layout, str) or layout not in OPERANDS:
        raise ValueError(f"general_gemm: layout={layout!r} must be TN, NN or NT")
    if accumulate and out is None:
        raise ValueError("general_gemm: accumulate=True adds to `out`, but there is none; pass out=")
    if out is not None and not out.is_contiguous():
        raise ValueError(f"general_gemm: out has strides {out.stride()}; it must be contiguous")
    if gelu_in is not None and not grad and 0 in gelu_in.squeeze().stride():
        raise ValueError(
            f"general_gemm: gelu_in, which is filled, has elements that share memory, with strides {gelu_in.stride()}; "
            f"pass a contiguous one"
        )


def _check_overlap(ub, ub_type, bulk):
    if ub is None or ub_type is None:
        raise ValueError(
            f"general_gemm: ub={ub} and ub_type={ub_type} must both be given, or neither of them, nor bulk_overlap and "
            f"extra_output"
        )
    check_type("general_gemm: ub_type", ub_type, CommOverlapType, "CommOverlapType.AG or CommOverlapType.RS")
    if bulk and ub.with_cublasmp():
        raise ValueError(
            f"general_gemm: bulk_overlap=True, but {ub!r} has cublasmp semantics, which have no bulk overlap; pass "
            f"bulk_overlap=False and a communicator that overlaps inside the GEMM, or make one without use_cublasmp"
        )
    if bulk and ub.is_fp8_ubuf() and ub_type is CommOverlapType.RS:
        raise ValueError(
            f"general_gemm: {ub!r} only gathers, as sums beside a GEMM don't travel in FP8; pass one of another dtype"
        )
    if ub.is_p2p_overlap() and (bulk or ub.comm_type != ub_type):
        raise ValueError(
            f"general_gemm: a CommOverlapP2P of type {ub.comm_type.name} overlaps only that, inside a GEMM, not "
            f"ub_type={ub_type.name} with bulk_overlap={bulk}; make a CommOverlap for bulk overlap"
        )
    if not ub.is_p2p_overlap() and not bulk and ub_type is CommOverlapType.AG:
        raise ValueError(
            "general_gemm: a CommOverlap gathers beside a GEMM only; pass bulk_overlap=True, or make a "
            "CommOverlapP2P of type AG"
        )
