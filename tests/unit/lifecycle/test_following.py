"""What follows from looks at a folder of adapters."""

from lorry.ids import AdapterName
from lorry.lifecycle.following import Follower, Leave, Take

A, B = AdapterName("a"), AdapterName("b")


def test_a_folder_is_taken_once_two_looks_saw_the_same() -> None:
    follower = Follower()
    assert follower.look({A: "1"}, (), ()) == ()
    assert follower.look({A: "2"}, (), ()) == (), "it is still being written"
    assert follower.look({A: "2"}, (), ()) == (Take(A, "2"),)
    assert follower.look({A: "2"}, (A,), ()) == (), "once"


def test_a_change_is_taken_when_it_has_settled() -> None:
    follower = Follower()
    for _ in range(2):
        follower.look({A: "1"}, (), ())
    assert follower.look({A: "2"}, (A,), ()) == ()
    assert follower.look({A: "2"}, (A,), ()) == (Take(A, "2"),)


def test_a_name_goes_once_two_looks_did_not_see_it() -> None:
    follower = Follower()
    for _ in range(2):
        follower.look({A: "1", B: "1"}, (), ())
    assert follower.look({B: "1"}, (A, B), ()) == ()
    assert follower.look({A: "1", B: "1"}, (A, B), ()) == (), "it was only being moved"
    assert follower.look({A: "1", B: "1"}, (A, B), ()) == (Take(A, "1"),)
    follower.look({B: "1"}, (A, B), ())
    assert follower.look({B: "1"}, (A, B), ()) == (Leave(A),)


def test_what_went_while_nobody_looked_goes_after_a_restart() -> None:
    follower = Follower()
    assert follower.look({}, (A,), ()) == ()
    assert follower.look({}, (A,), ()) == (Leave(A),)


def test_what_was_refused_waits_for_a_change_and_what_may_pass_does_not() -> None:
    follower = Follower()
    for _ in range(2):
        follower.look({A: "bad", B: "good"}, (), ())
    follower.try_again(B)
    assert follower.look({A: "bad", B: "good"}, (), ()) == (Take(B, "good"),)
    follower.look({A: "mended", B: "good"}, (B,), ())
    assert follower.look({A: "mended", B: "good"}, (B,), ()) == (Take(A, "mended"),)


def test_a_name_of_somebody_else_is_left_alone() -> None:
    follower = Follower()
    for _ in range(3):
        assert follower.look({A: "1"}, (), (A,)) == ()
    assert follower.look({A: "1"}, (), ()) == (Take(A, "1"),), "it is free now"


def test_who_unloads_a_followed_name_is_not_contradicted_before_the_folder_changes() -> None:
    follower = Follower()
    for _ in range(2):
        follower.look({A: "1"}, (), ())
    assert follower.look({A: "1"}, (), ()) == ()
    follower.look({A: "2"}, (), ())
    assert follower.look({A: "2"}, (), ()) == (Take(A, "2"),)
