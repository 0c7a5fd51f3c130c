"""Remote sources, names on demand and followed folders through the whole server: what is served,
shown and kept."""

import hashlib
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from lorry.artifacts.remote import download
from lorry.artifacts.remote.policy import PrivatePlace, SourcePolicy
from lorry.lifecycle.learning import LearningLimits
from lorry.supervisor import SupervisorSettings
from tests.fixtures.adapters import good_adapter
from tests.fixtures.http_server import BASE, HttpServer, http_server
from tests.fixtures.remote import (
    COMMIT,
    Asked,
    Authority,
    Files,
    Hub,
    LocalServer,
    Reply,
    make_authority,
)

pytestmark = pytest.mark.anyio

LOCAL = SourcePolicy(private=(PrivatePlace.parse("localhost"),))
WEIGHTS = "adapter_model.safetensors"
LONG_S = 20.0


@pytest.fixture
def anyio_backend() -> str:
    """What production runs on."""
    return "asyncio"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One for all."""
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """Adapters `legal` and `tax` on the web server."""
    for seed, name in enumerate(("legal", "tax"), start=1):
        good_adapter(seed).write(tmp_path / "www" / name)
    return Files(tmp_path / "www")


@pytest.fixture
def web(
    files: Files, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalServer]:
    """A TLS file server, whose authority is trusted."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.01)
    with LocalServer(files, authority.context) as server:
        yield server


@pytest.fixture
async def server(tmp_path: Path, web: LocalServer) -> AsyncIterator[HttpServer]:
    """Without resolvers."""
    async with http_server(tmp_path, policy=LOCAL) as running:
        yield running


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that another thread or task brings about."""
    with anyio.fail_after(LONG_S):
        while not true():
            await anyio.sleep(0.01)


def nothing_is_left(server: HttpServer) -> bool:
    """No download, finished or not."""
    return not (server.folder / "cache" / ".downloads").exists()


async def test_an_adapter_from_the_web_is_served_like_one_from_a_folder(
    server: HttpServer, web: LocalServer
) -> None:
    body = {"source": f"{web.url}/legal?sig=topsecret", "expected_digest": None}
    answer = await server.client.put("/v1/adapters/legal", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["source"] == f"{web.url}/legal"
    local = (await server.load("same", 1)).json()
    assert answer.json()["version"] == local["version"]
    assert (await server.complete(model="legal")).status_code == 200
    assert nothing_is_left(server)
    everything = ""
    for path in ("/v1/adapters", "/v1/models", "/v1/operations", "/metrics"):
        everything += (await server.client.get(path)).text
    assert "topsecret" not in everything
    assert b"topsecret" not in (server.folder / "lorry.sqlite3").read_bytes()


async def test_a_branch_of_the_hub_is_registered_as_its_commit(
    server: HttpServer, web: LocalServer, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(files.root, files.root / "acme")
    with LocalServer(Hub(files.root, web.url)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(server.folder))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        body = {"source": "hf://acme/legal@main"}
        answer = await server.client.put("/v1/adapters/legal", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["source"] == f"hf://acme/legal@{COMMIT}"


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [("/nowhere", 404, "source_not_found"), ("/broken", 422, "adapter_invalid")],
)
async def test_promise_4_a_source_that_fails_changes_nothing_and_is_named(
    path: str, status: int, code: str, server: HttpServer, web: LocalServer, files: Files
) -> None:
    good_adapter(1, alpha=0).write(files.root / "broken")
    source = f"{web.url}{path}?sig=topsecret"
    for answer in (
        await server.client.put("/v1/adapters/x", json={"source": source}),
        await server.client.post(
            "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": source}
        ),
    ):
        assert answer.status_code == status, answer.text
        assert "topsecret" not in answer.text
        assert str(server.folder) not in answer.text
    body = (await server.client.put("/v1/adapters/x", json={"source": source})).json()
    assert body["error"]["code"] == code
    assert (await server.client.get("/v1/adapters")).json()["data"] == []
    assert nothing_is_left(server)


async def test_a_private_address_is_forbidden_unless_it_is_named(
    tmp_path: Path, web: LocalServer
) -> None:
    async with http_server(tmp_path) as strict:
        source = {"source": f"{web.url}/legal"}
        answer = await strict.client.put("/v1/adapters/legal", json=source)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        assert "--private-source" in answer.json()["error"]["action"]
        assert (await strict.client.post("/v1/adapters:check", json=source)).status_code == 403
    assert web.asked == []


async def test_the_dry_run_takes_uris_and_keeps_nothing(
    server: HttpServer, web: LocalServer, files: Files
) -> None:
    body = {"source": f"{web.url}/legal?sig=topsecret"}
    found = (await server.client.post("/v1/adapters:check", json=body)).json()
    assert found["ok"], found
    assert found["source"] == f"{web.url}/legal"
    assert found["rank"] == 4
    (files.root / "legal" / WEIGHTS).write_bytes(b"cut")
    found = (await server.client.post("/v1/adapters:check", json=body)).json()
    assert [one["code"] for one in found["problems"]] == ["adapter_invalid"]
    files.before = lambda asked: Reply(503)
    found = (await server.client.post("/v1/adapters:check", json=body)).json()
    assert [one["code"] for one in found["problems"]] == ["source_unreachable"]
    assert nothing_is_left(server)
    assert (await server.client.get("/v1/adapters")).json()["data"] == []


async def test_expected_digest_is_the_version_or_the_sha256_of_the_weights(
    server: HttpServer, web: LocalServer, files: Files
) -> None:
    sha256 = hashlib.sha256((files.root / "legal" / WEIGHTS).read_bytes()).hexdigest()
    checked = await server.client.post("/v1/adapters:check", json={"source": f"{web.url}/legal"})
    version = checked.json()["version"]
    for source in (f"{web.url}/legal", str(files.root / "legal")):
        for good in (f"sha256:{sha256}", version, f"version:{version.upper()}"):
            body = {"source": source, "expected_digest": good}
            answer = await server.client.put("/v1/adapters/legal", json=body)
            assert answer.status_code in (200, 201), answer.text
        for bad in (f"sha256:{'0' * 64}", "1" * 64):
            body = {"source": f"{web.url}/tax", "expected_digest": bad}
            answer = await server.client.put("/v1/adapters/legal", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (422, "digest_mismatch")
    assert (await server.client.get("/v1/adapters/legal")).json()["version"] == version
    body = {"source": f"{web.url}/legal", "expected_digest": "sha1:0"}
    answer = await server.client.put("/v1/adapters/legal", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "expected_digest")


def hanging(web: LocalServer, name: str) -> tuple[Callable[[Asked], Reply | None], threading.Event]:
    """Answers nothing for one adapter's weights beyond their first byte; and when that began."""
    reached = threading.Event()

    def before(asked: Asked) -> Reply | None:
        if f"/{name}/{WEIGHTS}" in asked.path and asked.range not in (None, (0, 0)):
            reached.set()
            web.released.wait()
        return None

    return before, reached


