"""The case "races and many processes": many callers at once, and list and answers agree at the
end."""

import random
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.e2e.conftest import ROOMY_FLAGS
from tests.fixtures.api import Api, at_once, in_both_dialects
from tests.fixtures.common_ground import CommonGround
from tests.fixtures.server_process import ServerProcess, free_port, lorry_command


@in_both_dialects("roomy")
def test_promise_1_sixteen_loads_of_one_name_make_one_copy(
    roomy: Api, ground: CommonGround
) -> None:
    for _ in range(3):
        loads = at_once([lambda: roomy.load("A", ground.adapter("A"))] * 16)
        assert Counter(response.status_code for response in loads) == {200: 1, 400: 15}
        for response in loads:
            assert response.status_code == 200 or "already" in roomy.message(response)
        assert list(roomy.native()) == ["A"]
        roomy.check("A", "A")
        unloads = at_once([lambda: roomy.unload("A")] * 16)
        assert Counter(response.status_code for response in unloads) == {200: 1, roomy.unknown: 15}
        roomy.assert_unknown("A")


@in_both_dialects("tight")
def test_promise_1_random_operations_of_eight_clients_end_in_agreement(
    tight: Api, ground: CommonGround
) -> None:
    def operation(seed: int) -> Callable[[], None]:
        drawn = random.Random(seed)
        name, oracle = drawn.choice("xy"), drawn.choice("AB")
        kind = drawn.choice(["load", "replace", "unload", "gen", "gen"])

        def run() -> None:
            if kind == "gen":
                response = tight.gen(name, "S")
                if response.status_code == 200:
                    assert tight.whose(response.json(), "S") in {"A", "B"}
                    return
            elif kind == "unload":
                response = tight.unload(name)
            else:
                path = ground.adapter(oracle)
                response = tight.load(name, path, inplace=kind == "replace")
            # 503: an answer cut off by an unload; 409: the other operation on that name is not
            # over.
            assert response.status_code in {200, 400, 404, 409, 503}, f"{kind}: {response.text}"

        return run

    at_once([operation(seed) for seed in range(200)], clients=8)
    roots = tight.listed()
    assert roots.keys() == tight.native().keys()
    for name in "xy":
        if name in roots:
            tight.check(name, Path(roots[name]).name)
        else:
            tight.assert_unknown(name)


@in_both_dialects("roomy")
def test_promise_1_list_and_answers_agree_over_fresh_connections(
    roomy: Api, roomy_server: ServerProcess, ground: CommonGround
) -> None:
    roomy.must_load("A", ground.adapter("A"))

    def ask() -> None:
        with roomy_server.client() as client:
            fresh = type(roomy)(client, ground, "tiny")
            assert fresh.listed() == {"A": str(ground.adapter("A"))}
            fresh.check("A", "A", "S")

    at_once([ask] * 60, clients=8)


def test_promise_1_a_second_server_on_one_state_is_refused_with_a_reason(
    roomy: Api, roomy_server: ServerProcess, ground: CommonGround
) -> None:
    state = Path(roomy_server.command[roomy_server.command.index("--state") + 1])
    command = lorry_command(ground.model, free_port(), state, *ROOMY_FLAGS)
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode not in {0, -9}
    said = second.stdout + second.stderr
    assert state.name in said.replace("\n", "")
    assert "Traceback" not in said
    roomy.must_load("A", ground.adapter("A"))
    roomy.check("A", "A")
