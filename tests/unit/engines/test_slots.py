"""The batched low-rank product equals the plain loop, in every form and for every mix."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lorry.engines.embedded.attention import Segment
from lorry.engines.embedded.lora import AdapterReader, HostAdapter
from lorry.engines.embedded.lowrank import GROUPS, apply_reference
from lorry.engines.embedded.shape import base_shape
from lorry.engines.embedded.slots import LoraSlots
from lorry.errors import BrokenInvariant, EngineRejected
from tests.fixtures.tiny_weights import CONFIG, adapter_tensors, write_adapter

SHAPE = base_shape(CONFIG)
CPU = torch.device("cpu")
ALL = tuple(SHAPE.targets)

KINDS: Sequence[tuple[tuple[str, ...], int, Sequence[int] | None]] = (
    (ALL, 8, None),
    (("self_attn.q_proj", "mlp.down_proj"), 3, None),
    (ALL, 1, [1]),
    (("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"), 16, None),
    (ALL, 5, None),
    (("self_attn.o_proj",), 2, [0]),
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[HostAdapter]:
    """One of each kind: seven projections, two, one layer only, and so on."""
    found = []
    for seed, (names, rank, layers) in enumerate(KINDS):
        tensors = adapter_tensors(SHAPE, dict.fromkeys(names, rank), layers, seed)
        folder = write_adapter(tmp_path_factory.mktemp("adapter"), tensors, r=rank, lora_alpha=rank)
        found.append(AdapterReader(SHAPE, torch.float32).read(folder))
    return found


def filled(adapters: Sequence[HostAdapter], cost: float) -> LoraSlots:
    slots = LoraSlots(len(adapters), 64, SHAPE, torch.float32, CPU, cost)
    for slot, adapter in enumerate(adapters):
        slots.put(slot, adapter)
    return slots


def segments(lengths: Sequence[tuple[int, int]], start: int = 0) -> list[Segment]:
    found = []
    for slot, length in lengths:
        found.append(Segment(slot, start, start + length))
        start += length
    return found


def check(slots: LoraSlots, adapters: Sequence[HostAdapter | None], mix: list[Segment]) -> None:
    """Every group of every layer, with rows before and after that have no adapter."""
    rows = mix[-1].stop + 2
    held = [None if one is None else one.layers for one in adapters]
    step = slots.step(mix)
    for layer in range(SHAPE.layers):
        for group, names in enumerate(GROUPS):
            width = sum(SHAPE.targets[name][1] for name in names)
            x = torch.randn(rows, SHAPE.targets[names[0]][0])
            out = torch.randn(rows, width)
            expected = out.clone()
            apply_reference(mix, held, layer, group, x, expected)
            step.apply(layer, group, x, out)
            assert torch.allclose(out, expected, atol=1e-4, rtol=1e-5), (layer, group)


@pytest.mark.parametrize("cost", [0.0, 40.0, math.inf])
@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 1)],
        [(0, 3), (1, 1), (2, 2), (3, 1), (4, 4), (5, 1)],
        [(1, 1), (2, 7)],
        [(0, 1), (3, 1), (5, 2), (0, 9), (5, 3)],
        [(4, 2), (5, 2), (1, 20)],
    ],
)
def test_every_form_equals_the_plain_loop(
    adapters: list[HostAdapter], cost: float, lengths: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    slots = filled(adapters, cost)
    mix = segments(lengths, start=2)
    for _ in range(3):
        check(slots, adapters, mix)


def test_a_merge_waits_for_the_second_step_and_then_stays(adapters: list[HostAdapter]) -> None:
    slots = filled(adapters, math.inf)
    counts = []
    for lengths in ([(0, 1), (1, 1)], [(1, 2), (2, 1)], [(0, 1), (3, 1)], [(0, 4), (1, 1)]):
        slots.step(segments(lengths))
        counts.append(slots.statistics()["merges"])
    assert counts == [0, 1, 1, 1]


def test_a_step_of_the_same_mix_is_not_planned_again(adapters: list[HostAdapter]) -> None:
    slots = filled(adapters, math.inf)
    mix = segments([(0, 1), (1, 1)])
    first, second, third = slots.step(mix), slots.step(mix), slots.step(mix)
    assert first is not second
    assert second is third


def test_long_segments_are_not_merged(adapters: list[HostAdapter]) -> None:
    slots = filled(adapters, 40.0)
    for _ in range(3):
        assert len(slots.step(segments([(0, 500), (1, 500)])).units) == 2
    assert slots.statistics()["merged_bytes"] == 0


def test_a_slot_shows_nothing_of_what_it_held(adapters: list[HostAdapter]) -> None:
    """The wide adapter first, then a narrow one of other projections, in merged and single form."""
    for cost in (0.0, math.inf):
        slots = filled(adapters, cost)
        mix = segments([(0, 2), (1, 2), (3, 1)])
        for _ in range(2):
            check(slots, adapters, mix)
        slots.put(0, adapters[5])
        changed = [adapters[5], *adapters[1:]]
        for _ in range(3):
            check(slots, changed, mix)


def test_a_cleared_slot_is_never_computed_as_base(adapters: list[HostAdapter]) -> None:
    slots = filled(adapters, math.inf)
    mix = segments([(0, 1), (1, 1)])
    slots.step(mix)
    slots.step(mix)
    slots.clear(1)
    assert slots.statistics()["used"] == len(adapters) - 1
    with pytest.raises(BrokenInvariant, match="slot 1, which is empty"):
        slots.step(mix)


@pytest.mark.parametrize("cost", [0.0, math.inf])
def test_one_rows_infinity_does_not_reach_another(adapters: list[HostAdapter], cost: float) -> None:
    slots = filled(adapters, cost)
    mix = segments([(0, 1), (1, 1)])
    slots.step(mix)
    step = slots.step(mix)
    x = torch.ones(2, 32)
    x[0] = math.inf
    out = torch.zeros(2, 64)
    step.apply(0, 0, x, out)
    assert out[0].isnan().any()
    assert out[1].isfinite().all()


def test_an_adapter_that_does_not_fit_leaves_the_slot_as_it_was(
    adapters: list[HostAdapter], tmp_path: Path
) -> None:
    slots = LoraSlots(1, 8, SHAPE, torch.float32, CPU)
    slots.put(0, adapters[0])
    with pytest.raises(EngineRejected, match="rank is 16; the engine takes up to 8"):
        slots.put(0, adapters[3])
    other = base_shape({**CONFIG, "num_hidden_layers": 3})
    tensors = adapter_tensors(other, {"mlp.up_proj": 8})
    deep = AdapterReader(other, torch.float32).read(write_adapter(tmp_path, tensors))
    with pytest.raises(EngineRejected, match="3 layers"):
        slots.put(0, deep)
    check(slots, [adapters[0]], segments([(0, 2)]))


def test_moving_to_a_device_keeps_every_matrix(adapters: list[HostAdapter]) -> None:
    moved = adapters[3].to(torch.device("meta"))
    for layer, other in zip(adapters[3].layers, moved.layers, strict=True):
        for group, same in zip(layer, other, strict=True):
            if group is not None and same is not None:
                assert same.a.shape == group.a.shape
                assert same.a.storage_offset() == group.a.storage_offset()
                assert [p.b.stride() for p in same.parts] == [p.b.stride() for p in group.parts]
