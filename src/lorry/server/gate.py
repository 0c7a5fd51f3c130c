"""The gate in front of every route: request ids, keys, body limit, and the last catch for bugs.

One plain ASGI middleware, because Starlette's BaseHTTPMiddleware puts a queue and a task between
the route and the client, which costs time on each token and hides disconnects.
"""

import re
import uuid
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorry.errors import BodyTooLarge
from lorry.server.auth import OPEN_PATHS, KeyRing
from lorry.server.errors import as_lorry_error, error_response
from lorry.server.settings import ServerSettings
from lorry.server.shutdown import Shutdown

SANE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
"""Ids of callers that we repeat in headers and logs; others are replaced."""


UPLOADS = ("/weights", "/files")
"""Where adapters are sent to: bodies may be longer there."""

FROM_TENSORS = "/load_lora_adapter_from_tensors"
"""SGLang's way."""

FRAMING_BYTES = 1 << 20
"""Allowed for what a form or an archive adds to its files."""


class Gate:
    """ASGI app around the ASGI app."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, shutdown: Shutdown) -> None:
        """Keys and limits come from the settings."""
        self._app = app
        self._keys = KeyRing(settings.api_keys)
        self._settings = settings
        self._shutdown = shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        exchange = _Exchange(send, _request_id(headers))
        scope["lorry.request_id"] = exchange.request_id
        try:
            self._keys.check(scope["path"], headers)
            if scope["path"] not in OPEN_PATHS:
                self._shutdown.check()
            limited = _LimitedBody(receive, self._body_limit(scope["path"]), headers)
            await self._app(scope, limited, exchange.send)
        except Exception as error:
            problem = as_lorry_error(error, exchange.request_id)
            if not exchange.started:
                await error_response(problem)(scope, receive, exchange.send)
            elif not exchange.finished:
                raise  # the connection is cut, so that half an answer looks like no whole one

    def _body_limit(self, path: str) -> int:
        """Bytes that a body may have there."""
        native = path.startswith("/v1/adapters/") and path.endswith(UPLOADS)
        if native or path == FROM_TENSORS:
            return self._settings.max_upload_bytes + FRAMING_BYTES
        return self._settings.max_body_bytes


class _Exchange:
    """Adds the request id to the answer and remembers whether it has begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.started = False
        self.finished = False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id.encode()),
            ]
        elif message["type"] == "http.response.body":
            self.finished = not message.get("more_body", False)
        await self._send(message)


class _LimitedBody:
    """`receive` that raises `BodyTooLarge`."""

    def __init__(self, receive: Receive, limit: int, headers: Mapping[bytes, bytes]) -> None:
        self._receive = receive
        self._limit = limit
        self._received = 0
        announced = headers.get(b"content-length", b"")
        if announced.isdigit():
            self._check(int(announced))

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self._check(self._received)
        return message

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise BodyTooLarge(
                f"The body has {size} bytes or more; the server takes {self._limit} at most."
            )


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    return given.decode() if SANE_ID.fullmatch(given) else uuid.uuid4().hex
