"""Lorry: one base model, thousands of LoRA adapters, and the truth about each of them.

`lorry.Client` and `lorry.AsyncClient` speak to a running server; they raise what is in
`lorry.errors`.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lorry.client import AsyncClient, Client, Retry

__all__ = ["AsyncClient", "Client", "Retry", "__version__"]

__version__ = version("lorry")

_OF_THE_CLIENT = ("AsyncClient", "Client", "Retry")


def __getattr__(name: str) -> Any:
    """The client, once somebody asks for it: httpx takes longer to import than all the rest."""
    if name not in _OF_THE_CLIENT:
        raise AttributeError(f"module 'lorry' has no attribute {name!r}")
    from lorry import client

    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
