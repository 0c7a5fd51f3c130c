"""All policy, in one pass after every event.

`plan` looks at the whole fleet and decides: whose time is up; who is admitted; what is loaded, and
what has to go for it; what is unloaded, pinned or retired. It starts from what is, never from what
an earlier pass intended, so a plan cannot be left half carried out.

Room is given in the order in which people began to wait. A need that fits is loaded. One that does
not fit claims the room that is free or coming free, so that no later, smaller need overtakes it for
ever; for what is still short, idle versions go first, least recently used. If the oldest need has
waited for `patience_ms` and only leased versions are left, the least used one is drained for it: no
new requests, those running finish. That bounds every wait (promise 11): patience + the longest
lease + the engine's load time, for each need ahead in the queue, divided by the versions that may
go.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lorry.errors import (
    AdapterUnavailable,
    AllPinned,
    CapacityExhausted,
    EngineTimeout,
    RequestAborted,
)
from lorry.ids import AdapterName, ReplicaId, VersionId, short
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle import operations
from lorry.lifecycle.eviction import Candidate, choose_victims
from lorry.lifecycle.records import Opened, Phase, Replica, Residency
from lorry.lifecycle.states import State, Trigger
from lorry.lifecycle.world import World

NEEDS_AHEAD = 8
"""Needs for which room is made at once on one replica; more would evict what is still in use, only
to wait."""

LAST = 1 << 62
"""Sorts needs that nobody waits for behind all others."""


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
    """A version that may be drained for it at once."""


def plan(world: World) -> None:
    """Decide everything that can be decided now."""
    world.due_ms = None
    expire_leases(world)
    expire_tickets(world)
    operations.expire(world)
    drain_loose(world)
    settle(world)
    make_room(world)
    settle(world)  # a recalled version takes its requests at once
    empty(world)
    settle(world)  # an unload may have been waiting for exactly this
    set_pins(world)
    retire(world)


def settle(world: World) -> None:
    """Admit whoever can be, and take the admin calls as far as they go."""
    operations.settle(world)
    for name in tuple(world.queues):
        admit_waiting(world, name)


# Time


def expire_leases(world: World) -> None:
    """Abort what runs too long: leases are given in order of time and all last equally long, so the
    first is the oldest."""
    for lease in world.leases.values():
        if world.now_ms < lease.deadline_ms:
            world.remind(lease.deadline_ms)
            return
        seconds = world.limits.lease_ms / 1000
        world.abort(
            lease, RequestAborted(f"The request ran longer than the limit of {seconds:g} s.")
        )


def expire_tickets(world: World) -> None:
    """Refuse who has waited too long; the first of each queue is the oldest."""
    for name in tuple(world.queues):
        for ticket in tuple(world.queues[name]):
            if world.now_ms < ticket.deadline_ms:
                world.remind(ticket.deadline_ms)
                break
            world.refuse(ticket.id, _waited_out(world, name))


def _waited_out(world: World, name: AdapterName) -> CapacityExhausted | EngineTimeout:
    seconds = world.limits.ticket_wait_ms / 1000
    version = world.adapters[name].spec.version
    if any(r.state is State.LOADING for r in world.residencies_of(version)):
        return EngineTimeout(f"The adapter '{name}' was not loaded within {seconds:g} s.")
    return CapacityExhausted(f"No room for the adapter '{name}' came free within {seconds:g} s.")


# Requests


def best_resident(world: World, version: VersionId) -> Residency | None:
    """Where a request for `version` would run: the replica with the fewest running requests."""
    found = [r for r in world.residencies_of(version) if r.state is State.RESIDENT]
    return min(found, key=lambda r: world.replicas[r.replica].leases, default=None)


def admit_waiting(world: World, name: AdapterName) -> None:
    """Admit everybody who waits for `name`, if it can be served now; or say why it cannot."""
    adapter = world.adapters[name]
    on = best_resident(world, adapter.spec.version)
    if on is None:
        refuse_hopeless(world, name)
        return
    for ticket in tuple(world.queues.get(name, ())):
        if ticket.version is not None and ticket.version != adapter.spec.version:
            world.refuse(ticket.id, world.not_found(AdapterName(f"{name}@{short(ticket.version)}")))
            continue
        world.admit(ticket.id, name, world.replicas[on.replica], on)


def refuse_hopeless(world: World, name: AdapterName) -> None:
    """Nobody waits for a version that failed everywhere and is not to be tried again yet."""
    failed = failed_everywhere(world, world.adapters[name].spec.version)
    if failed is not None:
        world.refuse_all(name, unavailable(world, name, failed))


def failed_everywhere(world: World, version: VersionId) -> Residency | None:
    """The residency whose retry comes first, when the version has failed on every replica that is
    up."""
    found = []
    for replica in world.replicas.values():
        residency = world.residencies.get((version, replica.id))
        if replica.up:
            if residency is None or not _has_failed(world, residency):
                return None
            found.append(residency)
    return min(found, key=lambda r: r.retry_ms, default=None)


def _has_failed(world: World, residency: Residency) -> bool:
    served = residency.state in (State.LOADING, State.RESIDENT, State.DRAINING)
    return residency.error is not None and residency.retry_ms > world.now_ms and not served


def unavailable(world: World, name: AdapterName, failed: Residency) -> AdapterUnavailable:
    """The answer for a failed adapter: the last reason, and when it is tried again."""
    wait_s = max(0.0, (failed.retry_ms - world.now_ms) / 1000)
    return AdapterUnavailable(
        f"The adapter '{name}' could not be loaded: {failed.error} "
        f"It is tried again in {wait_s:.1f} s.",
        retry_after_s=max(wait_s, 0.1),
    )


# Room


def needs(world: World) -> list[Need]:
    """Every version that should be resident and is not, in the order in which it gets its turn."""
    found: dict[VersionId, Need] = {}
    for need in (*_asked_needs(world), *_ticket_needs(world), *_cold_needs(world)):
        known = found.get(need.spec.version)
        if known is None or (not known.evicts, known.since_ms) > (not need.evicts, need.since_ms):
            found[need.spec.version] = need
    wanted = (n for n in found.values() if best_resident(world, n.spec.version) is None)
    return sorted(wanted, key=lambda n: (n.since_ms, n.spec.version))


def _asked_needs(world: World) -> Iterator[Need]:
    for queue in world.asked.values():
        asked = queue[0]
        if not asked.wants_resident or asked.spec is None:
            continue
        request = asked.request
        old = world.adapters.get(asked.name)
        old_version = old.spec.version if old is not None else None
        source = request.source if isinstance(request, ev.LoadAsked) else ""
        first = isinstance(request, ev.LoadAsked) and request.strategy is ev.Strategy.DRAIN_FIRST
        yield Need(
            asked.began_ms,
            asked.spec,
            asked.name,
            source or (old.source if old is not None else ""),
            spares=None if first else old_version,
            drains=old_version if first else None,
        )


def _ticket_needs(world: World) -> Iterator[Need]:
    for name, queue in world.queues.items():
        adapter = world.adapters[name]
        yield Need(queue[0].arrived_ms, adapter.spec, name, adapter.source)


def _cold_needs(world: World) -> Iterator[Need]:
    """Versions nobody waits for: pinned ones may evict for it, ones that were resident before may
    not."""
    for version in sorted(world.cold):
        names = [n for n in world.names_of.get(version, ()) if not world.adapters[n].closing]
        pinned = any(world.adapters[n].pinned for n in names)
        resident = best_resident(world, version) is not None
        if not names or (resident and not pinned):
            world.cold.discard(version)
        elif not resident:
            adapter = world.adapters[min(names)]
            yield Need(LAST, adapter.spec, adapter.name, adapter.source, evicts=pinned)


def place(world: World, need: Need) -> Replica | None:
    """The replica that shall hold it: where it is under way already, else the one with the most
    room."""
    up = [replica for replica in world.replicas.values() if replica.up]
    busy = (State.FETCHING, State.LOADING, State.DRAINING, State.UNLOADING)
    for replica in up:
        residency = world.residencies.get((need.spec.version, replica.id))
        if residency is not None and residency.state in busy:
            return replica
    ready = [r for r in up if _may_try(world, need.spec.version, r.id)]
    return max(
        ready,
        key=lambda r: (r.budget.versions_max - r.budget.count, r.budget.bytes_max - r.budget.bytes),
        default=None,
    )


def _may_try(world: World, version: VersionId, replica: ReplicaId) -> bool:
    residency = world.residencies.get((version, replica))
    if residency is None or residency.retry_ms <= world.now_ms:
        return True
    world.remind(residency.retry_ms)
    return False


def make_room(world: World) -> None:
    """Load what fits; for what does not, choose what has to go."""
    placed: dict[ReplicaId, list[Need]] = {replica: [] for replica in world.replicas}
    for need in needs(world):
        replica = place(world, need)
        if replica is not None:
            placed[replica.id].append(need)
    for replica_id, wanted in placed.items():
        blocked = load_what_fits(world, world.replicas[replica_id], wanted)
        free_for(world, world.replicas[replica_id], blocked)


def load_what_fits(world: World, replica: Replica, wanted: list[Need]) -> list[Need]:
    """Begin loads in order; the needs that must wait for room, at most `NEEDS_AHEAD` of them."""
    budget = replica.budget
    places, room = budget.versions_max - budget.count, budget.bytes_max - budget.bytes
    loads = sum(r.state is State.LOADING for r in replica.holding.values())
    blocked: list[Need] = []
    for need in wanted:
        residency = world.residency(need.spec.version, replica.id, need.spec.bytes)
        if residency.missing and residency.state in (State.ABSENT, State.FAILED):
            fetch(world, residency, need)
        elif residency.state in (State.ON_DISK, State.FAILED):
            fits = places > 0 and room >= need.spec.bytes
            if not fits and not need.evicts:
                world.cold.discard(need.spec.version)  # it may come back when somebody asks for it
                continue
            if fits and loads >= world.limits.loads_per_replica_max:
                continue  # the report of one of them brings the next plan
            if fits:
                load(world, residency, need)
                loads += 1
            elif not _refused_for_pins(world, replica, need):
                blocked.append(need)
            places, room = places - 1, room - need.spec.bytes
            if len(blocked) >= NEEDS_AHEAD:
                break
        elif residency.state is State.DRAINING:
            blocked.append(need)
    return blocked


def _refused_for_pins(world: World, replica: Replica, need: Need) -> bool:
    """Refuse at once who could only be served if a pin gave way (promise 6)."""
    pinned = [r for r in replica.holding.values() if world.pin_wanted(r.version)]
    budget = replica.budget
    used = sum(r.bytes for r in pinned)
    if len(pinned) < budget.versions_max and used + need.spec.bytes <= budget.bytes_max:
        return False
    world.refuse_all(need.name, AllPinned(f"Pinned adapters leave no room for '{need.name}'."))
    return True


def fetch(world: World, residency: Residency, need: Need) -> None:
    """Bring a lost snapshot back from the adapter's source; it has to be the same version."""
    world.move(residency, Trigger.FETCH)
    key = residency.version, residency.replica
    residency.open = world.open(Opened("fetch", residency=key))
    world.emit(cm.Fetch(residency.open, need.name, need.source, residency.version))


