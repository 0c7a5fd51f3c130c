"""A model's parameters in memory.

Projections that share an input are one matrix, since a decode step pays for each product: q, k and
v in one, gate and up in one.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Matrix = TypeVar("Matrix")
"""A weight as whoever computes wants it."""


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[Matrix]):
    """One decoder layer."""

    input_norm: Tensor
    """[hidden]"""
    qkv: Matrix
    """[hidden, q + k + v]"""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim], Qwen3 only."""
    o: Matrix
    """[q, hidden]"""
    o_bias: Tensor | None
    post_norm: Tensor
    """[hidden]"""
    gate_up: Matrix
    """[hidden, 2 * intermediate]"""
    gate_up_bias: Tensor | None
    down: Matrix
    """[intermediate, hidden]"""
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[Matrix]):
    """A whole model."""

    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[LayerWeights[Matrix], ...]
    norm: Tensor
    """[hidden]"""
    head: Matrix
    """[hidden, vocab]; made of the embedding when tied."""
