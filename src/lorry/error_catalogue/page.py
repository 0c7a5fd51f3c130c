"""docs/errors.md, made from the catalogue so that it cannot be out of date."""

from collections.abc import Iterable, Iterator
from enum import StrEnum

from lorry.error_catalogue.entries import TYPES, Entry, entries
from lorry.error_catalogue.words import RetryPattern, Severity

RETRIES: dict[RetryPattern, str] = {
    RetryPattern.NEVER: "The same call gets the same answer.",
    RetryPattern.AFTER_CHANGE: "Only once somebody has mended what is wrong.",
    RetryPattern.REREAD: "Read the adapter or operation again, and decide on what it is now.",
    RetryPattern.RESEND_ONCE: "Once, as a new request: nothing of the one that ended is kept.",
    RetryPattern.BACKOFF: "The same call after `Retry-After`, then with doubling pauses and "
    "jitter.",
}
"""What each word means, for people."""

SEVERITIES: dict[Severity, str] = {
    Severity.INFO: "The caller was told what to mend; the server is well.",
    Severity.WARNING: "Look when it comes often.",
    Severity.ERROR: "Look soon: the engine, the disk or the base model failed at something.",
    Severity.CRITICAL: "Look now, and report it: a bug of Lorry's own.",
}
"""What each word means, for people."""


def errors_page() -> str:
    """The whole page."""
    lines = [
        "# Errors",
        "",
        "<!-- Made from src/lorry/errors.py and src/lorry/error_catalogue/ by",
        "     `python -m lorry.error_catalogue`; do not edit. -->",
        "",
        "The same is in `lorry explain CODE`, in `GET /v1/errors/{code}`, and, as one JSON record",
        "for each error, in `lorry explain --json`. In a pattern, `{}` stands for what varies.",
        "Answers to long calls may begin with the call and the adapter, as in",
        "`load of '{}' failed:`. The routes of a dialect may use the words of the server whose",
        "clients they are for.",
        "",
        *_legend("retry pattern", RETRIES),
        "",
        *_legend("severity", SEVERITIES),
        "",
        "## All codes",
        "",
        "| code | status | class | whose fault | retry | meaning |",
        "|---|---|---|---|---|---|",
        *(_row(each) for each in entries()),
    ]
    for each in entries():
        lines += ["", *section(each)]
    return "\n".join(lines) + "\n"


def _legend(title: str, meanings: dict[RetryPattern, str] | dict[Severity, str]) -> Iterator[str]:
    yield f"| {title} | meaning |"
    yield "|---|---|"
    word: StrEnum
    for word, meaning in meanings.items():
        yield f"| `{word.value}` | {meaning} |"


def _row(each: Entry) -> str:
    kind = each.kind
    cells = (
        f"[`{each.code}`](#{each.code})",
        str(kind.status),
        f"`{kind.__name__}`",
        kind.fault.value,
        f"`{each.words.retry.value}`",
        each.meaning,
    )
    return "| " + " | ".join(cells) + " |"


def section(each: Entry) -> Iterator[str]:
    """What the page says of one error."""
    kind, words = each.kind, each.words
    pause = f", after {kind.retry_after_s:g} s or what the answer says" if kind.retryable else ""
    yield f"## {each.code}"
    yield ""
    yield each.meaning
    yield ""
    yield f"- Class and status: `{kind.__name__}`, {kind.status} ({TYPES[kind.status]})"
    yield f"- Severity: {words.severity.value}; whose fault: {kind.fault.value}"
    yield f"- Retry: `{words.retry.value}`{pause}"
    yield f"- Tags: {', '.join(words.tags)}"
    yield from _part("Messages", (f"`{pattern}`" for pattern in words.patterns))
    yield from _part("What triggers it", words.triggers)
    yield from _part("Common situations", words.situations)
    yield from _part("What to do", words.solutions)
    yield from _part("For programs", [words.handling])
    yield from _part("How to prevent it", words.prevention)


def _part(title: str, items: Iterable[str]) -> Iterator[str]:
    yield ""
    yield f"**{title}**"
    yield ""
    yield from (f"- {item}" for item in items)
