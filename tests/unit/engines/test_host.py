"""Host memory is limited by count and bytes, loads under way included."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lorry.engine import LoraVersion
from lorry.engines.embedded.host import HostCache
from lorry.errors import EngineRejected
from lorry.ids import EngineId, VersionId


@dataclass(frozen=True)
class Packed:
    bytes: int


def lora(number: int, size: int = 10) -> LoraVersion:
    return LoraVersion(EngineId(number), VersionId(f"v{number}"), f"a{number}", Path("/"), size)


def test_promise_4_a_load_under_way_counts() -> None:
    cache: HostCache[Packed] = HostCache(2, 1000)
    cache.reserve(lora(1))
    cache.reserve(lora(2))
    with pytest.raises(EngineRejected, match="max_cpu_loras is 2"):
        cache.reserve(lora(3))
    cache.cancel(EngineId(2))
    cache.reserve(lora(3))
    assert cache.ids() == frozenset()


def test_promise_4_bytes_are_those_reserved_until_they_are_known() -> None:
    cache: HostCache[Packed] = HostCache(9, 100)
    cache.reserve(lora(1, 60))
    with pytest.raises(EngineRejected, match="60 of host_cache_bytes 100"):
        cache.reserve(lora(2, 50))
    cache.hold(lora(1, 60), Packed(40))
    assert cache.bytes == 40
    cache.reserve(lora(2, 60))


def test_promise_4_an_adapter_that_is_bigger_than_reserved_is_refused_and_not_held() -> None:
    cache: HostCache[Packed] = HostCache(9, 100)
    cache.reserve(lora(1, 60))
    with pytest.raises(EngineRejected, match="101 bytes"):
        cache.hold(lora(1, 60), Packed(101))
    assert cache.bytes == 0
    cache.reserve(lora(1, 60))


def test_an_id_is_held_once() -> None:
    cache: HostCache[Packed] = HostCache(9, 100)
    cache.reserve(lora(1))
    with pytest.raises(EngineRejected, match="in use"):
        cache.reserve(replace(lora(2), engine_id=EngineId(1)))
    cache.hold(lora(1), Packed(5))
    with pytest.raises(EngineRejected, match="in use"):
        cache.reserve(lora(1))
    assert cache.remove(EngineId(1)) is not None
    assert cache.remove(EngineId(1)) is None
