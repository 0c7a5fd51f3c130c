"""Whatever goes wrong at whichever call of an engine, and whenever a client leaves: enumerated."""

from dataclasses import replace

import pytest

from lorry.lifecycle import events as ev
from lorry.supervisor.shell import Shell
from tests.simulation.shell.points import SCENES, act, points_of
from tests.simulation.world import Violation

ANSWERED = tuple(name for name in SCENES if "stream" in name or name.startswith("request"))


@pytest.mark.parametrize("scene", SCENES)
def test_promises_1_to_8_hold_whatever_goes_wrong_at_each_call_of_an_engine(scene: str) -> None:
    for point in points_of(scene):
        act(scene, point)


@pytest.mark.parametrize("scene", ANSWERED)
def test_promise_7_a_client_may_leave_at_every_chunk(scene: str) -> None:
    for chunk in range(len(act(scene).operation.chunks) + 1):
        act(scene, leaves_at_chunk=chunk)


def test_every_call_of_an_engine_has_its_turn() -> None:
    calls = {call for scene in SCENES for call in act(scene).plan.calls}
    assert calls >= {"add_lora", "remove_lora", "pin_lora", "generate", "chunk"}


@pytest.mark.parametrize("scene", SCENES)
def test_operations_succeed_when_nothing_goes_wrong(scene: str) -> None:
    expected = {404} if scene == "load of what is refused" else {200, 201}
    assert act(scene).operation.status in expected


def test_a_load_without_an_answer_taken_for_a_failure_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted bug that comes out at one call and in one way only."""
    real = Shell.feed

    def feed(self: Shell, event: ev.Event) -> None:
        real(self, replace(event, unsure=False) if isinstance(event, ev.LoadFailed) else event)

    monkeypatch.setattr(Shell, "feed", feed)
    with pytest.raises(Violation, match="more than its limits"):
        for point in points_of("load over a full engine"):
            act("load over a full engine", point)
