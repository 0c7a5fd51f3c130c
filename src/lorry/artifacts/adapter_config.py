"""`adapter_config.json` as PEFT writes it: what it means here, and every reason why it cannot be
served.

Two tables hold the policy. `_REFUSED` lists the PEFT features that change the computation and are
not built; `_MUTATED` lists the initialisations that change the *base* weights. For the latter PEFT
trains on a residual base `W - s·B0·A0` and saves only A and B, so on the plain base the adapter
would be silently wrong. An adapter that was converted with PEFT's
`path_initial_model_for_weight_conversion` is a plain LoRA, and PEFT then writes `init_lora_weights:
true`, so the field tells the two apart. All other initialisations only choose where training
starts."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CONFIG_FILE = "adapter_config.json"

CONFIG_BYTES_MAX = 1 << 20
"""A config with a pattern for each of 1,000 modules has about 100 KB."""

FOUND_CHARACTERS_MAX = 80

PEFT_RANK_DEFAULT = 8
PEFT_ALPHA_DEFAULT = 8


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of a LoRA config that change the computation, plus the base's name for people."""

    r: int = PEFT_RANK_DEFAULT
    lora_alpha: float = PEFT_ALPHA_DEFAULT
    use_rslora: bool = False
    target_modules: str | tuple[str, ...] | None = None
    """A regular expression, or names; None when the field could not be read."""
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()
    """Empty: all layers."""
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """In the file's order, which decides when several entries match."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base_model: str | None = None


def shown(value: object) -> str:
    """A found value for a message: its repr, cut where it would fill the screen, safe to print
    anywhere."""
    text = ascii(value)
    return text if len(text) <= FOUND_CHARACTERS_MAX else f"{text[:FOUND_CHARACTERS_MAX]}..."


def problem(key: str, found: object, expected: str, action: str) -> str:
    """One sentence about one key of the config."""
    return f"{CONFIG_FILE}: {key} is {shown(found)}, expected {expected}; {action}."


def read_config(content: bytes) -> tuple[dict[str, Any] | None, list[str]]:
    """The JSON object in the file, or the one reason why there is none."""
    if len(content) > CONFIG_BYTES_MAX:
        return None, [
            f"{CONFIG_FILE} has {len(content)} bytes, expected at most {CONFIG_BYTES_MAX}; shorten "
            "it."
        ]
    try:
        raw = json.loads(content.decode("utf-8"))  # not UTF-16, which json would take and PEFT not
    except (ValueError, RecursionError) as error:
        reason = shown(str(error))
        return None, [
            f"{CONFIG_FILE} is not JSON ({reason}); save the adapter again with PEFT's "
            "save_pretrained."
        ]
    if not isinstance(raw, dict):
        return None, [
            f"{CONFIG_FILE} holds a {type(raw).__name__}, expected a JSON object; save the adapter "
            "again with PEFT's save_pretrained."
        ]
    return raw, []


def parse_config(raw: Mapping[str, Any]) -> tuple[AdapterConfig, list[str]]:
    """The config and every problem in its fields. A field with a problem has PEFT's default in the
    result."""
    fields = _Fields(raw)
    config = AdapterConfig(
        r=fields.take(
            "r",
            PEFT_RANK_DEFAULT,
            _rank,
            "a whole number from 1",
            "set the rank it was trained with",
        ),
        lora_alpha=fields.take(
            "lora_alpha",
            PEFT_ALPHA_DEFAULT,
            _finite,
            "a finite number",
            "set the alpha it was trained with",
        ),
        use_rslora=fields.take(
            "use_rslora", False, _flag, "true or false", "set it as it was in training"
        ),
        target_modules=fields.targets(),
        exclude_modules=fields.names("exclude_modules"),
        layers_to_transform=fields.take(
            "layers_to_transform",
            (),
            _layers,
            "a layer number or a list of them",
            "list the adapted layers",
        ),
        layers_pattern=_as_tuple(fields.names("layers_pattern")),
        rank_pattern=fields.pattern("rank_pattern", _rank, "a whole number from 1"),
        alpha_pattern=fields.pattern("alpha_pattern", _finite, "a finite number"),
        base_model=_base_model(raw.get("base_model_name_or_path")),
    )
    return config, [*_refusals(raw), *fields.problems, *_contradictions(config), *_oddities(raw)]


class _Fields:
    """Reads fields one by one and keeps what is wrong with them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def take(
        self, key: str, default: Any, read: Callable[[Any], Any], expected: str, action: str
    ) -> Any:
        """The field's value, or `default` when it is absent (as in PEFT) or wrong (with a problem
        noted)."""
        if key not in self.raw:
            return default
        value = read(self.raw[key])
        if value is None:
            self.problems.append(problem(key, self.raw[key], expected, action))
            return default
        return value

    def targets(self) -> str | tuple[str, ...] | None:
        """`target_modules`, which must be there: PEFT's guess for a missing one depends on PEFT's
        version."""
        value = _names(self.raw.get("target_modules"))
        if value:
            return value
        self.problems.append(
            problem(
                "target_modules",
                self.raw.get("target_modules"),
                "a list of module names or a regular expression",
                "list the modules that were trained",
            )
        )
        return None

    def names(self, key: str) -> str | tuple[str, ...]:
        """A list of names or one pattern; nothing when absent or null."""
        if self.raw.get(key) is None:
            return ()
        value: str | tuple[str, ...] = self.take(
            key, (), _names, "a list of names or a string", "mend or remove it"
        )
        return value

    def pattern(self, key: str, read: Callable[[Any], Any], expected: str) -> dict[str, Any]:
        """`rank_pattern` or `alpha_pattern`, entry by entry."""
        raw = self.raw.get(key, {})
        if not isinstance(raw, dict):
            self.problems.append(
                problem(key, raw, "an object from module patterns to numbers", "mend or remove it")
            )
            return {}
        read_values = {pattern: read(value) for pattern, value in raw.items()}
        for pattern, value in read_values.items():
            if value is None:
                self.problems.append(
                    problem(f"{key}[{shown(pattern)}]", raw[pattern], expected, "mend the entry")
                )
        return {pattern: value for pattern, value in read_values.items() if value is not None}


