"""The whole core: `handle(event, now_ms) -> commands`.

Each handler below writes down what happened and nothing else. Then one `plan` over the fleet
decides what follows, so all policy is in one place (`planner.py`), whatever the order in which
things happen.
"""

from collections import deque

from lorry.errors import (
    AdapterNotFound,
    BrokenInvariant,
    EngineUnreachable,
    LorryError,
    QueueFull,
)
from lorry.ids import AdapterName, EngineId, OperationId, VersionId, short
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle import fitting, operations, planner
from lorry.lifecycle.budget import Budget
from lorry.lifecycle.records import Adapter, FleetStatistics, Opened, Replica, Residency, Ticket
from lorry.lifecycle.retry import retry_at
from lorry.lifecycle.room import best_resident
from lorry.lifecycle.settings import FleetLimits
from lorry.lifecycle.states import HOLDING, State, Trigger
from lorry.lifecycle.world import World


class Fleet:
    """Decides everything about adapters on any number of replicas. Not thread-safe, and never
    waits."""

    def __init__(self, limits: FleetLimits) -> None:
        """An empty fleet."""
        self.world = World(limits)

    @property
    def due_ms(self) -> int | None:
        """When to feed `TimerDue`, unless another event comes first; None: no need."""
        return self.world.due_ms

    @property
    def revision(self) -> int:
        """Grows with every state change: see `EngineSeen.as_of`."""
        return self.world.revision

    def next_operation(self) -> OperationId:
        """An id for an admin call about to be asked."""
        return self.world.next_operation()

    def handle(self, event: ev.Event, now_ms: int) -> tuple[cm.Command, ...]:
        """Take one event in; the commands that follow, in order."""
        world = self.world
        world.now_ms = max(world.now_ms, now_ms)
        world.commands = []
        self._apply(event)
        planner.plan(world)
        return tuple(world.commands)

    def _apply(self, event: ev.Event) -> None:
        world = self.world
        match event:
            case ev.Arrived():
                arrived(world, event)
            case ev.Finished(ticket) | ev.Cancelled(ticket):
                left(world, event, ticket)
            case ev.LoadAsked() | ev.UnloadAsked() | ev.PinAsked() | ev.LabelAsked():
                operations.ask(world, event)
            case ev.PrefetchAsked():
                operations.ask(world, event)
            case ev.CancelAsked(operation):
                operations.cancel(world, operation)
            case ev.Restored():
                restored(world, event)
            case ev.ReplicaAdded(replica, limits):
                budget = Budget(limits.versions_max, limits.bytes_max)
                world.replicas[replica] = Replica(replica, budget, limits.pins_max)
            case ev.EngineSeen():
                engine_seen(world, event)
            case ev.EngineLost():
                engine_lost(world, event)
            case ev.TimerDue():
                pass
            case _:
                report(world, event)

    def statistics(self) -> FleetStatistics:
        """One picture of the present."""
        world = self.world
        replicas = world.replicas.values()
        return FleetStatistics(
            registered=len(world.adapters),
            waiting=len(world.tickets),
            running=len(world.leases),
            operations=sum(map(len, world.asked.values())),
            resident={
                r.id: sum(x.state in (State.RESIDENT, State.DRAINING) for x in r.holding.values())
                for r in replicas
            },
            bytes_reserved={r.id: r.budget.bytes for r in replicas},
            bytes_max={r.id: r.budget.bytes_max for r in replicas},
            versions_max={r.id: r.budget.versions_max for r in replicas},
            waiting_by_name={name: len(queue) for name, queue in world.queues.items()},
            running_by_name={name: len(held) for name, held in world.leases_of.items()},
            counters=world.counters,
        )


# Requests


