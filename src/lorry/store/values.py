"""What every store checks before it writes, and how values become rows and come back."""

import dataclasses
import json
import math
from typing import Any

from lorry.artifacts.snapshot import Manifest
from lorry.errors import StorageFailed
from lorry.ids import VersionId
from lorry.store.store import AdapterRecord, AuditEntry

PREVIOUS_MAX = 8
"""Versions remembered for rollback per name, as the contract says."""

ACTIONS = (
    *("register", "replace", "rollback", "unload", "pin", "unpin", "label"),
    *("settings", "retire"),
)
"""What an audit row may say."""

_TUPLES = ("target_modules", "layers")


def trimmed(record: AdapterRecord) -> AdapterRecord:
    """The record with no more previous versions than are remembered."""
    previous = tuple(record.previous[:PREVIOUS_MAX])
    return dataclasses.replace(
        record,
        labels=dict(record.labels),
        previous=previous,
        previous_sources={v: s for v, s in record.previous_sources.items() if v in previous},
    )


def check_storable(record: AdapterRecord | None, audit: AuditEntry) -> None:
    """Raise `StorageFailed` for what no store may hold, before anything is written."""
    faults = [] if record is None else _record_faults(record)
    if audit.action not in ACTIONS:
        faults.append(f"the action {audit.action!r} is none of {', '.join(ACTIONS)}")
    if not audit.name:
        faults.append("the audit row has no adapter name")
    if record is not None and record.name != audit.name:
        faults.append(f"the record of {record.name!r} comes with an audit row of {audit.name!r}")
    if not math.isfinite(audit.at_s):
        faults.append(f"the time {audit.at_s} is not a number of seconds")
    if faults:
        raise StorageFailed(f"The change cannot be stored: {'; '.join(faults)}.")


def _record_faults(record: AdapterRecord) -> list[str]:
    manifest = record.manifest
    faults = []
    if not record.name:
        faults.append("the adapter has no name")
    if manifest.rank < 1 or manifest.bytes < 0 or manifest.host_bytes < 0:
        faults.append("the manifest has a rank below 1 or a negative size")
    if not is_version(manifest.version):
        faults.append(f"{manifest.version!r} is not a version of 64 hex digits")
    if not all(is_version(version) for version in record.previous):
        faults.append("a previous version does not have 64 hex digits")
    return faults


def is_version(text: str) -> bool:
    """64 lower-case hex digits."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def manifest_to_json(manifest: Manifest) -> str:
    """All fields, with sorted keys."""
    return json.dumps(dataclasses.asdict(manifest), sort_keys=True)


def manifest_from_json(text: str) -> Manifest:
    """Raises ValueError or TypeError when the text was not written by `manifest_to_json`."""
    fields: dict[str, Any] = json.loads(text)
    fields.update({key: tuple(fields[key]) for key in _TUPLES})
    return Manifest(**fields)


def previous_from_json(text: str) -> tuple[VersionId, ...]:
    """The remembered versions of a record."""
    return tuple(VersionId(version) for version in json.loads(text))
