"""The disk cache: complete snapshots or nothing, within its limit, whatever happens."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorry.artifacts import cache as cache_module
from lorry.artifacts.cache import DiskCache
from lorry.artifacts.snapshot import Snapshot
from lorry.errors import (
    AdapterInvalid,
    CapacityExhausted,
    Forbidden,
    RequestAborted,
    StorageFailed,
)
from lorry.ids import VersionId
from tests.fixtures.adapters import TINY_BASE, good_adapter

WEIGHTS = "adapter_model.safetensors"


def source(tmp_path: Path, seed: int = 1) -> Path:
    """A good adapter's folder."""
    return good_adapter(seed).write(tmp_path / "sources" / str(seed))


def snapshot(cache: DiskCache, folder: Path, name: str = "pirate") -> Snapshot:
    """The snapshot of a folder."""
    return cache.snapshot(name, folder, TINY_BASE, 8)


def size_of_one(tmp_path: Path) -> int:
    """All adapters of `source` take the same room."""
    return DiskCache(tmp_path / "scale", None).check("x", source(tmp_path), TINY_BASE, 8).bytes


def test_a_snapshot_outlives_its_source(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", None)
    folder = source(tmp_path)
    taken = snapshot(cache, folder)
    before = (taken.path / WEIGHTS).read_bytes()
    for path in folder.iterdir():
        path.unlink()
    assert (taken.path / WEIGHTS).read_bytes() == before
    assert cache.get(taken.manifest.version, taken.manifest) == taken


def test_the_same_content_is_kept_once(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", None)
    first = snapshot(cache, source(tmp_path))
    assert snapshot(cache, source(tmp_path), "other") == first
    assert cache.statistics().count == 1


def test_a_check_keeps_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", None)
    manifest = cache.check("pirate", source(tmp_path), TINY_BASE, 8)
    assert list(cache.root.iterdir()) == []
    assert snapshot(cache, source(tmp_path)).manifest == manifest


def test_sixteen_threads_with_one_content_make_one_copy(tmp_path: Path) -> None:
    one = size_of_one(tmp_path)
    cache = DiskCache(tmp_path / "cache", one)
    folder = source(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        taken = list(pool.map(lambda _: snapshot(cache, folder), range(16)))
    assert len(set(taken)) == 1
    assert cache.statistics() == cache_module.CacheStatistics(one, 1, 0, one, 0)
    assert [path.name for path in cache.root.iterdir()] == [taken[0].manifest.version]


def test_many_threads_with_many_contents_all_succeed(tmp_path: Path) -> None:
    folders = [source(tmp_path, seed) for seed in range(8)]
    cache = DiskCache(tmp_path / "cache", None)
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda folder: snapshot(cache, folder), folders * 2))
    assert len({each.manifest.version for each in taken}) == cache.statistics().count == 8


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    cache = DiskCache(tmp_path / "cache", None)
    for _ in range(2):
        seen.clear()
        cache.snapshot(
            "pirate", source(tmp_path), TINY_BASE, 8, progress=lambda *step: seen.append(step)
        )
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("after", [0, 5, 40])
def test_promise_4_a_cancelled_snapshot_leaves_nothing(after: int, tmp_path: Path) -> None:
    calls = iter(range(1000))
    cache = DiskCache(tmp_path / "cache", None)
    with pytest.raises(RequestAborted, match="'pirate'"):
        cache.snapshot(
            "pirate", source(tmp_path), TINY_BASE, 8, cancelled=lambda: next(calls) >= after
        )
    assert list(cache.root.iterdir()) == []
    assert cache.statistics().reserved_bytes == 0


def test_promise_4_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path / "cache", None)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageFailed, match=r"No space left on device.*free space"):
            snapshot(cache, source(tmp_path))
    assert list(cache.root.iterdir()) == []
    assert snapshot(cache, source(tmp_path))


def test_a_root_that_cannot_be_a_folder_is_a_storage_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFailed, match="disk cache"):
        DiskCache(tmp_path / "file", None)


