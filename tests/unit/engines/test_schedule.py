"""Who computes what in the next step, and how slots are shared by time."""

import math
from collections import Counter

import pytest

from lorry.engine import GenerateRequest, SamplingParams
from lorry.engines.embedded.blocks import BlockPool
from lorry.engines.embedded.schedule import SCORED_TOKENS, Plan, ScheduleLimits, Scheduler
from lorry.engines.embedded.sequence import Running, begin
from lorry.engines.embedded.slot_table import SlotTable
from lorry.errors import EngineRejected
from lorry.ids import EngineId, VersionId

WAIT_S = 1.0


class World:
    """A scheduler with a pretended model: every step takes `step_s` and every token is 7."""

    def __init__(
        self, *, seqs: int = 8, tokens: int = 32, slots: int = 2, blocks: int = 100, size: int = 4
    ) -> None:
        self.pool = BlockPool(blocks, size)
        self.slots = SlotTable(slots)
        limits = ScheduleLimits(seqs, tokens, WAIT_S)
        self.scheduler = Scheduler(limits, self.pool, self.slots)
        self.now = 0.0
        self.keys = 0
        self.done: list[Running] = []

    def add(
        self, version: int | None = None, prompt: int = 4, max_tokens: int = 4, scored: bool = False
    ) -> Running:
        self.keys += 1
        request = GenerateRequest(
            f"r{self.keys}",
            tuple(1000 * self.keys + i for i in range(prompt)),
            SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if scored else None),
            None if version is None else EngineId(version),
            None if version is None else VersionId(f"v{version}"),
        )
        running = begin(self.keys, request, 10_000, self.now)
        self.scheduler.submit(running)
        return running

    def step(self, step_s: float = 0.01) -> Plan:
        plan = self.scheduler.plan(self.now)
        limits = self.scheduler.limits
        assert sum(w.count for w in plan.works) <= limits.tokens
        assert len(self.scheduler.running) <= limits.max_num_seqs
        assert all(w.count > 0 for w in plan.works)
        for work in plan.works:
            r = work.running
            assert r.engine_id is None or self.slots.number_of(r.engine_id) is not None
            assert len(r.table.blocks) * self.pool.block_size >= r.computed + work.count
            r.computed += work.count
            self.pool.settle(r.table, r.tokens, r.computed)
            if work.ends:
                r.take(7)
                if r.made >= r.max_tokens:
                    self.scheduler.finish(r)
                    self.done.append(r)
        self.pool.check()
        self.now += step_s
        return plan


def counts(plan: Plan) -> list[tuple[int, int]]:
    return [(work.running.key, work.count) for work in plan.works]


def test_decoding_goes_first_and_a_long_prompt_is_cut() -> None:
    world = World(tokens=10)
    world.add(prompt=3)
    assert counts(world.step()) == [(1, 3)]
    world.add(prompt=25)
    assert counts(world.step()) == [(1, 1), (2, 9)]
    assert counts(world.step()) == [(1, 1), (2, 9)]
    assert counts(world.step()) == [(1, 1), (2, 7)]


def test_a_prompt_whose_logits_are_wanted_comes_in_small_chunks() -> None:
    world = World(tokens=1000)
    world.add(prompt=SCORED_TOKENS + 10, scored=True)
    assert counts(world.step()) == [(1, SCORED_TOKENS)]
    assert counts(world.step()) == [(1, 10)]


def test_the_budget_always_holds_all_who_decode() -> None:
    world = World(seqs=6, tokens=2)
    for _ in range(6):
        world.add(prompt=1, max_tokens=50)
    for _ in range(6):
        world.step()
    assert len(world.step().works) == 6


def test_seats_are_taken_in_order_of_arrival() -> None:
    world = World(seqs=2)
    runs = [world.add() for _ in range(5)]
    while world.scheduler.busy:
        world.step()
    assert [r.key for r in world.done] == [r.key for r in runs]


def test_a_long_prompt_is_not_starved_of_blocks_by_short_ones() -> None:
    world = World(blocks=10, seqs=8)
    world.add(prompt=20, max_tokens=8)
    world.step()
    long = world.add(prompt=30, max_tokens=1)
    for _ in range(40):
        world.add(prompt=4, max_tokens=4)
    while long not in world.done:
        world.step()
    assert len(world.done) == 2


def test_when_blocks_run_out_the_last_placed_is_put_back_and_loses_nothing() -> None:
    world = World(blocks=6, seqs=4)
    runs = [world.add(prompt=4, max_tokens=15) for _ in range(3)]
    for _ in range(200):
        if not world.scheduler.busy:
            break
        world.step()
    assert world.scheduler.preemptions > 0
    assert [r.made for r in runs] == [15, 15, 15]
    assert world.done[0] is runs[0]
    assert world.pool.used == 0


def test_the_cached_prefix_is_used_when_a_sequence_comes_back() -> None:
    world = World()
    world.add(prompt=9, max_tokens=1)
    world.step()
    again = world.add(prompt=9, max_tokens=1)
    again.tokens[:] = world.done[0].tokens[:9]
    assert counts(world.step()) == [(2, 1)]
    assert again.cached_tokens == 8


def test_scored_prompts_do_not_use_the_cache() -> None:
    world = World()
    world.add(prompt=9, max_tokens=1)
    world.step()
    again = world.add(prompt=9, max_tokens=1, scored=True)
    again.tokens[:] = world.done[0].tokens[:9]
    assert counts(world.step()) == [(2, 9)]


