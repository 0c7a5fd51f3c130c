"""`lorry.AsyncClient` against the whole app on a real socket, on asyncio and on trio."""

import inspect
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from lorry import AsyncClient, Client
from lorry.client import asynchronous, sync
from lorry.errors import AdapterConflict, AdapterNotFound, SourceNotFound
from tests.fixtures.http_server import BASE
from tests.fixtures.live_server import LiveServer, live_server

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both that httpx runs on."""
    return str(request.param)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with live_server(tmp_path) as server:
        yield server


async def test_the_day_of_an_adapter(server: LiveServer) -> None:
    async with AsyncClient(server.url) as client:
        phases: list[str] = []
        first = await client.adapters.load(
            "x", server.adapter(1), progress=lambda seen: phases.append(seen.phase)
        )
        second = await client.adapters.replace("x", server.adapter(2), if_match=first.version)
        assert (await client.adapters.rollback("x")).version == first.version != second.version
        assert [adapter.name async for adapter in client.adapters] == ["x"]
        assert (await client.adapters.pin("x")).pinned
        assert not (await client.adapters.unpin("x")).pinned
        assert (await client.adapters.check(server.adapter(3))).ok
        assert (await client.adapters.diff("x", server.adapter(1)))["same"]
        assert await client.models() == (BASE, "tiny-alias", "x")
        ended = await client.adapters.unload("x", drain_timeout_s=0)
        assert (ended.status, bool(phases)) == ("done", True)


# httpx does not close its own inner generators when a body is left early; trio complains of it.
@pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning")
async def test_operations_events_and_errors(server: LiveServer) -> None:
    async with AsyncClient(server.url) as client:
        begun = await client.begin.load("x", server.adapter(1))
        assert (await client.operations.wait(begun, timeout_s=30)).status == "done"
        with pytest.raises(SourceNotFound):
            await client.operations.wait(await client.begin.replace("x", "/nowhere"))
        with pytest.raises(AdapterConflict):
            await client.adapters.load("x", server.adapter(2))
        with pytest.raises(AdapterNotFound):
            await client.adapters.get("nobody")
        past = [event async for event in client.events]
        with anyio.fail_after(30):
            async with aclosing(client.events.follow()) as feed:
                assert [await anext(feed) for _ in past] == past


async def test_models_answer_whole_and_in_pieces(server: LiveServer) -> None:
    async with AsyncClient(server.url) as client:
        await client.adapters.load("x", server.adapter(1))
        whole = await client.chat("x", "hello", max_tokens=6, temperature=0)
        stream = client.chat_stream("x", "hello", max_tokens=6, temperature=0)
        assert "".join([piece async for piece in stream]) == whole.text
        text = (await client.generate(BASE, [5, 6], max_tokens=4, temperature=0)).text
        stream = client.generate_stream(BASE, [5, 6], max_tokens=4, temperature=0)
        assert "".join([piece async for piece in stream]) == text
        with pytest.raises(AdapterNotFound):
            await anext(client.chat_stream("nobody", "hello"))


async def test_openais_async_client_is_a_property(server: LiveServer) -> None:
    async with AsyncClient(server.url) as client:
        assert client.openai is client.openai
        cards = await client.openai.models.list()
        assert cards.data[0].id == BASE


def names(kind: type) -> dict[str, list[str]]:
    """Public methods and the names of what they take."""
    return {
        name: [*inspect.signature(member).parameters]
        for name, member in vars(kind).items()
        if callable(member) and not name.startswith("_")
    }


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize("kind", ["Adapters", "Begin", "Operations", "Events"])
async def test_both_clients_have_the_same_methods(kind: str) -> None:
    assert names(getattr(sync, kind)) == names(getattr(asynchronous, f"Async{kind}"))
    both = names(Client), names(AsyncClient)
    assert both[0].pop("close") == both[1].pop("aclose")
    assert both[0] == both[1]
