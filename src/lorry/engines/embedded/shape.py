"""What a model is, before any weight is read. No torch here, so the server may ask without paying
for it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lorry.engine import BaseShape
from lorry.engines.embedded.family import read_family
from lorry.engines.embedded.gguf import gguf_config
from lorry.errors import ModelInvalid


def find_gguf(model: Path) -> Path | None:
    """The GGUF file that `model` is or holds; None for a folder of the Hugging Face form. Raises
    `ModelInvalid`."""
    if model.is_file():
        return model
    if (model / "config.json").is_file():
        return None
    found = sorted(model.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    held = f"{len(found)} GGUF files" if found else "no GGUF file"
    raise ModelInvalid(
        f"{model}: a folder with config.json, or with exactly one GGUF file, was expected; "
        f"it has no config.json and {held}."
    )


def read_config(model: Path) -> dict[str, Any]:
    """`config.json` of a folder, or its like made from a GGUF's own fields. Raises
    `ModelInvalid`."""
    if not model.exists():
        raise ModelInvalid(f"{model}: there is no such file or folder.")
    gguf = find_gguf(model)
    return _read_json(model / "config.json") if gguf is None else gguf_config(gguf)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{path}: not readable as JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ModelInvalid(f"{path}: a JSON object was expected, found {type(config).__name__}.")
    return config


def base_shape(config: Mapping[str, Any]) -> BaseShape:
    """What adapters must fit. Raises `ModelUnsupported` with the name of what is not computed."""
    family = read_family(config)
    return BaseShape(
        architecture=family.architecture,
        layers=family.layers,
        hidden_size=family.hidden_size,
        vocab_size=family.vocab_size,
        targets=family.targets(),
    )


def max_context(config: Mapping[str, Any]) -> int:
    """Longest sequence computed rightly: max_position_embeddings, or the sliding window if that is
    shorter."""
    return read_family(config).max_context
