"""A decoder in the manner of Llama (RMSNorm, rotary positions, SwiGLU, grouped-query attention, untied head), and sums
to learn: `12+7=19`, of which only the answer counts in the loss.
"""

import torch
from torch import nn
from torch.nn import functional as F

PADDING = -100
WORDS = "0123456789+= "


def rotate(x, base=10000.0):
    """Turn pairs of features by their position; x is (batch, heads, tokens, features)."""
    tokens, features = x.shape[-2:]
    frequencies = base ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.arange(tokens, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, width, heads, key_value_heads):
        super().__init__()
        self.heads, self.key_value_heads, self.size = heads, key_value_heads, width // heads
        self.query = nn.Linear(width, heads * self.size, bias=False)
        self.key = nn.Linear(width, key_value_heads * self.size, bias=False)
        self.value = nn.Linear(width, key_value_heads * self.size, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, tokens, width = x.shape
        q = self.query(x).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        k = self.key(x).view(batch, tokens, self.key_value_heads, self.size).transpose(1, 2)
        v = self.value(x).view(batch, tokens, self.key_value_heads, self.size).transpose(1, 2)
        repeats = self.heads // self.key_value_heads
        k, v = rotate(k).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(batch, tokens, width))


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, key_value_heads, hidden):
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, key_value_heads)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


def llama(width=64, depth=4, heads=4, key_value_heads=2, hidden=176):
    layers = [DecoderLayer(width, heads, key_value_heads, hidden) for _ in range(depth)]
    head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, len(WORDS), bias=False))
    return [nn.Embedding(len(WORDS), width), *layers, head]


def sums(step, batch, seed, digits=3):
    """Return tokens and for each the next one; padding where that is not part of the answer."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    pairs = torch.randint(10**digits, (batch, 2), generator=generator).tolist()
    length = 3 * digits + 3
    tokens = torch.full((batch, length + 1), WORDS.index(" "))
    targets = torch.full((batch, length), PADDING)
    for sample, (a, b) in enumerate(pairs):
        question, text = f"{a}+{b}=", f"{a}+{b}={a + b} "
        tokens[sample, : len(text)] = torch.tensor([WORDS.index(letter) for letter in text])
        answer = slice(len(question) - 1, len(text) - 1)
        targets[sample, answer] = tokens[sample, 1:][answer]
    return tokens[:, :-1].contiguous(), targets
