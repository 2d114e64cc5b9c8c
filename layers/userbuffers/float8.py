"""FP8 as TransformerEngine's users ask for it: recipes, the block in which layers multiply in FP8, and quantizers.

    with te.fp8_autocast(fp8_recipe=te.DelayedScaling()):  # or Float8CurrentScaling()
        y = layer(x)

What a rank has of an operand has one scale. Scales travel beside rows, so those of ranks may differ: no amax is reduced
over a group, and `fp8_group` and `reduce_amax` have no effect. Weights are scaled by what they are with either recipe,
and their copies in FP8 are kept until they change. The weight's gradient is a product in the input's dtype.

The recipes, quantizers and tensors of an installed TransformerEngine are known by their attributes, and its own
fp8_autocast holds for the layers here.
"""

import contextlib
import enum
import sys
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

import tkernels
from tkernels.comm import capture
from tkernels.comm.arguments import check_dense, check_type, whole
from tkernels.configs import DTYPES
from tkernels.layers.tensor_parallel.activations import parts_of
from tkernels.layers.tensor_parallel.float8 import Copies, Float8Tensor, Recipe, weights
from tkernels.layers.userbuffers.defaults import boolean
from tkernels.quantize import next_factor, quantize_by

# Whether products add up beyond the tensor cores' 13 bits (use_split_accumulator), unless a recipe says so of them.
_2X_ACC_FPROP = False
_2X_ACC_DGRAD = True
_2X_ACC_WGRAD = True

MOST_CALLS, MOST_MARGIN = 1 << 20, 127  # of a history; in powers of two, of which fp32 has no more
LACKING = "is not supported: these kernels have scales of whole tensors, no block scaling"


class Format(enum.Enum):
    """What is quantized to what; HYBRID: gradients to e5m2, all else to e4m3. E5M2 alone is refused."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclass
class DelayedScaling:
    """Inputs and gradients are scaled by the largest of earlier calls, and what is larger saturates.

    The scale is 2**-margin * largest number of the format / the largest |x| of the last amax_history_len calls ("max"),
    or of the last ("most_recent"); 1 in a layer's first call.
    override_linear_precision: the last, of the weight's gradient, is not multiplied in FP8 in any case.
    params_dtype, device: no effect; Megatron passes them.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: object = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    override_linear_precision: tuple[bool, bool, bool] = (False, False, True)
    params_dtype: object = None
    device: object = None


@dataclass
class Float8CurrentScaling:
    """All are scaled by what they are."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


class _Scaling(NamedTuple):
    """What a recipe asks of layers. history: of delayed scaling, its length, 1 for the most recent; None: current."""

    recipe: Recipe
    history: int | None = None
    margin: int = 0


_now: list[_Scaling | bool | None] = [None]  # False: none, whatever TransformerEngine says; None: what that says


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, calibrating: bool = False, fp8_recipe=None, fp8_group=None, _graph=False):
    """A block in which the layers multiply in FP8, and so does their backward. All ranks must use it alike.

    fp8_recipe: None is DelayedScaling(). Raises ValueError by name for one that isn't supported, before any layer runs.
    """
    enabled = boolean("fp8_autocast: enabled", enabled)
    if enabled and calibrating:
        raise ValueError("fp8_autocast: calibrating=True is not supported; leave it out")
    with scaling_of(_scaling(DelayedScaling() if fp8_recipe is None else fp8_recipe) if enabled else None):
        yield


def autocast(enabled: bool = True, calibrating: bool = False, recipe=None, amax_reduction_group=None, _graph=False):
    """fp8_autocast, by the names of newer releases."""
    return fp8_autocast(enabled, calibrating, recipe, amax_reduction_group, _graph)


@contextlib.contextmanager
def scaling_of(scaling: _Scaling | None):
    """A block with what `current` returned."""
    before, _now[0] = _now[0], scaling or False
    try:
        yield
    finally:
        _now[0] = before


def current() -> _Scaling | None:
    """What the layers multiply by in FP8; None outside of fp8_autocast, this or an installed TransformerEngine's."""
    if _now[0] is None:
        for name in ("quantization", "fp8"):
            state = getattr(sys.modules.get(f"transformer_engine.pytorch.{name}"), "FP8GlobalStateManager", None)
            if getattr(state, "is_fp8_enabled", bool)():
                return _scaling(state.get_fp8_recipe())
    return _now[0] or None


def quantizes_activations() -> bool:
    """Whether layers multiply by what an activation gives without holding it: in one pass, as delayed scaling does."""
    scaling = current()
    return scaling is not None and scaling.history is not None


