"""What owners set for their adapters: set, changed, shown, kept, and applied to every route."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from lorry.adapter_settings import SettingsChange
from lorry.engine import GenerateRequest, SamplingParams
from lorry.engines.fake_script import FakeSettings
from lorry.ids import AdapterName
from tests.fixtures.http_server import BASE, Exchange, HttpServer, http_server
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.anyio

URL = "/v1/adapters/pirate"
TOKENIZER = tiny_tokenizer()
CHAT = [{"role": "user", "content": "Where?"}]
ALL: dict[str, Any] = {
    "system_prompt": "You are a pirate.",
    "chat_template": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}",
    "defaults": {"temperature": 0.25, "max_tokens": 3, "seed": 7},
    "maxima": {"temperature": 1.0, "max_tokens": 8, "n": 2},
    "stop": ["zz!"],
    "owner": "sea team",
    "idle_ttl": 3600,
}


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """A base with a tokenizer and two adapters, one with settings of its own in each test."""
    async with http_server(tmp_path, tokenizer=TOKENIZER) as running:
        for name, seed in (("pirate", 1), ("plain", 2)):
            assert (await running.load(name, seed)).status_code == 201
        yield running
        await running.idle()


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """The same, and a long answer takes its time."""
    fake = FakeSettings(max_loras=2, max_cpu_loras=3, token_delay_s=0.02)
    async with http_server(tmp_path, tokenizer=TOKENIZER, fake=fake) as running:
        for name, seed in (("pirate", 1), ("plain", 2)):
            assert (await running.load(name, seed)).status_code == 201
        yield running
        await running.idle()


async def patch(server: HttpServer, **change: Any) -> dict[str, Any]:
    """A change that works."""
    answer = await server.client.patch(URL, json=change)
    assert answer.status_code == 200, answer.text
    entry: dict[str, Any] = answer.json()
    return entry


def refusal(answer: httpx.Response, param: str) -> str:
    """The message of a 400 for that field."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "request_invalid"), answer.text
    assert error["param"] == param, error
    return str(error["message"])


def asked(server: HttpServer) -> GenerateRequest:
    """What reached the engine last."""
    return server.engine.requests[-1]


def sampling(server: HttpServer) -> SamplingParams:
    return asked(server).sampling


async def post(server: HttpServer, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
    return await server.client.post(path, json=body, **more)


ROUTES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "completions": ("/v1/completions", {"model": "pirate", "prompt": [5, 6]}, {}),
    "chat": ("/v1/chat/completions", {"model": "pirate", "messages": CHAT}, {}),
    "base:adapter": ("/v1/completions", {"model": f"{BASE}:pirate", "prompt": [5, 6]}, {}),
    "lora_path": ("/v1/completions", {"model": BASE, "lora_path": "pirate", "prompt": "a"}, {}),
    "invocations": (
        "/invocations",
        {"messages": CHAT},
        {"X-Amzn-SageMaker-Adapter-Identifier": "pirate"},
    ),
    "sglang": ("/generate", {"input_ids": [5, 6], "lora_path": "pirate"}, {}),
}


async def ask(server: HttpServer, route: str, **fields: Any) -> httpx.Response:
    """By one of the routes; `fields` have the names of OpenAI."""
    path, body, headers = ROUTES[route]
    if route == "sglang":
        renamed = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
        own = {renamed.get(name, name): value for name, value in fields.items()}
        return await post(server, path, {**body, "sampling_params": own}, headers=headers)
    return await post(server, path, {**body, **fields}, headers=headers)


every_route = pytest.mark.parametrize("route", ROUTES)


# Applied in one place, so by every route


