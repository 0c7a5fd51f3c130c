"""What the supervisor is told at its start."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """Deadlines and folders. Units in the names."""

    adapter_roots: tuple[Path, ...] = ()
    """Sources must lie below one of these; none: anywhere."""
    drain_timeout_s: float = 30.0
    """How long an unload waits for running requests when its caller does not say."""
    load_timeout_s: float = 120.0
    """Limit for one answer of an engine to a load."""
    command_timeout_s: float = 30.0
    """Limit for its answer to any other command."""
    reconcile_s: float = 10.0
    """How often each engine is asked what it holds, and the core's books are checked."""
    start_timeout_s: float = 60.0
    """How long a started engine may take to say that it is up."""
    shutdown_s: float = 10.0
    """How long the end waits for running requests and admin calls."""
    operations_kept: int = 1024
    """Ended admin calls that can still be asked about."""
    changes_kept: int = 1024
    """Changes that a late reader of the feed still gets."""
