"""The versions in host memory, limited by count and bytes; of anything that has a size: no torch.

A load *reserves* its place when it begins and *holds* it when it has ended well, so that any number
of loads at once never passes a limit, not even for a moment (promise 4).
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lorry.engine import LoraVersion
from lorry.errors import EngineRejected
from lorry.ids import EngineId


class Sized(Protocol):
    """A packed adapter, as far as the books are concerned."""

    @property
    def bytes(self) -> int:
        """Host memory it takes."""


Packed = TypeVar("Packed", bound=Sized)


@dataclass(frozen=True, slots=True)
class Held(Generic[Packed]):
    """One version and its packed adapter."""

    version: LoraVersion
    adapter: Packed


class HostCache(Generic[Packed]):
    """What `list_loras` reports."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        """Nothing is held."""
        self.max_count = max_count
        self.max_bytes = max_bytes
        self._held: dict[EngineId, Held[Packed]] = {}
        self._reserved: dict[EngineId, LoraVersion] = {}

    @property
    def bytes(self) -> int:
        """Of all that is held and reserved."""
        held = sum(held.adapter.bytes for held in self._held.values())
        return held + sum(version.bytes for version in self._reserved.values())

    def ids(self) -> frozenset[EngineId]:
        """What is held."""
        return frozenset(self._held)

    def get(self, engine_id: EngineId) -> Held[Packed] | None:
        """What is held under an id."""
        return self._held.get(engine_id)

    def reserve(self, version: LoraVersion) -> None:
        """Keep a place for a load that begins. Raises `EngineRejected` when there is none."""
        engine_id = version.engine_id
        if engine_id <= 0:
            raise EngineRejected(f"Engine id {engine_id} of {version.name} is not positive.")
        if engine_id in self._held or engine_id in self._reserved:
            raise EngineRejected(
                f"Engine id {engine_id} is in use, so {version.name} cannot have it too."
            )
        count = len(self._held) + len(self._reserved)
        if count >= self.max_count:
            raise EngineRejected(
                f"Host memory holds {count} versions and max_cpu_loras is {self.max_count}, "
                f"so there is no room for {version.name}; remove another first."
            )
        self._check_bytes(version, version.bytes)
        self._reserved[engine_id] = version

    def hold(self, version: LoraVersion, adapter: Packed) -> None:
        """The load ended well. Raises `EngineRejected`, and holds nothing, if it is too big."""
        del self._reserved[version.engine_id]
        self._check_bytes(version, adapter.bytes)
        self._held[version.engine_id] = Held(version, adapter)

    def cancel(self, engine_id: EngineId) -> None:
        """The load ended badly."""
        self._reserved.pop(engine_id, None)

    def remove(self, engine_id: EngineId) -> Held[Packed] | None:
        """Give it up."""
        return self._held.pop(engine_id, None)

    def _check_bytes(self, version: LoraVersion, more: int) -> None:
        now = self.bytes
        if now + more > self.max_bytes:
            raise EngineRejected(
                f"{version.name} needs {more} bytes of host memory, but {now} of host_cache_bytes "
                f"{self.max_bytes} are taken; remove another first."
            )
