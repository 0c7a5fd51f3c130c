"""Room on one replica: reserved from a load command until the report that the version is gone."""

from dataclasses import dataclass, field

from lorry.errors import BrokenInvariant
from lorry.ids import VersionId


@dataclass(slots=True)
class Budget:
    """Reservations by version, against a limit on their count and one on their bytes."""

    versions_max: int
    bytes_max: int
    bytes: int = 0
    """Bytes reserved."""
    _held: dict[VersionId, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Versions reserved."""
        return len(self._held)

    def holds(self, version: VersionId) -> bool:
        """Whether `version` has a reservation."""
        return version in self._held

    def fits(self, size: int) -> bool:
        """Whether one more version of `size` bytes would stay within both limits."""
        return self.count < self.versions_max and self.bytes + size <= self.bytes_max

    def reserve(self, version: VersionId, size: int) -> None:
        """Hold `size` bytes; raises `BrokenInvariant` rather than overshoot or hold twice."""
        if version in self._held or not self.fits(size):
            raise BrokenInvariant(4, f"reservation of {size} bytes for {version} overshoots")
        self._held[version] = size
        self.bytes += size

    def release(self, version: VersionId) -> None:
        """Give back; raises `BrokenInvariant` when nothing was held."""
        if version not in self._held:
            raise BrokenInvariant(4, f"release of {version}, which has no reservation")
        self.bytes -= self._held.pop(version)
