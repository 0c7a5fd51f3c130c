"""From the one `Settings` to what each layer wants to be told."""

from lorry.artifacts.remote.policy import SourcePolicy
from lorry.config.fields import Settings
from lorry.engines.embedded.settings import EmbeddedSettings
from lorry.lifecycle.learning import LearningLimits
from lorry.lifecycle.settings import FleetLimits
from lorry.server.settings import ServerSettings
from lorry.supervisor.settings import SupervisorSettings


def embedded_settings(settings: Settings) -> EmbeddedSettings:
    """For the engine."""
    return EmbeddedSettings(
        model=settings.model,
        dtype=settings.dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras,
        max_lora_rank=settings.max_lora_rank,
        host_cache_bytes=settings.host_cache_bytes,
        kv_cache_bytes=settings.kv_cache_bytes,
        threads=settings.threads,
        kernels=settings.kernels,
        command_timeout_s=settings.load_timeout,
    )


def fleet_limits(settings: Settings) -> FleetLimits:
    """For the core: waiting and deadlines."""
    return FleetLimits(
        tickets_max=settings.max_queue,
        tickets_per_adapter_max=settings.max_queue_per_adapter,
        operation_ms=round(settings.load_timeout * 1000),
        lease_ms=round(settings.request_timeout * 1000),
    )


def supervisor_settings(settings: Settings) -> SupervisorSettings:
    """For the shell around the core."""
    return SupervisorSettings(
        adapter_roots=settings.adapter_root,
        drain_timeout_s=settings.drain_timeout,
        load_timeout_s=settings.load_timeout,
        resolvers=settings.resolver,
        learning=LearningLimits(
            names_max=settings.resolver_names,
            lookups_per_minute=settings.resolver_rate,
            retry_ms=round(settings.resolver_retry * 1000),
        ),
        adapter_dirs=settings.adapter_dir,
        adapter_dir_interval_s=settings.adapter_dir_interval,
    )


def source_policy(settings: Settings) -> SourcePolicy:
    """For what is fetched from elsewhere."""
    return SourcePolicy(
        allowed=settings.allowed_sources,
        private=settings.private_source,
        source_bytes_max=settings.max_source_bytes,
        download_bytes_max=settings.download_bytes,
        fetch_timeout_s=settings.load_timeout,
    )


def server_settings(settings: Settings) -> ServerSettings:
    """For the HTTP side."""
    return ServerSettings(
        served_model_names=settings.model_names,
        model_root=str(settings.model),
        api_keys=(settings.api_key,) if settings.api_key else (),
        max_upload_bytes=settings.max_upload_bytes,
        request_timeout_s=settings.request_timeout,
        drain_timeout_s=settings.drain_timeout,
    )
