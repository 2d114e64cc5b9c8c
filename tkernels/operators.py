"""The public functions of the operations. They check options, and call the torch operators where those have words."""

import numbers

import torch

from tkernels.activations import activation_reference, check_activation
from tkernels.all_gather_matmul import AllGatherMatmul
from tkernels.comm import collectives
from tkernels.comm.arguments import check_dense, check_tensors, check_type
from tkernels.comm.context import Context, as_context
from tkernels.configs import FP8, GemmConfig, OverlapConfig
from tkernels.dispatch import PLAIN, transformed, under_no_grad, untraced, wants_gradient
from tkernels.gemm import Scales, check_apart, multiply, precision
from tkernels.leading import ROWS_FIRST, Leading
from tkernels.matmul_all_reduce import MatmulAllReduce
from tkernels.matmul_reduce_scatter import MatmulReduceScatter
from tkernels.torch_operators import all_gather_matmuls, ops

SEVERAL = frozenset({list, tuple})  # what weights of one gather come in
# The tensors of a product, by name.
MATMUL_TENSORS = "x", "w", "bias", "x_scale", "w_scale", "out"
GATHER_TENSORS = "x_shard_m", "w_shard_n", "bias", "x_scale", "w_scale", "out", "return_gathered"
REDUCTION_TENSORS = "x_shard_k", "w_shard_k", "bias", "x_scale", "w_scale", "out"


def _into(name: str, out: torch.Tensor, x: torch.Tensor, *arguments) -> torch.Tensor:
    if not PLAIN.issuperset((type(x), type(out))):
        check_tensors(name, x=x, out=out)
    if wants_gradient(x, out):
        raise ValueError(f"{name}: out= has no gradient; {_left_out('it')}")
    getattr(ops, f"{name}_out")(x, *arguments, out=out)
    return out


def _split_activation(
    caller: str, activation: str | None, *operands: torch.Tensor | None
) -> tuple[str | None, str | None]:
    """(fused, separate): the activation is fused unless backward will need its input."""
    check_activation(caller, activation)
    if activation is None:
        return None, None
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]  # the operator refuses what is none
    return (None, activation) if wants_gradient(*tensors) else (activation, None)


def _check_without_gradient(name: str, labels: tuple[str, ...], *tensors: torch.Tensor | None):
    """Check a call of float8 operands, or one with options that torch's operators have no words for.

    Neither has a gradient. labels: the names of the tensors; only x and w can't be None.
    """
    x, w, _, x_scale, w_scale, *_ = tensors
    fp8 = _is_scaled(x, x_scale, w_scale)
    complete = x is not None and w is not None and not (fp8 and (x_scale is None or w_scale is None))
    if complete and PLAIN.issuperset(map(type, tensors)) and not wants_gradient(*tensors):
        return
    given = enumerate(zip(labels, tensors, strict=True))
    check_tensors(name, **{label: each for at, (label, each) in given if at < 2 or each is not None})
    if not wants_gradient(*tensors):
        return
    if fp8:
        raise ValueError(
            f"{name}: products of float8 operands have no gradient; "
            f"{under_no_grad('call in the forward of an autograd.Function that defines one')}"
        )
    raise ValueError(
        f"{name}: out=, config=, and return_gathered= of a tensor or 'borrowed' have no gradient; {_left_out('them')}"
    )


def _left_out(which: str) -> str:
    """For errors: the way out. No kernel takes the memory of what torch.func has wrapped, with or without gradients."""
    return f"leave {which} out" + ("" if transformed() else ", or call under torch.no_grad()")


def _is_scaled(x, x_scale, w_scale) -> bool:
    """Whether a call is of float8 operands, or has scales."""
    return x_scale is not None or w_scale is not None or getattr(x, "dtype", None) in FP8


def matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = True,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """activation(x @ w.T + bias) on this rank alone, not collective: x [..., K], w [N, K], bias [N] -> [..., N].

    fp32, fp16, bf16; accumulated in fp32. w may be the view `w.t()` of a [K, N] matrix. activation: as in
    all_gather_matmul; out and out_dtype too. config: the tiles of our kernel. None: whichever is faster by the model
    multiplies, our kernel or torch; `tkernels.explain("matmul", M, N, K)` says which. A call with out or config has no
    gradient. Raises ValueError or TypeError.
    Torch rounds to the result's dtype before an activation as well. Beside its result a call takes memory for copies
    of x or w where its rows are no multiples of 16 bytes, or as TF32 K is not contiguous, if it stages them; or where
    no stride is 1 or one is 0; and for nothing else. `keep_staged` keeps the copies of weights for the next calls.

    FP8: x and w of torch.float8_e4m3fn, or one of them of float8_e5m2, with K contiguous in both and a multiple of 16.
    x_scale, w_scale: fp32, for activation((x @ w.T) * x_scale * w_scale + bias). x_scale is one number, or one a row,
        [..., 1] or [...]; w_scale one, or one an out-feature, [N], [N, 1] or [1, N]. The host never reads them.
    out_dtype: then bf16 by default, or fp16 or fp32; bias may be of any of the three.
    fast_accum: sums stay in tensor cores, which keep 13 bits of mantissa. On average results come out too small by up
        to 0.16 % at K = 2048, 0.64 % at 8192, 2 % at 28672. False: each 128 of K are added up in fp32, at about two
        thirds of the speed.
    Such a call has no gradient.
    """
    if isinstance(x, torch.Tensor) and x.dim() != 2:
        lead = Leading.of("matmul", x)
        options = {"out_dtype": out_dtype, "config": config, "fast_accum": fast_accum}
        options |= {"x_scale": lead.scale(x_scale), "w_scale": w_scale, "out": lead.memory("out", out)}
        y = matmul(lead.matrix(x), w, bias, activation, **options)
        return lead.back(y) if out is None else out
    operators = out is config is None
    if not operators or _is_scaled(x, x_scale, w_scale):
        _check_without_gradient("matmul", MATMUL_TENSORS, x, w, bias, x_scale, w_scale, out)
    if operators:
        fused, separate = _split_activation("matmul", activation, x, w, bias)
        return activation_reference(ops.matmul(x, w, bias, x_scale, w_scale, fused, out_dtype, fast_accum), separate)

    def call():
        options = activation, out_dtype, config, precision(x.dtype, fast_accum)
        check_apart("matmul", out, x=x, w=w, bias=bias, x_scale=x_scale, w_scale=w_scale)
        return multiply(options, (x, w, bias, out, *Scales.given(x_scale, w_scale)))

    return untraced("matmul", call, (x, w, bias, x_scale, w_scale, out), (out,))


