"""What somebody would conclude who sees every event and command and knows the contract, but not
the core: the checkers' own small model of the truth."""

from dataclasses import dataclass

from lorry.ids import AdapterName, EngineId, OperationId, ReplicaId, TicketId, VersionId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.fleet import Fleet
from lorry.lifecycle.records import Request


@dataclass(slots=True)
class Copy:
    """A version in an engine, as far as its reports say."""

    version: VersionId
    phase: str
    """loading, resident, unsure (nobody knows), or leaving."""


@dataclass(slots=True)
class Call:
    """An admin call under way."""

    request: Request
    began_ms: int
    brings: set[VersionId]
    """Versions that it may make resident."""


@dataclass(slots=True)
class Run:
    """A running request."""

    admit: cm.Admit
    name: AdapterName | None
    began_ms: int
    aborted: bool = False


Reported = (
    ev.Fetched, ev.FetchFailed, ev.Loaded, ev.LoadFailed, ev.Unloaded, ev.UnloadFailed,
    ev.PinSet, ev.PinFailed, ev.Committed, ev.CommitFailed,
)  # fmt: skip


class Observer:
    """Folds events and commands, in the order seen."""

    def __init__(self, fleet: Fleet) -> None:
        """`fleet` is asked only which changes an old listing may judge."""
        self._fleet = fleet
        self.names: dict[AdapterName, tuple[VersionId, bool]] = {}
        """What the registry says: version and pin of each name."""
        self.stood_for: dict[AdapterName, set[VersionId]] = {}
        """Every version of a name since it was registered; kept until it is registered again."""
        self.brought: dict[AdapterName, set[VersionId]] = {}
        """Every version that calls ever brought for a name."""
        self.open: dict[OperationId, cm.Command] = {}
        self.copies: dict[tuple[ReplicaId, EngineId], Copy] = {}
        self.strangers: set[tuple[ReplicaId, EngineId]] = set()
        self.up: set[ReplicaId] = set()
        self.waiting: dict[TicketId, tuple[ev.Arrived, int]] = {}
        self.running: dict[TicketId, Run] = {}
        self.over: set[TicketId] = set()
        self.calls: dict[OperationId, Call] = {}
        self.idle_ms: dict[AdapterName, int] = {}
        """Names that retire when nobody uses them."""
        self.used_ms: dict[AdapterName, int] = {}
        """When each name was used last: by a request that came, began or ended, or by a call."""
        self.retiring: set[OperationId] = set()
        """Calls that the core asked itself for."""
        self.evicted: set[VersionId] = set()
        """Versions that were to make room for others, until no engine has a copy."""
        self._now_ms = 0
        self.draining: dict[AdapterName, int] = {}
        """Names that are being unloaded, and since when."""
        self._fetch_of: dict[OperationId, OperationId] = {}
        """The fetch that each of them waits for."""
        self._failures: set[tuple[VersionId, ReplicaId | None]] = set()
        """Versions whose load has failed on a replica since it was loaded there last, or (None)
        whose fetch has since the last one."""

    # Events

    def before(self, event: ev.Event, now_ms: int) -> None:
        """An event is about to reach the core."""
        self._now_ms = now_ms
        match event:
            case ev.Arrived(ticket, name):
                self.waiting[ticket] = event, now_ms
                self._use(name)
            case ev.Finished(ticket) | ev.Cancelled(ticket):
                self._end_run(ticket)
                waited = self.waiting.pop(ticket, None)
                if waited is not None:
                    self._use(waited[0].name)
                    self.over.add(ticket)
            case ev.LoadAsked(operation, known=known):
                self.calls[operation] = Call(event, now_ms, {known.version} if known else set())
                if known is not None:
                    self.brought.setdefault(event.name, set()).add(known.version)
            case ev.UnloadAsked() | ev.PinAsked() | ev.SettingsAsked() | ev.PrefetchAsked():
                self.calls[event.operation] = Call(event, now_ms, set())
            case ev.Restored(adapters, idle_ms):
                for restored, spec, _, pinned in adapters:
                    self._bind(restored, spec.version, pinned)
                self.idle_ms.update(idle_ms)
            case ev.EngineLost(replica):
                self._lost(replica)
            case ev.EngineSeen():
                self._seen(event)
            case _ if isinstance(event, Reported):
                command = self.open.pop(event.operation, None)
                if isinstance(event, ev.Fetched):
                    self._on_disk(event.spec.version)
                if command is not None:
                    self._reported(event, command)

    def _bind(self, name: AdapterName, version: VersionId, pinned: bool) -> None:
        if name not in self.names:
            self.stood_for[name] = set()
        self.names[name] = version, pinned
        self.stood_for[name].add(version)
        self._use(name)

    def _use(self, name: AdapterName | None) -> None:
        if name is not None and name in self.names:
            self.used_ms[name] = self._now_ms

    def _end_run(self, ticket: TicketId) -> None:
        run = self.running.pop(ticket, None)
        if run is not None:
            self._use(run.name)

    def _lost(self, replica: ReplicaId) -> None:
        self.up.discard(replica)
        for key in [key for key in self.copies if key[0] == replica]:
            if self.copies[key].phase == "loading":
                self._failures.add((self.copies[key].version, replica))
            self._gone(key)
        self.strangers = {key for key in self.strangers if key[0] != replica}
        for operation, command in tuple(self.open.items()):
            if isinstance(command, cm.Unload) and command.replica == replica:
                del self.open[operation]
        for ticket in [t for t, run in self.running.items() if run.admit.replica == replica]:
            self._end_run(ticket)

    def _gone(self, key: tuple[ReplicaId, EngineId]) -> None:
        """The engine holds it no more: nobody runs on it, no command about it is answered."""
        version = self.copies.pop(key).version
        if version not in {copy.version for copy in self.copies.values()}:
            self.evicted.discard(version)
        for ticket, run in tuple(self.running.items()):
            if (run.admit.replica, run.admit.engine_id) == key:
                self._end_run(ticket)
        for operation, command in tuple(self.open.items()):
            if isinstance(command, cm.Load | cm.Unload | cm.SetPin) and key == (
                command.replica,
                command.engine_id,
            ):
                del self.open[operation]

    def _seen(self, event: ev.EngineSeen) -> None:
        replica = self._fleet.world.replicas[event.replica]
        if event.as_of < replica.lost_revision:
            return  # asked before the engine was lost
        self.up.add(event.replica)
        listed = {(event.replica, engine_id) for engine_id in event.residents}
        asked = {
            (command.replica, command.engine_id)
            for command in self.open.values()
            if isinstance(command, cm.Unload)
        }
        gone = {key for key in self.strangers - listed - asked if key[0] == event.replica}
        self.strangers = (self.strangers - gone) | (listed - self.copies.keys())
        for residency in tuple(replica.holding.values()):
            engine_id = residency.engine_id
            assert engine_id is not None
            judged = residency.revision <= event.as_of and residency.open is None
            if judged and engine_id not in event.residents:
                self._gone((event.replica, engine_id))

    def _reported(self, event: ev.Event, command: cm.Command) -> None:
        match event, command:
            case ev.Loaded(), cm.Load(version=version):
                self._failures -= {(version, command.replica), (version, None)}
                self._on_disk(version)
                self.copies[command.replica, command.engine_id].phase = "resident"
            case ev.LoadFailed(unsure=True), cm.Load(version=version):
                self._failures.add((version, command.replica))
                self.copies[command.replica, command.engine_id].phase = "unsure"
            case ev.LoadFailed(), cm.Load(version=version):
                self._failures.add((version, command.replica))
                self._gone((command.replica, command.engine_id))
            case ev.FetchFailed(), cm.Fetch(expected=expected) if expected is not None:
                self._failures.add((expected, None))
            case ev.Fetched(spec=spec), cm.Fetch(expected=None):
                self.calls[self.head(command.name)].brings.add(spec.version)
                self.brought.setdefault(command.name, set()).add(spec.version)
            case ((ev.Unloaded() | ev.UnloadFailed()), cm.Unload()):
                self._unload_reported(event, (command.replica, command.engine_id))
            case ev.Committed(), cm.Commit(version=None):
                del self.names[command.name]
                self.idle_ms.pop(command.name, None)
            case ev.Committed(), cm.Commit(version=version) if version is not None:
                self._bind(command.name, version, command.pinned)
                self._set_idle(command)

    def _on_disk(self, version: VersionId) -> None:
        """Whoever still looks for that version elsewhere is answered in vain from now on."""
        for operation, command in tuple(self.open.items()):
            if isinstance(command, cm.Fetch) and command.expected == version:
                del self.open[operation]

    def _set_idle(self, command: cm.Commit) -> None:
        values = command.settings.values if command.settings is not None else {}
        if "idle_ttl_s" in values:
            self.idle_ms.pop(command.name, None)
            if values["idle_ttl_s"] is not None:
                self.idle_ms[command.name] = int(values["idle_ttl_s"] * 1000)

    def _unload_reported(
        self, event: ev.Unloaded | ev.UnloadFailed, key: tuple[ReplicaId, EngineId]
    ) -> None:
        copy = self.copies.get(key)
        if copy is None:
            if isinstance(event, ev.Unloaded):
                self.strangers.discard(key)
        elif isinstance(event, ev.Unloaded):
            self._gone(key)
        else:
            known = copy.phase == "leaving" and not event.unsure
            copy.phase = "resident" if known else "unsure"

    # Commands

    def after(self, command: cm.Command, now_ms: int) -> None:
        """A command has left the core; the checkers have judged it already."""
        match command:
            case cm.Admit(ticket):
                arrived, _ = self.waiting.pop(ticket)
                self.running[ticket] = Run(command, arrived.name, now_ms)
                self._use(arrived.name)
            case cm.Refuse(ticket):
                waited = self.waiting.pop(ticket, None)
                self._use(waited[0].name if waited is not None else None)
                self.over.add(ticket)
            case cm.BeginOperation(operation, _, name):
                request = ev.UnloadAsked(operation, name, 0, idle_ms=self.idle_ms.get(name))
                self.calls[operation] = Call(request, now_ms, set())
                self.retiring.add(operation)
            case cm.Abort(ticket):
                if ticket in self.running:
                    self.running[ticket].aborted = True
            case cm.EndOperation(operation):
                self._call_ended(operation)
            case cm.Note("draining", name=drained) if drained is not None:
                self.draining[drained] = now_ms
            case cm.Note("evicted", version=version) if version is not None:
                self.evicted.add(version)
            case cm.Load():
                self.open[command.operation] = command
                key = command.replica, command.engine_id
                self.copies[key] = Copy(command.version, "loading")
            case cm.Unload():
                self.open[command.operation] = command
                copy = self.copies.get((command.replica, command.engine_id))
                if copy is not None and copy.phase == "resident":
                    copy.phase = "leaving"
            case cm.Fetch(expected=None):
                self.open[command.operation] = command
                self._fetch_of[self.head(command.name)] = command.operation
            case cm.Fetch() | cm.SetPin() | cm.Commit():
                self.open[command.operation] = command

    def _call_ended(self, operation: OperationId) -> None:
        """Its open fetch is answered in vain from now on."""
        name = self.calls[operation].request.name
        if self.head(name) == operation:
            self.draining.pop(name, None)
        del self.calls[operation]
        if operation not in self.retiring:
            self._use(name)
        fetch = self._fetch_of.pop(operation, None)
        if fetch is not None:
            self.open.pop(fetch, None)

    def head(self, name: AdapterName) -> OperationId:
        """The call whose turn it is: they are taken in the order asked."""
        return next(o for o, call in self.calls.items() if call.request.name == name)

    # Questions

    def stale(self, event: ev.Event) -> bool:
        """Whether the event is a report on which nobody waits."""
        return isinstance(event, Reported) and event.operation not in self.open

    def wanted(self) -> set[VersionId]:
        """Versions that a name stands for or a call brings."""
        served = {version for version, _ in self.names.values()}
        return served.union(*(call.brings for call in self.calls.values()))

    def published_now(self) -> set[VersionId | None]:
        """Versions that were made resident for a call which is writing the registry."""
        heads = [(c, self.calls[self.head(c.name)].request) for c in self._commits()]
        return {
            commit.version
            for commit, request in heads
            if (isinstance(request, ev.LoadAsked) and request.load)
            or (isinstance(request, ev.PinAsked) and request.pinned)
        }

    def _commits(self) -> list[cm.Commit]:
        return [c for c in self.open.values() if isinstance(c, cm.Commit)]

    def has_failed(self, version: VersionId | None) -> bool:
        """Whether it may be in a back-off somewhere."""
        return any(failed == version for failed, _ in self._failures)

    def fetching(self) -> set[VersionId | None]:
        """Versions whose snapshots are being brought back."""
        return {c.expected for c in self.open.values() if isinstance(c, cm.Fetch)}

    def needed(self) -> set[VersionId]:
        """Versions that are pinned, or that somebody waits for, or may come to wait for when his
        call gets so far."""
        names: set[AdapterName | None] = {
            name for name, (_, pinned) in self.names.items() if pinned
        }
        names |= {arrived.name for arrived, _ in self.waiting.values()}
        names |= {call.request.name for call in self.calls.values()}
        named = {self.names[name][0] for name in names if name in self.names}
        return named.union(*(call.brings for call in self.calls.values()))

    def pinned(self) -> set[VersionId]:
        """Versions that must not be evicted: pinned, by a name that no call unloads or replaces."""
        touched = {
            call.request.name
            for call in self.calls.values()
            if isinstance(call.request, ev.UnloadAsked)
            or (
                isinstance(call.request, ev.LoadAsked)
                and call.request.strategy is ev.Strategy.DRAIN_FIRST
            )
        }
        return {v for name, (v, pinned) in self.names.items() if pinned and name not in touched}
