"""Which keys a mask_mod leaves each block of query rows, of those that a launch may have."""

import jax.numpy as jnp

from pallas_attn._tile.walk import Seen
from pallas_attn.mods.operands import has_mask
from pallas_attn.mods.seen import seen
from pallas_attn.ops.ragged_attention.operands import Operands
from pallas_attn.ops.ragged_attention.problem import Problem


def of_blocks(problem: Problem, operands: Operands) -> Seen | None:
    """By `Ragged.first_place`: programs find their block's without a sum over sequences. None without a mask."""
    if not has_mask(operands.mods) or operands.mods is None:
        return None
    ragged, rows, group = problem.ragged, problem.rows, problem.group
    num_seqs = ragged.num_of(operands.cu_q_lens, operands.num_seqs)
    index = jnp.arange(ragged.num_seqs + 2)
    bounds = ragged.bound(index, operands.cu_q_lens[jnp.minimum(index, ragged.num_seqs)], num_seqs)
    first_place = ragged.first_place(index, bounds, rows)[:-1]
    place = jnp.arange(ragged.places(rows))
    seq = jnp.searchsorted(first_place, place, side="right") - 1
    first_row = (place - first_place[seq]) * rows
    q_len = bounds[seq + 1] - bounds[seq]
    inside = jnp.minimum(seq, ragged.num_seqs - 1)
    lengths = jnp.where(seq < num_seqs, jnp.clip(operands.seq_lens[inside], 0, problem.max_len), 0)
    first = lengths - q_len + first_row // group
    last = lengths - q_len + jnp.minimum((first_row + rows - 1) // group, q_len - 1)
    return seen(operands.mods, inside, (first, jnp.maximum(first, last)), lengths, problem.max_len)
