"""Settings: precedence, ranges, and every mistake reported at once with its place."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from lorry.config import ConfigError, LoraModule, Settings, layers, load_settings
from lorry.config.fields import specs
from lorry.config.page import settings_page
from lorry.config.parse import size

GIVEN = {"model": "/models/smol"}


def mistakes(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, environ or {}, config_file)
    return [str(mistake) for mistake in caught.value.mistakes]


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "lorry.toml"
    file.write_text(text)
    return file


def test_the_model_alone_is_enough() -> None:
    settings = load_settings(GIVEN, {})
    assert settings.model == Path("/models/smol")
    assert settings.model_names == ("smol",)
    assert settings.max_cpu_loras >= settings.max_loras


def test_a_gguf_file_names_the_model_without_its_ending() -> None:
    assert load_settings({"model": "/models/Smol.Q4_1.gguf"}, {}).model_names == ("Smol.Q4_1",)


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, 'port = 1\nhost = "file"\nmax-loras = 3\n')
    environ = {"LORRY_PORT": "2", "LORRY_HOST": "variable"}
    settings = load_settings({**GIVEN, "port": "3"}, environ, file)
    assert (settings.port, settings.host, settings.max_loras) == (3, "variable", 3)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_settings(GIVEN, {"LORRY_PORT": ""}).port == 8000


def test_all_mistakes_are_reported_at_once_each_with_its_place(tmp_path: Path) -> None:
    file = written(tmp_path, 'max_lora_rank = 513\ndtype = "int3"\nmax_lora = 4\n')
    found = mistakes({"port": "x"}, {"LORRY_THREADS": "0"}, file)
    assert len(found) == 6
    for where in (
        "MODEL: is missing",
        "--port: must be a whole number from 0 to 65535, not 'x'",
        "LORRY_THREADS: must be from 1 to 1024, not 0",
        f"max_lora_rank in {file}: must be from 1 to 512, not 513",
        f"dtype in {file}: must be auto or bfloat16 or float32, not 'int3'",
        f"max_lora in {file}: is no setting; did you mean max_loras?",
    ):
        assert any(mistake.startswith(where) for mistake in found), where


def test_a_misspelt_variable_is_a_mistake_and_a_stranger_is_not() -> None:
    environ = {"LORRY_SERVICE_HOST": "10.0.0.1", "LORRY_URL": "http://x", "LORRY_MAX_LORA": "4"}
    assert mistakes(GIVEN, environ) == [
        "LORRY_MAX_LORA: is no setting; did you mean LORRY_MAX_LORAS?"
    ]


def test_the_port_that_kubernetes_sets_is_explained() -> None:
    (found,) = mistakes(GIVEN, {"LORRY_PORT": "tcp://10.0.0.1:8000"})
    assert "enableServiceLinks" in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("500MB", 500_000_000),
        ("8GiB", 8 * 1024**3),
        ("8g", 8 * 1024**3),
        ("1.5 KiB", 1536),
        (7, 7),
    ],
)
def test_sizes_are_read(text: object, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 Gibbon", "0", True, 1.5e300, None])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|byte"):
        size(text)


def test_adapters_come_as_pairs_json_tables_and_lists(tmp_path: Path) -> None:
    flags = {**GIVEN, "lora_modules": ["a=/x=y", '{"name": "b", "path": "/b"}']}
    assert load_settings(flags, {}).lora_modules == (LoraModule("a", "/x=y"), LoraModule("b", "/b"))
    file = written(tmp_path, 'lora_modules = ["a=/a", {name = "b", path = "/b"}]\n')
    assert load_settings(GIVEN, {}, file).lora_modules == (
        LoraModule("a", "/a"),
        LoraModule("b", "/b"),
    )
    environ = {"LORRY_LORA_MODULES": "a=/a, b=/b"}
    assert load_settings(GIVEN, environ).lora_modules == (
        LoraModule("a", "/a"),
        LoraModule("b", "/b"),
    )


@pytest.mark.parametrize(
    "module", ["a", "=x", "a=", "{", '{"name": "a"}', '{"name": 1, "path": 2}', "a/../b=/x"]
)
def test_what_is_no_adapter_is_refused(module: str) -> None:
    assert mistakes({**GIVEN, "lora_modules": [module]})[0].startswith("--lora-modules: ")


def test_sglangs_forms_are_a_path_a_pair_and_json(tmp_path: Path) -> None:
    given = ["/models/x", "a=/x=y", '{"lora_name": "b", "lora_path": "/b", "pinned": true}']
    assert load_settings({**GIVEN, "lora_paths": given}, {}).lora_paths == (
        LoraModule("/models/x", "/models/x"),
        LoraModule("a", "/x=y"),
        LoraModule("b", "/b", True),
    )
    file = written(tmp_path, 'lora_paths = [{lora_name = "b", lora_path = "/b"}]\n')
    assert load_settings(GIVEN, {}, file).lora_paths == (LoraModule("b", "/b", False),)


@pytest.mark.parametrize(
    "path",
    [
        *("", "=x", "a=", "{", '{"lora_name": "a"}', '{"name": "a", "path": "/x"}'),
        '{"lora_name": "a", "lora_path": "/x", "pinned": "yes"}',
    ],
)
def test_what_is_none_of_sglangs_forms_is_refused(path: str) -> None:
    assert mistakes({**GIVEN, "lora_paths": [path]})[0].startswith("--lora-paths: ")


def test_an_eviction_order_that_is_not_built_is_refused() -> None:
    assert mistakes({**GIVEN, "eviction": "fifo"}) == ["--eviction: must be lru, not 'fifo'"]


def test_adapters_of_both_lists_cannot_share_a_name() -> None:
    found = mistakes({**GIVEN, "lora_modules": ["a=/x"], "lora_paths": ["a=/y"]})
    assert found == ["--lora-paths: 'a' is already the name of the adapter from /x"]


def test_two_adapters_cannot_share_a_name_nor_take_the_base_models() -> None:
    found = mistakes({**GIVEN, "lora_modules": ["a=/x", "a=/y", "smol=/z"]})
    assert found == [
        "--lora-modules: 'a' is already the name of the adapter from /x",
        "--lora-modules: 'smol' is already the name of the base model",
    ]


def test_a_default_follows_the_setting_that_it_would_contradict() -> None:
    settings = load_settings({**GIVEN, "max_loras": "100", "max_queue": "5"}, {})
    assert (settings.max_cpu_loras, settings.max_queue_per_adapter) == (100, 5)


def test_every_layer_gets_its_part() -> None:
    flags = {"max_loras": "3", "load_timeout": "7", "request_timeout": "9", "api_key": "secret"}
    settings = load_settings({**GIVEN, **flags}, {})
    assert layers.embedded_settings(settings).max_loras == 3
    assert layers.embedded_settings(settings).max_cpu_loras == settings.max_cpu_loras
    assert layers.fleet_limits(settings).operation_ms == 7000
    assert layers.supervisor_settings(settings).load_timeout_s == 7
    assert layers.server_settings(settings).api_keys == ("secret",)


def test_slots_beyond_host_memory_are_a_contradiction() -> None:
    (found,) = mistakes({**GIVEN, "max_loras": "8", "max_cpu_loras": "4"})
    assert found.startswith("--max-cpu-loras: is 4, less than max_loras 8")


def test_a_database_url_needs_a_folder_for_the_disk_cache() -> None:
    url = "postgresql://db/lorry"
    assert "--disk-cache" in mistakes({**GIVEN, "state": url})[0]
    settings = load_settings({**GIVEN, "state": url, "disk_cache": "/cache"}, {})
    assert settings.state_url == url
    assert settings.disk_cache_folder == Path("/cache")


def test_a_state_folder_holds_registry_and_disk_cache() -> None:
    settings = load_settings({**GIVEN, "state": "/var/lorry"}, {})
    assert settings.state_url == "sqlite:////var/lorry/lorry.sqlite3"
    assert settings.disk_cache_folder == Path("/var/lorry/cache")


def test_limits_of_sources_reach_the_fetcher() -> None:
    flags = {
        "allow_source": ["https://*.example.com", "s3://bucket/loras"],
        "private_source": ["10.0.0.0/8", "minio.local"],
        "max_source_bytes": "1GiB",
        "load_timeout": "7",
    }
    policy = layers.source_policy(load_settings({**GIVEN, **flags}, {}))
    assert [rule.host for rule in policy.allowed or ()] == ["*.example.com", "bucket"]
    assert [place.host for place in policy.private] == ["", "minio.local"]
    assert (policy.source_bytes_max, policy.fetch_timeout_s) == (1 << 30, 7)
    assert load_settings({**GIVEN, "max_source_bytes": "20GiB"}, {}).download_bytes == 20 << 30


def test_roots_for_folders_alone_leave_no_remote_source() -> None:
    assert layers.source_policy(load_settings(GIVEN, {})).allowed is None
    rooted = {**GIVEN, "adapter_root": ["/adapters"]}
    assert layers.source_policy(load_settings(rooted, {})).allowed == ()
    both = load_settings({**rooted, "allow_source": ["hf://acme"]}, {})
    assert len(layers.source_policy(both).allowed or ()) == 1


@pytest.mark.parametrize(
    ("name", "wrong", "what"),
    [
        ("allow_source", "example.com", "must begin with one of hf://"),
        ("private_source", "10.0.0.0/40", "must be a host"),
        ("resolver", "s3://bucket/x", "must hold {name} once"),
        ("resolver", "s3://bucket/{name}/{name}", "must hold {name} once"),
        ("resolver", "s3://{name}/x", "must have {name} behind the host"),
        ("resolver", "ftp://host/{name}", "has the scheme ftp://"),
        ("resolver", "https://u:secret@host/{name}", "credentials come from the environment"),
        ("download_bytes", "1KiB", "less than max_source_bytes"),
        ("resolver_names", "0", "must be from 1"),
    ],
)
def test_a_wrong_source_setting_is_a_mistake(name: str, wrong: str, what: str) -> None:
    (found,) = mistakes({**GIVEN, name: wrong})
    assert what in found
    assert "secret" not in found


def test_places_that_other_settings_forbid_are_mistakes() -> None:
    flags = {
        "adapter_root": ["/adapters"],
        "adapter_dir": ["/adapters/live", "/other"],
        "resolver": ["/adapters/{name}", "s3://bucket/{name}"],
    }
    assert mistakes({**GIVEN, **flags}) == [
        "--resolver: s3://bucket/{name} is not among the allowed sources; add it to --allow-source",
        "--adapter-dir: /other lies outside every --adapter-root; add it there",
    ]
    load_settings({**GIVEN, **flags, "adapter_dir": "/adapters", "allow_source": "s3://bucket"}, {})


@pytest.mark.parametrize("text", ["max_loras = ", "\x00"])
def test_a_file_that_is_not_toml_is_a_mistake(tmp_path: Path, text: str) -> None:
    assert "is not TOML" in mistakes(GIVEN, {}, written(tmp_path, text))[0]


def test_a_file_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    assert "cannot be read" in mistakes(GIVEN, {}, tmp_path / "none.toml")[0]


def test_each_field_is_described_and_its_default_is_its_own_parsers_value() -> None:
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(Settings)
        if field.default not in (dataclasses.MISSING, None)
    }
    for spec in specs():
        assert spec.help.endswith("."), spec.name
        assert spec.panel
        if spec.name in defaults:
            assert spec.parse(defaults[spec.name]) == defaults[spec.name], spec.name


def test_the_settings_page_is_fresh() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == settings_page(), "run: python -m lorry.config"
