"""Log probabilities in the shapes of OpenAI's completions, OpenAI's chats, and vLLM's
prompt_logprobs."""

import itertools
from collections.abc import Sequence
from typing import Any

from lorry.engine import TokenLogprobs
from lorry.tokens import REPLACEMENT, Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; vLLM uses the same number."""


class Labels:
    r"""Names tokens: by their text; as `bytes:\xf0` where that is a part of a character; as
    `token_id:5` when asked to or when there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        """`as_ids` is the request's return_tokens_as_token_ids."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def label(self, token_id: int) -> str:
        """The token's name."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        text = self._tokenizer.token_text(token_id)
        if REPLACEMENT not in text:
            return text
        # Different tokens would share one name, and hide each other among the alternatives.
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw(token_id))

    def raw(self, token_id: int) -> bytes:
        """The token's own bytes."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def width(self, token_id: int) -> int:
        """Characters that it adds to the text; parts of a character count as nothing."""
        return len(self.raw(token_id).decode("utf-8", "ignore"))


def completion_logprobs(
    labels: Labels,
    entries: Sequence[TokenLogprobs],
    top: int,
    offset: int,
    first: int | None = None,
) -> tuple[dict[str, Any], int]:
    """OpenAI's four parallel lists, and the text offset after them.

    `first` is a token before them that has no probability: a prompt's first.
    """
    scored = [entry.token_id for entry in entries]
    ids = scored if first is None else [first, *scored]
    unscored = [None] * (len(ids) - len(scored))
    ends = list(itertools.accumulate(map(labels.width, ids), initial=offset))
    shape = {
        "tokens": [labels.label(token_id) for token_id in ids],
        "token_logprobs": [*unscored, *(max(entry.logprob, LOWEST) for entry in entries)],
        "top_logprobs": [*unscored, *(_top(labels, entry, top) for entry in entries)],
        "text_offset": ends[:-1],
    }
    return shape, ends[-1]


def _top(labels: Labels, entry: TokenLogprobs, top: int) -> dict[str, float]:
    """The chosen token and the `top` best ones; of two tokens with one text the better one
    stays."""
    found = {labels.label(entry.token_id): max(entry.logprob, LOWEST)}
    for token_id, logprob in entry.top[:top]:
        found.setdefault(labels.label(token_id), max(logprob, LOWEST))
    return found


def chat_logprobs(labels: Labels, entries: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """OpenAI's list of one object per token."""
    content = []
    for entry in entries:
        best = [_chat_token(labels, token_id, value) for token_id, value in entry.top[:top]]
        content.append(_chat_token(labels, entry.token_id, entry.logprob) | {"top_logprobs": best})
    return {"content": content, "refusal": None}


def _chat_token(labels: Labels, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": labels.label(token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": list(labels.raw(token_id)),
    }


def prompt_logprobs(
    labels: Labels, entries: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's list: null for the first prompt token, then id -> what is known of it."""
    shape: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
        values = {entry.token_id: entry.logprob} | dict(entry.top)
        shape.append(
            {
                str(token_id): {
                    "logprob": max(value, LOWEST),
                    "rank": ranks.get(token_id),
                    "decoded_token": labels.label(token_id),
                }
                for token_id, value in values.items()
            }
        )
    return shape
