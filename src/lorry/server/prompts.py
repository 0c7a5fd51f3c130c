"""From a request's prompt to token ids that fit the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from lorry.adapter_settings import AdapterSettings
from lorry.chat_template import ChatTemplate
from lorry.engine import EngineCapabilities
from lorry.errors import RequestInvalid
from lorry.server.schema import CompletionRequest, Message
from lorry.server.service import Service, Target

INLINE_CHARS = 4_000
"""Encoding so much text takes about a millisecond; longer texts are encoded in a worker thread."""


RENDER_TIMEOUT_S = 10.0
"""Templates take milliseconds; only one that loops for ever takes longer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine."""

    ids: tuple[int, ...]
    text: str | None
    """As the caller wrote it; None when it came as ids."""


async def completion_prompts(service: Service, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion, in order. Raises `RequestInvalid`."""
    given = request.prompt
    if not given:
        raise RequestInvalid("prompt is empty; send at least one token.", param="prompt")
    one = isinstance(given, str) or isinstance(given[0], int)
    several = cast(list[str | list[int]], [given] if one else given)
    check_count(service, len(several), request.n)
    special = request.add_special_tokens
    return [await _prompt(service, prompt, special) for prompt in several]


def check_count(service: Service, prompts: int, n: int | None) -> None:
    """Raises `RequestInvalid` when one request asks for too many sequences."""
    count, limit = prompts * (n or 1), service.settings.max_sequences_per_request
    if count > limit:
        raise RequestInvalid(
            f"{prompts} prompts with n={n or 1} are {count} sequences; one request may ask for "
            f"{limit}.",
            param="n",
        )


async def _prompt(service: Service, given: str | list[int], add_special_tokens: bool) -> Prompt:
    if isinstance(given, str):
        return Prompt(await encode(service, given, add_special_tokens), given)
    return Prompt(tuple(given), None)


async def encode(
    service: Service, text: str, add_special_tokens: bool, param: str = "prompt"
) -> tuple[int, ...]:
    """Token ids of a text, without holding up other requests."""
    tokenizer = service.text(param)
    limit = service.supervisor.capabilities.max_model_len
    if len(text) > limit * tokenizer.max_token_chars:
        raise RequestInvalid(
            f"{param} has {len(text)} characters, more than this model's maximum context length "
            f"of {limit} tokens can hold.",
            param=param,
        )
    _check_whole(text, param)
    if len(text) <= INLINE_CHARS:
        await anyio.lowlevel.checkpoint()
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await anyio.to_thread.run_sync(
        lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens),
        limiter=service.encoding,
    )


def _check_whole(text: str, param: str) -> None:
    """JSON can smuggle in half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestInvalid(
            f"{param} has half a surrogate pair at character {error.start}; send whole characters.",
            param=param,
        ) from None


async def chat_prompt(
    service: Service,
    target: Target,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: dict[str, Any] | None,
    add_special_tokens: bool = False,
) -> Prompt:
    """A chat as one prompt, by the adapter's template or else the base's."""
    tokenizer = service.text("messages")
    template = service.adapter_template(target)
    plain = [_plain(message) for message in messages]
    given = with_system_prompt(plain, service.settings_of(target))
    text = await _render(
        service,
        lambda: tokenizer.render_chat(
            given,
            template=template,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            extra=variables,
        ),
    )
    return Prompt(await encode(service, text, add_special_tokens, "messages"), text)


def with_system_prompt(
    messages: list[dict[str, Any]], settings: AdapterSettings
) -> list[dict[str, Any]]:
    """The chat with the adapter's system message, unless it brings one of its own."""
    own = any(message["role"] in ("system", "developer") for message in messages)
    if settings.system_prompt is None or own:
        return messages
    return [{"role": "system", "content": settings.system_prompt}, *messages]


async def render_chat(
    service: Service, template: ChatTemplate | None, messages: Sequence[Mapping[str, Any]]
) -> str:
    """A chat's text, to try a template (None: the base model's). Raises `RequestInvalid`."""
    tokenizer = service.text("messages")
    return await _render(
        service,
        lambda: tokenizer.render_chat(
            messages, template=template, add_generation_prompt=True, continue_final_message=False
        ),
    )


async def _render(service: Service, render: Callable[[], str]) -> str:
    """In one of few threads and with a time limit, because a template is code of a stranger: a slow
    one must hold up nothing but chats."""
    with anyio.move_on_after(RENDER_TIMEOUT_S):
        return await anyio.to_thread.run_sync(
            render, abandon_on_cancel=True, limiter=service.rendering
        )
    raise RequestInvalid(
        f"The chat template took over {RENDER_TIMEOUT_S:g} s for these messages.", param="messages"
    )


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it: text parts joined by line ends, as vLLM does."""
    plain = message.model_dump(exclude_none=True)
    content = message.content
    if isinstance(content, list):
        other = next(
            (part.type for part in content if part.type != "text" or part.text is None), None
        )
        if other is not None:
            raise RequestInvalid(
                f"Content parts of type {other!r} are not supported; this model reads text.",
                param="messages",
            )
        content = "\n".join(part.text or "" for part in content)
    plain["content"] = content or ""
    return plain


def check_prompt(
    prompt: Prompt, max_tokens: int | None, capabilities: EngineCapabilities, param: str
) -> int:
    """How many tokens may follow: `max_tokens`, or the rest of the context. Raises
    `RequestInvalid`."""
    length, limit = len(prompt.ids), capabilities.max_model_len
    if not length:
        raise RequestInvalid(f"{param} is empty; send at least one token.", param=param)
    _check_vocabulary(prompt.ids, capabilities.base.vocab_size, param)
    if length >= limit:
        raise RequestInvalid(
            f"This model's maximum context length is {limit} tokens, but {param} has {length} "
            "tokens, which leaves no room for an answer. Shorten it.",
            param=param,
        )
    if max_tokens is None:
        return limit - length
    if length + max_tokens > limit:
        raise RequestInvalid(
            f"This model's maximum context length is {limit} tokens, but {length + max_tokens} "
            f"were asked for: {length} in {param} and {max_tokens} in the answer. "
            f"Shorten {param}, or lower max_tokens to {limit - length}.",
            param="max_tokens",
        )
    return max_tokens


def _check_vocabulary(ids: Sequence[int], vocab_size: int, param: str) -> None:
    if min(ids) >= 0 and max(ids) < vocab_size:
        return
    at, bad = next((at, i) for at, i in enumerate(ids) if not 0 <= i < vocab_size)
    raise RequestInvalid(
        f"{param} has token id {bad} at position {at}; this model's ids go from 0 to "
        f"{vocab_size - 1}.",
        param=param,
    )
