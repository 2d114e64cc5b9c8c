"""Linear and LayerNormLinear with TransformerEngine's arguments in its order, and the base class of all layers here."""

import contextlib
import copy
import functools
import inspect
import itertools
import math
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable
from numbers import Integral, Real

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tkernels.comm.arguments import LARGEST, check_dense, check_flags, check_type, several, whole
from tkernels.comm.collectives import check_rows, split_rows
from tkernels.comm.context import group_of
from tkernels.layers.marks import RANKS, MarkedModule
from tkernels.layers.tensor_parallel import dataflow
from tkernels.layers.tensor_parallel.activations import GATES
from tkernels.layers.tensor_parallel.float8 import check_features
from tkernels.layers.tensor_parallel.linear import check_place
from tkernels.layers.userbuffers import float8, registry
from tkernels.layers.userbuffers.communicators import CommOverlapType
from tkernels.layers.userbuffers.distributed import Distributed, Gather

# The attributes that hold a layer's overlaps: for each, the type of its communicator, and whether it must be bulk.
FLAGS = {
    "ub_overlap_ag_fprop": (CommOverlapType.AG, False),
    "ub_overlap_rs_dgrad": (CommOverlapType.RS, False),
    "ub_bulk_dgrad": (CommOverlapType.AG, True),
    "ub_bulk_wgrad": (CommOverlapType.RS, True),
    "ub_overlap_rs_fprop": (CommOverlapType.RS, False),
    "ub_overlap_ag_dgrad": (CommOverlapType.AG, False),
}


PLAIN = str, bool, Integral, Real, tuple, list, dict, torch.dtype, type(None)  # of arguments that ranks compare
OWN = (  # those that they need not have alike: each rank's own, and without effect
    "name", "device", "tp_size", "layer_number", "rng_tracker_name", "init_method", "output_layer_init_method",
    "get_rng_state_tracker", "seq_length", "micro_batch_size", "enc_dec_attn_mask_type", "enc_dec_window_size",
    "cp_global_ranks", "cp_stream", "cp_comm_type",
)  # fmt: skip


