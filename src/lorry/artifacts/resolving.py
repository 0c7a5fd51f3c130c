"""A config's patterns, applied to the modules of one base model."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from lorry.artifacts.adapter_config import CONFIG_FILE, AdapterConfig, shown
from lorry.artifacts.matching import (
    PatternFailed,
    Patterns,
    ends_with,
    first_value,
    layer_modules,
)
from lorry.engine import BaseShape

_OUTSIDE_LAYERS = ("lm_head", "model.embed_tokens")
"""Modules of the base that PEFT could adapt and that are not served."""


def rank_for(config: AdapterConfig, module: str) -> int:
    """The rank that PEFT gives a module such as `model.layers.0.self_attn.q_proj`."""
    patterns = Patterns()
    return first_value(
        [(patterns.tail(key), rank) for key, rank in config.rank_pattern.items()], module, config.r
    )


def scale_for(config: AdapterConfig, module: str) -> float:
    """The factor on B·A that PEFT uses for a module."""
    patterns = Patterns()
    entries = [(patterns.tail(key), alpha) for key, alpha in config.alpha_pattern.items()]
    return scale(config, rank_for(config, module), first_value(entries, module, config.lora_alpha))


def scale(config: AdapterConfig, rank: int, alpha: float) -> float:
    """The factor on B·A: alpha/rank, or alpha/sqrt(rank) with rsLoRA."""
    return alpha / math.sqrt(rank) if config.use_rslora else alpha / rank


class Resolver:
    """Applies the config's patterns to the base's modules; a pattern that fails is a problem,
    once."""

    def __init__(self, config: AdapterConfig, base: BaseShape) -> None:
        """Resolves everything at once; `problems` and `targets` are there from then on."""
        self.config = config
        self.problems: list[str] = []
        self._patterns = Patterns()
        self._modules = layer_modules(base)
        self.targets = self._resolve(self._targets, "target_modules")
        ranks = self._resolve(
            lambda: self._values("rank_pattern", config.rank_pattern, config.r), "rank_pattern"
        )
        alphas = self._resolve(
            lambda: self._values("alpha_pattern", config.alpha_pattern, config.lora_alpha),
            "alpha_pattern",
        )
        self._ranks: dict[str, int] = ranks or {}
        self._alphas: dict[str, float] = alphas or {}

    def rank(self, module: str) -> int:
        """The rank of a module by the config."""
        return self._ranks.get(module, self.config.r)

    def alpha(self, module: str) -> float:
        """The alpha of a module by the config."""
        return self._alphas.get(module, self.config.lora_alpha)

    def _resolve(self, step: Callable[[], Any], key: str) -> Any:
        """The step's result; None when one of its patterns cannot be used."""
        try:
            return step()
        except PatternFailed as error:
            self.problems.append(f"{CONFIG_FILE}: a pattern in {key} {error}; mend the pattern.")
            return None

    def _targets(self) -> frozenset[str] | None:
        """The modules that PEFT would adapt; None when the config does not say."""
        targets = self.config.target_modules
        if targets is None:
            return None
        if isinstance(targets, str):
            everything = targets.lower() == "all-linear"
            meant = (
                (lambda name: name not in _OUTSIDE_LAYERS)
                if everything
                else self._patterns.full(targets)
            )
        else:
            meant = self._in_list(targets)
        excluded = self._excluded()
        for name in _OUTSIDE_LAYERS:
            if meant(name) and not excluded(name):
                self.problems.append(
                    f"{CONFIG_FILE}: target_modules is {shown(targets)}, which means {name}, "
                    "expected only projections of the layers; LoRA there is not supported, train "
                    "without it."
                )
        return frozenset(name for name in self._modules if meant(name) and not excluded(name))

    def _in_list(self, targets: tuple[str, ...]) -> Callable[[str], bool]:
        wanted = frozenset(self.config.layers_to_transform)
        if not wanted:
            return lambda name: ends_with(name, targets)
        layer_of = [
            self._patterns.layer_of(pattern) for pattern in self.config.layers_pattern or ("[^.]*",)
        ]

        def meant(name: str) -> bool:
            layers = (layer(name) for layer in layer_of)
            return (
                ends_with(name, targets)
                and next((n for n in layers if n is not None), None) in wanted
            )

        return meant

    def _excluded(self) -> Callable[[str], bool]:
        exclude = self.config.exclude_modules
        if isinstance(exclude, str):
            return self._patterns.full(exclude)
        return lambda name: ends_with(name, exclude)

    def _values(self, key: str, pattern: Mapping[str, Any], default: Any) -> dict[str, Any]:
        """Module -> value. An entry that means no module of the base is a typo or of another
        model."""
        entries = [(self._patterns.tail(text), value) for text, value in pattern.items()]
        for text, (matches, _) in zip(pattern, entries, strict=True):
            if not any(matches(name) for name in self._modules):
                self.problems.append(
                    f"{CONFIG_FILE}: {key} has the entry {shown(text)}, which means no projection "
                    "of this base model; mend or remove the entry."
                )
        return {name: first_value(entries, name, default) for name in self._modules}
