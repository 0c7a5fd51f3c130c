"""Completions and chats over the real app, supervisor and store, with the fake engine."""

import itertools
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lorry.engine import GenerateRequest, SamplingParams
from lorry.engines.fake_script import FakeSettings, Fault, fake_tokens
from lorry.errors import EngineUnreachable
from lorry.ids import VersionId
from lorry.server import prompts
from lorry.server.logprobs import Labels
from tests.fixtures.http_server import BASE, WAIT_S, HttpServer, http_server
from tests.fixtures.tiny_tokenizer import EOS, VOCAB, tiny_tokenizer

pytestmark = pytest.mark.anyio

TOKENIZER = tiny_tokenizer()
CHAT = [{"role": "user", "content": "Where?"}]
RENDERED = "<s>[user] Where?\n[assistant] "
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """A base with a tokenizer and two adapters."""
    async with http_server(tmp_path, tokenizer=TOKENIZER) as running:
        for name, seed in (("pirate", 1), ("org/poet:v2", 2)):
            assert (await running.load(name, seed)).status_code == 201
        yield running
        await running.idle()


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """A base without a tokenizer."""
    async with http_server(tmp_path, eos_token_ids=()) as running:
        yield running
        await running.idle()


def right(prompt: list[int], count: int, version: str | None = None) -> list[int]:
    """What the fake says, before any end."""
    request = GenerateRequest("r", tuple(prompt), GREEDY)
    tokens = fake_tokens(request, VersionId(version) if version else None, VOCAB)
    return [next(tokens) for _ in range(count)]


async def version(server: HttpServer, name: str) -> str:
    answer = await server.client.get(f"/v1/adapters/{name}")
    return str(answer.json()["version"])


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def shown_bytes(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def usage(body: Any) -> tuple[int, int, int]:
    shown = body["usage"]
    return shown["prompt_tokens"], shown["completion_tokens"], shown["total_tokens"]


async def test_base_alias_and_adapters_answer_with_their_own_tokens(server: HttpServer) -> None:
    wanted = {BASE: None, "tiny-alias": None}
    wanted |= {n: await version(server, n) for n in ("pirate", "org/poet:v2")}  # type: ignore[dict-item]
    for model, served in wanted.items():
        answer = await server.complete(model=model, ignore_eos=True, return_token_ids=True)
        body = answer.json()
        tokens = right([5, 6, 7], 4, served)
        assert body["model"] == model
        assert body["choices"][0]["token_ids"] == tokens
        assert body["choices"][0]["prompt_token_ids"] == [5, 6, 7]
        assert body["choices"][0]["text"] == TOKENIZER.decode(tokens)
        assert usage(body) == (3, 4, 7)


async def test_a_version_can_be_asked_for_by_name(server: HttpServer) -> None:
    served = await version(server, "pirate")
    body = (await server.complete(model=f"pirate@{served[:12]}", return_token_ids=True)).json()
    assert body["choices"][0]["token_ids"] == right([5, 6, 7], 4, served)
    assert (await server.complete(model="pirate@000000000000")).status_code == 404


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_promise_10_an_unknown_model_is_an_error(server: HttpServer, route: str) -> None:
    body = {"model": "nobody", "prompt": "x", "messages": CHAT}
    answer = await server.client.post(route, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 404
    assert error["message"].startswith("The model `nobody` does not exist.")
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert len(server.engine.statistics()) > 0
    assert server.engine.counters["prompt_tokens"] == 0


async def test_prompts_may_be_text_ids_or_lists_of_either(server: HttpServer) -> None:
    text, ids = "The lorry", list(TOKENIZER.encode("The lorry"))
    for prompt, count in ((text, 1), (ids, 1), ([text, "x"], 2), ([ids, [5]], 2)):
        answer = await server.complete(prompt=prompt, return_token_ids=True)
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(count))
        assert choices[0]["prompt_token_ids"] == ids


async def test_n_choices_of_each_prompt_are_in_order_and_counted_once(server: HttpServer) -> None:
    answer = await server.complete(
        prompt=[[5, 6], [7]], n=3, temperature=1, seed=4, return_token_ids=True
    )
    body = answer.json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    prompts = [choice["prompt_token_ids"] for choice in body["choices"]]
    assert prompts == [[5, 6]] * 3 + [[7]] * 3
    assert len({str(choice["token_ids"]) for choice in body["choices"]}) == 6
    assert usage(body) == (3, 24, 27)
    again = await server.complete(
        prompt=[[5, 6], [7]], n=3, temperature=1, seed=4, return_token_ids=True
    )
    assert again.json()["choices"] == body["choices"]


async def test_eos_and_stop_tokens_end_an_answer(server: HttpServer) -> None:
    tokens = right([5, 6, 7], 4)
    body = (await server.complete(stop_token_ids=[tokens[2]], return_token_ids=True)).json()
    choice = body["choices"][0]
    assert choice["token_ids"] == tokens[:2]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[2])


