"""Device slots: interface first, body follows."""

import torch

from lorry.engine import BaseShape
from lorry.engines.embedded.lora import HostAdapter


class LoraSlots:
    """`max_loras` places for adapters that a step may use."""

    def __init__(
        self,
        max_loras: int,
        max_rank: int,
        shape: BaseShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """All slots are empty."""
        raise NotImplementedError

    def put(self, slot: int, adapter: HostAdapter) -> None:
        """The slot holds this adapter and nothing else. Raises `EngineRejected` when it does not fit."""
        raise NotImplementedError

    def clear(self, slot: int) -> None:
        """The slot holds nothing."""
        raise NotImplementedError
