"""A thousand registered adapters, four slots, room for 32 in memory."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import start
from tests.fixtures.api import Api, at_once
from tests.fixtures.common_ground import CommonGround
from tests.fixtures.many import small_adapters
from tests.fixtures.server_process import ServerProcess

ADAPTERS = 1000
REQUESTS = 200
CLIENTS = 32
SLOTS = 4
IN_MEMORY = 32


@pytest.fixture(scope="module")
def many_server(
    ground: CommonGround, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """4 slots, 32 in memory."""
    flags = ("--served-model-name", "tiny", "--max-loras", str(SLOTS))
    state = tmp_path_factory.mktemp("many")
    with start(ground, state, *flags, "--max-cpu-loras", str(IN_MEMORY)) as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_adapters_answer_right_within_the_limits(
    many_server: ServerProcess, ground: CommonGround, tmp_path: Path
) -> None:
    adapters = small_adapters(ground, tmp_path, ADAPTERS)
    with many_server.client(timeout=60) as client:
        api = Api(client, ground, "tiny")
        at_once([_register(api, name, path) for name, (path, _) in adapters.items()], clients=8)
        assert api.listed().keys() == adapters.keys()
        before_bytes = many_server.resident_bytes()

        drawn = random.Random(7)
        weights = list(itertools.accumulate(1 / rank for rank in range(1, ADAPTERS + 1)))
        names = drawn.choices(list(adapters), cum_weights=weights, k=REQUESTS)
        calls = [_ask(api, name, adapters[name][1], "PS"[i % 2]) for i, name in enumerate(names)]
        calls[10::20] = [_sample(api)] * len(calls[10::20])
        at_once(calls, clients=CLIENTS)

        _assert_limits(api)
        grown_bytes = many_server.resident_bytes() - before_bytes
        assert grown_bytes < 400 << 20, "32 adapters of 32 KB, and KV, do not weigh that much"
        assert len(api.listed()) == ADAPTERS
        api.assert_alive()


def _register(api: Api, name: str, path: Path) -> Callable[[], None]:
    def run() -> None:
        body = {"source": str(path), "load": False}
        response = api.client.put(api.adapter_url(name), json=body)
        assert response.status_code < 300, response.text

    return run


def _ask(api: Api, name: str, oracle: str, prompt: str) -> Callable[[], None]:
    def run() -> None:
        response = api.gen(name, prompt)
        assert response.status_code == 200, response.text
        assert api.is_answer(response.json(), oracle, prompt), name

    return run


def _sample(api: Api) -> Callable[[], None]:
    return lambda: _assert_limits(api)


def _assert_limits(api: Api) -> None:
    tiers = [entry["tier"] for entry in api.native().values()]
    assert tiers.count("slot") <= SLOTS
    assert tiers.count("slot") + tiers.count("host") <= IN_MEMORY
    assert sum(api.metric("lorry_versions_resident", tier="host")) <= IN_MEMORY
