"""What the embedded engine is told at its start."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 1 << 30

KV_SHARE_OF_MEMORY = 4
"""One part in so many of the available memory goes to KV by default: adapters, weights and the
page cache want the rest."""

KV_BYTES_DEFAULT_MAX = 4 * GIB
"""More KV than this is rarely used on a CPU; ask for it if you need it."""


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """Limits and choices of one engine process. `None` means that the engine chooses."""

    model: Path
    """Folder of a Hugging Face model, or a GGUF file."""
    dtype: str = "auto"
    """Of weights and KV: "auto" (see `weights.pick_dtype`), "bfloat16" or "float32"."""
    device: str = "auto"
    """"auto" (CUDA when present), "cpu" or "cuda"."""
    max_model_len: int | None = None
    """Prompt and answer together, in tokens; None: what the model was made for, if KV fits."""
    max_num_seqs: int = 64
    """Sequences that run at a time; more wait."""
    max_num_batched_tokens: int = 512
    """Tokens per step: more makes prompts faster and the pauses of running answers longer."""
    max_loras: int = 8
    """Device slots: distinct adapters in one step."""
    max_cpu_loras: int = 64
    """Versions in host memory, those in slots included."""
    max_lora_rank: int = 64
    """Adapters of a higher rank are refused."""
    host_cache_bytes: int = 2 * GIB
    """Bytes of the versions in host memory, as packed."""
    kv_cache_bytes: int | None = None
    """Memory for KV; None: a quarter of what is available at the start, 4 GiB at most."""
    block_size: int = 16
    """Tokens per KV block: the grain of prefix reuse."""
    enable_prefix_caching: bool = True
    """Keep the KV of ended requests, for others that begin alike on the same version."""
    threads: int | None = None
    """Threads that compute; None: OMP_NUM_THREADS if it is set, else all cores."""
    kernels: str = "auto"
    """Of float32 on a CPU: "auto" (the best that this machine has), "torch", or an instruction
    set."""
    slot_wait_ms: int = 1000
    """How long a version may be kept waiting for a slot before others have to share theirs."""
    hang_timeout_s: float = 60.0
    """An engine process that says nothing for so long is killed and started again."""
    start_timeout_s: float = 600.0
    """Limit between two signs of progress while the model loads."""
    command_timeout_s: float = 120.0
    """Limit for one answer of the engine process to a command."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for what cannot work, naming the field."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_loras", "max_cpu_loras"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_lora_rank", "block_size", "host_cache_bytes", "slot_wait_ms"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "kv_cache_bytes", "threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras}, but must be at least max_loras "
                f"({self.max_loras}): what is in a slot is in host memory too."
            )

    def kv_bytes(self) -> int:
        """Memory for KV in bytes, chosen now if it was left open."""
        if self.kv_cache_bytes is not None:
            return self.kv_cache_bytes
        available: int = psutil.virtual_memory().available
        return min(available // KV_SHARE_OF_MEMORY, KV_BYTES_DEFAULT_MAX)

    def compute_threads(self) -> int:
        """Threads that compute."""
        if self.threads is not None:
            return self.threads
        asked = os.environ.get("OMP_NUM_THREADS", "")
        return int(asked) if asked.isdigit() and int(asked) else len(os.sched_getaffinity(0))


def _at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}, but must be at least {least}.")
