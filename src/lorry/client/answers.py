"""The border where what comes over the wire, or does not come, becomes JSON or one of our errors.

Nothing of httpx's leaves the client but through here."""

import email.utils
import json
import re
import time
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from lorry.client.values import Json
from lorry.error_catalogue import find
from lorry.errors import (
    AnswerInvalid,
    AnswerLost,
    BrokenInvariant,
    LorryError,
    ServerUnreachable,
)

NOT_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
    httpx.ProxyError,
)
"""After these the server has seen nothing, so that any call may be sent again."""


def checked_url(url: str) -> str:
    """The URL without its last slash. Raises `ServerUnreachable` for one that cannot be meant."""
    try:
        parts = urlsplit(url)
        fault = "it must begin with http:// or https:// and name a host"
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (httpx.InvalidURL, ValueError, UnicodeError) as error:
        fault, sound = str(error), False
    if not sound:
        raise ServerUnreachable(f"{url!r} is no usable URL: {fault}")
    return url.rstrip("/").removesuffix("/v1")


def wire_error(error: Exception, url: str, what: str) -> LorryError:
    """Our error for one of httpx's; `what` is the call, such as `GET /v1/adapters`."""
    if isinstance(error, httpx.ConnectError) and "SSL" in str(error):
        return ServerUnreachable(f"{url} cannot be reached over TLS: {error}")
    if isinstance(error, NOT_SENT):
        return ServerUnreachable(f"No server answers at {url}.")
    if isinstance(error, httpx.TimeoutException):
        return AnswerLost(f"{url} did not answer {what} in time.")
    reason = str(error) or type(error).__name__
    return AnswerLost(f"The connection to {url} was lost before {what} was answered: {reason}")


def body_of(status: int, content: bytes, retry_after: str | None, url: str) -> Json:
    """The JSON object of an answer, {} for an empty one. Raises the error that it stands for."""
    try:
        value = json.loads(content) if content.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if 200 <= status < 300 and isinstance(value, dict):
        return value
    if isinstance(value, dict) and isinstance(value.get("error"), dict):
        raise told_error(value["error"], status, seconds(retry_after))
    raise AnswerInvalid(f"{url} answered HTTP {status} in a form that is not Lorry's.")


def told_error(
    told: dict[str, Any], status: int | None = None, retry_after_s: float | None = None
) -> LorryError:
    """The exception for an error that a server told of: the class of its code, or, for a code that
    this release does not know, a class made for it."""
    code = str(told.get("code") or "lorry_error")
    message = str(told.get("message") or "the server gave no reason")
    found = find(code)
    kind = found.kind if found is not None and found.code == code else _unknown(code, status or 500)
    if kind is BrokenInvariant:
        return _broken(message)
    error = kind(
        message,
        param=told.get("param"),
        details=[str(each) for each in told.get("details") or ()],
        retry_after_s=retry_after_s,
    )
    action = str(told.get("action") or error.action)
    # The server knows best what helps, and may be of another release than this catalogue.
    vars(error)["action"] = action
    error.add_note(action)
    return error


def _unknown(code: str, status: int) -> type[LorryError]:
    """A class for a code of another release. It is never retried: nobody here knows whether that
    helps."""
    words = (
        "".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", code)) or "UnknownError"
    )
    return cast(type[LorryError], type(words, (LorryError,), {"code": code, "status": status}))


def _broken(message: str) -> LorryError:
    promise = re.match(r"Promise (\d+): ", message)
    number = int(promise[1]) if promise else 0
    return BrokenInvariant(number, message[promise.end() :] if promise else message)


def seconds(retry_after: str | None) -> float | None:
    """The header in seconds; it may be a number or a date."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
