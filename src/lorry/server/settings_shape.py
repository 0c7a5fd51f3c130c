"""What owners set for their adapters, as HTTP bodies have it: read, checked and shown."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from lorry.adapter_settings import NESTED, AdapterSettings, SettingsChange
from lorry.chat_template import ChatTemplate
from lorry.errors import RequestInvalid
from lorry.server.prompts import render_chat
from lorry.server.schema import INT64, N_MAX, STOP_CHARS_MAX
from lorry.server.service import Service, Target
from lorry.server.wanted import over

TEXT_CHARS_MAX = 65_536
"""Of a system prompt or a chat template: each is read by every chat."""
STOPS_MAX = 16
"""Each costs a search per token, beside those that a request sends."""
OWNER_CHARS_MAX = 256
IDLE_MIN_S = 1.0
IDLE_MAX_S = 10 * 365 * 86_400.0

FirmInt = Annotated[int, Field(strict=True)]
FirmFloat = Annotated[float, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1, max_length=TEXT_CHARS_MAX)]


class _Sampling(BaseModel):
    """Ranges are those of requests."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    temperature: Annotated[FirmFloat, Field(ge=0)] | None = None
    top_p: Annotated[FirmFloat, Field(gt=0, le=1)] | None = None
    min_p: Annotated[FirmFloat, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[FirmFloat, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FirmFloat, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[FirmFloat, Field(gt=0, le=100)] | None = None
    max_tokens: Annotated[FirmInt, Field(ge=1)] | None = None


class SamplingDefaults(_Sampling):
    """Values for requests that do not send them; null takes one back."""

    top_k: Annotated[FirmInt, Field(ge=-1)] | None = None
    seed: Annotated[FirmInt, Field(ge=-INT64, lt=INT64)] | None = None


class SamplingMaxima(_Sampling):
    """The most that a request may ask for; null takes one back."""

    top_k: Annotated[FirmInt, Field(ge=1)] | None = None
    n: Annotated[FirmInt, Field(ge=1, le=N_MAX)] | None = None


class SettingsFields(BaseModel):
    """The fields that PUT and PATCH share: what is left out stays as it is, null takes it back."""

    system_prompt: Text | None = Field(
        default=None, description="for chats that bring no system message"
    )
    chat_template: Text | None = Field(
        default=None, description="Jinja; comes before the adapter's own and the base model's"
    )
    defaults: SamplingDefaults | None = Field(
        default=None, description="sampling values for requests that do not send them"
    )
    maxima: SamplingMaxima | None = Field(
        default=None,
        description="a request over one is refused; max_tokens is made to fit instead",
    )
    stop: (
        Annotated[
            list[Annotated[str, Field(strict=True, min_length=1, max_length=STOP_CHARS_MAX)]],
            Field(max_length=STOPS_MAX),
        ]
        | None
    ) = Field(default=None, description="strings that end every answer, beside a request's own")
    owner: Annotated[str, Field(strict=True, min_length=1, max_length=OWNER_CHARS_MAX)] | None = (
        None
    )
    idle_ttl: Annotated[FirmFloat, Field(ge=IDLE_MIN_S, le=IDLE_MAX_S)] | None = Field(
        default=None,
        description="seconds; the adapter is unloaded when nobody has used it for so long",
        allow_inf_nan=False,
    )

    def change(self) -> SettingsChange | None:
        """What the body sets; None when it sets nothing."""
        values: dict[str, Any] = {}
        for name in FIELDS:
            if name in self.model_fields_set:
                value = getattr(self, name)
                if isinstance(value, BaseModel):
                    value = value.model_dump(exclude_unset=True)
                elif isinstance(value, list):
                    value = tuple(value)
                values[_KEPT_AS.get(name, name)] = value
        return SettingsChange(values) if values else None


FIELDS = tuple(SettingsFields.model_fields)
_KEPT_AS = {"idle_ttl": "idle_ttl_s"}


def shown(settings: AdapterSettings) -> dict[str, Any]:
    """As GET shows them, under the names that PATCH takes."""
    return {
        "owner": settings.owner,
        "system_prompt": settings.system_prompt,
        "chat_template": settings.chat_template,
        "defaults": dict(settings.defaults),
        "maxima": dict(settings.maxima),
        "stop": list(settings.stop),
        "idle_ttl": settings.idle_ttl_s,
    }


async def check_change(
    service: Service, name: str | None, old: AdapterSettings, change: SettingsChange | None
) -> None:
    """Raises `RequestInvalid` for what no single field shows: values that contradict each other,
    and templates that do not work. `name` is None for an adapter that is not there yet."""
    if change is None:
        return
    new = change.apply(old)
    if any(field in change.values for field in NESTED):  # a contradiction stops no other change
        _check_order(new)
        _check_context(service, new)
    for field in ("system_prompt", "chat_template", "stop"):
        if change.values.get(field):
            service.text(field)
    if change.values.get("system_prompt") or change.values.get("chat_template"):
        await _check_chat(service, name, new)


def _check_order(new: AdapterSettings) -> None:
    for name, value in new.defaults.items():
        most = new.maxima.get(name)
        if most is not None and over(name, value, most):
            raise RequestInvalid(
                f"defaults.{name} is {value:g}, over maxima.{name}, which is {most:g}; lower the "
                "one or raise the other.",
                param=f"defaults.{name}",
            )


def _check_context(service: Service, new: AdapterSettings) -> None:
    limit = service.supervisor.capabilities.max_model_len
    for field in ("defaults", "maxima"):
        values: Mapping[str, float] = getattr(new, field)
        count = values.get("max_tokens", 0)
        if count >= limit:
            raise RequestInvalid(
                f"{field}.max_tokens is {count:g}; this model's context holds {limit} tokens, the "
                "prompt's included.",
                param=f"{field}.max_tokens",
            )


async def _check_chat(service: Service, name: str | None, new: AdapterSettings) -> None:
    """Try the template on a first question, with the system prompt in front of it: some models'
    templates take none."""
    template = None
    if new.chat_template is not None:
        template = _compiled(new.chat_template)
    elif name is None:
        return  # the adapter may bring its own, which is read later
    else:
        template = service.adapter_template(Target(name, service.supervisor.resolve(name)[0], None))
    question = [{"role": "user", "content": "Hello"}]
    if new.chat_template is not None:
        await _try(service, template, question, "chat_template")
    if new.system_prompt is not None:
        system = {"role": "system", "content": new.system_prompt}
        await _try(service, template, [system, *question], "system_prompt")


def _compiled(source: str) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except RequestInvalid as error:
        raise RequestInvalid(error.message, param="chat_template") from error


async def _try(
    service: Service,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    param: str,
) -> None:
    try:
        await render_chat(service, template, messages)
    except RequestInvalid as error:
        what = "with a system message" if param == "system_prompt" else "with one question"
        raise RequestInvalid(
            f"{param} is not usable: a chat {what} was tried. {error.message}", param=param
        ) from error
