"""Lorry: one base model, thousands of LoRA adapters, and the truth about each of them."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("lorry")
