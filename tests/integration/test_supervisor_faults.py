"""What level two of the simulation found, each as one small case: engines that raise what is none
of our errors, and stores, disks and callers that break off half-way."""

from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from lorry.engine import GenerateRequest, TokenChunk
from lorry.engines.fake_script import Fault
from lorry.errors import EngineRejected, StorageFailed
from lorry.ids import AdapterName
from lorry.store.sql import SqlStore
from lorry.store.store import AdapterRecord, AuditEntry
from lorry.supervisor import LoadRequest, Supervisor, SupervisorSettings, supervisor
from tests.fixtures.http_server import LIMITS, TinyFake
from tests.fixtures.waiting import until
from tests.integration.test_supervisor import ONE, DiskCache, World, world

pytestmark = pytest.mark.anyio

FOREIGN = Fault(error=ValueError("none of our errors"))


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


async def test_an_engines_foreign_error_on_abort_ends_the_request_and_not_the_server(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await w.load("a", 1)
        w.engine.token_delay_s = 0.01
        w.engine.inject("abort", FOREIGN)
        with pytest.raises(Exception, match="unload"):
            async with w.supervisor.generate(
                name=AdapterName("a"), prompt=(1,), sampling=_long()
            ) as chunks:
                await anext(chunks)
                await w.unload("a", drain_timeout_s=0)
                async for _ in chunks:
                    pass
        assert await w.listed() == {}


def _long() -> supervisor.SamplingParams:
    return supervisor.SamplingParams(max_tokens=1000, temperature=0.0)


async def test_an_engine_that_will_not_say_what_it_holds_is_asked_again(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.load("a", 1)
        w.engine.inject("list_loras", FOREIGN)
        asked = len(w.engine.calls)
        await until(lambda: sum(c == "list_loras" for c, _ in [*w.engine.calls][asked:]) >= 3)
        assert list(await w.listed()) == ["a"]


async def test_an_engines_foreign_error_in_a_request_is_an_engine_error(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.engine.inject("generate", FOREIGN)
        with pytest.raises(EngineRejected, match="none of our errors"):
            await w.generate(None)


class BadEnds(TinyFake):
    """Its answers cannot be closed."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """As the fake, until the end."""
        try:
            async for chunk in super().generate(request):
                yield chunk
        finally:
            raise ValueError("none of our errors")


async def test_promise_7_a_request_that_the_engine_fails_to_close_gives_its_lease_back(
    tmp_path: Path,
) -> None:
    engine = BadEnds()
    async with _served_by(engine, tmp_path) as served:
        async with served.generate(name=None, prompt=(1,), sampling=_long()) as chunks:
            await anext(chunks)
        assert not served._fleet.world.leases
        assert not served._shell.requests


class BadCancels(TinyFake):
    """Its answers hang, and fail when they are cancelled."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Nothing, for ever."""
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("none of our errors")
        yield TokenChunk(())


async def test_a_cancelled_request_stays_cancelled_whatever_its_engine_raises(
    tmp_path: Path,
) -> None:
    async with _served_by(BadCancels(), tmp_path) as served:
        with anyio.move_on_after(0.05) as scope:
            async with served.generate(name=None, prompt=(1,), sampling=_long()) as chunks:
                await anext(chunks)
        assert scope.cancelled_caught
        assert not served._fleet.world.leases


async def test_engines_and_store_are_closed_whatever_one_engine_does(tmp_path: Path) -> None:
    engine = TinyFake()
    engine.inject("aclose", FOREIGN)
    async with _served_by(engine, tmp_path):
        pass
    SqlStore(tmp_path / "state.db").close()  # the lock was given back


async def test_an_engine_that_never_closes_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "CLOSE_S", 0.05)
    engine = TinyFake()
    engine.inject("aclose", Fault(delay_s=float("inf")))
    async with _served_by(engine, tmp_path):
        pass
    SqlStore(tmp_path / "state.db").close()


async def test_a_stop_that_is_cancelled_while_it_waits_still_closes_all(tmp_path: Path) -> None:
    engine = TinyFake()
    served = _served_by(engine, tmp_path, shutdown_s=1000)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group, served:
            engine.inject("add_lora", Fault(delay_s=float("inf")))
            w = World(served, engine, tmp_path)
            operation = served.load(LoadRequest(AdapterName("a"), w.adapter(1)))
            await until(lambda: served.operation(operation.id).phase == "loading")

            async def impatient() -> None:
                await until(lambda: served._closing)
                scope.cancel()

            group.start_soon(impatient)
    assert engine.calls[-1][0] == "aclose"
    SqlStore(tmp_path / "state.db").close()


async def test_promise_4_a_load_that_the_disk_held_up_does_not_reach_the_engine_that_came_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path) as w:
        await w.load("a", 1, pinned=True)  # so that it is loaded again by itself
        real, slow, held = supervisor.to_thread.run_sync, anyio.Event(), []

        async def run_sync(work: object, *rest: object, **more: object) -> object:
            if getattr(work, "__name__", "") == "open":
                held.append(work)
                await slow.wait()
            return await real(work, *rest, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(supervisor.to_thread, "run_sync", run_sync)
        w.engine.calls.clear()
        for loads in (1, 2):
            w.engine.crash()
            w.engine.restart()
            await until(lambda loads=loads: len(held) == loads)  # type: ignore[misc]
        slow.set()
        core = w.supervisor._fleet.world
        await until(lambda: not core.opened)
        assert [call for call, _ in w.engine.calls].count("add_lora") == 1


class SaysNo(SqlStore):
    """Writes, and says that it did not."""

    def put(self, record: AdapterRecord, audit: AuditEntry) -> None:
        """As the real one, but for the answer."""
        super().put(record, audit)
        raise StorageFailed("The disk did not answer.")


async def test_promise_8_a_commit_whose_answer_was_lost_is_a_commit(tmp_path: Path) -> None:
    engine = TinyFake()
    store = SaysNo(tmp_path / "state.db")
    async with _served_by(engine, tmp_path, store=store) as served:
        await World(served, engine, tmp_path).load("a", 1)
        assert [r.name for r in store.adapters()] == [v.name for v in served.adapters()] == ["a"]


def _served_by(
    engine: TinyFake, folder: Path, *, store: SqlStore | None = None, shutdown_s: float = 1.0
) -> Supervisor:
    return Supervisor(
        engines={ONE: engine},
        store=store or SqlStore(folder / "state.db"),
        cache=DiskCache(folder / "cache", None),
        limits=LIMITS,
        settings=SupervisorSettings(reconcile_s=0.05, shutdown_s=shutdown_s),
    )
