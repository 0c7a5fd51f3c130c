"""The situation of the second field report, in every dialect: a load for which another adapter must
leave. What is listed, what the engine holds and what the caller is told agree after each."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from lorry.engines.fake_script import FakeSettings, Fault
from lorry.errors import EngineRejected
from lorry.lifecycle.records import Phase
from tests.fixtures.http_server import Exchange, HttpServer, http_server
from tests.fixtures.waiting import until

pytestmark = pytest.mark.anyio

STICKS = Fault(error=EngineRejected("It sticks."))
ALWAYS = 1000
ROOM = str(Phase.ROOM)


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@dataclass(frozen=True, slots=True)
class Told:
    """What the caller is told, the same for every dialect."""

    done: bool
    text: str


class Native:
    """PUT and DELETE of /v1/adapters."""

    async def load(self, server: HttpServer, name: str, seed: int, pinned: bool = False) -> Told:
        """Load it."""
        answer = await server.load(name, seed, replace=False, pinned=pinned)
        return Told(answer.status_code == 201, answer.text)

    async def unload(self, server: HttpServer, name: str) -> Told:
        """Unload it."""
        answer = await server.client.delete(f"/v1/adapters/{name}")
        return Told(answer.status_code == 200, answer.text)


class Vllm:
    """/v1/load_lora_adapter, which has no pins: those are set beside it."""

    async def load(self, server: HttpServer, name: str, seed: int, pinned: bool = False) -> Told:
        """Load it."""
        body = {"lora_name": name, "lora_path": server.adapter(seed)}
        answer = await server.client.post("/v1/load_lora_adapter", json=body)
        if pinned and answer.status_code == 200:
            await server.client.patch(f"/v1/adapters/{name}", json={"pinned": True})
        return Told(answer.status_code == 200, answer.text)

    async def unload(self, server: HttpServer, name: str) -> Told:
        """Unload it."""
        answer = await server.client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        return Told(answer.status_code == 200, answer.text)


class Sglang:
    """/load_lora_adapter, whose `loaded_adapters` must be what is listed."""

    async def load(self, server: HttpServer, name: str, seed: int, pinned: bool = False) -> Told:
        """Load it."""
        body = {"lora_name": name, "lora_path": server.adapter(seed), "pinned": pinned}
        return await self._ask(server, "load", body)

    async def unload(self, server: HttpServer, name: str) -> Told:
        """Unload it."""
        return await self._ask(server, "unload", {"lora_name": name})

    async def _ask(self, server: HttpServer, verb: str, body: dict[str, Any]) -> Told:
        answer = await server.client.post(f"/{verb}_lora_adapter", json=body)
        told = answer.json()
        assert answer.status_code == (200 if told["success"] else 400)
        assert sorted(told["loaded_adapters"]) == await listed(server)
        return Told(told["success"], told["error_message"] or "")


class SageMaker:
    """/adapters, whose answers are words."""

    async def load(self, server: HttpServer, name: str, seed: int, pinned: bool = False) -> Told:
        """Register it."""
        body = {"name": name, "src": server.adapter(seed), "pin": pinned}
        answer = await server.client.post("/adapters", json=body)
        return Told(answer.status_code == 200, answer.text)

    async def unload(self, server: HttpServer, name: str) -> Told:
        """Unregister it."""
        answer = await server.client.delete(f"/adapters/{name}")
        return Told(answer.status_code == 200, answer.text)


Way = Native | Vllm | Sglang | SageMaker


def in_ways(*ways: Way) -> pytest.MarkDecorator:
    """Run a test once for each."""
    return pytest.mark.parametrize("way", ways, ids=lambda way: type(way).__name__)


ways = in_ways(Native(), Vllm(), Sglang(), SageMaker())


async def listed(server: HttpServer) -> list[str]:
    """Adapters by GET /v1/models."""
    cards = (await server.client.get("/v1/models")).json()["data"]
    return [card["id"] for card in cards if card["parent"]]


async def agreed(server: HttpServer) -> tuple[list[str], list[str]]:
    """Adapters listed, and those of them that the engine holds; it holds nothing else."""
    entries = (await server.client.get("/v1/adapters")).json()["data"]
    ids = {one["engine_id"]: e["name"] for e in entries for one in e["residency"]}
    held = await server.engine.list_loras()
    assert held == ids.keys() - {None}
    assert [entry["name"] for entry in entries] == await listed(server)
    assert server.engine.counters["overshoots"] == 0
    return await listed(server), sorted(ids[engine_id] for engine_id in held)


def draining(server: HttpServer) -> bool:
    """Whether a busy victim is being drained: nobody's patience lasts for ever."""
    return any(
        one.state == "draining"
        for view in server.service.supervisor.adapters()
        for one in view.residency
    )


