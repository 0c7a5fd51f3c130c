"""Servers that the end-to-end tests share: one for each set of flags, kept for the whole run."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.fixtures.api import Api
from tests.fixtures.common_ground import CommonGround, common_ground
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command
from tests.fixtures.sglang_api import SglangApi

ROOMY_FLAGS = ("--served-model-name", "tiny", "--max-loras", "8", "--max-cpu-loras", "16")
TIGHT_FLAGS = ("--served-model-name", "org/tiny:v1", "--max-loras", "2", "--max-cpu-loras", "3")
PINNED_FLAGS = ("--served-model-name", "tiny", "--max-loras", "2", "--max-cpu-loras", "2")
COMMON_FLAGS = ("--max-lora-rank", "16", "--dtype", "float32", "--kv-cache-bytes", "128MiB")


DIALECTS: Mapping[str, type[Api]] = {"vllm": Api, "sglang": SglangApi}


def start(ground: CommonGround, state: Path, *flags: str) -> ServerProcess:
    """A server of the tiny model; a context manager."""
    port = free_port()
    return ServerProcess(lorry_command(ground.model, port, state, *COMMON_FLAGS, *flags), port)


@pytest.fixture(scope="session")
def ground() -> CommonGround:
    """The tiny model, its adapters and the right answers."""
    return common_ground()


def _serve(ground: CommonGround, state: Path, flags: tuple[str, ...]) -> Iterator[ServerProcess]:
    with start(ground, state, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def roomy_server(
    ground: CommonGround, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """8 slots, 16 in memory."""
    yield from _serve(ground, tmp_path_factory.mktemp("roomy"), ROOMY_FLAGS)


@pytest.fixture(scope="session")
def tight_server(
    ground: CommonGround, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """2 slots, 3 in memory; the base's name has a slash and a colon."""
    yield from _serve(ground, tmp_path_factory.mktemp("tight"), TIGHT_FLAGS)


@pytest.fixture(scope="session")
def pinned_server(
    ground: CommonGround, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """2 slots, 2 in memory."""
    yield from _serve(ground, tmp_path_factory.mktemp("pinned"), PINNED_FLAGS)


def _api(
    request: pytest.FixtureRequest, server: ServerProcess, ground: CommonGround, base: str
) -> Iterator[Api]:
    """Every case ends with *alive*, and leaves nothing loaded. A case is in vLLM's dialect unless
    `in_both_dialects` marks it."""
    with server.client() as client:
        api = DIALECTS[getattr(request, "param", "vllm")](client, ground, base)
        try:
            yield api
            api.assert_alive()
            api.unload_all()
        finally:
            print(server.tail())


@pytest.fixture
def roomy(
    request: pytest.FixtureRequest, roomy_server: ServerProcess, ground: CommonGround
) -> Iterator[Api]:
    """A case on the server with much room."""
    yield from _api(request, roomy_server, ground, "tiny")


@pytest.fixture
def tight(
    request: pytest.FixtureRequest, tight_server: ServerProcess, ground: CommonGround
) -> Iterator[Api]:
    """A case on the server with little room."""
    yield from _api(request, tight_server, ground, "org/tiny:v1")


@pytest.fixture
def pinned(
    request: pytest.FixtureRequest, pinned_server: ServerProcess, ground: CommonGround
) -> Iterator[Api]:
    """A case on the server with room for two."""
    yield from _api(request, pinned_server, ground, "tiny")
