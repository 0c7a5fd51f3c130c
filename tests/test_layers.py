"""The layers of `.importlinter`, and what must stay out of the server's process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_each_layer_knows_only_those_below_it() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["lorry.cli", "lorry.assembly", "lorry.server.app"])
def test_the_server_and_the_command_line_start_without_torch(module: str) -> None:
    """torch takes seconds and 300 MB; the engine has it in a process of its own."""
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