async def test_stop_strings_end_the_answer_and_the_engines_work(server: HttpServer) -> None:
    whole = TOKENIZER.decode(right([5, 6, 7], 300))
    stop = next(whole[i : i + 2] for i in range(20, 200) if whole[i : i + 2].isalpha())
    made = server.engine.counters["generation_tokens"]
    answer = await server.complete(max_tokens=300, ignore_eos=True, stop=[stop, "never"])
    choice = answer.json()["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert server.engine.counters["generation_tokens"] - made < 250


async def test_logprobs_name_every_token(server: HttpServer) -> None:
    body = (await server.complete(logprobs=2)).json()
    tokens = right([5, 6, 7], 4)
    shown = body["choices"][0]["logprobs"]
    labels = Labels(TOKENIZER, as_ids=False)
    assert shown["tokens"] == [labels.label(token) for token in tokens]
    assert shown["token_logprobs"] == [-0.1] * 4
    assert all(2 <= len(top) <= 3 for top in shown["top_logprobs"])
    lengths = [labels.width(token) for token in tokens]
    assert shown["text_offset"] == [sum(lengths[:at]) for at in range(4)]
    by_id = (await server.complete(logprobs=0, return_tokens_as_token_ids=True)).json()
    assert by_id["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]


async def test_an_echo_brings_the_prompts_logprobs(server: HttpServer) -> None:
    prompt = "The lorry"
    body = (await server.complete(prompt=prompt, echo=True, logprobs=1)).json()
    choice = body["choices"][0]
    assert choice["text"].startswith(prompt)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == usage(body)[2]
    only = (await server.complete(prompt=prompt, echo=True, max_tokens=0, logprobs=1)).json()
    assert only["choices"][0]["text"] == prompt
    assert only["usage"]["completion_tokens"] == 0
    assert len(only["choices"][0]["logprobs"]["tokens"]) == usage(only)[0]


async def test_prompt_logprobs_have_vllms_shape(server: HttpServer) -> None:
    body = (await server.complete(prompt=[5, 6, 7], prompt_logprobs=1)).json()
    shown = body["choices"][0]["prompt_logprobs"]
    assert shown[0] is None
    assert shown[1]["6"] == {
        "logprob": -0.1,
        "rank": 1,
        "decoded_token": TOKENIZER.token_text(6),
    }
    assert len(shown) == 3


async def test_a_chat_uses_the_template_and_the_rest_of_the_context(server: HttpServer) -> None:
    ids = list(TOKENIZER.encode(RENDERED, add_special_tokens=False))
    asked: dict[str, Any] = {"model": "pirate", "messages": CHAT, "temperature": 0}
    asked |= {"return_token_ids": True, "ignore_eos": True}
    url = "/v1/chat/completions"
    body = (await server.client.post(url, json=asked | {"max_completion_tokens": 3})).json()
    choice = body["choices"][0]
    assert body["prompt_token_ids"] == ids
    tokens = right(ids, 3, await version(server, "pirate"))
    assert choice["message"]["content"] == TOKENIZER.decode(tokens)
    assert choice["message"]["role"] == "assistant"
    assert usage(body) == (len(ids), 3, len(ids) + 3)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}]
    again = await server.client.post(url, json=asked | {"messages": parts, "max_tokens": 3})
    assert again.json()["choices"] == body["choices"]
    whole = (await server.client.post(url, json=asked)).json()
    assert usage(whole)[2] == server.engine.settings.max_model_len


