"""POST /v1/completions."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from lorry.engine import TokenLogprobs
from lorry.errors import RequestInvalid
from lorry.server.answer import Piece
from lorry.server.generation import Answer
from lorry.server.job import Job, make_job, respond
from lorry.server.logprobs import completion_logprobs, prompt_logprobs
from lorry.server.prompts import completion_prompts
from lorry.server.schema import CompletionRequest
from lorry.server.service import Service, Target, service_of
from lorry.server.wanted import want


async def create_completion(
    request: CompletionRequest, http: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Continue one or several prompts with the base model or an adapter."""
    _check(request)
    targets = await _targets(service, request)
    given = await completion_prompts(service, request)
    targets = _one_each(request, targets, len(given))
    prompt_top = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_top = max(request.logprobs, prompt_top or 0)
    wanted = [
        want(
            service,
            target,
            request,
            prompt,
            param="prompt",
            logprobs=request.logprobs,
            prompt_logprobs=prompt_top,
        )
        for target, prompt in zip(targets, given, strict=True)
    ]
    job = make_job(service, request, wanted, prefix="cmpl", echo=bool(request.echo))
    return await respond(service, http, job, _Shape(job, request), stream=bool(request.stream))


async def _targets(service: Service, request: CompletionRequest) -> list[Target]:
    """What is asked for: one for all prompts, or as many as `lora_path` lists."""
    paths = request.lora_path
    listed = paths if isinstance(paths, list) else [paths]
    return [await service.find(request.model, path) for path in listed]


def _one_each(request: CompletionRequest, targets: list[Target], prompts: int) -> list[Target]:
    """A target per prompt. Raises `RequestInvalid` for a list of another length."""
    if not isinstance(request.lora_path, list):
        return targets * prompts
    if len(targets) != prompts:
        raise RequestInvalid(
            f"lora_path lists {len(targets)} adapters for {prompts} prompts; give one for each, "
            "null for the base.",
            param="lora_path",
        )
    return targets


def _check(request: CompletionRequest) -> None:
    """Raises `RequestInvalid` for fields that do not go together."""
    request.refuse_unsupported()
    n = request.n or 1
    if request.best_of not in (None, n):
        raise RequestInvalid(
            f"best_of is {request.best_of}; only best_of equal to n ({n}) is supported.",
            param="best_of",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise RequestInvalid(
            "prompt_logprobs cannot be streamed; leave stream out.", param="prompt_logprobs"
        )
    if request.max_tokens == 0 and not request.echo:
        raise RequestInvalid(
            "max_tokens is 0, which only makes sense with echo.", param="max_tokens"
        )


class _Shape:
    """OpenAI's text_completion."""

    stream_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, job: Job, request: CompletionRequest) -> None:
        self._job = job
        self._request = request
        self._offsets = dict.fromkeys((sequence.index for sequence in job.sequences), 0)
        self._prompts = {sequence.index: sequence.prompt for sequence in job.sequences}

    def events(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Nothing for a piece that says nothing."""
        if not (piece.text or piece.finish_reason or piece.logprobs or self._shows_ids(piece)):
            return []
        choice = self._choice(index, piece, piece.text)
        if self._request.logprobs is not None:
            prompt = piece.prompt_logprobs if piece.first else None
            choice["logprobs"] = self._logprobs(index, prompt, piece.logprobs)
        if self._job.return_token_ids:
            choice["prompt_token_ids"] = list(self._prompts[index]) if piece.first else None
            choice["token_ids"] = list(piece.token_ids)
        return [{"choices": [choice]}]

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole texts."""
        return {"choices": [self._whole(index, answer) for index, answer in enumerate(answers)]}

    def _whole(self, index: int, answer: Answer) -> dict[str, Any]:
        choice = self._choice(index, answer.last, "".join(answer.texts))
        if self._request.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, answer.prompt_logprobs, answer.logprobs)
        choice["prompt_logprobs"] = None
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._job.labels, answer.prompt_logprobs)
        if self._job.return_token_ids:
            choice["prompt_token_ids"] = list(self._prompts[index])
            choice["token_ids"] = answer.token_ids
        return choice

    def _choice(self, index: int, last: Piece, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _shows_ids(self, piece: Piece) -> bool:
        """Ids are shown when asked for; without a tokenizer an empty text still marks a token."""
        return bool(piece.token_ids) and (self._job.return_token_ids or not self._job.has_text)

    def _logprobs(
        self,
        index: int,
        prompt: Sequence[TokenLogprobs] | None,
        made: Sequence[TokenLogprobs],
    ) -> dict[str, Any]:
        """Of the new tokens, after those of the echoed prompt, whose first token has none."""
        first = None
        if self._request.echo and prompt is not None:
            first, made = self._prompts[index][0], [*prompt, *made]
        shape, self._offsets[index] = completion_logprobs(
            self._job.labels, made, self._request.logprobs or 0, self._offsets[index], first
        )
        return shape
