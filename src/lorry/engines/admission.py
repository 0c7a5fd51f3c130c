"""What makes a request impossible for an engine of given capabilities: judged alike for all."""

from lorry.engine import EngineCapabilities, GenerateRequest
from lorry.errors import EngineRejected, RequestInvalid


def check_request(request: GenerateRequest, capabilities: EngineCapabilities) -> None:
    """Raise `RequestInvalid` for the caller's mistakes, `EngineRejected` for our own."""
    _check_prompt(request, capabilities)
    vocab_size = capabilities.base.vocab_size
    for token, _ in request.sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise RequestInvalid(
                f"logit_bias names token {token}, but this model's tokens go from 0 to "
                f"{vocab_size - 1}.",
                param="logit_bias",
            )
    if request.sampling.prompt_logprobs is not None and not capabilities.prompt_logprobs:
        raise RequestInvalid("This engine cannot report prompt_logprobs.", param="prompt_logprobs")
    if (request.engine_id is None) != (request.version is None):
        raise EngineRejected(
            f"Request {request.request_id} names engine id {request.engine_id} and version "
            f"{request.version}: it needs both or neither."
        )


def _check_prompt(request: GenerateRequest, capabilities: EngineCapabilities) -> None:
    length, limit = len(request.prompt), capabilities.max_model_len
    if not length:
        raise RequestInvalid("The prompt has no tokens; send at least one.", param="prompt")
    if length + min(1, request.sampling.max_tokens) > limit:
        raise RequestInvalid(
            f"The prompt has {length} tokens, but prompt and answer together may have "
            f"{limit} at most.",
            param="prompt",
        )
    if min(request.prompt) < 0 or max(request.prompt) >= capabilities.base.vocab_size:
        bad = next(t for t in request.prompt if not 0 <= t < capabilities.base.vocab_size)
        raise RequestInvalid(
            f"The prompt has token {bad}, but this model's tokens go from 0 to "
            f"{capabilities.base.vocab_size - 1}.",
            param="prompt",
        )