def arrived(world: World, event: ev.Arrived) -> None:
    """Admit at once what can run now; refuse what never could; let the rest wait."""
    if event.ticket in world.tickets or event.ticket in world.leases:
        raise BrokenInvariant(7, f"ticket {event.ticket} arrived twice")
    under_way = len(world.leases) + len(world.tickets)
    if under_way >= world.limits.leases_max:
        world.refuse(event.ticket, QueueFull(f"{under_way} requests run or wait already."))
        return
    if event.name is None:
        base_arrived(world, event)
        return
    error = arrival_objection(world, event, event.name)
    if error is not None:
        world.refuse(event.ticket, error)
        return
    adapter = world.adapters[event.name]
    on = best_resident(world, adapter.spec.version)
    if on is not None and event.name not in world.queues:
        world.counters.hits += 1
        world.admit(event.ticket, event.name, world.replicas[on.replica], on)
        return
    world.counters.misses += 1
    due = world.now_ms + world.limits.ticket_wait_ms
    ticket = Ticket(event.ticket, event.name, event.version, world.now_ms, due)
    world.tickets[ticket.id] = ticket
    world.queues.setdefault(ticket.name, deque()).append(ticket)


def base_arrived(world: World, event: ev.Arrived) -> None:
    """The base model is in every engine that is up."""
    up = [replica for replica in world.replicas.values() if replica.up]
    if not up:
        world.refuse(event.ticket, engine_down())
        return
    world.admit(event.ticket, None, min(up, key=lambda replica: replica.leases), None)


def engine_down() -> EngineUnreachable:
    """The answer while no replica is up."""
    return EngineUnreachable("The engine is down or starting; it is being restarted.")


def arrival_objection(world: World, event: ev.Arrived, name: AdapterName) -> LorryError | None:
    """Why a request for an adapter cannot even wait. Never is the base model an answer (promise
    10)."""
    adapter = world.adapters.get(name)
    if adapter is None:
        return world.not_found(name)
    if adapter.closing:
        return operations.unloading(name)
    if event.version is not None and event.version != adapter.spec.version:
        return AdapterNotFound(
            f"'{name}' serves version {short(adapter.spec.version)}, not {short(event.version)}.",
            param="model",
        )
    if not any(replica.up for replica in world.replicas.values()):
        return engine_down()
    if best_resident(world, adapter.spec.version) is not None:
        return None
    failed = planner.failed_everywhere(world, name)
    if failed is not None:
        return planner.unavailable(world, name, failed)
    hopeless = fitting.nowhere(world, name, adapter.spec)
    if hopeless is not None:
        return hopeless
    waiting, mine = len(world.tickets), len(world.queues.get(name, ()))
    limits = world.limits
    if waiting >= limits.tickets_max or mine >= limits.tickets_per_adapter_max:
        return QueueFull(f"{waiting} requests are waiting, {mine} of them for '{name}'.")
    return None


def left(world: World, event: ev.Finished | ev.Cancelled, ticket: int) -> None:
    """A request is over. One that waited has had its answer in its own cancellation."""
    waiting = world.tickets.get(event.ticket)
    if waiting is not None:
        world.drop_ticket(waiting)
    elif not world.release(event.ticket):
        world.counters.stale_reports += 1


# The world at large


def restored(world: World, event: ev.Restored) -> None:
    """The registry is back; as much of it as fits is loaded again, newest last registered first to
    go."""
    for name, spec, source, pinned in event.adapters:
        world.bind(Adapter(name, spec, source, pinned))
        world.chill(spec.version)
    world.note("restored", f"{len(event.adapters)} adapters from the registry")


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
        name = planner_name(world, residency.version)
        error = EngineUnreachable(f"The engine was lost while it loaded '{name}': {reason}")
        set_back(world, residency, error)
        operations.load_failed(world, residency.version, error)
    else:
        forget_failures(residency)
    if world.referenced(residency.version):
        world.chill(residency.version)