def load(world: World, residency: Residency, need: Need) -> None:
    """Reserve, and ask the engine: one load for all who wait."""
    world.move(residency, Trigger.LOAD)
    residency.engine_id = world.next_engine_id()
    key = residency.version, residency.replica
    residency.open = world.open(Opened("load", residency=key))
    world.emit(
        cm.Load(
            residency.open, residency.replica, residency.engine_id, residency.version, need.name
        )
    )


def free_for(world: World, replica: Replica, blocked: list[Need]) -> None:
    """Recall drains that nobody needs any more; begin those that are needed now."""
    going = [r for r in replica.holding.values() if r.state is State.UNLOADING]
    draining = sorted(
        (r for r in replica.holding.values() if r.state is State.DRAINING),
        key=lambda r: (world.referenced(r.version), r.drained_ms, r.version),
    )
    wanted = [n for n in blocked if n.spec.version not in replica.holding]
    budget = replica.budget
    count = len(wanted) - (budget.versions_max - budget.count) - len(going)
    size = sum(n.spec.bytes for n in wanted) - (budget.bytes_max - budget.bytes)
    size -= sum(r.bytes for r in going)
    for residency in draining:
        unwanted = not world.referenced(residency.version)
        if (wanted and (count > 0 or size > 0)) or unwanted:
            count, size = count - 1, size - residency.bytes
        else:
            world.move(residency, Trigger.RECALL)
    if wanted and (count > 0 or size > 0):
        drain_victims(world, replica, wanted, count, size)


