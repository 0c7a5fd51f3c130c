"""Which sequences compute how many tokens in the next step. Pure: no torch, no clock of its own.

Rules:

1. Who decodes goes first, then prompts that are under way, then the queue, within one budget of
   tokens. Long prompts are cut into chunks, so they never hold up those who decode.
2. The queue is ordered by the time each began to wait. Whoever lacks a *slot* is passed over by
   those who do not; whoever lacks a *seat* or *blocks* holds up all behind, so long prompts are
   not starved by short ones.
3. When blocks run out, the sequence placed last goes back to the head of the queue, and is
   computed again when its turn comes.
4. Slots are time-sliced. Once the first in the queue that lacks a slot has waited `slot_wait_s`, it
   gets the slot of the unpinned version that came in first, if that has had `slot_wait_s` itself;
   the sequences put out go to the end of the queue, and their KV stays in the cache.

The bound (promise 11). Let S be the unpinned slots, at least one, and k the distinct versions
without a slot that began to wait before a sequence did. After `slot_wait_s` all of them are
entitled, and from then on each slot changes hands at least once per `slot_wait_s`, always to the
first in the queue. So the sequence has a slot after at most

    slot_wait_s * (1 + ceil((k + 1) / S))      and the one step that is under way.

Seats and blocks come on top: it waits for those who wait longer, as in any queue.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from lorry.engines.embedded.blocks import BlockPool
from lorry.engines.embedded.sequence import Running
from lorry.engines.embedded.slot_table import SlotTable
from lorry.ids import EngineId

SCORED_TOKENS = 128
"""Prompt tokens per step whose logits are wanted: 128 rows of a vocabulary of 150,000 are 77 MB."""


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """What one step may hold."""

    max_num_seqs: int
    """Sequences that have KV at a time."""
    max_num_batched_tokens: int
    """Tokens per step; raised to `max_num_seqs`, or those who decode would not all fit."""
    slot_wait_s: float
    """A version's slice of time in a slot that others wait for."""

    @property
    def tokens(self) -> int:
        """The budget of one step."""
        return max(self.max_num_batched_tokens, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of one sequence, beginning at its `computed`."""

    running: Running
    count: int
    ends: bool
    """Whether nothing is left to do after them, so that the next token is chosen."""


@dataclass(slots=True)
class Plan:
    """One step."""

    budget: int
    """Tokens left; dies with the plan."""
    works: list[Work] = field(default_factory=list)
    loads: list[tuple[int, EngineId]] = field(default_factory=list)
    """(slot, version) to copy in before the step."""

    def add(self, running: Running) -> None:
        """As many tokens as are left for it, at least one."""
        count = min(running.to_do, self.budget)
        if running.scoring:
            count = min(count, SCORED_TOKENS)
        self.budget -= count
        self.works.append(Work(running, count, count == running.to_do))


class Scheduler:
    """The queue, those who have a seat, and the slots they sit by."""

    def __init__(self, limits: ScheduleLimits, pool: BlockPool, slots: SlotTable) -> None:
        """Nobody waits and nobody runs."""
        self.limits = limits
        self.pool = pool
        self.slots = slots
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.preemptions = 0
        """Sequences put back because blocks ran out, since the beginning."""
        self.slices = 0
        """Versions put out of a slot by the clock, since the beginning."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to plan."""
        return bool(self.waiting or self.running or self.slots.homeless())

    def everyone(self) -> Iterator[Running]:
        """All sequences."""
        yield from self.running
        yield from self.waiting

    def submit(self, running: Running) -> None:
        """To the end of the queue."""
        self.waiting.append(running)

    def finish(self, running: Running) -> None:
        """It is over, wherever it is; its blocks are given back."""
        self.pool.release(running.table)
        if running in self.running:
            self.running.remove(running)
        elif running in self.waiting:
            self.waiting.remove(running)

    def plan(self, now: float) -> Plan:
        """The next step, for `now` in seconds; empty when nobody can go on."""
        plan = Plan(self.limits.tokens)
        self._seat_pinned(plan, now)
        self._turn_slots(plan, now)
        self._go_on(plan)
        self._place_waiting(plan, now)
        for work in plan.works:
            if work.running.engine_id is not None:
                self.slots.touch(work.running.engine_id)
        return plan

    def _go_on(self, plan: Plan) -> None:
        decoding = [r for r in self.running if r.to_do == 1]
        for running in decoding:
            if running in self.running and self._make_room(running):
                plan.add(running)
        # Room for a whole prompt was taken when it was placed, so it cannot run out here.
        for running in [r for r in self.running if r.to_do > 1]:
            if plan.budget:
                plan.add(running)
        plan.works = [work for work in plan.works if work.running in self.running]

    def _make_room(self, running: Running) -> bool:
        """Blocks for one more token, if need be those of the sequence that was placed last."""
        while not self.pool.grow(running.table, len(running.tokens)):
            last = self.running[-1]
            self.preemptions += 1
            self._put_back(last)
            self.waiting.appendleft(last)
            if last is running:
                return False
        return True

    def _place_waiting(self, plan: Plan, now: float) -> None:
        busy = self._busy_versions()
        passed_over: list[Running] = []
        while self.waiting and plan.budget and len(self.running) < self.limits.max_num_seqs:
            running = self.waiting[0]
            if not self._find_slot(running, plan, busy, now):
                passed_over.append(self.waiting.popleft())
                continue
            if not self._find_blocks(running):
                break
            self.waiting.popleft()
            self.running.append(running)
            plan.add(running)
            if running.engine_id is not None:
                busy.add(running.engine_id)
        self.waiting.extendleft(reversed(passed_over))

    def _find_slot(self, running: Running, plan: Plan, busy: set[EngineId], now: float) -> bool:
        engine_id = running.engine_id
        if engine_id is None or self.slots.number_of(engine_id) is not None:
            return True
        number = self.slots.idle(busy)
        if number is None:
            return False
        self._load(plan, number, engine_id, now)
        return True

    def _find_blocks(self, running: Running) -> bool:
        """The cached prefix and room for all the rest, or nothing."""
        cached = 0 if running.scoring else self.pool.match(running.table, running.tokens)
        if not self.pool.grow(running.table, len(running.tokens)):
            self.pool.release(running.table)
            return False
        running.computed = cached
        if not running.placed:
            running.placed = True
            running.cached_tokens = min(cached, len(running.request.prompt))
        return True

    def _seat_pinned(self, plan: Plan, now: float) -> None:
        for engine_id in self.slots.homeless():
            number = self.slots.idle(self._busy_versions())
            if number is None:
                victim = self.slots.longest_held(now)
                assert victim is not None, "promise 6: all slots are pinned"
                number = self._put_out(victim, now)
            self._load(plan, number, engine_id, now)

    def _turn_slots(self, plan: Plan, now: float) -> None:
        """Rule 4, for all in the queue that are entitled and all slots that have had their time."""
        entitled = now - self.limits.slot_wait_s
        while True:
            busy = self._busy_versions()
            head = next((r for r in self.waiting if self._lacks_slot(r)), None)
            if head is None or head.engine_id is None or head.waiting_since > entitled:
                return
            if self.slots.idle(busy) is not None:
                return
            victim = self.slots.longest_held(entitled)
            if victim is None:
                return
            self.slices += 1
            self._load(plan, self._put_out(victim, now), head.engine_id, now)

    def _lacks_slot(self, running: Running) -> bool:
        engine_id = running.engine_id
        return engine_id is not None and self.slots.number_of(engine_id) is None

    def _put_out(self, victim: EngineId, now: float) -> int:
        """Its sequences wait anew, and the slot's number is free for another."""
        number = self.slots.number_of(victim)
        assert number is not None
        for running in [r for r in self.running if r.engine_id == victim]:
            self._put_back(running)
            running.waiting_since = now
            self.waiting.append(running)
        return number

    def _put_back(self, running: Running) -> None:
        self.running.remove(running)
        self.pool.release(running.table)
        running.step_back()

    def _load(self, plan: Plan, number: int, engine_id: EngineId, now: float) -> None:
        plan.loads = [load for load in plan.loads if load[0] != number]
        plan.loads.append((number, engine_id))
        self.slots.put(number, engine_id, now)

    def _busy_versions(self) -> set[EngineId]:
        return {r.engine_id for r in self.running if r.engine_id is not None}
