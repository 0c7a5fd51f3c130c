"""What must hold after every event, numbered, each with its sentence. Tests check it always; the
supervisor when idle."""

from collections import Counter
from collections.abc import Callable, Iterator

from lorry.lifecycle.records import Phase
from lorry.lifecycle.states import HOLDING, LEASABLE, State
from lorry.lifecycle.world import World

Check = Callable[[World], Iterator[str]]


def check(world: World) -> list[str]:
    """Every violation, as "number: what was found"; empty when all is well."""
    return [
        f"{number}: {found}" for number, rule in enumerate(RULES, start=1) for found in rule(world)
    ]


def reserved_is_what_may_be_held(world: World) -> Iterator[str]:
    """Reserved bytes are those of versions loading, resident, draining or unloading."""
    for replica in world.replicas.values():
        holding = {
            r.version: r.bytes
            for r in world.residencies.values()
            if r.replica == replica.id and r.state in HOLDING
        }
        if replica.budget.bytes != sum(holding.values()) or replica.budget.count != len(holding):
            yield f"{replica.id} reserves {replica.budget.bytes} for {holding}"
        if set(replica.holding) != set(holding):
            yield f"{replica.id} lists {sorted(replica.holding)}, states say {sorted(holding)}"


def draining_is_listed(world: World) -> Iterator[str]:
    """A replica lists exactly its draining versions as such."""
    for replica in world.replicas.values():
        draining = {r.version for r in replica.holding.values() if r.state is State.DRAINING}
        if draining != set(replica.draining):
            yield f"{replica.id} lists {sorted(replica.draining)}, states say {sorted(draining)}"


def within_limits(world: World) -> Iterator[str]:
    """No replica goes over its limits, not even for a moment."""
    for replica in world.replicas.values():
        budget = replica.budget
        if budget.bytes > budget.bytes_max or budget.count > budget.versions_max:
            yield f"{replica.id} holds {budget.count} versions of {budget.bytes} bytes"


def leases_only_where_resident(world: World) -> Iterator[str]:
    """A lease is only on a version that is resident or draining."""
    for residency in world.residencies.values():
        if residency.leases and residency.state not in LEASABLE:
            yield f"{residency.version} is {residency.state} with {residency.leases} leases"


def lease_counts_agree(world: World) -> Iterator[str]:
    """Each count of leases is what a recount finds."""
    counted = Counter(
        (lease.version, lease.replica) for lease in world.leases.values() if lease.version
    )
    for key, residency in world.residencies.items():
        if residency.leases != counted[key]:
            yield f"{key} counts {residency.leases}, not {counted[key]}"
    by_replica = Counter(lease.replica for lease in world.leases.values())
    for replica in world.replicas.values():
        if replica.leases != by_replica[replica.id]:
            yield f"{replica.id} counts {replica.leases}, not {by_replica[replica.id]}"


def one_open_command_each(world: World) -> Iterator[str]:
    """A version has a command open exactly in the states that wait for a report."""
    waiting = (State.FETCHING, State.LOADING, State.UNLOADING)
    for residency in world.residencies.values():
        if (residency.open is not None) != (residency.state in waiting):
            yield f"{residency.version} is {residency.state} with command {residency.open}"
        if residency.open is not None and residency.open not in world.opened:
            yield f"{residency.version} waits for a command that nobody remembers"


def tickets_in_one_place(world: World) -> Iterator[str]:
    """A request waits or runs, never both, and each that waits is in the queue of its name."""
    both = world.tickets.keys() & world.leases.keys()
    if both:
        yield f"{sorted(both)} wait and run"
    queued = [ticket.id for queue in world.queues.values() for ticket in queue]
    if sorted(queued) != sorted(world.tickets):
        yield f"queues hold {sorted(queued)}, tickets are {sorted(world.tickets)}"


def nobody_waits_in_vain(world: World) -> Iterator[str]:
    """Nobody waits for a name that is unknown or closing, or for a version that is resident."""
    for name in world.queues:
        adapter = world.adapters.get(name)
        if adapter is None or adapter.closing:
            yield f"requests wait for '{name}', which is not served"
        elif any(r.state is State.RESIDENT for r in world.residencies_of(adapter.spec.version)):
            yield f"requests wait for '{name}', which is resident"


def no_call_waits_in_vain(world: World) -> Iterator[str]:
    """No admin call waits for what is resident already, or for an end that has come."""
    for name, queue in world.asked.items():
        asked = queue[0]
        found = [r for version in asked.versions for r in world.residencies_of(version)]
        if asked.wants_resident and any(r.state is State.RESIDENT for r in found):
            yield f"{asked.id} waits for '{name}', which is resident"
        if asked.phase is Phase.DRAINING and name not in world.leases_of:
            yield f"{asked.id} waits for requests on '{name}', and there are none"
        if asked.phase is Phase.REMOVING and not any(r.state in HOLDING for r in found):
            yield f"{asked.id} waits for the end of '{name}', which is nowhere"


