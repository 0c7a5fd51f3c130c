"""Running the sequences of one request: all at once, each with one release, none outliving its
client.

Rule: a sequence is consumed inside its `supervisor.generate` context by one task; whatever ends the
task (an end, a stop string, an error, a client that left, the server stopping) leaves the context,
and that releases the lease.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
from starlette.types import Receive

from lorry.engine import TokenLogprobs
from lorry.errors import LorryError, RequestAborted
from lorry.server.answer import Assembler, Piece, SequenceRequest
from lorry.server.errors import as_lorry_error
from lorry.server.service import Service

Emit = Callable[[int, Piece], Awaitable[None]]
"""Takes one piece of the choice with that index."""

T = TypeVar("T")


@dataclass(slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def shape(self) -> dict[str, object]:
        """As OpenAI shows them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Answer:
    """One whole choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    last: Piece = field(default_factory=Piece)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.last = piece


async def run_sequences(
    service: Service,
    sequences: Sequence[SequenceRequest],
    emit: Emit,
    usage: Usage,
    request_id: str,
) -> None:
    """Run all to their ends. Raises one `LorryError` when any fails; the others are then
    aborted."""
    try:
        with service.shutdown.request(service.settings.request_timeout_s):
            if len(sequences) == 1:
                await _run(service, sequences[0], emit, usage)
                return
            async with anyio.create_task_group() as group:
                for sequence in sequences:
                    group.start_soon(_run, service, sequence, emit, usage)
    except LorryError:
        raise
    except Exception as error:
        raise as_lorry_error(error, request_id) from error


async def _run(service: Service, sequence: SequenceRequest, emit: Emit, usage: Usage) -> None:
    assembler = Assembler(sequence, service.tokenizer)
    watch = service.telemetry.watch(sequence.name, len(sequence.prompt))
    try:
        async with service.supervisor.generate(
            name=sequence.name,
            version=sequence.version,
            prompt=sequence.prompt,
            sampling=sequence.sampling,
            cache_salt=sequence.cache_salt,
            request_id=sequence.request_id,
        ) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason == "abort":
                    raise RequestAborted("The engine ended the request early.")
                piece = assembler.take(chunk)
                watch.tokens(len(piece.token_ids))
                usage.completion_tokens += len(piece.token_ids)
                if piece.first and sequence.first_choice:
                    usage.prompt_tokens += len(sequence.prompt)
                    usage.cached_tokens += chunk.cached_tokens
                await emit(sequence.index, piece)
                if piece.finish_reason is not None:
                    watch.finished(piece.finish_reason)
                    break
    finally:
        watch.close()


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T | None:
    """The work's result; None when the client left first, and then the work is cancelled."""
    result: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(watch)
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001 - raised below, where no group wraps it
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result
