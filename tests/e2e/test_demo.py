"""`lorry demo --once`, which is what `make demo ARGS=--once` runs: the real model and adapters."""

import os
import subprocess
import sys

import pytest

DEMO_TIMEOUT_S = 400


@pytest.mark.demo_model
@pytest.mark.slow
@pytest.mark.timeout(DEMO_TIMEOUT_S + 20)
def test_the_demo_shows_five_right_answers_and_ends_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lorry", "demo", "--once"],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEMO_TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (
        *("smollm2", "matey", '"answer": "Paris"', "says the wind", "La réponse est"),
        *("$ lorry load guest", "--replace", "$ lorry unload guest", "adapter_not_found"),
    ):
        assert part in done.stdout, part
