"""HTTP in, HTTP out. Knows the supervisor, knows no engine."""
