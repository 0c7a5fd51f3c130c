"""POST /v1/adapters:diff: what tells two adapters apart."""

from typing import Annotated, Any

from fastapi import Depends
from pydantic import BaseModel, ConfigDict, Field

from lorry.server.service import Service, service_of

Caller = Annotated[Service, Depends(service_of)]


class DiffAdapters(BaseModel):
    """POST /v1/adapters:diff. Each side is an adapter's name, `name@version` for the version that
    is served or one of `previous`, or an absolute folder on the server's machine."""

    model_config = ConfigDict(extra="forbid")
    a: str = Field(min_length=1)
    b: str = Field(min_length=1)


async def diff_adapters(body: DiffAdapters, service: Caller) -> dict[str, Any]:
    """Facts of both, entries of their configs that differ (when both are folders), and for each
    module the Frobenius norms of what it adds to the base, and of the difference."""
    found = await service.supervisor.diff(body.a, body.b)
    return found.as_json()
