"""`PagedKVCache`: the cache of a whole model as one pytree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._checks import ArgumentChecker, fail
from pallas_attn._masking import usable_pages
from pallas_attn._types import BlockTables, KVCache, Layout, SeqLens
from pallas_attn.ops.kv_cache.api import write_kv
from pallas_attn.ops.kv_cache.layout import LAYOUTS, PoolShape, array_shape, pool_shape


def layer_tables(block_tables: jax.Array, num_pages: int, layer: int | jax.Array) -> jax.Array:
    """Block tables of one layer in a pool that holds `num_pages` pages for each layer; -1 where out of range."""
    return jnp.where(usable_pages(block_tables, num_pages), block_tables + layer * num_pages, -1)


def token_slots(tables: jax.Array, page_size: int, positions: jax.Array) -> jax.Array:
    """Slots [num_seqs * n] of tokens at `positions` [num_seqs, n]; -1 where `tables` have no page for them."""
    column = positions // page_size
    held = (positions >= 0) & (column < tables.shape[1])
    pages = jnp.take_along_axis(tables, jnp.where(held, column, 0), axis=1)
    return jnp.where(held & (pages >= 0), pages * page_size + positions % page_size, -1).reshape(-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of all layers in one pair of pools, with the tables that say whose page is whose.

    Layer `l` owns pages [l * num_pages, (l + 1) * num_pages) of the pools, and every layer uses the same
    `block_tables`. One pool for all layers lets a scan over layers carry it in place: stacked per-layer pools
    would be sliced out and written back, a copy of the whole cache at every step.

    Fields:
        key_cache, value_cache: pools of num_layers * num_pages pages, in `layout`.
        block_tables: [num_seqs, max_pages] int32, ids in [0, num_pages).
        seq_lens: [num_seqs] int32, tokens each sequence holds.
    """

    # A pytree's leaves may be anything a transformation puts there (shapes, shardings), hence `| Any`.
    key_cache: KVCache | Any
    value_cache: KVCache | Any
    block_tables: BlockTables | Any
    seq_lens: SeqLens | Any
    num_layers: int = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(default="NHD", metadata={"static": True})

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        block_tables: BlockTables,
        seq_lens: SeqLens | None = None,
        dtype: Any = jnp.bfloat16,
        layout: Layout = "NHD",
    ) -> "PagedKVCache":
        """An empty cache with `num_pages` pages of `page_size` tokens for each layer."""
        check = ArgumentChecker("PagedKVCache.create")
        check.one_of("layout", layout, LAYOUTS)
        sizes = dict(
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        for name, size in sizes.items():
            if size < 1:
                fail(check.function, name, "at least 1", str(size))
        check.array("block_tables", block_tables, ("num_seqs", "max_pages"), [jnp.int32])
        if seq_lens is None:
            seq_lens = jnp.zeros(block_tables.shape[:1], jnp.int32)
        check.array("seq_lens", seq_lens, ("num_seqs",), [jnp.int32])
        pool = PoolShape(num_layers * num_pages, page_size, num_kv_heads, head_dim)
        key_cache, value_cache = (
            jnp.zeros(array_shape(pool, layout, w, dtype), dtype) for w in ("key", "value")
        )
        return cls(key_cache, value_cache, block_tables, seq_lens, num_layers, layout)

    @property
    def num_pages(self) -> int:
        """Pages of one layer."""
        return self.key_cache.shape[0] // self.num_layers

    @property
    def page_size(self) -> int:
        return pool_shape(self.value_cache, self.layout).page_size

    @property
    def max_seq_len(self) -> int:
        """Tokens that a row of the block tables can address."""
        return self.block_tables.shape[1] * self.page_size

    def layer_tables(self, layer: int | jax.Array) -> BlockTables:
        """The block tables as `paged_attention` wants them for one layer (`layer` may be traced).

        Ids outside [0, num_pages) become -1: shifted as they are, they would name another layer's page.
        """
        return layer_tables(self.block_tables, self.num_pages, layer)

    def slots(self, layer: int | jax.Array, positions: jax.Array) -> jax.Array:
        """Slots, in one layer's pages, of tokens at `positions` [num_seqs, n] int32 of each sequence.

        Returns [num_seqs * n] int32 for `write_kv`; -1 where a position is negative, beyond the table, or in a
        page that the table does not name.
        """
        return token_slots(self.layer_tables(layer), self.page_size, positions)

    def write(
        self,
        layer: int | jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
        *,
        implementation: str | None = None,
    ) -> "PagedKVCache":
        """Writes keys and values [num_seqs, n, num_kv_heads, head_dim] at `positions` [num_seqs, n]; in place
        under donation or in a loop's carry. Negative positions are skipped. `seq_lens` stays as it is."""
        flat = (-1, *key.shape[2:])
        key_cache, value_cache = write_kv(
            key.reshape(flat),
            value.reshape(flat),
            self.key_cache,
            self.value_cache,
            self.slots(layer, positions),
            layout=self.layout,
            implementation=implementation,
        )
        return self.replace(key_cache=key_cache, value_cache=value_cache)

    def replace(self, **changes: Any) -> "PagedKVCache":
        return dataclasses.replace(self, **changes)
