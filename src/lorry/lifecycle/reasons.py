"""Why somebody waits, in words: who has the room, and what keeps it there. Questions only."""

from lorry.ids import AdapterName, ReplicaId, VersionId, short
from lorry.lifecycle.records import Replica, Residency
from lorry.lifecycle.states import State
from lorry.lifecycle.world import World

HOLDERS_MAX = 5
"""Holders that one sentence names; there may be hundreds."""


def why_waiting(world: World, name: AdapterName) -> str:
    """Why requests for a registered name cannot run at this moment; "" when they can."""
    adapter = world.adapters[name]
    if adapter.closing:
        return ""
    version = adapter.spec.version
    found = {r.state: r for r in world.residencies_of(version)}
    if State.RESIDENT in found:
        return ""
    up = [replica for replica in world.replicas.values() if replica.up]
    if not up:
        return "the engine is down or starting"
    for state, words in _UNDER_WAY.items():
        if state in found:
            return words.format(found[state].replica)
    late = [r for r in found.values() if r.retry_ms > world.now_ms]
    if late:
        soonest = min(late, key=lambda r: r.retry_ms)
        seconds = (soonest.retry_ms - world.now_ms) / 1000
        return f"its load failed and is tried again in {seconds:.1f} s: {soonest.error}"
    if name not in world.queues and name not in world.asked:
        return ""
    return "; ".join(full(world, replica) for replica in up)


_UNDER_WAY = {
    State.LOADING: "it is being loaded on {}",
    State.FETCHING: "its snapshot was gone from the disk and is fetched again",
    State.UNLOADING: "it is just leaving {}",
    State.DRAINING: "it is to leave {}, and runs the requests that it has to their ends",
}


def full(world: World, replica: Replica) -> str:
    """Who has the room of a replica."""
    budget = replica.budget
    held = sorted(replica.holding.values(), key=lambda r: (-r.leases, r.version))
    more = len(held) - HOLDERS_MAX
    words = [_holder(world, one) for one in held[:HOLDERS_MAX]]
    words += [f"{more} more"] if more > 0 else []
    return (
        f"{budget.count} of {budget.versions_max} places and {budget.bytes} of "
        f"{budget.bytes_max} bytes on {replica.id} are taken: {', '.join(words) or 'by nothing'}"
    )


def _holder(world: World, residency: Residency) -> str:
    """One version, and why it stays."""
    version = residency.version
    why = []
    if residency.leases:
        why.append(f"{residency.leases} running")
    if world.pin_wanted(version):
        why.append("pinned")
    if residency.state is not State.RESIDENT:
        why.append(residency.state.value)
    elif residency.retry_ms > world.now_ms:
        why.append("the engine has just refused to give it up")
    elif world.held(version):
        why.append("about to be published")
    return f"{called(world, version)} ({', '.join(why) or 'idle'})"


def called(world: World, version: VersionId) -> str:
    """What people know a version by: its names, or its digits when it has none any more."""
    names = sorted(world.names_of.get(version, ()))
    if not names:
        return short(version)
    shown = f"'{names[0]}'"
    return shown if len(names) == 1 else f"{shown} and {len(names) - 1} other names of it"


def tell_wait(
    world: World, replica: ReplicaId, name: AdapterName, version: VersionId, since_ms: int
) -> None:
    """Say once for each need why it waits."""
    if world.told.get(version) == since_ms:
        return
    world.told[version] = since_ms
    text = f"'{name}' waits for room: {full(world, world.replicas[replica])}"
    world.note("waiting", text, name, version)
