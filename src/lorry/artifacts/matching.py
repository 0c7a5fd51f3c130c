"""PEFT's rules for which module a pattern means, kept exactly, and safe against patterns made to
hang a server.

PEFT (`peft.utils.other.get_pattern_key`, `peft.tuners.tuners_utils.check_target_module_exists`)
runs the patterns of a config through `re`. `re` keeps the interpreter lock while it matches, so one
catastrophic pattern would stop every request. Patterns that are more than a literal therefore go
through `regex`, which has the same syntax, gives the lock up and takes a time limit."""

import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import regex

from lorry.engine import BaseShape

LAYER_PREFIX = "model.layers."
"""Where the decoder layers of every supported family live in the transformers model."""

PATTERN_CHARACTERS_MAX = 4000
"""Training tools write regular expressions of a few hundred characters; longer ones are a mistake
or an attack."""

MATCH_SECONDS_MAX = 2.0
"""For all patterns of one adapter together; a sane config takes milliseconds."""

_LITERAL = re.compile(r"[A-Za-z0-9_.\-]*")

_SYNTAX_FAULTS = (
    regex.error,
    re.error,
    RecursionError,
    OverflowError,
    ValueError,
    IndexError,
    TypeError,
    KeyError,
)


Value = TypeVar("Value")


class PatternFailed(Exception):
    """A pattern cannot be used; the text ends a sentence that begins with the pattern."""


class Patterns:
    """Compiles and matches the patterns of one adapter within one time limit."""

    def __init__(self, seconds_max: float = MATCH_SECONDS_MAX) -> None:
        """The limit starts now."""
        self._deadline_s = time.monotonic() + seconds_max

    def full(self, pattern: str) -> Callable[[str], bool]:
        """As PEFT matches `target_modules` given as a string: the whole name."""
        return self._compiled(pattern, pattern)

    def tail(self, pattern: str) -> Callable[[str], bool]:
        """As PEFT matches keys of `rank_pattern` and `alpha_pattern`: the end of the name, from a
        dot on."""
        return self._compiled(pattern, rf"(.*\.)?({pattern})")

    def layer_of(self, pattern: str) -> Callable[[str], int | None]:
        """As PEFT finds the layer number behind a `layers_pattern`."""
        whole = rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."
        compiled = self._compile(pattern, whole)

        def layer(name: str) -> int | None:
            found = self._match(pattern, compiled.match, name)
            return None if found is None else int(found["idx"])

        return layer

    def _compiled(self, pattern: str, whole: str) -> Callable[[str], bool]:
        compiled = self._compile(pattern, whole)
        if _LITERAL.fullmatch(pattern):
            literal = re.compile(whole)
            return lambda name: literal.fullmatch(name) is not None
        return lambda name: self._match(pattern, compiled.fullmatch, name) is not None

    def _compile(self, pattern: str, whole: str) -> "regex.Pattern[str]":
        if len(pattern) > PATTERN_CHARACTERS_MAX:
            raise PatternFailed(f"is longer than {PATTERN_CHARACTERS_MAX} characters")
        try:
            # The bare pattern first: one with a stray ")" could close our own group and still
            # compile.
            regex.compile(pattern)
            return regex.compile(whole)
        except _SYNTAX_FAULTS as error:
            raise PatternFailed(f"is not a regular expression ({error})") from None

    def _match(
        self, pattern: str, matcher: "Callable[..., regex.Match[str] | None]", name: str
    ) -> "regex.Match[str] | None":
        remaining_s = self._deadline_s - time.monotonic()
        try:
            if remaining_s <= 0:
                raise TimeoutError
            return matcher(name, timeout=remaining_s, concurrent=True)
        except TimeoutError:
            raise PatternFailed(f"takes longer than {MATCH_SECONDS_MAX:g} s to match") from None


def layer_modules(base: BaseShape) -> tuple[str, ...]:
    """Full names of every linear projection of the base's layers, such as
    `model.layers.0.self_attn.q_proj`."""
    return tuple(
        f"{LAYER_PREFIX}{layer}.{target}" for layer in range(base.layers) for target in base.targets
    )


def ends_with(name: str, entries: tuple[str, ...]) -> bool:
    """As PEFT matches lists of names: the whole name, or its end from a dot on."""
    return any(name == entry or name.endswith(f".{entry}") for entry in entries)


def first_value(
    entries: Sequence[tuple[Callable[[str], bool], Value]], name: str, default: Value
) -> Value:
    """The value of the first pattern, in the config's order, that means `name`."""
    for matches, value in entries:
        if matches(name):
            return value
    return default
