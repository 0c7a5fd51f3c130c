"""Whatever happens in a simulated world, every checker agrees after every step."""

import os
import subprocess
import sys

import pytest

from tests.simulation.smoke import CHUNK, SMOKE_SEEDS, smoke
from tests.simulation.world import run

ONE_SEED = ("--level", "1", "--seed", "6", "--trace", "--steps", "300")


@pytest.mark.parametrize("first", range(SMOKE_SEEDS.start, SMOKE_SEEDS.stop, CHUNK))
def test_no_promise_is_broken_in_simulated_worlds(first: int) -> None:
    assert smoke(first).steps > CHUNK * 50


def test_an_equal_seed_gives_an_equal_trace() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        run(6, trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 100


def test_the_trace_does_not_depend_on_the_process() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", *ONE_SEED],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
