"""The engine core with a stand-in for the model: what each request hears, what fails alone."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lorry.engine import GenerateRequest, LoraVersion, SamplingParams
from lorry.engines.embedded.batch import StepBatch
from lorry.engines.embedded.blocks import BlockPool
from lorry.engines.embedded.host import HostCache
from lorry.engines.embedded.loop import CoreLimits, EngineCore
from lorry.engines.embedded.schedule import ScheduleLimits
from lorry.engines.embedded.wire import Output
from lorry.errors import EngineRejected
from lorry.ids import EngineId, VersionId

VOCAB = 100


@dataclass
class Adapter:
    """Shifts the stand-in's answer by its number."""

    shift: int
    bytes: int = 10
    unfit: bool = False


@dataclass
class Device:
    """Slots that remember."""

    slots: dict[int, Adapter] = field(default_factory=dict)

    def put(self, slot: int, adapter: Adapter) -> None:
        if adapter.unfit:
            raise RuntimeError("does not fit")
        self.slots[slot] = adapter

    def clear(self, slot: int) -> None:
        self.slots.pop(slot, None)


@dataclass
class Model:
    """The next token is the sum of all before it, plus the adapter's shift: foreign KV shows.

    Its "KV cache" is the token in each place of each block.
    """

    device: Device
    size: int
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    poison: int | None = None
    """A batch with this token fails."""
    nan: int | None = None
    """A sequence whose last token is this has no finite logits."""
    batches: list[StepBatch] = field(default_factory=list)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.batches.append(batch)
        if self.poison in batch.token_ids:
            raise ZeroDivisionError("poisoned")
        logits = torch.zeros(len(batch.token_ids), VOCAB)
        at = 0
        for n, length, table, slot in zip(
            batch.query_lens, batch.context_lens, batch.block_tables, batch.slots, strict=True
        ):
            shift = self.device.slots[slot].shift if slot >= 0 else 0
            for position in range(length - n, length):
                assert batch.positions[at] == position
                place = table[position // self.size], position % self.size
                self.kv[place] = batch.token_ids[at] + 1000 * shift
                seen = [self.kv[table[p // self.size], p % self.size] for p in range(position + 1)]
                assert {value // 1000 for value in seen} == {shift}, "foreign KV"
                logits[at, (sum(seen) + shift) % VOCAB] = 10.0
                if batch.token_ids[at] == self.nan:
                    logits[at] = torch.nan
                at += 1
        return logits[list(batch.logit_rows)]


class Bench:
    """A core with everything pretended."""

    def __init__(
        self, *, tokens: int = 16, seqs: int = 4, blocks: int = 50, loras: int = 2, size: int = 4
    ) -> None:
        self.device = Device()
        self.model = Model(self.device, size)
        self.now = 0.0
        limits = CoreLimits(ScheduleLimits(seqs, tokens, 1.0), 60, loras)
        host: HostCache[Adapter] = HostCache(8, 1000)
        pool = BlockPool(blocks, size)
        self.core: EngineCore[Adapter] = EngineCore(
            self.model, self.device, host, pool, limits, lambda: self.now
        )
        self.keys = 0

    def lora(self, number: int, **adapter: Any) -> LoraVersion:
        version = LoraVersion(
            EngineId(number), VersionId(f"v{number}"), f"a{number}", Path("/nowhere"), 10
        )
        self.core.host.reserve(version)
        self.core.hold(version, Adapter(number, **adapter))
        return version

    def ask(self, prompt: tuple[int, ...], lora: LoraVersion | None = None, **params: Any) -> int:
        self.keys += 1
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **params})
        engine_id = lora.engine_id if lora else None
        version = lora.version if lora else None
        request = GenerateRequest(f"r{self.keys}", prompt, sampling, engine_id, version)
        self.core.submit(self.keys, request)
        return self.keys

    def run(self) -> dict[int, list[Output]]:
        """Step until idle; outputs by key."""
        found: dict[int, list[Output]] = {}
        for _ in range(500):
            if not self.core.busy:
                break
            self.core.step()
            self.now += 0.05
            for output in self.core.take_outputs():
                found.setdefault(output.key, []).append(output)
        assert not self.core.busy
        self.core.check()
        for outputs in found.values():
            ended = [o.finish_reason is not None or o.failure is not None for o in outputs]
            assert ended == [False] * (len(ended) - 1) + [True], "promise 7: one end each"
        return found


def tokens(outputs: list[Output]) -> list[int]:
    return [t for output in outputs for t in output.token_ids]


def right(prompt: tuple[int, ...], count: int = 5, shift: int = 0) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        values = [t + 1000 * shift for t in (*prompt, *made)]
        made.append((sum(values) + shift) % VOCAB)
    return made


def test_every_request_gets_its_own_answer_in_a_mixed_and_chunked_batch() -> None:
    bench = Bench(tokens=7, seqs=3)
    loras = [None, bench.lora(1), bench.lora(2), bench.lora(3)]
    prompts = [tuple(range(n, 2 * n + 1)) for n in (1, 2, 11, 17)]
    keys = {bench.ask(p, lora): (p, lora) for p in prompts for lora in loras}
    found = bench.run()
    for key, (prompt, lora) in keys.items():
        assert tokens(found[key]) == right(prompt, shift=lora.engine_id if lora else 0)
        assert found[key][-1].finish_reason == "length"


def test_promise_2_answers_stay_right_under_preemption_and_prefix_reuse() -> None:
    bench = Bench(blocks=16, seqs=6)
    loras = [None, bench.lora(1), bench.lora(2), bench.lora(3)]
    prompt = tuple(range(9))
    keys = {bench.ask(prompt, lora, max_tokens=20): lora for lora in loras * 4}
    found = bench.run()
    for key, lora in keys.items():
        assert tokens(found[key]) == right(prompt, 20, lora.engine_id if lora else 0)
    counters = bench.core.health().counters
    assert counters["preemptions"] > 0
    assert counters["prefix_hit_tokens"] > 0
    assert counters["slot_loads"] > 2
    assert counters["generation_tokens"] == 16 * 20
    assert counters["prompt_tokens"] == 16 * 9


def test_a_step_that_fails_ends_its_requests_and_no_other() -> None:
    bench = Bench(seqs=2)
    bench.model.poison = 66
    hit = [bench.ask((1, 66)), bench.ask((2,), max_tokens=30)]
    later = bench.ask((3,))
    found = bench.run()
    for key in hit:
        assert found[key][-1].failure is not None
        assert "poisoned" in found[key][-1].failure.message
    assert tokens(found[later]) == right((3,))
    assert bench.core.health().counters["failures"] == 2
    assert tokens_of_new(bench) == right((5,))


def tokens_of_new(bench: Bench) -> list[int]:
    key = bench.ask((5,))
    return tokens(bench.run()[key])


def test_logits_that_are_no_numbers_end_only_their_own_request() -> None:
    bench = Bench()
    bench.model.nan = 77
    bad, good = bench.ask((77,)), bench.ask((3,))
    found = bench.run()
    assert found[bad][-1].failure is not None
    assert "finite" in found[bad][-1].failure.message
    assert tokens(found[good]) == right((3,))


def test_an_adapter_that_does_not_fit_its_slot_ends_only_its_own_requests() -> None:
    bench = Bench()
    unfit, fit = bench.lora(1, unfit=True), bench.lora(2)
    bad, good = bench.ask((3,), unfit), bench.ask((3,), fit)
    found = bench.run()
    assert found[bad][-1].failure is not None
    assert tokens(found[good]) == right((3,), shift=2)
    assert bench.core.health().slots.count(None) == 1


def test_promise_10_a_version_that_is_not_held_is_refused() -> None:
    bench = Bench()
    lora = bench.lora(1)
    assert bench.core.remove(lora.engine_id) is True
    key = bench.ask((3,), lora)
    (output,) = bench.run()[key]
    assert output.failure is not None and output.failure.kind == "EngineRejected"


def test_promise_3_remove_ends_what_runs_and_forgets_every_tier() -> None:
    bench = Bench()
    lora, other = bench.lora(1), bench.lora(2)
    on_it = [bench.ask((1,) * 9, lora, max_tokens=40) for _ in range(2)]
    beside = bench.ask((1,) * 9, other)
    for _ in range(4):
        bench.core.step()
    assert bench.core.remove(lora.engine_id) is True
    assert bench.core.remove(lora.engine_id) is False
    found = bench.run()
    assert [found[key][-1].finish_reason for key in on_it] == ["abort", "abort"]
    assert tokens(found[beside]) == right((1,) * 9, shift=2)
    assert bench.core.host.ids() == {2}
    assert 1 not in [adapter.shift for adapter in bench.device.slots.values()]
    bench.lora(1)
    again = bench.ask((1,) * 9, lora)
    assert bench.run()[again][0].cached_tokens == 0


def test_an_abort_ends_a_waiting_and_a_running_request_once() -> None:
    bench = Bench(seqs=1)
    running, waiting = bench.ask((1,), max_tokens=50), bench.ask((2,))
    bench.core.step()
    for key in (running, waiting, running, 999):
        bench.core.abort(key)
    found = bench.run()
    assert found[running][-1].finish_reason == found[waiting][-1].finish_reason == "abort"


def test_prompt_scores_are_those_of_the_next_prompt_token() -> None:
    bench = Bench(tokens=3)
    prompt = (1, 1, 2, 4, 8, 9)
    key = bench.ask(prompt, prompt_logprobs=1, max_tokens=1)
    (output,) = bench.run()[key]
    assert [score.token_id for score in output.prompt_logprobs] == list(prompt[1:])
    # Each is the sum of those before, but the last, which is not.
    likely = [score.top[0][0] == score.token_id for score in output.prompt_logprobs]
    assert likely == [True, True, True, True, False]


def test_scoring_survives_a_preemption() -> None:
    bench = Bench(tokens=4, seqs=2, blocks=8)
    bench.ask((1,), max_tokens=25)
    prompt = tuple(range(12))
    key = bench.ask(prompt, prompt_logprobs=0, max_tokens=6)
    outputs = bench.run()[key]
    assert [s.token_id for s in outputs[0].prompt_logprobs] == list(prompt[1:])
    assert tokens(outputs) == right(prompt, 6)


def test_seeded_chance_survives_a_preemption() -> None:
    calm, tight = Bench(blocks=50), Bench(blocks=9)
    answers = []
    for bench in (calm, tight):
        keys = [bench.ask((k,), temperature=3.0, seed=5, max_tokens=20) for k in (1, 2, 3)]
        found = bench.run()
        answers.append([tokens(found[key]) for key in keys])
    assert answers[0] == answers[1]
    assert tight.core.health().counters["preemptions"] > 0


def test_only_rows_that_are_wanted_have_logits() -> None:
    bench = Bench(tokens=8)
    bench.ask(tuple(range(20)), max_tokens=2)
    bench.run()
    assert [list(batch.logit_rows) for batch in bench.model.batches] == [[], [], [3], [0]]


def test_promise_6_a_pin_needs_a_held_version() -> None:
    bench = Bench()
    with pytest.raises(EngineRejected):
        bench.core.pin(EngineId(1), True)
    bench.lora(1)
    bench.core.pin(EngineId(1), True)
    bench.run()
    assert 1 in bench.core.health().slots
    bench.core.pin(EngineId(7), False)