@asynccontextmanager
async def full_server(tmp_path: Path, way: Way) -> AsyncIterator[HttpServer]:
    """Room for two, taken by a (the older) and b."""
    fake = FakeSettings(max_loras=2, max_cpu_loras=2, token_delay_s=0.02)
    async with http_server(tmp_path, fake=fake) as server:
        for seed, name in enumerate("ab", 1):
            assert (await way.load(server, name, seed)).done
        yield server


@asynccontextmanager
async def busy(server: HttpServer, *names: str) -> AsyncIterator[list[Exchange]]:
    """A long stream on each; all hang up at the end."""
    long: dict[str, Any] = {"prompt": [5], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    streams = [server.stream("/v1/completions", model=name, **long) for name in names]
    async with anyio.create_task_group() as group:
        for stream in streams:
            group.start_soon(stream.run)
        for stream in streams:
            await stream.until_events(1)
        yield streams
        for stream in streams:
            stream.hang_up()
    await server.idle()


@ways
async def test_the_oldest_idle_adapter_makes_room(tmp_path: Path, way: Way) -> None:
    async with full_server(tmp_path, way) as server:
        assert (await way.load(server, "c", 3)).done
        assert await agreed(server) == (["a", "b", "c"], ["b", "c"])
        assert (await server.complete(model="a")).status_code == 200
        assert await agreed(server) == (["a", "b", "c"], ["a", "c"])
        for name in "abc":
            assert (await way.unload(server, name)).done
        assert await agreed(server) == ([], [])


@ways
async def test_a_busy_victim_is_passed_over(tmp_path: Path, way: Way) -> None:
    async with full_server(tmp_path, way) as server, busy(server, "a") as (stream,):
        assert (await way.load(server, "c", 3)).done
        assert await agreed(server) == (["a", "b", "c"], ["a", "c"])
        assert not stream.ended


@ways
async def test_a_load_waits_for_the_first_victim_to_fall_idle(tmp_path: Path, way: Way) -> None:
    async with full_server(tmp_path, way) as server, busy(server, "a", "b") as (_, other):
        told: list[Told] = []

        async def load() -> None:
            told.append(await way.load(server, "c", 3))

        async with anyio.create_task_group() as group:
            group.start_soon(load)
            await until(lambda: server.phases()[-1] == ROOM)
            assert await agreed(server) == (["a", "b"], ["a", "b"])
            other.hang_up()
        assert told[0].done, told[0].text
        assert await agreed(server) == (["a", "b", "c"], ["a", "c"])


@ways
async def test_promise_4_all_leased_past_the_deadline_leaves_nothing_half_in(
    tmp_path: Path, way: Way
) -> None:
    async with full_server(tmp_path, way) as server, busy(server, "a", "b") as streams:
        told = await server.overdue(lambda: way.load(server, "c", 3), lambda: draining(server))
        assert not told.done
        assert "'c'" in told.text
        assert await agreed(server) == (["a", "b"], ["a", "b"])
        assert not any(stream.ended for stream in streams)
        assert (await server.complete(model="c")).status_code == 404


@ways
async def test_a_victim_that_cannot_be_unloaded_stays_and_the_next_one_goes(
    tmp_path: Path, way: Way
) -> None:
    async with full_server(tmp_path, way) as server:
        server.engine.inject("remove_lora", STICKS)
        told = await way.load(server, "c", 3)
        assert told.done, told.text
        names, held = await agreed(server)
        assert names == ["a", "b", "c"]
        assert "c" in held
        for name in names:
            assert (await server.complete(model=name)).status_code == 200
        for name in names:
            assert (await way.unload(server, name)).done
        assert await agreed(server) == ([], [])


@ways
async def test_promise_4_when_no_victim_can_be_unloaded_the_load_fails_alone(
    tmp_path: Path, way: Way
) -> None:
    async with full_server(tmp_path, way) as server:
        server.engine.inject("remove_lora", STICKS, ALWAYS)
        told = await server.overdue(
            lambda: way.load(server, "c", 3), lambda: server.asked("remove_lora") == 2
        )
        assert not told.done
        assert "'c'" in told.text
        assert await agreed(server) == (["a", "b"], ["a", "b"])
        refused = await way.unload(server, "a")
        assert not refused.done
        assert "It sticks." in refused.text
        assert await agreed(server) == (["a", "b"], ["a", "b"])
        for name in "ab":
            assert (await server.complete(model=name)).status_code == 200
        server.engine.heal()
        assert (await way.load(server, "c", 3)).done
        assert (await way.unload(server, "a")).done
        assert (await agreed(server))[0] == ["b", "c"]


@ways
async def test_promise_6_a_pinned_adapter_is_no_victim(tmp_path: Path, way: Way) -> None:
    async with full_server(tmp_path, way) as server:
        await server.client.patch("/v1/adapters/a", json={"pinned": True})
        for seed, name in enumerate("cd", 3):
            assert (await way.load(server, name, seed)).done
        assert await agreed(server) == (["a", "b", "c", "d"], ["a", "d"])
        async with busy(server, "d"):
            told = await server.overdue(lambda: way.load(server, "e", 5), lambda: draining(server))
            assert not told.done
            assert await agreed(server) == (["a", "b", "c", "d"], ["a", "d"])


@in_ways(Native(), Sglang(), SageMaker())
async def test_promise_6_a_pin_too_many_is_refused_before_anything_happens(
    tmp_path: Path, way: Way
) -> None:
    async with full_server(tmp_path, way) as server:
        assert (await way.unload(server, "a")).done
        assert (await way.load(server, "a", 1, pinned=True)).done
        told = await server.undisturbed(lambda: way.load(server, "c", 3, pinned=True))
        assert not told.done
        assert "'c'" in told.text
        assert "pin" in told.text
        assert await agreed(server) == (["a", "b"], ["a", "b"])
        assert (await server.complete(model="c")).status_code == 404
        assert (await way.unload(server, "a")).done
        assert (await way.load(server, "c", 3, pinned=True)).done
        assert await agreed(server) == (["b", "c"], ["b", "c"])


@ways
async def test_promise_6_with_pins_and_leases_on_all_the_load_alone_fails(
    tmp_path: Path, way: Way
) -> None:
    async with full_server(tmp_path, way) as server, busy(server, "b") as (stream,):
        await server.client.patch("/v1/adapters/a", json={"pinned": True})
        told = await server.overdue(lambda: way.load(server, "c", 3), lambda: draining(server))
        assert not told.done
        assert "'c'" in told.text
        assert await agreed(server) == (["a", "b"], ["a", "b"])
        assert not stream.ended
        stream.hang_up()
        await server.idle()
        assert (await way.load(server, "c", 3)).done
        assert await agreed(server) == (["a", "b", "c"], ["a", "c"])


@ways
async def test_promise_4_a_load_that_fails_after_its_victim_left_leaves_nothing_of_itself(
    tmp_path: Path, way: Way
) -> None:
    async with full_server(tmp_path, way) as server:
        server.engine.inject("add_lora", Fault(error=EngineRejected("It is full of holes.")))
        told = await way.load(server, "c", 3)
        assert not told.done
        assert "It is full of holes." in told.text
        assert await agreed(server) == (["a", "b"], ["b"])
        assert (await server.complete(model="c")).status_code == 404
        assert (await server.complete(model="a")).status_code == 200
        assert await agreed(server) == (["a", "b"], ["a", "b"])
        assert (await way.load(server, "c", 3)).done


@in_ways(Native(), Sglang(), SageMaker())
async def test_promise_4_a_pin_that_the_engine_refuses_takes_its_load_back(
    tmp_path: Path, way: Way
) -> None:
    async with full_server(tmp_path, way) as server:
        server.engine.inject("pin_lora", STICKS)
        told = await way.load(server, "c", 3, pinned=True)
        assert not told.done
        assert "It sticks." in told.text
        assert await listed(server) == ["a", "b"]
        assert (await server.complete(model="c")).status_code == 404
        residents = server.service.supervisor.residents
        await until(lambda: all(resident.names for resident in residents()))
        assert await agreed(server) == (["a", "b"], ["b"])
        assert (await way.load(server, "c", 3, pinned=True)).done
        assert "c" in (await agreed(server))[1]


@ways
async def test_two_loads_for_one_idle_victim_both_end_and_agree(tmp_path: Path, way: Way) -> None:
    async with full_server(tmp_path, way) as server, busy(server, "a") as (stream,):
        told: dict[str, Told] = {}

        async def load(name: str, seed: int) -> None:
            told[name] = await way.load(server, name, seed)

        async with anyio.create_task_group() as group:
            for seed, name in enumerate("cde", 3):
                group.start_soon(load, name, seed)
        assert all(one.done for one in told.values()), told
        names, held = await agreed(server)
        assert names == ["a", "b", "c", "d", "e"]
        assert "a" in held
        assert not stream.ended


@ways
async def test_a_false_from_the_engine_is_a_success(tmp_path: Path, way: Way) -> None:
    async with full_server(tmp_path, way) as server:
        server.engine.inject("remove_lora", Fault(answer_false=True), 2)
        assert (await way.load(server, "c", 3)).done
        assert (await way.unload(server, "b")).done
        assert await agreed(server) == (["a", "c"], ["c"])
        again = await way.unload(server, "b")
        assert not again.done
        assert "b" in again.text
