"""What holds for every test: end-to-end tests are marked as such and may take longer."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any machine", ANY_MACHINE)
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Begun in a script's background (`make test &`), where Ctrl-C is ignored and every child would
    # inherit that; the servers and commands under test shall start as a terminal starts them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

E2E_TIMEOUT_S = 180
"""A test that starts the first server also waits for the common ground to be built."""


SMOKE = ("tests/simulation/test_reach.py", "tests/simulation/test_safety.py")
"""Both look at the same simulated worlds, which the first to come runs."""


class ByFile(LoadScopeScheduling):
    """Hands a file's tests to one process, where they share what they have started."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "smoke" if file in SMOKE else file


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """How `--numprocesses` shares the tests out."""
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder, so that no file can forget it."""
    for item in items:
        if Path(__file__).parent / "e2e" in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
