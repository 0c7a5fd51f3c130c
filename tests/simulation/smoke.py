"""The seeds that every run of the tests tries, and what they reached."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from lorry.lifecycle import world as core
from lorry.lifecycle.states import State, Trigger
from tests.simulation.world import run

SMOKE_SEEDS = range(200)
CHUNK = 25
"""Seeds in one test, so that each stays well below the time limit."""


@dataclass(slots=True)
class Reached:
    """What happened at least once."""

    steps: int = 0
    moves: set[tuple[State, Trigger]] = field(default_factory=set)
    errors: set[str] = field(default_factory=set)
    events: set[str] = field(default_factory=set)
    evictions: set[str] = field(default_factory=set)
    retirements: int = 0
    switches: int = 0
    """Rollbacks to versions that were on their way out, without a load."""


@cache
def smoke(first: int) -> Reached:
    """Run the chunk of seeds that begins with `first`; raises `Violation`."""
    reached = Reached()
    with recorded(reached.moves):
        for seed in range(first, first + CHUNK):
            sim = run(seed)
            reached.steps += sim.steps
            reached.errors |= sim.errors
            reached.events |= sim.events.keys()
            reached.retirements += sim.retirements
            reached.switches += sim.switches
            reached.evictions |= sim.fleet.world.counters.evictions.keys()
    return reached


@contextmanager
def recorded(moves: set[tuple[State, Trigger]]) -> Iterator[None]:
    """Write down every move of the table that the core makes."""
    real = core.advance

    def advance(state: State, trigger: Trigger) -> State:
        after = real(state, trigger)
        moves.add((state, trigger))
        return after

    core.advance = advance
    try:
        yield
    finally:
        core.advance = real