@every_route
async def test_defaults_stand_in_for_what_a_request_does_not_send(
    server: HttpServer, route: str
) -> None:
    defaults = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "max_tokens": 3}
    defaults |= {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
    await patch(server, defaults={**defaults, "seed": 11})
    assert (await ask(server, route, ignore_eos=True)).status_code == 200
    found = sampling(server)
    assert {name: getattr(found, name) for name in defaults} == defaults
    assert found.seed == 11


@every_route
async def test_what_a_request_sends_wins_over_the_defaults(server: HttpServer, route: str) -> None:
    await patch(server, defaults={"temperature": 0.25, "max_tokens": 3, "seed": 11})
    await ask(server, route, temperature=0, max_tokens=5, seed=2)
    found = sampling(server)
    assert (found.temperature, found.max_tokens, found.seed) == (0, 5, 2)


@every_route
async def test_a_value_over_its_maximum_is_refused(server: HttpServer, route: str) -> None:
    await patch(server, maxima={"temperature": 0.5, "n": 2})
    answer = await ask(server, route, temperature=0.75)
    assert answer.status_code == 400
    words = "temperature is 0.75; the adapter 'pirate' allows 0.5 at most."
    assert words in answer.text
    assert "n is 3; the adapter 'pirate' allows 2 at most." in (await ask(server, route, n=3)).text
    assert (await ask(server, route, temperature=0.5, n=2)).status_code == 200


@every_route
async def test_max_tokens_and_what_is_not_sent_are_made_to_fit(
    server: HttpServer, route: str
) -> None:
    await patch(server, maxima={"temperature": 0.5, "max_tokens": 4, "top_k": 9, "top_p": 0.5})
    for sent in ({}, {"max_tokens": 4000}, {"max_tokens": 100_000}):
        assert (await ask(server, route, **sent, ignore_eos=True)).status_code == 200
        found = sampling(server)
        assert (found.temperature, found.max_tokens, found.top_k) == (0.5, 4, 9)
        assert found.top_p == 0.5
    assert (await ask(server, route, max_tokens=2)).status_code == 200
    assert sampling(server).max_tokens == 2


@every_route
async def test_stop_words_end_answers_beside_those_of_a_request(
    server: HttpServer, route: str
) -> None:
    whole = await ask(server, route, max_tokens=12, ignore_eos=True, temperature=0)
    text = text_of(whole)
    assert len(text) > 4
    await patch(server, stop=[text[2:4]])
    assert text_of(await ask(server, route, max_tokens=12, temperature=0)) == text[:2]
    sooner = await ask(server, route, max_tokens=12, temperature=0, stop=[text[1]])
    assert text_of(sooner) == text[:1]


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "choices" not in body:
        return str(body["text"])
    choice = body["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize("route", ["chat", "invocations"])
async def test_a_chat_without_a_system_message_gets_the_adapters(
    server: HttpServer, route: str
) -> None:
    await patch(server, system_prompt="You are a pirate.")
    await ask(server, route)
    text = TOKENIZER.decode(asked(server).prompt)
    assert text == "[system] You are a pirate.\n[user] Where?\n[assistant] "
    for role in ("system", "developer"):
        own = [{"role": role, "content": "Be brief."}, *CHAT]
        await ask(server, route, messages=own)
        assert "pirate" not in TOKENIZER.decode(asked(server).prompt)


async def test_a_set_template_comes_before_those_of_adapter_and_base(server: HttpServer) -> None:
    await patch(server, chat_template=ALL["chat_template"], system_prompt="Ahoy.")
    answer = await post(server, "/tokenize", {"model": "pirate", "messages": CHAT})
    assert TOKENIZER.decode(answer.json()["tokens"]) == "<system>Ahoy.<user>Where?"
    other = await post(server, "/tokenize", {"model": "plain", "messages": CHAT})
    assert TOKENIZER.decode(other.json()["tokens"]).startswith("[user]")


async def test_each_prompt_of_a_mixed_batch_has_its_own_adapters_settings(
    server: HttpServer,
) -> None:
    await patch(server, defaults={"temperature": 0.25}, maxima={"max_tokens": 2})
    body = {"model": BASE, "prompt": [[5], [6], [7]], "lora_path": ["pirate", None, "plain"]}
    answer = await post(server, "/v1/completions", {**body, "max_tokens": 5, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 2 + 5 + 5
    seen = {request.prompt: request.sampling.temperature for request in server.engine.requests}
    assert seen == {(5,): 0.25, (6,): 1.0, (7,): 1.0}


async def test_the_base_and_other_adapters_know_nothing_of_it(server: HttpServer) -> None:
    await patch(server, **ALL)
    for model in (BASE, "plain"):
        await post(server, "/v1/completions", {"model": model, "prompt": [5], "temperature": 2})
        assert (sampling(server).temperature, sampling(server).max_tokens) == (2, 16)


async def test_a_default_number_of_tokens_fits_a_long_prompt(server: HttpServer) -> None:
    await patch(server, defaults={"max_tokens": 500})
    prompt = [5] * 2000
    await post(server, "/v1/completions", {"model": "pirate", "prompt": prompt})
    assert sampling(server).max_tokens == 48
    sent = {"model": "pirate", "prompt": prompt, "max_tokens": 500}
    refusal(await post(server, "/v1/completions", sent), "max_tokens")


async def test_null_tokens_ask_for_as_many_as_the_maximum_allows(server: HttpServer) -> None:
    await patch(server, maxima={"max_tokens": 4}, defaults={"max_tokens": 2})
    body = {"model": "pirate", "prompt": [5], "max_tokens": None}
    await post(server, "/v1/completions", body)
    assert sampling(server).max_tokens == 4


# Set, changed, shown, kept


async def test_settings_of_a_registration_are_shown_and_kept(tmp_path: Path) -> None:
    async with http_server(tmp_path, tokenizer=TOKENIZER) as server:
        created = await server.load("pirate", 1, **ALL)
        assert created.status_code == 201, created.text
        entry = created.json()
        assert {name: entry[name] for name in ALL} == ALL
    async with http_server(tmp_path, tokenizer=TOKENIZER) as server:
        again = (await server.client.get(URL)).json()
        assert {name: again[name] for name in ALL} == ALL
        await post(server, "/v1/completions", {"model": "pirate", "prompt": [5]})
        assert sampling(server).temperature == 0.25


async def test_an_adapter_without_settings_shows_that(server: HttpServer) -> None:
    entry = (await server.client.get(URL)).json()
    nothing = {"defaults": {}, "maxima": {}, "stop": []}
    assert {name: entry[name] for name in ALL} == dict.fromkeys(ALL) | nothing


async def test_what_a_change_leaves_out_stays_and_null_takes_back(server: HttpServer) -> None:
    await patch(server, **ALL)
    entry = await patch(server, defaults={"temperature": None, "top_p": 0.5}, owner=None)
    assert entry["defaults"] == {"max_tokens": 3, "seed": 7, "top_p": 0.5}
    assert (entry["owner"], entry["system_prompt"]) == (None, ALL["system_prompt"])
    entry = await patch(server, defaults=None, stop=None, chat_template=None, idle_ttl=None)
    assert (entry["defaults"], entry["stop"], entry["chat_template"]) == ({}, [], None)
    assert entry["maxima"] == ALL["maxima"]
    assert await patch(server) == entry


async def test_replacing_and_rolling_back_keep_settings(server: HttpServer) -> None:
    await patch(server, **ALL)
    replaced = (await server.load("pirate", 3)).json()
    assert {name: replaced[name] for name in ALL} == ALL
    back = (await post(server, f"{URL}/rollback", {})).json()
    assert {name: back[name] for name in ALL} == ALL
    changed = (await server.load("pirate", 3, owner="others")).json()
    assert (changed["owner"], changed["stop"]) == ("others", ALL["stop"])


async def test_unloading_forgets_settings(server: HttpServer) -> None:
    await patch(server, **ALL)
    await server.client.delete(URL)
    assert (await server.load("pirate", 1)).json()["owner"] is None


async def test_promise_4_a_change_is_made_whole_or_not_at_all(server: HttpServer) -> None:
    before = (await server.client.get(URL)).json()
    server.engine.heal()
    assert (await server.client.patch("/v1/adapters/plain", json={"pinned": True})).is_success
    change = {"pinned": True, "labels": {"a": "b"}, "owner": "me", "defaults": {"top_p": 0.5}}
    refused = await server.client.patch(URL, json=change)
    assert refused.status_code == 409
    after = (await server.client.get(URL)).json()
    assert after == before
    await server.client.patch("/v1/adapters/plain", json={"pinned": False})
    entry = await patch(server, **change)
    assert {name: entry[name] for name in change} == change


async def test_if_match_guards_a_change(server: HttpServer) -> None:
    version = (await server.client.get(URL)).json()["version"]
    wrong = await server.client.patch(URL, json={"owner": "x"}, headers={"If-Match": "f" * 64})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (409, "version_mismatch")
    right = await server.client.patch(URL, json={"owner": "x"}, headers={"If-Match": version})
    assert right.json()["owner"] == "x"


async def test_two_changes_at_once_lose_nothing(server: HttpServer) -> None:
    async with anyio.create_task_group() as group:
        for at, name in enumerate(("temperature", "top_p", "min_p", "repetition_penalty")):
            group.start_soon(patch_one, server, {"defaults": {name: 0.5 + at / 10}})
    entry = (await server.client.get(URL)).json()
    assert len(entry["defaults"]) == 4


async def patch_one(server: HttpServer, change: dict[str, Any]) -> None:
    await patch(server, **change)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"defaults": {"temperature": -1}}, "defaults.temperature"),
        ({"defaults": {"temperature": "0.5"}}, "defaults.temperature"),
        ({"defaults": {"temperature": True}}, "defaults.temperature"),
        ({"defaults": {"top_q": 1}}, "defaults.top_q"),
        ({"defaults": {"max_tokens": 0}}, "defaults.max_tokens"),
        ({"defaults": {"max_tokens": 1.5}}, "defaults.max_tokens"),
        ({"defaults": {"max_tokens": 2048}}, "defaults.max_tokens"),
        ({"defaults": {"n": 2}}, "defaults.n"),
        ({"defaults": [1]}, "defaults"),
        ({"maxima": {"n": 1000}}, "maxima.n"),
        ({"maxima": {"seed": 1}}, "maxima.seed"),
        ({"maxima": {"max_tokens": 5000}}, "maxima.max_tokens"),
        ({"maxima": {"top_p": 0.5}, "defaults": {"top_p": 0.75}}, "defaults.top_p"),
        ({"maxima": {"top_k": 5}, "defaults": {"top_k": -1}}, "defaults.top_k"),
        ({"stop": "x"}, "stop"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"owner": ""}, "owner"),
        ({"owner": 5}, "owner"),
        ({"idle_ttl": 0}, "idle_ttl"),
        ({"idle_ttl": "1h"}, "idle_ttl"),
        ({"idle_ttl": 1e12}, "idle_ttl"),
        ({"system_prompt": ""}, "system_prompt"),
        ({"system_prompt": "x" * 70_000}, "system_prompt"),
        ({"chat_template": "{% if %}"}, "chat_template"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "chat_template"),
        ({"labels": {"": "x"}}, "labels."),
        ({"settings": {}}, "settings"),
    ],
)
async def test_a_bad_value_is_refused_by_its_name(
    server: HttpServer, change: dict[str, Any], param: str
) -> None:
    before = (await server.client.get(URL)).json()
    for answer in (
        await server.client.patch(URL, json=change),
        await server.load("pirate", 3, **change),
        await server.load("new", 3, **change),
    ):
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert str(error["param"]).startswith(param), error
    assert (await server.client.get(URL)).json() == before
    assert (await server.client.get("/v1/adapters/new")).status_code == 404


