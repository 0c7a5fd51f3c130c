"""The engine's process is stopped for twenty seconds amid streams and admin calls, and goes on.

Two servers at once: one whose deadlines all end within the stop, one whose deadlines end after it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import COMMON_FLAGS, ROOMY_FLAGS
from tests.fixtures.api import Api, Stream, at_once
from tests.fixtures.common_ground import CommonGround
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command

STOP_S = 20.0
STREAMS = 16
SHORT_S = 8
LONG_S = 50
DRAIN_S = 3
PROMPT_S = 5.0
"""For an answer about a server whose engine is stopped."""
AT_REST_S = 20.0
MODELS = ("tiny", "A", "B", "C")


@dataclass
class Told:
    """What the calls to one server said, and when each had ended, counted from the stop."""

    streams: list[tuple[str, Stream, float]] = field(default_factory=list)
    admin: dict[str, tuple[httpx.Response, float]] = field(default_factory=dict)
    health: list[tuple[float, httpx.Response]] = field(default_factory=list)
    leases: list[float] = field(default_factory=list)


@contextmanager
def _served(ground: CommonGround, state: Path, *flags: str) -> Iterator[tuple[ServerProcess, Api]]:
    port = free_port()
    command = lorry_command(ground.model, port, state, *COMMON_FLAGS, *ROOMY_FLAGS, *flags)
    with ServerProcess(command, port) as server, server.client(timeout=90) as client:
        yield server, Api(client, ground, "tiny")


class _Stop:
    """The one experiment: streams begin, the engine stops, everybody calls, it goes on."""

    def __init__(self, server: ServerProcess, api: Api, drain_s: int) -> None:
        self.server, self.api, self.told = server, api, Told()
        self._drain_s = drain_s
        self._ground = api.ground
        self._began = threading.Barrier(STREAMS + 2)
        self._stopped = threading.Event()
        self._stopped_at = 0.0
        self.pid = server.engine_pid()

    def run(self) -> Told:
        """Returns once every call has its answer."""
        for name in MODELS[1:]:
            self.api.must_load(name, self._ground.adapter(name))
        models = [MODELS[number % len(MODELS)] for number in range(STREAMS)]
        calls: list[Callable[[], None]] = [self._stream(model) for model in models]
        url = self.api.adapter_url
        source = {"source": str(self._ground.adapter("D"))}
        calls += [
            self._leaver,
            self._admin("load", "PUT", url("D"), source),
            self._admin("replace", "PUT", url("C"), {"source": str(self._ground.adapter("E"))}),
            self._admin("unload", "DELETE", f"{url('B')}?drain_timeout={self._drain_s}"),
            self._admin("pin", "PATCH", url("A"), {"pinned": True}),
            self._stop_and_look,
        ]
        at_once(calls)
        return self.told

    def _since(self) -> float:
        return time.monotonic() - self._stopped_at

    def _stream(self, model: str) -> Callable[[], None]:
        def run() -> None:
            with self.api.streaming(model, max_tokens=200) as states:
                last = next(states)
                self._began.wait(30)
                for state in states:
                    last = state
            self.told.streams.append((model, last, self._since()))

        return run

    def _leaver(self) -> None:
        """Hangs up while the engine is stopped."""
        with self.api.streaming("A", max_tokens=1600) as states:
            next(states)
            self._began.wait(30)
            self._stopped.wait(30)

    def _admin(
        self, kind: str, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Callable[[], None]:
        def run() -> None:
            self._stopped.wait(30)
            answer = self.api.client.request(method, path, json=body)
            self.told.admin[kind] = (answer, self._since())

        return run

    def _stop_and_look(self) -> None:
        self._began.wait(30)
        os.kill(self.pid, signal.SIGSTOP)
        self._stopped_at = time.monotonic()
        self._stopped.set()
        try:
            while self._since() < STOP_S - 1:
                self._look()
                time.sleep(0.5)
            time.sleep(max(0.0, STOP_S - self._since()))
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def _look(self) -> None:
        for path in ("/v1/models", "/v1/adapters", "/v1/replicas", "/metrics", "/health"):
            began = time.monotonic()
            answer = self.api.client.get(path)
            assert time.monotonic() - began < PROMPT_S, path
            assert answer.status_code == (200 if path != "/health" else answer.status_code)
        self.told.health.append((self._since(), answer))
        self.told.leases += self.api.metric("lorry_leases")


def _assert_health_says_why(told: Told) -> None:
    late = [answer for at, answer in told.health if at > 8]
    assert late
    for answer in late:
        assert answer.status_code == 503
        assert "its process is stopped" in answer.json()["error"]["message"]


def _assert_all_agree_again(stop: _Stop, serves: dict[str, str], pinned: set[str]) -> None:
    """The same engine, and every list, metric and answer as what the calls were told."""
    api = stop.api
    stop.server.wait_ready(AT_REST_S)
    assert stop.server.engine_pid() == stop.pid
    assert api.metric("lorry_engine_losses_total") == [0]
    api.check_all([(name, oracle, "S") for name, oracle in serves.items()])
    deadline = time.monotonic() + AT_REST_S
    while not _at_rest(api):
        assert time.monotonic() < deadline, [api.native(), api.client.get("/v1/replicas").text]
        time.sleep(0.1)
    native = api.native()
    assert {name: Path(entry["source"]).name for name, entry in native.items()} == serves
    assert {name: Path(root).name for name, root in api.listed().items()} == serves
    assert {name for name, entry in native.items() if entry["pinned"]} == pinned
    for name in {*"ABCDE"} - serves.keys():
        api.assert_unknown(name)
    api.assert_alive()
    api.unload_all()
    assert api.metric("lorry_host_cache_bytes") == [0]
    assert api.metric("lorry_versions_resident", tier="host") == [0]


def _at_rest(api: Api) -> bool:
    busy = ("lorry_leases", "lorry_tickets", "lorry_operations")
    held = [e for e in api.native().values() if e["tier"] in ("slot", "host")]
    (replica,) = api.client.get("/v1/replicas").json()["data"]
    return (
        all(api.metric(name) == [0] for name in busy)
        and (replica["running"], replica["waiting"], replica["kv_blocks_used"]) == (0, 0, 0)
        and api.metric("lorry_versions_resident", tier="host") == [len(held)]
        and api.metric("lorry_host_cache_bytes") == [sum(e["host_bytes"] for e in held)]
    )


@pytest.mark.slow
def test_promise_7_calls_end_by_their_deadlines_when_the_engine_is_stopped_for_a_while(
    ground: CommonGround, tmp_path: Path
) -> None:
    short = ("--load-timeout", str(SHORT_S), "--request-timeout", str(SHORT_S + 2))
    long = ("--load-timeout", str(LONG_S), "--request-timeout", str(LONG_S))
    with (
        _served(ground, tmp_path / "short", *short) as (short_server, short_api),
        _served(ground, tmp_path / "long", *long) as (long_server, long_api),
    ):
        hasty = _Stop(short_server, short_api, DRAIN_S)
        patient = _Stop(long_server, long_api, LONG_S)
        at_once([hasty.run, patient.run])
        _assert_health_says_why(hasty.told)
        _assert_health_says_why(patient.told)
        _assert_ended_in_time(hasty)
        _assert_ended_well(patient)
        _assert_all_agree_again(hasty, {"A": "A", "B": "B", "C": "C"}, set())
        _assert_all_agree_again(patient, {"A": "A", "C": "E", "D": "D"}, {"A"})


def _assert_ended_in_time(stop: _Stop) -> None:
    """Every deadline was within the stop, so each call had its error before the engine went on."""
    told = stop.told
    assert len(told.streams) == STREAMS
    for model, stream, ended in told.streams:
        assert ended < STOP_S, model
        assert stop.api.is_prefix(stream, model if model != "tiny" else "base")
        assert [error["code"] for error in stream.errors] == ["request_aborted"], stream.errors
        assert "was unloaded" in stream.errors[0]["message"] or model != "B"
    assert set(told.admin) == {"load", "replace", "unload", "pin"}
    for kind, (answer, ended) in told.admin.items():
        assert ended < STOP_S, kind
        assert answer.status_code == 504, f"{kind}: {answer.text}"
        assert answer.json()["error"]["code"] == "engine_timeout"
        assert "Retry-After" in answer.headers
    assert told.leases[-1] == 0


def _assert_ended_well(stop: _Stop) -> None:
    """Every deadline was after the stop, so nobody noticed more than a pause."""
    told = stop.told
    assert len(told.streams) == STREAMS
    for model, stream, ended in told.streams:
        assert ended > STOP_S
        assert stop.api.is_prefix(stream, model if model != "tiny" else "base")
        assert (stream.errors, stream.finish_reasons) == ([], ["length"])
    for kind, (answer, ended) in told.admin.items():
        assert ended > STOP_S, kind
        assert answer.status_code in (200, 201), f"{kind}: {answer.text}"
    assert told.leases[-1] == STREAMS, "the one that left was not released"
