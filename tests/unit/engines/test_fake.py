"""The fake misbehaves as told, and a wrong version is seen at the first token; in virtual time."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import pytest
from trio.testing import MockClock

from lorry.engine import EngineDown, EngineUp, GenerateRequest, LoraVersion, SamplingParams
from lorry.engines.fake import FakeEngine
from lorry.engines.fake_script import FakeSettings, Fault, fake_chunks, fake_tokens
from lorry.errors import EngineRejected, EngineTimeout, EngineUnreachable
from lorry.ids import EngineId, VersionId

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """A clock that jumps whenever everybody waits."""
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def lora(number: int, version: str | None = None) -> LoraVersion:
    name = VersionId(version or f"v{number}")
    return LoraVersion(EngineId(number), name, f"a{number}", Path("/none"), 10)


def ask(version: LoraVersion | None = None, **params: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **params})
    engine_id = version.engine_id if version else None
    return GenerateRequest(
        "r", (1, 2, 3), sampling, engine_id, version.version if version else None
    )


async def begun(settings: FakeSettings | None = None) -> FakeEngine:
    engine = FakeEngine(settings)
    await engine.start()
    return engine


async def tokens(engine: FakeEngine, request: GenerateRequest) -> list[int]:
    return [t async for chunk in engine.generate(request) for t in chunk.token_ids]


def first(stream: Iterator[int], count: int = 6) -> list[int]:
    return list(islice(stream, count))


async def test_promise_2_answers_tell_versions_apart() -> None:
    engine = await begun()
    one, two = lora(1), lora(2)
    await engine.add_lora(one)
    await engine.add_lora(two)
    answers = [await tokens(engine, ask(v)) for v in (None, one, two)]
    wanted = [first(fake_tokens(ask(v), v and v.version, 512)) for v in (None, one, two)]
    assert answers == wanted
    assert len({answer[0] for answer in answers}) == 3


async def test_another_seed_is_another_base_model() -> None:
    other = FakeEngine(seed=1)
    await other.start()
    assert await tokens(other, ask()) != await tokens(await begun(), ask())


def test_the_script_depends_on_the_prompt_and_on_chance_only_when_wanted() -> None:
    greedy = first(fake_tokens(ask(), None, 512))
    assert first(fake_tokens(ask(seed=5), None, 512)) == greedy
    assert first(fake_tokens(replace(ask(), prompt=(9,)), None, 512)) != greedy
    warm = [first(fake_tokens(ask(temperature=1.0, seed=s), None, 512)) for s in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]


def test_the_script_ends_once() -> None:
    chunks = list(fake_chunks(ask(), None, FakeSettings()))
    assert [c.finish_reason for c in chunks] == [None] * 5 + ["length"]


async def test_promise_4_a_fault_before_the_effect_changes_nothing() -> None:
    engine = await begun()
    engine.inject("add_lora", Fault(error=EngineRejected("out of luck")))
    with pytest.raises(EngineRejected, match="luck"):
        await engine.add_lora(lora(1))
    assert await engine.list_loras() == frozenset()
    await engine.add_lora(lora(1))
    engine.inject("remove_lora", Fault(error=EngineRejected("stuck")), times=2)
    for _ in range(2):
        with pytest.raises(EngineRejected):
            await engine.remove_lora(EngineId(1))
    assert await engine.list_loras() == {1}
    assert await engine.remove_lora(EngineId(1)) is True


async def test_an_answer_can_be_lost_after_the_deed() -> None:
    engine = await begun()
    engine.inject("add_lora", Fault(error=EngineTimeout("lost"), after_effect=True))
    with pytest.raises(EngineTimeout):
        await engine.add_lora(lora(1))
    assert await engine.list_loras() == {1}
    engine.inject("remove_lora", Fault(answer_false=True))
    assert await engine.remove_lora(EngineId(1)) is False
    assert await engine.list_loras() == frozenset()


async def test_a_call_can_be_slow_or_never_return() -> None:
    engine = await begun()
    engine.inject("add_lora", Fault(delay_s=100.0))
    began = anyio.current_time()
    await engine.add_lora(lora(1))
    assert anyio.current_time() - began == pytest.approx(100)
    engine.inject("remove_lora", Fault(delay_s=math.inf))
    with anyio.move_on_after(10_000) as scope:
        await engine.remove_lora(EngineId(1))
    assert scope.cancelled_caught
    assert await engine.list_loras() == {1}


async def test_healing_forgets_the_faults_that_are_left() -> None:
    engine = await begun()
    engine.inject("list_loras", Fault(error=EngineRejected("no")), times=9)
    engine.heal()
    assert await engine.list_loras() == frozenset()


async def test_tokens_take_the_time_they_are_told_to() -> None:
    engine = await begun(FakeSettings(token_delay_s=0.5))
    began = anyio.current_time()
    await tokens(engine, ask(max_tokens=10))
    assert anyio.current_time() - began == pytest.approx(5)


async def test_promise_7_a_crash_reaches_a_stream_that_waits_for_its_next_token() -> None:
    engine = await begun(FakeSettings(token_delay_s=1000.0))
    failures: list[str] = []

    async def run() -> None:
        try:
            await tokens(engine, ask())
        except EngineUnreachable as error:
            failures.append(error.message)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await anyio.sleep(1)
        engine.crash("lightning")
    assert failures == ["The engine is down: lightning."]
    with pytest.raises(EngineUnreachable):
        await engine.list_loras()
    assert engine.statistics()["streams"] == 0


async def test_it_can_come_back_with_a_strange_set() -> None:
    engine = await begun()
    events = engine.events()
    assert await anext(events) == EngineUp(frozenset())
    engine.crash()
    engine.restart([lora(7), lora(8)])
    assert isinstance(await anext(events), EngineDown)
    assert await anext(events) == EngineUp(frozenset({EngineId(7), EngineId(8)}))
    assert await engine.list_loras() == {7, 8}
    await engine.aclose()
    assert [event async for event in events] == []


async def test_it_can_forget_everything_without_a_word() -> None:
    engine = await begun()
    await engine.add_lora(lora(1))
    engine.forget_all()
    assert await engine.list_loras() == frozenset()
    assert await engine.remove_lora(EngineId(1)) is False
    assert engine.health().ready


async def test_promise_4_an_overshoot_is_refused_and_counted() -> None:
    engine = await begun(FakeSettings(max_cpu_loras=1))
    await engine.add_lora(lora(1))
    with pytest.raises(EngineRejected, match="max_cpu_loras 1"):
        await engine.add_lora(lora(2))
    assert engine.statistics()["overshoots"] == 1
    assert engine.statistics()["held"] == 1


async def test_an_id_is_never_reused_for_another_version() -> None:
    engine = await begun()
    await engine.add_lora(lora(1, "v"))
    await engine.remove_lora(EngineId(1))
    await engine.add_lora(lora(1, "v"))
    await engine.remove_lora(EngineId(1))
    with pytest.raises(EngineRejected, match="never reused"):
        await engine.add_lora(lora(1, "w"))


async def test_a_failing_close_leaves_it_closed() -> None:
    engine = await begun()
    engine.inject("aclose", Fault(error=RuntimeError("rust")))
    with pytest.raises(RuntimeError):
        await engine.aclose()
    assert not engine.health().ready
    assert engine.calls[-1] == ("aclose", None)
