"""A look at a folder of adapter folders: which there are, and whether any has changed. Nothing is
read but names, sizes and times."""

import hashlib
import os
from pathlib import Path

from lorry.artifacts.adapter_config import CONFIG_FILE
from lorry.artifacts.names import check_adapter_name
from lorry.artifacts.remote.site import is_wanted
from lorry.errors import LorryError
from lorry.ids import AdapterName


def look(folder: Path) -> dict[AdapterName, str]:
    """A fingerprint for each folder in `folder` that has a config and weights, by its name. Hidden
    ones (`.tmp-x`) and names that no adapter may have are passed over. Blocks; raises OSError when
    `folder` itself cannot be listed."""
    found = {}
    for entry in os.scandir(folder):
        if entry.name.startswith(".") or not _may_be_named(entry.name):
            continue
        mark = _fingerprint(Path(entry.path))
        if mark is not None:
            found[AdapterName(entry.name)] = mark
    return found


def last_change_s(folder: Path) -> float:
    """When a folder or a file in it was changed last, by the wall clock. Blocks; raises OSError."""
    with os.scandir(folder) as entries:
        return max(folder.stat().st_ctime, *(entry.stat().st_ctime for entry in entries), 0.0)


def _may_be_named(name: str) -> bool:
    try:
        check_adapter_name(name, ())
    except LorryError:
        return False
    return True


def _fingerprint(folder: Path) -> str | None:
    """None for what is no adapter's folder, or not yet."""
    files: dict[str, os.stat_result] = {}
    try:
        for entry in os.scandir(folder):
            if is_wanted(entry.name):
                files[entry.name] = entry.stat()
    except OSError:
        return None
    if CONFIG_FILE not in files or not any(name.endswith(".safetensors") for name in files):
        return None
    digest = hashlib.sha256()
    for name, status in sorted(files.items()):
        facts = (name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        digest.update(repr(facts).encode())
    return digest.hexdigest()
