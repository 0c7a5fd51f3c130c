"""What the README and docs/ name exists: flags, variables, commands, targets of make, links."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from lorry.cli.main import app
from lorry.config.fields import specs
from tests import proof

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text()

CLIENT_FLAGS = {
    *("--url", "--api-key", "--json", "--replace", "--pin", "--if-match", "--label"),
    *("--register-only", "--drain-timeout", "--purge", "--once", "--port", "--print-model"),
    *("--version", "--help", "--config"),
    *("--base", "--expected-digest"),
}
"""Flags of the commands that are no settings; their help is compared below."""

FLAGS_OF_OTHERS = {
    *("--no-deps", "--fix", "--seeds", "--seed", "--trace", "--help", "--extra-index-url"),
    *("--concurrency", "--adapters", "--target", "--only", "--folders", "--twice"),
}
VARIABLES_OF_CLIENTS = {"LORRY_URL", "LORRY_COMPLETE", "LORRY_CONFIG", "LORRY_PEERS"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> Iterator[str]:
    """The code blocks of one language."""
    yield from re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def flags_of_commands() -> set[str]:
    """What the commands take, whatever they are."""
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    return {flag for each in commands for option in each.params for flag in option.opts}


@pages
def test_flags_exist(page: Path) -> None:
    own = {flag for spec in specs() for flag in (spec.flag, *spec.aliases)}
    known = own | CLIENT_FLAGS | FLAGS_OF_OTHERS | flags_of_commands()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text()))
    assert named - known == set()


@pages
def test_variables_exist(page: Path) -> None:
    known = {spec.variable for spec in specs()} | VARIABLES_OF_CLIENTS
    assert set(re.findall(r"LORRY_[A-Z_]*[A-Z]", page.read_text())) - known == set()


@pages
def test_targets_of_make_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z]+)", page.read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pages
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def commands(block: str) -> Iterator[list[str]]:
    """The words of each command; one goes on over line ends that are quoted."""
    command = ""
    for line in block.replace("\\\n", " ").splitlines():
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:
            command += "\n"
            continue
        command = ""
        yield words


@pages
def test_bodies_of_curl_are_json(page: Path) -> None:
    for block in blocks(page, "bash"):
        for words in commands(block):
            if words[:1] == ["curl"]:
                for flag, body in pairwise(words):
                    if flag == "-d":
                        json.loads(body)


@pages
def test_python_compiles(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


def test_the_readme_has_a_row_for_each_setting_it_should() -> None:
    """The README shows those most needed; docs/settings.md has all, which test_config checks."""
    for flag in ("--max-loras", "--max-cpu-loras", "--max-lora-rank", "--state", "--api-key"):
        assert f"`{flag}" in README


def test_commands_exist() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "lorry", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for command in set(re.findall(r"`lorry ([a-z]+)", README)):
        assert f" {command} " in said, command


def test_the_lists_in_proof_md_are_fresh() -> None:
    page = proof.PAGE.read_text()
    assert proof.refreshed(page) == page, "run: python -m tests.proof"


def test_proof_md_has_every_promise_and_tests_for_each() -> None:
    listed = re.findall(
        r"<!-- tests of promise (\d+) -->\nTests: ([1-9]\d*)\.", proof.PAGE.read_text()
    )
    assert [int(promise) for promise, _ in listed] == list(range(1, 13))
