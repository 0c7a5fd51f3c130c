"""Adapters of a hub and of object stores, against real servers."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorry.artifacts.remote.policy import SourcePolicy
from lorry.errors import (
    AdapterInvalid,
    Forbidden,
    SourceDenied,
    SourceNotFound,
    SourceUnreachable,
)
from tests.fixtures.adapters import good_adapter
from tests.fixtures.remote import (
    COMMIT,
    Authority,
    Files,
    GoogleStore,
    Hub,
    LocalServer,
    Reply,
    contents,
    fetcher,
    have_no_credentials,
    have_small_parts,
    make_authority,
    moto_s3,
    put_folder,
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One certificate authority for all."""
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """One S3 server for all."""
    with moto_s3() as url:
        yield url


@pytest.fixture(autouse=True)
def environment(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our authority is trusted, parts are small, and nobody's real credentials are found."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    have_small_parts(monkeypatch)
    have_no_credentials(tmp_path / "home", monkeypatch)


# The hub


@pytest.fixture
def hub(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LocalServer, Hub, LocalServer]]:
    """(hub, what it has, the store that it redirects to); acme/legal is there."""
    good_adapter(1).write(tmp_path / "repos" / "acme" / "legal")
    (tmp_path / "repos" / "acme" / "legal" / "README.md").write_text("hello")
    with LocalServer(Files(tmp_path / "repos"), authority.context) as store:
        answers = Hub(tmp_path / "repos", store.url)
        with LocalServer(answers) as server:
            monkeypatch.setenv("HF_ENDPOINT", server.url)
            yield server, answers, store


HubServers = tuple[LocalServer, Hub, LocalServer]


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_hf_is_pinned_to_the_commit(revision: str, tmp_path: Path, hub: HubServers) -> None:
    found = fetcher(tmp_path).find("legal", f"hf://acme/legal{revision}")
    assert found.source == f"hf://acme/legal@{COMMIT}"
    wanted = contents(tmp_path / "repos" / "acme" / "legal")
    del wanted["README.md"]
    assert contents(found.folder) == wanted
    found.close()
    resolved = [asked.path for asked in hub[0].asked if "/resolve/" in asked.path]
    assert resolved
    assert all(f"/resolve/{COMMIT}/" in path for path in resolved)


def test_hf_reads_a_folder_of_a_repository(tmp_path: Path, hub: HubServers) -> None:
    folder = good_adapter(2).write(tmp_path / "repos" / "acme" / "many" / "loras" / "tax")
    found = fetcher(tmp_path).find("tax", "hf://acme/many@main/loras/tax")
    assert found.source == f"hf://acme/many@{COMMIT}/loras/tax"
    assert contents(found.folder) == contents(folder)
    found.close()


def test_the_token_goes_to_the_hub_and_nowhere_else(
    tmp_path: Path, hub: HubServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, answers, store = hub
    answers.private = True
    with pytest.raises(SourceNotFound, match="HF_TOKEN"):
        fetcher(tmp_path).find("legal", "hf://acme/legal")
    monkeypatch.setenv("HF_TOKEN", answers.token)
    fetcher(tmp_path).find("legal", "hf://acme/legal").close()
    assert store.asked
    assert not any("authorization" in asked.headers for asked in store.asked)


def test_what_the_hub_vouches_for_is_checked(tmp_path: Path, hub: HubServers) -> None:
    hub[1].corrupt = True
    with pytest.raises(AdapterInvalid, match="as its host says"):
        fetcher(tmp_path).find("legal", "hf://acme/legal")
    assert not (tmp_path / "downloads").exists()


def test_promise_9_the_hubs_redirects_are_checked_too(tmp_path: Path, hub: HubServers) -> None:
    """The operator named the hub, and so its address; where it redirects to, nobody named."""
    _, answers, store = hub
    answers.store_url = f"https://127.0.0.1:{store.port}"
    with pytest.raises(Forbidden, match="private address"):
        fetcher(tmp_path, SourcePolicy()).find("legal", "hf://acme/legal")
    assert store.asked == []


@pytest.mark.parametrize("source", ["hf://acme/nothing", "hf://acme/legal@nobranch"])
def test_the_hub_has_no_such_thing(source: str, tmp_path: Path, hub: HubServers) -> None:
    with pytest.raises(SourceNotFound):
        fetcher(tmp_path).find("legal", source)


# Stores


@pytest.fixture
def bucket(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of its own with an adapter at `loras/legal`."""
    name = f"b-{hashlib.sha1(str(tmp_path).encode()).hexdigest()[:20]}"
    put_folder(s3, name, "loras/legal", good_adapter(1).write(tmp_path / "legal"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return name


def test_s3_brings_the_same_bytes(bucket: str, tmp_path: Path) -> None:
    found = fetcher(tmp_path).find("legal", f"s3://{bucket}/loras/legal/")
    assert found.source == f"s3://{bucket}/loras/legal"
    assert contents(found.folder) == contents(tmp_path / "legal")
    found.close()


def test_s3_without_keys_reads_what_everybody_may(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    found = fetcher(tmp_path).find("legal", f"s3://{bucket}/loras/legal")
    assert contents(found.folder) == contents(tmp_path / "legal")
    found.close()


@pytest.mark.parametrize("path", ["loras", "loras/nobody", "loras/lega"])
def test_s3_has_no_such_folder(path: str, bucket: str, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        fetcher(tmp_path).find("legal", f"s3://{bucket}/{path}")


def test_s3_has_no_such_bucket(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        fetcher(tmp_path).find("legal", "s3://nobodys-bucket/x")


def test_a_store_that_does_not_answer_is_unreachable(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalServer(lambda asked: Reply(500, b"topsecret")) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        with pytest.raises(SourceUnreachable) as caught:
            fetcher(tmp_path).find("legal", f"s3://{bucket}/loras/legal")
    assert "topsecret" not in str(caught.value) + caplog.text


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleStore]:
    """A store with an adapter at adapters/loras/legal."""
    good_adapter(1).write(tmp_path / "gs" / "adapters" / "loras" / "legal")
    store = GoogleStore(tmp_path / "gs")
    with LocalServer(store) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield store


def test_gs_brings_the_same_bytes(google: GoogleStore, tmp_path: Path) -> None:
    found = fetcher(tmp_path).find("legal", "gs://adapters/loras/legal")
    assert found.source == "gs://adapters/loras/legal"
    assert contents(found.folder) == contents(tmp_path / "gs" / "adapters" / "loras" / "legal")
    found.close()


def test_gs_says_what_is_wrong(google: GoogleStore, tmp_path: Path) -> None:
    for source in ("gs://adapters/loras/nobody", "gs://nobodys/loras"):
        with pytest.raises(SourceNotFound):
            fetcher(tmp_path).find("legal", source)
    google.forbidden = True
    with pytest.raises(SourceDenied) as caught:
        fetcher(tmp_path).find("legal", "gs://adapters/loras/legal")
    assert "secretkey" not in str(caught.value)
