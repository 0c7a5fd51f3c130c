"""An engine as the core may meet it: what it really holds, and answers that come after a while,
twice, late, wrong or not at all.

The truth is `held` and `loading`. The model itself is the judge of promise 4: it counts what it is
asked to hold, from the moment a load reaches it, and finds a `Violation` when that is more than the
limits allow.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lorry.errors import EngineRejected, EngineTimeout, EngineUnreachable, StorageFailed
from lorry.ids import EngineId, OperationId, ReplicaId, VersionId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.settings import ReplicaLimits

if TYPE_CHECKING:
    from tests.simulation.world import Simulation

FOREIGN_MOST = 8
"""Strange engine ids lie among those that the core may give out."""


class EngineModel:
    """One replica."""

    def __init__(self, sim: "Simulation", replica: ReplicaId, limits: ReplicaLimits) -> None:
        """Down, until `come_up`."""
        self.sim = sim
        self.replica = replica
        self.limits = limits
        self.alive = False
        self.life = 0
        self.held: dict[EngineId, VersionId | None] = {}
        """What it holds; None for something from before."""
        self.loading: dict[EngineId, VersionId] = {}
        self.pinned: set[EngineId] = set()
        self._free_at: dict[EngineId, int] = {}
        """When the call on that id which is under way will have ended."""

    # Life

    def come_up(self, strangers: int) -> None:
        """Start, possibly with a strange set, and tell the core."""
        rng = self.sim.rng
        self.alive = True
        self.life += 1
        room = min(strangers, self.limits.versions_max)
        self.held |= {EngineId(rng.randint(1, FOREIGN_MOST)): None for _ in range(room)}
        life, listing = self.life, frozenset(self.held)

        def told() -> ev.Event | None:
            if self.life != life or not self.alive:
                return None
            return ev.EngineSeen(self.replica, listing, self.sim.fleet.revision)

        self.sim.later(0, told)

    def die(self) -> None:
        """Forget all (or almost), tell the core after a while, and come back after another."""
        rng, faults = self.sim.rng, self.sim.options.faults
        self.alive = False
        self.life += 1
        strange = rng.random() < faults.comes_back_strange
        kept = {e: None for e in self.held if strange and rng.random() < 0.5}
        self.held, self.pinned, self._free_at = dict(kept), set(), {}
        self.loading.clear()
        self.sim.engine_died(self.replica)
        noticed = rng.randint(0, 60)
        self.sim.later(noticed, lambda: ev.EngineLost(self.replica, "it died"))
        strangers = rng.randint(0, 2) if strange else 0
        self.sim.later(noticed + rng.randint(1, 400), lambda: self.come_up(strangers))

    def drop_one(self) -> None:
        """Lose a version without a word."""
        if self.held:
            gone = self.sim.rng.choice(sorted(self.held))
            del self.held[gone]
            self.pinned.discard(gone)

    def look(self) -> None:
        """Ask what it holds; the answer may be old when it arrives."""
        as_of, life, rng = self.sim.fleet.revision, self.life, self.sim.rng
        old = rng.random() < self.sim.options.faults.listing_old

        def listed() -> None:
            if self.alive and self.life == life:
                seen = ev.EngineSeen(self.replica, frozenset(self.held), as_of)
                self.sim.later(rng.randint(50, 500) if old else 1, lambda: seen)

        self.sim.later(rng.randint(0, 3), listed)

    # Calls

    def load(self, command: cm.Load) -> None:
        """Hold a version."""
        operation, engine_id = command.operation, command.engine_id
        if not self.alive:
            self._unreachable(operation, ev.LoadFailed)
            return
        if engine_id in self.held or engine_id in self.loading:
            self.sim.fail("engine", 2, f"engine id {engine_id} is used twice")
        if not self.sim.on_disk(command.version):
            gone = StorageFailed("the snapshot is gone")
            self._answer(1, ev.LoadFailed(operation, gone, missing=True))
            return
        self.loading[engine_id] = command.version
        self._check_room()
        rng, faults = self.sim.rng, self.sim.options.faults
        fails, unsure = rng.random() < faults.load_fails, rng.random() < faults.load_unsure
        holds = rng.random() < 0.5 if unsure else not fails

        def done() -> ev.Event:
            del self.loading[engine_id]
            if holds:
                self.held[engine_id] = command.version
            if unsure:
                return ev.LoadFailed(operation, EngineTimeout("no answer"), unsure=True)
            if fails:
                return ev.LoadFailed(operation, EngineRejected("it does not fit"))
            return ev.Loaded(operation)

        timed_out = ev.LoadFailed(operation, EngineTimeout("no answer"), unsure=True)
        self._call(engine_id, self.sim.options.load_ms, done, timed_out)

    def unload(self, command: cm.Unload) -> None:
        """Give a version up."""
        operation, engine_id = command.operation, command.engine_id
        self.sim.check_idle(self.replica, engine_id)
        if not self.alive:
            self._unreachable(operation, ev.UnloadFailed)
            return
        rng, faults = self.sim.rng, self.sim.options.faults
        refused = rng.random() < faults.unload_refused
        unsure = rng.random() < faults.unload_unsure
        gives = rng.random() < 0.5 if unsure else not refused

        def done() -> ev.Event:
            existed = engine_id in self.held
            if gives:
                self.held.pop(engine_id, None)
                self.pinned.discard(engine_id)
            if unsure:
                return ev.UnloadFailed(operation, EngineTimeout("no answer"), unsure=True)
            if refused and existed:
                return ev.UnloadFailed(operation, EngineRejected("not now"))
            return ev.Unloaded(operation, existed)

        timed_out = ev.UnloadFailed(operation, EngineTimeout("no answer"), unsure=True)
        self._call(engine_id, 10, done, timed_out)

    def set_pin(self, command: cm.SetPin) -> None:
        """Keep a version in a slot, or not."""
        operation, engine_id = command.operation, command.engine_id
        if not self.alive:
            self._unreachable(operation, ev.PinFailed)
            return
        fails = self.sim.rng.random() < self.sim.options.faults.pin_fails

        def done() -> ev.Event:
            if fails or (command.pinned and engine_id not in self.held):
                return ev.PinFailed(operation, EngineRejected("no such slot"))
            if command.pinned:
                self.pinned.add(engine_id)
                if len(self.pinned) > self.limits.pins_max:
                    self.sim.fail("engine", 6, f"{sorted(self.pinned)} are pinned at once")
            else:
                self.pinned.discard(engine_id)
            return ev.PinSet(operation)

        timed_out = ev.PinFailed(operation, EngineTimeout("no answer"))
        self._call(engine_id, 5, done, timed_out)

    def _call(
        self, engine_id: EngineId, usual_ms: int, done: Callable[[], ev.Event], late: ev.Event
    ) -> None:
        """Do it after a while, calls on one id in order; `late` is the shell's own answer when that
        takes too long, and then the engine's answer reaches nobody or comes late."""
        sim, life, deadline = self.sim, self.life, self.sim.options.command_ms
        slow = sim.rng.random() < sim.options.faults.slow
        took = (
            sim.rng.randint(deadline // 2, deadline * 2) if slow else sim.rng.randint(0, usual_ms)
        )
        due = max(sim.now_ms + took, self._free_at.get(engine_id, 0) + 1)
        self._free_at[engine_id] = due
        in_time = due - sim.now_ms < deadline

        def ended() -> None:
            if self.life != life:
                return
            report = done()
            if in_time or sim.rng.random() < sim.options.faults.answers_late:
                self._answer(0, report)

        sim.later(due - sim.now_ms, ended)
        if not in_time:
            sim.later(deadline, lambda: late)

    def _unreachable(self, operation: OperationId, failed: Callable[..., ev.Event]) -> None:
        """It is down and the core does not know yet."""
        error = EngineUnreachable("connection refused")
        if self.sim.rng.random() < 0.7:
            self._answer(self.sim.rng.randint(0, 50), failed(operation, error))

    def _answer(self, delay: int, report: ev.Event) -> None:
        sim, faults = self.sim, self.sim.options.faults
        sim.later(delay, lambda: report)
        if sim.rng.random() < faults.answers_twice:
            sim.later(delay + sim.rng.randint(0, 5), lambda: report)
        if sim.rng.random() < faults.answers_late:
            sim.later(delay + sim.rng.randint(50, 1_000), lambda: report)

    def _check_room(self) -> None:
        """Promise 4, as the engine sees it."""
        versions = [*self.held.values(), *self.loading.values()]
        size = sum(self.sim.sizes[version] for version in versions if version is not None)
        if len(versions) > self.limits.versions_max or size > self.limits.bytes_max:
            self.sim.fail(
                "engine", 4, f"{self.replica} is to hold {len(versions)} versions of {size} bytes"
            )
