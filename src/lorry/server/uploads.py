"""Adapters that come with the request: weights for trainers, which reach the engine without
touching a disk, and folders of files.

Both are loads like any other once they are here: the same judge, the same `If-Match`, the same
answer, and a failure leaves what was served before.
"""

import dataclasses
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from lorry.artifacts.adapter_config import CONFIG_FILE
from lorry.artifacts.names import check_adapter_name
from lorry.artifacts.parcels import Parcel
from lorry.artifacts.reading import TEMPLATE_FILE, WEIGHTS_FILE
from lorry.ids import AdapterName
from lorry.server.adapters import (
    IfMatch,
    Wait,
    adapter_shape,
    find_adapter,
    must_match,
    wanted_version,
)
from lorry.server.errors import json_response
from lorry.server.operations import accepted, finish
from lorry.server.receiving import FORM, GZIP, RAW, TAR, receive_folder, receive_weights
from lorry.server.service import Service, service_of
from lorry.supervisor import LoadRequest

Caller = Annotated[Service, Depends(service_of)]
Pinned = Annotated[bool | None, Query(description="left out: as it was, or not pinned")]
Replace = Annotated[bool, Query(description="false: 409 when the name is taken")]
Strategy = Annotated[
    Literal["beside", "drain-first"],
    Query(description="drain-first: the old version may leave before the new one is in"),
]
Load = Annotated[bool, Query(description="false: register only; the first request loads it")]
Durable = Annotated[
    bool,
    Query(
        description="true: published and answered once a copy is on the disk too, so that no "
        "restart loses it. false: published as soon as the engine holds it; the copy follows in "
        "the background, and a server that is killed before falls back to the version before"
    ),
]

router = APIRouter(tags=["Uploads"])

_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_CONFIG_EXAMPLE = '{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}'
_FIELD = {"type": "string", "format": "binary"}
_WEIGHTS_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "required": [CONFIG_FILE, WEIGHTS_FILE],
                    "properties": {
                        CONFIG_FILE: {"type": "string", "description": "as PEFT writes it"},
                        WEIGHTS_FILE: _FIELD,
                        TEMPLATE_FILE: {"type": "string", "description": "a chat template"},
                    },
                },
                "example": {CONFIG_FILE: _CONFIG_EXAMPLE, WEIGHTS_FILE: "(safetensors)"},
            },
            RAW[0]: {
                **_BINARY,
                "example": f"one safetensors file whose __metadata__ holds {CONFIG_FILE}",
            },
        },
    }
}
_FILES_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "properties": {"files": {"type": "array", "items": _FIELD}},
                },
                "example": {"files": [CONFIG_FILE, WEIGHTS_FILE]},
            },
            TAR[0]: {**_BINARY, "example": "tar cf - -C folder ."},
            GZIP[0]: {**_BINARY, "example": "tar czf - -C folder ."},
        },
    }
}


@router.put(
    "/v1/adapters/{name:path}/weights",
    openapi_extra=_WEIGHTS_BODY,
    response_model=None,
)
async def put_weights(
    name: str,
    request: Request,
    service: Caller,
    if_match: IfMatch = None,
    wait: Wait = True,
    pinned: Pinned = None,
    replace: Replace = True,
    strategy: Strategy = "beside",
    durable: Durable = True,
) -> Response:
    """Register an adapter, or replace it, by weights that come with the request. They stay in
    memory on their way to the engine; running requests end on the version that they began with."""
    _look(service, name, if_match)
    limit = service.settings.max_upload_bytes
    with service.shutdown.request(service.settings.request_timeout_s):
        parcel = await receive_weights(request, name, service.uploads, limit, durable=durable)
    wanted = LoadRequest(
        AdapterName(name), parcel.source, _mode(replace), pinned=pinned, strategy=strategy
    )
    return await _publish(service, wanted, parcel, if_match, wait=wait)


@router.put(
    "/v1/adapters/{name:path}/files",
    openapi_extra=_FILES_BODY,
    response_model=None,
)
async def put_files(
    name: str,
    request: Request,
    service: Caller,
    if_match: IfMatch = None,
    wait: Wait = True,
    pinned: Pinned = None,
    replace: Replace = True,
    strategy: Strategy = "beside",
    load: Load = True,
) -> Response:
    """Register an adapter, or replace it, by the files of its folder: those of a form, or a tar
    archive, gzipped or not. What no judge looks at counts, but is not kept."""
    _look(service, name, if_match)
    limit, cache = service.settings.max_upload_bytes, service.supervisor.cache
    with service.shutdown.request(service.settings.request_timeout_s):
        parcel = await receive_folder(request, name, cache, limit)
    wanted = LoadRequest(
        *(AdapterName(name), parcel.source, _mode(replace)),
        pinned=pinned,
        load=load,
        strategy=strategy,
    )
    return await _publish(service, wanted, parcel, if_match, wait=wait)


def _look(service: Service, name: str, if_match: str | None) -> None:
    """Raises, before the body is read, what would refuse it anyway."""
    check_adapter_name(name, service.settings.served_model_names)
    view = find_adapter(service, name)
    wanted_version(if_match, view)
    if view is not None:
        must_match(if_match, view)


def _mode(replace: bool) -> Literal["upsert", "create"]:
    return "upsert" if replace else "create"


async def _publish(
    service: Service,
    wanted: LoadRequest,
    parcel: Parcel,
    if_match: str | None,
    *,
    wait: bool,
) -> Response:
    view = find_adapter(service, wanted.name)  # now: the body may have taken long to come
    if if_match is not None:
        version = wanted_version(if_match, view)
        wanted = dataclasses.replace(wanted, mode="replace", if_match=version)
    operation = service.supervisor.load(wanted, parcel)
    if not wait:
        return accepted(operation)
    ended = await finish(service, operation)
    shape = adapter_shape(service.supervisor.adapter(wanted.name))
    shape["published"] = ended.version
    return json_response(shape, 200 if view else 201, {"ETag": f'"{ended.version}"'})