async def test_a_later_change_must_agree_with_what_is_set(server: HttpServer) -> None:
    await patch(server, defaults={"temperature": 0.8})
    answer = await server.client.patch(URL, json={"maxima": {"temperature": 0.5}})
    assert refusal(answer, "defaults.temperature") == (
        "defaults.temperature is 0.8, over maxima.temperature, which is 0.5; lower the one or "
        "raise the other."
    )


async def test_a_system_prompt_that_the_template_refuses_is_refused_when_it_is_set(
    server: HttpServer,
) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}"
        "{% endif %}{{ messages[0]['content'] }}"
    )
    await patch(server, chat_template=template)
    answer = await server.client.patch(URL, json={"system_prompt": "Ahoy."})
    assert "No system role" in refusal(answer, "system_prompt")


async def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    async with http_server(tmp_path) as server:
        await server.load("pirate", 1)
        for change in ({"stop": ["x"]}, {"system_prompt": "x"}, {"chat_template": "x"}):
            (name,) = change
            assert "without a tokenizer" in refusal(
                await server.client.patch(URL, json=change), name
            )
        assert (await patch(server, defaults={"temperature": 0.5}))["defaults"]


# Owner, idle time, rollback and reasons


async def test_an_unused_adapter_retires_with_its_reason(server: HttpServer) -> None:
    supervisor = server.service.supervisor
    name = AdapterName("pirate")
    supervisor.change(name, settings=SettingsChange({"idle_ttl_s": 0.05}))
    with anyio.fail_after(10):
        while (await server.client.get(URL)).status_code == 200:
            await anyio.sleep(0.01)
    feed = (await server.client.get("/v1/events", params={"follow": False})).json()["data"]
    gone = next(one for one in feed if one["kind"] == "unloaded")
    assert gone["text"].endswith("nobody used it for 0.05 s, its idle time-to-live")
    (retired,) = [one for one in supervisor.operations() if one.kind == "retire"]
    assert (retired.name, retired.status) == (name, "done")
    audit = supervisor._store.audit(1)[0]
    assert (audit.action, audit.name) == ("retire", "pirate")
    assert "0.05 s" in audit.detail
    refused = await server.complete(model="pirate")
    assert refused.status_code == 404


