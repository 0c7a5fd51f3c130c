"""POST /v1/chat/completions."""

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
from lorry.server.logprobs import chat_logprobs, prompt_logprobs
from lorry.server.prompts import chat_prompt
from lorry.server.schema import ChatRequest
from lorry.server.service import Service, service_of
from lorry.server.wanted import want


async def create_chat_completion(
    request: ChatRequest, http: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Answer a chat with the base model or an adapter, by its chat template or else the base's."""
    _check(request)
    target = await service.find(request.model, request.lora_path)
    prompt = await chat_prompt(
        service,
        target,
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=request.chat_template_kwargs,
        add_special_tokens=request.add_special_tokens,
    )
    wanted = want(
        service,
        target,
        request,
        prompt,
        param="messages",
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    job = make_job(service, request, [wanted], prefix="chatcmpl")
    return await respond(service, http, job, _Shape(job, request), stream=bool(request.stream))


def _check(request: ChatRequest) -> None:
    """Raises `RequestInvalid` for fields that do not go together."""
    request.refuse_unsupported()
    for message in request.messages:
        message.refuse_unsupported()
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestInvalid("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestInvalid(
            "prompt_logprobs cannot be streamed; leave stream out.", param="prompt_logprobs"
        )


class _Shape:
    """OpenAI's chat.completion."""

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, job: Job, request: ChatRequest) -> None:
        self._job = job
        self._request = request

    def events(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The role first, then what each piece adds; nothing for a piece that says nothing."""
        events: list[dict[str, Any]] = []
        if piece.first:
            opening = self._chunk(index, {"role": "assistant", "content": ""})
            events.append({"choices": [opening]} | self._prompt_ids())
        shows_ids = self._job.return_token_ids and piece.token_ids
        if piece.text or piece.finish_reason or piece.logprobs or shows_ids:
            events.append({"choices": [self._added(index, piece)]})
        return events

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole messages; what concerns the prompt, which all share, stands beside them."""
        shape: dict[str, Any] = {
            "choices": [self._whole(index, answer) for index, answer in enumerate(answers)]
        }
        if self._request.prompt_logprobs is not None:
            entries = answers[0].prompt_logprobs
            shape["prompt_logprobs"] = prompt_logprobs(self._job.labels, entries)
        return shape | self._prompt_ids()

    def _added(self, index: int, piece: Piece) -> dict[str, Any]:
        choice = self._chunk(index, {"content": piece.text} if piece.text else {})
        choice["finish_reason"] = piece.finish_reason
        if piece.finish_reason:
            choice["stop_reason"] = piece.stop_reason
        if self._request.logprobs:
            choice["logprobs"] = self._logprobs(piece.logprobs)
        if self._job.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return choice

    def _whole(self, index: int, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(answer.texts), "refusal": None},
            "logprobs": self._logprobs(answer.logprobs) if self._request.logprobs else None,
            "finish_reason": answer.last.finish_reason,
            "stop_reason": answer.last.stop_reason,
        }
        if self._job.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _prompt_ids(self) -> dict[str, Any]:
        if not self._job.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._job.sequences[0].prompt)}

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(self._job.labels, entries, self._request.top_logprobs or 0)
