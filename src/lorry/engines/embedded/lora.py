"""Adapters in host memory: read from a snapshot, checked against the base, scaled and packed.

The scale (alpha / r, or alpha / sqrt(r) for rsLoRA, by module) is folded into B in float32 before
the cast, so it costs nothing at run time and is rounded once. All tensors of an adapter lie in one
buffer: one allocation to take and to give back. Files have been judged before they come here; what
disagrees all the same is refused, never guessed at.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorry.engine import BaseShape
from lorry.engines.embedded.kernels import all_finite, pack_adapter
from lorry.engines.embedded.lowrank import Layer
from lorry.engines.embedded.packing import LENGTH_BYTES, Packing, packing_of
from lorry.engines.embedded.scaling import ScaleRule
from lorry.errors import EngineRejected

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

KINDS_MAX = 64
"""Packings remembered: kinds of adapters (ranks, targets, dtype, alpha) that a server meets. Each
takes a quarter of a megabyte on a model of 30 layers."""


@dataclass(frozen=True)
class HostAdapter:
    """One adapter, packed for the decoder."""

    packing: Packing
    buffer: Tensor
    """Every matrix, at the places that `packing` says."""

    @property
    def rank(self) -> int:
        """Largest rank of any module."""
        return self.packing.rank

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return self.buffer.nbytes

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """By layer, by group: for PyTorch. Kernels take the packing."""
        return self.packing.layers(self.buffer)

    def to(self, device: torch.device) -> "HostAdapter":
        """The same adapter there; itself when it is there already."""
        if self.buffer.device == device:
            return self
        return HostAdapter(self.packing, self.buffer.to(device))


class AdapterReader:
    """From snapshot folders to packed adapters for one base. May be used by several threads."""

    def __init__(self, shape: BaseShape, dtype: torch.dtype, *, native: bool = True) -> None:
        """`native`: pack by this package's kernel where it is built."""
        self._shape = shape
        self._dtype = dtype
        self._native = native
        self._kinds: OrderedDict[tuple[bytes, bytes, int], Packing] = OrderedDict()

    def read(self, path: Path) -> HostAdapter:
        """Snapshot folder to packed adapter. Raises `EngineRejected`, naming file, key, found and
        expected value."""
        config, raw = _read(path / CONFIG), _read(path / WEIGHTS)
        packing = self._packing(path, config, raw)
        buffer = torch.empty(packing.elements, dtype=torch.float32)
        if not (self._native and pack_adapter(raw, packing.words, buffer)):
            packing.fill(raw, buffer)
        buffer = buffer.to(self._dtype)
        _check_finite(path / WEIGHTS, packing, buffer)
        return HostAdapter(packing, buffer)

    def _packing(self, path: Path, config: bytes, raw: bytes) -> Packing:
        """The one of this kind, worked out when a kind is met for the first time."""
        length = int.from_bytes(raw[:LENGTH_BYTES], "little")
        header = raw[LENGTH_BYTES : LENGTH_BYTES + length]
        kind = (config, header, len(raw))
        packing = self._kinds.get(kind)
        if packing is None:
            rule = ScaleRule(_parsed(path / CONFIG, config))
            packing = packing_of(path / WEIGHTS, header, len(raw), self._shape, rule)
            self._kinds[kind] = packing
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        return packing


def _read(path: Path) -> bytes:
    """A whole file; other threads run meanwhile."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise EngineRejected(f"{path}: not readable ({error}).") from error


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except ValueError as error:
        raise EngineRejected(f"{path}: not readable as JSON ({error}).") from error
    if not isinstance(config, dict):
        raise EngineRejected(f"{path}: a JSON object was expected.")
    return config


def _check_finite(path: Path, packing: Packing, buffer: Tensor) -> None:
    """In the merged form zeros of other rows meet every B, and zero times infinity is NaN; so none
    is let in."""
    if all_finite(buffer):
        return
    module = packing.module_at(int((~torch.isfinite(buffer)).nonzero()[0]))
    raise EngineRejected(
        f"{path}: {module} holds NaN or infinity once scaled and cast to {buffer.dtype}."
    )
