"""DJL Serving's adapter routes over the real app, with the prefix and without."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorry.engines.fake_script import Fault
from lorry.errors import EngineRejected
from tests.fixtures.http_server import BASE, HttpServer, http_server

pytestmark = pytest.mark.anyio

ALIAS = "X-Amzn-SageMaker-Adapter-Alias"
PREFIX = f"/models/{BASE}"


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """Two slots, room for three."""
    async with http_server(tmp_path) as running:
        yield running


async def register(
    server: HttpServer, name: str, seed: int = 1, prefix: str = PREFIX, **more: Any
) -> httpx.Response:
    query = {"name": name, "src": server.adapter(seed)} | more
    return await server.client.post(f"{prefix}/adapters", params=query)


async def entry(server: HttpServer, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = (await server.client.get(f"/v1/adapters/{name}")).json()
    return shown


def djl_error(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert error.keys() == {"code", "type", "message"}
    assert (error["code"], error["type"]) == (status, "BadRequestException")
    return str(error["message"])


@pytest.mark.parametrize("prefix", ["", PREFIX, "/models/tiny-alias"])
async def test_an_adapter_is_registered_by_query_updated_and_described(
    server: HttpServer, prefix: str
) -> None:
    registered = await register(server, "a1", prefix=prefix)
    assert registered.json() == {"status": "Adapter a1 registered"}
    shape = {"name": "a1", "src": server.adapter(1), "pin": False}
    listed = await server.client.get(f"{prefix}/adapters")
    assert listed.json() == {"adapters": [shape]}
    updated = await server.client.post(f"{prefix}/adapters/a1/update", params={"pin": "true"})
    assert updated.json() == {"status": "Adapter a1 updated"}
    described = await server.client.get(f"{prefix}/adapters/a1")
    assert described.json() == [shape | {"pin": True}]


async def test_an_adapter_is_unregistered_below_its_model(server: HttpServer) -> None:
    await register(server, "a1")
    gone = await server.client.delete(f"{PREFIX}/adapters/a1")
    assert gone.json() == {"status": "Adapter a1 unregistered"}
    again = await server.client.delete(f"{PREFIX}/adapters/a1")
    assert djl_error(again, 404) == "The adapter a1 was not found"
    assert await server.engine.list_loras() == frozenset()


async def test_the_alias_is_shown_instead_of_the_name(server: HttpServer) -> None:
    headers = {ALIAS: "Pirate"}
    query = {"name": "a1", "src": server.adapter(1)}
    url = f"{PREFIX}/adapters"
    answers = [
        await server.client.post(url, params=query, headers=headers),
        await server.client.post(f"{url}/a1/update", headers=headers),
        await server.client.delete(f"{url}/a1", headers=headers),
    ]
    verbs = ["registered", "updated", "unregistered"]
    assert [one.json()["status"] for one in answers] == [f"Adapter Pirate {v}" for v in verbs]
    missing = await server.client.get(f"{url}/a1", headers=headers)
    assert djl_error(missing, 404) == "The adapter Pirate was not found"


async def test_preload_and_pin_are_honoured(server: HttpServer) -> None:
    await register(server, "a1", preload="false")
    assert (await entry(server, "a1"))["tier"] == "disk"
    await server.client.post(f"{PREFIX}/adapters/a1/update", params={"preload": "true"})
    assert (await entry(server, "a1"))["tier"] == "host"
    await register(server, "a2", 2, preload="false", pin="true")
    shown = await entry(server, "a2")
    assert (shown["pinned"], shown["tier"]) == (True, "slot")


async def test_an_update_reads_a_source_only_when_it_is_given(server: HttpServer) -> None:
    await register(server, "a1", 1)
    first = (await entry(server, "a1"))["version"]
    for query in ({}, {"pin": "false"}, {"preload": "true"}, {"colour": "red"}):
        answer = await server.client.post(f"{PREFIX}/adapters/a1/update", params=query)
        assert answer.status_code == 200
    assert (await entry(server, "a1"))["version"] == first
    query = {"src": server.adapter(2), "pin": "true"}
    await server.client.post(f"{PREFIX}/adapters/a1/update", params=query)
    shown = await entry(server, "a1")
    assert shown["version"] != first
    assert (shown["source"], shown["pinned"]) == (server.adapter(2), True)


async def test_lists_come_in_pages(server: HttpServer) -> None:
    for name in "abc":
        await register(server, name, preload="false")
    first = (await server.client.get("/adapters", params={"limit": 2})).json()
    assert [one["name"] for one in first["adapters"]] == ["a", "b"]
    query = {"limit": 2, "next_page_token": first["nextPageToken"]}
    rest = (await server.client.get("/adapters", params=query)).json()
    assert [one["name"] for one in rest["adapters"]] == ["c"]
    assert "nextPageToken" not in rest
    for query in ({"limit": 1000}, {"limit": -1}, {"next_page_token": -5}):
        everything = (await server.client.get("/adapters", params=query)).json()
        assert len(everything["adapters"]) == 3
    past = (await server.client.get("/adapters", params={"next_page_token": 9})).json()
    assert past == {"adapters": []}


async def test_errors_are_in_djls_shape(server: HttpServer) -> None:
    for prefix in ("", PREFIX):
        url = f"{prefix}/adapters"
        assert "src" in djl_error(await server.client.post(url, params={"name": "a1"}), 400)
        assert "name" in djl_error(await server.client.post(url), 400)
        query = {"name": "a1", "src": "/nowhere"}
        assert "/nowhere" in djl_error(await server.client.post(url, params=query), 404)
        await register(server, "taken", prefix=PREFIX)
        djl_error(await register(server, "taken", 2, prefix=prefix), 409)
        djl_error(await register(server, BASE, prefix=prefix), 409)
        djl_error(await server.client.get(f"{url}/nobody"), 404)
        djl_error(await server.client.post(f"{url}/nobody/update"), 404)
        djl_error(await server.client.post(f"{url}/taken/update?pin=perhaps"), 400)
        djl_error(await server.client.get(url, params={"limit": "x"}), 400)
    other = await server.client.get("/models/other/adapters")
    assert djl_error(other, 404) == "The model other was not found"


async def test_promise_4_an_engine_that_fails_leaves_the_adapter(server: HttpServer) -> None:
    await register(server, "a1")
    server.engine.inject("remove_lora", Fault(error=EngineRejected("It sticks.")))
    assert "a1" in djl_error(await server.client.delete(f"{PREFIX}/adapters/a1"), 500)
    assert (await server.client.get("/adapters/a1")).status_code == 200
    server.engine.inject("remove_lora", Fault(answer_false=True))
    assert (await server.client.delete(f"{PREFIX}/adapters/a1")).status_code == 200


async def test_a_model_with_a_slash_in_its_name_can_be_the_prefix(tmp_path: Path) -> None:
    async with http_server(tmp_path, served_model_names=("org/tiny:v1",)) as server:
        prefix = "/models/org/tiny:v1"
        assert (await register(server, "x/y", prefix=prefix)).status_code == 200
        assert (await server.client.get(f"{prefix}/adapters/x/y")).json()[0]["name"] == "x/y"
        updated = await server.client.post(f"{prefix}/adapters/x/y/update")
        assert updated.json() == {"status": "Adapter x/y updated"}


async def test_a_name_with_a_line_end_is_refused_in_the_dialect_of_its_route(
    server: HttpServer,
) -> None:
    djl = await server.client.get("/models/base/adapters/a%0Ab")
    assert (djl.status_code, djl.json()["type"]) == (404, "BadRequestException")
    vllm = await server.client.delete("/adapters/a%0Ab")
    assert (vllm.status_code, vllm.json()["error"]["type"]) == (404, "NotFoundError")
