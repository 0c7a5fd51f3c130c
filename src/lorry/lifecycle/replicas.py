"""Ups and downs of the engines: what they are seen to hold, and what goes with them."""

from lorry.errors import EngineUnreachable
from lorry.ids import EngineId, OperationId, short
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle import operations, reports
from lorry.lifecycle.records import Opened, Replica, Residency
from lorry.lifecycle.states import State, Trigger
from lorry.lifecycle.world import World


def engine_lost(world: World, event: ev.EngineLost) -> None:
    """Nothing is in that engine any more, and nobody runs there."""
    replica = world.replicas[event.replica]
    if replica.up:
        world.counters.engine_losses += 1
        world.note("engine_lost", f"{replica.id}: {event.reason}")
    replica.up = False
    error = EngineUnreachable(f"The engine was lost while the request ran: {event.reason}")
    for lease in tuple(world.leases.values()):
        if lease.replica == replica.id:
            world.abort(lease, error)
            world.release(lease.ticket)
    for residency in tuple(replica.holding.values()):
        lose(world, residency, event.reason)
    for operation in replica.strangers.values():
        world.opened.pop(operation or OperationId(0), None)
    replica.strangers.clear()
    world.revision += 1
    replica.revision = replica.lost_revision = world.revision


def lose(world: World, residency: Residency, reason: str) -> None:
    """The engine does not hold it, without having been asked to give it up. A load under way may be
    why the engine went, so that counts as its failure: else one bad adapter could end the engine
    again and again."""
    if residency.open is not None:  # its answer, if it still comes, is about another life
        world.opened.pop(residency.open, None)
        residency.open = None
    suspect = residency.state is State.LOADING
    world.move(residency, Trigger.LOST)
    if suspect:
        name = world.name_of(residency.version)
        error = EngineUnreachable(f"The engine was lost while it loaded '{name}': {reason}")
        reports.set_back(world, residency, error)
        operations.load_failed(world, residency.version, error)
    else:
        reports.forget_failures(residency)
    if world.referenced(residency.version):
        world.chill(residency.version)


def engine_seen(world: World, event: ev.EngineSeen) -> None:
    """What the engine holds is what it says (promise 1); judged only where nothing has moved since
    it was asked."""
    replica = world.replicas[event.replica]
    if event.as_of < replica.lost_revision:
        return  # asked in another life
    if not replica.up:
        replica.up = True
        world.note("engine_up", f"{replica.id} holds {len(event.residents)} versions")
    world.avoid_engine_ids(event.residents)
    forget_strangers(replica, event.residents)
    if replica.revision <= event.as_of:  # else some may be ids that it has given up since
        meet_strangers(world, replica, event.residents)
    for residency in tuple(replica.holding.values()):
        gone = residency.engine_id not in event.residents
        settled = residency.open is None and residency.revision <= event.as_of
        if gone and settled:
            vanish(world, replica, residency)


def forget_strangers(replica: Replica, residents: frozenset[EngineId]) -> None:
    """Those that would not go and have gone all the same: their ids cannot come again."""
    for stranger in sorted(replica.strangers.keys() - residents):
        if replica.strangers[stranger] is None:
            del replica.strangers[stranger]


def meet_strangers(world: World, replica: Replica, residents: frozenset[EngineId]) -> None:
    """Have the engine give up what nobody asked it to hold, left from an earlier life."""
    known = {r.engine_id for r in replica.holding.values()}
    for stranger in sorted(residents - known):
        if replica.strangers.get(stranger) is None:
            operation = world.open(Opened("stranger", stranger=(replica.id, stranger)))
            replica.strangers[stranger] = operation
            world.emit(cm.Unload(operation, replica.id, stranger))


def vanish(world: World, replica: Replica, residency: Residency) -> None:
    """A version went away by itself: its requests cannot go on with it."""
    for lease in tuple(world.leases.values()):
        if lease.replica == replica.id and lease.version == residency.version:
            text = f"The engine dropped the adapter '{lease.name}' while the request ran."
            world.abort(lease, EngineUnreachable(text))
            world.release(lease.ticket)
    text = f"{short(residency.version)} left {replica.id} by itself"
    world.note("evicted", text, version=residency.version)
    lose(world, residency, "")
