"""One HTTP exchange with the app, by a hand-written `receive` and `send`, as uvicorn would do it.

`httpx.ASGITransport` runs the app to its end and joins the body, so it cannot leave half-way or
read slowly. Here the client does both, at any chunk and any moment.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Scope

from lorry.ids import AdapterName, VersionId


@dataclass(slots=True)
class Exchange:
    """What is asked, how the client behaves, and what came of it."""

    number: int
    route: str
    """Which sort of call it is: `vllm load`, `completion stream` and so on."""
    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    query: str = ""

    name: AdapterName | None = None
    """The adapter it is about; None: the base, or none."""
    version: VersionId | None = None
    """Which version it would bring, or asks to be answered by."""
    kind: str = "look"
    """`infer`, `load`, `unload`, `change` or `look`."""
    waits: bool = True
    """False: the answer does not tell how the call ended."""
    prompt: tuple[int, ...] = ()

    leaves_at_chunk: float = math.inf
    leaves_after_s: float = math.inf
    leaves_when: anyio.Event | None = None
    read_s: float = 0.0
    """The client takes so long for each chunk."""

    began_s: float = 0.0
    ended_s: float | None = None
    status: int | None = None
    chunks: list[bytes] = field(default_factory=list)
    finished: int = 0
    """How often the answer's end was sent."""
    left: bool = False
    cut: bool = False
    """The server was killed, or gave it up at its own end."""
    error: str = ""
    """What the app raised."""

    @property
    def answer(self) -> bytes:
        """All that came."""
        return b"".join(self.chunks)

    def documents(self) -> list[Any]:
        """The JSON values of the answer: one, or those of its events."""
        text = self.answer.decode()
        if "data: " not in text[:200]:
            return [json.loads(text)] if text and text[0] in "[{" and self.finished else []
        return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]

    def __str__(self) -> str:
        """For the trace."""
        asked = f"{self.route} {self.name or ''} {(self.version and self.version[:12]) or ''}"
        return f"#{self.number} {asked.strip()}"


async def perform(app: ASGIApp, exchange: Exchange, found: Callable[[str], None]) -> None:
    """Let the app answer; `found` is told of what no server may do."""
    gone, over = anyio.Event(), anyio.Event()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": exchange.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        _note(exchange, message, found)
        if exchange.read_s and not gone.is_set():
            with anyio.move_on_after(exchange.read_s):
                await gone.wait()
        if len(exchange.chunks) >= exchange.leaves_at_chunk or exchange.finished:
            exchange.left = exchange.left or not exchange.finished
            gone.set()

    async def impatience() -> None:
        with anyio.move_on_after(exchange.leaves_after_s):
            await (exchange.leaves_when or anyio.Event()).wait()
        exchange.left = not exchange.finished
        gone.set()

    exchange.began_s = anyio.current_time()
    async with anyio.create_task_group() as group:
        if exchange.leaves_after_s < math.inf or exchange.leaves_when is not None:
            group.start_soon(impatience)
        try:
            await app(_scope(exchange), receive, send)
        except Exception as error:  # noqa: BLE001 - uvicorn logs it and cuts the connection
            exchange.error = repr(error)
        except BaseExceptionGroup as both:
            # Its process was killed in the moment in which it failed.
            failed, killed = both.split(Exception)
            exchange.error = repr(failed)
            assert killed is not None
            raise killed from None
        over.set()
        group.cancel_scope.cancel()
    exchange.ended_s = anyio.current_time()


def _note(exchange: Exchange, message: Message, found: Callable[[str], None]) -> None:
    if message["type"] == "http.response.start":
        if exchange.status is not None:
            found(f"{exchange} began its answer twice")
        exchange.status = message["status"]
        return
    if exchange.status is None:
        found(f"{exchange} sent a body before its head")
    if exchange.finished:
        found(f"{exchange} went on after its end")
    if message.get("body"):
        exchange.chunks.append(message["body"])
    if not message.get("more_body", False):
        exchange.finished += 1


def _scope(exchange: Exchange) -> Scope:
    headers = [(b"host", b"lorry"), (b"x-request-id", b"x%d" % exchange.number)]
    if exchange.body:
        headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", str(len(exchange.body)).encode()))
    headers += [(name.encode(), value.encode()) for name, value in exchange.headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": exchange.method,
        "scheme": "http",
        "path": exchange.path,
        "raw_path": exchange.path.encode(),
        "query_string": exchange.query.encode(),
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
