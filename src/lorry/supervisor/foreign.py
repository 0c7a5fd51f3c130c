"""The border to the engines: whatever one of them raises becomes an error of ours here."""

import logging

from lorry.errors import EngineRejected, EngineTimeout, LorryError

log = logging.getLogger(__name__)


def engine_timeout(what: str, problem: BaseException) -> EngineTimeout:
    """Nobody knows how the call ended."""
    if isinstance(problem, EngineTimeout):
        return problem
    return EngineTimeout(f"The engine did not answer the {what} within its deadline.")


def engine_error(what: str, problem: Exception) -> LorryError:
    """An engine's error as a value; anything that is not ours is wrapped, with the engine's
    words."""
    if isinstance(problem, LorryError):
        return problem
    log.error("the engine failed the %s", what, exc_info=problem)
    return EngineRejected(f"The engine failed the {what}: {problem!r}")