async def test_an_adapters_own_template_wins(server: HttpServer, tmp_path: Path) -> None:
    folder = Path(server.adapter(7))
    (folder / "chat_template.jinja").write_text("Arr: {{ messages[0].content }}")
    body = {"source": str(folder)}
    assert (await server.client.put("/v1/adapters/own", json=body)).status_code == 201
    for model, text in (("own", "Arr: Where?"), ("pirate", RENDERED)):
        answer = await server.client.post("/tokenize", json={"model": model, "messages": CHAT})
        assert answer.json()["tokens"] == list(TOKENIZER.encode(text, add_special_tokens=False))


async def test_a_template_that_takes_too_long_is_given_up(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "RENDER_TIMEOUT_S", 0)
    asked = {"model": BASE, "messages": CHAT}
    answer = await server.client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    assert "took over" in answer.json()["error"]["message"]


async def test_chat_logprobs_have_openais_shape(server: HttpServer) -> None:
    asked = {"model": BASE, "messages": CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    answer = await server.client.post("/v1/chat/completions", json=asked)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    for token in content:
        assert len(token["top_logprobs"]) == 2
        raw = bytes(token["bytes"])
        assert token["token"] in (raw.decode(errors="replace"), f"bytes:{shown_bytes(raw)}")


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_a_stream_says_what_the_whole_answer_says(
    server: HttpServer, logprobs: int | None
) -> None:
    asked: dict[str, Any] = {
        "model": "pirate",
        "prompt": "The lorry",
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": logprobs,
        "echo": logprobs is not None,
        "return_token_ids": True,
    }
    whole = (await server.client.post("/v1/completions", json=asked)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    exchange = server.stream("/v1/completions", **asked, **options)
    await exchange.run()
    assert exchange.headers["content-type"].startswith("text/event-stream")
    *events, counted, done = exchange.events()
    assert done == "[DONE]"
    assert counted["choices"] == []
    assert usage(counted) == usage(whole)
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert joined(choice["token_ids"] for choice in choices) == whole["choices"][0]["token_ids"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert all(event["usage"] is None for event in events)
    if logprobs:
        for key, value in whole["choices"][0]["logprobs"].items():
            assert joined(choice["logprobs"][key] for choice in choices) == value


async def test_a_chat_stream_gives_the_role_first(server: HttpServer) -> None:
    asked = {"model": BASE, "messages": CHAT, "max_tokens": 20, "temperature": 0, "n": 2}
    asked |= {"ignore_eos": True, "seed": 1}
    whole = (await server.client.post("/v1/chat/completions", json=asked)).json()
    exchange = server.stream("/v1/chat/completions", **asked, stream=True)
    await exchange.run()
    *events, done = exchange.events()
    assert done == "[DONE]"
    for index in (0, 1):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == whole["choices"][index]["message"]["content"]


async def test_counts_can_come_with_each_event(server: HttpServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    exchange = server.stream(
        "/v1/completions", model=BASE, prompt=[5], max_tokens=3, stream=True,
        stream_options=options, ignore_eos=True, return_token_ids=True,
    )  # fmt: skip
    await exchange.run()
    made = [event["usage"]["completion_tokens"] for event in exchange.events()[:-1]]
    assert made == [1, 2, 3, 3]


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"prompt": [[5]] * 600, "n": 2}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop.0"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"600": 1}}, "logit_bias"),
    ({"logit_bias": {"6": 101}}, "logit_bias.6"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [["x"]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [5] * 2048}, "prompt"),
    ({"prompt": "x" * 1_000_000}, "prompt"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"suffix": "x"}, "suffix"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
)


@pytest.mark.parametrize(("bad", "param"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_parameters_are_named(
    server: HttpServer, bad: dict[str, Any], param: str
) -> None:
    answer = await server.complete(**bad)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param
    assert param.partition(".")[0] in error["message"]


BAD_CHATS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "pirate", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"max_tokens": 5000}, "max_tokens"),
)


@pytest.mark.parametrize(("bad", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_bad_chats_are_named(server: HttpServer, bad: dict[str, Any], param: str) -> None:
    asked = {"model": BASE, "messages": CHAT, "max_tokens": 2} | bad
    answer = await server.client.post("/v1/chat/completions", json=asked)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param


async def test_what_asks_for_nothing_is_let_through(server: HttpServer) -> None:
    more: dict[str, Any] = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "unheard_of": {"a": 1},
        "best_of": 1,
        "top_k": -1,
        "stop": None,
        "stop_token_ids": None,
        "stream": None,
    }
    assert (await server.complete(**more)).status_code == 200


async def test_a_model_without_a_tokenizer_takes_ids(bare: HttpServer) -> None:
    body = (await bare.complete(logprobs=1, echo=True)).json()
    tokens = [5, 6, 7, *right([5, 6, 7], 4)]
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
    exchange = bare.stream("/v1/completions", model=BASE, prompt=[5], max_tokens=3, stream=True)
    await exchange.run()
    assert len(exchange.events()) == 4


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/completions", {"prompt": [5], "stop": "x"}, "stop"),
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/tokenize", {"prompt": "x"}, "prompt"),
        ("/detokenize", {"tokens": [5]}, "tokens"),
    ],
)
async def test_text_without_a_tokenizer_is_refused(
    bare: HttpServer, route: str, body: dict[str, Any], param: str
) -> None:
    answer = await bare.client.post(route, json={"model": BASE} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "tokenizer" in answer.json()["error"]["message"]


async def test_tokenize_and_detokenize_are_inverse(server: HttpServer) -> None:
    asked = {"prompt": "The lorry", "return_token_strs": True}
    body = (await server.client.post("/tokenize", json=asked)).json()
    assert body["tokens"] == list(TOKENIZER.encode("The lorry"))
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 2048
    back = await server.client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "The lorry"}
    for bad in ({}, {"prompt": "x", "messages": CHAT}):
        assert (await server.client.post("/tokenize", json=bad)).status_code == 400
    bad_ids = await server.client.post("/detokenize", json={"tokens": [VOCAB]})
    assert bad_ids.status_code == 400


