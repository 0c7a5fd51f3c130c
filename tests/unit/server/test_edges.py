"""Keys, request ids, bodies, error shapes and the orderly end, each alone."""

import json
from typing import Any

import anyio
import pytest
from fastapi.exceptions import RequestValidationError

from lorry.errors import (
    AdapterNotFound,
    CallerError,
    LorryError,
    QueueFull,
    RequestAborted,
    RequestInvalid,
    ShuttingDown,
    Unauthorized,
)
from lorry.server import catalogue
from lorry.server.auth import KeyRing
from lorry.server.errors import TYPES, as_lorry_error, error_response, from_validation, to_json
from lorry.server.gate import Gate
from lorry.server.settings import ServerSettings
from lorry.server.shutdown import Shutdown

SETTINGS = ServerSettings(served_model_names=("tiny",), api_keys=("one", "zwei"), max_body_bytes=10)


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


def all_errors(kind: type[LorryError] = LorryError) -> list[type[LorryError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in all_errors(below))]


@pytest.mark.anyio
async def test_every_error_has_a_type_and_a_page() -> None:
    entries = (await catalogue.list_errors())["data"]
    for kind in all_errors():
        assert kind.status in TYPES
        entry = await catalogue.show_error(kind.code)
        assert entry["meaning"]
        assert entry["action"].endswith(".")
        assert entry in entries


def test_codes_are_unique_within_the_catalogue() -> None:
    ours = [kind for kind in all_errors() if kind.__module__ == "lorry.errors"]
    assert len({kind.code for kind in ours}) == len(ours)


def test_a_body_has_openais_shape_and_our_advice() -> None:
    answer = error_response(RequestInvalid("No.", param="top_p", details=["a", "b"]))
    body = json.loads(bytes(answer.body))["error"]
    assert answer.status_code == 400
    assert body == {
        "message": "No.",
        "type": "BadRequestError",
        "param": "top_p",
        "code": "request_invalid",
        "action": RequestInvalid.action,
        "details": ["a", "b"],
    }


def test_retry_after_comes_where_it_helps() -> None:
    assert error_response(QueueFull("full")).headers["retry-after"] == "1"
    assert "retry-after" not in error_response(AdapterNotFound("no")).headers
    assert error_response(Unauthorized("who")).headers["www-authenticate"] == "Bearer"


def test_a_bug_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    shown = as_lorry_error(KeyError("secret"), "r-7")
    assert "secret" not in shown.message
    assert "r-7" in shown.message
    assert "secret" in caplog.text
    assert "r-7" in caplog.text


def test_the_error_in_a_group_is_found() -> None:
    inner = QueueFull("full")
    group = ExceptionGroup("g", [ValueError("x"), ExceptionGroup("h", [inner])])
    assert as_lorry_error(group) is inner


def test_half_a_surrogate_pair_does_no_harm() -> None:
    assert to_json({"a": "x\ud800"}) == b'{"a":"x?"}'


def problem(**entry: Any) -> RequestValidationError:
    return RequestValidationError([{"type": "x", "loc": ("body",), "msg": "m"} | entry])


def test_validation_names_the_field() -> None:
    error = from_validation(problem(loc=("body", "stop", "list[str]", 3), msg="bad"), "")
    assert (error.message, error.param) == ("stop.3: bad.", "stop.3")
    parameter = from_validation(problem(loc=("query", "limit"), msg="low"), "")
    assert parameter.param == "limit"


def test_a_missing_content_type_is_named() -> None:
    assert "application/json" in from_validation(problem(), "text/plain").message
    assert from_validation(problem(msg="odd"), "application/json").message == "odd."


@pytest.mark.parametrize("given", [b"Bearer one", b"bearer zwei", b"Bearer  one "])
def test_any_of_the_keys_opens(given: bytes) -> None:
    KeyRing(("one", "zwei")).check("/metrics", {b"authorization": given})


@pytest.mark.parametrize("given", [b"", b"Bearer", b"Bearer two", b"Basic one", b"one", b"\xff"])
def test_no_other_key_opens(given: bytes) -> None:
    with pytest.raises(Unauthorized):
        KeyRing(("one", "zwei")).check("/metrics", {b"authorization": given})


def test_health_is_open_and_so_is_all_without_keys() -> None:
    KeyRing(("one",)).check("/health", {})
    KeyRing(()).check("/metrics", {})


