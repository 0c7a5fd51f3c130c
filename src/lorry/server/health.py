"""GET /health, /ready, /version, /metrics and /v1/replicas: how the server and its engines are."""

from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from lorry.errors import EngineUnreachable, LorryError
from lorry.server.errors import error_response, json_response
from lorry.server.service import Service, service_of
from lorry.telemetry import Snapshot

Caller = Annotated[Service, Depends(service_of)]


async def health(service: Caller) -> Response:
    """200 while an engine can take requests, else 503 with the reason. Asks for no key."""
    return _state(service)


async def ready(service: Caller) -> Response:
    """Like /health, but 503 as soon as the server has been told to stop."""
    service.shutdown.check()
    return _state(service)


async def show_version() -> dict[str, str]:
    """Lorry's version."""
    return {"version": version("lorry")}


async def metrics(service: Caller) -> Response:
    """Prometheus text."""
    supervisor = service.supervisor
    engines = service.supervisor.health()
    snapshot = Snapshot(
        supervisor.statistics(),
        engines,
        supervisor.adapters(),
        supervisor.capabilities.max_loras,
    )
    return Response(service.telemetry.render(snapshot), media_type=CONTENT_TYPE_LATEST)


async def replicas(service: Caller) -> dict[str, Any]:
    """Every engine: its state, and what each of its slots holds."""
    engines = service.supervisor.health()
    names = {
        residency.engine_id: view.name
        for view in service.supervisor.adapters()
        for residency in view.residency
        if residency.engine_id is not None
    }
    data = [
        {
            "replica": replica,
            "ready": one.ready,
            "reason": one.reason,
            "slots": [
                None
                if engine_id is None
                else {"engine_id": engine_id, "name": names.get(engine_id)}
                for engine_id in one.slots
            ],
            "running": one.running,
            "waiting": one.waiting,
            "kv_blocks_used": one.kv_blocks_used,
            "kv_blocks_total": one.kv_blocks_total,
            "counters": dict(one.counters),
        }
        for replica, one in engines.items()
    ]
    return {"object": "list", "data": data}


def _state(service: Service) -> Response:
    engines = service.supervisor.health()
    if any(one.ready for one in engines.values()):
        return json_response({"status": "ok"})
    reasons = "; ".join(one.reason or "no reason given" for one in engines.values())
    error: LorryError = EngineUnreachable(f"No engine is ready: {reasons}.")
    return error_response(error)
