"""The engine contract: what every engine does for the supervisor, and the values that pass between
them.

Three rules:

1. An engine holds what `list_loras` says it holds. `add_lora` and `remove_lora` return only when
   that is so.
2. `remove_lora` answers False for an id that is not there: the ordinary state after an eviction,
   not an error. Whatever else goes wrong is an `EngineError`, and then the engine holds what it
   held before.
3. KV blocks are reused only between requests with the same `version` (None is the base model).
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from lorry.ids import EngineId, VersionId

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class BaseShape:
    """What an adapter must fit: the base model as far as LoRA is concerned."""

    architecture: str
    """Name in the base's `config.json`, such as LlamaForCausalLM."""
    layers: int
    hidden_size: int
    vocab_size: int
    targets: Mapping[str, tuple[int, int]]
    """Linear projections of each decoder layer: `self_attn.q_proj` -> (in_features, out_features).
    """


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do and its limits; fixed for the engine's life."""

    base: BaseShape
    max_model_len: int
    """Prompt and answer together, in tokens."""
    max_loras: int
    """Device slots: distinct adapters in one step."""
    max_cpu_loras: int
    """Versions the engine holds in host memory, those in slots included."""
    host_cache_bytes: int
    """Bytes of those versions as packed by the engine."""
    max_lora_rank: int
    max_num_seqs: int
    prompt_logprobs: bool = True
    computing: str = ""
    """What does the arithmetic, for people: "avx512 kernels, 2 threads"."""


@dataclass(frozen=True, slots=True)
class LoraVersion:
    """One version, as the engine is asked to load it."""

    engine_id: EngineId
    version: VersionId
    name: str
    """The adapter's name, for messages only."""
    path: Path
    """Snapshot folder: `adapter_config.json` and one `adapter_model.safetensors`, already judged.
    """
    bytes: int
    """Budget reserved for it: an upper bound of its packed size in host memory."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did."""

    engine_id: EngineId
    bytes: int
    """Host memory the packed version really takes."""
    seconds: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Names and neutral values follow OpenAI and vLLM; ranges are checked by
    the server."""

    max_tokens: int = 16
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Same seed, same request, same version: same tokens, whatever else is in the batch."""
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Neither EOS nor stop tokens are chosen before this many tokens."""
    logprobs: int | None = None
    """Alternatives reported per chosen token, beside the chosen one; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, before temperature, penalties and filters (as OpenAI
    reports them)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), best first."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to continue."""

    request_id: str
    prompt: tuple[int, ...]
    """Token ids; at least one."""
    sampling: SamplingParams
    engine_id: EngineId | None = None
    """None: the base model."""
    version: VersionId | None = None
    """Key of all KV state; None exactly when `engine_id` is."""
    cache_salt: str = ""
    """Requests with different salts never share KV blocks, even of one version."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Some tokens of one answer, in order. The last chunk, and only it, has a finish reason."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """In the first chunk only; entry i belongs to prompt token i + 1."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token of `stop_token_ids` that ended it; it is not part of `token_ids`."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused; in the first chunk."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The engine's own word about itself, for /health, /metrics and the adapter pages."""

    ready: bool
    reason: str
    """Why it is not ready, or "" ."""
    slots: tuple[EngineId | None, ...] = ()
    """What each device slot holds."""
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    """Ever-growing sums since the server began, such as `prompt_tokens`, `slot_loads`,
    `slot_evictions`, `prefix_hit_tokens`, `preemptions`, `restarts`."""


@dataclass(frozen=True, slots=True)
class EngineUp:
    """The engine can take commands; sent at the start and after each restart."""

    residents: frozenset[EngineId]
    """What it holds already: nothing after a restart of the embedded engine."""


@dataclass(frozen=True, slots=True)
class EngineDown:
    """The engine was lost; its running requests have ended with `EngineUnreachable`."""

    reason: str


EngineEvent = EngineUp | EngineDown


class Engine(Protocol):
    """One replica. Every method may raise `EngineUnreachable` while it is down; none waits without
    limit."""

    async def start(self) -> EngineCapabilities:
        """Begin; return once requests can be taken. Raises what makes that impossible."""

    def capabilities(self) -> EngineCapabilities:
        """Fixed once `start` has returned."""

    def events(self) -> AsyncIterator[EngineEvent]:
        """Ups and downs from now on, in order; the first is the present state. One reader."""

    async def add_lora(self, version: LoraVersion) -> LoadReport:
        """Hold a version. Raises `EngineRejected` and holds what it held before."""

    async def remove_lora(self, engine_id: EngineId) -> bool:
        """Give the version up, in every tier. False: it was not there. The caller has no request
        running on it; those that run all the same are aborted."""

    async def list_loras(self) -> frozenset[EngineId]:
        """What it holds, by asking it."""

    async def pin_lora(self, engine_id: EngineId, pinned: bool) -> None:
        """Keep the version in a slot, or stop keeping it. Raises `EngineRejected` when no slot may
        be pinned."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Chunks until one with a finish reason. Closing the iterator early aborts the request."""

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator yields a last chunk with "abort". Unknown ids are ignored."""

    def health(self) -> EngineHealth:
        """Its last word, without asking it again: pages and metrics never wait. Never raises."""

    async def aclose(self) -> None:
        """End all requests and free everything. Safe to call twice."""
