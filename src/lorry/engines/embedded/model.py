"""The decoder: interface first, body follows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorry.engine import BaseShape
from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.slots import LoraSlots

Progress = Callable[[int, int], None]


class Decoder:
    """One base model in memory, with its paged KV cache."""

    shape: BaseShape
    config: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    max_context: int
    """Longest sequence that is computed rightly (max_position_embeddings or the sliding window)."""

    @classmethod
    def load(
        cls,
        model: Path,
        dtype: str = "auto",
        device: str = "auto",
        progress: Progress | None = None,
    ) -> "Decoder":
        """Read a folder or GGUF. Raises `ModelUnsupported`, `ModelInvalid`."""
        raise NotImplementedError

    def attach(self, slots: LoraSlots) -> None:
        """Adapters of these slots are applied from the next step on."""
        raise NotImplementedError

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers, K and V."""
        raise NotImplementedError

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Blocks 0 .. num_blocks - 1; earlier KV is dropped."""
        raise NotImplementedError

    def forward(self, batch: StepBatch) -> Tensor:
        """float32 [logit_rows, vocab] on the decoder's device."""
        raise NotImplementedError
