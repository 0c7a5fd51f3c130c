"""What a fake engine pretends to be, what goes wrong with it, and what it answers."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from lorry.engine import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs
from lorry.ids import VersionId


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """Limits of the pretended machine."""

    max_loras: int = 4
    """Device slots."""
    max_cpu_loras: int = 8
    """Versions it holds at most; one more is rejected."""
    host_cache_bytes: int = 1 << 30
    """Bytes of those versions, each counted as `LoraVersion.bytes`."""
    max_lora_rank: int = 64
    """Reported only; the fake reads no weights."""
    max_num_seqs: int = 64
    """Requests counted as running; the rest count as waiting."""
    max_model_len: int = 2048
    """Prompt and answer together, in tokens."""
    vocab_size: int = 512
    """Tokens go from 0 to this, exclusive."""
    layers: int = 2
    """Of the pretended base model."""
    hidden_size: int = 256
    """Of the pretended base model."""
    token_delay_s: float = 0.0
    """Between two tokens of one answer."""
    check_paths: bool = False
    """Reject a version whose folder lacks `adapter_config.json`; simulations have no disk."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one call: first the delay, then the error or the odd answer."""

    error: Exception | None = None
    """Raised instead of an answer."""
    delay_s: float = 0.0
    """Waited first; `math.inf` never returns."""
    after_effect: bool = False
    """The work is done before the error is raised: the answer is lost, not the deed."""
    answer_false: bool = False
    """`remove_lora` does its work but says False."""


def fake_tokens(
    request: GenerateRequest, version: VersionId | None, vocab_size: int, seed: int = 0
) -> Iterator[int]:
    """The endless answer of `version` to a request, before stops and limits."""
    p = request.sampling
    choice = (p.temperature, p.top_p, p.top_k, p.seed) if p.temperature > 0 else None
    base = hashlib.blake2b(repr((seed, version, request.prompt, choice)).encode(), digest_size=8)
    for position in count():
        step = base.copy()
        step.update(position.to_bytes(8, "little"))
        yield int.from_bytes(step.digest(), "little") % vocab_size


def fake_chunks(
    request: GenerateRequest,
    version: VersionId | None,
    settings: FakeSettings,
    seed: int = 0,
    cached_tokens: int = 0,
) -> Iterator[TokenChunk]:
    """The whole answer, one token per chunk: what tests compare with."""
    p, vocab_size = request.sampling, settings.vocab_size
    limit = min(p.max_tokens, settings.max_model_len - len(request.prompt))
    ends = {*p.stop_token_ids, *(() if p.ignore_eos else p.eos_token_ids)}
    scored = () if p.prompt_logprobs is None else request.prompt[1:]
    scores = tuple(_logprobs(t, p.prompt_logprobs or 0, vocab_size) for t in scored)
    head = TokenChunk((), prompt_logprobs=scores, cached_tokens=cached_tokens)
    if limit <= 0:
        yield replace(head, finish_reason="length")
        return
    for made, token in enumerate(fake_tokens(request, version, vocab_size, seed), 1):
        while made <= p.min_tokens and token in ends:
            token = (token + 1) % vocab_size
        if token in ends:
            stop = token if token in p.stop_token_ids else None
            yield replace(head, finish_reason="stop", stop_token_id=stop)
            return
        logprobs = () if p.logprobs is None else (_logprobs(token, p.logprobs, vocab_size),)
        reason: FinishReason | None = "length" if made >= limit else None
        yield replace(head, token_ids=(token,), logprobs=logprobs, finish_reason=reason)
        if reason:
            return
        head = TokenChunk(())


def _logprobs(token: int, top: int, vocab_size: int) -> TokenLogprobs:
    best = tuple(((token + i) % vocab_size, -0.1 * (i + 1)) for i in range(min(top, vocab_size)))
    return TokenLogprobs(token, -0.1, best)