def _rank(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _layers(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return ()
    layers = value if isinstance(value, list) else [value]
    good = all(
        isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in layers
    )
    return tuple(layers) if good else None


def _names(value: Any) -> str | tuple[str, ...] | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    return None


def _as_tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value else ()
    return value


def _base_model(value: Any) -> str | None:
    """For people only, so it is cut and made storable rather than refused."""
    if not isinstance(value, str) or not value:
        return None
    return value[:1024].encode("utf-8", "replace").decode("utf-8")


_REFUSED: dict[str, str] = {
    "use_dora": "DoRA",
    "lora_bias": "a bias in lora_B",
    "modules_to_save": "fully trained modules",
    "trainable_token_indices": "trained tokens",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "alora_invocation_string": "activated LoRA (aLoRA)",
    "layer_replication": "replicated layers",
    "target_parameters": "LoRA on bare parameters",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA, which changes the base weights",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "megatron_config": "Megatron layers",
    "fan_in_fan_out": "a base of Conv1D layers, which this base is not",
}
"""Features that are not built. null, false, an empty list or an empty object mean that a feature is
not used, but for those below."""

_UNUSED_BY_NULL = (
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config", "use_bdlora"),
    "trainable_token_indices",
)
"""PEFT takes even an empty object for use, and refuses to read anything else that is empty."""

_MUTATED = ("pissa", "corda", "olora", "lora_ga", "loftq")
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")

_KNOWN_CONFIGS = frozenset(
    {"auto_mapping", "loftq_config", "eva_config", "corda_config", "lora_ga_config"}
) | {"runtime_config"}
"""Objects that steer training or placement only."""


TASK_TYPES = (
    *("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"),
)
"""PEFT's `TaskType`, in src/peft/utils/peft_types.py."""


def _oddities(raw: Mapping[str, Any]) -> list[str]:
    """Fields that change no answer here, but that PEFT refuses to read."""
    expected: list[tuple[str, str]] = []
    if raw.get("task_type") not in (None, *TASK_TYPES):
        expected.append(("task_type", f"null or one of {', '.join(TASK_TYPES)}"))
    if raw.get("target_parameters") == "":
        expected.append(("target_parameters", "null or a list"))
    dropout = _finite(raw.get("lora_dropout", 0.0))
    if dropout is None or not 0 <= dropout <= 1:
        expected.append(("lora_dropout", "a number from 0 to 1"))
    expected += [
        (key, "null or an object")
        for key in sorted(_KNOWN_CONFIGS & raw.keys())
        if raw[key] is not None and not isinstance(raw[key], dict)
    ]
    action = "save the adapter again with PEFT's save_pretrained"
    return [problem(key, raw[key], what, action) for key, what in expected]


def _refusals(raw: Mapping[str, Any]) -> list[str]:
    """Every PEFT feature that the config asks for and that is not served."""
    problems = []
    if raw.get("peft_type") != "LORA":
        problems.append(
            problem(
                "peft_type",
                raw.get("peft_type"),
                "'LORA'",
                "only LoRA adapters are served; convert or retrain it",
            )
        )
    if raw.get("bias", "none") != "none":
        problems.append(
            problem(
                "bias",
                raw["bias"],
                "'none'",
                "trained biases are not supported; train with bias='none'",
            )
        )
    for key, feature in _REFUSED.items():
        if raw.get(key) or (key in _UNUSED_BY_NULL and raw.get(key) is not None):
            problems.append(
                problem(
                    key,
                    raw[key],
                    "it unset",
                    f"{feature} is not supported; merge the adapter or train without it",
                )
            )
    return [*problems, *_bad_init(raw.get("init_lora_weights", True)), *_unknown_features(raw)]


def _bad_init(value: Any) -> list[str]:
    key = "init_lora_weights"
    if value is None or isinstance(value, bool):
        return []
    name = value.lower() if isinstance(value, str) else ""
    if name.startswith(_MUTATED):
        action = (
            "it was trained on a changed base; save it with "
            "path_initial_model_for_weight_conversion, which turns it into a plain LoRA"
        )
        return [problem(key, value, "an initialisation that leaves the base as it is", action)]
    if name in _PLAIN_INITS:
        return []
    return [
        problem(
            key, value, f"true, false or one of {', '.join(_PLAIN_INITS)}", "it is not known here"
        )
    ]


def _unknown_features(raw: Mapping[str, Any]) -> list[str]:
    """Switches of PEFT versions to come. PEFT ignores fields it does not know; a switched-on
    feature must not be."""
    known = {"use_rslora", *_REFUSED, *_KNOWN_CONFIGS}
    return [
        problem(key, value, "no such key", "this PEFT feature is not known here; train without it")
        for key, value in raw.items()
        if value and key not in known and (key.startswith("use_") or key.endswith("_config"))
    ]


def _contradictions(config: AdapterConfig) -> list[str]:
    """Combinations that PEFT itself refuses to load."""
    problems = []
    if isinstance(config.target_modules, str) and (
        config.layers_to_transform or config.layers_pattern
    ):
        problems.append(
            f"{CONFIG_FILE}: layers_to_transform or layers_pattern is set, expected neither beside "
            "a target_modules that is one regular expression; name the layers in the expression."
        )
    if config.layers_pattern and not config.layers_to_transform:
        problems.append(
            f"{CONFIG_FILE}: layers_pattern is {shown(list(config.layers_pattern))} without "
            "layers_to_transform; set both or neither."
        )
    return problems
