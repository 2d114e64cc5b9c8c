"""Weights that are gathered in FP8, for layers that multiply by them in one scale: half of bf16's bytes.

Each rank quantizes its own rows, in the scale of the whole weight: the largest element of all ranks' rows is found
before. The layer is given what it would make itself of the whole weight, or, where `param_dtype` is narrower than the
sharded parameter, what has not been rounded to that first.

    whole   [R * S | P * 16]   bytes: the elements in FP8, laid out as in any group, then each parameter's scale, fp32,
                               16 bytes apart, as cuBLAS wants it

The whole parameter itself, to which autograd gives a gradient in `param_dtype`, is NaN in its shape, without memory.
"""

import math

import torch

import tkernels
from tkernels.comm.regions import round_up
from tkernels.layers.data_parallel.layout import ALIGN
from tkernels.layers.data_parallel.param_group import ParamGroup
from tkernels.layers.tensor_parallel.float8 import GATHERED
from tkernels.quantize import scale_reference

ELEMENTS = torch.float8_e4m3fn
SCALE_BYTES = 16


class Float8Group(ParamGroup):
    """A ParamGroup of weights of layers whose recipe has `gathers_weights`, and one `power_of_two`, over several ranks.

    The weights of one Float8, which its layers stack, have one scale.
    """

    gathered_dtype = torch.uint8

    @property
    def _scales_at(self) -> int:
        return round_up(self.ranks.parts * self.layout.numel, ALIGN)

    @property
    def numel(self) -> int:
        return self._scales_at + len(self.parameters) * SCALE_BYTES

    def _scales(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self._scales_at : self.numel].view(torch.float32)[:: SCALE_BYTES // torch.float32.itemsize]

    def sent(self, whole: torch.Tensor) -> torch.Tensor:
        """Collective. This rank's part in FP8 [S]; the scales, which all ranks have alike, come to their place."""
        parts = [self.flat[part.start :][: part.numel] for part in self.layout.parts]
        largest = torch.stack(torch._foreach_norm(parts, math.inf)).float()
        largest = tkernels.all_gather(largest.view(1, -1), ctx=self.ranks.shard).amax(0)
        layers = [parameter.float8 for parameter in self.parameters]
        for layer in {layer for layer in layers if layers.count(layer) > 1}:
            together = [index for index, each in enumerate(layers) if each is layer]
            most = torch.stack([largest[index] for index in together]).amax()
            for index in together:
                largest[index].copy_(most)
        scales = scale_reference(largest, ELEMENTS, layers[0].recipe.power_of_two)
        self._scales(whole).copy_(scales)
        sent = self.flat.new_empty(self.layout.numel, dtype=ELEMENTS)
        for part, values, inverse in zip(self.layout.parts, parts, (1 / scales).split(1), strict=True):
            sent[part.start :][: part.numel].copy_(values * inverse)  # in fp32, as that of one element is
        return sent.view(torch.uint8)

    def wholes(self, whole: torch.Tensor) -> list[torch.Tensor]:
        nan = dict(dtype=self.param_dtype, device=whole.device)
        return [torch.full((), math.nan, **nan).expand(parameter.shape) for parameter in self.parameters]

    def expose(self, whole: torch.Tensor):
        super().expose(whole)
        elements = self.layout.wholes(whole[: self._scales_at].view(ELEMENTS))
        for parameter, each, scale in zip(self.parameters, elements, self._scales(whole).unbind(), strict=True):
            setattr(parameter.whole, GATHERED, (each, scale))

    def conceal(self):
        super().conceal()
        for parameter in self.parameters:
            delattr(parameter.whole, GATHERED)
