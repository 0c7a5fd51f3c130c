"""`lorry check`, without a server: each bad adapter names its cause and its fix, a good one its
facts."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lorry.artifacts.checking import problems_of
from lorry.cli import main
from lorry.cli.demo import ADAPTERS, DemoMissing, adapter_folder, model_file
from lorry.errors import AdapterInvalid, QueueFull
from tests.fixtures.bad_adapters import BAD, CONFIG, Tensors, pickled
from tests.fixtures.common_ground import (
    HIDDEN,
    LAYERS,
    MLP,
    PROJECTIONS,
    VOCAB,
    lora_config,
    tensor_name,
)
from tests.fixtures.remote import Files, LocalServer, make_authority


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The common ground's base model, as far as a check reads it: the whole needs torch."""
    folder = tmp_path_factory.mktemp("base")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A sound one of rank 8 on all seven projections."""
    folder = tmp_path / "legal"
    folder.mkdir()
    rng = np.random.default_rng(1)
    tensors: Tensors = {}
    for layer in range(LAYERS):
        for module, (inputs, outputs) in PROJECTIONS.items():
            for part, shape in (("lora_A", (8, inputs)), ("lora_B", (outputs, 8))):
                name = tensor_name(layer, module, part)
                tensors[name] = rng.normal(size=shape).astype(np.float32)
    (folder / CONFIG).write_text(json.dumps(lora_config()))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def check(path: Path | str, base: Path, *more: str) -> int:
    """The exit code of `lorry check`; the rank is limited to 16, as where the cases come from."""
    given = ["check", str(path), "--base", str(base), "--max-lora-rank", "16", *more]
    with pytest.raises(SystemExit) as caught:
        main(given)
    return int(caught.value.code or 0)


def test_a_sound_adapter_is_described(
    adapter: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(adapter, base) == 0
    said = capsys.readouterr().out
    for fact in ("can be served", "rank", "alpha/r", "q_proj", "0-1", "host bytes"):
        assert fact in said, fact
    assert check(adapter, base, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["problems"] == []
    assert found["rank"] == 8
    assert found["bytes"] > 0


@pytest.mark.parametrize("sort", BAD)
def test_promise_9_a_bad_adapter_names_its_cause_and_its_fix(
    sort: str, adapter: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = BAD[sort].spoil(adapter)
    assert check(path, base) == 1
    said = capsys.readouterr().out
    assert "refused: " in said
    assert any(word in said.lower() for word in BAD[sort].says), said
    assert check(path, base, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert "rank" not in found
    for problem in found["problems"]:
        assert problem["code"] in ("adapter_invalid", "source_not_found")
        assert problem["problem"].endswith("."), problem
        assert problem["fix"].endswith("."), problem
        assert not problem["fix"].startswith("Mend the adapter as each detail"), problem


def test_promise_9_a_pickle_is_not_opened(
    adapter: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    assert check(pickled(adapter, marker), base) == 1
    assert "pickle" in capsys.readouterr().out
    assert not marker.exists()


def test_every_problem_is_found_at_once(
    adapter: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / CONFIG).write_text(
        json.dumps(lora_config() | {"use_dora": True, "bias": "all", "r": 0})
    )
    assert check(adapter, base, "--json") == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    for key in ("use_dora", "bias", ": r is"):
        assert any(key in problem["problem"] for problem in problems), key


def test_of_many_problems_people_see_the_first_and_scripts_a_hundred(
    adapter: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {f"strange.{number}": np.ones((2, 2), np.float32) for number in range(150)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert check(adapter, base) == 1
    said = capsys.readouterr().out
    assert said.count("fix: ") == 20
    assert "--json lists them" in said
    assert check(adapter, base, "--json") == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert len(problems) == 101
    assert problems[-1]["problem"].startswith("... and ")


@pytest.mark.parametrize("spoil", ["missing", "empty", "other"])
def test_an_unusable_base_model_is_wrong_use(
    spoil: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / spoil
    if spoil != "missing":
        model.mkdir()
    if spoil == "other":
        (model / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    assert check(adapter, model) == 2
    said = capsys.readouterr().err
    assert ("GPT2LMHeadModel" if spoil == "other" else str(model)) in said


def test_without_a_base_model_a_server_is_asked_and_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "somewhere", "--url", "http://127.0.0.1:1"])
    assert caught.value.code == 3
    assert "--base" in capsys.readouterr().err


def test_the_demos_adapters_are_clean_on_the_demos_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        model = model_file()
    except DemoMissing:
        pytest.skip("the demo's model is not installed")
    for name in ADAPTERS:
        assert check(adapter_folder() / name, model) == 0, capsys.readouterr().out


def test_problems_without_a_semicolon_have_their_errors_advice() -> None:
    problem = problems_of(QueueFull("64 operations on 'a' are waiting already."))[0]
    assert problem.fix == QueueFull.action
    many = AdapterInvalid("two", details=["a is 1, expected 2; mend a.", "b is bad; mend b."])
    assert [each.fix for each in problems_of(many)] == ["Mend a.", "Mend b."]
    assert [each.text for each in problems_of(many)] == ["a is 1, expected 2.", "b is bad."]


def test_it_brings_no_torch(adapter: Path, base: Path) -> None:
    script = (
        "import sys\nfrom lorry.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    sys.exit(end.code or ('torch' in sys.modules))"
    )
    command = [sys.executable, "-c", script, "check", str(adapter), "--base", str(base)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_uri_is_fetched_judged_and_deleted(
    adapter: Path,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From an address of this machine: a person at a terminal may go where he likes."""
    authority = make_authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with LocalServer(Files(adapter.parent), authority.context) as server:
        uri = f"{server.url}/legal?sig=topsecret"
        assert check(uri, base, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["ok"], found["rank"]) == (True, 8)
        assert found["source"] == f"{server.url}/legal"
        (adapter / "adapter_model.safetensors").write_bytes(b"cut")
        assert check(uri, base) == 1
        assert check(f"{server.url}/nothing", base) == 1
        said = capsys.readouterr()
        assert "was cut" in said.out
        assert "no adapter at" in said.out
        assert "topsecret" not in said.out + said.err
        assert str(tmp_path / "tmp") not in said.out
    assert check(uri, base) == 1  # nothing listens there any more
    assert "Retry-After" not in capsys.readouterr().out
    assert not any((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("uri", ["ftp://host/x", "https://user:topsecret@host/x", "hf://acme"])
def test_what_is_no_uri_is_wrong_use(
    uri: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(uri, base) == 2
    said = capsys.readouterr().err
    assert "The adapter's source" in said
    assert "topsecret" not in said


def test_a_missing_extra_is_wrong_use_and_named(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check("gs://bucket/legal", base) == 2
    assert "pip install 'lorry[gs]'" in capsys.readouterr().err
