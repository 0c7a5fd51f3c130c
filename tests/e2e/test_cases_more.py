"""The four further cases: metrics that agree with the list, and cold loads out of room (restarts
are in test_kill.py)."""

import threading
import time
from pathlib import Path

from tests.fixtures.api import Api, in_both_dialects
from tests.fixtures.common_ground import CommonGround
from tests.fixtures.many import small_adapters

SLOTS_REPORTED_S = 20.0


@in_both_dialects("tight")
def test_promise_1_metrics_agree_with_the_list_at_each_step(
    tight: Api, ground: CommonGround
) -> None:
    for name in "ABCDEF":
        tight.must_load(name, ground.adapter(name))
        tight.check(name, name, "S")
        _assert_agreement(tight)
    for name in "BDF":
        tight.must_unload(name)
        _assert_agreement(tight)
    for name in "ACE":
        tight.check(name, name, "S")
        _assert_agreement(tight)


def _assert_agreement(api: Api) -> None:
    """Registry, list and metrics say the same. (Nothing runs meanwhile, so they are read in turn.)

    Slots are the engine's own cache and change with the requests; its reports of them may be a
    moment old.
    """
    assert api.native().keys() == api.listed().keys()
    assert api.metric("lorry_adapters_registered") == [len(api.listed())]
    deadline = time.monotonic() + SLOTS_REPORTED_S
    while not (agreed := _tiers_agree(api)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert agreed, f"{api.native()} but {api.samples('lorry_versions_resident')}"


def _tiers_agree(api: Api) -> bool:
    tiers = [entry["tier"] for entry in api.native().values()]
    slots, in_memory = tiers.count("slot"), tiers.count("slot") + tiers.count("host")
    assert in_memory <= 3
    assert slots <= 2
    resident = {
        tier: sum(api.metric("lorry_versions_resident", tier=tier)) for tier in ("slot", "host")
    }
    return resident == {"slot": slots, "host": in_memory}


@in_both_dialects("tight")
def test_running_and_waiting_adapters_are_told_apart(tight: Api, ground: CommonGround) -> None:
    for name in "ABC":
        tight.must_load(name, ground.adapter(name))
    with (
        tight.streaming("A", max_tokens=1600) as first,
        tight.streaming("B", max_tokens=1600) as second,
    ):
        next(first), next(second)
        third = threading.Thread(target=tight.check, args=("C", "C", "S"))
        third.start()
        seen: set[tuple[str, str]] = set()
        while third.is_alive():
            [(labels, _)] = tight.samples("vllm:lora_requests_info")
            for kind in ("running", "waiting"):
                names = labels[f"{kind}_lora_adapters"].split(",")
                seen |= {(kind, name) for name in names if name}
        third.join()
    assert ("running", "A") in seen
    assert ("running", "B") in seen
    assert ("waiting", "A") not in seen


@in_both_dialects("roomy")
def test_cold_adapters_answer_soon_in_and_out_of_room(
    roomy: Api, ground: CommonGround, tmp_path: Path
) -> None:
    adapters = small_adapters(ground, tmp_path, 64)
    for name, (folder, _) in adapters.items():
        roomy.must_load(name, folder)

    def first_token_s(name: str) -> float:
        began = time.monotonic()
        with roomy.streaming(name, "S", max_tokens=16) as states:
            next(states)
            took = time.monotonic() - began
            for _ in states:
                pass
        return took

    cold = sorted(first_token_s(name) for name in adapters)
    warm = sorted(first_token_s(name) for name in list(adapters)[-8:] * 4)
    print(
        f"p50/p99 of the first token, ms: out of room {_percentiles(cold)}, in {_percentiles(warm)}"
    )
    assert cold[len(cold) // 2] < 5, "a single one may meet a busy disk"
    for name, (_, oracle) in adapters.items():
        body = roomy.gen(name, "S").json()
        assert roomy.is_answer(body, oracle, "S")


def _percentiles(sorted_s: list[float]) -> str:
    last = len(sorted_s) - 1
    return f"{sorted_s[last // 2] * 1000:.0f}/{sorted_s[round(last * 0.99)] * 1000:.0f}"
