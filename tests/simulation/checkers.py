"""One class for each property, each judging by what an observer sees (`observer.py`). Where a
checker reads the core's own fields, it is to compare them with that."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from lorry.errors import AllPinned, CapacityExhausted
from lorry.ids import AdapterName, TicketId, VersionId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.invariants import check
from lorry.lifecycle.records import FleetStatistics
from lorry.lifecycle.states import State
from tests.simulation.observer import Run
from tests.simulation.reference import ending_objection, refusal_objection

if TYPE_CHECKING:
    from tests.simulation.world import Simulation

TIMER_LATE_MS = 3
"""The world's timers ring up to this late."""


class Checker:
    """Sees events before the observer does, and commands before it folds them."""

    promise = 0

    def __init__(self, sim: "Simulation") -> None:
        """One for each world."""
        self.sim = sim
        self.seen = sim.observer

    def fail(self, found: str) -> None:
        """Report a violation."""
        self.sim.fail(type(self).__name__, self.promise, found)

    def before(self, event: ev.Event) -> None:
        """An event is about to be fed."""

    def command(self, command: cm.Command) -> None:
        """The core has asked for something; the observer does not know yet."""

    def after(self, event: ev.Event, commands: tuple[cm.Command, ...]) -> None:
        """The step is over."""

    def at_rest(self) -> None:
        """Faults and arrivals are off, and everything has had its time."""

    def at_end(self, names: Sequence[AdapterName]) -> None:
        """Each of `names` has been asked for once more."""


class Invariants(Checker):
    """`lifecycle.invariants` holds after every step."""

    promise = 1

    def after(self, event: ev.Event, commands: tuple[cm.Command, ...]) -> None:
        """All of them."""
        found = check(self.sim.fleet.world)
        if found:
            self.fail("; ".join(found))


class OneAnswer(Checker):
    """Every ticket gets exactly one answer."""

    promise = 7

    def command(self, command: cm.Command) -> None:
        """Only a waiting ticket is answered, only a running one aborted."""
        if isinstance(command, cm.Admit | cm.Refuse) and command.ticket not in self.seen.waiting:
            self.fail(f"{command} answers a ticket that does not wait")

    def at_rest(self) -> None:
        """Nobody waits or runs for ever."""
        if self.seen.waiting or self.seen.running:
            self.fail(f"{sorted(self.seen.waiting)} wait, {sorted(self.seen.running)} run")


class AbortsOnce(Checker):
    """A request is aborted at most once, and only while it runs."""

    promise = 7

    def __init__(self, sim: "Simulation") -> None:
        """Remembers who ran before the step, since a lost engine ends them all."""
        super().__init__(sim)
        self._ran: dict[TicketId, Run] = {}

    def before(self, event: ev.Event) -> None:
        """Who runs now."""
        self._ran = dict(self.seen.running)

    def command(self, command: cm.Command) -> None:
        """Those may be aborted, and who was admitted in this step."""
        if not isinstance(command, cm.Abort):
            return
        run = self.seen.running.get(command.ticket) or self._ran.get(command.ticket)
        if run is None or run.aborted:
            self.fail(f"ticket {command.ticket} is aborted, {run}")


class RightVersion(Checker):
    """A request runs on the version that its name stood for when it was admitted, as the registry
    says, in an engine that was last seen to hold it; a refusal is never a lie."""

    promise = 2

    def command(self, command: cm.Command) -> None:
        """Judge each answer."""
        if isinstance(command, cm.Admit):
            self._admitted(command, self.seen.waiting[command.ticket][0])
        elif isinstance(command, cm.Refuse):
            arrived, since_ms = self.seen.waiting[command.ticket]
            objection = refusal_objection(
                self.seen,
                arrived,
                self.sim.now_ms - since_ms,
                command.error,
                self.sim.options.limits,
                self.sim.options.replicas,
                self.sim.sizes,
            )
            if objection is not None:
                self.fail(f"{command}: {objection}")

    def _admitted(self, admit: cm.Admit, arrived: ev.Arrived) -> None:
        if admit.replica not in self.seen.up:
            self.fail(f"{admit} on an engine that is down")
        if arrived.name is None:
            if admit.version is not None or admit.engine_id is not None:
                self.fail(f"{admit}: the base was asked for")
            return
        served = self.seen.names.get(arrived.name)
        if served is None or served[0] != admit.version:
            self.fail(f"{admit}: '{arrived.name}' stands for {served}")
        if arrived.version not in (None, admit.version):
            self.fail(f"{admit}: {arrived.version} was asked for")
        assert admit.engine_id is not None
        copy = self.seen.copies.get((admit.replica, admit.engine_id))
        if copy is None or copy.phase != "resident" or copy.version != admit.version:
            self.fail(f"{admit}: the engine was last seen with {copy}")


