"""POST /generate, SGLang's native inference: a batch whose every member has its own adapter,
sampling values and log probabilities.

Fields that may be one value or a list are spread over the batch first; from there on it is the work
of every other route. Texts and ids in a stream are cumulative, as SGLang sends them.
"""

import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, TypeVar, cast

from fastapi import APIRouter, Depends
from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from lorry.errors import AdapterNotFound, AdapterUnloading, LorryError, RequestInvalid
from lorry.server.answer import Piece, SequenceRequest
from lorry.server.dialects.reading import ForeignRoute
from lorry.server.dialects.sglang_answer import Growing
from lorry.server.errors import (
    error_headers,
    json_response,
    request_id_of,
    to_json,
)
from lorry.server.generation import Usage, run_sequences, while_connected
from lorry.server.logprobs import Labels
from lorry.server.prompts import Prompt, check_count, encode
from lorry.server.sampling import for_choice
from lorry.server.schema import (
    INT64,
    LOGPROBS_MAX,
    AnswerTokens,
    Body,
    Prompts,
    SamplingFields,
)
from lorry.server.service import Service, Target, service_of
from lorry.server.sse import EventStream, Writer, event
from lorry.server.wanted import Wanted, want

T = TypeVar("T")

MAX_NEW_TOKENS = 128
"""SGLang's own default."""
NAMES_SHOWN_MAX = 20
"""Adapters that a message lists; there may be thousands."""
RID_CHARS_MAX = 256
_OTHER_NAMES = re.compile(r"\b(max|min)_tokens\b")
"""OpenAI's names, in messages that the routes share."""


def _form(value: Any) -> str:
    return "[many]" if isinstance(value, list) else "[one]"


OneOrMany = Annotated[
    Annotated[T, Tag("[one]")] | Annotated[list[T], Tag("[many]")], Discriminator(_form)
]
"""One value for all prompts or a list of one each; told apart first, so that a wrong value gets one
complaint."""


class SglangSampling(SamplingFields):
    """`sampling_params`: SGLang's names for the fields of every route; null means the default."""

    model_config = ConfigDict(populate_by_name=True)
    model: str = ""
    max_new_tokens: Annotated[int, Field(ge=0)] | None = MAX_NEW_TOKENS
    min_tokens: int = Field(default=0, ge=0, alias="min_new_tokens")
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = Field(
        default=None, alias="sampling_seed"
    )
    include_stop_str_in_output: bool = Field(default=False, alias="no_stop_trim")

    @property
    def answer_tokens(self) -> AnswerTokens:
        """128 unless sent, or as many as fit; null is the rest of the context."""
        sent = "max_new_tokens" in self.model_fields_set
        return AnswerTokens(self.max_new_tokens, sent, fits=not sent)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {k: v for k, v in given.items() if v is not None or k == "max_new_tokens"}


class GenerateBody(Body):
    """POST /generate."""

    text: str | list[str] | None = None
    input_ids: Prompts | None = None
    sampling_params: OneOrMany[SglangSampling] | None = None
    rid: OneOrMany[Annotated[str, Field(max_length=RID_CHARS_MAX)]] | None = None
    return_logprob: OneOrMany[bool] | None = None
    logprob_start_len: OneOrMany[int] | None = None
    """First prompt token whose log probability is wanted; -1: those of the answer only."""
    top_logprobs_num: OneOrMany[int] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    lora_path: OneOrMany[str | None] = None
    """The adapter, or one for each prompt; null is the base model."""
    cache_salt: str | None = None
    extra_key: str | None = None
    """The same as `cache_salt`, under SGLang's older name."""


@dataclass(frozen=True, slots=True)
class _Member:
    """One prompt of the batch with all that was asked for it."""

    wanted: Wanted
    fields: SglangSampling
    rid: str
    logprobs: bool
    logprob_start: int
    top: int


class SglangRoute(ForeignRoute):
    """Answers errors in SGLang's shape."""

    @staticmethod
    async def refusal(request: Request, error: LorryError, raised: Exception) -> Response:
        """One shape for all."""
        return error_answer(error)


router = APIRouter(route_class=SglangRoute, tags=["SGLang dialect"])


