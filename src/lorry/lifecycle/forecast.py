"""What a load would do to the versions that are resident now: a question, and nothing changes.

It asks the functions by which `room.py` decides, about the world as it is at this moment: who is
waiting for room already is not counted, since a forecast cannot know who will still wait then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lorry.errors import EngineUnreachable, LorryError
from lorry.ids import AdapterName, VersionId
from lorry.lifecycle import events as ev
from lorry.lifecycle import fitting
from lorry.lifecycle.eviction import Candidate, choose_victims
from lorry.lifecycle.records import Replica
from lorry.lifecycle.room import Room, Shortage, best_resident, may_go, survey
from lorry.lifecycle.states import State
from lorry.lifecycle.world import World


@dataclass(frozen=True, slots=True)
class Victim:
    """A version that would go."""

    version: VersionId
    names: tuple[AdapterName, ...]
    """What it serves now."""
    leases: int
    """Requests that run on it: it would be drained for them to end first."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a load of a version under a name would meet."""

    resident: bool
    """It is served already, so nothing has to be loaded."""
    replaces: VersionId | None
    """The version that the name stands for now, when it is another."""
    evicts: tuple[Victim, ...]
    """What would make room, in this order."""
    waits: bool
    """Even so there is not room enough now: the load would wait, and could run out of time."""
    error: LorryError | None
    """Why it would be refused whatever is evicted."""


def forecast(world: World, name: AdapterName, spec: ev.VersionSpec) -> Forecast:
    """What would follow if `spec` were loaded as `name` now. Changes nothing."""
    old = world.adapters.get(name)
    replaced = old.spec.version if old is not None and old.spec.version != spec.version else None
    resident = best_resident(world, spec.version) is not None
    replicas = tuple(world.replicas.values())
    errors = [_objection(world, replica, name, spec) for replica in replicas]
    error = _refusal(replicas, errors)
    if resident or error is not None:
        return Forecast(resident, replaced, (), False, error)
    able = [r for r, found in zip(replicas, errors, strict=True) if r.up and found is None]
    if not able:  # one that is down could take it: the load would wait for that
        return Forecast(resident, replaced, (), True, None)
    rooms = [survey(world, replica) for replica in able]
    fit = [room for room in rooms if room.fits(spec.bytes)]
    room = max(fit or rooms, key=lambda room: (room.places, room.bytes))
    evicts, waits = ((), False) if fit else _victims(world, room, spec, replaced)
    return Forecast(resident, replaced, evicts, waits, None)


def _refusal(replicas: Sequence[Replica], errors: Sequence[LorryError | None]) -> LorryError | None:
    """Why the load would be refused at once; None when some replica can take it."""
    if not any(replica.up for replica in replicas):
        return EngineUnreachable("The engine is down or starting; nothing can be loaded now.")
    return None if None in errors else errors[0]


def _objection(
    world: World, replica: Replica, name: AdapterName, spec: ev.VersionSpec
) -> LorryError | None:
    """Why it can have no room on this one, beside what is pinned and what it replaces."""
    pinned = fitting.pinned_on(world, replica)
    alone = fitting.objection(world, replica, pinned, name, spec)
    return alone or fitting.beside_objection(world, replica, name, spec)


def _victims(
    world: World, room: Room, spec: ev.VersionSpec, spared: VersionId | None
) -> tuple[tuple[Victim, ...], bool]:
    """Who would go, and whether that is still too little."""
    short = Shortage(1 - room.places, spec.bytes - room.bytes)
    for residency in room.replica.holding.values():
        idle_drain = residency.state is State.DRAINING and not residency.leases
        if idle_drain or residency.state is State.UNLOADING:
            short.less(residency)
    found = [
        Candidate(r.version, r.bytes, r.last_used_ms, r.leases)
        for r in room.replica.holding.values()
        if may_go(world, r, {spared}) and r.retry_ms <= world.now_ms
    ]
    victims = choose_victims(found, short.count, short.bytes)
    for version in victims:
        short.less(room.replica.holding[version])
    return tuple(_victim(world, room.replica, version) for version in victims), bool(short)


def _victim(world: World, replica: Replica, version: VersionId) -> Victim:
    names = tuple(sorted(world.names_of.get(version, ())))
    return Victim(version, names, replica.holding[version].leases)
