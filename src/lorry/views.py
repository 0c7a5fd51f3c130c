"""What the supervisor tells the server: immutable pictures of adapters and operations at one
moment."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lorry.adapter_settings import NO_SETTINGS, AdapterSettings
from lorry.artifacts.snapshot import Manifest
from lorry.engine import EngineHealth
from lorry.errors import LorryError
from lorry.ids import AdapterName, EngineId, OperationId, ReplicaId, VersionId


@dataclass(frozen=True, slots=True)
class ResidencyView:
    """One version on one replica, as the replica last reported it."""

    replica: ReplicaId
    state: str
    """Lower-case name of the state in lifecycle/states.py, such as "resident"."""
    tier: str
    """"absent", "disk", "host" or "slot"."""
    slot: int | None
    engine_id: EngineId | None
    leases: int
    reason: str
    """Why it failed last, or ""."""


@dataclass(frozen=True, slots=True)
class AdapterView:
    """One registered adapter."""

    name: AdapterName
    manifest: Manifest
    source: str
    pinned: bool
    labels: Mapping[str, str]
    created_s: float
    updated_s: float
    previous: tuple[VersionId, ...]
    unloading: bool
    """It takes no new requests: `AdapterUnloading`."""
    waiting: int
    """Tickets."""
    residency: tuple[ResidencyView, ...]
    settings: AdapterSettings = NO_SETTINGS
    waits_for: str = ""
    """Why its requests cannot run at this moment, for people; "" when they can."""

    @property
    def version(self) -> VersionId:
        """The version that new requests get."""
        return self.manifest.version


@dataclass(frozen=True, slots=True)
class ResidentView:
    """One version that engines hold, also one that no name stands for any more."""

    version: VersionId
    names: tuple[AdapterName, ...]
    """Adapters that serve it now; none: it is on its way out."""
    rank: int | None
    """None: its manifest is forgotten already."""
    bytes: int
    """Budget reserved for one copy."""
    copies: int
    """Engines that hold it."""
    leases: int
    """Running requests, of all copies."""


class OperationStatus(StrEnum):
    """How far a long call is."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class OperationView:
    """A long call of the admin API."""

    id: OperationId
    kind: str
    """load, unload, rollback, prefetch, pin, unpin, label, settings; retire: an unload that the
    core asked for itself."""
    name: AdapterName
    version: VersionId | None
    """The version it brings or takes, once known."""
    status: OperationStatus
    phase: str
    """What it is doing now, for people: "fetching", "waiting for room", "loading", "draining", ...
    """
    error: LorryError | None
    began_s: float
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class ChangeEvent:
    """Something that happened to an adapter, with a reason a person can read: for /v1/events and
    the log."""

    sequence: int
    at_s: float
    kind: str
    """restored, registered, replaced, loaded, waiting, evicted, draining, unloaded, failed, pinned,
    unpinned, settings, engine_lost, engine_up."""
    name: AdapterName | None
    version: VersionId | None
    text: str


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One engine, in numbers."""

    id: ReplicaId
    up: bool
    reason: str
    """Why it is not up, or ""."""
    resident: int
    """Versions in host memory."""
    versions_max: int
    bytes_reserved: int
    bytes_max: int
    running: int
    """Leases."""
    health: EngineHealth


@dataclass(frozen=True, slots=True)
class Statistics:
    """Everything that counts, at one moment. Sums grow for the server's life."""

    registered: int
    waiting: int
    """Tickets."""
    running: int
    """Leases."""
    operations: int
    """Admin calls under way."""
    waiting_by_name: Mapping[AdapterName, int]
    running_by_name: Mapping[AdapterName, int]
    replicas: tuple[ReplicaView, ...]
    host_hits: int
    """Requests whose adapter was in host memory when they came."""
    host_misses: int
    """Requests that had to wait for their adapter."""
    loads: int
    load_failures: int
    load_seconds: tuple[float, ...]
    """Times of the last loads, newest last, at most 1,000; `loads` counts them all."""
    unloads: int
    unload_failures: int
    evictions: Mapping[str, int]
    """By reason: "room" (an idle version made room), "fairness" (one was drained for it)."""
    refusals: Mapping[str, int]
    """By error code."""
    stale_reports: int
    engine_losses: int
    disk_bytes: int
    disk_bytes_max: int | None
    disk_versions: int
    disk_evictions: int
