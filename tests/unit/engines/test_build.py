"""One sequence of full length always fits, and settings that cannot work are refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorry.engines.embedded.build import fit_kv
from lorry.engines.embedded.child import child_environment, end_reason
from lorry.engines.embedded.settings import KV_BYTES_DEFAULT_MAX, EmbeddedSettings
from lorry.errors import ModelInvalid

SETTINGS = EmbeddedSettings(Path("m"), block_size=16, kv_cache_bytes=1600, max_num_seqs=1)


def test_a_length_not_asked_for_shrinks_to_what_fits() -> None:
    assert fit_kv(SETTINGS, max_context=8192, block_bytes=100) == (256, 16)
    assert fit_kv(SETTINGS, max_context=100, block_bytes=100) == (100, 16)


def test_a_length_asked_for_must_fit() -> None:
    asked = replace(SETTINGS, max_model_len=257)
    with pytest.raises(ModelInvalid, match="1700 bytes of KV, but there are 1600"):
        fit_kv(asked, max_context=8192, block_bytes=100)
    assert fit_kv(replace(asked, max_model_len=256), 8192, 100) == (256, 16)


def test_a_length_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(ModelInvalid, match="up to 100"):
        fit_kv(replace(SETTINGS, max_model_len=101), max_context=100, block_bytes=1)


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ModelInvalid):
        fit_kv(SETTINGS, max_context=100, block_bytes=1601)


def test_kv_that_was_not_asked_for_is_what_can_be_used() -> None:
    length, blocks = fit_kv(replace(SETTINGS, kv_cache_bytes=None), 64, block_bytes=1)
    assert (length, blocks) == (64, 4 * 4)
    assert replace(SETTINGS, kv_cache_bytes=None).kv_bytes() <= KV_BYTES_DEFAULT_MAX


@pytest.mark.parametrize(
    "bad", [{"max_loras": 0}, {"threads": 0}, {"max_cpu_loras": 7}, {"kv_cache_bytes": 0}]
)
def test_settings_that_cannot_work_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EmbeddedSettings(Path("m"), **bad)


def test_the_process_waits_quietly_with_the_threads_asked_for() -> None:
    environment = child_environment(replace(SETTINGS, threads=3))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_threads_default_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert SETTINGS.compute_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert SETTINGS.compute_threads() >= 1


def test_an_end_is_told_in_words() -> None:
    assert end_reason(-9) == "its process was ended by SIGKILL"
    assert end_reason(1) == "its process ended with status 1"
    assert end_reason(None) == "it is still running"