class Agreement(Checker):
    """The core believes of each engine what an observer concludes."""

    promise = 1

    phases: ClassVar = {
        State.LOADING: ("loading",),
        State.RESIDENT: ("resident",),
        State.DRAINING: ("resident", "unsure"),
        State.UNLOADING: ("leaving", "unsure"),
    }

    def after(self, event: ev.Event, commands: tuple[cm.Command, ...]) -> None:
        """Compare copy by copy."""
        world = self.sim.fleet.world
        believed = {
            (replica.id, residency.engine_id): residency
            for replica in world.replicas.values()
            for residency in replica.holding.values()
        }
        if believed.keys() != self.seen.copies.keys():
            self.fail(f"core: {sorted(believed)}, observer: {sorted(self.seen.copies)}")
        for key, copy in self.seen.copies.items():
            residency = believed[key]
            if copy.phase not in self.phases[residency.state] or residency.version != copy.version:
                self.fail(f"{key}: core says {residency.state}, observer says {copy}")

    def at_rest(self) -> None:
        """The engines hold what they are believed to hold, and nothing else."""
        for engine in self.sim.engines.values():
            held = {(engine.replica, engine_id) for engine_id in engine.held}
            known = {key for key in self.seen.copies if key[0] == engine.replica}
            if held != known:
                self.fail(f"{engine.replica} holds {sorted(held)}, known is {sorted(known)}")


class EngineCommands(Checker):
    """Engines are asked for what makes sense: one copy of a version each, no unload while a request
    runs, nothing for a version that nobody wants but to give it up."""

    promise = 6

    def command(self, command: cm.Command) -> None:
        """Judge each by the copies known."""
        match command:
            case cm.Load():
                self._load(command)
            case cm.Unload(replica=replica, engine_id=engine_id):
                self._unload(command, replica + str(engine_id))
            case cm.Purge(version):
                if version in {served for served, _ in self.seen.names.values()}:
                    self.fail(f"{command}: a name stands for it")
            case cm.SetPin(replica=replica, engine_id=engine_id):
                copy = self.seen.copies.get((replica, engine_id))
                if copy is None or copy.phase != "resident":
                    self.fail(f"{command} of {copy}")

    def _load(self, load: cm.Load) -> None:
        for (replica, engine_id), copy in self.seen.copies.items():
            if engine_id == load.engine_id:
                self.fail(f"{load}: its engine id is {copy}'s on {replica}")
            if replica == load.replica and copy.version == load.version:
                self.fail(f"{load}: the version is {copy.phase} there")
        if (load.replica, load.engine_id) in self.seen.strangers:
            self.fail(f"{load}: a stranger has that engine id")
        if load.replica not in self.seen.up:
            self.fail(f"{load}: the engine is down")
        if load.version not in self.seen.wanted():
            self.fail(f"{load}: nobody wants that version")

    def _unload(self, unload: cm.Unload, what: str) -> None:
        key = unload.replica, unload.engine_id
        copy = self.seen.copies.get(key)
        if copy is None:
            if key not in self.seen.strangers:
                self.fail(f"{what} is unloaded and was never there")
            return
        if copy.phase not in ("resident", "unsure"):
            self.fail(f"{what} is unloaded while {copy.phase}")
        for ticket, run in self.seen.running.items():
            if (run.admit.replica, run.admit.engine_id) == key:
                self.fail(f"{what} is unloaded while ticket {ticket} runs on it")
        if copy.phase == "resident" and copy.version in self.seen.published_now():
            self.fail(f"{what} is unloaded, but {copy.version} is about to be published")
        if copy.phase == "resident" and copy.version in self.seen.pinned():
            self.fail(f"{what} is unloaded, but {copy.version} is pinned")


