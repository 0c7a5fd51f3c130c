"""What a server tells, as values. Each is read leniently: a field that is missing has its default,
and one that this release does not know is in `raw`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Made of a JSON object."""

    raw: Json = field(default_factory=dict, repr=False, compare=False)
    """All that the server said."""

    @classmethod
    def read(cls, value: Any) -> Self:
        """From what the server said; lists become tuples."""
        found = value if isinstance(value, dict) else {}
        known = {each.name for each in fields(cls)} - {"raw"}
        given = {key: _frozen(one) for key, one in found.items() if key in known}
        return cls(raw=found, **given)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency(Value):
    """One version on one replica."""

    replica: str = ""
    state: str = ""
    """Such as "resident" or "on_disk": a state of docs/lifecycle.md."""
    tier: str = "absent"
    """"absent", "disk", "host" or "slot"."""
    slot: int | None = None
    engine_id: int | None = None
    leases: int = 0
    """Running requests."""
    reason: str = ""
    """Why it failed last, or ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(Value):
    """One registered adapter, at the moment of the answer."""

    name: str = ""
    version: str = ""
    """The version that new requests get, 64 hex digits."""
    short_version: str = ""
    source: str = ""
    pinned: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    """On the replica where it is nearest to serving; "unloading" while it takes no requests."""
    tier: str = "absent"
    slot: int | None = None
    rank: int = 0
    alpha: float = 0.0
    scale_rule: str = ""
    target_modules: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    parameters: int = 0
    bytes: int = 0
    """On disk."""
    host_bytes: int = 0
    """Reserved in host memory."""
    leases: int = 0
    """Running requests."""
    waiting: int = 0
    """Requests that wait for it."""
    created: float = 0.0
    """Seconds since 1970."""
    updated: float = 0.0
    previous: tuple[str, ...] = ()
    """Versions that `rollback` can bring back, the newest first."""
    reason: str = ""

    @property
    def residency(self) -> tuple[Residency, ...]:
        """Where it is, replica by replica."""
        return tuple(map(Residency.read, self.raw.get("residency") or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Value):
    """A long call: a load, replace, unload, rollback or prefetch."""

    id: int = 0
    kind: str = ""
    name: str = ""
    version: str | None = None
    status: str = ""
    """"running", "done", "failed" or "cancelled"."""
    phase: str = ""
    """What it is doing now, for people."""
    error: Mapping[str, Any] | None = None
    began: float = 0.0
    """Seconds since 1970."""
    ended: float | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.status == "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Value):
    """Something that happened to an adapter or an engine."""

    sequence: int = 0
    """Grows by one from event to event; a gap means that some were missed."""
    at: float = 0.0
    """Seconds since 1970."""
    kind: str = ""
    name: str | None = None
    version: str | None = None
    short_version: str | None = None
    text: str = ""
    """Why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Value):
    """One thing that is wrong with an adapter."""

    code: str = ""
    """Of the error that a load would give."""
    problem: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Value):
    """What a load would find and do; `raw` has all facts of a sound adapter."""

    ok: bool = False
    source: str = ""
    version: str | None = None
    rank: int | None = None
    bytes: int | None = None
    would_evict: tuple[Mapping[str, Any], ...] = ()
    """Versions that would go for it."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All that is wrong."""
        return tuple(map(Problem.read, self.raw.get("problems") or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica(Value):
    """One engine."""

    replica: str = ""
    ready: bool = False
    reason: str = ""
    slots: tuple[Mapping[str, Any] | None, ...] = ()
    """What each device slot holds: `name` and `engine_id`."""
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Value):
    """What a model said."""

    model: str = ""
    text: str = ""
    finish_reason: str = ""
    """"stop", "length" or "abort"."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, value: Json) -> "Answer":
        """From an answer of /v1/completions or /v1/chat/completions: its first choice."""
        choice = (value.get("choices") or [{}])[0]
        message = choice.get("message") or {}
        usage = value.get("usage") or {}
        return cls(
            raw=value,
            model=str(value.get("model") or ""),
            text=str(choice.get("text") or message.get("content") or ""),
            finish_reason=str(choice.get("finish_reason") or ""),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )
