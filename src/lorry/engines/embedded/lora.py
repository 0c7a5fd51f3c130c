"""Adapters in host memory: read from a snapshot, checked against the base, scaled and packed.

The scale (alpha / r, or alpha / sqrt(r) for rsLoRA, by module) is folded into B in float32 before
the cast, so it costs nothing at run time and is rounded once. All tensors of an adapter lie in one
buffer: one allocation to take and to give back. Files have been judged before they come here; what
disagrees all the same is refused, never guessed at.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorry.engine import BaseShape
from lorry.engines.embedded.lowrank import GROUPS, GroupWeights, Layer, Part
from lorry.errors import EngineRejected

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

TENSOR_NAME = re.compile(
    r"base_model\.model\.(?P<key>model\.layers\.(?P<layer>\d+)\.(?P<module>[\w.]+))"
    r"\.lora_(?P<half>[AB])\.weight"
)


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """One adapter, packed for the decoder."""

    rank: int
    """Largest rank of any module."""
    bytes: int
    """Host memory it takes."""
    layers: tuple[Layer, ...]
    """By layer, by group."""
    buffer: Tensor
    """Holds every tensor of `layers`."""

    def to(self, device: torch.device) -> "HostAdapter":
        """The same adapter there; itself when it is there already."""
        if self.buffer.device == device:
            return self
        moved = self.buffer.to(device)

        def at(tensor: Tensor) -> Tensor:
            return moved.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        def group(one: GroupWeights | None) -> GroupWeights | None:
            if one is None:
                return None
            parts = tuple(Part(p.module, p.columns, p.ranks, at(p.b)) for p in one.parts)
            return GroupWeights(at(one.a), parts)

        layers = tuple(tuple(group(one) for one in layer) for layer in self.layers)
        return HostAdapter(self.rank, self.bytes, layers, moved)


@dataclass(frozen=True, slots=True)
class _Module:
    """One projection's pair of matrices, as the files have it."""

    rank: int
    scale: float
    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""


class ScaleRule:
    """Rank and scale of a module by its name, with PEFT's own way of matching patterns."""

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
    """The first pattern that fits the end of a module's name, else the name itself: PEFT's
    `get_pattern_key`."""
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", key):
            return pattern
    return key


def load_adapter(path: Path, shape: BaseShape, dtype: torch.dtype) -> HostAdapter:
    """Snapshot folder to packed adapter. Raises `EngineRejected`, naming file, key, found and
    expected value."""
    rule = ScaleRule(_read_config(path / CONFIG))
    modules = _read_modules(path / WEIGHTS, shape, rule)
    elements = sum(one.a.numel() + one.b.numel() for one in modules.values())
    buffer = torch.empty(elements, dtype=dtype)
    layers = _pack(modules, shape, buffer)
    _check_finite(path / WEIGHTS, buffer, layers)
    rank = max(one.rank for one in modules.values())
    return HostAdapter(rank, buffer.nbytes, layers, buffer)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineRejected(f"{path}: not readable as JSON ({error}).") from error
    if not isinstance(config, dict):
        raise EngineRejected(f"{path}: a JSON object was expected.")
    return config


def _read_modules(path: Path, shape: BaseShape, rule: ScaleRule) -> dict[tuple[int, str], _Module]:
    """(layer, projection) -> its matrices, each checked against base and config."""
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                layer, module, half = _parse_name(path, name, shape)
                halves.setdefault((layer, module), {})[half] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise EngineRejected(f"{path}: cut short or not safetensors ({error}).") from error
    if not halves:
        raise EngineRejected(f"{path}: it holds no tensor.")
    return {at: _module(path, at, pair, shape, rule) for at, pair in halves.items()}


def _parse_name(path: Path, name: str, shape: BaseShape) -> tuple[int, str, str]:
    match = TENSOR_NAME.fullmatch(name)
    if match is None or match["module"] not in shape.targets:
        raise EngineRejected(
            f"{path}: {name} is no LoRA matrix of a projection of {shape.architecture} "
            f"({', '.join(shape.targets)})."
        )
    layer = int(match["layer"])
    if layer >= shape.layers:
        raise EngineRejected(f"{path}: {name} is beyond the base's {shape.layers} layers.")
    return layer, match["module"], match["half"]


def _module(
    path: Path,
    at: tuple[int, str],
    pair: Mapping[str, Tensor],
    shape: BaseShape,
    rule: ScaleRule,
) -> _Module:
    key = f"model.layers.{at[0]}.{at[1]}"
    if len(pair) != 2:
        raise EngineRejected(f"{path}: of {key} only lora_{next(iter(pair))} is there.")
    rank = rule.rank(key)
    inner, outer = shape.targets[at[1]]
    for half, expected in (("A", [rank, inner]), ("B", [outer, rank])):
        found = list(pair[half].shape)
        if found != expected:
            raise EngineRejected(
                f"{path}: lora_{half} of {key} has shape {found}; the base and {CONFIG} make it "
                f"{expected}."
            )
    return _Module(rank, rule.scale(key), pair["A"], pair["B"])


def _pack(
    modules: Mapping[tuple[int, str], _Module], shape: BaseShape, buffer: Tensor
) -> tuple[Layer, ...]:
    """Copy into `buffer`, group by group: A of the group's projections, then each B turned to
    [rank, out]."""
    packer = _Packer(buffer)
    return tuple(
        tuple(_pack_group(modules, layer, group, shape, packer) for group in GROUPS)
        for layer in range(shape.layers)
    )


class _Packer:
    """Hands out the buffer piece by piece."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._used = 0

    def take(self, rows: int, columns: int) -> Tensor:
        start, self._used = self._used, self._used + rows * columns
        return self._buffer[start : self._used].view(rows, columns)


def _pack_group(
    modules: Mapping[tuple[int, str], _Module],
    layer: int,
    group: tuple[str, ...],
    shape: BaseShape,
    packer: _Packer,
) -> GroupWeights | None:
    held = [(i, modules[layer, name]) for i, name in enumerate(group) if (layer, name) in modules]
    if not held:
        return None
    widths = [shape.targets[name][1] for name in group]
    a = packer.take(sum(one.rank for _, one in held), held[0][1].a.shape[1])
    parts: list[Part] = []
    start = 0
    for place, one in held:
        ranks = slice(start, start + one.rank)
        a[ranks].copy_(one.a)
        b = packer.take(one.rank, widths[place])
        b.copy_(one.b.float().mul(one.scale).t())
        left = sum(widths[:place])
        parts.append(Part(place, slice(left, left + widths[place]), ranks, b))
        start += one.rank
    return GroupWeights(a, tuple(parts))


def _check_finite(path: Path, buffer: Tensor, layers: tuple[Layer, ...]) -> None:
    """In the merged form zeros of other rows meet every B, and zero times infinity is NaN; so none
    is let in."""
    if bool(torch.isfinite(buffer).all()):
        return
    for index, layer in enumerate(layers):
        for names, group in zip(GROUPS, layer, strict=True):
            if group is not None:
                _check_group(path, f"model.layers.{index}", names, group)


def _check_group(path: Path, at: str, names: tuple[str, ...], group: GroupWeights) -> None:
    for part in group.parts:
        halves = (group.a[part.ranks], part.b)
        if not all(bool(torch.isfinite(half).all()) for half in halves):
            raise EngineRejected(
                f"{path}: {at}.{names[part.module]} holds NaN or infinity once scaled and cast "
                f"to {part.b.dtype}."
            )
