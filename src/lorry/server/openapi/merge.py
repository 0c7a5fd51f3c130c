"""Puts the descriptions into what FastAPI finds out by itself."""

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from lorry.server.openapi.doc import JSON, Answer, Doc, Table
from lorry.server.openapi.foreign import FOREIGN
from lorry.server.openapi.native import ANY_ERROR, NATIVE, V1

TABLE: Table = {**NATIVE, **FOREIGN}

PARAMETERS: Mapping[str, Any] = {
    "name": "pirate",
    "adapter_name": "pirate",
    "model": "base",
    "src": "/adapters/pirate",
    "operation": 17,
    "code": "all_pinned",
    "If-Match": V1[:12],
    "after": 40,
    "last-event-id": "40",
    "include": "lora",
    "X-Amzn-SageMaker-Adapter-Identifier": "pirate",
    "X-Amzn-SageMaker-Adapter-Alias": "tenant-7",
}
"""Examples of parameters, wherever they come."""

UNTRUE = "422"
"""FastAPI's own answer to bad fields, in whose place we give a 400 in the route's shape."""

_MODELS = "#/components/schemas/{model}"


def describe(app: FastAPI) -> None:
    """Let /openapi.json say all of it; it is made at the first call and then kept."""
    made_by_fastapi = app.openapi

    def complete() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _merged(made_by_fastapi())
        return app.openapi_schema

    app.openapi = complete  # type: ignore[method-assign]


def _merged(spec: dict[str, Any]) -> dict[str, Any]:
    schemas: dict[str, Any] = spec.setdefault("components", {}).setdefault("schemas", {})
    for method, path, about in _operations(spec):
        doc = TABLE.get((method, path))
        if doc is not None:
            _apply(about, doc, schemas)
        _drop_untrue(about, schemas)
        for parameter in about.get("parameters", ()):
            if parameter["name"] in PARAMETERS and "example" not in parameter:
                parameter["example"] = _example(parameter["name"], path)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return spec


def _operations(spec: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in spec["paths"].items():
        for method, about in methods.items():
            yield method.upper(), path, about


def _example(name: str, path: str) -> Any:
    return "pirate" if (name, path) == ("model", "/v1/models/{model}") else PARAMETERS[name]


def _apply(about: dict[str, Any], doc: Doc, schemas: dict[str, Any]) -> None:
    about["summary"] = doc.summary
    responses: dict[str, Any] = {}
    for answer in (*doc.answers, doc.error or ANY_ERROR):
        place = responses.setdefault(
            str(answer.status), {"description": answer.description, "content": {}}
        )
        if answer.example is None:
            continue
        place["content"][answer.media] = _content(answer, schemas)
        if answer.description not in place["description"]:
            place["description"] += f" {answer.description}"
    for response in responses.values():
        if not response["content"]:
            del response["content"]
    about["responses"] = responses
    if doc.request:
        examples = {title: {"value": value} for title, value in doc.request.items()}
        about["requestBody"]["content"][JSON]["examples"] = examples


def _content(answer: Answer, schemas: dict[str, Any]) -> dict[str, Any]:
    if answer.shape is None:
        return {"schema": {"type": "string"}, "example": answer.example}
    shape: Any = answer.shape  # a union is a type to pydantic, not to mypy
    schema = TypeAdapter(shape).json_schema(mode="serialization", ref_template=_MODELS)
    schemas.update(schema.pop("$defs", {}))
    if "title" in schema:
        schemas[schema["title"]] = schema
        schema = {"$ref": _MODELS.format(model=schema["title"])}
    return {"schema": schema, "example": answer.example}


def _drop_untrue(about: dict[str, Any], schemas: Mapping[str, Any]) -> None:
    responses = about["responses"]
    if UNTRUE in responses and "HTTPValidationError" in str(responses[UNTRUE]):
        del responses[UNTRUE]
        content = {JSON: _content(ANY_ERROR, dict(schemas))}
        responses.setdefault("default", {"description": ANY_ERROR.description, "content": content})
