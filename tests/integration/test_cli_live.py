"""The command line against the whole app on a real socket, in this process: what it says, its JSON
and its exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorry import Client
from lorry.cli import main
from lorry.cli.chat import Talk
from lorry.cli.server import complete_name
from lorry.cli.top import Look, Watcher, facts_of, read_samples
from tests.fixtures.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two slots, room for three."""
    with live_server(tmp_path_factory.mktemp("cli")) as server:
        yield server


class Shell:
    """Runs `lorry` in this process."""

    def __init__(self, server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.server = server
        self._capsys = capsys
        self.out = self.err = ""

    def lorry(self, *arguments: str) -> int:
        """The exit code; what was said is in `out` and `err`."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.out + self.err
        return int(caught.value.code or 0)

    def json(self, *arguments: str) -> Any:
        """What a command with `--json` writes, when it succeeds."""
        assert self.lorry(*arguments, "--json") == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def shell(
    shared: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shell]:
    monkeypatch.setenv("LORRY_URL", shared.url)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LORRY_API_KEY", raising=False)
    yield Shell(shared, capsys)
    with Client(shared.url) as client:
        for adapter in client.adapters:
            client.adapters.unload(adapter.name, drain_timeout_s=0, purge=True)


def test_replace_needs_what_it_replaces_and_may_insist_on_its_version(shell: Shell) -> None:
    server = shell.server
    assert shell.lorry("replace", "x", server.adapter(1)) == 1
    assert "adapter_not_found" in shell.err
    first = shell.json("load", "x", server.adapter(1))
    assert shell.lorry("replace", "x", server.adapter(2), "--if-match", "f" * 12) == 1
    assert "version_mismatch, HTTP 409" in shell.err
    second = shell.json("replace", "x", server.adapter(2), "--if-match", first["version"][:12])
    assert second["previous"] == [first["version"]]
    assert shell.lorry("replace", "x", server.adapter(3), "--drain-first", "--pin") == 0
    assert shell.lorry("rollback", "x", "--to", first["version"]) == 0
    assert first["short_version"] in shell.out
    assert shell.lorry("rollback", "x", "--to", "0" * 12) == 1


def test_load_with_if_match_and_register_only(shell: Shell) -> None:
    server = shell.server
    first = shell.json("load", "x", server.adapter(1), "--register-only")
    assert first["state"] != "resident"
    assert shell.lorry("load", "x", server.adapter(2), "--if-match", first["version"]) == 0
    assert shell.json("prefetch", "x")["state"] == "resident"
    assert shell.lorry("unload", "x", "--if-match", first["version"]) == 1


def test_events_are_shown_with_reasons(shell: Shell) -> None:
    shell.lorry("load", "x", shell.server.adapter(1))
    shell.lorry("pin", "x")
    assert shell.lorry("events", "--last", "1") == 0
    assert "pinned" in shell.out
    assert len(shell.out.splitlines()) == 1
    told = shell.json("events", "--name", "x", "--after", "1")
    assert {event["name"] for event in told} == {"x"}
    assert told[-1]["kind"] == "pinned"
    assert shell.json("events", "--after", str(told[-1]["sequence"])) == []
    assert shell.lorry("events", "--last", "0") == 0
    assert "No events" in shell.out


def test_top_shows_slots_cache_queue_and_rates(shell: Shell) -> None:
    for name, seed in (("x", 1), ("y", 2)):
        shell.lorry("load", name, shell.server.adapter(seed))
    with Client(shell.server.url) as client:
        client.chat("x", "hello", max_tokens=3)
    told = shell.json("top", "--interval", "0.1")
    assert told["registered"] == 2
    assert told["host_cache"]["versions"] == 2
    assert told["host_cache"]["versions_max"] == 3
    assert told["hit_ratio"] == 1.0
    assert {row["name"] for row in told["adapters"]} == {"x", "y"}
    assert told["tokens_per_s"] == 0
    assert shell.lorry("top", "--once", "--interval", "0.1") == 0
    for part in ("1 of 2: ", "2 of 3 versions", "100.0% of requests", "TOKENS/S", "slot 0"):
        assert part in shell.out, part


def test_tops_rates_are_those_of_the_servers_own_counters(shell: Shell) -> None:
    shell.lorry("load", "x", shell.server.adapter(1))
    with Client(shell.server.url) as client:
        watcher = Watcher(client)
        _, first = watcher.look()
        client.chat("x", "hello", max_tokens=5)
        client.chat("tiny", "hello", max_tokens=5)
        _, second = watcher.look()
    assert first["tokens_per_s"] is None
    assert 0 < second["adapters"][0]["tokens_per_s"] < second["tokens_per_s"]


def test_rates_are_per_second_and_survive_a_restart_of_the_server() -> None:
    text = 'lorry_adapter_generation_tokens_total{{adapter="x"}} {}\n'

    def look(at_s: float, tokens: int) -> Look:
        from lorry.client import Adapter

        return Look(at_s, (), (Adapter(name="x"),), read_samples(text.format(tokens)))

    def rate(now: Look, before: Look | None) -> object:
        return facts_of(now, before)["adapters"][0]["tokens_per_s"]

    assert rate(look(10, 100), None) is None
    assert rate(look(12, 150), look(10, 100)) == 25
    assert rate(look(12, 5), look(10, 100)) == 0


def test_a_check_by_the_server_names_each_problem_and_its_fix(shell: Shell, tmp_path: Path) -> None:
    good = shell.server.adapter(1)
    assert shell.lorry("check", good) == 0
    assert "can be served" in shell.out
    assert "would evict" in shell.out
    assert shell.json("check", good)["ok"] is True
    assert shell.lorry("check", str(tmp_path)) == 1
    assert "fix: " in shell.out
    assert shell.lorry("check", str(tmp_path), "--json") == 1
    assert json.loads(shell.out)["problems"]


def test_diff_compares_folders_and_adapters(shell: Shell, tmp_path: Path) -> None:
    a, b = shell.server.adapter(1), shell.server.adapter(2)
    assert shell.lorry("diff", a, b) == 0
    assert "model.layers.0.mlp.down_proj" in shell.out
    assert "DIFFERENCE" in shell.out
    assert shell.json("diff", a, a)["same"] is True
    assert shell.lorry("diff", a, a) == 0
    assert "Both compute the same." in shell.out
    first = shell.json("load", "x", a)
    shell.lorry("replace", "x", b)
    assert shell.json("diff", "x", b)["same"] is True
    assert shell.json("diff", f"x@{first['short_version']}", a)["same"] is True
    assert shell.json("diff", "x", a)["same"] is False
    assert shell.lorry("diff", "x", "nobody") == 1
    assert "adapter_not_found" in shell.err
    assert shell.lorry("diff", a, str(tmp_path / "none")) == 1
    assert "Give the folder that holds adapter_config.json" in shell.err


def test_diff_shows_the_furthest_modules_unless_all_are_asked_for(shell: Shell) -> None:
    a = shell.server.adapter(1)
    from lorry.cli import diff

    shown, diff.MODULES_SHOWN = diff.MODULES_SHOWN, 2
    try:
        shell.lorry("diff", a, shell.server.adapter(2))
        assert "and 12 more" in shell.out
        shell.lorry("diff", a, shell.server.adapter(2), "--all")
        assert "more" not in shell.out
    finally:
        diff.MODULES_SHOWN = shown


def test_compare_shows_answers_side_by_side_and_errors_beside_them(shell: Shell) -> None:
    shell.lorry("load", "x", shell.server.adapter(1))
    shell.lorry("load", "a,b", shell.server.adapter(2))
    told = shell.json("compare", "hello", "--adapters", "x,tiny", "--adapters", "a,b")
    assert [answer["adapter"] for answer in told["answers"]] == ["x", "tiny", "a,b"]
    assert all(answer["error"] is None for answer in told["answers"])
    assert shell.lorry("compare", "hello", "--adapters", "x,nobody", "--max-tokens", "3") == 1
    assert "adapter_not_found" in shell.out
    assert "x" in shell.out.splitlines()[1]
    assert shell.lorry("compare", "hello", "--adapters", "x", "--completion") == 0
    assert shell.lorry("compare", "hello", "--adapters", ", ") == 2


def test_compare_puts_answers_below_each_other_where_columns_were_too_narrow(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert shell.lorry("compare", "hello", "--adapters", "tiny,tiny-alias") == 0
    assert "ADAPTER" in shell.out


def test_chat_remembers_obeys_commands_and_forgets(shell: Shell) -> None:
    shell.lorry("load", "x", shell.server.adapter(1))
    with Client(shell.server.url) as client:
        talk = Talk(client, "x", "Be brief.", {"max_tokens": 3})
        assert not talk.take("hello")
        assert not talk.take("   ")
        assert [message["role"] for message in talk.messages] == ["user", "assistant"]
        assert not talk.take("/use tiny")
        assert talk.model == "tiny"
        talk.take("again")
        assert len(talk.messages) == 4
        talk.take("/reset")
        assert talk.messages == []
        talk.take("/system")
        talk.take("/bogus")
        talk.take("/help")
        assert talk.take("/exit")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("chat", "nobody"), 1),
        (("compare", "hello"), 2),
        (("completion", "tcsh"), 2),
        (("ls", "--watch", "--interval", "0"), 2),
        (("events", "--after", "soon"), 2),
        (("rollback", "nobody", "--to", "x"), 1),
        (("diff", "a"), 2),
        (("load", "x", "s3://bucket/none"), 1),
        (("show", "\udcff"), 1),
        (("load", "x", "/\udcff"), 1),
        (("compare", "\udcff", "--adapters", "tiny"), 1),
        (("compare", "hello", "--adapters", "tiny", "--temperature", "nan"), 2),
        (("ls", "--watch", "--interval", "nan"), 2),
        (("ls", "--api-key", "schl\u00fcssel"), 1),
        (("ls", "--api-key", "two\nlines"), 1),
    ],
)
def test_mistakes_have_their_code(shell: Shell, arguments: tuple[str, ...], code: int) -> None:
    assert shell.lorry(*arguments) == code
    assert shell.err or shell.out


def test_names_are_completed_from_the_server(shell: Shell) -> None:
    class Context:
        params: dict[str, str | None] = {"url": shell.server.url, "api_key": None}  # noqa: RUF012

    shell.lorry("load", "legal", shell.server.adapter(1))
    assert complete_name(Context(), "le") == ["legal"]  # type: ignore[arg-type]
    assert complete_name(Context(), "x") == []  # type: ignore[arg-type]
    Context.params["url"] = "http://127.0.0.1:1"
    assert complete_name(Context(), "") == []  # type: ignore[arg-type]


@pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
def test_completion_scripts_call_lorry(shell: Shell, shell_name: str) -> None:
    assert shell.lorry("completion", shell_name) == 0
    assert f"_LORRY_COMPLETE=complete_{shell_name}" in shell.out


def test_a_name_that_the_terminal_cannot_show_is_shown_as_far_as_it_can() -> None:
    """In another process, whose terminal knows ASCII alone."""
    script = "import sys; from lorry.cli import main; main(['explain', '\u6771'])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment)
    assert done.returncode == 2
    assert b"\\u6771" in done.stderr
    assert b"Traceback" not in done.stderr
