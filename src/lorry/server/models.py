"""GET /v1/models: what can be asked for, as OpenAI lists it and with vLLM's `root` and `parent`."""

from typing import Annotated, Any

from fastapi import Depends

from lorry.server.service import Service, service_of
from lorry.views import AdapterView

Caller = Annotated[Service, Depends(service_of)]


async def list_models(service: Caller) -> dict[str, Any]:
    """The base under all its names, then every adapter that takes requests, by name."""
    bases = [_base_card(service, name) for name in service.settings.served_model_names]
    adapters = [
        _card(service, view) for view in service.supervisor.adapters() if not view.unloading
    ]
    return {"object": "list", "data": bases + adapters}


async def show_model(model: str, service: Caller) -> dict[str, Any]:
    """One of them. Raises `AdapterNotFound`."""
    target = service.target(model)
    if target.name is None:
        return _base_card(service, model)
    return _card(service, service.supervisor.adapter(target.name)) | {"id": model}


def _base_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "lorry",
        "root": service.settings.model_root or name,
        "parent": None,
        "max_model_len": service.supervisor.capabilities.max_model_len,
        "permission": [],
    }


def _card(service: Service, view: AdapterView) -> dict[str, Any]:
    return {
        "id": view.name,
        "object": "model",
        "created": int(view.created_s),
        "owned_by": "lorry",
        "root": view.source,
        "parent": service.settings.base_name,
        "max_model_len": None,
        "permission": [],
    }
