"""The thin shell around the core: carries out commands, feeds reports, runs requests."""

from lorry.supervisor.checking import CheckView
from lorry.supervisor.settings import SupervisorSettings
from lorry.supervisor.supervisor import LoadRequest, Supervisor

__all__ = ["CheckView", "LoadRequest", "Supervisor", "SupervisorSettings"]
