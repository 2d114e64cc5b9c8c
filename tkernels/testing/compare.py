"""Test data and comparisons for matmuls.

There are two kinds of data, each with its own comparison. `integers` are small, so fp32 sums of their products are
exact: ``torch.equal``, without any tolerance, detects a lost row, a tile of the wrong rank or a doubled bias. `normal`
values test rounding, within a tolerance (`tkernels.rounding`) that follows from the dtype and the number of terms.
"""

import math

import torch

from tkernels.rounding import tolerance


def integers(shape, dtype: torch.dtype, seed: int, low: int = -4, high: int = 4, device="cpu") -> torch.Tensor:
    """Random integers from low to high, both included; the same on every device and rank for one seed.

    Sums of products are exact in fp32 while ``terms * max(|low|, high)**2`` is at most 2**24.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(shape, dtype=torch.int64).random_(low, high + 1, generator=generator)
    return x.to(device=device, dtype=dtype)


def normal(shape, dtype: torch.dtype, seed: int, device="cpu") -> torch.Tensor:
    """Normal values of mean 0 and variance 1, rounded to dtype; the same on every device and rank for one seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def poison(t: torch.Tensor) -> torch.Tensor:
    """Fill t with NaN, or with its dtype's largest value where there is no NaN, and return it.

    An element that a kernel fails to write, or reads before it has arrived, then shows in the result.
    """
    if t.is_floating_point() or t.is_complex():
        return t.fill_(math.nan)
    return t.fill_(True if t.dtype is torch.bool else torch.iinfo(t.dtype).max)


def assert_close_to(
    got: torch.Tensor, want_fp64: torch.Tensor, terms: int, roundings: int = 1, scale: float = 1.0
) -> None:
    """Assert that every element of `got` is within `tolerance` of a reference computed in fp64.

    Raises AssertionError naming the worst element and how many are off, TypeError for a reference that is not fp64,
    ValueError for one that is not finite.
    """
    if want_fp64.dtype is not torch.float64:
        raise TypeError(f"the reference is {want_fp64.dtype}; compute it in torch.float64, it must add no error")
    assert got.shape == want_fp64.shape, f"shape {tuple(got.shape)}, want {tuple(want_fp64.shape)}"
    if got.numel() == 0:
        return
    want = want_fp64.detach().cpu()
    if not want.isfinite().all():
        raise ValueError("the reference has elements that are not finite; no result can be near them")
    atol, rtol = tolerance(got.dtype, terms, roundings, scale)
    values = got.detach().cpu().double()
    error = (values - want).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    allowed = atol + rtol * want.abs()
    off = error > allowed
    if not off.any():
        return
    excess = (error / allowed).reshape(-1)
    at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), got.shape))
    raise AssertionError(
        f"{int(off.sum())} of {got.numel()} elements are off, the worst at {at}: got {values[at]:.9g}, "
        f"want {want[at]:.9g}, error {error[at]:.3g}, allowed {allowed[at]:.3g} "
        f"({got.dtype}, terms={terms}, roundings={roundings}, scale={scale:g}: atol {atol:.3g}, rtol {rtol:.3g}; "
        f"{int((~values.isfinite()).sum())} not finite)"
    )
