"""POST /tokenize and /detokenize, in vLLM's shapes."""

from typing import Annotated, Any

from fastapi import Depends

from lorry.errors import RequestInvalid
from lorry.server.prompts import chat_prompt, encode
from lorry.server.schema import DetokenizeRequest, TokenizeRequest
from lorry.server.service import Service, service_of

Caller = Annotated[Service, Depends(service_of)]


async def tokenize(request: TokenizeRequest, service: Caller) -> dict[str, Any]:
    """Token ids of a prompt, or of a chat as the model or adapter would see it."""
    request.refuse_unsupported()
    target = service.target(request.model or service.settings.base_name)
    if (request.prompt is None) == (request.messages is None):
        raise RequestInvalid("Send either prompt or messages.", param="prompt")
    if request.messages is not None:
        prompt = await chat_prompt(
            service,
            target,
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
            add_special_tokens=bool(request.add_special_tokens),
        )
        ids = prompt.ids
    else:
        ids = await encode(service, request.prompt or "", request.add_special_tokens is not False)
    answer = {
        "count": len(ids),
        "max_model_len": service.supervisor.capabilities.max_model_len,
        "tokens": list(ids),
    }
    if request.return_token_strs:
        tokenizer = service.text("prompt")
        answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in ids]
    return answer


async def detokenize(request: DetokenizeRequest, service: Caller) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    request.refuse_unsupported()
    service.target(request.model or service.settings.base_name)
    tokenizer = service.text("tokens")
    vocab_size = service.supervisor.capabilities.base.vocab_size
    bad = next((token for token in request.tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestInvalid(
            f"tokens has token id {bad}; this model's ids go from 0 to {vocab_size - 1}.",
            param="tokens",
        )
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}