async def test_a_rollback_switches_back_without_a_load_while_its_version_drains(
    slow: HttpServer,
) -> None:
    server = slow
    first = (await server.client.get(URL)).json()["version"]
    body = {"model": "pirate", "prompt": [5], "max_tokens": 1500, "ignore_eos": True}
    stream = server.stream("/v1/completions", **body, stream=True)
    async with anyio.create_task_group() as group:
        group.start_soon(stream.run)
        await stream.until_events(1)
        await server.load("pirate", 3)
        loads = [one for call, one in server.engine.calls if call == "add_lora"]
        back = await post(server, f"{URL}/rollback", {})
        assert back.json()["version"] == first
        assert [one for call, one in server.engine.calls if call == "add_lora"] == loads
        assert (await server.complete(model=f"pirate@{first[:12]}")).status_code == 200
        stream.hang_up()


async def test_a_rollback_takes_if_match_and_a_strategy(server: HttpServer) -> None:
    await server.load("pirate", 3)
    wrong = await server.client.post(f"{URL}/rollback", headers={"If-Match": "f" * 64})
    assert wrong.json()["error"]["code"] == "version_mismatch"
    odd = await post(server, f"{URL}/rollback", {"strategy": "hope"})
    refusal(odd, "strategy")
    assert (await post(server, f"{URL}/rollback", {"strategy": "drain-first"})).is_success


