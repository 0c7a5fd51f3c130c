"""A sample of the crash points of every operation; `make crash` goes through all of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.operations import OPERATIONS
from tests.crash.planted import PLANTS

ROOT = Path(__file__).resolve().parents[2]
STRIDE = 17
"""Every seventeenth step of each operation: about thirty points."""
GROUPS = 3
"""So that no test takes long."""


def crash(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the crash tests in a process that has no threads."""
    command = [sys.executable, "-m", "tests.crash", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("group", range(GROUPS))
def test_promises_1_3_4_and_8_survive_a_kill_at_any_step(group: int) -> None:
    names = list(OPERATIONS)[group::GROUPS]
    only = [part for name in names for part in ("--only", name)]
    done = crash("--stride", str(STRIDE), "--first-step", str(group), *only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name}: " in done.stdout for name in names)


@pytest.mark.timeout(180)
def test_promise_8_survives_a_kill_of_the_restart_that_mends_a_kill() -> None:
    done = crash(
        *("--only", "unload with purge", "--twice", "--stride", "22", "--first-step", "12")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(0 of them during a restart)" not in done.stdout


@pytest.mark.timeout(180)
def test_planted_bugs_are_found() -> None:
    done = crash("--planted")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(PLANTS)} of {len(PLANTS)} planted bugs found" in done.stdout