# What goes wrong, and promise 7: one answer per request, one release per lease.


def long(**more: Any) -> dict[str, Any]:
    asked = {"model": "pirate", "prompt": [5], "max_tokens": 2000, "ignore_eos": True}
    return asked | more


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_promise_7_a_client_that_leaves_releases_its_leases(
    tmp_path: Path, stream: bool, n: int
) -> None:
    slow = FakeSettings(token_delay_s=0.001)
    async with http_server(tmp_path, tokenizer=TOKENIZER, fake=slow) as server:
        await server.load("pirate")
        exchange = server.stream("/v1/completions", **long(stream=stream, n=n))
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.run)
            while server.engine.counters["generation_tokens"] < 5 * n:
                await anyio.sleep(0.01)
            assert server.leases() == n
            exchange.hang_up()
        await server.idle()
        assert exchange.ended
        assert server.engine.counters["generation_tokens"] < 500 * n


@pytest.mark.parametrize("events", range(5))
async def test_promise_7_a_client_may_leave_at_any_event(server: HttpServer, events: int) -> None:
    exchange = server.stream("/v1/completions", **long(stream=True))
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.run)
        await exchange.until_events(events)
        exchange.hang_up()
    await server.idle()


async def test_an_error_before_the_first_token_has_its_own_status(server: HttpServer) -> None:
    for stream in (False, True):
        server.engine.inject("generate", Fault(error=EngineUnreachable("The engine is down.")))
        answer = await server.complete(stream=stream)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unreachable"
        assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize("n", [1, 3])
