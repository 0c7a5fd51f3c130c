"""Finds the durable steps of whatever runs in this process, and kills it with SIGKILL at one.

Three rules:

1. Steps are found, not listed: what changes the disk is seen by the interpreter's audit hook and by
   the few calls that have no audit event, the registry by its transactions, engine commands and
   reports by the contract and by what is fed to the core.
2. A step is announced before it is done. What is left by a kill just after it is what a kill just
   before the next one leaves.
3. A step is known by its words and by how often they were said before, not by its place in the
   run: threads may take turns in another order the next time.
"""

import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy.engine.default import DefaultDialect

from lorry.artifacts import cache
from lorry.lifecycle import events as ev
from lorry.supervisor.shell import Shell

Step = tuple[str, int]
"""What is about to happen, and how often it has happened before in this run."""


def words(step: Step) -> str:
    """For people."""
    label, before = step
    return f"{label} #{before}"


REPORTS = (
    ev.Fetched,
    ev.FetchFailed,
    ev.Loaded,
    ev.LoadFailed,
    ev.Unloaded,
    ev.UnloadFailed,
    ev.PinSet,
    ev.PinFailed,
    ev.Committed,
    ev.CommitFailed,
)
PATH_EVENTS = {
    "os.rename": (2, None),
    "os.remove": (1, 1),
    "os.mkdir": (1, 2),
    "os.rmdir": (1, 1),
    "os.symlink": (2, None),
    "os.link": (2, None),
    "os.truncate": (1, None),
    "os.utime": (1, None),
    "shutil.rmtree": (1, None),
}
"""Audit events of changes on the disk: how many of their arguments are paths, and which one is the
folder that a path is relative to."""

TENSORS = 28
"""Of the adapters that are written here."""

CHANGING = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR
_DRAWN = re.compile(r"[0-9a-f]{16,64}")


@dataclass(slots=True)
class Steps:
    """The steps of one process."""

    root: Path
    """Only what happens below it counts."""
    target: Step | None = None
    trail: list[Step] = field(default_factory=list)
    armed: bool = False
    _seen: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _names: dict[str, str] = field(default_factory=dict)

    def take(self, label: str) -> None:
        """A step is about to be done."""
        if not self.armed:
            return
        with self._lock:
            step = (label, self._seen[label])
            self._seen[label] += 1
            self.trail.append(step)
            if step == self.target:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_disk(self, what: str, *paths: object) -> None:
        """A change of files, if they are ours."""
        if self.armed:
            shown = [self._shown(path) for path in paths]
            if all(shown):
                self.take(f"{what} {' -> '.join(map(str, shown))}")

    def _shown(self, path: object) -> str | None:
        """A path without what was drawn at random; None for one outside of the root."""
        if isinstance(path, int):
            path = _place_of(path)
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if text.startswith("/proc/"):
            return "memory"
        if not text.startswith(f"{self.root}/"):
            return None
        return _DRAWN.sub(self._name, text[len(str(self.root)) + 1 :])

    def _name(self, drawn: re.Match[str]) -> str:
        """Versions keep their first digits, which are the same in every run."""
        return f"{drawn[0][:4]}.." if len(drawn[0]) == 64 else "*"


def watch(steps: Steps) -> None:
    """From now on this process tells `steps` what it does. Cannot be taken back."""
    sys.addaudithook(lambda event, arguments: _audit(steps, event, arguments))
    _before(os, "fsync", lambda fd, *_: steps.on_disk("fsync", fd))
    _before(os, "pwrite", lambda fd, *_: steps.on_disk("write", fd))
    _before(shutil, "copyfileobj", lambda _, new, *__: steps.on_disk("write", new.fileno()))
    _around_commits(steps)
    cache.pieces = _within_weights(steps, cache.pieces)
    feed = Shell.feed

    def fed(shell: Shell, event: ev.Event) -> None:
        if isinstance(event, REPORTS):
            steps.take(f"report {type(event).__name__}")
        feed(shell, event)

    Shell.feed = fed  # type: ignore[method-assign]


def _audit(steps: Steps, event: str, arguments: tuple[Any, ...]) -> None:
    if not steps.armed:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & CHANGING and not isinstance(path, int):
            steps.on_disk("open", path)
    elif event in PATH_EVENTS:
        count, folder = PATH_EVENTS[event]
        paths = arguments[:count]
        if folder is not None and arguments[folder] >= 0:
            paths = (f"{_place_of(arguments[folder])}/{os.fsdecode(paths[0])}",)
        steps.on_disk(event.partition(".")[2], *paths)


def _within_weights(steps: Steps, pieces: Callable[..., Any]) -> Callable[..., Any]:
    """Weights are written piece by piece; of these moments the first and one in the middle."""
    calls = count()

    def told(*arguments: Any) -> Any:
        if next(calls) % TENSORS in (0, TENSORS // 2):
            steps.take("write a part of the weights")
        return pieces(*arguments)

    return told


def _place_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - it has no audit event


def _before(module: Any, name: str, tell: Callable[..., None]) -> None:
    """Call `tell` with its arguments before a function that has no audit event."""
    function = getattr(module, name)

    def told(*arguments: Any, **named: Any) -> Any:
        tell(*arguments)
        return function(*arguments, **named)

    setattr(module, name, told)


def _around_commits(steps: Steps) -> None:
    commit = DefaultDialect.do_commit

    def committed(dialect: Any, connection: Any) -> None:
        steps.take("registry: before the commit")
        commit(dialect, connection)
        steps.take("registry: after the commit")

    DefaultDialect.do_commit = committed  # type: ignore[method-assign]
