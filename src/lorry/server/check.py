"""POST /v1/adapters:check: what a load would find and do, without doing it."""

from typing import Annotated, Any

from fastapi import Depends
from pydantic import BaseModel, ConfigDict, Field

from lorry.artifacts.checking import facts
from lorry.artifacts.remote.uri import redact
from lorry.ids import short
from lorry.lifecycle.forecast import Forecast, Victim
from lorry.server.adapters import SOURCE
from lorry.server.service import Service, service_of

Caller = Annotated[Service, Depends(service_of)]


class CheckAdapter(BaseModel):
    """POST /v1/adapters:check."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"source": "/adapters/legal", "name": "legal"},
                {"source": "hf://acme/legal-lora@v2"},
            ]
        },
    )
    source: str = Field(min_length=1, description=SOURCE)
    name: str | None = None
    """The name that it would be loaded as; null: one that is free."""


async def check_adapter(body: CheckAdapter, service: Caller) -> dict[str, Any]:
    """Judge an adapter as a load would. 200 also when it is bad: `ok` is the answer, and `problems`
    holds each thing that is wrong, with its fix. Files that cannot be served have no facts."""
    view = await service.supervisor.check(body.source, body.name)
    manifest = view.report.manifest
    return {
        "object": "adapter.check",
        "ok": view.report.ok,
        "source": redact(body.source),
        "name": body.name,
        "problems": [problem.as_json() for problem in view.report.problems],
        **(facts(manifest) if manifest is not None else {}),
        **(_room(view.room) if view.room is not None else {}),
    }


def _room(room: Forecast) -> dict[str, Any]:
    """What the load would do to others."""
    return {
        "resident": room.resident,
        "replaces": room.replaces,
        "would_evict": [_victim(one) for one in room.evicts],
        "would_wait": room.waits,
    }


def _victim(one: Victim) -> dict[str, Any]:
    return {
        "names": list(one.names),
        "version": one.version,
        "short_version": short(one.version),
        "leases": one.leases,
    }
