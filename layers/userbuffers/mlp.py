"""LayerNormMLP, with TransformerEngine's arguments in its order."""

import math

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recompute

from tkernels.layers.tensor_parallel import activations
from tkernels.layers.userbuffers import float8
from tkernels.layers.userbuffers.linear import (
    FLAGS,
    ParallelModule,
    check_number,
    constructor,
    divide,
    given,
    refuse,
)

# TransformerEngine's names of the activations that ParallelMLP has too: that one's names.
SHARED = {
    "gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "geglu": "geglu_tanh", "reglu": "reglu", "swiglu": "swiglu",
}  # fmt: skip
KNOWN = *SHARED, "qgelu", "srelu", "qgeglu"
GATED = "geglu", "reglu", "swiglu", "qgeglu"  # which multiply by the second half of the features


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation in SHARED:
        return activations.activated(x, SHARED[activation])
    if activation == "srelu":
        return functional.relu(x).square()
    x, *up = x.chunk(2, -1) if activation in GATED else (x,)
    x = x * torch.sigmoid(1.702 * x)
    return x * up[0] if up else x


class LayerNormMLP(ParallelModule):
    """fc2(activation(fc1(norm(x)))): with set_parallel_mode, fc1 is column parallel and fc2 row parallel.

    activation: gelu (tanh approximation), relu, silu, qgelu, srelu; or gated: geglu, reglu, swiglu, qgeglu. Gated
        activations double the features of fc1 and activate the first half of each rank's.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: as Linear's, for fc1 and fc2, with
        the communicators of these names.
    checkpoint: recompute everything in backward.
    micro_batch_size, seq_length: no effect here.

    Other arguments as LayerNormLinear's. Parameters: layer_norm_weight, layer_norm_bias, fc1_weight, fc1_bias,
    fc2_weight, fc2_bias.
    """

    @constructor
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker=None,
        tp_group=None,
        tp_size: int = 1,
        init_method=None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict | None = None,
        output_layer_init_method=None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ):
        options = given(locals())
        super().__init__()
        refuse("LayerNormMLP", activation_params=activation_params or None)
        check_number("LayerNormMLP", math.inf, eps=eps)
        if not isinstance(activation, str) or activation not in KNOWN:
            raise ValueError(f"LayerNormMLP: activation={activation!r} is unknown; use {', '.join(KNOWN)}")
        self._configure(**options)
        self.eps, self.activation, self.checkpoint = eps, activation, checkpoint
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output or return_layernorm_output_gathered
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.set_parallel_mode = set_parallel_mode
        self._fc1 = self._effective("column", "fc1", **options)
        self._fc2 = self._effective("row", "fc2", **options)

        if not set_parallel_mode and self.tp_size > 1:
            raise ValueError(f"LayerNormMLP: tp_size={self.tp_size} splits fc1 and fc2; pass set_parallel_mode=True")
        hidden_size = divide("LayerNormMLP", "hidden_size", hidden_size, 1)
        ffn = divide("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size, self.tp_size)
        common = device, params_dtype
        split = {"sequence_parallel": self.sequence_parallel}
        self._norm_parameters("layer_norm_", hidden_size, normalization, zero_centered_gamma, *common, **split)
        fc1 = (2 if activation in GATED else 1) * ffn
        self._parameter("fc1_weight", (fc1, hidden_size), 0, *common, self.init_method)
        self._parameter("fc2_weight", (hidden_size, ffn), 1, *common, output_layer_init_method or self.init_method)
        if bias:
            self._parameter("fc1_bias", fc1, 0, *common)
            self._parameter("fc2_bias", hidden_size, None, *common, **split)
        else:
            self.fc1_bias = self.fc2_bias = None

    def forward(self, inp, is_first_microbatch=None, *, rows=None):
        """x [s/P, ..., hidden] -> same shape; then fc2's bias (return_bias), then the norm's output if requested."""
        if self.checkpoint and torch.is_grad_enabled():
            forward = self._forward
            if not torch.compiler.is_compiling():  # backward may run in another block, or in none
                forward = float8.scaling_of(float8.current())(forward)
            y, normed = recompute(forward, inp, rows, use_reentrant=False)
        else:
            y, normed = self._forward(inp, rows)
        results = (y, self.fc2_bias) if self.return_bias else (y,)
        results += (normed,) if self.return_layernorm_output else ()
        return results if len(results) > 1 else y

    def _forward(self, inp, rows):
        normed, mode = self._normalize(inp, "column", rows)
        h = self._product(normed, [self.fc1_weight], self.fc1_bias, mode, self._fc1, "fc1", rows)
        bias = None if self.return_bias else self.fc2_bias
        fused = SHARED.get(self.activation) if float8.quantizes_activations() else None
        h = h if fused else activated(h, self.activation)
        return self._product(h, [self.fc2_weight], bias, "row", self._fc2, "fc2", rows, fused), normed

    def _overlaps(self) -> bool:
        return any((*self._fc1.values(), *self._fc2.values()))

    def extra_repr(self) -> str:
        on = [f"fc1 {flag}" for flag in FLAGS if self._fc1[flag]] + [f"fc2 {flag}" for flag in FLAGS if self._fc2[flag]]
        return f"activation={self.activation}, tp_size={self.tp_size}, overlap={', '.join(on) or None}"
