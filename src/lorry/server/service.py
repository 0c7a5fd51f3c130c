"""What every route works with: the supervisor, the tokenizer, the settings, and the names they add
up to."""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import anyio
from fastapi import Request

from lorry.adapter_settings import NO_SETTINGS, AdapterSettings
from lorry.chat_template import ChatTemplate
from lorry.errors import AdapterNotFound, AdapterUnloading, RequestInvalid
from lorry.ids import AdapterName, VersionId
from lorry.server.receiving import UploadRoom
from lorry.server.settings import ServerSettings
from lorry.server.shutdown import Shutdown
from lorry.supervisor import Supervisor
from lorry.telemetry import Telemetry
from lorry.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """What a request's `model` means."""

    model: str
    """As the request wrote it; answers repeat it."""
    name: AdapterName | None
    """None: the base model."""
    version: VersionId | None
    """Only when the request asked for one with `name@version`."""


@dataclass(frozen=True, slots=True)
class Service:
    """One per app; in `app.state.service`."""

    supervisor: Supervisor
    settings: ServerSettings
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    telemetry: Telemetry
    shutdown: Shutdown = field(default_factory=Shutdown)
    started_s: float = field(default_factory=time.time)
    uploads: UploadRoom = field(default_factory=UploadRoom)
    encoding: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(2))
    """Threads for long texts; each can keep a core busy."""
    rendering: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))
    """Threads for chat templates, apart from all others: these may never end."""

    def target(self, model: str, lora_path: str | None = None) -> Target:
        """Find a model by the first of three rules that fits: the base's name, and then `lora_path`
        names the adapter if given; an adapter's own name; `base:adapter`, SGLang's form. Raises
        `AdapterNotFound` in the words that vLLM's clients look for."""
        if model in self.settings.served_model_names:
            if lora_path is None:
                return Target(model, None, None)
            return replace(self.adapter_target(lora_path), model=model)
        # Both may hold colons themselves, so no name is cut at its first one.
        bases = (f"{base}:" for base in self.settings.served_model_names)
        rests = (model.removeprefix(base) for base in bases if model.startswith(base))
        return self._find(model, (model, *rests), "model")

    async def find(self, model: str, lora_path: str | None = None) -> Target:
        """As `target`, for requests that want tokens: a name that nobody registered is looked up
        where the resolvers say. Raises also why it cannot be served."""
        try:
            found = self.target(model, lora_path)
        except AdapterUnloading:
            raise
        except AdapterNotFound:
            is_base = model in self.settings.served_model_names
            wanted = lora_path if is_base and lora_path is not None else model
            name = self._learnable(wanted)
            if name is None:
                raise
            await self._learn(name, wanted)
            found = self.target(model, lora_path)
        if found.name is not None:
            self.supervisor.used(found.name)
        return found

    async def find_adapter(self, name: str) -> Target:
        """As `adapter_target`, with a look-up."""
        return await self.find(self.settings.base_name, name)

    async def _learn(self, name: str, model: str) -> None:
        try:
            await self.supervisor.learn(name)
        except AdapterNotFound as error:
            raise self._unknown(model, error.param or "model") from error

    def _learnable(self, model: str) -> str | None:
        """The name to look up, of those that `model` may mean."""
        bases = (f"{base}:" for base in self.settings.served_model_names)
        rests = (model.removeprefix(base) for base in bases if model.startswith(base))
        names = (name for name in (model, *rests) if self.supervisor.learnable(name))
        return next(names, None)

    def adapter_target(self, name: str) -> Target:
        """The adapter that a field beside `model` names; the base has no name there, and is not
        what an empty one means. Raises `AdapterNotFound`, `RequestInvalid`."""
        if not name:
            raise RequestInvalid(
                "lora_path is empty; name an adapter, or send null for the base model.",
                param="lora_path",
            )
        return self._find(name, (name,), "lora_path")

    def _find(self, model: str, names: Sequence[str], param: str) -> Target:
        """The adapter with the first of the names that there is."""
        for name in names:
            try:
                found, version = self.supervisor.resolve(name)
            except AdapterUnloading as error:
                raise AdapterUnloading(error.message, param=param) from error
            except AdapterNotFound:
                continue
            return Target(model, found, version)
        raise self._unknown(model, param)

    def _unknown(self, model: str, param: str) -> AdapterNotFound:
        return AdapterNotFound(
            f"The model `{model}` does not exist. The base model here is "
            f"`{self.settings.base_name}`; GET /v1/models lists the adapters.",
            param=param,
        )

    def text(self, what: str) -> Tokenizer:
        """The tokenizer, for `what` needs it. Raises `RequestInvalid` when the model has none."""
        if self.tokenizer is None:
            raise RequestInvalid(
                f"This model came without a tokenizer, so {what} cannot be used; "
                "send prompts as token ids.",
                param=what,
            )
        return self.tokenizer

    def settings_of(self, target: Target) -> AdapterSettings:
        """What the adapter's owner has set; nothing for the base."""
        return NO_SETTINGS if target.name is None else self.supervisor.settings_of(target.name)

    def adapter_template(self, target: Target) -> ChatTemplate | None:
        """The chat template that was set for the adapter, or else the one that it brought, if
        any."""
        if target.name is None:
            return None
        source = self.settings_of(target).chat_template
        source = source or self.supervisor.adapter(target.name).manifest.chat_template
        return _compiled(source) if source else None


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> ChatTemplate:
    """Compiling takes milliseconds, and many adapters bring the same template."""
    return ChatTemplate(source)


async def service_of(request: Request) -> Service:
    """The service of the app that a request reached; a FastAPI dependency, and a coroutine because
    plain functions cost a thread each."""
    service: Service = request.app.state.service
    return service
