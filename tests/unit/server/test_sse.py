"""One stream's bytes: in order, once, and nothing after the end."""

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lorry.errors import QueueFull
from lorry.server.sse import EventStream, Writer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


class Client:
    """Takes messages, each after a moment in which others may run."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self.messages.append(message)

    async def receive(self) -> Any:
        await anyio.sleep_forever()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def starts(self) -> list[int]:
        return [m["status"] for m in self.messages if m["type"] == "http.response.start"]


async def test_the_head_comes_once_whoever_writes_first() -> None:
    client = Client()
    writer = Writer(client.send)
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(writer.write, b"x")
    assert client.starts == [200]
    assert client.messages[0]["type"] == "http.response.start"
    assert client.body == b"xxxxx"


async def test_nothing_is_sent_after_the_end() -> None:
    client = Client()
    writer = Writer(client.send)
    async with anyio.create_task_group() as group:
        group.start_soon(writer.write, b"x")
        group.start_soon(writer.finish)
        group.start_soon(writer.write, b"late")
    assert client.body == b"x"
    assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_an_answer_that_was_given_up_is_not_begun() -> None:
    client = Client()
    writer = Writer(client.send)
    assert writer.give_up()
    await writer.write(b"late")
    assert client.messages == []
    begun = Writer(client.send)
    await begun.write(b"x")
    assert not begun.give_up()


@pytest.mark.parametrize("begun", [False, True])
async def test_an_error_is_a_status_before_the_first_event_and_an_event_after(begun: bool) -> None:
    client = Client()

    async def produce(writer: Writer) -> None:
        if begun:
            await writer.write(b"data: 1\n\n")
        raise ExceptionGroup("group", [QueueFull("full")])

    await EventStream(produce, heartbeat_s=0.001)({"type": "http"}, client.receive, client.send)
    assert client.starts == ([200] if begun else [429])
    assert client.body.count(b"queue_full") == 1
    assert client.body.endswith(b"data: [DONE]\n\n") == begun
    assert sum(not m.get("more_body", False) for m in client.messages if "body" in m) == 1


async def test_a_writer_that_is_cancelled_with_the_head_under_way_still_sends_it() -> None:
    """Several sequences share one stream, and the failure of one cancels the others."""
    client = Client()
    writer = Writer(client.send)
    async with anyio.create_task_group() as group:
        group.start_soon(writer.write, b"x")
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert not writer.give_up()
    await writer.write(b"error")
    await writer.finish()
    assert client.starts == [200]
    assert client.messages[0]["type"] == "http.response.start"


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_promise_7_work_that_fails_while_the_client_leaves_ends_quietly() -> None:
    """The second level of the simulation, seed 255: trio says both at once, that it was cancelled
    and that the work failed."""

    async def produce(writer: Writer) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(_fail_when_it_ends)
            await anyio.sleep_forever()

    class Leaver(Client):
        async def receive(self) -> Any:
            await anyio.lowlevel.checkpoint()
            return {"type": "http.disconnect"}

    client = Leaver()
    await EventStream(produce, heartbeat_s=60)({}, client.receive, client.send)  # type: ignore[arg-type]
    assert client.messages == []


async def _fail_when_it_ends() -> None:
    try:
        await anyio.sleep_forever()
    finally:
        raise QueueFull("too late")
