"""The bench of cold starts runs through, and what it calls cold is cold."""

from pathlib import Path

import pytest

from bench import coldstart, report


def test_the_bench_runs_through_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    words = "--tiny --adapters 9 --rounds 2 --beside 1"
    assert coldstart.main(words.split()) in (0, 1)  # what it took says nothing on a busy machine
    assert "| cold minus warm TTFT beside 1 streams, p50, ms |" in capsys.readouterr().out
    assert len(list(tmp_path.glob("coldstart-*.json"))) == 1


def test_so_few_adapters_that_none_is_cold_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        coldstart.main(["--adapters", "8"])
    assert "none is ever cold" in capsys.readouterr().err
