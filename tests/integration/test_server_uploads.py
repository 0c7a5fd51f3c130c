"""Adapters that come with the request, over the real app with the fake engine."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.snapshot import Snapshot
from lorry.engines.fake_script import Fault
from lorry.errors import EngineRejected, StorageFailed
from tests.fixtures.adapters import good_adapter, safetensors_bytes
from tests.fixtures.http_server import BASE, Exchange, HttpServer, http_server
from tests.fixtures.uploads import (
    error_of,
    folder_files,
    left_over,
    parts,
    raw,
    tar,
    until_nothing_is_left,
)

pytestmark = pytest.mark.anyio

GZIP = {"content-type": "application/gzip"}
TAR = {"content-type": "application/x-tar"}
RAW = {"content-type": "application/octet-stream"}
WEIGHTS = "/v1/adapters/policy/weights"
FILES = "/v1/adapters/policy/files"


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


async def until_answered(server: HttpServer) -> None:
    """The engine is back, and so is the adapter."""
    with anyio.fail_after(10):
        while (await server.complete(model="policy")).status_code != 200:
            await anyio.sleep(0.005)


async def version_of(server: HttpServer, name: str = "policy") -> str:
    version: str = (await server.client.get(f"/v1/adapters/{name}")).json()["version"]
    return version


# Weights


async def test_weights_in_a_form_are_published_as_the_same_version_as_their_folder(
    server: HttpServer,
) -> None:
    answer = await server.client.put(WEIGHTS, files=parts(good_adapter(1)))
    entry = answer.json()
    assert answer.status_code == 201, answer.text
    assert answer.headers["etag"] == f'"{entry["published"]}"'
    assert entry["published"] == entry["version"]
    assert entry["source"].startswith("upload:")
    assert (entry["state"], entry["tier"]) == ("resident", "host")
    by_folder = await server.load("other", 1)
    assert by_folder.json()["version"] == entry["version"]
    assert (await server.complete(model="policy")).status_code == 200


async def test_weights_as_one_file_carry_their_config_in_its_metadata(server: HttpServer) -> None:
    first = await server.client.put(WEIGHTS, content=raw(good_adapter(1)), headers=RAW)
    assert first.status_code == 201, first.text
    form = await server.client.put(WEIGHTS, files=parts(good_adapter(1)))
    assert form.status_code == 200
    assert form.json()["version"] == first.json()["version"]
    second = await server.client.put(
        WEIGHTS, content=raw(good_adapter(2)), headers={"content-type": "application/x-safetensors"}
    )
    assert second.json()["previous"] == [first.json()["version"]]


async def test_a_chat_template_may_come_with_the_weights(server: HttpServer) -> None:
    plain = await server.client.put(WEIGHTS, files=parts(good_adapter(1)))
    more = [*parts(good_adapter(1)), ("files", ("chat_template.jinja", b"{{ messages }}"))]
    with_template = await server.client.put(WEIGHTS, files=more)
    assert with_template.json()["version"] != plain.json()["version"]


async def test_if_match_and_replace_false_guard_an_upload_before_it_is_sent(
    server: HttpServer,
) -> None:
    first = (await server.client.put(WEIGHTS, files=parts(good_adapter(1)))).json()["version"]
    two = parts(good_adapter(2))
    wrong = await server.client.put(WEIGHTS, files=two, headers={"If-Match": f'"{"f" * 64}"'})
    error_of(wrong, 409, "version_mismatch")
    short = await server.client.put(WEIGHTS, files=two, headers={"If-Match": "abc"})
    error_of(short, 400, "request_invalid")
    taken = await server.client.put(f"{WEIGHTS}?replace=false", files=two)
    error_of(taken, 409, "adapter_conflict")
    assert await version_of(server) == first
    right = await server.client.put(WEIGHTS, files=two, headers={"If-Match": f'"{first}"'})
    assert right.status_code == 200, right.text
    absent = await server.client.put(
        "/v1/adapters/nobody/weights", files=two, headers={"If-Match": f'"{first}"'}
    )
    assert absent.status_code in (404, 409)


@pytest.mark.parametrize(
    ("case", "status", "code", "says"),
    [
        ("no config", 422, "adapter_invalid", "adapter_config.json is missing"),
        ("no weights", 422, "adapter_invalid", "adapter_model.safetensors is missing"),
        ("cut", 422, "adapter_invalid", "was cut"),
        ("nan", 422, "adapter_invalid", "NaN"),
        ("strange part", 400, "request_invalid", "'optimizer.pt' is none of"),
        ("twice", 400, "request_invalid", "twice"),
        ("no metadata", 400, "request_invalid", "__metadata__"),
        ("raw and cut", 422, "adapter_invalid", "was cut"),
        ("raw and no file", 422, "adapter_invalid", "header length"),
        ("empty", 400, "request_invalid", "The body is empty"),
        ("json", 400, "request_invalid", "Content-Type is application/json"),
        ("half a form", 400, "request_invalid", "before its last boundary"),
        ("no boundary", 400, "request_invalid", "boundary"),
    ],
)
async def test_promise_4_weights_that_cannot_be_served_change_nothing(
    server: HttpServer, case: str, status: int, code: str, says: str
) -> None:
    before = (await server.client.put(WEIGHTS, files=parts(good_adapter(1)))).json()["version"]
    good = parts(good_adapter(2))
    form = httpx.Request("PUT", "http://x", files=good)
    whole = raw(good_adapter(2))
    sent: dict[str, dict[str, Any]] = {
        "no config": {"files": good[1:]},
        "no weights": {"files": good[:1]},
        "cut": {"files": [good[0], ("files", (good[1][1][0], good[1][1][1][:-8]))]},
        "nan": {"files": parts(with_nan())},
        "strange part": {"files": [*good, ("files", ("optimizer.pt", b"x"))]},
        "twice": {"files": [*good, good[0]]},
        "no metadata": {
            "content": safetensors_bytes(good_adapter(2).tensors),
            "headers": RAW,
        },
        "raw and cut": {"content": whole[:7], "headers": RAW},
        "raw and no file": {"content": b"x" * 100, "headers": RAW},
        "empty": {"content": b"", "headers": RAW},
        "json": {"json": {"source": "/somewhere"}},
        "half a form": {"content": form.read()[:-20], "headers": dict(form.headers)},
        "no boundary": {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
    }
    error = error_of(await server.client.put(WEIGHTS, **sent[case]), status, code)
    assert says in error["message"], error["message"]
    assert await version_of(server) == before
    assert len(await server.engine.list_loras()) == 1


def with_nan() -> Any:
    files = good_adapter(2)
    name = next(iter(files.tensors))
    old = files.tensors[name]
    files.tensors[name] = type(old)(old.dtype, old.shape, b"\xff" * len(old.data))
    return files


async def test_an_upload_over_the_limit_is_refused_whatever_it_announces(tmp_path: Path) -> None:
    async with http_server(tmp_path, max_upload_bytes=4000) as server:
        files = parts(good_adapter(1))
        error_of(await server.client.put(WEIGHTS, files=files), 413, "body_too_large")

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 100

        unannounced = await server.client.put(WEIGHTS, content=pieces(), headers=RAW)
        error_of(unannounced, 413, "body_too_large")
        packed = tar(folder_files(good_adapter(1)), "w")
        too_much = await server.client.put(FILES, content=packed, headers=TAR)
        error = error_of(too_much, 413, "body_too_large")
        assert "--max-upload-bytes" in error["message"]
        assert left_over(server) == []
        assert (await server.client.get("/v1/adapters")).json()["data"] == []


async def test_uploads_together_take_no_more_memory_than_one_may(tmp_path: Path) -> None:
    async with http_server(tmp_path, max_upload_bytes=40_000) as server:
        body = raw(good_adapter(1))
        slow = Exchange(server.app, WEIGHTS, body[:30_000], method="PUT")
        slow.more = True
        async with anyio.create_task_group() as group:
            group.start_soon(slow.run, ((b"content-length", b"30001"), *_raw_header()))
            with anyio.fail_after(10):
                while not server.service.uploads.used:
                    await anyio.sleep(0.005)
            second = await server.client.put(
                "/v1/adapters/other/weights", content=body, headers=RAW
            )
            error = error_of(second, 503, "capacity_exhausted")
            assert "Retry-After" in {key.title() for key in second.headers}
            assert "--max-upload-bytes" in error["message"]
            slow.hang_up()
        assert left_over(server) == []
        again = await server.client.put("/v1/adapters/other/weights", content=body, headers=RAW)
        assert again.status_code == 201


def _raw_header() -> tuple[tuple[bytes, bytes], ...]:
    return ((b"content-type", b"application/octet-stream"),)


@pytest.mark.parametrize("path", [WEIGHTS, FILES])
async def test_an_interrupted_upload_leaves_nothing(server: HttpServer, path: str) -> None:
    packed = tar(folder_files(good_adapter(1)), "w")
    body = (packed if path == FILES else raw(good_adapter(1)))[:10_000]
    kind = b"application/x-tar" if path == FILES else b"application/octet-stream"
    exchange = Exchange(server.app, path, body, method="PUT")
    exchange.more = True
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.run, ((b"content-type", kind),))
        await anyio.lowlevel.checkpoint()
        exchange.hang_up()
    assert exchange.status == 400
    assert "connection was closed after 10000 bytes" in exchange.json()["error"]["message"]
    assert left_over(server) == []
    assert (await server.client.get("/v1/adapters")).json()["data"] == []


async def test_nothing_is_written_to_the_disk_on_the_path_to_the_engine(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs; the engine has the version all the same. Only then does the disk go on."""
    hanging, going = anyio.Event(), anyio.Event()
    adopt = DiskCache.adopt

    def slow(cache: DiskCache, name: str, snapshot: Snapshot) -> Snapshot:
        anyio.from_thread.run_sync(hanging.set)
        anyio.from_thread.run(going.wait)
        return adopt(cache, name, snapshot)

    monkeypatch.setattr(DiskCache, "adopt", slow)
    monkeypatch.setattr(DiskCache, "open", refuse)
    answers = []

    async def put() -> None:
        answers.append(await server.client.put(WEIGHTS, files=parts(good_adapter(1))))

    async with anyio.create_task_group() as group:
        group.start_soon(put)
        with anyio.fail_after(10):
            await hanging.wait()
            while not await server.engine.list_loras():
                await anyio.sleep(0.005)
        assert (await server.client.get("/v1/adapters")).json()["data"] == []
        assert answers == []
        going.set()
    assert answers[0].status_code == 201, answers[0].text
    assert answers[0].json()["tier"] == "host"


