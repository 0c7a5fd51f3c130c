"""What may be learnt on demand, and when it is asked for again."""

import pytest

from lorry.errors import (
    AdapterInvalid,
    AdapterNotFound,
    LorryError,
    QueueFull,
    SourceNotFound,
    SourceUnreachable,
)
from lorry.ids import AdapterName
from lorry.lifecycle.learning import Idle, Join, Learner, LearningLimits, LookUp, Refuse

A, B, C, D = (AdapterName(letter) for letter in "abcd")
PATTERNS = ("s3://bucket/{name}", "/adapters/{name}")
NOT_THERE = SourceNotFound("nothing there")


def always(_: AdapterName) -> bool:
    return True


def never(_: AdapterName) -> bool:
    return False


def learner(**limits: int) -> Learner:
    return Learner(PATTERNS, LearningLimits(**limits))


def refusal(
    learning: Learner, name: AdapterName, now_ms: int = 0, idle: Idle = always
) -> LorryError:
    answer = learning.ask(name, now_ms, idle)
    assert isinstance(answer, Refuse), answer
    return answer.error


def learn(learning: Learner, *names: AdapterName) -> None:
    for name in names:
        assert isinstance(learning.ask(name, 0, always), LookUp)
        learning.learnt(name, always)


def test_a_new_name_is_looked_up_in_every_source_in_order() -> None:
    sources = ("s3://bucket/org/legal-v1.2", "/adapters/org/legal-v1.2")
    assert learner().ask(AdapterName("org/legal-v1.2"), 0, always) == LookUp(sources)


def test_without_sources_nothing_is_looked_up() -> None:
    assert not Learner((), LearningLimits()).learnable("legal")
    assert isinstance(refusal(Learner((), LearningLimits()), A), AdapterNotFound)


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", "a/..", "../a", "a//b", "/a", "a/", ".a", "a/.b", "-a", "a b", "a@main"),
        *("a:b", "a?b", "a#b", "a%2e", "a\\b", "a\n", "é", "{name}", "a" * 201, "a*"),
    ],
)
def test_a_name_that_could_lead_elsewhere_is_not_looked_up(name: str) -> None:
    learning = learner(lookups_per_minute=1)
    assert not learning.learnable(name)
    assert isinstance(refusal(learning, AdapterName(name)), AdapterNotFound)
    assert isinstance(learning.ask(A, 0, always), LookUp), "it cost nothing"


def test_the_second_who_asks_joins_the_first() -> None:
    learning = learner()
    assert isinstance(learning.ask(A, 0, always), LookUp)
    assert learning.ask(A, 5, always) == Join()
    learning.learnt(A, always)
    assert isinstance(learning.ask(A, 9, always), LookUp), "unloaded meanwhile: asked for anew"


def test_what_was_not_found_is_not_looked_up_again_for_a_while() -> None:
    learning = learner(retry_ms=1000)
    learning.ask(A, 0, always)
    learning.failed(A, NOT_THERE, 50)
    error = refusal(learning, A, 1049)
    assert isinstance(error, AdapterNotFound)
    assert not isinstance(error, SourceNotFound)
    assert isinstance(learning.ask(A, 1050, always), LookUp)


def test_what_cannot_be_served_says_why_until_it_is_looked_at_again() -> None:
    learning = learner(retry_ms=1000)
    learning.ask(A, 0, always)
    bad = AdapterInvalid("rank 4096")
    learning.failed(A, bad, 0)
    assert refusal(learning, A, 999) is bad


def test_a_failure_that_may_pass_is_tried_again_sooner() -> None:
    learning = learner(retry_ms=60_000, retry_passing_ms=5_000)
    learning.ask(A, 0, always)
    learning.failed(A, SourceUnreachable("no answer"), 0)
    assert isinstance(refusal(learning, A, 4_999), SourceUnreachable)
    assert isinstance(learning.ask(A, 5_000, always), LookUp)


def test_look_ups_have_a_rate() -> None:
    learning = learner(lookups_per_minute=2)
    for name in (A, B):
        assert isinstance(learning.ask(name, 0, always), LookUp)
        learning.failed(name, NOT_THERE, 0)
    error = refusal(learning, C, 0)
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == pytest.approx(30)
    assert isinstance(refusal(learning, A, 0), AdapterNotFound), "what is known costs nothing"
    assert isinstance(learning.ask(C, 30_000, always), LookUp)
    assert isinstance(refusal(learning, D, 30_000), QueueFull)


def test_only_so_many_look_ups_run_at_once() -> None:
    learning = learner(lookups_max=2)
    learning.ask(A, 0, always)
    learning.ask(B, 0, always)
    assert isinstance(refusal(learning, C), QueueFull)
    assert learning.ask(A, 0, always) == Join()
    learning.failed(A, NOT_THERE, 0)
    assert isinstance(learning.ask(C, 0, always), LookUp)


def test_beyond_the_bound_the_name_unused_for_longest_goes() -> None:
    learning = learner(names_max=2)
    learn(learning, A, B)
    learning.used(A)
    learning.used(AdapterName("registered by hand"))
    learning.ask(C, 0, always)
    assert learning.learnt(C, always) == (B,)
    assert learning.names == (A, C)


def test_names_that_do_not_exist_make_nobody_go() -> None:
    learning = learner(names_max=2)
    learn(learning, A, B)
    for name in (C, D):
        assert isinstance(learning.ask(name, 0, always), LookUp)
        learning.failed(name, NOT_THERE, 0)
    assert learning.names == (A, B)


def test_names_in_use_do_not_go_and_a_full_house_of_them_takes_no_more() -> None:
    learning = learner(names_max=2)
    learn(learning, A, B)
    assert isinstance(refusal(learning, C, 0, never), QueueFull)

    def only_b(name: AdapterName) -> bool:
        return name == B

    learning.ask(C, 0, only_b)
    assert learning.learnt(C, only_b) == (B,)


def test_failures_that_are_remembered_have_a_bound() -> None:
    learning = learner(remembered_max=1)
    for name in (A, B):
        learning.ask(name, 0, always)
        learning.failed(name, NOT_THERE, 0)
    assert isinstance(learning.ask(A, 1, always), LookUp)
    assert isinstance(refusal(learning, B, 1), AdapterNotFound)


def test_a_name_that_is_no_longer_a_learnt_one_does_not_count() -> None:
    learning = learner(names_max=1)
    learn(learning, A)
    learning.forget(A)
    learning.ask(B, 0, never)
    assert learning.learnt(B, always) == ()


def test_who_registers_a_name_meanwhile_has_it_for_himself() -> None:
    learning = learner(names_max=1)
    learning.ask(A, 0, always)
    learning.registered(A)
    assert learning.names == ()
    assert isinstance(learning.ask(A, 1, always), LookUp)
