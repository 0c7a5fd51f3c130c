"""Bugs to plant in the core, each a mistake that somebody could make or that the field has seen.
A simulation that finds nothing must first show that it would."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from lorry.errors import EngineRejected, LorryError
from lorry.ids import AdapterName, EngineId, OperationId, ReplicaId, VersionId
from lorry.lifecycle import commands as cm
from lorry.lifecycle import events as ev
from lorry.lifecycle import fleet, operations, planner, replicas, reports, room
from lorry.lifecycle.eviction import Candidate
from lorry.lifecycle.records import Adapter, Asked, Opened, Phase, Replica, Residency
from lorry.lifecycle.states import HOLDING, State, Trigger
from lorry.lifecycle.world import World

Plant = Callable[[pytest.MonkeyPatch], None]


def reservation_leaked_on_failed_load(patch: pytest.MonkeyPatch) -> None:
    """A failed load keeps its room (LoRAX)."""
    let_go = World.let_go

    def leaky(self: World, replica: Replica, residency: Residency) -> None:
        let_go(self, replica, residency)
        if residency.state is State.LOADING and residency.failures:
            replica.budget.reserve(residency.version, residency.bytes)

    patch.setattr(World, "let_go", leaky)


def victim_unloaded_while_leased(patch: pytest.MonkeyPatch) -> None:
    """What is to go goes, whoever runs on it."""

    def empty(world: World) -> None:
        for replica in world.replicas.values():
            for residency in tuple(replica.draining.values()):
                if residency.pin_open is None:
                    residency.leases = 0
                    world.move(residency, Trigger.EMPTY)
                    planner.unload(world, residency)

    patch.setattr(planner, "empty", empty)


def false_from_remove_is_a_failure(patch: pytest.MonkeyPatch) -> None:
    """An id that the engine has given up already cannot be unloaded (vLLM, field report one)."""
    report = reports.report

    def strict(world: World, event: ev.Event) -> None:
        if isinstance(event, ev.Unloaded) and not event.existed:
            event = ev.UnloadFailed(event.operation, EngineRejected("not loaded"))
        report(world, event)

    patch.setattr(reports, "report", strict)


def name_dropped_before_the_engine_answered(patch: pytest.MonkeyPatch) -> None:
    """An unload writes the registry as soon as no request runs (vLLM: without asking at all)."""

    def settle(world: World, asked: Asked) -> None:
        if asked.name not in world.leases_of:
            operations.commit(world, asked)
        elif world.now_ms < asked.drain_due_ms:
            world.remind(asked.drain_due_ms)
        else:
            for ticket in world.leases_of[asked.name]:
                world.abort(world.leases[ticket], EngineRejected("unloaded"))

    patch.setattr(operations, "_settle_unload", settle)


def late_answers_are_believed(patch: pytest.MonkeyPatch) -> None:
    """A report counts although its command was answered or given up before."""
    opened: dict[tuple[int, OperationId], Opened] = {}
    real_open = World.open

    def remember(self: World, command: Opened) -> OperationId:
        operation = real_open(self, command)
        opened[id(self), operation] = command
        return operation

    def take(self: World, operation: OperationId, *kinds: str) -> Opened | None:
        self.opened.pop(operation, None)
        found = opened.get((id(self), operation))
        known = found is not None and found.residency in (None, *self.residencies)
        return found if known and found is not None and found.kind in kinds else None

    patch.setattr(World, "open", remember)
    patch.setattr(World, "take_opened", take)


def two_loads_for_one_waiting_adapter(patch: pytest.MonkeyPatch) -> None:
    """Every replica that may tries, though one is loading already."""

    def blind(world: World, need: room.Need, rooms: dict[ReplicaId, room.Room]) -> bool:
        return False

    patch.setattr(room, "under_way", blind)


def replaced_version_still_admits(patch: pytest.MonkeyPatch) -> None:
    """New requests go where the name's old version is still resident."""
    real = fleet.best_resident

    def old_first(world: World, version: VersionId) -> Residency | None:
        for name in world.names_of.get(version, ()):
            for old in world.adapters[name].former:
                found = [r for r in world.residencies_of(old) if r.state in HOLDING and r.leases]
                if found:
                    return found[0]
        return real(world, version)

    patch.setattr(fleet, "best_resident", old_first)


