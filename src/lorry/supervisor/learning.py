"""Names on demand: carries out what `lifecycle.learning` decides about names that nobody
registered."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from lorry.artifacts.remote.uri import redact
from lorry.errors import LorryError, ShuttingDown, SourceNotFound
from lorry.ids import AdapterName, OperationId
from lorry.lifecycle.learning import Idle, Join, Learner, LookUp, Refuse, not_found
from lorry.store.store import AdapterRecord

log = logging.getLogger(__name__)

LABEL = "lorry.learnt"
"""Marks a registered name as learnt, also after a restart. Who gives it labels, settings or other
weights keeps it for good."""


class Calls(Protocol):
    """What learning needs of the supervisor."""

    def register(self, name: AdapterName, source: str, labels: Mapping[str, str]) -> OperationId:
        """Begin to register a new name, without loading it."""

    def forget(self, name: AdapterName) -> OperationId:
        """Begin to unload a name."""

    async def ended(self, operation: OperationId) -> None:
        """Wait for the end of a call; raises its error."""


@dataclass(slots=True)
class _Flight:
    """One look-up, and everybody who waits for it."""

    ended: anyio.Event = field(default_factory=anyio.Event)
    error: LorryError | None = None


class Learning:
    """Looks names up for one supervisor."""

    def __init__(
        self,
        learner: Learner,
        calls: Calls,
        records: Mapping[AdapterName, AdapterRecord],
        idle: Idle,
        now_ms: Callable[[], int],
        spawn: Callable[..., None],
    ) -> None:
        """`records` is the registry; `spawn` begins a task that outlives the request."""
        self._learner = learner
        self._calls = calls
        self._records = records
        self._idle = idle
        self._now_ms = now_ms
        self._spawn = spawn
        self._flights: dict[AdapterName, _Flight] = {}

    def restore(self) -> None:
        """Remember which registered names were learnt in an earlier life."""
        learnt = (record for record in self._records.values() if LABEL in record.labels)
        for record in sorted(learnt, key=lambda record: record.updated_s):
            self._learner.learnt(record.name, lambda _: False)

    def used(self, name: AdapterName) -> None:
        """A request came for a registered name."""
        self._learner.used(name)

    def learnable(self, name: str) -> bool:
        """Whether such a name is ever looked up."""
        return self._learner.learnable(name)

    async def learn(self, name: AdapterName) -> None:
        """Return once the name is registered. Raises `AdapterNotFound`, or why it cannot be."""
        self._drop_strangers()
        match self._learner.ask(name, self._now_ms(), self._may_go):
            case Refuse(error):
                raise error
            case LookUp(sources):
                self._flights[name] = _Flight()
                self._spawn(self._look_up, name, sources)
            case Join():
                pass
        flight = self._flights[name]
        await flight.ended.wait()
        if flight.error is not None:
            raise flight.error

    def _drop_strangers(self) -> None:
        """Names that were unloaded, or that somebody made his own, are not ours to forget."""
        for name in self._learner.names:
            if not self._is_learnt(name):
                self._learner.forget(name)

    def _may_go(self, name: AdapterName) -> bool:
        return self._is_learnt(name) and not self._records[name].pinned and self._idle(name)

    async def _look_up(self, name: AdapterName, sources: tuple[str, ...]) -> None:
        flight = self._flights[name]
        error: LorryError | None = ShuttingDown("The server is stopping.")
        try:
            error = await self._first_of(name, sources)
        finally:
            flight.error = error
            self._note(name, error)
            del self._flights[name]
            flight.ended.set()

    def _note(self, name: AdapterName, error: LorryError | None) -> None:
        """Tell the learner how a look-up ended, and let go whoever has to go for it."""
        if error is not None:
            self._learner.failed(name, error, self._now_ms())
        elif self._is_learnt(name):
            for each in self._learner.learnt(name, self._may_go):
                self._spawn(self._forget, each)
        else:
            self._learner.registered(name)

    def _is_learnt(self, name: AdapterName) -> bool:
        record = self._records.get(name)
        return record is not None and LABEL in record.labels

    async def _first_of(self, name: AdapterName, sources: tuple[str, ...]) -> LorryError | None:
        """Register the name from the first source that has it; None when that worked."""
        for source in sources:
            try:
                labels = {LABEL: redact(source)}
                await self._calls.ended(self._calls.register(name, source, labels))
            except SourceNotFound as error:
                log.debug("'%s' is not at %s: %s", name, redact(source), error)
            except LorryError as error:
                # Somebody else may have registered it meanwhile, which is as good.
                return None if name in self._records else error
            else:
                return None
        return not_found(name)

    async def _forget(self, name: AdapterName) -> None:
        try:
            await self._calls.ended(self._calls.forget(name))
        except LorryError as error:
            log.warning("'%s' could not be forgotten: %s", name, error)