def constructor(init):
    """A layer's constructor, as `registry.constructing` has it."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def construct(self, *arguments, **options):
        asked = options
        with contextlib.suppress(TypeError):  # which the constructor raises
            asked = signature.bind(self, *arguments, **options).arguments
        with registry.constructing(type(self).__name__, asked.get("tp_group"), asked.get("tp_size", 1)):
            init(self, *arguments, **options)

    return construct


class ParallelModule(dataflow.DeferringModule, MarkedModule):
    """Base class of the layers: the group, the refused options, parameters, and deferred weight gradients."""

    _marked = None  # the name of the context that parts are marked with
    _ignored = "_extra_state"  # entries of a state dict, TransformerEngine's of fp8, that have no place here

    def _configure(
        self, tp_group=None, tp_size=1, sequence_parallel=False, fuse_wgrad_accumulation=False,
        delay_wgrad_compute=False, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None,
        symmetric_ar_type=None, name=None, output_layer_init_method=None, **_,
    ):  # fmt: skip
        """Take of a constructor's arguments those that all layers have."""
        self.name, name = name, type(self).__name__
        if symmetric_ar_type not in (None, "two_shot"):
            raise ValueError(
                f"{name}: symmetric_ar_type={symmetric_ar_type!r} is not supported; pass 'two_shot' or None"
            )
        divide(name, "tp_size", tp_size, 1)
        if tp_group is not None:  # determines the size by itself, as in TransformerEngine
            group = group_of(tp_group, f"{name}: tp_group")
            asked, tp_size, tp_group = tp_size, group.size, group.process_group
            if asked not in (1, tp_size):
                raise ValueError(f"{name}: tp_group has {tp_size} ranks, but tp_size={asked}")
        for option, value in (
            ("init_method", init_method), ("output_layer_init_method", output_layer_init_method),
            ("get_rng_state_tracker", get_rng_state_tracker),
        ):  # fmt: skip
            check_type(f"{name}: {option}", value, (Callable, type(None)), "a function or None")
        self.tp_group, self.tp_size = tp_group, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.wgrad_store = [] if delay_wgrad_compute else None
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.symmetric_ar_type = symmetric_ar_type
        self.init_method = init_method or functools.partial(nn.init.normal_, mean=0.0, std=0.023)
        self._init_methods = {}  # by parameter
        self._float8 = {}  # by ub_name and what a recipe asks: a LayerScaling, whose histories outlast other recipes

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        # FSDP puts others there after each gather, whose counts of writes tell nothing.
        if name in self.__dict__.get("_parameters", ()):
            for scaling in self.__dict__.get("_float8", {}).values():
                scaling.copies.forget()

    def __deepcopy__(self, memo):
        memo[id(self.tp_group)] = self.tp_group  # a copied layer is on the same ranks
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(vars(self), memo))
        return copied

    def _effective(
        self, mode, ub_name, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, **_
    ) -> dict[str, bool]:
        """The FLAGS in effect, out of those requested. Raises if one has no communicator, or one of another kind."""
        name, bulk = type(self).__name__, ub_bulk_dgrad or ub_bulk_wgrad
        if bulk and mode == "column" and self.sequence_parallel and registry.using_cublasmp_backend():
            instead = "dx is reduced inside its GEMM, with the all-gather of x beside it"
            warnings.warn(f"{name}({ub_name}): with_cublasmp=True has no bulk overlap; {instead}", stacklevel=5)
            ub_overlap_rs_dgrad = True
        asked = {
            "column": {
                "ub_overlap_ag_fprop": ub_overlap_ag,
                "ub_overlap_rs_dgrad": ub_overlap_rs_dgrad,
                "ub_bulk_dgrad": ub_bulk_dgrad and not ub_overlap_rs_dgrad,
                "ub_bulk_wgrad": ub_bulk_wgrad and not ub_overlap_rs_dgrad,
            },
            "row": {"ub_overlap_rs_fprop": ub_overlap_rs, "ub_overlap_ag_dgrad": ub_overlap_ag},
        }.get(mode, {})
        wanted = [flag for flag, on in asked.items() if on and self.sequence_parallel]
        flags = {flag: flag in wanted for flag in FLAGS}
        if self.tp_size > 1 and not self.sequence_parallel and any(asked.values()):
            warnings.warn(
                f"{name}({ub_name}): the ub_ options have no effect without sequence_parallel=True", stacklevel=5
            )
        if flags["ub_bulk_wgrad"] and self.wgrad_store is not None:
            raise ValueError(
                f"{name}: delay_wgrad_compute=True leaves no GEMM for ub_bulk_wgrad to run beside; drop one of them"
            )
        if wanted and ub_name is None:
            raise ValueError(f"{name}: {wanted[0]} needs ub_name, one of qkv, fc1 (column), proj, fc2 (row)")
        modes = [use_fp8 for use_fp8 in (False, True) if registry.has_mode(use_fp8)] or [False]
        for use_fp8, flag in itertools.product(modes, wanted):
            self._communicator(flag, ub_name, use_fp8)
        if wanted and self.tp_group is not None:
            registry.check_group(name, self.tp_group)
        return flags

    def _communicator(self, flag: str, ub_name: str, use_fp8: bool):
        """The communicator of an overlap in that mode. Raises if there is none, or one of another kind."""
        product = f"{ub_name}_{flag.rpartition('_')[2]}"
        comm, (kind, bulk) = registry.get_ub(product, use_fp8), FLAGS[flag]
        if comm.comm_type is not kind or (comm.options.method == "bulk") != bulk:
            raise ValueError(
                f"{type(self).__name__}: {flag} needs {product} to be {'a bulk' if bulk else 'an overlapped'} "
                f"{kind.name}, but it is {comm!r}; choose its method in ub_cfgs, or another ub_name"
            )
        return comm

    def set_tensor_parallel_group(self, tp_group):
        """Set the group, if it didn't exist at construction. None: the group of initialize_ub.

        Raises ValueError for a group of another size, or of other ranks than the communicators'.
        """
        if tp_group is not None:
            group = group_of(tp_group, "set_tensor_parallel_group: tp_group")
            if group.size != self.tp_size:
                raise ValueError(f"{type(self).__name__}: the group has {group.size} ranks, but tp_size={self.tp_size}")
            if self._overlaps():
                registry.check_group(type(self).__name__, group.process_group)
            tp_group = group.process_group
        self.tp_group = tp_group
        for child in self._parallel_children():
            child.set_tensor_parallel_group(tp_group)

    def backward_dw(self):
        for child in self._parallel_children()[::-1]:
            child.backward_dw()
        super().backward_dw()

    def _parallel_children(self) -> list["ParallelModule"]:
        """The layers that this one consists of, in forward's order."""
        return [child for child in self.children() if isinstance(child, ParallelModule)]

    def _overlaps(self) -> bool:
        return any(vars(self).get(flag) for flag in FLAGS)

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, unexpected, errors)
        unexpected[:] = [name for name in unexpected if not re.fullmatch(re.escape(prefix) + self._ignored, name)]

    def _parameter(self, name: str, shape, dim: int | None, device, dtype, init_method=nn.init.zeros_, **marks):
        """Register this rank's part of a parameter, split along `dim` (None: not split), with Megatron's attributes."""
        check_place(type(self).__name__, device, dtype)
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._init_methods[name] = init_method
        self._initialize(name)
        if self.wgrad_store is not None and name.endswith("weight") and not name.startswith("layer_norm"):
            marks["skip_backward_post_hook"] = True
        self._mark_part(name, dim, self.tp_size, **marks)
        self._mark_context()

    def reset_parameters(self, defer_init: bool = False):
        """Initialize this layer's own parameters as construction does.

        Parameters that are still on the meta device move to the communicators' device, or without any to the GPU.
        defer_init: do nothing; the name is TransformerEngine's.
        """
        if defer_init:
            return
        if any(parameter.is_meta for parameter in self.parameters(recurse=False)):
            device = registry.domain_context().device if registry.is_ub_initialized() else "cuda"
            self.to_empty(device=device, recurse=False)
        for name in self._init_methods:
            self._initialize(name)

    def _ranks_with_parts(self) -> list[int]:
        split = any(marks["tensor_model_parallel"] for marks in vars(self).get("_marks", {}).values())
        known = self.tp_group is not None or registry.is_ub_initialized()
        return dist.get_process_group_ranks(self._group()) if split and known else []

    def _mark_context(self):
        """Mark parts with the communicators' context, if they are over it, so that optimizers' first steps compare."""
        if self.tp_size == 1 or not registry.is_ub_initialized():
            return
        context = registry.domain_context()
        if self._marked != context.name and self._ranks_with_parts() == context.group.global_ranks:
            self._marked = context.name
        for name, marks in vars(self).get("_marks", {}).items():
            if marks["tensor_model_parallel"] and marks.get(RANKS) != self._marked:
                self._mark(name, **{RANKS: self._marked})

    def _initialize(self, name: str):
        with self._rng(), torch.no_grad():
            self._init_methods[name](getattr(self, name))

    def _rng(self):
        if self.get_rng_state_tracker is None:
            return contextlib.nullcontext()
        tracker = self.get_rng_state_tracker()
        if not hasattr(tracker, "fork"):
            raise TypeError(
                f"{type(self).__name__}: get_rng_state_tracker() returned {type(tracker).__name__}, which has no "
                f"fork(); pass a function that returns a tracker, such as Megatron's get_cuda_rng_tracker"
            )
        return tracker.fork(*() if self.rng_tracker_name is None else (self.rng_tracker_name,))

    def _norm_parameters(self, prefix, shape, normalization, zero_centered_gamma, device, dtype, **marks):
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"{type(self).__name__}: normalization={normalization!r} must be LayerNorm or RMSNorm")
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        fill = nn.init.zeros_ if zero_centered_gamma else nn.init.ones_
        self._parameter(f"{prefix}weight", shape, None, device, dtype, fill, **marks)
        if normalization == "LayerNorm":
            self._parameter(f"{prefix}bias", shape, None, device, dtype, **marks)
        else:
            setattr(self, f"{prefix}bias", None)

    def _normalize(self, x: torch.Tensor, mode, rows) -> tuple:
        """(the norm's output, mode): with return_layernorm_output_gathered that of all ranks, of which mode is None."""
        check_input(type(self).__name__, x, self.layer_norm_weight)
        normed = normalize(
            x, self.layer_norm_weight, self.layer_norm_bias, self.normalization, self.eps, self.zero_centered_gamma
        )
        if not (self.return_layernorm_output_gathered and self.sequence_parallel and mode == "column"):
            return normed, mode
        if rows is not None:
            raise ValueError(
                f"{type(self).__name__}: return_layernorm_output_gathered gathers equal parts, so rows={rows} can't be "
                f"passed; leave out one of them"
            )
        return Gather.apply(normed, self._group()), None

    @torch._disable_dynamo  # a trace can't look into communicators, which are Python objects
    def _product(self, x, weights, bias, mode, flags, ub_name, rows=None, activation=None) -> torch.Tensor:
        """x [..., I] -> [..., O] by the dataflow that mode and flags select. weights: one parameter, or its parts.

        bias: to be added, or None. activation: of x, of which it makes I features, as `dataflow.linear` takes it.
        """
        self._refuse_ddp()
        self._mark_context()
        check_input(type(self).__name__, x, weights[0], 2 if activation in GATES else 1)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        inner = x.shape[1:-1].numel()
        if inner == 0:
            raise ValueError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)}, and thus no tokens whatever the sequence's "
                f"length; of its dimensions only the first one may be 0"
            )
        scaling, quantizers, dtype = float8.current(), None, None
        if scaling is not None:
            device = x.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
            check_features(type(self).__name__, in_features=weight.shape[1], out_features=weight.shape[0])
            if (ub_name, scaling) not in self._float8:
                self._float8[ub_name, scaling] = float8.LayerScaling(scaling)
            quantizers = self._float8[ub_name, scaling].for_call(weights)
        if rows is not None:
            rows = several(f"{type(self).__name__}: rows", rows, "every rank's number of rows")
            rows = [whole(f"{type(self).__name__}: rows", n) * inner for n in rows]
        flow = self._flow(mode, x.shape[:-1].numel(), rows, flags, ub_name, dtype)
        wgrad = dataflow.WeightGradient(weights[0], self.fuse_wgrad_accumulation, self.wgrad_store)
        if mode != "row" or bias is None:
            return dataflow.linear(x, weight, bias, flow, wgrad, quantizers, activation)
        y = dataflow.linear(x, weight, None, flow, wgrad, quantizers, activation)
        return y + bias.to(y.dtype)  # after the sum over ranks

    def _flow(self, mode, tokens: int, rows, flags: dict, ub_name: str | None, dtype: torch.dtype | None):
        """dtype: of what products of FP8 give, None of others, whose operands communicators look at themselves."""
        if mode is None or self.tp_size == 1:
            return dataflow.Local()
        use_fp8 = float8.current() is not None
        # None where the sequence is not split, as after Megatron's set_model_to_sequence_parallel(model, False).
        flags = [flag for flag in FLAGS if flags[flag] and self.sequence_parallel]
        comms = {flag: self._communicator(flag, ub_name, use_fp8) for flag in flags}
        for flag, comm in comms.items():
            if dtype is not None and not comm.is_fp8_ubuf() and comm.dtype != dtype:
                raise ValueError(
                    f"{type(self).__name__}: {flag} reduces results of {dtype}, but initialize_ub() took "
                    f"dtype={comm.dtype}; pass it dtype={dtype}"
                )
        if comms:
            context = next(iter(comms.values())).context
            if rows is None and mode == "row":
                rows = split_rows(tokens, self.tp_size)
            rows = check_rows(type(self).__name__, context, rows, **{"own" if mode == "column" else "total": tokens})
        elif rows is not None:
            raise ValueError(f"{type(self).__name__}: rows={rows} needs overlap; give the layer ub_ options")
        find, other = comms.get, dataflow.Unfused(next(iter(comms.values()), None) or Distributed(self._group()))
        if mode == "column":
            fprop, dgrad = find("ub_overlap_ag_fprop"), find("ub_overlap_rs_dgrad") or find("ub_bulk_dgrad")
            return dataflow.Column(self.sequence_parallel, rows, other, fprop, dgrad, find("ub_bulk_wgrad"))
        if self.symmetric_ar_type is not None and not self.sequence_parallel:
            if self.tp_group is not None:
                registry.check_group(type(self).__name__, self.tp_group)
            other = dataflow.Fused(registry.domain_context().name)
        return dataflow.Row(
            self.sequence_parallel, rows, other, find("ub_overlap_rs_fprop"), find("ub_overlap_ag_dgrad")
        )

    def _group(self):
        if self.tp_group is None and registry.is_ub_initialized():
            return registry.domain_context().group.process_group
        if self.tp_group is None:
            raise ValueError(
                f"{type(self).__name__}: tp_size={self.tp_size}, but there is no group; pass tp_group, or call "
                f"set_tensor_parallel_group()"
            )
        return self.tp_group