def quantize(
    x: torch.Tensor,
    scale: str = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    power_of_two: bool = False,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K], fp32, fp16 or bf16 -> (q [..., K] in FP8, scale in fp32), where x is about q * scale. Not collective.

    scale: "row", one for each row, [..., 1], or "tensor", one for all, []. It is dequantizing, as `x_scale` and
        `w_scale` of the products are and torch's scaled ones: the largest magnitude, divided by the format's largest
        number, 448 or 57344. Of zeros it is 2**-126, and they stay zeros.
    dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    power_of_two: round scales up to powers of two, as torchao's row-wise recipes do. The division then rounds nothing.
    activation, gate: quantize activation(x), or activation(gate) * x with a gate [..., K] like x; no memory holds it.
        silu(gate) * up is x=up, activation="silu", gate=gate. Of rows of up to 32768 elements, with a gate 16384, all
        is one pass. The names are those of all_gather_matmul. What the activation gives, and the product, are rounded
        to the dtype of x, as torch's own are; in fp32 the two differ by a few steps of rounding, but for "relu".

    What isn't finite counts for no scale: NaN stays NaN, and infinity becomes NaN in both formats, of which e4m3 has
    none. No element overflows. Elements are rounded to nearest even.
    Rows are read where they lie; a tensor whose last dimension is not contiguous is copied first, and for "tensor" any
    that is not contiguous. q is contiguous. On GPUs without FP8 (before compute capability 8.9) torch computes the
    same, slowly, and the log says so. A call that would need a gradient is refused: there is none. Raises ValueError or
    TypeError.
    """
    check_tensors("quantize", x=x, **({} if gate is None else {"gate": gate}))
    if wants_gradient(x, gate):
        raise ValueError(f"quantize: has no gradient; {under_no_grad('pass x.detach()')}")
    return ops.quantize(x, gate, scale, dtype, power_of_two, *(() if activation is None else (activation,)))


def dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """q * scale in one pass, rounded once: what `quantize` gave -> [..., K], fp32, fp16 or bf16. Not collective.

    Of e4m3 or e5m2 and scales that are powers of two, bf16 is exact. There is no gradient. Raises ValueError or
    TypeError.
    """
    check_tensors("dequantize", q=q, scale=scale)
    if wants_gradient(scale):
        raise ValueError(f"dequantize: has no gradient; {under_no_grad('pass scale.detach()')}")
    return ops.dequantize(q, scale, dtype)


def _shape(name: str, x: torch.Tensor) -> torch.Size:
    if not isinstance(x, torch.Tensor):
        check_tensors(name, x=x)
    try:
        return x.shape
    except RuntimeError:
        check_dense(name, x=x)
        raise


def _num_rows(name: str, x: torch.Tensor) -> int:
    shape = _shape(name, x)
    if not shape:
        raise ValueError(f"{name}: takes rows, but the tensor is a scalar")
    return shape[0]


def all_gather_matmul(
    x_shard_m: torch.Tensor,
    w_shard_n: torch.Tensor | list[torch.Tensor],
    bias: torch.Tensor | list[torch.Tensor | None] | None = None,
    activation: str | None = None,
    return_gathered: bool | str | torch.Tensor = False,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    fast_accum: bool = True,
    gather_dim: int = 0,
    rows: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: OverlapConfig | None = None,
    path: str | None = None,
    ctx: Context | None = None,
) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor | list[torch.Tensor], torch.Tensor, ...]:
    """Collective. y_shard_n = activation(all_gather(x_shard_m) @ w_shard_n.T + bias).

    x_shard_m [M/R, K], w_shard_n [N/R, K], bias [N/R] -> y_shard_n [M, N/R]. x_shard_m is read in place; a copy is made
    only if its rows are not contiguous, and of weights of which no stride is 1. N/R may differ from rank to rank and
    be 0.
    In 16 bits and as TF32, whatever of x_shard_m and w_shard_n has rows or an address that are no multiples of 16 bytes
    is copied in the call, on GPUs of capability 9.0 and above, and from M = 2048 on, a weight of rows that are no
    multiples of 32; as TF32 also a weight whose K is not contiguous. So is y_shard_n, but between two ranks where tiles
    are stored in four slices, as they are by default. A config with use_tma=False reads and writes all where they are.
    `keep_staged` keeps the copies of weights for later calls.

    A list of weights, with None or a list of a bias or None for each, gives a list of products from one gather, and in
    backward one reduce-scatter. The first product is the one that overlaps the gather: put the largest there.

    return_gathered: also return x gathered [M, K]; backward then uses it instead of gathering again. A tensor [M, K]
        receives it; x_shard_m may be this rank's rows of that tensor. "borrowed": it may be left in the workspace,
        which the next call on this stream overwrites, and have wider rows there.
    gather_dim: x_shard_m may have any number of leading dimensions, [..., K], of which this one is gathered: y_shard_n
        [..., N/R] and x gathered [..., K] then are views whose memory has it first, as in torch's fused operators. So
        must be what they are to fill. Elsewhere, "rows" mean that dimension.
    rows: every rank's row count where they differ, for example split_rows(M, R). None: all have as many as this rank.
    activation: None, "relu", "gelu" (exact), "gelu_tanh" or "silu"; fused unless a gradient is needed.
    out: a contiguous tensor that shares no memory with the operands, to fill and return.
    out_dtype: of y, the operands' dtype or float32; of FP8 operands bfloat16 by default, float16 or float32.
    config: the tiles and the way of sending, see OverlapConfig. None: the tuned one, else the model's choice.
    path: "fused", or "plain" for a collective and `matmul`, which is faster for few rows and in fp32, see
        tkernels.plain. None: the choice of `tkernels.explain`. All ranks must pass the same; backward takes the same.
    fp32, fp16, bf16; accumulated in fp32. w_shard_n may be the view `w.t()` of a [K, N/R] matrix. A call with out,
    config, or a return_gathered that is no bool has no gradient.

    FP8, as in matmul: half the bytes travel, and their scales beside them. x_scale is this rank's: one a row, [M/R, 1]
    or [M/R], or one number for the shard, which may differ between ranks, so that no maximum need be reduced over them.
    w_scale [1] or [N/R]. With return_gathered the result is (y_shard_n, x gathered, its scales [M, 1]).
    Raises ValueError or TypeError before the first signal, HeapExhaustedError if the context's heap has no room for a
    larger call, WaitTimeoutError if a peer did not answer in time.
    """
    ctx, shape = as_context(ctx, "all_gather_matmul: ctx"), _shape("all_gather_matmul", x_shard_m)
    lead, leading, given = None, ROWS_FIRST, (out, return_gathered)
    if type(gather_dim) is not int or gather_dim != 0 or len(shape) != 2:
        lead = Leading.of("all_gather_matmul", x_shard_m, "gather_dim", gather_dim)
        lengths = collectives.check_rows("all_gather_matmul", ctx, rows, own=lead.sizes[0])
        x_shard_m, x_scale = lead.matrix(x_shard_m), lead.scale(x_scale)
        rows, leading, shape = lead.rows(lengths), lead.order, x_shard_m.shape
        out, return_gathered = lead.memory("out", out), lead.memory("return_gathered", return_gathered)
    rows = collectives.check_rows("all_gather_matmul", ctx, rows, own=shape[0])
    fp8, several = _is_scaled(x_shard_m, x_scale, w_scale), type(w_shard_n) in SEVERAL
    operators = out is config is None and not isinstance(return_gathered, str | torch.Tensor)
    into = return_gathered if isinstance(return_gathered, torch.Tensor) else None
    if (not operators or fp8) and not several:
        tensors = x_shard_m, w_shard_n, bias, x_scale, w_scale, out, into
        _check_without_gradient("all_gather_matmul", GATHER_TENSORS, *tensors)
    if several:
        if fp8:
            raise TypeError("all_gather_matmul: float8 operands take one weight, not a list; pass them one by one")
        beyond = out, out_dtype, config, return_gathered if isinstance(return_gathered, str | torch.Tensor) else None
        ws, biases = _several(w_shard_n, bias, beyond)
        fused, separate = _split_activation("all_gather_matmul", activation, x_shard_m, *ws, *biases)
        options = fused, return_gathered, rows, ctx.name, path, leading
        y, *gathered = all_gather_matmuls(x_shard_m, ws, biases, *options)
        y = [activation_reference(each, separate) for each in y]
    elif operators:
        fused, separate = _split_activation("all_gather_matmul", activation, x_shard_m, w_shard_n, bias)
        options = fused, return_gathered, rows, ctx.name, path, out_dtype, fast_accum, leading
        y, *gathered = ops.all_gather_matmul(x_shard_m, w_shard_n, bias, x_scale, w_scale, *options)
        y = activation_reference(y, separate)
    else:
        return_gathered = into is not None or return_gathered

        def call():
            others = {"w_shard_n": w_shard_n, "bias": bias, "x_scale": x_scale, "w_scale": w_scale}
            check_apart("all_gather_matmul", out, x_shard_m=x_shard_m, return_gathered=into, **others)
            check_apart("all_gather_matmul", into, "return_gathered", **others)  # x may be this rank's rows of it
            how = precision(x_shard_m.dtype, fast_accum)
            options = activation, rows, out_dtype, config, path, how, return_gathered
            call = AllGatherMatmul(*options, leading=leading)
            return ctx.call(call, x_shard_m, w_shard_n, bias, out, into, *Scales.given(x_scale, w_scale))

        y, *gathered = untraced("all_gather_matmul", call, tensors, (out, into))
    gathered = gathered[: 2 if fp8 else 1] if return_gathered else ()
    if lead is not None:
        out, into = given
        if isinstance(y, list):
            y = [lead.back(each, sum(lengths)) for each in y]
        else:
            y = lead.back(y, sum(lengths)) if out is None else out
        gathered = [lead.back(each, sum(lengths)) for each in gathered]
        gathered[:1] = [into] if isinstance(into, torch.Tensor) else gathered[:1]
    return (y, *gathered) if gathered else y


def _several(ws, biases, beyond: tuple) -> tuple[list, list]:
    """Weights, and as many biases. beyond: the options that take one weight, each None where it is not given."""
    if any(each is not None for each in beyond):
        raise ValueError(
            "all_gather_matmul: out=, out_dtype=, config=, and return_gathered= of a tensor or 'borrowed' take one "
            "weight, not a list; leave them out, or pass the weights one by one"
        )
    biases = [None] * len(ws) if biases is None else biases
    if not isinstance(biases, list | tuple) or len(biases) != len(ws) or not ws:
        given = len(biases) if isinstance(biases, list | tuple) else type(biases).__name__
        raise ValueError(
            f"all_gather_matmul: a list of weights, at least one, takes None or a list of as many biases, but here are "
            f"{len(ws)} weights and, as biases, {given}"
        )
    named = {f"w_shard_n[{at}]": w for at, w in enumerate(ws)}
    named |= {f"bias[{at}]": bias for at, bias in enumerate(biases) if bias is not None}
    check_tensors("all_gather_matmul", **named)
    return list(ws), list(biases)


def matmul_reduce_scatter(
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    fast_accum: bool = True,
    scatter_dim: int = 0,
    rows: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    config: OverlapConfig | None = None,
    path: str | None = None,
    ctx: Context | None = None,
) -> torch.Tensor:
    """Collective. This rank's rows of activation(sum over ranks of x_shard_k @ w_shard_k.T + bias).

    x_shard_k [M, K/R], w_shard_k [N, K/R], bias [N] -> y_shard_m [M/R, N]. Bias is added once, after the sum. K/R may
    differ from rank to rank and be 0. Operands of which no stride is 1 are copied, and others as all_gather_matmul's.

    scatter_dim: x_shard_k may have any number of leading dimensions, [..., K/R], of which this one is scattered.
        "Rows" then mean it. The result is contiguous; `out` must have that dimension first in memory.
    rows: every rank's row count; needed where M does not divide by R.
    wire_dtype: of the partial sums that are sent, the operands' dtype or float32; or torch.float8_e4m3fn, which is
        lossy. Then each 128 columns of a row travel with a scale, a power of two: 52 % of bf16's bytes. Each peer's
        partial sum errs by up to 1/16 of itself, or 2**-17 of the largest of the 128; this rank's own is as it is, and
        all are added in fp32. What isn't finite arrives as NaN. Gradients don't see it. Operands are of 16 bits or FP8;
        the fused kernel alone sends so, whatever the size, in tiles of 128 columns, or 256 in two slices, not
        interleaved.
    activation, out, out_dtype, config, path, dtypes, views of w_shard_k, exceptions: as all_gather_matmul.

    FP8, as in matmul: x_scale [1] or [M, 1] and w_scale [1] or [N] are of this rank's part of K, and are applied before
    partial sums are sent. wire_dtype: then bf16 by default, float32 or torch.float8_e4m3fn.
    """
    ctx, shape = as_context(ctx, "matmul_reduce_scatter: ctx"), _shape("matmul_reduce_scatter", x_shard_k)
    x, scale, into, lead = x_shard_k, x_scale, out, None
    if type(scatter_dim) is not int or scatter_dim != 0 or len(shape) != 2:
        lead = Leading.of("matmul_reduce_scatter", x, "scatter_dim", scatter_dim)
        lengths = collectives.check_rows("matmul_reduce_scatter", ctx, rows, total=lead.sizes[0])
        x, scale, into, rows = lead.matrix(x), lead.scale(scale), lead.memory("out", out), lead.rows(lengths)
    leading = ROWS_FIRST if lead is None else lead.order
    rows = collectives.check_rows("matmul_reduce_scatter", ctx, rows, total=x.shape[0])
    tensors, options = (x, w_shard_k, bias, scale, w_scale, into), (out_dtype, wire_dtype, config, path)
    y = _reduced(MatmulReduceScatter, ctx, tensors, activation, rows, fast_accum, leading, *options)
    return y if lead is None else lead.back(y, lengths[ctx.rank]).contiguous() if out is None else out


def matmul_all_reduce(
    x_shard_k: torch.Tensor,
    w_shard_k: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    fast_accum: bool = True,
    out_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    config: OverlapConfig | None = None,
    path: str | None = None,
    ctx: Context | None = None,
) -> torch.Tensor:
    """Collective. activation(sum over ranks of x_shard_k @ w_shard_k.T + bias), the same bits on every rank.

    x_shard_k [..., K/R], w_shard_k [N, K/R], bias [N] -> y [..., N]. Finished rows are sent in out_dtype,
    whatever the wire_dtype of partial sums is.
    All options and exceptions: as matmul_reduce_scatter.
    """
    x, scale, lead = x_shard_k, x_scale, None
    if isinstance(x, torch.Tensor) and x.dim() != 2:
        lead = Leading.of("matmul_all_reduce", x)
        x, scale = lead.matrix(x), lead.scale(scale)
    tensors, options = (x, w_shard_k, bias, scale, w_scale, None), (out_dtype, wire_dtype, config, path)
    ctx = as_context(ctx, "matmul_all_reduce: ctx")
    leading = ROWS_FIRST if lead is None else lead.order
    y = _reduced(MatmulAllReduce, ctx, tensors, activation, None, fast_accum, leading, *options)
    return y if lead is None else lead.back(y)


def _reduced(
    kind, ctx, tensors, activation, rows, fast_accum, leading, out_dtype, wire_dtype, config, path
) -> torch.Tensor:  # fmt: skip
    """A reduction of x_shard_k [M, K/R]. tensors: x, w, bias, the scales and out. rows: None for an all-reduce."""
    name, (x, w, bias, x_scale, w_scale, out) = kind.operation, tensors
    operators = out is config is None
    if not operators or _is_scaled(x, x_scale, w_scale):
        _check_without_gradient(name, REDUCTION_TENSORS, *tensors)
    if operators:
        fused, separate = _split_activation(name, activation, x, w, bias)
        options = ctx.name, path, out_dtype, wire_dtype, fast_accum, leading
        options = options if rows is None else (rows, *options)
        return activation_reference(getattr(ops, name)(x, w, bias, x_scale, w_scale, fused, *options), separate)

    def call():
        check_apart(name, **dict(zip(REDUCTION_TENSORS, tensors, strict=True)))
        how = precision(x.dtype, fast_accum)
        call = kind(activation, rows, out_dtype, config, path, how, wire_dtype=wire_dtype, leading=leading)
        return ctx.call(call, x, w, bias, out, *Scales.given(x_scale, w_scale))

    return untraced(name, call, tensors, (out,))


def all_gather(
    x_shard_m: torch.Tensor,
    *,
    rows: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
    ctx: Context | None = None,
) -> torch.Tensor:
    """Collective. Every rank's rows: x_shard_m [M/R, ...] -> [M, ...]; any dtype of up to 8 bytes.

    rows, exceptions: as in all_gather_matmul.
    out: a contiguous [M, ...] to fill and return, without a gradient. x_shard_m may be this rank's rows of it.
    """
    ctx = as_context(ctx, "all_gather: ctx")
    rows = collectives.check_rows("all_gather", ctx, rows, own=_num_rows("all_gather", x_shard_m))
    if out is not None:
        return _into("all_gather", out, x_shard_m, rows, ctx.name)
    return ops.all_gather(x_shard_m, rows, ctx.name)


def reduce_scatter(
    x: torch.Tensor,
    *,
    rows: tuple[int, ...] | None = None,
    out: torch.Tensor | None = None,
    factor: float = 1.0,
    ctx: Context | None = None,
) -> torch.Tensor:
    """Collective. This rank's rows of the sum over ranks: x [M, ...] -> [M/R, ...]; fp32, fp16, bf16.

    rows: every rank's row count; needed where M does not divide by R. Exceptions: as in all_gather_matmul.
    out: a contiguous [M/R, ...] to fill and return, of any of these dtypes, without a gradient. It may be this rank's
    rows of x.
    factor: what the sum is multiplied by, in fp32, before it is rounded, once: 1/R for a mean. The same on all ranks,
    and a constant of a program, since each value is prepared, as a shape is.
    """
    check_type("reduce_scatter: factor", factor, numbers.Real | torch.SymFloat, "a number")
    ctx = as_context(ctx, "reduce_scatter: ctx")
    rows = collectives.check_rows("reduce_scatter", ctx, rows, total=_num_rows("reduce_scatter", x))
    if out is not None:
        return _into("reduce_scatter", out, x, rows, ctx.name, float(factor))
    return ops.reduce_scatter(x, rows, ctx.name, float(factor))


def all_reduce(
    x: torch.Tensor, *, out: torch.Tensor | None = None, factor: float = 1.0, ctx: Context | None = None
) -> torch.Tensor:
    """Collective. The sum over ranks, in a new tensor of x's shape; fp32, fp16, bf16. The same bits on every rank.

    out: a contiguous tensor of x's shape to fill and return, of any of these dtypes, without a gradient. It may be x.
    factor: as of reduce_scatter. Exceptions: as in all_gather_matmul.
    """
    check_type("all_reduce: factor", factor, numbers.Real | torch.SymFloat, "a number")
    ctx = as_context(ctx, "all_reduce: ctx")
    if out is not None:
        return _into("all_reduce", out, x, ctx.name, float(factor))
    return ops.all_reduce(x, ctx.name, float(factor))


def barrier(*, ctx: Context | None = None):
    """Collective. On the current stream, later work starts only after all ranks have reached the barrier.

    Raises WaitTimeoutError if a rank did not reach it in time.
    """
    untraced("barrier", as_context(ctx, "barrier: ctx").barrier)
