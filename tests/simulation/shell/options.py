"""What a world of level two is like: every probability, size and deadline drawn from the seed.

Each fault is switched off in half of the worlds, as in level one, so that a fault which ends
everything early does not hide what lies behind it in every run.
"""

import random
from dataclasses import dataclass, fields, replace

from lorry.engines.fake_script import FakeSettings
from lorry.lifecycle.settings import FleetLimits
from lorry.server.settings import ServerSettings
from lorry.supervisor.settings import SupervisorSettings

BASE = "base"
"""Name of the base model."""

VOCABULARY = 512
"""Tokens of the pretended base and of the tokenizer."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities, per call unless said otherwise."""

    engine_slow: float = 0.0
    engine_stuck: float = 0.0
    """It never answers: the effect is never, done already, or comes after the caller gave up."""
    engine_rejects: float = 0.0
    engine_foreign: float = 0.0
    """It raises what is none of our errors."""
    engine_unsure: float = 0.0
    """It says itself that it does not know how the call ended; done or not, by a coin."""
    engine_dies: float = 0.0
    """Before or after the effect; in a stream, before a chunk."""
    engine_lies: float = 0.0
    """It does the work and says that it refused; or lists what it held a while ago."""
    engine_says_false: float = 0.0
    engine_forgets: float = 0.0
    """Per second: a resident goes without a word."""
    comes_back_strange: float = 0.0
    """Per return of an engine: it holds something already."""
    stream_stuck: float = 0.0
    """Per chunk."""
    stream_fails: float = 0.0
    """Per chunk: any exception, or an end without an end."""
    close_fails: float = 0.0
    """Per close of a stream, or of an engine: it raises, or never returns."""
    disk_slow: float = 0.0
    disk_crawls: float = 0.0
    """Slower than every deadline."""
    disk_fails: float = 0.0
    """Per write that is to be made durable, in the cache's folder."""
    store_fails: float = 0.0
    store_fails_done: float = 0.0
    """The change was written, and the store says that it was not."""
    snapshot_vanishes: float = 0.0
    """Per second."""
    client_leaves: float = 0.0
    client_slow: float = 0.0
    clock_jumps: float = 0.0
    """Per look at the wall clock: some days back or forth."""


@dataclass(frozen=True, slots=True)
class Options:
    """One world. Times in seconds."""

    seed: int
    replicas: int
    engine: FakeSettings
    limits: FleetLimits
    supervisor: SupervisorSettings
    server: ServerSettings
    faults: Faults
    names: int
    folders: int
    """Adapters on the disk that loads name as their source."""
    storms: tuple[float, ...]
    """How long each life of the server has faults and traffic."""
    ends: tuple[str, ...]
    """How each of them ends: "stop", "kill", or "calm" for the last."""
    calls_s: float
    """Between admin calls, on average."""
    requests_s: float
    """Between requests for tokens, on average."""
    tokens_max: int

    @property
    def calm(self) -> "Options":
        """The same world without faults."""
        return replace(self, faults=Faults())

    def __str__(self) -> str:
        """One line for each group of numbers."""
        faults = {f.name: getattr(self.faults, f.name) for f in fields(Faults)}
        on = ", ".join(f"{name}={value:.3f}" for name, value in faults.items() if value)
        lives = ", ".join(f"{s:.0f} s {end}" for s, end in zip(self.storms, self.ends, strict=True))
        return (
            f"seed {self.seed}: {self.names} names, {self.folders} folders, {self.replicas} "
            f"replicas, lives {lives}; a call each {self.calls_s} s, a request each "
            f"{self.requests_s} s of {self.tokens_max} tokens\n"
            f"  faults: {on or 'none'}\n  {self.engine}\n  {self.limits}\n  {self.supervisor}\n"
            f"  {self.server}"
        )


