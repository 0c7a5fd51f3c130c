"""Work in forked children of a process that has imported everything and started nothing: cheap
enough to kill one at every step."""

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 60.0
"""For one child; only one that hangs needs it."""


class Channel:
    """From a child to its parent: what was said before a kill arrives."""

    def __init__(self, descriptor: int) -> None:
        """The writing end of a pipe."""
        self._descriptor = descriptor

    def say(self, **facts: Any) -> None:
        """Add to what the parent learns."""
        data = json.dumps(facts).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


@dataclass(slots=True)
class Outcome:
    """What became of a child."""

    said: dict[str, Any] = field(default_factory=dict)
    killed: bool = False
    """By SIGKILL, its own or, with `hung`, ours."""
    hung: bool = False

    @property
    def failure(self) -> str:
        """Why it ended as it should not have; empty when it did."""
        if self.hung:
            return f"it hung for {LIMIT_S:g} s"
        return str(self.said.get("failure", ""))


def forked(work: Callable[[Channel], None]) -> Outcome:
    """Run `work` in a child and wait for its end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_in_child(work, Channel(writing))
    os.close(writing)
    try:
        data, hung = _read(reading, pid)
    finally:
        os.close(reading)
    status = os.waitpid(pid, 0)[1]
    outcome = Outcome(killed=os.WIFSIGNALED(status), hung=hung)
    for line in data.splitlines():
        outcome.said.update(json.loads(line))
    if not outcome.killed and status != 0:
        outcome.said.setdefault("failure", f"it ended with status {status}")
    return outcome


def _run_in_child(work: Callable[[Channel], None], channel: Channel) -> None:
    status = 1
    try:
        work(channel)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the parent tells of it
        channel.say(failure=traceback.format_exc())
    finally:
        os._exit(status)


def _read(reading: int, pid: int) -> tuple[bytes, bool]:
    """All that the child says, and whether it had to be ended."""
    data, deadline_s = bytearray(), time.monotonic() + LIMIT_S
    while True:
        ready = select.select([reading], [], [], max(0.0, deadline_s - time.monotonic()))[0]
        if not ready:
            os.kill(pid, signal.SIGKILL)
            return bytes(data), True
        piece = os.read(reading, 1 << 16)
        if not piece:
            return bytes(data), False
        data += piece
