"""The plan of a step, and that a row's logits depend on its own sequence alone."""

import math

import pytest
import torch
from torch import Tensor

from lorry.engines.embedded.attention import Segment, StepPlanner
from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.model import Decoder
from tests.fixtures.tiny_weights import write_model

SIZE = 4


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(write_model(tmp_path_factory.mktemp("model")), "float32", "cpu")


def batch(*parts: tuple[int, int, list[int], int]) -> StepBatch:
    """Each sequence as (queries, context, table, slot); tokens follow from table and position."""
    ids, positions = [], []
    for queries, context, table, _ in parts:
        where = range(context - queries, context)
        positions += where
        ids += [(7 * table[0] + 3 * at) % 60 for at in where]
    return StepBatch(
        token_ids=ids,
        positions=positions,
        query_lens=[one[0] for one in parts],
        context_lens=[one[1] for one in parts],
        block_tables=[one[2] for one in parts],
        slots=[one[3] for one in parts],
        logit_rows=range(len(ids)),
    )


def test_rows_are_laid_out_decode_then_prefill_with_each_adapters_rows_together() -> None:
    planner = StepPlanner(SIZE, 99, torch.float32, torch.device("cpu"))
    mixed = batch(
        (3, 3, [0], 1), (1, 5, [1, 2], 1), (2, 2, [3], -1), (1, 1, [4], -1), (1, 2, [5], 0)
    )
    plan = planner.plan(mixed)
    assert plan.segments == (Segment(0, 1, 2), Segment(1, 2, 6))
    assert [(one.start, one.stop) for one in plan.prefill] == [(3, 6), (6, 8)]
    assert plan.writes.tolist() == [16, 21, 8, 0, 1, 2, 12, 13]
    assert plan.logit_rows.tolist() == [3, 4, 5, 2, 6, 7, 0, 1]
    assert plan.fresh is not None
    assert sorted(plan.fresh.tolist()) == [0, 2, 3, 4]


def test_a_filled_block_is_not_zeroed() -> None:
    planner = StepPlanner(SIZE, 99, torch.float32, torch.device("cpu"))
    assert planner.plan(batch((4, 4, [0], -1), (1, 7, [1, 2], -1))).fresh is None


def test_one_long_sequence_does_not_pad_the_others() -> None:
    planner = StepPlanner(SIZE, 99, torch.float32, torch.device("cpu"))
    short = [(1, 3, [i], -1) for i in range(10)]
    plan = planner.plan(batch(*short, (1, 120, list(range(20, 50)), -1)))
    assert [(one.count, len(one.blocks)) for one in plan.decode] == [(1, 30), (10, 10)]
    alike = planner.plan(batch(*short, (1, 8, [30, 31], -1)))
    assert [(one.count, len(one.blocks)) for one in alike.decode] == [(11, 22)]
    assert alike.decode[0].rows is None


def run(decoder: Decoder, poison: float, *extra: tuple[int, int, list[int], int]) -> Tensor:
    """Two sequences computed in chunks and decoded, perhaps beside others, in a poisoned cache."""
    decoder.allocate_kv(128, SIZE)
    decoder._cache[:, :128].fill_(poison)
    found = []
    for step in (
        [(5, 5, [40, 41, 42], -1), (3, 3, [50, 51], -1)],
        [(4, 9, [40, 41, 42], -1), (1, 4, [50, 51], -1)],
        [(1, 10, [40, 41, 42], -1), (1, 5, [50, 51], -1)],
        [(1, 11, [40, 41, 42], -1), (1, 6, [50, 51], -1)],
    ):
        rows = sum(one[0] for one in step)
        found.append(decoder.forward(batch(*step, *extra))[:rows])
    return torch.cat(found)


def test_what_a_block_held_before_never_reaches_a_row(decoder: Decoder) -> None:
    clean = run(decoder, 0.0)
    assert clean.isfinite().all()
    assert torch.equal(run(decoder, math.nan), clean)
    assert torch.equal(run(decoder, math.inf), clean)


@pytest.mark.parametrize(
    "extra",
    [
        [(1, 1, [60], -1)],
        [(9, 9, [61, 62, 63], -1)],
        [(1, 1, [60 + i], -1) for i in range(30)],
        [(70, 70, list(range(60, 78)), -1), (1, 1, [80], -1)],
    ],
)
def test_a_rows_logits_do_not_depend_on_the_rest_of_the_batch(
    decoder: Decoder, extra: list[tuple[int, int, list[int], int]]
) -> None:
    alone, together = run(decoder, 0.0), run(decoder, 0.0, *extra)
    assert float((alone - together).abs().max() / alone.abs().max()) < 1e-5


def test_logits_come_in_the_order_asked(decoder: Decoder) -> None:
    decoder.allocate_kv(8, SIZE)
    full = decoder.forward(batch((3, 3, [0], -1), (1, 1, [1], -1)))
    parts = batch((3, 3, [0], -1), (1, 1, [1], -1))
    picked = decoder.forward(
        StepBatch(
            parts.token_ids,
            parts.positions,
            parts.query_lens,
            parts.context_lens,
            parts.block_tables,
            parts.slots,
            [3, 0, 2],
        )
    )
    assert torch.allclose(picked, full[[3, 0, 2]], atol=1e-5)
    assert picked.dtype == torch.float32


def test_rows_of_a_slot_need_slots_and_a_step_needs_a_cache(decoder: Decoder) -> None:
    decoder.allocate_kv(8, SIZE)
    with pytest.raises(RuntimeError, match="no slots are attached"):
        decoder.forward(batch((1, 1, [0], 0)))