class Call:
    """One request through a gate."""

    def __init__(self, path: str = "/x", headers: dict[bytes, bytes] | None = None) -> None:
        key = {b"authorization": b"Bearer one"}
        self.scope = {
            "type": "http",
            "path": path,
            "headers": list((key | (headers or {})).items()),
        }
        self.shutdown = Shutdown()
        self.bodies = [b"123456", b"789012"]
        self.sent: list[Any] = []
        self.fails: Exception | None = None
        self.read = 0

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        for _ in range(self.read):
            await receive()
        if self.fails is not None:
            raise self.fails
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run(self) -> tuple[int, dict[str, str], bytes]:
        async def receive() -> Any:
            return {"type": "http.request", "body": self.bodies.pop(0), "more_body": True}

        async def send(message: Any) -> None:
            self.sent.append(message)

        await Gate(self.app, SETTINGS, self.shutdown)(self.scope, receive, send)
        start, body = self.sent
        headers = {k.decode().lower(): v.decode() for k, v in start["headers"]}
        return start["status"], headers, body["body"]


@pytest.mark.anyio
async def test_a_sane_request_id_is_kept_and_others_are_replaced() -> None:
    _, headers, _ = await Call(headers={b"x-request-id": b"abc-1"}).run()
    assert headers["x-request-id"] == "abc-1"
    for odd in (b"a\r\nb", b"x" * 200, b"", b"\xff"):
        _, headers, _ = await Call(headers={b"x-request-id": odd}).run()
        assert len(headers["x-request-id"]) == 32


@pytest.mark.anyio
async def test_unknown_paths_ask_for_the_key_too() -> None:
    status, headers, body = await Call("/nowhere", {b"authorization": b"Bearer no"}).run()
    assert status == 401
    assert json.loads(body)["error"]["code"] == "unauthorized"
    assert headers["x-request-id"]


@pytest.mark.anyio
@pytest.mark.parametrize("announced", [b"", b"11", b"4"])
async def test_a_long_body_is_refused_whatever_it_announces(announced: bytes) -> None:
    call = Call(headers={b"content-length": announced} if announced else None)
    call.read = 2
    status, _, body = await call.run()
    assert status == 413
    assert b"body_too_large" in body


@pytest.mark.anyio
async def test_a_bug_becomes_a_500_with_the_request_id() -> None:
    call = Call(headers={b"x-request-id": b"r-9"})
    call.fails = RuntimeError("inside")
    status, _, body = await call.run()
    assert status == 500
    assert b"r-9" in body
    assert b"inside" not in body


@pytest.mark.anyio
async def test_a_stopping_server_takes_nothing_but_health() -> None:
    call = Call()
    call.shutdown.begin()
    status, headers, _ = await call.run()
    assert (status, headers["retry-after"]) == (503, "5")
    call = Call("/health")
    call.shutdown.begin()
    assert (await call.run())[0] == 200


@pytest.mark.anyio
async def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await Gate(Call().app, SETTINGS, Shutdown())({"type": "websocket"}, send, send)  # type: ignore[arg-type]
    assert sent[0]["type"] == "websocket.close"


@pytest.mark.anyio
async def test_requests_end_at_their_deadline_feeds_at_the_beginning_of_the_end() -> None:
    shutdown = Shutdown()
    with pytest.raises(RequestAborted, match="request-timeout"), shutdown.request(0):
        await anyio.sleep_forever()
    shutdown.begin()
    with pytest.raises(ShuttingDown):
        shutdown.check()


@pytest.mark.anyio
async def test_feeds_end_first_and_requests_when_time_is_up() -> None:
    shutdown = Shutdown()
    ends: list[str] = []

    async def feed() -> None:
        with shutdown.feed():
            await anyio.sleep_forever()
        ends.append("feed")

    async def request() -> None:
        try:
            with shutdown.request():
                await anyio.sleep_forever()
        except ShuttingDown:
            ends.append("request")

    async with anyio.create_task_group() as group:
        group.start_soon(feed)
        group.start_soon(request)
        await anyio.wait_all_tasks_blocked()
        shutdown.begin()
        await anyio.wait_all_tasks_blocked()
        assert ends == ["feed"]
        shutdown.abort()
    assert ends == ["feed", "request"]


def test_caller_errors_are_not_our_fault() -> None:
    assert all(kind.status < 500 for kind in all_errors(CallerError))
