"""Two checkers more, about how long things are kept: adapters that nobody uses, and former versions
to which a rollback comes back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lorry.ids import EngineId, OperationId, ReplicaId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from tests.simulation.checkers import Checker

if TYPE_CHECKING:
    from tests.simulation.world import Simulation


class Retirements(Checker):
    """An adapter retires when nobody has used it for its idle time, and only then; never a pinned
    one."""

    promise = 6

    def command(self, command: cm.Command) -> None:
        """Judge each retirement at its beginning."""
        if not isinstance(command, cm.BeginOperation):
            return
        name, seen = command.name, self.seen
        idle_ms = seen.idle_ms.get(name)
        if idle_ms is None or seen.names[name][1]:
            self.fail(f"'{name}' retires, its idle time is {idle_ms}, pin {seen.names[name][1]}")
            return
        unused_ms = self.sim.now_ms - seen.used_ms[name]
        if unused_ms < idle_ms:
            self.fail(f"'{name}' retires, last used {unused_ms} ms ago, not {idle_ms}")
        waits = any(arrived.name == name for arrived, _ in seen.waiting.values())
        runs = any(run.name == name for run in seen.running.values())
        asked = any(call.request.name == name for call in seen.calls.values())
        if waits or runs or asked:
            self.fail(f"'{name}' retires while in use: {waits=}, {runs=}, {asked=}")

    def at_rest(self) -> None:
        """Nobody has used any of them for long."""
        left = [name for name in self.seen.idle_ms if not self.seen.names[name][1]]
        if left:
            self.fail(f"{left} are still there, unused")


class SwitchInPlace(Checker):
    """A rollback to a version that an engine still holds switches to it as it is: it is not
    unloaded before the call has ended, unless it was on its way out for somebody else's sake."""

    promise = 4

    def __init__(self, sim: "Simulation") -> None:
        """Counts those that came back to a version which nobody referred to any more."""
        super().__init__(sim)
        self._kept: dict[OperationId, set[tuple[ReplicaId, EngineId]]] = {}
        """Rollbacks under way, and the copies that they found."""
        self._loose: set[OperationId] = set()
        """Those whose version no name stood for when they came."""
        self.switched = 0
        """Of these, how many ended well on the copy that they had found."""

    def before(self, event: ev.Event) -> None:
        """What is there when a rollback's turn comes at once."""
        if not isinstance(event, ev.LoadAsked) or event.known is None:
            return
        seen, version = self.seen, event.known.version
        if version in seen.evicted:
            return
        if any(call.request.name == event.name for call in seen.calls.values()):
            return  # it has to wait for its turn, and until then holds nothing
        found = {
            key
            for key, copy in seen.copies.items()
            if copy.version == version and copy.phase == "resident"
        }
        if found:
            self._kept[event.operation] = found
            if version not in {served for served, _ in seen.names.values()}:
                self._loose.add(event.operation)

    def command(self, command: cm.Command) -> None:
        """No unload of a copy that a rollback has found, before its end."""
        if isinstance(command, cm.EndOperation):
            found = self._kept.pop(command.operation, set())
            there = any(key in self.seen.copies for key in found)
            if there and command.error is None and command.operation in self._loose:
                self.switched += 1
        elif isinstance(command, cm.Unload):
            key = command.replica, command.engine_id
            copy = self.seen.copies.get(key)
            sure = copy is not None and copy.phase == "resident"
            for operation, found in self._kept.items():
                if key in found and sure and copy is not None:
                    evicted = copy.version in self.seen.evicted
                    if not evicted:
                        self.fail(f"{key} is unloaded under rollback {operation}")


def more_checkers(sim: "Simulation") -> Sequence[Checker]:
    """One of each."""
    return (Retirements(sim), SwitchInPlace(sim))
