"""What the shell knows of an adapter once its files have been copied and judged."""

from dataclasses import dataclass
from pathlib import Path

from lorry.ids import VersionId


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts of one version. Pure data, stored with the registry."""

    version: VersionId
    rank: int
    """The largest rank of any module."""
    alpha: float
    scale_rule: str
    """"alpha/r" or "alpha/sqrt(r)" (rsLoRA)."""
    target_modules: tuple[str, ...]
    """Last parts of the names, sorted: `k_proj`, `q_proj`."""
    layers: tuple[int, ...]
    """Decoder layers that it touches, sorted."""
    parameters: int
    dtype: str
    """Of the files: "float32", "float16", "bfloat16", or "mixed"."""
    bytes: int
    """Size on disk of the snapshot."""
    host_bytes: int
    """Upper bound of the packed size in an engine's host memory: what is reserved."""
    base_model: str | None
    """`base_model_name_or_path` of the config, for people."""
    chat_template: str | None = None
    """The adapter's own template, if its folder has one."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version on disk: immutable, content-addressed."""

    path: Path
    """Folder with `adapter_config.json` (canonical) and `adapter_model.safetensors` (one file,
    original dtypes, tensor names in PEFT's form
    `base_model.model.model.layers.N.MODULE.lora_A.weight`)."""
    manifest: Manifest
