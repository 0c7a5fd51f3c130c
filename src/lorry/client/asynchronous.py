"""`lorry.AsyncClient`: a running server, with async. The same as sync.py, word for word, but for
`await`."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import httpx

from lorry.client import calls, flows
from lorry.client.calls import (
    GenerateOptions,
    LoadOptions,
    Message,
    ReplaceOptions,
    UnloadOptions,
)
from lorry.client.flows import Pieces, Progress, Watch, no_progress
from lorry.client.openai_client import openai_client
from lorry.client.retry import Retry
from lorry.client.sync import TIMEOUT_S
from lorry.client.values import Adapter, Answer, Check, Event, Json, Operation, Replica
from lorry.client.wire import AsyncWire, Place
from lorry.errors import LorryError

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class AsyncAdapters:
    """`client.adapters`. Long calls wait for their end; `client.begin` has them without the
    wait."""

    def __init__(self, wire: AsyncWire) -> None:
        """Of the client's own connection."""
        self._wire = wire
        self._retry = wire.place.retry

    async def __aiter__(self) -> AsyncIterator[Adapter]:
        for adapter in await self.list():
            yield adapter

    async def list(self) -> tuple[Adapter, ...]:
        """All, by name."""
        return await self._wire.run(flows.all_adapters(self._retry))

    async def get(self, name: str) -> Adapter:
        """One. Raises `AdapterNotFound`."""
        return await self._wire.run(flows.request(calls.get_adapter(name), self._retry))

    async def load(
        self,
        name: str,
        source: str,
        *,
        progress: Progress = no_progress,
        **options: Unpack[LoadOptions],
    ) -> Adapter:
        """Load the folder `source` of the server's machine under a name that is new. Raises
        `AdapterConflict` for one that is taken (unless `replace`), `AdapterInvalid` with every
        problem."""
        return await self._long(name, calls.load(name, source, **options), progress)

    async def register(self, name: str, source: str, **options: Unpack[LoadOptions]) -> Adapter:
        """The same, but it is read into memory when the first request comes."""
        call = calls.load(name, source, register_only=True, **options)
        return await self._long(name, call, no_progress)

    async def replace(
        self,
        name: str,
        source: str,
        *,
        progress: Progress = no_progress,
        **options: Unpack[ReplaceOptions],
    ) -> Adapter:
        """Serve another version under a name that there is. Running requests end on the version
        they began with. Raises `VersionMismatch` when `if_match` is not what is served."""
        return await self._long(name, calls.replace(name, source, **options), progress)

    async def rollback(
        self, name: str, version: str | None = None, *, progress: Progress = no_progress
    ) -> Adapter:
        """Serve the version before again, or another of `previous`."""
        return await self._long(name, calls.rollback(name, version), progress)

    async def prefetch(self, name: str, *, progress: Progress = no_progress) -> Adapter:
        """Bring it into memory before anybody asks for it."""
        return await self._long(name, calls.prefetch(name), progress)

    async def unload(
        self, name: str, *, progress: Progress = no_progress, **options: Unpack[UnloadOptions]
    ) -> Operation:
        """Stop serving it: no new requests, a while for the running ones, then out of every
        tier."""
        call = calls.unload(name, **options)
        return await self._wire.run(flows.long_call(call, self._retry, progress))

    async def pin(self, name: str, *, if_match: str | None = None) -> Adapter:
        """Never evict it."""
        return await self._patch(name, {"pinned": True}, if_match)

    async def unpin(self, name: str, *, if_match: str | None = None) -> Adapter:
        """It may be evicted when it is idle."""
        return await self._patch(name, {"pinned": False}, if_match)

    async def label(
        self, name: str, labels: Mapping[str, str], *, if_match: str | None = None
    ) -> Adapter:
        """Overwrite its labels."""
        return await self._patch(name, {"labels": dict(labels)}, if_match)

    async def check(self, source: str, name: str | None = None) -> Check:
        """What a load would find and do; changes nothing."""
        return await self._wire.run(flows.request(calls.check(source, name), self._retry))

    async def diff(self, a: str, b: str) -> Json:
        """What tells two adapters apart; each is a name, `name@version`, or a folder of the
        server's machine."""
        return await self._wire.run(flows.request(calls.diff(a, b), self._retry))

    async def _long(self, name: str, call: calls.Call[Operation], progress: Progress) -> Adapter:
        return await self._wire.run(flows.long_call_on(name, call, self._retry, progress))

    async def _patch(self, name: str, changes: Json, if_match: str | None) -> Adapter:
        call = calls.patch(name, changes, if_match)
        return await self._wire.run(flows.request(call, self._retry))


