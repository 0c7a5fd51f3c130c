"""The simulated world: virtual time, a heap of what will happen, and a shell that carries out the
core's commands against models of the disk, the store and the engines.

`run(seed)` is a whole life: restore, faults and load until the horizon (safety), then everything
calms down and must come to rest (liveness), then each registered name is asked for once more.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence

from lorry.errors import AdapterInvalid, BrokenInvariant, LorryError, SourceNotFound, StorageFailed
from lorry.ids import AdapterName, EngineId, ReplicaId, TicketId, VersionId, short
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.fleet import Fleet
from tests.simulation.checkers import Checker, all_checkers
from tests.simulation.engine_model import EngineModel
from tests.simulation.keeping import SwitchInPlace, more_checkers
from tests.simulation.observer import Observer
from tests.simulation.options import Options, draw
from tests.simulation.workload import Workload

SETTLE_MS = 60_000
"""Virtual time within which a world without faults and arrivals must come to rest."""

LAST_STEPS = 50
"""Steps shown with a finding."""

Happening = Callable[[], ev.Event | None]


class Violation(AssertionError):
    """A checker found something. The message has seed, step, time, promise and the last steps."""


class Simulation:
    """One world under way."""

    def __init__(
        self,
        options: Options,
        trace: Callable[[str], None] | None = None,
        workload: Callable[["Simulation"], Workload] = Workload,
    ) -> None:
        """`trace` gets one line for each event and command."""
        self.options = options
        self.rng = random.Random(options.seed + 1)
        self.fleet = Fleet(options.limits)
        self.now_ms = 0
        self.steps = 0
        self.events: dict[str, int] = {}
        """How often each kind of event was fed."""
        self.errors: set[str] = set()
        """Classes of the errors that the core answered with."""
        self.retirements = 0
        self.sizes: dict[VersionId, int] = {}
        self.observer = Observer(self.fleet)
        self.checkers: Sequence[Checker] = (*all_checkers(self), *more_checkers(self))
        kinds = [(checker, type(checker)) for checker in self.checkers]
        self._before = [c.before for c, kind in kinds if kind.before is not Checker.before]
        self._command = [c.command for c, kind in kinds if kind.command is not Checker.command]
        self._after = [c.after for c, kind in kinds if kind.after is not Checker.after]
        self.engines = {
            replica: EngineModel(self, replica, limits)
            for replica, limits in zip(self._replica_ids(), options.replicas, strict=True)
        }
        self.workload = workload(self)
        self.running: dict[TicketId, tuple[ReplicaId, EngineId | None]] = {}
        """Requests that an engine really works on."""
        self._trace = trace
        self._disk: set[VersionId] = set()
        self._heap: list[tuple[int, float, int, Happening]] = []
        self._sequence = 0
        self._timer_set: int | None = None
        self._last: deque[tuple[int, ev.Event | str, tuple[cm.Command, ...]]] = deque(
            maxlen=LAST_STEPS
        )

    def _replica_ids(self) -> list[ReplicaId]:
        return [ReplicaId(f"r{i}") for i in range(len(self.options.replicas))]

    @property
    def switches(self) -> int:
        """Rollbacks that came back to a version which was on its way out."""
        return sum(c.switched for c in self.checkers if isinstance(c, SwitchInPlace))

    def watch(
        self, before: Callable[[ev.Event], None], command: Callable[[cm.Command], None]
    ) -> None:
        """Let somebody else see events and commands as the checkers do."""
        self._before.append(before)
        self._command.append(command)

    # Time

    def later(self, delay_ms: int, happening: Happening) -> None:
        """Let something happen; what it returns is fed to the core. Ties are broken by lot."""
        self._sequence += 1
        entry = self.now_ms + delay_ms, self.rng.random(), self._sequence, happening
        heapq.heappush(self._heap, entry)

    def run_until(self, end_ms: int, steps_most: int | None = None) -> None:
        """Let happen whatever is due by then."""
        while self._heap and self._heap[0][0] <= end_ms:
            if steps_most is not None and self.steps >= steps_most:
                return
            self.now_ms, _, _, happening = heapq.heappop(self._heap)
            event = happening()
            if event is not None:
                self.feed(event)
        self.now_ms = max(self.now_ms, end_ms)

    def feed(self, event: ev.Event) -> None:
        """One event through the core, judged before and after."""
        self.steps += 1
        kind = type(event).__name__
        self.events[kind] = self.events.get(kind, 0) + 1
        for before in self._before:
            before(event)
        self.observer.before(event, self.now_ms)
        try:
            commands = self.fleet.handle(event, self.now_ms)
        except (BrokenInvariant, AssertionError, LookupError, AttributeError) as error:
            self._last.append((self.now_ms, event, ()))
            self.fail("core", getattr(error, "promise", 0), f"raised {error!r}")
        self._last.append((self.now_ms, event, commands))
        if self._trace is not None:
            self._tell(self.now_ms, event, commands, self._trace)
        for command in commands:
            for judge in self._command:
                judge(command)
            self.observer.after(command, self.now_ms)
        for after in self._after:
            after(event, commands)
        for command in commands:
            self._carry_out(command)
        self._keep_time()

    def _keep_time(self) -> None:
        """One timer, moved when the core moves it, and a little late."""
        due = self.fleet.due_ms
        if due == self._timer_set:
            return
        self._timer_set = due
        if due is None:
            return

        def rings() -> ev.Event | None:
            if self._timer_set != due:
                return None
            self._timer_set = None
            return ev.TimerDue()

        self.later(max(0, due - self.now_ms) + self.rng.randint(0, 2), rings)

    # The shell

    def _carry_out(self, command: cm.Command) -> None:
        match command:
            case cm.Fetch():
                self._fetch(command)
            case cm.Load(replica=replica):
                self._lose_snapshot()
                self.later(0, lambda: self.engines[replica].load(command))
            case cm.Unload(replica=replica):
                self.later(0, lambda: self.engines[replica].unload(command))
            case cm.SetPin(replica=replica):
                self.later(0, lambda: self.engines[replica].set_pin(command))
            case cm.Commit():
                self._commit(command)
            case cm.Admit():
                self._begin(command)
            case cm.Abort(ticket, error):
                self._note_error(error)
                self.later(self.rng.randint(0, 20), lambda: self._finish(ticket))
            case cm.Refuse(error=error):
                self._note_error(error)
            case cm.EndOperation(error=error):
                if error is not None:
                    self._note_error(error)
            case cm.Purge(version):
                self._disk.discard(version)
            case cm.BeginOperation():
                self.retirements += 1

    def _note_error(self, error: LorryError) -> None:
        self.errors.add(type(error).__name__)

    def _begin(self, command: cm.Admit) -> None:
        engine = self.engines[command.replica]
        known = command.engine_id is None or command.engine_id in engine.held
        self.running[command.ticket] = command.replica, command.engine_id
        mean = self.options.run_ms
        took = int(self.rng.expovariate(1 / mean)) if engine.alive and known else 1
        self.later(took, lambda: self._finish(command.ticket))

    def _finish(self, ticket: TicketId) -> ev.Event | None:
        """The end of a running request, told once."""
        if self.running.pop(ticket, None) is None:
            return None
        left = self.rng.random() < self.options.faults.client_leaves
        return ev.Cancelled(ticket) if left else ev.Finished(ticket)

    def engine_died(self, replica: ReplicaId) -> None:
        """Its requests end soon, before or after the core hears of it."""
        for ticket, (where, _) in tuple(self.running.items()):
            if where == replica:
                self.later(self.rng.randint(0, 80), lambda t=ticket: self._finish(t))  # type: ignore[misc]

    def check_idle(self, replica: ReplicaId, engine_id: EngineId) -> None:
        """No unload reaches an engine while a request that nobody aborted works on the version."""
        for ticket, where in self.running.items():
            run = self.observer.running.get(ticket)
            if where == (replica, engine_id) and run is not None:
                self.fail("engine", 6, f"{engine_id} is to go while ticket {ticket} runs on it")

    def on_disk(self, version: VersionId) -> bool:
        """Whether its snapshot is there."""
        return version in self._disk

    def is_lost(self, version: VersionId) -> bool:
        """Whether a version that a name stands for can come from nowhere any more."""
        adapters = self.fleet.world.adapters.values()
        sources = [a.source for a in adapters if a.spec.version == version]
        contents = self.workload.contents
        kept = any(source in contents and contents[source].version == version for source in sources)
        return not kept and version not in self._disk

    def put_on_disk(self, spec: ev.VersionSpec) -> None:
        """A snapshot is made."""
        self.sizes[spec.version] = spec.bytes
        self._disk.add(spec.version)

    def _lose_snapshot(self) -> None:
        if self._disk and self.rng.random() < self.options.faults.snapshot_vanishes:
            self._disk.discard(self.rng.choice(sorted(self._disk)))

    def _fetch(self, command: cm.Fetch) -> None:
        rng, faults = self.rng, self.options.faults
        fails = rng.random() < faults.fetch_fails
        self._lose_snapshot()

        def done() -> ev.Event:
            spec = self.workload.contents.get(command.source)
            if fails or spec is None:
                return ev.FetchFailed(command.operation, SourceNotFound("nothing is there"))
            if command.expected not in (None, spec.version):
                return ev.FetchFailed(command.operation, AdapterInvalid("other bytes"))
            self.put_on_disk(spec)
            return ev.Fetched(command.operation, spec)

        self._report(rng.randint(0, 60), done)

    def _commit(self, command: cm.Commit) -> None:
        fails = self.rng.random() < self.options.faults.commit_fails

        def done() -> ev.Event:
            if fails:
                return ev.CommitFailed(command.operation, StorageFailed("disk full"))
            return ev.Committed(command.operation)

        self._report(self.rng.randint(0, self.options.commit_ms), done)

    def _report(self, delay_ms: int, done: Callable[[], ev.Event]) -> None:
        def once() -> ev.Event:
            report = done()
            if self.rng.random() < self.options.faults.answers_twice:
                self.later(self.rng.randint(0, 500), lambda: report)
            return report

        self.later(delay_ms, once)

    # Findings

    def fail(self, checker: str, promise: int, found: str) -> None:
        """Stop with everything that is needed to look into it."""
        lines: list[str] = []
        for now_ms, event, commands in self._last:
            self._tell(now_ms, event, commands, lines.append)
        raise Violation(
            f"seed {self.options.seed}, step {self.steps}, {self.now_ms} ms: {checker}, promise "
            f"{promise}: {found}\n{self.options}\nlast steps:\n" + "\n".join(lines)
        )

    @staticmethod
    def _tell(
        now_ms: int,
        event: ev.Event | str,
        commands: tuple[cm.Command, ...],
        say: Callable[[str], None],
    ) -> None:
        say(f"{now_ms:>7} {_short(event)}")
        for command in commands:
            say(f"          -> {_short(command)}")


def _short(value: object) -> str:
    """A value as one line, versions cut."""
    text = repr(value)
    for version in _versions_in(text):
        text = text.replace(version, short(VersionId(version)).lstrip("0") or "0")
    return text


def _versions_in(text: str) -> list[str]:
    words = text.replace("'", " ").split()
    return [word for word in words if len(word) == 64 and word.isalnum()]


# A whole life


def start(
    options: Options,
    trace: Callable[[str], None] | None = None,
    workload: Callable[[Simulation], Workload] = Workload,
) -> Simulation:
    """A world with its registry restored and its engines coming up."""
    sim = Simulation(options, trace, workload)
    if trace is not None:
        trace(str(options))
    sim.feed(sim.workload.restore())
    for replica, limits in zip(sim.engines, options.replicas, strict=True):
        sim.feed(ev.ReplicaAdded(replica, limits))
    for engine in sim.engines.values():
        delay = sim.rng.randint(0, 100)
        sim.later(delay, lambda e=engine: e.come_up(options.strangers_at_start))  # type: ignore[misc]
    sim.workload.begin()
    return sim


def come_to_rest(sim: Simulation) -> None:
    """Faults and arrivals off; everything under way must end."""
    sim.options = sim.options.calm
    sim.workload.stop()
    sim.run_until(sim.now_ms + SETTLE_MS // 2)
    for engine in sim.engines.values():
        engine.look()  # what was dropped without a word comes out
    sim.run_until(sim.now_ms + SETTLE_MS // 2)
    for checker in sim.checkers:
        checker.at_rest()


def ask_for_each(sim: Simulation) -> None:
    """Every registered name answers once more."""
    names: list[AdapterName] = sorted(sim.observer.names)
    for name in names:
        sim.workload.arrive(name)
        sim.run_until(sim.now_ms + SETTLE_MS)
    for checker in sim.checkers:
        checker.at_end(names)


def run(
    seed: int,
    trace: Callable[[str], None] | None = None,
    steps_most: int | None = None,
    options: Options | None = None,
) -> Simulation:
    """A whole life, or the first steps of one; raises `Violation`."""
    sim = start(options or draw(seed), trace)
    sim.run_until(sim.options.horizon_ms, steps_most)
    if steps_most is None:
        come_to_rest(sim)
        ask_for_each(sim)
    return sim
