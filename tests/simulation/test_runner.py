"""Many seeds give the figures of each alone; a finding says all that is needed to see it again."""

import os
import signal
import subprocess
import sys

import pytest

from tests.simulation import runner
from tests.simulation.mutants import reservation_leaked_on_failed_load
from tests.simulation.runner import Figures, run_in_processes, run_seeds
from tests.simulation.world import LAST_STEPS, Violation, run

COMMAND = (sys.executable, "-m", "tests.simulation")
BUGGY = range(8)
"""The planted bug comes out in one of these."""


def test_two_processes_find_what_one_finds() -> None:
    alone, together = run_seeds(1, range(25)), Figures()
    for figures in run_in_processes(1, range(25), 2):
        together.add(figures)
    assert (alone.seeds, alone.steps) == (together.seeds, together.steps)
    assert alone.findings == together.findings == []


def test_a_finding_says_seed_commit_options_and_the_last_steps_and_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reservation_leaked_on_failed_load(monkeypatch)
    figures = run_seeds(1, BUGGY)
    seed = figures.seeds - 1
    (finding,) = figures.findings
    first, *middle, last = finding.splitlines()
    assert first.startswith("level 1, commit ")
    assert last == f"replay: python -m tests.simulation --level 1 --seed {seed} --trace"
    assert middle[1].startswith(f"seed {seed}: ")
    steps = middle[middle.index("last steps:") + 1 :]
    assert len([line for line in steps if "->" not in line]) == LAST_STEPS
    with pytest.raises(Violation) as again:
        run(seed)
    assert str(again.value).splitlines() == middle


def test_all_findings_are_told_when_asked_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reservation_leaked_on_failed_load(monkeypatch)
    figures = run_seeds(1, BUGGY, keep_going=True)
    assert figures.seeds == len(BUGGY)
    assert figures.findings


def test_a_fault_of_the_simulation_itself_is_told_with_its_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(seed: int, trace: object, steps_most: int | None) -> object:
        if seed == 3:
            raise KeyError("a checker's own mistake")
        return real(seed, None, steps_most)

    real = run
    monkeypatch.setattr(runner, "level", lambda number: broken)
    figures = run_seeds(1, range(6), keep_going=True)
    assert figures.seeds == 6
    (finding,) = figures.findings
    assert "a checker's own mistake" in finding
    assert "--seed 3 " in finding.splitlines()[-1]


def test_an_interrupted_run_says_what_it_has_done() -> None:
    command = (*COMMAND, "--level", "1", "--seeds", "100000", "--jobs", "2")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr is not None
        assert "of 100000" in running.stderr.readline()
        os.killpg(running.pid, signal.SIGINT)
        said, _ = running.communicate(timeout=40)
    assert running.returncode == 130
    assert said.startswith("level 1: ")
    assert said.endswith("interrupted\n")
