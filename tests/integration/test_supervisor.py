"""The real supervisor, store and disk cache around the shipped fake engine."""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from lorry.artifacts.cache import DiskCache
from lorry.engine import LoraVersion, SamplingParams
from lorry.engines.fake import FakeEngine
from lorry.engines.fake_script import FakeSettings, Fault
from lorry.errors import (
    AdapterConflict,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnloading,
    AllPinned,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    LorryError,
    RequestAborted,
    SourceNotFound,
    StorageFailed,
    VersionMismatch,
)
from lorry.ids import AdapterName, EngineId, ReplicaId, VersionId
from lorry.lifecycle.invariants import check
from lorry.supervisor import LoadRequest, Supervisor, SupervisorSettings
from lorry.views import AdapterView, OperationStatus
from tests.fixtures.adapters import good_adapter
from tests.fixtures.http_server import LIMITS, TinyFake, new_store
from tests.fixtures.waiting import leap, until, until_true

pytestmark = pytest.mark.anyio

ONE = ReplicaId("engine")
DRAIN_S = 300

ROOMY = FakeSettings(max_loras=2, max_cpu_loras=3)


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@dataclass(slots=True)
class World:
    """One server's insides."""

    supervisor: Supervisor
    engine: FakeEngine
    folder: Path

    def adapter(self, seed: int) -> str:
        """An adapter folder of its own version."""
        return str(good_adapter(seed).write(self.folder / f"adapter-{seed}"))

    async def load(self, name: str, seed: int, **options: object) -> AdapterView:
        """Load and wait."""
        source = self.adapter(seed)
        request = LoadRequest(AdapterName(name), source, **options)  # type: ignore[arg-type]
        operation = self.supervisor.load(request)
        await self.supervisor.wait(operation.id)
        return self.supervisor.adapter(AdapterName(name))

    async def unload(self, name: str, **options: object) -> None:
        """Unload and wait."""
        operation = self.supervisor.unload(AdapterName(name), **options)  # type: ignore[arg-type]
        await self.supervisor.wait(operation.id)

    async def generate(self, name: str | None, tokens: int = 4) -> list[int]:
        """The tokens of one answer."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        adapter = AdapterName(name) if name is not None else None
        async with self.supervisor.generate(
            name=adapter, prompt=(1, 2, 3), sampling=sampling
        ) as chunks:
            return [token async for chunk in chunks for token in chunk.token_ids]

    async def listed(self) -> dict[str, VersionId]:
        """What the API says, after checking it against the engine's own list (promise 1)."""
        views = self.supervisor.adapters()
        said = {r.engine_id for view in views for r in view.residency if r.engine_id is not None}
        assert said == await self.engine.list_loras()
        assert check(self.supervisor._fleet.world) == []
        return {view.name: view.version for view in views}


