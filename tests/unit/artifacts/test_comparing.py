"""Two adapters side by side: norms are those of the change that a module makes."""

from pathlib import Path

import numpy as np
import pytest

from lorry.artifacts.comparing import Difference, ModuleDifference, Side, compare
from lorry.errors import AdapterInvalid, SourceNotFound
from tests.fixtures.adapters import AdapterFiles, good_adapter, key, module_names, tensor

MODULE = module_names()[0]


def small(
    a: list[list[float]], b: list[list[float]], dtype: str = "F32", **config: object
) -> AdapterFiles:
    """One module with these factors."""
    given = {"r": len(a), "lora_alpha": len(a), "target_modules": ["q_proj"], **config}
    files = AdapterFiles({"peft_type": "LORA", "task_type": "CAUSAL_LM", **given})
    files.tensors[key(MODULE, "A")] = tensor(a, dtype)
    files.tensors[key(MODULE, "B")] = tensor(b, dtype)
    return files


def compared(folder: Path, a: AdapterFiles, b: AdapterFiles) -> Difference:
    return compare(Side("a", a.write(folder / "a")), Side("b", b.write(folder / "b")))


def only(found: Difference) -> ModuleDifference:
    (module,) = found.modules
    return module


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_norms_are_those_of_scale_times_b_times_a(tmp_path: Path, dtype: str) -> None:
    a1, b1 = [[1.0, 2.0, 0.0]], [[2.0], [0.5]]
    a2, b2 = [[1.0, 0.0, 1.0], [0.0, 4.0, 0.0]], [[1.0, 0.0], [0.0, 0.25]]
    one = small(a1, b1, dtype, lora_alpha=3)
    other = small(a2, b2, dtype, use_rslora=True, lora_alpha=4)
    d1 = 3.0 * np.array(b1) @ np.array(a1)
    d2 = 4 / np.sqrt(2) * np.array(b2) @ np.array(a2)
    module = only(compared(tmp_path, one, other))
    assert module.ranks == (1, 2)
    assert module.norms == pytest.approx((np.linalg.norm(d1), np.linalg.norm(d2)))
    assert module.difference == pytest.approx(np.linalg.norm(d1 - d2))


def test_a_tiny_difference_is_not_lost_in_rounding(tmp_path: Path) -> None:
    one = small([[1.0, 1.0]], [[1000.0], [1000.0]])
    other = small([[1.0, 1.0]], [[1000.0], [1000.0 + 2**-13]])
    module = only(compared(tmp_path, one, other))
    assert module.difference == pytest.approx(2**-13 * np.sqrt(2), rel=1e-3)


def test_the_same_adapter_is_the_same(tmp_path: Path) -> None:
    found = compared(tmp_path, good_adapter(1), good_adapter(1))
    assert found.same
    assert found.config == ()
    assert {module.difference for module in found.modules} == {0.0}


def test_another_scale_is_a_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, small([[3.0]], [[1.0]]), small([[3.0]], [[1.0]], lora_alpha=2))
    assert not found.same
    assert only(found).difference == pytest.approx(3.0)
    assert found.config == (("lora_alpha", 1, 2),)


def test_a_module_of_one_side_counts_whole(tmp_path: Path) -> None:
    one, other = good_adapter(1), good_adapter(1)
    for side in "AB":
        del other.tensors[key(MODULE, side)]
    found = compared(tmp_path, one, other)
    alone = next(module for module in found.modules if module.name == MODULE)
    assert alone.ranks == (4, None)
    assert alone.norms[1] is None
    assert alone.difference == alone.norms[0]


def test_adapters_of_two_bases_have_no_difference_in_numbers(tmp_path: Path) -> None:
    found = compared(tmp_path, small([[1.0]], [[1.0]]), small([[1.0, 2.0]], [[1.0]]))
    assert only(found).difference is None
    assert not found.same


def test_numbers_that_are_none_have_no_norm(tmp_path: Path) -> None:
    found = compared(tmp_path, small([[float("nan")]], [[1.0]]), small([[1.0]], [[1.0]]))
    assert only(found).norms == (None, pytest.approx(1.0))
    assert only(found).difference is None
    assert found.as_json()["a"]["norm"] is None


def test_lists_of_names_are_sets(tmp_path: Path) -> None:
    one = small([[1.0]], [[1.0]], target_modules=["a", "b"])
    other = small([[1.0]], [[1.0]], target_modules=["b", "a"])
    assert compared(tmp_path, one, other).config == ()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    good = Side("good", good_adapter(1).write(tmp_path / "good"))
    with pytest.raises(SourceNotFound, match="none"):
        compare(good, Side("none", tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterInvalid, match=r"adapter_config\.json is missing"):
        compare(Side("empty", tmp_path / "empty"), good)
    bad = small([[1.0]], [[1.0]], r="eight").write(tmp_path / "bad")
    with pytest.raises(AdapterInvalid, match="r is 'eight'"):
        compare(Side("bad", bad), good)
    cut = good_adapter(1).write(tmp_path / "cut")
    (cut / "adapter_model.safetensors").write_bytes(b"\x01")
    with pytest.raises(AdapterInvalid, match="the file was cut"):
        compare(good, Side("cut", cut))
