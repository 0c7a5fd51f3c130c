"""Device slots: the few adapters that a step may use, and the choice of form for a step's mix.

A slot holds an adapter's own tensors at their own ranks. Filling a slot exchanges all it holds, so nothing of a wider
adapter that was there before can show. On the CPU a slot shares memory with the host copy.

Rows of several adapters go through one merged product where the extra arithmetic (every row against every adapter's
columns) costs less than the calls it saves; long segments, such as prefill, get a product each. Merging copies weights,
so a mix is merged when it comes up in two steps running, and kept: decoding repeats one mix for tens of steps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorry.engine import BaseShape
from lorry.engines.embedded.attention import Segment
from lorry.engines.embedded.lora import HostAdapter
from lorry.engines.embedded.lowrank import LoraStep, Merged, Unit, merge
from lorry.errors import BrokenInvariant, EngineRejected

MERGE_WASTE_MAX = 2048
"""Rows times ranks that a merged unit may compute for nothing. Measured, see `bench`."""
MERGED_KEPT_MAX = 4
"""Mixes kept; each costs as much memory as its adapters."""
MERGED_EXCESS_MAX = 2
"""A kept mix serves a smaller one when its ranks are at most this many times as many."""


class LoraSlots:
    """`max_loras` places for adapters that a step may use. Used from the decoder's thread."""

    def __init__(
        self,
        max_loras: int,
        max_rank: int,
        shape: BaseShape,
        dtype: torch.dtype,
        device: torch.device,
        merge_waste_max: int = MERGE_WASTE_MAX,
    ) -> None:
        """All slots are empty. `merge_waste_max` 0 computes each segment by itself."""
        self._held: list[HostAdapter | None] = [None] * max_loras
        self._max_rank = max_rank
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._waste_max = merge_waste_max
        self._merged: dict[tuple[int, ...], Merged] = {}
        self._asked: set[tuple[int, ...]] = set()
        self._merges = 0

    def put(self, slot: int, adapter: HostAdapter) -> None:
        """The slot holds this adapter and nothing else. Raises `EngineRejected` when it does not fit the base."""
        if adapter.rank > self._max_rank:
            raise EngineRejected(
                f"The adapter's rank is {adapter.rank}; the engine takes up to {self._max_rank}."
            )
        if len(adapter.layers) != self._shape.layers or adapter.buffer.dtype != self._dtype:
            raise EngineRejected(
                f"The adapter was packed for {len(adapter.layers)} layers in {adapter.buffer.dtype}; "
                f"the base has {self._shape.layers} in {self._dtype}."
            )
        moved = adapter.to(self._device)
        self.clear(slot)
        self._held[slot] = moved

    def clear(self, slot: int) -> None:
        """The slot holds nothing, nor does any merged mix that it was part of."""
        self._held[slot] = None
        self._merged = {key: one for key, one in self._merged.items() if slot not in key}
        self._asked = {key for key in self._asked if slot not in key}

    def statistics(self) -> dict[str, int]:
        """Slots in use, bytes of their adapters and of merged mixes, and merges done so far."""
        held = [one for one in self._held if one is not None]
        return {
            "used": len(held),
            "bytes": sum(one.bytes for one in held),
            "merged_bytes": sum(one.bytes for one in self._merged.values()),
            "merges": self._merges,
        }

    def step(self, segments: Sequence[Segment]) -> LoraStep:
        """The low-rank work of a step whose adapter rows are `segments`, contiguous and in row order."""
        asked: set[tuple[int, ...]] = set()
        units: list[Unit] = []
        for run in self._runs(segments):
            slots = tuple(sorted({one.slot for one in run}))
            merged = self._find_merged(slots) if len(slots) > 1 else None
            if len(slots) > 1:
                asked.add(slots)
            if merged is None:
                units += [self._single(one) for one in run]
            else:
                units.append(_merged_unit(merged, run, self._device))
        self._asked = asked
        return LoraStep(units)

    def _adapter(self, slot: int) -> HostAdapter:
        held = self._held[slot]
        if held is None:
            raise BrokenInvariant(10, f"a row of the batch names LoRA slot {slot}, which is empty")
        return held

    def _single(self, one: Segment) -> Unit:
        return Unit(one.start, one.stop, self._adapter(one.slot).layers)

    def _runs(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Neighbours join while what they would compute for nothing stays within bounds."""
        runs: list[list[Segment]] = []
        for one in segments:
            if runs and self._waste([*runs[-1], one]) <= self._waste_max:
                runs[-1].append(one)
            else:
                runs.append([one])
        return runs

    def _waste(self, run: Sequence[Segment]) -> int:
        """Rows times ranks beyond what the rows' own adapters need."""
        ranks = {one.slot: self._adapter(one.slot).rank for one in run}
        own = sum((one.stop - one.start) * ranks[one.slot] for one in run)
        return (run[-1].stop - run[0].start) * sum(ranks.values()) - own

    def _find_merged(self, slots: tuple[int, ...]) -> Merged | None:
        """A kept mix that covers these slots, or a new one if the last step asked for it too."""
        found = self._covering(slots)
        if found is None and slots in self._asked:
            found = self._merge(slots)
        if found is not None:
            self._merged[found.slots] = self._merged.pop(found.slots)
        return found

    def _covering(self, slots: tuple[int, ...]) -> Merged | None:
        limit = MERGED_EXCESS_MAX * sum(self._adapter(slot).rank for slot in slots)
        fitting = [
            one
            for one in self._merged.values()
            if one.rank <= limit and set(slots) <= set(one.slots)
        ]
        return min(fitting, key=lambda one: one.rank, default=None)

    def _merge(self, slots: tuple[int, ...]) -> Merged:
        while len(self._merged) >= MERGED_KEPT_MAX:
            del self._merged[next(iter(self._merged))]
        adapters = [self._adapter(slot) for slot in slots]
        rank = sum(one.rank for one in adapters)
        self._merged[slots] = merge(slots, [one.layers for one in adapters], rank)
        self._merges += 1
        return self._merged[slots]


def _merged_unit(merged: Merged, run: Sequence[Segment], device: torch.device) -> Unit:
    start, stop = run[0].start, run[-1].stop
    owners = [one.slot for one in run for _ in range(one.start, one.stop)]
    rows = torch.tensor(owners, device=device)[:, None]

    def mask(layout: tuple[int, ...]) -> Tensor:
        return rows != torch.tensor(layout, device=device)

    return Unit(start, stop, merged.layers, tuple(mask(layout) for layout in merged.layouts))
