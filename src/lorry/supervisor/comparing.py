"""Two adapters side by side, each one that is registered, an earlier version of it, or a folder.
Registered ones are read from the disk cache: their source may be another by now, or gone."""

import anyio
from anyio import to_thread

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.comparing import Difference as Difference
from lorry.artifacts.comparing import Side, compare
from lorry.artifacts.sources import resolve_local
from lorry.errors import AdapterNotFound
from lorry.ids import SHORT_VERSION_DIGITS, AdapterName, VersionId, short
from lorry.supervisor.registry import Registry
from lorry.supervisor.settings import SupervisorSettings

COMPARISONS_MAX = 1
"""At once; each keeps a core busy for seconds, in a thread of its own."""

FOLDER_BEGINS = ("/", "~", "file:")
"""How a folder is told from the name of an adapter."""


class Comparer:
    """Compares adapters of one registry."""

    def __init__(self, registry: Registry, cache: DiskCache, settings: SupervisorSettings) -> None:
        """Reads both, changes neither."""
        self._registry = registry
        self._cache = cache
        self._settings = settings
        self._threads = anyio.CapacityLimiter(COMPARISONS_MAX)

    async def diff(self, a: str, b: str) -> Difference:
        """What tells `a` and `b` apart."""
        found = (self._version(a), self._version(b))
        return await to_thread.run_sync(self._compare, (a, b), found, limiter=self._threads)

    def _version(self, given: str) -> VersionId | None:
        """The version that a name means; None for a folder. Raises `AdapterNotFound`."""
        record = self._registry.records.get(AdapterName(given))
        if record is not None:
            return record.manifest.version
        stem, _, wanted = given.rpartition("@")
        record = self._registry.records.get(AdapterName(stem))
        if record is not None and len(wanted) >= SHORT_VERSION_DIGITS:
            for version in (record.manifest.version, *record.previous):
                if version.startswith(wanted.lower()):
                    return version
            raise AdapterNotFound(f"No {wanted} of '{stem}' is kept on disk.")
        if not given.startswith(FOLDER_BEGINS):
            raise AdapterNotFound(f"The adapter '{given}' cannot be found.")
        return None

    def _compare(
        self, titles: tuple[str, str], versions: tuple[VersionId | None, VersionId | None]
    ) -> Difference:
        """In a worker thread."""
        one, other = map(self._side, titles, versions)
        return compare(one, other)

    def _side(self, title: str, version: VersionId | None) -> Side:
        if version is None:
            roots = tuple(self._settings.adapter_roots)
            return Side(title, resolve_local(title, roots), roots)
        path = self._cache.open(version)
        if path is None:
            raise AdapterNotFound(f"No {short(version)} of '{title}' is kept on disk.")
        return Side(title, path, is_snapshot=True)
