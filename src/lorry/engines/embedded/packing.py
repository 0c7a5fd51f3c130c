"""How adapters of one kind lie in memory: which bytes of the file go where, and what the decoder
finds there.

Adapters that were trained alike have the same header and the same config in their snapshots, byte
by byte, and differ in their numbers only. So what is worked out here, tensor by tensor, is worked
out once for all of them; the rest of a load is one read and one pass over the bytes.

One buffer holds all: layer by layer and group by group, A of the group's projections below each
other, then each B turned to [rank, out] and scaled.
"""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorry.engine import BaseShape
from lorry.engines.embedded.lowrank import GROUPS, GroupWeights, Layer, Part
from lorry.engines.embedded.scaling import ScaleRule
from lorry.errors import EngineRejected

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of adapters, as the file's header spells them, in the order of pack.c."""

LENGTH_BYTES = 8
"""The header's length, at the start of a safetensors file."""

TENSOR_NAME = re.compile(
    r"base_model\.model\.(?P<key>model\.layers\.(?P<layer>\d+)\.(?P<module>[\w.]+))"
    r"\.lora_(?P<half>[AB])\.weight"
)


@dataclass(frozen=True, slots=True)
class Move:
    """One matrix on its way from the file to the buffer."""

    module: str
    """As the base calls it, `model.layers.0.self_attn.q_proj`."""
    start: int
    """Its first byte in the file."""
    dtype: str
    rows: int
    columns: int
    to: int
    """Its first element in the buffer."""
    scale: float = 1.0
    turned: bool = False

    @property
    def end(self) -> int:
        """The first element behind it in the buffer."""
        return self.to + self.rows * self.columns

    def words(self) -> tuple[int, ...]:
        """A `move_t` of pack.c."""
        scale = int.from_bytes(struct.pack("<d", self.scale), "little", signed=True)
        kind = list(DTYPES).index(self.dtype)
        return self.start, kind, self.rows, self.columns, self.to, int(self.turned), scale


@dataclass(frozen=True, slots=True)
class PackedPart:
    """One projection's B, [ranks, width]."""

    module: int
    """Place in its group."""
    column: int
    width: int
    rank: int
    """The first of its low-rank columns among the group's."""
    ranks: int
    at: int
    """Its first element in the buffer."""


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """A of one group of one layer, [ranks, inner], and the parts."""

    at: int
    ranks: int
    inner: int
    parts: tuple[PackedPart, ...]


@dataclass(frozen=True)
class Packing:
    """Where everything goes."""

    elements: int
    """Of the buffer."""
    moves: tuple[Move, ...]
    groups: tuple[tuple[PackedGroup | None, ...], ...]
    """By layer, by group; None: the adapter does not touch the group there."""
    rank: int
    """Largest rank of any module."""

    @cached_property
    def words(self) -> Tensor:
        """int64 [moves, 7], each row a `move_t` of pack.c."""
        return torch.tensor([one.words() for one in self.moves], dtype=torch.int64)

    def fill(self, raw: bytes, buffer: Tensor) -> None:
        """What the kernel does, by PyTorch: `raw` is the file, `buffer` float32."""
        for move in self.moves:
            dtype = DTYPES[move.dtype]
            end = move.start + move.rows * move.columns * dtype.itemsize
            data = torch.frombuffer(bytearray(raw[move.start : end]), dtype=dtype)
            matrix = data.view(move.rows, move.columns).float().mul_(move.scale)
            buffer[move.to : move.end] = (matrix.t() if move.turned else matrix).flatten()

    def layers(self, buffer: Tensor) -> tuple[Layer, ...]:
        """The buffer as PyTorch's decoder wants it."""
        return tuple(tuple(_view(one, buffer) for one in layer) for layer in self.groups)

    def module_at(self, element: int) -> str:
        """Whose weights are there in the buffer."""
        return next(move.module for move in self.moves if move.to <= element < move.end)


def _view(group: PackedGroup | None, buffer: Tensor) -> GroupWeights | None:
    if group is None:
        return None
    parts = tuple(
        Part(
            one.module,
            slice(one.column, one.column + one.width),
            slice(one.rank, one.rank + one.ranks),
            buffer.as_strided((one.ranks, one.width), (one.width, 1), one.at),
        )
        for one in group.parts
    )
    a = buffer.as_strided((group.ranks, group.inner), (group.inner, 1), group.at)
    return GroupWeights(a, parts)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One tensor as the file has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class _Module:
    """One projection's pair."""

    name: str
    rank: int
    scale: float
    a: _Matrix
    b: _Matrix