class AsyncBegin:
    """`client.begin`: the long calls, begun and not waited for."""

    def __init__(self, wire: AsyncWire) -> None:
        """Of the client's own connection."""
        self._wire = wire

    async def load(self, name: str, source: str, **options: Unpack[LoadOptions]) -> Operation:
        """As `adapters.load`."""
        return await self._run(calls.load(name, source, **options))

    async def replace(self, name: str, source: str, **options: Unpack[ReplaceOptions]) -> Operation:
        """As `adapters.replace`."""
        return await self._run(calls.replace(name, source, **options))

    async def rollback(self, name: str, version: str | None = None) -> Operation:
        """As `adapters.rollback`."""
        return await self._run(calls.rollback(name, version))

    async def prefetch(self, name: str) -> Operation:
        """As `adapters.prefetch`."""
        return await self._run(calls.prefetch(name))

    async def unload(self, name: str, **options: Unpack[UnloadOptions]) -> Operation:
        """As `adapters.unload`."""
        return await self._run(calls.unload(name, **options))

    async def _run(self, call: calls.Call[Operation]) -> Operation:
        return await self._wire.run(flows.request(call, self._wire.place.retry))


class AsyncOperations:
    """`client.operations`: long calls under way, and those that ended lately."""

    def __init__(self, wire: AsyncWire) -> None:
        """Of the client's own connection."""
        self._wire = wire
        self._retry = wire.place.retry

    async def list(self) -> tuple[Operation, ...]:
        """All that the server remembers, oldest first."""
        return await self._wire.run(flows.request(calls.list_operations(), self._retry))

    async def get(self, operation: Operation | int) -> Operation:
        """How far it is. Raises `OperationNotFound`."""
        call = calls.get_operation(calls.number_of(operation))
        return await self._wire.run(flows.request(call, self._retry))

    async def wait(
        self,
        operation: Operation | int,
        *,
        timeout_s: float | None = None,
        progress: Progress = no_progress,
    ) -> Operation:
        """Its end. Raises its own error when it failed or was cancelled, and `TimeoutError`, upon
        which it goes on, after `timeout_s`."""
        begun = operation if isinstance(operation, Operation) else await self.get(operation)
        return await self._wire.run(flows.follow(begun, self._retry, progress, timeout_s))

    async def cancel(self, operation: Operation | int) -> Operation:
        """Stop it, as far as that is still possible; how it is now."""
        call = calls.cancel_operation(calls.number_of(operation))
        return await self._wire.run(flows.request(call, self._retry))


class AsyncEvents:
    """`client.events`: what happened to adapters and engines, with reasons for people."""

    def __init__(self, wire: AsyncWire) -> None:
        """Of the client's own connection."""
        self._wire = wire

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in await self.list():
            yield event

    async def list(self, after: int = 0, *, name: str | None = None) -> tuple[Event, ...]:
        """Those that the server remembers, with a sequence number above `after`; with `name`,
        those of one adapter."""
        return await self._wire.run(
            flows.request(calls.list_events(after, name), self._wire.place.retry)
        )

    async def follow(self, after: int = 0, *, name: str | None = None) -> AsyncGenerator[Event]:
        """The same, and then those that come, without end. A lost connection is made again; once
        that fails for `Retry.deadline_s`, its error is raised."""
        watch = Watch(after, name, self._wire.place.retry)
        while True:
            try:
                async with aclosing(self._wire.stream(watch.call())) as feed:
                    async for data in feed:
                        event = flows.event_of(data)
                        watch.seen(event)
                        yield event
                lost: LorryError = flows.ended_feed(self._wire.place.url)
            except LorryError as error:
                lost = error
            await self._wire.run(watch.resume(lost))


