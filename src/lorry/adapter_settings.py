"""What an adapter's owner sets for everybody who asks it: values only, no policy.

Settings belong to the name, not to a version: a replace or a rollback keeps them. The server checks
them (`server/settings_shape.py`) and applies them (`server/wanted.py`); the store keeps them; the
core reads one of them, the idle time.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """All of them, as they are in force."""

    system_prompt: str | None = None
    """For chats that bring no system message."""
    chat_template: str | None = None
    """Jinja; comes before the adapter's own and the base model's."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Sampling field -> value, for requests that do not send it."""
    maxima: Mapping[str, float] = field(default_factory=dict)
    """Sampling field -> the most that a request may ask for."""
    stop: tuple[str, ...] = ()
    """Strings that end every answer, beside those that a request sends."""
    owner: str | None = None
    idle_ttl_s: float | None = None
    """The adapter is unloaded when nobody has used it for so long."""


NO_SETTINGS = AdapterSettings()
"""Of an adapter for which nobody has set anything."""

NESTED = ("defaults", "maxima")
"""Fields that are changed value by value."""


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """Some fields and their new values; None takes a field back. What is not named stays, also in
    `defaults` and `maxima`."""

    values: Mapping[str, Any]

    def apply(self, old: AdapterSettings) -> AdapterSettings:
        """The settings after it."""
        merged: dict[str, Any] = {f.name: getattr(old, f.name) for f in fields(AdapterSettings)}
        for name, value in self.values.items():
            if value is None:
                merged[name] = getattr(NO_SETTINGS, name)
            elif name in NESTED:
                both = {**merged[name], **value}
                merged[name] = {key: one for key, one in both.items() if one is not None}
            else:
                merged[name] = value
        return AdapterSettings(**merged)

    def idle_ms(self, old_ms: int | None) -> int | None:
        """The idle time after it, in milliseconds."""
        if "idle_ttl_s" not in self.values:
            return old_ms
        return milliseconds(self.values["idle_ttl_s"])


def milliseconds(idle_ttl_s: float | None) -> int | None:
    """An idle time as the core counts it; never 0, which would be always."""
    return None if idle_ttl_s is None else max(1, round(idle_ttl_s * 1000))


def settings_to_json(settings: AdapterSettings) -> str:
    """What was set, with sorted keys: `{}` for nothing."""
    given = {name: value for name, value in asdict(settings).items() if value not in (None, {}, ())}
    return json.dumps(given, sort_keys=True)


def settings_from_json(text: str) -> AdapterSettings:
    """Raises ValueError or TypeError when the text was not written by `settings_to_json`."""
    given: dict[str, Any] = json.loads(text)
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    return AdapterSettings(**given)
