"""A transformer encoder with a classifier on the mean of what it makes of the tokens.

Attention is written out with ``nn.Linear`` alone. ``nn.TransformerEncoderLayer`` reads the weights
of its parts without calling them, which ZeRO-3 cannot see: it gathers a module's weights when that
module is called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder."""

    hidden: int = 256
    """Numbers of a token's state, a multiple of ``heads``."""
    ffn: int = 1024
    """Inner size of the feed-forward."""
    layers: int = 6
    heads: int = 8
    max_length: int = 1024
    """Tokens of a review, at most."""
    dropout: float = 0.2
    """Share of values that training leaves out."""


def sines(hidden: int, max_length: int) -> Tensor:
    """Return sines and cosines of every position, (max_length, hidden).

    They are added to the tokens, so that equal words at two places differ.
    """
    position = torch.arange(max_length)[:, None]
    rate = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000.0) / hidden))
    table = torch.zeros(max_length, hidden)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)[:, : hidden // 2]
    return table


class Block(nn.Module):
    """Self-attention and feed-forward, each with a residual and a norm behind it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, ffn, dropout = shape.hidden, shape.ffn, shape.dropout
        self._heads = shape.heads
        self._dropout = dropout
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, ffn), nn.ReLU(), nn.Dropout(dropout), nn.Linear(ffn, hidden)
        )
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return new states (reviews, length, hidden); nobody attends where ``mask`` is False."""
        attended = self.out(self._attend(states, mask))
        states = self.attention_norm(states + self.dropout(attended))
        fed = states + self.dropout(self.feed_forward(states))
        normed: Tensor = self.feed_forward_norm(fed)
        return normed

    def _attend(self, states: Tensor, mask: Tensor) -> Tensor:
        reviews, length, hidden = states.shape
        shape = reviews, length, 3, self._heads, hidden // self._heads
        q, k, v = self.queries_keys_values(states).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask[:, None, None, :],
            dropout_p=self._dropout if self.training else 0.0,
        )
        return mixed.transpose(1, 2).reshape(reviews, length, hidden)


class SentimentEncoder(nn.Module):
    """Tokens to two scores."""

    def __init__(self, vocab_size: int, pad_id: int, shape: Shape | None = None) -> None:
        """Make it with random weights; the embedding of ``pad_id``, the padding, stays zero."""
        super().__init__()
        shape = shape or Shape()
        hidden, dropout = shape.hidden, shape.dropout
        self._scale = math.sqrt(hidden)
        self.embedding = nn.Embedding(vocab_size, hidden, padding_idx=pad_id)
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)
        with torch.no_grad():
            self.embedding.weight[pad_id].zero_()
        self.positions: Tensor
        self.register_buffer("positions", sines(hidden, shape.max_length), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.classifier = nn.Sequential(
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, NUM_CLASSES),
        )

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return scores (reviews, 2) of tokens (reviews, length), padded where not ``mask``."""
        states = self.embedding(tokens) * self._scale
        positions = self.positions[: states.shape[1]].to(states.dtype)
        states = self.dropout(states + positions)
        for block in self.blocks:
            states = block(states, mask)
        scores: Tensor = self.classifier(masked_mean(states, mask))
        return scores


def masked_mean(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens of each review, (reviews, hidden).

    Padding, where ``mask`` is False, counts neither above nor below the line.
    """
    weights = mask[:, :, None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)
