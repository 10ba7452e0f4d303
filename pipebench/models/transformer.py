"""Decoder-only transformer language model, pre-norm, as embedding, attention and feed-forward halves, and head.

The two halves of a block are layers of their own, so that a partition can cut between them.
Shape suffixes: B samples, T tokens, D width, H heads, F feed-forward width, V vocabulary.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipebench.config import TransformerConfig
from pipebench.linear import Linear
from pipebench.models.layers import LayerSequence, one_by_one
from pipebench.models.losses import next_token

_INIT_STD = 0.02


class Embedding(nn.Module):
    """Token plus learned position embedding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.ties = {"token.weight": "token"} if config.tied else {}
        nn.init.normal_(self.token.weight, std=_INIT_STD)
        nn.init.normal_(self.position.weight, std=_INIT_STD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: Tensor = self.dropout(self.token(tokens_BT) + self.position(positions_T))
        return x_BTD


class FusedAttention(nn.Module):
    """torch's kernel: the scores are never kept, so there is nothing to recompute."""

    def forward(self, q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)


class ExplicitAttention(nn.Module):
    """The same written out, as it is where no kernel knows a model's scores: the softmax (B, H, T, T) is kept."""

    scores = True

    def forward(self, q_BHTd: Tensor, k_BHTd: Tensor, v_BHTd: Tensor) -> Tensor:
        tokens, depth = q_BHTd.shape[-2:]
        later_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=q_BHTd.device).triu(1)
        scores_BHTT = q_BHTd @ k_BHTd.transpose(-2, -1) / math.sqrt(depth)
        return scores_BHTT.masked_fill(later_TT, -math.inf).softmax(-1) @ v_BHTd


_ATTENTIONS: dict[str, type[nn.Module]] = {"fused": FusedAttention, "explicit": ExplicitAttention}


class Attention(nn.Module):
    """Causal self-attention half of a block, its residual connection included."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = nn.LayerNorm(config.width)
        self.query_key_value = _linear(config.width, 3 * config.width, _INIT_STD)
        self.project = _linear(config.width, config.width, _residual_std(config))
        self.dropout = nn.Dropout(config.dropout)
        self.attend = _ATTENTIONS[config.attention]()

    def forward(self, x_BTD: Tensor) -> Tensor:
        samples, tokens, width = x_BTD.shape
        qkv = self.query_key_value(self.norm(x_BTD)).view(samples, tokens, 3, self.heads, width // self.heads)
        q_BHTd, k_BHTd, v_BHTd = qkv.permute(2, 0, 3, 1, 4)
        y_BHTd = self.attend(q_BHTd, k_BHTd, v_BHTd)
        y_BTD = y_BHTd.transpose(1, 2).reshape(samples, tokens, width)
        update_BTD: Tensor = self.dropout(self.project(y_BTD))
        return x_BTD + update_BTD


class FeedForward(nn.Module):
    """Feed-forward half of a block, its residual connection included."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.widen = _linear(config.width, config.feed_forward, _INIT_STD)
        self.narrow = _linear(config.feed_forward, config.width, _residual_std(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden_BTF = functional.gelu(self.widen(self.norm(x_BTD)), approximate="tanh")
        update_BTD: Tensor = self.dropout(self.narrow(hidden_BTF))
        return x_BTD + update_BTD


class Head(nn.Module):
    """Final norm and projection to the vocabulary, by the embedding's table where that is tied."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.project = Linear(config.width, config.vocabulary, bias=False)
        self.ties = {"project.weight": "token"} if config.tied else {}
        nn.init.normal_(self.project.weight, std=_INIT_STD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.project(self.norm(x_BTD))
        return logits_BTV


def transformer(config: TransformerConfig) -> LayerSequence:
    blocks = (partial(Attention, config), partial(FeedForward, config)) * config.layers
    makers = (partial(Embedding, config), *blocks, partial(Head, config))
    return LayerSequence(config.num_layers, one_by_one(makers), next_token.mean, next_token.count, next_token.metrics)


def _residual_std(config: TransformerConfig) -> float:
    """Keep the residual stream's scale independent of depth (Radford et al. 2019, section 2.3)."""
    return _INIT_STD / math.sqrt(2 * config.layers)


def _linear(inputs: int, outputs: int, std: float) -> Linear:
    linear = Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear
