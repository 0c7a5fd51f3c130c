"""The native adapter API: register, replace, show, change and unload adapters.

`ETag` is the served version; `If-Match` makes a change conditional on it. Long calls wait for their
end unless `?wait=false` asks for 202 and an operation to follow.
"""

from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from lorry.adapter_settings import NO_SETTINGS
from lorry.errors import AdapterNotFound, RequestInvalid, VersionMismatch
from lorry.ids import AdapterName, VersionId, short
from lorry.server.errors import json_response
from lorry.server.operations import accepted, finish
from lorry.server.service import Service, service_of
from lorry.server.settings_shape import SettingsFields, check_change, shown
from lorry.supervisor import LoadRequest
from lorry.views import AdapterView, OperationView, ResidencyView

Caller = Annotated[Service, Depends(service_of)]
IfMatch = Annotated[str | None, Header(alias="If-Match")]
Wait = Annotated[bool, Query(description="false: answer 202 with an operation at once")]

SOURCE = (
    "A folder on the server's machine, hf://org/repo@revision, s3://bucket/folder, "
    "gs://bucket/folder or https://host/folder."
)
DIGEST = (
    "What the content must be, else 422: the version (64 hex digits), or 'sha256:' and the SHA-256 "
    "of adapter_model.safetensors."
)

LABELS_MAX = 64
VERSION_DIGITS_MIN = 12
Labels = dict[
    Annotated[str, Field(min_length=1, max_length=128)], Annotated[str, Field(max_length=1024)]
]


