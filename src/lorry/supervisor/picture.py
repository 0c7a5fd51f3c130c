"""Pictures of the present, put together from the core, the registry and the engines' last word."""

from lorry.ids import AdapterName, EngineId, ReplicaId, VersionId
from lorry.lifecycle.reasons import why_waiting
from lorry.lifecycle.records import Residency
from lorry.lifecycle.states import HOLDING, State
from lorry.supervisor.shell import Shell
from lorry.views import AdapterView, ReplicaView, ResidencyView, ResidentView, Statistics


def adapter(shell: Shell, name: AdapterName) -> AdapterView:
    """One registered adapter."""
    world = shell.fleet.world
    served = world.adapters[name]
    record = shell.registry.records[name]
    found = world.residencies_of(served.spec.version)
    return AdapterView(
        name=name,
        manifest=shell.registry.manifests[served.spec.version],
        source=served.source,
        pinned=served.pinned,
        labels=record.labels,
        created_s=record.created_s,
        updated_s=record.updated_s,
        previous=record.previous,
        unloading=served.closing,
        waiting=len(world.queues.get(name, ())),
        residency=tuple(_residency(r, shell.engines[r.replica].health().slots) for r in found)
        or tuple(_on_disk(replica) for replica in world.replicas),
        settings=record.settings,
        waits_for=why_waiting(world, name),
    )


def _residency(residency: Residency, slots: tuple[EngineId | None, ...]) -> ResidencyView:
    engine_id = residency.engine_id
    slot = slots.index(engine_id) if engine_id is not None and engine_id in slots else None
    tier = "disk"
    if residency.state in (State.ABSENT, State.FETCHING):
        tier = "absent"
    elif residency.state in HOLDING and residency.state is not State.LOADING:
        tier = "host" if slot is None else "slot"
    return ResidencyView(
        replica=residency.replica,
        state=residency.state.value,
        tier=tier,
        slot=slot,
        engine_id=engine_id,
        leases=residency.leases,
        reason=str(residency.error) if residency.error is not None else "",
    )


def _on_disk(replica: ReplicaId) -> ResidencyView:
    return ResidencyView(replica, State.ON_DISK.value, "disk", None, None, 0, "")


def residents(shell: Shell) -> tuple[ResidentView, ...]:
    """Every version that an engine holds."""
    world = shell.fleet.world
    names: dict[VersionId, list[AdapterName]] = {}
    for name, served in sorted(world.adapters.items()):
        names.setdefault(served.spec.version, []).append(name)
    copies: dict[VersionId, list[Residency]] = {}
    for replica in world.replicas.values():
        for version, residency in replica.holding.items():
            if residency.state is not State.LOADING:
                copies.setdefault(version, []).append(residency)
    manifests = shell.registry.manifests
    return tuple(
        ResidentView(
            version=version,
            names=tuple(names.get(version, ())),
            rank=manifests[version].rank if version in manifests else None,
            bytes=held[0].bytes,
            copies=len(held),
            leases=sum(one.leases for one in held),
        )
        for version, held in sorted(copies.items())
    )


def statistics(shell: Shell) -> Statistics:
    """Everything that counts."""
    counted = shell.fleet.statistics()
    counters = counted.counters
    disk = shell.cache.statistics()
    return Statistics(
        registered=counted.registered,
        waiting=counted.waiting,
        running=counted.running,
        operations=counted.operations,
        waiting_by_name=counted.waiting_by_name,
        running_by_name=counted.running_by_name,
        replicas=tuple(_replica(shell, replica) for replica in shell.engines),
        host_hits=counters.hits,
        host_misses=counters.misses,
        loads=counters.loads,
        load_failures=counters.load_failures,
        load_seconds=tuple(shell.load_seconds),
        unloads=counters.unloads,
        unload_failures=counters.unload_failures,
        evictions=dict(counters.evictions),
        refusals=dict(counters.refusals),
        stale_reports=counters.stale_reports,
        engine_losses=counters.engine_losses,
        disk_bytes=disk.bytes,
        disk_bytes_max=disk.limit_bytes,
        disk_versions=disk.count,
        disk_evictions=disk.evictions,
    )


def _replica(shell: Shell, replica: ReplicaId) -> ReplicaView:
    record = shell.fleet.world.replicas[replica]
    return ReplicaView(
        id=replica,
        up=record.up,
        reason=shell.down_reasons[replica],
        resident=sum(r.state in (State.RESIDENT, State.DRAINING) for r in record.holding.values()),
        versions_max=record.budget.versions_max,
        bytes_reserved=record.budget.bytes,
        bytes_max=record.budget.bytes_max,
        running=record.leases,
        health=shell.engines[replica].health(),
    )
