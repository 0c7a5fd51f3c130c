"""Shapes of the inference requests, and nothing else.

Unknown fields are let through, as OpenAI's and vLLM's servers do, and logged at debug level. Known
fields that would change the answer and are not built are refused: `unsupported`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, StrictBool

from lorry.errors import RequestInvalid

log = logging.getLogger(__name__)

STOPS_MAX = 64
"""Stop strings of one request. OpenAI takes 4; each costs a search per token."""
STOP_CHARS_MAX = 1000
N_MAX = 128
"""OpenAI's own limit."""
LOGPROBS_MAX = 20
"""OpenAI's and vLLM's own limit."""
INT64 = 2**63

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "documents": (),
    "ebnf": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "image_data": (),
    "input_embeds": (),
    "json_schema": (),
    "length_penalty": (1.0,),
    "logit_processors": (),
    "modalities": (["text"],),
    "mm_processor_kwargs": (),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "return_entropy": (),
    "return_hidden_states": (),
    "session_params": (),
    "stop_regex": (),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "token_ids_logprob": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "video_data": (),
    "web_search_options": (),
}
"""Fields that are not built -> values, beside null, false and empty ones, that ask for nothing."""

HARMLESS = frozenset(
    {
        "add_special_tokens",
        "metadata",
        "parallel_tool_calls",
        "request_id",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Fields that are known and change nothing here."""


def _stops(value: Any) -> Any:
    """One string or null becomes a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


PROMPT_FORMS = "a text, a list of token ids, a list of texts, or a list of lists of token ids"


def _prompt(value: Any) -> Any:
    """One check with one sentence, where a union of four types would give four complaints."""
    if isinstance(value, str) or _is_ids(value):
        return value
    if isinstance(value, list) and (
        all(isinstance(one, str) for one in value) or all(_is_ids(one) for one in value)
    ):
        return value
    raise ValueError(f"Input should be {PROMPT_FORMS}")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _empty(value: Any) -> Any:
    return [] if value is None else value


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]],
    BeforeValidator(_stops, json_schema_input_type=str | list[str] | None),
    Field(max_length=STOPS_MAX),
]
Prompts = Annotated[
    str | list[int] | list[str] | list[list[int]],
    PlainValidator(_prompt, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]
TokenIds = Annotated[list[int], BeforeValidator(_empty, json_schema_input_type=list[int] | None)]


class Body(BaseModel):
    """Every request body: finite numbers only, unknown fields kept aside."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    def refuse_unsupported(self) -> None:
        """Raises `RequestInvalid` for a field that is not built and asks for something."""
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL:
                if value and value not in NEUTRAL[name]:
                    raise RequestInvalid(f"{name} is not supported by this server.", param=name)
            elif name not in HARMLESS:
                log.debug("unknown request field %r is ignored", name)


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool = False
    """Send the token counts in a last event."""
    continuous_usage_stats: bool = False
    """Send them with each event too."""


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """How long an answer may be."""

    count: int | None
    """None: as long as the context allows."""
    sent: bool
    """Whether the request said so."""
    fits: bool = False
    """It is lowered where the context is short of it, and no error."""


class SamplingFields(Body):
    """What completions and chats have in common. Defaults are OpenAI's, also for `temperature`:
    1."""

    model: str = Field(min_length=1)
    n: Annotated[int, Field(ge=1, le=N_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    user: str | None = None

    @property
    def answer_tokens(self) -> AnswerTokens:
        """By the route's own fields and default."""
        return AnswerTokens(None, sent=False)


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompts
    lora_path: str | list[str | None] | None = None
    """SGLang's way to name the adapter while `model` names the base; one, or one per prompt."""
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    add_special_tokens: bool = True

    @property
    def answer_tokens(self) -> AnswerTokens:
        """16 unless sent; null is the rest of the context."""
        return AnswerTokens(self.max_tokens, "max_tokens" in self.model_fields_set)


class TextPart(Body):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(Body):
    """One message of a chat. Unknown fields reach the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None


class ChatFields(Body):
    """What makes a prompt of messages, for chats and for /tokenize."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = False


class ChatRequest(SamplingFields, ChatFields):
    """POST /v1/chat/completions."""

    lora_path: str | None = None
    """SGLang's way to name the adapter while `model` names the base."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None

    @property
    def answer_tokens(self) -> AnswerTokens:
        """The rest of the context unless sent."""
        count = self.max_completion_tokens or self.max_tokens
        return AnswerTokens(count, sent=count is not None)


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
