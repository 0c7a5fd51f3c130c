"""The seeds of level two that every run of the tests tries, and what they reached."""

from dataclasses import dataclass, field
from functools import cache

from tests.simulation.shell.life import run

SMOKE_SEEDS = range(60)
CHUNK = 15
"""Seeds in one test, so that each stays well below the time limit."""


@dataclass(slots=True)
class Reached:
    """What happened at least once."""

    steps: int = 0
    faults: set[str] = field(default_factory=set)
    routes: set[str] = field(default_factory=set)
    commands: set[str] = field(default_factory=set)
    ends: set[str] = field(default_factory=set)
    codes: set[str] = field(default_factory=set)


@cache
def smoke(first: int) -> Reached:
    """Run the chunk of seeds that begins with `first`; raises `Violation`."""
    reached = Reached()
    for seed in range(first, first + CHUNK):
        world = run(seed)
        reached.steps += world.steps
        reached.faults |= world.machine.seen
        reached.routes |= world.judge.routes
        reached.commands |= world.judge.commands
        reached.ends |= world.judge.ends
        reached.codes |= world.judge.codes
    return reached


def all_reached() -> Reached:
    """All chunks, run now or before."""
    whole = Reached()
    for first in range(SMOKE_SEEDS.start, SMOKE_SEEDS.stop, CHUNK):
        part = smoke(first)
        whole.steps += part.steps
        for name in ("faults", "routes", "commands", "ends", "codes"):
            getattr(whole, name).update(getattr(part, name))
    return whole
