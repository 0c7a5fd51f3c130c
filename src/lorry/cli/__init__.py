"""The command `lorry`: flags to settings, commands to calls of the API, answers to tables."""

from lorry.cli.main import main

__all__ = ["main"]
