"""A SageMaker endpoint's life against a real process: register, invoke by header, unregister."""

import json
from typing import Any

import httpx

from tests.fixtures.api import Api, tokenizer
from tests.fixtures.common_ground import PROMPTS, SHORT_STEPS, CommonGround

IDENTIFIER = "X-Amzn-SageMaker-Adapter-Identifier"
ALIAS = "X-Amzn-SageMaker-Adapter-Alias"


def invoke(api: Api, adapter: str | None, prompt: str = "P", **more: Any) -> httpx.Response:
    """The cases' completion, without `model`."""
    body = {
        "prompt": list(PROMPTS[prompt]),
        "max_tokens": SHORT_STEPS,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
    }
    headers = {} if adapter is None else {IDENTIFIER: adapter}
    return api.client.post("/invocations", json=body | more, headers=headers)


def register(api: Api, name: str, src: str, **more: Any) -> httpx.Response:
    """POST /adapters."""
    headers = {ALIAS: f"{name} for show"}
    return api.client.post("/adapters", json={"name": name, "src": src} | more, headers=headers)


def test_promise_12_adapters_are_registered_invoked_and_unregistered(
    roomy: Api, ground: CommonGround
) -> None:
    assert roomy.client.get("/ping").status_code == 200
    for name, oracle in (("a", "A"), ("b", "B")):
        answer = register(roomy, name, str(ground.adapter(oracle)), preload=name == "a")
        assert (answer.status_code, answer.text) == (200, f"Adapter {name} for show registered")
    for name, oracle in (("a", "A"), ("b", "B"), (None, "base"), ("a", "A")):
        for prompt in ("P", "S"):
            body = invoke(roomy, name, prompt).json()
            assert roomy.is_answer(body, oracle, prompt), (name, roomy.whose(body, prompt))
    streamed = invoke(roomy, "b", stream=True).text.split("\n\n")
    events = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == tokenizer(ground.model).decode(list(ground.answer("B").tokens))
    generations = roomy.client.get("/v1/lora_adapters").json()["generations"]
    assert sorted(one["aliases"][0] for one in generations) == ["a", "b"]
    for name in ("a", "b"):
        gone = roomy.client.delete(f"/adapters/{name}")
        assert (gone.status_code, gone.text) == (200, f"Adapter {name} unregistered")
        assert roomy.client.delete(f"/adapters/{name}").status_code == 404
        assert invoke(roomy, name).status_code == 404
    assert roomy.client.get("/v1/lora_adapters").json()["generations"] == []
    assert roomy.listed() == {}


def test_promise_3_an_evicted_adapter_is_unregistered_for_good(
    tight: Api, ground: CommonGround
) -> None:
    for name in "ABCD":  # room for three
        assert register(tight, name, str(ground.adapter(name))).status_code == 200
    (evicted,) = [name for name, entry in tight.native().items() if entry["tier"] == "disk"]
    assert tight.client.delete(f"/adapters/{evicted}").status_code == 200
    assert invoke(tight, evicted).status_code == 404
    for name in set("ABCD") - {evicted}:
        assert tight.is_answer(invoke(tight, name, "S").json(), name, "S")
