"""From a request's sampling fields to the engine's parameters."""

from dataclasses import replace

from lorry.engine import SamplingParams
from lorry.errors import RequestInvalid
from lorry.server.schema import INT64, SamplingFields
from lorry.server.service import Service

GREEDY_BELOW = 1e-5
"""A temperature below this is 0, as in vLLM: dividing by it would give infinities."""
TEMPERATURE_MIN = 0.01
"""A temperature between the two is raised to this, as in vLLM, for the same reason."""
LOGIT_BIAS_MAX = 1024
"""Tokens that one request may favour or forbid; OpenAI's limit is 300."""


def sampling_params(
    service: Service,
    request: SamplingFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Parameters of the first choice. Raises `RequestInvalid` for what a schema cannot see."""
    vocab_size = service.supervisor.capabilities.base.vocab_size
    if request.min_tokens > max_tokens:
        raise RequestInvalid(
            f"min_tokens is {request.min_tokens}, over the {max_tokens} tokens of max_tokens.",
            param="min_tokens",
        )
    if request.stop:
        service.text("stop")
    _check_ids(request.stop_token_ids, vocab_size, "stop_token_ids")
    temperature = _or(request.temperature, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else max(temperature, TEMPERATURE_MIN),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=request.seed,
        stop_token_ids=tuple(request.stop_token_ids),
        eos_token_ids=service.eos_token_ids,
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(request, vocab_size),
    )


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The same for another choice of `n`: with a seed, each has its own, or all would be equal."""
    if not choice or params.seed is None:
        return params
    return replace(params, seed=(params.seed + choice + INT64) % (2 * INT64) - INT64)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(request: SamplingFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    given = request.logit_bias or {}
    if len(given) > LOGIT_BIAS_MAX:
        raise RequestInvalid(
            f"logit_bias has {len(given)} entries; {LOGIT_BIAS_MAX} are the most.",
            param="logit_bias",
        )
    try:
        biases = tuple((int(key), value) for key, value in given.items())
    except ValueError as error:
        raise RequestInvalid(
            "logit_bias must map token ids, written as strings, to numbers.", param="logit_bias"
        ) from error
    _check_ids([token for token, _ in biases], vocab_size, "logit_bias")
    return biases


def _check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestInvalid(
                f"{param} names token id {token}; this model's ids go from 0 to {vocab_size - 1}.",
                param=param,
            )
