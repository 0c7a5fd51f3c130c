"""Ways in that meet on one name: uploads, sources, names on demand, followed folders, settings,
rollback and restart."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from lorry.adapter_settings import SettingsChange
from lorry.artifacts.cache import DiskCache
from lorry.errors import StorageFailed
from lorry.ids import AdapterName
from lorry.lifecycle.learning import LearningLimits
from lorry.supervisor import SupervisorSettings
from tests.fixtures.adapters import good_adapter
from tests.fixtures.http_server import HttpServer, http_server
from tests.fixtures.uploads import error_of, parts, raw, until_nothing_is_left

pytestmark = pytest.mark.anyio

LONG_S = 20.0
POLICY = "/v1/adapters/policy"


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """Two slots, room for three."""
    async with http_server(tmp_path) as running:
        yield running
        await until_nothing_is_left(running)


def supervision(**fields: Any) -> SupervisorSettings:
    """Quick looks."""
    return SupervisorSettings(reconcile_s=0.05, shutdown_s=1.0, **fields)


async def entry(server: HttpServer, name: str = "policy") -> dict[str, Any]:
    """The adapter as it is shown."""
    answer = await server.client.get(f"/v1/adapters/{name}")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def upload(server: HttpServer, seed: int, name: str = "policy", query: str = "") -> str:
    """Weights under a name; answers the version."""
    url = f"/v1/adapters/{name}/weights{query}"
    answer = await server.client.put(url, files=parts(good_adapter(seed)))
    assert answer.is_success, answer.text
    version: str = answer.json()["published"]
    return version


# Names on demand that somebody made his own


@pytest.mark.parametrize("way", ["settings", "replaced", "uploaded"])
async def test_promise_8_a_learnt_name_that_somebody_changed_is_not_forgotten_with_his_change(
    tmp_path: Path, way: str
) -> None:
    for seed, name in enumerate(("legal", "tax", "third"), start=1):
        good_adapter(seed).write(tmp_path / "adapters" / name)
    limits = LearningLimits(names_max=1, lookups_per_minute=100)
    settings = supervision(resolvers=(f"{tmp_path}/adapters/{{name}}",), learning=limits)
    async with http_server(tmp_path, supervision=settings) as server:
        assert (await server.complete(model="legal")).status_code == 200
        if way == "settings":
            body = {"maxima": {"max_tokens": 2}}
            changed = await server.client.patch("/v1/adapters/legal", json=body)
            assert changed.status_code == 200, changed.text
        elif way == "replaced":
            assert (await server.load("legal", 9)).status_code == 200
        else:
            await upload(server, 9, "legal")
        before = await entry(server, "legal")
    async with http_server(tmp_path, supervision=settings) as server:
        for name in ("tax", "third"):
            assert (await server.complete(model=name)).status_code == 200
        with anyio.fail_after(LONG_S):
            while "tax" in await names(server):
                await anyio.sleep(0.01)
        after = await entry(server, "legal")
        assert "lorry.learnt" not in after["labels"]
        for field in ("version", "source", "maxima", "previous"):
            assert after[field] == before[field]


async def names(server: HttpServer) -> set[str]:
    """All that are registered."""
    return {one["name"] for one in (await server.client.get("/v1/adapters")).json()["data"]}


# Rollback


async def test_promise_8_no_rollback_to_a_version_that_would_be_lost_with_the_engine(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of durable=false, whose copy was left out: only streams that still run on it have it."""
    going = anyio.Event()
    adopt = DiskCache.adopt

    def slow(cache: DiskCache, *arguments: Any) -> Any:
        anyio.from_thread.run(going.wait)
        return adopt(cache, *arguments)

    kept = await upload(server, 1)
    with monkeypatch.context() as patch:
        patch.setattr(DiskCache, "adopt", slow)
        for seed in (2, 3):
            await upload(server, seed, f"busy-{seed}", "?durable=false")
        lost = await upload(server, 4, query="?durable=false")
        server.engine.token_delay_s = 0.01
        stream = server.stream(
            "/v1/completions",
            model="policy",
            prompt=[5, 6],
            max_tokens=60,
            temperature=0,
            stream=True,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(stream.run)
            await stream.until_events(2)
            for name in ("busy-2", "busy-3"):
                await server.client.delete(f"/v1/adapters/{name}")
            await upload(server, 5, query="?durable=false")
            going.set()
            wanted = {"version": lost}
            answer = await server.client.post(f"{POLICY}/rollback", json=wanted)
            error_of(answer, 404, "adapter_not_found")
            back = await server.client.post(f"{POLICY}/rollback", json={})
            assert back.json()["version"] == kept, back.text
            server.engine.token_delay_s = 0


async def test_promise_8_a_rollback_of_a_followed_name_outlives_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    good_adapter(1).write(folder / "legal")
    settings = supervision(adapter_dirs=(folder,), adapter_dir_interval_s=0.02)
    async with http_server(tmp_path, supervision=settings) as server:
        await until_known(server, "legal")
        first = (await entry(server, "legal"))["version"]
        good_adapter(2).write(folder / "legal")
        with anyio.fail_after(LONG_S):
            while (await entry(server, "legal"))["version"] == first:
                await anyio.sleep(0.01)
        back = await server.client.post("/v1/adapters/legal/rollback", json={})
        assert back.json()["version"] == first, back.text
    async with http_server(tmp_path, supervision=settings) as server:
        follower = next(iter(server.service.supervisor._following))
        for _ in range(4):
            await follower.step()
        await server.service.supervisor._shell.until_idle()
        assert (await entry(server, "legal"))["version"] == first
        good_adapter(3).write(folder / "legal")
        with anyio.fail_after(LONG_S):
            while (await entry(server, "legal"))["version"] == first:
                await anyio.sleep(0.01)


async def until_known(server: HttpServer, name: str) -> None:
    """Wait for a name."""
    with anyio.fail_after(LONG_S):
        while name not in await names(server):
            await anyio.sleep(0.01)


async def test_an_upload_a_folder_and_a_rollback_keep_their_sources_over_restarts(
    tmp_path: Path,
) -> None:
    async with http_server(tmp_path) as server:
        first = await upload(server, 1)
        source = (await entry(server))["source"]
        body = {"owner": "me", "defaults": {"temperature": 0.5}}
        assert (await server.client.patch(POLICY, json=body)).status_code == 200
        assert (await server.load("policy", 2)).status_code == 200
        back = await server.client.post(f"{POLICY}/rollback", json={})
        assert (back.json()["version"], back.json()["source"]) == (first, source)
    async with http_server(tmp_path) as server:
        now = await entry(server)
        assert (now["version"], now["source"], now["owner"]) == (first, source, "me")
        assert (await server.complete(model="policy")).status_code == 200
        models = (await server.client.get("/v1/models")).json()["data"]
        assert {m["id"]: m["root"] for m in models}["policy"] == source
        loaded = await server.client.post(
            "/load_lora_adapter", json={"lora_name": "x", "lora_path": server.adapter(3)}
        )
        assert loaded.json()["loaded_adapters"]["policy"] == source
        again = await server.client.post(f"{POLICY}/rollback", json={})
        assert again.json()["source"] == server.adapter(2)
        third = await server.client.post(f"{POLICY}/rollback", json={"version": first})
        assert third.json()["version"] == first


# The disk


async def test_promise_3_a_purge_takes_the_earlier_versions_from_the_disk_too(
    server: HttpServer,
) -> None:
    for seed in (1, 2):
        assert (await server.load("policy", seed)).is_success
    assert (await server.client.delete(f"{POLICY}?purge=true")).status_code == 200
    with anyio.fail_after(LONG_S):
        while server.service.supervisor.cache.statistics().count:
            await anyio.sleep(0.01)


async def test_a_stop_in_order_tries_a_copy_again_that_had_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageFailed("The disk is full.")

    async with http_server(tmp_path) as server:
        with monkeypatch.context() as patch:
            patch.setattr(DiskCache, "adopt", fail)
            version = await upload(server, 1, query="?durable=false")
            with anyio.fail_after(LONG_S):
                async for change in server.service.supervisor.events():
                    if "in memory only" in change.text:
                        break
    async with http_server(tmp_path) as server:
        assert (await entry(server))["version"] == version
        assert (await server.complete(model="policy")).status_code == 200


async def test_an_upload_whose_name_went_meanwhile_is_a_new_one(server: HttpServer) -> None:
    await upload(server, 1)
    whole = raw(good_adapter(2))

    async def body() -> AsyncIterator[bytes]:
        yield whole[:100]
        assert (await server.client.delete(POLICY)).status_code == 200
        yield whole[100:]

    answer = await server.client.put(
        f"{POLICY}/weights", content=body(), headers={"content-type": "application/octet-stream"}
    )
    assert answer.status_code == 201, answer.text


async def test_uploads_that_fail_or_are_cancelled_leave_no_descriptor(server: HttpServer) -> None:
    await upload(server, 1)
    await until_nothing_is_left(server)
    before = psutil.Process().num_fds()
    cut = parts(good_adapter(2))[:1]
    for _ in range(10):
        for kind in ("weights", "files"):
            url = f"{POLICY}/{kind}"
            error_of(await server.client.put(url, files=cut), 422, "adapter_invalid")
            taken = await server.client.put(f"{url}?replace=false", files=parts(good_adapter(3)))
            error_of(taken, 409, "adapter_conflict")
            begun = await server.client.put(f"{url}?wait=false", files=parts(good_adapter(4)))
            await server.client.delete(begun.headers["location"])
        bad = {"content-type": "application/gzip"}
        answer = await server.client.put(f"{POLICY}/files", content=b"no gzip", headers=bad)
        error_of(answer, 400, "request_invalid")
    await until_nothing_is_left(server)
    with anyio.fail_after(LONG_S):
        while psutil.Process().num_fds() > before:
            await anyio.sleep(0.01)


async def test_settings_that_contradict_each_other_keep_nobody_from_setting_others(
    server: HttpServer,
) -> None:
    """Two changes that were judged at the same time may come to that."""
    supervisor = server.service.supervisor
    await upload(server, 1)
    for change in ({"defaults": {"temperature": 1.0}}, {"maxima": {"temperature": 0.5}}):
        asked = supervisor.change(AdapterName("policy"), settings=SettingsChange(change))
        await supervisor.wait(asked.id)
    answer = await server.client.patch(POLICY, json={"owner": "me"})
    assert answer.status_code == 200, answer.text
    worse = {"defaults": {"top_p": 0.5}}
    error_of(await server.client.patch(POLICY, json=worse), 400, "request_invalid")
