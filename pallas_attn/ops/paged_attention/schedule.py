"""How sequences are cut into splits, decided at run time from the lengths, inside the kernels.

Every program gets about the same number of tokens, however the lengths are distributed: a long sequence has many
splits, a short one has one. The rule is evaluated by each program from all lengths (a few hundred bytes out of L2,
read while its own length is on the way), which is cheaper than a launch to precompute it.
"""

import jax
import jax.numpy as jnp

from pallas_attn import _pallas
from pallas_attn.ops.paged_attention.config import MIN_SPLIT_TOKENS


def tokens_per_split(
    seq_lens: jax.Array, *, num_splits: int, block_kv: int, programs_per_token: int, target_programs: int
) -> jax.Array:
    """Tokens of a split, a multiple of block_kv: int32 scalar.

    `seq_lens` are clamped lengths (padding 0). `programs_per_token` is how many programs (KV heads x query blocks)
    walk over each token. The longest sequence must fit in `num_splits` splits.
    """
    fair = _ceil_div(jnp.sum(seq_lens) * programs_per_token, target_programs)
    needed = _ceil_div(jnp.max(seq_lens), num_splits)
    split = jnp.maximum(jnp.maximum(fair, needed), MIN_SPLIT_TOKENS)
    return _ceil_div(split, block_kv) * block_kv


def load_lengths(seq_lens_ref, *, num_seqs: int, max_len: int) -> jax.Array:
    """All lengths, padded to a power of two with 0 and clamped to what the block table can hold."""
    seqs = jnp.arange(_pallas.next_power_of_2(num_seqs))
    lengths = _pallas.load(seq_lens_ref.at[seqs], mask=seqs < num_seqs, other=0)
    return jnp.clip(lengths, 0, max_len)


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return (a + (b - 1)) // b
