"""`lorry.Client`: a running server, with threads."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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
from lorry.client.values import Adapter, Answer, Check, Event, Json, Operation, Replica
from lorry.client.wire import Place, Wire
from lorry.errors import LorryError

if TYPE_CHECKING:
    from openai import OpenAI

TIMEOUT_S = 30.0
"""For one answer. Long calls are followed by looking again, so none of them takes long."""


class Adapters:
    """`client.adapters`. Long calls wait for their end; `client.begin` has them without the
    wait."""

    def __init__(self, wire: Wire) -> None:
        """Of the client's own connection."""
        self._wire = wire
        self._retry = wire.place.retry

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self.list())

    def list(self) -> tuple[Adapter, ...]:
        """All, by name."""
        return self._wire.run(flows.all_adapters(self._retry))

    def get(self, name: str) -> Adapter:
        """One. Raises `AdapterNotFound`."""
        return self._wire.run(flows.request(calls.get_adapter(name), self._retry))

    def load(
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
        return self._long(name, calls.load(name, source, **options), progress)

    def register(self, name: str, source: str, **options: Unpack[LoadOptions]) -> Adapter:
        """The same, but it is read into memory when the first request comes."""
        call = calls.load(name, source, register_only=True, **options)
        return self._long(name, call, no_progress)

    def replace(
        self,
        name: str,
        source: str,
        *,
        progress: Progress = no_progress,
        **options: Unpack[ReplaceOptions],
    ) -> Adapter:
        """Serve another version under a name that there is. Running requests end on the version
        they began with. Raises `VersionMismatch` when `if_match` is not what is served."""
        return self._long(name, calls.replace(name, source, **options), progress)

    def rollback(
        self, name: str, version: str | None = None, *, progress: Progress = no_progress
    ) -> Adapter:
        """Serve the version before again, or another of `previous`."""
        return self._long(name, calls.rollback(name, version), progress)

    def prefetch(self, name: str, *, progress: Progress = no_progress) -> Adapter:
        """Bring it into memory before anybody asks for it."""
        return self._long(name, calls.prefetch(name), progress)

    def unload(
        self, name: str, *, progress: Progress = no_progress, **options: Unpack[UnloadOptions]
    ) -> Operation:
        """Stop serving it: no new requests, a while for the running ones, then out of every
        tier."""
        call = calls.unload(name, **options)
        return self._wire.run(flows.long_call(call, self._retry, progress))

    def pin(self, name: str, *, if_match: str | None = None) -> Adapter:
        """Never evict it."""
        return self._patch(name, {"pinned": True}, if_match)

    def unpin(self, name: str, *, if_match: str | None = None) -> Adapter:
        """It may be evicted when it is idle."""
        return self._patch(name, {"pinned": False}, if_match)

    def label(
        self, name: str, labels: Mapping[str, str], *, if_match: str | None = None
    ) -> Adapter:
        """Overwrite its labels."""
        return self._patch(name, {"labels": dict(labels)}, if_match)

    def check(self, source: str, name: str | None = None) -> Check:
        """What a load would find and do; changes nothing."""
        return self._wire.run(flows.request(calls.check(source, name), self._retry))

    def diff(self, a: str, b: str) -> Json:
        """What tells two adapters apart; each is a name, `name@version`, or a folder of the
        server's machine."""
        return self._wire.run(flows.request(calls.diff(a, b), self._retry))

    def _long(self, name: str, call: calls.Call[Operation], progress: Progress) -> Adapter:
        return self._wire.run(flows.long_call_on(name, call, self._retry, progress))

    def _patch(self, name: str, changes: Json, if_match: str | None) -> Adapter:
        call = calls.patch(name, changes, if_match)
        return self._wire.run(flows.request(call, self._retry))


class Begin:
    """`client.begin`: the long calls, begun and not waited for."""

    def __init__(self, wire: Wire) -> None:
        """Of the client's own connection."""
        self._wire = wire

    def load(self, name: str, source: str, **options: Unpack[LoadOptions]) -> Operation:
        """As `adapters.load`."""
        return self._run(calls.load(name, source, **options))

    def replace(self, name: str, source: str, **options: Unpack[ReplaceOptions]) -> Operation:
        """As `adapters.replace`."""
        return self._run(calls.replace(name, source, **options))

    def rollback(self, name: str, version: str | None = None) -> Operation:
        """As `adapters.rollback`."""
        return self._run(calls.rollback(name, version))

    def prefetch(self, name: str) -> Operation:
        """As `adapters.prefetch`."""
        return self._run(calls.prefetch(name))

    def unload(self, name: str, **options: Unpack[UnloadOptions]) -> Operation:
        """As `adapters.unload`."""
        return self._run(calls.unload(name, **options))

    def _run(self, call: calls.Call[Operation]) -> Operation:
        return self._wire.run(flows.request(call, self._wire.place.retry))


class Operations:
    """`client.operations`: long calls under way, and those that ended lately."""

    def __init__(self, wire: Wire) -> None:
        """Of the client's own connection."""
        self._wire = wire
        self._retry = wire.place.retry

    def list(self) -> tuple[Operation, ...]:
        """All that the server remembers, oldest first."""
        return self._wire.run(flows.request(calls.list_operations(), self._retry))

    def get(self, operation: Operation | int) -> Operation:
        """How far it is. Raises `OperationNotFound`."""
        call = calls.get_operation(calls.number_of(operation))
        return self._wire.run(flows.request(call, self._retry))

    def wait(
        self,
        operation: Operation | int,
        *,
        timeout_s: float | None = None,
        progress: Progress = no_progress,
    ) -> Operation:
        """Its end. Raises its own error when it failed or was cancelled, and `TimeoutError`, upon
        which it goes on, after `timeout_s`."""
        begun = operation if isinstance(operation, Operation) else self.get(operation)
        return self._wire.run(flows.follow(begun, self._retry, progress, timeout_s))

    def cancel(self, operation: Operation | int) -> Operation:
        """Stop it, as far as that is still possible; how it is now."""
        call = calls.cancel_operation(calls.number_of(operation))
        return self._wire.run(flows.request(call, self._retry))


class Events:
    """`client.events`: what happened to adapters and engines, with reasons for people."""

    def __init__(self, wire: Wire) -> None:
        """Of the client's own connection."""
        self._wire = wire

    def __iter__(self) -> Iterator[Event]:
        return iter(self.list())

    def list(self, after: int = 0, *, name: str | None = None) -> tuple[Event, ...]:
        """Those that the server remembers, with a sequence number above `after`; with `name`,
        those of one adapter."""
        return self._wire.run(flows.request(calls.list_events(after, name), self._wire.place.retry))

    def follow(self, after: int = 0, *, name: str | None = None) -> Iterator[Event]:
        """The same, and then those that come, without end. A lost connection is made again; once
        that fails for `Retry.deadline_s`, its error is raised."""
        watch = Watch(after, name, self._wire.place.retry)
        while True:
            try:
                for data in self._wire.stream(watch.call()):
                    event = flows.event_of(data)
                    watch.seen(event)
                    yield event
                lost: LorryError = flows.ended_feed(self._wire.place.url)
            except LorryError as error:
                lost = error
            self._wire.run(watch.resume(lost))


class Client:
    """A running Lorry server. A context manager; may be shared by threads.

    Every method raises the class of `lorry.errors` whose code the server answered with, and tries
    again where the catalogue of errors says so."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retry: Retry | None = None,
        transport: httpx.BaseTransport | None = None,
        trust_env: bool = False,
    ) -> None:
        """`url` and `api_key` are those of `LORRY_URL` and `LORRY_API_KEY` unless given.
        `transport` is for own certificates, sockets and tests; `trust_env` obeys proxy variables.
        Raises `ServerUnreachable` for what is no URL."""
        place = Place.at(url, api_key, timeout_s, retry or Retry())
        self._wire = Wire(place, transport, trust_env=trust_env)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._wire.close)
        self._openai: OpenAI | None = None
        self.adapters = Adapters(self._wire)
        self.begin = Begin(self._wire)
        self.operations = Operations(self._wire)
        self.events = Events(self._wire)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def close(self) -> None:
        """Close all connections; no calls after this."""
        self._stack.close()

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._wire.place.url

    def models(self) -> tuple[str, ...]:
        """Every name that can be asked: the base's and the adapters'."""
        return self._wire.run(flows.request(calls.list_models(), self._wire.place.retry))

    def model(self, name: str) -> Json:
        """OpenAI's card of the base, of an adapter or of `name@version`. Raises
        `AdapterNotFound`."""
        return self._wire.run(flows.request(calls.get_model(name), self._wire.place.retry))

    def replicas(self) -> tuple[Replica, ...]:
        """Every engine, and what its slots hold."""
        return self._wire.run(flows.request(calls.list_replicas(), self._wire.place.retry))

    def metrics(self) -> str:
        """What Prometheus would read."""
        return self._wire.run(flows.request(calls.metrics(), self._wire.place.retry))

    def generate(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Answer:
        """A completion by an adapter, by `name@version` or by the base."""
        call = calls.generate(model, prompt, **options)
        return self._wire.run(flows.request(call, self._wire.place.retry))

    def chat(
        self, model: str, messages: Sequence[Message] | str, **options: Unpack[GenerateOptions]
    ) -> Answer:
        """The model's next message; a text is one message of a user."""
        call = calls.chat(model, messages, **options)
        return self._wire.run(flows.request(call, self._wire.place.retry))

    def generate_stream(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Iterator[str]:
        """The text of `generate` as it comes."""
        return self._pieces(calls.generate(model, prompt, stream=True, **options))

    def chat_stream(
        self, model: str, messages: Sequence[Message] | str, **options: Unpack[GenerateOptions]
    ) -> Iterator[str]:
        """The text of `chat` as it comes."""
        return self._pieces(calls.chat(model, messages, stream=True, **options))

    def _pieces(self, call: calls.Call[Answer]) -> Iterator[str]:
        pieces = Pieces(call, self._wire.place.retry, self.url)
        while True:
            try:
                for data in self._wire.stream(call):
                    if piece := pieces.read(data):
                        yield piece
                pieces.end()
                return
            except LorryError as error:
                lost = error
            self._wire.run(pieces.again(lost))

    @property
    def openai(self) -> "OpenAI":
        """OpenAI's own client on this server, for all that it can; `pip install openai`. It obeys
        the server's word on what to try again."""
        if self._openai is None:
            made = openai_client("OpenAI", self._wire.place)
            self._stack.callback(made.close)
            self._openai = made
        return self._openai
