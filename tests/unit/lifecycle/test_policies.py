"""The pure choices: victims and retries."""

from lorry.lifecycle.eviction import Candidate, choose_victims
from lorry.lifecycle.retry import retry_at
from lorry.lifecycle.settings import FleetLimits
from tests.unit.lifecycle.rig import v


def candidate(digit: int, *, size: int = 1, used: int = 0, leases: int = 0) -> Candidate:
    return Candidate(v(digit), size, used, leases)


def test_the_least_recently_used_goes_first() -> None:
    found = choose_victims([candidate(1, used=9), candidate(2, used=3), candidate(3, used=5)], 1, 0)
    assert found == (v(2),)


def test_idle_goes_before_leased_however_recently_used() -> None:
    found = choose_victims([candidate(1, used=1, leases=2), candidate(2, used=9)], 1, 0)
    assert found == (v(2),)


def test_of_leased_ones_the_least_leased_goes() -> None:
    assert choose_victims([candidate(1, leases=3), candidate(2, leases=1)], 1, 0) == (v(2),)


def test_as_many_go_as_the_bytes_take() -> None:
    three = [candidate(1, size=2, used=1), candidate(2, size=3, used=2), candidate(3, used=3)]
    assert choose_victims(three, 0, 4) == (v(1), v(2))


def test_none_goes_when_nothing_is_short() -> None:
    assert choose_victims([candidate(1)], 0, 0) == ()
    assert choose_victims([candidate(1)], -1, -5) == ()


def test_too_few_candidates_all_go() -> None:
    assert choose_victims([candidate(1)], 5, 5) == (v(1),)


def test_equal_candidates_go_in_the_order_of_their_digits() -> None:
    assert choose_victims([candidate(2), candidate(1)], 1, 0) == (v(1),)


def test_retries_double_up_to_the_longest_pause() -> None:
    limits = FleetLimits(retry_first_ms=500, retry_last_ms=30_000)
    pauses = [retry_at(failures, 100, limits) - 100 for failures in range(1, 9)]
    assert pauses == [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]
    assert retry_at(10_000, 0, limits) == 30_000