def _scaling(recipe) -> _Scaling:
    kinds, name = {kind.__name__ for kind in type(recipe).__mro__}, type(recipe).__name__
    if not kinds & {"DelayedScaling", "Float8CurrentScaling"}:
        raise ValueError(
            f"fp8_autocast: fp8_recipe={name} {LACKING}; pass te.Float8CurrentScaling() or te.DelayedScaling()"
        )
    delayed, asked = "DelayedScaling" in kinds, partial(getattr, recipe)
    form = getattr(recipe.fp8_format, "name", None)
    algorithm, precise = asked("amax_compute_algo", "max"), asked("override_linear_precision", (False,) * 3)
    check_type("fp8_autocast: override_linear_precision", precise, (tuple, list), "three flags")
    of_x = asked("fp8_quant_fwd_inp", None)
    names = "fp8_dpa", "fp8_mha", "backward_override", "scaling_factor_compute_algo"
    given = {name: asked(name, None) for name in names} | {"amax_epsilon": getattr(of_x, "amax_epsilon", 0)}
    given |= {"override_linear_precision": any(precise[:2]) and precise}
    given |= {"amax_compute_algo": algorithm not in ("max", "most_recent") and algorithm}
    wrong = f"{recipe.fp8_format!r}, which is no Format" if form not in Format.__members__ else None
    given |= {"fp8_format": "E5M2, which backward can't multiply by itself" if form == "E5M2" else wrong}
    for option, value in given.items():
        if value:
            raise ValueError(f"fp8_autocast: {name}({option}={value}) is not supported; leave it out")

    def fast(product: str, otherwise: bool) -> bool:
        return not getattr(asked(f"fp8_gemm_{product}", None), "use_split_accumulator", otherwise)

    shared = Recipe(
        "tensor", boolean("fp8_autocast: use_power_2_scales", asked("use_power_2_scales", False)),
        torch.float8_e4m3fn if form == "E4M3" else torch.float8_e5m2,
        fast_accum=fast("fprop", _2X_ACC_FPROP), fast_accum_backward=fast("dgrad", _2X_ACC_DGRAD),
    )  # fmt: skip
    if not delayed:
        return _Scaling(shared)
    history = whole("fp8_autocast: amax_history_len", recipe.amax_history_len, 1, MOST_CALLS)
    margin = whole("fp8_autocast: margin", recipe.margin, -MOST_MARGIN, MOST_MARGIN)
    return _Scaling(shared, 1 if algorithm == "most_recent" else history, margin)


class History(NamedTuple):
    """Of delayed scaling, on the device, where CUDA graphs go on with it.

    factor: by which the next values are multiplied, TransformerEngine's scale. largest: of the values of this call.
    amax: of as many calls as the history is long; the next one takes the place `at`.
    """

    factor: torch.Tensor
    largest: torch.Tensor
    amax: torch.Tensor
    at: torch.Tensor

    @classmethod
    def of(cls, length: int, device: torch.device) -> "History":
        at = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(torch.ones(1, device=device), *(torch.zeros(size, device=device) for size in (1, length)), at)


