"""This package's own kernels for float32 on CPUs: `native/` seen from Python.

They compute what `TorchCompute` computes, and keep two promises that PyTorch does not: a row's
result is the same bit by bit whatever else is in the batch, and adapters are multiplied each for
its own rows only, at their own ranks, in one call for all of them. They are there when a C compiler
was there at installation; `open_kernels` says what is to be used.

Weights are packed at load into panels of outputs, [panels, in, outputs of a panel]. A matrix whose
every value is a bfloat16 (most models are published so) is kept as bfloat16 and widened in the
registers: half the bytes and not a bit of difference.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lorry.engines.embedded.attention import Segment, StepPlan
from lorry.engines.embedded.family import Family
from lorry.engines.embedded.layers import Rope
from lorry.engines.embedded.lowrank import LoraStep
from lorry.engines.embedded.packing import PackedGroup, Packing
from lorry.engines.embedded.parameters import LayerWeights
from lorry.errors import EngineRejected

_native: Any
try:
    _native = importlib.import_module("lorry.engines.embedded._native")
except ImportError:  # not built: no C compiler was there
    _native = None

PARTS_MAX = 3
ENTRY_WORDS = 3 + 5 * PARTS_MAX
"""int64 in one `entry_t` of kernels.h."""


@dataclass(frozen=True, slots=True)
class Isa:
    """One instruction set that this machine has."""

    number: int
    name: str
    lanes: int
    """float32 in a vector."""


def isas() -> list[Isa]:
    """Those that the kernels were built for and this machine has, best first; empty without
    kernels."""
    if _native is None:
        return []
    return [Isa(i, name, lanes) for i, (name, lanes) in enumerate(_native.isas())]


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix [out, in] packed for one instruction set."""

    data: Tensor
    inner: int
    outer: int
    bf16: bool


