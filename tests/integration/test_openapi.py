"""openapi.json describes every route: in words, with shapes, and with examples that are true."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from jsonschema import Draft202012Validator

from lorry.server.openapi.merge import TABLE
from tests.fixtures.http_server import BASE, HttpServer, http_server
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.anyio

JSON = "application/json"
CHAT = [{"role": "user", "content": "Where?"}]


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """With an adapter, a tokenizer and a history."""
    async with http_server(tmp_path, tokenizer=tiny_tokenizer()) as running:
        settings = {"system_prompt": "Ahoy.", "defaults": {"top_p": 0.5}, "idle_ttl": 60}
        assert (await running.load("pirate", 1, labels={"a": "b"}, **settings)).is_success
        assert (await running.load("pirate", 2)).is_success
        yield running
        await running.idle()


@pytest.fixture
async def spec(server: HttpServer) -> dict[str, Any]:
    """As a client gets it."""
    found: dict[str, Any] = (await server.client.get("/openapi.json")).json()
    return found


def routes(app: FastAPI) -> set[tuple[str, str]]:
    """Every route that the app answers, those of routers included, but openapi.json itself."""
    return {
        (method, context.path_format)
        for context in iter_route_contexts(app.routes)
        for method in context.methods or ()
        if isinstance(context.original_route, APIRoute) and context.path_format
    }


def operations(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in spec["paths"].items():
        for method, about in methods.items():
            yield f"{method.upper()} {path}", about


def contents(about: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Where, media type and content, of the body and of each answer."""
    for media, content in about.get("requestBody", {}).get("content", {}).items():
        yield "body", media, content
    for status, answer in about["responses"].items():
        for media, content in answer.get("content", {}).items():
            yield status, media, content


