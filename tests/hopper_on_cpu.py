"""`implementation="cuda"` of flash attention without a GPU: what hands arrays to the kernels and takes theirs is run,
the kernels are as many lines of jnp. What the kernels themselves make is tested on the host (test_attention_*_on_host).
"""

import dataclasses

import jax.numpy as jnp

from pallas_attn._call import dispatch, hopper_backward
from pallas_attn.ops.flash_attention import api


def stand_in(monkeypatch) -> None:
    """The forward pass is plain jnp's; the backward pass is below."""
    op = api.OP.implementations
    served = dataclasses.replace(op["cuda"], fn=op["xla"].fn)
    monkeypatch.setitem(op, "cuda", served)
    monkeypatch.setitem(dispatch._OPS["flash_attention"], "cuda", served)
    monkeypatch.setitem(dispatch._DEVICES, "cuda", lambda device: None)
    monkeypatch.setitem(dispatch.installed, "cuda", lambda: None)
    monkeypatch.setattr(hopper_backward, "backward", backward)


def backward(
    query, key, value, d_out, rows, sequences, *,
    scale, left=None, right=None, offset=0, softcap=None, heads_first=False, blocks=None,
    alibi_slopes=None,
):  # fmt: skip
    """As `hopper_backward.backward` says. What rounding made of a query's sum is not taken back, since nothing is
    rounded; NaN where that sum is not the `total` that the kernel would compare it with, and where lists of queries and
    of keys do not name the same pairs."""

    def by_head(array):
        return (array if heads_first else jnp.swapaxes(array, 1, 2)).astype(jnp.float32)

    def as_given(array, like):
        return (array if heads_first else jnp.swapaxes(array, 1, 2)).astype(like.dtype)

    q, k, v, g = map(by_head, (query, key, value, d_out))
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    maximum, rest, delta, total = (row[..., None] for row in rows)
    logits, factor, slope = jnp.einsum("bhqd,bhkd->bhqk", q, k), scale, 1.0
    if softcap:
        logits = jnp.tanh(logits * scale / softcap)
        factor, slope = softcap, 1.0 - logits * logits
    ahead = jnp.arange(k.shape[2]) - (jnp.arange(q.shape[2])[:, None] + offset)
    if alibi_slopes is not None:
        logits, factor = logits * scale + alibi_slopes[:, None, None] * ahead, 1.0
    seen = jnp.ones(ahead.shape, bool)
    seen = seen if left is None else seen & (ahead >= -left)
    seen = seen if right is None else seen & (ahead <= right)
    if sequences.q_ranks is not None:
        seen = seen & (sequences.q_ranks[:, None, :, None] == sequences.k_ranks[:, None, None, :])
    if blocks is not None:
        seen = seen_by(blocks, *logits.shape[2:], by_keys=True)
    weights = jnp.where(seen, jnp.exp2((logits - maximum) * factor / jnp.log(2.0) - rest), 0.0)
    d_logits = weights * (jnp.einsum("bhqd,bhkd->bhqk", g, v) - delta)
    agrees = jnp.abs(jnp.sum(d_logits, axis=-1, keepdims=True) - total) < 0.05
    if blocks is not None:
        agrees &= seen == seen_by(blocks, *seen.shape[2:], by_keys=False)
    d_logits = jnp.where(agrees, d_logits * slope, jnp.nan)

    def of_group(x):
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2)

    d_query = jnp.einsum("bhqk,bhkd->bhqd", d_logits, k) * scale
    d_key = of_group(jnp.einsum("bhqk,bhqd->bhkd", d_logits, q)) * scale
    d_value = of_group(jnp.einsum("bhqk,bhqd->bhkd", weights, g))
    return as_given(d_query, query), as_given(d_key, key), as_given(d_value, value)


def seen_by(blocks, q_len, kv_len, *, by_keys):
    """[batch or 1, heads or 1, q_len, kv_len], by the lists of one side."""
    listed, counts = blocks.of_keys if by_keys else blocks.of_queries
    back = jnp.argsort(listed[..., 0], axis=-1)
    number = jnp.take_along_axis(listed[..., 1], back, axis=-1)
    meets = back < counts[..., None]
    if by_keys:
        number, meets = jnp.swapaxes(number, 2, 3), jnp.swapaxes(meets, 2, 3)
    bits = blocks.bits[..., None] >> jnp.arange(32) & 1
    count, rows, columns = bits.shape[:3]
    # Warps, quads, lanes of a quad; eight columns, upper or lower, left or right.
    parts = bits.reshape(count, rows, columns, 4, 8, 4, 8, 2, 2).transpose(0, 1, 3, 7, 4, 2, 6, 5, 8)
    pairs = parts.reshape(count, blocks.block_q, blocks.block_kv) > 0
    seen = meets[..., None, None] & ((number < 0)[..., None, None] | pairs[number])
    tokens = seen.shape[2] * blocks.block_q, seen.shape[3] * blocks.block_kv
    return jnp.swapaxes(seen, 3, 4).reshape(*seen.shape[:2], *tokens)[..., :q_len, :kv_len]
