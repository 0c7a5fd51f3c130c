"""What happened: everything the core is ever told. Frozen values; a report repeats its command's
operation id."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lorry.adapter_settings import SettingsChange
from lorry.errors import LorryError
from lorry.ids import AdapterName, EngineId, OperationId, ReplicaId, TicketId, VersionId
from lorry.lifecycle.settings import ReplicaLimits


class Mode(StrEnum):
    """What a load may do to a name that is taken."""

    CREATE = "create"
    REPLACE = "replace"
    UPSERT = "upsert"


class Strategy(StrEnum):
    """How a replace finds room."""

    BESIDE = "beside"
    """Load the new version beside the old one: nothing is given up before the new one is in."""
    DRAIN_FIRST = "drain-first"
    """The old version may be drained and unloaded to make the room; requests wait meanwhile."""


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """A version as far as the core cares."""

    version: VersionId
    bytes: int


# Requests


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request wants tokens from `name` (None: the base model), of exactly `version` when that is
    given."""

    ticket: TicketId
    name: AdapterName | None
    version: VersionId | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A running request ended."""

    ticket: TicketId


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client of a waiting or running request went away."""

    ticket: TicketId


# Admin calls


@dataclass(frozen=True, slots=True)
class LoadAsked:
    """Serve the adapter at `source` as `name`."""

    operation: OperationId
    name: AdapterName
    source: str
    mode: Mode = Mode.UPSERT
    if_match: VersionId | None = None
    pinned: bool | None = None
    """None: as it is, or not pinned when new."""
    labels: Mapping[str, str] | None = None
    settings: SettingsChange | None = None
    """None: as they are."""
    load: bool = True
    """False: register only; the first request loads it."""
    strategy: Strategy = Strategy.BESIDE
    known: VersionSpec | None = None
    """Set for a rollback: the snapshot is on disk already."""
    digest: str | None = None
    """What the content has to be; whoever fetches it understands the text."""


@dataclass(frozen=True, slots=True)
class UnloadAsked:
    """Stop serving `name`: drain, abort what is left after `drain_ms`, remove it from every engine,
    forget it."""

    operation: OperationId
    name: AdapterName
    drain_ms: int
    purge: bool = False
    if_match: VersionId | None = None
    idle_ms: int | None = None
    """Set when the core itself asks, since nobody has used the adapter for so long."""


@dataclass(frozen=True, slots=True)
class PinAsked:
    """Keep `name` resident and in a slot, or stop keeping it; the rest as in `SettingsAsked`, all
    written at once."""

    operation: OperationId
    name: AdapterName
    pinned: bool
    labels: Mapping[str, str] | None = None
    settings: SettingsChange | None = None
    if_match: VersionId | None = None


@dataclass(frozen=True, slots=True)
class SettingsAsked:
    """Overwrite the labels of `name`, or change its settings; None leaves them as they are."""

    operation: OperationId
    name: AdapterName
    labels: Mapping[str, str] | None = None
    settings: SettingsChange | None = None
    if_match: VersionId | None = None


@dataclass(frozen=True, slots=True)
class PrefetchAsked:
    """Make `name` resident before anybody asks for it."""

    operation: OperationId
    name: AdapterName


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Give an admin call up, as long as it has changed nothing."""

    operation: OperationId


# The world at large


@dataclass(frozen=True, slots=True)
class Restored:
    """The registry as the store has it; the first event of a life."""

    adapters: tuple[tuple[AdapterName, VersionSpec, str, bool], ...]
    """(name, version, source, pinned)."""
    idle_ms: Mapping[AdapterName, int] = field(default_factory=dict)
    """Of those that retire when nobody uses them; their time begins now."""


@dataclass(frozen=True, slots=True)
class ReplicaAdded:
    """An engine that will come up."""

    replica: ReplicaId
    limits: ReplicaLimits


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """A replica said what it holds. `as_of` is the fleet's revision when it was asked: whatever
    moved later is not judged by this answer."""

    replica: ReplicaId
    residents: frozenset[EngineId]
    as_of: int


@dataclass(frozen=True, slots=True)
class EngineLost:
    """A replica went away and holds nothing."""

    replica: ReplicaId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TimerDue:
    """Time has passed; look at the deadlines."""


# Reports


@dataclass(frozen=True, slots=True)
class Fetched:
    """A snapshot is on disk and judged."""

    operation: OperationId
    spec: VersionSpec
    source: str | None = None
    """Where the same can be fetched again, when that is not what was asked for: a branch became a
    commit, a signed address lost its signature."""


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """It is not."""

    operation: OperationId
    error: LorryError


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine holds the version."""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The engine does not hold it; or, when `unsure`, nobody knows."""

    operation: OperationId
    error: LorryError
    missing: bool = False
    """The snapshot was not on disk."""
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The engine does not hold it any more. `existed` False: it did not before either, which is as
    good."""

    operation: OperationId
    existed: bool = True


@dataclass(frozen=True, slots=True)
class UnloadFailed:
    """The engine would not give it up; or, when `unsure`, nobody knows."""

    operation: OperationId
    error: LorryError
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class PinSet:
    """The engine pins or unpins as it was told."""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class PinFailed:
    """It does not."""

    operation: OperationId
    error: LorryError


@dataclass(frozen=True, slots=True)
class Committed:
    """The store has the change."""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The store does not have it."""

    operation: OperationId
    error: LorryError


Event = (
    Arrived | Finished | Cancelled
    | LoadAsked | UnloadAsked | PinAsked | SettingsAsked | PrefetchAsked | CancelAsked
    | Restored | ReplicaAdded | EngineSeen | EngineLost | TimerDue
    | Fetched | FetchFailed | Loaded | LoadFailed | Unloaded | UnloadFailed
    | PinSet | PinFailed | Committed | CommitFailed
)  # fmt: skip
