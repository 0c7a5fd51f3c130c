"""What is to be done: everything the core ever asks for. Frozen values; the shell carries them out
and reports."""

from collections.abc import Mapping
from dataclasses import dataclass

from lorry.adapter_settings import SettingsChange
from lorry.errors import LorryError
from lorry.ids import AdapterName, EngineId, OperationId, ReplicaId, TicketId, VersionId


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring a snapshot of `source` to the disk and judge it. Answer: `Fetched` or `FetchFailed`."""

    operation: OperationId
    name: AdapterName
    source: str
    expected: VersionId | None = None
    """The version it has to be; None when any will do."""
    digest: str | None = None
    """As `LoadAsked.digest`."""


@dataclass(frozen=True, slots=True)
class Load:
    """Have the engine hold a version. Answer: `Loaded` or `LoadFailed`."""

    operation: OperationId
    replica: ReplicaId
    engine_id: EngineId
    version: VersionId
    name: AdapterName
    bytes: int
    """What was reserved for it."""


@dataclass(frozen=True, slots=True)
class Unload:
    """Have the engine give it up. Answer: `Unloaded` or `UnloadFailed`."""

    operation: OperationId
    replica: ReplicaId
    engine_id: EngineId


@dataclass(frozen=True, slots=True)
class SetPin:
    """Have the engine keep it in a slot, or not. Answer: `PinSet` or `PinFailed`."""

    operation: OperationId
    replica: ReplicaId
    engine_id: EngineId
    pinned: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """Write a change of the registry. Answer: `Committed` or `CommitFailed`."""

    operation: OperationId
    action: str
    """register, replace, rollback, unload, retire, pin, unpin, label, settings."""
    name: AdapterName
    version: VersionId | None
    """What the name stands for afterwards; None erases it."""
    source: str
    pinned: bool
    labels: Mapping[str, str] | None
    """None leaves them as they are."""
    settings: SettingsChange | None = None
    """None leaves them as they are."""
    detail: str = ""
    """Why, when it was not somebody's wish."""
    purge: bool = False
    """Of an erased name the versions kept for a rollback leave the disk too."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Run the request on this version of this replica (None: the base model)."""

    ticket: TicketId
    replica: ReplicaId
    engine_id: EngineId | None
    version: VersionId | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """The ticket's one answer is this error."""

    ticket: TicketId
    error: LorryError


@dataclass(frozen=True, slots=True)
class Abort:
    """End a running request with this error; then report `Finished`."""

    ticket: TicketId
    error: LorryError


@dataclass(frozen=True, slots=True)
class BeginOperation:
    """The core has asked itself for an admin call; it ends as all do, with `EndOperation`."""

    operation: OperationId
    kind: str
    name: AdapterName


@dataclass(frozen=True, slots=True)
class EndOperation:
    """An admin call has ended: well when `error` is None."""

    operation: OperationId
    error: LorryError | None


@dataclass(frozen=True, slots=True)
class Purge:
    """Remove a snapshot from the disk: nobody serves it, and its owner asked."""

    version: VersionId


@dataclass(frozen=True, slots=True)
class Note:
    """Tell people what happened and why."""

    kind: str
    name: AdapterName | None
    version: VersionId | None
    text: str


Command = (
    Fetch | Load | Unload | SetPin | Commit | Admit | Refuse | Abort
    | BeginOperation | EndOperation | Purge | Note
)  # fmt: skip