class OneCommand(Checker):
    """At most one command for a copy, one change for a name, and one fetch for a version and
    replica is open at a time."""

    promise = 5

    def after(self, event: ev.Event, commands: tuple[cm.Command, ...]) -> None:
        """Count what is open."""
        open_now: Counter[object] = Counter()
        for command in self.seen.open.values():
            match command:
                case cm.Load(replica=replica, engine_id=engine_id):
                    open_now[replica, engine_id] += 1
                case cm.Unload(replica=replica, engine_id=engine_id):
                    open_now[replica, engine_id] += 1
                case cm.SetPin(replica=replica, engine_id=engine_id):
                    open_now[replica, engine_id] += 1
                case cm.Commit(name=name):
                    open_now[name] += 1
        twice = [key for key, count in open_now.items() if count > 1]
        if twice:
            self.fail(f"two commands are open for {twice}")


class Calls(Checker):
    """Every admin call ends once, in time, truthfully, and a failed one has changed nothing."""

    promise = 4

    def __init__(self, sim: "Simulation") -> None:
        """Remembers which calls have written the registry."""
        super().__init__(sim)
        self._writes: dict[int, bool] = {}
        """Open commits, and whether they would change the name's version."""

    def command(self, command: cm.Command) -> None:
        """Judge each end by what is registered then."""
        if not isinstance(command, cm.EndOperation):
            return
        call = self.seen.calls.get(command.operation)
        if call is None:
            self.fail(f"{command}: no such call is under way")
            return
        limits, request = self.sim.options.limits, call.request
        due_ms = limits.operation_ms
        if isinstance(request, ev.UnloadAsked):
            due_ms += request.drain_ms
        took_ms = self.sim.now_ms - call.began_ms
        if took_ms > due_ms + self.sim.options.commit_ms + TIMER_LATE_MS:
            self.fail(f"{command} after {took_ms} ms, due after {due_ms}")
        objection = ending_objection(self.seen, call, command.error, took_ms, due_ms)
        if objection is not None:
            self.fail(f"{command} of {request}: {objection}")

    def at_rest(self) -> None:
        """None is left."""
        if self.seen.calls:
            self.fail(f"{self.seen.calls} have not ended")


class FailureChangesNothing(Checker):
    """The registry changes only by a commit that belongs to a call under way, and the call that
    made it ends well."""

    promise = 4

    def __init__(self, sim: "Simulation") -> None:
        """Remembers the registry before the step."""
        super().__init__(sim)
        self._names: dict[AdapterName, tuple[VersionId, bool]] = {}

    def before(self, event: ev.Event) -> None:
        """As it is now."""
        self._names = dict(self.seen.names)

    def after(self, event: ev.Event, commands: tuple[cm.Command, ...]) -> None:
        """The core's names are the registry's; a change comes with a good end."""
        world = self.sim.fleet.world
        served = {n: (a.spec.version, a.pinned) for n, a in world.adapters.items()}
        if served != self.seen.names:
            self.fail(f"core: {served}, registry: {self.seen.names}")
        if served != self._names and not isinstance(event, ev.Restored):
            ends = [c for c in commands if isinstance(c, cm.EndOperation)]
            if not ends or ends[0].error is not None:
                self.fail(f"the registry changed, and the call ended with {ends}")


class UnloadIsFinal(Checker):
    """When an unload has ended well, no engine holds any version that the name ever stood for,
    unless it is or was another name's, or a call for another name brought it."""

    promise = 3

    def command(self, command: cm.Command) -> None:
        """Look into the engines themselves."""
        if not isinstance(command, cm.EndOperation) or command.error is not None:
            return
        call = self.seen.calls.get(command.operation)
        if call is None or not isinstance(call.request, ev.UnloadAsked):
            return
        name, histories = call.request.name, (self.seen.stood_for, self.seen.brought)
        others = [v for history in histories for n, v in history.items() if n != name]
        gone = self.seen.stood_for[name].difference(self.seen.wanted(), *others)
        for engine in self.sim.engines.values():
            left = [(e, v) for e, v in engine.held.items() if v in gone]
            if left:
                self.fail(f"{engine.replica} still holds {left}")


class Books(Checker):
    """`statistics()` is what a recount finds."""

    promise = 1

    def after(self, event: ev.Event, commands: tuple[cm.Command, ...]) -> None:
        """Recount."""
        found: FleetStatistics = self.sim.fleet.statistics()
        seen = self.seen
        counted = (len(seen.names), len(seen.waiting), len(seen.running), len(seen.calls))
        told = found.registered, found.waiting, found.running, found.operations
        if told != counted:
            self.fail(f"registered, waiting, running, operations: {told}, counted {counted}")
        reserved = dict.fromkeys(found.bytes_reserved, 0)
        for (replica, _), copy in seen.copies.items():
            reserved[replica] += self.sim.sizes[copy.version]
        if found.bytes_reserved != reserved:
            self.fail(f"{found.bytes_reserved} are reserved, counted {reserved}")