def examples(content: dict[str, Any], spec: dict[str, Any]) -> list[Any]:
    """Those of the content and of its schema, wherever OpenAPI lets them stand."""
    schema = content.get("schema", {})
    if "$ref" in schema:
        schema = spec["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    found = [one["value"] for one in content.get("examples", {}).values()]
    found += [content["example"]] if "example" in content else []
    return found + list(schema.get("examples", ()))


def objections(schema: dict[str, Any], value: Any, spec: dict[str, Any]) -> list[str]:
    """Why a value does not have that schema."""
    whole = {**schema, "components": spec["components"]}
    return [error.message for error in Draft202012Validator(whole).iter_errors(value)]


async def test_every_route_of_the_app_is_in_it(server: HttpServer, spec: dict[str, Any]) -> None:
    listed = {tuple(name.split(" ", 1)) for name, _ in operations(spec)}
    there = {(m, p.replace(":path}", "}")) for m, p in routes(server.app)}
    assert len(there) > 40
    assert there == listed


async def test_every_route_has_a_summary_a_description_and_examples(spec: dict[str, Any]) -> None:
    missing = []
    for name, about in operations(spec):
        if not about.get("summary") or not about.get("description"):
            missing.append(f"{name}: words")
        body = about.get("requestBody", {}).get("content", {})
        missing += [f"{name}: body" for one in body.values() if not examples(one, spec)]
        good = [s for s in about["responses"] if s.startswith("2")]
        answers = [about["responses"][status] for status in good]
        if not answers or any(not answer.get("description") for answer in answers):
            missing.append(f"{name}: answers")
        for answer in answers:
            for media, content in answer.get("content", {}).items():
                if not content.get("schema") or not examples(content, spec):
                    missing.append(f"{name}: {media}")
        for parameter in about.get("parameters", ()):
            if parameter["required"] and not shows_an_example(parameter):
                missing.append(f"{name}: {parameter['name']}")
    assert missing == []


def shows_an_example(parameter: dict[str, Any]) -> bool:
    return bool({"example", "examples"} & {*parameter, *parameter["schema"]})


async def test_every_example_has_the_schema_that_it_is_to_show(spec: dict[str, Any]) -> None:
    wrong = {}
    count = 0
    for name, about in operations(spec):
        for place, media, content in contents(about):
            for value in examples(content, spec):
                count += 1
                found = objections(content["schema"], value, spec)
                if found:
                    wrong[f"{name} {place} {media}"] = found
    assert wrong == {}
    assert count > 100


async def test_examples_of_streams_are_events(spec: dict[str, Any]) -> None:
    streams = [
        value
        for _, about in operations(spec)
        for _, media, content in contents(about)
        if media == "text/event-stream"
        for value in examples(content, spec)
    ]
    assert len(streams) >= 4
    for stream in streams:
        assert stream.endswith("\n\n")
        data = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
        assert all(one == "[DONE]" or json.loads(one) for one in data)


async def test_each_route_describes_its_errors_and_none_that_it_never_gives(
    spec: dict[str, Any],
) -> None:
    for name, about in operations(spec):
        assert "422" not in about["responses"], name
        assert {"default", "400"} & about["responses"].keys(), name
    assert "HTTPValidationError" not in spec["components"]["schemas"]


async def test_every_reference_leads_somewhere(spec: dict[str, Any]) -> None:
    text = json.dumps(spec)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names - spec["components"]["schemas"].keys() == set()


async def test_no_route_is_described_that_is_not_there(spec: dict[str, Any]) -> None:
    listed = {tuple(name.split(" ", 1)) for name, _ in operations(spec)}
    assert TABLE.keys() - listed == set()


async def test_the_description_is_made_once(server: HttpServer) -> None:
    assert server.app.openapi() is server.app.openapi()


# Real answers have the shapes that are told


REAL: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/version", None),
    ("GET", "/metrics", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{model}", None),
    ("GET", "/v1/adapters", None),
    ("GET", "/v1/adapters/{name}", None),
    ("PATCH", "/v1/adapters/{name}", {"owner": "me", "stop": ["x"]}),
    ("POST", "/v1/adapters/{name}/prefetch", None),
    ("POST", "/v1/adapters/{name}/rollback", {}),
    ("POST", "/v1/adapters:diff", {"a": "pirate", "b": "pirate"}),
    ("GET", "/v1/operations", None),
    ("GET", "/v1/events?follow=false", None),
    ("GET", "/v1/replicas", None),
    ("GET", "/v1/errors", None),
    ("GET", "/v1/errors/{code}", None),
    ("POST", "/v1/completions", {"model": "pirate", "prompt": "a", "logprobs": 1, "n": 2}),
    ("POST", "/v1/completions", {"model": BASE, "prompt": [5], "return_token_ids": True}),
    ("POST", "/v1/chat/completions", {"model": "pirate", "messages": CHAT, "max_tokens": 3}),
    ("POST", "/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("GET", "/v1/lora_adapters", None),
    ("GET", "/adapters", None),
    ("GET", "/adapters/{adapter_name}", None),
    ("GET", "/models/{model}/adapters", None),
    ("POST", "/adapters/{adapter_name}/update?pin=false", None),
    ("GET", "/ping", None),
    ("POST", "/invocations", {"model": "pirate", "prompt": "a"}),
    ("GET", "/v1/loads", None),
    ("GET", "/model_info", None),
    ("GET", "/get_model_info", None),
    ("GET", "/health_generate", None),
    ("POST", "/generate", {"text": "a", "lora_path": "pirate", "return_logprob": True}),
    ("POST", "/unload_lora_adapter", {"lora_name": "nobody"}),
    ("POST", "/load_lora_adapter", {"lora_name": "nobody"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "nobody"}),
    ("GET", "/v1/operations/999", None),
    ("POST", "/generate", {"text": "a", "lora_path": "nobody"}),
    ("GET", "/models/nobody/adapters", None),
    ("DELETE", "/v1/adapters/{name}?wait=false", None),
)
VALUES = {"name": "pirate", "model": BASE, "adapter_name": "pirate", "code": "all_pinned"}
PATTERNS = {
    "/v1/operations/999": "/v1/operations/{operation}",
    "/models/nobody/adapters": "/models/{model}/adapters",
}


async def test_real_answers_have_the_shapes_that_are_told(
    server: HttpServer, spec: dict[str, Any]
) -> None:
    wrong = {}
    for method, path, body in REAL:
        answer = await server.client.request(method, path.format(**VALUES), json=body)
        pattern = path.partition("?")[0]
        told = spec["paths"][PATTERNS.get(pattern, pattern)][method.lower()]["responses"]
        status = str(answer.status_code)
        content = told.get(status, told.get("default"))
        assert content is not None, (method, path, status)
        media = answer.headers.get("content-type", "").partition(";")[0] or "text/plain"
        if not answer.content:
            assert "content" not in content, path
            continue
        schema = content["content"][media]["schema"]
        value = answer.json() if media == JSON else answer.text
        found = objections(schema, value, spec)
        if found:
            wrong[f"{method} {path} {status}"] = found
    assert wrong == {}


async def test_the_dry_run_has_the_shape_that_is_told(
    server: HttpServer, spec: dict[str, Any]
) -> None:
    told = spec["paths"]["/v1/adapters:check"]["post"]["responses"]["200"]["content"][JSON]
    for source in (server.adapter(3), str(server.folder)):
        answer = await server.client.post("/v1/adapters:check", json={"source": source})
        assert objections(told["schema"], answer.json(), spec) == []
