"""Every call that the client makes, as a value: both clients send the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

from lorry.client.values import Adapter, Answer, Check, Event, Json, Operation, Replica
from lorry.errors import RequestInvalid

T = TypeVar("T")

GENERATE_TIMEOUT_S = 600.0
"""For the answer of a model: a long one, behind a queue, on a CPU."""

FEED_TIMEOUT_S = 60.0
"""Without a word from an endless feed. The server says something every 15 s."""

Message = Mapping[str, Any]
"""`role` and `content`."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One exchange, and how its answer is read."""

    method: str
    path: str
    read: Callable[[Json], T]
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    """For the answer; None: the client's own."""
    is_text: bool = False
    """The answer is a text; it is read as `{"text": ...}`."""
    resend: bool = False
    """A request to a model: one that was lost may be sent once again."""

    @property
    def reads(self) -> bool:
        """Whether it changes nothing."""
        return self.method == "GET"

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class _Options(TypedDict, total=False):
    pinned: bool
    """Left out: as it was, or not pinned."""
    labels: Mapping[str, str]
    if_match: str
    """Replace only while this version is served: 12 digits of it or more."""
    settings: Mapping[str, Any]
    """Further fields of PUT /v1/adapters/{name}, which this release need not know."""


class LoadOptions(_Options, total=False):
    """What a load may be told beside name and source."""

    replace: bool
    """Replace the version that is served, if there is one."""


class ReplaceOptions(_Options, total=False):
    """What a replace may be told beside name and source."""

    drain_first: bool
    """Unload the old version before the new one is loaded, for when there is no room for both."""


class UnloadOptions(TypedDict, total=False):
    """What an unload may be told beside the name."""

    drain_timeout_s: float
    """How long to wait for running requests; 0 ends them now. Left out: the server's own."""
    purge: bool
    """Remove the copy on disk too; no rollback then."""
    if_match: str