def unload_waits_under_a_lock_that_others_need(patch: pytest.MonkeyPatch) -> None:
    """While one adapter drains, nothing is loaded (SGLang, field report two)."""
    real = room.make_room

    def locked(world: World) -> None:
        if not any(queue[0].phase is Phase.DRAINING for queue in world.asked.values()):
            real(world)

    patch.setattr(planner, "make_room", locked)


def operations_wait_for_other_names(patch: pytest.MonkeyPatch) -> None:
    """Admin calls are taken in one order over all names."""
    real = operations._settle_unload

    def settle(world: World, asked: Asked) -> None:
        if next(iter(world.asked.values()))[0] is asked:
            real(world, asked)

    patch.setattr(operations, "_settle_unload", settle)


def pins_do_not_count_in_eviction(patch: pytest.MonkeyPatch) -> None:
    """The least recently used goes, pinned or not."""
    real = room.candidates

    def unpinned(world: World, replica: Replica, wanted: list[room.Need]) -> list[Candidate]:
        pinned = World.pin_wanted
        World.pin_wanted = lambda self, version: False  # type: ignore[method-assign]
        try:
            return real(world, replica, wanted)
        finally:
            World.pin_wanted = pinned  # type: ignore[method-assign]

    patch.setattr(room, "candidates", unpinned)


def unsure_load_taken_for_a_failure(patch: pytest.MonkeyPatch) -> None:
    """A load that timed out is not there, surely."""
    real = reports.load_failed

    def sure(world: World, event: ev.LoadFailed) -> None:
        real(world, replace(event, unsure=False))

    patch.setattr(reports, "load_failed", sure)


def unsure_unload_taken_for_a_refusal(patch: pytest.MonkeyPatch) -> None:
    """An unload that timed out has not happened, surely."""
    real = reports.unload_failed

    def sure(world: World, event: ev.UnloadFailed) -> None:
        real(world, replace(event, unsure=False))

    patch.setattr(reports, "unload_failed", sure)


def failed_commit_taken_for_done(patch: pytest.MonkeyPatch) -> None:
    """The registry is what memory says."""
    real = reports.commit_ended

    def done(world: World, operation: OperationId, error: LorryError | None) -> None:
        real(world, operation, None)

    patch.setattr(reports, "commit_ended", done)


def unknown_names_fall_back_to_base(patch: pytest.MonkeyPatch) -> None:
    """Somebody is served, after all (SGLang)."""
    real = fleet.arrived

    def kind(world: World, event: ev.Arrived) -> None:
        known = event.name is None or event.name in world.adapters
        real(world, event if known else replace(event, name=None))

    patch.setattr(fleet, "arrived", kind)


def old_listings_are_believed(patch: pytest.MonkeyPatch) -> None:
    """What an engine held when it was asked is what it holds now."""
    real = replicas.engine_seen

    def naive(world: World, event: ev.EngineSeen) -> None:
        real(world, replace(event, as_of=world.revision))

    patch.setattr(replicas, "engine_seen", naive)


def engine_ids_start_again(patch: pytest.MonkeyPatch) -> None:
    """Ids that an engine kept from an earlier life of the server are given out again."""

    def forget(self: World, seen: Iterable[EngineId]) -> None:
        """Nothing."""

    patch.setattr(World, "avoid_engine_ids", forget)


def lost_engine_keeps_its_leases(patch: pytest.MonkeyPatch) -> None:
    """Requests on a lost engine are aborted, and never released."""
    real = World.abort

    def engine_lost(world: World, event: ev.EngineLost) -> None:
        replica = world.replicas[event.replica]
        replica.up = False
        for lease in tuple(world.leases.values()):
            if lease.replica == replica.id:
                real(world, lease, EngineRejected("lost"))
        for residency in tuple(replica.holding.values()):
            residency.leases = 0
            replicas.lose(world, residency, "")

    patch.setattr(replicas, "engine_lost", engine_lost)


