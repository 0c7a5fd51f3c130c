"""The engine of our own: PyTorch, one decoder implementation, many adapters in one batch."""
