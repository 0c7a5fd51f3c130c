"""Mangled adapter folders, routes and requests: `python -m tests.fuzz`."""
