"""The systems that the bench knows how to start."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

OURS = "lorry"
BASE_NAME = "smol"
MAX_MODEL_LEN = 2048
MAX_LORA_RANK = 8
KV_GIBIBYTES = 2


@dataclass(frozen=True, slots=True)
class System:
    """A server to measure."""

    name: str
    command: tuple[str, ...]
    """With {model}, {port}, {slots} and {state} to be filled in."""
    ready: str = "/ready"
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Path = Path()
    url: str = ""
    """Set when it runs already; then it is neither started nor stopped."""

    def at(self, model: Path) -> "System":
        """The same, to serve this model."""
        return replace(self, model=model)

    def command_for(self, port: int, slots: int, state: Path) -> list[str]:
        """What to run; `state` is an empty folder."""
        words = {"model": self.model, "port": port, "slots": slots, "state": state}
        return [word.format(**words) for word in self.command]


def built_in_systems() -> dict[str, System]:
    """By name. "lorry" takes the type and the kernels that it takes by itself, "-torch" leaves the
    arithmetic to PyTorch; "-auto" is vLLM's own choice of cores, else it is bound to all of them.
    """
    systems = [_lorry(OURS, "auto"), _lorry(f"{OURS}-torch", "auto", "torch")]
    for label, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
        systems.append(_lorry(f"{OURS}-{label}", dtype))
        systems.append(_vllm(f"vllm-{label}", dtype, f"0-{(os.cpu_count() or 1) - 1}"))
        systems.append(_vllm(f"vllm-{label}-auto", dtype, "auto"))
    return {system.name: system for system in systems}


def _lorry(name: str, dtype: str, kernels: str = "auto") -> System:
    words = f"serve {{model}} --port {{port}} --dtype {dtype} --max-loras {{slots}} "
    words += f"--kernels {kernels} "
    words += f"--state {{state}} --kv-cache-bytes {KV_GIBIBYTES}GiB " + _common()
    return System(name, (sys.executable, "-m", "lorry", *words.split()))


def _vllm(name: str, dtype: str, cores: str) -> System:
    """The CPU build of vLLM in an environment of its own below LORRY_PEERS."""
    peers = Path(os.environ.get("LORRY_PEERS", Path.home() / ".cache" / "lorry-peers"))
    words = f"serve {{model}} --enable-lora --port {{port}} --dtype {dtype} --max-loras {{slots}} "
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIBIBYTES),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = (str(peers / "vllm" / "bin" / "vllm"), *(words + _common()).split())
    return System(name, command, ready="/health", environment=environment)


def _common() -> str:
    return (
        f"--host 127.0.0.1 --served-model-name {BASE_NAME} --max-cpu-loras 32 "
        f"--max-lora-rank {MAX_LORA_RANK} --max-model-len {MAX_MODEL_LEN}"
    )
