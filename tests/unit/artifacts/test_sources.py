"""What a caller may name as a source, and that nothing outside the roots is touched."""

import os
from pathlib import Path

import pytest

from lorry.artifacts.sources import resolve_local
from lorry.errors import AdapterInvalid, Forbidden, RequestInvalid, SourceNotFound


def test_an_absolute_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_local(str(tmp_path), []) == tmp_path


def test_a_relative_folder_is_taken_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_local("adapter", []) == tmp_path / "adapter"
    assert resolve_local("./adapter/../adapter/", []) == tmp_path / "adapter"


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_local("~/adapter", []) == tmp_path / "adapter"


def test_a_file_url_is_decoded(tmp_path: Path) -> None:
    folder = tmp_path / "with blank"
    folder.mkdir()
    assert resolve_local(folder.as_uri(), []) == folder
    assert resolve_local(f"file://localhost{folder}".replace(" ", "%20"), []) == folder


@pytest.mark.parametrize(
    "source",
    [
        "",
        "  ",
        "a\x00b",
        "~\x00",
        "a\nb",
        "a\x1fb",
        "file://host/a",
        "file:a",
        "file:///a%00",
        "file:///a?b",
        "file://[",
        "lone\ud800",
        "x" * 5000,
    ],
)
def test_what_cannot_be_a_path_is_refused(source: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        resolve_local(source, [])
    assert caught.value.param == "source"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=str(tmp_path / "nowhere")):
        resolve_local(str(tmp_path / "nowhere"), [tmp_path])


def test_a_hub_name_that_is_not_on_disk_is_not_found() -> None:
    with pytest.raises(SourceNotFound, match="someone/adapter"):
        resolve_local("someone/adapter", [])


def test_a_file_is_refused_as_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(AdapterInvalid, match="not a folder"):
        resolve_local(str(tmp_path / "file"), [])
    with pytest.raises(SourceNotFound):
        resolve_local(str(tmp_path / "file" / "below"), [])


def test_a_link_that_leads_in_a_circle_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SourceNotFound):
        resolve_local(str(tmp_path / "loop"), [tmp_path])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed folder beside a forbidden one, with links from the first to the second."""
    root = tmp_path / "root"
    (root / "adapter").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    os.mkfifo(outside / "canary")
    (tmp_path / "root-twin").mkdir()
    (root / "out").symlink_to(outside)
    (root / "in").symlink_to(root / "adapter")
    return root


@pytest.mark.parametrize(
    "path",
    ["../outside", "out", "out/canary", "../outside/nothing", "../root-twin", "adapter/../../x"],
)
def test_what_leads_outside_the_roots_is_forbidden(root: Path, path: str) -> None:
    with pytest.raises(Forbidden):
        resolve_local(f"{root}/{path}", [root])


def test_a_link_inside_the_roots_is_allowed(root: Path) -> None:
    assert resolve_local(str(root / "in"), [root]) == root / "adapter"


def test_any_of_several_roots_allows(root: Path, tmp_path: Path) -> None:
    assert resolve_local(str(tmp_path / "outside"), [root, tmp_path / "outside"])


def test_a_root_that_is_a_link_is_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert resolve_local(str(root / "adapter"), [tmp_path / "alias"]) == root / "adapter"
