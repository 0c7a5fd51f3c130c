"""From logits to tokens, row by row as each request wants it.

Three rules:

1. Chance is a pure function of (seed, index of the output token): no generator has a state, so
   neither the other rows, nor a preemption, nor the device changes what a seed gives.
2. Reported log probabilities are the model's own: before temperature, penalties and filters.
3. Order of the filters, as in vLLM: penalties, bias, forbidden tokens, temperature, min_p, top_k,
   top_p; each works on what the one before has left.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorry.engine import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5
"""A lower temperature would overflow; it is greedy in all but name."""

CANDIDATES = 1024
"""Rows with top_k or top_p are first judged on their best tokens: sorting all costs far more."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one row of logits needs to know of its request."""

    params: SamplingParams
    seed: int
    index: int
    """How many output tokens come before this one."""
    counts: Mapping[int, int]
    """Output tokens so far by number of times."""
    prompt: Sequence[int]
    """For the repetition penalty."""
    forbidden: tuple[int, ...]
    """Never chosen here: ends, before min_tokens."""

    @property
    def greedy(self) -> bool:
        """Whether the best token is chosen."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def edits(self) -> bool:
        """Whether its logits are changed before anything is chosen."""
        p = self.params
        penalty = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
        return bool(penalty or p.logit_bias or self.forbidden)


@dataclass(frozen=True, slots=True)
class Choice:
    """The token of one row; no answer at all unless its logits were `finite` numbers."""

    token: int
    finite: bool
    logprobs: TokenLogprobs | None = None


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Choice]:
    """One token per row of `logits` [rows, vocab], which stays as it is."""
    edited = _edit(logits, rows)
    best, tokens = edited.max(dim=-1)
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if drawn:
        tokens[drawn] = _draw(edited[drawn], [rows[i] for i in drawn])
    chosen: list[int] = tokens.tolist()
    finite: list[bool] = best.isfinite().tolist()
    wanted = {
        i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None
    }
    found = score(logits, {i: (chosen[i], top) for i, top in wanted.items()})
    return [Choice(chosen[i], finite[i], found.get(i)) for i in range(len(rows))]


def score(logits: Tensor, wanted: Mapping[int, tuple[int, int]]) -> dict[int, TokenLogprobs]:
    """Logprobs of rows of `logits` [rows, vocab]: row -> (token, number of alternatives)."""
    if not wanted:
        return {}
    rows = list(wanted)
    logprobs = logits[rows].log_softmax(dim=-1)
    tokens = torch.tensor([wanted[row][0] for row in rows], device=logits.device)
    own: list[float] = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    most = min(max(top for _, top in wanted.values()), logits.shape[-1])
    best = logprobs.topk(most, dim=-1)
    values: list[list[float]] = best.values.tolist()
    ids: list[list[int]] = best.indices.tolist()
    return {
        row: TokenLogprobs(
            wanted[row][0],
            own[i],
            tuple(zip(ids[i][: wanted[row][1]], values[i][: wanted[row][1]], strict=True)),
        )
        for i, row in enumerate(rows)
    }


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1), evenly spread; 24 bits, so that float32 holds it exactly."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=3).digest()
    return int.from_bytes(digest, "little") / (1 << 24)


def _edit(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    edited = [i for i, row in enumerate(rows) if row.edits]
    if not edited:
        return logits
    result = logits.clone()
    for i in edited:
        _edit_row(result[i], rows[i])
    return result


def _edit_row(logits: Tensor, row: Row) -> None:
    """Penalties, bias and forbidden tokens, on `logits` [vocab] in place."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.counts}), device=logits.device)
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.counts and (params.presence_penalty or params.frequency_penalty):
        made = torch.tensor(list(row.counts), device=logits.device)
        times = torch.tensor(list(row.counts.values()), device=logits.device, dtype=logits.dtype)
        logits[made] -= params.presence_penalty + params.frequency_penalty * times
    if params.logit_bias:
        for token, bias in params.logit_bias:
            logits[token] += bias
    forbidden = [token for token in row.forbidden if 0 <= token < len(logits)]
    if forbidden:
        logits[forbidden] = -torch.inf


def _draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """[rows] tokens by chance; `logits` [rows, vocab]."""
    device, vocab = logits.device, logits.shape[-1]
    temperatures = torch.tensor([row.params.temperature for row in rows], device=device)
    chances = (logits / temperatures[:, None]).softmax(dim=-1)
    min_p = torch.tensor([row.params.min_p for row in rows], device=device)[:, None]
    if min_p.any():
        chances = chances.where(chances >= min_p * chances.amax(dim=-1, keepdim=True), 0.0)
    numbers = torch.tensor([uniform(row.seed, row.index) for row in rows], device=device)
    tokens = _pick(chances, numbers)
    narrow = [i for i, r in enumerate(rows) if r.params.top_p < 1 or 0 < r.params.top_k < vocab]
    for width in (min(CANDIDATES, vocab), vocab):
        if narrow:
            picked, enough = _pick_narrow(
                chances[narrow], numbers[narrow], [rows[i] for i in narrow], width
            )
            tokens[narrow] = picked
            narrow = [i for i, settled in zip(narrow, enough, strict=True) if not settled]
    return tokens


def _pick(chances: Tensor, numbers: Tensor) -> Tensor:
    """[rows] first index where the sum of `chances` [rows, n] passes `numbers` [rows] of all."""
    sums = chances.cumsum(dim=-1)
    total = sums[:, -1]
    aim = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(sums, aim[:, None], right=True)[:, 0]
    return found.clamp_(max=chances.shape[-1] - 1)


def _pick_narrow(
    chances: Tensor, numbers: Tensor, rows: Sequence[Row], width: int
) -> tuple[Tensor, list[bool]]:
    """Pick by top_k and top_p among the best `width`; and for which rows those were enough."""
    device, vocab = chances.device, chances.shape[-1]
    best, ids = chances.topk(width, dim=-1)
    top_k = torch.tensor(
        [r.params.top_k if r.params.top_k > 0 else vocab for r in rows], device=device
    )
    top_p = torch.tensor([row.params.top_p for row in rows], device=device)
    best = best.where(torch.arange(width, device=device) < top_k[:, None], 0.0)
    limited = top_k <= width
    mass = torch.where(limited, best.sum(dim=-1), chances.sum(dim=-1))
    sums = best.cumsum(dim=-1)
    enough = limited | ((top_k >= vocab) & (sums[:, -1] >= top_p * mass)) | (width == vocab)
    best = best.where(sums - best < (top_p * mass)[:, None], 0.0)
    settled: list[bool] = enough.tolist()
    return ids.gather(1, _pick(best, numbers)[:, None])[:, 0], settled
