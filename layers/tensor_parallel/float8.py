"""FP8 in tensor-parallel linear layers: the output and the input's gradient are products of FP8, with fp32 scales.

    layer            output                                     the input's gradient
    copy             matmul(x, w)                               matmul_all_reduce(dy, w.T)
    gather           all_gather_matmul(x_shard_m, w)            matmul_reduce_scatter(dy, w.T)
    reduce           matmul_all_reduce(x, w)                    matmul(dy, w.T)
    scatter          matmul_reduce_scatter(x, w)                all_gather_matmul(dy_shard_m, w.T)

Copy and gather are column layers, of replicated and of split inputs; reduce and scatter are row layers. Each x, dy, w
and w.T above is quantized on its own, along the dimension that the product sums over, and FP8 is what travels to a
product. The weight's gradient dy.T @ x is a product in the dtype of x. Whichever of its operands has travelled is what
was quantized (its rows, times their scales); the recipe with "gw_hp" gathers it again, unquantized.

The recipe with "gw_fp8" has that product in FP8 as well. It sums over tokens, so both operands are transposed copies of
what was quantized for the other two products, in one scale each: where those of ranks differ, the largest, in which the
others' elements are rounded again. Copying moves 2 bytes an element; to dequantize one, as for a product in bf16, moves
3. And the layer keeps x in FP8 for it, in half the memory.

The activation before a row layer is part of quantizing where scales are of rows: one kernel reads what it is applied to
and writes FP8. Backward has what it was applied to, for its gradient, and applies it again for the weight's gradient.

Copies of weights are kept from call to call until a weight changes (`Copies`). Weights that fully_shard has gathered in
FP8 are multiplied by where they lie (`Gathered`).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdRef

import tkernels
from tkernels.comm import Context, capture, find_context
from tkernels.comm.collectives import check_rows
from tkernels.configs import FP8
from tkernels.kept import optimizer_steps
from tkernels.layers.tensor_parallel.activations import activated, activated_gradient, parts_of
from tkernels.layers.tensor_parallel.functions import column_parallel_linear
from tkernels.leading import Leading
from tkernels.torch_operators import ops


@dataclass(frozen=True, eq=False)
class Float8Tensor:
    """A matrix [..., K] of FP8 with what dequantizes it: it stands for data * scale. The name is TransformerEngine's.

    data: float8_e4m3fn or float8_e5m2. scale: fp32, one number, which may differ between ranks, or one a row [..., 1].
    dtype: of what it stands for, and of its products unless another is asked for.
    fast_accum: of products whose first operand it is, as in tkernels.matmul.
    source: what it was quantized from, while that is at hand.
    """

    data: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype = torch.bfloat16
    fast_accum: bool = True
    source: torch.Tensor | None = None

    _data = property(lambda self: self.data.view(torch.uint8))
    _scale_inv = property(lambda self: self.scale)
    _fp8_dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: self.data.shape)
    device = property(lambda self: self.data.device)

    def dim(self) -> int:
        return self.data.dim()

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What it stands for: the source where that is at hand, else data * scale."""
        if self.source is not None:
            return self.source if dtype is None else self.source.to(dtype)
        return tkernels.dequantize(self.data, self.scale, dtype or self.dtype)

    def rows_of(self, data: torch.Tensor) -> "Float8Tensor":
        """The same of other data, whose scale is one number, or one for each of its rows in the same order."""
        scale = self.scale if self.scale.numel() == 1 else self.scale.reshape(*data.shape[:-1], 1)
        return replace(self, data=data, scale=scale, source=None)

    def flatten(self, first: int, last: int) -> "Float8Tensor":
        return self.rows_of(self.data.flatten(first, last))

    def split(self, rows) -> list["Float8Tensor"]:
        """Its rows in parts, which have a scale for each row if this has."""
        one = self.scale.numel() == 1
        scales = [self.scale] * len(rows) if one else self.scale.split(rows)
        parts = zip(self.data.split(rows), scales, strict=True)
        return [replace(self, data=data, scale=scale, source=None) for data, scale in parts]

    def t(self) -> "Float8Tensor":
        """The transpose, in a copy: products take K contiguous. Raises ValueError where each row has its scale."""
        if self.scale.numel() != 1:
            raise ValueError(
                f"a float8 matrix {list(self.shape)} with a scale for each row has none for each column; quantize its "
                f"transpose, or take one scale for all"
            )
        source = None if self.source is None else self.source.t()
        return replace(self, data=self.data.t().contiguous(), scale=self.scale, source=source)

    def new_empty(self, *shape: int) -> "Float8Tensor":
        """One of that shape with a scale for each row, in a single allocation."""
        size, rows = torch.Size(shape).numel(), torch.Size(shape[:-1]).numel()
        start = -(-size // 16) * 16
        memory = self.data.new_empty(start + 4 * rows, dtype=torch.uint8)
        scale = memory[start:].view(torch.float32).view(*shape[:-1], 1)
        return replace(self, data=memory[:size].view(self.data.dtype).view(shape), scale=scale, source=None)

    def all_gather(self, collective, rows, out: "Float8Tensor | None" = None) -> "Float8Tensor":
        """Collective. All ranks' rows, each with its scale, by `collective(part, out)`. rows: every rank's number."""
        out = self.new_empty(sum(rows), self.shape[1]) if out is None else out
        collective(self.data, out.data)
        collective(self.scale.reshape(-1, 1).expand(self.shape[0], 1).contiguous(), out.scale)
        return out


def values(x: "torch.Tensor | Float8Tensor") -> torch.Tensor:
    """What an operand stands for: itself unless it is of FP8."""
    return x.dequantize() if isinstance(x, Float8Tensor) else x


def memory(x: "torch.Tensor | Float8Tensor") -> torch.Tensor:
    """Where an operand's elements lie: itself unless it is of FP8."""
    return x.data if isinstance(x, Float8Tensor) else x


def operands(x, w) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """(x, w, options): what tkernels' operations take for operands that are both Float8Tensors, or neither."""
    if not isinstance(x, Float8Tensor):
        return x, w, {}
    options = {"x_scale": x.scale, "w_scale": w.scale, "out_dtype": x.dtype, "fast_accum": x.fast_accum}
    return x.data, w.data, options


MULTIPLE = 16  # of which the features on both sides of a layer are multiples on every rank
_BACKWARD = {"copy": "reduce", "reduce": "copy", "gather": "scatter", "scatter": "gather"}


class Recipe(NamedTuple):
    """How a layer multiplies in FP8. The names are torchao's, and so is what they mean, but for the weight's gradient.

    scale: "row", a scale for each row of an operand, or "tensor", one for all that a rank has of it.
    power_of_two: scales are.
    gradient: the dtype of dy; the others are e4m3.
    gathers_again: for the weight's gradient, what has travelled in FP8 travels again as it was.
    fast_accum, fast_accum_backward: of the output and of the gradients, as in tkernels.matmul.
    weight_gradient: in FP8 too, of scales of one kind, "tensor".
    gathers_weights: fully_shard of this library gathers the weights in FP8, for scales of that kind, too.
    """

    scale: str = "row"
    power_of_two: bool = True
    gradient: torch.dtype = torch.float8_e4m3fn
    gathers_again: bool = False
    fast_accum: bool = True
    fast_accum_backward: bool = False
    weight_gradient: bool = False
    gathers_weights: bool = False

    def quantize(
        self, x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, activation: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate, activation = parts_of(x, activation)
        options = {"power_of_two": self.power_of_two, "activation": activation, "gate": gate}
        return tkernels.quantize(x, self.scale, dtype, **options)


RECIPES = {
    "rowwise": Recipe(),
    "rowwise_with_gw_hp": Recipe(gathers_again=True),
    "tensorwise": Recipe("tensor", False, torch.float8_e5m2),
    "tensorwise_with_gw_fp8": Recipe("tensor", False, torch.float8_e5m2, weight_gradient=True),
    "tensorwise_with_fp8_gather": Recipe("tensor", False, torch.float8_e5m2, gathers_weights=True),
}


def recipe_of(caller: str, float8: str | Recipe | None) -> Recipe | None:
    """The recipe of that name. Raises ValueError for none that this library has."""
    if isinstance(float8, Recipe) and (float8.weight_gradient or float8.gathers_weights) and float8.scale != "tensor":
        raise ValueError(
            f'{caller}: {float8} has scales of rows, but weight_gradient=True and gathers_weights=True take '
            f'scale="tensor"'
        )
    if float8 is None or isinstance(float8, Recipe):
        return float8
    if not isinstance(float8, str) or float8 not in RECIPES:
        raise ValueError(f"{caller}: float8={float8!r} is no recipe; use {', '.join(map(repr, RECIPES))} or None")
    return RECIPES[float8]


def recipe_in(module: torch.nn.Module) -> Recipe | None:
    """The recipe of torchao's Float8Linear, None of other modules. Raises ValueError for one without an equal here.

    The weight's gradient is more exact than torchao's where that multiplies it in FP8, and so is a weight that it
    scales as a whole for the input's gradient of row-wise scales.
    """
    kind = type(module)
    if kind.__name__ != "Float8Linear" or not kind.__module__.startswith("torchao."):
        return None
    config = module.config
    casts = config.cast_config_input, config.cast_config_weight, config.cast_config_grad_output
    scales = {cast.scaling_granularity.value for cast in casts}
    plain = all(cast.scaling_type.value == "dynamic" and cast.target_dtype in FP8 for cast in casts)
    gathers = config.enable_fsdp_float8_all_gather
    e4m3 = all(cast.target_dtype == torch.float8_e4m3fn for cast in casts[:2])
    if not plain or not e4m3 or len(scales) > 1 or gathers and scales == {"axiswise"}:
        raise ValueError(
            f"a Float8Linear with {config} has no equal here: all of input, weight and gradient are cast dynamically, "
            f"with scales of one kind, the first two to e4m3, and with enable_fsdp_float8_all_gather one for a tensor"
        )
    return Recipe(
        scale="row" if scales == {"axiswise"} else "tensor",
        power_of_two=config.round_scales_to_power_of_2,
        gradient=casts[2].target_dtype,
        gathers_again=config.cast_config_input_for_grad_weight.scaling_type.value == "disabled",
        fast_accum=config.gemm_config_output.use_fast_accum,
        fast_accum_backward=config.gemm_config_grad_input.use_fast_accum,
        gathers_weights=gathers,
    )


def unwrapped(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that torchao has wrapped, for torch's FSDP2 to gather in FP8; any other as it is."""
    return parameter._tensor if type(parameter).__name__ == "WeightWithDynamicFloat8CastTensor" else parameter


def check_features(caller: str, **features: int):
    """Raises ValueError unless a rank's features, by what they are, can be the rows of FP8 operands."""
    for what, number in features.items():
        if number % MULTIPLE:
            raise ValueError(
                f"{caller}: float8 takes features in multiples of {MULTIPLE} on every rank, but a rank has {number} "
                f"{what.replace('_', '-')}; leave float8 out for this layer, or use other sizes or fewer ranks"
            )


class Copies:
    """Weights in FP8 as a layer multiplies them: stacked [N, K], and transposed [K, N], each with its scales.

    They are kept while nothing tells that a weight may have changed: torch's count of writes to it, its address, an
    optimizer's step, another parameter in its place, as fully_shard puts there after each gather, and functional_call
    for one call, perhaps where an earlier one lay. A write through `weight.data` alone tells nothing, nor one by a
    torch._foreach operation to DTensors, or by a replayed CUDA graph.
    So a forward takes none that were made before it unless its weights have gradients, from an earlier microbatch, or
    need none; and only calls that record a gradient keep any: others, and the graphs of CUDA and torch.compile, don't.
    """

    def __init__(self):
        self.forget()

    def forget(self):
        self._state, self._made = None, {}

    def of(self, parameters, ws, recipe: Recipe, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The copy of ws [N, K], the local tensors of parameters. Writes to a DTensor count at the DTensor alone."""
        stream = torch.cuda.current_stream().cuda_stream if ws[0].is_cuda else 0
        state = recipe, optimizer_steps(), stream, *((WeakIdRef(each), each._version) for each in parameters)
        state += tuple((w.data_ptr(), w._version, w.shape, w.stride(), w.dtype) for w in ws)
        if state != self._state:
            self._state, self._made = state, {}
        if transposed not in self._made:
            self._made[transposed] = quantized_weights(ws, recipe, transposed)
        return self._made[transposed]

    def kept(self, parameters, ws) -> "tuple[Copies, tuple] | None":
        """What `weights` makes a call's copies with; None if they are not kept."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or capture.underway() or ws[0].is_inference():
            return None
        if any(each.requires_grad and (not each.is_leaf or each.grad is None) for each in parameters):
            self.forget()
        return self, tuple(parameters)

    def __reduce__(self):  # copies, too, begin anew
        return Copies, ()


GATHERED = "_tkernels_float8"  # on a parameter: its elements and their scale, as fully_shard has gathered them


class Gathered:
    """Weights that fully_shard has gathered in FP8, in place of `Copies`."""

    @staticmethod
    def of(parameters, ws, recipe: Recipe, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As of Copies. Of what fully_shard has left alone a copy is made."""
        parts = [getattr(each, GATHERED, None) or recipe.quantize(w) for each, w in zip(parameters, ws, strict=True)]
        data, scale = parts[0]
        if len(parts) > 1:
            data = torch.cat([data.view(torch.uint8) for data, _ in parts]).view(data.dtype)
            scale = torch.cat([scale.expand(len(data), 1) for data, scale in parts])
        return ops.transpose_quantized(data, scale) if transposed else (data, scale)


def gathered_by(what: str, places: list[tuple[torch.nn.Module, str]]) -> "Float8 | None":
    """Of the layer for which a parameter with these places, (module, attribute), is to be gathered in FP8, if it is.

    Raises ValueError if others take the same parameter.
    """
    layers = [
        module._float8 if isinstance(module, MultipliesInFloat8) and name == "weight" else None
        for module, name in places
    ]
    gathers = [each is not None and each.recipe.gathers_weights for each in layers]
    if any(gathers) and not all(gathers):
        kind = type(places[gathers.index(False)][0]).__name__
        raise ValueError(
            f"{what} is to be gathered in FP8 (gathers_weights), but is also that of a {kind}, which doesn't take it "
            f"so; untie them, or take a recipe without it"
        )
    return layers[0] if gathers[0] else None


def quantized_weights(ws, recipe: Recipe, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    w = ws[0] if len(ws) == 1 else torch.cat(ws)
    return recipe.quantize(w.t() if transposed else w)


class Float8:
    """What a layer that multiplies in FP8 has: its recipe, and copies of its weights."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.copies = recipe, Copies()

    def product(
        self, kind: str, x, parameters, ws, biases, ctx: Context, dim: int = 0, rows: tuple[int, ...] | None = None,
        keep: bool = True, activation: str | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """x [..., K] times all weights [N, K], with the biases or None: [..., sum of N], in the dtype of x.

        kind: of the table above. parameters: what the weights ws are this rank's parts of. rows: of every rank, of
        dimension `dim`, which is gathered or scattered. keep: what is gathered in forward, for the weights' gradients;
        else it is gathered again, as it was.
        """
        if self.recipe.gathers_weights and torch.compiler.is_compiling():  # it doesn't see what lies beside a weight
            product = torch.compiler.disable(self.product)
            return product(kind, x, parameters, ws, biases, ctx, dim, rows, keep, activation)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "float8: torch.func (grad, vmap and others) can't follow layers that quantize; use backward, or leave "
                "float8 out"
            )
        gathered = self.recipe.gathers_weights and any(hasattr(each, GATHERED) for each in parameters)
        kept = (Gathered, tuple(parameters)) if gathered else self.copies.kept(parameters, ws)
        lengths = None
        if kind in ("gather", "scatter"):
            lengths = check_rows("float8", ctx, rows, **{"own" if kind == "gather" else "total": x.shape[dim]})
        lead = Leading.of("float8", x, lengths and f"{kind}_dim", dim)
        rows = lengths and lead.rows(lengths)
        keep = keep and kind == "gather" and not self.recipe.gathers_again
        options = self.recipe, kept, kind, ctx.name, rows, keep, activation
        y = _Linear.apply(options, len(ws), lead.matrix(x), *ws, *biases)
        if kind == "scatter":
            return lead.back(y, lengths[ctx.rank]).contiguous()
        return lead.back(y, sum(lengths) if kind == "gather" else None)


def products(
    kind: str, x, parameters, ws, biases, ctx: Context, float8: Float8 | None, dim: int = 0,
    rows: tuple[int, ...] | None = None, keep: bool = True, activation: str | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Of each weight, by Float8.product, whose arguments these are, or without float8 in the dtype of x."""
    if float8 is not None:
        y = float8.product(kind, x, parameters, ws, biases, ctx, dim, rows, keep, activation)
        return [y] if len(ws) == 1 else list(y.split([len(w) for w in ws], -1))
    (w, *others), (bias, *_) = ws, biases
    if kind == "gather":
        w, bias = (ws, biases) if others else (w, bias)
        y = tkernels.all_gather_matmul(x, w, bias, return_gathered=keep, gather_dim=dim, rows=rows, ctx=ctx)
        y = y[0] if keep else y
        return y if others else [y]
    if kind == "copy":
        return [column_parallel_linear(x, w, bias, mesh=ctx)]
    if kind == "scatter":
        return [tkernels.matmul_reduce_scatter(x, w, bias, scatter_dim=dim, rows=rows, ctx=ctx)]
    return [tkernels.matmul_all_reduce(x, w, bias, ctx=ctx)]


class MultipliesInFloat8:
    """What modules with a `weight` and FP8 copies of it have in common, beside nn.Module."""

    _float8: Float8 | None = None

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "weight" and self._float8 is not None:
            self._float8.copies.forget()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, number, x, *tensors):
        recipe, kept, kind, context, rows, keep, activation = options
        ws, biases = tensors[:number], tensors[number:]
        bias = _stacked_bias(ws, biases)
        keep = keep and any(ctx.needs_input_grad[2 + 1 : 2 + 1 + number])
        operands = recipe.quantize(x, activation=activation), weights(kept, ws, recipe, False)
        y, quantized = _product(kind, operands, bias, x.dtype, recipe.fast_accum, keep, rows, context)
        if recipe.weight_gradient and kind != "gather":
            quantized = operands[0]
        ctx.options, ctx.number = options, number
        ctx.save_for_backward(*((x, None) if quantized is None else quantized), *ws)
        ctx.dtype, ctx.quantized = x.dtype, quantized is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (recipe, kept, kind, context, rows, _, activation), number = ctx.options, ctx.number
        x, x_scale, *ws = ctx.saved_tensors
        need_x, *needs = ctx.needs_input_grad[2:]
        need_ws, need_biases = any(needs[:number]), any(needs[number:])
        dy, dx, quantized, dws, dbiases = dy.contiguous(), None, None, [None] * number, [None] * number
        fast = recipe.fast_accum_backward
        if need_x:
            keep = kind == "scatter" and need_ws and not recipe.gathers_again
            operands = recipe.quantize(dy, recipe.gradient), weights(kept, ws, recipe, True)
            dx, quantized = _product(_BACKWARD[kind], operands, None, ctx.dtype, fast, keep, rows, context)
            if recipe.weight_gradient and kind != "scatter":
                quantized = operands[0]
            dx = dx if activation is None else activated_gradient(dx, x, activation)
        sizes, own = [len(w) for w in ws], dy
        if need_ws:
            if quantized is None and kind == "scatter":
                dy = tkernels.all_gather(dy, rows=rows, ctx=find_context(context))
            if not ctx.quantized and kind == "gather":
                x = tkernels.all_gather(x, rows=rows, ctx=find_context(context))
            x = x if activation is None else activated(x, activation)
            if recipe.weight_gradient:
                left = recipe.quantize(dy, recipe.gradient) if quantized is None else quantized
                right = (x, x_scale) if ctx.quantized else recipe.quantize(x)
                parts = _gradient_in_float8(left, right, ws[0].dtype, fast).split(sizes)
            else:
                dy = dy if quantized is None else tkernels.dequantize(*quantized, ctx.dtype)
                x = tkernels.dequantize(x, x_scale, ctx.dtype) if ctx.quantized else x
                parts = (part.t() @ x if need else None for need, part in zip(needs, dy.split(sizes, 1), strict=False))
            dws = [part.to(w.dtype) if need else None for w, need, part in zip(ws, needs, parts, strict=False)]
        if need_biases:
            dbias = own.sum(0)
            if kind == "scatter":
                dbias = tkernels.all_reduce(dbias, ctx=find_context(context))
            dbiases = [part if need else None for need, part in zip(needs[number:], dbias.split(sizes), strict=True)]
        return None, None, dx, *dws, *dbiases


def _stacked_bias(ws, biases) -> torch.Tensor | None:
    given = next((bias for bias in biases if bias is not None), None)
    if given is None or len(ws) == 1:
        return given
    return torch.cat([given.new_zeros(len(w)) if bias is None else bias for w, bias in zip(ws, biases, strict=True)])


def _gradient_in_float8(dy, x, dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """dy.T @ x [N, K], of quantized dy [M, N] and x [M, K]."""
    (dy, dy_scale), (x, x_scale) = (ops.transpose_quantized(*each) for each in (dy, x))
    return tkernels.matmul(dy, x, x_scale=dy_scale, w_scale=x_scale, out_dtype=dtype, fast_accum=fast_accum)


def weights(kept: tuple[Copies, tuple] | None, ws, recipe: Recipe, transposed: bool):
    """A call's copy of its weights ws [N, K], stacked, and its scale. kept: as Copies.kept returns it."""
    if kept is None:
        return quantized_weights(ws, recipe, transposed)
    copies, parameters = kept
    return copies.of(parameters, ws, recipe, transposed)


def _product(kind, operands, bias, dtype, fast_accum, keep, rows, context):
    """(y, what was gathered with its scales, if it is kept, else None), of quantized operands."""
    (x, x_scale), (w, w_scale) = operands
    options = {"x_scale": x_scale, "w_scale": w_scale, "out_dtype": dtype, "fast_accum": fast_accum}
    if kind == "copy":
        return tkernels.matmul(x, w, bias, **options), None
    options["ctx"] = find_context(context)
    if kind == "gather":
        result = tkernels.all_gather_matmul(x, w, bias, return_gathered=keep, rows=rows, **options)
        return (result[0], result[1:]) if keep else (result, None)
    if kind == "scatter":
        return tkernels.matmul_reduce_scatter(x, w, bias, rows=rows, **options), None
    return tkernels.matmul_all_reduce(x, w, bias, **options), None
