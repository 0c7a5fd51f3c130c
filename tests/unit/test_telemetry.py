"""Metrics and log lines from given facts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lorry.engine import EngineHealth
from lorry.ids import AdapterName, ReplicaId, VersionId
from lorry.telemetry import Snapshot, Telemetry, change_line
from lorry.views import ChangeEvent, ReplicaView, Statistics

ONE = ReplicaId("engine")
HEALTH = EngineHealth(
    ready=True,
    reason="",
    slots=(None, None),
    running=3,
    waiting=2,
    kv_blocks_used=1,
    kv_blocks_total=4,
    counters={"slot_loads": 7},
)
FACTS = Statistics(
    registered=5,
    waiting=4,
    running=3,
    operations=1,
    waiting_by_name={AdapterName("b"): 4, AdapterName("quiet"): 0},
    running_by_name={AdapterName("c"): 1, AdapterName("a"): 2},
    replicas=(ReplicaView(ONE, True, "", 2, 8, 100, 1000, 3, HEALTH),),
    host_hits=10,
    host_misses=6,
    loads=6,
    load_failures=1,
    load_seconds=(0.1, 0.3, 0.2),
    unloads=2,
    unload_failures=0,
    evictions={"room": 3},
    refusals={"queue_full": 9},
    stale_reports=0,
    engine_losses=1,
    disk_bytes=5000,
    disk_bytes_max=None,
    disk_versions=6,
    disk_evictions=0,
)


def samples(telemetry: Telemetry, facts: Statistics = FACTS) -> Mapping[str, float]:
    """Value of each sample by its name and labels as Prometheus writes them."""
    text = telemetry.render(Snapshot(facts, {ONE: HEALTH}, (), 2)).decode()
    families = text_string_to_metric_families(text)
    found = [sample for family in families for sample in family.samples]
    keys = [s.name + "".join(f"|{k}={v}" for k, v in sorted(s.labels.items())) for s in found]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, (s.value for s in found), strict=True))


def test_gauges_have_vllms_names_where_they_mean_the_same() -> None:
    found = samples(Telemetry("tiny"))
    assert found["vllm:num_requests_running|model_name=tiny"] == 3
    assert found["vllm:num_requests_waiting|model_name=tiny"] == 6
    assert found["vllm:kv_cache_usage_perc|model_name=tiny"] == 0.25
    info = [key for key in found if key.startswith("vllm:lora_requests_info")]
    assert info == [
        "vllm:lora_requests_info|max_lora=2|running_lora_adapters=a,c|waiting_lora_adapters=b"
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lorry_adapters_registered", 5),
        ("lorry_versions_resident|tier=host", 2),
        ("lorry_versions_resident|tier=slot", 0),
        ("lorry_leases", 3),
        ("lorry_tickets", 4),
        ("lorry_loads_total", 6),
        ("lorry_load_failures_total", 1),
        ("lorry_load_seconds|quantile=0.5", 0.2),
        ("lorry_load_seconds|quantile=1", 0.3),
        ("lorry_hits_total|tier=host", 10),
        ("lorry_misses_total|tier=host", 6),
        ("lorry_misses_total|tier=slot", 7),
        ("lorry_evictions_total|reason=room", 3),
        ("lorry_refusals_total|code=queue_full", 9),
        ("lorry_engine_up|replica=engine", 1),
        ("lorry_host_cache_bytes|replica=engine", 100),
        ("lorry_engine_events_total|event=slot_loads", 7),
    ],
)
def test_our_own_metrics(key: str, value: float) -> None:
    assert samples(Telemetry("tiny"))[key] == value


def test_no_loads_give_no_quantiles() -> None:
    found = samples(Telemetry("tiny"), replace(FACTS, load_seconds=()))
    assert not any(key.startswith("lorry_load_seconds") for key in found)


def test_only_good_ends_count_as_success() -> None:
    telemetry = Telemetry("tiny")
    for reason in ("stop", None):
        watch = telemetry.watch(None, 5)
        watch.tokens(1)
        watch.tokens(2)
        if reason:
            watch.finished(reason)
        watch.close()
    telemetry.watch(None, 5).close()
    found = samples(telemetry)
    assert found["vllm:request_success_total|finished_reason=stop|model_name=tiny"] == 1
    assert found["vllm:prompt_tokens_total|model_name=tiny"] == 10
    assert found["vllm:generation_tokens_total|model_name=tiny"] == 6
    assert found["vllm:time_to_first_token_seconds_count|model_name=tiny"] == 2
    assert found["vllm:e2e_request_latency_seconds_count|model_name=tiny"] == 1


def test_unregistered_adapters_leave_no_metric() -> None:
    telemetry = Telemetry("tiny")
    watch = telemetry.watch(AdapterName("gone"), 5)
    watch.tokens(1)
    assert not any("gone" in key for key in samples(telemetry))
    watch.tokens(1)
    assert not any("gone" in key for key in samples(telemetry))


def test_two_servers_share_nothing() -> None:
    first, second = Telemetry("one"), Telemetry("two")
    first.watch(None, 5).tokens(1)
    assert samples(second)["vllm:prompt_tokens_total|model_name=two"] == 0


def change(**more: Any) -> ChangeEvent:
    known = {"sequence": 1, "at_s": 0.0, "kind": "replaced", "name": "pirate", "version": "a" * 64}
    return ChangeEvent(**known | {"text": ""} | more)


def test_a_change_is_one_readable_line() -> None:
    assert change_line(change(text="the old one drains")) == (
        "replaced pirate aaaaaaaaaaaa: the old one drains"
    )
    assert change_line(change(version=None)) == "replaced pirate"
    lost = change(kind="engine_lost", name=None, version=None, text="killed\nby\r9")
    assert change_line(lost) == "engine_lost: killed by 9"
    assert change_line(change(version=VersionId("b" * 64))).endswith("b" * 12)
