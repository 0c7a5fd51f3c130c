"""GET /v1/errors: the catalogue of `lorry.error_catalogue`, for people and for clients."""

from typing import Any

from lorry.error_catalogue import Entry, entries, find, near
from lorry.errors import RouteNotFound


async def list_errors() -> dict[str, Any]:
    """Every error there is."""
    return {"object": "list", "data": [_shape(each) for each in entries()]}


async def show_error(code: str) -> dict[str, Any]:
    """One error by its code."""
    found = find(code)
    if found is None:
        alike = ", ".join(near(code))
        hint = f"near it are {alike}" if alike else "GET /v1/errors lists all"
        raise RouteNotFound(f"There is no error with the code {code}; {hint}.")
    return _shape(found)


def _shape(each: Entry) -> dict[str, Any]:
    """The record, with the sentence and the advice that every answer carries."""
    return {
        **each.record(),
        "status": each.kind.status,
        "meaning": each.meaning,
        "action": each.kind.action,
    }
