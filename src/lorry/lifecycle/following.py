"""A folder of adapters that is followed: what to register, replace and unload after each look at
it. Decisions only; the supervisor looks and carries them out.

Three rules:

1. Nothing is believed the first time. A folder is taken once two looks in a row saw the same files
   (names, sizes, times) in it, and a name goes once two looks in a row did not see it: what is
   being written or moved is left alone.
2. What was taken is not taken again before it changes; what was refused is not tried again before
   it changes either, unless its error may pass.
3. A name that somebody registered from elsewhere is theirs: the folder neither replaces nor unloads
   it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lorry.ids import AdapterName

Fingerprint = str
"""Changes when any file of the folder does."""


@dataclass(frozen=True, slots=True)
class Take:
    """Register the folder as this name, or replace what it registered before."""

    name: AdapterName
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Leave:
    """Unload the name: its folder is gone."""

    name: AdapterName


class Follower:
    """What was seen and done so far, for one folder."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._seen: Mapping[AdapterName, Fingerprint] = {}
        self._absent: frozenset[AdapterName] = frozenset()
        self._taken: dict[AdapterName, Fingerprint] = {}

    def look(
        self,
        seen: Mapping[AdapterName, Fingerprint],
        ours: Collection[AdapterName],
        theirs: Collection[AdapterName],
    ) -> tuple[Take | Leave, ...]:
        """What to do after a look. `ours` are the names registered from this folder, `theirs` all
        others."""
        settled = {name: mark for name, mark in seen.items() if self._seen.get(name) == mark}
        takes = [
            Take(name, mark)
            for name, mark in sorted(settled.items())
            if name not in theirs and self._taken.get(name) != mark
        ]
        absent = frozenset(name for name in ours if name not in seen)
        leaves = [Leave(name) for name in sorted(absent & self._absent)]
        self._seen, self._absent = dict(seen), absent
        for name in [name for name in self._taken if name not in seen]:
            del self._taken[name]
        self._taken.update({take.name: take.fingerprint for take in takes})
        return (*takes, *leaves)

    def try_again(self, name: AdapterName) -> None:
        """What was to be done failed for a reason that may pass: the next look asks for it
        again."""
        self._taken.pop(name, None)
