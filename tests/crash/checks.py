"""What has to be true of a server that was started again after a kill."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from lorry.ids import VersionId
from tests.crash.operations import Operation
from tests.crash.world import Facts, Oracle, World, digest_of
from tests.fixtures.http_server import BASE

GONE = "adapter_not_found"
DATABASE = "lorry.sqlite3"
EXPECTED = {"cache", "memory", DATABASE, *(f"{DATABASE}{end}" for end in (".lock", "-wal", "-shm"))}
"""Files of a server."""


async def agreement(world: World) -> list[str]:
    """Promises 1 and 3: every list says the same, answers come from the version that is registered,
    and who is not registered does not answer."""
    facts = await world.facts()
    found = list(_wrong_lists(facts, await _lists(world)))
    for name, fact in facts.items():
        answer = await world.answer(name)
        if answer != world.oracle.tokens(fact["version"]):
            found.append(f"'{name}' answers {answer}, not as its version {fact['version'][:12]}")
    if await world.answer(BASE) != world.oracle.tokens(None):
        found.append("the base model answers wrong")
    if "a" not in facts and (answer := await world.answer("a")) != GONE:
        found.append(f"'a' is not registered and answers {answer}")
    await world.settled()
    return found + await _engine(world)


async def _lists(world: World) -> dict[str, set[str]]:
    models = (await world.http.client.get("/v1/models")).json()["data"]
    return {"/v1/models": {card["id"] for card in models} - {BASE}}


def _wrong_lists(facts: Facts, lists: dict[str, set[str]]) -> Iterator[str]:
    for name, listed in lists.items():
        if listed != set(facts):
            yield f"{name} has {sorted(listed)}, the registry {sorted(facts)}"


async def _engine(world: World) -> list[str]:
    """The engine's own list, its pins and the metrics against what the API says."""
    http, found = world.http, []
    shapes = (await http.client.get("/v1/adapters")).json()["data"]
    said = {one["engine_id"] for shape in shapes for one in shape["residency"] if one["engine_id"]}
    held = set(await http.engine.list_loras())
    if said != held:
        found.append(f"the API says that engine ids {sorted(said)} are held, the engine {held}")
    pinned = {
        one["engine_id"]
        for shape in shapes
        for one in shape["residency"]
        if shape["pinned"] and one["engine_id"]
    }
    if http.engine._pinned != pinned:
        found.append(f"the engine pins {http.engine._pinned}, registered are {pinned}")
    text = (await http.client.get("/metrics")).text
    counted = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    if counted["lorry_adapters_registered"] != len(shapes):
        found.append(f"metrics count {counted['lorry_adapters_registered']}, not {len(shapes)}")
    statistics = http.service.supervisor.statistics()
    if statistics.operations or http.service.supervisor.cache.statistics().reserved_bytes:
        found.append("something is still under way or reserved")
    return found


def kept(found: Facts, before: Facts, after: Facts, *, answered: bool, lossy: bool) -> list[str]:
    """Promises 4 and 8: all that was acknowledged, and of what was interrupted all or nothing."""
    if found == after and (answered or found != before):
        return []
    if found == before and (not answered or lossy):
        return []
    wanted = [after] if answered and not lossy else [before, after]
    state = "was answered" if answered else "was not answered"
    return [
        f"it {state}, and there is {_shown(found)} instead of {' or '.join(map(_shown, wanted))}"
    ]


def _shown(facts: Facts) -> str:
    short: dict[str, Any] = {}
    for name, fact in facts.items():
        short[name] = {k: v[:8] if k == "version" else v for k, v in fact.items() if v}
    return str(short)


def on_disk(
    state: Path, oracle: Oracle, operation: Operation, facts: Facts, *, tidied: bool
) -> list[str]:
    """No rubbish, nothing missing, nothing torn: promises 3 and 8 for the disk. A snapshot that the
    registry never knew may stay: it is whole, and the cache's limit counts it. `tidied`: a start
    has tidied up, and nothing has happened since."""
    served = {fact["version"] for fact in facts.values()}
    wanted = served | {version for fact in facts.values() for version in fact["previous"]}
    known = {version for (version,) in _rows(state, "SELECT version FROM manifests")}
    there = {path.name: path for path in (state / "cache").iterdir()}
    found = []
    for name, path in sorted(there.items()):
        if len(name) != 64:
            found.append(f"cache/{name} was left")
        elif digest_of(path) != oracle.digests[VersionId(name)]:
            found.append(f"the snapshot {name[:12]} is not what it was")
        elif name in known - wanted and (tidied or not operation.keeps_files):
            found.append(f"the snapshot {name[:12]} is kept, and no name can come back to it")
    if not operation.may_fall_back:
        needed = served if operation.options.cache_bytes else wanted
        found += [f"the snapshot {name[:12]} is lost" for name in sorted(needed - there.keys())]
    files = {path.name for path in state.iterdir()} | {p.name for p in (state / "memory").iterdir()}
    return found + [f"{name} was left" for name in sorted(files - EXPECTED)]


def audit_rows(state: Path) -> int:
    """How many changes the registry has written down."""
    count: int = _rows(state, "SELECT count(*) FROM audit")[0][0]
    return count


def _rows(state: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(state / DATABASE)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()
