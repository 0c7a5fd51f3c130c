"""One running request, as the engine core sees it. No torch."""

import secrets
from collections import Counter
from dataclasses import dataclass, field

from lorry.engine import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs
from lorry.engines.embedded.blocks import BlockTable
from lorry.ids import EngineId


@dataclass(slots=True, eq=False)
class Running:
    """A request and how far it has come; two are equal only if they are the same.

    `tokens` is drawn as it grows; KV exists for the first `computed` of them:

        |------ prompt ------|-- output --|
        |---- computed ----|-- to do -----|
    """

    key: int
    """As the other process numbers it."""
    request: GenerateRequest
    table: BlockTable
    tokens: list[int]
    """Prompt, then output."""
    max_tokens: int
    """Output tokens wanted, the model's length considered."""
    seed: int
    """The request's, or one drawn now, so that a preemption does not change the answer."""
    waiting_since: float
    """Seconds; when it began to wait for its place, for the first time or again."""
    computed: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first placed."""
    placed: bool = False
    """Whether it was ever placed: `cached_tokens` is settled then."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Prompt logprobs so far."""
    counts: Counter[int] = field(default_factory=Counter)
    """Output tokens by number of times, for penalties."""
    emitted: bool = False
    """Whether the first chunk has been sent."""

    @property
    def engine_id(self) -> EngineId | None:
        """Of the adapter; None is the base."""
        return self.request.engine_id

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self.request.sampling

    @property
    def made(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def to_do(self) -> int:
        """Tokens whose KV is missing; exactly one while decoding."""
        return len(self.tokens) - self.computed

    @property
    def scoring(self) -> bool:
        """Whether logits of prompt tokens are still wanted: none may come from the cache then."""
        wanted = self.sampling.prompt_logprobs is not None
        return wanted and len(self.scores) < len(self.request.prompt) - 1

    def take(self, token: int) -> None:
        """One more output token."""
        self.tokens.append(token)
        self.counts[token] += 1

    def judge(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Whether `token`, if chosen now, ends the answer without being part of it."""
        params = self.sampling
        if token in params.stop_token_ids:
            return "stop", token
        if token in params.eos_token_ids and not params.ignore_eos:
            return "stop", None
        return None

    def forbidden(self) -> tuple[int, ...]:
        """Tokens that would end it before `min_tokens`."""
        params = self.sampling
        if self.made >= params.min_tokens:
            return ()
        return params.stop_token_ids + (() if params.ignore_eos else params.eos_token_ids)

    def step_back(self) -> None:
        """Its blocks are gone: all is to be computed again, a half-scored prompt included."""
        self.computed = 0
        if self.scoring:
            self.scores.clear()


def begin(key: int, request: GenerateRequest, max_model_len: int, now: float) -> Running:
    """A request that has not been placed yet; the request has been checked."""
    prompt, params = request.prompt, request.sampling
    return Running(
        key=key,
        request=request,
        table=BlockTable(request.version, request.cache_salt),
        tokens=list(prompt),
        max_tokens=max(0, min(params.max_tokens, max_model_len - len(prompt))),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        waiting_since=now,
    )
