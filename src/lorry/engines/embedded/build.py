"""From settings to an engine core with a model in it; runs in the engine's process."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lorry.engine import EngineCapabilities, LoraVersion
from lorry.engines.embedded.blocks import BlockPool
from lorry.engines.embedded.host import HostCache
from lorry.engines.embedded.loop import CoreLimits, EngineCore
from lorry.engines.embedded.lora import AdapterReader, HostAdapter
from lorry.engines.embedded.model import Decoder
from lorry.engines.embedded.schedule import ScheduleLimits
from lorry.engines.embedded.settings import EmbeddedSettings
from lorry.engines.embedded.slots import LoraSlots
from lorry.errors import EngineRejected, ModelInvalid

KV_ROUNDS_MAX = 4
"""KV that was not asked for by size is at most so many times what all sequences can use at once:
more would only keep prefixes that nobody comes back for."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A core, and what the process needs beside it."""

    core: EngineCore[HostAdapter]
    capabilities: EngineCapabilities
    load_adapter: Callable[[LoraVersion], HostAdapter]
    """Read and pack a version; may run in any thread. Raises `EngineRejected`."""


def build(settings: EmbeddedSettings, progress: Callable[[int, int], None]) -> Engine:
    """Load the model and lay out memory. Raises `ModelUnsupported` or `ModelInvalid`."""
    torch.set_num_threads(settings.compute_threads())
    decoder = Decoder.load(
        *(settings.model, settings.dtype, settings.device, progress),
        *(settings.kernels, settings.compute_threads()),
    )
    block_bytes = decoder.kv_bytes_per_block(settings.block_size)
    max_model_len, blocks = fit_kv(settings, decoder.max_context, block_bytes)
    decoder.allocate_kv(blocks, settings.block_size)
    slots = LoraSlots(
        *(settings.max_loras, settings.max_lora_rank, decoder.shape, decoder.dtype, decoder.device),
        kernels=decoder.kernels,
    )
    decoder.attach(slots)
    schedule = ScheduleLimits(
        settings.max_num_seqs, settings.max_num_batched_tokens, settings.slot_wait_ms / 1000
    )
    core: EngineCore[HostAdapter] = EngineCore(
        decoder,
        slots,
        HostCache(settings.max_cpu_loras, settings.host_cache_bytes),
        BlockPool(blocks, settings.block_size, reuse=settings.enable_prefix_caching),
        CoreLimits(schedule, max_model_len, settings.max_loras),
        time.monotonic,
    )

    reader = AdapterReader(decoder.shape, decoder.dtype, native=decoder.kernels is not None)

    def load(version: LoraVersion) -> HostAdapter:
        adapter = reader.read(version.path)
        if adapter.rank > settings.max_lora_rank:
            raise EngineRejected(
                f"{version.name} has rank {adapter.rank}, but max_lora_rank is "
                f"{settings.max_lora_rank}."
            )
        return adapter

    return Engine(core, _capabilities(settings, decoder, max_model_len), load)


def fit_kv(settings: EmbeddedSettings, max_context: int, block_bytes: int) -> tuple[int, int]:
    """(max_model_len, blocks): one sequence of full length always fits, or the loop could not end.

    A length that was not asked for shrinks to what fits. Raises `ModelInvalid` for one that was.
    """
    size, memory = settings.block_size, settings.kv_bytes()
    blocks = memory // block_bytes
    length = settings.max_model_len or min(max_context, blocks * size)
    if length > max_context:
        raise ModelInvalid(
            f"max_model_len is {length}, but {settings.model} computes rightly up to {max_context} "
            "tokens only; ask for no more than that."
        )
    full = -(-length // size)
    if not length or full > blocks:
        raise ModelInvalid(
            f"One sequence of {max(length, 1)} tokens needs {max(full, 1) * block_bytes} bytes of "
            f"KV, but there are {memory}; lower max_model_len or raise kv_cache_bytes."
        )
    if settings.kv_cache_bytes is None:
        blocks = min(blocks, full * settings.max_num_seqs * KV_ROUNDS_MAX)
    return length, blocks


def _capabilities(
    settings: EmbeddedSettings, decoder: Decoder, max_model_len: int
) -> EngineCapabilities:
    return EngineCapabilities(
        base=decoder.shape,
        max_model_len=max_model_len,
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras,
        host_cache_bytes=settings.host_cache_bytes,
        max_lora_rank=settings.max_lora_rank,
        max_num_seqs=settings.max_num_seqs,
        computing=computing(settings, decoder),
    )


def computing(settings: EmbeddedSettings, decoder: Decoder) -> str:
    """What does the arithmetic, for people."""
    if decoder.device.type != "cpu":
        return f"PyTorch in {str(decoder.dtype).removeprefix('torch.')} on {decoder.device}"
    own = decoder.kernels
    kind = str(decoder.dtype).removeprefix("torch.")
    what = f"PyTorch in {kind}" if own is None else f"own kernels for {own.isa.name} in {kind}"
    threads = settings.compute_threads()
    return f"{what}, {threads} thread{'s' * (threads != 1)}"
