"""Chat templates: what transformers offers them, in a sandbox."""

from typing import Any

import pytest

from lorry.chat_template import RENDERED_CHARS_MAX, ChatTemplate
from lorry.errors import RequestInvalid

HELLO = [{"role": "user", "content": "hello "}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    given = {"add_generation_prompt": False, "continue_final_message": False} | options
    return ChatTemplate(source).render(
        HELLO if messages is None else messages,
        variables=given.pop("variables", {"bos_token": "<s>"}),
        **given,
    )


def test_what_transformers_gives_a_template_is_there() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hello "}'
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ bos_token }}{% if tools %}t{% endif %}") == "<s>"
    assert render("{% if x is defined %}{{ x }}{% endif %}", variables={"x": "1"}) == "1"


def test_a_templates_own_words_reach_the_caller() -> None:
    with pytest.raises(RequestInvalid, match="Roles must alternate") as refused:
        render("{{ raise_exception('Roles must alternate') }}")
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].no.thing }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(RequestInvalid):
        render(source)


def test_endless_text_is_cut_short() -> None:
    line = "x" * 1000
    source = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(RequestInvalid, match=str(RENDERED_CHARS_MAX)):
        render(source, [{"role": "user", "content": line}])


def test_what_is_no_template_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="not valid Jinja"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}<end>", "hello "),
        ("{{ messages[0].content | trim }}<end>", "hello"),
    ],
)
def test_a_final_message_is_continued_where_it_ends(source: str, expected: str) -> None:
    assert render(source, continue_final_message=True) == expected


def test_text_parts_are_continued_too() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    source = "{{ messages[0].content[0].text }}<end>"
    assert render(source, parts, continue_final_message=True) == "a"
    assert parts[0]["content"][0]["text"] == "a"  # type: ignore[index]


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="leaves the final message out"):
        render("nothing", continue_final_message=True)
    with pytest.raises(RequestInvalid, match="text to continue"):
        render("x", [{"role": "user", "content": None}], continue_final_message=True)
