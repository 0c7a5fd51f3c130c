"""A fleet under any order of events that hypothesis can think of: rules are events, invariants are
`lifecycle.invariants`. Unlike the simulation it knows no likely order and shrinks what it finds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorry.errors import EngineRejected, EngineTimeout, StorageFailed
from lorry.ids import AdapterName, EngineId, OperationId, ReplicaId, TicketId, VersionId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.fleet import Fleet
from lorry.lifecycle.invariants import check
from lorry.lifecycle.settings import FleetLimits, ReplicaLimits

NAMES = st.sampled_from([AdapterName(name) for name in "abc"])
SPECS = st.builds(
    ev.VersionSpec,
    version=st.sampled_from([VersionId(digit * 64) for digit in "12345"]),
    bytes=st.just(2),
)
LIMITS = FleetLimits(
    tickets_max=6,
    tickets_per_adapter_max=4,
    leases_max=8,
    operations_per_adapter_max=3,
    ticket_wait_ms=400,
    operation_ms=800,
    lease_ms=900,
    patience_ms=50,
    retry_first_ms=20,
    retry_last_ms=200,
)
PICK = st.integers(0, 7)


class FleetMachine(RuleBasedStateMachine):
    """The shell's side of every contract, and no more."""

    def __init__(self) -> None:
        """Nothing is there before `begin`."""
        super().__init__()
        self.fleet = Fleet(LIMITS)
        self.now_ms = 0
        self.tickets = 0
        self.open: dict[OperationId, cm.Command] = {}
        self.answered: list[OperationId] = []
        self.waiting: set[TicketId] = set()
        self.running: dict[TicketId, cm.Admit] = {}
        self.calls: set[OperationId] = set()
        self.held: dict[ReplicaId, dict[EngineId, VersionId]] = {}
        self.up: dict[ReplicaId, bool] = {}
        self.places = 0

    # Events in, commands out

    def tell(self, event: ev.Event) -> None:
        """One event; what follows is kept for the rules to answer."""
        for command in self.fleet.handle(event, self.now_ms):
            match command:
                case cm.Admit(ticket):
                    self.waiting.remove(ticket)
                    self.running[ticket] = command
                case cm.Refuse(ticket):
                    self.waiting.remove(ticket)
                case cm.EndOperation(operation):
                    self.calls.remove(operation)
                case cm.Load(replica=replica, engine_id=engine_id, version=version):
                    held = self.held[replica]
                    assert version not in held.values()
                    held[engine_id] = version
                    assert len(held) <= self.places
                    self.open[command.operation] = command
                case cm.Unload(replica=replica, engine_id=engine_id):
                    for admit in self.running.values():
                        assert (admit.replica, admit.engine_id) != (replica, engine_id)
                    self.open[command.operation] = command
                case cm.Fetch() | cm.SetPin() | cm.Commit():
                    self.open[command.operation] = command

    @initialize(replicas=st.integers(1, 2), places=st.integers(1, 3), pins=st.integers(0, 1))
    def begin(self, replicas: int, places: int, pins: int) -> None:
        """Engines come up empty."""
        self.places = places
        for index in range(replicas):
            replica = ReplicaId(f"r{index}")
            limits = ReplicaLimits(places, places * 2, min(pins, places - 1))
            self.held[replica], self.up[replica] = {}, False
            self.tell(ev.ReplicaAdded(replica, limits))
            self.come_up(index)

    # Requests

    @rule(name=NAMES | st.none())
    def arrive(self, name: AdapterName | None) -> None:
        """A request."""
        self.tickets += 1
        self.waiting.add(TicketId(self.tickets))
        self.tell(ev.Arrived(TicketId(self.tickets), name))

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        """One that runs ends."""
        ticket = sorted(self.running)[pick % len(self.running)]
        del self.running[ticket]
        self.tell(ev.Finished(ticket))

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK)
    def give_up(self, pick: int) -> None:
        """One that waits is cancelled."""
        ticket = sorted(self.waiting)[pick % len(self.waiting)]
        self.waiting.remove(ticket)
        self.tell(ev.Cancelled(ticket))

    # Admin calls

    def ask(self) -> OperationId:
        """An id for a call that is about to be asked."""
        operation = self.fleet.next_operation()
        self.calls.add(operation)
        return operation

    @rule(
        name=NAMES,
        pinned=st.sampled_from([None, True, False]),
        load=st.booleans(),
        strategy=st.sampled_from(ev.Strategy),
        known=SPECS | st.none(),
    )
    def load(
        self,
        name: AdapterName,
        pinned: bool | None,
        load: bool,
        strategy: ev.Strategy,
        known: ev.VersionSpec | None,
    ) -> None:
        """Register, replace or roll back."""
        event = ev.LoadAsked(
            self.ask(), name, "/x", pinned=pinned, load=load, strategy=strategy, known=known
        )
        self.tell(event)

    @rule(name=NAMES, drain_ms=st.sampled_from([0, 100, 700]))
    def unload(self, name: AdapterName, drain_ms: int) -> None:
        """Unload."""
        self.tell(ev.UnloadAsked(self.ask(), name, drain_ms))

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: AdapterName, pinned: bool) -> None:
        """Pin or unpin."""
        self.tell(ev.PinAsked(self.ask(), name, pinned))

    @rule(name=NAMES)
    def prefetch(self, name: AdapterName) -> None:
        """Prefetch."""
        self.tell(ev.PrefetchAsked(self.ask(), name))

    @precondition(lambda self: self.calls)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        """Cancel one."""
        self.tell(ev.CancelAsked(sorted(self.calls)[pick % len(self.calls)]))

    # Answers

    def take(self, pick: int) -> cm.Command:
        """An open command, which is answered now."""
        operation = sorted(self.open)[pick % len(self.open)]
        self.answered.append(operation)
        return self.open.pop(operation)

    def let_go(self, command: cm.Load | cm.Unload) -> None:
        """The engine does not hold it; unless it is another life, which never had it."""
        self.held[command.replica].pop(command.engine_id, None)

    @precondition(lambda self: self.open)
    @rule(pick=PICK, spec=SPECS)
    def succeed(self, pick: int, spec: ev.VersionSpec) -> None:
        """Somebody does what he was asked."""
        command = self.take(pick)
        match command:
            case cm.Fetch(operation, expected=expected):
                fetched = ev.VersionSpec(expected, 2) if expected is not None else spec
                self.tell(ev.Fetched(operation, fetched))
            case cm.Load(operation):
                self.tell(ev.Loaded(operation))
            case cm.Unload(operation, replica, engine_id):
                existed = engine_id in self.held[replica]
                self.let_go(command)
                self.tell(ev.Unloaded(operation, existed))
            case cm.SetPin(operation):
                self.tell(ev.PinSet(operation))
            case cm.Commit(operation):
                self.tell(ev.Committed(operation))

    @precondition(lambda self: self.open)
    @rule(pick=PICK, unsure=st.booleans(), missing=st.booleans(), truly=st.booleans())
    def fail(self, pick: int, unsure: bool, missing: bool, truly: bool) -> None:
        """Somebody does not, or nobody knows."""
        command = self.take(pick)
        error = EngineTimeout("no answer") if unsure else EngineRejected("no")
        match command:
            case cm.Fetch(operation):
                self.tell(ev.FetchFailed(operation, error))
            case cm.Load(operation):
                if truly or not unsure:
                    self.let_go(command)
                self.tell(ev.LoadFailed(operation, error, missing and not unsure, unsure))
            case cm.Unload(operation):
                if truly and unsure:
                    self.let_go(command)
                self.tell(ev.UnloadFailed(operation, error, unsure))
            case cm.SetPin(operation):
                self.tell(ev.PinFailed(operation, error))
            case cm.Commit(operation):
                self.tell(ev.CommitFailed(operation, StorageFailed("full")))

    @precondition(lambda self: self.answered)
    @rule(pick=PICK, kind=st.sampled_from([ev.Loaded, ev.Unloaded, ev.PinSet, ev.Committed]))
    def answer_again(self, pick: int, kind: type[ev.Loaded]) -> None:
        """Late or doubled: of what was answered before, whatever it was about."""
        revision = self.fleet.revision
        before = self.fleet.world.counters.stale_reports
        self.tell(kind(self.answered[pick % len(self.answered)]))
        assert self.fleet.world.counters.stale_reports == before + 1
        assert self.fleet.revision == revision

    # Engines and time

    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        """An engine goes, and with it all that was asked of it."""
        replica = sorted(self.up)[pick % len(self.up)]
        self.held[replica].clear()
        self.up[replica] = False
        lost = [t for t, admit in self.running.items() if admit.replica == replica]
        for operation, command in tuple(self.open.items()):
            of_engine = isinstance(command, cm.Load | cm.Unload | cm.SetPin)
            if of_engine and command.replica == replica:
                del self.open[operation]
        self.tell(ev.EngineLost(replica, "gone"))
        for ticket in lost:
            del self.running[ticket]

    @rule(pick=PICK)
    def come_up(self, pick: int) -> None:
        """It is there, or is asked again what it holds."""
        replica = sorted(self.up)[pick % len(self.up)]
        self.up[replica] = True
        listing = frozenset(self.held[replica])
        self.tell(ev.EngineSeen(replica, listing, self.fleet.revision))

    @rule(ms=st.sampled_from([1, 20, 60, 500, 2_000]))
    def wait(self, ms: int) -> None:
        """Time passes; every timer rings that is due on the way."""
        end = self.now_ms + ms
        while (due := self.fleet.due_ms) is not None and due <= end:
            self.now_ms = due
            self.tell(ev.TimerDue())
        self.now_ms = end

    # What must hold

    @invariant()
    def nothing_is_broken(self) -> None:
        """All numbered invariants, and the machine's own books."""
        assert check(self.fleet.world) == []
        assert set(self.fleet.world.tickets) == self.waiting
        assert set(self.fleet.world.leases) == set(self.running)
        statistics = self.fleet.statistics()
        assert statistics.operations == len(self.calls)

    def teardown(self) -> None:
        """When all answer well and nobody comes any more, everything ends."""
        for index in range(len(self.up)):
            self.come_up(index)
        for _ in range(300):
            while self.open:
                self.succeed(0, ev.VersionSpec(VersionId("1" * 64), 2))
            while self.running:
                self.finish(0)
            if self.fleet.due_ms is not None:
                self.wait(max(1, self.fleet.due_ms - self.now_ms))
            elif not self.open:
                break
        assert not (self.waiting or self.running or self.calls)
        assert not (self.fleet.world.opened or self.fleet.world.asked)


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
