"""vLLM's admin routes, word for word: its clients test for the texts and statuses.

The one wanted difference: a bad adapter is the caller's fault and gets a 4xx with its cause, never
vLLM's 500.
"""

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lorry.artifacts.remote.uri import redact
from lorry.errors import (
    AdapterConflict,
    AdapterNotFound,
    LorryError,
    RequestInvalid,
    SourceNotFound,
    VersionMismatch,
)
from lorry.ids import AdapterName
from lorry.server.dialects import mistralrs
from lorry.server.dialects.reading import ForeignRoute
from lorry.server.errors import (
    TYPES,
    error_headers,
    json_response,
    request_id_of,
)
from lorry.server.operations import finish
from lorry.server.schema import Body
from lorry.server.service import Service, service_of
from lorry.supervisor import LoadRequest

Caller = Annotated[Service, Depends(service_of)]

GENERATION = "the version that must be served now; with it, mistral.rs answers instead of vLLM"


class LoadLoraRequest(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    expected_generation: str | None = Field(default=None, description=GENERATION)


class UnloadLoraRequest(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = Field(default=None, description="ignored, as vLLM does")
    expected_generation: str | None = Field(default=None, description=GENERATION)


class _Refused(RequestInvalid):
    """What vLLM calls InvalidUserInput."""


class VllmRoute(ForeignRoute):
    """Answers errors in vLLM's shape, with the status as `code`."""

    @staticmethod
    async def refusal(request: Request, error: LorryError, raised: Exception) -> Response:
        """Of a body that cannot be read vLLM writes the type in two words."""
        return _error(error) if isinstance(raised, LorryError) else _error(error, "Bad Request")


router = APIRouter(route_class=VllmRoute, tags=["vLLM dialect"])


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(request: LoadLoraRequest, http: Request, service: Caller) -> Response:
    """Load an adapter, or replace it when `load_inplace` is true."""
    if request.expected_generation is not None:
        body = request.model_dump(exclude_unset=True)
        return await mistralrs.load(service, body, request_id_of(http))
    await load(service, request)
    return _text(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def load(
    service: Service, request: LoadLoraRequest, *, pinned: bool | None = None, preload: bool = True
) -> None:
    """Load or replace, with vLLM's errors. `pinned` is that of `LoadRequest`, and `preload` is its
    `load`."""
    name = request.lora_name
    if not name or not request.lora_path:
        raise _Refused("Both 'lora_name' and 'lora_path' must be provided.")
    if name in service.settings.served_model_names:
        raise _Refused(f"The lora adapter '{name}' conflicts with a served base model.")
    if request.is_3d_lora_weight:
        raise RequestInvalid(f"Loading lora {name} failed: is_3d_lora_weight is not supported.")
    wanted = LoadRequest(
        name=AdapterName(name),
        source=request.lora_path,
        mode="upsert" if request.load_inplace else "create",
        pinned=pinned,
        load=preload,
    )
    try:
        await _load(service, wanted)
    except SourceNotFound as error:
        raise SourceNotFound(
            f"Loading lora {name} failed: No adapter found for {redact(request.lora_path)}: "
            f"{error.message}"
        ) from error


async def _load(service: Service, wanted: LoadRequest) -> None:
    try:
        await finish(service, service.supervisor.load(wanted))
    except VersionMismatch:
        raise
    except AdapterConflict as error:
        if wanted.mode == "upsert":
            raise
        raise _Refused(
            f"The lora adapter '{wanted.name}' has already been loaded. If you want to load "
            "the adapter in place, set 'load_inplace' to True."
        ) from error


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(
    request: UnloadLoraRequest, http: Request, service: Caller
) -> Response:
    """Unload an adapter: after success no tier holds it."""
    if request.expected_generation is not None:
        body = request.model_dump(exclude_unset=True)
        return await mistralrs.unload(service, body, request_id_of(http))
    await unload(service, request.lora_name)
    return _text(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


async def unload(service: Service, name: str) -> None:
    """Unload, with vLLM's errors."""
    if not name:
        raise _Refused("'lora_name' needs to be provided to unload a LoRA adapter.")
    try:
        await finish(service, service.supervisor.unload(AdapterName(name)))
    except AdapterNotFound as error:
        raise AdapterNotFound(f"The lora adapter '{name}' cannot be found.") from error


def _text(words: str) -> Response:
    """vLLM sets no content type here."""
    return Response(words)


def _error(error: LorryError, kind: str | None = None) -> Response:
    kind = kind or ("InvalidUserInput" if isinstance(error, _Refused) else TYPES[error.status])
    body = {"message": error.message, "type": kind, "param": None, "code": error.status}
    return json_response({"error": body}, error.status, error_headers(error))
