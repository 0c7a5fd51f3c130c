"""A server on a disk that fails for a while. `full` and `read-only` mount file systems, for which
they need a mount namespace of their own:

    unshare --map-root-user --mount python -m tests.crash.failing_disk full
"""

import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx

from lorry.errors import StorageFailed
from tests.crash.checks import agreement
from tests.crash.operations import bystanders, put
from tests.crash.world import Options, Oracle, Pending, World, oracle_in, world
from tests.fixtures.adapters import good_adapter
from tests.fixtures.uploads import parts, raw

Call = Callable[[World], Awaitable[httpx.Response]]
DISK_MIB = 8
BIG_LABELS = {f"label-{n}": "x" * 1000 for n in range(60)}
RAW = {"content-type": "application/octet-stream"}


def _request(method: str, path: str, **more: object) -> Call:
    return lambda world: world.http.client.request(method, f"/v1/adapters/{path}", **more)  # type: ignore[arg-type]


async def _load(world: World) -> httpx.Response:
    body = {"source": world.oracle.source(6)}
    return await world.http.client.put("/v1/adapters/b", json=body)


LOADS: tuple[Call, ...] = (
    _load,
    _request("PUT", "b/files", files=parts(good_adapter(7))),
    _request("PUT", "b/weights", content=raw(good_adapter(8)), headers=RAW),
)
"""They need room in the disk cache."""

CHANGES: tuple[Call, ...] = (
    _request("PATCH", "a", json={"labels": BIG_LABELS}),
    _request("PATCH", "a", json={"pinned": True, "labels": {"y": "2"} | BIG_LABELS}),
    _request("POST", "a/rollback"),
    _request("DELETE", "a"),
)
"""They need the registry alone."""


async def prepared(world: World) -> None:
    """What is served when the disk fails."""
    await bystanders(world)
    assert await put(world, "a", 4) == 201
    assert await put(world, "a", 5) == 200
    await world.settled()


async def refused(world: World, call: Call) -> str:
    """The call ends with a clear error of the disk's, and changes nothing; all that is served is
    served on. Answers the error's message."""
    before = await world.facts()
    with anyio.fail_after(30):
        answer = await call(world)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, StorageFailed.code), answer.text
    assert error["action"]
    await world.settled()
    assert await world.facts() == before
    assert await agreement(world) == []
    return str(error["message"])


async def succeeds(world: World, call: Call) -> None:
    """The fault is over, so the same call does what it should, without a restart."""
    answer = await call(world)
    assert answer.status_code in (200, 201), answer.text
    await world.settled()
    assert await agreement(world) == []


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A file system over a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """No room is left on the disk of a folder."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    try:
        yield
    finally:
        ballast.unlink()


async def full(place: Path, oracle: Oracle) -> None:
    """A full disk: what needs room is refused until there is some again."""
    state = place / "state"
    with mounted(state, "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs"):
        async with world(place, oracle, Options(), Pending.watching()) as running:
            await prepared(running)
            with filled(state):
                for call in LOADS:
                    assert "free space" in await refused(running, call)
                for call in CHANGES:
                    await _refused_or_done(running, call)
            for call in LOADS:
                await succeeds(running, call)
            await put(running, "a", 4)
            await put(running, "a", 5)
            for call in CHANGES:
                await succeeds(running, call)
            facts = await running.facts()
        async with world(place, oracle, Options(), Pending.watching()) as running:
            await running.settled()
            assert await running.facts() == facts
            assert await agreement(running) == []


async def _refused_or_done(world: World, call: Call) -> None:
    """Room that the registry has taken before may do for a change, but not for ever."""
    before = await world.facts()
    answer = await call(world)
    if answer.status_code == 200:
        await world.settled()
        assert await agreement(world) == []
        return
    assert await refused(world, call)
    assert await world.facts() == before


async def read_only(place: Path, oracle: Oracle) -> None:
    """The disk cache turns read-only while the server runs, and the state before one starts."""
    cache = place / "state" / "cache"
    async with world(place, oracle, Options(), Pending.watching()) as running:
        await prepared(running)
        with mounted(cache, "-o", "bind,ro", str(cache)):
            for call in LOADS:
                assert "Read-only file system" in await refused(running, call)
            await succeeds(running, _request("PATCH", "a", json={"labels": {"z": "3"}}))
        for call in LOADS:
            await succeeds(running, call)
        facts = await running.facts()
    state = place / "state"
    with mounted(state, "-o", "bind,ro", str(state)):
        try:
            async with world(place, oracle, Options(), Pending.watching()):
                raise AssertionError("a server has started on a disk that it cannot write to")
        except StorageFailed as error:
            assert str(state) in error.message, error.message
            assert "writable" in error.message or "permissions" in error.message, error.message
    async with world(place, oracle, Options(), Pending.watching()) as running:
        await running.settled()
        assert await running.facts() == facts


FAULTS = {"full": full, "read-only": read_only}


def main() -> int:
    """0 when the server bears it; else a traceback says what it did not."""
    with tempfile.TemporaryDirectory(prefix="lorry-disk-") as folder:
        oracle = oracle_in(Path(folder) / "oracle")
        (Path(folder) / "place" / "state").mkdir(parents=True)
        anyio.run(FAULTS[sys.argv[1]], Path(folder) / "place", oracle)
    return 0


if __name__ == "__main__":
    sys.exit(main())
