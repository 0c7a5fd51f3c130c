"""Desired state, durable: which adapters should be served. Never what is resident."""
