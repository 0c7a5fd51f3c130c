"""Remote sources, names on demand and a followed folder, from the command line on: a real process
with the fake engine, a TLS file server, and a kill in the middle of a download."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from lorry.artifacts.remote.staging import JOURNAL, PART_BYTES
from lorry.engines.fake import FakeEngine
from lorry.engines.fake_script import FakeSettings
from tests.fixtures.adapters import good_adapter
from tests.fixtures.remote import Asked, Files, LocalServer, Reply, make_authority
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command

BIG = "tokenizer_config.json"
LONG_S = 60.0


def until(true: Callable[[], bool]) -> None:
    """Wait for what another process brings about."""
    due = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < due
        time.sleep(0.05)


def lorry(server: ServerProcess, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line against the server."""
    command = [sys.executable, "-m", "lorry", *words, "--url", server.url]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S)


def complete(client: httpx.Client, model: str) -> int:
    """The status of a completion."""
    body = {"model": model, "prompt": [5, 6], "max_tokens": 2}
    return client.post("/v1/completions", json=body).status_code


def test_promise_8_sources_from_the_command_line_and_a_kill_in_the_middle_of_a_download(
    tmp_path: Path,
) -> None:
    authority = make_authority(tmp_path)
    base = FakeEngine(FakeSettings()).capabilities().base
    for seed, name in enumerate(("legal", "tax"), start=1):
        good_adapter(seed, base=base).write(tmp_path / "www" / name)
    big = json.dumps({"padding": "x" * (PART_BYTES + 1000)})
    (tmp_path / "www" / "legal" / BIG).write_text(big)
    good_adapter(3, base=base).write(tmp_path / "live" / "followed")
    files = Files(tmp_path / "www")
    with LocalServer(files, authority.context) as web:
        port = free_port()
        flags = (
            *("--engine", "fake", "--private-source", "localhost", "--load-timeout", "300"),
            *("--resolver", f"{web.url}/{{name}}", "--adapter-dir", str(tmp_path / "live")),
            *("--adapter-dir-interval", "0.1"),
        )
        command = lorry_command(Path("fake-model"), port, tmp_path / "state", *flags)
        quiet = {"SSL_CERT_FILE": str(authority.file), "NETRC": os.devnull}
        with ServerProcess(command, port, environment=quiet) as server, server.client() as client:
            files.before = lambda asked: _hang_behind_the_first_part(asked, web)
            body = {"source": f"{web.url}/legal?sig=topsecret"}
            client.put("/v1/adapters/legal?wait=false", json=body)
            journals = (tmp_path / "state" / "cache" / ".downloads").glob
            first = f"0 {PART_BYTES} "
            until(lambda: any(first in file.read_text() for file in journals(f"*/{JOURNAL}")))
            server.kill()
            files.before = lambda asked: None
            web.asked.clear()
            server.start()
            done = lorry(server, "load", "legal", body["source"])
            assert done.returncode == 0, done.stderr
            ranges = [asked.range for asked in web.asked if asked.path == f"/legal/{BIG}"]
            assert (0, PART_BYTES - 1) not in ranges, "it was there already"
            assert (PART_BYTES, len(big) - 1) in ranges
            assert complete(client, "tax") == 200, "on demand"
            assert complete(client, "nobody") == 404
            until(lambda: complete(client, "followed") == 200)
            refused = lorry(server, "load", "x", "https://127.0.0.2/x?sig=topsecret")
            assert refused.returncode == 1
            assert "private address" in refused.stderr
            assert "topsecret" not in server.log.read_text() + done.stdout + refused.stderr
            assert not list(journals("*"))


def _hang_behind_the_first_part(asked: Asked, web: LocalServer) -> Reply | None:
    if asked.path.endswith(BIG) and asked.range is not None and asked.range[0] >= PART_BYTES:
        web.released.wait()
    return None
