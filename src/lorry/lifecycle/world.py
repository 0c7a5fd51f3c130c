"""The core's state and the few primitive changes to it, each in one function.

`move` is the one place where a residency changes its state and where budget is reserved and
released; `admit` and `release` the ones where a lease begins and ends; `refuse`, `admit` and
`drop_ticket` the ones where a ticket ends. Policy lives in `planner.py` and `operations.py`; they
call these.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from lorry.errors import AdapterNotFound, BrokenInvariant, LorryError
from lorry.ids import AdapterName, EngineId, OperationId, ReplicaId, TicketId, VersionId, short
from lorry.lifecycle import commands as cm
from lorry.lifecycle.idle import IdleTimes
from lorry.lifecycle.records import (
    Adapter,
    Asked,
    Counters,
    Lease,
    Opened,
    Replica,
    Residency,
    Ticket,
)
from lorry.lifecycle.settings import FleetLimits
from lorry.lifecycle.states import HOLDING, LEASABLE, State, Trigger, advance


class World:
    """Everything the core remembers."""

    def __init__(self, limits: FleetLimits) -> None:
        """An empty fleet: no replica, no adapter."""
        self.limits = limits
        self.now_ms = 0
        self.revision = 0
        self.adapters: dict[AdapterName, Adapter] = {}
        self.names_of: dict[VersionId, set[AdapterName]] = {}
        self.pinned: set[AdapterName] = set()
        """Registered names that are pinned."""
        self.replicas: dict[ReplicaId, Replica] = {}
        self.residencies: dict[tuple[VersionId, ReplicaId], Residency] = {}
        self.tickets: dict[TicketId, Ticket] = {}
        self.queues: dict[AdapterName, deque[Ticket]] = {}
        self.leases: dict[TicketId, Lease] = {}
        self.leases_of: dict[AdapterName, set[TicketId]] = {}
        self.asked: dict[AdapterName, deque[Asked]] = {}
        self.opened: dict[OperationId, Opened] = {}
        self.loose: set[VersionId] = set()
        """Versions that may have lost their last reference."""
        self.cold: dict[VersionId, int] = {}
        """Versions that are not resident and should be, unasked, and since when: pinned ones, or
        resident before."""
        self.idle = IdleTimes()
        """Names that retire when nobody uses them, but for pinned ones."""
        self.told: dict[VersionId, int] = {}
        """Needs of which people know why they wait: version -> since when."""
        self.counters = Counters()
        self.commands: list[cm.Command] = []
        self.due_ms: int | None = None
        """When to feed `TimerDue`, unless something happens before."""
        self._last_operation = 0
        self._last_engine_id = 0

    # Numbers

    def next_operation(self) -> OperationId:
        """A fresh operation id."""
        self._last_operation += 1
        return OperationId(self._last_operation)

    def next_engine_id(self) -> EngineId:
        """A fresh engine id: never reused, so that no report can mean another version."""
        self._last_engine_id += 1
        return EngineId(self._last_engine_id)

    def avoid_engine_ids(self, seen: Iterable[EngineId]) -> None:
        """Give out no id that some engine has from an earlier life of this server."""
        self._last_engine_id = max(self._last_engine_id, *seen, 0)

    def remind(self, due_ms: int) -> None:
        """Make sure that `TimerDue` comes by then."""
        if self.due_ms is None or due_ms < self.due_ms:
            self.due_ms = due_ms

    # Commands

    def emit(self, command: cm.Command) -> None:
        """Ask the shell for something."""
        self.commands.append(command)

    def open(self, opened: Opened) -> OperationId:
        """An operation id for a command about to be emitted, remembered until its report."""
        operation = self.next_operation()
        self.opened[operation] = opened
        return operation

    def take_opened(self, operation: OperationId, *kinds: str) -> Opened | None:
        """The command that a report answers; None, and counted, when it is late, doubled or of
        another kind."""
        opened = self.opened.get(operation)
        if opened is None or opened.kind not in kinds:
            self.counters.stale_reports += 1
            return None
        del self.opened[operation]
        return opened

    def note(
        self,
        kind: str,
        text: str,
        name: AdapterName | None = None,
        version: VersionId | None = None,
    ) -> None:
        """Tell people."""
        if name is None and version is not None:
            name = self.name_of(version)
        self.emit(cm.Note(kind, name, version, text))

    # References

    def name_of(self, version: VersionId) -> AdapterName | None:
        """Some name of a version, for people."""
        return min(self.names_of.get(version, ()), default=None)

    def referenced(self, version: VersionId) -> bool:
        """Whether a serving name or an admin call under way wants the version kept."""
        names = self.names_of.get(version, ())
        if any(not self.adapters[name].closing for name in names):
            return True
        return any(a.spec is not None and a.spec.version == version for a in self.holders())

    def holders(self) -> Iterator[Asked]:
        """Admin calls that hold their version."""
        return (queue[0] for queue in self.asked.values() if queue[0].holds)

    def held(self, version: VersionId) -> bool:
        """Whether an admin call is about to publish the version."""
        return any(a.spec is not None and a.spec.version == version for a in self.holders())

    def pin_wanted(self, version: VersionId) -> bool:
        """Whether the version should be pinned: some name of it is, or is about to be."""
        return self.has_pin(version) or any(
            a.pinned and a.spec is not None and a.spec.version == version for a in self.holders()
        )

    def has_pin(self, version: VersionId, but: AdapterName | None = None) -> bool:
        """Whether a name of the version, other than `but`, is pinned and not being unloaded."""
        return any(
            self.adapters[name].pinned and not self.adapters[name].closing
            for name in self.names_of.get(version, ())
            if name != but
        )

    def sources_of(self, version: VersionId) -> dict[str, AdapterName]:
        """Where its names have it from: any of them may have lost it."""
        names = sorted(self.names_of.get(version, ()), reverse=True)
        return {self.adapters[name].source: name for name in names}

    def bind(self, adapter: Adapter) -> None:
        """Let a name stand for a version from now on; the version it stood for may be loose."""
        self.unbind(adapter.name)
        self.adapters[adapter.name] = adapter
        self.names_of.setdefault(adapter.spec.version, set()).add(adapter.name)
        adapter.used_ms = self.now_ms
        self.set_pinned(adapter, adapter.pinned)

    def unbind(self, name: AdapterName) -> Adapter | None:
        """Forget a name."""
        adapter = self.adapters.pop(name, None)
        if adapter is not None:
            names = self.names_of[adapter.spec.version]
            names.discard(name)
            if not names:
                del self.names_of[adapter.spec.version]
            self.loose.add(adapter.spec.version)
            self.pinned.discard(name)
            self.idle.forget(name)
        return adapter

    def set_pinned(self, adapter: Adapter, pinned: bool) -> None:
        """Let a registered name be pinned or not."""
        adapter.pinned = pinned
        if pinned:
            self.pinned.add(adapter.name)
            self.chill(adapter.spec.version)
        else:
            self.pinned.discard(adapter.name)
        self.watch_idle(adapter)

    def touch(self, name: AdapterName) -> None:
        """Somebody uses it."""
        adapter = self.adapters.get(name)
        if adapter is not None:
            adapter.used_ms = self.now_ms

    def watch_idle(self, adapter: Adapter) -> None:
        """Let an adapter retire in its time, or not at all."""
        due_ms = self.idle_due_ms(adapter)
        if due_ms is None:
            self.idle.forget(adapter.name)
        else:
            self.idle.watch(adapter.name, due_ms)

    def idle_due_ms(self, adapter: Adapter) -> int | None:
        """When its time is up if it is not used again; None: it has none, or is pinned."""
        if adapter.idle_ms is None or adapter.pinned:
            return None
        return adapter.used_ms + adapter.idle_ms

    def chill(self, version: VersionId) -> None:
        """Let a version come back unasked: at once when it is pinned, else when it has room."""
        self.cold.setdefault(version, self.now_ms)

    def remembered(self, versions: frozenset[VersionId]) -> frozenset[VersionId]:
        """Those of them that may still be somewhere."""
        return frozenset(version for version in versions if self.residencies_of(version))

    # Residency

    def residency(self, version: VersionId, replica: ReplicaId, size: int) -> Residency:
        """The record of a version on a replica; a version without one is on disk."""
        key = version, replica
        if key not in self.residencies:
            self.residencies[key] = Residency(version, replica, size, State.ON_DISK, self.revision)
        return self.residencies[key]

    def residencies_of(self, version: VersionId) -> list[Residency]:
        """The records there are, in the replicas' order."""
        found = (self.residencies.get((version, replica)) for replica in self.replicas)
        return [residency for residency in found if residency is not None]

    def move(self, residency: Residency, trigger: Trigger) -> None:
        """The one place where a state changes, and with it the reservation (promise 4)."""
        after = advance(residency.state, trigger)
        if residency.leases and after not in LEASABLE:
            raise BrokenInvariant(6, f"{residency.version} leaves {residency.state} while leased")
        replica = self.replicas[residency.replica]
        before = residency.state
        if after in HOLDING and before not in HOLDING:
            replica.budget.reserve(residency.version, residency.bytes)
            replica.holding[residency.version] = residency
        if before in HOLDING and after not in HOLDING:
            self.let_go(replica, residency)
            if self.pin_wanted(residency.version):
                self.chill(residency.version)
        if after is State.DRAINING:
            replica.draining[residency.version] = residency
        elif before is State.DRAINING:
            del replica.draining[residency.version]
            residency.evicted = False
        residency.state = after
        self.revision += 1
        residency.revision = replica.revision = self.revision
        if after not in HOLDING:
            self.loose.add(residency.version)

    def let_go(self, replica: Replica, residency: Residency) -> None:
        """The one place where a reservation ends: the engine holds nothing of the version."""
        replica.budget.release(residency.version)
        del replica.holding[residency.version]
        replica.pins.discard(residency.version)
        residency.engine_id = None
        residency.engine_pinned = False
        residency.unsure = False
        if residency.pin_open is not None:
            self.opened.pop(residency.pin_open, None)
            residency.pin_open = None

    # Requests

    def drop_ticket(self, ticket: Ticket) -> None:
        """The ticket waits no more."""
        del self.tickets[ticket.id]
        queue = self.queues[ticket.name]
        queue.remove(ticket)
        self.touch(ticket.name)
        if not queue:
            del self.queues[ticket.name]

    def refuse(self, ticket: TicketId, error: LorryError) -> None:
        """Answer a request with an error."""
        if ticket in self.tickets:
            self.drop_ticket(self.tickets[ticket])
        counts = self.counters.refusals
        counts[error.code] = counts.get(error.code, 0) + 1
        self.emit(cm.Refuse(ticket, error))

    def refuse_all(self, name: AdapterName, error: LorryError) -> None:
        """Answer everybody who waits for `name`."""
        for ticket in tuple(self.queues.get(name, ())):
            self.refuse(ticket.id, error)

    def refuse_mismatched(self, name: AdapterName) -> None:
        """Answer those who wait for a version that the name no longer stands for."""
        served = self.adapters[name].spec.version
        for ticket in tuple(self.queues.get(name, ())):
            if ticket.version is not None and ticket.version != served:
                wanted = AdapterName(f"{name}@{short(ticket.version)}")
                self.refuse(ticket.id, self.not_found(wanted))

    def admit(
        self, ticket: TicketId, name: AdapterName | None, replica: Replica, on: Residency | None
    ) -> None:
        """Begin a lease: the request runs on this version from its first token to its last (promise
        2)."""
        if ticket in self.tickets:
            self.drop_ticket(self.tickets[ticket])
        version = on.version if on is not None else None
        due = self.now_ms + self.limits.lease_ms
        self.leases[ticket] = Lease(ticket, name, version, replica.id, due)
        replica.leases += 1
        if on is not None:
            on.leases += 1
            on.last_used_ms = self.now_ms
        if name is not None:
            self.leases_of.setdefault(name, set()).add(ticket)
            self.touch(name)
        engine_id = on.engine_id if on is not None else None
        self.emit(cm.Admit(ticket, replica.id, engine_id, version))

    def release(self, ticket: TicketId) -> bool:
        """End a lease, once; False when there is none (any more)."""
        lease = self.leases.pop(ticket, None)
        if lease is None:
            return False
        self.replicas[lease.replica].leases -= 1
        if lease.version is not None:
            residency = self.residencies[lease.version, lease.replica]
            residency.leases -= 1
            residency.last_used_ms = self.now_ms
        if lease.name is not None:
            holders = self.leases_of[lease.name]
            holders.discard(ticket)
            self.touch(lease.name)
            if not holders:
                del self.leases_of[lease.name]
        return True

    def abort(self, lease: Lease, error: LorryError) -> None:
        """Ask for a running request's end, once; the lease lasts until it has ended."""
        if not lease.aborted:
            lease.aborted = True
            self.emit(cm.Abort(lease.ticket, error))

    # Answers that several places give

    def not_found(self, name: AdapterName) -> AdapterNotFound:
        """The error for a name that nobody registered."""
        return AdapterNotFound(f"The adapter '{name}' is not loaded on this server.", param="model")
