"""How sequences are cut into splits, decided at run time from the lengths, inside the kernels.

Every program gets about the same number of tokens, however the lengths are distributed: a long sequence has many
splits, a short one has one. The rule is evaluated by each program from all lengths (a few hundred bytes out of L2,
read while its own length is on the way), which is cheaper than a launch to precompute it.
"""

import jax
import jax.numpy as jnp

from pallas_attn import _pallas
from pallas_attn.ops.paged_attention.config import PagedAttentionConfig


def load_lengths(seq_lens_ref, *, num_seqs: int, max_len: int) -> jax.Array:
    """All lengths, padded to a power of two with 0 and clamped to what the block table can hold."""
    seqs = jnp.arange(_pallas.next_power_of_2(num_seqs))
    lengths = _pallas.load(seq_lens_ref.at[seqs], mask=seqs < num_seqs, other=0)
    return jnp.clip(lengths, 0, max_len)


def fair_share(lengths: jax.Array, *, programs_per_token: int, config: PagedAttentionConfig) -> jax.Array:
    """Tokens that each of the target's programs would get if sequences could be cut anywhere: float32 scalar.

    `programs_per_token` is how many programs (KV heads x query blocks) walk over each token. float32, because the
    tokens of a batch times its heads can pass 2**31.
    """
    share = jnp.sum(lengths.astype(jnp.float32)) * (programs_per_token / config.target_programs)
    return jnp.maximum(share, float(config.min_split_tokens))


def split_tokens(length: jax.Array, share: jax.Array, *, config: PagedAttentionConfig) -> jax.Array:
    """Tokens in each split of a sequence, a multiple of block_kv: as many equal splits as fair shares, rounded."""
    splits = jnp.floor(length.astype(jnp.float32) / share + 0.5).astype(jnp.int32)
    splits = jnp.clip(splits, 1, config.num_splits)
    return ceil_div(ceil_div(length, splits), config.block_kv) * config.block_kv


def ceil_div(a, b):
    return (a + (b - 1)) // b
