"""Megatron-LM's parallel linears on these kernels: its own classes, with the GEMMs and their communication replaced.

    from tkernels.layers.doors import megatron

    spec = megatron.get_gpt_layer_local_spec(normalization="RMSNorm")    # or with_kernels(any spec of Megatron's)
    model = GPTModel(config, transformer_layer_spec=spec, ...)

    megatron.convert(model)    # or after construction: any model that holds Megatron's linears

Construction, initial weights, marks, state dicts and distributed checkpoints are Megatron's code, so checkpoints of one
load into the other. Needs megatron-core 0.15 or newer: pip install "tkernels[interop]".
"""

import copy
import dataclasses
import functools

import torch

try:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers

    if not hasattr(layers.ColumnParallelLinear, "_forward_impl"):
        raise ImportError("an older release of megatron-core")
except ImportError as error:
    raise ImportError(
        'tkernels.layers.doors.megatron needs megatron-core 0.15 or newer: pip install "tkernels[interop]"'
    ) from error

from tkernels.comm.arguments import check_dense, check_type
from tkernels.comm.context import as_context
from tkernels.comm.contexts import find_context
from tkernels.layers.tensor_parallel import dataflow
from tkernels.layers.tensor_parallel.functions import scatter_to_tensor_model_parallel_region


def _defers(linear) -> bool:
    return getattr(linear.config, "delay_wgrad_compute", False) and linear.weight is not None


def _check(linear):
    """Raise ValueError for what one of Megatron's linears has and those of this module can't do."""
    kind = f"{type(linear).__name__}({linear.input_size}, {linear.output_size})"
    for name, plain in {"gtp_remat_size": 1, "output_dtype": None}.items():  # of Megatron's newer releases
        if (found := getattr(linear, name, plain)) != plain:
            raise ValueError(f"{kind}: {name}={found} is not supported; leave it out, or use Megatron's own layer")
    if _defers(linear) and getattr(linear.weight, "main_grad", None) is not None:
        raise ValueError(
            f"{kind}: its weight is in Megatron's DistributedDataParallel, whose hook would miss what "
            f"delay_wgrad_compute leaves to backward_dw; make the DDP of the converted model"
        )


class _Overlapped(dataflow.DeferringModule):
    """What both linears have in common. Collective over tp_group: construction, forward, backward.

    Two options of the config do more than in Megatron's classes: gradient_accumulation_fusion needs no extension, and
    with delay_wgrad_compute weight gradients are left to `backward_dw`.
    """

    def __init__(self, input_size: int, output_size: int, *, config, **options):
        built_as = copy.copy(config)
        built_as.gradient_accumulation_fusion = False  # Megatron's constructor would ask for its extension
        super().__init__(input_size, output_size, config=built_as, **options)
        self.config, self.gradient_accumulation_fusion = config, config.gradient_accumulation_fusion
        _check(self)
        self._finish()

    def _finish(self):
        """Collective, unless the layer communicates nothing. The rest of construction, also of a converted layer."""
        alone = self.explicit_expert_comm or self.tp_group is None or self.tp_group.size() == 1
        # Its name: modules are copied and pickled, contexts are not.
        self._context = None if alone else as_context(self.tp_group).name
        if _defers(self):
            self.wgrad_store, self.weight.skip_backward_post_hook = [], True

    def _multiply(self, x, weight, bias, flow, **options) -> torch.Tensor:
        """x [s, b, ...] @ weight.T + bias, communicating as `flow` does; None: as a layer of one rank."""
        kind = type(self).__name__
        check_dense(kind, input=x)
        if x.dim() < 2 or x.shape[-1] != weight.shape[1] or x.device != weight.device:
            raise ValueError(
                f"{kind}: the input is {list(x.shape)} on {x.device}, but must be [s, ..., {weight.shape[1]}] on "
                f"{weight.device}"
            )
        fused = dataflow.Fused(self._context)
        flow = dataflow.Local() if flow is None else flow(self.sequence_parallel, None, fused, **options)
        wgrad = dataflow.WeightGradient(weight, self.gradient_accumulation_fusion, self.wgrad_store)
        return dataflow.linear(x, weight, bias, flow, wgrad)


