"""The examples of docs/cli.md and docs/client.md, run against the whole app on a real socket, in
the order in which a reader meets them."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorry.cli import main
from tests.fixtures.adapters import good_adapter
from tests.fixtures.live_server import LiveServer, live_server

DOCS = Path(__file__).resolve().parents[1] / "docs"
SHELL = "bash"
"""Blocks of this language are run; those of `sh` need a model and are only shown."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """With the folders that the pages speak of."""
    folders = tmp_path / "adapters"
    for seed, name in enumerate(("legal-v1", "legal-v2", "poet")):
        good_adapter(seed).write(folders / name)
    (folders / "broken").mkdir()
    monkeypatch.delenv("LORRY_API_KEY", raising=False)
    with live_server(tmp_path) as server:
        monkeypatch.setenv("LORRY_URL", server.url)
        yield server


def blocks(page: str, language: str, server: LiveServer) -> list[str]:
    """The code of a page, with this server's places."""
    text = (DOCS / page).read_text()
    text = text.replace("http://127.0.0.1:8000", server.url)
    text = text.replace("/adapters/", f"{server.inside.folder}/adapters/")
    text = text.replace("/v1" + f"{server.inside.folder}/adapters/", "/v1/adapters/")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_commands_of_the_page_run(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for block in blocks("cli.md", SHELL, server) for line in block.splitlines()]
    assert len(lines) > 20
    for line in lines:
        if "|" in line:
            program = f"{shlex.quote(sys.executable)} -m lorry"
            done = subprocess.run(
                ["bash", "-c", line.replace("lorry ", f"{program} ")],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, (line, done.stderr)
            continue
        words = shlex.split(line)
        assert words[0] == "lorry", line
        with pytest.raises(SystemExit) as caught:
            main(words[1:])
        assert not caught.value.code, (line, capsys.readouterr().err)


def test_the_code_of_the_page_runs(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    code = blocks("client.md", "python", server)
    assert len(code) > 8
    for block in code:
        exec(compile(block, "docs/client.md", "exec"), names)
    said = capsys.readouterr().out
    for part in ("legal ", "adapter_invalid 422", "The adapter 'nobody' cannot be found."):
        assert part in said, part