class Timers(Checker):
    """Whatever waits for time to pass has a timer, and what is due does not wait for something else
    to happen."""

    promise = 11

    def before(self, event: ev.Event) -> None:
        """Whose time was up before this event came along?"""
        now_ms, limits = self.sim.now_ms - TIMER_LATE_MS, self.sim.options.limits
        for ticket, (_, since_ms) in self.seen.waiting.items():
            if now_ms > since_ms + limits.ticket_wait_ms:
                self.fail(f"ticket {ticket} has waited since {since_ms}")
        for ticket, run in self.seen.running.items():
            if not run.aborted and now_ms > self._end_of(run):
                self.fail(f"ticket {ticket} runs since {run.began_ms} and was not aborted")

    def _end_of(self, run: Run) -> int:
        due = run.began_ms + self.sim.options.limits.lease_ms
        if run.name is None or run.name not in self.seen.draining:
            return due
        request = self.seen.calls[self.seen.head(run.name)].request
        assert isinstance(request, ev.UnloadAsked)
        return min(due, self.seen.draining[run.name] + request.drain_ms)

    def after(self, event: ev.Event, commands: tuple[cm.Command, ...]) -> None:
        """After each step."""
        due = self.sim.fleet.due_ms
        fresh = [run for run in self.seen.running.values() if not run.aborted]
        if due is None and (self.seen.waiting or fresh):
            self.fail("requests wait or run without a timer")

    def at_rest(self) -> None:
        """Nothing is left to wait for."""
        lost = [v for v, pinned in self.seen.names.values() if pinned and self.sim.is_lost(v)]
        if self.sim.fleet.due_ms is not None and not lost:
            self.fail(f"a timer is due at {self.sim.fleet.due_ms} when all is at rest")


class NoHindrance(Checker):
    """When there is room for everything that anybody waits for, and nothing stands against a load,
    then it is under way: whatever else goes on with other adapters."""

    promise = 5

    def after(self, event: ev.Event, commands: tuple[cm.Command, ...]) -> None:
        """Judge only the plain case, one engine and room for all: what is right when there is less
        is the planner's to say."""
        seen, sizes = self.seen, self.sim.sizes
        if len(seen.up) != 1 or not seen.waiting:
            return
        replica = next(iter(seen.up))
        held = {c.version: c for (where, _), c in seen.copies.items() if where == replica}
        if any(where == replica for where, _ in seen.strangers):
            return
        limits = self.sim.fleet.world.replicas[replica].budget
        if any(
            isinstance(call.request, ev.LoadAsked)
            and call.request.strategy is ev.Strategy.DRAIN_FIRST
            for call in seen.calls.values()
        ):
            return
        everything = seen.needed() | held.keys()
        size = sum(sizes[version] for version in everything)
        loading = sum(copy.phase == "loading" for copy in held.values())
        if len(everything) > limits.versions_max or size > limits.bytes_max:
            return
        if loading >= self.sim.options.limits.loads_per_replica_max:
            return
        for arrived, _ in seen.waiting.values():
            version = seen.names[arrived.name][0] if arrived.name is not None else None
            under_way = seen.has_failed(version) or version in held or version in seen.fetching()
            if version is not None and not under_way:
                self.fail(f"'{arrived.name}' waits, {replica} holds only {held}")


class Stale(Checker):
    """A report on which nobody waits is counted, and moves nothing."""

    promise = 1

    def __init__(self, sim: "Simulation") -> None:
        """Remembers the count before the step."""
        super().__init__(sim)
        self._stale = False
        self._count = 0

    def before(self, event: ev.Event) -> None:
        """As the observer sees it."""
        self._stale = self.seen.stale(event)
        self._count = self.sim.fleet.world.counters.stale_reports

    def after(self, event: ev.Event, commands: tuple[cm.Command, ...]) -> None:
        """Counted exactly then."""
        if isinstance(event, ev.Finished | ev.Cancelled):
            return
        counted = self.sim.fleet.world.counters.stale_reports - self._count
        if counted != self._stale:
            self.fail(f"{event} is {'late' if self._stale else 'awaited'}, counted {counted}")


