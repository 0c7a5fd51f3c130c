"""The native adapter API, operations, events, vLLM's dialect and the keys, over the real app."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import anyio.lowlevel
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lorry.engines.fake_script import FakeSettings, Fault
from lorry.errors import EngineRejected
from tests.fixtures.http_server import BASE, Exchange, HttpServer, http_server

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


async def names(server: HttpServer) -> list[str]:
    """What /v1/models lists besides the base, after checking that the other lists agree."""
    cards = (await server.client.get("/v1/models")).json()["data"]
    listed = [card["id"] for card in cards if card["parent"] == BASE]
    entries = (await server.client.get("/v1/adapters")).json()["data"]
    assert [entry["name"] for entry in entries] == listed
    held = await server.engine.list_loras()
    shown = {one["engine_id"] for entry in entries for one in entry["residency"]} - {None}
    assert shown == held
    samples = await metrics(server)
    assert samples["lorry_adapters_registered"] == len(listed)
    assert samples['lorry_versions_resident{"tier": "host"}'] == len(held)
    return listed


async def metrics(server: HttpServer) -> dict[str, float]:
    text = (await server.client.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {
        s.name + (str(s.labels).replace("'", '"') if s.labels else ""): s.value
        for family in families
        for s in family.samples
    }


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


# Register, replace, show, list


async def test_a_new_adapter_is_created_and_shown(server: HttpServer) -> None:
    answer = await server.load("pirate", 1, labels={"team": "sea"})
    entry = answer.json()
    assert answer.status_code == 201
    assert answer.headers["etag"] == f'"{entry["version"]}"'
    assert entry["short_version"] == entry["version"][:12]
    assert (entry["state"], entry["tier"], entry["pinned"]) == ("resident", "host", False)
    assert entry["labels"] == {"team": "sea"}
    assert entry["source"] == server.adapter(1)
    assert entry["rank"] == 4
    assert entry["residency"][0]["replica"] == "engine"
    assert (await server.client.get("/v1/adapters/pirate")).json() == entry
    assert await names(server) == ["pirate"]
    card = (await server.client.get("/v1/models/pirate")).json()
    assert (card["root"], card["parent"]) == (server.adapter(1), BASE)


async def test_putting_the_same_again_changes_nothing(server: HttpServer) -> None:
    first = (await server.load("pirate", 1)).json()
    again = await server.load("pirate", 1)
    assert again.status_code == 200
    assert again.json()["version"] == first["version"]
    assert len(await server.engine.list_loras()) == 1


async def test_a_replacement_remembers_what_was_before(server: HttpServer) -> None:
    first = (await server.load("pirate", 1)).json()["version"]
    entry = (await server.load("pirate", 2)).json()
    assert entry["version"] != first
    assert entry["previous"] == [first]
    back = await server.client.post("/v1/adapters/pirate/rollback")
    assert back.json()["version"] == first
    named = {"version": entry["version"][:12]}
    forth = await server.client.post("/v1/adapters/pirate/rollback", json=named)
    assert forth.json()["version"] == entry["version"]
    unknown = await server.client.post("/v1/adapters/pirate/rollback", json={"version": "0" * 12})
    error_of(unknown, 404)


@pytest.mark.parametrize("form", ['"{}"', "{}", 'W/"{}"', "{:.12}"])
async def test_if_match_is_compare_and_swap(server: HttpServer, form: str) -> None:
    version = (await server.load("pirate", 1)).json()["version"]
    url, body = "/v1/adapters/pirate", {"source": server.adapter(2)}
    wrong = {"If-Match": form.format("f" * 64)}
    assert error_of(await server.client.put(url, json=body, headers=wrong), 409)["code"] == (
        "version_mismatch"
    )
    error_of(await server.client.patch(url, json={"pinned": True}, headers=wrong), 409)
    error_of(await server.client.delete(url, headers=wrong), 409)
    assert (await server.client.get(url)).json()["version"] == version
    right = {"If-Match": form.format(version)}
    answer = await server.client.put(url, json=body, headers=right)
    assert answer.status_code == 200
    assert answer.json()["version"] != version


async def test_if_match_needs_enough_digits_and_an_adapter(server: HttpServer) -> None:
    url, body = "/v1/adapters/pirate", {"source": server.adapter(1)}
    short = await server.client.put(url, json=body, headers={"If-Match": "abc"})
    assert error_of(short, 400)["param"] == "If-Match"
    absent = await server.client.put(url, json=body, headers={"If-Match": "a" * 12})
    assert absent.status_code in (404, 409)
    assert await names(server) == []


async def test_a_taken_name_is_a_conflict_unless_it_may_be_replaced(server: HttpServer) -> None:
    await server.load("pirate", 1)
    assert error_of(await server.load("pirate", 2, replace=False), 409)["param"] == "name"
    assert error_of(await server.load(BASE, 1), 409)["param"] == "name"
    assert error_of(await server.load("tiny-alias", 1), 409)


async def test_bad_bodies_are_named(server: HttpServer) -> None:
    for body, param in (
        ({}, "source"),
        ({"source": ""}, "source"),
        ({"source": "x", "pin": True}, "pin"),
        ({"source": "x", "strategy": "hope"}, "strategy"),
        ({"source": "x", "labels": {"a": 1}}, "labels.a"),
    ):
        answer = await server.client.put("/v1/adapters/pirate", json=body)
        assert error_of(answer, 400)["param"] == param


async def test_a_bad_adapter_is_the_callers_fault_and_leaves_nothing(server: HttpServer) -> None:
    missing = await server.client.put("/v1/adapters/a", json={"source": "/nowhere"})
    assert error_of(missing, 404)["code"] == "source_not_found"
    assert "'a'" in error_of(missing, 404)["message"]
    body = {"source": server.adapter(3, rank=100)}
    error = error_of(await server.client.put("/v1/adapters/a", json=body), 422)
    assert error["code"] == "adapter_invalid"
    assert error["details"]
    assert "'a'" in error["message"]
    assert await names(server) == []


async def test_registering_without_loading_takes_no_room(server: HttpServer) -> None:
    entry = (await server.load("pirate", 1, load=False)).json()
    assert entry["tier"] == "disk"
    assert await server.engine.list_loras() == frozenset()
    fetched = await server.client.post("/v1/adapters/pirate/prefetch")
    assert fetched.json()["tier"] == "host"
    assert await names(server) == ["pirate"]


NAMES = ("a/b", "org/poet:v2", "ünï ☃", "x/rollback", "x/prefetch", "a@b", "100%", "a+b", "?q#f")


@pytest.mark.parametrize("name", NAMES)
async def test_any_name_can_be_addressed(server: HttpServer, name: str) -> None:
    url = f"/v1/adapters/{quote(name, safe='')}"
    body = {"source": server.adapter(1)}
    created = await server.client.put(url, json=body)
    assert created.status_code == 201, created.text
    assert (await server.client.get(url)).json()["name"] == name
    assert (await server.client.patch(url, json={"pinned": True})).json()["pinned"]
    assert (await server.client.post(f"{url}/prefetch")).json()["name"] == name
    assert not (await server.client.patch(url, json={"pinned": False})).json()["pinned"]
    replaced = await server.client.put(url, json={"source": server.adapter(2)})
    back = await server.client.post(f"{url}/rollback")
    assert back.json()["version"] == replaced.json()["previous"][0]
    assert (await server.complete(model=name)).json()["model"] == name
    model = await server.client.get(f"/v1/models/{quote(name, safe='')}")
    assert model.json()["id"] == name
    assert (await server.client.delete(url)).status_code == 200
    assert await names(server) == []


async def test_lists_come_in_pages(server: HttpServer) -> None:
    for name in "abc":
        await server.load(name, 1, load=False)
    page = (await server.client.get("/v1/adapters", params={"limit": 2})).json()
    assert [entry["name"] for entry in page["data"]] == ["a", "b"]
    assert (page["has_more"], page["next"]) == (True, "b")
    rest = (await server.client.get("/v1/adapters", params={"after": "b"})).json()
    assert [entry["name"] for entry in rest["data"]] == ["c"]
    assert (rest["has_more"], rest["next"]) == (False, None)
    assert error_of(await server.client.get("/v1/adapters?limit=0"), 400)["param"] == "limit"


# Pins, labels, unload


async def test_pins_and_labels_are_patched_alone(server: HttpServer) -> None:
    await server.load("pirate", 1, labels={"a": "1"})
    url = "/v1/adapters/pirate"
    pinned = (await server.client.patch(url, json={"pinned": True})).json()
    assert (pinned["pinned"], pinned["labels"]) == (True, {"a": "1"})
    labelled = (await server.client.patch(url, json={"labels": {"b": "2"}})).json()
    assert (labelled["pinned"], labelled["labels"]) == (True, {"b": "2"})
    assert (await server.client.patch(url, json={"pinned": False})).json()["pinned"] is False
    error_of(await server.client.patch("/v1/adapters/no", json={"pinned": True}), 404)
    assert (await server.load("pirate", 1, pinned=True)).json()["pinned"] is True


async def test_promise_6_not_all_slots_can_be_pinned(server: HttpServer) -> None:
    await server.load("a", 1, pinned=True)
    await server.load("b", 2)
    refused = await server.client.patch("/v1/adapters/b", json={"pinned": True})
    assert error_of(refused, 409)["code"] == "all_pinned"


async def test_promise_3_an_unloaded_adapter_is_gone(server: HttpServer) -> None:
    await server.load("pirate", 1)
    gone = await server.client.delete("/v1/adapters/pirate")
    assert gone.json()["name"] == "pirate"
    assert await names(server) == []
    for answer in (
        await server.client.delete("/v1/adapters/pirate"),
        await server.client.get("/v1/adapters/pirate"),
        await server.client.get("/v1/models/pirate"),
        await server.complete(model="pirate"),
        await server.client.post("/v1/adapters/pirate/prefetch"),
    ):
        error_of(answer, 404)


async def test_promise_4_a_failed_unload_leaves_the_adapter(server: HttpServer) -> None:
    await server.load("pirate", 1)
    server.engine.inject("remove_lora", Fault(error=EngineRejected("It sticks.")))
    failed = await server.client.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})
    error = error_of(failed, 500)
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert "pirate" in error["message"]
    assert await names(server) == ["pirate"]
    assert (await server.complete(model="pirate")).status_code == 200


async def test_a_drain_ends_streams_with_an_error_when_its_time_is_over(tmp_path: Path) -> None:
    slow = FakeSettings(token_delay_s=0.005)
    async with http_server(tmp_path, fake=slow) as server:
        await server.load("pirate", 1)
        exchange = server.stream(
            "/v1/completions", model="pirate", prompt=[5], max_tokens=2000, stream=True
        )
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.run)
            await exchange.until_events(2)
            answer = await server.client.delete("/v1/adapters/pirate?drain_timeout=0.05")
            assert answer.status_code == 200
        assert exchange.events()[-2]["error"]["code"] == "request_aborted"
        assert exchange.events()[-1] == "[DONE]"
        assert await names(server) == []


@pytest.mark.parametrize("value", ["-1", "x", "inf", "nan"])
async def test_a_bad_drain_timeout_is_refused(server: HttpServer, value: str) -> None:
    await server.load("pirate", 1)
    answer = await server.client.delete(f"/v1/adapters/pirate?drain_timeout={value}")
    assert error_of(answer, 400)["param"] == "drain_timeout"


# Operations and events


async def test_a_long_call_can_be_followed(server: HttpServer) -> None:
    body = {"source": server.adapter(1)}
    accepted = await server.client.put("/v1/adapters/pirate?wait=false", json=body)
    assert accepted.status_code == 202
    place = accepted.headers["location"]
    assert place == f"/v1/operations/{accepted.json()['id']}"
    with anyio.fail_after(5):
        while (operation := (await server.client.get(place)).json())["status"] == "running":
            await anyio.sleep(0.01)
    assert (operation["status"], operation["kind"], operation["name"]) == ("done", "load", "pirate")
    listed = (await server.client.get("/v1/operations")).json()["data"]
    assert [one["id"] for one in listed] == [operation["id"]]
    gone = await server.client.delete("/v1/adapters/pirate?wait=false")
    assert gone.status_code == 202
    assert error_of(await server.client.get("/v1/operations/999"), 404)["code"] == (
        "operation_not_found"
    )
    error_of(await server.client.get("/v1/operations/x"), 400)


async def test_a_failed_operation_shows_its_error(server: HttpServer) -> None:
    answer = await server.client.put("/v1/adapters/a?wait=false", json={"source": "/nowhere"})
    place = answer.headers["location"]
    with anyio.fail_after(5):
        while (operation := (await server.client.get(place)).json())["status"] == "running":
            await anyio.sleep(0.01)
    assert operation["status"] == "failed"
    assert operation["error"]["code"] == "source_not_found"


async def test_an_operation_can_be_cancelled(server: HttpServer) -> None:
    server.engine.inject("add_lora", Fault(delay_s=0.2))
    body = {"source": server.adapter(1)}
    answer = await server.client.put("/v1/adapters/a?wait=false", json=body)
    place = answer.headers["location"]
    cancelled = await server.client.delete(place)
    assert cancelled.status_code == 200
    with anyio.fail_after(5):
        while (operation := (await server.client.get(place)).json())["status"] == "running":
            await anyio.sleep(0.01)
    assert operation["status"] == "cancelled"


async def test_a_client_that_leaves_does_not_undo_its_load(server: HttpServer) -> None:
    server.engine.inject("add_lora", Fault(delay_s=0.05))
    exchange = Exchange(
        server.app,
        "/v1/adapters/a",
        f'{{"source": "{server.adapter(1)}"}}'.encode(),
        method="PUT",
    )
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.run)
        while not server.service.supervisor.operations():
            await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    with anyio.fail_after(5):
        while not server.service.supervisor.adapters():
            await anyio.sleep(0.01)
    assert await names(server) == ["a"]


async def test_changes_are_fed_as_they_happen_and_from_any_point(server: HttpServer) -> None:
    exchange = Exchange(server.app, "/v1/events", b"", method="GET")
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.run)
        await server.load("pirate", 1)
        await server.client.delete("/v1/adapters/pirate")
        with anyio.fail_after(5):
            while not any(event["kind"] == "unloaded" for event in exchange.events()):
                await anyio.sleep(0.01)
        exchange.hang_up()
    events = exchange.events()
    kinds = [event["kind"] for event in events if event["name"] == "pirate"]
    assert kinds[0] == "registered"
    assert kinds[-1] == "unloaded"
    assert all(event["text"] for event in events if event["kind"] == "registered")
    numbers = [event["sequence"] for event in events]
    assert numbers == sorted(set(numbers))
    later = Exchange(server.app, f"/v1/events?after={numbers[-2]}", b"", method="GET")
    async with anyio.create_task_group() as group:
        group.start_soon(later.run, ((b"last-event-id", str(numbers[-3]).encode()),))
        await later.until_events(2)
        server.service.shutdown.begin()
    assert [event["sequence"] for event in later.events()] == numbers[-2:]
    assert later.ended


async def test_replicas_show_what_their_slots_hold(server: HttpServer) -> None:
    await server.load("pirate", 1)
    await server.complete(model="pirate")
    (replica,) = (await server.client.get("/v1/replicas")).json()["data"]
    assert replica["ready"] is True
    assert replica["slots"][0]["name"] == "pirate"


async def test_the_catalogue_of_errors_can_be_read(server: HttpServer) -> None:
    codes = [entry["code"] for entry in (await server.client.get("/v1/errors")).json()["data"]]
    assert "all_pinned" in codes
    entry = (await server.client.get("/v1/errors/queue_full")).json()
    assert (entry["status"], entry["retryable"]) == (429, True)
    error_of(await server.client.get("/v1/errors/no"), 404)


# vLLM's dialect, word for word


async def test_vllm_loads_and_unloads_in_plain_text(server: HttpServer) -> None:
    loaded = await server.client.post(
        "/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": server.adapter(1)}
    )
    assert loaded.text == "Success: LoRA adapter 'a' added successfully."
    assert "content-type" not in loaded.headers
    unloaded = await server.client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
    assert unloaded.text == "Success: LoRA adapter 'a' removed successfully."
    assert await names(server) == []


async def test_vllm_replaces_in_place_and_creates_when_there_is_nothing(
    server: HttpServer,
) -> None:
    for seed in (1, 2):
        body = {"lora_name": "a", "lora_path": server.adapter(seed), "load_inplace": True}
        answer = await server.client.post("/v1/load_lora_adapter", json=body)
        assert answer.text == "Success: LoRA adapter 'a' added successfully."
    entry = (await server.client.get("/v1/adapters/a")).json()
    assert entry["source"] == server.adapter(2)


TAKEN = (
    "The lora adapter 'taken' has already been loaded. If you want to load the adapter in place, "
    "set 'load_inplace' to True."
)
BOTH = "Both 'lora_name' and 'lora_path' must be provided."
REFUSALS: tuple[tuple[str, dict[str, Any], int, str, str], ...] = (
    ("load", {"lora_name": "", "lora_path": "x"}, 400, "InvalidUserInput", BOTH),
    ("load", {"lora_name": "a", "lora_path": ""}, 400, "InvalidUserInput", BOTH),
    (
        "load",
        {"lora_name": BASE, "lora_path": "x"},
        400,
        "InvalidUserInput",
        "The lora adapter 'tiny' conflicts with a served base model.",
    ),
    ("load", {"lora_name": "taken", "lora_path": "SOURCE"}, 400, "InvalidUserInput", TAKEN),
    (
        "load",
        {"lora_name": "a", "lora_path": "/nowhere"},
        404,
        "NotFoundError",
        "Loading lora a failed: No adapter found for /nowhere",
    ),
    ("load", {"lora_name": "a"}, 400, "Bad Request", "lora_path: "),
    ("load", {"lora_name": 5, "lora_path": "x"}, 400, "Bad Request", "lora_name: "),
    (
        "unload",
        {"lora_name": ""},
        400,
        "InvalidUserInput",
        "'lora_name' needs to be provided to unload a LoRA adapter.",
    ),
    (
        "unload",
        {"lora_name": "nobody"},
        404,
        "NotFoundError",
        "The lora adapter 'nobody' cannot be found.",
    ),
    ("unload", {}, 400, "Bad Request", "lora_name: "),
)


@pytest.mark.parametrize(("verb", "body", "status", "kind", "words"), REFUSALS)
async def test_vllms_refusals(
    server: HttpServer, verb: str, body: dict[str, Any], status: int, kind: str, words: str
) -> None:
    await server.load("taken", 1)
    if body.get("lora_path") == "SOURCE":
        body = body | {"lora_path": server.adapter(1)}
    answer = await server.client.post(f"/v1/{verb}_lora_adapter", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, None, status)
    assert error["message"].startswith(words)
    assert await names(server) == ["taken"]


async def test_vllms_route_wants_json(server: HttpServer) -> None:
    answer = await server.client.post(
        "/v1/load_lora_adapter",
        content='{"lora_name": "a"}',
        headers={"content-type": "text/plain"},
    )
    assert error_of(answer, 400)["type"] == "Bad Request"
    assert "application/json" in error_of(answer, 400)["message"]


async def test_a_bad_adapter_is_a_4xx_in_vllms_shape(server: HttpServer) -> None:
    folder = server.adapter(3, rank=100)
    body = {"lora_name": "wide", "lora_path": folder}
    error = error_of(await server.client.post("/v1/load_lora_adapter", json=body), 422)
    assert error["code"] == 422
    assert "wide" in error["message"]


async def test_many_loads_of_one_name_have_one_winner(server: HttpServer) -> None:
    body = {"lora_name": "a", "lora_path": server.adapter(1)}
    statuses: list[int] = []

    async def load() -> None:
        answer = await server.client.post("/v1/load_lora_adapter", json=body)
        statuses.append(answer.status_code)

    async with anyio.create_task_group() as group:
        for _ in range(16):
            group.start_soon(load)
    assert sorted(statuses) == [200, *[400] * 15]
    assert await names(server) == ["a"]


# The edges of the whole app


async def test_keys_guard_every_route_but_health(tmp_path: Path) -> None:
    async with http_server(tmp_path, api_keys=("secret", "other")) as server:
        paths = (await server.client.get("/openapi.json", headers=key("secret"))).json()["paths"]
        calls = [(method, path) for path, methods in paths.items() for method in methods]
        assert len(calls) > 20
        calls += [("get", "/nowhere"), ("post", "/adapters"), ("post", "/invocations")]
        calls += [("get", "/openapi.json"), ("get", "/docs")]
        for method, path in calls:
            for headers in ({}, key("wrong"), {"Authorization": "secret"}):
                answer = await server.client.request(method, path, headers=headers)
                wanted = 200 if path == "/health" else 401
                assert answer.status_code == wanted, (method, path)
        assert (await server.client.get("/v1/models", headers=key("other"))).status_code == 200
        assert (await server.client.get("/health/", headers={})).status_code == 401


def key(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


async def test_foreign_routes_and_methods_have_our_shape(server: HttpServer) -> None:
    missing = await server.client.get("/v1/nothing")
    assert error_of(missing, 404)["code"] == "route_not_found"
    wrong = await server.client.post("/version")
    assert error_of(wrong, 405)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "GET"
    broken = await server.client.post(
        "/v1/completions", content="{", headers={"content-type": "application/json"}
    )
    assert "not JSON" in error_of(broken, 400)["message"]


async def test_a_long_body_is_refused(tmp_path: Path) -> None:
    async with http_server(tmp_path, max_body_bytes=1000) as server:
        answer = await server.complete(prompt=[5] * 1000)
        assert error_of(answer, 413)["code"] == "body_too_large"

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b" " * 200

        headers = {"content-type": "application/json"}
        streamed = await server.client.post("/v1/completions", content=pieces(), headers=headers)
        assert error_of(streamed, 413)["code"] == "body_too_large"


async def test_openapi_describes_every_route(server: HttpServer) -> None:
    schema = (await server.client.get("/openapi.json")).json()
    assert {"/v1/completions", "/v1/adapters/{name}", "/v1/load_lora_adapter"} <= schema[
        "paths"
    ].keys()
    body = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "stop", "top_k"} <= body.keys()
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            assert about.get("description"), (method, path)


async def test_each_change_is_one_readable_line(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lorry.adapters")
    version = (await server.load("pirate", 1)).json()["short_version"]
    with anyio.fail_after(5):
        while not any("registered pirate" in line for line in caplog.messages):
            await anyio.sleep(0.01)
    (line,) = [line for line in caplog.messages if line.startswith("registered pirate")]
    assert version in line
    assert "\n" not in line


async def test_the_base_and_its_aliases_are_models(server: HttpServer) -> None:
    cards = (await server.client.get("/v1/models")).json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == [BASE, "tiny-alias"]
    assert cards["data"][0]["max_model_len"] == 2048
    assert (await server.client.get("/v1/models/tiny-alias")).json()["id"] == "tiny-alias"
    error_of(await server.client.get("/v1/models/nobody"), 404)
    assert (await server.client.get("/version")).json().keys() == {"version"}
