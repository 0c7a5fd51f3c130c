"""Commands that run until Ctrl-C, and those that a person types into, on pipes and terminals."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorry import Client
from tests.fixtures.live_server import LiveServer, live_server

WAIT_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """With one adapter loaded."""
    folder = tmp_path_factory.mktemp("live")
    with live_server(folder) as server, Client(server.url) as client:
        client.adapters.load("x", server.adapter(1))
        yield server


def start(server: LiveServer, *arguments: str, **options: object) -> subprocess.Popen[str]:
    """`lorry arguments`, with pipes."""
    environment = {**os.environ, "LORRY_URL": server.url, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "lorry", *arguments]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, text=True, env=environment, **given)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "--watch", "--interval", "0.2"),
        ("ls", "--watch", "--interval", "0.2", "--json"),
        ("top", "--interval", "0.2"),
        ("events", "--follow"),
        ("events", "--follow", "--json"),
    ],
)
def test_what_runs_until_ctrl_c_ends_with_it(
    server: LiveServer, arguments: tuple[str, ...]
) -> None:
    process = start(server, *arguments)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line
    if "--json" in arguments:
        json.loads(line)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=WAIT_S)
    assert (process.returncode, said) == (0, "")


def test_a_reader_that_leaves_a_pipe_ends_it_without_a_traceback(server: LiveServer) -> None:
    process = start(server, "ls", "--watch", "--interval", "0.1")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(WAIT_S)
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert "Traceback" not in said


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, server: LiveServer, *arguments: str) -> None:
        ours, theirs = pty.openpty()
        self._screen = ours
        self.process = start(server, *arguments, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.seen = ""

    def until(self, words: str) -> None:
        """Read until the words have been shown."""
        deadline = time.monotonic() + WAIT_S
        while words not in self.seen:
            assert time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self._screen, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(self.seen) from None

    def type(self, text: str) -> None:
        """As a person does."""
        self.seen = ""
        os.write(self._screen, text.encode())

    def end(self) -> int:
        """The exit code."""
        while True:
            try:
                if not os.read(self._screen, 4096):
                    break
            except OSError:
                break
        os.close(self._screen)
        return self.process.wait(WAIT_S)


def test_a_chat_on_a_terminal(server: LiveServer) -> None:
    terminal = Terminal(server, "chat", "x", "--max-tokens", "4")
    terminal.until("x> ")
    terminal.type("hello\n")
    terminal.until("x> ")
    terminal.type("/use nobody\n")
    terminal.until("adapter_not_found")
    terminal.until("x> ")
    terminal.type("/use tiny\n")
    terminal.until("tiny> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen


def test_a_watch_on_a_terminal_ends_with_ctrl_c(server: LiveServer) -> None:
    terminal = Terminal(server, "ls", "--watch", "--interval", "0.2")
    terminal.until("resident")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0


def test_a_chat_takes_lines_from_a_pipe(server: LiveServer) -> None:
    process = start(server, "chat", "x", "--max-tokens", "4", stdin=subprocess.PIPE)
    out, said = process.communicate("hello\n\nagain\n/exit\nnever\n", timeout=WAIT_S)
    assert (process.returncode, said) == (0, "")
    assert out


def test_a_script_for_bash_completes_commands_and_names(server: LiveServer, tmp_path: Path) -> None:
    """Through bash itself, with `lorry` as a program of the path."""
    program = tmp_path / "lorry"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lorry "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(lorry completion bash)"; '
        'complete_at() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _lorry_completion lorry; '
        'echo "${COMPREPLY[*]}"; }; complete_at lorry roll; complete_at lorry show x'
    )
    environment = {**os.environ, "LORRY_URL": server.url}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == ["rollback", "x"], done.stderr
