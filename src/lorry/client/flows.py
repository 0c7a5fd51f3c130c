"""What the client does, without doing it: generators that yield what to send and how long to pause,
and are told what came back. The two clients only differ in how they carry that out."""

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from lorry.client import calls
from lorry.client.answers import told_error, wire_error
from lorry.client.calls import Call
from lorry.client.retry import Attempts, Retry
from lorry.client.values import Adapter, Answer, Event, Json, Operation
from lorry.errors import AnswerLost, LorryError

T = TypeVar("T")

POLL_FIRST_S = 0.05
POLL_MAX_S = 1.0
"""Between two looks at an operation: quick at first, since most end soon, then 1.5 times longer
each time."""


STEADY_S = 10.0
"""A feed that was quiet for so long was connected: a connection that is not made fails sooner. Its
loss is the first one, however long ago the feed began."""


@dataclass(frozen=True, slots=True)
class Send:
    """Make this exchange; the answer's JSON is sent back, or its error thrown in."""

    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for so many seconds."""

    seconds: float


Flow = Generator[Send | Pause, Json, T]
Progress = Callable[[Operation], None]
"""Told of each look at an operation that runs."""


def no_progress(_: Operation) -> None:
    """For callers who do not watch."""


def once(call: Call[T], attempts: Attempts) -> Flow[T]:
    """One call, and again as the catalogue says."""
    while True:
        try:
            told = yield Send(call)
        except LorryError as error:
            pause = attempts.pause_after(error, reads=call.reads, resend=call.resend)
            if pause is None:
                raise
        else:
            return call.read(told)
        yield Pause(pause)


def request(call: Call[T], retry: Retry) -> Flow[T]:
    """One call with tries of its own."""
    return (yield from once(call, Attempts(retry)))


def all_adapters(retry: Retry) -> Flow[tuple[Adapter, ...]]:
    """Page after page."""
    attempts = Attempts(retry)
    found: list[Adapter] = []
    after: str | None = ""
    while after is not None:
        page = yield from once(calls.page_of_adapters(after), attempts)
        found += map(Adapter.read, page.get("data") or ())
        after = page.get("next") if page.get("has_more") else None
    return tuple(found)


def long_call(call: Call[Operation], retry: Retry, progress: Progress) -> Flow[Operation]:
    """Begin an operation and follow it to its end. A failure changes nothing, so one that the
    catalogue calls retryable is begun again."""
    attempts = Attempts(retry)
    while True:
        operation = yield from once(call, attempts)
        try:
            return (yield from follow(operation, retry, progress))
        except LorryError as error:
            pause = None if _unsure(error) else attempts.pause_after(error)
            if pause is None:
                raise
        yield Pause(pause)


def _unsure(error: LorryError) -> bool:
    """Whether nobody knows how the operation ended."""
    return error.code in ("answer_lost", "server_unreachable", "operation_not_found")


def long_call_on(
    name: str, call: Call[Operation], retry: Retry, progress: Progress
) -> Flow[Adapter]:
    """The same, and the adapter as it is then."""
    yield from long_call(call, retry, progress)
    return (yield from request(calls.get_adapter(name), retry))


def follow(
    operation: Operation,
    retry: Retry,
    progress: Progress,
    timeout_s: float | None = None,
) -> Flow[Operation]:
    """Look at an operation until it has ended. Raises its own error when it failed, and
    `TimeoutError`, upon which it goes on, after `timeout_s`."""
    began = retry.now()
    pause = POLL_FIRST_S
    seen = operation
    while seen.running:
        progress(seen)
        if timeout_s is not None and retry.now() - began + pause > timeout_s:
            raise TimeoutError(
                f"{seen.kind} of {seen.name!r} (operation {seen.id}) has not ended within "
                f"{timeout_s:g} s; it goes on, and is {seen.phase or 'running'}."
            )
        yield Pause(pause)
        pause = min(POLL_MAX_S, pause * 1.5)
        seen = yield from request(calls.get_operation(operation.id), retry)
        if seen.began != operation.began:  # ids start again with the server
            raise AnswerLost(
                f"The server was started again before operation {operation.id} had ended."
            )
    if seen.status not in ("failed", "cancelled"):
        return seen
    raise told_error(dict(seen.error or {"message": f"the operation was {seen.status}"}))


class Watch:
    """Where a reader of events is, over lost connections and new lives of the server."""

    def __init__(self, after: int, name: str | None, retry: Retry) -> None:
        """Events above `after` are wanted, of all adapters or of one."""
        self._after = after
        self._name = name
        self._last: Event | None = None
        self._retry = retry
        self._attempts = Attempts(retry)
        self._asked_s = retry.now()

    def call(self) -> Call[None]:
        """What to ask for next."""
        self._asked_s = self._retry.now()
        return calls.follow_events(self._after, self._name)

    def seen(self, event: Event) -> None:
        """This one was given on."""
        self._after, self._last = event.sequence, event
        self._attempts.began_well()

    def resume(self, error: LorryError) -> Flow[None]:
        """After a lost connection: pause, and find out whether it is still the same life of the
        server; a new one counts its events from 1 again. Raises `error` when time is over."""
        if self._retry.now() - self._asked_s >= STEADY_S:
            self._attempts.began_well()
        pause = self._attempts.pause_after(error, reads=True)
        if pause is None:
            raise error
        yield Pause(pause)
        if self._last is None:
            return
        remembered = yield from once(calls.list_events(self._last.sequence - 1), self._attempts)
        first = remembered[0] if remembered else None
        if first is None or first.sequence < self._last.sequence or _differ(first, self._last):
            self._after, self._last = 0, None


def _differ(found: Event, last: Event) -> bool:
    """Whether an event is another one with the same number. A higher number says that the history
    was cut, which the reader sees by the gap."""
    return found.sequence == last.sequence and (found.at, found.text) != (last.at, last.text)


def ended_feed(url: str) -> AnswerLost:
    """For a feed that the server closed, which it does when it stops."""
    return AnswerLost(f"The feed of events from {url} ended.")


class Pieces:
    """A streamed answer of a model: what its events say, and whether it may be asked for again."""

    def __init__(self, call: Call[Answer], retry: Retry, url: str) -> None:
        """Nothing has come."""
        self.call = call
        self._attempts = Attempts(retry)
        self._url = url
        self._begun = False
        self.done = False

    def read(self, data: str) -> str:
        """The text in one event, maybe none. Raises the error that the stream ended with."""
        if data.strip() == "[DONE]":
            self.done = True
            return ""
        told = _object(data)
        if isinstance(told.get("error"), dict):
            raise told_error(told["error"])
        piece = calls.piece_of(told)
        self._begun = self._begun or bool(piece)
        return piece

    def end(self) -> None:
        """The body has ended. Raises `AnswerLost` when the answer had not."""
        if not self.done:
            raise wire_error(ConnectionError("it ended early"), self._url, str(self.call))

    def again(self, error: LorryError) -> Flow[None]:
        """Pause before another try. Raises `error` once the reader has seen a part."""
        pause = None if self._begun else self._attempts.pause_after(error, resend=True)
        if pause is None:
            raise error
        yield Pause(pause)


def event_of(data: str) -> Event:
    """One event of the feed."""
    told = _object(data)
    if isinstance(told.get("error"), dict):
        raise told_error(told["error"])
    return Event.read(told)


def _object(data: str) -> Json:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
