"""The official openai client drives the server: what it sends and what it believes of the
answers."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.fixtures.api import Api, tokenizer
from tests.fixtures.common_ground import EOS, SHORT_STEPS, CommonGround, P, S
from tests.fixtures.server_process import ServerProcess

TEXT = "The quick brown fox"
MESSAGES: Any = [{"role": "user", "content": "Where is the lorry?"}]
LONG = {"ignore_eos": True}


@pytest.fixture
def client(roomy: Api, roomy_server: ServerProcess, ground: CommonGround) -> Iterator[OpenAI]:
    """With adapter A loaded."""
    roomy.must_load("A", ground.adapter("A"))
    url = f"{roomy_server.url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def _text(ground: CommonGround, name: str, prompt: str = "P") -> str:
    decoded: str = tokenizer(ground.model).decode(list(ground.answer(name, prompt).tokens))
    return decoded


def test_models_are_listed_and_described(client: OpenAI, ground: CommonGround) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert cards.keys() == {"tiny", "A"}
    extra = cards["A"].model_extra or {}
    assert (extra["root"], extra["parent"]) == (str(ground.adapter("A")), "tiny")
    assert client.models.retrieve("A").id == "A"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


@pytest.mark.parametrize(("model", "oracle"), [("tiny", "base"), ("A", "A")])
def test_completions_of_token_ids(
    model: str, oracle: str, client: OpenAI, ground: CommonGround
) -> None:
    answer = client.completions.create(
        model=model, prompt=list(P), max_tokens=SHORT_STEPS, temperature=0, logprobs=2
    )
    choice = answer.choices[0]
    assert answer.model == model
    assert answer.object == "text_completion"
    assert choice.text == _text(ground, oracle)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    right = ground.answer(oracle).logprobs
    assert choice.logprobs.token_logprobs == pytest.approx(right, abs=0.02)
    for top in choice.logprobs.top_logprobs or []:
        assert 2 <= len(top) <= 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(P), SHORT_STEPS)
    assert answer.usage.total_tokens == len(P) + SHORT_STEPS


def test_completions_stream_the_same_text_with_usage(client: OpenAI, ground: CommonGround) -> None:
    chunks = list(
        client.completions.create(
            model="A",
            prompt=list(P),
            max_tokens=SHORT_STEPS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == _text(ground, "A")
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == SHORT_STEPS
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] == ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_list_prompts_are_answered_in_order(client: OpenAI, ground: CommonGround) -> None:
    answer = client.completions.create(
        model="A", prompt=[list(P), list(S)], max_tokens=SHORT_STEPS, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == [
        _text(ground, "A", "P"),
        _text(ground, "A", "S"),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(P) + len(S)
    texts = client.completions.create(model="A", prompt=[TEXT, "a time"], max_tokens=4)
    assert len(texts.choices) == 2


def test_text_prompts_equal_their_token_ids(client: OpenAI, ground: CommonGround) -> None:
    ids: list[int] = tokenizer(ground.model).encode(TEXT).ids
    by_text, by_ids = (
        client.completions.create(model="A", prompt=prompt, max_tokens=12, temperature=0)
        for prompt in (TEXT, ids)
    )
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(ids)


def test_chat_answers_and_streams_the_same(client: OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(
            model="A",
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=12,
            extra_body=LONG,
            **more,
        )

    answer = ask(logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert len(choice.logprobs.content) == 12
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-4)
        assert token.logprob <= 0
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert chunks[-1].usage.completion_tokens == 12


def test_chat_uses_the_template_of_the_model(client: OpenAI, ground: CommonGround) -> None:
    prompt = "<s>user: Where is the lorry?\n<s>assistant: "
    ids: list[int] = tokenizer(ground.model).encode(prompt).ids
    chat = client.chat.completions.create(
        model="A", messages=MESSAGES, temperature=0, max_tokens=12, extra_body=LONG
    )
    plain = client.completions.create(
        model="A", prompt=ids, temperature=0, max_tokens=12, extra_body=LONG
    )
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(ids)


def test_n_gives_as_many_different_samples(client: OpenAI) -> None:
    answer = client.completions.create(
        model="A", prompt=TEXT, n=4, max_tokens=12, temperature=1.5, seed=3, extra_body=LONG
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * 12


def test_a_seed_makes_samples_reproducible(client: OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model="A", prompt=TEXT, max_tokens=16, temperature=1, seed=seed, extra_body=LONG
        )
        return answer.choices[0].text

    assert sample(1) == sample(1) == sample(1)
    assert len({sample(seed) for seed in range(5)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(
    stream: bool, client: OpenAI, ground: CommonGround
) -> None:
    whole = _text(ground, "A")
    start = next(i for i in range(4, len(whole)) if whole[i : i + 2].isascii())
    stop = whole[start : start + 2]
    arguments: Any = {"model": "A", "prompt": list(P), "max_tokens": SHORT_STEPS, "temperature": 0}
    if stream:
        chunks = list(client.completions.create(**arguments, stop=[stop, "never"], stream=True))
        text = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(**arguments, stop=stop).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"


def test_eos_ends_an_answer_unless_ignored(client: OpenAI) -> None:
    bias = {str(EOS): 100}
    answer = client.completions.create(
        model="A", prompt=TEXT, max_tokens=8, temperature=0, logit_bias=bias
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == ""
    longer = client.completions.create(
        model="A", prompt=TEXT, max_tokens=8, temperature=0, logit_bias=bias, extra_body=LONG
    )
    assert longer.choices[0].finish_reason == "length"


def test_logit_bias_forces_and_forbids_tokens(client: OpenAI, ground: CommonGround) -> None:
    first = ground.answer("A").tokens[0]
    arguments: Any = {"model": "A", "prompt": list(P), "max_tokens": 1, "temperature": 0}
    arguments |= {"extra_body": {"return_token_ids": True}}

    def tokens(**more: Any) -> list[int]:
        answer = client.completions.create(**arguments, **more)
        ids: list[int] = (answer.choices[0].model_extra or {})["token_ids"]
        return ids

    assert tokens() == [first]
    assert tokens(logit_bias={str(first): -100}) != [first]
    assert tokens(logit_bias={"77": 100}) == [77]
    assert tokens(logit_bias={"77": 100, str(first): -100}) == [77]


def test_echo_returns_the_prompt_and_its_logprobs(client: OpenAI) -> None:
    arguments: Any = {"model": "A", "prompt": TEXT, "max_tokens": 4, "temperature": 0}
    plain = client.completions.create(**arguments)
    echoed = client.completions.create(**arguments, echo=True, logprobs=1)
    assert echoed.choices[0].text == TEXT + plain.choices[0].text
    logprobs = echoed.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(isinstance(x, float) and x <= 0 for x in logprobs.token_logprobs[1:])
    assert echoed.usage is not None
    assert len(logprobs.token_logprobs) == echoed.usage.total_tokens


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": math.inf},
        {"top_p": 0},
        {"top_p": 1.5},
        {"n": 0},
        {"max_tokens": -1},
        {"max_tokens": 100_000},
        {"logprobs": -2},
        {"logprobs": 100_000},
        {"presence_penalty": 9},
        {"logit_bias": {"100000": 1}},
        {"logit_bias": {"word": 1}},
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [100_000]},
        {"prompt": [-1]},
        {"prompt": [5] * 3000},
        {"stop": [""]},
        {"extra_body": {"top_k": -7}},
        {"extra_body": {"min_p": 2}},
        {"extra_body": {"repetition_penalty": 0}},
        {"extra_body": {"prompt": {"a": 1}}},
        {"extra_body": {"max_tokens": "many"}},
    ],
    ids=str,
)
def test_bad_parameters_are_bad_requests(bad: dict[str, Any], client: OpenAI) -> None:
    arguments: Any = {"model": "A", "prompt": list(S), "max_tokens": 2} | bad
    if bad == {"temperature": math.inf}:
        arguments |= {"temperature": None, "extra_body": {"temperature": 1e400}}
        with pytest.raises((openai.BadRequestError, ValueError)):
            client.completions.create(**arguments)
        return
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**arguments)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"]


def test_bad_chats_are_bad_requests(client: OpenAI) -> None:
    sorts: tuple[Any, ...] = (
        {"messages": []},
        {"messages": [{"content": "x"}]},
        {"top_logprobs": 2},
    )
    for bad in sorts:
        arguments: Any = {"model": "A", "messages": MESSAGES, "max_tokens": 2} | bad
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**arguments)


def test_promise_10_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as completion:
        client.completions.create(model="nobody", prompt=TEXT)
    with pytest.raises(openai.NotFoundError) as chat:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    for error in (completion.value, chat.value):
        assert isinstance(error.body, dict)
        assert "nobody" in error.body["message"]
        assert error.body["param"] == "model"


def test_the_async_client_streams_many_at_once(
    client: OpenAI, ground: CommonGround, roomy_server: ServerProcess
) -> None:
    async def ask(asynchronous: AsyncOpenAI, model: str) -> str:
        stream = await asynchronous.completions.create(
            model=model, prompt=list(P), max_tokens=SHORT_STEPS, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        url = f"{roomy_server.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", timeout=30) as asynchronous:
            chat = await asynchronous.chat.completions.create(
                model="A", messages=MESSAGES, max_tokens=4
            )
            assert chat.choices[0].message.role == "assistant"
            return await asyncio.gather(*[ask(asynchronous, m) for m in ["A", "tiny"] * 8])

    texts = asyncio.run(all_of_them())
    assert texts == [_text(ground, "A"), _text(ground, "base")] * 8
