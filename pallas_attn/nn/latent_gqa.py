"""Grouped-query attention through the MLA kernel, for layers whose keys and values fit in a latent.

A token's keys and values of all KV heads, side by side, are a latent of 2 * num_kv_heads * head_dim elements. A query
that is its head's query where its group's key lies, and 0 elsewhere, has the same logits as before; of the latents'
weighted sum, the output is where its group's value lies. Nothing is gained in speed, since every head reads all
heads' keys; it puts real activations, with their outliers and attention sinks, through the kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import PagedLatentCache, mla_decode
from pallas_attn._call import dispatch
from pallas_attn._call.checks import ArgumentChecker
from pallas_attn._call.optional import needs_extra
from pallas_attn._tile.latents import LATENT_DIM, QUERY_DIM
from pallas_attn.ops.kv_cache.addressing import check_layer

with needs_extra("models", user="pallas_attn.nn"):
    from flax import nnx

from ._paged import check_new_tokens
from ._prompts import FRESH, attend_to_themselves, fresh, poison_unserved


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
    """

    def __init__(self, *, scale: float | None = None, implementation: str | None = None):
        ArgumentChecker("LatentGQA").positive_float("scale", scale)
        dispatch.check_name("LatentGQA", "mla_decode", implementation)
        self.scale = scale
        self.implementation = implementation

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: PagedLatentCache,
        layer: jax.Array | int,
        positions: jax.Array,
    ) -> tuple[jax.Array, PagedLatentCache]:
        """Attends from `n` new tokens of every sequence, as `PagedAttention.__call__` does and with its arguments.

        Args:
            query: [num_seqs, n, num_heads, head_dim], rotary embedding applied, in the cache's dtype.
            key, value: [num_seqs, n, num_kv_heads, head_dim] with 2 * num_kv_heads * head_dim <= 512.
            cache: the latents of all layers; a token's are its keys, then its values, of all KV heads, then zeros.
            layer: index of this layer in the cache; an int or an integer scalar that may be traced.
            positions: [num_seqs, n] int32; with n above 1 those of fresh prompts, padded on the right. Negative for
                padding or a finished sequence, whose output is zeros when n is 1 and not meaningful otherwise. Rows
                that the module cannot serve get NaN, or are an error where positions are known.

        Returns:
            The output [num_seqs, n, num_heads, head_dim] in the query's dtype, and the cache with the new tokens in
            it; its `seq_lens` are left for the model to advance.

        Raises:
            TypeError: another cache, or dtypes that do not fit each other.
            ValueError: 2 * num_kv_heads * head_dim is more than 512, shapes do not fit each other, a layer out of
                range, positions that cannot be served, or a forced implementation that cannot serve.
        """
        check = ArgumentChecker("LatentGQA")
        check.instance("cache", cache, PagedLatentCache)
        layer = check_layer(check, layer, cache.num_layers)
        check.bind("cache", num_seqs=cache.block_tables.shape[0])
        check_new_tokens(check, query, key, value, positions, query_dtypes=[cache.latent_cache.dtype])
        query, key, value, positions = map(jnp.asarray, (query, key, value, positions))
        num_kv_heads, head_dim = key.shape[-2:]
        if 2 * num_kv_heads * head_dim > LATENT_DIM:
            got = str(2 * num_kv_heads * head_dim)
            check.fail("key", f"2 * num_kv_heads * head_dim of at most {LATENT_DIM}", got)
        if query.shape[1] > 1:
            output = attend_to_themselves(query, key, value, positions, scale=self.scale)
            output = poison_unserved(check, output, positions, layer, fresh, FRESH)
            return output, cache.write(layer, pack_latents(key, value), positions)
        cache = cache.write(layer, pack_latents(key, value), positions)
        out: Any = mla_decode(
            pack_queries(query, num_kv_heads),
            cache.latent_cache,
            cache.layer_tables(layer),
            positions[:, 0] + 1,
            scale=head_dim**-0.5 if self.scale is None else self.scale,
            implementation=self.implementation,
        )
        return unpack_outputs(out, num_kv_heads, head_dim), cache