class _Linear(ParallelModule):
    """Common implementation of Linear and LayerNormLinear, which differ in the order of their arguments."""

    def _build(
        self, in_features, out_features, bias, return_bias, parallel_mode, parameters_split, device, params_dtype,
        ub_name, normalization=None, zero_centered_gamma=False, **options,
    ):  # fmt: skip
        self._configure(**options)
        kind, mode = type(self).__name__, parallel_mode
        check_type(f"{kind}: ub_name", ub_name, (str, type(None)), "a name or None")
        self.parallel_mode, self.use_bias, self.return_bias, self.ub_name = mode, bias, return_bias, ub_name
        if mode not in ("column", "row", None):
            raise ValueError(f"{kind}: parallel_mode={mode!r} must be 'column', 'row' or None")
        self.in_features = divide(kind, "in_features", in_features, self.tp_size if mode == "row" else 1)
        self.out_features = divide(kind, "out_features", out_features, self.tp_size if mode == "column" else 1)
        self.apply_bias = self.use_bias and not self.return_bias
        self.gemm_bias_unfused_add = mode == "row" and self.apply_bias
        parts = self._parts(parameters_split, self.tp_size if mode == "column" else 1)
        self.weight_names, self.bias_names = [f"{part}weight" for part in parts], [f"{part}bias" for part in parts]
        if normalization is not None:
            norm = "layer_norm_", int(in_features), normalization, zero_centered_gamma, device, params_dtype
            self._norm_parameters(*norm, sequence_parallel=self.sequence_parallel)
        for part, size in parts.items():
            dim = {"column": 0, "row": 1}.get(mode)
            self._parameter(f"{part}weight", (size, self.in_features), dim, device, params_dtype, self.init_method)
            if not self.use_bias:
                self.register_parameter(f"{part}bias", None)
                continue
            marks = {"sequence_parallel": self.sequence_parallel} if mode == "row" else {}
            self._parameter(f"{part}bias", size, 0 if mode == "column" else None, device, params_dtype, **marks)
        vars(self).update(self._effective(mode, ub_name, **options))

    def _parts(self, parameters_split, divisor: int) -> dict[str, int]:
        kind = type(self).__name__
        if parameters_split is None:
            return {"": self.out_features}
        if self.fuse_wgrad_accumulation or self.wgrad_store is not None:
            raise ValueError(
                f"{kind}: parameters_split has no weight of its own to accumulate to; leave out "
                f"fuse_wgrad_accumulation and delay_wgrad_compute, or the split"
            )
        listing = isinstance(parameters_split, Iterable) and not isinstance(parameters_split, str)
        if not listing or not (names := [*parameters_split]):
            raise TypeError(
                f"{kind}: parameters_split={parameters_split!r} must be a dict of names and sizes, or a list of names"
            )
        wrong = [name for name in names if not isinstance(name, str) or "." in name or names.count(name) > 1]
        if wrong or "layer_norm" in names:
            raise ValueError(
                f"{kind}: parameters_split has {wrong[0] if wrong else 'layer_norm'!r}, but its names, after which "
                f"parameters are named, must be strings without dots, each another one, and not layer_norm"
            )
        if not isinstance(parameters_split, dict):
            share = divide(kind, "out_features", self.out_features, len(names))
            return {f"{part}_": share for part in names}
        parts = {f"{part}_": divide(kind, part, size, divisor) for part, size in parameters_split.items()}
        if sum(parts.values()) != self.out_features:
            raise ValueError(
                f"{kind}: parameters_split={parameters_split} must sum to out_features={self.out_features * divisor}"
            )
        return parts

    def _run(self, x, rows, mode):
        weights = [getattr(self, name) for name in self.weight_names]
        bias = None
        if self.use_bias:
            biases = [getattr(self, name) for name in self.bias_names]
            bias = biases[0] if len(biases) == 1 else torch.cat(biases)
        flags = {flag: getattr(self, flag) for flag in FLAGS}
        return self._product(x, weights, bias if self.apply_bias else None, mode, flags, self.ub_name, rows), bias

    def extra_repr(self) -> str:
        on = [flag for flag in FLAGS if getattr(self, flag)]
        return (
            f"{self.in_features}, {self.out_features}, bias={self.use_bias}, parallel_mode={self.parallel_mode}, "
            f"sequence_parallel={self.sequence_parallel}, tp_size={self.tp_size}, overlap={', '.join(on) or None}"
        )


