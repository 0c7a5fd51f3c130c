"""All policy, in one pass after every event.

`plan` looks at the whole fleet and decides: whose time is up; who is admitted; what is loaded, and
what has to go for it (`room.py`); what is unloaded, pinned or retired. It starts from what is,
never from what an earlier pass intended, so a plan cannot be left half carried out. A pass that
changed anything is followed by another, until nothing moves: whatever one step makes possible for
an earlier one happens now, and not only when something else happens to come along.

That bounds every wait (promise 11). The oldest need waits at most patience + the longest lease +
the engine's time for one unload + its time for one load; one that is k-th in turn on its replica
waits for at most k such rounds, and whoever waits at all is answered within `ticket_wait_ms`.
"""

from lorry.errors import (
    AdapterUnavailable,
    BrokenInvariant,
    CapacityExhausted,
    EngineTimeout,
    EngineUnreachable,
    LorryError,
    RequestAborted,
)
from lorry.ids import AdapterName, VersionId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import fitting, operations
from lorry.lifecycle.records import Opened, Replica, Residency
from lorry.lifecycle.retirement import retire_idle
from lorry.lifecycle.room import best_resident, make_room, may_ask_again
from lorry.lifecycle.states import State, Trigger
from lorry.lifecycle.world import World

PASSES_MAX = 1_000
"""Each pass but the last has moved something, and moves are made for a reason; so many in one
moment would be a circle."""


def plan(world: World) -> None:
    """Decide everything that can be decided now."""
    for _ in range(PASSES_MAX):
        before = world.revision, len(world.commands)
        one_pass(world)
        if (world.revision, len(world.commands)) == before:
            return
    raise BrokenInvariant(11, "the plan goes in a circle")


def one_pass(world: World) -> None:
    """Each step takes the world as the step before left it."""
    world.due_ms = None
    expire_leases(world)
    expire_tickets(world)
    operations.expire(world)
    retire_idle(world)
    drain_loose(world)
    operations.settle(world)
    for name in tuple(world.queues):
        admit_waiting(world, name)
    make_room(world)
    empty(world)
    set_pins(world)
    retire(world)


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


def _waited_out(world: World, name: AdapterName) -> LorryError:
    seconds = world.limits.ticket_wait_ms / 1000
    version = world.adapters[name].spec.version
    if not any(replica.up for replica in world.replicas.values()):
        return EngineUnreachable(f"The engine did not come back within {seconds:g} s.")
    if any(r.state is State.LOADING for r in world.residencies_of(version)):
        return EngineTimeout(f"The adapter '{name}' was not loaded within {seconds:g} s.")
    return CapacityExhausted(f"No room for the adapter '{name}' came free within {seconds:g} s.")


# Requests


def admit_waiting(world: World, name: AdapterName) -> None:
    """Admit everybody who waits for `name`, if it can be served now; or say why it cannot."""
    on = best_resident(world, world.adapters[name].spec.version)
    if on is None:
        refuse_hopeless(world, name)
        return
    for ticket in tuple(world.queues.get(name, ())):
        world.admit(ticket.id, name, world.replicas[on.replica], on)


def refuse_hopeless(world: World, name: AdapterName) -> None:
    """Nobody waits for a version that failed everywhere and is not to be tried again yet."""
    failed = failed_everywhere(world, name)
    if failed is not None:
        world.refuse_all(name, unavailable(world, name, failed))


def failed_everywhere(world: World, name: AdapterName) -> Residency | None:
    """The residency whose retry comes first, when the version of a name has failed on every replica
    that is up and could take it."""
    spec = world.adapters[name].spec
    failed, others = [], []
    for replica in world.replicas.values():
        residency = world.residencies.get((spec.version, replica.id))
        if residency is not None and replica.up and _has_failed(world, residency):
            failed.append(residency)
        elif replica.up:
            others.append(replica)
    if not failed:
        return None
    for replica in others:
        if fitting.objection(world, replica, fitting.pinned_on(world, replica), name, spec) is None:
            return None
    return min(failed, key=lambda r: r.retry_ms)


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


# What nobody wants


def drain_loose(world: World) -> None:
    """Drain versions that lost their last reference: replaced, unloaded, or loaded for a call that
    failed."""
    for version in sorted(world.loose):
        if world.referenced(version):
            continue
        for residency in world.residencies_of(version):
            if residency.state is State.RESIDENT and may_ask_again(world, residency):
                world.move(residency, Trigger.DRAIN)
                residency.drained_ms = world.now_ms


def empty(world: World) -> None:
    """Unload what is drained."""
    for replica in world.replicas.values():
        for residency in tuple(replica.draining.values()):
            if residency.leases or residency.pin_open is not None:
                continue  # its end or the pin's report comes first
            if may_ask_again(world, residency):
                world.move(residency, Trigger.EMPTY)
                unload(world, residency)


def unload(world: World, residency: Residency) -> None:
    """Ask the engine to give it up; the reservation stays until it says so."""
    assert residency.engine_id is not None
    key = residency.version, residency.replica
    residency.open = world.open(Opened("unload", residency=key))
    world.emit(cm.Unload(residency.open, residency.replica, residency.engine_id))


# Pins


def set_pins(world: World) -> None:
    """Make the engines' pins what the registry and the calls under way want: unpin first, so that
    never more are pinned than may be."""
    wanted = pins_wanted(world)
    for replica in world.replicas.values():
        for version in sorted(replica.pins - wanted):
            set_pin(world, replica, version, False)
        for version in sorted(wanted):
            if version in replica.pins or len(replica.pins) < replica.pins_max:
                set_pin(world, replica, version, True)


def pins_wanted(world: World) -> set[VersionId]:
    """Versions that should have a slot: of a name that is being replaced, the new one as soon as it
    is in, since the old one's slot may be the only one that it can get."""
    moving = {}
    for asked in world.holders():
        if asked.pinned and not asked.wants_resident and asked.spec is not None:
            moving[asked.name] = asked.spec.version
    wanted = set(moving.values())
    for name in world.pinned:
        adapter = world.adapters[name]
        if name not in moving and not adapter.closing:
            wanted.add(adapter.spec.version)
    return wanted


def set_pin(world: World, replica: Replica, version: VersionId, pinned: bool) -> None:
    """Tell one engine, unless it knows, is being told, or has just refused."""
    residency = replica.holding.get(version)
    if residency is None or residency.state is not State.RESIDENT:
        return
    if residency.pin_open is not None or residency.engine_pinned is pinned:
        return
    if not may_ask_again(world, residency):
        return
    replica.pins.add(version)
    residency.engine_pinned = None
    key = residency.version, residency.replica
    residency.pin_open = world.open(Opened("pin", residency=key, pinned=pinned))
    assert residency.engine_id is not None
    world.emit(cm.SetPin(residency.pin_open, replica.id, residency.engine_id, pinned))


# The end


def retire(world: World) -> None:
    """Forget versions that are in no engine and that no name stands for."""
    for version in sorted(world.loose):
        if world.referenced(version):
            world.loose.discard(version)
        elif not world.names_of.get(version):  # else it is of a name that is being unloaded
            retire_version(world, version)


def retire_version(world: World, version: VersionId) -> None:
    """Forget it on every replica that has nothing under way for it."""
    for residency in world.residencies_of(version):
        if residency.state in (State.ABSENT, State.ON_DISK, State.FAILED):
            world.move(residency, Trigger.RETIRE)
            del world.residencies[version, residency.replica]
    if not world.residencies_of(version):
        world.loose.discard(version)
        world.cold.pop(version, None)
