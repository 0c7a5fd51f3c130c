"""schemathesis over all routes of a real server: no 500, no hang, and each answer has the status,
type and shape that openapi.json gives it."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fixtures.common_ground import common_ground
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
)
"""Not `unsupported_method`: names may hold "/", so PUT /v1/adapters/x/prefetch is about an adapter
named "x/prefetch", and no 405."""
LIMIT_S = 30
"""For one call."""
ENDLESS = "/v1/events"
"""A stream without end; its own tests read it."""
ARCHIVES = "/v1/adapters/{name}/files"
"""Takes archives, which schemathesis cannot make; `integration/test_server_uploads.py` has them."""
UNTRIED = ("--exclude-path", ENDLESS, "--exclude-path", ARCHIVES)
KEY = "fuzz"


def run(seconds: int, seed: int) -> tuple[int, str]:
    """schemathesis' exit code, and what it printed."""
    port, model = free_port(), common_ground().model
    with tempfile.TemporaryDirectory(prefix="lorry-fuzz-") as place:
        flags = ("--engine", "fake", "--api-key", KEY)
        command = lorry_command(model, port, Path(place) / "state", *flags)
        with ServerProcess(command, port, api_key=KEY) as server:
            code, text = _schemathesis(server.url, seconds, seed, Path(place))
            with server.client() as client:
                return code, text + _at_rest(client.get("/metrics").text)


def _schemathesis(url: str, seconds: int, seed: int, place: Path) -> tuple[int, str]:
    config = place / "schemathesis.toml"
    # 503 is an honest answer while a hub cannot be reached; the others of the family are faults.
    config.write_text(
        '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", 503]\n'
    )
    program = Path(sys.executable).with_name("schemathesis")
    done = subprocess.run(
        (
            *(str(program), "--config-file", str(config), "run", f"{url}/openapi.json"),
            *("--checks", ",".join(CHECKS), *UNTRIED, "--seed", str(seed)),
            *("--header", f"Authorization: Bearer {KEY}", "--max-time", str(seconds)),
            *("--request-timeout", str(LIMIT_S), "--no-color", "--continue-on-failure"),
            *("--suppress-health-check", "all", "--warnings", "off"),
        ),
        cwd=place,
        capture_output=True,
        text=True,
        timeout=seconds * 3 + 120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _at_rest(metrics: str) -> str:
    """What is still counted as running, as lines; nothing when all is well."""
    busy = re.findall(r"^lorry_(?:leases|tickets|operations) (?!0\.0).*$", metrics, re.MULTILINE)
    return "".join(f"at rest: {line}\n" for line in busy)


def figures(text: str) -> str:
    """schemathesis' own last words, in a line."""
    cases = re.search(r"Test cases:\s*(.+)", text)
    tested = re.search(r"Tested: (\d+)", text)
    return f"{tested[1] if tested else '?'} operations, {cases[1] if cases else text[-300:]}"