def drain_victims(
    world: World, replica: Replica, wanted: list[Need], count: int, size: int
) -> None:
    """Idle versions for all needs; a leased one only for the oldest, and only when its patience is
    over."""
    idle = [c for c in candidates(world, replica, wanted) if c.leases == 0]
    victims = choose_victims(idle, count, size)
    oldest = wanted[0]
    for version in victims:
        drain(world, replica.holding[version], f"makes room for '{oldest.name}'", "room")
    if victims or any(r.state is State.DRAINING for r in replica.holding.values()):
        return
    if any(r.state is State.UNLOADING for r in replica.holding.values()):
        return  # see first what that brings
    leased = candidates(world, replica, [oldest])
    chosen = [c for c in leased if c.version == oldest.drains]
    patient_until = oldest.since_ms + world.limits.patience_ms
    if not chosen and world.now_ms < patient_until:
        world.remind(patient_until)
        return
    for version in choose_victims(chosen or leased, 1, 0):
        text = f"drains for '{oldest.name}', which has waited longest"
        drain(world, replica.holding[version], text, "fairness")


def candidates(world: World, replica: Replica, wanted: list[Need]) -> list[Candidate]:
    """What may go: resident, neither pinned nor about to be published nor being replaced, and not
    just refused."""
    spared = {need.spares for need in wanted}
    found = []
    for residency in replica.holding.values():
        version = residency.version
        if residency.state is not State.RESIDENT or version in spared:
            continue
        if world.pin_wanted(version) or world.held(version) or residency.pin_open is not None:
            continue
        if residency.retry_ms > world.now_ms:
            world.remind(residency.retry_ms)
            continue
        found.append(Candidate(version, residency.bytes, residency.last_used_ms, residency.leases))
    return found


