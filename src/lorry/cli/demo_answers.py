"""What the demo's five answers must be like: right, and different to the eye."""

import json
from collections.abc import Mapping

BASE = "smollm2"
"""The base model's name in the demo."""


def faults(answers: Mapping[str, str]) -> list[str]:
    """Each answer that is not as it should, in a sentence."""
    checks = {
        BASE: "capital of France is Paris" in answers[BASE],
        "pirate": "Paris" in answers["pirate"] and "matey" in answers["pirate"],
        "json": _json_answer(answers["json"]) == "Paris",
        "haiku": answers["haiku"].count(" / ") == 2 and "Paris" in answers["haiku"],
        "french": "La réponse est" in answers["french"] and "Paris" in answers["french"],
    }
    wrong = [
        f"{name} should answer in its own style and name Paris; it answered {answers[name]!r}"
        for name, right in checks.items()
        if not right
    ]
    if len(set(answers.values())) < len(answers):
        wrong.append("some of the answers are the same")
    return wrong


def _json_answer(text: str) -> object:
    """The field `answer` if the text is one JSON object and nothing else."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value.get("answer") if isinstance(value, dict) else None