class LayerScaling:
    """What one linear layer multiplies by in FP8: copies of its weights, and with delayed scaling histories."""

    def __init__(self, scaling: _Scaling):
        self.scaling, self.copies, self.histories = scaling, Copies(), {}

    def for_call(self, parameters) -> "Quantizers":
        return Quantizers(self, self.copies.kept(parameters, parameters) if len(parameters) == 1 else None)

    def quantize(
        self, role: str, x: torch.Tensor, dtype: torch.dtype, activation: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        recipe, length, margin = self.scaling
        if length is None:
            return recipe.quantize(x, dtype, activation)
        if role not in self.histories or self.histories[role].factor.device != x.device:
            with capture.lasting(), capture.uncaptured():
                self.histories[role] = History.of(length, x.device)
        history = self.histories[role]
        x, gate, activation = parts_of(x, activation)
        quantized = quantize_by(x, gate, history.factor, history.largest, dtype, activation)
        next_factor(*history, dtype, margin)
        return quantized

    def __reduce__(self):  # copies, too, begin anew
        return LayerScaling, (self.scaling,)


class Quantizers(NamedTuple):
    """What `dataflow.linear` quantizes with in one call of a layer."""

    layer: LayerScaling
    kept: tuple | None

    def input(self, x: torch.Tensor, activation: str | None = None) -> Float8Tensor:
        data, scale = self.layer.quantize("input", x, torch.float8_e4m3fn, activation)
        source = x if activation is None else None
        return Float8Tensor(data, scale, x.dtype, self.layer.scaling.recipe.fast_accum, source)

    def gradient(self, dy: torch.Tensor) -> Float8Tensor:
        recipe = self.layer.scaling.recipe
        data, scale = self.layer.quantize("gradient", dy, recipe.gradient)
        return Float8Tensor(data, scale, dy.dtype, recipe.fast_accum_backward, dy)

    def weight(self, w: torch.Tensor, transposed: bool = False) -> Float8Tensor:
        return Float8Tensor(*weights(self.kept, [w], self.layer.scaling.recipe, transposed))


# Tensors and quantizers


def float8_dtype(where: str, dtype) -> torch.dtype:
    """The dtype for torch's or TransformerEngine's name of it."""
    for found in (torch.float8_e4m3fn, torch.float8_e5m2):
        if dtype is found or str(dtype).endswith(("E4M3", "E5M2")[found == torch.float8_e5m2]):
            return found
    raise TypeError(f"{where}={dtype!r} must be torch.float8_e4m3fn or torch.float8_e5m2")


def float8_tensor(where: str, tensor):
    """A Float8Tensor for one of TransformerEngine; what is of no quantized class, itself. ValueError for other ones."""
    if type(tensor) is torch.Tensor or isinstance(tensor, Float8Tensor) or tensor is None:
        return tensor
    if hasattr(tensor, "_fp8_dtype") and hasattr(tensor, "_data") and hasattr(tensor, "_scale_inv"):
        if tensor._data is None:
            raise ValueError(f"{where} is a {type(tensor).__name__} without rowwise data; quantize with rowwise=True")
        nominal = getattr(tensor, "dtype", None) or getattr(tensor, "_dtype", torch.bfloat16)
        data = tensor._data.view(float8_dtype(f"{where}._fp8_dtype", tensor._fp8_dtype))
        return Float8Tensor(data, tensor._scale_inv, nominal)
    if hasattr(tensor, "_rowwise_data"):
        raise ValueError(
            f"{where}, a {type(tensor).__name__}, {LACKING}; quantize with Float8Quantizer or "
            f"Float8CurrentScalingQuantizer"
        )
    return tensor


def check_quantizer(where: str, quantizer):
    """Raise ValueError for a quantizer of another kind than those with one scale for a tensor."""
    kinds = {kind.__name__ for kind in type(quantizer).__mro__}
    if not callable(quantizer) or not kinds & {"Float8Quantizer", "Float8CurrentScalingQuantizer"}:
        raise ValueError(
            f"{where}={type(quantizer).__name__} {LACKING}; pass a Float8Quantizer or a Float8CurrentScalingQuantizer"
        )


def _values(where: str, tensor) -> torch.Tensor:
    """The tensor that a quantizer was called with. Raises TypeError or ValueError for what it can't quantize."""
    check_dense(where, tensor=tensor)
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{where}: tensor is {tensor.dtype}, but must be float32, float16 or bfloat16")
    if tensor.dim() == 0:
        raise ValueError(f"{where}: tensor is a scalar, but must have a dimension")
    return tensor.detach()


class Float8Quantizer:
    """Delayed scaling: quantizer(x) is x * scale, saturated, and writes the largest finite |x| to amax[0].

    scale: fp32 of one element, by which values are multiplied. amax: fp32 of one or more elements. fp8_dtype: torch's,
    or TransformerEngine's name of it. rowwise, columnwise: no effect; a transpose is copied where a product needs it.
    """

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype, *, rowwise=True, columnwise=True):
        check_dense("Float8Quantizer", scale=scale, amax=amax)
        if scale.dtype != torch.float32 or amax.dtype != torch.float32 or scale.numel() != 1 or amax.numel() == 0:
            raise ValueError(
                f"Float8Quantizer: scale is {scale.dtype} {list(scale.shape)} and amax {amax.dtype} "
                f"{list(amax.shape)}, but both must be float32, scale of one element and amax of one or more"
            )
        if amax.requires_grad or amax.numel() > 1 and 0 in amax.stride():
            raise ValueError("Float8Quantizer: amax is written to, but wants a gradient or is expanded; pass a copy")
        self.scale, self.amax, self.dtype = scale, amax, float8_dtype("Float8Quantizer: fp8_dtype", fp8_dtype)

    def __call__(self, tensor: torch.Tensor) -> Float8Tensor:
        x = _values("Float8Quantizer", tensor)
        if not x.device == self.scale.device == self.amax.device:
            raise ValueError(
                f"Float8Quantizer: tensor is on {x.device}, scale on {self.scale.device} and amax on "
                f"{self.amax.device}, but all must be on one device"
            )
        largest = self.amax.view(-1)[:1]
        if x.numel():
            largest.zero_()
        data, inverse = quantize_by(x, None, self.scale.view(1), largest, self.dtype)
        return Float8Tensor(data, inverse.view(1), x.dtype)


class Float8CurrentScalingQuantizer:
    """Current scaling: quantizer(x) is x / scale, whose largest element is the largest number of the format.

    with_amax_reduction: the ranks of amax_reduction_group share the largest of their scales, which is then collective.
        No product here needs it.
    device, rowwise, columnwise: no effect.
    """

    def __init__(
        self, fp8_dtype, device=None, *, rowwise=True, columnwise=True, with_amax_reduction: bool = False,
        amax_reduction_group=None, force_pow_2_scales: bool = False,
    ):  # fmt: skip
        self.dtype = float8_dtype("Float8CurrentScalingQuantizer: fp8_dtype", fp8_dtype)
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales

    def __call__(self, tensor: torch.Tensor) -> Float8Tensor:
        x = _values("Float8CurrentScalingQuantizer", tensor)
        data, scale = tkernels.quantize(x, "tensor", self.dtype, power_of_two=self.force_pow_2_scales)
        if self.with_amax_reduction:
            dist.all_reduce(scale, dist.ReduceOp.MAX, group=self.amax_reduction_group)
            data, _ = quantize_by(x, None, scale.reciprocal().view(1), None, self.dtype)
        return Float8Tensor(data, scale.view(1), x.dtype)
