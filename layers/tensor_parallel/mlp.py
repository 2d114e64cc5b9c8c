"""The transformer's MLP: a column layer, an activation on this rank's features, a row layer."""

import torch
from torch import nn

from tkernels.comm import MeshLike, as_context
from tkernels.comm.arguments import whole
from tkernels.layers.tensor_parallel.activations import GATES, KNOWN, activated
from tkernels.layers.tensor_parallel.float8 import Recipe
from tkernels.layers.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, checking


class ParallelMLP(nn.Module):
    """fc2(activation(fc1(x))): x [..., hidden] -> [..., hidden], or x_shard_m [s/R, ..., hidden] -> the same.

    activation: "relu", "gelu" (exact), "gelu_tanh", "silu", or gated, "swiglu", which is silu(gate) * up, "geglu",
        "geglu_tanh" or "reglu", with gate and up stacked in fc1's weight [2 * ffn_hidden, hidden], gate first. With
        float8 of scales a row it is part of fc2, whose input then is what fc1 gives: one kernel applies it and
        quantizes, and backward computes it again.
    sequence_parallel: input and output are this rank's part of the first dimension, gathered and reduce-scattered
        during the GEMMs. False: input and output are replicated.
    keep_gathered, float8, dtype, device, mesh, init_method: as in ColumnParallelLinear.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        activation: str = "gelu",
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        keep_gathered: bool = True,
        float8: str | Recipe | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        mesh: MeshLike = None,
        init_method=None,
    ):
        super().__init__()
        ctx = as_context(mesh, "ParallelMLP: mesh")
        with checking(ctx, device, "ParallelMLP", alike := {}):
            if not isinstance(activation, str) or activation not in KNOWN:
                raise ValueError(
                    f"ParallelMLP: activation={activation!r} is unknown; use {', '.join(KNOWN[:-1])} or {KNOWN[-1]}"
                )
            hidden = whole("ParallelMLP: hidden", hidden)
            ffn_hidden = whole("ParallelMLP: ffn_hidden", ffn_hidden)
            alike["activation"] = activation
        self.activation = activation
        blocks = 2 if activation in GATES else 1
        common = dict(
            sequence_parallel=sequence_parallel, float8=float8, dtype=dtype, device=device, mesh=ctx,
            init_method=init_method,
        )  # fmt: skip
        self.fc1 = ColumnParallelLinear(
            hidden, blocks * ffn_hidden, bias, partition_stride=blocks, keep_gathered=keep_gathered, **common
        )
        self.fc2 = RowParallelLinear(ffn_hidden, hidden, bias, **common)

    def forward(self, x: torch.Tensor, *, rows: tuple[int, ...] | None = None) -> torch.Tensor:
        """Collective. rows: with sequence_parallel, every rank's length of the first dimension, if they differ."""
        h = self.fc1(x, rows=rows)
        # Not what wraps fc2, or replaces it or its forward.
        own = type(self.fc2).forward is RowParallelLinear.forward and "forward" not in vars(self.fc2)
        if own and self.fc2.quantizes_activations:
            return self.fc2(h, rows=rows, activation=self.activation)
        return self.fc2(activated(h, self.activation), rows=rows)

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
