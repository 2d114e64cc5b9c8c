"""LayerNorm, RMSNorm and DotProductAttention with TransformerEngine's arguments, for layers that are put together."""

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch

from tkernels.comm.arguments import check_dense, check_type, whole
from tkernels.layers.userbuffers.linear import ParallelModule, check_number, divide, given, normalize, refuse
from tkernels.layers.userbuffers.transformer import FORMATS, AttentionModule


class _Norm(ParallelModule):
    """Normalizes over the last dimensions, those of normalized_shape.

    sequence_parallel: marks the parameters for whoever sums their gradients over the ranks.
    params_dtype, hidden_size: older names of dtype and normalized_shape.
    """

    def __init__(
        self,
        normalized_shape=None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device="cuda",
        dtype: torch.dtype | None = None,
    ):
        given(locals())
        super().__init__()
        shape = hidden_size if normalized_shape is None else normalized_shape
        if shape is None:
            raise ValueError(f"{self.normalization}: there is no shape; pass normalized_shape")
        check_type(f"{self.normalization}: normalized_shape", shape, (Integral, Sequence), "a size or several")
        sizes, dtype = (shape,) if isinstance(shape, Integral) else shape, params_dtype if dtype is None else dtype
        shape = tuple(whole(f"{self.normalization}: normalized_shape", size, 1) for size in sizes)
        check_number(self.normalization, math.inf, eps=eps)
        self._configure()
        self.eps = eps
        marks = {} if sequence_parallel is None else {"sequence_parallel": sequence_parallel}
        self._norm_parameters("", shape, type(self).normalization, zero_centered_gamma, device, dtype, **marks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., *normalized_shape] -> same shape."""
        check_dense(self.normalization, x=x)
        if x.shape[-self.weight.dim() :] != self.weight.shape or x.device != self.weight.device:
            raise ValueError(
                f"{self.normalization}: x is {list(x.shape)} on {x.device}, but must be [..., "
                f"{', '.join(map(str, self.weight.shape))}] on {self.weight.device}"
            )
        return normalize(x, self.weight, self.bias, self.normalization, self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    __doc__ = _Norm.__doc__
    normalization = "LayerNorm"


class RMSNorm(_Norm):
    __doc__ = _Norm.__doc__
    normalization = "RMSNorm"


class DotProductAttention(AttentionModule):
    """Attention over this rank's heads, by torch's scaled_dot_product_attention.

    num_attention_heads, num_gqa_groups: of all ranks; a rank has a tp_size-th of them.
    kv_channels: the width of a head, or that of keys and that of values.
    attn_mask_type: causal, no_mask, or arbitrary with attention_mask in forward.
    qkv_format: sbhd, or bshd without sequence_parallel.

    layer_number, cp_global_ranks, cp_stream, cp_comm_type and name have no effect. Refused: context parallelism,
    cross-attention, sliding windows, other kinds of softmax and the largest logit.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ):
        options = given(locals())
        super().__init__()
        kind = "DotProductAttention"
        refuse(
            kind, cp_group=cp_group, return_max_logit=return_max_logit, bottom_right_diagonal=bottom_right_diagonal,
            attention_type=attention_type != "self" and attention_type,
            softmax_type=softmax_type != "vanilla" and softmax_type,
        )  # fmt: skip
        self._configure(**options)
        self._configure_attention(**options)
        widths = kv_channels if isinstance(kv_channels, (tuple, list)) else (kv_channels,) * 2
        self.widths = tuple(divide(kind, "kv_channels", width, 1) for width in widths)
        check_type(f"{kind}: softmax_scale", softmax_scale, (Real, type(None)), "a number or None")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        fp8_output: bool = False,
        num_splits: int | None = 1,
        **options,
    ) -> torch.Tensor:
        """query [s, b, heads/P, width], key and value [s, b, groups/P, width] -> [s, b, heads/P * width of values].

        attention_mask: [.., s, s], True where a query must not attend. Used by attn_mask_type arbitrary only.
        qkv_format, attn_mask_type: override the layer's.

        Refused: sliding windows, recomputation, attention biases, sequences of several lengths and inference_params.
        """
        where = "DotProductAttention.forward"
        layout = self.qkv_format if qkv_format is None else qkv_format
        mask_type, mask = self._asked(where, attn_mask_type, attention_mask, window_size, layout, **options)
        refuse(
            where, bottom_right_diagonal=bottom_right_diagonal, checkpoint_core_attention=checkpoint_core_attention,
            fp8_output=fp8_output, num_splits=num_splits not in (None, 1) and num_splits,
        )  # fmt: skip
        parts = {"query": query_layer, "key": key_layer, "value": value_layer}
        check_dense(where, **parts)
        heads = {"query": self.num_heads, "key": self.num_groups, "value": self.num_groups}
        theirs = query_layer.shape[:2]  # of the part before: queries, keys, values
        for name, part in parts.items():
            width = self.widths[name == "value"]
            if part.shape[2:] != (heads[name], width):
                raise ValueError(
                    f"{where}: {name}_layer has shape {tuple(part.shape)}; its last dimensions must be "
                    f"({heads[name]}, {width}), this rank's heads and their width"
                )
            mixed = part.dtype != query_layer.dtype and not torch.is_autocast_enabled(part.device.type)
            kept = name == "key" and mask_type != "causal"  # as many as the caller has kept of each sequence
            tokens, batch = part.shape[:2], 1 - FORMATS.index(layout)
            belong = tokens[batch] == query_layer.shape[batch] if kept else tokens == theirs
            theirs = tokens
            if mixed or not belong:
                raise ValueError(
                    f"{where}: {name}_layer is {part.dtype} {tuple(part.shape)}, but query_layer {query_layer.dtype} "
                    f"{tuple(query_layer.shape)}; all must be of one dtype and batch, keys and values of one length, "
                    f"which for attn_mask_type='causal' is that of the queries"
                )
        return self._attention(parts.values(), mask, mask_type, layout)