@asynccontextmanager
async def world(folder: Path, settings: FakeSettings | None = None) -> AsyncIterator[World]:
    """A supervisor on `folder`, as it is after a start."""
    engine = TinyFake(settings or FakeSettings(max_loras=2, max_cpu_loras=2))
    supervisor = Supervisor(
        engines={ONE: engine},
        store=new_store(folder / "lorry.sqlite3"),
        cache=DiskCache(folder / "cache", None),
        limits=LIMITS,
        settings=SupervisorSettings(reconcile_s=0.05, shutdown_s=1.0),
    )
    async with supervisor:
        yield World(supervisor, engine, folder)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where one server keeps everything."""
    yield tmp_path


async def test_promise_1_after_each_operation_list_and_engine_agree(folder: Path) -> None:
    async with world(folder) as w:
        for name, seed in (("a", 1), ("b", 2), ("c", 3)):
            await w.load(name, seed)
            await w.listed()
        await w.unload("a")
        assert sorted(await w.listed()) == ["b", "c"]
        with pytest.raises(AdapterNotFound):
            await w.unload("a")


async def test_promise_3_an_adapter_that_lru_evicted_unloads_well(folder: Path) -> None:
    async with world(folder) as w:
        for name, seed in (("a", 1), ("b", 2), ("c", 3)):
            await w.load(name, seed)
        assert w.supervisor.adapter(AdapterName("a")).residency[0].tier == "disk"
        await w.unload("a")
        with pytest.raises(AdapterNotFound):
            await w.generate("a")


async def test_a_remove_that_answers_false_is_a_success(folder: Path) -> None:
    async with world(folder) as w:
        await w.load("a", 1)
        w.engine.inject("remove_lora", Fault(answer_false=True))
        await w.unload("a")
        assert await w.listed() == {}


async def test_promise_4_an_unload_that_the_engine_refuses_keeps_the_adapter(folder: Path) -> None:
    async with world(folder) as w:
        await w.load("a", 1)
        right = await w.generate("a")
        w.engine.inject("remove_lora", Fault(error=RuntimeError("device fault")))
        with pytest.raises(EngineRejected, match="device fault"):
            await w.unload("a")
        assert list(await w.listed()) == ["a"]
        assert await w.generate("a") == right
        await w.unload("a")
        assert await w.listed() == {}


async def test_promise_4_an_unload_that_times_out_is_settled_by_asking_again(folder: Path) -> None:
    async with world(folder) as w:
        await w.load("a", 1)
        w.engine.inject("remove_lora", Fault(error=EngineTimeout("no answer"), after_effect=True))
        with pytest.raises(EngineTimeout):
            await w.unload("a")
        assert [view.name for view in w.supervisor.adapters()] == ["a"]
        right = await w.generate("a")
        assert right and list(await w.listed()) == ["a"]


async def test_promise_2_a_replaced_name_answers_with_the_new_version_only(folder: Path) -> None:
    async with world(folder) as w:
        before = await w.load("a", 1)
        old = await w.generate("a")
        after = await w.load("a", 2)
        assert after.version != before.version and after.previous == (before.version,)
        assert await w.generate("a") != old
        operation = w.supervisor.rollback(AdapterName("a"))
        await w.supervisor.wait(operation.id)
        assert await w.generate("a") == old
        assert w.supervisor.adapter(AdapterName("a")).source == before.source


async def test_promise_2_a_running_request_keeps_its_version_over_a_replace(folder: Path) -> None:
    async with world(folder) as w:
        await w.load("a", 1)
        right = await w.generate("a", 8)
        w.engine.token_delay_s = 0.01
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        got: list[int] = []
        async with w.supervisor.generate(
            name=AdapterName("a"), prompt=(1, 2, 3), sampling=sampling
        ) as chunks:
            async for chunk in chunks:
                got += chunk.token_ids
                if len(got) == 1:
                    await w.load("a", 2)
        assert got == right


async def test_promise_4_a_failed_load_changes_nothing(folder: Path) -> None:
    async with world(folder) as w:
        await w.load("a", 1)
        right = await w.generate("a")
        w.engine.inject("add_lora", Fault(error=EngineRejected("no memory")))
        with pytest.raises(EngineRejected):
            await w.load("a", 2)
        missing = LoadRequest(AdapterName("a"), str(folder / "nowhere"))
        with pytest.raises(SourceNotFound):
            await w.supervisor.wait(w.supervisor.load(missing).id)
        bad = good_adapter(3)
        bad.config["r"] = 64
        request = LoadRequest(AdapterName("a"), str(bad.write(folder / "bad")))
        with pytest.raises(AdapterInvalid):
            await w.supervisor.wait(w.supervisor.load(request).id)
        assert await w.generate("a") == right
        assert list(await w.listed()) == ["a"]


async def test_sixteen_loads_of_one_name_give_one_success(folder: Path) -> None:
    async with world(folder) as w:
        outcomes: list[str] = []

        async def one() -> None:
            try:
                await w.load("a", 1, mode="create")
                outcomes.append("loaded")
            except LorryError as error:
                outcomes.append(error.code)

        async with anyio.create_task_group() as tasks:
            for _ in range(16):
                tasks.start_soon(one)
        assert sorted(outcomes) == ["adapter_conflict"] * 15 + ["loaded"]


async def test_promise_5_a_stuck_drain_delays_nobody_else(folder: Path) -> None:
    async with world(folder) as w:
        await w.load("a", 1)
        await w.load("c", 3)
        w.engine.token_delay_s = 0.05
        sampling = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
        async with w.supervisor.generate(
            name=AdapterName("a"), prompt=(1,), sampling=sampling
        ) as chunks:
            await anext(chunks)
            drain = w.supervisor.unload(AdapterName("a"), drain_timeout_s=DRAIN_S)
            with pytest.raises(AdapterUnloading):
                await w.generate("a")
            await w.unload("c")
            await w.load("b", 2)
            assert w.supervisor.operation(drain.id).phase == "draining"
            leap(DRAIN_S)
            with pytest.raises(RequestAborted):
                async for _ in chunks:
                    pass
        await w.supervisor.wait(drain.id)
        assert list(await w.listed()) == ["b"]


async def test_promise_6_pins_are_refused_before_any_side_effect(folder: Path) -> None:
    async with world(folder) as w:
        await w.load("a", 1, pinned=True)
        with pytest.raises(AllPinned):
            await w.load("b", 2, pinned=True)
        assert list(await w.listed()) == ["a"]
        for name, seed in (("b", 2), ("c", 3), ("d", 4)):
            await w.load(name, seed)
        assert w.supervisor.adapter(AdapterName("a")).residency[0].state == "resident"


async def test_promise_7_an_engine_crash_ends_each_request_once_and_all_come_back(
    folder: Path,
) -> None:
    async with world(folder) as w:
        await w.load("a", 1)
        right = await w.generate("a")
        w.engine.token_delay_s = 10
        errors: list[str] = []
        started = anyio.Event()

        async def one() -> None:
            started.set()
            try:
                await w.generate("a", 50)
            except LorryError as error:
                errors.append(error.code)

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(one)
            await started.wait()
            await anyio.wait_all_tasks_blocked()
            w.engine.crash("killed")
        assert errors == ["engine_unreachable"] * 8
        with pytest.raises(EngineUnreachable):
            await w.generate("a")
        w.engine.token_delay_s = 0
        w.engine.restart()
        await until(lambda: w.supervisor.adapter(AdapterName("a")).residency[0].state == "resident")
        assert await w.generate("a") == right
        await w.listed()


async def test_strangers_in_the_engine_are_removed(folder: Path) -> None:
    async with world(folder) as w:
        await w.load("a", 1)
        w.engine.crash("killed")
        stranger = LoraVersion(EngineId(77), VersionId("f" * 64), "stranger", folder, 1)
        w.engine.restart([stranger])

        async def only_its_own() -> bool:
            held = await w.engine.list_loras()
            return len(held) == 1 and EngineId(77) not in held

        await until_true(only_its_own)
        assert list(await w.listed()) == ["a"]


async def test_promise_8_a_restart_keeps_what_was_acknowledged(folder: Path) -> None:
    async with world(folder, ROOMY) as w:
        await w.load("a", 1, pinned=True, labels={"team": "red"})
        await w.load("b", 2)
        await w.load("b", 3)
        await w.load("c", 4)
        await w.unload("c")
        before = w.supervisor.adapters()
        right = await w.generate("b")
    async with world(folder) as w:
        after = w.supervisor.adapters()
        assert [(v.name, v.version, v.pinned, v.labels, v.previous) for v in after] == [
            (v.name, v.version, v.pinned, v.labels, v.previous) for v in before
        ]
        assert await w.generate("b") == right


async def test_a_snapshot_that_vanished_is_fetched_again(folder: Path) -> None:
    async with world(folder) as w:
        a = await w.load("a", 1)
        right = await w.generate("a")
        await w.load("b", 2)
        await w.load("c", 3)
        w.supervisor._shell.cache.remove(a.version)
        assert await w.generate("a") == right


async def test_a_snapshot_whose_source_changed_is_never_replaced_by_it(folder: Path) -> None:
    async with world(folder) as w:
        a = await w.load("a", 1)
        await w.load("b", 2)
        await w.load("c", 3)
        w.supervisor._shell.cache.remove(a.version)
        good_adapter(9).write(folder / "adapter-1")
        with pytest.raises(LorryError, match="another version"):
            await w.generate("a")


async def test_if_match_names_the_version_that_is_served(folder: Path) -> None:
    async with world(folder) as w:
        a = await w.load("a", 1)
        with pytest.raises(VersionMismatch):
            await w.load("a", 2, if_match=VersionId("0" * 12))
        await w.load("a", 2, if_match=VersionId(a.version[:12]))
        with pytest.raises(AdapterConflict):
            await w.load("a", 3, mode="create")


async def test_promise_4_a_store_that_fails_undoes_the_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder) as w:

        def put(*_: object) -> None:
            raise StorageFailed("The disk is full.")

        monkeypatch.setattr(w.supervisor._store, "put", put)
        with pytest.raises(StorageFailed):
            await w.load("a", 1)

        async def empty() -> bool:
            return not await w.engine.list_loras()

        await until_true(empty)
        assert await w.listed() == {}


async def test_an_operation_can_be_followed_and_cancelled(folder: Path) -> None:
    async with world(folder) as w:
        w.engine.inject("add_lora", Fault(delay_s=math.inf))
        operation = w.supervisor.load(LoadRequest(AdapterName("a"), w.adapter(1)))
        await until(lambda: w.supervisor.operation(operation.id).phase == "loading")
        assert w.supervisor.cancel(operation.id).status is OperationStatus.CANCELLED
        with pytest.raises(LorryError, match="cancelled"):
            await w.supervisor.wait(operation.id)
        assert w.supervisor.adapters() == ()