async def test_the_feed_says_who_waits_for_whom_and_why(slow: HttpServer) -> None:
    server = slow
    await server.load("third", 3)
    body = {"prompt": [5], "max_tokens": 1500, "ignore_eos": True, "stream": True}
    streams = [
        server.stream("/v1/completions", **body, model=name)
        for name in ("pirate", "plain", "third")
    ]
    async with anyio.create_task_group() as group:
        for stream in streams:
            group.start_soon(stream.run)
            await stream.until_events(1)
        await server.load("fourth", 4, load=False)
        group.start_soon(post, server, "/v1/completions", {"model": "fourth", "prompt": [5]})
        waits_for, waiting = "", list[Any]()
        with anyio.fail_after(10):
            while not (waits_for and waiting):
                entry = (await server.client.get("/v1/adapters/fourth")).json()
                waits_for = waits_for or entry["waits_for"]
                feed = (await server.client.get("/v1/events?follow=false")).json()["data"]
                waiting = [one for one in feed if one["kind"] == "waiting"]
                await anyio.sleep(0.01)
        assert waits_for.startswith("3 of 3 places")
        assert waiting[0]["name"] == "fourth"
        assert "'pirate' (1 running)" in waiting[0]["text"]
        for stream in streams:
            stream.hang_up()


async def test_the_feed_can_be_read_once_and_for_one_name(server: HttpServer) -> None:
    await patch(server, owner="me")
    answer = await server.client.get("/v1/events", params={"follow": False, "name": "pirate"})
    feed = answer.json()
    assert feed["object"] == "list"
    assert [one["kind"] for one in feed["data"]] == ["registered", "settings"]
    assert feed["data"][-1]["text"] == "settings of 'pirate' were set: owner"
    later = {"follow": False, "after": feed["data"][-1]["sequence"]}
    assert (await server.client.get("/v1/events", params=later)).json()["data"] == []
    exchange = Exchange(server.app, "/v1/events?name=plain", b"", method="GET")
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.run)
        await exchange.until_events(1)
        exchange.hang_up()
    assert {one["name"] for one in exchange.events()} == {"plain"}
