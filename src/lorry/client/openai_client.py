"""OpenAI's client on a Lorry server, for those who have it installed."""

import importlib
from typing import Any

from lorry.client.wire import Place


def openai_client(kind: str, place: Place) -> Any:
    """`OpenAI` or `AsyncOpenAI`. Raises `ModuleNotFoundError` with what to do where it is not
    installed."""
    try:
        module = importlib.import_module("openai")
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        raise ModuleNotFoundError(
            "client.openai needs OpenAI's package: pip install openai. client.chat and "
            "client.generate do without it.",
            name="openai",
        ) from None
    return getattr(module, kind)(base_url=f"{place.url}/v1", api_key=place.api_key or "none")
