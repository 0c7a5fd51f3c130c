"""Storage that fails for a while, or is found spoilt at a start: promises 4 and 8."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lorry.artifacts import memory
from lorry.clock import SystemClock
from lorry.errors import StorageFailed
from lorry.store import sql
from lorry.supervisor.shell import Shell
from tests.crash.checks import agreement
from tests.crash.failing_disk import CHANGES, LOADS, prepared, refused, succeeds
from tests.crash.operations import put
from tests.crash.world import Options, Oracle, Pending, World, oracle_in, world

ROOT = Path(__file__).resolve().parents[2]
STATE = "lorry.sqlite3"
HOUR_S = 3600

UNSHARE = ("unshare", "--map-root-user", "--mount")


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The adapters."""
    return oracle_in(tmp_path_factory.mktemp("oracle"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where one server keeps everything."""
    monkeypatch.setattr(Shell, "_spawn", Shell._spawn)  # counted below, and as it was afterwards
    monkeypatch.setattr(memory, "_place", lambda: tmp_path / "state" / "memory")
    (tmp_path / "state" / "memory").mkdir(parents=True)
    return tmp_path


@asynccontextmanager
async def served(place: Path, oracle: Oracle) -> AsyncIterator[World]:
    """A server with adapters."""
    async with world(place, oracle, Options(), Pending.watching()) as running:
        await prepared(running)
        yield running


async def restarted(place: Path, oracle: Oracle) -> dict[str, object]:
    """What the next server has registered, after checking that everything agrees."""
    async with world(place, oracle, Options(), Pending.watching()) as running:
        await running.settled()
        assert await agreement(running) == []
        return dict(await running.facts())


def mounts_work() -> bool:
    """Whether this machine lets a process have mounts of its own."""
    if shutil.which("unshare") is None:
        return False
    probe = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_promise_4_a_failing_disk_is_said_and_changes_nothing(fault: str) -> None:
    if not mounts_work():
        pytest.skip("this machine lets no process have mounts of its own (unshare --mount)")
    command = [*UNSHARE, sys.executable, "-m", "tests.crash.failing_disk", fault]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr


@pytest.mark.anyio
async def test_promise_4_a_locked_registry_is_said_and_changes_nothing(
    place: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "BUSY_TIMEOUT_MS", 50)
    async with served(place, oracle) as running:
        other = sqlite3.connect(place / "state" / STATE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for call in (*LOADS, *CHANGES):
            assert "another program" in await refused(running, call)
        other.execute("ROLLBACK")
        other.close()
        await _all_succeed(running)
        facts = await running.facts()
    assert await restarted(place, oracle) == facts


async def _all_succeed(running: World) -> None:
    """As if there had been no fault, and without a restart."""
    for call in LOADS:
        await succeeds(running, call)
    await put(running, "a", 4)
    await put(running, "a", 5)
    for call in CHANGES:
        await succeeds(running, call)


@pytest.mark.anyio
async def test_promise_8_nothing_is_acknowledged_that_goes_to_a_removed_registry(
    place: Path, oracle: Oracle
) -> None:
    state = place / "state" / STATE
    async with served(place, oracle) as running:
        state.rename(state.with_name("elsewhere"))
        for call in (*LOADS, *CHANGES):
            assert "was removed while the server runs" in await refused(running, call)
        state.with_name("elsewhere").rename(state)
        await _all_succeed(running)
        facts = await running.facts()
    assert await restarted(place, oracle) == facts


@pytest.mark.anyio
async def test_promise_8_nothing_is_acknowledged_that_goes_to_a_replaced_registry(
    place: Path, oracle: Oracle
) -> None:
    state = place / "state" / STATE
    async with served(place, oracle) as running:
        state.rename(state.with_name("elsewhere"))
        shutil.copy(state.with_name("elsewhere"), state)
        for call in (*LOADS, *CHANGES):
            assert "replaced" in await refused(running, call)
        state.with_name("elsewhere").rename(state)
        await _all_succeed(running)


def cut(state: Path) -> None:
    """Half of the file is gone."""
    os.truncate(state, state.stat().st_size // 2)


def emptied(state: Path) -> None:
    """All of it is."""
    os.truncate(state, 0)


def no_database(state: Path) -> None:
    """Something else was written there."""
    state.write_bytes(b"Dear diary, " * 1000)


def damaged(state: Path) -> None:
    """A page in the middle was overwritten."""
    data = bytearray(state.read_bytes())
    data[4096 : 2 * 4096] = b"\xff" * 4096
    state.write_bytes(data)


@pytest.mark.anyio
@pytest.mark.parametrize("spoil", [cut, emptied, no_database, damaged])
async def test_promise_8_a_spoilt_registry_is_refused_and_left_as_it_is(
    spoil: Callable[[Path], None], place: Path, oracle: Oracle
) -> None:
    state = place / "state" / STATE
    async with served(place, oracle) as running:
        facts = await running.facts()
    good = state.read_bytes()
    spoil(state)
    spoilt = state.read_bytes()
    with pytest.raises(StorageFailed) as caught:
        await restarted(place, oracle)
    assert str(state) in caught.value.message
    assert "backup" in caught.value.message
    assert state.read_bytes() == spoilt
    state.write_bytes(good)
    assert await restarted(place, oracle) == facts


class JumpingClock(SystemClock):
    """A wall clock that somebody sets."""

    def __init__(self) -> None:
        """It is right."""
        self.off_s = 0.0

    def wall_s(self) -> float:
        """The time, and what it is wrong by."""
        return super().wall_s() + self.off_s


@pytest.mark.anyio
async def test_promise_8_a_clock_that_jumps_back_and_forth_changes_nothing(
    place: Path, oracle: Oracle
) -> None:
    clock, pending = JumpingClock(), Pending.watching()
    async with world(place, oracle, Options(), pending, clock=clock) as running:
        await prepared(running)
        for call in (*LOADS, *CHANGES):
            clock.off_s = -HOUR_S if clock.off_s >= 0 else HOUR_S
            await succeeds(running, call)
        clock.off_s = -HOUR_S
        assert await put(running, "a", 4) == 201
        facts = await running.facts()
    clock.off_s = -2 * HOUR_S
    async with world(place, oracle, Options(), pending, clock=clock) as running:
        await running.settled()
        assert await running.facts() == facts
        assert await agreement(running) == []
        assert await put(running, "a", 5) == 200
        assert await running.http.client.post("/v1/adapters/a/rollback")
        assert (await running.facts())["a"]["version"] == oracle.versions[4]
