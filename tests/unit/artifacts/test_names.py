"""Names that a request can carry, a log can show and a version suffix cannot blur."""

import pytest

from lorry.artifacts.names import NAME_CHARACTERS_MAX, check_adapter_name
from lorry.errors import AdapterConflict, RequestInvalid


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "team/pirate:v2",
        "/models/pirate",
        "Ärger-海賊",
        "two words",
        "bot@2025",
        "x" * NAME_CHARACTERS_MAX,
        "a..b",
    ],
)
def test_a_usable_name_is_accepted(name: str) -> None:
    check_adapter_name(name, {"base"})


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("", "empty"),
        ("x" * (NAME_CHARACTERS_MAX + 1), "257 characters"),
        ("a\nb", "unprintable"),
        ("a\x00b", "unprintable"),
        ("a\x7f", "unprintable"),
        ("zero\u200bwidth", "unprintable"),
        ("lone\ud800surrogate", "unprintable"),
        (" a", "blank"),
        ("a ", "blank"),
        (".", "parts"),
        ("..", "parts"),
        ("a/../b", "parts"),
        ("a@" + "0" * 12, "version"),
        ("a@" + "F" * 64, "version"),
    ],
)
def test_an_unusable_name_is_refused_with_the_reason(name: str, word: str) -> None:
    with pytest.raises(RequestInvalid, match=word) as caught:
        check_adapter_name(name, set())
    assert caught.value.param == "name"


def test_the_name_of_the_base_is_a_conflict_that_names_it() -> None:
    with pytest.raises(AdapterConflict, match="'llama'"):
        check_adapter_name("llama", {"llama", "alias"})
