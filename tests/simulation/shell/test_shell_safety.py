"""Whole worlds of level two; a finding names the promise that it breaks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.shell.life import run
from tests.simulation.shell.smoke import CHUNK, SMOKE_SEEDS, smoke

ROOT = Path(__file__).resolve().parents[3]

TRACED = 6
"""A seed with a kill and several faults."""


@pytest.mark.parametrize("first", range(SMOKE_SEEDS.start, SMOKE_SEEDS.stop, CHUNK))
def test_promises_1_to_8_10_and_11_hold_in_whole_lives_of_the_server(first: int) -> None:
    assert smoke(first).steps > 100 * CHUNK


def test_a_server_killed_in_the_moment_in_which_a_request_fails_ends_the_world_well() -> None:
    """What its process raises then is nobody's finding, nor the simulation's end."""
    run(2356)


def test_the_same_seed_gives_the_same_trace_in_any_process() -> None:
    lines: list[str] = []
    run(TRACED, lines.append)
    script = f"from tests.simulation.shell.life import run; run({TRACED}, print)"
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    assert done.stdout.decode().splitlines() == lines
    assert len(lines) > 100