async def test_promise_7_an_engine_crash_ends_a_stream_with_one_error(
    tmp_path: Path, n: int
) -> None:
    slow = FakeSettings(token_delay_s=0.001)
    async with http_server(tmp_path, tokenizer=TOKENIZER, fake=slow) as server:
        await server.load("pirate")
        exchange = server.stream("/v1/completions", **long(stream=True, n=n))
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.run)
            await exchange.until_events(5)
            server.engine.crash("killed")
        *_, error, done = exchange.events()
        assert exchange.status == 200
        assert error["error"]["code"] == "engine_unreachable"
        assert done == "[DONE]"
        assert sum("error" in event for event in exchange.events()[:-1]) == 1
        assert (await server.client.get("/health")).status_code == 503
        assert (await server.client.get("/ready")).status_code == 503
        assert (await server.client.get("/metrics")).status_code == 200
        server.engine.restart()
        await server.idle()


async def test_requests_end_at_their_time_limit(tmp_path: Path) -> None:
    slow = FakeSettings(token_delay_s=0.02)
    async with http_server(tmp_path, fake=slow, request_timeout_s=WAIT_S) as server:
        exchange = server.stream("/v1/completions", **long(model=BASE, stream=True))
        await server.overdue(exchange.run, lambda: len(exchange.events()) > 1)
        assert exchange.events()[-2]["error"]["code"] == "request_aborted"
        answer = await server.overdue(
            lambda: server.complete(max_tokens=2000), lambda: server.leases() > 0
        )
        assert answer.status_code == 503
        await server.idle()


async def test_a_stopping_server_ends_streams_with_an_error(tmp_path: Path) -> None:
    slow = FakeSettings(token_delay_s=0.001)
    async with http_server(tmp_path, tokenizer=TOKENIZER, fake=slow) as server:
        exchange = server.stream("/v1/completions", **long(model=BASE, stream=True))
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.run)
            await exchange.until_events(2)
            server.service.shutdown.begin()
            assert (await server.complete()).status_code == 503
            assert (await server.client.get("/ready")).status_code == 503
            server.service.shutdown.abort()
        assert exchange.events()[-2]["error"]["code"] == "shutting_down"


async def test_a_silent_stream_stays_open_by_comments(tmp_path: Path) -> None:
    slow = FakeSettings(token_delay_s=WAIT_S)
    async with http_server(tmp_path, fake=slow, heartbeat_s=0.02) as server:
        exchange = server.stream(
            "/v1/completions", model=BASE, prompt=[5], max_tokens=1, stream=True
        )
        await server.overdue(
            exchange.run, lambda: bytes(exchange.raw).count(b": still here\n\n") >= 4
        )
    assert exchange.status == 200
    assert exchange.events()[-1] == "[DONE]"


async def test_metrics_count_tokens_of_registered_adapters_only(server: HttpServer) -> None:
    await server.complete(model="pirate", ignore_eos=True)
    text = (await server.client.get("/metrics")).text
    assert 'lorry_adapter_generation_tokens_total{adapter="pirate"} 4.0' in text
    assert 'lorry_adapter_prompt_tokens_total{adapter="pirate"} 3.0' in text
    assert 'vllm:generation_tokens_total{model_name="tiny"} 4.0' in text
    assert 'finished_reason="length"' in text
    await server.client.delete("/v1/adapters/pirate")
    assert 'adapter="pirate"' not in (await server.client.get("/metrics")).text


async def test_eos_of_the_model_ends_answers(server: HttpServer) -> None:
    bias = {str(EOS): 100}
    answer = await server.complete(logit_bias=bias)
    assert answer.status_code == 200
    assert EOS in server.service.eos_token_ids
