"""A short soak, and proof that its parts find what they are for."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures.common_ground import CommonGround
from tests.soak.ledger import Findings, Ledger, Loss
from tests.soak.soak import Options, soak
from tests.soak.traffic import Asked, Traffic
from tests.soak.watch import MIB, Life, Sample
from tests.soak.weights import PROMPTS, STEPS, WeightSets

ANSWERS = {name: tuple(range(at, at + STEPS)) for at, name in enumerate(("base", "one", "two"))}
NOT_FOUND = {"code": "adapter_not_found", "message": "The model does not exist."}
UNREACHABLE = {"code": "engine_unreachable", "message": "The engine is down."}
ABORTED = {"code": "request_aborted", "message": "It was unloaded before this request ended."}


@pytest.mark.slow
@pytest.mark.timeout(180)  # at its first run it makes the weights
def test_a_short_soak_with_an_engine_kill_finds_nothing() -> None:
    report = soak(Options(seconds=14, adapters=100, kills=1, settle_s=0))
    assert report.findings == []
    assert report.kills == 1
    assert report.requests["checked"] > 20
    assert report.changes["register"] == 90
    assert len(report.changes) > 1


def _judged(asked: Asked, change: Callable[[Ledger], None] = lambda ledger: None) -> list[str]:
    """What is found in an answer to a request for x, which serves "one"."""
    weights = WeightSets(
        CommonGround(Path()), Path(), {n: dict.fromkeys(PROMPTS, a) for n, a in ANSWERS.items()}
    )
    ledger, findings = Ledger(["x"]), Findings()
    entry = ledger.entries["x"]
    entry.end(entry.begin("one"), True)
    asked.began_s = time.monotonic()
    change(ledger)
    traffic = Traffic(httpx.AsyncClient(), weights, ledger, findings)
    traffic.judge(asked, time.monotonic())
    return findings.texts


def _whole(name: str | None, whose: str, steps: int = 8, **more: Any) -> Asked:
    asked = Asked(name, "S", steps, "vllm", stream=False, **more)
    asked.tokens, asked.ended = ANSWERS[whose][:steps], True
    return asked


def _refused(status: int, error: dict[str, Any]) -> Asked:
    return Asked("x", "S", 8, "vllm", stream=False, status=status, error=error)


def test_the_right_answers_are_let_pass() -> None:
    assert _judged(_whole("x", "one")) == []
    assert _judged(_whole(None, "base")) == []


def test_promise_2_the_answer_of_other_weights_is_found() -> None:
    assert _judged(_whole("x", "two"))
    mixed = _whole("x", "one")
    mixed.tokens = ANSWERS["one"][:4] + ANSWERS["two"][4:8]
    assert _judged(mixed)


def test_promise_10_the_answer_of_the_base_is_found() -> None:
    assert _judged(_whole("x", "base"))


def test_an_answer_that_is_cut_without_an_error_is_found() -> None:
    short = _whole("x", "one")
    short.tokens = short.tokens[:3]
    assert _judged(short)


def test_before_a_change_is_answered_both_versions_are_right_and_then_only_the_new() -> None:
    def under_way(ledger: Ledger) -> None:
        ledger.entries["x"].begin("two")

    def done_before(ledger: Ledger) -> None:
        entry = ledger.entries["x"]
        entry.end(entry.begin("two"), True)

    assert _judged(_whole("x", "one"), under_way) == []
    assert _judged(_whole("x", "two"), under_way) == []
    later = _whole("x", "one")
    ledger = Ledger(["x"])
    done_before(ledger)
    after_s = time.monotonic() + 1
    assert ledger.entries["x"].possible(after_s, after_s) == {"two"}
    assert _judged(later, done_before) == [], "it was possible when the request was sent"


def test_a_change_that_failed_leaves_the_old_weights_alone_possible() -> None:
    entry = Ledger(["x"]).entries["x"]
    entry.end(entry.begin("one"), True)
    entry.end(entry.begin("two"), False)
    after_s = time.monotonic() + 1
    assert entry.possible(after_s, after_s) == {"one"} == {entry.weights}


@pytest.mark.parametrize(
    ("status", "error"), [(404, NOT_FOUND), (503, UNREACHABLE), (503, ABORTED), (500, NOT_FOUND)]
)
def test_a_refusal_without_a_reason_is_found(status: int, error: dict[str, Any]) -> None:
    if status == 500:
        error = {"code": "lorry_error", "message": "The server failed."}
    assert _judged(_refused(status, error))


def test_a_refusal_with_a_reason_is_let_pass() -> None:
    def unloading(ledger: Ledger) -> None:
        ledger.entries["x"].begin(None)

    def killed(ledger: Ledger) -> None:
        ledger.losses.append(Loss(time.monotonic()))

    assert _judged(_refused(404, NOT_FOUND), unloading) == []
    assert _judged(_refused(503, ABORTED), unloading) == []
    assert _judged(_refused(503, UNREACHABLE), killed) == []


def _life(**slopes: float) -> Life:
    """Ten minutes of a process; a slope is a measure's growth per minute."""
    return Life(
        "server",
        [
            Sample(
                float(second),
                int((100 + slopes.get("rss", 0) * second / 60) * MIB),
                int(30 + slopes.get("fds", 0) * second / 60),
                int(10 + slopes.get("threads", 0) * second / 60),
            )
            for second in range(600)
        ],
    )


@pytest.mark.parametrize("slope", [{"rss": 5.0}, {"fds": 2.0}, {"threads": 2.0}])
def test_what_grows_is_found(slope: dict[str, float]) -> None:
    grown, _ = _life(**slope).judge()
    assert len(grown) == 1


def test_what_stays_flat_is_let_pass() -> None:
    assert _life().judge()[0] == []
