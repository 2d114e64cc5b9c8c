"""How far a right result may be from the exact one."""

import math

import torch


def tolerance(dtype: torch.dtype, terms: int, roundings: int = 1, scale: float = 1.0) -> tuple[float, float]:
    """(atol, rtol) for ``y = sum of `terms` products``, accumulated in fp32 and returned in dtype.

    Assumptions: the products are independent, of mean 0 and standard deviation `scale` (1 for two operands of unit
    variance); the reference is exact, for bitwise equal operands. Let n = terms and u = 2**-24; y is about
    scale * sqrt(n).

    - *accumulation, rounded*: adding the k-th product errs by at most u |s_k|, where s_k, the sum so far, is about
      scale * sqrt(k). As a random walk this has a standard deviation below u * scale * n / sqrt(6). For the worst of
      many elements, whose own sums are large too, 20 of these are allowed: 8 u * scale * n.
    - *accumulation, truncated*, as in tensor cores: an addition errs by up to 2 u |s_k|, by half of that on average,
      always towards zero; but one addition covers 16 products. Along the path to a result six deviations out, |s_k|
      averages 4 scale * sqrt(n), so n / 16 additions err by u * scale * n**1.5 / 4.
    - *the result*, rounded to dtype, errs by eps(dtype) / 2 relative to itself, hence rtol; below the normal numbers,
      by half of the spacing there.
    - *staging*: `roundings` counts all roundings to dtype, the result's included. Each of the others applies to a
      partial sum, no larger than about scale * sqrt(n), which may cancel later, so it adds to atol: independent errors
      with a standard deviation of eps / 2 / sqrt(3) of the partial sum, of which six are allowed.

    A bias is one more term. An activation of slope at most 1.13 (all of ACTIVATIONS) fits into the first item.
    """
    half_ulp = torch.finfo(dtype).eps / 2
    accumulation = 2.0**-24 * scale * (8 * terms + terms**1.5 / 4)
    staging = 6 / math.sqrt(3) * half_ulp * scale * math.sqrt((roundings - 1) * terms)
    return accumulation + staging + torch.finfo(dtype).smallest_normal * half_ulp, half_ulp


def fp8_error(terms: int, fast_accum: bool = True) -> float:
    """atol beyond `tolerance`'s, of a sum of `terms` products of FP8 operands that stand for values of unit variance.

    Tensor cores align 32 products and the sum so far to the largest of them and cut each off at 13 bits below it: by up
    to 2 u |s_k|, with u = 2**-14, half of that on average. Let n = terms.

    - *the sum* loses u |s_k| each time, always towards zero: as above, 4 sqrt(n) averaged along a path six deviations
      out, n / 32 times: u * n**1.5 / 8.
    - *the products* lose as much, but in the direction of each one's sign: a random walk of n steps of 2 u |s_k| /
      sqrt(3), where |s_k| averages 2 sqrt(n), for six deviations of both are rarer than rare: 14 u * n.

    Without fast_accum that holds of each 128 products, and these sums err independently.
    """
    part = terms if fast_accum else min(terms, 128)
    return 2.0**-14 * (part**1.5 / 8 + 14 * part) * math.sqrt(terms / part) if terms else 0.0
