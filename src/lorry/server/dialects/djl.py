"""DJL Serving's adapter routes, with and without the prefix /models/{model}.

Two routes without the prefix are the SageMaker container standard's as well; `sagemaker.py` says
which of the two answers. An update without `src` pins or preloads what is served: the old source is
not read again.
"""

from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from lorry.errors import AdapterNotFound, LorryError
from lorry.ids import AdapterName
from lorry.server.dialects.reading import ANSWERED, Alias, ForeignRoute, parsed
from lorry.server.errors import (
    error_headers,
    json_response,
    translated,
)
from lorry.server.operations import finish
from lorry.server.service import Service, service_of
from lorry.supervisor import LoadRequest
from lorry.views import AdapterView

Caller = Annotated[Service, Depends(service_of)]

PAGE_MAX = 100


class RegisterAdapter(BaseModel):
    """Query of POST /models/{model}/adapters; other parameters are ignored."""

    name: str = Field(min_length=1)
    src: str = Field(min_length=1)
    preload: bool = True
    """False: register only; the first request loads it, unless it is to be pinned."""
    pin: bool = False


class UpdateAdapter(BaseModel):
    """Query of POST .../adapters/{adapter}/update: what is left out stays."""

    src: str | None = Field(default=None, min_length=1)
    preload: bool | None = None
    pin: bool | None = None


async def answered(request: Request, work: Awaitable[Response]) -> Response:
    """The answer, with errors in DJL's shape: it calls all of them BadRequestException."""
    try:
        return await work
    except ANSWERED as error:
        return _error(translated(error, request))


def _error(error: LorryError) -> Response:
    body = {"code": error.status, "type": "BadRequestException", "message": error.message}
    return json_response(body, error.status, error_headers(error))


class DjlRoute(ForeignRoute):
    """Answers errors in DJL's shape."""

    @staticmethod
    async def refusal(request: Request, error: LorryError, raised: Exception) -> Response:
        """One shape for all."""
        return _error(error)


_everywhere = APIRouter(route_class=DjlRoute, tags=["DJL dialect"])
_prefixed = APIRouter(route_class=DjlRoute, tags=["DJL dialect"])


@_prefixed.post("/adapters")
async def register_adapter(
    wanted: Annotated[RegisterAdapter, Query()], service: Caller, alias: Alias = None
) -> Response:
    """Register an adapter."""
    load = LoadRequest(
        name=AdapterName(wanted.name),
        source=wanted.src,
        mode="create",
        pinned=wanted.pin,
        load=wanted.preload,
    )
    await finish(service, service.supervisor.load(load))
    return _status(f"Adapter {alias or wanted.name} registered")


async def register_by_query(request: Request, service: Service, alias: str | None) -> Response:
    """The same without the prefix, where the path is shared."""
    wanted = parsed(RegisterAdapter, dict(request.query_params), "query")
    return await register_adapter(wanted, service, alias)


@_everywhere.post("/adapters/{adapter_name:path}/update")
async def update_adapter(
    adapter_name: str,
    change: Annotated[UpdateAdapter, Query()],
    service: Caller,
    alias: Alias = None,
) -> Response:
    """Pin, unpin or preload an adapter, or replace it from another `src`."""
    name = _found(service, adapter_name, alias).name
    supervisor = service.supervisor
    if change.src is not None:
        load = LoadRequest(
            name=name,
            source=change.src,
            mode="replace",
            pinned=change.pin,
            load=change.preload is not False,
        )
        await finish(service, supervisor.load(load))
    elif change.pin is not None:
        await finish(service, supervisor.pin(name, change.pin))
    if change.src is None and change.preload:
        await finish(service, supervisor.prefetch(name))
    return _status(f"Adapter {alias or name} updated")


@_everywhere.get("/adapters")
async def list_adapters(
    service: Caller, limit: int = PAGE_MAX, next_page_token: int = 0
) -> Response:
    """Registered adapters by name, at most 100 at a time; the token counts those before."""
    views = service.supervisor.adapters()
    first = max(next_page_token, 0)
    after = first + (limit if 0 < limit <= PAGE_MAX else PAGE_MAX)
    shape: dict[str, Any] = {"adapters": [_shape(view) for view in views[first:after]]}
    if after < len(views):
        shape = {"nextPageToken": str(after)} | shape
    return json_response(shape)


@_everywhere.get("/adapters/{adapter_name:path}")
async def describe_adapter(adapter_name: str, service: Caller, alias: Alias = None) -> Response:
    """One adapter, as a list of one."""
    return json_response([_shape(_found(service, adapter_name, alias))])


@_prefixed.delete("/adapters/{adapter_name:path}")
async def unregister_adapter(adapter_name: str, service: Caller, alias: Alias = None) -> Response:
    """Unload an adapter: after success no tier holds it."""
    name = _found(service, adapter_name, alias).name
    await finish(service, service.supervisor.unload(name))
    return _status(f"Adapter {alias or name} unregistered")


async def _served(model: str, service: Caller) -> None:
    """Raises `AdapterNotFound` for a prefix that names another base model."""
    if model not in service.settings.served_model_names:
        raise AdapterNotFound(f"The model {model} was not found", param="model")


def _found(service: Service, adapter_name: str, alias: str | None) -> AdapterView:
    try:
        return service.supervisor.adapter(AdapterName(adapter_name))
    except AdapterNotFound as error:
        raise AdapterNotFound(f"The adapter {alias or adapter_name} was not found") from error


def _shape(view: AdapterView) -> dict[str, Any]:
    return {"name": view.name, "src": view.source, "pin": view.pinned}


def _status(words: str) -> Response:
    return json_response({"status": words})


router = APIRouter()
router.include_router(_everywhere)
for _part in (_prefixed, _everywhere):
    router.include_router(_part, prefix="/models/{model:path}", dependencies=[Depends(_served)])
