"""POST /v1/adapters:diff: what tells two adapters apart."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from lorry.server.service import Service, service_of

Caller = Annotated[Service, Depends(service_of)]

router = APIRouter()


class DiffAdapters(BaseModel):
    """POST /v1/adapters:diff. Each side is an adapter's name, `name@version` for the version that
    is served or one of `previous`, or an absolute folder on the server's machine."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"a": "legal", "b": "/adapters/legal-v2"}]},
    )
    a: str = Field(min_length=1)
    b: str = Field(min_length=1)


EXAMPLE = {
    "object": "adapter.diff",
    "same": False,
    "a": {"title": "legal", "rank": 8, "alpha": 16, "scale_rule": "alpha/r", "norm": 33.8},
    "b": {"title": "/adapters/legal-v2", "rank": 8, "alpha": 16, "norm": 34.1},
    "config": [{"key": "lora_dropout", "a": 0.05, "b": 0.1}],
    "modules": [
        {
            "module": "model.layers.0.self_attn.q_proj",
            "rank_a": 8,
            "rank_b": 8,
            "norm_a": 5.76,
            "norm_b": 5.81,
            "difference": 0.42,
        }
    ],
}


@router.post(
    "/v1/adapters:diff",
    response_model=None,
    responses={
        200: {
            "description": "What tells them apart. Norms are null for a module that an adapter "
            "does not touch, differences for shapes of two base models.",
            "content": {"application/json": {"example": EXAMPLE}},
        }
    },
)
async def diff_adapters(body: DiffAdapters, service: Caller) -> dict[str, Any]:
    """Facts of both, entries of their configs that differ (when both are folders), and for each
    module the Frobenius norms of what it adds to the base, and of the difference."""
    found = await service.supervisor.diff(body.a, body.b)
    return found.as_json()
