"""POST /v1/adapters:check over the real app: what a load would find and do, and that it does
nothing."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from lorry.supervisor import SupervisorSettings
from tests.fixtures.adapters import good_adapter
from tests.fixtures.http_server import BASE, HttpServer, http_server
from tests.fixtures.waiting import LIMIT_S

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """Two slots, room for three."""
    async with http_server(tmp_path) as running:
        yield running


async def check(server: HttpServer, source: str, name: str | None = None) -> dict[str, Any]:
    """The answer, which is 200 whatever the adapter is like."""
    body = {"source": source} | ({} if name is None else {"name": name})
    answer = await server.client.post("/v1/adapters:check", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_sound_adapter_is_described_as_the_load_would_describe_it(
    server: HttpServer,
) -> None:
    found = await check(server, server.adapter(1), "legal")
    assert found["ok"] is True
    assert found["problems"] == []
    assert found["would_evict"] == []
    assert not found["resident"]
    assert not (await server.client.get("/v1/adapters")).json()["data"]
    assert await server.engine.list_loras() == set()
    assert not any((server.folder / "cache").iterdir())
    loaded = (await server.load("legal", 1)).json()
    for fact in ("version", "rank", "scale_rule", "target_modules", "layers", "bytes"):
        assert found[fact] == loaded[fact], fact
    assert found["host_bytes"] == loaded["host_bytes"]
    assert (await check(server, server.adapter(1), "legal"))["resident"]


async def test_a_full_house_says_who_would_be_evicted_and_the_load_then_evicts_it(
    server: HttpServer,
) -> None:
    for seed, name in enumerate(("a", "b", "c"), start=1):
        await server.load(name, seed)
    assert (await server.complete(model="a")).status_code == 200
    await server.client.patch("/v1/adapters/c", json={"pinned": True})
    before = await server.engine.list_loras()
    found = await check(server, server.adapter(4), "d")
    assert [one["names"] for one in found["would_evict"]] == [["b"]]
    assert not found["would_wait"]
    assert await server.engine.list_loras() == before
    assert (await server.load("d", 4)).status_code == 201
    states = {
        one["name"]: one["state"]
        for one in (await server.client.get("/v1/adapters")).json()["data"]
    }
    assert states == {"a": "resident", "b": "on_disk", "c": "resident", "d": "resident"}


async def test_a_replacement_spares_the_version_that_it_replaces(server: HttpServer) -> None:
    for seed, name in enumerate(("a", "b", "c"), start=1):
        await server.load(name, seed)
    found = await check(server, server.adapter(4), "a")
    served = (await server.client.get("/v1/adapters/a")).json()["version"]
    assert found["replaces"] == served
    assert [one["names"] for one in found["would_evict"]] == [["b"]]


async def test_every_problem_is_found_each_with_its_fix(server: HttpServer) -> None:
    files = good_adapter(1)
    files.config |= {"use_dora": True, "bias": "all", "r": 0}
    found = await check(server, str(files.write(server.folder / "bad")), BASE)
    assert found["ok"] is False
    texts = " ".join(problem["problem"] for problem in found["problems"])
    for word in ("DoRA", "bias", "r is 0"):
        assert word in texts or word in " ".join(p["fix"] for p in found["problems"]), word
    assert {problem["code"] for problem in found["problems"]} == {
        "adapter_invalid",
        "adapter_conflict",
    }
    assert all(problem["fix"].endswith(".") for problem in found["problems"])
    assert "rank" not in found


async def test_a_missing_folder_is_a_problem_and_an_unusable_source_is_refused(
    server: HttpServer,
) -> None:
    found = await check(server, str(server.folder / "nothing"))
    assert [problem["code"] for problem in found["problems"]] == ["source_not_found"]
    for body in ({"source": ""}, {"source": "a\0b"}, {}, {"source": "a", "more": 1}):
        answer = await server.client.post("/v1/adapters:check", json=body)
        assert answer.status_code == 400, answer.text


async def test_a_source_outside_the_adapter_roots_is_not_read(tmp_path: Path) -> None:
    root = tmp_path / "allowed"
    root.mkdir()
    settings = SupervisorSettings(adapter_roots=(root,), reconcile_s=0.05, shutdown_s=1.0)
    async with http_server(tmp_path, supervision=settings) as server:
        body = {"source": server.adapter(1)}
        answer = await server.client.post("/v1/adapters:check", json=body)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "forbidden"
        inside = str(good_adapter(1).write(root / "inside"))
        assert (await check(server, inside))["ok"] is True


async def test_promise_6_pins_that_leave_no_room_are_a_problem(tmp_path: Path) -> None:
    async with http_server(tmp_path) as server:
        for seed, name in enumerate(("a", "b"), start=1):
            await server.load(name, seed)
        await server.client.patch("/v1/adapters/a", json={"pinned": True})
        world = server.service.supervisor._fleet.world
        for replica in world.replicas.values():
            replica.budget.versions_max = 1
        found = await check(server, server.adapter(3), "c")
        assert [problem["code"] for problem in found["problems"]] == ["all_pinned"]
        assert found["would_evict"] == []
        for replica in world.replicas.values():
            replica.budget.versions_max = 3


async def test_while_every_engine_is_down_a_load_would_be_refused(server: HttpServer) -> None:
    server.engine.crash("test")
    with anyio.fail_after(LIMIT_S):
        while any(r.up for r in server.service.supervisor._fleet.world.replicas.values()):
            await anyio.lowlevel.checkpoint()
    found = await check(server, server.adapter(1), "a")
    assert [problem["code"] for problem in found["problems"]] == ["engine_unreachable"]
