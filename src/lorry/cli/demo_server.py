"""A server process of the demo's own: started, waited for, and ended whatever happens."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from lorry.cli.demo_answers import BASE
from lorry.client import NO_RETRY, Client
from lorry.errors import LorryError

START_TIMEOUT_S = 300.0
"""Reading and unpacking the model takes seconds; slow disks and busy machines get minutes."""

STOP_TIMEOUT_S = 15.0
LOG_LINES = 20


class ServerProcess:
    """`lorry serve` on 127.0.0.1, with a state folder that goes when it ends."""

    def __init__(self, model: Path, port: int, slots: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lorry-demo-")
        self._log = Path(self._folder.name) / "server.log"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(sys.executable, "-m", "lorry", "serve", str(model)),
            *("--served-model-name", BASE),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--max-loras", str(slots), "--max-cpu-loras", "16"),
            *("--max-model-len", "2048"),
            *("--state", str(Path(self._folder.name) / "state")),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # The user's own settings are for the user's own servers.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LORRY_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,  # Ctrl-C is for the demo, which then ends the server
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._stop()
        finally:
            self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Return when requests are taken. Raises RuntimeError with the end of the server's log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with Client(self.url, api_key="", timeout_s=2, retry=NO_RETRY) as client:
            while time.monotonic() < deadline:
                self._raise_if_ended()
                try:
                    client.models()
                    return
                except LorryError:
                    time.sleep(0.2)
        raise RuntimeError(
            f"The server was not ready after {START_TIMEOUT_S:g} s.{self._log_end()}"
        )

    def wait(self) -> None:
        """Until the server ends, which it should not. Raises RuntimeError then."""
        if self._process is not None:
            self._process.wait()
        self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            raise RuntimeError(f"The server ended with exit code {code}.{self._log_end()}")

    def _log_end(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return " The end of its log:\n" + "\n".join(lines)

    def _stop(self) -> None:
        """SIGTERM and time to finish; then SIGKILL to it and what it started."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
