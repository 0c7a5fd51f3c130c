"""What every store must do. A test class inherits `StoreSuite` and says how to open one."""

import dataclasses
import threading
from collections.abc import Callable, Iterator

import pytest

from lorry.adapter_settings import AdapterSettings
from lorry.artifacts.snapshot import Manifest
from lorry.errors import StorageFailed
from lorry.ids import AdapterName, VersionId
from lorry.store.store import AdapterRecord, AuditEntry, Store


def version(number: int) -> VersionId:
    """A version like those of snapshots."""
    return VersionId(f"{number:064x}")


def manifest(number: int = 1) -> Manifest:
    """A manifest with every field filled."""
    return Manifest(
        version=version(number),
        rank=8,
        alpha=16.5,
        scale_rule="alpha/r",
        target_modules=("k_proj", "q_proj"),
        layers=(0, 3),
        parameters=1234,
        dtype="bfloat16",
        bytes=5000,
        host_bytes=9000,
        base_model="org/model",
        chat_template="{% for m in messages %}☃{% endfor %}",
    )


def record(name: str = "pirate", number: int = 1) -> AdapterRecord:
    """A record with every field filled."""
    return AdapterRecord(
        name=AdapterName(name),
        source="/adapters/pirate ☃",
        manifest=manifest(number),
        pinned=True,
        labels={"team": "sea", "ключ": ""},
        created_s=1.5,
        updated_s=2.25,
        previous=(version(7), version(6)),
        previous_sources={version(7): "/adapters/seven"},
    )


def entry(
    action: str = "register", name: str = "pirate", at_s: float = 1.0, number: int | None = 1
) -> AuditEntry:
    """An audit row."""
    known = None if number is None else version(number)
    return AuditEntry(at_s, action, AdapterName(name), known, "key-1", "because")


