"""From settings to a running server: the one place that knows every part."""

import gc
import logging
import signal
import sys

import anyio
from rich.console import Console
from rich.logging import RichHandler

from lorry.artifacts.cache import DiskCache
from lorry.artifacts.remote.fetcher import DOWNLOADS, Fetcher
from lorry.config import Settings
from lorry.config.layers import (
    embedded_settings,
    fleet_limits,
    server_settings,
    source_policy,
    supervisor_settings,
)
from lorry.engine import Engine
from lorry.engines.embedded.engine import EmbeddedEngine
from lorry.engines.fake import FakeEngine
from lorry.engines.fake_script import FakeSettings
from lorry.errors import LorryError
from lorry.ids import AdapterName, ReplicaId
from lorry.lifecycle.learning import NAME_FIELD
from lorry.loading import ModelProgress
from lorry.server.app import build_app
from lorry.server.serve import serve
from lorry.store.sql import SqlStore
from lorry.supervisor import LoadRequest, Supervisor
from lorry.tokens import Tokenizer, config_eos_token_ids, load_tokenizer

log = logging.getLogger("lorry")

FAILED = 1


def run_server(settings: Settings) -> int:
    """Serve until a signal; the process's exit code."""
    _set_up_logging(settings.log_level)
    problems: list[Exception] = []
    try:
        anyio.run(_serve, settings)
    except* (LorryError, OSError) as group:
        problems = leaves(group)
    for problem in problems:
        _report(problem)
    return FAILED if problems else 0


def leaves(group: ExceptionGroup[Exception]) -> list[Exception]:
    """The errors in a group, groups in it included."""
    found: list[Exception] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, ExceptionGroup) else [error]
    return found


def _report(problem: Exception) -> None:
    """What is wrong and what to do, without a traceback."""
    screen = Console(stderr=True, highlight=False, markup=False)
    text = problem.strerror if isinstance(problem, OSError) else None
    screen.print(f"error: {text or problem}", soft_wrap=True)
    if isinstance(problem, LorryError):
        for detail in problem.details:
            screen.print(f"  - {detail}", soft_wrap=True)
        screen.print(f"  {problem.action}", soft_wrap=True)


async def _serve(settings: Settings) -> None:
    tokenizer = _tokenizer(settings)
    supervisor = build_supervisor(settings)
    app = build_app(
        supervisor,
        server_settings(settings),
        tokenizer,
        eos_token_ids=None if tokenizer else config_eos_token_ids(settings.model),
    )
    keep_for_good()
    await serve(app, settings.host, settings.port)


def keep_for_good() -> None:
    """Modules, classes and what else is there by now stay until the end. Without this Python looks
    through all of it now and then, a tenth of a second during which nobody is answered."""
    gc.collect()
    gc.freeze()


def build_supervisor(settings: Settings) -> Supervisor:
    """The supervisor with its engine, store and disk cache; nothing runs yet."""
    if settings.state_folder is not None:
        settings.state_folder.mkdir(parents=True, exist_ok=True)
    fetcher = Fetcher(
        source_policy(settings), settings.disk_cache_folder / DOWNLOADS, settings.adapter_root
    )
    for pattern in settings.resolver:
        fetcher.require(pattern.replace(NAME_FIELD, "name"))  # so that an extra is missed now
    return Supervisor(
        engines={ReplicaId("engine-0"): _engine(settings)},
        store=SqlStore(settings.state_url),
        cache=DiskCache(settings.disk_cache_folder, settings.disk_cache_bytes),
        limits=fleet_limits(settings),
        settings=supervisor_settings(settings),
        fetcher=fetcher,
        base_names=settings.model_names,
        at_start=tuple(
            LoadRequest(AdapterName(module.name), str(module.path), pinned=module.pinned)
            for module in (*settings.lora_modules, *settings.lora_paths)
        ),
    )


def _engine(settings: Settings) -> Engine:
    if settings.engine == "fake":
        return FakeEngine(
            FakeSettings(
                max_loras=settings.max_loras,
                max_cpu_loras=settings.max_cpu_loras,
                host_cache_bytes=settings.host_cache_bytes,
                max_lora_rank=settings.max_lora_rank,
            )
        )
    return EmbeddedEngine(embedded_settings(settings), ModelProgress(settings.model))


def _tokenizer(settings: Settings) -> Tokenizer | None:
    if settings.engine == "fake" and not settings.model.exists():
        return None
    template = settings.chat_template.read_text() if settings.chat_template else None
    return load_tokenizer(settings.model, chat_template=template)


def _set_up_logging(level: str) -> None:
    """Readable lines on a terminal, plain ones elsewhere; ours at the level asked, others'
    warnings."""
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("lorry").setLevel(level.upper())
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
