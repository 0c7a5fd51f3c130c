"""Who does the arithmetic of a step.

`TorchCompute` is PyTorch: any device, any dtype, and the reference. `kernels.NativeCompute` is this
package's own kernels for float32 on CPUs. The decoder knows neither.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lorry.engines.embedded.attention import Attention, StepPlan
from lorry.engines.embedded.family import Family
from lorry.engines.embedded.kernels import NativeLoraStep
from lorry.engines.embedded.layers import Rope, rms_norm, rotate, silu_gate
from lorry.engines.embedded.lowrank import DOWN, GATE_UP, OUT, QKV, LoraStep
from lorry.engines.embedded.parameters import LayerWeights, Matrix

AnyLoraStep = LoraStep | NativeLoraStep


class Compute(Protocol[Matrix]):
    """The decoder's layers and its head."""

    def matrix(self, weight: Tensor) -> Matrix:
        """A projection's `weight` [out, in], made ready."""

    def head(self, weight: Tensor) -> Matrix:
        """The same for [vocab, hidden], which may be the embedding too and is not changed."""

    def layers(
        self,
        layers: Sequence[LayerWeights[Matrix]],
        x: Tensor,
        plan: StepPlan,
        lora: AnyLoraStep | None,
        cache: Tensor,
    ) -> Tensor:
        """All `layers` on `x` [rows, hidden], whose rows are those of the plan; keys and values go
        to `cache`.

        `x` may be used up.
        """

    def logits(self, x: Tensor, norm: Tensor, head: Matrix) -> Tensor:
        """[rows, vocab] of the RMS norm of `x` [rows, hidden]."""


class TorchCompute:
    """PyTorch, operation by operation."""

    def __init__(self, family: Family, rope: Rope) -> None:
        """Sizes, and the positions' tables."""
        self._family = family
        self._rope = rope
        self._attention = Attention(family)

    def matrix(self, weight: Tensor) -> Tensor:
        """[out, in] -> [in, out], laid out as this device multiplies fastest.

        In float32 on CPUs, MKL's product of a few rows takes a fifth less time with the matrix
        stored as it is used; oneDNN in bfloat16 and CUDA do not care.
        """
        turned = weight.t()
        plain = weight.device.type == "cpu" and weight.dtype == torch.float32
        return turned.contiguous() if plain else turned

    def head(self, weight: Tensor) -> Tensor:
        """A view: a copy of the largest matrix would not pay."""
        return weight.t()

    def layers(
        self,
        layers: Sequence[LayerWeights[Tensor]],
        x: Tensor,
        plan: StepPlan,
        lora: AnyLoraStep | None,
        cache: Tensor,
    ) -> Tensor:
        """See `Compute`."""
        assert not isinstance(lora, NativeLoraStep), "kernels' adapters on PyTorch's layers"
        if plan.fresh is not None:
            cache.index_fill_(1, plan.fresh, 0)
        cos, sin = self._rope.rows(plan.positions, plan.last_position)
        for index, layer in enumerate(layers):
            normed = rms_norm(x, layer.input_norm, self._family.norm_eps)
            qkv = _product(normed, layer.qkv, layer.qkv_bias)
            if lora is not None:
                lora.apply(index, QKV, normed, qkv)
            mixed = self._mix(layer, plan, qkv, cos, sin, cache[index])
            x = _add_product(x, mixed, layer.o, layer.o_bias)
            if lora is not None:
                lora.apply(index, OUT, mixed, x)
            x = self._feed(index, layer, lora, x)
        return x

    def _mix(
        self,
        layer: LayerWeights[Tensor],
        plan: StepPlan,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
    ) -> Tensor:
        """Attention of one layer: rotates `qkv` [rows, q + k + v] in place and caches it; [rows,
        q]."""
        family = self._family
        heads = qkv[:, : family.q_size + family.kv_size].view(len(qkv), -1, family.head_dim)
        if layer.qk_norm is not None:
            heads.copy_(rms_norm(heads, layer.qk_norm, family.norm_eps))
        rotate(heads, cos, sin)
        cache.view(-1, 2 * family.kv_size).index_copy_(0, plan.writes, qkv[:, family.q_size :])
        return self._attention.compute(plan, qkv, cache)

    def _feed(
        self, index: int, layer: LayerWeights[Tensor], lora: LoraStep | None, x: Tensor
    ) -> Tensor:
        """Feed-forward block of one layer."""
        normed = rms_norm(x, layer.post_norm, self._family.norm_eps)
        gate_up = _product(normed, layer.gate_up, layer.gate_up_bias)
        if lora is not None:
            lora.apply(index, GATE_UP, normed, gate_up)
        inner = silu_gate(gate_up)
        out = _add_product(x, inner, layer.down, layer.down_bias)
        if lora is not None:
            lora.apply(index, DOWN, inner, out)
        return out

    def logits(self, x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        """See `Compute`."""
        return torch.mm(rms_norm(x, norm, self._family.norm_eps), head)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_product(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual + x @ weight (+ bias), in one call where there is no bias."""
    out = torch.addmm(residual, x, weight)
    return out if bias is None else out.add_(bias)
