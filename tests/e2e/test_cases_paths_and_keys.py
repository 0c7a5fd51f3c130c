"""The case "paths, pickles and keys", on a server with an allowed folder, a key, and a proxy that
nobody may use."""

import errno
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import COMMON_FLAGS, DIALECTS
from tests.fixtures.api import BAD_LOAD_S, Api, in_both_dialects, in_time
from tests.fixtures.bad_adapters import CONFIG, WEIGHTS, copy_of
from tests.fixtures.common_ground import CommonGround
from tests.fixtures.server_process import HOST, LIGHT, ServerProcess, free_port, lorry_command

KEY = "a key of the tests"

GUARDED: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/v1/models", None),
    ("POST", "/v1/completions", {"model": "A", "prompt": [5]}),
    ("POST", "/v1/chat/completions", {"model": "A", "messages": []}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "A"}),
    ("GET", "/v1/adapters", None),
    ("GET", "/v1/adapters/A", None),
    ("PUT", "/v1/adapters/x", {"source": "/x"}),
    ("PUT", "/v1/adapters/x/weights", {}),
    ("PUT", "/v1/adapters/x/files", {}),
    ("PATCH", "/v1/adapters/A", {"pinned": True}),
    ("DELETE", "/v1/adapters/A", None),
    ("POST", "/v1/adapters/A/rollback", {}),
    ("POST", "/v1/adapters/A/prefetch", None),
    ("POST", "/v1/adapters:check", {"source": "/x"}),
    ("POST", "/v1/adapters:diff", {"a": "A", "b": "A"}),
    ("GET", "/v1/events?follow=false", None),
    ("GET", "/v1/operations", None),
    ("GET", "/v1/replicas", None),
    ("POST", "/adapters", {"name": "x", "src": "/x"}),
    ("GET", "/adapters", None),
    ("POST", "/adapters/A/update", None),
    ("DELETE", "/adapters/A", None),
    ("GET", "/models/tiny/adapters", None),
    ("GET", "/v1/lora_adapters", None),
    ("POST", "/invocations", {"prompt": [5]}),
    ("POST", "/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}),
    ("POST", "/unload_lora_adapter", {"lora_name": "A"}),
    ("POST", "/load_lora_adapter_from_tensors", {"lora_name": "x"}),
    ("POST", "/generate", {"input_ids": [5], "lora_path": "A"}),
    ("GET", "/v1/loads?include=lora", None),
    ("GET", "/model_info", None),
    ("GET", "/get_model_info", None),
    ("GET", "/health_generate", None),
    ("POST", "/tokenize", {"prompt": "x"}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("GET", "/metrics", None),
)
"""Every route that can load, unload, list or use an adapter, in any dialect."""


class Catcher:
    """A listener that counts who connects."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                if connection.recv(4, socket.MSG_WAITALL) == b"stop":
                    return
                self.connections += 1

    def close(self) -> None:
        """Stop listening."""
        with socket.create_connection((HOST, self.port)) as last:
            last.sendall(b"stop")
        self._thread.join()
        self._listener.close()


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one folder that adapters may come from."""
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture
def inside(allowed: Path) -> Path:
    """A folder in it for one test alone: the server outlives the test."""
    return Path(tempfile.mkdtemp(dir=allowed))


@pytest.fixture(scope="module")
def catcher() -> Iterator[Catcher]:
    """Stands where a proxy would be."""
    catcher = Catcher()
    yield catcher
    catcher.close()


@pytest.fixture(scope="module")
def guarded_server(
    ground: CommonGround,
    allowed: Path,
    catcher: Catcher,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    """Keys set, one folder allowed, every proxy variable at the catcher."""
    port = free_port()
    state = tmp_path_factory.mktemp("guarded")
    flags = ("--served-model-name", "tiny", "--adapter-root", str(allowed), "--api-key", KEY)
    proxy = f"http://{HOST}:{catcher.port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    environment = {**LIGHT} | dict.fromkeys(names, proxy) | {"HF_HUB_OFFLINE": "1", "NO_PROXY": ""}
    command = lorry_command(ground.model, port, state, *COMMON_FLAGS, *flags)
    with ServerProcess(command, port, api_key=KEY, environment=environment) as server:
        yield server


@pytest.fixture
def guarded(
    request: pytest.FixtureRequest, guarded_server: ServerProcess, ground: CommonGround
) -> Iterator[Api]:
    """With the key."""
    with guarded_server.client() as client:
        api = DIALECTS[getattr(request, "param", "vllm")](client, ground, "tiny")
        yield api
        api.assert_alive()
        api.unload_all()


def _assert_refused_in_time(api: Api, name: str, path: str) -> None:
    response = in_time(BAD_LOAD_S, lambda: api.load(name, path))
    api.assert_refused(response, name)


@in_both_dialects("guarded")
def test_a_path_inside_the_allowed_folder_is_served(
    guarded: Api, ground: CommonGround, inside: Path
) -> None:
    folder = copy_of(ground.adapter("A"), inside / "good")
    guarded.must_load("A", folder)
    guarded.check("A", "A")


@in_both_dialects("guarded")
@pytest.mark.parametrize("way", ["absolute", "dots", "dots inside", "link", "link to a file"])
def test_promise_9_no_file_outside_the_allowed_folder_is_opened(
    way: str, guarded: Api, ground: CommonGround, allowed: Path, inside: Path, tmp_path: Path
) -> None:
    outside = copy_of(ground.adapter("A"), tmp_path / "outside")
    canaries = [outside / CONFIG, outside / WEIGHTS]
    for canary in canaries:
        canary.unlink()
        os.mkfifo(canary)  # whoever opens it to read it waits, and can be seen waiting
    case = inside / way.replace(" ", "-")
    if way == "link":
        case.symlink_to(outside)
    elif way == "link to a file":
        copy_of(ground.adapter("A"), case)
        (case / WEIGHTS).unlink()
        (case / WEIGHTS).symlink_to(canaries[1])
    paths = {
        "absolute": str(outside),
        "dots": os.path.relpath(outside, allowed),
        "dots inside": f"{allowed}/x/../../{os.path.relpath(outside, allowed.parent)}",
        "link": str(case),
        "link to a file": str(case),
    }
    _assert_refused_in_time(guarded, "sly", paths[way])
    for canary in canaries:
        with pytest.raises(OSError) as nobody:
            os.close(os.open(canary, os.O_WRONLY | os.O_NONBLOCK))
        assert nobody.value.errno == errno.ENXIO, "the server has it open"


@in_both_dialects("guarded")
def test_promise_9_a_name_that_is_a_path_writes_nothing_outside(
    guarded: Api, ground: CommonGround, allowed: Path, inside: Path
) -> None:
    folder = copy_of(ground.adapter("A"), inside / "named")
    for name in ("../../evil", "/tmp/evil", "..", "a/../../b"):
        response = guarded.load(name, folder)
        if response.status_code == 200:  # a name is only a name: no file is called after it
            guarded.check(name, "A", "S")
            guarded.must_unload(name)
        else:
            guarded.assert_refused(response, name)
        assert not (allowed.parent / "evil").exists()
        assert not Path("/tmp/evil").exists()


@in_both_dialects("guarded")
def test_promise_9_a_hub_name_is_refused_without_the_network(
    guarded: Api, catcher: Catcher
) -> None:
    before = catcher.connections
    for path in ("some-org/some-adapter", "missing", "hf://some-org/some-adapter"):
        _assert_refused_in_time(guarded, "hub", path)
    assert catcher.connections == before == 0


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}])
@pytest.mark.parametrize(("method", "path", "body"), GUARDED)
def test_no_route_answers_without_the_key(
    method: str,
    path: str,
    body: dict[str, object] | None,
    headers: dict[str, str],
    guarded_server: ServerProcess,
) -> None:
    with guarded_server.client() as client:
        client.headers.pop("Authorization")
        adapter = {"X-Amzn-SageMaker-Adapter-Identifier": "A"}
        response = client.request(method, path, json=body, headers=adapter | headers)
    assert response.status_code == 401, f"{method} {path}: {response.status_code} {response.text}"


def test_health_needs_no_key(guarded_server: ServerProcess, guarded: Api) -> None:
    with guarded_server.client() as client:
        client.headers.pop("Authorization")
        assert client.get("/health").status_code == 200
