"""What only the embedded engine has: right tokens, and a process that can die or hang."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from lorry.engine import EngineDown, EngineUp, LoraVersion
from lorry.engines.embedded.engine import EmbeddedEngine
from lorry.errors import EngineTimeout, EngineUnreachable, ModelInvalid, ModelUnsupported
from tests.conformance.engine_suite import ENDLESS, ask, begin, collect, collect_all, settled
from tests.conformance.test_embedded import SORTS, EmbeddedRig, settings
from tests.fixtures.common_ground import P, S, common_ground

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LIMIT_S = 30
HANG_S = 1.5


@pytest.fixture
def anyio_backend() -> str:
    """The embedded engine talks to its process through asyncio."""
    return "asyncio"


@asynccontextmanager
async def started(**changes: Any) -> AsyncIterator[EmbeddedRig]:
    rig = EmbeddedRig(common_ground(), **changes)
    await rig.engine.start()
    try:
        yield rig
    finally:
        await rig.engine.aclose()


async def test_promise_12_every_row_of_a_mixed_batch_is_the_oracles_answer() -> None:
    ground = common_ground()
    async with started(max_cpu_loras=6, max_loras=4) as rig:
        loras: dict[str, LoraVersion | None] = {"base": None}
        for sort, name in enumerate(SORTS, 1):
            lora = loras[name] = rig.lora(sort)
            await rig.engine.add_lora(lora)
        cases = [(name, prompt) for name in loras for prompt in ("P", "S")] * 2
        prompts = {"P": P, "S": S}
        requests = [
            ask(loras[name], prompts[prompt], max_tokens=16, logprobs=0) for name, prompt in cases
        ]
        for (name, prompt), answer in zip(
            cases, await collect_all(rig.engine, requests), strict=True
        ):
            wanted = ground.answer(name, prompt)
            assert answer.tokens == wanted.tokens, (name, prompt)
            found = [entry.logprob for chunk in answer.chunks for entry in chunk.logprobs]
            assert found == pytest.approx(wanted.logprobs, abs=1e-3)


async def test_promise_7_a_kill_under_sixteen_streams_ends_each_once_and_all_come_back() -> None:
    async with started(kv_cache_bytes=128 << 20) as rig:
        engine = rig.engine
        lora = rig.lora(1)
        await engine.add_lora(lora)
        wanted = (await collect(engine, ask(lora))).tokens
        before = engine.health().counters["generation_tokens"]
        outcomes: list[str] = []

        async def stream(number: int) -> None:
            who = lora if number % 2 else None
            try:
                async for _ in await begin(engine, ask(who, max_tokens=ENDLESS)):
                    pass
            except EngineUnreachable as error:
                outcomes.append(error.message)

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(stream, number)
            while engine.health().running < 16:
                await anyio.sleep(0.01)
            await rig.crash()
        assert len(outcomes) == 16
        assert all("SIGKILL" in outcome for outcome in outcomes)
        assert not engine.health().ready
        with anyio.fail_after(LIMIT_S):
            async for event in engine.events():
                if isinstance(event, EngineUp):
                    break
        await engine.add_lora(lora)
        assert (await collect(engine, ask(lora))).tokens == wanted
        await settled(engine)
        assert engine.health().counters["generation_tokens"] > before


async def test_an_engine_that_hangs_is_killed_and_started_again() -> None:
    async with started(hang_timeout_s=HANG_S) as rig:
        events = rig.engine.events()
        assert isinstance(await anext(events), EngineUp)
        pid = rig.pid()
        os.kill(pid, signal.SIGSTOP)
        with anyio.fail_after(LIMIT_S):
            down = await anext(events)
            assert isinstance(down, EngineDown) and f"said nothing for {HANG_S:g} s" in down.reason
            assert isinstance(await anext(events), EngineUp)
        assert rig.pid() != pid
        await collect(rig.engine, ask())


async def test_a_busy_engine_is_not_taken_for_a_hung_one() -> None:
    async with started(hang_timeout_s=HANG_S) as rig:
        events = rig.engine.events()
        pid = rig.pid()
        began = time.monotonic()
        while time.monotonic() - began < 2 * HANG_S:
            await collect_all(rig.engine, [ask(max_tokens=400) for _ in range(8)])
        assert isinstance(await anext(events), EngineUp)
        assert rig.pid() == pid


async def test_an_engine_that_is_stopped_for_a_while_says_so_and_goes_on_as_it_was() -> None:
    async with started(hang_timeout_s=60.0) as rig:
        lora = rig.lora(1)
        await rig.engine.add_lora(lora)
        pid, wanted = rig.pid(), (await collect(rig.engine, ask(lora))).tokens
        os.kill(pid, signal.SIGSTOP)
        with anyio.fail_after(LIMIT_S):
            while rig.engine.health().ready:
                await anyio.sleep(0.05)
        assert "its process is stopped" in rig.engine.health().reason
        os.kill(pid, signal.SIGCONT)
        with anyio.fail_after(LIMIT_S):
            while not rig.engine.health().ready:
                await anyio.sleep(0.05)
        assert (rig.pid(), rig.engine.health().reason) == (pid, "")
        assert await rig.engine.list_loras() == {lora.engine_id}
        assert (await collect(rig.engine, ask(lora))).tokens == wanted


async def test_promise_4_an_add_that_timed_out_or_was_cancelled_holds_nothing() -> None:
    async with started(command_timeout_s=0.3, hang_timeout_s=60.0) as rig:
        os.kill(rig.pid(), signal.SIGSTOP)
        with pytest.raises(EngineTimeout, match="AddLora"):
            await rig.engine.add_lora(rig.lora(1))
        with anyio.move_on_after(0.05):
            await rig.engine.add_lora(rig.lora(2))
        rig.embedded.settings = replace(rig.embedded.settings, command_timeout_s=LIMIT_S)
        os.kill(rig.pid(), signal.SIGCONT)
        held: frozenset[int] | None = None
        with anyio.fail_after(LIMIT_S):
            for _ in range(20):
                held = await rig.engine.list_loras()
                await anyio.sleep(0.01)
        assert held == frozenset()
        assert rig.engine.health().ready


async def test_churn_gives_memory_back() -> None:
    async with started() as rig:
        process = psutil.Process(rig.pid())
        resident = []
        for round_ in range(150):
            lora = rig.lora(1 + round_ % 3)
            await rig.engine.add_lora(lora)
            await collect(rig.engine, ask(lora, max_tokens=2))
            await rig.engine.remove_lora(lora.engine_id)
            resident.append(process.memory_info().rss)
        assert resident[-1] - resident[50] < 8 << 20
        assert await rig.engine.list_loras() == frozenset()


async def test_an_unsupported_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ZebraForCausalLM"]}))
    engine = EmbeddedEngine(replace(settings(common_ground()), model=tmp_path))
    with pytest.raises(ModelUnsupported, match="ZebraForCausalLM"):
        await engine.start()
    assert not engine.health().ready


async def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    engine = EmbeddedEngine(replace(settings(common_ground()), model=tmp_path / "none"))
    with pytest.raises(ModelInvalid, match="none"):
        await engine.start()
    await engine.aclose()


async def test_progress_is_told_while_the_model_loads() -> None:
    seen: list[tuple[int, int]] = []
    engine = EmbeddedEngine(settings(common_ground()), lambda *done: seen.append(done))
    try:
        await engine.start()
    finally:
        await engine.aclose()
    assert seen and seen[-1][0] == seen[-1][1] > 0


async def test_a_start_that_is_given_up_leaves_no_process() -> None:
    engine = EmbeddedEngine(settings(common_ground()))
    with anyio.move_on_after(0.3):
        await engine.start()
    assert not engine.health().ready
    assert [p for p in psutil.Process().children() if "embedded" in " ".join(p.cmdline())] == []


async def test_the_process_has_its_own_group_in_our_session() -> None:
    """An interrupt typed for the server is the server's to handle; cores are shared by niceness
    within a session only."""
    async with started() as rig:
        assert os.getpgid(rig.pid()) == rig.pid()
        assert os.getsid(rig.pid()) == os.getsid(0)


_SERVER = """
import asyncio, sys
from tests.conformance.test_embedded import EmbeddedRig
from tests.fixtures.common_ground import common_ground

async def main():
    rig = EmbeddedRig(common_ground())
    await rig.engine.start()
    print(rig.pid(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_promise_8_the_process_dies_with_its_server() -> None:
    common_ground()
    root = Path(__file__).parents[2]
    server = subprocess.Popen(  # noqa: ASYNC220  # it starts in no time, and nothing else runs
        [sys.executable, "-c", _SERVER], cwd=root, stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        engine = psutil.Process(int(server.stdout.readline()))
        server.kill()
        server.wait()
        with anyio.fail_after(LIMIT_S):
            while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
                await anyio.sleep(0.02)
