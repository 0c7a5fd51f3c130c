"""A trainer that replaces its adapter's weights over HTTP, on a real server under running
streams."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import start
from tests.fixtures.api import Api
from tests.fixtures.common_ground import CommonGround
from tests.fixtures.server_process import ServerProcess
from tests.fixtures.trainer import FLAGS, run

STREAMS = 16
ROUNDS = 300


@pytest.fixture
def server(ground: CommonGround, tmp_path: Path) -> Iterator[ServerProcess]:
    """Of its own, so that its memory is its own too."""
    with start(ground, tmp_path / "state", *FLAGS) as running:
        yield running


@pytest.mark.timeout(240)
def test_promise_2_every_stream_under_300_replacements_is_wholly_one_version(
    server: ServerProcess, ground: CommonGround
) -> None:
    report = run(server, ground, ROUNDS, STREAMS)
    assert report.wrong == []
    assert report.streams > STREAMS
    assert len(set(report.versions)) == ROUNDS
    assert report.growth() < 0.05, report.resident_bytes[::10]
    with server.client() as client:
        assert Api(client, ground, "tiny").listed() == {}
