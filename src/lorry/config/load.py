"""From flags, `LORRY_*` variables and a TOML file, in this order of precedence, to one `Settings`.

Three rules:

1. A setting has one name everywhere: `--max-loras`, `LORRY_MAX_LORAS`, and in the file `max_loras`
   or `max-loras`.
2. All mistakes are reported at once, each with the place where it was made.
3. The fields of `Settings` are the only list of settings: flags, variables, the file's keys and
   docs/settings.md are made from them.
"""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lorry.artifacts.remote.policy import SourcePolicy
from lorry.artifacts.remote.uri import is_remote, parse_uri, redact
from lorry.artifacts.sources import require_inside
from lorry.config.fields import (
    CPU_LORAS,
    DOWNLOAD_BYTES,
    PREFIX,
    QUEUE_PER_ADAPTER,
    Settings,
    SettingSpec,
    specs,
)
from lorry.errors import Forbidden
from lorry.lifecycle.learning import NAME_FIELD

OWN_VARIABLES = frozenset({"LORRY_URL", "LORRY_CONFIG", "LORRY_PEERS"})
"""Variables that are no settings of the server."""

CLOSE_ENOUGH = 0.85
"""From this similarity on, a strange variable is a misspelt setting and not somebody else's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong, and where it was written."""

    where: str
    """`--port`, `LORRY_PORT`, or `port in lorry.toml`."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class ConfigError(Exception):
    """The settings cannot be used. `mistakes` is never empty."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("; ".join(map(str, mistakes)))
        self.mistakes = tuple(mistakes)


def load_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], config_file: Path | None = None
) -> Settings:
    """Put the settings together; `flags` holds those given, by field name. Raises `ConfigError`."""
    mistakes: list[Mistake] = []
    file_values = _read_file(config_file, mistakes) if config_file else {}
    _find_misspelt_variables(environ, mistakes)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for spec in specs():
        found = _look_up(spec, flags, environ, file_values, config_file)
        if found is None:
            if spec.required:
                mistakes.append(
                    Mistake(spec.flag, "is missing; name a model folder or a .gguf file")
                )
            continue
        places[spec.name], raw = found
        try:
            values[spec.name] = spec.parse(raw)
        except ValueError as error:
            mistakes.append(Mistake(places[spec.name], str(error)))
    if not mistakes:
        _follow_others(values)
        settings = Settings(**values)
        mistakes = _contradictions(settings, places)
        if not mistakes:
            return settings
    raise ConfigError(mistakes)


def _follow_others(values: dict[str, Any]) -> None:
    """Defaults that would contradict another setting follow it instead."""
    if "max_cpu_loras" not in values and "max_loras" in values:
        values["max_cpu_loras"] = max(CPU_LORAS, values["max_loras"])
    if "max_queue_per_adapter" not in values and "max_queue" in values:
        values["max_queue_per_adapter"] = min(QUEUE_PER_ADAPTER, values["max_queue"])
    if "download_bytes" not in values and "max_source_bytes" in values:
        values["download_bytes"] = max(DOWNLOAD_BYTES, values["max_source_bytes"])


def _look_up(
    spec: SettingSpec,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file_values: Mapping[str, object],
    config_file: Path | None,
) -> tuple[str, object] | None:
    """Where the setting was given, and what was written there; None when nowhere."""
    if spec.name in flags:
        return spec.flag, flags[spec.name]
    variable = PREFIX + spec.name.upper()
    if environ.get(variable, "") != "":
        return variable, _split_variable(environ[variable]) if spec.repeatable else environ[
            variable
        ]
    if spec.name in file_values:
        return f"{spec.name} in {config_file}", file_values[spec.name]
    return None


def _split_variable(text: str) -> object:
    """A variable with several values: a JSON list, or values between commas."""
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.loads(text)
        except ValueError:
            return [text]  # the field's own parser says what is wrong with it
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_file(path: Path, mistakes: list[Mistake]) -> dict[str, object]:
    """The file's keys with underscores; unknown ones are mistakes."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        mistakes.append(Mistake("--config", f"{path} cannot be read: {error.strerror}"))
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        mistakes.append(Mistake("--config", f"{path} is not TOML: {error}"))
        return {}
    names = [spec.name for spec in specs()]
    values: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in names:
            values[name] = value
        else:
            mistakes.append(Mistake(f"{key} in {path}", "is no setting" + _suggestion(name, names)))
    return values


def _suggestion(name: str, names: list[str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def _find_misspelt_variables(environ: Mapping[str, str], mistakes: list[Mistake]) -> None:
    """A variable that nearly names a setting would be silently without effect."""
    names = [spec.variable for spec in specs()]
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in OWN_VARIABLES or variable in names:
            continue
        if suggestion := _suggestion(variable, names, CLOSE_ENOUGH):
            mistakes.append(Mistake(variable, "is no setting" + suggestion))


def _contradictions(settings: Settings, places: Mapping[str, str]) -> list[Mistake]:
    """Settings that are right one by one and wrong together."""

    def at(name: str) -> str:
        return places.get(name, f"--{name.replace('_', '-')} (default)")

    found = []
    if settings.max_cpu_loras < settings.max_loras:
        found.append(
            Mistake(
                at("max_cpu_loras"),
                f"is {settings.max_cpu_loras}, less than max_loras {settings.max_loras} "
                f"({at('max_loras')}): an adapter in a slot is in host memory too",
            )
        )
    if settings.max_queue_per_adapter > settings.max_queue:
        found.append(
            Mistake(
                at("max_queue_per_adapter"),
                f"is {settings.max_queue_per_adapter}, more than max_queue {settings.max_queue} "
                f"({at('max_queue')})",
            )
        )
    if not settings.state_folder and settings.disk_cache is None:
        found.append(
            Mistake(
                at("state"),
                "is a database URL, so the disk cache needs a folder of its own: set --disk-cache",
            )
        )
    if settings.download_bytes < settings.max_source_bytes:
        found.append(
            Mistake(
                at("download_bytes"),
                f"is {settings.download_bytes}, less than max_source_bytes "
                f"{settings.max_source_bytes} ({at('max_source_bytes')})",
            )
        )
    found += _forbidden_sources(settings, at)
    return found + _clashing_names(settings, at("lora_modules"), at("lora_paths"))


def _forbidden_sources(settings: Settings, at: Callable[[str], str]) -> list[Mistake]:
    """Places to take adapters from that other settings do not let anybody take them from."""
    found = []
    policy = SourcePolicy(allowed=settings.allowed_sources)
    for pattern in settings.resolver:
        try:
            if is_remote(pattern):
                policy.check(parse_uri(pattern.replace(NAME_FIELD, "name")))
        except Forbidden:
            what = f"{redact(pattern)} is not among the allowed sources; add it to --allow-source"
            found.append(Mistake(at("resolver"), what))
    for folder in settings.adapter_dir:
        try:
            require_inside(folder.resolve(), settings.adapter_root, shown=str(folder))
        except Forbidden:
            what = f"{folder} lies outside every --adapter-root; add it there"
            found.append(Mistake(at("adapter_dir"), what))
    return found


def _clashing_names(settings: Settings, modules: str, paths: str) -> list[Mistake]:
    """Names that two adapters, or an adapter and the base model, would share."""
    taken = dict.fromkeys(settings.model_names, "the base model")
    found = []
    for where, module in (
        *((modules, module) for module in settings.lora_modules),
        *((paths, module) for module in settings.lora_paths),
    ):
        if module.name in taken:
            found.append(
                Mistake(where, f"{module.name!r} is already the name of {taken[module.name]}")
            )
        taken[module.name] = f"the adapter from {module.path}"
    return found
