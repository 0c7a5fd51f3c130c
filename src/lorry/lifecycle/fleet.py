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
from lorry.ids import AdapterName, OperationId, short
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle import fitting, operations, planner, replicas, reports
from lorry.lifecycle.budget import Budget
from lorry.lifecycle.records import Adapter, FleetStatistics, Replica, Ticket
from lorry.lifecycle.room import best_resident
from lorry.lifecycle.settings import FleetLimits
from lorry.lifecycle.states import State
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
            case ev.LoadAsked() | ev.UnloadAsked() | ev.PinAsked():
                operations.ask(world, event)
            case ev.SettingsAsked() | ev.PrefetchAsked():
                operations.ask(world, event)
            case ev.CancelAsked(operation):
                operations.cancel(world, operation)
            case ev.Restored():
                restored(world, event)
            case ev.ReplicaAdded(replica, limits):
                budget = Budget(limits.versions_max, limits.bytes_max)
                world.replicas[replica] = Replica(replica, budget, limits.pins_max)
            case ev.EngineSeen():
                replicas.engine_seen(world, event)
            case ev.EngineLost():
                replicas.engine_lost(world, event)
            case ev.TimerDue():
                pass
            case _:
                reports.report(world, event)

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
    if event.name is not None:
        world.touch(event.name)
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


def restored(world: World, event: ev.Restored) -> None:
    """The registry is back; as much of it as fits is loaded again, newest last registered first to
    go."""
    for name, spec, source, pinned in event.adapters:
        world.bind(Adapter(name, spec, source, pinned, idle_ms=event.idle_ms.get(name)))
        world.chill(spec.version)
    world.note("restored", f"{len(event.adapters)} adapters from the registry")
