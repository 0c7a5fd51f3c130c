"""Who gets room in the engines, and who has to go for it.

Room is given in the order in which people began to wait. A need that fits is loaded. One that does
not fit claims what is free or coming free, so that no later, smaller need overtakes it for ever;
for what is still short, idle versions go first, least recently used. When only leased versions are
left, the oldest need waits for `patience_ms` and then has as many of them drained as it takes: no
new requests, those running finish.

What drains because nobody wants it any more (an unload, a replace) is never counted on while
requests run on it: such a drain may take long, and nobody else shall wait for it (promise 5).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from lorry.errors import LorryError
from lorry.ids import AdapterName, ReplicaId, VersionId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle import fitting, operations, reasons
from lorry.lifecycle.eviction import Candidate, choose_victims
from lorry.lifecycle.records import Opened, Replica, Residency
from lorry.lifecycle.states import State, Trigger
from lorry.lifecycle.world import World

NEEDS_AHEAD = 8
"""Needs for which room is made at once on one replica; more would evict what is still in use, only
to wait."""


@dataclass(frozen=True, slots=True)
class Need:
    """A version that should be resident and is not."""

    since_ms: int
    spec: ev.VersionSpec
    name: AdapterName
    source: str
    evicts: bool = True
    """Whether other versions may go for it."""
    spares: VersionId | None = None
    """A version that must not go for it: the one it is to replace."""
    drains: VersionId | None = None
    """A version that may be drained for it at once, be it pinned: the one it is to replace."""

    @property
    def turn(self) -> tuple[bool, int]:
        """Sorts needs: those that may not evict come last."""
        return not self.evicts, self.since_ms


@dataclass(slots=True)
class Shortage:
    """What is still missing; not positive means that it is there or coming."""

    count: int
    bytes: int

    def __bool__(self) -> bool:
        """Whether anything is missing."""
        return self.count > 0 or self.bytes > 0

    def less(self, residency: Residency) -> None:
        """This one will go."""
        self.count -= 1
        self.bytes -= residency.bytes


@dataclass(slots=True)
class Room:
    """What is left on one replica during one pass, and for whom; it dies with the pass."""

    replica: Replica
    places: int
    """Below 0 when more is claimed than there is."""
    bytes: int
    loads: int
    """Loads that may still begin."""
    blocked: list[Need] = field(default_factory=list)
    """Needs that do not fit, oldest first."""
    first: Shortage | None = None
    """What the oldest of them is short of."""
    drained_since: dict[VersionId, int] = field(default_factory=dict)
    """Draining versions that somebody waits for, and since when."""
    pinned: list[Residency] | None = None
    """What no eviction may take, once somebody has asked."""

    @property
    def full(self) -> bool:
        """Whether enough needs wait for room here."""
        return len(self.blocked) >= NEEDS_AHEAD

    def fits(self, size: int) -> bool:
        """Whether a version of `size` bytes has room beside all claims so far."""
        return self.places > 0 and self.bytes >= size

    def claim(self, need: Need) -> bool:
        """Take the room for a need; False when it has to wait for some of it."""
        fits = self.fits(need.spec.bytes)
        if not fits:
            if self.first is None:
                self.first = Shortage(1 - self.places, need.spec.bytes - self.bytes)
            self.blocked.append(need)
        self.places -= 1
        self.bytes -= need.spec.bytes
        return fits


def best_resident(world: World, version: VersionId) -> Residency | None:
    """Where a request for `version` would run: the replica with the fewest running requests."""
    found = [r for r in world.residencies_of(version) if r.state is State.RESIDENT]
    return min(found, key=lambda r: world.replicas[r.replica].leases, default=None)


def make_room(world: World) -> None:
    """Load what fits; for what does not, choose what has to go."""
    up = [replica for replica in world.replicas.values() if replica.up]
    cold_before = len(world.cold)
    wanted = needs(world) if up else []
    forget_told(world, wanted)
    if not wanted and not any(replica.draining for replica in up):
        return
    rooms = {replica.id: survey(world, replica) for replica in up}
    for need in wanted:
        serve(world, need, rooms)
        if all(room.full for room in rooms.values()):
            break  # the rest have their turn when room was found for these
    if len(world.cold) < cold_before:
        world.cold = dict(world.cold)  # a dict that was large stays slow to walk through
    for room in rooms.values():
        if room.blocked or room.replica.draining:
            free_for(world, room)


def forget_told(world: World, wanted: list[Need]) -> None:
    """Whoever waits another time is told about again."""
    if world.told:
        waiting = {need.spec.version for need in wanted}
        world.told = {v: since for v, since in world.told.items() if v in waiting}


def survey(world: World, replica: Replica) -> Room:
    """What is free now. While the engine is being rid of strangers nothing is loaded, since nobody
    knows their size."""
    budget = replica.budget
    refused = sum(operation is None for operation in replica.strangers.values())
    loading = sum(r.state is State.LOADING for r in replica.holding.values())
    return Room(
        replica,
        places=budget.versions_max - budget.count - refused,
        bytes=budget.bytes_max - budget.bytes,
        loads=world.limits.loads_per_replica_max - loading
        if refused == len(replica.strangers)
        else 0,
    )


# Needs


def needs(world: World) -> list[Need]:
    """Every version that should be resident and is not, in the order in which it gets its turn."""
    found: dict[VersionId, Need] = {}
    waits = operations.giving_way(world)
    for need in (*_asked_needs(world), *_ticket_needs(world, waits), *_cold_needs(world, waits)):
        known = found.get(need.spec.version)
        found[need.spec.version] = need if known is None else merged(known, need)
    wanted = (n for n in found.values() if best_resident(world, n.spec.version) is None)
    return sorted(wanted, key=lambda n: (n.turn, n.spec.version))


def merged(one: Need, other: Need) -> Need:
    """The first of two needs for a version, which spares only what both of them have to."""
    first, second = (other, one) if one.turn > other.turn else (one, other)
    if second.evicts and first.spares != second.spares:
        return replace(first, spares=None)
    return first


def _asked_needs(world: World) -> Iterator[Need]:
    for queue in world.asked.values():
        asked = queue[0]
        if not asked.wants_resident or asked.spec is None:
            continue
        old = world.adapters.get(asked.name)
        old_version = old.spec.version if old is not None else None
        first = asked.drains_first
        yield Need(
            asked.began_ms,
            asked.spec,
            asked.name,
            asked.source or (old.source if old is not None else ""),
            spares=None if first else old_version,
            drains=old_version if first else None,
        )


def _ticket_needs(world: World, but: set[AdapterName]) -> Iterator[Need]:
    for name, queue in world.queues.items():
        if name not in but:
            adapter = world.adapters[name]
            yield Need(queue[0].arrived_ms, adapter.spec, name, adapter.source)


def _cold_needs(world: World, but: set[AdapterName]) -> Iterator[Need]:
    """Versions nobody waits for: pinned ones may evict for it, ones that were resident before may
    not."""
    for version, since_ms in tuple(world.cold.items()):
        names = [n for n in world.names_of.get(version, ()) if not world.adapters[n].closing]
        if not names or best_resident(world, version) is not None:
            del world.cold[version]
        elif not but.issuperset(names):
            pinned = any(world.adapters[n].pinned for n in names)
            adapter = world.adapters[min(names)]
            yield Need(since_ms, adapter.spec, adapter.name, adapter.source, evicts=pinned)


# Loads


def serve(world: World, need: Need, rooms: dict[ReplicaId, Room]) -> None:
    """Begin the load or fetch of one need, or let it claim the room that it waits for."""
    if under_way(world, need, rooms):
        return
    room = choose(world, need, list(rooms.values()))
    if room is None or room.full:
        return
    residency = world.residency(need.spec.version, room.replica.id, need.spec.bytes)
    if residency.missing:
        fetch(world, residency, need)
    elif room.claim(need) and room.loads > 0:  # else the report of a load brings the next plan
        room.loads -= 1
        load(world, residency, need)


def under_way(world: World, need: Need, rooms: dict[ReplicaId, Room]) -> bool:
    """Whether some replica has a command open for it, or drains it and may yet recall it."""
    version, found = need.spec.version, False
    for replica, room in rooms.items():
        residency = world.residencies.get((version, replica))
        if residency is None:
            continue
        if residency.state is State.DRAINING and need.evicts:
            room.drained_since[version] = need.since_ms
        busy = (State.FETCHING, State.LOADING, State.DRAINING, State.UNLOADING)
        found = found or residency.state in busy
    return found


def choose(world: World, need: Need, rooms: list[Room]) -> Room | None:
    """Where to load it: where it fits, else where room can be made for it. Refuses who waits for it
    when that is nowhere (promise 6)."""
    version = need.spec.version
    if not need.evicts:
        return choose_free(world, version, [r for r in rooms if r.fits(need.spec.bytes)])
    ready = [room for room in rooms if may_try(world, version, room.replica.id)]
    fit = [room for room in ready if room.fits(need.spec.bytes)]
    if not fit:
        objections = {r.replica.id: _objection(world, need, r) for r in rooms}
        fit = [room for room in ready if objections[room.replica.id] is None]
        if None not in objections.values() and not may_wait(world, need):
            give_up(world, need, next(e for e in objections.values() if e is not None))
    return max(fit, key=lambda room: (room.places, room.bytes), default=None)


def may_wait(world: World, need: Need) -> bool:
    """Whether a replica that is down could take a replacement once it is back, for its old version
    is not there."""
    return need.spares is not None and any(
        not replica.up
        and not fitting.objection(
            world, replica, fitting.pinned_on(world, replica), need.name, need.spec
        )
        for replica in world.replicas.values()
    )


def choose_free(world: World, version: VersionId, fit: list[Room]) -> Room | None:
    """For a version that nobody waits for: only free room will do, and no second try."""
    for room in fit:
        residency = world.residencies.get((version, room.replica.id))
        if residency is None or residency.error is None:
            return room
    del world.cold[version]  # it comes back when somebody asks for it
    return None


def _objection(world: World, need: Need, room: Room) -> LorryError | None:
    if room.pinned is None:
        room.pinned = fitting.pinned_on(world, room.replica)
    spared = room.replica.holding.get(need.spares) if need.spares is not None else None
    error = fitting.objection(world, room.replica, room.pinned, need.name, need.spec, need.drains)
    if error is None and spared is not None and spared.state in (State.LOADING, State.RESIDENT):
        # It may have come back since the replace was judged, and would be in its way for ever.
        return fitting.beside_objection(world, room.replica, need.name, need.spec)
    return error


def may_try(world: World, version: VersionId, replica: ReplicaId) -> bool:
    """Whether its last failure there is long enough ago."""
    residency = world.residencies.get((version, replica))
    if residency is None or residency.retry_ms <= world.now_ms:
        return True
    world.remind(residency.retry_ms)
    return False


def give_up(world: World, need: Need, error: LorryError) -> None:
    """Answer everybody who waits for a version that no replica can take. Whoever spares another
    version for it is a replace: requests that waited for the same one would spare nothing."""
    names = {need.name, *world.names_of.get(need.spec.version, ())} if need.spares is None else ()
    for name in sorted(names):
        if name in world.adapters and world.adapters[name].spec.version == need.spec.version:
            world.refuse_all(name, error)
    operations.load_failed(world, need.spec.version, error)


def fetch(world: World, residency: Residency, need: Need) -> None:
    """Bring a lost snapshot back from the adapter's source, or from another's that has the version;
    it has to be the same version."""
    world.move(residency, Trigger.FETCH)
    sources = {need.source: need.name, **world.sources_of(residency.version)}
    left = [source for source in sources if source not in residency.tried]
    source = left[0] if left else need.source
    name = need.name if source == need.source else sources[source]
    key = residency.version, residency.replica
    residency.open = world.open(Opened("fetch", residency=key, source=source))
    world.emit(cm.Fetch(residency.open, name, source, residency.version))


def load(world: World, residency: Residency, need: Need) -> None:
    """Reserve, and ask the engine: one load for all who wait."""
    world.move(residency, Trigger.LOAD)
    residency.brought = False
    residency.engine_id = world.next_engine_id()
    key = residency.version, residency.replica
    residency.open = world.open(Opened("load", residency=key))
    world.emit(
        cm.Load(
            residency.open,
            residency.replica,
            residency.engine_id,
            residency.version,
            need.name,
            residency.bytes,
        )
    )


# Victims


def free_for(world: World, room: Room) -> None:
    """Recall drains that nobody needs any more; begin those that are needed now."""
    short = Shortage(-room.places, -room.bytes)
    first = room.first or Shortage(0, 0)
    recallable = []
    for residency in room.replica.holding.values():
        if residency.state is State.DRAINING and is_recallable(world, residency):
            recallable.append(residency)
        elif residency.state is State.UNLOADING or (
            residency.state is State.DRAINING and not residency.leases
        ):
            short.less(residency)
            first.less(residency)
    if room.blocked and short:
        drain_idle(world, room, short, first)
        tell_waits(world, room, short, first)
    recalled = False
    for residency in sorted(recallable, key=lambda r: (r.leases > 0, r.drained_ms, r.version)):
        if first and residency.evicted and goes_on_draining(world, room, residency):
            first.less(residency)
        else:
            world.move(residency, Trigger.RECALL)
            recalled = True
    if first and not recalled:  # else those who waited for it are admitted before any other drain
        drain_leased(world, room, first)


def tell_waits(world: World, room: Room, short: Shortage, first: Shortage) -> None:
    """Say why needs wait for which idle versions do not make room enough."""
    for at, need in enumerate(room.blocked):
        if need.evicts and (short if at else first):
            name, version = need.name, need.spec.version
            reasons.tell_wait(world, room.replica.id, name, version, need.since_ms)


def goes_on_draining(world: World, room: Room, residency: Residency) -> bool:
    """Whether the oldest need replaces the draining version, or has waited longer than those who
    wait for that version itself. A pinned one goes for its own name's successor alone (promise
    6)."""
    oldest = room.blocked[0]
    replaced = oldest.drains == residency.version
    if world.has_pin(residency.version, but=oldest.name if replaced else None):
        return False
    since_ms = room.drained_since.get(residency.version)
    return replaced or since_ms is None or oldest.since_ms <= since_ms


def is_recallable(world: World, residency: Residency) -> bool:
    """Whether somebody wants it after all: it drains only to make room for others, or a rollback
    has come back to it before its last request has ended."""
    return not residency.unsure and world.referenced(residency.version)


def drain_idle(world: World, room: Room, short: Shortage, first: Shortage) -> None:
    """Give up versions that nobody uses, least recently used first."""
    found = [c for c in candidates(world, room.replica, room.blocked) if c.leases == 0]
    for version in choose_victims(found, short.count, short.bytes):
        residency = room.replica.holding[version]
        idle_s = max(0, world.now_ms - residency.last_used_ms) / 1000
        text = f"makes room for '{room.blocked[0].name}'; it was not used for {idle_s:.1f} s"
        drain(world, residency, text, "room")
        short.less(residency)
        first.less(residency)


def drain_leased(world: World, room: Room, first: Shortage) -> None:
    """For the oldest need alone: the version that it replaces, if it said so, at once; others when
    its patience is over."""
    oldest = room.blocked[0]
    old = room.replica.holding.get(oldest.drains) if oldest.drains is not None else None
    if old is not None and _may_drain_first(world, oldest, old):
        drain(world, old, f"drains for its successor as '{oldest.name}'", "replace")
        first.less(old)
    patient_until = oldest.since_ms + world.limits.patience_ms
    if first and world.now_ms < patient_until:
        world.remind(patient_until)
        return
    leased = candidates(world, room.replica, [oldest])
    for version in choose_victims(leased, first.count, first.bytes):
        victim = room.replica.holding[version]
        waited_s = (world.now_ms - oldest.since_ms) / 1000
        text = (
            f"drains for '{oldest.name}', which has waited longest ({waited_s:.1f} s); "
            f"running on it: {victim.leases}"
        )
        drain(world, victim, text, "fairness")


def _may_drain_first(world: World, need: Need, old: Residency) -> bool:
    """Only a version that no other name has or is about to get: their owners did not ask for
    this."""
    return (
        old.state is State.RESIDENT
        and old.pin_open is None
        and not world.held(old.version)
        and world.names_of.get(old.version) == {need.name}
        and may_ask_again(world, old)
    )


def candidates(world: World, replica: Replica, wanted: list[Need]) -> list[Candidate]:
    """What may go, and has not just been refused by the engine."""
    spared = {need.spares for need in wanted}
    return [
        Candidate(r.version, r.bytes, r.last_used_ms, r.leases)
        for r in replica.holding.values()
        if may_go(world, r, spared) and may_ask_again(world, r)
    ]


def may_go(world: World, residency: Residency, spared: Collection[VersionId | None]) -> bool:
    """Whether it is resident, and neither pinned nor about to be published nor being replaced."""
    return (
        residency.state is State.RESIDENT
        and residency.version not in spared
        and residency.pin_open is None
        and not world.pin_wanted(residency.version)
        and not world.held(residency.version)
    )


def may_ask_again(world: World, residency: Residency) -> bool:
    """Whether its last failure is long enough ago."""
    if residency.retry_ms > world.now_ms:
        world.remind(residency.retry_ms)
        return False
    return True


def drain(world: World, residency: Residency, text: str, reason: str) -> None:
    """Take no new requests for it; it is unloaded once those that run have ended."""
    world.move(residency, Trigger.DRAIN)
    residency.drained_ms = world.now_ms
    residency.evicted = True
    counts = world.counters.evictions
    counts[reason] = counts.get(reason, 0) + 1
    called = reasons.called(world, residency.version)
    text = f"{called} on {residency.replica} {text}"
    world.note("evicted", text, version=residency.version)
