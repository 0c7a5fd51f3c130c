"""Implementations of the engine contract. They never import each other."""
