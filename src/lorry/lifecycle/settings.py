"""The limits that the core keeps. Units in the names."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """Room on one replica."""

    versions_max: int
    """Versions in host memory (`--max-cpu-loras`)."""
    bytes_max: int
    """Bytes of them (`--host-cache-bytes`)."""
    pins_max: int
    """Pinned adapters: one fewer than the slots or the places, whichever is less, so that one
    always stays free."""


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Bounds on waiting and on work; each with the reason for its default."""

    tickets_max: int = 4096
    """Waiting requests over all adapters: more would only time out."""
    tickets_per_adapter_max: int = 1024
    """One adapter's share of those, so that a stuck one leaves room for the rest."""
    leases_max: int = 8192
    """Running requests; beyond this the engine's own queue would only grow."""
    operations_per_adapter_max: int = 64
    """Admin calls that may queue for one name."""
    loads_per_replica_max: int = 4
    """Loads in flight at once: more would share one disk and finish no sooner."""
    ticket_wait_ms: int = 60_000
    """A request that waits longer for its adapter is refused."""
    operation_ms: int = 120_000
    """A load that has not ended by then fails (`--load-timeout`)."""
    lease_ms: int = 600_000
    """A running request is aborted after this; it bounds every drain (`--request-timeout`)."""
    patience_ms: int = 1_000
    """How long the oldest waiting request waits for a version to fall idle before one is drained
    for it. Together with `lease_ms` and the load time this bounds any ticket's wait (promise
    11)."""
    retry_first_ms: int = 500
    """Pause after the first failed load of a version; doubles with each further one."""
    retry_last_ms: int = 30_000
    """The longest such pause."""
