"""What people do: requests by Zipf and in bursts, for known and unknown names, and admin calls of
every kind in any order."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lorry.adapter_settings import SettingsChange
from lorry.ids import AdapterName, OperationId, TicketId, VersionId
from lorry.lifecycle import events as ev

if TYPE_CHECKING:
    from tests.simulation.world import Simulation

UNKNOWN = AdapterName("unknown")
BURST_MOST = 6
NO_VERSION = VersionId("f" * 64)
IDLE_S = (0.1, 0.4, 2.0, None)


class Workload:
    """Draws everything from the world's generator."""

    def __init__(self, sim: "Simulation") -> None:
        """Sources hold versions; several may hold the same one."""
        self.sim = sim
        self.tickets = 0
        self._stopped = False
        self._versions = 0
        self.names = [AdapterName(f"a{i}") for i in range(sim.options.names)]
        self._weights = [1 / (i + 1) for i in range(len(self.names))]
        self.contents: dict[str, ev.VersionSpec] = {}
        """What lies at each source."""
        self._sources = [f"/adapters/{i}" for i in range(sim.options.sources)]
        self._seen: list[tuple[str, ev.VersionSpec]] = []
        """Everything that ever lay somewhere."""
        for source in self._sources:
            self._change(source)

    def _change(self, source: str) -> None:
        rng = self.sim.rng
        if self._seen and rng.random() < 0.3:
            spec = rng.choice(self._seen)[1]
        else:
            size = rng.randint(1, self.sim.options.bytes_most)
            spec = ev.VersionSpec(self.new_version(), size)
        self.contents[source] = spec
        self.sim.sizes[spec.version] = spec.bytes
        self._seen.append((source, spec))

    def new_version(self) -> VersionId:
        """One that nobody has seen."""
        self._versions += 1
        return VersionId(f"{self._versions:012x}" + "0" * 52)

    def restore(self) -> ev.Restored:
        """The registry at the start; its snapshots are on the disk."""
        rng = self.sim.rng
        pins_left = min(limits.pins_max for limits in self.sim.options.replicas)
        found = []
        for name in self.names[: self.sim.options.restored]:
            source = rng.choice(self._sources)
            spec = self.contents[source]
            pinned = pins_left > 0 and rng.random() < 0.3
            pins_left -= pinned
            self.sim.put_on_disk(spec)
            found.append((name, spec, source, pinned))
        idle = {n: self._idle_ms() for n, *_ in found if self._sets_idle()}
        return ev.Restored(tuple(found), idle)

    def _sets_idle(self) -> bool:
        return self.sim.rng.random() < self.sim.options.idle_share

    def _idle_ms(self) -> int:
        return self.sim.rng.choice((100, 400, 2_000))

    def _settings_change(self) -> SettingsChange:
        rng = self.sim.rng
        if self._sets_idle():
            return SettingsChange({"idle_ttl_s": rng.choice(IDLE_S)})
        return SettingsChange({"owner": "me"})

    def begin(self) -> None:
        """Three rhythms: requests, admin calls, looks at the engines."""
        options = self.sim.options
        self._every(options.arrival_ms, self._burst)
        self._every(options.call_ms, self._ask)
        self._every(options.look_ms, self._look)

    def stop(self) -> None:
        """No more of it."""
        self._stopped = True

    def _every(self, mean_ms: int, act: Callable[[], None]) -> None:
        def again() -> None:
            if not self._stopped:
                act()
                self._every(mean_ms, act)

        self.sim.later(int(self.sim.rng.expovariate(1 / mean_ms)), again)

    def _look(self) -> None:
        rng, faults = self.sim.rng, self.sim.options.faults
        for engine in self.sim.engines.values():
            if engine.alive and rng.random() < faults.engine_dies:
                engine.die()
            elif engine.alive and rng.random() < faults.engine_drops:
                engine.drop_one()
            engine.look()

    # Requests

    def _burst(self) -> None:
        rng = self.sim.rng
        name = self._some_name()
        for _ in range(1 if rng.random() < 0.8 else rng.randint(2, BURST_MOST)):
            self.arrive(name)

    def _some_name(self) -> AdapterName:
        rng = self.sim.rng
        if rng.random() < 0.03:
            return UNKNOWN
        return rng.choices(self.names, self._weights)[0]

    def arrive(self, name: AdapterName | None) -> TicketId:
        """One request, sometimes for a version, or for the base after all."""
        rng, sim = self.sim.rng, self.sim
        version = None
        if name is not None and not self._stopped:
            if rng.random() < 0.1:
                served = sim.observer.names.get(name)
                version = served[0] if served and rng.random() < 0.7 else NO_VERSION
            elif rng.random() < 0.05:
                name = None
        return self.send(name, version)

    def send(self, name: AdapterName | None, version: VersionId | None = None) -> TicketId:
        """Exactly this request; its client may leave at any time."""
        rng, sim = self.sim.rng, self.sim
        self.tickets += 1
        ticket = TicketId(self.tickets)
        if rng.random() < sim.options.faults.client_leaves:
            sim.later(rng.randint(0, 400), lambda: self._leave(ticket))
        sim.later(0, lambda: ev.Arrived(ticket, name, version))
        return ticket

    def _leave(self, ticket: TicketId) -> ev.Event | None:
        """The client of a waiting or running request goes."""
        waits = ticket in self.sim.observer.waiting
        runs = self.sim.running.pop(ticket, None) is not None
        return ev.Cancelled(ticket) if waits or runs else None

    # Admin calls

    def _ask(self) -> None:
        sim, rng = self.sim, self.sim.rng
        name, operation = self._some_name(), sim.fleet.next_operation()
        if rng.random() < sim.options.faults.source_changes:
            self._change(rng.choice(self._sources))
        event = self._call(name, operation)
        sim.later(0, lambda: event)
        if isinstance(event, ev.LoadAsked) and rng.random() < 0.3:  # somebody regrets it at once
            sim.later(rng.randint(20, 300), lambda: self._regret(name))
        if rng.random() < 0.15:
            sim.later(rng.randint(0, 200), lambda: ev.CancelAsked(operation))

    def _call(self, name: AdapterName, operation: OperationId) -> ev.Event:
        rng = self.sim.rng
        kinds: list[Callable[[AdapterName, OperationId], ev.Event]] = [
            self._load, self._unload, self._pin, self._settings, ev_prefetch, self._roll_back,
        ]  # fmt: skip
        return rng.choices(kinds, (5, 3, 2, 1, 1, 1))[0](name, operation)

    def _load(self, name: AdapterName, operation: OperationId) -> ev.Event:
        rng = self.sim.rng
        known = None
        source = rng.choice([*self._sources, "/nowhere"])
        if rng.random() < 0.1:
            source, known = rng.choice(self._seen)
        return ev.LoadAsked(
            operation,
            name,
            source,
            mode=rng.choice((ev.Mode.CREATE, ev.Mode.REPLACE, ev.Mode.UPSERT, ev.Mode.UPSERT)),
            if_match=self._if_match(name),
            pinned=rng.choice((None, None, None, True, False)),
            labels={"owner": "me"} if rng.random() < 0.2 else None,
            settings=self._settings_change() if rng.random() < 0.5 else None,
            load=rng.random() > 0.25,
            strategy=rng.choice((ev.Strategy.BESIDE, ev.Strategy.BESIDE, ev.Strategy.DRAIN_FIRST)),
            known=known,
        )

    def _if_match(self, name: AdapterName) -> VersionId | None:
        if self.sim.rng.random() > 0.1:
            return None
        served = self.sim.observer.names.get(name)
        return served[0] if served and self.sim.rng.random() < 0.7 else NO_VERSION

    def _unload(self, name: AdapterName, operation: OperationId) -> ev.Event:
        rng = self.sim.rng
        drain_ms = rng.choice((0, 20, 300, 2_000))
        return ev.UnloadAsked(operation, name, drain_ms, rng.random() < 0.3, self._if_match(name))

    def _pin(self, name: AdapterName, operation: OperationId) -> ev.Event:
        rng = self.sim.rng
        change = self._settings_change() if rng.random() < 0.3 else None
        pinned = rng.random() < 0.6
        return ev.PinAsked(operation, name, pinned, None, change, self._if_match(name))

    def _settings(self, name: AdapterName, operation: OperationId) -> ev.Event:
        change = self._settings_change() if self.sim.rng.random() < 0.7 else None
        labels = {"n": str(operation)}
        return ev.SettingsAsked(operation, name, labels, change, self._if_match(name))

    def _regret(self, name: AdapterName) -> ev.Event | None:
        return None if self._stopped else self._roll_back(name, self.sim.fleet.next_operation())

    def _roll_back(self, name: AdapterName, operation: OperationId) -> ev.Event:
        """To a version that the name stood for, which may still be draining."""
        rng = self.sim.rng
        seen = self.sim.observer
        served = seen.names[name][0] if name in seen.names else NO_VERSION
        former = sorted(seen.stood_for.get(name, set()) - {served})
        wanted = rng.choice(former) if former else NO_VERSION
        known = [(source, spec) for source, spec in self._seen if spec.version == wanted]
        if not known:
            return self._load(name, operation)
        source, spec = rng.choice(known)
        return ev.LoadAsked(operation, name, source, mode=ev.Mode.REPLACE, known=spec)


def ev_prefetch(name: AdapterName, operation: OperationId) -> ev.Event:
    """A prefetch has nothing to draw."""
    return ev.PrefetchAsked(operation, name)
