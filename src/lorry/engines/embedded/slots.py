"""Device slots: the few adapters that a step may use, and the choice of form for a step's mix.

A slot holds an adapter's own tensors at their own ranks. Filling a slot exchanges all it holds, so
nothing of a wider adapter that was there before can show. On the CPU a slot shares memory with the
host copy.

Rows of several adapters may go through one merged product: every row then meets every adapter's
columns, which costs arithmetic, and saves the calls of a product for each. Which is cheaper is
decided for each step. Neighbouring slots form a bank, and a bank is merged whole or not at all.
Merging the exact mix of a step was tried first: the best mixes change with every request that comes
or goes, and each new one copies its adapters' weights, which takes as long as several steps. A bank
is merged in the second step running that asks for it, and stays until one of its slots changes.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from threading import RLock

import torch
from torch import Tensor

from lorry.engine import BaseShape
from lorry.engines.embedded.attention import Segment
from lorry.engines.embedded.compute import AnyLoraStep
from lorry.engines.embedded.kernels import AdapterTable, Kernels, NativeLoraStep, adapter_table
from lorry.engines.embedded.lora import HostAdapter
from lorry.engines.embedded.lowrank import LoraStep, Merged, Unit, merge
from lorry.errors import BrokenInvariant, EngineRejected

BANK_SIZE = 4
"""Slots that are merged together. With one row for each adapter of rank 8, four to six is best;
with eight rows for each, two, and four is no worse than one."""

UNIT_FLOPS = {torch.float32: 5e6, torch.bfloat16: 5e7}
"""Arithmetic that a CPU core does in the time that one more product takes in each layer (eleven
calls, 70 microseconds), by dtype."""
UNIT_FLOPS_GPU = 1e10
"""On a GPU calls are all that counts at these sizes."""


class LoraSlots:
    """`max_loras` places for adapters that a step may use. While it computes, another thread may
    clear a slot that it does not name."""

    def __init__(
        self,
        max_loras: int,
        max_rank: int,
        shape: BaseShape,
        dtype: torch.dtype,
        device: torch.device,
        unit_cost: float | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """All slots are empty. With `kernels` nothing is merged: they take each row's own columns
        alone, in one call for all adapters.

        `unit_cost` is what a product costs beside its arithmetic, in rows times ranks; 0 computes
        each adapter by itself, infinity always merges, None is as measured.
        """
        self._lock = RLock()
        self._held: list[HostAdapter | None] = [None] * max_loras
        self._max_rank = max_rank
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._unit_cost = _unit_cost(shape, dtype, device) if unit_cost is None else unit_cost
        self._kernels = kernels
        self._tables: dict[int, AdapterTable] = {}
        self._merged: dict[int, Merged] = {}
        self._asked: frozenset[int] = frozenset()
        self._merges = 0
        self._last: tuple[tuple[Segment, ...], AnyLoraStep] | None = None

    def put(self, slot: int, adapter: HostAdapter) -> None:
        """The slot holds this adapter and nothing else.

        Raises `EngineRejected` when it does not fit the base.
        """
        if adapter.rank > self._max_rank:
            raise EngineRejected(
                f"The adapter's rank is {adapter.rank}; the engine takes up to {self._max_rank}."
            )
        layers = len(adapter.packing.groups)
        if layers != self._shape.layers or adapter.buffer.dtype != self._dtype:
            raise EngineRejected(
                f"The adapter was packed for {layers} layers in "
                f"{adapter.buffer.dtype}; the base has {self._shape.layers} in {self._dtype}."
            )
        moved = adapter.to(self._device)
        with self._lock:
            self.clear(slot)
            self._held[slot] = moved
            if self._kernels is not None:
                self._tables[slot] = adapter_table(moved.packing, moved.buffer)

    def clear(self, slot: int) -> None:
        """The slot holds nothing, and its bank is no longer merged."""
        with self._lock:
            self._held[slot] = None
            self._tables.pop(slot, None)
            self._merged.pop(slot // BANK_SIZE, None)
            self._asked -= {slot // BANK_SIZE}
            self._last = None

    def statistics(self) -> dict[str, int]:
        """Slots in use, bytes of their adapters and of merged banks, and merges done so far."""
        held = [one for one in self._held if one is not None]
        return {
            "used": len(held),
            "bytes": sum(one.bytes for one in held),
            "merged_bytes": sum(one.bytes for one in self._merged.values()),
            "merges": self._merges,
        }

    def step(self, segments: Sequence[Segment]) -> AnyLoraStep:
        """The low-rank work of a step whose adapter rows are `segments`, in row order, no gaps."""
        key = tuple(segments)
        with self._lock:
            if self._last is not None and self._last[0] == key:
                return self._last[1]
            return self._merging_step(key) if self._kernels is None else self._native_step(key)

    def _merging_step(self, key: tuple[Segment, ...]) -> LoraStep:
        asked: set[int] = set()
        units = [unit for run in _runs(key) for unit in self._units(run, asked)]
        step = LoraStep(units)
        # A step that waits for a merge is planned anew next time; any other may serve again.
        self._last = (key, step) if asked <= self._merged.keys() else None
        self._asked = frozenset(asked)
        return step

    def _native_step(self, key: tuple[Segment, ...]) -> NativeLoraStep:
        for segment in key:
            self._adapter(segment.slot)
        step = NativeLoraStep(key, [self._tables[one.slot] for one in key])
        self._last = (key, step)
        return step

    def _adapter(self, slot: int) -> HostAdapter:
        held = self._held[slot]
        if held is None:
            raise BrokenInvariant(10, f"a row of the batch names LoRA slot {slot}, which is empty")
        return held

    def _units(self, run: Sequence[Segment], asked: set[int]) -> list[Unit]:
        """One merged unit for a run of segments of one bank, or one for each."""
        bank = run[0].slot // BANK_SIZE
        alone = [Unit(one.start, one.stop, self._adapter(one.slot).layers) for one in run]
        if len(run) == 1 or not self._merging_pays(run, bank):
            return alone
        if bank not in self._merged and bank in self._asked:
            self._merge(bank)
        asked.add(bank)
        merged = self._merged.get(bank)
        return alone if merged is None else [_merged_unit(merged, run, self._device)]

    def _bank(self, bank: int) -> list[tuple[int, HostAdapter]]:
        slots = range(bank * BANK_SIZE, min((bank + 1) * BANK_SIZE, len(self._held)))
        return [(slot, one) for slot in slots if (one := self._held[slot]) is not None]

    def _merging_pays(self, run: Sequence[Segment], bank: int) -> bool:
        """Arithmetic for nothing, against the calls that it saves."""
        rank = sum(one.rank for _, one in self._bank(bank))
        rows = run[-1].stop - run[0].start
        own = sum((one.stop - one.start) * self._adapter(one.slot).rank for one in run)
        return rows * rank - own < (len(run) - 1) * self._unit_cost

    def _merge(self, bank: int) -> None:
        held = self._bank(bank)
        slots = [slot for slot, _ in held]
        self._merged[bank] = merge(slots, [one.layers for _, one in held])
        self._merges += 1


def _unit_cost(shape: BaseShape, dtype: torch.dtype, device: torch.device) -> float:
    """Rows times ranks whose arithmetic, over all projections, takes as long as one more
    product."""
    flops = UNIT_FLOPS.get(dtype, 5e6) if device.type == "cpu" else UNIT_FLOPS_GPU
    return flops / (2 * sum(inner + outer for inner, outer in shape.targets.values()))


def _runs(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Neighbouring segments of one bank."""
    for _, run in groupby(segments, key=lambda one: one.slot // BANK_SIZE):
        yield list(run)


def _merged_unit(merged: Merged, run: Sequence[Segment], device: torch.device) -> Unit:
    owners = [one.slot for one in run for _ in range(one.start, one.stop)]
    rows = torch.tensor(owners, device=device)[:, None]

    def mask(layout: tuple[int, ...]) -> Tensor:
        return rows != torch.tensor(layout, device=device)

    masks = tuple(mask(layout) for layout in merged.layouts)
    return Unit(run[0].start, run[-1].stop, merged.layers, masks)
