"""Adapters in memory: no name on a disk, nothing left behind."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from lorry.artifacts import memory
from lorry.artifacts.cache import DiskCache
from lorry.artifacts.memory import (
    LINKS_PREFIX,
    MemoryFile,
    MemoryFolder,
    remove_abandoned,
    snapshot_in_memory,
)
from lorry.errors import AdapterInvalid, RequestAborted, RequestInvalid
from tests.fixtures.adapters import TINY_BASE, AdapterFiles, good_adapter
from tests.fixtures.uploads import folder_files

RANK = 16


def folder_of(files: AdapterFiles) -> MemoryFolder:
    folder = MemoryFolder("the request")
    for name, content in folder_files(files).items():
        folder.create(name).write(content)
    return folder


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_snapshot_in_memory_is_the_same_bytes_as_one_on_the_disk(tmp_path: Path) -> None:
    before = descriptors()
    folder = folder_of(good_adapter(1))
    made = snapshot_in_memory("x", folder, TINY_BASE, RANK)
    folder.close()
    source = good_adapter(1).write(tmp_path / "source")
    on_disk = DiskCache(tmp_path / "cache", None).snapshot("x", source, TINY_BASE, RANK)
    assert made.snapshot.manifest == on_disk.manifest
    for path in on_disk.path.iterdir():
        linked = made.snapshot.path / path.name
        assert str(linked.readlink().readlink()).startswith("/memfd:")
        assert linked.read_bytes() == path.read_bytes()
    adopting = DiskCache(tmp_path / "other", None)
    kept = adopting.adopt("x", made.snapshot)
    made.close()
    made.close()
    assert not made.snapshot.path.exists()
    for path in on_disk.path.iterdir():
        assert (kept.path / path.name).read_bytes() == path.read_bytes()
    assert descriptors() == before


def test_a_bad_adapter_leaves_nothing() -> None:
    before, links = descriptors(), set(Path("/dev/shm").glob(f"{LINKS_PREFIX}*"))
    files = good_adapter(1)
    files.config["r"] = 5
    folder = folder_of(files)
    with pytest.raises(AdapterInvalid):
        snapshot_in_memory("x", folder, TINY_BASE, RANK)
    sound = folder_of(good_adapter(1))
    with pytest.raises(RequestAborted):
        snapshot_in_memory("x", sound, TINY_BASE, RANK, lambda: True)
    for one in (folder, folder, sound):
        one.close()
    assert set(Path("/dev/shm").glob(f"{LINKS_PREFIX}*")) <= links
    assert descriptors() == before


def test_a_part_comes_once() -> None:
    folder = MemoryFolder("the request")
    folder.create("a").write(b"1")
    with pytest.raises(RequestInvalid, match="twice"):
        folder.create("a")
    assert (folder.size, folder.names(), folder.open("b")) == (1, {"a"}, None)
    folder.close()


def test_a_reader_keeps_what_it_has_open() -> None:
    file = MemoryFile("a")
    file.write(b"weights")
    reader = file.open()
    file.close()
    assert reader.read(0, 100) == b"weights"
    reader.close()


def test_links_of_killed_processes_are_removed_and_those_of_living_ones_kept(
    tmp_path: Path,
) -> None:
    killed, locked = (tmp_path / f"{LINKS_PREFIX}{name}" for name in "ab")
    for path in (killed, locked):
        path.mkdir()
        (path / "adapter_model.safetensors").symlink_to("/proc/1/fd/99")
    lock = os.open(locked, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (tmp_path / "other").mkdir()
    assert remove_abandoned(tmp_path) == 1
    assert sorted(tmp_path.iterdir()) == sorted([locked, tmp_path / "other"])
    os.close(lock)


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_links_that_a_starting_server_took_for_abandoned_are_made_anew(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = os if moment == "open" else fcntl
    real, removed = getattr(module, moment), []

    def late(*arguments: Any, **named: Any) -> Any:
        if not removed:
            removed.append(0)
            removed[0] = remove_abandoned(tmp_path)
        return real(*arguments, **named)

    monkeypatch.setattr(memory, "_place", lambda: tmp_path)
    monkeypatch.setattr(module, moment, late)
    made = snapshot_in_memory("x", folder_of(good_adapter(1)), TINY_BASE, RANK)
    assert removed == [1]
    assert list(tmp_path.iterdir()) == [made.snapshot.path]
    assert len(list(made.snapshot.path.iterdir())) == 2
    assert remove_abandoned(tmp_path) == 0
    made.close()
    assert list(tmp_path.iterdir()) == []
