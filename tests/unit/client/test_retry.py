"""Trying again: which codes, how long, and when to give up."""

from dataclasses import replace

import pytest

from lorry.client.retry import NO_RETRY, Attempts, Retry
from lorry.error_catalogue import Entry, RetryPattern, entries
from lorry.errors import (
    AllPinned,
    AnswerLost,
    BrokenInvariant,
    LorryError,
    QueueFull,
    RequestAborted,
    ServerUnreachable,
)


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


PLAIN = Retry(deadline_s=60, first_pause_s=1, pause_max_s=8, jitter=0.5, random=lambda: 0.0)


def made(kind: type[LorryError]) -> LorryError:
    return BrokenInvariant(1, "x") if kind is BrokenInvariant else kind("x")


@pytest.mark.parametrize("each", entries(), ids=lambda each: each.code)
def test_only_codes_that_the_catalogue_calls_retryable_are_tried_again(each: Entry) -> None:
    pause = Attempts(PLAIN).pause_after(made(each.kind))
    assert (pause is not None) is (each.words.retry is RetryPattern.BACKOFF) is each.kind.retryable


def test_pauses_double_up_to_a_bound_and_never_undercut_retry_after() -> None:
    attempts = Attempts(replace(PLAIN, deadline_s=1000))
    told = QueueFull("x", retry_after_s=3)
    assert [attempts.pause_after(told) for _ in range(6)] == [3, 3, 4, 8, 8, 8]
    assert attempts.pause_after(QueueFull("x", retry_after_s=100)) == 100


def test_jitter_only_makes_pauses_longer() -> None:
    late = Attempts(replace(PLAIN, random=lambda: 1.0))
    assert late.pause_after(QueueFull("x", retry_after_s=4)) == 6


def test_no_pause_reaches_beyond_the_deadline() -> None:
    clock = Clock()
    attempts = Attempts(replace(PLAIN, deadline_s=10, now=clock))
    clock.now = 8.5
    assert attempts.pause_after(QueueFull("x")) == 1
    clock.now = 9.5
    assert attempts.pause_after(QueueFull("x")) is None
    assert Attempts(PLAIN).pause_after(QueueFull("x", retry_after_s=61)) is None
    assert Attempts(NO_RETRY).pause_after(ServerUnreachable("x")) is None


def test_a_lost_answer_is_asked_for_again_only_by_calls_that_read() -> None:
    lost = AnswerLost("x")
    assert Attempts(PLAIN).pause_after(lost) is None
    assert Attempts(PLAIN).pause_after(lost, reads=True) is not None


def test_a_request_to_a_model_that_was_ended_is_sent_once_more() -> None:
    ended = RequestAborted("x")
    attempts = Attempts(PLAIN)
    assert attempts.pause_after(ended) is None
    assert attempts.pause_after(ended, resend=True) is not None
    assert attempts.pause_after(ended, resend=True) is None


def test_what_a_person_must_mend_is_never_tried_again() -> None:
    assert Attempts(PLAIN).pause_after(AllPinned("x"), reads=True, resend=True) is None
