"""Answers as they grow: stop strings, held-back text, and what ends where."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lorry.engine import SamplingParams, TokenChunk, TokenLogprobs
from lorry.server.answer import Assembler, Piece, SequenceRequest, StopMatcher
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LETTERS = "abc"


def read(text: str, stops: Sequence[str], cuts: Sequence[int], include: bool = False) -> str:
    """What a matcher lets through of a text that comes in pieces of these sizes."""
    matcher, out, at = StopMatcher(stops, include), "", 0
    for size in [*cuts, len(text)]:
        sent, stop = matcher.feed(text[at : at + size])
        out += sent
        at += size
        if stop is not None:
            return f"{out}|{stop}"
    return out + matcher.flush()


@given(
    text=st.text(LETTERS, max_size=30),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=20),
    include=st.booleans(),
)
@example(text="abcb", stops=["abcd", "bc"], cuts=[2], include=False)
def test_stops_are_found_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    assert read(text, stops, cuts, include) == read(text, stops, [1] * len(text), include)


@given(text=st.text(LETTERS, max_size=20), stops=st.lists(st.text(LETTERS, min_size=1, max_size=3)))
def test_no_stop_string_is_ever_let_through(text: str, stops: list[str]) -> None:
    sent = read(text, stops, [1] * len(text)).partition("|")[0]
    assert text.startswith(sent)
    assert not any(stop in sent for stop in stops)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["STOP", "##"], include=False)
    assert matcher.feed("say ST") == ("say ", None)
    assert matcher.feed("ART #") == ("START ", None)
    assert matcher.feed("#x") == ("", "##")


def request(**more: object) -> SequenceRequest:
    fields: dict[str, object] = {
        "index": 0,
        "request_id": "r",
        "prompt": TOKENIZER.encode("The lorry"),
        "prompt_text": "The lorry",
        "sampling": SamplingParams(min_tokens=more.pop("min_tokens", 0)),  # type: ignore[arg-type]
        "name": None,
        "version": None,
    }
    return SequenceRequest(**fields | more)  # type: ignore[arg-type]


def pieces(text: str, group: int = 1, **more: object) -> list[Piece]:
    """The pieces of an answer whose tokens come in groups; it stops at its first finish reason."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assembler, out = Assembler(request(**more), TOKENIZER), []
    for at in range(0, len(ids), group):
        own = ids[at : at + group]
        chunk = TokenChunk(
            own,
            logprobs=tuple(TokenLogprobs(i, -1.0) for i in own),
            finish_reason="length" if at + group >= len(ids) else None,
        )
        out.append(assembler.take(chunk))
        if out[-1].finish_reason:
            break
    return out


def text_of(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found)


@pytest.mark.parametrize("group", [1, 2, 50])
def test_a_stop_string_cuts_text_tokens_and_logprobs(group: int) -> None:
    found = pieces("one two three four", group, stops=("thr",))
    assert text_of(found) == "one two "
    assert (found[-1].finish_reason, found[-1].stop_reason) == ("stop", "thr")
    ids = [i for piece in found for i in piece.token_ids]
    assert TOKENIZER.decode(ids).startswith("one two thr")
    assert "four" not in TOKENIZER.decode(ids)
    assert len(ids) == sum(len(piece.logprobs) for piece in found)


def test_a_stop_string_can_be_kept() -> None:
    assert text_of(pieces("one two", stops=("tw",), include_stop=True)) == "one tw"


def test_stop_strings_wait_for_min_tokens() -> None:
    assert text_of(pieces("aXbXc", stops=("X",), min_tokens=3)) == "aXb"


def test_held_back_text_is_sent_at_the_end() -> None:
    found = pieces("one ST", stops=("STOP",))
    assert text_of(found) == "one ST"
    assert (found[-1].finish_reason, found[-1].stop_reason) == ("length", None)


def test_an_echo_comes_once_and_first() -> None:
    found = pieces(" goes", echo=True)
    assert text_of(found) == "The lorry goes"
    assert [piece.first for piece in found] == [True, *[False] * (len(found) - 1)]
    assert text_of(pieces(" goes", echo=True, prompt_text=None)) == "The lorry goes"


def test_echoed_text_is_not_searched_for_stops() -> None:
    assert text_of(pieces(" goes", echo=True, stops=("lorry",))) == "The lorry goes"


def test_without_a_tokenizer_there_are_only_ids() -> None:
    assembler = Assembler(request(echo=True, prompt_text=None), None)
    piece = assembler.take(TokenChunk((5, 6), finish_reason="stop", stop_token_id=9))
    assert (piece.text, piece.token_ids, piece.stop_reason) == ("", (5, 6), 9)
