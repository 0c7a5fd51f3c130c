"""The command line against a real server: what it does, what it says, and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.api import Api
from tests.fixtures.server_process import ServerProcess


class Shell:
    """Runs `lorry` as a person does."""

    def __init__(self, url: str) -> None:
        """Commands go to the server at `url`."""
        self._environment = {**os.environ, "LORRY_URL": url, "COLUMNS": "200"}
        self.out = ""
        self.err = ""

    def lorry(self, *arguments: str, cwd: Path | None = None) -> int:
        """The exit code; what was said is in `out` and `err`."""
        done = subprocess.run(
            [sys.executable, "-m", "lorry", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=self._environment,
            cwd=cwd,
        )
        self.out, self.err = done.stdout, done.stderr
        assert "Traceback" not in self.out + self.err
        return done.returncode

    def json(self, *arguments: str) -> object:
        """What a command with `--json` writes, when it succeeds."""
        assert self.lorry(*arguments, "--json") == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def shell(roomy: Api, roomy_server: ServerProcess) -> Shell:
    """`lorry` beside a server with much room, where nothing is loaded."""
    return Shell(roomy_server.url)


def folder(roomy: Api, name: str) -> Path:
    """Where an adapter of the common ground lies."""
    return roomy.ground.adapter(name)


def test_an_adapter_is_loaded_replaced_rolled_back_and_unloaded(roomy: Api, shell: Shell) -> None:
    a, b = folder(roomy, "A"), folder(roomy, "B")
    assert shell.lorry("load", "x", str(a)) == 0
    assert "x is resident, version " in shell.out
    first = shell.json("show", "x")
    assert isinstance(first, dict)
    assert shell.lorry("load", "x", str(b), "--if-match", first["version"]) == 0
    second = shell.json("show", "x")
    assert isinstance(second, dict)
    assert second["version"] != first["version"]
    assert shell.lorry("rollback", "x") == 0
    assert first["short_version"] in shell.out
    assert shell.lorry("unload", "x", "--drain-timeout", "1") == 0
    assert "x is unloaded" in shell.out
    assert shell.json("ls") == []


def test_the_list_and_pins_are_what_the_server_says(roomy: Api, shell: Shell) -> None:
    assert shell.lorry("ls") == 0
    assert "No adapters" in shell.out
    loaded = shell.json("load", "x", str(folder(roomy, "A")), "--pin", "--label", "team=law")
    listed = shell.json("ls")
    assert isinstance(loaded, dict)
    assert isinstance(listed, list)
    assert loaded["pinned"] is True
    assert loaded["labels"] == {"team": "law"}
    assert [adapter["name"] for adapter in listed] == ["x"]
    assert shell.lorry("unpin", "x") == 0
    assert roomy.client.get("/v1/adapters/x").json()["pinned"] is False
    assert shell.lorry("pin", "x") == 0
    assert roomy.client.get("/v1/adapters/x").json()["pinned"] is True
    assert shell.lorry("ls") == 0
    assert loaded["short_version"] in shell.out


def test_a_relative_path_is_the_callers(roomy: Api, shell: Shell) -> None:
    here = folder(roomy, "A")
    assert shell.lorry("load", "x", here.name, cwd=here.parent) == 0, shell.err


def test_a_name_that_is_taken_needs_replace(roomy: Api, shell: Shell) -> None:
    a = str(folder(roomy, "A"))
    assert shell.lorry("load", "x", a) == 0
    assert shell.lorry("load", "x", a) == 1
    assert "adapter_conflict" in shell.err
    assert shell.lorry("load", "x", a, "--replace") == 0


def test_refusals_are_code_1_with_the_servers_words_and_what_to_do(
    roomy: Api, shell: Shell, tmp_path: Path
) -> None:
    for arguments, code in (
        (("load", "x", str(tmp_path / "none")), "source_not_found"),
        (("load", "x", str(tmp_path)), "adapter_invalid"),
        (("show", "none"), "adapter_not_found"),
        (("unload", "none"), "adapter_not_found"),
        (("pin", "none"), "adapter_not_found"),
        (("rollback", "none"), "adapter_not_found"),
    ):
        assert shell.lorry(*arguments) == 1, arguments
        assert code in shell.err, arguments
        assert shell.out == ""


def test_names_with_slashes_blanks_and_accents_work(roomy: Api, shell: Shell) -> None:
    for name in ("team/x", "x y", "café", "a%2Fb", "q?x#y"):
        assert shell.lorry("load", name, str(folder(roomy, "A"))) == 0, shell.err
        assert shell.lorry("show", name) == 0, shell.err
        assert shell.lorry("unload", name) == 0, shell.err
