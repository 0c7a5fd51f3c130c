"""SGLang's admin and state routes: its clients read `success` and `loaded_adapters`.

The wanted differences: a failed load leaves nothing half in and its text names the cause; what is
listed is the registry as it is after the call; a second unload fails; and every route is behind the
keys.
"""

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from lorry.artifacts.parcels import Parcel
from lorry.engine import SamplingParams
from lorry.errors import (
    AdapterConflict,
    AdapterNotFound,
    EngineUnreachable,
    LorryError,
    OperationCancelled,
    RequestInvalid,
)
from lorry.ids import AdapterName
from lorry.server.dialects.reading import ForeignRoute
from lorry.server.dialects.sglang_answer import WEIGHT_VERSION
from lorry.server.dialects.sglang_generate import names_listed
from lorry.server.errors import (
    error_headers,
    json_response,
)
from lorry.server.operations import finish
from lorry.server.schema import Body
from lorry.server.service import Service, service_of
from lorry.supervisor import LoadRequest
from lorry.telemetry import slots_used

Caller = Annotated[Service, Depends(service_of)]

HEALTH_DEADLINE_S = 20.0
"""How long the one token of /health_generate may take; SGLang's own number."""
SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})
"""What `include` of /v1/loads may name; core and lora are filled, the others are left out."""


class LoadLoraRequest(Body):
    """POST /load_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    pinned: bool = False
    lora_id: str | None = Field(default=None, description="ignored: the server gives the ids")


class UnloadLoraRequest(Body):
    """POST /unload_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_id: str | None = Field(default=None, description="ignored: the server gives the ids")


class SglangAdminRoute(ForeignRoute):
    """Answers errors as SGLang's loads and unloads do: 400, and the text in `error_message`."""

    @staticmethod
    async def refusal(request: Request, error: LorryError, raised: Exception) -> Response:
        """With what is loaded beside it."""
        return _result(await service_of(request), error)


admin_router = APIRouter(route_class=SglangAdminRoute, tags=["SGLang dialect"])
state_router = APIRouter(tags=["SGLang dialect"])


@admin_router.post("/load_lora_adapter")
async def load_lora_adapter(request: LoadLoraRequest, service: Caller) -> Response:
    """Load an adapter under a new name; one that must leave for it leaves first."""
    name = AdapterName(request.lora_name)
    wanted = LoadRequest(name, request.lora_path, mode="create", pinned=request.pinned)
    return await load_and_tell(service, wanted)


async def load_and_tell(
    service: Service, wanted: LoadRequest, parcel: Parcel | None = None
) -> Response:
    """Load, and answer as SGLang does. Raises `AdapterConflict` in its words for a name that is
    taken."""
    name = wanted.name
    try:
        await finish(service, service.supervisor.load(wanted, parcel))
    except OperationCancelled:
        raise
    except AdapterConflict as error:
        if name not in _registered(service):
            raise
        raise AdapterConflict(
            f"Failed to load LoRA adapter {name} because it is already loaded."
        ) from error
    return _result(service)


@admin_router.post("/unload_lora_adapter")
async def unload_lora_adapter(request: UnloadLoraRequest, service: Caller) -> Response:
    """Unload an adapter: after success no tier holds it."""
    name = request.lora_name
    try:
        await finish(service, service.supervisor.unload(AdapterName(name)))
    except AdapterNotFound as error:
        raise AdapterNotFound(
            f"LoRA with name {name} does not exist. Loaded LoRAs: "
            f"{names_listed(_registered(service))}."
        ) from error
    return _result(service)


@state_router.get("/v1/loads")
async def show_loads(
    service: Caller,
    include: Annotated[str | None, Query(description="core, lora or all, by commas")] = None,
) -> dict[str, Any]:
    """Requests and adapter slots of each engine, as SGLang's routers read them."""
    wanted = {part.strip() for part in include.split(",")} if include else {"all"}
    if not wanted <= SECTIONS:
        raise RequestInvalid(
            f"include names {sorted(wanted - SECTIONS)}; it may name {sorted(SECTIONS)}.",
            param="include",
        )
    total = service.supervisor.capabilities.max_loras
    loads: list[dict[str, Any]] = []
    for rank, health in enumerate(service.supervisor.health().values()):
        load: dict[str, Any] = {
            "dp_rank": rank,
            "num_running_reqs": health.running,
            "num_waiting_reqs": health.waiting,
        }
        if wanted & {"lora", "all"}:
            used = slots_used(health)
            pool = {"slots_used": used, "slots_total": total, "utilization": used / max(1, total)}
            load["lora"] = pool
        loads.append(load)
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": version("lorry"),
        "loads": loads,
    }


@state_router.get("/get_model_info")
async def get_model_info(service: Caller) -> dict[str, Any]:
    """The base model, under SGLang's older path."""
    return _model_info(service)


@state_router.get("/model_info")
async def model_info(service: Caller) -> dict[str, Any]:
    """The base model."""
    return _model_info(service)


@state_router.get("/health_generate")
async def health_generate(service: Caller) -> Response:
    """200 with no body once the base model has made one token; 503 when it fails or takes too
    long."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    with anyio.move_on_after(HEALTH_DEADLINE_S):
        async with service.supervisor.generate(
            name=None, prompt=(0,), sampling=sampling, request_id="health"
        ) as chunks:
            async for chunk in chunks:
                if chunk.token_ids:
                    return Response()
        raise EngineUnreachable("The engine ended the health check without a token.")
    raise EngineUnreachable(f"No token came within {HEALTH_DEADLINE_S:g} s.")


def _model_info(service: Service) -> dict[str, Any]:
    place = service.settings.model_root or service.settings.base_name
    return {
        "model_path": place,
        "tokenizer_path": None if service.tokenizer is None else place,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": WEIGHT_VERSION,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "architectures": [service.supervisor.capabilities.base.architecture],
    }


def _registered(service: Service) -> dict[str, str]:
    """Name -> path of all that take requests, as GET /v1/models lists them."""
    views = service.supervisor.adapters()
    return {view.name: view.source for view in views if not view.unloading}


def _result(service: Service, problem: LorryError | None = None) -> Response:
    """The one body of both calls, after success or failure."""
    body = {
        "rid": None,
        "http_worker_ipc": None,
        "success": problem is None,
        "error_message": None if problem is None else problem.message,
        "loaded_adapters": _registered(service),
    }
    headers = {} if problem is None else error_headers(problem)
    return json_response(body, 200 if problem is None else 400, headers)
