"""From a request's fields to what one prompt gets: the one place where an adapter's settings meet
requests, whatever the route.

Rules: what a request sends wins over the adapter's defaults; a value over the adapter's maximum is
refused, since another value would change the answer behind the caller's back; but `max_tokens`, and
whatever a request leaves to the server, is made to fit. A shorter answer says so itself: its
`finish_reason` is "length".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorry.adapter_settings import NO_SETTINGS, AdapterSettings
from lorry.engine import SamplingParams
from lorry.errors import RequestInvalid
from lorry.server.prompts import Prompt, check_prompt
from lorry.server.sampling import sampling_params
from lorry.server.schema import AnswerTokens, SamplingFields
from lorry.server.service import Service, Target

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling fields that an adapter may set or limit, and what they are when nobody sets them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One prompt and all that was asked for it."""

    prompt: Prompt
    target: Target
    sampling: SamplingParams
    """Of the first choice."""
    stops: tuple[str, ...]


def want(
    service: Service,
    target: Target,
    fields: SamplingFields,
    prompt: Prompt,
    *,
    param: str,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Wanted:
    """`param` names the field that holds the prompt. Raises `RequestInvalid`."""
    settings = service.settings_of(target)
    tokens = fields.answer_tokens
    if settings is not NO_SETTINGS:
        fields = _with_settings(fields, settings, target)
        tokens = _limited(tokens, settings)
    capabilities = service.supervisor.capabilities
    room = check_prompt(prompt, None if tokens.fits else tokens.count, capabilities, param)
    if tokens.fits and tokens.count is not None:
        room = min(room, tokens.count)
    params = sampling_params(
        service, fields, max_tokens=room, logprobs=logprobs, prompt_logprobs=prompt_logprobs
    )
    return Wanted(prompt, target, params, tuple(fields.stop))


def _with_settings(
    fields: SamplingFields, settings: AdapterSettings, target: Target
) -> SamplingFields:
    """The request as if it had sent the adapter's values for what it left out."""
    maxima, changed = settings.maxima, dict[str, Any]()
    for name, neutral in NEUTRAL.items():
        sent, most = getattr(fields, name), maxima.get(name)
        if sent is None:
            value = settings.defaults.get(name, neutral)
            changed[name] = value if most is None else least(name, value, most)
        elif most is not None and over(name, sent, most):
            raise _too_much(target, name, sent, most)
    if fields.seed is None and "seed" in settings.defaults:
        changed["seed"] = int(settings.defaults["seed"])
    if fields.n is not None and over("n", fields.n, maxima.get("n", fields.n)):
        raise _too_much(target, "n", fields.n, maxima["n"])
    more = [stop for stop in settings.stop if stop not in fields.stop]
    if more:
        changed["stop"] = [*fields.stop, *more]
    return fields.model_copy(update=changed)


def _limited(tokens: AnswerTokens, settings: AdapterSettings) -> AnswerTokens:
    """The number of tokens, by the adapter's default and maximum; the latter never refuses."""
    if not tokens.sent and "max_tokens" in settings.defaults:
        tokens = AnswerTokens(int(settings.defaults["max_tokens"]), sent=False, fits=True)
    most = settings.maxima.get("max_tokens")
    if most is None:
        return tokens
    if tokens.count is None:
        return AnswerTokens(int(most), tokens.sent, fits=True)
    return AnswerTokens(min(tokens.count, int(most)), tokens.sent, tokens.fits)


def over(name: str, value: float, most: float) -> bool:
    """Whether a value is more than the most; no limit (`top_k` 0 or -1) is more than any."""
    return _size(name, value) > _size(name, most)


def least(name: str, value: float, most: float) -> float:
    """The value, made to fit."""
    return most if over(name, value, most) else value


def _size(name: str, value: float) -> float:
    return float("inf") if name == "top_k" and value <= 0 else value


def _too_much(target: Target, name: str, value: float, most: float) -> RequestInvalid:
    return RequestInvalid(
        f"{name} is {value:g}; the adapter '{target.name}' allows {most:g} at most.", param=name
    )
