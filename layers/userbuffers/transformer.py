"""MultiheadAttention and TransformerLayer, with TransformerEngine's arguments in its order and torch's attention."""

import contextlib
import copy
import math

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tkernels.comm.arguments import check_dense, check_flags, check_type
from tkernels.layers.userbuffers.linear import (
    LayerNormLinear,
    Linear,
    ParallelModule,
    check_number,
    constructor,
    divide,
    given,
    refuse,
    taken,
)
from tkernels.layers.userbuffers.mlp import LayerNormMLP

MASKS = ("causal", "no_mask", "arbitrary")
FORMATS = ("sbhd", "bshd")
# Arguments of forward that are refused, with the values allowed besides None.
REFUSED_INPUTS = dict.fromkeys((
    "encoder_output", "enc_dec_attn_mask", "inference_params", "core_attention_bias", "alibi_slopes", "cu_seqlens_q",
    "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv",
), ()) | {
    "core_attention_bias_type": ("no_bias",), "fast_zero_fill": (True, False), "pad_between_seqs": (False,),
}  # fmt: skip


class AttentionModule(ParallelModule):
    """Base class of what attends over this rank's heads."""

    softmax_scale = None

    def _configure_attention(
        self, num_attention_heads, num_gqa_groups, attention_dropout, attn_mask_type, window_size, qkv_format, **_
    ) -> int:
        """Take of a constructor's arguments those of attention; returns the groups of all ranks."""
        kind, groups = type(self).__name__, num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_attention(kind, attn_mask_type, window_size, qkv_format, self.sequence_parallel)
        check_number(kind, 1.0, attention_dropout=attention_dropout)
        self.attn_mask_type, self.attention_dropout, self.qkv_format = attn_mask_type, attention_dropout, qkv_format
        self.num_heads = divide(kind, "num_attention_heads", num_attention_heads, self.tp_size)
        self.num_groups = divide(kind, "num_gqa_groups", groups, self.tp_size)
        divide(kind, "num_attention_heads", num_attention_heads, groups)
        return groups

    def _asked(self, where: str, mask_type: str | None, mask, window, layout: str, /, **inputs) -> tuple:
        """The mask's type and the mask to apply, or None. Raises ValueError or TypeError for what isn't supported.

        As in TransformerEngine, a mask that isn't asked for is ignored: frameworks always pass one.
        """
        mask_type = self.attn_mask_type if mask_type is None else mask_type
        check_attention(where, mask_type, window, layout, self.sequence_parallel)
        check_inputs(where, **inputs)
        if mask_type != "arbitrary":
            return mask_type, None
        if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
            raise ValueError(f"{where}: attn_mask_type='arbitrary' needs an attention_mask of booleans")
        check_dense(where, attention_mask=mask)
        return mask_type, mask

    def _attention(self, parts, attention_mask, mask_type: str, layout: str) -> torch.Tensor:
        """query [s, b, heads, width], key and value [s, b, groups, width] -> [s, b, heads * width], or all [b, s, ...].

        attention_mask: as _asked returns it.
        """
        order, back = ((1, 2, 0, 3), (2, 0, 1, 3)) if layout == "sbhd" else ((0, 2, 1, 3), (0, 2, 1, 3))
        query, key, _ = parts = [part.permute(order) for part in parts]
        if attention_mask is not None:
            found, scores = attention_mask.shape, (*query.shape[:3], key.shape[2])
            sizes = zip(found[::-1], scores[::-1], strict=False)
            fits = len(found) <= len(scores) and all(size in (1, whole) for size, whole in sizes)
            if not fits or attention_mask.device != query.device:
                raise ValueError(
                    f"{type(self).__name__}: attention_mask is {list(found)} on {attention_mask.device}, but must fit "
                    f"the scores, {list(scores)} of [b, heads, s, s] on {query.device}"
                )
        with self._rng():
            context = functional.scaled_dot_product_attention(
                *parts,
                attn_mask=None if attention_mask is None else ~attention_mask,
                dropout_p=self.attention_dropout if self.training else 0.0,
                is_causal=mask_type == "causal",
                scale=self.softmax_scale,
                enable_gqa=self.num_groups != self.num_heads,
            )
        return context.permute(back).flatten(2)


