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
from torch.nn.functional import pad

from lorry.engine import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5
"""A lower temperature would overflow; it is greedy in all but name."""

CANDIDATES = (64, 1024)
"""Rows with top_k or top_p are judged on so many of their best tokens first: sorting a vocabulary
of 49,152 takes 5 ms per row, its best 64 a twentieth of one."""

BLOCK = 64
"""Passes that look for one place in a row look for its block first: sums and maxima of blocks are
vectorised, a search for an index is not (measured: 0.5 ms instead of 2.8 ms for 32 rows)."""


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
    best, tokens = (one[:, 0] for one in _top(edited, 1))
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if drawn:
        tokens[drawn] = _draw(_select(edited, drawn), best[drawn], [rows[i] for i in drawn])
    chosen: list[int] = tokens.tolist()
    finite: list[bool] = best.isfinite().tolist()
    asked = {i: (chosen[i], row.params.logprobs) for i, row in enumerate(rows)}
    found = score(logits, {i: (t, top) for i, (t, top) in asked.items() if top is not None})
    return [Choice(chosen[i], finite[i], found.get(i)) for i in range(len(rows))]


def score(logits: Tensor, wanted: Mapping[int, tuple[int, int]]) -> dict[int, TokenLogprobs]:
    """Logprobs of rows of `logits` [rows, vocab]: row -> (token, number of alternatives)."""
    if not wanted:
        return {}
    rows = list(wanted)
    picked = _select(logits, rows)
    total = picked.logsumexp(dim=-1, keepdim=True)
    tokens = torch.tensor([wanted[row][0] for row in rows], device=logits.device)
    own: list[float] = (picked.gather(1, tokens[:, None]) - total)[:, 0].tolist()
    most = min(max(top for _, top in wanted.values()), logits.shape[-1])
    best, places = _top(picked, most)
    values: list[list[float]] = (best - total).tolist()
    ids: list[list[int]] = places.tolist()
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


def _draw(logits: Tensor, best: Tensor, rows: Sequence[Row]) -> Tensor:
    """[rows] tokens by chance; `logits` [rows, vocab], whose greatest are `best` [rows]."""
    device, vocab = logits.device, logits.shape[-1]
    temperatures = torch.tensor([row.params.temperature for row in rows], device=device)
    # Chances need no common denominator: they are picked by their share of the sum.
    chances = logits.sub(best[:, None]).div_(temperatures[:, None]).exp_()
    min_p = torch.tensor([row.params.min_p for row in rows], device=device)[:, None]
    if min_p.any():
        chances.masked_fill_(chances < min_p, 0.0)
    numbers = torch.tensor([uniform(row.seed, row.index) for row in rows], device=device)
    tokens = torch.zeros(len(rows), dtype=torch.long, device=device)
    narrow = [i for i, r in enumerate(rows) if r.params.top_p < 1 or 0 < r.params.top_k < vocab]
    wide = sorted(set(range(len(rows))) - set(narrow))
    if wide:
        tokens[wide] = _pick(_select(chances, wide), numbers[wide])
    for width in (*CANDIDATES, vocab):
        if narrow:
            picked, enough = _pick_narrow(
                *(_select(chances, narrow), numbers[narrow]),
                *([rows[i].params for i in narrow], min(width, vocab)),
            )
            tokens[narrow] = picked
            narrow = [i for i, settled in zip(narrow, enough, strict=True) if not settled]
    return tokens


def _pick_narrow(
    chances: Tensor, numbers: Tensor, params: Sequence[SamplingParams], width: int
) -> tuple[Tensor, list[bool]]:
    """Pick by top_k and top_p among the best `width`; and for which rows those were enough."""
    device, vocab = chances.device, chances.shape[-1]
    best, ids = _top(chances, width)
    top_k = torch.tensor([p.top_k if p.top_k > 0 else vocab for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], device=device)
    best = best.where(torch.arange(width, device=device) < top_k[:, None], 0.0)
    limited = top_k <= width
    mass = torch.where(limited, best.sum(dim=-1), chances.sum(dim=-1))
    sums = best.cumsum(dim=-1)
    enough = limited | ((top_k >= vocab) & (sums[:, -1] >= top_p * mass)) | (width == vocab)
    best = best.where(sums - best < (top_p * mass)[:, None], 0.0)
    settled: list[bool] = enough.tolist()
    return ids.gather(1, _pick(best, numbers)[:, None])[:, 0], settled


def _pick(chances: Tensor, numbers: Tensor) -> Tensor:
    """[rows] first index where the sum of `chances` [rows, n] passes `numbers` [rows] of all."""
    blocks = _in_blocks(chances, 0.0)
    sums = blocks.sum(dim=-1).cumsum(dim=-1)
    block = _first_above(sums, numbers * sums[:, -1])
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inner = blocks[torch.arange(len(block), device=block.device), block].cumsum(dim=-1)
    place = block * BLOCK + _first_above(inner, numbers * sums[:, -1] - before)
    return place.clamp_(max=chances.shape[-1] - 1)


def _first_above(sums: Tensor, aim: Tensor) -> Tensor:
    """[rows] first index where rising `sums` [rows, n] pass `aim` [rows], if need be the last."""
    total = sums[:, -1]
    aim = torch.minimum(aim, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(sums, aim[:, None], right=True)[:, 0]
    return found.clamp_(max=sums.shape[-1] - 1)


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Like `topk` along the last dimension of [rows, n]: the best blocks hold the best of all."""
    rows, width = values.shape
    if not 0 < count * BLOCK * 4 < width:
        found = values.topk(count, dim=-1)
        return found.values, found.indices
    blocks = _in_blocks(values, -torch.inf)
    chosen = blocks.amax(dim=-1).topk(count, dim=-1).indices
    some = blocks.gather(1, chosen[:, :, None].expand(-1, -1, BLOCK)).view(rows, -1)
    best, places = some.topk(count, dim=-1)
    return best, chosen.gather(1, places // BLOCK) * BLOCK + places % BLOCK


def _in_blocks(values: Tensor, filler: float) -> Tensor:
    """[rows, n] as [rows, blocks, BLOCK]; copied only when the last block has to be filled up."""
    missing = -values.shape[-1] % BLOCK
    filled = pad(values, (0, missing), value=filler) if missing else values
    return filled.view(len(values), -1, BLOCK)


def _select(values: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows, in this order; `values` itself when they are all."""
    return values if list(rows) == list(range(len(values))) else values[list(rows)]
