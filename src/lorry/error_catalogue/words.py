"""What the catalogue says of an error beside the facts that its class has already."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much an operator has to care, when one such error comes."""

    INFO = "info"
    """Nothing: the caller was told what to mend, and the server is well."""
    WARNING = "warning"
    """Look when it comes often: room, queues or an adapter want attention."""
    ERROR = "error"
    """Look soon: the engine, the disk or the base model failed at something."""
    CRITICAL = "critical"
    """Look now, and report it: a bug of Lorry's own."""


class RetryPattern(StrEnum):
    """What trying again can do; clients act on this word."""

    NEVER = "never"
    """The same call gets the same answer."""
    AFTER_CHANGE = "after_change"
    """Only once somebody has mended what is wrong."""
    REREAD = "reread"
    """Read the adapter or operation again first, and decide on what it is now."""
    RESEND_ONCE = "resend_once"
    """Once, as a new request: the one that ended is lost, and nothing of it is kept."""
    BACKOFF = "backoff"
    """The same call again: after Retry-After, then with doubling pauses and jitter."""


@dataclass(frozen=True, slots=True)
class Words:
    """The texts for one class of errors; the `{}` in a pattern stand for what varies."""

    patterns: tuple[str, ...]
    """Every message it can have, each with `{}` in place of names, numbers and reasons."""
    severity: Severity
    retry: RetryPattern
    triggers: tuple[str, ...]
    """What in Lorry gives it."""
    situations: tuple[str, ...]
    """What people were doing when they met it."""
    solutions: tuple[str, ...]
    """What to do now, the likeliest first."""
    handling: str
    """What a program that calls Lorry should do."""
    prevention: tuple[str, ...]
    """What to do so that it does not come again."""
    tags: tuple[str, ...]
