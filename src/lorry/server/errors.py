"""The one place where an error becomes an HTTP answer.

A `LorryError` carries its status, code and advice itself; here they get their JSON form, in
OpenAI's shape with two fields more. Everything foreign (the router's 404, pydantic's complaints, a
bug) becomes a `LorryError` first.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lorry.error_catalogue import TYPES as TYPES
from lorry.errors import (
    LorryError,
    MethodNotAllowed,
    RequestInvalid,
    RouteNotFound,
    Unauthorized,
)

log = logging.getLogger(__name__)

DETAILS_MAX = 20
"""Complaints about one body that are listed; a list of a million wrong ids would give a million."""


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""One encoder for all: `json.dumps` would make a new one per token."""


def to_json(value: Any) -> bytes:
    """JSON as all answers use it. Half a surrogate pair, which JSON can smuggle in, becomes "?"."""
    return _ENCODE(value).encode("utf-8", "replace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer in JSON."""
    return Response(to_json(value), status, headers, "application/json")


def error_body(error: LorryError) -> dict[str, Any]:
    """OpenAI's shape, with `action` and `details` added."""
    return {
        "error": {
            "message": error.message,
            "type": TYPES.get(error.status, "InternalServerError"),
            "param": error.param,
            "code": error.code,
            "action": error.action,
            "details": list(error.details),
        }
    }


def error_headers(error: LorryError) -> dict[str, str]:
    """`Retry-After` in whole seconds where trying again helps, and the challenge of a 401.
    `x-should-retry` is what OpenAI's clients obey: else they would guess by the status, and try a
    409 again that only a person can mend."""
    headers = {"x-should-retry": str(error.retryable).lower()}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: LorryError) -> Response:
    """The whole answer for an error."""
    return json_response(error_body(error), error.status, error_headers(error))


def as_lorry_error(error: BaseException, request_id: str = "-") -> LorryError:
    """The error to show for anything that was raised; a bug is logged here and shown without its
    inside."""
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, LorryError):
            if leaf.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                log.warning("request %s: %s: %s", request_id, leaf.code, leaf.message)
            return leaf
    log.error("request %s failed: %r", request_id, leaves[0], exc_info=error)
    return LorryError(f"The server failed on this request; its log has the cause at {request_id}.")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def from_validation(error: RequestValidationError, content_type: str) -> RequestInvalid:
    """One sentence and the field's path from pydantic's complaints."""
    problems = _problems(error.errors())
    where, what = problems[0]
    if not where and "json" not in content_type.lower():
        sent = content_type or "no type"
        what = f"The body was sent as {sent}; send it with Content-Type: application/json"
    details = [f"{path}: {text}" if path else text for path, text in problems[:DETAILS_MAX]]
    message = f"{where}: {what}." if where else f"{what}."
    return RequestInvalid(message, param=where or None, details=details)


def _problems(errors: Sequence[Any]) -> list[tuple[str, str]]:
    """(field, complaint) of each."""
    found = []
    for entry in errors:
        place = [part for part in entry["loc"][1:] if not _is_branch(part)]
        text = str(entry["msg"]).removeprefix("Value error, ").rstrip(".")
        if entry["type"] == "json_invalid":
            found.append(
                ("", f"The body is not JSON: {entry['ctx']['error']} at character {place[0]}")
            )
        else:
            found.append((".".join(str(part) for part in place), text))
    return found


def _is_branch(part: object) -> bool:
    """Pydantic names the branch of a union in the path, which is no field of the caller's."""
    return isinstance(part, str) and (part in ("str", "int", "float") or "[" in part)


def from_http(error: HTTPException, request: Request) -> LorryError:
    """The router's and the parser's own errors."""
    if isinstance(error.__cause__, LorryError):  # raised while the body was read
        return error.__cause__
    path = request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        return RouteNotFound(f"There is no {path} here.")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return MethodNotAllowed(f"{path} does not take {request.method}.")
    if isinstance(error.__cause__, UnicodeError | RecursionError):
        return RequestInvalid(f"The body is not JSON: {type(error.__cause__).__name__}.")
    return RequestInvalid(f"{error.detail}.")


def translated(error: Exception, request: Request) -> LorryError:
    """What a route may raise, as one of ours: for dialects, which answer in shapes of their own."""
    if isinstance(error, RequestValidationError):
        return from_validation(error, request.headers.get("content-type", ""))
    if isinstance(error, HTTPException):
        return from_http(error, request)
    return as_lorry_error(error, request_id_of(request))


def request_id_of(request: Request) -> str:
    """The id that the gate gave the request."""
    return str(request.scope.get("lorry.request_id", "-"))


def install(app: FastAPI) -> None:
    """Let every error of the app be answered by this table."""

    async def on_lorry_error(request: Request, error: Exception) -> Response:
        return error_response(as_lorry_error(error, request_id_of(request)))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation(error, request.headers.get("content-type", "")))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = error_response(from_http(error, request))
        answer.headers.update(error.headers or {})
        return answer

    app.add_exception_handler(LorryError, on_lorry_error)
    app.add_exception_handler(Exception, on_lorry_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
