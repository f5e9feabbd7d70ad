"""`PagedKVCache`: the cache of a whole model as one pytree."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_attn._call import dispatch
from pallas_attn._call.checks import ArgumentChecker, fail
from pallas_attn._call.options import DTYPES
from pallas_attn._call.pools import (
    LAYOUTS,
    QUANTIZED_DTYPES,
    PoolShape,
    array_shape,
    is_quantized,
    packing,
    pool_shape,
)
from pallas_attn._tile.quantization import largest, magnitudes
from pallas_attn._types import (
    BlockTables,
    Dtype,
    FloatName,
    Fp8Name,
    Implementation,
    KVCache,
    Layout,
    SeqLens,
)
from pallas_attn.ops.kv_cache.addressing import check_layer, of_layer, token_slots
from pallas_attn.ops.kv_cache.api import write
from pallas_attn.ops.kv_cache.layers import Layers, exportable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVCache(Layers):
    """Keys and values of all layers in one pair of pools, with the tables that say whose page is whose.

    Layer `l` owns pages [l * num_pages, (l + 1) * num_pages) of the pools, and every layer uses the same
    `shared_tables`: `layer_tables(l)` are the block tables that ops want. One pool for all layers lets a scan over
    layers carry it in place: stacked per-layer pools would be sliced out and written back, a copy of the whole cache at
    every step.

    A pytree, for jit, scan and jax.export alike. Every method returns a new cache, whose pools are the old one's when
    it was donated or is a loop's carry.

    One path serves prompts, chunks of prompts and decoding: `write` the q_len newest tokens of every sequence at their
    positions, then `paged_attention` with a query [num_seqs, q_len, num_heads, head_dim] and the lengths after them. A
    sequence with fewer new tokens is padded on the left, with negative positions, where outputs mean nothing; one with
    none has length 0:

        >>> import jax.numpy as jnp
        >>> from pallas_attn import PagedKVCache, paged_attention
        >>> tables = jnp.array([[4, 2], [0, 3]], jnp.int32)
        >>> cache = PagedKVCache.create(num_layers=1, num_pages=5, page_size=4, num_kv_heads=2, head_dim=16,
        ...                             block_tables=tables)
        >>> def step(cache, q_len, new):  # `new` tokens of each sequence, at most q_len
        ...     new = jnp.array(new, jnp.int32)
        ...     lens = cache.seq_lens + new
        ...     column = jnp.arange(q_len) - q_len  # -q_len ... -1, aligned to the right
        ...     positions = jnp.where(column >= -new[:, None], lens[:, None] + column, -1)
        ...     query = jnp.ones((2, q_len, 4, 16), jnp.bfloat16)  # a model's, and its keys and values
        ...     cache = cache.write(0, query[:, :, :2], query[:, :, 2:], positions).replace(seq_lens=lens)
        ...     return cache, paged_attention(query, cache.key_cache, cache.value_cache, cache.layer_tables(0),
        ...                                   jnp.where(new > 0, lens, 0))
        >>> cache, out = step(cache, 3, [3, 2])  # prompts of 3 and 2 tokens
        >>> cache, out = step(cache, 2, [2, 1])  # a further chunk of the first, a token of the second
        >>> cache, out = step(cache, 1, [1, 0])  # the second has ended
        >>> cache.seq_lens.tolist()
        [6, 3]

    A sequence leaves by setting its length to 0 and handing its pages back (`PageAllocator.free`); another joins in its
    row with pages of its own, `cache.replace(block_tables=..., seq_lens=...)`, without a new compilation. Nothing
    needs to be cleared: what lies beyond a length is never read.

    The scales of a quantised cache are one set for each layer, and fixed while any sequence holds tokens: `calibrate`
    on the first prompt decides for all that join later, whose larger keys and values saturate. `saturation` says how
    much of a prompt would. Where prompts differ much, calibrate with a larger `margin`, or set `k_scale` and `v_scale`
    by `replace`, from representative text, before the first token. Or let each page have its own, `scale_per_page`:
    `write` sets them when it begins a page, and where later tokens of the page are larger, doubles them as often as
    they need and rounds the page again. Nothing saturates, no scale is older than its page, and all errors of a token
    are together less than a step of its page's scale, which is less than twice what the page needs.

    Methods take `layer` as an int (one out of range is an error) or as an integer scalar that may be traced: out of
    range, that one writes nothing, and what is read through it is NaN.

    Fields:
        key_cache, value_cache: pools of num_layers * num_pages pages, in `layout`.
        shared_tables: [num_seqs, max_pages] int32, ids in [0, num_pages) of every layer's pages. `create` and `replace`
            take them as `block_tables`; reading them by that name is an AttributeError where there are several layers,
            since ops want one layer's.
        seq_lens: [num_seqs] int32, tokens each sequence holds.
        k_scale, v_scale: [num_layers, num_kv_heads] float32 for a quantised dtype (value = stored * scale), else None;
            with `scale_per_page`, of all layers' pages, [num_layers * num_pages, num_kv_heads].
        scale_per_page: whether each page of a quantised cache has scales of its own.
    """

    # Transformations may put anything into a pytree's leaves (shapes, shardings), hence `| Any`.
    key_cache: KVCache | Any
    value_cache: KVCache | Any
    shared_tables: BlockTables | Any
    seq_lens: SeqLens | Any
    num_layers: int = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(default="NHD", metadata={"static": True})
    k_scale: jax.Array | Any = None
    v_scale: jax.Array | Any = None
    scale_per_page: bool = dataclasses.field(default=False, metadata={"static": True})

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
        dtype: Dtype | FloatName | Fp8Name | Literal["int8"] = jnp.bfloat16,
        layout: Layout = "NHD",
        scale_per_page: bool = False,
    ) -> "PagedKVCache":
        """An empty cache with `num_pages` pages of `page_size` tokens for each layer.

        Args:
            num_layers, num_pages, page_size, num_kv_heads, head_dim: sizes, at least 1.
            block_tables: [num_seqs, max_pages] int32, ids in [0, num_pages); -1 where a sequence has no page yet.
            seq_lens: [num_seqs] int32; None is 0 for all.
            dtype: bf16, fp16, float32, or quantised float8_e4m3fn, float8_e5m2, int8, whose scales start at 1.
            layout: order of a page's dimensions.
            scale_per_page: for a quantised dtype, scales of each page, which `write` sets; else of each layer, for
                `calibrate`.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: a wrong size or shape, an unknown layout, a dtype that caches do not have, scales without a
                quantised one, or a head_dim that "PACKED" cannot hold.
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
        check.dtype("dtype", dtype, (*DTYPES, *QUANTIZED_DTYPES))
        if layout == "PACKED" and head_dim % (x := packing(dtype)):
            fail(check.function, "head_dim", f"a multiple of x={x} for 'PACKED'", str(head_dim))
        check.array("block_tables", block_tables, ("num_seqs", "max_pages"), [jnp.int32])
        if seq_lens is None:
            seq_lens = jnp.zeros(block_tables.shape[:1], jnp.int32)
        check.array("seq_lens", seq_lens, ("num_seqs",), [jnp.int32])
        # Copies: donating the cache must not invalidate the caller's arrays.
        block_tables, seq_lens = jnp.array(block_tables), jnp.array(seq_lens)
        pool = PoolShape(num_layers * num_pages, page_size, num_kv_heads, head_dim)
        key_cache, value_cache = (
            jnp.zeros(array_shape(pool, layout, w, dtype), dtype) for w in ("key", "value")
        )
        check.flag("scale_per_page", scale_per_page)
        scales = (None, None)
        if is_quantized(dtype):  # two buffers: one could not be donated twice
            rows = pool.num_pages if scale_per_page else num_layers
            scales = tuple(jnp.ones((rows, num_kv_heads), jnp.float32) for _ in range(2))
        elif scale_per_page:
            fail(check.function, "scale_per_page", f"False for a cache of {jnp.dtype(dtype).name}", "True")
        k_scale, v_scale = scales
        return cls(
            key_cache,
            value_cache,
            block_tables,
            seq_lens,
            num_layers,
            layout,
            k_scale,
            v_scale,
            bool(scale_per_page),
        )

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
        return self.shared_tables.shape[1] * self.page_size

    def slots(self, layer: int | jax.Array, positions: jax.Array) -> jax.Array:
        """Slots, in one layer's pages, of tokens at `positions` [num_seqs, n] int32 of each sequence.

        Returns [num_seqs * n] int32 for `write_kv`; -1 where a position is negative, beyond the table, or in a
        page that the table does not name.
        """
        return self._slots(ArgumentChecker("PagedKVCache.slots"), layer, positions)

    def scales(self, layer: int | jax.Array) -> dict[str, Any]:
        """One layer's k_scale and v_scale [num_kv_heads], or those of all pages, which its tables name, as keywords of
        `paged_attention`; {} without them."""
        layer = check_layer(ArgumentChecker("PagedKVCache.scales"), layer, self.num_layers)
        if self.k_scale is None:
            return {}
        if self.scale_per_page:
            return {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return {"k_scale": of_layer(self.k_scale, layer), "v_scale": of_layer(self.v_scale, layer)}

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

        For an empty cache: while any sequence holds tokens (`seq_lens` above 0) nothing changes, since their meaning
        would; `saturation` says what that costs a prompt that joins. Without quantisation nothing changes either, nor
        where each page has scales of its own, which `write` sets.

        Args:
            layer, key, value, positions: as in `write`; tokens at negative positions do not count, nor do NaN and Inf.
            margin: a number above 0; later values beyond it saturate.

        Raises:
            TypeError, ValueError: as `write`, and a margin that is no number above 0.
        """
        check = ArgumentChecker("PagedKVCache.calibrate")
        layer = check_layer(check, layer, self.num_layers)
        key, value, positions = self._new_tokens(check, key, value, positions)
        check.positive_float("margin", margin, optional=False)
        if self.k_scale is None or self.scale_per_page:
            return self
        real = (positions >= 0)[:, :, None, None]
        keeps = jnp.any(self.seq_lens > 0) | (layer < 0)

        def fit(scales: jax.Array, new: jax.Array) -> jax.Array:
            peak = jnp.max(jnp.where(real, magnitudes(new), 0.0), axis=(0, 1, 3))
            fitted = jnp.where(peak > 0, peak * (margin / largest(self.key_cache.dtype)), 1.0)
            at = jnp.maximum(layer, 0)
            return scales.at[at].set(jnp.where(keeps, scales[at], fitted))

        return self.replace(k_scale=fit(self.k_scale, key), v_scale=fit(self.v_scale, value))

    def saturation(
        self, layer: int | jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What share of these keys and of these values is too large for the layer's scales, and would saturate.

        Args:
            layer, key, value, positions: as in `write`; tokens at negative positions do not count.

        Returns:
            Two float32 scalars in [0, 1]: of the keys' elements and of the values'. Both are 0 without quantisation
            and where each page has scales of its own, which grow; NaN for a traced layer out of range.

        Raises:
            TypeError, ValueError: as `write`.
        """
        check = ArgumentChecker("PagedKVCache.saturation")
        layer = check_layer(check, layer, self.num_layers)
        key, value, positions = self._new_tokens(check, key, value, positions)
        if self.k_scale is None or self.scale_per_page:
            return jnp.float32(0), jnp.float32(0)
        real = (positions >= 0)[:, :, None, None]
        elements = jnp.sum(real, dtype=jnp.float32) * (key.shape[2] * key.shape[3])

        def share(new: jax.Array, scale: jax.Array) -> jax.Array:
            beyond = jnp.abs(new.astype(jnp.float32)) > scale[..., None] * largest(self.key_cache.dtype)
            found = jnp.sum(beyond & real, dtype=jnp.float32) / jnp.maximum(elements, 1)
            return jnp.where(layer >= 0, found, jnp.nan)

        return share(key, of_layer(self.k_scale, layer)), share(value, of_layer(self.v_scale, layer))

    def write(
        self,
        layer: int | jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
        *,
        implementation: Implementation | None = None,
    ) -> "PagedKVCache":
        """Writes new tokens' keys and values into one layer's pages; in place under donation or in a loop's carry.

        Args:
            layer: index in [0, num_layers).
            key, value: [num_seqs, n, num_kv_heads, head_dim] of one dtype, bf16, fp16 or float32.
            positions: [num_seqs, n] int32 position of each token in its sequence. Negative ones are skipped, and so
                are those beyond the block table. `seq_lens` stays as it is.
            implementation: as in `write_kv`.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: a wrong shape, a layer out of range, or an implementation that cannot serve.
        """
        check = ArgumentChecker("PagedKVCache.write")
        layer = check_layer(check, layer, self.num_layers)
        key, value, positions = self._new_tokens(check, key, value, positions)
        dispatch.check_name(check.function, "write_kv", implementation)
        slots = token_slots(self._tables_of(layer), self.page_size, positions)
        key, value = (new.reshape(-1, *new.shape[2:]) for new in (key, value))
        updated = write(
            *(key, value, self.key_cache, self.value_cache, slots),
            **self.scales(layer),
            layout=self.layout,
            implementation=implementation,
            grows=self.scale_per_page,
        )
        names = ("key_cache", "value_cache", "k_scale", "v_scale")[: len(updated)]
        return self.replace(**dict(zip(names, updated, strict=True)))

    def _new_tokens(
        self, check: ArgumentChecker, key: Any, value: Any, positions: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Checked; outside jit they may be numpy arrays."""
        pool = pool_shape(self.value_cache, self.layout)
        check.bind(
            "cache",
            num_seqs=self.shared_tables.shape[0],
            num_kv_heads=pool.num_kv_heads,
            head_dim=pool.head_dim,
        )
        check.array("positions", positions, ("num_seqs", "n"), [jnp.int32])
        shape = ("num_seqs", "n", "num_kv_heads", "head_dim")
        check.array("key", key, shape, DTYPES)
        check.array("value", value, shape, [key.dtype])
        return jnp.asarray(key), jnp.asarray(value), jnp.asarray(positions)

    def _by_page(self) -> list[str]:
        return ["key_cache", "value_cache", *(["k_scale", "v_scale"] if self.scale_per_page else [])]


exportable(PagedKVCache)
