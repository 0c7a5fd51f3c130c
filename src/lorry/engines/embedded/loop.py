"""The engine core: requests and adapters in, one step at a time, outputs out.

`EngineCore.step` is the whole loop: schedule, run, postprocess. An exception in a step ends the
requests of that step with an error and nothing else; the next step goes on.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lorry.engine import EngineHealth, GenerateRequest, LoraVersion, TokenLogprobs
from lorry.engines.embedded import sampler
from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.blocks import BlockPool
from lorry.engines.embedded.host import HostCache, Sized
from lorry.engines.embedded.schedule import Plan, ScheduleLimits, Scheduler, Work
from lorry.engines.embedded.sequence import Running, begin
from lorry.engines.embedded.slot_table import SlotTable
from lorry.engines.embedded.wire import COUNTERS, Output, failure
from lorry.errors import EngineRejected
from lorry.ids import EngineId

logger = logging.getLogger(__name__)

Packed = TypeVar("Packed", bound=Sized)
PackedIn = TypeVar("PackedIn", bound=Sized, contravariant=True)


class Model(Protocol):
    """What computes a step: the decoder, or a stand-in for it."""

    def forward(self, batch: StepBatch) -> Tensor:
        """float32 [logit_rows, vocab]."""


class DeviceSlots(Protocol[PackedIn]):
    """Where adapters are while they compute."""

    def put(self, slot: int, adapter: PackedIn) -> None:
        """The slot holds this adapter and nothing else."""

    def clear(self, slot: int) -> None:
        """The slot holds nothing."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """What the core may hold."""

    schedule: ScheduleLimits
    max_model_len: int
    """Prompt and answer together, in tokens."""
    max_loras: int
    """Device slots."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which rows of the logits belong to one piece of work."""

    work: Work
    scored: range
    """Rows that tell the next *prompt* token's probability."""
    chosen: int | None
    """The row that the next output token is chosen from."""


