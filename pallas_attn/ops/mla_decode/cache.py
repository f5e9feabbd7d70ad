"""`PagedLatentCache`: the latents of a whole model as one pytree."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_attn._call import dispatch
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.options import DTYPES
from pallas_attn._call.sharding import whole
from pallas_attn._tile.latents import BYTES, FP8, QUERY_DIM, SCALES, Scales, token_width
from pallas_attn._types import BlockTables, Dtype, FloatName, Implementation, SeqLens
from pallas_attn.ops.kv_cache.layers import Layers, exportable
from pallas_attn.ops.latent_cache import write_latents
from pallas_attn.ops.latent_cache.reference import write_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLatentCache(Layers):
    """What `PagedKVCache` is to keys and values, for the one pool of `mla_decode`.

    Layer `l` owns pages [l * num_pages, (l + 1) * num_pages) of the pool, and every layer uses the same
    `shared_tables`: `layer_tables(l)` are the block tables that ops want. See `PagedKVCache` for prompts, chunks and
    decoding (here by `mla_decode` with ``causal=True``), for how sequences join and leave, and for what a `layer` may
    be.

    Fields:
        latent_cache: [num_layers * num_pages, page_size, 1, 576]: 512 latent, then 64 rotary elements a token; or
            [..., 656] uint8, the same in fp8 (see `quantize_latents`).
        shared_tables: [num_seqs, max_pages] int32, ids in [0, num_pages) of every layer's pages. `create` and `replace`
            take them as `block_tables`; reading them by that name is an AttributeError where there are several layers,
            since ops want one layer's.
        seq_lens: [num_seqs] int32, tokens each sequence holds.
        index_keys: [num_layers * num_pages, page_size, 1, index_dim], what an indexer (`nn.Indexer`) keeps of a token,
            in the same slots; None in models without one.
    """

    # A pytree's leaves may be anything a transformation puts there (shapes, shardings), hence `| Any`.
    latent_cache: jax.Array | Any
    shared_tables: BlockTables | Any
    seq_lens: SeqLens | Any
    num_layers: int = dataclasses.field(metadata={"static": True})
    scales: Scales = dataclasses.field(default="power_of_two", metadata={"static": True})
    """How the scales of an fp8 cache are chosen."""
    index_keys: jax.Array | Any = None

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        block_tables: BlockTables,
        dtype: Dtype | FloatName | Literal["float8_e4m3fn"] = jnp.bfloat16,
        scales: Scales = "power_of_two",
        index_dim: int | None = None,
    ) -> "PagedLatentCache":
        """An empty cache with `num_pages` pages of `page_size` tokens for each layer.

        Args:
            num_layers, num_pages, page_size: sizes, at least 1.
            block_tables: [num_seqs, max_pages] int32, ids in [0, num_pages); -1 where a sequence has no page yet.
            dtype: bf16, fp16 or float32; or float8_e4m3fn, for a pool of 656 bytes a token.
            scales: of an fp8 cache, "exact" or "power_of_two"; see `quantize_latents`.
            index_dim: elements of an index key, at least 1; None for no such keys. Beside fp8 latents they are bf16.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: a wrong size or shape, unknown scales, or a dtype that latent caches do not have.
        """
        check = ArgumentChecker("PagedLatentCache.create")
        for name, size in (("num_layers", num_layers), ("num_pages", num_pages), ("page_size", page_size)):
            check.count(name, size)
        check.array("block_tables", block_tables, ("num_seqs", "max_pages"), [jnp.int32])
        check.dtype("dtype", dtype, (*DTYPES, FP8))
        dtype = jnp.dtype(dtype)  # so that a name compares equal to the type
        check.one_of("scales", scales, SCALES)
        if index_dim is not None:
            check.count("index_dim", index_dim)
        stored, index_dtype = (BYTES, jnp.bfloat16) if dtype == FP8 else (dtype, dtype)
        slots = (num_layers * num_pages, page_size, 1)
        pool = jnp.zeros((*slots, token_width(stored)), stored)
        index_keys = None if index_dim is None else jnp.zeros((*slots, index_dim), index_dtype)
        # A copy: donating the cache must not invalidate the caller's array.
        tables, seq_lens = jnp.array(block_tables), jnp.zeros(block_tables.shape[:1], jnp.int32)
        return cls(pool, tables, seq_lens, num_layers, scales, index_keys)

    @property
    def num_pages(self) -> int:
        """Pages of one layer."""
        return self.latent_cache.shape[0] // self.num_layers

    @property
    def page_size(self) -> int:
        return self.latent_cache.shape[1]

    def write(
        self,
        layer: int | jax.Array,
        latents: jax.Array,
        positions: jax.Array,
        *,
        implementation: Implementation | None = None,
    ) -> "PagedLatentCache":
        """Writes new tokens' latents into one layer's pages; in place under donation or in a loop's carry.

        Args:
            layer: index in [0, num_layers).
            latents: [num_seqs, n, 576] bf16, fp16 or float32; cast to the cache's dtype, or quantised.
            positions: [num_seqs, n] int32 position of each token in its sequence. Negative ones are skipped, and so
                are those beyond the block table. `seq_lens` stays as it is.
            implementation: as in `write_latents`; None takes "xla" for a cache that is not quantised.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: a wrong shape, a layer out of range, or an implementation that cannot serve.
        """
        check = ArgumentChecker("PagedLatentCache.write")
        dispatch.check_name(check.function, "write_latents", implementation)
        slots = self._slots(check, layer, positions)
        check.array("latents", latents, ("num_seqs", "n", QUERY_DIM), DTYPES)
        # XLA's scatter writes rows of plain elements as fast as a kernel.
        chosen = implementation or (None if self.latent_cache.dtype == BYTES else "xla")
        pool = write_latents(
            jnp.asarray(latents).reshape(slots.size, QUERY_DIM),
            self.latent_cache,
            slots,
            scales=self.scales,
            implementation=chosen,
        )
        return self.replace(latent_cache=pool)

    def write_index_keys(
        self, layer: int | jax.Array, keys: jax.Array, positions: jax.Array
    ) -> "PagedLatentCache":
        """As `write`, of index keys [num_seqs, n, index_dim] bf16, fp16 or float32, cast to their pool's dtype.

        Raises:
            TypeError, ValueError: as in `write`; ValueError also for a cache without index keys.
        """
        check = ArgumentChecker("PagedLatentCache.write_index_keys")
        if self.index_keys is None:
            check.fail("cache", "one with index keys (create's index_dim)", "one without")
        slots = self._slots(check, layer, positions)
        check.array("keys", keys, ("num_seqs", "n", self.index_keys.shape[-1]), DTYPES)
        rows = whole(jnp.asarray(keys), 2).reshape(slots.size, -1)
        return self.replace(index_keys=write_rows(rows, self.index_keys, whole(slots, 1)))

    def _by_page(self) -> list[str]:
        return ["latent_cache", *([] if self.index_keys is None else ["index_keys"])]


exportable(PagedLatentCache)
