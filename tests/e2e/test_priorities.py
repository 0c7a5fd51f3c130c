"""Which threads give way to which: what keeps a load short while steps take all cores."""

import os
from pathlib import Path

import psutil

from lorry.engines.embedded.process import COMPUTE_NICENESS, LOADERS
from tests.fixtures.server_process import ServerProcess

NICENESS_FIELD = 16
"""Of /proc/*/stat, counted from behind the command's name; see proc(5)."""


def niceness(stat: Path) -> int:
    """Of one thread."""
    return int(stat.read_text().rpartition(")")[2].split()[NICENESS_FIELD])


def test_promise_11_steps_give_way_to_loads_and_to_the_server(roomy_server: ServerProcess) -> None:
    engine, ours = roomy_server.engine_pid(), psutil.Process().nice()
    threads = {
        int(task.name): niceness(task / "stat") for task in Path(f"/proc/{engine}/task").iterdir()
    }
    assert threads[engine] == min(ours + COMPUTE_NICENESS, 19)
    assert list(threads.values()).count(ours) >= 1 + LOADERS  # the reader and the loaders
    assert psutil.Process(roomy_server.process.pid).nice() == ours


def test_promise_11_the_engine_is_in_the_servers_session(roomy_server: ServerProcess) -> None:
    """Between sessions Linux shares the cores evenly, whatever a thread's niceness is."""
    engine, server = roomy_server.engine_pid(), roomy_server.process.pid
    assert os.getsid(engine) == os.getsid(server)
    assert os.getpgid(engine) != os.getpgid(server)