class Linear(_Linear):
    """y = x @ weight.T + bias, with the weight split over the ranks of tp_group by rows (column) or by columns (row).

    in_features, out_features: of the whole layer.
    parallel_mode: "column", "row" or None.
    sequence_parallel: outside the layer, each rank has its part of the first dimension. Without overlap the parts must
        be equal, as torch.distributed gathers them, which compares them with TORCH_DISTRIBUTED_DEBUG=DETAIL alone.
    fuse_wgrad_accumulation: add the weight's gradient to weight.main_grad.
    return_bias: forward returns (y, bias) and doesn't add the bias.
    parameters_split: {name: out-features of the whole layer}, or the names of equal parts. The parameters are then
        `<name>_weight` and `<name>_bias`, and are copied into one in each forward.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: overlaps, see `dataflow`. They need
        sequence_parallel and tp_size > 1. Flags for the other parallel_mode have no effect, so all may be passed.
    ub_name: the communicators to use: qkv, fc1 (column), proj or fc2 (row). initialize_ub must come first.
    delay_wgrad_compute: backward leaves the weight's gradient to backward_dw().
    symmetric_ar_type: "two_shot": without sequence_parallel, a row layer's sum over ranks overlaps the GEMM of y.
    save_original_input: no effect, but for Megatron, which sets the attribute; concerns fp8.

    A row layer adds its bias after the sum over ranks, to this rank's rows. With sequence_parallel the bias gradient
    must therefore still be summed over ranks: the bias has Megatron's attribute `sequence_parallel`.

    Construction between initialize_ub and destroy_ub, forward and backward are collective. Construction raises
    ValueError, RuntimeError or KeyError for an overlap that has no communicator, and MismatchError if ranks ask for
    different ones. What one rank alone has wrong is raised on all, as ValueError, TypeError or else TkernelsError.
    """

    @constructor
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker=None,
        rng_tracker_name: str | None = None,
        init_method=None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split=None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ):
        options = given(locals())
        super().__init__()
        self.save_original_input = save_original_input
        self._build(**options)

    def forward(self, inp, is_first_microbatch=None, fp8_output: bool = False, fp8_grad: bool = False, *, rows=None):
        """x [s/P, ..., I] or, in row mode, [s, ..., I/P] -> y, or (y, bias) with return_bias.

        rows: every rank's part of the first dimension, if these differ; only with overlap.
        is_first_microbatch: no effect; concerns cached fp8 weights.
        """
        refuse("Linear.forward", fp8_output=fp8_output, fp8_grad=fp8_grad)
        y, bias = self._run(inp, rows, self.parallel_mode)
        return (y, bias) if self.return_bias else y


