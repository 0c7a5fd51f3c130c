"""The operations that are killed at every step: what is there before, what is done, and what an
answer to the same call means when it had been done already."""

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lorry.engines.fake_script import FakeSettings
from tests.crash.world import Options, World
from tests.fixtures.adapters import good_adapter
from tests.fixtures.uploads import folder_files, parts, raw, tar
from tests.fixtures.waiting import leap, until

Do = Callable[[World], Awaitable[int]]
SETTINGS = {
    "owner": "legal",
    "defaults": {"temperature": 0.5},
    "maxima": {"max_tokens": 64},
}
SMALL = FakeSettings(max_loras=2, max_cpu_loras=2)
IDLE_S = 3600


async def _nothing(world: World) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Operation:
    """One of them."""

    act: Do
    """Does it, and answers the status of its answer; 0 when nobody waits for one."""
    prepare: Do = _nothing
    """What was acknowledged before, on top of what every operation finds (`bystanders`)."""
    options: Options = field(default_factory=Options)
    lay_out: Callable[[Path], object] = lambda place: None
    """Makes what lies beside the state, before each start."""
    again: frozenset[int] = frozenset({200})
    """What a repetition may answer when it had been done."""
    may_fall_back: bool = False
    """Its answer does not promise that a restart keeps it (`durable=false`)."""
    starting: bool = False
    """It is the start of a server."""
    empty: bool = False
    """It finds an empty folder, and no bystanders."""
    keeps_files: bool = False
    """What it takes off the registry leaves the disk at the next start only."""
    repeat: Do | None = None
    """Does it after a restart, if not `act`."""


async def bystanders(world: World) -> None:
    """Adapters that no operation is about: whatever happens to others, they stay as they are."""
    keep = await put(world, "keep", 1, pinned=True, labels={"team": "a"}, **SETTINGS)
    other = await put(world, "other", 2, labels={"team": "b"})
    assert (keep, other, await put(world, "other", 3)) == (201, 201, 200)


async def put(world: World, name: str, seed: int, **more: Any) -> int:
    """PUT a folder of the oracle's."""
    body = {"source": world.oracle.source(seed)} | more
    return (await world.http.client.put(f"/v1/adapters/{name}", json=body)).status_code


async def _call(world: World, method: str, path: str, **more: Any) -> int:
    answer: httpx.Response = await world.http.client.request(method, f"/v1/adapters/{path}", **more)
    return answer.status_code


def _put(seed: int, **more: Any) -> Do:
    return lambda world: put(world, "a", seed, **more)


def _request(method: str, path: str = "a", **more: Any) -> Do:
    return lambda world: _call(world, method, path, **more)


def _each(*steps: Do) -> Do:
    async def run(world: World) -> int:
        status = 0
        for step in steps:
            status = await step(world)
            assert status in (0, 200, 201), status
        return status

    return run


def _folder(seed: int) -> Callable[[Path], object]:
    """A folder whose bytes somebody changes later: `moving` beside the state."""

    def lay_out(place: Path) -> object:
        shutil.rmtree(place / "moving", ignore_errors=True)
        return good_adapter(seed).write(place / "moving")

    return lay_out


async def _put_moving(world: World) -> int:
    body = {"source": str(world.place / "moving")}
    return (await world.http.client.put("/v1/adapters/a", json=body)).status_code


async def _rewrite(world: World) -> int:
    good_adapter(5).write(world.place / "moving")
    return await _put_moving(world)


def _upload(path: str, kind: str | None = None, **body: Any) -> Do:
    headers = {} if kind is None else {"content-type": kind}
    return _request("PUT", path, headers=headers, **body)


async def _grow_idle(world: World) -> int:
    leap(2 * IDLE_S)
    supervisor = world.http.service.supervisor
    await until(lambda: all(view.name != "a" for view in supervisor.adapters()))
    return 0


async def _learn(world: World) -> int:
    """A request for a name that only a resolver knows: it is registered before it is answered."""
    answer = await world.answer("6")
    return 200 if isinstance(answer, list) else 500


def _followed(*seeds: int) -> Callable[[Path], object]:
    """The folder that is followed: `b` is there, and perhaps `a`."""

    def lay_out(place: Path) -> None:
        shutil.rmtree(place / "followed", ignore_errors=True)
        shutil.rmtree(place / "made", ignore_errors=True)
        for seed in seeds:
            good_adapter(seed).write(place / "followed" / f"f{seed}")

    return lay_out


