"""mistral.rs's list of adapters and its expected generations over the real app."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from lorry.engines.fake_script import FakeSettings, Fault
from lorry.errors import EngineRejected
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


async def listing(server: HttpServer) -> dict[str, Any]:
    shown: dict[str, Any] = (await server.client.get("/v1/lora_adapters")).json()
    return shown


async def load(server: HttpServer, name: str, seed: int, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": server.adapter(seed)} | more
    return await server.client.post("/v1/load_lora_adapter", json=body)


async def unload(server: HttpServer, name: str, **more: Any) -> httpx.Response:
    return await server.client.post("/v1/unload_lora_adapter", json={"lora_name": name} | more)


def refused(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["code"] == code
    return str(error["message"])


async def test_the_list_says_what_is_registered_and_what_the_engine_holds(
    server: HttpServer,
) -> None:
    assert await listing(server) == {
        "object": "list",
        "data": [],
        "generations": [],
        "resident_generations": 0,
        "retired_generations": 0,
        "resident_bytes": 0,
        "max_adapters": 3,
        "max_rank": 64,
        "max_bytes": 1 << 30,
    }
    for name in ("a", "twin"):
        await load(server, name, 1)
    entry = (await server.load("asleep", 2, load=False)).json()
    shown = await listing(server)
    assert [one["id"] for one in shown["data"]] == ["a", "asleep", "twin"]
    assert shown["data"][1] == {
        "id": "asleep",
        "object": "lora_adapter",
        "source": server.adapter(2),
        "generation": entry["version"],
        "rank": 4,
        "bytes": entry["host_bytes"],
    }
    (held,) = shown["generations"]
    assert held == {
        "generation": shown["data"][0]["generation"],
        "aliases": ["a", "twin"],
        "rank": 4,
        "bytes": shown["data"][0]["bytes"],
        "retired": False,
        "active_leases": 0,
    }
    assert (shown["resident_generations"], shown["retired_generations"]) == (1, 0)
    assert shown["resident_bytes"] == held["bytes"]


async def test_a_replaced_generation_that_still_runs_is_shown_as_retired(tmp_path: Path) -> None:
    async with http_server(tmp_path, fake=FakeSettings(token_delay_s=0.02)) as server:
        await load(server, "a", 1)
        (old,) = (await listing(server))["data"]
        stream = server.stream("/v1/completions", model="a", prompt=[5], max_tokens=2000, stream=1)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.run)
            await stream.until_events(2)
            await load(server, "a", 2, load_inplace=True)
            shown = await listing(server)
            retired = [one for one in shown["generations"] if one["retired"]]
            assert [one["generation"] for one in retired] == [old["generation"]]
            assert (retired[0]["aliases"], retired[0]["active_leases"]) == ([], 1)
            assert (shown["resident_generations"], shown["retired_generations"]) == (2, 1)
            stream.hang_up()
        with anyio.fail_after(LIMIT_S):
            while (await listing(server))["retired_generations"]:
                await anyio.sleep(0.01)


async def test_the_list_is_of_one_model(server: HttpServer) -> None:
    for model in (BASE, "tiny-alias", "default", ""):
        answer = await server.client.get("/v1/lora_adapters", params={"model": model})
        assert answer.status_code == 200
    other = await server.client.get("/v1/lora_adapters", params={"model": "other"})
    refused(other, 404, "model_not_found")


@pytest.mark.parametrize("word", ["load_inplace", "replace"])
async def test_a_replace_that_expects_the_served_generation_is_done(
    server: HttpServer, word: str
) -> None:
    await load(server, "a", 1)
    (old,) = (await listing(server))["data"]
    expected = {word: True, "expected_generation": old["generation"].upper()}
    answer = await load(server, "a", 2, **expected)
    assert answer.status_code == 200
    (new,) = (await listing(server))["data"]
    assert answer.json() == new
    assert new["generation"] != old["generation"]
    stale = await load(server, "a", 1, **expected)
    assert "'a'" in refused(stale, 409, "lora_generation_mismatch")
    assert (await listing(server))["data"] == [new]


async def test_an_unload_that_expects_the_served_generation_is_done(server: HttpServer) -> None:
    await load(server, "a", 1)
    (old,) = (await listing(server))["data"]
    wrong = await unload(server, "a", expected_generation="f" * 64)
    refused(wrong, 409, "lora_generation_mismatch")
    answer = await unload(server, "a", expected_generation=old["generation"])
    assert answer.json() == old
    assert (await listing(server))["data"] == []
    again = await unload(server, "a", expected_generation=old["generation"])
    refused(again, 404, "lora_adapter_not_found")


async def test_of_two_replaces_that_expect_the_same_one_wins(server: HttpServer) -> None:
    await load(server, "a", 1)
    (old,) = (await listing(server))["data"]
    statuses: list[int] = []

    async def replace(seed: int) -> None:
        more = {"load_inplace": True, "expected_generation": old["generation"]}
        statuses.append((await load(server, "a", seed, **more)).status_code)

    async with anyio.create_task_group() as group:
        for seed in (2, 3):
            group.start_soon(replace, seed)
    assert sorted(statuses) == [200, 409]


async def test_refusals_have_their_codes(server: HttpServer) -> None:
    await load(server, "a", 1)
    served = (await listing(server))["data"][0]["generation"]
    expect = {"load_inplace": True, "expected_generation": served}
    without = await load(server, "a", 2, expected_generation=served)
    assert "load_inplace" in refused(without, 400, "invalid_lora_load_policy")
    refused(await load(server, "nobody", 2, **expect), 404, "lora_adapter_not_found")
    refused(await load(server, "", 2, **expect), 400, "invalid_lora_name")
    missing = await load(server, "a", 2, **expect, lora_path="/nowhere")
    refused(missing, 404, "adapter_path_not_found")
    wide = await load(server, "a", 2, **expect, lora_path=server.adapter(3, rank=100))
    refused(wide, 422, "invalid_lora_adapter")
    refused(await load(server, "a", 2, **expect, model="other"), 404, "model_not_found")
    refused(await load(server, "a", 2, **expect, load_inpalce=1), 422, "invalid_request_body")
    for short in ("", "f" * 63, "g" * 64):
        answer = await unload(server, "a", expected_generation=short)
        refused(answer, 422, "invalid_request_body")
    server.engine.inject("remove_lora", Fault(error=EngineRejected("It sticks.")))
    stuck = await unload(server, "a", expected_generation=served)
    refused(stuck, 500, "engine_rejected")
    assert [one["generation"] for one in (await listing(server))["data"]] == [served]


async def test_without_an_expected_generation_the_routes_are_vllms(server: HttpServer) -> None:
    nothing = {"expected_generation": None, "model": BASE}
    loaded = await load(server, "a", 1, **nothing)
    assert loaded.text == "Success: LoRA adapter 'a' added successfully."
    again = await load(server, "a", 1, replace=True)
    assert again.json()["error"]["type"] == "InvalidUserInput"
    gone = await unload(server, "a", **nothing)
    assert gone.text == "Success: LoRA adapter 'a' removed successfully."
