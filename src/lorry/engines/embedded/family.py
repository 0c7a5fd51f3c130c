"""The decoder families we compute, told apart by their `config.json` alone.

One decoder implementation serves them all; what differs is a handful of facts, gathered in
`Family`. Whatever a config asks for beyond those facts is refused here by name, before any weight
is read. Defaults are those of transformers for a key that the file leaves out. No torch in this
file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorry.errors import ModelInvalid, ModelUnsupported

Config = Mapping[str, Any]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope scalings whose frequencies do not change as a sequence grows. `dynamic` and `longrope` do
change them, which would make KV depend on what came later, so they are refused."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a family takes for granted when its config is silent."""

    max_position_embeddings: int
    sliding_window: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = False
    """Biases on q, k and v whatever the config says."""
    attention_bias: bool = False
    """The config's `attention_bias` counts (q, k, v and o)."""
    mlp_bias: bool = False
    """The config's `mlp_bias` counts (gate, up and down)."""
    qk_norm: bool = False
    window_flag: str | None = None
    """Key that must be true before `sliding_window` counts; None: it always counts."""


FAMILIES: Mapping[str, Defaults] = {
    "LlamaForCausalLM": Defaults(2048, attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": Defaults(131072, sliding_window=4096),
    "Qwen2ForCausalLM": Defaults(
        32768, sliding_window=4096, qkv_bias=True, window_flag="use_sliding_window"
    ),
    "Qwen3ForCausalLM": Defaults(
        32768,
        sliding_window=4096,
        head_dim=128,
        attention_bias=True,
        qk_norm=True,
        window_flag="use_sliding_window",
    ),
}

DEFAULT_SIZES: Mapping[str, Mapping[str, int]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32},
}


@dataclass(frozen=True, slots=True)
class Family:
    """One model's facts, as far as the decoder needs them."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    """The head is the embedding."""
    max_positions: int
    sliding_window: int | None
    rope_type: str
    rope_theta: float

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def max_context(self) -> int:
        """Longest sequence computed rightly: a window is refused rather than forgotten, so it is a
        limit."""
        return min(self.max_positions, self.sliding_window or self.max_positions)

    def targets(self) -> dict[str, tuple[int, int]]:
        """Linear projections of a layer: name -> (in, out)."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "self_attn.q_proj": (hidden, self.q_size),
            "self_attn.k_proj": (hidden, self.kv_size),
            "self_attn.v_proj": (hidden, self.kv_size),
            "self_attn.o_proj": (self.q_size, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }


def read_family(config: Config) -> Family:
    """The facts, or `ModelUnsupported` with the name of what is not computed, or `ModelInvalid`."""
    architecture = _architecture(config)
    known = FAMILIES[architecture]
    _refuse_extras(config, architecture, known)
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    bias = known.attention_bias and bool(config.get("attention_bias", False))
    family = Family(
        architecture=architecture,
        layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        heads=heads,
        kv_heads=_kv_heads(config, architecture, heads),
        head_dim=int(config.get("head_dim") or known.head_dim or hidden // heads),
        vocab_size=_size(config, "vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=known.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=known.mlp_bias and bool(config.get("mlp_bias", False)),
        qk_norm=known.qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=int(config.get("max_position_embeddings", known.max_position_embeddings)),
        sliding_window=_window(config, known),
        rope_type=_rope_type(_rope(config)),
        rope_theta=float(_rope(config).get("rope_theta", config.get("rope_theta", 10000.0))),
    )
    _check_heads(family)
    return family


def _architecture(config: Config) -> str:
    named = config.get("architectures") or [config.get("model_type") or "(none given)"]
    if named[0] not in FAMILIES:
        raise ModelUnsupported(
            f"The model's architecture is {named[0]}; the embedded engine computes "
            f"{', '.join(FAMILIES)}."
        )
    return str(named[0])


def _refuse_extras(config: Config, architecture: str, known: Defaults) -> None:
    """Keys that would change the numbers in a way the decoder does not follow."""
    act = config.get("hidden_act", "silu")
    quantized = config.get("quantization_config")
    if act != "silu":
        raise ModelUnsupported(f"hidden_act is {act!r} in config.json; only 'silu' is computed.")
    if quantized:
        method = quantized.get("quant_method", "unknown")
        raise ModelUnsupported(
            f"The weights are quantised ({method}); give the unquantised model, or a GGUF file."
        )
    if known.window_flag and config.get(known.window_flag):
        raise ModelUnsupported(
            f"{known.window_flag} is true in config.json: {architecture} with a sliding window in "
            "some layers is not computed."
        )
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if others:
        raise ModelUnsupported(
            f"layer_types in config.json names {others[0]!r}; only 'full_attention' is computed."
        )
    _refuse_rope(config)


def _rope(config: Config) -> Config:
    """transformers 5 writes `rope_parameters`; older files have `rope_scaling`, which wins if
    there."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _rope_type(rope: Config) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _refuse_rope(config: Config) -> None:
    rope = _rope(config)
    kind = _rope_type(rope)
    if kind not in ROPE_TYPES:
        raise ModelUnsupported(
            f"rope type {kind!r} in config.json is not computed; known are {', '.join(ROPE_TYPES)}."
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ModelUnsupported(
            f"partial_rotary_factor is {partial} in config.json; only 1.0 is computed."
        )


def _size(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelInvalid(f"config.json: {key} is {value!r}; a positive integer was expected.")
    return value


def _kv_heads(config: Config, architecture: str, heads: int) -> int:
    default = DEFAULT_SIZES.get(architecture, {}).get("num_key_value_heads", heads)
    return int(config.get("num_key_value_heads", default) or heads)


def _window(config: Config, known: Defaults) -> int | None:
    if known.sliding_window is None or known.window_flag:
        return None
    window = config.get("sliding_window", known.sliding_window)
    return None if window is None else int(window)


def _check_heads(family: Family) -> None:
    if family.heads % family.kv_heads:
        raise ModelInvalid(
            f"config.json: num_attention_heads {family.heads} is no multiple of "
            f"num_key_value_heads {family.kv_heads}."
        )
    if family.head_dim % 2:
        raise ModelInvalid(f"config.json: head_dim {family.head_dim} is odd.")