class LayerNormLinear(_Linear):
    """Linear of a normalised input. Arguments as Linear's, in another order: ub_bulk_wgrad comes before ub_bulk_dgrad.

    eps, normalization ("LayerNorm" or "RMSNorm"), zero_centered_gamma (the stored weight is gamma - 1): of the norm.
    return_layernorm_output: forward also returns the norm's output, last.
    return_layernorm_output_gathered: as return_layernorm_output, with the rows of all ranks. The GEMM then has nothing
        to gather, and ub_overlap_ag has no effect.
    """

    @constructor
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker=None,
        init_method=None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split=None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ):
        options = given(locals())
        super().__init__()
        if parallel_mode == "row":
            raise ValueError("LayerNormLinear: parallel_mode='row' would normalise a part of the features; use Linear")
        check_number("LayerNormLinear", math.inf, eps=eps)
        self.eps, self.return_layernorm_output = eps, return_layernorm_output or return_layernorm_output_gathered
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._build(**options)

    def forward(self, inp, is_first_microbatch=None, fp8_grad: bool = False, *, rows=None):
        """x [s/P, ..., I] -> y, then the bias with return_bias, then the norm's output with return_layernorm_output."""
        refuse("LayerNormLinear.forward", fp8_grad=fp8_grad)
        normed, mode = self._normalize(inp, self.parallel_mode, rows)
        y, bias = self._run(normed, rows, mode)
        results = (y, bias) if self.return_bias else (y,)
        results += (normed,) if self.return_layernorm_output else ()
        return results if len(results) > 1 else y


