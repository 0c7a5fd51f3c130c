"""What a world is like: every probability, size and limit drawn from the seed.

Swarm testing: each fault is switched off in half of the worlds, so that a fault which ends
everything early does not hide what lies behind it in every run.
"""

import random
from dataclasses import dataclass, fields, replace

from lorry.lifecycle.settings import FleetLimits, ReplicaLimits


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities, per call unless said otherwise."""

    load_fails: float = 0.0
    load_unsure: float = 0.0
    """Nobody knows how the load ended; the engine holds it or not, by a coin."""
    unload_refused: float = 0.0
    unload_unsure: float = 0.0
    pin_fails: float = 0.0
    fetch_fails: float = 0.0
    commit_fails: float = 0.0
    slow: float = 0.0
    """A call takes long enough to run into the shell's deadline."""
    answers_twice: float = 0.0
    answers_late: float = 0.0
    """A second answer, long after the first."""
    snapshot_vanishes: float = 0.0
    """Per fetch or load: some snapshot leaves the disk."""
    engine_dies: float = 0.0
    """Per look at the engines."""
    engine_drops: float = 0.0
    """Per look at the engines: one version goes by itself."""
    comes_back_strange: float = 0.0
    """Per return of an engine: it holds something."""
    listing_old: float = 0.0
    """Per listing: it takes long to arrive."""
    source_changes: float = 0.0
    """Per load call: other bytes lie at the source now."""
    client_leaves: float = 0.0
    """Per request."""


@dataclass(frozen=True, slots=True)
class Options:
    """One world. Times in milliseconds."""

    seed: int
    replicas: tuple[ReplicaLimits, ...]
    limits: FleetLimits
    faults: Faults
    names: int
    sources: int
    bytes_most: int
    """Adapters are 1 to this many bytes."""
    restored: int
    """Names that are in the registry from the start."""
    strangers_at_start: int
    """Versions that each engine holds from an earlier life of the server."""
    horizon_ms: int
    """When arrivals and faults end."""
    arrival_ms: int
    """Between bursts of requests, on average."""
    call_ms: int
    """Between admin calls, on average."""
    look_ms: int
    """Between looks at the engines."""
    load_ms: int
    """A load takes up to this long, unless it is slow."""
    command_ms: int
    """The shell's deadline for one engine call."""
    commit_ms: int
    """The store answers within this time, always."""
    run_ms: int
    """How long a request runs, on average."""
    idle_share: float = 0.0
    """Of the calls that may, those that set an idle time-to-live; and of restored names."""

    @property
    def calm(self) -> "Options":
        """The same world without faults."""
        return replace(self, faults=Faults())

    def __str__(self) -> str:
        """One line for each group of numbers."""
        faults = {f.name: getattr(self.faults, f.name) for f in fields(Faults)}
        on = ", ".join(f"{name}={value:.3f}" for name, value in faults.items() if value)
        return (
            f"seed {self.seed}: {self.names} names, {self.sources} sources, replicas "
            f"{[(r.versions_max, r.bytes_max, r.pins_max) for r in self.replicas]}\n"
            f"  faults: {on or 'none'}\n  {self.limits}"
        )


def draw(seed: int) -> Options:
    """The world of a seed."""
    rng = random.Random(seed)
    bytes_most = rng.choice((1, 4, 10))
    return Options(
        seed=seed,
        replicas=tuple(_replica(rng, bytes_most) for _ in range(rng.choice((1, 1, 1, 2, 3)))),
        limits=_limits(rng),
        faults=_faults(rng),
        names=rng.randint(1, 9),
        sources=rng.randint(1, 9),
        bytes_most=bytes_most,
        restored=rng.choice((0, 0, 1, 3, 6)),
        strangers_at_start=rng.choice((0, 0, 1, 2)),
        horizon_ms=rng.choice((3_000, 6_000, 12_000)),
        arrival_ms=rng.choice((15, 40, 100)),
        call_ms=rng.choice((60, 150, 400)),
        look_ms=rng.choice((100, 400)),
        load_ms=rng.choice((5, 40, 150)),
        command_ms=rng.choice((200, 600)),
        commit_ms=rng.choice((0, 5, 40)),
        run_ms=rng.choice((10, 80, 400)),
        idle_share=rng.choice((0.0, 0.0, 0.1, 0.5)),
    )


def _replica(rng: random.Random, bytes_most: int) -> ReplicaLimits:
    versions_max = rng.choice((1, 2, 2, 3, 5, 8))
    slots = rng.randint(1, versions_max)
    return ReplicaLimits(
        versions_max=versions_max,
        bytes_max=max(bytes_most, rng.randint(1, bytes_most) * versions_max - rng.randint(0, 2)),
        pins_max=slots - 1,
    )


def _limits(rng: random.Random) -> FleetLimits:
    return FleetLimits(
        tickets_max=rng.choice((6, 30, 200)),
        tickets_per_adapter_max=rng.choice((3, 20)),
        leases_max=rng.choice((8, 60, 400)),
        operations_per_adapter_max=rng.choice((2, 8)),
        loads_per_replica_max=rng.choice((1, 2, 4)),
        ticket_wait_ms=rng.choice((300, 1_000, 3_000)),
        operation_ms=rng.choice((250, 1_500, 4_000)),
        lease_ms=rng.choice((300, 2_000)),
        patience_ms=rng.choice((0, 50, 300)),
        retry_first_ms=rng.choice((5, 60)),
        retry_last_ms=rng.choice((60, 1_000)),
    )


def _faults(rng: random.Random) -> Faults:
    def chance(most: float) -> float:
        return rng.uniform(0.01, most) if rng.random() < 0.5 else 0.0

    return Faults(
        load_fails=chance(0.4),
        load_unsure=chance(0.3),
        unload_refused=chance(0.4),
        unload_unsure=chance(0.2),
        pin_fails=chance(0.4),
        fetch_fails=chance(0.3),
        commit_fails=chance(0.3),
        slow=chance(0.2),
        answers_twice=chance(0.3),
        answers_late=chance(0.3),
        snapshot_vanishes=chance(0.3),
        engine_dies=chance(0.1),
        engine_drops=chance(0.3),
        comes_back_strange=chance(0.8),
        listing_old=chance(0.5),
        source_changes=chance(0.4),
        client_leaves=chance(0.3),
    )
