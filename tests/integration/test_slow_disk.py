"""What happens to an engine, or to a name, while the disk still looks for the weights."""

import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from lorry.artifacts.cache import DiskCache
from lorry.engines.fake_script import FakeSettings
from lorry.errors import AdapterUnavailable, LorryError
from lorry.ids import AdapterName, VersionId
from lorry.store.sql import SqlStore
from lorry.supervisor import LoadRequest, Supervisor, SupervisorSettings
from tests.fixtures.http_server import LIMITS, TinyFake
from tests.fixtures.waiting import until
from tests.integration.test_supervisor import ONE, World

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


class _SlowCache(DiskCache):
    """Finds a snapshot only when it is let."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, None)
        self.let = threading.Event()
        self.let.set()
        self.waiting = 0

    def open(self, version: VersionId) -> Path | None:
        self.waiting += 1
        try:
            self.let.wait(30)
            return super().open(version)
        finally:
            self.waiting -= 1


@asynccontextmanager
async def _world(folder: Path) -> AsyncIterator[tuple[World, _SlowCache]]:
    engine, cache = TinyFake(FakeSettings(max_loras=2, max_cpu_loras=2)), _SlowCache(folder / "c")
    supervisor = Supervisor(
        engines={ONE: engine},
        store=SqlStore(folder / "lorry.sqlite3"),
        cache=cache,
        limits=LIMITS,
        settings=SupervisorSettings(reconcile_s=3600, shutdown_s=1.0),
    )
    async with supervisor:
        try:
            yield World(supervisor, engine, folder), cache
        finally:
            cache.let.set()


async def _ask_in_vain(w: World) -> None:
    with pytest.raises(AdapterUnavailable, match="lost while it loaded"):
        await w.generate("x")


async def test_promise_4_a_load_of_a_lost_engine_never_reaches_the_one_that_came_after(
    tmp_path: Path,
) -> None:
    async with _world(tmp_path) as (w, cache):
        await w.load("x", 1, load=False)
        cache.let.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(_ask_in_vain, w)
            await until(lambda: cache.waiting == 1)
            w.engine.crash("killed")
            await until(lambda: not w.supervisor.statistics().replicas[0].up)
            w.engine.restart()
        cache.let.set()
        await until(lambda: cache.waiting == 0)
        await w.supervisor.wait(w.supervisor.prefetch(AdapterName("x")).id)
        assert set(await w.listed()) == {"x"}


async def test_a_load_whose_name_went_while_the_disk_looked_for_it_is_no_fault_of_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with _world(tmp_path) as (w, cache):
        source = w.adapter(1)
        cache.let.clear()
        operation = w.supervisor.load(LoadRequest(AdapterName("x"), source))
        await until(lambda: cache.waiting == 1)
        w.supervisor.cancel(operation.id)
        with pytest.raises(LorryError):
            await w.supervisor.wait(operation.id)
        cache.let.set()
        await until(lambda: w.supervisor.statistics().replicas[0].resident == 0)
        await w.load("y", 2)
        assert set(await w.listed()) == {"y"}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