class TestLimit:
    """Promises 4 and 6 on disk."""

    def test_the_least_recently_used_goes_first(self, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", 2 * size_of_one(tmp_path))
        a, b = (snapshot(cache, source(tmp_path, seed)) for seed in (1, 2))
        cache.release(a.manifest.version)
        cache.release(b.manifest.version)
        assert cache.open(a.manifest.version) == a.path
        c = snapshot(cache, source(tmp_path, 3))
        assert cache.open(b.manifest.version) is None
        assert cache.open(a.manifest.version) and cache.open(c.manifest.version)
        assert cache.statistics().evictions == 1

    def test_promise_6_a_protected_snapshot_is_never_evicted(self, tmp_path: Path) -> None:
        one = size_of_one(tmp_path)
        cache = DiskCache(tmp_path / "cache", one)
        a = snapshot(cache, source(tmp_path, 1))
        cache.protect({a.manifest.version})
        with pytest.raises(CapacityExhausted, match=rf"'pirate' needs {one} bytes.*{one} bytes"):
            snapshot(cache, source(tmp_path, 2))
        assert cache.get(a.manifest.version, a.manifest) == a
        assert cache.statistics().reserved_bytes == 0
        cache.protect(set())
        assert snapshot(cache, source(tmp_path, 2))
        assert cache.open(a.manifest.version) is None

    def test_promise_6_a_fresh_snapshot_is_kept_until_it_is_released(self, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", size_of_one(tmp_path))
        a = snapshot(cache, source(tmp_path, 1))
        cache.protect(set())
        with pytest.raises(CapacityExhausted):
            snapshot(cache, source(tmp_path, 2))
        cache.release(a.manifest.version)
        assert snapshot(cache, source(tmp_path, 2))

    def test_a_fresh_snapshot_that_nobody_claims_is_given_up_at_last(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = DiskCache(tmp_path / "cache", size_of_one(tmp_path))
        snapshot(cache, source(tmp_path, 1))
        monkeypatch.setattr(cache_module, "FRESH_SECONDS_MAX", -1.0)
        assert snapshot(cache, source(tmp_path, 2))

    def test_promise_4_what_can_never_fit_evicts_nobody(self, tmp_path: Path) -> None:
        one = size_of_one(tmp_path)
        cache = DiskCache(tmp_path / "cache", one)
        a = snapshot(cache, source(tmp_path, 1))
        cache.release(a.manifest.version)
        large = good_adapter(rank=8).write(tmp_path / "large")
        with pytest.raises(CapacityExhausted):
            snapshot(cache, large)
        assert cache.open(a.manifest.version) == a.path

    def test_promise_9_a_bad_adapter_evicts_nobody(self, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", size_of_one(tmp_path))
        a = snapshot(cache, source(tmp_path, 1))
        cache.release(a.manifest.version)
        bad = source(tmp_path, 2)
        (bad / "adapter_config.json").write_text("{}")
        with pytest.raises(AdapterInvalid):
            snapshot(cache, bad)
        assert cache.open(a.manifest.version) == a.path

    def test_what_is_kept_already_needs_no_room(self, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", size_of_one(tmp_path))
        a = snapshot(cache, source(tmp_path, 1))
        cache.protect({a.manifest.version})
        assert snapshot(cache, source(tmp_path, 1)) == a

    def test_promise_4_the_limit_holds_at_every_moment(self, tmp_path: Path) -> None:
        limit = 3 * size_of_one(tmp_path)
        cache = DiskCache(tmp_path / "cache", limit)
        seen: list[int] = []

        def watch(done: int, total: int) -> None:
            try:
                # By inode: a file that is renamed while the tree is walked is met twice.
                sizes = {
                    (at := path.stat()).st_ino: at.st_size
                    for path in cache.root.rglob("*")
                    if path.is_file()
                }
                held = sum(sizes.values())
            except FileNotFoundError:  # a file was renamed or evicted under the watcher's eyes
                return
            seen.append(held)

        def load(seed: int) -> None:
            try:
                taken = cache.snapshot(
                    "pirate", source(tmp_path, seed), TINY_BASE, 8, progress=watch
                )
                cache.release(taken.manifest.version)
            except CapacityExhausted:
                return

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(load, range(12)))
        assert seen
        assert max(seen) <= limit
        assert cache.statistics().bytes <= limit
        assert cache.statistics().reserved_bytes == 0


class TestRestart:
    """Promise 8 on disk."""

    def test_promise_8_snapshots_are_found_again_in_their_order(self, tmp_path: Path) -> None:
        one = size_of_one(tmp_path)
        first = DiskCache(tmp_path / "cache", None)
        a, b = (snapshot(first, source(tmp_path, seed)) for seed in (1, 2))
        os.utime(a.path, (1, 1))
        again = DiskCache(tmp_path / "cache", 2 * one)
        assert again.statistics().bytes == 2 * one
        snapshot(again, source(tmp_path, 3))
        assert again.open(a.manifest.version) is None
        assert again.get(b.manifest.version, b.manifest) == b

    def test_left_overs_are_removed_but_not_a_living_neighbours(self, tmp_path: Path) -> None:
        root = tmp_path / "cache"
        for name in (".tmp-dead", ".tmp-living"):
            (root / name).mkdir(parents=True)
            (root / name / WEIGHTS).write_bytes(b"x")
        lock = os.open(root / ".tmp-living", os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            assert DiskCache(root, None).statistics().count == 0
            assert [path.name for path in root.iterdir()] == [".tmp-living"]
        finally:
            os.close(lock)

    def test_an_incomplete_snapshot_is_not_a_snapshot(self, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", None)
        taken = snapshot(cache, source(tmp_path))
        (taken.path / WEIGHTS).unlink()
        assert cache.open(taken.manifest.version) is None
        assert snapshot(cache, source(tmp_path)) == taken
        (taken.path / WEIGHTS).unlink()
        assert DiskCache(tmp_path / "cache", None).open(taken.manifest.version) is None

    def test_a_snapshot_of_another_size_than_registered_is_not_it(self, tmp_path: Path) -> None:
        cache = DiskCache(tmp_path / "cache", None)
        taken = snapshot(cache, source(tmp_path))
        with (taken.path / WEIGHTS).open("ab") as file:
            file.write(b"x")
        assert DiskCache(cache.root, None).get(taken.manifest.version, taken.manifest) is None
        assert cache.get(taken.manifest.version, taken.manifest) is None

    def test_promise_8_a_killed_writer_leaves_only_what_the_next_start_removes(
        self, tmp_path: Path
    ) -> None:
        root, folder = tmp_path / "cache", source(tmp_path)
        script = f"""
import os, signal
from pathlib import Path
from lorry.artifacts import cache
from tests.fixtures.adapters import TINY_BASE
def die(done, total):
    if done > total * 3 // 4:
        os.kill(os.getpid(), signal.SIGKILL)
cache.DiskCache(Path({str(root)!r}), None).snapshot(
    "pirate", Path({str(folder)!r}), TINY_BASE, 8, progress=die)
"""
        done = subprocess.run([sys.executable, "-c", script], check=False)
        assert done.returncode == -signal.SIGKILL
        assert [path.name.startswith(".tmp-") for path in root.iterdir()] == [True]
        cache = DiskCache(root, None)
        assert list(root.iterdir()) == []
        assert snapshot(cache, folder)


def test_remove_deletes_even_what_is_protected(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", None)
    taken = snapshot(cache, source(tmp_path))
    cache.protect({taken.manifest.version})
    assert cache.remove(taken.manifest.version)
    assert not cache.remove(taken.manifest.version)
    assert list(cache.root.iterdir()) == []


@pytest.mark.parametrize("wanted", [set, lambda: lambda version: False])
def test_retain_deletes_all_but_the_wanted_and_the_protected(
    wanted: Callable[[], set[VersionId]], tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path / "cache", None)
    versions = [snapshot(cache, source(tmp_path, seed)).manifest.version for seed in (1, 2, 3)]
    cache.protect({versions[0]})
    cache.release(versions[1])
    assert cache.retain(wanted()) == (versions[1],)
    assert {path.name for path in cache.root.iterdir()} == {versions[0], versions[2]}


class TestChangingSource:
    """Promise 2 begins here: a version is never a mix of two."""

    def test_promise_2_a_source_rewritten_once_is_read_again(self, tmp_path: Path) -> None:
        folder = source(tmp_path, 1)
        new = good_adapter(2).write(tmp_path / "new")
        steps = iter(range(10_000))

        def rewrite(done: int, total: int) -> None:
            if next(steps) == 10:
                (new / WEIGHTS).rename(folder / WEIGHTS)

        cache = DiskCache(tmp_path / "cache", None)
        taken = cache.snapshot("pirate", folder, TINY_BASE, 8, progress=rewrite)
        good_adapter(2).write(new)
        assert taken == snapshot(cache, new)

    @pytest.mark.parametrize("step", [0, 10, 30, 50])
    def test_promise_2_a_source_that_keeps_changing_is_refused(
        self, step: int, tmp_path: Path
    ) -> None:
        folder = source(tmp_path, 1)
        cache = DiskCache(tmp_path / "cache", None)
        contents = [
            (good_adapter(seed).write(tmp_path / f"v{seed}") / WEIGHTS).read_bytes()
            for seed in (1, 2)
        ]
        steps = iter(range(100_000))

        def rewrite(done: int, total: int) -> None:
            now = next(steps)
            if now >= step:
                (folder / WEIGHTS).write_bytes(contents[now % 2])

        with pytest.raises(AdapterInvalid, match="changed while being read"):
            cache.snapshot("pirate", folder, TINY_BASE, 8, progress=rewrite)
        assert list(cache.root.iterdir()) == []

    @pytest.mark.parametrize("in_place", [True, False])
    def test_promise_2_a_racing_writer_never_makes_a_mix(
        self, in_place: bool, tmp_path: Path
    ) -> None:
        cache = DiskCache(tmp_path / "cache", None)
        known = {snapshot(cache, source(tmp_path, seed)).manifest.version for seed in (1, 2)}
        contents = [(source(tmp_path, seed) / WEIGHTS).read_bytes() for seed in (1, 2)]
        folder = source(tmp_path, 1).rename(tmp_path / "raced")
        stop, pauses = threading.Event(), random.Random(0)

        def write() -> None:
            turn = 0
            while not stop.wait(pauses.choice([0.0, 0.002, 0.01, 0.04, 0.08])):
                turn += 1
                target = folder / (WEIGHTS if in_place else "new")
                target.write_bytes(contents[turn % 2])
                target.rename(folder / WEIGHTS)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(20):
                try:
                    assert snapshot(cache, folder).manifest.version in known
                except AdapterInvalid:
                    continue
        finally:
            stop.set()
            writer.join()


class TestRoots:
    """Nothing outside the roots is opened."""

    def test_a_link_that_leads_out_is_forbidden_and_the_canary_untouched(
        self, tmp_path: Path
    ) -> None:
        for name in ("adapter_config.json", WEIGHTS, "chat_template.jinja"):
            folder = source(tmp_path, 1)
            canary = tmp_path / f"canary-{name}"
            os.mkfifo(canary)
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(canary)
            cache = DiskCache(tmp_path / "cache", None)
            with pytest.raises(Forbidden):
                cache.snapshot("pirate", folder, TINY_BASE, 8, roots=[tmp_path / "sources"])
            (folder / name).unlink()

    def test_an_outside_file_keeps_its_access_time(self, tmp_path: Path) -> None:
        folder = source(tmp_path, 1)
        outside = tmp_path / "outside"
        (folder / WEIGHTS).rename(outside)
        (folder / WEIGHTS).symlink_to(outside)
        os.utime(outside, (1, 2))
        cache = DiskCache(tmp_path / "cache", None)
        with pytest.raises(Forbidden):
            cache.snapshot("pirate", folder, TINY_BASE, 8, roots=[tmp_path / "sources"])
        assert outside.stat().st_atime == 1

    def test_a_folder_outside_is_forbidden(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        cache = DiskCache(tmp_path / "cache", None)
        with pytest.raises(Forbidden):
            cache.snapshot("pirate", source(tmp_path), TINY_BASE, 8, roots=[tmp_path / "root"])

    def test_links_inside_the_roots_are_followed(self, tmp_path: Path) -> None:
        folder = source(tmp_path, 1)
        blobs = tmp_path / "sources" / "blobs"
        blobs.mkdir()
        for name in ("adapter_config.json", WEIGHTS):
            (folder / name).rename(blobs / name)
            (folder / name).symlink_to(blobs / name)
        cache = DiskCache(tmp_path / "cache", None)
        assert cache.snapshot("pirate", folder, TINY_BASE, 8, roots=[tmp_path / "sources"])

    def test_without_roots_links_may_lead_anywhere(self, tmp_path: Path) -> None:
        folder = source(tmp_path, 1)
        (folder / WEIGHTS).rename(tmp_path / "elsewhere")
        (folder / WEIGHTS).symlink_to(tmp_path / "elsewhere")
        assert snapshot(DiskCache(tmp_path / "cache", None), folder)
