"""Many seeds of one level of the simulation, in several processes, with progress."""

import multiprocessing
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Protocol

from tests.simulation.world import Violation

LEVELS = {1: "tests.simulation.world", 2: "tests.simulation.shell.life"}
"""Level to the module whose `run(seed, trace, steps_most)` is a whole life of a world."""

SEEDS_AT_ONCE = 10
"""What a process takes at a time: so many that handing out costs nothing, so few that a finding is
told soon."""

PROGRESS_S = 5.0


class Life(Protocol):
    """What `run` of each level returns."""

    steps: int


Run = Callable[[int, Callable[[str], None] | None, int | None], Life]


@dataclass(slots=True)
class Figures:
    """What some seeds came to."""

    seeds: int = 0
    steps: int = 0
    cpu_s: float = 0.0
    findings: list[str] = field(default_factory=list)

    def add(self, other: "Figures") -> None:
        """Take another's figures in."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.cpu_s += other.cpu_s
        self.findings += other.findings

    def __str__(self) -> str:
        return f"{self.seeds} seeds, {self.steps} events, {len(self.findings)} findings"


def level(number: int) -> Run:
    """The `run` of a level."""
    found: Run = import_module(LEVELS[number]).run
    return found


def run_seeds(
    number: int, seeds: range, *, keep_going: bool = False, steps_most: int | None = None
) -> Figures:
    """Run them one after the other; the rest is left out after a finding unless told to go on."""
    run, figures, began_s = level(number), Figures(), time.process_time()
    for seed in seeds:
        figures.seeds += 1
        try:
            figures.steps += run(seed, None, steps_most).steps
        except Violation as finding:
            figures.findings.append(report(number, seed, str(finding)))
        except Exception:  # noqa: BLE001 - a fault of the simulation, or one that it did not foresee
            figures.findings.append(report(number, seed, traceback.format_exc()))
        if figures.findings and not keep_going:
            break
    figures.cpu_s = time.process_time() - began_s
    return figures


def run_in_processes(
    number: int, seeds: range, jobs: int, *, keep_going: bool = False
) -> Iterator[Figures]:
    """The figures of each part as it ends; leaving the iteration ends the processes."""
    parts = [seeds[first : first + SEEDS_AT_ONCE] for first in range(0, len(seeds), SEEDS_AT_ONCE)]
    one = partial(run_seeds, number, keep_going=keep_going)
    if jobs == 1 or len(parts) == 1:
        yield from map(one, parts)
        return
    # Spawned, not forked: each begins clean, whatever this process has imported or started.
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(parts)), leave_interrupts_alone) as pool:
        yield from pool.imap_unordered(one, parts)


def leave_interrupts_alone() -> None:
    """Ctrl-C reaches every process of the terminal; the first one says what was done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def report(number: int, seed: int, finding: str) -> str:
    """All that is needed to see it again."""
    replay = f"python -m tests.simulation --level {number} --seed {seed} --trace"
    return f"level {number}, commit {commit()}\n{finding}\nreplay: {replay}"


def commit() -> str:
    """What is checked out, and whether it is all of what runs."""
    try:
        hash_ = _git("rev-parse", "--short=12", "HEAD")
        return f"{hash_} with changes" if _git("status", "--porcelain") else hash_
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(("git", *words), capture_output=True, text=True, check=True)
    return done.stdout.strip()


class Progress:
    """A line on stderr now and then."""

    def __init__(self, number: int, total: int) -> None:
        """Of one level."""
        self._what = f"level {number}"
        self._total = total
        self._began_s = self._told_s = time.monotonic()

    def tell(self, figures: Figures) -> None:
        """Unless it was told a moment ago."""
        now_s = time.monotonic()
        if now_s - self._told_s < PROGRESS_S:
            return
        self._told_s = now_s
        rate = figures.steps / (now_s - self._began_s)
        print(f"{self._what}: {figures} of {self._total}, {rate:.0f} events/s", file=sys.stderr)