def refuse(*_: object) -> None:
    raise AssertionError("the snapshot on the disk is not to be read")


async def test_promise_4_a_failing_disk_publishes_nothing(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (await server.client.put(WEIGHTS, files=parts(good_adapter(1)))).json()["version"]

    def fail(*_: object) -> None:
        raise StorageFailed("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(DiskCache, "adopt", fail)
        error_of(
            await server.client.put(WEIGHTS, files=parts(good_adapter(2))), 500, "storage_failed"
        )
    assert await version_of(server) == before
    with anyio.fail_after(10):
        while len(await server.engine.list_loras()) != 1:
            await anyio.sleep(0.005)
    again = await server.client.put(WEIGHTS, files=parts(good_adapter(2)))
    assert again.status_code == 200, again.text


async def test_durable_false_publishes_before_the_copy_which_follows(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = anyio.Event()
    adopt = DiskCache.adopt
    copied = []

    def slow(cache: DiskCache, name: str, snapshot: Snapshot) -> Snapshot:
        anyio.from_thread.run(going.wait)
        copied.append(snapshot.manifest.version)
        return adopt(cache, name, snapshot)

    monkeypatch.setattr(DiskCache, "adopt", slow)
    published = []
    for seed in (1, 2, 3, 4, 5):
        answer = await server.client.put(
            f"{WEIGHTS}?durable=false", files=parts(good_adapter(seed))
        )
        assert answer.json()["source"].startswith("memory:"), answer.text
        published.append(answer.json()["published"])
    assert await version_of(server) == published[-1]
    # an engine that is started anew gets it from memory, for it is nowhere else yet
    server.engine.crash()
    server.engine.restart()
    await until_answered(server)
    going.set()
    await until_nothing_is_left(server)
    # those whose turn came when a newer one was served already were left out
    assert set(copied) <= {*published[:2], published[-1]}
    assert published[-1] in copied


async def test_promise_3_a_copy_that_ends_after_a_purge_does_not_stay(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, going = anyio.Event(), anyio.Event()
    adopt = DiskCache.adopt

    def slow(cache: DiskCache, name: str, snapshot: Snapshot) -> Snapshot:
        anyio.from_thread.run_sync(begun.set)
        anyio.from_thread.run(going.wait)
        return adopt(cache, name, snapshot)

    monkeypatch.setattr(DiskCache, "adopt", slow)
    await server.client.put(f"{WEIGHTS}?durable=false", files=parts(good_adapter(1)))
    with anyio.fail_after(10):
        await begun.wait()
    gone = await server.client.delete("/v1/adapters/policy?purge=true")
    assert gone.status_code == 200
    going.set()
    await until_nothing_is_left(server)
    assert list((server.folder / "cache").iterdir()) == []


async def test_a_failed_copy_of_durable_false_is_told_and_its_memory_kept_while_it_is_served(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageFailed("The disk is full.")

    uploads = server.service.supervisor._shell.uploads
    with monkeypatch.context() as patch:
        patch.setattr(DiskCache, "adopt", fail)
        url = f"{WEIGHTS}?durable=false"
        assert (await server.client.put(url, files=parts(good_adapter(1)))).status_code == 201
        with anyio.fail_after(10):
            async for change in server.service.supervisor.events():
                if "in memory only" in change.text:
                    break
    assert uploads.statistics()["in_memory"] == 1
    server.engine.crash()
    server.engine.restart()
    await until_answered(server)
    assert (await server.client.delete("/v1/adapters/policy")).status_code == 200
    assert uploads.statistics()["in_memory"] == 0


async def test_what_cannot_be_rolled_back_to_leaves_the_disk(server: HttpServer) -> None:
    versions = []
    for seed in range(1, 13):
        answer = await server.client.put(WEIGHTS, files=parts(good_adapter(seed)))
        versions.append(answer.json()["published"])
    entry = (await server.client.get("/v1/adapters/policy")).json()
    assert entry["previous"] == versions[-2:-10:-1]
    kept = {entry["version"], *entry["previous"]}
    with anyio.fail_after(10):
        while {path.name for path in (server.folder / "cache").iterdir()} != kept:
            await anyio.sleep(0.005)
    back = await server.client.post("/v1/adapters/policy/rollback")
    assert back.json()["version"] == versions[-2], back.text


async def test_promise_2_running_requests_end_on_the_version_that_they_began_with(
    server: HttpServer,
) -> None:
    body = {"model": "policy", "max_tokens": 60, "return_token_ids": True}
    await server.client.put(WEIGHTS, files=parts(good_adapter(1)))
    alone = (await server.complete(**body)).json()["choices"][0]["token_ids"]
    server.engine.token_delay_s = 0.005
    prompt = {"prompt": [5, 6, 7], "temperature": 0, "stream": True}
    stream = server.stream("/v1/completions", **body, **prompt)
    async with anyio.create_task_group() as group:
        group.start_soon(stream.run)
        await stream.until_events(2)
        replaced = await server.client.put(WEIGHTS, files=parts(good_adapter(2)))
        assert replaced.status_code == 200
        assert not stream.ended
    server.engine.token_delay_s = 0
    chunks = [one["choices"][0] for one in stream.events() if one != "[DONE]"]
    assert [token for chunk in chunks for token in chunk.get("token_ids") or ()] == alone
    after = await server.complete(**body)
    assert after.json()["choices"][0]["token_ids"] != alone


async def test_promise_8_a_restart_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    async with http_server(tmp_path) as server:
        answer = await server.client.put(WEIGHTS, files=parts(good_adapter(1)))
        version, source = answer.json()["version"], answer.json()["source"]
    async with http_server(tmp_path) as server:
        entry = (await server.client.get("/v1/adapters/policy")).json()
        assert (entry["version"], entry["source"]) == (version, source)
        assert (await server.complete(model="policy")).status_code == 200


async def test_promise_3_an_upload_that_is_unloaded_after_a_restart_leaves_the_disk(
    tmp_path: Path,
) -> None:
    async with http_server(tmp_path) as server:
        await server.client.put(FILES, files=parts(good_adapter(1)))
        await server.client.put(FILES, files=parts(good_adapter(2)))
    async with http_server(tmp_path) as server:
        assert len(list((tmp_path / "cache").iterdir())) == 2
        answer = await server.client.delete("/v1/adapters/policy")
        assert answer.status_code == 200, answer.text
        with anyio.fail_after(10):
            while list((tmp_path / "cache").iterdir()):
                await anyio.sleep(0.005)


async def test_a_stop_in_order_waits_for_the_copy_of_durable_false(tmp_path: Path) -> None:
    async with http_server(tmp_path) as server:
        url = f"{WEIGHTS}?durable=false"
        version = (await server.client.put(url, files=parts(good_adapter(1)))).json()["version"]
    async with http_server(tmp_path) as server:
        assert await version_of(server) == version
        assert (await server.complete(model="policy")).status_code == 200


async def test_promise_8_a_lost_version_gives_way_to_the_last_one_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed before the copies of durable=false are written."""

    def fail(*_: object) -> None:
        raise StorageFailed("Killed before it was written.")

    async with http_server(tmp_path) as server:
        first = (await server.client.put(WEIGHTS, files=parts(good_adapter(1)))).json()["version"]
        monkeypatch.setattr(DiskCache, "adopt", fail)
        for name, seed in (("policy", 2), ("policy", 3), ("fresh", 4)):
            url = f"/v1/adapters/{name}/weights?durable=false"
            assert (await server.client.put(url, files=parts(good_adapter(seed)))).is_success
    monkeypatch.undo()
    async with http_server(tmp_path) as server:
        entry = (await server.client.get("/v1/adapters/policy")).json()
        assert (entry["version"], entry["previous"]) == (first, [])
        assert entry["source"].startswith("upload:")
        assert (await server.complete(model="policy")).status_code == 200
        lost = error_of(await server.complete(model="fresh"), 503, "adapter_unavailable")
        assert "send them again" in lost["message"]
        again = await server.client.put("/v1/adapters/fresh/weights", files=parts(good_adapter(4)))
        assert again.status_code == 200
        assert (await server.complete(model="fresh")).status_code == 200


async def test_an_engine_that_refuses_leaves_what_was_served(server: HttpServer) -> None:
    before = (await server.client.put(WEIGHTS, files=parts(good_adapter(1)))).json()["version"]
    server.engine.inject("add_lora", Fault(error=EngineRejected("no")))
    answer = await server.client.put(WEIGHTS, files=parts(good_adapter(2)))
    error_of(answer, 500, "engine_rejected")
    assert await version_of(server) == before


async def test_the_same_weights_at_once_are_one_version(server: HttpServer) -> None:
    answers: list[httpx.Response] = []

    async def put(name: str) -> None:
        url = f"/v1/adapters/{name}/weights"
        answers.append(await server.client.put(url, files=parts(good_adapter(1))))

    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(put, f"twin-{number % 3}")
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert len({answer.json()["published"] for answer in answers}) == 1
    assert len(await server.engine.list_loras()) == 1


async def test_wait_false_gives_an_operation_that_keeps_the_weights(server: HttpServer) -> None:
    answer = await server.client.put(f"{WEIGHTS}?wait=false", files=parts(good_adapter(1)))
    assert answer.status_code == 202, answer.text
    with anyio.fail_after(10):
        while (await server.client.get(answer.headers["location"])).json()["status"] == "running":
            await anyio.sleep(0.005)
    ended = (await server.client.get(answer.headers["location"])).json()
    assert ended["status"] == "done"
    assert await version_of(server) == ended["version"]


async def test_names_that_no_adapter_may_have_are_refused_before_the_body(
    server: HttpServer,
) -> None:
    answer = await server.client.put(f"/v1/adapters/{BASE}/weights", files=parts(good_adapter(1)))
    error_of(answer, 409, "adapter_conflict")
    with_slash = await server.client.put(
        "/v1/adapters/team/policy/weights", files=parts(good_adapter(1))
    )
    assert with_slash.json()["name"] == "team/policy"


async def test_the_source_of_an_upload_is_no_path(server: HttpServer) -> None:
    source = (await server.client.put(WEIGHTS, files=parts(good_adapter(1)))).json()["source"]
    answer = await server.client.put("/v1/adapters/other", json={"source": source})
    error_of(answer, 404, "source_not_found")
