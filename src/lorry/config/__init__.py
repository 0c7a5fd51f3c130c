"""Settings of every layer, put together in one place; all mistakes are reported at once."""

from lorry.config.fields import Settings
from lorry.config.load import ConfigError, Mistake, load_settings
from lorry.config.parse import LoraModule

__all__ = ["ConfigError", "LoraModule", "Mistake", "Settings", "load_settings"]