class Kernels:
    """The kernels of one instruction set, with threads of their own."""

    def __init__(self, isa: Isa, threads: int) -> None:
        """Starts `threads` - 1 threads; they end when this object goes. Raises `OSError`."""
        native = _native
        self.isa = isa
        self.machine: object = native.start(isa.number, threads)
        self.product: Callable[..., None] = native.product
        self.forward: Callable[..., None] = native.forward

    def pack(self, weight: Tensor) -> Panels:
        """`weight` float32 [out, in]."""
        outer, inner = weight.shape
        lanes = self.isa.lanes
        count = -(-outer // (2 * lanes))
        bits = torch.zeros((count * 2 * lanes, inner), dtype=torch.int32)
        bits[:outer] = weight.contiguous().view(torch.int32)
        bf16 = not bool((bits & 0xFFFF).any())
        halves = bits.view(count, 2, lanes, inner).permute(0, 3, 1, 2)
        if bf16:
            low = (halves[:, :, 0] >> 16) & 0xFFFF
            return Panels((low | halves[:, :, 1]).contiguous(), inner, outer, True)
        return Panels(halves.contiguous(), inner, outer, False)


def open_kernels(choice: str, threads: int) -> Kernels | None:
    """What `choice` names: "auto" (the best there is, or None), "torch" (None), or an instruction
    set.

    Raises `EngineRejected` for one that is not there.
    """
    found = {isa.name: isa for isa in isas()}
    if choice == "torch" or (choice == "auto" and not found):
        return None
    isa = next(iter(found.values())) if choice == "auto" else found.get(choice)
    if isa is None:
        there = ", ".join(found) or "none, for they were not built (is there a C compiler?)"
        raise EngineRejected(f"--kernels is {choice}; this installation and machine have {there}.")
    return Kernels(isa, threads)


def _at(tensor: Tensor | None) -> int:
    """Its address; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


class NativeCompute:
    """The decoder's layers by kernels; see `compute.Compute`."""

    def __init__(self, kernels: Kernels, family: Family, rope: Rope) -> None:
        """Sizes, and the positions' tables."""
        self._kernels = kernels
        self._family = family
        self._rope = rope
        self._model: tuple[Sequence[LayerWeights[Panels]], Tensor, Tensor] | None = None

    def matrix(self, weight: Tensor) -> Panels:
        """Panels."""
        return self._kernels.pack(weight)

    def head(self, weight: Tensor) -> Panels:
        """Panels."""
        return self._kernels.pack(weight)

    def layers(
        self,
        layers: Sequence[LayerWeights[Panels]],
        x: Tensor,
        plan: StepPlan,
        lora: "LoraStep | NativeLoraStep | None",
        cache: Tensor,
    ) -> Tensor:
        """See `Compute`; in place on `x`."""
        paged = plan.paged
        assert paged is not None and not isinstance(lora, LoraStep), "a step planned for PyTorch"
        cos, sin = self._rope.tables(plan.last_position)
        segments = (0, 0, 1) if lora is None else lora.words
        step = _words(
            *(x.data_ptr(), len(x), plan.positions.data_ptr(), plan.writes.data_ptr()),
            *(paged.tables.data_ptr(), paged.chunks.data_ptr(), len(paged.chunks), *segments),
            *(cache.data_ptr(), cache.stride(0), cache.shape[2], cos.data_ptr(), sin.data_ptr()),
        )
        self._kernels.forward(
            *(self._kernels.machine, self._model_words(layers).data_ptr()),
            *(self._family.norm_eps, step.data_ptr()),
        )
        return x

    def logits(self, x: Tensor, norm: Tensor, head: Panels) -> Tensor:
        """See `Compute`."""
        out = x.new_empty((len(x), head.outer))
        if len(x):
            self._kernels.product(
                *(self._kernels.machine, x.data_ptr(), len(x), head.inner, head.outer),
                *(norm.data_ptr(), self._family.norm_eps, head.data.data_ptr(), head.bf16, 0),
                out.data_ptr(),
            )
        return out

    def _model_words(self, layers: Sequence[LayerWeights[Panels]]) -> Tensor:
        """The `model_t` of these layers, made once."""
        if self._model is None or self._model[0] is not layers:
            family = self._family
            table = _words(*(word for layer in layers for word in _layer_words(layer)))
            sizes = (family.hidden_size, family.heads, family.kv_heads, family.head_dim)
            model = _words(table.data_ptr(), len(layers), *sizes, layers[0].down.inner)
            self._model = (layers, table, model)
        return self._model[2]


def _words(*values: int) -> Tensor:
    """A struct of kernels.h whose members take 8 bytes each."""
    return torch.tensor(values, dtype=torch.int64)


def _layer_words(layer: LayerWeights[Panels]) -> Iterator[int]:
    """A `layer_t`."""

    def matrix(panels: Panels, bias: Tensor | None) -> tuple[int, ...]:
        return panels.data.data_ptr(), int(panels.bf16), panels.outer, _at(bias)

    yield layer.input_norm.data_ptr()
    yield from matrix(layer.qkv, layer.qkv_bias)
    yield _at(layer.qk_norm)
    yield from matrix(layer.o, layer.o_bias)
    yield layer.post_norm.data_ptr()
    yield from matrix(layer.gate_up, layer.gate_up_bias)
    yield from matrix(layer.down, layer.down_bias)


class NativeLoraStep:
    """One step's low-rank work, as the kernel takes it."""

    def __init__(self, segments: Sequence[Segment], tables: Sequence["AdapterTable"]) -> None:
        """`tables` [segments]: the adapter of each."""
        self._tables = tuple(tables)  # what the addresses below point at lives as long as this
        rows = [
            (table.entries.data_ptr(), segment.start, segment.stop)
            for segment, table in zip(segments, tables, strict=True)
        ]
        self._segments = torch.tensor(rows, dtype=torch.int64)
        ranks = max(table.ranks for table in tables)
        self.words = (self._segments.data_ptr(), len(rows), ranks)


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """Where an adapter's matrices are, for the kernel."""

    entries: Tensor
    """int64 [layers * groups, ENTRY_WORDS], each row an `entry_t`."""
    ranks: int
    """Most low-rank columns of any group."""
    buffer: Tensor
    """What the entries point at."""


def adapter_table(packing: Packing, buffer: Tensor) -> AdapterTable:
    """The table of a packed adapter, float32 on the CPU."""
    groups = [group for layer in packing.groups for group in layer]
    at = buffer.data_ptr()
    entries = torch.tensor([_entry_words(group, at) for group in groups], dtype=torch.int64)
    return AdapterTable(entries, max((g.ranks for g in groups if g is not None), default=1), buffer)


def _entry_words(group: PackedGroup | None, at: int) -> list[int]:
    """An `entry_t`; the buffer's elements of 4 bytes begin at address `at`."""
    words: list[int] = []
    if group is not None:
        words = [at + 4 * group.at, group.ranks, len(group.parts)]
        for part in group.parts:
            words += [at + 4 * part.at, part.column, part.width, part.rank, part.ranks]
    return words + [0] * (ENTRY_WORDS - len(words))


def pack_adapter(raw: bytes, moves: Tensor, buffer: Tensor) -> bool:
    """Carry out the moves of a `Packing`. False: nothing was done, the kernels are not built."""
    if _native is None:
        return False
    _native.pack_adapter(raw, moves.data_ptr(), len(moves), buffer.data_ptr())
    return True


def all_finite(values: Tensor) -> bool:
    """Whether none is infinite or NaN. By the kernel if possible: PyTorch would start threads for
    it, in whichever thread asks."""
    if _native is not None and values.dtype == torch.float32:
        return bool(_native.all_finite(values.data_ptr(), values.numel()))
    return bool(torch.isfinite(values).all())
