"""Adapters in host memory: interface first, body follows."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lorry.engine import BaseShape


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """One adapter, packed for the decoder."""

    rank: int
    """Largest rank of any module."""
    bytes: int
    """Host memory it takes."""


def load_adapter(path: Path, shape: BaseShape, dtype: torch.dtype) -> HostAdapter:
    """Snapshot folder to packed adapter, scale folded into B. Raises `EngineRejected`."""
    raise NotImplementedError
