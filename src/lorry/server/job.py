"""From a parsed request to sequences, and from their pieces to the answer: what completions and
chats share."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from lorry.server.answer import Piece, SequenceRequest
from lorry.server.errors import json_response, request_id_of, to_json
from lorry.server.generation import Answer, Usage, run_sequences, while_connected
from lorry.server.logprobs import Labels
from lorry.server.prompts import check_count
from lorry.server.sampling import for_choice
from lorry.server.schema import SamplingFields, StreamOptions
from lorry.server.service import Service
from lorry.server.sse import EventStream, Writer, event
from lorry.server.wanted import Wanted


@dataclass(slots=True)
class Job:
    """One inference request, ready to run."""

    id: str
    model: str
    created: int
    sequences: tuple[SequenceRequest, ...]
    labels: Labels
    stream_options: StreamOptions
    return_token_ids: bool
    has_text: bool
    """False: the model has no tokenizer, and all text is ""."""
    usage: Usage = field(default_factory=Usage)


class Shape(Protocol):
    """How one route shows answers."""

    stream_object: str
    """`object` of stream events."""
    whole_object: str
    """`object` of whole answers."""

    def events(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """What one piece of a choice adds to a stream: the events but for what all have alike."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """A whole answer but for its head and usage; `answers` are in the order of the choices."""


def make_job(
    service: Service,
    request: SamplingFields,
    wanted: Sequence[Wanted],
    *,
    prefix: str,
    echo: bool = False,
) -> Job:
    """Every prompt `n` times. Raises `RequestInvalid` when that is too much for one request."""
    check_count(service, len(wanted), request.n)
    n = request.n or 1
    job_id = f"{prefix}-{uuid.uuid4().hex}"
    sequences = [
        SequenceRequest(
            index=at * n + choice,
            request_id=f"{job_id}-{at * n + choice}",
            prompt=one.prompt.ids,
            prompt_text=one.prompt.text,
            sampling=for_choice(one.sampling, choice),
            name=one.target.name,
            version=one.target.version,
            cache_salt=request.cache_salt or "",
            stops=one.stops,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            echo=echo,
            first_choice=choice == 0,
        )
        for at, one in enumerate(wanted)
        for choice in range(n)
    ]
    return Job(
        id=job_id,
        model=wanted[0].target.model,
        created=int(time.time()),
        sequences=tuple(sequences),
        labels=Labels(service.tokenizer, bool(request.return_tokens_as_token_ids)),
        stream_options=request.stream_options or StreamOptions(),
        return_token_ids=bool(request.return_token_ids),
        has_text=service.tokenizer is not None,
    )


async def respond(
    service: Service, http: Request, job: Job, shape: Shape, *, stream: bool
) -> Response:
    """The HTTP answer, streamed or whole."""
    if stream:
        produce = partial(_stream, service, request_id_of(http), job, shape)
        return EventStream(produce, heartbeat_s=service.settings.heartbeat_s)
    work = partial(_whole, service, request_id_of(http), job, shape)
    body = await while_connected(http.receive, work)
    # 499: nginx's number for a client that left; nobody reads it.
    return Response(status_code=499) if body is None else json_response(body)


async def _whole(service: Service, request_id: str, job: Job, shape: Shape) -> dict[str, Any]:
    answers = [Answer() for _ in job.sequences]

    async def emit(index: int, piece: Piece) -> None:
        answers[index].add(piece)

    await run_sequences(service, job.sequences, emit, job.usage, request_id)
    head = _head(job, shape.whole_object)
    return head | shape.whole(answers) | {"usage": job.usage.shape()}


async def _stream(
    service: Service, request_id: str, job: Job, shape: Shape, writer: Writer
) -> None:
    options = job.stream_options
    # All events of one job begin and end alike: only what is between is written out per token.
    before, after = _frame(_head(job, shape.stream_object), options.include_usage)

    async def emit(index: int, piece: Piece) -> None:
        tail = after
        if options.continuous_usage_stats and options.include_usage:
            tail = b',"usage":' + to_json(job.usage.shape()) + b"}\n\n"
        events = [before + to_json(own)[1:-1] + tail for own in shape.events(index, piece)]
        if events:
            await writer.write(b"".join(events))

    await run_sequences(service, job.sequences, emit, job.usage, request_id)
    if options.include_usage:
        last = _head(job, shape.stream_object) | {"choices": [], "usage": job.usage.shape()}
        await writer.write(event(to_json(last)))


def _head(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model}


def _frame(head: dict[str, Any], include_usage: bool) -> tuple[bytes, bytes]:
    before = b"data: " + to_json(head)[:-1] + b","
    return before, (b',"usage":null}\n\n' if include_usage else b"}\n\n")
