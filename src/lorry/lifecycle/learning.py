"""Names that nobody registered: which may be looked up where, and when again. Decisions only; the
supervisor carries them out.

Four rules keep a stranger from turning unknown names into work:

1. One look-up per name at a time; whoever else asks for it waits for the same answer.
2. What was not found, or could not be served, is not looked up again for a while.
3. Look-ups have a rate and a number that may run at once.
4. Names learnt have a bound. A name found beyond it takes the place of the one unused for longest,
   and only once it has been found: asking for names that do not exist forgets nobody."""

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lorry.errors import AdapterNotFound, LorryError, QueueFull, SourceNotFound
from lorry.ids import AdapterName

NAME_FIELD = "{name}"
"""What stands for the name in a pattern."""

NAME_CHARACTERS_MAX = 200

_LEARNABLE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._\-]*(?:/[A-Za-z0-9_][A-Za-z0-9._\-]*)*")
"""Letters, digits, `.`, `_`, `-`, in parts between slashes that begin with neither dot nor dash: in
every kind of source such a name is what it looks like, and leads nowhere else."""

Idle = Callable[[AdapterName], bool]
"""Whether a learnt name may be forgotten now."""


@dataclass(frozen=True, slots=True)
class LearningLimits:
    """How much may be learnt. Times in milliseconds."""

    names_max: int = 1000
    lookups_per_minute: int = 60
    lookups_max: int = 16
    """At once."""
    retry_ms: int = 60_000
    """Before a name that was not found, or could not be served, is looked up again."""
    retry_passing_ms: int = 5_000
    """The same after a failure that may pass, if that is sooner."""
    remembered_max: int = 10_000
    """Failures that are remembered; of more, the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look for the name in these sources, in this order; then report `learnt` or `failed`."""

    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Somebody looks already: wait for that."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Not now, or not at all."""

    error: LorryError


@dataclass(frozen=True, slots=True)
class _Failure:
    error: LorryError
    until_ms: int


class Learner:
    """What is known of names on demand. Time is handed in."""

    def __init__(self, patterns: Sequence[str], limits: LearningLimits) -> None:
        """Each pattern is a source with `NAME_FIELD` in it."""
        self._patterns = tuple(patterns)
        self._limits = limits
        self._names: OrderedDict[AdapterName, None] = OrderedDict()
        """Learnt, the one unused for longest first."""
        self._looking: set[AdapterName] = set()
        self._failures: OrderedDict[AdapterName, _Failure] = OrderedDict()
        self._tokens = float(limits.lookups_per_minute)
        self._tokens_ms = 0

    @property
    def names(self) -> tuple[AdapterName, ...]:
        """All that are learnt, the one unused for longest first."""
        return tuple(self._names)

    def learnable(self, name: str) -> bool:
        """Whether such a name is ever looked up."""
        fits = len(name) <= NAME_CHARACTERS_MAX and _LEARNABLE.fullmatch(name) is not None
        return bool(self._patterns) and fits

    def ask(self, name: AdapterName, now_ms: int, idle: Idle) -> LookUp | Join | Refuse:
        """What to do about a name that is not registered."""
        if not self.learnable(name):
            return Refuse(not_found(name))
        if name in self._looking:
            return Join()
        failure = self._failures.get(name)
        if failure is not None and now_ms < failure.until_ms:
            return Refuse(failure.error)
        error = self._crowded(now_ms, idle)
        if error is not None:
            return Refuse(error)
        self._tokens -= 1
        self._failures.pop(name, None)
        self._looking.add(name)
        return LookUp(tuple(pattern.replace(NAME_FIELD, name) for pattern in self._patterns))

    def _crowded(self, now_ms: int, idle: Idle) -> QueueFull | None:
        """Why no look-up may begin now."""
        limits = self._limits
        per_ms = limits.lookups_per_minute / 60_000
        gained = max(0, now_ms - self._tokens_ms) * per_ms
        self._tokens = min(float(limits.lookups_per_minute), self._tokens + gained)
        self._tokens_ms = now_ms
        if self._tokens < 1:
            wait_s = (1 - self._tokens) / per_ms / 1000
            return QueueFull(
                f"More than {limits.lookups_per_minute} unknown names a minute are asked for "
                "(--resolver-rate).",
                retry_after_s=wait_s,
            )
        if len(self._looking) >= limits.lookups_max:
            return QueueFull(f"{len(self._looking)} unknown names are being looked up already.")
        full = len(self._names) >= limits.names_max
        if full and not any(idle(name) for name in self._names):
            return QueueFull(
                f"{len(self._names)} names are learnt (--resolver-names), and all are in use."
            )
        return None

    def used(self, name: AdapterName) -> None:
        """A request came for a name; says nothing of names that were not learnt."""
        if name in self._names:
            self._names.move_to_end(name)

    def learnt(self, name: AdapterName, idle: Idle) -> tuple[AdapterName, ...]:
        """It was found and is registered. Answers which names have to go for it."""
        self._looking.discard(name)
        self._names[name] = None
        self._names.move_to_end(name)
        over = len(self._names) - self._limits.names_max
        gone = [each for each in self._names if each != name and idle(each)][: max(0, over)]
        for each in gone:
            del self._names[each]
        return tuple(gone)

    def registered(self, name: AdapterName) -> None:
        """Somebody else registered it while it was looked up, so it is not a learnt one."""
        self._looking.discard(name)

    def failed(self, name: AdapterName, error: LorryError, now_ms: int) -> None:
        """It was not found, or cannot be served."""
        self._looking.discard(name)
        limits = self._limits
        wait_ms = limits.retry_ms
        if error.retryable:
            wait_ms = min(wait_ms, limits.retry_passing_ms)
        if isinstance(error, SourceNotFound):
            error = not_found(name)
        self._failures[name] = _Failure(error, now_ms + wait_ms)
        self._failures.move_to_end(name)
        while len(self._failures) > limits.remembered_max:
            self._failures.popitem(last=False)

    def forget(self, name: AdapterName) -> None:
        """It is not registered any more, or not as a learnt one."""
        self._names.pop(name, None)


def not_found(name: str) -> AdapterNotFound:
    """The answer for a name that no source has."""
    return AdapterNotFound(f"The adapter '{name}' cannot be found.", param="model")
