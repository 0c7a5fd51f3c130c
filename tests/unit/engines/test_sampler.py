"""Each row is sampled as its request wants it, whatever the other rows want."""

from collections import Counter
from typing import Any

import pytest
import torch

from lorry.engine import SamplingParams
from lorry.engines.embedded import sampler
from lorry.engines.embedded.sampler import Row, sample, score, uniform

VOCAB = 4000
"""More than the sampler's first look, so that both ways are taken."""


def row(
    seed: int = 1,
    index: int = 0,
    prompt: tuple[int, ...] = (),
    counts: dict[int, int] | None = None,
    forbidden: tuple[int, ...] = (),
    **params: Any,
) -> Row:
    return Row(SamplingParams(**params), seed, index, counts or {}, prompt, forbidden)


def logits(rows: int = 1, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * spread


def tokens(values: torch.Tensor, rows: list[Row]) -> list[int]:
    return [choice.token for choice in sample(values, rows)]


def draws(values: torch.Tensor, count: int = 400, **params: Any) -> Counter[int]:
    rows = [row(index=i, **params) for i in range(count)]
    return Counter(tokens(values.expand(count, -1), rows))


def test_greedy_is_the_best_token() -> None:
    values = logits(3)
    assert tokens(values, [row(temperature=0.0)] * 3) == values.argmax(-1).tolist()


def test_uniform_is_even_and_below_one() -> None:
    numbers = [uniform(9, i) for i in range(2000)]
    assert all(0 <= n < 1 for n in numbers)
    assert abs(sum(numbers) / 2000 - 0.5) < 0.03


def test_a_rows_token_does_not_depend_on_the_other_rows() -> None:
    values = logits(6)
    rows = [
        row(temperature=0.0),
        row(seed=2, temperature=0.7, top_p=0.9),
        row(seed=3, temperature=1.0, top_k=5),
        row(seed=4, temperature=1.3),
        row(seed=5, temperature=1.0, min_p=0.1, repetition_penalty=1.4, prompt=(1, 2, 3)),
        row(seed=6, temperature=5.0, top_p=0.99, top_k=3000),
    ]
    together = tokens(values, rows)
    assert together == [tokens(values[i : i + 1], [rows[i]])[0] for i in range(6)]
    assert together[::-1] == tokens(values.flip(0), rows[::-1])


def test_sampling_leaves_the_logits_alone() -> None:
    values = logits(1)
    before = values.clone()
    sample(values, [row(temperature=1.0, logit_bias=((3, 5.0),), forbidden=(7,), top_p=0.5)])
    assert torch.equal(values, before)


def test_frequencies_follow_the_probabilities() -> None:
    values = torch.full((1, VOCAB), -torch.inf)
    values[0, 10], values[0, 20], values[0, 3999] = 0.0, 1.0, 2.0
    found = draws(values, 2000, temperature=1.0)
    wanted = values[0].softmax(-1)
    assert set(found) == {10, 20, 3999}
    for token, times in found.items():
        assert times / 2000 == pytest.approx(float(wanted[token]), abs=0.04)


@pytest.mark.parametrize("top_k", [1, 3, 64, 65, 1024, 1500])
def test_top_k_keeps_the_best_k(top_k: int) -> None:
    values = logits(spread=0.1)
    allowed = set(values[0].topk(top_k).indices.tolist())
    assert set(draws(values, temperature=1.0, top_k=top_k)) <= allowed


@pytest.mark.parametrize("spread", [3.0, 0.1], ids=["peaked", "flat"])
def test_top_p_keeps_the_smallest_set_of_that_mass(spread: float) -> None:
    values = logits(spread=spread)
    order = values[0].softmax(-1).sort(descending=True)
    sums = order.values.cumsum(-1)
    allowed = set(order.indices[: int((sums < 0.6).sum()) + 1].tolist())
    found = set(draws(values, temperature=1.0, top_p=0.6))
    assert found <= allowed
    assert len(found) > 1


def test_top_p_works_on_what_top_k_left() -> None:
    values = torch.full((1, VOCAB), -torch.inf)
    values[0, :4] = torch.tensor([4.0, 3.9, 3.8, 3.7])
    # The best two have 0.525 and 0.475 of what is left, so half of it is the first alone.
    assert set(draws(values, temperature=1.0, top_k=2, top_p=0.5)) == {0}


def test_tiny_top_p_still_leaves_the_best_token() -> None:
    values = logits()
    assert set(draws(values, temperature=1.0, top_p=1e-9)) == {int(values.argmax())}


def test_min_p_keeps_what_is_near_the_best() -> None:
    values = torch.full((1, VOCAB), -10.0)
    values[0, 5], values[0, 6] = 3.0, 2.9
    assert set(draws(values, temperature=1.0, min_p=0.5)) == {5, 6}


def test_repetition_penalty_counts_prompt_and_output_both_signs() -> None:
    values = torch.full((1, VOCAB), -9.0)
    values[0, 1], values[0, 2], values[0, 3] = 3.0, 2.0, 1.9
    penal = row(temperature=0.0, repetition_penalty=2.0, prompt=(1,), counts={2: 1})
    assert tokens(values, [penal]) == [3]
    negative = torch.full((1, VOCAB), -9.0)
    negative[0, 1], negative[0, 2] = -1.0, -1.5
    assert tokens(negative, [row(temperature=0.0, repetition_penalty=2.0, prompt=(1,))]) == [2]


def test_presence_and_frequency_count_output_only() -> None:
    values = torch.zeros(1, VOCAB)
    values[0, 1], values[0, 2] = 2.0, 1.5
    assert tokens(values, [row(temperature=0.0, presence_penalty=1.0, prompt=(1,))]) == [1]
    assert tokens(values, [row(temperature=0.0, presence_penalty=1.0, counts={1: 1})]) == [2]
    thrice = {1: 3, 2: 1}
    assert tokens(values, [row(temperature=0.0, frequency_penalty=0.4, counts=thrice)]) == [2]
    assert tokens(values, [row(temperature=0.0, frequency_penalty=0.1, counts=thrice)]) == [1]


def test_bias_and_forbidden_tokens() -> None:
    values = logits()
    best = int(values.argmax())
    assert tokens(values, [row(temperature=0.0, logit_bias=((17, 100.0),))]) == [17]
    assert tokens(values, [row(temperature=0.0, forbidden=(best,))]) != [best]
    assert best not in draws(values, temperature=1.0, forbidden=(best,))
    assert tokens(values, [row(temperature=0.0, forbidden=(VOCAB, -1, 10**6))]) == [best]


def test_logprobs_are_the_models_own() -> None:
    values = logits()
    wanted = values[0].log_softmax(-1)
    (choice,) = sample(values, [row(temperature=0.0, logit_bias=((17, 100.0),), logprobs=3)])
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(float(wanted[17]))
    assert [t for t, _ in choice.logprobs.top] == wanted.topk(3).indices.tolist()


def test_score_gives_each_row_its_own_number_of_alternatives() -> None:
    values = logits(3)
    found = score(values, {0: (5, 0), 2: (6, 4)})
    assert {i: (f.token_id, len(f.top)) for i, f in found.items()} == {0: (5, 0), 2: (6, 4)}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_reported_and_spoil_no_other_row(
    bad: float, temperature: float
) -> None:
    values = logits(2)
    alone = tokens(values[1:], [row(temperature=temperature, top_p=0.9)])
    values[0, 100] = bad
    first, second = sample(values, [row(temperature=temperature, top_p=0.9)] * 2)
    assert not first.finite and second.finite
    assert 0 <= first.token < VOCAB
    assert [second.token] == alone


@pytest.mark.parametrize("width", [1, 63, 64, 500, VOCAB])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_the_best_are_found_by_blocks_as_without(width: int, count: int) -> None:
    values = logits(4)[:, :width]
    count = min(count, width)
    found, places = sampler._top(values, count)
    assert torch.equal(found, values.topk(count).values)
    assert torch.equal(values.gather(1, places), found)


def test_a_pick_never_has_no_chance() -> None:
    chances = torch.zeros(1, VOCAB)
    chances[0, [70, 71, 3990]] = torch.tensor([1e-30, 0.5, 1e-8])
    numbers = torch.tensor([0.0, 1e-9, 0.5, 1 - 2**-24, 1.0])
    picked = sampler._pick(chances.expand(5, -1), numbers)
    assert set(picked.tolist()) <= {70, 71, 3990}


def test_all_ways_of_looking_are_taken() -> None:
    assert sampler.CANDIDATES[0] * sampler.BLOCK * 4 > VOCAB > sampler.CANDIDATES[1]
    assert sampler.BLOCK * 4 < VOCAB
