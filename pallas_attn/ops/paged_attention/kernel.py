"""Split-KV paged decode attention in Pallas.

One program serves `block_q` query heads of one KV head over one split of one sequence. It walks the split's tokens
in tiles of `block_kv`, looking each token's page up in the block table, and keeps an online softmax in float32.
A sequence in one split is written to the output at once; otherwise the program leaves a float32 partial result
(normalised, with its base-2 lse) for `combine.py`.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn import _masking, _pallas, _softmax
from pallas_attn.ops.kv_cache.layout import PoolShape, pool_shape, token_index
from pallas_attn.ops.paged_attention import combine, schedule
from pallas_attn.ops.paged_attention.config import PagedAttentionConfig


class Problem(NamedTuple):
    """What a kernel is compiled for: all of it static."""

    num_seqs: int
    num_heads: int
    max_pages: int
    pool: PoolShape
    layout: str
    scale: float
    config: PagedAttentionConfig

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.pool.num_kv_heads

    @property
    def q_blocks(self) -> int:
        """Programs that the query heads of one KV head are spread over."""
        return math.ceil(self.group / self.config.block_q)

    @property
    def max_len(self) -> int:
        return self.max_pages * self.pool.page_size

    def split_tokens(self, seq_len: jax.Array, seq_lens_ref) -> jax.Array:
        """Run-time size of a sequence's splits; both kernels come to the same."""
        if self.config.num_splits == 1:
            return jnp.int32(self.max_len)
        share = schedule.fair_share(
            schedule.load_lengths(seq_lens_ref, num_seqs=self.num_seqs, max_len=self.max_len),
            programs_per_token=self.pool.num_kv_heads * self.q_blocks,
            config=self.config,
        )
        return schedule.split_tokens(seq_len, share, config=self.config)


