"""The bench of isolation runs through, and its checks can fail."""

import math
from pathlib import Path

import pytest

from bench import isolation, report
from bench.measures import Measure, compared, median_of, percentile, table


def test_the_bench_runs_through_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    words = "--models tiny --parts drain,random --operations 1 --repeats 1 --seconds 0.5"
    status = isolation.main(words.split())
    said = capsys.readouterr().out
    # Ratios of single calls say nothing on a busy machine; what the random clients left does.
    assert status in (0, 1)
    assert "| tiny: load(B) while A drains, p99, times |" in said
    assert "| their 5xx answers | 0.00 | 0 | yes |" in said
    assert "| names that disagree at the end | 0.00 | 0 | yes |" in said
    assert len(list(tmp_path.glob("isolation-*.json"))) == 1


def test_a_bound_that_does_not_hold_ends_the_bench_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for found, status in ((1.5, 0), (1.51, 1), (math.nan, 1)):
        one = Measure("a measure", found, 1.5, "")
        monkeypatch.setattr(isolation, "_run", lambda part, options, one=one: iter([one]))
        assert isolation.main(["--parts", "drain"]) == status


def test_one_repeat_of_three_that_does_not_hold_is_shown_and_does_not_decide() -> None:
    repeats = [Measure("m", value, 1.5, f"of {value}") for value in (1.7, 1.2, 1.4)]
    measure = median_of("real: m", repeats)
    assert (measure.what, measure.value, measure.holds) == ("real: m", 1.4, True)
    assert measure.detail == "of 1.4; repeats: 1.70, 1.20, 1.40"
    assert not median_of("m", [repeats[0], repeats[0], repeats[1]]).holds


def test_a_slower_side_does_not_hold() -> None:
    quick, slow = [0.010] * 99 + [0.5], [0.020] * 100
    assert percentile(quick, 0.99) == 0.010
    measure = compared("load", 0.99, quick, slow, 1.5)
    assert measure.value == pytest.approx(2.0)
    assert not measure.holds
    assert "| load, p99, times | 2.00 | 1.5 | NO |" in table([measure])
    assert compared("load", 0.99, slow, quick, 1.5).holds
    assert not compared("load", 0.99, [], [], 1.5).holds
