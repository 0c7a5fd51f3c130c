"""`import lorry` costs nothing, and the client brings nothing that computes or serves."""

import subprocess
import sys

import pytest

import lorry

HEAVY = ("torch", "transformers", "numpy", "fastapi", "sqlalchemy", "pydantic", "openai")


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [("import lorry", (*HEAVY, "httpx")), ("from lorry import Client, AsyncClient", HEAVY)],
)
def test_importing_is_light(words: str, unwanted: tuple[str, ...]) -> None:
    script = f"import sys\n{words}\nprint([m for m in {unwanted!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_there() -> None:
    for name in lorry.__all__:
        assert getattr(lorry, name)
        assert name in dir(lorry)
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        lorry.Clinet  # noqa: B018
