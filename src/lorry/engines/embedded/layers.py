"""The small steps of a decoder layer: RMS norm, rotary positions, gated activation. Numerics follow
transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lorry.engines.embedded.family import Family

ROPE_ROWS_FIRST = 2048
"""The table begins with this many positions and doubles as needed: few sequences use all that a
model allows."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, computed in float32 and rounded before the weight is applied, as
    transformers does."""
    if x.dtype == torch.float32:
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (x * scale).mul_(weight)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def silu_gate(gate_up: Tensor) -> Tensor:
    """[rows, 2 * inner] -> silu(gate) * up, [rows, inner]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


class Rope:
    """Cosines and sines by position, in the model's dtype."""

    def __init__(
        self,
        config: Mapping[str, Any],
        family: Family,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """The table itself is made when positions are first asked for."""
        self._inverse, self._scaling = rope_frequencies(config, family)
        self._dtype = dtype
        self._device = device
        self._cos = self._sin = torch.empty(0)

    def rows(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, 1, head_dim] for `positions` [rows], the largest of which is `last`.

        The sine of the first half is negated: with it, rotating is `x * cos + swap_halves(x) *
        sin`.
        """
        cos, sin = self.tables(last)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def tables(self, last: int) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, 1, head_dim] for at least the positions up to `last`."""
        if last >= self._cos.shape[0]:
            self._grow(last + 1)
        return self._cos, self._sin

    def _grow(self, rows: int) -> None:
        count = max(ROPE_ROWS_FIRST, 2 * self._cos.shape[0], rows)
        angles = torch.outer(torch.arange(count, dtype=torch.float32), self._inverse)
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        self._cos = self._table(cos, cos)
        self._sin = self._table(-sin, sin)

    def _table(self, first: Tensor, second: Tensor) -> Tensor:
        both = torch.cat((first, second), dim=-1).unsqueeze(1)
        return both.to(device=self._device, dtype=self._dtype)


def rope_frequencies(config: Mapping[str, Any], family: Family) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32, and the factor on cosines and sines.

    Scaled ones come from transformers' own functions; it takes seconds to import, so not for plain
    ones.
    """
    if family.rope_type == "default":
        steps = torch.arange(0, family.head_dim, 2, dtype=torch.float32) / family.head_dim
        return 1.0 / (family.rope_theta**steps), 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    own = {key: value for key, value in config.items() if key != "model_type"}
    model_type = family.architecture.removesuffix("ForCausalLM").lower()
    parsed = AutoConfig.for_model(model_type, **own)
    inverse, scaling = ROPE_INIT_FUNCTIONS[family.rope_type](parsed, torch.device("cpu"))
    return inverse, float(scaling)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary positions, in place: `heads` [rows, heads, head_dim], `cos` and `sin` of
    `Rope.rows`."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    heads.mul_(cos).addcmul_(swapped, sin)
