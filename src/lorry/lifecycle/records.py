"""The core's own memory of adapters, versions, requests and admin calls. Only `world.py` and its
users change these."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lorry.errors import LorryError
from lorry.ids import AdapterName, EngineId, OperationId, ReplicaId, TicketId, VersionId
from lorry.lifecycle import events as ev
from lorry.lifecycle.budget import Budget
from lorry.lifecycle.states import State


@dataclass(slots=True)
class Adapter:
    """A registered name: desired state, as the store has it."""

    name: AdapterName
    spec: ev.VersionSpec
    source: str
    pinned: bool
    closing: bool = False
    """An unload is under way: no new requests."""
    former: frozenset[VersionId] = frozenset()
    """Versions that the name stood for before, or that a failed load brought for it, and that may
    still be in an engine."""
    idle_ms: int | None = None
    """It retires when nobody has used it for so long; None: never."""
    used_ms: int = 0
    """When it was used last; see `retirement.py`."""


@dataclass(slots=True)
class Replica:
    """One engine and the room on it."""

    id: ReplicaId
    budget: Budget
    pins_max: int
    up: bool = False
    holding: dict[VersionId, "Residency"] = field(default_factory=dict)
    """Residencies in a state of `HOLDING`."""
    draining: dict[VersionId, "Residency"] = field(default_factory=dict)
    """Those of them that are DRAINING."""
    pins: set[VersionId] = field(default_factory=set)
    """Versions that the engine may have pinned: from the command to pin until the report that it
    no longer does."""
    strangers: dict[EngineId, OperationId | None] = field(default_factory=dict)
    """What the engine holds that nobody asked for, with the unload that is open; None when the
    engine would not give it up: it takes a place then."""
    leases: int = 0
    """Running requests, those on the base model included."""
    revision: int = 0
    """The fleet's revision when anything on it moved last."""
    lost_revision: int = 0
    """The fleet's revision when it was lost last: listings from before mean another life."""


@dataclass(slots=True)
class Residency:
    """One version on one replica."""

    version: VersionId
    replica: ReplicaId
    bytes: int
    state: State
    revision: int
    """The fleet's revision when the state last changed."""
    engine_id: EngineId | None = None
    open: OperationId | None = None
    """The fetch, load or unload that is under way."""
    pin_open: OperationId | None = None
    engine_pinned: bool | None = False
    """None: a pin or unpin is open or has failed, so nobody knows."""
    unsure: bool = False
    """Nobody knows whether the engine holds it: it admits nobody until it was unloaded or seen."""
    leases: int = 0
    failures: int = 0
    retry_ms: int = 0
    """No fetch, load, pin or unload of it is begun before this, except on an admin's word."""
    error: LorryError | None = None
    """Why it failed last."""
    last_used_ms: int = 0
    drained_ms: int = 0
    evicted: bool = False
    """It drains to make room for another, and not because nothing refers to it."""
    missing: bool = False
    """Its snapshot was not on disk when it was to be loaded: fetch it again first."""
    tried: dict[str, LorryError] = field(default_factory=dict)
    """Sources from which it could not be fetched since that was last tried anew, and why."""
    brought: bool = False
    """Its snapshot has come to the disk while its load was under way."""
    refetched_ms: int | None = None
    """When its snapshot was gone and was fetched again at once, if nothing has shown since then
    that this helps."""


@dataclass(slots=True)
class Ticket:
    """A waiting request."""

    id: TicketId
    name: AdapterName
    version: VersionId | None
    arrived_ms: int
    deadline_ms: int


@dataclass(slots=True)
class Lease:
    """A running request."""

    ticket: TicketId
    name: AdapterName | None
    version: VersionId | None
    replica: ReplicaId
    deadline_ms: int
    aborted: bool = False


class Phase(StrEnum):
    """How far an admin call is; the words are shown to people."""

    QUEUED = "waiting for another operation on this adapter"
    FETCHING = "fetching"
    ROOM = "waiting for room"
    LOADING = "loading"
    PINNING = "pinning"
    DRAINING = "draining"
    REMOVING = "removing"
    COMMITTING = "writing the registry"


Request = (
    ev.LoadAsked | ev.UnloadAsked | ev.PinAsked | ev.SettingsAsked | ev.PrefetchAsked
)  # fmt: skip


@dataclass(slots=True)
class Asked:
    """An admin call under way."""

    request: Request
    began_ms: int
    deadline_ms: int
    phase: Phase = Phase.QUEUED
    spec: ev.VersionSpec | None = None
    """The version it brings or takes, once known."""
    pinned: bool = False
    drain_due_ms: int = 0
    former: frozenset[VersionId] = frozenset()
    """What an unload has to wait for beside `spec`: see `Adapter.former`."""
    open: OperationId | None = None
    """Its fetch or commit that is under way."""
    fetched_from: str | None = None
    """As `Fetched.source`."""

    @property
    def id(self) -> OperationId:
        """The id by which the caller knows it."""
        return self.request.operation

    @property
    def name(self) -> AdapterName:
        """The adapter it is about."""
        return self.request.name

    @property
    def source(self) -> str:
        """Where its version comes from; "" when it brings none."""
        asked = self.request.source if isinstance(self.request, ev.LoadAsked) else ""
        return self.fetched_from or asked

    @property
    def drains_first(self) -> bool:
        """Whether it said that the old version may go before the new one is in."""
        request = self.request
        return isinstance(request, ev.LoadAsked) and request.strategy is ev.Strategy.DRAIN_FIRST

    @property
    def wants_resident(self) -> bool:
        """Whether it waits for its version to be in an engine."""
        return self.phase in (Phase.ROOM, Phase.LOADING)

    @property
    def versions(self) -> frozenset[VersionId]:
        """All it is about."""
        return self.former if self.spec is None else self.former | {self.spec.version}

    @property
    def holds(self) -> bool:
        """Whether its version must neither be evicted nor retired now."""
        return self.phase in (Phase.ROOM, Phase.LOADING, Phase.PINNING, Phase.COMMITTING) and (
            not isinstance(self.request, ev.UnloadAsked)
        )


@dataclass(frozen=True, slots=True)
class Opened:
    """A command of which no report has come yet."""

    kind: str
    """fetch, load, unload, stranger (the unload of one), pin or commit."""
    asked: OperationId | None = None
    """The admin call that it belongs to."""
    residency: tuple[VersionId, ReplicaId] | None = None
    stranger: tuple[ReplicaId, EngineId] | None = None
    pinned: bool = False
    """What a pin command asked for."""
    source: str = ""
    """Where a lost snapshot is fetched from."""


@dataclass(slots=True)
class Counters:
    """Ever-growing sums, for metrics and tests."""

    hits: int = 0
    """Requests admitted on arrival."""
    misses: int = 0
    """Requests that had to wait for their adapter."""
    loads: int = 0
    load_failures: int = 0
    unloads: int = 0
    unload_failures: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    """By reason."""
    refusals: dict[str, int] = field(default_factory=dict)
    """By error code."""
    stale_reports: int = 0
    """Late or doubled answers that were dropped."""
    engine_losses: int = 0


@dataclass(frozen=True, slots=True)
class FleetStatistics:
    """One picture of everything that counts."""

    registered: int
    waiting: int
    running: int
    operations: int
    resident: Mapping[ReplicaId, int]
    bytes_reserved: Mapping[ReplicaId, int]
    bytes_max: Mapping[ReplicaId, int]
    versions_max: Mapping[ReplicaId, int]
    waiting_by_name: Mapping[AdapterName, int]
    running_by_name: Mapping[AdapterName, int]
    counters: Counters