def drain(world: World, residency: Residency, text: str, reason: str) -> None:
    """Take no new requests for it; it is unloaded once those that run have ended."""
    world.move(residency, Trigger.DRAIN)
    residency.drained_ms = world.now_ms
    counts = world.counters.evictions
    counts[reason] = counts.get(reason, 0) + 1
    world.note("evicted", f"{short(residency.version)} {text}", version=residency.version)


# What nobody wants


def drain_loose(world: World) -> None:
    """Drain versions that lost their last reference: replaced, unloaded, or loaded for a call that
    failed."""
    for version in sorted(world.loose):
        if world.referenced(version):
            continue
        for residency in world.residencies_of(version):
            if residency.state is not State.RESIDENT:
                continue
            if residency.retry_ms > world.now_ms:
                world.remind(residency.retry_ms)
                continue
            world.move(residency, Trigger.DRAIN)
            residency.drained_ms = world.now_ms


def empty(world: World) -> None:
    """Unload what is drained."""
    for replica in world.replicas.values():
        for residency in tuple(replica.holding.values()):
            if residency.state is not State.DRAINING or residency.leases:
                continue
            if residency.pin_open is not None:
                continue  # its report comes first
            world.move(residency, Trigger.EMPTY)
            unload(world, residency)


def unload(world: World, residency: Residency) -> None:
    """Ask the engine to give it up; the reservation stays until it says so."""
    assert residency.engine_id is not None
    key = residency.version, residency.replica
    residency.open = world.open(Opened("unload", residency=key))
    world.emit(cm.Unload(residency.open, residency.replica, residency.engine_id))


def set_pins(world: World) -> None:
    """Make the engines' pins what the registry and the calls under way want."""
    for replica in world.replicas.values():
        for residency in tuple(replica.holding.values()):
            if residency.state is not State.RESIDENT or residency.pin_open is not None:
                continue
            wanted = world.pin_wanted(residency.version)
            if wanted == residency.engine_pinned or residency.engine_id is None:
                continue
            if residency.retry_ms > world.now_ms:
                world.remind(residency.retry_ms)
                continue
            key = residency.version, residency.replica
            residency.pin_open = world.open(Opened("pin", residency=key))
            world.emit(cm.SetPin(residency.pin_open, replica.id, residency.engine_id, wanted))


def retire(world: World) -> None:
    """Forget versions that are in no engine and that no name stands for."""
    for version in tuple(world.loose):
        closing = world.names_of.get(version)
        if closing or world.referenced(version):
            if world.referenced(version):
                world.loose.discard(version)
            continue
        found = world.residencies_of(version)
        for residency in found:
            if residency.state in (State.ABSENT, State.ON_DISK, State.FAILED):
                world.move(residency, Trigger.RETIRE)
                del world.residencies[version, residency.replica]
        if not world.residencies_of(version):
            world.loose.discard(version)
            world.cold.discard(version)


def phases(world: World) -> dict[AdapterName, Phase]:
    """What the first call of each name is doing, for people."""
    return {name: queue[0].phase for name, queue in world.asked.items()}
