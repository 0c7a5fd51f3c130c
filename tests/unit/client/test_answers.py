"""What comes over the wire becomes JSON or the class of its code."""

import email.utils
import json
import time

import httpx
import pytest

from lorry.client.answers import body_of, checked_url, seconds, told_error, wire_error
from lorry.error_catalogue import Entry, entries
from lorry.errors import (
    AnswerInvalid,
    AnswerLost,
    BrokenInvariant,
    LorryError,
    QueueFull,
    ServerUnreachable,
)
from lorry.server.errors import error_body


def answered(status: int, value: object, retry_after: str | None = None) -> object:
    return body_of(status, json.dumps(value).encode(), retry_after, "http://x")


@pytest.mark.parametrize("each", entries(), ids=lambda each: each.code)
def test_every_code_is_raised_as_its_own_class(each: Entry) -> None:
    broken = each.kind is BrokenInvariant
    sent = BrokenInvariant(4, "m") if broken else each.kind("m", param="p", details=("d", "e"))
    with pytest.raises(each.kind) as caught:
        answered(each.kind.status, error_body(sent))
    error = caught.value
    assert type(error) is each.kind
    assert (error.message, error.code, error.status) == (sent.message, sent.code, sent.status)
    assert error.action == each.kind.action
    if not broken:
        assert (error.param, error.details) == ("p", ("d", "e"))
        assert error.__notes__ == [error.action]


def test_a_code_of_another_release_is_kept_with_its_words() -> None:
    told = {"code": "too_green", "message": "m", "action": "Paint it.", "details": None}
    error = told_error(told, 418)
    assert isinstance(error, LorryError)
    assert (error.code, error.status, error.action) == ("too_green", 418, "Paint it.")
    assert type(error).__name__ == "TooGreen"
    assert not error.retryable


def test_the_servers_own_advice_and_retry_after_win() -> None:
    told = {"code": "queue_full", "message": "m", "action": "Use our other one."}
    with pytest.raises(QueueFull) as caught:
        answered(429, {"error": told}, "7")
    assert (caught.value.action, caught.value.retry_after_s) == ("Use our other one.", 7.0)
    assert QueueFull("m").action != "Use our other one."


@pytest.mark.parametrize("content", [b"<html>", b"[1]", b"3", b'{"error": "text"}', b"\xff"])
def test_what_is_not_lorrys_is_named_so(content: bytes) -> None:
    for status in (200, 404, 502):
        if status == 200 and content.startswith(b"{"):
            continue
        with pytest.raises(AnswerInvalid, match=f"http://x answered HTTP {status}"):
            body_of(status, content, None, "http://x")


def test_an_empty_answer_is_an_empty_object() -> None:
    assert body_of(204, b"", None, "http://x") == {}


def test_retry_after_may_be_seconds_or_a_date() -> None:
    assert seconds(None) is None
    assert seconds("3") == 3
    assert seconds("-3") == 0
    assert seconds("soon") is None
    at = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < (seconds(at) or 0) < 110


@pytest.mark.parametrize(
    "url", ["", "nonsense", "ftp://x", "http://[", "http://x:99999", "http://"]
)
def test_a_url_that_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(ServerUnreachable, match="is no usable URL"):
        checked_url(url)


def test_urls_may_end_with_a_slash_or_v1() -> None:
    for url in ("http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"):
        assert checked_url(url) == "http://x:1"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError("refused"), ServerUnreachable),
        (httpx.ConnectTimeout("slow"), ServerUnreachable),
        (httpx.PoolTimeout("busy"), ServerUnreachable),
        (httpx.ReadTimeout("slow"), AnswerLost),
        (httpx.ReadError("reset"), AnswerLost),
        (httpx.RemoteProtocolError("cut"), AnswerLost),
    ],
)
def test_errors_of_the_wire_say_whether_a_call_was_sent(
    error: Exception, kind: type[LorryError]
) -> None:
    assert type(wire_error(error, "http://x", "GET /v1/adapters")) is kind


def test_a_failed_handshake_is_told_from_a_refused_connection() -> None:
    error = wire_error(httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER]"), "https://x", "GET /")
    assert type(error) is ServerUnreachable
    assert "TLS: [SSL: WRONG_VERSION_NUMBER]" in error.message