def forget_failures(residency: Residency) -> None:
    """All is well with it now."""
    residency.error, residency.failures, residency.retry_ms = None, 0, 0


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
    if replica.revision <= event.as_of:
        meet_strangers(world, replica, event.residents)
    for residency in tuple(replica.holding.values()):
        gone = residency.engine_id not in event.residents
        settled = residency.open is None and residency.revision <= event.as_of
        if gone and settled:
            vanish(world, replica, residency)


def meet_strangers(world: World, replica: Replica, residents: frozenset[EngineId]) -> None:
    """Have the engine give up what nobody asked it to hold, left from an earlier life."""
    known = {r.engine_id for r in replica.holding.values()}
    for stranger in sorted(replica.strangers.keys() - residents):
        if replica.strangers[stranger] is None:
            del replica.strangers[stranger]
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


def planner_name(world: World, version: VersionId) -> AdapterName | None:
    """Some name of a version, for people."""
    return min(world.names_of.get(version, ()), default=None)


# Reports


def report(world: World, event: ev.Event) -> None:
    """An answer to a command: believed once, and only while the command is open."""
    match event:
        case ev.Fetched(operation, spec):
            fetched(world, operation, spec)
        case ev.FetchFailed(operation, error):
            fetch_failed(world, operation, error)
        case ev.Loaded(operation):
            loaded(world, operation)
        case ev.LoadFailed():
            load_failed(world, event)
        case ev.Unloaded(operation):
            unloaded(world, operation)
        case ev.UnloadFailed():
            unload_failed(world, event)
        case ev.PinSet(operation):
            pin_set(world, operation)
        case ev.PinFailed(operation, error):
            pin_failed(world, operation, error)
        case ev.Committed(operation):
            commit_ended(world, operation, None)
        case ev.CommitFailed(operation, error):
            commit_ended(world, operation, error)
        case _:  # pragma: no cover - the type checker sees that nothing is left
            raise AssertionError(event)


def residency_of(world: World, opened: Opened | None) -> Residency | None:
    """The residency that a command was about."""
    if opened is None or opened.residency is None:
        return None
    return world.residencies[opened.residency]


def fetched(world: World, operation: OperationId, spec: ev.VersionSpec) -> None:
    """A snapshot is on disk."""
    opened = world.take_opened(operation, "fetch")
    if opened is None:
        return
    residency = residency_of(world, opened)
    if residency is not None:
        residency.open = None
        world.move(residency, Trigger.FETCHED)
    for found in world.residencies_of(spec.version):
        found_again(world, found)
    if residency is None:
        asked = operations.find(world, opened.asked)
        if asked is not None:
            asked.open = None
            operations.take_spec(world, asked, spec)


def found_again(world: World, residency: Residency) -> None:
    """The replicas share one disk: what was missing for this one is there now."""
    if not residency.missing or residency.state is State.FETCHING:
        return
    residency.missing, residency.error, residency.retry_ms = False, None, 0
    if residency.state in (State.ABSENT, State.FAILED):
        world.move(residency, Trigger.FETCH)
        world.move(residency, Trigger.FETCHED)


def fetch_failed(world: World, operation: OperationId, error: LorryError) -> None:
    """It is not."""
    opened = world.take_opened(operation, "fetch")
    residency = residency_of(world, opened)
    if residency is not None:
        residency.open = None
        world.move(residency, Trigger.FAIL)
        set_back(world, residency, error)
        operations.load_failed(world, residency.version, error)
    elif opened is not None:
        asked = operations.find(world, opened.asked)
        if asked is not None:
            asked.open = None
            operations.end(world, asked, error)


def set_back(world: World, residency: Residency, error: LorryError) -> None:
    """Remember a failure and when to try again."""
    residency.error = error
    residency.failures += 1
    residency.retry_ms = retry_at(residency.failures, world.now_ms, world.limits)