def pins_are_counted(world: World) -> Iterator[str]:
    """The engine's pins are counted from command to report, and never more than may be."""
    for replica in world.replicas.values():
        pinned = {r.version for r in replica.holding.values() if r.engine_pinned is not False}
        if pinned != replica.pins or len(pinned) > replica.pins_max:
            yield f"{replica.id} counts {sorted(replica.pins)}, pinned are {sorted(pinned)}"


def queues_within_limits(world: World) -> Iterator[str]:
    """Queues keep their limits."""
    limits = world.limits
    if len(world.tickets) > limits.tickets_max or len(world.leases) > limits.leases_max:
        yield f"{len(world.tickets)} wait, {len(world.leases)} run"
    for name, queue in world.queues.items():
        if len(queue) > limits.tickets_per_adapter_max:
            yield f"{len(queue)} wait for '{name}'"


def names_point_back(world: World) -> Iterator[str]:
    """Names and versions point at each other, and the pinned names are listed."""
    forward = {(a.spec.version, name) for name, a in world.adapters.items()}
    backward = {(version, name) for version, names in world.names_of.items() for name in names}
    if forward != backward:
        yield f"{forward ^ backward} point one way only"
    pinned = {name for name, adapter in world.adapters.items() if adapter.pinned}
    if pinned != world.pinned:
        yield f"{sorted(world.pinned)} are listed as pinned, {sorted(pinned)} are"


def engine_ids_are_unique(world: World) -> Iterator[str]:
    """No two versions have one engine id, and exactly those that may be held have one."""
    ids = [r.engine_id for r in world.residencies.values() if r.engine_id is not None]
    if len(ids) != len(set(ids)):
        yield f"engine ids repeat: {sorted(ids)}"
    for residency in world.residencies.values():
        if (residency.engine_id is not None) != (residency.state in HOLDING):
            yield f"{residency.version} is {residency.state} with engine id {residency.engine_id}"


def nothing_resident_on_a_lost_engine(world: World) -> Iterator[str]:
    """A replica that is down holds nothing and runs nothing."""
    for replica in world.replicas.values():
        if not replica.up and (replica.holding or replica.leases):
            yield f"{replica.id} is down with {sorted(replica.holding)}, {replica.leases} leases"


def timers_have_a_purpose(world: World) -> Iterator[str]:
    """A timer is set only while something waits, and never for the past."""
    if world.due_ms is None:
        return
    if world.due_ms <= world.now_ms:
        yield f"a timer is due at {world.due_ms}, now is {world.now_ms}"
    waits = world.tickets or world.leases or world.asked or world.cold or world.loose
    if not (waits or world.idle or world.pinned) and not any(
        r.draining or r.pins for r in world.replicas.values()
    ):
        yield f"a timer is due at {world.due_ms} with nothing to wait for"


def every_wait_has_an_end(world: World) -> Iterator[str]:
    """While a request waits, or runs and was not told to end, or an admin call is under way that
    does not just wait for the store, a timer is set."""
    runs = any(not lease.aborted for lease in world.leases.values())
    calls = any(queue[0].phase is not Phase.COMMITTING for queue in world.asked.values())
    if (world.tickets or runs or calls) and world.due_ms is None:
        yield "requests or admin calls wait without a timer"


def idle_adapters_are_watched(world: World) -> Iterator[str]:
    """An adapter that may retire when nobody uses it is watched, and no other is."""
    for name, adapter in world.adapters.items():
        wanted, planned = world.idle_due_ms(adapter), world.idle.due_ms(name)
        if adapter.closing:
            continue
        if (wanted is None) != (planned is None):
            yield f"'{name}' retires at {wanted} ms and is looked at {planned}"
    if len(world.idle) > len(world.adapters):
        yield f"{len(world.idle)} names are watched, {len(world.adapters)} are registered"


RULES: tuple[Check, ...] = (
    reserved_is_what_may_be_held,
    draining_is_listed,
    within_limits,
    leases_only_where_resident,
    lease_counts_agree,
    one_open_command_each,
    tickets_in_one_place,
    nobody_waits_in_vain,
    no_call_waits_in_vain,
    queues_within_limits,
    names_point_back,
    engine_ids_are_unique,
    nothing_resident_on_a_lost_engine,
    pins_are_counted,
    timers_have_a_purpose,
    every_wait_has_an_end,
    idle_adapters_are_watched,
)
"""In the order of their numbers."""
