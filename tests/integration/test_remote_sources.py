"""Sources from elsewhere, against real servers: what arrives, what is refused, and what a broken or
cancelled fetch leaves behind."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lorry.artifacts.remote.policy import AllowedSource, PrivatePlace, SourcePolicy
from lorry.errors import (
    AdapterInvalid,
    CapacityExhausted,
    Forbidden,
    LorryError,
    RequestAborted,
    RequestInvalid,
    SourceNotFound,
    SourceUnreachable,
    SourceUnsupported,
)
from tests.fixtures.adapters import good_adapter
from tests.fixtures.remote import (
    LOCAL,
    Asked,
    Authority,
    Files,
    LocalServer,
    Reply,
    contents,
    fetcher,
    have_no_credentials,
    have_small_parts,
    make_authority,
)

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One certificate authority for all."""
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(autouse=True)
def environment(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our authority is trusted, parts are small, and nobody's real credentials are found."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    have_small_parts(monkeypatch)
    have_no_credentials(tmp_path / "home", monkeypatch)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A sound adapter at /legal on the web server."""
    good_adapter(1).write(tmp_path / "www" / "legal")
    return Files(tmp_path / "www")


@pytest.fixture
def web(files: Files, authority: Authority) -> Iterator[LocalServer]:
    """A TLS file server."""
    with LocalServer(files, authority.context) as server:
        yield server


def test_https_brings_the_same_bytes_and_leaves_nothing(
    tmp_path: Path, web: LocalServer, files: Files
) -> None:
    told: list[tuple[int, int]] = []
    found = fetcher(tmp_path).find(
        "legal", f"{web.url}/legal/", report=lambda *counts: told.append(counts)
    )
    assert contents(found.folder) == contents(files.root / "legal")
    assert found.source == f"{web.url}/legal"
    size = sum(map(len, contents(found.folder).values()))
    assert told[0] == (0, size)
    assert told[-1] == (size, size)
    assert [one[0] for one in told] == sorted(one[0] for one in told)
    found.close()
    found.close()
    assert not (tmp_path / "downloads").exists()


def test_parts_are_fetched_side_by_side(tmp_path: Path, web: LocalServer, files: Files) -> None:
    """Two parts of one file are under way at once: neither is answered before both are asked."""
    both = threading.Barrier(2, timeout=20)
    waited: list[int] = []

    def before(asked: Asked) -> Reply | None:
        if asked.path.endswith(WEIGHTS) and asked.range not in (None, (0, 0)) and len(waited) < 2:
            waited.append(1)
            both.wait()
        return None

    files.before = before
    fetcher(tmp_path).find("legal", f"{web.url}/legal").close()
    assert len(waited) == 2


@pytest.mark.parametrize("sizes", [True, False], ids=["sized", "unsized"])
def test_a_server_without_ranges_is_read_from_end_to_end(
    sizes: bool, tmp_path: Path, web: LocalServer, files: Files
) -> None:
    files.ranges, files.sizes = False, sizes
    found = fetcher(tmp_path).find("legal", f"{web.url}/legal")
    assert contents(found.folder) == contents(files.root / "legal")
    found.close()


def test_shards_are_found_by_their_index(tmp_path: Path, web: LocalServer, files: Files) -> None:
    folder = files.root / "legal"
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "adapter_model-00001-of-00001.safetensors", "b": "../../passwd"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    found = fetcher(tmp_path).find("legal", f"{web.url}/legal")
    assert contents(found.folder) == contents(folder)
    found.close()
    assert not any("passwd" in asked.path for asked in web.asked)


def test_a_pickle_is_seen_and_not_fetched(tmp_path: Path, web: LocalServer, files: Files) -> None:
    (files.root / "legal" / WEIGHTS).rename(files.root / "legal" / "adapter_model.bin")
    found = fetcher(tmp_path).find("legal", f"{web.url}/legal")
    assert contents(found.folder)["adapter_model.bin"] == b""
    found.close()


def test_a_broken_fetch_goes_on_from_where_it_broke_off(
    tmp_path: Path, web: LocalServer, files: Files
) -> None:
    broken = threading.Event()

    def before(asked: Asked) -> Reply | None:
        second_half = asked.range is not None and asked.range[0] >= 8192
        return Reply(503) if asked.path.endswith(WEIGHTS) and second_half else None

    files.before = before
    with pytest.raises(SourceUnreachable, match="HTTP 503") as caught:
        fetcher(tmp_path).find("legal", f"{web.url}/legal")
    assert caught.value.retryable
    broken.set()
    kept = {(asked.range or (0, 0))[0] for asked in web.asked if asked.path.endswith(WEIGHTS)} - {
        asked.range[0] for asked in web.asked if asked.range and asked.range[0] >= 8192
    }
    files.before = lambda asked: None
    web.asked.clear()
    found = fetcher(tmp_path).find("legal", f"{web.url}/legal")
    assert contents(found.folder) == contents(files.root / "legal")
    again = {
        asked.range[0]
        for asked in web.asked
        if asked.path.endswith(WEIGHTS) and asked.range and asked.range != (0, 0)
    }
    assert again
    assert not again & (kept - {0}), "parts that were there were fetched again"
    assert min(again) >= 8192
    found.close()
    assert not (tmp_path / "downloads").exists()


def test_a_part_that_rotted_on_the_disk_is_fetched_again(
    tmp_path: Path, web: LocalServer, files: Files
) -> None:
    files.before = lambda asked: (
        Reply(503)
        if asked.path.endswith(WEIGHTS) and asked.range and asked.range[0] >= 8192
        else None
    )
    with pytest.raises(SourceUnreachable):
        fetcher(tmp_path).find("legal", f"{web.url}/legal")
    (kept,) = (tmp_path / "downloads").iterdir()
    with (kept / WEIGHTS).open("r+b") as file:
        file.write(b"\0" * 100)
    files.before = lambda asked: None
    found = fetcher(tmp_path).find("legal", f"{web.url}/legal")
    assert contents(found.folder) == contents(files.root / "legal")
    found.close()


def test_parts_of_an_old_content_are_not_mixed_with_the_new(
    tmp_path: Path, web: LocalServer, files: Files
) -> None:
    files.before = lambda asked: (
        Reply(503)
        if asked.path.endswith(WEIGHTS) and asked.range and asked.range[0] >= 8192
        else None
    )
    with pytest.raises(SourceUnreachable):
        fetcher(tmp_path).find("legal", f"{web.url}/legal")
    good_adapter(2).write(files.root / "legal")
    files.before = lambda asked: None
    found = fetcher(tmp_path).find("legal", f"{web.url}/legal")
    assert contents(found.folder) == contents(files.root / "legal")
    found.close()


def test_a_source_that_changes_while_it_is_fetched_is_fetched_anew(
    tmp_path: Path, web: LocalServer, files: Files
) -> None:
    changed = threading.Event()

    def before(asked: Asked) -> Reply | None:
        if asked.range == (0, 4095) and not changed.is_set() and asked.path.endswith(WEIGHTS):
            changed.set()
            good_adapter(2).write(files.root / "legal")
        return None

    files.before = before
    found = fetcher(tmp_path).find("legal", f"{web.url}/legal")
    assert changed.is_set()
    assert contents(found.folder) == contents(files.root / "legal")
    found.close()


def test_a_server_that_hangs_is_left_when_the_fetch_is_cancelled(
    tmp_path: Path, web: LocalServer, files: Files
) -> None:
    reached = threading.Event()

    def before(asked: Asked) -> Reply | None:
        if asked.path.endswith(WEIGHTS) and asked.range not in (None, (0, 0)):
            reached.set()
            web.released.wait()
        return None

    files.before = before
    with pytest.raises(RequestAborted, match="cancelled"):
        fetcher(tmp_path).find("legal", f"{web.url}/legal", cancelled=reached.is_set)


def test_a_fetch_has_a_deadline(tmp_path: Path, web: LocalServer, files: Files) -> None:
    files.before = lambda asked: web.released.wait() and None
    with pytest.raises(SourceUnreachable, match=r"within 0\.3 s"):
        fetcher(tmp_path, replace(LOCAL, fetch_timeout_s=0.3)).find("legal", f"{web.url}/legal")


def test_more_bytes_than_allowed_are_refused(
    tmp_path: Path, web: LocalServer, files: Files
) -> None:
    small = replace(LOCAL, source_bytes_max=10_000)
    with pytest.raises(AdapterInvalid, match="more than 10000 bytes"):
        fetcher(tmp_path, small).find("legal", f"{web.url}/legal")
    assert not any(asked.range == (0, 4095) for asked in web.asked)
    files.ranges = files.sizes = False  # the server does not even say how many there are
    with pytest.raises(AdapterInvalid, match="more than 10000 bytes"):
        fetcher(tmp_path, small).find("legal", f"{web.url}/legal")
    assert not (tmp_path / "downloads").exists()


def test_downloads_have_a_room_of_their_own(tmp_path: Path, web: LocalServer, files: Files) -> None:
    size = sum(map(len, contents(files.root / "legal").values()))
    one = fetcher(tmp_path, replace(LOCAL, download_bytes_max=2 * size - 1))
    found = one.find("legal", f"{web.url}/legal")
    with pytest.raises(CapacityExhausted, match=f"--download-bytes {2 * size - 1}"):
        one.find("legal", f"{web.url}/legal")
    found.close()
    one.find("legal", f"{web.url}/legal").close()


def test_what_nobody_can_go_on_from_is_removed_by_the_next_download(
    tmp_path: Path, web: LocalServer
) -> None:
    for name, age_s in (("once-killed", 0), ("old", 2 * 24 * 3600), ("fresh", 60)):
        folder = tmp_path / "downloads" / name
        folder.mkdir(parents=True)
        (folder / WEIGHTS).write_bytes(b"part")
        os.utime(folder, (time.time() - age_s,) * 2)
    fetcher(tmp_path).find("legal", f"{web.url}/legal").close()
    assert [left.name for left in (tmp_path / "downloads").iterdir()] == ["fresh"]


def test_nothing_there_is_said_so(tmp_path: Path, web: LocalServer) -> None:
    with pytest.raises(SourceNotFound, match="no adapter at"):
        fetcher(tmp_path).find("legal", f"{web.url}/nowhere")


def test_promise_9_a_private_address_is_refused_before_it_is_connected_to(
    tmp_path: Path, web: LocalServer
) -> None:
    for host in (web.host, f"127.0.0.1:{web.port}", f"[::1]:{web.port}"):
        with pytest.raises(Forbidden, match="private address"):
            fetcher(tmp_path, SourcePolicy()).find("legal", f"https://{host}/legal")
    assert web.asked == []


def test_promise_9_a_redirect_to_a_private_address_is_not_followed(
    tmp_path: Path, web: LocalServer, files: Files, authority: Authority
) -> None:
    with LocalServer(files, authority.context) as inner:
        target = f"https://127.0.0.1:{inner.port}/legal/{CONFIG}"
        files.before = lambda asked: Reply(302, b"", {"Location": target})
        with pytest.raises(Forbidden, match="private address"):
            fetcher(tmp_path).find("legal", f"{web.url}/legal")
        assert inner.asked == []


def test_promise_9_a_name_that_leads_to_a_private_address_is_refused(
    tmp_path: Path, web: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server under a stranger's control answers with our own address."""
    real = socket.getaddrinfo

    def answer(host: str | bytes, *rest: object, **more: object) -> object:
        rebound = host in ("adapters.example.com", b"adapters.example.com")
        return real("127.0.0.1" if rebound else host, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with pytest.raises(Forbidden, match=r"adapters\.example"):
        fetcher(tmp_path).find("legal", f"https://adapters.example.com:{web.port}/legal")
    assert web.asked == []


@pytest.mark.parametrize(
    "target", ["http://localhost/x", "ftp://localhost/x", "file:///etc/passwd"]
)
def test_a_redirect_leaves_neither_https(
    target: str, tmp_path: Path, web: LocalServer, files: Files
) -> None:
    files.before = lambda asked: Reply(302, b"", {"Location": target})
    with pytest.raises(Forbidden, match="not followed"):
        fetcher(tmp_path).find("legal", f"{web.url}/legal")


def test_a_redirect_stays_among_the_allowed_hosts(
    tmp_path: Path, web: LocalServer, files: Files, authority: Authority
) -> None:
    allowed = replace(LOCAL, allowed=(AllowedSource.parse(web.url),))
    with LocalServer(files, authority.context) as other:
        files.before = lambda asked: Reply(302, b"", {"Location": f"{other.url}/x"})
        with pytest.raises(Forbidden, match="not among those"):
            fetcher(tmp_path, allowed).find("legal", f"{web.url}/legal")
        assert other.asked == []


def test_a_certificate_of_a_stranger_is_not_believed(
    tmp_path: Path, web: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(SourceUnreachable, match="certificate"):
        fetcher(tmp_path).find("legal", f"{web.url}/legal")
    assert web.asked == []


def test_a_signature_works_and_is_never_said(
    tmp_path: Path, web: LocalServer, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    found = fetcher(tmp_path).find("legal", f"{web.url}/legal?sig=topsecret")
    assert found.source == f"{web.url}/legal"
    assert all(asked.query == {"sig": ["topsecret"]} for asked in web.asked)
    found.close()
    said = ""
    for reply in (Reply(500), Reply(403), Reply(404), Reply(302, b"", {"Location": "http://x/"})):
        files.before = lambda asked, reply=reply: reply  # type: ignore[misc]
        with pytest.raises(LorryError) as caught:
            fetcher(tmp_path).find("legal", f"{web.url}/legal?sig=topsecret")
        said += str(caught.value) + "".join(caught.value.details)
    for source in (
        "https://user:topsecret@host/x",
        "https://h/x?topsecret#",
        "HTTPS:/u:topsecret@h",
    ):
        with pytest.raises(LorryError) as caught:
            fetcher(tmp_path).find("legal", source)
        said += str(caught.value)
    assert "topsecret" not in said
    assert "topsecret" not in caplog.text


def test_names_and_passwords_come_from_netrc_and_go_to_their_host_only(
    tmp_path: Path,
    web: LocalServer,
    files: Files,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "netrc").write_text("machine localhost login me password topsecret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    store = Files(files.root)
    with LocalServer(store, authority.context) as other:
        where = f"https://127.0.0.1:{other.port}"
        files.before = lambda asked: Reply(307, b"", {"Location": f"{where}{asked.path}"})
        both = SourcePolicy(private=(PrivatePlace.parse("127.0.0.0/8"),))
        fetcher(tmp_path, both).find("legal", f"{web.url}/legal").close()
        assert all(asked.headers["authorization"].startswith("Basic ") for asked in web.asked)
        assert other.asked
        assert not any("authorization" in asked.headers for asked in other.asked)


@pytest.mark.parametrize(
    "source",
    ["ftp://host/x", "http://host/x", "s3://", "s3://b?x", "hf://org", "https://host/../x"],
)
def test_what_is_no_source_is_refused_without_a_connection(source: str, tmp_path: Path) -> None:
    with pytest.raises(RequestInvalid) as caught:
        fetcher(tmp_path).find("legal", source)
    assert caught.value.param == "source"


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SourceUnsupported, match=r"pip install 'lorry\[s3\]'"):
        fetcher(tmp_path).require("s3://bucket/legal")
