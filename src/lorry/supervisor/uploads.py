"""Adapters that come with a request: whose load is under way, and which versions lie in memory
until their copy is on the disk.

The road of weights: parcel → snapshot in memory → engine, and beside that → disk cache. A load that
asked to be durable publishes its version only when both have ended well, so a failing disk leaves
what was served before (promise 4) and a killed server loses nothing acknowledged (promise 8). One
that did not ask publishes as soon as the engine holds the version; its copy follows in the
background, and is left out when a newer version has taken its place by then.
"""

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.memory import MemorySnapshot
from lorry.artifacts.parcels import Parcel, WeightsParcel
from lorry.errors import LorryError, StorageFailed
from lorry.ids import AdapterName, OperationId, VersionId, short

log = logging.getLogger(__name__)

JUDGED_MAX = 2
"""Uploads judged at once, in threads of their own: no slow disk under a folder holds them up."""

COPIED_MAX = 2
"""Versions written to the disk at once; more would share one disk and finish no sooner."""

Wanted = Callable[[VersionId], bool]
Tell = Callable[[AdapterName, VersionId, str], None]


@dataclass(slots=True, eq=False)
class _Transit:
    """A version in memory."""

    name: AdapterName
    memory: MemorySnapshot
    durable: bool
    operations: set[OperationId] = field(default_factory=set)
    """Loads under way that brought it or found it here."""
    readers: int = 0
    """Engines that are reading it."""
    begun: bool = False
    """Its copy is being written, or was."""
    error: LorryError | None = None
    settled: anyio.Event = field(default_factory=anyio.Event)
    """The copy is there, or `error` says why not."""

    def again(self) -> None:
        """A copy that failed may be begun anew."""
        self.begun, self.error, self.settled = False, None, anyio.Event()


