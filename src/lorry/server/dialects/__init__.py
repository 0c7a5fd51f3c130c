"""Foreign admin shapes, translated to the native calls. No logic."""
