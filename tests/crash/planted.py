"""Bugs that the crash tests have to find, each put into the code of a child."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lorry.artifacts import shelf
from lorry.artifacts.cache import DiskCache
from lorry.lifecycle import commands as cm
from lorry.store.store import AdapterRecord
from lorry.supervisor.registry import Registry
from lorry.supervisor.shell import Shell


def answered_before_it_is_written() -> None:
    """The registry says "written" and writes a moment later."""
    write = Registry.write

    def soon(*arguments: Any) -> None:
        threading.Timer(0.2, partial(write, *arguments)).start()

    Registry.write = soon  # type: ignore[method-assign]


def erased_before_the_registry_forgets() -> None:
    """The files go first; a kill before the commit leaves a name without them."""
    commit = Shell._commit

    async def erasing(shell: Shell, command: cm.Commit) -> None:
        if command.version is None:
            await shell._purge(shell.registry.records[command.name].manifest.version)
        await commit(shell, command)

    Shell._commit = erasing  # type: ignore[method-assign]


def written_in_place() -> None:
    """Snapshots are written where they belong, without a temporary folder."""

    def in_place(cache: DiskCache, adapter: str, manifest: Any, fill: Any) -> None:
        path = cache._shelf.path(manifest.version)
        path.mkdir(exist_ok=True)
        fill(path)
        cache._shelf.add(manifest.version, manifest.bytes)

    DiskCache._write = in_place  # type: ignore[method-assign]


def left_overs_stay() -> None:
    """No start removes what a killed process left."""
    shelf._remove_if_abandoned = lambda path: None


def versions_stay() -> None:
    """No start removes what an unload with purge was about to remove."""
    Registry._remove_unwanted = lambda registry, cache: None  # type: ignore[method-assign]


def pins_are_forgotten() -> None:
    """The registry is not told of pins."""
    change = Registry.change

    def unpinned(registry: Registry, command: cm.Commit, at_s: float) -> AdapterRecord | None:
        record = change(registry, command, at_s)
        if record is not None:
            object.__setattr__(record, "pinned", False)
        return record

    Registry.change = unpinned  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Plant:
    """A bug, and where it has to show."""

    put_in: Callable[[], None]
    operation: str
    step: str
    """A part of the words of a step at which a kill shows it."""


PLANTS = {
    "answered before it is written": Plant(answered_before_it_is_written, "replace", "answer"),
    "erased before the registry forgets": Plant(
        erased_before_the_registry_forgets, "unload of an upload", "before the commit"
    ),
    "snapshots are written in place": Plant(written_in_place, "load", "part of the weights"),
    "left-overs stay": Plant(left_overs_stay, "upload of files", "fsync cache"),
    "purged versions stay": Plant(versions_stay, "unload with purge", "rename"),
    "pins are forgotten": Plant(pins_are_forgotten, "pin and label", "answer"),
}
"""By name."""
