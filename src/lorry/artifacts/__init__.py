"""Adapter files, judged and kept before any engine sees them."""
