"""The library's product: torch's own matmul, on GPUs cuBLAS. The plain path multiplies by it, and so do local products
that it does faster than our kernel (choice.product_way).

It sums in fp32 whatever torch's switches allow: by default cuBLAS rounds the partial sums of a product that it splits
along K to the operands' 16 bits. With that, 15 of 300 random results were beyond the limits of fp32 sums, by 2 %.
"""

import contextlib

import torch


def multiply_into(out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, precision: str):
    """out [M, N] = x [M, K] @ w [N, K].T + bias [N]. A bias is allowed only if `out` has x's dtype.

    precision: of fp32, as gemm.precision says it. Torch's autocast does not apply.
    """
    if x.device.type == "cpu":  # where not all 16-bit matmuls accumulate in fp32
        with torch.autocast("cpu", enabled=False):
            product = x.float() @ w.float().t()
        out.copy_(product if bias is None else product + bias.float())
    elif out.dtype != x.dtype:
        torch.mm(x, w.t(), out_dtype=out.dtype, out=out)
    elif x.dtype == torch.float32:
        with in_precision(precision):
            _multiply_alike(out, x, w, bias)
    else:
        with summing_in_fp32(x.dtype):
            _multiply_alike(out, x, w, bias)


def multiply_scaled_into(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, scales, precision: str
):  # fmt: skip
    """The same of FP8 operands: out = x @ w.T * x_scale * w_scale + bias. scales: gemm.Scales, of any shapes."""
    x_scale, w_scale = scales
    if x_scale.numel() > 1 or w_scale.numel() > 1:  # torch takes either one for each operand, or one a row of each
        x_scale = x_scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()
        w_scale = w_scale.reshape(1, -1).expand(1, w.shape[0]).contiguous()
    torch._scaled_mm(
        x, w.t(), x_scale, w_scale, bias, out_dtype=out.dtype, use_fast_accum=precision != "promoted", out=out
    )


def _multiply_alike(out, x, w, bias):
    if bias is None:
        torch.mm(x, w.t(), out=out)
    else:
        torch.addmm(bias, x, w.t(), out=out)


def activate_in_place(y: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Apply an activation of gemm.ACTIVATIONS to y, and return it."""
    if activation == "relu":
        y.relu_()
    elif activation == "silu":
        torch.nn.functional.silu(y, inplace=True)
    elif activation is not None:
        torch.ops.aten.gelu_(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y


class summing_in_fp32:  # noqa: N801  # used as a function; as a generator it would take 2 us more
    """In the block, torch rounds no partial sums of 16-bit matrices on GPUs."""

    def __init__(self, dtype: torch.dtype):
        self.name = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"

    def __enter__(self):
        switch = torch.backends.cuda.matmul
        self.before = getattr(switch, self.name)
        if self.before:
            self.split = getattr(switch, f"{self.name}_split_k", True)  # whether it may split along K at all
            setattr(switch, self.name, (False, self.split))

    def __exit__(self, *_):
        if self.before:
            setattr(torch.backends.cuda.matmul, self.name, (True, self.split))


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
