"""Follows `--adapter-dir`: looks at the folder now and then, and carries out what
`lifecycle.following` decides."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import anyio
from anyio import to_thread

from lorry.artifacts.shelves import last_change_s, look
from lorry.errors import LorryError
from lorry.ids import AdapterName, OperationId, VersionId
from lorry.lifecycle.following import Follower, Leave, Take
from lorry.store.store import AdapterRecord

log = logging.getLogger(__name__)

AT_ONCE_MAX = 4
"""Changes carried out at the same time; each reads a folder."""


class Calls(Protocol):
    """What following needs of the supervisor."""

    def publish(self, name: AdapterName, source: str, *, new: bool) -> OperationId:
        """Begin to register a name, or to replace what it stands for."""

    async def version_at(self, source: str) -> VersionId | None:
        """The version that a folder holds; None when it cannot be served."""

    def forget(self, name: AdapterName) -> OperationId:
        """Begin to unload a name."""

    async def ended(self, operation: OperationId) -> None:
        """Wait for the end of a call; raises its error."""


class Following:
    """One folder that is followed."""

    def __init__(
        self,
        folder: Path,
        interval_s: float,
        calls: Calls,
        records: Mapping[AdapterName, AdapterRecord],
    ) -> None:
        """`records` is the registry."""
        self._folder = Path(folder).absolute()
        self._interval_s = interval_s
        self._calls = calls
        self._records = records
        self._follower = Follower()
        self._complaint = ""
        self._met: set[AdapterName] = set()
        """Names about which something was decided in this life of the server."""

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.step()
            await anyio.sleep(self._interval_s)

    async def step(self) -> None:
        """One look, and what follows from it. A folder that cannot be listed changes nothing: it
        may be a disk that comes back."""
        try:
            seen = await to_thread.run_sync(look, self._folder)
        except OSError as error:
            self._complain(f"{self._folder} cannot be listed ({error.strerror}); nothing changes")
            return
        self._complain("")
        ours = {name for name, record in self._records.items() if self._is_ours(record)}
        theirs = self._records.keys() - ours
        limiter = anyio.CapacityLimiter(AT_ONCE_MAX)
        async with anyio.create_task_group() as group:
            for decision in self._follower.look(seen, ours, theirs):
                group.start_soon(self._carry_out, decision, limiter)

    def _is_ours(self, record: AdapterRecord) -> bool:
        return record.source == self._source(record.name)

    def _source(self, name: AdapterName) -> str:
        return str(self._folder / name)

    async def _carry_out(self, decision: Take | Leave, limiter: anyio.CapacityLimiter) -> None:
        name = decision.name
        async with limiter:
            try:
                first = name not in self._met
                self._met.add(name)
                if isinstance(decision, Leave):
                    call = self._calls.forget(name)
                elif first and await self._was_rolled_back(name):
                    return
                else:
                    new = name not in self._records
                    call = self._calls.publish(name, self._source(name), new=new)
                await self._calls.ended(call)
            except LorryError as error:
                log.warning("'%s' of %s: %s", name, self._folder, error)
                if error.retryable:
                    self._follower.try_again(name)

    async def _was_rolled_back(self, name: AdapterName) -> bool:
        """Whether the folder holds what its name was rolled back from in an earlier life, and rests
        since: what was acknowledged then still holds."""
        record = self._records.get(name)
        if record is None or not record.previous:
            return False
        try:
            changed_s = await to_thread.run_sync(last_change_s, self._folder / name)
        except OSError:
            return False  # its load says why
        if changed_s >= record.updated_s:
            return False
        return await self._calls.version_at(self._source(name)) in record.previous

    def _complain(self, complaint: str) -> None:
        """Say what is wrong once, not at every look."""
        if complaint and complaint != self._complaint:
            log.warning("%s", complaint)
        self._complaint = complaint
