"""One answer of /generate as it grows, in SGLang's shape: text, ids and `meta_info`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lorry.engine import TokenLogprobs
from lorry.server.answer import Piece, SequenceRequest
from lorry.server.logprobs import LOWEST, Labels

WEIGHT_VERSION = "default"
"""What SGLang says of base weights that were never updated, and ours never are."""

Entry = tuple[float | None, int, str | None]
"""(log probability, token id, its text when asked for)."""


@dataclass(slots=True)
class Growing:
    """One choice of one prompt; `shape` may be asked for after each piece."""

    sequence: SequenceRequest
    labels: Labels | None
    """Names the tokens of log probabilities; None: they are not named."""
    logprobs: bool
    logprob_start: int
    """First prompt token that is scored; the prompt's length: none is."""
    top: int
    index: int | None
    """Of the answer in its stream; None: it is not shown, as in answers that are whole or alone."""
    eos_token_ids: tuple[int, ...]
    shows_prompt: bool
    began_s: float = field(default_factory=time.perf_counter)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    last: Piece = field(default_factory=Piece)
    made: list[TokenLogprobs] = field(default_factory=list)
    scored: tuple[TokenLogprobs, ...] = ()
    """Of the prompt, from its second token on."""

    def add(self, piece: Piece) -> bool:
        """Append a piece; whether it changed what is shown."""
        self.text += piece.text
        self.token_ids.extend(piece.token_ids)
        self.cached_tokens += piece.cached_tokens
        self.made.extend(piece.logprobs)
        self.scored = self.scored or piece.prompt_logprobs
        self.last = piece
        return bool(piece.text or piece.token_ids or piece.finish_reason)

    def shape(self) -> dict[str, Any]:
        """All of it so far."""
        shape: dict[str, Any] = {
            "text": self.text,
            "output_ids": self.token_ids,
            "meta_info": self._meta_info(),
        }
        if self.shows_prompt:
            shape["prompt_token_ids"] = list(self.sequence.prompt)
        return shape if self.index is None else shape | {"index": self.index}

    def _meta_info(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.sequence.request_id,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": len(self.sequence.prompt),
            "weight_version": WEIGHT_VERSION,
            "completion_tokens": len(self.token_ids),
            "cached_tokens": self.cached_tokens,
        }
        if self.logprobs:
            meta |= self._logprobs()
        if self.last.finish_reason is not None:
            meta["e2e_latency"] = time.perf_counter() - self.began_s
        return meta

    def _finish_reason(self) -> dict[str, Any] | None:
        """`matched` is the stop string or token; of an end of text it is known only when the model
        has one token for it."""
        reason = self.last.finish_reason
        if reason is None:
            return None
        if reason == "length":
            return {"type": "length", "length": len(self.token_ids)}
        matched: str | int | None = self.last.stop_reason
        if matched is None and len(self.eos_token_ids) == 1:
            matched = self.eos_token_ids[0]
        return {"type": "stop", "matched": matched}

    def _logprobs(self) -> dict[str, Any]:
        """SGLang's first prompt entry has no value, wherever the scores begin."""
        start, prompt = self.logprob_start, self.sequence.prompt
        scored = self.scored[start:]
        first = [self._entry(None, prompt[start])] if start < len(prompt) else []
        shape: dict[str, Any] = {
            "input_token_logprobs": first + self._entries(scored),
            "output_token_logprobs": self._entries(self.made),
            "output_token_logprobs_length": len(self.made),
        }
        if self.top:
            unscored: list[Any] = [None] * len(first)
            shape["input_top_logprobs"] = unscored + self._tops(scored)
            shape["output_top_logprobs"] = self._tops(self.made)
        return shape

    def _entries(self, entries: Sequence[TokenLogprobs]) -> list[Entry]:
        return [self._entry(one.logprob, one.token_id) for one in entries]

    def _tops(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        return [
            [self._entry(value, token_id) for token_id, value in one.top[: self.top]]
            for one in entries
        ]

    def _entry(self, value: float | None, token_id: int) -> Entry:
        text = None if self.labels is None else self.labels.label(token_id)
        return (None if value is None else max(value, LOWEST), token_id, text)