def loaded(world: World, operation: OperationId) -> None:
    """The engine holds it."""
    residency = residency_of(world, world.take_opened(operation, "load"))
    if residency is None:
        return
    residency.open = None
    forget_failures(residency)
    residency.last_used_ms = world.now_ms
    world.move(residency, Trigger.LOADED)
    world.loose.add(residency.version)
    world.counters.loads += 1
    world.note(
        "loaded", f"{short(residency.version)} on {residency.replica}", version=residency.version
    )


def load_failed(world: World, event: ev.LoadFailed) -> None:
    """The engine does not hold it; its reservation goes back, or stays until that is certain."""
    residency = residency_of(world, world.take_opened(event.operation, "load"))
    if residency is None:
        return
    residency.open = None
    world.counters.load_failures += 1
    if event.missing:
        residency.missing = True
        world.move(residency, Trigger.MISSING)
        if not residency.failures:
            residency.failures = 1  # fetched again at once; if it is gone then too, not so soon
            return
        set_back(world, residency, event.error)
    elif event.unsure:
        set_back(world, residency, event.error)
        residency.unsure = True
        world.move(residency, Trigger.UNSURE)
        planner.unload(world, residency)
    else:
        set_back(world, residency, event.error)
        world.move(residency, Trigger.FAIL)
    name = planner_name(world, residency.version)
    world.note(
        "failed", f"load of {short(residency.version)}: {event.error}", name, residency.version
    )
    operations.load_failed(world, residency.version, event.error)


def unloaded(world: World, operation: OperationId) -> None:
    """The engine does not hold it, whether or not it did when asked: an id that is gone already is
    no error."""
    opened = world.take_opened(operation, "unload", "stranger")
    if opened is not None and opened.stranger is not None:
        replica, stranger = opened.stranger
        del world.replicas[replica].strangers[stranger]
    residency = residency_of(world, opened)
    if residency is None:
        return
    residency.open = None
    world.counters.unloads += 1
    world.move(residency, Trigger.UNLOADED)


def unload_failed(world: World, event: ev.UnloadFailed) -> None:
    """The engine still holds it, so it is still served; whoever wanted its room looks for another
    victim. When nobody knows, it is asked again, and admits nobody until then."""
    opened = world.take_opened(event.operation, "unload", "stranger")
    if opened is not None and opened.stranger is not None:
        replica, stranger = opened.stranger
        world.replicas[replica].strangers[stranger] = None
    residency = residency_of(world, opened)
    if residency is None:
        return
    error = event.error
    residency.open = None
    residency.unsure = residency.unsure or event.unsure
    world.counters.unload_failures += 1
    world.move(residency, Trigger.UNSURE if residency.unsure else Trigger.FAIL)
    set_back(world, residency, error)
    world.note(
        "failed", f"unload of {short(residency.version)}: {error}", version=residency.version
    )
    operations.unload_failed(world, residency.version, error)


def pin_set(world: World, operation: OperationId) -> None:
    """The engine pins as it was told."""
    opened = world.take_opened(operation, "pin")
    residency = residency_of(world, opened)
    if residency is None or opened is None:
        return
    residency.pin_open = None
    residency.engine_pinned = opened.pinned
    if not opened.pinned:
        world.replicas[residency.replica].pins.discard(residency.version)
    forget_failures(residency)


def pin_failed(world: World, operation: OperationId, error: LorryError) -> None:
    """It does not: a pin that was asked for fails, others are tried again."""
    residency = residency_of(world, world.take_opened(operation, "pin"))
    if residency is not None:
        residency.pin_open = None
        set_back(world, residency, error)
        operations.load_failed(world, residency.version, error)


def commit_ended(world: World, operation: OperationId, error: LorryError | None) -> None:
    """The store has spoken."""
    opened = world.take_opened(operation, "commit")
    asked = operations.find(world, opened.asked) if opened is not None else None
    if asked is None:
        return
    if error is None:
        operations.committed(world, asked)
    else:
        asked.open = None
        operations.end(world, asked, error)


__all__ = ["HOLDING", "Fleet"]
