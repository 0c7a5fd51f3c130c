"""Processes that die or are told to stop, at the worst moments."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import COMMON_FLAGS, DIALECTS, ROOMY_FLAGS
from tests.fixtures.api import Api, Stream, at_once
from tests.fixtures.common_ground import CommonGround
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command

STREAMS = 16
BACK_AFTER_LOAD_S = 20.0
"""Over the time that the model itself takes to load."""
DRAIN_S = 3
LOAD_S = 8
"""Long enough for every load that is not made to hang."""


in_dialects = pytest.mark.parametrize("dialect", sorted(DIALECTS))


@contextmanager
def _served(
    ground: CommonGround, state: Path, *flags: str, dialect: str = "vllm"
) -> Iterator[tuple[ServerProcess, Api]]:
    """A server of its own, and its API."""
    port = free_port()
    command = lorry_command(ground.model, port, state, *COMMON_FLAGS, *ROOMY_FLAGS, *flags)
    with ServerProcess(command, port) as server, server.client() as client:
        yield server, DIALECTS[dialect](client, ground, "tiny")


@in_dialects
def test_promise_7_each_stream_ends_once_when_the_engine_is_killed(
    dialect: str, ground: CommonGround, tmp_path: Path
) -> None:
    with _served(ground, tmp_path, dialect=dialect) as (server, api):
        names = ["tiny", "A", "B", "C"]
        for name in names[1:]:
            api.must_load(name, ground.adapter(name))
        streaming = threading.Barrier(STREAMS + 1)

        def stream(name: str) -> Stream:
            met = False

            def meet(_: Stream) -> None:
                nonlocal met
                if not met:
                    met = True
                    streaming.wait(60)

            return api.stream_to_end(name, "S", meet, max_tokens=2000)

        def kill() -> Stream:
            streaming.wait(60)
            os.kill(server.engine_pid(), signal.SIGKILL)
            return Stream()

        began = time.monotonic()
        calls: list[Callable[[], Stream]] = [partial(stream, name) for name in names * 4]
        assert len(calls) == STREAMS
        streams = at_once([*calls, kill])[:STREAMS]
        assert time.monotonic() - began < 60
        for ended in streams:
            assert len(ended.errors) == 1, ended.errors
            assert ended.errors[0]["message"]
            assert ended.errors[0]["code"] in {503, "engine_unreachable"}
            assert ended.finish_reasons == []
        assert server.process.poll() is None
        assert api.listed().keys() == {"A", "B", "C"}
        _wait_until_right(server, api, ["A", "B", "C"])
        assert api.metric("lorry_engine_losses_total") == [1]


def _wait_until_right(server: ServerProcess, api: Api, names: list[str]) -> None:
    """Until then only clear 503s; then every adapter answers right."""
    loaded_s = server.wait_ready()
    began = time.monotonic()
    for name in names:
        while (response := api.gen(name)).status_code == 503:
            assert response.json()["error"]["message"]
            assert "Retry-After" in response.headers
            assert time.monotonic() - began < BACK_AFTER_LOAD_S, f"ready after {loaded_s} s, but"
            time.sleep(0.05)
        api.check(name, name)
    assert time.monotonic() - began < BACK_AFTER_LOAD_S
    api.assert_alive()


@in_dialects
def test_promise_8_what_was_acknowledged_is_there_after_kill_9(
    dialect: str, ground: CommonGround, tmp_path: Path
) -> None:
    with _served(ground, tmp_path, dialect=dialect) as (server, api):
        for name in "ABCDE":
            api.must_load(name, ground.adapter(name))
        api.must_load("D", ground.adapter("F"), inplace=True)
        api.must_unload("B")
        assert api.pin("C").status_code == 200
        before, native = api.models(), api.native()
        engine = psutil.Process(server.engine_pid())
        server.kill()
        engine.wait(10)  # an orphan would keep its memory for ever
        server.start()
        assert _without_times(api.models()) == _without_times(before)
        after = api.native()
        assert {n: (e["version"], e["pinned"]) for n, e in after.items()} == {
            n: (e["version"], e["pinned"]) for n, e in native.items()
        }
        api.check_all([("A", "A", "P"), ("C", "C", "P"), ("D", "F", "P"), ("E", "E", "P")])
        api.assert_unknown("B")
        api.assert_alive()


def _without_times(cards: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return sorted((c["id"], c["root"], c["parent"]) for c in cards if c["parent"] is not None)


@pytest.mark.parametrize("seed", range(3))
def test_promise_8_kill_9_amid_operations_loses_at_most_the_one_in_flight(
    seed: int, ground: CommonGround, tmp_path: Path
) -> None:
    drawn = random.Random(seed)
    with _served(ground, tmp_path) as (server, api):
        acknowledged: dict[str, str] = {}
        in_flight: tuple[str, str | None] = ("", None)
        killer = threading.Timer(drawn.uniform(0.1, 1.0), server.kill)
        killer.start()
        try:
            while True:
                name, oracle = drawn.choice("uvwxyz"), drawn.choice("ABCDEF")
                unload = name in acknowledged and drawn.random() < 0.4
                in_flight = (name, None if unload else oracle)
                if unload:
                    api.must_unload(name)
                    del acknowledged[name]
                else:
                    api.must_load(name, ground.adapter(oracle), inplace=name in acknowledged)
                    acknowledged[name] = oracle
        except httpx.TransportError:
            pass
        killer.join()
        server.start()
        listed = {name: Path(root).name for name, root in api.listed().items()}
        name, outcome = in_flight
        done = {k: v for k, v in acknowledged.items() if k != name}
        if outcome is not None:
            done[name] = outcome
        assert listed in (acknowledged, done)
        api.check_all(
            [(name, oracle, "S") for name, oracle in listed.items()] or [("tiny", "base", "S")]
        )
        for name in set("uvwxyz") - listed.keys():
            api.assert_unknown(name)
        api.assert_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_amid_streams_ends_within_the_drain_limit(
    number: signal.Signals, ground: CommonGround, tmp_path: Path
) -> None:
    with _served(ground, tmp_path, "--drain-timeout", str(DRAIN_S)) as (server, api):
        api.must_load("A", ground.adapter("A"))
        streaming = threading.Barrier(3)

        def stream() -> Stream:
            with api.streaming("A", max_tokens=1600) as states:
                last = next(states)
                streaming.wait(30)
                for state in states:
                    last = state
            return last

        def stop() -> Stream:
            streaming.wait(30)
            server.signal(number)
            return Stream()

        streams = at_once([stream, stream, stop])[:2]
        server.wait(DRAIN_S + 30)
        for ended in streams:
            assert api.is_prefix(ended, "A")
            assert len(ended.errors) + len(ended.finish_reasons) == 1


@in_dialects
def test_promise_7_an_engine_that_dies_idle_comes_back(
    dialect: str, ground: CommonGround, tmp_path: Path
) -> None:
    with _served(ground, tmp_path, dialect=dialect) as (server, api):
        api.must_load("A", ground.adapter("A"))
        api.check("A", "A")
        engine = psutil.Process(server.engine_pid())
        engine.kill()
        engine.wait(10)
        assert api.client.get("/v1/models").status_code == 200
        _wait_until_right(server, api, ["A"])
        api.must_load("B", ground.adapter("B"))
        api.check("B", "B")


def test_promise_4_loads_amid_an_engine_loss_succeed_or_change_nothing(
    ground: CommonGround, tmp_path: Path
) -> None:
    with _served(ground, tmp_path) as (server, api):
        expected: dict[str, str] = {}
        killer = threading.Timer(0.3, os.kill, (server.engine_pid(), signal.SIGKILL))
        killer.start()
        after_the_loss = 0
        for count in range(1000):
            name, root = f"n{count % 4}", str(ground.adapter("ABCDEF"[count % 6]))
            response = api.load(name, root, inplace=name in expected)
            if response.status_code == 200:
                expected[name] = root
            else:
                assert response.status_code in {500, 503, 504}, response.text
                assert response.json()["error"]["message"]
            assert api.listed() == expected
            after_the_loss += api.metric("lorry_engine_losses_total") == [1]
            if after_the_loss == 6:
                break
        assert after_the_loss == 6
        killer.join()
        _wait_until_right(server, api, [])
        api.check_all([(name, Path(root).name, "S") for name, root in expected.items()])
        api.assert_alive()


def test_promise_5_an_engine_that_hangs_blocks_no_answer_about_it(
    ground: CommonGround, tmp_path: Path
) -> None:
    with _served(ground, tmp_path, "--load-timeout", str(LOAD_S)) as (server, api):
        api.must_load("A", ground.adapter("A"))
        engine = psutil.Process(server.engine_pid())
        engine.suspend()
        began = time.monotonic()
        for path in ("/v1/models", "/v1/adapters", "/v1/adapters/A", "/metrics", "/health"):
            assert api.client.get(path).status_code in {200, 503}, path
        assert time.monotonic() - began < 10
        response = api.load("B", ground.adapter("B"))
        assert time.monotonic() - began < 30
        assert response.status_code in {503, 504}, response.text
        assert api.listed() == {"A": str(ground.adapter("A"))}
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.resume()
        _wait_until_right(server, api, ["A"])
        api.must_load("B", ground.adapter("B"))
        api.check("B", "B")
