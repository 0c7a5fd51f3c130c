"""What the supervisor is told at its start."""

from dataclasses import dataclass, field
from pathlib import Path

from lorry.lifecycle.learning import LearningLimits


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
    resolvers: tuple[str, ...] = ()
    """Sources with `{name}` in them, in which unknown names are looked up, in this order."""
    learning: LearningLimits = field(default_factory=LearningLimits)
    adapter_dirs: tuple[Path, ...] = ()
    """Folders of adapters that are registered and followed."""
    adapter_dir_interval_s: float = 5.0
    """Between two looks at each of them."""
    operations_kept: int = 1024
    """Ended admin calls that can still be asked about."""
    changes_kept: int = 1024
    """Changes that a late reader of the feed still gets."""
