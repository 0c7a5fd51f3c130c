"""The server on a real socket: its start, its signals, its orderly end."""

import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from lorry.artifacts.cache import DiskCache
from lorry.engines.fake_script import FakeSettings, Fault
from lorry.errors import EngineRejected
from lorry.ids import ReplicaId
from lorry.lifecycle.settings import FleetLimits
from lorry.server.app import build_app
from lorry.server.serve import serve
from lorry.server.settings import ServerSettings
from lorry.store.memory import MemoryStore
from lorry.supervisor import Supervisor, SupervisorSettings
from tests.fixtures.http_server import TinyFake
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.fixtures.waiting import LIMIT_S, until, until_true

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@dataclass(slots=True)
class Running:
    """A server that listens."""

    url: str
    engine: TinyFake
    over: anyio.Event


def app_of(engine: TinyFake, folder: Path, **settings: Any) -> Any:
    supervisor = Supervisor(
        engines={ReplicaId("engine"): engine},
        store=MemoryStore(),
        cache=DiskCache(folder / "cache", None),
        limits=FleetLimits(),
        settings=SupervisorSettings(shutdown_s=1.0),
    )
    options = ServerSettings(**{"served_model_names": ("tiny",)} | settings)
    return build_app(supervisor, options, tiny_tokenizer())


@asynccontextmanager
async def running(folder: Path, fake: FakeSettings, **settings: Any) -> AsyncIterator[Running]:
    """Serve in a task; the end of the block sends SIGTERM unless that was done."""
    engine, listening, over = TinyFake(fake), anyio.Event(), anyio.Event()
    urls: list[str] = []

    def on_listening(url: str) -> None:
        urls.append(url)
        listening.set()

    async def run() -> None:
        app = app_of(engine, folder, **settings)
        await serve(app, "127.0.0.1", 0, on_listening=on_listening)
        over.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        with anyio.fail_after(LIMIT_S):
            await listening.wait()
        yield Running(urls[0], engine, over)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        with anyio.fail_after(LIMIT_S):
            await over.wait()


async def stream(url: str, lines: list[str], tokens: int) -> None:
    body = {
        "model": "tiny",
        "prompt": [5],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    async with (
        httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines += [line] if line else []


async def is_closed(url: str) -> bool:
    """Whether it takes no more connections."""
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
        try:
            await client.get(f"{url}/health")
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            return False  # cut off just as it stopped
    return False


async def both(first: Callable[[], Awaitable[None]], then: Callable[[], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(first)
        await then()


async def test_running_streams_get_time_and_new_requests_none(tmp_path: Path) -> None:
    async with running(tmp_path, FakeSettings(token_delay_s=0.02)) as server:
        lines: list[str] = []

        async def stop() -> None:
            await until(lambda: len(lines) > 2)
            os.kill(os.getpid(), signal.SIGTERM)
            await until_true(lambda: is_closed(server.url))
            assert lines[-1] != "data: [DONE]"
            server.engine.token_delay_s = 0

        await both(lambda: stream(server.url, lines, 1000), stop)
        assert lines[-1] == "data: [DONE]"
        assert not any('"error"' in line for line in lines)
        await server.over.wait()


async def test_streams_that_take_too_long_end_with_a_clear_error(tmp_path: Path) -> None:
    slow = FakeSettings(token_delay_s=0.05)
    async with running(tmp_path, slow, drain_timeout_s=0.3) as server:
        lines: list[str] = []

        async def stop() -> None:
            await until(lambda: len(lines) > 2)
            os.kill(os.getpid(), signal.SIGTERM)

        await both(lambda: stream(server.url, lines, 2000), stop)
        assert lines[-1] == "data: [DONE]"
        assert "shutting_down" in lines[-2]
        await server.over.wait()


async def test_an_event_feed_does_not_hold_the_server_up(tmp_path: Path) -> None:
    async with running(tmp_path, FakeSettings(), heartbeat_s=0.01, drain_timeout_s=300) as server:
        seen: list[bytes] = []

        async def follow() -> None:
            nonlocal seen
            async with (
                httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client,
                client.stream("GET", f"{server.url}/v1/events") as response,
            ):
                async for data in response.aiter_raw():
                    seen += [data]

        async def stop() -> None:
            await until(lambda: bool(seen))
            os.kill(os.getpid(), signal.SIGINT)

        with anyio.fail_after(LIMIT_S):
            await both(follow, stop)
            await server.over.wait()


@pytest.mark.parametrize("streamed", [True, False])
async def test_promise_7_a_closed_connection_ends_the_engines_work(
    tmp_path: Path, streamed: bool
) -> None:
    async with running(tmp_path, FakeSettings(token_delay_s=0.02)) as server:
        address = server.url.removeprefix("http://").split(":")
        asked = {"model": "tiny", "prompt": [5], "max_tokens": 2000, "ignore_eos": True}
        body = json.dumps(asked | {"stream": streamed}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.create_connection((address[0], int(address[1]))) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: server.engine.counters["generation_tokens"] > 5)
        await until(lambda: server.engine.statistics()["streams"] == 0)
        assert server.engine.counters["generation_tokens"] < 1500


async def test_tokens_reach_the_client_one_by_one(tmp_path: Path) -> None:
    async with running(tmp_path, FakeSettings(token_delay_s=0.05)) as server:
        lines: list[str] = []

        async def watch() -> None:
            await until(lambda: bool(lines))
            assert server.engine.counters["generation_tokens"] < 700
            server.engine.token_delay_s = 0

        await both(lambda: stream(server.url, lines, 1000), watch)


async def test_a_port_in_use_is_found_before_the_engine_starts(tmp_path: Path) -> None:
    engine = TinyFake()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match=r"port \d+: Address already in use; choose another"):
            await serve(app_of(engine, tmp_path), "127.0.0.1", taken.getsockname()[1])
    assert not engine.calls


async def test_an_engine_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    engine = TinyFake()
    engine.inject("start", Fault(error=EngineRejected("No such model.")))
    with pytest.RaisesGroup(EngineRejected, flatten_subgroups=True, allow_unwrapped=True):
        await serve(app_of(engine, tmp_path), "127.0.0.1", 0)