async def test_promise_5_a_fetch_that_hangs_holds_up_nobody_shows_progress_and_can_be_cancelled(
    server: HttpServer, web: LocalServer, files: Files
) -> None:
    files.before, reached = hanging(web, "legal")
    body = {"source": f"{web.url}/legal"}
    begun = await server.client.put("/v1/adapters/slow?wait=false", json=body)
    place = begun.headers["location"]
    await to_thread.run_sync(reached.wait, LONG_S)
    assert (await server.load("quick", 3)).status_code == 201
    other = await server.client.put("/v1/adapters/tax", json={"source": f"{web.url}/tax"})
    assert other.status_code == 201
    phase = (await server.client.get(place)).json()["phase"]
    assert phase.startswith("fetching (0.0 of 0.0 MiB)"), phase
    assert (await server.client.delete(place)).json()["status"] == "cancelled"
    await until(lambda: not server.service.supervisor._shell._fetching)
    await until(lambda: server.service.supervisor._shell.sources._hosts == {})


async def test_the_server_stops_while_a_fetch_hangs(
    tmp_path: Path, web: LocalServer, files: Files
) -> None:
    files.before, reached = hanging(web, "legal")
    with anyio.fail_after(LONG_S):
        async with http_server(tmp_path, policy=LOCAL) as server:
            body = {"source": f"{web.url}/legal"}
            await server.client.put("/v1/adapters/slow?wait=false", json=body)
            await to_thread.run_sync(reached.wait, LONG_S)


async def test_a_lost_snapshot_is_fetched_again(
    server: HttpServer, web: LocalServer, files: Files
) -> None:
    body = {"source": f"{web.url}/legal", "load": False}
    version = (await server.client.put("/v1/adapters/legal", json=body)).json()["version"]
    shutil.rmtree(server.folder / "cache" / version)
    assert (await server.complete(model="legal")).status_code == 200


# Names on demand


def learning(**limits: int) -> dict[str, Any]:
    """Settings for the limits."""
    return {"learning": LearningLimits(**limits), "reconcile_s": 0.05, "shutdown_s": 1.0}


