"""`lorry.Client` against the whole app on a real socket."""

import queue
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lorry import Client, Retry
from lorry.client import Event
from lorry.engines.fake_script import FakeSettings
from lorry.errors import (
    AdapterConflict,
    AdapterInvalid,
    AdapterNotFound,
    AllPinned,
    AnswerInvalid,
    CapacityExhausted,
    OperationCancelled,
    OperationNotFound,
    ServerUnreachable,
    ShuttingDown,
    SourceNotFound,
    Unauthorized,
    VersionMismatch,
)
from lorry.lifecycle.settings import FleetLimits
from tests.fixtures.http_server import BASE
from tests.fixtures.live_server import LiveServer, live_server
from tests.fixtures.server_process import free_port
from tests.fixtures.waiting import leap

WAIT_S = 30.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two slots, room for three."""
    with live_server(tmp_path_factory.mktemp("client")) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    """The same, where nothing is loaded."""
    yield shared
    with Client(shared.url) as client:
        for adapter in client.adapters:
            client.adapters.unload(adapter.name, drain_timeout_s=0, purge=True)


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def test_an_adapter_is_loaded_replaced_rolled_back_and_unloaded(
    client: Client, server: LiveServer
) -> None:
    phases: list[str] = []
    first = client.adapters.load(
        "team/x",
        server.adapter(1),
        labels={"a": "b"},
        progress=lambda seen: phases.append(seen.phase),
    )
    assert (first.name, first.state, first.tier, first.labels) == (
        *("team/x", "resident", "host"),
        {"a": "b"},
    )
    assert first.residency[0].replica == "engine"
    assert phases
    second = client.adapters.replace("team/x", server.adapter(2), if_match=first.version[:12])
    assert second.previous == (first.version,)
    assert client.adapters.rollback("team/x").version == first.version
    assert client.adapters.rollback("team/x", second.version).version == second.version
    assert [adapter.name for adapter in client.adapters] == ["team/x"]
    assert client.models() == (BASE, "tiny-alias", "team/x")
    assert client.model("team/x")["parent"] == BASE
    ended = client.adapters.unload("team/x", drain_timeout_s=1)
    assert (ended.kind, ended.status) == ("unload", "done")
    assert client.adapters.list() == ()


def test_pins_labels_prefetch_and_registration(client: Client, server: LiveServer) -> None:
    assert client.adapters.register("x", server.adapter(1)).state != "resident"
    assert client.adapters.prefetch("x").state == "resident"
    assert client.adapters.pin("x").pinned
    assert not client.adapters.unpin("x").pinned
    assert client.adapters.label("x", {"team": "law"}).labels == {"team": "law"}
    assert client.adapters.load("x", server.adapter(2), replace=True, pinned=True).pinned


def test_each_refusal_is_the_class_of_its_code(client: Client, server: LiveServer) -> None:
    version = client.adapters.load("x", server.adapter(1)).version
    with pytest.raises(AdapterConflict):
        client.adapters.load("x", server.adapter(2))
    with pytest.raises(VersionMismatch):
        client.adapters.replace("x", server.adapter(2), if_match="f" * 64)
    with pytest.raises(VersionMismatch):
        client.adapters.pin("x", if_match="f" * 64)
    with pytest.raises(SourceNotFound):
        client.adapters.load("y", "/nowhere/at/all")
    with pytest.raises(AdapterInvalid) as caught:
        client.adapters.load("y", str(server.inside.folder))
    assert caught.value.details
    for gone in (client.adapters.get, client.adapters.unload, client.adapters.rollback):
        with pytest.raises(AdapterNotFound):
            gone("nobody")
    with pytest.raises(AdapterNotFound):
        client.adapters.replace("nobody", server.adapter(1))
    with pytest.raises(OperationNotFound):
        client.operations.get(10_000)
    assert client.adapters.get("x").version == version


def test_what_only_a_person_can_mend_is_raised_at_once(client: Client, server: LiveServer) -> None:
    client.adapters.load("x", server.adapter(1), pinned=True)
    client.adapters.load("y", server.adapter(2))
    with pytest.raises(AllPinned):
        client.adapters.pin("y")


def test_operations_are_begun_watched_and_waited_for(client: Client, server: LiveServer) -> None:
    begun = client.begin.load("x", server.adapter(1))
    ended = client.operations.wait(begun, timeout_s=WAIT_S)
    assert (ended.id, ended.status, ended.running) == (begun.id, "done", False)
    assert client.operations.wait(begun.id) == ended
    assert ended in client.operations.list()
    assert client.operations.cancel(ended).status == "done"
    failing = client.begin.replace("x", "/nowhere")
    with pytest.raises(SourceNotFound):
        client.operations.wait(failing)
    for begin in (client.begin.rollback, client.begin.prefetch, client.begin.unload):
        if begin != client.begin.rollback:
            client.operations.wait(begin("x"))


def test_a_cancelled_operation_raises_so(client: Client, server: LiveServer) -> None:
    client.adapters.load("x", server.adapter(1))
    with server.portal.wrap_async_context_manager(
        server.inside.service.supervisor.generate(
            name="x",  # type: ignore[arg-type]
            prompt=(1, 2),
            sampling=sampling(),
        )
    ):
        begun = client.begin.replace("x", server.adapter(2), drain_first=True)
        assert client.operations.cancel(begun).status in ("cancelled", "running")
        with pytest.raises(OperationCancelled):
            client.operations.wait(begun, timeout_s=WAIT_S)


def sampling() -> object:
    """Something to hold a lease with."""
    from lorry.engine import SamplingParams

    return SamplingParams(max_tokens=1000)


def test_checks_and_differences_change_nothing(client: Client, server: LiveServer) -> None:
    first = client.adapters.load("x", server.adapter(1))
    client.adapters.replace("x", server.adapter(2))
    found = client.adapters.check(server.adapter(3))
    assert (found.ok, found.rank, found.problems) == (True, 4, ())
    bad = client.adapters.check(str(server.inside.folder))
    assert not bad.ok
    assert bad.problems[0].fix
    assert client.adapters.diff("x", server.adapter(2))["same"]
    apart = client.adapters.diff(f"x@{first.short_version}", "x")
    assert not apart["same"]
    assert len(apart["modules"]) == 14
    assert apart["config"] == []
    for a, b in (("x", "nobody"), ("x@000000000000", "x"), ("nobody@000000000000", "x")):
        with pytest.raises(AdapterNotFound):
            client.adapters.diff(a, b)
    with pytest.raises(SourceNotFound):
        client.adapters.diff("x", "/nowhere/at/all")


def test_models_answer_whole_and_in_pieces(client: Client, server: LiveServer) -> None:
    client.adapters.load("x", server.adapter(1))
    whole = client.chat("x", "hello", max_tokens=6, temperature=0)
    assert (whole.model, whole.finish_reason, whole.completion_tokens) == ("x", "length", 6)
    messages = [{"role": "user", "content": "hello"}]
    assert "".join(client.chat_stream("x", messages, max_tokens=6, temperature=0)) == whole.text
    text = client.generate(BASE, [5, 6, 7], max_tokens=4, more={"temperature": 0}).text
    assert "".join(client.generate_stream(BASE, [5, 6, 7], max_tokens=4, temperature=0)) == text
    with pytest.raises(AdapterNotFound, match="`nobody`"):
        client.chat("nobody", "hello")
    with pytest.raises(AdapterNotFound, match="`nobody`"):
        next(client.chat_stream("nobody", "hello"))


def test_a_stream_that_is_left_releases_its_lease(client: Client, server: LiveServer) -> None:
    client.adapters.load("x", server.adapter(1))
    stream = client.chat_stream("x", "hello", max_tokens=1500)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    server.portal.call(server.inside.idle)


def test_openais_client_is_a_property(client: Client, server: LiveServer) -> None:
    client.adapters.load("x", server.adapter(1))
    answer = client.openai.completions.create(model="x", prompt="hello", max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert client.openai is client.openai


def test_without_openais_package_the_property_says_what_to_do(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ModuleNotFoundError, match="pip install openai"):
        client.openai  # noqa: B018


def test_the_server_is_seen_through_replicas_and_metrics(
    client: Client, server: LiveServer
) -> None:
    client.adapters.load("x", server.adapter(1))
    (replica,) = client.replicas()
    assert replica.ready
    assert len(replica.slots) == 2
    assert "lorry_adapters_registered 1.0" in client.metrics()


def test_events_are_listed_and_followed(client: Client, server: LiveServer) -> None:
    client.adapters.load("x", server.adapter(1))
    past = client.events.list()
    assert [event.sequence for event in past] == [*range(1, len(past) + 1)]
    assert client.events.list(after=past[-2].sequence) == past[-1:]
    feed = client.events.follow(after=past[-1].sequence)
    client.adapters.pin("x")
    assert next(feed).kind == "pinned"
    feed.close()  # type: ignore[attr-defined]
    assert [event.sequence for event in client.events][: len(past)] == [e.sequence for e in past]


def test_a_feed_outlives_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is stopped and started again; the new one counts its events from 1."""
    monkeypatch.setattr(ShuttingDown, "retry_after_s", 0.05)
    port = free_port()
    found: queue.Queue[Event] = queue.Queue()
    retry = Retry(deadline_s=WAIT_S, first_pause_s=0.02, pause_max_s=0.1)

    def follow() -> None:
        with Client(f"http://127.0.0.1:{port}", retry=retry) as client:
            for event in client.events.follow():
                found.put(event)
                if event.text == "'last' is pinned":
                    return

    follower = threading.Thread(target=follow)
    with live_server(tmp_path, port=port) as server, Client(server.url) as client:
        follower.start()
        client.adapters.load("x", server.adapter(1))
        lived = client.events.list()
        before = [found.get(timeout=WAIT_S) for _ in lived]
    with live_server(tmp_path, port=port) as server, Client(server.url) as client:
        client.adapters.load("last", server.adapter(2))
        client.adapters.pin("last")
        expected = client.events.list()
        after = [found.get(timeout=WAIT_S) for _ in expected]
    follower.join(WAIT_S)
    assert tuple(before) == lived
    assert tuple(after) == expected


