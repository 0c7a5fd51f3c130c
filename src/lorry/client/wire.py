"""Carries out what flows.py asks for: over httpx, once with threads and once with async."""

import os
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import anyio
import httpx

from lorry.client.answers import body_of, checked_url, wire_error
from lorry.client.calls import Call
from lorry.client.flows import Flow, Pause
from lorry.client.retry import Retry
from lorry.client.sse import EventReader
from lorry.client.values import Json
from lorry.errors import AnswerInvalid, LorryError, RequestInvalid

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"

CONNECT_TIMEOUT_S = 5.0

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=3.0)
"""As many connections as there are calls: none waits for another's. An idle one is dropped before
the server drops it, which is after 5 s: a call sent in that moment would be lost."""

HTTP_ERRORS = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError)
"""`ValueError` is for what cannot be put into a request: half a character, or NaN."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server is, and how it is spoken to."""

    url: str
    api_key: str | None = field(repr=False)
    timeout_s: float
    retry: Retry

    @classmethod
    def at(cls, url: str | None, api_key: str | None, timeout_s: float, retry: Retry) -> "Place":
        """What is not given comes from `LORRY_URL` and `LORRY_API_KEY`. Raises `ServerUnreachable`
        for what is no URL, `RequestInvalid` for what can be no key."""
        given = os.environ.get("LORRY_URL") or DEFAULT_URL if url is None else url
        key = os.environ.get("LORRY_API_KEY") if api_key is None else api_key
        if not (key or "").isascii() or not (key or " ").isprintable():
            raise RequestInvalid("The call cannot be sent: the API key is not plain ASCII.")
        return cls(checked_url(given), key or None, timeout_s, retry)

    @property
    def headers(self) -> dict[str, str]:
        """For every call."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def request(self, call: Call[Any]) -> dict[str, Any]:
        """A call as httpx takes it."""
        timeout_s = call.timeout_s or self.timeout_s
        return {
            "method": call.method,
            "url": call.path,
            "params": dict(call.params),
            "headers": dict(call.headers),
            "json": call.body,
            "timeout": httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
        }

    def read(self, call: Call[Any], answer: httpx.Response) -> Json:
        """The body of an answer, or its error."""
        if call.is_text and answer.is_success:
            return {"text": answer.text}
        retry_after = answer.headers.get("Retry-After")
        return body_of(answer.status_code, answer.content, retry_after, self.url)

    def strange(self, answer: httpx.Response) -> LorryError | None:
        """The error for an answer that is no stream of events although it says it is well."""
        kind = answer.headers.get("Content-Type", "")
        if answer.is_success and not kind.startswith("text/event-stream"):
            return AnswerInvalid(
                f"{self.url} answered HTTP {answer.status_code} in a form that is not Lorry's."
            )
        return None

    def lost(self, call: Call[Any], error: Exception) -> LorryError:
        """Our error for one of httpx's."""
        if isinstance(error, ValueError):
            return RequestInvalid(f"The call cannot be sent: {ascii(str(error))[1:-1]}.")
        return wire_error(error, self.url, str(call))


class Wire:
    """With threads; may be shared by them."""

    def __init__(
        self, place: Place, transport: httpx.BaseTransport | None, *, trust_env: bool
    ) -> None:
        """Nothing is connected yet."""
        self.place = place
        self._http = httpx.Client(
            base_url=place.url,
            headers=place.headers,
            limits=LIMITS,
            transport=transport,
            trust_env=trust_env,
        )

    def close(self) -> None:
        """No calls after this."""
        self._http.close()

    def run(self, flow: Flow[T]) -> T:
        """A flow to its end."""
        try:
            step = next(flow)
            while True:
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    step = flow.send({})
                    continue
                try:
                    told = self._exchange(step.call)
                except LorryError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(told)
        except StopIteration as end:
            return cast(T, end.value)

    def _exchange(self, call: Call[Any]) -> Json:
        try:
            answer = self._http.request(**self.place.request(call))
        except HTTP_ERRORS as error:
            lost = self.place.lost(call, error)
            raise lost from error
        return self.place.read(call, answer)

    def stream(self, call: Call[Any]) -> Iterator[str]:
        """The data of each event."""
        try:
            with self._http.stream(**self.place.request(call)) as answer:
                if not answer.is_success:
                    answer.read()
                    self.place.read(call, answer)
                strange = self.place.strange(answer)
                if strange is not None:
                    raise strange
                reader = EventReader()
                for piece in answer.iter_bytes():
                    yield from reader.feed(piece)
        except HTTP_ERRORS as error:
            lost = self.place.lost(call, error)
            raise lost from error


class AsyncWire:
    """With async, on asyncio or trio."""

    def __init__(
        self, place: Place, transport: httpx.AsyncBaseTransport | None, *, trust_env: bool
    ) -> None:
        """Nothing is connected yet."""
        self.place = place
        self._http = httpx.AsyncClient(
            base_url=place.url,
            headers=place.headers,
            limits=LIMITS,
            transport=transport,
            trust_env=trust_env,
        )

    async def aclose(self) -> None:
        """No calls after this."""
        await self._http.aclose()

    async def run(self, flow: Flow[T]) -> T:
        """A flow to its end."""
        try:
            step = next(flow)
            while True:
                if isinstance(step, Pause):
                    await anyio.sleep(step.seconds)
                    step = flow.send({})
                    continue
                try:
                    told = await self._exchange(step.call)
                except LorryError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(told)
        except StopIteration as end:
            return cast(T, end.value)

    async def _exchange(self, call: Call[Any]) -> Json:
        try:
            answer = await self._http.request(**self.place.request(call))
        except HTTP_ERRORS as error:
            lost = self.place.lost(call, error)
            raise lost from error
        return self.place.read(call, answer)

    async def stream(self, call: Call[Any]) -> AsyncGenerator[str]:
        """The data of each event."""
        try:
            async with self._http.stream(**self.place.request(call)) as answer:
                if not answer.is_success:
                    await answer.aread()
                    self.place.read(call, answer)
                strange = self.place.strange(answer)
                if strange is not None:
                    raise strange
                reader = EventReader()
                async for piece in answer.aiter_bytes():
                    for data in reader.feed(piece):
                        yield data
        except HTTP_ERRORS as error:
            lost = self.place.lost(call, error)
            raise lost from error
