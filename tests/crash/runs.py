"""One operation: a first run counts its steps, then one run per step is killed there, started again
and checked."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from lorry.artifacts import memory
from tests.crash import checks
from tests.crash.operations import OPERATIONS, Operation, bystanders
from tests.crash.processes import Channel, Outcome, forked
from tests.crash.steps import Step, Steps, watch, words
from tests.crash.world import ROOMY, Facts, Oracle, Pending, World, world

Plant = Callable[[], None]
"""Breaks the code in a child, to see that the checks see it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is not as it should be after a kill at some point."""

    operation: str
    point: str
    problem: str

    def __str__(self) -> str:
        return f"{self.operation}, killed at [{self.point}]: {self.problem}"


@dataclass(slots=True)
class Tally:
    """What came of one operation."""

    steps: int = 0
    """As the first run counted them."""
    points: int = 0
    """At which the process was killed."""
    seconds: int = 0
    """Of them, kills of the restart that followed a kill."""
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Count both together."""
        self.steps += other.steps
        self.points += other.points
        self.seconds += other.seconds
        self.findings += other.findings


@dataclass(slots=True)
class Crashes:
    """All crash points of one operation, in a place of its own."""

    name: str
    place: Path
    oracle: Oracle
    plant: Plant = lambda: None
    tally: Tally = field(default_factory=Tally)
    before: Facts = field(default_factory=dict)
    after: Facts = field(default_factory=dict)
    _created: dict[str, float] = field(default_factory=dict)
    _audit: tuple[int, int] = (0, 0)
    """Rows of it before and after."""
    _mended: set[tuple[Step, ...]] = field(default_factory=set)

    @property
    def operation(self) -> Operation:
        """What is done."""
        return OPERATIONS[self.name]

    @property
    def state(self) -> Path:
        """What a server keeps."""
        return self.place / "state"

    def points(self) -> list[Step]:
        """Make the state that each run finds, do the operation once, and answer its steps."""
        shutil.rmtree(self.place, ignore_errors=True)
        (self.state / "memory").mkdir(parents=True)
        self.operation.lay_out(self.place)
        if not self.operation.empty:
            made = forked(self._prepare)
            assert not made.failure, f"{self.name}: {made.failure}"
            self._created = {name: fact["created"] for name, fact in made.said["facts"].items()}
            self.before = self._same_each_time(made.said["facts"])
        audit = 0 if self.operation.empty else checks.audit_rows(self.state)
        self.state.rename(self.place / "template")
        self._lay_out()
        done = forked(partial(self._strike, None))
        assert not done.failure, f"{self.name}: {done.failure}"
        self.after = done.said["facts"]
        self._audit = audit, checks.audit_rows(self.state)
        trail = [(label, occurrence) for label, occurrence in done.said["trail"]]
        self.tally.steps = len(trail)
        return trail

    def kill_at(self, point: Step, *, twice: bool) -> Iterator[Finding]:
        """One crash point; with `twice` also each step of the restart that mends it, unless the
        same mending was interrupted before."""
        self._lay_out()
        shown = words(point)
        struck = forked(partial(self._strike, point))
        self.tally.points += 1
        if struck.failure:
            yield Finding(self.name, shown, f"the operation itself failed: {struck.failure}")
            return
        wreck = self.place / "wreck"
        if twice:
            shutil.rmtree(wreck, ignore_errors=True)
            shutil.copytree(self.state, wreck, symlinks=True)
        answered = bool(struck.said.get("answered"))
        mending = forked(partial(self._check, answered))
        yield from self._problems(shown, mending)
        trail = tuple((label, n) for label, n in mending.said.get("trail", ()))
        if twice and trail not in self._mended:
            self._mended.add(trail)
            for step in trail:
                yield from self._kill_again(shown, wreck, step, answered)

    def _kill_again(self, shown: str, wreck: Path, step: Step, answered: bool) -> Iterator[Finding]:
        self._restore(wreck)
        forked(partial(self._restart, step))
        self.tally.points += 1
        self.tally.seconds += 1
        again = f"restart, {words(step)}"
        yield from self._problems(f"{shown}; {again}", forked(partial(self._check, answered)))

    def _problems(self, shown: str, checked: Outcome) -> Iterator[Finding]:
        problems = list(checked.said.get("problems", ()))
        if checked.failure:
            problems.append(f"the restart failed: {checked.failure}")
        elif not problems:
            problems += self._left(checked.said)
        for problem in problems:
            yield Finding(self.name, shown, problem)

    def _left(self, said: dict[str, Any]) -> list[str]:
        """What the ended server left on the disk, after the operation was done again."""
        found = checks.on_disk(self.state, self.oracle, self.operation, said["facts"], tidied=False)
        return [f"after all, {problem}" for problem in found]

    def _same_each_time(self, facts: Facts) -> Facts:
        """Facts with no time in them but whether an adapter is as old as it was."""
        return {
            name: fact | {"created": fact["created"] == self._created.get(name)}
            for name, fact in facts.items()
        }

    async def _facts(self, running: World) -> Facts:
        return self._same_each_time(await running.facts())

    def _lay_out(self) -> None:
        self._restore(self.place / "template")
        self.operation.lay_out(self.place)

    def _restore(self, source: Path) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
        shutil.copytree(source, self.state, symlinks=True)

    # In children

    def _begin(self, target: Step | None = None, *, right: bool = False) -> tuple[Steps, Pending]:
        """In each child, first. `right`: without the planted bug."""
        memory._place = lambda: self.state / "memory"  # so that other processes do not disturb
        steps, pending = Steps(self.state, target), Pending()
        if not right:
            self.plant()
        pending.watch()
        watch(steps)
        return steps, pending

    def _prepare(self, channel: Channel) -> None:
        async def run() -> None:
            _, pending = self._begin(right=True)
            roomy = replace(self.operation.options, fake=ROOMY, cache_bytes=None)
            async with world(self.place, self.oracle, roomy, pending) as running:
                await bystanders(running)
                status = await self.operation.prepare(running)
                assert status in (0, 200, 201), f"what comes before was answered with {status}"
                await running.settled()
                channel.say(facts=await running.facts())

        anyio.run(run)

    def _strike(self, target: Step | None, channel: Channel) -> None:
        """Do the operation; be killed at the target, or at the end."""
        steps, pending = self._begin(target)

        async def run() -> None:
            steps.armed = self.operation.starting
            async with world(
                self.place, self.oracle, self.operation.options, pending, steps
            ) as running:
                await running.settled()
                steps.armed = True
                status = await self.operation.act(running)
                assert status in (0, 200, 201), f"it was answered with {status}"
                steps.take("answer")
                channel.say(answered=status)
                await running.settled()
                steps.take("all is done")
                steps.armed = False
                channel.say(trail=steps.trail, facts=await self._facts(running))
                os.kill(os.getpid(), signal.SIGKILL)

        anyio.run(run)

    def _restart(self, target: Step, channel: Channel) -> None:
        """Start again, and be killed at a step of that."""
        steps, pending = self._begin(target)

        async def run() -> None:
            steps.armed = True
            async with world(
                self.place, self.oracle, self.operation.options, pending, steps
            ) as running:
                await running.settled()
                os.kill(os.getpid(), signal.SIGKILL)

        anyio.run(run)

    def _check(self, answered: bool, channel: Channel) -> None:
        """Start again, look at everything, do the operation again, end in order."""
        steps, pending = self._begin()

        async def run() -> None:
            steps.armed = True
            async with world(
                self.place, self.oracle, self.operation.options, pending, steps
            ) as running:
                await running.settled()
                steps.armed = False
                channel.say(trail=steps.trail)
                problems = await self._look(running, answered=answered)
                problems += await self._again(running)
                channel.say(problems=problems, facts=await running.facts())

        anyio.run(run)

    async def _look(self, running: World, *, answered: bool) -> list[str]:
        found = await self._facts(running)
        problems = checks.kept(
            found,
            self.before,
            self.after,
            answered=answered,
            lossy=self.operation.may_fall_back,
        )
        problems += await checks.agreement(running)
        tidied = not self.operation.options.follow  # which may have unloaded something since
        problems += checks.on_disk(self.state, self.oracle, self.operation, found, tidied=tidied)
        done = answered or found != self.before
        audit = checks.audit_rows(self.state)
        if self._counts_changes and audit != self._audit[done]:
            problems.append(f"the audit has {audit} rows instead of {self._audit[done]}")
        return problems

    @property
    def _counts_changes(self) -> bool:
        """Whether nothing but the operation itself is written down."""
        return not (self.operation.may_fall_back or self.operation.options.follow)

    async def _again(self, running: World) -> list[str]:
        """The same call once more, whether it was done or not."""
        done = await self._facts(running) == self.after != self.before
        status = await (self.operation.repeat or self.operation.act)(running)
        await running.settled()
        allowed = self.operation.again if done else {0, 200, 201}
        problems = [f"again, it is answered with {status}"] if status not in allowed | {0} else []
        if not done and await self._facts(running) != self.after:
            problems.append("done again, it comes to something else")
        return problems + [f"again, {problem}" for problem in await checks.agreement(running)]