class Uploads:
    """Parcels by operation, and versions in memory. Used from the event loop alone."""

    def __init__(self, cache: DiskCache, wanted: Wanted, tell: Tell) -> None:
        """`wanted` answers whether a name or a load wants a version; `tell` is told of copies that
        could not be made."""
        self._cache = cache
        self._wanted = wanted
        self._tell = tell
        self._parcels: dict[OperationId, Parcel] = {}
        self._transits: dict[VersionId, _Transit] = {}
        self._uploaded: set[VersionId] = set()
        self._copying = anyio.CapacityLimiter(COPIED_MAX)
        self._copy_threads = anyio.CapacityLimiter(COPIED_MAX)
        self.judging = anyio.CapacityLimiter(JUDGED_MAX)
        """The threads in which uploads are judged."""

    def restore(self, versions: Iterable[VersionId]) -> None:
        """These came with requests to an earlier server."""
        self._uploaded.update(versions)

    def statistics(self) -> Mapping[str, int]:
        """Loads under way that came with a parcel, and versions in memory."""
        return {"parcels": len(self._parcels), "in_memory": len(self._transits)}

    def begin(self, operation: OperationId, parcel: Parcel) -> None:
        """A load takes its parcel over."""
        self._parcels[operation] = parcel

    def find(self, source: str) -> Parcel | None:
        """The parcel of a load under way."""
        return next((one for one in self._parcels.values() if one.source == source), None)

    def fetched(self, name: AdapterName, parcel: Parcel, version: VersionId) -> bool:
        """Its snapshot was made. Whether its copy must be begun now, by `copy`."""
        operation = next((op for op, one in self._parcels.items() if one is parcel), None)
        if operation is None:
            return False  # the load has ended meanwhile, and took the parcel with it
        self._uploaded.add(version)
        if not isinstance(parcel, WeightsParcel) or parcel.made is None:
            return False
        transit = self._transits.get(version)
        if transit is None:
            transit = _Transit(name, parcel.made, parcel.durable)
            self._transits[version], parcel.made = transit, None
        elif transit.error is not None:
            transit.again()
        transit.durable = transit.durable or parcel.durable
        transit.operations.add(operation)
        return transit.durable and not transit.begun

    def end(self, operation: OperationId) -> tuple[VersionId, ...]:
        """An admin call is over, however that was. Answers the versions whose copies follow now."""
        parcel = self._parcels.pop(operation, None)
        if parcel is not None:
            parcel.close()
        for transit in self._transits.values():
            transit.operations.discard(operation)
        self._tidy()
        return tuple(v for v, t in self._transits.items() if not t.begun and not t.operations)

    def forget(self, version: VersionId) -> bool:
        """No name stands for it or can be rolled back to it. Whether it came with a request, so
        that its copy on the disk serves nobody any more."""
        known = version in self._uploaded
        self._uploaded.discard(version)
        return known

    @contextmanager
    def reading(self, version: VersionId) -> Iterator[Path | None]:
        """Where it lies in memory, for as long as the context lasts; None when it does not."""
        transit = self._transits.get(version)
        if transit is None:
            yield None
            return
        transit.readers += 1
        try:
            yield transit.memory.snapshot.path
        finally:
            transit.readers -= 1
            self._tidy()

    async def copy(self, version: VersionId) -> None:
        """Bring the version to the disk, unless nobody wants it by the time there is a thread for
        it."""
        transit = self._transits.get(version)
        if transit is None or transit.begun:
            return
        transit.begun = True
        async with self._copying:
            if transit.durable or self._wanted(version):
                await self._adopt(version, transit)
        if not self._wanted(version):
            self._cache.release(version)
            if version not in self._uploaded:
                await self.drop(version)
        transit.settled.set()
        self._tidy()

    async def _adopt(self, version: VersionId, transit: _Transit) -> None:
        work = partial(self._cache.adopt, transit.name, transit.memory.snapshot)
        try:
            await to_thread.run_sync(work, limiter=self._copy_threads)
        except LorryError as error:
            transit.error = error
        except Exception as problem:
            log.exception("copy of %s", transit.name)
            transit.error = StorageFailed(f"The copy could not be written: {problem!r}")
        if transit.error is not None and not transit.durable:
            text = f"{short(version)} is in memory only: {transit.error}"
            self._tell(transit.name, version, text)

    async def drop(self, version: VersionId) -> None:
        """Remove the copy of an upload that nobody can ask for any more, unless it has come again
        meanwhile."""
        work = partial(self._cache.retain, partial(operator.ne, version))
        try:
            await to_thread.run_sync(work, limiter=self._copy_threads)
        except LorryError as error:
            log.warning("removal of %s: %s", short(version), error)

    async def durable(self, version: VersionId, limit_s: float) -> None:
        """Return once the copy is on the disk, if a load asked for that. Raises `StorageFailed` or
        `CapacityExhausted`."""
        transit = self._transits.get(version)
        if transit is None or not transit.durable:
            return
        with anyio.move_on_after(limit_s) as scope:
            await transit.settled.wait()
        if scope.cancelled_caught:
            raise StorageFailed(
                f"The copy of {short(version)} was not on the disk within {limit_s:g} s, so it was "
                "not published."
            )
        if transit.error is not None:
            raise transit.error

    async def flush(self) -> None:
        """Return once every version that names stand for is on the disk, or cannot be: a copy that
        had failed is tried once more, since the disk may have room by now."""
        for version, transit in tuple(self._transits.items()):
            if self._wanted(version):
                await transit.settled.wait()
                if transit.error is not None:
                    transit.again()
                    await self.copy(version)

    def close(self) -> None:
        """Give all memory back: the server ends."""
        for parcel in self._parcels.values():
            parcel.close()
        for transit in self._transits.values():
            transit.memory.close()
        self._parcels.clear()
        self._transits.clear()

    def _tidy(self) -> None:
        """Give back the memory of versions that are on the disk, or that nobody wants."""
        for version, transit in tuple(self._transits.items()):
            busy = transit.operations or transit.readers
            writing = transit.begun and not transit.settled.is_set()
            if busy or writing:
                continue
            copied = transit.begun and transit.error is None
            if copied or not self._wanted(version):
                del self._transits[version]
                transit.memory.close()
                transit.settled.set()
