"""SageMaker's container standard, as vLLM mounts it: /adapters, /invocations and /ping.

`POST /adapters` is also a route of DJL Serving, which knows query parameters alone. So a request
with a body, or that announces JSON, is taken by the standard, which answers in plain text and reads
query parameters when the body is not JSON; one with neither is DJL's (`djl.py`), whose JSON answer
holds the same sentence. `DELETE /adapters/{name}` says nothing that tells them apart, and the
standard has it; DJL's clients reach their own below /models/{model}.
"""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from lorry.errors import RequestInvalid
from lorry.server import health
from lorry.server.chat import create_chat_completion
from lorry.server.completions import create_completion
from lorry.server.dialects import djl, vllm
from lorry.server.dialects.reading import Alias, Identifier, parsed
from lorry.server.errors import json_response
from lorry.server.schema import ChatRequest, CompletionRequest
from lorry.server.service import Service, service_of

Caller = Annotated[Service, Depends(service_of)]

MISSING_NAME = "Malformed request path; missing path parameter: adapter_name"


class RegisterAdapter(BaseModel):
    """POST /adapters."""

    name: str = Field(min_length=1)
    src: str = Field(min_length=1)
    preload: bool = True
    """False: register only; the first request loads it."""
    pin: bool = False
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


adapters = APIRouter(route_class=vllm.VllmRoute, tags=["SageMaker dialect"])
invocations = APIRouter(tags=["SageMaker dialect"])

_REGISTER_SHAPE = {
    "requestBody": {
        "content": {"application/json": {"schema": RegisterAdapter.model_json_schema()}},
        "description": "Without a JSON body the same fields are read from the query.",
    }
}


@adapters.post("/adapters", openapi_extra=_REGISTER_SHAPE)
async def register_adapter(request: Request, service: Caller, alias: Alias = None) -> Response:
    """Register an adapter, by a JSON body or by query parameters (and those alone: DJL's form)."""
    body = await request.body()
    if not body and "json" not in request.headers.get("content-type", "").lower():
        return await djl.answered(request, djl.register_by_query(request, service, alias))
    try:
        wanted = RegisterAdapter.model_validate(_fields(body, request))
    except ValidationError as error:
        return json_response({"detail": error.json(include_url=False)}, 400)
    asked = vllm.LoadLoraRequest(
        lora_name=wanted.name,
        lora_path=wanted.src,
        load_inplace=wanted.load_inplace,
        is_3d_lora_weight=wanted.is_3d_lora_weight,
    )
    pinned = wanted.pin if "pin" in wanted.model_fields_set else None
    await vllm.load(service, asked, pinned=pinned, preload=wanted.preload)
    return Response(f"Adapter {alias or wanted.name} registered")


def _fields(body: bytes, request: Request) -> Any:
    """The JSON body, or else the query."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return dict(request.query_params)


@adapters.delete("/adapters/{adapter_name:path}")
async def unregister_adapter(adapter_name: str, service: Caller, alias: Alias = None) -> Response:
    """Unload an adapter: after success no tier holds it."""
    if not adapter_name:
        return json_response({"detail": MISSING_NAME}, 424)
    await vllm.unload(service, adapter_name)
    return Response(f"Adapter {alias or adapter_name} unregistered")


@invocations.post("/invocations")
async def invoke(
    body: dict[str, Any], http: Request, service: Caller, identifier: Identifier = None
) -> Response:
    """Answer a chat (`messages`) or continue a text (`prompt`). The header picks the adapter; with
    neither header nor `model` the base answers, as vLLM's does."""
    if identifier == "":
        raise RequestInvalid(
            "X-Amzn-SageMaker-Adapter-Identifier is empty; name an adapter or leave it out.",
            param="X-Amzn-SageMaker-Adapter-Identifier",
        )
    body.setdefault("model", service.settings.base_name)
    if identifier is not None:
        body["model"] = identifier
    if "messages" in body:
        return await create_chat_completion(parsed(ChatRequest, body, "body"), http, service)
    if "prompt" in body:
        return await create_completion(parsed(CompletionRequest, body, "body"), http, service)
    if "input" in body:
        raise RequestInvalid("Embeddings (`input`) are not supported here.", param="input")
    raise RequestInvalid("The body has neither `messages` nor `prompt`; send one of them.")


@invocations.get("/ping")
async def ping(service: Caller) -> Response:
    """200 while an engine can take requests, as /health; behind the keys when there are any."""
    return await health.health(service)


router = APIRouter()
router.include_router(adapters)
router.include_router(invocations)