@pytest.fixture
async def knowing(tmp_path: Path, web: LocalServer) -> AsyncIterator[HttpServer]:
    """Knows what the web server has, and what lies in `adapters`."""
    settings = SupervisorSettings(
        resolvers=(f"{web.url}/{{name}}?sig=topsecret", f"{tmp_path}/adapters/{{name}}"),
        **learning(names_max=2, lookups_per_minute=100),
    )
    async with http_server(tmp_path, policy=LOCAL, supervision=settings) as running:
        yield running


async def names(server: HttpServer) -> set[str]:
    """All that are registered."""
    return {one["name"] for one in (await server.client.get("/v1/adapters")).json()["data"]}


async def test_an_unknown_name_is_loaded_on_first_use_once_for_all_who_ask(
    knowing: HttpServer, web: LocalServer
) -> None:
    answers = []

    async def ask() -> None:
        answers.append(await knowing.complete(model="legal"))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
    assert [answer.status_code for answer in answers] == [200] * 8
    config = [asked for asked in web.asked if asked.path == "/legal/adapter_config.json"]
    # Probed before and after, and fetched in between: one look-up.
    assert len(config) == 3
    shown = (await knowing.client.get("/v1/adapters/legal")).json()
    assert shown["labels"] == {"lorry.learnt": f"{web.url}/legal"}
    assert "topsecret" not in str(shown)


async def test_promise_10_a_name_that_nobody_has_is_an_error_and_not_asked_for_again(
    knowing: HttpServer, web: LocalServer
) -> None:
    for _ in range(3):
        answer = await knowing.complete(model="nobody")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "adapter_not_found"
        assert "The model `nobody` does not exist." in answer.json()["error"]["message"]
    assert len([one for one in web.asked if one.path == "/nobody/adapter_config.json"]) == 1
    web.asked.clear()
    for name in ("../etc", "a@main", "no body"):
        assert (await knowing.complete(model=name)).status_code == 404
    assert web.asked == []


async def test_the_next_source_is_asked_when_one_has_no_such_name(
    knowing: HttpServer, tmp_path: Path
) -> None:
    good_adapter(5).write(tmp_path / "adapters" / "org" / "local")
    assert (await knowing.complete(model="org/local")).status_code == 200
    chat = {"model": f"{BASE}:org/local", "prompt": [5], "max_tokens": 1}
    assert (await knowing.client.post("/v1/completions", json=chat)).status_code == 200


async def test_every_way_to_ask_for_tokens_learns(knowing: HttpServer) -> None:
    body: dict[str, Any] = {"input_ids": [5, 6], "lora_path": "legal"}
    body["sampling_params"] = {"max_new_tokens": 2}
    assert (await knowing.client.post("/generate", json=body)).status_code == 200
    body = {"prompt": [5, 6], "max_tokens": 2}
    headers = {"X-Amzn-SageMaker-Adapter-Identifier": "tax"}
    answer = await knowing.client.post("/invocations", json=body, headers=headers)
    assert answer.status_code == 200
    assert await names(knowing) == {"legal", "tax"}


async def test_a_bad_adapter_is_refused_with_its_cause_and_not_fetched_each_time(
    knowing: HttpServer, web: LocalServer, files: Files
) -> None:
    good_adapter(1, alpha=0).write(files.root / "broken")
    for _ in range(3):
        answer = await knowing.complete(model="broken")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "adapter_invalid")
    assert len([one for one in web.asked if one.path == "/broken/adapter_config.json"]) == 3
    assert await names(knowing) == set()


async def test_names_learnt_have_a_bound_and_those_registered_by_hand_do_not_count(
    knowing: HttpServer, tmp_path: Path
) -> None:
    good_adapter(5).write(tmp_path / "adapters" / "third")
    await knowing.load("mine", 9)
    for name in ("legal", "tax", "legal", "third"):
        assert (await knowing.complete(model=name)).status_code == 200
    with anyio.fail_after(LONG_S):
        while await names(knowing) != {"mine", "legal", "third"}:
            await anyio.sleep(0.01)
    adopted = await knowing.client.patch("/v1/adapters/legal", json={"labels": {}})
    assert adopted.status_code == 200
    assert (await knowing.complete(model="tax")).status_code == 200
    assert await names(knowing) == {"mine", "legal", "third", "tax"}


async def test_unknown_names_have_a_rate(tmp_path: Path, web: LocalServer) -> None:
    settings = SupervisorSettings(
        resolvers=(f"{web.url}/{{name}}",), **learning(lookups_per_minute=1)
    )
    async with http_server(tmp_path, policy=LOCAL, supervision=settings) as server:
        assert (await server.complete(model="nobody")).status_code == 404
        answer = await server.complete(model="somebody")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1


