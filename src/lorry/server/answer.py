"""One answer as it grows: tokens in, text out, stop strings found wherever the tokens are cut.

Rule: what is sent depends only on the tokens, never on how they are grouped into chunks. Text is
held back exactly while it may still become a stop string or while its last character is incomplete.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lorry.engine import FinishReason, SamplingParams, TokenChunk, TokenLogprobs
from lorry.ids import AdapterName, VersionId
from lorry.tokens import TextStream, Tokenizer


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence that a request asks for: one prompt, one choice."""

    index: int
    """Of the choice in the answer."""
    request_id: str
    prompt: tuple[int, ...]
    prompt_text: str | None
    """As the caller wrote it; None when it came as ids."""
    sampling: SamplingParams
    name: AdapterName | None
    version: VersionId | None
    cache_salt: str = ""
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    first_choice: bool = True
    """The one of a prompt's choices with which the prompt is counted."""


@dataclass(slots=True)
class Piece:
    """What one chunk adds to an answer."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    first: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused; in the first piece."""


class StopMatcher:
    """Finds the first stop string to be complete, reading character by character."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        """`include`: a found stop string stays in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that is certain now, and the stop string that ends it, if one does."""
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return held[: end if self._include else start], stop
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def flush(self) -> str:
        """What was held back and became no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Assembler:
    """Turns one sequence's chunks into pieces."""

    def __init__(self, sequence: SequenceRequest, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer all text is ""."""
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._stream: TextStream | None = None
        if tokenizer is not None:
            skip = sequence.skip_special_tokens
            self._stream = tokenizer.stream(sequence.prompt, skip_special_tokens=skip)
        self._stops = StopMatcher(sequence.stops, sequence.include_stop)
        self._made = 0
        self._begun = False

    def take(self, chunk: TokenChunk) -> Piece:
        """What the chunk adds."""
        piece = Piece(
            token_ids=chunk.token_ids,
            logprobs=chunk.logprobs,
            prompt_logprobs=chunk.prompt_logprobs,
            first=not self._begun,
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_token_id,
            cached_tokens=chunk.cached_tokens,
        )
        self._begun = True
        if self._stream is not None:
            self._add_text(piece, self._stream)
        self._made += len(piece.token_ids)
        if piece.first and self._sequence.echo:
            piece.text = self._echoed() + piece.text
        return piece

    def _add_text(self, piece: Piece, stream: TextStream) -> None:
        """Token by token, so that a stop string cuts the tokens after it off too."""
        for at, token_id in enumerate(piece.token_ids):
            text, stop = self._match(stream.feed((token_id,)), self._made + at + 1)
            piece.text += text
            if stop is not None:
                self._end_at(piece, at + 1, stop)
                return
        if piece.finish_reason is not None:
            text, stop = self._match(stream.flush(), self._made + len(piece.token_ids))
            piece.text += text
            if stop is not None:
                self._end_at(piece, len(piece.token_ids), stop)
            else:
                piece.text += self._stops.flush()

    def _match(self, text: str, made: int) -> tuple[str, str | None]:
        if not self._sequence.stops:
            return text, None
        if made <= self._sequence.sampling.min_tokens:
            return text, None
        return self._stops.feed(text)

    def _end_at(self, piece: Piece, tokens: int, stop: str) -> None:
        piece.token_ids = piece.token_ids[:tokens]
        piece.logprobs = piece.logprobs[:tokens]
        piece.finish_reason = "stop"
        piece.stop_reason = stop

    def _echoed(self) -> str:
        if self._sequence.prompt_text is not None or self._tokenizer is None:
            return self._sequence.prompt_text or ""
        return self._tokenizer.decode(
            self._sequence.prompt, skip_special_tokens=self._sequence.skip_special_tokens
        )
