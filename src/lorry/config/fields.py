"""The list of settings: name, meaning, default and range of each. Nothing else knows them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from lorry.artifacts.remote.policy import AllowedSource, PrivatePlace
from lorry.config.parse import (
    LoraModule,
    allowed_source,
    choice,
    many,
    path,
    plain_name,
    private_place,
    resolver_pattern,
    seconds,
    size,
    text,
    whole,
)

PREFIX = "LORRY_"
"""Of the variables."""

GIB = 1024**3

CPU_LORAS = 64
QUEUE_PER_ADAPTER = 1024
DOWNLOAD_BYTES = 10 * GIB
"""Defaults that follow other settings, see `load_settings`."""

Parser = Callable[[object], object]


@dataclasses.dataclass(frozen=True, slots=True)
class SettingSpec:
    """What is known of one setting besides its value."""

    name: str
    help: str
    metavar: str
    panel: str
    parse: Parser
    """Raises ValueError with what was expected and found."""
    default_text: str
    repeatable: bool
    required: bool
    aliases: tuple[str, ...]
    """Further names of the flag: SGLang's."""

    @property
    def flag(self) -> str:
        """`--max-loras`; the model is an argument."""
        return "MODEL" if self.name == "model" else f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """`LORRY_MAX_LORAS`."""
        return PREFIX + self.name.upper()


