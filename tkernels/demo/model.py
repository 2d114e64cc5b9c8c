"""A character-level transformer in plain torch, and the same one with its linear layers split over ranks.

s positions of a sequence.  b sequences.  d features.  h heads.  V characters.  R ranks.

                                 unsharded       on one of R ranks
    between the linear layers    [s, b, d]       [s/R, b, d]       a part of every sequence (sequence parallel)
    inside attention             h heads         h/R heads         of all positions
    inside the MLP               4d features     4d/R features     of all positions

The model's own code is written for the left column and does not depend on R: it uses the positions that it is given and
as many heads as its first linear layer returns.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tkernels.comm.context import Context
from tkernels.layers import ColumnParallelLinear, RowParallelLinear, parallelize


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model and of a step's batch."""

    vocabulary: int  # V
    sequence: int  # s
    batch: int  # b
    heads: int  # h
    head_features: int = 16
    layers: int = 2

    @property
    def features(self) -> int:
        """d"""
        return self.heads * self.head_features

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequence * self.batch


class Attention(nn.Module):
    """Causal self-attention. qkv's out-features are ordered by head: a slice of them is a slice of the heads."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_features = config.head_features
        self.qkv = nn.Linear(config.features, 3 * config.features)
        self.proj = nn.Linear(config.features, config.features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_features))  # [s, b, h/R, 3, features of a head]
        q, k, v = qkv.permute(3, 1, 2, 0, 4)  # each [b, h/R, s, features of a head]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.permute(2, 0, 1, 3).flatten(2))


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        d = config.features
        self.norm1, self.attention = nn.LayerNorm(d), Attention(config)
        self.norm2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(OrderedDict(fc1=nn.Linear(d, 4 * d), gelu=nn.GELU(), fc2=nn.Linear(4 * d, d)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """tokens [s, b] and their positions [s] -> logits [s, b, V]; s/R instead of s on a rank."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.features)
        self.positions = nn.Embedding(config.sequence, config.features)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.features), nn.Linear(config.features, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                # Biases too, so that a lost or doubled one shows in the first loss.
                nn.init.normal_(parameter, std=0.3 if name == "embedding.weight" else 0.02)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(positions)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "*.qkv": {"style": "column", "sequence_parallel": True},
    "*.proj": {"style": "row", "sequence_parallel": True},
    "*.fc1": {"style": "column", "sequence_parallel": True},
    "*.fc2": {"style": "row", "sequence_parallel": True},
}


def shard(model: Transformer, ctx: Context, float8: str | None = None) -> Transformer:
    """Collective. Split the linear layers of `model` over ranks, in place. Heads and positions must divide by R.

    float8: as of `parallelize`.

    Modules that stay whole (norms, embeddings, head) see only a rank's own positions, so their gradients are partial
    sums. Their parameters get the mark that `all_reduce_sequence_parallel_grads` looks for.
    """
    parallelize(model, PLAN, ctx, float8=float8)
    for module in model.modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            for parameter in module.parameters(recurse=False):
                parameter.sequence_parallel = True
    return model