class PutAdapter(SettingsFields):
    """PUT /v1/adapters/{name}: settings that are left out stay as they were, or as they are for
    nobody."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"source": "/adapters/legal", "pinned": True},
                {"source": "hf://acme/legal-lora@v2"},
                {"source": "s3://adapters/legal", "expected_digest": "sha256:" + "9f" * 32},
            ]
        },
    )
    source: str = Field(min_length=1, description=SOURCE)
    pinned: bool | None = None
    """null: as it was, or not pinned."""
    labels: Labels | None = Field(default=None, max_length=LABELS_MAX)
    replace: bool = True
    """false: 409 when the name is taken."""
    load: bool = True
    """false: register only; the first request loads it."""
    strategy: Literal["beside", "drain-first"] = "beside"
    expected_digest: str | None = Field(default=None, description=DIGEST)


class PatchAdapter(SettingsFields):
    """PATCH /v1/adapters/{name}: what is left out stays; null takes a setting back."""

    model_config = ConfigDict(extra="forbid")
    pinned: bool | None = None
    labels: Labels | None = Field(default=None, max_length=LABELS_MAX)


class RollbackAdapter(BaseModel):
    """POST /v1/adapters/{name}/rollback."""

    model_config = ConfigDict(extra="forbid")
    version: str | None = Field(default=None, min_length=VERSION_DIGITS_MIN)
    """One of `previous`, its first 12 digits or more; null: the newest of them."""
    strategy: Literal["beside", "drain-first"] = "beside"
    """How to find room when no engine holds that version any more, as in PUT."""


async def list_adapters(
    service: Caller,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    after: Annotated[str, Query(description="the last name of the page before")] = "",
) -> dict[str, Any]:
    """Registered adapters by name, a page at a time."""
    rest = [view for view in service.supervisor.adapters() if view.name > after]
    page = rest[:limit]
    return {
        "object": "list",
        "data": [adapter_shape(view) for view in page],
        "has_more": len(rest) > len(page),
        "next": page[-1].name if len(rest) > len(page) else None,
    }


async def show_adapter(name: str, service: Caller) -> Response:
    """One adapter."""
    return _shown(service.supervisor.adapter(AdapterName(name)))


async def put_adapter(
    name: str, body: PutAdapter, service: Caller, if_match: IfMatch = None, wait: Wait = True
) -> Response:
    """Register an adapter, or replace it by another version under the same name."""
    known = find_adapter(service, name)
    settings = body.change()
    old = known.settings if known is not None else NO_SETTINGS
    await check_change(service, name if known is not None else None, old, settings)
    if if_match is not None:
        mode: Literal["create", "replace", "upsert"] = "replace"
    else:
        mode = "upsert" if body.replace else "create"
    operation = service.supervisor.load(
        LoadRequest(
            name=AdapterName(name),
            source=body.source,
            mode=mode,
            if_match=wanted_version(if_match, known),
            pinned=body.pinned,
            labels=body.labels,
            settings=settings,
            load=body.load,
            strategy=body.strategy,
            expected_digest=body.expected_digest,
        )
    )
    return await _done(service, operation, wait=wait, status=200 if known else 201)


async def patch_adapter(
    name: str, body: PatchAdapter, service: Caller, if_match: IfMatch = None
) -> Response:
    """Pin or unpin an adapter, label it, or change its settings: all that the body asks for, or
    nothing."""
    view = service.supervisor.adapter(AdapterName(name))
    must_match(if_match, view)
    settings = body.change()
    await check_change(service, view.name, view.settings, settings)
    if (body.pinned, body.labels, settings) != (None, None, None):
        operation = service.supervisor.change(
            view.name,
            pinned=body.pinned,
            labels=body.labels,
            settings=settings,
            if_match=wanted_version(if_match, view),
        )
        await finish(service, operation)
    return _shown(service.supervisor.adapter(view.name))


async def delete_adapter(
    name: str,
    service: Caller,
    drain_timeout: Annotated[float | None, Query(ge=0, le=86_400, allow_inf_nan=False)] = None,
    purge: bool = False,
    if_match: IfMatch = None,
    wait: Wait = True,
) -> Response:
    """Unload an adapter: no new requests, a while for the running ones, then out of every tier."""
    view = service.supervisor.adapter(AdapterName(name))
    operation = service.supervisor.unload(
        view.name,
        drain_timeout_s=drain_timeout,
        purge=purge,
        if_match=wanted_version(if_match, view),
    )
    if not wait:
        return accepted(operation)
    await finish(service, operation)
    return json_response({"name": view.name, "version": view.version, "object": "adapter.deleted"})


async def roll_back(
    name: str,
    service: Caller,
    body: RollbackAdapter | None = None,
    if_match: IfMatch = None,
    wait: Wait = True,
) -> Response:
    """Serve an earlier version again: at once when an engine still holds it."""
    view = service.supervisor.adapter(AdapterName(name))
    asked = body or RollbackAdapter()
    operation = service.supervisor.rollback(
        view.name,
        _earlier(view, asked.version) if asked.version else None,
        strategy=asked.strategy,
        if_match=wanted_version(if_match, view),
    )
    return await _done(service, operation, wait=wait)


async def prefetch(name: str, service: Caller, wait: Wait = True) -> Response:
    """Bring an adapter into host memory before it is asked for."""
    operation = service.supervisor.prefetch(AdapterName(name))
    return await _done(service, operation, wait=wait)


async def _done(
    service: Service, operation: OperationView, *, wait: bool, status: int = 200
) -> Response:
    if not wait:
        return accepted(operation)
    await finish(service, operation)
    return _shown(service.supervisor.adapter(operation.name), status)


def find_adapter(service: Service, name: str) -> AdapterView | None:
    """The adapter, or None when there is none of that name."""
    try:
        return service.supervisor.adapter(AdapterName(name))
    except AdapterNotFound:
        return None


def wanted_version(if_match: str | None, view: AdapterView | None) -> VersionId | None:
    """The full id of the version that `If-Match` names by its first digits; None for "any". Raises
    `RequestInvalid`."""
    if if_match is None:
        return None
    given = if_match.strip().removeprefix("W/").strip('"').lower()
    if given == "*":
        return None
    if len(given) < VERSION_DIGITS_MIN:
        raise RequestInvalid(
            f"If-Match is {given!r}; it must be at least {VERSION_DIGITS_MIN} digits of a version.",
            param="If-Match",
        )
    return view.version if view and view.version.startswith(given) else VersionId(given)


def must_match(if_match: str | None, view: AdapterView) -> None:
    """Raises `VersionMismatch` when `If-Match` names another version than the one served."""
    wanted = wanted_version(if_match, view)
    if wanted is not None and wanted != view.version:
        raise VersionMismatch(
            f"{view.name} serves version {short(view.version)}, not {short(wanted)}."
        )


def _earlier(view: AdapterView, given: str) -> VersionId:
    found = [version for version in view.previous if version.startswith(given.lower())]
    return found[0] if found else VersionId(given.lower())


def _shown(view: AdapterView, status: int = 200) -> Response:
    return json_response(adapter_shape(view), status, {"ETag": f'"{view.version}"'})


def adapter_shape(view: AdapterView) -> dict[str, Any]:
    """An adapter in JSON. `state`, `tier` and `slot` are those of the replica where it is nearest
    to serving."""
    manifest = view.manifest
    best = _best(view.residency)
    return {
        "object": "adapter",
        "name": view.name,
        "version": view.version,
        "short_version": short(view.version),
        "source": view.source,
        "pinned": view.pinned,
        "labels": dict(view.labels),
        **shown(view.settings),
        "state": "unloading" if view.unloading else best.state if best else "absent",
        "tier": best.tier if best else "absent",
        "slot": best.slot if best else None,
        "rank": manifest.rank,
        "alpha": manifest.alpha,
        "scale_rule": manifest.scale_rule,
        "target_modules": list(manifest.target_modules),
        "layers": list(manifest.layers),
        "parameters": manifest.parameters,
        "bytes": manifest.bytes,
        "host_bytes": manifest.host_bytes,
        "leases": sum(one.leases for one in view.residency),
        "waiting": view.waiting,
        "created": view.created_s,
        "updated": view.updated_s,
        "previous": list(view.previous),
        "reason": best.reason if best else "",
        "waits_for": view.waits_for,
        "residency": [_residency_shape(one) for one in view.residency],
    }


TIERS = ("absent", "disk", "host", "slot")


def _best(residency: tuple[ResidencyView, ...]) -> ResidencyView | None:
    return max(residency, key=lambda one: TIERS.index(one.tier), default=None)


def _residency_shape(one: ResidencyView) -> dict[str, Any]:
    return {
        "replica": one.replica,
        "state": one.state,
        "tier": one.tier,
        "slot": one.slot,
        "engine_id": one.engine_id,
        "leases": one.leases,
        "reason": one.reason,
    }