async def test_promise_8_what_was_learnt_is_known_after_a_restart(
    tmp_path: Path, web: LocalServer
) -> None:
    settings = SupervisorSettings(
        resolvers=(f"{web.url}/{{name}}",), **learning(names_max=1, lookups_per_minute=100)
    )
    async with http_server(tmp_path, policy=LOCAL, supervision=settings) as server:
        assert (await server.complete(model="legal")).status_code == 200
    async with http_server(tmp_path, policy=LOCAL, supervision=settings) as server:
        assert await names(server) == {"legal"}
        assert (await server.complete(model="tax")).status_code == 200
        with anyio.fail_after(LONG_S):
            while await names(server) != {"tax"}:
                await anyio.sleep(0.01)


# Folders that are followed


@pytest.fixture
async def following(tmp_path: Path) -> AsyncIterator[HttpServer]:
    """Follows `adapters`, which has `legal` in it at the start."""
    good_adapter(1).write(tmp_path / "adapters" / "legal")
    settings = SupervisorSettings(
        adapter_dirs=(tmp_path / "adapters",),
        adapter_dir_interval_s=0.02,
        reconcile_s=0.05,
        shutdown_s=1.0,
    )
    async with http_server(tmp_path, supervision=settings) as running:
        yield running


async def until_names(server: HttpServer, *wanted: str) -> None:
    """Wait for exactly these."""
    with anyio.fail_after(LONG_S):
        while await names(server) != set(wanted):
            await anyio.sleep(0.01)


async def test_a_followed_folder_registers_replaces_and_unloads(
    following: HttpServer, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    await until_names(following, "legal")
    assert (await following.complete(model="legal")).status_code == 200
    first = (await following.client.get("/v1/adapters/legal")).json()
    assert first["source"] == str(folder / "legal")
    good_adapter(2).write(folder / ".hidden")
    good_adapter(2).write(folder / ".tmp-tax")
    (folder / ".tmp-tax").rename(folder / "tax")
    (folder / "notes.txt").write_text("no adapter")
    (folder / "empty").mkdir()
    await until_names(following, "legal", "tax")
    good_adapter(3).write(folder / "legal")
    with anyio.fail_after(LONG_S):
        while (now := (await following.client.get("/v1/adapters/legal")).json())[
            "version"
        ] == first["version"]:
            await anyio.sleep(0.01)
    assert now["previous"] == [first["version"]]
    assert now["tier"] in ("host", "slot"), "it was in use, so the new one was loaded first"
    shutil.rmtree(folder / "tax")
    await until_names(following, "legal")


async def test_a_half_written_folder_is_not_taken(following: HttpServer, tmp_path: Path) -> None:
    whole = good_adapter(2).write(tmp_path / "elsewhere")
    part = tmp_path / "adapters" / "tax"
    part.mkdir()
    shutil.copy(whole / WEIGHTS, part / WEIGHTS)  # the config is to come
    cut = tmp_path / "adapters" / "cut"
    good_adapter(3).write(cut)
    (cut / WEIGHTS).write_bytes((cut / WEIGHTS).read_bytes()[:-100])
    await until_names(following, "legal")
    (cut / WEIGHTS).write_bytes((good_adapter(3).write(tmp_path / "x") / WEIGHTS).read_bytes())
    await until_names(following, "legal", "cut")
    shutil.copy(whole / "adapter_config.json", part)
    await until_names(following, "legal", "cut", "tax")


async def test_a_folder_that_cannot_be_listed_unloads_nobody(
    following: HttpServer, tmp_path: Path
) -> None:
    await until_names(following, "legal")
    (tmp_path / "adapters").rename(tmp_path / "away")
    follower = next(iter(following.service.supervisor._following))
    for _ in range(3):
        await follower.step()
    assert await names(following) == {"legal"}
    good_adapter(4).write(tmp_path / "away" / "new")
    (tmp_path / "away").rename(tmp_path / "adapters")
    await until_names(following, "legal", "new")


async def test_a_name_from_elsewhere_is_not_touched_by_the_folder(
    following: HttpServer, tmp_path: Path
) -> None:
    await until_names(following, "legal")
    mine = (await following.load("tax", 7)).json()
    good_adapter(2).write(tmp_path / "adapters" / "tax")
    follower = next(iter(following.service.supervisor._following))
    for _ in range(3):
        await follower.step()
    shutil.rmtree(tmp_path / "adapters" / "tax")
    for _ in range(3):
        await follower.step()
    assert (await following.client.get("/v1/adapters/tax")).json()["version"] == mine["version"]