class MultiheadAttention(AttentionModule):
    """Self-attention: qkv (column parallel), attention over this rank's heads, proj (row parallel).

    attn_mask_type: causal, no_mask, or arbitrary with attention_mask in forward.
    num_gqa_groups: the number of groups of heads that share keys and values.
    fuse_qkv_params: one weight for qkv; else its three parts are copied into one in each forward.
    qkv_weight_interleaved: with fuse_qkv_params, the rows of that weight are ordered group by group (queries, key,
        value) instead of all queries first.
    input_layernorm: qkv is a LayerNormLinear. As in TransformerEngine, qkv overlaps only then. Its communicators are
        those named qkv; proj uses those named proj.
    qkv_format: sbhd, or bshd without sequence_parallel.
    return_bias, return_layernorm_output, and the rest: as LayerNormLinear's.

    Refused: qk_norm_type, other kinds of softmax, interleaved rotation, cross-attention and sliding windows. seq_length
    and micro_batch_size have no effect. The arguments of forward are in TransformerEngine's order up to rotary_pos_emb.
    """

    _ignored = r"(core_attention\.(.+\.)?)?_extra_state"

    @constructor
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method=None,
        output_layer_init_method=None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_group=None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker=None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str = "cuda",
        qkv_format: str = "sbhd",
        name: str | None = None,
        *,
        delay_wgrad_compute: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        rotary_pos_interleaved: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ):
        options = given(locals())
        super().__init__()
        kind = "MultiheadAttention"
        refuse(
            kind, qk_norm_type=qk_norm_type, rotary_pos_interleaved=rotary_pos_interleaved,
            softmax_type=softmax_type != "vanilla" and softmax_type,
            attention_type=attention_type != "self" and attention_type,
        )  # fmt: skip
        if return_layernorm_output and not input_layernorm:
            raise ValueError(f"{kind}: return_layernorm_output=True needs input_layernorm=True")
        self._configure(**options)
        if not set_parallel_mode and self.tp_size > 1:
            raise ValueError(f"{kind}: tp_size={self.tp_size} splits the heads; pass set_parallel_mode=True")
        groups = self._configure_attention(**options)
        check_number(kind, math.inf, layernorm_epsilon=layernorm_epsilon)
        if kv_channels is None:
            kv_channels = divide(kind, "hidden_size", hidden_size, num_attention_heads)
        self.head_dim = divide(kind, "kv_channels", kv_channels, 1)
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.input_layernorm, self.return_layernorm_output = input_layernorm, return_layernorm_output
        self.return_bias, self.layer_number = return_bias, layer_number

        query, keys = num_attention_heads * self.head_dim, groups * self.head_dim
        mode = ("column", "row") if set_parallel_mode else (None, None)
        parts = None if fuse_qkv_params else {"query": query, "key": keys, "value": keys}
        inner = options | {"name": None, "eps": layernorm_epsilon}
        column = inner | {"parallel_mode": mode[0], "parameters_split": parts, "return_bias": False, "ub_name": "qkv"}
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(hidden_size, query + 2 * keys, **taken(LayerNormLinear, column))
        else:
            column = {name: value for name, value in column.items() if not name.startswith("ub_")}
            self.qkv = Linear(hidden_size, query + 2 * keys, **taken(Linear, column))
        row = inner | {"parallel_mode": mode[1], "init_method": output_layer_init_method, "ub_name": "proj"}
        self.proj = Linear(query, hidden_size, **taken(Linear, row))

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_output=None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch=None,
        checkpoint_core_attention: bool = False,
        inference_params=None,
        rotary_pos_emb=None,
        *,
        rows=None,
        **options,
    ):
        """x [s/P, b, hidden] -> same shape; then proj's bias (return_bias), then the norm's output if requested.

        attention_mask: [.., s, s], True where a query must not attend. Used by attn_mask_type arbitrary only.
        attn_mask_type: overrides the layer's.
        checkpoint_core_attention: recompute attention in backward.
        rotary_pos_emb: angles [at least s, 1, 1, at most the width of a head] for queries and keys, or a pair of them.
        is_first_microbatch: no effect; concerns fp8.

        Refused: encoder_output, sliding windows, inference_params, attention biases and sequences of several lengths.
        """
        mask_type, attention_mask = self._asked(
            "MultiheadAttention.forward", attn_mask_type, attention_mask, window_size, self.qkv_format,
            encoder_output=encoder_output, inference_params=inference_params, **options,
        )  # fmt: skip
        check_flags("MultiheadAttention.forward", checkpoint_core_attention=checkpoint_core_attention)
        normed = ()
        if isinstance(hidden_states, torch.Tensor) and hidden_states.dim() != 3 and not hidden_states.is_nested:
            found = list(hidden_states.shape)
            raise TypeError(f"MultiheadAttention: the input has shape {found} and must be a tensor of [s, b, hidden]")
        mixed = (self.layernorm_qkv if self.input_layernorm else self.qkv)(hidden_states, rows=rows)
        if self.return_layernorm_output:
            mixed, *normed = mixed
        inputs = mixed, attention_mask, mask_type, rotary_pos_emb
        if checkpoint_core_attention:
            context = checkpoint(self._attend, *inputs, use_reentrant=False, context_fn=self._replayed)
        else:
            context = self._attend(*inputs)
        output = self.proj(context, rows=rows)
        results = (*(output if self.return_bias else (output,)), *normed)
        return results if len(results) > 1 else results[0]

    def _attend(self, mixed, attention_mask, mask_type, rotary_pos_emb):
        heads, groups, width = self.num_heads, self.num_groups, self.head_dim
        if self.qkv_weight_interleaved:
            mixed = mixed.view(*mixed.shape[:2], groups, heads // groups + 2, width)
            query, key, value = (part.flatten(2, 3) for part in mixed.split([heads // groups, 1, 1], dim=3))
        else:
            query, key, value = mixed.split([heads * width, groups * width, groups * width], dim=-1)
            query, key, value = (part.unflatten(-1, (-1, width)) for part in (query, key, value))
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            if len(angles) != 2:
                raise ValueError(f"rotary_pos_emb: it has {len(angles)} tensors; pass one, or a pair")
            query, key = (rotate(*each, self.qkv_format) for each in zip((query, key), angles, strict=True))
        return self._attention((query, key, value), attention_mask, mask_type, self.qkv_format)

    def _replayed(self):
        """Contexts for forward and recomputation, in which the tracker's generators draw the same numbers."""
        if self.get_rng_state_tracker is None:
            return contextlib.nullcontext(), contextlib.nullcontext()
        return contextlib.nullcontext(), _InStates(self.get_rng_state_tracker())


class TransformerLayer(ParallelModule):
    """self_attention, then layernorm_mlp, each with a residual connection.

    ub_tp_comm_overlap: enables the other ub_ options.
    apply_residual_connection_post_layernorm: the residual is the output of the norm, not its input.

    Other arguments as MultiheadAttention's and LayerNormMLP's. Refused: layer_type other than "encoder",
    output_layernorm, parallel_attention_mlp, drop_path_rate and sliding windows. layer_number, seq_length,
    micro_batch_size and the enc_dec options have no effect here.
    """

    @constructor
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method=None,
        output_layer_init_method=None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group=None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker=None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        device: torch.device | str = "cuda",
        attn_input_format: str = "sbhd",
        name: str | None = None,
        *,
        delay_wgrad_compute: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        rotary_pos_interleaved: bool = False,
        softmax_type: str = "vanilla",
    ):
        options = given(locals())
        super().__init__()
        refuse(
            "TransformerLayer", output_layernorm=output_layernorm, parallel_attention_mlp=parallel_attention_mlp,
            drop_path_rate=drop_path_rate, layer_type=layer_type != "encoder" and layer_type,
        )  # fmt: skip
        self._configure(**options)
        check_number("TransformerLayer", 1.0, hidden_dropout=hidden_dropout)
        self.hidden_dropout = hidden_dropout
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        inner = options | {name: ub_tp_comm_overlap and on for name, on in options.items() if name.startswith("ub_")}
        inner |= {
            "name": None, "eps": layernorm_epsilon, "attn_mask_type": self_attn_mask_type,
            "qkv_format": attn_input_format, "input_layernorm": True, "return_bias": True,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
        }  # fmt: skip
        self.self_attention = MultiheadAttention(**taken(MultiheadAttention, inner))
        self.layernorm_mlp = LayerNormMLP(**taken(LayerNormMLP, inner))

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output=None,
        enc_dec_attn_mask=None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        is_first_microbatch=None,
        checkpoint_core_attention: bool = False,
        inference_params=None,
        rotary_pos_emb=None,
        *,
        rows=None,
        **options,
    ):
        """x [s/P, b, hidden] -> same shape. Arguments as MultiheadAttention's; those of a decoder are refused."""
        check_inputs("TransformerLayer.forward", enc_dec_attn_mask=enc_dec_attn_mask)
        attended = self.self_attention(
            hidden_states, attention_mask, encoder_output, self_attn_mask_type, window_size, is_first_microbatch,
            checkpoint_core_attention, inference_params, rotary_pos_emb, rows=rows, **options,
        )  # fmt: skip
        hidden_states = self._add(attended, hidden_states)
        return self._add(self.layernorm_mlp(hidden_states, rows=rows), hidden_states)

    def _add(self, output, residual):
        output, bias, *normed = output
        if bias is not None:
            output = output + bias.to(output.dtype)
        # With torch's own generator, as in TransformerEngine: without sequence_parallel all ranks must use one mask.
        output = functional.dropout(output, self.hidden_dropout, self.training)
        return (normed[0] if normed else residual) + output


def rotate(x: torch.Tensor, angles: torch.Tensor, layout: str) -> torch.Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864): x [s, b, heads, width] or [b, s, heads, width].

    angles: [at least s, 1, 1, features], as TransformerEngine's RotaryPositionEmbedding makes them. Feature i of the
        first half is rotated with feature i of the second half; the features beyond these are unchanged.
    """
    check_type("rotary_pos_emb: angles", angles, torch.Tensor, "a tensor, or a pair of them")
    check_dense("rotary_pos_emb", angles=angles)
    if angles.device != x.device:
        raise ValueError(f"rotary_pos_emb: the angles are on {angles.device}, but the heads on {x.device}; move them")
    length, features = x.shape[FORMATS.index(layout)], math.inf if angles.dim() == 0 else angles.shape[-1]
    fits = angles.dim() == 4 and angles.shape[1:3] == (1, 1) and angles.shape[0] >= length and features <= x.shape[-1]
    if not fits or features % 2:
        raise ValueError(
            f"rotary_pos_emb: angles of shape {list(angles.shape)} don't fit {length} positions of heads of "
            f"{x.shape[-1]} features; they must be [at least {length}, 1, 1, an even number of at most {x.shape[-1]}]"
        )
    angles = angles[:length].to(torch.promote_types(angles.dtype, torch.float32))
    angles = angles if layout == "sbhd" else angles.transpose(0, 1)
    turned, rest = x.split([features, x.shape[-1] - features], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


class _InStates:
    """A context in which a tracker's generators have these states. At exit, the current states are restored."""

    def __init__(self, tracker):
        self.tracker, self.states = tracker, tracker.get_states()

    def __enter__(self):  # as often as backward recomputes: Megatron's tracker writes to what it was given
        self.now = self.tracker.get_states()
        self.tracker.set_states(copy.copy(self.states))

    def __exit__(self, *exception):
        self.tracker.set_states(self.now)


def check_inputs(where: str, **options):
    """Raise ValueError for arguments that only TransformerEngine's layers support, TypeError for unknown ones."""
    for name, value in options.items():
        if name not in REFUSED_INPUTS:
            raise TypeError(f"{where}: there is no argument {name!r}")
        if value is not None and not (isinstance(value, (str, bool)) and value in REFUSED_INPUTS[name]):
            raise ValueError(f"{where}: {name} is not supported; leave it out")


def check_attention(kind: str, mask: str, window, layout: str, sequence_parallel: bool):
    if not isinstance(mask, str) or mask not in MASKS:
        raise ValueError(f"{kind}: attn_mask_type={mask!r} is not supported; use {', '.join(MASKS)}")
    if window is not None and (not isinstance(window, (tuple, list)) or tuple(window) not in ((-1, -1), (-1, 0))):
        raise ValueError(f"{kind}: window_size={window} is not supported; leave it out")
    if not isinstance(layout, str) or layout not in FORMATS or (layout == "bshd" and sequence_parallel):
        raise ValueError(f"{kind}: qkv_format={layout!r} is not supported; use sbhd, or bshd without sequence_parallel")
