"""The decoder: one implementation for all families, one pass for a mixed batch of adapters, prefill
and decode."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorry.engine import BaseShape
from lorry.engines.embedded.attention import StepPlan, StepPlanner
from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.compute import AnyLoraStep, Compute, TorchCompute
from lorry.engines.embedded.family import Family, read_family
from lorry.engines.embedded.kernels import Kernels, NativeCompute, open_kernels
from lorry.engines.embedded.layers import Rope
from lorry.engines.embedded.parameters import ModelWeights
from lorry.engines.embedded.shape import base_shape, read_config
from lorry.engines.embedded.slots import LoraSlots
from lorry.engines.embedded.weights import (
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
        weights: ModelWeights[Any],
        compute: Compute[Any],
        kernels: Kernels | None,
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
        self._compute = compute
        self.kernels = kernels
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
        kernels: str = "auto",
        threads: int = 1,
    ) -> "Decoder":
        """Read a Hugging Face folder, a GGUF file, or a folder with one.

        Raises `ModelUnsupported` before any weight is read, or `ModelInvalid`. `dtype` is "auto",
        "bfloat16" or "float32"; `progress` is called with (bytes done, bytes in all); `kernels` is
        what `open_kernels` takes, and matters for float32 on CPUs only, as `threads` does.
        """
        config = read_config(model)
        family = read_family(config)
        place = pick_device(device)
        kind = pick_dtype(dtype, place)
        rope = Rope(config, family, kind, place)
        own = kind == torch.float32 and place.type == "cpu"
        found = open_kernels(kernels, threads) if own else None
        compute: Compute[Any] = (
            TorchCompute(family, rope) if found is None else NativeCompute(found, family, rope)
        )
        weights = load_weights(model, family, compute, kind, place, progress)
        return cls(config, weights, compute, found, kind, place)

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
        self._planner = StepPlanner(
            block_size, num_blocks, self.dtype, self.device, paged=self.kernels is not None
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """float32 [logit_rows, vocab] on the decoder's device; keys and values of the batch are
        cached."""
        if self._planner is None:
            raise RuntimeError("allocate_kv comes before forward")
        plan = self._planner.plan(batch)
        lora = self._lora_step(plan)
        x = self._weights.embedding.index_select(0, plan.tokens)
        x = self._compute.layers(self._weights.layers, x, plan, lora, self._cache)
        rows = x.index_select(0, plan.logit_rows)
        return self._compute.logits(rows, self._weights.norm, self._weights.head).float()

    def _lora_step(self, plan: StepPlan) -> AnyLoraStep | None:
        if not plan.segments:
            return None
        if self._slots is None:
            raise RuntimeError("a row names a LoRA slot and no slots are attached")
        return self._slots.step(plan.segments)
