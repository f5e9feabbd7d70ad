"""Grouped-query attention through the MLA kernel, for layers whose keys and values fit in a latent.

A token's keys and values of all KV heads, side by side, are a latent of 2 * num_kv_heads * head_dim elements. A query
that is its head's query where its group's key lies, and 0 elsewhere, has the same logits as before; of the latents'
weighted sum, the output is where its group's value lies. It gains no speed, since every head reads all heads' keys; it
tests the kernel with real activations, with their outliers and attention sinks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import PagedLatentCache, mla_decode
from pallas_attn._call import dispatch
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.optional import needs_extra
from pallas_attn._tile.latents import LATENT_DIM, QUERY_DIM
from pallas_attn._types import ImplementationOrCuda
from pallas_attn.ops.kv_cache.addressing import check_layer

with needs_extra("models", user="pallas_attn.nn"):
    from flax import nnx

from ._new_tokens import NewTokens, is_ragged
from ._paged import check_new_tokens


def pack_latents(key: jax.Array, value: jax.Array) -> jax.Array:
    """[..., num_kv_heads, head_dim] keys and values as [..., 576] latents: keys, values, zeros."""
    flat = [x.reshape(*x.shape[:-2], -1) for x in (key, value)]
    latent = jnp.concatenate(flat, axis=-1)
    return jnp.pad(latent, [(0, 0)] * (latent.ndim - 1) + [(0, QUERY_DIM - latent.shape[-1])])


def pack_queries(query: jax.Array, num_kv_heads: int) -> jax.Array:
    """[..., num_heads, head_dim] queries as [..., num_heads, 576]: each in its group's key slot."""
    num_heads, head_dim = query.shape[-2:]
    slot = jnp.arange(num_heads) // (num_heads // num_kv_heads)
    placed = query[..., None, :] * jax.nn.one_hot(slot, num_kv_heads, dtype=query.dtype)[:, :, None]
    placed = placed.reshape(*query.shape[:-1], num_kv_heads * head_dim)
    return jnp.pad(placed, [(0, 0)] * (placed.ndim - 1) + [(0, QUERY_DIM - placed.shape[-1])])


def unpack_outputs(out: jax.Array, num_kv_heads: int, head_dim: int) -> jax.Array:
    """[..., num_heads, 512] sums of latents to [..., num_heads, head_dim]: each head's group's value slot."""
    values = out[..., num_kv_heads * head_dim : 2 * num_kv_heads * head_dim]
    values = values.reshape(*out.shape[:-1], num_kv_heads, head_dim)
    num_heads = out.shape[-2]
    slot = jnp.arange(num_heads) // (num_heads // num_kv_heads)
    slot = slot.reshape((1,) * (out.ndim - 2) + (num_heads, 1, 1))
    return jnp.take_along_axis(values, slot, axis=-2)[..., 0, :]


