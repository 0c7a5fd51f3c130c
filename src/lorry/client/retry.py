"""Trying again, as the catalogue of errors says: only codes that it calls retryable, after
`Retry-After`, with doubling pauses and jitter, until a deadline."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from lorry.error_catalogue import RetryPattern, entry
from lorry.errors import AnswerLost, LorryError


@dataclass(frozen=True, slots=True)
class Retry:
    """How long and how often a client tries one call."""

    deadline_s: float = 60.0
    """From the first try: no pause reaches beyond it. 0 tries once."""
    first_pause_s: float = 0.5
    """Doubles from try to try; `Retry-After` makes it longer, never shorter."""
    pause_max_s: float = 20.0
    """Of the doubling; a longer `Retry-After` is obeyed."""
    jitter: float = 0.5
    """Share of a pause that is added at random, so that many clients do not come back at once."""
    now: Callable[[], float] = time.monotonic
    """Tests hand in their own."""
    random: Callable[[], float] = random.random
    """From 0 to 1."""


NO_RETRY = Retry(deadline_s=0.0)
"""One try; what a person at a terminal wants."""


class Attempts:
    """The tries of one call."""

    def __init__(self, retry: Retry) -> None:
        """The deadline runs from here."""
        self._retry = retry
        self._began = retry.now()
        self._failures = 0
        self._sent_again = False

    def pause_after(
        self, error: LorryError, *, reads: bool = False, resend: bool = False
    ) -> float | None:
        """Seconds to wait before the next try, or None to give up with this error. `reads`: the
        call changes nothing. `resend`: it is a request to a model, of which nothing is kept."""
        if not self._may(error, reads=reads, resend=resend):
            return None
        retry = self._retry
        pause = min(retry.pause_max_s, retry.first_pause_s * 2.0**self._failures)
        pause = max(pause, error.retry_after_s or 0.0)
        pause += pause * retry.jitter * retry.random()
        if retry.now() - self._began + pause > retry.deadline_s:
            return None
        self._failures += 1
        return pause

    def began_well(self) -> None:
        """A long-lived call got through: pauses and the deadline begin anew."""
        self._failures = 0
        self._began = self._retry.now()

    def _may(self, error: LorryError, *, reads: bool, resend: bool) -> bool:
        pattern = entry(type(error)).words.retry
        if pattern is RetryPattern.BACKOFF or (reads and isinstance(error, AnswerLost)):
            return True
        once = pattern is RetryPattern.RESEND_ONCE or isinstance(error, AnswerLost)
        if not (resend and once) or self._sent_again:
            return False
        self._sent_again = True
        return True
