"""The batched low-rank product: `out += (x @ A) @ B` for rows of many adapters.

Three rules:

1. A row sees its own adapter and no other. In the merged form the columns of the others are
   overwritten with zero, not multiplied by it, so that even an infinity of theirs cannot reach the
   row.
2. Cost follows the ranks that are there: nothing is padded to a largest rank, and a projection that
   no adapter of the step touches costs nothing.
3. Whatever depends on the mix of a step only (slices, masks) is made once per step; a layer only
   multiplies.

Projections that share an input form a group (q, k, v; gate, up), whose A matrices are stacked: one
product shrinks a group, one per projection expands it. With three adapters of ranks 2, 1 and 1 the
merged form looks like this:

                  ranks of q   of k      of v
    row of 1st    a a . .      a a . .   a a . .    A is the rows a a b c of each, [12, in]
    row of 2nd    . . b .      . . b .   . . b .    B of q is [4, q], of k [4, k], of v [4, v]
    row of 3rd    . . . c      . . . c   . . . c    "." is the mask

Padding all adapters to one rank and gathering per row was rejected: on two cores it took six times
as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorry.engines.embedded.attention import Segment

QKV, OUT, GATE_UP, DOWN = range(4)
"""Numbers of the groups in a layer."""

GROUPS: tuple[tuple[str, ...], ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Projections by the input they share, in the order in which the decoder fuses them."""


@dataclass(frozen=True, slots=True)
class Part:
    """The expanding half of one projection."""

    module: int
    """Place in its group."""
    columns: slice
    """Of the group's fused output."""
    ranks: slice
    """Of the group's low-rank columns."""
    b: Tensor
    """[ranks, out], scale included."""


@dataclass(frozen=True, slots=True)
class GroupWeights:
    """What one adapter, or a merged few, adds to one group of one layer."""

    a: Tensor
    """[ranks, in]"""
    parts: tuple[Part, ...]
    layout: int = -1
    """Which mask of the unit fits these columns; -1: one adapter, no mask."""

    def add(self, x: Tensor, out: Tensor, masks: Sequence[Tensor]) -> None:
        """`out` [rows, group's width] += (x @ A) @ B, in place; `x` [rows, in]."""
        low = torch.mm(x, self.a.t())
        if self.layout >= 0:
            low.masked_fill_(masks[self.layout], 0)
        for part in self.parts:
            out[:, part.columns].addmm_(low[:, part.ranks], part.b)


Layer = tuple[GroupWeights | None, ...]
"""By group number; None: the adapter does not touch the group here."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Several adapters side by side."""

    layers: tuple[Layer, ...]
    layouts: tuple[tuple[int, ...], ...]
    """For each distinct column layout, the slot that owns each column."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows [start, stop) and the weights that serve them all."""

    start: int
    stop: int
    layers: tuple[Layer, ...]
    masks: tuple[Tensor, ...] = ()
    """By layout: [rows, ranks], true where the row does not own the column."""


class LoraStep:
    """One step's low-rank work."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Units cover all rows that have an adapter, each row once."""
        self.units = tuple(units)

    def apply(self, layer: int, group: int, x: Tensor, out: Tensor) -> None:
        """Add to `out` [rows, group's width] what the adapters make of `x` [rows, in]."""
        for unit in self.units:
            weights = unit.layers[layer][group]
            if weights is not None:
                rows = slice(unit.start, unit.stop)
                weights.add(x[rows], out[rows], unit.masks)


def apply_reference(
    segments: Sequence[Segment],
    adapters: Sequence[tuple[Layer, ...] | None],
    layer: int,
    group: int,
    x: Tensor,
    out: Tensor,
) -> None:
    """The same, row by row and projection by projection: slow, plain, and what the batched form is
    tested against."""
    for segment in segments:
        held = adapters[segment.slot]
        weights = None if held is None else held[layer][group]
        if weights is None:
            continue
        for row in range(segment.start, segment.stop):
            for part in weights.parts:
                low = weights.a[part.ranks] @ x[row]
                out[row, part.columns] += low @ part.b


def merge(slots: Sequence[int], adapters: Sequence[tuple[Layer, ...]]) -> Merged:
    """Lay adapters side by side. Copies their weights, so it is for a mix that stays some steps."""
    layouts: dict[tuple[int, ...], int] = {}
    layers = tuple(
        tuple(
            _merge_group(slots, [adapter[layer][group] for adapter in adapters], layouts)
            for group in range(len(GROUPS))
        )
        for layer in range(len(adapters[0]))
    )
    size = sum(
        one.a.nbytes + sum(part.b.nbytes for part in one.parts)
        for layer_groups in layers
        for one in layer_groups
        if one is not None
    )
    return Merged(layers, tuple(layouts), size)


def _merge_group(
    slots: Sequence[int],
    weights: Sequence[GroupWeights | None],
    layouts: dict[tuple[int, ...], int],
) -> GroupWeights | None:
    """One group of one layer; `layouts` collects the distinct column layouts."""
    held = [(slot, one) for slot, one in zip(slots, weights, strict=True) if one is not None]
    if not held:
        return None
    shrink: list[Tensor] = []
    parts: list[Part] = []
    owners: list[int] = []
    for module in sorted({part.module for _, one in held for part in one.parts}):
        found = [
            (slot, one.a, part) for slot, one in held for part in one.parts if part.module == module
        ]
        start = len(owners)
        for slot, a, part in found:
            shrink.append(a[part.ranks])
            owners += [slot] * part.b.shape[0]
        b = torch.cat([part.b for _, _, part in found])
        parts.append(Part(module, found[0][2].columns, slice(start, len(owners)), b))
    layout = layouts.setdefault(tuple(owners), len(layouts))
    return GroupWeights(torch.cat(shrink), tuple(parts), layout)