async def _come(world: World) -> int:
    good_adapter(5).write(world.place / "made").rename(world.place / "followed" / "f5")
    return await _listed(5, there=True)(world)


async def _go(world: World) -> int:
    shutil.rmtree(world.place / "followed" / "f5")
    return await _listed(5, there=False)(world)


def _listed(seed: int, *, there: bool) -> Do:
    """Wait until the follower has done it."""

    async def run(world: World) -> int:
        supervisor = world.http.service.supervisor
        name = f"f{seed}"
        await until(lambda: there == any(view.name == name for view in supervisor.adapters()))
        return 0

    return run


_SNAPSHOT_BYTES = 26_000
"""A little more than one of the fixtures' adapters."""

_FILES = parts(good_adapter(4))
_NEW = good_adapter(5)
_RELATIVES = _each(_put(4, labels={"x": "1"}), _put(5))

OPERATIONS: dict[str, Operation] = {
    "first start": Operation(_nothing, starting=True, empty=True),
    "start": Operation(_nothing, prepare=_RELATIVES, starting=True),
    "load": Operation(_put(4, pinned=True, labels={"x": "1"}, **SETTINGS)),
    "load over a full engine": Operation(_put(4), options=Options(SMALL)),
    "load over a full disk cache": Operation(
        _put(6), prepare=_RELATIVES, options=Options(cache_bytes=5 * _SNAPSHOT_BYTES)
    ),
    "register only": Operation(_put(4, load=False)),
    "replace": Operation(_put(5, labels={"x": "2"}), prepare=_put(4, labels={"x": "1"})),
    "replace, drain first": Operation(
        _put(5, strategy="drain-first"), prepare=_put(4), options=Options(SMALL)
    ),
    "replace by new bytes at the same path": Operation(
        _rewrite, prepare=_put_moving, lay_out=_folder(4)
    ),
    "rollback": Operation(_request("POST", "a/rollback"), prepare=_RELATIVES),
    "unload": Operation(
        _request("DELETE"), prepare=_RELATIVES, again=frozenset({404}), keeps_files=True
    ),
    "unload with purge": Operation(
        _request("DELETE", "a?purge=true"), prepare=_RELATIVES, again=frozenset({404})
    ),
    "upload of files": Operation(
        _upload("a/files", files=parts(good_adapter(5))), prepare=_upload("a/files", files=_FILES)
    ),
    "upload of a tar": Operation(
        _upload("a/files", "application/gzip", content=tar(folder_files(good_adapter(4))))
    ),
    "upload of weights": Operation(_upload("a/weights", files=_FILES), again=frozenset({200, 201})),
    "upload of weights, not durable": Operation(
        _upload("a/weights?durable=false", "application/octet-stream", content=raw(_NEW)),
        prepare=_put(4, labels={"x": "1"}),
        may_fall_back=True,
    ),
    "unload of an upload": Operation(
        _request("DELETE"), prepare=_upload("a/files", files=_FILES), again=frozenset({404})
    ),
    "pin and label": Operation(
        _request("PATCH", json={"pinned": True, "labels": {"y": "2"}}), prepare=_RELATIVES
    ),
    "unpin": Operation(
        _request("PATCH", json={"pinned": False}), prepare=_put(4, pinned=True, labels={"x": "1"})
    ),
    "settings": Operation(_request("PATCH", json=SETTINGS), prepare=_RELATIVES),
    "prefetch": Operation(
        _request("POST", "a/prefetch"), prepare=_put(4, load=False), options=Options(SMALL)
    ),
    "retirement": Operation(
        _grow_idle,
        prepare=_put(4, idle_ttl=IDLE_S),
        keeps_files=True,
    ),
    "a learnt name": Operation(_learn, options=Options(learn=True)),
    "a followed folder comes": Operation(
        _come,
        options=Options(follow=True),
        lay_out=_followed(4),
        repeat=_listed(5, there=True),
    ),
    "a followed folder goes": Operation(
        _go,
        prepare=_listed(5, there=True),
        options=Options(follow=True),
        lay_out=_followed(4, 5),
        keeps_files=True,
        repeat=_listed(5, there=False),
    ),
}
"""By name. Ways of saying the same in a dialect end in the same calls and are not repeated."""
