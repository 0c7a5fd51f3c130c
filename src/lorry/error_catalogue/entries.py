"""Classes and texts put together: what is said of an error, as one value."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lorry.error_catalogue.adapters import ADAPTERS
from lorry.error_catalogue.requests import REQUESTS
from lorry.error_catalogue.server import SERVER
from lorry.error_catalogue.sources import SOURCES
from lorry.error_catalogue.words import Words
from lorry.errors import LorryError

WORDS: Mapping[type[LorryError], Words] = {**REQUESTS, **ADAPTERS, **SOURCES, **SERVER}
"""The texts of each class."""

TYPES: Mapping[int, str] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
"""HTTP status -> `type` in the body; vLLM's words where it has one."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Everything there is to say of one class of errors."""

    kind: type[LorryError]
    words: Words

    @property
    def code(self) -> str:
        """By which people and programs know it."""
        return self.kind.code

    @property
    def meaning(self) -> str:
        """One sentence."""
        return " ".join((self.kind.__doc__ or "").partition("\n\n")[0].split())

    def record(self) -> dict[str, Any]:
        """The export: one record for each error, always with these fields."""
        words = self.words
        return {
            "code": self.kind.code,
            "message_pattern": " | ".join(words.patterns),
            "type": TYPES[self.kind.status],
            "class": self.kind.__name__,
            "http_status": self.kind.status,
            "severity": words.severity.value,
            "fault": self.kind.fault.value,
            "retryable": self.kind.retryable,
            "retry_after_s": self.kind.retry_after_s,
            "trigger_scenarios": list(words.triggers),
            "common_situations": list(words.situations),
            "solutions": list(words.solutions),
            "handling_strategy": words.handling,
            "retry_pattern": words.retry.value,
            "prevention_tips": list(words.prevention),
            "tags": list(words.tags),
        }


def kinds(kind: type[LorryError] = LorryError) -> Iterator[type[LorryError]]:
    """The public classes, families first, in the order of the tree."""
    if kind.__module__ == LorryError.__module__:
        yield kind
        for below in kind.__subclasses__():
            yield from kinds(below)


def entry(kind: type[LorryError]) -> Entry:
    """The entry of a class; a class of another module has that of the public one it stands for."""
    public = next(each for each in kind.__mro__ if each in WORDS)
    return Entry(public, WORDS[public])


def entries() -> tuple[Entry, ...]:
    """All of them, in the order of the tree."""
    return tuple(entry(kind) for kind in kinds())


def find(name: str) -> Entry | None:
    """The entry with that code or class name, whatever its letters' case; "-" is read as "_"."""
    wanted = name.strip().lower().replace("-", "_")
    for each in entries():
        if wanted in (each.code, each.kind.__name__.lower()):
            return each
    return None


def near(name: str) -> tuple[str, ...]:
    """Codes that somebody who wrote `name` may have meant, the likeliest first."""
    wanted = name.strip().lower().replace("-", "_")
    codes = [each.code for each in entries()]
    alike = difflib.get_close_matches(wanted, codes, n=3, cutoff=0.5)
    parts = set(wanted.split("_")) - {""}
    sharing = [code for code in codes if parts & set(code.split("_"))]
    return tuple(dict.fromkeys([*alike, *sharing]))[:5]
