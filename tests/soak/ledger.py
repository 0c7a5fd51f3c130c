"""What the driver knows: which weights a name may have stood for, and when.

A change is put down when it is sent and when its answer has come. Between the two both are
possible, before and after only one. So an answer is right when it is one of those that were
possible at any time between the request's sending and the answer's end; nothing else is, the base
model's answer least of all.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

KEPT_S = 300.0
"""What a name stood for is remembered for longer than any request lives."""
SHOWN_FINDINGS_MAX = 50
AFTER_LOSS_S = 5.0
"""How long after the engine is back a request may still be told to come again: what was being
loaded at the loss is tried again after a pause."""


@dataclass(slots=True)
class Span:
    """Weights (None: no such name) that a name may have stood for from one moment to another."""

    weights: str | None
    since_s: float
    until_s: float = math.inf


@dataclass(slots=True)
class Entry:
    """One name. Its changes are made one at a time, under its lock."""

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    spans: list[Span] = field(default_factory=list)
    weights: str | None = None
    """As last acknowledged."""
    source: Path | None = None
    version: str = ""
    pinned: bool = False

    def __post_init__(self) -> None:
        """Unknown at first."""
        self.spans.append(Span(None, -math.inf))

    def begin(self, weights: str | None) -> Span:
        """A change is being sent: from now on the name may stand for this."""
        span = Span(weights, time.monotonic())
        self.spans.append(span)
        return span

    def end(self, span: Span, done: bool) -> None:
        """It was answered: only the new is possible any more, or only the old."""
        now = time.monotonic()
        for other in self.spans:
            if (other is not span) if done else (other is span):
                other.until_s = min(other.until_s, now)
        self.spans = [other for other in self.spans if other.until_s > now - KEPT_S]
        if done:
            self.weights = span.weights

    def possible(self, since_s: float, until_s: float) -> set[str | None]:
        """What it may have stood for at any time of these."""
        return {s.weights for s in self.spans if s.since_s <= until_s and s.until_s >= since_s}


@dataclass(slots=True)
class Loss:
    """One kill of the engine, and the time in which it may be felt."""

    began_s: float
    over_s: float = math.inf


class Ledger:
    """All names, and when the engine was killed."""

    def __init__(self, names: Sequence[str]) -> None:
        """Nothing is loaded yet."""
        self.entries = {name: Entry(name) for name in names}
        self.versions: dict[str, str] = {}
        """Version -> weights, of all that were ever seen."""
        self.losses: list[Loss] = []
        self.pinning = asyncio.Lock()
        """Pins and unpins come one at a time, so that it is known how many there are."""
        self.numbers = itertools.count(1)

    def pinned(self) -> int:
        """Names that are pinned."""
        return sum(entry.pinned for entry in self.entries.values())

    def engine_was_lost(self, since_s: float, until_s: float) -> bool:
        """Whether a kill may be felt at any time of these."""
        return any(loss.began_s <= until_s and loss.over_s >= since_s for loss in self.losses)


class Findings:
    """What was wrong; the run goes on, to see what else is."""

    def __init__(self) -> None:
        """None so far."""
        self.texts: list[str] = []
        self.count = 0

    def add(self, text: str) -> None:
        """Show it at once: a long run may be ended by hand."""
        self.count += 1
        if self.count <= SHOWN_FINDINGS_MAX:
            self.texts.append(text)
            print(f"FINDING {text}", flush=True)