def given(scope: dict) -> dict:
    """The arguments of the constructor whose locals() these are, which the ranks compare where it is collective.

    Raises TypeError for flags that are no booleans.
    """
    options = {name: value for name, value in scope.items() if name not in ("self", "__class__")}
    defaults, kind = inspect.signature(scope["__class__"].__init__).parameters, type(scope["self"]).__name__
    flags = [name for name, each in defaults.items() if isinstance(each.default, bool) and options[name] is not None]
    check_flags(kind, **{name: options[name] for name in flags})
    shared = {name: value for name, value in options.items() if name not in OWN}
    for name, value in shared.items():
        if isinstance(value, (torch.Tensor, numpy.ndarray)):
            raise TypeError(f"{kind}: {name}={reprlib.repr(value)} must be no array and no tensor")
    alike = {name: value for name, value in shared.items() if isinstance(value, PLAIN)}
    registry.note(f"{kind}({options['ub_name']})" if options.get("ub_name") else kind, alike)
    return options


def taken(kind: type, options: dict) -> dict:
    """Those of the options that the constructor of a layer takes by the same names."""
    return {name: options[name] for name in inspect.signature(kind).parameters if name in options}


def normalize(x, weight, bias, normalization: str, eps: float, zero_centered_gamma: bool) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dimension, in x's dtype."""
    if zero_centered_gamma:  # in fp32: gamma is near 1, where 16-bit dtypes keep only 8 to 11 significant bits
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = bias if bias is None else bias.to(wide)
        return normalize(x.to(wide), weight.to(wide) + 1, bias, normalization, eps, False).to(x.dtype)
    gamma = weight.to(x.dtype)
    if normalization == "RMSNorm":
        return functional.rms_norm(x, gamma.shape, gamma, eps)
    return functional.layer_norm(x, gamma.shape, gamma, bias.to(x.dtype), eps)


