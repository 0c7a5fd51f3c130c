"""The catalogue of errors: one entry for each class in `lorry.errors`, with what it means, what to
do and how to try again. docs/errors.md, `GET /v1/errors` and `lorry explain` are made from it."""

from lorry.error_catalogue.entries import TYPES, Entry, entries, entry, find, near
from lorry.error_catalogue.words import RetryPattern, Severity

__all__ = ["TYPES", "Entry", "RetryPattern", "Severity", "entries", "entry", "find", "near"]
