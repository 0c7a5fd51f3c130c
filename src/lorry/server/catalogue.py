"""GET /v1/errors: the catalogue of `lorry.errors`, for people and for clients."""

from collections.abc import Iterator
from typing import Any

from lorry.errors import LorryError, RouteNotFound


async def list_errors() -> dict[str, Any]:
    """Every error there is."""
    return {"object": "list", "data": [_entry(kind) for kind in _kinds(LorryError)]}


async def show_error(code: str) -> dict[str, Any]:
    """One error by its code."""
    for kind in _kinds(LorryError):
        if kind.code == code:
            return _entry(kind)
    raise RouteNotFound(f"There is no error with the code {code}; GET /v1/errors lists all.")


def _kinds(kind: type[LorryError]) -> Iterator[type[LorryError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _entry(kind: type[LorryError]) -> dict[str, Any]:
    return {
        "code": kind.code,
        "status": kind.status,
        "meaning": " ".join((kind.__doc__ or "").split()),
        "fault": str(kind.fault),
        "retryable": kind.retryable,
        "retry_after_s": kind.retry_after_s,
        "action": kind.action,
    }