class Rest(Checker):
    """A calm world comes to rest: nothing is under way, pins are resident, nothing is left over."""

    promise = 11

    def at_rest(self) -> None:
        """Look for leftovers."""
        world = self.sim.fleet.world
        moving = [
            (r.version, r.replica, r.state)
            for r in world.residencies.values()
            if r.state in (State.FETCHING, State.LOADING, State.DRAINING, State.UNLOADING)
        ]
        lost = [key for key in moving if self.sim.is_lost(key[0])]  # pinned: tried for ever
        if len(moving) > len(lost) or len(self.seen.open) > len(lost):
            self.fail(f"still under way: {moving}, {self.seen.open}")
        leftovers = {
            "opened": {} if lost else world.opened, "asked": world.asked, "loose": world.loose,
            "queues": world.queues, "leases": world.leases, "leases_of": world.leases_of,
        }  # fmt: skip
        left = {name: value for name, value in leftovers.items() if value}
        if left:
            self.fail(f"left over: {left}")
        served = {version for version, _ in self.seen.names.values()}
        unknown = {r.version for r in world.residencies.values()} - served
        if unknown or set(world.cold) - served:
            self.fail(f"remembered without a name: {unknown}, {set(world.cold) - served}")
        self._pins()

    def _pins(self) -> None:
        for name, (version, pinned) in self.seen.names.items():
            found = [key for key, copy in self.seen.copies.items() if copy.version == version]
            if pinned and not found and self._could_fit(version):
                self.fail(f"'{name}' is pinned and not resident")
            for replica, engine_id in found if pinned else ():
                if engine_id not in self.sim.engines[replica].pinned:
                    self.fail(f"'{name}' is pinned and has no slot on {replica}")

    def _could_fit(self, version: VersionId) -> bool:
        """Whether some replica has room for it beside its other pinned versions."""
        pinned = {v for v, p in self.seen.names.values() if p and v != version}
        return not self.sim.is_lost(version) and any(
            sum(self.sim.sizes[v] for v in pinned) + self.sim.sizes[version] <= limits.bytes_max
            for limits in self.sim.options.replicas
        )


class EveryNameAnswers(Checker):
    """In a calm world, a request for a registered name is served; or is refused because its
    snapshot and source are gone, or pins leave no room."""

    promise = 10

    def __init__(self, sim: "Simulation") -> None:
        """Remembers the answers by name."""
        super().__init__(sim)
        self._answers: dict[AdapterName, tuple[cm.Admit | cm.Refuse, bool]] = {}

    def command(self, command: cm.Command) -> None:
        """The last answer for each name, and whether its snapshot or a source of it was there."""
        if isinstance(command, cm.Admit | cm.Refuse):
            name = self.seen.waiting[command.ticket][0].name
            if name in self.seen.names:
                there = not self.sim.is_lost(self.seen.names[name][0])
                self._answers[name] = command, there

    def at_rest(self) -> None:
        """Only what comes now counts."""
        self._answers.clear()

    def at_end(self, names: Sequence[AdapterName]) -> None:
        """Judge them."""
        for name in names:
            if name not in self._answers:
                self.fail(f"'{name}' has not been answered")
            answer, there = self._answers[name]
            if isinstance(answer, cm.Refuse) and there and not self._may_fail(name, answer):
                self.fail(f"'{name}' was refused in a calm world: {answer}")

    def _may_fail(self, name: AdapterName, answer: cm.Refuse) -> bool:
        version, _ = self.seen.names[name]
        if isinstance(answer.error, AllPinned):
            return any(pinned for _, pinned in self.seen.names.values())
        if isinstance(answer.error, CapacityExhausted):
            limits = self.sim.options.replicas
            return all(self.sim.sizes[version] > replica.bytes_max for replica in limits)
        return False


def all_checkers(sim: "Simulation") -> list[Checker]:
    """One of each."""
    kinds = (
        OneAnswer, AbortsOnce, RightVersion, EngineCommands, Calls, UnloadIsFinal, OneCommand,
        Agreement, FailureChangesNothing, Books, Timers, NoHindrance, Stale, Invariants, Rest,
        EveryNameAnswers,
    )  # fmt: skip
    return [kind(sim) for kind in kinds]
