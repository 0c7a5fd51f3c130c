"""mistral.rs's adapter list, and loads and unloads that expect a generation.

A generation is the hash of an adapter's content there, and so is a version here: the one stands for
the other, and `expected_generation` is compare-and-swap on the version. The load and unload routes
are vLLM's too; a body with `expected_generation` is mistral.rs's and answered in its shape, any
other in vLLM's.
"""

from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.exceptions import RequestValidationError
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints
from starlette.responses import Response

from lorry.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AllPinned,
    Forbidden,
    LorryError,
    RequestInvalid,
    SourceNotFound,
    VersionMismatch,
)
from lorry.ids import AdapterName, VersionId
from lorry.server.dialects.reading import parsed
from lorry.server.errors import as_lorry_error, error_headers, from_validation, json_response
from lorry.server.operations import finish
from lorry.server.service import Service, service_of
from lorry.supervisor import LoadRequest
from lorry.views import AdapterView, ResidentView

Caller = Annotated[Service, Depends(service_of)]
Generation = Annotated[str, StringConstraints(pattern="^[0-9A-Fa-f]{64}$", to_lower=True)]

CODES: tuple[tuple[type[LorryError], str], ...] = (
    (VersionMismatch, "lora_generation_mismatch"),
    (AdapterNotFound, "lora_adapter_not_found"),
    (SourceNotFound, "adapter_path_not_found"),
    (Forbidden, "adapter_path_forbidden"),
    (AdapterInvalid, "invalid_lora_adapter"),
    (AllPinned, "lora_adapter_limit_exceeded"),
)
"""Our errors -> its codes, where it has the same error with the same status; others keep ours."""


class _Guarded(BaseModel):
    """What both bodies have; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")
    lora_name: str
    expected_generation: Generation
    model: str | None = None


class GuardedLoad(_Guarded):
    """POST /v1/load_lora_adapter with `expected_generation`."""

    lora_path: str = Field(min_length=1)
    load_inplace: bool = Field(
        default=False, validation_alias=AliasChoices("load_inplace", "replace")
    )
    is_3d_lora_weight: bool = False


class GuardedUnload(_Guarded):
    """POST /v1/unload_lora_adapter with `expected_generation`."""

    lora_int_id: int | None = Field(default=None, description="ignored")


router = APIRouter(tags=["mistral.rs dialect"])


@router.get("/v1/lora_adapters")
async def list_lora_adapters(service: Caller, model: str | None = None) -> Response:
    """Adapters that take requests, and every version that an engine holds. `bytes` is the memory
    reserved for one copy; with several engines the sum counts each copy."""
    if not _is_served(service, model):
        return _unknown_model(model)
    adapters = [view for view in service.supervisor.adapters() if not view.unloading]
    residents = service.supervisor.residents()
    can = service.supervisor.capabilities
    return json_response(
        {
            "object": "list",
            "data": [_adapter(view) for view in adapters],
            "generations": [_generation(one) for one in residents],
            "resident_generations": len(residents),
            "retired_generations": sum(not one.names for one in residents),
            "resident_bytes": sum(one.bytes * one.copies for one in residents),
            "max_adapters": can.max_cpu_loras,
            "max_rank": can.max_lora_rank,
            "max_bytes": can.host_cache_bytes,
        }
    )


async def load(service: Service, body: dict[str, Any], request_id: str) -> Response:
    """Replace an adapter that still serves the generation that the caller knows."""
    return await _answered(_load(service, body), request_id)


async def unload(service: Service, body: dict[str, Any], request_id: str) -> Response:
    """Unload an adapter that still serves the generation that the caller knows."""
    return await _answered(_unload(service, body), request_id)


async def _load(service: Service, body: dict[str, Any]) -> Response:
    wanted = parsed(GuardedLoad, body, "body")
    if not wanted.load_inplace:
        message = "expected_generation requires load_inplace=true"
        return _refusal(400, "invalid_lora_load_policy", message)
    if wanted.is_3d_lora_weight:
        raise RequestInvalid("is_3d_lora_weight is not supported.", param="is_3d_lora_weight")
    if not _is_served(service, wanted.model):
        return _unknown_model(wanted.model)
    name = AdapterName(wanted.lora_name)
    request = LoadRequest(
        name=name,
        source=wanted.lora_path,
        mode="replace",
        if_match=VersionId(wanted.expected_generation),
    )
    await finish(service, service.supervisor.load(request))
    return json_response(_adapter(service.supervisor.adapter(name)))


async def _unload(service: Service, body: dict[str, Any]) -> Response:
    wanted = parsed(GuardedUnload, body, "body")
    if not _is_served(service, wanted.model):
        return _unknown_model(wanted.model)
    view = service.supervisor.adapter(AdapterName(wanted.lora_name))
    expected = VersionId(wanted.expected_generation)
    await finish(service, service.supervisor.unload(view.name, if_match=expected))
    return json_response(_adapter(view))


async def _answered(work: Awaitable[Response], request_id: str) -> Response:
    try:
        return await work
    except RequestValidationError as error:
        message = from_validation(error, "application/json").message
        return _refusal(422, "invalid_request_body", message)
    except LorryError as error:
        problem = as_lorry_error(error, request_id)
        return _refusal(problem.status, _code(problem), problem.message, error_headers(problem))


def _code(error: LorryError) -> str:
    if isinstance(error, RequestInvalid) and error.param == "name":
        return "invalid_lora_name"
    return next((code for kind, code in CODES if isinstance(error, kind)), error.code)


def _refusal(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return json_response(
        {"error": {"message": message, "type": kind, "code": code}}, status, headers
    )


def _is_served(service: Service, model: str | None) -> bool:
    """Nothing and "default" mean the base."""
    name = (model or "").strip()
    return name in ("", "default") or name in service.settings.served_model_names


def _unknown_model(model: str | None) -> Response:
    return _refusal(404, "model_not_found", f"The model `{model}` does not exist.")


def _adapter(view: AdapterView) -> dict[str, Any]:
    return {
        "id": view.name,
        "object": "lora_adapter",
        "source": view.source,
        "generation": view.version,
        "rank": view.manifest.rank,
        "bytes": view.manifest.host_bytes,
    }


def _generation(one: ResidentView) -> dict[str, Any]:
    return {
        "generation": one.version,
        "aliases": list(one.names),
        "rank": one.rank,
        "bytes": one.bytes,
        "retired": not one.names,
        "active_leases": one.leases,
    }
