"""What the forecast of a load says, the core then does; and asking changes nothing."""

import copy
import random

from lorry.ids import AdapterName, VersionId
from lorry.lifecycle import events as ev
from lorry.lifecycle.fleet import Fleet
from lorry.lifecycle.forecast import Forecast, forecast
from lorry.lifecycle.states import State
from tests.simulation.options import draw
from tests.simulation.world import Simulation, start

SEEDS = range(32)
QUESTIONS = 12
"""In each world, at moments spread over its life."""


def test_promise_4_a_forecast_changes_nothing_and_comes_true() -> None:
    evicting = 0
    for seed in SEEDS:
        sim = start(draw(seed))
        rng = random.Random(seed)
        for _ in range(QUESTIONS):
            sim.run_until(sim.now_ms + 400)
            spec, name = question(sim, rng)
            before = picture(sim.fleet)
            said = forecast(sim.fleet.world, name, spec)
            assert picture(sim.fleet) == before, seed
            if nobody_waits(sim.fleet):
                evicting += comes_true(sim.fleet, said, name, spec, sim.now_ms)
    assert evicting > 5


def question(sim: Simulation, rng: random.Random) -> tuple[ev.VersionSpec, AdapterName]:
    """A version nobody has seen, under a name that is new or in use."""
    limits = [replica.budget.bytes_max for replica in sim.fleet.world.replicas.values()]
    size = rng.randint(1, max(1, min(limits, default=4) // 3))
    version = VersionId(f"{rng.getrandbits(256):064x}")
    name = rng.choice([AdapterName("brand-new"), *sorted(sim.fleet.world.adapters)])
    return ev.VersionSpec(version, size), name


def picture(fleet: Fleet) -> object:
    """Everything the core remembers, as a value that can be compared."""
    world = fleet.world
    return (
        [repr(sorted(map(repr, vars(world)[key]))) for key in ("pinned", "loose", "cold")],
        [repr(r) for r in world.residencies.values()],
        [repr(r) for r in world.replicas.values()],
        repr((world.adapters, world.asked, world.opened, world.tickets, world.leases)),
        (world.now_ms, world.revision, world.due_ms, world.counters, len(world.commands)),
        (world._last_operation, world._last_engine_id),
    )


def nobody_waits(fleet: Fleet) -> bool:
    """Whether the load would be the only one to want room."""
    world = fleet.world
    calm = not world.asked and not world.tickets and not world.cold
    return calm and not any(r.draining or r.strangers for r in world.replicas.values())


def comes_true(
    fleet: Fleet, said: Forecast, name: AdapterName, spec: ev.VersionSpec, now_ms: int
) -> bool:
    """Ask a copy of the core for the load, and compare; whether an eviction was foreseen."""
    twin = copy.deepcopy(fleet)
    asked = ev.LoadAsked(twin.next_operation(), name, "", known=spec)
    twin.handle(asked, fleet.world.now_ms)
    refused = asked.name not in twin.world.asked
    assert refused == (said.error is not None), (said, now_ms)
    gone = {
        residency.version
        for key, residency in twin.world.residencies.items()
        if residency.state in (State.DRAINING, State.UNLOADING)
        and fleet.world.residencies[key].state is State.RESIDENT
    }
    assert gone == {victim.version for victim in said.evicts if not victim.leases}, said
    return bool(gone)
