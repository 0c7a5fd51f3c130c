"""A slice of each part; `make fuzz` has the whole."""

import random
from pathlib import Path

import pytest

from lorry.artifacts import adapter_config
from tests.fuzz import folders, recipes, requests, routes


def test_promise_9_mangled_folders_are_refused_or_compute_what_peft_computes() -> None:
    figures = folders.run(range(300))
    assert figures.findings == []
    assert figures.refused.total() > 100
    assert figures.equal > 50


FIELDS = (
    *adapter_config._REFUSED,
    *("rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("init_lora_weights", "use_rslora", "bias", "lora_alpha", "task_type", "corda_config"),
)


@pytest.mark.parametrize("value", [None, "", 0, False, [], {}], ids=repr)
def test_promise_9_a_field_that_is_empty_is_refused_or_means_what_it_means_to_peft(
    tmp_path: Path, value: object
) -> None:
    judge, figures = folders.Judge(tmp_path), folders.Figures()
    for field in FIELDS:
        files = recipes.good(random.Random(4))
        files.config[field] = value
        folder = files.write(tmp_path / field)
        assert judge._judge(folder, [], figures) is None, field
    assert figures.equal > 5


def test_a_judge_that_lets_a_bad_adapter_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_config, "_refusals", lambda raw: [])
    assert folders.run(range(300)).findings


def test_a_number_gives_the_same_folder_each_time(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for seed in range(40):
        assert recipes.write(seed, one / str(seed)) == recipes.write(seed, other / str(seed))
    for path in one.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert path.read_bytes() == (other / path.relative_to(one)).read_bytes()


@pytest.mark.timeout(180)
def test_strange_requests_are_answered_or_refused_and_leave_the_engine_right() -> None:
    figures = requests.run(range(150))
    assert figures.findings == []
    assert figures.statuses[200] > 40
    assert figures.compared > 5


@pytest.mark.timeout(300)
def test_every_route_answers_as_its_description_says() -> None:
    code, text = routes.run(seconds=10, seed=1)
    assert code == 0, text
    assert "at rest" not in text