class StoreSuite:
    """Inherit, and give a fixture `make` that opens an empty store."""

    @pytest.fixture
    def make(self) -> Callable[[], Store]:
        """A function that opens an empty store."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, make: Callable[[], Store]) -> Iterator[Store]:
        """An empty store, closed at the end."""
        store = make()
        yield store
        store.close()

    def test_a_new_store_is_empty(self, store: Store) -> None:
        assert store.adapters() == ()
        assert store.audit() == ()
        assert store.manifest(version(1)) is None

    def test_every_field_comes_back(self, store: Store) -> None:
        store.put(record(), entry())
        assert store.adapters() == (record(),)
        assert store.audit() == (entry(),)
        assert store.manifest(version(1)) == manifest()

    def test_absent_values_come_back_absent(self, store: Store) -> None:
        bare = AdapterRecord(
            AdapterName("bare"),
            "",
            dataclasses.replace(manifest(), base_model=None, chat_template=None),
        )
        unknown = AuditEntry(2.0, "unload", AdapterName("bare"), None)
        store.put(bare, entry(name="bare"))
        store.remove(AdapterName("other"), dataclasses.replace(unknown, name=AdapterName("other")))
        assert store.adapters() == (bare,)
        assert store.audit()[0].version is None

    def test_adapters_come_by_name(self, store: Store) -> None:
        for name in ("b", "a", "C", "ä"):
            store.put(record(name), entry(name=name))
        assert [each.name for each in store.adapters()] == sorted(["b", "a", "C", "ä"])

    def test_put_overwrites(self, store: Store) -> None:
        store.put(record(), entry())
        second = dataclasses.replace(record(number=2), pinned=False, labels={}, updated_s=9.0)
        store.put(second, entry("replace", number=2))
        assert store.adapters() == (second,)
        assert store.manifest(version(1)) == manifest(1)

    def test_names_that_differ_in_case_are_two(self, store: Store) -> None:
        store.put(record("Pirate"), entry(name="Pirate"))
        store.put(record("pirate"), entry(name="pirate"))
        assert len(store.adapters()) == 2

    def test_two_names_may_share_a_version(self, store: Store) -> None:
        store.put(record("a"), entry(name="a"))
        store.put(record("b"), entry(name="b"))
        store.remove(AdapterName("a"), entry("unload", "a"))
        assert [each.name for each in store.adapters()] == ["b"]

    def test_promise_3_remove_forgets_the_name_and_keeps_the_manifest(self, store: Store) -> None:
        store.put(record(), entry())
        store.remove(AdapterName("pirate"), entry("unload", at_s=2.0))
        assert store.adapters() == ()
        assert store.manifest(version(1)) == manifest()
        assert [each.action for each in store.audit()] == ["unload", "register"]

    def test_removing_what_is_not_there_is_no_error(self, store: Store) -> None:
        store.remove(AdapterName("ghost"), entry("unload", "ghost"))
        assert [each.name for each in store.audit()] == ["ghost"]

    def test_at_most_eight_previous_versions_are_remembered(self, store: Store) -> None:
        many = tuple(version(number) for number in range(10, 30))
        store.put(dataclasses.replace(record(), previous=many), entry())
        assert store.adapters()[0].previous == many[:8]

    def test_the_audit_is_newest_first_limited_and_by_name(self, store: Store) -> None:
        for number in range(1, 7):
            name = "even" if number % 2 == 0 else "odd"
            store.put(record(name, number), entry("replace", name, 10.0 - number, number))
        assert [each.version for each in store.audit(2)] == [version(6), version(5)]
        even = store.audit(name=AdapterName("even"))
        assert [each.version for each in even] == [version(6), version(4), version(2)]
        assert store.audit(0) == ()
        assert store.audit(-1) == ()

    def test_names_may_hold_anything_a_name_may_hold(self, store: Store) -> None:
        names = ["a/b:c", "'; DROP TABLE adapters; --", "100%", "_", "海賊", "x" * 256]
        for name in names:
            store.put(record(name), entry(name=name))
        assert [each.name for each in store.adapters()] == sorted(names)

    @pytest.mark.parametrize(
        ("bad", "audit"),
        [
            (record(), entry("explode")),
            (record(), entry(name="other")),
            (record(""), entry(name="")),
            (record(), entry(at_s=float("nan"))),
            (dataclasses.replace(record(), previous=(VersionId("zz"),)), entry()),
            (
                dataclasses.replace(
                    record(), manifest=dataclasses.replace(manifest(), version=VersionId("x"))
                ),
                entry(),
            ),
            (
                dataclasses.replace(record(), manifest=dataclasses.replace(manifest(), rank=0)),
                entry(),
            ),
        ],
    )
    def test_promise_4_what_may_not_be_stored_changes_nothing(
        self, bad: AdapterRecord, audit: AuditEntry, store: Store
    ) -> None:
        store.put(record("kept", 3), entry(name="kept", number=3))
        with pytest.raises(StorageFailed, match="cannot be stored"):
            store.put(bad, audit)
        assert [each.name for each in store.adapters()] == ["kept"]
        assert len(store.audit()) == 1

    @pytest.mark.parametrize(
        "settings",
        [
            AdapterSettings(),
            AdapterSettings(
                system_prompt="Ahoy ☃\n",
                chat_template="{{ messages }}",
                defaults={"temperature": 0.25, "max_tokens": 3},
                maxima={"n": 2},
                stop=("zz", "\n"),
                owner="sea",
                idle_ttl_s=0.5,
            ),
        ],
    )
    def test_settings_come_back_as_they_were(self, settings: AdapterSettings, store: Store) -> None:
        store.put(dataclasses.replace(record(), settings=settings), entry("settings"))
        assert store.adapters()[0].settings == settings
        store.put(record(), entry("retire"))
        assert store.adapters()[0].settings == AdapterSettings()

    def test_a_record_is_not_changed_by_what_the_caller_does_later(self, store: Store) -> None:
        labels = {"a": "1"}
        store.put(dataclasses.replace(record(), labels=labels), entry())
        labels["a"] = "2"
        assert store.adapters()[0].labels == {"a": "1"}

    def test_many_threads_lose_nothing(self, store: Store) -> None:
        def work(number: int) -> None:
            for turn in range(5):
                name = f"a{number}"
                store.put(record(name, turn), entry(name=name, number=turn))
                assert store.manifest(version(turn)) is not None

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.adapters()) == 6
        assert len(store.audit(1000)) == 30

    def test_a_closed_store_says_so(self, store: Store) -> None:
        store.close()
        store.close()
        with pytest.raises(StorageFailed, match="closed"):
            store.adapters()
        with pytest.raises(StorageFailed, match="closed"):
            store.put(record(), entry())
