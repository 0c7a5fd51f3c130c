"""When to try again after a failure: a decision, carried out elsewhere."""

from lorry.lifecycle.settings import FleetLimits


def retry_at(failures: int, now_ms: int, limits: FleetLimits) -> int:
    """When (ms) the next try is due after `failures` in a row: doubling, up to a limit."""
    pause = limits.retry_first_ms << min(failures - 1, 20)
    return now_ms + min(pause, limits.retry_last_ms)
