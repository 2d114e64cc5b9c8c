"""The library's product: torch's own matmul, on GPUs cuBLAS. Products that it does faster than our kernel are its
(choice.product_way), those of the plain path included.

It sums as torch's switches say. By default these let cuBLAS round the partial sums of a product that it splits along K
to the operands' 16 bits (15 of 300 random results were beyond the limits of fp32 sums, by 2 %). Forbidding that cost 5
of 300 random products 1.2 to 8 times their time on an H100, and whoever wants it can say so to torch:
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False.
"""

import contextlib
import functools

import torch

from tkernels.gpus import gpu_here


def multiply_into(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, precision: str):
    """out [M, N] = x [M, K] @ w [N, K].T + bias [N]. A bias is allowed only if `out` has x's dtype.

    precision: of fp32, as gemm.precision says it. Torch's autocast does not apply.
    """
    if _on_host(x):
        _multiply_on_host(out, x, w, bias)
    elif out.dtype != x.dtype:
        torch.mm(x, w.t(), out_dtype=out.dtype, out=out)
    else:
        with in_precision(precision) if x.dtype == torch.float32 else contextlib.nullcontext():
            torch.mm(x, w.t(), out=out) if bias is None else torch.addmm(bias, x, w.t(), out=out)


def multiply_scaled_into(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, scales, precision: str
) -> bool:  # fmt: skip
    """The same of FP8 operands: out = x @ w.T * x_scale * w_scale + bias. scales: gemm.Scales, of any shapes.

    Returns whether cuBLAS adds a bias to such products. It has no kernel for that where it splits a deep K of few tiles
    (64x64x39744, 2x976x5520 on an H100); then `out` is without.
    """
    x_scale, w_scale = scales
    if _on_host(x):
        _multiply_on_host(out, x, w, bias, x_scale.reshape(-1, 1), w_scale.reshape(1, -1))
        return True
    if x_scale.numel() > 1 or w_scale.numel() > 1:  # torch takes either one for each operand, or one a row of each
        x_scale, w_scale = _spread(x_scale, (x.shape[0], 1)), _spread(w_scale, (1, w.shape[0]))
    # cuBLAS refuses a scale in the midst of 16 bytes.
    x_scale, w_scale = (scale if scale.data_ptr() % 16 == 0 else scale.clone() for scale in (x_scale, w_scale))
    multiply = functools.partial(
        torch._scaled_mm, x, w.t(), x_scale, w_scale, out_dtype=out.dtype, use_fast_accum=precision != "promoted",
        out=out,
    )  # fmt: skip
    try:
        multiply(bias=bias)
    except RuntimeError as error:
        if bias is None or "CUBLAS_STATUS_NOT_SUPPORTED" not in str(error):
            raise
        multiply()
        return False
    return True


def adds_bias_to_fp32(M: int, N: int, K: int, precision: str) -> bool:
    """Whether cuBLAS adds a bias to an fp32 product in less time than a pass over the result takes.

    Of a deep K and fewer tiles than SMs it splits K where there is none: 300x300x1000 takes 18 us, with a bias 44,
    1053x1169x15475 858 and 1203 (H200). It gains less than the pass takes with tiles for half of the SMs and a K that
    is not so deep (60x15022x1342 takes 73, and with a pass 96), of a few rows of many features (2x9024x40640 537 and
    681), and of few numbers in all (8x40x13504 18 and 20). As TF32 both take the same time.
    """
    tiles, sms = -(-M // 128) * -(-N // 128), gpu_here().sms
    deep = K >= (2000 if 2 * tiles > sms else 1000)
    few = M * N < 1024 or M <= 5 and N > 2000
    return precision != "ieee" or tiles >= sms or few or not deep


def _spread(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """One scale, or one a row, as a contiguous tensor of that shape; itself if it is one."""
    if scale.shape == shape and scale.is_contiguous():
        return scale
    spread = scale.reshape(shape) if scale.numel() == shape[0] * shape[1] else scale.reshape(1, 1).expand(shape)
    return spread.contiguous()


def _on_host(x: torch.Tensor) -> bool:
    """Where not all 16-bit matmuls of torch accumulate in fp32, and those of FP8 take no scale a row in torch 2.11."""
    return x.device.type == "cpu"


def _multiply_on_host(out, x, w, bias, *scales):
    with torch.autocast("cpu", enabled=False):
        product = x.float() @ w.float().t()
    for scale in scales:
        product *= scale
    out.copy_(product if bias is None else product + bias.float())


@contextlib.contextmanager
def in_precision(precision: str):
    """In the block, torch multiplies fp32 matrices in that precision on GPUs."""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    if before == precision or before != "tf32" and precision == "ieee":
        yield
        return
    switch.fp32_precision = precision
    try:
        yield
    finally:
        switch.fp32_precision = before