class EngineCore(Generic[Packed]):
    """All state of the engine. One thread steps; another that holds `books` may do what touches no
    request, even while a step computes: see `uses`."""

    def __init__(
        self,
        model: Model,
        device_slots: DeviceSlots[Packed],
        host: HostCache[Packed],
        pool: BlockPool,
        limits: CoreLimits,
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives seconds and never goes back."""
        self.host = host
        self.pool = pool
        self.slots = SlotTable(limits.max_loras)
        self.scheduler = Scheduler(limits.schedule, pool, self.slots)
        self.books = RLock()
        """Held by whoever looks at anything here or changes it, but not while a step computes."""
        self._model = model
        self._device_slots = device_slots
        self._limits = limits
        self._clock = clock
        self._outputs: list[Output] = []
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to say."""
        return bool(self._outputs) or self.scheduler.busy

    def step(self) -> None:
        """One step of the loop; see `take_outputs` for what it did."""
        works: list[Work] = []
        try:
            with self.books:
                works = self._fill_slots(self.scheduler.plan(self._clock()))
                if not works:
                    return
                batch, rows = build_batch(works, self.slots)
            with torch.inference_mode():
                logits = self._model.forward(batch)
                with self.books:
                    self._postprocess(rows, logits)
        except Exception as error:
            logger.exception("a step failed; its requests end with an error")
            hit = {id(work.running) for work in works}
            with self.books:
                self._fail((r for r in self.scheduler.everyone() if id(r) in hit or not hit), error)

    def take_outputs(self) -> list[Output]:
        """What was done for whom since the last call, in order."""
        with self.books:
            outputs, self._outputs = self._outputs, []
        return outputs

    def uses(self, engine_id: EngineId) -> bool:
        """Whether a request runs or waits on it; if not, it may go while a step computes."""
        return any(running.engine_id == engine_id for running in self.scheduler.everyone())

    # Requests.

    def submit(self, key: int, request: GenerateRequest) -> None:
        """Queue it, or end it at once when its version is not held."""
        running = begin(key, request, self._limits.max_model_len, self._clock())
        held = None if request.engine_id is None else self.host.get(request.engine_id)
        if request.engine_id is not None and held is None:
            error = EngineRejected(f"Engine id {request.engine_id} is not held by the engine.")
            self._outputs.append(Output(key, failure=failure(error)))
        elif held is not None and held.version.version != request.version:
            error = EngineRejected(
                f"Engine id {request.engine_id} holds version {held.version.version[:12]}, but the "
                f"request names {(request.version or 'none')[:12]}."
            )
            self._outputs.append(Output(key, failure=failure(error)))
        else:
            self.scheduler.submit(running)

    def abort(self, key: int) -> None:
        """End it with "abort", if it is there."""
        self._abort(running for running in self.scheduler.everyone() if running.key == key)

    # Adapters.

    def hold(self, version: LoraVersion, adapter: Packed) -> int:
        """Keep a loaded adapter, for which a place was reserved; returns its bytes."""
        self.host.hold(version, adapter)
        return adapter.bytes

    def remove(self, engine_id: EngineId) -> bool:
        """Give it up in every tier; requests on it are aborted. False: it was not there."""
        self._abort(r for r in self.scheduler.everyone() if r.engine_id == engine_id)
        number = self.slots.remove(engine_id)
        if number is not None:
            self._device_slots.clear(number)
        held = self.host.remove(engine_id)
        if held is not None:
            self.pool.drop(held.version.version)
        return held is not None

    def pin(self, engine_id: EngineId, pinned: bool) -> None:
        """Keep it in a slot, or stop. Raises `EngineRejected`."""
        if not pinned:
            self.slots.unpin(engine_id)
            return
        if self.host.get(engine_id) is None:
            raise EngineRejected(
                f"Engine id {engine_id} is not held by the engine, so it cannot be pinned."
            )
        self.slots.pin(engine_id)

    # Books.

    def health(self) -> EngineHealth:
        """The present state."""
        counters = {
            **self._counters,
            "slot_loads": self.slots.loads,
            "slot_evictions": self.slots.evictions,
            "preemptions": self.scheduler.preemptions,
            "slot_preemptions": self.scheduler.slices,
        }
        return EngineHealth(
            ready=True,
            reason="",
            slots=self.slots.holders(),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks_used=self.pool.used,
            kv_blocks_total=self.pool.blocks,
            counters=counters,
        )

    def check(self) -> None:
        """Raise `AssertionError` when the books of an idle engine are wrong."""
        self.pool.check()
        assert self.scheduler.running or not self.pool.used, "blocks are used, but nobody runs"
        slots = {engine_id for engine_id in self.slots.holders() if engine_id is not None}
        assert slots <= self.host.ids(), "a slot holds a version that host memory does not"

    # How it is done.

    def _fill_slots(self, plan: Plan) -> list[Work]:
        """Copy in what the plan wants; what cannot be copied ends its requests, not the step."""
        for number, engine_id in plan.loads:
            held = self.host.get(engine_id)
            try:
                if held is None:
                    raise EngineRejected(f"Engine id {engine_id} is not held by the engine.")
                self._device_slots.put(number, held.adapter)
            except Exception as error:
                logger.exception("engine id %s could not be put in slot %s", engine_id, number)
                self.slots.remove(engine_id)
                self._device_slots.clear(number)
                self._fail(
                    [r for r in self.scheduler.everyone() if r.engine_id == engine_id], error
                )
        alive = set(map(id, self.scheduler.running))
        return [work for work in plan.works if id(work.running) in alive]

    def _postprocess(self, rows: Sequence[_Rows], logits: Tensor) -> None:
        choices = self._choose(rows, logits)
        wanted = {
            row: (r.work.running.tokens[r.work.running.computed + offset + 1], top)
            for r in rows
            if (top := r.work.running.sampling.prompt_logprobs) is not None
            for offset, row in enumerate(r.scored)
        }
        scores = sampler.score(logits, wanted)
        self._counters["steps"] += 1
        for index, r in enumerate(rows):
            running = r.work.running
            running.scores.extend(scores[row] for row in r.scored)
            running.computed += r.work.count
            self.pool.settle(running.table, running.tokens, running.computed)
            if r.work.ends:
                self._advance(running, choices.get(index))

    def _choose(self, rows: Sequence[_Rows], logits: Tensor) -> dict[int, sampler.Choice]:
        """By index into `rows`."""
        chosen = [(i, r.chosen) for i, r in enumerate(rows) if r.chosen is not None]
        if not chosen:
            return {}
        places = [row for _, row in chosen]
        picked = logits if len(places) == len(logits) else logits[places]
        asked = [_sampler_row(rows[i].work.running) for i, _ in chosen]
        choices = sampler.sample(picked, asked)
        return {i: choice for (i, _), choice in zip(chosen, choices, strict=True)}

    def _advance(self, running: Running, choice: sampler.Choice | None) -> None:
        """One token further, or to the end."""
        if choice is None:
            self._emit(running, Output(running.key, finish_reason="length"))
            return
        if not choice.finite:
            self._fail([running], EngineRejected("The model's logits are not finite numbers."))
            return
        end = running.judge(choice.token)
        if end is not None:
            self._emit(running, Output(running.key, finish_reason=end[0], stop_token_id=end[1]))
            return
        running.take(choice.token)
        self._counters["generation_tokens"] += 1
        logprobs = (choice.logprobs,) if choice.logprobs is not None else ()
        full = running.made >= running.max_tokens
        output = Output(running.key, (choice.token,), "length" if full else None, None, logprobs)
        self._emit(running, output)

    def _emit(self, running: Running, output: Output) -> None:
        """Say it; the first output tells of the prompt, the last ends the request."""
        if not running.emitted:
            running.emitted = True
            self._counters["prompt_tokens"] += len(running.request.prompt)
            self._counters["prefix_hit_tokens"] += running.cached_tokens
            scores: tuple[TokenLogprobs, ...] = tuple(running.scores)
            output = output._replace(prompt_logprobs=scores, cached_tokens=running.cached_tokens)
        if output.finish_reason is not None:
            self.scheduler.finish(running)
            self._counters["requests"] += 1
        self._outputs.append(output)

    def _abort(self, chosen: Iterable[Running]) -> None:
        for running in list(chosen):
            self.scheduler.finish(running)
            self._counters["aborts"] += 1
            self._outputs.append(Output(running.key, finish_reason="abort"))

    def _fail(self, chosen: Iterable[Running], error: Exception) -> None:
        for running in list(chosen):
            self.scheduler.finish(running)
            self._counters["failures"] += 1
            self._outputs.append(Output(running.key, failure=failure(error)))


def build_batch(works: Sequence[Work], slots: SlotTable) -> tuple[StepBatch, list[_Rows]]:
    """Lay the works one after another, and say which logits are wanted and what for."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    rows: list[_Rows] = []
    for work in works:
        running, start = work.running, work.running.computed
        end = start + work.count
        first = len(logit_rows)
        if running.scoring:
            # Row p tells token p + 1, so the prompt's last row tells the first output token.
            scored_end = min(end, len(running.request.prompt) - 1)
            logit_rows.extend(len(token_ids) + p - start for p in range(start, scored_end))
        scored = range(first, len(logit_rows))
        chosen = None
        if work.ends and running.max_tokens:
            chosen = len(logit_rows)
            logit_rows.append(len(token_ids) + work.count - 1)
        token_ids.extend(running.tokens[start:end])
        positions.extend(range(start, end))
        rows.append(_Rows(work, scored, chosen))
    batch = StepBatch(
        token_ids=token_ids,
        positions=positions,
        query_lens=[work.count for work in works],
        context_lens=[work.running.computed + work.count for work in works],
        block_tables=[work.running.table.blocks for work in works],
        slots=[_slot(work.running.engine_id, slots) for work in works],
        logit_rows=logit_rows,
    )
    return batch, rows


def _slot(engine_id: EngineId | None, slots: SlotTable) -> int:
    if engine_id is None:
        return -1
    number = slots.number_of(engine_id)
    assert number is not None, "a sequence is planned without a slot"
    return number


def _sampler_row(running: Running) -> sampler.Row:
    return sampler.Row(
        params=running.sampling,
        seed=running.seed,
        index=running.made,
        counts=running.counts,
        prompt=running.request.prompt,
        forbidden=running.forbidden(),
    )