def test_a_server_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    retry = Retry(deadline_s=WAIT_S, first_pause_s=0.02, pause_max_s=0.1)
    answers: list[tuple[str, ...]] = []

    def ask() -> None:
        with Client(f"http://127.0.0.1:{port}", retry=retry) as client:
            answers.append(client.models())

    asking = threading.Thread(target=ask)
    asking.start()
    with live_server(tmp_path, port=port):
        asking.join(WAIT_S)
    assert answers == [(BASE, "tiny-alias")]


def test_no_server_and_another_server_are_told_apart() -> None:
    hasty = Retry(deadline_s=0)
    with (
        Client(f"http://127.0.0.1:{free_port()}", retry=hasty) as nobody,
        pytest.raises(ServerUnreachable, match="No server answers at"),
    ):
        nobody.adapters.list()
    other = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    answering = threading.Thread(target=other.handle_request)
    answering.start()
    with (
        Client(f"http://127.0.0.1:{other.server_port}", retry=hasty) as client,
        pytest.raises(AnswerInvalid, match="answered HTTP 501 in a form that is not Lorry's"),
    ):
        client.adapters.list()
    answering.join(WAIT_S)
    other.server_close()


def test_keys_come_from_the_argument_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LORRY_API_KEY", raising=False)
    with live_server(tmp_path, api_keys=("secret",)) as server:
        with Client(server.url) as client, pytest.raises(Unauthorized):
            client.models()
        with Client(server.url, api_key="secret") as client:
            assert client.models()
            assert "secret" not in repr(client) + repr(vars(client))
        monkeypatch.setenv("LORRY_API_KEY", "secret")
        monkeypatch.setenv("LORRY_URL", server.url)
        with Client() as client:
            assert client.url == server.url
            assert client.models()


