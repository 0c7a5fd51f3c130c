"""Server-sent events: bytes to the client as they come, and an end to the work when the client
leaves.

The head is sent with the first event, or at the first heartbeat: an error that comes before is an
ordinary HTTP answer with its own status; one that comes later is one last event, as vLLM sends it.
"""

from collections.abc import Awaitable, Callable

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorry.errors import LorryError
from lorry.server.errors import as_lorry_error, error_response

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": still here\n\n"

HEAD_S = 5.0
"""A client that will not take a few bytes of head by then gets no answer: what follows fails, and
the connection is cut."""


class Writer:
    """Sends events of one stream; several tasks may write."""

    __slots__ = ("_closed", "_lock", "_send", "quiet", "started")

    def __init__(self, send: Send) -> None:
        """Nothing is sent yet."""
        self._send = send
        self._lock = anyio.Lock(fast_acquire=True)
        self._closed = False
        self.started = False
        self.quiet = True
        """Nothing was written since the last heartbeat."""

    async def write(self, data: bytes) -> None:
        """Whole events; nothing once it is closed."""
        self.quiet = False
        async with self._lock:
            if self._closed:
                return
            if not self.started:
                await self._send_head()
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_head(self) -> None:
        """Not to be cancelled by the failure of a sibling that shares the stream: nobody could tell
        then whether the head is out, and the error would be sent without one, or with two."""
        self.started = True
        with anyio.move_on_after(HEAD_S, shield=True):
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})

    async def finish(self) -> None:
        """No more events."""
        async with self._lock:
            self._closed = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def give_up(self) -> bool:
        """Leave the answer to somebody else; False when it has begun here."""
        self._closed = not self.started
        return self._closed


class EventStream(Response):
    """A response that `produce` writes."""

    def __init__(
        self,
        produce: Callable[[Writer], Awaitable[None]],
        *,
        heartbeat_s: float,
        done: bool = True,
        on_error: Callable[[LorryError], Response] = error_response,
    ) -> None:
        """`done`: end with `[DONE]`, as OpenAI does. `on_error` is the answer to an error; its body
        is the last event when the stream has begun."""
        super().__init__(media_type="text/event-stream")
        self._produce = produce
        self._heartbeat_s = heartbeat_s
        self._done = DONE if done else b""
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Produce until the end or until the client leaves."""
        try:
            await self._answer(scope, receive, send)
        except ExceptionGroup as failed:
            # The work failed in the moment in which the client left: nobody is there to be told.
            as_lorry_error(failed, scope.get("lorry.request_id", "-"))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = Writer(send)
        problem: LorryError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(_until_disconnect, receive, group.cancel_scope)
            group.start_soon(self._heartbeat, writer)
            try:
                await self._produce(writer)
            except Exception as error:  # noqa: BLE001 - becomes the answer
                problem = as_lorry_error(error, scope.get("lorry.request_id", "-"))
            if problem is not None and writer.give_up():
                await self._on_error(problem)(scope, receive, send)
            else:
                last = b"" if problem is None else event(bytes(self._on_error(problem).body))
                await writer.write(last + self._done)
                await writer.finish()
            group.cancel_scope.cancel()

    async def _heartbeat(self, writer: Writer) -> None:
        while True:
            writer.quiet = True
            await anyio.sleep(self._heartbeat_s)
            if writer.quiet:
                await writer.write(HEARTBEAT)


def event(data: bytes) -> bytes:
    """One event of a line of data."""
    return b"data: " + data + b"\n\n"


async def _until_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