def check_input(kind: str, x, weight: torch.Tensor, blocks: int = 1):
    """Raise TypeError or ValueError unless x, of so many blocks, is a tensor for a parameter [..., features]."""
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        found = f"has shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"is {type(x).__name__}"
        raise TypeError(f"{kind}: the input {found} and must be a tensor of [tokens, ..., features]")
    check_dense(kind, x=x)
    if x.device != weight.device:
        raise ValueError(f"{kind}: the input is on {x.device}, but the layer on {weight.device}; move one of them")
    if x.shape[-1] != blocks * weight.shape[-1]:
        raise ValueError(
            f"{kind}: the input has shape {list(x.shape)}, but its last dimension must be {blocks * weight.shape[-1]}"
        )


def check_number(kind: str, most: float, **numbers):
    """Raise ValueError unless each is a number from 0 to `most`."""
    for name, value in numbers.items():
        if not isinstance(value, Real) or not 0 <= value <= most:
            raise ValueError(f"{kind}: {name}={value!r} must be a number from 0 to {most:g}")


def divide(kind: str, what: str, size: int, parts: int) -> int:
    if not isinstance(size, Integral) or not 1 <= size <= LARGEST:
        raise ValueError(f"{kind}: {what}={size!r} must be a positive integer, no larger than torch can count")
    if size % parts:
        raise ValueError(f"{kind}: {what}={size} doesn't divide by {parts}; pad it, or use fewer ranks")
    return int(size) // parts


def refuse(where: str, **options):
    """Raise ValueError for any of the options that is set; these layers don't support them."""
    for name, value in options.items():
        if not (value is None or isinstance(value, (bool, int, float)) and not value):
            raise ValueError(f"{where}: {name}={value!r} is not supported; leave it out")