class AsyncClient:
    """A running Lorry server. A context manager; on asyncio or trio.

    Every method raises the class of `lorry.errors` whose code the server answered with, and tries
    again where the catalogue of errors says so."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        trust_env: bool = False,
    ) -> None:
        """`url` and `api_key` are those of `LORRY_URL` and `LORRY_API_KEY` unless given.
        `transport` is for own certificates, sockets and tests; `trust_env` obeys proxy variables.
        Raises `ServerUnreachable` for what is no URL."""
        place = Place.at(url, api_key, timeout_s, retry or Retry())
        self._wire = AsyncWire(place, transport, trust_env=trust_env)
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self._wire.aclose)
        self._openai: AsyncOpenAI | None = None
        self.adapters = AsyncAdapters(self._wire)
        self.begin = AsyncBegin(self._wire)
        self.operations = AsyncOperations(self._wire)
        self.events = AsyncEvents(self._wire)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    async def aclose(self) -> None:
        """Close all connections; no calls after this."""
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._wire.place.url

    async def models(self) -> tuple[str, ...]:
        """Every name that can be asked: the base's and the adapters'."""
        return await self._wire.run(flows.request(calls.list_models(), self._wire.place.retry))

    async def model(self, name: str) -> Json:
        """OpenAI's card of the base, of an adapter or of `name@version`. Raises
        `AdapterNotFound`."""
        return await self._wire.run(flows.request(calls.get_model(name), self._wire.place.retry))

    async def replicas(self) -> tuple[Replica, ...]:
        """Every engine, and what its slots hold."""
        return await self._wire.run(flows.request(calls.list_replicas(), self._wire.place.retry))

    async def metrics(self) -> str:
        """What Prometheus would read."""
        return await self._wire.run(flows.request(calls.metrics(), self._wire.place.retry))

    async def generate(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Answer:
        """A completion by an adapter, by `name@version` or by the base."""
        call = calls.generate(model, prompt, **options)
        return await self._wire.run(flows.request(call, self._wire.place.retry))

    async def chat(
        self, model: str, messages: Sequence[Message] | str, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """The model's next message; a text is one message of a user."""
        call = calls.chat(model, messages, **options)
        return await self._wire.run(flows.request(call, self._wire.place.retry))

    def generate_stream(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[str]:
        """The text of `generate` as it comes."""
        return self._pieces(calls.generate(model, prompt, stream=True, **options))

    def chat_stream(
        self, model: str, messages: Sequence[Message] | str, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[str]:
        """The text of `chat` as it comes."""
        return self._pieces(calls.chat(model, messages, stream=True, **options))

    async def _pieces(self, call: calls.Call[Answer]) -> AsyncGenerator[str]:
        pieces = Pieces(call, self._wire.place.retry, self.url)
        while True:
            try:
                async with aclosing(self._wire.stream(call)) as feed:
                    async for data in feed:
                        if piece := pieces.read(data):
                            yield piece
                pieces.end()
                return
            except LorryError as error:
                lost = error
            await self._wire.run(pieces.again(lost))

    @property
    def openai(self) -> "AsyncOpenAI":
        """OpenAI's own client on this server, for all that it can; `pip install openai`. It obeys
        the server's word on what to try again."""
        if self._openai is None:
            made = openai_client("AsyncOpenAI", self._wire.place)
            self._stack.push_async_callback(made.close)
            self._openai = made
        return self._openai
