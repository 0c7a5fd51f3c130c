"""Which versions to give up for another: a function of what is known, with no state of its own."""

from collections.abc import Iterable
from dataclasses import dataclass

from lorry.ids import VersionId


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that may be given up."""

    version: VersionId
    bytes: int
    last_used_ms: int
    leases: int = 0


def choose_victims(
    candidates: Iterable[Candidate], count_short: int, bytes_short: int
) -> tuple[VersionId, ...]:
    """Victims that free `count_short` places and `bytes_short` bytes, least recently used first,
    idle before leased.

    Fewer than needed when the candidates do not suffice: freeing some now is still progress for
    whoever waits.
    """
    victims: list[VersionId] = []
    order = sorted(candidates, key=lambda c: (c.leases, c.last_used_ms, c.version))
    for candidate in order:
        if count_short <= 0 and bytes_short <= 0:
            break
        victims.append(candidate.version)
        count_short -= 1
        bytes_short -= candidate.bytes
    return tuple(victims)