def timers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Nobody is woken for the end of a drain's time."""
    real = operations._settle_unload

    def settle(world: World, asked: Asked) -> None:
        due = world.due_ms
        real(world, asked)
        world.due_ms = due

    patch.setattr(operations, "_settle_unload", settle)


def one_pass_is_enough(patch: pytest.MonkeyPatch) -> None:
    """What a step makes possible for an earlier one waits for the next event."""

    def plan(world: World) -> None:
        planner.one_pass(world)

    patch.setattr(planner, "plan", plan)


def tickets_survive_their_adapter(patch: pytest.MonkeyPatch) -> None:
    """An unload forgets those who wait."""
    real = World.refuse_all

    def forget(self: World, name: AdapterName, error: LorryError) -> None:
        if error.code != "adapter_unloading":
            real(self, name, error)

    patch.setattr(World, "refuse_all", forget)


def purge_while_another_name_has_it(patch: pytest.MonkeyPatch) -> None:
    """An unload that purges removes the snapshot, whoever else serves it."""
    real = operations.committed

    def purging(world: World, asked: Asked) -> None:
        purges = isinstance(asked.request, ev.UnloadAsked) and asked.request.purge
        spec = asked.spec
        real(world, asked)
        if purges and spec is not None and spec.version in world.names_of:
            world.emit(cm.Purge(spec.version))

    patch.setattr(operations, "committed", purging)


def pinned_names_are_not_pinned_again(patch: pytest.MonkeyPatch) -> None:
    """A pin is forgotten with the engine that had it."""

    def chill(self: World, version: VersionId) -> None:
        """Nothing comes back unasked."""

    patch.setattr(World, "chill", chill)


def failed_unload_forgets_the_name(patch: pytest.MonkeyPatch) -> None:
    """The engine refused, and the name is closed all the same (vLLM)."""

    def restore(world: World, asked: Asked) -> None:
        """Leaves the adapter closing."""

    patch.setattr(operations, "restore", restore)


def version_of_a_new_adapter_evicted_before_it_is_published(patch: pytest.MonkeyPatch) -> None:
    """A call does not hold what it has brought."""

    def never(self: World, version: VersionId) -> bool:
        return False

    patch.setattr(World, "held", never)


def adapter_admitted_while_it_is_unloaded(patch: pytest.MonkeyPatch) -> None:
    """Whatever the engine may hold is good enough."""

    def anything(world: World, version: VersionId) -> Residency | None:
        return next((r for r in world.residencies_of(version) if r.state in HOLDING), None)

    patch.setattr(fleet, "best_resident", anything)


def rebinding_keeps_the_old_adapter(patch: pytest.MonkeyPatch) -> None:
    """A replace is written to the store and not to memory."""
    real = World.bind

    def bind(self: World, adapter: Adapter) -> None:
        if adapter.name not in self.adapters:
            real(self, adapter)

    patch.setattr(World, "bind", bind)


MUTANTS: tuple[Plant, ...] = (
    reservation_leaked_on_failed_load,
    victim_unloaded_while_leased,
    false_from_remove_is_a_failure,
    name_dropped_before_the_engine_answered,
    late_answers_are_believed,
    two_loads_for_one_waiting_adapter,
    replaced_version_still_admits,
    unload_waits_under_a_lock_that_others_need,
    operations_wait_for_other_names,
    pins_do_not_count_in_eviction,
    unsure_load_taken_for_a_failure,
    unsure_unload_taken_for_a_refusal,
    failed_commit_taken_for_done,
    unknown_names_fall_back_to_base,
    old_listings_are_believed,
    engine_ids_start_again,
    lost_engine_keeps_its_leases,
    timers_are_forgotten,
    one_pass_is_enough,
    tickets_survive_their_adapter,
    purge_while_another_name_has_it,
    pinned_names_are_not_pinned_again,
    failed_unload_forgets_the_name,
    version_of_a_new_adapter_evicted_before_it_is_published,
    adapter_admitted_while_it_is_unloaded,
    rebinding_keeps_the_old_adapter,
)