def _about(
    parse: Parser,
    metavar: str,
    help: str,
    *,
    default_text: str = "",
    repeatable: bool = False,
    aliases: tuple[str, ...] = (),
) -> Mapping[str, object]:
    """Metadata of a field of `Settings`, from which `specs` is made."""
    return {
        "parse": many(parse) if repeatable else parse,
        "metavar": metavar,
        "help": help,
        "default_text": default_text,
        "repeatable": repeatable,
        "aliases": aliases,
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that `lorry serve` can be told. Times are in seconds, sizes in bytes."""

    # The model
    model: Path = field(
        metadata=_about(
            path,
            "MODEL",
            "Folder with a Hugging Face model, a .gguf file, or a folder with one .gguf file.",
            default_text="(required)",
        )
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            plain_name,
            "NAME",
            "Name of the base model in requests; the first is used in answers, others are aliases.",
            default_text="the last part of MODEL",
            repeatable=True,
        ),
    )
    dtype: Literal["auto", "bfloat16", "float32"] = field(
        default="auto",
        metadata=_about(
            choice("auto", "bfloat16", "float32"),
            "auto|bfloat16|float32",
            "Type of weights and KV cache; auto takes bfloat16 where the hardware multiplies it, "
            "else float32.",
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto",
        metadata=_about(
            choice("auto", "cpu", "cuda"),
            "auto|cpu|cuda",
            "Where to compute; auto takes CUDA when there is any.",
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=_about(
            whole(1, 1024),
            "N",
            "Threads of the engine on a CPU.",
            default_text="OMP_NUM_THREADS, else one per core",
        ),
    )
    kernels: Literal["auto", "torch", "avx512", "avx2", "portable"] = field(
        default="auto",
        metadata=_about(
            choice("auto", "torch", "avx512", "avx2", "portable"),
            "auto|torch|avx512|avx2|portable",
            "What computes float32 on a CPU: our kernels for an instruction set, or PyTorch; auto "
            "takes the best that is there.",
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_about(
            whole(1, 10_000_000),
            "TOKENS",
            "Longest prompt and answer together.",
            default_text="what the model was made for, if its KV fits",
        ),
    )
    chat_template: Path | None = field(
        default=None,
        metadata=_about(
            path,
            "FILE",
            "Jinja chat template used instead of the model's own.",
            default_text="the model's",
        ),
    )
    engine: Literal["embedded", "fake"] = field(
        default="embedded",
        metadata=_about(
            choice("embedded", "fake"),
            "embedded|fake",
            "What computes; fake answers without a model, to try out clients.",
        ),
    )

    # Adapters
    lora_modules: tuple[LoraModule, ...] = field(
        default=(),
        metadata=_about(
            LoraModule.parse,
            "NAME=PATH",
            'Adapter to load at the start, or JSON: {"name": ..., "path": ...}.',
            default_text="none",
            repeatable=True,
        ),
    )
    lora_paths: tuple[LoraModule, ...] = field(
        default=(),
        metadata=_about(
            LoraModule.parse_sglang,
            "PATH|NAME=PATH",
            "The same in SGLang's way: a path alone is its own name; JSON has lora_name, lora_path "
            "and pinned.",
            default_text="none",
            repeatable=True,
        ),
    )
    max_loras: int = field(
        default=8,
        metadata=_about(
            whole(1, 1024),
            "N",
            "Slots: distinct adapters that one step can compute with.",
            aliases=("--max-loras-per-batch",),
        ),
    )
    max_cpu_loras: int = field(
        default=CPU_LORAS,
        metadata=_about(
            whole(1, 100_000),
            "N",
            "Adapters held in host memory, those in slots included; more may be loaded, and take "
            "turns there.",
            default_text="`64`, or `--max-loras` if that is more",
            aliases=("--max-loaded-loras",),
        ),
    )
    host_cache_bytes: int = field(
        default=2 * GIB,
        metadata=_about(size, "SIZE", "Host memory that adapters may take.", default_text="`2GiB`"),
    )
    disk_cache: Path | None = field(
        default=None,
        metadata=_about(
            path,
            "DIR",
            "Folder for copies of adapters.",
            default_text="`cache` in the state folder",
        ),
    )
    disk_cache_bytes: int = field(
        default=20 * GIB,
        metadata=_about(
            size, "SIZE", "Disk space that those copies may take.", default_text="`20GiB`"
        ),
    )
    max_upload_bytes: int = field(
        default=GIB,
        metadata=_about(
            size,
            "SIZE",
            "Largest adapter that may come with a request, unpacked; also the memory that all such "
            "uploads under way may take together.",
            default_text="`1GiB`",
        ),
    )
    max_lora_rank: int = field(
        default=64,
        metadata=_about(
            whole(1, 512),
            "RANK",
            "Largest rank taken; an adapter with a larger one is refused at load.",
        ),
    )
    adapter_root: tuple[Path, ...] = field(
        default=(),
        metadata=_about(
            path,
            "DIR",
            "Folder that adapters may be loaded from.",
            default_text="any folder",
            repeatable=True,
        ),
    )
    eviction: Literal["lru"] = field(
        default="lru",
        metadata=_about(
            choice("lru"),
            "lru",
            "Which idle adapter leaves first: the least recently used.",
            aliases=("--lora-eviction-policy",),
        ),
    )
    drain_timeout: float = field(
        default=30.0,
        metadata=_about(
            seconds(0, 86_400),
            "SECONDS",
            "How long an unload waits for running requests; 0 ends them at once.",
        ),
    )
    load_timeout: float = field(
        default=120.0,
        metadata=_about(
            seconds(0.1, 86_400), "SECONDS", "How long a load may take, the wait for room included."
        ),
    )

    # Sources
    allow_source: tuple[AllowedSource, ...] | None = field(
        default=None,
        metadata=_about(
            allowed_source,
            "SCHEME://[HOST[/FOLDER]]",
            "Remote source that adapters may be fetched from: https://*.example.com, s3://bucket, "
            "hf://org. With it, no other one.",
            default_text="all public ones; none if `--adapter-root` is given",
            repeatable=True,
        ),
    )
    private_source: tuple[PrivatePlace, ...] = field(
        default=(),
        metadata=_about(
            private_place,
            "HOST|NETWORK",
            "Host, or network such as 10.0.0.0/8, that https:// sources may be fetched from "
            "although its address is private.",
            default_text="none",
            repeatable=True,
        ),
    )
    max_source_bytes: int = field(
        default=4 * GIB,
        metadata=_about(
            size, "SIZE", "Most that a remote adapter's files may have.", default_text="`4GiB`"
        ),
    )
    download_bytes: int = field(
        default=DOWNLOAD_BYTES,
        metadata=_about(
            size,
            "SIZE",
            "Disk space for downloads under way, and for parts kept to go on from.",
            default_text="`10GiB`, or `--max-source-bytes` if that is more",
        ),
    )
    resolver: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            resolver_pattern,
            "PATTERN",
            "Source of adapters that nobody registered, loaded on first use; {name} stands for "
            "the name: s3://bucket/{name}. Several are tried in order.",
            default_text="none",
            repeatable=True,
        ),
    )
    resolver_names: int = field(
        default=1000,
        metadata=_about(
            whole(1, 1_000_000),
            "N",
            "Names learnt by --resolver that are registered at once; the one unused for longest "
            "goes.",
        ),
    )
    resolver_rate: int = field(
        default=60,
        metadata=_about(
            whole(1, 100_000),
            "N",
            "Unknown names that are looked up a minute; further ones get 429.",
        ),
    )
    resolver_retry: float = field(
        default=60.0,
        metadata=_about(
            seconds(0, 86_400),
            "SECONDS",
            "How long a name that was not found, or could not be served, is not looked up again.",
        ),
    )
    adapter_dir: tuple[Path, ...] = field(
        default=(),
        metadata=_about(
            path,
            "DIR",
            "Folder of adapters to register and follow: each folder in it is one, by its name.",
            default_text="none",
            repeatable=True,
        ),
    )
    adapter_dir_interval: float = field(
        default=5.0,
        metadata=_about(
            seconds(0.1, 3600),
            "SECONDS",
            "Between two looks at --adapter-dir; what did not change from one to the next is "
            "taken.",
        ),
    )

    # Requests
    max_num_seqs: int = field(
        default=64, metadata=_about(whole(1, 4096), "N", "Sequences computed at the same time.")
    )
    max_num_batched_tokens: int = field(
        default=512,
        metadata=_about(
            whole(16, 1_000_000),
            "TOKENS",
            "Tokens of one step; longer prompts are computed in pieces.",
        ),
    )
    kv_cache_bytes: int | None = field(
        default=None,
        metadata=_about(
            size,
            "SIZE",
            "Memory for keys and values of running requests.",
            default_text="a quarter of what is free, at most 4GiB",
        ),
    )
    max_queue: int = field(
        default=4096,
        metadata=_about(whole(1, 1_000_000), "N", "Requests that may wait; further ones get 429."),
    )
    max_queue_per_adapter: int = field(
        default=QUEUE_PER_ADAPTER,
        metadata=_about(
            whole(1, 1_000_000),
            "N",
            "Requests that may wait for one adapter.",
            default_text="`1024`, or `--max-queue` if that is less",
        ),
    )
    request_timeout: float = field(
        default=600.0,
        metadata=_about(
            seconds(1, 86_400), "SECONDS", "Longest life of a request, waiting included."
        ),
    )

    # The server
    host: str = field(
        default="127.0.0.1", metadata=_about(text, "ADDRESS", "Address to listen on.")
    )
    port: int = field(
        default=8000,
        metadata=_about(whole(0, 65_535), "PORT", "Port to listen on; 0 takes a free one."),
    )
    api_key: str | None = field(
        default=None,
        metadata=_about(
            text, "KEY", "Key that every route but /health asks for.", default_text="none"
        ),
    )
    state: str = field(
        default=".lorry",
        metadata=_about(
            text,
            "DIR|URL",
            "Folder for the registry and the disk cache, or a database URL for the registry.",
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info",
        metadata=_about(
            choice("debug", "info", "warning", "error"),
            "debug|info|warning|error",
            "How much to log.",
        ),
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The base model's name in answers, then its aliases."""
        return self.served_model_name or (self.model.resolve().name.removesuffix(".gguf"),)

    @property
    def allowed_sources(self) -> tuple[AllowedSource, ...] | None:
        """The allow-list of remote sources; None: all. Who limits folders and says nothing of
        remote sources wants none."""
        if self.allow_source is None and self.adapter_root:
            return ()
        return self.allow_source

    @property
    def state_folder(self) -> Path | None:
        """The folder of `state`; None when it is a URL."""
        return None if "://" in self.state else Path(self.state).expanduser()

    @property
    def state_url(self) -> str:
        """The registry's database as SQLAlchemy names it."""
        folder = self.state_folder
        return self.state if folder is None else f"sqlite:///{folder / 'lorry.sqlite3'}"

    @property
    def disk_cache_folder(self) -> Path:
        """Where copies of adapters are kept."""
        if self.disk_cache is not None:
            return self.disk_cache
        return (self.state_folder or Path(".lorry")) / "cache"


PANELS: Mapping[str, str] = {
    "model": "The model",
    "lora_modules": "Adapters",
    "allow_source": "Sources",
    "max_num_seqs": "Requests",
    "host": "The server",
}
"""The first field of each group, in the order of `Settings`."""


@functools.cache
def specs() -> tuple[SettingSpec, ...]:
    """All settings, in the order in which people read them."""
    made = []
    panel = ""
    for entry in dataclasses.fields(Settings):
        panel = PANELS.get(entry.name, panel)
        made.append(
            SettingSpec(
                name=entry.name,
                help=entry.metadata["help"],
                metavar=entry.metadata["metavar"],
                panel=panel,
                parse=entry.metadata["parse"],
                default_text=entry.metadata["default_text"] or f"`{entry.default}`",
                repeatable=entry.metadata["repeatable"],
                required=entry.default is dataclasses.MISSING,
                aliases=entry.metadata["aliases"],
            )
        )
    return tuple(made)
