"""One running request: from its ticket to the one release of its lease."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from lorry.engine import Engine, GenerateRequest, TokenChunk
from lorry.errors import LorryError, RequestAborted
from lorry.ids import TicketId
from lorry.lifecycle import commands as cm
from lorry.supervisor.foreign import engine_error

log = logging.getLogger(__name__)

ABORT_S = 5.0
"""An engine that has not ended a request by then is not waited for: what follows (an unload) ends
it there for good."""


@dataclass(slots=True)
class Request:
    """What the shell knows of one ticket."""

    ticket: TicketId
    engine_request: str
    """Its id in the engine."""
    left: Callable[[TicketId], None]
    """Tells the core that the ticket is over."""
    answered: anyio.Event = field(default_factory=anyio.Event)
    admitted: cm.Admit | None = None
    error: LorryError | None = None
    """The refusal, or why it was aborted."""
    scope: anyio.CancelScope | None = None
    """Around the wait for the engine's next chunk, while there is one."""
    over: bool = False

    def admit(self, command: cm.Admit) -> None:
        """It may run."""
        self.admitted = command
        self.answered.set()

    def refuse(self, error: LorryError) -> None:
        """It may not: the ticket has had its answer."""
        self.error = error
        self.over = True
        self.answered.set()

    def abort(self, error: LorryError) -> None:
        """It must end: whoever waits for its next chunk gets the error now."""
        self.error = error
        self.answered.set()
        if self.scope is not None:
            self.scope.cancel()

    def release(self) -> None:
        """End the ticket or lease: once, whoever comes first (promise 7)."""
        if not self.over:
            self.over = True
            self.left(self.ticket)

    async def stream(self, engine: Engine, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """The engine's chunks; raises the abort's error in place of the rest."""
        chunks = engine.generate(request)
        try:
            while True:
                chunk = await self._next(chunks)
                if chunk.finish_reason == "abort":
                    raise self.error or RequestAborted("The engine ended the request early.")
                if chunk.finish_reason is not None:
                    self.release()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            await self._close(chunks)

    async def _next(self, chunks: AsyncIterator[TokenChunk]) -> TokenChunk:
        if self.error is not None:
            raise self.error
        chunk = None
        with anyio.CancelScope() as self.scope:
            try:
                chunk = await anext(chunks, None)
            except Exception as problem:
                # An engine that fails because the request was cancelled must not hide that it was.
                await anyio.lowlevel.checkpoint_if_cancelled()
                raise engine_error("request", problem) from problem
        self.scope = None
        if chunk is None:
            raise self.error or RequestAborted("The engine ended the request without an answer.")
        return chunk

    async def _close(self, chunks: AsyncIterator[TokenChunk]) -> None:
        """Closing the engine's iterator ends the request there. What goes wrong in that is nobody's
        answer, and must not keep the lease from its end."""
        close = getattr(chunks, "aclose", None)
        if close is None:
            return
        with anyio.move_on_after(ABORT_S, shield=True) as scope:
            try:
                await close()
            except Exception as problem:  # noqa: BLE001 - the request is over all the same
                log.warning("the end of request %s in the engine: %r", self.ticket, problem)
        if scope.cancelled_caught:
            log.warning("request %s did not end in the engine in time", self.engine_request)
