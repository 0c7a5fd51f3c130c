"""What /openapi.json says beyond the types of the routes: shapes of answers, and examples."""

from lorry.server.openapi.merge import describe

__all__ = ["describe"]
