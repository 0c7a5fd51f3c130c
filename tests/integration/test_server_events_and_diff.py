"""Events as a list, differences of adapters, and what answers tell OpenAI's clients, over the real
app."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from tests.fixtures.http_server import HttpServer, http_server

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


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_the_events_that_are_remembered_are_a_list(server: HttpServer) -> None:
    await server.load("pirate", 1)
    told = (await server.client.get("/v1/events", params={"follow": "false"})).json()
    assert told["object"] == "list"
    assert [each["sequence"] for each in told["data"]] == [*range(1, len(told["data"]) + 1)]
    last = told["data"][-1]
    assert (last["kind"], last["name"]) == ("registered", "pirate")
    for after, expected in ((last["sequence"] - 1, [last]), (last["sequence"], [])):
        params = {"follow": "false", "after": str(after)}
        assert (await server.client.get("/v1/events", params=params)).json()["data"] == expected


async def test_a_reader_from_an_earlier_life_of_the_server_gets_all_events(
    server: HttpServer,
) -> None:
    exchange = server.stream("/v1/events?after=1000")
    exchange.method = "GET"
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.run)
        await exchange.until_events(1)
        exchange.hang_up()
    assert exchange.events()[0]["sequence"] == 1


async def test_answers_tell_openais_clients_whether_to_try_again(server: HttpServer) -> None:
    absent = await server.client.get("/v1/adapters/nobody")
    assert absent.headers["x-should-retry"] == "false"
    server.service.shutdown.begin()
    stopping = await server.client.get("/v1/adapters")
    assert (stopping.status_code, stopping.headers["x-should-retry"]) == (503, "true")


async def test_a_difference_is_told_of_names_versions_and_folders(server: HttpServer) -> None:
    first = (await server.load("pirate", 1)).json()["version"]
    await server.load("pirate", 2)
    for a, b, same in (
        ("pirate", "pirate", True),
        ("pirate", server.adapter(2), True),
        (f"pirate@{first[:12]}", server.adapter(1), True),
        (f"pirate@{first}", "pirate", False),
    ):
        answer = await server.client.post("/v1/adapters:diff", json={"a": a, "b": b})
        assert answer.status_code == 200, answer.text
        assert answer.json()["same"] is same
    absent = await server.client.post("/v1/adapters:diff", json={"a": "pirate", "b": "nobody"})
    assert error_of(absent, 404)["code"] == "adapter_not_found"
    empty = await server.client.post("/v1/adapters:diff", json={"a": "pirate"})
    assert error_of(empty, 400)["param"] == "b"