# jit, so that the layers of a model trace and lower one kernel, not one each.
@functools.partial(jax.jit, static_argnames=("scale", "layout", "config", "interpret"))
def paged_attention_pallas(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    *,
    scale: float,
    layout: str,
    config: PagedAttentionConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(out in query's dtype, lse float32)."""
    num_seqs, num_heads, head_dim = query.shape
    problem = Problem(
        num_seqs,
        num_heads,
        block_tables.shape[1],
        pool_shape(key_cache, layout),
        layout,
        scale,
        config,
    )
    outputs = [
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((num_seqs, num_heads), jnp.float32),
    ]
    if config.num_splits > 1:
        outputs += [
            jax.ShapeDtypeStruct((config.num_splits, num_seqs, num_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((config.num_splits, num_seqs, num_heads), jnp.float32),
        ]
    out, lse, *partial = _pallas.kernel_call(
        functools.partial(_attend_kernel, problem=problem),
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        name="pallas_attn_paged_attention",
        # Programs of neighbouring KV heads start together: in the NHD layout they read neighbouring bytes.
        grid=(problem.pool.num_kv_heads * problem.q_blocks, config.num_splits, num_seqs),
        out_shape=outputs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    if partial:
        out, lse = combine.combine_splits(out, lse, partial, seq_lens, problem=problem, interpret=interpret)
    return out, lse


def _attend_kernel(
    query_ref, key_ref, value_ref, tables_ref, lens_ref, out_ref, lse_ref, *partial_refs, problem: Problem
):
    head_block, split, seq = (_pallas.program_id(axis) for axis in range(3))
    kv_head = head_block // problem.q_blocks
    config, head_dim = problem.config, problem.pool.head_dim

    stored_len = _pallas.load(lens_ref.at[seq])
    seq_len = jnp.clip(stored_len, 0, problem.max_len)
    split_tokens = problem.split_tokens(seq_len, lens_ref)
    begin = split * split_tokens
    end = jnp.minimum(begin + split_tokens, seq_len)

    # Split 0 of an empty sequence has no tokens but still writes the output.
    @_pallas.when((begin < seq_len) | (split == 0))
    def _():
        row = jnp.arange(config.block_q) + (head_block % problem.q_blocks) * config.block_q
        head = kv_head * problem.group + row
        dim = jnp.arange(_pallas.next_power_of_2(head_dim))[None, :]
        real = (row < problem.group)[:, None] & (dim < head_dim)
        tile = jnp.zeros(real.shape, jnp.int32)
        q = _pallas.load(query_ref.at[seq + tile, head[:, None] + tile, dim + tile], mask=real, other=0.0)

        state, bad = _walk_tokens(q, key_ref, value_ref, tables_ref, seq, kv_head, begin, end, problem)
        out, lse2 = _softmax.finish(state)

        # A length or page id that cannot be right makes its sequence NaN rather than quietly wrong.
        bad |= stored_len != seq_len
        out, lse2 = _softmax.poison(out, bad), _softmax.poison(lse2, bad)
        row_is_real = row < problem.group

        def write_final():
            place = out_ref.at[seq + tile, head[:, None] + tile, dim + tile]
            _pallas.store(place, out.astype(out_ref.dtype), mask=real)
            _pallas.store(lse_ref.at[seq + 0 * row, head], _softmax.natural_lse(lse2), mask=row_is_real)

        if not partial_refs:
            write_final()
            return
        partial_out_ref, partial_lse_ref = partial_refs
        one_split = seq_len <= split_tokens
        _pallas.when(one_split)(write_final)

        @_pallas.when(~one_split)
        def _():
            place = partial_out_ref.at[split + tile, seq + tile, head[:, None] + tile, dim + tile]
            _pallas.store(place, out, mask=real)
            place = partial_lse_ref.at[split + 0 * row, seq + 0 * row, head]
            _pallas.store(place, lse2, mask=row_is_real)


def _walk_tokens(q, key_ref, value_ref, tables_ref, seq, kv_head, begin, end, problem: Problem):
    """Online softmax of queries [block_q, dims] over tokens [begin, end) of a sequence; also whether any token's
    page id was unusable."""
    pool, block_kv = problem.pool, problem.config.block_kv
    dim = jnp.arange(q.shape[1])[None, :]
    tile = jnp.zeros((block_kv, q.shape[1]), jnp.int32)
    scale2 = problem.scale * _softmax.LOG2_E

    def step(i, carry):
        state, bad = carry
        position = begin + i * block_kv + jnp.arange(block_kv)
        held = _masking.within(position, end)
        column = jnp.where(held, position // pool.page_size, 0)
        page = _pallas.load(tables_ref.at[seq + 0 * column, column], mask=held, other=0)
        usable = held & _masking.usable_pages(page, pool.num_pages)
        # Elements that no token owns are read as 0: a NaN there would survive a weight of 0.
        inside = usable[:, None] & (dim < pool.head_dim)
        offset = position % pool.page_size
        place = token_index(
            problem.layout,
            jnp.where(usable, page, 0)[:, None] + tile,
            offset[:, None] + tile,
            kv_head + tile,
            dim + tile,
        )
        keys = _pallas.load(key_ref.at[place], mask=inside, other=0.0)
        values = _pallas.load(value_ref.at[place], mask=inside, other=0.0)
        logits2 = _masking.apply(_pallas.dot(q, keys, trans_b=True) * scale2, usable[None, :])
        state, weights = _softmax.rescale(state, logits2)
        acc = state.acc + _pallas.dot(weights.astype(values.dtype), values)
        return state._replace(acc=acc), bad | (held & ~usable)

    num_tiles = (end - begin + block_kv - 1) // block_kv
    start = _softmax.start((q.shape[0],), q.shape[1]), jnp.zeros((block_kv,), jnp.bool_)
    state, bad = lax.fori_loop(0, num_tiles, step, start)
    return state, jnp.max(bad.astype(jnp.int32)) > 0
