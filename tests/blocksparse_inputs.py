"""Cases of `blocksparse_attention` that tests are about, and inputs of them.

What a query sees is defined here token by token (`visible`), independently of the layout's builders.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from inputs import block_tables, in_pattern, token_places

from pallas_attn._tile.layout import from_nhd, to_nhd
from pallas_attn._tile.masking import LocalStride
from pallas_attn.ops.blocksparse_attention import BlockSparseConfig
from pallas_attn.testing.blocksparse import BlockSparseCase, random_blocks

SMALL_TILES = BlockSparseConfig(
    block_q=16,
    block_kv=16,
    decode_block_kv=16,
    dq_block_q=16,
    dq_block_kv=16,
    dkv_block_q=16,
    dkv_block_kv=16,
)
"""The smallest tiles of all kernels, for interpret mode."""


@dataclasses.dataclass
class BlockSparseInputs:
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    cu_q_lens: np.ndarray
    cu_k_lens: np.ndarray | None = None
    block_tables: np.ndarray | None = None
    seq_lens: np.ndarray | None = None

    def arguments(self) -> tuple[Any, ...]:
        return tuple(jnp.asarray(x) for x in (self.query, self.key, self.value))

    def lengths(self) -> dict[str, Any]:
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[3:]}
        return {name: jnp.asarray(x) for name, x in named.items() if x is not None}


def visible(case: BlockSparseCase, head: int, position: int) -> np.ndarray:
    """[k] bool for the tokens up to a query's own: which of them it sees, as documented."""
    token = np.arange(position + 1)
    pattern, block = case.pattern, token // case.block_size
    if pattern == "dense":
        return token >= 0
    if pattern == "window":
        window = case.block_size * 3 // 2
        first_query = position // case.q_block_size * case.q_block_size
        return (block + 1) * case.block_size > first_query - window + 1
    if isinstance(pattern, LocalStride):
        return in_pattern(pattern, case, token, position, head)
    return random_blocks(case)[head, position // case.q_block_size, block]


def make(case: BlockSparseCase, seed: int = 0) -> BlockSparseInputs:
    """N(0, 1); NaN where no sequence owns anything, values of 1e4 in tokens that no query sees."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    q_lens, k_lens = (np.array(lens) for lens in zip(*case.lens, strict=True))
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(lens)]).astype(np.int32) for lens in (q_lens, k_lens))
    query = np.full((cu_q[-1] + case.padding, case.num_heads, case.head_dim), np.nan, np.float32)
    query[: cu_q[-1]] = rng.standard_normal((cu_q[-1], *query.shape[1:]))
    rows = {}
    for which in ("key", "value"):
        rows[which] = rng.standard_normal((cu_k[-1], case.num_kv_heads, case.head_dim)).astype(np.float32)
    for seq, (q_len, k_len) in enumerate(case.lens):
        unseen = np.ones((case.num_kv_heads, k_len), bool)
        for position in range(max(k_len - q_len, 0), k_len):
            for head in range(case.num_heads):
                unseen[head // case.group, : position + 1] &= ~visible(case, head, position)
        rows["value"][cu_k[seq] : cu_k[seq + 1]][unseen.T] = 1e4
    if case.page_size is None:
        spare = np.full((case.padding, case.num_kv_heads, case.head_dim), np.nan, np.float32)
        key, value = (np.concatenate([rows[which], spare]).astype(dtype) for which in ("key", "value"))
        return BlockSparseInputs(query.astype(dtype), key, value, cu_q, cu_k)
    tables, num_pages = block_tables(rng, tuple(k_lens.tolist()), case.page_size, 2)
    pools = {}
    for which in ("key", "value"):
        pool = np.full((num_pages, case.page_size, case.num_kv_heads, case.head_dim), np.nan, np.float32)
        for seq, k_len in enumerate(k_lens):
            pool[token_places(tables[seq], int(k_len), case.page_size)] = rows[which][
                cu_k[seq] : cu_k[seq + 1]
            ]
        pools[which] = np.array(from_nhd(jnp.asarray(pool.astype(dtype)), case.cache_layout, which))
    lengths = {"block_tables": tables, "seq_lens": k_lens.astype(np.int32)}
    return BlockSparseInputs(query.astype(dtype), pools["key"], pools["value"], cu_q, **lengths)


def keys_and_values(
    case: BlockSparseCase, data: BlockSparseInputs, seq: int
) -> tuple[np.ndarray, np.ndarray]:
    """A sequence's [k_len, num_kv_heads, head_dim], float64, from the call's arrays."""
    k_len = case.lens[seq][1]
    if data.cu_k_lens is not None:
        first = data.cu_k_lens[seq]
        key, value = (x[first : first + k_len] for x in (data.key, data.value))
    else:
        assert data.block_tables is not None
        place = token_places(data.block_tables[seq], k_len, case.page_size or 1)
        pools = (
            np.asarray(to_nhd(jnp.asarray(getattr(data, w)), case.cache_layout, w)) for w in ("key", "value")
        )
        key, value = (pool[place] for pool in pools)
    return key.astype(np.float64), value.astype(np.float64)


PAIRED = (("block_q", 128), ("block_kv", 64), ("num_warps", 8), ("num_stages", 2), ("max_registers", 128))
STEP, SHARED = LocalStride(32, 2, 4, 1), LocalStride(32, 1, 3)
MIXED = ((100, 100), (1, 161), (0, 0), (1, 1), (33, 33), (1, 0), (1, 128))
TEST_CASES = [
    BlockSparseCase(MIXED, 4, 2, 64, STEP, padding=5),
    BlockSparseCase(MIXED, 4, 2, 64, STEP, page_size=16, padding=3),
    BlockSparseCase(((97, 97), (64, 64), (160, 160)), 4, 4, 64, 0.5, dtype="float16", config=(("heads_together", 2),)),
    BlockSparseCase(((40, 161), (3, 70), (96, 96)), 6, 2, 80, 0.4, 32, 16, dtype="float32"),
    BlockSparseCase(((1, 161), (1, 1), (1, 96), (1, 0)), 4, 1, 64, 0.5, config=(("num_splits", 3),)),
    BlockSparseCase(((129, 129), (1, 200)), 2, 1, 96, "window", 32, 16, page_size=8, cache_layout="HND"),
    BlockSparseCase(((150, 150),), 2, 2, 64, "dense", 64, 64, softcap=3.0, config=(("block_kv", 16), ("block_q", 32))),
    BlockSparseCase(
        MIXED, 4, 2, 64, LocalStride(32, 1, 3, -1, tp_rank=1), page_size=24, config=(("num_splits", 2),)
    ),
    BlockSparseCase(((530, 530), (40, 290)), 2, 1, 128, 0.5, 128, 128, config=PAIRED),
    BlockSparseCase(((70, 70), (1, 90)), 2, 1, 32, SHARED, dtype="float32", page_size=16, cache_layout="PACKED"),
]  # fmt: skip
