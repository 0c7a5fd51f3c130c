"""Parsers of single settings: from what a flag, a variable or TOML gave to a value.

Each raises ValueError saying what fits and what was found.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from lorry.artifacts.names import check_adapter_name
from lorry.artifacts.remote.policy import AllowedSource, PrivatePlace
from lorry.artifacts.remote.uri import is_remote, parse_uri, redact
from lorry.errors import LorryError
from lorry.lifecycle.learning import NAME_FIELD

UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{prefix: 1024**power for power, prefix in enumerate("kmgt", start=1)},
}


def text(value: object) -> str:
    """Any text but an empty one."""
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"must be a text that is not empty, not {value!r}")


def path(value: object) -> Path:
    """A path; `~` is the home folder. Whether it exists is for its user to find out."""
    return Path(text(value)).expanduser()


def plain_name(value: object) -> str:
    """A model's name; the rules are those for adapters that are loaded later."""
    name = text(value)
    try:
        check_adapter_name(name, ())
    except LorryError as error:
        raise ValueError(error.message) from None
    return name


def allowed_source(value: object) -> AllowedSource:
    """An entry of the allow-list of remote sources."""
    return AllowedSource.parse(text(value))


def private_place(value: object) -> PrivatePlace:
    """A host or network that is reached although it is private."""
    return PrivatePlace.parse(text(value))


def resolver_pattern(value: object) -> str:
    """A source with `{name}` in it, once and behind the host."""
    pattern = text(value)
    if pattern.count(NAME_FIELD) != 1:
        raise ValueError(f"must hold {NAME_FIELD} once, not {redact(pattern)!r}")
    try:
        if is_remote(pattern):
            parse_uri(pattern.replace(NAME_FIELD, "name"))
    except LorryError as error:
        raise ValueError(error.message) from None
    scheme, _, rest = pattern.rpartition("://")
    if scheme and NAME_FIELD in rest.partition("/")[0]:
        raise ValueError(f"must have {NAME_FIELD} behind the host, not {redact(pattern)!r}")
    return pattern


def choice(*allowed: str) -> Callable[[object], str]:
    """One of a few words."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value.lower() in allowed:
            return value.lower()
        raise ValueError(f"must be {' or '.join(allowed)}, not {value!r}")

    return parse


def whole(low: int, high: int) -> Callable[[object], int]:
    """A whole number within a range."""

    def parse(value: object) -> int:
        try:
            if isinstance(value, bool | float):
                raise ValueError
            number = int(str(value))
        except ValueError:
            raise ValueError(
                f"must be a whole number from {low} to {high}, not {value!r}"
                + _kubernetes_hint(value)
            ) from None
        if low <= number <= high:
            return number
        raise ValueError(f"must be from {low} to {high}, not {number}")

    return parse


def _kubernetes_hint(value: object) -> str:
    """Kubernetes sets LORRY_PORT=tcp://... in pods beside a service named `lorry`."""
    if isinstance(value, str) and value.startswith("tcp://"):
        return "; Kubernetes sets this for a service named lorry: use enableServiceLinks: false"
    return ""


def seconds(low: float, high: float) -> Callable[[object], float]:
    """A time in seconds within a range."""

    def parse(value: object) -> float:
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(str(value))
        except ValueError:
            raise ValueError(f"must be a number of seconds, not {value!r}") from None
        if low <= number <= high:
            return number
        raise ValueError(f"must be from {low:g} to {high:g} seconds, not {number:g}")

    return parse


def size(value: object) -> int:
    """Bytes: `500MB` (powers of 1000), `8GiB` or `8G` (powers of 1024), or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(value).strip())
    if match is None or isinstance(value, bool) or match[2].lower() not in UNITS:
        raise ValueError(f"must be a size such as 500MB or 8GiB, not {value!r}")
    number = int(float(match[1]) * UNITS[match[2].lower()])
    if number < 1:
        raise ValueError("must be at least one byte")
    return number


def many(parse: Callable[[object], object]) -> Callable[[object], tuple[object, ...]]:
    """A setting that may be given several times; a single value will do too."""

    def parse_all(value: object) -> tuple[object, ...]:
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(parse(each) for each in values)

    return parse_all


@dataclasses.dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter that is to be loaded at the start."""

    name: str
    path: str
    pinned: bool | None = None
    """None: as it was, or not pinned."""

    @classmethod
    def parse(cls, value: object) -> "LoraModule":
        """From `name=path`, from a JSON object, or from a TOML table with the same keys."""
        value = _from_json(value)
        if isinstance(value, Mapping):
            return cls._from_mapping(value)
        name, equals, where = str(value).partition("=")
        if not equals or not where:
            raise ValueError(f"must be NAME=PATH, not {value!r}")
        return cls(plain_name(name), where)

    @classmethod
    def parse_sglang(cls, value: object) -> "LoraModule":
        """From SGLang's three forms: a path, which is then the name too; `name=path`; a JSON object
        or TOML table."""
        value = _from_json(value)
        if isinstance(value, Mapping):
            return cls._from_sglang(value)
        name, equals, where = text(value).partition("=")
        if not equals:
            return cls(plain_name(name), name)
        if not where:
            raise ValueError(f"must be PATH or NAME=PATH, not {value!r}")
        return cls(plain_name(name), where)

    @classmethod
    def _from_sglang(cls, value: Mapping[object, object]) -> "LoraModule":
        pinned = value.get("pinned", False)
        strange = set(value) - {"lora_name", "lora_path", "pinned"}
        if strange or "lora_name" not in value or "lora_path" not in value:
            raise ValueError(
                "must have the keys lora_name and lora_path, and pinned if wanted, not "
                f"{', '.join(map(str, value))}"
            )
        if not isinstance(pinned, bool):
            raise ValueError(f"must have true or false as pinned, not {pinned!r}")
        return cls(plain_name(value["lora_name"]), text(value["lora_path"]), pinned)

    @classmethod
    def _from_mapping(cls, value: Mapping[object, object]) -> "LoraModule":
        """vLLM's form; it allows `base_model_name`, which says nothing here: there is one base."""
        strange = [str(key) for key in value if key not in ("name", "path", "base_model_name")]
        if strange or "name" not in value or "path" not in value:
            raise ValueError(f"must have the keys name and path, not {', '.join(map(str, value))}")
        return cls(plain_name(value["name"]), text(value["path"]))


def _from_json(value: object) -> object:
    """A text that is a JSON object, as that object."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is not JSON: {error}") from None
    return value
