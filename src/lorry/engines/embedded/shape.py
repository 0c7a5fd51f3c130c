"""What a model is, before any weight is read. No torch here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorry.engine import BaseShape


def read_config(model: Path) -> dict[str, Any]:
    """`config.json` of a folder, or its like from a GGUF. Raises `ModelInvalid`."""
    raise NotImplementedError


def base_shape(config: Mapping[str, Any]) -> BaseShape:
    """What adapters must fit. Raises `ModelUnsupported` by name."""
    raise NotImplementedError


def max_context(config: Mapping[str, Any]) -> int:
    """Longest sequence computed rightly: max_position_embeddings, or the sliding window if that is shorter."""
    raise NotImplementedError