class GenerateOptions(TypedDict, total=False):
    """What a model may be told. Everything else that the routes take goes into `more`."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: str | Sequence[str]
    timeout_s: float
    """For the answer, or for the next piece of a stream."""
    more: Mapping[str, Any]


# Adapters

LIST_PAGE = 1000


def adapter_path(name: str, verb: str = "") -> str:
    """Names may hold slashes."""
    return f"/v1/adapters/{_quoted(name)}{verb}"


def _quoted(name: str) -> str:
    """As a part of a path. Raises `RequestInvalid` for what is no text, such as a file's name in
    another encoding."""
    try:
        return quote(name, safe="")
    except UnicodeError:
        raise RequestInvalid(f"The call cannot be sent: {name!a} is no text.") from None


def page_of_adapters(after: str) -> Call[Json]:
    """Adapters whose names come after `after`."""
    return Call("GET", "/v1/adapters", dict, {"after": after, "limit": str(LIST_PAGE)})


def get_adapter(name: str) -> Call[Adapter]:
    """One adapter."""
    return Call("GET", adapter_path(name), Adapter.read)


def put_adapter(name: str, body: Mapping[str, Any], if_match: str | None = None) -> Call[Operation]:
    """Begin to register, load or replace."""
    headers = {} if if_match is None else {"If-Match": if_match}
    return Call("PUT", adapter_path(name), Operation.read, {"wait": "false"}, headers, body)


def load(
    name: str,
    source: str,
    *,
    replace: bool = False,
    register_only: bool = False,
    if_match: str | None = None,
    pinned: bool | None = None,
    labels: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Call[Operation]:
    """A name that is new, or, with `replace`, also one that is taken."""
    body = _load_body(source, pinned, labels, settings)
    return put_adapter(name, {**body, "replace": replace, "load": not register_only}, if_match)


def replace(
    name: str,
    source: str,
    *,
    if_match: str | None = None,
    drain_first: bool = False,
    pinned: bool | None = None,
    labels: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Call[Operation]:
    """Another version of a name that there is; `*` matches any version."""
    body = _load_body(source, pinned, labels, settings)
    strategy = "drain-first" if drain_first else "beside"
    return put_adapter(name, {**body, "strategy": strategy}, if_match or "*")


def _load_body(
    source: str,
    pinned: bool | None,
    labels: Mapping[str, str] | None,
    settings: Mapping[str, Any] | None,
) -> Json:
    body: Json = {**(settings or {}), "source": source}
    if pinned is not None:
        body["pinned"] = pinned
    if labels is not None:
        body["labels"] = dict(labels)
    return body


def patch(name: str, changes: Mapping[str, Any], if_match: str | None = None) -> Call[Adapter]:
    """Pin, unpin, label."""
    headers = {} if if_match is None else {"If-Match": if_match}
    return Call("PATCH", adapter_path(name), Adapter.read, headers=headers, body=changes)


def unload(
    name: str,
    *,
    drain_timeout_s: float | None = None,
    purge: bool = False,
    if_match: str | None = None,
) -> Call[Operation]:
    """Begin to unload."""
    params = {"wait": "false", "purge": str(purge).lower()}
    if drain_timeout_s is not None:
        params["drain_timeout"] = str(drain_timeout_s)
    headers = {} if if_match is None else {"If-Match": if_match}
    return Call("DELETE", adapter_path(name), Operation.read, params, headers)


def rollback(name: str, version: str | None = None) -> Call[Operation]:
    """Begin to serve an earlier version again."""
    body = {} if version is None else {"version": version}
    path = adapter_path(name, "/rollback")
    return Call("POST", path, Operation.read, {"wait": "false"}, body=body)


def prefetch(name: str) -> Call[Operation]:
    """Begin to bring it into memory."""
    return Call("POST", adapter_path(name, "/prefetch"), Operation.read, {"wait": "false"})


def check(source: str, name: str | None = None) -> Call[Check]:
    """What a load would find and do."""
    body = {"source": source, "name": name}
    return Call("POST", "/v1/adapters:check", Check.read, body=body, timeout_s=GENERATE_TIMEOUT_S)


def diff(a: str, b: str) -> Call[Json]:
    """What tells two adapters apart; each is a name, `name@version`, or a folder of the server."""
    body = {"a": a, "b": b}
    return Call("POST", "/v1/adapters:diff", dict, body=body, timeout_s=GENERATE_TIMEOUT_S)


# Operations, events, the server


def list_operations() -> Call[tuple[Operation, ...]]:
    """The running ones and those that ended lately."""
    return Call("GET", "/v1/operations", lambda told: _all(Operation.read, told))


def get_operation(number: int) -> Call[Operation]:
    """How far one is."""
    return Call("GET", f"/v1/operations/{number}", Operation.read)


def cancel_operation(number: int) -> Call[Operation]:
    """Stop it, as far as that is still possible."""
    return Call("DELETE", f"/v1/operations/{number}", Operation.read)


def number_of(operation: Operation | int) -> int:
    """Its id."""
    return operation.id if isinstance(operation, Operation) else operation


def list_events(after: int, name: str | None = None) -> Call[tuple[Event, ...]]:
    """Those remembered with a sequence number above `after`, of all adapters or of one."""
    params = {"follow": "false", "after": str(after), **_named(name)}
    return Call("GET", "/v1/events", lambda told: _all(Event.read, told), params)


def follow_events(after: int, name: str | None = None) -> Call[None]:
    """The same, and then those that come."""
    params = {"after": str(after), **_named(name)}
    return Call("GET", "/v1/events", lambda _: None, params, timeout_s=FEED_TIMEOUT_S)


def _named(name: str | None) -> dict[str, str]:
    return {} if name is None else {"name": name}


def get_model(name: str) -> Call[Json]:
    """The card of a model."""
    return Call("GET", f"/v1/models/{_quoted(name)}", dict)


def list_replicas() -> Call[tuple[Replica, ...]]:
    """Every engine."""
    return Call("GET", "/v1/replicas", lambda told: _all(Replica.read, told))


def metrics() -> Call[str]:
    """Prometheus text."""
    return Call("GET", "/metrics", lambda told: str(told["text"]), is_text=True)


def list_models() -> Call[tuple[str, ...]]:
    """Every name that `model` may have."""
    return Call("GET", "/v1/models", lambda told: tuple(one["id"] for one in told.get("data", ())))


def _all(read: Callable[[Any], T], told: Json) -> tuple[T, ...]:
    return tuple(map(read, told.get("data") or ()))


# Models


def generate(model: str, prompt: str | Sequence[int], **options: Any) -> Call[Answer]:
    """A completion; `options` are those of `GenerateOptions`."""
    return _ask("/v1/completions", {"model": model, "prompt": prompt}, **options)


def chat(model: str, messages: Sequence[Message] | str, **options: Any) -> Call[Answer]:
    """The next message; `options` are those of `GenerateOptions`."""
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    body = {"model": model, "messages": [dict(each) for each in said]}
    return _ask("/v1/chat/completions", body, **options)


def _ask(
    path: str,
    asked: Json,
    *,
    stream: bool = False,
    timeout_s: float = GENERATE_TIMEOUT_S,
    more: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
) -> Call[Answer]:
    known = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop,
    }
    given = {key: value for key, value in known.items() if value is not None}
    body = {**(more or {}), **asked, **given, "stream": stream}
    return Call("POST", path, Answer.of, body=body, timeout_s=timeout_s, resend=True)


def piece_of(told: Json) -> str:
    """The text in one event of a streamed answer."""
    choice = (told.get("choices") or [{}])[0]
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
