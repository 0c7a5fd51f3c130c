"""Shapes of the answers of native and OpenAI routes. Tests hold real answers against them."""

from typing import Any, Literal

from pydantic import Field

from lorry.server.openapi.doc import Shape

# Errors


class ErrorDetail(Shape):
    """What is wrong, whose field it is, and what to do."""

    message: str
    type: str
    param: str | None
    code: str
    action: str
    details: list[str]


class ErrorAnswer(Shape):
    """OpenAI's shape of an error, with `action` and `details` added."""

    error: ErrorDetail


class CatalogueEntry(Shape):
    """All that is known of one error."""

    code: str
    message_pattern: str
    type: str
    class_: str = Field(alias="class")
    http_status: int
    severity: str
    fault: str
    retryable: bool
    retry_after_s: float | None
    trigger_scenarios: list[str]
    common_situations: list[str]
    solutions: list[str]
    handling_strategy: str
    retry_pattern: str
    prevention_tips: list[str]
    tags: list[str]
    status: int
    meaning: str
    action: str


class Catalogue(Shape):
    """Every error there is."""

    object: Literal["list"]
    data: list[CatalogueEntry]


# Adapters


class Residency(Shape):
    """One version on one replica."""

    replica: str
    state: str
    tier: Literal["absent", "disk", "host", "slot"]
    slot: int | None
    engine_id: int | None
    leases: int
    reason: str


class Adapter(Shape):
    """One registered adapter."""

    object: Literal["adapter"]
    name: str
    version: str
    short_version: str
    source: str
    pinned: bool
    labels: dict[str, str]
    owner: str | None
    system_prompt: str | None
    chat_template: str | None
    defaults: dict[str, float]
    maxima: dict[str, float]
    stop: list[str]
    idle_ttl: float | None
    state: str
    tier: Literal["absent", "disk", "host", "slot"]
    slot: int | None
    rank: int
    alpha: float
    scale_rule: str
    target_modules: list[str]
    layers: list[int]
    parameters: int
    bytes: int
    host_bytes: int
    leases: int
    waiting: int
    created: float
    updated: float
    previous: list[str]
    reason: str
    waits_for: str
    residency: list[Residency]


class Published(Adapter):
    """An adapter after an upload: as it is now, and the version of this call."""

    published: str


class DiffSide(Shape):
    """One of two adapters that are compared."""

    title: str
    rank: int
    alpha: float
    scale_rule: str
    target_modules: list[str]
    modules: int
    parameters: int
    dtype: str
    norm: float | None


class DiffEntry(Shape):
    """An entry of two configs that differs."""

    key: str
    a: Any
    b: Any


class DiffModule(Shape):
    """One module of two adapters: ranks, and Frobenius norms of what is added to the base."""

    module: str
    rank_a: int | None
    rank_b: int | None
    norm_a: float | None
    norm_b: float | None
    difference: float | None


class AdapterDiff(Shape):
    """What tells two adapters apart."""

    object: Literal["adapter.diff"]
    same: bool
    a: DiffSide
    b: DiffSide
    config: list[DiffEntry]
    modules: list[DiffModule]


class AdapterPage(Shape):
    """Some of the registered adapters, by name."""

    object: Literal["list"]
    data: list[Adapter]
    has_more: bool
    next: str | None


class AdapterDeleted(Shape):
    """An adapter that is gone from every tier."""

    name: str
    version: str
    object: Literal["adapter.deleted"]


class Problem(Shape):
    """One thing that is wrong with an adapter, and its fix."""

    code: str
    problem: str
    fix: str


class Victim(Shape):
    """What would be evicted."""

    names: list[str]
    version: str
    short_version: str
    leases: int


class AdapterCheck(Shape):
    """What a load would find and do. Files that cannot be served have no facts."""

    object: Literal["adapter.check"]
    ok: bool
    source: str
    name: str | None
    problems: list[Problem]
    version: str | None = None
    short_version: str | None = None
    rank: int | None = None
    alpha: float | None = None
    scale_rule: str | None = None
    target_modules: list[str] | None = None
    layers: list[int] | None = None
    parameters: int | None = None
    dtype: str | None = None
    bytes: int | None = None
    host_bytes: int | None = None
    base_model: str | None = None
    chat_template: bool | None = None
    resident: bool | None = None
    replaces: str | None = None
    would_evict: list[Victim] | None = None
    would_wait: bool | None = None


# Operations and events


class Operation(Shape):
    """A long call."""

    object: Literal["operation"]
    id: int
    kind: str
    name: str
    version: str | None
    status: Literal["running", "done", "failed", "cancelled"]
    phase: str
    error: ErrorDetail | None
    began: float
    ended: float | None


class OperationList(Shape):
    """Those that run and those that ended lately."""

    object: Literal["list"]
    data: list[Operation]


class Event(Shape):
    """Something that happened, and why."""

    sequence: int
    at: float
    kind: str
    name: str | None
    version: str | None
    short_version: str | None
    text: str


class EventList(Shape):
    """What is remembered."""

    object: Literal["list"]
    data: list[Event]


# The server


class Status(Shape):
    """It can take requests."""

    status: Literal["ok"]


class Version(Shape):
    """Lorry's version."""

    version: str


class Slot(Shape):
    """What a device slot holds."""

    engine_id: int
    name: str | None


class Replica(Shape):
    """One engine."""

    replica: str
    ready: bool
    reason: str
    slots: list[Slot | None]
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    counters: dict[str, float]


class ReplicaList(Shape):
    """Every engine."""

    object: Literal["list"]
    data: list[Replica]


# Models and inference


class Model(Shape):
    """The base model, or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    permission: list[Any]


class ModelList(Shape):
    """What can be asked for."""

    object: Literal["list"]
    data: list[Model]


class CachedTokens(Shape):
    """Prompt tokens whose KV was reused."""

    cached_tokens: int


class Usage(Shape):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionChoice(Shape):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    prompt_logprobs: list[Any] | None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Shape):
    """OpenAI's text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnswerMessage(Shape):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(Shape):
    """OpenAI's chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None


class Tokens(Shape):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Shape):
    """The text of token ids."""

    prompt: str
