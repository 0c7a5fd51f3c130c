"""Benches: they drive any OpenAI-compatible server from outside, and print ours beside others of
the same session."""
