"""Promise 11: when faults and arrivals end, everything comes to rest (that is part of each smoke
seed); and while hot adapters keep an engine full, a cold one gets its turn within the bound that
docs/lifecycle.md states."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lorry.ids import AdapterName
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle.settings import FleetLimits, ReplicaLimits
from tests.simulation.options import Faults, Options
from tests.simulation.workload import Workload
from tests.simulation.world import Simulation, come_to_rest, start

PATIENCE_MS = 300
LEASE_MS = 900
LOAD_MS = 40
UNLOAD_MS = 12
"""An unload takes the model up to this long."""
ABORT_MS = 22
"""So long after its abort a request may still run."""
SLACK_MS = 10
"""Timers ring late, and each step of the model begins a little later."""

UP_MS = 200
"""The engine is up by then."""

ROUND_MS = PATIENCE_MS + LEASE_MS + ABORT_MS + UNLOAD_MS + LOAD_MS + SLACK_MS
"""How long the oldest need can wait."""


class HotAndCold(Workload):
    """Every hot adapter always has requests running, from before the last ones ended; cold ones are
    asked for one at a time."""

    hot = 3

    def restore(self) -> ev.Restored:
        """All names, each with a version of its own, of one byte."""
        found = []
        for index, name in enumerate(self.names):
            spec = ev.VersionSpec(self.new_version(), 1)
            self.sim.put_on_disk(spec)
            found.append((name, spec, f"/adapters/{index}", False))
        return ev.Restored(tuple(found))

    def begin(self) -> None:
        """One rhythm for each name."""
        for index, name in enumerate(self.names):
            mean_ms = 20 if index < self.hot else 1_500
            self._every(mean_ms, lambda name=name: self._one(name))  # type: ignore[misc]

    def _one(self, name: AdapterName) -> None:
        if self.names.index(name) < self.hot or not self._waits(name):
            self.send(name)

    def _waits(self, name: AdapterName) -> bool:
        return any(arrived.name == name for arrived, _ in self.sim.observer.waiting.values())


def fairness_options(seed: int, hot: int, cold: int, places: int) -> Options:
    """A single engine, full with hot adapters."""
    return Options(
        seed=seed,
        replicas=(ReplicaLimits(versions_max=places, bytes_max=places, pins_max=0),),
        limits=replace(
            FleetLimits(), patience_ms=PATIENCE_MS, lease_ms=LEASE_MS, leases_max=100_000
        ),
        faults=Faults(),
        names=hot + cold,
        sources=1,
        bytes_most=1,
        restored=0,
        strangers_at_start=0,
        horizon_ms=20_000,
        arrival_ms=20,
        call_ms=100,
        look_ms=500,
        load_ms=LOAD_MS,
        command_ms=200,
        commit_ms=0,
        run_ms=random.Random(seed).choice((30, 400, 5_000)),
    )


def waits(sim: Simulation, end_ms: int) -> Iterator[tuple[AdapterName, int]]:
    """Run, and tell how long each admitted request had waited."""
    since: dict[int, tuple[AdapterName, int]] = {}
    found: list[tuple[AdapterName, int]] = []

    class Watch:
        """Sees what the checkers see."""

        def before(self, event: ev.Event) -> None:
            """Note the arrival."""
            if isinstance(event, ev.Arrived) and event.name is not None:
                since[event.ticket] = event.name, sim.now_ms

        def command(self, command: cm.Command) -> None:
            """Note the answer."""
            assert not isinstance(command, cm.Refuse), command
            if isinstance(command, cm.Admit):
                name, began_ms = since.pop(command.ticket)
                found.append((name, sim.now_ms - began_ms))

    sim.run_until(UP_MS)
    since |= {t: (a.name, ms) for t, (a, ms) in sim.observer.waiting.items() if a.name is not None}
    watch = Watch()
    sim.watch(watch.before, watch.command)
    sim.run_until(end_ms)
    yield from found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("places", [1, 3])
def test_promise_11_a_cold_adapter_waits_no_longer_than_the_bound(seed: int, places: int) -> None:
    options = fairness_options(seed, hot=places, cold=1, places=places)
    sim = start(options, workload=lambda sim: _workload(sim, places))
    waited = list(waits(sim, options.horizon_ms))
    cold = [ms for name, ms in waited if name == f"a{places}"]
    # Ahead of it at most: the hot adapters that lost their place to it before.
    assert cold
    assert max(cold) <= ROUND_MS * (places + 1)


@pytest.mark.parametrize("seed", range(6))
def test_promise_11_many_cold_adapters_each_wait_a_round_for_each_ahead(seed: int) -> None:
    options = fairness_options(seed, hot=2, cold=4, places=2)
    sim = start(options, workload=lambda sim: _workload(sim, 2))
    waited = list(waits(sim, options.horizon_ms))
    assert {name for name, _ in waited} == {f"a{i}" for i in range(6)}
    assert max(ms for _, ms in waited) <= ROUND_MS * 6
    come_to_rest(sim)


def _workload(sim: Simulation, hot: int) -> HotAndCold:
    workload = HotAndCold(sim)
    workload.hot = hot
    return workload