def packing_of(
    path: Path, header: bytes, file_bytes: int, shape: BaseShape, rule: ScaleRule
) -> Packing:
    """The packing of a file with this header. Raises `EngineRejected`, naming file, key, found and
    expected value."""
    modules = _modules(path, _matrices(path, header, file_bytes), shape, rule)
    moves: list[Move] = []
    used = 0
    layers: list[tuple[PackedGroup | None, ...]] = []
    for layer in range(shape.layers):
        groups: list[PackedGroup | None] = []
        for names in GROUPS:
            held = [
                (place, modules[layer, name])
                for place, name in enumerate(names)
                if (layer, name) in modules
            ]
            widths = [shape.targets[name][1] for name in names]
            group, used = _pack_group(held, widths, used, moves) if held else (None, used)
            groups.append(group)
        layers.append(tuple(groups))
    rank = max(one.rank for one in modules.values())
    return Packing(used, tuple(moves), tuple(layers), rank)


def _pack_group(
    held: list[tuple[int, _Module]], widths: list[int], used: int, moves: list[Move]
) -> tuple[PackedGroup, int]:
    """One group from element `used` on, and the first element behind it."""
    ranks, inner = sum(one.rank for _, one in held), held[0][1].a.shape[1]
    at, rank = used, 0
    used += ranks * inner
    parts: list[PackedPart] = []
    for place, one in held:
        a, b, width = one.a, one.b, widths[place]
        moves.append(Move(one.name, a.start, a.dtype, one.rank, inner, at + rank * inner))
        moves.append(
            Move(one.name, b.start, b.dtype, width, one.rank, used, one.scale, turned=True)
        )
        parts.append(PackedPart(place, sum(widths[:place]), width, rank, one.rank, used))
        used += one.rank * width
        rank += one.rank
    return PackedGroup(at, ranks, inner, tuple(parts)), used


def _matrices(path: Path, header: bytes, file_bytes: int) -> list[_Matrix]:
    """What the file holds. The server has judged it, or made it; what was cut since is told."""
    try:
        entries = json.loads(header)
        start = LENGTH_BYTES + len(header)
        found = [
            _matrix(name, entry, start) for name, entry in entries.items() if name != "__metadata__"
        ]
        ends = [start + entries[one.name]["data_offsets"][1] for one in found]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineRejected(f"{path}: cut short or not safetensors ({error}).") from error
    if not found:
        raise EngineRejected(f"{path}: it holds no tensor.")
    if max(ends) != file_bytes:
        raise EngineRejected(
            f"{path}: cut short or not safetensors (it has {file_bytes} bytes; its header makes it "
            f"{max(ends)})."
        )
    return found


def _matrix(name: str, entry: Mapping[str, Any], start: int) -> _Matrix:
    """One entry of the header, checked against itself."""
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(int(size) for size in entry["shape"])
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, expected {', '.join(DTYPES)}")
    expected = DTYPES[dtype].itemsize
    for size in shape:
        expected *= size
    if begin < 0 or end - begin != expected:
        raise ValueError(f"{name} has {end - begin} bytes, expected {expected}")
    return _Matrix(name, dtype, shape, start + begin)


def _modules(
    path: Path, matrices: list[_Matrix], shape: BaseShape, rule: ScaleRule
) -> dict[tuple[int, str], _Module]:
    """(layer, projection) -> its matrices, each checked against base and config."""
    halves: dict[tuple[int, str], dict[str, _Matrix]] = {}
    for one in matrices:
        layer, module, half = _parse_name(path, one.name, shape)
        halves.setdefault((layer, module), {})[half] = one
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
    pair: Mapping[str, _Matrix],
    shape: BaseShape,
    rule: ScaleRule,
) -> _Module:
    key = f"model.layers.{at[0]}.{at[1]}"
    if len(pair) != 2:
        raise EngineRejected(f"{path}: of {key} only lora_{next(iter(pair))} is there.")
    rank = rule.rank(key)
    inner, outer = shape.targets[at[1]]
    for half, expected in (("A", (rank, inner)), ("B", (outer, rank))):
        found = pair[half].shape
        if found != expected:
            raise EngineRejected(
                f"{path}: lora_{half} of {key} has shape {list(found)}; the base and "
                f"adapter_config.json make it {list(expected)}."
            )
    return _Module(key, rank, rule.scale(key), pair["A"], pair["B"])
