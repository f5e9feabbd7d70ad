"""`PagedKVCache`: the cache of a whole model as one pytree."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from pallas_attn._call.checks import ArgumentChecker, fail
from pallas_attn._tile.layout import LAYOUTS, PoolShape, array_shape, packing, pool_shape
from pallas_attn._tile.masking import usable_pages
from pallas_attn._tile.quantization import QUANTIZED_DTYPES, is_quantized, largest
from pallas_attn._types import BlockTables, KVCache, Layout, SeqLens
from pallas_attn.ops.kv_cache.api import DTYPES, write_kv
from pallas_attn.ops.kv_cache.copying import copy_pages


def layer_tables(block_tables: jax.Array, num_pages: int, layer: int | jax.Array) -> jax.Array:
    """Block tables of one layer in a pool that holds `num_pages` pages for each layer; -1 where out of range."""
    return jnp.where(usable_pages(block_tables, num_pages), block_tables + layer * num_pages, -1)


def every_layer(
    source_pages: jax.Array, target_pages: jax.Array, num_pages: int, num_layers: int
) -> tuple[jax.Array, ...]:
    """The same pages of all layers, [num_layers * num_copies]; -1 where out of range."""
    layers = jnp.arange(num_layers, dtype=jnp.int32)[:, None]
    return tuple(
        layer_tables(jnp.asarray(pages), num_pages, layers).reshape(-1)
        for pages in (source_pages, target_pages)
    )


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

    A pytree, for jit, scan and jax.export alike.

    Fields:
        key_cache, value_cache: pools of num_layers * num_pages pages, in `layout`.
        block_tables: [num_seqs, max_pages] int32, ids in [0, num_pages).
        seq_lens: [num_seqs] int32, tokens each sequence holds.
        k_scale, v_scale: [num_layers, num_kv_heads] float32 for a quantised dtype (value = stored * scale), else None.
    """

    # A pytree's leaves may be anything a transformation puts there (shapes, shardings), hence `| Any`.
    key_cache: KVCache | Any
    value_cache: KVCache | Any
    block_tables: BlockTables | Any
    seq_lens: SeqLens | Any
    num_layers: int = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(default="NHD", metadata={"static": True})
    k_scale: jax.Array | Any = None
    v_scale: jax.Array | Any = None

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
        """An empty cache with `num_pages` pages of `page_size` tokens for each layer.

        dtype: bf16, fp16, float32, or quantised float8_e4m3fn, float8_e5m2, int8, whose scales start at 1.
        """
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
            check.count(name, size)
        check.one_of("dtype", jnp.dtype(dtype), [jnp.dtype(d) for d in (*DTYPES, *QUANTIZED_DTYPES)])
        if layout == "PACKED" and head_dim % (x := packing(dtype)):
            fail(check.function, "head_dim", f"a multiple of x={x} for 'PACKED'", str(head_dim))
        check.array("block_tables", block_tables, ("num_seqs", "max_pages"), [jnp.int32])
        if seq_lens is None:
            seq_lens = jnp.zeros(block_tables.shape[:1], jnp.int32)
        check.array("seq_lens", seq_lens, ("num_seqs",), [jnp.int32])
        # Copies: donating the cache must not take the caller's arrays.
        block_tables, seq_lens = jnp.array(block_tables), jnp.array(seq_lens)
        pool = PoolShape(num_layers * num_pages, page_size, num_kv_heads, head_dim)
        key_cache, value_cache = (
            jnp.zeros(array_shape(pool, layout, w, dtype), dtype) for w in ("key", "value")
        )
        scales = (None, None)
        if is_quantized(dtype):  # two buffers: one could not be donated twice
            scales = tuple(jnp.ones((num_layers, num_kv_heads), jnp.float32) for _ in range(2))
        return cls(key_cache, value_cache, block_tables, seq_lens, num_layers, layout, *scales)

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
        check = ArgumentChecker("PagedKVCache.slots")
        check.array("positions", positions, (self.block_tables.shape[0], "n"), [jnp.int32])
        return token_slots(self.layer_tables(layer), self.page_size, positions)

    def scales(self, layer: int | jax.Array) -> dict[str, Any]:
        """One layer's k_scale and v_scale [num_kv_heads], as keywords of `paged_attention`; {} without them."""
        if self.k_scale is None:
            return {}
        return {"k_scale": self.k_scale[layer], "v_scale": self.v_scale[layer]}

    def calibrate(
        self,
        layer: int | jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
        *,
        margin: float = 1.5,
    ) -> "PagedKVCache":
        """Sets a layer's scales so that the largest of these keys and values, times `margin`, is the format's largest.

        For an empty cache: while a sequence holds tokens (`seq_lens` above 0) nothing changes, since their meaning
        would. Shapes as in `write`; tokens at negative positions do not count. Without quantisation nothing changes.
        `margin`: a number above 0; later values beyond it saturate.
        """
        ArgumentChecker("PagedKVCache.calibrate").positive_float("margin", margin)
        if self.k_scale is None:
            return self
        real = (positions >= 0)[:, :, None, None]
        holds_tokens = jnp.any(self.seq_lens > 0)

        def fit(scales: jax.Array, new: jax.Array) -> jax.Array:
            peak = jnp.max(jnp.where(real, jnp.abs(new.astype(jnp.float32)), 0.0), axis=(0, 1, 3))
            fitted = jnp.where(peak > 0, peak * (margin / largest(self.key_cache.dtype)), 1.0)
            return scales.at[layer].set(jnp.where(holds_tokens, scales[layer], fitted))

        return self.replace(k_scale=fit(self.k_scale, key), v_scale=fit(self.v_scale, value))

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
            **self.scales(layer),
        )
        return self.replace(key_cache=key_cache, value_cache=value_cache)

    def copy_pages(self, source_pages: jax.Array, target_pages: jax.Array) -> "PagedKVCache":
        """Copies pages [num_copies] int32, ids in [0, num_pages), onto others, in every layer; see `copy_pages`."""
        places = every_layer(source_pages, target_pages, self.num_pages, self.num_layers)
        return self.replace(
            key_cache=copy_pages(self.key_cache, *places), value_cache=copy_pages(self.value_cache, *places)
        )

    def replace(self, **changes: Any) -> "PagedKVCache":
        return dataclasses.replace(self, **changes)


def exportable(cache_type: type) -> None:
    """Lets a cache be an argument of an exported function: its static fields travel as JSON."""
    export.register_pytree_node_serialization(
        cache_type,
        serialized_name=f"pallas_attn.{cache_type.__name__}",
        serialize_auxdata=lambda static: json.dumps(list(static)).encode(),
        deserialize_auxdata=lambda data: tuple(json.loads(data)),
    )


exportable(PagedKVCache)
