"""The kernels by themselves: right for every shape, the same bits for every batch and number of
threads."""

import math
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorry.engine import EngineCapabilities
from lorry.engines.embedded.build import build
from lorry.engines.embedded.kernels import Isa, Kernels, Panels, isas, open_kernels
from lorry.engines.embedded.settings import EmbeddedSettings
from lorry.errors import EngineRejected
from tests.fixtures.tiny_weights import write_model

every_isa = pytest.mark.parametrize("isa", isas(), ids=lambda one: one.name)
EPS = 1e-5


def times(
    kernels: Kernels,
    x: Tensor,
    panels: Panels,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`x` [rows, in], through its norm if there is one, times the panels."""
    out = torch.full((len(x), panels.outer + 1), math.nan)[:, :-1].contiguous()
    kernels.product(
        *(kernels.machine, x.data_ptr(), len(x), panels.inner, panels.outer),
        *(0 if norm is None else norm.data_ptr(), EPS, panels.data.data_ptr(), panels.bf16),
        *(0 if bias is None else bias.data_ptr(), out.data_ptr()),
    )
    return out


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_they_are_built_where_a_compiler_is() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, so PyTorch computes")
    assert [isa.name for isa in isas()][-1] == "portable"


@every_isa
@pytest.mark.parametrize("exact_in_bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("rows", "inner", "outer"),
    [(1, 1, 1), (1, 7, 33), (2, 64, 8), (5, 33, 65), (13, 48, 31), (32, 96, 160), (300, 20, 40)],
)
def test_a_product_is_that_of_float64(
    isa: Isa, rows: int, inner: int, outer: int, exact_in_bf16: bool
) -> None:
    kernels = Kernels(isa, 2)
    weight = random(outer, inner, seed=1)
    if exact_in_bf16:
        weight = weight.bfloat16().float()
    x, bias, norm = random(rows, inner), random(outer, seed=2), random(inner, seed=3)
    panels = kernels.pack(weight)
    # A single float32 may be a bfloat16 by chance; random ones of any number are not.
    assert panels.bf16 == exact_in_bf16
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    expected = (wide * scale * norm) @ weight.double().t() + bias
    torch.testing.assert_close(
        times(kernels, x, panels, norm, bias).double(), expected, rtol=1e-5, atol=1e-5
    )
    plain = times(kernels, x, panels).double()
    torch.testing.assert_close(plain, wide @ weight.double().t(), rtol=1e-5, atol=1e-5)


@every_isa
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(isa: Isa) -> None:
    x, weight = random(50, 96), random(70, 96, seed=1)
    results = []
    for threads in (1, 2, 5):
        kernels = Kernels(isa, threads)
        panels = kernels.pack(weight)
        results.append(times(kernels, x, panels))
        alone = torch.cat([times(kernels, x[i : i + 1], panels) for i in range(len(x))])
        results.append(alone)
    assert all(torch.equal(one, results[0]) for one in results)


@every_isa
def test_what_is_no_number_stays_in_its_row(isa: Isa) -> None:
    kernels = Kernels(isa, 2)
    x, weight, norm = random(9, 40), random(50, 40, seed=1), torch.ones(40)
    clean = times(kernels, x, kernels.pack(weight), norm)
    x[4, 3], x[6, 0] = math.nan, math.inf
    result = times(kernels, x, kernels.pack(weight), norm)
    assert not result[4].isfinite().any()
    assert not result[6].isfinite().all()
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(result[others], clean[others])


@every_isa
def test_many_jobs_on_more_threads_than_cores_all_end_and_are_right(isa: Isa) -> None:
    kernels = Kernels(isa, 7)
    x, weight = random(3, 16), random(300, 16, seed=1)
    panels = kernels.pack(weight)
    expected = times(kernels, x, panels)
    for _ in range(2000):
        assert torch.equal(times(kernels, x, panels), expected)


@every_isa
def test_the_threads_end_with_their_kernels(isa: Isa) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threads()
    kernels = Kernels(isa, 4)
    assert threads() == before + 3
    del kernels
    assert threads() == before


@every_isa
def test_other_python_threads_run_while_a_kernel_computes(
    isa: Isa,
) -> None:
    usual = sys.getswitchinterval()
    kernels = Kernels(isa, 1)
    x, panels = random(600, 512), kernels.pack(random(2000, 512, seed=1))
    done, turns = threading.Event(), 0

    def count() -> None:
        nonlocal turns
        while not done.wait(0.0005):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    sys.setswitchinterval(1000)  # so that nobody gets the lock unless this thread gives it up
    try:
        before = turns
        while turns < before + 3:  # or else this test's time ends
            times(kernels, x, panels)
    finally:
        sys.setswitchinterval(usual)
        done.set()
        thread.join()


def test_the_best_instruction_set_is_taken_and_pytorch_when_asked() -> None:
    assert open_kernels("torch", 1) is None
    best = open_kernels("auto", 1)
    assert (best.isa if best else None) == (isas()[0] if isas() else None)


def test_an_instruction_set_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(EngineRejected, match=r"--kernels is neon; .* have (avx|portable|none)"):
        open_kernels("neon", 1)


@pytest.mark.parametrize(
    ("dtype", "kernels", "expected"),
    [
        ("float32", "torch", "PyTorch in float32, 1 thread"),
        ("bfloat16", "auto", "PyTorch in bfloat16, 1 thread"),
        *(
            ("float32", isa.name, f"own kernels for {isa.name} in float32, 1 thread")
            for isa in isas()
        ),
    ],
)
def test_the_engine_says_what_computes(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, kernels: str, expected: str
) -> None:
    model = write_model(tmp_path_factory.mktemp("model"))
    settings = EmbeddedSettings(
        model, dtype, kernels=kernels, threads=1, kv_cache_bytes=1 << 20, max_model_len=16
    )
    found: EngineCapabilities = build(settings, lambda *_: None).capabilities
    assert found.computing == expected
