"""A fleet on a bench: feed it events by hand, look at its commands, and check its invariants after
each step."""

from collections.abc import Sequence
from typing import TypeVar

from lorry.errors import EngineRejected, LorryError
from lorry.ids import AdapterName, EngineId, OperationId, ReplicaId, TicketId, VersionId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.fleet import Fleet
from lorry.lifecycle.invariants import check
from lorry.lifecycle.records import Residency
from lorry.lifecycle.settings import FleetLimits, ReplicaLimits
from lorry.lifecycle.states import State

Found = TypeVar("Found", bound=cm.Command)

LIMITS = FleetLimits(
    operation_ms=10_000, ticket_wait_ms=5_000, lease_ms=60_000, patience_ms=1_000
)  # fmt: skip
REFUSED = EngineRejected("the engine would not")


def v(digit: int) -> VersionId:
    """A version that is easy to recognise: one or two hex digits, again and again."""
    text = f"{digit:x}"
    return VersionId(text * (64 // len(text)))


class Rig:
    """Names are `a`, `b`...; versions `v(1)`, `v(2)`...; time stands still unless it is moved."""

    def __init__(
        self,
        *,
        places: int = 2,
        room: int = 100,
        pins: int = 1,
        replicas: int = 1,
        limits: FleetLimits = LIMITS,
        up: bool = True,
    ) -> None:
        """Replicas `r0`, `r1`... with that many places and bytes each, up and empty."""
        self.fleet = Fleet(limits)
        self.world = self.fleet.world
        self.now_ms = 0
        self.replicas = [ReplicaId(f"r{i}") for i in range(replicas)]
        self._tickets = 0
        for replica in self.replicas:
            self.tell(ev.ReplicaAdded(replica, ReplicaLimits(places, room, pins)))
            if up:
                self.see(replica=replica)

    # Events

    def tell(self, event: ev.Event, *, after_ms: int = 0) -> tuple[cm.Command, ...]:
        """One event, that much later; its commands but the notes."""
        self.now_ms += after_ms
        commands = self.fleet.handle(event, self.now_ms)
        assert check(self.world) == []
        return tuple(c for c in commands if not isinstance(c, cm.Note))

    def wait(self, ms: int) -> tuple[cm.Command, ...]:
        """Let time pass, with a timer at its end."""
        return self.tell(ev.TimerDue(), after_ms=ms)

    def see(
        self, *held: EngineId, replica: ReplicaId | None = None, as_of: int | None = None
    ) -> tuple[cm.Command, ...]:
        """The engine says what it holds."""
        asked = self.fleet.revision if as_of is None else as_of
        return self.tell(ev.EngineSeen(replica or self.replicas[0], frozenset(held), asked))

    def lose(self, replica: ReplicaId | None = None) -> tuple[cm.Command, ...]:
        """The engine goes away."""
        return self.tell(ev.EngineLost(replica or self.replicas[0], "gone"))

    def arrive(
        self, name: str | None, version: VersionId | None = None
    ) -> tuple[TicketId, tuple[cm.Command, ...]]:
        """A request: its ticket, and what follows at once."""
        self._tickets += 1
        ticket = TicketId(self._tickets)
        adapter = AdapterName(name) if name is not None else None
        return ticket, self.tell(ev.Arrived(ticket, adapter, version))

    def run(self, name: str | None) -> TicketId:
        """A request that is admitted at once."""
        ticket, commands = self.arrive(name)
        assert only(cm.Admit, commands).ticket == ticket
        return ticket

    def refused(self, name: str | None, version: VersionId | None = None) -> LorryError:
        """The error that a request gets at once."""
        return only(cm.Refuse, self.arrive(name, version)[1]).error

    def finish(self, ticket: TicketId) -> tuple[cm.Command, ...]:
        """A request ends."""
        return self.tell(ev.Finished(ticket))

    # Admin calls

    def ask_load(self, name: str, **rest: object) -> tuple[OperationId, tuple[cm.Command, ...]]:
        """A load call; `rest` as in `LoadAsked`."""
        operation = self.fleet.next_operation()
        event = ev.LoadAsked(operation, AdapterName(name), f"/{name}", **rest)  # type: ignore[arg-type]
        return operation, self.tell(event)

    def ask_unload(
        self, name: str, drain_ms: int = 3_000, **rest: object
    ) -> tuple[OperationId, tuple[cm.Command, ...]]:
        """An unload call; `rest` as in `UnloadAsked`."""
        operation = self.fleet.next_operation()
        event = ev.UnloadAsked(operation, AdapterName(name), drain_ms, **rest)  # type: ignore[arg-type]
        return operation, self.tell(event)

    def ask_pin(self, name: str, pinned: bool = True) -> tuple[OperationId, tuple[cm.Command, ...]]:
        """A pin call."""
        operation = self.fleet.next_operation()
        return operation, self.tell(ev.PinAsked(operation, AdapterName(name), pinned))

    def register(self, name: str, digit: int, size: int = 1, **rest: object) -> VersionId:
        """A load call that succeeds at every step."""
        operation, commands = self.ask_load(name, **rest)
        done = self.answer_all(commands, size=size, digit=digit)
        assert cm.EndOperation(operation, None) in done
        return v(digit)

    def restore(self, *names: str, pinned: Sequence[str] = ()) -> tuple[cm.Command, ...]:
        """Names in the registry from the start; the n-th stands for `v(n)`, of one byte."""
        adapters = tuple(
            (AdapterName(name), ev.VersionSpec(v(digit), 1), f"/{name}", name in pinned)
            for digit, name in enumerate(names, start=1)
        )
        return self.tell(ev.Restored(adapters))

    def restore_more(self, name: str, digit: int, size: int) -> tuple[cm.Command, ...]:
        """One more name in the registry, of any size."""
        spec = ev.VersionSpec(v(digit), size)
        return self.tell(ev.Restored(((AdapterName(name), spec, f"/{name}", False),)))

    def answer_all(
        self, commands: Sequence[cm.Command], *, size: int = 1, digit: int = 1
    ) -> list[cm.Command]:
        """Answer each command well, and what follows from that; all commands in order."""
        todo, done = list(commands), []
        while todo:
            command = todo.pop(0)
            done.append(command)
            todo += self.answer(command, size=size, digit=digit)
        return done

    def answer(
        self, command: cm.Command, *, size: int = 1, digit: int = 1
    ) -> tuple[cm.Command, ...]:
        """Answer one command well, if it is one that waits for an answer."""
        match command:
            case cm.Fetch(operation, expected=expected):
                return self.tell(ev.Fetched(operation, ev.VersionSpec(expected or v(digit), size)))
            case cm.Load(operation):
                return self.tell(ev.Loaded(operation))
            case cm.Unload(operation):
                return self.tell(ev.Unloaded(operation))
            case cm.SetPin(operation):
                return self.tell(ev.PinSet(operation))
            case cm.Commit(operation):
                return self.tell(ev.Committed(operation))
        return ()

    # Looking

    def residency(self, digit: int, replica: int = 0) -> Residency:
        """The record of a version."""
        return self.world.residencies[v(digit), self.replicas[replica]]

    def state(self, digit: int, replica: int = 0) -> State:
        """Where a version is."""
        return self.residency(digit, replica).state

    def engine_id(self, digit: int, replica: int = 0) -> EngineId:
        """The id of a version that may be held."""
        engine_id = self.residency(digit, replica).engine_id
        assert engine_id is not None
        return engine_id

    def reserved(self, replica: int = 0) -> int:
        """Bytes."""
        return self.world.replicas[self.replicas[replica]].budget.bytes


def of(kind: type[Found], commands: Sequence[cm.Command]) -> list[Found]:
    """The commands of a kind."""
    return [command for command in commands if isinstance(command, kind)]


def only(kind: type[Found], commands: Sequence[cm.Command]) -> Found:
    """The one command of a kind."""
    found = of(kind, commands)
    assert len(found) == 1, commands
    return found[0]


def error_of(commands: Sequence[cm.Command]) -> LorryError:
    """The error with which the one admin call ended."""
    error = only(cm.EndOperation, commands).error
    assert error is not None
    return error


def went_well(commands: Sequence[cm.Command], operation: OperationId) -> bool:
    """Whether that admin call ended without error."""
    return cm.EndOperation(operation, None) in commands