@router.post("/generate")
async def generate(
    body: GenerateBody, http: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Continue one or several prompts, each with the base model or an adapter of its own."""
    body.refuse_unsupported()
    members, batch = await _members(service, body)
    check_count(service, len(members), members[0].fields.n)
    sequences = _sequences(members, body.cache_salt or body.extra_key or "")
    several = batch or len(sequences) > 1
    answers = [
        Growing(
            sequence=sequence,
            labels=Labels(service.tokenizer, False) if body.return_text_in_logprobs else None,
            logprobs=member.logprobs,
            logprob_start=member.logprob_start,
            top=member.top,
            index=at if body.stream and several else None,
            eos_token_ids=service.eos_token_ids,
            shows_prompt=body.return_prompt_token_ids,
        )
        for at, (sequence, member) in enumerate(_with_members(sequences, members))
    ]
    if body.stream:
        produce = partial(_stream, service, request_id_of(http), sequences, answers)
        beat = service.settings.heartbeat_s
        return EventStream(produce, heartbeat_s=beat, on_error=error_answer)
    work = partial(_whole, service, request_id_of(http), sequences, answers)
    done = await while_connected(http.receive, work)
    if done is None:
        return Response(status_code=499)  # nobody reads it: the client has left
    shapes = [answer.shape() for answer in answers]
    return json_response(shapes if several else shapes[0])


async def _whole(
    service: Service,
    request_id: str,
    sequences: Sequence[SequenceRequest],
    answers: Sequence[Growing],
) -> bool:
    async def emit(index: int, piece: Piece) -> None:
        answers[index].add(piece)

    await run_sequences(service, sequences, emit, Usage(), request_id)
    return True


async def _stream(
    service: Service,
    request_id: str,
    sequences: Sequence[SequenceRequest],
    answers: Sequence[Growing],
    writer: Writer,
) -> None:
    async def emit(index: int, piece: Piece) -> None:
        if answers[index].add(piece):
            await writer.write(event(to_json(answers[index].shape())))

    await run_sequences(service, sequences, emit, Usage(), request_id)


async def _members(service: Service, body: GenerateBody) -> tuple[list[_Member], bool]:
    """The batch, and whether it was sent as one. Raises `RequestInvalid`, `AdapterNotFound`."""
    given, param, batch = _prompts(body)
    count = len(given)
    check_count(service, count, None)
    spread = partial(_spread, count=count)
    paths = spread(body.lora_path, None, name="lora_path")
    base = Target(service.settings.base_name, None, None)
    targets = [base if path is None else await adapter(service, path) for path in paths]
    fields = spread(body.sampling_params, SglangSampling(), name="sampling_params")
    if len({one.n or 1 for one in fields}) > 1:
        raise RequestInvalid("n must be the same for all prompts of a batch.", param="n")
    rids = _rids(body.rid, count, batch)
    logprobs = spread(body.return_logprob, False, name="return_logprob")
    starts = spread(body.logprob_start_len, -1, name="logprob_start_len")
    tops = spread(body.top_logprobs_num, 0, name="top_logprobs_num")
    members = []
    for at, one in enumerate(given):
        ids = await encode(service, one, True, param) if isinstance(one, str) else tuple(one)
        prompt = Prompt(ids, one if isinstance(one, str) else None)
        start = _start(starts[at], len(ids)) if logprobs[at] else len(ids)
        top = _top(tops[at]) if logprobs[at] else 0
        make = partial(_wanted, service, targets[at], fields[at], prompt, param=param)
        if logprobs[at]:
            wanted = make(logprobs=top, prompt_logprobs=top if start < len(ids) else None)
        else:
            wanted = make()
        members.append(_Member(wanted, fields[at], rids[at], logprobs[at], start, top))
    return members, batch


def _prompts(body: GenerateBody) -> tuple[list[str | list[int]], str, bool]:
    """The prompts, the field that held them, and whether it held a list of them."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestInvalid("Send either text or input_ids.", param="text")
    param = "text" if body.input_ids is None else "input_ids"
    given = body.text if body.input_ids is None else body.input_ids
    if not given:
        raise RequestInvalid(f"{param} is empty; send at least one token.", param=param)
    one = isinstance(given, str) or isinstance(given[0], int)
    several = cast(list[str | list[int]], [given] if one else given)
    if param == "input_ids" and isinstance(several[0], str):
        raise RequestInvalid("input_ids must be token ids; send texts as text.", param=param)
    return several, param, not one


def _spread(value: T | list[T] | None, default: T, *, count: int, name: str) -> list[T]:
    """One value for each prompt. Raises `RequestInvalid` for a list of another length."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise RequestInvalid(
            f"{name} has {len(value)} entries for {count} prompts; give one for each.", param=name
        )
    return [default if one is None else one for one in value]


def _rids(given: str | list[str] | None, count: int, batch: bool) -> list[str]:
    """Ids of the answers: as given, or begun with the one given."""
    if isinstance(given, str) and batch:
        return [f"{given}_{at}" for at in range(count)]
    rids = _spread(given, "", count=count, name="rid")
    return [rid or uuid.uuid4().hex for rid in rids]


def _start(given: int, length: int) -> int:
    if given > length or given < -1:
        raise RequestInvalid(
            f"logprob_start_len is {given}; the prompt has {length} tokens.",
            param="logprob_start_len",
        )
    return length if given == -1 else given


def _top(given: int) -> int:
    if not 0 <= given <= LOGPROBS_MAX:
        raise RequestInvalid(
            f"top_logprobs_num is {given}; it must be from 0 to {LOGPROBS_MAX}.",
            param="top_logprobs_num",
        )
    return given


def _wanted(
    service: Service,
    target: Target,
    fields: SglangSampling,
    prompt: Prompt,
    *,
    param: str,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Wanted:
    """What is wanted for one prompt, with SGLang's names in the errors."""
    fields.refuse_unsupported()
    try:
        return want(
            service,
            target,
            fields,
            prompt,
            param=param,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except RequestInvalid as error:
        words = _OTHER_NAMES.sub(r"\1_new_tokens", error.message)
        raise RequestInvalid(words, param=error.param, details=error.details) from error


def _sequences(members: Sequence[_Member], salt: str) -> list[SequenceRequest]:
    """Every member `n` times, in SGLang's order."""
    n = members[0].fields.n or 1
    return [
        SequenceRequest(
            index=at * n + choice,
            request_id=member.rid if n == 1 else f"{member.rid}-{choice}",
            prompt=member.wanted.prompt.ids,
            prompt_text=member.wanted.prompt.text,
            sampling=for_choice(member.wanted.sampling, choice),
            name=member.wanted.target.name,
            version=member.wanted.target.version,
            cache_salt=salt,
            stops=member.wanted.stops,
            include_stop=member.fields.include_stop_str_in_output,
            skip_special_tokens=member.fields.skip_special_tokens,
            first_choice=choice == 0,
        )
        for at, member in enumerate(members)
        for choice in range(n)
    ]


def _with_members(
    sequences: Sequence[SequenceRequest], members: Sequence[_Member]
) -> Iterable[tuple[SequenceRequest, _Member]]:
    n = len(sequences) // len(members)
    return ((sequence, members[sequence.index // n]) for sequence in sequences)


async def adapter(service: Service, name: str) -> Target:
    """The adapter of that name, in SGLang's words when there is none."""
    try:
        return await service.find_adapter(name)
    except AdapterUnloading:
        raise
    except AdapterNotFound as error:
        loaded = names_listed(v.name for v in service.supervisor.adapters() if not v.unloading)
        raise AdapterNotFound(
            f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {loaded}.",
            param="lora_path",
        ) from error


def names_listed(names: Iterable[str]) -> str:
    """The first of them for a message, and how many more there are."""
    found = list(names)
    more = len(found) - NAMES_SHOWN_MAX
    shown = ", ".join(found[:NAMES_SHOWN_MAX]) or "none"
    return f"{shown} and {more} more" if more > 0 else shown


def error_answer(error: LorryError) -> Response:
    """SGLang's shape; what the caller can mend is 400 but for sizes and limits of rate."""
    kept = {HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.TOO_MANY_REQUESTS}
    status = error.status if error.status >= 500 or error.status in kept else 400
    shape = {
        "message": error.message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "code": status,
        "retryable": error.retryable,
    }
    return json_response({"error": shape}, status, error_headers(error))
