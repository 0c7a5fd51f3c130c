"""Bugs that the crash tests have to find."""

from collections.abc import Callable

PLANTS: dict[str, Callable[[], None]] = {}