class LatentGQA(nnx.Module):
    """`PagedAttention` over a `PagedLatentCache`, by `mla_decode`.

    Args:
        scale: factor of the scores before the softmax, above 0; ``None`` means ``head_dim ** -0.5``.
        implementation: which implementation of `mla_decode` to force; ``None`` picks the best available.
        batch_invariant: a token's output has the same bits, given the same query and latents, whatever else is in the
            batch, and in whichever form and chunks its sequence came: `mla_decode(batch_invariant=True)` serves each
            token by itself, those of fresh prompts too. Neither with "cuda" nor with "xla".
    """

    def __init__(
        self,
        *,
        scale: float | None = None,
        implementation: ImplementationOrCuda | None = None,
        batch_invariant: bool = False,
    ):
        check = ArgumentChecker("LatentGQA")
        check.positive_float("scale", scale)
        check.flag("batch_invariant", batch_invariant)
        dispatch.check_name("LatentGQA", "mla_decode", implementation)
        self.scale, self.batch_invariant = scale, bool(batch_invariant)
        self.implementation: ImplementationOrCuda | None = implementation

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: PagedLatentCache,
        layer: jax.Array | int,
        positions: jax.Array | NewTokens,
        *,
        cu_q_lens: jax.Array | None = None,
    ) -> tuple[jax.Array, PagedLatentCache]:
        """Attends from the new tokens of every sequence, as `PagedAttention.__call__` does and with its arguments.

        Args:
            query: [num_seqs, n, num_heads, head_dim] or [total_tokens, num_heads, head_dim], rotary embedding applied,
                in the cache's dtype.
            key, value: [..., num_kv_heads, head_dim] with 2 * num_kv_heads * head_dim <= 512.
            cache: the latents of all layers; a token's are its keys, then its values, of all KV heads, then zeros.
            layer: index of this layer in the cache; an int or an integer scalar that may be traced.
            positions: [num_seqs, n] or [total_tokens] int32; those of a sequence follow each other. Negative for
                padding or a finished sequence, whose output is not meaningful. Rows that do not follow this get NaN, or
                are an error where positions are known.
            cu_q_lens: [num_seqs + 1] int32, for the ragged form; where a traced one descends all tokens are padding.

        Returns:
            The output in the query's shape and dtype, and the cache with the new tokens in it; its `seq_lens` are left
            for the model to advance.

        Raises:
            TypeError: another cache, or dtypes that do not fit each other.
            ValueError: 2 * num_kv_heads * head_dim is more than 512, shapes do not fit each other, a layer out of
                range, positions that cannot be served, or a forced implementation that cannot serve.
        """
        check = ArgumentChecker("LatentGQA")
        check.instance("cache", cache, PagedLatentCache)
        layer = check_layer(check, layer, cache.num_layers)
        check.bind("cache", num_seqs=cache.shared_tables.shape[0])
        dtypes = [cache.latent_cache.dtype]
        check_new_tokens(
            check, query, key, value, positions, cu_q_lens, query_dtypes=dtypes, key_dtypes=dtypes
        )
        query, key, value = map(jnp.asarray, (query, key, value))
        num_kv_heads, head_dim = key.shape[-2:]
        if 2 * num_kv_heads * head_dim > LATENT_DIM:
            got = str(2 * num_kv_heads * head_dim)
            check.fail("key", f"2 * num_kv_heads * head_dim of at most {LATENT_DIM}", got)

        def attend(cache: PagedLatentCache, query: jax.Array, positions: jax.Array) -> jax.Array:
            """Attends from one token of each of the cache's sequences."""
            out: Any = mla_decode(
                pack_queries(query, num_kv_heads),
                cache.latent_cache,
                cache.layer_tables(layer),
                positions + 1,
                scale=head_dim**-0.5 if self.scale is None else self.scale,
                implementation=self.implementation,
                batch_invariant=self.batch_invariant,
            )
            return unpack_outputs(out, num_kv_heads, head_dim)

        latents = pack_latents(key, value)
        if not is_ragged(positions, cu_q_lens) and query.shape[1] == 1:
            positions = jnp.asarray(positions)
            cache = cache.write(layer, latents, positions)
            return attend(cache, query, positions[:, 0]), cache
        new = positions if isinstance(positions, NewTokens) else NewTokens.of(check, positions, cu_q_lens)
        paged, within = new.pages(cache)
        paged = paged.write(layer, new.pack(latents)[:, None], within)
        cache = paged.replace(block_tables=cache.shared_tables)

        def from_pages() -> jax.Array:
            out = attend(new.by_token(cache), new.pack(query)[:, None], new.positions)
            return new.unpack(out[:, 0], layer, query)

        if new.order is None or self.batch_invariant:
            return from_pages(), cache
        out = jax.lax.cond(
            new.fresh & (layer >= 0),
            lambda: attend_to_themselves(query, key, value, scale=self.scale),
            from_pages,
        )
        return out, cache


def attend_to_themselves(
    query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float | None
) -> jax.Array:
    """Dense causal attention of whole prompts [num_seqs, n, heads, head_dim], padded on the right, which needs no
    pages.

    Padding follows the real tokens, so the causal mask alone hides it from them.
    """
    # float32 inputs mean float32 products: on a GPU the default would be TF32.
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=True)
