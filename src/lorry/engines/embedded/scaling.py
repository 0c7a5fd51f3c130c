"""Rank and scale of an adapter's modules, with PEFT's own way of matching patterns.

Source: PEFT, `peft/utils/other.py` (`get_pattern_key`) and `peft/tuners/lora/layer.py`."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any


class ScaleRule:
    """What `adapter_config.json` says of a module, by the module's name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Takes the parsed `adapter_config.json`."""
        self._rank = int(config.get("r", 8))
        self._alpha = float(config.get("lora_alpha", 8))
        self._root = bool(config.get("use_rslora", False))
        self._ranks: Mapping[str, int] = config.get("rank_pattern") or {}
        self._alphas: Mapping[str, float] = config.get("alpha_pattern") or {}

    def rank(self, key: str) -> int:
        """`key` is the module's name in the base, `model.layers.0.self_attn.q_proj`."""
        return int(self._ranks.get(matching_pattern(self._ranks, key), self._rank))

    def scale(self, key: str) -> float:
        """What B is multiplied by."""
        rank = self.rank(key)
        alpha = float(self._alphas.get(matching_pattern(self._alphas, key), self._alpha))
        return alpha / (math.sqrt(rank) if self._root else rank)


def matching_pattern(patterns: Iterable[str], key: str) -> str:
    """The first pattern that fits the end of a module's name, else the name itself."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", key):
            return pattern
    return key