def test_a_busy_server_is_asked_again_after_retry_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one adapter, which a request holds: the other load waits its turn, fails, and is
    begun again until the first is gone."""
    monkeypatch.setattr(CapacityExhausted, "retry_after_s", 0.05)
    fake = FakeSettings(max_loras=1, max_cpu_loras=1)
    limits = FleetLimits(ticket_wait_ms=2000, operation_ms=20_000, patience_ms=50)
    with live_server(tmp_path, fake=fake, limits=limits) as server, Client(server.url) as client:
        client.adapters.load("x", server.adapter(1))
        tries: list[int] = []
        held = server.portal.wrap_async_context_manager(
            server.inside.service.supervisor.generate(
                name="x",  # type: ignore[arg-type]
                prompt=(1, 2),
                sampling=sampling(),  # type: ignore[arg-type]
            )
        )
        held.__enter__()

        def see(operation: object) -> None:
            number = operation.id  # type: ignore[attr-defined]
            if operation.phase != "waiting for room" or number in tries:  # type: ignore[attr-defined]
                return
            tries.append(number)
            if len(tries) == 1:
                server.portal.call(leap, 20)
            else:
                held.__exit__(None, None, None)

        assert client.adapters.load("y", server.adapter(2), progress=see).state == "resident"
        assert len(tries) >= 2
