"""SGLang's /generate: batches, answers, log probabilities, streams and what is refused."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from lorry.engines.fake_script import FakeSettings, Fault
from lorry.errors import EngineUnreachable
from tests.fixtures.http_server import BASE, HttpServer, http_server
from tests.fixtures.tiny_tokenizer import EOS, tiny_tokenizer

pytestmark = pytest.mark.anyio

TOKENIZER = tiny_tokenizer()
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
PROMPT = [5, 6, 7]


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """A base with a tokenizer and two adapters."""
    async with http_server(tmp_path, tokenizer=TOKENIZER) as running:
        for seed, name in enumerate(("a", "org/b:v2"), 1):
            assert (await running.load(name, seed)).status_code == 201
        yield running
        await running.idle()


async def ask(server: HttpServer, **body: Any) -> httpx.Response:
    asked = {"input_ids": PROMPT, "sampling_params": GREEDY} | body
    return await server.client.post(
        "/generate", json={key: value for key, value in asked.items() if value != "LEFT OUT"}
    )


async def whole(server: HttpServer, **body: Any) -> Any:
    answer = await ask(server, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def right(server: HttpServer, model: str, **more: Any) -> tuple[list[int], str]:
    """Ids and text by the OpenAI route."""
    answer = await server.complete(
        model=model, prompt=PROMPT, ignore_eos=True, return_token_ids=True, **more
    )
    choice = answer.json()["choices"][0]
    return choice["token_ids"], choice["text"]


def ids_and_text(answer: Any) -> tuple[list[int], str]:
    return answer["output_ids"], answer["text"]


# Answers


async def test_one_prompt_gives_one_answer(server: HttpServer) -> None:
    answer = await whole(server, rid="mine", lora_path="a")
    assert answer.keys() == {"text", "output_ids", "meta_info"}
    assert ids_and_text(answer) == await right(server, "a")
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "weight_version": "default",
    }


@pytest.mark.parametrize("nothing", [None, "LEFT OUT"])
async def test_no_adapter_is_the_base(server: HttpServer, nothing: str | None) -> None:
    assert ids_and_text(await whole(server, lora_path=nothing)) == await right(server, BASE)


async def test_each_prompt_of_a_batch_has_its_own_adapter(server: HttpServer) -> None:
    paths = ["a", None, "org/b:v2", None, "a"]
    answers = await whole(server, input_ids=[PROMPT] * 5, lora_path=paths)
    expected = [await right(server, path or BASE) for path in paths]
    assert [ids_and_text(answer) for answer in answers] == expected
    assert all("index" not in answer for answer in answers)
    one_for_all = await whole(server, input_ids=[PROMPT] * 2, lora_path="a")
    assert [ids_and_text(answer) for answer in one_for_all] == [expected[0]] * 2


async def test_text_and_ids_are_the_same_prompt(server: HttpServer) -> None:
    words = "the lorry"
    ids = list(TOKENIZER.encode(words))
    by_ids = await whole(server, input_ids=ids, return_prompt_token_ids=True)
    by_text = await whole(server, text=words, input_ids="LEFT OUT", return_prompt_token_ids=True)
    assert ids_and_text(by_text) == ids_and_text(by_ids)
    assert by_text["prompt_token_ids"] == by_ids["prompt_token_ids"] == ids
    several = await whole(server, text=[words, "a"], input_ids="LEFT OUT")
    assert ids_and_text(several[0]) == ids_and_text(by_ids)
    assert len(await whole(server, text=[words], input_ids="LEFT OUT")) == 1


async def test_members_may_differ_in_all_that_they_ask_for(server: HttpServer) -> None:
    answers = await whole(
        server,
        input_ids=[PROMPT, PROMPT],
        sampling_params=[GREEDY, GREEDY | {"max_new_tokens": 2}],
        rid=["x", "y"],
        return_logprob=[False, True],
        logprob_start_len=[-1, 0],
        top_logprobs_num=[0, 1],
    )
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert [len(answer["output_ids"]) for answer in answers] == [4, 2]
    assert "output_token_logprobs" not in answers[0]["meta_info"]
    assert len(answers[1]["meta_info"]["output_top_logprobs"]) == 2


async def test_n_answers_of_each_prompt_are_in_order(server: HttpServer) -> None:
    sampling = GREEDY | {"temperature": 1, "sampling_seed": 7, "n": 2}
    answers = await whole(
        server, input_ids=[PROMPT, PROMPT], lora_path=["a", None], sampling_params=sampling, rid="r"
    )
    ids = [answer["meta_info"]["id"] for answer in answers]
    assert ids == ["r_0-0", "r_0-1", "r_1-0", "r_1-1"]
    seeds = {"temperature": 1, "max_tokens": 4}
    for at, model in enumerate(("a", BASE)):
        for choice in range(2):
            expected = await right(server, model, seed=7 + choice, **seeds)
            assert ids_and_text(answers[2 * at + choice]) == expected


async def test_sglangs_defaults_hold_where_nothing_is_said(server: HttpServer) -> None:
    answer = await whole(server, sampling_params={"ignore_eos": True, "temperature": None})
    assert answer["meta_info"]["completion_tokens"] == 128
    rest = await whole(server, sampling_params={"ignore_eos": True, "max_new_tokens": None})
    assert rest["meta_info"]["completion_tokens"] == 2048 - len(PROMPT)
    close = await whole(
        server, input_ids=[5] * 2040, sampling_params={"ignore_eos": True, "temperature": 0}
    )
    assert close["meta_info"]["completion_tokens"] == 8


async def test_the_end_says_what_matched(server: HttpServer) -> None:
    tokens, words = await right(server, BASE, max_tokens=8)
    by_token = await whole(
        server, sampling_params=GREEDY | {"max_new_tokens": 8, "stop_token_ids": [tokens[5]]}
    )
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[5]}
    assert by_token["output_ids"] == tokens[:5]
    stop = words[2:4]
    by_text = await whole(server, sampling_params=GREEDY | {"max_new_tokens": 8, "stop": stop})
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert by_text["text"] == words[: words.index(stop)]
    kept = await whole(
        server,
        sampling_params=GREEDY | {"max_new_tokens": 8, "stop": [stop], "no_stop_trim": True},
    )
    assert kept["text"] == words[: words.index(stop) + len(stop)]
    sampling = {"temperature": 0, "max_new_tokens": 2000}
    ended = await whole(server, sampling_params=sampling)
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


# Log probabilities


async def test_logprobs_are_triples_of_value_id_and_text(server: HttpServer) -> None:
    answer = await whole(server, return_logprob=True, return_text_in_logprobs=True)
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert [one[1] for one in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(value < 0 and text for value, _, text in meta["output_token_logprobs"])
    assert meta["output_token_logprobs_length"] == 4
    assert "output_top_logprobs" not in meta
    plain = await whole(server, return_logprob=True)
    assert all(one[2] is None for one in plain["meta_info"]["output_token_logprobs"])


@pytest.mark.parametrize("start", [0, 1, 2])
async def test_the_prompts_logprobs_begin_where_asked(server: HttpServer, start: int) -> None:
    answer = await whole(server, return_logprob=True, logprob_start_len=start, top_logprobs_num=2)
    meta = answer["meta_info"]
    assert [one[1] for one in meta["input_token_logprobs"]] == PROMPT[start:]
    assert [one[0] is None for one in meta["input_token_logprobs"]] == [
        at == 0 for at in range(len(PROMPT) - start)
    ]
    assert meta["input_top_logprobs"][0] is None
    for shown in (*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]):
        assert len(shown) == 2
        assert shown[0][0] > shown[1][0]
    assert len(meta["output_top_logprobs"]) == 4


# Streams


async def test_a_stream_is_cumulative_and_ends_as_the_whole_answer(server: HttpServer) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "lora_path": "a", "rid": "r"}
    expected = await whole(server, **body, return_logprob=True)
    exchange = server.stream("/generate", **body, return_logprob=True, stream=True)
    await exchange.run()
    assert exchange.headers["content-type"].startswith("text/event-stream")
    *events, done = exchange.events()
    assert done == "[DONE]"
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3, 4]
    for event in events:
        count = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == expected["output_ids"][:count]
        assert expected["text"].startswith(event["text"])
        logprobs = event["meta_info"]["output_token_logprobs"]
        assert logprobs == expected["meta_info"]["output_token_logprobs"][:count]
        assert event["meta_info"]["output_token_logprobs_length"] == count
        assert "index" not in event
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * 3
    for answer in (events[-1], expected):
        del answer["meta_info"]["e2e_latency"], answer["meta_info"]["cached_tokens"]
    assert events[-1] == expected


async def test_a_stream_of_a_batch_tells_its_members_apart(server: HttpServer) -> None:
    exchange = server.stream(
        "/generate",
        input_ids=[PROMPT, PROMPT],
        sampling_params=GREEDY,
        lora_path=["a", None],
        stream=True,
    )
    await exchange.run()
    last = {event["index"]: event for event in exchange.events()[:-1]}
    assert ids_and_text(last[0]) == await right(server, "a")
    assert ids_and_text(last[1]) == await right(server, BASE)


@pytest.mark.parametrize("stream", [True, False])
async def test_promise_7_a_client_that_leaves_releases_its_leases(
    tmp_path: Path, stream: bool
) -> None:
    async with http_server(tmp_path, fake=FakeSettings(token_delay_s=0.005)) as server:
        await server.load("a", 1)
        exchange = server.stream(
            "/generate",
            input_ids=[PROMPT, PROMPT],
            sampling_params=GREEDY | {"max_new_tokens": 1500},
            lora_path=["a", None],
            stream=stream,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.run)
            while server.engine.statistics()["streams"] < 2:
                await anyio.sleep(0.005)
            exchange.hang_up()
        await server.idle()
        gone = await server.client.post("/unload_lora_adapter", json={"lora_name": "a"})
        assert gone.json()["success"]


async def test_an_error_in_a_stream_is_its_last_event(tmp_path: Path) -> None:
    async with http_server(tmp_path, fake=FakeSettings(token_delay_s=0.005)) as server:
        exchange = server.stream(
            "/generate",
            input_ids=PROMPT,
            sampling_params=GREEDY | {"max_new_tokens": 1500},
            stream=True,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(exchange.run)
            await exchange.until_events(2)
            server.engine.crash("killed")
        *_, last, done = exchange.events()
        assert (exchange.status, done) == (200, "[DONE]")
        assert (last["error"]["code"], last["error"]["retryable"]) == (503, True)


# What is refused


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("paths", ["x", ["a", "x"], ["x", None], BASE, f"{BASE}:a"])
async def test_promise_10_an_adapter_that_was_never_loaded_is_400(
    server: HttpServer, paths: str | list[str | None], stream: bool
) -> None:
    ids = [PROMPT, PROMPT] if isinstance(paths, list) else PROMPT
    answer = await ask(server, input_ids=ids, lora_path=paths, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    named = "x" if isinstance(paths, list) else paths
    assert error == {
        "message": f"Got LoRA adapter that has never been loaded: {named}\n"
        "All loaded adapters: a, org/b:v2.",
        "type": "invalid_request_error",
        "code": 400,
        "retryable": False,
    }
    assert server.engine.statistics()["streams"] == 0


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"text": "a"}, "either text or input_ids"),
    ({"input_ids": "LEFT OUT"}, "either text or input_ids"),
    ({"input_ids": []}, "input_ids is empty"),
    ({"input_ids": [[]]}, "input_ids is empty"),
    ({"input_ids": [PROMPT, "a"]}, "input_ids"),
    ({"input_ids": "the"}, "input_ids must be token ids"),
    ({"input_ids": ["the"]}, "input_ids must be token ids"),
    ({"input_ids": [512]}, "token id 512"),
    ({"input_ids": [5] * 3000}, "maximum context length"),
    ({"text": "", "input_ids": "LEFT OUT"}, "text is empty"),
    ({"sampling_params": {"max_new_tokens": 3000}}, "lower max_new_tokens to 2045"),
    ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature: "),
    ({"sampling_params": [{"top_p": 0}]}, "sampling_params.0.top_p: "),
    ({"sampling_params": 5}, "sampling_params: "),
    ({"rid": 5}, "rid: "),
    ({"sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}}, "min_new_tokens is 5"),
    ({"sampling_params": {"regex": "a+"}}, "regex"),
    ({"sampling_params": {"json_schema": "{}"}}, "json_schema"),
    ({"sampling_params": [GREEDY, GREEDY]}, "sampling_params has 2 entries for 1 prompts"),
    (
        {"input_ids": [PROMPT, PROMPT], "sampling_params": [{"n": 1}, {"n": 2}]},
        "n must be the same",
    ),
    ({"lora_path": ["a", None]}, "lora_path has 2 entries"),
    ({"lora_path": 5}, "lora_path"),
    ({"lora_path": ""}, "lora_path is empty"),
    ({"return_logprob": True, "logprob_start_len": 4}, "logprob_start_len is 4"),
    ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num is 21"),
    ({"image_data": "x.png"}, "image_data is not supported"),
    ({"token_ids_logprob": [5]}, "token_ids_logprob is not supported"),
)


@pytest.mark.parametrize(("body", "words"), BAD)
async def test_what_cannot_be_is_400_and_named(
    server: HttpServer, body: dict[str, Any], words: str
) -> None:
    answer = await ask(server, **body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert server.engine.statistics()["streams"] == 0


async def test_the_servers_own_trouble_keeps_its_status(server: HttpServer) -> None:
    server.engine.inject("generate", Fault(error=EngineUnreachable("The engine is down.")))
    answer = await ask(server)
    assert answer.status_code == 503
    assert answer.json()["error"]["retryable"] is True
    assert answer.headers["retry-after"]


async def test_what_asks_for_nothing_is_let_through(server: HttpServer) -> None:
    idle = {"image_data": None, "return_hidden_states": False, "session_params": None}
    assert (await ask(server, **idle, priority=0, log_metrics=True)).status_code == 200


async def test_salted_requests_share_no_prefix(server: HttpServer) -> None:
    long = [5] * 64
    cached = []
    for salt in ({}, {}, {"extra_key": "x"}, {"cache_salt": "x"}):
        answer = await whole(server, input_ids=long, **salt)
        cached.append(answer["meta_info"]["cached_tokens"] > 0)
    assert cached == [False, True, False, True]


async def test_half_a_surrogate_pair_is_no_text(server: HttpServer) -> None:
    answer = await server.client.post(
        "/generate",
        content=b'{"text": "a\\ud800", "sampling_params": {"max_new_tokens": 1}}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert "half a surrogate pair at character 1" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "shape"),
    [("/generate", {"error"}), ("/load_lora_adapter", {"success", "error_message"})],
)
async def test_bytes_that_are_no_text_are_refused_in_the_routes_own_shape(
    server: HttpServer, path: str, shape: set[str]
) -> None:
    answer = await server.client.post(
        path, content=b"\xff\xfe{", headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert shape <= answer.json().keys()
    assert "not JSON" in answer.text
