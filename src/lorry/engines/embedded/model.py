"""The decoder: one implementation for all families, one pass for a mixed batch of adapters, prefill
and decode."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lorry.engine import BaseShape
from lorry.engines.embedded.attention import Attention, StepPlan, StepPlanner
from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.family import Family, read_family
from lorry.engines.embedded.layers import Rope, rms_norm, rotate, silu_gate
from lorry.engines.embedded.lowrank import DOWN, GATE_UP, OUT, QKV, LoraStep
from lorry.engines.embedded.shape import base_shape, read_config
from lorry.engines.embedded.slots import LoraSlots
from lorry.engines.embedded.weights import (
    LayerWeights,
    ModelWeights,
    Progress,
    load_weights,
    pick_device,
    pick_dtype,
)


class Decoder:
    """One base model in memory, with its paged KV cache. Used from one thread."""

    def __init__(
        self,
        config: dict[str, Any],
        weights: ModelWeights,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Call `load`; this takes what it has read."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self.shape: BaseShape = base_shape(config)
        self._family: Family = read_family(config)
        self.max_context: int = self._family.max_context
        self._weights = weights
        self._rope = Rope(config, self._family, dtype, device)
        self._attention = Attention(self._family)
        self._slots: LoraSlots | None = None
        self._planner: StepPlanner | None = None
        self._cache = torch.empty(0)

    @classmethod
    def load(
        cls,
        model: Path,
        dtype: str = "auto",
        device: str = "auto",
        progress: Progress | None = None,
    ) -> "Decoder":
        """Read a Hugging Face folder, a GGUF file, or a folder with one.

        Raises `ModelUnsupported` before any weight is read, or `ModelInvalid`. `dtype` is "auto",
        "bfloat16" or "float32"; `progress` is called with (bytes done, bytes in all).
        """
        config = read_config(model)
        family = read_family(config)
        place = pick_device(device)
        kind = pick_dtype(dtype, place)
        return cls(config, load_weights(model, family, kind, place, progress), kind, place)

    def attach(self, slots: LoraSlots) -> None:
        """Rows that name a slot use these slots from the next step on."""
        self._slots = slots

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers, keys and values."""
        family = self._family
        return family.layers * block_size * 2 * family.kv_size * self.dtype.itemsize

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Blocks 0 .. num_blocks - 1, one more for padding; what was cached before is dropped."""
        family = self._family
        self._cache = torch.empty(0)
        # Not written to: gigabytes would slow the start, and a block is zeroed at its first use.
        self._cache = torch.empty(
            (family.layers, num_blocks + 1, block_size, 2 * family.kv_heads, family.head_dim),
            dtype=self.dtype,
            device=self.device,
        )
        self._cache[:, num_blocks] = 0
        self._planner = StepPlanner(block_size, num_blocks, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """float32 [logit_rows, vocab] on the decoder's device; keys and values of the batch are
        cached."""
        if self._planner is None:
            raise RuntimeError("allocate_kv comes before forward")
        plan = self._planner.plan(batch)
        if plan.fresh is not None:
            self._cache.index_fill_(1, plan.fresh, 0)
        lora = self._lora_step(plan)
        cos, sin = self._rope.rows(plan.positions, plan.last_position)
        x = self._weights.embedding.index_select(0, plan.tokens)
        for index, layer in enumerate(self._weights.layers):
            x = self._attend(index, layer, plan, lora, x, cos, sin)
            x = self._feed(index, layer, lora, x)
        return self._logits(x.index_select(0, plan.logit_rows))

    def _lora_step(self, plan: StepPlan) -> LoraStep | None:
        if not plan.segments:
            return None
        if self._slots is None:
            raise RuntimeError("a row names a LoRA slot and no slots are attached")
        return self._slots.step(plan.segments)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        plan: StepPlan,
        lora: LoraStep | None,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Attention block of one layer: [rows, hidden] -> [rows, hidden]."""
        family, cache = self._family, self._cache[index]
        normed = rms_norm(x, layer.input_norm, family.norm_eps)
        qkv = _product(normed, layer.qkv, layer.qkv_bias)
        if lora is not None:
            lora.apply(index, QKV, normed, qkv)
        heads = qkv[:, : family.q_size + family.kv_size].view(len(qkv), -1, family.head_dim)
        if layer.qk_norm is not None:
            heads.copy_(rms_norm(heads, layer.qk_norm, family.norm_eps))
        rotate(heads, cos, sin)
        cache.view(-1, 2 * family.kv_size).index_copy_(0, plan.writes, qkv[:, family.q_size :])
        mixed = self._attention.compute(plan, qkv, cache)
        out = _add_product(x, mixed, layer.o, layer.o_bias)
        if lora is not None:
            lora.apply(index, OUT, mixed, out)
        return out

    def _feed(self, index: int, layer: LayerWeights, lora: LoraStep | None, x: Tensor) -> Tensor:
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

    def _logits(self, rows: Tensor) -> Tensor:
        normed = rms_norm(rows, self._weights.norm, self._family.norm_eps)
        return functional.linear(normed, self._weights.head).float()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _add_product(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual + x @ weight (+ bias), in one call where there is no bias."""
    out = torch.addmm(residual, x, weight)
    return out if bias is None else out.add_(bias)
