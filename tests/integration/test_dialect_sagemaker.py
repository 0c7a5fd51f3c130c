"""SageMaker's container standard over the real app: its routes and both headers."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import httpx
import pytest

from lorry.engine import GenerateRequest, SamplingParams
from lorry.engines.fake_script import FakeSettings, Fault, fake_tokens
from lorry.errors import EngineRejected
from lorry.ids import VersionId
from lorry.lifecycle.records import Phase
from tests.fixtures.http_server import BASE, WAIT_S, HttpServer, http_server
from tests.fixtures.tiny_tokenizer import VOCAB, tiny_tokenizer
from tests.fixtures.waiting import LIMIT_S, leap

pytestmark = pytest.mark.anyio

IDENTIFIER = "X-Amzn-SageMaker-Adapter-Identifier"
ALIAS = "X-Amzn-SageMaker-Adapter-Alias"
PROMPT = [5, 6, 7]


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """Two slots, room for three, and a tokenizer."""
    async with http_server(tmp_path, tokenizer=tiny_tokenizer()) as running:
        yield running
        await running.idle()


async def register(
    server: HttpServer, name: str, seed: int = 1, *, alias: str | None = None, **more: Any
) -> httpx.Response:
    body = {"name": name, "src": server.adapter(seed)} | more
    headers = {} if alias is None else {ALIAS: alias}
    return await server.client.post("/adapters", json=body, headers=headers)


async def delete(server: HttpServer, name: str) -> httpx.Response:
    return await server.client.delete(f"/adapters/{name}")


async def entry(server: HttpServer, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = (await server.client.get(f"/v1/adapters/{name}")).json()
    return shown


async def agreed(server: HttpServer) -> list[str]:
    """The registered names, after checking that the engine holds what the list says it does."""
    entries = (await server.client.get("/v1/adapters")).json()["data"]
    cards = (await server.client.get("/v1/models")).json()["data"]
    names = [one["name"] for one in entries]
    assert [card["id"] for card in cards if card["parent"] == BASE] == names
    shown = {part["engine_id"] for one in entries for part in one["residency"]} - {None}
    assert shown == await server.engine.list_loras()
    return names


def vllm_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


# Register


async def test_an_adapter_is_registered_and_unregistered_in_plain_text(server: HttpServer) -> None:
    registered = await register(server, "a1")
    assert (registered.status_code, registered.text) == (200, "Adapter a1 registered")
    assert (await entry(server, "a1"))["tier"] == "host"
    assert await agreed(server) == ["a1"]
    gone = await delete(server, "a1")
    assert (gone.status_code, gone.text) == (200, "Adapter a1 unregistered")
    assert await agreed(server) == []


async def test_the_alias_is_shown_instead_of_the_name(server: HttpServer) -> None:
    assert (await register(server, "a1", alias="Pirate")).text == "Adapter Pirate registered"
    gone = await server.client.delete("/adapters/a1", headers={ALIAS: "Pirate"})
    assert gone.text == "Adapter Pirate unregistered"


async def test_preload_false_registers_only(server: HttpServer) -> None:
    assert (await register(server, "a1", preload=False)).status_code == 200
    assert (await entry(server, "a1"))["tier"] == "disk"
    assert await server.engine.list_loras() == frozenset()
    answer = await server.client.post(
        "/invocations", json={"prompt": PROMPT}, headers={IDENTIFIER: "a1"}
    )
    assert answer.status_code == 200
    assert (await entry(server, "a1"))["tier"] == "slot"


async def test_pin_pins_and_loads_even_without_preload(server: HttpServer) -> None:
    assert (await register(server, "a1", preload=False, pin=True)).status_code == 200
    shown = await entry(server, "a1")
    assert (shown["pinned"], shown["tier"]) == (True, "slot")


async def test_a_replacement_keeps_a_pin_that_it_does_not_mention(server: HttpServer) -> None:
    await register(server, "a1", 1, pin=True)
    first = (await entry(server, "a1"))["version"]
    assert (await register(server, "a1", 2, load_inplace=True)).text == "Adapter a1 registered"
    shown = await entry(server, "a1")
    assert shown["version"] != first
    assert shown["pinned"]
    await register(server, "a1", 1, load_inplace=True, pin=False)
    assert not (await entry(server, "a1"))["pinned"]


async def test_promise_6_a_pin_too_many_is_refused_before_anything_happens(
    server: HttpServer,
) -> None:
    await register(server, "a", 1, pin=True)
    assert "b" in vllm_error(await register(server, "b", 2, pin=True), 409)["message"]
    assert await agreed(server) == ["a"]


@pytest.mark.parametrize("announced", ["application/json", "application/x-www-form-urlencoded"])
async def test_a_json_body_is_read_whatever_it_is_announced_as(
    server: HttpServer, announced: str
) -> None:
    body = json.dumps({"name": "a1", "src": server.adapter(1)})
    answer = await server.client.post(
        "/adapters", content=body, headers={"content-type": announced}
    )
    assert answer.text == "Adapter a1 registered"


@pytest.mark.parametrize("body", ["", "{", "name=a1", "\udcff"])
async def test_the_query_is_read_when_the_body_is_not_json(server: HttpServer, body: str) -> None:
    query = {"name": "a1", "src": server.adapter(1), "preload": "false", "pin": "false"}
    answer = await server.client.post(
        "/adapters",
        params=query,
        content=body.encode("utf-8", "surrogateescape"),
        headers={"content-type": "application/json"},
    )
    assert (answer.status_code, answer.text) == (200, "Adapter a1 registered")
    assert (await entry(server, "a1"))["tier"] == "disk"


@pytest.mark.parametrize(
    ("body", "field", "kind"),
    [
        ({"src": "x"}, ["name"], "missing"),
        ({"name": "a1"}, ["src"], "missing"),
        ({"name": "", "src": "x"}, ["name"], "string_too_short"),
        ({"name": "a1", "src": ""}, ["src"], "string_too_short"),
        ({"name": "a1", "src": "x", "pin": "perhaps"}, ["pin"], "bool_parsing"),
        (["a1"], [], "model_type"),
    ],
)
async def test_bad_fields_are_a_detail_of_json_in_a_string(
    server: HttpServer, body: Any, field: list[str], kind: str
) -> None:
    answer = await server.client.post("/adapters", json=body)
    assert answer.status_code == 400
    assert answer.json().keys() == {"detail"}
    (problem,) = json.loads(answer.json()["detail"])
    assert (problem["loc"], problem["type"]) == (field, kind)
    assert "url" not in problem
    assert await agreed(server) == []


async def test_other_errors_are_vllms(server: HttpServer) -> None:
    await register(server, "taken")
    again = vllm_error(await register(server, "taken", 2), 400)
    assert again["message"].startswith("The lora adapter 'taken' has already been loaded.")
    assert again["type"] == "InvalidUserInput"
    base = vllm_error(await register(server, BASE), 400)
    assert base["message"] == f"The lora adapter '{BASE}' conflicts with a served base model."
    missing = vllm_error(await register(server, "b", src="/nowhere"), 404)
    assert missing["message"].startswith("Loading lora b failed: No adapter found for /nowhere")
    wide = vllm_error(await register(server, "c", src=server.adapter(3, rank=100)), 422)
    assert "c" in wide["message"]
    vllm_error(await register(server, "d", is_3d_lora_weight=True), 400)
    vllm_error(await register(server, "bad\nname"), 400)
    assert await agreed(server) == ["taken"]


# Unregister: the situations from the field


async def test_a_second_unregister_is_404(server: HttpServer) -> None:
    await register(server, "a1")
    assert (await delete(server, "a1")).status_code == 200
    error = vllm_error(await delete(server, "a1"), 404)
    assert error["message"] == "The lora adapter 'a1' cannot be found."


async def test_an_evicted_adapter_is_unregistered_like_any_other(tmp_path: Path) -> None:
    async with http_server(tmp_path, fake=FakeSettings(max_loras=1, max_cpu_loras=2)) as server:
        for seed, name in enumerate("abc", start=1):
            assert (await register(server, name, seed)).status_code == 200
        evicted = [one for one in "abc" if (await entry(server, one))["tier"] == "disk"]
        assert len(evicted) == 1
        assert (await delete(server, evicted[0])).status_code == 200
        assert await agreed(server) == sorted(set("abc") - set(evicted))


async def test_an_engine_that_no_longer_has_it_is_no_failure(server: HttpServer) -> None:
    await register(server, "a1")
    server.engine.inject("remove_lora", Fault(answer_false=True))
    assert (await delete(server, "a1")).text == "Adapter a1 unregistered"
    assert await agreed(server) == []


async def test_promise_4_an_engine_that_fails_leaves_the_adapter(server: HttpServer) -> None:
    await register(server, "a1")
    server.engine.inject("remove_lora", Fault(error=EngineRejected("It sticks.")))
    error = vllm_error(await delete(server, "a1"), 500)
    assert error["type"] == "InternalServerError"
    assert "a1" in error["message"]
    assert await agreed(server) == ["a1"]
    assert (await delete(server, "a1")).status_code == 200
    assert await agreed(server) == []


async def test_promise_6_a_victim_that_sticks_leaves_everything_as_it_was(tmp_path: Path) -> None:
    async with http_server(tmp_path, fake=FakeSettings(max_loras=1, max_cpu_loras=1)) as server:
        await register(server, "a", 1)
        server.engine.inject("remove_lora", Fault(error=EngineRejected("It sticks.")), times=1000)
        answer = await server.overdue(
            lambda: register(server, "b", 2), lambda: server.asked("remove_lora") > 0
        )
        assert answer.status_code >= 500
        server.engine.heal()
        assert await agreed(server) == ["a"]
        assert (await register(server, "b", 2)).status_code == 200
        assert await agreed(server) == ["a", "b"]


ONE_PLACE = FakeSettings(max_loras=1, max_cpu_loras=1, token_delay_s=0.02)


async def test_a_load_tries_the_next_victim_when_one_sticks(tmp_path: Path) -> None:
    async with http_server(tmp_path, fake=FakeSettings(max_loras=1, max_cpu_loras=2)) as server:
        await register(server, "a", 1)
        await register(server, "b", 2)
        server.engine.inject("remove_lora", Fault(error=EngineRejected("It sticks.")))
        assert (await register(server, "c", 3)).status_code == 200
        assert await agreed(server) == ["a", "b", "c"]


@pytest.mark.parametrize("ends", [True, False])
async def test_promise_6_a_load_waits_for_a_leased_victim_up_to_its_deadline(
    tmp_path: Path, ends: bool
) -> None:
    async with http_server(tmp_path, fake=ONE_PLACE) as server:

        def let_it_end() -> None:
            server.engine.token_delay_s = 0

        await register(server, "a", 1)
        tokens = 200 if ends else 2000
        exchange = server.stream("/invocations", prompt=[5], max_tokens=tokens, stream=True)
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.run, ((IDENTIFIER.lower().encode(), b"a"),))
            await exchange.until_events(2)
            answer = await server.amid(
                lambda: register(server, "b", 2),
                lambda: server.phases()[-1] == Phase.ROOM,
                let_it_end if ends else lambda: leap(WAIT_S),
            )
            exchange.hang_up()
        assert not any("error" in event for event in exchange.events() if event != "[DONE]")
        if ends:
            assert answer.status_code == 200
            assert await agreed(server) == ["a", "b"]
        else:
            assert "b" in vllm_error(answer, 503)["message"]
            assert await agreed(server) == ["a"]


async def test_promise_6_a_load_among_pins_is_refused_before_anything_happens(
    tmp_path: Path,
) -> None:
    async with http_server(tmp_path, fake=FakeSettings(max_loras=2, max_cpu_loras=2)) as server:
        await register(server, "a", 1, pin=True)
        assert (await register(server, "b", 2)).status_code == 200
        before = [call for call in server.engine.calls if call[0] != "list_loras"]
        vllm_error(await register(server, "c", 3, pin=True), 409)
        assert [call for call in server.engine.calls if call[0] != "list_loras"] == before
        assert await agreed(server) == ["a", "b"]


async def test_a_missing_path_parameter_is_424(server: HttpServer) -> None:
    answer = await server.client.delete("/adapters/")
    assert answer.status_code == 424
    assert answer.json() == {
        "detail": "Malformed request path; missing path parameter: adapter_name"
    }


@pytest.mark.parametrize("name", ["org/poet:v2", "ünï ☃", "x/update", "a%2Fb"])
async def test_any_name_can_be_registered_asked_and_unregistered(
    server: HttpServer, name: str
) -> None:
    assert (await register(server, name, alias=None)).text == f"Adapter {name} registered"
    headers = [(IDENTIFIER.encode(), name.encode())]
    answer = await server.client.post("/invocations", json={"prompt": PROMPT}, headers=headers)
    assert answer.json()["model"] == name
    assert (await delete(server, quote(name, safe=""))).text == f"Adapter {name} unregistered"


# Invocations


async def invoke(server: HttpServer, adapter: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if adapter is None else {IDENTIFIER: adapter}
    return await server.client.post("/invocations", json=body, headers=headers)


def right(version: str | None) -> list[int]:
    request = GenerateRequest("r", tuple(PROMPT), SamplingParams(temperature=0.0))
    tokens = fake_tokens(request, VersionId(version) if version else None, VOCAB)
    return [next(tokens) for _ in range(4)]


ASKED = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True}


async def test_the_header_picks_the_adapter_over_the_body(server: HttpServer) -> None:
    await register(server, "a1")
    version = (await entry(server, "a1"))["version"]
    for model in ({}, {"model": BASE}, {"model": "nobody"}):
        answer = await invoke(server, "a1", **ASKED, **model, ignore_eos=True)
        assert answer.json()["model"] == "a1"
        assert answer.json()["choices"][0]["token_ids"] == right(version)


async def test_the_body_picks_when_there_is_no_header(server: HttpServer) -> None:
    await register(server, "a1")
    version = (await entry(server, "a1"))["version"]
    named = await invoke(server, **ASKED, model="a1", ignore_eos=True)
    assert named.json()["choices"][0]["token_ids"] == right(version)
    nothing = await invoke(server, **ASKED, ignore_eos=True)
    assert nothing.json()["model"] == BASE
    assert nothing.json()["choices"][0]["token_ids"] == right(None)


async def test_promise_10_an_unknown_or_empty_identifier_never_reaches_the_base(
    server: HttpServer,
) -> None:
    unknown = await invoke(server, "nobody", **ASKED, model=BASE)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    empty = await invoke(server, "", **ASKED)
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, IDENTIFIER)
    assert server.engine.counters["prompt_tokens"] == 0


async def test_the_bodys_shape_picks_the_route(server: HttpServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 2}
    assert (await invoke(server, **chat)).json()["object"] == "chat.completion"
    assert (await invoke(server, **ASKED)).json()["object"] == "text_completion"
    embedding = await invoke(server, input="x")
    assert (embedding.status_code, embedding.json()["error"]["param"]) == (400, "input")
    assert "not supported" in embedding.json()["error"]["message"]
    neither = await invoke(server, inputs="x")
    assert "`messages` nor `prompt`" in neither.json()["error"]["message"]
    assert neither.status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody"}]}, "messages.0.role"),
        ({"prompt": "x", "model": 5}, "model"),
    ],
)
async def test_a_bad_field_is_named_as_on_the_routes_behind(
    server: HttpServer, body: dict[str, Any], param: str
) -> None:
    answer = await invoke(server, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("content", ["{", "[]", "5", "null"])
async def test_a_body_that_is_no_object_is_refused(server: HttpServer, content: str) -> None:
    headers = {"content-type": "application/json"}
    answer = await server.client.post("/invocations", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_invalid")


@pytest.mark.parametrize("route", ["prompt", "messages"])
async def test_answers_are_streamed(server: HttpServer, route: str) -> None:
    await register(server, "a1")
    prompt: Any = PROMPT if route == "prompt" else [{"role": "user", "content": "Where?"}]
    body = {route: prompt, "max_tokens": 3, "stream": True, "ignore_eos": True}
    exchange = server.stream("/invocations", **body)
    await exchange.run(((IDENTIFIER.lower().encode(), b"a1"),))
    assert exchange.headers["content-type"].startswith("text/event-stream")
    *chunks, done = exchange.events()
    assert done == "[DONE]"
    assert {chunk["model"] for chunk in chunks} == {"a1"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_promise_7_a_client_that_leaves_a_stream_releases_its_lease(tmp_path: Path) -> None:
    async with http_server(tmp_path, fake=FakeSettings(token_delay_s=0.005)) as server:
        await register(server, "a1")
        exchange = server.stream("/invocations", prompt=[5], max_tokens=2000, stream=True)
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.run, ((IDENTIFIER.lower().encode(), b"a1"),))
            await exchange.until_events(2)
            exchange.hang_up()
        await server.idle()
        assert (await delete(server, "a1")).status_code == 200


# Health and keys


async def test_ping_is_health(server: HttpServer) -> None:
    assert (await server.client.get("/ping")).status_code == 200
    server.engine.crash("it is gone")
    with anyio.fail_after(LIMIT_S):
        while (await server.client.get("/ping")).status_code != 503:
            await anyio.sleep(0.01)
    assert (await server.client.get("/ping")).json() == (await server.client.get("/health")).json()
    server.engine.restart()


async def test_every_route_of_the_dialect_asks_for_the_key(tmp_path: Path) -> None:
    async with http_server(tmp_path, api_keys=("secret",)) as server:
        for method, path in (
            ("POST", "/adapters"),
            ("GET", "/adapters"),
            ("DELETE", "/adapters/a1"),
            ("POST", "/invocations"),
            ("GET", "/ping"),
            ("GET", f"/models/{BASE}/adapters"),
            ("GET", "/v1/lora_adapters"),
        ):
            assert (await server.client.request(method, path)).status_code == 401, path
        headers = {"Authorization": "Bearer secret"}
        body = {"name": "a1", "src": server.adapter(1)}
        answer = await server.client.post("/adapters", json=body, headers=headers)
        assert answer.text == "Adapter a1 registered"
