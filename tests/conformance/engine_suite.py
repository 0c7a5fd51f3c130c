"""What every engine must do, whatever it is made of: one class, run by a module per engine."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from lorry.engine import (
    Engine,
    EngineDown,
    EngineUp,
    GenerateRequest,
    LoraVersion,
    SamplingParams,
    TokenChunk,
)
from lorry.errors import EngineRejected, EngineUnreachable, RequestInvalid
from lorry.ids import EngineId, VersionId

LIMIT_S = 30
"""No single step of a test may take longer; generous, because the machine may be busy."""

MAX_LORAS, MAX_CPU_LORAS, MAX_MODEL_LEN = 2, 4, 2048
"""Every rig is built with these limits."""

SHORT = tuple(range(5, 13))
LONG = tuple(4 + (i * 37) % 500 for i in range(100))

ENDLESS = 2000
"""Tokens of an answer that must not end by itself."""

_numbers = count(1)


class Rig(ABC):
    """One engine under test, and what only its own test module knows how to do."""

    engine: Engine

    @abstractmethod
    def folder(self, sort: int) -> Path:
        """An adapter's folder; different sorts answer differently."""

    @abstractmethod
    async def crash(self) -> None:
        """Make the engine die and come back by itself or at once; does not wait for it."""

    def lora(self, sort: int, engine_id: int | None = None) -> LoraVersion:
        """A version that was never held before, of the weights of `sort`."""
        number = next(_numbers)
        return LoraVersion(
            engine_id=EngineId(engine_id or number),
            version=VersionId(f"{number:064x}"),
            name=f"adapter-{sort}",
            path=self.folder(sort),
            bytes=1 << 20,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """All chunks of one request."""

    chunks: tuple[TokenChunk, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of all chunks."""
        return tuple(t for chunk in self.chunks for t in chunk.token_ids)

    @property
    def last(self) -> TokenChunk:
        """The one with the finish reason."""
        return self.chunks[-1]


def ask(
    lora: LoraVersion | None = None,
    prompt: Sequence[int] = SHORT,
    *,
    cache_salt: str = "",
    request_id: str | None = None,
    **sampling: Any,
) -> GenerateRequest:
    """A greedy request of eight tokens, unless said otherwise."""
    chosen = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id=request_id or f"r{next(_numbers)}",
        prompt=tuple(prompt),
        sampling=SamplingParams(**chosen),
        engine_id=lora.engine_id if lora else None,
        version=lora.version if lora else None,
        cache_salt=cache_salt,
    )


async def collect(engine: Engine, request: GenerateRequest) -> Answer:
    """All chunks; checks on the way what holds of every answer."""
    with anyio.fail_after(LIMIT_S):
        chunks = [chunk async for chunk in engine.generate(request)]
    assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(not c.prompt_logprobs and not c.cached_tokens for c in chunks[1:])
    return Answer(tuple(chunks))


async def collect_all(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Answer]:
    """All at once."""
    answers: dict[int, Answer] = {}

    async def one(index: int, request: GenerateRequest) -> None:
        answers[index] = await collect(engine, request)

    async with anyio.create_task_group() as group:
        for index, request in enumerate(requests):
            group.start_soon(one, index, request)
    return [answers[index] for index in range(len(requests))]


async def settled(engine: Engine) -> None:
    """Return once nothing runs; the engine's word may come a moment later than the answer."""
    with anyio.fail_after(LIMIT_S):
        while True:
            health = engine.health()
            if not health.running and not health.waiting:
                return
            await anyio.sleep(0.01)


async def begin(engine: Engine, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
    """A request of which one chunk has been read."""
    stream = engine.generate(request)
    with anyio.fail_after(LIMIT_S):
        chunk = await anext(stream)
    assert chunk.finish_reason is None
    return stream


def closing(stream: AsyncIterator[TokenChunk]) -> Any:
    """The stream's iterator as a context that closes it."""
    assert hasattr(stream, "aclose")
    return aclosing(stream)


@pytest.mark.anyio
class EngineSuite:
    """Subclasses give `rig` (shared, well when a test begins) and `fresh_rig` (a test's own)."""

    @pytest.fixture
    async def engine(self, rig: Rig) -> AsyncIterator[Engine]:
        """The shared engine, empty before and after."""
        yield rig.engine
        for engine_id in await rig.engine.list_loras():
            await rig.engine.remove_lora(engine_id)
        assert await rig.engine.list_loras() == frozenset()
        await settled(rig.engine)

    # Holding and giving up.

    async def test_capabilities_are_those_it_was_built_with(self, engine: Engine) -> None:
        found = engine.capabilities()
        assert (found.max_loras, found.max_cpu_loras) == (MAX_LORAS, MAX_CPU_LORAS)
        assert found.max_model_len == MAX_MODEL_LEN
        assert found.base.targets["self_attn.q_proj"][0] == found.base.hidden_size

    async def test_promise_1_list_is_what_was_added_less_what_was_removed(
        self, rig: Rig, engine: Engine
    ) -> None:
        one, two = rig.lora(1), rig.lora(2)
        report = await engine.add_lora(one)
        await engine.add_lora(two)
        assert report.engine_id == one.engine_id
        assert 0 < report.bytes <= one.bytes
        assert await engine.list_loras() == {one.engine_id, two.engine_id}
        assert await engine.remove_lora(one.engine_id) is True
        assert await engine.list_loras() == {two.engine_id}

    async def test_removing_an_unknown_id_is_false(self, engine: Engine) -> None:
        assert await engine.remove_lora(EngineId(999_999)) is False

    async def test_promise_3_a_second_remove_is_false(self, rig: Rig, engine: Engine) -> None:
        lora = rig.lora(1)
        await engine.add_lora(lora)
        assert await engine.remove_lora(lora.engine_id) is True
        assert await engine.remove_lora(lora.engine_id) is False

    async def test_adding_what_is_held_changes_nothing(self, rig: Rig, engine: Engine) -> None:
        lora = rig.lora(1)
        first = await engine.add_lora(lora)
        second = await engine.add_lora(lora)
        assert second.bytes == first.bytes
        assert await engine.list_loras() == {lora.engine_id}

    async def test_an_id_in_use_is_refused_for_another_version(
        self, rig: Rig, engine: Engine
    ) -> None:
        lora = rig.lora(1)
        await engine.add_lora(lora)
        before = (await collect(engine, ask(lora))).tokens
        with pytest.raises(EngineRejected):
            await engine.add_lora(rig.lora(2, engine_id=lora.engine_id))
        assert (await collect(engine, ask(lora))).tokens == before

    async def test_an_id_that_is_not_positive_is_refused(self, rig: Rig, engine: Engine) -> None:
        with pytest.raises(EngineRejected):
            await engine.add_lora(rig.lora(1, engine_id=-1))

    async def test_promise_4_one_more_than_the_limit_is_refused_and_changes_nothing(
        self, rig: Rig, engine: Engine
    ) -> None:
        held = [rig.lora(1 + i % 3) for i in range(MAX_CPU_LORAS)]
        for lora in held:
            await engine.add_lora(lora)
        with pytest.raises(EngineRejected):
            await engine.add_lora(rig.lora(1))
        assert await engine.list_loras() == {lora.engine_id for lora in held}

    async def test_promise_4_more_bytes_than_the_limit_are_refused_and_change_nothing(
        self, rig: Rig, engine: Engine
    ) -> None:
        lora = rig.lora(1)
        await engine.add_lora(lora)
        vast = replace(rig.lora(2), bytes=engine.capabilities().host_cache_bytes)
        with pytest.raises(EngineRejected):
            await engine.add_lora(vast)
        assert await engine.list_loras() == {lora.engine_id}

    async def test_promise_4_a_bad_path_is_refused_and_changes_nothing(
        self, rig: Rig, engine: Engine, tmp_path: Path
    ) -> None:
        lora = rig.lora(1)
        await engine.add_lora(lora)
        bad = replace(rig.lora(2), path=tmp_path / "nothing-here")
        with pytest.raises(EngineRejected, match="nothing-here"):
            await engine.add_lora(bad)
        assert await engine.list_loras() == {lora.engine_id}

    async def test_promise_4_simultaneous_adds_never_pass_the_limit(
        self, rig: Rig, engine: Engine
    ) -> None:
        outcomes: list[bool] = []

        async def add(lora: LoraVersion) -> None:
            try:
                await engine.add_lora(lora)
                outcomes.append(True)
            except EngineRejected:
                outcomes.append(False)

        async with anyio.create_task_group() as group:
            for _ in range(MAX_CPU_LORAS + 3):
                group.start_soon(add, rig.lora(1))
        assert sorted(outcomes) == [False] * 3 + [True] * MAX_CPU_LORAS
        assert len(await engine.list_loras()) == MAX_CPU_LORAS

    # Pins.

    async def test_promise_6_not_all_slots_can_be_pinned(self, rig: Rig, engine: Engine) -> None:
        one, two = rig.lora(1), rig.lora(2)
        await engine.add_lora(one)
        await engine.add_lora(two)
        await engine.pin_lora(one.engine_id, True)
        await engine.pin_lora(one.engine_id, True)
        with pytest.raises(EngineRejected):
            await engine.pin_lora(two.engine_id, True)
        await engine.pin_lora(one.engine_id, False)
        await engine.pin_lora(two.engine_id, True)

    async def test_an_unknown_id_cannot_be_pinned(self, engine: Engine) -> None:
        with pytest.raises(EngineRejected):
            await engine.pin_lora(EngineId(999_999), True)

    async def test_promise_6_a_pinned_version_stays_in_its_slot(
        self, rig: Rig, engine: Engine
    ) -> None:
        loras = [rig.lora(1 + i % 3) for i in range(MAX_CPU_LORAS)]
        for lora in loras:
            await engine.add_lora(lora)
        await engine.pin_lora(loras[0].engine_id, True)
        await collect_all(engine, [ask(lora) for lora in loras * 2])
        await settled(engine)
        assert loras[0].engine_id in engine.health().slots

    # Answers.

    async def test_every_adapter_and_the_base_answer_differently_and_always_alike(
        self, rig: Rig, engine: Engine
    ) -> None:
        one, two = rig.lora(1), rig.lora(2)
        await engine.add_lora(one)
        await engine.add_lora(two)
        alone = [(await collect(engine, ask(who))).tokens for who in (None, one, two)]
        assert len(set(alone)) == 3
        assert all(len(tokens) == 8 for tokens in alone)
        mixed = await collect_all(engine, [ask(who) for who in (None, one, two) * 4])
        assert [answer.tokens for answer in mixed] == alone * 4

    async def test_promise_10_an_id_that_is_not_held_is_refused(
        self, rig: Rig, engine: Engine
    ) -> None:
        with pytest.raises(EngineRejected):
            await collect(engine, ask(rig.lora(1)))

    async def test_promise_2_a_version_that_the_id_does_not_hold_is_refused(
        self, rig: Rig, engine: Engine
    ) -> None:
        lora = rig.lora(1)
        await engine.add_lora(lora)
        with pytest.raises(EngineRejected):
            await collect(engine, ask(replace(lora, version=rig.lora(2).version)))

    async def test_a_request_id_in_use_is_refused(self, engine: Engine) -> None:
        request = ask(max_tokens=ENDLESS)
        async with closing(await begin(engine, request)):
            with pytest.raises(EngineRejected):
                await collect(engine, request)

    @pytest.mark.parametrize("max_tokens", [1, 2, 17])
    async def test_max_tokens_ends_with_length(self, engine: Engine, max_tokens: int) -> None:
        answer = await collect(engine, ask(max_tokens=max_tokens))
        assert len(answer.tokens) == max_tokens
        assert answer.last.finish_reason == "length"

    async def test_no_tokens_wanted_gives_one_empty_chunk(self, engine: Engine) -> None:
        answer = await collect(engine, ask(max_tokens=0, prompt_logprobs=0))
        assert answer.tokens == ()
        assert answer.last.finish_reason == "length"
        assert len(answer.chunks[0].prompt_logprobs) == len(SHORT) - 1

    async def test_the_model_length_ends_with_length(self, engine: Engine) -> None:
        prompt = (LONG * 21)[: MAX_MODEL_LEN - 3]
        answer = await collect(engine, ask(prompt=prompt, max_tokens=50))
        assert len(answer.tokens) == 3
        assert answer.last.finish_reason == "length"

    async def test_a_stop_token_ends_the_answer_and_is_named(self, engine: Engine) -> None:
        tokens = (await collect(engine, ask())).tokens
        stop = next(t for t in tokens[2:] if t not in tokens[:2])
        answer = await collect(engine, ask(stop_token_ids=(stop,)))
        assert answer.tokens == tokens[: tokens.index(stop)]
        assert (answer.last.finish_reason, answer.last.stop_token_id) == ("stop", stop)

    async def test_the_end_of_sequence_ends_the_answer_unless_ignored(self, engine: Engine) -> None:
        tokens = (await collect(engine, ask())).tokens
        eos = next(t for t in tokens[2:] if t not in tokens[:2])
        ended = await collect(engine, ask(eos_token_ids=(eos,), ignore_eos=False))
        assert ended.tokens == tokens[: tokens.index(eos)]
        assert (ended.last.finish_reason, ended.last.stop_token_id) == ("stop", None)
        ignored = await collect(engine, ask(eos_token_ids=(eos,), ignore_eos=True))
        assert ignored.tokens == tokens

    async def test_no_end_comes_before_min_tokens(self, engine: Engine) -> None:
        tokens = (await collect(engine, ask())).tokens
        ends = {"eos_token_ids": (tokens[0],), "stop_token_ids": (tokens[1],), "ignore_eos": False}
        answer = await collect(engine, ask(min_tokens=4, **ends))
        assert len(answer.tokens) >= 4
        assert not {tokens[0], tokens[1]} & set(answer.tokens[:4])

    async def test_a_seed_gives_the_same_tokens_whatever_else_runs(
        self, rig: Rig, engine: Engine
    ) -> None:
        lora = rig.lora(1)
        await engine.add_lora(lora)
        seeded: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
        alone = (await collect(engine, ask(lora, **seeded))).tokens
        others = [ask(who, LONG[:n], temperature=1.0) for n, who in ((3, None), (40, lora))]
        crowd = await collect_all(engine, [*others, ask(lora, **seeded), *map(_again, others)])
        assert crowd[2].tokens == alone
        other = (await collect(engine, ask(lora, **{**seeded, "seed": 8}))).tokens
        assert other != alone

    async def test_logprobs_have_one_entry_per_token(self, engine: Engine) -> None:
        answer = await collect(engine, ask(logprobs=3))
        entries = [entry for chunk in answer.chunks for entry in chunk.logprobs]
        assert tuple(entry.token_id for entry in entries) == answer.tokens
        for entry in entries:
            assert len(entry.top) == 3
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            assert entry.top[0] == (entry.token_id, entry.logprob)
        none = await collect(engine, ask(logprobs=0))
        assert [len(e.top) for c in none.chunks for e in c.logprobs] == [0] * 8
        assert not (await collect(engine, ask())).chunks[0].logprobs

    async def test_prompt_logprobs_have_one_entry_per_prompt_token_but_the_first(
        self, engine: Engine
    ) -> None:
        for _ in range(2):
            first = (await collect(engine, ask(prompt=LONG, prompt_logprobs=2))).chunks[0]
            assert tuple(entry.token_id for entry in first.prompt_logprobs) == LONG[1:]
            assert all(len(entry.top) == 2 for entry in first.prompt_logprobs)
            assert first.cached_tokens == 0

    @pytest.mark.parametrize(
        "bad",
        [
            {"prompt": ()},
            {"prompt": (5,) * MAX_MODEL_LEN},
            {"prompt": (5, 100_000)},
            {"prompt": (-1,)},
            {"logit_bias": ((100_000, 1.0),)},
        ],
        ids=["empty", "too-long", "beyond-the-vocabulary", "negative", "bias-beyond"],
    )
    async def test_an_impossible_request_is_the_callers_mistake(
        self, engine: Engine, bad: dict[str, Any]
    ) -> None:
        with pytest.raises(RequestInvalid) as caught:
            await collect(engine, ask(**bad))
        assert caught.value.param == next(iter(bad))
        await collect(engine, ask())

    # Prefix reuse.

    async def test_promise_2_a_prefix_is_reused_by_its_own_version_and_salt_only(
        self, rig: Rig, engine: Engine
    ) -> None:
        one, same_weights = rig.lora(1), rig.lora(1)
        await engine.add_lora(one)
        await engine.add_lora(same_weights)
        salt = rig.lora(1).version
        first = await collect(engine, ask(one, LONG, cache_salt=salt))
        assert first.chunks[0].cached_tokens == 0
        again = await collect(engine, ask(one, LONG, cache_salt=salt))
        assert 0 < again.chunks[0].cached_tokens < len(LONG)
        assert again.tokens == first.tokens
        strangers = [
            ask(one, LONG, cache_salt=f"{salt}2"),
            ask(same_weights, LONG, cache_salt=salt),
        ]
        strangers += [ask(None, LONG, cache_salt=salt), ask(None, LONG, cache_salt=one.version)]
        for stranger in strangers:
            answer = await collect(engine, stranger)
            assert answer.chunks[0].cached_tokens == 0

    async def test_promise_3_a_removed_version_leaves_no_prefix(
        self, rig: Rig, engine: Engine
    ) -> None:
        lora = rig.lora(1)
        await engine.add_lora(lora)
        await collect(engine, ask(lora, LONG))
        await engine.remove_lora(lora.engine_id)
        await engine.add_lora(lora)
        assert (await collect(engine, ask(lora, LONG))).chunks[0].cached_tokens == 0

    # Early ends.

    async def test_promise_7_an_abort_ends_the_answer_once(self, engine: Engine) -> None:
        request = ask(max_tokens=ENDLESS)
        async with closing(await begin(engine, request)) as stream:
            await engine.abort(request.request_id)
            with anyio.fail_after(LIMIT_S):
                rest = [chunk async for chunk in stream]
        assert [c.finish_reason for c in rest if c.finish_reason] == ["abort"]
        assert rest[-1].finish_reason == "abort"
        await settled(engine)

    async def test_aborting_an_unknown_request_does_nothing(self, engine: Engine) -> None:
        await engine.abort("never-heard-of")

    async def test_promise_7_closing_the_iterator_frees_everything(self, engine: Engine) -> None:
        before = engine.health().kv_blocks_used
        streams = [await begin(engine, ask(max_tokens=ENDLESS)) for _ in range(3)]
        for stream in streams:
            async with closing(stream):
                pass
        await settled(engine)
        assert engine.health().kv_blocks_used <= before

    async def test_promise_3_removing_a_version_ends_what_runs_on_it_and_nothing_else(
        self, rig: Rig, engine: Engine
    ) -> None:
        one, two = rig.lora(1), rig.lora(2)
        await engine.add_lora(one)
        await engine.add_lora(two)
        other = await begin(engine, ask(two, max_tokens=20))
        async with closing(await begin(engine, ask(one, max_tokens=ENDLESS))) as stream:
            assert await engine.remove_lora(one.engine_id) is True
            with anyio.fail_after(LIMIT_S):
                rest = [chunk async for chunk in stream]
        assert rest[-1].finish_reason == "abort"
        with anyio.fail_after(LIMIT_S):
            assert [chunk async for chunk in other][-1].finish_reason == "length"
        with pytest.raises(EngineRejected):
            await collect(engine, ask(one))

    async def test_promise_11_more_adapters_than_slots_all_progress(
        self, rig: Rig, engine: Engine
    ) -> None:
        loras = [rig.lora(1 + i % 3) for i in range(MAX_CPU_LORAS)]
        for lora in loras:
            await engine.add_lora(lora)
        alone = [(await collect(engine, ask(lora, max_tokens=20))).tokens for lora in loras]
        crowd = await collect_all(engine, [ask(lora, max_tokens=20) for lora in loras * 3])
        assert [answer.tokens for answer in crowd] == alone * 3

    # Ups and downs.

    async def test_promise_7_a_crash_ends_each_request_once_and_the_engine_comes_back_empty(
        self, fresh_rig: Rig
    ) -> None:
        engine = fresh_rig.engine
        events = engine.events()
        assert await anext(events) == EngineUp(frozenset())
        lora = fresh_rig.lora(1)
        await engine.add_lora(lora)
        before = (await collect(engine, ask(lora))).tokens
        streams = [await begin(engine, ask(who, max_tokens=ENDLESS)) for who in (None, lora, lora)]
        await fresh_rig.crash()
        for stream in streams:
            with pytest.raises(EngineUnreachable), anyio.fail_after(LIMIT_S):
                async for chunk in stream:
                    assert chunk.finish_reason is None
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        with anyio.fail_after(LIMIT_S):
            assert isinstance(await anext(events), EngineDown)
            assert await anext(events) == EngineUp(frozenset())
        assert await engine.list_loras() == frozenset()
        with pytest.raises(EngineRejected):
            await collect(engine, ask(lora))
        await engine.add_lora(lora)
        assert (await collect(engine, ask(lora))).tokens == before
        assert engine.health().counters["restarts"] == 1

    async def test_closing_twice_is_safe_and_ends_everything(self, fresh_rig: Rig) -> None:
        engine = fresh_rig.engine
        events = engine.events()
        await anext(events)
        stream = await begin(engine, ask(max_tokens=ENDLESS))
        await engine.aclose()
        await engine.aclose()
        with pytest.raises(EngineUnreachable), anyio.fail_after(LIMIT_S):
            async for chunk in stream:
                assert chunk.finish_reason is None
        with pytest.raises(EngineUnreachable):
            await engine.list_loras()
        with anyio.fail_after(LIMIT_S):
            assert [event async for event in events if isinstance(event, EngineUp)] == []
        assert not engine.health().ready


def _again(request: GenerateRequest) -> GenerateRequest:
    return replace(request, request_id=f"{request.request_id}-again")