class ColumnParallelLinear(_Overlapped, layers.ColumnParallelLinear):
    """megatron.core.tensor_parallel.ColumnParallelLinear: the all-gather of x and the sum of dx overlap their GEMMs.

    The arguments are those of Megatron's class, in its order; forward returns (output, bias).

    keep_gathered: with sequence_parallel, keep the gathered input [s, b, h] for the weight's gradient, which takes as
        many times more memory as there are ranks. False, as in Megatron: gather it again.

    As Megatron's own computes it: an output layer whose gradient is deferred (defer_embedding_wgrad_compute).
    """

    keep_gathered = False

    def __init__(self, input_size: int, output_size: int, *, keep_gathered: bool = False, **options):
        super().__init__(input_size, output_size, **options)
        self.keep_gathered = keep_gathered

    def _forward_impl(
        self, input, weight, bias, *, allreduce_dgrad, sequence_parallel, grad_output_buffer=None, **options
    ):
        if grad_output_buffer is not None:
            return super()._forward_impl(
                input, weight, bias=bias, allreduce_dgrad=allreduce_dgrad, sequence_parallel=sequence_parallel,
                grad_output_buffer=grad_output_buffer, **options,
            )  # fmt: skip
        flow = dataflow.Column if allreduce_dgrad or sequence_parallel else None
        keep = self.keep_gathered and weight.requires_grad and torch.is_grad_enabled()
        return self._multiply(input, weight, bias, flow, keep=keep)


class RowParallelLinear(_Overlapped, layers.RowParallelLinear):
    """megatron.core.tensor_parallel.RowParallelLinear: the sum over ranks of y, and the gather of dy, overlap GEMMs.

    The arguments are those of Megatron's class, in its order; forward returns (output, bias).
    """

    def forward(self, input_: torch.Tensor):
        """input_ [s, b, K/R] (or [s, b, K]) -> (output [s, b, N] or its rows [s/R, b, N], bias or None)."""
        if not self.input_is_parallel and self._context is not None:
            input_ = scatter_to_tensor_model_parallel_region(input_, mesh=find_context(self._context))
        alone = self._context is None or self.explicit_expert_comm  # which shared experts set after construction
        y = self._multiply(input_, self.weight, None, None if alone else dataflow.Row)
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias, None


_KERNELS = {layers.ColumnParallelLinear: ColumnParallelLinear, layers.RowParallelLinear: RowParallelLinear}


def with_kernels(spec):
    """A copy of a specification (a ModuleSpec, or Megatron's classes of submodules) with the linears of this module."""
    if isinstance(spec, type):
        return _KERNELS.get(spec, spec)
    if isinstance(spec, functools.partial):
        keywords = {name: with_kernels(value) for name, value in spec.keywords.items()}
        return functools.partial(with_kernels(spec.func), *map(with_kernels, spec.args), **keywords)
    if isinstance(spec, (list, tuple)):
        return type(spec)(map(with_kernels, spec))
    if dataclasses.is_dataclass(spec):
        parts = {field.name: with_kernels(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)
    return spec


@functools.wraps(gpt_layer_specs.get_gpt_layer_local_spec, assigned=())
def get_gpt_layer_local_spec(*arguments, **options):
    """Megatron's function of this name, with the linears of this module: q, k and v, projection, MLP, and experts."""
    return with_kernels(gpt_layer_specs.get_gpt_layer_local_spec(*arguments, **options))


def convert(model: torch.nn.Module) -> torch.nn.Module:
    """Collective. Turn Megatron's linears in a model into those of this module, in place; returns the model.

    Also where a specification doesn't reach: the output layer of GPTModel. Parameters stay the same objects, so an
    optimizer or, without delay_wgrad_compute, DDP may have been made before. Subclasses of Megatron's linears are left
    as they are. Raises ValueError for linears with options that are not supported, before any is converted, and for a
    model that has neither Megatron's linears nor these.
    """
    check_type("convert: model", model, torch.nn.Module, "an nn.Module; of several chunks, convert each")
    linears = [module for module in model.modules() if type(module) in _KERNELS]
    if not linears and not any(isinstance(module, _Overlapped) for module in model.modules()):
        raise ValueError(
            f"convert: no module of this {type(model).__name__} is Megatron's ColumnParallelLinear or "
            f"RowParallelLinear; make it by Megatron's local specification, or by get_gpt_layer_local_spec of this door"
        )
    for linear in linears:
        _check(linear)
    for linear in linears:
        linear.__class__ = _KERNELS[type(linear)]
        linear._finish()
    return model
