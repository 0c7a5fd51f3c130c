"""What one step of the engine computes: plain lists, so that whoever plans a step needs no torch.

Sequences lie one after another in `token_ids`; prefill chunks and decode rows mix freely. Below,
three sequences, the first a chunk of three tokens whose first four were computed before, the others
decoding:

    token_ids     a a a b c        query_lens    3 1 1
    positions     4 5 6 9 2        context_lens  7 10 3
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over a mixed batch of at least one sequence."""

    token_ids: Sequence[int]
    """[tokens]"""
    positions: Sequence[int]
    """[tokens] Position of each token in its own sequence, rising by one within a sequence."""
    query_lens: Sequence[int]
    """[sequences] Tokens of each sequence in this step, at least one."""
    context_lens: Sequence[int]
    """[sequences] Tokens in the KV cache after this step: the last position plus one."""
    block_tables: Sequence[Sequence[int]]
    """[sequences][blocks] KV blocks in order, enough for `context_lens`; more are ignored. A block
    that this step writes belongs to one sequence only; blocks that are only read may be shared. The
    first write into a block of a table is at its first place (so a block never shows what its
    former owner left)."""
    slots: Sequence[int]
    """[sequences] LoRA slot, -1: the base model."""
    logit_rows: Sequence[int]
    """Indices into `token_ids` whose logits are wanted, in the order wanted; may be empty."""