def test_a_step_has_no_more_versions_than_slots() -> None:
    world = World(slots=2)
    for version in (1, 2, 3, 1, 2, 3, None):
        world.add(version)
    plan = world.step()
    assert {w.running.engine_id for w in plan.works} == {1, 2, None}
    assert sorted(e for _, e in plan.loads) == [1, 2]


def test_an_idle_slot_is_given_away_least_recently_used_first() -> None:
    world = World(slots=2)
    for version in (1, 2, 1):
        world.add(version, max_tokens=1)
        world.step()
    world.add(3, max_tokens=1)
    assert world.step().loads == [(1, EngineId(3))]
    assert world.slots.holders() == (1, 3)


def test_who_lacks_a_slot_is_passed_over() -> None:
    world = World(slots=1)
    world.add(1, max_tokens=50)
    world.step()
    world.add(2)
    world.add(None)
    world.add(1)
    assert {w.running.key for w in world.step().works} == {1, 3, 4}


def test_promise_11_a_slot_changes_hands_after_the_wait_and_not_before() -> None:
    world = World(slots=1)
    hot = world.add(1, max_tokens=1000)
    world.step()
    cold = world.add(2, max_tokens=2)
    began = world.now
    while not cold.made:
        world.step()
        assert world.now < 10
    assert WAIT_S <= world.now - began <= WAIT_S + 0.03
    assert hot in world.scheduler.waiting
    made = hot.made
    while hot not in world.scheduler.running:
        world.step()
    assert hot.computed >= made
    assert world.scheduler.slices == 1


def test_a_version_put_out_by_time_keeps_its_kv() -> None:
    world = World(slots=1)
    hot = world.add(1, prompt=8, max_tokens=1000)
    while world.now < 2 * WAIT_S:
        world.step()
    world.add(2, max_tokens=1)
    while hot in world.scheduler.running:
        world.step()
    length = len(hot.tokens)
    while hot not in world.scheduler.running:
        plan = world.step()
    (count,) = [w.count for w in plan.works if w.running is hot]
    assert count <= world.pool.block_size
    assert len(hot.tokens) == length + 1


@pytest.mark.parametrize(("versions", "slots"), [(2, 1), (5, 1), (5, 2), (30, 4), (9, 8)])
def test_promise_11_every_first_token_comes_within_the_written_bound(
    versions: int, slots: int
) -> None:
    world = World(slots=slots, seqs=64, blocks=4000, tokens=512)
    runs = [world.add(v + 1, max_tokens=10**6) for v in range(versions)]
    step_s = 0.05
    first: dict[int, float] = {}
    bound = WAIT_S * (1 + math.ceil(versions / slots)) + 2 * step_s
    while len(first) < versions:
        world.step(step_s)
        first |= {r.key: world.now for r in runs if r.made and r.key not in first}
        assert world.now <= bound
    # And it goes on like that: nobody pauses for longer than the bound.
    pauses: Counter[int] = Counter()
    for _ in range(int(3 * bound / step_s)):
        before = {r.key: r.made for r in runs}
        world.step(step_s)
        for r in runs:
            pauses[r.key] = pauses[r.key] + 1 if r.made == before[r.key] else 0
            assert pauses[r.key] * step_s <= bound
    # A slice is a slice: slots do not change hands at every step.
    assert world.scheduler.slices <= slots * (world.now / WAIT_S + 1)


def test_promise_11_who_was_passed_over_keeps_the_place_in_the_queue() -> None:
    world = World(slots=1, seqs=2)
    world.add(1, max_tokens=10**6)
    world.step()
    first = world.add(2, max_tokens=1)
    for _ in range(3):
        world.add(None, max_tokens=200)
    second = world.add(3, max_tokens=1)
    while second not in world.done:
        world.step()
        assert world.now < 20
    assert world.done.index(first) < world.done.index(second)


def test_promise_6_a_pinned_version_is_never_put_out() -> None:
    world = World(slots=2)
    world.slots.pin(EngineId(1))
    for version in (1, 2, 3, 4):
        world.add(version, max_tokens=10**6)
    for _ in range(400):
        world.step(0.05)
        assert 1 in world.slots.holders()
    assert all(r.made for r in world.scheduler.everyone())


def test_promise_6_a_version_pinned_late_gets_its_slot_in_the_next_step() -> None:
    world = World(slots=2)
    for version in (1, 2):
        world.add(version, max_tokens=1000)
    world.step()
    world.slots.pin(EngineId(9))
    assert world.scheduler.busy
    assert [e for _, e in world.step().loads] == [9]
    assert 9 in world.slots.holders()


def test_promise_6_one_slot_is_never_pinned() -> None:
    slots = SlotTable(2)
    slots.pin(EngineId(1))
    slots.pin(EngineId(1))
    with pytest.raises(EngineRejected, match="1 of 2"):
        slots.pin(EngineId(2))
    slots.unpin(EngineId(1))
    slots.pin(EngineId(2))
    with pytest.raises(EngineRejected):
        SlotTable(1).pin(EngineId(1))


def test_removing_a_version_frees_its_slot_and_its_pin() -> None:
    slots = SlotTable(2)
    slots.put(0, EngineId(1), 0.0)
    slots.pin(EngineId(1))
    assert slots.remove(EngineId(1)) == 0
    assert slots.remove(EngineId(1)) is None
    assert slots.holders() == (None, None)
    slots.pin(EngineId(2))