MOST = {
    "engine_slow": 0.3,
    "engine_stuck": 0.1,
    "engine_rejects": 0.2,
    "engine_foreign": 0.1,
    "engine_unsure": 0.2,
    "engine_dies": 0.05,
    "engine_lies": 0.05,
    "engine_says_false": 0.5,
    "engine_forgets": 0.1,
    "comes_back_strange": 0.5,
    "stream_stuck": 0.05,
    "stream_fails": 0.05,
    "close_fails": 0.2,
    "disk_slow": 0.4,
    "disk_crawls": 0.03,
    "disk_fails": 0.05,
    "store_fails": 0.2,
    "store_fails_done": 0.1,
    "snapshot_vanishes": 0.1,
    "client_leaves": 0.3,
    "client_slow": 0.3,
    "clock_jumps": 0.5,
}
"""The largest probability of each fault."""


def draw(seed: int) -> Options:
    """The world of a seed."""
    rng = random.Random(seed)
    lives = rng.choice((1, 2, 2, 3))
    ends = (*(rng.choice(("stop", "kill", "kill")) for _ in range(lives - 1)), "calm")
    supervisor = _supervisor(rng)
    limits = _limits(rng, supervisor.load_timeout_s)
    return Options(
        seed=seed,
        replicas=rng.choice((1, 1, 2, 3)),
        engine=_engine(rng),
        limits=limits,
        supervisor=supervisor,
        server=ServerSettings(
            served_model_names=(BASE,),
            request_timeout_s=limits.lease_ms / 1000 * rng.choice((1, 4)),
            heartbeat_s=rng.choice((2.0, 15.0)),
            drain_timeout_s=rng.choice((1.0, 10.0)),
        ),
        faults=_faults(rng),
        names=rng.randint(1, 6),
        folders=rng.randint(2, 6),
        storms=tuple(rng.uniform(2.0, 20.0) / lives for _ in range(lives)),
        ends=ends,
        calls_s=rng.choice((0.3, 1.0, 2.0)),
        requests_s=rng.choice((0.2, 0.5, 2.0)),
        tokens_max=rng.choice((3, 8)),
    )


def _engine(rng: random.Random) -> FakeSettings:
    host = rng.choice((2, 2, 3, 5))
    return FakeSettings(
        max_loras=rng.randint(2, 4),
        max_cpu_loras=host,
        host_cache_bytes=rng.choice((1 << 30, 4 * 66_624 + 1_000)),
        vocab_size=VOCABULARY,
        layers=1,
        hidden_size=16,
        max_model_len=256,
        token_delay_s=rng.choice((0.0, 0.05, 0.5)),
        check_paths=True,
    )


def _supervisor(rng: random.Random) -> SupervisorSettings:
    return SupervisorSettings(
        drain_timeout_s=rng.choice((0.0, 2.0, 10.0)),
        load_timeout_s=rng.choice((3.0, 10.0)),
        command_timeout_s=rng.choice((1.0, 5.0)),
        reconcile_s=rng.choice((1.0, 5.0)),
        start_timeout_s=30.0,
        shutdown_s=rng.choice((0.5, 5.0)),
        operations_kept=rng.choice((8, 1024)),
    )


def _limits(rng: random.Random, load_timeout_s: float) -> FleetLimits:
    return FleetLimits(
        tickets_max=rng.choice((4, 4096)),
        tickets_per_adapter_max=rng.choice((2, 1024)),
        operations_per_adapter_max=rng.choice((2, 64)),
        loads_per_replica_max=rng.choice((1, 4)),
        ticket_wait_ms=rng.choice((2_000, 15_000)),
        operation_ms=round(load_timeout_s * 1000) * rng.choice((1, 3)),
        lease_ms=rng.choice((5_000, 30_000)),
        patience_ms=rng.choice((100, 1_000)),
        retry_last_ms=rng.choice((1_000, 8_000)),
    )


def _faults(rng: random.Random) -> Faults:
    if rng.random() < 0.1:
        return Faults()
    on = {name: rng.random() < 0.5 for name in MOST}
    return Faults(**{name: rng.uniform(0, most) for name, most in MOST.items() if on[name]})
