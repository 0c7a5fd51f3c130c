"""Whether a version could ever have room on a replica: questions only, asked before any side effect
and again while something waits."""

from lorry.errors import AllPinned, CapacityExhausted, LorryError
from lorry.ids import AdapterName, VersionId, short
from lorry.lifecycle.events import VersionSpec
from lorry.lifecycle.records import Replica, Residency
from lorry.lifecycle.world import World


def pinned_on(world: World, replica: Replica) -> list[Residency]:
    """What no eviction may take there."""
    return [r for r in replica.holding.values() if world.pin_wanted(r.version)]


def objection(
    world: World,
    replica: Replica,
    pinned: list[Residency],
    name: AdapterName,
    spec: VersionSpec,
    gives_up: VersionId | None = None,
) -> LorryError | None:
    """Why no eviction could make room for it here beside what is `pinned`; `gives_up` is a pinned
    version that may go for it all the same."""
    budget = replica.budget
    if spec.bytes > budget.bytes_max:
        return CapacityExhausted(
            f"'{name}' needs {spec.bytes} bytes of host memory; "
            f"--host-cache-bytes is {budget.bytes_max}."
        )
    if spec.version in replica.holding:
        return None
    keep = [r for r in pinned if r.version != gives_up]
    size = sum(r.bytes for r in keep) + spec.bytes
    if len(keep) < budget.versions_max and size <= budget.bytes_max:
        return None
    return AllPinned(
        f"No room for '{name}': the pinned adapters {_names(world, [r.version for r in keep])} "
        "fill it."
    )


def _names(world: World, versions: list[VersionId]) -> str:
    """The names of versions; a version that is only about to have one is shown by its digits."""
    names = {n for v in versions for n in world.names_of.get(v, {short(v)})}
    return ", ".join(sorted(names))


def beside_objection(
    world: World, replica: Replica, name: AdapterName, spec: VersionSpec
) -> LorryError | None:
    """Why the new version of a name can never be beside the old one here; only asked while the old
    one is resident, since otherwise there is nothing to be beside."""
    old = world.adapters.get(name)
    held = replica.holding.get(old.spec.version) if old is not None else None
    if held is None or spec.version in replica.holding:
        return None
    keep = [r for r in pinned_on(world, replica) if r is not held]
    size = sum(r.bytes for r in keep) + held.bytes + spec.bytes
    if len(keep) + 2 <= replica.budget.versions_max and size <= replica.budget.bytes_max:
        return None
    return CapacityExhausted(
        f"Replacing '{name}' needs room for the old version and the new one at once. Ask for "
        "strategy 'drain-first' (requests wait meanwhile), or raise --max-cpu-loras or "
        "--host-cache-bytes."
    )


def nowhere(world: World, name: AdapterName, spec: VersionSpec) -> LorryError | None:
    """Why no replica that is up could ever take it; None when one could, or none is up."""
    up = [replica for replica in world.replicas.values() if replica.up]
    errors = [objection(world, r, pinned_on(world, r), name, spec) for r in up]
    return next(iter(errors), None) if None not in errors else None
